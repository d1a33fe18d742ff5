"""A consumer on its own becomes one that workers share, and back, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from .helpers import (
    ack,
    ids,
    move_clock,
    nack,
    nack_ids,
    offer,
    receive,
    receive_coop,
    refused,
    subscribe,
    take,
    value,
    work_off,
)

Connection = psycopg.Connection[Any]

SHARE = "select pgque.share_consumer(%s, %s)"
UNSHARE = "select pgque.unshare_consumer(%s, %s)"


@pytest.fixture
def queue_c(conn: Connection, queue: str) -> str:
    """A queue with a consumer."""
    subscribe(conn, queue)
    return queue


def test_workers_receive_messages_that_a_consumer_on_its_own_had_open_in_retry_or_pending(
    conn: Connection, queue_c: str
) -> None:
    sent = offer(conn, queue_c, 6)
    batch = receive(conn, queue_c, count=3)
    nack(conn, batch[0], "1 hour")
    assert value(conn, SHARE, queue_c, "c") == 1
    assert value(conn, SHARE, queue_c, "c") == 0
    assert ack(conn, batch[0].batch_id) == 0
    refused("PQ005", receive, conn, queue_c)
    assert ids(take(conn, queue_c)) == sent[1:3]
    assert ids(take(conn, queue_c)) == sent[3:]
    value(conn, "select pgque.retry_now(%s, 'c')", queue_c)
    assert [(m.msg_id, m.retry_count) for m in take(conn, queue_c)] == [(sent[0], 1)]


def test_a_consumer_on_its_own_receives_messages_that_were_leased_in_retry_or_pending(
    conn: Connection, queue_c: str
) -> None:
    sent = offer(conn, queue_c, 9)
    done = take(conn, queue_c, "w1", 2)
    assert ack(conn, done[0].batch_id) == 1
    held = [take(conn, queue_c, f"w{n}", 2) for n in (1, 2)]
    nack(conn, held[1][0], "0")
    retried = take(conn, queue_c, "w3", 2)
    assert value(conn, UNSHARE, queue_c, "c") == 1
    assert value(conn, UNSHARE, queue_c, "c") == 0
    for batch in (*held, retried):
        assert ack(conn, batch[0].batch_id) == 0
    got: list[int] = []
    while batch := receive(conn, queue_c, count=100):
        got += ids(batch)
        assert ack(conn, batch[0].batch_id) == 1
    assert sorted(got) == sent[2:]
    # And back again.
    assert value(conn, SHARE, queue_c, "c") == 1
    sent = offer(conn, queue_c, 2)
    assert ids(work_off(conn, queue_c)) == sent


def test_unshare_is_refused_while_a_batch_is_being_acked(
    conn: Connection, queue_c: str, connect: Callable[..., Connection]
) -> None:
    offer(conn, queue_c, 2)
    batch = take(conn, queue_c)
    other = connect(autocommit=False)
    assert ack(other, batch[0].batch_id) == 1
    refused("55P03", value, conn, UNSHARE, queue_c, "c")
    other.commit()
    assert value(conn, UNSHARE, queue_c, "c") == 1
    assert receive(conn, queue_c) == []


def test_batches_are_taken_from_workers_however_many_while_another_consumer_finishes_one(
    conn: Connection, queue_c: str, connect: Callable[..., Connection]
) -> None:
    subscribe(conn, queue_c, "d")
    sent = offer(conn, queue_c, 210)
    other = connect(autocommit=False)
    assert ack(other, take(conn, queue_c, consumer="d")[0].batch_id) == 1
    with conn.transaction():
        for n in sent:
            take(conn, queue_c, f"w{n}", 1)
    assert value(conn, UNSHARE, queue_c, "c") == 1
    assert ids(receive(conn, queue_c, count=1_000)) == sent


def test_subconsumers_and_keyed_order_keep_their_consumer(conn: Connection, queue: str) -> None:
    receive_coop(conn, queue, "a", consumer="group")
    for call in (SHARE, UNSHARE):
        assert "subconsumers" in str(refused("PQ006", value, conn, call, queue, "group"))
    value(conn, "select pgque.subscribe(%s, 'ordered', keyed_order => true)", queue)
    assert "key_concurrency 1" in str(refused("PQ006", value, conn, UNSHARE, queue, "ordered"))
    refused("PQ011", value, conn, SHARE, queue, "nobody")


def test_share_consumer_releases_messages_that_retention_had_locked(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    value(own, "select pgque.create_queue('q', '{\"retention_period\": \"1 hour\"}')")
    subscribe(own, "q")
    sent = offer(own, "q", 2)
    nack_ids(own, receive(own, "q")[0].batch_id, sent, "0")
    assert ids(receive(own, "q")) == sent
    move_clock(own, "2 hours")
    retaining = connect(own_dsn, autocommit=False)
    value(retaining, "select pgque.maint_retain('q')")
    sharing = background(lambda c: value(c, SHARE, "q", "c"), connect(own_dsn))
    wait_for_lock(sharing.pid)
    retaining.rollback()
    assert sharing.result() == 1
    assert ids(take(own, "q")) == sent


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("select pgque.share_consumer('q', 'c')", lambda c: take(c, "q")),
        ("select pgque.register_subconsumer('q', 'c', 'w', true)", lambda c: receive_coop(c, "q", "w")),
    ],
)
def test_an_ack_that_waits_while_its_consumer_gets_workers_acknowledges_nothing(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    change: str,
    again: Callable[[Connection], list[Any]],
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = offer(own, "q", 2)
    batch = receive(own, "q")[0].batch_id
    changing = connect(own_dsn, autocommit=False)
    assert value(changing, change) == 1
    acking = background(lambda c: ack(c, batch), connect(own_dsn))
    wait_for_lock(acking.pid)
    changing.commit()
    assert acking.result() == 0
    assert ids(again(own)) == sent
