"""Publish many messages in one call, or in the transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import PgqueBadArgumentError
from ..twins.calls import send_batch
from ..types import Event

# The messages that a block published, by queue and type; with their transports.
_Published = dict[tuple[str, str], list[Event]]
_open: ContextVar[tuple[_Published, list[Any]] | None] = ContextVar("pgque_celery_bulk", default=None)


def add(transport: Any, queue: str, event: Event) -> bool:
    """Keep a message for the end of the block that runs; return False outside of one."""
    found = _open.get()
    if found is None:
        return False
    published, transports = found
    if transports and transports[0].dsn != transport.dsn:
        raise PgqueBadArgumentError(
            "tasks of two databases are published in one block of bulk()",
            hint="Use a block for each broker: only within one database are all of them sent or none.",
        )
    transports.append(transport)
    published.setdefault((queue, event.type), []).append(event)
    return True


@contextmanager
def bulk(conn: object = None) -> Iterator[None]:
    """Send the tasks that the block publishes at its end, in one call for each queue and task, all or none;
    after an exception none.

        with pgque.celery.bulk():
            for user in users:
                welcome.delay(user.id)

    With `conn`, which is what `pgque.send` takes, they are sent in its open transaction, so that they run
    only if it commits. Messages of remote control and events are sent at once. Calls `pgque.send_batch`.
    Raises PgqueBadArgumentError, when a task is published, if the block has one for another database.
    """
    published: _Published = {}
    transports: list[Any] = []
    token = _open.set((published, transports))
    try:
        yield
    finally:
        _open.reset(token)
    if not published:
        return
    if conn is not None:
        for (queue, type), events in published.items():
            send_batch(conn, queue, events, type=type)
        return
    with transports[0].calls() as client, client.conn.transaction():
        for (queue, type), events in published.items():
            client.send_batch(queue, events, type=type)
