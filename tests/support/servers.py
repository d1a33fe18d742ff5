"""Choose and start the PostgreSQL server that the tests use.

Order: PGQUE_TEST_DSN, Docker, local server binaries, the embedded wheel. PGQUE_TEST_SERVER
(docker, local or embedded) forces one and PGQUE_TEST_BINDIR forces binaries; then failing is an
error, otherwise the next one is tried.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgque import embedded
from support import jit

REPOSITORY = Path(__file__).resolve().parents[2]
SQL_FILE = REPOSITORY / "sql" / "pgque.sql"

# Tests need no durability, except that a killed server must come back: that does not take fsync.
# Autovacuum would clear away dead tuples before they are counted, and have a table when one try to rotate
# must do; the servers of the histories and disasters have it on.
TEST_SETTINGS: Mapping[str, str] = {
    "autovacuum": "off",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "max_wal_size": "1GB",
}


class NoServer(RuntimeError):
    """No server could be had; the text tells what was tried."""


@dataclass(slots=True)
class TestServer:
    """A running server and how to reach it as superuser."""

    __test__ = False

    how: str
    dsn: str
    version: str = ""
    # Set when the server was started from binaries: it can be restarted and killed.
    process: embedded.Server | None = None
    notes: list[str] = field(default_factory=list)
    _stop: Callable[[], object] | None = None

    def dsn_for(self, dbname: str, user: str | None = None, password: str | None = None) -> str:
        """Return a connection string for another database or role."""
        parts = conninfo_to_dict(self.dsn)
        parts["dbname"] = dbname
        if user is not None:
            parts["user"] = user
            parts["password"] = password
        return make_conninfo("", **{k: v for k, v in parts.items() if v is not None})

    def stop(self) -> None:
        """Stop the server if this process started it."""
        if self._stop is not None:
            self._stop()


def choose() -> TestServer:
    """Return a running server, by the order and the variables in this module's description."""
    dsn = os.environ.get("PGQUE_TEST_DSN")
    if dsn:
        return _checked(TestServer("PGQUE_TEST_DSN", dsn))
    bindir = os.environ.get("PGQUE_TEST_BINDIR")
    forced = "bindir" if bindir else os.environ.get("PGQUE_TEST_SERVER") or None
    ways: dict[str, Callable[[], TestServer]] = {
        "docker": _docker,
        "local": lambda: _binaries("local", None),
        "embedded": lambda: _binaries("embedded", None),
        "bindir": lambda: _binaries("PGQUE_TEST_BINDIR", Path(bindir or "")),
    }
    if forced is not None:
        if forced not in ways:
            raise NoServer(f"PGQUE_TEST_SERVER={forced}: use docker, local or embedded")
        return _checked(ways[forced]())
    notes: list[str] = []
    for name in ("docker", "local", "embedded"):
        try:
            server = _checked(ways[name]())
        except Exception as error:
            notes.append(f"no {name}: {_first_line(error)}")
        else:
            server.notes = notes
            return server
    raise NoServer("no PostgreSQL server for the tests: " + "; ".join(notes))


def cron_binaries() -> embedded.Binaries | None:
    """Return server binaries that have pg_cron, or None."""
    for variable in ("PGQUE_TEST_CRON_BINDIR", "PGQUE_TEST_BINDIR"):
        if os.environ.get(variable):
            found = embedded.given(Path(os.environ[variable]))
            return found if found.has_extension("pg_cron") else None
    try:
        found = embedded.find_server("local")
    except embedded.EmbeddedServerError:
        return None
    return found if found.has_extension("pg_cron") else None


def engine_problem() -> str | None:
    """Tell why no container engine can be used, or None when one answers."""
    import docker

    with warnings.catch_warnings():
        # docker's client leaves its socket open when the daemon is not there
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            client = docker.from_env(timeout=10)
            try:
                client.ping()
            finally:
                client.close()
        except Exception as error:
            return _first_line(error)
        finally:
            gc.collect()
    return None


def _binaries(how: str, bindir: Path | None) -> TestServer:
    if bindir is None:
        bindir = embedded.find_server(how).bindir
    preload = [jit.EXTENSION] if embedded.given(bindir).has_extension(jit.EXTENSION) else []
    process = embedded.start(
        bindir, settings={**TEST_SETTINGS, **(jit.SETTINGS if preload else {})}, preload=preload
    )
    return TestServer(f"{how} ({bindir})", process.dsn, process=process, _stop=process.stop)


def _docker() -> TestServer:
    from testcontainers.community.postgres import PostgresContainer

    problem = engine_problem()
    if problem is not None:
        raise NoServer(problem)
    image = os.environ.get("PGQUE_TEST_IMAGE", "postgres:18")
    container = PostgresContainer(image, driver=None).with_command(
        ["postgres", *(word for name, value in TEST_SETTINGS.items() for word in ("-c", f"{name}={value}"))]
    )
    container.start()
    dsn = container.get_connection_url(driver=None)
    return TestServer(f"docker ({image})", dsn, _stop=container.stop)


def _checked(server: TestServer) -> TestServer:
    try:
        with psycopg.connect(server.dsn, autocommit=True, connect_timeout=10) as connection:
            row = connection.execute(
                "select current_setting('server_version'), current_setting('server_version_num')::int,"
                " (select r.rolsuper from pg_catalog.pg_roles as r where r.rolname = current_user)"
            ).fetchone()
            assert row is not None
            server.version = str(row[0]).split(" ")[0]
            if int(row[1]) < 140000:
                raise NoServer(f"PostgreSQL {server.version} is too old: pgque needs 14 or newer")
            if not row[2]:
                raise NoServer("the tests need a superuser: they create databases and roles")
    except BaseException:
        server.stop()
        raise
    return server


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
