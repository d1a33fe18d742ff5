"""Messages of queues, in any state."""

from __future__ import annotations

import builtins
from datetime import datetime

from ..codec import encode
from ..types import MessageStatus, QueuedMessage, columns
from .calling import AsyncGroup


class AsyncMessages(AsyncGroup):
    """Messages of queues, in any state."""

    async def list(
        self,
        queue: str,
        status: str | None = None,
        limit: int = 100,
        *,
        type: str | None = None,
        key: str | None = None,
        consumer: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        matching: str | None = None,
        after_id: int | None = None,
    ) -> builtins.list[QueuedMessage]:
        """Return messages of a queue that satisfy all filters, by id, at most `limit`. Calls
        `pgque.list_messages`.

        `since` and `until` filter by the time of sending; a datetime without time zone is local time.
        `matching` is a text in payload, headers or last error, in upper or lower case. To read page by page,
        pass `after_id=0`, and then the last id. A page can be longer than `limit`, since the rows of one
        message stay together. Raises PgqueQueueNotFoundError, PgqueBadArgumentError.
        """
        return await self._client._rows(
            f"select {columns(QueuedMessage, 'm')}"
            " from pgque.list_messages(%(queue)s::text, %(status)s::text, %(limit)s::int, %(type)s::text,"
            " %(key)s::text, %(consumer)s::text, %(since)s::timestamptz, %(until)s::timestamptz,"
            " %(matching)s::text, %(after_id)s::bigint) as m",
            {
                "queue": queue,
                "status": status,
                "limit": limit,
                "type": type,
                "key": key,
                "consumer": consumer,
                "since": encode.moment(since),
                "until": encode.moment(until),
                "matching": matching,
                "after_id": after_id,
            },
            QueuedMessage,
        )

    async def get(self, queue: str, msg_id: int) -> builtins.list[QueuedMessage]:
        """Return one message, one row for each consumer that still has it. Calls `pgque.get_message`. Raises
        PgqueQueueNotFoundError, PgqueMessageNotFoundError."""
        return await self._client._rows(
            f"select {columns(QueuedMessage, 'm')}"
            " from pgque.get_message(%(queue)s::text, %(msg)s::bigint) as m",
            {"queue": queue, "msg": msg_id},
            QueuedMessage,
        )

    async def status(self, queue: str, msg_id: int) -> builtins.list[MessageStatus]:
        """Return the state of a message, one row for each consumer that still has it. Calls
        `pgque.message_status`. Raises PgqueMessageNotFoundError."""
        return await self._client._rows(
            f"select {columns(MessageStatus, 's')}"
            " from pgque.message_status(%(queue)s::text, %(msg)s::bigint) as s",
            {"queue": queue, "msg": msg_id},
            MessageStatus,
        )

    async def purge_key(self, queue: str, key: str) -> int:
        """Remove the pending message with a key and return 1, or 0 if there is none. Calls `pgque.purge_key`.
        Raises PgqueQueueNotFoundError."""
        return await self._client._value(
            int, "select pgque.purge_key(%(queue)s::text, %(key)s::text)", {"queue": queue, "key": key}
        )
