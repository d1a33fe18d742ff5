"""Keep what was measured, with what it was measured on: a JSON file a subject, and the plots drawn from them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from bench import elsewhere
from bench.measure import Row
from pgque import __version__

FOLDER = Path(__file__).with_name("results")
SHOWN = "tests/bench/results"


def fsync_ms(rounds: int = 100) -> float:
    """Return the median of writing a page and waiting for the disk, where temporary servers live."""
    times = []
    with tempfile.TemporaryFile() as file:
        for _ in range(rounds):
            file.seek(0)
            file.write(os.urandom(8192))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def provenance() -> dict[str, str]:
    """Return the version of pgque, the memory, the disk, the revision and the date."""
    git = ["git", "-C", str(elsewhere.REPOSITORY)]
    try:
        revision = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=10"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "pgque": __version__,
        "memory": f"{memory:.0f} GB",
        "fsync": f"{fsync_ms():.2f} ms for a page",
        "revision": revision,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def save(machine: Mapping[str, str | int], quick: bool, found: Mapping[str, Sequence[Row]]) -> list[str]:
    """Write a file for each subject that was measured, and draw the plots anew; return what was written."""
    FOLDER.mkdir(exist_ok=True)
    described = {**machine, **provenance()}
    written = []
    for name, rows in found.items():
        if rows:
            report = {"machine": described, "quick": quick, "rows": [asdict(row) for row in rows]}
            (FOLDER / f"{name}.json").write_text(
                json.dumps(_rounded(report), indent=1, ensure_ascii=False) + "\n"
            )
            written.append(f"{SHOWN}/{name}.json")
    if elsewhere.missing():
        return [*written, f"no plots: {elsewhere.missing()}"]
    elsewhere.start("bench.plots", [str(FOLDER)])
    return [*written, *(f"{SHOWN}/{file.name}" for file in sorted(FOLDER.glob("*.svg")))]


def _rounded(value: object) -> object:
    """Leave out digits that mean nothing."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
