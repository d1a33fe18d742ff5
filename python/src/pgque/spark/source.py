"""The data source `pgque` of PySpark: reads queues, as a table or as a stream.

An offset of the stream is a tick id. Between two ticks `read_window` returns the same messages for ever, so
whatever Spark replays is what it read before.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from ..errors import PgqueBadArgument, PgqueQueueInUse, PgqueTickNotFound
from . import _connect, options
from ._compat import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from .options import Options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from .sink import PgqueStreamWriter, PgqueWriter

log = logging.getLogger("pgque.spark")

# How long a new stream waits for its predecessor's connection to end.
_PREDECESSOR_TIMEOUT = 5.0
# From the epoch of Unix to that of PostgreSQL, in microseconds.
_EPOCH = 946_684_800_000_000
_NO_LIMIT = 2**62
# What divides JSON into its parts, and strings, which may hold the like.
_MARK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{},]')
# When the driver's host is lost, nothing closes its connection. The server would keep the session, and with
# it the consumer's lock, until the system's keepalives notice, mostly after two hours; all that time a
# restarted query would fail with PQ006.
_KEEPALIVES = (
    "select set_config('tcp_keepalives_idle', '15', false),"
    " set_config('tcp_keepalives_interval', '5', false),"
    " set_config('tcp_keepalives_count', '3', false)"
)
_POSITION = "select i.last_tick from pgque.get_consumer_info(%s, %s) as i"


class PgqueDataSource(DataSource):
    """Read and write the queues of pgque: `spark.read.format("pgque")`, and so on.

    Columns when reading: msg_id, type, payload, key, created_at, retry_count, and headers if asked for.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for `format()`."""
        return "pgque"

    def schema(self) -> str:
        """Return the columns."""
        return columns(options.parse(self.options, options.BATCH_READ, options.STREAM_READ))

    def reader(self, schema: StructType) -> PgqueReader:
        """Return a reader of a batch."""
        parsed = options.parse(self.options, options.BATCH_READ)
        _check_schema(parsed, schema)
        return PgqueReader(parsed)

    def streamReader(self, schema: StructType) -> PgqueStreamReader:
        """Return a reader of a stream."""
        parsed = options.parse(self.options, options.STREAM_READ)
        _check_schema(parsed, schema)
        return PgqueStreamReader(parsed)

    def writer(self, schema: StructType, overwrite: bool) -> PgqueWriter:
        """Return a writer of a batch."""
        from .sink import PgqueWriter

        return PgqueWriter(options.parse(self.options, options.BATCH_WRITE), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> PgqueStreamWriter:
        """Return a writer of a stream's micro-batches."""
        from .sink import PgqueStreamWriter

        return PgqueStreamWriter(options.parse(self.options, options.STREAM_WRITE), schema, overwrite)


def columns(parsed: Options) -> str:
    """Return the columns that are read, in Spark's notation."""
    payload = "binary" if parsed.payloadFormat == "binary" else "string"
    ddl = f"msg_id bigint, type string, payload {payload}, key string, created_at timestamp, retry_count int"
    return f"{ddl}, headers map<string,string>" if parsed.includeHeaders else ddl


def _check_schema(parsed: Options, schema: StructType) -> None:
    given = ", ".join(f"{column.name} {column.dataType.simpleString()}" for column in schema)
    if given != columns(parsed):
        raise PgqueBadArgument(
            f"the columns of pgque are {columns(parsed)}; leave out schema(), and select() afterwards"
        )


class Window(InputPartition):
    """Name what one task reads: the messages between two ticks whose id leaves the rest `part`."""

    def __init__(self, from_tick: int, to_tick: int, parts: int, part: int) -> None:
        super().__init__((from_tick, to_tick, parts, part))
        self.from_tick = from_tick
        self.to_tick = to_tick
        self.parts = parts
        self.part = part


class PgqueReader(DataSourceReader):
    """Read what lies between two ticks once."""

    def __init__(self, parsed: Options) -> None:
        self._options = parsed

    def partitions(self) -> Sequence[InputPartition]:
        """Look the two ticks up and cut what lies between them."""
        parsed = self._options
        with _connect.errors(parsed.queue), _session(parsed, autocommit=True) as conn:
            start = self._start(conn)
            end = _tick_for(conn, parsed, parsed.endingAt)
            if start > end:
                raise PgqueBadArgument(f"startingAt is tick {start}, after endingAt, which is tick {end}")
            return _split(conn, parsed, start, end)

    def _start(self, conn: _connect.Connection) -> int:
        parsed = self._options
        wanted = parsed.startingAt or "earliest"
        try:
            return _tick_for(conn, parsed, wanted)
        except psycopg.Error as error:
            if parsed.failOnDataLoss or error.sqlstate != "PQ015":
                raise
            earliest = _tick_for(conn, parsed, "earliest")
            if int(wanted) > earliest:
                raise
        log.warning(
            "pgque: tick %s of queue %s is gone; reading from tick %s", wanted, parsed.queue, earliest
        )
        return earliest

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one window."""
        return read_window(self._options, partition)


class PgqueStreamReader(SupportsTriggerAvailableNow, DataSourceStreamReader):
    """Read a stream, window after window.

    The offsets are in Spark's checkpoint. The consumer in the database keeps the messages that a replay
    may need: its position follows one micro-batch behind.
    """

    def __init__(self, parsed: Options) -> None:
        # Spark also makes readers only to take `read` from them: connect later.
        self._options = parsed
        self._stream: _Stream | None = None
        self._upto: int | None = None
        self._reached: int | None = None

    @property
    def _driver(self) -> _Stream:
        if self._stream is None:
            self._stream = _Stream(self._options)
        return self._stream

    def initialOffset(self) -> dict[str, int]:
        """Return the consumer's position. Asked again when the first micro-batch is replayed, and the same
        then."""
        return {"tick": self._driver.position()}

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the newest tick, which the run ends at."""
        self._upto = self._driver.newest()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch. Spark has none for ticks, so a limit is only a sign to keep
        ours."""
        parsed = self._options
        if parsed.maxEventsPerTrigger is None and parsed.maxTicksPerTrigger is None:
            return ReadAllAvailable()
        return ReadMaxRows(parsed.maxEventsPerTrigger or _NO_LIMIT)

    def latestOffset(
        self, start: dict[str, int] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, int]:
        """Return the end of the next micro-batch, or `start` when there is nothing new."""
        if start is not None:
            after = start["tick"]
        else:
            # 4.0 and 4.1 do not tell where they are: behind the offset that they asked for last. After a
            # restart they first ask for the partitions of the one that they stand at.
            after = self._driver.position() if self._reached is None else self._reached
        limited = not isinstance(limit, ReadAllAvailable)
        self._reached = self._driver.next_tick(after, limited, self._upto)
        return {"tick": self._reached}

    def reportLatestOffset(self) -> dict[str, int]:
        """Return the newest tick, for Spark's progress reports."""
        return {"tick": self._driver.newest()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Cut what lies between two ticks."""
        self._reached = end["tick"]
        if start["tick"] == end["tick"]:
            return []
        self._driver.keeps(start["tick"])
        return self._driver.split(start["tick"], end["tick"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one window."""
        return read_window(self._options, partition)

    def commit(self, end: dict[str, int]) -> None:
        """Move the consumer's position. Failing is no error: the next call makes up for it."""
        self._driver.commit(end["tick"])

    def stop(self) -> None:
        """Close the connection."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _Stream:
    """The driver's side of a stream: one connection, which holds the consumer's lock."""

    def __init__(self, parsed: Options) -> None:
        self._options = parsed
        self._conn: _connect.Connection | None = None
        self._position = -1
        self._committed = -1
        self._newest = -1
        self._looked = float("-inf")
        # Whether the consumer was made by this stream, as long as nothing was read
        self._anew = False

    def position(self) -> int:
        """Return where the consumer stood when the stream was opened."""
        self._connected()
        return self._position

    def newest(self) -> int:
        """Return the newest tick, at most `pollIntervalMs` old."""
        if not self._fresh():
            self._newest = self._do(lambda conn: _tick_for(conn, self._options, "latest"))
            self._looked = time.monotonic()
        return self._newest

    def next_tick(self, after: int, limited: bool, upto: int | None) -> int:
        """Return the end of the next micro-batch behind `after`, or `after`."""
        parsed = self._options
        if upto == after or (self._fresh() and self._newest == after):
            return after
        max_events = parsed.maxEventsPerTrigger if limited else None
        max_ticks = parsed.maxTicksPerTrigger if limited else None
        try:
            found = self._next(after, max_events, max_ticks, upto)
        except PgqueTickNotFound as error:
            after = self._earliest(after, error)
            found = self._next(after, max_events, max_ticks, upto)
        return after if found is None else found

    def _next(
        self, after: int, max_events: int | None, max_ticks: int | None, upto: int | None
    ) -> int | None:
        parsed = self._options
        row = self._do(
            lambda conn: conn.execute(
                f"select pgque.next_tick(%s, %s, %s, %s, %s), pgque.tick_for(%s, 'latest'), ({_POSITION})",
                [
                    parsed.queue,
                    after,
                    max_events,
                    max_ticks,
                    upto,
                    parsed.queue,
                    parsed.queue,
                    parsed.consumer,
                ],
            ).fetchone()
        )
        found, self._newest, stands = row
        self._looked = time.monotonic()
        self._check(after, stands)
        return None if found is None else int(found)

    def _check(self, start: int, stands: int | None) -> None:
        """Refuse a start that the consumer does not keep: its tick may be there, and messages behind it gone.

        The consumer is never before the checkpoint, unless one of the two was moved, restored or made anew.
        """
        anew, self._anew = self._anew, False
        if stands is None or (start >= stands and not (anew and start != stands)):
            return
        parsed = self._options
        text = (
            f"messages behind tick {start} of queue {parsed.queue} may be lost for this query: consumer"
            f" {parsed.consumer} {'was made anew and ' if anew else ''}stands at tick {stands}"
        )
        if parsed.failOnDataLoss:
            raise PgqueTickNotFound(
                f"{text}. Start again with another checkpoint, or go on with what is left with"
                " failOnDataLoss=false",
                sqlstate="PQ015",
                queue=parsed.queue,
            )
        log.warning("pgque: %s", text)

    def split(self, start: int, end: int) -> Sequence[InputPartition]:
        """Cut a window into what the tasks read."""

        def split(conn: _connect.Connection, start: int = start) -> Sequence[InputPartition]:
            return _split(conn, self._options, start, end)

        try:
            if start > end:
                raise PgqueTickNotFound(f"tick {start} does not come before tick {end}", sqlstate="PQ015")
            return self._do(split)
        except PgqueTickNotFound as error:
            earliest = self._earliest(start, error)
            if earliest >= end:
                return []
            try:
                return self._do(lambda conn: split(conn, earliest))
            except PgqueTickNotFound:
                # The end itself is lost: the next micro-batch begins with what is there.
                log.warning("pgque: tick %s of queue %s is gone too", end, self._options.queue)
                return []

    def keeps(self, start: int) -> None:
        """Refuse to go on behind a tick that the consumer does not keep."""
        named = [self._options.queue, self._options.consumer]
        row = self._do(lambda conn: conn.execute(f"select ({_POSITION})", named).fetchone())
        self._check(start, row[0])

    def commit(self, tick: int) -> None:
        """Move the position to `tick`; a failure is logged."""
        parsed = self._options
        try:
            self._do(
                # On a queue with keys it waits for senders: not for long, the next commit goes on.
                lambda conn: conn.execute(
                    "select pgque.seek(%s, %s, %s) from set_config('lock_timeout', '1s', true)",
                    [parsed.queue, parsed.consumer, tick],
                )
            )
            self._committed = tick
        except Exception as error:
            log.warning(
                "pgque: consumer %s of queue %s was not moved to tick %s: %s",
                parsed.consumer,
                parsed.queue,
                tick,
                error,
            )

    def close(self) -> None:
        """Close the connection, and so give the consumer free."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _earliest(self, start: int, error: PgqueTickNotFound) -> int:
        """Return where to go on when `start` is gone, or raise."""
        parsed = self._options
        if parsed.failOnDataLoss:
            raise PgqueTickNotFound(
                f"messages behind tick {start} of queue {parsed.queue} are lost for this query:"
                f" {str(error).rstrip('.')}. Start again with another checkpoint, or go on with what is left"
                " with failOnDataLoss=false",
                sqlstate=error.sqlstate,
                hint=error.hint,
                queue=parsed.queue,
            ) from None
        earliest: int = self._do(
            lambda conn: conn.execute("select pgque.tick_for(%s, 'earliest')", [parsed.queue]).fetchone()
        )[0]
        log.warning(
            "pgque: tick %s of queue %s is gone; going on with tick %s, %s ticks are lost",
            start,
            parsed.queue,
            earliest,
            max(earliest - start, 0) or "some",
        )
        return earliest

    def _fresh(self) -> bool:
        return time.monotonic() - self._looked < self._options.pollIntervalMs / 1000

    def _do(self, call: Any) -> Any:
        """Run a call on the connection; once more on a new one if it was lost."""
        queue = self._options.queue
        try:
            return call(self._connected())
        except psycopg.Error as error:
            if not _connect.is_lost(error):
                raise _connect.explained(error, queue) from None
            log.warning("pgque: connecting again: %s", _connect.explained(error, queue))
        self.close()
        with _connect.errors(queue):
            return call(self._connected())

    def _connected(self) -> _connect.Connection:
        """Return the connection; opens it and takes the consumer if need be."""
        if self._conn is not None and not self._conn.closed:
            return self._conn
        parsed = self._options
        # A consumer that was dropped meanwhile begins where this stream stands.
        stands = max(self._committed, self._position)
        start = parsed.startingAt or "committed" if stands < 0 else str(stands)
        conn = _session(parsed, autocommit=True)
        deadline = time.monotonic() + _PREDECESSOR_TIMEOUT
        try:
            with _connect.errors(parsed.queue):
                conn.execute(_KEEPALIVES)
            while True:
                try:
                    with _connect.errors(parsed.queue):
                        named = [parsed.queue, parsed.consumer, "latest" if start == "committed" else start]
                        made = _connect.one(conn.execute("select pgque.subscribe(%s, %s, %s)", named))[0]
                        row = _connect.one(conn.execute("select pgque.open_stream(%s, %s, %s)", named))
                    break
                except PgqueQueueInUse:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.25)
        except BaseException:
            conn.close()
            raise
        self._anew = self._anew or made == 1
        if self._position < 0:
            (self._position,) = row
        self._conn = conn
        return conn


def _session(parsed: Options, *, autocommit: bool) -> _connect.Connection:
    name = f"pgque-spark/{parsed.queue}/{parsed.consumer or 'batch'}"
    return _connect.connect(parsed.connection, name, autocommit=autocommit)


def _tick_for(conn: _connect.Connection, parsed: Options, at: str) -> int:
    found = conn.execute("select pgque.tick_for(%s, %s)", [parsed.queue, at])
    return int(_connect.one(found)[0])


def _split(conn: _connect.Connection, parsed: Options, start: int, end: int) -> list[InputPartition]:
    rows = conn.execute(
        "select w.from_tick, w.to_tick, w.parts, w.part from pgque.split_window(%s, %s, %s, %s) as w",
        [parsed.queue, start, end, parsed.numPartitions],
    )
    return [Window(*row) for row in rows]


def read_window(parsed: Options, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Read the messages of a window as record batches, in the order of their ids."""
    # Spark gives a partition without a window where a batch read has none.
    if not isinstance(partition, Window):
        return
    make = _BatchMaker(parsed)
    with _connect.errors(parsed.queue), _session(parsed, autocommit=False) as conn:
        conn.read_only = True
        # The rows of a piece are sorted by their ids, in memory if that is enough.
        conn.execute("set work_mem = '64MB'")
        _plain_values(conn)
        cursor = conn.cursor(binary=True)
        try:
            cursor.execute(
                "select pgque.read_window_cursor('pgque_window', %s, %s, %s, %s, %s, %s, %s)",
                [
                    parsed.queue,
                    partition.from_tick,
                    partition.to_tick,
                    parsed.consumer,
                    None if parsed.types is None else list(parsed.types),
                    partition.parts,
                    partition.part,
                ],
            )
        except psycopg.Error as error:
            if parsed.failOnDataLoss or error.sqlstate != "PQ015":
                raise
            log.warning("pgque: %s: its messages are left out", _connect.explained(error))
            return
        while True:
            rows = cursor.execute(f"fetch forward {parsed.fetchSize} from pgque_window").fetchall()
            if not rows:
                return
            yield make(rows)
            if len(rows) < parsed.fetchSize:
                return


def _plain_values(conn: _connect.Connection) -> None:
    """Have times as microseconds and JSON as bytes: most of the work of reading would go into them."""
    from psycopg.types.numeric import Int8BinaryLoader
    from psycopg.types.string import ByteaBinaryLoader

    conn.adapters.register_loader("timestamptz", Int8BinaryLoader)
    conn.adapters.register_loader("jsonb", ByteaBinaryLoader)
    conn.adapters.register_loader("xid8", ByteaBinaryLoader)


class _BatchMaker:
    """Make record batches of the rows of read_window, whose columns have a fixed order."""

    def __init__(self, parsed: Options) -> None:
        import pyarrow as pa

        self._pa = pa
        self._binary = parsed.payloadFormat == "binary"
        self._headers = parsed.includeHeaders
        fields = [
            ("msg_id", pa.int64()),
            ("type", pa.string()),
            ("payload", pa.binary() if self._binary else pa.string()),
            ("key", pa.string()),
            ("created_at", pa.timestamp("us", tz="UTC")),
            ("retry_count", pa.int32()),
        ]
        if self._headers:
            fields.append(("headers", pa.map_(pa.string(), pa.string())))
        self._schema = pa.schema(fields)

    def __call__(self, rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
        import pyarrow.compute as pc

        pa = self._pa
        (ids, times, _, retries, types, texts, extras, _, _, _, headers, keys, raws, _, _) = zip(
            *rows, strict=True
        )
        payload = pa.array(texts, pa.string())
        if self._binary:
            payload = pc.coalesce(pa.array(raws, pa.binary()), payload.cast(pa.binary()))
        arrays = [
            pa.array(ids, pa.int64()),
            pa.array(types, pa.string()),
            payload,
            pc.coalesce(pa.array(keys, pa.string()), pa.array(extras, pa.string())),
            pc.add(pa.array(times, pa.int64()), _EPOCH).cast(pa.timestamp("us", tz="UTC")),
            pa.array(retries, pa.int32()),
        ]
        if self._headers:
            arrays.append(
                pa.array([_headers(value) for value in headers], self._schema.field("headers").type)
            )
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _headers(value: bytes | None) -> list[tuple[str, str | None]] | None:
    """Return headers as a map of text; what is not a string stays JSON. A jsonb begins with a version."""
    if value is None:
        return None
    try:
        found: Mapping[str, object] = json.loads(value[1:])
        return [
            (name, item if item is None or isinstance(item, str) else json.dumps(item, ensure_ascii=False))
            for name, item in found.items()
        ]
    except (ValueError, RecursionError):  # too many digits for Python, or nested too deeply
        return list(_members(value[1:].decode()))


def _members(text: str) -> Iterator[tuple[str, str | None]]:
    """Split an object that jsonb printed, without a look into its numbers and what is nested."""
    name, start, depth = "", 0, 0
    for found in _MARK.finditer(text):
        mark = found[0]
        if depth == 1 and not name and mark[0] == '"':
            name, start = mark, found.end() + len(": ")
            continue
        depth += (mark in "[{") - (mark in "]}")
        if depth == 0 or (depth == 1 and mark == ","):
            item = text[start : found.start()]
            yield json.loads(name), json.loads(item) if item == "null" or item[0] == '"' else item
            name = ""
