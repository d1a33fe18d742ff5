"""Options of the web page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ..client.dsn import given_or_default
from ..errors import PgqueBadArgumentError


@dataclass(frozen=True, slots=True)
class Database:
    """A database that the page lets people log in to."""

    label: str
    dsn: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Config:
    """The options of the page. Lengths of time are seconds, sizes are bytes."""

    databases: tuple[Database, ...]
    path_prefix: str = ""
    read_only: bool = False
    hide_payloads: bool = False
    metrics_token: str = field(default="", repr=False)
    session_idle: int = 30 * 60
    session_length: int = 12 * 60 * 60
    statement_timeout: int = 10
    figures_timeout: int = 30  # of each query for the first page, while nobody waits
    change_timeout: int = 60  # a purge may wait for locks
    sample_period: int = 10  # all viewers share figures that are not older
    most_sessions: int = 100
    max_connections: int | None = None  # to each database; by default a share of what its server has
    most_bytes: int = 2 * 1024 * 1024  # of a request

    def __post_init__(self) -> None:
        prefix = self.path_prefix
        if prefix and (not prefix.startswith("/") or prefix.endswith("/") or "//" in prefix):
            raise PgqueBadArgumentError(f"not a path prefix: {prefix!r}", hint="Write it as in /pgque.")
        if self.max_connections is not None and self.max_connections < 2:
            raise PgqueBadArgumentError("max_connections must be at least 2")


def databases(dsns: Sequence[str]) -> tuple[Database, ...]:
    """Return the databases of connection strings, each with a label that has no secret in it.

    Raises PgqueBadArgumentError for a text that is no connection string, or names no database.
    """
    found: list[Database] = []
    for dsn in map(given_or_default, dsns):
        try:
            parts = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError as error:
            raise PgqueBadArgumentError(f"not a connection string: {error}") from error
        name = parts.get("dbname") or os.environ.get("PGDATABASE")
        service = parts.get("service") or os.environ.get("PGSERVICE")
        if not name and not service:
            raise PgqueBadArgumentError(
                "the connection string names no database",
                hint="Name it, as in --dsn 'host=localhost dbname=shop'.",
            )
        host = parts.get("host") or os.environ.get("PGHOST") or ("" if service else "localhost")
        port = parts.get("port") or os.environ.get("PGPORT")
        label = f"{name or service}{f' on {host}' if host else ''}{f':{port}' if port else ''}"
        if any(other.label == label for other in found):
            label = f"{label} ({len(found) + 1})"
        found.append(Database(label, dsn))
    if not found:
        raise PgqueBadArgumentError("no database", hint="Name it, as in --dsn 'host=localhost dbname=shop'.")
    return tuple(found)
