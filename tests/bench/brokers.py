"""Measure Celery with pgque as its broker, beside kombu's own transports for pgmq and Redis.

Run it, after tests/support/peers.sh: .venv/peers/bin/python tests/bench/brokers.py

Each broker has a server of its own for the run: PostgreSQL with its settings for commits as they are, Redis with
appendfsync everysec. The same worker of two processes runs the same empty task. A session holds a snapshot
meanwhile, as a long report does, so that dead rows stay and are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import psycopg
from celery import Celery
from psycopg.conninfo import conninfo_to_dict

import pgque.celery
from pgque import embedded
from pgque.ops.install import install
from pgque.ops.ticker import run_ticker

TICK = os.sysconf("SC_CLK_TCK")
RATE, SECONDS = 50, 10  # of the tasks whose latency is measured

app = Celery("brokers", broker=os.environ.get("BENCH_BROKER", "pgque://"))
app.conf.update(
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    broker_transport_options=json.loads(os.environ.get("BENCH_OPTIONS", "{}")),
)


@app.task(name="note")  # type: ignore[untyped-decorator]
def note(sent_at: float) -> None:
    """Write how long the task took to come, and when it came."""
    now = time.time()
    with Path(os.environ["BENCH_FILE"]).open("a") as file:
        file.write(f"{now} {now - sent_at}\n")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children, also those that have ended."""
    total = 0.0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(process.name) == pid:
            total += sum(int(fields[n]) for n in (11, 12, 13, 14)) / TICK
        elif int(fields[1]) == pid:
            total += sum(int(fields[n]) for n in (11, 12)) / TICK
    return total


@contextmanager
def postgres(name: str) -> Iterator[tuple[str, int, str]]:
    """Start PostgreSQL with pgque or pgmq; give the broker's URL, the server's process and its DSN."""
    with embedded.start() as server, ExitStack() as stack:
        parts = conninfo_to_dict(server.tcp_dsn)
        url = f"//{parts['user']}:{quote(str(parts.get('password') or 'x'))}@{parts['host']}:{parts['port']}"
        if name == "pgque":
            install(server.dsn)
            stop = threading.Event()
            ticker = threading.Thread(target=run_ticker, args=(server.dsn, stop))
            ticker.start()
            stack.callback(ticker.join)
            stack.callback(stop.set)
        else:
            package = find_spec("pgmq")
            assert package is not None and package.origin is not None
            with psycopg.connect(server.dsn) as conn:
                conn.execute("create schema pgmq")
                conn.execute((Path(package.origin).parent / "sql" / "pgmq.sql").read_bytes())
        pid = int((server.data_dir / "postmaster.pid").read_text().split()[0])
        yield f"{name}:{url}/{parts['dbname']}", pid, server.dsn


@contextmanager
def redis() -> Iterator[tuple[str, int, str]]:
    """Start Redis."""
    program = shutil.which("redis-server") or sys.exit("no redis-server: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder:
        options = ["--port", "16379", "--dir", folder, "--appendonly", "yes", "--save", ""]
        with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process:
            yield "redis://127.0.0.1:16379/0", process.pid, ""
            process.terminate()


def wait_for(file: Path, lines: int) -> None:
    """Wait until this many tasks have run."""
    deadline = time.monotonic() + 600
    while not file.exists() or file.read_bytes().count(b"\n") < lines:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{lines} tasks did not run")
        time.sleep(0.05)


def measure(name: str, tasks: int) -> dict[str, float]:
    """Measure one broker."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, server, dsn = stack.enter_context(redis() if name == "redis" else postgres(name))
        options = {"init_extension": False, "use_notify": True} if name == "pgmq" else {}
        app.conf.update(broker_url=url, broker_transport_options=options)
        file = folder / "done"
        env = {
            **os.environ,
            "BENCH_BROKER": url,
            "BENCH_OPTIONS": json.dumps(options),
            "BENCH_FILE": str(file),
        }
        found: dict[str, float] = {}
        note.delay(0.0)
        if dsn:
            held = stack.enter_context(psycopg.connect(dsn))
            held.execute("set transaction isolation level repeatable read")
            held.execute("select pg_current_xact_id()")
        cpu, began = cpu_seconds(server), time.time()
        for _ in range(tasks):
            note.delay(time.time())
        found["sent_per_s"] = tasks / (time.time() - began)
        found["send_cpu_ms_per_task"] = 1000 * (cpu_seconds(server) - cpu) / tasks
        if name == "pgque":
            began = time.time()
            with pgque.celery.bulk():
                for _ in range(tasks):
                    note.delay(time.time())
            found["bulk_per_s"] = tasks / (time.time() - began)
        total = tasks * (2 if name == "pgque" else 1)
        command = [sys.executable, "-m", "celery", "-A", "brokers", "worker", "-c", "2", "-l", "error"]
        cpu = cpu_seconds(server)
        with subprocess.Popen(command, cwd=Path(__file__).parent, env=env, start_new_session=True) as worker:
            stack.callback(worker.kill)
            wait_for(file, total + 1)
            found["work_cpu_ms_per_task"] = 1000 * (cpu_seconds(server) - cpu) / total
            ends = sorted(float(line.split()[0]) for line in file.read_text().splitlines())
            found["run_per_s"] = (len(ends) - 1) / (ends[-1] - ends[0])
            if dsn:
                time.sleep(2)  # sessions hand in their statistics
                with psycopg.connect(dsn) as conn:
                    dead = (
                        "select sum(s.n_dead_tup) from pg_stat_all_tables as s"
                        " where s.schemaname in ('pgmq', 'pgque')"
                    )
                    found["dead_rows_per_task"] = float((conn.execute(dead).fetchone() or [0])[0]) / total
            cpu, began = cpu_seconds(server), time.time()
            time.sleep(10)
            found["idle_cpu_percent"] = 100 * (cpu_seconds(server) - cpu) / (time.time() - began)
            for _ in range(RATE * SECONDS):
                note.delay(time.time())
                time.sleep(1 / RATE)
            wait_for(file, total + 1 + RATE * SECONDS)
            late = sorted(float(line.split()[1]) for line in file.read_text().splitlines()[-RATE * SECONDS :])
            found["latency_p50_ms"] = 1000 * late[len(late) // 2]
            found["latency_p99_ms"] = 1000 * late[len(late) * 99 // 100]
            worker.terminate()
            worker.wait(60)
    return found


def main() -> None:
    """Measure the brokers, and print what they did as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--only", default="pgque,pgmq,redis")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if len(names) > 1:  # an application keeps its connections
        for name in names:
            subprocess.run(
                [sys.executable, __file__, "--tasks", str(arguments.tasks), "--only", name], check=False
            )
        return
    found = measure(names[0], arguments.tasks)
    print(json.dumps({"broker": names[0], **{what: round(value, 2) for what, value in found.items()}}))


if __name__ == "__main__":
    sys.modules["brokers"] = sys.modules["__main__"]
    main()
