"""After a closed terminal, or SIGTERM, nothing is left running: of the demo, and of a run of the tests."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pgque import embedded
from support import processes, servers

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")

Wait = Callable[..., None]

# In front of a command: these tests may run under nohup themselves.
HEEDING = [
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder for temporary files of what is started here; nothing that runs there outlives the test."""
    with processes.own_folder() as path:
        yield path


@pytest.fixture
def demo(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command of a demo with a server and a ticker of its own, and its environment."""
    try:
        embedded.find_server("embedded")
    except embedded.EmbeddedServerError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "pgque.cli", "demo", "--server", "embedded", "--workers", "2"]
    return command, {**os.environ, "TMPDIR": str(folder)}


def read_until(file: int, word: bytes) -> bytes:
    """Read what comes from a terminal or a pipe until the word is there, or nothing more comes."""
    text = b""
    with suppress(OSError):  # a terminal without a process
        while word not in text and (more := os.read(file, 4096)):
            text += more
    return text


@pytest.mark.slow  # runs the demo
def test_the_demo_leaves_nothing_when_its_terminal_is_closed(
    folder: Path, demo: tuple[list[str], dict[str, str]], wait_until: Wait
) -> None:
    command, environment = demo
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [*HEEDING, *command], stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True
    ) as run:
        os.close(end)
        assert b"driven by" in (text := read_until(terminal, b"driven by")), text
        assert len(processes.running(folder)) > 2
        os.close(terminal)
        run.send_signal(signal.SIGHUP)
        assert run.wait(30) != 0
    wait_until(lambda: not processes.running(folder), "the end of all that was started")
    assert list(folder.glob("pgque-*/data")) == []


@pytest.mark.slow  # runs the demo
def test_the_demo_heeds_nohup(folder: Path, demo: tuple[list[str], dict[str, str]], wait_until: Wait) -> None:
    command, environment = demo
    with subprocess.Popen(
        ["nohup", *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment
    ) as run:
        assert run.stdout is not None
        read_until(run.stdout.fileno(), b"driven by")
        for signum in (signal.SIGHUP, signal.SIGTERM):
            run.send_signal(signum)
        run.stdout.read()
        assert run.wait(30) == 128 + signal.SIGTERM
    wait_until(lambda: not processes.running(folder), "the end of all that was started")


TESTS = """
import pathlib, time

def test_that_is_ended():
    print("sleeping", flush=True)
    time.sleep(60)

def test_after_it():
    pathlib.Path(__file__).with_name("went-on").touch()
"""


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGTERM])
def test_a_run_of_the_tests_that_is_ended_stops_its_server_and_tests_no_more(
    folder: Path, signum: signal.Signals, wait_until: Wait
) -> None:
    (folder / "test_it.py").write_text(TESTS)
    tests = servers.REPOSITORY / "tests"
    command = [sys.executable, "-m", "pytest", "-s", "-p", "conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(tests / "pytest.ini"), "--rootdir", str(folder), str(folder / "test_it.py")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PGQUE_TEST_")}
    environment |= {"TMPDIR": str(folder), "PYTHONPATH": str(tests), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PGQUE_TEST_BINDIR"] = str(embedded.find_server().bindir)
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [*HEEDING, *command],
        stdin=end,
        stdout=end,
        stderr=end,
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as run:
        os.close(end)
        assert b"sleeping" in (text := read_until(terminal, b"sleeping")), text
        assert len(processes.running(folder)) > 1
        os.close(terminal)
        run.send_signal(signum)
        assert run.wait(30) != 0
    wait_until(lambda: not processes.running(folder), "the end of all that was started")
    assert not (folder / "went-on").exists()
