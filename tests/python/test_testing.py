"""pgque.testing: a queue on a real server for the tests of handlers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

import pgque
from pgque.testing import TestQueue, pgque_queue  # noqa: F401

Queue = TestQueue


def test_each_outcome_is_seen(pgque_queue: Queue) -> None:  # noqa: F811
    worker = pgque.Worker(queue="another", consumer="another")

    @worker.handler("*")
    def handle(message: pgque.Message) -> object:
        if message.payload == "fails":
            raise ValueError("no")
        return {"dead": pgque.Dead("why"), "retry": pgque.Retry(60)}.get(str(message.payload))

    for payload in ("done", "fails", "dead", "retry"):
        pgque_queue.send(payload)
    pgque_queue.send("later", delay=3600)
    assert sorted(str(message.payload) for message in pgque_queue.work(worker)) == [
        "dead",
        "done",
        "fails",
        "retry",
    ]
    assert [message.payload for message in pgque_queue.done] == ["done"]
    assert sorted((message.payload, message.last_error) for message in pgque_queue.retried) == [
        ("fails", "ValueError: no"),
        ("retry", None),
    ]
    assert [letter.ev_data for letter in pgque_queue.dead] == ["dead"]
    assert [message.payload for message in pgque_queue.waiting] == ["later"]
    assert pgque_queue.archived == []
    assert pgque_queue.retry_now() == 2
    assert len(pgque_queue.work(worker)) == 2


def test_the_copy_has_the_settings_and_hooks_of_the_worker(pgque_queue: Queue) -> None:  # noqa: F811
    seen: list[str] = []

    @dataclass
    class Order:
        id: int

    worker = pgque.Worker(queue="another", consumer="another", archive=True, concurrency=2)
    worker.before(lambda message: seen.append(f"before {message.payload}"))

    @worker.handler("*")
    def handle(order: Order) -> None:
        seen.append(f"handler {order}")

    pgque_queue.send_batch([{"id": 1}], type="t")
    pgque_queue.work(worker)
    assert seen == ['before {"id": 1}', f"handler {Order(1)}"]
    assert [message.payload for message in pgque_queue.archived] == ['{"id": 1}']
    assert pgque_queue.done == []
    assert worker.queue == "another"


def test_what_handlers_send_is_handled_too(pgque_queue: Queue) -> None:  # noqa: F811
    worker = pgque.Worker(queue="another", consumer="another")

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        number = int(str(message.payload))
        if number < 3:
            with pgque.connect(pgque_queue.dsn) as client:
                client.send(message.queue or "", str(number + 1))

    pgque_queue.send("1")
    assert [message.payload for message in pgque_queue.work(worker)] == ["1", "2", "3"]


def test_an_async_worker_works_with_and_without_a_running_loop(pgque_queue: Queue) -> None:  # noqa: F811
    worker = pgque.AsyncWorker(queue="another", consumer="another")

    @worker.handler("*")
    async def handle(message: pgque.Message) -> None:
        await asyncio.sleep(0)

    pgque_queue.send("a")
    assert [message.payload for message in pgque_queue.work(worker)] == ["a"]
    pgque_queue.send("b")
    handled = asyncio.run(pgque_queue.work_async(worker))
    assert [message.payload for message in handled] == ["b"]
    assert [message.payload for message in pgque_queue.done] == ["a", "b"]


@pytest.mark.parametrize("subconsumer", [None, "one of several"])
def test_a_consumer_works_on_its_queue_as_well(
    pgque_queue: Queue,  # noqa: F811
    subconsumer: str | None,
) -> None:
    consumer = pgque.Consumer(
        queue="another", consumer="another", transactional=True, subconsumer=subconsumer
    )
    consumer.handler("*")(lambda message, conn: conn.execute("create table made ()"))
    pgque_queue.send("a")
    pgque_queue.send("b")
    assert [message.payload for message in pgque_queue.work(consumer)] == ["a", "b"]
    assert [message.payload for message in pgque_queue.done] == ["a"]
    assert ["made" in str(message.last_error) for message in pgque_queue.retried] == [True]


def test_a_worker_that_does_not_end_is_reported(pgque_queue: Queue) -> None:  # noqa: F811
    release = threading.Event()
    worker = pgque.Worker(queue="another", consumer="another", shutdown_timeout=0.1)
    worker.handler("*")(lambda message: release.wait(20))
    pgque_queue.send("a")
    with pytest.raises(TimeoutError, match="still had messages"):
        pgque_queue.work(worker, timeout=0.2)
    release.set()


def test_no_test_sees_the_messages_of_another(pgque_queue: Queue) -> None:  # noqa: F811
    assert (pgque_queue.waiting, pgque_queue.dead, pgque_queue.done) == ([], [], [])


CONFTEST = "from pgque.testing import pgque_queue\n"
TESTS = """
import pgque

def test_it(pgque_queue):
    pgque_queue.send("x")
    assert len(pgque_queue.waiting) == 1
"""


@pytest.mark.slow  # starts a server of its own
def test_the_fixture_is_there_after_an_import_in_conftest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert "warning" not in done.stdout


def test_the_package_without_it_does_not_import_pytest() -> None:
    subprocess.run(
        [sys.executable, "-c", "import sys, pgque, pgque.cli; assert 'pytest' not in sys.modules"], check=True
    )
