"""Write frames of PySpark into queues: the sink `pgque`.

Exactly once: each task copies its rows into a staging table, and the driver's commit moves those of the
tasks that succeeded into their queues, with the number of the micro-batch, in one transaction. So a replay is
left out however it is partitioned, and a task that failed or was run twice leaves nothing. With several
servers, each of them has its share of the rows, its transaction and its number of the micro-batch.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StructType

from ..errors import PgqueBadArgumentError, PgqueError
from . import _connect
from ._compat import DataSourceStreamArrowWriter
from ._needs import packages
from ._schema import NULL_QUEUE, check_only_read, check_schema, only_read
from ._shares import Share, Shares, Spread, session
from .options import AT_LEAST_ONCE, WAIT, Options

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("pgque.spark")

# The staging table's arrays of messages by the columns of a frame
_ARRAYS = {
    "queue": "queues",
    "type": "types",
    "payload": "payloads",
    "headers": "all_headers",
    "partition_key": "partition_keys",
    "key": "keys",
    "delay": "delays",
    "deliver_at": "deliver_ats",
    "ttl": "ttls",
}
# Bytes of one staged row, unless one message is larger, and its messages. Larger rows cost the server more.
_LARGEST_ROW = 4 << 20
_MOST_MESSAGES = 1000
# Full, paused: consumers or an administrator end it
_NO_ROOM = frozenset({"PQ003", "PQ013"})
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """Tell the driver what it has to move for a task: nothing, or a share for each server that got rows.
    `servers` is the stored list of those that the epoch is spread over."""

    sink_id: str
    epoch: int | None
    shares: tuple[Share, ...] = ()
    servers: tuple[str, ...] | None = None


class _Writer:
    """Stage and send rows: the common part of the writers of batches and of micro-batches."""

    def __init__(self, parsed: Options, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise PgqueBadArgumentError(
                "a queue can only be appended to: mode('append') for a batch, outputMode('append') for a"
                " stream; complete and overwrite would send every row again"
            )
        self._options = parsed
        self._only_read = only_read(schema)
        sent = StructType([column for column in schema.fields if column.name not in self._only_read])
        self._columns = check_schema(sent, parsed.queue, parsed.replaceByKey)
        self._binary = isinstance(schema[self._columns["payload"]].dataType, BinaryType)

    @packages()
    def _stage(self, batches: Iterator[pa.RecordBatch], sink_id: str, epoch: int | None) -> Staged:
        """Copy the rows of a task, and with at-least-once send them at once."""
        parsed = self._options
        batches = (batch for batch in batches if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return Staged(sink_id, epoch)
        direct = parsed.delivery == AT_LEAST_ONCE
        if direct:
            # A name of its own for each task: of those with one name, only the first is sent.
            sink_id, epoch = f"task-{uuid.uuid4()}", None
        with ExitStack() as stack:
            shares = Shares(parsed, sink_id, epoch, stack)
            over, servers = shares.any() if direct else shares.agree()
            spread = Spread(over, self._columns, parsed.spread)
            for batch in _chain(first, batches):
                check_only_read(batch, self._only_read)
                for server, rows in spread(batch):
                    columns = _columns(rows, self._columns, parsed.queue, self._binary)
                    most = min(parsed.batchSize, _MOST_MESSAGES)
                    shares[server].write(_staged(columns, parsed.queue, most), rows.num_rows)
            found = shares.finish()
        if not direct:
            return Staged(sink_id, epoch, found, servers)
        end = time.monotonic() + parsed.onFullTimeout
        for one in found:
            if self._commit(one.server, [sink_id, epoch, [one.attempt], one.rows], end) != "applied":
                raise PgqueError(f"sink {sink_id} was used before")
        return Staged(sink_id, epoch)

    def _apply(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Move what the tasks staged into the queues, in one transaction on each server.

        A commit that fails or is killed halfway is completed by a replay: a server that has the epoch leaves
        it out.
        """
        staged = [message for message in messages if isinstance(message, Staged) and message.shares]
        if not staged:
            return
        sink_id, epoch, servers = staged[0].sink_id, staged[0].epoch, staged[0].servers
        if any(message.servers != servers for message in staged):
            raise PgqueError(f"tasks of epoch {epoch} of sink {sink_id} found different lists of servers")
        shares: dict[str | None, list[Share]] = {}
        for message in staged:
            for share in message.shares:
                shares.setdefault(share.server, []).append(share)
        end = time.monotonic() + self._options.onFullTimeout
        for server in sorted(shares, key=str):
            attempts = [share.attempt for share in shares[server]]
            arguments = [sink_id, epoch, attempts, sum(share.rows for share in shares[server])]
            if servers is not None:
                arguments.append(list(servers))
            self._apply_share(server, arguments, end)

    def _apply_share(self, server: str | None, arguments: Sequence[object], end: float) -> None:
        try:
            done = self._commit(server, arguments, end)
        except PgqueError as error:
            if not _connect.is_lost(error):
                raise
            # It may have been done: the second call finds out.
            done = self._commit(server, arguments, end)
        log.log(
            logging.INFO if done == "applied" else logging.WARNING,
            "pgque: epoch %s of sink %s: %s%s",
            arguments[1],
            arguments[0],
            done,
            "" if server is None else f" on server {server}",
        )

    def _commit(self, server: str | None, arguments: Sequence[object], end: float) -> str:
        """Call `pgque.sink_commit`; with onFull=wait again while a queue is full or paused, until `end`.

        No session is open during a pause. A commit that is late is left out or refused by the server, also
        after the query was started again.
        """
        pause = _SHORTEST_PAUSE
        while True:
            try:
                return self._commit_once(server, arguments)
            except PgqueError as error:
                left = end - time.monotonic()
                if self._options.onFull != WAIT or error.sqlstate not in _NO_ROOM or left <= 0:
                    raise
                log.log(logging.INFO, "pgque: %s; trying again for %.0f s", error, left)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _commit_once(self, server: str | None, arguments: Sequence[object]) -> str:
        values = "%s, %s, %s::uuid[], %s" + (", %s::text[]" if len(arguments) == 5 else "")
        with (
            _connect.of(server),
            _connect.errors(self._options.queue),
            # One statement is one packet. A network that became silent before a commit of its own would leave
            # a session with the sink's lock, for which the next attempt would wait.
            session(self._options.at(server), autocommit=True) as conn,
        ):
            done = conn.execute(f"select pgque.sink_commit({values})".encode(), arguments)
            return str(_connect.one(done)[0])


class PgqueWriter(_Writer, DataSourceArrowWriter):
    """Write a frame: all of it or nothing, and with sinkId and epoch once."""

    def __init__(self, parsed: Options, schema: StructType, overwrite: bool) -> None:
        super().__init__(parsed, schema, overwrite)
        self._sink_id = parsed.sinkId or f"batch-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task."""
        return self._stage(iterator, self._sink_id, self._options.epoch)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Send the staged rows."""
        self._apply(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: maintenance deletes the staged rows."""


class PgqueStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Write micro-batches, each once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a task. The numbers of query and micro-batch come from Spark's task."""
        from pyspark import TaskContext

        task = TaskContext.get()
        query = task.getLocalProperty("sql.streaming.queryId") if task else None
        batch = task.getLocalProperty("streaming.sql.batchId") if task else None
        if query is None or batch is None:
            raise PgqueError("this Spark does not give the task the ids of its query and micro-batch")
        return self._stage(iterator, self._options.sinkId or query, int(batch))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Send the staged rows, unless this micro-batch was sent before."""
        self._apply(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: maintenance deletes the staged rows."""


def _chain(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _columns(
    batch: pa.RecordBatch, columns: Mapping[str, str], queue: str | None, binary: bool
) -> dict[str, pa.Array]:
    """Return the messages of rows by the arrays of the staging table. Columns of nulls alone are left out.

    Raises PgqueBadArgumentError for nulls in queue.
    """
    import pyarrow as pa

    found: dict[str, pa.Array] = {}
    for name, array in _ARRAYS.items():
        if name not in columns:
            continue
        column = batch.column(columns[name])
        if name == "queue":
            column = _queues(column, queue)
        elif name == "headers":
            column = _headers(column)
        elif name in {"delay", "ttl"} and not (
            pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        ):
            # Arrow writes 0E-18 for zero, which is no interval.
            column = pa.array([None if v is None else f"{v:f}" for v in column.to_pylist()], pa.string())
        elif name == "deliver_at":
            # Spark knows zones that Arrow does not, such as Z and GMT+3.
            column = column.cast(pa.timestamp("us", "UTC"))
        if name == "payload":
            found["all_bytes" if binary else array] = column
        elif column.null_count < len(column):
            found[array] = column
    return found


def _staged(columns: Mapping[str, pa.Array], queue: str | None, most: int) -> pa.RecordBatch:
    """Return rows of the staging table, each of which holds up to `most` messages."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count = len(next(iter(columns.values())))
    starts = [*range(0, count, most)]
    sizes = [
        pc.fill_null(pc.binary_length(column), 0).cast(pa.int64())
        for name, column in columns.items()
        if name != "deliver_ats"
    ]
    total = sizes[0]
    for size in sizes[1:]:
        total = pc.add(total, size)
    if pc.sum(total).as_py() > _LARGEST_ROW:
        starts, held = [], 0
        for number, size in enumerate(total.to_pylist()):
            held += size
            if not starts or held > _LARGEST_ROW or number - starts[-1] == most:
                starts.append(number)
                held = size
    offsets = pa.array([*starts, count], pa.int32())
    rows = [end - start for start, end in zip(starts, [*starts[1:], count], strict=True)]
    queues = [queue or ""] * len(rows)
    if "queues" in columns:
        queues = columns["queues"].take(pa.array(starts)).to_pylist()
    arrays = {
        "queue": pa.array(queues, pa.string()),
        "rows": pa.array(rows, pa.int32()),
        **{name: pa.ListArray.from_arrays(offsets, _plain(column)) for name, column in columns.items()},
    }
    return pa.RecordBatch.from_pydict(arrays)


def _plain(column: pa.Array) -> pa.Array:
    """Return an array that begins with its buffers, as a list of slices needs it."""
    import pyarrow as pa

    return pa.concat_arrays([column])


def _queues(column: pa.Array, queue: str | None) -> pa.Array:
    import pyarrow.compute as pc

    if column.null_count and queue is None:
        raise PgqueBadArgumentError(NULL_QUEUE)
    return pc.fill_null(column, queue) if column.null_count else column


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
