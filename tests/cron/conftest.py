"""A server of its own with a real pg_cron: these tests kill its backends and restart it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgque import embedded
from support import servers

DATABASE = "pgque_cron"
INSTANCE_QUERY = (
    "select a.pid from pg_catalog.pg_stat_activity as a"
    " where a.datname = current_database() and a.pid <> pg_catalog.pg_backend_pid()"
    " and a.state <> 'idle' and a.query ilike '%%call%%ticker_loop%%'"
)


@dataclass(frozen=True, slots=True)
class CronServer:
    """The server, and how long pg_cron of its version may take."""

    process: embedded.Server
    dsn: str
    mode: str
    pg_cron: str

    @property
    def subminute(self) -> bool:
        """Whether pg_cron knows schedules of seconds (1.5 and newer)."""
        return self.pg_cron not in ("1.4", "1.4-1")

    @property
    def start_seconds(self) -> float:
        """From start() to the first tick: old versions begin jobs at the full minute only."""
        return 5 if self.subminute else 65

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a new autocommit connection to the database of pg_cron and pgque."""
        return psycopg.connect(self.dsn, autocommit=True)

    def loops(self) -> list[int]:
        """Return the backends that run the ticker loop now."""
        with self.connect() as connection:
            return [row[0] for row in connection.execute(INSTANCE_QUERY).fetchall()]


def _start(mode: str) -> CronServer:
    binaries = servers.cron_binaries()
    if binaries is None:
        pytest.skip(
            "no server with pg_cron: install Debian's postgresql-NN-cron, or set PGQUE_TEST_CRON_BINDIR"
        )
    settings = {**servers.TEST_SETTINGS, "cron.database_name": DATABASE, "timezone": "UTC"}
    if mode == "workers":
        settings["cron.use_background_workers"] = "on"
        settings["max_worker_processes"] = "20"
    process = embedded.start(binaries.bindir, preload=["pg_cron"], settings=settings)
    version = binaries.extension_version("pg_cron") or "?"
    return CronServer(process, process.dsn_for(DATABASE), mode, version)


@pytest.fixture(scope="session", params=["libpq", "workers"])
def _cron_process(request: pytest.FixtureRequest) -> Iterator[CronServer]:
    server = _start(request.param)
    try:
        yield server
    finally:
        server.process.stop("immediate")


@pytest.fixture
def cron(_cron_process: CronServer, wait_until: Callable[..., None]) -> Iterator[CronServer]:
    """The server with pg_cron, and a new database with pg_cron and pgque in it; nothing scheduled."""
    server = _cron_process
    if server.process.pid is None:
        server.process.restart()
    with psycopg.connect(server.process.dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(DATABASE)))
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))
    server.process.restart()  # dropping its database ends pg_cron's launcher for good
    with server.connect() as connection:
        connection.execute("create extension pg_cron")
    with psycopg.connect(server.dsn) as install:
        install.execute(servers.SQL_FILE.read_bytes())
    wait_until(lambda: launcher_ready(server), "pg_cron's launcher in the new database", timeout=20)
    yield server


def launcher_ready(server: CronServer) -> bool:
    """Tell whether pg_cron's launcher is connected to the new database."""
    with server.connect() as connection:
        row = connection.execute(
            "select count(*) from pg_catalog.pg_stat_activity as a"
            " where a.backend_type = 'pg_cron launcher' and a.datname = current_database()"
        ).fetchone()
    return row is not None and row[0] == 1
