"""Worker(queues=…): several queues by weight or in strict order, over one connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import psycopg
import pytest

import pgque
from pgque.runtime import workers as workers_async
from pgque.twins import workers
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def queues(client: pgque.PgqueClient, new_queue: Callable[[], str]) -> list[str]:
    """The names of three queues with the consumer c."""
    names = [new_queue() for _ in range(3)]
    for name in names:
        client.subscribe(name, "c")
    return names


class Runner:
    """A worker of either kind, whose handler records the queue of each message."""

    def __init__(self, twin: str, dsn: str, **options: Any) -> None:
        self.seen: list[str] = []
        self.hold: dict[str, threading.Event] = {}
        self._is_async = twin == "async"
        made: Any = pgque.AsyncWorker if self._is_async else pgque.Worker
        self.worker = made(dsn, consumer="c", **options)
        self.worker.handler("*")(self._handle_async if self._is_async else self._handle)

    def _handle(self, message: pgque.Message) -> None:
        self.seen.append(str(message.queue))
        if message.payload in self.hold:
            assert self.hold[message.payload].wait(20)

    async def _handle_async(self, message: pgque.Message) -> None:
        await asyncio.to_thread(self._handle, message)

    def run(self) -> None:
        if self._is_async:
            asyncio.run(self.worker.run())
        else:
            self.worker.run()

    def running(self) -> AbstractContextManager[threading.Thread]:
        return threads.running(self.run, self.worker.stop, 20)


@pytest.fixture(params=["sync", "async"])
def twin(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _send(client: pgque.PgqueClient, tick: Tick, queue: str, count: int) -> None:
    client.send_batch(queue, "t", ["x"] * count)
    tick(queue)


def test_messages_of_all_queues_are_handled_over_one_connection(
    dsn: str,
    client: pgque.PgqueClient,
    conn: Connection,
    queues: list[str],
    tick: Tick,
    wait_until: Wait,
    twin: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (workers, workers_async):
        monkeypatch.setattr(module, "_POLL_INTERVAL", 3600.0)  # what comes later comes by notification
    runner = Runner(twin, f"{dsn} application_name=many", queues=dict.fromkeys(queues, 1))
    for queue in queues:
        _send(client, tick, queue, 3)
    with runner.running():
        wait_until(lambda: sorted(runner.seen) == sorted(queues * 3))
        for queue in reversed(queues):
            _send(client, tick, queue, 1)
            wait_until(lambda queue=queue: runner.seen.count(queue) == 4)
        [(count,)] = conn.execute(
            "select count(*) from pg_stat_activity where application_name = 'many'"
        ).fetchall()
        assert count == 1
        wait_until(lambda: not client.consumers.list_workers(consumer="c"))
    assert sorted(runner.seen) == sorted(queues * 4)


def test_messages_of_a_backlog_are_shared_by_the_weights(
    dsn: str, client: pgque.PgqueClient, queues: list[str], tick: Tick, wait_until: Wait, twin: str
) -> None:
    weights = dict(zip(queues, (5, 2, 1), strict=True))
    runner = Runner(twin, dsn, queues=weights, concurrency=1, prefetch=4)
    for queue in queues:
        _send(client, tick, queue, 400)
    with runner.running():
        wait_until(lambda: len(runner.seen) >= 400, timeout=30)
    for queue, weight in weights.items():
        assert abs(runner.seen[:400].count(queue) - 400 * weight / 8) < 20


def test_a_queue_without_messages_is_not_made_up_for_later(
    dsn: str, client: pgque.PgqueClient, queues: list[str], tick: Tick, wait_until: Wait, twin: str
) -> None:
    first, second, _ = queues
    runner = Runner(twin, dsn, queues={first: 1, second: 1}, concurrency=1, prefetch=2)
    _send(client, tick, first, 200)
    with runner.running():
        wait_until(lambda: len(runner.seen) == 200)
        for queue in (first, second):
            _send(client, tick, queue, 100)
        wait_until(lambda: len(runner.seen) == 400)
    assert 20 < runner.seen[200:280].count(first) < 60


def test_in_strict_order_a_queue_waits_until_those_before_it_are_empty(
    dsn: str, client: pgque.PgqueClient, queues: list[str], tick: Tick, wait_until: Wait, twin: str
) -> None:
    urgent, normal, bulk = queues
    weights = {bulk: 1, urgent: 3, normal: 2}
    runner = Runner(twin, dsn, queues=weights, priority="strict", concurrency=1, prefetch=2)
    runner.hold["hold"] = threading.Event()
    for queue in queues:
        _send(client, tick, queue, 20)
    client.send(bulk, "hold", type="t")
    tick(bulk)
    _send(client, tick, bulk, 20)
    with runner.running():
        wait_until(lambda: len(runner.seen) == 61, "the handler waits")
        assert runner.seen == [urgent] * 20 + [normal] * 20 + [bulk] * 21
        _send(client, tick, urgent, 10)
        runner.hold["hold"].set()
        wait_until(lambda: len(runner.seen) == 91)
    # What was received already goes first.
    assert runner.seen[63:73].count(urgent) >= 8


def test_in_strict_order_queues_of_equal_weight_take_turns(
    dsn: str, client: pgque.PgqueClient, queues: list[str], tick: Tick, wait_until: Wait, twin: str
) -> None:
    bulk, *equals = queues
    weights = {bulk: 1, **dict.fromkeys(equals, 2)}
    runner = Runner(twin, dsn, queues=weights, priority="strict", concurrency=1, prefetch=2)
    for queue in queues:
        _send(client, tick, queue, 20)
    with runner.running():
        wait_until(lambda: len(runner.seen) == 60)
    assert runner.seen[40:] == [bulk] * 20
    assert 5 < runner.seen[:20].count(equals[0]) < 15


def test_a_queue_that_was_renamed_is_notified_under_its_new_name(
    dsn: str,
    client: pgque.PgqueClient,
    conn: Connection,
    queue: str,
    tick: Tick,
    wait_until: Wait,
    twin: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (workers, workers_async):
        monkeypatch.setattr(module, "_POLL_INTERVAL", 3600.0)  # what comes later comes by notification
    client.subscribe(queue, "c")
    row = conn.execute("select queue_uid::text from pgque.get_queue_info(%s)", [queue]).fetchone()
    assert row is not None
    runner = Runner(twin, dsn, queue=row[0], concurrency=1)
    runner.hold["hold"] = threading.Event()
    client.send(queue, "hold")
    tick(queue)
    name = f"{queue} renamed"
    with runner.running():
        wait_until(lambda: runner.seen == [queue], "the handler waits")
        client.admin.rename_queue(queue, name)
        _send(client, tick, name, 1)
        runner.hold["hold"].set()
        wait_until(lambda: len(runner.seen) == 2)
        wait_until(lambda: not client.consumers.list_workers(consumer="c"))
        _send(client, tick, name, 1)
        wait_until(lambda: len(runner.seen) == 3)
    client.admin.rename_queue(name, queue)  # which is dropped after the test
    assert runner.seen == [queue, name, name]


def test_a_queue_that_is_not_there_is_named(dsn: str, queues: list[str], twin: str) -> None:
    runner = Runner(twin, dsn, queues={queues[0]: 1, "no such queue": 1})
    with pytest.raises(pgque.PgqueQueueNotFoundError, match="no such queue"):
        runner.run()


def test_a_queue_that_is_dropped_ends_the_worker_and_is_named(
    dsn: str, client: pgque.PgqueClient, queues: list[str], tick: Tick, wait_until: Wait, twin: str
) -> None:
    runner = Runner(twin, dsn, queues=dict.fromkeys(queues, 1))
    failed: list[BaseException] = []

    def run() -> None:
        try:
            runner.run()
        except pgque.PgqueError as error:
            failed.append(error)

    _send(client, tick, queues[0], 1)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: runner.seen == [queues[0]])
        client.admin.drop_queue(queues[1], force=True)
        wait_until(lambda: failed)
    finally:
        runner.worker.stop()
        thread.join(20)
    # The second, where the queue is dropped while the worker receives from it.
    assert isinstance(failed[0], pgque.PgqueQueueNotFoundError | pgque.PgqueConsumerNotFoundError)
    assert failed[0].queue == queues[1]


def test_a_queue_that_is_dropped_leaves_the_handlers_of_others_the_time_to_finish(
    dsn: str,
    client: pgque.PgqueClient,
    queues: list[str],
    tick: Tick,
    wait_until: Wait,
    twin: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = Runner(twin, dsn, queues=dict.fromkeys(queues, 1), concurrency=2)
    runner.hold["hold"] = threading.Event()
    client.send(queues[0], "hold")
    tick(queues[0])
    with pytest.raises(pgque.PgqueQueueNotFoundError), runner.running() as thread:
        wait_until(lambda: runner.seen == [queues[0]], "the handler waits")
        client.admin.drop_queue(queues[1], force=True)
        wait_until(lambda: "finishes its running handlers" in caplog.text or not thread.is_alive())
        runner.hold["hold"].set()
        wait_until(lambda: not thread.is_alive())
    assert client.messages.list(queues[0]) == []


def test_a_consumer_that_is_not_subscribed_to_one_of_the_queues_is_refused(
    dsn: str, client: pgque.PgqueClient, queues: list[str], twin: str
) -> None:
    client.unsubscribe(queues[2], "c")
    with pytest.raises(pgque.PgqueConsumerNotFoundError, match=queues[2]):
        Runner(twin, dsn, queues=dict.fromkeys(queues, 1)).run()


@pytest.mark.parametrize("cls", [pgque.Worker, pgque.AsyncWorker])
@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({}, TypeError, "needs queue="),
        ({"queue": "a", "queues": {"a": 1}}, TypeError, "not both"),
        ({"queues": ["a", "b"]}, TypeError, "a mapping of names to weights"),
        ({"queues": {}}, ValueError, "at least one"),
        ({"queues": {"a": 0}}, ValueError, "the weight of queue a must be a number above 0"),
        ({"queues": {"a": True}}, ValueError, "the weight of queue a"),
        ({"queues": {"a": float("inf")}}, ValueError, "the weight of queue a"),
        ({"queues": {"a": "5"}}, ValueError, "the weight of queue a"),
        ({"queues": {"a": 1}, "priority": "first"}, ValueError, "'weighted' or 'strict'"),
    ],
)
def test_wrong_queues_are_refused(cls: Any, options: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        cls(consumer="c", **options)
