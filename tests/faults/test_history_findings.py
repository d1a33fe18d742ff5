"""What the history checker found, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    forced_tick,
    ids,
    move_clock,
    offer,
    outcome,
    post,
    rotate,
    rows,
    settle,
    take,
    value,
    work_off,
)


def waits(conn: Connection, pid: int) -> bool:
    """Whether that backend waits for a lock."""
    query = "select a.wait_event_type = 'Lock' from pg_stat_activity as a where a.pid = %s"
    return bool(value(conn, query, pid))


LOOKS_AT_ALL_QUEUES = pytest.mark.parametrize(
    "look",
    [
        "select distinct h.queue from pgque.health() as h where h.queue is not null",
        "select distinct m.queue from pgque.metrics() as m where m.queue is not null",
        "select i.queue_name from pgque.get_queue_info() as i",
        "select i.queue_name from pgque.get_consumer_info() as i",
    ],
    ids=["health", "metrics", "get_queue_info", "get_consumer_info"],
)


@LOOKS_AT_ALL_QUEUES
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
@pytest.mark.parametrize("tables", ["go", "stay"])
def test_a_queue_dropped_during_the_call_is_left_out(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    look: str,
    isolation: str,
    tables: str,
) -> None:
    for name in ("first", "second", "third"):
        value(own, "select pgque.create_queue(%s)", name)
        value(own, "select pgque.subscribe(%s, 'c')", name)
    # As short as they wait, they may wait just long enough; here for certain.
    for name in (
        "health()",
        "metrics()",
        "get_queue_info(text, pgque.caller)",
        "get_consumer_info(text, text, pgque.caller)",
    ):
        own.execute(f"alter function pgque.{name} set lock_timeout = '1min'".encode())
    # Who looks has to wait at the first queue; that and the next one are gone then.
    dropping = connect(own_dsn, autocommit=False)
    for name in ("first", "second"):
        value(dropping, "select pgque.drop_queue(%s, true)", name)
    if tables == "go":  # as by maintenance
        value(dropping, "select pgque._drop_leaves()")
    looking = connect(own_dsn)
    looking.execute(f"set default_transaction_isolation to '{isolation}'".encode())
    job = background(lambda c: rows(c, look), looking)
    if "metrics" not in look or tables == "go":  # metrics() passes over a queue that somebody has for himself
        wait_for_lock(job.pid)
        dropping.commit()
    seen = {name for (name,) in job.result()}
    # In its snapshot a REPEATABLE READ transaction still has the queues.
    assert seen == {"third"} if isolation == "read committed" else "third" in seen


def test_a_rotation_and_a_delivery_of_a_message_with_a_key_do_not_deadlock(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c', 'latest', keyed_order => true)")
    post(own, "q", "old")
    forced_tick(own, "q")
    assert len(work_off(own, "q")) == 1
    assert rotate(own, "q") == 1
    # Two keys: of each a message is out, and the next one waits in the retry queue.
    for key in "ab":
        post(own, "q", key=key)
    forced_tick(own, "q")
    token = take(own, "q")[0].batch_id
    waiting = [post(own, "q", key=key) for key in "ab"]
    forced_tick(own, "q")
    assert take(own, "q", "w2") == []
    assert ack(own, token) == 1
    assert rotate(own, "q") == 1
    forced_tick(own, "q")
    holder = connect(own_dsn, autocommit=False)
    rows(holder, "select from pgque.retry_queue where ev_id = %s for update", waiting[0])
    rotation = background(lambda c: rotate(c, "q"), connect(own_dsn))
    # It gave up, or has the table and waits for the row.
    wait_until(lambda: rotation.done or waits(own, rotation.pid), "the rotation is done or waits")
    receive = background(lambda c: ids(take(c, "q", "w3")), connect(own_dsn))
    # It has the other row, and if it waits, then for the table.
    wait_until(lambda: receive.done or waits(own, receive.pid), "the receive is done or waits")
    holder.rollback()
    assert set(receive.result()) <= set(waiting)
    assert rotation.result() in (0, 1)


def test_of_two_workers_that_ack_one_message_one_gets_the_reason_lost_to_another_worker(
    own: Connection, own_dsn: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c')")
    first = offer(own, "q", 2)[0]
    lost = take(own, "q", "w1")[0].batch_id
    move_clock(own, "1 hour")
    configure(own, "q", visibility_timeout="1 day")
    taken = take(own, "q", "w2", 1)
    assert ids(taken) == [first]
    answers = [ack(own, lost), ack(own, taken[0].batch_id)]
    assert answers == [0, 1]


def test_a_message_whose_nack_was_refused_is_not_finished_by_the_ack_of_the_batch(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c')")
    configure(own, "q", max_receive_attempts=2)
    sent = offer(own, "q", 9)
    token = take(own, "q", "w1")[0].batch_id
    move_clock(own, "1 hour")
    taken = ids(take(own, "q", "w2", 1, "1 day"))
    # A hand-out under way: it takes one more of what lapsed, and has locked the others too.
    other = connect(own_dsn, autocommit=False)
    taken += ids(take(other, "q", "w3", 9, "1 day"))
    failed = [i for i in sent if i not in taken]
    assert len(taken) == 2
    own.execute("set statement_timeout = '20s'")
    answers = outcome(own, "nack", token, failed, None)
    other.commit()
    ack(own, token)
    move_clock(own, "2 hours")
    settle(own, "q")
    again = {m.msg_id for m in work_off(own, "q", "w4")}
    assert again == set(failed), answers
