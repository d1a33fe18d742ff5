"""An idle database costs nothing."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgque import embedded
from sql.helpers import Connection, ack, nack, pump, receive, rows, send, subscribe, tick, value
from support import servers
from support.servers import TestServer


@pytest.fixture(scope="module")
def quiet(server: TestServer) -> Iterator[str]:
    """Connection string of a server on which nothing but the test does anything."""
    bindir = server.process.binaries.bindir if server.process else None
    settings = {
        **servers.TEST_SETTINGS,
        "autovacuum": "off",
        "wal_level": "minimal",
        "max_wal_senders": "0",
        "checkpoint_timeout": "1h",
    }
    try:
        with embedded.start(bindir, settings=settings) as own:
            with psycopg.connect(own.dsn) as connection:
                connection.execute(servers.SQL_FILE.read_bytes())
            yield own.dsn
    except embedded.EmbeddedServerError as error:
        pytest.skip(f"no server of its own: {error}")


def position(conn: Connection) -> tuple[str, str]:
    """Where the log and the transaction ids stand."""
    (found,) = rows(
        conn,
        "select pg_current_wal_insert_lsn()::text, pg_snapshot_xmax(pg_current_snapshot())::text",
    )
    return found[0], found[1]


def used(quiet: str) -> Connection:
    """Use two queues in every way, so that the loop has all its tables to look at."""
    conn: Connection = psycopg.connect(quiet, autocommit=True)
    for name in ("a", "b"):
        if value(conn, "select pgque.create_queue(%s)", name) == 1:
            subscribe(conn, name)
            subscribe(conn, name, "lagging")
            value(conn, "select pgque.register_subconsumer(%s, 'group', 'w')", name)
        send(conn, name)
        tick(conn, name)
        (message,) = receive(conn, name)
        nack(conn, message, "0")
        ack(conn, message.batch_id)
        pump(conn)
        tick(conn, name)
        (message,) = receive(conn, name)
        nack(conn, message, "1 day")
    value(conn, "select pgque.create_recurring('yearly', 'a', '0 0 29 2 *', 't', 'x')")
    value(conn, "select pgque.set_tick_period_ms(10)")
    value(
        conn,
        "select pgque.set_queue_config(q.queue_name, 'ticker_idle_period', '1 hour') from pgque.queue as q",
    )
    # What is left to do is done now.
    conn.execute("call pgque.ticker_loop('200 milliseconds')")
    for _ in range(5):
        value(conn, "select pgque.maint()")
    conn.execute("checkpoint")
    return conn


@pytest.mark.slow
def test_the_loop_of_an_idle_database_writes_nothing_and_uses_no_transaction_id(quiet: str) -> None:
    with used(quiet) as conn:
        conn.execute("listen pgque_a")
        conn.execute("call pgque.ticker_loop('1 second')")  # reading may prune a page of the catalogs, once
        before = position(conn)
        conn.execute("call pgque.ticker_loop('6 seconds')")
        assert position(conn) == before
        assert list(conn.notifies(timeout=0)) == []


def test_idle_calls_of_any_scheduler_and_consumer_write_nothing(quiet: str) -> None:
    with used(quiet) as conn:
        value(conn, "select pgque.ack(batch_id) from pgque.receive('a', 'c') limit 1")
        value(conn, "select pgque.ack(current_batch) from pgque.get_consumer_info('a', 'c')")
        while batch := receive(conn, "a", "lagging"):
            ack(conn, batch[0].batch_id)
        conn.execute("checkpoint")
        calls = (
            "select pgque.ticker()",
            "select pgque.ticker('a')",
            "select pgque.maint_retry_events()",
            "select pgque.maint_recurring()",
            "select pgque.maint()",
            "select * from pgque.list_recurring()",
            "select * from pgque.receive('a', 'c')",
            "select * from pgque.receive('a', 'lagging')",
            "select pgque.next_batch('a', 'lagging')",
            "select * from pgque.health()",
            "select * from pgque.metrics()",
            "select * from pgque.get_queue_info()",
            "select * from pgque.get_consumer_info()",
            "select * from pgque.peek('a')",
            "select * from pgque.subscription",
        )
        for call in calls:
            rows(conn, call)  # reading may prune a page of the catalogs, once
        before = position(conn)
        for call in calls:
            rows(conn, call)
            assert position(conn) == before, call


def test_a_used_worker_that_finds_nothing_writes_nothing(quiet: str) -> None:
    with used(quiet) as conn:
        while batch := rows(conn, "select batch_id from pgque.receive_coop('b', 'group', 'w')"):
            ack(conn, batch[0][0])
        call = "select * from pgque.receive_coop('b', 'group', 'w', 100, '1 minute')"
        conn.execute("checkpoint")
        rows(conn, call)  # reading may prune a page of the catalogs, once
        before = position(conn)
        assert rows(conn, call) == []
        assert position(conn) == before
