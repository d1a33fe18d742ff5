# Generated from client/monitor.py by tools/make_sync.py: edit that file and run the script again.
"""State and figures of the installation."""

from __future__ import annotations

from datetime import datetime, timedelta

from ..codec import encode
from ..types import Action, HealthCheck, HistoryBucket, Metric, QueueInfo, Rate, Seconds, StatusRow, columns
from .calling import NONE, Group


class Monitor(Group):
    """State and figures of the installation."""

    def status(self) -> list[StatusRow]:
        """Return the state of each part of the installation. Calls `pgque.status`."""
        return self._client._rows(
            f"select {columns(StatusRow, 's')} from pgque.status() as s", NONE, StatusRow
        )

    def metrics(self, queue: str | None = None) -> list[Metric]:
        """Return the figures of all queues or of one, one a row. Calls `pgque.metrics`. For one queue, any
        right to it is enough."""
        if queue is None:
            return self._client._rows(
                f"select {columns(Metric, 'm')} from pgque.metrics() as m", NONE, Metric
            )
        return self._client._rows(
            f"select {columns(Metric, 'm')} from pgque.metrics(%(queue)s::text) as m",
            {"queue": queue},
            Metric,
        )

    def health(self, queue: str | None = None) -> list[HealthCheck]:
        """Return the checks of everything or of one queue, one a row: ok, warn or fail, and what to do. Calls
        `pgque.health`. For one queue, any right to it is enough."""
        if queue is None:
            return self._client._rows(
                f"select {columns(HealthCheck, 'h')} from pgque.health() as h", NONE, HealthCheck
            )
        return self._client._rows(
            f"select {columns(HealthCheck, 'h')} from pgque.health(%(queue)s::text) as h",
            {"queue": queue},
            HealthCheck,
        )

    def queue_rates(
        self, queue: str, since: Seconds = timedelta(hours=6), buckets: int = 72
    ) -> list[Rate]:
        """Return how many messages were sent to a queue in the last `since` seconds, in `buckets` equal
        parts. Calls `pgque.queue_rates`. Raises PgqueQueueNotFoundError, PgqueBadArgumentError."""
        return self._client._rows(
            f"select {columns(Rate, 'r')} from pgque.queue_rates("
            "%(queue)s::text, %(since)s::interval, %(buckets)s::int) as r",
            {"queue": queue, "since": encode.interval(since), "buckets": buckets},
            Rate,
        )

    def history(
        self,
        queue: str | None = None,
        consumer: str | None = None,
        since: Seconds = timedelta(hours=6),
        buckets: int = 72,
    ) -> list[HistoryBucket]:
        """Return what a queue, one of its consumers or all queues did in the last `since` seconds, in
        `buckets` equal parts. Calls `pgque.history`. Raises PgqueQueueNotFoundError,
        PgqueConsumerNotFoundError, PgqueBadArgumentError."""
        return self._client._rows(
            f"select {columns(HistoryBucket, 'h')} from pgque.history("
            "%(queue)s::text, %(consumer)s::text, %(since)s::interval, %(buckets)s::int) as h",
            {"queue": queue, "consumer": consumer, "since": encode.interval(since), "buckets": buckets},
            HistoryBucket,
        )

    def get_queue_info(self, queue: str | None = None) -> list[QueueInfo]:
        """Return settings and load of one queue or of all. Calls `pgque.get_queue_info`. Raises
        PgqueQueueNotFoundError."""
        call = "pgque.get_queue_info()" if queue is None else "pgque.get_queue_info(%(queue)s::text)"
        return self._client._rows(
            f"select {columns(QueueInfo, 'i')} from {call} as i", {"queue": queue}, QueueInfo
        )

    def list_actions(
        self, queue: str | None = None, limit: int = 100, before: datetime | None = None
    ) -> list[Action]:
        """Return changes that roles made by hand, the newest first. Calls `pgque.list_actions`.

        For the next page, pass the last `at` as `before`; a datetime without time zone is local time.
        """
        return self._client._rows(
            f"select {columns(Action, 'a')} from pgque.list_actions("
            "%(queue)s::text, %(limit)s::int, %(before)s::timestamptz) as a",
            {"queue": queue, "limit": limit, "before": None if before is None else encode.moment(before)},
            Action,
        )

    def version(self) -> str:
        """Return the version of the SQL side. Calls `pgque.version`."""
        return self._client._value(str, "select pgque.version()")
