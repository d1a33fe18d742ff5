"""How full a queue gets, how fast it is handed out, and where settings come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    drain,
    forced_tick,
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
    rows,
    send,
    send_many,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)


def stop_clock(conn: Connection, second: float) -> None:
    """Let the engine's clock stand still so many seconds after a time of day."""
    conn.execute(
        "create or replace function pgque.clock() returns timestamptz language sql volatile as"
        f" $$ select timestamptz '2040-01-01' + interval '{second} seconds' $$".encode()
    )


@pytest.mark.parametrize("ticked", [True, False])
def test_a_queue_takes_as_many_messages_as_its_depth_and_not_one_more(
    conn: Connection, subscribed: str, ticked: bool
) -> None:
    configure(conn, subscribed, max_depth=5)
    sent = []
    for _ in range(5):
        sent.append(send(conn, subscribed))
        if ticked:
            tick(conn, subscribed)
    error = refused("PQ003", send, conn, subscribed)
    assert subscribed in str(error)
    refused("PQ003", send_many, conn, subscribed, 1)
    tick(conn, subscribed)
    assert ids(take(conn, subscribed)) == sent


def test_a_batch_that_would_pass_the_depth_inserts_nothing(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, max_depth=5)
    refused("PQ005", send_many, conn, subscribed, 6)
    sent = send_many(conn, subscribed, 3)
    refused("PQ003", send_many, conn, subscribed, 3)
    sent += send_many(conn, subscribed, 2)
    tick(conn, subscribed)
    assert ids(work_off(conn, subscribed)) == sent
    assert len(send_many(conn, subscribed, 5)) == 5


@pytest.mark.parametrize("plain", [True, False])
def test_what_is_in_flight_counts_until_it_is_acked(conn: Connection, subscribed: str, plain: bool) -> None:
    configure(conn, subscribed, max_depth=3)
    offer(conn, subscribed, 3)
    batch = receive(conn, subscribed) if plain else take(conn, subscribed)
    refused("PQ003", send, conn, subscribed)
    assert ack(conn, batch[0].batch_id) == 1
    send_many(conn, subscribed, 3)
    refused("PQ003", send, conn, subscribed)


def test_what_subconsumers_hold_counts_until_it_is_acked(conn: Connection, queue: str) -> None:
    value(conn, "select pgque.register_subconsumer(%s, 'c', 'one')", queue)
    configure(conn, queue, max_depth=4)
    sent = offer(conn, queue, 4)
    first, second = receive_coop(conn, queue, "one", 2), receive_coop(conn, queue, "two", 1)
    assert ids([*first, *second]) == sent[:3]
    refused("PQ003", send, conn, queue)
    nack(conn, first[0])  # it waits elsewhere, and is not counted twice
    refused("PQ003", send, conn, queue)
    ack(conn, first[0].batch_id)
    send(conn, queue)
    refused("PQ003", send, conn, queue)
    ack(conn, second[0].batch_id)
    send(conn, queue)
    refused("PQ003", send, conn, queue)


def test_room_is_made_message_by_message(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, max_depth=4)
    sent = offer(conn, subscribed, 4)
    token = take(conn, subscribed)[0].batch_id
    for msg_id in sent:
        refused("PQ003", send, conn, subscribed)
        outcome(conn, "ack", token, [msg_id])
        send(conn, subscribed)
    refused("PQ003", send, conn, subscribed)


def test_the_slowest_consumer_decides_how_full_a_queue_is(conn: Connection, subscribed: str) -> None:
    subscribe(conn, subscribed, "slow")
    configure(conn, subscribed, max_depth=4)
    offer(conn, subscribed, 4)
    work_off(conn, subscribed)
    refused("PQ003", send, conn, subscribed)
    batch = receive(conn, subscribed, "slow", 1)
    ack(conn, batch[0].batch_id)
    send(conn, subscribed)
    refused("PQ003", send, conn, subscribed)
    drain(conn, subscribed, "slow")
    tick(conn, subscribed)
    drain(conn, subscribed, "slow")
    assert len(send_many(conn, subscribed, 3)) == 3


def test_1000_sends_that_were_rolled_back_do_not_count(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, max_depth=10)
    for number in range(50):
        conn.execute("begin")
        send_many(conn, subscribed, 10)
        conn.execute("rollback")
        if number % 10 == 0:
            tick(conn, subscribed)
    for _ in range(500):
        conn.execute("begin")
        send(conn, subscribed)
        conn.execute("rollback")
    sent = send_many(conn, subscribed, 10)
    refused("PQ003", send, conn, subscribed)
    tick(conn, subscribed)
    assert ids(work_off(conn, subscribed)) == sent


def test_what_a_sender_has_not_committed_is_overshot_by_no_more_than_the_senders(
    conn: Connection, subscribed: str, background: Callable[..., Any]
) -> None:
    configure(conn, subscribed, max_depth=40)

    def sender(c: Connection) -> int:
        taken = 0
        for _ in range(30):
            try:
                send(c, subscribed)
                taken += 1
            except psycopg.Error as error:
                assert error.sqlstate == "PQ003"
        return taken

    jobs = [background(sender) for _ in range(8)]
    taken = sum(job.result() for job in jobs)
    tick(conn, subscribed)
    assert 40 <= taken <= 48
    assert len(work_off(conn, subscribed)) == taken


def test_a_transaction_sees_its_own_sends_in_the_depth(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, max_depth=3)
    conn.execute("begin")
    send_many(conn, subscribed, 3)
    refused("PQ003", send, conn, subscribed)
    conn.execute("rollback")
    conn.execute("begin")
    for _ in range(3):
        send(conn, subscribed)
    refused("PQ003", send, conn, subscribed)
    conn.execute("rollback")
    assert len(send_many(conn, subscribed, 3)) == 3


def test_delayed_messages_and_dead_ones_leave_their_mark_on_the_depth(pool: Connection) -> None:
    configure(pool, "q", max_depth=2)
    offer(pool, "q", 2)
    (a, b) = take(pool, "q")
    outcome(pool, "dead", a.batch_id, [a.msg_id], "x")
    send(pool, "q")  # a dead letter is no longer pending
    refused("PQ003", send, pool, "q")
    ack(pool, b.batch_id)
    post(pool, "q", delay="1 hour")
    refused("PQ003", send, pool, "q")


def test_a_depth_is_lifted_lowered_and_taken_away_for_the_next_call(
    conn: Connection, subscribed: str, connect: Callable[..., Connection]
) -> None:
    other = connect()
    configure(conn, subscribed, max_depth=1)
    send(other, subscribed)
    refused("PQ003", send, other, subscribed)
    configure(conn, subscribed, max_depth=2)
    send(other, subscribed)
    refused("PQ003", send, other, subscribed)
    configure(conn, subscribed, max_depth=0)
    send_many(other, subscribed, 100)
    configure(conn, subscribed, max_depth=3)
    refused("PQ003", send, other, subscribed)
    configure(conn, subscribed, max_depth=None)
    send(other, subscribed)


def test_a_full_queue_does_not_keep_messages_from_coming_back(pool: Connection) -> None:
    configure(pool, "q", max_depth=2)
    sent = offer(pool, "q", 2)
    batch = take(pool, "q")
    assert nack(pool, batch[0], "0") == 1
    move_clock(pool, "1 hour")
    settle(pool, "q")
    assert sorted(ids(work_off(pool, "q"))) == sent


def test_a_queue_empty_again_after_rotation_takes_its_full_depth(conn: Connection, subscribed: str) -> None:
    from sql.helpers import rotate

    configure(conn, subscribed, max_depth=3)
    for _ in range(8):
        assert len(send_many(conn, subscribed, 3)) == 3
        refused("PQ003", send, conn, subscribed)
        tick(conn, subscribed)
        assert len(work_off(conn, subscribed)) == 3
        rotate(conn, subscribed)
        forced_tick(conn, subscribed)
        work_off(conn, subscribed)


@pytest.mark.parametrize("setting", ["max_depth", "throughput_limit"])
@pytest.mark.parametrize("to", ["-1", "many"])
def test_a_limit_that_makes_no_sense_is_refused(conn: Connection, queue: str, setting: str, to: str) -> None:
    refused("PQ005", value, conn, "select pgque.set_queue_config(%s, %s, %s)", queue, setting, to)


def handed_out(conn: Connection, calls: int = 5, size: int = 100) -> int:
    """How many messages come when asked so often."""
    return sum(len(take(conn, "q", f"w{n}", size, "1 day")) for n in range(calls))


def test_no_more_than_the_limit_is_delivered_in_a_second(pool: Connection) -> None:
    configure(pool, "q", throughput_limit=10)
    offer(pool, "q", 100)
    stop_clock(pool, 0)
    first = handed_out(pool)
    assert 10 <= first <= 20
    got = first
    for second in range(1, 6):
        stop_clock(pool, second)
        now = handed_out(pool)
        assert 5 <= now <= 11
        got += now
    assert 50 <= got <= 70


def test_a_worker_that_asks_one_by_one_is_limited_too(pool: Connection) -> None:
    configure(pool, "q", throughput_limit=10)
    offer(pool, "q", 60)
    stop_clock(pool, 0)
    assert 10 <= handed_out(pool, 40, 1) <= 20
    stop_clock(pool, 1)
    assert 5 <= handed_out(pool, 40, 1) <= 11


def test_empty_polls_spend_nothing(pool: Connection) -> None:
    configure(pool, "q", throughput_limit=10)
    stop_clock(pool, 0)
    for _ in range(50):
        assert take(pool, "q") == []
    offer(pool, "q", 100)
    assert handed_out(pool) >= 10


def test_a_limit_changed_takes_effect_within_a_second(pool: Connection) -> None:
    configure(pool, "q", throughput_limit=5)
    offer(pool, "q", 200)
    stop_clock(pool, 0)
    assert handed_out(pool) <= 10
    configure(pool, "q", throughput_limit=50)
    stop_clock(pool, 1)
    assert 40 <= handed_out(pool) <= 100
    configure(pool, "q", throughput_limit=None)
    stop_clock(pool, 2)
    assert handed_out(pool) >= 85


def test_a_limit_loses_no_message_and_keeps_the_order(pool: Connection) -> None:
    configure(pool, "q", throughput_limit=7)
    sent = offer(pool, "q", 40)
    got: list[int] = []
    for second in range(40):
        stop_clock(pool, second)
        got += ids(work_off(pool, "q"))
    assert got == sent


def test_settings_are_the_queues_over_the_global_defaults(own: Connection) -> None:
    value(own, "select pgque.create_queue('a')")
    value(own, "select pgque.create_queue('b')")

    def seen(queue: str, name: str) -> Any:
        return value(
            own, "select c.param_value from pgque.queue_config(%s) as c where c.param_name = %s", queue, name
        )

    for name, built_in, default, mine in (
        ("max_retries", "5", "7", "9"),
        ("max_receive_attempts", "5", "8", "2"),
        ("max_depth", "0", "100", "10"),
        ("throughput_limit", "0", "50", "60"),
        ("drop_policy", "dead_letter", "hold", "drop"),
        ("archive_on_ack", "false", "true", "false"),
    ):
        assert (seen("a", name), seen("b", name)) == (built_in, built_in), name
        value(own, "select pgque.set_default_config(%s, %s)", name, default)
        assert (seen("a", name), seen("b", name)) == (default, default), name
        configure(own, "a", **{name: mine})
        assert (seen("a", name), seen("b", name)) == (mine, default), name
        value(own, "select pgque.create_queue('new')")
        assert seen("new", name) == default, name
        configure(own, "a", **{name: None})
        assert seen("a", name) == default, name
        value(own, "select pgque.set_default_config(%s, null)", name)
        assert (seen("a", name), seen("new", name)) == (built_in, built_in), name
        value(own, "select pgque.drop_queue('new', true)")


def test_a_global_default_is_seen_by_every_sessions_next_call(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    other = connect(own_dsn)
    send(other, "q")
    value(pool, "select pgque.set_default_config('max_depth', '1')")
    refused("PQ003", send, other, "q")
    value(pool, "select pgque.set_default_config('max_depth', null)")
    assert send(other, "q")


@pytest.mark.parametrize(
    ("name", "to"), [("no_such_thing", "1"), ("max_depth", "-1"), ("drop_policy", "x"), ("max_retries", "x")]
)
def test_a_global_default_that_makes_no_sense_is_refused(own: Connection, name: str, to: str) -> None:
    refused("PQ005", value, own, "select pgque.set_default_config(%s, %s)", name, to)
    assert rows(own, "select pgque.create_queue('q')") == [(1,)]


def test_what_a_transaction_sent_counts_once_though_others_end_meanwhile(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    configure(conn, subscribed, max_depth=20)
    conn.execute("begin")
    send_many(conn, subscribed, 15)
    conn.execute("rollback")
    other = connect()
    conn.execute("begin")
    for _ in range(20):
        send(conn, subscribed)
        other.execute("select pg_current_xact_id()")
    with pytest.raises(ZeroDivisionError), conn.transaction():
        assert value(conn, "select pgque.purge(%s)", subscribed) == 20
        raise ZeroDivisionError
    refused("PQ003", send, conn, subscribed)
    conn.execute("rollback")


def test_an_external_ticker_whose_ids_run_ahead_does_not_lift_the_limit(conn: Connection, queue: str) -> None:
    configure(conn, queue, external_ticker=True, max_depth=5)
    value(conn, "select pgque.ticker(%s, 1000, clock_timestamp(), 1000000)", queue)
    subscribe(conn, queue)
    for _ in range(5):
        send(conn, queue)
    refused("PQ003", send, conn, queue)
    refused("PQ003", send_many, conn, queue, 1)
    value(conn, "select pgque.ticker(%s, 1001, clock_timestamp(), 1000001)", queue)
    assert len(drain(conn, queue)) == 5
    assert len(send_many(conn, queue, 5)) == 5


def test_what_is_delayed_counts_from_the_first_batch_on_though_nobody_subscribed(
    conn: Connection, queue: str
) -> None:
    configure(conn, queue, max_depth=5)
    delayed = (
        "select pgque.send_batch(%s, 't', array_fill('x'::text, array[%s]),"
        " delays => array_fill('1 hour'::interval, array[%s]))"
    )
    refused("PQ003", value, conn, delayed, queue, 6, 6)
    assert len(value(conn, delayed, queue, 5, 5)) == 5
    refused("PQ003", value, conn, delayed, queue, 1, 1)


def test_delayed_messages_count_in_the_depth_after_they_are_due(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", max_depth=5)
    for _ in range(5):
        post(own, "q", delay="1 hour")
    forced_tick(own, "q")
    subscribe(own, "q")
    move_clock(own, "1 hour")
    assert pump(own) == 5
    refused("PQ003", send, own, "q")
    tick(own, "q")
    assert len(drain(own, "q")) == 5
    assert len(send_many(own, "q", 5)) == 5


def test_a_batch_with_keys_counts_the_queue_once_and_replaces_where_it_is_full(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    configure(own, "q", max_depth=100)
    batch = "select pgque.send_batch('q', 't', array(select 'x' from generate_series(1, %s)), keys => array(select 'k' || n from generate_series(1, %s) n))"
    own.execute("begin")
    send_many(own, "q", 90)
    own.execute("rollback")
    own.execute("set track_functions = 'all'")
    calls = (
        "select coalesce(sum(f.calls), 0) from pg_stat_user_functions f where f.funcname = '_depth'"
        " and f.schemaname = 'pgque'"
    )
    own.execute("begin")
    own.execute("select pg_stat_clear_snapshot()")
    before = value(own, calls.replace("pg_stat_user_functions", "pg_stat_xact_user_functions"))
    assert len(value(own, batch, 100, 100)) == 100
    counted = value(own, calls.replace("pg_stat_user_functions", "pg_stat_xact_user_functions")) - before
    own.execute("commit")
    assert counted == 1
    assert len(set(value(own, batch, 100, 100))) == 100
    refused("PQ003", value, own, batch, 101, 101)
    refused("PQ003", send, own, "q")
