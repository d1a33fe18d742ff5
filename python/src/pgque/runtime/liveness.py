"""Signs of life of a worker, to be seen from outside: a file that is touched, and systemd's watchdog."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

from ..errors import PgqueBadArgumentError

log = logging.getLogger("pgque.worker")

# Seconds between two signs.
_INTERVAL = 1.0

# Seconds without an answer after which the database is asked for one.
_ASK_AFTER = 5.0


class Liveness:
    """Give signs of life, at most once a second.

    Args:
        file: the file to touch; None for none.
        with_systemd: whether to tell systemd as well, where it started this process and expects that.
    """

    def __init__(self, file: str | os.PathLike[str] | None, with_systemd: bool = False) -> None:
        self._file = None if file is None else Path(file)
        self._watchdog = _watchdog_address() if with_systemd else None
        self.is_watched = self._file is not None or self._watchdog is not None
        self._answered_at = float("-inf")
        self._given_at = float("-inf")
        self._is_ready = False
        self._has_failed = False

    def check(self) -> None:
        """Raise PgqueBadArgumentError where the file cannot be made."""
        if self._file is not None and not os.access(self._file.parent, os.W_OK | os.X_OK):
            raise PgqueBadArgumentError(
                f"liveness_file {str(self._file)!r} cannot be made: its folder is missing or not writable",
                hint="Name a file in a folder that the worker may write to, such as /tmp/pgque-alive.",
            )

    def note_answer(self) -> None:
        """Take note that the database has answered."""
        self._answered_at = time.monotonic()

    @property
    def needs_answer(self) -> bool:
        """Return whether the database has to answer before the next sign."""
        return self.is_watched and time.monotonic() - self._answered_at > _ASK_AFTER

    def give(self) -> None:
        """Give a sign of life, if it is time for one."""
        now = time.monotonic()
        if not self.is_watched or now - self._given_at < _INTERVAL:
            return
        self._given_at = now
        if self._file is not None:
            try:
                self._file.touch()
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    log.warning("liveness_file cannot be touched: %s", error)
                self._has_failed = True
        if self._watchdog is not None:
            _tell_systemd(self._watchdog, b"WATCHDOG=1" if self._is_ready else b"READY=1\nWATCHDOG=1")
            self._is_ready = True


def is_fresh(file: Path, seconds: float) -> bool:
    """Return whether a file was touched in the last seconds."""
    try:
        return time.time() - file.stat().st_mtime < seconds
    except OSError:
        return False


def _watchdog_address() -> str | None:
    """Return the socket of systemd, where it expects signs of life from this process."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return "\0" + address[1:] if address.startswith("@") else address


def _tell_systemd(address: str, state: bytes) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state, address)
    except OSError as error:
        log.warning("cannot notify systemd: %s", error)
