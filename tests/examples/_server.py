"""Where the examples run: the database that the first argument names, or a server for the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.conninfo import conninfo_to_dict

from pgque import embedded
from pgque.ops.install import install
from pgque.ops.ticker import run_ticker


@contextmanager
def database() -> Iterator[str]:
    """Give the connection string of a database with pgque that ticks."""
    if len(sys.argv) > 1:
        with _ticking(sys.argv[1]):
            yield sys.argv[1]
    else:
        with embedded.start() as server:
            install(server.dsn)
            with _ticking(server.dsn):
                yield server.dsn


@contextmanager
def _ticking(dsn: str) -> Iterator[None]:
    stop = threading.Event()
    ticker = threading.Thread(target=run_ticker, args=(dsn, stop))
    ticker.start()
    try:
        yield
    finally:
        stop.set()
        ticker.join()


@contextmanager
def started(command: list[str], **options: object) -> Iterator[subprocess.Popen]:
    """Start a program, and end it after the block."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


def export(dsn: str) -> None:
    """Set the PG* environment variables, for programs that find the database by these."""
    names = {
        "dbname": "PGDATABASE",
        "user": "PGUSER",
        "password": "PGPASSWORD",
        "host": "PGHOST",
        "port": "PGPORT",
    }
    for name, value in conninfo_to_dict(dsn).items():
        if name in names:
            os.environ[names[name]] = str(value)
