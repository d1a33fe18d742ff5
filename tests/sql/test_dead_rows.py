"""Workers leave no dead rows behind, also while an old transaction is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    dead_tuples,
    forced_tick,
    ids,
    move_clock,
    offer,
    outcome,
    rotate,
    row_counts,
    rows,
    subscribe,
    take,
    value,
    work_off,
)


@pytest.fixture
def held(own: Connection, own_dsn: str) -> Iterator[Connection]:
    """A database of its own with a queue q, a consumer c, and a transaction that holds everything."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    take(own, "q")  # it becomes a pool
    with psycopg.connect(own_dsn) as old:
        old.execute("set transaction isolation level repeatable read")
        old.execute("select count(*) from pgque.queue")
        yield own
        old.rollback()


CYCLES = """
do $$
declare
  v_batch bigint;
begin
  for n in 1..{count} loop
    perform pgque.send_batch('q', 't', array['a', 'b', 'c']);
    commit;
    perform pgque.ticker('q');
    commit;
    select max(batch_id) into v_batch from pgque.receive('q', 'c', 2, worker => 'w' || n % 7, ack_batch => v_batch);
    commit;
    perform pgque.ack(v_batch);
    commit;
    select max(batch_id) into v_batch from pgque.receive('q', 'c', 2, worker => 'v' || n % 7);
    commit;
  end loop;
end
$$
"""


def statistics(conn: Connection, wait_until: Callable[..., None], count: int) -> dict[str, int]:
    """The dead tuples, once the statistics of so many sends have come in."""
    query = "select sum(t.n_tup_ins) from pg_stat_all_tables as t where t.schemaname = 'pgque' and t.relname like 'event%'"
    dead_tuples(conn)
    wait_until(lambda: dead_tuples(conn) is not None and value(conn, query) >= count, "statistics", 20)
    return dead_rows(conn)


def dead_rows(conn: Connection) -> dict[str, int]:
    """The dead tuples, but for the one of the consumer that became a pool."""
    found = dead_tuples(conn)
    if found.get("subscriber") == 1:
        del found["subscriber"]
    return found


def test_the_plain_path_of_workers_leaves_no_dead_row_under_a_held_xmin(
    held: Connection, own_dsn: str, wait_until: Callable[..., None]
) -> None:
    with psycopg.connect(own_dsn, autocommit=True) as worker:
        worker.execute(CYCLES.format(count=500).encode())
    assert statistics(held, wait_until, 1500) == {}


def test_acks_by_id_and_extensions_leave_no_dead_row(
    held: Connection, own_dsn: str, wait_until: Callable[..., None]
) -> None:
    with psycopg.connect(own_dsn, autocommit=True) as worker:
        for number in range(100):
            sent = offer(worker, "q", 4)
            token = take(worker, "q", f"w{number}", 4)[0].batch_id
            assert value(worker, "select pgque.extend(%s, '10 s')", token) == 4
            assert value(worker, "select pgque.extend(%s, '10 s')", token) == 4
            for msg_id in sent:
                assert outcome(worker, "ack", token, [msg_id]) == {msg_id: None}
    assert statistics(held, wait_until, 400) == {}


@pytest.mark.slow
def test_keys_leave_no_dead_row(held: Connection, own_dsn: str, wait_until: Callable[..., None]) -> None:
    with psycopg.connect(own_dsn, autocommit=True) as worker:
        for number in range(200):
            for _ in range(3):
                value(worker, "select pgque.send('q', 't', 'x'::text, key => %s)", f"k{number % 5}")
            value(worker, "select pgque.ticker('q')")
            work_off(worker, "q")
    assert sum(statistics(held, wait_until, 200).values()) < 20


@pytest.mark.slow
def test_thousand_worker_names_cost_no_more_than_one(held: Connection) -> None:
    for number in range(500):
        offer(held, "q", 1)
        batch = take(held, "q", f"pod-{number}", 1)
        assert ack(held, batch[0].batch_id) == 1
    assert dead_rows(held) == {}
    named = {t: n for t, n in row_counts(held).items() if n >= 500}
    assert all(
        t.startswith(("event_", "tick_", "position_", "settled_", "lease", "journal")) for t in named
    ), named


def test_expired_and_nacked_messages_leave_no_row_once_done(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")

    def round_(first: int) -> None:
        for number in range(first, first + 5):
            offer(own, "q", 40)
            batch = take(own, "q", f"a{number}", 20)
            rows(own, "select * from pgque.nack(%s, %s::bigint[], '0')", batch[0].batch_id, ids(batch)[:10])
            move_clock(own, f"{number + 1} hours")
            while batch := take(own, "q", f"b{number}", 100):
                assert ack(own, batch[0].batch_id) == 1
        for _ in range(4):
            forced_tick(own, "q")
            work_off(own, "q")
            rotate(own, "q")
            value(own, "select pgque.maint()")

    round_(0)
    before = row_counts(own)
    for n in range(1, 4):
        round_(n * 10)
    after = row_counts(own)
    unbounded = {
        t: (before.get(t, 0), n)
        for t, n in after.items()
        if n > before.get(t, 0) + 30 and not t.startswith(("position_", "settled_", "lease"))
    }
    assert unbounded == {}


def blocks_of(conn: Connection, query: str) -> int:
    """Return how many blocks a statement reads, with the statements of its functions."""
    plan = value(conn, "explain (analyze, buffers, format json) " + query)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_dead_retries_under_a_held_xmin_make_no_delivery_read_more(held: Connection) -> None:
    def look() -> tuple[int, int, int]:
        """The blocks that a poll, a delivery from the log, and a redelivery read."""
        found = []
        poll = "select * from pgque.receive('q', 'c', 100, worker => 'w1')"
        for _ in range(8):  # a session's first calls plan
            polled = blocks_of(held, poll)
            offer(held, "q", 10)
            delivered = blocks_of(held, poll)
            batch = value(held, "select pos_last_batch from pgque.position order by pos_seq desc limit 1")
            assert value(held, "select pgque.release(%s)", batch) == 10
            found.append((polled, delivered, blocks_of(held, poll)))
            assert (
                ack(
                    held,
                    value(held, "select pos_last_batch from pgque.position order by pos_seq desc limit 1"),
                )
                == 1
            )
        return found[-1]

    before = look()
    for _ in range(8):
        offer(held, "q", 100)
        batch = take(held, "q")
        outcome(held, "nack", batch[0].batch_id, ids(batch), "0")
        assert len(work_off(held, "q")) == 100
    move_clock(held, "1 minute")
    after = look()
    assert all(a < 1.5 * b for a, b in zip(after, before, strict=True)), (before, after)


def test_a_retry_is_found_that_was_committed_long_after_it_was_due(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = offer(own, "q", 1)
    batch = take(own, "q", "a")
    nacking = transaction(dsn=own_dsn)
    outcome(nacking, "nack", batch[0].batch_id, sent, "0")
    # The clock is moved before the transaction ends: nothing that it stored is visible.
    move_clock(own, "1 minute")
    later = offer(own, "q", 1)
    assert ids(work_off(own, "q", "b")) == later
    nacking.execute("commit")
    move_clock(own, "1 minute 6 seconds")
    assert ids(work_off(own, "q", "b")) == sent


def test_a_retry_is_due_by_a_clock_that_was_set_back(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    move_clock(own, "1 hour")
    sent, later = offer(own, "q", 2)
    batch = take(own, "q", "a", 1)
    assert ids(work_off(own, "q", "b", 1)) == [later]
    move_clock(own, "0")
    outcome(own, "nack", batch[0].batch_id, [sent], "0")
    assert ids(take(own, "q", "b")) == [sent]
