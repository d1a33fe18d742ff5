"""Workers in processes: started, started anew when killed, and told to stop."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, TypedDict

from . import _otel
from .errors import PgqueError
from .types import Message, Seconds

if TYPE_CHECKING:
    from .workers import Worker

log = logging.getLogger("pgque.worker")

# Seconds between starts of a process that does not live longer than that.
_PAUSE = 1.0

# Seconds that a process has beyond its `shutdown_timeout`, before it is killed.
_MARGIN = 5.0


class _Settings(TypedDict):
    queue: str
    consumer: str
    prefetch: int
    min_interval: float
    visibility_timeout: Seconds
    retry_after: Seconds | None
    archive: bool
    unknown_handler_policy: str
    worker: str
    shutdown_timeout: float


class _Child:
    """Hold one place for a process, and the process in it."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self._number = number
        self._started_at = float("-inf")
        self.process: BaseProcess | None = None
        self._news: Connection | None = None

    def start_if_due(self) -> None:
        """Start a process, unless one runs or was started a moment ago."""
        if self.process is not None or time.monotonic() - self._started_at < _PAUSE:
            return
        worker = self._worker
        settings = _Settings(
            queue=worker.queue,
            consumer=worker.consumer,
            prefetch=worker.prefetch,
            min_interval=worker.min_interval,
            visibility_timeout=worker.visibility_timeout,
            retry_after=worker.retry_after,
            archive=worker.archive,
            unknown_handler_policy=worker.unknown_handler_policy,
            worker=f"{worker.worker}-{self._number}",
            shutdown_timeout=worker.shutdown_timeout,
        )
        context = multiprocessing.get_context("spawn")
        self._news, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_work,
            args=(worker.dsn, settings, worker._handlers, _otel.is_enabled(), theirs),
            name=f"pgque worker {self._number}",
        )
        self.process.start()
        self._started_at = time.monotonic()
        theirs.close()

    def look(self) -> PgqueError | None:
        """Clear the place of a process that has ended, and return the error that it gave up for."""
        if self.process is None or self.process.is_alive() or self._news is None:
            return None
        self.process.join()
        error: PgqueError | None = None
        if self._news.poll():
            try:
                error = self._news.recv()
            except EOFError:
                if self.process.exitcode != 0:
                    log.warning("%s ended with %s", self.process.name, self.process.exitcode)
        self._news.close()
        self.process.close()
        self.process = None
        return error


def supervise(worker: Worker) -> None:
    """Run as many processes as the worker has hands, until it is told to stop.

    Raises TypeError for handlers that a process cannot import, and the PgqueError that one gave up for.
    """
    try:
        pickle.dumps(worker._handlers)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"handlers in processes must be functions of a module: {error}") from error
    stopper = worker._stopper
    children = [_Child(worker, number) for number in range(1, worker.concurrency + 1)]
    failed: PgqueError | None = None
    try:
        while not stopper.is_set() and failed is None:
            for child in children:
                failed = failed or child.look()
                if failed is None:
                    child.start_if_due()
            sentinels = [child.process.sentinel for child in children if child.process is not None]
            wait([*sentinels, *stopper.waitables()], 0.2 if len(sentinels) < len(children) else None)
    finally:
        _end([child.process for child in children if child.process is not None], worker.shutdown_timeout)
        for child in children:
            failed = failed or child.look()
    if failed is not None:
        raise failed


def _end(processes: list[BaseProcess], patience: float) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + patience + _MARGIN
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            log.warning("%s did not end, and is killed", process.name)
            process.kill()
            process.join()


def _work(
    dsn: str,
    settings: Mapping[str, object],
    handlers: Mapping[str, Callable[[Message], object]],
    with_opentelemetry: bool,
    news: Connection,
) -> None:
    """Be one of the processes."""
    from .workers import Worker

    if with_opentelemetry:
        _otel.enable_opentelemetry()
    worker = Worker(dsn, concurrency=1, **settings)  # type: ignore[arg-type]
    for type_, handler in handlers.items():
        worker.handler(type_)(handler)
    threading.Thread(target=_stop_without_parent, args=(worker,), daemon=True).start()
    try:
        worker.run()
    except PgqueError as error:
        news.send(error)


def _stop_without_parent(worker: Worker) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        worker.stop()
