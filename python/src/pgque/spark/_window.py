"""Read the messages between two ticks as Arrow record batches.

ADBC makes the batches in C of what the server copies: no Python object for each value, and only the columns
that were asked for. What psycopg does for the driver's own calls, `_connect` has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from ..errors import PgqueBadArgumentError, PgqueError, PgqueTickNotFoundError
from . import _connect, _typed
from ._offset import Place
from .options import DEAD, READ_COLUMNS, Options

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import AdbcConnection, AdbcDatabase
    from pyspark.sql.types import StructField, StructType

log = logging.getLogger("pgque.spark")

_TEXT = "string"
_BINARY = "binary"
_MAP = "map<string,string>"
# Name, Spark's type, and the expression over a row of read_window(). A payload and headers have more below.
_COLUMNS = {
    "server": (_TEXT, ""),
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
    wanted = {
        "server": parsed.servers is not None,
        "queue": parsed.queues is not None,
        "payload": parsed.payloadSchema is None,
        "headers": parsed.includeHeaders,
    }
    return tuple(name for name in READ_COLUMNS if wanted.get(name, True))


def ddl(parsed: Options) -> str:
    """Return the columns that are read, in Spark's notation."""
    found = [f"{name} {_type(parsed, name)}" for name in names(parsed)]
    if parsed.payloadSchema is not None:
        found.append(parsed.payloadSchema)
        if parsed.badRecords != DEAD:
            found.append(f"{_typed.CORRUPT} {_TEXT}")
    return ", ".join(found)


def _type(parsed: Options, name: str) -> str:
    return _BINARY if name == "payload" and parsed.payloadFormat == "binary" else _COLUMNS[name][0]


@dataclass(frozen=True)
class Layout:
    """Say where the columns of a frame come from: the message, its payload, or what did not parse."""

    schema: StructType
    message: tuple[str, ...]
    payload: tuple[str, ...]


def layout(parsed: Options, schema: StructType) -> Layout:
    """Return the layout of a schema, which is ours or the user's. Raises PgqueBadArgumentError that names the
    column."""
    fields = schema.fields
    seen: set[str] = set()
    for column in fields:
        if column.name.lower() in seen:
            raise PgqueBadArgumentError(
                f"column {column.name} is of the message and of the payload, or comes twice: choose the"
                " message's columns with option columns"
            )
        seen.add(column.name.lower())
    ours = [name for name in READ_COLUMNS if name != "server" or parsed.servers is not None]
    if parsed.payloadSchema is not None:
        given = names(parsed)
        message, payload = fields[: len(given)], fields[len(given) :]
        if [column.name for column in message] != list(given):
            raise PgqueBadArgumentError("schema() and option payloadSchema exclude each other")
    else:
        message = [column for column in fields if column.name in ours]
        payload = [column for column in fields if column.name not in ours]
        for column in payload:
            if column.name.lower() in ours:
                raise PgqueBadArgumentError(
                    f"column {column.name}: the message's is {column.name.lower()}; a column of the payload"
                    " with this name needs option payloadSchema"
                )
        if parsed.columns is not None and [column.name for column in fields] != list(parsed.columns):
            raise PgqueBadArgumentError("schema() and option columns exclude each other")
    for column in message:
        if not column.nullable:
            raise PgqueBadArgumentError(
                f"column {column.name} of a message cannot be NOT NULL: leave that out"
            )
        if column.dataType.simpleString() != _type(parsed, column.name):
            raise PgqueBadArgumentError(
                f"column {column.name} of a message is {_type(parsed, column.name)}, not"
                f" {column.dataType.simpleString()}"
            )
    wanted = [column for column in payload if column.name != _typed.CORRUPT]
    for column in payload:
        _check_payload_column(column)
    if parsed.badRecords == DEAD and not wanted:
        raise PgqueBadArgumentError(
            "option badRecords=dead needs payloadSchema, or schema() with columns of the payload"
        )
    if wanted and len(wanted) == len(payload) and parsed.badRecords != DEAD:
        raise PgqueBadArgumentError(
            f"column {wanted[0].name} is of the payload (those of a message are {', '.join(ours)}):"
            f" schema() then needs a column {_typed.CORRUPT} string too, for payloads that do not parse. A"
            " stream can make dead letters of these with option badRecords=dead instead"
        )
    return Layout(schema, tuple(column.name for column in message), tuple(column.name for column in wanted))


def _check_payload_column(column: StructField) -> None:
    if not column.nullable:
        raise PgqueBadArgumentError(
            f"column {column.name} of the payload cannot be NOT NULL: it is null where a payload does not"
            " parse"
        )
    if column.name == _typed.CORRUPT and column.dataType.simpleString() != _TEXT:
        raise PgqueBadArgumentError(
            f"column {_typed.CORRUPT} is {_TEXT}, not {column.dataType.simpleString()}"
        )
    _typed.check_type(column.name, column.dataType)


class Window(InputPartition):
    """Name the messages of a queue between two ticks whose id leaves the rest `part`, or of them those with
    ids above `after`, up to `upto`."""

    def __init__(
        self,
        queue: str,
        from_tick: int,
        to_tick: int,
        parts: int = 1,
        part: int = 0,
        server: str | None = None,
        incarnation: str | None = None,
        after: int | None = None,
        upto: int | None = None,
    ) -> None:
        super().__init__((queue, from_tick, to_tick, parts, part, server, incarnation, after, upto))
        self.server = server
        self.incarnation = incarnation
        self.queue = queue
        self.from_tick = from_tick
        self.to_tick = to_tick
        self.parts = parts
        self.part = part
        self.after = after
        self.upto = upto

    def at(self, server: str | None) -> Window:
        """Return the window on one of several servers."""
        queue, from_tick, to_tick, parts, part, _, *rest = self.value
        return Window(queue, from_tick, to_tick, parts, part, server, *rest)

    def rows(self, parsed: Options) -> str:
        """Return the call that reads the messages."""
        return _call(
            "read_window",
            *(
                self.queue,
                self.from_tick,
                self.to_tick,
                parsed.consumer,
                _types(parsed),
                self.parts,
                self.part,
                self.incarnation,
                self.after,
                self.upto,
            ),
        )


class Archived(Window):
    """Name messages that a consumer reads before those of the log, by their ids."""

    def __init__(self, queue: str, place: Place, after: int, upto: int) -> None:
        super().__init__(queue, place.tick, place.tick, 1, 0, None, place.incarnation, after, upto)
        self.value = (queue, place, after, upto)

    def rows(self, parsed: Options) -> str:
        """Return the call that reads the messages."""
        return _call(
            "archive_read",
            *(self.queue, parsed.consumer, self.from_tick, self.after, self.upto, _types(parsed)),
            self.incarnation,
        )


def _types(parsed: Options) -> list[str] | None:
    return None if parsed.types is None else list(parsed.types)


def _call(name: str, *arguments: Any) -> str:
    from psycopg import sql

    listed = ", ".join(sql.Literal(argument).as_string(None) for argument in arguments)
    return f"pgque.{name}({listed})"


class Task(InputPartition):
    """Name what one task reads, window after window."""

    def __init__(self, windows: list[Window]) -> None:
        super().__init__(tuple(window.value for window in windows))
        self.windows = windows


def read(parsed: Options, wanted: Layout, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read the windows of a task in their order, each in the order of the messages' ids."""
    # Spark gives a partition without a window where a batch read has none.
    for window in partition.windows if isinstance(partition, Task) else ():
        try:
            with _connect.of(window.server):
                yield from _read(parsed.at(window.server), wanted, window)
        except PgqueTickNotFoundError as error:
            # Messages of the archive are not lost, but their reader was moved.
            if parsed.failOnDataLoss or isinstance(window, Archived):
                raise
            log.warning("pgque: %s: its messages are left out", error)


def _read(parsed: Options, wanted: Layout, window: Window) -> Iterator[pa.RecordBatch]:
    import adbc_driver_manager as adbc
    from adbc_driver_manager._reader import AdbcRecordBatchReader

    make = _BatchMaker(parsed, wanted, window)
    failed: PgqueError
    try:
        with _connection(parsed, window.queue) as conn, adbc.AdbcStatement(conn) as statement:
            for query in (_SETTINGS, _query(parsed, wanted, window)):
                statement.set_sql_query(query)
                stream, _ = statement.execute_query()
                # Its errors are ADBC's, with SQLSTATE, where those of pyarrow's own reader are only text.
                batches = AdbcRecordBatchReader._import_from_c(stream.address)
                if query is _SETTINGS:
                    batches.read_all()
            for found in batches:
                made, bad = make(found)
                if bad:
                    _stage(parsed, window, bad)
                for start in range(0, made.num_rows, parsed.fetchSize):
                    yield made.slice(start, parsed.fetchSize)
            return
    except adbc.Error as error:
        failed = _connect.explained_arrow(error, window.queue)
    raise failed


def _stage(parsed: Options, window: Window, bad: dict[int, str]) -> None:
    """Note messages that do not parse. They become dead letters when Spark has committed the micro-batch."""
    name = _connect.session_name(window.queue, parsed.consumer)
    with (
        _connect.errors(window.queue),
        _connect.connect(parsed.connection, name, autocommit=True) as conn,
    ):
        conn.execute(
            "select pgque.stage_dead(%s, %s, %s, %s::bigint[], %s::text[], %s::uuid)",
            [
                window.queue,
                parsed.consumer,
                window.to_tick,
                list(bad),
                list(bad.values()),
                window.incarnation,
            ],
        )


def _connection(parsed: Options, queue: str) -> AdbcConnection:
    import adbc_driver_manager as adbc

    dsn = _connect.dsn(parsed.connection, _connect.session_name(queue, parsed.consumer))
    return adbc.AdbcConnection(database(dsn), **{"adbc.connection.autocommit": "false"})


@lru_cache(maxsize=64)
def database(dsn: str) -> AdbcDatabase:
    """Return where ADBC connects to. It reads all types and columns of the database for that, and keeps no
    connection: once for each of Spark's worker processes is enough."""
    import adbc_driver_postgresql

    return adbc_driver_postgresql.connect(dsn)


def _query(parsed: Options, wanted: Layout, window: Window) -> str:
    fields = []
    for name in wanted.message:
        if name == "headers":
            fields += [f"{_HEADERS.format(part)} as {part}" for part in ("key", "value")]
        elif name == "payload" and parsed.payloadFormat == "binary":
            fields.append(f"{_PAYLOAD_BYTES} as payload")
        elif name not in {"server", "queue"}:
            fields.append(f"{_COLUMNS[name][1]} as {name}")
    if wanted.payload:
        fields += ["w.ev_data as text", "w.ev_bytes as bytes"]
        if parsed.badRecords == DEAD:
            fields.append("w.ev_id as id")
    return f"select {', '.join(fields or ['1 as one'])} from {window.rows(parsed)} as w"


class _BatchMaker:
    """Make the record batches that Spark expects of those that ADBC makes."""

    def __init__(self, parsed: Options, wanted: Layout, window: Window) -> None:
        self._same = {"server": window.server, "queue": window.queue}
        self._wanted = wanted
        self._schema = _arrow_schema(wanted.schema)
        self._leaves_bad_out = parsed.badRecords == DEAD
        self._parse = (
            _typed.Parser([self._schema.field(name) for name in wanted.payload]) if wanted.payload else None
        )

    def __call__(self, found: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Return a batch, and of what is left out of it why, by the message's id."""
        import pyarrow as pa

        columns = iter(found.columns)
        arrays: dict[str, pa.Array] = {}
        for name in self._wanted.message:
            kind = self._schema.field(name).type
            if name in self._same:
                arrays[name] = pa.repeat(pa.scalar(self._same[name], kind), found.num_rows)
            elif name == "headers":
                arrays[name] = _map(next(columns), next(columns), kind)
            else:
                arrays[name] = next(columns)
        bad: dict[int, str] = {}
        if self._parse is not None:
            payloads = _typed.text(next(columns), next(columns))
            parsed, bad = self._parse(payloads)
            arrays.update(zip(self._wanted.payload, parsed, strict=True))
        if _typed.CORRUPT in self._schema.names:
            arrays[_typed.CORRUPT] = (
                pa.array(
                    [payloads[row].as_py() if row in bad else None for row in range(found.num_rows)],
                    pa.string(),
                )
                if bad
                else pa.nulls(found.num_rows, pa.string())
            )
        made = pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)
        if not bad or not self._leaves_bad_out:
            return made, {}
        ids = next(columns)
        good = pa.array([row not in bad for row in range(found.num_rows)], pa.bool_())
        return made.filter(good), {ids[row].as_py(): reason for row, reason in bad.items()}


def _arrow_schema(schema: StructType) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # before 4.2, which know no other zone
        return to_arrow_schema(schema)


def _map(keys: pa.ListArray, values: pa.ListArray, kind: pa.MapType) -> pa.MapArray:
    """Join lists of the same lengths, null in the same places, into maps."""
    import pyarrow as pa

    entries = pa.StructArray.from_arrays(
        [keys.values, values.values], fields=[kind.key_field, kind.item_field]
    )
    return pa.Array.from_buffers(kind, len(keys), keys.buffers()[:2], children=[entries])
