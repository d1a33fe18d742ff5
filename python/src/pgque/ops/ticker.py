"""Run the ticker from outside the server, for databases without pg_cron."""

from __future__ import annotations

import getpass
import logging
import os
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ..client.backoff import pauses
from ..client.limit import COMMAND_TIMEOUT, within
from ..errors import PgqueError, from_psycopg, is_permanent, one_line
from ..runtime.stopper import GRACE, HandlerInterrupted, Stopper
from ..twins.connection import open_client, open_client_before

log = logging.getLogger("pgque.ticker")

# Seconds that each call of `ticker_loop` runs, so that a silent network is noticed soon after.
_RUN = 10.0

# A call of `ticker_loop` that ends within this many seconds was stopped: the next one waits for as long.
_MIN_RUN = 1.0

# Longest pause between attempts to reach the database, in seconds.
_MAX_PAUSE = 5.0


_UNIT = """\
# Install: save as /etc/systemd/system/pgque-ticker.service, then systemctl enable --now pgque-ticker
[Unit]
Description=pgque ticker
Wants=network-online.target
After=network-online.target postgresql.service

[Service]
User={user}
Environment={dsn}
# PGHOST, PGDATABASE, PGPASSFILE and the like, if this file is there.
EnvironmentFile=-/etc/pgque/ticker.env
ExecStart={program} ticker --quiet
Restart=always
RestartSec=5
NoNewPrivileges=yes
ProtectSystem=strict

[Install]
WantedBy=multi-user.target
"""


def unit(dsn: str = "") -> str:
    """Return a systemd unit that runs `pgque ticker` on this database: with the running program, as the user
    who runs it, or as postgres for root.

    Raises PgqueError for a password in `dsn`: everybody can read a unit.
    """
    try:
        if conninfo_to_dict(dsn).get("password"):
            raise PgqueError(
                "the connection string has a password, and everybody can read a unit",
                hint="Leave it out, and put it into ~/.pgpass of the user who runs the ticker.",
            )
    except psycopg.ProgrammingError as error:
        raise PgqueError(f"invalid connection string: {error}") from None
    program = Path(sys.argv[0])
    if program.name != "pgque" or not os.access(program, os.X_OK):
        program = Path(shutil.which("pgque") or Path(sys.executable).with_name("pgque"))
    return _UNIT.format(
        user="postgres" if os.geteuid() == 0 else getpass.getuser(),
        dsn=_word(f"PGQUE_DSN={dsn}"),
        program=_word(str(program.absolute()).replace("$", "$$")),
    )


def _word(text: str) -> str:
    """Quote a word of a systemd unit."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{quoted}"'


def run_ticker(
    dsn: str = "",
    stop: threading.Event | None = None,
    *,
    command_timeout: float | None = COMMAND_TIMEOUT,
) -> None:
    """Tick all queues and do all maintenance, until `stop` is set. Calls `pgque.ticker_loop` repeatedly.

    Several tickers at once do no harm. After a fault of the database it connects again, after a growing
    random pause, without limit. So it does if the server does not answer for `command_timeout` seconds;
    None is no limit. Setting `stop` ends the running call within a second.

    Raises a PgqueError if trying again cannot help: PgqueVersionError, PgquePermissionDeniedError.
    """
    stopped = stop or threading.Event()

    growing = pauses(_MAX_PAUSE)
    while not stopped.is_set():
        try:
            _tick(dsn, stopped, command_timeout)
            growing = pauses(_MAX_PAUSE)
        except PgqueError as error:
            if is_permanent(error):
                raise
            pause = next(growing)
            if not stopped.is_set():
                log.warning("cannot tick, next try in %.1f s: %s", pause, one_line(error))
                stopped.wait(pause)


def _tick(dsn: str, stop: threading.Event, command_timeout: float | None) -> None:
    """Run the loop over one connection until `stop`; a fault after the first second ends it without an
    error."""
    began = time.monotonic()
    try:
        stopper = Stopper(stop)
        opening = partial(open_client, dsn, "pgque ticker", command_timeout=command_timeout)
        with open_client_before(stopper, GRACE, opening) as client:
            client.conn.execute("set statement_timeout = 0")
            log.info("ticking, pgque %s", client.monitor.version())
            limit = None if command_timeout is None else _RUN + command_timeout
            with within(client.conn, limit), stopper.stop_deadline(client.conn, GRACE):
                while not stop.is_set():
                    called = time.monotonic()
                    client.conn.execute(f"call pgque.ticker_loop('{_RUN:g} seconds')".encode())
                    if time.monotonic() - called < _MIN_RUN:
                        stop.wait(_MIN_RUN)
    except HandlerInterrupted:
        return
    except (PgqueError, psycopg.Error) as fault:
        if stop.is_set():
            return
        error = fault if isinstance(fault, PgqueError) else from_psycopg(fault)
        if is_permanent(error) or time.monotonic() - began < _MIN_RUN:
            if error is fault:
                raise
            raise error from fault
        log.warning("lost the database, connecting again: %s", one_line(error))
