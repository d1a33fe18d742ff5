"""Leases: the old batch id, extending, hiding, handing back, and names that come and go."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from conftest import install
from model.bench import turn_journal
from sql.helpers import (
    Connection,
    Message,
    ack,
    compact_soon,
    configure,
    dead_letters,
    extend,
    forced_tick,
    ids,
    move_clock,
    nack,
    nack_ids,
    offer,
    outcome,
    post,
    refused,
    release,
    rotate,
    row_counts,
    rows,
    set_visibility,
    subscribe,
    take,
    value,
    work_off,
)

LOST = "lost to another worker"


def test_a_message_whose_lease_expired_and_that_nobody_received_can_be_nacked_dead_lettered_and_extended(
    pool: Connection,
) -> None:
    sent = offer(pool, "q", 4)
    (a, b, c, d) = take(pool, "q", "w1")
    move_clock(pool, "1 minute")
    assert nack(pool, a, "1 hour", "later") == 1
    assert outcome(pool, "dead", b.batch_id, [b.msg_id], "bad") == {b.msg_id: None}
    assert outcome(pool, "ack", c.batch_id, [c.msg_id]) == {c.msg_id: None}
    assert set_visibility(pool, d.batch_id, "10 minutes") == 1
    assert take(pool, "q", "w2") == []
    move_clock(pool, "12 minutes")
    assert ids(work_off(pool, "q", "w2")) == sent[3:]
    move_clock(pool, "62 minutes")
    (again,) = work_off(pool, "q", "w2")
    assert (again.msg_id, again.receive_count, again.retry_count, again.last_error) == (
        sent[0],
        2,
        1,
        "later",
    )


def test_every_call_with_a_batch_that_another_worker_took_over_is_refused(pool: Connection) -> None:
    offer(pool, "q", 2)
    lost = take(pool, "q", "w1")
    old = lost[0].batch_id
    move_clock(pool, "1 minute")
    taken = take(pool, "q", "w2", timeout="1 day")
    if len(taken) < 2:  # smaller pieces after a lapse
        taken += take(pool, "q", "w2", timeout="1 day")
    assert ids(taken) == ids(lost)
    assert ack(pool, old) == 0
    assert outcome(pool, "ack", old, ids(lost)) == dict.fromkeys(ids(lost), LOST)
    assert {r[0]: (r[1], r[2]) for r in nack_ids(pool, old, ids(lost))} == dict.fromkeys(
        ids(lost), (False, LOST)
    )
    assert outcome(pool, "dead", old, ids(lost), "x") == dict.fromkeys(ids(lost), LOST)
    assert outcome(pool, "archive", old, ids(lost)) == dict.fromkeys(ids(lost), LOST)
    assert extend(pool, old, "1 hour") == 0
    assert set_visibility(pool, old, "0") == 0
    assert set_visibility(pool, old, "1 hour") == 0
    assert release(pool, old) == 0
    refused("PQ012", nack, pool, lost[0])
    # The new holder noticed nothing.
    assert take(pool, "q", "w3") == []
    for message in taken:
        assert outcome(pool, "ack", message.batch_id, [message.msg_id]) == {message.msg_id: None}
    assert rows(pool, "select * from pgque.dlq_inspect('q')") == []
    move_clock(pool, "3 days")
    assert work_off(pool, "q", "w3") == []


def test_a_whole_batch_of_which_another_took_one_is_not_acked_but_the_rest_of_it_can_be(
    pool: Connection,
) -> None:
    # Whoever commits its work with ack(batch) must not be told that all of it counts.
    sent = offer(pool, "q", 3)
    old = take(pool, "q", "w1")[0].batch_id
    move_clock(pool, "1 minute")
    taken = take(pool, "q", "w2", 1, "1 day")
    assert ack(pool, old) == 0
    assert outcome(pool, "ack", old, sent) == {sent[0]: LOST, sent[1]: None, sent[2]: None}
    assert ack(pool, old) == 0
    assert take(pool, "q", "w3") == []
    assert outcome(pool, "ack", taken[0].batch_id, sent[:1]) == {sent[0]: None}


@pytest.mark.parametrize("call", ["set_visibility", "extend"])
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_an_ack_of_a_whole_batch_whose_lease_was_moved_returns_0_once_another_worker_has_some_of_it(
    pool: Connection, call: str, isolation: str
) -> None:
    offer(pool, "q", 3)
    batch = take(pool, "q", "w1", timeout="5 s")
    assert outcome(pool, "ack", batch[0].batch_id, [batch[2].msg_id]) == {batch[2].msg_id: None}
    pool.execute(f"begin isolation level {isolation}".encode())
    assert value(pool, f"select pgque.{call}(%s, '5 s')", batch[0].batch_id) == 2
    pool.execute(b"commit")
    move_clock(pool, "20 s")
    (taken,) = take(pool, "q", "w2", 1, "1 hour")
    assert ack(pool, batch[0].batch_id) == 0
    assert outcome(pool, "ack", batch[0].batch_id, ids(batch)[:2]) == {
        batch[0].msg_id: LOST,
        batch[1].msg_id: None,
    }
    assert ack(pool, taken.batch_id) == 1


@pytest.mark.parametrize("call", ["set_visibility", "extend"])
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_an_ack_of_a_whole_batch_whose_end_was_moved_counts_while_nobody_else_has_any_of_it(
    pool: Connection, call: str, isolation: str
) -> None:
    offer(pool, "q", 3)
    batch = take(pool, "q", "w1", timeout="5 s")
    assert outcome(pool, "ack", batch[0].batch_id, [batch[2].msg_id]) == {batch[2].msg_id: None}
    pool.execute(f"begin isolation level {isolation}".encode())
    assert value(pool, f"select pgque.{call}(%s, '5 s')", batch[0].batch_id) == 2
    pool.execute(b"commit")
    assert outcome(pool, "ack", batch[0].batch_id, [batch[1].msg_id]) == {batch[1].msg_id: None}
    move_clock(pool, "20 s")
    assert ack(pool, batch[0].batch_id) == 1
    assert ack(pool, batch[0].batch_id) == 0
    assert take(pool, "q", "w2") == []


@pytest.mark.parametrize("again", [False, True])
def test_an_ack_of_a_whole_batch_does_not_need_the_messages_that_its_worker_acked_before(
    pool: Connection, again: bool
) -> None:
    sent = offer(pool, "q", 4)
    old = take(pool, "q", "w0" if again else "w1")[0].batch_id
    if again:  # the same with messages that are leased where they wait
        move_clock(pool, "1 minute")
        old = take(pool, "q", "w1")[0].batch_id
    outcome(pool, "ack", old, sent[:1])
    move_clock(pool, "2 minutes")
    value(pool, "select pgque.maint()")  # puts what lapsed aside
    outcome(pool, "ack", old, sent[1:2])
    assert outcome(pool, "ack", old, sent[:2]) == dict.fromkeys(sent[:2], "settled already")
    assert ack(pool, old) == 1
    assert take(pool, "q", "w2") == []


def test_redeliveries_and_new_messages_are_separate_batches(pool: Connection) -> None:
    first = offer(pool, "q", 1)
    nack_ids(pool, take(pool, "q", "w0")[0].batch_id, first, "0 s", "again")
    later = offer(pool, "q", 1)
    assert [ids(take(pool, "q", "w1")) for _ in range(3)] == [first, later, []]


def test_a_worker_that_receives_some_expired_messages_blocks_no_outcome_of_the_others(
    pool: Connection, own_dsn: str
) -> None:
    sent = offer(pool, "q", 9)
    old = take(pool, "q", "w1", 9, "1 ms")[0].batch_id
    configure(pool, "q", max_receive_attempts=2)
    value(pool, "select pg_sleep(0.01)")
    assert ids(take(pool, "q", "w0", 1)) == sent[:1]
    with psycopg.connect(own_dsn) as second:
        assert ids(take(second, "q", "w2", 9)) == sent[1:2]
        assert set(outcome(pool, "dead", old, sent[2:], "bad").values()) == {None}
        second.rollback()
    assert ack(pool, old) == 0
    assert ids(take(pool, "q", "w3", 9)) == sent[1:2]
    assert set(dead_letters(pool, "q")) == set(sent[2:])


def test_a_message_that_kills_its_worker_is_given_up_without_the_others_of_its_batch(
    pool: Connection,
) -> None:
    configure(pool, "q", max_receive_attempts=3)
    poison, good = offer(pool, "q", 2)
    for hour in (1, 2):  # the process that holds both dies
        assert [ids(take(pool, "q", "w1", 1)) for _ in range(3)] == [[poison], [good], []]
        move_clock(pool, f"{hour} hours")
    assert ids(take(pool, "q", "w1")) == [poison]
    (new,) = offer(pool, "q", 1)
    assert take(pool, "q", "w1") == []  # neither the other one nor a new one
    (alone,) = take(pool, "q", "w2")
    assert (alone.msg_id, alone.receive_count) == (good, 3)
    assert ack(pool, alone.batch_id) == 1
    assert ids(take(pool, "q", "w2")) == [new]
    move_clock(pool, "3 hours")
    assert ids(take(pool, "q", "w1")) == [new]
    assert set(dead_letters(pool, "q")) == {poison}


@pytest.mark.parametrize("busy_for_ever", [False, True])
def test_a_worker_finishes_what_it_holds_before_it_gets_what_may_be_poison(
    pool: Connection, busy_for_ever: bool
) -> None:
    configure(pool, "q", max_receive_attempts=2)
    lost, held = offer(pool, "q", 2)
    assert ids(take(pool, "q", "w1", 1)) == [lost]
    (holding,) = take(pool, "q", "w1", 1, "1 day")
    assert holding.msg_id == held
    move_clock(pool, "31 seconds")
    assert take(pool, "q", "w1") == []
    if busy_for_ever:  # processes that share a name: one of them gets it after a visibility timeout
        move_clock(pool, "62 seconds")
    else:
        assert ack(pool, holding.batch_id) == 1
    assert ids(take(pool, "q", "w1")) == [lost]


def test_an_expired_message_before_its_last_attempt_keeps_nothing_back(pool: Connection) -> None:
    configure(pool, "q", max_receive_attempts=2)
    old = post(pool, "q", ttl="1 minute")
    (good,) = offer(pool, "q", 1)
    assert ids(take(pool, "q", "w1")) == [old, good]
    move_clock(pool, "2 minutes")
    assert ids(take(pool, "q", "w2")) == [good]


def test_messages_that_were_only_rejected_are_delivered_together_at_their_last_attempt(
    pool: Connection,
) -> None:
    configure(pool, "q", max_receive_attempts=3)
    sent = offer(pool, "q", 3)
    for _ in range(2):
        nack_ids(pool, take(pool, "q")[0].batch_id, sent, "0 s", "not yet")
    assert ids(take(pool, "q")) == sent
    later = offer(pool, "q", 1)
    assert ids(take(pool, "q")) == later


def test_messages_acked_before_the_lease_expired_stay_acked(pool: Connection) -> None:
    sent = offer(pool, "q", 2)
    old = take(pool, "q", "w1")[0].batch_id
    outcome(pool, "ack", old, sent[:1])
    move_clock(pool, "1 minute")
    assert ids(take(pool, "q", "w2", timeout="1 day")) == sent[1:]
    assert outcome(pool, "ack", old, sent) == {sent[0]: "settled already", sent[1]: LOST}


def test_a_message_released_and_received_again_by_the_same_worker_has_a_new_batch_id(
    pool: Connection,
) -> None:
    sent = offer(pool, "q", 1)
    old = take(pool, "q", "w1")[0].batch_id
    move_clock(pool, "1 minute")
    (again,) = take(pool, "q", "w1")
    assert again.batch_id != old
    assert outcome(pool, "ack", old, sent)[sent[0]] is not None
    assert ack(pool, old) == 0
    assert ack(pool, again.batch_id) == 1


def test_extending_adds_to_the_deadline_and_never_shrinks_it(pool: Connection) -> None:
    sent = offer(pool, "q", 1)
    batch = take(pool, "q", "w1")[0].batch_id
    assert extend(pool, batch, "30 seconds") == 1
    assert extend(pool, batch, "30 seconds") == 1
    assert extend(pool, batch, "0") == 1
    refused("PQ005", extend, pool, batch, "-1 second")
    move_clock(pool, "88 seconds")
    assert take(pool, "q", "w2") == []
    move_clock(pool, "92 seconds")
    assert ids(take(pool, "q", "w2")) == sent


def test_extending_returns_how_many_messages_are_still_leased(pool: Connection) -> None:
    sent = offer(pool, "q", 5)
    batch = take(pool, "q", "w1")[0].batch_id
    outcome(pool, "ack", batch, sent[:1])
    nack_ids(pool, batch, sent[1:2], "0")
    assert extend(pool, batch, "1 minute") == 3
    assert release(pool, batch, sent[2:3]) == 1
    assert extend(pool, batch, "1 minute") == 2
    assert ack(pool, batch) == 1
    assert extend(pool, batch, "1 minute") == 0
    assert ids(work_off(pool, "q", "w2")) == sent[1:3]


@pytest.mark.parametrize("to", ["5 seconds", "10 minutes"])
def test_visibility_is_set_from_now(pool: Connection, to: str) -> None:
    sent = offer(pool, "q", 2)
    batch = take(pool, "q", "w1")[0].batch_id
    assert set_visibility(pool, batch, to) == 2
    seconds = {"5 seconds": 5, "10 minutes": 600}[to]
    move_clock(pool, f"{seconds - 2} seconds")
    assert take(pool, "q", "w2") == []
    move_clock(pool, f"{seconds + 1} seconds")
    assert sorted(ids(take(pool, "q", "w2") + take(pool, "q", "w2"))) == sent
    refused("PQ005", set_visibility, pool, batch, "-1 second")


def forget(conn: Connection, wait: Callable[..., None]) -> None:
    """Have the journal forget all that nobody can ask for."""

    def emptied() -> bool:
        value(conn, "select pgque.maint_tables()")
        size = "select pgque._journal_size(1 - j.journal_cur) from pgque.journal as j"
        return bool(value(conn, size) == 0)

    for _ in range(2):
        assert turn_journal(conn)
        wait(emptied, "the old leaf is emptied")


@pytest.fixture
def again(pool: Connection) -> list[Message]:
    """A batch of two messages that come for the second time, held for a minute, and not the newest."""
    sent = offer(pool, "q", 3)
    nack_ids(pool, take(pool, "q", "w1", 2)[0].batch_id, sent[:2], "0", "x")
    batch = take(pool, "q", "w2", 2, "1 minute")
    assert [(m.msg_id, m.receive_count) for m in batch] == [(i, 2) for i in sent[:2]]
    assert len(take(pool, "q", "w3", 1, "1 day")) == 1
    return batch


def test_compaction_does_not_forget_how_old_a_batch_is_that_came_again(
    pool: Connection, again: list[Message], wait_until: Callable[..., None]
) -> None:
    forget(pool, wait_until)
    move_clock(pool, "30 seconds")
    assert value(pool, "select pgque.reclaim('q', 'c', '1 hour')") == 0
    assert ack(pool, again[0].batch_id) == 1


def test_compaction_does_not_forget_of_what_a_batch_consists_that_came_again(
    pool: Connection, again: list[Message], wait_until: Callable[..., None]
) -> None:
    forget(pool, wait_until)
    move_clock(pool, "2 minutes")
    assert len(take(pool, "q", "w4", 1)) == 1
    assert ack(pool, again[0].batch_id) == 0
    assert sorted(map(str, outcome(pool, "ack", again[0].batch_id, ids(again)).values())) == ["None", LOST]


@pytest.mark.parametrize("how", ["release", "set_visibility", "reclaim"])
def test_a_released_batch_is_available_at_once_with_its_receive_count(pool: Connection, how: str) -> None:
    sent = offer(pool, "q", 3)
    for delivery in (1, 2, 3):
        batch = take(pool, "q", f"w{delivery}", timeout="1 day")
        assert ids(batch) == sent
        assert {m.receive_count for m in batch} == {delivery}
        assert {m.retry_count for m in batch} == {0}
        token = batch[0].batch_id
        if how == "release":
            assert release(pool, token) == 3
        elif how == "set_visibility":
            assert set_visibility(pool, token, "0") == 3
        else:
            assert value(pool, "select pgque.reclaim('q', 'c')") == 1


def test_part_of_a_batch_is_released(pool: Connection) -> None:
    sent = offer(pool, "q", 4)
    batch = take(pool, "q", "w1", timeout="1 day")[0].batch_id
    assert release(pool, batch, [sent[1], sent[3], 10**9]) == 2
    assert release(pool, batch, [sent[1]]) == 0
    assert ids(take(pool, "q", "w2")) == [sent[1], sent[3]]
    found = outcome(pool, "ack", batch, sent[:2])
    assert found[sent[0]] is None and found[sent[1]] is not None


def test_a_released_batch_that_nobody_received_can_still_be_acked_or_its_loss_is_reported(
    pool: Connection,
) -> None:
    sent = offer(pool, "q", 2)
    batch = take(pool, "q", "w1")[0].batch_id
    release(pool, batch)
    result = outcome(pool, "ack", batch, sent)
    again = ids(work_off(pool, "q", "w2"))
    # Whatever was said to be acked does not come again, and the rest does.
    assert again == [i for i in sent if result[i] is not None]


def test_reclaim_leaves_batches_that_were_delivered_lately(pool: Connection) -> None:
    sent = offer(pool, "q", 4)
    old = take(pool, "q", "w1", 2, "1 day")
    move_clock(pool, "10 minutes")
    young = take(pool, "q", "w2", 2, "1 day")
    assert value(pool, "select pgque.reclaim('q', 'c', '5 minutes')") == 1
    again = take(pool, "q", "w3", timeout="1 day")
    assert [(m.msg_id, m.receive_count) for m in again] == [(i, 2) for i in sent[:2]]
    assert ack(pool, old[0].batch_id) == 0
    assert ack(pool, young[0].batch_id) == 1
    assert value(pool, "select pgque.reclaim('q', 'c', '0')") == 1
    assert ids(work_off(pool, "q", "w4")) == sent[:2]
    assert value(pool, "select pgque.reclaim('q', 'c')") == 0


def test_reclaiming_stores_each_message_once(pool: Connection) -> None:
    """Each version of a row has an entry in five indexes."""
    offer(pool, "q", 60)
    for number in range(20):
        assert len(take(pool, "q", f"w{number}", 3)) == 3
    with pool.transaction():
        assert value(pool, "select pgque.reclaim('q', 'c')") == 20
        assert rows(
            pool,
            "select n_tup_ins::int, n_tup_upd::int, n_tup_del::int from pg_stat_xact_all_tables"
            " where relid = 'pgque.retry_queue'::regclass",
        ) == [(60, 0, 0)]
    again = take(pool, "q", "w")
    assert (len(again), {m.receive_count for m in again}) == (60, {2})


def test_workers_are_listed_with_what_they_hold_and_until_when(pool: Connection) -> None:
    value(pool, "select pgque.create_queue('r')")
    subscribe(pool, "r", "d")
    offer(pool, "q", 5)
    offer(pool, "r", 1)
    take(pool, "q", "w1", 2, "1 hour")
    first = take(pool, "q", "w1", 1, "10 minutes")
    take(pool, "q", "w2", 1)
    take(pool, "r", "w1", 1, consumer="d")
    call = (
        "select w.queue, w.consumer, w.worker, w.batches, w.messages,"
        " round(extract(epoch from w.lease_until - pgque.clock()) / 60)::int,"
        " w.last_seen between pgque.clock() - interval '1 minute' and pgque.clock()"
    )
    listed = rows(
        pool,
        call
        + " from pgque.list_workers() as w (queue, consumer, worker, batches, messages, last_seen, lease_until) order by 1, 3",
    )
    assert [r[:5] for r in listed] == [
        ("q", "c", "w1", 2, 3),
        ("q", "c", "w2", 1, 1),
        ("r", "d", "w1", 1, 1),
    ]
    assert [r[5] for r in listed] in ([10, 0, 0], [10, 1, 1])
    assert all(r[6] for r in listed)
    assert len(rows(pool, "select * from pgque.list_workers('q')")) == 2
    assert len(rows(pool, "select * from pgque.list_workers('q', 'c')")) == 2
    ack(pool, first[0].batch_id)
    (one,) = rows(
        pool,
        call
        + " from pgque.list_workers('q', 'c') as w (queue, consumer, worker, batches, messages, last_seen, lease_until) where w.worker = 'w1'",
    )
    assert one[3:6] == (1, 2, 60)


@pytest.mark.slow
def test_two_hundred_workers_that_came_and_went_leave_no_row(pool: Connection) -> None:
    def shift(first: int) -> None:
        offer(pool, "q", 500)
        for number in range(first, first + 200):
            batch = take(pool, "q", f"container-{number}", 1)
            if number % 3 == 0:
                assert release(pool, batch[0].batch_id) == 1
            elif number % 3 == 1:
                assert ack(pool, batch[0].batch_id) == 1
            take(pool, "q", f"idle-{number}", 1, "1 second")
        move_clock(pool, f"{first + 1} hours")
        work_off(pool, "q", f"last-{first}")
        for _ in range(4):
            forced_tick(pool, "q")
            assert work_off(pool, "q", f"last-{first}") == []
            rotate(pool, "q")
            value(pool, "select pgque.maint()")

    compact_soon(pool)
    configure(pool, "q", rotation_period="1 microsecond")
    shift(0)
    before = row_counts(pool)
    shift(1000)
    after = row_counts(pool)
    grown = {t: (before.get(t, 0), n) for t, n in after.items() if n > before.get(t, 0) + 60}
    assert grown == {}
    assert rows(pool, "select * from pgque.list_workers()") == []


def test_an_idle_worker_blocks_no_rotation(pool: Connection) -> None:
    offer(pool, "q", 1)
    for worker in ("idle", "lazy"):
        work_off(pool, "q", worker)
    rotations = 0
    for _ in range(6):
        offer(pool, "q", 10)
        work_off(pool, "q", "busy")
        forced_tick(pool, "q")
        work_off(pool, "q", "busy")
        rotations += rotate(pool, "q")
    assert rotations == 6


def test_a_pool_that_was_given_and_has_done_all_keeps_no_table_without_asking_again(
    pool: Connection, wait_until: Callable[..., None]
) -> None:
    offer(pool, "q", 3)
    work_off(pool, "q")
    assert rotate(pool, "q") == 1
    offer(pool, "q", 3)
    first, second = take(pool, "q", "w1", 2), take(pool, "q", "w2", 2)
    assert ack(pool, first[0].batch_id) == 1
    wait_until(lambda: rotate(pool, "q") == 1, "the third table is written to")
    assert rotate(pool, "q") == 0, "a message is still out"
    assert ack(pool, second[0].batch_id) == 1
    wait_until(lambda: rotate(pool, "q") == 1, "the first table is emptied")


def test_installing_again_keeps_leases_and_what_waits(pool: Connection, own_dsn: str) -> None:
    sent = offer(pool, "q", 6)
    kept = take(pool, "q", "w1", 2, "1 day")
    other = take(pool, "q", "w2", 2, "1 day")
    nack(pool, other[0], "10 minutes", "later")
    install(own_dsn)
    assert extend(pool, kept[0].batch_id, "0") == 2
    assert ids(take(pool, "q", "w3", timeout="1 day")) == sent[4:]
    assert ack(pool, kept[0].batch_id) == 1
    assert outcome(pool, "ack", other[1].batch_id, [sent[3]]) == {sent[3]: None}
    move_clock(pool, "11 minutes")
    (message,) = work_off(pool, "q", "w4")
    assert (message.msg_id, message.receive_count, message.last_error) == (sent[2], 2, "later")


def test_a_lease_is_neither_ended_nor_taken_away_by_a_null(pool: Connection) -> None:
    sent = offer(pool, "q", 2)
    token = take(pool, "q")[0].batch_id
    refused("PQ005", value, pool, "select pgque.set_visibility(%s, null)", token)
    refused("PQ005", value, pool, "select pgque.reclaim('q', 'c', null)")
    assert take(pool, "q", "w2") == []
    assert set(outcome(pool, "ack", token, sent).values()) == {None}
