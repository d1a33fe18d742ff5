"""The command `pgque`."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import ParamSpec, TypeVar

import click
from rich.console import Console
from rich.table import Table

from ._version import __version__
from .client import connect
from .errors import PgqueError
from .install import install as install_sql
from .install import uninstall as uninstall_sql
from .ticker import run_ticker

P = ParamSpec("P")
R = TypeVar("R")

NOTHING = 3

_EXIT_CODES = """
\b
Exit codes:
  0  done
  1  error: the database, or pgque, refused
  2  wrong usage
  3  nothing received, or a health check failed

The database is the one of --dsn or PGQUE_DSN; what they leave out comes from PGHOST, PGPORT,
PGDATABASE, PGUSER, PGPASSWORD and the other PG* variables.
"""


def _dsn_option(command: Callable[P, R]) -> Callable[P, R]:
    return click.option(
        "--dsn",
        default="",
        metavar="DSN",
        envvar="PGQUE_DSN",
        help="Connection string or URL [default: PGQUE_DSN, then the PG* variables].",
    )(command)


def _json_option(command: Callable[P, R]) -> Callable[P, R]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(command)


class _Group(click.Group):
    """Turn errors of pgque into a message and exit code 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PgqueError as error:
            click.echo(f"pgque: {error}", err=True)
            if error.hint and error.hint not in str(error):
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(1)


@click.group(cls=_Group, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pgque")
def main() -> None:
    """Message queue and event log inside PostgreSQL."""


@main.command(epilog=_EXIT_CODES)
@_dsn_option
def install(dsn: str) -> None:
    """Install pgque into a database, or upgrade it, in one transaction."""
    click.echo(f"pgque {install_sql(dsn)}")


@main.command()
@_dsn_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def uninstall(dsn: str, yes: bool) -> None:
    """Remove pgque with all its queues and messages."""
    if not yes:
        click.confirm("Remove pgque with all queues and messages?", abort=True)
    uninstall_sql(dsn)


@main.command()
@_dsn_option
@click.option("--quiet", is_flag=True, help="Say nothing unless something is wrong.")
def ticker(dsn: str, quiet: bool) -> None:
    """Tick all queues and do the maintenance, until SIGTERM or SIGINT.

    Needed where no pg_cron does it. It reconnects after faults; several at once do no harm.
    """
    logging.basicConfig(
        format="%(asctime)s %(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr
    )
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    run_ticker(dsn, stop)


@main.command()
@_dsn_option
@click.argument("queue")
@click.option(
    "--subscribe", "consumers", multiple=True, metavar="CONSUMER", help="Subscribe a consumer; repeatable."
)
def create(dsn: str, queue: str, consumers: Sequence[str]) -> None:
    """Create a queue, if it is not there, and subscribe consumers to it."""
    with connect(dsn) as client:
        client.create_queue(queue)
        for consumer in consumers:
            client.subscribe(queue, consumer)


@main.command()
@_dsn_option
@click.argument("queue")
@click.argument("payload", required=False)
@click.option("--type", "type_", default="default", show_default=True, help="Message type.")
@click.option("--lines", is_flag=True, help="Send each line of standard input as a message.")
def send(dsn: str, queue: str, payload: str | None, type_: str, lines: bool) -> None:
    """Send a message and print its id. Without PAYLOAD, or with -, it is read from standard input."""
    if lines and payload is not None:
        raise click.UsageError("--lines reads standard input: leave PAYLOAD out")
    if lines:
        texts = [line.rstrip("\r\n") for line in sys.stdin]
    else:
        texts = [sys.stdin.read() if payload in (None, "-") else str(payload)]
    with connect(dsn) as client:
        ids = client.send_batch(queue, type_, texts)
    for msg_id in ids:
        click.echo(msg_id)


@main.command(epilog=_EXIT_CODES)
@_dsn_option
@click.argument("queue")
@click.argument("consumer")
@click.option(
    "--max", "max_messages", type=click.IntRange(min=1), default=100, show_default=True, help="Most messages."
)
@click.option("--ack/--no-ack", default=True, show_default=True, help="Ack the batch once it is printed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a message, a line each.")
def receive(dsn: str, queue: str, consumer: str, max_messages: int, ack: bool, as_json: bool) -> None:
    """Receive a batch and print the payloads, a line each.

    With --no-ack the same messages come again. The exit code is 3 when there are none.
    """
    with connect(dsn, autocommit=True) as client:
        batch = client.receive(queue, consumer, max_messages)
        for message in batch:
            click.echo(_dump(_as_dict(message)) if as_json else (message.payload or ""))
        sys.stdout.flush()
        if batch and ack:
            client.ack(batch[0].batch_id)
    if not batch:
        sys.exit(NOTHING)


@main.command(epilog=_EXIT_CODES)
@_dsn_option
@_json_option
def status(dsn: str, as_json: bool) -> None:
    """Show the state of the installation and the health checks. The exit code is 3 when a check fails."""
    with connect(dsn) as client:
        parts = [_as_dict(row) for row in client.status()]
        checks = [_as_dict(row) for row in client.health()]
    if as_json:
        click.echo(_dump({"status": parts, "health": checks}, indent=2))
    else:
        _print_table("Status", parts)
        _print_table("Health", checks)
    if any(check["status"] == "fail" for check in checks):
        sys.exit(NOTHING)


@main.command()
@_dsn_option
@_json_option
def queues(dsn: str, as_json: bool) -> None:
    """List the queues and where their consumers stand."""
    with connect(dsn) as client:
        found = [_as_dict(row) for row in client.queue_info()]
        consumers = [_as_dict(row) for row in client.consumer_info()]
    if as_json:
        for queue in found:
            queue["consumers"] = [c for c in consumers if c["queue_name"] == queue["queue_name"]]
        click.echo(_dump(found, indent=2))
        return
    shown = ("queue_name", "ticker_lag", "ev_per_sec", "ev_new", "last_tick_id", "queue_paused")
    _print_table("Queues", [{name: queue[name] for name in shown} for queue in found])
    if consumers:
        _print_table("Consumers", consumers)


@main.group()
def dlq() -> None:
    """Look at dead letters, give them back, or delete them."""


@dlq.command("list")
@_dsn_option
@_json_option
@click.argument("queue")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Most dead letters."
)
def dlq_list(dsn: str, as_json: bool, queue: str, limit: int) -> None:
    """List the dead letters of a queue."""
    with connect(dsn) as client:
        letters = [_as_dict(row) for row in client.dlq_inspect(queue, limit)]
    if as_json:
        click.echo(_dump(letters, indent=2))
        return
    shown = ("dl_id", "dl_time", "ev_id", "ev_type", "ev_retry", "dl_reason", "ev_data")
    _print_table(f"Dead letters of {queue}", [{name: letter[name] for name in shown} for letter in letters])


@dlq.command("requeue")
@_dsn_option
@click.argument("ids", nargs=-1, type=int, metavar="[DL_ID]...")
@click.option("--all", "queue", metavar="QUEUE", help="All dead letters of this queue.")
def dlq_requeue(dsn: str, ids: Sequence[int], queue: str | None) -> None:
    """Give dead letters back to the consumer that failed them, all or none."""
    if bool(ids) == (queue is not None):
        raise click.UsageError("give ids of dead letters, or --all QUEUE")
    with connect(dsn) as client:
        if queue is not None:
            count = client.dlq_requeue_all(queue)
        else:
            count = len([client.dlq_requeue(dl_id) for dl_id in ids])
    click.echo(f"{count} requeued")


@dlq.command("purge")
@_dsn_option
@click.argument("queue")
@click.option(
    "--older-than",
    default="30d",
    show_default=True,
    metavar="AGE",
    callback=lambda ctx, param, value: _age(value),
    help="As in 90s, 15m, 12h, 30d, 0s.",
)
def dlq_purge(dsn: str, queue: str, older_than: timedelta) -> None:
    """Delete the dead letters of a queue that are older than AGE."""
    with connect(dsn) as client:
        count = client.dlq_purge(queue, older_than)
    click.echo(f"{count} deleted")


@main.command()
@click.option("--dsn", default="", metavar="DSN", help="Run in this database.")
@click.option(
    "--server",
    type=click.Choice(["auto", "docker", "local", "embedded"]),
    default="auto",
    show_default=True,
    help="Where to run it when no --dsn is given.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=None, help="Worker processes [default: one a core]."
)
@click.option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JSON Lines file to send instead.",
)
@click.option("--keep", is_flag=True, help="Leave the server up afterwards.")
def demo(dsn: str, server: str, workers: int | None, path: Path | None, keep: bool) -> None:
    """Compile the standard library through a queue, and show what came of it."""
    from .demo import run_demo

    sys.exit(run_demo(dsn=dsn, server=server, workers=workers, path=path, keep=keep))


def _age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+)\s*(s|m|h|d)[a-z]*", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not an age such as 90s, 15m, 12h or 30d")
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    return timedelta(seconds=int(match[1]) * seconds)


def _as_dict(row: object) -> dict[str, object]:
    if not dataclasses.is_dataclass(row) or isinstance(row, type):
        raise TypeError("not a row")
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


def _plain(value: object) -> object:
    """Return a value as JSON has it: times in ISO format, lengths of time in seconds."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _dump(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, default=_plain, indent=indent)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, timedelta):
        return str(timedelta(seconds=round(value.total_seconds(), 1))).removesuffix("00000")
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return str(value)


def _print_table(title: str, rows: Iterable[Mapping[str, object]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    rows = list(rows)
    if not rows:
        console.print(f"{title}: none", markup=False, highlight=False)
        return
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(_cell(value).replace("[", r"\[") for value in row.values()))
    console.print(table)


if __name__ == "__main__":
    main()
