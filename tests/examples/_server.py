"""Where the examples run: the database that the first argument names, or a server for the run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pgque import embedded
from pgque.install import install
from pgque.ticker import run_ticker


@contextmanager
def database() -> Iterator[str]:
    """Give the connection string of a database with pgque that ticks."""
    if len(sys.argv) > 1:
        with _ticking(sys.argv[1]):
            yield sys.argv[1]
    else:
        with embedded.start(embedded.find_server("embedded").bindir) as server:
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
