"""Fixtures of the tests of workers and consumers."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgque


@pytest.fixture
def client(conn: psycopg.Connection[tuple[Any, ...]]) -> pgque.PgqueClient:
    return pgque.PgqueClient(conn)


@pytest.fixture
def pool(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c, whose messages are tried once."""
    client.subscribe(queue, "c")
    client.admin.set_queue_config(queue, "max_retries", 0)
    return queue
