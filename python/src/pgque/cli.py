"""The command `pgque`."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import click

from . import cli_health, cli_operate, cli_work
from ._cli import EXIT_CODES, NOTHING, as_dict, dsn_option, dump, json_option, print_table
from ._version import __version__
from .client import connect
from .errors import PgqueError
from .install import install as install_sql
from .install import uninstall as uninstall_sql
from .ticker import run_ticker, unit


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


@click.group(cls=_Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pgque")
def main() -> None:
    """Message queue and event log inside PostgreSQL."""


@main.command(epilog=EXIT_CODES)
@dsn_option
def install(dsn: str) -> None:
    """Install pgque into a database, or upgrade it, in one transaction."""
    click.echo(f"pgque {install_sql(dsn)}")


@main.command()
@dsn_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def uninstall(dsn: str, yes: bool) -> None:
    """Remove pgque with all its queues and messages."""
    if not yes:
        click.confirm("Remove pgque with all queues and messages?", abort=True)
    uninstall_sql(dsn)


@main.command()
@dsn_option
@click.option("--quiet", is_flag=True, help="Say nothing unless something is wrong.")
@click.option("--systemd-unit", is_flag=True, help="Print a systemd unit that runs this command, and exit.")
def ticker(dsn: str, quiet: bool, systemd_unit: bool) -> None:
    """Tick all queues and do the maintenance, until SIGTERM or SIGINT.

    Needed where no pg_cron does it. It reconnects after faults; several at once do no harm.
    """
    if systemd_unit:
        click.echo(unit(dsn), nl=False)
        return
    logging.basicConfig(
        format="%(asctime)s %(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr
    )
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    run_ticker(dsn, stop)


@main.command(epilog=EXIT_CODES)
@dsn_option
@json_option
def status(dsn: str, as_json: bool) -> None:
    """Show the state of the installation and the health checks. The exit code is 3 when a check fails."""
    with connect(dsn) as client:
        parts = [as_dict(row) for row in client.status()]
        checks = [as_dict(row) for row in client.health()]
    if as_json:
        click.echo(dump({"status": parts, "health": checks}, indent=2))
    else:
        print_table("Status", parts)
        print_table("Health", checks)
    if any(check["status"] == "fail" for check in checks):
        sys.exit(NOTHING)


@main.command()
@dsn_option
@json_option
def queues(dsn: str, as_json: bool) -> None:
    """List the queues and where their consumers stand."""
    with connect(dsn) as client:
        found = [as_dict(row) for row in client.queue_info()]
        consumers = [as_dict(row) for row in client.consumer_info()]
    if as_json:
        for queue in found:
            queue["consumers"] = [c for c in consumers if c["queue_name"] == queue["queue_name"]]
        click.echo(dump(found, indent=2))
        return
    shown = ("queue_name", "ticker_lag", "ev_per_sec", "ev_new", "last_tick_id", "queue_paused")
    print_table("Queues", [{name: queue[name] for name in shown} for queue in found])
    if consumers:
        print_table("Consumers", consumers)


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


for _command in [*cli_work.COMMANDS, *cli_operate.COMMANDS, *cli_health.COMMANDS]:
    main.add_command(_command)


if __name__ == "__main__":
    main()
