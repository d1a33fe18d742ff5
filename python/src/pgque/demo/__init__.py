"""The demo: real files, two consumers, exactly once.

Every Python file of the standard library becomes a message. A group of worker processes compiles each file
and records it in the transaction of the ack; a second consumer adds up sizes. A file that does not compile
is retried, and ends as a dead letter.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import tempfile
import time
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo
from rich.console import Console

from ..cli.common import line_width, plain_console, visible
from ..errors import PgqueError, PgqueQueueNotFoundError
from ..ops.embedded import EmbeddedServerError
from ..ops.install import install
from ..twins.client import PgqueClient, connect
from .files import good_lines, library_messages
from .page import Page
from .report import Counts, Display, dead_letters, farewell, report, tuples
from .servers import Driver, Place, find_place
from .signals import clean_ends
from .work import COMPILER, QUEUE, SEND_AT_ONCE, SIZES, TABLES, compile_worker, size_worker

MAX_RETRIES = 2
STALLED = 60.0  # seconds without any progress until the demo gives up


def run_demo(
    *,
    dsn: str = "",
    server: str = "auto",
    workers: int | None = None,
    path: Path | None = None,
    keep: bool = False,
) -> int:
    """Run the demo and return its exit code: 0 when each consumer saw every message exactly once."""
    console = plain_console(line_width() or 120)
    count = workers or min(8, max(2, os.cpu_count() or 2))
    try:
        with clean_ends(), ExitStack() as stack:
            if path is not None:
                messages = good_lines(path, console)
                if not messages:
                    console.print(f"{visible(str(path))} has no line to send")
                    return 1
                type_ = "line"
            else:
                own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgque-demo-")))
                messages, type_ = library_messages(own, console), "file"
            place = stack.enter_context(find_place(dsn, server, keep, console))
            console.print("Installing pgque …")
            version = install(place.dsn)
            console.print("Starting the ticker …")
            driver = stack.enter_context(Driver(place.dsn, keep, console))
            page = stack.enter_context(Page(place, keep, console))
            console.print(
                f"{place.title}; pgque {version}; driven by {driver.title}; "
                f"Python {platform.python_version()}"
            )
            console.print(f"Starting {count + 1} processes: {count} workers, and a consumer of its own …")
            good = _run(place, messages, type_, count, console)
            if keep:
                page.keep_sending(path)
            else:
                _clean_up(place)
            farewell(place, driver, page, keep, console)
            return 0 if good else 1
    except (PgqueError, psycopg.Error, EmbeddedServerError) as error:
        console.print(f"pgque demo: {visible(str(error))}", style="red")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


def _run(place: Place, messages: list[str], type_: str, count: int, console: Console) -> bool:
    context = multiprocessing.get_context("spawn")
    with connect(place.dsn, autocommit=True) as client:
        client.conn.execute("set client_min_messages = warning")
        client.conn.execute(TABLES)
        with suppress(PgqueQueueNotFoundError):
            client.admin.drop_queue(QUEUE, force=True)
        client.admin.create_queue(QUEUE, {"max_retries": MAX_RETRIES})
        client.subscribe(QUEUE, SIZES)
        dsn = make_conninfo(place.dsn, application_name="pgque demo")
        client.subscribe(QUEUE, COMPILER)
        names = [f"worker-{n}" for n in range(1, count + 1)]
        processes: list[BaseProcess] = [
            context.Process(target=compile_worker, args=(dsn, name), name=name, daemon=True) for name in names
        ]
        processes.append(context.Process(target=size_worker, args=(dsn,), name=SIZES, daemon=True))
        for process in processes:
            process.start()
        try:
            _wait_for_listeners(client, len(processes))
            ids, seconds = _send_and_watch(client, messages, type_, processes, console)
        finally:
            _stop(processes)
        return report(client, ids, messages, seconds, type_, console)


def _clean_up(place: Place) -> None:
    """Take the demo's own objects out of a database that goes on without it."""
    with connect(place.dsn) as client:
        client.conn.execute("set client_min_messages = warning")
        client.conn.execute("drop schema pgque_demo cascade")
        client.admin.drop_queue(QUEUE, force=True)


def _wait_for_listeners(client: PgqueClient, wanted: int) -> None:
    """Wait until the workers are connected, so that the clock does not measure the start of Python."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = tuples(
            client,
            "select count(*) from pg_catalog.pg_stat_activity"
            " where datname = current_database() and application_name = 'pgque demo'",
        )
        if found[0][0] >= wanted:
            return
        time.sleep(0.05)


def _send_and_watch(
    client: PgqueClient, messages: list[str], type_: str, processes: list[BaseProcess], console: Console
) -> tuple[list[int], float]:
    total = len(messages)
    ids: list[int] = []
    counts = Counts()
    with Display(console, total, "compiled" if type_ == "file" else "parsed") as display:
        began = moved = time.monotonic()
        while True:
            if len(ids) < total:
                ids += client.send_batch(QUEUE, messages[len(ids) : len(ids) + SEND_AT_ONCE], type=type_)
            else:
                time.sleep(0.1)
            before, counts = counts, _counts(client, len(ids))
            now = time.monotonic()
            if counts != before:
                moved = now
            if counts.sent == total and counts.compiled + counts.dead >= total and counts.sized >= total:
                display.show(counts, last=True)
                return ids, now - began
            if now - moved > STALLED:
                raise PgqueError(f"nothing moved for {STALLED:.0f} seconds: {counts}")
            gone = [process.name for process in processes if not process.is_alive()]
            if gone:
                raise PgqueError(f"ended before the work was done: {', '.join(gone)}")
            display.show(counts)


def _counts(client: PgqueClient, sent: int) -> Counts:
    compiled, sized = tuples(
        client, "select (select count(*) from pgque_demo.compiled), (select count(*) from pgque_demo.sized)"
    )[0]
    return Counts(sent, compiled, sized, len(dead_letters(client)))


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
