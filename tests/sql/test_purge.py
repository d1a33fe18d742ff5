"""Two sessions, one of which purges the queue; and queues that fall idle."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    drain,
    extend,
    forced_tick,
    ids,
    leaf,
    move_clock,
    nack_ids,
    offer,
    outcome,
    post,
    receive,
    refused,
    release,
    rotate,
    row_counts,
    send,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)
from sql.test_races import Pair, pair
from support.landing import at_a_landing

__all__ = ["pair"]

ENDS = pytest.mark.parametrize("end", ["commit", "rollback", "killed", "savepoint"])


def purge(conn: Connection) -> int:
    """Purge the queue; return what the slowest consumer had before it."""
    result: int = value(conn, "select pgque.purge('q')")
    return result


def end_as(conn: Connection, one: Connection, end: str) -> bool:
    """End the transaction of one; return whether it counts."""
    if end == "killed":
        value(conn, "select pg_terminate_backend(%s, 5000)", one.info.backend_pid)
    elif end == "savepoint":
        one.execute("rollback to savepoint before")
        one.execute("commit")
    else:
        one.execute(end.encode())
    return end == "commit"


def works(conn: Connection) -> None:
    """What is sent from now on arrives, once, and nothing else does."""
    sent = offer(conn, "q", 3)
    assert ids(work_off(conn, "q", count=2)) == sent
    move_clock(conn, "10 days")
    settle(conn, "q")
    assert work_off(conn, "q") == []


@ENDS
@pytest.mark.parametrize("how", ["nack", "release", "extend", "ids", "dead"])
def test_a_purge_waits_for_who_is_just_saying_something_about_a_batch(
    pool: Connection, pair: Pair, end: str, how: str
) -> None:
    sent = offer(pool, "q", 5)
    token = take(pool, "q", "w1", 3, "1 day")[0].batch_id
    pair.one.execute("savepoint before")
    if how == "nack":
        assert [r[1] for r in nack_ids(pair.one, token, sent[:3], "0", "x")] == [True] * 3
    elif how == "release":
        assert release(pair.one, token) == 3
    elif how == "extend":
        assert extend(pair.one, token, "1 hour") == 3
    else:
        call, reason = ("ack", []) if how == "ids" else ("dead", ["x"])
        assert outcome(pair.one, call, token, sent[:3], *reason) == dict.fromkeys(sent[:3])
    job = pair.other(purge)
    assert not job.done
    counts = end_as(pool, pair.one, end)
    assert job.result() == (2 if counts and how in ("ids", "dead") else 5)
    assert ack(pool, token) == 0
    assert set(outcome(pool, "ack", token, sent).values()).isdisjoint({None})
    assert sorted(dead_letters(pool, "q")) == (sent[:3] if counts and how == "dead" else [])
    works(pool)


def test_a_purge_that_waits_for_one_worker_keeps_no_other_from_its_batch(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection], pair: Pair
) -> None:
    offer(pool, "q", 2)
    busy = take(pool, "q", "w1", 1, "1 day")[0].batch_id
    other = take(pool, "q", "w2", 1, "1 day")[0].batch_id
    assert ack(pair.one, busy) == 1
    job = pair.other(purge)
    pool.execute("set statement_timeout = '5s'")
    assert extend(pool, other, "1 hour") == 1
    assert ack(pool, other) == 1
    assert not job.done
    pair.one.commit()
    assert job.result() == 0
    impatient = connect(own_dsn)
    impatient.execute("set lock_timeout = '200ms'")
    offer(pool, "q", 1)
    assert ack(pair.one, take(pool, "q", "w1", 1, "1 day")[0].batch_id) == 1
    assert "queue q" in str(refused("55P03", purge, impatient))


@ENDS
def test_who_speaks_about_a_batch_while_it_is_purged_hears_that_it_is_gone(
    pool: Connection, pair: Pair, end: str
) -> None:
    sent = offer(pool, "q", 5)
    token = take(pool, "q", "w1", 3, "1 day")[0].batch_id
    pair.one.execute("savepoint before")
    assert purge(pair.one) == 5
    job = pair.other(lambda c: [r[1] for r in nack_ids(c, token, sent[:3], "0", "x")])
    assert not job.done
    purged = end_as(pool, pair.one, end)
    assert job.result() == [not purged] * 3
    assert sorted(ids(work_off(pool, "q"))) == ([] if purged else sent)
    works(pool)


@ENDS
@pytest.mark.parametrize("worker", [True, False])
def test_who_receives_while_a_queue_is_purged_gets_what_is_left(
    own: Connection, pair: Pair, end: str, worker: bool
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = offer(own, "q", 4)
    pair.one.execute("savepoint before")
    assert purge(pair.one) == 4
    job = pair.other(lambda c: take(c, "q", "w1", 2) if worker else receive(c, "q", count=2))
    assert not job.done
    purged = end_as(own, pair.one, end)
    got = job.result()
    assert ids(got) == ([] if purged else sent[:2])
    if got:
        assert ack(own, got[0].batch_id) == 1
    assert (ids(work_off(own, "q")) if worker else drain(own, "q")) == ([] if purged else sent[2:])
    if worker:
        works(own)


@ENDS
def test_a_purge_removes_messages_that_were_just_delivered(pool: Connection, pair: Pair, end: str) -> None:
    sent = offer(pool, "q", 4)
    pair.one.execute("savepoint before")
    batch = take(pair.one, "q", "w1", 2, "1 day")
    job = pair.other(purge)
    assert not job.done
    end_as(pool, pair.one, end)
    assert job.result() == 4
    assert ack(pool, batch[0].batch_id) == 0
    assert set(outcome(pool, "ack", batch[0].batch_id, sent).values()).isdisjoint({None})
    works(pool)


def test_a_purge_takes_away_what_was_just_taken_over(pool: Connection, pair: Pair) -> None:
    offer(pool, "q", 3)
    old = take(pool, "q", "w1")[0].batch_id
    move_clock(pool, "1 minute")
    new = take(pair.one, "q", "w2", timeout="1 day")[0].batch_id
    job = pair.other(purge)
    assert not job.done
    pair.one.commit()
    job.result()
    assert ack(pool, old) == ack(pool, new) == 0
    works(pool)


def test_a_worker_that_takes_a_batch_and_acks_an_older_one_in_one_transaction_meets_a_purge(
    pool: Connection, pair: Pair
) -> None:
    # They take their locks in opposite orders: one of them may be told to try again, but nothing is lost.
    sent = offer(pool, "q", 4)
    first = take(pool, "q", "w1", 2, "1 day")[0].batch_id
    pair.one.execute("set deadlock_timeout = '20ms'")
    second = take(pair.one, "q", "w1", 2, "1 day")[0].batch_id
    job = pair.other(purge)
    assert not job.done
    acked = False
    try:
        acked = ack(pair.one, first) == 1
        pair.one.commit()
    except psycopg.errors.DeadlockDetected:
        pair.one.rollback()
    try:
        purged = job.result() is not None
    except psycopg.errors.DeadlockDetected:
        purged = False
    assert acked or purged
    left = ids(work_off(pool, "q")) if purged else []
    assert left == []
    if not purged:
        assert ack(pool, second) == 1
        assert ack(pool, first) == 0
    assert set(outcome(pool, "ack", first, sent).values()).isdisjoint({None})
    works(pool)


def test_a_message_sent_while_the_queue_is_purged_is_not_lost(pool: Connection, pair: Pair) -> None:
    offer(pool, "q", 3)
    mine = send(pair.one, "q")
    keyed = post(pair.one, "q", "body", key="k")
    later = post(pair.one, "q", "later", delay="1 hour")
    purge(pool)
    pair.one.commit()
    forced_tick(pool, "q")
    assert sorted(ids(work_off(pool, "q"))) == [mine, keyed]
    move_clock(pool, "2 hours")
    settle(pool, "q")
    assert ids(work_off(pool, "q")) == [later]


def test_purged_messages_are_in_no_window_any_more(
    pool: Connection, pair: Pair, transaction: Callable[..., Connection]
) -> None:
    first = forced_tick(pool, "q")
    offer(pool, "q", 3)
    open_one = send(pair.one, "q")
    between = forced_tick(pool, "q")
    offer(pool, "q", 3)
    purging = transaction(dsn=pool.info.dsn)
    assert purge(purging) == 6
    late = pair.other(lambda c: value(c, "select pgque.subscribe('q', 'late', 'earliest')"))
    assert not late.done
    purging.commit()
    assert late.result() == 1
    pair.one.commit()
    sent = offer(pool, "q", 2)
    now = forced_tick(pool, "q")
    left = [open_one, *sent]
    read = "select array(select w.ev_id from pgque.read_window('q', %s, %s) w)"
    assert value(pool, read, first, between) == []
    assert value(pool, read, first, now) == value(pool, read, between, now) == left
    subscribe(pool, "q", "d")
    value(pool, "select pgque.seek('q', 'd', %s, true)", first)
    assert drain(pool, "q", "d") == drain(pool, "q", "late") == left
    value(pool, "select pgque.seek('q', 'd', pgque.tick_for('q', 'earliest'), true)")
    assert drain(pool, "q", "d") == left
    assert ids(work_off(pool, "q")) == left
    for _ in range(3):
        rotate(pool, "q")
    works(pool)


def test_a_subscribe_with_a_snapshot_older_than_a_purge_gets_40001(
    pool: Connection, transaction: Callable[..., Connection]
) -> None:
    offer(pool, "q", 3)
    forced_tick(pool, "q")
    old = transaction("repeatable read", pool.info.dsn)
    assert purge(pool) == 3
    refused("40001", value, old, "select pgque.subscribe('q', 'late', 'earliest')")


def test_a_purge_during_a_purge_waits_and_finds_nothing(pool: Connection, pair: Pair) -> None:
    offer(pool, "q", 3)
    take(pool, "q", "w1", 1, "1 day")
    assert purge(pair.one) == 3
    job = pair.other(purge)
    assert not job.done
    pair.one.commit()
    assert job.result() == 0
    works(pool)


# -- idle ----------------------------------------------------------------------


def event_bytes(conn: Connection) -> int:
    """Bytes of the tables of the queue's messages."""
    return sum(value(conn, "select pg_relation_size(%s)", leaf(conn, "q", n)) for n in range(3))


BEFORE = ["plain", "keyed", "nacked", "lapsed", "dead", "lost sends"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "reader"),  # a table that one kind keeps, both keep
    at_a_landing(
        [*((before, "both") for before in BEFORE), ("plain", "nobody")],
        product(BEFORE, ["workers", "a consumer", "both", "nobody"]),
    ),
)
def test_the_tables_of_a_drained_queue_are_emptied_in_the_end_though_nobody_sends(
    own: Connection, own_dsn: str, connect: Callable[..., Any], reader: str, before: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    consumers = {"workers": "w", "a consumer": "a", "both": "wa", "nobody": ""}[reader]
    for name in consumers:
        subscribe(own, "q", name)

    def read(fail: bool = False) -> None:
        for name in consumers:
            for _ in range(50):
                worker = name == "w"
                batch = (
                    take(own, "q", "x", 7, "1 second", consumer=name)
                    if worker
                    else receive(own, "q", name, 7)
                )
                if not batch:
                    break
                if fail and before == "nacked":
                    nack_ids(own, batch[0].batch_id, ids(batch)[:2], "1 second", "x")
                elif fail and before == "dead":
                    outcome(own, "dead", batch[0].batch_id, ids(batch)[:2], "x")
                elif fail and before == "lapsed" and worker:
                    continue
                ack(own, batch[0].batch_id)

    for number in range(30):
        post(own, "q", str(number), **({"key": f"k{number % 20}"} if before == "keyed" else {}))
    if before == "lost sends":
        gone = connect(own_dsn, autocommit=False)
        send(gone, "q")
        gone.rollback()
    tick(own, "q")
    read(fail=True)
    assert event_bytes(own) > 0
    for hours in range(1, 12):
        move_clock(own, f"{3 * hours} hours")
        # What a loop does while nobody sends.
        value(own, "select pgque.maint()")
        value(own, "select pgque.ticker()")
        read()
        if event_bytes(own) == 0:
            break
    assert event_bytes(own) == 0
    assert {name: n for name, n in row_counts(own).items() if name.startswith("event")} == {}
    if consumers:
        sent = offer(own, "q", 2)
        for name in consumers:
            got = work_off(own, "q", consumer=name) if name == "w" else receive(own, "q", name)
            assert ids(got) == sent


def test_the_tables_of_a_drained_queue_are_emptied_though_its_workers_went_away(pool: Connection) -> None:
    configure(pool, "q", retention_period="2 days")
    offer(pool, "q", 20)
    assert len(work_off(pool, "q", count=7)) == 20
    for days in range(1, 8):
        move_clock(pool, f"{days} days")
        value(pool, "select pgque.maint()")
        value(pool, "select pgque.ticker()")
        if event_bytes(pool) == 0:
            break
    assert event_bytes(pool) == 0
    assert dead_letters(pool, "q") == {}
    sent = offer(pool, "q", 2)
    assert ids(work_off(pool, "q")) == sent


def test_the_tables_of_an_idle_queue_stay_while_a_worker_holds_a_message_of_them(pool: Connection) -> None:
    sent = offer(pool, "q", 3)
    held = take(pool, "q", "w1", 1, "20 days")
    assert ids(work_off(pool, "q")) == sent[1:]
    for hours in range(1, 8):
        move_clock(pool, f"{3 * hours} hours")
        value(pool, "select pgque.ticker()")
        rotate(pool, "q")
        assert take(pool, "q") == []
    assert event_bytes(pool) > 0
    assert [r[1] for r in nack_ids(pool, held[0].batch_id, sent[:1], "0", "x")] == [True]
    assert ids(work_off(pool, "q")) == sent[:1]
