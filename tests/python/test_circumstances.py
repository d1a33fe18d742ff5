"""Ticker, workers, consumers, command line and page do their work in the circumstances of users.

A circumstance is a setting of the server, the way to it, or something that happens while all of them run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgque
import pgque.web
from conftest import Role
from faults.clusters import programs_of, started
from pgque import embedded
from pgque.cli import main
from pgque.ops.ticker import run_ticker
from support import pgbouncer, servers, threads
from support.pages import Browser, text
from support.servers import TestServer

pytestmark = pytest.mark.pgbouncer

Connection = psycopg.Connection[tuple[Any, ...]]
Wait = Callable[..., None]

USER, PASSWORD = pgbouncer.USER, pgbouncer.PASSWORD
SENT = 4  # messages before, and as many after what happens


@dataclass
class Place:
    """A database with pgque, the way of a role to it, and what happens there."""

    admin: Connection
    dsn: str
    direct: str
    role: Role  # with the password that is valid now
    happens: Callable[[], AbstractContextManager[object]] = nullcontext
    logs: frozenset[str] = frozenset()  # words of warnings that belong to it
    has_conflicts: bool = False  # whether statements of handlers may fail with 40001, which is theirs
    tell: Callable[[Callable[[], object], str], None] = field(default=lambda condition, what: None)


@pytest.fixture(scope="module")
def process(server: TestServer) -> Iterator[embedded.Server]:
    """A server whose settings are those of a stock one, since circumstances change the whole server."""
    with started(programs_of(server, "postgres")) as process:
        yield process


@pytest.fixture
def place(process: embedded.Server, tmp_path: Path, wait_until: Wait) -> Iterator[Place]:
    """A new database, whose owner and user is a role without other rights."""
    with psycopg.connect(process.dsn, autocommit=True) as cluster:
        cluster.execute(f"create role {USER} login createrole password '{PASSWORD}'".encode())
        cluster.execute(f"create database place owner {USER}".encode())
        file = tmp_path / "pgpass"
        _write_password(file, PASSWORD)
        parts = {**conninfo_to_dict(process.tcp_dsn), "dbname": "place", "user": USER, "password": None}
        dsn = make_conninfo("", **parts, passfile=str(file))
        with psycopg.connect(dsn) as owner:
            owner.execute(servers.SQL_FILE.read_bytes())
            owner.execute("create table stored (id serial, name text, payload int)")
        with psycopg.connect(make_conninfo(process.dsn, dbname="place"), autocommit=True) as admin:
            direct = make_conninfo("", **{**parts, "password": PASSWORD})
            yield Place(admin, dsn, direct, Role(USER, direct), tell=wait_until)
        cluster.execute("drop database place with (force)")
        for name in ("pgque_reader", "pgque_writer", "pgque_admin", "pgque_user", USER):  # USER granted them
            cluster.execute(f"drop role if exists {name}".encode())


def _write_password(file: Path, password: str) -> None:
    file.touch(0o600)
    file.write_text(f"*:*:*:*:{password}\n")


# -- circumstances ----------------------------------------------------------------------------------------

Circumstance = Callable[[Place, ExitStack], None]
CIRCUMSTANCES: dict[str, Circumstance] = {}


def circumstance(function: Circumstance) -> Circumstance:
    """Register what changes a place."""
    CIRCUMSTANCES[function.__name__.strip("_").replace("_", " ")] = function
    return function


@circumstance
def _nothing_special(place: Place, stack: ExitStack) -> None:
    pass


@circumstance
def _repeatable_read_by_default(place: Place, stack: ExitStack) -> None:
    place.admin.execute("alter database place set default_transaction_isolation = 'repeatable read'")
    place.has_conflicts = True


@circumstance
def _serializable_by_default(place: Place, stack: ExitStack) -> None:
    place.admin.execute("alter database place set default_transaction_isolation = 'serializable'")
    place.has_conflicts = True


@circumstance
def _time_limits_of_a_second(place: Place, stack: ExitStack) -> None:
    for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
        place.admin.execute(f"alter database place set {name} = '1s'".encode())
    place.happens = _pause


@contextmanager
def _pause() -> Iterator[None]:
    """Nothing comes for longer than the time limits."""
    threading.Event().wait(1.5)
    yield


@circumstance
def _behind_a_pooler_in_transaction_mode(place: Place, stack: ExitStack) -> None:
    place.dsn = stack.enter_context(pgbouncer.through(place.direct))


@circumstance
def _commits_that_wait_for_a_missing_standby(place: Place, stack: ExitStack) -> None:
    @contextmanager
    def missing() -> Iterator[None]:
        _set(place, "synchronous_standby_names", "nobody")
        try:
            yield
            waiting = (
                "select count(*) from pg_catalog.pg_stat_activity"
                " where datname = 'place' and wait_event = 'SyncRep'"
            )
            place.tell(lambda: _value(place.admin, waiting) > 0, "commits wait for a standby")
        finally:
            _set(place, "synchronous_standby_names", "")

    place.admin.execute("set synchronous_commit = local")
    place.happens = missing


@circumstance
def _connections_that_end(place: Place, stack: ExitStack) -> None:
    @contextmanager
    def end() -> Iterator[None]:
        _end_all(place)
        yield

    place.happens = end
    place.logs = frozenset({"connection", "does not count"})


@circumstance
def _a_password_that_changes(place: Place, stack: ExitStack) -> None:
    """The new one is in the password file when connections end."""
    file = Path(str(conninfo_to_dict(place.dsn)["passfile"]))

    @contextmanager
    def change() -> Iterator[None]:
        place.admin.execute(f"alter role {USER} password 'another one'".encode())
        _write_password(file, "another one")
        _end_all(place)
        place.role = Role(USER, make_conninfo(place.direct, password="another one"))
        yield

    place.happens = change
    place.logs = frozenset({"connection", "does not count"})


def _set(place: Place, name: str, value: str) -> None:
    place.admin.execute(f"alter system set {name} = '{value}'".encode())
    place.admin.execute("select pg_catalog.pg_reload_conf()")
    place.tell(lambda: _value(place.admin, f"select current_setting('{name}')") == value, f"{name} is set")


def _end_all(place: Place) -> None:
    end = "select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity where usename = %s"
    place.admin.execute(end, [USER])


def _value(conn: Connection, query: str, *parameters: object) -> Any:
    row = conn.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


# -- all programs -----------------------------------------------------------------------------------------


KINDS: dict[str, tuple[Callable[..., Any], dict[str, object]]] = {
    "worker": (pgque.Worker, {}),
    "async worker": (pgque.AsyncWorker, {}),
    "transactional worker": (pgque.Worker, {"transactional": True}),
    "consumer": (pgque.Consumer, {"poll_interval": 0.2}),
    "async consumer": (pgque.AsyncConsumer, {"poll_interval": 0.2}),
    "transactional consumer": (pgque.Consumer, {"poll_interval": 0.2, "transactional": True}),
}


@contextmanager
def programs(place: Place, queue: str) -> Iterator[Callable[[], dict[str, list[int]]]]:
    """Run a ticker, and workers and consumers; yield a function that returns the payloads that each has handled,
    or with `transactional` has stored."""
    kinds = {
        name: kind for name, kind in KINDS.items() if not (place.has_conflicts and "transactional" in name)
    }
    seen: dict[str, list[int]] = {name: [] for name in kinds}
    stop = threading.Event()

    def all_seen() -> dict[str, list[int]]:
        stored = place.admin.execute("select name, payload from stored order by id").fetchall()
        return {
            name: handled + [payload for own, payload in stored if own == name]
            for name, handled in seen.items()
        }

    with ExitStack() as stack:
        stack.enter_context(threads.running(lambda: run_ticker(place.dsn, stop), stop.set, 20))
        for name, (made, options) in kinds.items():
            program = made(place.dsn, queue=queue, consumer=name, **options)
            stack.enter_context(threads.running(_of(program, seen[name].append), program.stop, 20))
        yield all_seen


def _of(program: Any, see: Callable[[int], None]) -> Callable[[], object]:
    """Return what runs a program that sees each payload, or stores it."""

    def handle(message: pgque.Message) -> None:
        see(int(message.payload or ""))

    def store(message: pgque.Message, conn: psycopg.Connection[object]) -> None:
        conn.execute(
            "insert into stored (name, payload) values (%s, %s::int)", [program.consumer, message.payload]
        )

    async def handle_async(message: pgque.Message) -> None:
        handle(message)

    is_async = isinstance(program, pgque.AsyncWorker | pgque.AsyncConsumer)
    program.handler("*")(store if program.transactional else handle_async if is_async else handle)
    return (lambda: asyncio.run(program.run())) if is_async else program.run


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_each_message_is_handled_once_by_every_program(
    name: str, place: Place, wait_until: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        CIRCUMSTANCES[name](place, stack)
        with pgque.connect(place.dsn, autocommit=True) as client:
            client.admin.create_queue("q")
            for consumer in (*KINDS, "command"):
                client.subscribe("q", consumer)
        with caplog.at_level(logging.WARNING, "pgque"), programs(place, "q") as seen:

            def handled(count: int) -> None:
                def all_of_them() -> bool:
                    return all(sorted(found) == list(range(count)) for found in seen().values())

                wait_until(all_of_them, f"{count} messages are handled once", timeout=30)

            with pgque.connect(place.dsn, autocommit=True) as client:
                for number in range(SENT):
                    client.send("q", number)
            handled(SENT)
            with place.happens():
                sender = threading.Thread(target=_send_more, args=[place.dsn], daemon=True)
                sender.start()
            sender.join(30)
            handled(2 * SENT)
            _command_line(place.dsn)
            handled(2 * SENT + 1)
            for name, handled_in_order in seen().items():
                assert "worker" in name or handled_in_order == list(range(2 * SENT + 1))
            _page(place)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert [each for each in warnings if not any(word in each for word in place.logs)] == []


def _send_more(dsn: str) -> None:
    with pgque.connect(dsn) as client:
        client.send_batch("q", "more", list(range(SENT, 2 * SENT)))
        client.conn.commit()


def _command_line(dsn: str) -> None:
    receive = ["receive", "q", "command", "--worker", "w"]
    for command in (["send", "q", str(2 * SENT)], receive, ["queues"], ["status"], ["health"]):
        done = CliRunner().invoke(main, [*command, "--dsn", dsn])
        assert done.exit_code == 0, (command, done.output, done.exception)


def _page(place: Place) -> None:
    parts = {**conninfo_to_dict(place.dsn), "user": None, "password": None, "passfile": None}
    app: Any = pgque.web.app(
        make_conninfo("", **{name: part for name, part in parts.items() if part is not None})
    )
    try:
        browser = Browser(app)
        assert "Log out" in text(browser.log_in(place.role))
        assert "consumer" in text(browser.get("/queue", 200, queue="q"))
    finally:
        app.close()


def test_a_report_that_waits_for_a_standby_keeps_no_message_from_its_handler(
    place: Place, wait_until: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    in_worker: list[pgque.Message] = []
    in_loop: list[pgque.Message] = []
    lost: list[pgque.PgqueError] = []
    stop = threading.Event()
    worker = pgque.Worker(
        place.direct,
        queue="q",
        consumer="worker",
        concurrency=1,
        prefetch=1,
        command_timeout=1,
        visibility_timeout=1,
    )
    worker.handler("*")(in_worker.append)

    def loop() -> None:
        with pgque.WorkQueue(place.direct, "q", consumer="loop", command_timeout=1) as queue:
            while not stop.wait(0.1):
                try:
                    in_loop.extend(queue.messages(max_messages=1, visibility_timeout=2, timeout=0))
                except pgque.PgqueConnectionError as error:
                    lost.append(error)

    with pgque.connect(place.direct, autocommit=True) as client:
        client.admin.create_queue("q")
        for consumer in ("worker", "loop"):
            client.subscribe("q", consumer)
        client.send_batch("q", [1, 2, 3, 4])
        client.force_next_tick("q")
        client.ticker("q")
    place.admin.execute("set synchronous_commit = local")
    _set(place, "synchronous_standby_names", "nobody")
    try:
        with threads.running(worker.run, worker.stop, 20), threads.running(loop, stop.set, 20):
            given_up = "connecting again: the server has not answered", "failed, next try"
            wait_until(lambda: sum(map(caplog.text.count, given_up)) >= 4 and len(lost) >= 3, timeout=30)
            _set(place, "synchronous_standby_names", "")
            wait_until(lambda: len({m.msg_id for m in in_worker}) == 4 == len({m.msg_id for m in in_loop}))
    finally:
        _set(place, "synchronous_standby_names", "")
    # The first report was sent together with a receive, whose messages were leased to nobody. No later one was.
    assert max(message.receive_count or 0 for message in in_worker + in_loop) == 2


def test_a_worker_behind_a_pooler_gets_a_hint_that_names_the_setting(place: Place) -> None:
    place.admin.execute("alter database place set default_transaction_isolation = 'repeatable read'")
    with pgbouncer.through(place.direct) as pooled:
        with pgque.connect(pooled, autocommit=True) as client:
            client.admin.create_queue("q")
            client.subscribe("q", "c")
            client.send("q", "x")
        place.admin.execute("begin isolation level read committed")
        place.admin.execute("select pgque.force_tick('q'), pgque.ticker('q')")
        place.admin.execute("commit")
        worker = pgque.Worker(pooled, queue="q", consumer="c")
        seen: list[Any] = []
        worker.handler("*")(lambda message: seen.append(message.payload))
        with pytest.raises(pgque.PgqueError) as caught:
            worker.run(until_idle=True)
        assert caught.value.sqlstate == "25000"
        _, found, command = str(caught.value.hint).partition("alter role ")
        place.admin.execute((found + command).encode())
        _end_all(place)
        worker = pgque.Worker(pooled, queue="q", consumer="c")
        worker.handler("*")(lambda message: seen.append(message.payload))
        worker.run(until_idle=True)
    assert seen == ["x"]
