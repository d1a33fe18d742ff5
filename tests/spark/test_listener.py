"""What Spark's progress, the log and Prometheus tell of a stream that reads a queue."""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import Role
from sql.helpers import Connection, forced_tick, send_many, subscribe, value

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


class Stream:
    """A stream of consumer c, one tick a micro-batch, with listeners."""

    def __init__(self, spark: SparkSession, role: Role, queue: str, checkpoint: Path) -> None:
        self.spark = spark
        self.role = role
        self.queue = queue
        self.checkpoint = str(checkpoint)

    def run(self, fail: int | None = None, **options: str) -> list[Any]:
        """Read what is there; return the progress of each micro-batch."""

        def each(batch: DataFrame, number: int) -> None:
            batch.count()
            if number == fail:
                raise RuntimeError("failed on purpose")

        given = {"queue": self.queue, "consumer": "c", "maxTicksPerTrigger": "1", **options}
        query: StreamingQuery = (
            self.spark.readStream.format("pgque")
            .options(url=self.role.dsn, **given)
            .load()
            .writeStream.foreachBatch(each)
            .queryName("large")
            .option("checkpointLocation", self.checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(60)
        except Exception as error:
            assert fail is not None and "failed on purpose" in str(error), error
        return list(query.recentProgress)


@pytest.fixture
def stream(spark: SparkSession, reader: Role, queue: str, tmp_path: Path) -> Stream:
    return Stream(spark, reader, queue, tmp_path / "checkpoint")


@pytest.fixture
def registry() -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()


@pytest.fixture
def listening(
    spark: SparkSession, reader: Role, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> Iterator[Any]:
    from pgque.spark.listener import PgqueListener

    listener = PgqueListener(reader.dsn, registry=registry)
    spark.streams.addListener(listener)
    with caplog.at_level(logging.INFO, "pgque.spark"):
        yield listener
    spark.streams.removeListener(listener)


def lines(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """Return what the listener logged, which Spark calls behind the query."""
    deadline = time.monotonic() + 20
    while True:
        found = [r.getMessage() for r in caplog.records if r.getMessage().startswith("query large")]
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def three_batches(conn: Connection, queue: str) -> list[int]:
    """Fill three ticks with 10, 5 and 2 messages; return the ticks."""
    subscribe(conn, queue)
    found = []
    for count in (10, 5, 2):
        send_many(conn, queue, count)
        found.append(forced_tick(conn, queue))
    return found


def test_each_progress_is_logged_with_queue_consumer_and_lag(
    stream: Stream, listening: object, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    from pgque.spark.listener import _offset

    ticks = three_batches(conn, stream.queue)
    progress = stream.run()
    while len(progress) < 3:  # 4.0: a micro-batch a run
        progress += stream.run()
    first, _, last = lines(caplog, 3)
    assert (
        f"micro-batch 0 of 10 rows: queue {stream.queue}, consumer c at tick {ticks[0]}, 7 events behind, 2"
        in first
    )
    assert (
        f"micro-batch 2 of 2 rows: queue {stream.queue}, consumer c at tick {ticks[2]}, 0 events behind, 0"
        in last
    )
    assert _offset(progress[0].sources[0].endOffset) == {
        "consumer": "c",
        "queue": stream.queue,
        "tick": ticks[0],
        "incarnation": str(value(conn, "select pgque.queue_incarnation(%s)", stream.queue)),
    }


def test_spark_s_progress_has_the_figures_without_a_listener(stream: Stream, conn: Connection) -> None:
    if importlib.util.find_spec("pyspark.sql.streaming.datasource") is None:
        pytest.skip("PySpark asks for them since 4.2")
    ticks = three_batches(conn, stream.queue)
    stream.run(fail=1)
    progress = stream.run()  # micro-batch 1 again, and 2
    latest = json.loads(progress[-1].sources[0].latestOffset)
    figures = latest["queues"][stream.queue]
    assert latest["consumer"] == "c"
    assert figures | {"oldestPendingSeconds": 0} == {
        "tick": ticks[2],
        "ticksBehind": 0,
        "eventsBehind": 0,
        "oldestPendingSeconds": 0,
        "lostTicks": 0,
        "replayedEpochs": 1,
    }


def test_ticks_that_are_gone_are_counted_once(reader: Role, queue: str, conn: Connection) -> None:
    from pyspark.sql.types import StructType

    from pgque.spark import options
    from pgque.spark._compat import ReadAllAvailable
    from pgque.spark.source import PgqueStreamReader

    subscribe(conn, queue)
    given = {
        "url": reader.dsn,
        "queue": queue,
        "consumer": "c",
        "failOnDataLoss": "false",
        "pollIntervalMs": "0",
    }
    stream = PgqueStreamReader(options.parse(given, options.STREAM_READ), StructType([]))
    start = stream.initialOffset()
    for _ in range(3):
        tick = forced_tick(conn, queue)
    value(conn, "select pgque.seek(%s, 'c', %s)", queue, tick - 1)
    for _ in range(2):
        assert stream.latestOffset(start, ReadAllAvailable())["tick"] == tick
        assert stream.reportLatestOffset()["queues"][queue]["lostTicks"] == 2
    stream.stop()


def test_prometheus_gets_the_figures_while_the_query_runs(
    stream: Stream, listening: Any, registry: CollectorRegistry, conn: Connection
) -> None:
    from prometheus_client import generate_latest

    shown = []
    forget = listening.onQueryTerminated

    def terminated(event: Any) -> None:
        listening.onQueryIdle(event)
        shown.append(generate_latest(registry).decode())
        forget(event)
        shown.append(generate_latest(registry).decode())

    listening.onQueryTerminated = terminated
    three_batches(conn, stream.queue)
    stream.run(maxTicksPerTrigger="3")
    deadline = time.monotonic() + 20
    while len(shown) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    labels = f'{{consumer="c",query="large",queue="{stream.queue}"}}'
    assert f"pgque_spark_events_behind{labels} 0.0" in shown[0]
    assert f"pgque_spark_oldest_pending_seconds{labels} 0.0" in shown[0]
    assert "consumer=" not in shown[1]
