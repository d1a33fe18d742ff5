"""Worker: handlers, outcomes, leases, faults, stopping."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgque
from pgque.runtime import concurrency as _concurrency
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def pool(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    return queue


def running(worker: pgque.Worker) -> AbstractContextManager[threading.Thread]:
    """Run a worker in a thread, and stop it at the end."""
    return threads.running(worker.run, worker.stop, 20)


def _send(client: pgque.PgqueClient, queue: str, tick: Tick, *payloads: str) -> list[int]:
    ids = client.send_batch(queue, "t", payloads)
    tick(queue)
    return ids


def _left(client: pgque.PgqueClient, queue: str) -> list[str | None]:
    """Return what another worker gets now."""
    found: list[str | None] = []
    while batch := client.receive(queue, "c", worker="other", visibility_timeout=60):
        found += [message.payload for message in batch]
    return found


def _held(client: pgque.PgqueClient, queue: str) -> int:
    return sum(worker.messages for worker in client.consumers.list_workers(queue, "c"))


def test_messages_go_to_the_handler_of_their_type_and_are_acked(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    seen: list[tuple[str, object]] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c")

    @worker.handler("created")
    def on_created(message: pgque.Message) -> None:
        seen.append(("created", message.json()))

    @worker.handler("*")
    def on_other(message: pgque.Message) -> None:
        seen.append((f"other {message.type}", message.payload))

    client.send(pool, {"id": 1}, type="created")
    client.send(pool, "x", type="deleted")
    tick(pool)
    with running(worker):
        wait_until(lambda: len(seen) == 2 and _held(client, pool) == 0)
    assert sorted(seen, key=str) == [("created", {"id": 1}), ("other deleted", "x")]
    assert _left(client, pool) == []


def test_every_message_of_a_backlog_is_handled_once(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    ids: list[int] = []
    for _ in range(5):
        ids += _send(client, pool, tick, *(str(n) for n in range(200)))
    seen: list[int] = []
    workers = [pgque.Worker(dsn, queue=pool, consumer="c", concurrency=n, prefetch=50) for n in (1, 4)]
    for worker in workers:
        worker.handler("*")(lambda message: seen.append(message.msg_id))
    with running(workers[0]), running(workers[1]):
        wait_until(lambda: len(seen) >= 1000 and _held(client, pool) == 0, timeout=30)
    assert sorted(seen) == ids
    assert _left(client, pool) == []


def test_handlers_run_at_a_time_as_many_as_asked_for(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    _send(client, pool, tick, *"abcdefgh")
    together = threading.Barrier(4)
    seen: list[str | None] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=4)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        together.wait(10)
        seen.append(message.payload)

    with running(worker):
        wait_until(lambda: len(seen) == 8)


@pytest.mark.parametrize(("prefetch", "most"), [(10, 10), (None, 100)])
def test_quick_messages_are_received_before_a_handler_is_free_but_never_more_than_prefetch(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    prefetch: int | None,
    most: int,
) -> None:
    release = threading.Event()
    seen: list[str | None] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=1, prefetch=prefetch)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        if message.payload == "hold":
            assert release.wait(20)

    _send(client, pool, tick, *["quick"] * 6 * most, "hold")
    with running(worker):
        wait_until(lambda: "hold" in seen)
        _send(client, pool, tick, *["later"] * 3 * most)
        wait_until(lambda: _held(client, pool) == most)
        release.set()
        wait_until(lambda: len(seen) == 9 * most + 1 and _held(client, pool) == 0)


def test_a_worker_whose_handlers_are_not_quick_leaves_the_rest_to_others(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    _send(client, pool, tick, *["x"] * 50)
    begun: list[int] = []
    may_end = threading.Semaphore(0)
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=4)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        begun.append(message.msg_id)
        assert may_end.acquire(timeout=20)

    with running(worker):
        wait_until(lambda: len(begun) == 4)
        time.sleep(0.25)  # so that the batch is not a quick one
        assert _held(client, pool) == 4
        may_end.release()
        wait_until(lambda: len(begun) == 5)
        wait_until(lambda: _held(client, pool) <= 7)
        assert len(client.receive(pool, "c", 100, worker="another")) == 50 - 4 - 4
        may_end.release(50)
        wait_until(lambda: len(begun) == 8)


@pytest.mark.parametrize("named_by", ["name", "uid"])
def test_a_new_message_is_handled_long_before_the_next_poll(
    dsn: str,
    client: pgque.PgqueClient,
    conn: Connection,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    named_by: str,
) -> None:
    taken: list[float] = []
    info = conn.execute("select queue_uid::text from pgque.get_queue_info(%s)", [pool]).fetchone()
    assert info is not None
    worker = pgque.Worker(dsn, queue=pool if named_by == "name" else info[0], consumer="c")
    worker.handler("*")(lambda message: taken.append(time.monotonic()))
    delays = []
    with running(worker):
        for n in range(1, 11):
            client.send(pool, "x")
            began = time.monotonic()
            tick(pool)
            wait_until(lambda n=n: len(taken) == n)
            delays.append(taken[-1] - began)
            wait_until(lambda: _held(client, pool) == 0)
    assert sorted(delays)[5] < 0.3


def test_an_exception_gives_the_message_back_with_its_text(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    seen: list[tuple[str | None, int | None, int | None, str | None]] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", retry_after=0, concurrency=1)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append((message.payload, message.receive_count, message.retry_count, message.last_error))
        if message.payload == "bad" and message.receive_count == 1:
            raise RuntimeError("try me again")
        if message.payload == "exit" and message.receive_count == 1:
            sys.exit(3)

    _send(client, pool, tick, "good", "bad", "exit")
    with running(worker):
        wait_until(lambda: len(seen) == 5 and _held(client, pool) == 0)
    assert seen[:3] == [("good", 1, 0, None), ("bad", 1, 0, None), ("exit", 1, 0, None)]
    assert sorted(seen[3:], key=str) == [
        ("bad", 2, 1, "RuntimeError: try me again"),
        ("exit", 2, 1, "SystemExit: 3"),
    ]
    assert _left(client, pool) == []


def test_the_text_of_an_error_is_made_storable_and_cut(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    client.admin.set_queue_config(pool, "max_receive_attempts", 1)
    worker = pgque.Worker(dsn, queue=pool, consumer="c")

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        raise ValueError("nul \x00, surrogate \ud800, long " + "x" * 100_000)

    _send(client, pool, tick, "x")
    with running(worker):
        wait_until(lambda: bool(client.dlq.inspect(pool)))
    [letter] = client.dlq.inspect(pool)
    reason = letter.dl_reason or ""
    assert reason.startswith("ValueError: nul , surrogate ?, long xxx")
    assert len(reason) <= 2000


def test_a_handler_that_returns_an_awaitable_has_failed(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    async def handle(message: pgque.Message) -> None: ...

    worker = pgque.Worker(dsn, queue=pool, consumer="c", retry_after=3600)

    @worker.handler("*")
    def hand_on(message: pgque.Message) -> object:
        return handle(message)

    _send(client, pool, tick, "a")
    with running(worker):
        wait_until(lambda: client.messages.list(pool, "retry"))
    assert "returned an awaitable" in str(client.messages.list(pool, "retry")[0].last_error)


def test_a_handler_may_return_or_raise_an_outcome(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=1)
    seen: list[str | None] = []

    class Mine(pgque.Retry):
        def __init__(self) -> None:  # without that of Retry
            pass

    @worker.handler("*")
    def handle(message: pgque.Message) -> object:
        seen.append(message.payload)
        first = message.receive_count == 1
        if message.payload == "mine":
            raise Mine
        match message.payload:
            case "retry":
                return pgque.Retry(retry_after=3600, reason="busy")
            case "raised":
                raise pgque.Retry(0, "soon") if first else pgque.Dead("enough")
            case "dead":
                return pgque.Dead("no good")
            case "release" if first:
                return pgque.Release()
        return None

    _send(client, pool, tick, "ok", "retry", "raised", "dead", "release", "mine")
    with running(worker):
        wait_until(lambda: len(seen) == 8 and _held(client, pool) == 0)
    assert sorted(map(str, seen)) == ["dead", "mine", "ok", *["raised"] * 2, *["release"] * 2, "retry"]
    assert {(d.ev_data, d.dl_reason) for d in client.dlq.inspect(pool)} == {
        ("dead", "no good"),
        ("raised", "enough"),
    }
    retried = {str(each.payload): str(each.last_error) for each in client.messages.list(pool, "retry")}
    assert sorted(retried) == ["mine", "retry"]
    assert retried["retry"] == "busy"
    assert "has none of the attributes of Retry" in retried["mine"]
    assert _left(client, pool) == []


@pytest.mark.parametrize("after", [-1, float("nan"), 1e12])
def test_a_retry_is_neither_in_the_past_nor_in_another_age(after: float) -> None:
    with pytest.raises(pgque.PgqueBadArgumentError):
        pgque.Retry(after)


def test_what_is_done_can_go_to_the_archive(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    worker = pgque.Worker(dsn, queue=pool, consumer="c", archive=True, worker="w7")
    worker.handler("*")(lambda message: None)
    _send(client, pool, tick, "a", "b")
    with running(worker):
        wait_until(lambda: len(client.archived.list(pool)) == 2)
    assert {(a.payload, a.worker) for a in client.archived.list(pool)} == {("a", "w7"), ("b", "w7")}


@pytest.mark.parametrize(("policy", "dead"), [("nack", 1), ("ack", 0)])
def test_a_type_without_a_handler_follows_the_policy(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, policy: Any, dead: int
) -> None:
    client.admin.set_queue_config(pool, "max_receive_attempts", 1)
    seen: list[pgque.Message] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", unknown_handler_policy=policy)
    worker.handler("known")(seen.append)
    client.send(pool, "x", type="unknown")
    client.send(pool, "x", type="known")
    tick(pool)
    with running(worker):
        wait_until(lambda: bool(seen) and _held(client, pool) == 0)
    assert len(client.dlq.inspect(pool)) == dead


@pytest.mark.parametrize(
    "wrong",
    [{"unknown_handler_policy": "ignore"}, {"concurrency": 0}, {"prefetch": 0}, {"visibility_timeout": 0}],
)
def test_wrong_settings_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        pgque.Worker(queue="q", consumer="c", **wrong)


def test_no_transaction_is_open_while_a_handler_runs(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    states: list[str] = []
    worker = pgque.Worker(f"{dsn} application_name=quiet_worker", queue=pool, consumer="c")

    @worker.handler("*")
    def look(message: pgque.Message) -> None:
        with psycopg.connect(dsn) as own:

            def idle() -> bool:
                row = own.execute(
                    "select state from pg_stat_activity where application_name = 'quiet_worker'"
                ).fetchone()
                own.rollback()
                return row == ("idle",)

            wait_until(idle, "the worker's connection is idle")
            states.append("idle")

    _send(client, pool, tick, "x")
    with running(worker):
        wait_until(lambda: bool(states))


# -- leases ------------------------------------------------------------


def test_a_lease_is_extended_for_as_long_as_a_handler_runs(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    release = threading.Event()
    seen: list[tuple[str | None, int | None]] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=1, visibility_timeout=0.6, prefetch=10)
    worker._size = 10  # as it is after some quick batches

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append((message.payload, message.receive_count))
        release.wait(20)

    _send(client, pool, tick, "slow", "waiting", "waiting too")
    with running(worker):
        wait_until(lambda: len(seen) == 1)
        deadline = time.monotonic() + 2.5  # several timeouts
        while time.monotonic() < deadline:
            assert _left(client, pool) == []
            time.sleep(0.05)
        release.set()
        wait_until(lambda: len(seen) == 3 and _held(client, pool) == 0)
    assert seen == [("slow", 1), ("waiting", 1), ("waiting too", 1)]


def _worker_of(
    twin: str, dsn: str, pool: str, handle: Callable[[pgque.Message], object], **settings: Any
) -> tuple[Any, Callable[[], object]]:
    """Return a worker whose handlers block a thread, or await one, and the function that runs it."""
    if twin == "sync":
        worker = pgque.Worker(dsn, queue=pool, consumer="c", **settings)
        worker.handler("*")(handle)
        return worker, worker.run
    awaiting = pgque.AsyncWorker(dsn, queue=pool, consumer="c", **settings)

    @awaiting.handler("*")
    async def handle_async(message: pgque.Message) -> None:
        await asyncio.to_thread(handle, message)

    return awaiting, lambda: asyncio.run(awaiting.run())


def _waits_for_a_lock(conn: Connection, query: str) -> bool:
    return bool(
        conn.execute(
            "select from pg_stat_activity where wait_event_type = 'Lock' and query like %s", [f"%{query}%"]
        ).rowcount
    )


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_a_lease_is_extended_while_the_connection_of_its_worker_waits_for_the_consumer(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    connect: Any,
    twin: str,
) -> None:
    release, began = threading.Event(), threading.Event()

    def handle(message: pgque.Message) -> None:
        if message.payload == "slow":
            began.set()
            release.wait(30)

    worker, run = _worker_of(twin, dsn, pool, handle, visibility_timeout=2, concurrency=2, prefetch=1)
    _send(client, pool, tick, "slow")
    with threads.running(run, worker.stop, 20), connect(autocommit=False) as holder:
        assert began.wait(10)

        def receives() -> bool:
            holder.rollback()
            _send(client, pool, tick, "quick", "quick")  # others may go to the worker
            return bool(pgque.receive(holder, pool, "c", 1, worker="script"))

        wait_until(receives, "a program receives in the transaction that it works in")
        wait_until(lambda: _waits_for_a_lock(conn, "pgque.receive"), "the worker waits for the consumer")

        def lease_until() -> list[Any]:
            return [
                it.lease_until for it in client.consumers.list_workers(pool, "c") if it.worker != "script"
            ]

        before = lease_until()
        assert len(before) == 1
        wait_until(lambda: lease_until() > before, "the lease is extended")
        assert _waits_for_a_lock(conn, "pgque.receive")
        holder.rollback()
        release.set()
        wait_until(lambda: _held(client, pool) == 0)


def test_a_lease_is_extended_while_outcomes_of_many_other_batches_are_not_committed(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    connect: Any,
) -> None:
    release = threading.Event()
    seen: list[pgque.Message] = []

    def handle(message: pgque.Message) -> None:
        seen.append(message)
        release.wait(30)

    # An eighth of a lease is the longest wait for a lock: 15 waits in turn would exceed the lease.
    worker, run = _worker_of("sync", dsn, pool, handle, visibility_timeout=2, concurrency=16, prefetch=1)
    with threads.running(run, worker.stop, 20), connect(autocommit=False) as holder:
        for count in range(16):
            _send(client, pool, tick, "x")
            wait_until(lambda count=count: len(seen) > count)
        for message in seen[:-1]:
            pgque.PgqueClient(holder).extend(message.batch_id, 0)  # locks the batch, as a report does
        wait_until(lambda: _waits_for_a_lock(conn, "pgque.extend"))
        [until] = [w.lease_until for w in client.consumers.list_workers(pool, "c")]
        later = "select pgque.clock() > %s + interval '2 seconds'"

        def expired() -> bool:
            assert _left(client, pool) == []
            return bool(conn.execute(later, [until]).fetchall()[0][0])

        wait_until(expired, "all leases would have expired")
        holder.rollback()
        release.set()
        wait_until(lambda: _held(client, pool) == 0)
    assert len(seen) == 16


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_a_handler_beyond_its_time_is_rejected_and_its_place_is_free(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
    twin: str,
) -> None:
    client.admin.set_queue_config(pool, "max_retries", 0)
    release = threading.Event()
    seen: list[str | None] = []

    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        if message.payload == "hangs":
            release.wait(30)

    worker, run = _worker_of(twin, dsn, pool, handle, handler_timeout=0.2, concurrency=2)
    _send(client, pool, tick, "hangs", "hangs", "quick")
    with threads.running(run, worker.stop, 20):
        wait_until(lambda: "quick" in seen and len(client.dlq.inspect(pool)) == 2)
        wait_until(lambda: _held(client, pool) == 0)
        release.set()
        _send(client, pool, tick, *(str(n) for n in range(20)))
        wait_until(lambda: len(seen) == 23 and _held(client, pool) == 0)
    reasons = {letter.dl_reason for letter in client.dlq.inspect(pool)}
    assert reasons == {"the handler ran longer than 0.2 s (handler_timeout)"}
    assert [record.levelname for record in caplog.records if record.name == "pgque.worker"] == ["ERROR"] * 2


def test_a_handler_that_runs_for_many_leases_is_logged_once(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    worker, run = _worker_of("sync", dsn, pool, lambda message: release.wait(30), visibility_timeout=0.3)
    [sent] = _send(client, pool, tick, "x")
    with threads.running(run, worker.stop, 20):
        wait_until(lambda: "set handler_timeout" in caplog.text)
        release.set()
        wait_until(lambda: _held(client, pool) == 0)
    assert sum(f"the handler of message {sent}" in line for line in caplog.messages) == 1


def test_a_lost_lease_is_logged_and_what_was_not_started_is_left_to_the_others(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    seen: list[str | None] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=1, visibility_timeout=2)
    worker._size = 10

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        release.wait(20)

    _send(client, pool, tick, "a", "b", "c")
    with caplog.at_level(logging.WARNING, logger="pgque.worker"), running(worker):
        wait_until(lambda: len(seen) == 1)
        assert client.consumers.reclaim(pool, "c") == 1
        assert len(_left(client, pool)) == 3
        wait_until(lambda: "is lost" in caplog.text)
        release.set()
        wait_until(lambda: worker._pool.queued() == 0)
    assert seen == ["a"]


def test_outcomes_are_stored_while_another_message_of_the_batch_still_runs(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    release = threading.Event()
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=2)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        if message.payload == "slow":
            release.wait(20)

    slow, _ = _send(client, pool, tick, "slow", "quick")
    with running(worker):
        wait_until(lambda: [m.msg_id for m in client.messages.list(pool, "processing")] == [slow])
        release.set()
        wait_until(lambda: _held(client, pool) == 0)


# -- faults and stopping ------------------------------------------------------------


def test_after_its_backend_was_terminated_the_worker_acks_its_batch(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, conn: Connection
) -> None:
    release = threading.Event()
    seen: list[str | None] = []
    worker = pgque.Worker(f"{dsn} application_name=shot", queue=pool, consumer="c", concurrency=2)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        assert release.wait(20)

    _send(client, pool, tick, "a", "b")
    with running(worker):
        wait_until(lambda: len(seen) == 2)
        conn.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'shot'"
        )
        release.set()
        wait_until(lambda: _held(client, pool) == 0)
        _send(client, pool, tick, "c")
        wait_until(lambda: len(seen) == 3 and _held(client, pool) == 0)
    assert sorted(map(str, seen)) == ["a", "b", "c"]
    assert _left(client, pool) == []


def test_faults_that_trying_again_cannot_help_are_raised(dsn: str, queue: str) -> None:
    with pytest.raises(pgque.PgqueQueueNotFoundError):
        pgque.Worker(dsn, queue="no such queue", consumer="c", unknown_handler_policy="ack").run()
    with pytest.raises(pgque.PgqueConsumerNotFoundError):
        pgque.Worker(dsn, queue=queue, consumer="nobody", unknown_handler_policy="ack").run()


@pytest.mark.parametrize("kind", [pgque.Worker, pgque.Consumer])
def test_a_message_that_the_encoding_of_the_connection_lacks_does_not_end_a_program(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
    kind: Callable[..., Any],
) -> None:
    seen: list[str | None] = []
    program = kind(make_conninfo(dsn, client_encoding="latin1"), queue=pool, consumer="c")
    program.handler("*")(lambda message: seen.append(message.payload))
    _send(client, pool, tick, "\u20ac")
    with running(program):
        wait_until(lambda: "next try in" in caplog.text)
        client.admin.purge(pool)
        _send(client, pool, tick, "next")
        wait_until(lambda: bool(seen))
    assert seen == ["next"]


def test_after_a_stop_running_handlers_finish_and_messages_not_started_are_released(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    release = threading.Event()
    seen: list[str | None] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=2, visibility_timeout=60)
    worker._size = 10

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        release.wait(20)

    _send(client, pool, tick, *"abcd")
    with running(worker) as thread:
        wait_until(lambda: len(seen) == 2)
        worker.stop()
        other: list[str | None] = []

        def handed_back() -> bool:
            other.extend(_left(client, pool))
            return len(other) == 2

        wait_until(handed_back)
        assert thread.is_alive()
        release.set()
        thread.join(5)
        assert not thread.is_alive()
    assert (sorted(map(str, seen)), other) == (["a", "b"], ["c", "d"])
    assert client.consumers.reclaim(pool, "c") >= 1
    assert sorted(map(str, _left(client, pool))) == ["c", "d"]


def test_a_handler_that_does_not_end_after_a_stop_loses_its_message(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    release = threading.Event()
    seen: list[str | None] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", visibility_timeout=60, shutdown_timeout=0.2)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        release.wait(20)

    _send(client, pool, tick, "a")
    with running(worker):
        wait_until(lambda: len(seen) == 1)
    assert _left(client, pool) == ["a"]
    release.set()


@contextmanager
def _away(conn: Connection, role: Any) -> Iterator[None]:
    """Have the server end the connections of a role, and take none."""
    conn.execute(f"alter role {role.name} connection limit 0".encode())
    try:
        conn.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = %s", [role.name]
        )
        yield
    finally:
        conn.execute(f"alter role {role.name} connection limit -1".encode())


def _pauses(caplog: pytest.LogCaptureFixture) -> list[tuple[float, float]]:
    """Return when each vain attempt to connect ended, and how long the pause behind it was to be."""
    return [
        (record.created, float(record.args[0]))  # type: ignore[arg-type]
        for record in caplog.records
        if "next try in" in str(record.msg) and isinstance(record.args, tuple)
    ]


def test_what_is_left_of_a_batch_of_which_another_worker_took_a_part_is_done_once(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    reader: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    began: dict[str, list[int]] = {"first": [], "second": []}
    releases = {"first": threading.Event(), "second": threading.Event()}
    workers = {
        "first": pgque.Worker(reader.dsn, queue=pool, consumer="c", concurrency=3, visibility_timeout=1),
        "second": pgque.Worker(dsn, queue=pool, consumer="c", concurrency=1, prefetch=1),
    }
    for name, worker in workers.items():

        @worker.handler("*")
        def handle(message: pgque.Message, name: str = name) -> None:
            began[name].append(message.msg_id)
            assert releases[name].wait(30)

    ids = _send(client, pool, tick, "a", "b", "c")
    with caplog.at_level(logging.WARNING, logger="pgque.worker"), ExitStack() as stack:
        stack.enter_context(running(workers["first"]))
        wait_until(lambda: len(began["first"]) == 3)
        with _away(conn, reader):
            stack.enter_context(running(workers["second"]))
            wait_until(lambda: began["second"])
        releases["first"].set()
        wait_until(lambda: not workers["first"]._batches)
        assert _held(client, pool) == 1
        releases["second"].set()
        wait_until(lambda: _held(client, pool) == 0)
    assert sorted(began["first"]) == ids
    assert len(began["second"]) == 1
    [refused] = [message for message in caplog.messages if "does not count" in message]
    assert str(began["second"][0]) in refused
    assert client.consumers.reclaim(pool, "c") == 0
    assert _left(client, pool) == []


@pytest.mark.parametrize("meanwhile", ["others take them", "nobody takes them"])
@pytest.mark.parametrize("twin", ["sync", "async"])
def test_what_was_prefetched_does_not_start_after_its_lease_while_the_database_is_away(
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    reader: Any,
    caplog: pytest.LogCaptureFixture,
    twin: str,
    meanwhile: str,
) -> None:
    release = threading.Event()
    seen: list[str | None] = []

    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        assert release.wait(20)

    async def handle_async(message: pgque.Message) -> None:
        await asyncio.to_thread(handle, message)

    worker: Any
    if twin == "sync":
        worker = pgque.Worker(reader.dsn, queue=pool, consumer="c", concurrency=1, visibility_timeout=2)
        worker.handler("*")(handle)
        run = worker.run
    else:
        worker = pgque.AsyncWorker(reader.dsn, queue=pool, consumer="c", concurrency=1, visibility_timeout=2)
        worker.handler("*")(handle_async)
        run = lambda: asyncio.run(worker.run())  # noqa: E731
    worker._size = 10
    _send(client, pool, tick, "a", "b", "c")
    thread = threading.Thread(target=run, daemon=True)
    with caplog.at_level(logging.WARNING, logger="pgque.worker"):
        thread.start()
        try:
            wait_until(lambda: seen == ["a"])
            with _away(conn, reader):
                wait_until(lambda: client.messages.list(pool, "retry"), "messages that others may receive")
                if meanwhile == "others take them":
                    assert sorted(map(str, _left(client, pool))) == ["a", "b", "c"]
                release.set()
                wait_until(lambda: worker._pool.queued() == 0 and len(worker._finished) == 3)
                assert seen == ["a"]
            wait_until(lambda: not worker._batches, "the worker is back", timeout=30)
            if meanwhile == "nobody takes them":
                wait_until(lambda: len(seen) == 3 and _held(client, pool) == 0)
        finally:
            release.set()
            worker.stop()
            thread.join(20)
    assert not thread.is_alive()
    assert sorted(map(str, seen)) == (["a"] if meanwhile == "others take them" else ["a", "b", "c"])
    assert sum("the others are released" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("stopped", ["before", "meanwhile"])
def test_outcomes_of_handlers_that_ran_while_the_database_was_away_are_stored_though_the_worker_was_stopped(
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    reader: Any,
    caplog: pytest.LogCaptureFixture,
    stopped: str,
) -> None:
    releases = {"a": threading.Event(), "b": threading.Event()}
    seen: list[str | None] = []
    worker = pgque.Worker(reader.dsn, queue=pool, consumer="c", concurrency=2, visibility_timeout=60)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        assert releases[str(message.payload)].wait(20)

    _send(client, pool, tick, "a", "b")
    with running(worker) as thread:
        wait_until(lambda: len(seen) == 2)
        if stopped == "before":
            worker.stop()
        with _away(conn, reader):
            releases["a"].set()
            worker.stop()
            wait_until(lambda: len(_pauses(caplog)) > 3)
            assert thread.is_alive()
        releases["b"].set()
        thread.join(10)
        assert not thread.is_alive()
    assert _held(client, pool) == 0
    assert _left(client, pool) == []


def test_a_stop_while_the_database_is_away_waits_for_handlers_and_for_nothing_else(
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    reader: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    seen: list[str | None] = []
    idle, busy = (
        pgque.Worker(reader.dsn, queue=pool, consumer="c", concurrency=1, shutdown_timeout=limit)
        for limit in (20, 1)
    )

    @idle.handler("*")
    @busy.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        release.wait(20)

    _send(client, pool, tick, "a")
    with running(busy) as waits:
        wait_until(lambda: bool(seen))
        with running(idle) as ends, _away(conn, reader):
            wait_until(lambda: len(_pauses(caplog)) > 5)
            began = time.monotonic()
            busy.stop()
            idle.stop()
            ends.join(5)
            assert not ends.is_alive()
            waits.join(5)
            assert not waits.is_alive()
            assert time.monotonic() - began > 1
    release.set()


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_a_handler_that_runs_when_a_signal_ends_the_wait_for_a_connection_is_waited_for(
    client: pgque.PgqueClient, pool: str, tick: Tick, conn: Connection, reader: Any, twin: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        parts = conninfo_to_dict(reader.dsn)
        # The first host takes connections and says nothing, for the two seconds of the timeout.
        parts["host"] = f"127.0.0.1,{parts['host']}"
        parts["port"] = f"{silent.getsockname()[1]},{parts.get('port', 5432)}"
        dsn = make_conninfo("", **parts, connect_timeout=2)
        began: list[str | None] = []

        def interrupt(message: pgque.Message) -> None:
            began.append(message.payload)
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where usename = %s", [reader.name]
            )
            os.kill(os.getpid(), signal.SIGTERM)

        def handle(message: pgque.Message) -> None:
            interrupt(message)
            time.sleep(1.5)

        async def handle_async(message: pgque.Message) -> None:
            interrupt(message)
            await asyncio.sleep(1.5)

        _send(client, pool, tick, "a")
        if twin == "sync":
            worker = pgque.Worker(dsn, queue=pool, consumer="c", visibility_timeout=60)
            worker.handler("*")(handle)
            worker.run()
        else:
            async_worker = pgque.AsyncWorker(dsn, queue=pool, consumer="c", visibility_timeout=60)
            async_worker.handler("*")(handle_async)
            asyncio.run(asyncio.wait_for(async_worker.run(), 20))
    assert began == ["a"]
    assert _held(client, pool) == 0
    assert _left(client, pool) == []


# -- processes ------------------------------------------------------------


PROGRAM = """
import os, sys, time
import pgque

worker = pgque.Worker(
    sys.argv[1], queue=sys.argv[2], consumer="c", concurrency=int(sys.argv[4]), use=sys.argv[3],
    visibility_timeout=float(sys.argv[5]), worker="prog",
)

@worker.handler("*")
def handle(message):
    with pgque.connect(sys.argv[1], autocommit=True) as client:
        client.conn.execute(
            "insert into handled values (%s, %s, %s)", [os.getpid(), message.payload, message.receive_count]
        )
    if message.payload.startswith("sleep"):
        time.sleep(float(message.payload.split()[1]))
    if message.payload == "killer" and message.receive_count == 1:
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    worker.run()
"""


@pytest.fixture
def handled(conn: Connection) -> Iterator[Callable[[], list[tuple[int, str, int]]]]:
    conn.execute("create table handled (pid int, payload text, receive_count int)")
    yield lambda: conn.execute("select pid, payload, receive_count from handled").fetchall()
    conn.execute("drop table handled")


class Programs:
    """Start the program above, and end it after the test."""

    def __init__(self, path: Path, dsn: str) -> None:
        self._path = path
        self._dsn = dsn
        self.started: list[subprocess.Popen[str]] = []

    def __call__(
        self, queue: str, use: str = "threads", concurrency: int = 2, timeout: float = 30
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(self._path), self._dsn, queue, use, str(concurrency), str(timeout)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@pytest.fixture
def program(tmp_path: Path, dsn: str) -> Iterator[Programs]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    programs = Programs(path, dsn)
    yield programs
    for process in programs.started:
        process.kill()
        process.communicate()


Handled = Callable[[], list[tuple[int, str, int]]]


def test_handlers_run_in_processes(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, program: Programs, handled: Handled
) -> None:
    _send(client, pool, tick, *["sleep 0.05"] * 40)
    process = program(pool, "processes", 3)
    wait_until(lambda: len(handled()) == 40 and _held(client, pool) == 0, timeout=30)
    pids = {pid for pid, _, _ in handled()}
    assert process.pid not in pids
    assert len(pids) > 1
    process.terminate()
    assert process.wait(15) == 0
    assert _left(client, pool) == []


def test_a_killed_process_is_started_anew_and_its_message_is_redelivered(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, program: Programs, handled: Handled
) -> None:
    process = program(pool, "processes", 1, timeout=1)
    _send(client, pool, tick, "killer")
    wait_until(lambda: len(handled()) == 2 and _held(client, pool) == 0, timeout=30)
    (first, _, one), (second, _, two) = handled()
    assert (one, two) == (1, 2)
    assert first != second
    process.terminate()
    assert process.wait(15) == 0


def test_no_message_is_lost_while_processes_are_killed(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, program: Programs, handled: Handled
) -> None:
    client.admin.set_queue_config(pool, "max_receive_attempts", 100)
    count = 300
    _send(client, pool, tick, *(f"sleep 0.01{n:03}" for n in range(count)))
    process = program(pool, "processes", 3, timeout=1)
    killed: set[int] = set()

    def all_handled() -> bool:
        rows = handled()
        alive = {pid for pid, _, _ in rows} - killed
        if len(killed) < 4 and len(rows) > 30 * (len(killed) + 1) and alive:
            victim = alive.pop()
            killed.add(victim)
            os.kill(victim, signal.SIGKILL)
        return len({payload for _, payload, _ in rows}) == count and _held(client, pool) == 0

    wait_until(all_handled, "all are handled", timeout=60)
    assert len(killed) == 4
    process.terminate()
    assert process.wait(15) == 0
    assert _left(client, pool) == []
    assert client.dlq.inspect(pool) == []


@pytest.mark.parametrize("use", ["threads", "processes"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_handlers_finish_and_releases_the_other_messages(
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    program: Programs,
    handled: Handled,
    use: str,
    signum: int,
) -> None:
    process = program(pool, use, 2, timeout=60)
    _send(client, pool, tick, *["sleep 1"] * 6)
    wait_until(lambda: len(handled()) == 2, timeout=30)
    process.send_signal(signum)
    assert process.wait(15) == 0
    started = len(handled())
    assert started < 6
    assert _held(client, pool) == 0
    assert len(_left(client, pool)) == 6 - started


def test_a_killed_program_leaves_no_process_and_its_messages_are_redelivered(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, program: Programs, handled: Handled
) -> None:
    process = program(pool, "processes", 2, timeout=2)
    _send(client, pool, tick, "sleep 1", "sleep 1")
    wait_until(lambda: len(handled()) == 2, timeout=30)
    pids = {pid for pid, _, _ in handled()}
    process.kill()
    process.wait(30)

    def gone() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    wait_until(gone, "the processes have ended", timeout=15)


def test_messages_of_a_killed_worker_come_to_another(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, program: Programs, handled: Handled
) -> None:
    victim = program(pool, "threads", 2, timeout=1)
    _send(client, pool, tick, "sleep 30", "sleep 30")
    wait_until(lambda: len(handled()) == 2, timeout=30)
    assert {count for _, _, count in handled()} == {1}
    victim.kill()
    other: list[pgque.Message] = []

    def taken() -> bool:
        other.extend(client.receive(pool, "c", worker="other"))
        return len(other) == 2

    wait_until(taken)
    assert {message.receive_count for message in other} == {2}


def test_handlers_that_a_process_cannot_import_are_refused(dsn: str, pool: str) -> None:
    worker = pgque.Worker(dsn, queue=pool, consumer="c", use="processes")
    worker.handler("*")(lambda message: None)
    with pytest.raises(TypeError, match="functions of a module"):
        worker.run()


def test_what_a_process_gives_up_for_is_raised(
    client: pgque.PgqueClient, pool: str, program: Programs
) -> None:
    process = program("no such queue", "processes", 2)
    _, text = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "PgqueQueueNotFoundError" in text


# -- the async twin ------------------------------------------------------------


def test_async_handlers_run_as_tasks(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    _send(client, pool, tick, "a", "b", "bad", "dead")
    seen: list[tuple[str | None, int | None]] = []

    async def call() -> None:
        worker = pgque.AsyncWorker(
            dsn, queue=pool, consumer="c", concurrency=4, retry_after=0, visibility_timeout=0.5
        )
        together = asyncio.Event()

        @worker.handler("*")
        async def handle(message: pgque.Message) -> object:
            seen.append((message.payload, message.receive_count))
            if len(seen) == 4:
                together.set()
            await asyncio.wait_for(together.wait(), 10)
            if message.payload == "a":
                await asyncio.sleep(1.5)  # longer than the timeout
            if message.payload == "bad" and message.receive_count == 1:
                raise RuntimeError("again")
            return pgque.Dead("no good") if message.payload == "dead" else None

        def stop_when_done() -> None:
            with pgque.connect(dsn, autocommit=True) as own:
                wait_until(lambda: len(seen) == 5 and _held(own, pool) == 0, timeout=20)
            worker.stop()

        await asyncio.gather(worker.run(), asyncio.to_thread(stop_when_done))

    asyncio.run(call())
    assert sorted(map(str, seen)) == sorted(
        map(str, [("a", 1), ("b", 1), ("bad", 1), ("bad", 2), ("dead", 1)])
    )
    assert [d.ev_data for d in client.dlq.inspect(pool)] == ["dead"]
    assert _left(client, pool) == []


@pytest.mark.parametrize("handler_timeout", [0.2, None])
def test_a_task_that_outlives_its_cancellation_keeps_neither_its_place_nor_its_worker(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    monkeypatch: pytest.MonkeyPatch,
    handler_timeout: float | None,
) -> None:
    monkeypatch.setattr(_concurrency, "CLEAN_UP", 0.2)
    client.admin.set_queue_config(pool, "max_retries", 0)
    _send(client, pool, tick, "hangs", "next")
    seen: list[str | None] = []
    wanted = ["hangs"] if handler_timeout is None else ["hangs", "next"]

    async def call() -> bool:
        worker = pgque.AsyncWorker(
            dsn,
            queue=pool,
            consumer="c",
            concurrency=1,
            handler_timeout=handler_timeout,
            shutdown_timeout=0.2,
        )
        freed = asyncio.Event()

        @worker.handler("*")
        async def handle(message: pgque.Message) -> None:
            seen.append(message.payload)
            while message.payload == "hangs" and not freed.is_set():
                with suppress(asyncio.CancelledError):  # as a clean-up that waits for a silent network
                    await freed.wait()

        run = asyncio.ensure_future(worker.run(catch_signals=False))
        try:
            await asyncio.to_thread(wait_until, lambda: seen == wanted)
            if handler_timeout is not None:
                await asyncio.to_thread(wait_until, lambda: _held(client, pool) == 0)
            worker.stop()
            done, _ = await asyncio.wait([run], timeout=10)
            return bool(done)
        finally:
            freed.set()
            worker.stop()
            await run

    assert asyncio.run(call())
    assert seen == wanted
    assert [letter.ev_data for letter in client.dlq.inspect(pool)] == wanted[:-1]
    assert _held(client, pool) == 0


def test_an_async_worker_pauses_between_attempts_to_reach_the_database(
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    reader: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _send(client, pool, tick, "a")

    async def call() -> None:
        worker = pgque.AsyncWorker(reader.dsn, queue=pool, consumer="c")
        began, release = asyncio.Event(), asyncio.Event()

        @worker.handler("*")
        async def handle(message: pgque.Message) -> None:
            began.set()
            await release.wait()

        task = asyncio.create_task(worker.run())
        await began.wait()
        with _away(conn, reader):
            await asyncio.to_thread(wait_until, lambda: _pauses(caplog))
            release.set()  # the worker is woken to tell
            await asyncio.to_thread(wait_until, lambda: len(_pauses(caplog)) > 6)
        worker.stop()
        await asyncio.wait_for(task, 20)

    asyncio.run(call())
    pauses = _pauses(caplog)
    assert all(after - at >= 0.99 * pause for (at, pause), (after, _) in itertools.pairwise(pauses))
    assert _left(client, pool) == []


def test_a_plain_function_as_an_async_handler_is_named_in_the_error(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    _send(client, pool, tick, "a")

    async def call() -> None:
        worker = pgque.AsyncWorker(dsn, queue=pool, consumer="c", retry_after=3600)
        worker.handler("*")(lambda message: None)  # type: ignore[type-var]
        task = asyncio.create_task(worker.run())
        await asyncio.to_thread(wait_until, lambda: client.messages.list(pool, "retry"))
        worker.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(call())
    assert "has to be a coroutine function" in str(client.messages.list(pool, "retry")[0].last_error)


def test_an_async_worker_stops_at_sigterm_and_releases_its_messages(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    _send(client, pool, tick, *"abc")
    began: list[str | None] = []

    async def call() -> None:
        worker = pgque.AsyncWorker(
            dsn, queue=pool, consumer="c", concurrency=1, visibility_timeout=60, shutdown_timeout=0.2
        )
        worker._size = 10

        @worker.handler("*")
        async def handle(message: pgque.Message) -> None:
            began.append(message.payload)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

        await worker.run()

    asyncio.run(asyncio.wait_for(call(), 20))
    assert began == ["a"]
    assert sorted(map(str, _left(client, pool))) == ["a", "b", "c"]


def test_a_worker_and_a_consumer_leave_signals_to_a_host_that_has_its_own_handler(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    client.subscribe(pool, "alone")
    _send(client, pool, tick, "a")
    runners: list[Any] = [
        pgque.Worker(dsn, queue=pool, consumer="c"),
        pgque.Consumer(dsn, queue=pool, name="alone"),
        pgque.AsyncWorker(dsn, queue=pool, consumer="c"),
        pgque.AsyncConsumer(dsn, queue=pool, name="alone"),
    ]
    told: list[int] = []

    def host(signum: int, frame: object) -> None:
        told.append(signum)
        runners[len(told) - 1].stop()

    def handle(message: pgque.Message) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def handle_async(message: pgque.Message) -> None:
        handle(message)

    before = signal.signal(signal.SIGTERM, host)
    try:
        for runner in runners[:2]:
            (runner.handler if isinstance(runner, pgque.Worker) else runner.on)("*")(handle)
            (runner.run if isinstance(runner, pgque.Worker) else runner.start)(catch_signals=False)
        _send(client, pool, tick, "b")
        for runner in runners[2:]:
            (runner.handler if isinstance(runner, pgque.AsyncWorker) else runner.on)("*")(handle_async)
            run = runner.run if isinstance(runner, pgque.AsyncWorker) else runner.start
            asyncio.run(asyncio.wait_for(run(catch_signals=False), 20))
        assert signal.getsignal(signal.SIGTERM) is host
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM] * 4
