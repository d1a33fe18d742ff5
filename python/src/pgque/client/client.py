"""The client: every method is one call of one SQL function. Calls that few programs need are in its groups.

`twins/client.py` is generated from `client/client.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, overload

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool

from ..codec import encode
from ..codec.encode import MessageOrId
from ..codec.json import Encoder
from ..codec.payloads import Decoder, check_functions, message_maker
from ..errors import from_psycopg, prepare_threshold
from ..integrations import opentelemetry as otel
from ..types import (
    Event,
    Message,
    Outcome,
    Payload,
    Seconds,
    SendResult,
    columns,
)
from . import statements
from .admin import AsyncAdmin
from .archived import AsyncArchived
from .calling import AsyncCalling
from .consumers import AsyncConsumers
from .direct import Session
from .dlq import AsyncDlq
from .dsn import with_keepalives
from .flat import AsyncFlat
from .limit import COMMAND_TIMEOUT, AsyncLimitedConnection, check_command_timeout
from .messages import AsyncMessages
from .monitor import AsyncMonitor
from .pgq import AsyncPgq
from .recurring import AsyncRecurring

_MESSAGE = columns(Message, "m")


class AsyncPgqueClient(AsyncCalling, AsyncFlat):
    """Call the functions of pgque over one psycopg connection.

    `connect_async` and `from_pool` make a client. `AsyncPgqueClient(conn)` uses a connection of yours: it
    neither commits nor closes it, and all calls belong to your transaction. The first call checks the version
    of the SQL side.

    Further methods are in groups, such as `client.dlq.requeue`: `admin`, `archived`, `consumers`, `dlq`,
    `messages`, `monitor`, `pgq`, `recurring`.

    A method that fails raises a subclass of `PgqueError`, chosen by SQLSTATE. Lengths of time are seconds
    (int, float) or a timedelta.

    Args:
        conn: the connection.
        encoder: takes a value of a type that cannot be sent without it, and returns the value to send; text
            and bytes are a whole payload. It raises TypeError for a type that it does not know.
        decoder: takes a message, and returns its `value`. Its errors become a PgquePayloadError, except for
            `pgque.Retry` and the other outcomes.

    Without an encoder, a payload is text, bytes, None, or a value that becomes JSON:

    - dict (its keys become text), list, numbers; tuples and sets as lists, a set in any order
    - dataclasses, pydantic models by alias, msgspec Structs
    - times and durations in ISO 8601; Decimal, UUID and Path as text; an Enum as its value

    NaN and infinity are a ValueError. Other types are a TypeError that names the place, for example
    `payload.items[3].when`. Sending needs neither pydantic nor msgspec.
    """

    def __init__(
        self,
        conn: AsyncConnection[object],
        *,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        check_functions(encoder=encoder, decoder=decoder)
        self._conn = conn
        self._owned = False
        self._session: Session | None = None  # of the server, if this connection has it alone
        self._command_timeout: float | None = None
        self._encoder = encoder
        self._make_message: Callable[..., Message] = message_maker(Message, decoder)

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
        check_functions(encoder=encoder, decoder=decoder)
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

    @property
    def dlq(self) -> AsyncDlq:
        """Dead letters of queues, and messages that end workers."""
        return AsyncDlq(self)

    @property
    def archived(self) -> AsyncArchived:
        """Archived messages."""
        return AsyncArchived(self)

    @property
    def recurring(self) -> AsyncRecurring:
        """Recurring messages, which the ticker sends at their times."""
        return AsyncRecurring(self)

    @property
    def messages(self) -> AsyncMessages:
        """Messages of queues, in any state."""
        return AsyncMessages(self)

    @property
    def consumers(self) -> AsyncConsumers:
        """Consumers of queues, and their workers."""
        return AsyncConsumers(self)

    @property
    def monitor(self) -> AsyncMonitor:
        """State and figures of the installation."""
        return AsyncMonitor(self)

    @property
    def admin(self) -> AsyncAdmin:
        """Queues with their settings and rights, and the installation."""
        return AsyncAdmin(self)

    @property
    def pgq(self) -> AsyncPgq:
        """PgQ's calls for whole windows of ticks."""
        return AsyncPgq(self)

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
