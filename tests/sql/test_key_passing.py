"""A committed replacement of a keyed message is delivered, however its consumer passes the message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    column,
    configure,
    dead_letters,
    move_clock,
    post,
    pump,
    receive,
    receive_coop,
    refused,
    rotate,
    rows,
    send,
    subscribe,
    take,
    tick,
    value,
)

Connect = Callable[..., Connection]
Transaction = Callable[..., Connection]
NEXT = "select pgque.next_batch('q', 'c')"
EVENTS = "select ev_id, ev_data from pgque.get_batch_events(%s)"


def replaced(conn: Connection, sender: Connection) -> int:
    """Send a message of key k, and replace its body in a transaction that stays open."""
    first = post(conn, "q", "old", key="k")
    tick(conn, "q")
    conn.execute("set statement_timeout = '5s'")  # nothing may wait for the sender without end
    assert post(sender, "q", "new", key="k") == first
    return first


def pass_all(conn: Connection) -> None:
    """Move the consumer to the newest tick, past all but what was put aside."""
    tick(conn, "q")
    value(conn, "select pgque.seek('q', 'c', pgque.tick_for('q', 'latest'))")


def everything(conn: Connection, consumer: str = "c") -> list[str | None]:
    """Pump, tick and receive until nothing more comes; return the bodies."""
    got: list[str | None] = []
    for _ in range(3):
        pump(conn)
        tick(conn, "q")
        while batch := receive(conn, "q", consumer):
            got += [m.payload for m in batch]
            ack(conn, batch[0].batch_id)
    return got


@pytest.mark.parametrize("call", ["seek", "register_consumer_at"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_move_of_a_consumer_waits_for_an_open_replacement(
    pool: Connection,
    own_dsn: str,
    transaction: Transaction,
    connect: Connect,
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    call: str,
    shared: bool,
) -> None:
    if shared and call == "seek":
        pytest.skip("seek() is for consumers on their own")
    if shared:
        assert take(pool, "q") == []  # from here on the consumer is a pool
    sender = transaction(dsn=own_dsn)
    replaced(pool, sender)
    send(pool, "q")
    newest = tick(pool, "q")
    moving = background(lambda c: value(c, f"select pgque.{call}('q', 'c', {newest})"), connect(own_dsn))
    wait_for_lock(moving.pid)
    sender.commit()
    moving.result()
    # The replacement was committed first, so the move passed it with its message; this one is new.
    second = post(pool, "q", "next", key="k")
    tick(pool, "q")
    batch = take(pool, "q") if shared else receive(pool, "q")
    assert [(m.msg_id, m.payload) for m in batch] == [(second, "next")]


def test_a_move_back_waits_for_nobody(pool: Connection, own_dsn: str, transaction: Transaction) -> None:
    start = value(pool, "select pgque.tick_for('q', 'latest')")
    send(pool, "q", "first")
    tick(pool, "q")
    assert everything(pool) == ["first"]
    sender = transaction(dsn=own_dsn)
    replaced(pool, sender)
    assert value(pool, "select pgque.seek('q', 'c', %s, true)", start) == start
    assert everything(pool) == ["first"]
    sender.commit()
    assert everything(pool) == ["new"]


@pytest.mark.parametrize("call", ["seek", "register_consumer_at", "subscribe"])
def test_a_sender_with_a_snapshot_older_than_a_move_is_refused(
    pool: Connection, own_dsn: str, transaction: Transaction, call: str
) -> None:
    post(pool, "q", "old", key="k")
    newest = tick(pool, "q")
    sender = transaction("repeatable read", own_dsn)
    if call == "subscribe":
        subscribe(pool, "q", "d")
    else:
        value(pool, f"select pgque.{call}('q', 'c', {newest})")
    refused("40001", lambda: post(sender, "q", "new", key="k"))
    sender.rollback()
    second = post(pool, "q", "new", key="k")
    tick(pool, "q")
    consumer = "d" if call == "subscribe" else "c"
    assert [(m.msg_id, m.payload) for m in receive(pool, "q", consumer)] == [(second, "new")]


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("how", ["receive", "get_batch_events", "get_batch_cursor", "finish_batch"])
def test_a_whole_window_leaves_out_a_message_that_is_being_replaced(
    pool: Connection, own_dsn: str, transaction: Transaction, how: str, rotated: bool, end: str
) -> None:
    sender = transaction(dsn=own_dsn)
    replaced(pool, sender)
    other = post(pool, "q", "other", key="other")
    tick(pool, "q")
    if rotated:
        assert rotate(pool, "q") == 1
    got: list[str | None] = []
    while batch := value(pool, NEXT):
        if how == "receive":
            got += [m.payload for m in receive(pool, "q")]
        elif how == "get_batch_events":
            got += [body for _, body in rows(pool, EVENTS, batch)]
        elif how == "get_batch_cursor":
            with pool.transaction():
                got += column(pool, "select ev_data from pgque.get_batch_cursor(%s, 'x', 100)", batch)
        else:
            got += ["other"]
        # receive() finishes a batch itself of which nothing is left, and goes on.
        assert value(pool, "select pgque.finish_batch(%s)", batch) == 1 or how == "receive"
    assert set(got) == {"other"}
    sender.execute(end.encode())
    assert everything(pool) == ["new" if end == "commit" else "old"]
    assert post(pool, "q", "later", key="other") > other


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_subconsumers_window_leaves_out_what_is_being_replaced(
    pool: Connection, own_dsn: str, transaction: Transaction, end: str
) -> None:
    value(pool, "select pgque.register_subconsumer('q', 'shared', 'w')")
    sender = transaction(dsn=own_dsn)
    replaced(pool, sender)
    post(pool, "q", "other", key="other")
    tick(pool, "q")
    got: list[str] = []
    while batch := value(pool, "select pgque.next_batch('q', 'shared', 'w')"):
        got += [body for _, body in rows(pool, EVENTS, batch)]
        assert value(pool, "select pgque.finish_batch(%s)", batch) == 1
    assert got == ["other"]
    sender.execute(end.encode())
    assert pump(pool) == 1
    tick(pool, "q")
    assert [m.payload for m in receive_coop(pool, "q", "w", consumer="shared")] == [
        "new" if end == "commit" else "old"
    ]


def test_a_message_that_waited_in_the_retry_queue_has_the_newest_body_when_it_is_delivered(
    pool: Connection, own_dsn: str, transaction: Transaction
) -> None:
    sender = transaction(dsn=own_dsn)
    replaced(pool, sender)
    assert receive(pool, "q") == []  # put aside
    assert receive(pool, "q") == []  # and left where it waits, as long as the sender is open
    sender.commit()
    assert rotate(pool, "q") == 1
    pass_all(pool)
    # The table with the new body goes.
    assert [rotate(pool, "q") for _ in range(2)] == [1, 1]
    assert everything(pool) == ["new"]


def test_a_rotation_rewrites_only_what_waits_with_a_body_that_goes(
    pool: Connection, own_dsn: str, transaction: Transaction
) -> None:
    same = post(pool, "q", "same", key="same")
    undone = transaction(dsn=own_dsn)
    post(undone, "q", "undone", key="same")
    sender = transaction(dsn=own_dsn)
    first = replaced(pool, sender)
    assert receive(pool, "q") == []  # both are put aside
    undone.rollback()
    sender.commit()
    assert rotate(pool, "q") == 1
    pass_all(pool)
    waiting = "select ev_id, ctid::text, ev_data from pgque.retry_queue order by ev_id"
    before = rows(pool, waiting)
    assert [rotate(pool, "q") for _ in range(2)] == [1, 1]
    after = rows(pool, waiting)
    assert after[0] == before[0] == (same, before[0][1], "same")
    assert (before[1][2], after[1][0], after[1][2]) == ("old", first, "new")


def test_a_body_that_is_committed_behind_the_pump_is_a_new_message(
    pool: Connection,
    own_dsn: str,
    transaction: Transaction,
    connect: Connect,
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    sender = transaction(dsn=own_dsn)
    first = replaced(pool, sender)
    assert receive(pool, "q") == []
    sender.rollback()
    pumping = transaction(dsn=own_dsn)
    assert pump(pumping) == 1
    late = background(lambda c: post(c, "q", "late", key="k"), connect(own_dsn))
    wait_for_lock(late.pid)
    pumping.commit()
    assert late.result() > first
    assert everything(pool) == ["old", "late"]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@pytest.mark.parametrize("how", ["receive", "next_batch"])
def test_a_consumer_with_an_old_snapshot_does_not_pass_a_body_stored_before_a_rotation(
    pool: Connection, own_dsn: str, transaction: Transaction, isolation: str, how: str
) -> None:
    sender = transaction(dsn=own_dsn)
    replaced(pool, sender)
    assert rotate(pool, "q") == 1
    reader = transaction(isolation, own_dsn)
    sender.commit()
    refused("40001", lambda: receive(reader, "q") if how == "receive" else value(reader, NEXT))
    reader.rollback()
    assert everything(pool) == ["new"]


@pytest.mark.parametrize("how", ["receive", "next_batch"])
def test_a_consumer_with_an_old_snapshot_does_not_pass_an_expired_body_that_was_replaced(
    pool: Connection, own_dsn: str, transaction: Transaction, how: str
) -> None:
    first = value(pool, "select pgque.send('q', 't', 'old'::text, key => 'k', ttl => '1 minute')")
    tick(pool, "q")
    reader = transaction("repeatable read", own_dsn)
    assert value(pool, "select pgque.send('q', 't', 'new'::text, key => 'k', ttl => '1 hour')") == first
    move_clock(pool, "2 minutes")
    refused("40001", lambda: receive(reader, "q") if how == "receive" else value(reader, NEXT))
    reader.rollback()
    assert everything(pool) == ["new"]


def test_a_subscription_that_waits_for_a_consumer_with_an_old_snapshot_stops_no_sender(
    pool: Connection,
    own_dsn: str,
    transaction: Transaction,
    connect: Connect,
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    post(pool, "q", "one", key="k")
    tick(pool, "q")
    reader = transaction("repeatable read", own_dsn)
    assert [m.payload for m in receive(reader, "q")] == ["one"]
    waiting = background(lambda c: subscribe(c, "q", "d"), connect(own_dsn))
    wait_until(
        lambda: rows(
            pool,
            "select pid from pg_stat_activity where datname = current_database() and query like '%%subscribe%%'"
            " and pid <> pg_backend_pid() and wait_event in ('PgSleep', 'transactionid', 'tuple')",
        )
    )
    pool.execute("set lock_timeout = '10s'")
    for n in range(5):
        post(pool, "q", "other", key=f"other {n}")
    assert not waiting.done
    reader.commit()
    assert waiting.result(timeout=30) == 1


def test_subconsumers_move_messages_that_are_being_replaced_to_the_retry_queue(
    pool: Connection, own_dsn: str, transaction: Transaction
) -> None:
    value(pool, "select pgque.subscribe_subconsumer('q', 'shared', 'w')")
    sender = transaction(dsn=own_dsn)
    replaced(pool, sender)
    assert receive_coop(pool, "q", "w", consumer="shared") == []
    sender.commit()
    pump(pool)
    tick(pool, "q")
    assert [m.payload for m in receive_coop(pool, "q", "w", consumer="shared")] == ["new"]


@pytest.mark.parametrize("policy", ["dead_letter", "drop"])
def test_retention_passes_no_message_that_is_being_replaced(
    pool: Connection, own_dsn: str, transaction: Transaction, policy: str
) -> None:
    configure(pool, "q", drop_policy=policy, retention_period="10 minutes")
    sender = transaction(dsn=own_dsn)
    replaced(pool, sender)
    post(pool, "q", "other", key="other")
    tick(pool, "q")
    move_clock(pool, "1 hour")
    send(pool, "q", "young")
    tick(pool, "q")
    while value(pool, "select pgque._retain(queue_id) from pgque.queue"):
        pass
    sender.commit()
    assert sorted(map(str, everything(pool))) == ["new", "young"]
    assert len(dead_letters(pool, "q")) == (policy != "drop")


def test_retention_of_the_retry_queue_keeps_the_newest_body(
    pool: Connection, own_dsn: str, transaction: Transaction
) -> None:
    configure(pool, "q", retention_period="10 minutes")
    assert take(pool, "q") == []
    sender = transaction(dsn=own_dsn)
    first = replaced(pool, sender)
    assert take(pool, "q") == []
    move_clock(pool, "1 hour")
    value(pool, "select pgque._retain(queue_id) from pgque.queue")
    assert dead_letters(pool, "q") == {}
    sender.commit()
    value(pool, "select pgque._retain(queue_id) from pgque.queue")
    assert rows(pool, "select ev_id, ev_data from pgque.dlq_inspect('q')") == [(first, "new")]


def test_a_keyed_send_with_a_snapshot_older_than_retention_is_refused(
    pool: Connection, own_dsn: str, transaction: Transaction
) -> None:
    configure(pool, "q", retention_period="10 minutes")
    sender = transaction(dsn=own_dsn)
    first = replaced(pool, sender)
    old = transaction("repeatable read", own_dsn)
    assert receive(pool, "q") == []
    sender.rollback()
    move_clock(pool, "1 hour")
    value(pool, "select pgque.maint_retain('q')")
    assert list(dead_letters(pool, "q")) == [first]
    refused("40001", lambda: post(old, "q", "new", key="k"))
    old.rollback()
    post(pool, "q", "new", key="k")
    assert everything(pool) == ["new"]


@pytest.mark.parametrize("policy", ["dead_letter", "drop"])
def test_a_sender_with_a_snapshot_older_than_retention_is_refused(
    pool: Connection, own_dsn: str, transaction: Transaction, policy: str
) -> None:
    configure(pool, "q", drop_policy=policy, retention_period="10 minutes")
    post(pool, "q", "old", key="k")
    tick(pool, "q")
    move_clock(pool, "1 hour")
    send(pool, "q", "young")
    tick(pool, "q")
    sender = transaction("repeatable read", own_dsn)
    while value(pool, "select pgque.maint_retain('q')"):
        pass
    refused("40001", lambda: post(sender, "q", "new", key="k"))
    sender.rollback()
    post(pool, "q", "new", key="k")
    assert sorted(map(str, everything(pool))) == ["new", "young"]


def test_a_window_with_more_keys_than_a_transaction_locks_is_read_and_loses_nothing(
    pool: Connection, own_dsn: str, transaction: Transaction
) -> None:
    count = 3000
    value(
        pool,
        "select pgque.send_batch('q', 't', array_agg(g::text), keys => array_agg('k' || g))"
        " from generate_series(1, %s) g",
        count,
    )
    tick(pool, "q")
    pool.execute("set statement_timeout = '30s'")
    sender = transaction(dsn=own_dsn)
    post(sender, "q", "new", key="k7")
    batch = value(pool, NEXT)
    got = [body for _, body in rows(pool, EVENTS, batch)]
    assert "7" not in got
    assert value(pool, "select pgque.finish_batch(%s)", batch) == 1
    sender.commit()
    for _ in range(5):
        got += everything(pool)
    assert sorted(map(str, got)) == sorted([str(n) for n in range(1, count + 1) if n != 7] + ["new"])


@pytest.mark.parametrize("how", ["receive", "get_batch_events", "get_batch_cursor"])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_whole_window_leaves_out_what_was_purged_or_has_expired(
    pool: Connection, how: str, keyed: bool
) -> None:
    options = {"key": "gone"} if keyed else {}
    post(pool, "q", "expired", ttl="1 minute", **options)
    kept = send(pool, "q", "kept")
    if keyed:
        post(pool, "q", "purged", key="purged")
        assert value(pool, "select pgque.purge_key('q', 'purged')") == 1
    tick(pool, "q")
    move_clock(pool, "1 hour")
    batch = value(pool, NEXT)
    if how == "receive":
        got = [m.msg_id for m in receive(pool, "q")]
    elif how == "get_batch_events":
        got = column(pool, "select ev_id from pgque.get_batch_events(%s)", batch)
    else:
        with pool.transaction():
            got = column(pool, "select ev_id from pgque.get_batch_cursor(%s, 'x', 100)", batch)
    assert got == [kept]
    assert (
        value(pool, "select m.value from pgque.metrics() m where m.metric = 'pgque_messages_expired_total'")
        == 1
    )
