# Generated from runtime/workers.py by tools/make_sync.py: edit that file and run the script again.
"""Work queues: many workers share the messages of one consumer, and each message has an outcome of its own.

`twins/workers.py` is generated from `runtime/workers.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn

import psycopg

from .client import PgqueClient
from .connection import open_client
from ..client.direct import Session
from ..client.limit import COMMAND_TIMEOUT, check_command_timeout
from ..client.renamed import renamed
from ..client.statements import MAX_BYTES
from ..codec import encode
from ..codec.json import Encoder
from ..codec.payloads import BadPayload, Decoder, check_functions, message_maker
from ..errors import PgqueConnectionError, PgqueError, one_line
from ..integrations import opentelemetry as otel
from ..outcomes import retry_interval
from ..types import Event, Message, Payload, Seconds
from ..runtime import batches
from ..runtime.batches import ACK, ARCHIVE, RELEASE, Batch, MessageOutcome, Statement
from ..runtime.concurrency import Lock
from .exchange import default_timeout, extend_if_due, report_and_receive, round_trip, wait
from .listen import listen
from ..runtime.options import refuse
from .runtime import LAST_REPORT_TIMEOUT, REPORT_INTERVAL, Runtime
from ..runtime.sources import Priority, Source
from ..runtime.stopper import Stopper

log = logging.getLogger("pgque.worker")

# Expired leases are not notified, so the queue is polled this often, in seconds.
_POLL_INTERVAL = 1.0


@dataclass(slots=True, eq=False)
class _Delivery:
    """A batch that a loop over messages received, which each of its messages refers to."""

    queue: WorkQueue
    batch: Batch[WorkMessage] | None = None
    undelivered: list[int] = field(default_factory=list)  # ids of messages the loop has not yielded

    def message(self, *row: object) -> WorkMessage:
        return self.queue._make_message(*row, self)


@dataclass(frozen=True, slots=True)
class WorkMessage(Message):
    """Describe a message from `WorkQueue.messages`, with methods for its outcome.

    A method reports the outcome at once. It returns False if the message has an outcome already, or if its
    lease expired and the message was lost.
    """

    _delivery: _Delivery | None = field(default=None, repr=False, compare=False)

    def ack(self) -> bool:
        """Acknowledge the message. Calls `pgque.ack`."""
        return self._report(ACK)

    def archive(self) -> bool:
        """Acknowledge the message, and keep it in the archive. Calls `pgque.archive`."""
        return self._report(ARCHIVE)

    def nack(
        self,
        retry_after: Seconds | None = None,
        reason: str | None = None,
        *,
        after: Seconds | None = None,
    ) -> bool:
        """Reject the message: it is redelivered after some seconds; None is the queue's setting. Calls
        `pgque.nack`. Raises PgqueBadArgumentError for a negative length of time, or one over ten years.

        `after` is the earlier name of `retry_after`."""
        if after is not None:
            retry_after = renamed("nack", "after", "retry_after", after)
        return self._report(MessageOutcome("nack", retry_interval(retry_after), reason))

    def dead(self, reason: str | None = None) -> bool:
        """Give the message up, without more retries. Calls `pgque.dead`."""
        return self._report(MessageOutcome("dead", None, reason))

    def release(self) -> bool:
        """Release the message: any worker can receive it at once. Calls `pgque.release`."""
        return self._report(RELEASE)

    def extend(self, seconds: Seconds) -> bool:
        """Extend the lease of this batch by some seconds; return False if the batch is lost. Calls
        `pgque.extend`."""
        if self._delivery is None:
            raise PgqueError("this message is not from WorkQueue.messages, so it has no outcome to report")
        return self._delivery.queue._extend(self.batch_id, seconds)

    def _report(self, outcome: MessageOutcome) -> bool:
        if self._delivery is None or self._delivery.batch is None:
            raise PgqueError("this message is not from WorkQueue.messages, so it has no outcome to report")
        return self._delivery.queue._report(self._delivery.batch, self.msg_id, outcome)


class WorkQueue:
    """Send to a queue, and receive its messages one at a time.

        with WorkQueue(dsn, "emails", consumer="mailers") as queue:
            queue.send({"to": "ann@example.com"})
            for message in queue.messages():
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
        check_functions(encoder=encoder, decoder=decoder)
        check_command_timeout(command_timeout)
        self.dsn = dsn
        self.queue = queue
        self.consumer = consumer
        self.encoder = encoder
        self.command_timeout = command_timeout
        self._make_message: Callable[..., WorkMessage] = message_maker(WorkMessage, decoder)
        self._client: PgqueClient | None = None
        self._sessions: set[Session] = set()  # of connections that may be lost
        self._listening: PgqueClient | None = None
        self._notified = False
        self._stopper = Stopper()
        # Guards the connection, because asyncio closes a loop that was left by `break` in another task.
        self._lock = Lock()
        self._deliveries: set[_Delivery] = set()  # of the loops that stand at a message
        self._reports_alone = False  # after a lost connection, for the reason that Worker._begin has

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
        """Release the messages that `messages` received and did not yield, and close the connection."""
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
        type: str | None = None,
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
                payloads,
                type=type,
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
        max_bytes: int | None = MAX_BYTES,
    ) -> Generator[WorkMessage, None, None]:
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

        Raises PgqueQueueNotFoundError, PgqueConsumerNotFoundError, PgqueConnectionError. After a lost
        connection, call again.
        """
        if self.consumer is None:
            raise ValueError("to receive, a work queue needs the name of its consumer")
        name = worker or batches.worker_name()
        with self._lock:
            client = self._listen()
            if visibility_timeout is None:
                visibility_timeout = default_timeout(client, self.queue)
        waiting_since = time.monotonic()
        delivery: _Delivery | None = None
        try:
            while True:
                following = _Delivery(self)
                receive = batches.receive(
                    self.queue, self.consumer, name, max_messages, visibility_timeout, max_bytes
                )
                with self._lock:
                    asked_at = time.monotonic()
                    self._notified = False
                    finished = [delivery.batch] if delivery is not None and delivery.batch is not None else []
                    if finished and self._reports_alone:
                        report_and_receive(client, self.consumer, finished, None, following.message)
                        self._reports_alone = False
                        finished = []
                    received = report_and_receive(
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
                            wait(self._stopper, client, pause)
                        continue
                delivery = following
                batch = delivery.batch = Batch(received, asked_at)
                delivery.undelivered = [message.msg_id for message in reversed(received)]
                self._deliveries.add(delivery)
                for message in received:
                    with self._lock:
                        if not extend_if_due(client, batch, visibility_timeout):
                            break
                    delivery.undelivered.pop()
                    yield message
                    if batch.is_open(message.msg_id):
                        batch.record([message.msg_id], ACK)
                    if time.monotonic() - batch.reported_at > REPORT_INTERVAL:
                        with self._lock:
                            report_and_receive(client, self.consumer, [batch], None, delivery.message)
                waiting_since = time.monotonic()
        except BaseException as error:  # GeneratorExit too
            self._reports_alone |= isinstance(error, PgqueConnectionError)
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
            batch.record(delivery.undelivered, RELEASE)
            try:
                if batch.has_outcomes:
                    client = self._connected()
                    stopper = Stopper()
                    stopper.set()
                    with stopper.stop_deadline(client.conn, LAST_REPORT_TIMEOUT):  # a lock may keep it
                        report_and_receive(client, self.consumer, [batch], None, delivery.message)
            except PgqueError as error:
                log.warning("batch %s could not be released: %s", batch.batch_id, one_line(error))
                if self._client is not None:
                    self._client.close()  # it may be broken
            finally:
                self._deliveries.discard(delivery)

    def _connected(self) -> PgqueClient:
        if self._client is None or self._client.conn.closed:
            name = f"pgque {self.queue}/{self.consumer}" if self.consumer else f"pgque {self.queue}"
            self._client = open_client(
                self.dsn,
                name,
                encoder=self.encoder,
                read_committed=True,
                command_timeout=self.command_timeout,
                sessions=self._sessions,
            )
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
        statement = batches.report(batch.batch_id, outcome, [msg_id])
        with self._lock:
            client = self._connected()
            with otel.timed("ack", self.queue, self.consumer):
                refused, _ = round_trip(client, [statement], None, WorkMessage)
            batch.mark_message_reported(msg_id, outcome)
        return not refused

    def _extend(self, batch_id: int, seconds: Seconds) -> bool:
        with self._lock:
            client = self._connected()
            return client.extend(batch_id, seconds) > 0


class Worker(Runtime):
    """Run handlers for the messages of a queue, several at a time.

        worker = Worker(dsn, queue="emails", consumer="mailers", concurrency=8)

        @worker.handler("welcome")
        def welcome(message): ...

        worker.run()

    If a handler returns, its message is acknowledged. If it raises, the message is rejected with the text of
    the error as reason, and redelivered after `retry_after` seconds; after the last attempt it goes the way
    of the queue's `drop_policy`. A handler may also return or raise `Retry(retry_after=…)`, `Dead(…)` or
    `Release()`.

    The worker extends the lease of a message every half `visibility_timeout` while its handler runs, however
    long that takes. The workers of a process share a connection for this, which is opened when a handler has
    run for a quarter of `visibility_timeout`. If the process dies, or loses the database for longer than
    `visibility_timeout`, other workers get its messages; it does not start messages whose lease has expired.
    No transaction is open while a handler runs. A message may be delivered twice.

    With `transactional=True`, a handler gets the message and a connection, and its writes through that
    connection are committed together with the outcome: exactly once. The writes are kept if it returns a
    success or `Dead`. They are rolled back if the handler raises, also an outcome, and if the message is
    redelivered. If such a handler catches an error of the database and goes on, it needs a savepoint around
    the statement: `conn.transaction()`; otherwise the message has failed. Up to `concurrency` connections
    are opened for handlers. While batches are large, some messages share a transaction, each in a savepoint;
    deferred constraints are checked after each message. A message whose handler loses the connection twice,
    for example by a time limit of the server, is rejected.

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
        use: "threads"; or "processes", and then handlers must be functions of a module, and the program
            must call `run` under `if __name__ == "__main__":`, since each process imports it.
        prefetch: most messages in one receive; None is twice `concurrency`, but at least 100. It starts with
            `concurrency`, and doubles up to this while batches take less than 0.2 seconds. Then messages are
            also received before a handler is free for them. It is halved when a batch takes more than a
            second. A worker never has more messages than `concurrency` and `prefetch` together; with batch
            handlers, `prefetch` for each of `concurrency` calls and one more.
        max_messages: another name of `prefetch`.
        max_bytes: most bytes of payloads and headers in one receive, which has at least one message; None is
            no limit.
        min_interval: least seconds from the receive of one batch to the next receive, at most a day: larger
            batches, more latency. A full batch is followed at once, and no message waits longer than
            `min_interval` after it was sent. Outcomes do not wait for the pause to end. Each process has its
            own pause.
        visibility_timeout: seconds of a lease, whatever the queue's setting is.
        poll_interval: seconds between polls of an empty queue when no notification comes. Expired leases are
            not notified.
        retry_after: seconds until a failed message is redelivered; None is the queue's setting.
        archive: True archives acknowledged messages.
        transactional: True gives handlers a transaction that is shared with the outcome.
        unknown_handler_policy: outcome for a type that has no handler, "nack" or "ack". Such a type is logged
            once.
        worker: name of this worker; None makes up a unique one.
        shutdown_timeout: seconds that handlers have to finish after a stop.
        handler_timeout: seconds that a handler may run; None is no limit. Then its message is rejected with
            that as the reason, and the next one is handled in its place. A task is cancelled; a thread cannot
            be, so it goes on until its handler returns, and the outcome does not count. With use="processes"
            the process is ended, and another one started. The transaction of a transactional handler is
            rolled back. Without a limit, a handler that runs for ten leases is logged and counted.
        encoder: as of a client, for messages that the worker itself sends.
        decoder: as of a client, for the messages that handlers get. With use="processes" encoder and decoder
            are functions of a module.
        bad_payload: outcome if a handler raises PgquePayloadError, or the payload does not fit its model:
            "dead" gives the message up, with the reason, as `drop_policy` has it; "retry" treats it as any
            error. The log has no traceback of it, which might show the payload.
        liveness_file: a file to touch every second while the worker is alive and the database answers. An old
            file means that the worker hangs, or that `concurrency` handlers without a limit have run for ten
            leases.
        command_timeout: seconds in which the server has to answer each call; then the worker connects again.
            It does not count for the statements of transactional handlers.

    Raises PgqueBadArgumentError for an argument of a Consumer that a worker cannot have.
    """

    _kind = "Worker"
    _is_shared = True
    _log: ClassVar[logging.Logger] = log

    def __init__(
        self,
        dsn: str = "",
        *,
        queue: str | None = None,
        queues: Mapping[str, float] | None = None,
        priority: Priority = "weighted",
        consumer: str,
        concurrency: int = 4,
        use: Literal["threads", "processes"] = "threads",
        prefetch: int | None = None,
        max_messages: int | None = None,
        max_bytes: int | None = MAX_BYTES,
        min_interval: float = 0,
        poll_interval: float = _POLL_INTERVAL,
        visibility_timeout: Seconds = 30,
        retry_after: Seconds | None = None,
        archive: bool = False,
        transactional: bool = False,
        unknown_handler_policy: Literal["nack", "ack"] = "nack",
        worker: str | None = None,
        shutdown_timeout: float = 30,
        handler_timeout: Seconds | None = None,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
        bad_payload: BadPayload = "dead",
        liveness_file: str | os.PathLike[str] | None = None,
        command_timeout: float | None = COMMAND_TIMEOUT,
        **of_consumer: NoReturn,
    ) -> None:
        refuse("Worker", of_consumer)
        if not encode.total_seconds(visibility_timeout) > 0:
            raise ValueError("visibility_timeout must be more than 0 seconds")
        self.use = use
        self.visibility_timeout = visibility_timeout
        self.worker: str = worker or batches.worker_name()
        super().__init__(
            dsn,
            queue=queue,
            queues=queues,
            priority=priority,
            consumer=consumer,
            name=self.worker,
            concurrency=concurrency,
            prefetch=prefetch,
            max_messages=max_messages,
            max_bytes=max_bytes,
            min_interval=min_interval,
            poll_interval=poll_interval,
            lease_seconds=encode.total_seconds(visibility_timeout),
            retry_after=retry_after,
            archive=archive,
            transactional=transactional,
            unknown_handler_policy=unknown_handler_policy,
            shutdown_timeout=shutdown_timeout,
            handler_timeout=handler_timeout,
            encoder=encoder,
            decoder=decoder,
            bad_payload=bad_payload,
            liveness_file=liveness_file,
            command_timeout=command_timeout,
        )

    @property
    def _made(self) -> Callable[..., Any]:
        return Worker

    def _receive_statement(self, queue: str, count: int) -> Statement:
        return batches.receive(
            queue, self.consumer, self.worker, count, self.visibility_timeout, self.max_bytes
        )

    def _batch(self, source: Source, received: Sequence[Message], received_at: float) -> Batch[Message]:
        return Batch(received, received_at)

    def _kept_seconds(self) -> float:
        return self._lease_seconds
