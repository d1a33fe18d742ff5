"""What the documents say holds: examples run, tests that are named exist."""

from __future__ import annotations

import ast
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

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "python" / "README.md"
RELIABILITY = ROOT / "sql" / "RELIABILITY.md"


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


def _missing(document: str) -> list[str]:
    """Name the tests of a document that no file has, or that no row of a table names as a test."""
    missing = []
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py::\w+)`", document):
        file, test = name.split("::")
        path = ROOT / "tests" / file
        found = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
        if test not in {f.name for f in found if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}:
            missing.append(name)
    return missing


def _rows(document: str, section: str) -> list[list[str]]:
    """Read the rows of the tables of a section, without their heads."""
    text = document.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    return [
        re.split(r"(?<!\\) \| ", row.strip("| ")) for table in tables for row in table.strip().split("\n")
    ]


def test_each_test_that_a_guarantee_names_exists() -> None:
    document = RELIABILITY.read_text(encoding="utf-8")
    assert _missing(document) == []
    guarantees = _rows(document, "Guarantees")
    assert len(guarantees) > 30
    for guarantee, *shown in guarantees:
        assert len(shown) == 1 and "::test_" in shown[0], f"no test shows: {guarantee}"
    limits = _rows(document, "What is not guaranteed")
    assert len(limits) > 10
    for row in limits:
        assert len(row) == 3 and all(row), f"what is not promised, why, what to do: {row}"


def test_a_test_that_is_gone_is_missed() -> None:
    known, gone = (
        "sql/test_model.py::test_any_calls_of_workers_answer_as_the_model_says",
        "sql/test_model.py::test_of_old",
    )
    assert _missing(f"| a guarantee | `{known}`, `{gone}`, `sql/test_none.py::test_x` |") == [
        gone,
        "sql/test_none.py::test_x",
    ]
