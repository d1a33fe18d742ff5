"""A path to the server that acknowledges and never answers, a lock that is held for long, and a second signal: every
program gives up what waits, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

import pgque
from conftest import Role, Roles
from pgque import exporter
from pgque.client.limit import LimitedConnection, NoAnswerError
from pgque.ops import ticker
from pgque.twins.connection import open_client
from pgque.web import database
from support.processes import ended
from support.servers import TestServer
from support.silent import COMMIT, SYNC, SilentPath, silent_path
from support.threads import running

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]

# Seconds after which the programs of these tests give up a call.
LIMIT = 1.5

PROGRAM = """
import asyncio, sys, threading, time
import pgque
from pgque.runtime import listen as _listen_async
from pgque.twins import listen as _listen

kind, dsn, queue, use, limit = sys.argv[1:]
options = {}
if kind.endswith("Worker"):
    # A message whose delivery was lost with the connection comes again after two seconds.
    options = {"visibility_timeout": 600, "shutdown_timeout": 600}
    if use in ("stdin", "transactional"):
        options = {"visibility_timeout": 2, "shutdown_timeout": 0.5}
    if use == "processes":
        options |= {"use": use, "concurrency": 1}
# A consumer that waits for notifications asks whether its queue is ticked, every ten seconds.
_listen.TICK_CHECK = _listen_async.TICK_CHECK = 0.5
if use == "transactional":
    options["transactional"] = True
program = getattr(pgque, kind)(
    dsn, queue=queue, consumer="c", command_timeout=None if limit == "none" else float(limit), **options
)

def note(message):
    print(message.payload, flush=True)
    return 60 if message.payload == "long" else 0

def handle(message, *conn):
    time.sleep(note(message))

async def handle_async(message, *conn):
    if use == "blocked":
        time.sleep(note(message))
    await asyncio.sleep(note(message))

program.handler("*")(handle_async if kind.startswith("Async") else handle)

def stop_when_told():
    sys.stdin.readline()
    program.stop()

if __name__ == "__main__":
    if use in ("stdin", "transactional"):
        threading.Thread(target=stop_when_told, daemon=True).start()
    ended = program.run(catch_signals=use not in ("stdin", "transactional"))
    if ended is not None:
        asyncio.run(ended)
"""

KINDS = ["Worker", "AsyncWorker", "Consumer", "AsyncConsumer"]


@pytest.fixture
def path(dsn: str) -> Iterator[SilentPath]:
    with silent_path(dsn) as path:
        yield path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(program: Path, kind: str, dsn: str, queue: str, use: str, limit: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(program), kind, dsn, queue, use, str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# -- programs --------------------------------------------------------------------------------------------


class Programs:
    """One program of each kind over a path, with a queue of its own. All at once, since each has to start and to
    wait; in processes, since what blocks an interpreter would block the test."""

    def __init__(
        self, stack: ExitStack, program: Path, path: SilentPath, client: pgque.PgqueClient, tick: Tick
    ) -> None:
        self._enter = stack.enter_context
        self._program, self._path, self._client, self._tick = program, path, client, tick
        self._queues: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, new_queue: Callable[[], str], limit: object, use: str = "stdin") -> None:
        """Start them, and see that each handles a message."""
        for kind in KINDS:
            queue = self._queues[kind] = new_queue()
            self._client.subscribe(queue, "c")
            process = start(self._program, kind, self._path.dsn, queue, use, limit)
            self.processes[kind] = self._enter(ended(process))
        self.send("1")
        assert [said(process) for process in self.processes.values()] == ["1"] * len(KINDS)

    def all_handle(self, payload: str) -> None:
        """See that each handles a message that was sent after the first."""
        for process in self.processes.values():
            while (heard := said(process)) != payload:
                assert heard == "1"  # once more, as its ack was lost

    def are_idle(self) -> bool:
        """Whether everything that was sent is acknowledged."""
        infos = [self._client.consumers.get_info(queue, "c")[0] for queue in self._queues.values()]
        return all(info.pending_events == 0 for info in infos)

    def send(self, payload: str) -> None:
        for queue in self._queues.values():
            self._client.send(queue, payload)
            self._tick(queue)


@pytest.fixture
def programs(program: Path, path: SilentPath, client: pgque.PgqueClient, tick: Tick) -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(stack, program, path, client, tick)


def test_programs_leave_a_silent_connection_for_another(
    programs: Programs, path: SilentPath, new_queue: Callable[[], str]
) -> None:
    programs.start(new_queue, LIMIT)
    path.silence(new_ones=False)
    programs.send("2")
    programs.all_handle("2")


@pytest.mark.parametrize("use", ["stdin", "transactional"])
def test_a_transaction_that_the_network_cut_off_does_not_keep_its_locks(
    program: Path,
    dsn: str,
    client: pgque.PgqueClient,
    tick: Tick,
    new_queue: Callable[[], str],
    wait_until: Wait,
    use: str,
) -> None:
    with silent_path(dsn, before=COMMIT) as path, ExitStack() as stack:
        programs = Programs(stack, program, path, client, tick)
        programs.start(new_queue, LIMIT, use)
        wait_until(lambda: path.silent >= len(KINDS))
        path.let_through()
        programs.send("2")
        programs.all_handle("2")


def test_a_change_on_the_page_that_the_network_cut_off_does_not_keep_its_locks(
    dsn: str, queue: str, client: pgque.PgqueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "COMMAND_TIMEOUT", 0.5)
    monkeypatch.setattr(database, "_SETTINGS", database._SETTINGS.replace("'30s'", "'1s'"))
    with silent_path(dsn, before=COMMIT) as path:
        conn = LimitedConnection.connect(path.dsn, autocommit=True, row_factory=dict_row)
        page = database.Connection(conn, LIMIT, False)
        with pytest.raises(NoAnswerError):
            page.execute("select pgque.pause(%s)", [queue])
        assert path.silent == 1
        client.admin.resume(queue)  # which waits for its lock


def over_tcp(server: TestServer, role: Role) -> str:
    return role.dsn if server.process is None else make_conninfo(role.dsn, host="127.0.0.1")


@pytest.mark.parametrize("kind", [pgque.Worker, pgque.Consumer])
def test_the_server_is_soon_to_notice_that_the_host_of_a_handler_is_lost(
    kind: Any, server: TestServer, reader: Role, queue: str, client: pgque.PgqueClient, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "1")
    tick(queue)
    worker = kind(over_tcp(server, reader), queue=queue, consumer="c", transactional=True)
    seconds: list[int] = []

    def ask(message: pgque.Message, conn: Connection) -> None:
        # Only the session itself can tell, and only over TCP.
        (found,) = conn.execute(
            "select current_setting('tcp_keepalives_idle')::int"
            " + current_setting('tcp_keepalives_interval')::int * current_setting('tcp_keepalives_count')::int"
        )
        seconds.append(found[0])

    worker.handler("*")(ask)
    worker.run(until_idle=True)
    assert len(seconds) == 1
    assert 0 < seconds[0] <= 30


def test_limits_that_a_role_has_set_stay(server: TestServer, reader: Role, conn: Connection) -> None:
    for setting in ("tcp_keepalives_idle = 300", "idle_in_transaction_session_timeout = '5s'"):
        conn.execute(f"alter role {reader.name} set {setting}".encode())
    with open_client(over_tcp(server, reader), "limits") as client:
        found = [
            client.conn.execute(f"show tcp_keepalives_{name}".encode()).fetchone()
            for name in ("idle", "interval")
        ]
        assert found == [("300",), ("5",)]
    with LimitedConnection.connect(reader.dsn, autocommit=True, row_factory=dict_row) as own:
        (row,) = database.Connection(own, LIMIT, False).execute("show idle_in_transaction_session_timeout")
    assert list(row.values()) == ["5s"]


def test_a_session_that_has_the_process_id_of_an_earlier_one_is_not_ended(dsn: str) -> None:
    with psycopg.connect(dsn, application_name="same") as healthy:
        healthy.execute("select 1")
        sessions = {(healthy.info.backend_pid, "0.5")}
        with open_client(dsn, "same", sessions=sessions) as client:
            assert sessions == {client._session}
        healthy.execute("select 1")


@pytest.fixture(params=["", "set role"])
def consumer_dsn(request: pytest.FixtureRequest, roles: Roles, reader: Role, conn: Connection) -> str:
    """A connection string of a role, or of one whose sessions are another role's."""
    if not request.param:
        return reader.dsn
    one = roles()
    conn.execute(f"grant {reader.name} to {one.name}".encode())
    conn.execute(f"alter role {one.name} set role = {reader.name}".encode())
    return one.dsn


def test_a_work_queue_reports_again_what_the_network_cut_off(
    consumer_dsn: str, queue: str, client: pgque.PgqueClient, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "1")
    tick(queue)
    with silent_path(consumer_dsn, before=SYNC) as path:
        path.let_through()
        with pgque.WorkQueue(path.dsn, queue, consumer="c", command_timeout=1) as work:
            for message in work.messages():
                path.cut()
                with pytest.raises(pgque.PgqueConnectionError, match="has not answered"):
                    message.ack()
                assert path.silent == 1
                assert message.ack()
                break
    assert client.messages.list(queue) == []


def test_programs_stop_on_a_silent_network(
    programs: Programs, path: SilentPath, new_queue: Callable[[], str], wait_until: Wait
) -> None:
    programs.start(new_queue, "none")
    wait_until(programs.are_idle)

    def all_wait_for_an_answer() -> bool:
        path.silence()
        try:
            wait_until(lambda: path.unanswered == len(KINDS), timeout=2)
        except AssertionError:  # an answer was on its way, which the path holds back as well
            path.resume()
            return False
        return True

    wait_until(all_wait_for_an_answer, timeout=30)
    for process in programs.processes.values():
        assert process.stdin is not None
        process.stdin.write("stop\n")
        process.stdin.flush()
    ended_with = {kind: process.wait(20) for kind, process in programs.processes.items()}
    assert ended_with == dict.fromkeys(KINDS, 0)


@pytest.mark.parametrize("kind", [pgque.Worker, pgque.Consumer])
def test_transactional_handlers_leave_silent_connections_with_their_worker(
    kind: Any,
    path: SilentPath,
    queue: str,
    client: pgque.PgqueClient,
    tick: Tick,
    wait_until: Wait,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgque.twins.listen.TICK_CHECK", 0.5)
    client.subscribe(queue, "c")
    worker = kind(path.dsn, queue=queue, consumer="c", transactional=True, command_timeout=LIMIT)
    seen: list[str | None] = []
    worker.handler("*")(lambda message, conn: seen.append(message.payload))
    with running(lambda: worker.run(catch_signals=False), worker.stop, 20):
        for payload in ("1", "2"):
            client.send(queue, payload)
            tick(queue)
            wait_until(lambda payload=payload: payload in seen and client.messages.list(queue) == [])
            path.silence(new_ones=False)
            wait_until(lambda: "connecting again: the server has not answered" in caplog.text)
    assert seen == ["1", "2"]
    # No handler waited for the connection that its predecessor had.
    assert "the transaction of handlers failed" not in caplog.text


def test_the_ticker_leaves_a_silent_connection_for_another(
    own_dsn: str, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticker, "_RUN", LIMIT)
    stop = threading.Event()
    with silent_path(own_dsn) as path, pgque.connect(own_dsn, autocommit=True) as client:
        client.admin.create_queue("q")
        client.subscribe("q", "c")
        with running(lambda: ticker.run_ticker(path.dsn, stop, command_timeout=LIMIT), stop.set, 20):
            for payload in ("1", "2"):
                client.send("q", payload)
                arrived: list[pgque.Message] = []
                wait_until(lambda arrived=arrived: arrived.extend(client.receive("q", "c")) or arrived)
                assert [message.payload for message in arrived] == [payload]
                client.ack(arrived[0].batch_id)
                path.silence(new_ones=False)
                # The server ticks until the call has ended that it got before.
                wait_until(lambda: not active(client.conn, "pgque ticker"))


def test_the_ticker_stops_on_a_silent_network(own_dsn: str, wait_until: Wait) -> None:
    stop = threading.Event()
    with (
        silent_path(own_dsn) as path,
        psycopg.connect(own_dsn, autocommit=True) as conn,
        running(lambda: ticker.run_ticker(path.dsn, stop, command_timeout=None), stop.set, 10),
    ):
        wait_until(lambda: active(conn, "pgque ticker"))
        path.silence()


def test_the_exporter_reads_over_another_connection_after_one_was_silent(own_dsn: str) -> None:
    # In the shared database, the figures of the queues of all tests may take longer than the limit.
    with silent_path(own_dsn) as path:
        source = exporter.Exporter(path.dsn, max_age=0, max_share=1, command_timeout=2 * LIMIT)
        assert b"pgque_up 1.0" in source.text()
        path.silence(new_ones=False)
        assert b"pgque_up 1.0" in source.text()
        assert path.connections == 2
        source.close()


# -- the client --------------------------------------------------------------------------------------------


def test_a_call_without_a_response_is_an_error_with_a_hint(path: SilentPath, queue: str) -> None:
    with pgque.connect(path.dsn, autocommit=True, command_timeout=LIMIT) as client:
        client.send(queue, "1")
        path.silence()
        with pytest.raises(pgque.PgqueConnectionError, match=rf"not answered for {LIMIT} s") as raised:
            client.send(queue, "2")
        assert "command_timeout" in str(raised.value.hint)
        assert client.conn.closed


def test_a_client_is_not_opened_over_a_path_that_goes_silent_after_its_login(
    path: SilentPath, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    connect = LimitedConnection.connect

    def connect_and_silence(*given: Any, **options: Any) -> Any:
        conn = connect(*given, **options)
        path.silence()
        return conn

    monkeypatch.setattr(LimitedConnection, "connect", connect_and_silence)
    raised: list[pgque.PgqueConnectionError] = []

    def open_client() -> None:
        try:
            pgque.connect(path.dsn, command_timeout=LIMIT)
        except pgque.PgqueConnectionError as error:
            raised.append(error)

    with running(open_client, lambda: None, 10):
        wait_until(lambda: bool(raised))


async def _cancelled_call(path: SilentPath, queue: str) -> bool:
    client = await pgque.connect_async(path.dsn, autocommit=True)
    path.silence()
    call = asyncio.ensure_future(client.send(queue, "1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0.1)  # until it waits for its answer
    call.cancel()
    done, _ = await asyncio.wait([call], timeout=5)
    return bool(done) and call.cancelled() and client.conn.closed


def test_a_cancelled_call_does_not_wait_for_a_silent_network(path: SilentPath, queue: str) -> None:
    # psycopg waits for its request to cancel, and for its answer.
    assert asyncio.run(_cancelled_call(path, queue))


def lock(conn: Connection) -> None:
    """Take a lock that every consumer needs, as a session does that never ends its transaction."""
    conn.execute("begin")
    conn.execute("lock table pgque.subscription in access exclusive mode")


@pytest.fixture
def slow_commit(conn: Connection) -> Iterator[Callable[[str], None]]:
    """Let a deferred constraint of what is sent to a queue take longer than a call may."""

    def slow_down(queue: str) -> None:
        row = conn.execute("select pgque.current_event_table(%s)", [queue]).fetchone()
        assert row is not None
        conn.execute(
            f"create constraint trigger slow after insert on {row[0]}"
            " deferrable initially deferred for each row execute function check_slowly()".encode()
        )

    conn.execute(
        "create function check_slowly() returns trigger language plpgsql"
        f" as $$ begin perform pg_sleep({2 * LIMIT}); return null; end $$".encode()
    )
    yield slow_down
    conn.execute("drop function check_slowly() cascade")


def active(conn: psycopg.Connection[Any], name: str) -> bool:
    """Whether a session of this name runs a statement."""
    found = conn.execute(
        "select from pg_stat_activity as a"
        " where a.application_name = %s and a.state = 'active' and a.query like 'call %%'",
        [name],
    )
    return found.fetchone() is not None


def waiting(conn: psycopg.Connection[Any], name: str) -> list[float]:
    """For how many seconds sessions of this name wait for a lock."""
    rows = conn.execute(
        "select extract(epoch from clock_timestamp() - a.query_start)::float from pg_stat_activity as a"
        " where a.application_name = %s and a.wait_event_type = 'Lock'",
        [name],
    )
    return [row[0] for row in rows]


def test_a_statement_that_is_given_up_does_not_wait_on_in_the_server(
    dsn: str, queue: str, connect: Callable[[], Connection], client: pgque.PgqueClient, wait_until: Wait
) -> None:
    client.subscribe(queue, "c")
    named = make_conninfo(dsn, application_name="limited")
    lock(connect())
    with pgque.connect(named, autocommit=True, command_timeout=LIMIT) as limited:
        with pytest.raises(pgque.PgqueConnectionError, match="not answered"):
            limited.receive(queue, "c")
        wait_until(lambda: not waiting(client.conn, "limited"))


@pytest.mark.parametrize("waits", ["in its call", "in its commit"])
def test_a_command_ends_after_the_time_of_its_option(
    dsn: str,
    queue: str,
    connect: Callable[[], Connection],
    client: pgque.PgqueClient,
    slow_commit: Callable[[str], None],
    waits: str,
) -> None:
    client.subscribe(queue, "c")
    if waits == "in its call":
        lock(connect())
        command = ["receive", queue, "c"]
    else:
        slow_commit(queue)
        command = ["send", queue, "1"]
    done = subprocess.run(
        [sys.executable, "-m", "pgque.cli", "--command-timeout", str(LIMIT), *command],
        env={**os.environ, "PGQUE_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert f"pgque: the server has not answered for {LIMIT} s" in done.stderr


def test_statements_and_deferred_constraints_of_a_transactional_handler_have_no_limit(
    dsn: str,
    queue: str,
    client: pgque.PgqueClient,
    tick: Tick,
    wait_until: Wait,
    new_queue: Callable[[], str],
    slow_commit: Callable[[str], None],
) -> None:
    other = new_queue()
    slow_commit(other)
    client.subscribe(queue, "c")
    client.send(queue, "1")
    tick(queue)
    consumer = pgque.Consumer(dsn, queue=queue, consumer="c", transactional=True, command_timeout=LIMIT)
    handled: list[bool] = []

    @consumer.handler("*")
    def handle(message: pgque.Message, conn: psycopg.Connection[object]) -> None:
        conn.execute("select pg_sleep(%s)", [2 * LIMIT])
        pgque.send(conn, other, "x")  # with a deferred constraint that takes as long
        handled.append(True)

    with running(lambda: consumer.run(catch_signals=False), consumer.stop, 20):
        wait_until(lambda: client.consumers.get_info(queue, "c")[0].pending_events == 0)
    assert handled == [True]


def test_a_call_that_is_long_by_nature_has_no_limit(
    dsn: str, queue: str, connect: Callable[[], Connection], client: pgque.PgqueClient, wait_until: Wait
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "1")
    named = make_conninfo(dsn, application_name="unlimited")
    purged: list[int] = []
    holder = connect()
    lock(holder)
    with (
        pgque.connect(named, autocommit=True, command_timeout=LIMIT) as limited,
        running(lambda: purged.append(limited.admin.purge(queue)), lambda: None, 20),
    ):
        wait_until(lambda: any(seconds > 2 * LIMIT for seconds in waiting(client.conn, "unlimited")))
        holder.execute("commit")
    assert purged == [1]


def test_a_command_that_may_take_any_time_ends_at_once_when_it_is_interrupted(
    own_dsn: str, conn: Connection, wait_until: Wait
) -> None:
    with silent_path(own_dsn) as path, psycopg.connect(own_dsn) as holder:
        holder.execute("lock table pgque.queue in access share mode")
        command = [sys.executable, "-m", "pgque.cli", "uninstall", "--yes", "--dsn", path.dsn]
        with ended(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process:
            wait = "select from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'uninstall'"
            wait_until(lambda: conn.execute(wait).fetchall())
            path.silence()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=8)  # psycopg alone waits for ten seconds, before 3.3 for ever
        assert process.returncode == 1


# -- a second signal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        *[
            ("Worker", "threads"),
            ("Worker", "processes"),
            ("AsyncWorker", "tasks"),
            ("AsyncWorker", "blocked"),
        ],
        *[("Consumer", "threads"), ("AsyncConsumer", "tasks")],
    ],
)
def test_a_second_signal_ends_a_program_at_once_and_its_messages_are_redelivered(
    kind: str,
    use: str,
    dsn: str,
    program: Path,
    queue: str,
    client: pgque.PgqueClient,
    tick: Tick,
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "long")
    tick(queue)
    with ended(start(program, kind, dsn, queue, use, "none")) as process:
        assert said(process) == "long"

        process.send_signal(signal.SIGINT)
        # The terminal and a process manager may both send the first signal, within half a second.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    if use == "blocked":  # a handler that the signal interrupts has failed
        assert [message.status for message in client.messages.list(queue)] == ["retry"]
    else:
        assert "1 handlers are left, and their messages are redelivered" in errors
    if kind.endswith("Consumer"):
        assert [message.payload for message in client.receive(queue, "c")] == ["long"]
    elif use != "blocked":
        assert [worker.messages for worker in client.consumers.list_workers(queue, "c")] == [1]
