"""One outcome per message: ack, nack, dead, release, and how often a message may come."""

from __future__ import annotations

from collections import Counter

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    extend,
    figure,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    post,
    receive,
    receive_coop,
    refused,
    release,
    rows,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)


def test_an_outcome_of_nothing_is_nothing(conn: Connection, subscribed: str) -> None:
    sent = offer(conn, subscribed, 1)
    token = take(conn, subscribed)[0].batch_id
    for call in ("ack", "dead", "archive"):
        assert outcome(conn, call, token, []) == {}
    assert release(conn, token, []) == 0
    twice = rows(conn, "select ok from pgque.ack(%s, %s::bigint[])", token, sent * 2)
    assert (True,) in twice


def test_a_nack_of_a_message_of_another_batch_is_refused(conn: Connection, subscribed: str) -> None:
    offer(conn, subscribed, 2)
    (first,), (second,) = take(conn, subscribed, "w1", 1), take(conn, subscribed, "w2", 1)
    refused("PQ007", nack, conn, first._replace(batch_id=second.batch_id))
    assert ack(conn, first.batch_id) == ack(conn, second.batch_id) == 1


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_of_n_receives_is_exactly_n_deliveries(pool: Connection, limit: int) -> None:
    configure(pool, "q", max_receive_attempts=limit)
    (sent,) = offer(pool, "q", 1)
    deliveries = 0
    for number in range(limit + 3):
        move_clock(pool, f"{number} minutes")
        for message in take(pool, "q", f"w{number}"):
            deliveries += 1
            assert (message.msg_id, message.receive_count) == (sent, deliveries)
    assert deliveries == limit
    assert dead_letters(pool, "q") == {sent: "receive attempts used up"}


@pytest.mark.parametrize("how", ["release", "crash", "nack"])
def test_without_settings_five_deliveries_are_the_end(pool: Connection, how: str) -> None:
    (sent,) = offer(pool, "q", 1)
    deliveries = 0
    for number in range(9):
        move_clock(pool, f"{number} minutes")
        settle(pool, "q")
        for message in take(pool, "q"):
            deliveries += 1
            if how == "release":
                release(pool, message.batch_id)
            elif how == "nack":
                nack(pool, message, "0", "no luck")
    assert deliveries == 5
    reason = "no luck" if how == "nack" else "receive attempts used up"
    assert dead_letters(pool, "q") == {sent: reason}


def test_the_first_of_both_limits_ends_a_message(pool: Connection) -> None:
    configure(pool, "q", max_retries=2, max_receive_attempts=4)
    sent = offer(pool, "q", 2)
    got: Counter[int] = Counter()
    for number in range(8):
        move_clock(pool, f"{number} minutes")
        while batch := take(pool, "q"):
            for message in batch:
                got[message.msg_id] += 1
                if message.msg_id == sent[0]:
                    nack(pool, message, "0", "nacked")
    assert got == {sent[0]: 3, sent[1]: 4}
    assert dead_letters(pool, "q") == {sent[0]: "nacked", sent[1]: "receive attempts used up"}


def test_a_live_lease_is_never_judged(pool: Connection) -> None:
    configure(pool, "q", max_receive_attempts=1)
    sent = offer(pool, "q", 1)
    token = take(pool, "q", "w1", timeout="1 hour")[0].batch_id
    move_clock(pool, "59 minutes")
    value(pool, "select pgque.maint()")
    assert take(pool, "q", "w2") == []
    assert dead_letters(pool, "q") == {}
    assert extend(pool, token, "1 hour") == 1
    move_clock(pool, "118 minutes")
    value(pool, "select pgque.maint()")
    assert take(pool, "q", "w2") == []
    assert outcome(pool, "ack", token, sent) == {sent[0]: None}
    move_clock(pool, "1 day")
    value(pool, "select pgque.maint()")
    assert dead_letters(pool, "q") == {}


def test_maintenance_judges_what_no_worker_comes_for(pool: Connection) -> None:
    configure(pool, "q", max_receive_attempts=1)
    (sent,) = offer(pool, "q", 1)
    token = take(pool, "q", "w1")[0].batch_id
    move_clock(pool, "10 minutes")
    for _ in range(2):
        value(pool, "select pgque.maint()")
    assert dead_letters(pool, "q") == {sent: "receive attempts used up"}
    assert ack(pool, token) == 0


def test_maintenance_leaves_an_expired_message_that_has_attempts_to_the_next_worker(
    pool: Connection,
) -> None:
    sent = offer(pool, "q", 2)
    take(pool, "q", "w1")
    move_clock(pool, "10 minutes")
    for _ in range(3):
        value(pool, "select pgque.maint()")
    assert dead_letters(pool, "q") == {}
    again = take(pool, "q", "w2")
    assert [(m.msg_id, m.receive_count) for m in again] == [(i, 2) for i in sent]


@pytest.mark.parametrize("victims", [[0], [10, 11, 99]])
def test_a_message_that_kills_its_worker_takes_only_itself_down(pool: Connection, victims: list[int]) -> None:
    configure(pool, "q", max_receive_attempts=5)
    sent = offer(pool, "q", 100)
    poison = {sent[n] for n in victims}
    acked: set[int] = set()
    received: Counter[int] = Counter()
    idle = 0
    for number in range(400):
        move_clock(pool, f"{number} minutes")
        batch = take(pool, "q", f"w{number}", 100)
        if not batch:
            idle += 1
            if idle > 2:
                break
            value(pool, "select pgque.maint()")
            continue
        idle = 0
        received.update(ids(batch))
        if poison.isdisjoint(ids(batch)):  # else it dies before it acks anything
            for token in {m.batch_id for m in batch}:
                assert ack(pool, token) == 1
            acked.update(ids(batch))
    assert acked == set(sent) - poison
    assert dead_letters(pool, "q") == dict.fromkeys(poison, "receive attempts used up")
    assert max(received.values()) <= 5
    assert {received[i] for i in poison} == {5}


def test_a_killed_worker_halves_nothing_of_what_comes_later(pool: Connection) -> None:
    offer(pool, "q", 10)
    take(pool, "q", "w1", 10)
    move_clock(pool, "1 minute")
    work_off(pool, "q", "w2", 100)
    later = offer(pool, "q", 50)
    assert ids(take(pool, "q", "w2", 50)) == later


def test_dropping_is_counted_and_leaves_no_dead_letter(pool: Connection) -> None:
    configure(pool, "q", drop_policy="drop", max_retries=0, max_receive_attempts=1)
    before = figure(pool, "dropped", "q")
    offer(pool, "q", 3)
    a, b, _ = take(pool, "q")
    nack(pool, a, "0", "broken")
    outcome(pool, "dead", b.batch_id, [b.msg_id], "x")
    move_clock(pool, "1 hour")
    value(pool, "select pgque.maint()")
    assert take(pool, "q") == []
    assert dead_letters(pool, "q") == {}
    assert figure(pool, "dropped", "q") == before + 3
    error = refused("PQ005", value, pool, "select pgque.set_queue_config('q', 'drop_policy', 'burn')")
    assert "drop_policy" in str(error)
    assert "dead_letter, drop or hold" in (error.diag.message_hint or "")


def test_held_messages_are_listed_as_failed_requeued_on_demand_and_not_purged(pool: Connection) -> None:
    configure(pool, "q", drop_policy="hold", max_retries=0)
    (sent,) = offer(pool, "q", 1)
    (message,) = take(pool, "q")
    nack(pool, message, "0", "broken")
    listed = rows(pool, "select l.msg_id, l.last_error from pgque.list_messages('q', 'failed') as l")
    assert listed == [(sent, "broken")]
    assert rows(pool, "select s.status from pgque.message_status('q', %s) as s", sent) == [("failed",)]
    (dl_id,) = rows(pool, "select d.dl_id from pgque.dead_letter as d where d.dl_held")[0]
    move_clock(pool, "100 days")
    assert value(pool, "select pgque.dlq_purge('q', '0')") == 0
    assert value(pool, "select pgque.dlq_requeue(%s)", dl_id) == sent
    settle(pool, "q")
    assert [(m.msg_id, m.receive_count, m.retry_count) for m in take(pool, "q")] == [(sent, 1, 0)]


def test_messages_that_a_consumer_on_its_own_acked_are_not_processing(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    acked, nacked, dead, left = offer(own, "q", 4)
    batch = receive(own, "q")[0].batch_id
    for call, msg_id in (("ack", acked), ("nack", nacked), ("dead", dead)):
        assert outcome(own, call, batch, [msg_id]) == {msg_id: None}
    statuses = "select s.status from pgque.message_status('q', %s) as s"
    refused("PQ010", rows, own, statuses, acked)
    assert [rows(own, statuses, msg_id) for msg_id in (nacked, dead, left)] == [
        [("retry",)],
        [("dead",)],
        [("processing",)],
    ]
    listed = rows(own, "select m.msg_id, m.status from pgque.list_messages('q') as m order by 1")
    assert listed == [(nacked, "retry"), (dead, "dead"), (left, "processing")]


def test_what_a_subconsumer_holds_is_processing(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.register_subconsumer('q', 'c', 'w')")
    one, two = offer(own, "q", 2)
    batch = receive_coop(own, "q", "w")[0].batch_id
    assert outcome(own, "ack", batch, [one]) == {one: None}
    assert rows(
        own, "select s.status, s.worker, s.batch_id from pgque.message_status('q', %s) as s", two
    ) == [("processing", "w", batch)]
    refused("PQ010", rows, own, "select s.status from pgque.message_status('q', %s) as s", one)


def test_no_message_has_no_status(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    offer(own, "q")
    refused("PQ010", rows, own, "select s.status from pgque.message_status('q', null) as s")


@pytest.mark.parametrize("consumer", ["c", None])
def test_peek_shows_messages_with_keys_once_with_their_last_body(
    own: Connection, consumer: str | None
) -> None:
    value(own, "select pgque.create_queue('q')")
    for name in ("c", "d"):
        subscribe(own, "q", name)
    for key, payload in (("a", "old"), ("b", "x"), ("a", "new"), ("p", "gone")):
        post(own, "q", payload, key=key)
    value(own, "select pgque.purge_key('q', 'p')")
    tick(own, "q")
    receive(own, "q", "d")
    peeked = rows(own, "select p.key, p.payload from pgque.peek('q', 10, %s) as p", consumer)
    assert peeked == [("a", "new"), ("b", "x")]
