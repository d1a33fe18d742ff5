"""The processes of a worker: started, restarted when they are killed, and stopped."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from ..codec.json import Encoder
from ..codec.payloads import Decoder
from ..errors import PgqueError
from ..integrations import opentelemetry as otel
from ..integrations import prometheus
from .handlers import Handlers, Options
from .liveness import Liveness, is_fresh
from .middleware import Middleware, Moment
from .recurring import Recurring
from .stopper import Stopper
from .watch import Guard

log = logging.getLogger("pgque.worker")

# Least seconds between two starts in one place, so that a process which fails at once is not a busy loop.
_RESTART_INTERVAL = 1.0

# In seconds: how often the signs of life of the processes are checked, and how old they may be.
_LIVENESS_CHECK, _LIVENESS_LIMIT = 1.0, 10.0

# Seconds that a process has beyond its `shutdown_timeout`, and after a second signal, before it is killed.
_KILL_MARGIN, _ABANDON_MARGIN = 5.0, 1.0

# Seconds between checks for a second signal, while the processes end.
_SIGNAL_CHECK = 0.1


class ProcessWorker(Protocol):
    """A worker that can run in several processes."""

    dsn: str
    concurrency: int
    worker: str
    encoder: Encoder | None
    decoder: Decoder | None
    shutdown_timeout: float
    liveness_file: str | os.PathLike[str] | None
    _liveness: Liveness
    _handlers: Handlers
    _middleware: Middleware
    _recurring: list[Recurring]
    _stopper: Stopper
    _guard: Guard | None

    @property
    def _made(self) -> Callable[..., ProcessWorker]:
        """Return the class of the worker."""

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of a copy."""

    def run(self) -> None:
        """Work until `stop()`."""

    def stop(self) -> None:
        """Make `run` return."""


class _Place:
    """One of the places for a process, and the process in it."""

    def __init__(self, worker: ProcessWorker, number: int) -> None:
        self._worker = worker
        self._number = number
        self._started_at = float("-inf")
        self.process: BaseProcess | None = None
        self._errors: Connection | None = None
        self.liveness_file: Path | None = None
        if worker.liveness_file is not None:
            self.liveness_file = Path(f"{os.fspath(worker.liveness_file)}.{number}")

    def start_if_due(self) -> None:
        """Start a process, unless one runs or was started a moment ago."""
        if self.process is not None or time.monotonic() - self._started_at < _RESTART_INTERVAL:
            return
        worker = self._worker
        settings = worker._settings()
        settings["worker"] = f"{worker.worker}-{self._number}"
        settings["liveness_file"] = self.liveness_file
        context = multiprocessing.get_context("spawn")
        self._errors, sending = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_run,
            args=(
                worker._made,
                worker.dsn,
                settings,
                worker._handlers.by_type,
                worker._handlers.options_by_type,
                worker._middleware.hooks,
                worker._recurring,
                otel.is_enabled(),
                prometheus.is_enabled(),
                sending,
            ),
            name=f"pgque worker {self._number}",
        )
        self.process.start()
        self._started_at = time.monotonic()
        sending.close()

    def is_alive(self) -> bool:
        """Return whether the process has given a sign of life of late."""
        if self.liveness_file is None:
            return self.process is not None and self.process.is_alive()
        return is_fresh(self.liveness_file, _LIVENESS_LIMIT)

    def clear_if_ended(self) -> PgqueError | None:
        """Clear the place of a process that has ended, and return the error that ended it."""
        if self.process is None or self.process.is_alive() or self._errors is None:
            return None
        self.process.join()
        error: PgqueError | None = None
        if self._errors.poll():
            try:
                error = self._errors.recv()
            except EOFError:
                if self.process.exitcode != 0:
                    log.warning("%s ended with %s", self.process.name, self.process.exitcode)
        self._errors.close()
        self.process.close()
        self.process = None
        return error


def supervise(worker: ProcessWorker) -> None:
    """Run `concurrency` processes with a copy of a worker in each, until that is stopped.

    Raises TypeError for handlers that a process cannot import, and the PgqueError that ended a process.
    """
    try:
        pickle.dumps(
            (
                worker._handlers.by_type,
                worker._handlers.options_by_type,
                worker._middleware.hooks,
                worker.encoder,
                worker.decoder,
            )
        )
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"handlers, hooks, encoder and decoder in processes must be functions of a module: {error}"
        ) from error
    stopper = worker._stopper
    places = [_Place(worker, number) for number in range(1, worker.concurrency + 1)]
    failed: PgqueError | None = None
    try:
        while not stopper.is_set() and failed is None:
            for place in places:
                failed = failed or place.clear_if_ended()
                if failed is None:
                    place.start_if_due()
            if all(place.is_alive() for place in places):
                worker._liveness.give()
            sentinels = [place.process.sentinel for place in places if place.process is not None]
            patience = _LIVENESS_CHECK if worker._liveness.is_watched else None
            wait([*sentinels, *stopper.waitables()], 0.2 if len(sentinels) < len(places) else patience)
    finally:
        running = [place.process for place in places if place.process is not None]
        _end(running, worker.shutdown_timeout, stopper)
        for place in places:
            failed = failed or place.clear_if_ended()
            if place.liveness_file is not None:
                place.liveness_file.unlink(missing_ok=True)
    if failed is not None:
        raise failed


def _end(processes: list[BaseProcess], shutdown_timeout: float, stopper: Stopper) -> None:
    """End the processes, and kill those that do not end in time. A second signal is passed on to them."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + shutdown_timeout + _KILL_MARGIN
    abandoned = False
    while running := [process for process in processes if process.is_alive()]:
        if stopper.is_abandoned and not abandoned:
            abandoned = True
            deadline = time.monotonic() + _ABANDON_MARGIN
            for process in running:
                process.terminate()
        if time.monotonic() > deadline:
            break
        wait([process.sentinel for process in running], _SIGNAL_CHECK)
    for process in running:
        log.warning("%s did not end, and is killed", process.name)
        process.kill()
    for process in processes:
        process.join()


def _run(
    made: Callable[..., ProcessWorker],
    dsn: str,
    settings: Mapping[str, Any],
    handlers: Mapping[str, Callable[..., object]],
    options: Mapping[str, Options],
    hooks: Mapping[Moment, list[Callable[..., object]]],
    recurring: list[Recurring],
    with_opentelemetry: bool,
    with_prometheus: bool,
    errors: Connection,
) -> None:
    """Run a worker in this process, and send the error that ends it through the pipe."""
    if with_opentelemetry:
        otel.enable_opentelemetry()
    if with_prometheus:
        prometheus.enable_prometheus()
    worker = made(dsn, concurrency=1, **settings)
    for type_, handler in handlers.items():
        worker._handlers.register(type_, options=options[type_])(handler)
    worker._middleware.add_all(hooks)
    worker._recurring.extend(recurring)
    worker._guard = Guard()
    threading.Thread(target=_stop_without_parent, args=(worker,), daemon=True).start()
    try:
        worker.run()
    except PgqueError as error:
        errors.send(error)


def _stop_without_parent(worker: ProcessWorker) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        worker.stop()
