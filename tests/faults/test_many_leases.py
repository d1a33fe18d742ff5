"""2,000 open leases of twenty pools: no call takes a lock for each lease, of which a server has room for some thousand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import psycopg
import pytest

from faults.clusters import folder_for, new_database, programs_of, run, started
from pgque import embedded
from sql.helpers import Connection, ack, column, move_clock, offer, tick, value
from support.servers import TestServer

DEFAULT_LOCKS = {
    "max_locks_per_transaction": "64",
    "max_connections": "100",
    "max_prepared_transactions": "0",
}
POOLS = 20
EACH = 100
NUMBERS = itertools.count()

# 2,000 messages are received one by one, and their leases moved one by one.
pytestmark = [pytest.mark.slow, pytest.mark.programs, pytest.mark.timeout(600)]


def database(server: embedded.Server, template: str) -> str:
    """Create a database as a copy of another; return how to connect to it."""
    name = f"leased_{next(NUMBERS)}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"create database {name} template {template}".encode())
    return psycopg.conninfo.make_conninfo(server.dsn, dbname=name)


@pytest.fixture(scope="module")
def leased(server: TestServer) -> Iterator[embedded.Server]:
    """A server with a database in which twenty pools of one queue have a hundred leases each."""
    with started(programs_of(server, "postgres", "initdb", "pg_dump", "psql"), settings=DEFAULT_LOCKS) as one:
        new_database(one.dsn, "leased", "file")
        with psycopg.connect(
            psycopg.conninfo.make_conninfo(one.dsn, dbname="leased"), autocommit=True
        ) as conn:
            value(conn, "select pgque.create_queue('q')")
            value(conn, "select count(pgque.subscribe('q', 'c' || n)) from generate_series(1, %s) n", POOLS)
            offer(conn, "q", EACH)
            conn.execute("create table public.held (token bigint)")
            conn.execute(
                f"""
                do $$
                begin
                  for c in 1..{POOLS} loop
                    for n in 1..{EACH} loop
                      insert into public.held
                      select r.batch_id from pgque.receive('q', 'c' || c, 1, worker => 'w', visibility_timeout => '30 days') r;
                    end loop;
                    commit;
                  end loop;
                end
                $$
                """.encode()
            )
            assert value(conn, "select count(*) from public.held") == POOLS * EACH
        yield one


@pytest.fixture
def crowd(leased: embedded.Server) -> Iterator[Connection]:
    """A copy of that database. A warning fails the test."""
    with psycopg.connect(database(leased, "leased"), autocommit=True) as conn:
        conn.add_notice_handler(lambda notice: pytest.fail(str(notice.message_primary)))
        yield conn


def at_once(conn: Connection, call: str) -> int:
    """Call something in a transaction that leaves most locks of the server to others."""
    with conn.transaction():
        answer: int = value(conn, call)
        assert value(conn, "select count(*) from pg_locks l where l.pid = pg_backend_pid()") < 500
    return answer


def some(conn: Connection) -> list[int]:
    """Name some of the batches, of each pool."""
    return column(conn, "select h.token from public.held h where (h.token >> 20) %% %s = 0", 17)


def test_a_purge_takes_all_leases_away(crowd: Connection) -> None:
    assert at_once(crowd, "select pgque.purge('q')") == EACH
    assert {ack(crowd, token) for token in some(crowd)} == {0}


def test_all_leases_of_a_queue_are_reclaimed(crowd: Connection) -> None:
    reclaim = f"select sum(pgque.reclaim('q', 'c' || n)) from generate_series(1, {POOLS}) n"
    assert at_once(crowd, reclaim) == POOLS * EACH
    assert {ack(crowd, token) for token in some(crowd)} == {0}


def test_retention_goes_past_leases_that_live(crowd: Connection) -> None:
    move_clock(crowd, "8 days")
    offer(crowd, "q", 1)
    assert at_once(crowd, "select pgque.maint()") > 0
    assert value(crowd, "select pgque.maint_retain('q')") == 0
    assert {ack(crowd, token) for token in some(crowd)} == {1}


def test_a_restored_queue_opens_and_keeps_its_leases(leased: embedded.Server) -> None:
    dsn = database(leased, "template0")
    with folder_for(leased) as folder:
        of = psycopg.conninfo.make_conninfo(leased.dsn, dbname="leased")
        run(folder, leased.bindir / "pg_dump", "-d", of, "-f", "dump.sql")
        run(folder, leased.bindir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", "dump.sql")
    with psycopg.connect(dsn, autocommit=True) as conn:
        tick(conn, "q")
        assert not value(conn, "select q.queue_restored from pgque.queue q")
        assert (
            value(conn, "select h.status from pgque.health() h where h.status = 'fail' and h.queue = 'q'")
            is None
        )
        assert {ack(conn, token) for token in some(conn)} == {1}
