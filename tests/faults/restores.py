"""Ways to load a dump, and a ticker that never stops while it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg

from faults.clusters import run, until

# A dump in the folder format serves all ways: pg_restore writes it as SQL too.
WAYS = ("psql", "pg_restore", "pg_restore -1", "-j2", "-j4", "-j8", "sections", "sections -j4")


def pg_restore(bindir: Path, folder: Path, dsn: str, *words: str | Path) -> None:
    """Load with pg_restore; the first error ends it. Returns when its sessions have ended too."""
    run(folder, bindir / "pg_restore", "--exit-on-error", "-d", dsn, *words)
    sessions_end(dsn)


def sessions_end(dsn: str) -> None:
    """Wait until pg_restore has no session here: one that is still about to end counts as one that loads."""
    ours = (
        "select from pg_stat_activity where datname = current_database() and application_name = 'pg_restore'"
    )
    with psycopg.connect(dsn, autocommit=True) as conn:
        until(lambda: not conn.execute(ours).fetchall(), "the sessions of pg_restore end")


def load(way: str, bindir: Path, folder: Path, dsn: str, dump: Path) -> None:
    """Load a dump in folder format into a new database; the first error ends it."""
    if way == "psql":
        script = folder / f"{dump.name}.{threading.get_ident()}.sql"
        run(folder, bindir / "pg_restore", "-f", script, dump)
        run(folder, bindir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", script)
    elif way.startswith("sections"):
        for section in ("pre-data", "data", "post-data"):
            pg_restore(bindir, folder, dsn, *way.split()[1:], f"--section={section}", dump)
    else:
        pg_restore(bindir, folder, dsn, *way.split()[1 if way.startswith("pg_restore") else 0 :], dump)


@contextmanager
def ticker(dsn: str, *calls: str) -> Iterator[None]:
    """Tick and maintain without a pause, as pg_cron and `pgque ticker` do, and pay no heed to errors.

    Begins before the first object is there. Ends after a round that began when the block was done. Each round makes
    these calls too.
    """
    done = threading.Event()
    rounds = 0

    def tick() -> None:
        nonlocal rounds
        while not done.is_set():
            with suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as conn:
                for call in (
                    "call pgque.ticker_loop('50 milliseconds')",
                    "select pgque.ticker()",
                    "select pgque.maint()",
                    "select pgque.maint_tables()",
                    *calls,
                ):
                    with suppress(psycopg.Error):
                        conn.execute("set lock_timeout = '1s'")
                        conn.execute(call.encode())
            rounds += 1

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        until(lambda: rounds, "the ticker runs")
        yield
        seen = rounds
        until(lambda: rounds > seen + 1, "the ticker runs after the restore", 60)
    finally:
        done.set()
        thread.join(60)
