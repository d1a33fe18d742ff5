"""PgBouncer in transaction mode before the test server: two sessions."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from support import processes

USER, PASSWORD = "somebody", "their password"


@contextmanager
def through(dsn: str, *, follows: bool = True) -> Iterator[str]:
    """Run PgBouncer before a database, and return a connection string through it.

    PGQUE_TEST_PGBOUNCER names another program than the one that is installed. A PgBouncer since 1.21 follows
    prepared statements; with follows=False it is set not to, as 1.18 cannot.
    """
    program = os.environ.get("PGQUE_TEST_PGBOUNCER") or shutil.which(
        "pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin"
    )
    if program is None:
        pytest.skip("no pgbouncer: apt-get install pgbouncer")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with processes.own_folder(0o777) as folder:
        file = folder / "pgbouncer.ini"
        file.write_text(_settings(program, dsn, folder, port, follows))
        users = folder / "users.txt"
        users.write_text(f'"{USER}" "{PASSWORD}"\n')
        for each in (file, users):
            each.chmod(0o644)
        process = subprocess.Popen([program, "-q", str(file)], cwd=folder, **_account(dsn))
        try:
            name = conninfo_to_dict(dsn)["dbname"]
            pooled = f"host=127.0.0.1 port={port} dbname={name} user={USER} password='{PASSWORD}'"
            _wait(process, pooled, folder)
            yield pooled
        finally:
            process.terminate()
            process.wait(20)


def version(program: str) -> tuple[int, int]:
    """Return the version of a PgBouncer."""
    found = re.search(
        r"(\d+)\.(\d+)", subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
    )
    assert found is not None
    return int(found[1]), int(found[2])


def _settings(program: str, dsn: str, folder: Path, port: int, follows: bool) -> str:
    parts = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
    if "user" not in parts:
        parts["user"] = pwd.getpwuid(os.geteuid()).pw_name
    target = " ".join(f"{name}='{value}'" for name, value in parts.items() if name != "dbname")
    prepared = "" if follows or version(program) < (1, 21) else "max_prepared_statements = 0"
    return f"""
[databases]
{parts["dbname"]} = {target} dbname='{parts["dbname"]}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = md5
auth_file = {folder}/users.txt
pool_mode = transaction
default_pool_size = 2
server_round_robin = 1
ignore_startup_parameters = extra_float_digits
pidfile = {folder}/pgbouncer.pid
logfile = {folder}/pgbouncer.log
{prepared}
"""


def _account(dsn: str) -> dict[str, Any]:
    """Return whom PgBouncer runs as, since root is refused: the owner of the server's sockets, or nobody."""
    if os.geteuid() != 0:
        return {}
    host = str(conninfo_to_dict(dsn).get("host", ""))
    owner = Path(host).stat().st_uid if host.startswith("/") else 0
    account = pwd.getpwuid(owner) if owner else pwd.getpwnam("nobody")
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _wait(process: subprocess.Popen[bytes], dsn: str, folder: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            psycopg.connect(dsn, prepare_threshold=None, connect_timeout=5).close()
            return
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                log = folder / "pgbouncer.log"
                raise AssertionError(log.read_text() if log.exists() else str(error)) from error
            time.sleep(0.02)


class Sessions:
    """The two sessions of the pooler, of which an open transaction keeps one away from everybody else."""

    def __init__(self, pooled: str, stack: ExitStack) -> None:
        self._pins = [
            stack.enter_context(psycopg.connect(pooled, prepare_threshold=None, autocommit=False))
            for _ in range(2)
        ]
        self._pooled = pooled

    def both(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement in both, which have to be free, and return the rows of both."""
        rows: list[tuple[Any, ...]] = []
        for pin in self._pins:  # both transactions are open at once
            cursor = pin.execute(statement.encode())
            rows += cursor.fetchall() if cursor.description else []
        for pin in self._pins:
            pin.commit()
        return rows

    def prepared(self) -> list[str]:
        """Return the statements that are prepared in them."""
        return [
            str(row[0]) for row in self.both("select statement from pg_prepared_statements where name <> ''")
        ]

    @contextmanager
    def in_turn(self) -> Iterator[Sessions]:
        """Let others use one session at a time, the first one now; `turn` has them use the other."""
        for pin in self._pins:
            pin.execute("select 1")
        self._free = 0
        self._pins[0].rollback()
        try:
            yield self
        finally:
            for pin in self._pins:
                pin.rollback()

    def turn(self) -> None:
        """Let others use the other session from now on."""
        self._pins[self._free].execute("select 1")
        self._free = 1 - self._free
        self._pins[self._free].rollback()


@contextmanager
def sessions(pooled: str) -> Iterator[Sessions]:
    """Give the sessions of a pooler, without what was prepared in them."""
    with ExitStack() as stack:
        found = Sessions(pooled, stack)
        found.both("deallocate all")
        pids = {row[0] for row in found.both("select pg_backend_pid()")}
        assert len(pids) == 2, "the pooler has two sessions"
        yield found
