"""Locks and pools with the same names for threads and for tasks, and the choice between threads and
processes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ._processes import ProcessWorker

T = TypeVar("T")

# The garbage collector may close a loop over messages while its thread has the lock for another one.
Lock = threading.RLock
AsyncLock = asyncio.Lock


class ThreadPool(Generic[T]):
    """Run `work` on items in threads, so many at a time."""

    def __init__(self, size: int, work: Callable[[T], object]) -> None:
        self._work = work
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self.is_closing = False
        # Daemons: a handler that outlives the end must not keep the process up.
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(size)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            with suppress(BaseException):  # recorded by `work`; the thread goes on
                self._work(item)

    def put(self, item: T) -> None:
        """Have an item worked on as soon as a thread is free."""
        self._items.put(item)

    def queued(self) -> int:
        """Count the items that no thread has started."""
        return self._items.qsize()

    def cancel_queued(self) -> list[T]:
        """Return the items that no thread has started; they are not worked on any more."""
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
    """Run `work` on items in tasks, so many at a time."""

    def __init__(self, size: int, work: Callable[[T], Awaitable[object]]) -> None:
        self._work = work
        self._items: asyncio.Queue[T] = asyncio.Queue()
        self.is_closing = False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(size)]

    async def _run(self) -> None:
        while True:
            item = await self._items.get()
            try:
                await self._work(item)
            except BaseException:  # recorded by `work`; the task goes on
                if self.is_closing:
                    raise

    def put(self, item: T) -> None:
        """Have an item worked on as soon as a task is free."""
        self._items.put_nowait(item)

    def queued(self) -> int:
        """Count the items that no task has started."""
        return self._items.qsize()

    def cancel_queued(self) -> list[T]:
        """Return the items that no task has started; they are not worked on any more."""
        items = []
        with suppress(asyncio.QueueEmpty):
            while True:
                items.append(self._items.get_nowait())
        return items

    async def close(self) -> None:
        """Cancel the tasks."""
        self.is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def run_worker(
    worker_class: Callable[..., ProcessWorker], worker: ProcessWorker, work: Callable[[], object]
) -> None:
    """Run `work` in this process, or a worker of the class in each of several processes."""
    if worker.use == "processes":
        from ._processes import supervise  # loads multiprocessing, which other workers do not need

        supervise(worker_class, worker)
    else:
        work()


async def run_worker_async(
    worker_class: Callable[..., object], worker: object, work: Callable[[], Awaitable[object]]
) -> None:
    """Run `work` in this process: tasks have no other place."""
    await work()
