"""Behind a pooler in transaction mode each program prepares nothing, and no call runs as another client's.

psycopg takes the same names for its prepared statements in each process, so behind a pooler that does not
follow prepared statements a name may be that of another client's statement, which then runs without an error.
"""

from __future__ import annotations

import ast
import asyncio
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import pgque
import pgque.alembic
import pgque.django
from conftest import Role
from pgque import errors
from pgque.ops import ticker
from pgque.ops.exporter import Exporter
from pgque.top.source import Source
from pgque.web.config import Database
from pgque.web.database import Lender, log_in
from support import connections, pgbouncer, threads
from support.connections import KINDS, POOLS, Open
from support.servers import TestServer

pytestmark = pytest.mark.pgbouncer

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]

# More runs than psycopg lets pass before it prepares a statement.
RUNS = 8


@pytest.fixture(scope="module")
def bouncer(dsn: str) -> Iterator[str]:
    """Connection string through a PgBouncer with two sessions, which prepares nothing itself."""
    with pgbouncer.through(dsn, follows=False) as pooled:
        yield pooled


@pytest.fixture
def sessions(bouncer: str) -> Iterator[pgbouncer.Sessions]:
    """The sessions behind the PgBouncer, with nothing prepared in them."""
    with pgbouncer.sessions(bouncer) as found:
        yield found


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No statement was lost in this process: that alone would have it prepare nothing."""
    monkeypatch.setattr(errors, "_behind_pooler", threading.Event())


@pytest.fixture
def client(conn: Connection, queue: str) -> pgque.PgqueClient:
    """A client without a pooler, and the queue has the consumer c."""
    client = pgque.PgqueClient(conn)
    client.subscribe(queue, "c")
    return client


def _send(client: pgque.PgqueClient, queue: str, tick: Tick, count: int = RUNS) -> list[int]:
    ids = client.send_batch(queue, [str(number) for number in range(count)])
    tick(queue)
    return ids


class _Async:
    """An async client from outside, or one of its groups."""

    def __init__(self, loop: connections.Loop, methods: object) -> None:
        self._loop = loop
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._methods, name)
        return self._loop.blocking(found) if callable(found) else _Async(self._loop, found)


def _connect(kind: str, dsn: str, stack: ExitStack) -> Any:
    if kind == "async":
        loop = stack.enter_context(connections.event_loop())
        client = loop.run(pgque.connect_async(dsn, autocommit=True))
        stack.callback(lambda: loop.run(client.close()))
        return _Async(loop, client)
    if kind == "caller's connection":
        return pgque.PgqueClient(stack.enter_context(psycopg.connect(dsn, autocommit=True)))
    return stack.enter_context(pgque.connect(dsn, autocommit=True))


CLIENTS = ["sync", "async", "caller's connection"]


# -- two clients whose prepared names collide ------------------------------------------------------------


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_release_does_not_run_as_the_ack_of_another_client(
    kind: str, bouncer: str, sessions: pgbouncer.Sessions, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    _send(client, queue, tick, 2 * RUNS + 1)

    def take() -> tuple[int, list[int]]:
        [message] = client.receive(queue, "c", 1, worker="w", visibility_timeout=600)
        return message.batch_id, [message.msg_id]

    with ExitStack() as stack, sessions.in_turn():
        releasing = _connect(kind, bouncer, stack)
        for _ in range(RUNS):
            releasing.release(*take())
        sessions.turn()
        acknowledging = _connect(kind, bouncer, stack)
        for _ in range(RUNS):
            acknowledging.ack(*take())
        batch_id, ids = take()
        assert releasing.release(batch_id, ids) == 1
    assert [m.msg_id for m in client.messages.list(queue) if m.msg_id in ids] == ids


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_resume_does_not_run_as_the_purge_of_another_client(
    kind: str,
    bouncer: str,
    sessions: pgbouncer.Sessions,
    client: pgque.PgqueClient,
    queue: str,
    new_queue: Callable[[], str],
    tick: Tick,
) -> None:
    other = new_queue()
    with ExitStack() as stack, sessions.in_turn():
        resuming = _connect(kind, bouncer, stack)
        for _ in range(RUNS):
            resuming.admin.resume(queue)
        sessions.turn()
        purging = _connect(kind, bouncer, stack)
        for _ in range(RUNS):
            purging.admin.purge(other)
        _send(client, queue, tick, 5)
        client.admin.pause(queue)
        resuming.admin.resume(queue)
    client.send(queue, "it is not paused")
    assert len(client.messages.list(queue)) == 6


# Connections of psycopg that can prepare statements, also below Django and SQLAlchemy.
PREPARING = [
    name
    for name in KINDS
    if name.startswith("django") or ("psycopg" in name and "psycopg2" not in name and "client" not in name)
]


@pytest.fixture
def prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of callers prepare each statement when it runs first."""
    monkeypatch.setattr(connections, "PREPARE_THRESHOLD", 0)


# A session here opens a connection for each transaction, which no pooler can mix up with an earlier one.
@pytest.mark.parametrize("name", [name for name in PREPARING if "session" not in name])
@pytest.mark.usefixtures("prepares")
def test_a_nack_in_a_transaction_of_the_caller_does_not_run_as_the_ack_of_another_program(
    name: str, bouncer: str, sessions: pgbouncer.Sessions, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    _send(client, queue, tick, 3)
    batches = [client.receive(queue, "c", 1, worker="w", visibility_timeout=600)[0] for _ in range(3)]
    with ExitStack() as stack, sessions.in_turn():
        rejecting = stack.enter_context(KINDS[name](bouncer))
        rejecting.nack(batches[0].batch_id, [batches[0]])
        rejecting.commit()
        sessions.turn()
        acknowledging = stack.enter_context(KINDS[name](bouncer))
        acknowledging.ack(batches[1].batch_id, [batches[1].msg_id])
        acknowledging.commit()
        rejecting.nack(batches[2].batch_id, [batches[2]])
        rejecting.commit()
    assert [m.msg_id for m in client.messages.list(queue)] == [batches[0].msg_id, batches[2].msg_id]


def test_asyncpg_without_its_cache_runs_its_own_statements_in_any_session(
    bouncer: str, sessions: pgbouncer.Sessions, queue: str
) -> None:
    """Also in autocommit. With its cache the second session does not have the statement, or another
    client's."""
    with connections.event_loop() as loop, sessions.in_turn():
        conn = loop.run(connections.asyncpg_connect(bouncer, statement_cache_size=0))
        ids = []
        for _ in range(4):
            ids.append(loop.call("send", conn, queue, "x"))
            sessions.turn()
        loop.run(conn.close())
    assert len(set(ids)) == 4
    assert sessions.prepared() == []


# -- the caller's connection -----------------------------------------------------------------------------


_OURS = (
    "select count(*) from pg_prepared_statements as p"
    " where strpos(p.statement, 'pgque.') > 0 and strpos(p.statement, 'pg_prepared') = 0 and not p.from_sql"
)


def _mine(opened: Open, name: str) -> bool:
    """Return whether the connection prepares a statement of the caller's."""
    opened.execute(f"select '{name}'")
    rows = opened.execute(
        f"select count(*) from pg_prepared_statements where statement like '%''{name}''%' and not from_sql"
    )
    return int(rows[0][0]) > 0


@pytest.mark.parametrize("name", PREPARING)
@pytest.mark.usefixtures("prepares")
def test_a_call_prepares_nothing_on_the_callers_connection_which_stays_as_it_is(
    name: str, dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    """Also where there is no pooler, and after a call that fails."""
    _send(client, queue, tick)
    with KINDS[name](dsn) as opened:
        assert _mine(opened, "before")
        for number in range(2):
            opened.send(queue, number)
            opened.send_batch(queue, [number])
            batch = opened.receive(queue, "c", 2)
            opened.nack(batch[0].batch_id, batch[0])
            opened.ack(batch[0].batch_id)
        assert _mine(opened, "after")
        assert [tuple(row) for row in opened.execute(_OURS)] == [(0,)]
        with pytest.raises(pgque.PgqueQueueNotFoundError), opened.savepoint():
            opened.send("no such queue", 1)
        assert _mine(opened, "after an error")
        opened.rollback()


@pytest.mark.usefixtures("prepares")
def test_a_migration_of_alembic_prepares_nothing(own_dsn: str) -> None:
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: psycopg.connect(own_dsn, prepare_threshold=0),
        poolclass=NullPool,
    )
    with engine.connect() as connection:
        op = Operations(MigrationContext.configure(connection))
        pgque.alembic.install(op)
        pgque.alembic.create_queue(op, "orders")
        pgque.alembic.subscribe(op, "orders", "billing")
        assert connection.exec_driver_sql(_OURS).scalar() == 0
    engine.dispose()


@pytest.mark.usefixtures("prepares")
def test_a_migration_of_django_prepares_nothing(own_dsn: str) -> None:
    connection = connections.django_database("poolers", own_dsn)
    operations = [pgque.django.CreateQueue("orders"), pgque.django.Subscribe("orders", "billing")]
    try:
        with connection.schema_editor() as editor:
            pgque.django.Upgrade().database_forwards("app", editor, None, None)
            for operation in operations:
                operation.database_forwards("app", editor, None, None)
            for operation in reversed(operations):
                operation.database_backwards("app", editor, None, None)
        with connection.cursor() as cursor:
            cursor.execute(_OURS)
            assert cursor.fetchone() == (0,)
    finally:
        connection.close()


@pytest.mark.parametrize("name", [name for name in POOLS if name != "asyncpg"])
@pytest.mark.usefixtures("prepares")
def test_a_call_on_a_pool_prepares_nothing(
    name: str, bouncer: str, sessions: pgbouncer.Sessions, queue: str
) -> None:
    with POOLS[name](bouncer) as (pool, call):
        for number in range(2):
            call("send", pool, queue, number)
    assert [text for text in sessions.prepared() if "pgque." in text] == []


def test_the_client_on_a_pool_or_a_connection_of_the_callers_prepares_nothing_behind_a_pooler(
    bouncer: str, sessions: pgbouncer.Sessions, queue: str
) -> None:
    with ConnectionPool(bouncer, min_size=1, max_size=1, open=True) as pool:
        for number in range(RUNS):
            with pgque.PgqueClient.from_pool(pool) as client:
                client.send(queue, number)
    with psycopg.connect(bouncer, autocommit=True) as conn:
        for number in range(RUNS):
            pgque.PgqueClient(conn).send(queue, number)
        assert conn.prepare_threshold == 5
    assert sessions.prepared() == []


def test_the_client_prepares_on_a_direct_connection_as_that_is_set(dsn: str, queue: str) -> None:
    count = "select count(*) from pg_prepared_statements where statement like '%pgque.send%'"
    for threshold, prepared in ((None, 0), (5, 1)):
        with psycopg.connect(dsn, prepare_threshold=threshold) as conn:
            client = pgque.PgqueClient(conn)
            for number in range(RUNS):
                client.send(queue, number)
            row = conn.execute(count, prepare=False).fetchone()
            assert row == (prepared,)
            assert conn.prepare_threshold == threshold


def test_each_connection_is_asked_whether_it_is_direct(
    dsn: str, bouncer: str, sessions: pgbouncer.Sessions, queue: str
) -> None:
    """Of one process some connections lead to the server, and others to a pooler."""
    with pgque.connect(dsn) as direct, pgque.connect(bouncer) as pooled, pgque.connect(dsn) as again:
        assert [c.conn.prepare_threshold for c in (direct, pooled, again)] == [5, None, 5]
        for number in range(RUNS):
            pooled.send(queue, number)
            pooled.conn.execute("select 1")
            pooled.conn.commit()
    assert sessions.prepared() == []


def test_a_connection_to_the_servers_address_is_direct_and_one_through_a_forwarder_is_not(
    server: TestServer, writer: Role
) -> None:
    """A pooler may pass on the process id of a session of the server, as a forwarder does."""
    if server.process is None:
        pytest.skip("the server is not a process of this machine")
    address = make_conninfo(writer.dsn, host="127.0.0.1", port=server.process.port)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=_forward, args=(listener, server.process.port), daemon=True).start()
        with pgque.connect(address) as direct, pgque.connect(make_conninfo(address, port=port)) as forwarded:
            row = forwarded.conn.execute("select pg_backend_pid()").fetchone()
            assert row == (forwarded.conn.info.backend_pid,)
            assert direct.conn.prepare_threshold == 5
            assert forwarded.conn.prepare_threshold is None


def _forward(listener: socket.socket, port: int) -> None:
    """Forward one connection until it ends."""
    client = listener.accept()[0]
    with client, socket.create_connection(("127.0.0.1", port)) as target:
        ends = {client: target, target: client}
        while True:
            for ready in select.select(list(ends), [], [])[0]:
                data = ready.recv(65536)
                if not data:
                    return
                ends[ready].sendall(data)


# -- programs --------------------------------------------------------------------------------------------


Program = Callable[..., None]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Register what runs a program, or a part of it, through the pooler, for more than RUNS statements."""
    PROGRAMS[function.__name__.strip("_").replace("_", " ")] = function
    return function


@contextmanager
def _until_all(
    seen: list[Any], wait_until: Wait, run: Callable[[], object], stop: Callable[[], object]
) -> Any:
    with threads.running(run, stop, 20):
        wait_until(lambda: len(seen) == RUNS, "all messages are handled", timeout=30)
        yield


def _consume(kind: Any, bouncer: str, queue: str, wait_until: Wait, **options: Any) -> None:
    """Run a consumer or a worker, sync or async, which receives each message by itself; its handler uses the
    connection that it is given."""
    seen: list[Any] = []
    it = kind(bouncer, queue=queue, consumer="c", **options)
    if kind in (pgque.AsyncConsumer, pgque.AsyncWorker):

        async def handle(message: pgque.Message, conn: Any = None) -> None:
            if conn is not None:
                await conn.execute("select 1")
            seen.append(message.payload)

        it.handler("*")(handle)

        def run() -> None:
            asyncio.run(it.run())
    else:

        def handle_blocking(message: pgque.Message, conn: Any = None) -> None:
            if conn is not None:
                conn.execute("select 1")
            seen.append(message.payload)

        it.handler("*")(handle_blocking)
        run = it.run
    with _until_all(seen, wait_until, run, it.stop):
        pass


for _kind in (pgque.Consumer, pgque.AsyncConsumer):
    for _options in ({}, {"transactional": True}, {"subconsumer": "w"}):

        def _run(
            bouncer: str, queue: str, wait_until: Wait, kind: Any = _kind, options: Any = _options, **_: Any
        ) -> None:
            _consume(kind, bouncer, queue, wait_until, max_messages=1, poll_interval=0.1, **options)

        PROGRAMS[f"{_kind.__name__} {''.join(_options)}".strip()] = _run

for _worker in (pgque.Worker, pgque.AsyncWorker):

    def _work(bouncer: str, queue: str, wait_until: Wait, kind: Any = _worker, **_: Any) -> None:
        _consume(kind, bouncer, queue, wait_until, concurrency=1, prefetch=1)

    PROGRAMS[_worker.__name__] = _work


@program
def _work_queue(bouncer: str, queue: str, **_: Any) -> None:
    with pgque.WorkQueue(bouncer, queue, consumer="c") as work:
        for number in range(RUNS):
            work.send(number)
        assert len([message.ack() for message in work.messages(max_messages=1, timeout=0)]) == RUNS


@program
def _async_work_queue(bouncer: str, queue: str, **_: Any) -> None:
    async def main() -> int:
        async with pgque.AsyncWorkQueue(bouncer, queue, consumer="c") as work:
            for number in range(RUNS):
                await work.send(number)
            return len([await message.ack() async for message in work.messages(max_messages=1, timeout=0)])

    assert asyncio.run(main()) == RUNS


@program
def _ticker(
    bouncer: str, conn: Connection, wait_until: Wait, monkeypatch: pytest.MonkeyPatch, **_: Any
) -> None:
    """Its loop is told to end again and again, so that it is called often."""
    monkeypatch.setattr(ticker, "_MIN_RUN", 0.0)
    began: set[Any] = set()

    def next_loop() -> bool:
        rows = conn.execute(
            "select query_start from pg_stat_activity where query like 'call pgque.ticker_loop%' and state = 'active'"
        ).fetchall()
        found = {row[0] for row in rows} - began
        began.update(found)
        return bool(found)

    stop = threading.Event()
    with threads.running(lambda: ticker.run_ticker(bouncer, stop), stop.set, 20):
        for _number in range(RUNS):
            wait_until(next_loop, "the loop runs", timeout=30)
            conn.execute("select pgque.stop()")


@program
def _exporter(bouncer: str, monkeypatch: pytest.MonkeyPatch, **_: Any) -> None:
    monkeypatch.setattr("pgque.ops.exporter._PING_AGE", -1.0)
    exporter = Exporter(bouncer, max_age=0, max_share=1)
    for _number in range(RUNS):
        exporter.check()
        assert exporter.problem() is None
    exporter.close()


@program
def _page(bouncer: str, **_: Any) -> None:
    opened = log_in(Lender(None), Database("", bouncer), pgbouncer.USER, pgbouncer.PASSWORD, 5)
    try:
        for _number in range(RUNS):
            with opened.take(read_only=False) as connection:
                connection.execute("select q.queue_name from pgque.get_queue_info() as q")
    finally:
        opened.close()


@program
def _top(bouncer: str, queue: str, **_: Any) -> None:
    async def main() -> None:
        source = Source(bouncer)
        await source.connect()
        for _number in range(RUNS):
            await source.overview()
            await source.queue(queue)
        await source.close()

    asyncio.run(main())


@program
def _clients(bouncer: str, queue: str, **_: Any) -> None:
    with ExitStack() as stack:
        for kind in CLIENTS:
            client = _connect(kind, bouncer, stack)
            for number in range(RUNS):
                client.send(queue, number)
                client.send_batch(queue, [number])
                client.monitor.get_queue_info(queue)
                client.monitor.health()
                client.admin.queue_config(queue)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prepares_nothing_behind_a_pooler(
    name: str,
    bouncer: str,
    sessions: pgbouncer.Sessions,
    client: pgque.PgqueClient,
    conn: Connection,
    queue: str,
    tick: Tick,
    wait_until: Wait,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "subconsumer" in name:
        client.subscribe_subconsumer(queue, "c", "w", convert_normal=True)
    _send(client, queue, tick)
    PROGRAMS[name](
        bouncer=bouncer, queue=queue, conn=conn, tick=tick, wait_until=wait_until, monkeypatch=monkeypatch
    )
    assert sessions.prepared() == []


# -- settings of a session --------------------------------------------------------------------------------


def _read_page(bouncer: str, queue: str) -> None:
    opened = log_in(Lender(None), Database("", bouncer), pgbouncer.USER, pgbouncer.PASSWORD, 5)
    try:
        for _number in range(RUNS):
            with opened.take(read_only=True, timeout=3) as connection:
                connection.execute("select q.queue_name from pgque.get_queue_info() as q")
                with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                    connection.execute("select pgque.send(%s, 'x')", [queue])
                with pytest.raises(psycopg.errors.QueryCanceled):
                    connection.execute("select pg_sleep(600)", timeout=0.001)
    finally:
        opened.close()


def _read_top(bouncer: str, queue: str) -> None:
    async def main() -> None:
        source = Source(bouncer, read_only=True)
        for _number in range(RUNS):
            await source.overview()
            with pytest.raises(pgque.PgqueError, match="read-only transaction"):
                await source.pause(queue, True)
        await source.close()

    asyncio.run(main())


@pytest.mark.parametrize("read", [_read_page, _read_top])
def test_what_is_read_only_leaves_no_setting_to_the_other_clients_of_a_pooler(
    read: Callable[[str, str], None], bouncer: str, sessions: pgbouncer.Sessions, queue: str
) -> None:
    """Their sends would be refused as those of a read-only transaction until the pooler ends its session."""
    read(bouncer, queue)
    for name, value in (("default_transaction_read_only", "off"), ("statement_timeout", "0")):
        assert sessions.both(f"select current_setting('{name}')") == [(value,)] * 2
    with pgque.connect(bouncer, autocommit=True) as client:
        for number in range(RUNS):
            client.send(queue, number)


# -- all that opens a connection -------------------------------------------------------------------------


_OPENING = {"ConnectionPool", "AsyncConnectionPool"}
_CLASSES = {"psycopg", "Connection", "AsyncConnection", "LimitedConnection", "AsyncLimitedConnection"}


def _opens(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr == "connect":
        owner = function.value
        name = (
            owner.attr
            if isinstance(owner, ast.Attribute)
            else owner.id
            if isinstance(owner, ast.Name)
            else ""
        )
        return name in _CLASSES
    return isinstance(function, ast.Name) and function.id in _OPENING


def _prepares_nothing(call: ast.Call) -> bool:
    return "prepare_threshold=None" in ast.unparse(call) or "'prepare_threshold': None" in ast.unparse(call)


def test_whatever_opens_a_connection_in_the_package_has_it_prepare_nothing() -> None:
    """A client has it prepare once the connection is known to be direct."""
    folder = Path(pgque.__file__).parent
    found = 0
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _opens(node):
                found += 1
                assert _prepares_nothing(node), f"{file.relative_to(folder)}:{node.lineno}"
    assert found >= 8
