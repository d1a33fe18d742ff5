"""The work for a batch grows with its size, not with the square of it, however often a session called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import psycopg
import pytest

from sql.helpers import Connection, ack, ids, nack_ids, offer, outcome, receive, rows, subscribe, take, value

COUNT = 60
# From its sixth call on a session may use a plan that does not know the values.
CALLS = 8
# An array that each row is compared with, element by element.
COMPARES = re.compile(r"Filter: .*(= ANY \((?!'\{)|<> ALL \()")
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
