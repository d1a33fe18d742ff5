"""Write micro-batches into a database exactly once: the rows and the number of the micro-batch are one
transaction of the driver. For PostgreSQL, and for any library of the DB-API (PEP 249)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, overload

from ..errors import PgqueBadArgumentError, PgqueError, PgqueSinkEpochError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from . import _connect

log = logging.getLogger("pgque.spark")

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,100}")
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,2}")


class DbApiConnection(Protocol):
    """Describe a connection of PEP 249: of psycopg, sqlite3, PyMySQL, oracledb, pyodbc and so on."""

    def cursor(self) -> Any:
        """Return a cursor."""

    def commit(self) -> object:
        """End the transaction."""

    def rollback(self) -> object:
        """Take the transaction back."""

    def close(self) -> object:
        """Close the connection."""


C = TypeVar("C", bound=DbApiConnection)
Guarded: TypeAlias = "Callable[[DataFrame, int], None]"


@overload
def foreach_batch_once(
    database: str, name: str, *, table: str = ..., query_id: str | None = ...
) -> Callable[[Callable[[_connect.Connection, DataFrame, int], object]], Guarded]: ...


@overload
def foreach_batch_once(
    database: Callable[[], C], name: str, *, table: str = ..., query_id: str | None = ...
) -> Callable[[Callable[[C, DataFrame, int], object]], Guarded]: ...


def foreach_batch_once(
    database: str | Callable[[], C], name: str, *, table: str = "pgque_epoch", query_id: str | None = None
) -> Callable[[Callable[[Any, DataFrame, int], object]], Guarded]:
    """Return a decorator for a function write(connection, batch, epoch) of `writeStream.foreachBatch`.

    The changes that `write` makes on the connection are kept exactly once: they are one transaction with the
    number of the micro-batch, and a micro-batch that Spark replays is left out. `write` must not commit, and
    its rows pass through the driver.

    `database` is a connection string of PostgreSQL, or a function that opens a connection of any library of
    the DB-API, without autocommit. Each micro-batch has a connection of its own. The numbers are in `table`,
    which is made if it is missing: one row for each `name` and id of a stream. Two guarded writes of one
    stream to one database need a name each. `query_id` replaces the stream's id, which Spark Connect does
    not show: give another one for each checkpoint.

    Raises PgqueBadArgumentError for a name that is not 1 to 100 letters, digits and _.:/- of ASCII. In the
    stream: PgqueSinkEpochError (PQ016) for an epoch older than the newest one, as of an old checkpoint;
    PgqueBadArgumentError for a connection that commits each statement.
    """
    for what, given in (("name", name), ("query_id", query_id)):
        if given is not None and _NAME.fullmatch(given) is None:
            raise PgqueBadArgumentError(
                f"{what} {given!r} is not 1 to 100 letters, digits and _.:/- of ASCII", sqlstate="PQ005"
            )
    if _TABLE.fullmatch(table) is None:
        raise PgqueBadArgumentError(
            f"table {table!r} is no plain name: give one such as shop.pgque_epoch", sqlstate="PQ005"
        )

    def connect() -> Any:
        if not isinstance(database, str):
            return database()
        from . import _connect

        return _connect.connect({"url": database}, f"pgque-spark/{name}/once")

    return lambda write: _Once(connect, name, query_id, table, write)


class _Once:
    """Call `write` in a transaction that also remembers the epoch, unless it was remembered before.

    The statements hold their values as literals, which are checked, since libraries differ in how they write
    parameters. They do not ask for the number of changed rows, which a library need not know.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        name: str,
        query_id: str | None,
        table: str,
        write: Callable[[Any, DataFrame, int], object],
    ) -> None:
        self._connect, self._name, self._query_id, self._table = connect, name, query_id, table
        self._write = write
        self._is_ready = False

    def __call__(self, batch: DataFrame, epoch: int) -> None:
        """Write a micro-batch; Spark calls this."""
        query = self._query_id or stream_id(batch)
        if query is None:
            raise PgqueBadArgumentError(
                "foreach_batch_once cannot see the id of the stream, as in Spark Connect: give query_id",
                sqlstate="PQ005",
                hint="Any text that is another one for each checkpoint.",
            )
        with closing(self._connect()) as conn:
            if not self._is_ready:
                self._prepare(conn)
                self._is_ready = True
            with _transaction(conn):
                if self._claim(conn, query, int(epoch)):
                    self._write(conn, batch, epoch)
                    self._check_claim(conn, query, int(epoch))
                else:
                    log.warning("pgque: epoch %s of %s was written before", epoch, self._name)

    def _claim(self, conn: Any, query: str, epoch: int) -> bool:
        """Remember the epoch; return False if it is the newest one that was written."""
        where = f"where name = '{self._name}' and query = '{query}'"
        with closing(conn.cursor()) as cursor:
            # Locks the row: whoever writes the same epoch at the same time waits here.
            cursor.execute(f"update {self._table} set epoch = epoch {where}")
            newest = self._newest(cursor, query)
            if newest is None:
                cursor.execute(self._insert(query, epoch))
                return True
            if newest > epoch:
                raise PgqueSinkEpochError(
                    f"epoch {epoch} of {self._name}, query {query}: it is older than the newest epoch"
                    f" {newest} in {self._table}",
                    sqlstate="PQ016",
                    hint="The checkpoint is older than what was written, or query_id is that of another"
                    " stream. Start the stream with a new checkpointLocation; where you give a query_id, with"
                    " another one too.",
                )
            cursor.execute(f"update {self._table} set epoch = {epoch} {where}")
            return newest < epoch

    def _check_claim(self, conn: Any, query: str, epoch: int) -> None:
        """Refuse to go on if `write` has hidden that its transaction was taken back."""
        with closing(conn.cursor()) as cursor:
            # Fails if PostgreSQL's transaction has failed, because its commit would silently be a rollback.
            written = self._newest(cursor, query)
        if written != epoch:
            raise PgqueError(
                f"epoch {epoch} of {self._name} was not written: the function has taken its transaction back",
                hint="Let errors of the database out of the function, or catch them around a savepoint.",
            )

    def _newest(self, cursor: Any, query: str) -> int | None:
        """Return the newest epoch that was written."""
        cursor.execute(f"select epoch from {self._table} where name = '{self._name}' and query = '{query}'")
        row = cursor.fetchone()
        if row is None:
            return None
        # Some connections give a row as a mapping.
        return int(next(iter(row.values() if isinstance(row, Mapping) else row)))

    def _insert(self, query: str, epoch: int) -> str:
        return f"insert into {self._table} (name, query, epoch) values ('{self._name}', '{query}', {epoch})"

    def _prepare(self, conn: Any) -> None:
        """Make the table if it is missing, and see that the connection has transactions."""
        if not self._has_table(conn):
            create = (
                f"create table {self._table} (name varchar(100) not null, query varchar(100) not null,"
                " epoch bigint not null, primary key (name, query))"
            )
            try:
                with closing(conn.cursor()) as cursor:
                    cursor.execute(create)
                conn.commit()
            except Exception as error:  # each library has its own class
                conn.rollback()
                if not self._has_table(conn):  # no other stream has made it meanwhile
                    raise PgqueError(
                        f"cannot create the table {self._table} for the epochs of {self._name}: {error}",
                        sqlstate=getattr(error, "sqlstate", None),
                        hint=f"Create it as a role that may: {create}. The stream needs the rights to"
                        " select, insert and update.",
                    ) from None
        if not _is_psycopg(conn):
            self._try_rollback(conn)

    def _has_table(self, conn: Any) -> bool:
        try:
            with closing(conn.cursor()) as cursor:
                cursor.execute(f"select name, query, epoch from {self._table} where 1 = 0")
        except Exception:
            return False
        finally:
            conn.rollback()
        return True

    def _try_rollback(self, conn: Any) -> None:
        """Refuse a connection whose rollback does not take back what it wrote."""
        probe = f"where name = '{self._name}' and query = 'rollback test'"
        with closing(conn.cursor()) as cursor:
            cursor.execute(self._insert("rollback test", 0))
            conn.rollback()
            cursor.execute(f"select epoch from {self._table} {probe}")
            stays = cursor.fetchone() is not None
            if stays:
                cursor.execute(f"delete from {self._table} {probe}")
            conn.commit()
        if stays:
            raise PgqueBadArgumentError(
                f"the connection of {self._name} commits each statement by itself",
                sqlstate="PQ005",
                hint="Open it without autocommit (sqlite3: not with isolation_level=None), on tables with"
                " transactions.",
            )


def _is_psycopg(conn: Any) -> bool:
    import psycopg

    return isinstance(conn, psycopg.Connection)


@contextmanager
def _transaction(conn: Any) -> Iterator[None]:
    if _is_psycopg(conn):
        with conn.transaction():  # in which psycopg refuses a commit
            yield
        conn.commit()  # a transaction that was begun before
        return
    try:
        yield
    except BaseException:
        conn.rollback()
        raise
    conn.commit()


def stream_id(batch: DataFrame) -> str | None:
    """Return the id of a micro-batch's stream, which is its checkpoint's; None if Spark does not show it, as
    in Spark Connect."""
    context = getattr(batch.sparkSession, "sparkContext", None)
    return context.getLocalProperty("sql.streaming.queryId") if context is not None else None
