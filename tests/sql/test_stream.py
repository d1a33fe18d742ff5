"""How far behind a reader of offsets is, and dead letters of what it could not parse."""

from __future__ import annotations

from conftest import Connect, Role
from sql.helpers import (
    Connection,
    column,
    forced_tick,
    leaf,
    move_clock,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    value,
)

LAG = (
    "select l.newest_tick, l.ticks_behind, l.events_behind, extract(epoch from l.oldest_pending)::int"
    " from pgque.stream_lag(%s, 'c', %s) as l"
)


def stage(conn: Connection, queue: str, tick: int | None, *ids: int) -> int:
    """Note messages as not usable, each for the reason 'bad <id>'."""
    reasons = [f"bad {number}" for number in ids]
    found: int = value(conn, "select pgque.stage_dead(%s, 'c', %s, %s, %s)", queue, tick, list(ids), reasons)
    return found


def own_one(own: Connection) -> str:
    """Return a queue with consumer c in a database of its own."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    return "q"


def dead(conn: Connection, queue: str) -> list[str]:
    return column(conn, "select d.dl_reason from pgque.dlq_inspect(%s) as d order by d.ev_id", queue)


def seek(conn: Connection, queue: str, tick: int) -> None:
    value(conn, "select pgque.seek(%s, 'c', %s)", queue, tick)


def test_the_lag_of_a_tick_is_what_comes_behind_it(own: Connection) -> None:
    own_queue = own_one(own)
    ticks = []
    for count in (3, 2, 0):
        send_many(own, own_queue, count)
        ticks.append(forced_tick(own, own_queue))
    move_clock(own, "60 seconds")
    assert rows(own, LAG, own_queue, ticks[0]) == [(ticks[2], 2, 2, 60)]
    assert rows(own, LAG, own_queue, ticks[1]) == [(ticks[2], 1, 0, 0)]
    assert rows(own, LAG, own_queue, ticks[2]) == [(ticks[2], 0, 0, 0)]
    refused("PQ015", rows, own, LAG, own_queue, 999_999)


def test_the_lag_does_not_wait_for_a_table_that_is_locked(
    conn: Connection, queue: str, connect: Connect
) -> None:
    subscribe(conn, queue)
    tick = forced_tick(conn, queue)
    send_many(conn, queue, 3)
    newest = forced_tick(conn, queue)
    holder = connect(autocommit=False)
    holder.execute(f"lock table {leaf(conn, queue)} in access exclusive mode".encode())
    assert rows(conn, LAG, queue, tick) == [(newest, 1, 3, None)]
    holder.rollback()
    assert rows(conn, LAG, queue, tick)[0][3] is not None


def test_staged_messages_are_dead_when_the_consumer_passes_their_tick(conn: Connection, queue: str) -> None:
    subscribe(conn, queue)
    first, second, third = send(conn, queue), send(conn, queue), send(conn, queue)
    one = forced_tick(conn, queue)
    fourth = send(conn, queue)
    two = forced_tick(conn, queue)
    assert stage(conn, queue, one, first, second) == 2
    assert stage(conn, queue, one, first) == 0  # a task that runs again
    assert stage(conn, queue, two, fourth) == 1
    refused("PQ005", stage, conn, queue, None, first)
    assert dead(conn, queue) == []
    seek(conn, queue, one)
    assert dead(conn, queue) == [f"bad {first}", f"bad {second}"]
    # Read again, and good this time
    assert value(conn, "select pgque.unstage_dead(%s, 'c', %s)", queue, one) == 1
    seek(conn, queue, two)
    assert dead(conn, queue) == [f"bad {first}", f"bad {second}"]
    assert third not in column(conn, "select d.ev_id from pgque.dlq_inspect(%s) as d", queue)


def test_of_the_bodies_of_a_key_that_do_not_parse_the_newest_is_dead(conn: Connection, queue: str) -> None:
    subscribe(conn, queue)
    ticks = []
    for text in ("good", "bad 1", "bad 2"):  # each replaces the one before, under one id
        number = value(conn, "select pgque.send(%s, 't', %s::text, key => 'a')", queue, text)
        ticks.append(forced_tick(conn, queue))
        if text != "good":
            stage(conn, queue, ticks[-1], number)
    for tick, letters in zip(ticks, ([], ["bad 1"], ["bad 2"]), strict=True):
        seek(conn, queue, tick)
        assert column(conn, "select d.ev_data from pgque.dlq_inspect(%s) as d", queue) == letters


def test_a_consumer_that_is_moved_by_its_old_name_has_its_dead_letters_too(
    conn: Connection, queue: str
) -> None:
    subscribe(conn, queue)
    number = send(conn, queue)
    tick = forced_tick(conn, queue)
    stage(conn, queue, tick, number)
    value(conn, "select pgque.register_consumer_at(%s, 'c', %s)", queue, tick)
    assert dead(conn, queue) == [f"bad {number}"]


def test_notes_from_before_a_seek_back_kill_nothing_that_is_read_again(conn: Connection, queue: str) -> None:
    subscribe(conn, queue)
    before = forced_tick(conn, queue)
    number = send(conn, queue)
    tick = forced_tick(conn, queue)
    seek(conn, queue, tick)
    stage(conn, queue, tick, number)  # a task of a run that was killed
    send(conn, queue)
    seek(conn, queue, forced_tick(conn, queue))
    assert dead(conn, queue) == []
    value(conn, "select pgque.seek(%s, 'c', %s, true)", queue, before)
    assert dead(conn, queue) == []


def test_a_window_in_which_all_is_bad_is_no_square_of_its_size(own: Connection) -> None:
    queue = own_one(own)
    send_many(own, queue, 10_000)
    tick = forced_tick(own, queue)
    value(
        own,
        "select pgque.stage_dead('q', 'c', %s, array_agg(e.ev_id), array_agg('bad'::text)) from pgque.event as e",
        tick,
    )
    own.execute("set statement_timeout = '60s'")  # it took minutes by comparing each id with each
    seek(own, queue, tick)
    assert len(dead(own, queue)) == 100 and value(own, "select count(*) from pgque.dead_letter") == 10_000


def test_what_was_staged_goes_with_the_consumer(own: Connection) -> None:
    own_queue = own_one(own)
    number = send(own, own_queue)
    stage(own, own_queue, forced_tick(own, own_queue), number)
    value(own, "select pgque.unsubscribe(%s, 'c')", own_queue)
    value(own, "select pgque.maint()")
    assert value(own, "select pg_relation_size('pgque.bad_record')") == 0


def test_staging_needs_the_right_to_consume_the_queue(
    conn: Connection, queue: str, writer: Role, connect: Connect
) -> None:
    subscribe(conn, queue)
    other = connect(writer.dsn)
    error = refused("42501", value, other, "select pgque.stage_dead(%s, 'c', 1, array[1], array['x'])", queue)
    assert "stage_dead" in str(error)
    value(conn, "select pgque.grant_queue(%s, %s, 'consume')", queue, writer.name)
    assert value(other, "select pgque.stage_dead(%s, 'c', 1, array[1], array['x'])", queue) == 1
