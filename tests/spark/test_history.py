"""Streams that begin in the archive of another consumer: each message once, whatever fails or is killed."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import Role
from pgque.spark import options
from sql.helpers import (
    Connection,
    ack,
    configure,
    drain,
    forced_tick,
    ids,
    nack,
    payloads,
    receive,
    rows,
    send_many,
    subscribe,
    value,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

SPARK_CONF = {"spark.master": "local[2,2]"}  # a failed task is run once more

Batches = list[tuple[int, list[Any]]]


class Source:
    """Streams of consumer s over the archive of c and the queue, which collect what they read."""

    def __init__(self, spark: SparkSession, role: Role, queue: str, folder: Path) -> None:
        self.spark = spark
        self.role = role
        self.queue = queue
        self.checkpoint = folder / "checkpoint"

    def stream(self, **given: object) -> DataFrame:
        options = {
            "url": self.role.dsn,
            "queue": self.queue,
            "consumer": "s",
            "startingAt": "archive",
            "archiveOf": "c",
            "pollIntervalMs": 0,
            "maxEventsPerTrigger": 10,
            "numPartitions": 3,
            **given,
        }
        named = {name: str(given) for name, given in options.items() if given is not None}
        return self.spark.readStream.format("pgque").options(**named).load()

    def start(self, box: Batches, fail: int | None = None, **given: object) -> StreamingQuery:
        """Start a query that puts (batch id, rows) into the box, and fails in batch `fail`."""

        def each(batch: DataFrame, number: int) -> None:
            box.append((number, batch.collect()))
            if number == fail:
                raise RuntimeError("failed on purpose")

        writer = self.stream(**given).writeStream.foreachBatch(each)
        return writer.option("checkpointLocation", str(self.checkpoint)).start()

    def run(self, fail: int | None = None, **given: object) -> Batches:
        """Read what is there; return the batches."""
        box: Batches = []
        query = self.start(box, fail, **given)
        try:
            query.processAllAvailable()
        except Exception as error:
            if fail is None:
                raise
            assert "failed on purpose" in str(error)
        finally:
            query.stop()
        return box

    def offsets(self) -> list[dict[str, Any]]:
        """Return the offsets of the checkpoint, the oldest first."""
        folder = self.checkpoint / "offsets"
        files = sorted(
            (file for file in folder.iterdir() if file.name.isdigit()), key=lambda file: int(file.name)
        )
        return [json.loads(file.read_text().splitlines()[-1]) for file in files]


@pytest.fixture
def source(spark: SparkSession, admin: Role, queue: str, conn: Connection, tmp_path: Path) -> Source:
    configure(conn, queue, archive_on_ack="true")
    subscribe(conn, queue)
    return Source(spark, admin, queue, tmp_path)


@pytest.fixture(autouse=True)
def _no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def numbers(batches: Batches) -> list[int]:
    return [row.msg_id for _, found in batches for row in found]


def failure(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Expect the call to fail; return all that Spark tells."""
    with pytest.raises(Exception) as caught:
        call(*args, **options)
    return str(caught.value)


def past(conn: Connection, queue: str) -> list[int]:
    """Send 40 messages that c has done with, nacked, given up, or not received; return their ids."""
    sent = send_many(conn, queue, 24)
    forced_tick(conn, queue)
    batch = receive(conn, queue)
    nack(conn, batch[3], "1 hour")
    rows(conn, "select * from pgque.dead(%s, %s::bigint[])", batch[0].batch_id, sent[7:9])
    ack(conn, batch[0].batch_id)
    sent += send_many(conn, queue, 16)
    forced_tick(conn, queue)
    return sent


def test_the_archive_and_then_the_queue_are_read_once(source: Source, conn: Connection) -> None:
    sent = past(conn, source.queue)
    found = source.run()
    assert sorted(numbers(found)) == sent
    assert [len(rows) for _, rows in found] == [10, 10, 4, 16]
    start = found[0][1][0]
    assert (start.type, start.payload, start.retry_count) == ("default", "1", None)
    tick = value(conn, "select pgque.tick_for(%s, 'latest')", source.queue) - 1
    of = str(value(conn, "select pgque.queue_incarnation(%s)", source.queue))
    at = {"consumer": "s", "queue": source.queue, "tick": tick, "incarnation": of}
    assert source.offsets() == [
        *({**at, "archive": {"of": "c", "after": sent[last]}} for last in (9, 19, 23)),
        {**at, "tick": tick + 1},
    ]
    # A restart goes on; so does another checkpoint, at the consumer's position.
    more = send_many(conn, source.queue, 3)
    forced_tick(conn, source.queue)
    assert sorted(numbers(source.run())) == more
    source.checkpoint = source.checkpoint.with_name("another")
    assert set(numbers(source.run())) <= {*sent[24:], *more}


@pytest.mark.parametrize("fail", [0, 1, 3])
def test_a_batch_that_failed_is_read_again_as_it_was(source: Source, conn: Connection, fail: int) -> None:
    """Also if its messages have moved to the archive since, and later ones of the queue as well."""
    sent = past(conn, source.queue)
    first = source.run(fail=fail)
    assert first[-1][0] == fail
    value(conn, "select pgque.retry_now(%s, 'c')", source.queue)
    drain(conn, source.queue)
    again = source.run(numPartitions=1)
    assert again[0][0] == fail
    assert Counter(numbers(again[:1])) == Counter(numbers(first[-1:]))
    assert sorted(numbers(first[:-1] + again)) == sent


def test_the_archive_begins_again_with_another_checkpoint_until_it_is_read(
    source: Source, conn: Connection
) -> None:
    sent = past(conn, source.queue)
    assert len(numbers(source.run(fail=1))) == 20
    source.checkpoint = source.checkpoint.with_name("another")
    assert sorted(numbers(source.run())) == sent


def test_only_what_is_asked_for_is_read_of_the_archive(source: Source, conn: Connection) -> None:
    for number in range(6):
        kind = "order" if number % 2 else "other"
        payload = json.dumps({"n": number}) if number < 5 else "no JSON"
        value(conn, 'select pgque.send(%s, %s, %s::text, \'{"h": "é"}\'::jsonb)', source.queue, kind, payload)
    forced_tick(conn, source.queue)
    drain(conn, source.queue)
    batches = source.run(types="order", columns="type,headers", payloadSchema="n int")
    found = [row for _, batch in batches for row in batch]
    assert [tuple(row) for row in sorted(found, key=lambda row: row.n or 9)] == [
        ("order", {"h": "é"}, 1, None),
        ("order", {"h": "é"}, 3, None),
        ("order", {"h": "é"}, None, "no JSON"),
    ]


def test_spark_s_progress_shows_the_queue_behind_the_archive(source: Source, conn: Connection) -> None:
    from pgque.spark.listener import _offset

    sent = past(conn, source.queue)
    box: Batches = []
    query = source.start(box, fail=1)
    with pytest.raises(Exception, match="failed on purpose"):
        query.processAllAvailable()
    first = query.recentProgress[0].sources[0]
    assert _offset(first.endOffset)["archive"] == {"of": "c", "after": sent[9]}
    if importlib.util.find_spec("pyspark.sql.streaming.datasource"):  # from 4.2 on
        figures = json.loads(first.latestOffset)["queues"][source.queue]
        assert (figures["ticksBehind"], figures["eventsBehind"]) == (1, 16)


def test_an_archive_that_lacks_messages_is_refused_unless_loss_is_fine(
    source: Source, conn: Connection
) -> None:
    sent = send_many(conn, source.queue, 4)
    forced_tick(conn, source.queue)
    batch = receive(conn, source.queue, count=2)
    configure(conn, source.queue, archive_on_ack="false")
    ack(conn, batch[0].batch_id)
    configure(conn, source.queue, archive_on_ack="true")
    drain(conn, source.queue)
    assert f"the archive of consumer c of queue {source.queue} lacks messages" in failure(source.run)
    assert sorted(numbers(source.run(failOnDataLoss="false"))) == [n for n in sent if n not in ids(batch)]


def test_options_that_do_not_fit_are_refused(source: Source, conn: Connection) -> None:
    archive = {"queue": "q", "consumer": "s", "startingAt": "archive", "archiveOf": "c"}
    for given, text in (
        ({"archiveOf": None}, "needs option archiveOf"),
        ({"startingAt": "earliest"}, "option archiveOf needs startingAt=archive"),
        ({"queue": None, "queues": "a,b"}, "needs option queue"),
        ({"consumer": "c"}, "needs a consumer of its own"),
        ({"badRecords": "dead", "payloadSchema": "n int"}, "badRecords=dead and startingAt=archive"),
    ):
        named = {name: given for name, given in {**archive, **given}.items() if given is not None}
        assert text in failure(options.parse, named, options.STREAM_READ)
    past(conn, source.queue)
    source.run(fail=0)
    assert "the checkpoint stands in an archive" in failure(
        source.run, startingAt="earliest", archiveOf=None, maxEventsPerTrigger=5
    )
    subscribe(conn, source.queue, "other")
    assert "consumer s reads the archive of c, not of other" in failure(source.run, archiveOf="other")
    source.checkpoint = source.checkpoint.with_name("another")
    assert "consumer s reads the archive of c, not of other" in failure(source.run, archiveOf="other")


def test_a_reader_that_does_not_administer_the_queue_is_refused(source: Source, reader: Role) -> None:
    source.role = reader
    assert "'admin');" in failure(source.run)


@pytest.mark.parametrize("who", ["s", "c"])
def test_a_consumer_that_is_unsubscribed_meanwhile_ends_the_query(
    source: Source, conn: Connection, who: str
) -> None:
    past(conn, source.queue)
    source.run(fail=1)
    value(conn, "select pgque.unsubscribe(%s, %s)", source.queue, who)
    subscribe(conn, source.queue, "c")
    drain(conn, source.queue)
    text = failure(source.run)
    assert ("was made anew" if who == "s" else "not subscriber to queue") in text


def test_a_queue_that_was_dropped_meanwhile_is_not_taken_for_the_rest_of_its_archive(
    source: Source, conn: Connection
) -> None:
    past(conn, source.queue)
    source.run(fail=1)
    assert source.offsets()[-1]["archive"]["after"] > 0
    value(conn, "select pgque.drop_queue(%s, true)", source.queue)
    value(conn, "select pgque.create_queue(%s)", source.queue)
    configure(conn, source.queue, archive_on_ack="true")
    subscribe(conn, source.queue)
    sent = past(conn, source.queue)
    assert "was created again" in failure(source.run)
    assert sorted(numbers(source.run(failOnDataLoss="false"))) == sorted(sent)


@pytest.mark.parametrize("lossy", [False, True])
def test_the_archive_of_a_queue_that_was_created_again_is_not_read_on(
    source: Source, conn: Connection, lossy: bool
) -> None:
    past(conn, source.queue)
    source.run(fail=1)
    before = source.offsets()[-1]
    assert before["archive"]["after"] > 0
    assert before["incarnation"] == str(value(conn, "select pgque.queue_incarnation(%s)", source.queue))
    value(conn, "select pgque.drop_queue(%s, true)", source.queue)
    value(conn, "select pgque.create_queue(%s)", source.queue)
    configure(conn, source.queue, archive_on_ack="true")
    subscribe(conn, source.queue)
    # The stream's consumer is there again, before the archive as it was.
    value(conn, "select pgque.subscribe_archive(%s, 's', 'c')", source.queue)
    sent = past(conn, source.queue)
    if lossy:
        assert sorted(numbers(source.run(failOnDataLoss="false"))) == sorted(sent)
    else:
        text = failure(source.run)
        assert f"archive of queue {source.queue}, and the queue was created again" in text


def test_an_offset_in_the_archive_without_an_incarnation_goes_on_and_gets_one(
    source: Source, conn: Connection
) -> None:
    sent = past(conn, source.queue)
    source.run(fail=1)
    for file in (source.checkpoint / "offsets").iterdir():
        if file.name.isdigit():
            *head, last = file.read_text().splitlines()
            offset = json.loads(last)
            del offset["incarnation"]
            file.write_text("\n".join([*head, json.dumps(offset)]))
            file.with_name(f".{file.name}.crc").unlink()
    assert sorted(numbers(source.run())) == sorted(sent[10:])
    assert all("incarnation" in offset for offset in source.offsets()[2:])


JOB = """
import os
source, target, checkpoint = sys.argv[1:4]
url = os.environ["JOB_URL"]
rows = (
    spark.readStream.format("pgque")
    .options(url=url, queue=source, consumer="s", startingAt="archive", archiveOf="c", numPartitions="2")
    .option("maxEventsPerTrigger", 200)
    .load()
)
writer = rows.select("payload").writeStream.format("pgque")
query = writer.options(url=url, queue=target, checkpointLocation=checkpoint).start()
print("RUNNING", flush=True)
query.awaitTermination()
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_drivers_lose_and_double_nothing(
    source: Source,
    run_driver: Callable[..., Any],
    conn: Connection,
    new_queue: Callable[[], str],
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    """The driver is killed in the archive and behind it, while c works and messages are sent."""
    target = new_queue()
    subscribe(conn, target, "check")
    sent = 0
    got: Counter[str | None] = Counter()

    def put(count: int) -> None:
        nonlocal sent
        texts = [str(sent + number) for number in range(count)]
        value(conn, "select pgque.send_batch(%s, 'default', %s::text[])", source.queue, texts)
        sent += count
        forced_tick(conn, source.queue)

    def work() -> None:
        """Let c receive what is there, and nack some of it."""
        value(conn, "select pgque.retry_now(%s, 'c')", source.queue)
        for _ in range(4):
            batch = receive(conn, source.queue, count=500)
            for message in batch[::100]:
                nack(conn, message, "1 hour")
            if batch:
                ack(conn, batch[0].batch_id)

    def arrived(wanted: int, more: int = 7) -> bool:
        put(more)
        work()
        forced_tick(conn, target)
        got.update(payloads(conn, target, "check", 5_000))
        return got.total() >= wanted or not driver.running

    for _ in range(4):
        put(400)
        work()
    for wanted in (600, 1_700):
        driver = run_driver(
            JOB, source.queue, target, str(tmp_path / "job"), env={"JOB_URL": source.role.dsn}
        )
        driver.wait_for("RUNNING")
        wait_until(lambda n=wanted: arrived(n), f"{wanted} messages arrive", 120)
        assert driver.running, driver.output()[-4000:]
        driver.kill()
    driver = run_driver(JOB, source.queue, target, str(tmp_path / "job"), env={"JOB_URL": source.role.dsn})
    driver.wait_for("RUNNING")
    wait_until(lambda: arrived(sent, 0), "all arrives", 120)
    # Behind this one nothing can be on its way.
    put(1)
    wait_until(lambda: arrived(sent, 0), "the last message arrives", 60)
    assert driver.running, driver.output()[-4000:]
    driver.end()
    assert got == Counter(str(number) for number in range(sent))
