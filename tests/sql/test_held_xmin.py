"""An old open transaction costs nothing: no dead rows, no growth, a journal that stays small."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import psycopg
import pytest

from model.bench import turn_journal
from sql.helpers import (
    Connection,
    ack,
    compact_patiently,
    compact_soon,
    dead_tuples,
    drain,
    ids,
    nack_ids,
    offer,
    outcome,
    receive,
    receive_coop,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    take,
    tick,
    value,
)

# Sends, ticks, receives and acks in transactions of their own.
CYCLES = """
do $$
declare
  v_batch bigint;
begin
  for n in 1..{each} loop
    perform pgque.send('q', 'x'::text);
    commit;
    perform pgque.ticker('q');
    commit;
    select batch_id into strict v_batch from pgque.receive('q', 'c');
    perform pgque.ack(v_batch);
    commit;
  end loop;
end
$$
"""


@pytest.fixture
def held(own: Connection, own_dsn: str) -> Iterator[Connection]:
    """A database of its own with a queue q, a consumer c, and two transactions that hold everything."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    with psycopg.connect(own_dsn) as writer, psycopg.connect(own_dsn) as reader:
        writer.execute("select pg_current_xact_id()")
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select count(*) from pgque.queue")
        reader_pid = reader.info.backend_pid
        yield own
        assert value(own, "select backend_xmin is not null from pg_stat_activity where pid = %s", reader_pid)
        reader.rollback()
        writer.rollback()


def cycles(conn: Connection, each: int, wait_until: Callable[..., None]) -> list[int]:
    """Run ten times so many cycles, each part in a session of its own; return the blocks that each part read.

    What a call costs is asked of the server's buffers, not of the clock: the machine may be busy.
    """
    figure = "select {} from pg_stat_database where datname = current_database()"
    found = []
    for _ in range(10):
        commits = value(conn, figure.format("xact_commit"))
        blocks = value(conn, figure.format("blks_hit + blks_read"))
        with psycopg.connect(conn.info.dsn, autocommit=True) as worker:
            worker.execute(CYCLES.format(each=each).encode())
        done = commits + 3 * each
        wait_until(lambda: value(conn, figure.format("xact_commit")) >= done, "statistics", 20)  # noqa: B023
        found.append(value(conn, figure.format("blks_hit + blks_read")) - blocks)
    return found


def journal_bytes(conn: Connection) -> int:
    """Bytes of the journal of positions."""
    return int(
        value(
            conn,
            "select sum(pg_total_relation_size(c.oid)) from pg_class as c"
            " where c.relnamespace = 'pgque'::regnamespace and c.relname ~ '^(position|settled)_[01]$'",
        )
    )


@pytest.mark.slow
def test_3000_batches_under_a_held_xmin_leave_no_dead_row(
    held: Connection, wait_until: Callable[..., None]
) -> None:
    blocks = cycles(held, 300, wait_until)
    events = "select sum(t.n_tup_ins) from pg_stat_all_tables as t where t.schemaname = 'pgque' and t.relname like 'event%'"
    wait_until(lambda: dead_tuples(held) == {} and value(held, events) >= 3_000, "statistics", 20)
    assert dead_tuples(held) == {}
    # Statistics that autovacuum takes meanwhile may change a plan; what grows with dead rows grows many times.
    assert median(blocks[7:]) < 1.5 * median(blocks[:3])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_20000_batches_under_a_held_xmin_cost_as_much_as_the_first(
    held: Connection, wait_until: Callable[..., None]
) -> None:
    blocks = cycles(held, 2_000, wait_until)
    assert dead_tuples(held) == {}
    # Statistics that autovacuum takes meanwhile may change a plan; what grows with dead rows grows many times.
    assert median(blocks[7:]) < 1.5 * median(blocks[:3])


def compact(conn: Connection, calls: int = 5) -> None:
    for _ in range(calls):
        value(conn, "select pgque.maint()")


@pytest.mark.slow
def test_the_journal_is_compacted_while_xmin_is_held_and_everybody_stands_where_he_stood(
    held: Connection,
) -> None:
    compact_soon(held)
    for name in ("open", "idle", "sliced", "behind"):
        subscribe(held, "q", name)
    value(held, "select pgque.register_subconsumer('q', 'group', 'a')")
    value(held, "select pgque.register_subconsumer('q', 'group', 'b')")
    sent = send_many(held, "q", 10)
    tick(held, "q")
    drain(held, "q")
    opened = receive(held, "q", "open", 6)
    nack_ids(held, opened[0].batch_id, sent[:2], "1 hour")
    ack(held, receive(held, "q", "sliced", 4)[0].batch_id)
    held_by_a = receive_coop(held, "q", "a", 3, consumer="group")
    assert drain(held, "q", "idle") == sent
    for _ in range(4):
        held.execute(CYCLES.format(each=600).encode())
        before = journal_bytes(held)
        compact(held)
        assert journal_bytes(held) < before / 2
    again = receive(held, "q", "open")
    assert [m.msg_id for m in again] == sent[2:6]
    assert {m.batch_id for m in again} == {opened[0].batch_id}
    outcome = {r[0]: r[1] for r in nack_ids(held, opened[0].batch_id, [sent[1], sent[2]], "1 hour")}
    assert outcome == {sent[1]: False, sent[2]: True}
    assert ack(held, opened[0].batch_id) == 1
    later = list(range(sent[-1] + 1, sent[-1] + 2401))
    assert drain(held, "q", "open", 1_000) == sent[6:] + later
    assert drain(held, "q", "sliced", 1_000) == sent[4:] + later
    assert drain(held, "q", "idle", 1_000) == later
    assert drain(held, "q", "behind", 700) == sent + later
    assert drain(held, "q", "c") == []
    assert receive_coop(held, "q", "a", consumer="group") == held_by_a
    assert [m.msg_id for m in receive_coop(held, "q", "b", 4, consumer="group")] == sent[3:7]
    assert ack(held, held_by_a[0].batch_id) == 1
    assert sum(dead_tuples(held).values()) < 100


@pytest.mark.slow
def test_consumers_that_are_always_in_a_transaction_do_not_keep_the_journal_from_being_compacted(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    compact_soon(own)
    names = [f"c{n}" for n in range(4)]
    for name in names:
        subscribe(own, "q", name)
    sessions = [connect(own_dsn, autocommit=False) for _ in names]
    got: dict[str, list[int]] = {name: [] for name in names}
    sent: list[int] = []
    sizes = []
    for step in range(1_200):
        who = step % len(names)
        if step % 4 == 0:
            sent.append(send(own, "q"))
            tick(own, "q")
        # This session's transaction stays open while the others' end and begin.
        sessions[who].commit()
        batch = receive(sessions[who], "q", names[who])
        if batch:
            got[names[who]] += [m.msg_id for m in batch]
            ack(sessions[who], batch[0].batch_id)
        if step % 5 == 0:
            value(own, "select pgque.maint()")
            sizes.append(journal_bytes(own))
    for session in sessions:
        session.commit()
    for name in names:
        got[name] += drain(own, "q", name)
        assert got[name] == sent
    assert max(sizes) < 400_000
    assert any(after < before / 2 for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_snapshot_older_than_a_compaction_acks_nothing_twice(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    compact_soon(own)
    subscribe(own, "q")
    subscribe(own, "q", "busy")
    sent = send_many(own, "q", 4)
    tick(own, "q")
    batch = receive(own, "q", count=2)[0].batch_id
    stale = transaction(isolation, own_dsn)
    assert ack(own, batch) == 1
    touch = "select count(pgque.touch_subconsumer('q', 'group', 'w')) from generate_series(1, 1500)"
    value(own, "select pgque.register_subconsumer('q', 'group', 'w')")
    for _ in range(3):
        value(own, touch)
        compact(own)
    refused("40001", ack, stale, batch)
    stale.execute("rollback")
    assert drain(own, "q") == sent[2:]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_snapshot_from_before_the_journal_rotated_delivers_nothing_twice(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    compact_soon(own)
    for name in ("c", "other"):
        subscribe(own, "q", name)
    value(own, "select pgque.register_subconsumer('q', 'group', 'w')")
    sent = send_many(own, "q", 4)
    tick(own, "q")
    stale = transaction(isolation, own_dsn)
    assert len(receive(stale, "q", "other", 2)) == 2
    value(own, "select count(pgque.touch_subconsumer('q', 'group', 'w')) from generate_series(1, 1500)")
    compact(own)
    first = receive(own, "q", count=2)
    ack(own, first[0].batch_id)
    got = [m.msg_id for m in first]
    try:
        batch = receive(stale, "q", count=2)
        ack(stale, batch[0].batch_id)
        stale.execute("commit")
        got += [m.msg_id for m in batch]
    except psycopg.errors.SerializationFailure:
        stale.execute("rollback")
    assert got + drain(own, "q") == sent


def test_a_consumer_that_locks_its_position_only_postpones_compaction(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    compact_soon(own)
    subscribe(own, "q")
    sent = send_many(own, "q", 4)
    tick(own, "q")
    value(own, "select pgque.register_subconsumer('q', 'group', 'w')")
    busy = connect(own_dsn, autocommit=False)
    batch = receive(busy, "q", count=2)
    value(own, "select count(pgque.touch_subconsumer('q', 'group', 'w')) from generate_series(1, 1500)")
    before = journal_bytes(own)
    own.execute("set lock_timeout = '5s'")
    compact(own)
    assert ack(busy, batch[0].batch_id) == 1
    busy.commit()
    compact(own)
    assert journal_bytes(own) < before / 2
    assert drain(own, "q") == sent[2:]


@pytest.fixture
def large(own: Connection) -> Connection:
    """A database with a queue q, and a journal that is due to turn."""
    value(own, "select pgque.create_queue('q')")
    compact_soon(own)
    value(own, "select pgque.register_subconsumer('q', 'group', 'w')")
    value(own, "select count(pgque.touch_subconsumer('q', 'group', 'w')) from generate_series(1, 1500)")
    return own


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_old_snapshots_that_overlap_without_end_do_not_keep_the_journal_from_being_compacted(
    large: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    transaction: Callable[..., Connection],
    isolation: str,
) -> None:
    """
    first: a transaction that received keeps the journal's leaf
    compaction: waits for its end
    second: begins before that end, and waits behind the compaction
    result: the compaction is done, and the second is told to try again
    """
    compact_patiently(large, "30s")
    for name in ("first", "second"):
        subscribe(large, "q", name)
    sent = send_many(large, "q", 4)
    tick(large, "q")
    leaves = "select j.journal_cur, pgque._journal_size(1 - j.journal_cur) > 0 from pgque.journal j"
    compaction = connect(own_dsn)
    got: list[int] = []
    for result in ((1, True), (1, False)):  # first it turns, then it empties the other leaf
        first = transaction(isolation, own_dsn)
        batch = receive(first, "q", "first", 2)
        ack(first, batch[0].batch_id)
        got += [message.msg_id for message in batch]
        turning = background(lambda c: value(c, "select pgque._compact_journal()"), compaction)
        wait_for_lock(turning.pid)
        second = transaction(isolation, own_dsn)
        behind = background(lambda c: receive(c, "q", "second"), second)
        wait_for_lock(behind.pid)
        first.execute("commit")
        assert turning.result() == 1
        with pytest.raises(psycopg.errors.SerializationFailure):
            behind.result()
        second.execute("rollback")
        assert rows(large, leaves) == [result]
    assert got == sent
    assert drain(large, "q", "first") == []
    assert drain(large, "q", "second") == sent


@pytest.mark.parametrize("waits", [False, True])
def test_a_pool_stays_where_it_is_when_the_journal_is_compacted_while_its_newest_batch_is_acked(
    large: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    waits: bool,
) -> None:
    """
    journal: turns, with two open batches of a pool
    worker: acks the newer one, and has not committed
    compaction: may not copy the pool's position, and so not the older batch either
    result: the pool goes on behind both batches
    """
    subscribe(large, "q", "pool")
    sent = send_many(large, "q", 6)
    tick(large, "q")
    delivery = "select msg_id, batch_id from pgque.receive('q', 'pool', 2, worker => %s, visibility_timeout => '1 hour')"
    rows(large, delivery, "one")
    newest = rows(large, delivery, "two")[0][1]
    assert value(large, "select pgque._compact_journal()") == 1
    worker = connect(own_dsn, autocommit=False)
    assert ack(worker, newest) == 1
    if waits:
        compact_patiently(large, "30s")
        compaction = background(lambda c: value(c, "select pgque._compact_journal()"), connect(own_dsn))
        wait_for_lock(compaction.pid)
        worker.commit()
        assert compaction.result() == 0
    else:
        assert value(large, "select pgque._compact_journal()") == 0
        worker.commit()
    assert [msg_id for msg_id, _ in rows(large, delivery, "three")] == sent[4:]
    compact(large)
    assert value(large, "select pgque._journal_size(1 - j.journal_cur) from pgque.journal j") == 0
    assert rows(large, delivery, "four") == []


def test_a_consumer_that_subscribes_while_the_journal_is_compacted_keeps_its_position(
    large: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    newcomer = connect(own_dsn, autocommit=False)
    subscribe(newcomer, "q", "new")
    assert value(large, "select pgque._compact_journal()") == 1
    compact_patiently(large, "30s")
    compaction = background(lambda c: value(c, "select pgque._compact_journal()"), connect(own_dsn))
    wait_for_lock(compaction.pid)
    newcomer.commit()
    assert compaction.result() == 0
    sent = send_many(large, "q", 2)
    tick(large, "q")
    assert drain(large, "q", "new") == sent


def turned(conn: Connection) -> int:
    """Turn the journal and empty its old leaf; return how many blocks the latter read."""
    assert turn_journal(conn)
    blocks = 0
    while value(conn, "select pgque._journal_size(1 - j.journal_cur) from pgque.journal j"):
        plan = value(conn, "explain (analyze, buffers, format json) select pgque._compact_journal()")[0][
            "Plan"
        ]
        blocks += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return blocks


@pytest.mark.slow  # 4,000 batches, one by one
def test_a_turn_of_the_journal_costs_the_same_however_long_it_is(held: Connection, own_dsn: str) -> None:
    subscribe(held, "q", "pool")
    offer(held, "q", 300)
    assert len(drain(held, "q")) == 300
    leases = [take(held, "q", f"w{n}", 3, "1 day", "pool") for n in range(100)]
    for batch in leases:
        outcome(held, "ack", batch[0].batch_id, ids(batch)[:1])
    blocks = []
    for each in (20, 20, 20, 2_000, 2_000):
        # A plan that was made while the leaf was short is kept while it grows.
        with psycopg.connect(own_dsn, autocommit=True) as worker:
            worker.execute(CYCLES.format(each=each).encode())
        blocks.append(turned(held))
    assert max(blocks[3:]) < 1.5 * blocks[2], blocks
    assert [ack(held, batch[0].batch_id) for batch in leases] == [1] * len(leases)
