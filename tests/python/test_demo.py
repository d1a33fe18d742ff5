"""What the demo prints to be copied into a shell works there, whatever the folders are called."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pgque import embedded
from pgque.demo import servers as places
from support import processes

Wait = Callable[..., None]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name that a shell takes apart; nothing that runs there outlives the test."""
    with processes.own_folder(prefix="pgque it's ") as path:
        yield path


def shell(line: str) -> str:
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_the_lines_that_the_demo_leaves_can_be_copied_into_a_shell(folder: Path, wait_until: Wait) -> None:
    try:
        embedded.find_server("embedded")
    except embedded.EmbeddedServerError as error:
        pytest.skip(str(error))
    (folder / "x.jsonl").write_text("1\n")
    command = [sys.executable, "-m", "pgque.cli", "demo", "--server", "embedded", "--workers", "1", "--keep"]
    done = subprocess.run(
        [*command, "--file", str(folder / "x.jsonl")],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    psql, export, status, *_ = done.stdout.partition("Look around:\n")[2].splitlines()
    stop = done.stdout.partition("Stop it with: ")[2]
    assert shell(f"{export}; {status}")
    if Path(shlex.split(psql)[0]).is_file() or shutil.which("psql"):
        assert shell(f"{psql} -Atc 'select 1'") == "1\n"
    shell(stop)
    wait_until(lambda: list(folder.iterdir()) == [folder / "x.jsonl"], "an empty folder")
    wait_until(lambda: not processes.running(folder), "the end of all that was started")


def test_a_container_is_removed_with_its_volume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = folder / "docker"
    docker.write_text("#!/bin/sh\ncase $1 in run) echo 0123456789abcdef ;; port) echo 127.0.0.1:5 ;; esac\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(places, "_wait_for", lambda dsn: None)
    with places.find_place("", "docker", True, Console()) as place:
        assert place.stop_hint == "docker rm -fv 0123456789ab"
