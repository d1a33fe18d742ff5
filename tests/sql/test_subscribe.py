"""Where a consumer starts, how it is moved, and how it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    drain,
    forced_tick,
    move_clock,
    payloads,
    receive,
    refused,
    rotate,
    rows,
    send,
    subscribe,
    tick,
    value,
)


def at(conn: Connection, queue: str, consumer: str, start: str | None) -> int:
    result: int = value(conn, "select pgque.subscribe(%s, %s, %s::text)", queue, consumer, start)
    return result


def test_a_consumer_starts_at_the_newest_tick(conn: Connection, queue: str) -> None:
    send(conn, queue, "before")
    tick(conn, queue)
    assert subscribe(conn, queue) == 1
    assert subscribe(conn, queue) == 0
    assert at(conn, queue, "other", "latest") == 1
    assert value(conn, "select pgque.register_consumer(%s, 'third')", queue) == 1
    send(conn, queue, "after")
    tick(conn, queue)
    for consumer in ("c", "other", "third"):
        assert payloads(conn, queue, consumer) == ["after"]


def test_an_event_sent_before_and_ticked_after_subscribing_is_delivered(conn: Connection, queue: str) -> None:
    send(conn, queue, "unticked")
    subscribe(conn, queue)
    tick(conn, queue)
    assert payloads(conn, queue) == ["unticked"]


def test_earliest_starts_with_everything_that_is_still_there(conn: Connection, queue: str) -> None:
    sent = []
    for _ in range(3):
        sent.append(send(conn, queue))
        tick(conn, queue)
    at(conn, queue, "c", "earliest")
    assert drain(conn, queue, count=2) == sent


def test_a_tick_id_starts_right_behind_that_tick(conn: Connection, queue: str) -> None:
    ticks = []
    for number in range(3):
        send(conn, queue, str(number))
        ticks.append(tick(conn, queue))
    at(conn, queue, "c", str(ticks[0]))
    assert payloads(conn, queue) == ["1", "2"]
    at(conn, queue, "d", str(ticks[2]))
    assert payloads(conn, queue, "d") == []


def test_a_timestamp_starts_at_the_last_tick_before_it(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for hours in range(1, 5):
        move_clock(own, f"{hours} hours")
        send(own, "q", str(hours))
        forced_tick(own, "q")
    moment = value(own, "select (clock_timestamp() + interval '2 hours 30 minutes')::text")
    at(own, "q", "c", moment)
    assert payloads(own, "q") == ["3", "4"]
    at(own, "q", "long ago", "2001-01-01")
    assert payloads(own, "q", "long ago") == ["1", "2", "3", "4"]
    at(own, "q", "future", "2999-01-01 00:00:00+00")
    assert payloads(own, "q", "future") == []


@pytest.mark.parametrize(
    "start", ["999999", "-1", "", "never", "99999999999999999999999", "2026-13-45", None, "1e3", "'; --"]
)
def test_a_start_that_is_no_tick_and_no_time_is_refused(
    conn: Connection, queue: str, start: str | None
) -> None:
    error = refused("PQ005", at, conn, queue, "c", start)
    assert queue in str(error)
    refused("PQ011", receive, conn, queue)


def test_an_unknown_queue_is_refused_and_makes_no_consumer_known(conn: Connection, queue: str) -> None:
    error = refused("PQ001", subscribe, conn, f"no {queue}")
    assert "queue not found" in str(error)
    assert f"no {queue}" in str(error)


def test_a_known_consumer_is_moved_back_and_forward(conn: Connection, subscribed: str) -> None:
    start = value(conn, "select i.last_tick_id from pgque.get_queue_info(%s) as i", subscribed)
    for number in range(4):
        send(conn, subscribed, str(number))
        forced_tick(conn, subscribed)
    assert payloads(conn, subscribed) == ["0", "1", "2", "3"]
    move = "select pgque.register_consumer_at(%s, %s, %s)"
    assert value(conn, move, subscribed, "c", start + 1) == 0
    assert payloads(conn, subscribed) == ["1", "2", "3"]
    assert value(conn, move, subscribed, "c", start) == 0
    batch = receive(conn, subscribed, count=1)
    assert [m.payload for m in batch] == ["0"]
    assert value(conn, move, subscribed, "c", start + 3) == 0
    assert ack(conn, batch[0].batch_id) == 0
    assert payloads(conn, subscribed) == ["3"]
    assert value(conn, move, subscribed, "new", start + 2) == 1
    assert payloads(conn, subscribed, "new") == ["2", "3"]
    assert value(conn, move, subscribed, "newest", None) == 1
    assert payloads(conn, subscribed, "newest") == []
    refused("PQ005", rows, conn, move, subscribed, "c", start + 100)
    refused("PQ001", rows, conn, move, "no " + subscribed, "c", start)


def test_a_consumer_can_not_be_moved_to_a_tick_that_was_reclaimed(conn: Connection, subscribed: str) -> None:
    start = value(conn, "select i.last_tick_id from pgque.get_queue_info(%s) as i", subscribed)
    for _ in range(4):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
    refused("PQ005", rows, conn, "select pgque.register_consumer_at(%s, 'c', %s)", subscribed, start)
    assert at(conn, subscribed, "early", "earliest") == 1


def test_unsubscribing_counts_what_it_removed_and_loses_the_open_batch(
    conn: Connection, subscribed: str
) -> None:
    send(conn, subscribed)
    tick(conn, subscribed)
    (message,) = receive(conn, subscribed)
    assert value(conn, "select pgque.unsubscribe(%s, 'c')", subscribed) == 1
    assert value(conn, "select pgque.unsubscribe(%s, 'c')", subscribed) == 0
    assert value(conn, "select pgque.unregister_consumer(%s, 'nobody')", subscribed) == 0
    assert ack(conn, message.batch_id) == 0
    error = refused("PQ011", receive, conn, subscribed)
    assert "not subscriber to queue" in str(error)
    assert subscribed in str(error)
    assert "c" in str(error)
    refused("PQ001", rows, conn, "select pgque.unsubscribe(%s, 'c')", "no " + subscribed)


def test_two_sessions_that_subscribe_one_consumer_at_once_make_one(
    conn: Connection,
    queue: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    one = transaction()
    assert subscribe(one, queue) == 1
    other = background(lambda c: subscribe(c, queue))
    wait_for_lock(other.pid)
    one.execute("commit")
    assert other.result() == 0
    sent = send(conn, queue)
    tick(conn, queue)
    assert drain(conn, queue) == [sent]


def test_a_consumer_subscribed_while_another_session_rotates_starts_at_a_tick_that_stays(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
) -> None:
    for _ in range(3):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
    late = transaction()
    at(late, subscribed, "early", "earliest")
    for _ in range(4):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        assert value(conn, "select pgque.maint_rotate_tables_step1(%s)", subscribed) == 0
    late.execute("commit")
    assert len(drain(conn, subscribed, "early")) >= 4


def test_an_unsubscribed_consumer_holds_back_no_rotation(conn: Connection, subscribed: str) -> None:
    subscribe(conn, subscribed, "slow")
    for _ in range(3):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
    assert rotate(conn, subscribed) == 0
    value(conn, "select pgque.unsubscribe(%s, 'slow')", subscribed)
    assert rotate(conn, subscribed) == 1


def test_a_call_that_waited_for_an_unsubscribe_names_queue_and_consumer(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    send(conn, subscribed)
    tick(conn, subscribed)
    one = transaction()
    value(one, "select pgque.unsubscribe(%s, 'c')", subscribed)
    other = background(lambda c: receive(c, subscribed))
    wait_for_lock(other.pid)
    one.execute("commit")
    error = refused("PQ011", other.result)
    assert "not subscriber to queue" in str(error)
    assert isinstance(error, psycopg.Error)


def test_an_open_subscription_blocks_its_name_on_no_other_queue(
    conn: Connection,
    queue: str,
    new_queue: Callable[[], str],
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
) -> None:
    other = new_queue()
    one = transaction()
    assert subscribe(one, queue, "a name that was never used") == 1
    assert background(lambda c: subscribe(c, other, "a name that was never used")).result(timeout=20) == 1
    one.execute("commit")
    assert subscribe(conn, queue, "a name that was never used") == 0
    assert subscribe(conn, other, "a name that was never used") == 0
    assert value(conn, "select pgque.unsubscribe(%s, 'a name that was never used')", queue) == 1
    assert rows(conn, "select consumer_name from pgque.get_consumer_info(%s)", other) == [
        ("a name that was never used",)
    ]


SEQUENCE = "pg_get_serial_sequence('pgque.subscriber', 'sub_id')"
NUMBER = "select s.sub_id from pgque.subscriber s join pgque.consumer c on c.co_id = s.sub_consumer where c.co_name = %s"


def crowd(own: Connection, count: int) -> None:
    """Takes that many numbers of subscribers from 1 on, by rows that only the look at numbers sees."""
    own.execute(b"drop index pgque.subscriber_worker")
    value(
        own,
        "with made as (insert into pgque.subscriber (sub_id, sub_queue, sub_consumer, sub_role, sub_main, sub_worker)"
        " select g, 0, 0, 'coop_member', 0, 'w' from generate_series(1, %s) g returning 1) select count(*) from made",
        count,
    )


def test_numbers_that_are_taken_are_passed_over_and_the_sequence_begins_again_at_its_end(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    crowd(own, 3000)
    assert subscribe(own, "q", "a") == 1
    assert value(own, NUMBER, "a") == 3001
    value(own, f"select setval({SEQUENCE}, %s)", 2**31 - 2)
    assert [subscribe(own, "q", name) for name in ("b", "c")] == [1, 1]
    assert value(own, NUMBER, "b") == 2**31 - 1
    assert value(own, NUMBER, "c") == 3002


def test_the_number_of_a_consumer_that_left_a_position_is_not_taken_again(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q", "stays")  # when the last consumer leaves, no position is kept
    subscribe(own, "q", "a")
    number = value(own, NUMBER, "a")
    send(own, "q")
    tick(own, "q")
    batch = receive(own, "q", "a")
    value(own, "select pgque.unsubscribe('q', 'a')")
    value(own, f"select setval({SEQUENCE}, %s, false)", number)
    assert subscribe(own, "q", "b") == 1
    assert value(own, NUMBER, "b") != number
    assert ack(own, batch[0].batch_id) == 0


@pytest.mark.slow
def test_a_subscription_is_refused_when_all_numbers_are_taken(own: Connection) -> None:
    """A million rows have to be made first."""
    value(own, "select pgque.create_queue('q')")
    crowd(own, 2**20)
    error = refused("54000", subscribe, own, "q", "a")
    assert "1048576" in str(error.diag.message_primary)
    assert "nsubscribe" in str(error.diag.message_hint)
    assert value(own, f"select pg_sequence_last_value({SEQUENCE})") < 1000
    own.execute(b"delete from pgque.subscriber where sub_id = 70000")
    assert subscribe(own, "q", "a") == 1
    assert value(own, NUMBER, "a") % 2**20 == 70000


def test_a_subscription_reads_as_much_among_thousands_as_among_few(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")

    def blocks(name: str) -> int:
        plan = value(own, f"explain (analyze, buffers, format json) select pgque.subscribe('q', '{name}')")[
            0
        ]["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    value(own, "select count(pgque.subscribe('q', 'few' || g)) from generate_series(1, 20) g")
    few = [blocks(f"a{n}") for n in range(5)][-1]
    value(own, "select count(pgque.subscribe('q', 'many' || g)) from generate_series(1, 4000) g")
    many = [blocks(f"b{n}") for n in range(5)][-1]
    assert many < few + 40, (few, many)


def test_a_consumer_may_stand_at_a_tick_of_nineteen_digits(conn: Connection, queue: str) -> None:
    tick_id = 10**18 + 7
    value(conn, "select pgque.set_queue_config(%s, 'external_ticker', 'true')", queue)
    value(conn, "select pgque.ticker(%s, %s::bigint, now(), 1)", queue, tick_id)
    assert value(conn, "select pgque.register_consumer_at(%s, 'c', %s)", queue, tick_id) == 1
    assert value(conn, "select pgque.tick_for(%s, %s::text)", queue, tick_id) == tick_id
    refused("PQ005", value, conn, "select pgque.subscribe(%s, 'd', %s)", queue, "9" * 19)
