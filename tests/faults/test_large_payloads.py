"""Payloads that are large together: PostgreSQL holds no array of more than 1 GB, and no call needs one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import psycopg
import pytest

from conftest import create_database, drop_database
from sql.helpers import (
    Connection,
    ack,
    configure,
    move_clock,
    outcome,
    release,
    rows,
    set_visibility,
    tick,
    value,
)
from support.servers import TestServer

# Each database of this module compresses a gigabyte of payloads, which takes most of the time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Stock(NamedTuple):
    """A queue q whose messages are more than 1 GB together."""

    conn: Connection
    sent: list[int]
    size: int

    def consumer(self, name: str, worker: bool) -> Large:
        """Subscribe a consumer to all of it."""
        value(self.conn, "select pgque.subscribe('q', %s, 'earliest')", name)
        return Large(self.conn, name, ", worker => 'w', visibility_timeout => '1 minute'" if worker else "")


class Large(NamedTuple):
    """A consumer that leaves payloads on the server."""

    conn: Connection
    name: str
    options: str

    def receive(self, count: int) -> tuple[int, list[int], int]:
        """Receive; return the batch, the ids, and the bytes of all payloads."""
        ((batch, ids, size),) = rows(
            self.conn,
            "select min(r.batch_id), coalesce(array_agg(r.msg_id), '{}'), coalesce(sum(length(r.payload)), 0)"
            f" from pgque.receive('q', %s, %s{self.options}) r",
            self.name,
            count,
        )
        return batch, ids, size


def stock(server: TestServer, installed: str, count: int, size: int, options: str = "") -> Iterator[Stock]:
    """Make a database with so many messages of so many bytes each."""
    name = create_database(server, "pgque_large", installed)
    try:
        with psycopg.connect(server.dsn_for(name), autocommit=True) as conn:
            if "lz4" in value(
                conn, "select enumvals from pg_settings where name = 'default_toast_compression'"
            ):
                conn.execute("set default_toast_compression = 'lz4'")  # a fifth of the time that pglz takes
            value(conn, "select pgque.create_queue('q')")
            configure(conn, "q", message_ttl="1 day")
            send = f"select array_agg(pgque.send('q', 't', repeat('x', %s){options})) from generate_series(1, %s) g"
            sent = value(conn, send, size, count)
            tick(conn, "q")
            yield Stock(conn, sent, size)
    finally:
        drop_database(server, name)


@pytest.fixture(scope="module")
def six(server: TestServer, installed: str) -> Iterator[Stock]:
    """Six messages of 200 MB."""
    yield from stock(server, installed, 6, 200_000_000)


@pytest.fixture(scope="module")
def hundred(server: TestServer, installed: str) -> Iterator[Stock]:
    """A hundred messages of 11.5 MB."""
    yield from stock(server, installed, 100, 11_500_000)


@pytest.fixture(scope="module")
def thousand(server: TestServer, installed: str) -> Iterator[Stock]:
    """A thousand messages of 1.15 MB, each with a key."""
    yield from stock(server, installed, 1_000, 1_150_000, ", key => 'key ' || g")


@pytest.mark.parametrize(
    ("how", "worker"), [pytest.param("ack", False, marks=pytest.mark.long), ("nack", True), ("archive", True)]
)
def test_a_batch_of_more_than_1_gb_gets_its_outcomes_by_id(six: Stock, how: str, worker: bool) -> None:
    consumer = six.consumer(f"{how} {worker}", worker)
    batch, got, size = consumer.receive(10)
    assert (got, size) == (six.sent, 6 * six.size)
    reject = ["0"] if how == "nack" else []
    assert outcome(six.conn, how, batch, six.sent, *reject) == dict.fromkeys(six.sent)
    ack(six.conn, batch)
    again = consumer.receive(10)[1:]
    assert again == ((six.sent, 6 * six.size) if how == "nack" else ([], 0))


def test_the_lease_on_a_batch_of_more_than_1_gb_is_moved_and_released(six: Stock) -> None:
    consumer = six.consumer("lease", True)
    batch, got, _ = consumer.receive(10)
    assert got == six.sent
    assert set_visibility(six.conn, batch, "1 hour") == 6
    assert outcome(six.conn, "ack", batch, got[:1]) == {got[0]: None}
    assert release(six.conn, batch) == 5
    assert consumer.receive(10)[1:] == (got[1:], 5 * six.size)


@pytest.mark.parametrize("worker", [False, True], ids=["alone", "worker"])
def test_one_message_of_more_than_1_gb_with_a_ttl_is_received(thousand: Stock, worker: bool) -> None:
    consumer = thousand.consumer(f"one {worker}", worker)
    batch, got, size = consumer.receive(1)
    assert (got, size) == (thousand.sent[:1], thousand.size)
    assert ack(thousand.conn, batch) == 1
    assert consumer.receive(100)[1:] == (thousand.sent[1:101], 100 * thousand.size)


@pytest.mark.parametrize(
    "how", ["receive", *(pytest.param(how, marks=pytest.mark.long) for how in ("release", "reclaim"))]
)
def test_a_lease_on_more_than_1_gb_that_expired_keeps_nobody_from_it(hundred: Stock, how: str) -> None:
    move_clock(hundred.conn, "0 hours")
    consumer = hundred.consumer(how, True)
    batch, got, _ = consumer.receive(100)
    assert got == hundred.sent
    move_clock(hundred.conn, "1 hour")
    if how == "release":
        assert release(hundred.conn, batch) == 100
    elif how == "reclaim":
        assert value(hundred.conn, "select pgque.reclaim('q', %s)", how) == 1
    assert consumer.receive(100)[1:] == (got, 100 * hundred.size)


@pytest.mark.long  # as the others, for a path that few take
def test_an_epoch_of_more_than_1_gb_with_options_is_sent(server: TestServer, installed: str) -> None:
    name = create_database(server, "pgque_large", installed)
    try:
        with psycopg.connect(server.dsn_for(name), autocommit=True) as conn:
            value(conn, "select pgque.create_queue('q')")
            ((attempt, stage),) = rows(conn, "select * from pgque.sink_begin('s', 1)")
            conn.execute(
                f"insert into {stage} (attempt, n, queue, payload, ttl)"
                " select %s, n, 'q', repeat('x', 1150000), '1 day' from generate_series(0, 999) n".encode(),
                [attempt],
            )
            assert (
                value(conn, "select pgque.sink_commit('s', 1, array[%s]::uuid[], 1000)", attempt) == "applied"
            )
            assert rows(conn, "select count(*), min(length(ev_data)) from pgque.event") == [(1000, 1150000)]
    finally:
        drop_database(server, name)
