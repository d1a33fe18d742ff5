"""What a Worker and a Consumer have in common: options, outcomes, hooks, transactions and stops."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgque
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]
Kind = type[pgque.Worker] | type[pgque.Consumer]

both = pytest.mark.parametrize("kind", [pgque.Worker, pgque.Consumer])


@pytest.fixture
def subscribed(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    return queue


@pytest.fixture
def ledger(conn: Connection) -> Iterator[None]:
    conn.execute("create table ledger (payload text)")
    yield
    conn.execute("drop table ledger")


def _record(message: pgque.Message, own: psycopg.Connection[object]) -> None:
    own.execute("insert into ledger values (%s)", [message.payload])


def _ledger(conn: Connection) -> list[str]:
    return sorted(row[0] for row in conn.execute("select payload from ledger"))


def running(worker: pgque.Worker | pgque.Consumer) -> AbstractContextManager[threading.Thread]:
    return threads.running(worker.run, worker.stop, 20)


def _send(client: pgque.PgqueClient, queue: str, tick: Tick, *payloads: str) -> None:
    client.send_batch(queue, "t", payloads)
    tick(queue)


def _states(client: pgque.PgqueClient, queue: str) -> dict[str | None, str]:
    return {message.payload: message.status for message in client.messages.list(queue)}


# -- options ------------------------------------------------------------


@both
def test_a_rejected_message_is_redelivered_as_the_queue_says(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, kind: Kind
) -> None:
    client.admin.set_queue_config(subscribed, "retry_backoff", '{"base": 600}')
    worker = kind(dsn, queue=subscribed, consumer="c")

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        raise RuntimeError("no")

    _send(client, subscribed, tick, "x")
    with running(worker):
        wait_until(lambda: client.messages.list(subscribed, "retry"))
    [message] = client.messages.list(subscribed, "retry")
    assert message.available_at is not None and message.created_at is not None
    assert (message.available_at - message.created_at).total_seconds() > 590


@both
def test_acknowledged_messages_are_archived_if_that_is_asked_for(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: Kind
) -> None:
    worker = kind(dsn, queue=subscribed, consumer="c", archive=True)

    @worker.handler("*")
    def handle(message: pgque.Message) -> object:
        return pgque.Dead("no") if message.payload == "dead" else None

    _send(client, subscribed, tick, "a", "dead", "b")
    worker.run(until_idle=True)
    assert sorted(str(message.payload) for message in client.archived.list(subscribed)) == ["a", "b"]
    assert [letter.ev_data for letter in client.dlq.inspect(subscribed)] == ["dead"]
    assert all(info.current_batch is None for info in client.consumers.get_info(subscribed))


@both
def test_as_many_handlers_run_at_a_time_as_are_asked_for(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: Kind
) -> None:
    together = threading.Barrier(3, timeout=20)
    worker = kind(dsn, queue=subscribed, consumer="c", concurrency=3)
    worker.handler("*")(lambda message: together.wait())
    _send(client, subscribed, tick, *"abcdef")
    worker.run(until_idle=True)
    assert client.messages.list(subscribed) == []


def test_a_consumer_handles_its_messages_in_order_also_of_several_queues(
    dsn: str, client: pgque.PgqueClient, new_queue: Callable[[], str], tick: Tick
) -> None:
    names = {new_queue(): 5.0, new_queue(): 1.0}
    sent: dict[str | None, list[str]] = {}
    for number, queue in enumerate(names):
        client.subscribe(queue, "c")
        sent[queue] = [f"{number}.{n}" for n in range(25)]
        _send(client, queue, tick, *sent[queue])
    seen: dict[str | None, list[str | None]] = {queue: [] for queue in names}
    consumer = pgque.Consumer(dsn, queues=names, consumer="c", max_messages=10)
    consumer.handler("*")(lambda message: seen[message.queue].append(message.payload))
    consumer.run(until_idle=True)
    assert seen == sent


@both
def test_hooks_run_around_handlers(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: Kind
) -> None:
    seen: list[tuple[str, object]] = []
    worker = kind(dsn, queue=subscribed, consumer="c", concurrency=1, retry_after=600)
    worker.before(lambda message: seen.append(("before", message.payload)))
    worker.after(lambda message, returned: seen.append(("after", returned)))
    worker.error(lambda message, error: seen.append(("error", str(error))))

    @worker.handler("*")
    def handle(message: pgque.Message) -> str:
        if message.payload == "bad":
            raise RuntimeError("no")
        return "done"

    _send(client, subscribed, tick, "good", "bad")
    worker.run(until_idle=True)
    assert seen == [("before", "good"), ("after", "done"), ("before", "bad"), ("error", "no")]


@both
def test_a_recurring_message_is_registered_by_the_decorator(
    dsn: str, client: pgque.PgqueClient, subscribed: str, kind: Kind
) -> None:
    worker = kind(dsn, queue=subscribed, consumer="c")
    worker.every("0 3 * * *", type="nightly")(lambda message: None)
    worker.run(until_idle=True)
    assert [each.cron for each in client.recurring.list() if each.queue_name == subscribed] == ["0 3 * * *"]


@both
def test_a_handler_that_runs_too_long_is_rejected_and_the_next_message_is_handled(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait, kind: Kind
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    release = threading.Event()
    seen: list[str | None] = []
    worker = kind(dsn, queue=subscribed, consumer="c", concurrency=1, handler_timeout=0.3)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        if message.payload == "hangs":
            release.wait(20)
        seen.append(message.payload)

    _send(client, subscribed, tick, "hangs", "next")
    with running(worker):
        wait_until(lambda: seen == ["next"] and len(client.messages.list(subscribed)) == 1)
        release.set()
    assert "handler_timeout" in str(client.dlq.inspect(subscribed)[0].dl_reason)


@both
def test_signs_of_life_are_given(
    dsn: str, subscribed: str, wait_until: Wait, kind: Kind, tmp_path: Path
) -> None:
    file = tmp_path / "alive"
    worker = kind(dsn, queue=subscribed, consumer="c", liveness_file=file, unknown_handler_policy="ack")
    with running(worker):
        wait_until(file.exists)


@pytest.mark.parametrize(
    ("kind", "option", "reason"),
    [
        (pgque.Worker, {"subconsumer": "a"}, "share their consumer by leases"),
        (pgque.Worker, {"dead_interval": 60}, "redelivered when its leases expire"),
        (pgque.Consumer, {"visibility_timeout": 60}, "stays open until it is reported"),
        (pgque.Consumer, {"worker": "a"}, "has no workers"),
        (pgque.Consumer, {"use": "processes"}, "each would get its batch"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_option_that_cannot_apply_is_refused_with_its_reason(
    kind: Kind, option: dict[str, Any], reason: str, is_async: bool
) -> None:
    made: Any = getattr(pgque, f"Async{kind.__name__}") if is_async else kind
    with pytest.raises(pgque.PgqueBadArgumentError, match=reason) as refused:
        made(queue="q", consumer="c", **option)
    assert next(iter(option)) in str(refused.value) and refused.value.hint
    with pytest.raises(TypeError, match="no argument 'unknown'"):
        made(queue="q", consumer="c", unknown=1)


_OPTIONS: dict[str, Any] = {
    "queues": {"q": 2.0, "r": 1.0},
    "priority": "strict",
    "consumer": "c",
    "prefetch": 9,
    "max_bytes": 8,
    "min_interval": 7,
    "poll_interval": 6,
    "retry_after": 5,
    "archive": True,
    "transactional": True,
    "unknown_handler_policy": "ack",
    "shutdown_timeout": 4,
    "handler_timeout": 3,
    "bad_payload": "retry",
    "encoder": str,
    "decoder": bytes.decode,
    "command_timeout": 2,
}


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (pgque.Worker, {"visibility_timeout": 1}),
        (pgque.Consumer, {"dead_interval": 1}),
    ],
)
def test_the_copy_that_a_process_or_a_test_gets_has_all_settings(kind: Kind, own: dict[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters.values()
    names = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    where_it_runs = {"queue", "name", "use", "concurrency", "max_messages", "liveness_file"}
    where_it_runs |= {"worker", "subconsumer"}
    assert names - where_it_runs == _OPTIONS.keys() | own.keys()
    copy: Any = kind(**kind(**_OPTIONS, **own)._settings())
    assert {name: getattr(copy, name) for name in names - where_it_runs} == {**_OPTIONS, **own}


# -- retries by class of error ------------------------------------------------


@pytest.mark.parametrize("transactional", [False, True])
@both
def test_errors_are_retried_or_given_up_by_their_class(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: Kind, transactional: bool
) -> None:
    worker = kind(dsn, queue=subscribed, consumer="c", retry_after=600, transactional=transactional)
    errors: dict[str | None, BaseException] = {
        "listed": ConnectionResetError(),
        "more special": ConnectionAbortedError(),
        "not listed": KeyError(),
        "exit": SystemExit(1),
        "outcome": pgque.Retry(),
    }

    @worker.handler("*", retry_on=OSError, dead_on=[ConnectionAbortedError, ValueError])
    def handle(message: pgque.Message, own: object = None) -> None:
        raise errors[message.payload]

    @worker.handler("default", dead_on=ValueError)
    def handle_default(message: pgque.Message, own: object = None) -> None:
        raise errors[message.payload]

    client.send(subscribed, "not listed", type="default")
    _send(client, subscribed, tick, *map(str, errors))
    worker.run(until_idle=True)
    found = {(message.type, message.payload): message.status for message in client.messages.list(subscribed)}
    assert found == {
        ("default", "not listed"): "retry",
        ("t", "listed"): "retry",
        ("t", "more special"): "dead",
        ("t", "not listed"): "dead",
        ("t", "exit"): "retry",
        ("t", "outcome"): "retry",
    }


@both
def test_each_retry_has_its_pause_and_the_last_pause_is_that_of_all_further_ones(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: Kind
) -> None:
    worker = kind(dsn, queue=subscribed, consumer="c", retry_after=5)

    @worker.handler("*", backoff=(600, 6000))
    def handle(message: pgque.Message) -> object:
        if message.payload == "raises":
            raise RuntimeError("no")
        return pgque.Retry()

    pauses: dict[str | None, list[float]] = {"raises": [], "returns": []}
    _send(client, subscribed, tick, "raises", "returns")
    for _ in range(3):
        worker.run(until_idle=True)
        now = datetime.now(timezone.utc)
        for message in client.messages.list(subscribed, "retry"):
            assert message.available_at is not None
            pauses[message.payload].append(round((message.available_at - now).total_seconds(), -2))
        client.consumers.retry_now(subscribed, "c")
        client.admin.maint()
        tick(subscribed)
    assert pauses == {"raises": [600, 6000, 6000], "returns": [600, 6000, 6000]}


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"retry_on": "ConnectionError"}, TypeError, "retry_on .* not 'ConnectionError'"),
        ({"dead_on": [int]}, TypeError, "dead_on"),
        ({"backoff": -1}, pgque.PgqueBadArgumentError, "backoff"),
        ({"backoff": ()}, pgque.PgqueBadArgumentError, "backoff"),
    ],
)
def test_what_is_no_class_of_errors_and_no_pause_is_refused(
    options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        pgque.Worker(queue="q", consumer="c").handler("t", **options)


# -- transactions ------------------------------------------------------------


@both
def test_what_a_handler_writes_is_committed_with_its_outcome_exactly_once(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: None,
    kind: Kind,
) -> None:
    """Although the connections of handlers are killed again and again."""
    calls = 0
    worker = kind(
        f"{dsn} application_name=victim",
        queue=subscribed,
        consumer="c",
        transactional=True,
        concurrency=1 if kind is pgque.Consumer else 3,
        retry_after=0,
    )

    @worker.handler("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        nonlocal calls
        calls += 1
        if calls in (20, 60, 100):
            with psycopg.connect(dsn, autocommit=True) as other:
                other.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'victim'"
                )
        _record(message, own)

    sent = sorted(str(n) for n in range(100))
    _send(client, subscribed, tick, *sent)
    with running(worker):
        wait_until(lambda: client.messages.list(subscribed) == [], timeout=30)
    assert _ledger(conn) == sent
    assert calls > len(sent)


@both
def test_a_transactional_handler_keeps_what_it_wrote_unless_its_message_comes_again(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    conn: Connection,
    ledger: None,
    kind: Kind,
) -> None:
    worker = kind(dsn, queue=subscribed, consumer="c", transactional=True, retry_after=600)

    @worker.handler("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> object:
        _record(message, own)
        if message.payload == "caught":
            with suppress(psycopg.errors.DivisionByZero):
                own.execute("select 1 / 0")
        if message.payload == "raised":
            raise RuntimeError("no")
        return {"dead": pgque.Dead, "retry": pgque.Retry}.get(str(message.payload))

    _send(client, subscribed, tick, "done", "dead", "retry", "raised", "caught", "last")
    worker.run(until_idle=True)
    assert _ledger(conn) == ["dead", "done", "last"]
    assert _states(client, subscribed) == {
        "dead": "dead",
        "retry": "retry",
        "raised": "retry",
        "caught": "retry",
    }


@both
def test_a_transactional_handler_that_runs_too_long_is_rolled_back(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: None,
    kind: Kind,
) -> None:
    client.admin.set_queue_config(subscribed, "max_retries", 0)
    worker = kind(dsn, queue=subscribed, consumer="c", transactional=True, concurrency=1, handler_timeout=0.5)
    ended: list[BaseException] = []

    @worker.handler("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        _record(message, own)
        if message.payload == "hangs":
            try:
                own.execute("select pg_sleep(60)")
            except BaseException as error:
                ended.append(error)
                raise

    _send(client, subscribed, tick, "first", "hangs", "last")
    with running(worker):
        wait_until(lambda: _ledger(conn) == ["first", "last"] and _states(client, subscribed))
        wait_until(lambda: ended, "its statement is given up")
    assert _states(client, subscribed) == {"hangs": "dead"}


def test_handlers_behind_one_that_runs_too_long_are_called_once(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    """And not in its transaction as well, which is lost."""
    release = threading.Event()
    calls: list[str | None] = []
    consumer = pgque.Consumer(
        f"{dsn} application_name=shared",
        queue=subscribed,
        consumer="c",
        transactional=True,
        handler_timeout=0.3,
        retry_after=600,
    )

    @consumer.handler("*")
    def handle(message: pgque.Message, own: object) -> None:
        calls.append(message.payload)
        if message.payload == "hangs":
            release.wait(20)

    open_ones = "select from pg_stat_activity where application_name = 'shared' and xact_start is not null"
    _send(client, subscribed, tick, "hangs", "x", "y")
    with running(consumer):
        wait_until(lambda: _states(client, subscribed) == {"hangs": "retry"})
        release.set()
        wait_until(lambda: client.conn.execute(open_ones).fetchall() == [])
    assert calls == ["hangs", "x", "y"]


@both
def test_a_conflict_with_another_transaction_is_no_failure_of_a_message(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: Kind
) -> None:
    """As of the acks of one batch, where the default isolation level is SERIALIZABLE."""
    worker = kind(
        f"{dsn} options='-c default_transaction_isolation=serializable'",
        queue=subscribed,
        consumer="c",
        transactional=True,
        concurrency=8,
        retry_after=600,
    )
    worker.handler("*")(lambda message, own: own.execute("select pg_sleep(0.002)"))
    _send(client, subscribed, tick, *map(str, range(80)))
    worker.run(until_idle=True)
    assert _states(client, subscribed) == {}


def test_what_was_written_for_a_message_that_another_worker_got_is_rolled_back(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    conn: Connection,
    ledger: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = pgque.Worker(dsn, queue=subscribed, consumer="c", transactional=True, visibility_timeout=600)

    @worker.handler("*")
    def handle(message: pgque.Message, own: psycopg.Connection[object]) -> None:
        _record(message, own)
        client.set_visibility(message.batch_id, 0)
        assert client.receive(subscribed, "c", worker="other")

    _send(client, subscribed, tick, "x")
    with running(worker):
        wait_until(lambda: "does not count" in caplog.text)
    assert _ledger(conn) == []
    assert _states(client, subscribed) == {"x": "processing"}


def test_an_async_worker_gives_its_handlers_a_transaction(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, conn: Connection, ledger: None
) -> None:
    async def main() -> None:
        worker = pgque.AsyncWorker(dsn, queue=subscribed, consumer="c", transactional=True, retry_after=600)

        @worker.handler("*")
        async def handle(message: pgque.Message, own: psycopg.AsyncConnection[object]) -> None:
            await own.execute("insert into ledger values (%s)", [message.payload])
            if message.payload == "bad":
                raise RuntimeError("no")

        await worker.run(until_idle=True)

    _send(client, subscribed, tick, "a", "bad", "b")
    asyncio.run(main())
    assert _ledger(conn) == ["a", "b"]
    assert _states(client, subscribed) == {"bad": "retry"}


# -- stops ------------------------------------------------------------

_STOPPED = """
    import sys, time, pgque

    kind, transactional, dsn, queue = sys.argv[1:]
    worker = getattr(pgque, kind)(
        dsn, queue=queue, consumer="c", concurrency=1, transactional=transactional == "True"
    )

    @worker.handler("*")
    def handle(message, own=None):
        print(message.payload, flush=True)
        if message.payload == "slow":
            time.sleep(1.2)

    worker.run()
"""


@pytest.mark.parametrize("transactional", [False, True])
@both
def test_a_stop_repeats_no_message_whose_handler_was_started(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    kind: Kind,
    transactional: bool,
) -> None:
    """Also of a handler that runs for longer than half a second after the signal."""
    _send(client, subscribed, tick, "quick", "slow", "not started")
    with subprocess.Popen(
        [
            *(sys.executable, "-c", textwrap.dedent(_STOPPED)),
            *(kind.__name__, str(transactional), dsn, subscribed),
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().strip(), process.stdout.readline().strip()]
        os.kill(process.pid, signal.SIGTERM)
        seen += process.communicate(timeout=20)[0].split()
    assert (process.returncode, seen) == (0, ["quick", "slow"])
    worker = kind(dsn, queue=subscribed, consumer="c")
    worker.handler("*")(lambda message: seen.append(str(message.payload)))
    worker.run(until_idle=True)
    assert seen == ["quick", "slow", "not started"]


def test_what_a_consumer_has_done_is_reported_while_the_rest_of_its_batch_is_handled(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, wait_until: Wait
) -> None:
    """So that it is not repeated if the process is killed."""
    release = threading.Event()
    consumer = pgque.Consumer(dsn, queue=subscribed, consumer="c")

    @consumer.handler("*")
    def handle(message: pgque.Message) -> None:
        if message.payload == "slow":
            release.wait(20)

    _send(client, subscribed, tick, "a", "b", "slow", "c")
    with running(consumer):
        wait_until(lambda: set(_states(client, subscribed)) == {"slow", "c"})
        release.set()
        wait_until(lambda: client.messages.list(subscribed) == [])


@both
def test_a_stop_with_nothing_in_hand_waits_for_no_lock(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    connect: Callable[..., Connection],
    kind: Kind,
) -> None:
    options: dict[str, Any] = {"worker": "other"} if kind is pgque.Worker else {}
    _send(client, subscribed, tick, "x")
    holder = pgque.PgqueClient(connect(autocommit=False))
    assert holder.receive(subscribed, "c", **options)  # a delivery locks the consumer
    worker = kind(f"{dsn} application_name=waits", queue=subscribed, consumer="c")
    worker.handler("*")(lambda message: None)
    waiting = "select from pg_stat_activity where application_name = 'waits' and wait_event_type = 'Lock'"
    with running(worker) as thread:
        wait_until(lambda: client.conn.execute(waiting).fetchall())
        worker.stop()
        thread.join(15)
        assert not thread.is_alive()
    holder.conn.rollback()


# -- what a fault leaves ------------------------------------------------------------


def test_what_was_received_over_a_connection_that_is_lost_then_comes_again(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    connect: Callable[..., Connection],
    wait_for_lock: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """
    holder: a delivery locks the consumer
    worker: its receive waits for that longer than half a lease
    locker: waits for the table behind the worker
    result: the receive returns a message, and the worker loses the connection while it extends the lease
    """
    seen: list[str | None] = []
    _send(client, subscribed, tick, "x")
    holder, locker = connect(autocommit=False), connect(autocommit=False)
    assert pgque.PgqueClient(holder).receive(subscribed, "c", worker="other")
    worker = pgque.Worker(
        f"{dsn} application_name=waits",
        queue=subscribed,
        consumer="c",
        visibility_timeout=1,
        command_timeout=1.5,
    )
    worker.handler("*")(lambda message: seen.append(message.payload))
    waiting = "select from pg_stat_activity where application_name = 'waits' and wait_event_type = 'Lock'"
    long_waiting = f"{waiting} and clock_timestamp() > query_start + interval '0.6 s'"
    with running(worker):
        wait_until(lambda: client.conn.execute(waiting).fetchall())
        lock = threading.Thread(
            target=locker.execute, args=["lock table pgque.subscriber in access exclusive mode"], daemon=True
        )
        lock.start()
        wait_for_lock(locker.info.backend_pid)
        wait_until(lambda: client.conn.execute(long_waiting).fetchall())
        holder.rollback()
        lock.join(20)
        wait_until(lambda: "has not answered" in caplog.text)
        locker.rollback()
        wait_until(lambda: seen)
    assert seen == ["x"]


@both
def test_a_worker_that_ended_by_an_error_works_when_it_is_run_again(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    wait_until: Wait,
    reader: Any,
    conn: Connection,
    kind: Kind,
) -> None:
    """Although a handler of the first run never returns."""
    release = threading.Event()
    calls: list[str | None] = []
    own: dict[str, Any] = {"visibility_timeout": 1} if kind is pgque.Worker else {}
    worker = kind(reader.dsn, queue=subscribed, consumer="c", concurrency=2, shutdown_timeout=0.1, **own)

    @worker.handler("*")
    def handle(message: pgque.Message) -> None:
        calls.append(message.payload)
        if calls == ["hangs"]:
            release.wait(30)
        elif calls == ["hangs", "revokes"]:
            conn.execute(f"revoke pgque_reader from {reader.name}")

    _send(client, subscribed, tick, "hangs", "revokes")
    with pytest.raises(pgque.PgquePermissionDeniedError):
        worker.run()
    conn.execute(f"grant pgque_reader to {reader.name}")
    with running(worker):
        wait_until(lambda: client.messages.list(subscribed) == [], timeout=20)
    release.set()


def test_a_cancellation_that_comes_with_the_outcome_of_a_handler_ends_an_async_worker(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick
) -> None:
    """In whichever step of the event loop: asyncio.wait_for() of Python 3.10 and 3.11 forgets it in one."""

    async def cancelled_after(steps: int) -> bool:
        worker = pgque.AsyncWorker(dsn, queue=subscribed, consumer="c")
        task = asyncio.ensure_future(worker.run())

        def step(left: int) -> None:
            if left == 0:
                task.cancel()
            else:
                asyncio.get_running_loop().call_soon(step, left - 1)

        @worker.handler("*")
        async def handle(message: pgque.Message) -> None:
            await asyncio.sleep(0.1)
            step(steps)

        _send(client, subscribed, tick, "x")
        await asyncio.wait([task], timeout=10)
        worker.stop()
        with suppress(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert [steps for steps in range(6) if not asyncio.run(cancelled_after(steps))] == []
