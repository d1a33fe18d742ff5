"""The commands that create queues and consumers, send, receive, and report outcomes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import ParamSpec, TypeVar

import click

from ..types import Message, Outcome
from .common import (
    EXIT_CODES,
    EXIT_NOTHING,
    age,
    as_dict,
    commit,
    connect,
    dsn_option,
    dump,
    echo,
    json_option,
    length_option,
    parsed_ids,
    print_rows,
    read_input,
    warn_unread,
)

P = ParamSpec("P")
R = TypeVar("R")

_BATCH = parsed_ids("the batch_id that pgque receive --json --no-ack shows")


@click.command()
@dsn_option
@click.argument("queue")
@click.option(
    "--subscribe", "consumers", multiple=True, metavar="CONSUMER", help="Subscribe a consumer; repeatable."
)
@click.option("--set", "settings", multiple=True, metavar="PARAM=VALUE", help="A setting; repeatable.")
def create(dsn: str, queue: str, consumers: Sequence[str], settings: Sequence[str]) -> None:
    """Create a queue if it does not exist, and subscribe consumers to it."""
    with connect(dsn) as client:
        created = client.admin.create_queue(queue, pairs(settings) or None)
        subscribed = [(consumer, client.subscribe(queue, consumer)) for consumer in consumers]
        commit(client)
        if created:
            echo(f"queue {queue} is created")
        else:
            echo(f"queue {queue} exists already{'; its settings stay' if settings else ''}")
        for consumer, new in subscribed:
            _print_subscribed(queue, consumer, new)
        warn_unread(client, queue, "messages are kept only for consumers")


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("consumer")
@click.option("--from", "start_at", metavar="WHERE", help="latest, earliest, a tick id or a time.")
@click.option("--keyed-order", is_flag=True, help="Deliver messages of one key one at a time, in order.")
@click.option("--key-concurrency", type=click.IntRange(min=1), help="Most messages of one key at a time.")
def subscribe(
    dsn: str,
    queue: str,
    consumer: str,
    start_at: str | None,
    keyed_order: bool,
    key_concurrency: int | None,
) -> None:
    """Subscribe a consumer to a queue."""
    with connect(dsn) as client:
        new = client.subscribe(
            queue, consumer, start_at, keyed_order=keyed_order or None, key_concurrency=key_concurrency
        )
    _print_subscribed(queue, consumer, new)


def _print_subscribed(queue: str, consumer: str, new: int) -> None:
    if new:
        echo(f"consumer {consumer} is subscribed to queue {queue}")
    else:
        echo(f"consumer {consumer} was subscribed to queue {queue} already; its position stays")


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("consumer")
def unsubscribe(dsn: str, queue: str, consumer: str) -> None:
    """Unsubscribe a consumer from a queue."""
    with connect(dsn) as client:
        count = client.unsubscribe(queue, consumer)
    if count:
        echo(f"consumer {consumer} is unsubscribed from queue {queue}")
    else:
        echo(f"consumer {consumer} was not subscribed to queue {queue}")


@click.command()
@dsn_option
@click.argument("queue")
@click.argument("payload", required=False)
@click.option("--type", "type_", default="default", show_default=True, help="Message type.")
@click.option("--lines", is_flag=True, help="Send each line of standard input as a message.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header; repeatable.")
@click.option("--key", help="Replace the pending message with this key.")
@click.option("--partition-key", help="Key for keyed order.")
@length_option("--delay", "Deliver the message after this time.")
@click.option("--deliver-at", type=click.DateTime(), help="Deliver the message at this time, in local time.")
@length_option("--ttl", "Let the message expire after this time; 0s is never.")
def send(
    dsn: str,
    queue: str,
    payload: str | None,
    type_: str,
    lines: bool,
    headers: Sequence[str],
    key: str | None,
    partition_key: str | None,
    delay: timedelta | None,
    deliver_at: datetime | None,
    ttl: timedelta | None,
) -> None:
    """Send a message and print its id. Without PAYLOAD, or with -, read the payload from standard input."""
    if lines and payload is not None:
        raise click.UsageError("--lines reads standard input: leave PAYLOAD out")
    if lines:
        text = read_input()
        texts = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    else:
        texts = [read_input() if payload is None or payload == "-" else payload]
    count = len(texts)
    with connect(dsn) as client:
        ids = client.send_batch(
            queue,
            texts,
            type=type_,
            headers=[pairs(headers)] * count if headers else None,
            keys=[key] * count if key is not None else None,
            delays=[delay] * count if delay is not None else None,
            deliver_ats=[deliver_at] * count if deliver_at is not None else None,
            ttls=[ttl] * count if ttl is not None else None,
            partition_keys=[partition_key] * count if partition_key is not None else None,
        )
        commit(client)
        for msg_id in ids:
            echo(msg_id)
        warn_unread(client, queue, "nobody receives these messages")


@click.command(epilog=EXIT_CODES)
@dsn_option
@click.argument("queue")
@click.argument("consumer")
@click.option(
    "--max", "max_messages", type=click.IntRange(min=1), default=100, show_default=True, help="Most messages."
)
@click.option("--worker", help="Receive as this worker, one of several that share the consumer.")
@length_option("--visibility-timeout", "Lease the messages for this time.")
@click.option(
    "--ack/--no-ack", default=True, show_default=True, help="Acknowledge the batch after printing it."
)
@click.option("--json", "as_json", is_flag=True, help="Print each message as a line of JSON.")
def receive(
    dsn: str,
    queue: str,
    consumer: str,
    max_messages: int,
    worker: str | None,
    visibility_timeout: timedelta | None,
    ack: bool,
    as_json: bool,
) -> None:
    """Receive a batch and print each payload as a line.

    With --no-ack the messages are redelivered; with --worker when the lease has expired. The exit code is 3
    if there are no messages, or if they could not be acknowledged after they were printed.
    """
    if sys.stdout is None:
        raise click.UsageError("standard output is closed: nothing can be printed")
    with connect(dsn) as client:
        batch = client.receive(
            queue, consumer, max_messages, worker=worker, visibility_timeout=visibility_timeout
        )
        commit(client)
        for message in batch:
            echo(dump(as_dict(message)) if as_json else _text(message))
        sys.stdout.flush()
        acked = client.ack(batch[0].batch_id) if batch and ack else len(batch)
    if batch and acked == 0:
        echo(
            "not acknowledged: another worker has messages of the batch, or it was acknowledged before",
            err=True,
        )
    if acked == 0:
        sys.exit(EXIT_NOTHING)


@click.command()
@dsn_option
@json_option
@click.argument("queue")
@click.option("-n", "count", type=click.IntRange(min=1), default=10, show_default=True, help="Most messages.")
@click.option("--consumer", help="The next messages of this consumer [default: of the slowest].")
def peek(dsn: str, as_json: bool, queue: str, count: int, consumer: str | None) -> None:
    """Show the next messages that a consumer has not finished, without receiving them."""
    with connect(dsn) as client:
        rows = client.peek(queue, count, consumer=consumer)
    print_rows(f"Messages of {queue}", rows, as_json, ("msg_id", "type", "payload", "created_at", "key"))


def _outcome_arguments(command: Callable[P, R]) -> Callable[P, R]:
    ids = click.argument("ids", nargs=-1, callback=parsed_ids("ids of messages"), metavar="[MSG_ID]...")(
        command
    )
    return dsn_option(click.argument("batch", callback=_BATCH)(ids))


@click.command(epilog=EXIT_CODES)
@_outcome_arguments
def ack(dsn: str, batch: int, ids: Sequence[int]) -> None:
    """Acknowledge a batch, or some of its messages."""
    with connect(dsn) as client:
        acked = client.ack(batch, ids) if ids else client.ack(batch)
    if acked == 0:
        echo(f"batch {batch} is not open", err=True)
        sys.exit(EXIT_NOTHING)
    _report(acked if isinstance(acked, list) else [])


@click.command(epilog=EXIT_CODES)
@_outcome_arguments
@length_option("--after", "Redeliver them after this time [default: retry_backoff of the queue].")
@click.option("--reason", help="Reason, kept with the messages.")
def nack(dsn: str, batch: int, ids: Sequence[int], after: timedelta | None, reason: str | None) -> None:
    """Reject messages of a batch: they are redelivered later."""
    with connect(dsn) as client:
        outcomes = client.nack(batch, _required(ids), after, reason)
    _report(outcomes)


@click.command(epilog=EXIT_CODES)
@_outcome_arguments
@click.option("--reason", help="Reason, kept with the messages.")
def dead(dsn: str, batch: int, ids: Sequence[int], reason: str | None) -> None:
    """Give up messages of a batch, without more retries."""
    with connect(dsn) as client:
        outcomes = client.dead(batch, _required(ids), reason)
    _report(outcomes)


@click.command(epilog=EXIT_CODES)
@_outcome_arguments
def release(dsn: str, batch: int, ids: Sequence[int]) -> None:
    """Release messages of a worker's batch, or all: any worker can receive them at once."""
    with connect(dsn) as client:
        released = client.release(batch, ids or None)
    echo(f"{released} released")
    if released == 0:
        sys.exit(EXIT_NOTHING)


@click.command(epilog=EXIT_CODES)
@dsn_option
@click.argument("batch", callback=_BATCH)
@click.argument("length", callback=lambda ctx, param, value: age(value))
def extend(dsn: str, batch: int, length: timedelta) -> None:
    """Extend the lease on a worker's batch by LENGTH."""
    with connect(dsn) as client:
        held = client.extend(batch, length)
    echo(f"{held} leased")
    if held == 0:
        sys.exit(EXIT_NOTHING)


def _required(ids: Sequence[int]) -> Sequence[int]:
    if not ids:
        raise click.UsageError("name the messages: give their ids after the batch")
    return ids


def _text(message: Message) -> str:
    """Return the payload as a line; bytes as PostgreSQL shows them."""
    if message.payload_bytes is not None:
        return f"\\x{message.payload_bytes.hex()}"
    return message.payload or ""


def _report(outcomes: Sequence[Outcome]) -> None:
    """Print refused messages, and exit with EXIT_NOTHING if there are any: after the commit of the rest."""
    for outcome in outcomes:
        if not outcome.ok:
            echo(f"{outcome.msg_id}: {outcome.reason}", err=True)
    if not all(outcome.ok for outcome in outcomes):
        sys.exit(EXIT_NOTHING)


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return texts of the form NAME=VALUE as a dict. Raises click.UsageError."""
    parted = [text.partition("=") for text in texts]
    for name, separator, _ in parted:
        if not separator:
            raise click.UsageError(f"{name!r} is not of the form NAME=VALUE")
    return {name: value for name, _, value in parted}


COMMANDS = [create, subscribe, unsubscribe, send, receive, peek, ack, nack, dead, release, extend]
