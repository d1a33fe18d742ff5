"""The options of the data source: what is taken, what is refused, and that secrets are not shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from conftest import Role
from pgque.errors import PgqueBadArgumentError
from pgque.spark import _connect, options, queues
from pgque.spark.options import BATCH_READ, BATCH_WRITE, OPTIONS, STREAM_READ, STREAM_WRITE, parse
from sql.helpers import Connection, forced_tick, send, subscribe, value

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STREAM = {"queue": "q", "consumer": "c"}


def refused(given: dict[str, str], *modes: str) -> str:
    with pytest.raises(PgqueBadArgumentError) as caught:
        parse(given, *modes)
    return str(caught.value)


def test_names_are_taken_in_any_case() -> None:
    given = {"QUEUE": "Q", "Consumer": "c", "MAXEVENTSPERTRIGGER": "5", "maxTicksPerTrigger": "7"}
    parsed = parse(given, STREAM_READ)
    assert (parsed.queue, parsed.maxEventsPerTrigger, parsed.maxTicksPerTrigger) == ("Q", 5, 7)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: f"{option.name} {min(option.modes)}")
def test_every_default_is_the_one_in_the_table(option: options.Option) -> None:
    found = getattr(options.Options(), option.name, None)
    if option.name == "fetchSize":
        assert found is None  # it depends on the size of the messages
    elif option.default.isdecimal():
        assert found == int(option.default)
    elif option.default in {"true", "false"}:
        assert found is (option.default == "true")
    elif option.name in {
        "delivery",
        "payloadFormat",
        "badRecords",
        "endingAt",
        "onFull",
        "spread",
        "splitBy",
    }:
        assert found == option.default
    else:
        assert not found


@pytest.mark.parametrize("mode", [BATCH_READ, STREAM_READ, BATCH_WRITE, STREAM_WRITE])
def test_an_unknown_option_is_refused_by_name_with_the_known_ones(mode: str) -> None:
    told = refused({**STREAM, "qeue": "x"}, mode) if mode == STREAM_READ else refused({"qeue": "x"}, mode)
    assert "unknown option qeue" in told
    assert "queue" in told


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("startingoffsets", "startingAt"),
        ("maxoffsetspertrigger", "maxEventsPerTrigger"),
        ("minpartitions", "numPartitions"),
        ("nonsense", None),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_is_like_it(given: str, meant: str | None) -> None:
    told = refused({**STREAM, given: "1"}, STREAM_READ)
    assert told.startswith(
        f"unknown option {given}, did you mean {meant}?" if meant else f"unknown option {given}; known"
    )


def test_a_time_limit_of_waiting_is_refused_if_nothing_waits() -> None:
    assert (
        refused({"queue": "q", "onFullTimeout": "5"}, BATCH_WRITE) == "option onFullTimeout needs onFull=wait"
    )
    assert parse({"queue": "q", "onFull": "wait", "onFullTimeout": "5"}, BATCH_WRITE).onFullTimeout == 5


def test_an_option_out_of_place_is_an_error_that_names_its_place() -> None:
    assert refused({"queue": "q", "maxEventsPerTrigger": "1"}, BATCH_READ) == (
        "option maxEventsPerTrigger is for stream read, not for batch read"
    )
    assert "batch write and stream write" in refused({**STREAM, "delivery": "exactly-once"}, STREAM_READ)
    assert "option('queue'" in refused({"path": "/x"}, BATCH_READ)


def test_a_micro_batch_that_waits_needs_options_that_can_apply() -> None:
    few = {**STREAM, "minEventsPerTrigger": "10"}
    for text, seconds in (("500ms", 0.5), ("90 s", 90), ("15M", 900), ("2h", 7200)):
        assert parse({**few, "maxTriggerDelay": text}, STREAM_READ).maxTriggerDelay == seconds
    assert "such as 90s or 15m, not '90'" in refused({**few, "maxTriggerDelay": "90"}, STREAM_READ)
    assert "maxTriggerDelay needs minEventsPerTrigger" in refused(
        {**STREAM, "maxTriggerDelay": "1s"}, STREAM_READ
    )
    assert "above maxEventsPerTrigger" in refused({**few, "maxEventsPerTrigger": "9"}, STREAM_READ)
    for most in ("10", "all"):
        assert parse({**few, "maxEventsPerTrigger": most}, STREAM_READ).minEventsPerTrigger == 10
    assert "or all, not '0'" in refused({**STREAM, "maxEventsPerTrigger": "0"}, STREAM_READ)


def test_sparks_own_options_pass() -> None:
    assert parse({"queue": "q", "checkpointLocation": "/x"}, STREAM_WRITE).queue == "q"


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("numPartitions", "0"),
        ("numPartitions", "many"),
        ("numPartitions", "2147483648"),
        ("maxEventsPerTrigger", "9" * 30),
        ("fetchSize", "9" * 5000),
        ("fetchSize", "-1"),
        ("maxTicksPerTrigger", "1.5"),
        ("pollIntervalMs", "-1"),
        ("includeHeaders", "yes"),
        ("payloadFormat", "json"),
        ("types", ""),
        ("types", "a,,b"),
        ("types", "[1]"),
        ("types", "[oops"),
        ("pollIntervalMs", "9223372036854775808"),
        ("startingAt", ""),
        ("startingAt", "lastest"),
        ("queue", ""),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, bad: str) -> None:
    assert f"option {name} must be" in refused({**STREAM, name: bad}, STREAM_READ)


def test_lists_of_types_have_two_forms() -> None:
    assert parse({"queue": "q", "types": "a, b c ,d"}, BATCH_READ).types == ("a", "b c", "d")
    assert parse({"queue": "q", "types": ' ["a,b", "c"]'}, BATCH_READ).types == ("a,b", "c")


def test_what_is_needed_is_asked_for() -> None:
    assert "option queue is missing" in refused({}, BATCH_READ)
    assert "option consumer is missing" in refused({"queue": "q"}, STREAM_READ)
    assert "need each other" in refused({"epoch": "1"}, BATCH_WRITE)
    assert "exactly-once" in refused({"epoch": "1", "sinkId": "s", "delivery": "at-least-once"}, BATCH_WRITE)
    assert "option startingAt must be earliest, latest" in refused(
        {"queue": "q", "startingAt": "committed"}, BATCH_READ
    )


def test_places_of_a_queue_are_words_ticks_and_times() -> None:
    for good in ("Earliest", "17", "2026-11-25 12:00+00", "yesterday"):
        assert parse({"queue": "q", "startingAt": good, "endingAt": good}, BATCH_READ).endingAt == good
    assert "option endingAt must be" in refused({"queue": "q", "endingAt": "archive"}, BATCH_READ)
    assert "option startingAt must be" in refused({"queue": "q", "startingAt": "archive"}, BATCH_READ)


def test_an_option_of_streams_makes_it_a_stream_where_that_is_not_known_yet() -> None:
    given = {"queue": "q", "maxEventsPerTrigger": "5"}
    assert refused(given, BATCH_READ, STREAM_READ) == (
        "option maxEventsPerTrigger is for stream read, not for batch read, and option consumer is missing: a"
        " stream needs a consumer of its own"
    )
    # A place is right for one of both, and the reader knows which.
    for place in ("committed", "archive", "earliest"):
        assert parse({"queue": "q", "startingAt": place}, BATCH_READ, STREAM_READ).startingAt == place
    given = {"queue": "q", "startingAt": "lastest"}
    assert "must be committed, latest" in refused(given, BATCH_READ, STREAM_READ)


def test_an_option_is_named_as_the_table_has_it() -> None:
    assert "option includeHeaders is for" in refused({"queue": "q", "includeheaders": "true"}, BATCH_WRITE)


def test_the_table_prints_every_option_and_breaks_no_line() -> None:
    lines = options.markdown().splitlines()
    assert len(lines) == len(OPTIONS) + 2
    assert all(line.count("|") == 6 for line in lines)


# --- Queues -------------------------------------------------------------------------------------------


def test_queues_are_a_frame_with_rights_and_lag_and_consumers(
    spark: SparkSession, dsn: str, conn: Connection, queue: str, roles: Callable[..., Role]
) -> None:
    value(conn, "select pgque.create_queue(%s)", f"{queue}_other")
    start = forced_tick(conn, queue)
    subscribe(conn, queue, "a")
    send(conn, queue, "x")
    end = forced_tick(conn, queue)
    subscribe(conn, queue, "b")
    role, sender = roles(), roles("writer")
    value(conn, "select pgque.grant_queue(%s, %s, 'consume')", queue, role.name)

    def seen(given: str) -> dict[str, Any]:
        frame = queues(spark, url=given).where(f"queue like '{queue}%'")
        return {row.queue: row.asDict(recursive=True) for row in frame.collect()}

    (found,) = seen(role.dsn).values()
    lags = [found.pop("lag"), *(one.pop("lag") for one in found["consumers"])]
    assert found == {
        "queue": queue,
        "read": True,
        "write": False,
        "admin": False,
        "paused": False,
        "tick_id": end,
        "pending": 1,
        "consumers": [
            {"consumer": "a", "tick_id": start, "pending": 1},
            {"consumer": "b", "tick_id": end, "pending": 0},
        ],
    }
    assert lags[0] == lags[1] > lags[2] == 0
    admin = seen(dsn)
    assert sorted(admin) == [queue, f"{queue}_other"]
    assert (admin[f"{queue}_other"]["admin"], admin[f"{queue}_other"]["consumers"]) == (True, [])
    sees_none = seen(sender.dsn)[queue]
    assert (sees_none["write"], sees_none["read"], sees_none["pending"]) == (True, False, None)
    with pytest.raises(PgqueBadArgumentError, match="unknown connection option queue"):
        queues(spark, queue=queue)


# --- Connections --------------------------------------------------------------------------------------


def test_a_url_has_three_forms_and_what_stands_beside_goes_before_it() -> None:
    wanted = {"host": "h", "port": "5", "dbname": "d", "user": "u", "password": "p w"}
    for url in (
        "postgresql://u:p%20w@h:5/d",
        "host=h port=5 dbname=d user=u password='p w'",
        "jdbc:postgresql://h:5/d?user=u&password=p%20w&reWriteBatchedInserts=true",
    ):
        assert _connect.parameters({"url": url}) == wanted
        assert _connect.parameters({"url": url, "password": "other"})["password"] == "other"


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:s3cret@h:5/d?nonsense=1", "host=h s3cret", "jdbc:mysql://u:s3cret@h/d", "jdbc:s3cret"],
)
def test_a_url_that_is_none_is_not_shown(url: str) -> None:
    with pytest.raises(PgqueBadArgumentError) as caught:
        _connect.parameters({"url": url})
    assert "s3cret" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_no_option_of_a_connection_is_shown() -> None:
    parsed = parse({**STREAM, "url": "postgresql://u:s3cret@h/d", "password": "s3cret"}, STREAM_READ)
    assert "s3cret" not in repr(parsed)
    assert "s3cret" not in refused({**STREAM, "password": "s3cret", "oops": "1"}, STREAM_READ)


def test_jdbc_has_the_password_in_its_properties() -> None:
    url, properties = _connect.jdbc({"url": "postgresql://u:s3cret@h:6/a%20b?sslmode=require"}, "name")
    assert url.startswith("jdbc:postgresql://h:6/a%20b?")
    assert "reWriteBatchedInserts=true&logServerErrorDetail=false" in url
    assert "s3cret" not in url
    assert properties == {"user": "u", "password": "s3cret", "sslmode": "require"}


def test_jdbc_takes_several_hosts() -> None:
    url, _ = _connect.jdbc({"url": "postgresql://a:1,[::1]:2/d"}, "name")
    assert url.startswith("jdbc:postgresql://a:1,[::1]:2/d?")


@pytest.mark.parametrize("given", [{"host": "/tmp"}, {"service": "x"}])  # noqa: S108
def test_jdbc_refuses_what_it_cannot_do(given: dict[str, str]) -> None:
    with pytest.raises(PgqueBadArgumentError, match="JDBC knows no"):
        _connect.jdbc(given, "name")


def test_a_connection_can_be_given_in_pieces(
    spark: SparkSession, reader: Role, conn: Connection, queue: str
) -> None:
    send(conn, queue, "x")
    forced_tick(conn, queue)
    pieces = {k: str(v) for k, v in conninfo_to_dict(reader.dsn).items() if v is not None}
    assert {"host", "port", "dbname", "user", "password"} <= set(pieces)
    frame = spark.read.format("pgque").options(**pieces).option("queue", queue).load()
    assert [row.payload for row in frame.collect()] == ["x"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nonsense": "1"}, "unknown option nonsense"),
        ({"numPartitions": "none"}, "option numPartitions must be"),
        ({"delivery": "exactly-once"}, "is for batch write and stream write"),
    ],
)
def test_spark_shows_what_is_wrong(
    spark: SparkSession, reader: Role, given: dict[str, str], told: str
) -> None:
    with pytest.raises(Exception, match=re.escape(told)):
        spark.read.format("pgque").options(url=reader.dsn, queue="q", **given).load()


def test_a_path_is_refused(spark: SparkSession, reader: Role) -> None:
    with pytest.raises(Exception, match="pgque has no path"):
        spark.read.format("pgque").options(url=reader.dsn, queue="q").load("somewhere")


def test_a_time_that_is_none_names_the_option(spark: SparkSession, reader: Role, queue: str) -> None:
    frame = spark.read.format("pgque").options(url=reader.dsn, queue=queue, startingAt="2026-13-01").load()
    with pytest.raises(Exception, match="option startingAt or endingAt: cannot start at '2026-13-01'"):
        frame.collect()


def test_a_stream_without_a_consumer_is_refused_by_load_if_an_option_is_of_streams(
    spark: SparkSession, reader: Role
) -> None:
    # Without such an option, Spark's load() does not tell the source that it is for a stream.
    given = spark.readStream.format("pgque").options(url=reader.dsn, queue="q", badRecords="keep")
    with pytest.raises(Exception, match="option consumer is missing"):
        given.load()


def test_a_stream_without_a_consumer_is_refused(
    spark: SparkSession, reader: Role, queue: str, scratch: Path, tmp_path: Path
) -> None:
    frame = spark.readStream.format("pgque").options(url=reader.dsn, queue=queue).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(Exception, match="option consumer is missing"):
        query.processAllAvailable()
