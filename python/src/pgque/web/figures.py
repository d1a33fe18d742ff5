"""Addresses for monitoring: figures for Prometheus, and a check that the database can be reached."""

from __future__ import annotations

import hmac
import threading
from typing import TYPE_CHECKING

from psycopg import pq
from psycopg.conninfo import make_conninfo
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..cli.common import is_loopback
from ..client.dsn import with_keepalives
from .config import Config, Database
from .samples import Samples

if TYPE_CHECKING:
    from ..ops.exporter import Exporter

PING_KEPT = 2.0  # seconds for which one check of a server answers all requests
PING_TIMEOUT = 3  # seconds

# Headers that a proxy adds. With one of them, the address is the proxy's, not that of the client.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")


class Figures:
    """The exporters of the databases, each with the rights of its connection string."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._exporters: dict[Database, Exporter] = {}
        self._pings = Samples(PING_KEPT, pause=0)

    def allowed(self, request: Request) -> bool:
        """Return whether a request has the token or, where there is none, comes from this machine itself."""
        token = self._config.metrics_token
        if token:
            given = request.headers.get("authorization", "").encode("latin-1")
            return hmac.compare_digest(given, f"Bearer {token}".encode())
        return (
            request.client is not None
            and is_loopback(request.client.host)
            and is_loopback(request.url.hostname or "")
            and not any(name in request.headers for name in _FORWARDED)
        )

    def text(self, request: Request) -> Response:
        """Return the figures of a database."""
        database = self._chosen(request)
        if database is None:
            return PlainTextResponse("no such database\n", status_code=404)
        try:
            from ..ops.exporter import CONTENT_TYPE, Exporter
        except ImportError:
            return PlainTextResponse(
                "prometheus-client is missing: pip install './python[web]'\n", status_code=501
            )
        with self._lock:
            exporter = self._exporters.setdefault(database, Exporter(database.dsn))
        return Response(exporter.text(), media_type=CONTENT_TYPE)

    def ready(self, request: Request) -> Response:
        """Return whether the server of a database takes connections; nobody has to log in for that."""
        database = self._chosen(request)
        if database is None:
            return PlainTextResponse("no such database\n", status_code=404)
        if self._pings.get(database, "ping", lambda: _answers(database)):
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the database cannot be reached\n", status_code=503)

    def _chosen(self, request: Request) -> Database | None:
        """Return the database that the query string names by its place, the first one by default."""
        number = request.query_params.get("database", "0")
        databases = self._config.databases
        known = number.isascii() and number.isdigit() and len(number) < 5 and int(number) < len(databases)
        return databases[int(number)] if known else None

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for exporter in self._exporters.values():
                exporter.close()
            self._exporters = {}


def _answers(database: Database) -> bool:
    conninfo = make_conninfo(with_keepalives(database.dsn, "pgque web"), connect_timeout=PING_TIMEOUT)
    return pq.PGconn.ping(conninfo.encode()) == pq.Ping.OK
