"""Producers whose transactions are long, old, rolled back, prepared or stalled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    configure,
    drain,
    forced_tick,
    leaf,
    need_prepared_transactions,
    payloads,
    receive,
    rotate,
    send,
    send_many,
    subscribe,
    tick,
    value,
)

ISOLATIONS = ["read committed", "repeatable read", "serializable"]


def turn(conn: Connection, queue: str) -> None:
    """Send, deliver and rotate once, in transactions of their own."""
    send(conn, queue, "between")
    tick(conn, queue)
    drain(conn, queue)
    assert rotate(conn, queue) == 1
    forced_tick(conn, queue)
    drain(conn, queue)


@pytest.mark.parametrize("rotations", [1, 2, 3, 4])
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_producer_with_a_snapshot_older_than_rotations_is_delivered_or_refused(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    isolation: str,
    rotations: int,
) -> None:
    producer = transaction(isolation)
    for _ in range(rotations):
        turn(conn, subscribed)
    try:
        send(producer, subscribed, "old")
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
        producer.execute("commit")
    except psycopg.errors.SerializationFailure:
        assert isolation != "read committed"
        producer.execute("rollback")
        send(producer, subscribed, "old")
    for _ in range(4):
        rotate(conn, subscribed)
    tick(conn, subscribed)
    for _ in range(4):
        rotate(conn, subscribed)
    assert payloads(conn, subscribed) == ["old"]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_producer_that_sent_before_and_after_rotations_loses_nothing(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    producer = transaction(isolation)
    send(producer, subscribed, "0")
    for number in (1, 2, 3):
        send(conn, subscribed, "between")
        tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
        send(producer, subscribed, str(number))
    producer.execute("commit")
    for _ in range(3):
        rotate(conn, subscribed)
    tick(conn, subscribed)
    rotate(conn, subscribed)
    assert payloads(conn, subscribed, count=3) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("rotations", [1, 2, 3])
def test_a_producer_stalled_between_reading_the_queue_and_storing_is_delivered(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    rotations: int,
) -> None:
    turn(conn, subscribed)
    send(conn, subscribed, "between")
    blocker = transaction()
    blocker.execute(f"lock table {leaf(conn, subscribed)} in share mode".encode())
    stalled = background(lambda c: send(c, subscribed, "stalled"))
    wait_for_lock(stalled.pid)
    done = 0
    for _ in range(rotations):
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        # The last one finds the table locked, and leaves it.
        done += rotate_after_traffic(conn, subscribed)
    assert done == min(rotations, 2)
    forced_tick(conn, subscribed)
    drain(conn, subscribed)
    blocker.execute("commit")
    stalled.result()
    for _ in range(3):
        rotate(conn, subscribed)
    tick(conn, subscribed)
    for _ in range(3):
        rotate(conn, subscribed)
    assert payloads(conn, subscribed) == ["stalled"]


def rotate_after_traffic(conn: Connection, queue: str) -> int:
    """Give the current table something to reclaim, unless it is locked, and rotate."""
    conn.execute("set lock_timeout = '100ms'")
    try:
        send(conn, queue, "between")
    except psycopg.errors.LockNotAvailable:
        pass
    finally:
        conn.execute("reset lock_timeout")
    forced_tick(conn, queue)
    drain(conn, queue)
    return rotate(conn, queue)


def test_a_producer_that_waits_for_a_rotation_is_delivered(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    turn(conn, subscribed)
    turn(conn, subscribed)
    old = transaction("repeatable read")  # knows the table that is emptied next as the current one
    turn(conn, subscribed)
    send(conn, subscribed, "between")
    tick(conn, subscribed)
    drain(conn, subscribed)
    forced_tick(conn, subscribed)
    drain(conn, subscribed)
    turn(conn, subscribed)
    send(conn, subscribed, "between")
    forced_tick(conn, subscribed)
    drain(conn, subscribed)
    rotation = transaction()
    configure(conn, subscribed, rotation_period="1 microsecond")
    assert value(rotation, "select pgque.maint_rotate_tables_step1(%s)", subscribed) == 1
    writer = background(lambda c: send(c, subscribed, "waited"), old)
    wait_for_lock(writer.pid)
    rotation.execute("commit")
    writer.result()
    forced_tick(conn, subscribed)
    drain(conn, subscribed)
    old.execute("commit")
    tick(conn, subscribed)
    rotate(conn, subscribed)
    assert payloads(conn, subscribed) == ["waited"]


def test_savepoints_rolled_back_are_not_delivered_and_released_ones_are(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    producer = transaction()
    send(producer, subscribed, "1")
    producer.execute("savepoint a")
    send(producer, subscribed, "gone")
    producer.execute("savepoint b")
    send(producer, subscribed, "gone too")
    forced_tick(conn, subscribed)
    producer.execute("rollback to savepoint a")
    send(producer, subscribed, "2")
    producer.execute("release savepoint a")
    forced_tick(conn, subscribed)
    producer.execute("savepoint c")
    send(producer, subscribed, "3")
    producer.execute("release savepoint c")
    producer.execute("commit")
    tick(conn, subscribed)
    assert payloads(conn, subscribed) == ["1", "2", "3"]


def test_a_transaction_open_over_several_ticks_is_delivered_once_by_the_next(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    producer = transaction()
    others: list[str | None] = []
    for number in range(6):
        send(producer, subscribed, f"long {number}")
        send(conn, subscribed, f"short {number}")
        forced_tick(conn, subscribed)
        others += payloads(conn, subscribed)
    assert others == [f"short {n}" for n in range(6)]
    producer.execute("commit")
    assert tick(conn, subscribed) is not None
    assert payloads(conn, subscribed) == [f"long {n}" for n in range(6)]


def test_a_consumer_that_was_away_gets_a_long_transaction_once(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    subscribe(conn, subscribed, "away")
    producer = transaction()
    sent = [send(producer, subscribed)]
    for _ in range(3):
        sent.append(send(conn, subscribed))
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
    producer.execute("commit")
    for _ in range(3):
        sent.append(send(conn, subscribed))
        forced_tick(conn, subscribed)
    got = drain(conn, subscribed, "away", count=2)
    assert sorted(got) == sorted(sent)
    assert len(got) == len(set(got))


def test_many_transactions_open_at_a_tick_are_all_delivered_once(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    producers = [transaction() for _ in range(60)]
    sent = [send(p, subscribed) for p in producers]
    forced_tick(conn, subscribed)
    for number, producer in enumerate(producers):
        if number % 3 == 1:
            producer.execute("commit")
    tick(conn, subscribed)
    for number, producer in enumerate(producers):
        if number % 3 == 2:
            producer.execute("rollback")
    tick(conn, subscribed)
    for number, producer in enumerate(producers):
        if number % 3 == 0:
            producer.execute("commit")
    tick(conn, subscribed)
    got = drain(conn, subscribed, count=9)
    assert sorted(got) == [s for n, s in enumerate(sent) if n % 3 != 2]


def test_a_prepared_transaction_is_delivered_when_it_commits(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    need_prepared_transactions(conn)
    for name, end in (("one", "commit"), ("two", "rollback"), ("three", "commit")):
        producer = transaction()
        send(producer, subscribed, name)
        producer.execute(f"prepare transaction '{subscribed}_{name}'".encode())
        producer.close()
        forced_tick(conn, subscribed)
        for _ in range(3):
            rotate_after_traffic(conn, subscribed)
        assert receive(conn, subscribed) == []
        conn.execute(f"{end} prepared '{subscribed}_{name}'".encode())
        made = tick(conn, subscribed)
        expected = [name] if end == "commit" else []
        assert (made is not None) == bool(expected)
        assert payloads(conn, subscribed) == expected


def test_a_late_commit_is_delivered_by_the_next_tick(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    producer = transaction()
    late = send(producer, subscribed)
    prompt = send(conn, subscribed)
    assert tick(conn, subscribed) is not None
    assert drain(conn, subscribed) == [prompt]
    assert tick(conn, subscribed) is None
    producer.execute("commit")
    assert tick(conn, subscribed) is not None
    assert drain(conn, subscribed) == [late]


def test_rolled_back_sends_cause_no_tick(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    producer = transaction()
    send_many(producer, subscribed, 2_000)
    assert tick(conn, subscribed) is None
    producer.execute("rollback")
    assert tick(conn, subscribed) is None
    assert value(conn, "select pgque.ticker()") >= 0
    assert tick(conn, subscribed) is None
