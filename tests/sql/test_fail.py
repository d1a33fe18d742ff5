"""Nack, retry and dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    Message,
    ack,
    configure,
    drain,
    forced_tick,
    ids,
    move_clock,
    nack,
    nack_ids,
    payloads,
    pump,
    receive,
    refused,
    release,
    rotate,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)


def one_batch(conn: Connection, queue: str, count: int = 1) -> list[Message]:
    send_many(conn, queue, count)
    tick(conn, queue)
    batch = receive(conn, queue)
    assert len(batch) == count
    return batch


def retried(conn: Connection, queue: str, consumer: str = "c") -> list[Message]:
    """Deliver what is due."""
    pump(conn)
    tick(conn, queue)
    return receive(conn, queue, consumer)


def dead(conn: Connection, queue: str) -> list[int]:
    return [r[0] for r in rows(conn, "select d.ev_id from pgque.dlq_inspect(%s) as d", queue)]


def test_of_a_nacked_record_only_the_id_is_believed(conn: Connection, subscribed: str) -> None:
    value(conn, "select pgque.insert_event(%s, 'kind', 'true', 'e1', null, null, null)", subscribed)
    tick(conn, subscribed)
    (message,) = receive(conn, subscribed)
    forged = (
        "select pgque.nack(%s, row(%s::bigint, 1, 'forged', 'forged', 99, now(), 'f', 'f', 'f', 'f', '{}', 'k', null,"
        " 9, 'forged', null, 'elsewhere')::pgque.delivery, '0')"
    )
    assert value(conn, forged, message.batch_id, message.msg_id) == 1
    ack(conn, message.batch_id)
    (again,) = retried(conn, subscribed)
    assert (again.type, again.payload, again.retry_count, again.extra1) == ("kind", "true", 1, "e1")
    assert (again.extra2, again.headers, again.key) == (None, None, None)


def test_each_message_of_a_batch_is_found_wherever_it_lies(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    """In two tables, of transactions that ended late; but not beside the window, nor what waits for a retry."""
    subscribe(conn, subscribed, "other")
    (before,) = one_batch(conn, subscribed)
    nack(conn, before, "1 hour")
    ack(conn, before.batch_id)
    late, open_, slow = (connect(autocommit=False) for _ in range(3))
    send(late, subscribed), send(open_, subscribed)
    passed = one_batch(conn, subscribed, 3)
    ack(conn, passed[0].batch_id)
    drain(conn, subscribed, "other", 1)
    (theirs,) = one_batch(conn, subscribed)
    ack(conn, theirs.batch_id)
    (message,) = receive(conn, subscribed, "other")
    nack(conn, message)
    sent = [send(conn, subscribed) for _ in range(3)]
    rotate(conn, subscribed)
    sent += [*send_many(conn, subscribed, 5), send(late, subscribed)]
    late.commit()
    hidden = send(slow, subscribed)
    sent.append(send(conn, subscribed))
    pump(conn)
    tick(conn, subscribed)
    batch = receive(conn, subscribed)
    after = send(conn, subscribed)
    unseen = send(open_, subscribed)
    open_.commit()
    slow.commit()
    assert {*sent} < {m.msg_id for m in batch}
    assert len(batch) == len(sent) + 1
    for other in (before.msg_id, passed[0].msg_id, theirs.msg_id, hidden, after, unseen, 10**15):
        assert "not in batch" in str(refused("PQ007", nack, conn, batch[0]._replace(msg_id=other)))
    for message in batch:
        assert nack(conn, message) == 1
    ack(conn, batch[0].batch_id)
    tick(conn, subscribed)
    again = receive(conn, subscribed)
    assert [m.msg_id for m in again] == [m.msg_id for m in batch]
    ack(conn, again[0].batch_id)
    later = receive(conn, subscribed)
    assert {after, hidden, unseen} < {m.msg_id for m in later}
    assert len(later) == 4


def test_a_nack_costs_no_more_beside_transactions_that_go_on_sending(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    """Nobody looks at their rows, which come after the tick and count for no window."""
    below, above = connect(autocommit=False), connect(autocommit=False)
    sent = [send(conn, subscribed)]
    send(below, subscribed)
    sent += [send(conn, subscribed) for _ in range(9)]
    send(above, subscribed)
    sent += [send(conn, subscribed) for _ in range(2)]
    tick(conn, subscribed)
    batch = receive(conn, subscribed)[0].batch_id
    for bulk in (below, above):
        send_many(bulk, subscribed, 20_000)
    nack_ids(conn, batch, [sent[4]])
    nacked = [sent[0], sent[1], sent[9]]
    for id_ in nacked:
        (plan,) = value(
            conn, f"explain (analyze, buffers, format json) select pgque.nack({batch}, array[{id_}])"
        )
        assert plan["Plan"]["Shared Hit Blocks"] < 120
    assert nack_ids(conn, batch, nacked) == [(id_, False, "settled already") for id_ in nacked]


def test_event_retry_is_idempotent_and_knows_no_limit(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, max_retries=1)
    (message,) = one_batch(conn, subscribed)
    for delivery in range(4):
        call = "select pgque.event_retry(%s, %s, 0)"
        assert value(conn, call, message.batch_id, message.msg_id) == 1
        assert value(conn, call, message.batch_id, message.msg_id) == 0
        assert value(conn, "select pgque.event_retry(%s, %s, now())", message.batch_id, message.msg_id) == 0
        ack(conn, message.batch_id)
        (message,) = retried(conn, subscribed)
        assert message.retry_count == delivery + 1
    refused("PQ007", rows, conn, "select pgque.event_retry(%s, 0, 0)", message.batch_id)
    ack(conn, message.batch_id)
    refused("PQ012", rows, conn, "select pgque.event_retry(%s, %s, 0)", message.batch_id, message.msg_id)


def test_batch_retry_fails_what_has_no_outcome_yet(conn: Connection, subscribed: str) -> None:
    batch = one_batch(conn, subscribed, 4)
    nack(conn, batch[0])
    assert value(conn, "select pgque.batch_retry(%s, 0)", batch[0].batch_id) == 3
    assert value(conn, "select pgque.batch_retry(%s, 0)", batch[0].batch_id) == 0
    ack(conn, batch[0].batch_id)
    assert [m.msg_id for m in retried(conn, subscribed)] == [m.msg_id for m in batch]
    refused("PQ012", rows, conn, "select pgque.batch_retry(%s, 0)", batch[0].batch_id)


def test_released_messages_are_redelivered_after_the_ack_with_the_same_retry_count(
    conn: Connection, subscribed: str
) -> None:
    configure(conn, subscribed, max_retries=0)
    batch = one_batch(conn, subscribed, 4)
    for count in (2, 3):
        left = [m.msg_id for m in batch[-2:]]
        assert value(conn, "select pgque.release(%s, %s)", batch[0].batch_id, left) == 2
        assert value(conn, "select pgque.release(%s, %s)", batch[0].batch_id, left) == 0
        assert ack(conn, batch[0].batch_id) == 1
        assert value(conn, "select pgque.release(%s)", batch[0].batch_id) == 0
        batch = receive(conn, subscribed)
        assert [(m.msg_id, m.retry_count, m.receive_count) for m in batch] == [(i, 0, count) for i in left]
    refused("PQ005", value, conn, "select pgque.set_visibility(%s, '0')", batch[0].batch_id)
    assert ack(conn, batch[0].batch_id) == 1
    assert receive(conn, subscribed) == []


def test_released_messages_are_redelivered_in_the_order_of_their_ids(
    conn: Connection, subscribed: str
) -> None:
    """Whichever tables they lie in: after the last of the three comes the first."""
    for _ in range(3):
        sent = send_many(conn, subscribed, 3)
        assert rotate(conn, subscribed) == 1
        sent += send_many(conn, subscribed, 3)
        tick(conn, subscribed)
        batch = receive(conn, subscribed)
        assert ids(batch) == sent
        assert release(conn, batch[0].batch_id) == len(sent)
        assert ack(conn, batch[0].batch_id) == 1
        assert drain(conn, subscribed, count=1) == sent


@pytest.mark.parametrize("known", ["another queue", "a single message", "nothing"])
def test_due_retries_come_back_whatever_the_planner_last_saw_waiting(own: Connection, known: str) -> None:
    """It took minutes for some thousands when statistics knew another queue only: a look for each, at all of them."""
    for queue in ("q", "other"):
        value(own, "select pgque.create_queue(%s)", queue)
        subscribe(own, queue)

    def fail(queue: str, count: int) -> None:
        send_many(own, queue, count)
        tick(own, queue)
        batch_id = receive(own, queue, count=count)[0].batch_id
        assert value(own, "select pgque.batch_retry(%s, 0)", batch_id) == count
        ack(own, batch_id)

    before = {"another queue": 2000, "a single message": 1, "nothing": 0}[known]
    if before:
        fail("other", before)
    own.execute("analyze pgque.retry_queue")
    fail("q", 8000)
    own.execute("set statement_timeout = '30s'")
    assert pump(own) == 8000 + before


def test_the_first_pump_after_a_dump_was_loaded_brings_all_that_was_not_finished(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send_many(own, "q", 5)
    tick(own, "q")
    nack(own, receive(own, "q", count=1)[0])
    # What loading a dump does to the row.
    own.execute("update pgque.queue set queue_xid = '7'")
    assert pump(own) == 5
    tick(own, "q")
    assert drain(own, "q") == sent


def bury(conn: Connection, queue: str, count: int = 1) -> list[int]:
    """Make dead letters; return their dl_ids."""
    configure(conn, queue, max_retries=0)
    batch = one_batch(conn, queue, count)
    nack_ids(conn, batch[0].batch_id, [m.msg_id for m in batch], reason="broken")
    ack(conn, batch[0].batch_id)
    return sorted(r[0] for r in rows(conn, "select dl_id from pgque.dlq_inspect(%s)", queue))


def test_a_requeued_dead_letter_goes_to_its_consumer_with_its_id_and_a_clean_count(
    conn: Connection, subscribed: str
) -> None:
    subscribe(conn, subscribed, "other")
    (dl_id,) = bury(conn, subscribed)
    drain(conn, subscribed, "other")
    (msg_id,) = dead(conn, subscribed)
    assert value(conn, "select pgque.dlq_requeue(%s)", dl_id) == msg_id
    assert dead(conn, subscribed) == []
    (again,) = retried(conn, subscribed)
    assert (again.msg_id, again.retry_count, again.receive_count) == (msg_id, 0, 1)
    assert drain(conn, subscribed, "other") == []
    nack(conn, again)
    ack(conn, again.batch_id)
    assert dead(conn, subscribed) == [msg_id]


def test_requeueing_all_takes_the_oldest_first(conn: Connection, subscribed: str) -> None:
    bury(conn, subscribed, 5)
    ids = sorted(dead(conn, subscribed))
    assert value(conn, "select pgque.dlq_requeue_all(%s, 2)", subscribed) == 2
    assert sorted(dead(conn, subscribed)) == ids[2:]
    assert value(conn, "select pgque.dlq_requeue_all(%s)", subscribed) == 3
    assert [m.msg_id for m in retried(conn, subscribed)] == ids


def test_a_replayed_dead_letter_is_a_new_message_for_every_consumer(
    conn: Connection, subscribed: str
) -> None:
    subscribe(conn, subscribed, "other")
    (dl_id,) = bury(conn, subscribed)
    drain(conn, subscribed, "other")
    (msg_id,) = dead(conn, subscribed)
    new = value(conn, "select pgque.dlq_replay(%s)", dl_id)
    assert new > msg_id
    assert dead(conn, subscribed) == []
    refused("PQ008", rows, conn, "select pgque.dlq_replay(%s)", dl_id)
    tick(conn, subscribed)
    assert drain(conn, subscribed) == drain(conn, subscribed, "other") == [new]


def test_replaying_all_counts_and_keeps_what_can_not_be_sent(conn: Connection, subscribed: str) -> None:
    bury(conn, subscribed, 3)
    value(conn, "select pgque.pause(%s)", subscribed)
    (result,) = rows(conn, "select replayed, failed, first_error from pgque.dlq_replay_all(%s)", subscribed)
    assert result[:2] == (0, 3)
    assert "paused" in result[2]
    value(conn, "select pgque.resume(%s)", subscribed)
    (result,) = rows(conn, "select replayed, failed, first_error from pgque.dlq_replay_all(%s)", subscribed)
    assert result == (3, 0, None)
    tick(conn, subscribed)
    assert payloads(conn, subscribed) == ["1", "2", "3"]


def test_purging_deletes_dead_letters_older_than_asked(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    bury(own, "q", 2)
    assert value(own, "select pgque.dlq_purge('q')") == 0
    move_clock(own, "31 days")
    bury(own, "q", 1)
    assert value(own, "select pgque.dlq_purge('q')") == 2
    assert len(dead(own, "q")) == 1
    assert value(own, "select pgque.dlq_purge('q', '0')") == 1


def test_inspecting_is_limited_and_newest_first(conn: Connection, subscribed: str) -> None:
    bury(conn, subscribed, 4)
    ids = sorted(dead(conn, subscribed))
    assert [r[0] for r in rows(conn, "select ev_id from pgque.dlq_inspect(%s, 2)", subscribed)] == [
        ids[3],
        ids[2],
    ]


def test_unsubscribing_keeps_dead_letters_and_drops_retries(conn: Connection, subscribed: str) -> None:
    (dl_id,) = bury(conn, subscribed)
    configure(conn, subscribed, max_retries=5)
    (message,) = one_batch(conn, subscribed)
    nack(conn, message)
    ack(conn, message.batch_id)
    value(conn, "select pgque.unsubscribe(%s, 'c')", subscribed)
    assert len(dead(conn, subscribed)) == 1
    error = refused("PQ011", rows, conn, "select pgque.dlq_requeue(%s)", dl_id)
    assert "not subscriber to queue" in str(error)
    assert len(dead(conn, subscribed)) == 1
    subscribe(conn, subscribed)
    assert retried(conn, subscribed) == []
    assert value(conn, "select pgque.dlq_requeue(%s)", dl_id) > 0
    assert len(retried(conn, subscribed)) == 1


def test_dropping_the_queue_drops_its_dead_letters_and_retries(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    bury(own, "q", 2)
    configure(own, "q", max_retries=3)
    (message,) = one_batch(own, "q")
    nack(own, message)
    value(own, "select pgque.drop_queue('q', true)")
    value(own, "select pgque.create_queue('q')")
    assert dead(own, "q") == []
    assert pump(own) == 0


def test_a_dead_letter_outlives_rotation_and_maintenance(conn: Connection, subscribed: str) -> None:
    (dl_id,) = bury(conn, subscribed)
    for _ in range(5):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
        value(conn, "select pgque.maint()")
    value(conn, "select pgque.dlq_requeue(%s)", dl_id)
    assert len(retried(conn, subscribed)) == 1


def test_a_consumer_moved_back_over_a_message_gets_its_retry_and_then_the_message_again(
    conn: Connection, subscribed: str
) -> None:
    configure(conn, subscribed, max_retries=1)
    start = value(conn, "select i.last_tick_id from pgque.get_queue_info(%s) as i", subscribed)
    (message,) = one_batch(conn, subscribed)
    nack(conn, message)
    ack(conn, message.batch_id)
    pump(conn)
    tick(conn, subscribed)
    value(conn, "select pgque.register_consumer_at(%s, 'c', %s)", subscribed, start)
    batch = receive(conn, subscribed)
    assert [(m.msg_id, m.retry_count) for m in batch] == [(message.msg_id, 1)]
    nack(conn, batch[0])
    ack(conn, batch[0].batch_id)
    assert dead(conn, subscribed) == [message.msg_id]
    (again,) = receive(conn, subscribed)
    assert (again.msg_id, again.retry_count) == (message.msg_id, 0)
    ack(conn, again.batch_id)
    assert retried(conn, subscribed) == []


def test_a_dead_letter_can_be_requeued_while_the_same_message_waits_for_a_retry(
    conn: Connection, subscribed: str
) -> None:
    start = value(conn, "select i.last_tick_id from pgque.get_queue_info(%s) as i", subscribed)
    (dl_id,) = bury(conn, subscribed)
    configure(conn, subscribed, max_retries=5)
    value(conn, "select pgque.register_consumer_at(%s, 'c', %s)", subscribed, start)
    (message,) = receive(conn, subscribed)
    nack(conn, message)
    ack(conn, message.batch_id)
    assert value(conn, "select pgque.dlq_requeue(%s)", dl_id) == message.msg_id
    assert [m.msg_id for m in retried(conn, subscribed)] == [message.msg_id]


def test_a_message_dead_lettered_while_its_queue_is_dropped_deadlocks_nobody(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    configure(conn, subscribed, max_retries=0)
    send(conn, subscribed)
    tick(conn, subscribed)
    consumer = transaction()
    (message,) = receive(consumer, subscribed)
    dropping = background(lambda c: value(c, "select pgque.drop_queue(%s, true)", subscribed))
    wait_for_lock(dropping.pid)
    nack(consumer, message)
    consumer.execute("commit")
    assert dropping.result() == 1


def test_a_retry_without_a_delay_waits_as_a_nack_without_one(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    for call in (
        "select pgque.event_retry(%s, %s, null::int)",
        "select pgque.event_retry(%s, %s, null::timestamptz)",
        "select pgque.batch_retry(%s, null)",
    ):
        send(own, "q")
        tick(own, "q")
        (message,) = receive(own, "q")
        assert value(own, call, *(message.batch_id, message.msg_id)[: call.count("%s")]) == 1
        assert ack(own, message.batch_id) == 1
        assert value(own, "select min(ev_retry_after) > pgque.clock() from pgque.retry_queue") is True


def test_a_purge_of_dead_letters_without_an_age_is_refused(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    refused("PQ005", value, own, "select pgque.dlq_purge('q', null)")
