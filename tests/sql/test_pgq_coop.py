"""PgQ's calls for cooperative consumers: next_batch with a subconsumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    column,
    move_clock,
    nack_ids,
    pump,
    receive_coop,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)

NEXT = "select pgque.next_batch(%s, 'c', %s)"
NEXT_OR_DEAD = "select pgque.next_batch(%s, 'c', %s, %s)"
CUSTOM = "select pgque.next_batch_custom(%s, 'c', %s, %s, %s, %s)"
CUSTOM_OR_DEAD = "select pgque.next_batch_custom(%s, 'c', %s, %s, %s, %s, %s)"
FINISH = "select pgque.finish_batch(%s)"


def events(conn: Connection, batch: int | None) -> list[int]:
    """The ids of a batch's events."""
    return column(conn, "select ev_id from pgque.get_batch_events(%s)", batch)


@pytest.fixture
def shared(own: Connection) -> Connection:
    """Queue q, whose consumer c has the subconsumers a and b."""
    value(own, "select pgque.create_queue('q')")
    for name in ("a", "b"):
        value(own, "select pgque.register_subconsumer('q', 'c', %s)", name)
    return own


def test_subconsumers_get_windows_of_their_own_and_together_all(shared: Connection) -> None:
    windows = []
    for _ in range(5):
        windows.append(send_many(shared, "q", 3))
        tick(shared, "q")
    got = []
    while batches := [value(shared, NEXT, "q", name) for name in ("a", "b")]:
        if batches == [None, None]:
            break
        got += [events(shared, batch) for batch in batches if batch is not None]
        assert [value(shared, FINISH, batch) for batch in batches if batch is not None] in ([1], [1, 1])
    assert got == windows
    assert value(shared, "select pgque.unregister_subconsumer('q', 'c', 'a')") == 1


def test_the_open_batch_of_a_subconsumer_comes_again(shared: Connection) -> None:
    sent = send_many(shared, "q", 3)
    tick(shared, "q")
    batch = value(shared, NEXT, "q", "a")
    send(shared, "q")
    tick(shared, "q")
    assert value(shared, NEXT, "q", "a") == batch
    assert value(shared, CUSTOM, "q", "a", None, None, None) == batch
    assert events(shared, batch) == sent
    assert {m.batch_id for m in receive_coop(shared, "q", "a")} == {batch}


def test_what_receive_coop_left_of_a_window_is_one_batch(shared: Connection) -> None:
    sent = send_many(shared, "q", 5)
    tick(shared, "q")
    assert [m.msg_id for m in receive_coop(shared, "q", "a", 2)] == sent[:2]
    assert events(shared, value(shared, NEXT, "q", "b")) == sent[2:]


def test_a_batch_holds_back_what_follows_it_from_nobody(shared: Connection) -> None:
    first = send(shared, "q")
    tick(shared, "q")
    held = value(shared, NEXT, "q", "a")
    second = send(shared, "q")
    tick(shared, "q")
    assert events(shared, value(shared, NEXT, "q", "b")) == [second]
    assert events(shared, held) == [first]


def test_an_event_of_a_batch_can_be_retried(shared: Connection) -> None:
    sent = send_many(shared, "q", 3)
    tick(shared, "q")
    batch = value(shared, NEXT, "q", "a")
    assert value(shared, "select pgque.event_retry(%s, %s, 0)", batch, sent[1]) == 1
    assert value(shared, FINISH, batch) == 1
    pump(shared)
    tick(shared, "q")
    assert events(shared, value(shared, NEXT, "q", "b")) == [sent[1]]


def test_the_batch_of_a_silent_subconsumer_goes_to_another_with_its_outcomes(shared: Connection) -> None:
    sent = send_many(shared, "q", 3)
    tick(shared, "q")
    dead = value(shared, NEXT, "q", "a")
    nack_ids(shared, dead, [sent[0]])
    assert value(shared, NEXT_OR_DEAD, "q", "b", "1 hour") is None
    move_clock(shared, "2 hours")
    batch = value(shared, NEXT_OR_DEAD, "q", "b", "1 hour")
    assert [(m.batch_id, m.msg_id) for m in receive_coop(shared, "q", "b")] == [(batch, i) for i in sent[1:]]
    assert value(shared, FINISH, dead) == 0
    assert value(shared, FINISH, batch) == 1


def test_a_custom_batch_waits_for_lag_count_and_interval(shared: Connection) -> None:
    send_many(shared, "q", 3)
    tick(shared, "q")
    assert value(shared, CUSTOM, "q", "a", "1 hour", None, None) is None
    assert value(shared, CUSTOM, "q", "a", None, 4, "1 hour") is None
    assert value(shared, CUSTOM_OR_DEAD, "q", "a", None, 4, "1 hour", "1 hour") is None
    send(shared, "q")
    tick(shared, "q")
    assert len(events(shared, value(shared, CUSTOM_OR_DEAD, "q", "a", None, 4, "1 hour", "1 hour"))) == 4


def test_literals_without_types_name_one_function(shared: Connection) -> None:
    """A call as a script writes it: nulls and strings may be of any type."""
    for call in (
        "next_batch('q', 'c', 'a')",
        "next_batch('q', 'c', 'a', null)",
        "next_batch_custom('q', 'c', 'a', null, null, null)",
        "next_batch_custom('q', 'c', 'a', '1 s', '5', '1 s')",
        "next_batch_custom('q', 'c', 'a', null, null, null, null)",
    ):
        assert rows(shared, f"select pgque.{call}") == [(None,)]


def test_two_calls_of_one_subconsumer_get_one_batch(
    shared: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    send_many(shared, "q", 3)
    tick(shared, "q")
    first = connect(own_dsn, autocommit=False)
    batch = value(first, NEXT, "q", "a")
    second = background(lambda c: value(c, NEXT, "q", "a"), connect(own_dsn))
    wait_for_lock(second.pid)
    first.commit()
    assert second.result(10) == batch


def test_who_is_not_known_is_refused(shared: Connection) -> None:
    refused("PQ011", value, shared, NEXT, "q", "nobody")
    refused("PQ011", value, shared, NEXT, "q", None)
    refused("PQ001", value, shared, NEXT, "nowhere", "a")
    refused("PQ005", value, shared, "select pgque.next_batch('q', 'c')")
    subscribe(shared, "q", "alone")
    refused("PQ011", value, shared, "select pgque.next_batch('q', 'alone', 'a')")
