"""The state of the screens of `pgque top`: the last answers of the database, and the last change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

from ..client.backoff import pauses
from ..errors import PgqueError, one_line
from ..ops.overview import PAUSE, Figures
from ..ops.units import number
from .source import Opened, Overview, Source

MAX_PAUSE = 5.0  # seconds between two attempts to connect again
SLOW_AFTER = 5.0  # seconds after which the wait for an answer is shown
SAID_FOR = 15.0  # seconds for which the line at the bottom tells what was done


class State:
    """The last answers and the line at the bottom. `changed` is called when there is something to show."""

    def __init__(self, source: Source, interval: float) -> None:
        self.source = source
        self.overview = Overview()
        self.queue: str | None = None  # the one that is open
        self.opened: Opened | None = None
        self.taken: datetime | None = None
        self._said = ("", False)
        self._said_at = 0.0
        self.changed: Callable[[], object] = lambda: None
        self._interval = interval
        self._lost = ""
        self._asked: float | None = None
        self._wake = asyncio.Event()

    @property
    def figures(self) -> Figures | None:
        """Return the figures of the open queue, or None."""
        return self.overview.queues.get(self.queue or "")

    def status(self) -> tuple[str, bool]:
        """Return the line at the bottom, and whether it tells of a failure."""
        if self._lost:
            return self._lost, True
        if self._asked is not None and time.monotonic() - self._asked > SLOW_AFTER:
            return f"waiting for the database since {time.monotonic() - self._asked:.0f} s", True
        return self._said if time.monotonic() - self._said_at < SAID_FOR else ("", False)

    def open(self, queue: str | None) -> None:
        """Open a queue, so that its details are read from now on; None closes it."""
        self.queue, self.opened = queue, None
        self._wake.set()

    def say(self, message: str, failed: bool = False) -> None:
        """Show what was done, or why it was not."""
        self._said, self._said_at = (message, failed), time.monotonic()
        self.changed()

    async def keep_reading(self) -> None:
        """Read again and again. After a fault of the database there is a random pause that grows."""
        growing = pauses(MAX_PAUSE)
        while True:
            self._wake.clear()
            self._asked = time.monotonic()
            try:
                await self._read()
                # A server for which the answer is much work is asked less often.
                pause = max(self._interval, PAUSE * (time.monotonic() - self._asked))
                growing, self._lost = pauses(MAX_PAUSE), ""
            except PgqueError as error:
                pause = next(growing)
                doing = "cannot read" if self.source.connected else "no connection, trying again"
                self._lost = f"{doing}: {one_line(error)}"
            self._asked = None
            self.changed()
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except asyncio.TimeoutError:
                continue

    async def _read(self) -> None:
        self.overview = await self.source.overview()
        queue = self.queue
        opened = None if queue is None else await self.source.queue(queue)
        if queue == self.queue:
            self.opened = opened
        self.taken = datetime.now()

    # -- changes -------------------------------------------------------------------

    async def pause(self, queue: str, paused: bool) -> None:
        """Close a queue for senders, or open it again."""
        done = f"Queue {queue} is {'paused' if paused else 'open for senders'}."
        await self._change(self.source.pause(queue, paused), lambda _: done)

    async def reclaim(self, queue: str, consumer: str) -> None:
        """Release what the workers of a consumer hold."""
        await self._change(
            self.source.reclaim(queue, consumer),
            lambda n: f"Released {plural(n, 'batch', 'batches')} of consumer {consumer}.",
        )

    async def requeue(self, queue: str, count: int, reason: str | None) -> None:
        """Requeue dead letters: those with a reason, or all."""

        def progress(done: int) -> None:
            self.say(f"Requeued {number(done)} of {plural(count, 'dead letter')} of queue {queue} …")

        def done(moved: int) -> str:
            rest = (
                ""
                if moved == count
                else f" of {number(count)}; the others were requeued elsewhere, or have no consumer"
            )
            return f"Requeued {plural(moved, 'dead letter')} of queue {queue}{rest}."

        await self._change(self.source.requeue(queue, count, reason, progress), done)

    async def _change(self, change: Awaitable[int | None], done: Callable[[int], str]) -> None:
        try:
            self.say(done(await change or 0))
        except PgqueError as error:
            self.say(one_line(error), failed=True)
        self._wake.set()


def plural(count: float, one: str, many: str = "") -> str:
    """Return a number with its word: 1 batch, 2 batches."""
    return f"{number(count)} {one if count == 1 else many or one + 's'}"
