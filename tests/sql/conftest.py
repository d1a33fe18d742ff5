"""Fixtures of the SQL tests besides the common ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from sql.helpers import Connection, subscribe, value


@pytest.fixture
def subscribed(conn: Connection, queue: str) -> str:
    """A queue with a consumer c."""
    subscribe(conn, queue)
    return queue


@pytest.fixture
def own(own_dsn: str) -> Iterator[Connection]:
    """An autocommit connection to a database of the test's own, with pgque."""
    with psycopg.connect(own_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def pool(own: Connection) -> Connection:
    """A database of its own with a queue q and its consumer c."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    return own


@pytest.fixture
def transaction(connect: Callable[..., Connection]) -> Callable[..., Connection]:
    """transaction("repeatable read", dsn=None) opens a transaction whose snapshot is taken now."""

    def do(isolation: str = "read committed", dsn: str | None = None) -> Connection:
        connection = connect(dsn)
        connection.execute(f"begin isolation level {isolation}".encode())
        connection.execute("select 1")
        return connection

    return do
