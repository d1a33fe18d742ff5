"""What consumers of all three kinds promise: alone, a pool of workers, subconsumers.

What only one kind does is in test_receive.py, test_pools.py and test_workers.py; two transactions at once are in
tests/faults/test_interleavings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    Message,
    ack,
    configure,
    dead_letters,
    drain,
    ids,
    move_clock,
    nack,
    nack_ids,
    offer,
    outcome,
    post,
    pump,
    receive,
    receive_coop,
    refused,
    rows,
    send,
    settle,
    subscribe,
    take,
    tick,
    value,
)


@dataclass(frozen=True, slots=True)
class Consumer:
    """A consumer c of one kind, by the calls that its kind makes."""

    conn: Connection
    queue: str
    kind: str

    def receive(self, count: int | None = 100, conn: Connection | None = None) -> list[Message]:
        """Receive up to count messages, as a worker where there are workers."""
        conn = conn or self.conn
        number: Any = count
        if self.kind == "alone":
            return receive(conn, self.queue, "c", number)
        if self.kind == "pool":
            return take(conn, self.queue, "w1", number)
        return receive_coop(conn, self.queue, "w1", number)

    def next(self, ack_batch: int, count: int = 100) -> list[Message]:
        """Finish a batch and receive the next in one call."""
        if self.kind == "alone":
            return receive(self.conn, self.queue, "c", count, ack_batch)
        return take(self.conn, self.queue, "w1", count, ack_batch=ack_batch)

    def offer(self, count: int = 1) -> list[int]:
        """Send messages and tick; return their ids."""
        return offer(self.conn, self.queue, count)

    def again(self) -> list[Message]:
        """Receive what is due for a retry."""
        settle(self.conn, self.queue)
        return self.receive()

    def work_off(self, count: int = 100) -> list[int]:
        """Receive and ack until nothing is left; return the ids."""
        done: list[int] = []
        while batch := self.receive(count):
            assert len(batch) <= count
            done += ids(batch)
            assert ack(self.conn, batch[0].batch_id) == 1
        return done


KINDS = ("alone", "pool", "subconsumer")


def made(conn: Connection, queue: str, kind: str) -> Consumer:
    if kind == "subconsumer":
        value(conn, "select pgque.register_subconsumer(%s, 'c', 'w1')", queue)
    else:
        subscribe(conn, queue)
    return Consumer(conn, queue, kind)


@pytest.fixture(params=KINDS)
def consumer(request: pytest.FixtureRequest, conn: Connection, queue: str) -> Consumer:
    """A consumer of each kind, of a queue of its own."""
    return made(conn, queue, request.param)


@pytest.fixture(params=KINDS)
def timed(request: pytest.FixtureRequest, own: Connection) -> Consumer:
    """The same in a database of its own, whose clock a test may move."""
    value(own, "select pgque.create_queue('q')")
    return made(own, "q", request.param)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_batches_of_any_size_deliver_the_messages_of_all_windows_once_in_order(
    consumer: Consumer, size: int
) -> None:
    sent: list[int] = []
    for count in (1, 30, 2, 60):
        sent += consumer.offer(count)
    assert consumer.work_off(size) == sent
    assert consumer.receive() == []


def test_a_message_carries_what_was_sent(consumer: Consumer) -> None:
    conn, queue = consumer.conn, consumer.queue
    plain = value(conn, "select pgque.insert_event(%s, 'kind', 'data', '1', '2', '3', '4')", queue)
    rich = post(conn, queue, b"\x00\xff", "raw", headers='{"a": 1}', key="k")
    tick(conn, queue)
    batch = consumer.receive()
    assert [(m.msg_id, m.type, m.payload, m.payload_bytes, m.headers, m.key) for m in batch] == [
        (plain, "kind", "data", None, None, None),
        (rich, "raw", None, b"\x00\xff", {"a": 1}, "k"),
    ]
    first = batch[0]
    assert (first.extra1, first.extra2, first.extra3, first.extra4) == ("1", "2", "3", "4")
    for m in batch:
        assert (m.queue, m.retry_count, m.receive_count, m.last_error) == (queue, 0, 1, None)
        assert abs((m.created_at - value(conn, "select now()")).total_seconds()) < 60


def test_every_consumer_of_a_queue_gets_every_message(conn: Connection, queue: str) -> None:
    value(conn, "select pgque.register_subconsumer(%s, 'group', 'w')", queue)
    subscribe(conn, queue, "alone")
    for pool in ("pool", "other pool"):  # whose workers have the same name
        subscribe(conn, queue, pool)
    sent = offer(conn, queue, 20)
    assert drain(conn, queue, "alone", 7) == sent
    for pool in ("pool", "other pool"):
        assert ids(take(conn, queue, "w", consumer=pool)) == sent
    assert ids(receive_coop(conn, queue, "w", consumer="group")) == sent


def test_a_nacked_message_is_redelivered_after_its_delay_as_it_was_sent(timed: Consumer) -> None:
    conn = timed.conn
    sent = value(conn, "select pgque.send('q', 'kind', 'body'::text, 'key')")
    other = send(conn, "q")
    tick(conn, "q")
    first, kept = timed.receive()
    assert nack(conn, first, "10 minutes", "later") == 1
    assert ack(conn, first.batch_id) == 1
    move_clock(conn, "9 minutes")
    assert timed.again() == []
    move_clock(conn, "11 minutes")
    (again,) = timed.again()
    assert (again.msg_id, again.type, again.payload, again.extra1) == (sent, "kind", "body", "key")
    assert again.created_at == first.created_at
    assert (again.retry_count, again.receive_count, again.last_error) == (1, 2, "later")
    assert again.batch_id != first.batch_id
    assert kept.msg_id == other


def test_a_message_nacked_without_a_delay_waits_a_minute(timed: Consumer) -> None:
    (sent,) = timed.offer()
    (message,) = timed.receive()
    rows(timed.conn, "select * from pgque.nack(%s, %s::bigint[])", message.batch_id, [sent])
    ack(timed.conn, message.batch_id)
    move_clock(timed.conn, "58 seconds")
    assert timed.again() == []
    move_clock(timed.conn, "62 seconds")
    assert ids(timed.again()) == [sent]


def test_a_message_nacked_twice_is_retried_once_and_not_after_its_ack(consumer: Consumer) -> None:
    (sent, _) = consumer.offer(2)
    batch = consumer.receive()
    assert [nack(consumer.conn, batch[0]) for _ in range(2)] == [1, 1]
    assert ack(consumer.conn, batch[0].batch_id) == 1
    error = refused("PQ012", nack, consumer.conn, batch[1])
    assert "batch not found" in str(error)
    assert str(batch[1].batch_id) in str(error)
    settle(consumer.conn, consumer.queue)
    assert consumer.work_off() == [sent]
    settle(consumer.conn, consumer.queue)
    assert consumer.work_off() == []


def test_a_retry_goes_to_the_consumer_that_failed_only(consumer: Consumer) -> None:
    conn, queue = consumer.conn, consumer.queue
    subscribe(conn, queue, "other")
    (sent,) = consumer.offer()
    (message,) = consumer.receive()
    nack(conn, message)
    ack(conn, message.batch_id)
    assert drain(conn, queue, "other") == [sent]
    pump(conn)
    subscribe(conn, queue, "newcomer")
    tick(conn, queue)
    assert drain(conn, queue, "other") == drain(conn, queue, "newcomer") == []
    assert consumer.work_off() == [sent]


@pytest.mark.parametrize("retries", [0, 3])
def test_a_message_is_delivered_max_retries_plus_one_times_and_then_dead_once(
    consumer: Consumer, retries: int
) -> None:
    conn, queue = consumer.conn, consumer.queue
    configure(conn, queue, max_retries=retries, max_receive_attempts=100)
    (sent,) = consumer.offer()
    counts = []
    for number in range(retries + 3):
        for message in consumer.again():
            counts.append((message.receive_count, message.retry_count))
            nack(conn, message, "0", f"failure {number}")
            ack(conn, message.batch_id)
    assert counts == [(n + 1, n) for n in range(retries + 1)]
    found = rows(
        conn,
        "select d.ev_id, d.dl_reason, d.ev_data, d.consumer_name from pgque.dlq_inspect(%s) as d",
        queue,
    )
    assert found == [(sent, f"failure {retries}", "1", "c")]


def test_each_message_of_a_batch_has_an_outcome_of_its_own(consumer: Consumer) -> None:
    conn, queue = consumer.conn, consumer.queue
    sent = consumer.offer(6)
    token = consumer.receive()[0].batch_id
    assert outcome(conn, "ack", token, sent[:2]) == dict.fromkeys(sent[:2])
    assert outcome(conn, "nack", token, sent[2:3], "0", "again") == {sent[2]: None}
    assert outcome(conn, "dead", token, sent[3:4], "broken") == {sent[3]: None}
    assert outcome(conn, "archive", token, sent[4:5]) == {sent[4]: None}
    for call in ("ack", "nack", "dead", "archive"):
        assert outcome(conn, call, token, [*sent[:5], 10**9]) == {
            **dict.fromkeys(sent[:5], "settled already"),
            10**9: "not in this batch",
        }
    assert ack(conn, token) == 1
    assert ack(conn, token) == 0
    assert [(m.msg_id, m.last_error, m.receive_count, m.retry_count) for m in consumer.again()] == [
        (sent[2], "again", 2, 1)
    ]
    assert dead_letters(conn, queue) == {sent[3]: "broken"}
    assert rows(conn, "select a.msg_id from pgque.archive_list(%s) as a", queue) == [(sent[4],)]
    assert outcome(conn, "ack", token, sent[5:]) == {sent[5]: "batch not open"}
    told = "lost to another worker" if consumer.kind == "pool" else "settled already"
    assert outcome(conn, "nack", token, [sent[2]], "0") == {sent[2]: told}


@pytest.mark.parametrize("how", ["ack", "nack", "dead"])
def test_a_batch_is_finished_by_the_outcome_of_its_last_message(consumer: Consumer, how: str) -> None:
    sent = consumer.offer(2)
    token = consumer.receive()[0].batch_id
    more = {"ack": (), "nack": ("1 hour",), "dead": ("broken",)}[how]
    for msg_id in sent:
        assert outcome(consumer.conn, how, token, [msg_id], *more) == {msg_id: None}
    later = consumer.offer(1)
    assert consumer.work_off() == later


def test_only_the_messages_without_an_outcome_are_redelivered(timed: Consumer) -> None:
    sent = timed.offer(10)
    token = timed.receive()[0].batch_id
    settled = [sent[n] for n in (0, 3, 4, 9)]
    assert outcome(timed.conn, "ack", token, settled[:2]) == dict.fromkeys(settled[:2])
    assert outcome(timed.conn, "nack", token, settled[2:], "1 day") == dict.fromkeys(settled[2:])
    left = [i for i in sent if i not in settled]
    if timed.kind == "pool":
        move_clock(timed.conn, "1 minute")  # when the lease has expired
    else:
        assert {m.batch_id for m in timed.receive()} == {token}
    assert timed.work_off() == left


def test_an_outcome_that_is_rolled_back_did_not_happen(consumer: Consumer) -> None:
    conn = consumer.conn
    sent = consumer.offer(4)
    token = consumer.receive()[0].batch_id
    conn.execute("begin")
    outcome(conn, "ack", token, sent[:1])
    nack_ids(conn, token, sent[1:2])
    outcome(conn, "dead", token, sent[2:3], "x")
    assert ack(conn, token) == 1
    conn.execute("rollback")
    assert dead_letters(conn, consumer.queue) == {}
    assert outcome(conn, "ack", token, sent) == dict.fromkeys(sent)
    settle(conn, consumer.queue)
    assert consumer.work_off() == []


def test_a_receive_that_is_rolled_back_counts_as_nothing(
    consumer: Consumer, transaction: Callable[..., Connection]
) -> None:
    sent = consumer.offer(4)
    for _ in range(7):
        one = transaction()
        batch = consumer.receive(2, conn=one)
        assert ids(batch) == sent[:2]
        assert ack(one, batch[0].batch_id) == 1
        one.execute("rollback")
    assert [(m.msg_id, m.receive_count) for m in consumer.receive()] == [(i, 1) for i in sent]


def test_one_call_finishes_the_last_batch_and_takes_the_next(consumer: Consumer) -> None:
    conn = consumer.conn
    sent = consumer.offer(5)
    first = consumer.receive(2)
    second = consumer.next(first[0].batch_id, 2)
    assert ids(second) == sent[2:4]
    assert ack(conn, first[0].batch_id) == 0
    conn.execute("begin")
    assert ids(consumer.next(second[0].batch_id)) == sent[4:]
    conn.execute("rollback")
    third = consumer.next(second[0].batch_id)
    assert ids(third) == sent[4:]
    assert consumer.next(third[0].batch_id) == []
    assert ack(conn, third[0].batch_id) == 0
    assert consumer.receive() == []


def test_ids_of_messages_that_are_not_in_the_batch_get_a_row_with_the_reason(consumer: Consumer) -> None:
    sent = consumer.offer(4)
    first = consumer.receive(2)
    ack(consumer.conn, first[0].batch_id)
    (message,) = consumer.receive(1)
    later = send(consumer.conn, consumer.queue)
    strange = [-(2**63), -1, 0, sent[0], sent[3], later, 2**62, 2**62 + message.msg_id, 2**63 - 1]
    told = dict.fromkeys(strange, "not in this batch")
    for i in strange:
        assert outcome(consumer.conn, "nack", message.batch_id, [i], "0") == {i: told[i]}
        error = refused("PQ007", nack, consumer.conn, message._replace(msg_id=i))
        assert str(message.batch_id) in str(error)
    assert outcome(consumer.conn, "nack", message.batch_id, strange, "0") == told
    no_id: Any = None
    refused("PQ007", nack, consumer.conn, message._replace(msg_id=no_id))
    assert ack(consumer.conn, message.batch_id) == 1
    assert consumer.again()[0].msg_id == sent[3]


@pytest.mark.parametrize("form", ["'[0:1]={%s,%s}'", "'{{%s},{%s}}'"])
def test_ids_may_come_in_an_array_of_any_shape(consumer: Consumer, form: str) -> None:
    sent = consumer.offer(2)
    token = consumer.receive()[0].batch_id
    for call, more in (("nack", ", '0'"), ("ack", "")):
        found = rows(
            consumer.conn, f"select * from pgque.{call}({token}, {form % tuple(sent)}::bigint[]{more})"
        )
        assert [(msg_id, ok) for msg_id, ok, _ in found] == [(msg_id, call == "nack") for msg_id in sent]


@pytest.mark.parametrize("after", ["-1 second", "-1 month"])
def test_a_negative_delay_is_refused(consumer: Consumer, after: str) -> None:
    sent = consumer.offer()
    (message,) = consumer.receive()
    refused("PQ005", nack, consumer.conn, message, after)
    refused("PQ005", nack_ids, consumer.conn, message.batch_id, sent, after)


@pytest.mark.parametrize("count", [0, -1, None])
def test_fewer_than_one_message_can_not_be_asked_for(consumer: Consumer, count: int | None) -> None:
    error = refused("PQ005", consumer.receive, count)
    assert consumer.queue in str(error)


def test_a_batch_that_never_was_is_reported_and_not_raised(consumer: Consumer) -> None:
    sent = consumer.offer()
    consumer.receive()
    for batch_id in (0, -1, 1, 10**15, 2**62):
        assert ack(consumer.conn, batch_id) == 0
        for call in ("ack", "dead", "archive", "nack"):
            assert outcome(consumer.conn, call, batch_id, sent) == {sent[0]: "batch not open"}
        for call in ("extend(%s, '1 minute')", "set_visibility(%s, '0')", "release(%s)"):
            assert value(consumer.conn, f"select pgque.{call}", batch_id) == 0
    assert value(consumer.conn, "select pgque.ack(null::bigint)") == 0
