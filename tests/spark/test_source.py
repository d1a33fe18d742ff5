"""Reading queues with Spark: batches, streams, what a restart reads, what a query costs."""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from conftest import Role
from sql.helpers import (
    Connection,
    column,
    configure,
    forced_tick,
    rotate,
    rows,
    send,
    send_many,
    subscribe,
    value,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from pgque.spark.source import PgqueStreamReader

SPARK_CONF = {"spark.master": "local[2,2]"}  # a failed task is run once more

Batches = list[tuple[int, list[Any]]]


class Source:
    """Frames that read one queue as a reader, and queries that collect what they read."""

    def __init__(self, spark: SparkSession, role: Role, queue: str, folder: Path) -> None:
        self.spark = spark
        self.role = role
        self.queue = queue
        self.checkpoint = str(folder / secrets.token_hex(4))

    def options(self, given: dict[str, object]) -> dict[str, str]:
        return {
            "url": self.role.dsn,
            **({} if "queues" in given else {"queue": self.queue}),
            **{k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in given.items()},
        }

    def batch(self, **given: object) -> DataFrame:
        """Return a frame over what is there."""
        return self.spark.read.format("pgque").options(**self.options(given)).load()

    def stream(self, **given: object) -> DataFrame:
        """Return a streaming frame of consumer c, which sees every tick at once."""
        options = self.options({"consumer": "c", "pollIntervalMs": 0, **given})
        return self.spark.readStream.format("pgque").options(**options).load()

    def start(
        self,
        frame: DataFrame,
        box: Batches,
        fail: int | None = None,
        checkpoint: str | None = None,
        **how: Any,
    ) -> StreamingQuery:
        """Start a query that puts (batch id, payloads) into the box, and fails in batch `fail`."""

        def each(batch: DataFrame, number: int) -> None:
            box.append((number, [row.payload for row in batch.collect()]))
            if number == fail:
                raise RuntimeError("failed on purpose")

        writer = frame.writeStream.foreachBatch(each).option(
            "checkpointLocation", checkpoint or self.checkpoint
        )
        return writer.trigger(**how).start() if how else writer.start()

    def run(self, frame: DataFrame, fail: int | None = None, checkpoint: str | None = None) -> Batches:
        """Run to what is there now; return the batches."""
        box: Batches = []
        query = self.start(frame, box, fail, checkpoint, availableNow=True)
        try:
            assert query.awaitTermination(60)
        except Exception as error:
            if fail is None:
                raise
            assert "failed on purpose" in str(error)
        return box


@pytest.fixture
def source(spark: SparkSession, reader: Role, queue: str, scratch: Path) -> Source:
    return Source(spark, reader, queue, scratch)


@pytest.fixture(autouse=True)
def _no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def direct(source: Source, **given: object) -> PgqueStreamReader:
    """Return the reader of a stream, to call it as Spark does."""
    from pyspark.sql.types import StructType

    from pgque.spark import options
    from pgque.spark.source import PgqueStreamReader

    told = source.options({"consumer": "c", "pollIntervalMs": 0, **given})
    return PgqueStreamReader(options.parse(told, options.STREAM_READ), StructType([]))


def payloads(batches: Batches) -> list[Any]:
    return [payload for _, found in batches for payload in found]


def failure(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Expect the call to fail; return all that Spark tells."""
    with pytest.raises(Exception) as caught:
        call(*args, **options)
    return str(caught.value)


def newest_spark() -> bool:
    import pyspark

    return tuple(int(part) for part in pyspark.__version__.split(".")[:2]) >= (4, 2)


# --- Batches ------------------------------------------------------------------------------------------


def test_every_column_of_a_message_is_read(source: Source, conn: Connection) -> None:
    headers = '{"trace": "a1", "n": 5, "deep": {"ä": [1, null]}, "none": null}'
    sent = value(
        conn, "select pgque.send(%s, 'order', '{\"a\": \"é🐘\"}'::text, %s::jsonb)", source.queue, headers
    )
    keyed = value(conn, "select pgque.send(%s, 'order', 'x', 'customer 7')", source.queue)
    created = value(conn, "select max(ev_time) from pgque.event")
    forced_tick(conn, source.queue)
    frame = source.batch(includeHeaders=True)
    assert frame.columns == ["msg_id", "type", "payload", "key", "created_at", "retry_count", "headers"]
    first, second = frame.orderBy("msg_id").collect()
    assert (first.msg_id, first.type, first.payload) == (sent, "order", '{"a": "é🐘"}')
    assert first.headers == {"trace": "a1", "n": "5", "deep": '{"ä": [1, null]}', "none": None}
    assert (second.msg_id, second.key, second.headers, second.retry_count) == (
        keyed,
        "customer 7",
        None,
        None,
    )
    # Spark hands out times of the machine's zone without saying so.
    assert second.created_at.astimezone(timezone.utc) == created


def test_headers_that_python_does_not_read_arrive(source: Source, conn: Connection) -> None:
    conn.execute("set max_stack_depth = '4MB'")  # the deepest need more than the default
    digits, deep = "7" * 5000, f"{'[' * 12_000}{']' * 12_000}"
    odd: dict[str, object] = {
        'a "b"': "\\ ]}, {ä",
        "none": None,
        "list": ["]", {}, "a, b"],
        "": 1.5,
        "empty": {},
        "yes": True,
    }
    plain = json.dumps(odd, ensure_ascii=False)
    for headers in (f'{{"n": {digits}, "x": [-{digits}]}}', f'{plain[:-1]}, "deep": {deep}}}'):
        conn.execute("select pgque.send(%s, 'order', 'x'::text, %s::jsonb)", [source.queue, headers])
    forced_tick(conn, source.queue)
    found = [row.headers for row in source.batch(includeHeaders=True).orderBy("msg_id").collect()]
    texts = {
        name: item if item is None or isinstance(item, str) else json.dumps(item)
        for name, item in odd.items()
    }
    assert found == [{"n": digits, "x": f"[-{digits}]"}, {**texts, "deep": deep}]


def test_text_of_every_kind_survives(source: Source, conn: Connection) -> None:
    texts = ["", " ", "'\"\\", "a\nb\r\nc", "\\N", "\\.", "\t,;", "é🐘\u2028\ufeff", "x" * 100_000]
    for text in texts:
        send(conn, source.queue, text)
    forced_tick(conn, source.queue)
    found = source.batch(numPartitions=1, fetchSize=2).collect()
    assert [row.payload for row in found] == texts


def test_bytes_are_read_as_binary_and_are_null_as_text(source: Source, conn: Connection) -> None:
    value(conn, "select pgque.send(%s, 't', '\\x00ff41'::bytea)", source.queue)
    send(conn, source.queue, "é")
    forced_tick(conn, source.queue)
    as_binary = source.batch(payloadFormat="binary", numPartitions=1)
    assert as_binary.schema["payload"].dataType.simpleString() == "binary"
    assert [bytes(row.payload) for row in as_binary.collect()] == [b"\x00\xffA", "é".encode()]
    assert [row.payload for row in source.batch(numPartitions=1).collect()] == [None, "é"]


def test_an_empty_queue_is_an_empty_frame(source: Source, conn: Connection) -> None:
    assert source.batch().collect() == []
    send(conn, source.queue)  # not ticked yet
    assert source.batch().count() == 0


def test_a_frame_made_anew_ends_at_the_newest_tick(source: Source, conn: Connection) -> None:
    send(conn, source.queue, "a")
    forced_tick(conn, source.queue)
    frame = source.batch()
    assert frame.count() == 1
    send(conn, source.queue, "b")
    tick = forced_tick(conn, source.queue)
    assert source.batch().count() == 2
    # SPARK.md has this: PySpark 4.0 plans each action anew, 4.3 keeps the first plan of a frame.
    assert frame.count() == (1 if newest_spark() else 2)
    fixed = source.batch(endingAt=tick)
    assert fixed.count() == 2
    send(conn, source.queue, "c")
    forced_tick(conn, source.queue)
    assert fixed.count() == 2


def test_a_temporary_view_reads_a_queue_in_sql(source: Source, conn: Connection) -> None:
    send(conn, source.queue, "a")
    forced_tick(conn, source.queue)
    source.spark.sql(
        f"create temporary view orders using pgque options (url '{source.role.dsn}', queue '{source.queue}')"
    )
    try:
        assert [row.payload for row in source.spark.sql("select payload from orders").collect()] == ["a"]
    finally:
        source.spark.sql("drop view orders")


@pytest.mark.parametrize("columns", ["", "(msg_id bigint, payload string)"])
def test_a_table_of_sparks_catalog_is_refused_with_what_works(source: Source, columns: str) -> None:
    told = failure(
        lambda: [
            source.spark.sql(statement).collect()
            for statement in (
                f"create table in_catalog {columns} using pgque"
                f" options (url '{source.role.dsn}', queue '{source.queue}')",
                "select * from in_catalog",
            )
        ]
    )
    source.spark.sql("drop table if exists in_catalog")
    assert "create temporary view" in told
    assert "unknown option" not in told
    for secret in psycopg.conninfo.conninfo_to_dict(source.role.dsn)["password"], "option.url":
        assert str(secret) not in told


def test_one_partition_keeps_the_order_across_ticks(source: Source, conn: Connection) -> None:
    for _ in range(5):
        send_many(conn, source.queue, 20)
        forced_tick(conn, source.queue)
    found = [row.msg_id for row in source.batch(numPartitions=1, fetchSize=7).collect()]
    assert found == sorted(found)
    assert len(found) == 100


def test_a_single_heavy_tick_is_read_by_several_tasks(source: Source, conn: Connection) -> None:
    from pyspark.sql import functions as f

    send_many(conn, source.queue, 4000)
    forced_tick(conn, source.queue)
    found = source.batch(numPartitions=4).groupBy(f.spark_partition_id().alias("p")).count().collect()
    assert len(found) == 4
    assert all(row["count"] == 1000 for row in found)
    # Each has a range of ids.
    spans = [f.min("msg_id"), f.max("msg_id")]
    found = source.batch(numPartitions=4).groupBy(f.spark_partition_id()).agg(*spans).collect()
    assert sorted(row[2] - row[1] for row in found) == [999] * 4
    got = Counter(row.payload for row in source.batch(numPartitions=3).collect())
    assert got == Counter(str(n) for n in range(1, 4001))


def test_all_messages_of_a_key_are_in_one_partition_and_in_order(
    source: Source, conn: Connection, new_queue: Callable[[], str]
) -> None:
    from pyspark.sql import functions as f

    other = new_queue()
    configure(conn, source.queue, max_window="40")
    call = "select count(pgque.send_batch(%s, 't', array(select i::text from generate_series(1, 100) i), partition_keys => array(select nullif('k' || i %% 9, 'k0') from generate_series(1, 100) i)))"
    for queue in (source.queue, other):
        subscribe(conn, queue)
        for _ in range(2):
            value(conn, call, queue)
            forced_tick(conn, queue)
    spread: list[list[Any]] = []

    def each(batch: DataFrame, _: int) -> None:
        place = batch.withColumn("p", f.spark_partition_id()).withColumn(
            "at", f.monotonically_increasing_id()
        )
        spread.append(place.orderBy("at").collect())

    queues = f"{source.queue},{other}"
    stream = source.stream(queues=queues, splitBy="key", numPartitions=3, columns="queue,msg_id,key")
    writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", source.checkpoint)
    assert writer.trigger(availableNow=True).start().awaitTermination(60)
    assert sorted((row.queue, row.msg_id) for batch in spread for row in batch) == sorted(
        (queue, msg_id) for queue in (source.queue, other) for msg_id in range(1, 201)
    )
    for batch in spread:
        of_key: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for row in batch:
            if row.key is not None:
                of_key.setdefault((row.queue, row.key), []).append((row.p, row.msg_id))
        for found in of_key.values():
            assert len({p for p, _ in found}) == 1
            assert found == sorted(found)
    assert len({row.p for row in spread[0]}) == 3


def test_a_task_whose_rows_spark_takes_slowly_is_not_ended_by_the_timeout_of_its_role(
    source: Source, conn: Connection
) -> None:
    from pyspark.sql.types import StructType

    from pgque.spark import options
    from pgque.spark._window import Task, Window, ddl, layout, read

    send_many(conn, source.queue, 20)
    tick = forced_tick(conn, source.queue)
    conn.execute(f"alter role {source.role.name} set idle_in_transaction_session_timeout = '50ms'")
    given = options.parse(source.options({"fetchSize": 10}), options.BATCH_READ)
    reading = read(
        given, layout(given, StructType.fromDDL(ddl(given))), Task([Window(source.queue, tick - 1, tick)])
    )
    assert next(reading).num_rows == 10
    time.sleep(0.3)
    assert sum(batch.num_rows for batch in reading) == 10


def test_a_batch_begins_and_ends_at_the_ticks_that_were_asked_for(source: Source, conn: Connection) -> None:
    ticks = []
    for text in "abc":
        send(conn, source.queue, text)
        ticks.append(forced_tick(conn, source.queue))
        time.sleep(0.01)

    def read(**given: object) -> list[str]:
        return sorted(row.payload for row in source.batch(**given).collect())

    assert read() == ["a", "b", "c"]
    assert read(startingAt=ticks[0]) == ["b", "c"]
    assert read(startingAt=ticks[0], endingAt=ticks[1]) == ["b"]
    assert read(startingAt="latest") == []
    between = value(
        conn, "select t.tick_time::text from pgque.tick as t where t.tick_id = %s order by 1 desc", ticks[1]
    )
    assert read(startingAt=between) == ["c"]
    assert "after endingAt" in failure(read, startingAt=ticks[2], endingAt=ticks[1])
    assert "999999" in failure(read, startingAt=999999)
    assert "nonsense" in failure(read, startingAt="nonsense")


def test_types_are_picked_by_the_server(source: Source, conn: Connection) -> None:
    for kind in ("a", "b", "c d", "e,f"):
        value(conn, "select pgque.send(%s, %s, %s::text)", source.queue, kind, kind)
    forced_tick(conn, source.queue)
    assert {row.type for row in source.batch(types="a, c d").collect()} == {"a", "c d"}
    assert {row.type for row in source.batch(types='["e,f"]').collect()} == {"e,f"}
    box = source.run(source.stream(startingAt="earliest", types="b"))
    assert payloads(box) == ["b"]


def test_only_the_columns_that_are_asked_for_are_read(source: Source, conn: Connection) -> None:
    value(conn, "select pgque.send(%s, 'order', 'x'::text, '{}'::jsonb)", source.queue)
    value(conn, "select pgque.send(%s, 'order', 'y'::text, '{\"a\": 1}'::jsonb)", source.queue)
    forced_tick(conn, source.queue)
    frame = source.batch(columns="Headers, payload, queue", payloadFormat="binary", numPartitions=1)
    assert frame.columns == ["headers", "payload", "queue"]
    assert [tuple(row) for row in frame.collect()] == [
        ({}, b"x", source.queue),
        ({"a": "1"}, b"y", source.queue),
    ]
    box = source.run(source.stream(columns="payload", startingAt="earliest", numPartitions=1))
    assert payloads(box) == ["x", "y"]
    assert "some of server, queue, tick_id, msg_id" in failure(source.batch, columns="payload,body")


def test_a_column_has_the_tick_that_made_the_message_visible(
    source: Source, conn: Connection, connect: Callable[..., Connection]
) -> None:
    slow = connect(autocommit=False)
    send(slow, source.queue, "slow")
    ticks = []
    for payload in "ab":
        send_many(conn, source.queue, 3)
        send(conn, source.queue, payload)
        ticks.append(forced_tick(conn, source.queue))
        forced_tick(conn, source.queue)  # empty
    slow.commit()
    ticks.append(forced_tick(conn, source.queue))
    expected = dict(zip(["a", "b", "slow"], ticks, strict=True))
    assert "tick_id" not in source.batch().columns
    for given in ({"numPartitions": 1}, {"startingAt": ticks[0] - 1}, {"numPartitions": 7}):
        frame = source.batch(columns="tick_id,payload", **given)
        found = frame.where("length(payload) > 1 or payload in ('a', 'b')").collect()
        assert {row.payload: row.tick_id for row in found} == expected
        assert len(found) == 3
        assert frame.count() == 9
    own = source.spark.read.format("pgque").schema("payload string, tick_id bigint")
    assert own.options(**source.options({})).load().where("payload = 'slow'").first() == ("slow", ticks[-1])


def test_a_replay_has_the_same_ticks(source: Source, conn: Connection) -> None:
    configure(conn, source.queue, max_window=10)
    ticks = []
    for count in (4, 15):
        send_many(conn, source.queue, count)
        ticks += [forced_tick(conn, source.queue)] * count

    def stream(**given: object) -> DataFrame:
        frame = source.stream(columns="msg_id,tick_id", startingAt="earliest", numPartitions=3, **given)
        return frame.selectExpr("struct(msg_id, tick_id) as payload")

    def go_on(fail: int | None = None) -> Batches:
        box: Batches = []
        query = source.start(stream(), box, fail)
        if fail is None:
            query.processAllAvailable()
            query.stop()
        else:
            assert "failed on purpose" in failure(query.awaitTermination, 60)
        return [(number, sorted(found)) for number, found in box]

    first = go_on(fail=1)
    forced_tick(conn, source.queue)
    again = go_on()
    assert again[0] == first[1]
    found = payloads(first[:1] + again)
    assert [row.tick_id for row in sorted(found)] == ticks


def test_reading_a_batch_twice_changes_nothing(source: Source, conn: Connection) -> None:
    send_many(conn, source.queue, 10)
    forced_tick(conn, source.queue)
    frame = source.batch()
    assert frame.count() == frame.count() == len(frame.orderBy("payload").collect()) == 10
    assert rows(conn, "select * from pgque.get_consumer_info(%s)", source.queue) == []


def test_a_schema_of_ones_own_must_have_the_types_of_the_message(source: Source) -> None:
    reader = source.spark.read.format("pgque").schema("payload int").options(**source.options({}))
    assert "column payload of a message is string, not int" in failure(lambda: reader.load().collect())


def test_an_unknown_queue_is_named(source: Source) -> None:
    assert "no_such_queue" in failure(source.batch(queue="no_such_queue").collect)
    assert "no_such_queue" in failure(source.run, source.stream(queue="no_such_queue"))


# --- Streams ------------------------------------------------------------------------------------------


def test_a_new_consumer_sees_what_comes_from_now_on(source: Source, conn: Connection) -> None:
    send(conn, source.queue, "before")
    forced_tick(conn, source.queue)
    assert payloads(source.run(source.stream())) == []
    send(conn, source.queue, "after")
    forced_tick(conn, source.queue)
    assert payloads(source.run(source.stream())) == ["after"]


def test_a_consumer_that_is_there_begins_at_its_position(source: Source, conn: Connection) -> None:
    subscribe(conn, source.queue)
    send(conn, source.queue, "a")
    forced_tick(conn, source.queue)
    assert payloads(source.run(source.stream(startingAt="latest"))) == ["a"]


@pytest.mark.parametrize("start", ["latest", "earliest"])
def test_a_first_batch_that_failed_is_read_again_as_it_was(
    source: Source, conn: Connection, start: str
) -> None:
    send(conn, source.queue, "before")
    forced_tick(conn, source.queue)
    # The consumer begins in a run that finds nothing, whose checkpoint is thrown away.
    source.run(source.stream(startingAt=start), fail=0, checkpoint=source.checkpoint + "-other")
    for _ in range(3):
        send_many(conn, source.queue, 50)
        forced_tick(conn, source.queue)
    first = source.run(source.stream(startingAt=start), fail=0)
    send_many(conn, source.queue, 20)
    forced_tick(conn, source.queue)
    again = source.run(source.stream(startingAt="latest", numPartitions=1))
    if not newest_spark():
        again += source.run(source.stream())  # such a run has one batch, and that was the replay
    assert first[0][0] == again[0][0] == 0
    assert Counter(first[0][1]) == Counter(again[0][1])
    assert len(payloads(again)) == (1 if start == "earliest" else 0) + 170


def test_a_later_batch_that_failed_is_read_again_as_it_was(source: Source, conn: Connection) -> None:
    for number in range(2):
        send_many(conn, source.queue, 10 * (number + 1))
        forced_tick(conn, source.queue)
        box = source.run(source.stream(startingAt="earliest"), fail=1)
    assert box[-1][0] == 1
    send(conn, source.queue, "later")
    forced_tick(conn, source.queue)
    again = source.run(source.stream(startingAt="earliest", numPartitions=1))
    if not newest_spark():
        again += source.run(source.stream())
    assert [number for number, _ in again] == [1, 2]
    assert Counter(again[0][1]) == Counter(box[-1][1])
    assert again[1][1] == ["later"]


def test_a_purge_ends_a_stream_and_the_restarted_one_misses_nothing_that_was_committed_later(
    source: Source, conn: Connection, connect: Callable[..., Connection]
) -> None:
    send(conn, source.queue, "read before")
    forced_tick(conn, source.queue)
    assert payloads(source.run(source.stream(startingAt="earliest"))) == ["read before"]
    slow = connect(autocommit=False)
    send(slow, source.queue, "open during the purge")
    send(conn, source.queue, "purged")
    forced_tick(conn, source.queue)
    value(conn, "select pgque.purge(%s)", source.queue)
    slow.commit()
    send(conn, source.queue, "later")
    forced_tick(conn, source.queue)
    assert "stands at tick" in failure(source.run, source.stream())
    again = source.stream(failOnDataLoss=False, numPartitions=1)
    assert payloads(source.run(again)) == ["open during the purge", "later"]
    assert payloads(source.run(again)) == []


def test_a_transaction_that_stays_open_over_many_ticks_is_not_lost(
    source: Source, conn: Connection, connect: Callable[..., Connection]
) -> None:
    slow = connect(autocommit=False)
    send(slow, source.queue, "slow")
    box: Batches = []
    query = source.start(source.stream(startingAt="earliest", numPartitions=1), box)
    for number in range(3):
        for _ in range(2):
            send(conn, source.queue, str(number))
            forced_tick(conn, source.queue)
        query.processAllAvailable()
    assert sorted(payloads(box)) == ["0", "0", "1", "1", "2", "2"]
    box.clear()
    slow.commit()
    forced_tick(conn, source.queue)
    query.processAllAvailable()
    query.stop()
    assert payloads(box) == ["slow"]


POSITION = "select c.last_tick from pgque.get_consumer_info(%s, 'c') as c"


def test_an_available_now_run_commits_at_its_end(source: Source, conn: Connection) -> None:
    configure(conn, source.queue, max_depth=10)
    subscribe(conn, source.queue)
    for _ in range(2):
        send_many(conn, source.queue, 10)
        tick = forced_tick(conn, source.queue)
        assert len(payloads(source.run(source.stream()))) == 10
        if not newest_spark():
            # Spark does not call the reader again: the next run moves the position, or the restarted stream.
            assert value(conn, POSITION, source.queue) < tick
            with pytest.raises(psycopg.Error, match="queue full"):
                send_many(conn, source.queue, 10)
            return
        assert value(conn, POSITION, source.queue) == tick


def wait_for_position(conn: Connection, queue: str, tick: int) -> None:
    deadline = time.monotonic() + 60
    while value(conn, POSITION, queue) != tick:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_idle_stream_has_committed_what_it_has_read(source: Source, conn: Connection) -> None:
    configure(conn, source.queue, max_depth=10)
    subscribe(conn, source.queue)
    box: Batches = []
    query = source.start(source.stream(), box)
    for number in range(1, 5):
        send_many(conn, source.queue, 10)
        wait_for_position(conn, source.queue, forced_tick(conn, source.queue))
        # The place from which Spark goes on after a kill.
        done = [int(path.name) for path in Path(source.checkpoint, "commits").glob("[0-9]*")]
        assert stored_ticks(source.checkpoint)[max(done)] == value(conn, POSITION, source.queue)
        assert len(payloads(box)) == 10 * number
    query.stop()


def test_a_position_that_waits_for_a_lock_moves_with_the_next_micro_batch(
    source: Source, conn: Connection, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    from pgque.spark._compat import ReadMaxRows

    subscribe(conn, source.queue)
    stream = direct(source)
    start = stream.initialOffset()
    send(conn, source.queue)
    forced_tick(conn, source.queue)
    end = stream.latestOffset(start, ReadMaxRows(1))
    stream.partitions(start, end)
    with psycopg.connect(dsn) as other, caplog.at_level(logging.WARNING, "pgque.spark"):
        other.execute("select from pgque.queue q where q.queue_name = %s for update", [source.queue])
        assert stream.latestOffset(end, ReadMaxRows(1)) == end
        assert f"was not moved to tick {end['tick']}: " in caplog.text
    assert value(conn, POSITION, source.queue) == start["tick"]
    stream.commit(end)
    assert value(conn, POSITION, source.queue) == end["tick"]
    stream.stop()


def test_the_position_waits_for_a_checkpoint_that_spark_writes_later(
    source: Source, conn: Connection
) -> None:
    subscribe(conn, source.queue)
    for _ in range(2):
        for number in range(4):
            send(conn, source.queue)
            tick = forced_tick(conn, source.queue)
            if number == 0:
                writer = (
                    source.stream().writeStream.format("noop").option("checkpointLocation", source.checkpoint)
                )
                writer = writer.option("asyncProgressTrackingEnabled", True)
                query = writer.option("asyncProgressTrackingCheckpointIntervalMs", 3_600_000).start()
            query.processAllAvailable()
        query.stop()
        written = stored_ticks(source.checkpoint)[-1]
        assert value(conn, POSITION, source.queue) <= written < tick


def test_a_micro_batch_keeps_its_limits(source: Source, conn: Connection) -> None:
    # The second limit is a restart's, which goes on where the first run stopped.
    for limit, sizes in (({"maxTicksPerTrigger": 2}, [20, 20, 10]), ({"maxEventsPerTrigger": 35}, [30, 20])):
        for _ in range(5):
            send_many(conn, source.queue, 10)
            forced_tick(conn, source.queue)
        box: Batches = []
        query = source.start(source.stream(startingAt="earliest", **limit), box)
        query.processAllAvailable()
        query.stop()
        assert [len(found) for _, found in box] == sizes


def stored_ticks(checkpoint: str) -> list[Any]:
    """Return what the offsets of a checkpoint have as the tick, the oldest first."""
    files = (file for file in Path(checkpoint, "offsets").iterdir() if file.name.isdigit())
    return [
        json.loads(file.read_text().splitlines()[-1])["tick"]
        for file in sorted(files, key=lambda file: int(file.name))
    ]


def test_a_giant_tick_becomes_several_micro_batches(source: Source, conn: Connection) -> None:
    before = forced_tick(conn, source.queue)
    box: Batches = []

    def go_on(**options: object) -> None:
        query = source.start(source.stream(startingAt="earliest", **options), box)
        query.processAllAvailable()
        query.stop()

    # Without max_window, and within it, offsets are those of 0.8.
    send(conn, source.queue, "0")
    first = forced_tick(conn, source.queue)
    go_on()
    assert stored_ticks(source.checkpoint) == [first]
    configure(conn, source.queue, max_window=1000)
    ids = send_many(conn, source.queue, 2500)
    last = forced_tick(conn, source.queue)
    go_on()
    assert [len(found) for _, found in box] == [1, 1000, 1000, 500]
    assert stored_ticks(source.checkpoint) == [
        first,
        *(f"{first}:{last}:{ids[n]}" for n in (999, 1999)),
        last,
    ]
    send_many(conn, source.queue, 900)
    forced_tick(conn, source.queue)
    go_on(maxEventsPerTrigger=700)
    assert [len(found) for _, found in box[4:]] == [700, 200]
    assert sorted(payloads(box)) == sorted(
        ["0", *(str(n) for size in (2500, 900) for n in range(1, size + 1))]
    )
    assert before < value(conn, "select last_tick from pgque.get_consumer_info(%s, 'c')", source.queue)


def test_a_window_of_the_streams_own_size_cuts_a_giant_tick(source: Source, conn: Connection) -> None:
    forced_tick(conn, source.queue)
    sent = send_many(conn, source.queue, 120_000)
    forced_tick(conn, source.queue)
    box: Batches = []
    query = source.start(source.stream(startingAt="earliest"), box)
    query.processAllAvailable()
    query.stop()
    sizes = [len(found) for _, found in box]
    # 4.0 and 4.1 know no such windows.
    assert sizes[:2] == ([0, 50_000] if newest_spark() else [len(sent)])
    assert sum(sizes) == len(sent)
    assert len(set(payloads(box))) == len(sent)


def test_a_part_of_a_tick_that_failed_is_read_again_as_it_was(source: Source, conn: Connection) -> None:
    configure(conn, source.queue, max_window=100)
    send_many(conn, source.queue, 250)
    forced_tick(conn, source.queue)
    box: Batches = []
    query = source.start(source.stream(startingAt="earliest"), box, fail=1)
    assert "failed on purpose" in failure(query.awaitTermination, 60)
    position = "select last_tick from pgque.get_consumer_info(%s, 'c')"
    assert value(conn, position, source.queue) == 1
    # Whatever the limit is now, the part that was planned is the same.
    configure(conn, source.queue, max_window=30)
    send(conn, source.queue, "later")
    forced_tick(conn, source.queue)
    again: Batches = []
    query = source.start(source.stream(maxEventsPerTrigger=50), again)
    query.processAllAvailable()
    query.stop()
    assert [(number, len(found)) for number, found in again] == [(1, 100), (2, 30), (3, 20), (4, 1)]
    assert Counter(box[1][1]) == Counter(again[0][1])
    found = payloads(box[:1] + again)
    assert Counter(found) == Counter([*(str(n) for n in range(1, 251)), "later"])
    # A new checkpoint begins where the consumer stands: before a window that is read in part.
    assert value(conn, position, source.queue) > 1


def test_a_checkpoint_within_a_tick_that_was_lost_ends_the_query(source: Source, conn: Connection) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    from pgque.errors import PgqueTickNotFoundError
    from pgque.spark.datasource import PgqueDataSource

    def reader(**options: object) -> Any:
        given = {
            "consumer": "c",
            "columns": "payload",
            "startingAt": "earliest",
            "pollIntervalMs": 0,
            **options,
        }
        schema = StructType([StructField("payload", StringType())])
        return PgqueDataSource(source.options(given)).streamReader(schema)

    configure(conn, source.queue, max_window=10)
    send_many(conn, source.queue, 25)
    last = forced_tick(conn, source.queue)
    first, again = reader(), reader(failOnDataLoss=False)
    start = first.initialOffset()
    within = first.latestOffset(start)
    assert within["tick"] == f"{start['tick']}:{last}:10"
    assert first.partitions(start, within)
    # As after a failover to a standby that did not have it: another transaction may be in the next tick.
    newest = forced_tick(conn, source.queue)
    gone = "delete from pgque.tick t using pgque.queue q where q.queue_id = t.tick_queue and q.queue_name = %s and t.tick_id = %s"
    rows(conn, gone, source.queue, last)
    with pytest.raises(PgqueTickNotFoundError, match=f"tick not found: {last}"):
        first.latestOffset(within)
    first.stop()
    assert again.latestOffset(within)["tick"] == f"{start['tick']}:{newest}:10"
    again.stop()


def test_limits_that_are_lowered_between_two_runs_read_nothing_twice(
    source: Source, conn: Connection
) -> None:
    for _ in range(5):
        send_many(conn, source.queue, 10)
        forced_tick(conn, source.queue)
    box: Batches = []
    query = source.start(source.stream(startingAt="earliest"), box)
    query.processAllAvailable()
    query.stop()
    for _ in range(3):
        send_many(conn, source.queue, 10)
        forced_tick(conn, source.queue)
    query = source.start(source.stream(maxTicksPerTrigger=1), box)
    query.processAllAvailable()
    query.stop()
    query = source.start(source.stream(maxTicksPerTrigger=1), box)
    query.processAllAvailable()
    query.stop()
    assert sorted(payloads(box)) == sorted(str(n) for n in range(1, 11) for _ in range(8))


def test_available_now_reads_to_its_end_in_limited_batches(source: Source, conn: Connection) -> None:
    for _ in range(5):
        send_many(conn, source.queue, 10)
        forced_tick(conn, source.queue)
    found = source.run(source.stream(startingAt="earliest", maxTicksPerTrigger=2))
    if newest_spark():
        assert [len(batch) for _, batch in found] == [20, 20, 10]
        return
    # Before 4.2 such a run has one batch.
    assert [len(batch) for _, batch in found] == [20]
    found += source.run(source.stream())
    assert [len(batch) for _, batch in found] == [20, 30]


def test_available_now_ends_with_what_was_there_when_it_began(source: Source, conn: Connection) -> None:
    send_many(conn, source.queue, 10)
    forced_tick(conn, source.queue)
    found: list[int] = []

    def each(batch: DataFrame, number: int) -> None:
        found.append(batch.count())
        send_many(conn, source.queue, 10)
        forced_tick(conn, source.queue)

    frame = source.stream(startingAt="earliest")
    query = frame.writeStream.foreachBatch(each).option("checkpointLocation", source.checkpoint)
    assert query.trigger(availableNow=True).start().awaitTermination(60)
    assert found == [10]


def test_a_trigger_of_once_reads_everything(source: Source, conn: Connection) -> None:
    for _ in range(3):
        send_many(conn, source.queue, 10)
        forced_tick(conn, source.queue)
    box: Batches = []
    query = source.start(source.stream(startingAt="earliest", maxTicksPerTrigger=1), box, once=True)
    assert query.awaitTermination(60)
    assert [len(batch) for _, batch in box] == ([30] if newest_spark() else [10])


def pass_ids(conn: Connection, queue: str, count: int) -> int:
    """Send one message and make a tick that counts as `count` messages, as after sends that were rolled back."""
    send(conn, queue)
    value(
        conn,
        "select setval(q.queue_event_seq, nextval(q.queue_event_seq) + %s) from pgque.queue q where q.queue_name = %s",
        count - 2,
        queue,
    )
    return forced_tick(conn, queue)


def test_windows_grow_while_a_stream_catches_up(source: Source, conn: Connection) -> None:
    from pgque.spark._compat import ReadMaxRows

    for most, sizes in ((None, [2, 2, 8, 28]), (100_000, [2, 2, 4, 4, 4])):
        subscribe(conn, source.queue)
        ticks = [pass_ids(conn, source.queue, 25_000) for _ in range(40)]
        limited = {} if most is None else {"maxEventsPerTrigger": most}
        stream = direct(source, **limited)
        at = stream.initialOffset()
        found = []
        while at["tick"] < ticks[-1]:
            before, at = at["tick"], stream.latestOffset(at, ReadMaxRows(1))
            found.append(at["tick"] - before)
        stream.commit(at)
        stream.stop()
        assert found[: len(sizes)] == sizes
        assert sum(found) == 40


def test_windows_have_the_size_that_takes_a_few_seconds() -> None:
    from pgque.spark._pace import Pace

    pace, now = Pace(None, None), 999_987.5
    sizes = [pace.next(now)]
    # The first micro-batch, which waits for Spark's workers, says nothing. The last one is a pause of Spark,
    # whose trigger of a minute begins at whole minutes.
    for seconds, behind in (
        (9, True),
        (1, True),
        (1.5, True),
        (1, False),
        (6, True),
        (90, True),
        (32.05, True),
    ):
        pace.planned(behind)
        now += seconds
        sizes.append(pace.next(now))
    assert sizes == [50_000, 50_000, 150_000, 300_000, 300_000, 150_000, 75_000, 75_000 * 32]


def test_one_micro_batch_may_have_all_that_is_there(source: Source, conn: Connection) -> None:
    for most, batches in (({}, 3), ({"maxEventsPerTrigger": "all"}, 1)):
        for _ in range(3):
            pass_ids(conn, source.queue, 50_000)
        found = source.run(source.stream(startingAt="earliest", **most))
        # 4.0 and 4.1 read a run in one.
        assert len(found) == (batches if newest_spark() else 1)


# --- Several queues -----------------------------------------------------------------------------------


class Several:
    """Queues whose names begin alike, and a stream of all of them, each run of which returns what it read."""

    def __init__(self, source: Source, conn: Connection) -> None:
        self.source, self.conn = source, conn
        self.pattern = f"{source.queue}_*"

    def name(self, letter: str) -> str:
        return f"{self.source.queue}_{letter}"

    def put(self, **payloads: str) -> None:
        """Send a payload to each queue, and tick it."""
        for letter, payload in payloads.items():
            send(self.conn, self.name(letter), payload)
            forced_tick(self.conn, self.name(letter))

    def run(self, letters: str = "", **given: object) -> list[str]:
        names = ",".join(self.name(letter) for letter in letters) or self.pattern
        frame = self.source.stream(queues=names, startingAt="earliest", **given)
        box = self.source.run(frame.selectExpr("concat(queue, ' ', payload) as payload"))
        return sorted(payload.removeprefix(self.source.queue + "_") for payload in payloads(box))


@pytest.fixture
def several(source: Source, conn: Connection) -> Iterator[Several]:
    found = Several(source, conn)
    for letter in "ab":
        value(conn, "select pgque.create_queue(%s)", found.name(letter))
    yield found
    for letter in "abc":
        conn.execute(
            "select pgque.drop_queue(i.queue_name, true) from pgque.get_queue_info() as i"
            " where i.queue_name = %s",
            [found.name(letter)],
        )


def test_queues_join_and_leave_a_stream_when_it_starts(several: Several, conn: Connection) -> None:
    several.put(a="1", b="1")
    assert several.run() == ["a 1", "b 1"]
    value(conn, "select pgque.create_queue(%s)", several.name("c"))
    several.put(a="2", c="1")
    assert several.run() == ["a 2", "c 1"]
    # c is left out, and later goes on where it was.
    several.put(a="3", b="2", c="2")
    assert several.run("ab") == ["a 3", "b 2"]
    several.put(b="3")
    assert several.run(numPartitions=1) == ["b 3", "c 2"]
    # The checkpoint names a queue that is gone.
    value(conn, "select pgque.drop_queue(%s, true)", several.name("c"))
    several.put(a="4")
    told = failure(several.run)
    assert f"queue not found: {several.name('c')}" in told
    assert "failOnDataLoss=false" in told
    assert several.run(failOnDataLoss=False) == ["a 4"]
    assert "written with option queues" in failure(several.source.run, several.source.stream())


def test_a_batch_of_several_queues_that_failed_is_read_again_as_it_was(
    several: Several, conn: Connection
) -> None:
    several.put(a="1")
    several.run()
    for letter in "ab":
        send_many(conn, several.name(letter), 30)
        forced_tick(conn, several.name(letter))
    value(conn, "select pgque.create_queue(%s)", several.name("c"))
    several.put(c="1")
    frame = several.source.stream(queues=several.pattern, startingAt="earliest")
    columns = frame.selectExpr("concat(queue, payload) as payload")
    first = several.source.run(columns, fail=1)
    several.put(a="2", b="2", c="2")
    again = several.source.run(columns)
    if not newest_spark():
        again += several.source.run(columns)  # such a run has one batch, and that was the replay
    assert [number for number, _ in again] == [1, 2]
    assert len(again[0][1]) == 61
    assert Counter(first[-1][1]) == Counter(again[0][1])
    assert sorted(again[1][1]) == [several.name(letter) + "2" for letter in "abc"]


def test_queues_share_the_limit_of_a_micro_batch(several: Several, conn: Connection) -> None:
    for letter in "ab":
        for _ in range(3):
            send_many(conn, several.name(letter), 10)
            forced_tick(conn, several.name(letter))
    box: Batches = []
    frame = several.source.stream(queues=several.pattern, startingAt="earliest", maxEventsPerTrigger=20)
    query = several.source.start(frame, box)
    query.processAllAvailable()
    query.stop()
    assert [len(batch) for _, batch in box] == [20, 20, 20]


def test_a_micro_batch_waits_for_more_messages_but_not_for_ever(
    several: Several, conn: Connection, wait_until: Callable[..., None]
) -> None:
    from pgque.spark._compat import ReadAllAvailable, ReadMaxRows

    source, first, second = several.source, several.name("a"), several.name("b")
    given = {"queues": several.pattern, "minEventsPerTrigger": 10, "startingAt": "earliest"}
    stream, hasty = direct(source, **given), direct(source, **given, maxTriggerDelay="1ms")
    limit = ReadMaxRows(1)
    at = stream.latestOffset(stream.initialOffset(), limit)
    send_many(conn, first, 6)
    # What has no tick yet does not count.
    send_many(conn, second, 6)
    forced_tick(conn, first)
    for limited, waits in ((limit, True), (ReadAllAvailable(), False)):
        assert (stream.latestOffset(at, limited) == at) is waits
    at = stream.latestOffset(at, ReadAllAvailable())
    forced_tick(conn, second)
    assert stream.latestOffset(at, limit) == at
    send_many(conn, first, 4)
    forced_tick(conn, first)
    at = stream.latestOffset(at, limit)
    send(conn, first)
    forced_tick(conn, first)
    assert stream.latestOffset(at, limit) == at
    stream.prepareForTriggerAvailableNow()
    assert stream.latestOffset(at, limit) != at
    stream.stop()
    start = hasty.latestOffset(at, limit)
    send(conn, first)
    forced_tick(conn, first)
    wait_until(lambda: hasty.latestOffset(start, limit) != start, "it has waited long enough")
    hasty.stop()


def test_a_batch_reads_several_queues(several: Several) -> None:
    several.put(a="1", b="2")
    read = several.source.batch
    frame = read(queues=several.pattern, columns="queue,payload")
    assert frame.columns == ["queue", "payload"]
    assert sorted(tuple(row) for row in frame.collect()) == [
        (several.name("a"), "1"),
        (several.name("b"), "2"),
    ]
    assert read(queues=several.pattern, columns="queue").count() == 2
    assert read(queues=several.pattern).columns[0] == "queue"
    assert "no queue is there" in failure(read(queues="nix_*").collect)
    assert "cannot be a tick" in failure(read, queues=several.pattern, startingAt=1)
    assert "exclude each other" in failure(
        several.source.spark.read.format("pgque").options(queue="q", queues="q").load
    )


# --- One query for each consumer ----------------------------------------------------------------------


def test_a_second_query_of_a_consumer_fails_and_names_it(source: Source, conn: Connection) -> None:
    first = source.start(source.stream(), [])
    first.processAllAvailable()
    told = failure(source.run, source.stream(), checkpoint=source.checkpoint + "-second")
    assert "consumer c of queue" in told
    assert source.queue in told
    assert "pgque-spark/" in told
    assert first.isActive
    source.run(source.stream(consumer="d"), checkpoint=source.checkpoint + "-third")


def test_a_query_waits_for_the_connection_of_its_predecessor(
    source: Source, conn: Connection, connect: Callable[..., Connection]
) -> None:
    holder = connect()
    value(holder, "select pgque.open_stream(%s, 'c')", source.queue)
    send(conn, source.queue, "x")
    forced_tick(conn, source.queue)
    threading.Timer(2, holder.close).start()
    assert payloads(source.run(source.stream())) == ["x"]


def test_a_stopped_query_gives_its_consumer_free(source: Source, conn: Connection) -> None:
    for number in range(2):
        box: Batches = []
        query = source.start(source.stream(), box)
        query.processAllAvailable()
        send(conn, source.queue, str(number))
        forced_tick(conn, source.queue)
        query.processAllAvailable()
        query.stop()
        assert payloads(box) == [str(number)]


# --- Loss ---------------------------------------------------------------------------------------------


def lose(conn: Connection, queue: str) -> int:
    """Move the consumer to the newest tick and rotate until the first tick is gone; return the earliest."""
    value(conn, "select pgque.seek(%s, 'c', pgque.tick_for(%s, 'latest'))", queue, queue)
    for _ in range(8):
        send(conn, queue, "lost")
        tick = forced_tick(conn, queue)
        value(conn, "select pgque.seek(%s, 'c', %s)", queue, tick)
        rotate(conn, queue)
        value(conn, "select pgque.maint_rotate_tables_step2()")
        forced_tick(conn, queue)
    earliest: int = value(conn, "select pgque.tick_for(%s, 'earliest')", queue)
    assert earliest > 1
    return earliest


def test_lost_messages_fail_the_query_and_are_named(source: Source, conn: Connection) -> None:
    send(conn, source.queue, "a")
    tick = forced_tick(conn, source.queue)
    source.run(source.stream(startingAt="earliest"))
    earliest = lose(conn, source.queue)
    told = failure(source.run, source.stream())
    assert f"behind tick {tick} of queue {source.queue} are lost" in told
    assert str(earliest) in told
    assert "Start again with another checkpoint" in told
    assert "all consumers have passed" in told
    assert "failOnDataLoss" in told


def test_lost_messages_are_passed_over_on_demand(source: Source, conn: Connection) -> None:
    send(conn, source.queue, "a")
    forced_tick(conn, source.queue)
    source.run(source.stream(startingAt="earliest"))
    lose(conn, source.queue)
    send(conn, source.queue, "still there")
    forced_tick(conn, source.queue)
    found = payloads(source.run(source.stream(failOnDataLoss=False)))
    assert "a" not in found
    assert found[-1] == "still there"
    send(conn, source.queue, "next")
    forced_tick(conn, source.queue)
    assert payloads(source.run(source.stream(failOnDataLoss=False))) == ["next"]


def test_a_queue_that_was_made_anew_is_noticed(source: Source, conn: Connection) -> None:
    for _ in range(5):
        send(conn, source.queue, "old")
        forced_tick(conn, source.queue)
    source.run(source.stream(startingAt="earliest"))
    value(conn, "select pgque.drop_queue(%s, true)", source.queue)
    value(conn, "select pgque.create_queue(%s)", source.queue)
    send(conn, source.queue, "new")
    forced_tick(conn, source.queue)
    assert "failOnDataLoss" in failure(source.run, source.stream())
    assert payloads(source.run(source.stream(failOnDataLoss=False))) == ["new"]
    send(conn, source.queue, "newer")
    forced_tick(conn, source.queue)
    assert payloads(source.run(source.stream())) == ["newer"]


def test_a_checkpoint_is_of_one_queue_and_follows_its_new_name(
    source: Source, conn: Connection, new_queue: Callable[[], str]
) -> None:
    other = new_queue()
    for queue in (source.queue, other):
        subscribe(conn, queue)
        send_many(conn, queue, 3)
        forced_tick(conn, queue)
    first = source.queue
    source.run(source.stream())
    source.queue = other
    assert f"the checkpoint is of queue {first}" in failure(source.run, source.stream())
    source.queue = other + "_renamed"
    value(conn, "select pgque.drop_queue(%s, true)", other)
    value(conn, "select pgque.rename_queue(%s, %s)", first, source.queue)
    send(conn, source.queue)
    forced_tick(conn, source.queue)
    try:
        assert len(payloads(source.run(source.stream()))) == 1
    finally:
        value(conn, "select pgque.rename_queue(%s, %s)", source.queue, first)


@pytest.mark.parametrize("how", [{}, {"startingAt": "earliest"}], ids=["latest", "earliest"])
def test_a_queue_that_was_made_anew_and_has_passed_the_checkpoint_is_noticed(
    source: Source, conn: Connection, how: dict[str, object]
) -> None:
    for _ in range(3):
        send(conn, source.queue, "old")
        forced_tick(conn, source.queue)
    source.run(source.stream(startingAt="earliest"))
    value(conn, "select pgque.drop_queue(%s, true)", source.queue)
    value(conn, "select pgque.create_queue(%s)", source.queue)
    for _ in range(9):
        send(conn, source.queue, "new")
        forced_tick(conn, source.queue)
    assert "was created again" in failure(source.run, source.stream(**how))


def test_a_checkpoint_that_its_consumer_has_left_behind_is_noticed(source: Source, conn: Connection) -> None:
    subscribe(conn, source.queue)
    source.run(source.stream())
    send(conn, source.queue, "passed")
    forced_tick(conn, source.queue)
    value(conn, "select pgque.seek(%s, 'c', pgque.tick_for(%s, 'latest'))", source.queue, source.queue)
    send(conn, source.queue, "next")
    forced_tick(conn, source.queue)
    assert "stands at tick" in failure(source.run, source.stream())
    assert payloads(source.run(source.stream(failOnDataLoss=False))) == ["passed", "next"]


def test_a_batch_passes_over_what_is_lost_on_demand(source: Source, conn: Connection) -> None:
    subscribe(conn, source.queue)
    lose(conn, source.queue)
    assert "tick not found: 1 " in failure(source.batch(startingAt=1).collect)
    assert source.batch(startingAt=1, failOnDataLoss=False).count() == source.batch().count()
    assert "tick not found" in failure(source.batch(startingAt=999_999, failOnDataLoss=False).collect)


def test_a_queue_that_is_dropped_ends_the_query(
    source: Source, conn: Connection, wait_until: Callable[..., None]
) -> None:
    query = source.start(source.stream(pollIntervalMs=50), [])
    query.processAllAvailable()
    value(conn, "select pgque.drop_queue(%s, true)", source.queue)
    wait_until(lambda: not query.isActive, "the query ends", 30)
    told = str(query.exception())
    assert source.queue in told
    assert "PgqueQueueNotFoundError" in told
    value(conn, "select pgque.create_queue(%s)", source.queue)


def test_a_consumer_that_is_dropped_ends_the_query(
    source: Source, conn: Connection, wait_until: Callable[..., None]
) -> None:
    query = source.start(source.stream(), [])
    query.processAllAvailable()
    value(conn, "select pgque.unsubscribe(%s, 'c')", source.queue)
    send(conn, source.queue)
    forced_tick(conn, source.queue)
    wait_until(lambda: not query.isActive, "the query ends", 30)
    assert "PgqueConsumerNotFoundError" in str(query.exception())


def test_rotation_under_a_running_query_loses_nothing(source: Source, conn: Connection) -> None:
    box: Batches = []
    query = source.start(source.stream(), box)
    query.processAllAvailable()
    configure(conn, source.queue, rotation_period="1 microsecond")
    sent = 0
    for _ in range(8):
        for _ in range(10):
            send(conn, source.queue, str(sent))
            sent += 1
        forced_tick(conn, source.queue)
        value(conn, "select pgque.maint_rotate_tables_step1(%s)", source.queue)
        value(conn, "select pgque.maint_rotate_tables_step2()")
        query.processAllAvailable()
    query.stop()
    assert payloads(box) and Counter(payloads(box)) == Counter(str(n) for n in range(sent))
    assert value(conn, "select pgque.tick_for(%s, 'earliest')", source.queue) > 1


# --- Connections --------------------------------------------------------------------------------------


def sessions(conn: Connection, queue: str) -> list[int]:
    return column(
        conn,
        "select a.pid from pg_stat_activity as a where a.application_name = %s",
        f"pgque-spark/{queue}/c",
    )


def test_the_query_lives_through_the_loss_of_its_connection(
    source: Source, conn: Connection, wait_until: Callable[..., None]
) -> None:
    box: Batches = []
    query = source.start(source.stream(), box)
    for number in range(2):
        query.processAllAvailable()
        (pid,) = sessions(conn, source.queue)
        value(conn, "select pg_terminate_backend(%s)", pid)
        send(conn, source.queue, str(number))
        forced_tick(conn, source.queue)
        wait_until(lambda n=number: len(payloads(box)) == n + 1, "the message is read", 30)
    assert query.isActive
    # The new connection holds the consumer again.
    with pytest.raises(psycopg.Error) as caught:
        value(conn, "select pgque.open_stream(%s, 'c')", source.queue)
    assert caught.value.sqlstate == "PQ006"
    query.stop()
    assert payloads(box) == ["0", "1"]


def test_an_idle_query_has_one_connection_and_asks_little(
    source: Source, conn: Connection, wait_until: Callable[..., None]
) -> None:
    conn.execute(f"alter role {source.role.name} set track_functions = 'all'".encode())
    stream = source.spark.readStream.format("pgque").options(**source.options({"consumer": "c"})).load()
    query = source.start(stream, [])
    calls = (
        "select coalesce(sum(s.calls), 0)::int from pg_stat_user_functions as s"
        " where s.schemaname = 'pgque' and s.funcname in ('tick_for', 'next_tick', 'open_stream', 'seek')"
    )
    wait_until(lambda: value(conn, calls) > 0, "the query runs", 30)
    assert value(conn, "select count(*) from pg_stat_activity where usename = %s", source.role.name) == 1
    before, began = value(conn, calls), time.monotonic()
    time.sleep(2)
    made, took = value(conn, calls) - before, time.monotonic() - began
    assert query.isActive
    query.stop()
    assert made > 0
    # One query has two of these calls.
    assert made / 2 / took < 10


def test_a_micro_batch_asks_the_server_six_times(source: Source, conn: Connection, tmp_path: Path) -> None:
    from pgque.spark._compat import ReadMaxRows

    subscribe(conn, source.queue)
    stream = direct(source)
    start = stream.initialOffset()
    asked = []
    for number in range(3):
        send(conn, source.queue)
        forced_tick(conn, source.queue)
        path = tmp_path / str(number)
        with path.open("wb") as file:
            libpq = stream._connected()._connected().pgconn
            libpq.trace(file.fileno())
            end = stream.latestOffset(start, ReadMaxRows(1))
            stream.reportLatestOffset()
            if number > 0:
                stream.commit(start)
            stream.partitions(start, end)
            libpq.untrace()
        asked.append(len(re.findall(r"\tF\t\d+\t(?:Sync|Query)\b", path.read_text())))
        start = end
    stream.stop()
    # Newest ticks, next window, lag, where the consumer stands, pieces; from the second one on, its move. The
    # first one forgets what a run before it could not parse.
    assert asked == [6, 6, 6]


def test_a_task_reads_in_a_read_only_transaction_under_the_query_s_name(
    source: Source, conn: Connection, wait_until: Callable[..., None]
) -> None:
    from pyspark.sql.types import StructType

    from pgque.spark import options
    from pgque.spark._window import Task, Window, ddl, layout, read

    send_many(conn, source.queue, 100)
    tick = forced_tick(conn, source.queue)
    subscribe(conn, source.queue)
    given = options.parse(source.options({"consumer": "c", "fetchSize": 10}), options.STREAM_READ)
    reading = read(
        given, layout(given, StructType.fromDDL(ddl(given))), Task([Window(source.queue, tick - 1, tick)])
    )
    assert next(reading).num_rows == 10
    (pid,) = sessions(conn, source.queue)
    locks = (
        "select count(*) from pg_locks where pid = %s and mode not in ('AccessShareLock', 'ExclusiveLock')"
    )
    assert value(conn, locks, pid) == 0
    assert value(conn, "select state from pg_stat_activity where pid = %s", pid) == "idle in transaction"
    assert sum(batch.num_rows for batch in reading) == 90
    wait_until(lambda: sessions(conn, source.queue) == [], "the connection has the task's name no longer")


def test_the_reader_connects_only_when_it_is_asked(source: Source, conn: Connection) -> None:
    import pickle

    reader = direct(source)
    pickle.loads(pickle.dumps(reader))  # noqa: S301
    assert sessions(conn, source.queue) == []
    assert reader.initialOffset() == reader.initialOffset()
    assert len(sessions(conn, source.queue)) == 1
    reader.stop()


def test_the_server_is_soon_to_notice_that_the_driver_s_host_is_lost(
    source: Source, jdbc_as: Callable[[Role], Any]
) -> None:
    reader = direct(source, url=jdbc_as(source.role).dsn)
    reader.initialOffset()
    # Only the session itself can tell, and only through TCP.
    (seconds,) = reader._connected().do(
        lambda conn: conn.execute(
            "select current_setting('tcp_keepalives_idle')::int"
            " + current_setting('tcp_keepalives_interval')::int * current_setting('tcp_keepalives_count')::int"
        ).fetchone()
    )
    assert 0 < seconds <= 30
    reader.stop()


def test_a_position_that_cannot_be_moved_is_logged(
    source: Source, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    from pyspark.sql.types import StructType

    from pgque.spark import options
    from pgque.spark.source import PgqueStreamReader

    reader = PgqueStreamReader(
        options.parse(source.options({"consumer": "c"}), options.STREAM_READ), StructType([])
    )
    reader.initialOffset()
    with caplog.at_level(logging.WARNING, "pgque.spark"):
        reader.commit({"tick": 999_999})
    assert "was not moved to tick 999999" in caplog.text
    reader.stop()


# --- Secrets ------------------------------------------------------------------------------------------


def test_a_password_is_nowhere_to_be_seen(
    spark: SparkSession, source: Source, conn: Connection, scratch: Path
) -> None:
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    parts = {k: v for k, v in conninfo_to_dict(source.role.dsn).items() if v is not None}
    secret = "pw" + secrets.token_hex(8)
    conn.execute(f"alter role {source.role.name} password '{secret}'".encode())
    open_part = make_conninfo("", **{k: v for k, v in parts.items() if k != "password"})
    send(conn, source.queue, "x")
    forced_tick(conn, source.queue)
    for url, password in ((open_part, secret), (make_conninfo(open_part, password=secret), "")):
        frame = source.stream(url=url, password=password, startingAt="earliest")
        query = source.start(frame, [], availableNow=True, checkpoint=source.checkpoint + "-" + password[:2])
        assert query.awaitTermination(60)
        batch = source.batch(url=url, password=password)
        assert batch.count() == 1
        seen = [
            batch._jdf.queryExecution().toString(),
            str(query.lastProgress),
            query._jsq.explainInternal(True),
            failure(source.batch(url=url, password=password, queue="nix").collect),
            failure(source.run, source.stream(url=url, password=password, queue="nix")),
            failure(source.batch(url=url + " port=1", password=password).collect),
            failure(
                lambda u=url, p=password: source.batch(url=f"{u} nonsense {secret}", password=p).collect()
            ),
            failure(source.batch, url=url, password=password, nonsense=1),
        ]
        for text in seen:
            assert secret not in text
    for file in (*Path(source.checkpoint).parent.rglob("*"),):
        if file.is_file() and "local" not in file.parts:
            assert secret.encode() not in file.read_bytes(), file
