"""Wait for notifications, and stop: with the same names for threads and for asyncio.

`set()` ends a wait at once, and may be called from any thread and from a signal handler.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from types import FrameType

from psycopg import AsyncConnection, Connection

from ..client.limit import until

# Seconds after a stop that a wait for the database has, before a signal interrupts it. A second signal that
# comes earlier is the same as the first.
GRACE = 0.5

# Seconds between checks whether something takes too long after a stop.
_CHECK_INTERVAL = 0.1

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class HandlerInterrupted(KeyboardInterrupt):
    """End a wait for the database that still runs half a second after SIGTERM or SIGINT, and a handler that
    blocks the event loop at a second signal.

    A KeyboardInterrupt, so that psycopg cancels the statement that it waits for.
    """


def _drain_notifications(conn: Connection[object] | AsyncConnection[object]) -> list[str]:
    """Return the channels of the notifications that have come."""
    encoding = conn.info.encoding
    channels = []
    conn.pgconn.consume_input()
    while (notify := conn.pgconn.notifies()) is not None:
        channels.append(notify.relname.decode("utf-8" if encoding == "ascii" else encoding, "replace"))
    return channels


class _Stop:
    """The state of a stop: whether, when and how a program asked for it."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self._stopped_at = 0.0  # stays 0 if the program sets its own event: then all time is over at once
        self._signalled_at = 0.0  # of the first signal; 0 before that
        self.is_abandoned = False  # whether a second signal asked to end at once

    def is_set(self) -> bool:
        return self._stop.is_set()

    def stopped_for(self) -> float:
        """Return how many seconds ago it was stopped; 0 before that, and infinity once it is abandoned."""
        if self.is_abandoned:
            return math.inf
        return time.monotonic() - self._stopped_at if self._stop.is_set() else 0.0

    def out_of_time(self) -> bool:
        """Return whether what waits for the database after a stop may be interrupted."""
        return self.stopped_for() > GRACE

    def stop_deadline(
        self, conn: object, seconds: float | Callable[[], float]
    ) -> AbstractContextManager[None]:
        """Return a block whose calls over the connection are given up some seconds after a stop: a lock, or
        a server that does not answer, may keep them for any time. A function returns the seconds of the
        moment; -math.inf ends a call at once, also before a stop."""

        def deadline() -> float:
            allowed = seconds() if callable(seconds) else seconds
            if self.is_abandoned or allowed == -math.inf:
                return -math.inf
            return self._stopped_at + allowed if self._stop.is_set() else math.inf

        return until(conn, deadline)

    def _note_stop(self) -> None:
        if not self._stop.is_set():
            self._stopped_at = time.monotonic()
            self._stop.set()

    def _note_signal(self) -> float:
        """Return how many seconds ago the first signal came, 0 if this is the first. One that comes more than
        half a second later asks to end at once: the terminal and a process manager may both send the first.
        """
        now = time.monotonic()
        self._signalled_at = self._signalled_at or now
        return now - self._signalled_at


class Stopper(_Stop):
    """Wait for notifications, and stop, in a thread. Setting the event `stop` is a stop, too."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        super().__init__(stop)
        self._writer: socket.socket | None = None
        self._reader: socket.socket | None = None
        self._interruptible = False
        self._signalling = threading.Lock()
        self._catching = False
        self._resending = False  # whether the next signal is `_signal_again`

    def set(self) -> None:
        self._note_stop()
        self.wake()

    def abandon(self) -> None:
        """Stop at once, without what still runs."""
        self.is_abandoned = True
        self.set()

    def wake(self) -> None:
        """Make a `wait` return, the one that runs or the next."""
        writer = self._writer
        if writer is not None:
            with suppress(OSError):  # full or closed: the reader wakes anyway
                writer.send(b"x")

    def waitables(self) -> list[socket.socket]:
        """Return what is readable after `wake`, while `running`."""
        return [self._reader] if self._reader is not None else []

    def sleep(self, seconds: float) -> None:
        """Sleep, or less when stopped."""
        self._stop.wait(seconds)

    def sleep_to_end(self, seconds: float) -> None:
        """Sleep, stopped or not."""
        time.sleep(seconds)

    def wait(self, conn: Connection[object], seconds: float, draining: bool = False) -> list[str]:
        """Wait for a notification on an idle connection, or for `wake`, at most so long; after a stop only
        when `draining`. Return the channels of notifications. Raises OperationalError when the connection is
        lost."""
        if self._stop.is_set() and not draining:
            return []
        # Not select(), which a process with a thousand open files cannot use.
        with selectors.DefaultSelector() as selector:
            selector.register(conn.fileno(), selectors.EVENT_READ)
            if self._reader is not None:
                selector.register(self._reader, selectors.EVENT_READ)
            readable = {key.fileobj for key, _ in selector.select(max(0.0, seconds))}
        if self._reader in readable:
            self._reader.recv(4096)
        return _drain_notifications(conn) if conn.fileno() in readable else []

    def call(self, work: Callable[[], object]) -> None:
        """Run `work`; what outlives a stop by signal is interrupted."""
        outer, self._interruptible = self._interruptible, True
        try:
            work()
        finally:
            self._interruptible = outer

    def give_up_after(self, seconds: float, work: Callable[[], object]) -> None:
        """Run `work` in a thread. Raises HandlerInterrupted `seconds` after a stop, or by a signal."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)

        def wait() -> None:
            thread.start()
            while thread.is_alive():
                thread.join(_CHECK_INTERVAL)
                if self.stopped_for() > seconds:
                    raise HandlerInterrupted("the time after the stop is over")

        self.call(wait)
        if failed:
            raise failed[0]

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._resending:
            self._resending = False
        elif (since_first := self._note_signal()) > GRACE:
            self.abandon()
        elif not self.out_of_time():
            self.set()
            if since_first == 0:
                after = GRACE + 0.05 - self.stopped_for()
                timer = threading.Timer(after, self._signal_again, (threading.get_ident(), signum))
                timer.daemon = True
                timer.start()
        if self.out_of_time() and self._interruptible:
            raise HandlerInterrupted(f"interrupted by {signal.Signals(signum).name}")

    def _signal_again(self, thread: int, signum: int) -> None:
        # A real signal, because that alone ends a sleep or a system call; only while our own handler is in
        # place.
        with self._signalling:
            if self._catching and hasattr(signal, "pthread_kill"):
                self._resending = True
                signal.pthread_kill(thread, signum)

    @contextmanager
    def running(self, catch_signals: bool) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT inside the block, unless `catch_signals` is False; only the main thread
        can, elsewhere nothing is changed."""
        with self._wakeable(), self._catching_signals() if catch_signals else nullcontext():
            yield

    @contextmanager
    def _wakeable(self) -> Iterator[None]:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.setblocking(False)
        try:
            yield
        finally:
            reader, writer, self._reader, self._writer = self._reader, self._writer, None, None
            reader.close()
            writer.close()

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._catching = True
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            with self._signalling:
                self._catching = False
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


class AsyncStopper(_Stop):
    """Wait for notifications, and stop, in an event loop. Everything but `set` and `is_set` belongs to that
    loop."""

    def __init__(self) -> None:
        super().__init__()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Future[HandlerInterrupted | None] | None = None

    def set(self) -> None:
        self._note_stop()
        self.wake()

    def abandon(self) -> None:
        """Stop at once, without what still runs."""
        self.is_abandoned = True
        self.set()

    def wake(self) -> None:
        """Make a `wait` return, the one that runs or the next."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._wake.set)

    async def _wait_for_wake(self, seconds: float, draining: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stop.is_set() and not draining:
            return
        # Not asyncio.wait_for(), which before Python 3.12 forgets a cancellation that comes with the wake.
        timer = self._loop.call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def sleep(self, seconds: float) -> None:
        """Sleep, or less when stopped."""
        end = time.monotonic() + seconds
        while not self._stop.is_set() and (left := end - time.monotonic()) > 0:
            self._wake.clear()  # by `wake`, which is for `wait`
            await self._wait_for_wake(left)

    async def sleep_to_end(self, seconds: float) -> None:
        """Sleep, stopped or not."""
        await asyncio.sleep(seconds)

    async def wait(self, conn: AsyncConnection[object], seconds: float, draining: bool = False) -> list[str]:
        """Wait for a notification on an idle connection, or for `wake`, at most so long; after a stop only
        when `draining`. Return the channels of notifications. Raises OperationalError when the connection is
        lost."""
        loop = asyncio.get_running_loop()
        fileno = conn.fileno()
        readable = False

        def on_readable() -> None:
            nonlocal readable
            readable = True
            self._wake.set()

        loop.add_reader(fileno, on_readable)
        try:
            await self._wait_for_wake(max(0.0, seconds), draining)
        finally:
            loop.remove_reader(fileno)
        if draining or not self._stop.is_set():
            self._wake.clear()
        return _drain_notifications(conn) if readable else []

    async def call(self, work: Callable[[], Coroutine[object, object, object]]) -> None:
        """Run `work`; what outlives a stop by signal is interrupted."""

        async def run() -> HandlerInterrupted | None:
            try:
                await work()
            except HandlerInterrupted as interrupted:
                # A KeyboardInterrupt that leaves a task ends the whole loop.
                return interrupted
            return None

        outer = self._task
        task = self._task = asyncio.ensure_future(run())
        try:
            interrupted = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self.out_of_time():
                raise HandlerInterrupted("interrupted by a signal") from None
            task.cancel()
            with suppress(BaseException):
                await task
            raise
        finally:
            self._task = outer
        if interrupted is not None:
            raise interrupted

    async def give_up_after(
        self, seconds: float, work: Callable[[], Coroutine[object, object, object]]
    ) -> None:
        """Run `work`. Raises HandlerInterrupted `seconds` after a stop, or by a signal."""

        async def watch() -> None:
            while self.stopped_for() <= max(seconds, GRACE):  # noqa: ASYNC110
                await asyncio.sleep(_CHECK_INTERVAL)
            self._interrupt()

        watching = asyncio.ensure_future(watch())
        try:
            await self.call(work)
        finally:
            watching.cancel()

    def stop_by_signal(self) -> bool:
        """Stop, and interrupt what is running then half a second later; for signal handlers. Return whether
        this is a second signal and the event loop has not run since the first, as a handler blocks it."""
        since_first = self._note_signal()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nothing runs
                self._loop.call_soon_threadsafe(self._on_signal, since_first)
        return since_first > GRACE and not self._stop.is_set()

    def _on_signal(self, since_first: float) -> None:
        if since_first > GRACE:
            self.abandon()
        elif not self.out_of_time():
            self.set()
            if since_first == 0:
                left = GRACE + 0.05 - self.stopped_for()
                asyncio.get_running_loop().call_later(left, self._interrupt)
        if self.out_of_time():
            self._interrupt()

    def _interrupt(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @asynccontextmanager
    async def running(self, catch_signals: bool) -> AsyncIterator[None]:
        """Stop on SIGTERM and SIGINT inside the block, unless `catch_signals` is False; only the main thread
        can, elsewhere nothing is changed."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()  # which belongs to one loop: that of an earlier run may be another
        if not catch_signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        with _signals.forwarded_to(self):
            yield


class _Signals:
    """Forward signals to all that run in the event loop of the main thread.

    By signal.signal and not by the loop, which has one handler for a signal: if the program gave it one, that
    is called as well.
    """

    def __init__(self) -> None:
        self._stoppers: list[AsyncStopper] = []
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        blocked = [stopper for stopper in self._stoppers if stopper.stop_by_signal()]
        if blocked:
            raise HandlerInterrupted("a second signal came while this blocks the event loop")

    @contextmanager
    def forwarded_to(self, stopper: AsyncStopper) -> Iterator[None]:
        for number in SIGNALS:
            if signal.getsignal(number) != self._forward:
                self._before[number] = signal.signal(number, self._forward)
        self._stoppers.append(stopper)
        try:
            yield
        finally:
            self._stoppers.remove(stopper)
            if not self._stoppers:
                self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._forward:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()


_signals = _Signals()
