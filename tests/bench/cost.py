"""What the server pays: CPU seconds, WAL, transaction ids, dead tuples; and what makes it pay more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench.measure import Bench, Number, one

TICK = os.sysconf("SC_CLK_TCK")
# A session hands in its statistics a second after its last transaction at the latest, or when it ends.
STATISTICS_DELAY = 1.1
OURS = "s.schemaname not in ('pg_catalog', 'information_schema', 'pg_toast', 'bench', 'cron')"
DEAD = f"select coalesce(sum(s.n_dead_tup), 0)::float from pg_stat_all_tables s where {OURS}"
NAMESPACES = OURS.replace("s.schemaname", "c.relnamespace::regnamespace::text")
BYTES = (
    "select coalesce(sum(pg_total_relation_size(c.oid)), 0)::float from pg_class c"
    f" where c.relkind = 'r' and {NAMESPACES}"
)
TABLES = f"select c.oid::regclass::text from pg_class c where c.relkind = 'r' and {NAMESPACES}"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on, or None."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


def own_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, 0 where it is out of sight."""
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / TICK


@dataclass(slots=True)
class Cost:
    """What the meters show, or what was paid between two readings: the later one less the earlier one.

    ``cpu_s`` is None where the server's processes are out of sight.
    """

    seconds: float
    cpu_s: float | None
    wal_bytes: float
    xids: float
    dead: float = 0.0

    def __sub__(self, before: Cost) -> Cost:
        cpu_s = None if self.cpu_s is None or before.cpu_s is None else self.cpu_s - before.cpu_s
        return Cost(
            self.seconds - before.seconds,
            cpu_s,
            self.wal_bytes - before.wal_bytes,
            self.xids - before.xids,
        )

    def per_million(self, messages: float) -> dict[str, Number]:
        """Return the figures for a million messages."""
        scale = 1e6 / max(messages, 1)
        figures: dict[str, Number] = {
            "wal_mb_per_million": self.wal_bytes * scale / 1e6,
            "xids_per_million": self.xids * scale,
            "dead_per_million": self.dead * scale,
        }
        if self.cpu_s is not None:
            figures["cpu_s_per_million"] = self.cpu_s * scale
        return figures


class Meter:
    """Reads the server's meters over a session of its own."""

    def __init__(self, bench: Bench) -> None:
        self.conn = bench.connect()
        self._postmaster = self._find_postmaster()
        self._excluded: set[int] = set()
        self._excluded_seconds = 0.0

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.conn.close()

    def _find_postmaster(self) -> int | None:
        """Return the server's first process if it runs on this machine, where we can see it."""
        row = self.conn.execute("select pg_backend_pid(), pg_read_file('postmaster.pid')").fetchone()
        assert row is not None
        fields, first = _stat(row[0]), int(str(row[1]).split()[0])
        return first if fields is not None and int(fields[1]) == first else None

    def exclude(self, pid: int) -> None:
        """Do not count a session: the analytic reader's work is not the queue's."""
        self._excluded.add(pid)

    def include(self, pid: int) -> None:
        """Call before a session that was left out ends: its time goes to its parent."""
        self._excluded_seconds += own_seconds(pid)
        self._excluded.discard(pid)

    def _cpu(self) -> float | None:
        """Return the CPU seconds of the server so far, of processes that ended too."""
        if self._postmaster is None:
            return None
        while True:
            inherited = self._ticks(self._postmaster, 13, 15)
            ticks = self._ticks(self._postmaster, 11, 13) + sum(
                self._ticks(int(entry.name), 11, 15, self._postmaster)
                for entry in Path("/proc").iterdir()
                if entry.name.isdigit()
            )
            # A process that ended meanwhile would be counted here or there, or twice, or not at all.
            if inherited == self._ticks(self._postmaster, 13, 15):
                return (
                    (ticks + inherited) / TICK
                    - sum(map(own_seconds, self._excluded))
                    - self._excluded_seconds
                )

    @staticmethod
    def _ticks(pid: int, start: int, end: int, parent: int | None = None) -> int:
        """Add up fields of a process, if it is there and a child of ``parent``."""
        fields = _stat(pid)
        if fields is None or parent not in (None, int(fields[1])):
            return 0
        return sum(int(field) for field in fields[start:end])

    def read(self) -> Cost:
        """Read all meters but the dead tuples."""
        row = self.conn.execute(
            "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float,"
            " pg_snapshot_xmax(pg_current_snapshot())::text::float"
        ).fetchone()
        assert row is not None
        return Cost(time.monotonic(), self._cpu(), row[0], row[1])

    def dead(self) -> float:
        """Return the dead tuples in the tables of all systems, once every session has told its own."""
        return float(one(self.conn, DEAD))

    def bytes(self) -> float:
        """Return what the tables of all systems take on disk."""
        return float(one(self.conn, BYTES))


@contextmanager
def held_xmin(bench: Bench) -> Iterator[None]:
    """Hold back vacuum: by an old snapshot, and by an old transaction with an id."""
    with bench.connect(autocommit=False) as reader, bench.connect(autocommit=False) as writer:
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select count(*) from pg_class")
        writer.execute("select pg_current_xact_id()")
        try:
            yield
        finally:
            reader.rollback()
            writer.rollback()


@contextmanager
def analytic_reader(bench: Bench, meter: Meter, seconds: float = 5.0) -> Iterator[None]:
    """Read all tables again and again in a REPEATABLE READ transaction, and begin another after some seconds."""
    done = threading.Event()
    conn = bench.connect()
    pid = conn.info.backend_pid

    def loop() -> None:
        conn.execute("set max_parallel_workers_per_gather = 0")
        while not done.is_set():
            tables = [row[0] for row in conn.execute(TABLES.encode()).fetchall()]
            until = time.monotonic() + seconds
            # One that was dropped since it was listed
            with suppress(psycopg.errors.UndefinedTable), conn.transaction():
                conn.execute("set transaction isolation level repeatable read")
                while time.monotonic() < until and not done.is_set():
                    for table in tables:
                        conn.execute(f"select count(*), sum(length(t::text)) from {table} t".encode())
                    done.wait(0.02)

    thread = threading.Thread(target=loop, daemon=True)
    meter.exclude(pid)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(30)
        meter.include(pid)
        conn.close()
