"""What a row costs that Spark reads from one, two or three servers, or writes to them.

All of it runs on one machine, so what is compared is rows per second of the CPU: Spark's and that of all
servers. With more servers than cores no more rows per second can be had here.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from os import getpid, sysconf
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from bench.measure import Row
from bench.spark import started
from pgque import embedded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SQL_FILE = Path(__file__).resolve().parents[2] / "sql" / "pgque.sql"
TICK = sysconf("SC_CLK_TCK")
PASSWORD = "bench"


def processes() -> dict[int, tuple[int, list[int]]]:
    """Return all processes: the parent, and the ticks of their own and of their children that ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            found[int(entry.name)] = int(fields[1]), [int(field) for field in fields[11:15]]
    return found


class Meter:
    """The CPU seconds of this process and all below it.

    Spark's daemons end before their workers, whose time then goes to nobody: so a thread looks all the time.
    Servers inherit what their sessions used.
    """

    def __init__(self, servers: list[int]) -> None:
        self._servers = set(servers)
        self._seen: dict[int, int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.read()
            time.sleep(0.05)

    def read(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            there = processes()
            level, ours, inherited = {getpid()}, set[int](), 0
            while level:
                ours |= level
                level = {pid for pid, (parent, _) in there.items() if parent in level}
            for pid in ours:
                self._seen[pid] = sum(there[pid][1][:2])
            for pid in ours:
                if pid in self._servers:
                    inherited += sum(there[pid][1][2:])
                elif there[pid][0] in self._servers:
                    # What a session used, its server has when it has ended.
                    inherited += self._seen.pop(pid)
            return (sum(self._seen.values()) + inherited) / TICK


class Farm:
    """Three servers with a queue to read and one to write."""

    def __init__(self, stack: ExitStack) -> None:
        self.servers = [stack.enter_context(embedded.start()) for _ in range(3)]
        self.conns = [
            stack.enter_context(psycopg.connect(server.dsn, autocommit=True)) for server in self.servers
        ]
        for conn in self.conns:
            conn.execute(SQL_FILE.read_bytes())
            conn.execute(
                f"create role spark login password '{PASSWORD}' in role pgque_reader, pgque_writer".encode()
            )
            conn.execute("select pgque.create_queue('target')")

    def options(self, count: int) -> dict[str, str]:
        """Return Spark's options for the first servers."""
        names = ",".join(f"127.0.0.1:{server.port}" for server in self.servers[:count])
        return {"servers": names, "dbname": "postgres", "user": "spark", "password": PASSWORD}

    def fill(self, rows: int) -> None:
        """Send the rows to queues that one, two and three servers share."""
        for count in (1, 2, 3):
            for conn in self.conns[:count]:
                conn.execute("select pgque.create_queue(%s)", [f"source{count}"])
                conn.execute("select pgque.subscribe(%s, 'keeps')", [f"source{count}"])
                for _ in range(10):
                    conn.execute(
                        "select pgque.send_batch(%s, 'default', array(select"
                        ' format(\'{"id": %%s, "pad": "%%s"}\', n, repeat(\'x\', 170)) from generate_series(1, %s) as n))',
                        [f"source{count}", rows // 10 // count],
                    )
                    conn.execute("select pgque.force_next_tick(%s)", [f"source{count}"])
                    conn.execute("select pgque.ticker(%s)", [f"source{count}"])


def read(session: SparkSession, farm: Farm, count: int, rows: int, per_trigger: int) -> None:
    """Read a stream of some servers, which has as many rows in all."""
    found = 0

    def each(frame: DataFrame, number: int) -> None:
        nonlocal found
        found += frame.selectExpr("count(*) as n", "sum(length(payload))").collect()[0]["n"]

    consumer = f"bench{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as checkpoint:
        session.readStream.format("pgque").options(
            **farm.options(count),
            queue=f"source{count}",
            consumer=consumer,
            startingAt="earliest",
            maxEventsPerTrigger=str(per_trigger),
        ).load().writeStream.foreachBatch(each).option("checkpointLocation", checkpoint).trigger(
            availableNow=True
        ).start().awaitTermination()
    for conn in farm.conns[:count]:
        conn.execute("select pgque.unsubscribe(%s, %s)", [f"source{count}", consumer])
    assert found == rows, found


def write(session: SparkSession, farm: Farm, frame: DataFrame, count: int) -> None:
    """Write a frame to some servers, exactly once."""
    frame.write.format("pgque").options(
        **farm.options(count), queue="target", sinkId=f"bench{time.monotonic_ns()}", epoch="0"
    ).mode("append").save()


def measured(meter: Meter, rounds: int, call: Callable[[int], int]) -> dict[int, tuple[float, float]]:
    """Return rows per second of the CPU, and of time, of one to three servers: medians of rounds in turn."""
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: [], 3: []}
    for number in range(rounds + 1):
        for count, rates in found.items():
            cpu, clock = meter.read(), time.perf_counter()
            rows = call(count)
            took = time.perf_counter() - clock
            if number:
                rates.append((rows / (meter.read() - cpu), rows / took))
    return {
        count: (statistics.median(r[0] for r in rates), statistics.median(r[1] for r in rates))
        for count, rates in found.items()
    }


def lines(what: str, note: str, found: dict[int, tuple[float, float]]) -> Iterator[Row]:
    """Lay out one to three servers."""
    one = found[1][0]
    for count, (per_cpu, per_second) in found.items():
        yield Row(
            f"Spark {what} {count} server{'s' if count > 1 else ''}",
            f"{per_cpu:,.0f} rows/CPU s",
            f"{one:,.0f} rows/CPU s",
            per_cpu / one,
            "≥ 0.8" if count > 1 else "",
            per_cpu / one >= 0.8,
            f"{note}; {per_second:,.0f} rows/s; beside it one server",
            {"servers": count, "per_cpu_s": per_cpu, "per_s": per_second, "ratio": per_cpu / one},
        )


def main() -> None:
    """Measure both ways and write the rows."""
    quick = "--quick" in sys.argv
    rounds = 2 if quick else 3
    rows = 60_000 if quick else 300_000
    with ExitStack() as stack, started() as session:
        farm = Farm(stack)
        farm.fill(rows)
        meter = Meter([server.pid for server in farm.servers if server.pid is not None])

        def reads(count: int) -> int:
            read(session, farm, count, rows, 100_000)
            return rows

        found = [*lines("stream of", "micro-batches of 100,000 rows", measured(meter, rounds, reads))]
        frame = session.range(0, rows, 1, 2).selectExpr(
            "cast(id as string) as key",
            "concat('{\"id\": ', id, ', \"pad\": \"', repeat('x', 170), '\"}') as payload",
        )
        frame = frame.cache()
        frame.count()

        def writes(count: int) -> int:
            write(session, farm, frame, count)
            return rows

        found += lines("sink of", f"a batch of {rows:,} rows, exactly once", measured(meter, rounds, writes))
    Path(sys.argv[1]).write_text(json.dumps([asdict(row) for row in found]))


if __name__ == "__main__":
    main()
