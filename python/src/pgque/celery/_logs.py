"""The logs of exchanges, which are only read: each reader of remote control and events gets all messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import PgqueTickNotFoundError, one_line
from ..twins.client import PgqueClient
from ._wire import Raw, raw_of

log = logging.getLogger("pgque.celery")

# Seconds between reads of a log that is not notified: a position that stands still for hours is rotated away.
_INTERVAL = 10.0

_READ = """
select t.tick_id, w.ev_data
from (
  select coalesce(pgque.next_tick(%(queue)s::text, %(after)s::bigint), %(after)s::bigint) offset 0
) as t (tick_id)
left join lateral pgque.read_window(%(queue)s::text, %(after)s::bigint, t.tick_id) as w on true
"""


@dataclass(slots=True, eq=False)
class Log:
    """A log that is read for a queue of kombu, and how far it was read."""

    queue: str  # of pgque
    tick: int
    is_consumed: Callable[[], bool]
    takes: Callable[[Raw], bool]  # whether a message is for the queue
    is_due: bool = True
    read_at: float = 0.0


class Logs:
    """The logs that a connection reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[tuple[str, str], Log] = {}  # by queue and exchange, of kombu

    def __bool__(self) -> bool:
        return bool(self._logs)

    def add(self, queue: str, exchange: str, source: Log) -> None:
        """Read the log of an exchange for a queue of kombu."""
        with self._lock:
            self._logs.setdefault((queue, exchange), source)

    def forget(self, queue: str) -> None:
        """Read no more for a queue of kombu."""
        with self._lock:
            for key in [key for key in self._logs if key[0] == queue]:
                del self._logs[key]

    def queues(self) -> set[str]:
        """Return the queues of pgque whose logs are read."""
        with self._lock:
            return {it.queue for it in self._logs.values()}

    def note(self, queue: str) -> None:
        """Take note that a queue of pgque may have messages."""
        with self._lock:
            for it in self._logs.values():
                it.is_due |= it.queue == queue

    def due(self, client: PgqueClient, pause: float) -> list[tuple[str, Log]]:
        """Return the logs to be read now, each with the queue of kombu that it is for. Behind a pooler,
        `pause` is how many seconds a log is not read again."""
        now = time.monotonic()
        pause = _INTERVAL if client._is_direct else pause
        with self._lock:
            due = [
                (queue, it)
                for (queue, _), it in self._logs.items()
                if (it.is_due or now - it.read_at > pause) and it.is_consumed()
            ]
            for _, it in due:
                it.is_due, it.read_at = False, now
        return due


def latest_tick(client: PgqueClient, queue: str) -> int:
    """Return the tick from which on a reader gets what is sent from now on. Raises
    PgqueQueueNotFoundError."""
    return client._value(int, "select pgque.tick_for(%(queue)s::text, 'latest')", {"queue": queue})


def read(client: PgqueClient, it: Log) -> list[Raw]:
    """Return the messages of a log that are new and for its queue."""
    try:
        rows = client._rows(_READ, {"queue": it.queue, "after": it.tick}, lambda tick, data: (tick, data))
    except PgqueTickNotFoundError as error:
        log.warning("messages of %s were not read in time, and are lost: %s", it.queue, one_line(error))
        it.tick = latest_tick(client, it.queue)
        return []
    found = []
    for tick, data in rows:
        it.tick = tick
        raw = raw_of(data, "", False)
        if raw is not None and it.takes(raw):
            found.append(raw)
    return found
