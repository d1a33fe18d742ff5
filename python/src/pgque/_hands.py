"""The hands of a worker, that run its handlers, and how handlers are called: once for threads, once for
tasks, with the same names."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from .workers import Worker
    from .workers_async import AsyncWorker

T = TypeVar("T")

# The garbage collector may close a loop over messages while its thread has the lock for another one.
Lock = threading.RLock
AsyncLock = asyncio.Lock


def check_handler(handler: Callable[..., object], kind: str) -> None:
    """Raise TypeError for what is no handler of a Worker or a Consumer."""
    check_async_handler(handler, kind)
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        raise TypeError(f"{_name(handler)} is a coroutine function: use Async{kind}")


def check_async_handler(handler: Callable[..., object], kind: str) -> None:
    """Raise TypeError for what is no handler of an AsyncWorker or an AsyncConsumer."""
    if not callable(handler):
        raise TypeError(f"a handler has to be a function: {handler!r}")
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError(
            f"{_name(handler)} is a generator, which a call does not run: a handler has to be a function"
        )


def call(handler: Callable[..., object], *args: object) -> object:
    """Call a handler and return its outcome. Raises TypeError for an awaitable: nothing was done yet."""
    outcome = handler(*args)
    if inspect.isawaitable(outcome):
        if inspect.iscoroutine(outcome):
            outcome.close()
        raise TypeError(f"{_name(handler)} returned an awaitable, which only the async classes await")
    return outcome


async def call_async(handler: Callable[..., object], *args: object) -> object:
    """Call a handler and return its outcome. Raises TypeError for a plain function."""
    outcome = handler(*args)
    if not inspect.isawaitable(outcome):
        raise TypeError(
            f"{_name(handler)} has to be a coroutine function (async def): it returned"
            f" {type(outcome).__name__}, which cannot be awaited"
        )
    return await outcome


def _name(handler: object) -> str:
    return f"handler {getattr(handler, '__qualname__', repr(handler))}"


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
