"""Keep the connection of a task for the next task in the same of Spark's worker processes.

To connect costs more than to read a small window, because the server starts a process, checks the password
and compiles its functions. A setting of a task ends with its transaction, so the next task finds a session as
good as new. An idle connection ends with its worker: Spark stops the workers of an executor that had no task
for a minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from . import _connect

if TYPE_CHECKING:
    from adbc_driver_manager import AdbcConnection, AdbcDatabase

# The name of a session between two tasks. During a task it has the task's name.
_NAME = "pgque-spark/idle"
# A firewall or a pooler may have forgotten a connection that was idle for longer: it is opened anew.
_IDLE_SECONDS = 30.0
# For the first answer on a connection that was idle. The keepalives notice a network that is gone, but not
# a proxy that acknowledges every byte and passes none on.
_ANSWER_SECONDS = 10.0
# A task may have a connection to each of several servers: the last ones are kept.
_MOST = 4

# By connection string, with the time of the last task; the newest at the end
_idle: dict[str, tuple[AdbcConnection, float]] = {}


@contextmanager
def transaction(
    connection: Mapping[str, str], name: str, settings: Mapping[str, str] | None = None
) -> Iterator[AdbcConnection]:
    """Yield a connection with an open transaction, in which the session has this name and these settings.

    The transaction is committed at the end, and the connection is kept for the next task. An error, or a task
    that wants no more rows, closes it. Raises ADBC's errors.
    """
    dsn = _connect.dsn(connection, _NAME)
    given = {"application_name": name[:63], **(settings or {})}
    calls = (f"set_config({_connect.literal(k)}, {_connect.literal(v)}, true)" for k, v in given.items())
    begin = f"select {', '.join(calls)}"
    conn = _taken(dsn)
    if conn is None or not _begins(conn, begin):
        conn = _opened(dsn, begin)
    try:
        yield conn
        conn.set_autocommit(True)
    except BaseException:
        conn.close()
        raise
    _keep(dsn, conn)


def _taken(dsn: str) -> AdbcConnection | None:
    """Return the connection that is kept for a server, and close those that were idle for too long."""
    now = time.monotonic()
    for other, (conn, since) in list(_idle.items()):
        if now - since > _IDLE_SECONDS:
            del _idle[other]
            conn.close()
    return _idle.pop(dsn, (None, 0.0))[0]


def _keep(dsn: str, conn: AdbcConnection) -> None:
    if dsn in _idle:
        # Two were open at once.
        conn.close()
        return
    _idle[dsn] = conn, time.monotonic()
    if len(_idle) > _MOST:
        _idle.pop(next(iter(_idle)))[0].close()


def _begins(conn: AdbcConnection, begin: str) -> bool:
    """Begin a transaction on a connection that was kept; return False if it is dead, or does not answer."""
    import adbc_driver_manager as adbc

    answered: list[bool] = []

    def ask() -> None:
        with suppress(adbc.Error):
            _begin(conn, begin)
            answered.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    if asking.is_alive():
        # It cannot be closed while it waits. It goes with the process.
        return False
    if not answered:
        conn.close()
    return bool(answered)


def _begin(conn: AdbcConnection, begin: str) -> None:
    import adbc_driver_manager as adbc

    conn.set_autocommit(False)
    with adbc.AdbcStatement(conn) as statement:
        statement.set_sql_query(begin)
        statement.execute_update()


def _opened(dsn: str, begin: str) -> AdbcConnection:
    import adbc_driver_manager as adbc

    conn = adbc.AdbcConnection(_database(dsn))
    try:
        _begin(conn, begin)
    except BaseException:
        conn.close()
        raise
    return conn


@lru_cache(maxsize=64)
def _database(dsn: str) -> AdbcDatabase:
    """Return where ADBC connects to. It reads all types and columns of the database for that, and keeps no
    connection: once for each of Spark's worker processes is enough."""
    import adbc_driver_postgresql

    return adbc_driver_postgresql.connect(dsn)
