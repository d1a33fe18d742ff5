"""What a task of the sink writes to each server.

The servers of an epoch are stored on each of them before one of them commits, and the first list that is
stored everywhere counts. So a replay spreads its rows as the first attempt did, whatever its option servers.
"""

from __future__ import annotations

import re
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import PgqueError
from . import _connect
from .options import ROUND_ROBIN, Options

if TYPE_CHECKING:
    import pyarrow as pa
    from psycopg import Copy

_STAGE = re.compile(r"pgque\.\w+")


def session(parsed: Options) -> _connect.Connection:
    """Open a connection of a sink."""
    return _connect.connect(parsed.connection, f"pgque-spark/{parsed.queue or 'queues'}/sink")


@dataclass(frozen=True)
class Share:
    """Say what a task wrote to one server: `attempt` names its staged rows there."""

    server: str | None
    attempt: str
    rows: int


class Spread:
    """Choose a server for each row: by the hash of its key, or each in turn.

    The hash is CRC-32 of the key in UTF-8, of the payload where a row has no key, modulo the number of
    servers: the same everywhere, for ever. Spark has it as crc32().
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
    """The connection of a task to one server, and what is copied there."""

    def __init__(self, parsed: Options, server: str | None, sink_id: str, epoch: int | None) -> None:
        self.server = server
        self.attempt = ""
        self.rows = 0
        self._queue = parsed.queue
        self._named = [sink_id, epoch]
        self._copy: Copy | None = None
        self._copying = ExitStack()
        with _connect.of(server):
            self.conn = session(parsed.at(server))

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

    def write(self, columns: Sequence[str], make: Callable[[str, int], memoryview], count: int) -> None:
        """Copy rows; `make` gets the attempt and the number of the first row."""
        if self._copy is None:
            self._copy = self._begin(columns)
        data = make(self.attempt, self.rows)
        with _connect.of(self.server), _connect.errors(self._queue):
            self._copy.write(data)
        self.rows += count

    def _begin(self, columns: Sequence[str]) -> Copy:
        with _connect.of(self.server), _connect.errors(self._queue):
            row = self.conn.execute(
                "select s.attempt::text, s.stage from pgque.sink_begin(%s, %s) as s", self._named
            )
            self.attempt, stage = _connect.one(row)
            if _STAGE.fullmatch(stage) is None:
                raise PgqueError(f"not the name of a staging table: {stage}")
            return self._copying.enter_context(
                self.conn.cursor().copy(
                    f"copy {stage} ({', '.join(columns)}) from stdin (format csv, encoding 'UTF8')".encode()
                )
            )

    def finish(self) -> Share:
        """End the copy and its transaction; return what was written."""
        with _connect.of(self.server), _connect.errors(self._queue):
            self._copying.close()
            self.conn.commit()
        return Share(self.server, self.attempt, self.rows)

    def close(self, *error: Any) -> None:
        """Take back what is not finished, and close the connection."""
        import psycopg

        with suppress(psycopg.Error):
            self._copying.__exit__(*error)
        self.conn.close()


class Shares:
    """The servers that a task writes to. What is not finished when the stack ends is taken back."""

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
        """Return the servers of the options, for a write that is not replayed as it was."""
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
        """Tell in errors of a server that is not in option servers why it is needed."""
        try:
            yield
        except PgqueError as error:
            if server in (self._options.servers or ()):
                raise
            raise type(error)(
                str(error),
                sqlstate=error.sqlstate,
                hint=f"Epoch {self._epoch} of sink {self._sink_id} was begun with this server, and cannot be"
                " completed without it. After it option servers counts.",
            ) from None

    def finish(self) -> tuple[Share, ...]:
        """End all copies; return what was written."""
        return tuple(one.finish() for one in self._open.values() if one.rows)
