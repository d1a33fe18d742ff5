"""Figures that all viewers of a database share, so that ten open pages cost what one costs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import psycopg

from ..errors import PgqueError, one_line
from .config import Database

log = logging.getLogger("pgque.web")

T = TypeVar("T")

FORGOTTEN_AFTER = 300.0  # seconds
PAUSE = 19  # times as long as the database took for an answer, it is not asked again: a twentieth of the time
MOST_PAUSE = 600.0  # seconds
STALE = 1200.0  # seconds for which an answer is shown while the next one is taken
SOON = 0.4  # seconds that a page waits for an answer that it can do without
REMEMBERED = 60.0  # seconds over which rates are calculated

# For each queue how many messages were ever sent, and how many the slowest consumer has ahead of it.
Counts = dict[str, tuple[float, float]]


@dataclass(slots=True)
class _Kept(Generic[T]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    taken: float = float("-inf")
    pause: float = 0.0
    asked: float = 0.0
    changes: int = 0
    value: T | None = None
    error: PgqueError | None = None
    ready: threading.Event = field(default_factory=threading.Event)

    def age(self) -> float:
        """Return how many seconds ago the answer was taken."""
        return time.monotonic() - self.taken

    def take(self, ask: Callable[[], T], pause: float) -> None:
        """Ask, and keep the answer. The caller holds the lock."""
        began, changes = time.monotonic(), self.changes
        self.value = ask()
        if self.changes == changes:  # otherwise the answer may be from before the change
            self.taken = time.monotonic()
            self.pause = min(pause * (self.taken - began), MOST_PAUSE)


class Samples:
    """Keep what was asked lately. The key tells which roles see the same."""

    def __init__(self, period: float, pause: float = PAUSE) -> None:
        self._period = period
        self._pause = pause
        self._lock = threading.Lock()
        self._kept: dict[tuple[Database, str], _Kept[object]] = {}
        self._counts: dict[Database, list[tuple[float, Counts]]] = {}

    def get(self, database: Database, key: str, ask: Callable[[], T], period: float | None = None) -> T:
        """Return what `ask()` returned less than `period` seconds ago, or ask: one at a time does."""
        kept: _Kept[T] = self._asked(database, key)
        period = self._period if period is None else period
        with kept.lock:
            if kept.age() > max(period, kept.pause):
                kept.take(ask, self._pause)
            return cast("T", kept.value)

    def soon(self, database: Database, key: str, ask: Callable[[], T]) -> T | None:
        """Return the last answer, however old, and have a thread take the next one if it is due.

        Wait a little for the first answer, and for one after a change. None is no answer yet. `ask()` uses a
        connection of its own. Raises the PgqueError that kept it from the first answer.
        """
        kept: _Kept[T] = self._asked(database, key)
        until = time.monotonic() + SOON
        while True:
            if kept.age() > max(self._period, kept.pause) and kept.lock.acquire(blocking=False):
                kept.ready.clear()
                kept.error = None
                threading.Thread(target=_refresh, args=(kept, ask, self._pause), daemon=True).start()
            left = until - time.monotonic()
            if kept.age() < STALE or left <= 0:
                return kept.value
            if kept.ready.wait(left) and kept.error is not None:
                raise kept.error

    def _asked(self, database: Database, key: str) -> _Kept[T]:
        now = time.monotonic()
        with self._lock:
            self._kept = {k: v for k, v in self._kept.items() if now - v.asked < FORGOTTEN_AFTER}
            kept = cast("_Kept[T]", self._kept.setdefault((database, key), _Kept()))
            kept.asked = now
            return kept

    def forget(self, database: Database) -> None:
        """Ask again next time: somebody changed something."""
        with self._lock:
            for (of, _), kept in self._kept.items():
                if of == database:
                    kept.changes += 1
                    kept.taken, kept.pause = float("-inf"), 0.0

    def remember(self, database: Database, counts: Counts) -> None:
        """Keep counts for rates; those of a minute ago are enough."""
        now = time.monotonic()
        with self._lock:
            kept = self._counts.setdefault(database, [])
            kept.append((now, counts))
            while len(kept) > 2 and now - kept[1][0] > REMEMBERED:
                kept.pop(0)

    def earlier(self, database: Database) -> tuple[Counts, float]:
        """Return the oldest counts that are kept, and how many seconds ago they were taken."""
        with self._lock:
            kept = self._counts.get(database)
            return (kept[0][1], time.monotonic() - kept[0][0]) if kept else ({}, 0.0)


def _refresh(kept: _Kept[T], ask: Callable[[], T], pause: float) -> None:
    """Take an answer; the lock is held for this thread."""
    try:
        kept.take(ask, pause)
    except PgqueError as error:
        log.info("figures cannot be read: %s", one_line(error))
        kept.error = error
    except psycopg.Error as error:  # the session ended meanwhile: the next viewer asks
        log.info("figures were not read: %s", error)
    finally:
        kept.lock.release()
        kept.ready.set()
