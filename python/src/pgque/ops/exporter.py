"""Figures of a database for Prometheus: `pgque metrics --serve`, `render`, and a collector for a registry.

Needs the package prometheus-client: `pip install "./python[metrics]"`.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR, socket
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import psycopg
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from psycopg.rows import args_row, scalar_row

from ..client.dsn import with_keepalives
from ..client.limit import COMMAND_TIMEOUT, check_command_timeout
from ..errors import PgqueConnectionError, PgqueError, from_psycopg, one_line
from ..twins.client import PgqueClient
from ..twins.connection import open_client
from .monitoring import text as file

__all__ = ["CONTENT_TYPE", "Exporter", "make_server", "render"]

log = logging.getLogger("pgque.metrics")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds for which a read of the database answers all scrapes.
_MAX_AGE = 5.0

# Largest share of the time in which the database is read: with a thousand queues a read takes seconds.
_MAX_SHARE = 0.1

# Seconds after which the server ends a read, before the client gives it up.
_TIMEOUT = 25
_SET_TIMEOUT = "select set_config('statement_timeout', %s, true)"

# Seconds that `close` waits for a read that runs.
_CLOSE_TIMEOUT = 1.0

# Seconds for which one ping answers all calls of /readyz.
_PING_AGE = 1.0

# Seconds that a client has to send its request; then those for the figures, and to take the answer.
_REQUEST_TIMEOUT = 10.0
_ANSWER_TIMEOUT = 60.0

# Requests that are answered at a time. More get 503, and beyond twice as many their connection is closed.
_MAX_REQUESTS = 32

Family = CounterMetricFamily | GaugeMetricFamily
T = TypeVar("T")


class _Figure(NamedTuple):
    metric: str
    queue: str
    consumer: str
    check: str
    value: float


_QUEUE, _CONSUMER = ("queue",), ("queue", "consumer")

# Names, labels and help of the families. Those that pgque.metrics() has beyond these get their labels from
# the first row.
_FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "pgque_up": ((), "1 if the last read of the database succeeded, else 0."),
    "pgque_read_duration_seconds": ((), "Time that the last read of the database took."),
    "pgque_read_timestamp_seconds": ((), "Start of the last read of the database, in Unix time."),
    "pgque_health_status": (
        ("queue", "check"),
        "Result of a check of pgque.health(): 0 is ok, 1 a warning, 2 a failure.",
    ),
    "pgque_dead_tuples": ((), "Dead rows in the tables of schema pgque."),
    "pgque_schema_bytes": ((), "Size of all tables of schema pgque with their indexes."),
    "pgque_oldest_transaction_seconds": ((), "Age of the oldest writing transaction of the database."),
    "pgque_recurring_messages": ((), "Recurring messages."),
    "pgque_recurring_failing": ((), "Recurring messages that are not sent."),
    "pgque_queue_events_total": (_QUEUE, "Messages sent, also if rolled back; a delayed one counts twice."),
    "pgque_queue_last_tick_id": (_QUEUE, "Number of the last tick."),
    "pgque_queue_ticker_lag_seconds": (_QUEUE, "Age of the last tick."),
    "pgque_queue_bytes": (_QUEUE, "Size of the tables of the queue with their indexes."),
    "pgque_queue_rotation_age_seconds": (_QUEUE, "Time since the last rotation."),
    "pgque_queue_retries": (
        _QUEUE,
        "Messages in state delayed, retry or processing.",
    ),
    "pgque_queue_dead_letters": (_QUEUE, "Dead letters of the queue."),
    "pgque_queue_consumers": (_QUEUE, "Consumers of the queue."),
    "pgque_queue_paused": (_QUEUE, "1 if the queue is paused, so that send is refused, else 0."),
    "pgque_queue_depth": (_QUEUE, "Messages that the slowest consumer has not finished, at most."),
    "pgque_queue_max_depth": (_QUEUE, "Setting max_depth: pending messages at which send is refused."),
    "pgque_queue_retention_seconds": (
        _QUEUE,
        "Setting retention_period: age at which consumers lose pending messages.",
    ),
    "pgque_messages_in_flight": (_CONSUMER, "Messages that workers have leased."),
    "pgque_messages_redelivered_total": (_CONSUMER, "Messages that were redelivered."),
    "pgque_messages_expired_total": (_CONSUMER, "Messages that expired before they were delivered."),
    "pgque_messages_dropped_total": (_CONSUMER, "Messages that were given up and deleted (drop_policy)."),
    "pgque_messages_forwarded_total": (_CONSUMER, "Dead letters that were forwarded (dead_letter_queue)."),
    "pgque_messages_archived_total": (_CONSUMER, "Messages that were archived."),
    "pgque_consumer_lag_seconds": (_CONSUMER, "Age of the oldest pending message; 0 if none is pending."),
    "pgque_consumer_last_seen_seconds": (_CONSUMER, "Time since the consumer last received or acknowledged."),
    "pgque_consumer_pending_events": (_CONSUMER, "Messages that the consumer has not finished."),
    "pgque_consumer_skipped_events_total": (_CONSUMER, "Messages that the consumer lost to retention."),
    "pgque_consumer_open_batch": (_CONSUMER, "1 if the consumer has an open batch, else 0."),
}


def _family(name: str, labels: tuple[str, ...], about: str) -> Family:
    cls = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return cls(name, about, labels=labels)


def _families(figures: Iterable[_Figure]) -> list[Family]:
    """Return the figures by family, each once, in the order of _FAMILIES."""
    found: dict[str, tuple[tuple[str, ...], Family]] = {
        name: (labels, _family(name, labels, about)) for name, (labels, about) in _FAMILIES.items()
    }
    for figure in figures:
        if figure.metric not in found:
            given = tuple(label for label in _CONSUMER if getattr(figure, label))
            about = f"Figure {figure.metric} of pgque.metrics()."
            found[figure.metric] = (given, _family(figure.metric, given, about))
        labels, family = found[figure.metric]
        family.add_metric([getattr(figure, label) for label in labels], figure.value)
    return [family for _, family in found.values() if family.samples]


class _Given(Collector):
    """A collector of families that were read before."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _to_text(families: list[Family]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return generate_latest(registry)


def _read(conn: psycopg.Connection[object]) -> list[Family]:
    """Read all figures in one statement of a transaction, or of a savepoint of the caller's; a pooler may be
    between. Raises psycopg.Error."""
    at, began = time.time(), time.monotonic()
    with conn.transaction():
        with conn.cursor(row_factory=scalar_row) as cursor:
            before = cursor.execute("show statement_timeout", prepare=False).fetchone()
        conn.execute(_SET_TIMEOUT, [f"{_TIMEOUT}s"], prepare=False)
        with conn.cursor(row_factory=args_row(_Figure)) as cursor:
            figures = cursor.execute(file("figures.sql").encode(), prepare=False).fetchall()
        # A released savepoint would leave it to the caller's transaction.
        conn.execute(_SET_TIMEOUT, [before], prepare=False)
    took = time.monotonic() - began
    figures += [
        _Figure("pgque_up", "", "", "", 1),
        _Figure("pgque_read_duration_seconds", "", "", "", took),
        _Figure("pgque_read_timestamp_seconds", "", "", "", at),
    ]
    return _families(figures)


def render(
    source: str | psycopg.Connection[object] = "", *, command_timeout: float | None = COMMAND_TIMEOUT
) -> bytes:
    """Return the figures of a database as Prometheus reads them. Calls `pgque.metrics` and `pgque.health`,
    within 30 seconds.

    Args:
        source: connection string or URL, or an open connection, whose transaction goes on afterwards.
        command_timeout: seconds in which the server has to answer each call, over a connection that this
            function opens.

    Raises a PgqueError. `Exporter` serves many scrapes with one read, and reports a database that is away.
    """
    try:
        if isinstance(source, str):
            with open_client(source, "pgque metrics", command_timeout=command_timeout) as client:
                return _to_text(_read(client.conn))
        return _to_text(_read(source))
    except psycopg.Error as error:
        raise from_psycopg(error) from error


class Exporter(Collector):
    """Read the figures of a database, at most once in `max_age` seconds, for any number of threads.

    While one thread reads, the others get the figures of the previous read. It is also a collector:
    `prometheus_client.REGISTRY.register(Exporter(dsn))`.

    Args:
        dsn: connection string or URL; if empty, that of PGQUE_DSN. PG* variables fill in missing parts.
        max_age: seconds for which one read serves all callers.
        max_share: largest share of the time in which the database is read; a slow read serves for longer.
        command_timeout: seconds in which the server has to answer each call; then the database counts as
            away.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        max_age: float = _MAX_AGE,
        max_share: float = _MAX_SHARE,
        command_timeout: float | None = COMMAND_TIMEOUT,
    ) -> None:
        if max_age < 0 or not 0 < max_share <= 1:
            raise ValueError("max_age must not be negative, and max_share more than 0 and at most 1")
        check_command_timeout(command_timeout)
        with_keepalives(dsn)  # raises for what is no connection string
        self._dsn = dsn
        self._command_timeout = command_timeout
        self._max_age = max_age
        self._max_share = max_share
        self._lock = threading.Lock()
        self._client: PgqueClient | None = None
        self._due_at = float("-inf")  # the earliest time of the next read, by the monotonic clock
        self._pinged_at = float("-inf")
        self._last: list[Family] = []
        self._text: tuple[list[Family], bytes] | None = None  # of which figures, and what it is
        self._error: PgqueError | None = None

    def describe(self) -> Iterable[Family]:
        """Return the families without their figures; the database is not read."""
        return [_family(name, labels, about) for name, (labels, about) in _FAMILIES.items()]

    def collect(self) -> Iterable[Family]:
        """Return the figures, read now or of the last read. If the database cannot be read, return
        `pgque_up 0` alone."""
        if self._is_due() and self._lock.acquire(blocking=not self._last):
            try:
                if self._is_due():  # otherwise another thread has read meanwhile
                    self._refresh()
            finally:
                self._lock.release()
        return self._last

    def text(self) -> bytes:
        """Return the figures of `collect` as the text that Prometheus reads."""
        self.collect()
        figures, known = self._last, self._text
        if known is None or known[0] is not figures:
            known = self._text = figures, _to_text(figures)
        return known[1]

    def check(self) -> None:
        """Read the figures. Raises the PgqueError that keeps them from being read."""
        self.collect()
        if self._error is not None:
            raise self._error

    def problem(self) -> str | None:
        """Return why the database cannot be read, or None; while a read runs, what the last one found."""
        if self._lock.acquire(blocking=False):
            try:
                if self._error is None:
                    if time.monotonic() - self._pinged_at > _PING_AGE:
                        self._ping()
                elif self._is_due():
                    self._refresh()
            finally:
                self._lock.release()
        return None if self._error is None else one_line(self._error)

    def close(self) -> None:
        """Close the connection; the next read opens another one. A read that goes on for longer than a second
        keeps it."""
        if self._lock.acquire(timeout=_CLOSE_TIMEOUT):
            try:
                self._disconnect()
            finally:
                self._lock.release()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    def _refresh(self) -> None:
        began = time.monotonic()
        pause = self._max_age
        try:
            self._last = self._try(_read)
        except PgqueError as error:
            if self._error is None:
                log.warning("the database cannot be read: %s", one_line(error))
            self._error = error
            self._last = _families([_Figure("pgque_up", "", "", "", 0)])
        else:
            if self._error is not None:
                log.warning("the database can be read again")
            self._error = None
            pause = max(pause, (time.monotonic() - began) * (1 / self._max_share - 1))
        self._due_at = time.monotonic() + pause

    def _ping(self) -> None:
        try:
            self._try(lambda conn: conn.execute("select 1"))
        except PgqueError as error:
            self._error = error
        self._pinged_at = time.monotonic()

    def _try(self, read: Callable[[psycopg.Connection[object]], T]) -> T:
        """Read, and read again if the connection was lost since the last read."""
        was_connected = self._client is not None
        try:
            return self._once(read)
        except PgqueConnectionError:
            if not was_connected:
                raise
        return self._once(read)

    def _once(self, read: Callable[[psycopg.Connection[object]], T]) -> T:
        try:
            if self._client is None:
                self._client = open_client(self._dsn, "pgque metrics", command_timeout=self._command_timeout)
            return read(self._client.conn)
        except (PgqueError, psycopg.Error) as error:
            self._disconnect()
            if isinstance(error, PgqueError):
                raise
            raise from_psycopg(error) from error

    def _disconnect(self) -> None:
        if self._client is not None:
            with suppress(psycopg.Error):
                self._client.close()
            self._client = None


class _Client:
    """The time limit of a connection."""

    def __init__(self, is_refused: bool) -> None:
        self.is_refused = is_refused
        self.give(_REQUEST_TIMEOUT)

    def give(self, seconds: float) -> None:
        """Give the client this many seconds from now on."""
        self.deadline = time.monotonic() + seconds


class _Server(ThreadingHTTPServer):
    """One thread a connection, which has one request; the number of both and their time are bounded."""

    daemon_threads = True
    request_queue_size = 4 * _MAX_REQUESTS  # that are not accepted yet

    def __init__(self, host: str, port: int, exporter: Exporter, token: str | None) -> None:
        self.exporter = exporter
        self.token = token
        self.clients: dict[socket, _Client] = {}
        self._clients_lock = threading.Lock()
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless there are too many."""
        with self._clients_lock:
            count = len(self.clients)
            if count < 2 * _MAX_REQUESTS:
                self.clients[request] = _Client(is_refused=count >= _MAX_REQUESTS)
        if count < 2 * _MAX_REQUESTS:
            super().process_request(request, client_address)
        else:
            log.debug("too many connections: that of %s is closed", client_address)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._clients_lock:
            self.clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are slow, a byte now and then included. Called twice a second."""
        now = time.monotonic()
        with self._clients_lock:
            late = [request for request, client in self.clients.items() if client.deadline < now]
        for request in late:
            with suppress(OSError):  # it has ended meanwhile
                request.shutdown(SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log the error of a client that went away."""
        log.info("a request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT
    server: _Server

    def do_GET(self) -> None:
        client = self.server.clients[self.connection]
        client.give(_ANSWER_TIMEOUT)
        path = urlsplit(self.path).path
        if client.is_refused:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"too many requests at a time\n")
        elif path == "/healthz":
            self._answer(HTTPStatus.OK, b"ok\n")
        elif path == "/readyz":
            problem = self.server.exporter.problem()
            if problem is None:
                self._answer(HTTPStatus.OK, b"ok\n")
            else:
                log.info("not ready: %s", problem)
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the database cannot be read: see the log\n")
        elif path == "/metrics":
            if self._is_allowed():
                self._answer(HTTPStatus.OK, self.server.exporter.text(), CONTENT_TYPE)
            else:
                self._answer(HTTPStatus.UNAUTHORIZED, b"a token is needed: Authorization: Bearer ...\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"see /metrics, /healthz, /readyz\n")

    do_HEAD = do_GET

    def _is_allowed(self) -> bool:
        if self.server.token is None:
            return True
        given = self.headers.get("Authorization", "").encode("latin-1")  # the bytes that came
        return hmac.compare_digest(given, f"Bearer {self.server.token}".encode())

    def _answer(
        self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "pgque"

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def make_server(
    exporter: Exporter, host: str = "127.0.0.1", port: int = 9187, *, token: str | None = None
) -> ThreadingHTTPServer:
    """Return a listening server of /metrics, /healthz and /readyz. Its `serve_forever` serves until another
    thread calls `shutdown`.

    Args:
        exporter: reads the figures.
        host: address to listen on.
        port: port to listen on; 0 is any free one, which `server_port` of the result names.
        token: bearer token that /metrics requires; None lets everybody in.

    It answers 32 requests at a time; others get 503, and beyond 64 connections it closes them. A client has
    10 seconds to send its request, and a minute to take the answer.

    Raises OSError.
    """
    return _Server(host, port, exporter, token)
