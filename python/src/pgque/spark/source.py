"""Read queues with PySpark, as a table or as a stream: the source `pgque`.

An offset of the stream is a tick, or a place within a window, see `_offset`. Between two of them
`read_window` always returns the same messages, so that a replay reads the same as before.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from ..errors import (
    PgqueBadArgumentError,
    PgqueError,
    PgqueQueueInUseError,
    PgqueQueueNotFoundError,
    PgqueTickNotFoundError,
)
from . import _connect, _window, options
from ._compat import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from ._lag import lags
from ._offset import Place, Places, dump, load
from ._pace import Pace
from ._window import Task, Window
from .options import Options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


log = logging.getLogger("pgque.spark")

# Seconds, as of Kafka's source
_MAX_TRIGGER_DELAY = 900.0
# How long a new stream waits for its predecessor's connection to end.
_PREDECESSOR_TIMEOUT = 5.0
# Of each queue
Ticks: TypeAlias = dict[str, int]
# The most messages and ticks in a micro-batch
Limits: TypeAlias = tuple[int | None, int | None]

_POSITION = "select i.last_tick from pgque.get_consumer_info(%s, %s) as i"


def refuse_loss(parsed: Options, queue: str, text: str) -> None:
    """Raise PgqueTickNotFoundError, or log the text if failOnDataLoss=false goes on with the rest."""
    if parsed.failOnDataLoss:
        raise PgqueTickNotFoundError(
            f"{text}. Start again with another checkpoint, or set failOnDataLoss=false to"
            " go on with the messages that are there",
            sqlstate="PQ015",
            queue=queue,
        )
    log.warning("pgque: %s", text)


def _reason(error: PgqueError) -> str:
    """Return the text of an error, without its hint."""
    return str(error).removesuffix(f"\nhint: {error.hint}").rstrip(".")


class PgqueReader(DataSourceReader):
    """Read what lies between two ticks of each queue once."""

    def __init__(self, parsed: Options, schema: StructType) -> None:
        self._options = parsed
        self._layout = _window.layout(parsed, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """Return windows between the ticks of the options, split for the tasks."""
        parsed = self._options
        windows: list[Window] = []
        seen: dict[str, str] = {}
        for server in parsed.servers or [None]:
            with (
                _connect.of(server),
                _connect.errors(parsed.queue),
                _session(parsed.at(server)) as conn,
            ):
                if server is not None:
                    _connect.tell_apart(seen, server, conn)
                windows += [window.at(server) for window in self._windows(conn)]
        return _tasks(parsed, windows)

    def _windows(self, conn: _connect.Connection) -> list[Window]:
        parsed = self._options
        windows: list[Window] = []
        for queue in _queues(conn, parsed):
            incarnation = _incarnation(conn, queue)
            start = self._start(conn, queue, incarnation)
            end = _tick_for(conn, queue, parsed.endingAt, incarnation)
            if start > end:
                raise PgqueBadArgumentError(
                    f"startingAt is tick {start} of queue {queue}, after endingAt, which is tick {end}"
                )
            windows += _split(conn, parsed, queue, start, end, incarnation)
        return windows

    def _start(self, conn: _connect.Connection, queue: str, incarnation: str) -> int:
        import psycopg

        parsed = self._options
        wanted = parsed.startingAt or "earliest"
        try:
            return _tick_for(conn, queue, wanted, incarnation)
        except psycopg.Error as error:
            if parsed.failOnDataLoss or error.sqlstate != "PQ015":
                raise
            earliest = _tick_for(conn, queue, "earliest", incarnation)
            if int(wanted) > earliest:
                raise
        log.warning("pgque: tick %s of queue %s is gone; reading from tick %s", wanted, queue, earliest)
        return earliest

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the windows of one task."""
        return _window.read(self._options, self._layout, partition)


class PgqueStreamReader(SupportsTriggerAvailableNow, DataSourceStreamReader):
    """Read a stream, window after window.

    The offsets are in Spark's checkpoint, see `_offset`. Names of queue and consumer are beside them for
    people who read Spark's progress. The consumer in the database keeps the messages that a replay may need.
    Its position moves when Spark asks for the next micro-batch: by then it has noted the end of the last one
    in its checkpoint. Its own call of `commit` comes only when there is a next one.
    """

    def __init__(self, parsed: Options, schema: StructType) -> None:
        # Spark also makes readers only to take `read` from them: connect later.
        self._options = parsed
        self._layout = _window.layout(parsed, schema)
        self._driver: _Driver | None = None
        self._upto: Ticks = {}
        self._pace = Pace(parsed.minEventsPerTrigger, parsed.maxEventsPerTrigger)
        # Since when messages wait for others. The first micro-batch of a run, maybe the only one, never does.
        self._waits_since: float | None = float("-inf")
        self._reached: Places | None = None
        # The end of the micro-batch that runs, or ran last
        self._end: Mapping[str, Any] | None = None
        # The end to which the position moved before Spark's commit()
        self._moved: Mapping[str, Any] | None = None
        self._in_step = True
        self._replayed = 0

    def _connected(self) -> _Driver:
        if self._driver is None:
            self._driver = _Driver(self._options)
        return self._driver

    def _offset(self, places: Places) -> dict[str, Any]:
        return {"consumer": self._options.consumer, **dump(self._options.queue, places)}

    def _places(self, offset: Mapping[str, Any]) -> Places:
        queue = self._options.queue
        if "archive" in offset:
            raise PgqueBadArgumentError(
                "the checkpoint stands in an archive: go on with options startingAt=archive and archiveOf"
                " until the stream has read it"
            )
        if ("tick" if queue is not None else "ticks") not in offset:
            written = "servers" if "servers" in offset else "queues" if queue is not None else "queue"
            raise PgqueBadArgumentError(
                f"the checkpoint was written with option {written}, and this query has option"
                f" {'queue' if queue is not None else 'queues'}: go back to the former, or start with another"
                " checkpoint, from the consumer's position"
            )
        before = offset.get("queue", queue)
        if queue is not None and before != queue and self._connected().missing(before) is None:
            raise PgqueBadArgumentError(
                f"the checkpoint is of queue {before}, whose ticks mean nothing in queue {queue}: start"
                " with another checkpoint, from the consumer's position"
            )
        return load(queue, offset)

    def initialOffset(self) -> dict[str, Any]:
        """Return the consumer's position. When the first micro-batch is replayed, Spark calls this again and
        gets the same."""
        return self._offset(self._connected().positions())

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the newest ticks, at which the run ends."""
        self._upto = self._connected().newest()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return whether a micro-batch has a limit. Spark knows none that grow and none for ticks, so its
        number is only a sign."""
        parsed = self._options
        if parsed.maxEventsPerTrigger == options.ALL and parsed.maxTicksPerTrigger is None:
            return ReadAllAvailable()
        return ReadMaxRows(options.ALL)

    def _limits(self, limit: ReadLimit | None) -> Limits:
        """Return how many messages and ticks the next micro-batch may have."""
        if isinstance(limit, ReadAllAvailable):
            return None, None
        parsed = self._options
        # 4.0 and 4.1 give no limit. Their availableNow run has one micro-batch, which only the user cuts.
        events = parsed.maxEventsPerTrigger if limit is None else self._pace.next(time.time())
        return None if events == options.ALL else events, parsed.maxTicksPerTrigger

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return the end of the next micro-batch, or `start` when there is nothing new."""
        found = self._next_offset(start, limit)
        # Only now: a start that the consumer does not keep is refused.
        self._finish(start)
        return found

    def _next_offset(self, start: Mapping[str, Any] | None, limit: ReadLimit | None) -> dict[str, Any]:
        # 4.0 and 4.1 give no start: they are at the offset that they asked for last. After a restart
        # they first ask for the partitions of the one that they stand at.
        reached = self._reached or {} if start is None else self._places(start)
        driver = self._connected()
        after = {queue: reached.get(queue, place) for queue, place in driver.positions().items()}
        limits = self._limits(limit)
        if self._waits(after, limit):
            self._reached, behind = driver.known(after), False
        else:
            self._reached, behind = driver.next_ticks(after, limits, self._upto)
        self._pace.planned(behind)
        return self._offset(self._reached)

    def _waits(self, after: Places, limit: ReadLimit | None) -> bool:
        """Return whether the messages behind `after` are too few for a micro-batch yet."""
        parsed = self._options
        since, now = self._waits_since, time.monotonic()
        self._waits_since = None
        if parsed.minEventsPerTrigger is None or self._upto or isinstance(limit, ReadAllAvailable):
            return False
        if since is not None and now - since >= (parsed.maxTriggerDelay or _MAX_TRIGGER_DELAY):
            return False
        driver = self._connected()
        if not driver.new(after, {}):
            return False
        if (
            any(place.is_part for place in after.values())
            or driver.count(after) >= parsed.minEventsPerTrigger
        ):
            return False
        self._waits_since = now if since is None else since
        return True

    def _finish(self, start: Mapping[str, Any] | None) -> None:
        """Move the position to the end of the micro-batch that Spark has finished, once."""
        end = self._end if start is None else start
        if not self._in_step or end is None or end == self._moved or "archive" in end:
            return
        places = self._places(end)
        if places != self._connected().positions():
            self._moved = end
            self._connected().commit(places)

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the newest ticks, and how far from them the stream is behind the next micro-batch, for
        Spark's progress. Nothing is read up to it."""
        driver = self._connected()
        found = driver.report(self._reached or driver.positions())
        queues = {queue: {**figures, "replayedEpochs": self._replayed} for queue, figures in found.items()}
        return {"consumer": self._options.consumer, "queues": queues}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split what lies between the ticks of two offsets."""
        self._begin(start, end)
        begins, ends = self._places(start), self._places(end)
        if ends != self._reached:
            # Planned by a run before this one, which did not finish it
            self._replayed += 1
        self._reached = ends
        if begins == ends:
            return []
        return _tasks(self._options, self._connected().windows(begins, ends))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the windows of one task."""
        return _window.read(self._options, self._layout, partition)

    def _begin(self, start: dict[str, Any], end: dict[str, Any]) -> None:
        """Note the end of a micro-batch that begins."""
        if start == self._moved and self._in_step:
            # With asyncProgressTrackingEnabled, Spark writes its checkpoint later, and then commits.
            log.info("pgque: Spark tracks its progress asynchronously, and the position waits for it")
            self._in_step = False
        self._end = end

    def commit(self, end: dict[str, Any]) -> None:
        """Move the consumer's position. Failing is no error: the next call makes up for it."""
        if end == self._moved:
            self._moved = None
        self._connected().commit(self._places(end))

    def stop(self) -> None:
        """Close the connection."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None


class _Driver:
    """Plan a stream in the driver, by one connection, which holds the consumer's lock on each queue."""

    def __init__(self, parsed: Options) -> None:
        self._options = parsed
        self._conn: _connect.Connection | None = None
        self._streams: dict[str, _Stream] = {}
        self._newest: Ticks = {}
        self._looked = float("-inf")
        self._reported: tuple[Places, dict[str, dict[str, Any]]] = ({}, {})
        self._counted: tuple[tuple[Places, Ticks], int] = (({}, {}), 0)

    def positions(self) -> Places:
        """Return where the consumer stood in each queue when the stream was opened."""
        self._connected()
        return {queue: Place(stream.position, stream.incarnation) for queue, stream in self._streams.items()}

    def newest(self) -> Ticks:
        """Return the newest ticks, at most `pollIntervalMs` old."""
        if time.monotonic() - self._looked >= self._options.pollIntervalMs / 1000:
            self._connected()
            try:
                self._newest = self._ask_newest()
            except (PgqueQueueNotFoundError, PgqueTickNotFoundError, PgqueBadArgumentError):
                # A queue lost its ticks while it was dropped. Now it is gone, and the error names it, or it
                # is there again.
                for stream in self._streams.values():
                    stream.recognize()
                self._newest = self._ask_newest()
            self._looked = time.monotonic()
        return dict(self._newest)

    def _ask_newest(self) -> Ticks:
        rows = self.do(
            lambda conn: conn.execute(
                "select s.queue, pgque.tick_for(s.queue, 'latest', s.incarnation)"
                " from unnest(%s::text[], %s::uuid[]) as s (queue, incarnation)",
                [list(self._streams), [stream.incarnation for stream in self._streams.values()]],
            ).fetchall()
        )
        return dict(rows)

    def report(self, reached: Places) -> dict[str, dict[str, Any]]:
        """Return how far the stream is behind when it has read up to `reached`, by queue. The server is asked
        once a micro-batch, because Spark calls this a hundred times a second while nothing is new."""
        before, found = self._reported
        # A checkpoint may have queues that the options no longer name.
        reached = {queue: place for queue, place in reached.items() if queue in self._streams}
        if before != reached:
            try:
                found = self.do(partial(self._lags, reached))
            except PgqueError as error:
                # Figures are no reason to end a query.
                log.warning("pgque: the lag of consumer %s is not known: %s", self._options.consumer, error)
                found = {queue: {"tick": tick} for queue, tick in self.newest().items()}
            for queue, figures in found.items():
                figures["lostTicks"] = self._streams[queue].lost
            self._reported = reached, found
        return found

    def count(self, after: Places) -> int:
        """Return the number of messages between `after` and the newest ticks, at most."""
        newest = self.newest()
        if self._counted[0] != (after, newest):
            ends = {queue: Place(tick, after[queue].incarnation) for queue, tick in newest.items()}
            # Messages without a tick yet are in both figures.
            more, less = (
                sum(one["eventsBehind"] for one in self.do(partial(self._lags, places)).values())
                for places in (after, ends)
            )
            self._counted = (after, newest), more - less
        return self._counted[1]

    def _lags(self, places: Places, conn: _connect.Connection) -> dict[str, dict[str, Any]]:
        return lags(conn, str(self._options.consumer), places)

    def is_other(self, queue: str, place: Place) -> bool:
        """Return whether a place is of another incarnation of the queue."""
        self._connected()
        return self._streams[queue].is_other(place)

    def is_anew(self, queue: str) -> bool:
        """Return whether the stream made its consumer, the first time that it is asked."""
        self._connected()
        return self._streams[queue].take_anew()

    def forget_report(self) -> None:
        """Take the figures anew when they are asked for next, even if the stream has not moved."""
        self._reported = ({}, {})

    def new(self, after: Places, upto: Ticks) -> list[str]:
        """Return the queues that have something new behind `after`."""
        newest = self.newest()
        return [
            queue
            for queue, place in after.items()
            if self._streams[queue].is_other(place) or place.tick not in (newest[queue], upto.get(queue))
        ]

    def next_ticks(self, after: Places, limits: Limits, upto: Ticks, others: int = 0) -> tuple[Places, bool]:
        """Return the ends of the next micro-batch behind `after`, and whether it leaves messages unread. The
        queues that have something new share the limit of messages, with as many others."""
        new = self.new(after, upto)
        max_events, max_ticks = limits
        if max_events is not None and new:
            max_events = max(max_events // (len(new) + others), 1)
        found = {
            queue: self._streams[queue].next_place(after[queue], max_events, max_ticks, upto.get(queue))
            for queue in new
        }
        behind = any(
            place.is_part or place.tick < upto.get(queue, self._newest[queue])
            for queue, place in found.items()
        )
        # A micro-batch of a queue that was created again ends in the new one (failOnDataLoss=false).
        ends = {
            queue: place._replace(incarnation=self._streams[queue].incarnation)
            for queue, place in found.items()
        }
        return self.known({**after, **ends}), behind

    def known(self, places: Places) -> Places:
        """Return places with an incarnation: those of an earlier version's checkpoint have none yet."""
        return {
            queue: place._replace(incarnation=place.incarnation or self._streams[queue].incarnation)
            for queue, place in places.items()
        }

    def windows(self, begins: Places, ends: Places) -> list[Window]:
        """Return what lies between two offsets. A queue that joins begins at the consumer's position."""
        self._connected()
        for queue in begins.keys() - ends.keys():
            self._left_out(queue)
        found: list[Window] = []
        for queue, end in ends.items():
            stream = self._stream(queue)
            start = begins.get(queue) or Place(stream.position, stream.incarnation)
            if start.same(end) and not stream.is_other(start) and not stream.is_other(end):
                continue
            windows = stream.split(start, end)
            found += windows
            if windows and not stream.unstaged:
                # Messages that an earlier run could not parse are read again, maybe with other options.
                stream.unstage(windows[0])
        return found

    def missing(self, queue: str) -> PgqueQueueNotFoundError | None:
        """Return the error for a queue that was dropped or renamed; None for one that is there."""
        try:
            self.do(lambda conn: conn.execute("select pgque.tick_for(%s, 'latest')", [queue]))
        except PgqueQueueNotFoundError as error:
            return error
        return None

    def _left_out(self, queue: str) -> None:
        """Refuse to go on without a dropped queue; a queue that the options no longer name is no loss."""
        error = self.missing(queue)
        if error is None:
            return
        if self._options.failOnDataLoss:
            raise PgqueQueueNotFoundError(
                f"{error}; the checkpoint has it, and its messages may be lost for this query. To go"
                " on without it, set failOnDataLoss=false",
                sqlstate=error.sqlstate,
                queue=queue,
            )
        log.warning("pgque: queue %s of the checkpoint is gone", queue)

    def commit(self, ends: Places) -> None:
        """Move the positions."""
        self._connected()
        for queue, place in ends.items():
            self._stream(queue).commit(place)

    def _stream(self, queue: str) -> _Stream:
        # A queue that the options no longer name still has the micro-batch that was read before.
        return self._streams.get(queue) or _Stream(self, self._options, queue)

    def close(self) -> None:
        """Close the connection, and so release the consumer."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def do(self, call: Any) -> Any:
        """Run a call on the connection; once more on a new one if it was lost."""
        import psycopg

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
        """Return the connection; opens it and takes the consumer of each queue if need be."""
        if self._conn is not None and not self._conn.closed:
            return self._conn
        from ..client.dsn import SERVER_KEEPALIVES

        conn = _session(self._options)
        deadline = time.monotonic() + _PREDECESSOR_TIMEOUT
        try:
            with _connect.errors(self._options.queue):
                # Else a restarted query would fail with PQ006 until the server has noticed that the driver's
                # host is lost, since the session has the consumer's lock.
                conn.execute(SERVER_KEEPALIVES)
                # A pattern is looked up once: a queue that is new joins when the query is started again.
                queues = list(self._streams) or _queues(conn, self._options)
            for queue in queues:
                stream = self._stream(queue)
                stream.open(conn, deadline)
                self._streams[queue] = stream
        except BaseException:
            conn.close()
            raise
        self._conn = conn
        return conn


class _Stream:
    """Plan one queue of a stream."""

    def __init__(self, driver: _Driver, parsed: Options, queue: str) -> None:
        self._driver = driver
        self._options = parsed
        self._queue = queue
        # The incarnation of the queue that this stream knows: its ticks mean nothing in another one.
        self.incarnation: str | None = None
        self.position = -1
        self._committed = -1
        # Ticks that were gone before they were read, and up to which they are counted
        self.lost = 0
        self._lost_upto = -1
        self.unstaged = False
        # Whether the consumer was made by this stream, as long as nothing was read
        self._anew = False

    def open(self, conn: _connect.Connection, deadline: float) -> None:
        """Take the consumer, which a predecessor may hold for a moment."""
        while True:
            try:
                with _connect.errors(self._queue), conn.transaction():
                    self._take(conn)
                return
            except PgqueQueueInUseError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.25)
            except PgqueTickNotFoundError as error:
                # Created again between two calls of this one, or since the stream knew the queue
                if self.incarnation is not None:
                    self._forget(error)
                elif time.monotonic() > deadline:
                    raise

    def _take(self, conn: _connect.Connection) -> None:
        """Take the consumer; subscribe it if need be."""
        parsed = self._options
        incarnation = self.incarnation or _incarnation(conn, self._queue)
        _tick_for(conn, self._queue, "latest", incarnation)
        # A consumer that was dropped meanwhile begins where this stream stands.
        stands = max(self._committed, self.position)
        start = parsed.startingAt or "committed" if stands < 0 else str(stands)
        at = "latest" if start in ("committed", options.ARCHIVE) else start
        named = [self._queue, parsed.consumer, at]
        subscribe: tuple[bytes, list[Any]] = (b"select pgque.subscribe(%s, %s, %s)", [*named])
        if start == options.ARCHIVE:
            given = [self._queue, parsed.consumer, parsed.archiveOf, not parsed.failOnDataLoss]
            subscribe = (b"select pgque.subscribe_archive(%s, %s, %s, %s)", given)
        made = _connect.one(conn.execute(*subscribe))[0]
        row = _connect.one(conn.execute("select pgque.open_stream(%s, %s, %s, %s)", [*named, incarnation]))
        self.incarnation = incarnation
        self._anew = self._anew or made == 1
        if self.position < 0:
            (self.position,) = row

    def is_other(self, place: Place) -> bool:
        """Return whether a place is of another incarnation of the queue."""
        return None not in (self.incarnation, place.incarnation) and self.incarnation != place.incarnation

    def recognize(self) -> None:
        """Refuse to go on if the queue was created again while the stream ran."""
        try:
            self._driver.do(lambda conn: _tick_for(conn, self._queue, "latest", self.incarnation))
        except PgqueTickNotFoundError as error:
            self._forget(error)
            self._driver.do(lambda conn: self.open(conn, time.monotonic() + _PREDECESSOR_TIMEOUT))

    def _forget(self, error: PgqueTickNotFoundError) -> None:
        """Forget what is known of the former queue, where failOnDataLoss=false goes on with this one."""
        refuse_loss(self._options, self._queue, _reason(error))
        self.incarnation = None
        self.position = self._committed = -1

    def next_place(
        self, after: Place, max_events: int | None, max_ticks: int | None, upto: int | None
    ) -> Place:
        """Return the end of the next micro-batch behind a place, or this place."""
        try:
            self._need(after)
            return self._next(after, max_events, max_ticks, upto)
        except PgqueTickNotFoundError as error:
            earliest = self._earliest(after.tick, error)
            if after.is_part and earliest <= after.tick:
                # The tick that ended the window is lost: what comes behind its first one is read again.
                return self.next_place(Place(after.tick, after.incarnation), max_events, max_ticks, upto)
            after = Place(earliest)
            return self._next(after, max_events, max_ticks, upto)

    def _need(self, place: Place) -> None:
        """Refuse a place of another incarnation as the server does."""
        if self.is_other(place):
            named = [self._queue, place.incarnation]
            self._driver.do(lambda conn: conn.execute("select pgque.tick_for(%s, 'latest', %s)", named))

    def _next(self, after: Place, max_events: int | None, max_ticks: int | None, upto: int | None) -> Place:
        named = [self._queue, self._options.consumer]
        upto = after.window if after.is_part else upto
        # A user's limit means whole ticks; ours may cut one that has a million messages.
        cut = self._options.maxEventsPerTrigger is None
        limits = [max_events, max_ticks, upto, self._options.consumer, self.incarnation, cut]
        row = self._driver.do(
            lambda conn: conn.execute(
                f"select w.to_tick, w.upto_id, ({_POSITION})"
                " from pgque.next_window(%s, %s, %s, %s, %s, %s, %s, %s, %s) as w",
                [*named, self._queue, after.tick, after.after_id, *limits],
            ).fetchone()
        )
        to_tick, upto_id, stands = row
        self._check(after.tick, stands)
        if to_tick is None:
            return after
        return Place(to_tick) if upto_id is None else Place(after.tick, None, to_tick, upto_id)

    def take_anew(self) -> bool:
        """Return whether the consumer was made by this stream, as long as nothing was read; then no more."""
        anew, self._anew = self._anew, False
        return anew

    def _check(self, start: int, stands: int | None) -> None:
        """Refuse a start that the consumer does not keep: its tick may be there, and messages behind it gone.

        The consumer is never before the checkpoint, unless one of the two was moved, restored or made anew.
        """
        anew = self.take_anew()
        if stands is None or (start >= stands and not (anew and start != stands)):
            return
        parsed = self._options
        text = f"consumer {parsed.consumer} {'was made anew and ' if anew else ''}stands at tick {stands}"
        if parsed.failOnDataLoss:
            raise PgqueTickNotFoundError(text, sqlstate="PQ015")
        log.warning(
            "pgque: messages behind tick %s of queue %s may be lost for this query: %s",
            start,
            self._queue,
            text,
        )
        self._lose(start, stands)

    def _lose(self, start: int, upto: int) -> None:
        self.lost += max(upto - max(start, self._lost_upto), 0)
        self._lost_upto = max(self._lost_upto, upto)

    def split(self, start: Place, end: Place) -> list[Window]:
        """Cut a window into what the tasks read."""
        # An earlier version's checkpoint has no incarnation: it gets that of the queue that is there.
        incarnation = end.incarnation or self.incarnation or start.incarnation

        def split(conn: _connect.Connection, start: Place = start) -> list[Window]:
            return _split_places(conn, self._options, self._queue, start, end, incarnation)

        try:
            self._need(start)
            self._keeps(start.tick)
            if start.tick > end.tick:
                raise PgqueTickNotFoundError(
                    f"tick {start.tick} does not come before tick {end.tick}", sqlstate="PQ015"
                )
            return self._driver.do(split)
        except PgqueTickNotFoundError as error:
            earliest = self._earliest(start.tick, error)
            if earliest >= (end.window or end.tick):
                return []
            try:
                return self._driver.do(lambda conn: split(conn, Place(earliest)))
            except PgqueTickNotFoundError:
                # The end itself is lost: the next micro-batch begins with what is there.
                log.warning("pgque: tick %s of queue %s is gone too", end.tick, self._queue)
                return []

    def _keeps(self, start: int) -> None:
        """Refuse to go on behind a tick that the consumer does not keep."""
        named = [self._queue, self._options.consumer]
        row = self._driver.do(lambda conn: conn.execute(f"select ({_POSITION})", named).fetchone())
        self._check(start, row[0])

    def unstage(self, first: Window) -> None:
        """Forget which messages of a window and behind it did not parse."""
        named = [self._queue, self._options.consumer]
        calls = [[*named, first.from_tick, self.incarnation, first.after]]
        if first.after is not None:
            calls.append([*named, first.to_tick, self.incarnation, None])
        for call in calls:
            self._driver.do(
                lambda conn, call=call: conn.execute("select pgque.unstage_dead(%s, %s, %s, %s, %s)", call)
            )
        self.unstaged = True

    def commit(self, place: Place) -> None:
        """Move the position to a place; a failure is logged."""
        parsed = self._options
        tick = place.tick
        if tick == self._committed:
            return
        try:
            self._driver.do(
                # On a queue with keys it waits for senders: not for long, the next commit goes on.
                lambda conn: conn.execute(
                    "select pgque.seek(%s, %s, %s, false, %s) from set_config('lock_timeout', '1s', true)",
                    [self._queue, parsed.consumer, tick, place.incarnation or self.incarnation],
                )
            )
            self._committed = tick
        except Exception as error:
            log.warning(
                "pgque: consumer %s of queue %s was not moved to tick %s: %s",
                parsed.consumer,
                self._queue,
                tick,
                error,
            )

    def _earliest(self, start: int, error: PgqueTickNotFoundError) -> int:
        """Return where to go on when `start` is gone, or raise."""
        parsed = self._options
        if parsed.failOnDataLoss:
            raise PgqueTickNotFoundError(
                f"messages behind tick {start} of queue {self._queue} are lost for this query:"
                f" {_reason(error)}. Start again with another checkpoint, or set failOnDataLoss=false"
                " to go on with the messages that are there",
                sqlstate=error.sqlstate,
                hint=error.hint,
                queue=self._queue,
            ) from None
        earliest: int = self._driver.do(
            lambda conn: _tick_for(conn, self._queue, "earliest", self.incarnation)
        )
        log.warning(
            "pgque: tick %s of queue %s is gone; going on with tick %s, %s ticks are lost",
            start,
            self._queue,
            earliest,
            max(earliest - start, 0) or "some",
        )
        self._lose(start, earliest)
        return earliest


def _session(parsed: Options) -> _connect.Connection:
    name = _connect.session_name(_window.label(parsed), parsed.consumer)
    return _connect.connect(parsed.connection, name, autocommit=True)


def _queues(conn: _connect.Connection, parsed: Options) -> list[str]:
    """Return the queues that are asked for: a name with * stands for those that are there."""
    if parsed.queues is None:
        return [str(parsed.queue)]
    there = [str(row[0]) for row in conn.execute("select i.queue_name from pgque.get_queue_info() as i")]
    found: set[str] = set()
    for name in parsed.queues:
        pattern = re.compile(".*".join(re.escape(part) for part in name.split("*")), re.DOTALL)
        found |= {queue for queue in there if pattern.fullmatch(queue)} if "*" in name else {name}
    if not found:
        raise PgqueBadArgumentError(
            f"no queue is there for option queues {', '.join(parsed.queues)}, or the role has no right to it:"
            " pgque.spark.queues() lists those that it can use"
        )
    return sorted(found)


def _incarnation(conn: _connect.Connection, queue: str) -> str:
    found = conn.execute("select pgque.queue_incarnation(%s)::text", [queue])
    return str(_connect.one(found)[0])


def _tick_for(conn: _connect.Connection, queue: str, at: str, incarnation: str | None) -> int:
    found = conn.execute("select pgque.tick_for(%s, %s, %s)", [queue, at, incarnation])
    return int(_connect.one(found)[0])


def _split(
    conn: _connect.Connection,
    parsed: Options,
    queue: str,
    start: int,
    end: int,
    incarnation: str | None,
    after: int | None = None,
    upto: int | None = None,
) -> list[Window]:
    """Cut what lies between two ticks, or its part with ids above `after`, up to `upto`."""
    by_key = parsed.splitBy == options.BY_KEY
    rows = conn.execute(
        "select w.from_tick, w.to_tick, w.after_id, w.upto_id"
        " from pgque.split_window(%s, %s, %s, %s, %s, %s, %s) as w",
        [queue, start, end, 1 if by_key else parsed.numPartitions, incarnation, after, upto],
    )
    parts = parsed.numPartitions if by_key else 1
    return [
        Window(queue, begins, ends, parts, part, None, incarnation, above, last)
        for begins, ends, above, last in rows
        for part in range(parts)
    ]


def _split_places(
    conn: _connect.Connection, parsed: Options, queue: str, start: Place, end: Place, incarnation: str | None
) -> list[Window]:
    """Cut what lies between two places: the rest of the window that one is within, whole windows, and a part
    of the last one."""

    def part(place: Place, after: int | None, upto: int | None) -> list[Window]:
        ends = place.window or place.tick
        return _split(conn, parsed, queue, place.tick, ends, incarnation, after, upto)

    if start.is_part and start.window == end.window and start.tick == end.tick:
        return part(start, start.after_id, end.after_id)
    windows: list[Window] = []
    begin = start.tick
    if start.is_part:
        windows += part(start, start.after_id, None)
        begin = start.window or begin
    if begin != end.tick:
        windows += _split(conn, parsed, queue, begin, end.tick, incarnation)
    if end.is_part:
        windows += part(end, None, end.after_id)
    return windows


def _tasks(parsed: Options, windows: list[Window]) -> list[InputPartition]:
    """Deal windows out to at most `numPartitions` tasks: each queue has up to as many. With splitBy=key, each
    queue has as many, in the order of the tasks."""
    count = parsed.numPartitions
    tasks = [windows[first::count] for first in range(min(count, len(windows)))]
    return [Task(_turned(task, number)) for number, task in enumerate(tasks)]


def _turned(windows: list[Window], number: int) -> list[Window]:
    """Let tasks begin with different servers."""
    servers = list(dict.fromkeys(window.server for window in windows))
    return sorted(windows, key=lambda window: (servers.index(window.server) - number) % len(servers))
