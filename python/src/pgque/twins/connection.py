# Generated from client/connection.py by tools/make_sync.py: edit that file and run the script again.
"""Connections of consumers and workers: opened, and opened again after a fault of the database.

`twins/connection.py` is generated from `client/connection.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import psycopg

from ..codec.json import Encoder
from ..codec.payloads import Decoder
from ..errors import PgqueError, from_psycopg, is_permanent, one_line
from ..integrations import telemetry
from ..runtime.stopper import Stopper
from ..client.backoff import first_pause, pauses
from .client import PgqueClient
from ..client.dsn import with_keepalives
from ..client.limit import COMMAND_TIMEOUT, LimitedConnection

# Longest pauses between attempts to reach the database, in seconds; the second after a stop.
_MAX_PAUSE = 15.0
_MAX_PAUSE_AFTER_STOP = 1.0

_DEFAULT_ISOLATION = "select pg_catalog.current_setting('default_transaction_isolation')"
_SET_READ_COMMITTED = "set default_transaction_isolation = 'read committed'"


def open_client(
    dsn: str,
    application_name: str,
    *,
    encoder: Encoder | None = None,
    decoder: Decoder | None = None,
    read_committed: bool = False,
    command_timeout: float | None = COMMAND_TIMEOUT,
) -> PgqueClient:
    """Return a client over a connection of its own that notices a dead network; each call is a
    transaction, at the isolation level of the database or, unless it leads through a pooler, READ COMMITTED,
    which calls of workers need.
    """
    client = PgqueClient.connect(
        with_keepalives(dsn, application_name),
        autocommit=True,
        encoder=encoder,
        decoder=decoder,
        command_timeout=command_timeout,
    )
    if isinstance(client.conn, LimitedConnection):
        client.conn.command_timeout = command_timeout
    if read_committed:
        try:
            _set_read_committed(client)
        except BaseException:
            client.close()
            raise
    return client


def _set_read_committed(client: PgqueClient) -> None:
    if not client._is_direct:
        return  # the setting would stay in a pooler's session
    try:
        cursor = client.conn.execute(_DEFAULT_ISOLATION, prepare=False)
        if cursor.fetchone() != ("read committed",):
            client.conn.execute(_SET_READ_COMMITTED, prepare=False)
    except psycopg.Error as error:
        raise from_psycopg(error) from error


def open_client_before(
    stopper: Stopper, seconds: float, opening: Callable[[], PgqueClient]
) -> PgqueClient:
    """Return the client that `opening` opens; HandlerInterrupted if that takes longer than some seconds after
    a stop."""
    opened: list[PgqueClient] = []
    given_up = False

    def connect() -> None:
        opened.append(opening())
        if given_up:
            opened[0].close()

    try:
        stopper.give_up_after(seconds, connect)
    except BaseException:
        given_up = True
        for client in opened:  # opened in the moment in which it was given up
            client.close()
        raise
    return opened[0]


class Progress:
    """The progress of a session: `made` is True once it has done some work in the database."""

    made = False


def keep_connected(
    stopper: Stopper,
    session: Callable[[Progress], object],
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
            session(progress)
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
                stopper.sleep(pause)
            else:
                stopper.sleep_to_end(min(pause, _MAX_PAUSE_AFTER_STOP))
