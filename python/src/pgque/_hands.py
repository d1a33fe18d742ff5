"""The hands of a worker, that run its handlers: once as threads, once as tasks, with the same names."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from .workers import Worker
    from .workers_async import AsyncWorker

T = TypeVar("T")


class Hands(Generic[T]):
    """Run `work` on items in threads, so many at a time."""

    def __init__(self, count: int, work: Callable[[T], object]) -> None:
        self._work = work
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        # Daemons: a handler that outlives the end must not keep the process up.
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            with suppress(BaseException):  # noted by `work`; the hand is needed
                self._work(item)

    def put(self, item: T) -> None:
        """Have an item worked on as soon as a hand is free."""
        self._items.put(item)

    def waiting(self) -> int:
        """Count the items that no hand has taken."""
        return self._items.qsize()

    def take_back(self) -> list[T]:
        """Return the items that no hand has taken, to be worked on no more."""
        items = []
        with suppress(queue.Empty):
            while (item := self._items.get_nowait()) is not None:
                items.append(item)
        return items

    def close(self) -> None:
        """Let the hands go when they have finished what they hold."""
        for _ in self._threads:
            self._items.put(None)


def serve(worker: Worker, work: Callable[[], object]) -> None:
    """Run `work` here, or workers of the same kind in processes."""
    if worker.use == "processes":
        from ._processes import supervise

        supervise(worker)
    else:
        work()


class AsyncHands(Generic[T]):
    """Run `work` on items in tasks, so many at a time."""

    def __init__(self, count: int, work: Callable[[T], Awaitable[object]]) -> None:
        self._work = work
        self._items: asyncio.Queue[T] = asyncio.Queue()
        self._closing = False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(count)]

    async def _run(self) -> None:
        while True:
            item = await self._items.get()
            try:
                await self._work(item)
            except BaseException:  # noted by `work`; the hand is needed
                if self._closing:
                    raise

    def put(self, item: T) -> None:
        """Have an item worked on as soon as a hand is free."""
        self._items.put_nowait(item)

    def waiting(self) -> int:
        """Count the items that no hand has taken."""
        return self._items.qsize()

    def take_back(self) -> list[T]:
        """Return the items that no hand has taken, to be worked on no more."""
        items = []
        with suppress(asyncio.QueueEmpty):
            while True:
                items.append(self._items.get_nowait())
        return items

    async def close(self) -> None:
        """Cancel what the hands still do."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def serve_async(worker: AsyncWorker, work: Callable[[], Awaitable[object]]) -> None:
    """Run `work` here: tasks have no other place."""
    await work()
