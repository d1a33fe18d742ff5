"""Handlers that run for too long: rejected, counted and logged, whatever else their worker waits for."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from psycopg.conninfo import make_conninfo

import pgque
from pgque.runtime import liveness as _liveness
from pgque.runtime import runtime as _runtime_async
from pgque.twins import runtime as _runtime
from support import threads
from support.processes import ended

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]
Made = Callable[..., Any]

kinds = pytest.mark.parametrize(
    "made", [pgque.Worker, pgque.Consumer, pgque.AsyncWorker, pgque.AsyncConsumer]
)


def running(
    worker: Any, handle: Callable[[pgque.Message], object]
) -> AbstractContextManager[threading.Thread]:
    """Run a worker whose handler, of an async one in a thread, is a function."""

    async def handle_async(message: pgque.Message) -> None:
        await asyncio.to_thread(handle, message)

    is_async = isinstance(worker, pgque.AsyncWorker | pgque.AsyncConsumer)
    worker.handler("*")(handle_async if is_async else handle)
    run = (lambda: asyncio.run(worker.run())) if is_async else worker.run
    return threads.running(run, worker.stop, 20)


def _send(client: pgque.PgqueClient, queue: str, tick: Tick, *payloads: str) -> None:
    client.send_batch(queue, "t", payloads)
    tick(queue)


def _waits_for_a_lock(conn: Connection, name: str) -> bool:
    found = conn.execute(
        "select from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'", [name]
    )
    return bool(found.fetchall())


@kinds
def test_a_handler_is_ended_though_its_worker_waits_for_the_database(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    connect: Callable[[], Connection],
    caplog: pytest.LogCaptureFixture,
    made: Made,
) -> None:
    began, go, release = threading.Barrier(3), threading.Event(), threading.Event()
    named = make_conninfo(dsn, application_name="waits")
    worker = made(named, queue=pool, consumer="c", concurrency=2, handler_timeout=2)

    def handle(message: pgque.Message) -> None:
        began.wait(10)
        (go if message.payload == "quick" else release).wait(20)

    _send(client, pool, tick, "quick", "hangs")
    with running(worker, handle):
        began.wait(10)
        holder = connect()
        holder.execute("begin")
        holder.execute("lock table pgque.subscription in access exclusive mode")
        go.set()
        wait_until(lambda: _waits_for_a_lock(conn, "waits"), "the outcome of the other message waits")
        wait_until(lambda: "ran longer than 2 s" in caplog.text)
        assert _waits_for_a_lock(conn, "waits")
        holder.execute("commit")
        wait_until(lambda: len(client.dlq.inspect(pool)) == 1)
        release.set()


@pytest.mark.parametrize("made", [pgque.Worker, pgque.Consumer])
def test_handlers_that_hang_in_every_place_are_counted_and_leave_the_liveness_file_alone(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    made: Made,
) -> None:
    monkeypatch.setattr(_liveness, "_INTERVAL", 0.0)
    monkeypatch.setattr(_runtime, "_LONG", 0.01)
    registry = CollectorRegistry()
    pgque.enable_prometheus(registry=registry)
    release = threading.Event()
    file = tmp_path / "alive"
    worker = made(dsn, queue=pool, consumer="c", concurrency=2, liveness_file=file)

    def touched() -> Callable[[], bool]:
        seen: set[int] = set()

        def twice() -> bool:
            seen.add(file.stat().st_mtime_ns if file.exists() else 0)
            return len(seen) > 2

        return twice

    def hanging() -> float | None:
        of = {"queue": pool, "consumer": "c"}
        return registry.get_sample_value("pgque_handler_overruns_total", of)

    try:
        with running(worker, lambda message: release.wait(30)):
            _send(client, pool, tick, "one")
            wait_until(lambda: hanging() == 1)
            wait_until(touched(), "it is touched while a place is free")
            if made is pgque.Consumer:  # which has one batch at a time
                release.set()
                wait_until(lambda: client.consumers.get_info(pool, "c")[0].pending_events == 0)
                release.clear()
                _send(client, pool, tick, "two", "three")
                wait_until(lambda: hanging() == 3)
            else:
                _send(client, pool, tick, "two")
                wait_until(lambda: hanging() == 2)
            before = file.stat().st_mtime_ns
            conn.execute("select pg_sleep(2.5)")  # longer than the worker waits between two signs
            assert file.stat().st_mtime_ns - before < 1e9
            release.set()
            wait_until(touched(), "it is touched again")
    finally:
        pgque.enable_prometheus(False)
    assert caplog.text.count("set handler_timeout") == (3 if made is pgque.Consumer else 2)


@pytest.mark.parametrize("made", [pgque.AsyncWorker, pgque.AsyncConsumer])
def test_a_handler_that_blocks_the_event_loop_is_named(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    made: Made,
) -> None:
    monkeypatch.setattr(_runtime_async, "_USUAL_LEASE", 1.0)
    release = threading.Event()
    lease = {"visibility_timeout": 1} if made is pgque.AsyncWorker else {}
    worker = made(dsn, queue=pool, consumer="c", **lease)
    seen: list[int | None] = []

    async def blocks(message: pgque.Message) -> None:
        seen.append(message.receive_count)
        release.wait(30)

    worker.handler("*")(blocks)

    _send(client, pool, tick, "a")
    with (
        caplog.at_level(logging.WARNING, logger="pgque.worker"),
        threads.running(lambda: asyncio.run(worker.run()), worker.stop, 20),
    ):
        wait_until(lambda: "the event loop has been blocked" in caplog.text)
        if made is pgque.AsyncWorker:  # its lease is extended
            assert client.receive(pool, "c", worker="other", visibility_timeout=60) == []
        release.set()
        wait_until(lambda: client.consumers.get_info(pool, "c")[0].pending_events == 0)
    [text] = [message for message in caplog.messages if "event loop" in message]
    assert "test_time_limits.py" in text and "in blocks" in text
    assert seen == [1]


PROGRAM = """
import os, re, sys, time
import pgque

worker = pgque.Worker(
    sys.argv[1], queue=sys.argv[2], consumer="c", concurrency=1, use="processes", handler_timeout=0.5,
    visibility_timeout=3,
)

@worker.handler("*")
def handle(message):
    print(message.payload, message.receive_count, os.getpid(), flush=True)
    if message.payload == "sleeps":
        time.sleep(60)
    if message.payload == "computes" and message.receive_count == 1:
        re.match("(a+)+b", 60 * "a")  # which keeps all other threads from running

if __name__ == "__main__":
    worker.run()
"""


@pytest.mark.slow  # starts processes, and waits for a lease
@pytest.mark.parametrize("payload", ["sleeps", "computes"])
def test_the_process_of_a_handler_that_runs_too_long_is_ended(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, tmp_path: Path, payload: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    _send(client, pool, tick, payload, "next")
    process = subprocess.Popen(
        [sys.executable, str(path), dsn, pool], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with ended(process):
        assert process.stdout is not None
        handled = [process.stdout.readline().split()]
        wanted = {"next"} if payload == "sleeps" else {"next", "computes"}
        while {each[0] for each in handled[1:]} != wanted:
            handled.append(process.stdout.readline().split())
            assert handled[-1], "it has ended"
    assert handled[0][2] not in {each[2] for each in handled[1:]}
    reasons = [letter.dl_reason for letter in client.dlq.inspect(pool)]
    assert reasons == (["the handler ran longer than 0.5 s (handler_timeout)"] if payload == "sleeps" else [])
