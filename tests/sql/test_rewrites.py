"""Addresses of messages that workers share: made by two sessions at once, and tables rewritten under them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    Message,
    ack,
    configure,
    dead_letters,
    extend,
    ids,
    leaf,
    move_clock,
    nack_ids,
    outcome,
    post,
    release,
    row_counts,
    send_many,
    set_visibility,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)

Background = Callable[..., Any]
Wait = Callable[..., None]
Connect = Callable[..., Connection]

OUTCOMES = ["ack", "nack", "dead", "archive", "release", "set_visibility", "extend", "lapse", "reclaim"]


def fill(conn: Connection, connect: Connect, dsn: str, count: int) -> list[int]:
    """Send messages of two transactions, of which the earlier one stored its rows behind those of the later.

    What was rolled back lies between them. So VACUUM FULL gives the rows other addresses, and CLUSTER
    another order besides.
    """
    early = connect(dsn, autocommit=False)
    value(early, "select pg_current_xact_id()")
    late = send_many(conn, "q", count // 2)
    gone = connect(dsn, autocommit=False)
    send_many(gone, "q", 7)
    gone.rollback()
    sent = send_many(early, "q", count - count // 2)
    early.commit()
    tick(conn, "q")
    return late + sent


def rewrite(conn: Connection, how: str) -> None:
    """Give the table with the messages another file."""
    table = leaf(conn, "q")
    if how == "cluster":
        index = value(
            conn,
            "select x.indexrelid::regclass::text from pg_index as x where x.indrelid = %s::regclass"
            " and x.indnatts = 1",
            table,
        )
        conn.execute(f"cluster {table} using {index.rpartition('.')[2]}".encode())
    else:
        conn.execute(f"vacuum full {table}".encode())


def say(conn: Connection, how: str, batch: list[Message]) -> set[int]:
    """Give all messages of a batch an outcome; return those that come again."""
    token, held = batch[0].batch_id, ids(batch)
    again = set(held)
    if how == "nack":
        assert [r[1] for r in nack_ids(conn, token, held, "0", "x")] == [True] * len(held)
    elif how in ("ack", "dead", "archive"):
        reason = ["x"] if how == "dead" else []
        assert outcome(conn, how, token, held, *reason) == dict.fromkeys(held)
        again = set()
    elif how == "release":
        assert release(conn, token) == len(held)
    elif how == "set_visibility":
        assert set_visibility(conn, token, "1 minute") == len(held)
    elif how == "extend":
        assert extend(conn, token, "1 minute") == len(held)
    elif how == "reclaim":
        assert value(conn, "select pgque.reclaim('q', 'c')") == 1
    else:
        move_clock(conn, "1 hour")
    return again


def mapped(conn: Connection) -> int:
    """Count the rows that hold addresses."""
    return row_counts(conn).get("window_map", 0)


def taken(conn: Connection, count: int = 30) -> list[int]:
    """Take and ack until nothing is left, some at a time."""
    return ids(work_off(conn, "q", "last", count))


@pytest.mark.parametrize("size", [1, 7, 99, 100, 101])
@pytest.mark.parametrize("end", ["commit", "rollback", "killed"])
def test_addresses_that_two_sessions_noted_at_once_name_each_message_once(
    pool: Connection, own_dsn: str, connect: Connect, end: str, size: int
) -> None:
    subscribe(pool, "q", "d")
    sent = fill(pool, connect, own_dsn, 1200)
    ahead = take(pool, "q", "w0", 10, "1 day")
    first = take(pool, "q", "w1", 40, "1 day")
    assert ack(pool, ahead[0].batch_id) == 1
    rewrite(pool, "vacuum full")  # nobody's addresses are good any more
    before = mapped(pool)
    one = connect(own_dsn, autocommit=False)
    assert ids(take(one, "q", "w", 40, "1 day", consumer="d")) == sent[:40]
    got = ids(take(pool, "q", "w2", 40, "1 day"))
    assert mapped(pool) == before + 48
    if end == "killed":
        value(pool, "select pg_terminate_backend(%s, 5000)", one.info.backend_pid)
    else:
        one.execute(end.encode())
    assert mapped(pool) == before + (96 if end == "commit" else 48)
    # Slices that end in, at and behind the end of what one row names.
    got += ids(take(pool, "q", "w3", size, "1 day"))
    got += ids(take(pool, "q", "w4", size, "1 day"))
    got += taken(pool)
    assert Counter(got) == Counter(sent[50:])
    move_clock(pool, "2 days")
    settle(pool, "q")
    assert set(taken(pool)) >= set(ids(first))


@pytest.mark.slow
def test_workers_that_ack_and_receive_while_no_addresses_are_known_get_each_message_once(
    pool: Connection, own_dsn: str, connect: Connect, background: Background
) -> None:
    configure(pool, "q", max_receive_attempts=1000, max_retries=1000)
    sent = fill(pool, connect, own_dsn, 2500)

    def worker(name: str, size: int) -> Callable[[Connection], list[int]]:
        def run(c: Connection) -> list[int]:
            done: list[int] = []
            failed: set[int] = set()
            while batch := take(c, "q", name, size, "1 day"):
                token, held = batch[0].batch_id, ids(batch)
                bad = [m.msg_id for m in batch if m.msg_id % 5 == 0 and m.retry_count == 0]
                failed.update(bad)
                if bad:
                    assert {r[1] for r in nack_ids(c, token, bad, "0", "x")} == {True}
                rest = [i for i in held if i not in bad]
                assert outcome(c, "ack", token, rest) == dict.fromkeys(rest)
                done += rest
            return done

        return run

    jobs = [background(worker(f"w{n}", 3 + 4 * n), connect(own_dsn)) for n in range(3)]
    got: list[int] = []
    while not all(job.done for job in jobs):
        # The cache is emptied again and again.
        pool.execute("truncate pgque.window_map")
    for job in jobs:
        got += job.result()
    got += taken(pool)
    assert Counter(got) == Counter(sent)


@pytest.mark.parametrize("rewriting", ["vacuum full", "cluster"])
@pytest.mark.parametrize("how", OUTCOMES)
def test_a_rewritten_table_between_a_delivery_and_its_outcome_changes_nothing(
    pool: Connection, own_dsn: str, connect: Connect, how: str, rewriting: str
) -> None:
    sent = fill(pool, connect, own_dsn, 30)
    batch = take(pool, "q", "w1", 10)
    assert ids(batch) == sent[:10]
    rewrite(pool, rewriting)
    again = say(pool, how, batch)
    rewrite(pool, rewriting)
    got = work_off(pool, "q", "w2", 4)
    move_clock(pool, "2 hours")
    settle(pool, "q")
    got += work_off(pool, "q", "w2", 4)
    assert Counter(ids(got)) == Counter(again) + Counter(sent[10:])
    assert {m.msg_id: m.payload for m in got} == {
        i: str(number % 15 + 1) for number, i in enumerate(sent) if i in again or number >= 10
    }
    assert sorted(dead_letters(pool, "q")) == (sent[:10] if how == "dead" else [])


@pytest.mark.parametrize("rewriting", ["vacuum full", "cluster"])
@pytest.mark.parametrize("count", [30, 2300])
def test_a_rewritten_table_between_two_deliveries_of_a_window_loses_and_repeats_nothing(
    pool: Connection, own_dsn: str, connect: Connect, count: int, rewriting: str
) -> None:
    sent = fill(pool, connect, own_dsn, count)
    got: list[Message] = []
    number = 0
    while batch := take(pool, "q", f"w{number}", count // 7, "1 day"):
        got += batch
        if number % 2 == 0:
            assert ack(pool, batch[0].batch_id) == 1
        rewrite(pool, rewriting)
        number += 1
    assert ids(got) == sent
    assert number > 6
    # What was not acked is still found where it is now.
    move_clock(pool, "2 days")
    held = [i for n in range(number) if n % 2 for i in sent[n * (count // 7) : (n + 1) * (count // 7)]]
    assert sorted(taken(pool)) == held


@pytest.mark.parametrize("rewriting", ["vacuum full", "cluster"])
def test_keys_keep_their_order_when_the_table_is_rewritten(
    own: Connection, own_dsn: str, connect: Connect, rewriting: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c', keyed_order => true)")
    gone = connect(own_dsn, autocommit=False)
    send_many(gone, "q", 5)
    gone.rollback()
    sent = [post(own, "q", str(n), partition_key="abc"[n % 3]) for n in range(30)]
    tick(own, "q")
    order: dict[int, list[int]] = {0: [], 1: [], 2: []}
    number = 0
    while batch := take(own, "q", f"w{number}", 2, "1 day"):
        rewrite(own, rewriting)
        assert len({m.extra1 for m in batch}) == len(batch)
        other = take(own, "q", "other", 10, "1 day")
        assert {m.extra1 for m in other}.isdisjoint(m.extra1 for m in batch)
        for part in (batch, other):
            if part and number % 4 == 3:
                nack_ids(own, part[0].batch_id, ids(part)[:1], "0", "x")
            for m in part:
                if outcome(own, "ack", m.batch_id, [m.msg_id]) == {m.msg_id: None}:
                    order[sent.index(m.msg_id) % 3].append(m.msg_id)
        number += 1
    assert order == {lane: sent[lane::3] for lane in range(3)}


@pytest.mark.parametrize("count", [60, 2300])
@pytest.mark.parametrize("when", ["receiving", "waiting"])
def test_a_worker_that_meets_a_table_just_being_rewritten_gets_its_messages_or_tries_again(
    pool: Connection,
    own_dsn: str,
    connect: Connect,
    background: Background,
    wait_for_lock: Wait,
    when: str,
    count: int,
) -> None:
    sent = fill(pool, connect, own_dsn, count)
    first = take(pool, "q", "w1", 10, "1 day")
    one = connect(own_dsn, autocommit=False)
    if when == "receiving":
        held = take(one, "q", "w2", 10, "1 day")
        rewriting = background(lambda c: rewrite(c, "cluster"), connect(own_dsn))
        wait_for_lock(rewriting.pid)
        # It has begun to read and goes on, before the rewriting.
        held += take(one, "q", "w2", 10, "1 day")
    else:
        held = []
        one.execute(f"lock table {leaf(pool, 'q')} in access share mode".encode())
        rewriting = background(lambda c: rewrite(c, "cluster"), connect(own_dsn))
        wait_for_lock(rewriting.pid)
    # These come after it: what they know of the table is out of date when they get its lock.
    taking = background(lambda c: ids(take(c, "q", "w3", 10, "1 day")), connect(own_dsn))
    nacking = background(
        lambda c: [r[1] for r in nack_ids(c, first[0].batch_id, ids(first)[:4], "0", "x")], connect(own_dsn)
    )
    wait_for_lock(taking.pid)
    wait_for_lock(nacking.pid)
    one.commit()
    rewriting.result()
    got = ids(held)
    back: list[int] = []
    try:
        got += taking.result()
    except psycopg.errors.SerializationFailure:
        got += ids(take(pool, "q", "w3", 10, "1 day"))
    try:
        assert nacking.result() == [True] * 4
    except psycopg.errors.SerializationFailure:
        assert {r[1] for r in nack_ids(pool, first[0].batch_id, ids(first)[:4], "0", "x")} == {True}
    back = ids(first)[:4]
    got += taken(pool)
    assert Counter(got) == Counter(sent[10:] + back)
    assert ack(pool, first[0].batch_id) == 1


def test_tables_that_all_queues_share_may_be_rewritten_too(pool: Connection) -> None:
    sent = send_many(pool, "q", 40)
    tick(pool, "q")
    acked = take(pool, "q", "w1", 10, "1 day")
    outcome(pool, "ack", acked[0].batch_id, ids(acked)[:5])
    failed = take(pool, "q", "w1", 10, "1 day")
    nack_ids(pool, failed[0].batch_id, ids(failed), "0", "x")
    for table in (
        "position_0",
        "position_1",
        "settled_0",
        "settled_1",
        "retry_queue",
        "window_map",
        "subscriber",
    ):
        pool.execute(f"vacuum full pgque.{table}".encode())
        assert extend(pool, acked[0].batch_id, "1 second") == 5
    found = outcome(pool, "ack", acked[0].batch_id, ids(acked))
    assert [i for i, reason in found.items() if reason is None] == sent[5:10]
    assert sorted(taken(pool, 7)) == sent[10:]


def test_a_second_pool_has_addresses_of_its_own(pool: Connection, own_dsn: str, connect: Connect) -> None:
    subscribe(pool, "q", "d")
    sent = fill(pool, connect, own_dsn, 250)
    mine = ids(take(pool, "q", "w", 20, "1 day"))
    others = ids(take(pool, "q", "w", 30, "1 day", consumer="d"))
    rewrite(pool, "vacuum full")
    one = connect(own_dsn, autocommit=False)
    others += ids(take(one, "q", "w", 30, "1 day", consumer="d"))
    mine += ids(take(pool, "q", "w", 20, "1 day"))
    one.commit()
    mine += taken(pool)
    others += ids(work_off(pool, "q", "last", 40, consumer="d"))
    assert mine == sent
    assert others == sent
