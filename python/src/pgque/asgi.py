"""Run workers inside a web application: Starlette, FastAPI, or any other that has a lifespan.

    app = FastAPI(lifespan=pgque.asgi.lifespan(worker))

Nothing is imported besides this package.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

from .runtime.consumer import AsyncConsumer
from .runtime.workers import AsyncWorker

__all__ = ["Running", "lifespan", "running"]

Runnable: TypeAlias = AsyncWorker | AsyncConsumer
Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[object]]

log = logging.getLogger("pgque.asgi")


class Running:
    """Report the workers and consumers that run in an application."""

    def __init__(self, workers: Sequence[Runnable]) -> None:
        self._workers = workers
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False

    def problems(self) -> list[str]:
        """Return a line for each worker that has ended before the application did, with its error.

        A worker that is connecting again to its database is not among them.
        """
        return [_ending(name, task) for name, task in self._tasks.items() if task.done()]

    async def _start(self) -> None:
        for worker in self._workers:
            name = _name(worker)
            if worker._stopper.is_set():
                raise RuntimeError(
                    f"{name} was stopped, for good: pass a function that makes one"
                    " where an application is started more than once, as in tests"
                )
            if name in self._tasks:
                raise ValueError(f"{name} is given twice")
            self._tasks[name] = asyncio.create_task(worker.run(catch_signals=False), name=name)
        await asyncio.sleep(0)  # each runs to its first wait, so what it refuses has been raised
        for task in self._tasks.values():
            if task.done():
                task.result()
        for task in self._tasks.values():
            task.add_done_callback(self._note_end)

    async def _stop(self) -> None:
        """Stop all workers, and wait until their handlers are finished."""
        self._is_stopping = True
        for worker in self._workers:
            worker.stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not self._is_stopping:
            error = None if task.cancelled() else task.exception()
            log.error(
                "%s; the application goes on without it", _ending(task.get_name(), task), exc_info=error
            )


def _name(worker: Runnable) -> str:
    if isinstance(worker, AsyncWorker):
        return f"worker {worker.worker} of queue {worker.queue}"
    subconsumer = f"/{worker.subconsumer}" if worker.subconsumer else ""
    return f"consumer {worker.consumer}{subconsumer} of queue {worker.queue}"


def _ending(name: str, task: asyncio.Task[None]) -> str:
    if task.cancelled():
        return f"{name} was cancelled"
    error = task.exception()
    return f"{name} was stopped" if error is None else f"{name} ended: {error}"


@asynccontextmanager
async def running(*workers: Runnable | Callable[[], Runnable]) -> AsyncIterator[Running]:
    """Run workers and consumers while the block runs, for a lifespan of your own.

    At the end of the block they are stopped, and running handlers have as long to finish as after `stop()`.
    Signals are left to the server. A worker that ends earlier is logged as an error to `pgque.asgi`, and is
    among `Running.problems()`; the block goes on.

    Args:
        workers: each is an AsyncWorker, an AsyncConsumer, or a function without arguments that returns one.

    Raises TypeError for anything else, ValueError for two of one name, RuntimeError for a worker that was
    stopped before, and the errors of `AsyncWorker.run` that come before it connects.
    """
    group = Running([_checked(worker) for worker in workers])
    try:
        await group._start()
        yield group
    finally:
        await group._stop()


def lifespan(
    *workers: Runnable | Callable[[], Runnable], around: Lifespan | None = None
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """Return a lifespan in which workers and consumers run; see `running`.

    They start with the application and stop with it. `request.state.pgque` is the Running of each request.
    While the database is away, a worker tries again for as long as it takes. The server does not start a
    mounted application: give the lifespan to the outer one. An application that starts more than once, as in
    tests, needs a function that makes the worker.

    Args:
        workers: as of `running`.
        around: a lifespan of the application's own, or a function that returns what is to be open, such as
            `lambda app: pool`. It begins before the workers start and ends after their handlers are finished,
            so handlers can use what it opens. A mapping that it yields is kept as the state of requests.
    """

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            state = None if around is None else await stack.enter_async_context(around(app))
            group = await stack.enter_async_context(running(*workers))
            yield {**(state if isinstance(state, Mapping) else {}), "pgque": group}

    return run


def _checked(worker: object) -> Runnable:
    """Return a worker, or the one that a function makes. Raises TypeError for what is neither."""
    made = worker() if callable(worker) else worker
    if not isinstance(made, (AsyncWorker, AsyncConsumer)):
        raise TypeError(
            f"{type(made).__name__} is neither an AsyncWorker nor an AsyncConsumer, nor a function that"
            " returns one; a Worker runs in a process of its own: pgque work MODULE:WORKER"
        )
    return made
