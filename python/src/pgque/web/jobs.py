"""Work on many messages that goes on while the page shows its progress."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ..errors import PgqueConnectionError, PgqueError, PgqueNotDeadLetterError, one_line

Call = Callable[[int], object]
More = Callable[[int], list[int]]

MOST_FAILURES = 100  # that are kept with their reason


@dataclass(slots=True)
class Job:
    """One call for each of many ids, in a thread. Failures are counted, and the first ones kept."""

    title: str
    back: str
    ids: list[int]
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    done: int = 0
    gone: int = 0  # somebody else did it before
    failed: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    broken: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Return True while the work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, opened: Callable[[], AbstractContextManager[tuple[Call, More]]]) -> None:
        """Run in a thread. `opened()` gives a call for each id, and one that finds ids below the lowest."""

        def run() -> None:
            try:
                with opened() as (call, more):
                    todo = self.ids
                    while todo:
                        self._call_each(todo, call)
                        todo = more(min(todo)) if not self.broken else []
                        self.ids = [*self.ids, *todo]
            except PgqueError as error:
                self.broken = one_line(error)
            except Exception as error:
                self.broken = f"{type(error).__name__}: {error}"

        self._thread = threading.Thread(target=run, name="pgque web job", daemon=True)
        self._thread.start()

    def _call_each(self, ids: list[int], call: Call) -> None:
        for one in ids:
            if self._stop.is_set():
                self.broken = "stopped"
                return
            try:
                call(one)
                self.done += 1
            except PgqueConnectionError:
                raise
            except PgqueNotDeadLetterError:
                self.gone += 1
            except PgqueError as error:
                self.failed += 1
                if len(self.failures) < MOST_FAILURES:
                    self.failures.append((one, one_line(error)))

    def stop(self) -> None:
        """Stop before the next id."""
        self._stop.set()

    def join(self, timeout: float) -> None:
        """Wait for its end, at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
