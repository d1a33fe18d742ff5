"""Consumers: handlers, settlement, faults, stopping."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import psycopg
import pytest
from psycopg import sql

import pgque
from pgque import errors
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def subscribed(client: pgque.PgqueClient, queue: str) -> str:
    client.subscribe(queue, "c")
    return queue


def running(consumer: pgque.Consumer) -> AbstractContextManager[threading.Thread]:
    """Run a consumer in a thread, and stop it at the end."""
    return threads.running(consumer.start, consumer.stop, 10)


def _listening(conn: Connection, wait_until: Wait, name: str) -> int:
    """Wait until the consumer with this application name has nothing in hand, and return its backend."""
    found: list[int] = []

    def idle() -> bool:
        rows = conn.execute(
            "select pid from pg_stat_activity"
            " where application_name = %s and state = 'idle' and query like '%%pgque.receive%%'",
            [name],
        )
        found[:] = [row[0] for row in rows]
        open_batches = conn.execute("select from pgque.get_consumer_info() where current_batch is not null")
        return bool(found) and not open_batches.fetchall()

    wait_until(idle, "the consumer is idle")
    return found[0]


def _backend(conn: Connection, wait_until: Wait, name: str) -> int:
    found: list[int] = []

    def there() -> bool:
        found[:] = [
            row[0]
            for row in conn.execute("select pid from pg_stat_activity where application_name = %s", [name])
        ]
        return bool(found)

    wait_until(there, "the consumer is connected")
    return found[0]


def test_messages_go_to_the_handler_of_their_type(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    seen: list[tuple[str, object]] = []
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c")

    @consumer.on("created")
    def on_created(message: pgque.Message) -> None:
        seen.append(("created", message.json()))

    @consumer.on("*")
    def on_other(message: pgque.Message) -> None:
        seen.append((f"other {message.type}", message.payload))

    client.send(subscribed, {"id": 1}, type="created")
    client.send(subscribed, "x", type="deleted")
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: len(seen) == 2)
    assert seen == [("created", {"id": 1}), ("other deleted", "x")]
    assert client.receive(subscribed, "c") == []


def test_a_notification_wakes_the_consumer_long_before_the_next_poll(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, conn: Connection
) -> None:
    seen: list[pgque.Message] = []
    consumer = pgque.Consumer(f"{dsn} application_name=wakes", queue=subscribed, name="c", poll_interval=600)
    consumer.on("*")(seen.append)
    with running(consumer):
        for n in range(1, 6):
            _listening(conn, wait_until, "wakes")
            client.send(subscribed, str(n))
            tick(subscribed)
            wait_until(lambda n=n: len(seen) == n, "the message arrives")


@pytest.fixture
def by_id(client: pgque.PgqueClient, new_queue: Callable[[str], str], conn: Connection) -> tuple[str, str]:
    """The name of a queue, as long as one can be, and its id; with the consumer c."""
    name = new_queue(f"{'Ž%' * 18}{secrets.token_hex(1)} ")
    assert len(name.encode()) == 57
    client.subscribe(name, "c")
    row = conn.execute("select i.queue_uid::text from pgque.get_queue_info(%s) as i", [name]).fetchone()
    assert row is not None
    return name, row[0]


@pytest.mark.parametrize("subconsumer", [None, "w"])
def test_a_consumer_that_names_its_queue_by_the_id_is_woken_too(
    dsn: str,
    client: pgque.PgqueClient,
    by_id: tuple[str, str],
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    subconsumer: str | None,
) -> None:
    queue, uid = by_id
    seen: list[pgque.Message] = []
    if subconsumer is not None:
        client.subscribe_subconsumer(queue, "c", subconsumer, convert_normal=True)
    consumer = pgque.Consumer(
        f"{dsn} application_name=by_id", queue=uid, name="c", poll_interval=600, subconsumer=subconsumer
    )
    consumer.on("*")(seen.append)
    with running(consumer):
        for n in range(1, 4):
            _listening(conn, wait_until, "by_id")
            client.send(queue, str(n))
            tick(queue)
            wait_until(lambda n=n: len(seen) == n, "the message arrives")


def test_after_its_queue_was_renamed_a_consumer_listens_to_the_new_name(
    dsn: str,
    client: pgque.PgqueClient,
    by_id: tuple[str, str],
    new_queue: Any,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
) -> None:
    queue, uid = by_id
    seen: list[pgque.Message] = []
    consumer = pgque.Consumer(f"{dsn} application_name=renamed", queue=uid, name="c", poll_interval=600)
    consumer.on("*")(seen.append)
    with running(consumer):
        _listening(conn, wait_until, "renamed")
        client.admin.rename_queue(queue, "of another name")
        new_queue.names.append("of another name")
        client.send(uid, "found at the next look")
        tick(uid)
        conn.execute(sql.SQL("notify {}").format(sql.Identifier(f"pgque_{queue}")))  # instead of the poll
        wait_until(lambda: len(seen) == 1, "the next look")
        _listening(conn, wait_until, "renamed")
        client.send(uid, "announced")
        tick(uid)
        wait_until(lambda: len(seen) == 2, "the message arrives")


def test_without_a_notification_the_queue_is_polled(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, conn: Connection
) -> None:
    seen: list[pgque.Message] = []
    consumer = pgque.Consumer(f"{dsn} application_name=polls", queue=subscribed, name="c", poll_interval=0.1)
    consumer.on("*")(seen.append)
    client.send(subscribed, "x")
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: len(seen) == 1)
        _listening(conn, wait_until, "polls")
        client.unsubscribe(subscribed, "c")
        client.subscribe(subscribed, "c", "earliest")  # work that no notification announces
        wait_until(lambda: len(seen) == 2)


def test_a_backlog_is_drained_without_waiting(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    seen: list[int] = []
    ids: list[int] = []
    for _ in range(5):
        ids += client.send_batch(subscribed, "t", [str(n) for n in range(100)])
        tick(subscribed)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", poll_interval=600, max_messages=7)
    consumer.on("*")(lambda message: seen.append(message.msg_id))
    with running(consumer):
        wait_until(lambda: len(seen) >= 500, timeout=20)
    assert seen == ids


def test_no_transaction_is_open_while_a_handler_runs(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, conn: Connection
) -> None:
    states: list[str] = []
    consumer = pgque.Consumer(f"{dsn} application_name=quiet", queue=subscribed, name="c")

    @consumer.on("*")
    def look(message: pgque.Message) -> None:
        with psycopg.connect(dsn) as own:
            row = own.execute(
                "select state from pg_stat_activity where application_name = 'quiet'"
            ).fetchone()
            assert row is not None
            states.append(row[0])

    client.send(subscribed, "x")
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: bool(states))
    assert states == ["idle"]


def test_a_failing_handler_gets_its_message_back_and_the_others_are_done(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    seen: list[tuple[str | None, int | None, str | None]] = []
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", retry_after=0)

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        seen.append((message.payload, message.retry_count, message.last_error))
        if message.payload == "bad" and message.retry_count == 0:
            raise RuntimeError("try me again")

    client.send_batch(subscribed, "t", ["good", "bad", "fine"])
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: len(seen) == 3)
        wait_until(lambda: client.consumers.get_info(subscribed, "c")[0].current_batch is None)
        client.admin.maint()
        tick(subscribed)
        wait_until(lambda: len(seen) == 4)
    assert seen[:3] == [("good", 0, None), ("bad", 0, None), ("fine", 0, None)]
    assert seen[3] == ("bad", 1, "RuntimeError: try me again")


def test_used_up_retries_end_as_a_dead_letter_with_the_reason(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c")

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        raise ValueError("never")

    client.send(subscribed, "x")
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: bool(client.dlq.inspect(subscribed)))
    assert [letter.dl_reason for letter in client.dlq.inspect(subscribed)] == ["ValueError: never"]


def test_a_reason_that_the_database_cannot_store_is_made_storable(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c")

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        raise ValueError("nul \x00, surrogate \ud800, long " + "x" * 100_000)

    client.send(subscribed, "x")
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: bool(client.dlq.inspect(subscribed)))
    [letter] = client.dlq.inspect(subscribed)
    assert (letter.dl_reason or "").startswith("ValueError: nul , surrogate ?, long xxx")


@pytest.mark.parametrize(("policy", "dead"), [("nack", 1), ("ack", 0)])
def test_a_type_without_a_handler_follows_the_policy(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, policy: Any, dead: int
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    seen: list[pgque.Message] = []
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", unknown_handler_policy=policy)
    consumer.on("known")(seen.append)
    client.send(subscribed, "x", type="unknown")
    client.send(subscribed, "x", type="known")
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: bool(seen))
        wait_until(lambda: client.consumers.get_info(subscribed, "c")[0].current_batch is None)
    assert len(client.dlq.inspect(subscribed)) == dead


class _AsyncCallable:
    async def __call__(self, message: pgque.Message) -> None: ...


async def _coroutine(message: pgque.Message) -> None: ...


def _generator(message: pgque.Message) -> Iterator[None]:
    yield


async def _async_generator(message: pgque.Message) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("handler", [_generator, _async_generator, "no function"])
def test_what_a_call_does_not_run_is_no_handler(handler: Any) -> None:
    for register in (
        pgque.Consumer(queue="q", name="c").on,
        pgque.Worker(queue="q", consumer="c").handler,
        pgque.AsyncConsumer(queue="q", name="c").on,
        pgque.AsyncWorker(queue="q", consumer="c").handler,
    ):
        with pytest.raises(TypeError, match="has to be a function"):
            register("*")(handler)


@pytest.mark.parametrize("handler", [_coroutine, functools.partial(_coroutine), _AsyncCallable()])
def test_what_cannot_be_a_handler_is_refused_with_the_class_that_takes_it(handler: Any) -> None:
    consumer = pgque.Consumer(queue="q", name="c")
    worker = pgque.Worker(queue="q", consumer="c")
    with pytest.raises(TypeError, match="AsyncConsumer"):
        consumer.on("*")(handler)
    with pytest.raises(TypeError, match="AsyncWorker"):
        worker.handler("*")(handler)
    pgque.AsyncConsumer(queue="q", name="c").on("*")(handler)
    pgque.AsyncWorker(queue="q", consumer="c").handler("*")(handler)


def test_a_handler_that_returns_an_awaitable_has_failed(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c")

    @consumer.on("*")
    def hand_on(message: pgque.Message) -> object:
        return _coroutine(message)

    client.send(subscribed, "x")
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: client.dlq.inspect(subscribed))
    assert "returned an awaitable" in str(client.dlq.inspect(subscribed)[0].dl_reason)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown_handler_policy"):
        pgque.Consumer(queue="q", name="c", unknown_handler_policy="ignore")  # type: ignore[arg-type]


# -- exactly once ------------------------------------------------------------


@pytest.fixture
def ledger(conn: Connection) -> Iterator[str]:
    conn.execute("create table ledger (msg_id bigint, payload text)")
    yield "ledger"
    conn.execute("drop table ledger")


def _record(message: pgque.Message, conn: psycopg.Connection[object]) -> None:
    conn.execute("insert into ledger values (%s, %s)", [message.msg_id, message.payload])


def _ledger(conn: Connection) -> list[str]:
    return [row[0] for row in conn.execute("select payload from ledger order by msg_id")]


def test_a_transactional_handler_commits_with_the_ack(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    client.send_batch(subscribed, "t", ["a", "b", "c"])
    tick(subscribed)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True)

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        _record(message, own)
        assert _ledger(conn) == []  # nobody else sees it before the ack

    with running(consumer):
        wait_until(lambda: len(_ledger(conn)) == 3)
    assert _ledger(conn) == ["a", "b", "c"]
    assert client.receive(subscribed, "c") == []


def test_a_failed_transactional_handler_takes_only_its_own_work_back(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    client.send_batch(subscribed, "t", ["a", "sql", "python", "d"])
    tick(subscribed)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True)

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        _record(message, own)
        if message.payload == "sql":
            own.execute("select 1 / 0")
        if message.payload == "python":
            raise RuntimeError("no")

    with running(consumer):
        wait_until(lambda: len(_ledger(conn)) == 2)
    assert _ledger(conn) == ["a", "d"]
    assert {letter.ev_data for letter in client.dlq.inspect(subscribed)} == {"sql", "python"}


def test_a_transactional_handler_whose_prepared_statement_was_not_kept_has_not_failed(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a pooler in transaction mode."""
    monkeypatch.setattr(errors, "_behind_pooler", threading.Event())
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    sent = [str(n) for n in range(10)]
    client.send_batch(subscribed, "t", sent)
    tick(subscribed)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True)
    lost: list[int] = []

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        if message.payload == "8" and not lost:
            lost.append(message.msg_id)
            own.execute("do $$ begin execute 'deallocate all'; end $$")
        _record(message, own)

    with running(consumer):
        wait_until(lambda: len(_ledger(conn)) == len(sent))
    assert _ledger(conn) == sent
    assert client.dlq.inspect(subscribed) == []
    assert lost


def test_a_transactional_handler_that_catches_an_error_without_a_savepoint_has_failed(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    client.send_batch(subscribed, "t", ["a", "caught", "savepoint", "d"])
    tick(subscribed)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True)

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        _record(message, own)
        with suppress(psycopg.errors.DivisionByZero):
            if message.payload == "caught":
                own.execute("select 1 / 0")
            if message.payload == "savepoint":
                with own.transaction():
                    own.execute("select 1 / 0")

    with running(consumer):
        wait_until(lambda: len(_ledger(conn)) == 3)
    assert _ledger(conn) == ["a", "savepoint", "d"]
    [letter] = client.dlq.inspect(subscribed)
    assert (letter.ev_data, "savepoint" in str(letter.dl_reason)) == ("caught", True)


# -- outcomes that a handler returns or raises ---------------------------------


class _Bounced(pgque.Dead):
    """An outcome of the program's own."""


class _Unfinished(pgque.Retry):
    def __init__(self) -> None:  # without that of Retry
        pass


# By the payload of the message; all others are acknowledged.
_OUTCOMES: dict[str | None, pgque.Retry | pgque.Dead | pgque.Release] = {
    "dead": pgque.Dead("no good"),
    "bounced": _Bounced("no such address"),
    "retry": pgque.Retry(0, "busy"),
    "later": pgque.Retry(retry_after=3600, reason="tomorrow"),
    "retry_after": pgque.Retry(),
    "release": pgque.Release(),
    "unfinished": _Unfinished(),
}
_Delivery = tuple[str | None, int | None, str | None]  # payload, retry_count, last_error
_SENT = ["first", *[str(payload) for payload in _OUTCOMES], "class", "value", "last"]


def _answer(message: pgque.Message, raises: bool) -> object:
    """Return or raise the outcome of a message, with its first delivery."""
    if message.receive_count != 1:
        return None
    if message.payload == "class":
        if raises:
            raise pgque.Dead
        return pgque.Dead
    if message.payload == "value":
        return {"any other value": "is a success"}
    outcome = _OUTCOMES.get(message.payload)
    if outcome is not None and raises:
        raise outcome
    return outcome


def _answering(
    kind: str, dsn: str, queue: str, raises: bool, seen: list[_Delivery], **options: Any
) -> AbstractContextManager[threading.Thread]:
    """Run a consumer whose handler notes each delivery, in the ledger if it is transactional, and answers."""
    if kind == "async":
        consumer = pgque.AsyncConsumer(dsn, queue=queue, consumer="c", **options)

        async def handle(message: pgque.Message, own: Any = None) -> object:
            seen.append((message.payload, message.retry_count, message.last_error))
            if own is not None:
                await own.execute("insert into ledger values (%s, %s)", [message.msg_id, message.payload])
            return _answer(message, raises)

        consumer.handler("*")(handle)
        return threads.running(lambda: asyncio.run(consumer.run()), consumer.stop, 10)
    blocking = pgque.Consumer(dsn, queue=queue, consumer="c", **options)

    @blocking.handler("*")
    def handle_blocking(message: pgque.Message, own: Any = None) -> object:
        seen.append((message.payload, message.retry_count, message.last_error))
        if own is not None:
            _record(message, own)
        return _answer(message, raises)

    return running(blocking)


@pytest.mark.parametrize("raises", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize(
    "options",
    [{}, {"transactional": True}, {"subconsumer": "w"}],
    ids=lambda options: "".join(options) or "plain",
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_handler_may_return_or_raise_an_outcome(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
    kind: str,
    options: dict[str, Any],
    raises: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in a worker. One outcome in the middle of a batch is of that message alone."""
    if "subconsumer" in options:
        client.subscribe_subconsumer(subscribed, "c", "w", convert_normal=True)
    client.admin.set_queue_config(subscribed, "max_retries", 1)
    seen: list[_Delivery] = []
    client.send_batch(subscribed, "t", _SENT)
    tick(subscribed)
    with _answering(kind, dsn, subscribed, raises, seen, retry_after=7200, **options):
        wait_until(lambda: len(seen) == len(_SENT) + 2)
        wait_until(lambda: all(info.current_batch is None for info in client.consumers.get_info(subscribed)))
    waiting: dict[str | None, tuple[str | None, int]] = {}
    for each in client.messages.list(subscribed, "retry"):
        assert each.available_at is not None and each.created_at is not None
        seconds = (each.available_at - each.created_at).total_seconds()
        waiting[each.payload] = (each.last_error, round(seconds / 100) * 100)
    assert [payload for payload, _, _ in seen[: len(_SENT)]] == _SENT
    assert sorted(seen[len(_SENT) :]) == [("release", 0, None), ("retry", 1, "busy")]
    assert {(letter.ev_data, letter.dl_reason) for letter in client.dlq.inspect(subscribed)} == {
        ("dead", "no good"),
        ("bounced", "no such address"),
        ("class", "dead"),
    }
    assert waiting["later"] == ("tomorrow", 3600)
    assert waiting["retry_after"] == (None, 7200)
    error, after = waiting["unfinished"]
    assert "has none of the attributes of Retry" in str(error)
    assert after == 7200
    assert len(waiting) == 3
    assert len(client.messages.list(subscribed)) == 6  # with the dead letters: all others are acknowledged
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    if "transactional" in options:
        # What the handler wrote is committed with the outcome, unless the message is handled again or the
        # outcome was raised.
        kept = [
            "first",
            *([] if raises else ["dead", "bounced", "class"]),
            "value",
            "last",
            "release",
            "retry",
        ]
        assert sorted(_ledger(conn)) == sorted(kept)


class _After(pgque.Retry):
    """A Retry that sets its attributes itself."""

    def __init__(self, after: Any, reason: Any) -> None:
        self.retry_after, self.reason = after, reason


class _Because(pgque.Dead):
    def __init__(self, reason: Any) -> None:
        self.reason = reason


@pytest.mark.parametrize("kind", [pgque.Consumer, pgque.Worker])
def test_an_outcome_that_sets_its_own_attributes_is_of_its_message_alone(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    kind: type[pgque.Consumer] | type[pgque.Worker],
) -> None:
    """The others are acknowledged, and the consumer goes on."""
    bad = "PgqueBadArgumentError: retry_after must be from 0 seconds to ten years"
    outcomes: dict[str | None, tuple[object, str, int]] = {
        "seconds": (_After(50, {"code": 5}), "{'code': 5}", 50),
        "negative": (_After(-5, None), bad, 7200),
        "no time": (_After("soon", None), bad, 7200),
        "too long": (_After(10**12, None), bad, 7200),
        "error": (_Because(ValueError("too old")), "ValueError: too old", 0),
        "bytes": (_Because(b"no"), "b'no'", 0),
    }
    consumer = kind(dsn, queue=subscribed, consumer="c", retry_after=7200)

    @consumer.handler("*")
    def handle(message: pgque.Message) -> object:
        return outcomes.get(message.payload, (None,))[0]

    client.send_batch(subscribed, "t", ["first", *[str(payload) for payload in outcomes], "last"])
    tick(subscribed)
    with threads.running(consumer.run, consumer.stop, 10):
        wait_until(lambda: len(client.dlq.inspect(subscribed)) == 2)
        wait_until(
            lambda: len(client.messages.list(subscribed)) == len(outcomes), "the others are acknowledged"
        )
    found: dict[str | None, tuple[str | None, int]] = {
        letter.ev_data: (letter.dl_reason, 0) for letter in client.dlq.inspect(subscribed)
    }
    for message in client.messages.list(subscribed, "retry"):
        assert message.available_at is not None and message.created_at is not None
        seconds = (message.available_at - message.created_at).total_seconds()
        found[message.payload] = (message.last_error, round(seconds / 10) * 10)
    for payload, (_, reason, after) in outcomes.items():
        text, seconds = found[payload]
        assert str(text).startswith(reason)
        assert seconds == after


def test_an_outcome_counts_though_the_handler_caught_an_error_of_the_database(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    """What the handler wrote cannot be committed then, but no outcome needs that."""
    client.send_batch(subscribed, "t", ["a", "dead", "retry", "d"])
    tick(subscribed)
    consumer = pgque.Consumer(dsn, queue=subscribed, consumer="c", transactional=True)

    @consumer.handler("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> object:
        _record(message, own)
        outcome = _answer(message, raises=False)
        if outcome is not None:
            with suppress(psycopg.errors.DivisionByZero):
                own.execute("select 1 / 0")
        return outcome

    with running(consumer):
        wait_until(lambda: len(_ledger(conn)) == 3)
    assert _ledger(conn) == ["a", "retry", "d"]
    [letter] = client.dlq.inspect(subscribed)
    assert (letter.ev_data, letter.dl_reason) == ("dead", "no good")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_message_that_is_released_again_and_again_is_never_given_up(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, kind: str
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    seen: list[int | None] = []
    release = pgque.Release

    def answer(message: pgque.Message) -> object:
        seen.append(message.retry_count)
        return release if len(seen) < 4 else None

    if kind == "async":
        consumer = pgque.AsyncConsumer(dsn, queue=subscribed, consumer="c")

        async def handle(message: pgque.Message) -> object:
            return answer(message)

        consumer.handler("*")(handle)
        block: AbstractContextManager[threading.Thread] = threads.running(
            lambda: asyncio.run(consumer.run()), consumer.stop, 10
        )
    else:
        blocking = pgque.Consumer(dsn, queue=subscribed, consumer="c")
        blocking.handler("*")(answer)
        block = running(blocking)
    client.send(subscribed, "x")
    tick(subscribed)
    with block:
        wait_until(lambda: len(seen) == 4)
        wait_until(lambda: client.messages.list(subscribed) == [], "the last delivery is acknowledged")
    assert seen == [0] * 4  # none is a retry
    assert client.dlq.inspect(subscribed) == []


def test_work_is_done_exactly_once_although_backends_are_killed_all_the_time(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    ids = client.send_batch(subscribed, "t", [str(n) for n in range(300)])
    tick(subscribed)
    calls = 0
    consumer = pgque.Consumer(
        f"{dsn} application_name=victim", queue=subscribed, name="c", transactional=True, max_messages=20
    )

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        nonlocal calls
        calls += 1
        if calls % 45 == 0:
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'victim'"
            )
        _record(message, own)

    with running(consumer):
        wait_until(lambda: len(_ledger(conn)) >= 300, timeout=60)
    assert [row[0] for row in conn.execute("select msg_id from ledger order by msg_id")] == ids
    assert calls > 300
    assert client.dlq.inspect(subscribed) == []


# -- faults ------------------------------------------------------------


def test_the_consumer_connects_again_after_its_backend_was_terminated(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, conn: Connection
) -> None:
    seen: list[str | None] = []
    consumer = pgque.Consumer(f"{dsn} application_name=cut", queue=subscribed, name="c", poll_interval=600)
    consumer.on("*")(lambda message: seen.append(message.payload))
    with running(consumer):
        for n in range(3):
            pid = _listening(conn, wait_until, "cut")
            conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
            client.send(subscribed, str(n))
            tick(subscribed)
            wait_until(lambda n=n: len(seen) == n + 1, "the message arrives")
    assert seen == ["0", "1", "2"]


@pytest.mark.parametrize("subconsumer", [None, "w1"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_whose_handlers_have_run_is_acked_after_the_connection_was_lost(
    dsn: str,
    client: pgque.PgqueClient,
    queue: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    subconsumer: str | None,
    fails: bool,
) -> None:
    if subconsumer is None:
        client.subscribe(queue, "c")
    else:
        client.subscribe_subconsumer(queue, "c", subconsumer)
    client.admin.set_queue_config(queue, "max_retries", 0)
    seen: list[str | None] = []
    consumer = pgque.Consumer(
        f"{dsn} application_name=cut2", queue=queue, name="c", subconsumer=subconsumer, dead_interval=60
    )

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        if not seen:
            conn.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'cut2'"
            )
        seen.append(message.payload)
        if fails and message.payload == "a":
            raise RuntimeError("no")

    client.send_batch(queue, "t", ["a", "b"])
    tick(queue)
    with running(consumer):
        wait_until(lambda: len(seen) == 2)
        client.send(queue, "c")
        tick(queue)
        wait_until(lambda: "c" in seen)
    assert seen == ["a", "b", "c"]
    assert [letter.dl_reason for letter in client.dlq.inspect(queue)] == ["RuntimeError: no"] * fails


def test_a_consumer_whose_sessions_end_while_handlers_run_does_each_batch_once(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, conn: Connection
) -> None:
    seen: list[str | None] = []
    consumer = pgque.Consumer(
        f"{dsn} application_name=ends", queue=subscribed, name="c", max_messages=2, poll_interval=0.05
    )

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.payload)
        conn.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'ends'"
        )

    sent = [str(n) for n in range(6)]
    for payload in sent:
        client.send(subscribed, payload)
        tick(subscribed)
    with running(consumer):
        wait_until(lambda: len(seen) >= 6, timeout=20)
        wait_until(lambda: client.consumers.get_info(subscribed, "c")[0].pending_events == 0)
    assert seen == sent


def test_a_stop_while_the_connection_is_lost_does_not_forget_the_batch(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, conn: Connection
) -> None:
    consumer = pgque.Consumer(f"{dsn} application_name=cut3", queue=subscribed, name="c")

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        conn.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'cut3'"
        )
        consumer.stop()

    client.send(subscribed, "a")
    tick(subscribed)
    consumer.start()
    assert client.receive(subscribed, "c") == []


class _BillingError(Exception):
    """What a handler makes of an error of the database."""


def test_a_handler_that_wraps_the_loss_of_its_connection_does_not_end_the_consumer(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    calls = 0
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True)

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            conn.execute("select pg_terminate_backend(%s, 5000)", [own.info.backend_pid])
        try:
            _record(message, own)
        except psycopg.Error as error:
            raise _BillingError("no bill") from error

    client.send_batch(subscribed, "t", ["a", "b", "c"])
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: len(_ledger(conn)) == 3)
    assert _ledger(conn) == ["a", "b", "c"]
    assert calls == 5
    assert client.receive(subscribed, "c") == []
    assert client.dlq.inspect(subscribed) == []


def test_a_message_whose_handler_always_loses_the_connection_is_dead_at_last_and_hinders_no_other(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True)

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        _record(message, own)
        if message.payload == "b":  # as idle_in_transaction_session_timeout does, or a crash of the backend
            own.execute("select pg_terminate_backend(pg_backend_pid())")

    client.send_batch(subscribed, "t", ["a", "b", "c"])
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: client.dlq.inspect(subscribed), timeout=20)
        wait_until(lambda: len(_ledger(conn)) == 2)
    assert _ledger(conn) == ["a", "c"]
    [dead] = client.dlq.inspect(subscribed)
    assert (dead.ev_data, dead.dl_reason) == (
        "b",
        "the connection was lost again while this message was handled",
    )


def test_constraints_that_share_a_name_hinder_no_handler(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    conn.execute("create table public.parent_of_two (id int primary key)")
    try:
        for child, how in (("one", "deferrable initially deferred"), ("two", "")):
            conn.execute(
                f"create table public.child_{child} (x int, constraint shared_name foreign key (x)"
                f" references public.parent_of_two {how})".encode()
            )
        consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True)
        consumer.on("*")(_record)
        client.send_batch(subscribed, "t", ["a", "b"])
        tick(subscribed)
        with running(consumer):
            wait_until(lambda: _ledger(conn) == ["a", "b"])
    finally:
        conn.execute("drop table public.child_one, public.child_two, public.parent_of_two")


@pytest.mark.parametrize("statement", ["rollback", "rollback and chain"])
def test_a_handler_that_ends_the_transaction_of_its_batch_takes_no_other_message_with_it(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
    statement: str,
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True, poll_interval=0.05)

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        if message.payload == "ends":
            own.execute(statement.encode())
        else:
            _record(message, own)

    for payload in ("a", "ends", "b"):
        client.send(subscribed, payload)
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: _ledger(conn) == ["a", "b"], timeout=20)
    assert [letter.ev_data for letter in client.dlq.inspect(subscribed)] == ["ends"]
    assert client.receive(subscribed, "c") == []


def _closes(own: psycopg.Connection[Any], kept: list[object]) -> None:
    with own:
        raise ValueError("no good")


def _leaves_a_stream(own: psycopg.Connection[Any], kept: list[object]) -> None:
    rows = own.cursor().stream("select generate_series(1, 100000)")
    for _row in rows:
        raise ValueError("no good")


def _returns_amid_a_stream(own: psycopg.Connection[Any], kept: list[object]) -> None:
    rows = own.cursor().stream("select generate_series(1, 100000)")
    kept.append(rows)
    next(rows)


def _leaves_a_copy(own: psycopg.Connection[Any], kept: list[object]) -> None:
    copy = own.cursor().copy("copy ledger from stdin")
    copy.__enter__()
    kept.append(copy)


@pytest.mark.parametrize("spoil", [_closes, _leaves_a_stream, _returns_amid_a_stream, _leaves_a_copy])
def test_a_handler_that_spoils_its_connection_fails_alone(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
    spoil: Callable[[psycopg.Connection[Any], list[object]], None],
) -> None:
    """Its message is given up in the end, and the queue goes on."""
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True, poll_interval=0.05)
    kept: list[object] = []

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[Any]) -> None:
        if message.payload == "spoils":
            spoil(own, kept)
        else:
            _record(message, own)

    client.send_batch(subscribed, "t", ["a", "spoils", "b"])
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: _ledger(conn) == ["a", "b"], timeout=20)
    assert [letter.ev_data for letter in client.dlq.inspect(subscribed)] == ["spoils"]
    assert client.receive(subscribed, "c") == []


def test_a_message_that_violates_a_deferred_constraint_is_rejected_alone(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: str,
) -> None:
    """The constraint is deferred anew for each message, whatever a handler set."""
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    conn.execute('alter table ledger add constraint "one\'""" unique (payload) deferrable initially deferred')
    conn.execute("alter table ledger add constraint once unique (msg_id) deferrable initially immediate")
    conn.execute("insert into ledger values (0, 'x')")
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", transactional=True)
    checked: list[str] = []

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        if message.payload == "all now":
            own.execute("set constraints all immediate")
        elif message.payload == "all later":
            own.execute("set constraints all deferred")
        elif message.payload == "checked":
            # What is declared as immediate is checked by the statement.
            with suppress(psycopg.errors.UniqueViolation), own.transaction():
                _record(message, own)
                _record(message, own)
                checked.append("not at once")
        else:
            # Deferred: a moment later there is only one.
            own.execute("insert into ledger values (-1, %s)", [message.payload])
            own.execute("delete from ledger where msg_id = -1")
            _record(message, own)

    for payload in ("a", "x", "all now", "b", "all later", "checked", "c", "x"):
        client.send(subscribed, payload)
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: len(client.dlq.inspect(subscribed)) == 2)
    assert _ledger(conn) == ["x", "a", "b", "c"]
    assert checked == []
    assert all("UniqueViolation" in str(letter.dl_reason) for letter in client.dlq.inspect(subscribed))
    assert client.receive(subscribed, "c") == []


def test_a_server_that_cannot_be_reached_is_tried_until_the_consumer_is_stopped() -> None:
    consumer = pgque.Consumer(
        "host=127.0.0.1 port=1 user=x dbname=x", queue="q", name="c", unknown_handler_policy="ack"
    )
    with running(consumer) as thread:
        time.sleep(0.5)
        assert thread.is_alive()


def test_what_trying_again_cannot_help_is_raised(dsn: str, queue: str, fresh_dsn: str) -> None:
    with pytest.raises(pgque.PgqueQueueNotFoundError):
        pgque.Consumer(dsn, queue="no such queue", name="c", unknown_handler_policy="ack").start()
    with pytest.raises(pgque.PgqueConsumerNotFoundError):
        pgque.Consumer(dsn, queue=queue, name="nobody", unknown_handler_policy="ack").start()
    with pytest.raises(pgque.PgqueBadArgumentError):
        pgque.Consumer("no connection string", queue=queue, name="c", unknown_handler_policy="ack").start()
    with pytest.raises(pgque.PgqueVersionError):
        pgque.Consumer(fresh_dsn, queue=queue, name="c", unknown_handler_policy="ack").start()


# -- workers ------------------------------------------------------------


def test_workers_share_the_messages_of_one_consumer(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick, wait_until: Wait
) -> None:
    seen: dict[str, list[int]] = {"w1": [], "w2": []}
    both = threading.Barrier(2, timeout=20)
    workers = []
    for name, own in seen.items():
        client.subscribe_subconsumer(queue, "group", name)
        worker = pgque.Consumer(
            dsn, queue=queue, name="group", subconsumer=name, max_messages=10, dead_interval=60
        )

        @worker.on("*")
        def handle(message: pgque.Message, own: list[int] = own) -> None:
            if not own:
                both.wait()  # each holds a batch at the same time
            own.append(message.msg_id)

        workers.append(worker)
    ids = client.send_batch(queue, "t", [str(n) for n in range(100)])
    tick(queue)
    with running(workers[0]), running(workers[1]):
        wait_until(lambda: len(seen["w1"]) + len(seen["w2"]) == 100)
    assert sorted(seen["w1"] + seen["w2"]) == ids
    assert seen["w1"]
    assert seen["w2"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("transactional", [False, True])
def test_a_batch_that_another_worker_took_over_is_logged(
    dsn: str,
    client: pgque.PgqueClient,
    queue: str,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
    transactional: bool,
    fails: bool,
) -> None:
    for name in ("slow", "quick"):
        client.subscribe_subconsumer(queue, "group", name)
    taken: list[pgque.Message] = []
    consumer = pgque.Consumer(
        dsn, queue=queue, name="group", subconsumer="slow", dead_interval=60, transactional=transactional
    )

    def take_over() -> bool:
        taken.extend(client.receive_coop(queue, "group", "quick", dead_interval=0.1))
        return bool(taken)

    @consumer.on("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object] | None = None) -> None:
        wait_until(take_over, "another worker takes the batch over")
        if fails:
            raise RuntimeError("no")

    sent = client.send(queue, "x")
    tick(queue)
    with running(consumer):
        wait_until(lambda: any("went to another worker" in line for line in caplog.messages))
    assert [message.msg_id for message in taken] == [sent]
    assert client.ack(taken[0].batch_id) == 1


@pytest.mark.parametrize("transactional", [False, True])
def test_a_batch_is_not_taken_over_while_one_handler_runs_longer_than_the_dead_interval(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick, wait_until: Wait, transactional: bool
) -> None:
    for name in ("slow", "quick"):
        client.subscribe_subconsumer(queue, "group", name)
    consumer = pgque.Consumer(
        dsn, queue=queue, name="group", subconsumer="slow", dead_interval=1, transactional=transactional
    )
    seen: list[pgque.Message] = []
    taken: list[pgque.Message] = []

    @consumer.on("*")
    def handle(message: pgque.Message, own: object = None) -> None:
        seen.append(message)
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            taken.extend(client.receive_coop(queue, "group", "quick", dead_interval=1))
            time.sleep(0.1)

    client.send(queue, "x")
    tick(queue)
    with running(consumer):
        wait_until(lambda: bool(seen))
        wait_until(lambda: all(info.current_batch is None for info in client.consumers.get_info(queue)))
    assert (len(seen), taken) == (1, [])


def test_a_subconsumer_with_no_dead_interval_does_not_keep_a_core_busy(
    dsn: str, client: pgque.PgqueClient, queue: str, wait_until: Wait
) -> None:
    checks: list[float] = []

    class Counting(pgque.Consumer):
        def _leases(self) -> list[Any]:
            checks.append(time.monotonic())
            return super()._leases()

    client.subscribe_subconsumer(queue, "c", "a")
    consumer = Counting(
        dsn, queue=queue, consumer="c", subconsumer="a", dead_interval=0, unknown_handler_policy="ack"
    )
    with running(consumer):
        wait_until(lambda: len(checks) > 5)
    assert all(later - earlier > 0.01 for earlier, later in itertools.pairwise(checks[:5]))


def test_leases_are_extended_after_an_unexpected_error_which_is_logged_with_its_traceback(
    dsn: str, client: pgque.PgqueClient, queue: str, wait_until: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    checks: list[int] = []

    class Faulty(pgque.Consumer):
        def _leases(self) -> list[Any]:
            checks.append(len(checks))
            if checks == [0]:
                raise ValueError("a bug")
            return super()._leases()

    client.subscribe_subconsumer(queue, "c", "a")
    consumer = Faulty(
        dsn, queue=queue, consumer="c", subconsumer="a", dead_interval=0.5, unknown_handler_policy="ack"
    )
    with running(consumer):
        wait_until(lambda: len(checks) > 1)
    assert "leases cannot be extended, trying again: ValueError: a bug\nTraceback" in caplog.text


def test_a_consumer_that_reads_on_its_own_has_no_place_for_a_subconsumer(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    worker = pgque.Consumer(dsn, queue=subscribed, name="c", subconsumer="w1")
    seen: list[int] = []
    worker.on("*")(lambda message: seen.append(message.msg_id))
    with pytest.raises(pgque.PgqueQueueInUseError, match="on its own") as refused:
        worker.start()
    assert "register_subconsumer" in str(refused.value.hint)

    assert client.subscribe_subconsumer(subscribed, "c", "w1", convert_normal=True) == 1
    sent = client.send(subscribed, "x")
    tick(subscribed)
    with running(worker):
        wait_until(lambda: seen == [sent])


# -- stopping ------------------------------------------------------------


def test_an_idle_consumer_stops_at_once(
    dsn: str, subscribed: str, conn: Connection, wait_until: Wait
) -> None:
    consumer = pgque.Consumer(
        f"{dsn} application_name=idle",
        queue=subscribed,
        name="c",
        unknown_handler_policy="ack",
        poll_interval=600,
    )
    with running(consumer) as thread:
        _listening(conn, wait_until, "idle")
        consumer.stop()
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "options",
    [{}, {"transactional": True}, {"subconsumer": "w"}],
    ids=lambda options: "".join(options) or "plain",
)
def test_what_was_handled_before_a_stop_is_not_repeated(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    options: dict[str, Any],
) -> None:
    if "subconsumer" in options:
        client.subscribe_subconsumer(subscribed, "c", "w", convert_normal=True)
    seen: list[int] = []
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", **options)

    @consumer.on("*")
    def handle(message: pgque.Message, own: object = None) -> None:
        seen.append(message.msg_id)
        time.sleep(0.05)

    ids = client.send_batch(subscribed, "t", [str(n) for n in range(100)])
    tick(subscribed)
    with running(consumer) as thread:
        wait_until(lambda: bool(seen))
        consumer.stop()
        thread.join(5)
        assert not thread.is_alive()
    assert len(seen) < 100
    left = [(it.msg_id, it.retry_count) for it in _receive(client, subscribed, **options)]
    assert left == [(each, 0) for each in ids[len(seen) :]]


def _receive(
    client: pgque.PgqueClient, queue: str, subconsumer: str | None = None, **_: object
) -> list[pgque.Message]:
    if subconsumer is None:
        return client.receive(queue, "c")
    return client.receive_coop(queue, "c", subconsumer)


_KILLED = """
    import os, sys, pgque

    dsn, queue, transactional = sys.argv[1:]
    consumer = pgque.Consumer(
        dsn, queue=queue, consumer="c", retry_after=0, transactional=transactional == "True"
    )

    @consumer.handler("*")
    def handle(message, own=None):
        print(message.payload, message.retry_count, flush=True)
        if message.payload == "bad":
            os._exit(3)

    consumer.run()
"""


@pytest.mark.parametrize("transactional", [False, True])
def test_a_message_whose_handler_kills_the_process_is_dead_at_last_and_no_other_is_rejected(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, transactional: bool
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 1)
    client.send_batch(subscribed, "t", ["first", "second", "bad", "third"])
    tick(subscribed)
    handled: list[list[str]] = []
    while not client.dlq.inspect(subscribed):  # as a supervisor does
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_KILLED), dsn, subscribed, str(transactional)],
            stdout=subprocess.PIPE,
            text=True,
        )

        def ended(process: subprocess.Popen[str] = process) -> bool:
            return process.poll() is not None or bool(client.dlq.inspect(subscribed))

        wait_until(ended, timeout=20)
        process.terminate()
        handled.append(process.communicate(timeout=20)[0].splitlines())
        assert len(handled) < 8
    [letter] = client.dlq.inspect(subscribed)
    assert (letter.ev_data, letter.ev_retry) == ("bad", 1)
    assert "the process that handled this message ended" in str(letter.dl_reason)
    assert handled[0] == ["first 0", "second 0", "bad 0"]
    # The last process may be stopped before it handles the third message.
    assert {"third 0"} | {line for lines in handled for line in lines} == {
        "first 0",
        "second 0",
        "third 0",
        "bad 0",
        "bad 1",
    }
    assert {message.payload for message in client.receive(subscribed, "c")} <= {"third"}


def test_a_message_that_was_alone_in_one_process_that_ended_is_not_rejected(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    client.send(subscribed, "1")
    tick(subscribed)
    assert len(client.receive(subscribed, "c")) == 1  # as a process that is killed then
    seen: list[tuple[int | None, int | None]] = []
    consumer = pgque.Consumer(dsn, queue=subscribed, consumer="c")

    @consumer.handler("*")
    def handle(message: pgque.Message) -> None:
        seen.append((message.retry_count, message.receive_count))

    with running(consumer):
        wait_until(lambda: seen or client.dlq.inspect(subscribed))
    assert seen == [(0, 2)]


def test_messages_of_a_killed_process_come_one_at_a_time_also_behind_retries_that_were_due_before(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    client.send_batch(subscribed, "t", ["retry", "retry", "retry"])
    tick(subscribed)
    retried = client.receive(subscribed, "c")
    client.nack(retried[0].batch_id, retried, 3600)
    client.ack(retried[0].batch_id)
    client.send_batch(subscribed, "t", ["left", "left"])
    tick(subscribed)
    assert len(client.receive(subscribed, "c")) == 2  # as a process that is killed then
    client.consumers.retry_now(subscribed, "c")
    batches: dict[int, list[str | None]] = {}
    consumer = pgque.Consumer(dsn, queue=subscribed, consumer="c")

    @consumer.handler("*")
    def handle(message: pgque.Message) -> None:
        batches.setdefault(message.batch_id, []).append(message.payload)

    with running(consumer):
        wait_until(lambda: sum(map(len, batches.values())) == 5)
        client.send_batch(subscribed, "t", ["new", "new"])
        tick(subscribed)
        wait_until(lambda: sum(map(len, batches.values())) == 7)
    assert list(batches.values()) == [["retry"]] * 3 + [["left"]] * 2 + [["new", "new"]]


@pytest.mark.parametrize("options", [{}, {"transactional": True}], ids=["plain", "transactional"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_handler_that_calls_exit_has_failed(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    kind: str,
    options: dict[str, Any],
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    client.send_batch(subscribed, "t", ["bad", "good"])
    tick(subscribed)
    seen: list[str | None] = []

    def handle(message: pgque.Message, own: object = None) -> None:
        seen.append(message.payload)
        if message.payload == "bad":
            sys.exit(3)

    with _consuming(kind, dsn, subscribed, handle, **options):
        wait_until(lambda: client.dlq.inspect(subscribed) and seen == ["bad", "good"])
    [letter] = client.dlq.inspect(subscribed)
    assert (letter.ev_data, letter.dl_reason) == ("bad", "SystemExit: 3")


def _consuming(
    kind: str, dsn: str, queue: str, handle: Callable[..., object], **options: Any
) -> AbstractContextManager[threading.Thread]:
    """Run a consumer, which calls a function in its handler, until the end of the block."""
    if kind == "sync":
        blocking = pgque.Consumer(dsn, queue=queue, consumer="c", **options)
        blocking.handler("*")(handle)
        return running(blocking)
    consumer = pgque.AsyncConsumer(dsn, queue=queue, consumer="c", **options)

    @consumer.handler("*")
    async def handle_async(message: pgque.Message, own: object = None) -> object:
        return handle(message, own)

    return threads.running(lambda: asyncio.run(consumer.run()), consumer.stop, 10)


def test_what_is_done_is_finished_though_the_next_batch_is_out_of_reach(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, conn: Connection, reader: Any
) -> None:
    seen: list[int] = []
    takes = "function pgque.receive(text, text, int, text, interval, bigint, bigint, pgque.caller)"
    consumer = pgque.Consumer(reader.dsn, queue=subscribed, name="c", max_messages=1)

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.msg_id)
        conn.execute(f"revoke execute on {takes} from pgque_reader")

    ids = client.send_batch(subscribed, "t", ["1", "2"])
    tick(subscribed)
    try:
        with pytest.raises(pgque.PgquePermissionDeniedError):
            consumer.start()
    finally:
        conn.execute(f"grant execute on {takes} to pgque_reader")
    assert seen == ids[:1]
    assert [message.msg_id for message in client.receive(subscribed, "c")] == ids[1:]


def test_what_is_done_is_finished_while_the_next_delivery_waits(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    conn: Connection,
    connect: Callable[..., Connection],
    wait_until: Wait,
    wait_for_lock: Wait,
) -> None:
    """An outcome has a transaction of its own: else a process that ends while it receives would forget it."""
    seen: list[int] = []
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", max_messages=1)
    locker = connect(autocommit=False)
    [(table,)] = conn.execute("select pgque.current_event_table(%s)", [subscribed]).fetchall()

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        if not seen:
            locker.execute(f"lock table {table}".encode())
        seen.append(message.msg_id)

    ids = client.send_batch(subscribed, "t", ["1", "2"])
    tick(subscribed)
    with running(consumer):
        wait_until(lambda: bool(seen))
        wait_for_lock(_backend(conn, wait_until, f"pgque {subscribed}/c"))
        held = "select current_batch from pgque.get_consumer_info(%s, 'c')"
        assert conn.execute(held, [subscribed]).fetchall() == [(None,)]
        assert seen == ids[:1]
        locker.rollback()
        wait_until(lambda: seen == ids)


@pytest.mark.parametrize("stops", [True, False])
def test_a_batch_is_finished_before_the_next_and_when_the_consumer_stops(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, stops: bool
) -> None:
    seen: list[int] = []
    consumer = pgque.Consumer(dsn, queue=subscribed, name="c", max_messages=2)

    @consumer.on("*")
    def handle(message: pgque.Message) -> None:
        seen.append(message.msg_id)
        if stops and len(seen) == 4:
            consumer.stop()

    ids = client.send_batch(subscribed, "t", [str(n) for n in range(6)])
    tick(subscribed)
    with running(consumer) as thread:
        wait_until(lambda: len(seen) == (4 if stops else 6))
        if stops:
            thread.join(5)
    assert [message.msg_id for message in client.receive(subscribed, "c")] == (ids[4:] if stops else [])


_PROGRAM = """
    import sys, time, signal, pgque
    how, transactional, dsn, queue = sys.argv[1], sys.argv[2] == "yes", sys.argv[3], sys.argv[4]
    before = signal.getsignal(signal.SIGTERM)
    consumer = pgque.Consumer(
        dsn, queue=queue, name="c", transactional=transactional, shutdown_timeout=0.5
    )

    @consumer.on("*")
    def handle(message, conn=None):
        print("handling", flush=True)
        if how == "sleep":
            time.sleep(60)
        elif how == "query":
            conn.execute("select pg_sleep(60)")
        elif how == "quick":
            time.sleep(0.2)

    print("ready", flush=True)
    consumer.start()
    assert signal.getsignal(signal.SIGTERM) == before
    print("stopped", flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("how", "transactional", "left"),
    [("idle", "no", 0), ("locked", "no", 1), ("quick", "no", 0), ("sleep", "no", 1), ("query", "yes", 1)],
)
def test_a_process_stops_soon_after_a_signal(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    how: str,
    transactional: str,
    left: int,
    signum: int,
    conn: Connection,
    wait_until: Wait,
    connect: Callable[..., Connection],
    wait_for_lock: Callable[[int], None],
) -> None:
    if how != "idle":
        client.send(subscribed, "x")
        tick(subscribed)
    holder = connect(autocommit=False)
    if how == "locked":
        holder.execute("select pgque.receive(%s, 'c')", [subscribed])
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(_PROGRAM),
            how,
            transactional,
            f"{dsn} application_name=process",
            subscribed,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        if how == "idle":
            _listening(conn, wait_until, "process")
        elif how == "locked":
            wait_for_lock(_backend(conn, wait_until, "process"))
        else:
            assert process.stdout.readline() == "handling\n"
        os.kill(process.pid, signum)
        try:
            code = process.wait(30)  # it would work for a minute
        finally:
            process.kill()
        rest, errors = process.stdout.read(), process.stderr.read()
    assert (code, rest) == (0, "stopped\n"), errors
    holder.rollback()
    assert len(client.receive(subscribed, "c")) == left


# -- async ------------------------------------------------------------


def test_the_async_consumer_wakes_handles_retries_and_stops(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, conn: Connection, ledger: str
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)

    async def main() -> None:
        consumer = pgque.AsyncConsumer(dsn, queue=subscribed, name="c", poll_interval=600, transactional=True)

        @consumer.on("*")
        async def handle(message: pgque.Message, own: psycopg.AsyncConnection[object]) -> None:
            await own.execute("insert into ledger values (%s, %s)", [message.msg_id, message.payload])
            await asyncio.sleep(0)
            if message.payload == "bad":
                raise RuntimeError("no")

        task = asyncio.create_task(consumer.start())
        try:
            for n in range(1, 4):
                await asyncio.to_thread(client.send_batch, subscribed, "t", ["good", "bad"])
                await asyncio.to_thread(tick, subscribed)
                deadline = time.monotonic() + 30
                while len(await asyncio.to_thread(_ledger, conn)) < n:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.01)
        finally:
            consumer.stop()
            await asyncio.wait_for(task, 5)

    asyncio.run(main())
    assert _ledger(conn) == ["good"] * 3
    assert [letter.dl_reason for letter in client.dlq.inspect(subscribed)] == ["RuntimeError: no"] * 3


def test_the_async_consumer_connects_again(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, conn: Connection, wait_until: Wait
) -> None:
    seen: list[str | None] = []

    async def main() -> None:
        consumer = pgque.AsyncConsumer(
            f"{dsn} application_name=acut", queue=subscribed, name="c", poll_interval=600
        )

        @consumer.on("*")
        async def handle(message: pgque.Message) -> None:
            seen.append(message.payload)

        task = asyncio.create_task(consumer.start())
        for n in range(2):
            pid = await asyncio.to_thread(_listening, conn, wait_until, "acut")
            conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
            client.send(subscribed, str(n))
            tick(subscribed)
            await asyncio.to_thread(wait_until, lambda n=n: len(seen) == n + 1)
        consumer.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(main())
    assert seen == ["0", "1"]


def test_a_plain_function_as_an_async_handler_is_named_in_the_error(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    client.send(subscribed, "x")
    tick(subscribed)

    async def main() -> None:
        consumer = pgque.AsyncConsumer(dsn, queue=subscribed, name="c")
        consumer.on("*")(lambda message: None)  # type: ignore[type-var]
        task = asyncio.create_task(consumer.start())
        await asyncio.to_thread(wait_until, lambda: client.dlq.inspect(subscribed))
        consumer.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(main())
    reason = str(client.dlq.inspect(subscribed)[0].dl_reason)
    assert "has to be a coroutine function" in reason
    assert "NoneType" in reason


def test_stopping_an_async_consumer_in_a_batch_leaves_its_loop_running(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick
) -> None:
    ids = client.send_batch(subscribed, "t", [str(n) for n in range(100)])
    tick(subscribed)
    seen: list[int] = []

    async def main() -> str:
        consumer = pgque.AsyncConsumer(dsn, queue=subscribed, name="c")
        stopped = asyncio.Event()

        async def live() -> str:
            await stopped.wait()
            return "alive"

        @consumer.on("*")
        async def handle(message: pgque.Message) -> None:
            seen.append(message.msg_id)
            consumer.stop()
            await asyncio.sleep(0.05)

        other = asyncio.create_task(live())
        await consumer.start()
        stopped.set()
        return await other

    try:
        assert asyncio.run(main()) == "alive"
    except KeyboardInterrupt:
        pytest.fail("it ended the loop")
    assert 0 < len(seen) < 100
    assert [message.msg_id for message in client.receive(subscribed, "c")] == ids[len(seen) :]


@pytest.mark.parametrize("transactional", [False, True])
def test_a_handler_that_waited_for_something_cancelled_has_failed(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, transactional: bool
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    client.send_batch(subscribed, "t", ["bad", "good"])
    tick(subscribed)
    seen: list[str | None] = []

    async def main() -> None:
        consumer = pgque.AsyncConsumer(dsn, queue=subscribed, name="c", transactional=transactional)
        shared = asyncio.create_task(asyncio.Event().wait())

        @consumer.on("*")
        async def handle(message: pgque.Message, own: object = None) -> None:
            if message.payload == "bad":
                asyncio.get_running_loop().call_soon(shared.cancel)
                await shared
            seen.append(message.payload)

        task = asyncio.create_task(consumer.start())
        await asyncio.to_thread(wait_until, lambda: client.dlq.inspect(subscribed))
        assert not task.done()
        consumer.stop()
        await asyncio.wait_for(task, 5)

    asyncio.run(main())
    assert seen == ["good"]
    [letter] = client.dlq.inspect(subscribed)
    assert (letter.ev_data, letter.dl_reason) == ("bad", "CancelledError: ")


@pytest.mark.parametrize("transactional", [False, True])
def test_a_cancelled_consumer_ends_and_its_batch_is_redelivered(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, transactional: bool
) -> None:
    sent = client.send(subscribed, "x")
    tick(subscribed)

    async def main() -> None:
        consumer = pgque.AsyncConsumer(dsn, queue=subscribed, name="c", transactional=transactional)
        began = asyncio.Event()

        @consumer.on("*")
        async def handle(message: pgque.Message, own: object = None) -> None:
            began.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(consumer.start())
        await asyncio.wait_for(began.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)

    asyncio.run(main())
    assert [(m.msg_id, m.retry_count) for m in client.receive(subscribed, "c")] == [(sent, 0)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_handler_that_hangs_after_a_stop(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, signum: int
) -> None:
    sent = client.send(subscribed, "x")
    tick(subscribed)

    async def main() -> None:
        consumer = pgque.AsyncConsumer(dsn, queue=subscribed, name="c")
        began = asyncio.Event()

        @consumer.on("*")
        async def handle(message: pgque.Message) -> None:
            began.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(consumer.start())
        await asyncio.wait_for(began.wait(), 10)
        consumer.stop()
        while not task.done():  # until one of them is a second one, half a second after the first
            os.kill(os.getpid(), signum)
            await asyncio.wait([task], timeout=0.3)
        await task

    asyncio.run(asyncio.wait_for(main(), 10))
    assert [(m.msg_id, m.retry_count) for m in client.receive(subscribed, "c")] == [(sent, 0)]


def test_a_signal_stops_all_that_run_in_a_loop_and_the_handlers_are_put_back_behind_the_last(
    dsn: str, client: pgque.PgqueClient, subscribed: str
) -> None:
    client.subscribe(subscribed, "w")
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        first = pgque.AsyncConsumer(dsn, queue=subscribed, name="c", unknown_handler_policy="ack")
        second = pgque.AsyncConsumer(dsn, queue=subscribed, name="c", unknown_handler_policy="ack")
        worker = pgque.AsyncWorker(dsn, queue=subscribed, consumer="w", unknown_handler_policy="ack")
        tasks = [asyncio.create_task(work) for work in (first.start(), second.start(), worker.run())]
        await asyncio.sleep(0)
        first.stop()
        await asyncio.wait_for(tasks[0], 5)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)

    assert before not in (signal.SIG_DFL, signal.SIG_IGN)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_the_program_gave_to_the_loop_is_called_as_well(dsn: str, subscribed: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, told.set)
        for _ in range(2):
            consumer = pgque.AsyncConsumer(dsn, queue=subscribed, name="c", unknown_handler_policy="ack")
            task = asyncio.create_task(consumer.start())
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(asyncio.gather(task, told.wait()), 5)
            told.clear()
        # The consumer has ended, and the handler is still there.
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(told.wait(), 5)
        assert loop.remove_signal_handler(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGTERM, before)


_ASYNC_PROGRAM = """
    import asyncio, sys, pgque

    async def main(dsn, queue):
        consumer = pgque.AsyncConsumer(dsn, queue=queue, name="c", shutdown_timeout=0.5)

        @consumer.on("*")
        async def handle(message):
            print("handling", flush=True)
            await asyncio.sleep(60)

        await consumer.start()
        print("stopped", flush=True)

    asyncio.run(main(*sys.argv[1:]))
"""


def test_an_async_process_stops_soon_after_a_signal(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick
) -> None:
    client.send(subscribed, "x")
    tick(subscribed)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_ASYNC_PROGRAM), dsn, subscribed],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "handling\n"
        process.terminate()
        try:
            assert process.wait(30) == 0  # it would work for a minute
        finally:
            process.kill()
        assert process.stdout.read() == "stopped\n"
    assert len(client.receive(subscribed, "c")) == 1
