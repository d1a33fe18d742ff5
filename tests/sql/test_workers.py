"""Several workers share one consumer's position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    column,
    dead_tuples,
    drain,
    forced_tick,
    move_clock,
    nack,
    nack_ids,
    outcome,
    pump,
    receive,
    receive_coop,
    refused,
    rotate,
    rows,
    send,
    send_many,
    subscribe,
    take,
    tick,
    value,
)

REGISTER = "select pgque.register_subconsumer(%s, 'c', %s)"
NEXT = "select pgque.next_batch(%s, 'c', %s)"
NEXT_OR_TAKE_OVER = "select pgque.next_batch(%s, 'c', %s, '1 minute')"
EVENTS = "select ev_id from pgque.get_batch_events(%s)"
UNREGISTER = "select pgque.unregister_subconsumer(%s, 'c', %s, %s)"


def test_workers_in_parallel_deliver_every_message_once(
    conn: Connection, background: Callable[..., Any], queue: str
) -> None:
    for worker in "abcd":
        value(conn, REGISTER, queue, worker)
    sent = send_many(conn, queue, 400)
    tick(conn, queue)
    sent += send_many(conn, queue, 100)
    tick(conn, queue)

    def work(worker: str) -> Callable[[Connection], list[int]]:
        def run(c: Connection) -> list[int]:
            got: list[int] = []
            while batch := receive_coop(c, queue, worker, 7):
                got += [m.msg_id for m in batch]
                assert ack(c, batch[0].batch_id) == 1
            return got

        return run

    jobs = [background(work(w)) for w in "abcd"]
    got = [i for job in jobs for i in job.result()]
    assert sorted(got) == sent


def test_registering_makes_consumer_and_worker_known_once(conn: Connection, queue: str) -> None:
    assert value(conn, REGISTER, queue, "a") == 1
    assert value(conn, REGISTER, queue, "a") == 0
    assert value(conn, "select pgque.subscribe_subconsumer(%s, 'c', 'b')", queue) == 1
    assert value(conn, "select pgque.unsubscribe_subconsumer(%s, 'c', 'b')", queue) == 1
    assert value(conn, UNREGISTER, queue, "b", 0) == 0
    refused("PQ001", rows, conn, REGISTER, "no " + queue, "a")


def test_plain_calls_on_a_consumer_with_workers_name_the_right_call(conn: Connection, queue: str) -> None:
    value(conn, REGISTER, queue, "a")
    send(conn, queue)
    tick(conn, queue)
    for call in (
        "select * from pgque.receive(%s, 'c')",
        "select pgque.next_batch(%s, 'c')",
        "select * from pgque.next_batch_info(%s, 'c')",
        "select * from pgque.next_batch_custom(%s, 'c', null, null, null)",
    ):
        error = refused("PQ005", rows, conn, call, queue)
        assert "receive_coop" in str(error.diag.message_hint)
        assert queue in str(error)


def test_a_consumer_that_reads_on_its_own_gets_workers_only_when_asked(
    conn: Connection, subscribed: str
) -> None:
    sent = send_many(conn, subscribed, 5)
    tick(conn, subscribed)
    first = receive(conn, subscribed, count=2)
    ack(conn, first[0].batch_id)
    opened = receive(conn, subscribed, count=2)
    refused("PQ006", rows, conn, REGISTER, subscribed, "a")
    refused("PQ006", receive_coop, conn, subscribed, "a")
    assert value(conn, "select pgque.register_subconsumer(%s, 'c', 'a', true)", subscribed) == 1
    assert ack(conn, opened[0].batch_id) == 0
    for expected in (sent[2:4], sent[4:]):
        batch = receive_coop(conn, subscribed, "a")
        assert [m.msg_id for m in batch] == expected
        assert ack(conn, batch[0].batch_id) == 1


def test_converting_keeps_the_outcome_of_nacked_messages(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 3)
    tick(conn, subscribed)
    batch = receive(conn, subscribed)
    nack(conn, batch[1])
    value(conn, "select pgque.register_subconsumer(%s, 'c', 'a', true)", subscribed)
    got: list[int] = []
    for _ in range(3):
        pump(conn)
        tick(conn, subscribed)
        while again := receive_coop(conn, subscribed, "a"):
            got += [m.msg_id for m in again]
            ack(conn, again[0].batch_id)
    assert set(got) == set(sent)


def test_converting_gives_the_open_batch_to_the_subconsumer_with_its_outcomes(
    conn: Connection, subscribed: str
) -> None:
    sent = send_many(conn, subscribed, 5)
    tick(conn, subscribed)
    opened = receive(conn, subscribed, count=3)
    assert outcome(conn, "ack", opened[0].batch_id, sent[:1]) == {sent[0]: None}
    assert value(conn, "select pgque.register_subconsumer(%s, 'c', 'b', true)", subscribed) == 1
    assert value(conn, REGISTER, subscribed, "a") == 1
    assert ack(conn, opened[0].batch_id) == 0
    assert [m.msg_id for m in receive_coop(conn, subscribed, "a")] == sent[3:]
    batch = receive_coop(conn, subscribed, "b")
    assert [(m.msg_id, m.receive_count) for m in batch] == [(i, 1) for i in sent[1:3]]
    assert ack(conn, batch[0].batch_id) == 1
    assert receive_coop(conn, subscribed, "b") == []


def test_a_silent_worker_loses_its_batch_to_another_and_its_token_is_dead(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for worker in ("a", "b"):
        value(own, REGISTER, "q", worker)
    sent = send_many(own, "q", 4)
    tick(own, "q")
    lost = receive_coop(own, "q", "a", 2)
    nack(own, lost[0], "1 hour")
    assert receive_coop(own, "q", "b", 100, "1 minute")[0].msg_id == sent[2]
    ack(own, receive_coop(own, "q", "b")[0].batch_id)
    assert receive_coop(own, "q", "b", 100, "1 minute") == []
    move_clock(own, "2 minutes")
    taken = receive_coop(own, "q", "b", 100, "1 minute")
    assert [(m.msg_id, m.receive_count) for m in taken] == [(sent[1], 2)]
    assert taken[0].batch_id != lost[0].batch_id
    assert ack(own, lost[0].batch_id) == 0
    refused("PQ012", nack, own, lost[1])
    assert nack_ids(own, lost[0].batch_id, [sent[1]]) == [(sent[1], False, "batch not open")]
    assert receive_coop(own, "q", "a") == []
    assert ack(own, taken[0].batch_id) == 1
    value(own, "select pgque.retry_now('q', 'c')")
    assert [m.msg_id for m in receive_coop(own, "q", "a")] == [sent[0]]


def test_a_touched_worker_keeps_its_batch(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for worker in ("a", "b"):
        value(own, REGISTER, "q", worker)
    send_many(own, "q", 2)
    tick(own, "q")
    held = receive_coop(own, "q", "a")
    move_clock(own, "50 seconds")
    assert value(own, "select pgque.touch_subconsumer('q', 'c', 'a')") == 1
    move_clock(own, "100 seconds")
    assert receive_coop(own, "q", "b", 100, "1 minute") == []
    assert receive_coop(own, "q", "a", 100, "1 minute") == held
    assert ack(own, held[0].batch_id) == 1
    error = refused("PQ011", rows, own, "select pgque.touch_subconsumer('q', 'c', 'z')")
    assert "z" in str(error)


def test_unregistering_a_worker_that_holds_a_batch_needs_a_word(conn: Connection, queue: str) -> None:
    for worker in ("a", "b"):
        value(conn, REGISTER, queue, worker)
    sent = send_many(conn, queue, 4)
    tick(conn, queue)
    batch = receive_coop(conn, queue, "a", 2)
    error = refused("PQ006", rows, conn, UNREGISTER, queue, "a", 0)
    assert queue in str(error)
    assert ack(conn, receive_coop(conn, queue, "b")[0].batch_id) == 1
    assert value(conn, UNREGISTER, queue, "a", 1) == 1
    assert ack(conn, batch[0].batch_id) == 0
    pump(conn)
    tick(conn, queue)
    again = receive_coop(conn, queue, "b")
    assert [(m.msg_id, m.retry_count) for m in again] == [(i, 1) for i in sent[:2]]


def test_unregistering_with_no_retries_left_makes_dead_letters(conn: Connection, queue: str) -> None:
    value(conn, "select pgque.set_queue_config(%s, 'max_retries', '0')", queue)
    value(conn, REGISTER, queue, "a")
    sent = send_many(conn, queue, 2)
    tick(conn, queue)
    receive_coop(conn, queue, "a")
    assert value(conn, UNREGISTER, queue, "a", 1) == 1
    assert sorted(r[0] for r in rows(conn, "select ev_id from pgque.dlq_inspect(%s)", queue)) == sent


def test_a_workers_open_batch_holds_its_table(conn: Connection, queue: str) -> None:
    for worker in ("a", "b"):
        value(conn, REGISTER, queue, worker)
    sent = send_many(conn, queue, 4)
    tick(conn, queue)
    held = receive_coop(conn, queue, "a", 2)
    for _ in range(5):
        while batch := receive_coop(conn, queue, "b"):
            ack(conn, batch[0].batch_id)
        send(conn, queue)
        forced_tick(conn, queue)
        rotate(conn, queue)
    assert receive_coop(conn, queue, "a") == held
    assert [m.msg_id for m in held] == sent[:2]


def test_unsubscribing_removes_the_workers_too(conn: Connection, queue: str) -> None:
    for worker in ("a", "b"):
        value(conn, REGISTER, queue, worker)
    assert value(conn, "select pgque.unsubscribe(%s, 'c')", queue) == 3
    subscribe(conn, queue)
    sent = send(conn, queue)
    tick(conn, queue)
    assert drain(conn, queue) == [sent]


def test_consumer_info_lists_workers_and_their_batches(conn: Connection, queue: str) -> None:
    value(conn, REGISTER, queue, "a")
    send(conn, queue)
    tick(conn, queue)
    (message,) = receive_coop(conn, queue, "a")
    found = {
        name: (batch, role)
        for name, batch, role in rows(
            conn, "select consumer_name, current_batch, role from pgque.get_consumer_info(%s)", queue
        )
    }
    assert found == {"c": (None, "coop_main"), "c.a": (message.batch_id, "coop_member")}


def test_a_worker_asks_while_the_consumer_is_given_subconsumers_and_no_message_is_lost(
    conn: Connection,
    queue: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    subscribe(conn, queue)
    sent = send_many(conn, queue, 100)
    tick(conn, queue)
    giver = connect(autocommit=False)
    for worker in ("w", "s"):
        value(giver, "select pgque.register_subconsumer(%s, 'c', %s, true)", queue, worker)
    job = background(lambda c: take(c, queue, "w", 10))
    wait_for_lock(job.pid)
    giver.commit()
    got = []
    batch = job.result()
    while batch:
        got += [m.msg_id for m in batch]
        assert ack(conn, batch[0].batch_id) == 1
        batch = receive_coop(conn, queue, "s", 50)
    assert sorted(got) == sent


def test_a_worker_that_acks_with_its_receive_and_one_who_removes_it_do_not_deadlock(
    conn: Connection,
    queue: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    value(conn, REGISTER, queue, "w")
    sent = send_many(conn, queue, 20)
    tick(conn, queue)
    batch = receive_coop(conn, queue, "w", 10)
    remover = connect(autocommit=False)
    value(remover, REGISTER, queue, "other")  # locks the consumer
    job = background(lambda c: take(c, queue, "w", 10, ack_batch=batch[0].batch_id))
    wait_for_lock(job.pid)
    assert value(remover, UNREGISTER, queue, "w", 1) == 1
    remover.commit()
    refused("PQ011", job.result)
    pump(conn)
    tick(conn, queue)
    got = []
    while batch := receive_coop(conn, queue, "other", 10):
        got += [m.msg_id for m in batch]
        assert ack(conn, batch[0].batch_id) == 1
    assert sorted(got) == sent


def test_subconsumers_take_whole_windows_in_turn_and_finish_them(conn: Connection, queue: str) -> None:
    value(conn, "select pgque.set_queue_config(%s, 'ticker_max_count', '1')", queue)
    for worker in ("a", "b"):
        assert value(conn, REGISTER, queue, worker) == 1
        assert value(conn, NEXT, queue, worker) is None
    sent = []
    for _ in range(3):
        sent.append(send_many(conn, queue, 3))
        forced_tick(conn, queue)
    held = {worker: value(conn, NEXT, queue, worker) for worker in ("a", "b")}
    assert [column(conn, EVENTS, held[worker]) for worker in ("a", "b")] == sent[:2]
    # An open batch comes again.
    assert value(conn, NEXT, queue, "a") == held["a"]
    assert [m.msg_id for m in receive_coop(conn, queue, "a")] == sent[0]
    assert value(conn, "select consumer_name from pgque.get_batch_info(%s)", held["b"]) == "c.b"
    assert value(conn, "select pgque.event_retry(%s, %s, 0)", held["a"], sent[0][1]) == 1
    error = refused("PQ006", rows, conn, UNREGISTER, queue, "b", 0)
    assert queue in str(error)
    for batch in held.values():
        assert value(conn, "select pgque.finish_batch(%s)", batch) == 1
        assert value(conn, "select pgque.finish_batch(%s)", batch) == 0
    assert value(conn, UNREGISTER, queue, "b", 0) == 1
    # What comes again goes first, in a batch of its own, and needs no tick.
    again = value(conn, NEXT, queue, "a")
    assert column(conn, EVENTS, again) == [sent[0][1]]
    assert value(conn, "select pgque.finish_batch(%s)", again) == 1
    last = value(conn, NEXT, queue, "a")
    assert column(conn, EVENTS, last) == sent[2]
    assert value(conn, "select pgque.finish_batch(%s)", last) == 1
    assert value(conn, NEXT, queue, "a") is None
    assert value(conn, UNREGISTER, queue, "a", 0) == 1


def test_next_batch_registers_a_subconsumer_on_first_use_and_refuses_a_wrong_one(
    conn: Connection, subscribed: str
) -> None:
    assert value(conn, "select pgque.next_batch(%s, 'new', 'w')", subscribed) is None
    assert value(conn, "select pgque.register_subconsumer(%s, 'new', 'w')", subscribed) == 0
    for worker in ("", None, "x" * 1001):
        refused("PQ004", rows, conn, "select pgque.next_batch(%s, 'new', %s)", subscribed, worker)
    # One that reads on its own, and a pool.
    error = refused("PQ006", rows, conn, NEXT, subscribed, "w")
    assert "register_subconsumer" in str(error.diag.message_hint)
    subscribe(conn, subscribed, "pool")
    send(conn, subscribed)
    tick(conn, subscribed)
    assert len(rows(conn, "select * from pgque.receive(%s, 'pool', worker => 'w')", subscribed)) == 1
    refused("PQ006", rows, conn, "select pgque.next_batch(%s, 'pool', 'w')", subscribed)
    assert len(receive(conn, subscribed)) == 1


def test_a_subconsumers_next_batch_waits_for_lag_count_and_interval(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, REGISTER, "q", "a")
    custom = "select batch_id from pgque.next_batch_custom('q', 'c', 'a', %s::interval, %s, %s::interval)"
    sent = []
    for _ in range(3):
        sent += send_many(own, "q", 4)
        tick(own, "q")
    assert value(own, custom, None, 100, None) is None
    assert value(own, custom, "10 minutes", None, None) is None
    assert value(own, custom, None, None, "10 minutes") is None
    batch = value(own, custom, None, 8, None)
    assert column(own, EVENTS, batch) == sent[:8]
    assert ack(own, batch) == 1
    move_clock(own, "11 minutes")
    assert column(own, EVENTS, value(own, custom, "10 minutes", None, None)) == sent[8:]


def test_next_batch_custom_returns_the_same_record_with_and_without_a_subconsumer(
    conn: Connection, queue: str
) -> None:
    subscribe(conn, queue, "alone")
    value(conn, REGISTER, queue, "a")
    send(conn, queue)
    tick(conn, queue)
    found = []
    for consumer in ("'alone'", "'c', 'a'"):
        cursor = conn.execute(
            f"select * from pgque.next_batch_custom('{queue}', {consumer}, null, null, null)".encode()
        )
        found.append(([d.name for d in cursor.description or []], cursor.fetchall()))
    (names, alone), (same, worker) = found
    assert names == same and names[:3] == ["batch_id", "cur_tick_id", "prev_tick_id"]
    assert alone[0][1:] == worker[0][1:]
    assert rows(conn, EVENTS, worker[0][0]) == rows(conn, EVENTS, alone[0][0]) != []


def test_taking_over_the_batch_of_a_silent_subconsumer_writes_each_message_once(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, REGISTER, "q", "a")
    sent = send_many(own, "q", 50)
    forced_tick(own, "q")
    assert column(own, EVENTS, value(own, NEXT, "q", "a")) == sent
    move_clock(own, "2 minutes")
    taken = "select msg_id, receive_count from pgque.receive_coop('q', 'c', 'b', 10, '1 minute')"
    assert rows(own, taken) == [(msg_id, 2) for msg_id in sent]
    assert "retry_queue" not in dead_tuples(own)


def test_calls_of_next_batch_custom_with_literals_of_no_type_find_their_function(
    conn: Connection, queue: str
) -> None:
    value(conn, REGISTER, queue, "a")
    send(conn, queue)
    tick(conn, queue)
    batch = value(conn, NEXT, queue, "a")
    for arguments in (
        "'a', null, null, null",
        "'a', null, null, null, null",
        "'a', '0', '1', '0', '1 minute'",
        "'a', '0', 1, '0'",
    ):
        assert rows(conn, f"select batch_id from pgque.next_batch_custom('{queue}', 'c', {arguments})") == [
            (batch,)
        ]
    assert rows(conn, f"select * from pgque.next_batch('{queue}', 'c', 'a', null)") == [(batch,)]
    subscribe(conn, queue, "alone")
    for arguments in ("null, null, null", "'0', '1', '0'", "'0', 1, '0'"):
        call = f"select * from pgque.next_batch_custom('{queue}', 'alone', {arguments})"
        assert rows(conn, call) == [(None,) * 7]


@pytest.mark.parametrize(
    "call", ["receive_coop(%s, 'c', 'b', 10, '-1 second')", "next_batch(%s, 'c', 'b', '-1 second')"]
)
def test_a_negative_dead_interval_takes_no_batch_over(conn: Connection, queue: str, call: str) -> None:
    value(conn, REGISTER, queue, "a")
    send(conn, queue)
    tick(conn, queue)
    batch = value(conn, NEXT, queue, "a")
    error = refused("PQ005", rows, conn, f"select pgque.{call}", queue)
    assert queue in str(error)
    assert value(conn, NEXT, queue, "a") == batch


def test_the_batch_of_a_silent_subconsumer_goes_to_who_asks_for_the_next_one(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for worker in ("a", "b"):
        value(own, REGISTER, "q", worker)
    sent = send_many(own, "q", 3)
    forced_tick(own, "q")
    lost = value(own, NEXT, "q", "a")
    assert value(own, "select pgque.event_retry(%s, %s, 3600)", lost, sent[0]) == 1
    assert value(own, NEXT_OR_TAKE_OVER, "q", "b") is None
    move_clock(own, "50 seconds")
    assert value(own, NEXT, "q", "a") == lost  # a sign of life
    move_clock(own, "100 seconds")
    assert value(own, NEXT_OR_TAKE_OVER, "q", "b") is None
    move_clock(own, "3 minutes")
    assert value(own, NEXT, "q", "b") is None
    later = send_many(own, "q", 2)
    forced_tick(own, "q")
    taken = value(own, NEXT_OR_TAKE_OVER, "q", "b")
    assert taken != lost
    assert ack(own, lost) == 0
    refused("PQ012", rows, own, EVENTS, lost)
    # What waits for a retry already is no part of it.
    assert column(own, EVENTS, taken) == sent[1:]
    refused("PQ007", value, own, "select pgque.event_retry(%s, %s, 0)", taken, sent[0])
    assert [m.msg_id for m in receive_coop(own, "q", "b")] == sent[1:]
    assert ack(own, taken) == 1
    assert column(own, EVENTS, value(own, NEXT_OR_TAKE_OVER, "q", "a")) == later


def test_two_sessions_that_ask_at_once_get_different_batches(
    conn: Connection,
    queue: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    for worker in ("a", "b"):
        value(conn, REGISTER, queue, worker)
    sent = []
    for _ in range(2):
        sent.append(send_many(conn, queue, 2))
        forced_tick(conn, queue)
    value(conn, "select pgque.set_queue_config(%s, 'ticker_max_count', '1')", queue)
    first = connect(autocommit=False)
    held = value(first, NEXT, queue, "a")
    other = background(lambda c: value(c, NEXT, queue, "b"))
    wait_for_lock(other.pid)
    first.commit()
    assert [column(conn, EVENTS, batch) for batch in (held, other.result())] == sent


def test_a_subconsumer_is_removed_while_it_waits_for_its_next_batch(
    conn: Connection,
    queue: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    for worker in ("a", "b"):
        value(conn, REGISTER, queue, worker)
    sent = send(conn, queue)
    tick(conn, queue)
    remover = connect(autocommit=False)
    assert value(remover, UNREGISTER, queue, "a", 0) == 1
    other = background(lambda c: value(c, NEXT, queue, "a"))
    wait_for_lock(other.pid)
    remover.commit()
    refused("PQ011", other.result)
    assert column(conn, EVENTS, value(conn, NEXT, queue, "b")) == [sent]


def test_a_subconsumers_batch_leaves_out_what_has_expired(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, REGISTER, "q", "a")
    kept = send(own, "q")
    value(own, "select pgque.send('q', 't', 'x'::text, ttl => '1 minute')")
    tick(own, "q")
    move_clock(own, "2 minutes")
    batch = value(own, NEXT, "q", "a")
    assert column(own, EVENTS, batch) == [kept]
    assert ack(own, batch) == 1
