"""PgQ's calls for whole windows of ticks."""

from __future__ import annotations

from datetime import datetime

from ..codec import encode
from ..types import BatchEvent, BatchInfo, columns
from .calling import AsyncGroup

_EVENT = (
    "e.ev_id, e.ev_time, e.ev_txid::text::bigint, e.ev_retry, e.ev_type, e.ev_data, "
    "e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4"
)


class AsyncPgq(AsyncGroup):
    """PgQ's calls for whole windows of ticks."""

    async def next_batch(self, queue: str, consumer: str) -> int | None:
        """Open the next window of whole ticks as a batch, up to `ticker_max_count` events, and return its id,
        or None. With the setting `max_window` a large window becomes several batches. Calls
        `pgque.next_batch`. Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError."""
        return await self._client._maybe(
            int,
            "select pgque.next_batch(%(queue)s::text, %(consumer)s::text)",
            {"queue": queue, "consumer": consumer},
        )

    async def finish_batch(self, batch_id: int) -> int:
        """Acknowledge a batch: return 1, or 0 if it was not open. Calls `pgque.finish_batch`, PgQ's name of
        `ack`."""
        return await self._client._value(
            int, "select pgque.finish_batch(%(batch)s::bigint)", {"batch": batch_id}
        )

    async def get_batch_events(self, batch_id: int) -> list[BatchEvent]:
        """Return the events of an open batch in the order of their ids. Calls `pgque.get_batch_events`.
        Raises PgqueBatchNotFoundError."""
        return await self._client._rows(
            f"select {_EVENT} from pgque.get_batch_events(%(batch)s::bigint) as e",
            {"batch": batch_id},
            BatchEvent,
        )

    async def get_batch_info(self, batch_id: int) -> BatchInfo:
        """Return the window that an open batch was cut from. Calls `pgque.get_batch_info`. Raises
        PgqueBatchNotFoundError."""
        return await self._client._row(
            f"select {columns(BatchInfo, 'b')} from pgque.get_batch_info(%(batch)s::bigint) as b",
            {"batch": batch_id},
            BatchInfo,
        )

    async def event_retry(self, batch_id: int, event_id: int, retry_after: int | datetime) -> int:
        """Reject an event of a batch: it is redelivered at a time, or in some seconds. Calls
        `pgque.event_retry`.

        Returns 1, or 0 if it was rejected already. A datetime without time zone is local time. Raises
        PgqueMessageNotInBatchError, PgqueBatchNotFoundError, PgqueBadArgumentError.
        """
        cast = "int"
        if isinstance(retry_after, datetime):
            cast, retry_after = "timestamptz", encode.moment(retry_after)
        return await self._client._value(
            int,
            f"select pgque.event_retry(%(batch)s::bigint, %(event)s::bigint, %(after)s::{cast})",
            {"batch": batch_id, "event": event_id, "after": retry_after},
        )

    async def batch_retry(self, batch_id: int, retry_seconds: int) -> int:
        """Reject all events of a batch: they are redelivered in some seconds. Calls `pgque.batch_retry`.

        Returns their number. Finish the batch afterwards. Raises PgqueBatchNotFoundError,
        PgqueBadArgumentError.
        """
        return await self._client._value(
            int,
            "select pgque.batch_retry(%(batch)s::bigint, %(after)s::int)",
            {"batch": batch_id, "after": retry_seconds},
        )
