"""More queues than the server has locks for: who serves all of them in one transaction keeps hardly any."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from faults.clusters import new_database, programs_of, started
from support.servers import TestServer

# Room for 15 * 10 + 5 * 10 locks, and somewhat more.
FEW_LOCKS = {"max_locks_per_transaction": "10", "max_connections": "15"}
QUEUES = 200

Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture(scope="module")
def crowded_dsn(server: TestServer) -> Iterator[str]:
    with started(programs_of(server, "postgres", "initdb"), settings=FEW_LOCKS) as few:
        new_database(few.dsn, "crowded", "file")
        dsn = psycopg.conninfo.make_conninfo(few.dsn, dbname="crowded")
        with psycopg.connect(dsn, autocommit=True) as conn:
            for i in range(QUEUES):
                conn.execute("select pgque.create_queue(%s), pgque.subscribe(%s, 'c')", [f"q{i}", f"q{i}"])
        yield dsn


@pytest.fixture
def crowd(crowded_dsn: str) -> Iterator[Connection]:
    with psycopg.connect(crowded_dsn, autocommit=True) as conn:
        conn.add_notice_handler(lambda notice: pytest.fail(str(notice.message_primary)))
        yield conn


def everywhere(crowd: Connection, call: str) -> int:
    """Call something for each queue, each in a transaction of its own; return how many gave something."""
    return sum(bool(crowd.execute(call.encode(), [f"q{i}"]).fetchall()) for i in range(QUEUES))


def number(conn: Connection, query: str) -> int:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return int(str(row[0]))


def until_all_are_done(crowd: Connection, call: str) -> list[int]:
    """Call something until it gave the number of queues in all; return what it gave."""
    counts: list[int] = []
    while sum(counts) < QUEUES and len(counts) < QUEUES:
        counts.append(number(crowd, call))
    assert sum(counts) == QUEUES
    return counts


def test_a_ticker_call_serves_as_many_queues_as_locks_allow_and_the_next_calls_the_others(
    crowd: Connection,
) -> None:
    everywhere(crowd, "select pgque.send(%s, 'hello')")
    counts = until_all_are_done(crowd, "select pgque.ticker()")
    assert max(counts) < QUEUES / 4
    assert everywhere(crowd, "select * from pgque.receive(%s, 'c')") == QUEUES


def test_a_ticker_of_all_queues_leaves_locks_for_others(crowd: Connection, crowded_dsn: str) -> None:
    everywhere(crowd, "select pgque.send(%s, 'hello')")
    with crowd.transaction(), psycopg.connect(crowded_dsn, autocommit=True) as other:
        crowd.execute("select pgque.ticker()")
        assert number(other, "select count(*) from pgque.metrics() m where m.queue is not null") > QUEUES


def test_a_maintenance_call_rotates_as_many_queues_as_locks_allow_and_the_next_calls_the_others(
    crowd: Connection,
) -> None:
    everywhere(crowd, "select pgque.send(%s, 'hello')")
    until_all_are_done(crowd, "select pgque.ticker()")
    crowd.execute("update pgque.queue set queue_switch_time = queue_switch_time - interval '1 year'")
    counts = until_all_are_done(crowd, "select pgque.maint()")
    assert max(counts) < QUEUES / 4


@pytest.mark.parametrize(
    "look",
    [
        "metrics() where queue is not null",
        "health() where queue is not null",
        "get_queue_info()",
        "get_consumer_info()",
    ],
)
def test_a_report_on_all_queues_needs_hardly_any_locks(crowd: Connection, look: str) -> None:
    assert number(crowd, f"select count(*) from pgque.{look}") >= QUEUES


def test_samples_of_lags_leave_locks_for_others(crowd: Connection) -> None:
    everywhere(crowd, "select pgque.send(%s, 'hello')")
    until_all_are_done(crowd, "select pgque.ticker()")
    crowd.execute("select setval('pgque.sampled', 1)")
    with crowd.transaction():
        crowd.execute("select pgque.maint_lags()")
        # Those of queues, without what the call reads in any case.
        held = "select count(*) from pg_locks l where l.pid = pg_backend_pid() and l.relation::regclass::text ~ '_[0-9]+_'"
        assert 0 < number(crowd, held) < QUEUES / 2


def test_the_tables_of_many_dropped_queues_go_a_few_at_a_time(crowd: Connection, crowded_dsn: str) -> None:
    gone = [f"gone{i}" for i in range(QUEUES // 4)]
    for name in gone:
        crowd.execute("select pgque.create_queue(%s)", [name])
    with psycopg.connect(crowded_dsn) as reader:
        reader.execute("lock table only pgque.event in access share mode")
        for name in gone:
            crowd.execute("select pgque.drop_queue(%s)", [name])
    left = [number(crowd, "select count(*) from pgque.dropped_queue")]
    assert left == [len(gone)]
    while left[-1]:
        crowd.execute("select pgque.maint()")
        left.append(number(crowd, "select count(*) from pgque.dropped_queue"))
        assert left[-1] < left[-2]
    assert len(left) > 3
    assert (
        number(crowd, "select count(*) from pg_inherits where inhparent = 'pgque.event'::regclass")
        == 3 * QUEUES
    )
