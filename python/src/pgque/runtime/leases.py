"""Extend the leases of the workers of a process, on a connection of their own.

The connection of a worker may wait for minutes: for a consumer that another transaction has locked, or for a
standby that has to confirm a commit. Its handlers run meanwhile, so their leases are extended from a thread
that has a connection of its own. All workers of a process that use the same connection string share it, the
asynchronous ones too: a thread also extends leases while a handler blocks the event loop.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import psycopg

from ..client.limit import within
from ..errors import PgqueError, described, from_psycopg, one_line
from ..twins.client import PgqueClient
from ..twins.connection import open_client
from .batches import Statement

log = logging.getLogger("pgque.worker")

# Parts of the length of a lease: after the first the connection is opened, so that it is there when it is
# needed; after the second the lease is extended; the third is the pause between checks of leases, and the
# longest time that an extension may take.
_OPEN_AFTER, _EXTEND_AFTER, _CHECK_EVERY = 1 / 4, 1 / 2, 1 / 8

# Seconds between two checks at least, however short a lease is: a dead_interval may be 0.
_LEAST_PAUSE = 0.05

# Seconds without a lease that needs it after which the connection is closed.
_LINGER = 60.0

# Seconds that an extension has at least, however short the lease is.
_LEAST_LIMIT = 1.0

_LOCK_NOT_AVAILABLE = "55P03"


class Lease(Protocol):
    """A lease that has to be extended in time."""

    extended_at: float
    lost: bool

    def extension(self, now: float, lock_timeout: float) -> Statement:
        """Return the statement that extends it, or fails after `lock_timeout` seconds of waiting
        for a lock."""

    def note_extended(self, now: float, held: int | None) -> None:
        """Take note of the result of that statement."""


@dataclass(frozen=True, slots=True, eq=False)
class _Holder:
    """A worker that has leases."""

    seconds: float  # length of a lease
    leases: Callable[[], Iterable[Lease]]


class _Keeper:
    """Extend the leases of all workers that use one connection string, in a thread."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._holders: list[_Holder] = []
        self._changed = threading.Event()
        self._client: PgqueClient | None = None
        self._needed_at = 0.0  # when a lease last needed the connection
        self._patience = 0.0  # seconds that this round may still wait for a lock
        self._logged: str | None = None
        self.thread = threading.Thread(target=self._run, name="pgque leases", daemon=True)

    def add(self, holder: _Holder) -> None:
        self._holders.append(holder)
        self._changed.set()  # its leases may be shorter than those of the others

    def remove(self, holder: _Holder) -> bool:
        """Forget a worker; return whether it was the last."""
        self._holders.remove(holder)
        if self._holders:
            return False
        self._changed.set()
        return True

    def _run(self) -> None:
        while holders := list(self._holders):
            self._changed.clear()
            shortest = min(holder.seconds for holder in holders)
            self._patience = _CHECK_EVERY * shortest
            for holder in holders:
                try:
                    self._extend_due(holder)
                except Exception as fault:  # of any kind: the leases of all workers depend on this thread
                    self._close()
                    self._log_failed(from_psycopg(fault) if isinstance(fault, psycopg.Error) else fault)
            if time.monotonic() - self._needed_at > _LINGER:
                self._close()
            self._changed.wait(max(_CHECK_EVERY * shortest, _LEAST_PAUSE))
        self._close()

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _extend_due(self, holder: _Holder) -> None:
        for lease in list(holder.leases()):
            now = time.monotonic()
            age = now - lease.extended_at
            if lease.lost or age < _OPEN_AFTER * holder.seconds:
                continue
            self._needed_at = now
            if self._client is None:
                self._client = open_client(self._dsn, "pgque leases", read_committed=True)
                self._logged = None
            if age >= _EXTEND_AFTER * holder.seconds:
                self._extend(self._client, lease, now)

    def _extend(self, client: PgqueClient, lease: Lease, now: float) -> None:
        """Extend a lease, unless another session has locked the batch: that one reports an outcome, and no
        worker receives the batch's messages meanwhile. A report may lock many batches for long, so only the
        first of them is waited for in a round: the leases of the others may be extended."""
        try:
            with within(client.conn, self._patience + _LEAST_LIMIT):
                held = client._maybe(int, *lease.extension(now, self._patience))
        except PgqueError as error:
            if client.conn.closed:
                raise
            if error.sqlstate == _LOCK_NOT_AVAILABLE:
                self._patience = 0.0
            else:
                self._log_failed(error)  # and the other leases are extended
            return
        lease.note_extended(now, held)

    def _log_failed(self, error: Exception) -> None:
        """Log an error once, and an unexpected one with its traceback."""
        is_expected = isinstance(error, PgqueError)
        text = one_line(error) if isinstance(error, PgqueError) else described(error)
        if text != self._logged:
            self._logged = text
            log.warning("leases cannot be extended, trying again: %s", text, exc_info=not is_expected)


_keepers: dict[str, _Keeper] = {}
_lock = threading.Lock()


def _forget_all() -> None:
    """Forget the threads of the parent process."""
    global _lock
    _keepers.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@contextmanager
def kept(dsn: str, seconds: float, leases: Callable[[], Iterable[Lease]]) -> Iterator[None]:
    """Extend leases of `seconds` inside the block.

    `leases` is called from another thread, and returns those that the worker has at the moment.
    """
    holder = _Holder(seconds, leases)
    with _lock:
        keeper = _keepers.get(dsn)
        is_new = keeper is None
        if keeper is None:
            keeper = _keepers[dsn] = _Keeper(dsn)
        keeper.add(holder)
        if is_new:
            keeper.thread.start()
    try:
        yield
    finally:
        with _lock:
            is_last = keeper.remove(holder)
            if is_last and _keepers.get(dsn) is keeper:
                del _keepers[dsn]
        if is_last:
            keeper.thread.join(_LEAST_LIMIT / 2)
