"""How what the server answers becomes Python values. Shared by the sync and the async client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TypeVar

from psycopg import AsyncClientCursor, AsyncCursor, ClientCursor, Cursor
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format

from ..errors import PgquePayloadError

C = TypeVar("C", bound=Cursor[object] | AsyncCursor[object])


def parse_json(text: str | bytes) -> object:
    """Return the value of a JSON text; a whole number of more digits than Python's int takes is a Decimal.

    Raises ValueError when it is not JSON, and PgquePayloadError, which is one, when it is nested deeper than
    Python's recursion limit lets it be.
    """
    try:
        try:
            value: object = json.loads(text)
        except json.JSONDecodeError:
            raise
        except ValueError:
            value = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise PgquePayloadError("JSON that is nested too deeply for Python") from None
    return value


def _whole(digits: str) -> int | Decimal:
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


class Unreadable(Mapping[str, object]):
    """Stand for headers that are no Python value: reading them raises ValueError.

    So only the message that Python cannot read fails, and not the batch that it came in.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self) -> ValueError:
        return ValueError(f"these headers cannot be read: {self._reason}")

    def __getitem__(self, name: str) -> object:
        raise self._refuse()

    def __iter__(self) -> Iterator[str]:
        raise self._refuse()

    def __len__(self) -> int:
        raise self._refuse()

    def __repr__(self) -> str:
        return f"<headers that cannot be read: {self._reason}>"


class _HeadersLoader(Loader):
    def load(self, data: Buffer) -> object:
        encoding = self.connection.info.encoding if self.connection else "utf-8"
        try:
            return parse_json(bytes(data).decode("utf-8" if encoding == "ascii" else encoding))
        except ValueError as error:
            return Unreadable(str(error))


class _HeadersBinaryLoader(_HeadersLoader):
    format = Format.BINARY

    def load(self, data: Buffer) -> object:
        return super().load(data[1:])  # behind the version of the format


def reading(cursor: C) -> C:
    """Have a cursor read binary values, which are the same under every DateStyle and IntervalStyle, and JSON
    of any kind.

    A cursor that reads text refuses times of a style that is not clear. Cursors that put parameters into the
    statement themselves can only read text.
    """
    if isinstance(cursor, (ClientCursor, AsyncClientCursor)):
        cursor.adapters.register_loader("jsonb", _HeadersLoader)
    else:
        cursor.format = Format.BINARY
        cursor.adapters.register_loader("jsonb", _HeadersBinaryLoader)
    return cursor
