"""Connections that give up a call which the server does not answer in time.

A proxy, a pooler or a balancer can acknowledge what it is sent and never answer, so TCP keepalives and
`tcp_user_timeout` do not notice. Therefore the time limit belongs to the client, and each connection that
this package opens has it. A caller's own connection is left as it is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection, capabilities, waiting
from psycopg.abc import PQGen
from psycopg.errors import QueryCanceled
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import Row

if TYPE_CHECKING:
    from typing_extensions import LiteralString

RV = TypeVar("RV")

# Seconds without an answer after which a call is given up, where nothing else is asked for.
COMMAND_TIMEOUT = 30.0

# Seconds between checks whether a call has to be given up, as in psycopg.
_INTERVAL = 0.1

# Seconds for the server to take a request to cancel, and then to end the statement.
_CANCEL_TIMEOUT = 0.3

# Seconds that a call has for its answer at least, so that what is reported after a stop can succeed.
_LEAST_TIMEOUT = 1.0


class NoAnswerError(psycopg.OperationalError):
    """Report that the server did not answer a call in time. The connection is closed."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


_HINT = (
    "Either the network is silent, or the statement waits for a lock (see pg_stat_activity). The connection"
    " is closed, and the call may have taken effect. If calls may take longer, set a longer command_timeout,"
    " or None."
)


def check_command_timeout(seconds: float | None) -> None:
    """Raise ValueError for a `command_timeout` that is no length of time."""
    if seconds is not None and not seconds > 0:
        raise ValueError("command_timeout must be more than 0 seconds, or None")


# The limits of the block that runs, `within` and `until`, with the connection that they are for. Another
# thread that shares the connection is not in the block.
_own_timeout: ContextVar[tuple[object, float | None] | None] = ContextVar("own_timeout", default=None)
_deadline: ContextVar[tuple[object, Callable[[], float]] | None] = ContextVar("deadline", default=None)


@contextmanager
def within(conn: object, seconds: float | None) -> Iterator[None]:
    """Limit each call of the block over this connection to some seconds, None is no limit, instead of its
    `command_timeout`."""
    token = _own_timeout.set((conn, seconds))
    try:
        yield
    finally:
        _own_timeout.reset(token)


@contextmanager
def within_by_default(conn: object, seconds: float | None) -> Iterator[None]:
    """Limit each call of the block as `within` does, unless the caller has set another limit around it."""
    found = _own_timeout.get()
    if found is not None and found[0] is conn:
        yield
        return
    with within(conn, seconds):
        yield


@contextmanager
def until(conn: object, deadline: Callable[[], float]) -> Iterator[None]:
    """Give up a call of the block over this connection after a time that `deadline` returns, by the monotonic
    clock. It is asked again while a call waits, and may change its answer: math.inf is no deadline, -math.inf
    ends a call at once. Before any other deadline a call has a second."""
    token = _deadline.set((conn, deadline))
    try:
        yield
    finally:
        _deadline.reset(token)


def _of(var: ContextVar[tuple[object, RV] | None], conn: object, otherwise: RV) -> RV:
    found = var.get()
    return found[1] if found is not None and found[0] is conn else otherwise


def _never() -> float:
    return math.inf


def _is_active(pgconn: PGconn) -> bool:
    """Return whether a call runs. Notifications may be waited for without a limit."""
    return pgconn.transaction_status == TransactionStatus.ACTIVE


def _limited(conn: LimitedConnection[Row] | AsyncLimitedConnection[Row], gen: PQGen[RV]) -> PQGen[RV]:
    """Run what psycopg waits for. Raise NoAnswerError after the time in which nothing came from the server
    and nothing could be sent to it."""
    timeout = _of(_own_timeout, conn, conn.command_timeout)
    deadline = _of(_deadline, conn, _never)
    began = time.monotonic()
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            now = time.monotonic()
            if ready:
                began = now
            elif _is_active(conn.pgconn):
                if timeout is not None and now > began + timeout:
                    raise NoAnswerError(f"the server has not answered for {timeout:g} s", _HINT)
                end = deadline() - _CANCEL_TIMEOUT
                if now > end and (end == -math.inf or now > began + _LEAST_TIMEOUT):
                    raise NoAnswerError("the server did not answer before the end of a stop")
            wanted = gen.send(ready)
    except StopIteration as end_of_gen:
        result: RV = end_of_gen.value
        return result


def _for_a_moment(pgconn: PGconn, gen: PQGen[RV]) -> PQGen[RV]:
    """Go on with what psycopg waits for after an interruption, but only for a moment."""
    end = time.monotonic() + _CANCEL_TIMEOUT
    try:
        wanted = next(gen)
        while time.monotonic() < end:
            wanted = gen.send((yield wanted))
    except StopIteration as end_of_gen:
        result: RV = end_of_gen.value
        return result
    raise NoAnswerError("the server has not answered a request to cancel")


# Has the server end a transaction whose next statement does not come. For those whose statements follow
# one another at once: else the session of a silent network would keep its locks.
END_WHEN_SILENT: LiteralString = (
    "case when pg_catalog.current_setting('idle_in_transaction_session_timeout')::interval"
    " not between '1 ms' and '30 s'"
    " then pg_catalog.set_config('idle_in_transaction_session_timeout', '30s', true) end"
)

# Has the server end a statement whose client has closed its connection, as PostgreSQL can on Linux.
_END_WITH_CLIENT = "set client_connection_check_interval = '5s'"


class LimitedConnection(Connection[Row]):
    """A connection whose calls are given up after `command_timeout` seconds without an answer."""

    command_timeout: float | None = COMMAND_TIMEOUT

    def wait(self, gen: PQGen[RV], interval: float = _INTERVAL, timeout: float | None = None) -> RV:
        """Wait as psycopg does, but never longer than the limit, after an interruption neither."""
        given = {} if timeout is None else {"timeout": timeout}  # which psycopg 3.2 does not know
        try:
            return waiting.wait(_limited(self, gen), self.pgconn.socket, interval=interval, **given)
        except NoAnswerError:
            try:
                self._cancel_for_a_moment()
            finally:
                self.pgconn.finish()
            raise
        except (KeyboardInterrupt, SystemExit):
            if _is_active(self.pgconn):
                try:
                    self._cancel_for_a_moment()
                    waiting.wait(_for_a_moment(self.pgconn, gen), self.pgconn.socket, interval=_INTERVAL)
                except QueryCanceled:
                    pass
                except BaseException:
                    self.pgconn.finish()
            raise

    def end_with_client(self) -> None:
        """Have the server find out that a call was given up, where libpq is too old to cancel it: else each
        call that waits for a lock would leave a session that goes on waiting."""
        if not capabilities.has_cancel_safe():
            with suppress(psycopg.errors.InvalidParameterValue):
                self.execute(_END_WITH_CLIENT, prepare=False)

    def _cancel_for_a_moment(self) -> None:
        # Where libpq is older than 17, PQcancel would block this thread, and all others with it.
        if capabilities.has_cancel_safe():
            with suppress(psycopg.Error):
                self.cancel_safe(timeout=_CANCEL_TIMEOUT)


class AsyncLimitedConnection(AsyncConnection[Row]):
    """A connection whose calls are given up after `command_timeout` seconds without an answer."""

    command_timeout: float | None = COMMAND_TIMEOUT

    async def wait(self, gen: PQGen[RV], interval: float = _INTERVAL, timeout: float | None = None) -> RV:
        """Wait as psycopg does, but never longer than the limit, after a cancellation neither."""
        given = {} if timeout is None else {"timeout": timeout}  # which psycopg 3.2 does not know
        try:
            return await waiting.wait_async(
                _limited(self, gen), self.pgconn.socket, interval=interval, **given
            )
        except NoAnswerError:
            try:
                await self._cancel_for_a_moment()
            finally:
                self.pgconn.finish()
            raise
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            if _is_active(self.pgconn):
                try:
                    await self._cancel_for_a_moment()
                    await waiting.wait_async(
                        _for_a_moment(self.pgconn, gen), self.pgconn.socket, interval=_INTERVAL
                    )
                except QueryCanceled:
                    pass
                except BaseException:
                    self.pgconn.finish()
            raise

    async def end_with_client(self) -> None:
        """Have the server find out that a call was given up, as `LimitedConnection.end_with_client`."""
        if not capabilities.has_cancel_safe():
            with suppress(psycopg.errors.InvalidParameterValue):
                await self.execute(_END_WITH_CLIENT, prepare=False)

    async def _cancel_for_a_moment(self) -> None:
        # Where libpq is older than 17, PQcancel would block the event loop, and all threads with it.
        if capabilities.has_cancel_safe():
            with suppress(psycopg.Error):
                await self.cancel_safe(timeout=_CANCEL_TIMEOUT)
