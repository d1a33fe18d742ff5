"""Choose how many messages the next micro-batch of a stream may have, while the stream catches up."""

from __future__ import annotations

import logging

from .options import ALL

log = logging.getLogger("pgque.spark")

# Messages of the first window: any laptop reads and writes them in a second or two.
_FIRST = 50_000
# A window has at least one tick, which may have more messages than the window's size. Then the time that the
# window takes says nothing about the size, and a small size would stay.
_LEAST = 1_000
# Seconds that a micro-batch should take. Spark's own half second is then a sixth of it, and a query that is
# killed loses no more than that.
_TARGET = 3.0
# Within which a window may become larger or smaller
_GROWTH = 4.0
_SHRINKING = 0.5
# Seconds from the time for which Spark set its alarm until it asks
_PROMPT = 0.1


class Pace:
    """Give each window the size that makes its micro-batch take a few seconds.

    A micro-batch takes from one call of `latestOffset` to the next: reading, the query, the sink and Spark's
    own work. Only windows that left messages unread count, because others are smaller than their limit.
    """

    def __init__(self, least: int | None, most: int | None) -> None:
        self._least, self._most = max(least or 0, _LEAST), most or ALL
        self._size = self._bound(_FIRST)
        self._asked = 0.0
        self._begun: float | None = None
        # The first micro-batch also pays for the start of Spark's workers.
        self._warm = False

    def next(self, now: float) -> int:
        """Return how many messages the next window may have. `now` is when Spark asks for it, as time.time()
        has it: a clock that is put forward or back makes one wrong size."""
        if self._begun is not None:
            if self._warm:
                self._took(now - self._begun, now)
            self._warm = True
            self._begun = None
        self._asked = now
        return self._size

    def planned(self, behind: bool) -> None:
        """Note that the window is planned, and whether it leaves messages unread."""
        self._begun = self._asked if behind else None

    def _took(self, seconds: float, now: float) -> None:
        interval = round(seconds)
        if seconds > _TARGET and now % interval < _PROMPT:
            # A trigger of some seconds begins at multiples of them: Spark has waited, for how long is not
            # known. The first size takes about a second.
            factor = float(interval)
        else:
            factor = min(max(_TARGET / max(seconds, 0.001), _SHRINKING), _GROWTH)
        before, self._size = self._size, self._bound(int(self._size * factor))
        if before != self._size:
            log.debug(
                "pgque: windows have %s messages from now on: one of %s took %.1f s",
                self._size,
                before,
                seconds,
            )

    def _bound(self, size: int) -> int:
        return min(max(size, self._least), self._most)
