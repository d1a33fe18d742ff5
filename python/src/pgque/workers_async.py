"""Work queues: many workers share the messages of one consumer, and each message has an outcome of its own.

`workers.py` is generated from `workers_async.py` by `tools/make_sync.py`; edit the async file.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncCursor
from psycopg.rows import args_row

from . import _batches, _encode, _otel, _payloads, _telemetry
from ._batches import ACK, ARCHIVE, RELEASE, Batch, MessageOutcome, Refused, Statement
from ._concurrency import AsyncLock, SingleRun, TaskPool, check_until_idle, run_worker_async
from ._connection_async import Progress, keep_connected, open_client, open_client_before
from ._decode import reading
from ._handlers import Handlers, check_async_handler
from ._json import Encoder
from ._leases import AsyncHeartbeat, kept
from ._limit import COMMAND_TIMEOUT, check_command_timeout
from ._listen_async import TickWatch, listen, queue_of
from ._liveness import Liveness
from ._middleware import Middleware
from ._min_interval import check_min_interval, next_receive_at
from ._payloads import BadPayload, Decoder
from ._queue_settings import QueueSettings
from ._recurring import Recurring, recurring_queue
from ._sources import Priority, Source, Sources, check_weights
from ._statements import MAX_BYTES
from ._stopper import AsyncStopper, HandlerInterrupted
from .client_async import AsyncPgqueClient
from .errors import PgqueConnectionError, PgqueError, PgquePayloadError, from_psycopg, one_line
from .outcomes import HandlerOutcome, retry_interval
from .types import Event, Message, Payload, Seconds

# Its parameter is a Message, a Message[Model] or a Model.
AsyncWorkHandler: TypeAlias = Callable[[Any], Awaitable[object]]
BeforeHook = TypeVar("BeforeHook", bound=Callable[[Message], object])
AfterHook = TypeVar("AfterHook", bound=Callable[[Message, object], object])
ErrorHook = TypeVar("ErrorHook", bound=Callable[[Message, BaseException], object])
H = TypeVar("H", bound=AsyncWorkHandler)
M = TypeVar("M", bound=Message)

log = logging.getLogger("pgque.worker")

# Expired leases are not notified, so the queue is polled this often, in seconds.
_POLL_INTERVAL = 1.0

# Outcomes of a batch that is not finished are reported after so many seconds.
_REPORT_INTERVAL = 1.0

# Seconds beyond the time of a stop in which the server has to answer the last report.
_LAST_REPORT_TIMEOUT = 1.0

# Most messages received in one call, where nothing else is asked for. The server needs about as much time to
# deliver 100 as to deliver 10.
_LEAST_PREFETCH = 100

# In seconds: batches that are handled within the first grow up to the worker's `prefetch`; those that take
# longer than the second shrink.
_QUICK_BATCH, _SLOW_BATCH = 0.2, 1.0

# The share of a lease after which a worker extends it over the connection that it works with: the one for
# leases could not be opened, or is waiting for something else.
_OVERDUE = 0.75

# Leases after which a handler without a time limit is logged.
_LONG = 10

# More outcomes than a worker has messages: handlers need not wake it.
_NEVER = sys.maxsize


@dataclass(slots=True, eq=False)
class _Running:
    """A message that a handler has, since when, and where it runs in the pool."""

    batch: Batch[Message]
    message: Message
    place: Any
    since: float = field(default_factory=time.monotonic)
    is_logged: bool = False


@dataclass(slots=True, eq=False)
class _Delivery:
    """A batch that a loop over messages received, which each of its messages refers to."""

    queue: AsyncWorkQueue
    batch: Batch[AsyncWorkMessage] | None = None
    undelivered: list[int] = field(default_factory=list)  # ids of messages the loop has not yielded

    def message(self, *row: object) -> AsyncWorkMessage:
        return self.queue._make_message(*row, self)


@dataclass(frozen=True, slots=True)
class AsyncWorkMessage(Message):
    """Describe a message from `AsyncWorkQueue.messages`, with methods for its outcome.

    A method reports the outcome at once. It returns False if the message has an outcome already, or if its
    lease expired and the message was lost.
    """

    _delivery: _Delivery | None = field(default=None, repr=False, compare=False)

    async def ack(self) -> bool:
        """Acknowledge the message. Calls `pgque.ack`."""
        return await self._report(ACK)

    async def archive(self) -> bool:
        """Acknowledge the message, and keep it in the archive. Calls `pgque.archive`."""
        return await self._report(ARCHIVE)

    async def nack(self, after: Seconds | None = None, reason: str | None = None) -> bool:
        """Reject the message: it is redelivered after some seconds; None is the queue's setting. Calls
        `pgque.nack`. Raises PgqueBadArgument for a negative length of time, or one over ten years."""
        return await self._report(MessageOutcome("nack", retry_interval(after), reason))

    async def dead(self, reason: str | None = None) -> bool:
        """Give the message up, without more retries. Calls `pgque.dead`."""
        return await self._report(MessageOutcome("dead", None, reason))

    async def release(self) -> bool:
        """Release the message: any worker can receive it at once. Calls `pgque.release`."""
        return await self._report(RELEASE)

    async def extend(self, seconds: Seconds) -> bool:
        """Extend the lease of this batch by some seconds; return False if the batch is lost. Calls
        `pgque.extend`."""
        if self._delivery is None:
            raise PgqueError("this message is not from WorkQueue.messages, so it has no outcome to report")
        return await self._delivery.queue._extend(self.batch_id, seconds)

    async def _report(self, outcome: MessageOutcome) -> bool:
        if self._delivery is None or self._delivery.batch is None:
            raise PgqueError("this message is not from WorkQueue.messages, so it has no outcome to report")
        return await self._delivery.queue._report(self._delivery.batch, self.msg_id, outcome)


class AsyncWorkQueue:
    """Send to a queue, and receive its messages one at a time.

        async with AsyncWorkQueue(dsn, "emails", consumer="mailers") as queue:
            await queue.send({"to": "ann@example.com"})
            async for message in queue.messages():
                ...

    The first call opens a connection, and so does the first call after a lost connection. Each call is a
    transaction. Use a work queue in one thread or task at a time.

    Args:
        dsn: connection string or URL; if empty, that of PGQUE_DSN. PG* variables fill in missing parts.
        queue: name or `queue_uid` of the queue.
        consumer: name of the consumer, which must be subscribed; not needed for sending.
        encoder: as of a client.
        decoder: as of a client.
        command_timeout: as of a client.
    """

    def __init__(
        self,
        dsn: str = "",
        queue: str = "",
        *,
        consumer: str | None = None,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
        command_timeout: float | None = COMMAND_TIMEOUT,
    ) -> None:
        if not queue:
            raise ValueError("a work queue needs the name of its queue")
        _payloads.check_functions(encoder=encoder, decoder=decoder)
        check_command_timeout(command_timeout)
        self.dsn = dsn
        self.queue = queue
        self.consumer = consumer
        self.encoder = encoder
        self.command_timeout = command_timeout
        self._make_message: Callable[..., AsyncWorkMessage] = _payloads.message_maker(
            AsyncWorkMessage, decoder
        )
        self._client: AsyncPgqueClient | None = None
        self._listening: AsyncPgqueClient | None = None
        self._notified = False
        self._stopper = AsyncStopper()
        # Of the connection: a loop that was left by `break` is closed by asyncio, in a task of its own.
        self._lock = AsyncLock()
        self._deliveries: set[_Delivery] = set()  # of the loops that stand at a message
        self._reports_alone = False  # after a lost connection, for the reason that Worker._begin has

    async def __aenter__(self) -> AsyncWorkQueue:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Release the messages that `messages` received and did not yield, and close the connection."""
        if self._client is not None:
            for delivery in list(self._deliveries):
                await self._end_delivery(delivery)
            await self._client.close()

    async def send(
        self,
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
        """Send one message and return its id; see `AsyncPgqueClient.send`. Calls `pgque.send`."""
        async with self._lock:
            client = await self._connected()
            return await client.send(
                self.queue,
                payload,
                type=type,
                headers=headers,
                key=key,
                delay=delay,
                deliver_at=deliver_at,
                ttl=ttl,
                partition_key=partition_key,
            )

    async def send_batch(
        self,
        payloads: Sequence[Payload | Event],
        *,
        type: str | None = None,
        headers: Sequence[Mapping[str, object] | None] | None = None,
        keys: Sequence[str | None] | None = None,
        delays: Sequence[Seconds | None] | None = None,
        deliver_ats: Sequence[datetime | None] | None = None,
        ttls: Sequence[Seconds | None] | None = None,
        partition_keys: Sequence[str | None] | None = None,
    ) -> list[int]:
        """Send many messages, all or none, and return their ids; see `AsyncPgqueClient.send_batch`. Calls
        `pgque.send_batch`."""
        async with self._lock:
            client = await self._connected()
            return await client.send_batch(
                self.queue,
                payloads,
                type=type,
                headers=headers,
                keys=keys,
                delays=delays,
                deliver_ats=deliver_ats,
                ttls=ttls,
                partition_keys=partition_keys,
            )

    async def messages(
        self,
        *,
        worker: str | None = None,
        max_messages: int = 10,
        visibility_timeout: Seconds | None = None,
        timeout: float | None = None,
        max_bytes: int | None = MAX_BYTES,
    ) -> AsyncGenerator[AsyncWorkMessage, None]:
        """Yield messages one at a time, as they arrive. Calls `pgque.receive`.

        The next step of the loop acknowledges a message without an outcome (`ack`, `nack`, `dead`, `release`
        or `archive`). These acks are reported together, after a second or at the end of a batch. A loop that
        ends by `break` or an exception does not acknowledge its last message: it is redelivered when its
        lease has expired. Messages that were received but not yielded are released then.

        The lease is extended between messages. For a message that may take longer than `visibility_timeout`,
        call its `extend`.

        Args:
            worker: name of this worker; None makes up a unique one.
            max_messages: most messages in one receive.
            visibility_timeout: seconds until the lease of messages without an outcome expires; None is the
                queue's setting.
            timeout: seconds without a message after which the loop ends; None waits forever, 0 ends the loop
                when the queue is empty.
            max_bytes: most bytes of payloads and headers in one receive, which has at least one message; None
                is no limit.

        Raises PgqueQueueNotFound, PgqueConsumerNotFound, PgqueConnectionError. After a lost connection, call
        again.
        """
        if self.consumer is None:
            raise ValueError("to receive, a work queue needs the name of its consumer")
        name = worker or _batches.worker_name()
        async with self._lock:
            client = await self._listen()
            if visibility_timeout is None:
                visibility_timeout = await _default_timeout(client, self.queue)
        waiting_since = time.monotonic()
        delivery: _Delivery | None = None
        try:
            while True:
                following = _Delivery(self)
                receive = _batches.receive(
                    self.queue, self.consumer, name, max_messages, visibility_timeout, max_bytes
                )
                async with self._lock:
                    asked_at = time.monotonic()
                    self._notified = False
                    finished = [delivery.batch] if delivery is not None and delivery.batch is not None else []
                    if finished and self._reports_alone:
                        await _report_and_receive(client, self.consumer, finished, None, following.message)
                        self._reports_alone = False
                        finished = []
                    received = await _report_and_receive(
                        client, self.consumer, finished, receive, following.message
                    )
                    self._deliveries.discard(delivery)
                    delivery = None
                    if not received:
                        pause = _POLL_INTERVAL
                        if timeout is not None:
                            pause = min(pause, waiting_since + timeout - time.monotonic())
                        if pause <= 0:
                            return
                        if not self._notified:
                            await _wait(self._stopper, client, pause)
                        continue
                delivery = following
                batch = delivery.batch = Batch(received, asked_at)
                delivery.undelivered = [message.msg_id for message in reversed(received)]
                self._deliveries.add(delivery)
                for message in received:
                    async with self._lock:
                        if not await _extend_if_due(client, batch, visibility_timeout):
                            break
                    delivery.undelivered.pop()
                    yield message
                    if batch.is_open(message.msg_id):
                        batch.record([message.msg_id], ACK)
                    if time.monotonic() - batch.reported_at > _REPORT_INTERVAL:
                        async with self._lock:
                            await _report_and_receive(client, self.consumer, [batch], None, delivery.message)
                waiting_since = time.monotonic()
        except BaseException as error:  # GeneratorExit too
            self._reports_alone |= isinstance(error, PgqueConnectionError)
            if delivery is not None:
                await self._end_delivery(delivery)
            raise

    async def _end_delivery(self, delivery: _Delivery) -> None:
        """Report the outcomes of a batch, and release the messages that the loop has not yielded; once.
        Connects again if that is needed."""
        async with self._lock:
            if delivery not in self._deliveries or delivery.batch is None:
                return
            batch = delivery.batch
            batch.record(delivery.undelivered, RELEASE)
            try:
                if batch.has_outcomes:
                    client = await self._connected()
                    stopper = AsyncStopper()
                    stopper.set()
                    with stopper.stop_deadline(client.conn, _LAST_REPORT_TIMEOUT):  # a lock may keep it
                        await _report_and_receive(client, self.consumer, [batch], None, delivery.message)
            except PgqueError as error:
                log.warning("batch %s could not be released: %s", batch.batch_id, one_line(error))
                if self._client is not None:
                    await self._client.close()  # it may be broken
            finally:
                self._deliveries.discard(delivery)

    async def _connected(self) -> AsyncPgqueClient:
        if self._client is None or self._client.conn.closed:
            name = f"pgque {self.queue}/{self.consumer}" if self.consumer else f"pgque {self.queue}"
            self._client = await open_client(
                self.dsn,
                name,
                encoder=self.encoder,
                read_committed=True,
                command_timeout=self.command_timeout,
            )
        return self._client

    async def _listen(self) -> AsyncPgqueClient:
        client = await self._connected()
        if self._listening is not client:
            client.conn.add_notify_handler(self._on_notify)
            await listen(client, self.queue)
            self._listening = client
        return client

    def _on_notify(self, notify: psycopg.Notify) -> None:
        self._notified = True

    async def _report(self, batch: Batch[AsyncWorkMessage], msg_id: int, outcome: MessageOutcome) -> bool:
        if not batch.is_open(msg_id):
            return False
        statement = _batches.report(batch.batch_id, outcome, [msg_id])
        async with self._lock:
            client = await self._connected()
            with _otel.timed("ack", self.queue, self.consumer):
                refused, _ = await _round_trip(client, [statement], None, AsyncWorkMessage)
            batch.mark_message_reported(msg_id, outcome)
        return not refused

    async def _extend(self, batch_id: int, seconds: Seconds) -> bool:
        async with self._lock:
            client = await self._connected()
            return await client.extend(batch_id, seconds) > 0


class AsyncWorker:
    """Run handlers for the messages of a queue, several at a time.

        worker = AsyncWorker(dsn, queue="emails", consumer="mailers", concurrency=8)

        @worker.handler("welcome")
        async def welcome(message): ...

        await worker.run()

    If a handler returns, its message is acknowledged. If it raises, the message is rejected with the text of
    the error as reason, and redelivered after `retry_after` seconds; after the last attempt it goes the way
    of the queue's `drop_policy`. A handler may also return or raise `Retry(after=…)`, `Dead(…)` or
    `Release()`.

    The worker extends the lease of a message every half `visibility_timeout` while its handler runs, however
    long that takes. The workers of a process share a connection for this, which is opened when a handler has
    run for a quarter of `visibility_timeout`. If the process dies, or loses the database for longer than
    `visibility_timeout`, other workers get its messages; it does not start messages whose lease has expired.
    No transaction is open while a handler runs. A message may be delivered twice.

    Any number of workers may share a consumer, in any number of processes and machines.

    Args:
        dsn: connection string or URL; if empty, that of PGQUE_DSN. PG* variables fill in missing parts.
        queue: name or `queue_uid` of the queue.
        queues: several queues with their weights, instead of `queue`: {"urgent": 5, "bulk": 1}. A handler
            finds the name of the queue in `message.queue`.
        priority: meaning of weights. "weighted" shares the messages of queues that have a backlog by their
            weights, so that no queue starves. "strict" receives from a queue only while those with a greater
            weight are empty; queues of equal weight take turns.
        consumer: name of the consumer, which must be subscribed to each queue.
        concurrency: number of handlers that run at a time.
        use: "tasks".
        prefetch: most messages in one receive; None is twice `concurrency`, but at least 100. It starts with
            `concurrency`, and doubles up to this while batches take less than 0.2 seconds. Then messages are
            also received before a handler is free for them. It is halved when a batch takes more than a
            second. A worker never has more messages than `concurrency` and `prefetch` together.
        max_bytes: most bytes of payloads and headers in one receive, which has at least one message; None is
            no limit.
        min_interval: least seconds from the receive of one batch to the next receive, at most a day: larger
            batches, more latency. A full batch is followed at once, and no message waits longer than
            `min_interval` after it was sent. Outcomes do not wait for the pause to end. Each process has its
            own pause.
        visibility_timeout: seconds of a lease, whatever the queue's setting is.
        retry_after: seconds until a failed message is redelivered; None is the queue's setting.
        archive: True archives acknowledged messages.
        unknown_handler_policy: outcome for a type that has no handler, "nack" or "ack". Such a type is logged
            once.
        worker: name of this worker; None makes up a unique one.
        shutdown_timeout: seconds that handlers have to finish after a stop.
        handler_timeout: seconds that a handler may run; None is no limit. Then its message is rejected with
            that as the reason, and the next one is handled in its place. A task is cancelled; a thread cannot
            be, so it goes on until its handler returns, and the outcome does not count.
        encoder: as of a client, for messages that the worker itself sends.
        decoder: as of a client, for the messages that handlers get. With use="processes" encoder and decoder
            are functions of a module.
        bad_payload: outcome if a handler raises PgquePayloadError, or the payload does not fit its model:
            "dead" gives the message up, with the reason, as `drop_policy` has it; "retry" treats it as any
            error. The log has no traceback of it, which might show the payload.
        liveness_file: a file to touch every second while the worker is alive and the database answers. An old
            file means that the worker hangs.
        command_timeout: seconds in which the server has to answer each call; then the worker connects again.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        queue: str | None = None,
        queues: Mapping[str, float] | None = None,
        priority: Priority = "weighted",
        consumer: str,
        concurrency: int = 4,
        use: Literal["tasks"] = "tasks",
        prefetch: int | None = None,
        max_bytes: int | None = MAX_BYTES,
        min_interval: float = 0,
        visibility_timeout: Seconds = 30,
        retry_after: Seconds | None = None,
        archive: bool = False,
        unknown_handler_policy: Literal["nack", "ack"] = "nack",
        worker: str | None = None,
        shutdown_timeout: float = 30,
        handler_timeout: Seconds | None = None,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
        bad_payload: BadPayload = "dead",
        liveness_file: str | os.PathLike[str] | None = None,
        command_timeout: float | None = COMMAND_TIMEOUT,
    ) -> None:
        if unknown_handler_policy not in ("nack", "ack"):
            raise ValueError(
                f"unknown_handler_policy must be 'nack' or 'ack', not {unknown_handler_policy!r}"
            )
        if concurrency < 1 or (prefetch is not None and prefetch < 1):
            raise ValueError("concurrency and prefetch must be at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        if _encode.total_seconds(visibility_timeout) <= 0:
            raise ValueError("visibility_timeout must be more than 0 seconds")
        if handler_timeout is not None and _encode.total_seconds(handler_timeout) <= 0:
            raise ValueError("handler_timeout must be more than 0 seconds, or None")
        check_min_interval(min_interval)
        retry_interval(retry_after, "retry_after")
        _payloads.check_functions(encoder=encoder, decoder=decoder)
        _payloads.check_bad_payload(bad_payload)
        check_command_timeout(command_timeout)
        weights = check_weights(queue, queues, priority)
        self.dsn = dsn
        self.queue = ", ".join(weights)
        self.queues = weights
        self.priority: Priority = priority
        self.consumer = consumer
        self.concurrency = concurrency
        self.use = use
        self.prefetch = max(_LEAST_PREFETCH, 2 * concurrency) if prefetch is None else prefetch
        self.max_bytes = max_bytes
        self.min_interval = min_interval
        self.visibility_timeout = visibility_timeout
        self.retry_after = retry_after
        self.archive = archive
        self.unknown_handler_policy = unknown_handler_policy
        self.worker = worker or _batches.worker_name()
        self.shutdown_timeout = shutdown_timeout
        self.handler_timeout = handler_timeout
        self.encoder = encoder
        self.decoder = decoder
        self.bad_payload = bad_payload
        self.liveness_file = liveness_file
        self.command_timeout = command_timeout
        self._make_message: Callable[..., Message] = _payloads.message_maker(Message, decoder)
        self._handlers: Handlers[AsyncWorkHandler] = Handlers(
            "Worker", "@worker.handler", check_async_handler, consumer, log
        )
        self._recurring: list[Recurring] = []
        self._liveness = Liveness(liveness_file)
        self._middleware = Middleware("Worker", check_async_handler, log)
        self._sources = Sources(weights, priority, _POLL_INTERVAL)
        self._watches = {source: TickWatch(source.queue, log) for source in self._sources}
        self._stopper = self._first_stopper = AsyncStopper()
        self._single = SingleRun("worker", self._first_stopper)
        self._size = self.prefetch if min_interval else min(concurrency, self.prefetch)
        self._is_ahead = False  # whether it receives messages before a handler is free for them
        self._lease_seconds = _encode.total_seconds(visibility_timeout)
        self._batches: dict[int, Batch[Message]] = {}
        # Written by the threads or tasks that run handlers, read by the session only; None of a lost batch.
        self._finished: deque[tuple[Batch[Message], int, MessageOutcome | None]] = deque()
        # The handlers that run, by batch and message. One that ran for too long is taken out by the session.
        self._running: dict[tuple[int, int], _Running] = {}
        self._catch_signals = True
        self._until_idle = False  # whether `run` ends when nothing is left to be done
        self._is_idle = False
        self._wake_at = _NEVER  # with so many of these the session has something to do

    def handler(self, type: str) -> Callable[[H], H]:
        """Register the decorated function as the handler of a message type; "*" takes all types without
        one. Its annotation may ask for a Message[Model] or a Model. It is read here, and may be text. Raises
        TypeError for an object that cannot be a handler, and for an annotation that cannot be validated."""
        return self._handlers.register(type)

    def every(
        self,
        cron: str,
        *,
        type: str,
        payload: Payload = None,
        queue: str | None = None,
        name: str | None = None,
        timezone: str = "UTC",
        catch_up: str = "one",
    ) -> Callable[[H], H]:
        """Register the decorated function as the handler of a recurring message, which the ticker sends at
        the times of `cron`. See `AsyncPgqueClient.create_recurring`, which the worker calls when it
        starts.

        Any number of workers may have the decorator: each run is sent once. The role of the worker needs the
        right to send to the queue. The recurring message stays when you remove the decorator: drop it with
        `drop_recurring`, or `pgque recurring drop NAME`. `list_recurring` shows when a worker last registered
        it.

        Args:
            queue: the queue of the message; required if the worker has several.
            name: name of the recurring message, once in the database; None is "queue/type".

        Raises ValueError if the worker has one of this name, or does not receive from the queue, and
        TypeError for an object that cannot be a handler.
        """
        queue = recurring_queue(self.queues, queue)
        recurring = Recurring(
            name or f"{queue}/{type}", queue, cron, Event(type, payload), timezone, catch_up
        )
        recurring.check_new(self._recurring)
        return self._handlers.register(type, lambda: self._recurring.append(recurring))

    def before(self, hook: BeforeHook) -> BeforeHook:
        """Register the decorated function to be called with each message before its handler.

        Hooks of `before` run in the order of registration, those of `after` and `error` in the reverse
        order. If one raises, the handler is not called and the message has failed; it may also raise `Retry`,
        `Dead` or `Release`. Messages without a handler have no hooks.
        """
        return self._middleware.add("before", hook)

    def after(self, hook: AfterHook) -> AfterHook:
        """Register the decorated function to be called with a message and the value that its handler
        returned.

        An outcome that the handler raised, such as `Retry`, counts as returned. If the hook raises, the
        message has failed.
        """
        return self._middleware.add("after", hook)

    def error(self, hook: ErrorHook) -> ErrorHook:
        """Register the decorated function to be called with a message and the error that its handler, or
        another hook, raised. An error of its own is logged."""
        return self._middleware.add("error", hook)

    async def run(self, *, until_idle: bool = False, catch_signals: bool = True) -> None:
        """Work until `stop()`, SIGTERM or SIGINT. With `until_idle`, return when no message is left that can
        be received now, without the pauses of `min_interval`, and without waiting for delayed messages and
        retries.

        Signals are caught in the main thread only, for all workers and consumers that run there. The previous
        handlers are restored when the last of them ends; a handler that the program gave to its event loop is
        called as well. With `catch_signals=False`, signals are left to the program, such as a web server,
        which calls `stop()`.

        After a stop the worker receives no more messages and releases those that were not started. Running
        handlers have `shutdown_timeout` seconds to finish; one second later the worker gives up a statement
        that still waits for a lock or for the server. A second signal, half a second or more after the
        first, ends the worker at once: running handlers are left, and their messages are redelivered when
        their lease has expired.

        After a fault of the database the worker connects again, after a growing random pause, without limit.
        After a stop it tries for `shutdown_timeout` at most, if handlers run or outcomes are not reported,
        and a second more to release messages.

        Raises a PgqueError if trying again cannot help: PgqueVersionError, PgqueQueueNotFound,
        PgqueConsumerNotFound, PgquePermissionDenied; PgqueQueueInUse if the consumer reads on its own;
        PgqueBadArgument without a handler, unless `unknown_handler_policy` is "ack". Running handlers have
        `shutdown_timeout` seconds to finish then. Raises PgqueError while the object runs already, and after
        it was stopped.
        """
        self._handlers.check_any(self.unknown_handler_policy)
        check_until_idle(self, until_idle)
        self._liveness.check()
        with self._single.once():
            self._until_idle = until_idle
            self._is_idle = False
            self._catch_signals = catch_signals
            await self._run(catch_signals)

    async def _run(self, catch_signals: bool) -> None:
        async with self._stopper.running(catch_signals):
            try:
                await run_worker_async(AsyncWorker, self, self._run_here)
            except PgqueError as error:
                log.error(
                    "worker %s of queue %s ends: %s", self.worker, error.queue or self.queue, one_line(error)
                )
                raise

    def stop(self) -> None:
        """Make `run` finish its running handlers and return, for good; callable from any thread.

        After that, `run` raises PgqueError.
        """
        self._first_stopper.set()
        self._stopper.set()

    async def _run_here(self) -> None:
        """Run the handlers in this process."""
        self._pool = TaskPool(self.concurrency, self._handle)
        name = f"worker {self.worker} of queue {self.queue}"
        try:
            with kept(self.dsn, name, self._lease_seconds, self._leases, AsyncHeartbeat()):
                try:
                    await self._run_sessions()
                except PgqueError as error:
                    await self._finish_after(error)
                    raise
        except BaseException:
            # Cancelled, or an error: report the outcomes, and release the messages that were not started.
            self._release_queued()
            await self._pool.close()
            with suppress(PgqueError, psycopg.Error, HandlerInterrupted):
                await self._report_remaining()
            raise
        finally:
            self._pool.cancel_queued()
            await self._pool.close()

    def _leases(self) -> list[Batch[Message]]:
        return list(self._batches.values())

    async def _run_sessions(self) -> None:
        await self._run_sessions_to_end()
        running = sum(batch.unfinished for batch in self._batches.values() if not batch.lost)
        if self._stopper.is_abandoned and running:
            log.warning(
                "worker %s ends at the second signal: %s handlers are left, and their messages are"
                " redelivered when their lease of %g s has expired",
                self.worker,
                running,
                self._lease_seconds,
            )

    async def _run_sessions_to_end(self) -> None:
        while not self._is_done():
            with suppress(HandlerInterrupted):  # while it waited for a connection
                await keep_connected(
                    self._stopper,
                    self._session,
                    queue=self.queue,
                    consumer=self.consumer,
                    log=log,
                    is_done=self._is_done,
                )

    async def _finish_after(self, error: PgqueError) -> None:
        """Finish what is begun, as after a stop: handlers may run for queues that are not at fault."""
        self._stopper = AsyncStopper()
        self._stopper.set()
        try:
            if self._is_done():
                return
            log.error("worker %s finishes its running handlers, and ends: %s", self.worker, one_line(error))
            async with self._stopper.running(self._catch_signals):
                await self._run_sessions()
        except PgqueError as another:
            log.warning("worker %s cannot report its outcomes: %s", self.worker, one_line(another))
        finally:
            self._stopper = self._first_stopper

    async def _report_remaining(self) -> None:
        """Report the outcomes over a connection of its own."""
        self._collect()
        remaining = [batch for batch in self._batches.values() if batch.has_outcomes and not batch.lost]
        self._batches.clear()
        if remaining:
            stopper = AsyncStopper()
            stopper.set()
            client = await self._connect(stopper, _LAST_REPORT_TIMEOUT)
            try:
                with stopper.stop_deadline(client.conn, 2 * _LAST_REPORT_TIMEOUT):
                    await _report_and_receive(client, self.consumer, remaining, None, Message)
            finally:
                await client.close()

    async def _session(self, progress: Progress) -> None:
        """Work over one connection. Progress is made with the first step; the batches outlive the session."""
        client = await self._connect(self._stopper, self.shutdown_timeout)
        try:
            with self._stopper.stop_deadline(client.conn, self.shutdown_timeout + _LAST_REPORT_TIMEOUT):
                if not self._stopper.is_set():
                    await self._begin(client)
                while await self._step(client):
                    progress.made = True
                    if self._liveness.needs_answer:
                        await client._run("select 1")
                        self._liveness.note_answer()
                    self._liveness.give()
        finally:
            await client.close()

    async def _begin(self, client: AsyncPgqueClient) -> None:
        """Prepare a new connection for receiving."""
        client.conn.add_notify_handler(self._on_notify)
        for source in self._sources:
            source.settings = await listen(client, source.queue)
        for it in self._recurring:
            await client.create_recurring(
                it.name, it.queue, it.cron, it.event, timezone=it.timezone, catch_up=it.catch_up
            )
        self._sources.wake(None)
        # Not in one round trip with a receive: if this report is given up as the last one was, because its
        # commit waits for a standby, the server goes on with the receive and leases messages to nobody.
        self._collect()
        unreported = [batch for batch in self._batches.values() if batch.has_outcomes]
        if unreported:
            await _report_and_receive(client, self.consumer, unreported, None, Message)
            self._forget_finished()

    async def _connect(self, stopper: AsyncStopper, seconds: float) -> AsyncPgqueClient:
        """Connect; HandlerInterrupted if that takes longer than so many seconds after a stop."""
        name = f"pgque {self.queue}/{self.worker}"
        return await open_client_before(
            stopper,
            seconds,
            lambda: open_client(
                self.dsn,
                name,
                encoder=self.encoder,
                read_committed=True,
                command_timeout=self.command_timeout,
            ),
        )

    def _on_notify(self, notify: psycopg.Notify) -> None:
        self._sources.wake(queue_of(notify.channel))

    async def _step(self, client: AsyncPgqueClient) -> bool:
        """Report outcomes, and receive messages if there is room for them; without either, wait. Return False
        when all is done after a stop."""
        stopping = self._stopper.is_set()
        if stopping:
            self._release_queued()
        self._wake_at = _NEVER
        self._end_overdue()
        self._collect()
        for batch in list(self._batches.values()):
            await _extend_if_due(client, batch, self.visibility_timeout, _OVERDUE)
        now = time.monotonic()
        unfinished = sum(batch.unfinished for batch in self._batches.values() if not batch.lost)
        to_report = [
            batch
            for batch in self._batches.values()
            if batch.unfinished == 0 or stopping or now - batch.reported_at > _REPORT_INTERVAL
        ]
        for batch in to_report:
            if batch.has_outcomes:
                self._sources.wake(batch.queue)  # the next message of a key, or one that is released
        room = 0 if stopping else self._room(unfinished)
        source = self._sources.next(now) if room else None
        if source is not None:
            if await self._receive_from(client, source, room, to_report):
                return True
        elif any(batch.has_outcomes for batch in to_report):
            await _report_and_receive(client, self.consumer, to_report, None, Message)
        self._forget_finished()
        if stopping and self._is_over(unfinished):
            return False
        if not room or self._sources.next(now) is None:
            if self._until_idle and unfinished == 0 and not self._finished and self._sources.are_empty():
                self._is_idle = True
                return False
            await self._rest(client, unfinished, room)
        return True

    async def _receive_from(
        self, client: AsyncPgqueClient, source: Source, count: int, to_report: Sequence[Batch[Message]]
    ) -> bool:
        """Receive messages from a queue, at most `count`, and report the outcomes of batches. Return whether
        messages came."""
        now = time.monotonic()
        self._sources.note_asked(source, now)
        receive = _batches.receive(
            source.queue, self.consumer, self.worker, count, self.visibility_timeout, self.max_bytes
        )
        try:
            received = await _report_and_receive(
                client, self.consumer, to_report, receive, self._make_message
            )
        except PgqueError as error:
            error.queue = error.queue or source.queue  # the text of the server does not always name it
            raise
        self._liveness.note_answer()
        self._sources.note_received(source, len(received))
        self._forget_finished()
        if received:
            self._watches[source].reset()
            min_interval = 0 if self._until_idle else self.min_interval
            source.due_at = next_receive_at(now, min_interval, received, count)
            batch = self._batches[received[0].batch_id] = Batch(received, now)
            await _extend_if_due(client, batch, self.visibility_timeout)  # the call waited for a lock
            if self._stopper.is_set():  # while it was received
                batch.record(batch.open_messages(), RELEASE)
            else:
                self._pool.put([(batch, message) for message in received])
            if batch.queue != source.settings.name:  # it was renamed
                source.settings = await listen(client, source.queue)
        return bool(received)

    def _forget_finished(self) -> None:
        self._batches = {
            key: batch for key, batch in self._batches.items() if not (batch.is_finished or batch.lost)
        }

    async def _rest(self, client: AsyncPgqueClient, unfinished: int, room: int) -> None:
        """Wait until there is something to do."""
        stopping = self._stopper.is_set()
        wake_at = self._outcomes_to_wait_for(unfinished, room, stopping)
        self._wake_at = wake_at
        if len(self._finished) >= wake_at:
            return
        seconds = self._wait_time(room > 0)
        for channel in await _wait(self._stopper, client, seconds, stopping):
            self._sources.wake(queue_of(channel))
        if unfinished == 0 and not stopping:
            for watch in self._watches.values():
                await watch.check(client)

    def _room(self, unfinished: int) -> int:
        """Return how many messages to receive; 0 while there is no room, or too little to be worth a call."""
        if not self._is_ahead:
            return self._size if unfinished < self.concurrency and self._pool.queued() == 0 else 0
        room = min(self._size, self.concurrency - 1 + self._size - unfinished)
        return room if 2 * room >= self._size else 0

    def _outcomes_to_wait_for(self, unfinished: int, room: int, stopping: bool) -> int:
        """Return with how many outcomes of handlers at the earliest there is something to do: a batch to
        report, or room for messages."""
        if stopping:
            return 1
        counts = [batch.unfinished for batch in self._batches.values() if batch.unfinished > 0]
        if room == 0:
            limit = self.concurrency - 1 + (self._size // 2 if self._is_ahead else 0)
            counts.append(max(1, unfinished - limit))
        return min(counts, default=_NEVER)

    def _is_done(self) -> bool:
        """Return whether, after a stop, nothing is left to be reported, or no time is left for it; or nothing
        is left to be done."""
        if not self._stopper.is_set():
            return self._is_idle
        self._release_queued()
        self._collect()
        if self._stopper.stopped_for() > self.shutdown_timeout:
            return True
        return not any(batch.must_report for batch in self._batches.values() if not batch.lost)

    def _release_queued(self) -> None:
        for batch, message in self._pool.cancel_queued():
            self._finished.append((batch, message.msg_id, RELEASE))

    def _end_overdue(self) -> None:
        """Reject the messages whose handlers run for too long. Without a limit, log those that run for many
        leases, once."""
        limit = _LONG * self._lease_seconds
        if self.handler_timeout is not None:
            limit = _encode.total_seconds(self.handler_timeout)
        for key, running in list(self._running.items()):
            message = running.message
            seconds = time.monotonic() - running.since
            if seconds <= limit or running.is_logged:
                continue
            where = f"the handler of message {message.msg_id}, type {message.type!r}, queue {message.queue},"
            if self.handler_timeout is None:
                running.is_logged = True
                log.warning(
                    "%s has run for %.0f s, while its lease is extended: to limit this, set handler_timeout",
                    where,
                    seconds,
                )
            elif self._running.pop(key, None) is not None:  # else it has just returned
                reason = f"the handler ran longer than {limit:g} s (handler_timeout)"
                log.error("%s ran longer than %g s: the message is rejected", where, limit)
                outcome = MessageOutcome("nack", _encode.interval(self.retry_after), reason)
                self._finished.append((running.batch, message.msg_id, outcome))
                _telemetry.note_outcome(message, self.consumer, outcome.action)
                self._pool.abandon(running.place)

    def _collect(self) -> None:
        """Record the outcomes of handlers in their batches, and set the size of the next ones by how long
        these took."""
        while self._finished:
            batch, msg_id, outcome = self._finished.popleft()
            if outcome is None:
                continue
            batch.record([msg_id], outcome)
            if batch.unfinished == 0:
                took = time.monotonic() - batch.received_at
                if took < _QUICK_BATCH:
                    self._size = min(2 * self._size, self.prefetch)
                    self._is_ahead = self.min_interval == 0
                elif took > _SLOW_BATCH:
                    self._is_ahead = False
                    self._size = min(max(self._size // 2, self.concurrency), self.prefetch)

    def _is_over(self, unfinished: int) -> bool:
        """Return whether no handler runs any more. After `shutdown_timeout` the messages of those that do are
        released."""
        if unfinished == 0:
            return not any(batch.has_outcomes for batch in self._batches.values()) and not self._finished
        if self._stopper.is_abandoned:
            return True
        if self._stopper.stopped_for() < self.shutdown_timeout:
            return False
        log.warning("%s handlers did not finish in time, their messages are released", unfinished)
        for batch in self._batches.values():
            batch.record(batch.open_messages(), RELEASE)
        return False

    def _wait_time(self, has_room: bool) -> float:
        """Return how many seconds to wait for a notification."""
        now = time.monotonic()
        overdue = _OVERDUE * self._lease_seconds
        due = [batch.extended_at + overdue - now for batch in self._batches.values()]
        if has_room:
            due.append(self._sources.next_at() - now)
        if self._stopper.is_set():
            due.append(self.shutdown_timeout - self._stopper.stopped_for())
        return max(0.0, min([_POLL_INTERVAL, *due]))

    async def _handle(self, item: tuple[Batch[Message], Message]) -> None:
        """Run the handler of one message, in a thread or a task of the pool."""
        batch, message = item
        key = batch.batch_id, message.msg_id
        running: _Running | None = None
        # Of a task that the end of the worker cancels; and of a message that others may have by now, as the
        # database was away for longer than its lease.
        outcome: MessageOutcome | None = RELEASE
        try:
            if batch.lost:
                outcome = None
            elif batch.has_expired(self._lease_seconds):
                self._log_expired(batch)
            elif (handler := self._handlers.find(message)) is None:
                outcome = self._unhandled(message)
            else:
                running = self._running[key] = _Running(batch, message, self._pool.place())
                with _telemetry.handling(message, self.consumer):
                    returned = await self._middleware.call_async(handler, message)
                outcome = self._outcome(returned)
        except HandlerOutcome as raised:
            outcome = self._outcome(raised)
        except (Exception, SystemExit) as error:
            outcome = self._failed(message, error)
        except BaseException as error:
            if not self._pool.is_closing and (running is None or key in self._running):
                outcome = self._failed(message, error)
            raise
        finally:
            if running is None or self._running.pop(key, None) is not None:  # else it was rejected
                self._finished.append((batch, message.msg_id, outcome))
                _telemetry.note_outcome(message, self.consumer, "lost" if outcome is None else outcome.action)
                if len(self._finished) >= self._wake_at:
                    self._wake_at = _NEVER
                    self._stopper.wake()

    def _log_expired(self, batch: Batch[Message]) -> None:
        if not batch.expiry_logged:
            batch.expiry_logged = True
            log.warning(
                "batch %s: its lease of %g s expired before all of its messages were started;"
                " the others are released",
                batch.batch_id,
                self._lease_seconds,
            )

    def _unhandled(self, message: Message) -> MessageOutcome:
        reason = self._handlers.reject_reason(message, self.unknown_handler_policy)
        return ACK if reason is None else MessageOutcome("nack", _encode.interval(self.retry_after), reason)

    def _outcome(self, returned: object) -> MessageOutcome:
        success = ARCHIVE if self.archive else ACK
        return _batches.outcome_of(returned, success, _encode.interval(self.retry_after))

    def _failed(self, message: Message, error: BaseException) -> MessageOutcome:
        source = self._sources.of(message.queue)
        settings = QueueSettings(message.queue or self.queue) if source is None else source.settings
        is_bad = isinstance(error, PgquePayloadError)
        is_dead = is_bad and self.bad_payload == "dead"
        text = settings.failure_text(message, self.consumer, error, self.retry_after, True, is_dead)
        log.warning("%s", text, exc_info=not is_bad)  # a traceback might show the payload
        return _batches.failure_outcome(error, _encode.interval(self.retry_after), is_dead)


async def _wait(
    stopper: AsyncStopper, client: AsyncPgqueClient, seconds: float, draining: bool = False
) -> list[str]:
    try:
        return await stopper.wait(client.conn, seconds, draining)
    except psycopg.Error as error:
        raise from_psycopg(error) from error


async def _default_timeout(client: AsyncPgqueClient, queue: str) -> Seconds:
    """Return the visibility timeout that a queue is set to."""
    value = await client._maybe(
        timedelta,
        "select s.value::interval from pgque.queue_settings(%(queue)s::text) as s"
        " where s.setting = 'visibility_timeout'",
        {"queue": queue},
    )
    return value or timedelta(seconds=30)


async def _extend_if_due(
    client: AsyncPgqueClient, batch: Batch[M], visibility_timeout: Seconds, share: float = 0.5
) -> bool:
    """Extend the lease of a batch by the time that has passed, if that is this share of the visibility
    timeout. Return False when the batch is lost."""
    now = time.monotonic()
    if not batch.lost and now - batch.extended_at >= share * _encode.total_seconds(visibility_timeout):
        batch.note_extended(now, await client._maybe(int, *batch.extension(now)))
    return not batch.lost


async def _report_and_receive(
    client: AsyncPgqueClient,
    consumer: str | None,
    batches: Sequence[Batch[M]],
    receive: Statement | None,
    make: Callable[..., M],
) -> list[M]:
    """Report the outcomes of batches, and return the messages that `receive` returns."""
    reports = [statement for batch in batches for statement in batch.statements()]
    if receive is not None:
        operation, queue = "receive", str(receive[1]["queue"])
    else:
        operation, queue = "ack", ",".join(sorted({batch.queue or "" for batch in batches}))
    with _otel.timed(operation, queue, consumer):
        refused, received = await _round_trip(client, reports, receive, make)
    for batch in batches:
        batch.mark_reported()
    for msg_id, reason in refused:
        log.warning("the outcome of %s does not count: %s", msg_id or "a batch", reason)
    return received


async def _round_trip(
    client: AsyncPgqueClient, reports: Sequence[Statement], receive: Statement | None, make: Callable[..., M]
) -> tuple[list[Refused], list[M]]:
    """Report outcomes in one transaction and receive messages in another, in one round trip.

    So the lock under which messages are delivered is not held while the outcomes go to the disk.
    The connection has to be in autocommit mode; it is closed where an error or a cancellation leaves a
    transaction open.
    """
    conn = client.conn
    reported: list[AsyncCursor[Refused]] = []
    received: AsyncCursor[M] | None = None
    try:
        async with conn.pipeline():
            if reports and receive:
                await conn.execute("begin")
            for statement, given in reports:
                params = {
                    name: _encode.reason_text(str(value), conn) if name == "reason" else value
                    for name, value in given.items()
                }
                reported.append(await conn.cursor(row_factory=args_row(Refused)).execute(statement, params))
            if reports and receive:
                await conn.execute("commit")
            if receive:
                received = await reading(conn.cursor(row_factory=args_row(make))).execute(*receive)
        refused = [row for cursor in reported for row in await cursor.fetchall()]
        return refused, await received.fetchall() if received else []
    except BaseException as error:
        # Perhaps between begin and commit.
        if conn.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
            await conn.close()
        if isinstance(error, psycopg.Error):
            raise from_psycopg(error) from error
        raise
