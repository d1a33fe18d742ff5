"""The client: every method is one call of one SQL function.

`client.py` is generated from `client_async.py` by `tools/make_sync.py`; edit the async file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import TypeVar, overload
from weakref import WeakSet

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import args_row, tuple_row
from psycopg_pool import AsyncConnectionPool

from . import _encode
from ._encode import MessageOrId
from ._version import __version__
from .errors import PgqueError, from_psycopg
from .types import (
    BatchEvent,
    BatchInfo,
    ConsumerInfo,
    DeadLetter,
    Event,
    HealthCheck,
    Message,
    Metric,
    Outcome,
    Payload,
    QueueInfo,
    ReplayResult,
    Seconds,
    SendResult,
    Setting,
    StatusRow,
    columns,
)

T = TypeVar("T")

_NONE: Mapping[str, object] = {}

_MESSAGE = columns(Message, "m")
_EVENT = (
    "e.ev_id, e.ev_time, e.ev_txid::text::bigint, e.ev_retry, e.ev_type, e.ev_data, "
    "e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4"
)

# Connections whose pgque version was found good, so that each is asked once.
_checked: WeakSet[AsyncConnection[object]] = WeakSet()


class AsyncPgqueClient:
    """Call the functions of pgque over one psycopg connection.

    Made by `connect_async`, by `from_pool`, or around a connection of yours: `AsyncPgqueClient(conn)`.
    Around your connection it neither commits nor closes; all calls belong to your transaction. The version
    of the SQL side is checked before the first call.

    Every method raises a `PgqueError`: the subclass tells what went wrong, and is chosen by SQLSTATE.
    """

    def __init__(self, conn: AsyncConnection[object]) -> None:
        self._conn = conn
        self._owned = False

    @classmethod
    async def connect(cls, dsn: str = "", *, autocommit: bool = False) -> AsyncPgqueClient:
        """Open a connection of its own; see `connect_async`."""
        try:
            conn = await AsyncConnection.connect(dsn, autocommit=autocommit, row_factory=tuple_row)
        except psycopg.Error as error:
            raise from_psycopg(error) from error
        client = cls(conn)
        client._owned = True
        try:
            await client._ensure_version()
        except BaseException:
            await conn.close()
            raise
        return client

    @classmethod
    @asynccontextmanager
    async def from_pool(
        cls, pool: AsyncConnectionPool[AsyncConnection[T]]
    ) -> AsyncIterator[AsyncPgqueClient]:
        """Borrow a connection from a psycopg_pool pool for the length of a `with` block.

        As always with such a pool, the block is one transaction: committed at its end, rolled back by an
        exception.
        """
        async with pool.connection() as conn:
            yield cls(conn)

    @property
    def conn(self) -> AsyncConnection[object]:
        """Return the psycopg connection, for your own statements, `commit()`, `rollback()` and
        `transaction()`."""
        return self._conn

    async def close(self) -> None:
        """Close the connection if the client opened it; work that was not committed is rolled back."""
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
    ) -> int:
        """Send one message and return its id. Calls `pgque.send`.

        str goes as text, byte for byte; bytes as bytes, which arrive in `payload_bytes`; dict, list, numbers
        and booleans as JSON; None as NULL. `headers` travel with the message as a JSON object. An `Event`
        brings its own type. Raises PgqueQueueNotFound.
        """
        if isinstance(payload, Event):
            type = payload.type
            payload = payload.payload
        arguments, sql = _encode.send_arguments(payload, headers)
        return await self._value(
            int,
            f"select pgque.send(%(queue)s::text, %(type)s::text, {sql})",
            {"queue": queue, "type": type, **arguments},
        )

    async def send_batch(self, queue: str, type: str, payloads: Iterable[Payload]) -> list[int]:
        """Send many messages of one type, all or none, and return their ids in input order. Calls
        `pgque.send_batch`."""
        values, cast = _encode.payloads_and_cast(payloads)
        return await self._value(
            list,
            f"select pgque.send_batch(%(queue)s::text, %(type)s::text, %(payloads)s::{cast})",
            {"queue": queue, "type": type, "payloads": values},
        )

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
        """Send unless a message with this key was sent within `ttl` seconds. Calls `pgque.send_idem`."""
        value, cast = _encode.payload_and_cast(payload)
        return await self._row(
            "select r.event_id, r.deduped"
            f" from pgque.send_idem(%(queue)s::text, %(type)s::text, %(payload)s::{cast},"
            " %(key)s::text, %(ttl)s::interval, %(partition)s::text) as r",
            {
                "queue": queue,
                "type": type,
                "payload": value,
                "key": idem_key,
                "ttl": _encode.interval(ttl),
                "partition": partition_key,
            },
            SendResult,
        )

    # -- consume -----------------------------------------------------------------------------------

    async def subscribe(self, queue: str, consumer: str, start_at: str | int | datetime | None = None) -> int:
        """Subscribe a consumer and return 1, or 0 when it was subscribed already. Calls `pgque.subscribe`.

        Without `start_at` it sees what is sent from now on. `start_at` is "latest", "earliest", a tick id
        or a time.
        """
        if start_at is None:
            sql = "select pgque.subscribe(%(queue)s::text, %(consumer)s::text)"
        else:
            sql = "select pgque.subscribe(%(queue)s::text, %(consumer)s::text, %(start_at)s::text)"
        start = None if start_at is None else _encode.start_text(start_at)
        return await self._value(int, sql, {"queue": queue, "consumer": consumer, "start_at": start})

    async def unsubscribe(self, queue: str, consumer: str) -> int:
        """Take a consumer off a queue and return how many were removed. Calls `pgque.unsubscribe`."""
        return await self._value(
            int,
            "select pgque.unsubscribe(%(queue)s::text, %(consumer)s::text)",
            {"queue": queue, "consumer": consumer},
        )

    async def receive(self, queue: str, consumer: str, max_messages: int = 100) -> list[Message]:
        """Return the next batch, at most `max_messages` long, or [] when there is none. Calls
        `pgque.receive`.

        A batch that was not acked comes again, with the same id. Raises PgqueQueueNotFound,
        PgqueConsumerNotFound.
        """
        return await self._rows(
            f"select {_MESSAGE} from pgque.receive(%(queue)s::text, %(consumer)s::text, %(max)s::int) as m",
            {"queue": queue, "consumer": consumer, "max": max_messages},
            Message,
        )

    async def ack(self, batch_id: int) -> int:
        """Finish a batch: 1, or 0 when it was not open. Calls `pgque.ack`."""
        return await self._value(int, "select pgque.ack(%(batch)s::bigint)", {"batch": batch_id})

    async def finish_batch(self, batch_id: int) -> int:
        """Finish a batch: 1, or 0 when it was not open. Calls `pgque.finish_batch`, the same under PgQ's
        name."""
        return await self._value(int, "select pgque.finish_batch(%(batch)s::bigint)", {"batch": batch_id})

    @overload
    async def nack(
        self, batch_id: int, msg: MessageOrId, retry_after: Seconds = 60, reason: str | None = None
    ) -> int: ...

    @overload
    async def nack(
        self, batch_id: int, msg: Sequence[MessageOrId], retry_after: Seconds = 60, reason: str | None = None
    ) -> list[Outcome]: ...

    async def nack(
        self,
        batch_id: int,
        msg: MessageOrId | Sequence[MessageOrId],
        retry_after: Seconds = 60,
        reason: str | None = None,
    ) -> int | list[Outcome]:
        """Give messages of an open batch back, to come again after `retry_after` seconds. Calls
        `pgque.nack`.

        A message whose retries are used up becomes a dead letter, with `reason`. One message (or its id)
        gives 1 and raises PgqueMessageNotInBatch when it is not in the batch; a sequence is settled in one
        go and gives an Outcome each. The batch still has to be acked. Raises PgqueBatchNotFound.
        """
        params: dict[str, object] = {
            "batch": batch_id,
            "after": _encode.interval(retry_after),
            "reason": reason,
        }
        if isinstance(msg, (Message, int)):
            params["msg"] = _encode.message_id(msg)
            return await self._value(
                int,
                "select pgque.nack(%(batch)s::bigint,"
                " jsonb_populate_record(null::pgque.message, jsonb_build_object('msg_id', %(msg)s::bigint)),"
                " %(after)s::interval, %(reason)s::text)",
                params,
            )
        params["msgs"] = _encode.message_ids(msg)
        return await self._rows(
            "select o.msg_id, o.ok, o.reason"
            " from pgque.nack(%(batch)s::bigint, %(msgs)s::bigint[],"
            " %(after)s::interval, %(reason)s::text) as o",
            params,
            Outcome,
        )

    async def peek(self, queue: str, n: int = 10) -> list[Message]:
        """Return up to `n` messages of a queue without taking them. Calls `pgque.peek`."""
        return await self._rows(
            f"select {_MESSAGE} from pgque.peek(%(queue)s::text, %(n)s::int) as m",
            {"queue": queue, "n": n},
            Message,
        )

    async def next_batch(self, queue: str, consumer: str) -> int | None:
        """Open the next whole window as a batch and return its id, or None. Calls `pgque.next_batch`."""
        return await self._maybe(
            int,
            "select pgque.next_batch(%(queue)s::text, %(consumer)s::text)",
            {"queue": queue, "consumer": consumer},
        )

    async def get_batch_events(self, batch_id: int) -> list[BatchEvent]:
        """Return the events of an open batch in id order. Calls `pgque.get_batch_events`."""
        return await self._rows(
            f"select {_EVENT} from pgque.get_batch_events(%(batch)s::bigint) as e",
            {"batch": batch_id},
            BatchEvent,
        )

    async def get_batch_info(self, batch_id: int) -> BatchInfo:
        """Return the window that an open batch was cut from. Calls `pgque.get_batch_info`. Raises
        PgqueBatchNotFound."""
        return await self._row(
            f"select {columns(BatchInfo, 'b')} from pgque.get_batch_info(%(batch)s::bigint) as b",
            {"batch": batch_id},
            BatchInfo,
        )

    async def event_retry(self, batch_id: int, event_id: int, retry_after: int | datetime) -> int:
        """Put an event of a batch aside until a time or for some seconds: 1, or 0 when it was. Calls
        `pgque.event_retry`."""
        cast = "timestamptz" if isinstance(retry_after, datetime) else "int"
        return await self._value(
            int,
            f"select pgque.event_retry(%(batch)s::bigint, %(event)s::bigint, %(after)s::{cast})",
            {"batch": batch_id, "event": event_id, "after": retry_after},
        )

    async def batch_retry(self, batch_id: int, retry_seconds: int) -> int:
        """Put all events of a batch aside for some seconds and return their count. Calls
        `pgque.batch_retry`."""
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
        """Add a worker to a consumer: 1, or 0 when it was there. Calls `pgque.subscribe_subconsumer`."""
        return await self._value(
            int,
            "select pgque.subscribe_subconsumer(%(queue)s::text, %(consumer)s::text,"
            " %(worker)s::text, %(convert)s::bool)",
            {"queue": queue, "consumer": consumer, "worker": subconsumer, "convert": convert_normal},
        )

    async def unsubscribe_subconsumer(
        self, queue: str, consumer: str, subconsumer: str, batch_handling: int = 0
    ) -> int:
        """Take a worker off a consumer. Calls `pgque.unsubscribe_subconsumer`.

        `batch_handling` 1 sends the messages of its open batch through retry; 0 refuses while a batch is
        open.
        """
        return await self._value(
            int,
            "select pgque.unsubscribe_subconsumer(%(queue)s::text, %(consumer)s::text,"
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
    ) -> list[Message]:
        """Return the next batch for one worker of a consumer, adding the worker on first use. Calls
        `pgque.receive_coop`.

        Each worker holds at most one batch. With `dead_interval`, in seconds, a batch may be taken from a
        worker that was not heard of for so long.
        """
        return await self._rows(
            f"select {_MESSAGE} from pgque.receive_coop(%(queue)s::text, %(consumer)s::text,"
            " %(worker)s::text, %(max)s::int, %(dead)s::interval) as m",
            {
                "queue": queue,
                "consumer": consumer,
                "worker": subconsumer,
                "max": max_messages,
                "dead": _encode.interval(dead_interval),
            },
            Message,
        )

    async def touch_subconsumer(self, queue: str, consumer: str, subconsumer: str) -> int:
        """Say that a worker is alive, and return the number of workers touched. Calls
        `pgque.touch_subconsumer`."""
        return await self._value(
            int,
            "select pgque.touch_subconsumer(%(queue)s::text, %(consumer)s::text, %(worker)s::text)",
            {"queue": queue, "consumer": consumer, "worker": subconsumer},
        )

    # -- operate -----------------------------------------------------------------------------------

    async def create_queue(self, queue: str, config: Mapping[str, Setting] | None = None) -> int:
        """Create a queue: 1, or 0 when there is one of this name. Calls `pgque.create_queue`.

        Raises PgqueInvalidName, PgqueBadArgument for an unknown setting or one out of range.
        """
        if config is None:
            return await self._value(int, "select pgque.create_queue(%(queue)s::text)", {"queue": queue})
        return await self._value(
            int,
            "select pgque.create_queue(%(queue)s::text, %(config)s::jsonb)",
            {"queue": queue, "config": _encode.config_json(config)},
        )

    async def alter_queue(self, queue: str, config: Mapping[str, Setting]) -> None:
        """Change settings of a queue; None returns one to its default. Calls `pgque.alter_queue`."""
        await self._run(
            "select pgque.alter_queue(%(queue)s::text, %(config)s::jsonb)",
            {"queue": queue, "config": _encode.config_json(config)},
        )

    async def set_queue_config(self, queue: str, param: str, value: Setting) -> None:
        """Change one setting of a queue; None returns it to its default. Calls `pgque.set_queue_config`."""
        await self._run(
            "select pgque.set_queue_config(%(queue)s::text, %(param)s::text, %(value)s::text)",
            {"queue": queue, "param": param, "value": _encode.setting_text(value)},
        )

    async def queue_config(self, queue: str) -> dict[str, str | None]:
        """Return the settings in force for a queue, as text. Calls `pgque.queue_config`."""
        pairs = await self._rows(
            "select s.param_name, s.param_value from pgque.queue_config(%(queue)s::text) as s",
            {"queue": queue},
            _pair,
        )
        return dict(pairs)

    async def drop_queue(self, queue: str, force: bool = False) -> int:
        """Drop a queue; `force` also drops its subscriptions. Calls `pgque.drop_queue`. Raises
        PgqueQueueInUse."""
        return await self._value(
            int,
            "select pgque.drop_queue(%(queue)s::text, %(force)s::bool)",
            {"queue": queue, "force": force},
        )

    async def pause(self, queue: str) -> None:
        """Close a queue for senders, who get PgqueQueueDisabled; consumers go on. Calls `pgque.pause`."""
        await self._run("select pgque.pause(%(queue)s::text)", {"queue": queue})

    async def resume(self, queue: str) -> None:
        """Open a paused queue for senders again. Calls `pgque.resume`."""
        await self._run("select pgque.resume(%(queue)s::text)", {"queue": queue})

    async def ticker(self, queue: str) -> int | None:
        """Tick one queue if there is a reason to, and return the tick id or None. Calls `pgque.ticker`."""
        return await self._maybe(int, "select pgque.ticker(%(queue)s::text)", {"queue": queue})

    async def ticker_all(self) -> int:
        """Tick all queues that have a reason, and return the number of ticks. Calls `pgque.ticker`."""
        return await self._value(int, "select pgque.ticker()")

    async def force_next_tick(self, queue: str) -> int | None:
        """Make the next `ticker` call tick this queue, whatever the settings. Calls
        `pgque.force_next_tick`."""
        return await self._maybe(int, "select pgque.force_next_tick(%(queue)s::text)", {"queue": queue})

    async def maint(self) -> None:
        """Do all maintenance that is due: retries, rotation, retention. Calls `pgque.maint`."""
        await self._run("select pgque.maint()")

    async def start(self) -> None:
        """Schedule the ticker with pg_cron. Calls `pgque.start`. Raises PgqueNoScheduler where there is
        none."""
        await self._run("select pgque.start()")

    async def stop(self) -> None:
        """Take the ticker off pg_cron's schedule. Calls `pgque.stop`."""
        await self._run("select pgque.stop()")

    async def status(self) -> list[StatusRow]:
        """Return the state of the parts of the installation. Calls `pgque.status`."""
        return await self._rows(
            f"select {columns(StatusRow, 's')} from pgque.status() as s", _NONE, StatusRow
        )

    async def metrics(self) -> list[Metric]:
        """Return one row a figure. Calls `pgque.metrics`."""
        return await self._rows(f"select {columns(Metric, 'm')} from pgque.metrics() as m", _NONE, Metric)

    async def health(self) -> list[HealthCheck]:
        """Return one row a check: ok, warn or fail, and what to do. Calls `pgque.health`."""
        return await self._rows(
            f"select {columns(HealthCheck, 'h')} from pgque.health() as h", _NONE, HealthCheck
        )

    async def version(self) -> str:
        """Return the version of the SQL side. Calls `pgque.version`."""
        return await self._value(str, "select pgque.version()")

    async def queue_info(self, queue: str | None = None) -> list[QueueInfo]:
        """Return settings and load of one queue or of all. Calls `pgque.get_queue_info`."""
        call = "pgque.get_queue_info()" if queue is None else "pgque.get_queue_info(%(queue)s::text)"
        return await self._rows(
            f"select {columns(QueueInfo, 'i')} from {call} as i", {"queue": queue}, QueueInfo
        )

    async def consumer_info(
        self, queue: str | None = None, consumer: str | None = None
    ) -> list[ConsumerInfo]:
        """Return where consumers stand: all, those of a queue, or one. Calls `pgque.get_consumer_info`."""
        arguments = ["%(queue)s::text"] if queue is not None else []
        if consumer is not None:
            if queue is None:
                raise TypeError("a consumer is looked up in a queue: give both")
            arguments.append("%(consumer)s::text")
        return await self._rows(
            f"select {columns(ConsumerInfo, 'i')} from pgque.get_consumer_info({', '.join(arguments)}) as i",
            {"queue": queue, "consumer": consumer},
            ConsumerInfo,
        )

    # -- dead letters
    # --------------------------------------------------------------------------------------------------

    async def dlq_inspect(self, queue: str, limit: int = 100) -> list[DeadLetter]:
        """Return dead letters of a queue. Calls `pgque.dlq_inspect`."""
        return await self._rows(
            f"select {columns(DeadLetter, 'd')} from pgque.dlq_inspect(%(queue)s::text, %(limit)s::int) as d",
            {"queue": queue, "limit": limit},
            DeadLetter,
        )

    async def dlq_requeue(self, dl_id: int) -> int:
        """Give a dead letter back to the consumer that failed it and return its message id. Calls
        `pgque.dlq_requeue`.

        Raises PgqueNotDeadLetter.
        """
        return await self._value(int, "select pgque.dlq_requeue(%(dl)s::bigint)", {"dl": dl_id})

    async def dlq_requeue_all(self, queue: str, limit: int | None = None) -> int:
        """Give dead letters back to the consumers that failed them, at most `limit`, and return their count.

        Calls `pgque.dlq_requeue_all`.
        """
        return await self._value(
            int,
            "select pgque.dlq_requeue_all(%(queue)s::text, %(limit)s::int)",
            {"queue": queue, "limit": limit},
        )

    async def dlq_replay(self, dl_id: int) -> int:
        """Send a dead letter again, to every consumer, and return the new id. Calls `pgque.dlq_replay`.

        Raises PgqueNotDeadLetter.
        """
        return await self._value(int, "select pgque.dlq_replay(%(dl)s::bigint)", {"dl": dl_id})

    async def dlq_replay_all(self, queue: str) -> ReplayResult:
        """Send all dead letters of a queue again. Calls `pgque.dlq_replay_all`."""
        return await self._row(
            f"select {columns(ReplayResult, 'r')} from pgque.dlq_replay_all(%(queue)s::text) as r",
            {"queue": queue},
            ReplayResult,
        )

    async def dlq_purge(self, queue: str, older_than: Seconds = timedelta(days=30)) -> int:
        """Delete dead letters older than so many seconds and return their count. Calls
        `pgque.dlq_purge`."""
        return await self._value(
            int,
            "select pgque.dlq_purge(%(queue)s::text, %(age)s::interval)",
            {"queue": queue, "age": _encode.interval(older_than)},
        )

    # -- how a call is made
    # --------------------------------------------------------------------------------------------

    async def _ensure_version(self) -> None:
        if self._conn in _checked:
            return
        idle = self._conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        try:
            found: str | None = None
            async with self._conn.cursor(row_factory=tuple_row) as cur:
                await cur.execute(_encode.FIND_VERSION)
                callable_row = await cur.fetchone()
                if callable_row is not None and callable_row[0]:
                    await cur.execute("select pgque.version()")
                    version_row = await cur.fetchone()
                    found = version_row[0] if version_row else None
            # A role that may not ask is told so by its first real call.
            if callable_row is None or callable_row[0]:
                _encode.check_version(found, __version__)
            _checked.add(self._conn)
        except psycopg.Error as error:
            raise from_psycopg(error) from error
        finally:
            if idle and not self._conn.closed and not self._conn.autocommit:
                await self._conn.rollback()  # nothing but the two look-ups was in it

    async def _rows(self, sql: str, params: Mapping[str, object], make: Callable[..., T]) -> list[T]:
        """Run one statement and return each row as a `make`, with the columns as its arguments."""
        await self._ensure_version()
        try:
            async with self._conn.cursor(row_factory=args_row(make)) as cur:
                await cur.execute(sql, params)
                return await cur.fetchall()
        except psycopg.Error as error:
            raise _translated(error, params) from error

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
            async with self._conn.cursor(row_factory=tuple_row) as cur:
                await cur.execute(sql, params)
                return await cur.fetchone()
        except psycopg.Error as error:
            raise _translated(error, params) from error


def _pair(name: str, value: str | None) -> tuple[str, str | None]:
    return name, value


def _translated(error: psycopg.Error, params: Mapping[str, object]) -> PgqueError:
    queue = params.get("queue")
    return from_psycopg(error, queue if isinstance(queue, str) else None)


async def connect_async(dsn: str = "", *, autocommit: bool = False) -> AsyncPgqueClient:
    """Connect to a database with pgque in it.

    `dsn` is a connection string or URL; what it leaves out comes from the PG* environment variables. As a
    context manager the client commits at the end of the block, rolls back after an exception, and closes.
    With `autocommit` each call is a transaction of its own.

    Raises PgqueConnectionError, and PgqueVersionError when the database has no pgque or an unknown version.
    """
    return await AsyncPgqueClient.connect(dsn, autocommit=autocommit)
