"""Write the rows of a task of the sink to each server.

The servers of an epoch are stored on each of them before one of them commits, and the first list that is
stored everywhere counts. So a replay spreads its rows as the first attempt did, whatever its option servers.
"""

from __future__ import annotations

import re
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import PgqueError
from . import _connect, _kept
from .options import ROUND_ROBIN, Options

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import AdbcConnection

_STAGE = re.compile(r"pgque\.(\w+)")


def name(parsed: Options) -> str:
    """Return the name of a sink's session."""
    return f"pgque-spark/{parsed.queue or 'queues'}/sink"


def session(parsed: Options, *, autocommit: bool = False) -> _connect.Connection:
    """Open a connection of a sink."""
    return _connect.connect(parsed.connection, name(parsed), autocommit=autocommit)


@dataclass(frozen=True)
class Share:
    """Describe the rows that a task wrote to one server: `attempt` names them in the staging table."""

    server: str | None
    attempt: str
    rows: int


class Spread:
    """Choose a server for each row: by the hash of its key, or each in turn.

    The hash is CRC-32 of the key in UTF-8, of the payload where a row has no key, modulo the number of
    servers: the same everywhere and at any time. Spark has it as crc32().
    """

    def __init__(self, servers: Sequence[str | None], columns: Mapping[str, str], how: str) -> None:
        self._servers = servers
        self._columns = [columns[name] for name in ("key", "partition_key", "payload") if name in columns]
        self._in_turn = how == ROUND_ROBIN
        self._next = uuid.uuid4().int

    def __call__(self, batch: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
        """Return the rows of each server that gets some, in their order."""
        import pyarrow as pa
        import pyarrow.compute as pc

        count = len(self._servers)
        if count == 1:
            yield self._servers[0], batch
            return
        if self._in_turn:
            numbers = [(self._next + row) % count for row in range(batch.num_rows)]
            self._next += batch.num_rows
        else:
            keys = pc.coalesce(
                *(batch.column(name).cast(pa.large_binary()) for name in self._columns),
                pa.scalar(b"", pa.large_binary()),
            )
            numbers = [zlib.crc32(key) % count for key in keys.to_pylist()]
        places = pa.array(numbers, pa.int64())
        for number, server in enumerate(self._servers):
            rows = batch.filter(pc.equal(places, number))
            if rows.num_rows:
                yield server, rows


class _Open:
    """Copy rows of a task to one server."""

    def __init__(self, parsed: Options, server: str | None, sink_id: str, epoch: int | None) -> None:
        self.server = server
        self.attempt = ""
        self.rows = 0
        self._parsed = parsed.at(server)
        self._queue = parsed.queue
        self._named = (sink_id, epoch)
        self._conn: _connect.Connection | None = None
        self._copy: AdbcConnection | None = None
        self._copying = ExitStack()
        self._table = ""
        self._staged = 0

    @property
    def conn(self) -> _connect.Connection:
        """Return the connection on which the list of servers is agreed before the copy."""
        if self._conn is None:
            with _connect.of(self.server):
                self._conn = session(self._parsed)
        return self._conn

    def listed(self, servers: Sequence[str], *, store: bool = True) -> list[str]:
        """Store the servers of the epoch; return those that are stored. `store=False` takes them back."""
        with _connect.of(self.server), _connect.errors(self._queue):
            row = self.conn.execute("select pgque.sink_servers(%s, %s, %s::text[])", [*self._named, servers])
            found: list[str] = _connect.one(row)[0]
            if store:
                self.conn.commit()
            else:
                self.conn.rollback()
        return found

    def write(self, rows: pa.RecordBatch, count: int) -> None:
        """Copy rows of the staging table, which hold `count` messages."""
        import pyarrow as pa

        with self._errors():
            if self._copy is None:
                self._copy = self._begin()
            attempt = pa.array([uuid.UUID(self.attempt).bytes] * rows.num_rows, pa.binary())
            numbers = pa.array(range(self._staged, self._staged + rows.num_rows), pa.int32())
            arrays = [attempt, numbers, *rows.columns]
            names = ["attempt", "n", *rows.schema.names]
            self._do(pa.RecordBatch.from_arrays(arrays, names), ingest=self._table)
        self._staged += rows.num_rows
        self.rows += count

    def _begin(self) -> AdbcConnection:
        import pyarrow as pa

        self._copy = self._copying.enter_context(
            _kept.transaction(self._parsed.connection, name(self._parsed))
        )
        sink_id, epoch = self._named
        named = {"sink_id": pa.array([sink_id], pa.string()), "epoch": pa.array([epoch], pa.int64())}
        row = self._do(
            pa.RecordBatch.from_pydict(named),
            query="select s.attempt::text, s.stage from pgque.sink_begin($1, $2) as s",
        )
        self.attempt, stage = row
        found = _STAGE.fullmatch(stage)
        if found is None:
            raise PgqueError(f"not the name of a staging table: {stage}")
        self._table = found[1]
        return self._copy

    def _do(self, given: pa.RecordBatch, query: str | None = None, ingest: str = "") -> list[str]:
        """Append rows to a table, or run a query with values; return the values of its row."""
        import adbc_driver_manager as adbc
        from adbc_driver_manager._reader import AdbcRecordBatchReader

        with adbc.AdbcStatement(self._copy) as statement:
            schema, array = given.__arrow_c_array__()
            if query is None:
                statement.set_options(
                    **{
                        "adbc.ingest.target_table": ingest,
                        "adbc.ingest.target_db_schema": "pgque",
                        "adbc.ingest.mode": "adbc.ingest.mode.append",
                    }
                )
                statement.bind(array, schema)
                statement.execute_update()
                return []
            statement.set_sql_query(query)
            statement.bind(array, schema)
            stream, _ = statement.execute_query()
            found = AdbcRecordBatchReader._import_from_c(stream.address).read_all()
            return [column[0].as_py() for column in found.columns]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import adbc_driver_manager as adbc

        with _connect.of(self.server):
            try:
                yield
            except adbc.Error as error:
                failed = _connect.explained_arrow(error, self._queue)
            else:
                return
            raise failed

    def finish(self) -> Share:
        """End the copy and its transaction; return the share that was written."""
        with self._errors():
            self._copying.close()
        return Share(self.server, self.attempt, self.rows)

    def close(self, *error: Any) -> None:
        """Roll back a copy that is not finished, and close the connections."""
        self._copying.__exit__(*error)
        if self._conn is not None:
            self._conn.close()


class Shares:
    """Open a copy to each server that a task writes to. A copy that is not finished when the stack ends is
    rolled back."""

    def __init__(self, parsed: Options, sink_id: str, epoch: int | None, stack: ExitStack) -> None:
        self._options, self._sink_id, self._epoch, self._stack = parsed, sink_id, epoch, stack
        self._open: dict[str | None, _Open] = {}

    def __getitem__(self, server: str | None) -> _Open:
        """Return the share of a server; connects if need be."""
        if server not in self._open:
            one = _Open(self._options, server, self._sink_id, self._epoch)
            self._stack.push(one.close)
            self._open[server] = one
        return self._open[server]

    def any(self) -> tuple[list[str | None], None]:
        """Return the servers of the options, for a write whose replay may be spread otherwise."""
        return [*(self._options.servers or [None])], None

    def agree(self) -> tuple[list[str | None], tuple[str, ...] | None]:
        """Return the servers that the epoch is spread over, and the stored list, None if there is none.

        Each task asks in the order of the names. A list that meets another one gives way to it, from the
        first server that both have; so one list gets stored on all its servers, and no other one can be.
        """
        if self._options.servers is None:
            return self.any()
        wanted = list(self._options.servers)
        while True:
            seen: dict[str, str] = {}
            for server in wanted:
                with self._needed(server):
                    one = self[server]
                    with _connect.of(server), _connect.errors():
                        _connect.tell_apart(seen, server, one.conn)
                    # A stored list needs all its servers: each must have the rights and the version for it.
                    one.listed(wanted, store=False)
            for server in wanted:
                stored = self[server].listed(wanted)
                if not stored:
                    # Committed before option servers was given: the replay is left out there.
                    return [server], None
                if stored != wanted:
                    wanted = stored
                    break
            else:
                return [*wanted], tuple(wanted)

    @contextmanager
    def _needed(self, server: str) -> Iterator[None]:
        """Explain in the errors of a server that is not in option servers why it is needed."""
        try:
            yield
        except PgqueError as error:
            if server in (self._options.servers or ()):
                raise
            raise type(error)(
                str(error),
                sqlstate=error.sqlstate,
                hint=f"Epoch {self._epoch} of sink {self._sink_id} was begun with this server, and cannot be"
                " completed without it. Later epochs use option servers.",
            ) from None

    def finish(self) -> tuple[Share, ...]:
        """End all copies; return the shares that were written."""
        return tuple(one.finish() for one in self._open.values() if one.rows)
