"""Connections of consumers and workers: opened, and opened again after a fault of the database.

`twins/connection.py` is generated from `client/connection.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psycopg

from ..codec.json import Encoder
from ..codec.payloads import Decoder
from ..errors import PgqueError, from_psycopg, is_permanent, one_line
from ..integrations import telemetry
from ..runtime.stopper import AsyncStopper
from .backoff import first_pause, pauses
from .client import AsyncPgqueClient
from .dsn import SERVER_KEEPALIVES, with_keepalives
from .limit import COMMAND_TIMEOUT, AsyncLimitedConnection

# Longest pauses between attempts to reach the database, in seconds; the second after a stop.
_MAX_PAUSE = 15.0
_MAX_PAUSE_AFTER_STOP = 1.0

_PREPARE_SESSION = f"select pg_catalog.current_setting('default_transaction_isolation'), {SERVER_KEEPALIVES}"
_SET_READ_COMMITTED = "set default_transaction_isolation = 'read committed'"

# Behind a pooler no session has the number that the pooler gave its client.
_END_SESSIONS = (
    "select pg_catalog.pg_terminate_backend(a.pid) from pg_catalog.pg_stat_activity as a"
    " where a.pid = any(%s) and a.usename = session_user and a.xact_start is not null"
    " and a.application_name = pg_catalog.current_setting('application_name')"
)


async def open_client(
    dsn: str,
    application_name: str,
    *,
    encoder: Encoder | None = None,
    decoder: Decoder | None = None,
    read_committed: bool = False,
    command_timeout: float | None = COMMAND_TIMEOUT,
    sessions: set[int] | None = None,
) -> AsyncPgqueClient:
    """Return a client over a connection of its own that notices a dead network; each call is a
    transaction, at the isolation level of the database or, unless it leads through a pooler, READ COMMITTED,
    which calls of workers need.

    `sessions` are those of earlier connections of this name, closed on this side: what the server still has
    of them in a transaction ends here, and the set becomes that of the new connection. If the network became
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
        await _prepare_session(client, read_committed)
        if sessions is not None:
            await _end_sessions(client, sessions)
    except BaseException:
        await client.close()
        raise
    return client


async def _prepare_session(client: AsyncPgqueClient, read_committed: bool) -> None:
    if not client._is_direct:
        return  # the settings would stay in a pooler's session
    try:
        cursor = await client.conn.execute(_PREPARE_SESSION, prepare=False)
        row = await cursor.fetchone()
        if read_committed and row is not None and row[0] != "read committed":
            await client.conn.execute(_SET_READ_COMMITTED, prepare=False)
    except psycopg.Error as error:
        raise from_psycopg(error) from error


async def _end_sessions(client: AsyncPgqueClient, sessions: set[int]) -> None:
    ended = list(sessions)  # a handler may add another meanwhile
    if ended:
        with suppress(psycopg.Error):  # a server can be set up so that no role may end its own sessions
            await client.conn.execute(_END_SESSIONS, [ended], prepare=False)
            sessions.difference_update(ended)
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
