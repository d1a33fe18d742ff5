# ruff: noqa: RUF001
"""Measure pgque against bare SQL in the same run; print a table and write JSON. Used by `make bench`.

Nothing is asserted: a target is reached or missed, and the table says which.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.table import Table

from bench import (
    batches,
    cycle,
    drain,
    elsewhere,
    handlers,
    idle,
    latency,
    measure,
    peers,
    pgq,
    results,
    soak,
    spark,
    systems,
    versions,
    web,
    workers,
)
from bench.measure import FLOOR_SQL, Bench, Row
from pgque import embedded

DATABASE = "pgque_bench"
SUBJECTS = {
    **measure.SUBJECTS,
    "spark": spark.spark,
    "spark-servers": spark.servers,
    "workers": handlers.workers,
    "batches": batches.batches,
    "workers-long": workers.workers_long,
    "peers": peers.peers,
    "drain": drain.drain,
    "latency": latency.latency,
    "idle": idle.idle,
    "pgq": pgq.pgq,
    "soak": soak.soak,
    "web": web.web,
}
ONLY_IF_NAMED = {"spark-servers", "workers-long", "peers", "drain", "latency", "idle", "pgq", "soak", "web"}
BESIDE_PEERS = {"peers", "drain", "latency"}
# What --against measures: the same names, another way.
AGAINST = {"small": cycle.small, "held": cycle.held, "latency": versions.latency}
SQL_FILE = Path(__file__).resolve().parents[2] / "sql" / "pgque.sql"
EARLIER = Path(__file__).resolve().parents[1] / "sql" / "previous"
SETTINGS = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "shared_buffers",
    "work_mem",
    "max_wal_size",
    "wal_level",
    "autovacuum",
    "jit",
)


@contextmanager
def database(dsn: str | None, sql_file: Path) -> Iterator[tuple[str, str, bool]]:
    """Make a database with pgque and the floor in it, on the server given or one of our own.

    Gives its connection string, one that does not use a socket, and whether it has pg_cron.
    """
    server: embedded.Server | None = None
    if dsn is None:
        bindir = os.environ.get("PGQUE_TEST_BINDIR")
        found = embedded.given(Path(bindir)) if bindir else embedded.find_server()
        cron = found.has_extension("pg_cron")
        server = embedded.start(
            found.bindir,
            preload=["pg_cron"] if cron else [],
            settings={"cron.database_name": DATABASE} if cron else None,
        )
        dsn = server.dsn
    target = make_conninfo(dsn, dbname=DATABASE)
    tcp = target if server is None else make_conninfo(server.tcp_dsn, dbname=DATABASE)
    try:
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute(f"drop database if exists {DATABASE} with (force)")
            admin.execute(f"create database {DATABASE}")
        with psycopg.connect(target) as conn:
            conn.execute(sql_file.read_bytes())
            conn.execute(FLOOR_SQL.read_bytes())
        has_cron = _create_cron(target)
        yield target, tcp, has_cron
    finally:
        if server is not None:
            server.stop()
        else:
            with psycopg.connect(dsn, autocommit=True) as admin:
                admin.execute(f"drop database if exists {DATABASE} with (force)")


@contextmanager
def earlier(dsn: str, version: str) -> Iterator[str]:
    """Make a second database on the server, with a released version; give its connection string."""
    name = f"{DATABASE}_against"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"drop database if exists {name} with (force)")
        admin.execute(f"create database {name}")
        try:
            target = make_conninfo(dsn, dbname=name)
            with psycopg.connect(target) as conn:
                conn.execute(lzma.decompress((EARLIER / f"pgque-{version}.sql.xz").read_bytes()))
            yield target
        finally:
            admin.execute(f"drop database if exists {name} with (force)")


def _create_cron(target: str) -> bool:
    with psycopg.connect(target, autocommit=True) as conn:
        row = conn.execute("select current_setting('cron.database_name', true)").fetchone()
        if row is None or row[0] != DATABASE:
            return False
        conn.execute("create extension pg_cron")
    return True


def describe(target: str) -> dict[str, str | int]:
    """Tell machine, server and settings."""
    with psycopg.connect(target) as conn:
        rows = conn.execute(
            "select name, current_setting(name) from pg_settings where name = any (%s)", (list(SETTINGS),)
        ).fetchall()
        version = conn.execute("select current_setting('server_version')").fetchone()
        cron = conn.execute("select extversion from pg_extension where extname = 'pg_cron'").fetchone()
    values: dict[str, str] = dict(rows)
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cpu": _cpu(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "server": "PostgreSQL " + str(version[0] if version else "?").split(" ")[0],
        "pg_cron": str(cron[0]) if cron else "none",
        "settings": ", ".join(f"{name} {values[name]}" for name in SETTINGS if name in values),
        "load": f"{os.getloadavg()[0]:.1f} at the start",
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def table(rows: list[Row], beside: str) -> Table:
    """Lay the rows out."""
    result = Table(show_edge=False, pad_edge=False)
    for name in ("what", "pgque", beside, "ratio", "target", "verdict", "note"):
        result.add_column(
            name,
            justify="right" if name in ("pgque", beside, "ratio") else "left",
            no_wrap=name != "note",
        )
    for row in rows:
        result.add_row(
            row.what,
            row.ours,
            row.bare,
            "–" if row.ratio is None else f"{row.ratio:.2f} ×",
            row.target,
            ("" if not row.target else "[green]reached[/]") if row.reached else "[red]missed[/]",
            row.note,
        )
    return result


def main() -> int:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--dsn", help=f"a server to use; a database {DATABASE} is made there, and dropped")
    parser.add_argument("--sql", type=Path, default=SQL_FILE, help="measure another pgque.sql")
    versions_there = sorted(file.name[6:-7] for file in EARLIER.glob("pgque-*.sql.xz"))
    parser.add_argument(
        "--against",
        metavar="VERSION",
        choices=versions_there,
        help=f"compare with a released version instead: {', '.join(versions_there)}; measures {', '.join(AGAINST)}",
    )
    parser.add_argument("--only", metavar="A,B", help="some of: " + ",".join(SUBJECTS))
    parser.add_argument(
        "--minutes", type=float, help="how long workers-long (10) and soak (30) run; with --quick 1"
    )
    parser.add_argument("--save", action="store_true", help=f"write the figures and plots to {results.SHOWN}")
    arguments = parser.parse_args()
    subjects = AGAINST if arguments.against else SUBJECTS
    names = (
        arguments.only.split(",")
        if arguments.only
        else [n for n in subjects if arguments.against or n not in ONLY_IF_NAMED]
    )
    unknown = [name for name in names if name not in subjects]
    if unknown:
        parser.error(f"no such subject: {', '.join(unknown)}; there are {', '.join(subjects)}")
    if arguments.against and arguments.save:
        parser.error("--save is for figures of this version")

    # A terminated run must still stop its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    if not console.is_terminal:
        console = Console(width=190)
    progress = Console(stderr=True)
    found: dict[str, list[Row]] = {}
    beside_peers = not arguments.against and bool(BESIDE_PEERS & set(names))
    if arguments.save or beside_peers:
        elsewhere.set_up()
    began = time.monotonic()
    with ExitStack() as stack:
        target, tcp, has_cron = stack.enter_context(database(arguments.dsn, arguments.sql))
        machine = describe(target)
        bench = Bench(target, arguments.quick, has_cron, tcp, arguments.minutes or 0)
        if arguments.against:
            other = stack.enter_context(earlier(target, arguments.against))
            bench = replace(bench, against=Bench(other, arguments.quick, has_cron=False))
        for name in names:
            with progress.status(f"{name} …"):
                found[name] = subjects[name](bench)
    if {"spark", "spark-servers"} & set(names):
        machine["spark"] = spark.missing() or spark.versions()
    if beside_peers:
        machine["peers"] = elsewhere.missing() or elsewhere.versions()
        machine["unequal"] = "\n".join(systems.UNEQUAL)
    machine["load"] = f"{machine['load']}, {os.getloadavg()[0]:.1f} at the end"
    machine["took"] = f"{time.monotonic() - began:.0f} s"
    rows = [row for subject in found.values() for row in subject]
    console.print(table(rows, arguments.against or "bare SQL"))
    console.print()
    for key, value in machine.items():
        console.print(f"{key:9} {value}", highlight=False)
    if arguments.json:
        report = {"machine": machine, "quick": arguments.quick, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if arguments.save:
        for file in results.save(machine, arguments.quick, found):
            console.print(f"wrote {file}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
