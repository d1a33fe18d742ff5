"""The functions of the module behind PgBouncer in transaction mode, where each transaction may get another session."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import pgque
from pgque.ticker import run_ticker
from support import processes
from support.connections import DRIVERS, KINDS

pytestmark = pytest.mark.pgbouncer

Tick = Callable[[str], int | None]
# A connection of asyncpg that prepares statements is none for such a pooler; that of a pool here does not.
KINDS_TRIED = [*(name for name in DRIVERS if not name.startswith("asyncpg")), "asyncpg of a pool"]


def _program() -> str:
    path = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        pytest.skip("no pgbouncer: apt-get install pgbouncer")
    return path


def _settings(program: str, dsn: str, folder: Path, port: int) -> str:
    parts = {name: value for name, value in conninfo_to_dict(dsn).items() if value is not None}
    target = " ".join(f"{name}='{value}'" for name, value in parts.items() if name != "dbname")
    found = re.search(
        r"(\d+)\.(\d+)", subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
    )
    assert found is not None
    follows = "max_prepared_statements = 0" if (int(found[1]), int(found[2])) >= (1, 21) else ""
    return f"""
[databases]
{parts["dbname"]} = {target} dbname='{parts["dbname"]}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
server_round_robin = 1
ignore_startup_parameters = extra_float_digits
pidfile = {folder}/pgbouncer.pid
logfile = {folder}/pgbouncer.log
{follows}
"""


def _account(dsn: str) -> dict[str, Any]:
    """Return whom PgBouncer runs as, since root is refused: the owner of the server's sockets, or nobody."""
    if os.geteuid() != 0:
        return {}
    host = str(conninfo_to_dict(dsn).get("host", ""))
    owner = Path(host).stat().st_uid if host.startswith("/") else 0
    account = pwd.getpwuid(owner) if owner else pwd.getpwnam("nobody")
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


@pytest.fixture(scope="module")
def bouncer(dsn: str) -> Iterator[str]:
    """Connection string through a PgBouncer with two sessions that take turns."""
    program = _program()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with processes.own_folder(0o777) as folder:
        file = folder / "pgbouncer.ini"
        file.write_text(_settings(program, dsn, folder, port))
        file.chmod(0o644)
        process = subprocess.Popen([program, "-q", str(file)], cwd=folder, **_account(dsn))
        try:
            name = conninfo_to_dict(dsn)["dbname"]
            through = f"host=127.0.0.1 port={port} dbname={name} user=somebody"
            _wait(process, through, folder)
            yield through
        finally:
            process.terminate()
            process.wait(20)


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


@pytest.mark.parametrize("name", KINDS_TRIED)
def test_sessions_change_between_transactions_and_none_keeps_a_statement(
    name: str, bouncer: str, dsn: str, queue: str, tick: Tick
) -> None:
    sessions: set[int] = set()
    ids: list[int] = []
    with (
        pgque.connect(dsn, autocommit=True) as client,
        psycopg.connect(bouncer, prepare_threshold=None) as other,
    ):
        client.subscribe(queue, "c")
        other.execute("select 1")  # has one session, so that the pooler needs a second one
        with KINDS[name](bouncer) as opened:
            opened.execute("select 1")
            opened.rollback()
            other.rollback()
            for number in range(8):  # more than psycopg runs before it prepares
                ids.append(opened.send(queue, {"n": number}, headers={"n": number}))
                ids.extend(opened.send_batch(queue, [b"x", b"y"], ttls=[60, None]))
                [[pid, left]] = opened.execute(
                    "select pg_backend_pid(), (select count(*) from pg_prepared_statements where name <> '')"
                )
                sessions.add(pid)
                assert left == 0
                opened.commit()
            tick(queue)
            while batch := opened.receive(queue, "c", 5):
                assert opened.ack(batch[0].batch_id) == 1
                assert [m.msg_id for m in batch] == ids[: len(batch)]
                ids = ids[len(batch) :]
                opened.commit()
            opened.rollback()
    assert len(sessions) == 2
    assert ids == []


def test_a_consumer_a_worker_and_the_ticker_work_through_the_pooler(
    bouncer: str, dsn: str, queue: str
) -> None:
    """The session of a statement changes, and psycopg prepares what a loop repeats: such a call is retried."""
    got: dict[str, list[str]] = {"alone": [], "pool": []}
    with pgque.connect(dsn, autocommit=True) as client:
        for name in got:
            client.subscribe(queue, name)
    consumer = pgque.Consumer(bouncer, queue=queue, consumer="alone", poll_interval=0.1, transactional=True)
    worker = pgque.Worker(bouncer, queue=queue, consumer="pool")
    stop = threading.Event()

    @consumer.handler("*")
    def alone(message: pgque.Message, conn: psycopg.Connection[Any]) -> None:
        conn.execute("select 1")
        got["alone"].append(str(message.payload))

    @worker.handler("*")
    def pool(message: pgque.Message) -> None:
        got["pool"].append(str(message.payload))

    calls = (consumer.run, worker.run, lambda: run_ticker(bouncer, stop))
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    try:
        sent = [str(number) for number in range(20)]
        for payload in sent:
            with pgque.connect(bouncer) as client:
                client.send(queue, payload)
        deadline = time.monotonic() + 60
        while not all(set(payloads) == set(sent) for payloads in got.values()):
            assert time.monotonic() < deadline, got
            time.sleep(0.02)
    finally:
        consumer.stop()
        worker.stop()
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
