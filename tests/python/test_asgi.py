"""Workers in a web application: they start and stop with it, and one that dies is seen."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgque
import pgque.asgi
from conftest import Queues
from support.documents import environment
from support.processes import ended

Tick = Callable[[str], int | None]


@pytest.fixture
def subscribed(dsn: str, new_queue: Queues) -> Callable[[str], str]:
    """subscribed("c") returns a queue with a consumer of this name."""

    def make(consumer: str) -> str:
        queue = new_queue()
        with pgque.connect(dsn) as client:
            client.subscribe(queue, consumer)
        return queue

    return make


def test_workers_run_inside_a_lifespan_and_finish_their_handlers_before_it_ends(
    dsn: str, subscribed: Callable[[str], str], tick: Tick
) -> None:
    queue, log = subscribed("w"), subscribed("c")
    with pgque.connect(dsn) as client:
        client.send(queue, "work")
        client.send(log, "event")
    events: list[str] = []

    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def make() -> tuple[pgque.AsyncWorker, pgque.AsyncConsumer, asyncio.Event, asyncio.Event]:
        worker = pgque.AsyncWorker(dsn, queue=queue, consumer="w")
        consumer = pgque.AsyncConsumer(dsn, queue=log, consumer="c")
        begun, goes_on = asyncio.Event(), asyncio.Event()

        @worker.handler("*")
        async def handle(message: pgque.Message) -> None:
            begun.set()
            await goes_on.wait()
            events.append(f"handled {message.payload}")

        @consumer.on("*")
        async def read(message: pgque.Message) -> None:
            events.append(f"read {message.payload}")

        return worker, consumer, begun, goes_on

    @asynccontextmanager
    async def around(app: str) -> AsyncIterator[dict[str, str]]:
        events.append(f"{app} begins")
        yield {"pool": "open"}
        events.append(f"{app} ends")

    async def go_on_after(worker: pgque.AsyncWorker, goes_on: asyncio.Event) -> None:
        while not worker._stopper.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        goes_on.set()

    async def serve() -> None:
        worker, consumer, begun, goes_on = make()
        before = handlers()
        async with pgque.asgi.lifespan(worker, lambda: consumer, around=around)("app") as state:
            tick(queue)
            tick(log)
            await begun.wait()
            while "read event" not in events:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (state["pool"], state["pgque"].problems()) == ("open", [])
            assert handlers() == before
            going_on = asyncio.create_task(go_on_after(worker, goes_on))
        await going_on

    asyncio.run(serve())
    assert events == ["app begins", "read event", "handled work", "app ends"]
    with pgque.connect(dsn) as client:
        assert client.messages.list(queue) == []


def test_a_worker_that_dies_is_logged_and_is_a_problem(
    dsn: str, subscribed: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    queue = subscribed("w")

    async def serve() -> None:
        good = pgque.AsyncWorker(dsn, queue=queue, consumer="w", worker="good")
        bad = pgque.AsyncWorker(dsn, queue=queue, consumer="nobody", worker="bad")
        for worker in (good, bad):
            worker.handler("*")(_nothing)
        async with pgque.asgi.running(good, bad) as running:
            while not running.problems():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            [problem] = running.problems()
            assert problem.startswith(f"worker bad of queue {queue} ended: ")
            assert "nobody" in problem
            good.stop()
            while len(running.problems()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert running.problems()[0] == f"worker good of queue {queue} was stopped"

    with caplog.at_level(logging.ERROR, "pgque.asgi"):
        asyncio.run(serve())
    logged = [record for record in caplog.records if record.name == "pgque.asgi"]
    assert ["bad" in record.message for record in logged] == [True, False]
    assert all(record.message.endswith("; the application goes on without it") for record in logged)
    assert logged[0].exc_info is not None


async def _nothing(message: pgque.Message) -> None:
    pass


def test_an_application_that_starts_again_needs_a_function_that_makes_its_worker(
    dsn: str, subscribed: Callable[[str], str]
) -> None:
    queue = subscribed("w")

    def make() -> pgque.AsyncWorker:
        worker = pgque.AsyncWorker(dsn, queue=queue, consumer="w")
        worker.handler("*")(_nothing)
        return worker

    async def start(lifespan: Any) -> None:
        async with lifespan(None) as state:
            assert state["pgque"].problems() == []

    again = pgque.asgi.lifespan(make)
    once = pgque.asgi.lifespan(make())
    asyncio.run(start(again))
    asyncio.run(start(again))
    asyncio.run(start(once))
    with pytest.raises(RuntimeError, match="was stopped, for good: pass a function"):
        asyncio.run(start(once))


def test_wrong_use_is_refused_when_the_application_starts(dsn: str) -> None:
    async def start(*workers: Any) -> None:
        async with pgque.asgi.running(*workers):
            raise AssertionError("it has started")

    worker = pgque.AsyncWorker(dsn, queue="q", consumer="c", worker="w")
    with pytest.raises(pgque.PgqueBadArgumentError, match="no handler"):
        asyncio.run(start(worker))
    for bad in (pgque.Worker(dsn, queue="q", consumer="c"), lambda: None, "worker"):
        with pytest.raises(TypeError, match=r"neither an AsyncWorker nor .*pgque work MODULE:WORKER"):
            asyncio.run(start(bad))
    twin = pgque.AsyncWorker(dsn, queue="q", consumer="c")
    twin.handler("*")(_nothing)
    with pytest.raises(ValueError, match="is given twice"):
        asyncio.run(start(twin, twin))


APP = """
import os

import psycopg
from starlette.applications import Starlette

import pgque.asgi

worker = pgque.AsyncWorker(queue=os.environ["QUEUE"], consumer="w")


@worker.handler("*")
async def handle(message):
    async with await psycopg.AsyncConnection.connect(autocommit=True) as conn:
        await conn.execute("select pg_advisory_lock_shared(hashtext(%s))", [message.queue])


app = Starlette(lifespan=pgque.asgi.lifespan(worker))
"""


def test_sigterm_to_uvicorn_lets_the_handlers_finish(
    dsn: str, subscribed: Callable[[str], str], tick: Tick, conn: psycopg.Connection, tmp_path: Path
) -> None:
    queue = subscribed("w")
    (tmp_path / "app.py").write_text(APP)
    conn.execute("select pg_advisory_lock(hashtext(%s))", [queue])
    with pgque.connect(dsn) as client:
        client.send(queue, "work")
    waiting = (
        "select 1 from pg_locks where locktype = 'advisory' and not granted and objid::int = hashtext(%s)"
    )
    uvicorn = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "app:app", "--port=0"],
        cwd=tmp_path,
        env={**environment(dsn, []), "QUEUE": queue},
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended(uvicorn) as server:
        assert server.stderr is not None
        while not conn.execute(waiting, [queue]).fetchone():
            tick(queue)
            assert server.poll() is None, server.stderr.read()
        os.kill(server.pid, signal.SIGTERM)
        while "Waiting for application shutdown" not in server.stderr.readline():
            assert server.poll() is None
        conn.execute("select pg_advisory_unlock(hashtext(%s))", [queue])
        assert "Application shutdown complete" in server.stderr.read()
        server.wait(20)
    with pgque.connect(dsn) as client:
        assert client.messages.list(queue) == []
