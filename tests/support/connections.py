"""Every kind of connection that the functions of the module take, behind one face, so that a test is written once.

A connection of asyncio is driven from outside, by an event loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import django.conf
import psycopg
import psycopg2
import psycopg2.extras
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row, tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

import pgque

# After how many runs psycopg prepares a statement on these connections; None: never, as a pooler in transaction
# mode needs it.
PREPARE_THRESHOLD: int | None = None


class Abandoned(Exception):
    """Raised by a test to leave a savepoint."""


@dataclass
class Open:
    """A connection in a transaction of its own: what is passed to pgque, and what a program does with it."""

    target: Any
    call: Callable[..., Any]  # call(name, *arguments): the function of pgque for this kind
    execute: Callable[[str], list[tuple[Any, ...]]]
    commit: Callable[[], object]
    rollback: Callable[[], object]
    savepoint: Callable[[], AbstractContextManager[object]]
    close: Callable[[], object]  # what makes the target unusable

    def send(self, *arguments: Any, **options: Any) -> int:
        result: int = self.call("send", self.target, *arguments, **options)
        return result

    def send_batch(self, *arguments: Any, **options: Any) -> list[int]:
        result: list[int] = self.call("send_batch", self.target, *arguments, **options)
        return result

    def receive(self, *arguments: Any, **options: Any) -> list[pgque.Message]:
        result: list[pgque.Message] = self.call("receive", self.target, *arguments, **options)
        return result

    def ack(self, *arguments: Any) -> Any:
        return self.call("ack", self.target, *arguments)

    def nack(self, *arguments: Any) -> Any:
        return self.call("nack", self.target, *arguments)


def blocking(name: str, target: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function of pgque that blocks."""
    return getattr(pgque, name)(target, *arguments, **options)


Kind = Callable[[str], AbstractContextManager[Open]]
KINDS: dict[str, Kind] = {}


def kind(name: str) -> Callable[[Kind], Kind]:
    """Register a way to open a connection under a name."""

    def register(opening: Kind) -> Kind:
        KINDS[name] = opening
        return opening

    return register


# -- psycopg -------------------------------------------------------------------------------------------


def _psycopg_kind(name: str, as_target: Callable[[Any], Any] = lambda conn: conn, **options: Any) -> None:
    @kind(name)
    @contextmanager
    def opening(dsn: str) -> Iterator[Open]:
        with psycopg.connect(dsn, prepare_threshold=PREPARE_THRESHOLD, **options) as conn:

            def execute(statement: str) -> list[tuple[Any, ...]]:
                cursor = psycopg.Cursor(conn, row_factory=tuple_row).execute(statement.encode())
                return cursor.fetchall() if cursor.description else []

            try:
                yield Open(
                    target=as_target(conn),
                    call=blocking,
                    execute=execute,
                    commit=conn.commit,
                    rollback=conn.rollback,
                    savepoint=conn.transaction,
                    close=conn.close,
                )
            finally:
                conn.close()


_psycopg_kind("psycopg")
_psycopg_kind("psycopg cursor", lambda conn: conn.cursor())
_psycopg_kind("psycopg dict rows", row_factory=dict_row)
_psycopg_kind("psycopg client cursors", cursor_factory=psycopg.ClientCursor)
_psycopg_kind("psycopg raw cursors", cursor_factory=psycopg.RawCursor)


def _psycopg2_kind(name: str, as_target: Callable[[Any], Any], **options: Any) -> None:
    @kind(name)
    @contextmanager
    def opening(dsn: str) -> Iterator[Open]:
        conn = psycopg2.connect(dsn, **options)

        def execute(statement: str) -> list[tuple[Any, ...]]:
            with conn.cursor(cursor_factory=psycopg2.extensions.cursor) as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall()) if cursor.description else []

        @contextmanager
        def savepoint() -> Iterator[None]:
            execute("savepoint s")
            try:
                yield
            except BaseException:
                execute("rollback to savepoint s")
                raise

        try:
            yield Open(as_target(conn), blocking, execute, conn.commit, conn.rollback, savepoint, conn.close)
        finally:
            conn.close()


_psycopg2_kind("psycopg2", lambda conn: conn)
_psycopg2_kind(
    "psycopg2 dict cursor", lambda conn: conn.cursor(), cursor_factory=psycopg2.extras.RealDictCursor
)

# -- SQLAlchemy ----------------------------------------------------------------------------------------

_CONNECT: dict[str, Callable[[str], Any]] = {
    "psycopg": lambda dsn: psycopg.connect(dsn, prepare_threshold=PREPARE_THRESHOLD),
    "psycopg2": psycopg2.connect,
}


def _sqlalchemy_kind(driver: str, name: str, make: Callable[[Any], Any]) -> None:
    @kind(f"sqlalchemy {driver} {name}")
    @contextmanager
    def opening(dsn: str) -> Iterator[Open]:
        engine = create_engine(
            f"postgresql+{driver}://", creator=lambda: _CONNECT[driver](dsn), poolclass=NullPool
        )
        target = make(engine)

        def execute(statement: str) -> list[tuple[Any, ...]]:
            result = target.execute(text(statement))
            return [tuple(row) for row in result] if result.returns_rows else []

        def close() -> None:
            connection = target if isinstance(target, Connection) else target.connection()
            driver_connection: Any = connection.connection.driver_connection
            driver_connection.close()

        try:
            yield Open(target, blocking, execute, target.commit, target.rollback, target.begin_nested, close)
        finally:
            target.close()
            engine.dispose()


for _driver in ("psycopg", "psycopg2"):
    _sqlalchemy_kind(_driver, "connection", lambda engine: engine.connect())
    _sqlalchemy_kind(_driver, "session", Session)
_sqlalchemy_kind("psycopg", "scoped session", lambda engine: scoped_session(sessionmaker(engine)))

# -- Django --------------------------------------------------------------------------------------------


def django_database(alias: str, dsn: str) -> Any:
    """Return Django's connection to a database, under an alias of its own."""
    if not django.conf.settings.configured:
        django.conf.settings.configure(DATABASES={}, USE_TZ=True, INSTALLED_APPS=[])
        django.setup()
    from django.db import connections

    parts = conninfo_to_dict(dsn)
    options: dict[str, object] = {}
    if PREPARE_THRESHOLD is not None:  # psycopg prepares only what the server binds
        options = {"prepare_threshold": PREPARE_THRESHOLD, "server_side_binding": True}
    connections.databases[alias] = connections.configure_settings(
        {
            "default": {},
            alias: {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts["dbname"],
                "USER": parts.get("user", ""),
                "PASSWORD": parts.get("password", ""),
                "HOST": parts.get("host", ""),
                "PORT": parts.get("port", ""),
                "OPTIONS": options,
            },
        }
    )[alias]
    with contextlib.suppress(AttributeError):
        del connections[alias]
    return connections[alias]


_number = itertools.count(1)


def _django_kind(name: str, as_target: Callable[[Any], Any]) -> None:
    @kind(name)
    @contextmanager
    def opening(dsn: str) -> Iterator[Open]:
        from django.db import transaction

        alias = f"calls_{next(_number)}"
        connection = django_database(alias, dsn)
        connection.set_autocommit(False)

        def execute(statement: str) -> list[tuple[Any, ...]]:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall()) if cursor.description else []

        try:
            yield Open(
                target=as_target(connection),
                call=blocking,
                execute=execute,
                commit=connection.commit,
                rollback=connection.rollback,
                savepoint=lambda: transaction.atomic(using=alias),
                close=lambda: connection.connection.close(),  # noqa: PLW0108
            )
        finally:
            connection.close()


_django_kind("django", lambda connection: connection)
_django_kind("django alias", lambda connection: connection.alias)
_django_kind("django cursor", lambda connection: connection.cursor())

# -- asyncio -------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """An event loop that runs one thing after another."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def run(self, awaitable: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await awaitable

        return self.loop.run_until_complete(run())

    def call(self, name: str, target: Any, *arguments: Any, **options: Any) -> Any:
        """Call a function of pgque that is awaited."""
        return self.run(getattr(pgque, f"{name}_async")(target, *arguments, **options))

    def blocking(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        """Return a coroutine function as one that blocks."""
        return lambda *arguments: self.run(function(*arguments))

    @contextmanager
    def within(self, manager: Any) -> Iterator[None]:
        """Enter an async context manager from outside."""
        self.run(manager.__aenter__())
        try:
            yield
        except BaseException as error:
            if not self.run(manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self.run(manager.__aexit__(None, None, None))


@contextmanager
def event_loop() -> Iterator[Loop]:
    """Give an event loop."""
    loop = Loop()
    try:
        yield loop
    finally:
        loop.loop.close()


def _async_psycopg_kind(name: str, as_target: Callable[[Any], Any], **options: Any) -> None:
    @kind(name)
    @contextmanager
    def opening(dsn: str) -> Iterator[Open]:
        with event_loop() as loop:
            conn = loop.run(
                psycopg.AsyncConnection.connect(dsn, prepare_threshold=PREPARE_THRESHOLD, **options)
            )

            async def execute(statement: str) -> list[tuple[Any, ...]]:
                cursor = await psycopg.AsyncCursor(conn, row_factory=tuple_row).execute(statement.encode())
                return await cursor.fetchall() if cursor.description else []

            try:
                yield Open(
                    target=as_target(conn),
                    call=loop.call,
                    execute=loop.blocking(execute),
                    commit=loop.blocking(conn.commit),
                    rollback=loop.blocking(conn.rollback),
                    savepoint=lambda: loop.within(conn.transaction()),
                    close=loop.blocking(conn.close),
                )
            finally:
                loop.run(conn.close())


_async_psycopg_kind("async psycopg", lambda conn: conn)
_async_psycopg_kind("async psycopg dict cursor", lambda conn: conn.cursor(), row_factory=dict_row)
_async_psycopg_kind("async psycopg raw cursors", lambda conn: conn, cursor_factory=psycopg.AsyncRawCursor)


async def asyncpg_connect(dsn: str, **options: Any) -> Any:
    """Connect as psycopg would."""
    return await asyncpg.connect(**asyncpg_options(dsn), **options)


def asyncpg_options(dsn: str) -> dict[str, Any]:
    """Return a connection string as the arguments of asyncpg."""
    parts = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
    names = {"dbname": "database", "user": "user", "password": "password", "host": "host", "port": "port"}
    return {names[name]: value for name, value in parts.items() if name in names}


def _driver_arguments(driver: str, dsn: str) -> dict[str, Any]:
    """Return what SQLAlchemy passes to the driver, so that no statement gets a name, as a pooler in
    transaction mode needs it."""
    if driver == "psycopg":
        parts = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
        return {**parts, "prepare_threshold": PREPARE_THRESHOLD}
    return {
        **asyncpg_options(dsn),
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: "",
    }


def _async_sqlalchemy_kind(driver: str, name: str, make: Callable[[Any], Any]) -> None:
    @kind(f"async sqlalchemy {driver} {name}")
    @contextmanager
    def opening(dsn: str) -> Iterator[Open]:
        with event_loop() as loop:
            engine = create_async_engine(
                f"postgresql+{driver}://",
                connect_args=_driver_arguments(driver, dsn),
                poolclass=NullPool,
            )
            target = make(engine)
            if isinstance(target, AsyncConnection):
                loop.run(target.start())

            async def close() -> None:
                connection = target if isinstance(target, AsyncConnection) else await target.connection()
                raw = await connection.get_raw_connection()
                await raw.driver_connection.close()  # type: ignore[union-attr]

            async def execute(statement: str) -> list[tuple[Any, ...]]:
                result = await target.execute(text(statement))
                return [tuple(row) for row in result] if result.returns_rows else []

            try:
                yield Open(
                    target=target,
                    call=loop.call,
                    execute=loop.blocking(execute),
                    commit=loop.blocking(target.commit),
                    rollback=loop.blocking(target.rollback),
                    savepoint=lambda: loop.within(target.begin_nested()),
                    close=loop.blocking(close),
                )
            finally:
                loop.run(target.close())
                loop.run(engine.dispose())


for _driver in ("psycopg", "asyncpg"):
    _async_sqlalchemy_kind(_driver, "connection", lambda engine: engine.connect())
    _async_sqlalchemy_kind(_driver, "session", AsyncSession)
_async_sqlalchemy_kind(
    "asyncpg",
    "scoped session",
    lambda engine: async_scoped_session(lambda: AsyncSession(engine), scopefunc=lambda: 1),  # type: ignore[arg-type]
)


async def json_codecs(conn: Any) -> None:
    """Have asyncpg write and read JSON as Python values, as many programs do."""
    import json

    for name in ("json", "jsonb"):
        await conn.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")


def _asyncpg_kind(name: str, connect: Callable[[str], Awaitable[Any]]) -> None:
    @kind(name)
    @contextmanager
    def opening(dsn: str) -> Iterator[Open]:
        with event_loop() as loop:
            conn = loop.run(connect(dsn))
            transactions: list[Any] = []

            def begin() -> None:
                transactions.append(conn.transaction())
                loop.run(transactions[-1].start())

            def end(how: str) -> None:
                loop.run(getattr(transactions.pop(), how)())
                begin()

            async def execute(statement: str) -> list[tuple[Any, ...]]:
                return [tuple(row.values()) for row in await conn.fetch(statement)]

            begin()
            try:
                yield Open(
                    target=conn,
                    call=loop.call,
                    execute=loop.blocking(execute),
                    commit=lambda: end("commit"),
                    rollback=lambda: end("rollback"),
                    savepoint=lambda: loop.within(conn.transaction()),
                    close=loop.blocking(conn.close),
                )
            finally:
                loop.run(_end(conn))


async def _end(conn: Any) -> None:
    """Close a connection of asyncpg, with the pool that it is of."""
    pool = getattr(conn, "_holder", None) and conn._holder._pool
    (pool or conn).terminate()
    for _ in range(5):  # turns of the event loop, in which what was ended is closed
        await asyncio.sleep(0)


class OwnRecord(asyncpg.Record):  # type: ignore[misc]
    """Rows as programs extend them."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())


async def _with_codecs(dsn: str) -> Any:
    conn = await asyncpg_connect(dsn, record_class=OwnRecord)
    await json_codecs(conn)
    return conn


async def _of_a_pool(dsn: str) -> Any:
    pool = await asyncpg.create_pool(min_size=1, max_size=1, statement_cache_size=0, **asyncpg_options(dsn))
    return await pool.acquire()


_asyncpg_kind("asyncpg", asyncpg_connect)
_asyncpg_kind("asyncpg with codecs", _with_codecs)
_asyncpg_kind("asyncpg of a pool", _of_a_pool)

# One kind of each driver, and of each library over it: for tests where nothing else matters.
DRIVERS = [
    "psycopg",
    "psycopg client cursors",
    "psycopg2",
    "sqlalchemy psycopg connection",
    "sqlalchemy psycopg2 connection",
    "django",
    "async psycopg",
    "async sqlalchemy psycopg connection",
    "async sqlalchemy asyncpg connection",
    "asyncpg",
    "asyncpg with codecs",
]

# -- pools ---------------------------------------------------------------------------------------------

Calling = Callable[..., Any]


@contextmanager
def _psycopg_pool(dsn: str) -> Iterator[tuple[Any, Calling]]:
    kwargs = {"prepare_threshold": PREPARE_THRESHOLD}
    with ConnectionPool(dsn, kwargs=kwargs, min_size=1, max_size=1) as pool:
        yield pool, blocking


@contextmanager
def _async_psycopg_pool(dsn: str) -> Iterator[tuple[Any, Calling]]:
    with event_loop() as loop:
        kwargs = {"prepare_threshold": PREPARE_THRESHOLD}
        pool = AsyncConnectionPool(dsn, kwargs=kwargs, min_size=1, max_size=1, open=False)
        with loop.within(pool):
            yield pool, loop.call


@contextmanager
def _asyncpg_pool(dsn: str) -> Iterator[tuple[Any, Calling]]:
    with event_loop() as loop:

        async def create() -> Any:  # it belongs to the event loop that runs
            return await asyncpg.create_pool(min_size=1, max_size=1, init=json_codecs, **asyncpg_options(dsn))

        pool = loop.run(create())
        with loop.within(pool):
            yield pool, loop.call


POOLS = {"psycopg": _psycopg_pool, "async psycopg": _async_psycopg_pool, "asyncpg": _asyncpg_pool}
