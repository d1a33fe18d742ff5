"""The sink `pgque` of PySpark: writes frames into queues.

Exactly once: each task copies its rows into a staging table, and the driver's commit moves those of the
tasks that succeeded into their queues, with the number of the micro-batch, in one transaction. So a replay is
left out however it is partitioned, and what failed or was run twice leaves nothing.
"""

from __future__ import annotations

import io
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StructType

from ..errors import PgqueBadArgument, PgqueError
from . import _connect
from ._compat import DataSourceStreamArrowWriter
from ._schema import NULL_QUEUE, check_schema
from .options import AT_LEAST_ONCE, WAIT, Options

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("pgque.spark")

_STAGE = re.compile(r"pgque\.\w+")
# In the order of `_csv`, after attempt, n and queue
_COLUMNS = ("type", "payload", "headers", "partition_key", "key", "delay", "deliver_at", "ttl")
# Full, paused: consumers or an administrator end it
_NO_ROOM = frozenset({"PQ003", "PQ013"})
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """Say what a task wrote: `attempt` names its staged rows, and is None when there is nothing to move."""

    sink_id: str
    epoch: int | None
    attempt: str | None
    rows: int


class _Writer:
    """What writers of batches and of micro-batches share."""

    def __init__(self, parsed: Options, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise PgqueBadArgument(
                "a queue can only be appended to: mode('append') for a batch, outputMode('append') for a"
                " stream; complete and overwrite would send every row again"
            )
        self._options = parsed
        self._columns = check_schema(schema, parsed.queue, parsed.replaceByKey)
        self._binary = isinstance(schema[self._columns["payload"]].dataType, BinaryType)

    def _stage(self, batches: Iterator[pa.RecordBatch], sink_id: str, epoch: int | None) -> Staged:
        """Copy the rows of a task, and with at-least-once send them at once."""
        parsed = self._options
        batches = (batch for batch in batches if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return Staged(sink_id, epoch, None, 0)
        direct = parsed.delivery == AT_LEAST_ONCE
        if direct:
            # A name of its own for each task: of those with one name, only the first is sent.
            sink_id, epoch = f"task-{uuid.uuid4()}", None
        rows = 0
        with _connect.errors(parsed.queue), self._session() as conn:
            row = conn.execute(
                "select s.attempt::text, s.stage from pgque.sink_begin(%s, %s) as s", [sink_id, epoch]
            )
            attempt, stage = _connect.one(row)
            if _STAGE.fullmatch(stage) is None:
                raise PgqueError(f"not the name of a staging table: {stage}")
            names = ", ".join(_table_columns(self._columns, self._binary))
            with conn.cursor().copy(
                f"copy {stage} ({names}) from stdin (format csv, encoding 'UTF8')".encode()
            ) as copy:
                for batch in _chain(first, batches):
                    for start in range(0, batch.num_rows, parsed.batchSize):
                        piece = batch.slice(start, parsed.batchSize)
                        copy.write(_csv(piece, self._columns, parsed.queue, self._binary, attempt, rows))
                        rows += piece.num_rows
        if direct and self._commit([sink_id, epoch, [attempt], rows]) != "applied":
            raise PgqueError(f"sink {sink_id} was used before")
        return Staged(sink_id, epoch, None if direct else attempt, rows)

    def _apply(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Move what the tasks staged into the queues, in one transaction."""
        staged = [
            message for message in messages if isinstance(message, Staged) and message.attempt is not None
        ]
        if not staged:
            return
        sink_id, epoch = staged[0].sink_id, staged[0].epoch
        arguments = [sink_id, epoch, [s.attempt for s in staged], sum(s.rows for s in staged)]
        try:
            done = self._commit(arguments)
        except PgqueError as error:
            if not _connect.is_lost(error):
                raise
            # It may have been done: the second call finds out.
            done = self._commit(arguments)
        log.log(
            logging.INFO if done == "applied" else logging.WARNING,
            "pgque: epoch %s of sink %s: %s",
            epoch,
            sink_id,
            done,
        )

    def _commit(self, arguments: Sequence[object]) -> str:
        """Call `pgque.sink_commit`; with onFull=wait again while a queue is full or paused.

        No session is open during a pause. A commit that is late is left out or refused by the server, also
        after the query was started again.
        """
        end = time.monotonic() + self._options.onFullTimeout
        pause = _SHORTEST_PAUSE
        while True:
            try:
                return self._commit_once(arguments)
            except PgqueError as error:
                left = end - time.monotonic()
                if self._options.onFull != WAIT or error.sqlstate not in _NO_ROOM or left <= 0:
                    raise
                log.log(logging.INFO, "pgque: %s; trying again for %.0f s", error, left)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _commit_once(self, arguments: Sequence[object]) -> str:
        with _connect.errors(self._options.queue), self._session() as conn:
            done = conn.execute("select pgque.sink_commit(%s, %s, %s::uuid[], %s)", arguments)
            return str(_connect.one(done)[0])

    def _session(self) -> _connect.Connection:
        return _connect.connect(
            self._options.connection, f"pgque-spark/{self._options.queue or 'queues'}/sink"
        )


class PgqueWriter(_Writer, DataSourceArrowWriter):
    """Write a frame: all of it or nothing, and with sinkId and epoch once."""

    def __init__(self, parsed: Options, schema: StructType, overwrite: bool) -> None:
        super().__init__(parsed, schema, overwrite)
        self._sink_id = parsed.sinkId or f"batch-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage what a task has."""
        return self._stage(iterator, self._sink_id, self._options.epoch)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Send what was staged."""
        self._apply(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Leave what was staged to be swept away."""


class PgqueStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Write micro-batches, each once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage what a task has. The numbers of query and micro-batch come from Spark's task."""
        from pyspark import TaskContext

        task = TaskContext.get()
        query = task.getLocalProperty("sql.streaming.queryId") if task else None
        batch = task.getLocalProperty("streaming.sql.batchId") if task else None
        if query is None or batch is None:
            raise PgqueError("this Spark does not tell the task its query and micro-batch")
        return self._stage(iterator, self._options.sinkId or query, int(batch))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Send what was staged, unless this micro-batch was sent before."""
        self._apply(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Leave what was staged to be swept away."""


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _table_columns(columns: Mapping[str, str], binary: bool) -> list[str]:
    """Return the staging table's columns in the order of `_csv`."""
    found = [
        "payload_bytes" if binary and name == "payload" else name for name in _COLUMNS if name in columns
    ]
    return ["attempt", "n", "queue", *found]


def _csv(
    batch: pa.RecordBatch,
    columns: Mapping[str, str],
    queue: str | None,
    binary: bool,
    attempt: str,
    first: int,
) -> memoryview:
    """Return rows as CSV for COPY: every value in quotes, so that a null is what has none.

    Raises PgqueBadArgument for nulls in queue.
    """
    import pyarrow as pa
    from pyarrow import csv

    count = batch.num_rows
    arrays = [
        pa.repeat(attempt, count),
        pa.array(range(first, first + count), pa.int32()),
        _queues(batch, columns, queue),
    ]
    for name in _COLUMNS:
        if name in columns:
            column = batch.column(columns[name])
            if name == "payload" and binary:
                column = _hexadecimal(column)
            elif name == "headers":
                column = _headers(column)
            elif name in {"delay", "ttl"} and not pa.types.is_string(column.type):
                # CSV has 0E-18 for zero, which is no interval.
                column = pa.array([None if v is None else f"{v:f}" for v in column.to_pylist()], pa.string())
            elif name == "deliver_at":
                # Spark knows zones that Arrow does not, such as Z and GMT+3.
                column = column.cast(pa.timestamp("us", "UTC"))
            arrays.append(column)
    names = [str(number) for number in range(len(arrays))]
    out = io.BytesIO()
    csv.write_csv(
        pa.RecordBatch.from_arrays(arrays, names=names),
        out,
        csv.WriteOptions(include_header=False, quoting_style="all_valid", batch_size=count),
    )
    return out.getbuffer()


def _queues(batch: pa.RecordBatch, columns: Mapping[str, str], queue: str | None) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if "queue" not in columns:
        return pa.repeat(queue, batch.num_rows)
    column = batch.column(columns["queue"])
    if column.null_count and queue is None:
        raise PgqueBadArgument(NULL_QUEUE)
    return pc.fill_null(column, queue) if column.null_count else column


def _hexadecimal(column: pa.Array) -> pa.Array:
    """Return bytes as PostgreSQL reads them in COPY."""
    import pyarrow as pa

    return pa.array(
        [None if value is None else "\\x" + value.hex() for value in column.to_pylist()], pa.string()
    )


def _headers(column: pa.Array) -> pa.Array:
    """Return headers as JSON text; a string is JSON already."""
    import pyarrow as pa

    if not pa.types.is_map(column.type):
        return column
    return pa.array(
        [
            None if pairs is None else json.dumps(dict(pairs), ensure_ascii=False)
            for pairs in column.to_pylist()
        ],
        pa.string(),
    )
