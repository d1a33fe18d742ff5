"""The server that is started from binaries. Here they are scripts that do what their names say and no more."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pgque import embedded
from support import processes

as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root runs the server as another user, from a copy if need be"
)

POSTGRES = """#!/bin/sh
if [ "$1" = --version ]; then echo "postgres (PostgreSQL) 17.0"; exit; fi
cat "$(dirname "$0")/../share/catalog" || exit 1
printf '%s\\n' $$ "$2" 0 0 0 0 0 ready > "$2/postmaster.pid"
exec sleep 3
"""
INITDB = """#!/bin/sh
echo 17 > "$2/PG_VERSION"
: > "$2/postgresql.conf"
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter, where programs may run."""
    with processes.own_folder() as path:
        yield path


@pytest.fixture
def copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies of programs go."""
    path = folder / "copies"
    monkeypatch.setattr(embedded, "_COPIES", path)
    return path


@pytest.fixture
def closed(folder: Path) -> Path:
    """The folder of programs that only their owner can reach, as umask 077 makes them."""
    top = folder / "closed" / "pg"
    for directory in ("bin", "share"):
        (top / directory).mkdir(parents=True)
    for name, text in (("postgres", POSTGRES), ("initdb", INITDB)):
        (top / "bin" / name).write_text(text)
    (top / "share" / "catalog").write_text("types\n")
    (top / "share" / "link").symlink_to("nowhere")
    for path in (folder / "closed").rglob("*"):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() or path.parent.name == "bin" else 0o600)
    (folder / "closed").chmod(0o700)
    return top / "bin"


@pytest.fixture
def masked() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def answers(bindir: Path) -> bool:
    """Tell whether a server starts from the programs."""
    with embedded.start(bindir) as server:
        return server.pid is not None


@as_root
@pytest.mark.usefixtures("masked")
def test_programs_that_only_root_can_reach_run_from_a_copy_that_all_can_read(
    closed: Path, copies: Path
) -> None:
    with embedded.start(closed) as server:
        assert server.pid is not None
        assert copies in server.bindir.parents
    assert [path.name for path in copies.iterdir() if path.name.startswith(".")] == []
    assert answers(closed)


@as_root
@pytest.mark.usefixtures("copies")
def test_a_copy_that_can_not_be_used_is_made_again(closed: Path) -> None:
    with embedded.start(closed) as server:
        copied = server.bindir
    copied.parent.chmod(0o700)
    assert answers(closed)
    (copied / "postgres").chmod(0o700)
    assert answers(closed)
    shutil.rmtree(copied)
    assert answers(closed)
    assert len(list(copied.parents[2].iterdir())) == 1


@as_root
def test_a_copy_that_fails_is_an_error_that_names_it_and_leaves_nothing(closed: Path, copies: Path) -> None:
    os.mkfifo(closed.parent / "share" / "pipe")
    with pytest.raises(embedded.EmbeddedServerError, match=r"no copy can be made in .*copies.*named pipe"):
        embedded.start(closed)
    assert list(copies.iterdir()) == []


def test_a_user_without_a_name_gets_a_hint(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 2_000_000_011)
    with pytest.raises(embedded.EmbeddedServerError, match=r"user id 2000000011.*/etc/passwd"):
        embedded.start(closed)


PROGRAM = """
import pathlib, sys
from pgque import embedded
server = embedded.start(pathlib.Path(sys.argv[1]))
print(server.pid, server.socket_dir, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_process_and_leaves_no_files(
    signum: signal.Signals, wait_until: Callable[..., None]
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(embedded.find_server().bindir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    pid, folder = program.stdout.readline().split()
    program.send_signal(signum)
    program.communicate()
    runs = Path(f"/proc/{pid}/exe")  # of a process that ended and was not waited for there is none
    try:
        wait_until(lambda: not Path(folder).exists(), "the server's files are gone", timeout=20)
        wait_until(lambda: not os.path.lexists(runs), "the server has ended")
    finally:
        if os.path.lexists(runs):
            os.kill(int(pid), signal.SIGQUIT)


def test_a_second_start_leaves_the_settings_of_a_running_server() -> None:
    with embedded.start(embedded.find_server().bindir) as first:
        before = (first.data_dir / "pgque.conf").read_text()
        with pytest.raises(embedded.EmbeddedServerError, match=r"already runs in .* \(pid"):
            embedded.start(embedded.find_server().bindir, data_dir=first.data_dir)
        assert (first.data_dir / "pgque.conf").read_text() == before
        first.restart()
