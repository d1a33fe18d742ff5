"""Processes that a test started, and theirs, found by a folder of the test's own; and such folders."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def own_folder(mode: int = 0o755, prefix: str = "pgque-") -> Iterator[Path]:
    """Yield a folder that every user can enter, where programs may run; nothing that runs there outlives it."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp") as name:
        folder = Path(name).resolve()
        folder.chmod(mode)
        try:
            yield folder
        finally:
            end(folder)


def running(folder: Path) -> dict[int, str]:
    """Return the processes that name the folder in their command or environment, where /proc tells."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if os.fsencode(folder) in command + (process / "environ").read_bytes():
                found[int(process.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that a test started, and kill it if it still runs afterwards."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def end(folder: Path) -> None:
    """Kill those processes: what a failed test left behind."""
    for pid in running(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
