"""Signs of life of a worker: a file that it touches, and systemd's watchdog."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

import pgque
from pgque.cli import main
from pgque.runtime import liveness as _liveness
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def pool(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    return queue


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the worker touch its file, and ask the database, with every step."""
    monkeypatch.setattr(_liveness, "_INTERVAL", 0.0)
    monkeypatch.setattr(_liveness, "_ASK_AFTER", 0.0)


def _touched_again(file: Path) -> Callable[[], bool]:
    """Return a condition: the file was touched twice, so once for sure after this call."""
    seen: set[int] = set()

    def touched() -> bool:
        if file.exists():
            seen.add(file.stat().st_mtime_ns)
        return len(seen) > 2

    return touched


def _lock_waits(conn: Connection, name: str) -> bool:
    [(count,)] = conn.execute(
        "select count(*) from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'",
        [name],
    ).fetchall()
    return bool(count)


def test_the_file_is_touched_while_all_is_well_also_when_handlers_take_long(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, tmp_path: Path
) -> None:
    file = tmp_path / "alive"
    release, began = threading.Event(), threading.Event()
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=1, liveness_file=file)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        began.set()
        release.wait(20)

    with threads.running(worker.run, worker.stop, 20):
        wait_until(_touched_again(file), "it is touched")
        client.send(pool, "x")
        tick(pool)
        assert began.wait(10)
        wait_until(_touched_again(file), "it is touched while a handler runs")
        release.set()


def test_the_file_is_not_touched_while_the_database_hangs(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    wait_until: Wait,
    connect: Any,
    conn: Connection,
    tmp_path: Path,
) -> None:
    file = tmp_path / "alive"
    worker = pgque.Worker(f"{dsn} application_name=hangs", queue=pool, consumer="c", liveness_file=file)
    worker.handler("*")(lambda message: None)
    with threads.running(worker.run, worker.stop, 20):
        wait_until(_touched_again(file), "it is touched")
        holder = connect(autocommit=False)
        holder.execute("lock table pgque.queue in access exclusive mode")
        wait_until(lambda: _lock_waits(conn, "hangs"), "the worker waits for a lock")
        before = file.stat().st_mtime_ns
        # A wait of the server's own, so that the time that passes is not the test's.
        with pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute("set lock_timeout = '1500ms'; lock table pgque.queue in access share mode")
        conn.execute("reset lock_timeout")
        assert _lock_waits(conn, "hangs")
        assert file.stat().st_mtime_ns == before
        holder.rollback()
        wait_until(_touched_again(file), "it is touched again")


PROGRAM = """
import sys
import pgque

worker = pgque.Worker(
    sys.argv[1], queue=sys.argv[2], consumer="c", concurrency=2, use="processes", liveness_file=sys.argv[3]
)

@worker.handler("*")
def handle(message):
    pass

if __name__ == "__main__":
    worker.run()
"""


@contextmanager
def _running(*command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow  # starts processes
def test_with_processes_the_file_is_touched_while_all_of_them_are_alive(
    dsn: str, pool: str, wait_until: Wait, tmp_path: Path
) -> None:
    file, path = tmp_path / "alive", tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    with _running(sys.executable, str(path), dsn, pool, str(file)) as process:
        wait_until(_touched_again(file), "it is touched", timeout=30)
        assert (tmp_path / "alive.1").exists()
        assert (tmp_path / "alive.2").exists()
        process.terminate()
        assert process.wait(15) == 0
    assert sorted(path.name for path in tmp_path.glob("alive*")) == ["alive"]


MODULE = """
import pgque

worker = pgque.Worker(queue={queue!r}, consumer="c")
other = 1
alone = pgque.Consumer(queue="{queue}", consumer="c")

@alone.handler("*")
@worker.handler("*")
def handle(message):
    print(f"handled {{message.payload}}\\n", end="", flush=True)  # one write: threads print at once
"""


@pytest.fixture
def module(pool: str, tmp_path: Path) -> str:
    """The name of a module in the folder tmp_path, with a worker."""
    name = f"jobs_{pool}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(queue=pool))
    return name


def test_the_command_runs_the_worker_of_a_module_and_notifies_systemd(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, tmp_path: Path, module: str
) -> None:
    file = tmp_path / "alive"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        command = [
            sys.executable,
            "-m",
            "pgque.cli",
            "work",
            f"{module}:worker",
            "--liveness-file",
            str(file),
        ]
        env = {**os.environ, "PGQUE_DSN": dsn, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        with _running(*command, cwd=tmp_path, env=env, stdout=subprocess.PIPE) as process:
            assert systemd.recv(100) == b"READY=1\nWATCHDOG=1"
            assert systemd.recv(100) == b"WATCHDOG=1"
            wait_until(_touched_again(file), "it is touched")
            client.send(pool, "x")
            tick(pool)
            # Twice: a message that is delivered between two statements of the list is in neither.
            wait_until(lambda: client.messages.list(pool) == [] == client.messages.list(pool))
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == b"handled x\n"


@pytest.mark.parametrize("name", ["worker", "alone"])
def test_the_command_ends_when_nothing_is_left_if_asked_to(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, tmp_path: Path, module: str, name: str
) -> None:
    client.send_batch(pool, "t", ["a", "b", "c"])
    tick(pool)
    done = subprocess.run(
        [sys.executable, "-m", "pgque.cli", "work", f"{module}:{name}", "--until-idle", "--dsn", dsn],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert sorted(done.stdout.splitlines()) == ["handled a", "handled b", "handled c"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("{module}", "is no MODULE:WORKER"),
        ("no_such_module:worker", "no module 'no_such_module'"),
        ("{module}:nothing", "nothing, not a Worker"),
        ("{module}:other", "a int, not a Worker"),
    ],
)
def test_the_command_refuses_a_name_that_is_no_worker(
    name: str, told: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(main, ["work", name.format(module=module)])
    assert result.exit_code == 2
    assert told in result.output


def test_a_file_that_cannot_be_made_is_refused(pool: str, tmp_path: Path) -> None:
    worker = pgque.Worker(queue=pool, consumer="c", liveness_file=tmp_path / "no" / "folder")
    worker.handler("*")(lambda message: None)
    with pytest.raises(pgque.PgqueBadArgumentError, match="liveness_file"):
        worker.run()
