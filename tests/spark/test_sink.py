"""Writing queues with Spark: what arrives, what is refused, and that a replay is sent once."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import pgque.spark
from conftest import Role
from pgque.errors import PgqueBadArgumentError, PgqueConsumerNotFoundError, PgqueSinkEpochError
from sql.helpers import Connection, forced_tick, payloads, receive, rows, send, send_many, subscribe, value
from support import pgbouncer
from support.silent import COMMIT, silent_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPARK_CONF = {"spark.master": "local[2,2]"}  # a failed task is run once more
EVENT_LOG = True

NASTY = [
    "",
    " ",
    '"',
    '""',
    "'",
    "\\",
    "\\N",
    "\\.",
    "a\n\\.\nb",
    "\n",
    "\r\n",
    "\r",
    "a,b;c\td",
    ",",
    '"quoted",\n"twice"',
    "é ü 🐘 \u2028 \ufeff",
    "NULL",
    "\\x00",
    "x" * 70_000,
]


@pytest.fixture
def queue(conn: Connection, queue: str) -> str:
    """A queue with a consumer c."""
    subscribe(conn, queue)
    return queue


@pytest.fixture(autouse=True)
def _no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def write(frame: DataFrame, role: Role, queue: str | None, mode: str = "append", **given: object) -> None:
    options = {"url": role.dsn, **{k: str(v) for k, v in given.items()}}
    if queue is not None:
        options["queue"] = queue
    frame.write.format("pgque").options(**options).mode(mode).save()


def numbers(spark: SparkSession, count: int, parts: int = 2) -> DataFrame:
    return spark.range(0, count, 1, parts).selectExpr("cast(id as string) as payload")


def arrived(conn: Connection, queue: str) -> Counter[str | None]:
    """Receive everything that was committed; count the payloads."""
    forced_tick(conn, queue)
    return Counter(payloads(conn, queue, count=50_000))


def counted(count: int) -> Counter[str | None]:
    return Counter(str(n) for n in range(count))


def failure(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Expect the call to fail; return all that Spark tells."""
    with pytest.raises(Exception) as caught:
        call(*args, **options)
    return str(caught.value)


def newest_spark() -> bool:
    import pyspark

    return tuple(int(part) for part in pyspark.__version__.split(".")[:2]) >= (4, 2)


def event_xids(conn: Connection, queue: str) -> list[Any]:
    return rows(
        conn,
        "select distinct e.ev_txid from pgque.event as e join pgque.queue as q on e.slot / 3 = q.queue_id"
        " where q.queue_name = %s",
        queue,
    )


# --- What arrives -------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_every_column_reaches_the_message(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, delivery: str
) -> None:
    frame = spark.sql(
        "select 'order.created' as Type, 'text ✓ 🐘' as PAYLOAD, map('trace', 'a\"1\\n', 'none', null) as headers,"
        " 'customer 7' as key union all select null, 'second', null, null"
    ).coalesce(1)
    write(frame, writer, queue, delivery=delivery)
    forced_tick(conn, queue)
    first, second = receive(conn, queue)
    assert (first.type, first.payload, first.extra1) == ("order.created", "text ✓ 🐘", "customer 7")
    assert first.headers == {"trace": 'a"1\n', "none": None}
    assert (second.type, second.payload, second.extra1, second.headers) == ("default", "second", None, None)


OPTION_FRAME = (
    "select 'a' as payload, 'k' as key, null as delay, null as deliver_at, '1 day' as ttl, 'p' as partition_key"
    " union all select 'b', 'k', null, null, '0', null"
    " union all select 'c', null, 3600.5, null, null, null"
    " union all select 'd', null, null, timestamp '2000-01-01 00:00:00', null, null"
    " union all select 'e', null, null, timestamp '2099-01-01 00:00:00', null, null"
)


def test_a_delay_of_zero_and_a_time_in_any_zone_are_sent(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "GMT+3")  # which Arrow does not know
    try:
        write(spark.sql("select 'now' as payload, cast(0 as decimal(38, 18)) as delay"), writer, queue)
        frame = spark.sql("select 'later' as payload, timestamp '2099-01-01 03:00:00' as deliver_at")
        write(frame, writer, queue)
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    forced_tick(conn, queue)
    assert [m.payload for m in receive(conn, queue)] == ["now"]
    found = rows(conn, "select ev_data, ev_retry_after = '2099-01-01 00:00:00+00' from pgque.retry_queue")
    assert ("later", True) in found


def test_texts_are_intervals_also_where_spark_sends_large_strings(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        write(spark.sql("select 'a' as payload, '1 hour' as ttl, map('h', '1') as headers"), writer, queue)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
    forced_tick(conn, queue)
    assert [(m.payload, m.headers) for m in receive(conn, queue)] == [("a", {"h": "1"})]


@pytest.mark.parametrize("way", ["exactly-once", "at-least-once", "jdbc"])
def test_options_of_send_are_columns(
    spark: SparkSession, jdbc: Any, writer: Role, conn: Connection, queue: str, way: str
) -> None:
    frame = spark.sql(OPTION_FRAME).coalesce(1)
    if way == "jdbc":
        pgque.spark.write_jdbc(frame, queue, replace_by_key=True, **way_in(jdbc))
    else:
        write(frame, writer, queue, delivery=way, replaceByKey="true")
    forced_tick(conn, queue)
    found = {(m.payload, m.key, m.extra1, m.expires_at is None) for m in receive(conn, queue)}
    assert found == {("b", "k", None, True), ("d", None, None, True)}
    waiting = rows(
        conn,
        "select r.ev_data, round(extract(epoch from least(r.ev_retry_after - r.ev_time, '1 day')))::int"
        " from pgque.retry_queue as r join pgque.queue as q on q.queue_id = r.ev_queue where q.queue_name = %s"
        " order by 1",
        queue,
    )
    assert waiting in ([("c", 3600), ("e", 86400)], [("c", 3601), ("e", 86400)])


def test_texts_and_bytes_of_every_kind_survive(
    spark: SparkSession, roles: Callable[..., Role], conn: Connection, queue: str
) -> None:
    both = roles("reader", "writer")
    values = [(text, text or None, {"h": text}) for text in NASTY]
    schema = "payload string, key string, headers map<string,string>"
    write(spark.createDataFrame(values, schema).coalesce(1), both, queue, batchSize=3)
    raw = [b"", b"\x00", bytes(range(256)), b"\\x41"]
    write(spark.createDataFrame([(bytearray(r),) for r in raw], "payload binary").coalesce(1), both, queue)
    forced_tick(conn, queue)
    found = receive(conn, queue)
    texts, blobs = found[: len(NASTY)], found[len(NASTY) :]
    assert [m.payload for m in texts] == NASTY
    assert [m.extra1 for m in texts] == [text or None for text in NASTY]
    assert [m.headers["h"] for m in texts] == NASTY
    assert [(m.payload, m.payload_bytes) for m in blobs] == [(None, r) for r in raw]
    # And back through the source.
    read = spark.read.format("pgque").options(url=both.dsn, queue=queue, payloadFormat="binary").load()
    again = [bytes(row.payload) for row in read.coalesce(1).orderBy("msg_id").collect()]
    assert again == [text.encode() for text in NASTY] + raw


def test_an_empty_string_is_no_null(spark: SparkSession, writer: Role, conn: Connection, queue: str) -> None:
    frame = spark.sql(
        "select '' as payload, '' as key, '' as type union all select 'x', null, null"
    ).coalesce(1)
    write(frame, writer, queue)
    forced_tick(conn, queue)
    assert [(m.payload, m.extra1, m.type) for m in receive(conn, queue)] == [
        ("", "", ""),
        ("x", None, "default"),
    ]


@pytest.mark.parametrize("kind", ["string", "binary"])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once", "jdbc"])
def test_a_null_payload_is_sent_as_null_by_every_way(
    spark: SparkSession, writer: Role, jdbc: Any, conn: Connection, queue: str, delivery: str, kind: str
) -> None:
    frame = spark.sql(
        f"select cast(p as {kind}) as payload from values (0, null), (1, ''), (2, 'x') as t (n, p) order by n"
    ).coalesce(1)
    if delivery == "jdbc":
        pgque.spark.write_jdbc(frame, queue, **way_in(jdbc))
    else:
        write(frame, writer, queue, delivery=delivery)
    value(conn, "select pgque.send(%s, 'default', null::text)", queue)
    forced_tick(conn, queue)
    found = [m.payload_bytes if kind == "binary" else m.payload for m in receive(conn, queue)]
    assert found == [None, *([b"", b"x"] if kind == "binary" else ["", "x"]), None]


def test_headers_may_be_json_text(spark: SparkSession, writer: Role, conn: Connection, queue: str) -> None:
    write(spark.sql("""select 'x' as payload, '{"a": {"b": 1}}' as headers"""), writer, queue)
    forced_tick(conn, queue)
    assert [m.headers for m in receive(conn, queue)] == [{"a": {"b": 1}}]
    for bad in ("[1]", "{no json", "5", ""):
        frame = spark.createDataFrame([("secret payload", bad)], "payload string, headers string")
        told = failure(write, frame, writer, queue)
        assert "column headers has a row that is no JSON object" in told
        assert "secret payload" not in told
    assert arrived(conn, queue) == Counter("x")


def test_a_column_names_the_queue(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, new_queue: Callable[[], str]
) -> None:
    other = new_queue()
    subscribe(conn, other)
    frame = spark.createDataFrame(
        [(queue, "a"), (other, "b"), (None, "c"), (other, "d")], "queue string, payload string"
    ).coalesce(1)
    assert "column queue has a null" in failure(write, frame, writer, None)
    write(frame, writer, queue)
    assert arrived(conn, queue) == Counter(["a", "c"])
    assert arrived(conn, other) == Counter(["b", "d"])
    assert "nowhere" in failure(write, spark.sql("select 'nowhere' as queue, 'x' as payload"), writer, queue)
    assert arrived(conn, queue) == Counter()


def test_a_write_lands_as_a_whole_in_one_tick(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    write(numbers(spark, 3000, 4), writer, queue)
    assert len(event_xids(conn, queue)) == 1
    assert arrived(conn, queue) == counted(3000)


def test_a_sorted_frame_keeps_its_order(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    write(numbers(spark, 500, 7), writer, queue)
    forced_tick(conn, queue)
    assert payloads(conn, queue, count=1000) == [str(n) for n in range(500)]


def test_at_least_once_sends_what_every_task_has(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    write(numbers(spark, 3000, 4), writer, queue, delivery="at-least-once")
    assert len(event_xids(conn, queue)) == 4
    assert arrived(conn, queue) == counted(3000)


def test_a_write_that_fails_leaves_nothing(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    frame = spark.range(0, 1000, 1, 4).selectExpr(
        "if(id = 999, raise_error('on purpose'), cast(id as string)) as payload"
    )
    assert "on purpose" in failure(write, frame, writer, queue)
    assert arrived(conn, queue) == Counter()
    write(numbers(spark, 10), writer, queue)
    assert arrived(conn, queue) == counted(10)


def test_a_task_that_is_run_again_sends_once(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, tmp_path: Path
) -> None:
    from pyspark.sql import functions as f

    mark = str(tmp_path / "tried")

    def first_time(number: int) -> str:
        if number == 900:
            path = Path(mark)
            if not path.exists():
                path.touch()
                raise RuntimeError("on purpose")
        return str(number)

    frame = spark.range(0, 1000, 1, 2).select(
        f.udf(first_time, "string", useArrow=False)("id").alias("payload")
    )
    write(frame, writer, queue)
    assert Path(mark).exists()
    assert arrived(conn, queue) == counted(1000)


def test_an_empty_frame_sends_nothing(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    write(numbers(spark, 0), writer, queue)
    assert arrived(conn, queue) == Counter()


def test_a_paused_queue_takes_nothing(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    value(conn, "select pgque.pause(%s)", queue)
    told = failure(write, numbers(spark, 10), writer, queue)
    assert queue in told
    assert "PgqueQueueDisabledError" in told
    value(conn, "select pgque.resume(%s)", queue)
    assert arrived(conn, queue) == Counter()


def fill(conn: Connection, queue: str) -> None:
    """Leave room for five messages."""
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '10')", queue)
    send_many(conn, queue, 5)


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_full_queue_takes_nothing(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, delivery: str
) -> None:
    fill(conn, queue)
    told = failure(write, numbers(spark, 6, 1), writer, queue, delivery=delivery)
    assert "PgqueQueueFullError" in told and queue in told
    write(numbers(spark, 5, 1), writer, queue, delivery=delivery)
    forced_tick(conn, queue)
    assert len(receive(conn, queue)) == 10


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_write_that_is_larger_than_max_depth_does_not_wait_for_room(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, delivery: str
) -> None:
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '5')", queue)
    frame = numbers(spark, 6, 1)
    told = failure(write, frame, writer, queue, delivery=delivery, onFull="wait", onFullTimeout=43200)
    assert f"6 messages at once never fit into queue {queue} with max_depth 5" in told
    assert "maxEventsPerTrigger" in told and "PgqueBadArgumentError" in told


def open_in_a_while(dsn: str, queue: str, change: str) -> bool:
    """Wait for three refusals, change the queue; return whether a sink had no transaction open all the
    time."""
    refusals = "select xact_rollback from pg_stat_database where datname = current_database()"
    idle = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name like 'pgque-spark/%/sink' and state like 'idle in%'"
        " and state_change < clock_timestamp() - interval '0.2 s'"
    )
    with psycopg.connect(dsn, autocommit=True) as conn:
        staged = "select count(*) from pgque.sink_stage as s where s.queue = %s"
        while value(conn, staged, queue) == 0:
            time.sleep(0.02)
        until, closed = value(conn, refusals) + 3, True
        while value(conn, refusals) < until:
            closed = closed and value(conn, idle) == 0
            time.sleep(0.02)
        value(conn, change, queue)
        return closed


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
@pytest.mark.parametrize("obstacle", ["full", "paused"])
def test_a_write_waits_for_room_without_a_transaction(
    spark: SparkSession, writer: Role, conn: Connection, dsn: str, queue: str, delivery: str, obstacle: str
) -> None:
    if obstacle == "full":
        fill(conn, queue)
        change = "select pgque.set_queue_config(%s, 'max_depth', '11')"
    else:
        value(conn, "select pgque.pause(%s)", queue)
        change = "select pgque.resume(%s)"
    with futures.ThreadPoolExecutor(1) as pool:
        watched = pool.submit(open_in_a_while, dsn, queue, change)
        write(numbers(spark, 6, 1), writer, queue, delivery=delivery, onFull="wait", onFullTimeout=60)
        assert watched.result(60)
    forced_tick(conn, queue)
    assert len(receive(conn, queue)) == (11 if obstacle == "full" else 6)


def test_a_write_that_waits_fails_after_its_time(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    fill(conn, queue)
    told = failure(write, numbers(spark, 6, 1), writer, queue, onFull="wait", onFullTimeout=1)
    assert "PgqueQueueFullError" in told and queue in told


# --- What is refused ----------------------------------------------------------------------------------

BAD = {
    "select 1 as payload": "column payload has type int",
    "select struct(1) as payload": "to_json(payload)",
    "select 'x' as body": "unknown column body",
    "select 'x' as type": "column payload is missing",
    "select 'x' as payload, 5 as key": "cast(key as string)",
    "select 'x' as payload, map('a', 1) as headers": "to_json(headers)",
    "select 'x' as payload, current_timestamp() as type": "cast(type as string)",
    "select 'x' as payload, 'y' as payloAd": "comes twice",
    "select 'x' as payload, 'a' as extra": "drop('extra')",
    "select 'x' as payload, 'a' as key, 'b' as partition_key": "replaceByKey=true",
    "select 'x' as payload, true as delay": "column delay has type boolean",
    "select 'x' as payload, '2030-01-01' as deliver_at": "cast(deliver_at as timestamp)",
    "select 'x' as payload, 'soon' as ttl": "is not an interval",
    "select 'x' as payload, 1 as delay, current_timestamp() as deliver_at": "has both delay and deliver_at",
}


@pytest.mark.parametrize("query", BAD)
def test_a_frame_that_does_not_fit_is_refused_by_column(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, query: str
) -> None:
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        told = failure(write, spark.sql(query).coalesce(1), writer, queue)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert BAD[query] in told
    assert arrived(conn, queue) == Counter()


@pytest.fixture
def table(spark: SparkSession, writer: Role, queue: str) -> Iterator[Callable[[str], str]]:
    """table(columns): the options of a view `waiting` and of a table `kept` in the catalog, both with columns or,
    for the view, with the source's own."""

    def do(columns: str = "") -> str:
        given = f"url '{writer.dsn}', queue '{queue}'"
        spark.sql(f"create temporary view waiting {columns} using pgque options ({given})")
        spark.sql(
            f"create table kept {columns or '(msg_id bigint, payload string, type string)'} using pgque"
        )
        return given.replace(" '", " = '")

    yield do
    spark.sql("drop view if exists waiting")
    spark.sql("drop table if exists kept")


def test_insert_into_a_view_or_a_table_sends(
    spark: SparkSession, conn: Connection, queue: str, table: Callable[[str], str]
) -> None:
    given = table("")
    spark.sql(
        "insert into waiting values (null, 't', 'a', 'k', null, null), (null, null, 'b', null, null, null)"
    )
    spark.sql(f"insert into kept with ({given}) values (null, 'c', 't')")
    spark.sql(f"insert into kept with ({given}) by name select 'd' as payload, 't' as type, null as msg_id")
    frame = spark.sql("select null as msg_id, 'e' as payload, 't' as type")
    frame.writeTo("kept").options(**dict(re.findall(r"(\w+) = '(.*?)'", given))).append()
    forced_tick(conn, queue)
    found = [(m.type, m.payload, m.extra1) for m in receive(conn, queue)]
    assert sorted(found, key=lambda m: str(m[1])) == [
        ("t", "a", "k"),
        ("default", "b", None),
        ("t", "c", None),
        ("t", "d", None),
        ("t", "e", None),
    ]


def test_insert_needs_only_the_columns_that_it_names(
    spark: SparkSession, conn: Connection, queue: str, table: Callable[[str], str]
) -> None:
    # Spark 4.0 fills no column of a view in, so there the view has those that are written.
    given = table("" if newest_spark() else "(payload string)")
    spark.sql("insert into waiting (payload) values ('a')")
    spark.sql("insert into waiting by name select 'b' as payload")
    spark.sql(f"insert into kept with ({given}) (payload) values ('c')")
    spark.sql("select 'd' as payload").writeTo("waiting").append()
    assert arrived(conn, queue) == Counter("abcd")


def test_a_value_that_only_a_queue_gives_is_refused_before_anything_is_sent(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, table: Callable[[str], str]
) -> None:
    table("")
    row = ["null", "'t'", "'x'", "null", "null", "null"]
    for place, name, text in (
        (0, "msg_id", "7"),
        (4, "created_at", "current_timestamp()"),
        (5, "retry_count", "0"),
    ):
        bad = ", ".join([*row[:place], text, *row[place + 1 :]])
        told = failure(spark.sql, f"insert into waiting values ({', '.join(row)}), ({bad})")
        assert f"column {name} has a value" in told
    # One row of many, in another task than the first
    frame = numbers(spark, 1000).selectExpr("payload", "nullif(cast(payload as int), 0) * 0 as Tick_ID")
    assert "column Tick_ID has a value" in failure(write, frame, writer, queue)
    assert arrived(conn, queue) == Counter()


def test_an_insert_that_spark_gives_no_options_is_refused_with_what_works(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, table: Callable[[str], str]
) -> None:
    table("(payload string)")
    told = failure(spark.sql, "insert into kept values ('x')")
    assert "insert into t with (queue = " in told
    told = failure(spark.sql("select 'x' as payload").write.option("queue", queue).insertInto, "kept")
    assert "writeTo('t')" in told
    spark.sql(
        "create or replace temporary view waiting using pgque options"
        f" (url '{writer.dsn}', queue '{queue}', columns 'payload')"
    )
    told = failure(spark.sql, "insert into waiting values ('x')")
    assert "option columns is for batch read and stream read, not for batch write. A view" in told
    assert "create temporary view v (type string, payload string)" in told
    assert arrived(conn, queue) == Counter()


@pytest.mark.parametrize("mode", ["overwrite", "ignore", "errorifexists"])
def test_only_append_is_taken(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, mode: str
) -> None:
    told = failure(write, numbers(spark, 10), writer, queue, mode)
    assert "append" in told.lower()
    assert arrived(conn, queue) == Counter()


def test_no_queue_is_refused(spark: SparkSession, writer: Role) -> None:
    assert "set option queue or add a column queue" in failure(write, numbers(spark, 1), writer, None)


def test_a_nul_character_is_explained_without_the_payload(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    frame = spark.sql("select concat('secret payload', char(0)) as payload")
    told = failure(write, frame, writer, queue)
    assert "NUL character" in told
    assert "secret payload" not in told
    assert arrived(conn, queue) == Counter()


def test_a_reader_may_not_write(spark: SparkSession, reader: Role, conn: Connection, queue: str) -> None:
    assert "permission denied" in failure(write, numbers(spark, 1), reader, queue)


# --- Micro-batches ------------------------------------------------------------------------------------


class Pipe:
    """A stream from one queue to another."""

    def __init__(self, spark: SparkSession, role: Role, source: str, target: str, folder: Path) -> None:
        self.spark = spark
        self.role = role
        self.source = source
        self.target = target
        self.checkpoint = folder / secrets.token_hex(4)

    def run(self, parts: int = 1, checkpoint: str | None = None, **sink: str) -> None:
        """Copy what is there, once."""
        source = {"queue": self.source, "consumer": "pipe", "startingAt": "earliest"}
        frame = self.spark.readStream.format("pgque").options(
            url=self.role.dsn, numPartitions=str(parts), **source
        )
        query = (
            frame.load()
            .select("payload")
            .writeStream.format("pgque")
            .options(url=self.role.dsn, queue=self.target, **sink)
            .option("checkpointLocation", checkpoint or str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    def forget_the_last_commit(self) -> None:
        """Have Spark believe that it died just before it noted its last micro-batch as done. Then the
        consumer stands before it."""
        commits, offsets = self.checkpoint / "commits", self.checkpoint / "offsets"
        last = max(int(f.name) for f in commits.iterdir() if f.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)
        before = offsets / str(last - 1)
        start = json.loads(before.read_text().splitlines()[-1])["tick"] if before.exists() else "earliest"
        with psycopg.connect(self.role.dsn) as conn:
            conn.execute(
                "select pgque.seek(%s, 'pipe', pgque.tick_for(%s, %s), true)",
                [self.source, self.source, str(start)],
            )


@pytest.fixture
def pipe(
    spark: SparkSession,
    roles: Callable[..., Role],
    conn: Connection,
    new_queue: Callable[[], str],
    queue: str,
    scratch: Path,
) -> Pipe:
    made = Pipe(spark, roles("reader", "writer"), new_queue(), queue, scratch)
    send_many(conn, made.source, 1000)
    forced_tick(conn, made.source)
    return made


def one_to(count: int) -> Counter[str | None]:
    return Counter(str(n) for n in range(1, count + 1))


def test_a_network_that_goes_silent_has_no_place_between_a_commit_of_the_sink_and_its_end(
    writer: Role, conn: Connection, queue: str
) -> None:
    """As a session that waits for its client there would keep the sink's lock."""
    from pyspark.sql.types import StringType, StructField, StructType

    from pgque.spark import options
    from pgque.spark.sink import PgqueWriter

    schema = StructType([StructField("payload", StringType())])
    sink = f"sink_{queue}"
    with silent_path(writer.dsn, before=COMMIT) as path:
        parsed = options.parse({"url": path.dsn, "queue": queue}, options.BATCH_WRITE)
        task = PgqueWriter(parsed, schema, overwrite=False)
        assert task._commit_once(None, [sink, 1, [], 0]) == "applied"
        assert path.silent == 0
    assert value(conn, "select pgque.sink_commit(%s, 1, '{}', 0)", sink) == "duplicate"


def test_a_micro_batch_waits_for_room_and_is_sent_once(pipe: Pipe, conn: Connection, dsn: str) -> None:
    send_many(conn, pipe.target, 600)
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '1500')", pipe.target)
    assert "PgqueQueueFullError" in failure(pipe.run, 2)
    value(conn, "select pgque.maint_tables()")
    with futures.ThreadPoolExecutor(1) as pool:
        change = "select pgque.set_queue_config(%s, 'max_depth', '2000')"
        watched = pool.submit(open_in_a_while, dsn, pipe.target, change)
        pipe.run(3, onFull="wait", onFullTimeout="60")
        assert watched.result(60)
    pipe.forget_the_last_commit()
    pipe.run(parts=5)
    assert arrived(conn, pipe.target) == one_to(600) + one_to(1000)


def test_micro_batches_arrive(pipe: Pipe, conn: Connection) -> None:
    pipe.run()
    assert len(event_xids(conn, pipe.target)) == 1
    send(conn, pipe.source, "1001")
    forced_tick(conn, pipe.source)
    pipe.run()
    assert arrived(conn, pipe.target) == one_to(1001)


def test_a_micro_batch_that_was_staged_but_not_committed_is_sent_once(pipe: Pipe, conn: Connection) -> None:
    value(conn, "select pgque.pause(%s)", pipe.target)
    assert "PgqueQueueDisabledError" in failure(pipe.run, 2)
    staged = value(conn, "select sum(s.rows) from pgque.sink_stage as s")
    assert staged >= 1000
    value(conn, "select pgque.resume(%s)", pipe.target)
    pipe.run(parts=5)
    assert arrived(conn, pipe.target) == one_to(1000)


@pytest.mark.parametrize("parts", [1, 5])
def test_a_micro_batch_that_was_committed_is_left_out_when_it_is_replayed(
    pipe: Pipe, conn: Connection, parts: int
) -> None:
    pipe.run(parts=2)
    pipe.forget_the_last_commit()
    pipe.run(parts=parts)
    assert arrived(conn, pipe.target) == one_to(1000)


def test_at_least_once_sends_a_replayed_micro_batch_again(pipe: Pipe, conn: Connection) -> None:
    pipe.run(parts=2, delivery="at-least-once")
    pipe.forget_the_last_commit()
    pipe.run(parts=3, delivery="at-least-once")
    assert arrived(conn, pipe.target) == one_to(1000) + one_to(1000)


def test_a_new_checkpoint_is_another_sink(pipe: Pipe, conn: Connection) -> None:
    pipe.run()
    pipe.checkpoint = pipe.checkpoint.with_name("new-" + pipe.checkpoint.name)
    send(conn, pipe.source, "1001")
    forced_tick(conn, pipe.source)
    value(
        conn, "select pgque.seek(%s, 'pipe', pgque.tick_for(%s, 'earliest'), true)", pipe.source, pipe.source
    )
    pipe.run()
    assert arrived(conn, pipe.target) == one_to(1000) + one_to(1001)


def test_a_fixed_sink_id_refuses_the_numbers_of_a_new_checkpoint(pipe: Pipe, conn: Connection) -> None:
    sink = f"fixed {secrets.token_hex(4)}"
    for number in (1001, 1002):
        pipe.run(sinkId=sink)
        send(conn, pipe.source, str(number))
        forced_tick(conn, pipe.source)
    pipe.checkpoint = pipe.checkpoint.with_name("new-" + pipe.checkpoint.name)
    told = failure(pipe.run, sinkId=sink)
    assert "PgqueSinkEpochError" in told
    assert sink in told
    assert "checkpoint" in told
    assert arrived(conn, pipe.target) == one_to(1001)


def test_complete_mode_is_refused(spark: SparkSession, writer: Role, queue: str, scratch: Path) -> None:
    counts = spark.readStream.format("rate").load().groupBy().count().selectExpr("'x' as payload")
    query = (
        counts.writeStream.format("pgque")
        .options(url=writer.dsn, queue=queue, checkpointLocation=str(scratch / secrets.token_hex(4)))
        .outputMode("complete")
        .start()
    )
    assert "complete and overwrite" in failure(query.processAllAvailable)


def test_a_stream_that_does_not_fit_is_refused(pipe: Pipe, conn: Connection) -> None:
    frame = pipe.spark.readStream.format("pgque").options(
        url=pipe.role.dsn, queue=pipe.source, consumer="pipe", startingAt="earliest"
    )
    query = (
        frame.load()
        .writeStream.format("pgque")
        .options(url=pipe.role.dsn, queue=pipe.target, checkpointLocation=str(pipe.checkpoint))
        .start()
    )
    told = failure(query.processAllAvailable)
    assert "column msg_id has a value" in told
    assert "drop('msg_id')" in told
    assert arrived(conn, pipe.target) == Counter()


# --- A write with a number of its own -----------------------------------------------------------------


def test_a_numbered_write_is_sent_once(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    sink = secrets.token_hex(8)
    write(numbers(spark, 100, 2), writer, queue, sinkId=sink, epoch=7)
    write(numbers(spark, 100, 5), writer, queue, sinkId=sink, epoch=7)
    assert arrived(conn, queue) == counted(100)
    write(numbers(spark, 10), writer, queue, sinkId=sink, epoch=8)
    assert "PgqueSinkEpochError" in failure(write, numbers(spark, 5), writer, queue, sinkId=sink, epoch=7)
    assert arrived(conn, queue) == counted(10)
    assert "need each other" in failure(write, numbers(spark, 5), writer, queue, sinkId=sink)


def test_staged_rows_that_went_lost_refuse_the_commit(
    spark: SparkSession, writer: Role, conn: Connection, queue: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    from pgque.spark import options
    from pgque.spark.sink import PgqueWriter

    given = {
        "url": writer.dsn,
        "queue": queue,
        "sinkId": secrets.token_hex(8),
        "epoch": "0",
        "batchSize": "1",  # a message in each staged row
    }
    schema = numbers(spark, 1).schema

    def part(*texts: str) -> tuple[PgqueWriter, Any]:
        made = PgqueWriter(options.parse(given, options.BATCH_WRITE), schema, False)
        return made, made.write(iter([pa.RecordBatch.from_pydict({"payload": list(texts)})]))

    one, first = part("a", "b")
    _, second = part("c")
    conn.execute(
        "do $$ begin delete from pgque.sink_stage_0 where payloads = '{b}';"
        " delete from pgque.sink_stage_1 where payloads = '{b}'; end $$"
    )
    with pytest.raises(PgqueSinkEpochError, match="2 rows are staged, not 3"):
        one.commit([first, second, None])
    assert arrived(conn, queue) == Counter()
    # What another attempt staged beside them does not count.
    two, third = part("a", "b")
    two.commit([third, second])
    assert arrived(conn, queue) == Counter("abc")
    one.commit([first, second])
    assert arrived(conn, queue) == Counter()


def test_the_writers_show_no_secret(spark: SparkSession, queue: str) -> None:
    from pgque.spark import options
    from pgque.spark.sink import PgqueWriter

    given = {"host": "127.0.0.1", "port": "1", "password": "s3cr3t", "user": "u", "queue": queue}
    parsed = options.parse(given, options.BATCH_WRITE)
    made = PgqueWriter(parsed, numbers(spark, 1).schema, False)
    assert "s3cr3t" not in repr(parsed) + repr(made.__dict__)


def test_a_password_is_in_no_error_and_in_no_event_log(
    spark: SparkSession, writer: Role, conn: Connection, queue: str, scratch: Path, pipe: Pipe, tmp_path: Path
) -> None:
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    secret = "pw" + secrets.token_hex(8)
    conn.execute(f"alter role {writer.name} password '{secret}'".encode())
    conn.execute(f"alter role {pipe.role.name} password '{secret}'".encode())
    url = make_conninfo(writer.dsn, password=secret)
    write(numbers(spark, 10), Role(writer.name, url), queue)
    parts = {k: v for k, v in conninfo_to_dict(url).items() if k != "password"}
    write(numbers(spark, 10), Role(writer.name, make_conninfo("", **parts)), queue, password=secret)
    pipe.role = Role(pipe.role.name, make_conninfo(pipe.role.dsn, password=secret))
    pipe.run()
    value(conn, "select pgque.pause(%s)", queue)
    told = [
        failure(write, numbers(spark, 10), Role(writer.name, url), queue),
        failure(write, numbers(spark, 10), Role(writer.name, url + " port=1"), queue),
        failure(write, numbers(spark, 10), Role(writer.name, url + " nonsense"), queue),
        failure(write, numbers(spark, 10), Role(writer.name, url), queue, nonsense=1),
    ]
    send(conn, pipe.source, "x")
    forced_tick(conn, pipe.source)
    told.append(failure(pipe.run))
    value(conn, "select pgque.resume(%s)", queue)
    assert all(secret not in text for text in told)
    seen = 0
    for file in (*pipe.checkpoint.rglob("*"), *(scratch / "events").rglob("*")):
        if file.is_file():
            seen += 1
            assert secret.encode() not in file.read_bytes(), file
    assert seen > 3


# --- JDBC ---------------------------------------------------------------------------------------------


def way_in(jdbc: Any) -> dict[str, Any]:
    return {"url": jdbc.url(), "user": jdbc.user, "password": jdbc.password}


def test_write_jdbc_writes_through_a_pooler_again_and_again(
    spark: SparkSession, dsn: str, conn: Connection, queue: str
) -> None:
    """The driver's names of prepared statements are the same in each connection."""
    with pgbouncer.through(dsn) as pooled:
        parts = conninfo_to_dict(pooled)
        options: dict[str, Any] = {
            name: str(parts[name]) for name in ("host", "port", "dbname", "user", "password")
        }
        for _ in range(4):
            pgque.spark.write_jdbc(numbers(spark, 1000, 2), queue, **options)
    assert arrived(conn, queue) == Counter({payload: 4 * n for payload, n in counted(1000).items()})


def test_write_jdbc_takes_the_same_frames(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    pgque.spark.write_jdbc(numbers(spark, 1000, 3), queue, num_partitions=2, **way_in(jdbc))
    assert len(event_xids(conn, queue)) == 2
    assert arrived(conn, queue) == counted(1000)
    frame = spark.sql(
        "select 't' as type, 'x' as payload, map('a', 'b') as headers, 'k' as key union all"
        " select null, 'y', null, null"
    ).coalesce(1)
    pgque.spark.write_jdbc(frame, queue, **way_in(jdbc))
    pgque.spark.write_jdbc(spark.sql("select X'00FF' as payload"), queue, **way_in(jdbc))
    forced_tick(conn, queue)
    found = [(m.type, m.payload, m.payload_bytes, m.headers, m.extra1) for m in receive(conn, queue)]
    assert found == [
        ("t", "x", None, {"a": "b"}, "k"),
        ("default", "y", None, None, None),
        ("default", None, b"\x00\xff", None, None),
    ]


def test_write_jdbc_refuses_what_the_sink_refuses(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    with pytest.raises(PgqueBadArgumentError, match="unknown column body"):
        pgque.spark.write_jdbc(spark.sql("select 'x' as body"), queue, **way_in(jdbc))
    with pytest.raises(PgqueBadArgumentError, match="unknown connection option pasword"):
        pgque.spark.write_jdbc(numbers(spark, 1), queue, pasword="x")
    with pytest.raises(PgqueBadArgumentError, match="Unix sockets"):
        pgque.spark.write_jdbc(numbers(spark, 1), queue, host="/tmp", dbname="x")  # noqa: S108
    told = failure(pgque.spark.write_jdbc, numbers(spark, 1), queue, **{**way_in(jdbc), "password": "wr0ng!"})
    assert "wr0ng!" not in told
    assert arrived(conn, queue) == Counter()


def test_foreach_batch_sends_a_replayed_micro_batch_once(pipe: Pipe, jdbc: Any, conn: Connection) -> None:
    def run(parts: int, **given: Any) -> None:
        source = pipe.spark.readStream.format("pgque").options(
            url=pipe.role.dsn,
            queue=pipe.source,
            consumer="pipe",
            startingAt="earliest",
            numPartitions=str(parts),
        )
        send = pgque.spark.foreach_batch(pipe.target, **given, **way_in(jdbc))
        query = (
            source.load()
            .select("payload")
            .writeStream.foreachBatch(send)
            .option("checkpointLocation", str(pipe.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    run(2)
    pipe.forget_the_last_commit()
    run(2)
    assert arrived(conn, pipe.target) == one_to(1000)
    pipe.forget_the_last_commit()
    assert "it was written with 2 parts and comes with 3" in failure(run, 3)
    pipe.checkpoint = pipe.checkpoint.with_name("one-" + pipe.checkpoint.name)
    run(2, num_partitions=1)
    pipe.forget_the_last_commit()
    run(3, num_partitions=1)
    assert arrived(conn, pipe.target) == one_to(1000)


# --- Dead letters -------------------------------------------------------------------------------------


def test_bad_messages_of_a_micro_batch_become_dead_letters_once(pipe: Pipe, conn: Connection) -> None:
    from pyspark.sql import functions as f

    outcomes: list[Any] = []

    def each(batch: DataFrame, number: int) -> None:
        bad = batch.where("cast(payload as int) % 100 = 0")
        why = f.concat(f.lit("bad: "), f.col("payload"))
        for _ in range(2):
            outcomes.append(pgque.spark.dead(bad, pipe.source, "pipe", why, url=pipe.role.dsn))

    frame = pipe.spark.readStream.format("pgque").options(
        url=pipe.role.dsn, queue=pipe.source, consumer="pipe", startingAt="earliest"
    )
    query = frame.load().writeStream.foreachBatch(each).option("checkpointLocation", str(pipe.checkpoint))
    assert query.trigger(availableNow=True).start().awaitTermination(60)
    first, again = outcomes
    assert len(first) == 10
    assert all(outcome.ok for outcome in first)
    assert {outcome.reason for outcome in again} == {"dead already"}
    letters = rows(conn, "select d.dl_reason, d.ev_data from pgque.dead_letter as d order by d.ev_id")
    assert ("bad: 100", "100") in letters


def test_an_unknown_consumer_has_no_dead_letters(
    spark: SparkSession, reader: Role, conn: Connection, queue: str
) -> None:
    frame = spark.sql("select 1L as msg_id, 'why' as reason")
    with pytest.raises(PgqueConsumerNotFoundError, match="nobody"):
        pgque.spark.dead(frame, queue, "nobody", url=reader.dsn)
    (outcome,) = pgque.spark.dead(frame, queue, "c", url=reader.dsn)
    assert (outcome.ok, outcome.reason) == (False, "not found behind the position")
