"""The processes of the pipeline: what Spark needs to start, and ends that leave nothing behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_JAVA = 17  # the oldest that Spark 4 runs on


def jdbc_driver() -> Path:
    """Return where PostgreSQL's JDBC driver is, or should be."""
    return Path(os.environ.get("PGQUE_JDBC_JAR") or "/usr/share/java/postgresql.jar")


def missing() -> str | None:
    """Say what the machine lacks to run Spark and what to do about it, or None."""
    lacks = [name for name in ("pyspark", "pyarrow") if importlib.util.find_spec(name) is None]
    if lacks:
        return f"{' and '.join(lacks)} missing: pip install pyspark './python[spark]', or run make pipeline"
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    try:
        told = subprocess.run([java or "java", "-version"], capture_output=True, text=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        told = ""
    found = re.search(r'version "(\d+)', told)
    if found is None or int(found[1]) < _JAVA:
        return (
            f"Spark needs Java {_JAVA} or newer, and found {f'Java {found[1]}' if found else 'none'}."
            f" Debian and Ubuntu: sudo apt install openjdk-{_JAVA}-jre-headless; elsewhere: adoptium.net;"
            " then set JAVA_HOME if need be"
        )
    if not jdbc_driver().is_file():
        return (
            "PostgreSQL's JDBC driver is missing. Debian and Ubuntu: sudo apt install"
            " libpostgresql-jdbc-java; elsewhere: download it from jdbc.postgresql.org, and set"
            " PGQUE_JDBC_JAR=/path/to/postgresql-42.x.jar"
        )
    return None


def environment(connection: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables for Spark on this machine, with an event log and scratch files in `folder`."""
    events = folder / "events"
    events.mkdir(exist_ok=True)
    conf = {
        # Of a run of a minute, the second compiler takes a third of the CPU and never pays it back.
        "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.local.dir": str(folder / "local"),
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    arguments = ["--master", "local[2]", "--driver-memory", "1g", "--driver-class-path", str(jdbc_driver())]
    for name, value in conf.items():
        arguments += ["--conf", f"{name}={value}"]
    return {
        **os.environ,
        **connection,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": shlex.join([*arguments, "pyspark-shell"]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


class Program:
    """One of the package's scripts in a process group of its own, with its JVM."""

    def __init__(self, name: str, arguments: list[str], env: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.{name}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=folder,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    def output(self) -> str:
        """Return what it wrote so far, and those of its name before it."""
        return self._log.read_text(errors="replace")

    def told(self) -> str:
        """Return the end of what it wrote, without the frames of Java's stacks."""
        lines = (line for line in self.output().splitlines() if not line.startswith(("\tat ", "\t... ")))
        return "\n".join(list(lines)[-60:])

    def kill(self) -> None:
        """SIGKILL Python and the JVM at once; Spark's Python workers notice, and end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Hold what Spark's event log tells of a finished micro-batch; times in seconds since 1970."""

    query: str
    number: int
    start: float
    seconds: float
    rows: int


def micro_batches(folder: Path) -> list[MicroBatch]:
    """Return the micro-batches with rows, in the order of time; one that was replayed may be there twice."""
    found: list[MicroBatch] = []
    for path in (folder / "events").iterdir():
        for line in path.read_text(errors="replace").splitlines():
            if "$QueryProgressEvent" not in line:
                continue
            with suppress(ValueError, KeyError):  # the last line of a killed process
                progress = json.loads(line)["progress"]
                start = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00"))
                rows = sum(source["numInputRows"] for source in progress["sources"])
                seconds = progress["durationMs"]["triggerExecution"] / 1000
                if rows:
                    found.append(
                        MicroBatch(progress["name"], progress["batchId"], start.timestamp(), seconds, rows)
                    )
    return sorted(found, key=lambda batch: batch.start)


def seconds_told(program: Program, word: str) -> float:
    """Return the sum of the seconds in a program's lines of the form WORD seconds."""
    lines = (line.split() for line in program.output().splitlines())
    return sum(float(words[1]) for words in lines if len(words) == 2 and words[0] == word)


def started(folder: Path) -> str:
    """Return how much of Spark is up."""
    sessions = len(list((folder / "events").iterdir()))
    queries = len(list((folder / "checkpoints").glob("*/metadata")))
    return f"{sessions} of 2 sessions, {queries} of 2 streaming queries"


def unfinished(checkpoints: Path) -> dict[str, int]:
    """Return the micro-batch of each query that is begun and not finished, as the checkpoint tells."""
    found = {}
    for query in ("changes", "totals"):
        begun, done = (_newest(checkpoints / query / log) for log in ("offsets", "commits"))
        if begun > done:
            found[query] = begun
    return found


def _newest(folder: Path) -> int:
    if not folder.is_dir():
        return -1
    return max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=-1)
