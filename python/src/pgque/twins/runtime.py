# Generated from runtime/runtime.py by tools/make_sync.py: edit that file and run the script again.
"""Run the handlers of a Worker and of a Consumer: one loop, one way to report, one way to stop.

The two classes differ in how messages are shared, so each has its own methods that receive and keep a batch.
An outcome is committed in its own call, or in the transaction of its handler.

`twins/runtime.py` is generated from `runtime/runtime.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Concatenate, Literal, Protocol, TypeAlias, TypeVar, overload

import psycopg
from psycopg import Connection

from .client import PgqueClient
from .connection import Progress, keep_connected, open_client, open_client_before
from ..client.direct import Session
from ..client.limit import check_command_timeout
from ..codec import encode, payloads
from ..codec.json import Encoder
from ..codec.payloads import BadPayload, Decoder
from ..errors import PgqueBadArgumentError, PgqueError, PgqueMessageNotFoundError, PgquePayloadError, one_line
from ..integrations import telemetry
from ..outcomes import HandlerOutcome, retry_interval
from ..types import Event, Message, Payload, Seconds
from ..runtime import batches
from ..runtime.batches import ACK, ARCHIVE, RELEASE, Batch, Item, MessageOutcome, Running, Statement
from ..runtime.concurrency import SingleRun, ThreadPool, check_until_idle, run_worker
from .exchange import extend_if_due, report_and_receive, wait
from ..runtime.handlers import Handlers, Options, Registered, call, check_handler, timeout_of
from ..runtime.leases import kept
from .listen import TickWatch, listen, queue_of
from ..runtime.liveness import Liveness
from ..runtime.middleware import Middleware, check_returned, failure_in, merged, returned_for
from ..runtime.min_interval import check_min_interval, next_receive_at
from ..runtime.options import settings_of
from ..runtime.queue_settings import QueueSettings
from ..runtime.recurring import Recurring, own_queue
from ..runtime.retries import ErrorClasses, retries
from ..runtime.sources import Priority, Source, Sources, check_weights
from ..runtime.stopper import GRACE, Stopper, HandlerInterrupted
from ..runtime.tasks import P, T, Task
from .transactional import Transactions
from ..runtime.watch import Watch, Guard

# Their first parameter is a Message, a Message[Model] or a Model.
Handler: TypeAlias = Callable[[Any], object]
TransactionalHandler: TypeAlias = Callable[[Any, Connection[Any]], object]
BeforeHook = TypeVar("BeforeHook", bound=Callable[[Message], object])
AfterHook = TypeVar("AfterHook", bound=Callable[[Message, object], object])
ErrorHook = TypeVar("ErrorHook", bound=Callable[[Message, BaseException], object])
R = TypeVar("R", bound=object)
H = TypeVar("H", bound=Handler | TransactionalHandler)

# Seconds after which the outcomes of a batch that is not finished are reported.
REPORT_INTERVAL = 1.0

# Seconds beyond the time of a stop in which the server has to answer the last report.
LAST_REPORT_TIMEOUT = 1.0

# Longest wait in seconds: how often signs of life are given.
_LONGEST_WAIT = 1.0

# Most messages received in one call, where nothing else is asked for. The server needs about as much time to
# deliver 100 as to deliver 10.
_LEAST_PREFETCH = 100

# In seconds: batches that are handled within the first grow up to the worker's `prefetch`; those that take
# longer than the second shrink.
_QUICK_BATCH, _SLOW_BATCH = 0.2, 1.0

# The share of a lease after which a worker extends it over the connection that it works with: the one for
# leases could not be opened, or is waiting for something else.
_OVERDUE = 0.75

# Leases after which a handler without a time limit counts as hanging, and their seconds where there is none.
_LONG, _USUAL_LEASE = 10, 30.0

# More outcomes than a worker has messages: handlers need not wake it.
_NEVER = sys.maxsize


class TaskDecorator(Protocol):
    """Make a Task of a handler, whose payload is what the first parameter asks for."""

    @overload
    def __call__(
        self, handler: Callable[Concatenate[Message[T], P], R], /
    ) -> Task[T, Concatenate[Message[T], P], R]: ...

    @overload
    def __call__(self, handler: Callable[Concatenate[T, P], R], /) -> Task[T, Concatenate[T, P], R]: ...


def _options(
    retry_on: ErrorClasses | None,
    dead_on: ErrorClasses,
    backoff: Seconds | Sequence[Seconds] | None,
    timeout: Seconds | None,
) -> Options:
    return Options(retries(retry_on, dead_on, backoff), timeout_of(timeout, "timeout"))


class Runtime:
    """Run handlers for the messages of queues; see Worker and Consumer."""

    _kind: ClassVar[Literal["Worker", "Consumer"]]
    _is_shared: ClassVar[bool]  # whether workers share the messages, by leases
    _log: ClassVar[logging.Logger]

    def __init__(
        self,
        dsn: str,
        *,
        queue: str | None,
        queues: Mapping[str, float] | None,
        priority: Priority,
        consumer: str,
        name: str,
        concurrency: int,
        prefetch: int | None,
        max_messages: int | None,
        max_bytes: int | None,
        min_interval: float,
        poll_interval: float,
        lease_seconds: float,
        retry_after: Seconds | None,
        archive: bool,
        transactional: bool,
        unknown_handler_policy: Literal["nack", "ack"],
        shutdown_timeout: float,
        handler_timeout: Seconds | None,
        encoder: Encoder | None,
        decoder: Decoder | None,
        bad_payload: BadPayload,
        liveness_file: str | os.PathLike[str] | None,
        command_timeout: float | None,
    ) -> None:
        if unknown_handler_policy not in ("nack", "ack"):
            raise ValueError(
                f"unknown_handler_policy must be 'nack' or 'ack', not {unknown_handler_policy!r}"
            )
        if prefetch is not None and max_messages is not None:
            raise TypeError("prefetch and max_messages are two names of one argument: give one of them")
        if concurrency < 1 or (prefetch is not None and prefetch < 1):
            raise ValueError("concurrency and prefetch must be at least 1")
        if max_messages is not None and max_messages < 1:
            raise ValueError("max_messages must be at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        if not poll_interval > 0:  # nor NaN
            raise ValueError("poll_interval must be more than 0 seconds")
        if not shutdown_timeout >= 0:
            raise ValueError("shutdown_timeout must be at least 0 seconds")
        timeout_of(handler_timeout, "handler_timeout")
        check_min_interval(min_interval)
        retry_interval(retry_after)
        payloads.check_functions(encoder=encoder, decoder=decoder)
        payloads.check_bad_payload(bad_payload)
        check_command_timeout(command_timeout)
        weights = check_weights(queue, queues, priority)
        self.dsn = dsn
        self.queue: str = ", ".join(weights)
        self.queues = weights
        self.priority: Priority = priority
        self.consumer = consumer
        self.concurrency = concurrency
        self.prefetch = prefetch or max_messages or max(_LEAST_PREFETCH, 2 * concurrency)
        self.max_messages = self.prefetch
        self.max_bytes = max_bytes
        self.min_interval = min_interval
        self.poll_interval = poll_interval
        self.retry_after = retry_after
        self.archive = archive
        self.transactional = transactional
        self.unknown_handler_policy = unknown_handler_policy
        self.shutdown_timeout = shutdown_timeout
        self.handler_timeout = handler_timeout
        self.encoder = encoder
        self.decoder = decoder
        self.bad_payload = bad_payload
        self.liveness_file = liveness_file
        self.command_timeout = command_timeout
        self._name = name
        self._title = f"{self._kind.lower()} {name}"
        self._lease_seconds = lease_seconds
        self._usual_lease = lease_seconds if math.isfinite(lease_seconds) else _USUAL_LEASE
        self._make_message: Callable[..., Message] = payloads.message_maker(Message, decoder)
        self._handlers = Handlers(
            self._kind,
            f"@{self._kind.lower()}.handler",
            check_handler,
            consumer,
            self._log,
            2 if transactional else 1,
        )
        self._recurring: list[Recurring] = []
        self._liveness = Liveness(liveness_file)
        self._middleware = Middleware(self._kind, check_handler, self._log)
        self._sources = Sources(weights, priority, poll_interval)
        self._watches = {source: TickWatch(source.queue, self._log) for source in self._sources}
        self._stopper = self._first_stopper = Stopper()
        self._single = SingleRun(self._kind.lower(), self._first_stopper)
        is_fixed = min_interval > 0 or not self._is_shared
        self._size = self.prefetch if is_fixed else min(concurrency, self.prefetch)
        self._takes_batches = False
        self._has_prefetch = prefetch is not None or max_messages is not None
        self._is_ahead = False  # whether it receives messages before a handler is free for them
        self._sessions: set[Session] = set()  # of connections that may be lost
        self._batches: dict[int, Batch[Message]] = {}
        # Written by the threads or tasks that run handlers, read by the session only. None needs no report.
        self._finished: deque[tuple[Batch[Message], int, MessageOutcome | None]] = deque()
        # The items that run. One that ran for too long is taken out by the session.
        self._running: set[Running] = set()
        self._guard: Guard | None = None  # of a process that runs nothing else
        self._catch_signals = True
        self._until_idle = False  # whether `run` ends when nothing is left to be done
        self._is_idle = False
        self._wake_at = _NEVER  # number of finished messages with which the session has to report

    # -- who shares the messages ------------------------------------------------------------

    def _receive_statement(self, queue: str, count: int) -> Statement:
        """Return the statement that receives messages."""
        raise NotImplementedError

    def _batch(self, source: Source, received: Sequence[Message], received_at: float) -> Batch[Message]:
        """Return the batch of messages that were received."""
        raise NotImplementedError

    def _kept_seconds(self) -> float | None:
        """Return after how many seconds others may take a batch that this process has, or None."""
        raise NotImplementedError

    def _prepare(self, client: PgqueClient, source: Source) -> None:
        """Prepare a new connection for receiving from a queue."""

    @property
    def _made(self) -> Callable[..., Any]:
        """Return the class that makes a copy."""
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """Return the arguments that a copy gets, without those that depend on where it runs."""
        return settings_of(self, self._made)

    def _explain(self, error: PgqueError) -> None:
        """Add what to do to an error of a receive."""

    # -- handlers ------------------------------------------------------------

    def handler(
        self,
        type: str,
        *,
        retry_on: ErrorClasses | None = None,
        dead_on: ErrorClasses = (),
        backoff: Seconds | Sequence[Seconds] | None = None,
        timeout: Seconds | None = None,
    ) -> Callable[[H], H]:
        """Register the decorated function as the handler of a message type; "*" takes all types without
        one. Its annotation may ask for a Message[Model] or a Model. It is read here, and may be text.

        Args:
            type: the message type.
            retry_on: errors after which the message is redelivered, as long as it has attempts left
                (`max_receive_attempts` and `max_retries` of the queue). After any other error it is given
                up. A handler beyond its time limit is retried. None is all errors.
            dead_on: errors after which the message is given up at once, also if `retry_on` has a base class
                of theirs.
            backoff: seconds before the first retry, the second, and so on; the last one is for all further
                retries, and a single number for all. It also counts for `Retry()`. None is `retry_after` of
                the worker.
            timeout: seconds that the handler may run, `math.inf` for no limit; None is `handler_timeout` of
                the worker.

        Raises TypeError for an object that cannot be a handler, an annotation that cannot be validated, and
        an object that is no class of errors; PgqueBadArgumentError for a pause below 0 or over ten years;
        ValueError for a timeout of 0 or below.
        """
        return self._handlers.register(type, options=_options(retry_on, dead_on, backoff, timeout))

    def batch_handler(
        self,
        type: str,
        *,
        size: int = 1000,
        retry_on: ErrorClasses | None = None,
        dead_on: ErrorClasses = (),
        backoff: Seconds | Sequence[Seconds] | None = None,
        timeout: Seconds | None = None,
    ) -> Callable[[H], H]:
        """Register the decorated function as the handler of lists of messages of a type, "*" of all types
        without one. It may ask for a `list[Message[Model]]` or a `list[Model]`.

        It gets the messages of one receive, in order. If it returns, all are acknowledged. If it raises, all
        are rejected, and handled again in ever smaller calls, so that a message that fails is alone in the
        end; only then do `retry_on` and `dead_on` give it up. It may return a `Retry`, `Dead` or
        `Release` for all of them, or `Outcomes` of single ones. A message that does not fit the Model fails
        alone. With `transactional=True` its writes are kept unless it raises or all messages are
        redelivered. Hooks are called for each message.

        Args:
            type: the message type.
            size: most messages in one call. Unless the worker has a `prefetch`, it receives as many at once.

        The other arguments and the errors are those of `handler`; `timeout` is that of a call.
        """
        if not isinstance(size, int) or size < 1:
            raise ValueError("size must be a whole number, and at least 1")
        options = replace(_options(retry_on, dead_on, backoff, timeout), size=size)
        decorate = self._handlers.register(type, options=options)
        if not self._has_prefetch:
            self.prefetch = self.max_messages = max(self.prefetch, size)
        return decorate

    def task(
        self,
        type: str,
        *,
        queue: str | None = None,
        retry_on: ErrorClasses | None = None,
        dead_on: ErrorClasses = (),
        backoff: Seconds | Sequence[Seconds] | None = None,
        timeout: Seconds | None = None,
    ) -> TaskDecorator:
        """Register the decorated function as the handler of a message type, and return a Task, which sends
        such messages: `send`, `send_many`, and the same with `_async`. It can be called as the function.

        Args:
            type: the message type.
            queue: the queue that the task sends to; required if the worker has several.

        The other arguments and the errors are those of `handler`. Raises ValueError if the worker does not
        receive from the queue.
        """
        if type == "*":
            raise PgqueBadArgumentError(
                'a task needs a message type, and "*" is none', hint="Use handler for all other types."
            )
        to = own_queue(self.queues, queue, "a task")
        options = _options(retry_on, dead_on, backoff, timeout)
        return self._handlers.register(type, lambda handler: Task(handler, type, to, self), options)

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
        the times of `cron`. See `PgqueClient.recurring.create`, which the worker calls when it
        starts.

        Any number of workers may have the decorator: each run is sent once. The role of the worker needs the
        right to send to the queue. The recurring message stays when you remove the decorator: drop it with
        `client.recurring.drop`, or `pgque recurring drop NAME`. `client.recurring.list` shows when a worker
        last registered it.

        Args:
            queue: the queue of the message; required if the worker has several.
            name: name of the recurring message, once in the database; None is "queue/type".

        Raises ValueError if the worker has one of this name, or does not receive from the queue, and
        TypeError for an object that cannot be a handler.
        """
        queue = own_queue(self.queues, queue, "a recurring message")
        recurring = Recurring(
            name or f"{queue}/{type}", queue, cron, Event(type, payload), timezone, catch_up
        )
        recurring.check_new(self._recurring)

        def made(handler: H) -> H:
            self._recurring.append(recurring)
            return handler

        return self._handlers.register(type, made)

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
        another hook, raised. An error of the hook itself is logged."""
        return self._middleware.add("error", hook)

    def run(self, *, until_idle: bool = False, catch_signals: bool = True) -> None:
        """Work until `stop()`, SIGTERM or SIGINT. With `until_idle`, return when no message is left that can
        be received now, without the pauses of `min_interval`, and without waiting for delayed messages and
        retries.

        Signals are caught in the main thread only, for all workers and consumers that run there. The previous
        handlers are restored when the last of them ends; a handler that the program gave to its event loop is
        called as well. With `catch_signals=False`, signals are left to the program, such as a web server,
        which calls `stop()`.

        After a stop no more messages are received, and those that were not started are released. Running
        handlers have `shutdown_timeout` seconds to finish; one second later a statement that still waits for
        a lock or for the server is given up. A second signal, half a second or more after the first, ends
        everything at once: running handlers are left, and their messages are redelivered.

        After a fault of the database the worker connects again, after a growing random pause, without limit.
        After a stop it tries for `shutdown_timeout` at most, if handlers run or outcomes are not reported,
        and a second more to release messages.

        Raises a PgqueError if trying again cannot help. Running handlers have `shutdown_timeout` seconds to
        finish then.

        - PgqueVersionError, PgqueQueueNotFoundError, PgqueConsumerNotFoundError, PgquePermissionDeniedError
        - PgqueQueueInUseError if the consumer of a worker, or of a subconsumer, reads on its own
        - PgqueBadArgumentError if the consumer of a Consumer has workers, or if there is no handler and
          `unknown_handler_policy` is not "ack"
        - PgqueError while the object runs already, and after it was stopped
        """
        self._handlers.check_any(self.unknown_handler_policy)
        check_until_idle(self, until_idle)
        self._liveness.check()
        with self._single.once():
            self._until_idle = until_idle
            self._is_idle = False
            self._catch_signals = catch_signals
            self._run(catch_signals)

    def _run(self, catch_signals: bool) -> None:
        with self._stopper.running(catch_signals):
            try:
                run_worker(self, self._run_here)
            except PgqueError as error:
                self._log.error(
                    "%s of queue %s ends: %s", self._title, error.queue or self.queue, one_line(error)
                )
                raise

    def stop(self) -> None:
        """Make `run` finish its running handlers and return, for good; callable from any thread.

        After that, `run` raises PgqueError.
        """
        self._first_stopper.set()
        self._stopper.set()

    def _run_here(self) -> None:
        """Run the handlers in this process."""
        self._transactions = Transactions(self, self._open)
        self._pool: ThreadPool[Item] = ThreadPool(self.concurrency, self._handle)
        self._takes_batches = self._handlers.take_batches
        if self._takes_batches:
            self._size = self.prefetch
        try:
            watch = Watch(self._end_overdue, f"{self._title} of queue {self.queue}", self._usual_lease)
            with watch, self._leases_kept():
                try:
                    self._run_sessions()
                except PgqueError as error:
                    self._finish_after(error)
                    raise
        except BaseException:
            # Cancelled, or an error: report the outcomes, and release the messages that were not started.
            self._release_queued()
            self._pool.close()
            with suppress(PgqueError, psycopg.Error, HandlerInterrupted):
                self._report_remaining()
            raise
        finally:
            self._pool.cancel_queued()
            self._give_up_running()
            self._pool.close()
            self._transactions.close()

    def _leases_kept(self) -> AbstractContextManager[None]:
        seconds = self._kept_seconds()
        if seconds is None:
            return nullcontext()  # a batch of a consumer that reads alone does not expire
        return kept(self.dsn, seconds, self._leases)

    def _leases(self) -> list[Batch[Message]]:
        return list(self._batches.values())

    def _run_sessions(self) -> None:
        self._run_sessions_to_end()
        running = sum(batch.unfinished for batch in self._batches.values() if not batch.lost)
        if self._stopper.is_abandoned and running:
            self._log.warning(
                "%s ends at the second signal: %s handlers are left, and their messages are redelivered%s",
                self._title,
                running,
                f" when their lease of {self._lease_seconds:g} s has expired" if self._is_shared else "",
            )

    def _run_sessions_to_end(self) -> None:
        while not self._is_done():
            with suppress(HandlerInterrupted):  # while it waited for a connection
                keep_connected(
                    self._stopper,
                    self._session,
                    queue=self.queue,
                    consumer=self.consumer,
                    log=self._log,
                    is_done=self._is_done,
                )

    def _finish_after(self, error: PgqueError) -> None:
        """Finish what is begun, as after a stop: handlers may run for queues that are not at fault."""
        self._stopper = Stopper()
        self._stopper.set()
        try:
            if self._is_done():
                return
            self._log.error("%s finishes its running handlers, and ends: %s", self._title, one_line(error))
            with self._stopper.running(self._catch_signals):
                self._run_sessions()
        except PgqueError as another:
            self._log.warning("%s cannot report its outcomes: %s", self._title, one_line(another))
        finally:
            self._stopper = self._first_stopper

    def _report_remaining(self) -> None:
        """Report the outcomes over a connection of its own."""
        self._collect()
        remaining = [batch for batch in self._batches.values() if batch.has_outcomes and not batch.lost]
        self._batches.clear()
        for source in self._sources:
            source.batch = None  # of a consumer, which receives it again if it is run again
        if remaining:
            stopper = Stopper()
            stopper.set()
            client = self._connect(stopper, LAST_REPORT_TIMEOUT)
            try:
                with stopper.stop_deadline(client.conn, 2 * LAST_REPORT_TIMEOUT):
                    report_and_receive(client, self.consumer, remaining, None, Message)
            finally:
                client.close()

    def _session(self, progress: Progress) -> None:
        """Work over one connection. Progress is made with the first step; the batches outlive the session."""
        client = self._connect(self._stopper, self.shutdown_timeout)
        try:
            with self._stopper.stop_deadline(client.conn, self._time_after_stop):
                if not self._stopper.is_set():
                    self._begin(client)
                while self._step(client):
                    progress.made = True
                    if self._liveness.needs_answer:
                        client._run("select 1")
                        self._liveness.note_answer()
                    if not self._all_hang():
                        self._liveness.give()
        finally:
            client.close()
            self._transactions.close_idle()  # they lead the same way

    def _begin(self, client: PgqueClient) -> None:
        """Prepare a new connection for receiving."""
        client.conn.add_notify_handler(self._on_notify)
        for source in self._sources:
            source.settings = listen(client, source.queue)
            self._prepare(client, source)
        for it in self._recurring:
            client.recurring.create(
                it.name, it.queue, it.cron, it.event, timezone=it.timezone, catch_up=it.catch_up
            )
        self._sources.wake(None)
        # Not in one round trip with a receive: if this report is given up as the last one was, because its
        # commit waits for a standby, the server goes on with the receive and leases messages to nobody.
        self._collect()
        unreported = [batch for batch in self._batches.values() if batch.has_outcomes]
        if unreported:
            report_and_receive(client, self.consumer, unreported, None, Message)
            self._forget_finished()

    def _connect(self, stopper: Stopper, seconds: float) -> PgqueClient:
        """Connect. Raises HandlerInterrupted if that takes longer than some seconds after a stop."""
        opening = partial(self._open, read_committed=True, sessions=self._sessions)
        return open_client_before(stopper, seconds, opening)

    def _open(
        self, read_committed: bool = False, sessions: set[Session] | None = None
    ) -> PgqueClient:
        """Connect; for handlers at the isolation level of their database."""
        return open_client(
            self.dsn,
            f"pgque {self.queue}/{self._name}",
            encoder=self.encoder,
            decoder=self.decoder,
            read_committed=read_committed,
            command_timeout=self.command_timeout,
            sessions=sessions,
        )

    def _time_after_stop(self) -> float:
        """Return how many seconds after a stop a statement may wait for."""
        has_work = (
            self._running or self._finished or any(batch.has_outcomes for batch in self._batches.values())
        )
        return (self.shutdown_timeout if has_work else GRACE) + LAST_REPORT_TIMEOUT

    def _on_notify(self, notify: psycopg.Notify) -> None:
        self._sources.wake(queue_of(notify.channel))

    def _step(self, client: PgqueClient) -> bool:
        """Report outcomes, and receive messages if there is room for them; without either, wait. Return False
        when all is done after a stop."""
        stopping = self._stopper.is_set()
        if stopping:
            self._release_queued()
        self._wake_at = _NEVER
        self._collect()
        for batch in list(self._batches.values()):
            extend_if_due(client, batch, self._lease_seconds, _OVERDUE)
            if batch.misses_some:
                batch.misses_some = False
                self._end_cancelled(client, batch)
        now = time.monotonic()
        unfinished = sum(batch.unfinished for batch in self._batches.values() if not batch.lost)
        to_report = [
            batch
            for batch in self._batches.values()
            if batch.unfinished == 0 or stopping or now - batch.reported_at > REPORT_INTERVAL
        ]
        for batch in to_report:
            if batch.has_outcomes:
                self._sources.wake(batch.queue)  # the next message of a key, or one that is released
        room = 0 if stopping else self._room(unfinished)
        source = self._sources.next(now) if room else None
        if source is not None:
            if self._receive_from(client, source, room, to_report):
                return True
        elif any(batch.has_outcomes for batch in to_report):
            report_and_receive(client, self.consumer, to_report, None, Message)
        self._forget_finished()
        if stopping and self._is_over(unfinished):
            return False
        if not room or self._sources.next(now) is None:
            if self._until_idle and unfinished == 0 and not self._finished and self._sources.are_empty():
                self._is_idle = True
                return False
            self._rest(client, unfinished, room)
        return True

    def _receive_from(
        self, client: PgqueClient, source: Source, count: int, to_report: Sequence[Batch[Message]]
    ) -> bool:
        """Receive messages from a queue, at most `count`, and report the outcomes of batches. Return whether
        messages came."""
        now = time.monotonic()
        count = source.left.count(count)
        self._sources.note_asked(source, now)
        receive = self._receive_statement(source.queue, count)
        try:
            received = report_and_receive(client, self.consumer, to_report, receive, self._make_message)
        except PgqueError as error:
            error.queue = error.queue or source.queue  # the text of the server does not always name it
            self._explain(error)
            raise
        self._liveness.note_answer()
        self._sources.note_received(source, len(received))
        self._forget_finished()
        # Only a consumer that reads alone takes up a batch of an earlier process; a worker never does.
        left = source.left.outcome(received, encode.interval(self.retry_after))
        if received:
            self._watches[source].reset()
            min_interval = 0 if self._until_idle else self.min_interval
            source.due_at = next_receive_at(now, min_interval, received, count)
            batch = self._batch(source, received, now)
            extend_if_due(client, batch, self._lease_seconds)  # the call waited for a lock
            # Not before: if the connection is lost, the lease of what no handler gets has to expire.
            self._batches[batch.batch_id] = batch
            if left is not None:
                batch.record(batch.open_messages(), left)
            elif self._stopper.is_set():  # while it was received
                batch.record(batch.open_messages(), RELEASE)
            else:
                self._pool.put(self._items(batch, received))
            if batch.queue != source.settings.name:  # it was renamed
                source.settings = listen(client, source.queue)
        return bool(received)

    def _items(self, batch: Batch[Message], received: Sequence[Message]) -> list[Item]:
        """Return what the threads or tasks of the pool take: the messages of a batch handler together, and
        others alone, or in equal parts, each of which has a transaction."""
        items, rest = self._together(batch, received) if self._takes_batches else ([], received)
        if not self.transactional:
            return items + [Item(batch, (message,)) for message in rest]
        size = max(1, -(-len(rest) // self.concurrency))
        return items + [Item(batch, rest[i : i + size]) for i in range(0, len(rest), size)]

    def _together(
        self, batch: Batch[Message], received: Sequence[Message]
    ) -> tuple[list[Item], Sequence[Message]]:
        """Return the calls of batch handlers, and the other messages."""
        items: list[Item] = []
        rest: list[Message] = []
        by_handler: dict[tuple[int, int], tuple[int, list[Message]]] = {}
        for message in received:
            handler = self._find(message)
            if handler is None or handler.options.size is None:
                rest.append(message)
            else:
                retries = message.retry_count or 0
                by_handler.setdefault((id(handler), retries), (handler.options.size, []))[1].append(message)
        for (_, retries), (most, messages) in by_handler.items():
            # In smaller and smaller calls after errors, so that a message that fails is alone in the end.
            size = min(most, -(-len(messages) // 10**retries))
            calls = [messages[i : i + size] for i in range(0, len(messages), size)]
            items += [Item(batch, call, together=True) for call in calls]
        return items, rest

    def _forget_finished(self) -> None:
        self._batches = {
            key: batch
            for key, batch in self._batches.items()
            if batch.misses_some or not (batch.is_finished or batch.lost)
        }

    def _rest(self, client: PgqueClient, unfinished: int, room: int) -> None:
        """Wait until there is something to do."""
        stopping = self._stopper.is_set()
        wake_at = self._outcomes_to_wait_for(unfinished, room, stopping)
        self._wake_at = wake_at
        if len(self._finished) >= wake_at:
            return
        seconds = self._wait_time(room > 0)
        for channel in wait(self._stopper, client, seconds, stopping):
            self._sources.wake(queue_of(channel))
        if unfinished == 0 and not stopping:
            for watch in self._watches.values():
                watch.check(client)

    def _room(self, unfinished: int) -> int:
        """Return how many messages to receive; 0 while there is no room, or too little to be worth a call."""
        if self._takes_batches:  # not messages count, but calls; and one may be ahead
            begun = len(self._running) + self._pool.queued()
            return self._size if begun < self.concurrency + self._is_ahead else 0
        if not self._is_ahead:
            return self._size if unfinished < self.concurrency and self._pool.queued() == 0 else 0
        room = min(self._size, self.concurrency - 1 + self._size - unfinished)
        return room if 2 * room >= self._size else 0

    def _outcomes_to_wait_for(self, unfinished: int, room: int, stopping: bool) -> int:
        """Return with how many outcomes of handlers at the earliest there is something to do: a batch to
        report, or room for messages."""
        if stopping or self._takes_batches:
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
        for item in self._pool.cancel_queued():
            for message in item.messages:
                self._finished.append((item.batch, message.msg_id, RELEASE))

    def _give_up_running(self) -> None:
        """End the transactions of handlers that run, since their messages are handled elsewhere."""
        for running in list(self._running):
            if self.transactional and self._claim(running):
                running.is_over = True

    def _end_overdue(self) -> None:
        """Reject the messages whose handlers run for too long. Without a limit, log those that run for many
        leases, once. Called by the watch, whatever the session waits for."""
        for running in list(self._running):
            messages = running.messages
            message = messages[0]
            limit, name = self._limit(message)
            seconds = time.monotonic() - running.since
            if seconds <= limit or running.is_logged:
                continue
            where = f"the handler of message {message.msg_id}, type {message.type!r}, queue {message.queue},"
            if name is None:
                running.is_logged = True
                telemetry.note_overrun(message, self.consumer)
                self._log.warning(
                    "%s has run for %.0f s without a limit: set handler_timeout", where, seconds
                )
            elif self._claim(running):  # else it has just returned
                count = len(messages)
                what = "the message is" if count == 1 else f"the {count} messages of its batch are"
                self._log.error("%s ran longer than %g s: %s rejected; %s", where, limit, what, self._left)
                reason = f"the handler ran longer than {limit:g} s ({name})"
                telemetry.note_overrun(message, self.consumer)
                self._leave(running, messages, [self._rejection(each, reason) for each in messages])
                self._stopper.wake()

    def _all_hang(self) -> bool:
        """Return whether there is no place for another handler, as all have run for many leases."""
        return sum(running.is_logged for running in list(self._running)) >= self.concurrency

    def _end_cancelled(self, client: PgqueClient, batch: Batch[Message]) -> None:
        """End the handlers of messages that were cancelled. The call of a batch handler goes on, for its
        other messages."""
        for running in [each for each in list(self._running) if each.item.batch is batch]:
            message = running.messages[0]
            if running.item.together or self._has_message(client, message) or not self._claim(running):
                continue
            self._log.warning(
                "message %s, type %r, queue %s was cancelled, or ended by another worker: %s",
                message.msg_id,
                message.type,
                message.queue,
                self._left,
            )
            self._leave(running, [message], [None])  # it may have others by now

    def _has_message(self, client: PgqueClient, message: Message) -> bool:
        """Return whether a message is still to be handled, by this worker or by another one."""
        source = self._sources.of(message.queue)
        if source is None:
            return True  # its queue was renamed a moment ago
        try:
            found = client.messages.status(source.queue, message.msg_id)
        except PgqueMessageNotFoundError:
            return False
        return any(status.consumer_name == self.consumer for status in found)

    def _leave(
        self, running: Running, messages: Sequence[Message], outcomes: Sequence[MessageOutcome | None]
    ) -> None:
        """Give the messages of a handler that runs outcomes, None is none that counts, and have the next item
        take its place."""
        running.is_over = True
        for message, outcome in zip(messages, outcomes, strict=True):
            self._finished.append((running.item.batch, message.msg_id, outcome))
            telemetry.note_outcome(message, self.consumer, "lost" if outcome is None else outcome.action)
        if self._guard is None:
            self._pool.abandon(running.place)
        else:
            self.stop()
        self._pool.put(running.others(messages))  # their transaction is lost

    @property
    def _left(self) -> str:
        """Return the log's words for a handler that is left."""
        return self._pool.abandoned if self._guard is None else "its process is ended"

    def _limit(self, message: Message) -> tuple[float, str | None]:
        """Return after how many seconds the handler of a message runs for too long, and the name of that
        limit; without a limit, after how many it is logged, and None."""
        own = self._handlers.options(message).timeout
        if own is not None:
            return own, "timeout"
        if self.handler_timeout is not None:
            return encode.total_seconds(self.handler_timeout), "handler_timeout"
        return _LONG * self._usual_lease, None

    def _collect(self) -> None:
        """Record the outcomes of handlers in their batches, and set the size of the next ones by how long
        these took."""
        while self._finished:
            batch, msg_id, outcome = self._finished.popleft()
            if outcome is None:
                batch.forget(msg_id)
                self._sources.wake(batch.queue)  # as in `_step`
            else:
                batch.record([msg_id], outcome)
            if batch.unfinished == 0 and self._is_shared:
                took = time.monotonic() - batch.received_at
                if took < _QUICK_BATCH:
                    self._size = min(2 * self._size, self.prefetch)
                    self._is_ahead = self.min_interval == 0
                elif took > _SLOW_BATCH:
                    self._is_ahead = False
                    if not self._takes_batches:
                        self._size = min(max(self._size // 2, self.concurrency), self.prefetch)

    def _is_over(self, unfinished: int) -> bool:
        """Return whether all handlers have ended. After `shutdown_timeout` the messages of those that still
        run are released."""
        if unfinished == 0:
            return not any(batch.has_outcomes for batch in self._batches.values()) and not self._finished
        if self._stopper.is_abandoned:
            return True
        if self._stopper.stopped_for() < self.shutdown_timeout:
            return False
        self._log.warning("%s messages were not handled in time, and are released", unfinished)
        self._give_up_running()
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
        return max(0.0, min([_LONGEST_WAIT, *due]))

    def _start(self, item: Item) -> Running:
        running = Running(item, self._pool.place(), item.messages)
        self._running.add(running)
        return running

    def _note_started(self, running: Running, messages: Sequence[Message]) -> None:
        """Take note that a handler begins."""
        running.note_started(messages)
        if self._guard is not None:
            limit, name = self._limit(messages[0])
            self._guard.arm(math.inf if name is None else limit)

    def _claim(self, running: Running) -> bool:
        """Take a running item, whose outcome counts for whoever takes it: its thread or task, or the session,
        which rejects what runs for too long."""
        try:
            self._running.remove(running)
        except KeyError:
            return False
        if self._guard is not None:
            self._guard.disarm()
        return True

    def _is_ending(self, running: Running) -> bool:
        return self._pool.is_closing or running not in self._running

    def _handle(self, item: Item, *more: object) -> None:
        """Run the handlers of an item, in a thread or a task of the pool."""
        batch, messages = item.batch, item.messages
        # Released: of a task that the end of the worker cancels; and of messages that others may have by now,
        # as the database was away for longer than their lease.
        outcomes: Mapping[int, MessageOutcome | None] | None = None
        again: Sequence[Item] = ()
        running: Running | None = None
        try:
            if batch.lost:
                outcomes = dict.fromkeys(message.msg_id for message in messages)
                for message in messages:
                    telemetry.note_outcome(message, self.consumer, "lost")
            elif batch.has_expired(self._lease_seconds):
                self._log_expired(batch)
            elif self.transactional and not more:
                running = self._start(item)
                outcomes, again = self._transactions.handle(running)
            elif (handler := self._handlers.of(messages[0])) is None:
                outcomes = {message.msg_id: self._unhandled(message) for message in messages}
            else:
                running = self._start(item)
                self._note_started(running, messages)
                with telemetry.handling(messages, self.consumer):
                    outcomes = self._outcomes(handler, messages, self._called(handler, messages, *more))
        except BaseException as error:
            is_of_handler = isinstance(error, (Exception, SystemExit))
            if running is not None and (is_of_handler or not self._is_ending(running)):
                outcomes = self._outcomes_of_error(running.messages, error)
                again = running.others()
            if not is_of_handler:
                raise
        finally:
            if running is None or running.is_reporting or self._claim(running):  # else it was rejected
                if outcomes is None:
                    outcomes = dict.fromkeys([message.msg_id for message in messages], RELEASE)
                for message in messages:
                    if (msg_id := message.msg_id) in outcomes:
                        outcome = outcomes[msg_id]
                        if outcome is not None:
                            telemetry.note_outcome(message, self.consumer, outcome.action)
                        self._finished.append((batch, msg_id, outcome))
                if again:
                    self._pool.put(again)
                    self._stopper.wake()  # to release them after a stop
                self._wake_if_due()

    def _called(self, handler: Registered, messages: Sequence[Message], *more: object) -> object:
        """Call the handler of messages, with the hooks around it, and return what its result is to be awaited
        of. Raises what the handler or a hook raises."""
        if handler.options.size is None:
            return self._middleware.call(handler.call, messages, messages[0], *more)
        call = partial(self._call_together, handler)
        return self._middleware.call(call, messages, messages, *more)

    def _outcomes(
        self, handler: Registered, messages: Sequence[Message], returned: object
    ) -> dict[int, MessageOutcome]:
        """Return the outcomes of messages, from what their handler returned."""
        if handler.options.size is None:
            message = messages[0]
            return {message.msg_id: self._outcome(message, returned)}
        found: dict[int, MessageOutcome] = {}
        for message in messages:
            if (error := failure_in(message, returned)) is not None:
                found.update(self._outcomes_of_error([message], error))
            else:
                found[message.msg_id] = self._outcome(message, returned_for(message, returned))
        return found

    def _call_together(self, handler: Registered, messages: Sequence[Message], *more: object) -> object:
        """Call a batch handler with what its annotation asks for. A message that does not fit fails alone."""
        given, failed = handler.read(messages)
        returned = call(handler.call, given, *more) if given else None
        check_returned(messages, returned)
        return merged(messages, returned, failed) if failed else returned

    def _wake_if_due(self) -> None:
        if len(self._finished) >= self._wake_at:
            self._wake_at = _NEVER
            self._stopper.wake()

    def _log_expired(self, batch: Batch[Message]) -> None:
        if not batch.expiry_logged:
            batch.expiry_logged = True
            self._log.warning(
                "batch %s: its lease of %g s expired before all of its messages were started;"
                " the others are released",
                batch.batch_id,
                self._lease_seconds,
            )

    def _find(self, message: Message) -> Registered | None:
        return self._handlers.of(message)

    def _after(self, message: Message) -> timedelta | None:
        """Return when a message is redelivered that is rejected; None is as the queue says."""
        own = self._handlers.options(message).retries.after(message)
        return encode.interval(self.retry_after) if own is None else own

    def _rejection(self, message: Message, reason: str | None) -> MessageOutcome:
        return MessageOutcome("nack", self._after(message), reason)

    def _unhandled(self, message: Message) -> MessageOutcome:
        reason = self._handlers.reject_reason(message, self.unknown_handler_policy)
        return ACK if reason is None else self._rejection(message, reason)

    def _outcome(self, message: Message, returned: object) -> MessageOutcome:
        success = ARCHIVE if self.archive else ACK
        return success if returned is None else batches.outcome_of(returned, success, self._after(message))

    def _outcomes_of_error(
        self, messages: Sequence[Message], error: BaseException
    ) -> dict[int, MessageOutcome]:
        if isinstance(error, HandlerOutcome):
            return {message.msg_id: self._outcome(message, error) for message in messages}
        first = messages[0]
        source = self._sources.of(first.queue)
        settings = QueueSettings(first.queue or self.queue) if source is None else source.settings
        is_bad = isinstance(error, PgquePayloadError)
        given_up_for: str | None = None
        if len(messages) > 1:  # it is not known whose error it is
            pass
        elif is_bad and self.bad_payload == "dead":
            given_up_for = "a bad payload"
        elif self._handlers.options(first).retries.gives_up(error):
            given_up_for = f"this class of errors (handler of {first.type!r})"
        after = self._after(first)
        text = settings.failure_text(first, self.consumer, error, after, self._is_shared, given_up_for)
        if len(messages) > 1:
            text = f"{text} (and so have the other {len(messages) - 1} messages of its batch)"
        shown = None if is_bad else error  # a traceback might show the payload
        self._log.warning("%s", text, exc_info=shown)
        is_dead = given_up_for is not None
        return {
            message.msg_id: batches.failure_outcome(error, self._after(message), is_dead)
            for message in messages
        }
