"""The work for a batch grows with its size, not with the square of it, however often a session called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    ids,
    nack_ids,
    offer,
    outcome,
    receive,
    receive_coop,
    rows,
    subscribe,
    take,
    value,
)

COUNT = 60
# From its sixth call on a session may use a plan that does not know the values.
CALLS = 8
# A subquery is hashed only up to work_mem: a little of it stands for many messages.
MEMORY = "64kB"
MANY = 3000
# An array that each row is compared with, element by element.
COMPARES = re.compile(r"Filter: .*(= ANY \((?!'\{)|<> ALL \()")
READ = re.compile(r"actual time=\S+ rows=([0-9]+)(?:\.\d+)? loops=([0-9]+)")
REMOVED = re.compile(r"Rows Removed by (?:Join )?Filter: (\d+)")


@pytest.fixture
def planned(own_dsn: str) -> Iterator[tuple[Connection, list[str]]]:
    """A session in a database of its own, and the plans of all that it runs from now on."""
    plans: list[str] = []
    with psycopg.connect(own_dsn, autocommit=True, prepare_threshold=None) as conn:
        try:
            conn.execute("load 'auto_explain'")
        except psycopg.Error:
            pytest.skip("the server has no auto_explain, or only superusers may load it")
        for setting in ("log_nested_statements = on", "log_analyze = on", "log_min_duration = 0"):
            conn.execute(f"set auto_explain.{setting}".encode())
        conn.add_notice_handler(lambda notice: plans.append(notice.message_primary or ""))
        conn.execute("set client_min_messages = log")
        yield conn, plans


def worker_acks(conn: Connection) -> None:
    batch = take(conn, "q", count=COUNT)
    assert set(outcome(conn, "ack", batch[0].batch_id, ids(batch)[: COUNT // 2]).values()) == {None}
    # Half of them for the second time.
    assert len(outcome(conn, "ack", batch[0].batch_id, ids(batch))) == COUNT


def worker_rejects(conn: Connection) -> None:
    batch = take(conn, "q", count=COUNT)
    assert all(ok for _, ok, _ in nack_ids(conn, batch[0].batch_id, ids(batch)))
    again = take(conn, "q", count=COUNT)
    assert ids(again) == ids(batch)
    assert all(
        ok for _, ok, _ in rows(conn, "select * from pgque.ack(%s, %s)", again[0].batch_id, ids(again))
    )


def worker_releases(conn: Connection) -> None:
    batch = take(conn, "q", count=COUNT)
    assert value(conn, "select pgque.release(%s)", batch[0].batch_id) == COUNT
    assert ack(conn, take(conn, "q", count=COUNT)[0].batch_id) == 1


def alone_acks(conn: Connection) -> None:
    batch = receive(conn, "q", count=COUNT)
    assert len(outcome(conn, "ack", batch[0].batch_id, ids(batch)[: COUNT // 2])) == COUNT // 2
    assert ids(receive(conn, "q", count=COUNT)) == ids(batch)[COUNT // 2 :]
    assert ack(conn, batch[0].batch_id) == 1


def alone_rejects(conn: Connection) -> None:
    batch = receive(conn, "q", count=COUNT)
    assert all(
        ok for _, ok, _ in rows(conn, "select * from pgque.dead(%s, %s)", batch[0].batch_id, ids(batch))
    )
    assert ack(conn, batch[0].batch_id) == 1


@pytest.mark.parametrize("handle", [worker_acks, worker_rejects, worker_releases, alone_acks, alone_rejects])
@pytest.mark.parametrize("settings", ["{}", '{"message_ttl": "1 hour"}', '{"archive_on_ack": true}'])
def test_no_message_of_a_batch_is_compared_with_all_the_others(
    planned: tuple[Connection, list[str]], handle: Callable[[Connection], None], settings: str
) -> None:
    conn, plans = planned
    value(conn, "select pgque.create_queue('q', %s::jsonb)", settings)
    subscribe(conn, "q")
    for _ in range(CALLS):
        offer(conn, "q", COUNT)
        plans.clear()
        handle(conn)
        assert len(plans) > 10
        assert [plan for plan in plans if COMPARES.search(plan)] == []
        removed = [int(count) for plan in plans for count in REMOVED.findall(plan)]
        assert max(removed, default=0) <= 10 * COUNT


@pytest.mark.parametrize("call", ["ack", "nack", "dead", "archive"])
def test_ids_beyond_work_mem_are_not_compared_with_each_other(
    planned: tuple[Connection, list[str]], call: str
) -> None:
    conn, plans = planned
    value(conn, "select pgque.create_queue('q')")
    subscribe(conn, "q")
    offer(conn, "q", MANY)
    batch = take(conn, "q", count=MANY)
    conn.execute(f"set work_mem = '{MEMORY}'".encode())
    conn.execute(b"set hash_mem_multiplier = 1")
    for sent in (ids(batch)[::2], ids(batch)[::-1]):
        plans.clear()
        found = rows(conn, f"select ok, reason from pgque.{call}(%s, %s::bigint[])", batch[0].batch_id, sent)
        assert sum(ok for ok, _ in found) == MANY // 2
        read = sum(int(count) * int(loops) for plan in plans for count, loops in READ.findall(plan))
        assert MANY < read < 50 * MANY


@pytest.mark.parametrize("limit", [1, 3])
def test_the_next_message_of_a_key_is_found_without_reading_all_that_wait(
    planned: tuple[Connection, list[str]], limit: int
) -> None:
    conn, plans = planned
    value(conn, "select pgque.create_queue('q')")
    value(conn, "select pgque.subscribe('q', 'c')")
    keys = f"array_fill('a'::text, array[{MANY}])"
    value(conn, f"select pgque.send_batch('q', 't', {keys}, partition_keys => {keys})")
    value(conn, "select pgque.ticker('q')")
    if limit > 1:  # these failed, and wait longer than the test runs
        failed = take(conn, "q", count=MANY)
        assert len(nack_ids(conn, failed[0].batch_id, ids(failed), "1 day")) == MANY
        value(conn, f"select pgque.send_batch('q', 't', {keys}, partition_keys => {keys})")
        value(conn, "select pgque.ticker('q')")
    else:
        take(conn, "q", count=1)  # the consumer has workers
        assert value(conn, "select pgque.reclaim('q', 'c')") == 1
    assert value(conn, "select pgque.set_key_concurrency('q', 'c', %s)", limit) == 1
    out = [take(conn, "q", count=1)[0] for _ in range(limit)]
    assert take(conn, "q") == []  # the others wait for them in the retry queue
    conn.execute(b"vacuum analyze pgque.retry_queue")
    for _ in range(2):
        assert ack(conn, out.pop(0).batch_id) == 1
        plans.clear()
        out += take(conn, "q", count=1)
        assert len(out) == limit
        removed = [int(count) for plan in plans for count in REMOVED.findall(plan)]
        assert sum(removed) < MANY / 10
        read = sum(int(count) * int(loops) for plan in plans for count, loops in READ.findall(plan))
        assert 0 < read < 4 * MANY


def test_a_batch_is_found_without_reading_a_message_of_each_key(
    planned: tuple[Connection, list[str]],
) -> None:
    conn, plans = planned
    value(conn, "select pgque.create_queue('q')")
    value(conn, "select pgque.subscribe('q', 'c', key_concurrency => 1)")
    keys = f"array(select (n % {2 * MANY})::text from generate_series(1, {4 * MANY}) as n)"
    value(conn, f"select pgque.send_batch('q', 't', {keys}, partition_keys => {keys})")
    value(conn, "select pgque.ticker('q')")
    assert len(take(conn, "q", count=4 * MANY)) == 2 * MANY
    assert value(conn, "select pgque.reclaim('q', 'c')") == 1
    plans.clear()
    assert len(take(conn, "q", count=100)) == 100
    read = sum(int(count) * int(loops) for plan in plans for count, loops in READ.findall(plan))
    assert 0 < read < 30 * MANY  # with each key: 80


def test_a_big_window_is_mapped_once_and_its_rows_are_not_sorted(
    planned: tuple[Connection, list[str]],
) -> None:
    """Ids are missing, of sends that were rolled back. Each batch is full nevertheless."""
    conn, plans = planned
    value(conn, "select pgque.create_queue('q')")
    subscribe(conn, "q")
    sent: list[int] = []
    for number in range(60):
        with conn.transaction(force_rollback=number % 3 == 1):
            size = 1 + (number * 37 + number // 3) % 90
            some = rows(
                conn, "select unnest(pgque.send_batch('q', 't', array_fill('x'::text, array[%s])))", size
            )
        sent += [i for [i] in some if number % 3 != 1]
    value(conn, "select pgque.ticker('q')")
    plans.clear()
    for count in (1, 24, 25, 26, 49, 50, 51, 75, 1, 99, 100):
        batch = take(conn, "q", count=count)
        assert ids(batch) == sent[:count]
        del sent[:count]
    maps = [plan for plan in plans if "insert into pgque.window_map" in plan]
    assert len(maps) == 1
    sorted_rows = [int(n) for n in re.findall(r"-> +Sort .*actual time=\S+ rows=(\d+)", maps[0])]
    assert sorted_rows and max(sorted_rows) < len(sent) / 10
    reads = [
        int(n)
        for plan in plans
        for n in re.findall(r"Tid Range Scan on event_\S+ e\S* .*actual time=\S+ rows=(\d+)", plan)
    ]
    assert reads and max(reads) <= 7 * 25 + 25


def test_pgqs_calls_check_for_ticks_as_often_as_receive(planned: tuple[Connection, list[str]]) -> None:
    """As long as the consumer keeps up, and asks for no tick: next_batch_info() returns both of a batch."""
    conn, plans = planned
    value(conn, "select pgque.create_queue('q')")
    subscribe(conn, "q")

    def lookups(query: str) -> int:
        plans.clear()
        rows(conn, query)
        # Only the first of the three tables has ticks.
        return sum("Scan using tick_1_0" in plan for plan in plans)

    for _ in range(CALLS):
        offer(conn, "q", 3)
        assert lookups("select * from pgque.receive('q', 'c')") == 1
        assert value(conn, "select pgque.ack(r.batch_id) from pgque.receive('q', 'c', 1) r") == 1
        sent = offer(conn, "q", 3)
        assert lookups("select pgque.next_batch('q', 'c')") == 1
        batch = value(conn, "select pgque.next_batch('q', 'c')")
        plans.clear()
        found = [i for [i] in rows(conn, "select ev_id from pgque.get_batch_events(%s)", batch)]
        assert found == sent
        assert not any("Scan using tick_1_0" in plan for plan in plans)
        assert value(conn, "select pgque.finish_batch(%s)", batch) == 1


@pytest.mark.parametrize("analyzed", [False, True])
def test_a_worker_receives_without_reading_the_messages_that_wait_for_their_retry(
    pool: Connection, analyzed: bool
) -> None:
    """The check whether the worker holds a message on its last attempt reads none of them."""
    offer(pool, "q", MANY)
    batch = take(pool, "q", count=MANY)
    assert (
        len(rows(pool, "select * from pgque.nack(%s, %s, '1 hour')", batch[0].batch_id, ids(batch))) == MANY
    )
    if analyzed:
        pool.execute(b"vacuum analyze pgque.retry_queue")
    read = (
        "select (coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::int from pg_stat_xact_all_tables"
        " where relid = 'pgque.retry_queue'::regclass"
    )
    for _ in range(CALLS):
        offer(pool, "q", 2)
        with pool.transaction():
            before = value(pool, read)
            batch = take(pool, "q", count=1)
            assert len(take(pool, "q", count=1, ack_batch=batch[0].batch_id)) == 1
            assert value(pool, read) - before < MANY / 10


def test_a_plan_of_a_young_journal_reads_one_position_when_the_journal_is_long(
    own_dsn: str, connect: Callable[..., Connection]
) -> None:
    """Without statistics the planner expected two positions of a consumer, which it would sort."""
    for consumer in ("earlier", "c"):
        conn = connect(own_dsn)
        if consumer == "earlier":
            value(conn, "select pgque.create_queue('q')")

        def work(conn: Connection = conn, consumer: str = consumer) -> None:
            batch = take(conn, "q", consumer=consumer)
            assert ack(conn, batch[0].batch_id) == 1

        subscribe(conn, "q", consumer)
        for _ in range(400):
            offer(conn, "q")
            work()
    read = "select coalesce(idx_tup_fetch, 0)::int from pg_stat_xact_all_tables where relname = 'position_0'"
    offer(conn, "q")
    with conn.transaction():
        before = value(conn, read)
        work()
        assert value(conn, read) - before <= 10


@pytest.mark.parametrize("dead", [None, "1 hour"])
def test_a_subconsumer_receives_with_as_many_calls_however_many_batches_the_group_has_finished(
    own: Connection, dead: str | None
) -> None:
    value(own, "select pgque.create_queue('q')")
    for worker in ("a", "b"):
        value(own, "select pgque.register_subconsumer('q', 'c', %s)", worker)
    offer(own, "q", 60)
    assert receive_coop(own, "q", "b", 1, dead)  # stays open
    own.execute("set track_functions = 'all'")
    made = "select coalesce(sum(f.calls), 0) from pg_stat_xact_user_functions f where f.schemaname = 'pgque'"
    calls = []
    for _ in range(50):
        with own.transaction():
            before = value(own, made)
            batch = receive_coop(own, "q", "a", 1, dead)
            calls.append(value(own, made) - before)
        assert ack(own, batch[0].batch_id) == 1
    # The list of batches that may be open is cleared at 64, and then nearly all are finished.
    assert max(calls[-10:]) <= max(calls[5:15]), calls


def test_a_subconsumer_reads_the_positions_of_those_that_have_a_batch(own: Connection) -> None:
    """One that was unregistered meanwhile has no position, so reading it would be an error."""
    value(own, "select pgque.create_queue('q')")
    own.execute("set track_functions = 'all'")
    made = "select coalesce(sum(calls), 0) from pg_stat_xact_user_functions where funcname = '_position'"
    calls = []
    for group, count in (("few", 2), ("many", 40)):
        for worker in range(count):
            value(own, "select pgque.register_subconsumer('q', %s, %s)", group, f"w{worker}")
        # As autovacuum does: the planner then knows how many there are.
        own.execute("analyze pgque.subscriber")
        offer(own, "q", 9)
        assert receive_coop(own, "q", "w0", 1, consumer=group)  # stays open
        with own.transaction():
            before = value(own, made)
            assert receive_coop(own, "q", "w1", 1, "1 hour", consumer=group)
            calls.append(value(own, made) - before)
    assert calls[0] == calls[1]
