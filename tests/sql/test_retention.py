"""Retention while a window is open: nothing that was delivered comes again, and nothing young is lost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from model.bench import turn_journal
from sql.helpers import (
    Connection,
    Message,
    ack,
    configure,
    dead_letters,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    post,
    pump,
    receive,
    receive_coop,
    refused,
    send_many,
    take,
    tick,
    value,
    work_off,
)

KINDS = ["plain", "pool", "ordered", "subconsumers"]
RETAIN = "select pgque.maint_retain('q')"


def retain(conn: Connection) -> None:
    """Do what there is to do of retention."""
    while value(conn, RETAIN):
        pass


def skipped(conn: Connection) -> int:
    """Tell how many messages get_consumer_info() says that consumer c has missed."""
    found: int = value(conn, "select i.skipped_events from pgque.get_consumer_info('q', 'c') i")
    return found


def ready(conn: Connection, kind: str) -> Callable[..., list[Message]]:
    """Make a queue q whose consumer c is of the kind; return what receives: (worker, count)."""
    value(conn, "select pgque.create_queue('q')")
    if kind == "subconsumers":
        value(conn, "select pgque.register_subconsumer('q', 'c', 'w1')")
    else:
        value(conn, "select pgque.subscribe('q', 'c', keyed_order => %s)", kind == "ordered")
    configure(conn, "q", retention_period="10 minutes", rotation_period="1 hour", max_retries=5)
    return {
        "plain": lambda worker, count: receive(conn, "q", count=count),
        "subconsumers": lambda worker, count: receive_coop(conn, "q", worker, count),
    }.get(kind, lambda worker, count: take(conn, "q", worker, count, "1 hour"))


def one_a_minute(conn: Connection, count: int, keyed: bool = False, first: int = 0) -> list[int]:
    """Send messages a minute apart, each with a tick of its own; return their ids."""
    sent = []
    for minute in range(first, first + count):
        move_clock(conn, f"{minute} minutes")
        more = {"key": f"k{minute}"} if keyed else {}
        sent.append(post(conn, "q", str(minute), partition_key=f"p{minute % 3}", **more))
        tick(conn, "q")
    return sent


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("kind", ["pool", "subconsumers"])
def test_what_a_worker_has_of_an_open_window_comes_to_no_other_when_retention_runs(
    own: Connection, kind: str, keyed: bool
) -> None:
    get = ready(own, kind)
    sent = one_a_minute(own, 11, keyed)
    held = get("w1", 5)
    assert ids(held) == sent[:5]
    move_clock(own, "13 minutes")
    retain(own)
    others = [m.msg_id for m in get("w2", 100)]
    assert others == sent[5:]
    if kind == "pool":  # what a worker has it may finish, however old it is
        assert outcome(own, "ack", held[0].batch_id, ids(held)) == dict.fromkeys(ids(held))
        assert dead_letters(own, "q") == {}
        assert skipped(own) == 0
    else:
        assert ack(own, held[0].batch_id) == 1
        assert set(dead_letters(own, "q")) < set(ids(held))
    assert get("w3", 100) == []


@pytest.mark.parametrize("policy", ["dead_letter", "drop"])
@pytest.mark.parametrize(("keyed", "acked"), [(False, 8), (False, 16), (True, 16)])
def test_messages_that_a_consumer_acked_of_an_open_window_are_not_redelivered(
    own: Connection, keyed: bool, acked: int, policy: str
) -> None:
    ready(own, "plain")
    configure(own, "q", drop_policy=policy)
    sent = one_a_minute(own, 20, keyed)
    batch = receive(own, "q")
    assert outcome(own, "ack", batch[0].batch_id, sent[:acked]) == dict.fromkeys(sent[:acked])
    move_clock(own, "21 minutes")
    retain(own)
    rest = receive(own, "q")
    lost = sent[acked : -len(rest)]
    assert bool(lost) == (acked == 8)
    assert sent[:acked] + lost + ids(rest) == sent
    assert skipped(own) == len(lost)
    assert sorted(dead_letters(own, "q")) == (lost if policy == "dead_letter" else [])
    assert ack(own, rest[0].batch_id) == 1
    assert receive(own, "q") == []


@pytest.mark.parametrize("kind", ["plain", "subconsumers"])
def test_an_open_batch_loses_what_is_too_old_and_keeps_the_rest(own: Connection, kind: str) -> None:
    get = ready(own, kind)
    sent = one_a_minute(own, 15)
    batch = get("w1", 12)
    assert nack(own, batch[11], "10 days") == 1
    turn_journal(own)
    move_clock(own, "16 minutes")
    retain(own)
    dead = sorted(dead_letters(own, "q"))
    assert 4 <= len(dead) <= 7 and dead == sent[: len(dead)]
    again = get("w1", 100)
    assert {m.batch_id for m in again} == {batch[0].batch_id}
    assert ids(again) == sent[len(dead) : 11]
    # Whoever worked on one of the others is told that it has its outcome, and moves nothing.
    assert nack(own, batch[0]) == 1
    assert outcome(own, "ack", batch[0].batch_id, sent[:1]) == {sent[0]: "settled already"}
    assert sorted(dead_letters(own, "q")) == dead
    configure(own, "q", max_depth=len(again) + 5)  # three behind the batch, one that waits, one more
    late = send_many(own, "q", 1)
    refused("PQ003", send_many, own, "q", 1)
    tick(own, "q")
    assert ack(own, batch[0].batch_id) == 1
    assert ids(get("w1", 100)) == sent[12:] + late


def test_retention_in_parts_goes_through_an_open_batch(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c')")
    for _ in range(3):
        sent = offer(own, "q", 6_000)
    assert len(receive(own, "q", count=50_000)) == 18_000
    move_clock(own, "8 days")
    young = offer(own, "q", 1)
    calls = 0
    while value(own, RETAIN):
        calls += 1
        assert value(own, "select count(*) from pgque.dead_letter") == min(10_000 * calls, 18_000)
    assert calls == 2 and sent[-1] in dead_letters(own, "q")
    assert ids(receive(own, "q")) == young


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_every_message_is_done_once_or_too_old_whatever_retention_meets(
    own: Connection, kind: str, keyed: bool, seed: int
) -> None:
    get = ready(own, kind)
    chance = random.Random(f"{seed} {kind} {keyed}")  # noqa: S311
    sent: list[int] = []
    done: list[int] = []
    held: dict[str, list[Message]] = {}
    for minute in range(40):
        sent += one_a_minute(own, 1, keyed, minute)
        worker = chance.choice(["w1", "w2", "w3"]) if kind != "plain" else "w1"
        if chance.random() < 0.6:
            continue
        if worker in held:
            batch = held.pop(worker)
            accepted = outcome(own, "ack", batch[0].batch_id, ids(batch))
            done += [i for i, reason in accepted.items() if reason is None]
            ack(own, batch[0].batch_id)
        elif batch := get(worker, chance.randint(1, 6)):
            assert not set(ids(batch)) & {m.msg_id for b in held.values() for m in b}
            held[worker] = batch
        if chance.random() < 0.5:
            retain(own)
            pump(own)
        if chance.random() < 0.2:
            turn_journal(own)
    for batch in held.values():
        done += [i for i, why in outcome(own, "ack", batch[0].batch_id, ids(batch)).items() if why is None]
        ack(own, batch[0].batch_id)
    while rest := get("w1", 10):
        done += ids(rest)
        assert ack(own, rest[0].batch_id) == 1
    assert sorted([*done, *dead_letters(own, "q")]) == sent


def test_what_waits_too_long_is_taken_away_in_parts(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c')")
    for _ in range(3):
        offer(own, "q", 5_000)
        batch = take(own, "q", "w1", 5_000)
        value(
            own,
            "select count(*) from pgque.nack(%s, %s::bigint[], '1 day')",
            batch[0].batch_id,
            ids(batch),
        )
    move_clock(own, "8 days 1 minute")
    left = []
    while True:
        more = value(own, RETAIN)
        left.append(value(own, "select count(*) from pgque.retry_queue"))
        if not more:
            break
    assert left[0] == 5_000 and left[-1] == 0
    assert value(own, "select count(*) from pgque.dead_letter") == 15_000


def test_messages_whose_last_lease_expired_are_given_up_in_parts(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c')")
    offer(own, "q", 12_000)
    batch = take(own, "q", "w1", 12_000, "1 minute")
    value(own, "select pgque.set_visibility(%s, '1 minute')", batch[0].batch_id)
    configure(own, "q", max_receive_attempts=1)
    move_clock(own, "1 hour")
    judged = []
    while count := value(own, "select pgque.maint_lapsed()"):
        judged.append(count)
    assert judged == [10_000, 2_000]
    assert value(own, "select count(*) from pgque.dead_letter") == 12_000
    assert work_off(own, "q") == []
