# Generated from client/calling.py by tools/make_sync.py: edit that file and run the script again.
"""How a client calls: each call checks the version once, has a limit of time, and raises errors of pgque."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import Connection
from psycopg.rows import args_row, tuple_row

from .._version import __version__
from ..codec import encode
from ..codec.decode import reading
from ..codec.encode import MessageOrId
from ..codec.json import Encoder
from ..errors import PgqueError, from_encoding, from_psycopg, prepare_threshold
from ..types import Outcome
from ..client import statements
from ..client.direct import is_direct
from ..client.limit import within, within_by_default

T = TypeVar("T")

NONE: Mapping[str, object] = {}

# Connections whose pgque version was found good, so that each is asked once; and whether each is known to be
# direct, with no pooler between.
_checked: WeakKeyDictionary[Connection[object], bool] = WeakKeyDictionary()


class Calling:
    """The calls of one connection, which the client and its groups share."""

    _conn: Connection[object]
    _owned: bool
    _command_timeout: float | None
    _encoder: Encoder | None

    def _ensure_version(self) -> None:
        if self._conn in _checked:
            return
        idle = self._conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        try:
            with self._limited():
                try:
                    self._find_version()
                finally:
                    if idle and not self._conn.closed and not self._conn.autocommit:
                        self._conn.rollback()  # nothing but the two look-ups was in it
        except psycopg.Error as error:
            raise from_psycopg(error) from error

    def _find_version(self) -> None:
        """Check that the versions fit, and note whether the connection is direct."""
        found: str | None = None
        with self._conn.cursor(row_factory=tuple_row) as cur:
            cur.execute(encode.FIND_VERSION, prepare=False)
            callable_row = cur.fetchone()
            if callable_row is not None and callable_row[0]:
                cur.execute("select pgque.version()", prepare=False)
                version_row = cur.fetchone()
                found = version_row[0] if version_row else None
        # A role without the right to call version() gets the error from its first real call.
        if callable_row is None or callable_row[0]:
            encode.check_version(found, __version__)
        _checked[self._conn] = callable_row is not None and is_direct(self._conn, *callable_row[1:])

    def _report(
        self,
        function: str,
        batch_id: int,
        msgs: Sequence[MessageOrId] | None,
        options: Mapping[str, tuple[str, object]] | None = None,
    ) -> list[Outcome]:
        call, params = statements.outcomes(function, batch_id, msgs, options)
        return self._rows(f"select {statements.OUTCOME} from {call} as o", params, Outcome)

    def _unlimited(self) -> AbstractContextManager[None]:
        """Return a block whose calls may take any time, as their work grows with the queue."""
        return within(self._conn, None)

    def _limited(self) -> AbstractContextManager[None]:
        """Return a block whose calls may take `command_timeout`, unless it is in one that is unlimited."""
        return within_by_default(self._conn, self._command_timeout)

    def _rows(self, sql: str, params: Mapping[str, object], make: Callable[..., T]) -> list[T]:
        """Run one statement and return each row as a `make`, with the columns as its arguments."""
        self._ensure_version()
        try:
            with reading(self._conn.cursor(row_factory=args_row(make))) as cur:
                with self._limited():
                    cur.execute(sql, params, prepare=self._prepare())
                return cur.fetchall()
        except (psycopg.Error, UnicodeEncodeError) as error:
            raise self._error(error, params) from error

    def _row(self, sql: str, params: Mapping[str, object], make: type[T]) -> T:
        rows = self._rows(sql, params, make)
        if not rows:
            raise PgqueError("the server answered with no row")
        return rows[0]

    def _maybe(self, kind: type[T], sql: str, params: Mapping[str, object] = NONE) -> T | None:
        row = self._run(sql, params)
        value = row[0] if row else None
        if value is not None and not isinstance(value, kind):
            raise PgqueError(f"the server answered {value!r} where {kind.__name__} was expected")
        return value

    def _value(self, kind: type[T], sql: str, params: Mapping[str, object] = NONE) -> T:
        value = self._maybe(kind, sql, params)
        if value is None:
            raise PgqueError("the server answered NULL where a value was expected")
        return value

    def _run(self, sql: str, params: Mapping[str, object] = NONE) -> tuple[object, ...] | None:
        """Run one statement and return its first row."""
        self._ensure_version()
        try:
            with reading(self._conn.cursor(row_factory=tuple_row)) as cur:
                with self._limited():
                    cur.execute(sql, params, prepare=self._prepare())
                return cur.fetchone()
        except (psycopg.Error, UnicodeEncodeError) as error:
            raise self._error(error, params) from error

    @property
    def _is_direct(self) -> bool:
        """Return whether the connection is known to lead directly to the server."""
        return _checked.get(self._conn, False)

    def _prepare(self) -> bool | None:
        """Return whether psycopg prepares a statement: as the connection is set, where it is direct; else
        never, because behind a pooler the name of a prepared statement can be that of another client's."""
        return None if self._is_direct and prepare_threshold() is not None else False

    def _error(self, error: psycopg.Error | UnicodeEncodeError, params: Mapping[str, object]) -> PgqueError:
        queue = params.get("queue")
        name = queue if isinstance(queue, str) else None
        if isinstance(error, UnicodeEncodeError):
            return from_encoding(error, name)
        translated = from_psycopg(error, name)
        if self._owned and prepare_threshold() is None:
            self._conn.prepare_threshold = None
        return translated


class Group:
    """Methods of a client that belong together."""

    def __init__(self, client: Calling) -> None:
        self._client = client
