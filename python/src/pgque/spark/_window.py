"""Read the messages between two ticks as Arrow record batches.

ADBC makes the batches in C of what the server copies: no Python object for each value, and only the columns
that were asked for. What psycopg does for the driver's own calls, `_connect` has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from psycopg import sql
from pyspark.sql.datasource import InputPartition

from ..errors import PgqueError, PgqueTickNotFound
from . import _connect
from .options import READ_COLUMNS, Options

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import AdbcConnection, AdbcDatabase

log = logging.getLogger("pgque.spark")

_TEXT = "string"
_BINARY = "binary"
_MAP = "map<string,string>"
# Name, Spark's type, and the expression over a row of read_window(). A payload and headers have more below.
_COLUMNS = {
    "queue": (_TEXT, ""),
    "msg_id": ("bigint", "w.ev_id"),
    "type": (_TEXT, "w.ev_type"),
    "payload": (_TEXT, "w.ev_data"),
    "key": (_TEXT, "coalesce(w.ev_key, w.ev_extra1)"),
    "created_at": ("timestamp", "w.ev_time"),
    "retry_count": ("int", "w.ev_retry"),
    "headers": (_MAP, ""),
}
_PAYLOAD_BYTES = "coalesce(w.ev_bytes, convert_to(w.ev_data, 'UTF8'))"
# What is not a string stays JSON. ADBC has lists, and no maps: their keys and their values, in one order.
_HEADERS = (
    "case when w.ev_headers is not null then array(select h.{} from jsonb_each_text(w.ev_headers) as h) end"
)
# The query runs as long as Spark takes rows from it, so it has no time limit of its own.
_SETTINGS = (
    "select set_config('transaction_read_only', 'on', true), set_config('statement_timeout', '0', true)"
)


def label(parsed: Options) -> str:
    """Return what a session of all the queues is called after."""
    return str(parsed.queue) if parsed.queues is None else ",".join(parsed.queues)


def names(parsed: Options) -> tuple[str, ...]:
    """Return the names of the columns that are read."""
    if parsed.columns is not None:
        return parsed.columns
    wanted = {"queue": parsed.queues is not None, "headers": parsed.includeHeaders}
    return tuple(name for name in READ_COLUMNS if wanted.get(name, True))


def ddl(parsed: Options) -> str:
    """Return the columns that are read, in Spark's notation."""
    return ", ".join(f"{name} {_type(parsed, name)}" for name in names(parsed))


def _type(parsed: Options, name: str) -> str:
    return _BINARY if name == "payload" and parsed.payloadFormat == "binary" else _COLUMNS[name][0]


class Window(InputPartition):
    """Name the messages of a queue between two ticks whose id leaves the rest `part`."""

    def __init__(self, queue: str, from_tick: int, to_tick: int, parts: int = 1, part: int = 0) -> None:
        super().__init__((queue, from_tick, to_tick, parts, part))
        self.queue = queue
        self.from_tick = from_tick
        self.to_tick = to_tick
        self.parts = parts
        self.part = part


class Task(InputPartition):
    """Name what one task reads, window after window."""

    def __init__(self, windows: list[Window]) -> None:
        super().__init__(tuple(window.value for window in windows))
        self.windows = windows


def read(parsed: Options, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read the windows of a task in their order, each in the order of the messages' ids."""
    # Spark gives a partition without a window where a batch read has none.
    for window in partition.windows if isinstance(partition, Task) else ():
        try:
            yield from _read(parsed, window)
        except PgqueTickNotFound as error:
            if parsed.failOnDataLoss:
                raise
            log.warning("pgque: %s: its messages are left out", error)


def _read(parsed: Options, window: Window) -> Iterator[pa.RecordBatch]:
    import adbc_driver_manager as adbc
    from adbc_driver_manager._reader import AdbcRecordBatchReader

    make = _BatchMaker(parsed, window.queue)
    failed: PgqueError
    try:
        with _connection(parsed, window.queue) as conn, adbc.AdbcStatement(conn) as statement:
            for query in (_SETTINGS, _query(parsed, window)):
                statement.set_sql_query(query)
                stream, _ = statement.execute_query()
                # Its errors are ADBC's, with SQLSTATE, where those of pyarrow's own reader are only text.
                batches = AdbcRecordBatchReader._import_from_c(stream.address)
                if query is _SETTINGS:
                    batches.read_all()
            for found in batches:
                made = make(found)
                for start in range(0, made.num_rows, parsed.fetchSize):
                    yield made.slice(start, parsed.fetchSize)
            return
    except adbc.Error as error:
        failed = _connect.explained_arrow(error, window.queue)
    raise failed


def _connection(parsed: Options, queue: str) -> AdbcConnection:
    import adbc_driver_manager as adbc

    dsn = _connect.dsn(parsed.connection, _connect.session_name(queue, parsed.consumer))
    return adbc.AdbcConnection(_database(dsn), **{"adbc.connection.autocommit": "false"})


@lru_cache(maxsize=4)
def _database(dsn: str) -> AdbcDatabase:
    """Return where ADBC connects to. It reads all types and columns of the database for that, and keeps no
    connection: once for each of Spark's worker processes is enough."""
    import adbc_driver_postgresql

    return adbc_driver_postgresql.connect(dsn)


def _query(parsed: Options, window: Window) -> str:
    fields = []
    for name in names(parsed):
        if name == "headers":
            fields += [f"{_HEADERS.format(part)} as {part}" for part in ("key", "value")]
        elif name == "payload" and parsed.payloadFormat == "binary":
            fields.append(f"{_PAYLOAD_BYTES} as payload")
        elif name != "queue":
            fields.append(f"{_COLUMNS[name][1]} as {name}")
    arguments: list[Any] = [
        window.queue,
        window.from_tick,
        window.to_tick,
        parsed.consumer,
        None if parsed.types is None else list(parsed.types),
        window.parts,
        window.part,
    ]
    return (
        sql.SQL("select {} from pgque.read_window({}) as w")
        .format(
            sql.SQL(", ".join(fields or ["1 as one"])),
            sql.SQL(", ").join(sql.Literal(argument) for argument in arguments),
        )
        .as_string(None)
    )


class _BatchMaker:
    """Make the record batches that Spark expects of those that ADBC makes."""

    def __init__(self, parsed: Options, queue: str) -> None:
        import pyarrow as pa

        types = {
            "bigint": pa.int64(),
            "int": pa.int32(),
            _TEXT: pa.string(),
            _BINARY: pa.binary(),
            "timestamp": pa.timestamp("us", tz="UTC"),
            _MAP: pa.map_(pa.string(), pa.string()),
        }
        self._queue = queue
        self._schema = pa.schema([(name, types[_type(parsed, name)]) for name in names(parsed)])

    def __call__(self, found: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa

        arrays = []
        columns = iter(found.columns)
        for field in self._schema:
            if field.name == "queue":
                arrays.append(pa.repeat(pa.scalar(self._queue, field.type), found.num_rows))
            elif field.name == "headers":
                arrays.append(_map(next(columns), next(columns), field.type))
            else:
                arrays.append(next(columns))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _map(keys: pa.ListArray, values: pa.ListArray, kind: pa.MapType) -> pa.MapArray:
    """Join lists of the same lengths, null in the same places, into maps."""
    import pyarrow as pa

    entries = pa.StructArray.from_arrays(
        [keys.values, values.values], fields=[kind.key_field, kind.item_field]
    )
    return pa.Array.from_buffers(kind, len(keys), keys.buffers()[:2], children=[entries])
