"""Locks and pools with the same names for threads and for tasks, and the choice between threads and
processes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ..errors import PgqueBadArgumentError, PgqueError

if TYPE_CHECKING:
    from .processes import ProcessWorker
    from .stopper import AsyncStopper, Stopper

T = TypeVar("T")

# Seconds that a task has to end after it was cancelled: it may swallow that, or hang while it cleans up.
CLEAN_UP = 5.0

# The garbage collector may close a loop over messages while its thread has the lock for another one.
Lock = threading.RLock
AsyncLock = asyncio.Lock


class ThreadPool(Generic[T]):
    """Run `work` on items in threads, `size` of them at a time.

    A thread starts with the context in which the pool was made.
    """

    # The log's words for a handler in a place that is abandoned.
    abandoned = "its thread cannot be cancelled and goes on, but its outcome does not count"

    def __init__(self, size: int, work: Callable[[T], object]) -> None:
        self._work = work
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._context = copy_context()
        self.is_closing = False
        self._threads: set[threading.Thread] = set()
        for _ in range(size):
            self._start()

    def _start(self) -> None:
        # A daemon: a handler that outlives the end must not keep the process up.
        thread = threading.Thread(target=self._context.copy().run, args=(self._run,), daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            with suppress(BaseException):  # recorded by `work`; the thread goes on
                self._work(item)
            if threading.current_thread() not in self._threads:
                return

    def place(self) -> threading.Thread:
        """Return where the current item is worked on, for `abandon`."""
        return threading.current_thread()

    def abandon(self, place: threading.Thread) -> None:
        """Have another thread work in place of one, which ends when its item is finished."""
        self._threads.discard(place)
        self._start()

    def put(self, items: Sequence[T]) -> None:
        """Have items worked on, each as soon as a thread is free."""
        for item in items:
            self._items.put(item)

    def queued(self) -> int:
        """Count the items that no thread has started."""
        return self._items.qsize()

    def cancel_queued(self) -> list[T]:
        """Return the items that no thread has started, and take them out of the queue."""
        items = []
        with suppress(queue.Empty):
            while (item := self._items.get_nowait()) is not None:
                items.append(item)
        return items

    def close(self) -> None:
        """End the threads, each when its item is finished."""
        self.is_closing = True
        for _ in self._threads:
            self._items.put(None)


class TaskPool(Generic[T]):
    """Run `work` on items, each in its own task, `size` of them at a time.

    A task starts with the context in which the pool was made, and what it sets there ends with it.
    """

    abandoned = "its task is cancelled"

    def __init__(self, size: int, work: Callable[[T], Awaitable[object]]) -> None:
        self._work = work
        self._free = list(range(size))  # numbers of places for a task
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by place
        self._abandoned: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to a task
        self._items: deque[T] = deque()
        self._unassigned = 0  # items that no task will take, of those that were made
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self.is_closing = False

    def put(self, items: Sequence[T]) -> None:
        """Have items worked on, each as soon as a task is free."""
        self._items.extend(items)
        started = min(len(self._free), len(items))
        self._unassigned += len(items) - started
        for _ in range(started):
            self._start(self._free.pop())

    def _start(self, place: int) -> None:
        # A new task copies the current context, which otherwise is that of the task that ends.
        self._tasks[place] = self._context.run(self._loop.create_task, self._run(place))

    async def _run(self, place: int) -> None:
        # The item is not taken before the task runs: one that is cancelled first leaves it in the queue.
        try:
            if self._items:
                await self._work(self._items.popleft())
        except BaseException:  # noqa: S110, recorded by `work`
            pass
        if self._tasks.get(place) is asyncio.current_task():  # otherwise it was abandoned
            self._follow(place)

    def _follow(self, place: int) -> None:
        """Start the next item in a place, or free the place."""
        if self._unassigned and not self.is_closing:
            self._unassigned -= 1
            self._start(place)
        else:
            self._free.append(place)

    def place(self) -> asyncio.Task[Any] | None:
        """Return where the current item is worked on, for `abandon`."""
        return asyncio.current_task()

    def abandon(self, place: asyncio.Task[Any] | None) -> None:
        """Cancel a task, and have another one work in its place at once: a task may outlive its
        cancellation."""
        for number, task in self._tasks.items():
            if task is place:
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)
                del self._tasks[number]
                self._follow(number)
                return

    def queued(self) -> int:
        """Count the items that no task has started."""
        return len(self._items)

    def cancel_queued(self) -> list[T]:
        """Return the items that no task has started, and take them out of the queue."""
        items = list(self._items)
        self._items.clear()
        self._unassigned = 0
        return items

    async def close(self) -> None:
        """Cancel the tasks, and wait some seconds for their end, but not for those that were abandoned."""
        self.is_closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLEAN_UP)


class SingleRun:
    """See to it that one object runs once at a time, and not after it was stopped.

    Args:
        kind: what the object is, for errors.
        stopper: set when the object is stopped.
    """

    def __init__(self, kind: str, stopper: Stopper | AsyncStopper) -> None:
        self._kind = kind
        self._stopper = stopper
        self._running = threading.Lock()
        self._has_run = False

    @contextmanager
    def once(self) -> Iterator[None]:
        """Run the block. Raises PgqueError while another block runs, and if the object was stopped after it
        had run: one that is stopped first, as by another thread, has nothing to do."""
        if not self._running.acquire(blocking=False):
            raise PgqueError(
                f"this {self._kind} runs already",
                hint="Make an object for each thread or task that runs one.",
            )
        try:
            if self._has_run and self._stopper.is_set():
                raise PgqueError(
                    f"this {self._kind} was stopped, which is for good",
                    hint="Make another object, and run it.",
                )
            self._has_run = True
            yield
        finally:
            self._running.release()


def check_until_idle(worker: object, until_idle: bool) -> None:
    """Raise PgqueBadArgumentError for a worker of processes, none of which can tell that the others have
    nothing left."""
    if until_idle and getattr(worker, "use", None) == "processes":
        raise PgqueBadArgumentError(
            "until_idle is not possible with use='processes'", hint="Use threads, or call stop()."
        )


def run_worker(worker: object, work: Callable[[], object]) -> None:
    """Run `work` in this process, or copies of a worker in several processes."""
    if getattr(worker, "use", None) == "processes":
        from .processes import supervise  # loads multiprocessing, which other workers do not need

        supervise(cast("ProcessWorker", worker))
    else:
        work()


async def run_worker_async(worker: object, work: Callable[[], Awaitable[object]]) -> None:
    """Run `work` in this process: tasks have no other place."""
    await work()
