"""The command `pgque`."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import click

from .._version import __version__
from ..codec.encode import THROUGH
from ..errors import PgqueError
from ..ops.install import install as install_sql
from ..ops.install import sql_text
from ..ops.install import uninstall as uninstall_sql
from ..ops.ticker import run_ticker, unit
from . import health, messaging, monitoring, operate, recurring, top, web, work
from .common import (
    EXIT_CODES,
    EXIT_NOTHING,
    as_dict,
    command_timeout,
    command_timeout_option,
    confirm,
    connect,
    dsn_option,
    dump,
    echo,
    json_option,
    print_rows,
    print_table,
    yes_option,
)


class _Group(click.Group):
    """Turn errors of pgque, and of what is read and printed, into a message and exit code 1."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for text in (*args, os.environ.get("PGQUE_DSN", "")):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"not valid UTF-8: {text!r}", ctx) from None
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except PgqueError as error:
            echo(f"pgque: {error}", err=True)
            if error.hint and error.hint not in str(error):
                echo(f"hint: {error.hint}", err=True)
            ctx.exit(1)

    def main(self, *args: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a locale can lack characters of a message
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                return super().main(*args, **options)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except OSError as error:
            if error.filename is None:
                _discard(sys.stdout)
            if error.errno != errno.EPIPE:
                echo(f"pgque: {error if error.filename else f'cannot print: {error.strerror}'}", err=True)
            sys.exit(1)
        finally:
            if sys.stderr is not None:
                try:
                    sys.stderr.flush()
                except OSError:  # its terminal was closed
                    _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Discard what is left of a stream that takes nothing: Python would try once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_COMPLETION = """
\b
The Tab key completes commands and options after this line in the shell's start file:
  bash  ~/.bashrc  eval "$(_PGQUE_COMPLETE=bash_source pgque)"
  zsh   ~/.zshrc   eval "$(_PGQUE_COMPLETE=zsh_source pgque)"
  fish  ~/.config/fish/completions/pgque.fish  _PGQUE_COMPLETE=fish_source pgque | source
"""


@click.group(
    cls=_Group, epilog=EXIT_CODES + _COMPLETION, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="pgque")
@command_timeout_option
def main() -> None:
    """Message queue and event log inside PostgreSQL."""


@main.command(epilog=EXIT_CODES)
@dsn_option
@click.option(
    "--version",
    type=click.Choice([THROUGH, __version__]),
    default=__version__,
    show_default=True,
    help=f"Version to install. A database before 0.7.0 is upgraded to {THROUGH} first.",
)
@click.option("--dump-sql", is_flag=True, help="Print the SQL instead of running it.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the SQL of --dump-sql to a file.",
)  # fmt: skip
def install(dsn: str, version: str, dump_sql: bool, output: Path | None) -> None:
    """Install pgque into a database, or upgrade it, in one transaction.

    To run the SQL of --dump-sql: psql -qv ON_ERROR_STOP=1 -1f FILE
    """
    if output is not None and not dump_sql:
        raise click.UsageError("--output is for --dump-sql")
    if output is not None:
        output.write_text(sql_text(version), encoding="utf-8", newline="\n")
    elif dump_sql:
        echo(sql_text(version).removesuffix("\n"))
    else:
        echo(f"pgque {install_sql(dsn, version=version)}")


@main.command()
@dsn_option
@yes_option
def uninstall(dsn: str, yes: bool) -> None:
    """Remove pgque with all its queues and messages."""
    confirm("Remove pgque with all queues and messages?", yes)
    uninstall_sql(dsn)
    echo("pgque is removed")


@main.command()
@dsn_option
@click.option("--quiet", is_flag=True, help="Print only warnings and errors.")
@click.option("--systemd-unit", is_flag=True, help="Print a systemd unit that runs this command, and exit.")
def ticker(dsn: str, quiet: bool, systemd_unit: bool) -> None:
    """Tick all queues and do the maintenance, until SIGTERM or SIGINT.

    Run it for a database without pg_cron. It reconnects after faults, and several at once do no harm. On a
    standby it waits for the promotion.
    """
    if systemd_unit:
        echo(unit(dsn).rstrip())
        return
    logging.basicConfig(
        format="%(asctime)s %(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr
    )
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    run_ticker(dsn, stop, command_timeout=command_timeout())


@main.command(epilog=EXIT_CODES)
@dsn_option
@json_option
def status(dsn: str, as_json: bool) -> None:
    """Show the state of the installation and what is wrong, as `pgque health` does.

    The exit code is 3 when a check fails.
    """
    with connect(dsn) as client:
        parts = [as_dict(row) for row in client.monitor.status()]
        checks = client.monitor.health()
    if as_json:
        echo(dump({"status": parts, "health": [as_dict(check) for check in checks]}, indent=2))
    else:
        print_table("Status", parts)
        health.print_checks([check for check in health.worst_first(checks) if check.status != "ok"])
    if any(check.status == "fail" for check in checks):
        sys.exit(EXIT_NOTHING)


_QUEUE_COLUMNS = ("queue_name", "queue_paused", "ev_per_sec", "ev_new", "ticker_lag", "last_tick_id")
_CONSUMER_COLUMNS = ("queue_name", "consumer_name", "lag", "pending_events", "last_seen", "role")


@main.command()
@dsn_option
@json_option
def queues(dsn: str, as_json: bool) -> None:
    """List the queues with the position and lag of their consumers."""
    with connect(dsn) as client:
        found, consumers = client.monitor.get_queue_info(), client.consumers.get_info()
    if as_json:
        rows = [as_dict(queue) for queue in found]
        for row in rows:
            row["consumers"] = [as_dict(c) for c in consumers if c.queue_name == row["queue_name"]]
        echo(dump(rows, indent=2))
        return
    print_rows("Queues", found, False, _QUEUE_COLUMNS)
    print_rows("Consumers", consumers, False, _CONSUMER_COLUMNS)


@main.command()
@click.option("--dsn", default="", metavar="DSN", help="Run in this database.")
@click.option(
    "--server",
    type=click.Choice(["auto", "docker", "local", "embedded"]),
    default="auto",
    show_default=True,
    help="Server to use without --dsn.",
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
    """Show a queue at work: compile the standard library through it, and report."""
    from ..demo import run_demo

    sys.exit(run_demo(dsn=dsn, server=server, workers=workers, path=path, keep=keep))


for _command in [
    *messaging.COMMANDS,
    *operate.COMMANDS,
    *monitoring.COMMANDS,
    *recurring.COMMANDS,
    *health.COMMANDS,
    *top.COMMANDS,
    *web.COMMANDS,
    *work.COMMANDS,
]:
    main.add_command(_command)
