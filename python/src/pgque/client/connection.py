"""Connections of consumers and workers: opened, and opened again after a fault of the database.

`twins/connection.py` is generated from `client/connection.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from ..codec.json import Encoder
from ..codec.payloads import Decoder
from ..errors import PgqueError, from_psycopg, is_permanent, one_line
from ..integrations import telemetry
from ..runtime.stopper import AsyncStopper
from .backoff import first_pause, pauses
from .client import AsyncPgqueClient
from .direct import Session
from .dsn import SERVER_KEEPALIVES, with_keepalives
from .limit import COMMAND_TIMEOUT, AsyncLimitedConnection

if TYPE_CHECKING:
    from typing_extensions import LiteralString

log = logging.getLogger("pgque.connection")

# Longest pauses between attempts to reach the database, in seconds; the second after a stop.
_MAX_PAUSE = 15.0
_MAX_PAUSE_AFTER_STOP = 1.0

_SESSION: LiteralString = (
    "select a.pid, extract(epoch from a.backend_start)::text"
    " from pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) as a"
)
_DEFAULT_ISOLATION: LiteralString = "select pg_catalog.current_setting('default_transaction_isolation')"
_SET_READ_COMMITTED = "set default_transaction_isolation = 'read committed'"

_END_SESSIONS = (
    "select pg_catalog.pg_terminate_backend(s.pid)"
    " from unnest(%s::int[], %s::text[]) as s (pid, start),"
    " pg_catalog.pg_stat_get_activity(s.pid) as a"
    " where extract(epoch from a.backend_start)::text = s.start and a.xact_start is not null"
)


async def open_client(
    dsn: str,
    application_name: str,
    *,
    encoder: Encoder | None = None,
    decoder: Decoder | None = None,
    read_committed: bool = False,
    command_timeout: float | None = COMMAND_TIMEOUT,
    sessions: set[Session] | None = None,
) -> AsyncPgqueClient:
    """Return a client over a connection of its own that notices a dead network; each call is a
    transaction, at the isolation level of the database or, unless it leads through a pooler, READ COMMITTED,
    which calls of workers need.

    `sessions` are those of earlier connections, closed on this side: what the server still has of them in a
    transaction ends here, and the set becomes that of the new connection. If the network became
    silent between the statements of a transaction, the server would keep its locks, for which the new
    connection would wait without end.
    """
    client = await AsyncPgqueClient.connect(
        with_keepalives(dsn, application_name),
        autocommit=True,
        encoder=encoder,
        decoder=decoder,
        command_timeout=command_timeout,
    )
    if isinstance(client.conn, AsyncLimitedConnection):
        client.conn.command_timeout = command_timeout
    try:
        client._session = await _session_of(client)
        if client._is_direct:  # else the settings would stay in a pooler's session
            await _set_up(client, read_committed)
        if sessions is not None:
            await _end_sessions(client, sessions)
    except psycopg.Error as error:
        await client.close()
        raise from_psycopg(error) from error
    except BaseException:
        await client.close()
        raise
    return client


async def _set_up(client: AsyncPgqueClient, read_committed: bool) -> None:
    await client.conn.execute(SERVER_KEEPALIVES, prepare=False)
    if read_committed and await _one(client, _DEFAULT_ISOLATION) != ("read committed",):
        await client.conn.execute(_SET_READ_COMMITTED, prepare=False)


async def _session_of(client: AsyncPgqueClient) -> Session | None:
    """Return the session that a connection leads to; None for a pooler's, which gives its clients numbers of
    its own, and where the role may not know."""
    try:
        pid, start = await _one(client, _SESSION)
        if pid != client.conn.info.backend_pid:
            return None
        if start is None:
            async with _own_role(client):
                _, start = await _one(client, _SESSION)
    except psycopg.errors.InsufficientPrivilege:
        return None
    return pid, start


async def _one(client: AsyncPgqueClient, query: LiteralString) -> Any:
    cursor = await client.conn.execute(query, prepare=False)
    return await cursor.fetchone()


@asynccontextmanager
async def _own_role(client: AsyncPgqueClient) -> AsyncIterator[None]:
    """Run the block in a transaction as the role that logged in. A role that was set since may see nothing of
    its sessions."""
    async with client.conn.transaction():
        await client.conn.execute("set local role none", prepare=False)
        yield


async def _end_sessions(client: AsyncPgqueClient, sessions: set[Session]) -> None:
    ended = list(sessions)  # a handler may add another meanwhile
    if ended:
        pids, starts = zip(*ended, strict=True)
        try:
            async with _own_role(client):
                await client.conn.execute(_END_SESSIONS, [list(pids), list(starts)], prepare=False)
            sessions.difference_update(ended)
        except psycopg.Error as error:  # a server can be set up so that no role may end its own sessions
            log.warning("sessions %s may be left with their locks: %s", pids, one_line(from_psycopg(error)))
    if client._session is not None:
        sessions.add(client._session)


async def open_client_before(
    stopper: AsyncStopper, seconds: float, opening: Callable[[], Awaitable[AsyncPgqueClient]]
) -> AsyncPgqueClient:
    """Return the client that `opening` opens; HandlerInterrupted if that takes longer than some seconds after
    a stop."""
    opened: list[AsyncPgqueClient] = []
    given_up = False

    async def connect() -> None:
        opened.append(await opening())
        if given_up:
            await opened[0].close()

    try:
        await stopper.give_up_after(seconds, connect)
    except BaseException:
        given_up = True
        for client in opened:  # opened in the moment in which it was given up
            await client.close()
        raise
    return opened[0]


class Progress:
    """The progress of a session: `made` is True once it has done some work in the database."""

    made = False


async def keep_connected(
    stopper: AsyncStopper,
    session: Callable[[Progress], Awaitable[object]],
    *,
    queue: str,
    consumer: str,
    log: logging.Logger,
    is_done: Callable[[], bool] | None = None,
) -> None:
    """Run `session`, which works over one connection, again and again until it `is_done`, by default until a
    stop.

    After a fault of the database there is a random pause, which grows until a session makes progress.
    Raises a PgqueError where trying again cannot help.
    """
    done = is_done or stopper.is_set
    growing = pauses(_MAX_PAUSE)
    while not done():
        progress = Progress()
        try:
            await session(progress)
            growing = pauses(_MAX_PAUSE)
        except (PgqueError, psycopg.Error) as fault:
            error = fault if isinstance(fault, PgqueError) else from_psycopg(fault, queue)
            if is_permanent(error):
                if error is fault:
                    raise
                raise error from fault
            if done():
                log.warning("stopped without the database: %s", one_line(error))
                return
            if progress.made:
                growing = pauses(_MAX_PAUSE)
                log.warning("lost the database, connecting again: %s", one_line(error))
                pause = first_pause()
            else:
                pause = next(growing)
                log.warning("failed, next try in %.1f s: %s", pause, one_line(error))
            telemetry.note_reconnect(queue, consumer)
            if not stopper.is_set():
                await stopper.sleep(pause)
            else:
                await stopper.sleep_to_end(min(pause, _MAX_PAUSE_AFTER_STOP))
