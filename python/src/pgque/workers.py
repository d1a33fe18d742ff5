# Generated from workers_async.py by tools/make_sync.py: edit that file and run the script again.
"""Work queues: many workers share the messages of one consumer, and each message has an outcome of its own.

`workers.py` is generated from `workers_async.py` by `tools/make_sync.py`; edit the async file.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Literal, TypeAlias, TypeVar

import psycopg
from psycopg import Cursor
from psycopg.rows import args_row

from . import _batches, _encode, _otel
from ._batches import Batch, MessageOutcome, Refused, Statement
from ._concurrency import Lock, ThreadPool, run_worker
from ._connection import Progress, keep_connected, open_client
from ._decode import reading
from ._handlers import Handlers, call, check_handler
from ._listen import TickWatch, listen
from ._min_interval import check_min_interval, next_receive_at
from ._queue_settings import QueueSettings
from ._stopper import Stopper, HandlerInterrupted
from .client import PgqueClient
from .errors import PgqueError, from_psycopg, one_line
from .outcomes import HandlerOutcome, retry_interval
from .types import Event, Message, Payload, Seconds

WorkHandler: TypeAlias = Callable[[Message], object]
H = TypeVar("H", bound=WorkHandler)
M = TypeVar("M", bound=Message)

log = logging.getLogger("pgque.worker")

# Expired leases are not notified, so the queue is polled this often, in seconds.
_POLL_INTERVAL = 1.0

# Outcomes of a batch that is not finished are reported after so many seconds.
_REPORT_INTERVAL = 1.0

# Seconds beyond the time of a stop in which the server has to answer the last report.
_LAST_REPORT_TIMEOUT = 1.0

# In seconds: batches that are handled within the first grow up to the worker's `prefetch`; those that take
# longer than the second shrink.
_QUICK_BATCH, _SLOW_BATCH = 0.2, 1.0

_ACK = MessageOutcome("ack")
_ARCHIVE = MessageOutcome("archive")
_RELEASE = MessageOutcome("release")


@dataclass(slots=True, eq=False)
class _Delivery:
    """A batch that a loop over messages received, which each of its messages refers to."""

    queue: WorkQueue
    batch: Batch[WorkMessage] | None = None
    undelivered: list[int] = field(default_factory=list)  # ids of messages the loop has not yielded

    def message(self, *row: object) -> WorkMessage:
        return WorkMessage(*row, self)  # type: ignore[arg-type, call-arg]


@dataclass(frozen=True, slots=True)
class WorkMessage(Message):
    """Hold a message that `WorkQueue.messages` gave, with its possible outcomes.

    Each outcome is reported to the server at once, and returns whether it counts: False when the message has
    an outcome already, or was lost because its visibility timeout had passed.
    """

    _delivery: _Delivery | None = field(default=None, repr=False, compare=False)

    def ack(self) -> bool:
        """Say that the message is done. Calls `pgque.ack`."""
        return self._report(_ACK)

    def archive(self) -> bool:
        """Say that the message is done, and keep it in the archive. Calls `pgque.archive`."""
        return self._report(_ARCHIVE)

    def nack(self, after: Seconds | None = None, reason: str | None = None) -> bool:
        """Have the message come again after so many seconds; None leaves that to the queue. Calls
        `pgque.nack`. Raises PgqueBadArgument for a negative length of time, or one over ten years."""
        return self._report(MessageOutcome("nack", retry_interval(after), reason))

    def dead(self, reason: str | None = None) -> bool:
        """Give the message up, without more retries. Calls `pgque.dead`."""
        return self._report(MessageOutcome("dead", None, reason))

    def release(self) -> bool:
        """Hand the message back for any worker, at once. Calls `pgque.release`."""
        return self._report(_RELEASE)

    def extend(self, seconds: Seconds) -> bool:
        """Hide the messages of this batch for so many seconds more; False when they are lost. Calls
        `pgque.extend`."""
        if self._delivery is None:
            raise PgqueError("this message was not received from a work queue")
        return self._delivery.queue._extend(self.batch_id, seconds)

    def _report(self, outcome: MessageOutcome) -> bool:
        if self._delivery is None or self._delivery.batch is None:
            raise PgqueError("this message was not received from a work queue")
        return self._delivery.queue._report(self._delivery.batch, self.msg_id, outcome)


class WorkQueue:
    """Send to a queue, and take its messages one at a time.

        with WorkQueue(dsn, "emails", consumer="mailers") as queue:
            queue.send({"to": "ann@example.com"})
            for message in queue.messages():
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
        self._client: PgqueClient | None = None
        self._listening: PgqueClient | None = None
        self._notified = False
        self._stopper = Stopper()
        # Of the connection: a loop that was left by `break` is closed by asyncio, in a task of its own.
        self._lock = Lock()
        self._deliveries: set[_Delivery] = set()  # of the loops that stand at a message

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hand back what `messages` received and did not give, and close the connection."""
        if self._client is not None:
            for delivery in list(self._deliveries):
                self._end_delivery(delivery)
            self._client.close()

    def send(
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
        """Send one message and return its id; see `PgqueClient.send`. Calls `pgque.send`."""
        with self._lock:
            client = self._connected()
            return client.send(
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

    def send_batch(
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
        """Send many messages, all or none, and return their ids; see `PgqueClient.send_batch`. Calls
        `pgque.send_batch`."""
        with self._lock:
            client = self._connected()
            return client.send_batch(
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

    def messages(
        self,
        *,
        worker: str | None = None,
        max_messages: int = 10,
        visibility_timeout: Seconds | None = None,
        timeout: float | None = None,
    ) -> Generator[WorkMessage, None, None]:
        """Give messages one at a time, as they come. Calls `pgque.receive`.

        A message is acked when the next one is asked for, unless an outcome was chosen for it: `ack`,
        `nack`, `dead`, `release` or `archive`. These acks are reported together, after a second or
        at the end of a batch. A loop that is left by `break` or an exception does not ack its last
        message, which comes again when its visibility timeout has passed; messages that were received but
        not given yet are released then.

        The visibility timeout is extended between messages; for one that may take longer than that
        call its `extend`.

        Args:
            worker: name of this worker; without it one that no other has.
            max_messages: most messages received in one call.
            visibility_timeout: seconds until messages without an outcome go to others; None is the
                queue's setting.
            timeout: seconds without a message after which the loop ends; None waits for ever, 0 ends it
                when the queue is empty.

        Raises PgqueQueueNotFound, PgqueConsumerNotFound, PgqueConnectionError; another call connects again.
        """
        if self.consumer is None:
            raise ValueError("to receive, a work queue needs the name of its consumer")
        name = worker or _batches.worker_name()
        with self._lock:
            client = self._listen()
            if visibility_timeout is None:
                visibility_timeout = _default_timeout(client, self.queue)
        waiting_since = time.monotonic()
        delivery: _Delivery | None = None
        try:
            while True:
                following = _Delivery(self)
                receive = _batches.receive(self.queue, self.consumer, name, max_messages, visibility_timeout)
                with self._lock:
                    asked_at = time.monotonic()
                    self._notified = False
                    finished = [delivery.batch] if delivery is not None and delivery.batch is not None else []
                    received = _report_and_receive(client, finished, receive, following.message)
                    self._deliveries.discard(delivery)
                    delivery = None
                    if not received:
                        pause = _POLL_INTERVAL
                        if timeout is not None:
                            pause = min(pause, waiting_since + timeout - time.monotonic())
                        if pause <= 0:
                            return
                        if not self._notified:
                            _wait(self._stopper, client, pause)
                        continue
                delivery = following
                batch = delivery.batch = Batch(received, asked_at)
                delivery.undelivered = [message.msg_id for message in reversed(received)]
                self._deliveries.add(delivery)
                for message in received:
                    with self._lock:
                        if not _extend_if_due(client, batch, visibility_timeout):
                            break
                    delivery.undelivered.pop()
                    yield message
                    if batch.is_open(message.msg_id):
                        batch.record([message.msg_id], _ACK)
                    if time.monotonic() - batch.reported_at > _REPORT_INTERVAL:
                        with self._lock:
                            _report_and_receive(client, [batch], None, delivery.message)
                waiting_since = time.monotonic()
        except BaseException:  # GeneratorExit too
            if delivery is not None:
                self._end_delivery(delivery)
            raise

    def _end_delivery(self, delivery: _Delivery) -> None:
        """Report the outcomes of a batch, and release the messages that the loop has not yielded; once.
        Connects again if that is needed."""
        with self._lock:
            if delivery not in self._deliveries or delivery.batch is None:
                return
            batch = delivery.batch
            batch.record(delivery.undelivered, _RELEASE)
            try:
                if batch.has_outcomes:
                    client = self._connected()
                    stopper = Stopper()
                    stopper.set()
                    with stopper.stop_deadline(client.conn, _LAST_REPORT_TIMEOUT):  # a lock may keep it
                        _report_and_receive(client, [batch], None, delivery.message)
            except PgqueError as error:
                log.warning("batch %s could not be handed back: %s", batch.batch_id, one_line(error))
                if self._client is not None:
                    self._client.close()  # it may be broken
            finally:
                self._deliveries.discard(delivery)

    def _connected(self) -> PgqueClient:
        if self._client is None or self._client.conn.closed:
            name = f"pgque {self.queue}/{self.consumer}" if self.consumer else f"pgque {self.queue}"
            self._client = open_client(self.dsn, name)
        return self._client

    def _listen(self) -> PgqueClient:
        client = self._connected()
        if self._listening is not client:
            client.conn.add_notify_handler(self._on_notify)
            listen(client, self.queue)
            self._listening = client
        return client

    def _on_notify(self, notify: psycopg.Notify) -> None:
        self._notified = True

    def _report(self, batch: Batch[WorkMessage], msg_id: int, outcome: MessageOutcome) -> bool:
        if not batch.is_open(msg_id):
            return False
        statement = _batches.report(batch.batch_id, outcome, [msg_id])
        with self._lock:
            client = self._connected()
            refused, _ = _round_trip(client, [statement], None, Message)
            batch.mark_message_reported(msg_id, outcome)
        return not refused

    def _extend(self, batch_id: int, seconds: Seconds) -> bool:
        with self._lock:
            client = self._connected()
            return client.extend(batch_id, seconds) > 0


class Worker:
    """Feed the messages of a queue to handlers, several at a time.

        worker = Worker(dsn, queue="emails", consumer="mailers", concurrency=8)

        @worker.handler("welcome")
        def welcome(message): ...

        worker.run()

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
        use: "threads"; or "processes", and then handlers must be functions of a module, and the program
            must call `run` under `if __name__ == "__main__":`, since each process imports it.
        prefetch: most messages received in one call. It starts with `concurrency`, and grows up to this
            for as long as messages are handled in no time.
        min_interval: least seconds from the receive of one batch to the next receive, up to a day: larger
            batches, more latency. A full batch is followed at once, and no message waits longer than
            `min_interval` after it was sent. Outcomes do not wait for the pause to end.
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
        use: Literal["threads", "processes"] = "threads",
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
        if _encode.total_seconds(visibility_timeout) <= 0:
            raise ValueError("visibility_timeout must be more than 0 seconds")
        check_min_interval(min_interval)
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
        self.worker = worker or _batches.worker_name()
        self.shutdown_timeout = shutdown_timeout
        self._handlers: Handlers[WorkHandler] = Handlers(
            "Worker", "@worker.handler", check_handler, consumer, log
        )
        self._settings = QueueSettings(queue)
        self._watch = TickWatch(queue, log)
        self._stopper = Stopper()
        self._notified = False
        self._size = prefetch if min_interval else min(concurrency, prefetch)
        self._due_at = 0.0  # the earliest time of the next receive, by the monotonic clock
        self._batches: dict[int, Batch[Message]] = {}
        # Written by the threads or tasks that run handlers, read by the session only; None of a lost batch.
        self._finished: deque[tuple[Batch[Message], int, MessageOutcome | None]] = deque()

    def handler(self, type: str) -> Callable[[H], H]:
        """Register the decorated function as the handler of a message type; "*" takes all types without
        one. Raises TypeError for what cannot be a handler."""
        return self._handlers.register(type)

    def run(self) -> None:
        """Work until `stop()`, SIGTERM or SIGINT.

        The signals are caught in the main thread only, for all that run there, and their handlers put back
        when the last of them ends; a handler that the program gave to its event loop is called as well. Then
        no more messages are taken, those that were not started are released, and handlers that run have
        `shutdown_timeout` seconds to finish.

        After a fault of the database the worker connects again, after a growing random pause, for as long
        as it takes; after a stop for as long as handlers run or have outcomes that were not reported, and no
        longer than `shutdown_timeout`, and a second to hand messages back. Raises a PgqueError where trying
        again cannot help: PgqueVersionError, PgqueQueueNotFound, PgqueConsumerNotFound, a missing right;
        PgqueQueueInUse where the consumer reads on its own; PgqueBadArgument without a handler, unless
        `unknown_handler_policy` is "ack".
        """
        self._handlers.check_any(self.unknown_handler_policy)
        with self._stopper.running():
            try:
                run_worker(Worker, self, self._run_here)
            except PgqueError as error:
                log.error("worker %s of queue %s ends: %s", self.worker, self.queue, one_line(error))
                raise

    def stop(self) -> None:
        """Make `run` finish what is begun and return, for good; callable from any thread."""
        self._stopper.set()

    def _run_here(self) -> None:
        """Run the handlers in this process."""
        self._pool = ThreadPool(self.concurrency, self._handle)
        try:
            while not self._is_done():
                with suppress(HandlerInterrupted):  # while it waited for a connection
                    keep_connected(
                        self._stopper, self._session, queue=self.queue, log=log, is_done=self._is_done
                    )
        except BaseException:
            # Cancelled, or an error: report the outcomes, and release the messages that were not started.
            self._release_queued()
            self._pool.close()
            with suppress(PgqueError, psycopg.Error, HandlerInterrupted):
                self._report_remaining()
            raise
        finally:
            self._pool.cancel_queued()
            self._pool.close()

    def _report_remaining(self) -> None:
        """Report the outcomes over a connection of its own."""
        self._collect()
        remaining = [batch for batch in self._batches.values() if batch.has_outcomes and not batch.lost]
        self._batches.clear()
        if remaining:
            stopper = Stopper()
            stopper.set()
            client = self._connect(stopper, _LAST_REPORT_TIMEOUT)
            try:
                with stopper.stop_deadline(client.conn, 2 * _LAST_REPORT_TIMEOUT):
                    _report_and_receive(client, remaining, None, Message)
            finally:
                client.close()

    def _session(self, progress: Progress) -> None:
        """Work over one connection. Progress is made with the first step; the batches outlive the session."""
        client = self._connect(self._stopper, self.shutdown_timeout)
        try:
            with self._stopper.stop_deadline(client.conn, self.shutdown_timeout + _LAST_REPORT_TIMEOUT):
                client.conn.add_notify_handler(self._on_notify)
                self._settings = listen(client, self.queue)
                while self._step(client):
                    progress.made = True
        finally:
            client.close()

    def _connect(self, stopper: Stopper, seconds: float) -> PgqueClient:
        """Connect; HandlerInterrupted if that takes longer than so many seconds after a stop."""
        opened: list[PgqueClient] = []
        given_up = False

        def connect() -> None:
            opened.append(open_client(self.dsn, f"pgque {self.queue}/{self.worker}"))
            if given_up:
                opened[0].close()

        try:
            stopper.give_up_after(seconds, connect)
        except BaseException:
            given_up = True
            raise
        return opened[0]

    def _on_notify(self, notify: psycopg.Notify) -> None:
        self._notified = True

    def _step(self, client: PgqueClient) -> bool:
        """Report outcomes, and receive messages if a handler is free; without either, wait. Return False when
        all is done after a stop."""
        stopping = self._stopper.is_set()
        if stopping:
            self._release_queued()
        self._collect()
        for batch in list(self._batches.values()):
            _extend_if_due(client, batch, self.visibility_timeout)
        now = time.monotonic()
        unfinished = sum(batch.unfinished for batch in self._batches.values() if not batch.lost)
        has_room = unfinished < self.concurrency and self._pool.queued() == 0
        receives = has_room and not stopping and now >= self._due_at
        to_report = [
            batch
            for batch in self._batches.values()
            if batch.unfinished == 0 or stopping or now - batch.reported_at > _REPORT_INTERVAL
        ]
        received: list[Message] = []
        self._notified = False
        if receives or any(batch.has_outcomes for batch in to_report):
            receive = None
            if receives:
                receive = _batches.receive(
                    self.queue, self.consumer, self.worker, self._size, self.visibility_timeout
                )
            received = _report_and_receive(client, to_report, receive, Message)
        self._batches = {
            key: batch for key, batch in self._batches.items() if not (batch.is_finished or batch.lost)
        }
        if received:
            self._watch.reset()
            self._due_at = next_receive_at(now, self.min_interval, received, self._size)
            batch = self._batches[received[0].batch_id] = Batch(received, now)
            for message in received:
                self._pool.put((batch, message))
            return True
        if stopping and self._is_over(unfinished):
            return False
        if not self._finished and not (receives and self._notified):
            _wait(self._stopper, client, self._wait_time(now), stopping)
            if unfinished == 0 and not stopping:
                self._watch.check(client)
        return True

    def _is_done(self) -> bool:
        """Return whether, after a stop, nothing is left to be reported, or no time is left for it."""
        if not self._stopper.is_set():
            return False
        self._release_queued()
        self._collect()
        if self._stopper.stopped_for() > self.shutdown_timeout:
            return True
        return not any(batch.must_report for batch in self._batches.values() if not batch.lost)

    def _release_queued(self) -> None:
        for batch, message in self._pool.cancel_queued():
            self._finished.append((batch, message.msg_id, _RELEASE))

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
                elif took > _SLOW_BATCH:
                    self._size = min(max(self._size // 2, self.concurrency), self.prefetch)

    def _is_over(self, unfinished: int) -> bool:
        """Return whether no handler runs any more. After `shutdown_timeout` the messages of those that do are
        released."""
        if unfinished == 0:
            return not any(batch.has_outcomes for batch in self._batches.values()) and not self._finished
        if self._stopper.stopped_for() < self.shutdown_timeout:
            return False
        log.warning("%s handlers did not finish in time, their messages are handed back", unfinished)
        for batch in self._batches.values():
            batch.record(batch.open_messages(), _RELEASE)
        return False

    def _wait_time(self, now: float) -> float:
        """Return how many seconds to wait for a notification after a step that began at `now`."""
        half = _encode.total_seconds(self.visibility_timeout) / 2
        due = [batch.extended_at + half - time.monotonic() for batch in self._batches.values()]
        if now < self._due_at:
            due.append(self._due_at - time.monotonic())
        if self._stopper.is_set():
            due.append(self.shutdown_timeout - self._stopper.stopped_for())
        return max(0.0, min([_POLL_INTERVAL, *due]))

    def _handle(self, item: tuple[Batch[Message], Message]) -> None:
        """Run the handler of one message, in a thread or a task of the pool."""
        batch, message = item
        # Of a task that the end of the worker cancels; and of a message that others may have by now, as the
        # database was away for longer than its lease.
        outcome: MessageOutcome | None = _RELEASE
        try:
            if batch.lost:
                outcome = None
            elif not batch.has_expired(self.visibility_timeout):
                outcome = self._outcome(message)
            elif not batch.expiry_logged:
                batch.expiry_logged = True
                log.warning(
                    "batch %s: the visibility timeout of %g s passed before all of its messages were"
                    " started; those that were not are handed back",
                    batch.batch_id,
                    _encode.total_seconds(self.visibility_timeout),
                )
        except Exception as error:
            outcome = self._failed(message, error)
        except BaseException as error:
            if not self._pool.is_closing:
                outcome = self._failed(message, error)
            raise
        finally:
            self._finished.append((batch, message.msg_id, outcome))
            if self._pool.queued() == 0:
                self._stopper.wake()

    def _outcome(self, message: Message) -> MessageOutcome:
        retry_after = _encode.interval(self.retry_after)
        success = _ARCHIVE if self.archive else _ACK
        handler = self._handlers.find(message)
        if handler is None:
            reason = self._handlers.reject_reason(message, self.unknown_handler_policy)
            return _ACK if reason is None else MessageOutcome("nack", retry_after, reason)
        try:
            with _otel.handling(message, self.consumer):
                returned = call(handler, message)
        except HandlerOutcome as raised:
            returned = raised
        except SystemExit as error:
            return self._failed(message, error)
        return _batches.outcome_of(returned, success, retry_after)

    def _failed(self, message: Message, error: BaseException) -> MessageOutcome:
        text = self._settings.failure_text(message, self.consumer, error, self.retry_after, True)
        log.warning("%s", text, exc_info=True)
        return _batches.failure_outcome(error, _encode.interval(self.retry_after))


def _wait(
    stopper: Stopper, client: PgqueClient, seconds: float, draining: bool = False
) -> None:
    try:
        stopper.wait(client.conn, seconds, draining)
    except psycopg.Error as error:
        raise from_psycopg(error) from error


def _default_timeout(client: PgqueClient, queue: str) -> Seconds:
    """Return the visibility timeout that a queue is set to."""
    value = client._maybe(
        timedelta,
        "select s.param_value::interval from pgque.queue_config(%(queue)s::text) as s"
        " where s.param_name = 'visibility_timeout'",
        {"queue": queue},
    )
    return value or timedelta(seconds=30)


def _extend_if_due(client: PgqueClient, batch: Batch[M], visibility_timeout: Seconds) -> bool:
    """Extend the lease of a batch by the time that has passed, if that is half the visibility timeout. Return
    False when the batch is lost."""
    now = time.monotonic()
    passed = now - batch.extended_at
    if batch.lost or passed < _encode.total_seconds(visibility_timeout) / 2:
        return not batch.lost
    held = client._maybe(int, *_batches.extend(batch.batch_id, passed))
    batch.lost = not held
    batch.extended_at = now
    if batch.lost:
        log.warning("batch %s was lost: its visibility timeout had passed", batch.batch_id)
    return not batch.lost


def _report_and_receive(
    client: PgqueClient, batches: Sequence[Batch[M]], receive: Statement | None, make: Callable[..., M]
) -> list[M]:
    """Report the outcomes of batches, and return the messages that `receive` returns."""
    reports = [statement for batch in batches for statement in batch.statements()]
    refused, received = _round_trip(client, reports, receive, make)
    for batch in batches:
        batch.mark_reported()
    for msg_id, reason in refused:
        log.warning("the outcome of %s does not count: %s", msg_id or "a batch", reason)
    return received


def _round_trip(
    client: PgqueClient, reports: Sequence[Statement], receive: Statement | None, make: Callable[..., M]
) -> tuple[list[Refused], list[M]]:
    """Report outcomes in one transaction and receive messages in another, in one round trip.

    So the lock under which messages are delivered is not held while the outcomes go to the disk.
    The connection has to be in autocommit mode; it is closed where an error or a cancellation leaves a
    transaction open.
    """
    conn = client.conn
    reported: list[Cursor[Refused]] = []
    received: Cursor[M] | None = None
    try:
        with conn.pipeline():
            if reports and receive:
                conn.execute("begin")
            for statement, given in reports:
                params = {
                    name: _encode.reason_text(str(value), conn) if name == "reason" else value
                    for name, value in given.items()
                }
                reported.append(conn.cursor(row_factory=args_row(Refused)).execute(statement, params))
            if reports and receive:
                conn.execute("commit")
            if receive:
                received = reading(conn.cursor(row_factory=args_row(make))).execute(*receive)
        refused = [row for cursor in reported for row in cursor.fetchall()]
        return refused, received.fetchall() if received else []
    except BaseException as error:
        # Perhaps between begin and commit.
        if conn.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
            conn.close()
        if isinstance(error, psycopg.Error):
            raise from_psycopg(error) from error
        raise
