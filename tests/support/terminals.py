"""A command in a terminal of its own: what it shows, keys for it, and the terminal's state afterwards."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import pyte

# In front of the command: as after a login, the terminal's end or size reaches it as a signal.
_CONTROLLED = (
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])",
)
# These variables change the output, and a person's shell has none of them.
_OF_THE_RUNNER = ("COLUMNS", "LINES", "NO_COLOR", "PYTHONUNBUFFERED")
PATIENCE = 60.0  # seconds
SETTLED = 0.05  # seconds without output


class Terminal:
    """A terminal of some size with a command in it."""

    def __init__(
        self, command: Sequence[str], columns: int, lines: int, environment: Mapping[str, str]
    ) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self._text: str | None = None
        self._own, self._end = pty.openpty()
        self._set_size(columns, lines)
        self._before = termios.tcgetattr(self._end)
        # pyte does not know the keyboard protocol that is turned off here.
        kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_RUNNER}
        self.process = subprocess.Popen(
            [*_CONTROLLED, *command],
            stdin=self._end,
            stdout=self._end,
            stderr=self._end,
            env={**kept, "TERM": "xterm-256color", "TEXTUAL_DISABLE_KITTY_KEY": "1", **environment},
            start_new_session=True,
        )

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self, patience: float) -> bool:
        if not select.select([self._own], [], [], patience)[0]:
            return False
        found = os.read(self._own, 1 << 16)
        self.written += found
        self._stream.feed(found)
        self._text = None
        return True

    @property
    def text(self) -> str:
        """What the terminal shows."""
        while self._read(SETTLED):
            pass
        if self._text is None:
            self._text = "\n".join(line.rstrip() for line in self._screen.display)
        return self._text

    def line(self, word: str) -> str:
        """Return the first line with a word, or an empty one."""
        return next((line for line in self.text.splitlines() if word in line), "")

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Read until something holds, and fail if it does not come to that."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"not shown: {what}\n{self.text}"
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.text}"
            self._read(SETTLED)

    def wait_for(self, *words: str) -> None:
        """Read until the terminal shows all these words."""
        for word in words:
            self.wait(lambda word=word: word in self.text, word)  # type: ignore[misc]

    def wait_without(self, word: str) -> None:
        """Read until the terminal shows this no longer."""
        self.wait(lambda: word not in self.text, f"no more {word}")

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._own, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal."""
        self._screen.resize(lines, columns)
        self._screen.reset()
        self._text = None
        self._set_size(columns, lines)

    def ended(self) -> int:
        """Wait for the end of the command; return its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"did not end\n{self.text}"
            self._read(SETTLED)
        while self._read(SETTLED):
            pass
        code: int = self.process.returncode
        return code

    @property
    def restored(self) -> bool:
        """Whether the terminal is as it was: its own screen, a cursor, the settings."""
        written = self.written
        return (
            written.rfind(b"\x1b[?1049l") > written.rfind(b"\x1b[?1049h")
            and written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l")
            and written.rfind(b"\x1b[?1000l") > written.rfind(b"\x1b[?1000h")
            and termios.tcgetattr(self._end) == self._before
        )

    def close(self) -> None:
        """Close the terminal."""
        for end in (self._own, self._end):
            with suppress(OSError):
                os.close(end)


@contextmanager
def terminal(
    *command: str, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a command in a terminal; kill it if it still runs afterwards."""
    one = Terminal(command, columns, lines, environment or {})
    with one.process:
        try:
            yield one
        finally:
            one.process.kill()
            one.close()
