"""The options of the data source: what is taken, what is refused, and that secrets are not shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import conninfo_to_dict

from conftest import Role
from pgque.errors import PgqueBadArgumentError
from pgque.spark import _connect, options
from pgque.spark.options import BATCH_READ, BATCH_WRITE, OPTIONS, STREAM_READ, STREAM_WRITE, parse
from sql.helpers import Connection, forced_tick, send

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
    if option.default == "10000" or option.default.isdecimal():
        assert found == int(option.default)
    elif option.default in {"true", "false"}:
        assert found is (option.default == "true")
    elif option.name in {"delivery", "payloadFormat", "badRecords", "endingAt", "onFull", "spread"}:
        assert found == option.default
    else:
        assert not found


@pytest.mark.parametrize("mode", [BATCH_READ, STREAM_READ, BATCH_WRITE, STREAM_WRITE])
def test_an_unknown_option_is_refused_by_name_with_the_known_ones(mode: str) -> None:
    told = refused({**STREAM, "qeue": "x"}, mode) if mode == STREAM_READ else refused({"qeue": "x"}, mode)
    assert "unknown option qeue" in told
    assert "queue" in told


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
        ("fetchSize", "-1"),
        ("maxTicksPerTrigger", "1.5"),
        ("pollIntervalMs", "-1"),
        ("includeHeaders", "yes"),
        ("payloadFormat", "json"),
        ("types", ""),
        ("types", "a,,b"),
        ("types", "[1]"),
        ("types", "[oops"),
        ("startingAt", ""),
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
    assert "cannot be committed" in refused({"queue": "q", "startingAt": "committed"}, BATCH_READ)


def test_the_table_prints_every_option_and_breaks_no_line() -> None:
    lines = options.markdown().splitlines()
    assert len(lines) == len(OPTIONS) + 2
    assert all(line.count("|") == 6 for line in lines)


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


def test_a_stream_without_a_consumer_is_refused(
    spark: SparkSession, reader: Role, queue: str, scratch: Path, tmp_path: Path
) -> None:
    frame = spark.readStream.format("pgque").options(url=reader.dsn, queue=queue).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(Exception, match="option consumer is missing"):
        query.processAllAvailable()
