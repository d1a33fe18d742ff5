"""The batch that a consumer on its own, or a subconsumer, has open: when it ends, and that it always can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from .helpers import (
    ack,
    column,
    configure,
    dead_letters,
    ids,
    move_clock,
    nack_ids,
    offer,
    receive,
    refused,
    rows,
    subscribe,
    take,
    value,
)

Connection = psycopg.Connection[Any]

NEXT = "select pgque.next_batch('q', 'c')"
EVENTS = "select ev_id from pgque.get_batch_events(%s)"
RETRY = "select pgque.event_retry(%s, %s, 0)"
FINISH = "select pgque.finish_batch(%s)"


@pytest.fixture
def alone(own: Connection) -> Connection:
    """A database with a queue and a consumer on its own."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    return own


def compact(conn: Connection) -> None:
    """Turn the journal and empty the old leaf."""
    conn.execute("select pgque._rotate_journal(journal_cur) from pgque.journal")
    for _ in range(3):
        value(conn, "select pgque.maint_tables()")


def test_a_batch_of_retries_that_retention_gives_up_is_finished(alone: Connection) -> None:
    configure(alone, "q", retention_period="1 hour")
    sent = offer(alone, "q", 2)
    batch = receive(alone, "q")
    nack_ids(alone, batch[0].batch_id, sent, "0")
    assert ack(alone, batch[0].batch_id) == 1
    move_clock(alone, "50 minutes")
    again = receive(alone, "q")
    move_clock(alone, "100 minutes")  # the time counts from the delivery, since this lease has no end
    value(alone, "select pgque.maint_retain('q')")
    assert receive(alone, "q") == again
    move_clock(alone, "2 hours")
    value(alone, "select pgque.maint_retain('q')")
    assert receive(alone, "q") == []
    assert set(dead_letters(alone, "q")) == set(sent)
    assert ack(alone, again[0].batch_id) == 0


def test_a_finished_batch_stays_finished_when_a_restored_journal_is_compacted(alone: Connection) -> None:
    offer(alone, "q", 1)
    batch = value(alone, NEXT)
    assert value(alone, FINISH, batch) == 1
    alone.execute("update pgque.queue set queue_xid = '7'")  # as a dump that was loaded
    sent = offer(alone, "q", 1)
    compact(alone)
    later = value(alone, NEXT)
    assert later != batch
    assert column(alone, EVENTS, later) == sent
    assert value(alone, FINISH, later) == 1


def test_a_batch_whose_messages_all_have_an_outcome_is_open_until_it_is_finished(alone: Connection) -> None:
    sent = offer(alone, "q", 1)
    for _ in range(2):  # from the log, and from the retry queue
        batch = value(alone, NEXT)
        assert value(alone, RETRY, batch, sent[0]) == 1
        # The process ends here, and the next one asks.
        assert value(alone, NEXT) == batch
        assert value(alone, "select prev_tick_id <= tick_id from pgque.get_batch_info(%s)", batch) is True
        rows(alone, EVENTS, batch)
        assert value(alone, FINISH, batch) == 1
        assert value(alone, FINISH, batch) == 0
    assert ids(receive(alone, "q")) == sent


@pytest.mark.parametrize("archive", [False, True])
def test_an_ack_in_an_old_snapshot_after_every_message_was_nacked_is_one(
    alone: Connection, own_dsn: str, transaction: Callable[..., Connection], archive: bool
) -> None:
    configure(alone, "q", archive_on_ack=str(archive).lower())
    sent = offer(alone, "q", 2)
    old = transaction("repeatable read", own_dsn)
    batch = receive(old, "q")
    nack_ids(old, batch[0].batch_id, sent if not archive else sent[:1], "0")
    assert ack(old, batch[0].batch_id) == 1
    old.commit()
    assert ids(receive(alone, "q")) == (sent if not archive else sent[:1])


def test_a_batch_in_which_nothing_is_left_is_not_given_to_another_subconsumer(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for worker in ("a", "b"):
        value(own, "select pgque.register_subconsumer('q', 'c', %s)", worker)
    sent = offer(own, "q", 1)
    held = value(own, "select pgque.next_batch('q', 'c', 'a')")
    assert value(own, "select pgque.event_retry(%s, %s, 3600)", held, sent[0]) == 1
    move_clock(own, "2 minutes")
    assert value(own, "select pgque.next_batch('q', 'c', 'b', '1 minute')") is None
    assert value(own, FINISH, held) == 0
    value(own, "select pgque.retry_now('q', 'c')")
    again = value(own, "select pgque.next_batch('q', 'c', 'b')")
    assert column(own, EVENTS, again) == sent


def test_an_ack_sees_a_batch_that_moved_to_the_retry_queue_while_the_journal_rotated(
    own: Connection, own_dsn: str, connect: Callable[..., Connection], transaction: Callable[..., Connection]
) -> None:
    for queue in ("q", "other"):
        value(own, "select pgque.create_queue(%s)", queue)
        subscribe(own, queue)
    sent = offer(own, "q", 2)
    batch = take(own, "q")
    settling = connect(own_dsn, autocommit=False)
    assert value(settling, "select pgque.set_visibility(%s, '1 hour')", batch[0].batch_id) == 2
    own.execute("select pgque._rotate_journal(journal_cur) from pgque.journal")
    old = transaction("repeatable read", own_dsn)
    assert receive(old, "other") == []
    value(own, "select pgque.maint_tables()")
    old.commit()
    settling.commit()
    assert ack(own, batch[0].batch_id) == 1
    move_clock(own, "2 hours")
    assert take(own, "q", "w2") == []
    assert len(sent) == 2


def test_an_ack_sees_that_the_newest_of_501_batches_moved_to_the_retry_queue_before_a_compaction(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    for consumer in ("c", "other"):
        subscribe(own, "q", consumer)
    offer(own, "q", 501)
    batches = column(
        own,
        "select r.batch_id from generate_series(1, 501) n, lateral pgque.receive('q', 'c', 1, 'w' || n, '1 hour') r",
    )
    assert value(own, "select pgque.set_visibility(%s, '1 hour')", batches[-1]) == 1
    own.execute("select pgque._rotate_journal(journal_cur) from pgque.journal")
    first, second = (take(own, "q", "w", 1, consumer="other") for _ in range(2))
    assert len(first) == 1
    settling = connect(own_dsn, autocommit=False)  # so compaction locks the batches one by one
    assert ack(settling, second[0].batch_id) == 1
    value(own, "select pgque._compact_journal()")
    assert ack(own, batches[-1]) == 1
    assert value(own, "select count(*) from pgque.retry_queue") == 0


def test_a_seek_that_waited_while_workers_came_leaves_them_their_batch(
    alone: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    offer(alone, "q", 2)
    end = value(alone, "select pgque.tick_for('q', 'latest')")
    sharing = connect(own_dsn, autocommit=False)
    assert value(sharing, "select pgque.share_consumer('q', 'c')") == 1
    batch = take(sharing, "q")
    seeking = background(lambda c: value(c, "select pgque.seek('q', 'c', %s)", end), connect(own_dsn))
    wait_for_lock(seeking.pid)
    sharing.commit()
    refused("PQ005", seeking.result)
    assert ack(alone, batch[0].batch_id) == 1


@pytest.mark.parametrize("worker", [None, "w"])
def test_who_waited_for_a_delivery_into_the_leaf_that_is_no_longer_written_sees_it(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    worker: str | None,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = offer(own, "q", 4)

    def get(conn: Connection) -> list[Any]:
        return receive(conn, "q", count=2) if worker is None else take(conn, "q", worker, 2)

    if worker is not None:  # it is a pool already
        assert ack(own, get(own)[0].batch_id) == 1
        sent = sent[2:] + offer(own, "q", 2)
    first = connect(own_dsn, autocommit=False)
    batch = get(first)
    own.execute("select pgque._rotate_journal(journal_cur) from pgque.journal")
    second = background(get, connect(own_dsn))
    wait_for_lock(second.pid)
    first.commit()
    assert ids(batch) == sent[:2]
    assert ids(second.result()) == (sent[:2] if worker is None else sent[2:])
