# Generated from runtime/listen.py by tools/make_sync.py: edit that file and run the script again.
"""Listen for the messages of a queue, and notice when nothing ticks it.

`twins/listen.py` is generated from `runtime/listen.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
import time

from psycopg import sql

from .client import PgqueClient
from ..types import QueueInfo
from ..runtime.queue_settings import QueueSettings

_CHANNEL = "pgque_"

# Seconds without messages after which, and how often, a check is made whether messages wait for a tick.
TICK_CHECK = 10.0

# Seconds beyond the queue's ticker_max_lag after which a tick is missing.
_TICK_MISSING = 5.0


def listen(client: PgqueClient, queue: str) -> QueueSettings:
    """Have a connection notified of new messages, and return the settings of the queue, which may be given by
    its `queue_uid`, with its name. Raises PgqueQueueNotFoundError."""
    name = client._value(
        str, "select i.queue_name from pgque.get_queue_info(%(queue)s::text) as i", {"queue": queue}
    )
    client.conn.execute(sql.SQL("listen {}").format(sql.Identifier(f"{_CHANNEL}{name}")))
    return QueueSettings.from_config(name, client.admin.queue_config(name))


def queue_of(channel: str) -> str:
    """Return the queue whose messages are notified on a channel."""
    return channel.removeprefix(_CHANNEL)


class TickWatch:
    """Log when messages wait because nothing ticks their queue."""

    def __init__(self, queue: str, logger: logging.Logger) -> None:
        self._queue = queue
        self._log = logger
        self._logged = False
        self.reset()

    def reset(self) -> None:
        """Take note that messages came."""
        self._checked_at = time.monotonic()
        self._logged = False

    def due_in(self) -> float:
        """Return how many seconds from now the next check is due."""
        return max(0.0, self._checked_at + TICK_CHECK - time.monotonic())

    def check(self, client: PgqueClient) -> None:
        """Ask, if that is due, whether messages wait for a tick."""
        if self.due_in() > 0:
            return
        self._checked_at = time.monotonic()
        missing = [info for info in client.monitor.get_queue_info(self._queue) if _misses_tick(info)]
        if missing and not self._logged:
            self._log.warning("%s", _missing_tick(missing[0]))
        self._logged = bool(missing)


def _misses_tick(info: QueueInfo) -> bool:
    if not info.ev_new or info.ticker_lag is None:
        return False
    return info.ticker_lag.total_seconds() > info.queue_ticker_max_lag.total_seconds() + _TICK_MISSING


def _missing_tick(info: QueueInfo) -> str:
    remedy = "run `pgque ticker`, or with pg_cron `select pgque.start()`"
    if info.queue_external_ticker:
        remedy = "its ticker is an external one, which has to send ticks"
    elif info.queue_ticker_paused:
        remedy = "its ticker is paused: set ticker_paused to false"
    return (
        f"queue {info.queue_name} has about {info.ev_new} messages that wait for a tick, which makes them"
        f" visible to consumers; the last tick was {info.ticker_lag} ago: {remedy}"
    )
