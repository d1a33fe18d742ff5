# Generated from client/dlq.py by tools/make_sync.py: edit that file and run the script again.
"""Dead letters of queues, and messages that end workers."""

from __future__ import annotations

from datetime import datetime, timedelta

from ..codec import encode
from ..types import DeadLetter, DeadReason, PoisonMessage, ReplayResult, Seconds, columns
from .calling import Group


class Dlq(Group):
    """Dead letters of queues, and messages that end workers."""

    def inspect(
        self,
        queue: str,
        limit: int = 100,
        *,
        reason: str | None = None,
        type: str | None = None,
        key: str | None = None,
        consumer: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        matching: str | None = None,
        before_id: int | None = None,
    ) -> list[DeadLetter]:
        """Return dead letters of a queue that satisfy all filters, the newest first, at most `limit`. Calls
        `pgque.dlq_inspect`.

        `reason` is a reason as here or as `reasons` returns it. `since` and `until` filter by the time
        when messages were given up; a datetime without time zone is local time. `matching` is a text in
        payload, headers or reason, in upper or lower case. To read page by page, pass the last `dl_id` as
        `before_id`. Raises PgqueQueueNotFoundError.
        """
        return self._client._rows(
            f"select {columns(DeadLetter, 'd')}"
            " from pgque.dlq_inspect(%(queue)s::text, %(limit)s::int, %(reason)s::text, %(type)s::text,"
            " %(key)s::text, %(consumer)s::text, %(since)s::timestamptz, %(until)s::timestamptz,"
            " %(matching)s::text, %(before_id)s::bigint) as d",
            {
                "queue": queue,
                "limit": limit,
                "reason": reason,
                "type": type,
                "key": key,
                "consumer": consumer,
                "since": encode.moment(since),
                "until": encode.moment(until),
                "matching": matching,
                "before_id": before_id,
            },
            DeadLetter,
        )

    def reasons(self, queue: str) -> list[DeadReason]:
        """Return the reasons of a queue's dead letters with their counts, the most frequent first. Calls
        `pgque.dlq_reasons`. Raises PgqueQueueNotFoundError."""
        return self._client._rows(
            f"select {columns(DeadReason, 'd')} from pgque.dlq_reasons(%(queue)s::text) as d",
            {"queue": queue},
            DeadReason,
        )

    def delete(self, dl_id: int) -> int:
        """Delete a dead letter, also a held one, and return its message id. Calls `pgque.dlq_delete`. Raises
        PgqueNotDeadLetterError."""
        return self._client._value(int, "select pgque.dlq_delete(%(dl)s::bigint)", {"dl": dl_id})

    def requeue(self, dl_id: int) -> int:
        """Requeue a dead letter to the consumer that failed it, and return its message id. Calls
        `pgque.dlq_requeue`.

        Raises PgqueNotDeadLetterError, and PgqueConsumerNotFoundError if that consumer was unsubscribed.
        """
        return self._client._value(int, "select pgque.dlq_requeue(%(dl)s::bigint)", {"dl": dl_id})

    def requeue_all(self, queue: str, limit: int | None = None, reason: str | None = None) -> int:
        """Requeue the oldest dead letters to the consumers that failed them, at most `limit`, and return
        their number. Calls `pgque.dlq_requeue_all`.

        With `reason`, one that `reasons` returns, only dead letters with this reason. Raises
        PgqueQueueNotFoundError.
        """
        named, params = encode.arguments({"limit_count": ("int", limit), "reason": ("text", reason)})
        with self._client._unlimited():
            return self._client._value(
                int, f"select pgque.dlq_requeue_all(%(queue)s::text{named})", {"queue": queue, **params}
            )

    def replay(self, dl_id: int) -> int:
        """Send a dead letter to every consumer as a new message, and return the new id. Calls
        `pgque.dlq_replay`.

        Raises PgqueNotDeadLetterError, PgqueQueueDisabledError.
        """
        return self._client._value(int, "select pgque.dlq_replay(%(dl)s::bigint)", {"dl": dl_id})

    def replay_all(
        self, queue: str, limit: int | None = None, reason: str | None = None
    ) -> ReplayResult:
        """Send the oldest dead letters of a queue again, at most `limit` (None: all). Calls
        `pgque.dlq_replay_all`.

        Returns a ReplayResult: how many were sent, and how many stay because they failed. With `reason`, one
        that `reasons` returns, only dead letters with this reason. Raises PgqueQueueNotFoundError.
        """
        named, params = encode.arguments({"limit_count": ("int", limit), "reason": ("text", reason)})
        with self._client._unlimited():
            return self._client._row(
                f"select {columns(ReplayResult, 'r')} from pgque.dlq_replay_all(%(queue)s::text{named}) as r",
                {"queue": queue, **params},
                ReplayResult,
            )

    def purge(
        self, queue: str, older_than: Seconds = timedelta(days=30), reason: str | None = None
    ) -> int:
        """Delete dead letters that were given up more than `older_than` seconds ago, and return their number.
        Calls `pgque.dlq_purge`.

        Held ones stay. With `reason`, one that `reasons` returns, only dead letters with this reason.
        Raises PgqueQueueNotFoundError, PgqueBadArgumentError.
        """
        named, params = encode.arguments({"reason": ("text", reason)})
        with self._client._unlimited():
            return self._client._value(
                int,
                f"select pgque.dlq_purge(%(queue)s::text, %(age)s::interval{named})",
                {"queue": queue, "age": encode.interval(older_than), **params},
            )

    def delete_expired(self, queue: str) -> int:
        """Delete dead letters whose message has expired since, and return their number. Calls
        `pgque.delete_expired`."""
        with self._client._unlimited():
            return self._client._value(
                int, "select pgque.delete_expired(%(queue)s::text)", {"queue": queue}
            )

    def list_poison(self, queue: str, limit: int = 100) -> list[PoisonMessage]:
        """Return messages that were delivered more than once without an outcome, or were given up for that.
        Calls `pgque.list_poison`."""
        return self._client._rows(
            f"select {columns(PoisonMessage, 'p')}"
            " from pgque.list_poison(%(queue)s::text, %(limit)s::int) as p",
            {"queue": queue, "limit": limit},
            PoisonMessage,
        )

    def archive_poison(self, queue: str) -> int:
        """Move the dead letters that `list_poison` returns to the archive, and return their number. Calls
        `pgque.archive_poison`."""
        with self._client._unlimited():
            return self._client._value(
                int, "select pgque.archive_poison(%(queue)s::text)", {"queue": queue}
            )
