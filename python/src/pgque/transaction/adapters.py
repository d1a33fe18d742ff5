"""Run a statement in the transaction of whatever connection a program has, and read its errors.

No library is imported before an object of it arrives. Each library has one function here, or two, which gets
the object, the statement and its parameters, and returns rows. Nothing here commits or rolls back.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import psycopg
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from ..errors import (
    PgqueBadArgumentError,
    PgqueConnectionError,
    PgqueError,
    from_encoding,
    from_fields,
    from_psycopg,
    from_value,
)
from .portable import Row, numbered, portable

Params: TypeAlias = Mapping[str, object]
Rows: TypeAlias = Sequence[Row]


def run(target: object, sql: str, params: Params) -> Rows:
    """Run a statement on what blocks, and return its rows. Raises TypeError for what has no such way."""
    reach = _alias if isinstance(target, str) else _SYNC.get(_library(target), _refuse)
    with _translated(params):
        return reach(target, *portable(sql, params))


async def run_async(target: object, sql: str, params: Params) -> Rows:
    """Run a statement on what is awaited, and return its rows. Raises TypeError for what has no such way."""
    reach = _ASYNC.get(_library(target), _refuse_async)
    with _translated(params):
        return await reach(target, *portable(sql, params))


def _library(target: object) -> str:
    """Return the library that the class of an object, or one that it extends, is of; "" for others.

    A tracer's proxy has the class of what it wraps as its `__class__`.
    """
    for cls in target.__class__.__mro__:
        name = cls.__module__.partition(".")[0]
        if name in _SYNC or name in _ASYNC:
            return name
    return ""


# -- psycopg -------------------------------------------------------------------------------------------

# A pooler in transaction mode may give the next statement another session, where the name of a prepared
# statement can be that of another client's statement, since psycopg takes the same names in each process. So
# nothing is prepared here, whatever the caller's connection is set to.


@contextmanager
def unprepared(connection: object) -> Iterator[None]:
    """Have a connection prepare nothing in the block, if it is one of psycopg below another library."""
    if not isinstance(connection, (psycopg.Connection, psycopg.AsyncConnection)):
        yield
        return
    threshold = connection.prepare_threshold
    connection.prepare_threshold = None
    try:
        yield
    finally:
        connection.prepare_threshold = threshold


def _psycopg(target: Any, sql: str, params: Params) -> Rows:
    if isinstance(target, psycopg.Cursor):  # which the caller may still read from
        target = target.connection
    if not isinstance(target, psycopg.Connection):
        raise _refusal(target, is_async=False)
    if issubclass(target.cursor_factory, psycopg.RawCursor):
        cursor = psycopg.Cursor(target, row_factory=tuple_row)
    else:
        cursor = target.cursor(row_factory=tuple_row)
    with cursor:
        return cursor.execute(sql, params, prepare=False).fetchall()


async def _psycopg_async(target: Any, sql: str, params: Params) -> Rows:
    if isinstance(target, psycopg.AsyncCursor):
        target = target.connection
    if not isinstance(target, psycopg.AsyncConnection):
        raise _refusal(target, is_async=True)
    if issubclass(target.cursor_factory, psycopg.AsyncRawCursor):
        cursor = psycopg.AsyncCursor(target, row_factory=tuple_row)
    else:
        cursor = target.cursor(row_factory=tuple_row)
    async with cursor:
        await cursor.execute(sql, params, prepare=False)
        return await cursor.fetchall()


def _psycopg_pool(target: Any, sql: str, params: Params) -> Rows:
    if not isinstance(target, ConnectionPool):
        raise _refusal(target, is_async=False)
    with target.connection() as conn:
        return _psycopg(conn, sql, params)


async def _psycopg_pool_async(target: Any, sql: str, params: Params) -> Rows:
    if not isinstance(target, AsyncConnectionPool):
        raise _refusal(target, is_async=True)
    async with target.connection() as conn:
        return await _psycopg_async(conn, sql, params)


# -- psycopg2 and Django -------------------------------------------------------------------------------


def _psycopg2(target: Any, sql: str, params: Params) -> Rows:
    from psycopg2 import extensions

    if isinstance(target, extensions.cursor):
        target = target.connection
    if not isinstance(target, extensions.connection):
        raise _refusal(target, is_async=False)
    with target.cursor(cursor_factory=extensions.cursor) as cursor:
        cursor.execute(sql, params)
        rows: Rows = cursor.fetchall()
        return rows


def _django(target: Any, sql: str, params: Params) -> Rows:
    from django.db.backends.utils import CursorWrapper

    if isinstance(target, CursorWrapper):
        target = target.db
    vendor = getattr(target, "vendor", None)
    if vendor is None:
        raise _refusal(target, is_async=False)
    if vendor != "postgresql":
        raise PgqueBadArgumentError(
            f"Django's database {target.alias!r} is {vendor}",
            hint="Name the one that has pgque in it, by its alias in DATABASES.",
        )
    with target.cursor() as cursor, unprepared(target.connection):
        cursor.execute(sql, params)
        rows: Rows = cursor.fetchall()
        return rows


def _alias(target: Any, sql: str, params: Params) -> Rows:
    """Run a statement on the database that Django knows by a name."""
    conf = sys.modules.get("django.conf")
    if conf is None or not conf.settings.configured:
        raise TypeError(
            "a text is no connection: open one with pgque.connect(dsn);"
            " an alias of a database is taken where Django's settings are configured"
        )
    from django.db import connections

    known = list(connections)
    if target not in known:  # it is not repeated: a connection string may hold a password
        raise PgqueBadArgumentError(
            f"a text is the alias of one of Django's databases, which are {', '.join(known)};"
            " with a connection string use pgque.connect(dsn)"
        )
    return _django(connections[target], sql, params)


# -- SQLAlchemy ----------------------------------------------------------------------------------------


# A connection may ask for cursors of the server, whose statement runs when its rows are fetched.
_AT_ONCE = {"stream_results": False, "yield_per": None}


def _sqlalchemy(target: Any, sql: str, params: Params) -> Rows:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(target, (Session, scoped_session)):
        target = target.connection()
    if not isinstance(target, Connection):
        raise _refusal(target, is_async=False)
    with unprepared(target.connection.driver_connection):
        result = target.exec_driver_sql(*_as_driver_takes_it(target, sql, params), _AT_ONCE)
        return [tuple(row) for row in result]


async def _sqlalchemy_async(target: Any, sql: str, params: Params) -> Rows:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    if isinstance(target, (AsyncSession, async_scoped_session)):
        target = await target.connection()
    if not isinstance(target, AsyncConnection):
        raise _refusal(target, is_async=True)
    with unprepared((await target.get_raw_connection()).driver_connection):
        result = await target.exec_driver_sql(*_as_driver_takes_it(target, sql, params), _AT_ONCE)
        return [tuple(row) for row in result]


def _as_driver_takes_it(connection: Any, sql: str, params: Params) -> tuple[str, Any]:
    """Return a statement and its parameters in the style of the driver below a SQLAlchemy connection."""
    dialect = connection.dialect
    if dialect.name == "postgresql" and dialect.driver.startswith("psycopg"):
        return sql, dict(params)
    if dialect.name == "postgresql" and dialect.driver == "asyncpg":
        text, values = numbered(sql, params)
        return text, tuple(values)
    raise PgqueBadArgumentError(
        f"the connection is of {dialect.name}+{dialect.driver}",
        hint="SQLAlchemy's drivers psycopg, psycopg2 and asyncpg of postgresql are known.",
    )


# -- asyncpg -------------------------------------------------------------------------------------------


async def _asyncpg(target: Any, sql: str, params: Params) -> Rows:
    import asyncpg

    if not isinstance(target, (asyncpg.Connection, asyncpg.pool.PoolConnectionProxy, asyncpg.Pool)):
        raise _refusal(target, is_async=True)
    text, values = numbered(sql, params)
    return [tuple(row) for row in await target.fetch(text, *values, record_class=asyncpg.Record)]


# -- what is none of these -----------------------------------------------------------------------------

_TAKEN = (
    "a psycopg or psycopg2 connection or cursor, a psycopg_pool ConnectionPool, a SQLAlchemy Session or"
    " Connection, Django's connection or its alias"
)
_TAKEN_ASYNC = (
    "a psycopg AsyncConnection or AsyncCursor, a psycopg_pool AsyncConnectionPool, a SQLAlchemy AsyncSession"
    " or AsyncConnection, an asyncpg connection or pool"
)
_ENGINES = ("Engine", "AsyncEngine", "sessionmaker", "async_sessionmaker")
_CLIENTS = ("PgqueClient", "AsyncPgqueClient")


def _refusal(target: object, *, is_async: bool) -> TypeError:
    """Return the error for what an asynchronous call, or one that blocks, cannot use."""
    cls = type(target)
    name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
    if cls.__name__ in _ENGINES:
        begin = "async with" if cls.__name__.lower().startswith("async") else "with"
        return TypeError(f"{name} is no connection: pass one of it, as in: {begin} engine.begin() as conn")
    if cls.__name__ in _CLIENTS:
        return TypeError(f"{name} is no connection: pass its conn, or call its method of the same name")
    if isinstance(target, str):
        return TypeError("a text is no connection: open one, as with pgque.connect_async(dsn)")
    if re.search("connection|cursor|session|pool|databasewrapper", cls.__name__.lower()) and _library(target):
        if is_async and not _is_async(target):
            return TypeError(f"{name} blocks: call the twin of this function whose name has no _async")
        if not is_async and _is_async(target):
            return TypeError(f"{name} is awaited: call the twin of this function whose name ends in _async")
    return TypeError(f"{name} is no connection: pass {_TAKEN_ASYNC if is_async else _TAKEN}")


def _is_async(target: object) -> bool:
    names = [cls.__name__ for cls in type(target).__mro__]
    return _library(target) == "asyncpg" or any(name.lower().startswith("async") for name in names)


def _refuse(target: object, sql: str, params: Params) -> NoReturn:
    raise _refusal(target, is_async=False)


async def _refuse_async(target: object, sql: str, params: Params) -> NoReturn:
    raise _refusal(target, is_async=True)


_SYNC: dict[str, Callable[[Any, str, Params], Rows]] = {
    "psycopg": _psycopg,
    "psycopg_pool": _psycopg_pool,
    "psycopg2": _psycopg2,
    "django": _django,
    "sqlalchemy": _sqlalchemy,
}
_ASYNC: dict[str, Callable[[Any, str, Params], Awaitable[Rows]]] = {
    "psycopg": _psycopg_async,
    "psycopg_pool": _psycopg_pool_async,
    "sqlalchemy": _sqlalchemy_async,
    "asyncpg": _asyncpg,
}


# -- errors --------------------------------------------------------------------------------------------


@contextmanager
def _translated(params: Params) -> Iterator[None]:
    """Raise the error of this package for whatever a driver, or a library around it, raises in the block."""
    try:
        yield
    except PgqueError:
        raise
    except Exception as error:
        queue = params.get("queue")
        known = _error(error, queue if isinstance(queue, str) else None)
        if known is None:
            raise
        raise known from error


def _error(error: Exception, queue: str | None) -> PgqueError | None:
    """Return the error of this package for one of a driver, SQLAlchemy or Django; None for any other."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, UnicodeEncodeError):
            return from_encoding(cause, queue)
    for cause in causes:
        if isinstance(cause, psycopg.Error):
            return from_psycopg(cause, queue)
        library = _library(cause)
        if library == "psycopg2":
            return _of_psycopg2(cause, queue)
        if library == "asyncpg":
            return _of_asyncpg(cause, queue)
    if isinstance(error, asyncio.TimeoutError) and not error.args:  # of asyncpg's command_timeout
        return PgqueConnectionError("no answer within the time that the driver waits", queue=queue)
    if isinstance(error, OSError):
        return PgqueConnectionError(str(error) or type(error).__name__, queue=queue)
    if isinstance(error, ValueError):  # psycopg2 has no error of its own for a text with NUL
        return from_value(error, queue)
    return _of_library(error, queue)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from; SQLAlchemy keeps the driver's in `orig`."""
    while error is not None:
        yield error
        error = getattr(error, "orig", None) or error.__cause__


def _of_psycopg2(error: Any, queue: str | None) -> PgqueError:
    diag = getattr(error, "diag", None)
    return from_fields(
        getattr(diag, "message_primary", None) or str(error).strip() or type(error).__name__,
        sqlstate=getattr(error, "pgcode", None),
        hint=getattr(diag, "message_hint", None),
        context=getattr(diag, "context", None),
        is_lost=type(error).__name__ in ("OperationalError", "InterfaceError"),
        queue=queue,
    )


def _of_asyncpg(error: Any, queue: str | None) -> PgqueError:
    if isinstance(error, ValueError):  # a value that its type does not take
        return PgqueBadArgumentError(str(error), queue=queue)
    message = str(error.args[0]) if error.args else type(error).__name__
    return from_fields(
        message,
        sqlstate=getattr(error, "sqlstate", None),
        hint=getattr(error, "hint", None),
        context=getattr(error, "context", None),
        is_lost="another operation is in progress" not in message,
        queue=queue,
    )


def _of_library(error: Exception, queue: str | None) -> PgqueError | None:
    """Return the error for one that SQLAlchemy or Django raises before the driver is asked."""
    library, name = _library(error), type(error).__name__
    if library == "sqlalchemy":
        if name == "UnboundExecutionError":
            return PgqueBadArgumentError(
                "this session has no database of its own", hint="Pass session.connection(bind_arguments={…})."
            )
        lost = name in ("ResourceClosedError", "TimeoutError")
        return (PgqueConnectionError if lost else PgqueError)(str(error), queue=queue)
    if library == "django" and type(error).__module__.startswith("django.db"):
        return PgqueError(str(error), queue=queue)
    return None
