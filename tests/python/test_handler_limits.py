"""What handlers may give and leave behind, and what is wrong before the first message: consumers and workers
alike."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import pgque
from pgque.ops.install import install
from support import threads
from support.servers import TestServer

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


class _Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _run(worker: pgque.Worker, until: Callable[[], bool], wait_until: Wait) -> None:
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        wait_until(until)
    finally:
        worker.stop()
        thread.join(20)
    assert not thread.is_alive()


def test_an_error_is_a_reason_and_one_without_a_text_too(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = pgque.Worker(dsn, queue=pool, consumer="c")

    @worker.handler("dead")
    def dead(message: pgque.Message) -> pgque.Dead:
        return pgque.Dead(ValueError("bad"))

    @worker.handler("retry")
    def retry(message: pgque.Message) -> None:
        raise pgque.Retry(reason=_Unreadable())

    @worker.handler("raise")
    def fail(message: pgque.Message) -> None:
        raise _Unreadable

    for kind in ("dead", "retry", "raise", "other"):
        client.send(pool, "x", type=kind)
    tick(pool)
    _run(worker, lambda: len(client.dlq.inspect(pool)) == 4, wait_until)
    unreadable = "_Unreadable: its text cannot be read"
    reasons = {letter.ev_type: letter.dl_reason for letter in client.dlq.inspect(pool)}
    assert reasons == {
        "dead": "ValueError: bad",
        "retry": unreadable,
        "raise": unreadable,
        "other": "no handler for type 'other'",
    }
    failed = [line for line in caplog.messages if line.startswith("handler failed")]
    assert len(failed) == 1
    for part in (
        f"queue {pool}",
        "consumer c",
        "type 'raise'",
        "attempt 1 of 1",
        "no retry is left",
        unreadable,
    ):
        assert part in failed[0]
    unknown = [line for line in caplog.messages if line.startswith("no handler for messages")]
    assert len(unknown) == 1
    for part in (pool, "consumer c", "'other'", "'dead', 'raise', 'retry'"):
        assert part in unknown[0]


def test_a_reason_in_letters_that_the_database_lacks_ends_nobody(
    server: TestServer, fresh_dsn: str, wait_until: Wait
) -> None:
    database = psycopg.conninfo.conninfo_to_dict(fresh_dsn)["dbname"]
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"drop database {database}".encode())
        admin.execute(
            f"create database {database} template template0 encoding 'LATIN1' lc_collate 'C' lc_ctype 'C'".encode()
        )
    install(fresh_dsn)
    with pgque.connect(fresh_dsn, autocommit=True) as client:
        client.admin.create_queue("q", {"max_retries": 0})
        for name in ("alone", "pool"):
            client.subscribe("q", name)
        client.send("q", "x", type="t")
        client.ticker("q")
        # A connection of another encoding than the database's has the server convert.
        utf8 = psycopg.conninfo.make_conninfo(fresh_dsn, client_encoding="UTF8")
        worker = pgque.Worker(utf8, queue="q", consumer="pool")
        consumer = pgque.Consumer(fresh_dsn, queue="q", name="alone", poll_interval=0.05)

        def fail(message: pgque.Message) -> None:
            raise ValueError("zu groß: \u20ac 5")

        worker.handler("t")(fail)
        consumer.on("t")(fail)
        thread = threading.Thread(target=consumer.start, daemon=True)
        thread.start()
        try:
            _run(worker, lambda: len(client.dlq.inspect("q")) == 2, wait_until)
        finally:
            consumer.stop()
            thread.join(20)
        assert {letter.dl_reason for letter in client.dlq.inspect("q")} == {
            "ValueError: zu groß: ? 5",
            "ValueError: zu gro?: ? 5",
        }


def test_a_role_without_rights_gets_a_hint_that_names_the_role_to_grant(roles: Any, queue: str) -> None:
    with pgque.connect(roles().dsn, autocommit=True) as client:
        with pytest.raises(pgque.PgquePermissionDeniedError) as caught:
            client.receive(queue, "c")
        for word in ("pgque_reader", "pgque_writer", "grant_queue"):
            assert word in str(caught.value)


@pytest.mark.parametrize("after", [-1, float("nan"), 1e300, "5"])
def test_a_wrong_retry_after_is_refused_at_construction(after: Any) -> None:
    with pytest.raises(pgque.PgqueBadArgumentError, match="retry_after"):
        pgque.Worker(queue="q", consumer="c", retry_after=after)
    with pytest.raises(pgque.PgqueBadArgumentError, match="retry_after"):
        pgque.Consumer(queue="q", name="c", retry_after=after)


def test_a_refused_nack_leaves_the_connection_and_the_acks(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    client.send_batch(pool, "t", ["a", "b", "c"])
    tick(pool)
    with pgque.WorkQueue(dsn, pool, consumer="c") as work:
        seen = []
        for message in work.messages(timeout=0):
            seen.append(message.payload)
            if message.payload == "b":
                with pytest.raises(pgque.PgqueBadArgumentError):
                    message.nack(retry_after=-1)
        assert seen == ["a", "b", "c"]
    assert client.receive(pool, "c", worker="other") == []


def test_a_handler_sees_no_context_variable_of_another_message(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: list[str] = []

    def note(message: pgque.Message) -> None:
        seen.append(variable.get())
        variable.set("left behind")

    async def note_async(message: pgque.Message) -> None:
        note(message)

    client.send_batch(pool, "t", ["a", "b"])
    tick(pool)
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=1)
    worker.handler("*")(note)
    _run(worker, lambda: len(seen) == 2, wait_until)

    client.send_batch(pool, "t", ["a", "b"])
    tick(pool)
    twin = pgque.AsyncWorker(dsn, queue=pool, consumer="c", concurrency=1)
    twin.handler("*")(note_async)

    async def main() -> None:
        task = asyncio.create_task(twin.run())
        while len(seen) < 4 and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        twin.stop()
        await task

    asyncio.run(main())
    assert seen == ["none"] * 4


def test_cancelling_an_async_worker_keeps_finished_outcomes_and_releases_the_rest(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    worker = pgque.AsyncWorker(
        dsn, queue=pool, consumer="c", concurrency=1, prefetch=3, visibility_timeout=600
    )
    began: list[str | None] = []

    @worker.handler("*")
    async def handle(message: pgque.Message) -> None:
        began.append(message.payload)
        if message.payload == "long":
            await asyncio.sleep(60)

    worker._size = 3
    client.send_batch(pool, "t", ["done", "long", "rest"])
    tick(pool)

    async def main() -> None:
        task = asyncio.create_task(worker.run())
        while "long" not in began:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    left = []
    while batch := client.receive(pool, "c", worker="other", visibility_timeout=60):
        left += [message.payload for message in batch]
    assert sorted(map(str, left)) == ["long", "rest"]


def test_a_worker_stops_in_time_while_a_statement_waits_for_a_lock(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    tick: Tick,
    connect: Callable[..., Connection],
    conn: Connection,
    wait_until: Wait,
) -> None:
    holder = connect(autocommit=False)
    worker = pgque.Worker(dsn, queue=pool, consumer="c", shutdown_timeout=1)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        holder.execute("select pg_advisory_xact_lock(%s)", [message.batch_id])

    client.send(pool, "x")
    tick(pool)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    wait_until(
        lambda: bool(
            conn.execute(
                "select from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'",
                [f"pgque {pool}/{worker.worker}"[:63]],
            ).fetchall()
        )
    )
    worker.stop()
    thread.join(15)
    assert not thread.is_alive()


def test_a_worker_stops_in_time_while_the_server_does_not_respond(
    server: TestServer, dsn: str, client: pgque.PgqueClient, pool: str, conn: Connection, wait_until: Wait
) -> None:
    if server.process is None:
        pytest.skip("the server's processes are not ours to stop")
    worker = pgque.Worker(dsn, queue=pool, consumer="c", shutdown_timeout=1, unknown_handler_policy="ack")
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()

    def sessions() -> list[int]:
        found = conn.execute(
            "select pid from pg_stat_activity where application_name = %s",
            [f"pgque {pool}/{worker.worker}"[:63]],
        )
        return [row[0] for row in found.fetchall()]

    wait_until(sessions)
    stopped = sessions()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        worker.stop()
        thread.join(15)
        assert not thread.is_alive()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("kind", [pgque.Worker, pgque.Consumer])
def test_a_decorator_without_a_type_and_a_program_without_handlers_are_refused(kind: Any) -> None:
    made: Any = kind(queue="q", consumer="c") if kind is pgque.Worker else kind(queue="q", name="c")
    register, start = (made.handler, made.run) if kind is pgque.Worker else (made.on, made.start)
    with pytest.raises(TypeError, match="the message type is missing"):
        register(lambda message: None)

    with pytest.raises(pgque.PgqueBadArgumentError, match="no handler") as refused:
        start()
    assert "unknown_handler_policy" in str(refused.value)


def test_what_ends_a_worker_is_one_line_with_the_queue_and_the_hint(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = pgque.Worker(dsn, queue="no_such_queue", consumer="c", unknown_handler_policy="ack")
    with pytest.raises(pgque.PgqueQueueNotFoundError) as missing:
        worker.run()
    assert missing.value.hint
    assert missing.value.hint in str(missing.value)
    [line] = [message for message in caplog.messages if "ends:" in message]
    assert "no_such_queue" in line
    assert "\n" not in line
    assert missing.value.hint in line


def test_a_receive_without_worker_of_a_pool_gets_a_hint(
    dsn: str, client: pgque.PgqueClient, pool: str
) -> None:
    client.receive(pool, "c", worker="w")
    consumer = pgque.Consumer(dsn, queue=pool, name="c", unknown_handler_policy="ack")
    with pytest.raises(pgque.PgqueError, match=r"pgque\.Worker"):
        consumer.start()


def test_a_worker_whose_messages_wait_without_ticks_logs_a_warning(
    dsn: str,
    client: pgque.PgqueClient,
    pool: str,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgque.twins.listen.TICK_CHECK", 0.1)
    monkeypatch.setattr("pgque.twins.listen._TICK_MISSING", -3600.0)
    worker = pgque.Worker(dsn, queue=pool, consumer="c", unknown_handler_policy="ack")
    client.send(pool, "x")
    said = f"queue {pool} has about 1 messages that wait for a tick"
    _run(worker, lambda: any(line.startswith(said) for line in caplog.messages), wait_until)
    assert sum(line.startswith(said) for line in caplog.messages) == 1


_KINDS = [pgque.Worker, pgque.Consumer, pgque.AsyncWorker, pgque.AsyncConsumer]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_second_handler_of_a_type_is_refused(kind: Any) -> None:
    made = kind(queue="q", consumer="c")
    first, second = (lambda message: None), (lambda message: None)
    made.handler("a")(first)
    made.handler("a")(first)  # the same one is none
    made.handler("*")(second)
    with pytest.raises(pgque.PgqueBadArgumentError, match="type 'a' have a handler already"):
        made.handler("a")(second)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_handler_of_other_arguments_is_refused(kind: Any) -> None:
    made = kind(queue="q", consumer="c")
    with pytest.raises(TypeError, match="is called with the message: "):
        made.handler("a")(lambda message, conn: None)
    made.handler("a")(lambda *args: None)
    made.handler("b")(lambda message, conn=None: None)
    made.handler("c")([].append)
    if kind in (pgque.Consumer, pgque.AsyncConsumer):
        transactional = kind(queue="q", consumer="c", transactional=True)
        with pytest.raises(TypeError, match="is called with the message and the connection"):
            transactional.handler("a")(lambda message: None)
        transactional.handler("a")(lambda message, conn: None)


@pytest.mark.parametrize("kind", _KINDS)
def test_one_object_runs_once_at_a_time_and_not_after_it_was_stopped(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, kind: Any
) -> None:
    made = kind(dsn, queue=pool, consumer="c")
    seen: list[pgque.Message] = []
    is_async = kind in (pgque.AsyncWorker, pgque.AsyncConsumer)

    async def handle(message: pgque.Message) -> None:
        seen.append(message)

    made.handler("*")(handle if is_async else seen.append)
    run = (lambda: asyncio.run(made.run())) if is_async else made.run
    client.send(pool, "x")
    tick(pool)
    with threads.running(run, made.stop, 20):
        wait_until(lambda: bool(seen))
        with pytest.raises(pgque.PgqueError, match="runs already"):
            run()
        client.send(pool, "y")
        tick(pool)
        wait_until(lambda: len(seen) == 2)  # the first run goes on
    with pytest.raises(pgque.PgqueError, match="was stopped"):
        run()
    never_ran = kind(dsn, queue=pool, consumer="c", unknown_handler_policy="ack")
    never_ran.stop()  # by another thread, which was quicker
    if is_async:
        asyncio.run(never_ran.run())
    else:
        never_ran.run()
