"""Keyed order: one message of a key at a time, in the order of ids, and keys in parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    Message,
    ack,
    configure,
    forced_tick,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    post,
    refused,
    release,
    rotate,
    settle,
    take,
    tick,
    value,
    work_off,
)


@pytest.fixture
def lanes(own: Connection) -> Connection:
    """A database of its own with a queue q whose consumer c is in keyed order."""
    value(own, "select pgque.create_queue('q')")
    assert value(own, "select pgque.subscribe('q', 'c', 'latest', keyed_order => true)") == 1
    return own


def line_up(conn: Connection, keys: str) -> list[int]:
    """Send a message for each letter, its partition key ("." has none), and tick; return the ids."""
    sent = [post(conn, "q", key, **({"partition_key": key} if key != "." else {})) for key in keys]
    tick(conn, "q")
    return sent


def spell(batch: list[Message]) -> str:
    """The payloads of a batch."""
    return "".join(str(m.payload) for m in batch)


def test_one_message_of_a_key_is_out_at_a_time(lanes: Connection) -> None:
    a1, b1, a2, b2, a3 = line_up(lanes, "ababa")
    first = take(lanes, "q", "w1")
    assert ids(first) == [a1, b1]
    assert take(lanes, "q", "w2") == []
    assert take(lanes, "q", "w1") == []
    outcome(lanes, "ack", first[0].batch_id, [a1])
    second = take(lanes, "q", "w2")
    assert ids(second) == [a2]
    assert ack(lanes, first[0].batch_id) == 1
    third = take(lanes, "q", "w3")
    assert ids(third) == [b2]
    assert ack(lanes, second[0].batch_id) == 1
    assert ids(take(lanes, "q", "w1")) == [a3]


def test_messages_without_key_are_held_back_by_nothing(lanes: Connection) -> None:
    sent = line_up(lanes, ".a.a.")
    assert ids(take(lanes, "q", "w1")) == [sent[n] for n in (0, 1, 2, 4)]
    later = line_up(lanes, "..")
    assert ids(take(lanes, "q", "w2")) == later


def test_keys_are_delivered_in_parallel_past_a_long_line(lanes: Connection) -> None:
    sent = line_up(lanes, "a" * 300 + "b" + "c")
    assert ids(take(lanes, "q", "w1", 1)) == sent[:1]
    assert ids(take(lanes, "q", "w2", 1)) == sent[300:301]
    assert ids(take(lanes, "q", "w3", 5)) == sent[301:]
    later = line_up(lanes, "d")
    assert ids(take(lanes, "q", "w4", 5)) == later


def backlog(conn: Connection, kind: str, count: int) -> int:
    """Lease a message of key a, send count messages that cannot be delivered now, and then one that can be."""
    line_up(conn, "a")
    assert len(take(conn, "q", "w1", 1, "1 day")) == 1
    options = {
        "busy": "partition_keys => array_fill('a'::text, array[n])",
        "expired": "ttls => array_fill(interval '1 ms', array[n])",
    }
    sent = "select cardinality(pgque.send_batch('q', 't', array_fill('x'::text, array[n]), {})) from (values (%s)) as v (n)"
    assert value(conn, sent.format(options[kind]), count) == count
    move_clock(conn, "1 minute")
    return line_up(conn, "b")[0]


@pytest.mark.parametrize("kind", ["busy", "expired"])
def test_an_empty_receive_means_that_no_message_can_be_received(lanes: Connection, kind: str) -> None:
    free = backlog(lanes, kind, 11_000)
    assert ids(take(lanes, "q", "w2", timeout="1 day")) == [free]
    assert take(lanes, "q", "w2") == []


def test_a_statement_timeout_does_not_keep_a_call_from_getting_past_a_backlog(lanes: Connection) -> None:
    free = backlog(lanes, "busy", 4_000)
    # The limit of the statement that sets it does not run yet.
    call = (
        "select r.msg_id from (select set_config('statement_timeout', '1ms', true) as c offset 0) as s"
        " cross join lateral pgque.receive('q', 'c', 10, worker => 'w2') as r where s.c <> ''"
    )
    answers: list[list[int]] = []
    while not answers or (answers[-1] == [] and len(answers) < 10):
        answers.append([found[0] for found in lanes.execute(call.encode()).fetchall()])
    assert answers == [[]] * (len(answers) - 1) + [[free]]
    assert 2 <= len(answers) <= 5


def test_a_message_without_a_key_is_redelivered_past_a_long_line(lanes: Connection) -> None:
    line = "select count(pgque.send('q', 'default', 'a'::text, partition_key => 'a')) from generate_series(1, 1500)"
    assert value(lanes, line) == 1500
    (free,) = line_up(lanes, ".")
    assert len(take(lanes, "q", "w1", 1, "1 day")) == 1
    batch = take(lanes, "q", "w2", 1)
    assert ids(batch) == [free]
    nack(lanes, batch[0])
    again = take(lanes, "q", "w3", 5)
    assert [(m.msg_id, m.receive_count) for m in again] == [(free, 2)]


def test_reading_past_an_expired_message_delivers_no_more_than_max_return(lanes: Connection) -> None:
    for key in "abc":
        post(lanes, "q", "first", key=key)
    tick(lanes, "q")
    out = take(lanes, "q", "w1", timeout="1 day")
    assert len(out) == 3
    post(lanes, "q", "old", key="a", ttl="1 minute")
    b, c = (post(lanes, "q", "old", key=key) for key in "bc")
    tick(lanes, "q")
    assert take(lanes, "q", "w2") == []
    assert ack(lanes, out[0].batch_id) == 1
    move_clock(lanes, "10 minutes")
    assert ids(take(lanes, "q", "w2", 1, "1 day")) == [b]
    # Nobody was given the other one: a later send replaces its body.
    assert post(lanes, "q", "new", key="c") == c
    assert [(m.msg_id, m.payload) for m in take(lanes, "q", "w3")] == [(c, "new")]


def test_a_nacked_message_holds_back_its_key_and_only_its_key(lanes: Connection) -> None:
    a1, b1, a2, b2 = line_up(lanes, "abab")
    first = take(lanes, "q", "w1")
    assert nack(lanes, first[0], "10 minutes", "not yet") == 1
    assert ack(lanes, first[0].batch_id) == 1
    assert ids(take(lanes, "q", "w2", timeout="1 day")) == [b2]
    later = line_up(lanes, "ac")
    assert ids(take(lanes, "q", "w3", timeout="1 day")) == later[1:]
    move_clock(lanes, "11 minutes")
    settle(lanes, "q")
    batch = take(lanes, "q", "w4")
    assert a1 in ids(batch) and a2 not in ids(batch) and later[0] not in ids(batch)
    outcome(lanes, "ack", batch[0].batch_id, [a1])
    rest = work_off(lanes, "q", "w5")
    assert [i for i in ids(rest) if i in (a2, later[0])] == [a2, later[0]]
    assert b1 not in ids(rest)


@pytest.mark.parametrize("how", ["lapse", "release"])
def test_a_message_that_comes_back_comes_before_its_successors(lanes: Connection, how: str) -> None:
    a1, a2, a3 = line_up(lanes, "aaa")
    for number in range(1, 4):
        (message,) = take(lanes, "q", f"w{number}")
        assert (message.msg_id, message.receive_count) == (a1, number)
        if how == "lapse":
            move_clock(lanes, f"{number} minutes")
        else:
            assert release(lanes, message.batch_id) == 1
    assert ids(work_off(lanes, "q", "w9")) == [a1, a2, a3]


def test_a_dead_message_frees_its_key(lanes: Connection) -> None:
    configure(lanes, "q", max_receive_attempts=2)
    a1, a2, a3 = line_up(lanes, "aaa")
    (message,) = take(lanes, "q")
    outcome(lanes, "dead", message.batch_id, [a1], "broken")
    assert ids(take(lanes, "q")) == [a2]
    move_clock(lanes, "1 minute")
    assert ids(take(lanes, "q")) == [a2]
    move_clock(lanes, "2 minutes")
    got = ids(take(lanes, "q")) or ids(take(lanes, "q"))
    assert got == [a3]


def test_the_key_of_a_message_is_its_key_before_its_partition_key(lanes: Connection) -> None:
    first = post(lanes, "q", "1", key="a", partition_key="x")
    second = post(lanes, "q", "2", key="b", partition_key="x")
    third = post(lanes, "q", "3", partition_key="a")
    fourth = post(lanes, "q", "4", partition_key="x")
    tick(lanes, "q")
    assert ids(take(lanes, "q", "w1")) == [first, second, fourth]
    later = post(lanes, "q", "5", partition_key="x")
    tick(lanes, "q")
    assert take(lanes, "q", "w2") == []
    move_clock(lanes, "1 minute")
    got = ids(work_off(lanes, "q", "w3"))
    assert sorted(got) == [first, second, third, fourth, later]
    assert got.index(first) < got.index(third)
    assert got.index(fourth) < got.index(later)


@pytest.mark.parametrize("rotated", [False, True])
def test_a_keyed_message_held_back_by_its_key_is_still_replaced(lanes: Connection, rotated: bool) -> None:
    first = post(lanes, "q", "one", key="k")
    tick(lanes, "q")
    (message,) = take(lanes, "q", "w1", timeout="1 day")
    second = post(lanes, "q", "two", key="k")
    assert second != first
    tick(lanes, "q")
    assert take(lanes, "q", "w2") == []
    if rotated:
        for _ in range(4):
            line_up(lanes, "ab")
            work_off(lanes, "q", "w2")
            forced_tick(lanes, "q")
            work_off(lanes, "q", "w2")
            rotate(lanes, "q")
    third = post(lanes, "q", "three", key="k")
    tick(lanes, "q")
    assert third == second
    assert take(lanes, "q", "w3") == []
    assert ack(lanes, message.batch_id) == 1
    assert [(m.msg_id, m.payload) for m in work_off(lanes, "q", "w3")] == [(second, "three")]


def test_a_replacement_that_commits_after_its_message_was_held_back_is_what_is_delivered(
    lanes: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    post(lanes, "q", "one", key="k")
    tick(lanes, "q")
    (message,) = take(lanes, "q", "w1", timeout="1 day")
    second = post(lanes, "q", "two", key="k")
    tick(lanes, "q")
    sender = transaction("read committed", own_dsn)
    promised = post(sender, "q", "new", key="k")
    assert take(lanes, "q", "w2") == []
    sender.execute("commit")
    for _ in range(6):
        line_up(lanes, "ab")
        work_off(lanes, "q", "w2")
        forced_tick(lanes, "q")
        work_off(lanes, "q", "w2")
        rotate(lanes, "q")
    assert ack(lanes, message.batch_id) == 1
    got = [(m.msg_id, m.payload) for m in work_off(lanes, "q", "w3")]
    assert got[-1] == (promised, "new")
    assert promised != second or len(got) == 1


@pytest.mark.slow
def test_workers_in_parallel_keep_each_key_in_order(
    lanes: Connection, own_dsn: str, connect: Callable[..., Connection], background: Callable[..., Any]
) -> None:
    keys = [f"k{n % 7}" for n in range(350)]
    value(
        lanes,
        "select pgque.send_batch('q', 't', %s::text[], partition_keys => %s::text[])",
        keys,
        keys,
    )
    tick(lanes, "q")
    lanes.execute("create table public.done (n bigserial, worker text, key text, msg_id bigint)")

    def worker(name: str) -> Callable[[Connection], None]:
        def run(c: Connection) -> None:
            idle = 0
            while idle < 20:
                batch = take(c, "q", name, 3)
                idle = 0 if batch else idle + 1
                for m in batch:
                    c.execute(
                        "insert into public.done (worker, key, msg_id) values (%s, %s, %s)",
                        [name, m.payload, m.msg_id],
                    )
                if batch:
                    assert ack(c, batch[0].batch_id) == 1

        return run

    jobs = [background(worker(f"w{n}"), connect(own_dsn)) for n in range(4)]
    for job in jobs:
        job.result(90)
    found = lanes.execute("select key, msg_id from public.done order by n").fetchall()
    assert len(found) == 350
    for key in set(keys):
        line = [i for k, i in found if k == key]
        assert line == sorted(line) and len(line) == 50


def test_rotation_goes_on_while_a_key_is_held_back(lanes: Connection) -> None:
    a1, a2 = line_up(lanes, "aa")
    (message,) = take(lanes, "q", "w1")
    nack(lanes, message, "5 days")
    rotations = 0
    for _ in range(6):
        line_up(lanes, "bcd")
        work_off(lanes, "q", "w2")
        forced_tick(lanes, "q")
        work_off(lanes, "q", "w2")
        rotations += rotate(lanes, "q")
    assert rotations >= 4
    move_clock(lanes, "6 days")
    settle(lanes, "q")
    assert ids(work_off(lanes, "q", "w3")) == [a1, a2]


def test_a_consumer_beside_it_is_in_no_keyed_order(lanes: Connection) -> None:
    value(lanes, "select pgque.subscribe('q', 'free')")
    sent = line_up(lanes, "aaa")
    assert ids(take(lanes, "q", "w1", consumer="free")) == sent
    assert ids(take(lanes, "q", "w1")) == sent[:1]


def test_without_keyed_order_redelivery_is_by_id_as_far_as_it_goes(lanes: Connection) -> None:
    value(lanes, "select pgque.subscribe('q', 'free')")
    sent = line_up(lanes, "abcdef")
    first = take(lanes, "q", "w1", 4, consumer="free")
    assert release(lanes, first[0].batch_id) == 4
    assert ids(work_off(lanes, "q", "w2", 100, consumer="free")) == sent


def test_a_keyed_consumer_is_subscribed_once_and_a_change_of_keyed_order_is_refused(
    lanes: Connection,
) -> None:
    sent = line_up(lanes, "aa")
    assert value(lanes, "select pgque.subscribe('q', 'c', 'latest', keyed_order => true)") == 0
    assert ids(take(lanes, "q")) == sent[:1]


@pytest.mark.parametrize("delay", ["-1 second", "-1 day"])
def test_a_negative_delay_is_refused(conn: Connection, queue: str, delay: str) -> None:
    refused("PQ005", lambda: post(conn, queue, delay=delay))


def test_lines_are_not_mixed_up_by_acks_of_whole_batches(lanes: Connection) -> None:
    sent = line_up(lanes, "abcabcabc")
    got = []
    for number in range(3):
        batch = take(lanes, "q", f"w{number}")
        assert spell(batch) == "abc"
        got += ids(batch)
        assert ack(lanes, batch[0].batch_id) == 1
    assert got == sent
    assert offer(lanes, "q", 2) == ids(work_off(lanes, "q"))
