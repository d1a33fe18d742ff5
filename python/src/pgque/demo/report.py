"""The output of the demo: progress while it runs, tables at the end."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shlex
import shutil
import statistics
import sys
import sysconfig
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from psycopg import sql
from psycopg.rows import tuple_row
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..cli.common import visible
from ..twins.client import PgqueClient
from ..types import DeadLetter
from .page import Page
from .servers import Driver, Place
from .work import QUEUE

ALONE, ALONE_BATCH, ALONE_BYTES = 10_000, 500, 100  # for the queue by itself: messages, a call, bytes each


@dataclasses.dataclass(slots=True)
class Counts:
    """How far the demo is."""

    sent: int = 0
    compiled: int = 0
    sized: int = 0
    dead: int = 0


class Display(AbstractContextManager["Display"]):
    """Bars on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, total: int, work: str) -> None:
        self._console = console
        self._total = total
        self._work = work
        self._progress: Progress | None = None
        self._bars: list[TaskID] = []
        self._next_line = 0.0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description:<14}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._progress.start()
            self._bars = [
                self._progress.add_task(text, total=self._total, note="")
                for text in ("sent", self._work, "sizes added")
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, counts: Counts, *, last: bool = False) -> None:
        note = f"{counts.dead} of them given up" if counts.dead else ""
        done = (counts.sent, counts.compiled + counts.dead, counts.sized)
        if self._progress is not None:
            for bar, value, text in zip(self._bars, done, ("", note, ""), strict=True):
                self._progress.update(bar, completed=value, note=text)
        elif last or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + 2
            self._console.print(
                f"sent {counts.sent} of {self._total}, {self._work} {counts.compiled},"
                f" given up {counts.dead}, sizes added {counts.sized}"
            )


def dead_letters(client: PgqueClient) -> list[DeadLetter]:
    return client.dlq.inspect(QUEUE, 1_000_000)


def report(
    client: PgqueClient, ids: list[int], messages: list[str], seconds: float, type_: str, console: Console
) -> bool:
    work, what = ("compiling", "files") if type_ == "file" else ("parsing", "lines")
    dead_tuples = _dead_tuples(client)
    console.print("Measuring the queue by itself …")
    lone = _lone_messages(client)
    sending, receiving = _queue_alone(client)
    dead = dead_letters(client)
    by_id = dict(zip(ids, messages, strict=True))
    compiled = _ints(client, "select msg_id from pgque_demo.compiled")
    sized = _ints(client, "select msg_id from pgque_demo.sized")
    dead_ids = [letter.ev_id for letter in dead]
    sent = sorted(ids)
    good = sorted(compiled + dead_ids) == sent and sorted(sized) == sent and len(set(sent)) == len(messages)

    if dead:
        table = Table(title="Dead letters: messages given up after retries", title_justify="left")
        table.add_column("message", overflow="fold")
        table.add_column("attempts", justify="right")
        table.add_column("reason", overflow="fold")
        for letter in dead[:_DEAD_SHOWN]:
            reason = (letter.dl_reason or "").splitlines() or [""]
            table.add_row(
                visible(_short(by_id.get(letter.ev_id, ""))),
                str((letter.ev_retry or 0) + 1),
                visible(reason[0] if len(reason[0]) <= 100 else f"{reason[0][:99]}…"),
            )
        console.print(table)
        if len(dead) > _DEAD_SHOWN:
            console.print(f"… and {len(dead) - _DEAD_SHOWN} more")

    table = Table(title="Sizes added up by the second consumer", title_justify="left")
    for heading in ("package", "messages", "bytes"):
        table.add_column(heading, justify="left" if heading == "package" else "right")
    for package, number, size in tuples(
        client,
        "select package, count(*), sum(bytes)::bigint from pgque_demo.sized"
        " group by 1 order by 3 desc limit 5",
    ):
        table.add_row(visible(str(package)), f"{number:,}", f"{size:,}")
    console.print(table)

    _print_summary(
        "The run",
        [
            ("messages", f"{len(ids):,}, each to 2 consumers"),
            ("every message exactly once for each consumer", "yes" if good else "NO"),
            ("retries", f"{_retries(client, dead):,}"),
            ("dead letters", f"{len(dead):,}"),
            ("messages of each worker", ", ".join(f"{n:,}" for (n,) in tuples(client, _PER_WORKER))),
            (f"time, nearly all of it for {work}", f"{seconds:.1f} s ({len(ids) / seconds:,.0f} {what}/s)"),
            ("from send until a worker is done: p50 / p99", _latency(client, "compiled")),
            ("from send until its size is added: p50 / p99", _latency(client, "sized")),
            ("dead rows that VACUUM has to remove", dead_tuples),
        ],
        console,
    )
    _print_summary(
        "The queue by itself, through one connection",
        [
            (f"send, {ALONE_BATCH} messages of {ALONE_BYTES} bytes a call", f"{sending:,.0f} messages/s"),
            (f"receive and ack, {ALONE_BATCH} a call", f"{receiving:,.0f} messages/s"),
            ("from send to receive, a lone message: p50 / max", lone),
        ],
        console,
    )
    if not good:
        everything = set(sent)
        console.print(
            f"not compiled and not dead: {len(everything - set(compiled) - set(dead_ids))}, "
            f"compiled and dead: {len(set(compiled) & set(dead_ids))}, "
            f"not sized: {len(everything - set(sized))}",
            style="red",
        )
    return good


def _print_summary(title: str, rows: list[tuple[str, str]], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


_DEAD_SHOWN = 10
_PER_WORKER = "select count(*) from pgque_demo.compiled group by worker order by worker"


def tuples(client: PgqueClient, query: str) -> list[tuple[int, ...]]:
    with client.conn.cursor(row_factory=tuple_row) as cur:
        return cur.execute(query).fetchall()


def _ints(client: PgqueClient, query: str) -> list[int]:
    return [row[0] for row in tuples(client, query)]


def _latency(client: PgqueClient, table: str) -> str:
    attempt = "where attempt = 1" if table == "compiled" else ""
    row = tuples(
        client,
        "select percentile_cont(0.5) within group (order by seconds),"
        " percentile_cont(0.99) within group (order by seconds)"
        f" from pgque_demo.{table} {attempt}",
    )[0]
    return " / ".join(f"{value * 1000:,.0f} ms" if value is not None else "-" for value in row)


def _retries(client: PgqueClient, dead: list[DeadLetter]) -> int:
    again = _ints(client, "select coalesce(sum(attempt - 1), 0)::bigint from pgque_demo.compiled")[0]
    return again + sum(letter.ev_retry or 0 for letter in dead)


def _dead_tuples(client: PgqueClient) -> str:
    """Count the dead tuples that the server knows of, once its counters have come in."""
    time.sleep(1.5)  # sessions hand in their counters at most once a second
    found = tuples(
        client,
        "select relname::text, n_dead_tup from pg_catalog.pg_stat_user_tables"
        " where schemaname = 'pgque' and n_dead_tup > 0 order by 1",
    )
    where = ", ".join(f"{table} {number}" for table, number in found)
    return f"{sum(number for _, number in found):,}" + (f" ({where})" if where else "")


def _lone_messages(client: PgqueClient, number: int = 20) -> str:
    """Send messages one at a time to a queue of their own, and time each until its receive returned it."""
    queue, consumer = f"{QUEUE}_lone", "probe"
    client.admin.create_queue(queue)
    client.subscribe(queue, consumer)
    client.conn.execute(sql.SQL("listen {}").format(sql.Identifier(f"pgque_{queue}")))
    took: list[float] = []
    for _ in range(number):
        time.sleep(random.uniform(0.05, 0.2))  # noqa: S311  so that the ticks are met at any phase
        began = time.monotonic()
        client.send(queue, "ping")
        while not (batch := client.receive(queue, consumer)) and time.monotonic() - began < 10:
            for _notify in client.conn.notifies(timeout=1, stop_after=1):
                pass
        if batch:
            took.append(time.monotonic() - began)
            client.ack(batch[0].batch_id)
    client.conn.execute("unlisten *")
    client.admin.drop_queue(queue, force=True)
    if len(took) < number:
        return f"only {len(took)} of {number} came"
    return f"{statistics.median(took) * 1000:,.0f} ms / {max(took) * 1000:,.0f} ms"


def _queue_alone(client: PgqueClient) -> tuple[float, float]:
    """Send messages to a queue of their own and receive them; return messages a second of either."""
    queue, consumer = f"{QUEUE}_alone", "probe"
    client.admin.create_queue(queue, {"ticker_max_count": ALONE_BATCH})
    client.subscribe(queue, consumer)
    payloads = ["x" * ALONE_BYTES] * ALONE_BATCH
    began = time.monotonic()
    for _ in range(ALONE // ALONE_BATCH):
        client.send_batch(queue, payloads, type="probe")
    sent_in = time.monotonic() - began
    received, received_in = 0, 0.0
    deadline = time.monotonic() + 30
    while received < ALONE and time.monotonic() < deadline:
        began = time.monotonic()
        batch = client.receive(queue, consumer, ALONE_BATCH)
        if not batch:  # the last tick is still to come
            time.sleep(0.01)
            continue
        client.ack(batch[0].batch_id)
        received += len(batch)
        received_in += time.monotonic() - began
    client.admin.drop_queue(queue, force=True)
    return ALONE / sent_in, received / received_in if received_in else 0.0


def _short(message: str) -> str:
    match = re.search(r'"path": "([^"]*)"', message)
    text = match[1] if match else message
    text = text.removeprefix(f"{sysconfig.get_path('stdlib')}{os.sep}")
    return text if len(text) <= 70 else "…" + text[-69:]


def farewell(place: Place, driver: Driver, page: Page, keep: bool, console: Console) -> None:
    if not keep:
        console.print("To look around afterwards, run it with --keep (make demo KEEP=1).")
        return
    pgque = _command()
    lines = [
        "The server stays up. Look around:",
        f"  {shlex.join([place.psql, place.dsn])}",
        f"  export PGQUE_DSN={shlex.quote(place.dsn)}",
        f"  {pgque} status",
        f"  {pgque} queues",
        f"  {pgque} dlq list {QUEUE}",
        f"  {pgque} create orders --subscribe billing",
        f"""  {pgque} send orders '{{"id": 1}}'""",
        f"  {pgque} receive orders billing",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    if page.address:
        page.tell()
        console.print(
            "  A message a second goes on. Every half minute one names a file that comes too late, and is"
            " given up: requeue its dead letter.",
            soft_wrap=True,
        )
    stop = "; ".join(hint for hint in (page.stop_hint, driver.stop_hint, place.stop_hint) if hint)
    if stop:
        console.print(f"Stop it with: {stop}", soft_wrap=True)


def _command() -> str:
    """Return how the user can call `pgque` from here, in a shell."""
    if shutil.which("pgque"):
        return "pgque"
    own = Path(sys.executable).with_name("pgque")
    if not own.exists():
        return shlex.join([sys.executable, "-m", "pgque.cli"])
    return shlex.quote(os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own))
