"""How what the server answers becomes Python values. Shared by the sync and the async client."""

from __future__ import annotations

from typing import TypeVar

from psycopg import AsyncClientCursor, AsyncCursor, ClientCursor, Cursor
from psycopg.pq import Format

C = TypeVar("C", bound=Cursor[object] | AsyncCursor[object])


def reading(cursor: C) -> C:
    """Have a cursor read binary values, which are the same under every DateStyle and IntervalStyle.

    What reads text refuses times of a style that it cannot tell apart. Cursors that put parameters into the
    statement themselves can only read text.
    """
    if not isinstance(cursor, (ClientCursor, AsyncClientCursor)):
        cursor.format = Format.BINARY
    return cursor
