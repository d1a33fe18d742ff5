"""Receive for a connection of kombu: messages of queues, which are leased, and of logs, which are only read.

A thread does all of this over a connection of its own, and connects again after a fault of the database. It
takes the outcomes that Celery gives to messages, from any thread, and reports those that have come together
in the round trip in which it receives.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from psycopg import sql

from ..client.direct import Session
from ..client.statements import MAX_BYTES
from ..codec import encode
from ..errors import PgqueError
from ..runtime import batches
from ..runtime.batches import ACK, RELEASE, Batch, MessageOutcome
from ..runtime.leases import kept
from ..runtime.sources import Source, Sources
from ..runtime.stopper import Stopper
from ..twins.client import PgqueClient
from ..twins.connection import Progress, keep_connected, open_client
from ..twins.exchange import report_and_receive, wait
from ..twins.listen import listen, queue_of
from ..types import Message
from ._logs import Log, Logs, read
from ._options import Options
from ._wire import Raw, raw_of, task_id_of

log = logging.getLogger("pgque.celery")

_FOREIGN = MessageOutcome("dead", None, "the payload is not a message of kombu")
_REJECTED = MessageOutcome("dead", None, "rejected by Celery, without requeue")

# Messages in hand where a channel has no prefetch count.
_UNLIMITED = 1000

# Seconds in which outcomes and room for messages gather before the next round trip, unless there is room for
# half of a channel's messages before.
_LINGER = 0.02

# Seconds between checks for expired leases and the like, and where notifications do not come.
_POLL_INTERVAL, _POLL_INTERVAL_BEHIND_POOLER = 1.0, 0.2

# Seconds after which a worker that stops has told its pool to begin no more tasks.
_MOMENT = 0.5

# Seconds after a stop in which outcomes are reported.
_LAST_REPORT_TIMEOUT = 5.0


@dataclass(slots=True, eq=False)
class _Held:
    """A message that was received, and has no outcome."""

    batch: Batch[Message]
    msg_id: int
    channel: int
    queue: str
    task_id: str | None


@dataclass(slots=True, eq=False)
class _Channel:
    """The queues that a channel consumes, and how many messages it may have."""

    prefetch: Callable[[], int]
    queues: dict[str, bool] = field(default_factory=dict)  # of pgque; whether each is acknowledged at once
    sources: Sources | None = None


class _Found(NamedTuple):
    """A queue to receive from, on behalf of a channel that has room for some messages."""

    channel: int
    sources: Sources
    source: Source
    room: int


class Receiver:
    """Receive in a thread, for one connection of kombu."""

    def __init__(self, dsn: str, options: Options) -> None:
        self._dsn = dsn
        self._options = options
        self.name = batches.worker_name()
        self._seconds = encode.total_seconds(options.visibility_timeout)
        self._interval = options.polling_interval or _POLL_INTERVAL
        self._pid = os.getpid()
        self._stopper = Stopper()
        self._changed = threading.Condition()
        self._control: deque[tuple[str, Raw]] = deque()
        self._tasks: deque[tuple[str, Raw]] = deque()
        self._held: dict[str, _Held] = {}
        self._in_hand: Counter[int] = Counter()
        self._channels: dict[int, _Channel] = {}
        self._logs = Logs()
        # Messages of queues that are no longer consumed, and when to check which of them can be released.
        self._cancelled: list[tuple[float, set[str], Callable[[str | None], bool]]] = []
        self._sessions: set[Session] = set()  # of connections that may be lost
        self._outcomes: list[tuple[Batch[Message], int, MessageOutcome]] = []
        self._batches: dict[int, Batch[Message]] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._readable, self._writable = socket.socketpair()
        self._readable.setblocking(False)
        self._writable.setblocking(False)

    # -- what other threads call -------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Return whether this is the copy of a parent process: it has no thread, and its lock may never be
        free."""
        return os.getpid() != self._pid

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to receive, and nothing was received that has no outcome."""
        with self._changed:
            return not (any(it.queues for it in self._channels.values()) or self._logs or self._held)

    def fileno(self) -> int:
        """Return a file descriptor that is readable when there are messages."""
        return self._readable.fileno()

    def begin(self) -> None:
        """Start the thread if it does not run, and wake it."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pgque celery", daemon=True)
                self._thread.start()
        self._stopper.wake()

    def consume(self, channel: int, queue: str, no_ack: bool, prefetch: Callable[[], int]) -> None:
        """Receive from a queue of pgque, on behalf of a channel."""
        with self._changed:
            consumed = self._channels.setdefault(channel, _Channel(prefetch))
            consumed.queues[queue] = no_ack
            self._choose_sources(consumed)
        self.begin()

    def cancel(self, channel: int, queue: str, is_known: Callable[[str | None], bool]) -> None:
        """Receive no more from a queue. Release its messages that were not delivered, and in a moment those
        whose task is no longer known."""
        with self._changed:
            consumed = self._channels.get(channel)
            if consumed is not None and consumed.queues.pop(queue, None) is not None:
                self._choose_sources(consumed)
            tags = [tag for tag, held in self._held.items() if (held.channel, held.queue) == (channel, queue)]
            undelivered = self._remove_undelivered(tags)
            self._cancelled.append((time.monotonic() + _MOMENT, set(tags) - undelivered, is_known))
        for tag in undelivered:
            self.report(tag, RELEASE)

    def _remove_undelivered(self, tags: Iterable[str]) -> set[str]:
        """Return those of the messages that were not delivered, which they never will be."""
        waiting = {raw["properties"]["delivery_tag"] for _, raw in self._tasks} & set(tags)
        self._tasks = deque(it for it in self._tasks if it[1]["properties"]["delivery_tag"] not in waiting)
        return waiting

    def read(self, queue: str, exchange: str, source: Log) -> None:
        """Read the log of an exchange for a queue of kombu."""
        self._logs.add(queue, exchange, source)
        self.begin()

    def forget(self, queue: str) -> None:
        """Read no more for a queue of kombu."""
        self._logs.forget(queue)
        with self._changed:
            self._control = deque((name, raw) for name, raw in self._control if name != queue)

    def take(
        self, channel: int, queue: str, messages: list[Message], received_at: float
    ) -> list[tuple[str, Raw]]:
        """Take over messages that were received, and return them as kombu's; others are given up."""
        if not messages:
            return []
        batch = Batch(messages, received_at)
        taken = []
        with self._changed:
            self._batches[batch.batch_id] = batch
            for message in messages:
                tag = f"{batch.batch_id}-{message.msg_id}"
                raw = raw_of(message.payload, tag, (message.receive_count or 1) > 1)
                if raw is None:
                    log.error("message %s of queue %s is not one of kombu", message.msg_id, queue)
                    self._outcomes.append((batch, message.msg_id, _FOREIGN))
                    continue
                self._held[tag] = _Held(batch, message.msg_id, channel, queue, task_id_of(raw))
                self._in_hand[channel] += 1
                taken.append((queue, raw))
        return taken

    def acknowledge(self, tag: str) -> None:
        """Acknowledge a message."""
        self.report(tag, ACK)

    def reject(self, tag: str, requeue: bool) -> None:
        """Give a message up, or release it."""
        self.report(tag, RELEASE if requeue else _REJECTED)

    def report(self, tag: str, outcome: MessageOutcome) -> None:
        """Note the outcome of a message, to be reported at once; the first one counts."""
        with self._changed:
            held = self._held.pop(tag, None)
            if held is None:
                return
            self._in_hand[held.channel] -= 1
            self._outcomes.append((held.batch, held.msg_id, outcome))
        self._stopper.wake()

    def close_channel(self, channel: int) -> None:
        """Receive no more for a channel, and release its messages."""
        with self._changed:
            self._channels.pop(channel, None)
        self.release(channel)

    def release(self, channel: int) -> None:
        """Release the messages of a channel."""
        with self._changed:
            tags = [tag for tag, held in self._held.items() if held.channel == channel]
            self._remove_undelivered(tags)
        for tag in tags:
            self.report(tag, RELEASE)

    def next(self, timeout: float | None) -> tuple[str, Raw]:
        """Return the next message and the queue it is for, those of logs first.

        Raises TimeoutError after `timeout` seconds (None: no limit), and the error that ended the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._control or self._tasks or self._error, timeout)
            if self._control:
                return self._control.popleft()
            if self._tasks:
                return self._tasks.popleft()
            if self._error is not None:
                raise self._error
        raise TimeoutError("no message came in time")

    def drain_signal(self) -> None:
        """Read what made `fileno` readable."""
        with suppress(BlockingIOError):
            self._readable.recv(4096)

    def close(self) -> None:
        """Report what is left, for some seconds at most, and end."""
        for channel in list(self._channels) + list(self._in_hand):
            self.close_channel(channel)
        self._stopper.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LAST_REPORT_TIMEOUT + 1)
        self._readable.close()
        self._writable.close()

    # -- the thread --------------------------------------------------------------------------------

    def _choose_sources(self, consumed: _Channel) -> None:
        weights = dict.fromkeys(consumed.queues, 1.0)
        consumed.sources = Sources(weights, "weighted", self._interval) if weights else None

    def _run(self) -> None:
        try:
            with (
                self._stopper.running(False),
                kept(self._dsn, self._seconds, lambda: list(self._batches.values())),
            ):
                keep_connected(
                    self._stopper,
                    self._session,
                    queue="celery",
                    consumer=self._options.consumer,
                    log=log,
                    is_done=self._is_done,
                )
        except BaseException as error:
            with self._changed:
                self._error = error
                self._signal()

    def _is_done(self) -> bool:
        if not self._stopper.is_set():
            return False
        is_left = self._outcomes or any(batch.has_outcomes for batch in list(self._batches.values()))
        return not is_left or self._stopper.stopped_for() > _LAST_REPORT_TIMEOUT

    def _signal(self) -> None:
        """Wake the threads that wait for messages."""
        self._changed.notify_all()
        with suppress(OSError):  # full or closed
            self._writable.send(b"x")

    def _session(self, progress: Progress) -> None:
        """Work over one connection; what is held outlives it."""
        with closing(
            open_client(
                self._dsn,
                "pgque celery",
                read_committed=True,
                command_timeout=self._options.command_timeout,
                sessions=self._sessions,
            )
        ) as client:
            client.conn.add_notify_handler(lambda notify: self._note(queue_of(notify.channel)))
            if self._options.polling_interval is None:
                self._interval = _POLL_INTERVAL if client._is_direct else _POLL_INTERVAL_BEHIND_POOLER
            with self._changed:
                for consumed in self._channels.values():
                    self._choose_sources(consumed)
            listening: set[str] = set()
            with self._stopper.stop_deadline(client.conn, _LAST_REPORT_TIMEOUT):
                self._report_and_receive(client, may_receive=False)  # alone, as Worker._begin says why
                while not self._is_done():
                    began = time.monotonic()
                    self._listen(client, listening)
                    self._release_forgotten()
                    has_more = self._report_and_receive(client)
                    self._read_logs(client)
                    progress.made = True
                    if not has_more:
                        self._wait(client, self._interval)
                    self._gather(client, began + _LINGER)

    def _release_forgotten(self) -> None:
        """Release messages whose tasks the worker has forgotten, as it stops."""
        now = time.monotonic()
        due = [it for it in self._cancelled if it[0] <= now]
        for it in due:
            self._cancelled.remove(it)
            for tag in it[1]:
                held = self._held.get(tag)
                if held is not None and not it[2](held.task_id):
                    self.report(tag, RELEASE)

    def _listen(self, client: PgqueClient, listening: set[str]) -> None:
        with self._changed:
            wanted = {queue for consumed in self._channels.values() for queue in consumed.queues}
        wanted |= self._logs.queues()
        for queue in wanted - listening:
            listen(client, queue)
            listening.add(queue)
            self._note(queue)
        for queue in listening - wanted:
            client.conn.execute(sql.SQL("unlisten {}").format(sql.Identifier(f"pgque_{queue}")))
            listening.discard(queue)

    def _note(self, queue: str) -> None:
        """Take note that a queue may have messages."""
        self._logs.note(queue)
        with self._changed:
            self._wake_sources(queue)

    def _wait(self, client: PgqueClient, interval: float) -> None:
        for channel in wait(self._stopper, client, interval, self._stopper.is_set()):
            self._note(queue_of(channel))

    def _gather(self, client: PgqueClient, until: float) -> None:
        """Wait until a time, unless a round trip is worth it before."""
        while (rest := until - time.monotonic()) > 0 and not self._stopper.is_set():
            with self._changed:
                found = self._find_source()
                if found is not None and found.room >= self._in_hand[found.channel]:
                    return
            self._wait(client, rest)

    def _report_and_receive(self, client: PgqueClient, may_receive: bool = True) -> bool:
        """Report outcomes, and receive messages for a channel that has room for some; return whether there is
        more to receive."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
            for batch, msg_id, outcome in outcomes:
                batch.record([msg_id], outcome)
                if outcome is RELEASE:
                    self._wake_sources(batch.queue)  # it can be received again
            reported = [batch for batch in self._batches.values() if batch.has_outcomes and not batch.lost]
            found = self._find_source() if may_receive and not self._stopper.is_set() else None
        if found is None:
            if reported:
                report_and_receive(client, None, reported, None, Message)
                self._forget_finished()
            return False
        now = time.monotonic()
        queue, consumer = found.source.queue, self._options.consumer
        found.sources.note_asked(found.source, now)
        timeout = self._options.visibility_timeout
        receive = batches.receive(queue, consumer, self.name, found.room, timeout, MAX_BYTES)
        try:
            received = report_and_receive(client, consumer, reported, receive, Message)
        except PgqueError as error:
            error.queue = error.queue or queue
            raise
        self._forget_finished()
        found.sources.note_received(found.source, len(received))
        self._deliver(found.channel, queue, self.take(found.channel, queue, received, now))
        with self._changed:
            return self._find_source() is not None

    def _forget_finished(self) -> None:
        with self._changed:
            for batch in list(self._batches.values()):
                if batch.is_finished or batch.lost:
                    del self._batches[batch.batch_id]

    def _wake_sources(self, queue: str | None) -> None:
        for consumed in self._channels.values():
            if queue in consumed.queues and consumed.sources is not None:
                consumed.sources.wake(queue)

    def _find_source(self) -> _Found | None:
        now = time.monotonic()
        for channel, consumed in self._channels.items():
            room = (consumed.prefetch() or _UNLIMITED) - self._in_hand[channel]
            if room > 0 and consumed.sources is not None:
                source = consumed.sources.next(now)
                if source is not None:
                    return _Found(channel, consumed.sources, source, room)
        return None

    def _deliver(self, number: int, queue: str, messages: list[tuple[str, Raw]]) -> None:
        with self._changed:
            consumed = self._channels.get(number)
            is_consumed = consumed is not None and queue in consumed.queues
            no_ack = consumed is not None and consumed.queues.get(queue, False)
            if is_consumed:
                name = queue.removeprefix(self._options.queue_prefix)
                self._tasks.extend((name, raw) for _, raw in messages)
                self._signal()
        for _, raw in messages:
            if not is_consumed:  # since the call began
                self.report(raw["properties"]["delivery_tag"], RELEASE)
            elif no_ack:
                self.report(raw["properties"]["delivery_tag"], ACK)

    def _read_logs(self, client: PgqueClient) -> None:
        for queue, it in self._logs.due(client, self._interval):
            found = read(client, it)
            with self._changed:
                self._control.extend((queue, raw) for raw in found)
                self._signal()
