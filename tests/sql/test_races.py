"""Two sessions at one message, in orders that tests/faults/test_interleavings.py does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from model.bench import turn_journal
from sql.helpers import (
    Connection,
    Message,
    ack,
    configure,
    dead_letters,
    extend,
    forward_letters,
    ids,
    move_clock,
    nack,
    nack_ids,
    offer,
    outcome,
    refused,
    release,
    row_counts,
    settle,
    take,
    value,
    work_off,
)

# Repeatable read is in tests/faults/test_interleavings.py.
OLD = pytest.mark.parametrize("isolation", ["serializable"])
LOST = "lost to another worker"


class Pair:
    """Two sessions: one with a transaction open, and one that runs in a thread."""

    def __init__(
        self,
        dsn: str,
        connect: Callable[..., Connection],
        background: Callable[..., Any],
        wait: Callable[..., None],
    ) -> None:
        self.one = connect(dsn, autocommit=False)
        self._dsn, self._connect, self._background, self._wait = dsn, connect, background, wait

    def other(self, call: Callable[[Connection], Any]) -> Any:
        """Start the call; return once it is done or waits for a lock."""
        job = self._background(call, self._connect(self._dsn))
        watcher = self._connect(self._dsn)
        query = "select a.wait_event_type = 'Lock' from pg_stat_activity as a where a.pid = %s"
        self._wait(lambda: job.done or value(watcher, query, job.pid), "the other session is done or waits")
        return job


@pytest.fixture
def pair(
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> Pair:
    """Two more sessions in the test's own database."""
    return Pair(own_dsn, connect, background, wait_until)


@pytest.mark.parametrize("whole", [True, False])
def test_an_ack_meets_the_first_tick_after_a_restore_and_counts(
    pool: Connection, pair: Pair, whole: bool
) -> None:
    sent = offer(pool, "q", 3)
    batch = take(pool, "q", "w1")[0].batch_id
    pool.execute("update pgque.queue set queue_xid = '7'")
    if whole:
        assert ack(pair.one, batch) == 1
        refused("40001", value, pool, "select pgque.ticker('q')")
        pair.one.commit()
        value(pool, "select pgque.ticker('q')")
    else:
        assert set(outcome(pair.one, "ack", batch, sent[:2]).values()) == {None}
        # The worker has read the tables, which the repair takes first: it lets them go and tries again.
        job = pair.other(lambda c: value(c, "select pgque.ticker('q')"))
        assert not job.done
        pair.one.commit()
        job.result()
    move_clock(pool, "1 day")
    assert ids(work_off(pool, "q", "w2")) == ([] if whole else sent[2:])


def test_an_uncommitted_ack_whose_lease_expires_blocks_no_other_messages(
    pool: Connection, pair: Pair, own_dsn: str
) -> None:
    first = offer(pool, "q", 2)
    old = take(pool, "q", "w1")[0].batch_id
    assert ack(pair.one, old) == 1
    move_clock(pool, "1 minute")
    later = offer(pool, "q", 5)
    pool.execute("set statement_timeout = '5s'")
    got = ids(take(pool, "q", "w2", 3)) + ids(take(pool, "q", "w3", 3))
    got += ids(take(pool, "q", "w4", 3))
    assert set(later) <= set(got)
    pair.one.commit()
    assert set(first).isdisjoint(got)
    move_clock(pool, "1 day")
    assert set(first).isdisjoint(ids(work_off(pool, "q", "w5")))


def test_open_transactions_of_workers_do_not_stop_each_other(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    sent = offer(pool, "q", 12)
    sessions = [connect(own_dsn, autocommit=False) for _ in range(3)]
    held = []
    for number, session in enumerate(sessions):
        session.execute("set statement_timeout = '5s'")
        batch = take(pool, "q", f"w{number}", 4)
        held += ids(batch)
        # The handler's own transaction: ack with the business data, commit later.
        assert ack(session, batch[0].batch_id) == 1
    assert held == sent
    more = offer(pool, "q", 2)
    pool.execute("set statement_timeout = '5s'")
    assert ids(take(pool, "q", "w9")) == more
    for session in sessions:
        session.commit()
    move_clock(pool, "1 day")
    assert sorted(ids(work_off(pool, "q", "w9"))) == more


def held_again(pool: Connection, count: int) -> list[Message]:
    """A batch whose messages came from where they wait, and whose lease is over."""
    sent = offer(pool, "q", count)
    nack_ids(pool, take(pool, "q", "w1")[0].batch_id, sent, "0")
    held = take(pool, "q", "w1")
    assert ids(held) == sent
    move_clock(pool, "1 minute")
    return held


@pytest.mark.parametrize(
    ("how", "turns"), [("nack", 0), ("ack", 0), ("dead", 0), ("archive", 0), ("release", 0), ("nack", 3)]
)
def test_a_message_that_an_ack_returned_as_lost_is_not_acked_with_the_rest(
    pool: Connection, pair: Pair, how: str, turns: int
) -> None:
    """It was, and so nobody's, if the other transaction then let go of it: the nack had not counted."""
    held = held_again(pool, 3)
    (lost,) = ids(take(pair.one, "q", "w2", 1))
    if how == "release":
        assert release(pool, held[0].batch_id, [lost]) == 0
    else:
        assert outcome(pool, how, held[0].batch_id, [lost]) == {lost: LOST}
    pair.one.rollback()
    for _ in range(turns):
        assert turn_journal(pool)
        assert value(pool, "select pgque.maint_tables()") == 1
    assert ack(pool, held[0].batch_id) == 0
    rest = [i for i in ids(held) if i != lost]
    assert outcome(pool, "ack", held[0].batch_id, rest) == dict.fromkeys(rest)
    assert ids(work_off(pool, "q", "w3")) == [lost]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_nack_that_would_raise_an_error_waits_until_it_is_sure(
    pool: Connection, pair: Pair, end: str
) -> None:
    held = held_again(pool, 3)
    (lost,) = ids(take(pair.one, "q", "w2", 1))
    message = next(m for m in held if m.msg_id == lost)
    job = pair.other(lambda c: nack(c, message, "10 hours"))
    assert not job.done
    pair.one.execute(end.encode())
    if end == "commit":
        refused("PQ012", job.result)
        assert ack(pool, message.batch_id) == 0
    else:
        assert job.result() == 1
        assert ack(pool, message.batch_id) == 1
        assert work_off(pool, "q", "w3") == []
        move_clock(pool, "11 hours")
        assert ids(work_off(pool, "q", "w3")) == [lost]


def test_an_unsubscribe_waits_for_a_worker_that_rejects_a_message_and_removes_its_retry(
    pool: Connection, pair: Pair
) -> None:
    offer(pool, "q", 2)
    batch = take(pool, "q", "w", 2)
    nack_ids(pair.one, batch[0].batch_id, ids(batch)[:1], "1 hour")
    job = pair.other(lambda c: value(c, "select pgque.unsubscribe('q', 'c')"))
    assert not job.done
    pair.one.commit()
    assert job.result() == 1
    assert "retry_queue" not in row_counts(pool)


def test_a_reclaim_meets_an_ack_and_one_of_them_wins(pool: Connection, pair: Pair) -> None:
    sent = offer(pool, "q", 2)
    token = take(pool, "q", timeout="1 day")[0].batch_id
    assert ack(pair.one, token) == 1
    job = pair.other(lambda c: value(c, "select pgque.reclaim('q', 'c')"))
    pair.one.commit()
    assert job.result() in (0, 1)
    move_clock(pool, "3 days")
    assert work_off(pool, "q", "w2") == []
    assert set(outcome(pool, "ack", token, sent).values()).isdisjoint({None})


def test_judging_by_maintenance_meets_an_extension(pool: Connection, pair: Pair) -> None:
    configure(pool, "q", max_receive_attempts=1)
    sent = offer(pool, "q", 1)
    token = take(pool, "q")[0].batch_id
    move_clock(pool, "1 minute")
    assert extend(pair.one, token, "1 hour") == 1
    job = pair.other(lambda c: value(c, "select pgque.maint()"))
    pair.one.commit()
    job.result()
    if dead_letters(pool, "q") == {}:
        assert outcome(pool, "ack", token, sent) == {sent[0]: None}
    else:
        assert outcome(pool, "ack", token, sent) != {sent[0]: None}


@OLD
@pytest.mark.parametrize("how", ["ack", "ids", "nack", "dead"])
def test_a_transaction_with_its_own_snapshot_gives_outcomes(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection], isolation: str, how: str
) -> None:
    sent = offer(pool, "q", 2)
    token = take(pool, "q")[0].batch_id
    one = transaction(isolation, own_dsn)
    if how == "ack":
        assert ack(one, token) == 1
    elif how == "nack":
        assert [r[1] for r in nack_ids(one, token, sent, "0")] == [True, True]
    else:
        call = "ack" if how == "ids" else "dead"
        assert outcome(one, call, token, sent, *(["x"] if how == "dead" else [])) == dict.fromkeys(sent)
    one.execute("commit")
    move_clock(pool, "1 day")
    settle(pool, "q")
    assert ids(work_off(pool, "q", "w2")) == (sent if how == "nack" else [])


@OLD
def test_a_snapshot_older_than_the_delivery_acks_it_or_gets_the_reason_why_not(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    stale = transaction(isolation, own_dsn)
    sent = offer(pool, "q", 2)
    token = take(pool, "q")[0].batch_id
    acked = False
    try:
        acked = ack(stale, token) == 1
        stale.execute("commit")
    except psycopg.errors.SerializationFailure:
        stale.execute("rollback")
        acked = False
    move_clock(pool, "1 day")
    assert ids(work_off(pool, "q", "w2")) == ([] if acked else sent)


def test_the_journal_is_compacted_while_batches_are_open(pool: Connection) -> None:
    sent = offer(pool, "q", 12)
    kept = take(pool, "q", "w1", 4, "1 day")
    lost = take(pool, "q", "w2", 4, "1 minute")
    outcome(pool, "ack", kept[0].batch_id, sent[:1])
    nack(pool, lost[0], "10 minutes", "x")
    for _ in range(4):
        offer(pool, "q", 1)
        (one,) = take(pool, "q", "w3", 1)
        assert ack(pool, one.batch_id) == 1
        assert turn_journal(pool)
        assert value(pool, "select pgque.maint_tables()") == 1
    assert extend(pool, kept[0].batch_id, "1 second") == 3
    assert outcome(pool, "ack", kept[0].batch_id, sent[:2]) == {sent[0]: "settled already", sent[1]: None}
    move_clock(pool, "2 minutes")
    again = ids(take(pool, "q", "w4", timeout="1 day") + take(pool, "q", "w4", timeout="1 day"))
    assert sorted(set(again) & set(sent[:8])) == sent[5:8]
    assert ack(pool, kept[0].batch_id) == 1
    assert ack(pool, lost[0].batch_id) == 0
    move_clock(pool, "11 minutes")
    settle(pool, "q")
    (message,) = work_off(pool, "q", "w5")
    assert (message.msg_id, message.receive_count, message.retry_count) == (sent[4], 2, 1)


def test_a_worker_whose_backend_is_killed_loses_only_its_lease(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    sent = offer(pool, "q", 6)
    victim = connect(own_dsn)
    token = take(victim, "q", "w1", 2)[0].batch_id
    inside = connect(own_dsn, autocommit=False)
    assert ids(take(inside, "q", "w2", 2)) == sent[2:4]
    for session in (victim, inside):
        value(pool, "select pg_terminate_backend(%s, 5000)", session.info.backend_pid)
    # What was never committed is there at once; the committed hand-out comes back when it lapses.
    assert ids(take(pool, "q", "w3", 4)) == sent[2:]
    move_clock(pool, "29 seconds")
    assert take(pool, "q", "w3") == []
    move_clock(pool, "61 seconds")
    got = []
    while batch := take(pool, "q", "w4", timeout="1 day"):
        got += ids(batch)
    assert sorted(got) == sent
    assert ack(pool, token) == 0


def test_the_tokens_of_batches_never_repeat(pool: Connection) -> None:
    seen: set[int] = set()
    for number in range(60):
        offer(pool, "q", 1)
        pool.execute("begin")
        batch = take(pool, "q", f"w{number}", 1)
        pool.execute("rollback" if number % 3 == 0 else "commit")
        for m in batch:
            assert m.batch_id not in seen
            seen.add(m.batch_id)
        if number % 7 == 0:
            move_clock(pool, f"{number} hours")
    assert len(seen) == 60


def test_senders_and_workers_that_repair_a_restored_queue_at_once_wait_for_each_other(
    pool: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    offer(pool, "q")
    pool.execute("update pgque.queue set queue_xid = '1'")
    holder = transaction(dsn=own_dsn)
    holder.execute("select from pgque.queue for update")
    jobs = []
    waiting = "select a.wait_event_type in ('Lock', 'Timeout') from pg_stat_activity as a where a.pid = %s"
    for call in ("send('q', 'one')", "send('q', 'two')", "subscribe('q', 'other')", "ticker('q')"):
        query = f"select pgque.{call}"
        job = background(lambda c, query=query: value(c, query), connect(own_dsn))
        wait_until(lambda job=job: value(pool, waiting, job.pid), "the call waits for the queue")
        jobs.append(job)
    holder.rollback()
    for job in jobs:
        job.result()
    settle(pool, "q")
    assert {m.payload for m in work_off(pool, "q")} == {"1", "one", "two"}


def test_a_message_is_given_up_while_the_queue_of_dead_letters_waits_for_a_restore(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(pool, "select pgque.create_queue('bad')")
    configure(pool, "q", max_retries=0, dead_letter_queue="bad")
    [sent] = offer(pool, "q")
    pool.execute("update pgque.queue set queue_xid = '1' where queue_name = 'bad'")
    connect(own_dsn, application_name="pg_restore").execute("select 1")
    refused("55000", value, pool, "select pgque.send('bad', 'x')")
    [message] = take(pool, "q")
    nack(pool, message)
    forward_letters(pool)
    assert list(dead_letters(pool, "q")) == [sent]


@pytest.mark.parametrize("call", ["unsubscribe('q', 'c')", "drop_queue('q', true)"])
def test_a_dump_without_consumers_is_complete_right_after_the_last_one_was_removed(
    pool: Connection, call: str
) -> None:
    value(pool, "select pgque.create_queue('other')")
    value(pool, f"select pgque.{call}")
    pool.execute("update pgque.queue set queue_xid = '1'")
    assert value(pool, "select pgque.send('other', 'x')")
