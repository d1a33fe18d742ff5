"""A dump restored while workers hold leases and messages wait: nothing is lost, nothing is doubled."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from pgque import embedded
from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    extend,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    post,
    rows,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)
from support import servers
from support.servers import TestServer


@dataclass(frozen=True)
class Left:
    """What a pool of queue q still lacks, and what it holds."""

    held: list[int]
    token: int
    lacking: list[int]
    keyed: int
    dead: int
    archived: int


@dataclass(frozen=True)
class Dump(Left):
    """A plain SQL dump."""

    path: Path
    psql: str


def program(name: str, server: TestServer) -> str:
    """Find a client program that fits the server, or skip."""
    if server.process is not None and (server.process.bindir / name).is_file():
        return str(server.process.bindir / name)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    return found


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def fill(conn: Connection) -> Left:
    """Leave messages of queue q held, nacked, dead, archived, delayed and replaced by their key."""
    value(conn, "select pgque.create_queue('q')")
    subscribe(conn, "q")
    configure(conn, "q", max_receive_attempts=50)
    sent = offer(conn, "q", 12)
    held = take(conn, "q", "w1", 4, "10 minutes")
    outcome(conn, "ack", held[0].batch_id, sent[:1])
    second = take(conn, "q", "w2", 4)
    nack(conn, second[0], "5 minutes", "later")
    outcome(conn, "dead", second[0].batch_id, sent[5:6], "broken")
    outcome(conn, "archive", second[0].batch_id, sent[6:7])
    delayed = post(conn, "q", "delayed", delay="5 minutes")
    keyed = post(conn, "q", "old", key="k")
    tick(conn, "q")
    assert post(conn, "q", "new", key="k") == keyed
    lacking = sorted([*sent[1:5], *sent[7:], delayed, keyed])
    return Left(sent[1:4], held[0].batch_id, lacking, keyed, sent[5], sent[6])


@pytest.fixture(scope="module")
def dump(server: TestServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dump]:
    """A dump of a busy pool, on a server that has used up many transaction ids."""
    pg_dump, psql = program("pg_dump", server), program("psql", server)
    name = f"pgque_work_{secrets.token_hex(4)}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"create database {name} template template0".encode())
    dsn = server.dsn_for(name)
    try:
        with psycopg.connect(dsn, autocommit=True) as conn:
            with conn.transaction():
                conn.execute(servers.SQL_FILE.read_bytes())
            conn.execute(
                "do $$ begin for n in 1..50000 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
            left = fill(conn)
        path = tmp_path_factory.mktemp("dump") / "dump.sql"
        run(pg_dump, "-d", dsn, "-f", str(path))
        yield Dump(**vars(left), path=path, psql=psql)
    finally:
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(f"drop database if exists {name} with (force)".encode())


@pytest.fixture(scope="module")
def young(server: TestServer) -> Iterator[embedded.Server]:
    """A second cluster, whose transaction ids are far below those in the dump."""
    bindir = server.process.binaries.bindir if server.process else None
    try:
        other = embedded.start(bindir, settings=dict(servers.TEST_SETTINGS))
    except embedded.EmbeddedServerError as error:
        pytest.skip(f"no second server: {error}")
    with other:
        with psycopg.connect(other.dsn, autocommit=True) as admin:
            for role in ("reader", "writer", "admin", "user"):
                admin.execute(f"create role pgque_{role}".encode())
        yield other


@pytest.fixture(params=["same cluster", "young cluster"])
def restored(request: pytest.FixtureRequest, dump: Dump, server: TestServer) -> Iterator[Connection]:
    """A connection to the restored database, beside the original or in the young cluster."""
    where = server if request.param == "same cluster" else request.getfixturevalue("young")
    name = f"pgque_restored_{secrets.token_hex(4)}"
    with psycopg.connect(where.dsn, autocommit=True) as admin:
        admin.execute(f"create database {name} template template0".encode())
        try:
            run(
                dump.psql,
                "-X",
                "-q",
                "-v",
                "ON_ERROR_STOP=1",
                "-d",
                where.dsn_for(name),
                "-f",
                str(dump.path),
            )
            with psycopg.connect(where.dsn_for(name), autocommit=True) as conn:
                yield conn
        finally:
            admin.execute(f"drop database {name} with (force)".encode())


def everything(conn: Connection) -> list[int]:
    """Deliver until nothing is left, with hours in between."""
    got: list[int] = []
    for hours in range(1, 5):
        move_clock(conn, f"{hours} hours")
        settle(conn, "q")
        got += ids(work_off(conn, "q", f"w{hours}", 3))
    return sorted(got)


def check(conn: Connection, left: Left) -> None:
    """The pool gets what it lacked, each message once; dead letters and the archive are there; it goes on."""
    assert everything(conn) == left.lacking
    assert dead_letters(conn, "q") == {left.dead: "broken"}
    assert rows(conn, "select a.msg_id from pgque.archive_list('q') as a") == [(left.archived,)]
    sent = offer(conn, "q", 5)
    assert everything(conn) == sent


def check_held(conn: Connection, left: Left) -> Left:
    """The batch is still its worker's, who acks it; return what is lacking then."""
    assert extend(conn, left.token, "0") == len(left.held) == 3
    assert ack(conn, left.token) == 1
    return replace(left, lacking=[i for i in left.lacking if i not in left.held])


def test_a_pool_receives_each_unfinished_message_once(dump: Dump, restored: Connection) -> None:
    check(restored, dump)


def test_a_batch_from_before_the_dump_is_still_its_workers(dump: Dump, restored: Connection) -> None:
    check(restored, check_held(restored, dump))


def test_a_key_pending_at_the_dump_is_replaced_or_delivered_but_not_lost(
    dump: Dump, restored: Connection
) -> None:
    again = post(restored, "q", "newest", key="k")
    got: dict[int, str | None] = {}
    for hours in (1, 2):
        move_clock(restored, f"{hours} hours")
        settle(restored, "q")
        got.update({m.msg_id: m.payload for m in work_off(restored, "q", "w9", 3)})
    assert got[again] == "newest"
    if again != dump.keyed:
        assert got[dump.keyed] == "new"


def test_the_body_of_a_key_is_the_last_one_after_a_restore(dump: Dump, restored: Connection) -> None:
    move_clock(restored, "1 hour")
    settle(restored, "q")
    got = {m.msg_id: m.payload for m in work_off(restored, "q", "w9", 3)}
    assert got[dump.keyed] == "new"
