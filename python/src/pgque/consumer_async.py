"""The consumer: receive, hand each message to its handler, settle the batch, again and again.

`consumer.py` is generated from `consumer_async.py` by `tools/make_sync.py`; edit the async file.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Literal, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.pq import TransactionStatus
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from ._encode import watchful
from ._hands import check_async_handler
from ._stopper import AsyncStopper, HandlerInterrupted
from .client_async import AsyncPgqueClient
from .errors import (
    PgqueBatchNotFound,
    PgqueConnectionError,
    PgqueError,
    PgqueQueueInUse,
    from_psycopg,
    is_permanent,
    of_pooler,
)
from .types import Message, Seconds

AsyncHandler: TypeAlias = Callable[[Message], Awaitable[object]]
AsyncTransactionalHandler: TypeAlias = Callable[[Message, AsyncConnection[object]], Awaitable[object]]
H = TypeVar("H", bound=AsyncHandler | AsyncTransactionalHandler)

log = logging.getLogger("pgque.consumer")

# Pauses between attempts to reach the database: random between 0 and a bound that doubles up to this many
# seconds; after a stop, when time is short, of at most the last.
FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 15.0
_LONGEST_AFTER_STOP = 1.0

_LONGEST_REASON = 4000  # characters

_FAILED = (
    "the handler caught an error of the database, which left its transaction failed: let the error out, or do"
    " what may fail in a savepoint, which conn.transaction() makes"
)


class _BatchLost(Exception):
    """Say that a batch is no longer ours, and undo its transaction."""


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
        self.dsn = dsn
        self.queue = queue
        self.name = name
        self.poll_interval = poll_interval
        self.max_messages = max_messages
        self.retry_after = retry_after
        self.unknown_handler_policy = unknown_handler_policy
        self.subconsumer = subconsumer
        self.dead_interval = dead_interval
        self.transactional = transactional
        self._handlers: dict[str, AsyncHandler | AsyncTransactionalHandler] = {}
        self._stopper = AsyncStopper()
        self._notified = False
        self._touched_at = 0.0
        # A batch that is done with: the next call that receives finishes it too.
        self._finished: int | None = None
        # Why the consumer has no place for a subconsumer.
        self._refused: PgqueError | None = None

    def on(self, type: str) -> Callable[[H], H]:
        """Register the decorated function as the handler of a message type; "*" takes all types without
        one. Raises TypeError for what cannot be a handler."""

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
        as it takes. Raises a PgqueError where trying again cannot help: PgqueVersionError,
        PgqueQueueNotFound, PgqueConsumerNotFound, a missing right; PgqueQueueInUse where a consumer that
        reads on its own, or has workers, is given a subconsumer.
        """
        self._refused = None
        async with self._stopper.running():
            try:
                await keep_connected(self._stopper, lambda: self._stopper.call(self._session), self._is_done)
            except HandlerInterrupted:
                log.warning("stopped in the middle of a batch, which comes again")
        if self._refused is not None:
            raise self._refused

    def stop(self) -> None:
        """Make `start` return soon, for good; callable from any thread.

        The batch in hand is finished if that takes less than half a second, otherwise it is handed back
        whole, after the handler that is running has returned.
        """
        self._stopper.set()

    def _is_done(self) -> bool:
        return self._stopper.is_set() or self._refused is not None

    async def _session(self) -> None:
        """Consume over one connection.

        A fault before the first batch is settled, or the queue found empty, is raised; a later one ends
        the session, so that the pauses start small again.
        """
        worked = False
        self._finished = None
        try:
            async with await AsyncPgqueClient.connect(self._conninfo(), autocommit=True) as client:
                client.conn.add_notify_handler(self._on_notify)
                name = await listen(client, self.queue)
                while not self._stopper.is_set():
                    self._notified = False
                    batch = await self._receive(client)
                    if batch:
                        await self._work(client, batch)
                        if batch[0].queue != name:  # it was renamed
                            name = await listen(client, self.queue)
                    worked = True
                    if not batch and not self._notified:
                        await self._stopper.wait(client.conn, self.poll_interval)
                await self._finish(client)
        except (PgqueError, psycopg.Error) as fault:
            error = fault if isinstance(fault, PgqueError) else from_psycopg(fault, self.queue)
            if isinstance(error, PgqueQueueInUse) and self.subconsumer is not None:
                self._refused = error
                return
            if not worked or is_permanent(error):
                raise error from fault
            log.warning("lost the database, connecting again: %s", error)
            await self._stopper.sleep(random.uniform(0, FIRST_PAUSE))  # noqa: S311

    def _conninfo(self) -> str:
        return watchful(self.dsn, f"pgque {self.queue}/{self.subconsumer or self.name}")

    def _on_notify(self, notify: psycopg.Notify) -> None:
        # Comes in with the answer to another statement: the batch may have been ticked after that statement
        # looked.
        self._notified = True

    async def _receive(self, client: AsyncPgqueClient) -> list[Message]:
        if self.subconsumer is None:
            try:
                batch = await client.receive(
                    self.queue, self.name, self.max_messages, ack_batch=self._finished
                )
            except (PgqueError, psycopg.Error):
                # What is done is not to be done again because more is out of reach.
                if not client.conn.closed:
                    await self._finish(client)
                raise
            self._finished = None
            return batch
        self._touched_at = time.monotonic()
        return await client.receive_coop(
            self.queue,
            self.name,
            self.subconsumer,
            max_messages=self.max_messages,
            dead_interval=self.dead_interval,
        )

    async def _finish(self, client: AsyncPgqueClient) -> None:
        finished, self._finished = self._finished, None
        if finished is not None:
            await client.ack(finished)

    async def _work(self, client: AsyncPgqueClient, batch: list[Message]) -> None:
        try:
            if self.transactional:
                async with client.conn.transaction():
                    if not await self._handle_and_settle(client, batch):
                        raise _BatchLost
            elif not await self._handle_and_settle(client, batch):
                raise _BatchLost
        except (_BatchLost, PgqueBatchNotFound):
            log.warning("batch %s was taken over by another worker", batch[0].batch_id)

    async def _handle_and_settle(self, client: AsyncPgqueClient, batch: list[Message]) -> bool:
        """Run the handlers, then nack what failed and ack the batch at once. False when the batch is no
        longer ours."""
        failed: dict[str, list[int]] = defaultdict(list)
        for message in batch:
            if self._stopper.out_of_time():
                raise HandlerInterrupted
            reason = await self._handle(client, message)
            if reason is not None:
                failed[reason].append(message.msg_id)
            await self._touch(client)
        if not failed and not self.transactional:
            if self.subconsumer is None:
                self._finished = batch[0].batch_id
                return True
            return await client.ack(batch[0].batch_id) > 0
        async with client.conn.transaction():
            for reason, ids in failed.items():
                for outcome in await client.nack(batch[0].batch_id, ids, self.retry_after, reason):
                    if not outcome.ok:
                        log.warning("message %s could not be nacked: %s", outcome.msg_id, outcome.reason)
            return await client.ack(batch[0].batch_id) > 0

    async def _handle(self, client: AsyncPgqueClient, message: Message) -> str | None:
        """Run the handler of one message and return why it failed, or None."""
        handler = self._handlers.get(message.type or "", self._handlers.get("*"))
        if handler is None:
            if self.unknown_handler_policy == "ack":
                return None
            return f"no handler for type {message.type!r}"
        try:
            if self.transactional:
                async with (
                    client.conn.transaction()
                ):  # a savepoint: a failed handler takes only its own work back
                    await self._stopper.handle(handler, message, client.conn)
                    if client.conn.info.transaction_status is TransactionStatus.INERROR:
                        raise RuntimeError(_FAILED)
            else:
                await self._stopper.handle(handler, message)
        except Exception as error:
            if client.conn.closed or client.conn.broken:
                # Whatever the handler made of that: the batch comes again.
                raise PgqueConnectionError(
                    f"the connection was lost while message {message.msg_id} was handled: {error}",
                    queue=self.queue,
                ) from error
            not_kept = of_pooler(error)
            if self.transactional and client.conn.prepare_threshold is not None and not_kept is not None:
                # Not the handler's fault, once: the next connection prepares nothing.
                raise from_psycopg(not_kept, self.queue) from error
            log.warning("handler failed for message %s: %s", message.msg_id, error, exc_info=True)
            return _storable(f"{type(error).__name__}: {error}")
        return None

    async def _touch(self, client: AsyncPgqueClient) -> None:
        """Say that this worker is alive, when others could take it for dead."""
        if self.subconsumer is None or self.dead_interval is None or self.transactional:
            return
        limit = self.dead_interval
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
        if time.monotonic() - self._touched_at > seconds / 3:
            self._touched_at = time.monotonic()
            await client.touch_subconsumer(self.queue, self.name, self.subconsumer)


def _storable(reason: str) -> str:
    """Return a text that the database can store: no NUL, no half characters, and not without end."""
    return reason.replace("\x00", "")[:_LONGEST_REASON].encode("utf-8", "replace").decode("utf-8")


async def listen(client: AsyncPgqueClient, queue: str) -> str:
    """Have a connection notified of new messages, and return the name of the queue, which may be given by its
    `queue_uid`. Calls `pgque.get_queue_info`. Raises PgqueQueueNotFound."""
    name = await client._value(
        str, "select i.queue_name from pgque.get_queue_info(%(queue)s::text) as i", {"queue": queue}
    )
    await client.conn.execute(sql.SQL("listen {}").format(sql.Identifier(f"pgque_{name}")))
    return name


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
    growing = wait_random_exponential(multiplier=FIRST_PAUSE, max=_LONGEST_PAUSE)

    async def pause(seconds: float) -> None:
        if not stopper.is_set():
            await stopper.sleep(seconds)
        elif not is_done():
            await stopper.rest(min(seconds, _LONGEST_AFTER_STOP))

    while not is_done():
        retrying = AsyncRetrying(
            retry=retry_if_exception(_may_help),
            wait=lambda state: min(
                growing(state), _LONGEST_AFTER_STOP if stopper.is_set() else _LONGEST_PAUSE
            ),
            sleep=pause,
            stop=lambda state: is_done(),
            before_sleep=_log_pause,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    if not is_done():  # it may be since the pause
                        await session()
        except PgqueError as error:
            if not (is_done() and _may_help(error)):
                raise


def _may_help(error: BaseException) -> bool:
    return isinstance(error, PgqueError) and not is_permanent(error)


def _log_pause(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    pause = state.next_action.sleep if state.next_action else 0
    log.warning("failed, next try in %.1f s: %s", pause, error)
