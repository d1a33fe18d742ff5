"""The examples about work queues in python/README.md run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

import pgque
from pgque.install import install

README = Path(__file__).resolve().parents[2] / "python" / "README.md"


def _examples(section: str) -> list[str]:
    text = README.read_text(encoding="utf-8").split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    return ["import pgque\n" + code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


@pytest.fixture
def environment(fresh_dsn: str) -> dict[str, str]:
    """Variables with which an empty connection string leads to a database with the queue of the examples."""
    install(fresh_dsn)
    with pgque.connect(fresh_dsn) as client:
        client.create_queue("emails")
        client.subscribe("emails", "mailers")
    names = {
        "host": "PGHOST",
        "port": "PGPORT",
        "user": "PGUSER",
        "dbname": "PGDATABASE",
        "password": "PGPASSWORD",
    }
    parts = psycopg.conninfo.conninfo_to_dict(fresh_dsn)
    return {**os.environ, **{names[name]: str(value) for name, value in parts.items() if name in names}}


@contextmanager
def _ticking(dsn: str) -> Iterator[None]:
    stop = threading.Event()

    def tick() -> None:
        with pgque.connect(dsn, autocommit=True) as client:
            while not stop.wait(0.05):
                client.ticker("emails")

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_the_examples_of_work_queues_run(fresh_dsn: str, environment: dict[str, str], tmp_path: Path) -> None:
    worker_code, loop_code = _examples("Work queues")
    (tmp_path / "worker.py").write_text(worker_code)
    with _ticking(fresh_dsn):
        done = subprocess.run(
            [sys.executable, "-c", loop_code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        with pgque.connect(fresh_dsn) as client:
            client.send("emails", {"to": "bob@example.com"}, type="welcome")
        worker = subprocess.Popen(
            [sys.executable, "-u", str(tmp_path / "worker.py")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        with worker:
            try:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "to bob@example.com\n"
                worker.terminate()
                assert worker.wait(10) == 0
            finally:
                worker.kill()
    with pgque.connect(fresh_dsn) as client:
        assert client.list_workers("emails") == []
