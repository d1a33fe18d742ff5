"""Log in as a PostgreSQL role, and the connections that the sessions of the page share."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ConnStatus, TransactionStatus
from psycopg.rows import DictRow, dict_row

from ..client.dsn import with_keepalives
from ..client.limit import COMMAND_TIMEOUT, END_WHEN_SILENT, LimitedConnection, within
from ..errors import PgqueConnectionError
from .config import Database

if TYPE_CHECKING:
    from typing_extensions import LiteralString

log = logging.getLogger("pgque.web")

# The settings of one transaction. A setting of the session would stay with a pooler's session, where it would
# refuse other clients' sends. A role or a database that is read only by its own setting stays so. JIT is
# off: the planner expects many rows of functions and of tables that were never analyzed. It would compile the
# page's queries, which takes longer than they do.
_SETTINGS = (
    f"select pg_catalog.set_config('jit', 'off', true), {END_WHEN_SILENT},"
    " pg_catalog.set_config('statement_timeout', %s, true),"
    " case when %s then pg_catalog.set_config('transaction_read_only', 'on', true) end"
)

# Checks that the role of a connection may log in. Passwords cannot be checked, because no role may read them.
_CAN_LOG_IN: LiteralString = (
    "select r.rolcanlogin and coalesce(r.rolvaliduntil > pg_catalog.now(), true) as allowed"
    " from pg_catalog.pg_roles as r where r.rolname = session_user"
)

_SERVER: LiteralString = (
    "select pg_catalog.current_setting('max_connections')::int as most,"
    " count(*) > 0 as installed, coalesce(bool_or(pg_catalog.has_schema_privilege(n.oid, 'usage')"
    " and pg_catalog.has_function_privilege(p.oid, 'execute')), false) as allowed"
    " from pg_catalog.pg_proc as p join pg_catalog.pg_namespace as n on n.oid = p.pronamespace"
    " where n.nspname = 'pgque' and p.proname = 'my_rights'"
)

Parameters: TypeAlias = Sequence[object] | Mapping[str, object]

SHARE = 8  # the page uses one part in this many of the server's max_connections
LEAST = 4  # connections of the page where that is less
OF_SESSION = 3  # connections of one session
POOL_WAIT = 5.0  # seconds that a request waits for a connection
WAITING = 20  # requests of one role that wait for one: they keep threads from the requests of others
POOL_IDLE = 60.0  # seconds after which an idle connection is closed
POOL_CHECK = 1.0  # seconds in which it has to answer before it is lent; a silent one is replaced
POOL_AGE = 300.0  # seconds after which the server is asked for the password again

# Parameters with which libpq would log in without the password that was typed.
_NOT_TAKEN = ("user", "password", "passfile", "sslcert", "sslkey", "sslpassword")

# libpq does not pass on the SQLSTATE of a connection that failed, so the text tells 28P01 and 28000 from a
# server that takes nobody in. If a server in another language has asked for the password, what it then says
# counts as a failed login.
_REFUSED = re.compile(
    r"authentication failed|not permitted to log in|pg_hba\.conf|role \".*\" does not exist"
)
_UNREACHABLE = re.compile(
    r"too many (clients|connections)|connection slots|no more connections|starting up|shutting down|recovery"
    r"|server login|cannot connect|not currently accepting|database .* does not exist"
    r"|closed the connection|terminating connection|could not (receive|send)|SYSCALL|timeout"
)


class LoginRefusedError(Exception):
    """Report why a login was refused; the login page shows the text."""


class WrongPasswordError(LoginRefusedError):
    """Report that the server refused user and password: only this counts as a failed login."""


class UnreachableError(LoginRefusedError):
    """Report that the database cannot be reached, whatever the password is."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection on which each statement is a transaction, which ends after a timeout and may be read
    only."""

    _connection: psycopg.Connection[DictRow]
    _timeout: float
    _read_only: bool

    def execute(
        self, query: LiteralString, parameters: Parameters = (), timeout: float | None = None
    ) -> psycopg.Cursor[DictRow]:
        """Run a statement, which the server ends after `timeout` seconds, and return its cursor. Raises
        psycopg.Error."""
        seconds = timeout or self._timeout
        with within(self._connection, seconds + COMMAND_TIMEOUT), self._connection.transaction():
            self._connection.execute(_SETTINGS, [f"{1000 * seconds:.0f}ms", self._read_only])
            return self._connection.execute(query, parameters)

    @contextmanager
    def steady(self) -> Iterator[Callable[[LiteralString, Parameters], psycopg.Cursor[DictRow]]]:
        """Lend a call that runs statements in one transaction, which sees one state of the database and does
        not change a row that another one changed meanwhile: psycopg.errors.SerializationFailure."""
        with within(self._connection, self._timeout + COMMAND_TIMEOUT), self._connection.transaction():
            self._connection.execute("set transaction isolation level repeatable read")
            self._connection.execute(_SETTINGS, [f"{1000 * self._timeout:.0f}ms", self._read_only])
            yield self._connection.execute

    def rendered(self, query: LiteralString, parameters: Parameters) -> str:
        """Return a statement with its parameters as literals, to be shown."""
        return psycopg.ClientCursor(self._connection).mogrify(query, parameters)


@dataclass(slots=True, eq=False)
class _Held:
    """An open connection of a session."""

    owner: Connections
    connection: LimitedConnection[DictRow]
    opened: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)

    @property
    def usable(self) -> bool:
        status = self.connection.pgconn.status
        return (
            status == ConnStatus.OK
            and self.connection.info.transaction_status == TransactionStatus.IDLE
            and time.monotonic() - self.opened < POOL_AGE
        )

    def close(self) -> None:
        with suppress(psycopg.Error):
            self.connection.close()


class Lender:
    """Lend the connections of the page to one database: at most `most` in all, and half of them, or 2, to one
    role.

    A request that has to wait comes before those whose role or session has more. Idle connections are closed
    to make room.
    """

    def __init__(self, most: int | None) -> None:
        self._given = most
        self._most = most or LEAST
        self._changed = threading.Condition()
        self._idle: list[_Held] = []  # the one that was used last is at the end
        self._lent: Counter[Connections] = Counter()
        self._waiting: list[_Waiting] = []
        self._timer: threading.Timer | None = None

    def learn(self, max_connections: int) -> None:
        """Take the share of a server, unless the options say how many connections the page may have."""
        with self._changed:
            self._most = self._given or max(max_connections // SHARE, LEAST)

    @contextmanager
    def lend(self, owner: Connections, lasting: bool) -> Iterator[LimitedConnection[DictRow]]:
        """Lend a connection of a session. Raises PgqueConnectionError when none can be had.

        `lasting` is for work that goes on after its page was answered: it leaves the last one to pages.
        """
        held = self._begin(_Waiting(owner, lasting))
        try:
            if held is not None and not (held.usable and owner.check(held.connection)):
                held.close()
                held = None
            held = held or owner.connect()
            yield held.connection
        finally:
            self._end(owner, held)

    def keep(self, held: _Held) -> None:
        """Take the connection of a login for the requests that follow."""
        with self._changed:
            self._lent[held.owner] += 1
        self._end(held.owner, held)

    def close(self, owner: Connections) -> None:
        """Close the idle connections of a session; those that are lent follow."""
        with self._changed:
            closing = [held for held in self._idle if held.owner is owner]
            self._idle = [held for held in self._idle if held.owner is not owner]
            self._changed.notify_all()
        _close(closing)

    def _begin(self, mine: _Waiting) -> _Held | None:
        """Wait for the turn of a session. Return an idle connection of it, or None: then there is room for
        another one."""
        until, owner = time.monotonic() + POOL_WAIT, mine.owner
        with self._changed:
            if sum(one.owner.user == owner.user for one in self._waiting) >= WAITING:
                raise PgqueConnectionError(
                    f"{WAITING} requests of your role wait for a connection",
                    hint="Try again in a few seconds.",
                )
            self._waiting.append(mine)
            try:
                while self._next() is not mine:
                    owner.need()
                    left = until - time.monotonic()
                    if left <= 0:
                        reason = self._full(mine) or "other requests come first"
                        raise PgqueConnectionError(reason, hint="Try again in a few seconds.")
                    self._changed.wait(left)
                owner.need()
                self._lent[owner] += 1
                found = next((held for held in reversed(self._idle) if held.owner is owner), None)
                if found is not None:
                    self._idle.remove(found)
                closing = self._surplus(owner)
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()
        _close(closing)
        return found

    def _next(self) -> _Waiting | None:
        """Return the request that gets the next connection, of those that may have one."""
        ready = [one for one in self._waiting if self._full(one) is None]
        # Of equals, min() returns the first one.
        return min(ready, key=lambda one: (self._of_role(one.owner), self._lent[one.owner]), default=None)

    @property
    def _all(self) -> int:
        return sum(self._lent.values())

    def _of_role(self, owner: Connections) -> int:
        return sum(n for other, n in self._lent.items() if other.user == owner.user)

    @property
    def _most_of_role(self) -> int:
        return max(self._most // 2, 2)  # work on dead letters leaves one to pages

    def _full(self, waiting: _Waiting) -> str | None:
        """Return why a request has to wait, or None."""
        owner = waiting.owner
        for used, most, whose in (
            (self._lent[owner], OF_SESSION, "of this session"),
            (self._of_role(owner), self._most_of_role, "that this page has for your role"),
            (self._all, self._most, "of this page"),
        ):
            if used >= (max(most - 1, 1) if waiting.lasting else most):
                return f"all {most} connections {whose} are in use"
        return None

    def _surplus(self, owner: Connections) -> list[_Held]:
        """Remove the idle connections that are too many beside those that are lent, the oldest ones first."""
        of_role = [held for held in self._idle if held.owner.user == owner.user]
        closing = of_role[: max(self._of_role(owner) + len(of_role) - self._most_of_role, 0)]
        rest = [held for held in self._idle if held not in closing]
        closing += rest[: max(self._all + len(rest) - self._most, 0)]
        self._idle = [held for held in self._idle if held not in closing]
        return closing

    def _end(self, owner: Connections, held: _Held | None) -> None:
        """Take a connection back, and close it if it is of no use."""
        closing = [] if held is None else [held]
        with self._changed:
            self._lent[owner] -= 1
            if self._lent[owner] == 0:
                del self._lent[owner]
            if held is not None and held.usable and not owner.closed:
                held.used = time.monotonic()
                self._idle.append(held)
                closing = self._surplus(owner)
                self._close_later()
            self._changed.notify_all()
        _close(closing)

    def _close_later(self) -> None:
        if self._timer is None and self._idle:
            self._timer = threading.Timer(POOL_IDLE / 4, self._close_idle)
            self._timer.daemon = True
            self._timer.start()

    def _close_idle(self) -> None:
        now = time.monotonic()
        with self._changed:
            closing = [held for held in self._idle if now - held.used > POOL_IDLE or not held.usable]
            self._idle = [held for held in self._idle if held not in closing]
            self._timer = None
            self._close_later()
        _close(closing)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for a connection."""

    owner: Connections
    lasting: bool


def _close(connections: Iterable[_Held]) -> None:
    for held in connections:
        held.close()


class Connections:
    """The connections of one session: those of one role to one database."""

    def __init__(self, lender: Lender, conninfo: str, user: str, statement_timeout: int) -> None:
        self.user = user
        self.closed = False
        self.over = False  # the server no longer lets the role in
        self._lender = lender
        self._conninfo = conninfo
        self._timeout = statement_timeout

    @contextmanager
    def take(
        self, read_only: bool, timeout: float | None = None, lasting: bool = False
    ) -> Iterator[Connection]:
        """Lend a connection. Its statements end after `timeout` seconds, and change nothing when it is
        `read_only`; `lasting` work leaves the last connection to pages. Raises PgqueConnectionError when none
        can be had; `over` then tells whether the server has refused the role."""
        with self._lender.lend(self, lasting) as connection:
            yield Connection(connection, timeout or self._timeout, read_only)

    def connect(self) -> _Held:
        """Return a new connection. Raises PgqueConnectionError."""
        self.need()
        try:
            return self.log_in()
        except UnreachableError as error:
            raise PgqueConnectionError(str(error), hint="Try again in a few seconds.") from error
        except LoginRefusedError as error:
            self.over = True
            raise PgqueConnectionError(str(error)) from error

    def log_in(self) -> _Held:
        """Return a new connection. Raises LoginRefusedError."""
        try:
            connection = LimitedConnection[DictRow].connect(
                self._conninfo, autocommit=True, row_factory=dict_row, prepare_threshold=None
            )
        except psycopg.Error as error:
            log.info("login of %r failed: %s", self.user, str(error).strip())
            raise _refused(error) from None
        if not connection.pgconn.used_password:
            connection.close()
            raise LoginRefusedError(
                "The server accepts this role without a password, so this page refuses it."
                " Have pg_hba.conf ask for one, for example with scram-sha-256, or name another host in"
                " --dsn."
            )
        return _Held(self, connection)

    def check(self, connection: psycopg.Connection[DictRow]) -> bool:
        """Return whether a connection answers. Raises PgqueConnectionError if its role may not log in."""
        try:
            with within(connection, POOL_CHECK):
                row = connection.execute(_CAN_LOG_IN).fetchone()
        except psycopg.errors.UndefinedObject:  # the role was dropped
            row = None
        except psycopg.Error:
            return False
        if row is None or not row["allowed"]:
            connection.close()
            self.over = True
            self.need()
        return True

    def need(self) -> None:
        """Raise PgqueConnectionError if the session has ended, or the server has refused its role."""
        if self.closed or self.over:
            raise PgqueConnectionError("the session has ended", hint="Log in again.")

    def close(self) -> None:
        """Close all connections."""
        self.closed = True
        self._lender.close(self)


def _refused(error: psycopg.Error) -> LoginRefusedError:
    """Return why a connection could not be had."""
    text = str(error)
    asked = bool(error.pgconn and error.pgconn.used_password)
    # A refused password comes first, because the text contains the name that was typed.
    if _REFUSED.search(text):
        return WrongPasswordError("Login failed. Check user and password.")
    if "permission denied for database" in text:
        return LoginRefusedError("This role may not connect to this database.")
    if asked and not _UNREACHABLE.search(text):
        return WrongPasswordError("Login failed. Check user and password.")
    return UnreachableError("The database cannot be reached, or it takes no more connections.")


def log_in(lender: Lender, database: Database, user: str, password: str, timeout: int) -> Connections:
    """Return connections of the role `user`, after the server has accepted its password.

    Raises LoginRefusedError, with a text that tells nobody whether the role exists.
    """
    # For an empty password, libpq would take one from PGPASSWORD or a password file.
    if not user or not password or "\0" in user + password:
        raise WrongPasswordError("Login failed. Check user and password.")
    given: dict[str, Any] = {k: v for k, v in conninfo_to_dict(database.dsn).items() if k not in _NOT_TAKEN}
    conninfo = with_keepalives(
        make_conninfo("", **given, user=user, password=password, gssencmode="disable"), "pgque web"
    )
    connections = Connections(lender, conninfo, user, timeout)
    held = connections.log_in()
    try:
        row = held.connection.execute(_SERVER).fetchone() or {}
    except psycopg.Error as error:
        held.close()
        raise UnreachableError("The database cannot be reached, or it does not answer.") from error
    if not row["allowed"]:
        held.close()
    if not row["installed"]:
        raise LoginRefusedError("pgque is not installed in this database. Install it: pgque install --dsn …")
    if not row["allowed"]:
        raise LoginRefusedError(
            "This role has no right in pgque. Grant it pgque_reader, pgque_writer or pgque_admin,"
            " or a right to one queue with pgque.grant_queue(queue, role, right)."
        )
    lender.learn(row["most"])
    lender.keep(held)
    return connections
