"""What a look at a long log reads, before any ANALYZE, while other transactions are open.

Costs are counted in blocks. The planner knows nothing of the tables: it has never analyzed them, as is the case
with each table of a queue that was emptied since.
"""

from __future__ import annotations

from collections.abc import Callable

from sql.helpers import Connection, rows, send, subscribe, tick, value

CALLS = {
    "ticker": "select pgque.ticker('q')",
    "maint_lags": "select pgque.maint_lags()",
    "get_consumer_info": "select * from pgque.get_consumer_info('q')",
    "health": "select * from pgque.health('q')",
    "message_status": "select * from pgque.message_status('q', 500)",
    "list_messages": "select * from pgque.list_messages('q', 'pending', 10)",
}


def blocks(conn: Connection, query: str) -> int:
    """Return how many blocks a query reads, those of the functions that it calls included."""
    [[[plan]]] = rows(conn, f"explain (analyze, buffers, format json) {query}")
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])


def fill(conn: Connection, count: int) -> None:
    """Send so many messages in transactions of 10,000, with a tick after each."""
    for _ in range(max(count // 10000, 1)):
        value(
            conn,
            "select cardinality(pgque.send_batch('q', 't', array_fill('x'::text, array[%s])))",
            min(count, 10000),
        )
        tick(conn, "q")


def cost(conn: Connection, connect: Callable[..., Connection], dsn: str, count: int) -> dict[str, int]:
    """Return the blocks of each of CALLS with so many messages in the log, which one consumer has not received."""
    value(conn, "select pgque.create_queue('q')")
    subscribe(conn, "q", "behind")
    older = connect(dsn, autocommit=False)
    value(older, "select pg_current_xact_id()")
    fill(conn, count)
    subscribe(conn, "q", "current")
    newer = connect(dsn, autocommit=False)
    found = {}
    for name, query in CALLS.items():
        for _ in range(2):  # the first call also plans, and reads catalogs
            tick(conn, "q")
            newer.rollback()
            value(newer, "select pg_current_xact_id()")
            send(conn, "q")  # the new transactions have a gap where the open one runs
            value(conn, "select setval('pgque.sampled', 0)")  # maint_lags() works once a minute
            found[name] = blocks(conn, query)
    older.rollback()
    newer.rollback()
    value(conn, "select pgque.drop_queue('q', true)")
    return found


def test_a_look_at_the_log_reads_as_much_with_a_million_messages_as_with_a_thousand(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    short = cost(own, connect, own_dsn, 1000)
    long = cost(own, connect, own_dsn, 1000000)
    assert not rows(
        own,
        "select relname from pg_stat_user_tables where last_analyze is not null or last_autoanalyze is not null",
    )
    # A binary search over more ticks reads some more; the log and its index have 10,000 blocks.
    assert {name: long[name] - short[name] for name in CALLS if long[name] > short[name] + 500} == {}


def test_a_list_of_messages_reads_as_little_if_the_log_was_analyzed_when_it_was_short(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q", "behind")
    fill(own, 2000)
    own.execute("analyze pgque.event")
    for table in range(3):
        own.execute(f"analyze pgque.event_1_{table}".encode())
    query = CALLS["list_messages"]
    blocks(own, query)  # the first call also plans, and reads catalogs
    short = blocks(own, query)
    fill(own, 200000)
    assert blocks(own, query) < short + 500  # the log has 2,000 blocks
