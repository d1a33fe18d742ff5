"""The client: every method is one call of one SQL function.

`twins/client.py` is generated from `client/client.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import args_row, tuple_row
from psycopg_pool import AsyncConnectionPool

from .._version import __version__
from ..codec import encode
from ..codec import payloads as _payloads
from ..codec.decode import reading
from ..codec.encode import MessageOrId
from ..codec.json import Encoder
from ..codec.payloads import Decoder
from ..errors import PgqueError, from_encoding, from_psycopg, prepare_threshold
from ..integrations import opentelemetry as otel
from ..types import (
    Action,
    ArchivedMessage,
    BatchEvent,
    BatchInfo,
    ConsumerInfo,
    DeadLetter,
    DeadReason,
    Event,
    HealthCheck,
    LagSample,
    Message,
    MessageStatus,
    Metric,
    Outcome,
    Payload,
    PoisonMessage,
    QueuedMessage,
    QueueInfo,
    QueueRights,
    QueueSetting,
    Rate,
    RecurringMessage,
    ReplayResult,
    Seconds,
    SendResult,
    Setting,
    StatusRow,
    WorkerInfo,
    columns,
)
from . import statements
from .direct import is_direct
from .dsn import with_keepalives
from .limit import COMMAND_TIMEOUT, AsyncLimitedConnection, check_command_timeout, within, within_by_default
from .renamed import Renamed

T = TypeVar("T")

_NONE: Mapping[str, object] = {}

_MESSAGE = columns(Message, "m")
_EVENT = (
    "e.ev_id, e.ev_time, e.ev_txid::text::bigint, e.ev_retry, e.ev_type, e.ev_data, "
    "e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4"
)

# Connections whose pgque version was found good, so that each is asked once; and whether each is known to be
# direct, with no pooler between.
_checked: WeakKeyDictionary[AsyncConnection[object], bool] = WeakKeyDictionary()


class AsyncPgqueClient:
    """Call the functions of pgque over one psycopg connection.

    `connect_async` and `from_pool` make a client. `AsyncPgqueClient(conn)` uses a connection of yours: it
    neither commits nor closes it, and all calls belong to your transaction. The first call checks the version
    of the SQL side.

    A method that fails raises a subclass of `PgqueError`, chosen by SQLSTATE. Lengths of time are seconds
    (int, float) or a timedelta.

    Args:
        conn: the connection.
        encoder: takes a value of a type that cannot be sent without it, and returns the value to send; text
            and bytes are a whole payload. It raises TypeError for a type that it does not know.
        decoder: takes a message, and returns its `value`. Its errors become a PgquePayloadError, except for
            `pgque.Retry` and the other outcomes.

    Values without an encoder are text, bytes, None, and JSON: dict, list, numbers; tuples and sets as lists,
    a set in any order; dataclasses, pydantic models by alias, msgspec Structs; times and durations in ISO
    8601; Decimal, UUID and Path as text; an Enum as its value. Keys of a dict become text. NaN and infinity
    are a ValueError, other types a TypeError that names the place: `payload.items[3].when`. To send needs
    neither pydantic nor msgspec.
    """

    def __init__(
        self,
        conn: AsyncConnection[object],
        *,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        _payloads.check_functions(encoder=encoder, decoder=decoder)
        self._conn = conn
        self._owned = False
        self._command_timeout: float | None = None
        self._encoder = encoder
        self._make_message: Callable[..., Message] = _payloads.message_maker(Message, decoder)

    @classmethod
    async def connect(
        cls,
        dsn: str = "",
        *,
        autocommit: bool = False,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
        command_timeout: float | None = COMMAND_TIMEOUT,
    ) -> AsyncPgqueClient:
        """Open a connection and return a client of it; see `connect_async`."""
        _payloads.check_functions(encoder=encoder, decoder=decoder)
        check_command_timeout(command_timeout)
        try:
            conn = await AsyncLimitedConnection.connect(
                with_keepalives(dsn),
                autocommit=True,
                row_factory=tuple_row,
                prepare_threshold=None,
            )
            conn.command_timeout = None  # for the caller's own statements
        except psycopg.Error as error:
            raise from_psycopg(error) from error
        client = cls(conn, encoder=encoder, decoder=decoder)
        client._owned = True
        client._command_timeout = command_timeout
        try:
            await client._ensure_version()
            if client._is_direct:
                conn.prepare_threshold = prepare_threshold()
                with client._limited():
                    await conn.end_with_client()
            await conn.set_autocommit(autocommit)
        except psycopg.Error as error:
            await conn.close()
            raise from_psycopg(error) from error
        except BaseException:
            await conn.close()
            raise
        return client

    @classmethod
    @asynccontextmanager
    async def from_pool(
        cls,
        pool: AsyncConnectionPool[Any],
        *,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
    ) -> AsyncIterator[AsyncPgqueClient]:
        """Borrow a connection from a psycopg_pool pool for the length of a `with` block.

        The block is one transaction: the pool commits it at the end of the block, and rolls it back after an
        exception.
        """
        async with pool.connection() as conn:
            yield cls(conn, encoder=encoder, decoder=decoder)

    @property
    def conn(self) -> AsyncConnection[Any]:
        """Return the psycopg connection, for your own statements, `commit()`, `rollback()` and
        `transaction()`."""
        return self._conn

    async def close(self) -> None:
        """Close the connection if the client opened it. Uncommitted work is rolled back."""
        if self._owned:
            await self._conn.close()

    async def __aenter__(self) -> AsyncPgqueClient:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Commit, or roll back after an exception, and close. A connection of the caller's is left as it
        is."""
        if not self._owned:
            return
        try:
            with self._limited():
                await self._conn.__aexit__(exc_type, exc, tb)
        except psycopg.Error as error:
            raise from_psycopg(error) from error

    # -- produce -----------------------------------------------------------------------------------

    async def send(
        self,
        queue: str,
        payload: Payload | Event,
        *,
        type: str = "default",
        headers: Mapping[str, object] | None = None,
        key: str | None = None,
        delay: Seconds | None = None,
        deliver_at: datetime | None = None,
        ttl: Seconds | None = None,
        partition_key: str | None = None,
    ) -> int:
        """Send one message and return its id. Calls `pgque.send`.

        A str is sent as text, byte for byte; bytes are sent as bytes and arrive in `payload_bytes`; None is
        sent as NULL. Other values are sent as JSON: dict, list, numbers, dataclasses, models of pydantic,
        Structs of msgspec, times, Decimal, UUID, enums, paths and sets, and values that the client's
        `encoder` replaces. An `Event` brings its own type and its options, where none are given here.

        Args:
            headers: travel with the message as a JSON object.
            key: replaces the pending message with this key, whose id is returned then.
            delay: seconds until the message can be received.
            deliver_at: the time from which the message can be received, instead of `delay`; a datetime
                without time zone is local time.
            ttl: seconds after which the message expires; 0 is never, None the queue's `message_ttl`.
            partition_key: goes to `extra1`, and is the key for keyed order if there is no `key`.

        Raises PgqueQueueNotFoundError, PgqueQueueFullError, PgqueQueueDisabledError, PgqueBadArgumentError
        (also for a text that the connection's encoding lacks), TypeError for a value that cannot be encoded,
        and ValueError for NaN.
        """
        options = {
            "headers": headers,
            "key": key,
            "delay": delay,
            "deliver_at": deliver_at,
            "ttl": ttl,
            "partition_key": partition_key,
        }
        call, params = statements.send(queue, type, payload, options, self._encoder)
        with otel.timed("send", queue):
            return await self._value(int, f"select {call}", params)

    @overload
    async def send_batch(
        self,
        queue: str,
        payloads: Iterable[Payload | Event],
        *,
        type: str | None = None,
        headers: Sequence[Mapping[str, object] | None] | None = None,
        keys: Sequence[str | None] | None = None,
        delays: Sequence[Seconds | None] | None = None,
        deliver_ats: Sequence[datetime | None] | None = None,
        ttls: Sequence[Seconds | None] | None = None,
        partition_keys: Sequence[str | None] | None = None,
    ) -> list[int]: ...

    @overload
    async def send_batch(
        self,
        queue: str,
        type: str,
        payloads: Iterable[Payload | Event],
        *,
        headers: Sequence[Mapping[str, object] | None] | None = None,
        keys: Sequence[str | None] | None = None,
        delays: Sequence[Seconds | None] | None = None,
        deliver_ats: Sequence[datetime | None] | None = None,
        ttls: Sequence[Seconds | None] | None = None,
        partition_keys: Sequence[str | None] | None = None,
    ) -> list[int]: ...

    async def send_batch(
        self,
        queue: str,
        *given: object,
        type: str | None = None,
        payloads: Iterable[Payload | Event] | None = None,
        headers: Sequence[Mapping[str, object] | None] | None = None,
        keys: Sequence[str | None] | None = None,
        delays: Sequence[Seconds | None] | None = None,
        deliver_ats: Sequence[datetime | None] | None = None,
        ttls: Sequence[Seconds | None] | None = None,
        partition_keys: Sequence[str | None] | None = None,
    ) -> list[int]:
        """Send many messages of one type, all or none, and return their ids in input order. Calls
        `pgque.send_batch`.

        The arguments are in the order of `send`: `send_batch(queue, payloads, type="order.created")`. Without
        `type` it is the type of the `Event`s, or "default". The earlier order, `send_batch(queue, type,
        payloads)`, still works.

        Options are lists as long as the payloads, each for `send`'s argument of that name, or come with
        `Event`s of this type. A batch has either bytes or other payloads. Raises as `send`.
        """
        options = {
            "headers": headers,
            "key": keys,
            "delay": delays,
            "deliver_at": deliver_ats,
            "ttl": ttls,
            "partition_key": partition_keys,
        }
        type, payloads = encode.type_and_payloads(given, type, payloads)
        call, params = statements.send_batch(queue, type, payloads, options, self._encoder)
        with otel.timed("send", queue):
            return await self._value(list, f"select {call}", params)

    async def send_idem(
        self,
        queue: str,
        payload: Payload,
        idem_key: str,
        *,
        type: str = "default",
        ttl: Seconds = 3600,
        partition_key: str | None = None,
    ) -> SendResult:
        """Send a message unless one with this key was sent within `ttl` seconds. Calls `pgque.send_idem`.

        Returns a SendResult: the id of the message, or of the earlier one if `deduped` is true. Raises
        PgqueQueueNotFoundError, PgqueQueueDisabledError, PgqueBadArgumentError.
        """
        value, cast = encode.text_and_cast(payload, self._encoder)
        return await self._row(
            "select r.event_id, r.deduped"
            f" from pgque.send_idem(%(queue)s::text, %(type)s::text, %(payload)s::{cast},"
            " %(key)s::text, %(ttl)s::interval, %(partition)s::text) as r",
            {
                "queue": queue,
                "type": type,
                "payload": value,
                "key": idem_key,
                "ttl": encode.interval(ttl),
                "partition": partition_key,
            },
            SendResult,
        )

    # -- consume -----------------------------------------------------------------------------------

    async def subscribe(
        self,
        queue: str,
        consumer: str,
        start_at: str | int | datetime | None = None,
        *,
        keyed_order: bool | None = None,
        key_concurrency: int | None = None,
    ) -> int:
        """Subscribe a consumer and return 1, or 0 if it was subscribed already. Calls `pgque.subscribe`.

        The consumer receives messages after `start_at`: "latest" (the default), "earliest", a tick id or a
        time; a datetime without time zone is local time. With `keyed_order` its workers get the messages of
        one key one at a time, in order. With `key_concurrency` they get at most this many of one key at a
        time. Raises PgqueQueueNotFoundError, PgqueQueueFullError, PgqueInvalidNameError,
        PgqueBadArgumentError, and PgqueQueueInUseError if it is subscribed with another limit.
        """
        sql, params = encode.arguments(
            {
                "start_at": ("text", None if start_at is None else encode.start_text(start_at)),
                "keyed_order": ("bool", keyed_order),
                "key_concurrency": ("int", key_concurrency),
            }
        )
        return await self._value(
            int,
            f"select pgque.subscribe(%(queue)s::text, %(consumer)s::text{sql})",
            {"queue": queue, "consumer": consumer, **params},
        )

    async def unsubscribe(self, queue: str, consumer: str) -> int:
        """Remove a consumer from a queue, and return how many subscriptions were removed. Calls
        `pgque.unsubscribe`.

        Its pending retries are lost, its dead letters stay. Raises PgqueQueueNotFoundError.
        """
        return await self._value(
            int,
            "select pgque.unsubscribe(%(queue)s::text, %(consumer)s::text)",
            {"queue": queue, "consumer": consumer},
        )

    async def seek_to_time(self, queue: str, consumer: str, at: datetime) -> int:
        """Move a consumer back or forward to a time, and return the id of the tick where it stands. Calls
        `pgque.seek_to_time`.

        It receives again what became visible after that time. Messages that all consumers have finished stay
        for two to three `rotation_period`. A datetime without time zone is local time. Raises
        PgqueQueueNotFoundError, PgqueConsumerNotFoundError, PgqueBadArgumentError if the consumer has
        workers, PgqueTickNotFoundError if the queue stores no tick as old as `at`.
        """
        return await self._value(
            int,
            "select pgque.seek_to_time(%(queue)s::text, %(consumer)s::text, %(at)s::timestamptz)",
            {"queue": queue, "consumer": consumer, "at": encode.moment(at)},
        )

    async def receive(
        self,
        queue: str,
        consumer: str,
        max_messages: int = 100,
        *,
        worker: str | None = None,
        visibility_timeout: Seconds | None = None,
        ack_batch: int | None = None,
        max_bytes: int | None = statements.MAX_BYTES,
    ) -> list[Message]:
        """Return the next batch, at most `max_messages` long, or [] if there is none. Calls `pgque.receive`.

        Without `worker`, a batch that was not acknowledged is redelivered under the same id. With `worker`,
        the workers of the consumer share its messages: each call leases others for `visibility_timeout`
        seconds (None: the queue's setting). Messages without an outcome are redelivered when the lease has
        expired.

        `ack_batch` acknowledges that batch first, in the same transaction.

        A new batch ends before its payloads and headers exceed `max_bytes`, with at least one message; None
        is no limit. The driver needs several times this memory.

        Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError, PgqueQueueInUseError,
        PgqueBadArgumentError.
        """
        call, params = statements.receive(
            queue, consumer, max_messages, worker, visibility_timeout, ack_batch, max_bytes
        )
        with otel.timed("receive", queue, consumer):
            return await self._rows(f"select {_MESSAGE} from {call} as m", params, self._make_message)

    @overload
    async def ack(self, batch_id: int, msgs: None = None) -> int: ...

    @overload
    async def ack(self, batch_id: int, msgs: Sequence[MessageOrId]) -> list[Outcome]: ...

    async def ack(self, batch_id: int, msgs: Sequence[MessageOrId] | None = None) -> int | list[Outcome]:
        """Acknowledge a batch: return 1, or 0 if it was not open. Calls `pgque.ack`.

        With `msgs`, acknowledge only these messages, and return an Outcome for each.
        """
        if msgs is None:
            call, params = statements.ack(batch_id)
            return await self._value(int, f"select {call}", params)
        return await self._report("ack", batch_id, msgs)

    async def finish_batch(self, batch_id: int) -> int:
        """Acknowledge a batch: return 1, or 0 if it was not open. Calls `pgque.finish_batch`, PgQ's name of
        `ack`."""
        return await self._value(int, "select pgque.finish_batch(%(batch)s::bigint)", {"batch": batch_id})

    @overload
    async def nack(
        self, batch_id: int, msg: MessageOrId, retry_after: Seconds | None = None, reason: str | None = None
    ) -> int: ...

    @overload
    async def nack(
        self,
        batch_id: int,
        msg: Sequence[MessageOrId],
        retry_after: Seconds | None = None,
        reason: str | None = None,
    ) -> list[Outcome]: ...

    async def nack(
        self,
        batch_id: int,
        msg: MessageOrId | Sequence[MessageOrId],
        retry_after: Seconds | None = None,
        reason: str | None = None,
    ) -> int | list[Outcome]:
        """Reject messages of an open batch: they are redelivered after `retry_after` seconds. Calls
        `pgque.nack`.

        `retry_after` None is the queue's `retry_backoff`, or 60 seconds. A message without retries left goes
        the way of the queue's `drop_policy`, with `reason`.

        For one message (or its id) it returns 1, and raises PgqueMessageNotInBatchError or
        PgqueBatchNotFoundError. For a sequence it returns an Outcome for each. Raises PgqueBadArgumentError.
        Acknowledge the batch of a consumer without workers afterwards.
        """
        options = {
            "retry_after": ("interval", encode.interval(retry_after)),
            "reason": ("text", encode.reason_text(reason, self._conn)),
        }
        if not isinstance(msg, (Message, int)):
            return await self._report("nack", batch_id, msg, options)
        call, params = statements.nack(batch_id, msg, options)
        return await self._value(int, f"select {call}", params)

    async def dead(
        self, batch_id: int, msgs: Sequence[MessageOrId], reason: str | None = None
    ) -> list[Outcome]:
        """Give messages of a batch up, without more retries, and return an Outcome for each. Calls
        `pgque.dead`.

        They go the way of the queue's `drop_policy`; by default they become dead letters, with `reason`.
        """
        text = encode.reason_text(reason, self._conn)
        return await self._report("dead", batch_id, msgs, {"reason": ("text", text)})

    async def archive(self, batch_id: int, msgs: Sequence[MessageOrId] | None = None) -> list[Outcome]:
        """Acknowledge messages of a batch, None for all, and keep them in the archive. Calls `pgque.archive`.

        Returns an Outcome for each message.
        """
        return await self._report("archive", batch_id, msgs)

    async def release(self, batch_id: int, msgs: Sequence[MessageOrId] | None = None) -> int:
        """Release messages of a batch, None for all, and return their number. Calls `pgque.release`.

        They can be received at once, by any worker of the consumer. A consumer without workers acknowledges
        the batch afterwards, and receives the messages in another one.
        """
        sql, params = encode.arguments({"msg_ids": ("bigint[]", encode.ids_or_none(msgs))})
        return await self._value(
            int, f"select pgque.release(%(batch)s::bigint{sql})", {"batch": batch_id, **params}
        )

    async def extend(self, batch_id: int, seconds: Seconds) -> int:
        """Extend the lease on a worker's batch by some seconds. Calls `pgque.extend`.

        Returns the number of its messages that are still leased, 0 if the batch is lost. Raises
        PgqueBadArgumentError.
        """
        return await self._value(
            int,
            "select pgque.extend(%(batch)s::bigint, %(by)s::interval)",
            {"batch": batch_id, "by": encode.interval(seconds)},
        )

    async def set_visibility(self, batch_id: int, seconds: Seconds) -> int:
        """Set when the lease on a worker's batch expires, in seconds from now; 0 releases the batch. Calls
        `pgque.set_visibility`.

        Returns the number of its messages that are still leased, 0 if the batch is lost. Raises
        PgqueBadArgumentError.
        """
        return await self._value(
            int,
            "select pgque.set_visibility(%(batch)s::bigint, %(to)s::interval)",
            {"batch": batch_id, "to": encode.interval(seconds)},
        )

    async def peek(self, queue: str, n: int = 10, *, consumer: str | None = None) -> list[Message]:
        """Return the next `n` messages that a consumer has not finished, without receiving them. Calls
        `pgque.peek`.

        `consumer` None is the slowest consumer. Retries that are due are among them. Raises
        PgqueQueueNotFoundError, PgqueConsumerNotFoundError, PgqueBadArgumentError for an `n` below 1.
        """
        sql, params = encode.arguments({"consumer_name": ("text", consumer)})
        return await self._rows(
            f"select {_MESSAGE} from pgque.peek(%(queue)s::text, %(n)s::int{sql}) as m",
            {"queue": queue, "n": n, **params},
            self._make_message,
        )

    async def next_batch(self, queue: str, consumer: str) -> int | None:
        """Open the next window of whole ticks as a batch, up to `ticker_max_count` events, and return its id,
        or None. With the setting `max_window` a large window becomes several batches. Calls
        `pgque.next_batch`. Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError."""
        return await self._maybe(
            int,
            "select pgque.next_batch(%(queue)s::text, %(consumer)s::text)",
            {"queue": queue, "consumer": consumer},
        )

    async def get_batch_events(self, batch_id: int) -> list[BatchEvent]:
        """Return the events of an open batch in the order of their ids. Calls `pgque.get_batch_events`.
        Raises PgqueBatchNotFoundError."""
        return await self._rows(
            f"select {_EVENT} from pgque.get_batch_events(%(batch)s::bigint) as e",
            {"batch": batch_id},
            BatchEvent,
        )

    async def get_batch_info(self, batch_id: int) -> BatchInfo:
        """Return the window that an open batch was cut from. Calls `pgque.get_batch_info`. Raises
        PgqueBatchNotFoundError."""
        return await self._row(
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
        return await self._value(
            int,
            f"select pgque.event_retry(%(batch)s::bigint, %(event)s::bigint, %(after)s::{cast})",
            {"batch": batch_id, "event": event_id, "after": retry_after},
        )

    async def batch_retry(self, batch_id: int, retry_seconds: int) -> int:
        """Reject all events of a batch: they are redelivered in some seconds. Calls `pgque.batch_retry`.

        Returns their number. Finish the batch afterwards. Raises PgqueBatchNotFoundError,
        PgqueBadArgumentError.
        """
        return await self._value(
            int,
            "select pgque.batch_retry(%(batch)s::bigint, %(after)s::int)",
            {"batch": batch_id, "after": retry_seconds},
        )

    # -- several workers for one consumer
    # ------------------------------------------------------------------------------

    async def subscribe_subconsumer(
        self, queue: str, consumer: str, subconsumer: str, convert_normal: bool = False
    ) -> int:
        """Register a worker of a consumer and return 1, or 0 if it was registered. Calls
        `pgque.register_subconsumer`.

        `convert_normal` turns a consumer that reads on its own into one with workers. Raises
        PgqueQueueNotFoundError, PgqueInvalidNameError, PgqueQueueInUseError.
        """
        return await self._value(
            int,
            "select pgque.register_subconsumer(%(queue)s::text, %(consumer)s::text,"
            " %(worker)s::text, %(convert)s::bool)",
            {"queue": queue, "consumer": consumer, "worker": subconsumer, "convert": convert_normal},
        )

    async def unsubscribe_subconsumer(
        self, queue: str, consumer: str, subconsumer: str, batch_handling: int = 0
    ) -> int:
        """Remove a worker of a consumer and return 1, or 0 if there is none. Calls
        `pgque.unregister_subconsumer`.

        `batch_handling`: 0 raises PgqueQueueInUseError while the worker has an open batch, 1 sends its
        messages through retry.
        """
        return await self._value(
            int,
            "select pgque.unregister_subconsumer(%(queue)s::text, %(consumer)s::text,"
            " %(worker)s::text, %(how)s::int)",
            {"queue": queue, "consumer": consumer, "worker": subconsumer, "how": batch_handling},
        )

    async def receive_coop(
        self,
        queue: str,
        consumer: str,
        subconsumer: str,
        *,
        max_messages: int = 100,
        dead_interval: Seconds | None = None,
        max_bytes: int | None = statements.MAX_BYTES,
    ) -> list[Message]:
        """Return the next batch of one worker of a consumer, and register the worker on first use. Calls
        `pgque.receive_coop`.

        A worker has at most one batch. The batch of a worker that was silent for `dead_interval` seconds is
        taken over. `max_bytes` is that of `receive`. Raises PgqueQueueNotFoundError, PgqueQueueInUseError,
        PgqueInvalidNameError, PgqueBadArgumentError.
        """
        with otel.timed("receive", queue, consumer):
            return await self._rows(
                f"select {_MESSAGE} from pgque.receive_coop(%(queue)s::text, %(consumer)s::text,"
                " %(worker)s::text, %(max)s::int, %(dead)s::interval, %(bytes)s::bigint) as m",
                {
                    "queue": queue,
                    "consumer": consumer,
                    "worker": subconsumer,
                    "max": max_messages,
                    "dead": encode.interval(dead_interval),
                    "bytes": max_bytes,
                },
                self._make_message,
            )

    async def touch_subconsumer(self, queue: str, consumer: str, subconsumer: str) -> int:
        """Mark a worker as alive and return 1: `dead_interval` counts from now. Calls
        `pgque.touch_subconsumer`. Raises PgqueConsumerNotFoundError."""
        return await self._value(
            int,
            "select pgque.touch_subconsumer(%(queue)s::text, %(consumer)s::text, %(worker)s::text)",
            {"queue": queue, "consumer": consumer, "worker": subconsumer},
        )

    # -- operate -----------------------------------------------------------------------------------

    async def create_queue(self, queue: str, config: Mapping[str, Setting] | None = None) -> int:
        """Create a queue and return 1, or 0 if its name is taken; that queue keeps its settings. Calls
        `pgque.create_queue`.

        Raises PgqueInvalidNameError, and PgqueBadArgumentError for a setting that is unknown or out of range.
        """
        if config is None:
            return await self._value(int, "select pgque.create_queue(%(queue)s::text)", {"queue": queue})
        return await self._value(
            int,
            "select pgque.create_queue(%(queue)s::text, %(config)s::jsonb)",
            {"queue": queue, "config": encode.config_json(config)},
        )

    async def alter_queue(self, queue: str, config: Mapping[str, Setting]) -> None:
        """Change settings of a queue, all or none, and return their number; None restores a default. Calls
        `pgque.alter_queue`. Raises PgqueQueueNotFoundError, PgqueBadArgumentError."""
        await self._run(
            "select pgque.alter_queue(%(queue)s::text, %(config)s::jsonb)",
            {"queue": queue, "config": encode.config_json(config)},
        )

    async def set_queue_config(self, queue: str, param: str, value: Setting) -> None:
        """Change one setting of a queue; None restores its default. Calls `pgque.set_queue_config`. Raises
        PgqueQueueNotFoundError, PgqueBadArgumentError."""
        await self._run(
            "select pgque.set_queue_config(%(queue)s::text, %(param)s::text, %(value)s::text)",
            {"queue": queue, "param": param, "value": encode.setting_text(value)},
        )

    async def queue_config(self, queue: str) -> dict[str, str | None]:
        """Return the settings in force for a queue, as text. Calls `pgque.queue_settings`. Raises
        PgqueQueueNotFoundError."""
        pairs = await self._rows(
            "select s.setting, s.value from pgque.queue_settings(%(queue)s::text) as s",
            {"queue": queue},
            _pair,
        )
        return dict(pairs)

    async def queue_settings(self, queue: str) -> list[QueueSetting]:
        """Return the settings of a queue with their defaults, units and meaning. Calls
        `pgque.queue_settings`. Raises PgqueQueueNotFoundError."""
        return await self._rows(
            f"select {columns(QueueSetting, 's')} from pgque.queue_settings(%(queue)s::text) as s",
            {"queue": queue},
            QueueSetting,
        )

    async def drop_queue(self, queue: str, force: bool = False) -> int:
        """Drop a queue; `force` also drops its consumers and messages. Calls `pgque.drop_queue`. Raises
        PgqueQueueNotFoundError, PgqueQueueInUseError."""
        with self._unlimited():
            return await self._value(
                int,
                "select pgque.drop_queue(%(queue)s::text, %(force)s::bool)",
                {"queue": queue, "force": force},
            )

    async def pause(self, queue: str) -> None:
        """Pause a queue: senders get PgqueQueueDisabledError, consumers still receive. Calls `pgque.pause`.
        Raises PgqueQueueNotFoundError."""
        await self._run("select pgque.pause(%(queue)s::text)", {"queue": queue})

    async def resume(self, queue: str) -> None:
        """Resume a paused queue. Calls `pgque.resume`. Raises PgqueQueueNotFoundError."""
        await self._run("select pgque.resume(%(queue)s::text)", {"queue": queue})

    async def rename_queue(self, queue: str, new_name: str) -> int:
        """Rename a queue; its `queue_uid` stays. Calls `pgque.rename_queue`. Raises PgqueQueueNotFoundError,
        PgqueQueueExistsError, PgqueInvalidNameError."""
        return await self._value(
            int,
            "select pgque.rename_queue(%(queue)s::text, %(new)s::text)",
            {"queue": queue, "new": new_name},
        )

    async def grant_queue(self, queue: str, role: str, right: str) -> bool:
        """Grant a role a right to one queue: `produce`, `consume`, or `admin`, which includes both. Calls
        `pgque.grant_queue`.

        Returns False if the role has the right. Raises PgqueQueueNotFoundError, PgqueBadArgumentError, and
        PgqueError if there is no such role.
        """
        given = await self._value(
            int,
            "select pgque.grant_queue(%(queue)s::text, %(role)s::text, %(right)s::text)",
            {"queue": queue, "role": role, "right": right},
        )
        return given == 1

    async def revoke_queue(self, queue: str, role: str, right: str | None = None) -> int:
        """Revoke rights that `grant_queue` gave, by default all, and return their number. Calls
        `pgque.revoke_queue`. Raises as `grant_queue`."""
        return await self._value(
            int,
            "select pgque.revoke_queue(%(queue)s::text, %(role)s::text, %(right)s::text)",
            {"queue": queue, "role": role, "right": right},
        )

    async def my_rights(self) -> list[QueueRights]:
        """Return the rights of this connection's role: to all queues first, then to single queues. Calls
        `pgque.my_rights`."""
        return await self._rows(
            f"select {columns(QueueRights, 'r')} from pgque.my_rights() as r", {}, QueueRights
        )

    async def set_default_config(self, param: str, value: Setting) -> None:
        """Change the default of a setting for all queues that do not set it; None restores the built-in
        default. Calls `pgque.set_default_config`. Raises PgqueBadArgumentError."""
        await self._run(
            "select pgque.set_default_config(%(param)s::text, %(value)s::text)",
            {"param": param, "value": encode.setting_text(value)},
        )

    async def expire_messages(self, queue: str) -> int:
        """Delete expired messages from the retry queue, and return their number. Calls
        `pgque.expire_messages`."""
        with self._unlimited():
            return await self._value(int, "select pgque.expire_messages(%(queue)s::text)", {"queue": queue})

    async def delete_expired(self, queue: str) -> int:
        """Delete dead letters whose message has expired since, and return their number. Calls
        `pgque.delete_expired`."""
        with self._unlimited():
            return await self._value(int, "select pgque.delete_expired(%(queue)s::text)", {"queue": queue})

    async def set_schedule(self, job: str, every: Seconds | str) -> str:
        """Set how often the job "expire" or "delete_expired" runs; "" turns it off. Calls
        `pgque.set_schedule`.

        `every` is seconds or an interval. Returns the one in force. If the new one is invalid, the old one
        stays, and PgqueBadArgumentError is raised.
        """
        return await self._value(
            str,
            "select pgque.set_schedule(%(job)s::text, %(every)s::text)",
            {
                "job": job,
                "every": every if isinstance(every, str) else encode.setting_text(encode.interval(every)),
            },
        )

    async def ticker(self, queue: str) -> int | None:
        """Tick one queue if it has a reason, and return the tick id or None. Calls `pgque.ticker`. Raises
        PgqueQueueNotFoundError."""
        return await self._maybe(int, "select pgque.ticker(%(queue)s::text)", {"queue": queue})

    async def ticker_all(self) -> int:
        """Tick all queues that have a reason, and return the number of ticks. Calls `pgque.ticker`."""
        return await self._value(int, "select pgque.ticker()")

    async def force_next_tick(self, queue: str) -> int | None:
        """Make the next call of `ticker` tick this queue, whatever its settings. Calls
        `pgque.force_next_tick`. Raises PgqueQueueNotFoundError."""
        return await self._maybe(int, "select pgque.force_next_tick(%(queue)s::text)", {"queue": queue})

    async def maint(self) -> None:
        """Do all maintenance that is due: retries, rotation, retention. Calls `pgque.maint`."""
        with self._unlimited():
            await self._run("select pgque.maint()")

    async def start(self) -> None:
        """Schedule the ticker with pg_cron. Calls `pgque.start`. Raises PgqueNoSchedulerError if pg_cron is
        missing."""
        await self._run("select pgque.start()")

    async def stop(self) -> None:
        """Remove the ticker from pg_cron's schedule. Calls `pgque.stop`."""
        await self._run("select pgque.stop()")

    async def status(self) -> list[StatusRow]:
        """Return the state of each part of the installation. Calls `pgque.status`."""
        return await self._rows(
            f"select {columns(StatusRow, 's')} from pgque.status() as s", _NONE, StatusRow
        )

    async def metrics(self, queue: str | None = None) -> list[Metric]:
        """Return the figures of all queues or of one, one a row. Calls `pgque.metrics`. For one queue, any
        right to it is enough."""
        if queue is None:
            return await self._rows(f"select {columns(Metric, 'm')} from pgque.metrics() as m", _NONE, Metric)
        return await self._rows(
            f"select {columns(Metric, 'm')} from pgque.metrics(%(queue)s::text) as m",
            {"queue": queue},
            Metric,
        )

    async def health(self, queue: str | None = None) -> list[HealthCheck]:
        """Return the checks of everything or of one queue, one a row: ok, warn or fail, and what to do. Calls
        `pgque.health`. For one queue, any right to it is enough."""
        if queue is None:
            return await self._rows(
                f"select {columns(HealthCheck, 'h')} from pgque.health() as h", _NONE, HealthCheck
            )
        return await self._rows(
            f"select {columns(HealthCheck, 'h')} from pgque.health(%(queue)s::text) as h",
            {"queue": queue},
            HealthCheck,
        )

    async def queue_rates(
        self, queue: str, since: Seconds = timedelta(hours=6), buckets: int = 72
    ) -> list[Rate]:
        """Return how many messages were sent to a queue in the last `since` seconds, in `buckets` equal
        parts. Calls `pgque.queue_rates`. Raises PgqueQueueNotFoundError, PgqueBadArgumentError."""
        return await self._rows(
            f"select {columns(Rate, 'r')} from pgque.queue_rates("
            "%(queue)s::text, %(since)s::interval, %(buckets)s::int) as r",
            {"queue": queue, "since": encode.interval(since), "buckets": buckets},
            Rate,
        )

    async def consumer_lags(
        self, queue: str, consumer: str | None = None, since: Seconds = timedelta(hours=6)
    ) -> list[LagSample]:
        """Return how far consumers of a queue lagged in the last `since` seconds, a sample a minute. Calls
        `pgque.consumer_lags`. Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError."""
        return await self._rows(
            f"select {columns(LagSample, 's')} from pgque.consumer_lags("
            "%(queue)s::text, %(consumer)s::text, %(since)s::interval) as s",
            {"queue": queue, "consumer": consumer, "since": encode.interval(since)},
            LagSample,
        )

    async def list_actions(
        self, queue: str | None = None, limit: int = 100, before: datetime | None = None
    ) -> list[Action]:
        """Return changes that roles made by hand, the newest first. Calls `pgque.list_actions`.

        For the next page, pass the last `at` as `before`; a datetime without time zone is local time.
        """
        return await self._rows(
            f"select {columns(Action, 'a')} from pgque.list_actions("
            "%(queue)s::text, %(limit)s::int, %(before)s::timestamptz) as a",
            {"queue": queue, "limit": limit, "before": None if before is None else encode.moment(before)},
            Action,
        )

    async def set_history(self, what: str, keep: Seconds | None) -> None:
        """Set for how many seconds at least the history of "actions" or "lags" is kept; None turns it off.
        Calls `pgque.set_history`. Raises PgqueBadArgumentError."""
        await self._run(
            "select pgque.set_history(%(what)s::text, %(keep)s::interval)",
            {"what": what, "keep": None if keep is None else encode.interval(keep)},
        )

    async def version(self) -> str:
        """Return the version of the SQL side. Calls `pgque.version`."""
        return await self._value(str, "select pgque.version()")

    async def get_queue_info(self, queue: str | None = None) -> list[QueueInfo]:
        """Return settings and load of one queue or of all. Calls `pgque.get_queue_info`. Raises
        PgqueQueueNotFoundError."""
        call = "pgque.get_queue_info()" if queue is None else "pgque.get_queue_info(%(queue)s::text)"
        return await self._rows(
            f"select {columns(QueueInfo, 'i')} from {call} as i", {"queue": queue}, QueueInfo
        )

    queue_info: Renamed[..., Any] = Renamed(get_queue_info)

    async def get_consumer_info(
        self, queue: str | None = None, consumer: str | None = None
    ) -> list[ConsumerInfo]:
        """Return position and lag of all consumers, of those of a queue, or of one. Calls
        `pgque.get_consumer_info`. Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError."""
        arguments = ["%(queue)s::text"] if queue is not None else []
        if consumer is not None:
            if queue is None:
                raise TypeError("get_consumer_info needs the queue of a consumer: pass both")
            arguments.append("%(consumer)s::text")
        return await self._rows(
            f"select {columns(ConsumerInfo, 'i')} from pgque.get_consumer_info({', '.join(arguments)}) as i",
            {"queue": queue, "consumer": consumer},
            ConsumerInfo,
        )

    consumer_info: Renamed[..., Any] = Renamed(get_consumer_info)

    # -- recurring messages
    # --------------------------------------------------------------------------------------------------

    async def create_recurring(
        self,
        name: str,
        queue: str,
        cron: str,
        payload: Payload | Event = None,
        *,
        type: str = "default",
        headers: Mapping[str, object] | None = None,
        key: str | None = None,
        delay: Seconds | None = None,
        ttl: Seconds | None = None,
        partition_key: str | None = None,
        timezone: str = "UTC",
        catch_up: str = "one",
        starts_at: datetime | None = None,
        ends_at: datetime | None = None,
    ) -> bool:
        """Create a message that the ticker sends at its times, or change the one of this name; return whether
        it is new. Calls `pgque.create_recurring`.

        Each message has the header `pgque-recurring` with `name` and `run_at`. At each run, the role that
        made this call needs the right to send to the queue. A call that does not change the times keeps the
        next run. A paused recurring message stays paused.

        Args:
            name: 1 to 200 bytes, once in the database.
            cron: five fields such as "0 3 * * mon-fri" (minute, hour, day, month, weekday), six with seconds
                first, or an interval such as "90 seconds", counted from `starts_at` or from now.
            payload: as of `send`. An `Event` brings its own type and options, but no `deliver_at`.
            timezone: the time zone of the fields of `cron`, such as "Europe/Berlin".
            catch_up: which missed runs are sent: "none", "one" for the last, or "all", at most 1,000.
            starts_at: no run is before; a datetime without time zone is local time.
            ends_at: no run is after.

        Raises PgqueQueueNotFoundError, PgqueQueueFullError, PgqueInvalidNameError, PgqueBadArgumentError,
        PgquePermissionDeniedError.
        """
        options = {
            "headers": headers,
            "key": key,
            "delay": delay,
            "ttl": ttl,
            "partition_key": partition_key,
        }
        event = encode.event_of(type, payload, options)
        if event.deliver_at is not None:
            raise ValueError("a recurring message has no deliver_at: its times are those of cron")
        sql, params = encode.send_arguments(event, self._encoder)
        more, schedule = encode.arguments(
            {
                "timezone": ("text", timezone),
                "catch_up": ("text", catch_up),
                "starts_at": ("timestamptz", encode.moment(starts_at)),
                "ends_at": ("timestamptz", encode.moment(ends_at)),
            }
        )
        new = await self._value(
            int,
            "select pgque.create_recurring(%(name)s::text, %(queue)s::text, %(cron)s::text, %(type)s::text,"
            f" {sql}{more})",
            {"name": name, "queue": queue, "cron": cron, "type": event.type, **params, **schedule},
        )
        return new == 1

    async def drop_recurring(self, name: str) -> None:
        """Drop a recurring message; messages that it sent stay. Calls `pgque.drop_recurring`. Raises
        PgqueMessageNotFoundError, PgquePermissionDeniedError."""
        await self._run("select pgque.drop_recurring(%(name)s::text)", {"name": name})

    async def pause_recurring(self, name: str) -> bool:
        """Pause a recurring message, and return False if it was paused. Calls `pgque.pause_recurring`. Raises
        as `drop_recurring`."""
        return await self._value(int, "select pgque.pause_recurring(%(name)s::text)", {"name": name}) == 1

    async def resume_recurring(self, name: str) -> bool:
        """Resume a paused recurring message with its next run, and return False if it was not paused. Calls
        `pgque.resume_recurring`. Raises as `drop_recurring`."""
        return await self._value(int, "select pgque.resume_recurring(%(name)s::text)", {"name": name}) == 1

    async def run_recurring(self, name: str) -> int:
        """Send a recurring message now, besides its times, and return the id of the message. Calls
        `pgque.run_recurring`. Raises as `drop_recurring` and `send`."""
        return await self._value(int, "select pgque.run_recurring(%(name)s::text)", {"name": name})

    async def list_recurring(self) -> list[RecurringMessage]:
        """Return the recurring messages that the role may see, with their last and next run. Calls
        `pgque.list_recurring`."""
        return await self._rows(
            f"select {columns(RecurringMessage, 'r')} from pgque.list_recurring() as r",
            _NONE,
            RecurringMessage,
        )

    # -- workers and messages
    # --------------------------------------------------------------------------------------------------

    async def list_workers(self, queue: str | None = None, consumer: str | None = None) -> list[WorkerInfo]:
        """Return the workers of all queues, of one, or of one consumer, with their leased messages. Calls
        `pgque.list_workers`."""
        return await self._rows(
            f"select {columns(WorkerInfo, 'w')}"
            " from pgque.list_workers(%(queue)s::text, %(consumer)s::text) as w",
            {"queue": queue, "consumer": consumer},
            WorkerInfo,
        )

    async def reclaim(self, queue: str, consumer: str, older_than: Seconds = 0) -> int:
        """Release the batches that workers received more than `older_than` seconds ago, and return their
        number. Calls `pgque.reclaim`.

        One call releases at most 500 while workers report outcomes. Raises PgqueBadArgumentError.
        """
        return await self._value(
            int,
            "select pgque.reclaim(%(queue)s::text, %(consumer)s::text, %(age)s::interval)",
            {"queue": queue, "consumer": consumer, "age": encode.interval(older_than)},
        )

    async def share_consumer(self, queue: str, consumer: str) -> int:
        """Turn a consumer that reads on its own into a pool of workers: return 1, or 0 if it is one. Calls
        `pgque.share_consumer`.

        Its position and its pending retries stay. Its open batch goes to the workers. Raises
        PgqueQueueNotFoundError, PgqueConsumerNotFoundError, and PgqueQueueInUseError if it has subconsumers.
        """
        with self._unlimited():
            return await self._value(
                int,
                "select pgque.share_consumer(%(queue)s::text, %(consumer)s::text)",
                {"queue": queue, "consumer": consumer},
            )

    async def set_key_concurrency(self, queue: str, consumer: str, key_concurrency: int | None) -> int:
        """Set how many messages of one key the workers of a consumer have at most: return 1, or 0 if it was
        set so. Calls `pgque.set_key_concurrency`.

        1 keeps the order of a key, None is no limit. Raises PgqueQueueNotFoundError,
        PgqueConsumerNotFoundError, PgqueBadArgumentError, and PgqueQueueInUseError if the consumer has no
        workers.
        """
        with self._unlimited():
            return await self._value(
                int,
                "select pgque.set_key_concurrency(%(queue)s::text, %(consumer)s::text, %(limit)s::int)",
                {"queue": queue, "consumer": consumer, "limit": key_concurrency},
            )

    async def unshare_consumer(self, queue: str, consumer: str) -> int:
        """Turn a pool of workers into a consumer that reads on its own: return 1, or 0 if it is one. Calls
        `pgque.unshare_consumer`.

        Its position and its pending retries stay. Messages that workers have leased are redelivered. Raises
        PgqueQueueNotFoundError, PgqueConsumerNotFoundError, and PgqueQueueInUseError if it has subconsumers
        or `key_concurrency`.
        """
        with self._unlimited():
            return await self._value(
                int,
                "select pgque.unshare_consumer(%(queue)s::text, %(consumer)s::text)",
                {"queue": queue, "consumer": consumer},
            )

    async def retry_now(self, queue: str, consumer: str) -> int:
        """Make every message of a consumer in state retry due now, and return their number. Calls
        `pgque.retry_now`. Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError."""
        with self._unlimited():
            return await self._value(
                int,
                "select pgque.retry_now(%(queue)s::text, %(consumer)s::text)",
                {"queue": queue, "consumer": consumer},
            )

    async def list_messages(
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
    ) -> list[QueuedMessage]:
        """Return messages of a queue that satisfy all filters, by id, at most `limit`. Calls
        `pgque.list_messages`.

        `since` and `until` filter by the time of sending; a datetime without time zone is local time.
        `matching` is a text in payload, headers or last error, in upper or lower case. To read page by page,
        pass `after_id=0`, and then the last id. A page can be longer than `limit`, since the rows of one
        message stay together. Raises PgqueQueueNotFoundError, PgqueBadArgumentError.
        """
        return await self._rows(
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

    async def get_message(self, queue: str, msg_id: int) -> list[QueuedMessage]:
        """Return one message, one row for each consumer that still has it. Calls `pgque.get_message`. Raises
        PgqueQueueNotFoundError, PgqueMessageNotFoundError."""
        return await self._rows(
            f"select {columns(QueuedMessage, 'm')}"
            " from pgque.get_message(%(queue)s::text, %(msg)s::bigint) as m",
            {"queue": queue, "msg": msg_id},
            QueuedMessage,
        )

    async def message_status(self, queue: str, msg_id: int) -> list[MessageStatus]:
        """Return the state of a message, one row for each consumer that still has it. Calls
        `pgque.message_status`. Raises PgqueMessageNotFoundError."""
        return await self._rows(
            f"select {columns(MessageStatus, 's')}"
            " from pgque.message_status(%(queue)s::text, %(msg)s::bigint) as s",
            {"queue": queue, "msg": msg_id},
            MessageStatus,
        )

    async def cancel(self, queue: str, msg_id: int, consumer: str | None = None) -> str:
        """Cancel a message, so that it is no longer delivered, and return the state in which it was found.
        Calls `pgque.cancel`.

        With `consumer`, only this consumer is concerned. If a worker has the message, its outcome does not
        count, and an async handler is cancelled when its lease is extended. The state is one of those in
        `QueuedMessage`, "cancelled" if it was cancelled before, or "done" if no consumer has it. Raises
        PgqueQueueNotFoundError, PgqueMessageNotFoundError, PgqueConsumerNotFoundError, and
        PgqueBadArgumentError if the message is delayed and a consumer is given.
        """
        with self._unlimited():
            return await self._value(
                str,
                "select pgque.cancel(%(queue)s::text, %(msg)s::bigint, %(consumer)s::text)",
                {"queue": queue, "msg": msg_id, "consumer": consumer},
            )

    async def purge(self, queue: str) -> int:
        """Remove all messages of a queue: pending, delayed, processing and retry. Calls `pgque.purge`.

        Dead letters and the archive stay. Returns how many messages the slowest consumer had ahead of it.
        Raises PgqueQueueNotFoundError.
        """
        with self._unlimited():
            return await self._value(int, "select pgque.purge(%(queue)s::text)", {"queue": queue})

    async def purge_key(self, queue: str, key: str) -> int:
        """Remove the pending message with a key and return 1, or 0 if there is none. Calls `pgque.purge_key`.
        Raises PgqueQueueNotFoundError."""
        return await self._value(
            int, "select pgque.purge_key(%(queue)s::text, %(key)s::text)", {"queue": queue, "key": key}
        )

    async def list_poison(self, queue: str, limit: int = 100) -> list[PoisonMessage]:
        """Return messages that were delivered more than once without an outcome, or were given up for that.
        Calls `pgque.list_poison`."""
        return await self._rows(
            f"select {columns(PoisonMessage, 'p')}"
            " from pgque.list_poison(%(queue)s::text, %(limit)s::int) as p",
            {"queue": queue, "limit": limit},
            PoisonMessage,
        )

    async def archive_poison(self, queue: str) -> int:
        """Move the dead letters that `list_poison` returns to the archive, and return their number. Calls
        `pgque.archive_poison`."""
        with self._unlimited():
            return await self._value(int, "select pgque.archive_poison(%(queue)s::text)", {"queue": queue})

    async def archive_list(
        self,
        queue: str,
        limit: int = 100,
        since: datetime | None = None,
        *,
        until: datetime | None = None,
        type: str | None = None,
        key: str | None = None,
        consumer: str | None = None,
        matching: str | None = None,
        before_id: int | None = None,
    ) -> list[ArchivedMessage]:
        """Return archived messages of a queue that satisfy all filters, the newest first, at most `limit`.
        Calls `pgque.archive_list`.

        `since` and `until` filter by the time of archiving; a datetime without time zone is local time.
        `matching` is a text in payload, headers or key, in upper or lower case. To read page by page, pass
        the last `archive_id` as `before_id`. Raises PgqueQueueNotFoundError.
        """
        return await self._rows(
            f"select {columns(ArchivedMessage, 'a')}"
            " from pgque.archive_list(%(queue)s::text, %(limit)s::int, %(since)s::timestamptz,"
            " %(until)s::timestamptz, %(type)s::text, %(key)s::text, %(consumer)s::text, %(matching)s::text,"
            " %(before_id)s::bigint) as a",
            {
                "queue": queue,
                "limit": limit,
                "since": encode.moment(since),
                "until": encode.moment(until),
                "type": type,
                "key": key,
                "consumer": consumer,
                "matching": matching,
                "before_id": before_id,
            },
            ArchivedMessage,
        )

    async def archive_replay(self, archive_id: int) -> int:
        """Send an archived message again and return the new id. Calls `pgque.archive_replay`. Raises
        PgqueMessageNotFoundError, PgqueQueueDisabledError."""
        return await self._value(
            int, "select pgque.archive_replay(%(archive)s::bigint)", {"archive": archive_id}
        )

    async def archive_purge(self, queue: str, before: datetime) -> int:
        """Delete the days (UTC) of the archive that ended before a time, and return their number. Calls
        `pgque.archive_purge`. A datetime without time zone is local time."""
        with self._unlimited():
            return await self._value(
                int,
                "select pgque.archive_purge(%(queue)s::text, %(before)s::timestamptz)",
                {"queue": queue, "before": encode.moment(before)},
            )

    # -- dead letters
    # --------------------------------------------------------------------------------------------------

    async def dlq_inspect(
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

        `reason` is a reason as here or as `dlq_reasons` returns it. `since` and `until` filter by the time
        when messages were given up; a datetime without time zone is local time. `matching` is a text in
        payload, headers or reason, in upper or lower case. To read page by page, pass the last `dl_id` as
        `before_id`. Raises PgqueQueueNotFoundError.
        """
        return await self._rows(
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

    async def dlq_reasons(self, queue: str) -> list[DeadReason]:
        """Return the reasons of a queue's dead letters with their counts, the most frequent first. Calls
        `pgque.dlq_reasons`. Raises PgqueQueueNotFoundError."""
        return await self._rows(
            f"select {columns(DeadReason, 'd')} from pgque.dlq_reasons(%(queue)s::text) as d",
            {"queue": queue},
            DeadReason,
        )

    async def dlq_delete(self, dl_id: int) -> int:
        """Delete a dead letter, also a held one, and return its message id. Calls `pgque.dlq_delete`. Raises
        PgqueNotDeadLetterError."""
        return await self._value(int, "select pgque.dlq_delete(%(dl)s::bigint)", {"dl": dl_id})

    async def dlq_requeue(self, dl_id: int) -> int:
        """Requeue a dead letter to the consumer that failed it, and return its message id. Calls
        `pgque.dlq_requeue`.

        Raises PgqueNotDeadLetterError, and PgqueConsumerNotFoundError if that consumer was unsubscribed.
        """
        return await self._value(int, "select pgque.dlq_requeue(%(dl)s::bigint)", {"dl": dl_id})

    async def dlq_requeue_all(self, queue: str, limit: int | None = None, reason: str | None = None) -> int:
        """Requeue the oldest dead letters to the consumers that failed them, at most `limit`, and return
        their number. Calls `pgque.dlq_requeue_all`.

        With `reason`, one that `dlq_reasons` returns, only dead letters with this reason. Raises
        PgqueQueueNotFoundError.
        """
        named, params = encode.arguments({"limit_count": ("int", limit), "reason": ("text", reason)})
        with self._unlimited():
            return await self._value(
                int, f"select pgque.dlq_requeue_all(%(queue)s::text{named})", {"queue": queue, **params}
            )

    async def dlq_replay(self, dl_id: int) -> int:
        """Send a dead letter to every consumer as a new message, and return the new id. Calls
        `pgque.dlq_replay`.

        Raises PgqueNotDeadLetterError, PgqueQueueDisabledError.
        """
        return await self._value(int, "select pgque.dlq_replay(%(dl)s::bigint)", {"dl": dl_id})

    async def dlq_replay_all(
        self, queue: str, limit: int | None = None, reason: str | None = None
    ) -> ReplayResult:
        """Send the oldest dead letters of a queue again, at most `limit` (None: all). Calls
        `pgque.dlq_replay_all`.

        Returns a ReplayResult: how many were sent, and how many stay because they failed. With `reason`, one
        that `dlq_reasons` returns, only dead letters with this reason. Raises PgqueQueueNotFoundError.
        """
        named, params = encode.arguments({"limit_count": ("int", limit), "reason": ("text", reason)})
        with self._unlimited():
            return await self._row(
                f"select {columns(ReplayResult, 'r')} from pgque.dlq_replay_all(%(queue)s::text{named}) as r",
                {"queue": queue, **params},
                ReplayResult,
            )

    async def dlq_purge(
        self, queue: str, older_than: Seconds = timedelta(days=30), reason: str | None = None
    ) -> int:
        """Delete dead letters that were given up more than `older_than` seconds ago, and return their number.
        Calls `pgque.dlq_purge`.

        Held ones stay. With `reason`, one that `dlq_reasons` returns, only dead letters with this reason.
        Raises PgqueQueueNotFoundError, PgqueBadArgumentError.
        """
        named, params = encode.arguments({"reason": ("text", reason)})
        with self._unlimited():
            return await self._value(
                int,
                f"select pgque.dlq_purge(%(queue)s::text, %(age)s::interval{named})",
                {"queue": queue, "age": encode.interval(older_than), **params},
            )

    # -- how a call is made
    # --------------------------------------------------------------------------------------------

    async def _ensure_version(self) -> None:
        if self._conn in _checked:
            return
        idle = self._conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        try:
            with self._limited():
                try:
                    await self._find_version()
                finally:
                    if idle and not self._conn.closed and not self._conn.autocommit:
                        await self._conn.rollback()  # nothing but the two look-ups was in it
        except psycopg.Error as error:
            raise from_psycopg(error) from error

    async def _find_version(self) -> None:
        """Check that the versions fit, and note whether the connection is direct."""
        found: str | None = None
        async with self._conn.cursor(row_factory=tuple_row) as cur:
            await cur.execute(encode.FIND_VERSION, prepare=False)
            callable_row = await cur.fetchone()
            if callable_row is not None and callable_row[0]:
                await cur.execute("select pgque.version()", prepare=False)
                version_row = await cur.fetchone()
                found = version_row[0] if version_row else None
        # A role that may not ask is told so by its first real call.
        if callable_row is None or callable_row[0]:
            encode.check_version(found, __version__)
        _checked[self._conn] = callable_row is not None and is_direct(self._conn, *callable_row[1:])

    async def _report(
        self,
        function: str,
        batch_id: int,
        msgs: Sequence[MessageOrId] | None,
        options: Mapping[str, tuple[str, object]] | None = None,
    ) -> list[Outcome]:
        call, params = statements.outcomes(function, batch_id, msgs, options)
        return await self._rows(f"select {statements.OUTCOME} from {call} as o", params, Outcome)

    def _unlimited(self) -> AbstractContextManager[None]:
        """Return a block whose calls may take any time, as their work grows with the queue."""
        return within(self._conn, None)

    def _limited(self) -> AbstractContextManager[None]:
        """Return a block whose calls may take `command_timeout`, unless it is in one that is unlimited."""
        return within_by_default(self._conn, self._command_timeout)

    async def _rows(self, sql: str, params: Mapping[str, object], make: Callable[..., T]) -> list[T]:
        """Run one statement and return each row as a `make`, with the columns as its arguments."""
        await self._ensure_version()
        try:
            async with reading(self._conn.cursor(row_factory=args_row(make))) as cur:
                with self._limited():
                    await cur.execute(sql, params, prepare=self._prepare())
                return await cur.fetchall()
        except (psycopg.Error, UnicodeEncodeError) as error:
            raise self._error(error, params) from error

    async def _row(self, sql: str, params: Mapping[str, object], make: type[T]) -> T:
        rows = await self._rows(sql, params, make)
        if not rows:
            raise PgqueError("the server answered with no row")
        return rows[0]

    async def _maybe(self, kind: type[T], sql: str, params: Mapping[str, object] = _NONE) -> T | None:
        row = await self._run(sql, params)
        value = row[0] if row else None
        if value is not None and not isinstance(value, kind):
            raise PgqueError(f"the server answered {value!r} where {kind.__name__} was expected")
        return value

    async def _value(self, kind: type[T], sql: str, params: Mapping[str, object] = _NONE) -> T:
        value = await self._maybe(kind, sql, params)
        if value is None:
            raise PgqueError("the server answered NULL where a value was expected")
        return value

    async def _run(self, sql: str, params: Mapping[str, object] = _NONE) -> tuple[object, ...] | None:
        """Run one statement and return its first row."""
        await self._ensure_version()
        try:
            async with reading(self._conn.cursor(row_factory=tuple_row)) as cur:
                with self._limited():
                    await cur.execute(sql, params, prepare=self._prepare())
                return await cur.fetchone()
        except (psycopg.Error, UnicodeEncodeError) as error:
            raise self._error(error, params) from error

    @property
    def _is_direct(self) -> bool:
        """Whether the connection is known to lead directly to the server."""
        return _checked.get(self._conn, False)

    def _prepare(self) -> bool | None:
        """Return whether psycopg prepares a statement: as the connection is set, where it is direct; else
        never, because behind a pooler the name of a prepared statement can be that of another client's."""
        return None if self._is_direct and prepare_threshold() is not None else False

    def _error(self, error: psycopg.Error | UnicodeEncodeError, params: Mapping[str, object]) -> PgqueError:
        queue = params.get("queue")
        name = queue if isinstance(queue, str) else None
        if isinstance(error, UnicodeEncodeError):
            return from_encoding(error, name)
        translated = from_psycopg(error, name)
        if self._owned and prepare_threshold() is None:
            self._conn.prepare_threshold = None
        return translated


def _pair(name: str, value: str | None) -> tuple[str, str | None]:
    return name, value


async def connect_async(
    dsn: str = "",
    *,
    autocommit: bool = False,
    encoder: Encoder | None = None,
    decoder: Decoder | None = None,
    command_timeout: float | None = COMMAND_TIMEOUT,
) -> AsyncPgqueClient:
    """Connect to a database that has pgque, and return a client.

    `dsn` is a connection string or URL, by default that of the variable PGQUE_DSN; the PG* variables fill in
    missing parts. As a context manager the client commits at the end of the block, rolls back after an
    exception, and closes. With `autocommit`, each call is a transaction of its own. For `encoder` and
    `decoder` see `AsyncPgqueClient`.

    The connection prepares statements that it repeats (psycopg's `prepare_threshold` is 5) only where it
    leads directly to the server: behind a pooler in transaction mode the name of a prepared statement can be
    that of another client's.

    A call that the server does not answer for `command_timeout` seconds raises PgqueConnectionError, and the
    connection is closed; None is no limit. The limit does not count for your own statements on `conn`, nor
    for calls that are long by nature: `maint`, `drop_queue`, `purge`, and those that move or delete all dead
    letters or archived messages of a queue.

    Raises PgqueConnectionError, and PgqueVersionError if the database has no pgque or an unknown version.
    """
    return await AsyncPgqueClient.connect(
        dsn, autocommit=autocommit, encoder=encoder, decoder=decoder, command_timeout=command_timeout
    )
