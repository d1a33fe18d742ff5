"""Worker(use="processes"), ended and started again under load: what is not done is handed back, nothing is done twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgque

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]

PROGRAM = """
import sys, time
import pgque

worker = pgque.Worker(
    sys.argv[1], queue=sys.argv[2], consumer="c", concurrency=3, use="processes", prefetch=int(sys.argv[3]),
    visibility_timeout=600, worker="prog", shutdown_timeout=float(sys.argv[4]),
)

def note(message, what):
    with pgque.connect(sys.argv[1], autocommit=True) as client:
        client.conn.execute(
            "insert into worked values (%s, %s, %s)", [message.msg_id, message.receive_count, what]
        )

@worker.handler("*")
def handle(message):
    note(message, "began")
    if message.receive_count == 1 or message.payload != "long":
        time.sleep(60 if message.payload == "long" else float(message.payload))
    note(message, "done")

if __name__ == "__main__":
    worker.run()
"""


class Program:
    """The program above for one queue, which can be started again and again."""

    def __init__(self, path: Path, dsn: str, queue: str) -> None:
        self._command = [sys.executable, str(path), dsn, queue]
        self.process: subprocess.Popen[str] | None = None

    def start(self, prefetch: int = 20, shutdown_timeout: float = 30) -> None:
        self.process = subprocess.Popen(
            [*self._command, str(prefetch), str(shutdown_timeout)], stderr=subprocess.PIPE, text=True
        )

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """End it, and see that it ended well."""
        assert self.process is not None
        self.process.send_signal(signum)
        _, errors = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, errors
        self.process = None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def pool(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    return queue


@pytest.fixture
def worked(conn: Connection) -> Iterator[Callable[[str], Counter[int]]]:
    """worked("began"), worked("done"): how often a handler of each message did that."""
    conn.execute("create table worked (msg_id bigint, receive_count int, what text)")

    def do(what: str) -> Counter[int]:
        return Counter(
            row[0] for row in conn.execute("select w.msg_id from worked as w where w.what = %s", [what])
        )

    yield do
    conn.execute("drop table worked")


@pytest.fixture
def program(tmp_path: Path, dsn: str, pool: str) -> Iterator[Program]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    program = Program(path, dsn, pool)
    yield program
    program.close()


Worked = Callable[[str], Counter[int]]


def held(client: pgque.PgqueClient, queue: str) -> int:
    return sum(worker.messages for worker in client.consumers.list_workers(queue, "c"))


@pytest.mark.slow  # starts and ends processes for half a minute
@pytest.mark.parametrize(("prefetch", "signum"), [(1, signal.SIGTERM), (20, signal.SIGINT)])
def test_processes_that_are_ended_under_load_lose_nothing_and_do_nothing_twice(
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    program: Program,
    worked: Worked,
    prefetch: int,
    signum: int,
) -> None:
    sent: list[int] = []
    for turn in range(2):
        sent += client.send_batch(pool, "t", ["0.01", "0", "0.05"] * 80)
        tick(pool)
        before = len(worked("began"))
        program.start(prefetch)
        wait_until(lambda before=before, turn=turn: len(worked("began")) > before + 7 * turn, timeout=60)
        program.stop(signum)
        # What runs is waited for, and everything else is handed back, at once and not when a lease ends.
        assert worked("began") == worked("done")
        assert held(client, pool) == 0
    assert len(worked("done")) < len(sent), "there was no load any more"
    program.start(prefetch)
    wait_until(lambda: len(worked("done")) == len(sent) and held(client, pool) == 0, timeout=60)
    program.stop(signum)
    assert worked("began") == worked("done") == Counter(sent)
    assert client.receive(pool, "c", worker="other") == []
    assert client.dlq.inspect(pool) == []


def test_a_released_message_uses_up_no_attempt(
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    program: Program,
    worked: Worked,
) -> None:
    # Each end hands back what a process had taken and not begun; that must not use up its attempts.
    client.admin.set_queue_config(pool, "max_receive_attempts", "20")
    sent = client.send_batch(pool, "t", ["0"] * 200 + ["0.2"] * 30)
    tick(pool)
    program.start(prefetch=100)
    wait_until(lambda: len(worked("done")) > 180, timeout=60)
    program.stop()
    left = len(sent) - len(worked("done"))
    assert worked("began") == worked("done")
    other: list[pgque.Message] = []
    while batch := client.receive(pool, "c", worker="other", visibility_timeout=600):
        other += batch
    assert len(other) == left > 0
    assert Counter(message.msg_id for message in other) + worked("done") == Counter(sent)


def test_a_handler_that_does_not_end_in_time_has_its_message_released_to_the_next_worker(
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    program: Program,
    worked: Worked,
) -> None:
    long = client.send_batch(pool, "t", ["long"] * 3)
    tick(pool)
    program.start(shutdown_timeout=0.5)
    wait_until(lambda: sum(worked("began").values()) == 3, timeout=60)
    short = client.send_batch(pool, "t", ["0"] * 20)
    tick(pool)
    program.stop()
    assert held(client, pool) == 0
    assert worked("done") == Counter()
    program.start()
    wait_until(lambda: sum(worked("done").values()) >= 23 and held(client, pool) == 0, timeout=60)
    program.stop()
    # What was in flight came twice, everything else once.
    assert worked("began") == Counter(long * 2 + short)
    assert worked("done") == Counter(long + short)
