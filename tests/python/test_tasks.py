"""Tasks, batch handlers, time limits and cancelled messages: of Worker and Consumer, sync and async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import pytest

import pgque
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]
Made = Callable[..., Any]

kinds = pytest.mark.parametrize(
    "made", [pgque.Worker, pgque.Consumer, pgque.AsyncWorker, pgque.AsyncConsumer]
)


@pytest.fixture
def client(conn: Connection) -> pgque.PgqueClient:
    return pgque.PgqueClient(conn)


@pytest.fixture
def pool(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c, whose messages are tried once."""
    client.subscribe(queue, "c")
    client.set_queue_config(queue, "max_retries", 0)
    return queue


def _is_async(worker: object) -> bool:
    return isinstance(worker, (pgque.AsyncWorker, pgque.AsyncConsumer))


def run(worker: Any, **options: Any) -> None:
    if _is_async(worker):
        asyncio.run(worker.run(**options))
    else:
        worker.run(**options)


def running(worker: Any) -> AbstractContextManager[threading.Thread]:
    return threads.running(lambda: run(worker), worker.stop, 20)


def register(worker: Any, decorate: Any, handle: Callable[..., object]) -> Any:
    """Register a function, or a coroutine function that runs it in a thread."""
    if not _is_async(worker):
        return decorate(handle)

    async def handle_async(given: Any, *more: Any) -> object:
        return await asyncio.to_thread(handle, given, *more)

    return decorate(handle_async)


def _send(client: pgque.PgqueClient, queue: str, tick: Tick, *payloads: str, type: str = "t") -> list[int]:
    sent = client.send_batch(queue, type, payloads)
    tick(queue)
    return sent


def _reasons(client: pgque.PgqueClient, queue: str) -> dict[str | None, str | None]:
    return {letter.ev_data: letter.dl_reason for letter in client.dlq_inspect(queue)}


# -- time limits ------------------------------------------------------------


@kinds
def test_the_time_limit_of_a_handler_wins_over_that_of_its_worker(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, made: Made
) -> None:
    release = threading.Event()
    worker = made(dsn, queue=pool, consumer="c", handler_timeout=0.2, concurrency=2)
    register(worker, worker.handler("short", timeout=0.1), lambda message: release.wait(20))
    register(worker, worker.handler("*"), lambda message: release.wait(20))
    register(worker, worker.handler("endless", timeout=float("inf")), lambda message: release.wait(20))
    for type in ("short", "endless", "other"):
        client.send(pool, type, type=type)
    tick(pool)
    with running(worker):
        wait_until(lambda: len(client.dlq_inspect(pool)) == 2)
        release.set()
        wait_until(lambda: len(client.list_messages(pool)) == 2)
    assert _reasons(client, pool) == {
        "short": "the handler ran longer than 0.1 s (timeout)",
        "other": "the handler ran longer than 0.2 s (handler_timeout)",
    }


def test_a_time_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout must be more than 0 seconds"):
        pgque.Worker(queue="q", consumer="c").handler("t", timeout=0)
