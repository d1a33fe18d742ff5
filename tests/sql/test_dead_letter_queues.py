"""Dead letters that the ticker forwards to the queue that dead_letter_queue names."""

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
    forward_letters,
    ids,
    move_clock,
    nack_ids,
    offer,
    outcome,
    receive,
    refused,
    rotate,
    rows,
    send,
    settle,
    subscribe,
    take,
    value,
    work_off,
)
from sql.test_install import install, install_earlier
from sql.test_races import Pair, pair

__all__ = ["pair"]

ENDS = pytest.mark.parametrize("end", ["commit", "rollback", "killed"])
DROPS = pytest.mark.parametrize("end", ["commit", "rollback"])
TICKERS = (
    "select pgque.ticker()",
    "select pgque.maint()",
    "call pgque.ticker_loop('50 milliseconds')",
)


@pytest.fixture
def graves(own: Connection) -> Connection:
    """Queues a and b, whose dead letters go to the queue grave; each has a consumer c."""
    for name in ("grave", "a", "b"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    for name in ("a", "b"):
        configure(own, name, dead_letter_queue="grave", max_retries=0)
    return own


def held(conn: Connection, queue: str, count: int = 3, worker: str = "w") -> tuple[int, list[int]]:
    """Let a worker receive messages; return the batch and their ids."""
    sent = offer(conn, queue, count)
    return take(conn, queue, worker, timeout="1 day")[0].batch_id, sent


def die(conn: Connection, token: int, sent: list[int]) -> None:
    """Give messages up."""
    assert outcome(conn, "dead", token, sent, "x") == dict.fromkeys(sent)


def given_up(conn: Connection, queue: str, count: int = 3) -> list[int]:
    """Send messages and give them up; return their ids."""
    token, sent = held(conn, queue, count)
    die(conn, token, sent)
    return sent


def end_as(conn: Connection, one: Connection, end: str) -> bool:
    """End the transaction of one; return whether it counts."""
    if end == "killed":
        value(conn, "select pg_terminate_backend(%s, 5000)", one.info.backend_pid)
    else:
        one.execute(end.encode())
    return end == "commit"


def delivered(conn: Connection) -> list[tuple[str, int]]:
    """Work off what the grave has; return where the messages came from, in their order."""
    forced_tick(conn, "grave")
    about = [m.headers["pgque_dead"] for m in work_off(conn, "grave")]
    return [(a["queue"], a["msg_id"]) for a in about]


def forwarded(conn: Connection) -> Counter[tuple[str, int]]:
    """Let a ticker forward letters; return which ones arrived."""
    forward_letters(conn)
    return Counter(delivered(conn))


def named(queue: str, sent: list[int]) -> Counter[tuple[str, int]]:
    return Counter((queue, i) for i in sent)


def test_every_ticker_forwards_a_dead_letter_once(graves: Connection) -> None:
    for call in TICKERS:
        sent = given_up(graves, "a")
        assert dead_letters(graves, "a") == dict.fromkeys(sent, "x")
        for _ in range(2):
            graves.execute(call.encode())
        assert dead_letters(graves, "a") == {}
        assert delivered(graves) == [("a", i) for i in sent]


def test_dead_letters_arrive_in_the_order_of_their_deaths(graves: Connection) -> None:
    for queue, count in (("a", 3), ("b", 2), ("a", 2)):
        token, sent = held(graves, queue, count)
        for msg_id in reversed(sent):
            die(graves, token, [msg_id])
    expected = rows(
        graves,
        "select q.queue_name, d.ev_id from pgque.dead_letter d join pgque.queue q on q.queue_id = d.dl_queue_id order by d.dl_id",
    )
    forward_letters(graves)
    assert delivered(graves) == expected
    assert [i for q, i in expected if q == "b"] == [2, 1]


def test_the_loop_forwards_a_dead_letter_as_soon_as_it_is_committed(
    graves: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    token, sent = held(graves, "a", 2)
    loop = background(lambda c: c.execute("call pgque.ticker_loop('30 seconds')"), connect(own_dsn))
    for msg_id in sent:
        die(graves, token, [msg_id])
        wait_until(lambda: dead_letters(graves, "a") == {}, "the loop forwards the letter")
    wait_until(
        lambda: value(graves, "select count(*) from pgque.peek('grave')") == 2, "both are in the grave"
    )
    value(graves, "select pgque.stop()")
    loop.result()
    assert delivered(graves) == [("a", i) for i in sent]


def test_the_loop_tries_a_queue_that_takes_no_letters_once_a_second_also_while_retries_are_due(
    graves: Connection, own_dsn: str, connect: Callable[..., Connection], wait_until: Callable[..., None]
) -> None:
    given_up(graves, "a", 1)
    value(graves, "select pgque.pause('grave')")
    rows(
        graves,
        "select pgque.send('b', 't', 'x', delay => g * interval '100 ms') from generate_series(1, 20) as g",
    )
    loop = connect(own_dsn)
    loop.execute("set track_functions = 'pl'")
    loop.execute("call pgque.ticker_loop('2 seconds')")
    loop.close()
    calls = "select f.calls from pg_stat_user_functions f where f.funcname = %s"
    wait_until(lambda: value(graves, calls, "maint_retry_events"), "the statistics of the loop")
    assert value(graves, calls, "maint_retry_events") > value(graves, calls, "_forward_letters") > 0


@ENDS
def test_of_two_tickers_one_forwards_a_letter_and_the_other_does_not_wait(
    graves: Connection, pair: Pair, end: str
) -> None:
    of_a = given_up(graves, "a")
    assert forward_letters(pair.one) == 3
    of_b = given_up(graves, "b")
    job = pair.other(forward_letters)
    assert job.done
    job.result()
    counts = end_as(graves, pair.one, end)
    assert Counter(delivered(graves)) == named("b", of_b) + (named("a", of_a) if counts else Counter())
    assert forwarded(graves) == (Counter() if counts else named("a", of_a))


def test_an_old_snapshot_forwards_no_letter_twice(
    graves: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    sent = given_up(graves, "a")
    old = transaction("repeatable read", own_dsn)
    old.execute("select 1 from pgque.queue")
    assert forwarded(graves) == named("a", sent)
    assert forward_letters(old) == 0
    old.execute("commit")
    assert forwarded(graves) == Counter()
    again = given_up(graves, "a")
    old.execute("begin isolation level repeatable read")
    assert forward_letters(old) == 3
    old.execute("commit")
    assert forwarded(graves) == named("a", again)


def test_two_sessions_that_give_up_from_both_queues_in_opposite_orders_do_not_block_each_other(
    graves: Connection, pair: Pair, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    batches = {(q, w): held(graves, q, worker=w) for q in ("a", "b") for w in ("one", "two")}
    two = connect(own_dsn, autocommit=False)
    two.execute("set statement_timeout = '5s'")
    die(pair.one, *batches["a", "one"])
    die(two, *batches["b", "two"])
    die(pair.one, *batches["b", "one"])
    die(two, *batches["a", "two"])
    pair.one.rollback()
    two.commit()
    assert forwarded(graves) == named("a", batches["a", "two"][1]) + named("b", batches["b", "two"][1])
    assert ack(graves, batches["a", "one"][0]) == 1


@pytest.mark.parametrize("how", ["nack", "used up"])
def test_each_dead_letter_is_forwarded_once_by_two_tickers_while_the_target_queue_rotates(
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

    def worker(order: str) -> Callable[[Connection], None]:
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
                        if how == "nack":
                            found = nack_ids(c, batch[0].batch_id, ids(batch), "0", "x")
                            assert [r[1] for r in found] == [True] * len(batch)

        return run

    def consumer(c: Connection) -> Counter[tuple[str, int]]:
        found: Counter[tuple[str, int]] = Counter()
        while not all(job.done for job in jobs):
            value(c, "select pgque.ticker()")
            found += Counter(delivered(c))
            for name in ("grave", "a", "b"):
                rotate(c, name)
        return found

    def other_ticker(c: Connection) -> None:
        while not all(job.done for job in jobs):
            forward_letters(c)

    # One order for all: deliveries of a pool wait for each other.
    jobs = [background(worker("ab"), connect(own_dsn)) for _ in range(3)]
    tickers = [background(consumer, connect(own_dsn)), background(other_ticker, connect(own_dsn))]
    for job in [*jobs, *tickers]:
        job.result(60)
    found = tickers[0].result()
    move_clock(graves, "1 hour")
    for name in ("a", "b"):
        assert ids(work_off(graves, name)) == []
    value(graves, "select pgque.maint()")
    found += forwarded(graves)
    assert found == named("a", sent["a"]) + named("b", sent["b"])
    assert dead_letters(graves, "a") == dead_letters(graves, "b") == {}


def test_letters_wait_while_their_queue_is_paused(graves: Connection, pair: Pair) -> None:
    a, of_a = held(graves, "a")
    value(pair.one, "select pgque.pause('grave')")
    job = pair.other(lambda c: die(c, a, of_a))
    assert job.done  # it does not wait for the other's decision
    job.result()
    pair.one.commit()
    assert forwarded(graves) == Counter()
    assert dead_letters(graves, "a") == dict.fromkeys(of_a, "x")
    value(graves, "select pgque.resume('grave')")
    assert forwarded(graves) == named("a", of_a)


def test_a_full_queue_takes_as_many_letters_as_it_has_room_for_and_the_others_later(
    graves: Connection,
) -> None:
    configure(graves, "grave", max_depth=4)
    of_a, of_b = given_up(graves, "a"), given_up(graves, "b")
    for _ in range(3):
        forward_letters(graves)
    assert len(dead_letters(graves, "a")) + len(dead_letters(graves, "b")) == 2
    found = delivered(graves)
    assert found == [*(("a", i) for i in of_a), ("b", of_b[0])]
    assert forwarded(graves) == named("b", of_b[1:])


@DROPS
def test_the_letters_of_a_dropped_queue_stay(graves: Connection, pair: Pair, end: str) -> None:
    a, of_a = held(graves, "a")
    assert value(pair.one, "select pgque.drop_queue('grave', true)") == 1
    job = pair.other(lambda c: die(c, a, of_a))
    assert job.done  # an outcome does not wait for the other queue
    job.result()
    assert forward_letters(graves) == 0  # nor does the ticker for long
    if end_as(graves, pair.one, end):
        forward_letters(graves)
        assert dead_letters(graves, "a") == dict.fromkeys(of_a, "x")
        assert value(graves, "select count(*) from pgque.dead_letter d where d.dl_forward is not null") == 0
    else:
        assert forwarded(graves) == named("a", of_a)
    assert ack(graves, a) == 0


@DROPS
def test_a_queue_is_dropped_after_a_ticker_that_is_just_forwarding_there(
    graves: Connection, pair: Pair, end: str
) -> None:
    sent = given_up(graves, "a")
    forward_letters(pair.one)
    job = pair.other(lambda c: value(c, "select pgque.drop_queue('grave', true)"))
    assert not job.done
    counts = end_as(graves, pair.one, end)
    assert job.result() == 1
    forward_letters(graves)
    assert dead_letters(graves, "a") == ({} if counts else dict.fromkeys(sent, "x"))


def test_letters_that_wait_stay_when_the_setting_changes(graves: Connection) -> None:
    value(graves, "select pgque.create_queue('other')")
    changes: list[dict[str, Any]] = [
        {"dead_letter_queue": "other"},
        {"dead_letter_queue": None},
        {"drop_policy": "hold"},
    ]
    for setting in changes:
        sent = given_up(graves, "a")
        configure(graves, "a", **setting)
        assert forwarded(graves) == Counter()
        configure(graves, "a", dead_letter_queue="grave", drop_policy="dead_letter")
        assert forwarded(graves) == Counter()
        assert {i: dead_letters(graves, "a")[i] for i in sent} == dict.fromkeys(sent, "x")
    again = given_up(graves, "a")
    assert forwarded(graves) == named("a", again)


def test_a_queue_that_is_renamed_gets_the_letters(graves: Connection) -> None:
    sent = given_up(graves, "a")
    value(graves, "select pgque.rename_queue('grave', 'tomb')")
    forward_letters(graves)
    settle(graves, "tomb")
    about = [m.headers["pgque_dead"] for m in work_off(graves, "tomb")]
    assert [(x["queue"], x["msg_id"]) for x in about] == [("a", i) for i in sent]


def test_a_letter_that_waits_is_a_dead_letter_like_any_other(graves: Connection) -> None:
    calls = {
        "select pgque.dlq_requeue(%s)": 1,
        "select pgque.dlq_replay(%s)": 1,
        "select pgque.dlq_delete(%s)": 0,
        "select pgque.dlq_purge('a', '0') where %s > 0": 0,
    }
    letters = "select m.dl_id, m.msg_id, m.status from pgque.list_messages('a') m where m.dl_id is not null"
    for call, redelivered in calls.items():
        value(graves, "select pgque.pause('grave')")
        (sent,) = given_up(graves, "a", 1)
        forward_letters(graves)
        ((dl_id, *letter),) = rows(graves, letters)
        assert letter == [sent, "dead"]
        value(graves, call, dl_id)
        value(graves, "select pgque.resume('grave')")
        assert forwarded(graves) == Counter()
        forced_tick(graves, "a")
        assert len(work_off(graves, "a")) == redelivered
        refused("PQ008", value, graves, "select pgque.dlq_requeue(%s)", dl_id)


def test_a_letter_does_not_expire_before_it_is_forwarded(graves: Connection) -> None:
    value(graves, "select pgque.send('a', 't', 'x', ttl => '1 minute')")
    forced_tick(graves, "a")
    (message,) = take(graves, "a", timeout="1 day")
    move_clock(graves, "1 hour")
    die(graves, message.batch_id, [message.msg_id])
    assert value(graves, "select pgque.delete_expired('a')") == 0
    assert forwarded(graves) == named("a", [message.msg_id])


def test_health_and_metrics_show_letters_that_have_waited_for_a_minute(graves: Connection) -> None:
    check = "select h.status, h.detail, h.advice from pgque.health('a') h where h.check_name = 'dead letters'"
    metric = (
        "select m.value from pgque.metrics() m where (m.metric, m.queue) = ('pgque_queue_dead_letters', 'a')"
    )
    value(graves, "select pgque.pause('grave')")
    given_up(graves, "a")
    assert (rows(graves, check)[0][0], value(graves, metric)) == ("ok", 0)
    move_clock(graves, "2 minutes")
    assert value(graves, metric) == 3
    ((status, detail, advice),) = rows(graves, check)
    assert (status, detail) == ("warn", "0, 3 wait to be forwarded")
    assert "Resume the queue that dead_letter_queue names" in advice
    value(graves, "select pgque.resume('grave')")
    forward_letters(graves)
    assert rows(graves, check)[0][0] == "ok"


def test_a_call_forwards_few_large_letters_since_no_queue_ticks_meanwhile(graves: Connection) -> None:
    for _ in range(5):
        value(graves, "select pgque.send('a', repeat('x', 400000))")
    settle(graves, "a")
    batch = take(graves, "a")
    die(graves, batch[0].batch_id, ids(batch))
    assert [forward_letters(graves) for _ in range(3)] == [3, 2, None]
    assert delivered(graves) == [("a", i) for i in ids(batch)]


def test_a_letter_that_cannot_be_forwarded_does_not_keep_the_letters_of_other_queues(
    graves: Connection,
) -> None:
    value(graves, "select pgque.create_queue('tomb')")
    configure(graves, "b", dead_letter_queue="tomb")
    value(graves, "select pgque.pause('grave')")
    given_up(graves, "a", 1)
    given_up(graves, "b", 1)
    forward_letters(graves)
    assert len(dead_letters(graves, "a")) == 1
    assert dead_letters(graves, "b") == {}


def test_a_ticker_without_letters_to_forward_reads_no_dead_letter(
    graves: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    """An idle loop calls this in each of its rounds."""
    configure(graves, "a", dead_letter_queue=None)
    given_up(graves, "a", 100)
    read = "select s.idx_scan, s.seq_scan, s.seq_tup_read + s.idx_tup_fetch from pg_stat_xact_user_tables s where s.relname = 'dead_letter'"
    fresh = transaction(dsn=own_dsn)
    assert forward_letters(fresh) is None
    assert rows(fresh, read) == [(1, 0, 0)]


@pytest.mark.parametrize("version", ["0.7.0", "0.8.0"])
def test_an_upgrade_keeps_letters_and_forwards_what_is_given_up_after_it(
    version: str, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    install_earlier(fresh_dsn, version)
    own = connect(fresh_dsn)
    for name in ("grave", "a"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    configure(own, "a", dead_letter_queue="grave")
    value(own, "select pgque.pause('grave')")
    kept = given_up(own, "a")
    value(own, "select pgque.resume('grave')")
    before = given_up(own, "a")  # earlier versions send at once
    token, after = held(own, "a")
    giving_up = connect(fresh_dsn)
    install(fresh_dsn)
    die(giving_up, token, after)
    assert forwarded(own) == named("a", before + after)
    assert dead_letters(own, "a") == dict.fromkeys(kept, "x")


def test_a_message_is_given_up_by_a_role_that_may_not_send_to_the_other_queue(
    graves: Connection, own_dsn: str
) -> None:
    sent = send(graves, "a")
    forced_tick(graves, "a")
    graves.execute("set role pgque_reader")
    (message,) = receive(graves, "a")
    assert nack_ids(graves, message.batch_id, [sent])[0][1]
    graves.execute("reset role")
    assert forwarded(graves) == named("a", [sent])
