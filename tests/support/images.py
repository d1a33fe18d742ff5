"""Images of the Dockerfile, for tests."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from support import servers


def client() -> str:
    """Return the path of Docker's client; skip the test where there is no engine."""
    problem = servers.engine_problem()
    if problem is not None:
        pytest.skip(f"no container engine: {problem}")
    path = shutil.which("docker")
    if path is None:
        pytest.skip("no docker client to build the image with")
    return path


def build(target: str | None) -> str:
    """Build a target of the Dockerfile, one at a time, and return its name; None builds what is built where
    no target is named."""
    command = [client(), "build", "-q", "-t", f"pgque-{target or 'default'}:test", "-"]
    if target is not None:
        command += ["--target", target]
    files = ("Dockerfile", "sql", "tests/image", "tests/sql/previous", "python/src")
    context = subprocess.run(
        ["tar", "--exclude=__pycache__", "-cf", "-", *files],
        cwd=servers.REPOSITORY,
        stdout=subprocess.PIPE,
        check=True,
    )
    # Another process of the tests would install the same packages beside it.
    with (Path(tempfile.gettempdir()) / "pgque-images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            command,
            input=context.stdout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stdout.decode()[-3000:]
    return f"pgque-{target or 'default'}:test"
