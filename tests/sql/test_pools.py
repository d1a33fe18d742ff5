"""Workers of one consumer: what each gets, for how long, and what comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    extend,
    forced_tick,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    receive,
    receive_coop,
    refused,
    rotate,
    rows,
    send_many,
    set_visibility,
    subscribe,
    take,
    tick,
    value,
    work_off,
)


def test_of_ten_messages_in_one_window_w1_takes_one_w2_the_other_nine_and_w3_none(
    conn: Connection, subscribed: str
) -> None:
    sent = offer(conn, subscribed, 10)
    first = take(conn, subscribed, "w1", 1)
    second = take(conn, subscribed, "w2", 100)
    assert ids(first) == sent[:1]
    assert ids(second) == sent[1:]
    assert take(conn, subscribed, "w3") == []
    assert {m.receive_count for m in first + second} == {1}
    assert {m.queue for m in first + second} == {subscribed}
    assert first[0].batch_id != second[0].batch_id
    assert ack(conn, second[0].batch_id) == 1
    assert ack(conn, first[0].batch_id) == 1
    assert ack(conn, first[0].batch_id) == 0
    assert work_off(conn, subscribed) == []


@pytest.mark.parametrize("timeout", ["0", "-1 second"])
def test_a_visibility_timeout_that_is_not_positive_is_refused(
    conn: Connection, subscribed: str, timeout: str
) -> None:
    sent = offer(conn, subscribed, 2)
    refused("PQ005", take, conn, subscribed, "w1", 10, timeout)
    refused("PQ005", configure_timeout, conn, subscribed, timeout)
    assert ids(take(conn, subscribed)) == sent


def configure_timeout(conn: Connection, queue: str, timeout: str) -> None:
    configure(conn, queue, visibility_timeout=timeout)


def test_a_visibility_timeout_without_a_worker_is_refused(conn: Connection, subscribed: str) -> None:
    call = "select * from pgque.receive(%s, 'c', 10, visibility_timeout => '10 s')"
    refused("PQ005", rows, conn, call, subscribed)


@pytest.mark.parametrize("worker", ["", "w" * 1001])
def test_a_worker_needs_a_name_of_a_sane_length(conn: Connection, subscribed: str, worker: str) -> None:
    refused("PQ004", take, conn, subscribed, worker)


def test_a_pool_is_not_read_without_a_worker(conn: Connection, subscribed: str) -> None:
    sent = offer(conn, subscribed, 2)
    take(conn, subscribed, "w1", 1)
    error = refused("PQ005", receive, conn, subscribed)
    assert subscribed in str(error)
    assert "worker" in str(error.diag.message_hint)
    error = refused("PQ006", receive_coop, conn, subscribed, "a")
    assert "worker" in str(error.diag.message_hint)
    assert ids(take(conn, subscribed)) == sent[1:]


def test_a_consumer_with_subconsumers_is_not_a_pool(conn: Connection, queue: str) -> None:
    receive_coop(conn, queue, "a")
    sent = offer(conn, queue, 1)
    error = refused("PQ011", take, conn, queue)
    assert "receive_coop" in str(error.diag.message_hint)
    assert ids(take(conn, queue, "a")) == sent


@pytest.mark.parametrize("end", ["open", "acked", "acked by the worker"])
def test_a_consumer_that_received_on_its_own_is_refused_to_workers(
    conn: Connection, subscribed: str, end: str
) -> None:
    sent = offer(conn, subscribed, 6)
    batch = receive(conn, subscribed, count=2)[0].batch_id
    if end == "acked":
        assert ack(conn, batch) == 1
    by_worker = batch if end == "acked by the worker" else None
    error = refused("PQ006", lambda: take(conn, subscribed, "w1", ack_batch=by_worker))
    assert "Subscribe another consumer" in (error.diag.message_hint or "")
    # Nothing was changed, and the consumer goes on.
    assert ids(receive(conn, subscribed)) == (sent[2:] if end == "acked" else sent[:2])


def test_the_way_that_the_hint_names_gives_a_consumer_to_workers_where_it_stands(
    conn: Connection, subscribed: str
) -> None:
    offer(conn, subscribed, 2)
    assert ack(conn, receive(conn, subscribed)[0].batch_id) == 1
    sent = offer(conn, subscribed, 3)
    hint = refused("PQ006", take, conn, subscribed).diag.message_hint or ""
    assert value(conn, "select " + hint.split("select ")[1]) == 1
    assert ids(take(conn, subscribed)) == sent


def test_a_worker_needs_a_known_queue_and_consumer(conn: Connection, subscribed: str) -> None:
    assert "queue not found" in str(refused("PQ001", take, conn, "no " + subscribed))
    error = refused("PQ011", take, conn, subscribed, "w1", 1, None, "nobody")
    assert "not subscriber to queue" in str(error)


@pytest.mark.parametrize("worker", ["w1", "w2"])
def test_messages_of_a_silent_worker_are_redelivered_to_any_worker_after_30_seconds(
    pool: Connection, worker: str
) -> None:
    sent = offer(pool, "q", 3)
    lost = take(pool, "q", "w1", 2)
    move_clock(pool, "29 seconds")
    assert ids(take(pool, "q", worker)) == sent[2:]
    move_clock(pool, "31 seconds")
    again = take(pool, "q", worker)
    assert ids(again) == sent[:2]
    assert {m.receive_count for m in again} == {2}
    assert {m.retry_count for m in again} == {0}
    assert {m.batch_id for m in again}.isdisjoint({lost[0].batch_id})
    assert [(m.payload, m.type, m.created_at) for m in again] == [
        (m.payload, m.type, m.created_at) for m in lost
    ]


def test_the_timeout_of_a_call_wins_over_the_queues_and_that_over_the_default(pool: Connection) -> None:
    sent = offer(pool, "q", 3)
    configure(pool, "q", visibility_timeout="1 minute")
    take(pool, "q", "w1", 1)
    take(pool, "q", "w2", 1, "5 minutes")
    value(pool, "select pgque.set_default_config('visibility_timeout', '3 minutes')")
    configure(pool, "q", visibility_timeout=None)
    take(pool, "q", "w3", 1)
    move_clock(pool, "59 seconds")
    assert take(pool, "q", "w4") == []
    move_clock(pool, "61 seconds")
    assert ids(take(pool, "q", "w4", timeout="1 day")) == sent[:1]
    move_clock(pool, "181 seconds")
    assert ids(take(pool, "q", "w4", timeout="1 day")) == sent[2:]
    move_clock(pool, "301 seconds")
    assert ids(take(pool, "q", "w4", timeout="1 day")) == sent[1:2]


def test_a_message_that_was_not_delivered_has_no_receive_count(pool: Connection) -> None:
    sent = offer(pool, "q", 4)
    take(pool, "q", "w1", 1)
    for _ in range(3):
        take(pool, "q", "w2", 1, "1 day")
    assert take(pool, "q", "w3") == []
    later = offer(pool, "q", 2)
    move_clock(pool, "1 minute")
    counts = {m.msg_id: m.receive_count for m in take(pool, "q", "w3") + take(pool, "q", "w3")}
    assert counts == {sent[0]: 2, later[0]: 1, later[1]: 1}


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_worker_receives_in_read_committed_only(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    sent = offer(conn, subscribed, 1)
    old = transaction(isolation)
    error = refused("25000", take, old, subscribed)
    assert "READ COMMITTED" in str(error)
    assert ids(take(conn, subscribed)) == sent


def test_taking_the_next_batch_with_a_lost_one_to_ack_takes_it_all_the_same(pool: Connection) -> None:
    sent = offer(pool, "q", 2)
    lost = take(pool, "q", "w1", 1)
    move_clock(pool, "1 minute")
    assert ids(take(pool, "q", "w2", 1)) == sent[:1]
    assert ids(take(pool, "q", "w1", 1, ack_batch=lost[0].batch_id)) == sent[1:]


def test_acking_the_batch_of_another_queue_takes_nothing_from_this_one(
    conn: Connection, subscribed: str, new_queue: Callable[..., str]
) -> None:
    other = new_queue()
    subscribe(conn, other)
    sent = offer(conn, subscribed, 3)
    there = offer(conn, other, 1)
    foreign = take(conn, other)
    assert ids(foreign) == there
    try:
        got = ids(take(conn, subscribed, "w1", 3, ack_batch=foreign[0].batch_id))
    except Exception:
        got = ids(take(conn, subscribed, "w1", 3))
    assert got == sent


def test_a_pool_that_is_unsubscribed_leaves_nothing_behind(pool: Connection) -> None:
    before = value(pool, "select count(*) from pgque.retry_queue")
    offer(pool, "q", 6)
    batch = take(pool, "q", "w1", 3)
    nack(pool, batch[0], "1 hour")
    move_clock(pool, "1 minute")
    again = take(pool, "q", "w2", 1)
    assert value(pool, "select pgque.unsubscribe('q', 'c')") >= 1
    assert ack(pool, batch[0].batch_id) == 0
    assert ack(pool, again[0].batch_id) == 0
    assert value(pool, "select count(*) from pgque.retry_queue") == before
    assert rows(pool, "select * from pgque.list_workers()") == []
    assert extend(pool, again[0].batch_id, "1 minute") == 0
    subscribe(pool, "q")
    sent = offer(pool, "q", 2)
    assert [(m.msg_id, m.receive_count) for m in work_off(pool, "q")] == [(i, 1) for i in sent]


def test_leases_survive_any_number_of_rotations(pool: Connection) -> None:
    sent = offer(pool, "q", 6)
    kept = take(pool, "q", "w1", 2, "1 day")
    lost = take(pool, "q", "w2", 2, "1 minute")
    for _ in range(7):
        offer(pool, "q", 20)
        work_off(pool, "q", "w3")
        forced_tick(pool, "q")
        rotate(pool, "q")
        value(pool, "select pgque.maint()")
    assert extend(pool, kept[0].batch_id, "1 second") == 2
    move_clock(pool, "2 minutes")
    for _ in range(4):
        forced_tick(pool, "q")
        rotate(pool, "q")
        value(pool, "select pgque.maint()")
    assert sorted(ids(work_off(pool, "q", "w3"))) == sent[2:4]
    assert ack(pool, lost[0].batch_id) == 0
    assert outcome(pool, "ack", kept[0].batch_id, ids(kept)) == dict.fromkeys(sent[:2])


def test_a_silent_workers_messages_do_not_keep_tables_from_being_reclaimed(pool: Connection) -> None:
    sent = offer(pool, "q", 2)
    take(pool, "q", "w1", 2, "1 minute")
    rotations = 0
    for number in range(8):
        move_clock(pool, f"{2 + number} minutes")
        offer(pool, "q", 20)
        while batch := take(pool, "q", "w2", 100, "1 day"):
            fresh = [i for i in ids(batch) if i not in sent]
            if fresh:
                outcome(pool, "ack", batch[0].batch_id, fresh)
        forced_tick(pool, "q")
        rotations += rotate(pool, "q")
    assert rotations >= 6
    move_clock(pool, "3 days")
    assert sorted(ids(work_off(pool, "q", "w3"))) == sent


def test_a_window_of_20000_messages_is_shared_without_loss(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 20_000)
    tick(conn, subscribed)
    got: list[int] = []
    batches: list[int] = []
    number = 0
    while batch := take(conn, subscribed, f"w{number % 3}", 997, "1 hour"):
        number += 1
        got += ids(batch)
        batches.append(batch[0].batch_id)
    assert got == sent
    assert [ack(conn, b) for b in batches] == [1] * len(batches)
    assert len(set(batches)) == len(batches)


def test_extending_and_hiding_are_for_the_batches_of_workers(conn: Connection, subscribed: str) -> None:
    offer(conn, subscribed, 2)
    (batch, *_) = receive(conn, subscribed)
    refused("PQ005", extend, conn, batch.batch_id, "1 minute")
    refused("PQ005", set_visibility, conn, batch.batch_id, "1 minute")
    assert ack(conn, batch.batch_id) == 1
