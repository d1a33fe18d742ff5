"""Server, databases, connections, queues and roles for every test."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import psycopg
import pytest
from psycopg import sql

from support import jit, servers
from support.servers import TestServer

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

_server: TestServer | None = None
# An ordinary role, which may create roles, to own pgque instead of the superuser.
OWNER = os.environ.get("PGQUE_TEST_OWNER", "")
# Default privileges of the owner give this role everything, as on many managed databases, and the roles of
# tests are its members: what they may do shows that pgque ends with its own grants nevertheless.
APP = "pgque_test_app"


def pytest_configure(config: pytest.Config) -> None:
    # A run that is terminated, or whose terminal is closed, must still stop its server; nohup is heeded.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _end)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell has background jobs ignore Ctrl-C, and programs that tests start and interrupt would as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(signum: int, frame: object) -> None:
    if signum == signal.SIGHUP:  # shell and kernel may both send it: the second would cut the end short
        signal.signal(signum, signal.SIG_IGN)
    pytest.exit(signal.strsignal(signum) or "", returncode=128 + signum)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.option.collectonly:
        return []
    server = _start_server()
    told = [f"server: PostgreSQL {server.version} from {server.how}", *(f"  {note}" for note in server.notes)]
    if config.getoption("numprocesses", None):  # each process of pytest-xdist starts one of its own
        pytest_unconfigure(config)
    return told


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each reason to skip, however many tests it skipped."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason.removeprefix('Skipped: ')}")


def pytest_unconfigure(config: pytest.Config) -> None:
    global _server
    if _server is not None:
        _server.stop()
        _server = None


_REQUIRABLE = {
    "browser": "browser",
    "cron": "pg_cron",
    "docker": "docker",
    "spark": "spark",
    "pgbouncer": "pgbouncer",
    "prometheus": "prometheus",
    "slow": "slow",
    "programs": "programs",
}


def _required() -> set[str]:
    """The words of PGQUE_REQUIRE: those of _REQUIRABLE, jit (the guard over JIT), all."""
    return {word.strip() for word in os.environ.get("PGQUE_REQUIRE", "").split(",")} - {""}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-case",
        action="store_true",
        help="run only the first case of each parametrized test: every statement, on one more version",
    )


@pytest.hookimpl(
    trylast=True
)  # after -m and -k, so that a test whose first case they leave out runs the next
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--first-case"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    chosen = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = first.values()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure where PGQUE_REQUIRE (a name of _REQUIRABLE, or all) demands the thing."""
    report = yield
    # pytest-xdist sends no text that is not valid Unicode, and some tests log such.
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    required = _required()
    if report.skipped and not hasattr(report, "wasxfail"):
        for word, marker in _REQUIRABLE.items():
            if word in required and item.get_closest_marker(marker) is not None:
                report.outcome = "failed"
        if "all" in required:
            report.outcome = "failed"
        if report.failed:
            report.longrepr = (
                f"skipped, but PGQUE_REQUIRE={os.environ['PGQUE_REQUIRE']}: {report.longreprtext}"
            )
    return report


def _start_server() -> TestServer:
    global _server
    if _server is None:
        try:
            _server = servers.choose()
            with _admin(_server) as admin:
                if OWNER:
                    admin.execute(sql.SQL("create role {} createrole").format(sql.Identifier(OWNER)))
                if admin.execute("select pg_catalog.to_regrole(%s)", [APP]).fetchone() == (None,):
                    admin.execute(sql.SQL("create role {}").format(sql.Identifier(APP)))
        except Exception as error:
            raise pytest.UsageError(str(error)) from error
    return _server


@pytest.fixture(scope="session")
def server() -> Iterator[TestServer]:
    """The running server. In the end it has compiled none of pgque's statements, see support/jit.py."""
    server = _start_server()
    yield server
    _nothing_compiled(server)


def _nothing_compiled(server: TestServer) -> None:
    problem = jit.problem(server.dsn)
    if problem is None:
        assert jit.compiled(server.dsn) == []
    elif "jit" in _required():
        pytest.fail(f"PGQUE_REQUIRE={os.environ['PGQUE_REQUIRE']}: {problem}")


@pytest.fixture
def may_compile(server: TestServer) -> Iterator[None]:
    """Do not count what a test compiles that calls private functions itself or forbids plans.

    What the tests before it compiled is counted first.
    """
    _nothing_compiled(server)
    yield
    jit.forget(server.dsn)


def _admin(server: TestServer) -> Connection:
    return psycopg.connect(server.dsn, autocommit=True)


def create_database(server: TestServer, prefix: str, template: str = "template0") -> str:
    """Create a database with a unique name, empty or as the template is; return the name.

    Its files are copied: to log each page, as PostgreSQL does since 15, takes three times as much of a processor.
    """
    name = f"{prefix}_{secrets.token_hex(4)}"
    with _admin(server) as admin:
        how = "strategy file_copy" if admin.info.server_version >= 150000 else ""
        command = f"create database {{}} template {{}} {how}"
        admin.execute(sql.SQL(command).format(sql.Identifier(name), sql.Identifier(template)))
    return name


def drop_database(server: TestServer, name: str) -> None:
    """Drop the database, ending whatever is connected to it."""
    with _admin(server) as admin:
        admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


@contextmanager
def as_owner(dsn: str) -> Iterator[Connection]:
    """Connect as whoever installs, the superuser or OWNER; what is done is committed at the end."""
    with psycopg.connect(dsn) as connection:
        if OWNER and connection.info.parameter_status("is_superuser") == "on":
            owner, database = sql.Identifier(OWNER), sql.Identifier(connection.info.dbname)
            connection.execute(sql.SQL("grant create on database {} to {}").format(database, owner))
            connection.execute(sql.SQL("set session authorization {}").format(owner))
        yield connection


def install(dsn: str) -> None:
    """Install pgque from the repository's file, in one transaction."""
    with as_owner(dsn) as connection:
        connection.execute(servers.SQL_FILE.read_bytes())


KINDS = ("tables", "sequences", "functions", "types")


def default_privileges(connection: Connection, to: str, verb: str = "grant", where: str = "") -> None:
    """Give default privileges on all kinds of objects to roles, or revoke them."""
    for kind in KINDS if where else (*KINDS, "schemas"):
        connection.execute(
            f"alter default privileges {where} {verb} all on {kind} {'to' if verb == 'grant' else 'from'} {to}".encode()
        )


def install_for_app(dsn: str) -> None:
    """Install where default privileges give APP everything. Afterwards they do so in schema pgque only, so that
    tables of tests are not given away."""
    with as_owner(dsn) as connection:
        default_privileges(connection, APP)
        connection.execute(servers.SQL_FILE.read_bytes())
        default_privileges(connection, APP, "revoke")
        default_privileges(connection, APP, where="in schema pgque")


@pytest.fixture(scope="session")
def dsn(server: TestServer) -> Iterator[str]:
    """Connection string of a database with pgque, as superuser, for the whole session."""
    name = create_database(server, "pgque_test")
    try:
        install_for_app(server.dsn_for(name))
        yield server.dsn_for(name)
    finally:
        drop_database(server, name)


@pytest.fixture(scope="session")
def installed(server: TestServer) -> Iterator[str]:
    """The name of a database with pgque to copy: five times faster than to install it again."""
    name = create_database(server, "pgque_template")
    try:
        install_for_app(server.dsn_for(name))
        yield name
    finally:
        drop_database(server, name)


@pytest.fixture
def fresh_dsn(server: TestServer) -> Iterator[str]:
    """Connection string of a new, empty database; dropped afterwards. Roles are of the whole server."""
    name = create_database(server, "pgque_fresh")
    try:
        yield server.dsn_for(name)
    finally:
        drop_database(server, name)


@pytest.fixture
def own_dsn(server: TestServer, installed: str) -> Iterator[str]:
    """Connection string of a database of the test's own, with pgque."""
    name = create_database(server, "pgque_own", installed)
    try:
        yield server.dsn_for(name)
    finally:
        drop_database(server, name)


class Connect:
    """Open connections that are closed after the test. Autocommit unless said otherwise."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._open: list[Connection] = []

    def __call__(self, dsn: str | None = None, *, autocommit: bool = True, **options: Any) -> Connection:
        connection: Connection = psycopg.connect(dsn or self._dsn, autocommit=autocommit, **options)
        self._open.append(connection)
        return connection

    def close_all(self) -> None:
        """Close every connection, whatever it is doing: the server ends what it was running."""
        for connection in self._open:
            if not connection.closed and connection.info.transaction_status == 1:  # a statement is running
                connection.cancel_safe(timeout=5)
            connection.close()
        self._open.clear()


@pytest.fixture
def connect(dsn: str) -> Iterator[Connect]:
    """Factory of connections to the test database: connect(dsn=None, autocommit=True, **options)."""
    factory = Connect(dsn)
    yield factory
    factory.close_all()


@pytest.fixture
def conn(connect: Connect) -> Connection:
    """An autocommit connection as superuser."""
    return connect()


class Operator:
    """A connection that outlives a test, so that not each test has a new session compile the functions."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._open: Connection | None = None

    def run(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement, in a new session if a test has ended this one."""
        if self._open is not None:
            try:
                self._open.execute("select 1")
            except psycopg.OperationalError:
                self.close()
        if self._open is None:
            self._open = psycopg.connect(self._dsn, autocommit=True, options="-c lock_timeout=15s")
        cursor = self._open.execute(statement.encode(), parameters, prepare=False)
        return cursor.fetchall()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


@pytest.fixture(scope="session")
def operator(dsn: str) -> Iterator[Operator]:
    """The session that makes and drops the queues of tests, and ticks them."""
    operator = Operator(dsn)
    yield operator
    operator.close()


class Queues:
    """Create queues with unique names that are dropped, with force, after the test."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self.names: list[str] = []

    def __call__(self, name: str | None = None) -> str:
        name = name or f"q_{secrets.token_hex(5)}"
        self._operator.run("select pgque.create_queue(%s)", name)
        self.names.append(name)
        return name

    def drop_all(self) -> None:
        drop = "select pgque.drop_queue(q.queue_name, true) from pgque.queue as q where q.queue_name = %s"
        for name in self.names:
            self._operator.run(drop, name)


@pytest.fixture
def new_queue(operator: Operator, connect: Connect) -> Iterator[Queues]:
    """Factory of queues: new_queue() or new_queue("a name")."""
    queues = Queues(operator)
    yield queues
    connect.close_all()  # an open transaction of the test would keep the queue from being dropped
    queues.drop_all()


@pytest.fixture
def queue(new_queue: Queues) -> str:
    """The name of a new queue."""
    return new_queue()


@pytest.fixture
def tick(operator: Operator) -> Callable[[str], int | None]:
    """tick(queue) makes everything committed so far receivable; it returns the tick's id."""

    def do(queue: str) -> int | None:
        operator.run("select pgque.force_next_tick(%s)", queue)
        [(tick_id,)] = operator.run("select pgque.ticker(%s)", queue)
        found: int | None = tick_id
        return found

    return do


@dataclass(frozen=True, slots=True)
class Role:
    """A login role and a connection string for it."""

    name: str
    dsn: str


class Roles:
    """Create login roles that are members of the given roles, and of APP; dropped after the test."""

    def __init__(self, server: TestServer, dsn: str) -> None:
        self._server = server
        self._dsn = dsn
        self._names: list[str] = []

    def __call__(self, *member_of: str, dbname: str | None = None) -> Role:
        """roles("reader"), roles("writer", "reader"): short for pgque_reader and so on; roles() has none."""
        name = f"test_role_{secrets.token_hex(4)}"
        password = secrets.token_hex(8)
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("create role {} login password {}").format(
                    sql.Identifier(name), sql.Literal(password)
                )
            )
            self._names.append(name)
            # Roles are of the whole server: grant_queue() to one of these gives its rights to the roles of later tests.
            given = "select r.rolname::text from pg_catalog.pg_roles as r where r.rolname = any(%s)"
            given += " and pg_catalog.pg_has_role(r.oid, 'pgque_user', 'member')"
            found = connection.execute(given, [[APP, "pgque_reader", "pgque_writer"]]).fetchall()
            assert found == [], "an earlier test made these members of pgque_user: give it roles of its own"
            connection.execute(sql.SQL("grant {} to {}").format(sql.Identifier(APP), sql.Identifier(name)))
            for group in member_of:
                full = group if group.startswith(("pgque_", "pg_")) else f"pgque_{group}"
                connection.execute(
                    sql.SQL("grant {} to {}").format(sql.Identifier(full), sql.Identifier(name))
                )
            database = dbname or connection.info.dbname
        return Role(name, self._server.dsn_for(database, user=name, password=password))

    def drop_all(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            for name in self._names:
                connection.execute(
                    "select pg_catalog.pg_terminate_backend(a.pid, 5000)"
                    " from pg_catalog.pg_stat_activity as a"
                    " where a.usename = %s",
                    [name],
                )
                connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(name)))
                connection.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def roles(server: TestServer, dsn: str) -> Iterator[Roles]:
    """Factory of login roles: roles("reader"), roles("writer"), roles("admin"), roles()."""
    factory = Roles(server, dsn)
    yield factory
    factory.drop_all()


@pytest.fixture
def reader(roles: Roles) -> Role:
    """A login role that may consume."""
    return roles("reader")


@pytest.fixture
def writer(roles: Roles) -> Role:
    """A login role that may produce."""
    return roles("writer")


@pytest.fixture
def admin(roles: Roles) -> Role:
    """A login role that may operate."""
    return roles("admin")


@pytest.fixture
def nobody(roles: Roles) -> Role:
    """A login role without any grant."""
    return roles()


def _wait(condition: Callable[[], object], what: str, timeout: float) -> None:
    pause = 0.005
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout} s")
        time.sleep(pause)
        pause = min(1.1 * pause, 0.02)  # what takes long is not asked for all the time


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """wait_until(condition, what="…", timeout=30) polls until the condition is true, and fails otherwise."""

    def do(condition: Callable[[], object], what: str = "condition", timeout: float = 30) -> None:
        _wait(condition, what, timeout)

    return do


@pytest.fixture
def wait_for_lock(connect: Connect) -> Callable[..., None]:
    """wait_for_lock(pid, timeout=30) returns once that backend waits for a lock."""
    observer = connect()

    def do(pid: int, timeout: float = 30) -> None:
        def waiting() -> bool:
            row = observer.execute(
                "select a.wait_event_type = 'Lock' from pg_catalog.pg_stat_activity as a where a.pid = %s",
                [pid],
            ).fetchone()
            assert row is not None, f"backend {pid} is gone"
            return bool(row[0])

        _wait(waiting, f"backend {pid} waiting for a lock", timeout)

    return do


@dataclass(slots=True)
class Background(Generic[T]):
    """A call that runs in a thread on its own connection."""

    pid: int
    connection: Connection
    _thread: threading.Thread
    _box: list[tuple[bool, Any]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the call has returned or raised."""
        return not self._thread.is_alive()

    def result(self, timeout: float = 30) -> T:
        """Wait for the call; return what it returned or raise what it raised."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise AssertionError(f"the call in backend {self.pid} did not end within {timeout} s")
        good, value = self._box[0]
        if not good:
            raise value
        result: T = value
        return result


@pytest.fixture
def background(connect: Connect) -> Iterator[Callable[..., Background[Any]]]:
    """background(call, connection=None) runs call(connection) in a thread; the result has .pid and .result().

    Without a connection the call gets its own, in autocommit.
    """
    started: list[Background[Any]] = []

    def do(call: Callable[[Connection], T], connection: Connection | None = None) -> Background[T]:
        own = connection or connect()
        box: list[tuple[bool, Any]] = []

        def run() -> None:
            try:
                box.append((True, call(own)))
            except BaseException as error:
                box.append((False, error))

        thread = threading.Thread(target=run, daemon=True)
        job: Background[T] = Background(own.info.backend_pid, own, thread, box)
        thread.start()
        started.append(job)
        return job

    yield do
    connect.close_all()
    for job in started:
        job._thread.join(10)
