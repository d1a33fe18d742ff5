"""The server is killed; nothing committed is lost, nothing is handed out twice under one id."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgque import embedded
from sql.helpers import (
    Connection,
    ack,
    drain,
    forced_tick,
    nack,
    pump,
    receive,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)
from support import servers
from support.servers import TestServer


@pytest.fixture
def durable(server: TestServer) -> Iterator[embedded.Server]:
    """A server of the test's own that writes to disk what it says it wrote."""
    bindir = server.process.binaries.bindir if server.process else None
    try:
        own = embedded.start(bindir, settings={"fsync": "on", "shared_buffers": "32MB"})
    except embedded.EmbeddedServerError as error:
        pytest.skip(f"no server of its own: {error}")
    with own:
        with psycopg.connect(own.dsn) as connection:
            connection.execute(servers.SQL_FILE.read_bytes())
        yield own


def crash(server: embedded.Server) -> Connection:
    """Kill the server, start it again, and connect."""
    server.kill()
    server.restart()
    return psycopg.connect(server.dsn, autocommit=True)


def test_a_killed_server_loses_nothing_committed_and_issues_no_batch_id_twice(
    durable: embedded.Server,
) -> None:
    conn: Connection = psycopg.connect(durable.dsn, autocommit=True)
    value(conn, "select pgque.create_queue('q')")
    subscribe(conn, "q")
    sent = send_many(conn, "q", 20)
    tick(conn, "q")
    seen: set[int] = set()
    got: list[int] = []
    for number in range(3):
        # One batch finished, one open and committed, one whose transaction the crash takes back.
        done = receive(conn, "q", count=2)
        got += [m.msg_id for m in done]
        assert done[0].batch_id not in seen
        seen.add(done[0].batch_id)
        ack(conn, done[0].batch_id)
        kept = receive(conn, "q", count=3)
        seen.add(kept[0].batch_id)
        victim: Connection = psycopg.connect(durable.dsn)
        ack(victim, kept[0].batch_id)
        lost = receive(victim, "q", count=3)
        assert lost[0].batch_id not in seen
        seen.add(lost[0].batch_id)
        gone = send(victim, "q", "never committed")
        sent.append(send(conn, "q", f"committed {number}"))
        conn.close()
        conn = crash(durable)
        victim.close()
        assert receive(conn, "q") == kept
        assert ack(conn, lost[0].batch_id) == 0
        refused("PQ012", nack, conn, lost[0])
        assert ack(conn, kept[0].batch_id) == 1
        got += [m.msg_id for m in kept]
        forced_tick(conn, "q")
        assert gone not in got
    got += drain(conn, "q", count=4)
    assert got == sent
    conn.close()


def test_retries_dead_letters_and_forced_ticks_survive_a_crash(durable: embedded.Server) -> None:
    conn: Connection = psycopg.connect(durable.dsn, autocommit=True)
    value(conn, "select pgque.create_queue('q', '{\"max_retries\": 1}'::jsonb)")
    subscribe(conn, "q")
    sent = send_many(conn, "q", 2)
    tick(conn, "q")
    batch = receive(conn, "q")
    nack(conn, batch[0])
    conn.close()
    conn = crash(durable)
    assert [m.msg_id for m in receive(conn, "q")] == sent[1:]
    ack(conn, batch[0].batch_id)
    value(conn, "select pgque.force_next_tick('q')")
    assert pump(conn) == 1
    conn.close()
    conn = crash(durable)
    forced_tick(conn, "q")
    (message,) = receive(conn, "q")
    nack(conn, message)
    conn.close()
    conn = crash(durable)
    assert rows(conn, "select ev_id from pgque.dlq_inspect('q')") == [(sent[0],)]
    assert pump(conn) == 0
    # Ids go on, however many the crash skipped.
    assert send(conn, "q") > sent[1]
    assert tick(conn, "q") is not None
    conn.close()


def test_rotation_and_compaction_are_whole_or_not_at_all_across_a_crash(durable: embedded.Server) -> None:
    conn: Connection = psycopg.connect(durable.dsn, autocommit=True)
    value(conn, "select pgque.create_queue('q', '{\"rotation_period\": \"1 microsecond\"}'::jsonb)")
    subscribe(conn, "q")
    sent: list[int] = []
    got: list[int] = []
    for _ in range(3):
        for _ in range(4):
            sent += send_many(conn, "q", 50)
            tick(conn, "q")
            got += drain(conn, "q", count=20)
            value(conn, "select pgque.maint()")
        victim: Connection = psycopg.connect(durable.dsn)
        value(victim, "select pgque.maint()")
        conn.close()
        conn = crash(durable)
        victim.close()
        forced_tick(conn, "q")
    got += drain(conn, "q")
    assert got == sent
    conn.close()


def test_a_server_that_dies_right_after_a_rolled_back_truncate_of_everything_comes_up(
    durable: embedded.Server,
) -> None:
    durable.restart(settings={"wal_writer_delay": "10s", "autovacuum": "off"})
    conn: Connection = psycopg.connect(durable.dsn, autocommit=True)
    value(conn, "select pgque.create_queue('q')")
    subscribe(conn, "q")
    conn.execute("checkpoint")
    other: Connection = psycopg.connect(durable.dsn)
    tables = "select string_agg(c.oid::regclass::text, ', ') from pg_class c where c.relnamespace = 'pgque'::regnamespace and c.relkind = 'r'"
    other.execute(f"truncate {value(conn, tables)}".encode())
    # What it wrote of that is flushed with somebody else's commit; that it was rolled back is not.
    conn.execute("create table elsewhere (i int)")
    other.rollback()
    with crash(durable) as again:
        sent = send(again, "q")
        tick(again, "q")
        assert drain(again, "q") == [sent]
    other.close()
    conn.close()
