"""Windows with too many messages, which max_window cuts into parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from conftest import Connect
from sql.helpers import (
    Connection,
    ack,
    column,
    configure,
    drain,
    forced_tick,
    offer,
    post,
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
FINISH = "select pgque.finish_batch(%s)"


def batches(conn: Connection, queue: str) -> Iterator[tuple[int, list[int]]]:
    """Open and finish batches until there is none; yield each with the ids of its events."""
    while (batch := value(conn, NEXT, queue)) is not None:
        yield batch, column(conn, EVENTS, batch)
        assert value(conn, FINISH, batch) == 1


def parts(conn: Connection, queue: str) -> list[list[int]]:
    return [found for _, found in batches(conn, queue)]


def cut(ids: list[int], size: int) -> list[list[int]]:
    return [ids[n : n + size] for n in range(0, len(ids), size)]


def rows_read(conn: Connection, query: str, *args: Any) -> int:
    """Return how many rows of pgque's tables a query reads, the functions that it calls included."""
    read = (
        "select sum(coalesce(t.seq_tup_read, 0) + coalesce(t.idx_tup_fetch, 0))::bigint"
        " from pg_stat_xact_all_tables t where t.schemaname = 'pgque'"
    )
    with conn.transaction():
        before = value(conn, read)
        rows(conn, query, *args)
        found: int = value(conn, read) - before
    return found


def test_a_giant_tick_becomes_batches_of_max_window_events_in_order(
    conn: Connection, subscribed: str
) -> None:
    sent = offer(conn, subscribed, 10_000)
    configure(conn, subscribed, max_window=1000)
    found = []
    for batch, part in batches(conn, subscribed):
        found.append(part)
        assert value(conn, NEXT, subscribed) == batch
    assert found == cut(sent, 1000)


def test_a_part_of_a_giant_tick_reads_about_its_own_rows(conn: Connection, subscribed: str) -> None:
    offer(conn, subscribed, 10_000)
    configure(conn, subscribed, max_window=100)
    costs = []
    for _ in range(5):
        opened = rows_read(conn, NEXT, subscribed)
        batch = value(conn, NEXT, subscribed)
        costs.append((opened, rows_read(conn, EVENTS, batch)))
        ack(conn, batch)
    # The first one makes the map of the window.  The others read their rows three times, a chunk of the map
    # besides.
    assert max(opened for opened, _ in costs[1:]) < 600
    assert max(read for _, read in costs) < 200


def test_max_window_counts_the_rows_of_a_transaction_that_ran_across_ticks(
    conn: Connection, subscribed: str, connect: Connect
) -> None:
    configure(conn, subscribed, max_window=400)
    late = connect(autocommit=False)
    sent = send_many(late, subscribed, 6000)
    other = [offer(conn, subscribed, 1) for _ in range(2)]
    late.commit()
    assert tick(conn, subscribed)
    # Between the event sequences of the window's two ticks is one id.
    assert parts(conn, subscribed) == [other[0], *cut(sent + other[1], 400)]


def test_without_max_window_a_tick_is_one_batch_also_after_a_part_of_it(
    conn: Connection, subscribed: str
) -> None:
    sent = offer(conn, subscribed, 900)
    configure(conn, subscribed, max_window=100)
    assert column(conn, EVENTS, value(conn, NEXT, subscribed)) == sent[:100]
    ack(conn, value(conn, NEXT, subscribed))
    configure(conn, subscribed, max_window=None)
    assert parts(conn, subscribed) == [sent[100:]]


def test_small_ticks_are_joined_up_to_max_window(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, max_window=10)
    sent = [offer(conn, subscribed, 4) for _ in range(5)]
    assert parts(conn, subscribed) == [sent[0] + sent[1], sent[2] + sent[3], sent[4]]


def test_a_part_that_receive_began_goes_on_by_batches(conn: Connection, subscribed: str) -> None:
    sent = offer(conn, subscribed, 50)
    configure(conn, subscribed, max_window=20)
    ack(conn, receive(conn, subscribed, count=5)[0].batch_id)
    ack(conn, value(conn, NEXT, subscribed))
    ack(conn, receive(conn, subscribed, count=5)[0].batch_id)
    assert parts(conn, subscribed) == [sent[30:]]


def test_the_parts_of_a_window_have_its_two_ticks(conn: Connection, subscribed: str) -> None:
    before = value(conn, "select pgque.tick_for(%s, 'latest')", subscribed)
    sent = send_many(conn, subscribed, 30)
    made = tick(conn, subscribed)
    configure(conn, subscribed, max_window=20)
    for _ in range(2):
        batch, *span = rows(
            conn, "select batch_id, prev_tick_id, cur_tick_id from pgque.next_batch_info(%s, 'c')", subscribed
        )[0]
        assert span == [before, made]
        info = "select prev_tick_id, tick_id, seq_end from pgque.get_batch_info(%s)"
        assert rows(conn, info, batch) == [(before, made, sent[-1])]
        ack(conn, batch)
    assert value(conn, NEXT, subscribed) is None


def test_messages_of_a_part_are_retried_before_the_next_part(conn: Connection, subscribed: str) -> None:
    sent = offer(conn, subscribed, 50)
    configure(conn, subscribed, max_window=20)
    batch = value(conn, NEXT, subscribed)
    value(conn, "select pgque.event_retry(%s, %s, 0)", batch, sent[3])
    assert {
        ok for _, ok, _ in rows(conn, "select * from pgque.nack(%s, %s, '0')", batch, [sent[4], sent[30]])
    } == {True, False}  # of another part
    assert value(conn, FINISH, batch) == 1
    assert parts(conn, subscribed) == [[sent[3], sent[4]], sent[20:40], sent[40:]]


def test_a_batch_of_retries_has_at_most_max_window(conn: Connection, subscribed: str) -> None:
    sent = offer(conn, subscribed, 30)
    batch = value(conn, NEXT, subscribed)
    rows(conn, "select * from pgque.nack(%s, %s, '0')", batch, sent)
    assert ack(conn, batch) == 1
    configure(conn, subscribed, max_window=20)
    assert sorted(map(len, parts(conn, subscribed))) == [10, 20]


def test_keys_and_ttls_are_chosen_within_each_part(conn: Connection, subscribed: str) -> None:
    plain = send_many(conn, subscribed, 30)
    keyed = [post(conn, subscribed, "old", key=str(n)) for n in range(10)]
    expired = [post(conn, subscribed, ttl="1 microsecond") for _ in range(10)]
    last = send_many(conn, subscribed, 5)
    tick(conn, subscribed)
    configure(conn, subscribed, max_window=12)
    found: list[tuple[int, str]] = []
    sizes: list[int] = []
    fresh: list[int] = []
    for batch, _ in batches(conn, subscribed):
        if not sizes:
            post(conn, subscribed, "new", key="9")  # in a part that is not open yet
        elif len(sizes) == 2:
            fresh = [post(conn, subscribed, "after", key="0")]  # in the open part
            post(conn, subscribed, "new", key="8")
            tick(conn, subscribed)
        events = rows(conn, "select ev_id, ev_data from pgque.get_batch_events(%s)", batch)
        sizes.append(len(events))
        found += events
    assert [number for number, _ in found] == [*plain, *keyed, *last, *fresh]
    assert sizes[:3] == [12, 12, 12]
    bodies = dict(found)
    assert [bodies[number] for number in keyed] == ["new" if n in (8, 9) else "old" for n in range(10)]
    assert not set(expired) & bodies.keys()


def test_an_open_transaction_splits_no_part(conn: Connection, subscribed: str, connect: Connect) -> None:
    held = connect(autocommit=False)
    early = send(held, subscribed)
    sent = offer(conn, subscribed, 50)
    configure(conn, subscribed, max_window=20)
    found = []
    for _, part in batches(conn, subscribed):
        found.append(part)
        if len(found) == 1:
            held.commit()  # its id is below all of the window, and it is in the next one
            tick(conn, subscribed)
    assert found == [*cut(sent, 20), [early]]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_transaction_with_an_old_snapshot_reads_a_part(
    conn: Connection, subscribed: str, connect: Connect, isolation: str
) -> None:
    sent = offer(conn, subscribed, 3000)
    configure(conn, subscribed, max_window=100)
    old = connect(autocommit=False)
    old.isolation_level = {
        "repeatable read": psycopg.IsolationLevel.REPEATABLE_READ,
        "serializable": psycopg.IsolationLevel.SERIALIZABLE,
    }[isolation]
    value(old, "select 1 from pgque.get_queue_info(%s)", subscribed)
    offer(conn, subscribed, 10)
    batch = value(old, NEXT, subscribed)
    assert column(old, EVENTS, batch) == sent[:100]
    assert value(old, FINISH, batch) == 1
    old.commit()
    assert parts(conn, subscribed)[:2] == cut(sent, 100)[1:3]


def test_workers_that_share_a_consumer_get_parts_of_one_window(conn: Connection, queue: str) -> None:
    for worker in ("w1", "w2"):
        value(conn, "select pgque.register_subconsumer(%s, 'c', %s)", queue, worker)
    sent = offer(conn, queue, 50)
    configure(conn, queue, max_window=20)
    opened = "select pgque.next_batch(%s, 'c', %s)"
    one, two = (value(conn, opened, queue, worker) for worker in ("w1", "w2"))
    assert [column(conn, EVENTS, batch) for batch in (two, one)] == [sent[20:40], sent[:20]]
    value(conn, "select pgque.unregister_subconsumer(%s, 'c', 'w1', 1)", queue)
    assert ack(conn, two) == 1
    for expected in (sent[:20], sent[40:]):
        batch = value(conn, opened, queue, "w2")
        assert column(conn, EVENTS, batch) == expected
        ack(conn, batch)


def test_the_depth_of_the_queue_shrinks_by_each_part(conn: Connection, subscribed: str) -> None:
    sent = offer(conn, subscribed, 50)
    configure(conn, subscribed, max_window=20, max_depth=50)
    refused("PQ003", send, conn, subscribed)
    batch = value(conn, NEXT, subscribed)
    with conn.transaction():
        assert len(rows(conn, "select * from pgque.get_batch_cursor(%s, 'cursor', 3)", batch)) == 3
        assert len(rows(conn, "fetch all from cursor")) == 17
    ack(conn, batch)
    send_many(conn, subscribed, 20)
    refused("PQ003", send, conn, subscribed)
    assert drain(conn, subscribed)[:30] == sent[20:]


@pytest.mark.parametrize("wrong", ["-1", "many", "99999999999"])
def test_a_wrong_max_window_is_refused(conn: Connection, subscribed: str, wrong: str) -> None:
    found = refused("PQ005", lambda: configure(conn, subscribed, max_window=wrong))
    assert "max_window" in str(found)


# --- Readers of offsets -------------------------------------------------------------------------------

READ = "select ev_id from pgque.read_window(%s, %s, %s, %s, after_id => %s, upto_id => %s)"


def windows(
    conn: Connection,
    queue: str,
    start: int,
    consumer: str | None = None,
    most: int | None = None,
    may_cut: bool = False,
) -> Iterator[tuple[int, int, int | None, int | None]]:
    """Yield the pieces behind a tick: from and to a tick, and above and up to an id."""
    after_id: int | None = None
    upto: int | None = None
    while True:
        call = "select * from pgque.next_window(%s, %s, %s, %s, null, %s, %s, cut => %s)"
        ((to_tick, upto_id),) = rows(conn, call, queue, start, after_id, most, upto, consumer, may_cut)
        if to_tick is None:
            return
        yield start, to_tick, after_id, upto_id
        start, after_id, upto = (to_tick, None, None) if upto_id is None else (start, upto_id, to_tick)


def read(
    conn: Connection, queue: str, piece: tuple[int, int, int | None, int | None], consumer: str | None = None
) -> list[int]:
    start, end, after_id, upto_id = piece
    return column(conn, READ, queue, start, end, consumer, after_id, upto_id)


def test_pieces_of_a_giant_tick_have_each_message_once_whenever_they_are_read(
    conn: Connection, queue: str, connect: Connect
) -> None:
    assert value(conn, "select pgque.open_stream(%s, 'c', 'earliest')", queue)
    start = forced_tick(conn, queue)
    late = connect(autocommit=False)
    first = send_many(late, queue, 3000)
    keyed = [post(conn, queue, "a", key="k") for _ in range(3)]
    sent = offer(conn, queue, 20)
    late.commit()
    end = forced_tick(conn, queue)
    later = connect(autocommit=False)
    send_many(later, queue, 10)
    assert list(windows(conn, queue, start)) == [(start, end, None, None)]
    configure(conn, queue, max_window=250)
    pieces = list(windows(conn, queue, start, "c"))
    found = [read(conn, queue, piece, "c") for piece in pieces]
    assert sorted(number for piece in found for number in piece) == sorted([*first, *keyed, *sent])
    assert all(len(piece) <= 250 for piece in found)
    assert len(pieces) == 13
    later.commit()
    forced_tick(conn, queue)
    value(conn, "truncate pgque.window_map")
    with conn.transaction():
        conn.execute("set transaction read only")
        assert [read(conn, queue, piece, "c") for piece in pieces] == found


def test_a_piece_of_a_giant_tick_reads_about_its_own_rows(conn: Connection, queue: str) -> None:
    start = forced_tick(conn, queue)
    offer(conn, queue, 10_000)
    configure(conn, queue, max_window=200)
    pieces = list(windows(conn, queue, start))
    assert len(pieces) == 50
    for piece in pieces[::10]:
        assert rows_read(conn, READ, queue, *piece[:2], None, *piece[2:]) < 300
        assert (
            rows_read(
                conn,
                "select pgque.next_window(%s, %s, %s, null, null, %s)",
                queue,
                piece[0],
                piece[3],
                piece[1],
            )
            < 800
        )


def test_a_piece_has_at_most_max_events_where_windows_may_be_cut(conn: Connection, queue: str) -> None:
    start = forced_tick(conn, queue)
    sent = offer(conn, queue, 30)
    assert [read(conn, queue, piece) for piece in windows(conn, queue, start, None, 7)] == [sent]
    configure(conn, queue, max_window=20)
    assert [read(conn, queue, piece) for piece in windows(conn, queue, start, None, 7)] == cut(sent, 7)
    assert [read(conn, queue, piece) for piece in windows(conn, queue, start)] == cut(sent, 20)


def test_a_reader_may_cut_a_tick_with_more_than_twice_its_limit(conn: Connection, queue: str) -> None:
    start = forced_tick(conn, queue)
    giant = offer(conn, queue, 30)
    small = offer(conn, queue, 12)
    found = [read(conn, queue, piece) for piece in windows(conn, queue, start, None, 7, may_cut=True)]
    assert found == [*cut(giant, 7), small]


def test_bodies_of_one_key_are_not_cut(conn: Connection, queue: str) -> None:
    start = forced_tick(conn, queue)
    value(conn, "select pgque.subscribe(%s, 'c')", queue)
    for number in range(6):
        post(conn, queue, str(number), key="k")
        post(conn, queue, str(number), key=str(number))
    forced_tick(conn, queue)
    configure(conn, queue, max_window=3)
    found = [read(conn, queue, piece) for piece in windows(conn, queue, start)]
    assert sum(map(len, found)) == 12
    assert len({number for piece in found for number in piece}) == sum(len(set(piece)) for piece in found)


def test_the_newest_body_of_a_key_is_read_last(conn: Connection, queue: str) -> None:
    value(conn, "select pgque.subscribe(%s, 'c')", queue)
    start = forced_tick(conn, queue)
    for number in range(30):
        post(conn, queue, str(number), key="k")
        send_many(conn, queue, 10)
    end = forced_tick(conn, queue)
    bodies = "select ev_data from pgque.read_window(%s, %s, %s) where ev_key = 'k'"
    assert column(conn, bodies, queue, start, end) == [str(number) for number in range(30)]


def test_a_rest_without_the_tick_that_ends_it_is_refused(conn: Connection, queue: str) -> None:
    start = forced_tick(conn, queue)
    sent = offer(conn, queue, 5)
    end = forced_tick(conn, queue)
    call = "select * from pgque.next_window(%s, %s, %s, %s, null, %s)"
    for arguments in (
        (start, sent[0], None, None),
        (start, sent[0], 0, end),
        (start, None, 0, None),
        (end, 1, None, end),
    ):
        refused("PQ005", rows, conn, call, queue, *arguments)
    refused("PQ015", rows, conn, call, queue, start, sent[0], None, end + 1)
    assert rows(conn, call, queue, start, sent[0], None, end) == [(end, None)]


def test_notes_about_a_part_that_was_read_outlive_the_rest_of_its_window(
    conn: Connection, queue: str
) -> None:
    subscribe(conn, queue)
    start = value(conn, "select pgque.tick_for(%s, 'latest')", queue)
    sent = send_many(conn, queue, 4)
    end = forced_tick(conn, queue)
    stage = "select pgque.stage_dead(%s, 'c', %s, %s, array['bad', 'bad'])"
    assert value(conn, stage, queue, end, [sent[0], sent[3]]) == 2
    assert value(conn, "select pgque.unstage_dead(%s, 'c', %s, after_id => %s)", queue, start, sent[1]) == 1
    value(conn, "select pgque.seek(%s, 'c', %s)", queue, end)
    assert column(conn, "select ev_id from pgque.dlq_inspect(%s)", queue) == [sent[0]]


def test_the_lag_within_a_window_counts_what_comes_behind_the_id(conn: Connection, queue: str) -> None:
    subscribe(conn, queue)
    start = value(conn, "select pgque.tick_for(%s, 'latest')", queue)
    sent = send_many(conn, queue, 40)
    forced_tick(conn, queue)
    lag = "select ticks_behind, events_behind from pgque.stream_lag(%s, 'c', %s, after_id => %s)"
    assert rows(conn, lag, queue, start, sent[29]) == [(1, 10)]


def test_maintenance_keeps_the_map_of_a_window_that_a_stream_reads(own: Connection) -> None:
    value(own, "select pgque.create_queue('q', '{\"max_window\": 20}')")
    start = value(own, "select pgque.open_stream('q', 'c')")
    offer(own, "q", 2000)
    next(windows(own, "q", start, "c"))
    value(own, "select pgque.maint_tables()")
    assert value(own, "select count(*) > 0 from pgque.window_map")
    value(own, "select pgque.seek('q', 'c', pgque.tick_for('q', 'latest'))")
    value(own, "select pgque.maint_tables()")
    assert value(own, "select count(*) from pgque.window_map") == 0
