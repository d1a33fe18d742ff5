"""Tasks, batch handlers, time limits and cancelled messages: of Worker and Consumer, sync and async."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
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

    @functools.wraps(handle)
    async def handle_async(*given: Any) -> object:
        return await asyncio.to_thread(handle, *given)

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


# -- tasks ------------------------------------------------------------


@dataclass
class Order:
    id: int


def _wrong_payloads_are_refused_by_a_type_checker(conn: object) -> None:
    """Read by mypy, which is told about each error that it has to find."""
    worker = pgque.Worker(queue="q", consumer="c")
    twin = pgque.AsyncWorker(queue="q", consumer="c")

    @worker.task("of a model", retry_on=OSError, dead_on=(ValueError,), backoff=(1, 10), timeout=30)
    def of_model(order: Order) -> str:
        return str(order.id)

    @worker.task("of a message")
    def of_message(message: pgque.Message[Order], own: psycopg.Connection[object]) -> None: ...

    @twin.task("async")
    async def awaited(order: Order) -> int:
        return order.id

    @worker.task("of anything")
    def of_anything(message: pgque.Message) -> None: ...

    of_model.send(conn, Order(1), delay=60)
    of_message.send_many(conn, [Order(1)], delays=[60])
    of_anything.send(conn, {"id": 1})
    text: str = of_model(Order(1))
    number: int = asyncio.run(awaited(Order(1)))
    of_model.send(conn, {"id": text})  # type: ignore[arg-type]
    of_message.send(conn, number)  # type: ignore[arg-type]
    awaited.send(conn, "1")  # type: ignore[arg-type]
    awaited.send_many(conn, ["1"])  # type: ignore[list-item]
    of_model("1")  # type: ignore[arg-type]
    of_model.send(conn, Order(1), delay="soon")  # type: ignore[arg-type]
    of_model.send(conn, Order(1), type="other")  # type: ignore[call-arg]
    wrong: int = of_model(Order(1))  # type: ignore[assignment]
    print(wrong)

    @twin.task("not async")  # type: ignore[type-var, arg-type]
    def plain(order: Order) -> None: ...


@kinds
def test_a_task_sends_to_its_handler_in_the_transaction_of_the_caller(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, connect: Any, made: Made
) -> None:
    worker = made(dsn, queue=pool, consumer="c")
    seen: list[object] = []

    def handle(order: Order) -> float:
        seen.append(order)
        return 1 / order.id

    order = register(worker, worker.task("order", dead_on=ZeroDivisionError), handle)
    own = connect(autocommit=False)
    order.send(own, Order(1))
    own.rollback()
    order.send(own, Order(2), key="a", headers={"h": 1})
    order.send_many(own, [Order(0), Order(3)], partition_keys=["x", "y"])
    order.send(own, Order(4), delay=600)
    own.commit()

    async def send_async() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as other:
            await order.send_async(other, Order(5))
            await order.send_many_async(other, [Order(6)])

    asyncio.run(send_async())
    tick(pool)
    run(worker, until_idle=True)
    assert sorted(map(repr, seen)) == [f"Order(id={n})" for n in (0, 2, 3, 5, 6)]
    assert _reasons(client, pool) == {'{"id": 0}': "ZeroDivisionError: division by zero"}
    assert [message.status for message in client.list_messages(pool, "delayed")] == ["delayed"]
    called = order(Order(2))
    assert (asyncio.run(called) if _is_async(worker) else called) == 0.5


def _nothing(message: pgque.Message) -> None: ...


@pgque.Worker(queue="q", consumer="c").task("t")
def importable(message: pgque.Message) -> None: ...


def test_processes_find_a_task_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(importable)) is importable


def test_a_task_of_a_worker_with_several_queues_says_where_it_sends() -> None:
    worker = pgque.Worker(queues={"urgent": 5, "bulk": 1}, consumer="c")
    with pytest.raises(
        ValueError, match=r"a task needs a queue of its worker: queue=\.\.\., one of urgent, bulk"
    ):
        worker.task("t")
    with pytest.raises(ValueError, match="one of urgent, bulk"):
        worker.task("t", queue="other")
    task = worker.task("t", queue="bulk")(_nothing)
    assert (task.queue, task.type) == ("bulk", "t")


def test_the_type_of_a_task_cannot_be_another_one() -> None:
    worker: Any = pgque.Worker(queue="q", consumer="c")
    task = worker.task("t")(lambda message: None)
    with pytest.raises(pgque.PgqueBadArgument, match="sends messages of type 't' to queue q only"):
        task.send(None, 1, type="u")
    with pytest.raises(pgque.PgqueBadArgument, match="not an Event"):
        task.send(None, pgque.Event("u", 1))
    with pytest.raises(pgque.PgqueBadArgument):
        task.send_many(None, [pgque.Event("t", 1)])
    with pytest.raises(pgque.PgqueBadArgument):
        worker.task("*")
