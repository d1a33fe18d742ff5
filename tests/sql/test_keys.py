"""Keys: while a message with a key is pending, the next one with that key takes its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    payloads,
    post,
    receive,
    refused,
    release,
    rows,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)


@pytest.mark.parametrize("ticked", [False, True])
def test_a_second_send_replaces_what_is_pending_and_keeps_id_and_place(
    conn: Connection, subscribed: str, ticked: bool
) -> None:
    first = post(conn, subscribed, "old", "was", key="k", headers='{"v": 1}')
    other = post(conn, subscribed, "other")
    if ticked:
        tick(conn, subscribed)
    assert post(conn, subscribed, "new", "is", key="k", headers='{"v": 2}') == first
    last = post(conn, subscribed, "last")
    tick(conn, subscribed)
    got = work_off(conn, subscribed)
    assert [(m.msg_id, m.payload, m.type, m.headers, m.key) for m in got] == [
        (first, "new", "is", {"v": 2}, "k"),
        (other, "other", "default", None, None),
        (last, "last", "default", None, None),
    ]
    assert {m.receive_count for m in got} == {1}


def test_headers_are_replaced_by_none(conn: Connection, subscribed: str) -> None:
    post(conn, subscribed, "old", key="k", headers='{"v": 1}')
    post(conn, subscribed, "new", key="k")
    tick(conn, subscribed)
    assert [(m.payload, m.headers) for m in work_off(conn, subscribed)] == [("new", None)]


def test_text_is_replaced_by_bytes_and_back(conn: Connection, subscribed: str) -> None:
    a = post(conn, subscribed, "text", key="a")
    b = post(conn, subscribed, b"\x00\xff", key="b")
    assert post(conn, subscribed, b"\x00\x01", key="a") == a
    assert post(conn, subscribed, "text", key="b") == b
    tick(conn, subscribed)
    assert [(m.payload, m.payload_bytes) for m in work_off(conn, subscribed)] == [
        (None, b"\x00\x01"),
        ("text", None),
    ]


def test_a_key_replaced_500_times_is_delivered_once_with_the_last_body(
    conn: Connection, subscribed: str
) -> None:
    found = {post(conn, subscribed, str(n), key="k") for n in range(250)}
    tick(conn, subscribed)
    found |= {post(conn, subscribed, str(n), key="k") for n in range(250, 500)}
    assert len(found) == 1
    tick(conn, subscribed)
    assert [(m.msg_id, m.payload) for m in work_off(conn, subscribed)] == [(found.pop(), "499")]


@pytest.mark.parametrize("plain", [True, False])
def test_a_send_with_the_key_of_a_delivered_message_makes_a_new_one_and_both_are_delivered(
    pool: Connection, plain: bool
) -> None:
    first = post(pool, "q", "one", key="k")
    tick(pool, "q")
    (message,) = receive(pool, "q") if plain else take(pool, "q")
    second = post(pool, "q", "two", key="k")
    assert second > first
    assert post(pool, "q", "two again", key="k") == second
    tick(pool, "q")
    assert nack(pool, message, "0", "once more") == 1
    ack(pool, message.batch_id)
    settle(pool, "q")
    got = {}
    while batch := receive(pool, "q") if plain else take(pool, "q"):
        got.update({m.msg_id: m.payload for m in batch})
        ack(pool, batch[0].batch_id)
    assert got == {first: "one", second: "two again"}


def test_a_redelivery_has_the_body_of_the_first_delivery(pool: Connection) -> None:
    first = post(pool, "q", "old", key="k", headers='{"v": 1}')
    tick(pool, "q")
    assert post(pool, "q", "new", key="k", headers='{"v": 2}') == first
    tick(pool, "q")
    (message,) = take(pool, "q")
    seen = (message.payload, message.headers, message.type)
    for number in range(1, 4):
        post(pool, "q", f"later {number}", key="k", headers='{"v": 3}')
        move_clock(pool, f"{number} minutes")
        (again,) = take(pool, "q")
        assert (again.msg_id, again.payload, again.headers, again.type) == (first, *seen)
    nack(pool, again, "0")
    settle(pool, "q")
    got = {m.msg_id: m.payload for m in work_off(pool, "q")}
    assert got.pop(first) == "new"
    assert list(got.values()) == ["later 3"]


def test_a_plain_consumers_open_batch_is_redelivered_as_it_was(conn: Connection, subscribed: str) -> None:
    post(conn, subscribed, "old", key="k")
    tick(conn, subscribed)
    batch = receive(conn, subscribed)
    post(conn, subscribed, "new", key="k")
    tick(conn, subscribed)
    assert receive(conn, subscribed) == batch
    ack(conn, batch[0].batch_id)
    assert payloads(conn, subscribed) == ["new"]


def test_what_one_consumer_got_is_pending_for_nobody(conn: Connection, subscribed: str) -> None:
    subscribe(conn, subscribed, "d")
    first = post(conn, subscribed, "one", key="k")
    tick(conn, subscribed)
    take(conn, subscribed)
    second = post(conn, subscribed, "two", key="k")
    assert second != first
    tick(conn, subscribed)
    assert [(m.msg_id, m.payload) for m in work_off(conn, subscribed, consumer="d")] == [
        (first, "one"),
        (second, "two"),
    ]


@pytest.mark.parametrize("how", ["ack", "release", "nack", "dead"])
def test_after_any_outcome_a_key_makes_a_new_message(conn: Connection, subscribed: str, how: str) -> None:
    first = post(conn, subscribed, "one", key="k")
    tick(conn, subscribed)
    (message,) = take(conn, subscribed)
    if how == "release":
        release(conn, message.batch_id)
    elif how == "nack":
        nack(conn, message, "1 hour")
    else:
        outcome(conn, how, message.batch_id, [first], *(["x"] if how == "dead" else []))
    second = post(conn, subscribed, "two", key="k")
    assert second > first
    tick(conn, subscribed)
    got = {m.msg_id: m.payload for m in work_off(conn, subscribed)}
    assert got == ({first: "one", second: "two"} if how == "release" else {second: "two"})


def test_a_delivery_that_is_rolled_back_leaves_the_message_pending(pool: Connection) -> None:
    first = post(pool, "q", "one", key="k")
    tick(pool, "q")
    pool.execute("begin")
    assert len(take(pool, "q")) == 1
    pool.execute("rollback")
    assert post(pool, "q", "two", key="k") == first
    tick(pool, "q")
    assert [(m.msg_id, m.payload) for m in work_off(pool, "q")] == [(first, "two")]


def test_messages_without_key_and_of_other_queues_are_never_merged(
    conn: Connection, subscribed: str, new_queue: Callable[..., str]
) -> None:
    other = new_queue()
    subscribe(conn, other)
    sent = [post(conn, subscribed, "x") for _ in range(3)]
    sent += [post(conn, subscribed, "x", partition_key="p") for _ in range(3)]
    sent += [post(conn, subscribed, "x", key=k) for k in ("k", "K", " k")]
    there = post(conn, other, "y", key="k")
    for name in (subscribed, other):
        tick(conn, name)
    assert ids(work_off(conn, subscribed)) == sent
    assert len(set(sent)) == 9
    assert [(m.msg_id, m.payload) for m in work_off(conn, other)] == [(there, "y")]


@pytest.mark.parametrize("key", ["", "k" * 1001, "ü" * 501])
def test_a_key_is_1_to_1000_bytes_long(conn: Connection, subscribed: str, key: str) -> None:
    refused("PQ005", lambda: post(conn, subscribed, key=key))
    long = "ü" * 500
    assert post(conn, subscribed, "a", key=long) == post(conn, subscribed, "b", key=long)


def test_a_key_of_any_characters_is_kept(conn: Connection, subscribed: str) -> None:
    keys = ["'; drop table x; --", "a\nb", "\\x00", "null", "%s", "🐘"]
    for key in keys:
        post(conn, subscribed, "old", key=key)
    for key in keys:
        post(conn, subscribed, key, key=key)
    tick(conn, subscribed)
    assert [(m.key, m.payload) for m in work_off(conn, subscribed)] == [(k, k) for k in keys]


def test_an_expired_pending_message_is_not_resurrected(pool: Connection) -> None:
    first = post(pool, "q", "old", key="k", ttl="1 minute")
    tick(pool, "q")
    move_clock(pool, "2 minutes")
    second = post(pool, "q", "new", key="k")
    assert second > first
    tick(pool, "q")
    assert [(m.msg_id, m.payload) for m in work_off(pool, "q")] == [(second, "new")]


def test_a_full_queue_takes_a_replacement_and_no_new_key(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, max_depth=2)
    first = post(conn, subscribed, "one", key="k")
    post(conn, subscribed, "two", key="l")
    assert post(conn, subscribed, "three", key="k") == first
    refused("PQ003", lambda: post(conn, subscribed, "four", key="m"))
    tick(conn, subscribed)
    assert [m.payload for m in work_off(conn, subscribed)] == ["three", "two"]


def test_a_delayed_message_is_replaced_in_its_place(pool: Connection) -> None:
    first = post(pool, "q", "old", key="k", delay="10 minutes")
    assert post(pool, "q", "new", key="k", delay="10 minutes") == first
    settle(pool, "q")
    assert take(pool, "q") == []
    move_clock(pool, "11 minutes")
    settle(pool, "q")
    assert [(m.msg_id, m.payload) for m in work_off(pool, "q")] == [(first, "new")]
    assert work_off(pool, "q") == []


@pytest.mark.parametrize("delays", [("10 minutes", None), (None, "10 minutes")])
def test_a_key_sent_with_and_without_delay_is_one_message(
    pool: Connection, delays: tuple[str | None, str | None]
) -> None:
    first = post(pool, "q", "old", key="k", delay=delays[0])
    assert post(pool, "q", "new", key="k", delay=delays[1]) == first
    got = []
    for minutes in (0, 11, 22):
        move_clock(pool, f"{minutes} minutes")
        settle(pool, "q")
        got += [(m.msg_id, m.payload) for m in work_off(pool, "q")]
    assert got == [(first, "new")]


def test_purging_a_key_takes_its_pending_message_only(conn: Connection, subscribed: str) -> None:
    post(conn, subscribed, "one", key="k")
    other = post(conn, subscribed, "two", key="l")
    keyless = post(conn, subscribed, "three")
    tick(conn, subscribed)
    assert value(conn, "select pgque.purge_key(%s, 'k')", subscribed) == 1
    assert value(conn, "select pgque.purge_key(%s, 'k')", subscribed) == 0
    assert value(conn, "select pgque.purge_key(%s, 'nothing')", subscribed) == 0
    again = post(conn, subscribed, "again", key="k")
    tick(conn, subscribed)
    assert ids(work_off(conn, subscribed)) == [other, keyless, again]


def test_keys_leave_no_row_behind_once_delivered(pool: Connection) -> None:
    from sql.helpers import forced_tick, rotate, row_counts

    def traffic(count: int) -> None:
        for number in range(count):
            post(pool, "q", "a", key=f"k{number}")
            post(pool, "q", "b", key=f"k{number}")
        tick(pool, "q")
        assert len(work_off(pool, "q")) == count
        for _ in range(5):
            forced_tick(pool, "q")
            work_off(pool, "q")
            rotate(pool, "q")
            value(pool, "select pgque.maint()")

    traffic(50)
    before = row_counts(pool)
    traffic(400)
    after = row_counts(pool)
    grown = {t: n - before.get(t, 0) for t, n in after.items() if n - before.get(t, 0) > 100}
    assert grown == {}


def test_a_consumer_that_comes_later_finds_one_message_per_key(conn: Connection, queue: str) -> None:
    first = post(conn, queue, "old", key="k")
    tick(conn, queue)
    assert post(conn, queue, "new", key="k") == first
    tick(conn, queue)
    value(conn, "select pgque.subscribe(%s, 'late', 'earliest')", queue)
    assert [(m.msg_id, m.payload) for m in work_off(conn, queue, consumer="late")] == [(first, "new")]


def test_headers_of_a_keyed_batch_are_kept(conn: Connection, subscribed: str) -> None:
    value(
        conn,
        "select pgque.send_batch(%s, 't', %s::text[], headers => %s::jsonb[], keys => %s::text[])",
        subscribed,
        ["a", "b", "c"],
        [json.dumps({"n": n}) for n in range(3)],
        ["k", "l", "k"],
    )
    tick(conn, subscribed)
    assert [(m.payload, m.headers, m.key) for m in work_off(conn, subscribed)] == [
        ("c", {"n": 2}, "k"),
        ("b", {"n": 1}, "l"),
    ]
    assert rows(conn, "select * from pgque.list_messages(%s)", subscribed) == []


def test_keys_and_offers_without_keys_mix(conn: Connection, subscribed: str) -> None:
    a = post(conn, subscribed, "a", key="k")
    plain = offer(conn, subscribed, 3)
    assert post(conn, subscribed, "b", key="k") == a
    tick(conn, subscribed)
    assert ids(take(conn, subscribed, "w1", 1)) == [a]
    assert ids(take(conn, subscribed, "w2")) == plain


def test_of_two_delayed_messages_with_one_key_the_newer_is_replaced_when_the_clock_was_set_back(
    pool: Connection,
) -> None:
    old = post(pool, "q", "old", key="k", delay="1 day", ttl="1 hour")
    move_clock(pool, "2 hours")
    new = post(pool, "q", "new", key="k", delay="1 day")
    assert new != old
    move_clock(pool, "0")
    assert post(pool, "q", "newer", key="k", delay="1 day") == new


def pending(conn: Connection, queue: str) -> int:
    """Have a message with key k that a tick covers and nobody was given."""
    sent = post(conn, queue, "old", key="k")
    tick(conn, queue)
    return sent


def test_a_purge_waits_for_a_sender_that_replaces_a_body_and_a_later_body_is_delivered(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
) -> None:
    pending(pool, "q")
    sender = transaction(dsn=own_dsn)
    post(sender, "q", "new", key="k")
    purging = background(lambda c: value(c, "select pgque.purge('q')"), connect(own_dsn))
    wait_for_lock(purging.pid)
    sender.commit()
    purging.result()
    tick(pool, "q")
    # It was committed before the purge was, so it is gone with the rest; the next one is a new one.
    assert work_off(pool, "q") == []
    again = post(pool, "q", "again", key="k")
    tick(pool, "q")
    assert [(m.msg_id, m.payload) for m in work_off(pool, "q")] == [(again, "again")]


def test_who_subscribes_while_a_body_is_replaced_loses_nothing_that_is_committed_later(
    own: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    pending(own, "q")
    sender = transaction(dsn=own_dsn)
    post(sender, "q", "new", key="k")
    joining = background(lambda c: subscribe(c, "q", "b"), connect(own_dsn))
    wait_for_lock(joining.pid)
    sender.commit()
    assert joining.result() == 1
    # It stood behind the message when that was replaced: what comes now is one of its own.
    third = post(own, "q", "third", key="k")
    tick(own, "q")
    assert [(m.msg_id, m.payload) for m in receive(own, "q", "b")] == [(third, "third")]


def test_purge_key_finds_a_message_that_the_pump_is_moving(
    own: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    post(own, "q", key="k", delay="1 minute")
    move_clock(own, "2 minutes")
    pump = transaction(dsn=own_dsn)
    assert value(pump, "select pgque.maint_retry_events()") == 1
    purging = background(lambda c: value(c, "select pgque.purge_key('q', 'k')"), connect(own_dsn))
    wait_for_lock(purging.pid)
    pump.commit()
    assert purging.result() == 1
    tick(own, "q")
    assert payloads(own, "q") == []


@pytest.mark.parametrize("as_worker", [True, False])
def test_a_requeued_message_that_had_expired_lives_on_though_its_body_was_replaced(
    own: Connection, as_worker: bool
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    for payload in ("a", "b"):
        sent = post(own, "q", payload, key="k", ttl="1 minute")
    tick(own, "q")
    batch = take(own, "q") if as_worker else receive(own, "q")
    assert outcome(own, "dead", batch[0].batch_id, [sent], "x") == {sent: None}
    ack(own, batch[0].batch_id)
    move_clock(own, "2 minutes")
    value(own, "select pgque.dlq_requeue(d.dl_id) from pgque.dlq_inspect('q') as d")
    settle(own, "q")
    got = take(own, "q") if as_worker else receive(own, "q")
    assert [(m.msg_id, m.payload) for m in got] == [(sent, "b")]


@pytest.mark.parametrize("call", ["select pgque.subscribe('q', 'b')", "select pgque.purge('q')"])
def test_who_waits_for_a_replaced_body_keeps_no_other_key_waiting(
    own: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_for_lock: Callable[..., None],
    call: str,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    pending(own, "q")
    sender = transaction(dsn=own_dsn)
    post(sender, "q", "new", key="k")
    waiting = background(lambda c: value(c, call), connect(own_dsn))
    for n in range(3):
        wait_for_lock(waiting.pid)
        own.execute("set lock_timeout = '1s'")
        post(own, "q", f"other {n}", key=f"other {n}")
    assert not waiting.done
    sender.commit()
    waiting.result()


def test_a_subscribe_in_a_transaction_that_stays_open_blocks_no_delivery(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    first = pending(own, "q")
    joining = transaction(dsn=own_dsn)
    assert subscribe(joining, "q", "b") == 1
    assert [m.msg_id for m in receive(own, "q")] == [first]
    joining.commit()


def test_a_wait_for_a_replaced_body_ends_and_names_who_keeps_it(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    pending(own, "q")
    sender = transaction(dsn=own_dsn)
    post(sender, "q", "new", key="k")
    own.execute("set lock_timeout = '200ms'")
    error = refused("55P03", subscribe, own, "q", "b")
    assert f"pid {sender.info.backend_pid}" in str(error)
    assert value(own, "show lock_timeout") == "200ms"


def test_a_message_that_two_consumers_have_set_aside_for_its_busy_key_is_given_up_for_both(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    """It gets one seal, whose number is unique."""
    value(own, "select pgque.create_queue('q')")
    for consumer in ("c", "d"):
        subscribe(own, "q", consumer)
    sent = post(own, "q", "old", key="k")
    post(own, "q", "beside")
    tick(own, "q")
    sender = connect(own_dsn, autocommit=False)
    assert post(sender, "q", "new", key="k") == sent
    for consumer in ("c", "d"):
        ack(own, receive(own, "q", consumer)[0].batch_id)
    sender.commit()
    assert rows(own, "select r.ev_id from pgque.retry_queue r") == [(sent,), (sent,)]
    notices: list[str | None] = []
    own.add_notice_handler(lambda d: notices.append(d.message_primary))
    move_clock(own, "8 days")
    value(own, "select pgque.maint()")
    assert notices == []
    found = rows(
        own, "select d.ev_id, d.ev_data, d.consumer_name from pgque.dlq_inspect('q') as d order by 3"
    )
    assert found == [(sent, "new", "c"), (sent, "new", "d")]
