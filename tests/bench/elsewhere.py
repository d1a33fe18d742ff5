"""Run a subject with the Python of .venv/peers, which has the other systems; the benchmarks run without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.measure import Bench, Row

REPOSITORY = Path(__file__).resolve().parents[2]
VENV = REPOSITORY / ".venv" / "peers"
PYTHON = VENV / "bin" / "python"
PACKAGES = ("pgqueuer", "procrastinate", "asyncpg", "psycopg")


def set_up() -> None:
    """Make .venv/peers, if that can be done here."""
    subprocess.run([str(REPOSITORY / "tests" / "support" / "peers.sh")], check=False)


def missing() -> str | None:
    """Tell how to get what is missing here, or None."""
    return (
        None if (VENV / ".ready").exists() else "not measured: tests/support/peers.sh sets up what it needs"
    )


def versions() -> str:
    """Tell what was measured with."""
    code = f"from importlib.metadata import version; print(', '.join(f'{{p}} {{version(p)}}' for p in {PACKAGES}))"
    return subprocess.run(
        [str(PYTHON), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def start(module: str, arguments: Sequence[str], **environment: str) -> None:
    """Run a module there."""
    subprocess.run(
        [str(PYTHON), "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "tests"), **environment},
        stdin=subprocess.DEVNULL,
        check=True,
    )


def run(module: str, bench: Bench) -> list[Row]:
    """Run a module's subject there; return its rows, none if what it needs is missing."""
    if missing():
        return []
    with tempfile.TemporaryDirectory(prefix="pgque-bench-") as scratch:
        result = Path(scratch) / "rows.json"
        start(module, [str(result), str(int(bench.quick)), str(bench.minutes)], PGQUE_BENCH_DSN=bench.dsn)
        return [Row(**row) for row in json.loads(result.read_text())]


def main(subject: Callable[[Bench], list[Row]]) -> None:
    """Be the program that ``run`` starts."""
    result, quick, minutes = sys.argv[1:]
    bench = Bench(os.environ["PGQUE_BENCH_DSN"], quick == "1", False, minutes=float(minutes))
    Path(result).write_text(json.dumps([asdict(row) for row in subject(bench)]))
