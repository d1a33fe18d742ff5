"""key_concurrency: at most n messages of a key are leased at a time, over all workers of a consumer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    Message,
    ack,
    column,
    configure,
    extend,
    ids,
    move_clock,
    nack,
    nack_ids,
    outcome,
    refused,
    release,
    rotate,
    rows,
    settle,
    take,
    tick,
    value,
    work_off,
)

SET = "select pgque.set_key_concurrency('q', 'c', %s)"


@pytest.fixture
def two(own: Connection) -> Connection:
    """A database of its own with a queue q whose consumer c gets two messages of a key at a time."""
    value(own, "select pgque.create_queue('q')")
    assert value(own, "select pgque.subscribe('q', 'c', key_concurrency => 2)") == 1
    return own


def line_up(conn: Connection, keys: str) -> list[int]:
    """Send a message for each letter, its partition key ("." has none), and tick; return the ids."""
    sent = value(
        conn,
        "select pgque.send_batch('q', 't', %s::text[], partition_keys => array_replace(%s::text[], '.', null))",
        list(keys),
        list(keys),
    )
    tick(conn, "q")
    return list(sent)


def spell(batch: list[Message]) -> str:
    """The payloads of a batch."""
    return "".join(str(m.payload) for m in batch)


def test_two_messages_of_a_key_are_out_and_each_ack_frees_one(two: Connection) -> None:
    line_up(two, "aaaaab.b.")
    first = take(two, "q", "w1")
    assert spell(first) == "aab.b."
    assert take(two, "q", "w2") == take(two, "q", "w1") == []
    outcome(two, "ack", first[0].batch_id, ids(first)[:1])
    second = take(two, "q", "w2")
    assert spell(second) == "a"
    assert take(two, "q", "w3") == []
    assert ack(two, first[0].batch_id) == 1
    assert spell(take(two, "q", "w3")) == "a"
    line_up(two, "aba")
    assert spell(take(two, "q", "w4")) == "b"
    assert ack(two, second[0].batch_id) == 1
    assert spell(take(two, "q", "w4")) == "a"


def test_batches_of_one_share_the_limit(two: Connection) -> None:
    line_up(two, "aaaa")
    batches = [take(two, "q", f"w{n}", 1) for n in range(3)]
    assert [spell(batch) for batch in batches] == ["a", "a", ""]
    assert ack(two, batches[0][0].batch_id) == 1
    assert spell(take(two, "q", "w3", 1)) == "a"


def test_what_was_held_back_goes_before_newer_messages_of_its_key(two: Connection) -> None:
    sent = line_up(two, "aaaa")
    first = take(two, "q", "w1")
    newer = line_up(two, "ab")
    assert ids(take(two, "q", "w2")) == newer[1:]
    assert ack(two, first[0].batch_id) == 1
    assert ids(take(two, "q", "w3")) == sent[2:]


def test_a_retry_that_is_not_due_does_not_block_its_key(two: Connection) -> None:
    sent = line_up(two, "aa")
    batch = take(two, "q", "w1")
    assert len(nack_ids(two, batch[0].batch_id, ids(batch), "1 hour")) == 2
    sent += line_up(two, "aa")
    later = take(two, "q", "w2", timeout="1 day")
    assert ids(later) == sent[2:]
    move_clock(two, "2 hours")
    settle(two, "q")
    assert take(two, "q", "w3") == []  # it is due, and two others are leased
    outcome(two, "ack", later[0].batch_id, sent[2:3])
    assert ids(take(two, "q", "w3")) == sent[:1]


@pytest.mark.parametrize("how", ["lapse", "release", "nack", "reclaim"])
def test_redeliveries_count_like_first_deliveries(two: Connection, how: str) -> None:
    line_up(two, "aaaaaa")
    first = take(two, "q", "w1", timeout="1 minute")
    if how == "lapse":
        move_clock(two, "2 minutes")
    elif how == "release":
        assert release(two, first[0].batch_id) == 2
    elif how == "nack":
        assert nack(two, first[0]) == nack(two, first[1]) == 1
    else:
        assert value(two, "select pgque.reclaim('q', 'c')") == 1
    held = [m for n in range(4) for m in take(two, "q", f"v{n}", 1 + n)]
    assert len(held) == 2 and set(ids(first)) <= set(ids(held))
    assert len(work_off(two, "q", "w")) == 0
    for message in held:
        outcome(two, "ack", message.batch_id, [message.msg_id])
    assert len(work_off(two, "q", "w")) == 4


def test_a_lease_that_expired_is_not_extended_once_others_have_the_places_of_its_key(two: Connection) -> None:
    sent = line_up(two, "aaa")
    first = take(two, "q", "w1", 1, "10 minutes")
    assert ids(take(two, "q", "w2", 1, "10 minutes")) == sent[1:2]
    nack_ids(two, first[0].batch_id, sent[:1], "5 minutes")
    later = take(two, "q", "w2", 3, "10 minutes")
    assert ids(later) == sent[2:3]
    move_clock(two, "11 minutes")
    settle(two, "q")
    assert ids(take(two, "q", "w3", 1)) == sent[1:2]
    assert extend(two, later[0].batch_id, "0 seconds") == 1  # one place is free
    assert ids(take(two, "q", "w3", 1)) == sent[:1]
    assert extend(two, later[0].batch_id, "1 hour") == 0


def test_a_dead_message_frees_its_place(two: Connection) -> None:
    sent = line_up(two, "aaa")
    batch = take(two, "q", "w1")
    outcome(two, "dead", batch[0].batch_id, sent[:1], "broken")
    assert ids(take(two, "q", "w2")) == sent[2:]


def test_keyed_order_is_key_concurrency_1(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    assert value(own, "select pgque.subscribe('q', 'c', keyed_order => true)") == 1
    assert value(own, "select pgque.subscribe('q', 'c', key_concurrency => 1)") == 0
    assert value(own, "select pgque.subscribe('q', 'c', keyed_order => true, key_concurrency => 1)") == 0
    assert value(own, SET, 1) == 0
    assert column(own, "select sub_key_concurrency from pgque.subscription") == [1]


def test_it_is_raised_while_messages_wait_for_their_key(own: Connection) -> None:
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c', keyed_order => true)")
    sent = line_up(own, "aaaaaa")
    first = take(own, "q", "w1")
    assert ids(first) == sent[:1]
    assert value(own, SET, 3) == 1
    second = take(own, "q", "w2")
    assert ids(second) == sent[1:3]
    assert take(own, "q", "w3") == []
    assert ack(own, first[0].batch_id) == ack(own, second[0].batch_id) == 1
    assert ids(work_off(own, "q", "w4")) == sent[3:]


def test_it_is_lowered_while_messages_are_out(own: Connection) -> None:
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c', key_concurrency => 3)")
    sent = line_up(own, "aaaaaa")
    first = take(own, "q", "w1")
    assert ids(first) == sent[:3]
    assert value(own, SET, 1) == 1
    outcome(own, "ack", first[0].batch_id, sent[:2])
    assert take(own, "q", "w2") == []
    assert nack(own, first[2], "1 hour") == 1
    assert take(own, "q", "w2") == []  # the order of the key is kept from now on
    move_clock(own, "2 hours")
    settle(own, "q")
    assert ids(work_off(own, "q", "w2")) == sent[2:]


@pytest.mark.parametrize("delivery", ["ordinary", "general", "chosen"])
def test_it_begins_and_ends_while_messages_are_out(own: Connection, delivery: str) -> None:
    value(own, "select set_config('pgque.ordinary', %s, false)", "off" if delivery == "general" else "on")
    value(own, "select pgque.create_queue('q')")
    if delivery == "chosen":  # because the queue has had a message with a ttl
        value(own, "select pgque.send('q', 't', 'before'::text, ttl => '1 hour')")
        tick(own, "q")
    value(own, "select pgque.subscribe('q', 'c')")
    sent = line_up(own, "aabb.")
    first = take(own, "q", "w1", 2, timeout="1 day")
    other = take(own, "q", "w2", timeout="1 day")
    assert ids(first + other) == sent
    nack_ids(own, other[0].batch_id, sent[2:3], "1 minute")
    assert value(own, SET, 2) == 1
    line_up(own, "aab")
    second = take(own, "q", "w2", timeout="1 day")
    assert spell(second) == "b"
    move_clock(own, "2 minutes")
    settle(own, "q")
    assert take(own, "q", "w3") == []  # the message that failed is of a key that has two out
    outcome(own, "ack", first[0].batch_id, sent[:1])
    assert spell(take(own, "q", "w3", timeout="1 day")) == "a"
    assert value(own, SET, None) == 1
    assert sorted(spell(work_off(own, "q", "w4"))) == ["a", "b"]
    line_up(own, "aaaa")
    assert spell(take(own, "q", "w5")) == "aaaa"


REFUSED = [
    ("subscribe('q', 'new', key_concurrency => 0)", "PQ005", "at least 1"),
    ("subscribe('q', 'new', key_concurrency => -3)", "PQ005", "at least 1"),
    ("subscribe('q', 'new', keyed_order => true, key_concurrency => 2)", "PQ005", "keyed_order is"),
    ("subscribe('q', 'c', key_concurrency => 3)", "PQ006", "set_key_concurrency('q', 'c', 3)"),
    ("subscribe('q', 'plain', key_concurrency => 3)", "PQ006", "key_concurrency null"),
    ("set_key_concurrency('q', 'c', 0)", "PQ005", "at least 1"),
    ("set_key_concurrency('q', 'plain', 2)", "PQ006", "share_consumer('q', 'plain')"),
    ("set_key_concurrency('q', 'coop', 2)", "PQ006", "subconsumers"),
    ("set_key_concurrency('q', 'nobody', 2)", "PQ011", "nobody"),
    ("unshare_consumer('q', 'c')", "PQ006", "set_key_concurrency('q', 'c', null)"),
    ("next_batch('q', 'c')", "PQ005", "has workers"),
]


def test_what_cannot_be_is_refused(two: Connection) -> None:
    value(two, "select pgque.subscribe('q', 'plain'), pgque.register_subconsumer('q', 'coop', 'w')")
    for call, sqlstate, says in REFUSED:
        assert says in str(refused(sqlstate, value, two, f"select pgque.{call}")), call
    assert value(two, "select count(*) from pgque.get_consumer_info('q') where consumer_name = 'new'") == 0


def test_a_pool_without_the_limit_may_read_on_its_own_again(two: Connection) -> None:
    sent = line_up(two, "aaa")
    assert len(take(two, "q", "w1")) == 2
    assert value(two, SET, None) == 1
    assert value(two, "select pgque.unshare_consumer('q', 'c')") == 1
    assert len(rows(two, "select * from pgque.receive('q', 'c')")) == len(sent)
    refused("PQ006", value, two, "select pgque.set_key_concurrency('q', 'c', 2)")


@pytest.mark.parametrize("ordinary", ["on", "off"])
def test_a_receive_that_waited_for_the_change_obeys_it(
    two: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    ordinary: str,
) -> None:
    value(two, SET, None)
    line_up(two, "aaa")
    admin = transaction("read committed", own_dsn)
    value(admin, SET, 2)
    worker = connect(own_dsn)
    value(worker, f"select set_config('pgque.ordinary', '{ordinary}', false)")
    job = background(lambda c: take(c, "q", "w1"), worker)
    wait_for_lock(worker.info.backend_pid)
    admin.execute("commit")
    assert spell(job.result(30)) == "aa"


def test_health_and_list_workers_show_what_waits_for_a_key(two: Connection) -> None:
    line_up(two, "aaaaab")
    first = take(two, "q", "w1", 1, "1 day")
    assert spell(take(two, "q", "w2", 100, "1 day")) == "ab"
    workers = "select worker, messages, waiting from pgque.list_workers('q') order by worker"
    assert rows(two, workers) == [("w1", 1, 3), ("w2", 2, 3)]
    check = "select detail from pgque.health('q') where check_name = 'retries'"
    busy = "0 due, 3 wait for their consumers, 3 of them for a busy key (keys: 1)"
    assert value(two, check) == busy
    assert ack(two, first[0].batch_id) == 1
    assert rows(two, workers) == [("w2", 2, 0)]
    assert value(two, check) == "0 due, 3 wait for their consumers"
    assert value(two, SET, 1) == 1
    assert rows(two, workers) == [("w2", 2, 3)]
    assert value(two, check) == busy


def test_with_order_what_waits_for_a_retry_of_its_key_waits_for_a_busy_key(two: Connection) -> None:
    value(two, SET, 1)
    line_up(two, "aaab")
    batch = take(two, "q", "w1")
    assert nack(two, batch[0], "1 hour") == 1
    assert rows(two, "select worker, waiting from pgque.list_workers('q')") == [("w1", 0)]
    detail = value(two, "select detail from pgque.health('q') where check_name = 'retries'")
    assert detail == "0 due, 2 wait for their consumers, 2 of them for a busy key (keys: 1)"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True])
def test_the_limit_holds_in_any_history(own: Connection, changes: bool) -> None:
    """Nothing is lost, and never are more of a key leased than the limit. While that is 1, order is kept."""
    dice = random.Random(4)  # noqa: S311
    limit = 1
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c', keyed_order => true)")
    configure(own, "q", max_retries=1000, max_receive_attempts=1000)
    sent: dict[str, list[int]] = {}
    held: list[list[Message]] = []
    done: dict[str, list[int]] = {}
    minutes = 0
    for turn in range(200):
        if turn < 100:
            keys = "".join(dice.choice("aabcd.") for _ in range(dice.randrange(1, 8)))
            for key, msg_id in zip(keys, line_up(own, keys), strict=True):
                sent.setdefault(key, []).append(msg_id)
        if changes and turn % 25 == 24:
            limit = dice.choice([1, 2, 4])
            value(own, SET, limit)
        out = Counter(str(m.payload) for b in held for m in b)
        batch = take(own, "q", f"w{turn % 5}", dice.choice([1, 2, 100]), "10 minutes")
        for key, count in Counter(str(m.payload) for m in batch).items():
            assert key == "." or out[key] + count <= limit
        held += [batch] * bool(batch)
        if held and (len(held) > 3 or turn >= 100):
            batch = held.pop(dice.randrange(len(held)))
            some = sorted(dice.sample(batch, dice.randrange(1, len(batch) + 1)))
            fate = dice.random()
            if fate < 0.2:
                nack_ids(own, batch[0].batch_id, ids(some), dice.choice(["0", "5 minutes"]))
            elif fate < 0.3:
                assert release(own, batch[0].batch_id, ids(some)) == len(some)
            elif fate < 0.35:  # all leases expire
                minutes += 11
                move_clock(own, f"{minutes} minutes")
                held, some = [], batch
            else:
                assert set(outcome(own, "ack", batch[0].batch_id, ids(some)).values()) == {None}
                for m in some:
                    done.setdefault(str(m.payload), []).append(m.msg_id)
            rest = [m for m in batch if m not in some]
            held += [rest] * bool(rest)
        settle(own, "q")
        if turn % 20 == 0:
            rotate(own, "q")
            value(own, "select pgque.maint()")
    minutes += 20
    move_clock(own, f"{minutes} minutes")
    settle(own, "q")
    for message in work_off(own, "q", "last"):
        done.setdefault(str(message.payload), []).append(message.msg_id)
    ordered = not changes
    assert {key: line if ordered and key != "." else sorted(line) for key, line in done.items()} == sent


@pytest.mark.slow
def test_workers_in_parallel_never_have_more_of_a_key_than_the_limit(
    two: Connection, own_dsn: str, connect: Callable[..., Connection], background: Callable[..., Any]
) -> None:
    """Each worker notes what it has, checks what all have, and forgets it before its ack."""
    two.execute("create table public.held (key text, msg_id bigint primary key)")
    two.execute("create table public.done (msg_id bigint primary key)")
    keys = ["ab."[n % 3] for n in range(300)]
    sent = line_up(two, "".join(keys))

    def worker(name: str) -> Callable[[Connection], int]:
        def run(c: Connection) -> int:
            most = idle = 0
            while idle < 20:
                batch = take(c, "q", name, 100, "1 day")
                idle = 0 if batch else idle + 1
                c.cursor().executemany(
                    "insert into public.held values (%s, %s)", [(m.payload, m.msg_id) for m in batch]
                )
                found = column(c, "select count(*) from public.held where key <> '.' group by key")
                most = max([most, *found])
                for m in batch:
                    c.execute(
                        "with gone as (delete from public.held where msg_id = %s returning msg_id)"
                        " insert into public.done select msg_id from gone",
                        [m.msg_id],
                    )
                if batch and name == "w0":
                    outcome(c, "ack", batch[0].batch_id, ids(batch))
                elif batch:
                    assert ack(c, batch[0].batch_id) == 1
            return most

        return run

    jobs = [background(worker(f"w{n}"), connect(own_dsn)) for n in range(4)]
    assert max(job.result(90) for job in jobs) == 2
    assert column(two, "select msg_id from public.done order by 1") == sent
