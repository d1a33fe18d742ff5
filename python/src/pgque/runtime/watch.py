"""Check the handlers of a worker, from another thread.

The connection of a worker may wait for minutes, or be away; its handlers have their time limits meanwhile. A
thread also sees that a handler blocks the event loop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("pgque.worker")

# Seconds between two checks.
_INTERVAL = 0.5

# Seconds beyond its limit in which a handler should have been rejected.
_GUARD_MARGIN = 2.0

# Most seconds of a limit: a year. faulthandler takes no more than a clock has.
_GUARD_MOST = 31_536_000.0


class Watch:
    """Call `look` twice a second while the block runs.

    Args:
        look: looks after the handlers; called in the thread, or in the event loop that they run in.
        title: names the worker in the log.
        seconds: how long an event loop may be blocked before that is logged.
    """

    def __init__(self, look: Callable[[], None], title: str, seconds: float) -> None:
        self._look = look
        self._title = title
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgque handlers", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL):
            try:
                self._call()
            except Exception:  # the time limits of all handlers depend on this thread
                log.exception("%s: its handlers cannot be looked after", self._title)

    def _call(self) -> None:
        self._look()


class AsyncWatch(Watch):
    """Call `look` in the running event loop, and log, once, if that is blocked for too long, and where."""

    def __init__(self, look: Callable[[], None], title: str, seconds: float) -> None:
        super().__init__(look, title, seconds)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._asked_at: float | None = None
        self._is_logged = False

    def _call(self) -> None:
        asked_at = self._asked_at
        if asked_at is None:
            self._asked_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._answer)
            return
        blocked = time.monotonic() - asked_at
        if blocked > self._seconds and not self._is_logged:
            self._is_logged = True
            log.warning(
                "%s: the event loop has been blocked for %.1f s, so no other handler runs and no outcome is"
                " reported; it is at %s. Run what blocks in asyncio.to_thread(), or use the class of threads",
                self._title,
                blocked,
                _place_of(self._loop_thread),
            )

    def _answer(self) -> None:
        self._asked_at = None
        self._is_logged = False
        if not self._ended.is_set():
            self._look()


class Guard:
    """End this process if a handler keeps all other threads from running, as a regular expression can.

    Nothing in Python can reject its message then, which is redelivered when the lease has expired.
    """

    def arm(self, seconds: float) -> None:
        """End the process soon after a time limit, and print where its threads are; unless `disarm` is called
        before."""
        if math.isfinite(seconds):
            faulthandler.dump_traceback_later(min(seconds, _GUARD_MOST) + _GUARD_MARGIN, exit=True, file=2)
        else:
            self.disarm()

    def disarm(self) -> None:
        """Leave the process alone."""
        faulthandler.cancel_dump_traceback_later()


def _place_of(thread: int) -> str:
    """Return where a thread is, the innermost call last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "an unknown place"
    calls = traceback.extract_stack(frame)[-3:]
    return ", ".join(f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in calls)
