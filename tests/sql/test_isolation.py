"""Consumers whose snapshot is older than what happened to their queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    Message,
    ack,
    drain,
    forced_tick,
    ids,
    move_clock,
    nack_ids,
    offer,
    outcome,
    pump,
    receive,
    receive_coop,
    refused,
    release,
    rotate,
    rows,
    send,
    send_many,
    set_visibility,
    subscribe,
    take,
    tick,
    value,
)

OLD = pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])


@OLD
def test_an_ack_from_a_snapshot_older_than_another_ack_is_refused(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent = send_many(conn, subscribed, 4)
    tick(conn, subscribed)
    batch = receive(conn, subscribed, count=2)[0].batch_id
    stale = transaction(isolation)
    assert ack(conn, batch) == 1
    refused("40001", ack, stale, batch)
    stale.execute("rollback")
    assert ack(stale, batch) == 0
    assert drain(conn, subscribed) == sent[2:]


@OLD
def test_a_receive_from_an_old_snapshot_delivers_no_second_batch(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent = send_many(conn, subscribed, 4)
    tick(conn, subscribed)
    stale = transaction(isolation)
    batch = receive(conn, subscribed, count=2)
    refused("40001", receive, stale, subscribed, "c", 2)
    stale.execute("rollback")
    assert receive(stale, subscribed, count=2) == batch
    ack(conn, batch[0].batch_id)
    assert drain(conn, subscribed) == sent[2:]


@OLD
def test_a_batch_read_with_an_old_snapshot_can_not_be_acked_twice(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent = send_many(conn, subscribed, 4)
    tick(conn, subscribed)
    receive(conn, subscribed, count=2)
    stale = transaction(isolation)
    assert drain(conn, subscribed, count=2) == sent
    again = receive(stale, subscribed)
    assert [m.msg_id for m in again] == sent[:2]
    refused("40001", ack, stale, again[0].batch_id)


@OLD
def test_a_nack_from_an_old_snapshot_fails_no_message_twice(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent = send_many(conn, subscribed, 2)
    tick(conn, subscribed)
    batch = receive(conn, subscribed)[0].batch_id
    stale = transaction(isolation)
    nack_ids(conn, batch, sent[:1])
    ack(conn, batch)
    with pytest.raises(psycopg.errors.SerializationFailure):
        nack_ids(stale, batch, sent[:1])
        ack(stale, batch)
    stale.execute("rollback")
    assert (
        value(
            conn,
            "select m.value from pgque.metrics() as m where m.metric = 'pgque_queue_retries' and m.queue = %s",
            subscribed,
        )
        == 1
    )


@OLD
def test_a_nack_from_a_snapshot_older_than_the_batchs_ack_is_refused(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent = send_many(conn, subscribed, 2)
    tick(conn, subscribed)
    batch = receive(conn, subscribed)[0].batch_id
    stale = transaction(isolation)
    ack(conn, batch)
    refused("40001", nack_ids, stale, batch, sent[:1])


@OLD
def test_an_ack_from_a_snapshot_older_than_a_move_to_the_retry_queue_is_refused(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    offer(conn, subscribed, 2)
    batch = take(conn, subscribed, "w", 2)
    stale = transaction(isolation)
    set_visibility(conn, batch[0].batch_id, "1 hour")
    refused("40001", ack, stale, batch[0].batch_id)
    stale.execute("rollback")
    assert [ack(stale, batch[0].batch_id) for _ in range(2)] == [1, 0]


@OLD
def test_a_reclaim_from_an_old_snapshot_releases_no_message_that_was_acknowledged(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    offer(conn, subscribed, 3)
    batch = take(conn, subscribed, "w", 3)
    stale = transaction(isolation)
    outcome(conn, "ack", batch[0].batch_id, ids(batch)[:1])
    reclaim = "select pgque.reclaim(%s, 'c')"
    refused("40001", value, stale, reclaim, subscribed)
    stale.execute("rollback")
    assert value(stale, reclaim, subscribed) == 1
    assert ids(take(conn, subscribed, "w", 3)) == ids(batch)[1:]


@OLD
@pytest.mark.parametrize("count", [1, 2])
def test_a_message_that_is_nacked_again_under_another_isolation_is_retried_once(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str, count: int
) -> None:
    sent = send_many(conn, subscribed, 3)
    tick(conn, subscribed)
    batch = receive(conn, subscribed)[0].batch_id
    nack_ids(conn, batch, sent[:count])
    again = transaction(isolation)
    assert nack_ids(again, batch, sent[:count]) == [(n, False, "settled already") for n in sent[:count]]
    again.execute("commit")
    ack(conn, batch)
    assert pump(conn) == count
    tick(conn, subscribed)
    assert [(m.msg_id, m.retry_count) for m in receive(conn, subscribed)] == [(n, 1) for n in sent[:count]]


@OLD
def test_an_old_snapshot_after_rotations_sees_no_wrong_message(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    send_many(conn, subscribed, 4)
    tick(conn, subscribed)
    stale = transaction(isolation)
    drain(conn, subscribed)
    for _ in range(4):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
    try:
        assert receive(stale, subscribed) == []
        stale.execute("commit")
    except psycopg.errors.SerializationFailure:
        stale.execute("rollback")
    last = send(conn, subscribed)
    tick(conn, subscribed)
    assert drain(conn, subscribed) == [last]


@OLD
def test_workers_with_old_snapshots_get_no_message_of_another(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent = send_many(conn, subscribed, 6)
    for worker in ("a", "b"):
        value(conn, "select pgque.register_subconsumer(%s, 'c', %s, true)", subscribed, worker)
    tick(conn, subscribed)
    stale = transaction(isolation)
    first = receive_coop(conn, subscribed, "a", 2)
    assert [m.msg_id for m in first] == sent[:2]
    refused("40001", receive_coop, stale, subscribed, "b", 2)
    stale.execute("rollback")
    assert [m.msg_id for m in receive_coop(stale, subscribed, "b", 2)] == sent[2:4]


@OLD
def test_subscribing_from_a_snapshot_older_than_a_rotation_starts_at_a_tick_that_exists(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    stale = transaction(isolation)
    for _ in range(4):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
    try:
        value(stale, "select pgque.subscribe(%s, 'late')", subscribed)
        stale.execute("commit")
    except psycopg.Error as error:
        assert error.sqlstate in ("40001", "PQ005")
        return
    last = send(conn, subscribed)
    tick(conn, subscribed)
    assert last in drain(conn, subscribed, "late")


@OLD
def test_a_transaction_of_its_own_may_receive_and_ack_in_any_isolation(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent = send_many(conn, subscribed, 9)
    tick(conn, subscribed)
    got: list[int] = []
    while True:
        one = transaction(isolation)
        batch = receive(one, subscribed, count=2)
        if not batch:
            break
        got += [m.msg_id for m in batch]
        ack(one, batch[0].batch_id)
        one.execute("commit")
    assert got == sent


@OLD
def test_a_tick_is_refused_in_a_transaction_with_an_old_snapshot(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    send(conn, subscribed)
    for call in (
        "select pgque.ticker(%s)",
        "select pgque.ticker() where %s::text is not null",
        "select pgque.maint() where %s::text is not null",
        "select pgque.maint_rotate_tables_step1(%s)",
    ):
        old = transaction(isolation)
        error = refused("25000", rows, old, call, subscribed)
        assert "READ COMMITTED" in str(error)
        assert error.diag.message_hint
    assert tick(conn, subscribed) is not None


def _held_by_a(own: Connection) -> tuple[list[int], list[Message]]:
    """Make a queue with the subconsumers a and b, of which a has a batch of three; what was sent, and the batch."""
    value(own, "select pgque.create_queue('q')")
    for worker in ("a", "b"):
        value(own, "select pgque.register_subconsumer('q', 'c', %s)", worker)
    sent = send_many(own, "q", 3)
    tick(own, "q")
    batch = receive_coop(own, "q", "a")
    return sent, batch


@OLD
def test_a_take_over_from_an_old_snapshot_delivers_no_acknowledged_message(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent, batch = _held_by_a(own)
    move_clock(own, "2 minutes")
    stale = transaction(isolation, own_dsn)
    nack_ids(own, batch[0].batch_id, sent[:1], "1 hour")
    try:
        taken = receive_coop(stale, "q", "b", 100, "1 minute")
        stale.execute("commit")
    except psycopg.errors.SerializationFailure:
        stale.execute("rollback")
        move_clock(own, "4 minutes")  # the nack was a sign of life
        taken = receive_coop(stale, "q", "b", 100, "1 minute")
    assert [m.msg_id for m in taken] == sent[1:]


@OLD
def test_outcomes_taken_over_from_an_old_snapshot_outlive_the_journals_turn(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent, batch = _held_by_a(own)
    nack_ids(own, batch[0].batch_id, sent[:1], "1 hour")
    move_clock(own, "2 minutes")
    old = transaction(isolation, own_dsn)
    assert [m.msg_id for m in receive_coop(old, "q", "b", 100, "1 minute")] == sent[1:]
    old.execute("commit")
    own.execute("select pgque._rotate_journal(journal_cur) from pgque.journal")
    value(own, "select pgque.maint_tables()")
    own.execute("truncate pgque.position_0, pgque.settled_0")
    assert [m.msg_id for m in receive_coop(own, "q", "b")] == sent[1:]


@OLD
def test_who_lost_its_batch_to_an_old_snapshot_hears_no_outcome(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent, batch = _held_by_a(own)
    move_clock(own, "2 minutes")
    old = transaction(isolation, own_dsn)
    assert [m.msg_id for m in receive_coop(old, "q", "b", 100, "1 minute")] == sent
    old.execute("commit")
    answers = nack_ids(own, batch[0].batch_id, sent)
    assert [reason for _, _, reason in answers] == ["batch not open"] * 3
    assert value(own, "select count(*) from pgque.settled where set_ev_id = any(%s)", sent) == 0


@OLD
def test_an_old_snapshot_meets_a_position_that_was_written_while_the_journal_was_rotated(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    transaction: Callable[..., Connection],
    isolation: str,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send_many(own, "q", 3)
    tick(own, "q")
    blocker = transaction("read committed", own_dsn)
    blocker.execute("lock table pgque.position_0 in share mode")
    # It has asked which leaf is written, and waits to write it ...
    writer = background(lambda c: receive(c, "q"), connect(own_dsn))
    wait_for_lock(writer.pid)
    # ... while the journal turns to the other one.
    own.execute("update pgque.journal set journal_cur = 1")
    old = transaction(isolation, own_dsn)
    blocker.execute("rollback")
    batch = writer.result()
    refused("40001", receive, old, "q")
    assert ack(own, batch[0].batch_id) == 1
    assert receive(own, "q") == []


def _consumer(conn: Connection, worker: str | None) -> Callable[[Connection], Any]:
    """Make a queue with three messages and a consumer of it, alone or with a worker; how it takes them."""
    value(conn, "select pgque.create_queue('q')")
    if worker is None:
        subscribe(conn, "q")
    else:
        value(conn, "select pgque.register_subconsumer('q', 'c', %s)", worker)
    send_many(conn, "q", 3)
    tick(conn, "q")
    return lambda c: receive(c, "q") if worker is None else receive_coop(c, "q", worker)


@pytest.mark.parametrize("worker", [None, "w"])
def test_a_batch_is_stored_though_the_journal_was_rotated_while_its_rows_were_waited_for(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    transaction: Callable[..., Connection],
    worker: str | None,
) -> None:
    take = _consumer(own, worker)
    blocker = transaction("read committed", own_dsn)
    blocker.execute("lock table pgque.event_1_0 in access exclusive mode")
    # It knows which leaf is written, and holds its locks ...
    writer = background(take, connect(own_dsn))
    wait_for_lock(writer.pid)
    # ... while the journal turns, and what others have in the old leaf is brought over.
    own.execute("select pgque._rotate_journal(journal_cur) from pgque.journal")
    value(own, "select pgque.maint_tables()")
    blocker.execute("rollback")
    batch = writer.result()
    assert [m.payload for m in batch] == [m.payload for m in take(own)]
    for _ in range(3):
        value(own, "select pgque.maint_tables()")
    assert value(own, "select pgque._journal_size(1 - journal_cur) from pgque.journal") == 0
    assert take(own) == batch
    assert ack(own, batch[0].batch_id) == 1
    assert take(own) == []


@pytest.mark.parametrize("worker", [None, "w"])
def test_a_batch_that_was_acked_while_the_journal_rotated_is_not_redelivered(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    transaction: Callable[..., Connection],
    worker: str | None,
) -> None:
    take = _consumer(own, worker)
    batch = take(own)
    holder = transaction("read committed", own_dsn)
    holder.execute("select from pgque.subscriber order by sub_id for no key update")
    asking = background(take, connect(own_dsn))
    wait_for_lock(asking.pid)
    own.execute("select pgque._rotate_journal(journal_cur) from pgque.journal")
    assert ack(holder, batch[0].batch_id) == 1
    holder.execute("commit")
    assert asking.result() == []
    assert take(own) == []


def test_an_ack_that_was_open_while_its_delivery_went_to_the_other_leaf_counts(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    for consumer in ("c", "other"):
        subscribe(own, "q", consumer)
    sent = offer(own, "q", 3)
    batch = take(own, "q", "w1", 2, "1 minute")[0].batch_id
    acking = transaction(dsn=own_dsn)
    assert ack(acking, batch) == 1
    own.execute("select pgque._rotate_journal(journal_cur) from pgque.journal")
    # Until this transaction ends, maintenance only brings over what is needed of the old leaf.
    reading = transaction("repeatable read", own_dsn)
    assert len(receive(reading, "q", "other")) == 3
    value(own, "select pgque.maint_tables()")
    acking.execute("commit")
    reading.execute("rollback")
    move_clock(own, "1 hour")
    assert ids(take(own, "q", "w2")) == sent[2:]
    for _ in range(3):
        value(own, "select pgque.maint_tables()")
    assert value(own, "select pgque._journal_size(1 - journal_cur) from pgque.journal") == 0
    assert ack(own, batch) == 0
    assert release(own, batch) == 0
    assert take(own, "q", "w1") == []
