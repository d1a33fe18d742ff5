"""Pools that are moved back, or on, while messages wait to be retried and batches are open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from model.bench import turn_journal
from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    drain,
    extend,
    ids,
    move_clock,
    nack_ids,
    offer,
    outcome,
    post,
    refused,
    release,
    rotate,
    set_visibility,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)
from sql.test_races import Pair, pair

__all__ = ["pair"]


def newest(conn: Connection) -> int:
    """Name the newest tick."""
    result: int = value(conn, "select i.last_tick_id from pgque.get_queue_info('q') as i")
    return result


def move(conn: Connection, to: int) -> None:
    """Move the pool to a tick."""
    assert value(conn, "select pgque.register_consumer_at('q', 'c', %s)", to) == 0


@pytest.fixture
def start(pool: Connection) -> int:
    """The tick before all messages."""
    return newest(pool)


def test_seeking_is_for_consumers_on_their_own(pool: Connection, start: int) -> None:
    sent = offer(pool, "q", 3)
    first = take(pool, "q", count=1, timeout="1 day")
    for to in (start, newest(pool)):
        for force in ("true", "false"):
            refused("PQ005", value, pool, f"select pgque.seek('q', 'c', %s, {force})", to)
    assert ids(work_off(pool, "q")) == sent[1:]
    assert ack(pool, first[0].batch_id) == 1


def test_acknowledged_messages_are_redelivered_to_a_pool_that_is_moved_back(
    pool: Connection, start: int
) -> None:
    sent = offer(pool, "q", 5)
    assert ids(work_off(pool, "q", count=2)) == sent
    move(pool, start)
    assert ids(work_off(pool, "q", count=2)) == sent
    sent += offer(pool, "q", 2)
    assert ids(work_off(pool, "q", count=2)) == sent[5:]


def test_a_batch_that_was_open_when_its_pool_was_moved_back_is_still_its_workers(
    pool: Connection, start: int
) -> None:
    sent = offer(pool, "q", 6)
    held = take(pool, "q", "w1", 3, "1 day")
    move(pool, start)
    again = take(pool, "q", "w2", 6, "1 day")
    assert ids(again) == sent
    assert again[0].batch_id != held[0].batch_id
    assert extend(pool, held[0].batch_id, "1 second") == 3
    assert outcome(pool, "ack", held[0].batch_id, sent[:3]) == dict.fromkeys(sent[:3])
    assert ack(pool, again[0].batch_id) == 1
    move_clock(pool, "3 days")
    assert work_off(pool, "q") == []


def test_a_message_with_a_pending_retry_that_is_delivered_from_the_log_again_is_not_leased_twice_at_once(
    pool: Connection, start: int
) -> None:
    sent = offer(pool, "q", 4)
    held = take(pool, "q", "w1", 2)
    nack_ids(pool, held[0].batch_id, sent[:2], "0", "x")
    move(pool, start)
    batch = take(pool, "q", "w2", timeout="1 day")
    assert max(Counter(ids(batch)).values()) == 1, "a batch has a message twice"
    assert ack(pool, batch[0].batch_id) == 1
    rest = ids(work_off(pool, "q"))
    assert set(rest) | set(ids(batch)) == set(sent)


@pytest.mark.parametrize("wait", ["0", "1 hour"])
@pytest.mark.parametrize("size", [1, 2, 100])
def test_nothing_is_lost_when_a_pool_is_moved_back_with_retries_waiting(
    pool: Connection, start: int, size: int, wait: str
) -> None:
    sent = offer(pool, "q", 6)
    token = take(pool, "q", "w1", 3)[0].batch_id
    nack_ids(pool, token, sent[:3], wait, "x")
    move(pool, start)
    got = Counter(ids(work_off(pool, "q", "w2", size)))
    move_clock(pool, "2 hours")
    settle(pool, "q")
    got.update(ids(work_off(pool, "q", "w3", size)))
    assert set(got) == set(sent)
    # From the log once more, and from where they waited.
    assert max(got.values()) <= 2
    move_clock(pool, "1 day")
    settle(pool, "q")
    assert work_off(pool, "q") == []
    assert dead_letters(pool, "q") == {}


@pytest.mark.parametrize("how", ["lapse", "nack", "release", "dead", "ids"])
def test_two_batches_with_one_message_end_in_one_delivery_or_more_but_never_in_none(
    pool: Connection, start: int, how: str
) -> None:
    sent = offer(pool, "q", 4)
    old = take(pool, "q", "w1", timeout="1 minute")
    move(pool, start)
    new = take(pool, "q", "w2", timeout="1 minute")
    assert ids(old) == ids(new) == sent
    dead: list[int] = []
    for batch in (old, new):
        token = batch[0].batch_id
        if how == "nack":
            assert [r[1] for r in nack_ids(pool, token, sent, "0", "x")] == [True] * 4
        elif how == "release":
            assert release(pool, token) == 4
        elif how == "dead":
            assert outcome(pool, "dead", token, sent, "x") == dict.fromkeys(sent)
            dead = sent
        elif how == "ids":
            assert outcome(pool, "ack", token, sent[:2]) == dict.fromkeys(sent[:2])
    move_clock(pool, "10 minutes")
    settle(pool, "q")
    later: Counter[int] = Counter()
    while batch := take(pool, "q", "w3", timeout="10 days"):
        for m in batch:
            later[m.msg_id] += 1
            assert outcome(pool, "ack", m.batch_id, [m.msg_id]) == {m.msg_id: None}
    done = set(sent[:2]) if how == "ids" else set()
    assert set(later) == set(sent) - set(dead) - done
    assert sorted(dead_letters(pool, "q")) == dead
    for batch in (old, new):
        assert None not in outcome(pool, "ack", batch[0].batch_id, sent).values()


@pytest.mark.parametrize("first", ["the old holder acks", "the new holder fails"])
@pytest.mark.parametrize("how", ["nack", "release", "lapse"])
def test_a_message_that_fails_after_a_move_back_is_redelivered_though_its_earlier_worker_acks_it(
    pool: Connection, start: int, how: str, first: str
) -> None:
    (sent,) = offer(pool, "q", 1)
    take(pool, "q", "w1", timeout="1 minute")
    move_clock(pool, "2 minutes")
    taken = take(pool, "q", "w2", timeout="1 day")[0].batch_id  # from the retry queue
    move(pool, start)
    again = take(pool, "q", "w3", timeout="1 minute")[0].batch_id  # from the log
    if first == "the old holder acks":
        assert ack(pool, taken) == 1
    if how == "nack":
        assert [r[1] for r in nack_ids(pool, again, [sent], "0", "x")] == [True]
    elif how == "release":
        assert release(pool, again) == 1
    else:
        move_clock(pool, "4 minutes")
        take(pool, "q", "w4", timeout="1 second")  # somebody looks, and it lapses again
        move_clock(pool, "5 minutes")
    if first == "the new holder fails":
        assert ack(pool, taken) == 0
    assert ids(work_off(pool, "q")) == [sent]


def test_a_pool_with_keyed_order_keeps_it_after_a_move_back(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c', keyed_order => true)")
    start = newest(own)
    sent = [post(own, "q", str(n), partition_key="ab"[n % 2]) for n in range(8)]
    tick(own, "q")
    first = take(own, "q", "w1", 2, "1 day")
    nack_ids(own, first[0].batch_id, sent[:1], "0", "x")
    move(own, start)
    got: list[int] = []
    for number in range(40):
        if not (batch := take(own, "q", f"w{number}", 3, "1 day")):
            break
        assert len({m.extra1 for m in batch}) == len(batch)
        got += ids(batch)
        assert ack(own, batch[0].batch_id) == 1
        if number == 2:
            assert ack(own, first[0].batch_id) == 1
    for lane in (0, 1):
        mine = [i for i in got if i in sent[lane::2]]
        assert sorted(set(mine)) == sent[lane::2]
        seen: list[int] = []
        for i in mine:
            if i not in seen:
                seen.append(i)
        assert seen == sent[lane::2]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_moving_back_waits_for_a_delivery_that_is_not_committed(
    pool: Connection, pair: Pair, start: int, end: str
) -> None:
    sent = offer(pool, "q", 4)
    take(pool, "q", "w1", 1, "1 day")
    got = take(pair.one, "q", "w2", 2, "1 day")
    assert ids(got) == sent[1:3]
    job = pair.other(lambda c: move(c, start))
    assert not job.done
    pair.one.execute(end.encode())
    job.result()
    if end == "commit":
        assert ack(pool, got[0].batch_id) == 1
    assert ids(work_off(pool, "q", "w3", 3)) == sent


def test_messages_that_are_needed_for_open_batches_stay_when_the_pool_is_moved_on(pool: Connection) -> None:
    configure(pool, "q", rotation_period="1 microsecond")
    sent = offer(pool, "q", 4)
    held = take(pool, "q", "w1", 2, "1 day")
    skipped = offer(pool, "q", 3)
    move(pool, newest(pool))
    for _ in range(4):
        offer(pool, "q", 2)
        assert len(work_off(pool, "q")) == 2
        rotate(pool, "q")
    assert [r[1] for r in nack_ids(pool, held[0].batch_id, sent[:2], "0", "x")] == [True, True]
    assert ids(work_off(pool, "q")) == sent[:2]
    assert set(skipped).isdisjoint(dead_letters(pool, "q"))


def test_a_pool_moved_back_and_compacted_and_rotated_gets_everything_again(
    pool: Connection, start: int
) -> None:
    subscribe(pool, "q", "slow")  # keeps the messages
    sent = offer(pool, "q", 30)
    held = take(pool, "q", "w1", 5, "1 day")
    nack_ids(pool, take(pool, "q", "w1", 5)[0].batch_id, sent[5:10], "0", "x")
    assert set(ids(work_off(pool, "q", "w2", 7))) == set(sent[5:])
    for _ in range(3):
        offer(pool, "q", 1)
        work_off(pool, "q")
        assert turn_journal(pool)
        assert value(pool, "select pgque.maint_tables()") >= 1
    move(pool, start)
    rotate(pool, "q")
    got: Counter[int] = Counter()
    while batch := take(pool, "q", "w3", 7, "1 day"):
        got.update(ids(batch))
        assert ack(pool, batch[0].batch_id) == 1
        value(pool, "select pgque.maint()")
    assert {i: got[i] for i in sent} == dict.fromkeys(sent, 1)
    assert ack(pool, held[0].batch_id) == 1
    assert len(drain(pool, "q", "slow", 1000)) == 33


def test_a_dead_letter_of_a_pool_that_was_moved_back_is_requeued_once(pool: Connection, start: int) -> None:
    (sent,) = offer(pool, "q", 1)
    outcome(pool, "dead", take(pool, "q")[0].batch_id, [sent], "x")
    move(pool, start)
    waiting = take(pool, "q", "w2")
    assert ids(waiting) == [sent]
    nack_ids(pool, waiting[0].batch_id, [sent], "1 hour", "y")
    assert value(pool, "select pgque.dlq_requeue_all('q')") == 1
    assert ids(work_off(pool, "q")) == [sent]
    move_clock(pool, "2 hours")
    settle(pool, "q")
    assert work_off(pool, "q") == []


def test_a_dead_letter_that_is_requeued_while_its_message_is_leased_is_redelivered(
    pool: Connection, start: int
) -> None:
    configure(pool, "q", max_receive_attempts=2)
    (sent,) = offer(pool, "q", 1)
    outcome(pool, "dead", take(pool, "q")[0].batch_id, [sent], "x")
    move(pool, start)
    held = take(pool, "q", "w2")
    assert set_visibility(pool, held[0].batch_id, "1 minute") == 1
    assert value(pool, "select pgque.dlq_requeue_all('q')") == 1
    move_clock(pool, "2 minutes")
    assert ids(take(pool, "q", "w3", 10)) == [sent]


def test_an_unread_window_of_a_pool_that_was_moved_back_holds_its_messages_against_rotation(
    pool: Connection, start: int
) -> None:
    configure(pool, "q", rotation_period="1 microsecond")
    sent = offer(pool, "q", 4)
    assert ids(work_off(pool, "q")) == sent
    move(pool, start)
    for _ in range(5):
        sent += offer(pool, "q", 1)
        rotate(pool, "q")
    assert ids(work_off(pool, "q", count=3)) == sent


def test_a_pool_that_went_on_is_not_moved_in_an_older_snapshot(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    first = value(conn, "select last_tick from pgque.get_consumer_info(%s, 'c')", subscribed)
    sent = offer(conn, subscribed, 2)
    old = transaction("repeatable read")
    old.execute("select 1")
    assert ack(conn, take(conn, subscribed)[0].batch_id) == 1
    move = "select pgque.register_consumer_at(%s, 'c', %s)"
    refused("40001", value, old, move, subscribed, first)
    old.rollback()
    assert value(old, move, subscribed, first) == 0
    old.commit()
    assert ids(take(conn, subscribed)) == sent
