"""Tasks, batch handlers, time limits and cancelled messages: of Worker and Consumer, sync and async."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import pgque
from pgque import testing
from pgque.runtime.watch import Guard
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]
Made = Callable[..., Any]

kinds = pytest.mark.parametrize(
    "made", [pgque.Worker, pgque.Consumer, pgque.AsyncWorker, pgque.AsyncConsumer]
)


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
    return {letter.ev_data: letter.dl_reason for letter in client.dlq.inspect(queue)}


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
        wait_until(lambda: len(client.dlq.inspect(pool)) == 2)
        release.set()
        wait_until(lambda: len(client.messages.list(pool)) == 2)
    assert _reasons(client, pool) == {
        "short": "the handler ran longer than 0.1 s (timeout)",
        "other": "the handler ran longer than 0.2 s (handler_timeout)",
    }


def test_a_time_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout must be more than 0 seconds"):
        pgque.Worker(queue="q", consumer="c").handler("t", timeout=0)


@pytest.mark.parametrize("name", ["poll_interval", "shutdown_timeout", "visibility_timeout"])
def test_a_time_that_is_no_number_is_refused_and_not_found_out_at_work(name: str) -> None:
    options: dict[str, Any] = {name: float("nan")}
    with pytest.raises(ValueError, match=name):
        pgque.Worker(queue="q", consumer="c", **options)


def test_a_process_takes_a_time_limit_that_is_longer_than_any_clock() -> None:
    guard = Guard()
    guard.arm(timedelta.max.total_seconds())
    guard.disarm()


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
    assert [message.status for message in client.messages.list(pool, "delayed")] == ["delayed"]
    called = order(Order(2))
    assert (asyncio.run(called) if _is_async(worker) else called) == 0.5


def _nothing(message: pgque.Message) -> None: ...


@pgque.Worker(queue="q", consumer="c").task("t")
def importable(message: pgque.Message) -> None: ...


def test_processes_find_a_task_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(importable)) is importable  # noqa: S301


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
    with pytest.raises(pgque.PgqueBadArgumentError, match="sends messages of type 't' to queue q only"):
        task.send(None, 1, type="u")
    with pytest.raises(pgque.PgqueBadArgumentError, match="not an Event"):
        task.send(None, pgque.Event("u", 1))
    with pytest.raises(pgque.PgqueBadArgumentError):
        task.send_many(None, [pgque.Event("t", 1)])
    with pytest.raises(pgque.PgqueBadArgumentError):
        worker.task("*")


# -- batch handlers ------------------------------------------------------------


@pytest.fixture
def ledger(conn: Connection) -> Iterator[Callable[[], list[str]]]:
    conn.execute("create table batch_ledger (payload text)")
    yield lambda: [row[0] for row in conn.execute("select payload from batch_ledger order by 1")]
    conn.execute("drop table batch_ledger")


@kinds
def test_a_batch_handler_gets_the_messages_of_its_type_in_order_and_at_most_as_many_as_it_takes(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, made: Made
) -> None:
    worker = made(dsn, queue=pool, consumer="c", concurrency=1)
    calls: list[list[int]] = []
    others: list[object] = []
    register(worker, worker.handler("other"), lambda message: others.append(message.payload))

    def store(orders: list[Order]) -> None:
        calls.append([order.id for order in orders])

    register(worker, worker.batch_handler("*", size=150), store)
    for first in range(0, 400, 100):
        client.send_batch(pool, f"type {first % 200}", [Order(n) for n in range(first, first + 100)])
        client.send(pool, str(first), type="other")
    tick(pool)
    run(worker, until_idle=True)
    assert [n for call in calls for n in call] == list(range(400))
    assert max(map(len, calls)) <= 150 and len(calls) <= 4
    assert others == ["0", "100", "200", "300"]
    assert client.messages.list(pool) == []


@pytest.mark.parametrize("transactional", [False, True])
@kinds
def test_an_error_of_a_batch_handler_is_that_of_all_its_messages(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    ledger: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
    made: Made,
    transactional: bool,
) -> None:
    worker = made(dsn, queue=pool, consumer="c", transactional=transactional)
    client.admin.set_queue_config(pool, "max_retries", 5)

    def store(messages: list[pgque.Message], own: Any = None) -> None:
        if own is not None and not _is_async(worker):
            own.execute("insert into batch_ledger values ('rolled back')")
        raise {"retried": OSError, "given up": ValueError}[str(messages[0].type)]("no")

    options: dict[str, Any] = {"retry_on": OSError, "backoff": 600}
    register(worker, worker.batch_handler("retried", **options), store)
    register(worker, worker.batch_handler("given up", **options), store)
    _send(client, pool, tick, "a", "b", type="retried")
    _send(client, pool, tick, "alone", type="given up")
    run(worker, until_idle=True)
    _send(client, pool, tick, "c", "d", type="given up")  # it is not known whose error it is
    run(worker, until_idle=True)
    assert _reasons(client, pool) == {"alone": "ValueError: no"}
    retried: list[Any] = client.messages.list(pool, "retry")
    assert [(message.payload, message.last_error) for message in retried] == [
        ("a", "OSError: no"),
        ("b", "OSError: no"),
        ("c", "ValueError: no"),
        ("d", "ValueError: no"),
    ]
    assert all((it.available_at - it.created_at).total_seconds() > 590 for it in retried)
    assert ledger() == []
    assert sum("the other 1 messages of its batch" in line for line in caplog.messages) == 2


@pytest.mark.parametrize("transactional", [False, True])
@kinds
def test_a_batch_handler_may_give_single_messages_an_outcome_and_one_that_does_not_fit_fails_alone(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    made: Made,
    transactional: bool,
) -> None:
    client.admin.set_queue_config(pool, "max_retries", 5)
    worker = made(dsn, queue=pool, consumer="c", retry_after=600, transactional=transactional)
    reported: list[str] = []
    worker.error(lambda message, error: reported.append(type(error).__name__))

    def store(messages: list[pgque.Message[Order]], own: object = None) -> pgque.Outcomes:
        outcomes = pgque.Outcomes()
        for message in messages:
            if message.value.id == 1:
                outcomes[message.msg_id] = pgque.Dead("one")
            elif message.value.id == 2:
                outcomes[message.msg_id] = pgque.Retry(reason="two")
            elif message.value.id == 3:
                outcomes[message.msg_id] = ZeroDivisionError("three")
        return outcomes

    register(worker, worker.batch_handler("t", dead_on=ZeroDivisionError), store)
    client.send_batch(pool, "t", [*map(Order, range(5)), {"id": "bad"}])
    tick(pool)
    run(worker, until_idle=True)
    reasons = _reasons(client, pool)
    assert "does not fit Order" in str(reasons.pop('{"id": "bad"}'))
    assert reasons == {'{"id": 1}': "one", '{"id": 3}': "ZeroDivisionError: three"}
    assert [message.last_error for message in client.messages.list(pool, "retry")] == ["two"]
    assert sorted(reported) == ["PgquePayloadError", "ZeroDivisionError"]


@pytest.mark.parametrize("made", [pgque.Worker, pgque.Consumer])
def test_the_rows_of_a_transactional_batch_handler_are_committed_once_with_the_acks_though_connections_are_lost(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    ledger: Callable[[], list[str]],
    made: Made,
) -> None:
    worker = made(
        f"{dsn} application_name=victim", queue=pool, consumer="c", transactional=True, concurrency=1
    )
    calls = 0

    def store(messages: list[pgque.Message], own: psycopg.Connection[object]) -> None:
        nonlocal calls
        calls += 1
        with own.cursor() as cursor:
            cursor.executemany(
                "insert into batch_ledger values (%s)", [(message.payload,) for message in messages]
            )
        if calls in (2, 4):
            with psycopg.connect(dsn, autocommit=True) as other:
                other.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'victim'"
                )

    register(worker, worker.batch_handler("t", size=20), store)
    sent = sorted(str(n) for n in range(100))
    _send(client, pool, tick, *sent)
    with running(worker):
        wait_until(lambda: client.messages.list(pool) == [], timeout=30)
    assert ledger() == sent
    assert calls > 5


def test_what_an_async_transactional_batch_handler_writes_is_committed_with_its_acks(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, ledger: Callable[[], list[str]]
) -> None:
    worker = pgque.AsyncConsumer(dsn, queue=pool, consumer="c", transactional=True)

    @worker.batch_handler("t")
    async def store(messages: list[pgque.Message], own: psycopg.AsyncConnection[object]) -> None:
        for message in messages:
            await own.execute("insert into batch_ledger values (%s)", [message.payload])

    _send(client, pool, tick, "a", "b")
    asyncio.run(worker.run(until_idle=True))
    assert ledger() == ["a", "b"] and client.messages.list(pool) == []


@kinds
def test_a_batch_handler_beyond_its_time_is_rejected_with_all_its_messages(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, made: Made
) -> None:
    release = threading.Event()
    worker = made(dsn, queue=pool, consumer="c", concurrency=1)
    register(worker, worker.batch_handler("t", timeout=0.1), lambda messages: release.wait(20))
    _send(client, pool, tick, "a", "b")
    with running(worker):
        wait_until(lambda: len(client.dlq.inspect(pool)) == 2)
        release.set()
    assert set(_reasons(client, pool).values()) == {"the handler ran longer than 0.1 s (timeout)"}


@pytest.mark.parametrize("made", [pgque.Worker, pgque.AsyncWorker])
def test_batches_are_handled_side_by_side(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, made: Made
) -> None:
    together = threading.Barrier(3, timeout=20)
    worker = made(dsn, queue=pool, consumer="c", concurrency=3)
    sizes: list[int] = []

    def store(messages: list[pgque.Message]) -> None:
        sizes.append(len(messages))
        together.wait()

    register(worker, worker.batch_handler("t", size=120), store)
    _send(client, pool, tick, *map(str, range(360)))
    run(worker, until_idle=True)
    assert sum(sizes) == 360 and len(sizes) == 3
    assert client.messages.list(pool) == []  # and no letter of a handler that waited in vain


def test_what_cannot_be_a_batch_handler_is_refused() -> None:
    worker: Any = pgque.Worker(queue="q", consumer="c")

    def of_one(message: Order) -> None: ...

    with pytest.raises(TypeError, match=r"such as list\[Message\]"):
        worker.batch_handler("t")(of_one)

    def of_many(messages: list[pgque.Message]) -> None: ...

    with pytest.raises(TypeError, match="batch_handler gets lists"):
        worker.handler("t")(of_many)
    with pytest.raises(TypeError, match="called with the list of messages"):
        worker.batch_handler("t")(lambda: None)
    with pytest.raises(ValueError, match="size"):
        worker.batch_handler("t", size=0)
    with pytest.raises(ValueError, match="whole number"):
        worker.batch_handler("t", size=2.5)


# -- cancelled messages ------------------------------------------------------------


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("beside", [0, 1])
def test_the_task_of_a_cancelled_message_is_cancelled_at_the_next_extension(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
    transactional: bool,
    beside: int,
) -> None:
    """Also if others of its batch are not."""
    worker = pgque.AsyncWorker(
        dsn,
        queue=pool,
        consumer="c",
        visibility_timeout=1,
        concurrency=1 + beside,
        transactional=transactional,
    )
    began: list[int] = []
    ended: list[int] = []
    release = threading.Event()

    @worker.handler("*")
    async def handle(message: pgque.Message, own: object = None) -> None:
        began.append(message.msg_id)
        try:
            await asyncio.to_thread(release.wait, 20)
        except asyncio.CancelledError:
            ended.append(message.msg_id)
            raise

    first, *others = _send(client, pool, tick, *"ab"[: 1 + beside])
    with running(worker):
        wait_until(lambda: len(began) == 1 + beside)
        assert client.cancel(pool, first) == "processing"
        wait_until(lambda: ended == [first])
        release.set()
        wait_until(lambda: client.messages.list(pool) == [])
    assert ended == [first] and began.count(first) == 1
    assert set(others) <= set(began)
    [line] = [line for line in caplog.messages if "was cancelled, or ended" in line]
    assert f"message {first}" in line and line.endswith("its task is cancelled")


def test_the_thread_of_a_cancelled_message_goes_on_and_its_outcome_does_not_count(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = pgque.Worker(dsn, queue=pool, consumer="c", visibility_timeout=1, concurrency=1)
    release = threading.Event()
    seen: list[str | None] = []

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        if message.payload == "cancelled":
            release.wait(20)
        seen.append(message.payload)
        raise RuntimeError("would be a dead letter")

    [sent] = _send(client, pool, tick, "cancelled")
    with running(worker):
        wait_until(lambda: [it.status for it in client.messages.list(pool)] == ["processing"])
        client.cancel(pool, sent)
        wait_until(lambda: "its thread cannot be cancelled and goes on" in caplog.text)
        _send(client, pool, tick, "next")
        wait_until(lambda: seen == ["next"])
        release.set()
        wait_until(lambda: seen == ["next", "cancelled"])
    assert list(_reasons(client, pool)) == ["next"]


def test_a_message_that_is_cancelled_as_its_handler_returns_is_not_handled_again(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    ledger: Callable[[], list[str]],
) -> None:
    """And the next one, which the worker is at when it learns that, is not left until its lease expires."""
    release = threading.Event()
    is_next, is_known = threading.Event(), threading.Event()
    calls: list[str | None] = []

    class Asking(pgque.Worker):
        def _has_message(self, *asked: Any) -> bool:
            found = super()._has_message(*asked)
            if not found:
                release.set()
                is_next.wait(20)
            return found

        def _leave(self, *left: Any) -> None:
            super()._leave(*left)
            is_known.set()

    worker = Asking(
        dsn,
        queue=pool,
        consumer="c",
        transactional=True,
        concurrency=1,
        visibility_timeout=1,
        min_interval=0.01,
    )

    @worker.handler("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        calls.append(message.payload)
        if message.payload == "cancelled":
            release.wait(20)
        elif not is_known.is_set():
            is_next.set()
            is_known.wait(20)
        own.execute("insert into batch_ledger values (%s)", [message.payload])

    first, *_ = _send(client, pool, tick, "cancelled", "next", "last")
    with running(worker):
        wait_until(lambda: calls == ["cancelled"])
        client.cancel(pool, first)
        wait_until(lambda: client.messages.list(pool) == [])
    assert calls == ["cancelled", "next", "next", "last"]
    assert ledger() == ["last", "next"]


def test_a_batch_handler_goes_on_for_the_messages_that_were_not_cancelled(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    worker = pgque.Worker(dsn, queue=pool, consumer="c", visibility_timeout=1)
    calls: list[list[str | None]] = []
    release = threading.Event()

    @worker.batch_handler("*")
    def handle(messages: list[pgque.Message]) -> None:
        calls.append([message.payload for message in messages])
        release.wait(20)

    [first, _] = _send(client, pool, tick, "a", "b")
    with running(worker):
        wait_until(lambda: calls)
        client.cancel(pool, first)
        [until] = [it.lease_until for it in client.consumers.list_workers(pool)]
        wait_until(lambda: [it.lease_until for it in client.consumers.list_workers(pool)] > [until])
        release.set()
        wait_until(lambda: client.messages.list(pool) == [])
    assert calls == [["a", "b"]]


# -- without a server ------------------------------------------------------------


def test_a_handler_is_called_without_a_server_and_its_outcome_is_that_of_its_worker() -> None:
    worker = pgque.Worker(queue="q", consumer="c", archive=True)
    seen: list[object] = []
    worker.before(lambda message: seen.append(message.headers))

    @worker.handler("order", retry_on=OSError, backoff=(1, 10))
    def order(message: pgque.Message[Order]) -> object:
        seen.append((message.value, message.type, message.key))
        if message.value.id == 0:
            raise ConnectionError("away")
        if message.value.id == 1:
            raise ValueError("wrong")
        return pgque.Retry(reason="later") if message.value.id == 2 else None

    def call(payload: object, **options: Any) -> tuple[str, object, object]:
        outcome = testing.call(order, payload, worker=worker, **options)
        return outcome.action, outcome.retry_after, outcome.reason

    assert call(Order(3), key="k", headers={"h": [1]}) == ("archive", None, None)
    assert seen == [{"h": [1]}, (Order(3), "order", "k")]
    assert call({"id": 0}) == ("nack", timedelta(seconds=1), "ConnectionError: away")
    assert call({"id": 0}, retry_count=7) == ("nack", timedelta(seconds=10), "ConnectionError: away")
    assert call({"id": 1}) == ("dead", None, "ValueError: wrong")
    assert call({"id": 2}) == ("nack", timedelta(seconds=1), "later")
    action, _, reason = call("not JSON")
    assert action == "dead" and "does not fit Order" in str(reason)


def test_tasks_coroutine_functions_and_plain_functions_are_called_without_a_server() -> None:
    worker = pgque.AsyncWorker(queue="q", consumer="c")

    @worker.task("t", dead_on=ValueError)
    async def task(order: Order) -> None:
        await asyncio.sleep(0)
        raise ValueError(order.id)

    assert testing.call(task, Order(7)).reason == "ValueError: 7"

    async def inside() -> str:
        return (await testing.call_async(task, {"id": 8})).action

    assert asyncio.run(inside()) == "dead"

    def plain(message: pgque.Message) -> object:
        return pgque.Release if message.payload_bytes == b"\0" else None

    assert testing.call(plain, b"\0").action == "release"
    assert testing.call(plain, "text").action == "ack"


def test_a_batch_handler_is_called_without_a_server() -> None:
    worker = pgque.Consumer(queue="q", consumer="c", transactional=True)

    @worker.batch_handler("t")
    def store(messages: list[pgque.Message[Order]], conn: Any) -> pgque.Outcomes:
        conn.extend(message.value.id for message in messages)
        return pgque.Outcomes({messages[-1].msg_id: pgque.Dead("last")})

    written: list[int] = []
    outcomes = testing.call(store, payloads=[Order(1), {}, Order(2)], worker=worker, conn=written)
    assert [outcome.action for outcome in outcomes] == ["ack", "dead", "dead"]
    assert outcomes[2].reason == "last" and written == [1, 2]
    call: Any = testing.call
    cases: list[tuple[str, dict[str, Any]]] = [
        ("needs conn", {"payloads": [1]}),
        ("pass payloads", {"payload": 1, "conn": written}),
        ("goes to", {"payloads": [1], "conn": written, "type": "other"}),
    ]
    for wrong, options in cases:
        with pytest.raises(pgque.PgqueBadArgumentError, match=wrong):
            call(store, worker=worker, **options)
    with pytest.raises(pgque.PgqueBadArgumentError, match="no handler"):
        testing.call(print, 1, worker=worker, conn=written)


@pytest.mark.parametrize("made", [pgque.Worker, pgque.AsyncWorker])
def test_a_hook_that_ends_one_message_of_a_batch_ends_no_other(made: Made) -> None:
    worker = made(queue="q", consumer="c")
    handled: list[str | None] = []
    told: list[tuple[str | None, str]] = []

    def check(message: pgque.Message) -> None:
        if message.payload == "closed":
            raise pgque.Dead("closed")
        if message.payload == "broken":
            raise ValueError("broken")

    register(worker, worker.before, check)
    register(worker, worker.after, lambda message, returned: told.append((message.payload, repr(returned))))
    register(worker, worker.error, lambda message, error: told.append((message.payload, repr(error))))

    def store(messages: list[pgque.Message]) -> pgque.Outcomes:
        handled.extend(message.payload for message in messages)
        return pgque.Outcomes({messages[-1].msg_id: pgque.Retry(reason="later")})

    batch = register(worker, worker.batch_handler("t"), store)
    outcomes = testing.call(batch, payloads=["a", "closed", "broken", "b"], worker=worker)
    assert [(outcome.action, outcome.reason) for outcome in outcomes] == [
        ("ack", None),
        ("dead", "closed"),
        ("nack", "ValueError: broken"),
        ("nack", "later"),
    ]
    assert handled == ["a", "b"]
    assert told == [
        ("a", "None"),
        ("closed", "Dead('closed')"),
        ("broken", "ValueError('broken')"),
        ("b", "Retry('later')"),
    ]
    assert [each.action for each in testing.call(batch, payloads=["closed"], worker=worker)] == ["dead"]


@dataclass
class Checked:
    id: int

    def __post_init__(self) -> None:
        {1: "one"}[self.id]


@pytest.mark.parametrize("made", [pgque.Worker, pgque.AsyncWorker])
def test_a_model_that_raises_an_error_of_its_own_fails_for_its_message_alone(made: Made) -> None:
    worker = made(queue="q", consumer="c")

    def store(orders: list[Checked]) -> None:
        assert orders == [Checked(1)]

    batch = register(worker, worker.batch_handler("t", dead_on=KeyError), store)
    outcomes = testing.call(batch, payloads=[{"id": 2}, {"id": 1}], worker=worker)
    assert [(outcome.action, outcome.reason) for outcome in outcomes] == [
        ("dead", "KeyError: 2"),
        ("ack", None),
    ]


@pytest.mark.parametrize(
    ("outcomes", "problem"),
    [
        (lambda msg_id: pgque.Outcomes({msg_id + 7: pgque.Dead()}), "it did not get: {8}"),
        (lambda msg_id: {msg_id: pgque.Dead()}, "outcomes in a dict"),
        (lambda msg_id: [ValueError()], "outcomes in a list"),
    ],
)
def test_outcomes_of_a_batch_that_would_be_ignored_are_an_error(
    outcomes: Callable[[int], object], problem: str
) -> None:
    """Also beside a message that does not fit."""
    worker = pgque.Worker(queue="q", consumer="c")

    @worker.batch_handler("t")
    def store(messages: list[pgque.Message[Order]]) -> object:
        return outcomes(messages[0].msg_id)

    for payloads in ([Order(1)], [Order(1), {}]):
        for outcome in testing.call(store, payloads=payloads, worker=worker):
            assert outcome.action == "nack" and problem in str(outcome.reason)


@pytest.mark.parametrize("made", [pgque.Worker, pgque.Consumer])
@pytest.mark.parametrize("bad", ["not JSON", "0"])
def test_a_message_that_fails_its_batch_again_and_again_is_alone_in_the_end(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, made: Made, bad: str
) -> None:
    """Whether its payload is bad or the handler raises."""
    client.admin.set_queue_config(pool, "max_retries", 3)
    worker = made(dsn, queue=pool, consumer="c", retry_after=0, concurrency=1)
    calls: list[int] = []
    handled: list[int] = []

    def store(messages: list[pgque.Message]) -> None:
        calls.append(len(messages))
        handled.extend([len(messages) // message.value for message in messages])

    worker.batch_handler("t", size=100, retry_on=OSError)(store)
    _send(client, pool, tick, *["1"] * 30, bad, *["1"] * 9)
    for _ in range(4):
        run(worker, until_idle=True)
        client.consumers.retry_now(pool, "c")
        client.force_next_tick(pool)
        tick(pool)
    assert list(_reasons(client, pool)) == [bad]
    assert len(handled) == 39
    assert calls[0] == 40 and max(calls[1:]) <= 4 and set(calls[11:]) == {1}


@pytest.mark.parametrize("made", [pgque.AsyncWorker, pgque.AsyncConsumer])
def test_one_object_runs_again_in_another_event_loop(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, made: Made
) -> None:
    worker = made(dsn, queue=pool, consumer="c")

    async def handle(message: pgque.Message) -> None:
        await asyncio.sleep(0.2)  # the session waits meanwhile

    worker.handler("*")(handle)
    for payload in "ab":
        _send(client, pool, tick, payload)
        asyncio.run(worker.run(until_idle=True))
    assert client.messages.list(pool) == []
