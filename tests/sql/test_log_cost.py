"""What public calls read, by the state of a queue: a table of calls and states.

Costs are counted in blocks and rows. Each state is made small and large, in databases of their own. A call may
read more in the large one only if GROWS says so. All is counted before an ANALYZE, when the planner knows nothing
of the tables, as is the case with each table that was emptied since, and after it. The log of the state `pending`
has gaps: other transactions are open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
import pytest

from conftest import create_database, drop_database
from sql.helpers import Connection, rows, send, subscribe, tick, value
from support.servers import TestServer

CALLS = {
    "get_queue_info": "select * from pgque.get_queue_info('q')",
    "get_consumer_info": "select * from pgque.get_consumer_info('q', 'behind')",
    "get_consumer_info of all": "select * from pgque.get_consumer_info('q')",
    "health": "select * from pgque.health('q')",
    "metrics": "select * from pgque.metrics('q')",
    "message_status": "select * from pgque.message_status('q', 1)",
    "message_history": "select * from pgque.message_history('q', 1)",
    "list_messages": "select * from pgque.list_messages('q', null, 10)",
    "list_messages, pending": "select * from pgque.list_messages('q', 'pending', 10)",
    "list_messages, newest": "select * from pgque.list_messages('q', null, 10, before_id => 9223372036854775807)",
    "list_messages, retry": "select * from pgque.list_messages('q', 'retry', 10)",
    "list_messages, type": "select * from pgque.list_messages('q', null, 10, 'none')",
    "list_poison": "select * from pgque.list_poison('q')",
    "archive_poison": "select pgque.archive_poison('q')",
    "list_workers": "select * from pgque.list_workers('q')",
    "dlq_inspect": "select * from pgque.dlq_inspect('q', 10)",
    "dlq_inspect, type": "select * from pgque.dlq_inspect('q', 10, only_type => 'none')",
    "dlq_reasons": "select * from pgque.dlq_reasons('q')",
    "dlq_reasons, newest": "select * from pgque.dlq_reasons('q', 10)",
    "peek": "select * from pgque.peek('q', 10)",
    "ticker": "select pgque.ticker('q')",
    "maint_lags": "select pgque.maint_lags()",
    "send": "select pgque.send('q', 'x'::text)",
    "receive": "select count(*) from pgque.receive('q', 'current', 10)",
}
EVERY_QUEUE = {
    "health()": "select * from pgque.health()",
    "metrics()": "select * from pgque.metrics()",
    "get_queue_info()": "select * from pgque.get_queue_info()",
    "get_consumer_info()": "select * from pgque.get_consumer_info()",
}
# More rows and blocks that a call may read in a large state: a binary search over more ticks reads some.
SLACK = 500


@dataclass(frozen=True)
class Cost:
    blocks: float
    rows: float


def cost(conn: Connection, query: str) -> Cost:
    """Return what a query reads, the functions that it calls included. It is undone."""
    read = (
        "select coalesce(sum(coalesce(t.seq_tup_read, 0) + coalesce(t.idx_tup_fetch, 0)), 0)::bigint"
        " from pg_stat_xact_all_tables t where t.schemaname = 'pgque'"
    )
    for _ in range(2):  # the first call also plans, and reads catalogs
        with conn.transaction(force_rollback=True):
            value(conn, "select setval('pgque.sampled', 0)")  # maint_lags() works once a minute
            before = value(conn, read)
            [[[plan]]] = rows(conn, f"explain (analyze, buffers, format json) {query}")
            blocks = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
            found = Cost(blocks, value(conn, read) - before)
    return found


def fill(conn: Connection, count: int, each: int = 500) -> None:
    """Send messages, with a tick after each transaction."""
    for _ in range(count // each):
        value(conn, "select pgque.send_batch('q', 't', array_fill('x'::text, array[%s]))", each)
        tick(conn, "q")


def pending(conn: Connection, count: int) -> None:
    fill(conn, count)


def consumers(conn: Connection, count: int) -> None:
    """All of them have 3,000 messages to read."""
    for number in range(count):
        subscribe(conn, "q", f"c{number}")
    fill(conn, 3000)


def give_back(conn: Connection, count: int, call: str) -> None:
    value(conn, "select pgque.subscribe('q', 'pool')")
    fill(conn, count, 100)
    while True:
        batch, ids = rows(
            conn, "select max(batch_id), array_agg(msg_id) from pgque.receive('q', 'pool', 10000, 'w')"
        )[0]
        if batch is None:
            break
        rows(conn, call, batch, ids)


def dead(conn: Connection, count: int) -> None:
    give_back(conn, count, "select pgque.dead(%s, %s, 'no address')")


def retries(conn: Connection, count: int) -> None:
    """None of them is due."""
    give_back(conn, count, "select pgque.nack(%s, %s, '1 hour', 'busy')")


def queues(conn: Connection, count: int) -> None:
    """Of the same database, besides q."""
    for number in range(count):
        rows(conn, "select pgque.create_queue(%s), pgque.subscribe(%s, 'c')", f"q{number}", f"q{number}")


# Each state with how many make it small and large, and large for `make verify-long`.
STATES: list[tuple[Callable[[Connection, int], None], int, int, int]] = [
    (pending, 1000, 20000, 1000000),
    (consumers, 3, 12, 300),
    (dead, 100, 1500, 100000),
    (retries, 100, 1500, 10000),
    (queues, 2, 10, 1000),
]
# What a call may read more for each message, consumer, dead letter, retry or queue, and why.
FILTER = "reads what does not satisfy the filter, until enough does: an index would cost each send more"
COUNT = "returns their number"
EACH = "returns each of them"
SORTS = "the planner may sort a table that is small, or that it knows nothing of"
TICKS = "reads the ticks of the last minute"
FILTERS = "filters the rows of all queues or consumers, which take a fraction of a millisecond"
GROWS = {
    ("pending", "get_queue_info"): (Cost(0.01, 0.01), TICKS),
    ("dead", "get_queue_info"): (Cost(0.01, 0.01), TICKS),
    ("pending", "list_messages, type"): (Cost(1, 4), FILTER),
    ("consumers", "get_consumer_info"): (Cost(3, 3), "finds the name among all"),
    ("consumers", "peek"): (Cost(6, 4), "finds the slowest"),
    ("consumers", "list_messages, retry"): (Cost(20, 4), "looks for the batches of each"),
    ("consumers", "get_consumer_info of all"): (Cost(50, 12), EACH),
    ("consumers", "health"): (Cost(50, 12), "checks the 100 with the greatest lag"),
    ("consumers", "metrics"): (Cost(50, 12), "returns the 100 with the greatest lag"),
    ("consumers", "maint_lags"): (Cost(80, 20), "takes a sample of each, and measures the lag of 200"),
    ("consumers", "list_messages"): (Cost(100, 600), "reads a transaction's messages for each"),
    ("consumers", "list_messages, newest"): (Cost(100, 600), "reads a transaction's messages for each"),
    ("consumers", "list_messages, pending"): (Cost(100, 600), "reads a transaction's messages for each"),
    ("consumers", "list_messages, type"): (Cost(400, 5000), FILTER),
    ("consumers", "message_status"): (Cost(50, 12), EACH),
    ("consumers", "message_history"): (Cost(50, 12), EACH),
    ("dead", "health"): (Cost(1, 1), COUNT),
    ("dead", "metrics"): (Cost(1, 1), COUNT),
    ("dead", "list_messages"): (Cost(1, 1), SORTS),
    ("dead", "list_messages, newest"): (Cost(1, 1), SORTS),
    ("dead", "list_messages, type"): (Cost(1, 4), FILTER),
    ("dead", "list_poison"): (Cost(1, 1), FILTER),
    ("dead", "archive_poison"): (Cost(1, 1), FILTER),
    ("dead", "dlq_inspect"): (Cost(2, 2), SORTS),
    ("dead", "dlq_inspect, type"): (Cost(1, 1), FILTER),
    ("dead", "dlq_reasons"): (Cost(1, 1), COUNT),
    ("dead", "dlq_reasons, newest"): (Cost(1, 1), SORTS),
    ("retries", "metrics"): (Cost(1, 1), COUNT),
    ("retries", "list_messages"): (Cost(1, 1), SORTS),
    ("retries", "list_messages, newest"): (Cost(1, 1), SORTS),
    ("retries", "list_messages, pending"): (Cost(1, 1), FILTER),
    ("retries", "list_messages, type"): (Cost(1, 4), FILTER),
    ("retries", "list_poison"): (Cost(1, 1), FILTER),
    ("retries", "peek"): (Cost(2, 1), FILTER),
    ("queues", "get_queue_info"): (Cost(0.5, 1), FILTERS),
    ("queues", "get_consumer_info"): (Cost(0.5, 1), FILTERS),
    ("queues", "get_consumer_info of all"): (Cost(0.5, 1), FILTERS),
    ("queues", "health"): (Cost(0.5, 1), FILTERS),
    ("queues", "list_messages, retry"): (Cost(0.5, 1), FILTERS),
    ("queues", "message_history"): (Cost(0.5, 2), FILTERS),
    ("queues", "maint_lags"): (Cost(70, 15), "takes a sample of each and of its consumer"),
    ("queues", "health()"): (Cost(190, 15), EACH),
    ("queues", "metrics()"): (Cost(170, 15), EACH),
    ("queues", "get_queue_info()"): (Cost(30, 15), EACH),
    ("queues", "get_consumer_info()"): (Cost(40, 15), EACH),
}


@contextmanager
def database(server: TestServer, installed: str) -> Iterator[Connection]:
    name = create_database(server, "pgque_cost", installed)
    try:
        with psycopg.connect(server.dsn_for(name), autocommit=True) as conn:
            yield conn
    finally:
        drop_database(server, name)


def costs(
    server: TestServer, installed: str, state: Callable[[Connection, int], None], count: int
) -> dict[tuple[str, str], Cost]:
    """Return what each call reads in a state, before and after an ANALYZE."""
    found = {}
    with (
        database(server, installed) as conn,
        psycopg.connect(conn.info.dsn, password=conn.info.password) as older,
    ):
        value(conn, "select pgque.create_queue('q')")
        subscribe(conn, "q", "behind")
        value(older, "select pg_current_xact_id()")
        state(conn, count)
        subscribe(conn, "q", "current")
        send(conn, "q")  # its transaction has a gap to the others, where the older one runs
        for when in ("before", "after"):
            for name, query in {**CALLS, **(EVERY_QUEUE if state is queues else {})}.items():
                found[name, when] = cost(conn, query)
            older.rollback()
            conn.execute("analyze")
    return found


@pytest.mark.parametrize(
    ("state", "small", "large"),
    [
        pytest.param(state, small, size, id=f"{size} {state.__name__}", marks=marks)
        for state, small, large, long in STATES
        for size, marks in ((large, ()), (long, (pytest.mark.long, pytest.mark.timeout(1200))))
    ],
)
def test_a_call_reads_as_much_in_a_large_state_as_in_a_small_one_but_for_what_it_returns(
    server: TestServer, installed: str, state: Callable[[Connection, int], None], small: int, large: int
) -> None:
    few, many = (costs(server, installed, state, count) for count in (small, large))
    too_much = []
    for (name, when), read in many.items():
        each, _ = GROWS.get((state.__name__, name), (Cost(0, 0), ""))
        more = Cost(read.blocks - few[name, when].blocks, read.rows - few[name, when].rows)
        room = Cost(*(SLACK + n * (large - small) for n in (each.blocks, each.rows)))
        if more.rows > room.rows or more.blocks > room.blocks:
            too_much.append(f"{name}, {when} analyze: {more}, at most {room}")
    assert not too_much, "\n" + "\n".join(too_much)


def test_a_delivery_reads_only_its_own_consumer_of_many(server: TestServer, installed: str) -> None:
    """Before an ANALYZE, when the planner expects one subscriber. After it a table of one page is read as a whole."""
    read = (
        "select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::int from pg_stat_xact_all_tables"
        " where relid in ('pgque.subscriber'::regclass, 'pgque.consumer'::regclass)"
    )
    found = []
    for count in (1, 60):
        with database(server, installed) as conn:
            value(conn, "select pgque.create_queue('q')")
            for name in [*map(str, range(count)), "last"]:
                subscribe(conn, "q", name)
            fill(conn, 1000)
            with conn.transaction(force_rollback=True):
                before = value(conn, read)
                batch, _ = rows(conn, "select batch_id, msg_id from pgque.receive('q', 'last', 10)")[0]
                assert value(conn, "select pgque.ack(%s)", batch) == 1
                rows(conn, "select * from pgque.receive('q', 'last', 10, null, null, %s)", batch)
                assert value(conn, "select pgque.next_batch('q', 'last')")
                assert value(conn, "select pgque.register_subconsumer('q', 'last', 'w', true)") == 1
                found.append(value(conn, read) - before)
    assert found[0] == found[1]
