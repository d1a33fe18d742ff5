"""The terminal of `pgque top`: it is taken over, and given back whatever happens. Needs Textual."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App
from textual.binding import Binding, BindingType

from .screens import Frame, Queues
from .source import Source
from .state import State

GRACE = 2.0  # seconds for an end in good order, after a signal or when the terminal was closed
LOOK_AFTER = 0.5  # seconds after which the terminal is checked again

# Leaves the other screen and its modes, and shows the cursor.
_RESTORE = (
    b"\x1b[?2004l\x1b[?7h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l"
)


class Top(App[None]):
    """The screens, and what keeps them up to date."""

    TITLE = "pgque top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]
    CSS = """
    #title { height: 1; background: $primary; color: $text; }
    #problems { height: auto; }
    #queues { height: 1fr; }
    #filter { height: 1; }
    #status { height: auto; max-height: 3; background: $surface; }
    #status.failed { background: $error; color: $text; }
    .heading { height: auto; max-height: 2; text-style: bold; margin-top: 1; }
    VerticalScroll { height: 1fr; }
    VerticalScroll Grid { height: 0; max-height: 12; }
    Grid { overflow-x: hidden; }
    Question { align: center middle; }
    #question { width: 64; max-width: 95%; height: auto; border: heavy $warning; padding: 1 2; }
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def on_mount(self) -> None:
        """Show the queues, and read from now on."""
        self.state.changed = self._show
        self.push_screen(Queues(self.state))
        self.run_worker(self.state.keep_reading())
        self.set_interval(1, self._show)

    def _show(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, Frame) and screen.is_mounted:
                screen.show()

    def _fatal_error(self) -> None:
        """Show an error without the values of variables, which Textual would show: a password may be one."""
        self.panic(Text(traceback.format_exc()))


class Guard:
    """End the program after SIGTERM, SIGHUP, or when its terminal is gone, and restore the terminal."""

    def __init__(self) -> None:
        self.signum = 0
        self._file = sys.__stdin__.fileno() if sys.__stdin__ else 0
        self._was = termios.tcgetattr(self._file)
        self._over = threading.Event()

    @contextmanager
    def over(self, app: App[None], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Watch while the terminal is taken over."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            if signum == signal.SIGHUP:  # kernel, shell and look() may each send it
                signal.signal(signum, signal.SIG_IGN)
            self.signum = self.signum or signum
            threading.Thread(target=self._end_hard, daemon=True).start()
            loop.call_soon_threadsafe(app.exit)

        def look() -> None:
            while not self._over.wait(LOOK_AFTER):
                if not os.isatty(self._file):
                    os.kill(os.getpid(), signal.SIGHUP)
                    return

        earlier = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
        threading.Thread(target=look, daemon=True).start()
        try:
            yield
        finally:
            self._over.set()
            for number, handler in earlier.items():
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, handler)

    def _end_hard(self) -> None:
        """End at once where an end in good order takes too long: what writes to a lost terminal may hang."""
        if not self._over.wait(GRACE):
            with suppress(OSError, termios.error):
                termios.tcsetattr(self._file, termios.TCSANOW, self._was)
                os.write(2, _RESTORE)
            os._exit(128 + self.signum)


def run(dsn: str, interval: float, read_only: bool) -> int:
    """Show the overview until somebody quits; return the exit code. Raises PgqueError without a database."""
    return asyncio.run(_run(dsn, interval, read_only))


async def _run(dsn: str, interval: float, read_only: bool) -> int:
    source = Source(dsn, read_only)
    try:
        await source.connect()
        app: Any = Top(State(source, interval))
        guard = Guard()
        with guard.over(app, asyncio.get_running_loop()):
            await app.run_async()
        return 128 + guard.signum if guard.signum else app.return_code or 0
    finally:
        await source.close()
