"""The hands of a worker, that run its handlers, and how handlers are called: once for threads, once for
tasks, with the same names."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Generic, TypeVar

from .errors import PgqueBadArgument
from .types import Message

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


def check_type(type: object, decorator: str) -> None:
    """Raise TypeError where a decorator that takes a message type was given the handler itself."""
    if not isinstance(type, str):
        raise TypeError(
            f'the message type is missing: {decorator}("order.created"), or {decorator}("*") for all'
        )


def check_some(handlers: Mapping[str, object], policy: str, decorator: str) -> None:
    """Raise PgqueBadArgument without a single handler: each message would fail until it is a dead letter."""
    if not handlers and policy != "ack":
        raise PgqueBadArgument(
            "there is no handler for any message",
            hint=f'Register one with {decorator}("type"), or pass unknown_handler_policy="ack".',
        )


class Unmatched:
    """Log each message type that has no handler once."""

    _MOST = 100  # types that are remembered; there may be any number of them

    def __init__(self, log: logging.Logger, consumer: str, handlers: Mapping[str, object]) -> None:
        self._log = log
        self._consumer = consumer
        self._handlers = handlers
        self._seen: set[str | None] = set()

    def note(self, message: Message, what: str) -> None:
        """Log the type of a message that has no handler, and what happens with such messages."""
        if message.type in self._seen or len(self._seen) >= self._MOST:
            return
        self._seen.add(message.type)
        self._log.warning(
            "no handler for messages of type %r in queue %s, consumer %s: %s; there are handlers for: %s",
            message.type,
            message.queue,
            self._consumer,
            what,
            ", ".join(repr(type) for type in sorted(self._handlers)) or "none",
        )


def call(handler: Callable[..., object], *args: object) -> object:
    """Call a handler and return its outcome. Raises TypeError for an awaitable: nothing was done yet.

    Context variables that the handler sets are gone afterwards.
    """
    outcome = copy_context().run(handler, *args)
    if inspect.isawaitable(outcome):
        if inspect.iscoroutine(outcome):
            outcome.close()
        raise TypeError(f"{_name(handler)} returned an awaitable, which only the async classes await")
    return outcome


async def call_async(handler: Callable[..., object], *args: object) -> object:
    """Call a handler and return its outcome. Raises TypeError for a plain function.

    The handler runs in a task of its own, so context variables that it sets are gone afterwards.
    """
    outcome = copy_context().run(handler, *args)
    if not inspect.isawaitable(outcome):
        raise TypeError(
            f"{_name(handler)} has to be a coroutine function (async def): it returned"
            f" {type(outcome).__name__}, which cannot be awaited"
        )
    result, ended = await asyncio.create_task(_result(outcome))
    if ended is not None:
        raise ended
    return result


async def _result(outcome: Awaitable[object]) -> tuple[object, BaseException | None]:
    try:
        return await outcome, None
    except (KeyboardInterrupt, SystemExit) as error:
        # One that leaves a task ends the whole loop.
        return None, error


def _name(handler: object) -> str:
    return f"handler {getattr(handler, '__qualname__', repr(handler))}"


class Hands(Generic[T]):
    """Run `work` on items in threads, so many at a time."""

    def __init__(self, count: int, work: Callable[[T], object]) -> None:
        self._work = work
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self.is_closing = False
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
        self.is_closing = True
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
        self.is_closing = False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(count)]

    async def _run(self) -> None:
        while True:
            item = await self._items.get()
            try:
                await self._work(item)
            except BaseException:  # noted by `work`; the hand is needed
                if self.is_closing:
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
        self.is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def serve_async(worker: AsyncWorker, work: Callable[[], Awaitable[object]]) -> None:
    """Run `work` here: tasks have no other place."""
    await work()
