"""Work queues: many workers share the messages of one consumer, and each message has an outcome of its own.

`workers.py` is generated from `workers_async.py` by `tools/make_sync.py`; edit the async file.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Literal, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncCursor
from psycopg.rows import args_row

from . import _encode, _otel, _work
from ._decode import reading
from ._hands import (
    AsyncHands,
    AsyncLock,
    Unmatched,
    call_async,
    check_async_handler,
    check_some,
    check_type,
    serve_async,
)
from ._retry import FIRST_PAUSE
from ._stopper import AsyncStopper, HandlerInterrupted
from ._work import Batch, Call, QueueSettings, Refused, Verdict
from .client_async import AsyncPgqueClient
from .consumer_async import TickWatch, keep_connected, listen
from .errors import PgqueError, from_psycopg, is_permanent, one_line
from .outcomes import HandlerOutcome, retry_interval
from .types import Event, Message, Payload, Seconds

AsyncWorkHandler: TypeAlias = Callable[[Message], Awaitable[object]]
H = TypeVar("H", bound=AsyncWorkHandler)
M = TypeVar("M", bound=Message)

log = logging.getLogger("pgque.worker")

# Retries and lapsed messages are not announced, so the queue is looked at this often, in seconds.
_LONGEST_WAIT = 1.0

# Outcomes of a batch that is not finished are told to the server after so many seconds.
_LONGEST_SECRET = 1.0

# Seconds beyond the end in which the server has to answer what it is told last.
_LAST_WORD = 1.0

# Batches that are handled within the first grow up to the worker's `prefetch`; those that take longer than
# the second shrink.
_QUICK, _SLOW = 0.2, 1.0

_ACK = Verdict("ack")
_ARCHIVE = Verdict("archive")
_RELEASE = Verdict("release")


@dataclass(slots=True, eq=False)
class _Hold:
    """Lead from a message to the batch that it came in."""

    queue: AsyncWorkQueue
    batch: Batch[AsyncWorkMessage] | None = None
    waiting: list[int] = field(default_factory=list)  # ids of what was not given yet

    def message(self, *row: object) -> AsyncWorkMessage:
        return AsyncWorkMessage(*row, self)  # type: ignore[arg-type, call-arg]


@dataclass(frozen=True, slots=True)
class AsyncWorkMessage(Message):
    """Hold a message that `AsyncWorkQueue.messages` gave, with its possible outcomes.

    Each outcome is told to the server at once, and returns whether it counts: False when the message has an
    outcome already, or was lost because its visibility timeout had passed.
    """

    _hold: _Hold | None = field(default=None, repr=False, compare=False)

    async def ack(self) -> bool:
        """Say that the message is done. Calls `pgque.ack`."""
        return await self._settle(_ACK)

    async def archive(self) -> bool:
        """Say that the message is done, and keep it in the archive. Calls `pgque.archive`."""
        return await self._settle(_ARCHIVE)

    async def nack(self, after: Seconds | None = None, reason: str | None = None) -> bool:
        """Have the message come again after so many seconds; None leaves that to the queue. Calls
        `pgque.nack`. Raises PgqueBadArgument for a negative length of time, or one over ten years."""
        return await self._settle(Verdict("nack", retry_interval(after), reason))

    async def dead(self, reason: str | None = None) -> bool:
        """Give the message up, without more retries. Calls `pgque.dead`."""
        return await self._settle(Verdict("dead", None, reason))

    async def release(self) -> bool:
        """Hand the message back for any worker, at once. Calls `pgque.release`."""
        return await self._settle(_RELEASE)

    async def extend(self, seconds: Seconds) -> bool:
        """Hide the messages of this batch for so many seconds more; False when they are lost. Calls
        `pgque.extend`."""
        if self._hold is None:
            raise PgqueError("this message was not received from a work queue")
        return await self._hold.queue._extend(self.batch_id, seconds)

    async def _settle(self, verdict: Verdict) -> bool:
        if self._hold is None or self._hold.batch is None:
            raise PgqueError("this message was not received from a work queue")
        return await self._hold.queue._settle(self._hold.batch, self.msg_id, verdict)


class AsyncWorkQueue:
    """Send to a queue, and take its messages one at a time.

        async with AsyncWorkQueue(dsn, "emails", consumer="mailers") as queue:
            await queue.send({"to": "ann@example.com"})
            async for message in queue.messages():
                ...

    It opens a connection of its own when it is first used, in which each call is a transaction, and again
    after that connection was lost. It is for one thread or task at a time.

    Args:
        dsn: connection string or URL; PG* environment variables fill in what is missing.
        queue: name or `queue_uid` of the queue.
        consumer: name of the consumer, which must be subscribed; not needed for sending.
    """

    def __init__(self, dsn: str = "", queue: str = "", *, consumer: str | None = None) -> None:
        if not queue:
            raise ValueError("a work queue needs the name of its queue")
        self.dsn = dsn
        self.queue = queue
        self.consumer = consumer
        self._client: AsyncPgqueClient | None = None
        self._listening: AsyncPgqueClient | None = None
        self._notified = False
        self._stopper = AsyncStopper()
        # Of the connection: a loop that was left by `break` is closed by asyncio, in a task of its own.
        self._lock = AsyncLock()
        self._holds: set[_Hold] = set()  # of the loops that stand at a message

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
        """Hand back what `messages` received and did not give, and close the connection."""
        if self._client is not None:
            for hold in list(self._holds):
                await self._hand_back(hold)
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
        type: str = "default",
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
                type,
                payloads,
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
    ) -> AsyncGenerator[AsyncWorkMessage, None]:
        """Give messages one at a time, as they come. Calls `pgque.receive`.

        A message is acked when the next one is asked for, unless an outcome was chosen for it: `ack`,
        `nack`, `dead`, `release` or `archive`. These acks are told to the server together, after a second
        or at the end of a batch. A loop that is left by `break` or an exception does not ack its last
        message, which comes again when its visibility timeout has passed; messages that were received but
        not given yet are handed back then.

        The visibility timeout is extended between messages; for one that may take longer than that
        call its `extend`.

        Args:
            worker: name of this worker; without it one that no other has.
            max_messages: most messages received in one call.
            visibility_timeout: seconds until messages that are not settled go to others; None is the
                queue's setting.
            timeout: seconds without a message after which the loop ends; None waits for ever, 0 ends it
                when the queue is empty.

        Raises PgqueQueueNotFound, PgqueConsumerNotFound, PgqueConnectionError; another call connects again.
        """
        if self.consumer is None:
            raise ValueError("to receive, a work queue needs the name of its consumer")
        name = worker or _work.worker_name()
        async with self._lock:
            client = await self._listen()
            if visibility_timeout is None:
                visibility_timeout = await _default_timeout(client, self.queue)
        waiting_since = time.monotonic()
        hold: _Hold | None = None
        try:
            while True:
                following = _Hold(self)
                taking = _work.take(self.queue, self.consumer, name, max_messages, visibility_timeout)
                async with self._lock:
                    asked_at = time.monotonic()
                    self._notified = False
                    batches = [hold.batch] if hold is not None and hold.batch is not None else []
                    taken = await _tell(client, batches, taking, following.message)
                    self._holds.discard(hold)
                    hold = None
                    if not taken:
                        patience = _LONGEST_WAIT
                        if timeout is not None:
                            patience = min(patience, waiting_since + timeout - time.monotonic())
                        if patience <= 0:
                            return
                        if not self._notified:
                            await _wait(self._stopper, client, patience)
                        continue
                hold = following
                batch = hold.batch = Batch(taken, asked_at)
                hold.waiting = [message.msg_id for message in reversed(taken)]
                self._holds.add(hold)
                for message in taken:
                    async with self._lock:
                        if not await _extended(client, batch, visibility_timeout):
                            break
                    hold.waiting.pop()
                    yield message
                    if batch.holds(message.msg_id):
                        batch.decide([message.msg_id], _ACK)
                    if time.monotonic() - batch.told_at > _LONGEST_SECRET:
                        async with self._lock:
                            await _tell(client, [batch], None, hold.message)
                waiting_since = time.monotonic()
        except BaseException:  # GeneratorExit too
            if hold is not None:
                await self._hand_back(hold)
            raise

    async def _hand_back(self, hold: _Hold) -> None:
        """Tell what is known of a batch, and release what was not given; once. Connects again if that is
        needed."""
        async with self._lock:
            if hold not in self._holds or hold.batch is None:
                return
            hold.batch.decide(hold.waiting, _RELEASE)
            try:
                if hold.batch.has_verdicts:
                    client = await self._connected()
                    stopper = AsyncStopper()
                    stopper.set()
                    with stopper.breaking(client.conn, _LAST_WORD):  # a lock may keep it for any time
                        await _tell(client, [hold.batch], None, hold.message)
            except PgqueError as error:
                log.warning("batch %s could not be handed back: %s", hold.batch.batch_id, one_line(error))
                if self._client is not None:
                    await self._client.close()  # it may be broken
            finally:
                self._holds.discard(hold)

    async def _connected(self) -> AsyncPgqueClient:
        if self._client is None or self._client.conn.closed:
            name = f"pgque {self.queue}/{self.consumer}" if self.consumer else f"pgque {self.queue}"
            self._client = await AsyncPgqueClient.connect(_encode.watchful(self.dsn, name), autocommit=True)
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

    async def _settle(self, batch: Batch[AsyncWorkMessage], msg_id: int, verdict: Verdict) -> bool:
        if not batch.holds(msg_id):
            return False
        async with self._lock:
            client = await self._connected()
            refused, _ = await _trip(client, [_work.settle(batch.batch_id, verdict, [msg_id])], None, Message)
            batch.drop(msg_id, verdict)
        return not refused

    async def _extend(self, batch_id: int, seconds: Seconds) -> bool:
        async with self._lock:
            client = await self._connected()
            return await client.extend(batch_id, seconds) > 0


class AsyncWorker:
    """Feed the messages of a queue to handlers, several at a time.

        worker = AsyncWorker(dsn, queue="emails", consumer="mailers", concurrency=8)

        @worker.handler("welcome")
        async def welcome(message): ...

        await worker.run()

    A handler that returns acks its message. One that raises gets it back, with the text of the error as the
    reason, after `retry_after` seconds; when the queue's attempts are used up it goes the way of the
    queue's `drop_policy`. A handler may also return or raise `Retry(after=…)`, `Dead(…)` or `Release()`.

    A message is hidden from other workers while its handler runs, however long that takes: the visibility
    timeout is extended every half of it. Only when this process dies or loses the database for so long
    do others get it; messages that it received and did not start by then it does not start. No transaction
    is open while a handler runs, and a message may come twice.

    Any number of workers may share a consumer, in any number of processes and machines.

    Args:
        dsn: connection string or URL; PG* environment variables fill in what is missing.
        queue: name or `queue_uid` of the queue.
        consumer: name of the consumer, which must be subscribed to the queue.
        concurrency: how many handlers run at a time.
        use: "tasks".
        prefetch: most messages received in one call. It starts with `concurrency`, and grows up to this
            for as long as messages are handled in no time.
        min_interval: least seconds from the receive of one batch to the next receive, up to a day: larger
            batches, more latency. A full batch is followed at once. Outcomes do not wait for the pause
            to end.
        visibility_timeout: seconds.
        retry_after: seconds until a failed message comes again; None leaves that to the queue.
        archive: whether messages that are done go to the archive.
        unknown_handler_policy: what to do with a type that has no handler, "nack" or "ack".
        worker: name of this worker; without it one that no other has.
        shutdown_timeout: seconds that handlers have to finish after a stop.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        queue: str,
        consumer: str,
        concurrency: int = 4,
        use: Literal["tasks"] = "tasks",
        prefetch: int = 20,
        min_interval: float = 0,
        visibility_timeout: Seconds = 30,
        retry_after: Seconds | None = None,
        archive: bool = False,
        unknown_handler_policy: Literal["nack", "ack"] = "nack",
        worker: str | None = None,
        shutdown_timeout: float = 30,
    ) -> None:
        if unknown_handler_policy not in ("nack", "ack"):
            raise ValueError(
                f"unknown_handler_policy must be 'nack' or 'ack', not {unknown_handler_policy!r}"
            )
        if concurrency < 1 or prefetch < 1:
            raise ValueError("concurrency and prefetch must be at least 1")
        if _work.seconds(visibility_timeout) <= 0:
            raise ValueError("visibility_timeout must be more than 0 seconds")
        _work.check_min_interval(min_interval)
        retry_interval(retry_after, "retry_after")
        self.dsn = dsn
        self.queue = queue
        self.consumer = consumer
        self.concurrency = concurrency
        self.use = use
        self.prefetch = prefetch
        self.min_interval = min_interval
        self.visibility_timeout = visibility_timeout
        self.retry_after = retry_after
        self.archive = archive
        self.unknown_handler_policy = unknown_handler_policy
        self.worker = worker or _work.worker_name()
        self.shutdown_timeout = shutdown_timeout
        self._handlers: dict[str, AsyncWorkHandler] = {}
        self._unmatched = Unmatched(log, consumer, self._handlers)
        self._settings = QueueSettings(queue)
        self._watch = TickWatch(queue, log)
        self._stopper = AsyncStopper()
        self._notified = False
        self._size = min(concurrency, prefetch)
        self._due_at = 0.0  # the earliest time of the next receive, by the monotonic clock
        self._batches: dict[int, Batch[Message]] = {}
        # What the hands have to say; only the one who runs the session reads it.
        self._finished: deque[tuple[Batch[Message], int, Verdict | None]] = deque()

    def handler(self, type: str) -> Callable[[H], H]:
        """Register the decorated function as the handler of a message type; "*" takes all types without
        one. Raises TypeError for what cannot be a handler."""
        check_type(type, "@worker.handler")

        def register(handler: H) -> H:
            check_async_handler(handler, "Worker")
            self._handlers[type] = handler
            return handler

        return register

    async def run(self) -> None:
        """Work until `stop()`, SIGTERM or SIGINT.

        The signals are caught in the main thread only, for all that run there, and their handlers put back
        when the last of them ends; a handler that the program gave to its event loop is called as well. Then
        no more messages are taken, those that were not started are handed back, and handlers that run have
        `shutdown_timeout` seconds to finish.

        After a fault of the database the worker connects again, after a growing random pause, for as long
        as it takes; after a stop for as long as handlers run or have done what was not told yet, and no
        longer than `shutdown_timeout`, and a second to hand messages back. Raises a PgqueError where trying
        again cannot help: PgqueVersionError, PgqueQueueNotFound, PgqueConsumerNotFound, a missing right;
        PgqueQueueInUse where the consumer reads on its own; PgqueBadArgument without a handler, unless
        `unknown_handler_policy` is "ack".
        """
        check_some(self._handlers, self.unknown_handler_policy, "@worker.handler")
        async with self._stopper.running():
            try:
                await serve_async(self, self._serve)
            except PgqueError as error:
                log.error("worker %s of queue %s ends: %s", self.worker, self.queue, one_line(error))
                raise

    def stop(self) -> None:
        """Make `run` finish what is begun and return, for good; callable from any thread."""
        self._stopper.set()

    async def _serve(self) -> None:
        self._hands = AsyncHands(self.concurrency, self._handle)
        try:
            while not self._is_done():
                with suppress(HandlerInterrupted):  # it waited for a connection
                    await keep_connected(self._stopper, self._session, self._is_done)
        except BaseException:
            # Cancelled, or an error: tell what is known, and hand back what was not started.
            self._hand_back()
            await self._hands.close()
            with suppress(PgqueError, psycopg.Error, HandlerInterrupted):
                await self._tell_rest()
            raise
        finally:
            self._hands.take_back()
            await self._hands.close()

    async def _tell_rest(self) -> None:
        """Tell the server what is known, over a connection of its own."""
        self._collect()
        told = [batch for batch in self._batches.values() if batch.has_verdicts and not batch.lost]
        self._batches.clear()
        if told:
            stopper = AsyncStopper()
            stopper.set()
            client = await self._connect(stopper, _LAST_WORD)
            try:
                with stopper.breaking(client.conn, 2 * _LAST_WORD):
                    await _tell(client, told, None, Message)
            finally:
                await client.close()

    async def _session(self) -> None:
        """Work over one connection.

        A fault before the first answer is raised; a later one ends the session, so that the pauses start
        small again. What is in hand stays in hand.
        """
        worked = False
        client: AsyncPgqueClient | None = None
        try:
            client = await self._connect(self._stopper, self.shutdown_timeout)
            with self._stopper.breaking(client.conn, self.shutdown_timeout + _LAST_WORD):
                client.conn.add_notify_handler(self._on_notify)
                self._settings = await listen(client, self.queue)
                while await self._step(client):
                    worked = True
        except (PgqueError, psycopg.Error) as fault:
            error = fault if isinstance(fault, PgqueError) else from_psycopg(fault, self.queue)
            if not worked or is_permanent(error):
                if error is fault:
                    raise
                raise error from fault
            log.warning("lost the database, connecting again: %s", one_line(error))
            await self._stopper.rest(random.uniform(0, FIRST_PAUSE))  # noqa: S311
        finally:
            if client is not None:
                await client.close()

    async def _connect(self, stopper: AsyncStopper, seconds: float) -> AsyncPgqueClient:
        """Connect; HandlerInterrupted if that takes longer than so many seconds after a stop."""
        found: list[AsyncPgqueClient] = []
        given_up = False

        async def connect() -> None:
            dsn = _encode.watchful(self.dsn, f"pgque {self.queue}/{self.worker}")
            found.append(await AsyncPgqueClient.connect(dsn, autocommit=True))
            if given_up:
                await found[0].close()

        try:
            await stopper.give_up_after(seconds, connect)
        except BaseException:
            given_up = True
            raise
        return found[0]

    def _on_notify(self, notify: psycopg.Notify) -> None:
        self._notified = True

    async def _step(self, client: AsyncPgqueClient) -> bool:
        """Tell the server what is known, take more messages if a hand is free, or else wait. False when
        all is done after a stop."""
        stopping = self._stopper.is_set()
        if stopping:
            self._hand_back()
        self._collect()
        for batch in list(self._batches.values()):
            await _extended(client, batch, self.visibility_timeout)
        now = time.monotonic()
        unfinished = sum(batch.unfinished for batch in self._batches.values() if not batch.lost)
        has_room = unfinished < self.concurrency and self._hands.waiting() == 0
        takes = has_room and not stopping and now >= self._due_at
        told = [
            batch
            for batch in self._batches.values()
            if batch.unfinished == 0 or stopping or now - batch.told_at > _LONGEST_SECRET
        ]
        taken: list[Message] = []
        self._notified = False
        if takes or any(batch.has_verdicts for batch in told):
            taking = None
            if takes:
                taking = _work.take(
                    self.queue, self.consumer, self.worker, self._size, self.visibility_timeout
                )
            taken = await _tell(client, told, taking, Message)
        self._batches = {
            key: batch for key, batch in self._batches.items() if not (batch.is_settled or batch.lost)
        }
        if taken:
            self._watch.reset()
            self._due_at = _work.due_after(now, self.min_interval, len(taken), self._size)
            batch = self._batches[taken[0].batch_id] = Batch(taken, now)
            for message in taken:
                self._hands.put((batch, message))
            return True
        if stopping and self._is_over(unfinished):
            return False
        if not self._finished and not (takes and self._notified):
            await _wait(self._stopper, client, self._patience(now), stopping)
            if unfinished == 0 and not stopping:
                await self._watch.check(client)
        return True

    def _is_done(self) -> bool:
        """Say whether, after a stop, the server need not be told any more, or not in time."""
        if not self._stopper.is_set():
            return False
        self._hand_back()
        self._collect()
        if self._stopper.stopped_for() > self.shutdown_timeout:
            return True
        return not any(batch.is_owed for batch in self._batches.values() if not batch.lost)

    def _hand_back(self) -> None:
        for batch, message in self._hands.take_back():
            self._finished.append((batch, message.msg_id, _RELEASE))

    def _collect(self) -> None:
        """Take what the hands have to say into the batches, and learn from how long these took."""
        while self._finished:
            batch, msg_id, verdict = self._finished.popleft()
            if verdict is None:
                continue
            batch.decide([msg_id], verdict)
            if batch.unfinished == 0:
                took = time.monotonic() - batch.received_at
                if took < _QUICK:
                    self._size = min(2 * self._size, self.prefetch)
                elif took > _SLOW:
                    self._size = min(max(self._size // 2, self.concurrency), self.prefetch)

    def _is_over(self, unfinished: int) -> bool:
        """Say whether nothing runs any more, or ran for too long after a stop; then it is handed back."""
        if unfinished == 0:
            return not any(batch.has_verdicts for batch in self._batches.values()) and not self._finished
        if self._stopper.stopped_for() < self.shutdown_timeout:
            return False
        log.warning("%s handlers did not finish in time, their messages are handed back", unfinished)
        for batch in self._batches.values():
            batch.decide(batch.undecided(), _RELEASE)
        return False

    def _patience(self, now: float) -> float:
        """Return how many seconds may be waited for news after a step that began at `now`."""
        half = _work.seconds(self.visibility_timeout) / 2
        due = [batch.extended_at + half - time.monotonic() for batch in self._batches.values()]
        if now < self._due_at:
            due.append(self._due_at - time.monotonic())
        if self._stopper.is_set():
            due.append(self.shutdown_timeout - self._stopper.stopped_for())
        return max(0.0, min([_LONGEST_WAIT, *due]))

    async def _handle(self, item: tuple[Batch[Message], Message]) -> None:
        """Run the handler of one message, in one of the hands."""
        batch, message = item
        # Of a task that the end of the worker cancels; and of a message that others may have by now, as the
        # database was away for longer than its lease.
        verdict: Verdict | None = _RELEASE
        try:
            if batch.lost:
                verdict = None
            elif not batch.has_expired(self.visibility_timeout):
                verdict = await self._verdict(message)
            elif not batch.expiry_logged:
                batch.expiry_logged = True
                log.warning(
                    "batch %s: the visibility timeout of %g s passed before all of its messages were"
                    " started; those that were not are handed back",
                    batch.batch_id,
                    _work.seconds(self.visibility_timeout),
                )
        except Exception as error:
            verdict = self._failed(message, error)
        except BaseException as error:
            if not self._hands.is_closing:
                verdict = self._failed(message, error)
            raise
        finally:
            self._finished.append((batch, message.msg_id, verdict))
            if self._hands.waiting() == 0:
                self._stopper.wake()

    async def _verdict(self, message: Message) -> Verdict:
        retry_after = _encode.interval(self.retry_after)
        success = _ARCHIVE if self.archive else _ACK
        handler = self._handlers.get(message.type or "", self._handlers.get("*"))
        if handler is None:
            what = "they are acknowledged" if self.unknown_handler_policy == "ack" else "they are rejected"
            self._unmatched.note(message, what)
            if self.unknown_handler_policy == "ack":
                return _ACK
            return Verdict("nack", retry_after, f"no handler for type {message.type!r}")
        try:
            with _otel.handling(message, self.consumer):
                outcome = await call_async(handler, message)
        except HandlerOutcome as raised:
            outcome = raised
        except SystemExit as error:
            return self._failed(message, error)
        return _work.verdict_of(outcome, success, retry_after)

    def _failed(self, message: Message, error: BaseException) -> Verdict:
        log.warning(
            "%s", self._settings.failure(message, self.consumer, error, self.retry_after, True), exc_info=True
        )
        return _work.failure(error, _encode.interval(self.retry_after))


async def _wait(
    stopper: AsyncStopper, client: AsyncPgqueClient, seconds: float, draining: bool = False
) -> None:
    try:
        await stopper.wait(client.conn, seconds, draining)
    except psycopg.Error as error:
        raise from_psycopg(error) from error


async def _default_timeout(client: AsyncPgqueClient, queue: str) -> Seconds:
    """Return the visibility timeout that a queue is set to."""
    value = await client._maybe(
        timedelta,
        "select s.param_value::interval from pgque.queue_config(%(queue)s::text) as s"
        " where s.param_name = 'visibility_timeout'",
        {"queue": queue},
    )
    return value or timedelta(seconds=30)


async def _extended(client: AsyncPgqueClient, batch: Batch[M], visibility_timeout: Seconds) -> bool:
    """Add to the deadline of a batch what has passed, if that is half the visibility timeout. False when the
    batch is lost."""
    now = time.monotonic()
    passed = now - batch.extended_at
    if batch.lost or passed < _work.seconds(visibility_timeout) / 2:
        return not batch.lost
    held = await client._maybe(int, *_work.extend(batch.batch_id, passed))
    batch.lost = not held
    batch.extended_at = now
    if batch.lost:
        log.warning("batch %s was lost: its visibility timeout had passed", batch.batch_id)
    return not batch.lost


async def _tell(
    client: AsyncPgqueClient, batches: Sequence[Batch[M]], taking: Call | None, make: Callable[..., M]
) -> list[M]:
    """Tell the server what is known of batches, and take messages."""
    calls = [call for batch in batches for call in batch.calls()]
    refused, taken = await _trip(client, calls, taking, make)
    for batch in batches:
        batch.told()
    for msg_id, reason in refused:
        log.warning("the outcome of %s does not count: %s", msg_id or "a batch", reason)
    return taken


async def _trip(
    client: AsyncPgqueClient, calls: Sequence[Call], taking: Call | None, make: Callable[..., M]
) -> tuple[list[Refused], list[M]]:
    """Settle in one transaction and take messages in another, in one round trip.

    So that the lock under which messages are handed out is not held while the outcomes go to the disk.
    The connection has to be in autocommit mode; it is closed where an error or a cancellation leaves a
    transaction open.
    """
    conn = client.conn
    told: list[AsyncCursor[Refused]] = []
    taken: AsyncCursor[M] | None = None
    try:
        async with conn.pipeline():
            if calls and taking:
                await conn.execute("begin")
            for statement, given in calls:
                params = {
                    name: _encode.reason_text(str(value), conn) if name == "reason" else value
                    for name, value in given.items()
                }
                told.append(await conn.cursor(row_factory=args_row(Refused)).execute(statement, params))
            if calls and taking:
                await conn.execute("commit")
            if taking:
                taken = await reading(conn.cursor(row_factory=args_row(make))).execute(*taking)
        refused = [row for cursor in told for row in await cursor.fetchall()]
        return refused, await taken.fetchall() if taken else []
    except BaseException as error:
        # Perhaps between begin and commit.
        if conn.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
            await conn.close()
        if isinstance(error, psycopg.Error):
            raise from_psycopg(error) from error
        raise
