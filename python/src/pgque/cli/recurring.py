"""The commands for recurring messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import click

from .common import connect, dsn_option, echo, json_option, length_option, print_rows, read_input
from .messaging import pairs

_SHOWN = (
    "name",
    "status",
    "cron",
    "next_run",
    "last_run",
    "queue_name",
    "last_error",
    "timezone",
    "type_name",
)


@click.group()
def recurring() -> None:
    """Create and change messages that the ticker sends at given times."""


@recurring.command("list")
@dsn_option
@json_option
def recurring_list(dsn: str, as_json: bool) -> None:
    """List recurring messages with their last and next run."""
    with connect(dsn) as client:
        rows = client.recurring.list()
    print_rows("Recurring messages", rows, as_json, _SHOWN)


@recurring.command("create")
@dsn_option
@click.argument("name")
@click.argument("queue")
@click.argument("cron")
@click.argument("payload", required=False)
@click.option("--type", "type_", default="default", show_default=True, help="Message type.")
@click.option("--timezone", default="UTC", show_default=True, help="Time zone of CRON, as Europe/Berlin.")
@click.option(
    "--catch-up",
    type=click.Choice(["none", "one", "all"]),
    default="one",
    show_default=True,
    help="Missed runs to send.",
)
@click.option("--starts-at", type=click.DateTime(), help="No run before, in local time.")
@click.option("--ends-at", type=click.DateTime(), help="No run after, in local time.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; repeatable.")
@click.option("--key", help="Replace the pending message with this key.")
@click.option("--partition-key", help="Key for keyed order.")
@length_option("--delay", "Deliver each message after this time.")
@length_option("--ttl", "Let each message expire after this time; 0s is never.")
def recurring_create(
    dsn: str,
    name: str,
    queue: str,
    cron: str,
    payload: str | None,
    type_: str,
    timezone: str,
    catch_up: str,
    starts_at: datetime | None,
    ends_at: datetime | None,
    headers: Sequence[str],
    key: str | None,
    partition_key: str | None,
    delay: timedelta | None,
    ttl: timedelta | None,
) -> None:
    """Create a recurring message, or change the one called NAME.

    CRON is "0 3 * * mon-fri" (minute hour day month weekday), the same with seconds first, or an interval
    such as "90 seconds". With - as PAYLOAD it is read from standard input.
    """
    with connect(dsn) as client:
        new = client.recurring.create(
            name,
            queue,
            cron,
            read_input() if payload == "-" else payload,
            type=type_,
            headers=pairs(headers) or None,
            key=key,
            delay=delay,
            ttl=ttl,
            partition_key=partition_key,
            timezone=timezone,
            catch_up=catch_up,
            starts_at=starts_at,
            ends_at=ends_at,
        )
    echo(f"recurring message {name} is {'created' if new else 'changed'}")


@recurring.command("drop")
@dsn_option
@click.argument("name")
def recurring_drop(dsn: str, name: str) -> None:
    """Drop a recurring message; messages that it sent stay."""
    with connect(dsn) as client:
        client.recurring.drop(name)
    echo(f"recurring message {name} is dropped")


@recurring.command("pause")
@dsn_option
@click.argument("name")
def recurring_pause(dsn: str, name: str) -> None:
    """Pause a recurring message."""
    with connect(dsn) as client:
        new = client.recurring.pause(name)
    echo(f"recurring message {name} is paused{'' if new else ' already'}")


@recurring.command("resume")
@dsn_option
@click.argument("name")
def recurring_resume(dsn: str, name: str) -> None:
    """Resume a paused recurring message with its next run."""
    with connect(dsn) as client:
        new = client.recurring.resume(name)
    echo(f"recurring message {name} is {'resumed' if new else 'not paused'}")


@recurring.command("run")
@dsn_option
@click.argument("name")
def recurring_run(dsn: str, name: str) -> None:
    """Send a recurring message now, besides its times, and print the id of the message."""
    with connect(dsn) as client:
        echo(client.recurring.run(name))


COMMANDS: list[click.Command] = [recurring]
