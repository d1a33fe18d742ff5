"""Read the messages between two ticks as Arrow record batches.

ADBC makes the batches in C of what it fetches from a cursor: no Python object for each value, and only the
columns that were asked for. A cursor is used because the server sends its rows while it finds them; the rows
of a function in FROM it would store first. The driver's own calls use psycopg, see `_connect`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from ..errors import PgqueBadArgumentError, PgqueError, PgqueTickNotFoundError
from . import _connect, _kept, _typed
from ._needs import packages
from ._offset import Place
from .options import BY_KEY, DEAD, READ_COLUMNS, Options

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import AdbcStatement
    from pyspark.sql.types import StructField, StructType

log = logging.getLogger("pgque.spark")

_TEXT = "string"
_BINARY = "binary"
_MAP = "map<string,string>"
# Name, Spark's type, and the column of read_window_cursor(). A payload and headers have more below.
_COLUMNS = {
    "server": (_TEXT, ""),
    "queue": (_TEXT, ""),
    "tick_id": ("bigint", ""),
    "msg_id": ("bigint", "ev_id"),
    "type": (_TEXT, "ev_type"),
    "payload": (_TEXT, "ev_data"),
    "key": (_TEXT, "key"),
    "created_at": ("timestamp", "ev_time"),
    "retry_count": ("int", "ev_retry"),
    "headers": (_MAP, ""),
}
# ADBC has lists but no maps, so the keys and the values come as two lists in the same order. A value that is
# not a string stays JSON.
_HEADERS = ("header_names", "header_values")
_CURSOR = "pgque"
# Part of the error of pgque._not_future_tick() for a tick that is newer than all
_NOT_YET = ", whose newest tick is "
# Of one FETCH, about, once it is known how long messages are
_FETCH_BYTES = 16 * 1024 * 1024
# The cursor is open as long as Spark takes rows from it, so neither a FETCH nor the time between two of them
# has a limit. work_mem is that of a sort.
_SETTINGS = {
    "transaction_read_only": "on",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "work_mem": "64MB",
}


def label(parsed: Options) -> str:
    """Return the name of the queues for a session's name."""
    return str(parsed.queue) if parsed.queues is None else ",".join(parsed.queues)


def names(parsed: Options) -> tuple[str, ...]:
    """Return the names of the columns that are read."""
    if parsed.columns is not None:
        return parsed.columns
    wanted = {
        "server": parsed.servers is not None,
        "queue": parsed.queues is not None,
        "tick_id": False,
        "payload": parsed.payloadSchema is None,
        "headers": parsed.includeHeaders,
    }
    return tuple(name for name in READ_COLUMNS if wanted.get(name, True))


def ddl(parsed: Options) -> str:
    """Return the columns that are read, in Spark's notation."""
    found = ", ".join(f"{name} {_type(parsed, name)}" for name in names(parsed))
    if parsed.payloadSchema is None:
        return found
    corrupt = "" if parsed.badRecords == DEAD else f", {_typed.CORRUPT} {_TEXT}"
    # Spark parses this. Its error points at a line, so the option has lines of its own with its name above;
    # of columns without struct<>, it would point at the first one whatever is wrong.
    return f"struct<{found},\n-- option payloadSchema:\n{parsed.payloadSchema}\n{corrupt}>"


def _type(parsed: Options, name: str) -> str:
    return _BINARY if name == "payload" and parsed.payloadFormat == "binary" else _COLUMNS[name][0]


@dataclass(frozen=True)
class Layout:
    """Map the columns of a frame to the message and to its payload."""

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
    """Name the messages of a queue between two ticks, or of them those with ids above `after`, up to `upto`,
    or with a key that is in part number `part`."""

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

    @property
    def tick_id(self) -> int | None:
        """Return the tick that made the messages visible, if there is no other between both."""
        return self.to_tick

    def by_tick(self, statement: AdbcStatement) -> Iterator[Window]:
        """Return the window cut at each tick, so that only a query that reads tick_id pays for it."""
        queue, incarnation = _connect.literal(self.queue), f"{_connect.literal(self.incarnation)}::uuid"
        ticks = _result(
            statement,
            f"""
            with recursive t (before, tick_id) as (
              select null::bigint, {self.from_tick}::bigint
              union all
              select t.tick_id, pgque.next_tick({queue}, t.tick_id, null, 1, {self.to_tick}, {incarnation})
              from t
              where t.tick_id < {self.to_tick}
            )
            select t.before, t.tick_id from t where t.before is not null
            """,
        )
        _, _, _, *rest = self.value
        for rows in list(ticks):
            for row in rows.to_pylist():
                yield Window(self.queue, row["before"], row["tick_id"], *rest)

    def opening(self, parsed: Options, columns: list[str]) -> str:
        """Return the call that opens the cursor over these columns of the messages."""
        return _call(
            "read_window_cursor",
            _CURSOR,
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
            columns,
            parsed.is_ordered,
            parsed.splitBy == BY_KEY,
        )


class Archived(Window):
    """Name messages that a consumer reads before those of the log, by their ids."""

    def __init__(self, queue: str, place: Place, after: int, upto: int) -> None:
        super().__init__(queue, place.tick, place.tick, 1, 0, None, place.incarnation, after, upto)
        self.value = (queue, place, after, upto)

    @property
    def tick_id(self) -> None:
        """Return None: an archived message has no tick."""
        return

    def by_tick(self, statement: AdbcStatement) -> Iterator[Window]:
        """Return the window: it is between no ticks."""
        yield self

    def opening(self, parsed: Options, columns: list[str]) -> str:
        """Return the call that opens the cursor over these columns of the messages, ordered by id."""
        return _call(
            "archive_read_cursor",
            _CURSOR,
            self.queue,
            parsed.consumer,
            self.from_tick,
            self.after,
            self.upto,
            _types(parsed),
            self.incarnation,
            columns,
        )


def _types(parsed: Options) -> list[str] | None:
    return None if parsed.types is None else list(parsed.types)


def _call(name: str, *arguments: Any) -> str:
    listed = ", ".join(_connect.literal(argument) for argument in arguments)
    return f"pgque.{name}({listed})"


class Task(InputPartition):
    """Name what one task reads, window after window."""

    def __init__(self, windows: list[Window]) -> None:
        super().__init__(tuple(window.value for window in windows))
        self.windows = windows


def read(parsed: Options, wanted: Layout, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Return the rows of a task's windows, in the order of the windows."""
    # Spark gives a partition without a window where a batch read has none.
    for window in partition.windows if isinstance(partition, Task) else ():
        try:
            with _connect.of(window.server):
                yield from _read(parsed.at(window.server), wanted, window)
        except PgqueTickNotFoundError as error:
            # Messages of the archive are not lost, but their reader was moved. A server that has not got the
            # tick yet is a standby, or was the primary once: the task is tried again.
            if parsed.failOnDataLoss or isinstance(window, Archived) or _NOT_YET in str(error):
                raise
            log.warning("pgque: %s: its messages are left out", error)


def _read(parsed: Options, wanted: Layout, window: Window) -> Iterator[pa.RecordBatch]:
    with packages():
        import adbc_driver_manager as adbc
        import adbc_driver_postgresql  # noqa: F401

    name = _connect.session_name(window.queue, parsed.consumer)
    failed: PgqueError
    try:
        with (
            _kept.transaction(parsed.connection, name, _SETTINGS) as conn,
            adbc.AdbcStatement(conn) as statement,
        ):
            # FETCH is no query that COPY takes.
            statement.set_options(**{"adbc.postgresql.use_copy": "false"})
            pieces = window.by_tick(statement) if "tick_id" in wanted.message else [window]
            for piece in pieces:
                make = _BatchMaker(parsed, wanted, piece)
                for found in _fetched(statement, parsed, piece.opening(parsed, _fields(parsed, wanted))):
                    made, bad = make(found)
                    if bad:
                        _stage(parsed, window, bad)
                    if made.num_rows:
                        yield made
            return
    except adbc.Error as error:
        failed = _connect.explained_arrow(error, window.queue)
    raise failed


def _fetched(statement: AdbcStatement, parsed: Options, opening: str) -> Iterator[pa.RecordBatch]:
    """Open a cursor and return its rows, as many at once as the option or the server gives; fewer if
    messages are large."""
    (opened,) = _result(statement, f"select {opening} as rows")
    most = size = parsed.fetchSize or opened["rows"][0].as_py()
    while True:
        count = taken = 0
        for found in _result(statement, f"fetch {size} from {_CURSOR}"):
            count += found.num_rows
            taken += found.nbytes
            yield found
        if count < size:
            break
        if parsed.fetchSize is None:
            size = max(min(most, _FETCH_BYTES * count // max(taken, 1)), 1)
    for _ in _result(statement, f"close {_CURSOR}"):
        pass


def _result(statement: AdbcStatement, query: str) -> Iterator[pa.RecordBatch]:
    from adbc_driver_manager._reader import AdbcRecordBatchReader

    statement.set_sql_query(query)
    stream, _ = statement.execute_query()
    # Its errors are ADBC's, with SQLSTATE, where those of pyarrow's own reader are only text.
    return iter(AdbcRecordBatchReader._import_from_c(stream.address))


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


def _fields(parsed: Options, wanted: Layout) -> list[str]:
    """Return the columns that are fetched, in the order in which _BatchMaker takes them."""
    fields: list[str] = []
    for name in wanted.message:
        if name == "headers":
            fields += _HEADERS
        elif name == "payload" and parsed.payloadFormat == "binary":
            fields.append("payload")
        elif name not in {"server", "queue", "tick_id"}:
            fields.append(_COLUMNS[name][1])
    if wanted.payload:
        fields += ["ev_data", "ev_bytes"]
        if parsed.badRecords == DEAD:
            fields.append("ev_id")
    return fields or ["ev_id"]


class _BatchMaker:
    """Make the record batches that Spark expects of those that ADBC makes."""

    def __init__(self, parsed: Options, wanted: Layout, window: Window) -> None:
        self._same = {"server": window.server, "queue": window.queue, "tick_id": window.tick_id}
        self._wanted = wanted
        self._schema = _arrow_schema(wanted.schema)
        self._leaves_bad_out = parsed.badRecords == DEAD
        self._parse = (
            _typed.Parser([self._schema.field(name) for name in wanted.payload]) if wanted.payload else None
        )

    def __call__(self, found: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Return a batch, and by id the reasons why messages are left out of it."""
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
