"""Reclaiming space: rotation and maint()."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    drain,
    forced_tick,
    leaf,
    move_clock,
    queue_bytes,
    receive,
    rotate,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)


def test_a_rotation_moves_on_to_the_next_table_and_reclaims_the_oldest(
    conn: Connection, subscribed: str
) -> None:
    tables = []
    for _ in range(6):
        send_many(conn, subscribed, 2_000)
        tick(conn, subscribed)
        drain(conn, subscribed, count=1_000)
        tables.append(leaf(conn, subscribed))
        assert rotate(conn, subscribed) == 1
        assert value(conn, "select pg_relation_size(%s::regclass)", leaf(conn, subscribed)) == 0
    assert tables[:3] == tables[3:]
    assert len(set(tables)) == 3


def test_a_rotation_waits_for_the_rotation_period(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    send(own, "q")
    tick(own, "q")
    assert value(own, "select pgque.maint_rotate_tables_step1('q')") == 0
    move_clock(own, "3 hours")
    assert value(own, "select pgque.maint_rotate_tables_step1('q')") == 1
    assert value(own, "select pgque.maint_rotate_tables_step1('q')") == 0


def test_an_empty_queue_does_not_rotate(conn: Connection, subscribed: str) -> None:
    assert [rotate(conn, subscribed) for _ in range(3)] == [0, 0, 0]


def test_rotation_stops_before_what_the_slowest_consumer_needs_and_the_others_go_on(
    conn: Connection, subscribed: str
) -> None:
    subscribe(conn, subscribed, "slow")
    sent: list[int] = []
    rotations = []
    for number in range(6):
        sent += send_many(conn, subscribed, 50)
        tick(conn, subscribed)
        assert drain(conn, subscribed, count=7) == sent[-50:]
        if number == 1:
            batch = receive(conn, subscribed, "slow", 30)
            ack(conn, batch[0].batch_id)
        rotations.append(rotate(conn, subscribed))
    assert rotations == [1, 1, 0, 0, 0, 0]
    assert drain(conn, subscribed, "slow", count=40) == sent[30:]
    forced_tick(conn, subscribed)
    drain(conn, subscribed)
    drain(conn, subscribed, "slow")
    assert rotate(conn, subscribed) == 1


def test_an_open_batch_holds_its_table_until_it_is_acked(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 10)
    tick(conn, subscribed)
    batch = receive(conn, subscribed, count=4)
    for _ in range(5):
        forced_tick(conn, subscribed)
        rotate(conn, subscribed)
    assert receive(conn, subscribed, count=4) == batch
    ack(conn, batch[0].batch_id)
    for _ in range(5):
        forced_tick(conn, subscribed)
        rotate(conn, subscribed)
    assert drain(conn, subscribed, count=3) == sent[4:]


def test_a_table_locked_by_a_dump_only_postpones_rotation(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    for _ in range(3):
        send(conn, subscribed)
        tick(conn, subscribed)
        drain(conn, subscribed)
        assert rotate(conn, subscribed) == 1
    send(conn, subscribed)
    forced_tick(conn, subscribed)
    drain(conn, subscribed)
    dump = transaction("repeatable read")
    dump.execute(
        ", ".join(
            [
                f"lock table {leaf(conn, subscribed, 0)}",
                *[leaf(conn, subscribed, n) for n in (1, 2)],
                *[leaf(conn, subscribed, n, "tick") for n in (0, 1, 2)],
            ]
        ).encode()
        + b" in access share mode"
    )
    before = leaf(conn, subscribed)
    assert rotate(conn, subscribed) == 0
    value(conn, "select pgque.maint()")
    assert leaf(conn, subscribed) == before
    later = send(conn, subscribed)
    tick(conn, subscribed)
    assert drain(conn, subscribed) == [later]
    dump.execute("commit")
    assert rotate(conn, subscribed) == 1


def test_a_message_nobody_ticked_yet_is_never_reclaimed(conn: Connection, subscribed: str) -> None:
    sent = [send(conn, subscribed)]
    for _ in range(5):
        rotate(conn, subscribed)
        sent.append(send(conn, subscribed))
    tick(conn, subscribed)
    assert drain(conn, subscribed) == sent


def test_rotation_by_two_sessions_at_once_rotates_once(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
) -> None:
    sent: list[int] = []
    for _ in range(3):
        send(conn, subscribed)
        tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
    send(conn, subscribed)
    forced_tick(conn, subscribed)
    drain(conn, subscribed)
    configure(conn, subscribed, rotation_period="1 hour")
    configure(conn, subscribed, rotation_period="1 microsecond")
    one = transaction()
    assert value(one, "select pgque.maint_rotate_tables_step1(%s)", subscribed) == 1
    # The other one does not wait, and sees the queue as taken.
    conn.execute("set lock_timeout = '10s'")
    started = time.monotonic()
    assert value(conn, "select pgque.maint_rotate_tables_step1(%s)", subscribed) == 0
    assert value(conn, "select pgque.maint() is not null")
    assert time.monotonic() - started < 4
    one.execute("commit")
    sent.append(send(conn, subscribed))
    tick(conn, subscribed)
    assert drain(conn, subscribed) == sent


@pytest.mark.slow
def test_maint_by_two_sessions_under_load_loses_nothing(
    conn: Connection, connect: Callable[..., Connection], background: Callable[..., Any], subscribed: str
) -> None:
    configure(conn, subscribed, rotation_period="1 microsecond")
    stop: list[bool] = []

    def maintain(c: Connection) -> int:
        calls = 0
        while not stop:
            value(c, "select pgque.maint()")
            calls += 1
        return calls

    workers = [background(maintain), background(maintain)]
    got: list[int] = []
    sent: list[int] = []
    for number in range(150):
        sent += send_many(conn, subscribed, 3)
        if number % 2:
            tick(conn, subscribed)
        got += drain(conn, subscribed, count=4)
    stop.append(True)
    assert all(w.result() > 3 for w in workers)
    tick(conn, subscribed)
    got += drain(conn, subscribed)
    assert got == sent


@pytest.mark.slow
@pytest.mark.parametrize("consumers", [0, 2])
def test_maint_alone_keeps_the_disk_bounded(conn: Connection, queue: str, consumers: int) -> None:
    names = [f"c{n}" for n in range(consumers)]
    for name in names:
        subscribe(conn, queue, name)
    configure(conn, queue, rotation_period="1 microsecond")
    sizes = []
    for _ in range(40):
        send_many(conn, queue, 3_000)
        tick(conn, queue)
        for name in names:
            assert len(drain(conn, queue, name, count=1_000)) == 3_000
        value(conn, "select pgque.maint()")
        sizes.append(queue_bytes(conn, queue))
    # Autovacuum may add a map of a few pages.
    assert max(sizes[20:]) < 1.2 * max(sizes[:12])


@pytest.mark.slow
def test_idle_ticks_alone_do_not_fill_the_disk(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, rotation_period="1 microsecond")
    sizes = []
    for _ in range(12):
        made = value(
            conn,
            "select count(pgque.ticker(%s)) from generate_series(1, 600)"
            " where pgque.force_next_tick(%s) is not null",
            subscribed,
            subscribed,
        )
        assert made == 600
        rows(conn, "select pgque.receive(%s, 'c')", subscribed)
        value(conn, "select pgque.maint()")
        sizes.append(queue_bytes(conn, subscribed))
    assert max(sizes) < 3_000_000


def test_rotation_does_not_touch_retries_and_dead_letters(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, max_retries=0)
    dead, again = send_many(conn, subscribed, 2)
    tick(conn, subscribed)
    batch = receive(conn, subscribed)[0].batch_id
    rows(conn, "select pgque.nack(%s, array[%s::bigint])", batch, dead)
    rows(conn, "select pgque.event_retry(%s, %s, 3600)", batch, again)
    ack(conn, batch)
    for _ in range(5):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
    assert [r[0] for r in rows(conn, "select ev_id from pgque.dlq_inspect(%s)", subscribed)] == [dead]
    value(conn, "select pgque.retry_now(%s, 'c')", subscribed)
    assert drain(conn, subscribed) == [again]


def test_maint_lists_its_steps_once_and_a_rotation_only_when_its_time_has_come(own: Connection) -> None:
    for name in ("a", "b", "c"):
        value(own, "select pgque.create_queue(%s)", name)
    value(own, "select pgque.set_queue_config('b', 'rotation_period', '1 microsecond')")
    listed = rows(
        own,
        "select func_arg from pgque.maint_operations() where func_name = 'pgque.maint_rotate_tables_step1'",
    )
    assert listed == [("b",)]
    own.execute("set track_functions = 'pl'")
    with own.transaction():
        value(own, "select pgque.maint()")
        calls = "select pg_stat_get_xact_function_calls('pgque.maint_operations()'::regprocedure)"
        assert value(own, calls) == 1


def test_a_rotation_that_is_late_waits_for_consumers_whose_transactions_overlap(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    for _ in range(3):
        send_many(own, "q", 10)
        tick(own, "q")
        assert len(drain(own, "q")) == 10
        rotate(own, "q")
    before = leaf(own, "q")
    # Now each table has been written to, and whoever reads locks the oldest.
    readers = [connect(own_dsn, autocommit=False) for _ in range(2)]
    locks = "lock table pgque.event in access share mode"
    readers[0].execute(locks)

    def rotates(conn: Connection) -> int:
        for turn in range(1_000):
            if value(conn, "select pgque.maint_rotate_tables_step1('q')") == 1:
                return turn
        return -1

    rotation = background(rotates, connect(own_dsn))
    waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
    reader = 0
    while not rotation.done:
        if value(own, waits, rotation.pid):
            # The next one queues up behind it, and the one that holds the lock ends.
            readers[reader].commit()
        else:
            reader = 1 - reader
            readers[reader].execute(locks)
            readers[1 - reader].commit()
    assert rotation.result() >= 0
    assert leaf(own, "q") != before
