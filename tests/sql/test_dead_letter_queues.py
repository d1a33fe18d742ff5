"""Two source queues that give their dead to one nominated queue at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    forced_tick,
    ids,
    move_clock,
    nack_ids,
    offer,
    outcome,
    post,
    refused,
    rotate,
    subscribe,
    take,
    value,
    work_off,
)
from sql.test_races import Pair, pair

__all__ = ["pair"]

ENDS = pytest.mark.parametrize("end", ["commit", "rollback", "killed"])


@pytest.fixture
def graves(own: Connection) -> Connection:
    """Queues a and b, whose dead go to the queue grave; each has a consumer c."""
    for name in ("grave", "a", "b"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    for name in ("a", "b"):
        configure(own, name, dead_letter_queue="grave", max_retries=0)
    return own


def held(conn: Connection, queue: str, count: int = 3, worker: str = "w") -> tuple[int, list[int]]:
    """Put messages into a worker's hands; return the batch and their ids."""
    sent = offer(conn, queue, count)
    return take(conn, queue, worker, timeout="1 day")[0].batch_id, sent


def die(conn: Connection, token: int, sent: list[int]) -> None:
    """Give messages up."""
    assert outcome(conn, "dead", token, sent, "x") == dict.fromkeys(sent)


def end_as(conn: Connection, one: Connection, end: str) -> bool:
    """End the transaction of one; return whether it counts."""
    if end == "killed":
        value(conn, "select pg_terminate_backend(%s, 5000)", one.info.backend_pid)
    else:
        one.execute(end.encode())
    return end == "commit"


def buried(conn: Connection) -> Counter[tuple[str, int]]:
    """Work off the grave; return where the messages came from."""
    forced_tick(conn, "grave")
    about = [m.headers["pgque_dead"] for m in work_off(conn, "grave")]
    return Counter((a["queue"], a["msg_id"]) for a in about)


def named(queue: str, sent: list[int]) -> Counter[tuple[str, int]]:
    return Counter((queue, i) for i in sent)


@ENDS
@pytest.mark.parametrize("depth", ["0", "1000"])
def test_two_queues_bury_at_once_and_neither_waits(
    graves: Connection, pair: Pair, end: str, depth: str
) -> None:
    configure(graves, "grave", max_depth=depth)
    a, of_a = held(graves, "a")
    b, of_b = held(graves, "b")
    die(pair.one, a, of_a)
    job = pair.other(lambda c: die(c, b, of_b))
    assert job.done
    job.result()
    counts = end_as(graves, pair.one, end)
    assert buried(graves) == named("b", of_b) + (named("a", of_a) if counts else Counter())
    assert ids(work_off(graves, "a")) == ids(work_off(graves, "b")) == []
    assert ack(graves, a) == int(not counts)


@ENDS
def test_two_sessions_that_bury_from_both_queues_in_opposite_orders_do_not_block_each_other(
    graves: Connection, pair: Pair, end: str, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    batches = {(q, w): held(graves, q, worker=w) for q in ("a", "b") for w in ("one", "two")}
    two = connect(own_dsn, autocommit=False)
    two.execute("set statement_timeout = '5s'")
    die(pair.one, *batches["a", "one"])
    die(two, *batches["b", "two"])
    die(pair.one, *batches["b", "one"])
    die(two, *batches["a", "two"])
    counts = end_as(graves, pair.one, end)
    two.commit()
    expected = named("a", batches["a", "two"][1]) + named("b", batches["b", "two"][1])
    if counts:
        expected += named("a", batches["a", "one"][1]) + named("b", batches["b", "one"][1])
    assert buried(graves) == expected


@pytest.mark.parametrize("how", ["dead", "nack", "used up"])
def test_many_sessions_bury_from_two_queues_while_the_grave_is_worked_off_and_rotates(
    graves: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    how: str,
) -> None:
    for name in ("a", "b", "grave"):
        configure(graves, name, rotation_period="1 microsecond")
    if how == "used up":
        configure(graves, "a", max_receive_attempts=1)
        configure(graves, "b", max_receive_attempts=1)
    sent = {q: [i for _ in range(8) for i in offer(graves, q, 10)] for q in ("a", "b")}

    def gravedigger(order: str) -> Callable[[Connection], None]:
        def run(c: Connection) -> None:
            more = True
            while more:
                more = False
                with c.transaction():
                    # Both queues in one transaction, in one order or the other.
                    for name in order:
                        if not (
                            batch := take(c, name, "w", 3, "1 microsecond" if how == "used up" else "1 day")
                        ):
                            continue
                        more = True
                        if how == "dead":
                            die(c, batch[0].batch_id, ids(batch))
                        elif how == "nack":
                            found = nack_ids(c, batch[0].batch_id, ids(batch), "0", "x")
                            assert [r[1] for r in found] == [True] * len(batch)

        return run

    def undertaker(c: Connection) -> Counter[tuple[str, int]]:
        found: Counter[tuple[str, int]] = Counter()
        while not all(job.done for job in jobs):
            value(c, "select pgque.ticker()")
            found += buried(c)
            for name in ("grave", "a", "b"):
                rotate(c, name)
        return found

    # One order for all: hand-outs of a pool wait for each other.
    jobs = [background(gravedigger("ab"), connect(own_dsn)) for _ in range(3)]
    burial = background(undertaker, connect(own_dsn))
    for job in jobs:
        job.result(60)
    found = burial.result(60)
    move_clock(graves, "1 hour")
    for name in ("a", "b"):
        assert ids(work_off(graves, name)) == []
    value(graves, "select pgque.maint()")
    found += buried(graves)
    assert found == named("a", sent["a"]) + named("b", sent["b"])
    assert dead_letters(graves, "a") == dead_letters(graves, "b") == {}


@ENDS
def test_a_burial_meets_a_grave_that_is_being_paused(graves: Connection, pair: Pair, end: str) -> None:
    a, of_a = held(graves, "a")
    value(pair.one, "select pgque.pause('grave')")
    job = pair.other(lambda c: die(c, a, of_a))
    assert job.done  # it does not wait for the other's decision
    job.result()
    end_as(graves, pair.one, end)
    value(graves, "select pgque.resume('grave')")
    assert buried(graves) == named("a", of_a)
    b, of_b = held(graves, "b")
    value(graves, "select pgque.pause('grave')")
    die(graves, b, of_b)
    assert dead_letters(graves, "b") == dict.fromkeys(of_b, "x")


def test_two_queues_that_fill_the_grave_lose_nothing(graves: Connection, pair: Pair) -> None:
    configure(graves, "grave", max_depth=4)
    a, of_a = held(graves, "a")
    b, of_b = held(graves, "b")
    die(pair.one, a, of_a)
    job = pair.other(lambda c: die(c, b, of_b))
    pair.one.commit()
    job.result()
    _, more = held(graves, "a", 4)
    die(graves, take_again(graves, more), more)
    letters = [("a", i) for i in dead_letters(graves, "a")] + [("b", i) for i in dead_letters(graves, "b")]
    found = buried(graves)
    assert found + Counter(letters) == named("a", of_a + more) + named("b", of_b)
    # Each of those who bury at once may overshoot by what it buries.
    assert 4 <= sum(found.values()) <= 6


def take_again(conn: Connection, sent: list[int]) -> int:
    """Take messages that were leased back at once; return their batch."""
    assert value(conn, "select pgque.reclaim('a', 'c')") == 1
    batch = take(conn, "a", timeout="1 day")
    assert sorted(ids(batch)) == sent
    return batch[0].batch_id


@ENDS
def test_a_burial_that_waited_while_its_grave_was_dropped_makes_a_dead_letter(
    graves: Connection, pair: Pair, end: str
) -> None:
    a, of_a = held(graves, "a")
    assert value(pair.one, "select pgque.drop_queue('grave', true)") == 1
    job = pair.other(lambda c: die(c, a, of_a))
    assert not job.done
    dropped = end_as(graves, pair.one, end)
    job.result()
    if dropped:
        assert dead_letters(graves, "a") == dict.fromkeys(of_a, "x")
    else:
        assert buried(graves) == named("a", of_a)
    assert ack(graves, a) == 0


@ENDS
def test_a_grave_is_dropped_after_who_is_just_burying_there(graves: Connection, pair: Pair, end: str) -> None:
    a, of_a = held(graves, "a")
    die(pair.one, a, of_a)
    job = pair.other(lambda c: value(c, "select pgque.drop_queue('grave', true)"))
    assert not job.done
    counts = end_as(graves, pair.one, end)
    assert job.result() == 1
    assert dead_letters(graves, "a") == {}
    if not counts:
        die(graves, a, of_a)
        assert dead_letters(graves, "a") == dict.fromkeys(of_a, "x")
    b, of_b = held(graves, "b")
    die(graves, b, of_b)
    assert dead_letters(graves, "b") == dict.fromkeys(of_b, "x")


def test_who_buries_and_then_sends_to_the_source_does_not_deadlock_with_a_drop_of_the_grave(
    graves: Connection, pair: Pair
) -> None:
    a, of_a = held(graves, "a")
    die(pair.one, a, of_a)
    job = pair.other(lambda c: value(c, "select pgque.drop_queue('grave', true)"))
    assert not job.done
    pair.one.execute("set statement_timeout = '5s'")
    plain = post(pair.one, "a", "plain")
    pair.one.commit()
    assert job.result() == 1
    forced_tick(graves, "a")
    assert ids(work_off(graves, "a")) == [plain]


def test_a_grave_that_is_renamed_while_somebody_buries_is_found_by_its_id(
    graves: Connection, pair: Pair
) -> None:
    a, of_a = held(graves, "a")
    value(pair.one, "select pgque.rename_queue('grave', 'tomb')")
    job = pair.other(lambda c: die(c, a, of_a))
    pair.one.commit()
    job.result()
    b, of_b = held(graves, "b")
    die(graves, b, of_b)
    refused("PQ001", value, graves, "select pgque.ticker('grave')")
    forced_tick(graves, "tomb")
    about = [m.headers["pgque_dead"] for m in work_off(graves, "tomb")]
    assert Counter((x["queue"], x["msg_id"]) for x in about) == named("a", of_a) + named("b", of_b)
