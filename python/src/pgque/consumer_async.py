"""The consumer: receive, hand each message to its handler, settle the batch, again and again.

`consumer.py` is generated from `consumer_async.py` by `tools/make_sync.py`; edit the async file.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.pq import TransactionStatus

from ._encode import watchful
from ._hands import Unmatched, check_async_handler, check_some, check_type
from ._retry import FIRST_PAUSE, pauses
from ._stopper import GRACE, AsyncStopper, HandlerInterrupted
from ._work import QueueSettings, check_min_interval, due_after, seconds
from .client_async import AsyncPgqueClient
from .errors import (
    PgqueBadArgument,
    PgqueBatchNotFound,
    PgqueConnectionError,
    PgqueError,
    PgqueQueueInUse,
    described,
    from_psycopg,
    is_permanent,
    of_pooler,
    one_line,
)
from .outcomes import retry_interval
from .types import Message, QueueInfo, Seconds

AsyncHandler: TypeAlias = Callable[[Message], Awaitable[object]]
AsyncTransactionalHandler: TypeAlias = Callable[[Message, AsyncConnection[object]], Awaitable[object]]
H = TypeVar("H", bound=AsyncHandler | AsyncTransactionalHandler)

log = logging.getLogger("pgque.consumer")

# Longest pauses between attempts to reach the database, in seconds; the second after a stop.
_LONGEST_PAUSE = 15.0
_LONGEST_AFTER_STOP = 1.0

# Seconds after a stop in which the server has to answer that a batch is finished or handed back.
_ANSWER = GRACE + 1.0

# Seconds without messages after which, and how often, a consumer checks whether messages wait for a tick.
TICK_CHECK = 10.0

# Seconds beyond the queue's ticker_max_lag after which a tick is missing.
_TICK_MISSING = 5.0

# Constraints that are declared as initially deferred: a new transaction defers these and no others.
_DEFERRED = """
select string_agg(format('%%I.%%I', c.nspname, c.conname), ', ')
from (
  select n.nspname, c.conname
  from pg_catalog.pg_constraint as c
  join pg_catalog.pg_namespace as n on n.oid = c.connamespace
  where not pg_catalog.pg_is_other_temp_schema(n.oid) and pg_catalog.has_schema_privilege(n.oid, 'usage')
  group by n.nspname, c.conname
  -- A name is of all tables of a schema that have it: deferring one that cannot be is an error.
  having bool_or(c.condeferred) and bool_and(c.condeferrable)
) as c
"""

_FAILED = (
    "the handler caught an error of the database, which left its transaction failed: let the error out, or do"
    " what may fail in a savepoint, which conn.transaction() makes"
)


_REMEDY = (
    "Start a pgque.Worker for this consumer, or give the Consumer another: client.subscribe(queue, name)."
    " To take it from its workers, unsubscribe and subscribe it again; its pending retries are lost."
)


class _BatchLost(Exception):
    """Say that a batch is no longer ours, and undo its transaction."""


@dataclass(frozen=True, slots=True)
class _Handled:
    """A batch whose handlers have run: the ids of messages that failed, by reason."""

    batch_id: int
    failed: dict[str, list[int]]
    is_whole: bool = True  # otherwise the rest of the batch is delivered again


class AsyncConsumer:
    """Feed the messages of a queue to handlers.

        consumer = AsyncConsumer(dsn, queue="orders", name="billing")

        @consumer.on("order.created")
        async def bill(message): ...

        await consumer.start()

    Usually no transaction is open while a handler runs, and a message whose batch was interrupted comes
    again: handlers have to bear that. With `transactional=True` a handler is called with the message and
    the connection, and what it writes through that connection is committed together with the ack: exactly
    once.

    A handler that raises gets its message back after `retry_after` seconds, with the text of the error as
    the reason; when the queue's `max_retries` are used up it becomes a dead letter. The other messages of
    the batch are not affected.

    Args:
        dsn: connection string or URL; PG* environment variables fill in what is missing.
        queue: name or `queue_uid` of the queue. The consumer must be subscribed to it, but for one with
            subconsumers.
        name: name of the consumer.
        poll_interval: seconds between looks at the queue when no notification comes.
        max_messages: most messages in one batch.
        min_interval: least seconds from the receive of one batch to the next receive, up to a day: larger
            batches, more latency. A full batch is followed at once. The batch is settled before the pause.
        retry_after: seconds until a failed message comes again.
        unknown_handler_policy: what to do with a type that has no handler, "nack" or "ack".
        subconsumer: name of this worker when several share the consumer. That must not be subscribed to
            read on its own: it is made with its first subconsumer, or `subscribe_subconsumer` with
            `convert_normal` turns it.
        dead_interval: seconds of silence after which the batch of another worker may be taken over.
        transactional: whether handlers share a transaction with the ack.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        queue: str,
        name: str,
        poll_interval: float = 30,
        max_messages: int = 100,
        min_interval: float = 0,
        retry_after: Seconds = 60,
        unknown_handler_policy: Literal["nack", "ack"] = "nack",
        subconsumer: str | None = None,
        dead_interval: Seconds | None = None,
        transactional: bool = False,
    ) -> None:
        if unknown_handler_policy not in ("nack", "ack"):
            raise ValueError(
                f"unknown_handler_policy must be 'nack' or 'ack', not {unknown_handler_policy!r}"
            )
        if poll_interval <= 0:
            raise ValueError("poll_interval must be more than 0 seconds")
        if max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        check_min_interval(min_interval)
        retry_interval(retry_after, "retry_after")
        self.dsn = dsn
        self.queue = queue
        self.name = name
        self.poll_interval = poll_interval
        self.max_messages = max_messages
        self.min_interval = min_interval
        self.retry_after = retry_after
        self.unknown_handler_policy = unknown_handler_policy
        self.subconsumer = subconsumer
        self.dead_interval = dead_interval
        self.transactional = transactional
        self._handlers: dict[str, AsyncHandler | AsyncTransactionalHandler] = {}
        self._stopper = AsyncStopper()
        self._notified = False
        self._touched_at = 0.0
        self._due_at = 0.0  # the earliest time of the next receive, by the monotonic clock
        self._unmatched = Unmatched(log, name, self._handlers)
        # What the server has to be told about the last batch; it survives a lost connection.
        self._handled: _Handled | None = None
        self._settings = QueueSettings(queue)

    def on(self, type: str) -> Callable[[H], H]:
        """Register the decorated function as the handler of a message type; "*" takes all types without
        one. Raises TypeError for what cannot be a handler."""
        check_type(type, "@consumer.on")

        def register(handler: H) -> H:
            check_async_handler(handler, "Consumer")
            self._handlers[type] = handler
            return handler

        return register

    async def start(self) -> None:
        """Consume until `stop()`, SIGTERM or SIGINT.

        The signals are caught in the main thread only, for all that run there, and their handlers put back
        when the last of them ends; a handler that the program gave to its event loop is called as well. A
        batch in hand is finished if that takes less than half a second, otherwise it is handed back whole; a
        handler that runs longer is interrupted.

        After a fault of the database the consumer connects again, after a growing random pause, for as long
        as it takes; the outcomes of a batch whose handlers have run are kept until then. Raises a PgqueError
        where trying again cannot help: PgqueVersionError, PgqueQueueNotFound, PgqueConsumerNotFound, a
        missing right; PgqueBadArgument without a handler, unless `unknown_handler_policy` is "ack", or where
        the consumer has workers; PgqueQueueInUse where a consumer that reads on its own, or has workers, is
        given a subconsumer.
        """
        check_some(self._handlers, self.unknown_handler_policy, "@consumer.on")
        async with self._stopper.running():
            try:
                await keep_connected(self._stopper, lambda: self._stopper.call(self._session), self._is_done)
            except HandlerInterrupted:
                log.warning("stopped in the middle of a batch, which comes again")
            except PgqueError as error:
                log.error("consumer %s of queue %s ends: %s", self.name, self.queue, one_line(error))
                raise

    def stop(self) -> None:
        """Make `start` return soon, for good; callable from any thread.

        The batch in hand is finished if that takes less than half a second, otherwise it is handed back
        whole, after the handler that is running has returned.
        """
        self._stopper.set()

    def _is_done(self) -> bool:
        return self._stopper.is_set() and (self._handled is None or self._stopper.out_of_time())

    async def _session(self) -> None:
        """Consume over one connection.

        A fault before the first batch is settled, or the queue found empty, is raised; a later one ends
        the session, so that the pauses start small again.
        """
        worked = False
        try:
            async with await AsyncPgqueClient.connect(self._conninfo(), autocommit=True) as client:
                client.conn.add_notify_handler(self._on_notify)
                self._settings = await listen(client, self.queue)
                watch = TickWatch(self.queue, log)
                while not self._stopper.is_set():
                    pause = self._due_at - time.monotonic()
                    if pause > 0:
                        with self._stopper.breaking(client.conn, _ANSWER):
                            await self._settle(client)
                        await self._stopper.wait(client.conn, pause)
                        continue
                    self._notified = False
                    received_at = time.monotonic()
                    batch = await self._receive(client)
                    if batch:
                        watch.reset()
                        await self._work(client, batch)
                        self._due_at = due_after(
                            received_at, self.min_interval, len(batch), self.max_messages
                        )
                        if batch[0].queue != self._settings.name:  # it was renamed
                            self._settings = await listen(client, self.queue)
                    worked = True
                    if not batch and not self._notified:
                        await self._stopper.wait(client.conn, min(self.poll_interval, watch.due_in()))
                        await watch.check(client)
                with self._stopper.breaking(client.conn, _ANSWER):
                    await self._settle(client)
        except (PgqueError, psycopg.Error) as fault:
            error = fault if isinstance(fault, PgqueError) else from_psycopg(fault, self.queue)
            if not worked or is_permanent(error):
                if error is fault:
                    raise
                raise error from fault
            log.warning("lost the database, connecting again: %s", one_line(error))
            await self._stopper.sleep(random.uniform(0, FIRST_PAUSE))  # noqa: S311

    def _conninfo(self) -> str:
        return watchful(self.dsn, f"pgque {self.queue}/{self.subconsumer or self.name}")

    def _on_notify(self, notify: psycopg.Notify) -> None:
        # Comes in with the answer to another statement: the batch may have been ticked after that statement
        # looked.
        self._notified = True

    async def _receive(self, client: AsyncPgqueClient) -> list[Message]:
        with self._stopper.breaking(client.conn, _ANSWER):
            if self.subconsumer is not None:
                await self._settle(client)
                self._touched_at = time.monotonic()
                return await client.receive_coop(
                    self.queue,
                    self.name,
                    self.subconsumer,
                    max_messages=self.max_messages,
                    dead_interval=self.dead_interval,
                )
            if self._handled is not None and self._handled.failed:
                await self._settle(client)
            finished = None if self._handled is None else self._handled.batch_id
            try:
                batch = await client.receive(self.queue, self.name, self.max_messages, ack_batch=finished)
            except (PgqueBadArgument, PgqueQueueInUse) as error:
                raise type(error)(
                    error.args[0], sqlstate=error.sqlstate, hint=_REMEDY, queue=self.queue
                ) from error
            except (PgqueError, psycopg.Error):
                # What is done is not to be done again because more is out of reach.
                if not client.conn.closed:
                    await self._settle(client)
                raise
            self._handled = None
            return batch

    async def _settle(self, client: AsyncPgqueClient) -> None:
        """Nack what failed of the last batch, and ack the batch at once."""
        if self._handled is None:
            return
        try:
            async with client.conn.transaction():
                await self._tell(client, self._handled)
        except (_BatchLost, PgqueBatchNotFound):
            self._log_lost(self._handled.batch_id)
        self._handled = None

    async def _tell(self, client: AsyncPgqueClient, handled: _Handled) -> None:
        for reason, ids in handled.failed.items():
            for outcome in await client.nack(handled.batch_id, ids, self.retry_after, reason):
                if not outcome.ok:
                    log.warning("message %s could not be nacked: %s", outcome.msg_id, outcome.reason)
        if handled.is_whole and await client.ack(handled.batch_id) == 0:
            raise _BatchLost

    def _log_lost(self, batch_id: int) -> None:
        log.warning(
            "batch %s of queue %s, consumer %s was taken over by another worker, or its end was lost with the"
            " connection",
            batch_id,
            self.queue,
            self.name,
        )

    async def _work(self, client: AsyncPgqueClient, batch: list[Message]) -> None:
        if not self.transactional:
            self._handled = await self._handle_all(client, batch)
            return
        try:
            async with client.conn.transaction():
                await self._tell(client, await self._handle_all(client, batch))
        except (_BatchLost, PgqueBatchNotFound):
            self._log_lost(batch[0].batch_id)

    async def _handle_all(self, client: AsyncPgqueClient, batch: list[Message]) -> _Handled:
        """Run the handlers of a batch."""
        failed: dict[str, list[int]] = defaultdict(list)
        check = await _constraint_check(client) if self.transactional else ""
        for message in batch:
            if self._stopper.out_of_time():
                raise HandlerInterrupted
            reason = await self._handle(client, message, check)
            if reason is not None:
                failed[reason].append(message.msg_id)
            await self._touch(client)
        return _Handled(batch[0].batch_id, failed)

    async def _handle(self, client: AsyncPgqueClient, message: Message, check: str) -> str | None:
        """Run the handler of one message and return why it failed, or None."""
        handler = self._handlers.get(message.type or "", self._handlers.get("*"))
        if handler is None:
            what = "they are acknowledged" if self.unknown_handler_policy == "ack" else "they are rejected"
            self._unmatched.note(message, what)
            return None if self.unknown_handler_policy == "ack" else f"no handler for type {message.type!r}"
        try:
            if self.transactional:
                async with (
                    client.conn.transaction()
                ):  # a savepoint: a failed handler takes only its own work back
                    await self._stopper.handle(handler, message, client.conn)
                    if client.conn.info.transaction_status is TransactionStatus.INERROR:
                        raise RuntimeError(_FAILED)
                    await client.conn.execute(check.encode(), prepare=False)
            else:
                await self._stopper.handle(handler, message)
        except Exception as error:
            if self.transactional:
                await self._raise_if_lost(client, message, error)
            log.warning(
                "%s",
                self._settings.failure(message, self.name, error, self.retry_after, False),
                exc_info=True,
            )
            return described(error)
        return None

    async def _raise_if_lost(self, client: AsyncPgqueClient, message: Message, error: Exception) -> None:
        """Raise what takes the whole batch back, where that and not the handler is at fault."""
        if client.conn.closed or client.conn.broken:
            # Whatever the handler made of that: the batch is delivered again.
            raise PgqueConnectionError(
                f"the connection was lost while message {message.msg_id} was handled: {described(error)}",
                queue=self.queue,
            ) from error
        if client.conn.info.transaction_status is not TransactionStatus.INTRANS:
            # What other handlers wrote in the transaction cannot be acknowledged with it.
            self._handled = _Handled(message.batch_id, {described(error): [message.msg_id]}, is_whole=False)
            await client.conn.close()
            raise PgqueConnectionError(
                f"the handler of message {message.msg_id} ended the transaction of its batch, which is"
                f" delivered again without that message: {described(error)}",
                queue=self.queue,
            ) from error
        not_kept = of_pooler(error)
        if client.conn.prepare_threshold is not None and not_kept is not None:
            # Not the handler's fault, once: the next connection prepares nothing.
            raise from_psycopg(not_kept, self.queue) from error

    async def _touch(self, client: AsyncPgqueClient) -> None:
        """Say that this worker is alive, when others could take it for dead."""
        if self.subconsumer is None or self.dead_interval is None or self.transactional:
            return
        if time.monotonic() - self._touched_at > seconds(self.dead_interval) / 3:
            self._touched_at = time.monotonic()
            with suppress(PgqueConnectionError):  # the batch goes on, and is settled over another connection
                await client.touch_subconsumer(self.queue, self.name, self.subconsumer)


async def _constraint_check(client: AsyncPgqueClient) -> str:
    """Return the statements that check what is deferred, and defer again what a new transaction defers."""
    deferred = await client._maybe(str, _DEFERRED)
    check = "set constraints all immediate"
    return f"{check}; set constraints {deferred} deferred" if deferred else check


async def listen(client: AsyncPgqueClient, queue: str) -> QueueSettings:
    """Have a connection notified of new messages, and return the settings of the queue, which may be given by
    its `queue_uid`, with its name. Raises PgqueQueueNotFound."""
    name = await client._value(
        str, "select i.queue_name from pgque.get_queue_info(%(queue)s::text) as i", {"queue": queue}
    )
    await client.conn.execute(sql.SQL("listen {}").format(sql.Identifier(f"pgque_{name}")))
    return QueueSettings.of(name, await client.queue_config(name))


class TickWatch:
    """Log when messages wait because nothing ticks their queue."""

    def __init__(self, queue: str, logger: logging.Logger) -> None:
        self._queue = queue
        self._log = logger
        self._told = False
        self.reset()

    def reset(self) -> None:
        """Take note that messages came."""
        self._checked_at = time.monotonic()
        self._told = False

    def due_in(self) -> float:
        """Return how many seconds from now the next check is due."""
        return max(0.0, self._checked_at + TICK_CHECK - time.monotonic())

    async def check(self, client: AsyncPgqueClient) -> None:
        """Ask, if that is due, whether messages wait for a tick."""
        if self.due_in() > 0:
            return
        self._checked_at = time.monotonic()
        missing = [info for info in await client.queue_info(self._queue) if _misses_tick(info)]
        if missing and not self._told:
            self._log.warning("%s", _missing_tick(missing[0]))
        self._told = bool(missing)


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


async def keep_connected(
    stopper: AsyncStopper,
    session: Callable[[], Awaitable[object]],
    done: Callable[[], bool] | None = None,
) -> None:
    """Run `session` again and again until it is `done`, which is by default a stop; after one that raised,
    after a growing random pause.

    Raises a PgqueError where trying again cannot help.
    """
    is_done = done or stopper.is_set
    growing = pauses(_LONGEST_PAUSE)
    while not is_done():
        try:
            await session()
            growing = pauses(_LONGEST_PAUSE)
        except PgqueError as error:
            if is_permanent(error):
                raise
            if is_done():
                return
            pause = next(growing)
            log.warning("failed, next try in %.1f s: %s", pause, one_line(error))
            if not stopper.is_set():
                await stopper.sleep(pause)
            else:
                await stopper.rest(min(pause, _LONGEST_AFTER_STOP))
