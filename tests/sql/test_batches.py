"""PgQ's whole windows, and batch ids."""

from __future__ import annotations

from collections.abc import Callable

from sql.helpers import (
    Connection,
    ack,
    column,
    drain,
    forced_tick,
    move_clock,
    nack,
    receive,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)

NEXT = "select pgque.next_batch(%s, 'c')"
EVENTS = "select ev_id from pgque.get_batch_events(%s)"


def test_a_batch_is_the_furthest_window_up_to_ticker_max_count_events(
    conn: Connection, subscribed: str
) -> None:
    assert value(conn, NEXT, subscribed) is None
    value(conn, "select pgque.set_queue_config(%s, 'ticker_max_count', '10')", subscribed)
    windows: list[list[int]] = []
    for ticks in ((30,), (3, 3, 4), (9,), (2,)):  # one tick may have more, and no batch ends within one
        windows.append([])
        for count in ticks:
            windows[-1] += send_many(conn, subscribed, count)
            tick(conn, subscribed)
    for expected in windows:
        batch = value(conn, NEXT, subscribed)
        assert value(conn, NEXT, subscribed) == batch
        assert column(conn, EVENTS, batch) == expected
        assert value(conn, "select pgque.finish_batch(%s)", batch) == 1
        assert value(conn, "select pgque.finish_batch(%s)", batch) == 0
        refused("PQ012", rows, conn, EVENTS, batch)
    assert value(conn, NEXT, subscribed) is None


def test_an_empty_window_is_a_batch_without_events(conn: Connection, subscribed: str) -> None:
    forced_tick(conn, subscribed)
    batch = value(conn, NEXT, subscribed)
    assert batch is not None
    assert column(conn, EVENTS, batch) == []
    assert ack(conn, batch) == 1


def test_batch_info_returns_what_a_batch_spans(conn: Connection, subscribed: str) -> None:
    before = forced_tick(conn, subscribed)
    ack(conn, value(conn, NEXT, subscribed))
    sent = send_many(conn, subscribed, 5)
    made = tick(conn, subscribed)
    (found,) = rows(
        conn,
        "select batch_id, cur_tick_id, prev_tick_id, cur_tick_time, prev_tick_time, cur_tick_event_seq,"
        " prev_tick_event_seq from pgque.next_batch_info(%s, 'c')",
        subscribed,
    )
    assert found[1:3] == (made, before)
    assert found[3] > found[4]
    assert found[5:] == (sent[-1], sent[0] - 1)
    (info,) = rows(
        conn,
        "select queue_name, consumer_name, batch_start, batch_end, prev_tick_id, tick_id, lag, seq_start, seq_end"
        " from pgque.get_batch_info(%s)",
        found[0],
    )
    assert info[:2] == (subscribed, "c")
    assert info[2:4] == (found[4], found[3])
    assert info[4:6] == (before, made)
    assert 0 <= info[6].total_seconds() < 60
    assert info[7:] == (sent[0] - 1, sent[-1])


def test_next_batch_custom_waits_for_lag_count_and_interval(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    custom = "select batch_id from pgque.next_batch_custom('q', 'c', %s::interval, %s, %s::interval)"
    for _ in range(3):
        send_many(own, "q", 4)
        tick(own, "q")
    assert value(own, custom, None, 100, None) is None
    assert value(own, custom, "10 minutes", None, None) is None
    assert value(own, custom, None, None, "10 minutes") is None
    batch = value(own, custom, None, 8, None)
    assert len(column(own, EVENTS, batch)) == 8
    ack(own, batch)
    move_clock(own, "11 minutes")
    batch = value(own, custom, "10 minutes", None, None)
    assert len(column(own, EVENTS, batch)) == 4
    ack(own, batch)
    send(own, "q")
    tick(own, "q")
    batch = value(own, custom, None, 100, "10 minutes")
    assert len(column(own, EVENTS, batch)) == 1


def test_without_a_size_next_batch_custom_ends_at_the_furthest_tick_that_is_old_enough(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    custom = "select batch_id from pgque.next_batch_custom('q', 'c', '10 minutes', null, null)"
    sent = []
    for minutes in (0, 1, 11):
        move_clock(own, f"{minutes} minutes")
        sent += send_many(own, "q", 4)
        tick(own, "q")
    batch = value(own, custom)
    assert column(own, EVENTS, batch) == sent[:8]
    ack(own, batch)
    assert value(own, custom) is None


def test_events_of_a_batch_have_the_columns_of_old(conn: Connection, subscribed: str) -> None:
    value(conn, "select pgque.insert_event(%s, 't', 'd', '1', '2', '3', '4')", subscribed)
    tick(conn, subscribed)
    cursor = conn.execute(b"select * from pgque.get_batch_events(%s)", [value(conn, NEXT, subscribed)])
    assert [d.name for d in cursor.description or []][:10] == [
        "ev_id", "ev_time", "ev_txid", "ev_retry", "ev_type", "ev_data",
        "ev_extra1", "ev_extra2", "ev_extra3", "ev_extra4",
    ]  # fmt: skip
    row = cursor.fetchone()
    assert row is not None
    assert row[3:10] == (None, "t", "d", "1", "2", "3", "4")


def test_a_cursor_reads_a_batch_in_pieces_and_filters(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    sent = send_many(conn, subscribed, 20)
    tick(conn, subscribed)
    batch = value(conn, NEXT, subscribed)
    one = transaction()
    first = column(one, "select ev_id from pgque.get_batch_cursor(%s, 'cur', 5)", batch)
    rest = column(one, "fetch all from cur")
    assert first + rest == sent
    some = column(
        one, "select ev_id from pgque.get_batch_cursor(%s, 'cur2', 100, 'ev_data::int %% 5 = 0')", batch
    )
    assert some == sent[4::5]
    one.execute("commit")


def test_receive_and_next_batch_share_one_position(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 10)
    tick(conn, subscribed)
    first = receive(conn, subscribed, count=3)
    assert value(conn, NEXT, subscribed) == first[0].batch_id
    assert column(conn, EVENTS, first[0].batch_id) == sent[:3]
    ack(conn, first[0].batch_id)
    rest = value(conn, NEXT, subscribed)
    assert column(conn, EVENTS, rest) == sent[3:]
    assert [m.msg_id for m in receive(conn, subscribed, count=2)] == sent[3:]
    assert receive(conn, subscribed)[0].batch_id == rest


def test_events_of_a_batch_may_be_retried_one_by_one(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 3)
    tick(conn, subscribed)
    batch = value(conn, NEXT, subscribed)
    assert value(conn, "select pgque.event_retry(%s, %s, 0)", batch, sent[1]) == 1
    ack(conn, batch)
    value(conn, "select pgque.maint_retry_events()")
    tick(conn, subscribed)
    batch = value(conn, NEXT, subscribed)
    assert rows(conn, "select ev_id, ev_retry from pgque.get_batch_events(%s)", batch) == [(sent[1], 1)]


def test_a_big_batch_read_whole_after_slices_has_the_rest(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 12_000)
    tick(conn, subscribed)
    for _ in range(5):
        batch = receive(conn, subscribed, count=500)
        nack(conn, batch[0], "1 hour")
        ack(conn, batch[0].batch_id)
    assert column(conn, EVENTS, value(conn, NEXT, subscribed)) == sent[2_500:]


def test_batch_ids_are_never_issued_twice(conn: Connection, subscribed: str) -> None:
    seen: set[int] = set()
    for number in range(150):
        send_many(conn, subscribed, 3)
        tick(conn, subscribed)
        batch = receive(conn, subscribed, count=2)[0].batch_id
        assert batch not in seen
        seen.add(batch)
        if number % 10 == 3:
            value(conn, "select pgque.unsubscribe(%s, 'c')", subscribed)
            subscribe(conn, subscribed)
            assert ack(conn, batch) == 0
        elif number % 10 != 7:
            assert ack(conn, batch) == 1
            assert ack(conn, batch) == 0
        else:
            assert drain(conn, subscribed)
    assert max(seen) < 2**63
