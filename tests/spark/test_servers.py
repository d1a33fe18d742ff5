"""Several servers as one stream, and as one sink: what is sent arrives once, whichever of them dies."""

from __future__ import annotations

import logging
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgque import embedded
from pgque.errors import PgqueBadArgument, PgqueConnectionError, PgqueError, PgqueSinkEpochError
from pgque.spark.options import BATCH_READ, BATCH_WRITE, STREAM_READ, STREAM_WRITE, parse
from sql.helpers import Connection, forced_tick, receive, rows, value
from support import servers as support

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgque.spark._servers import PgqueServersReader
    from pgque.spark.sink import PgqueWriter

SPARK_CONF = {"spark.master": "local[2,3]"}  # a failed task is run again
PASSWORD = secrets.token_hex(8)


@dataclass
class Farm:
    """Three servers with a database app, and a queue on each."""

    servers: list[embedded.Server]
    queue: str = ""
    target: str = ""
    conns: list[Connection] = field(default_factory=list)

    def name(self, number: int) -> str:
        """Return the name of a server."""
        return f"127.0.0.1:{self.servers[number].port}/app"

    def names(self, *numbers: int) -> str:
        """Return option servers: of all if none is given."""
        return ",".join(self.name(number) for number in numbers or range(len(self.servers)))

    def connect(self, number: int) -> Connection:
        """Open a session of an administrator."""
        return psycopg.connect(self.servers[number].dsn_for("app"), autocommit=True)

    def again(self, number: int) -> None:
        """Start a server that was killed."""
        self.servers[number].restart()
        self.conns[number].close()
        self.conns[number] = self.connect(number)

    def options(self, *numbers: int, **more: str) -> dict[str, str]:
        """Return Spark's options."""
        return {"servers": self.names(*numbers), "user": "spark", "password": PASSWORD, **more}

    def put(self, number: int, *payloads: str) -> None:
        """Send to the queue of a server, and tick."""
        value(
            self.conns[number], "select pgque.send_batch(%s, 'default', %s::text[])", self.queue, list(payloads)
        )
        forced_tick(self.conns[number], self.queue)

    def take(self, number: int) -> Counter[str | None]:
        """Receive all that the target on a server got."""
        forced_tick(self.conns[number], self.target)
        got: Counter[str | None] = Counter()
        while batch := receive(self.conns[number], self.target, "check", 5_000):
            got.update(m.payload for m in batch)
            value(self.conns[number], "select pgque.ack(%s)", batch[0].batch_id)
        return got

    def reader(self, *numbers: int, **more: str) -> PgqueServersReader:
        """Return what Spark makes for a stream."""
        from pyspark.sql.types import _parse_datatype_string  # type: ignore[attr-defined]

        raise NotImplementedError(_parse_datatype_string)


@pytest.fixture(scope="module")
def three() -> Iterator[list[embedded.Server]]:
    """Three servers, each with a database app and the role of the job."""
    settings = {**support.TEST_SETTINGS, "shared_buffers": "32MB", "max_connections": "60"}
    with ExitStack() as stack:
        found = []
        for _ in range(3):
            try:
                server = stack.enter_context(embedded.start(settings=settings))
            except embedded.EmbeddedServerError as error:
                pytest.skip(f"no servers of its own: {error}")
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("create database app")
            with psycopg.connect(server.dsn_for("app"), autocommit=True) as conn:
                conn.execute(support.SQL_FILE.read_bytes())
                conn.execute(f"create role spark login password '{PASSWORD}'".encode())
                conn.execute("grant pgque_reader, pgque_writer to spark")
            found.append(server)
        yield found


@pytest.fixture
def farm(three: list[embedded.Server]) -> Iterator[Farm]:
    """The servers, with a queue and a target of the test's own on each; a consumer check of the target."""
    unique = secrets.token_hex(4)
    found = Farm(three, f"source_{unique}", f"target_{unique}")
    for number, server in enumerate(three):
        if server.pid is None:
            server.restart()
        found.conns.append(found.connect(number))
        for queue in (found.queue, found.target):
            value(found.conns[number], "select pgque.create_queue(%s)", queue)
        value(found.conns[number], "select pgque.subscribe(%s, 'check')", found.target)
    yield found
    for conn in found.conns:
        conn.close()
