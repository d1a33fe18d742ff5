# ruff: noqa: RUF001
"""What is measured with Spark: writes, reads and a stream, each beside its floor in the same run.

The benchmarks run without PySpark; this runs itself again with the Python of .venv/spark where that is there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.measure import Bench, Connection, Row, one, paired, percentile, queue, value_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

PYTHON = Path(__file__).resolve().parents[2] / ".venv" / "spark" / "bin" / "python"
JAR = os.environ.get("PGQUE_JDBC_JAR") or "/usr/share/java/postgresql.jar"
# About as long as an event of a web shop
PAYLOAD = "concat('{\"id\": ', id, ', \"pad\": \"', repeat('x', 170), '\"}')"


def missing() -> str | None:
    """Tell how to get what is missing here, or None."""
    if PYTHON.exists() and Path(JAR).exists() and shutil.which("java"):
        return None
    return "not measured: tests/support/spark.sh newest sets up what it needs"


def versions() -> str:
    """Tell what was measured with."""
    code = "import pyspark, pyarrow; print(f'PySpark {pyspark.__version__}, pyarrow {pyarrow.__version__}, local[2]')"
    return subprocess.run(
        [str(PYTHON), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def spark(bench: Bench) -> list[Row]:
    """All of the below, in a Python with PySpark."""
    return elsewhere(bench, "bench.spark")


def servers(bench: Bench) -> list[Row]:
    """Streams and sinks of one to three servers."""
    return elsewhere(bench, "bench.spark_servers")


def elsewhere(bench: Bench, module: str) -> list[Row]:
    """Run a module in a Python with PySpark."""
    if missing():
        return []
    with tempfile.TemporaryDirectory(prefix="pgque-bench-") as scratch:
        result = Path(scratch) / "rows.json"
        log = Path(scratch) / "log"
        with log.open("wb") as out:
            done = subprocess.run(
                [str(PYTHON), "-m", module, str(result), *(["--quick"] if bench.quick else [])],
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
                    "PGQUE_BENCH_DSN": bench.tcp or bench.dsn,
                    "PYSPARK_PYTHON": str(PYTHON),
                    "SPARK_LOCAL_IP": "127.0.0.1",
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"the Spark benchmarks failed:\n{log.read_text(errors='replace')[-4000:]}")
        return [Row(**row) for row in json.loads(result.read_text())]


class Session:
    """A Spark session and the database."""

    def __init__(self, dsn: str, quick: bool, session: SparkSession) -> None:
        self.dsn, self.quick, self.session = dsn, quick, session
        self.rounds = 3 if quick else 5
        parts = conninfo_to_dict(dsn)
        self._where = f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts['dbname']}"
        self._login = {name: str(parts[name]) for name in ("user", "password") if parts.get(name)}

    def connect(self) -> Connection:
        """Open a session of the database."""
        return psycopg.connect(self.dsn, autocommit=True)

    def jdbc(self) -> dict[str, str]:
        """Return Spark's options for JDBC."""
        url = f"jdbc:postgresql://{self._where}?reWriteBatchedInserts=true&logServerErrorDetail=false"
        return {"url": url, "driver": "org.postgresql.Driver", **self._login}

    def frame(self, name: str, count: int) -> DataFrame:
        """Return rows for the queue in two partitions, which are in memory already."""
        frame = self.session.range(0, count, 1, 2).selectExpr(
            f"'{name}' as queue", "'order.created' as type", f"{PAYLOAD} as payload"
        )
        frame = frame.cache()
        frame.count()
        return frame


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rate_row(what: str, count: int, bare: float, ours: float, ratio: float, target: float, note: str) -> Row:
    """Lay out rows per second of both sides."""
    return Row(
        what,
        f"{count / ours:,.0f}/s",
        f"{count / bare:,.0f}/s",
        1 / ratio,
        f"≥ {target}",
        1 / ratio >= target,
        note,
        {"rows": count, "ours_per_s": count / ours, "bare_per_s": count / bare, "ratio": 1 / ratio},
    )


def jdbc_writes(session: Session) -> Iterator[Row]:
    """Spark's JDBC into the two views and a plain table."""
    count = 50_000 if session.quick else 200_000
    with session.connect() as conn:
        queue(conn, "spark_jdbc")
        conn.execute("create table bench.spark_plain (queue text, type text, payload text)")

        def write(table: str) -> float:
            conn.execute("truncate bench.spark_plain")
            writer = frame.write.format("jdbc").options(**session.jdbc(), dbtable=table)
            return timed(lambda: writer.mode("append").save())

        frame = session.frame("spark_jdbc", count)
        for view, target in (("pgque.sink", 0.3), ("pgque.sink_bulk", 0.6)):
            bare, ours, ratio = paired(
                session.rounds, partial(write, "bench.spark_plain"), partial(write, view)
            )
            yield rate_row(
                f"Spark JDBC into {view.removeprefix('pgque.')}",
                count,
                bare,
                ours,
                ratio,
                target,
                "the same JDBC append into a table without index",
            )
        frame.unpersist()
        conn.execute("select pgque.drop_queue('spark_jdbc', true)")


def reads(session: Session) -> Iterator[Row]:
    """The source, as a batch and as a stream, and Spark's JDBC, over the same rows and columns."""
    count = 100_000 if session.quick else 1_000_000
    per_trigger = count // 10
    partitions = 4
    with session.connect() as conn:
        queue(conn, "spark_read")
        for _ in range(20):
            conn.execute("select pgque.send_batch('spark_read', bench.payloads(%s))", [count // 20])
            conn.execute("select pgque.ticker('spark_read')")
        leaf = value_of(conn, "select pgque.current_event_table('spark_read')")
        conn.execute(f"analyze {leaf}".encode())
        # Every column is looked at, since JDBC reads only what is.
        summary = (
            "count(*) as n",
            "max(msg_id)",
            "count(type)",
            "sum(length(payload))",
            "count(key)",
            "max(created_at)",
            "sum(retry_count)",
        )

        def check(frame: DataFrame) -> float:
            began = time.perf_counter()
            found = frame.selectExpr(*summary).collect()[0]
            took = time.perf_counter() - began
            assert found["n"] == count, found
            return took

        def read(kind: Any, **options: str) -> DataFrame:
            return (
                kind.format("pgque")
                .options(url=session.dsn, queue="spark_read", numPartitions=str(partitions), **options)
                .load()
            )

        columns = (
            "ev_id as msg_id, ev_type as type, ev_data as payload, coalesce(ev_key, ev_extra1) as key,"
            " ev_time as created_at, coalesce(ev_retry, 0) as retry_count"
        )

        def jdbc() -> float:
            return check(
                session.session.read.jdbc(
                    session.jdbc()["url"],
                    f"(select {columns}, ev_id from {leaf}) as e",
                    predicates=[f"ev_id % {partitions} = {part}" for part in range(partitions)],
                    properties={**session.jdbc(), "fetchsize": "10000"},
                )
            )

        def source() -> float:
            return check(read(session.session.read))

        def stream(most: int | str) -> float:
            read_so_far = 0

            def each(frame: DataFrame, number: int) -> None:
                nonlocal read_so_far
                read_so_far += frame.selectExpr(*summary).collect()[0]["n"]

            consumer = f"bench_{time.time_ns()}"
            with tempfile.TemporaryDirectory() as checkpoint:
                began = time.perf_counter()
                read(
                    session.session.readStream,
                    consumer=consumer,
                    startingAt="earliest",
                    maxEventsPerTrigger=str(most),
                ).writeStream.foreachBatch(each).option("checkpointLocation", checkpoint).trigger(
                    availableNow=True
                ).start().awaitTermination()
                took = time.perf_counter() - began
            assert read_so_far == count, read_so_far
            conn.execute("select pgque.unsubscribe('spark_read', %s)", [consumer])
            return took

        batch = paired(session.rounds, jdbc, source)
        streamed = paired(session.rounds, jdbc, partial(stream, per_trigger))
        at_once = paired(session.rounds, jdbc, partial(stream, "all"))
        conn.execute("select pgque.drop_queue('spark_read', true)")
    same = f"Spark's JDBC read of the same rows and columns, also in {partitions} partitions"
    yield rate_row("Spark source, batch read", count, *batch, 0.8, same)
    yield rate_row(f"Spark source, stream of {per_trigger:,} a micro-batch", count, *streamed, 0.2, same)
    yield rate_row("Spark source, stream of one micro-batch", count, *at_once, 0.45, same)


def sinks(session: Session) -> Iterator[Row]:
    """The exactly-once sink, and a writer that copies into a plain table."""
    from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

    class Writer(DataSourceArrowWriter):  # type: ignore[misc]
        """COPY what a task has into a plain table."""

        def __init__(self, dsn: str) -> None:
            self._dsn = dsn

        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            import io

            import psycopg
            from pyarrow import csv

            with (
                psycopg.connect(self._dsn) as conn,
                conn.cursor().copy("copy bench.spark_copied from stdin (format csv)") as copy,
            ):
                for batch in iterator:
                    out = io.BytesIO()
                    csv.write_csv(batch, out, csv.WriteOptions(include_header=False))
                    copy.write(out.getbuffer())
            return WriterCommitMessage()

    class PlainCopy(DataSource):  # type: ignore[misc]
        """A sink with no promise."""

        @classmethod
        def name(cls) -> str:
            return "plain_copy"

        def writer(self, schema: object, overwrite: bool) -> Writer:
            return Writer(self.options["dsn"])

    count = 50_000 if session.quick else 200_000
    session.session.dataSource.register(PlainCopy)
    with session.connect() as conn:
        queue(conn, "spark_sink")
        conn.execute("create table bench.spark_copied (queue text, type text, payload text)")
        frame = session.frame("spark_sink", count)

        def bare() -> float:
            conn.execute("truncate bench.spark_copied")
            return timed(
                lambda: frame.write.format("plain_copy").option("dsn", session.dsn).mode("append").save()
            )

        def ours() -> float:
            return timed(lambda: frame.write.format("pgque").option("url", session.dsn).mode("append").save())

        bare_s, ours_s, ratio = paired(session.rounds, bare, ours)
        assert one(conn, "select count(*) from bench.spark_copied") == count
        frame.unpersist()
        conn.execute("select pgque.drop_queue('spark_sink', true)")
    yield rate_row(
        "Spark sink, exactly once",
        count,
        bare_s,
        ours_s,
        ratio,
        0.45,
        "psycopg COPY of the same frame into a table without index, at least once",
    )


def latency(session: Session) -> Iterator[Row]:
    """From a tick until the stream's message can be read in the other queue."""
    rounds = 15 if session.quick else 40
    with session.connect() as conn, tempfile.TemporaryDirectory() as checkpoint:
        queue(conn, "spark_from")
        queue(conn, "spark_to")
        leaf = value_of(conn, "select pgque.current_event_table('spark_to')")
        stream = (
            session.session.readStream.format("pgque")
            .options(url=session.dsn, queue="spark_from", consumer="bench", startingAt="earliest")
            .load()
        )
        query = (
            stream.select("type", "payload")
            .writeStream.format("pgque")
            .options(url=session.dsn, queue="spark_to", checkpointLocation=checkpoint)
            .start()
        )
        times = []
        try:
            for number in range(rounds + 5):
                conn.execute("select pgque.send('spark_from', 'x'::text)")
                conn.execute("select pgque.force_next_tick('spark_from')")
                conn.execute("select pgque.ticker('spark_from')")
                began = time.perf_counter()
                while one(conn, f"select count(*) from {leaf}") <= number:
                    if not query.isActive:
                        raise RuntimeError(str(query.exception()))
                    time.sleep(0.005)
                if number >= 5:
                    times.append(time.perf_counter() - began)
                time.sleep(0.3)
        finally:
            query.stop()
    middle, late = percentile(times, 0.5), percentile(times, 0.95)
    yield Row(
        "tick until Spark's sink, p50",
        f"{middle * 1000:.0f} ms",
        "–",
        None,
        "≤ 1 s",
        middle <= 1,
        f"p95 {late * 1000:.0f} ms; one message at a time, default trigger",
        {"p50_ms": middle * 1000, "p95_ms": late * 1000},
    )


@contextmanager
def started() -> Iterator[SparkSession]:
    """Start Spark, with a folder of its own."""
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory(prefix="pgque-bench-", ignore_cleanup_errors=True) as scratch:
        builder: Any = SparkSession.builder
        for name, value in {
            "spark.master": "local[2]",
            "spark.driver.memory": "1g",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraClassPath": JAR,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": f"{scratch}/warehouse",
            "spark.local.dir": f"{scratch}/local",
            "spark.log.level": "ERROR",
        }.items():
            builder = builder.config(name, value)
        session: SparkSession = builder.getOrCreate()
        yield session
        session.stop()


def main() -> None:
    """Measure everything and write the rows."""
    rows: list[Row] = []
    with started() as spark_session:
        session = Session(make_conninfo(os.environ["PGQUE_BENCH_DSN"]), "--quick" in sys.argv, spark_session)
        for subject in (jdbc_writes, reads, sinks, latency):
            rows += subject(session)
    Path(sys.argv[1]).write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
