"""The identity that tick ids belong to: a tick of a former queue, or of another copy of it, is refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import Connection, configure, forced_tick, refused, rows, send, subscribe, value

# Calls that take a tick %(tick)s of queue %(queue)s and its incarnation, by name.
CALLS = {
    "tick_for": "select pgque.tick_for(%(queue)s, %(tick)s::text, %(incarnation)s)",
    "next_tick": "select pgque.next_tick(%(queue)s, %(tick)s, incarnation => %(incarnation)s)",
    "next_window": "select pgque.next_window(%(queue)s, %(tick)s, incarnation => %(incarnation)s)",
    "split_window": "select pgque.split_window(%(queue)s, %(tick)s, %(tick)s, 1, %(incarnation)s)",
    "read_window": "select pgque.read_window(%(queue)s, %(tick)s, %(tick)s, incarnation => %(incarnation)s)",
    "read_window to": "select pgque.read_window(%(queue)s, 1, %(tick)s, incarnation => %(incarnation)s)",
    "read_window_cursor": "select pgque.read_window_cursor('c', %(queue)s, %(tick)s, %(tick)s, incarnation => %(incarnation)s)",
    "seek": "select pgque.seek(%(queue)s, 'c', %(tick)s, incarnation => %(incarnation)s)",
    "seek with force": "select pgque.seek(%(queue)s, 'c', %(tick)s, true, %(incarnation)s)",
    "stream_lag": "select pgque.stream_lag(%(queue)s, 'c', %(tick)s, %(incarnation)s)",
    "stage_dead": "select pgque.stage_dead(%(queue)s, 'c', %(tick)s, '{}', '{}', %(incarnation)s)",
    "unstage_dead": "select pgque.unstage_dead(%(queue)s, 'c', %(tick)s, %(incarnation)s)",
    "archive_next": "select pgque.archive_next(%(queue)s, 'a', %(tick)s, incarnation => %(incarnation)s)",
    "archive_read": "select pgque.archive_read(%(queue)s, 'a', %(tick)s, 0, 9, incarnation => %(incarnation)s)",
    "archive_read_cursor": "select pgque.archive_read_cursor('d', %(queue)s, 'a', %(tick)s, 0, 9, incarnation => %(incarnation)s)",
}
# Calls that find a tick, which would be one of another queue
FINDERS = {
    "open_stream": "select pgque.open_stream(%(queue)s, 'c', incarnation => %(incarnation)s)",
    "tick_for latest": "select pgque.tick_for(%(queue)s, 'latest', %(incarnation)s)",
}
EVERY = [*CALLS.values(), *FINDERS.values()]


def incarnation(conn: Connection, queue: str) -> uuid.UUID:
    found: uuid.UUID = value(conn, "select pgque.queue_incarnation(%s)", queue)
    return found


def named(queue: str, tick: int, of: uuid.UUID | None) -> dict[str, Any]:
    return {"queue": queue, "tick": tick, "incarnation": of}


def create(conn: Connection, queue: str) -> None:
    """Make a queue with consumer c, and consumer a that reads the archive of c first; both stand at tick 1."""
    value(conn, "select pgque.create_queue(%s)", queue)
    configure(conn, queue, archive_on_ack="true")
    subscribe(conn, queue, "c")
    value(conn, "select pgque.subscribe_archive(%s, 'a', 'c')", queue)


@pytest.fixture
def ready(new_queue: Callable[[], str], conn: Connection) -> str:
    """A queue that was created again, with consumers c and a."""
    name = new_queue()
    value(conn, "select pgque.drop_queue(%s, true)", name)
    create(conn, name)
    return name


def done(conn: Connection, call: str, queue: str, of: uuid.UUID | None) -> None:
    """Make a call with tick 1, and undo it."""
    with conn.transaction(force_rollback=True):
        conn.execute(call, named(queue, 1, of))


def test_a_tick_is_used_in_its_own_incarnation(conn: Connection, ready: str) -> None:
    for call in EVERY:
        done(conn, call, ready, incarnation(conn, ready))
        done(conn, call, ready, None)


def test_a_tick_of_a_queue_that_was_created_again_is_refused(conn: Connection, ready: str) -> None:
    former = incarnation(conn, ready)
    value(conn, "select pgque.drop_queue(%s, true)", ready)
    create(conn, ready)
    for call in EVERY:
        told = refused("PQ015", conn.execute, call, named(ready, 1, former))
        assert f"queue {ready} was created again" in str(told), call
        assert "where the consumer stands" in str(told.diag.message_hint), call
        done(conn, call, ready, None)


def test_a_tick_of_a_queue_from_before_it_was_restored_is_refused(conn: Connection, ready: str) -> None:
    former = incarnation(conn, ready)
    restore(conn, ready)
    for call in EVERY:
        refused("PQ015", conn.execute, call, named(ready, 1, former))


def test_a_tick_beyond_the_newest_is_refused(conn: Connection, ready: str) -> None:
    beyond = forced_tick(conn, ready) + 1
    expected = f"tick not found: {beyond} of queue {ready}, whose newest tick is {beyond - 1}"
    for call in CALLS.values():
        for of in (incarnation(conn, ready), None):
            told = refused("PQ015", conn.execute, call, named(ready, beyond, of))
            assert expected in str(told), call


def restore(conn: Connection, queue: str) -> None:
    """Make of a queue what comes out of a dump, and have it repaired."""
    conn.execute("update pgque.queue set queue_xid = '1' where queue_name = %s", [queue])
    assert value(conn, "select q.queue_restored from pgque.queue as q where q.queue_name = %s", queue)
    value(conn, "select pgque.ticker(%s)", queue)
    assert not value(conn, "select q.queue_restored from pgque.queue as q where q.queue_name = %s", queue)


def test_each_restore_of_a_queue_is_an_incarnation_of_its_own(conn: Connection, ready: str) -> None:
    seen = [incarnation(conn, ready)]
    for _ in range(2):
        restore(conn, ready)
        seen.append(incarnation(conn, ready))
    assert len(set(seen)) == 3
    uid = value(conn, "select i.queue_uid from pgque.get_queue_info(%s) as i", ready)
    assert uid == seen[0]


def test_asking_for_the_incarnation_repairs_a_restored_queue_first(conn: Connection, ready: str) -> None:
    conn.execute("update pgque.queue set queue_xid = '1' where queue_name = %s", [ready])
    with conn.transaction():
        conn.execute("set transaction read only")
        before = incarnation(conn, ready)
    found = incarnation(conn, ready)
    assert found != before
    value(conn, "select pgque.ticker(%s)", ready)
    assert incarnation(conn, ready) == found


def test_a_queue_keeps_its_incarnation_while_it_is_used(conn: Connection, ready: str) -> None:
    found = incarnation(conn, ready)
    send(conn, ready)
    forced_tick(conn, ready)
    value(conn, "select pgque.maint()")
    configure(conn, ready, max_retries="3")
    value(conn, "select pgque.purge(%s)", ready)
    value(conn, "select pgque.rename_queue(%s, %s)", ready, ready + "_renamed")
    try:
        assert incarnation(conn, ready + "_renamed") == found
    finally:
        value(conn, "select pgque.rename_queue(%s, %s)", ready + "_renamed", ready)


def test_a_consumer_is_not_subscribed_to_another_incarnation(conn: Connection, ready: str) -> None:
    refused("PQ015", value, conn, "select pgque.open_stream(%s, 'new', 'latest', %s)", ready, uuid.uuid4())
    assert (
        rows(conn, "select from pgque.get_consumer_info(%s) as i where i.consumer_name = 'new'", ready) == []
    )
