"""Log in as a PostgreSQL role, and the connections of one session of the page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool, PoolTimeout

from ..client.dsn import with_keepalives
from ..client.limit import COMMAND_TIMEOUT, LimitedConnection, within
from ..errors import PgqueConnectionError
from .config import Database

if TYPE_CHECKING:
    from typing_extensions import LiteralString

log = logging.getLogger("pgque.web")

# The settings of one transaction. A setting of the session would stay with a pooler's session, where it would
# refuse other clients' sends. A role or a database that is read only by a setting of its own stays so. JIT is
# off: the planner expects many rows of functions and of tables that were never analyzed. It would compile the
# page's queries, which takes longer than they do.
_SETTINGS = (
    "select pg_catalog.set_config('jit', 'off', true), pg_catalog.set_config('statement_timeout', %s, true),"
    " case when %s then pg_catalog.set_config('transaction_read_only', 'on', true) end"
)

Parameters: TypeAlias = Sequence[object] | Mapping[str, object]

POOL_SIZE = 3  # connections of one session
POOL_WAIT = 5.0  # seconds that a request waits for one
POOL_IDLE = 60.0  # seconds after which an idle connection is closed
POOL_CHECK = 1.0  # seconds in which it has to answer before it is lent; a silent one is replaced

# What would let the page in with something else than the password that was typed.
_NOT_TAKEN = ("user", "password", "passfile", "sslcert", "sslkey", "sslpassword")


class LoginRefusedError(Exception):
    """Say why nobody is let in; the text is shown on the login page."""


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


class Connections:
    """A small pool of connections of one role to one database."""

    def __init__(self, conninfo: str, statement_timeout: int) -> None:
        self._timeout = statement_timeout
        self._pool = ConnectionPool(
            conninfo,
            connection_class=LimitedConnection[DictRow],
            kwargs={"autocommit": True, "row_factory": dict_row, "prepare_threshold": None},
            configure=_need_password,
            check=_check,
            min_size=0,
            max_size=POOL_SIZE,
            max_idle=POOL_IDLE,
            num_workers=1,
            open=True,
        )

    @contextmanager
    def take(self, read_only: bool, timeout: float | None = None) -> Iterator[Connection]:
        """Lend a connection. Its statements end after `timeout` seconds, and change nothing when it is
        `read_only`. Raises PgqueConnectionError when none can be had."""
        try:
            with self._pool.connection(POOL_WAIT) as connection:
                yield Connection(connection, timeout or self._timeout, read_only)
        except PoolTimeout as error:
            raise PgqueConnectionError(
                "the database cannot be reached, or all connections of this session are busy",
                hint="Try again in a few seconds.",
            ) from error

    def close(self) -> None:
        """Close all connections."""
        self._pool.close(timeout=1)


def _check(connection: psycopg.Connection[Any]) -> None:
    """Raise psycopg.OperationalError for a connection that was lost, or that does not answer."""
    with within(connection, POOL_CHECK):
        ConnectionPool.check_connection(connection)


def _need_password(connection: psycopg.Connection[Any]) -> None:
    """Refuse a server that did not ask for the password: it would let anybody in as this role."""
    if not connection.pgconn.used_password:
        raise LoginRefusedError(
            "The server accepts this role without a password, so this page refuses it."
            " Have pg_hba.conf ask for one, for example with scram-sha-256, or name another host in --dsn."
        )


def log_in(database: Database, user: str, password: str, statement_timeout: int) -> Connections:
    """Return connections of the role `user`, after the server has accepted its password.

    Raises LoginRefusedError, with a text that tells nobody whether the role exists.
    """
    wrong = LoginRefusedError("Login failed. Check user and password, and that the database can be reached.")
    # libpq would look for an empty password in PGPASSWORD and in password files.
    if not user or not password or "\0" in user + password:
        raise wrong
    given = {k: v for k, v in conninfo_to_dict(database.dsn).items() if k not in _NOT_TAKEN}
    conninfo = with_keepalives(
        make_conninfo("", **given, user=user, password=password, gssencmode="disable"), "pgque web"
    )
    try:
        with LimitedConnection.connect(conninfo, autocommit=True, prepare_threshold=None) as connection:
            _need_password(connection)
            row = connection.execute(
                "select count(*) > 0, coalesce(bool_or(pg_catalog.has_schema_privilege(n.oid, 'usage')"
                " and pg_catalog.has_function_privilege(p.oid, 'execute')), false)"
                " from pg_catalog.pg_proc as p join pg_catalog.pg_namespace as n on n.oid = p.pronamespace"
                " where n.nspname = 'pgque' and p.proname = 'get_queue_info'"
            ).fetchone()
    except psycopg.Error as error:
        log.info("login of %r to %s failed: %s", user, database.label, str(error).strip())
        raise wrong from None
    if row is None or not row[0]:
        raise LoginRefusedError("pgque is not installed in this database. Install it: pgque install --dsn …")
    if not row[1]:
        raise LoginRefusedError(
            "This role has no right to read queues of pgque. Grant it pgque_reader or pgque_admin,"
            " or a right to one queue with pgque.grant_queue(queue, role, right)."
        )
    return Connections(conninfo, statement_timeout)
