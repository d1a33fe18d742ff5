"""The SQL of migrations, for Alembic and Django: scripts with their values in them, so that they can also be
printed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from psycopg import sql

from ..codec import encode
from ..types import Setting

UNINSTALL = "select pgque.uninstall();"


def create_queue(queue: str, config: Mapping[str, Setting] | None = None) -> str:
    """Return the statement that creates a queue."""
    return _call("create_queue", queue, None if config is None else encode.config_json(config))


def drop_queue(queue: str, force: bool = False) -> str:
    """Return the statement that drops a queue."""
    return _call("drop_queue", queue, force)


def subscribe(
    queue: str,
    consumer: str,
    start_at: str | int | datetime | None = None,
    keyed_order: bool = False,
    key_concurrency: int | None = None,
) -> str:
    """Return the statement that subscribes a consumer."""
    start = "latest" if start_at is None else encode.start_text(start_at)
    limit = [] if key_concurrency is None else [key_concurrency]
    return _call("subscribe", queue, consumer, start, keyed_order, *limit)


def unsubscribe(queue: str, consumer: str) -> str:
    """Return the statement that removes a consumer."""
    return _call("unsubscribe", queue, consumer)


def _call(function: str, *arguments: object) -> str:
    values = sql.SQL(", ").join(map(sql.Literal, arguments))
    return sql.SQL("select pgque.{}({});").format(sql.SQL(function), values).as_string()
