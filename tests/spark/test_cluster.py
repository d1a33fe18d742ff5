"""Executors in processes of their own: what they must have, what they connect to, and what happens when they die."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import Role
from spark.conftest import built_wheel
from sql.helpers import Connection, column, forced_tick, payloads, send_many, subscribe, value

# A cluster has six JVMs.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


SENT = Counter({str(number): 8 for number in range(1, 101)})

# Each task of the stream says that it runs, and waits for the file "go" if its partition is among those that wait.
JOB = """
import os, time
source, target, folder, waits = sys.argv[1:5]
url = os.environ["JOB_URL"]

def where(batches):
    import pyarrow
    import pgque
    for _ in batches:
        yield pyarrow.RecordBatch.from_pylist([{"file": pgque.__file__}])

def held(batches):
    from pyspark import TaskContext
    task = TaskContext.get()
    yield from batches
    Path(folder, f"task-{task.partitionId()}-{task.attemptNumber()}").touch()
    while str(task.partitionId()) in waits and not Path(folder, "go").exists():
        time.sleep(0.02)

there = spark.read.format("pgque").options(url=url, queue=source).load()
print("BATCH", there.count(), flush=True)
files = {row.file for row in there.mapInArrow(where, "file string").collect()}
print("PACKAGE", *files, flush=True)
rows = spark.readStream.format("pgque").options(url=url, queue=source, consumer="job", numPartitions="2")
rows = rows.options(startingAt="earliest", maxTicksPerTrigger="4").load().select("payload")
writer = rows.mapInArrow(held, "payload string").writeStream.format("pgque")
writer = writer.options(url=url, queue=target, checkpointLocation=folder + "/checkpoint")
query = writer.trigger(availableNow=True).start()
query.awaitTermination()
print("READ", flush=True)
while not Path(folder, "end").exists():
    time.sleep(0.02)
"""


def spark_home() -> str:
    """Return the folder of the pip package, which has Spark's own programs."""
    import pyspark

    return str(Path(pyspark.__file__).parent)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The wheel as a file that Spark sends to its workers, and a Python for them that lacks the package."""
    folder = tmp_path_factory.mktemp("package")
    wheel = built_wheel(folder)
    zipped = folder / "pgque.zip"
    wheel.rename(zipped)
    python = folder / "python"
    # Without -S, a file .pth leads to the sources.
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{sysconfig.get_path("purelib")}" exec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    told = subprocess.run([str(python), "-c", "import pgque"], capture_output=True, text=True, check=False)
    assert "No module named 'pgque'" in told.stderr
    return {"zip": str(zipped), "python": str(python)}


@pytest.fixture
def job(
    run_driver: Callable[..., Any],
    package: dict[str, str],
    roles: Callable[..., Role],
    new_queue: Callable[[], str],
    conn: Connection,
    queue: str,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> Callable[..., Job]:
    """job(master, waits, **conf) starts JOB on a cluster, for 8 ticks of 100 messages."""

    def do(master: str, waits: str, **conf: str) -> Job:
        target, role = new_queue(), roles("reader", "writer")
        subscribe(conn, target, "check")
        for _ in range(8):
            send_many(conn, queue, 100)
            forced_tick(conn, queue)
        driver = run_driver(
            JOB,
            *(queue, target, str(tmp_path), waits),
            conf={
                "spark.master": master,
                "spark.executor.memory": "512m",
                "spark.submit.pyFiles": package["zip"],
                **conf,
            },
            env={
                "JOB_URL": role.dsn,
                "SPARK_HOME": spark_home(),
                "PGQUE_SPARK_PYTHON": package["python"],
                # Spark sends the file to the processes of tasks. To those that plan and follow a stream it does not.
                "PYTHONPATH": package["zip"],
            },
        )
        return Job(driver, conn, target, role, tmp_path, wait_until)

    return do


class Job:
    """A running JOB."""

    def __init__(
        self,
        driver: Any,
        conn: Connection,
        target: str,
        role: Role,
        folder: Path,
        wait_until: Callable[..., None],
    ) -> None:
        self.driver, self.conn, self.target, self.role = driver, conn, target, role
        self._folder, self._wait_until = folder, wait_until

    def wait_for_tasks(self, *names: str) -> None:
        """Wait until these tasks, partition-attempt, have read their rows."""

        def there() -> bool:
            assert self.driver.running, self.driver.output()[-4000:]
            return all((self._folder / f"task-{name}").exists() for name in names)

        self._wait_until(there, f"tasks {names} run", 300)

    def go(self) -> None:
        (self._folder / "go").touch()

    def sessions(self) -> list[str]:
        """Return the names of the role's sessions."""
        return column(
            self.conn, "select application_name from pg_stat_activity where usename = %s", self.role.name
        )

    def end(self) -> None:
        (self._folder / "end").touch()
        self.driver.finish(120)

    def arrived(self) -> Counter[str | None]:
        forced_tick(self.conn, self.target)
        return Counter(payloads(self.conn, self.target, "check", 5_000))


def test_a_cluster_reads_and_writes_with_the_wheel_and_an_executor_that_is_killed_changes_nothing(
    job: Callable[..., Job], conn: Connection, queue: str, wait_until: Callable[..., None]
) -> None:
    running = job("local-cluster[2,1,1024]", "01")
    running.wait_for_tasks("0-0", "1-0")
    output = running.driver.output()
    assert "BATCH 800" in output
    (files,) = re.findall("^PACKAGE (.*)", output, re.MULTILINE)
    assert "pgque.zip/pgque/" in files
    victim, *others = running.driver.processes("CoarseGrainedExecutorBackend")
    assert len(others) == 1, "each executor is a process"
    os.kill(victim, signal.SIGKILL)

    def another() -> bool:
        return len(set(running.driver.processes("CoarseGrainedExecutorBackend")) - {victim}) == 2

    wait_until(another, "Spark starts another executor", 120)
    running.go()
    running.driver.wait_for("READ", 300)
    # The driver of the stream, and at most the one that reads and the one that writes of each of two tasks
    assert len(running.sessions()) <= 5, running.sessions()
    running.end()
    wait_until(lambda: running.sessions() == [], "the sessions end with their processes", 60)
    assert running.arrived() == SENT


@contextmanager
def two_hosts(folder: Path) -> Iterator[str]:
    """Run a standalone cluster with an executor on each of two addresses of this machine; yield its master.

    Spark starts no twin of a task on the host of the first, and the executors of local-cluster share theirs.
    """
    program = str(Path(spark_home()) / "bin" / "spark-class")
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = folder / f"{name}.log"
        env = {k: v for k, v in os.environ.items() if k not in ("SPARK_LOCAL_IP", "PYSPARK_PYTHON")}
        env |= {"SPARK_HOME": spark_home(), "SPARK_DAEMON_MEMORY": "256m"}
        with log.open("wb") as out:
            processes.append(
                subprocess.Popen(
                    [program, *arguments], stdout=out, stderr=out, env=env, start_new_session=True
                )
            )
        return log

    def told(log: Path, pattern: str) -> str:
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern, log.read_text(errors="replace"))):
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)
        return found[0]

    deploy = "org.apache.spark.deploy"
    try:
        log = start(
            "master", f"{deploy}.master.Master", *("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        )
        master = told(log, r"spark://127\.0\.0\.1:\d+")
        for host in ("127.0.0.1", "127.0.0.2"):
            log = start(
                f"worker-{host}",
                f"{deploy}.worker.Worker",
                *("--host", host, "--port", "0", "--webui-port", "0", "--cores", "1", "--memory", "1g"),
                *("--work-dir", str(folder / f"work-{host}"), master),
            )
            told(log, "Successfully registered with master")
        yield master
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_task_and_its_speculative_twin_both_stage_and_the_micro_batch_is_exact(
    job: Callable[..., Job], conn: Connection, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with two_hosts(tmp_path_factory.mktemp("cluster")) as master:
        running = job(
            master,
            "0",
            **{
                "spark.speculation": "true",
                "spark.speculation.interval": "50ms",
                "spark.speculation.multiplier": "1.1",
                "spark.speculation.quantile": "0.5",
            },
        )
        running.wait_for_tasks("1-0", "0-0", "0-1")
        running.go()
        running.driver.wait_for("READ", 300)
        running.end()
    staged = "select count(distinct s.attempt) from pgque.sink_stage as s where s.queue = %s"
    micro_batches = 2
    assert value(conn, staged, running.target) > 2 * micro_batches
    assert running.arrived() == SENT
