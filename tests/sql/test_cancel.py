"""cancel(): a message is no longer delivered, wherever it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    extend,
    figure,
    forced_tick,
    ids,
    move_clock,
    nack_ids,
    offer,
    outcome,
    post,
    receive,
    receive_coop,
    refused,
    rotate,
    row_counts,
    rows,
    send,
    send_many,
    settle,
    status,
    subscribe,
    take,
    tick,
    value,
    work_off,
)
from sql.test_ordinary import is_ordinary


def cancel(conn: Connection, queue: str, msg_id: int, consumer: str | None = None) -> str | None:
    """Cancel a message; return the state in which it was found."""
    found: str | None = value(conn, "select pgque.cancel(%s, %s, %s)", queue, msg_id, consumer)
    return found


def all_of(
    conn: Connection, queue: str, worker: str | None, consumer: str = "c", count: int = 100
) -> list[int]:
    """Receive and acknowledge until nothing is left; return the ids."""
    got: list[int] = []
    while batch := (
        receive(conn, queue, consumer, count)
        if worker is None
        else take(conn, queue, worker, count, consumer=consumer)
    ):
        got += ids(batch)
        assert ack(conn, batch[0].batch_id) == 1
    return got


@pytest.mark.parametrize("worker", [None, "w"])
@pytest.mark.parametrize("ticked", [True, False])
def test_a_pending_message_is_left_out_for_all_and_deliveries_are_ordinary_again_after_it(
    conn: Connection, subscribed: str, worker: str | None, ticked: bool
) -> None:
    subscribe(conn, subscribed, "b")
    offer(conn, subscribed)
    all_of(conn, subscribed, worker)
    sent = send_many(conn, subscribed, 5)
    if ticked:
        tick(conn, subscribed)
    assert cancel(conn, subscribed, sent[2]) == "pending"
    assert cancel(conn, subscribed, sent[2]) == "cancelled"
    refused("PQ010", status, conn, subscribed, sent[2])
    for consumer in ("c", None):
        peeked = rows(conn, "select p.msg_id from pgque.peek(%s, 100, %s) as p", subscribed, consumer)
        assert [p[0] for p in peeked][-4:] == sent[:2] + sent[3:]
    tick(conn, subscribed)
    assert all_of(conn, subscribed, worker, count=2) == sent[:2] + sent[3:]
    assert all_of(conn, subscribed, worker, "b")[1:] == sent[:2] + sent[3:]
    again = offer(conn, subscribed)
    got: list[int] = []
    assert is_ordinary(conn, lambda: got.extend(all_of(conn, subscribed, worker)))
    assert got == again
    assert rows(
        conn,
        "select m.value from pgque.metrics() m where m.metric = 'pgque_messages_cancelled_total' and m.queue = %s",
        subscribed,
    ) == [(1.0,), (1.0,)]


def test_a_message_is_cancelled_for_one_consumer(conn: Connection, subscribed: str) -> None:
    subscribe(conn, subscribed, "b")
    start = value(conn, "select i.last_tick from pgque.get_consumer_info(%s, 'b') i", subscribed)
    first, second, third = offer(conn, subscribed, 3)
    assert cancel(conn, subscribed, first, "b") == "pending"
    assert cancel(conn, subscribed, first, "b") == "cancelled"
    assert status(conn, subscribed, first) == {"c": "pending"}
    assert all_of(conn, subscribed, "w") == [first, second, third]
    assert all_of(conn, subscribed, None, "b") == [second, third]
    assert cancel(conn, subscribed, second, "b") == "done"
    assert cancel(conn, subscribed, second, "b") == "cancelled"
    value(conn, "select pgque.seek(%s, 'b', %s, true)", subscribed, start)
    assert all_of(conn, subscribed, None, "b") == [third]
    # Consumers that subscribe later are not concerned.
    value(conn, "select pgque.subscribe(%s, 'late', 'earliest')", subscribed)
    assert all_of(conn, subscribed, None, "late") == [first, second, third]


def test_who_comes_later_or_is_moved_back_does_not_get_a_message_that_was_cancelled_for_all(
    conn: Connection, subscribed: str
) -> None:
    start = value(
        conn,
        "select max(t.tick_id) from pgque.tick t join pgque.queue q on q.queue_id = t.tick_queue and q.queue_name = %s",
        subscribed,
    )
    first, second = offer(conn, subscribed, 2)
    (batch,) = {m.batch_id for m in receive(conn, subscribed)}
    assert cancel(conn, subscribed, first) == "processing"
    assert ids(receive(conn, subscribed)) == [second]
    ack(conn, batch)
    value(conn, "select pgque.register_consumer_at(%s, 'c', %s)", subscribed, start)
    assert all_of(conn, subscribed, None) == [second]
    value(conn, "select pgque.subscribe(%s, 'late', 'earliest')", subscribed)
    assert all_of(conn, subscribed, "w", "late") == [second]
    value(conn, "select pgque.register_consumer_at(%s, 'late', %s)", subscribed, start)
    assert all_of(conn, subscribed, "w", "late") == [second]
    # A reader by offsets still sees it.
    assert (
        len(
            rows(
                conn,
                "select * from pgque.read_window(%s, %s, (select pgque.tick_for(%s, 'latest')))",
                subscribed,
                start,
                subscribed,
            )
        )
        == 2
    )


def test_a_worker_keeps_its_batch_without_the_message_and_learns_that_it_was_cancelled(
    conn: Connection, subscribed: str
) -> None:
    sent = offer(conn, subscribed, 4)
    batch = take(conn, subscribed)[0].batch_id
    assert cancel(conn, subscribed, sent[1]) == "processing"
    assert extend(conn, batch, "1 minute") == 3
    assert outcome(conn, "ack", batch, sent[:2]) == {sent[0]: None, sent[1]: "cancelled"}
    assert nack_ids(conn, batch, [sent[1]]) == [(sent[1], False, "cancelled")]
    assert ack(conn, batch) == 1
    assert work_off(conn, subscribed) == []
    assert figure(conn, "pgque_messages_cancelled_total", subscribed) == 1


@pytest.mark.parametrize("how", ["expired", "taken over", "nacked", "nacked later"])
def test_a_message_that_would_be_redelivered_is_not(pool: Connection, how: str) -> None:
    first, second = offer(pool, "q", 2)
    batch = take(pool, "q", timeout="10 seconds")[0].batch_id
    state = "retry"
    if how.startswith("nacked"):
        nack_ids(pool, batch, [first], "0" if how == "nacked" else "1 hour")
        ack(pool, batch)
    else:
        move_clock(pool, "1 minute")
    if how == "taken over":
        batch = take(pool, "q", "w2")[0].batch_id
        state = "processing"
    assert cancel(pool, "q", first) == state
    if how == "taken over":
        assert outcome(pool, "ack", batch, [first, second]) == {first: "cancelled", second: None}
    move_clock(pool, "3 hours")
    settle(pool, "q")
    assert ids(work_off(pool, "q")) == ([second] if how == "expired" else [])
    assert dead_letters(pool, "q") == {}


def test_a_batch_without_any_other_message_is_finished(conn: Connection, subscribed: str) -> None:
    (only,) = offer(conn, subscribed)
    batch = take(conn, subscribed)[0].batch_id
    assert cancel(conn, subscribed, only, "c") == "processing"
    assert extend(conn, batch, "1 minute") == 0
    assert ack(conn, batch) == 0
    assert work_off(conn, subscribed) == []


def test_a_delayed_message_is_cancelled_for_all_only(pool: Connection) -> None:
    late = post(pool, "q", delay="1 minute")
    error = refused("PQ005", cancel, pool, "q", late, "c")
    assert "without consumer_name" in str(error.diag.message_hint)
    assert cancel(pool, "q", late) == "delayed"
    refused("PQ010", cancel, pool, "q", late)
    move_clock(pool, "2 minutes")
    settle(pool, "q")
    assert work_off(pool, "q") == []


@pytest.mark.parametrize("consumer", [None, "c"])
def test_after_a_cancel_the_next_message_with_its_key_is_a_new_one(
    conn: Connection, subscribed: str, consumer: str | None
) -> None:
    old = post(conn, subscribed, "old", key="k")
    tick(conn, subscribed)
    assert cancel(conn, subscribed, old, consumer) == "pending"
    new = post(conn, subscribed, "new", key="k")
    assert new > old
    tick(conn, subscribed)
    assert [(m.msg_id, m.payload) for m in work_off(conn, subscribed)] == [(new, "new")]


def test_a_window_that_is_read_by_its_map_leaves_out_cancelled_messages_and_nothing_else(
    conn: Connection, subscribed: str
) -> None:
    offer(conn, subscribed)
    sent = offer(conn, subscribed, 2000)
    gone = {*sent[5:60], sent[700], sent[-1]}
    for msg_id in gone:
        assert cancel(conn, subscribed, msg_id) == "pending"
    assert all_of(conn, subscribed, "w", count=100)[1:] == [i for i in sent if i not in gone]


def test_batches_of_next_batch_leave_it_out_whether_opened_before_or_after(
    conn: Connection, subscribed: str
) -> None:
    def events(batch: int) -> list[int]:
        return [r[0] for r in rows(conn, "select e.ev_id from pgque.get_batch_events(%s) e", batch)]

    sent = offer(conn, subscribed, 4)
    assert cancel(conn, subscribed, sent[0]) == "pending"
    batch = value(conn, "select pgque.next_batch(%s, 'c')", subscribed)
    assert events(batch) == sent[1:]
    assert cancel(conn, subscribed, sent[1]) == "processing"
    assert events(batch) == sent[2:]
    assert value(conn, "select pgque.finish_batch(%s)", batch) == 1
    assert value(conn, "select pgque.next_batch(%s, 'c')", subscribed) is None


def test_a_cancelled_message_is_not_given_up_with_what_a_slow_consumer_missed(pool: Connection) -> None:
    value(pool, "select pgque.alter_queue('q', '{\"retention_period\": \"1 hour\"}')")
    first, second = offer(pool, "q", 2)
    cancel(pool, "q", first)
    move_clock(pool, "2 hours")
    forced_tick(pool, "q")
    value(pool, "select pgque.maint_retain('q')")
    assert list(dead_letters(pool, "q")) == [second]


def test_the_next_message_of_a_key_does_not_wait_for_a_cancelled_one(
    conn: Connection, subscribed: str
) -> None:
    value(conn, "select pgque.subscribe(%s, 'ordered', keyed_order => true)", subscribed)
    sent = [post(conn, subscribed, partition_key="p") for _ in range(4)]
    tick(conn, subscribed)
    for msg_id, state in ((sent[0], "processing"), (sent[2], "pending")):
        (message,) = take(conn, subscribed, consumer="ordered")
        assert cancel(conn, subscribed, msg_id, "ordered") == state
        assert ack(conn, message.batch_id) == (message.msg_id != msg_id)
    assert message.msg_id == sent[1]
    assert ids(work_off(conn, subscribed, consumer="ordered")) == [sent[3]]


def test_a_subconsumer_keeps_its_batch_without_the_message(conn: Connection, subscribed: str) -> None:
    value(conn, "select pgque.subscribe_subconsumer(%s, 'coop', 's')", subscribed)
    sent = offer(conn, subscribed, 3)
    batch = receive_coop(conn, subscribed, "s", consumer="coop")
    assert ids(batch) == sent
    assert cancel(conn, subscribed, sent[0], "coop") == "processing"
    assert ids(receive_coop(conn, subscribed, "s", consumer="coop")) == sent[1:]
    assert ack(conn, batch[0].batch_id) == 1


def test_a_retry_that_the_pump_moved_into_the_log_is_left_out(pool: Connection) -> None:
    """Consumers that never received, or are read by offsets, get their retries from the log."""
    (first,) = offer(pool, "q")
    batch = value(pool, "select pgque.next_batch('q', 'c')")
    value(pool, "select pgque.event_retry(%s, %s, 0)", batch, first)
    value(pool, "select pgque.finish_batch(%s)", batch)
    value(pool, "select pgque.open_stream('q', 'c')")
    settle(pool, "q")
    assert status(pool, "q", first) == {"c": "retry"}
    assert cancel(pool, "q", first) == "retry"
    assert receive(pool, "q") == []


def test_states_of_messages_that_nobody_will_get(conn: Connection, subscribed: str) -> None:
    done, dead = offer(conn, subscribed, 2)
    batch = take(conn, subscribed)[0].batch_id
    outcome(conn, "dead", batch, [dead], "x")
    ack(conn, batch)
    assert cancel(conn, subscribed, dead, "c") == "dead"
    assert cancel(conn, subscribed, done, "c") == "done"
    assert list(dead_letters(conn, subscribed)) == [dead]
    for wrong in (done + 1000, 0, None):
        refused("PQ010", cancel, conn, subscribed, wrong)
    refused("PQ001", cancel, conn, "no such queue", done)
    refused("PQ011", cancel, conn, subscribed, done, "nobody")


def test_a_message_of_this_transaction_is_not_there_yet(conn: Connection, subscribed: str) -> None:
    with conn.transaction():
        sent = send(conn, subscribed)
        with conn.transaction(force_rollback=True):
            refused("PQ010", cancel, conn, subscribed, sent)
    assert cancel(conn, subscribed, sent) == "pending"
    ((args,),) = rows(conn, "select a.args from pgque.list_actions(%s) a where a.call = 'cancel'", subscribed)
    assert args == {"msg_id": sent, "state": "pending"}


def test_cancel_needs_read_committed(
    transaction: Callable[..., Connection], conn: Connection, subscribed: str
) -> None:
    (sent,) = offer(conn, subscribed)
    refused("25000", cancel, transaction("repeatable read"), subscribed, sent)


def test_the_rows_of_cancelled_messages_go_with_the_log(pool: Connection) -> None:
    def traffic() -> None:
        for msg_id in offer(pool, "q", 20)[::2]:
            cancel(pool, "q", msg_id)
        assert len(work_off(pool, "q")) == 10
        for _ in range(5):
            forced_tick(pool, "q")
            work_off(pool, "q")
            rotate(pool, "q")
            value(pool, "select pgque.maint()")

    traffic()
    before = row_counts(pool)
    traffic()
    after = row_counts(pool)
    assert {
        name: count for name, count in after.items() if name.startswith("event") or name == "retry_queue"
    } == {name: count for name, count in before.items() if name.startswith("event") or name == "retry_queue"}


def test_a_message_stays_cancelled_while_the_log_rotates_under_a_slow_consumer(pool: Connection) -> None:
    subscribe(pool, "q", "slow")
    first, second = offer(pool, "q", 2)
    cancel(pool, "q", first, "slow")
    for _ in range(4):
        offer(pool, "q")
        work_off(pool, "q")
        rotate(pool, "q")
    assert all_of(pool, "q", None, "slow")[0] == second


# -- two sessions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("does", [take, tick], ids=["delivery", "tick"])
def test_a_cancel_gives_up_on_a_transaction_that_stays_open(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    connect: Callable[..., Connection],
    does: Callable[[Connection, str], object],
) -> None:
    (first,) = offer(pool, "q")
    send(pool, "q")
    reader = transaction(dsn=own_dsn)
    does(reader, "q")
    impatient = connect(own_dsn)
    impatient.execute("set lock_timeout = '200ms'")
    assert "queue q" in str(refused("55P03", cancel, impatient, "q", first))
    reader.rollback()
    with impatient.transaction():
        assert cancel(impatient, "q", first) == "pending"
        assert value(impatient, "show lock_timeout") == "200ms"


@pytest.mark.parametrize("worker", [None, "w"])
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_cancel_waits_for_a_delivery(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
    worker: str | None,
    ends: str,
) -> None:
    first, second = offer(pool, "q", 2)
    reader = transaction(dsn=own_dsn)
    batch = receive(reader, "q") if worker is None else take(reader, "q", worker)
    assert ids(batch) == [first, second]
    cancelling = background(lambda c: cancel(c, "q", first), connect(own_dsn))
    wait_for_lock(cancelling.pid)
    getattr(reader, ends)()
    assert cancelling.result() == ("processing" if ends == "commit" else "pending")
    if ends == "commit":
        assert outcome(pool, "ack", batch[0].batch_id, [first, second]) == {first: "cancelled", second: None}
        assert all_of(pool, "q", worker) == [] or worker is None
    else:
        assert all_of(pool, "q", worker) == [second]


@pytest.mark.parametrize(("how", "worker"), [("receive", None), ("receive", "w"), ("next_batch", None)])
def test_a_delivery_that_waits_for_a_cancel_leaves_the_message_out(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
    worker: str | None,
    how: str,
) -> None:
    offer(pool, "q")
    all_of(pool, "q", worker)
    first, second = offer(pool, "q", 2)
    canceller = transaction(dsn=own_dsn)
    assert cancel(canceller, "q", first) == "pending"
    if how == "next_batch":
        reading = background(
            lambda c: [
                r[0]
                for r in rows(c, "select e.ev_id from pgque.get_batch_events(pgque.next_batch('q', 'c')) e")
            ],
            connect(own_dsn),
        )
    else:
        reading = background(lambda c: all_of(c, "q", worker), connect(own_dsn))
    wait_for_lock(reading.pid)
    canceller.commit()
    assert reading.result() == [second]


@pytest.mark.parametrize("call", ["ack", "nack", "extend"])
@pytest.mark.parametrize("first_of_two", ["worker", "cancel"])
def test_a_cancel_and_what_a_worker_says_follow_each_other(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
    call: str,
    first_of_two: str,
) -> None:
    sent = offer(pool, "q", 2)
    batch = take(pool, "q")[0].batch_id

    def says(c: Connection) -> Any:
        if call == "ack":
            return outcome(c, "ack", batch, sent)[sent[0]]
        if call == "nack":
            return nack_ids(c, batch, sent)[0][2]
        return extend(c, batch, "1 minute")

    opener = transaction(dsn=own_dsn)
    if first_of_two == "worker":
        assert says(opener) in (None, 2)
        other = background(lambda c: cancel(c, "q", sent[0]), connect(own_dsn))
        wait_for_lock(other.pid)
        opener.commit()
        assert other.result() == {"ack": "done", "nack": "retry", "extend": "processing"}[call]
    else:
        assert cancel(opener, "q", sent[0]) == "processing"
        other = background(says, connect(own_dsn))
        wait_for_lock(other.pid)
        opener.commit()
        assert other.result() == ("cancelled" if call != "extend" else 1)
    assert sent[0] not in ids(work_off(pool, "q"))


def test_a_cancel_waits_for_a_worker_that_takes_over_an_expired_lease(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
) -> None:
    sent = offer(pool, "q", 2)
    take(pool, "q", timeout="10 seconds")
    move_clock(pool, "1 minute")
    second = transaction(dsn=own_dsn)
    batch = take(second, "q", "w2")
    assert ids(batch) == sent
    cancelling = background(lambda c: cancel(c, "q", sent[0]), connect(own_dsn))
    wait_for_lock(cancelling.pid)
    second.commit()
    assert cancelling.result() == "processing"
    assert outcome(pool, "ack", batch[0].batch_id, sent) == {sent[0]: "cancelled", sent[1]: None}


@pytest.mark.parametrize("key", [None, "k"])
def test_a_cancel_finds_a_message_that_the_pump_is_moving(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
    key: str | None,
) -> None:
    sent = post(pool, "q", key=key, delay="1 minute")
    move_clock(pool, "2 minutes")
    pump = transaction(dsn=own_dsn)
    assert value(pump, "select pgque.maint_retry_events()") == 1
    cancelling = background(lambda c: cancel(c, "q", sent), connect(own_dsn))
    wait_for_lock(cancelling.pid)
    pump.commit()
    assert cancelling.result() == "delayed"
    settle(pool, "q")
    assert work_off(pool, "q") == []


def test_a_consumer_that_subscribes_while_a_message_is_cancelled_does_not_get_it(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
) -> None:
    first, second = offer(pool, "q", 2)
    canceller = transaction(dsn=own_dsn)
    cancel(canceller, "q", first)
    joining = background(
        lambda c: value(c, "select pgque.subscribe('q', 'late', 'earliest')"), connect(own_dsn)
    )
    wait_for_lock(joining.pid)
    canceller.commit()
    assert joining.result() == 1
    assert all_of(pool, "q", "w", "late") == [second]


@pytest.mark.parametrize("call", ["subscribe", "receive"])
def test_a_transaction_whose_snapshot_is_older_than_the_cancel_does_not_get_the_message(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], call: str
) -> None:
    offer(conn, subscribed)
    all_of(conn, subscribed, None)
    first, second = offer(conn, subscribed, 2)
    old = transaction("repeatable read")
    forced_tick(conn, subscribed)
    forced_tick(conn, subscribed)
    third, fourth = send_many(conn, subscribed, 2)
    for msg_id in (first, third):
        assert cancel(conn, subscribed, msg_id) == "pending"
    tick(conn, subscribed)
    if call == "receive":
        refused("40001", receive, old, subscribed)
        assert all_of(conn, subscribed, None) == [second, fourth]
    else:
        assert value(old, "select pgque.subscribe(%s, 'late', 'earliest')", subscribed) == 1
        old.commit()
        assert all_of(conn, subscribed, None, "late", count=1)[1:] == [second, fourth]


def test_a_cancel_waits_for_a_tick_that_does_not_show_the_message(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
) -> None:
    offer(pool, "q")
    all_of(pool, "q", "w")
    ticker = transaction(dsn=own_dsn)
    forced_tick(ticker, "q")
    sent = send(pool, "q")
    cancelling = background(lambda c: cancel(c, "q", sent), connect(own_dsn))
    wait_for_lock(cancelling.pid)
    ticker.commit()
    assert cancelling.result() == "pending"
    # The consumer passes the tick that does not show the message, and is not ordinary yet.
    assert all_of(pool, "q", "w") == []
    forced_tick(pool, "q")
    assert all_of(pool, "q", "w") == []


def test_a_cancel_waits_for_a_rotation_and_a_rotation_passes_over_a_queue_with_an_open_cancel(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
) -> None:
    first, second, third = offer(pool, "q", 3)
    configure(pool, "q", rotation_period="1 microsecond")
    rotating = transaction(dsn=own_dsn)
    assert value(rotating, "select pgque.maint_rotate_tables_step1('q')") == 1
    cancelling = background(lambda c: cancel(c, "q", first), connect(own_dsn))
    wait_for_lock(cancelling.pid)
    rotating.commit()
    assert cancelling.result() == "pending"
    canceller = transaction(dsn=own_dsn)
    assert cancel(canceller, "q", second) == "pending"
    assert value(pool, "select pgque.maint_rotate_tables_step1('q')") == 0
    canceller.commit()
    assert value(pool, "select pgque.maint_rotate_tables_step1('q')") == 1
    assert ids(work_off(pool, "q")) == [third]
