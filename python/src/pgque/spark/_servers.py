"""Read queues of several servers as one stream.

The offset has the places of each server: {"servers": {"db1:5432/app": {"ticks": {"orders": 17},
"incarnations": {"orders": "…"}}}}. Each server has a driver of its own, with a connection and the consumer's
lock there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import PgqueBadArgumentError, PgqueError
from . import _connect
from ._offset import Place, Places, dump, load
from .source import Limits, PgqueStreamReader, Ticks, _Driver, _session

if TYPE_CHECKING:
    from ._window import Window
    from .options import Options

log = logging.getLogger("pgque.spark")

_WAY_OUT = (
    "The checkpoint has this server, and option servers has not. Keep it in the list until its messages"
    " are read, or go on without them with failOnDataLoss=false."
)
_GONE = frozenset({"PQ001", "PQ011"})  # no such queue, not subscribed


def _key(server: str, queue: str) -> str:
    """Return the key of one server's queue: names of servers have no spaces."""
    return f"{server} {queue}"


def _keyed(server: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {_key(server, queue): value for queue, value in found.items()}


def _by_server(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    by_server: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        server, queue = key.split(" ", 1)
        by_server.setdefault(server, {})[queue] = value
    return by_server


class PgqueServersReader(PgqueStreamReader):
    """Read a stream of several servers. The places of a micro-batch have keys of server and queue."""

    _driver: _Drivers | None

    def _connected(self) -> _Drivers:
        if self._driver is None:
            self._driver = _Drivers(self._options)
        return self._driver

    def _offset(self, places: Places) -> dict[str, Any]:
        servers = {server: dump(None, found) for server, found in _by_server(places).items()}
        return {"consumer": self._options.consumer, "servers": servers}

    def _places(self, offset: Mapping[str, Any]) -> Places:
        if "servers" not in offset:
            raise PgqueBadArgumentError(
                "the checkpoint was written without option servers: leave the option out, or start with"
                " another checkpoint, from the consumer's position"
            )
        places: Places = {}
        for server, found in offset["servers"].items():
            places |= _keyed(server, load(None, found))
        return places

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """Return the end of the next micro-batch. Before the checkpoint loses a server, see that it may."""
        self._connected().leave(self._reached or {} if start is None else self._places(start))
        return super().latestOffset(start, limit)

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the newest ticks, and how far behind the stream is, by server."""
        driver = self._connected()
        found = driver.report(self._reached or driver.positions())
        servers = {
            server: {
                "queues": {queue: {**one, "replayedEpochs": self._replayed} for queue, one in figures.items()}
            }
            for server, figures in _by_server(found).items()
        }
        return {"consumer": self._options.consumer, "servers": servers}


class _Drivers(_Driver):
    """Act on the drivers of the servers as if they were one."""

    def __init__(self, parsed: Options) -> None:
        super().__init__(parsed)
        self._listed = {server: _Driver(parsed.at(server)) for server in parsed.servers or ()}
        # Servers of the checkpoint that are no longer listed: until they are left
        self._others: dict[str, _Driver] = {}
        self._left: set[str] = set()
        # The listed ones, by what tells databases apart
        self._seen: dict[str, str] = {}

    def positions(self) -> Places:
        """Return where the consumer stood when the stream was opened."""
        return self._each("positions")

    def newest(self) -> Ticks:
        """Return the newest ticks."""
        return self._each("newest")

    def _each(self, what: str) -> dict[str, Any]:
        self._tell_apart()
        found: dict[str, Any] = {}
        for server, driver in self._listed.items():
            with _connect.of(server):
                found |= _keyed(server, getattr(driver, what)())
        return found

    def _tell_apart(self) -> None:
        if self._seen:
            return
        seen: dict[str, str] = {}
        for server in self._listed:
            # Before the drivers: two that are one would wait for each other's consumer.
            with _connect.of(server), _session(self._options.at(server)) as conn, _connect.errors():
                _connect.tell_apart(seen, server, conn)
        self._seen = seen

    def report(self, reached: Places) -> dict[str, dict[str, Any]]:
        """Return how far behind the stream is, by server and queue."""
        found: dict[str, dict[str, Any]] = {}
        for server, places in _by_server(reached).items():
            if server in self._listed:
                found |= _keyed(server, self._listed[server].report(places))
        return found

    def new(self, after: Places, upto: Ticks) -> list[str]:
        """Return the keys of what is new behind `after`."""
        ends = _by_server(upto)
        found: list[str] = []
        for server, places in _by_server(after).items():
            with _connect.of(server):
                new = self._listed[server].new(places, ends.get(server, {}))
            found += [_key(server, queue) for queue in new]
        return found

    def count(self, after: Places) -> int:
        """Return the number of messages behind `after` on all servers, at most."""
        total = 0
        for server, places in _by_server(after).items():
            with _connect.of(server):
                total += self._listed[server].count(places)
        return total

    def next_ticks(self, after: Places, limits: Limits, upto: Ticks, others: int = 0) -> tuple[Places, bool]:
        """Return the ends of the next micro-batch, and whether it leaves messages unread. All queues that
        have something new share the limit."""
        ends = _by_server(upto)
        new = Counter(key.split(" ", 1)[0] for key in self.new(after, upto))
        found: Places = {}
        behind = False
        for server, places in _by_server(after).items():
            rest = others + new.total() - new[server]
            with _connect.of(server):
                driver = self._listed[server]
                reached, left = driver.next_ticks(places, limits, ends.get(server, {}), rest)
            found |= _keyed(server, reached)
            behind |= left
        return found, behind

    def windows(self, begins: Places, ends: Places) -> list[Window]:
        """Return what lies between two offsets, on each server."""
        started, wanted = _by_server(begins), _by_server(ends)
        # PySpark 4.0 and 4.1 may not have given the place of the stream before.
        self.leave({key: place for key, place in begins.items() if key.split(" ", 1)[0] not in wanted})
        found: list[Window] = []
        for server, places in wanted.items():
            with self._at(server):
                driver = self._driver(server, places)
                found += [w.at(server) for w in driver.windows(started.get(server, {}), places)]
        return found

    def commit(self, ends: Places) -> None:
        """Move the positions."""
        for server, places in _by_server(ends).items():
            if server in self._listed:
                with _connect.of(server):
                    self._listed[server].commit(places)

    def leave(self, reached: Places) -> None:
        """Leave the servers that are no longer listed, or refuse to if one has messages to read.

        The stream has finished the messages up to `reached`, so their consumers are moved there: it does not
        ask these servers again.
        """
        for server, places in _by_server(reached).items():
            if server in self._listed or server in self._left:
                continue
            self._tell_apart()
            with self._at(server):
                self._leave(server, places)
            self._left.add(server)
            if server in self._others:
                self._others.pop(server).close()

    @contextmanager
    def _at(self, server: str) -> Iterator[None]:
        """Name the server in errors.

        An error of a server that left the list gets a hint how to go on without it. With
        failOnDataLoss=false the error is logged instead.
        """
        try:
            with _connect.of(server):
                yield
        except PgqueBadArgumentError:
            raise
        except PgqueError as error:
            if server in self._listed:
                raise
            if self._options.failOnDataLoss:
                raise type(error)(str(error), sqlstate=error.sqlstate, hint=_WAY_OUT) from None
            log.warning("pgque: left behind: %s", error)

    def _leave(self, server: str, places: Places) -> None:
        if server in self._others:  # which has the consumer
            self._others[server].do(lambda conn: self._finish(server, conn, places))
            return
        with _session(self._options.at(server)) as conn, _connect.errors():
            self._finish(server, conn, places)

    def _finish(self, server: str, conn: _connect.Connection, places: Places) -> None:
        import psycopg

        consumer = self._options.consumer
        _connect.tell_apart(dict(self._seen), server, conn)
        behind = []
        for queue, (tick, incarnation, _, after_id) in places.items():
            named = [queue, consumer]
            try:
                conn.execute("select from pgque.get_consumer_info(%s, %s)", named)
            except psycopg.Error as error:
                if error.sqlstate not in _GONE:
                    raise
                log.warning("pgque: %s has nothing left to read: %s", server, error)
                continue
            conn.execute("select pgque.open_stream(%s, %s, 'latest', %s)", [*named, incarnation])
            conn.execute("select pgque.seek(%s, %s, %s, false, %s)", [*named, tick, incarnation])
            pending = conn.execute(
                "select l.oldest_pending is null or l.oldest_pending > '0'"
                " from pgque.stream_lag(%s, %s, %s, %s, %s) as l",
                [*named, tick, incarnation, after_id],
            )
            if _connect.one(pending)[0]:
                behind.append(f"{queue} behind tick {tick}")
        if behind:
            raise PgqueError(f"consumer {consumer} has messages to read in queue {', '.join(behind)}")

    def _driver(self, server: str, places: Mapping[str, Place]) -> _Driver:
        """Return the driver of a server; if it is no longer listed, with the queues that it had."""
        if server in self._listed:
            return self._listed[server]
        if server not in self._others:
            there = replace(self._options.at(server), queue=None, queues=tuple(places))
            with _session(there) as conn, _connect.errors():
                for queue in places:
                    # The driver would subscribe a missing consumer, and no stream would read its messages.
                    conn.execute("select from pgque.get_consumer_info(%s, %s)", [queue, there.consumer])
            self._others[server] = _Driver(there)
        return self._others[server]

    def close(self) -> None:
        """Close the connections."""
        for driver in (*self._listed.values(), *self._others.values()):
            driver.close()
        self._others.clear()
