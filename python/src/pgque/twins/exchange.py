# Generated from runtime/exchange.py by tools/make_sync.py: edit that file and run the script again.
"""The calls of workers and consumers: report outcomes, receive messages, extend leases.

`twins/exchange.py` is generated from `runtime/exchange.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import psycopg
from psycopg import Cursor
from psycopg.rows import args_row

from .client import PgqueClient
from ..codec import encode
from ..codec.decode import reading
from ..errors import from_psycopg
from ..integrations import opentelemetry as otel
from ..types import Message, Seconds
from ..runtime.batches import Batch, Refused, Statement
from ..runtime.stopper import Stopper

M = TypeVar("M", bound=Message)

log = logging.getLogger("pgque.worker")


def wait(
    stopper: Stopper, client: PgqueClient, seconds: float, draining: bool = False
) -> list[str]:
    try:
        return stopper.wait(client.conn, seconds, draining)
    except psycopg.Error as error:
        raise from_psycopg(error) from error


def default_timeout(client: PgqueClient, queue: str) -> Seconds:
    """Return the visibility timeout that a queue is set to."""
    value = client._maybe(
        timedelta,
        "select s.value::interval from pgque.queue_settings(%(queue)s::text) as s"
        " where s.setting = 'visibility_timeout'",
        {"queue": queue},
    )
    return value or timedelta(seconds=30)


def extend_if_due(
    client: PgqueClient, batch: Batch[M], visibility_timeout: Seconds, share: float = 0.5
) -> bool:
    """Extend the lease of a batch by the time that has passed, if that is this share of the visibility
    timeout. Return False when the batch is lost."""
    now = time.monotonic()
    if not batch.lost and now - batch.extended_at >= share * encode.total_seconds(visibility_timeout):
        batch.note_extended(now, client._maybe(int, *batch.extension(now)))
    return not batch.lost


def report_and_receive(
    client: PgqueClient,
    consumer: str | None,
    batches: Sequence[Batch[M]],
    receive: Statement | None,
    make: Callable[..., M],
) -> list[M]:
    """Report the outcomes of batches, and return the messages that `receive` returns."""
    reports = [statement for batch in batches for statement in batch.statements()]
    if receive is not None:
        operation, queue = "receive", str(receive[1]["queue"])
    else:
        operation, queue = "ack", ",".join(sorted({batch.queue or "" for batch in batches}))
    with otel.timed(operation, queue, consumer):
        refused, received = round_trip(client, reports, receive, make)
    for batch in batches:
        batch.mark_reported()
    for msg_id, reason in refused:
        log.warning("the outcome of %s does not count: %s", msg_id or "a batch", reason)
    return received


def round_trip(
    client: PgqueClient, reports: Sequence[Statement], receive: Statement | None, make: Callable[..., M]
) -> tuple[list[Refused], list[M]]:
    """Report outcomes in one transaction and receive messages in another, in one round trip.

    So outcomes count though the receive fails, waits, or ends the process, and the lock under which messages
    are delivered is not held while the outcomes go to the disk. The connection has to be in autocommit mode;
    it is closed where an error or a cancellation leaves a transaction open.
    """
    conn = client.conn
    reported: list[Cursor[Refused]] = []
    received: Cursor[M] | None = None
    try:
        with conn.pipeline():
            if reports and receive:
                conn.execute("begin")
            for statement, given in reports:
                params = {
                    name: encode.reason_text(str(value), conn) if name == "reason" else value
                    for name, value in given.items()
                }
                reported.append(conn.cursor(row_factory=args_row(Refused)).execute(statement, params))
            if reports and receive:
                conn.execute("commit")
            if receive:
                received = reading(conn.cursor(row_factory=args_row(make))).execute(*receive)
        refused = [row for cursor in reported for row in cursor.fetchall()]
        return refused, received.fetchall() if received else []
    except BaseException as error:
        # Perhaps between begin and commit.
        if conn.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
            conn.close()
        if isinstance(error, psycopg.Error):
            raise from_psycopg(error) from error
        raise
