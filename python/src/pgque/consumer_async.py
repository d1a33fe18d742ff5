"""The consumer: receive a batch, call the handler of each message, acknowledge the batch, repeatedly.

`consumer.py` is generated from `consumer_async.py` by `tools/make_sync.py`; edit the async file.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import PipelineStatus, TransactionStatus

from . import _otel, _payloads, _telemetry
from ._batches import ACK, RELEASE, MessageOutcome, Statement, failure_outcome, outcome_of, touch
from ._concurrency import SingleRun
from ._connection_async import Progress, keep_connected, open_client, open_client_before
from ._encode import interval, total_seconds
from ._handlers import Handlers, check_async_handler
from ._json import Encoder
from ._leases import AsyncHeartbeat, kept
from ._limit import COMMAND_TIMEOUT, check_command_timeout, within
from ._listen_async import TickWatch, listen
from ._min_interval import check_min_interval, next_receive_at
from ._payloads import BadPayload, Decoder
from ._queue_settings import QueueSettings
from ._statements import MAX_BYTES
from ._stopper import GRACE, AsyncStopper, HandlerInterrupted
from .client_async import AsyncPgqueClient
from .errors import (
    PgqueBadArgument,
    PgqueBatchNotFound,
    PgqueConnectionError,
    PgqueConsumerNotFound,
    PgqueError,
    PgquePayloadError,
    PgqueQueueInUse,
    described,
    from_psycopg,
    one_line,
    pooler_error,
)
from .outcomes import HandlerOutcome, retry_interval
from .types import Message, Outcome, Seconds

# Their first parameter is a Message, a Message[Model] or a Model.
AsyncHandler: TypeAlias = Callable[[Any], Awaitable[object]]
AsyncTransactionalHandler: TypeAlias = Callable[[Any, AsyncConnection[object]], Awaitable[object]]
H = TypeVar("H", bound=AsyncHandler | AsyncTransactionalHandler)

log = logging.getLogger("pgque.consumer")

# Seconds after a stop in which the server has to answer a call.
_STOP_TIMEOUT = GRACE + 1.0

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

_TRANSACTION_FAILED = (
    "the handler caught an error of the database, and its transaction has failed: raise the error, or run the"
    " statement in a savepoint (with conn.transaction())"
)

_LEFT_OPEN = (
    "the handler returned while its connection is busy: read a stream of rows to its end or close it, and"
    " leave the with block of a COPY"
)

_ENDED = "the process that handled this message ended before it reported an outcome"
_LOST = "the connection was lost again while this message was handled"

_NOT_FOR_CONSUMER = (
    "Start a pgque.Worker for this consumer, or give the Consumer another: client.subscribe(queue, name)."
    " To take it from its workers, unsubscribe and subscribe it again; its pending retries are lost."
)


class _BatchLost(Exception):
    """Undo the transaction of a batch that another consumer has."""


@dataclass(frozen=True, slots=True)
class _HandledBatch:
    """A batch whose handlers have run: the ids of the messages that are not acknowledged, by outcome."""

    batch_id: int
    failed: dict[MessageOutcome, list[int]]
    is_whole: bool = True  # otherwise the rest of the batch is delivered again
    ended_by: BaseException | None = None  # what ended the consumer in the middle of the batch


class AsyncConsumer:
    """Run a handler for each message of a queue, in order.

        consumer = AsyncConsumer(dsn, queue="orders", consumer="billing")

        @consumer.handler("order.created")
        async def bill(message): ...

        await consumer.run()

    Usually no transaction is open while a handler runs, and if the process is killed, the messages of its
    batch are redelivered, one at a time: handlers must bear that. A message that ends the process again and
    again is rejected each time, and is dead after `max_retries`. So is one that ends the connection of a
    transactional handler, for example by a time limit of the server.

    With `transactional=True`, a handler gets the message and the connection, and its writes through that
    connection are committed together with the ack: exactly once. If such a handler catches an error of the
    database and goes on, it needs a savepoint around the statement: `conn.transaction()`; otherwise the
    message has failed. Deferred constraints are checked after each message, and only the message that
    violates one is rejected.

    If a handler raises, its message is redelivered after `retry_after` seconds, with the text of the error as
    reason. After the queue's `max_retries` it becomes a dead letter. A handler may also return or raise
    `Retry(after=…)`, `Dead(…)` or `Release()`, as in a worker. The other messages of the batch are not
    affected.

    With `transactional=True`, what a handler wrote is committed if its message is acknowledged, or if the
    handler returns `Dead`. It is rolled back if the handler raises, also an outcome, and if the message is
    redelivered.

    Args:
        dsn: connection string or URL; if empty, that of PGQUE_DSN. PG* variables fill in missing parts.
        queue: name or `queue_uid` of the queue. The consumer must be subscribed to it, unless it has a
            `subconsumer`.
        consumer: name of the consumer.
        name: the earlier name of this argument.
        poll_interval: seconds between polls of the queue when no notification comes.
        max_messages: most messages in one batch.
        max_bytes: most bytes of payloads and headers in one batch, which has at least one message; None is no
            limit.
        min_interval: least seconds from the receive of one batch to the next receive, at most a day: larger
            batches, more latency. A full batch is followed at once, and no message waits longer than
            `min_interval` after it was sent. The ack comes before the pause.
        retry_after: seconds until a failed message is redelivered, whatever the queue's `retry_backoff` is.
        unknown_handler_policy: outcome for a type that has no handler, "nack" or "ack". Such a type is logged
            once.
        subconsumer: name of this process if several share the consumer. The consumer must not read on its own
            (PgqueQueueInUse): either do not subscribe it, and it begins at the newest tick with its first
            subconsumer; or convert it with `subscribe_subconsumer(…, convert_normal=True)`.
        dead_interval: seconds of silence after which the batch of another subconsumer may be taken over.
        transactional: True gives handlers a transaction that is shared with the ack.
        encoder: as of a client, for messages that the consumer itself sends.
        decoder: as of a client, for the messages that handlers get.
        bad_payload: outcome if a handler raises PgquePayloadError, or the payload does not fit its model:
            "dead" gives the message up, with the reason; "retry" treats it as any error.
        command_timeout: seconds in which the server has to answer each call; then the consumer connects
            again. It does not count for the statements of a handler with `transactional=True`, nor for its
            deferred constraints.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        queue: str,
        consumer: str | None = None,
        name: str | None = None,
        poll_interval: float = 30,
        max_messages: int = 100,
        max_bytes: int | None = MAX_BYTES,
        min_interval: float = 0,
        retry_after: Seconds = 60,
        unknown_handler_policy: Literal["nack", "ack"] = "nack",
        subconsumer: str | None = None,
        dead_interval: Seconds | None = None,
        transactional: bool = False,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
        bad_payload: BadPayload = "dead",
        command_timeout: float | None = COMMAND_TIMEOUT,
    ) -> None:
        if consumer is None:
            consumer = name
        elif name is not None:
            raise TypeError("a Consumer needs consumer=..., or name=..., and not both")
        if consumer is None:
            raise TypeError("a Consumer needs the name of its consumer: consumer=...")
        if unknown_handler_policy not in ("nack", "ack"):
            raise ValueError(
                f"unknown_handler_policy must be 'nack' or 'ack', not {unknown_handler_policy!r}"
            )
        if poll_interval <= 0:
            raise ValueError("poll_interval must be more than 0 seconds")
        if max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        check_min_interval(min_interval)
        retry_interval(retry_after, "retry_after")
        _payloads.check_functions(encoder=encoder, decoder=decoder)
        _payloads.check_bad_payload(bad_payload)
        check_command_timeout(command_timeout)
        self.dsn = dsn
        self.queue = queue
        self.consumer = consumer
        self.poll_interval = poll_interval
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.min_interval = min_interval
        self.retry_after = retry_after
        self.unknown_handler_policy = unknown_handler_policy
        self.subconsumer = subconsumer
        self.dead_interval = dead_interval
        self.transactional = transactional
        self.encoder = encoder
        self.decoder = decoder
        self.bad_payload = bad_payload
        self.command_timeout = command_timeout
        self._handlers: Handlers[AsyncHandler | AsyncTransactionalHandler] = Handlers(
            "Consumer", "@consumer.handler", check_async_handler, consumer, log, 2 if transactional else 1
        )
        self._stopper = AsyncStopper()
        self._notified = False
        self._lease: _SignOfLife | None = None  # of the batch of a subconsumer
        self._due_at = 0.0  # the earliest time of the next receive, by the monotonic clock
        # The last batch, until its outcomes are reported; it survives a lost connection.
        self._unreported: _HandledBatch | None = None
        self._settings = QueueSettings(queue)
        self._single = SingleRun("consumer", self._stopper)
        self._is_new = True  # nothing was received yet
        self._left_open: int | None = None  # the batch that an earlier process had, or that was lost twice
        self._lost_batch: int | None = None  # the batch whose handlers last lost the connection
        self._alone: set[int] = set()  # messages are received one at a time until these were received

    def handler(self, type: str) -> Callable[[H], H]:
        """Register the decorated function as the handler of a message type; "*" is all types without one. The
        annotation of its first parameter may ask for a Message[Model] or a Model. Raises TypeError for an
        object that cannot be a handler, and for an annotation that pydantic cannot validate."""
        return self._handlers.register(type)

    async def run(self, *, catch_signals: bool = True) -> None:
        """Receive and handle messages until `stop()`, SIGTERM or SIGINT.

        Signals are caught in the main thread only, for all workers and consumers that run there. The previous
        handlers are restored when the last of them ends; a handler that the program gave to its event loop is
        called as well. The consumer has half a second to finish its batch. Then a running handler is
        interrupted with HandlerInterrupted, the outcomes of the messages that were handled are reported, and
        the other messages are released. With `catch_signals=False`, signals are left to the program, such as
        a web server, which calls `stop()`.

        After a fault of the database the consumer connects again, after a growing random pause, without
        limit. It keeps the outcomes of handlers that have run, and reports them then.

        Raises a PgqueError if trying again cannot help: PgqueVersionError, PgqueQueueNotFound,
        PgqueConsumerNotFound, PgquePermissionDenied; PgqueBadArgument without a handler, unless
        `unknown_handler_policy` is "ack", or if the consumer has workers; PgqueQueueInUse if a consumer that
        reads on its own, or has workers, is given a subconsumer. Raises PgqueError while the object runs
        already, and after it was stopped.
        """
        self._handlers.check_any(self.unknown_handler_policy)
        with self._single.once(), self._leases_kept():
            await self._run_here(catch_signals)

    async def _run_here(self, catch_signals: bool) -> None:
        async with self._stopper.running(catch_signals):
            try:
                await keep_connected(
                    self._stopper,
                    lambda progress: self._stopper.call(lambda: self._session(progress)),
                    queue=self.queue,
                    consumer=self.consumer,
                    log=log,
                    is_done=self._is_done,
                )
            except HandlerInterrupted:
                log.warning(
                    "consumer %s of queue %s stopped in the middle of a batch: messages that it had not"
                    " finished are redelivered",
                    self.consumer,
                    self.queue,
                )
            except PgqueError as error:
                log.error("consumer %s of queue %s ends: %s", self.consumer, self.queue, one_line(error))
                raise

    def stop(self) -> None:
        """Make `run` return soon, for good; callable from any thread. After it, `run` raises PgqueError.

        The batch is finished if that takes less than half a second. Otherwise the messages that were not
        started are released after the running handler has returned.
        """
        self._stopper.set()

    @property
    def name(self) -> str:
        """Return the name of the consumer: the earlier name of `consumer`."""
        return self.consumer

    # Earlier names, which stay.
    on = handler
    start = run

    def _leases_kept(self) -> AbstractContextManager[None]:
        if self.subconsumer is None or self.dead_interval is None:
            return nullcontext()  # a batch of a consumer that reads alone does not expire
        name = f"subconsumer {self.subconsumer} of queue {self.queue}"
        return kept(self.dsn, name, total_seconds(self.dead_interval), self._leases, AsyncHeartbeat())

    def _leases(self) -> list[_SignOfLife]:
        lease = self._lease
        return [] if lease is None else [lease]

    def _is_done(self) -> bool:
        return self._stopper.is_set() and (self._unreported is None or self._stopper.out_of_time())

    async def _session(self, progress: Progress) -> None:
        """Consume over one connection. Progress is a batch that was handled, or an empty queue."""
        async with self._connected() as client:
            client.conn.add_notify_handler(self._on_notify)
            self._settings = await listen(client, self.queue)
            watch = TickWatch(self.queue, log)
            if self._is_new:
                self._left_open = await self._open_batch(client)
                self._is_new = False
            while not self._stopper.is_set():
                pause = self._due_at - time.monotonic()
                if pause > 0:
                    with self._stopper.stop_deadline(client.conn, _STOP_TIMEOUT):
                        await self._report(client)
                    progress.made = True
                    await self._stopper.wait(client.conn, pause)
                    continue
                self._notified = False
                received_at = time.monotonic()
                count = 1 if self._alone else self.max_messages
                batch = await self._receive(client, count)
                if not batch or batch[0].receive_count == 1:
                    self._alone.clear()  # due retries come first: those that did not come have expired, say
                self._alone.difference_update(message.msg_id for message in batch)
                if batch and batch[0].batch_id == self._left_open:
                    await self._put_back(client, batch)
                elif batch:
                    watch.reset()
                    await self._handle_batch(client, batch)
                    self._due_at = next_receive_at(received_at, self.min_interval, batch, count)
                    if batch[0].queue != self._settings.name:  # it was renamed
                        self._settings = await listen(client, self.queue)
                progress.made = True
                if not batch and not self._notified:
                    await self._stopper.wait(client.conn, min(self.poll_interval, watch.due_in()))
                    await watch.check(client)
            with self._stopper.stop_deadline(client.conn, _STOP_TIMEOUT):
                await self._report(client)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncPgqueClient]:
        """Connect. Neither that nor a call over the connection takes long after a stop."""
        name = f"pgque {self.queue}/{self.subconsumer or self.consumer}"
        opening = partial(
            open_client,
            self.dsn,
            name,
            encoder=self.encoder,
            decoder=self.decoder,
            read_committed=not self.transactional,  # a handler writes at the isolation level of its database
            command_timeout=self.command_timeout,
        )
        client = await open_client_before(self._stopper, _STOP_TIMEOUT, opening)
        try:
            with self._stopper.stop_deadline(client.conn, _STOP_TIMEOUT):
                yield client
        finally:
            await client.close()

    def _on_notify(self, notify: psycopg.Notify) -> None:
        # Comes in with the answer to another statement: the batch may have been ticked after that statement
        # looked.
        self._notified = True

    async def _open_batch(self, client: AsyncPgqueClient) -> int | None:
        """Return the batch that is open before this process has received one."""
        name = self.consumer if self.subconsumer is None else f"{self.consumer}.{self.subconsumer}"
        try:
            found = await client.get_consumer_info(self.queue, name)
        except PgqueConsumerNotFound:
            return None  # of a subconsumer, which its first receive registers
        return next((info.current_batch for info in found if info.current_batch is not None), None)

    async def _put_back(self, client: AsyncPgqueClient, batch: list[Message]) -> None:
        """Put the messages back that an earlier process left when it was killed, perhaps by a handler; or
        whose connection was lost twice, perhaps by the statement of a handler or a time limit.

        It is not known which of them was handled then, so they are received one at a time from now on: if one
        of them ends this process too, the next process finds it alone. A message that is found alone, and was
        left before, is rejected, so that it is dead after the queue's `max_retries`. One end of a process may
        have another cause.
        """
        ids = [message.msg_id for message in batch]
        is_lost = batch[0].batch_id == self._lost_batch
        was_left = is_lost or (batch[0].receive_count or 1) > (batch[0].retry_count or 0) + 1
        if len(ids) == 1 and was_left:
            reason = _LOST if is_lost else _ENDED
            outcome = MessageOutcome("nack", interval(self.retry_after), reason)
            log.warning("message %s of queue %s is rejected: %s", ids[0], self.queue, reason)
        else:
            outcome = RELEASE
            self._alone = set(ids)
            log.warning(
                "the %s that had batch %s of queue %s ended before it reported the outcomes: its %s"
                " messages are received one at a time, so that one that ends it is found",
                "connection" if is_lost else "process",
                batch[0].batch_id,
                self.queue,
                len(ids),
            )
        self._unreported = _HandledBatch(batch[0].batch_id, {outcome: ids})
        await self._report(client)

    async def _receive(self, client: AsyncPgqueClient, count: int) -> list[Message]:
        with self._stopper.stop_deadline(client.conn, _STOP_TIMEOUT):
            if self.subconsumer is not None:
                await self._report(client)
                lease = _SignOfLife(self.queue, self.consumer, self.subconsumer)
                batch = await client.receive_coop(
                    self.queue,
                    self.consumer,
                    self.subconsumer,
                    max_messages=count,
                    dead_interval=self.dead_interval,
                    max_bytes=self.max_bytes,
                )
                self._lease = lease if batch else None
                return batch
            if self._unreported is not None and self._unreported.failed:
                await self._report(client)
            finished = None if self._unreported is None else self._unreported.batch_id
            try:
                batch = await client.receive(
                    self.queue, self.consumer, count, ack_batch=finished, max_bytes=self.max_bytes
                )
            except (PgqueError, psycopg.Error) as error:
                is_of_message = isinstance(error, PgquePayloadError)
                if isinstance(error, (PgqueBadArgument, PgqueQueueInUse)) and not is_of_message:
                    raise type(error)(
                        error.args[0], sqlstate=error.sqlstate, hint=_NOT_FOR_CONSUMER, queue=self.queue
                    ) from error
                # What is done is not to be done again because more is out of reach.
                if not client.conn.closed:
                    await self._report(client)
                raise
            self._unreported = None
            return batch

    async def _report(self, client: AsyncPgqueClient) -> None:
        """Report the outcomes of the last batch, and ack the batch, in one transaction."""
        if self._unreported is None:
            return
        try:
            async with client.conn.transaction():
                await self._nack_and_ack(client, self._unreported)
        except (_BatchLost, PgqueBatchNotFound):
            self._log_lost(self._unreported.batch_id)
        self._unreported = None

    async def _nack_and_ack(self, client: AsyncPgqueClient, handled: _HandledBatch) -> None:
        refused: list[Outcome] = []
        with _otel.timed("ack", self.queue, self.consumer):
            for failure, ids in handled.failed.items():
                if failure.action == "dead":
                    outcomes = await client.dead(handled.batch_id, ids, failure.reason)
                elif failure.action == "release":
                    await client.release(handled.batch_id, ids)
                    outcomes = []
                else:
                    outcomes = await client.nack(handled.batch_id, ids, failure.retry_after, failure.reason)
                refused += [outcome for outcome in outcomes if not outcome.ok]
            is_lost = handled.is_whole and await client.ack(handled.batch_id) == 0
        for outcome in refused:
            log.warning("message %s could not be nacked: %s", outcome.msg_id, outcome.reason)
        if is_lost:
            raise _BatchLost

    def _log_lost(self, batch_id: int) -> None:
        log.warning(
            "batch %s of queue %s, consumer %s went to another worker, or its acknowledgement was lost with"
            " the connection",
            batch_id,
            self.queue,
            self.consumer,
        )

    async def _handle_batch(self, client: AsyncPgqueClient, batch: list[Message]) -> None:
        """Handle a batch and, where the acks belong to the transaction of the handlers or the consumer ends
        meanwhile, report its outcomes. Raises what ended the consumer."""
        handled: _HandledBatch | None = None
        try:
            with ExitStack() as ending:
                if self.transactional:
                    async with client.conn.transaction():
                        handled = await self._handle_all(client, batch)
                        ending.enter_context(_bounded(client, handled))
                        await self._nack_and_ack(client, handled)
                else:
                    self._unreported = handled = await self._handle_all(client, batch)
                    ending.enter_context(_bounded(client, handled))
                    if handled.ended_by is not None:
                        await self._report(client)
        except (_BatchLost, PgqueBatchNotFound):
            self._log_lost(batch[0].batch_id)
        except (PgqueError, psycopg.Error) as error:
            if handled is None or handled.ended_by is None:
                raise
            log.warning("batch %s could not be reported, and is redelivered: %s", handled.batch_id, error)
        if handled is not None and handled.ended_by is not None:
            raise handled.ended_by

    async def _handle_all(self, client: AsyncPgqueClient, batch: list[Message]) -> _HandledBatch:
        """Run the handlers of a batch. If the consumer ends meanwhile, the messages that are not finished are
        released."""
        failed: dict[MessageOutcome, list[int]] = defaultdict(list)
        check = await _constraint_check(client) if self.transactional else ""
        for number, message in enumerate(batch):
            try:
                if self._stopper.out_of_time():
                    raise HandlerInterrupted
                outcome = await self._handle(client, message, check)
            except Exception:
                raise
            except BaseException as error:
                failed[RELEASE] += [left.msg_id for left in batch[number:]]
                return _HandledBatch(batch[0].batch_id, failed, ended_by=error)
            _telemetry.note_outcome(message, self.consumer, outcome.action)
            if outcome != ACK:
                failed[outcome].append(message.msg_id)
        return _HandledBatch(batch[0].batch_id, failed)

    async def _handle(self, client: AsyncPgqueClient, message: Message, check: str) -> MessageOutcome:
        """Run the handler of one message and return its outcome."""
        handler = self._handlers.find(message)
        if handler is None:
            reason = self._handlers.reject_reason(message, self.unknown_handler_policy)
            return ACK if reason is None else MessageOutcome("nack", interval(self.retry_after), reason)
        try:
            with _telemetry.handling(message, self.consumer):
                if self.transactional:
                    return await self._handle_in_savepoint(client, handler, message, check)
                return self._outcome(await self._stopper.handle(handler, message))
        except (Exception, SystemExit) as error:
            if self.transactional:
                await self._raise_if_lost(client, message, error)
            return self._outcome_of_error(message, error)

    async def _handle_in_savepoint(
        self,
        client: AsyncPgqueClient,
        handler: AsyncHandler | AsyncTransactionalHandler,
        message: Message,
        check: str,
    ) -> MessageOutcome:
        """Run a handler in a savepoint, so that one that fails takes only its own work back, and return the
        outcome of its message."""
        async with client.conn.transaction() as savepoint:
            # Deferred triggers are the handler's own work, as its statements are.
            deadline = self._stopper.stop_deadline(client.conn, self.command_timeout or math.inf)
            with within(client.conn, None), deadline:
                try:
                    outcome = self._outcome(await self._stopper.handle(handler, message, client.conn))
                finally:
                    # The next statement would wait for ever, also the rollback to the savepoint.
                    is_busy = _is_busy(client.conn)
                    if is_busy:
                        await client.conn.close()
                if is_busy:
                    raise RuntimeError(_LEFT_OPEN)
                has_failed = client.conn.info.transaction_status is TransactionStatus.INERROR
                if has_failed and outcome == ACK:
                    raise RuntimeError(_TRANSACTION_FAILED)
                if has_failed or outcome.redelivers:
                    # What the handler wrote would be written again by the next attempt.
                    raise psycopg.Rollback(savepoint)
                await client.conn.execute(check.encode(), prepare=False)
        return outcome

    def _outcome(self, returned: object) -> MessageOutcome:
        return outcome_of(returned, ACK, interval(self.retry_after))

    def _outcome_of_error(self, message: Message, error: BaseException) -> MessageOutcome:
        """Return the outcome of a message whose handler raised."""
        if isinstance(error, HandlerOutcome):
            return self._outcome(error)
        is_bad = isinstance(error, PgquePayloadError)
        is_dead = is_bad and self.bad_payload == "dead"
        text = self._settings.failure_text(message, self.consumer, error, self.retry_after, False, is_dead)
        log.warning("%s", text, exc_info=not is_bad)  # a traceback might show the payload
        return failure_outcome(error, interval(self.retry_after), is_dead)

    async def _raise_if_lost(self, client: AsyncPgqueClient, message: Message, error: BaseException) -> None:
        """Raise what takes the whole batch back, where that and not the handler is at fault."""
        if client.conn.broken:
            # Whatever the handler made of that: the batch is delivered again.
            if message.batch_id == self._lost_batch:
                self._left_open = message.batch_id
            self._lost_batch = message.batch_id
            raise PgqueConnectionError(
                f"the connection was lost while message {message.msg_id} was handled: {described(error)}",
                queue=self.queue,
            ) from error
        if client.conn.info.transaction_status is not TransactionStatus.INTRANS:
            # What other handlers wrote in the transaction cannot be acknowledged with it. A connection that
            # the handler closed, as `with conn` does, is not broken.
            outcome = failure_outcome(error, interval(self.retry_after))
            if isinstance(error, HandlerOutcome):
                outcome = self._outcome(error)
            self._unreported = _HandledBatch(message.batch_id, {outcome: [message.msg_id]}, is_whole=False)
            await client.conn.close()
            raise PgqueConnectionError(
                f"the handler of message {message.msg_id} ended the transaction of its batch, which is"
                f" delivered again without that message: {described(error)}",
                queue=self.queue,
            ) from error
        not_kept = pooler_error(error)
        if client.conn.prepare_threshold is not None and not_kept is not None:
            # Not the handler's fault, once: the next connection prepares nothing.
            raise from_psycopg(not_kept, self.queue) from error


def _bounded(client: AsyncPgqueClient, handled: _HandledBatch) -> AbstractContextManager[None]:
    """Return a block that ends soon if the consumer ends: a lock or a standby may keep the report."""
    if handled.ended_by is None:
        return nullcontext()
    stopper = AsyncStopper()
    stopper.set()
    return stopper.stop_deadline(client.conn, _STOP_TIMEOUT)


class _SignOfLife:
    """What has to be extended before others may take a subconsumer for dead."""

    lost = False

    def __init__(self, queue: str, consumer: str, subconsumer: str) -> None:
        self._names = queue, consumer, subconsumer
        self.extended_at = time.monotonic()

    def extension(self, now: float, lock_timeout: float) -> Statement:
        """Return the statement that gives the sign."""
        return touch(*self._names, lock_timeout)

    def note_extended(self, now: float, held: int | None) -> None:
        """Take note that it was given."""
        self.extended_at = now


def _is_busy(conn: AsyncConnection[object]) -> bool:
    """Return whether a connection still sends rows, or takes part in a COPY."""
    is_active = conn.info.transaction_status is TransactionStatus.ACTIVE
    return conn.lock.locked() or (is_active and conn.info.pipeline_status is PipelineStatus.OFF)


async def _constraint_check(client: AsyncPgqueClient) -> str:
    """Return the statements that check what is deferred, and defer again what a new transaction defers."""
    deferred = await client._maybe(str, _DEFERRED)
    check = "set constraints all immediate"
    return f"{check}; set constraints {deferred} deferred" if deferred else check
