# Generated from client/consumers.py by tools/make_sync.py: edit that file and run the script again.
"""Consumers of queues, and their workers."""

from __future__ import annotations

from datetime import datetime, timedelta

from ..codec import encode
from ..types import ConsumerInfo, LagSample, Seconds, WorkerInfo, columns
from .calling import Group


class Consumers(Group):
    """Consumers of queues, and their workers."""

    def get_info(self, queue: str | None = None, consumer: str | None = None) -> list[ConsumerInfo]:
        """Return position and lag of all consumers, of those of a queue, or of one. Calls
        `pgque.get_consumer_info`. Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError."""
        arguments = ["%(queue)s::text"] if queue is not None else []
        if consumer is not None:
            if queue is None:
                raise TypeError("get_consumer_info needs the queue of a consumer: pass both")
            arguments.append("%(consumer)s::text")
        return self._client._rows(
            f"select {columns(ConsumerInfo, 'i')} from pgque.get_consumer_info({', '.join(arguments)}) as i",
            {"queue": queue, "consumer": consumer},
            ConsumerInfo,
        )

    def lags(
        self, queue: str, consumer: str | None = None, since: Seconds = timedelta(hours=6)
    ) -> list[LagSample]:
        """Return how far consumers of a queue lagged in the last `since` seconds, a sample a minute. Calls
        `pgque.consumer_lags`. Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError."""
        return self._client._rows(
            f"select {columns(LagSample, 's')} from pgque.consumer_lags("
            "%(queue)s::text, %(consumer)s::text, %(since)s::interval) as s",
            {"queue": queue, "consumer": consumer, "since": encode.interval(since)},
            LagSample,
        )

    def list_workers(self, queue: str | None = None, consumer: str | None = None) -> list[WorkerInfo]:
        """Return the workers of all queues, of one, or of one consumer, with their leased messages. Calls
        `pgque.list_workers`."""
        return self._client._rows(
            f"select {columns(WorkerInfo, 'w')}"
            " from pgque.list_workers(%(queue)s::text, %(consumer)s::text) as w",
            {"queue": queue, "consumer": consumer},
            WorkerInfo,
        )

    def reclaim(self, queue: str, consumer: str, older_than: Seconds = 0) -> int:
        """Release the batches that workers received more than `older_than` seconds ago, and return their
        number. Calls `pgque.reclaim`.

        One call releases at most 500 while workers report outcomes. Raises PgqueBadArgumentError.
        """
        return self._client._value(
            int,
            "select pgque.reclaim(%(queue)s::text, %(consumer)s::text, %(age)s::interval)",
            {"queue": queue, "consumer": consumer, "age": encode.interval(older_than)},
        )

    def seek_to_time(self, queue: str, consumer: str, at: datetime) -> int:
        """Move a consumer back or forward to a time, and return the id of the tick where it stands. Calls
        `pgque.seek_to_time`.

        It receives again what became visible after that time. Messages that all consumers have finished stay
        for two to three `rotation_period`. A datetime without time zone is local time. Raises
        PgqueQueueNotFoundError, PgqueConsumerNotFoundError, PgqueBadArgumentError if the consumer has
        workers, PgqueTickNotFoundError if the queue stores no tick as old as `at`.
        """
        return self._client._value(
            int,
            "select pgque.seek_to_time(%(queue)s::text, %(consumer)s::text, %(at)s::timestamptz)",
            {"queue": queue, "consumer": consumer, "at": encode.moment(at)},
        )

    def share(self, queue: str, consumer: str) -> int:
        """Turn a consumer that reads on its own into a pool of workers: return 1, or 0 if it is one. Calls
        `pgque.share_consumer`.

        Its position and its pending retries stay. Its open batch goes to the workers. Raises
        PgqueQueueNotFoundError, PgqueConsumerNotFoundError, and PgqueQueueInUseError if it has subconsumers.
        """
        with self._client._unlimited():
            return self._client._value(
                int,
                "select pgque.share_consumer(%(queue)s::text, %(consumer)s::text)",
                {"queue": queue, "consumer": consumer},
            )

    def unshare(self, queue: str, consumer: str) -> int:
        """Turn a pool of workers into a consumer that reads on its own: return 1, or 0 if it is one. Calls
        `pgque.unshare_consumer`.

        Its position and its pending retries stay. Messages that workers have leased are redelivered. Raises
        PgqueQueueNotFoundError, PgqueConsumerNotFoundError, and PgqueQueueInUseError if it has subconsumers
        or `key_concurrency`.
        """
        with self._client._unlimited():
            return self._client._value(
                int,
                "select pgque.unshare_consumer(%(queue)s::text, %(consumer)s::text)",
                {"queue": queue, "consumer": consumer},
            )

    def set_key_concurrency(self, queue: str, consumer: str, key_concurrency: int | None) -> int:
        """Set how many messages of one key the workers of a consumer have at most: return 1, or 0 if it was
        set so. Calls `pgque.set_key_concurrency`.

        1 keeps the order of a key, None is no limit. Raises PgqueQueueNotFoundError,
        PgqueConsumerNotFoundError, PgqueBadArgumentError, and PgqueQueueInUseError if the consumer has no
        workers.
        """
        with self._client._unlimited():
            return self._client._value(
                int,
                "select pgque.set_key_concurrency(%(queue)s::text, %(consumer)s::text, %(limit)s::int)",
                {"queue": queue, "consumer": consumer, "limit": key_concurrency},
            )

    def retry_now(self, queue: str, consumer: str) -> int:
        """Make every message of a consumer in state retry due now, and return their number. Calls
        `pgque.retry_now`. Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError."""
        with self._client._unlimited():
            return self._client._value(
                int,
                "select pgque.retry_now(%(queue)s::text, %(consumer)s::text)",
                {"queue": queue, "consumer": consumer},
            )
