"""What the loop knows of queues, so that it looks at those only where something can have come.

Queues here have no idle tick within the test, so what the loop missed would never be ticked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    drain,
    leaf,
    move_clock,
    nack,
    need_prepared_transactions,
    post,
    pump,
    receive,
    rows,
    send,
    subscribe,
    value,
)


class Loop:
    """The ticker's loop in steps: what it knows goes from one look to the next, as its variables do."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.known = "{}"

    def look(self) -> int:
        """Look once, as in one transaction of the loop; return how many queues were looked at."""
        with self.conn.transaction():
            # As if the gap had passed: without it a queue is looked at a little later.
            looks = value(
                self.conn,
                "select (pgque._queues_due(pgque._ticked_queues(), array(select row(k.queue_id, k.event_seq, k.tick_seq,"
                " k.tick_time - case when k.settled is null then '0' else interval '20 milliseconds' end, k.settled, k.ticked)"
                "::pgque.look from unnest(%s::pgque.look[]) k), '0')).looks::text",
                self.known,
            )
            looks = value(
                self.conn,
                "select array(select pgque._check_queue(l) from unnest(%s::pgque.look[]) l)::text",
                looks,
            )
            self.known = value(
                self.conn,
                "select (n.looks || array(select k from unnest(%s::pgque.look[]) k"
                " where k.queue_id not in (select l.queue_id from unnest(n.looks) l)))::text"
                " from (select %s::pgque.look[] as looks) n",
                self.known,
                looks,
            )
        return int(value(self.conn, "select cardinality(%s::pgque.look[])", looks))

    def settle(self) -> None:
        """Look until there is nothing left to look at."""
        for _ in range(3):
            if self.look() == 0:
                return
        raise AssertionError(f"still something to look at: {self.known}")


def ends(conn: Connection) -> tuple[int, int]:
    """The first and the last tick of the queue."""
    (found,) = rows(conn, "select min(t.tick_id), max(t.tick_id) from pgque.tick t")
    return found[0], found[1]


@pytest.fixture
def quiet(own: Connection) -> Connection:
    """A database with one queue, q, and one consumer."""
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", ticker_idle_period="1 day")
    subscribe(own, "q")
    return own


@pytest.fixture
def loop(quiet: Connection) -> Loop:
    found = Loop(quiet)
    found.settle()
    return found


def test_a_queue_in_which_nothing_happens_is_not_looked_at_again(loop: Loop) -> None:
    assert [loop.look() for _ in range(3)] == [0, 0, 0]


def test_a_sent_message_is_ticked_at_the_next_check(quiet: Connection, loop: Loop) -> None:
    for _ in range(3):
        sent = send(quiet, "q")
        assert loop.look() == 1
        assert drain(quiet, "q") == [sent]
        loop.settle()


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_a_late_commit_is_ticked_although_no_transaction_id_follows_it(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection], isolation: str
) -> None:
    writer = transaction(isolation, quiet.info.dsn)
    late = send(writer, "q")
    early = send(quiet, "q")
    for _ in range(3):
        assert loop.look() == 1, "the writer may commit at any time"
    assert drain(quiet, "q") == [early]
    writer.commit()
    assert loop.look() == 1
    assert drain(quiet, "q") == [late]
    loop.settle()


def test_an_id_taken_before_anything_else_of_the_transaction_counts(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection]
) -> None:
    writer = transaction("read committed", quiet.info.dsn)
    number = value(writer, "select nextval(q.queue_event_seq) from pgque.queue q")
    for _ in range(3):
        assert loop.look() == 1, "there is no transaction id yet that could be looked for"
    writer.execute(
        "insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data)"
        " select q.queue_id * 3 + q.queue_cur_table, %s, pgque.clock(), pg_current_xact_id(), 't', 'x' from pgque.queue q",
        (number,),
    )
    writer.commit()
    assert loop.look() == 1
    assert drain(quiet, "q") == [number]


def test_a_savepoint_that_is_taken_back_leaves_a_writer_that_may_send_again(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection]
) -> None:
    writer = transaction("read committed", quiet.info.dsn)
    writer.execute("savepoint s")
    send(writer, "q")
    writer.execute("rollback to s")
    loop.look()
    kept = send(writer, "q")
    loop.look()
    loop.look()
    writer.commit()
    assert loop.look() == 1
    assert drain(quiet, "q") == [kept]
    loop.settle()


def test_rolled_back_sends_leave_nothing_to_check(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection]
) -> None:
    writer = transaction("read committed", quiet.info.dsn)
    send(writer, "q")
    assert loop.look() == 1
    writer.rollback()
    loop.settle()
    assert drain(quiet, "q") == []


def test_a_prepared_transaction_is_a_writer_until_it_is_finished(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection]
) -> None:
    need_prepared_transactions(quiet)
    writer = transaction("read committed", quiet.info.dsn)
    sent = send(writer, "q")
    writer.execute("prepare transaction 'looks'")
    for _ in range(3):
        assert loop.look() == 1
    writer.autocommit = True
    writer.execute("commit prepared 'looks'")
    assert loop.look() == 1
    assert drain(quiet, "q") == [sent]
    loop.settle()


def test_another_queue_is_left_alone_while_one_has_an_open_writer(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection]
) -> None:
    value(quiet, "select pgque.create_queue('other')")
    configure(quiet, "other", ticker_idle_period="1 day")
    loop.settle()
    writer = transaction("read committed", quiet.info.dsn)
    send(writer, "q")
    send(quiet, "other")
    assert loop.look() == 2
    assert loop.look() == 2
    assert loop.look() == 1
    writer.rollback()
    loop.settle()


@pytest.mark.parametrize("how", ["retry", "delay"])
def test_messages_that_another_session_reinserts_into_the_log_are_ticked(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection], how: str
) -> None:
    if how == "delay":
        sent = post(quiet, "q", delay="1 millisecond")
    else:
        sent = send(quiet, "q")
        loop.settle()
        (message,) = receive(quiet, "q")
        nack(quiet, message, "0")
        ack(quiet, message.batch_id)
        value(quiet, "select pgque.open_stream('q', 'c')")  # so that the retry enters the log
    loop.settle()
    other = transaction("read committed", quiet.info.dsn)
    assert pump(other) == 1
    for _ in range(3):
        assert loop.look() == 1
    other.commit()
    assert loop.look() == 1
    assert drain(quiet, "q") == [sent]
    loop.settle()


def test_a_tick_that_is_asked_for_is_made(quiet: Connection, loop: Loop) -> None:
    before = value(quiet, "select pgque.force_next_tick('q')")
    assert loop.look() == 1
    assert value(quiet, "select last_tick_id from pgque.get_queue_info('q')") == before + 1
    loop.settle()


def test_max_lag_is_waited_for(quiet: Connection, loop: Loop) -> None:
    configure(quiet, "q", ticker_max_lag="2 seconds")
    quiet.execute(
        "create function pg_temp.later() returns void language sql as $$"
        " create or replace function pgque.clock() returns timestamptz language sql volatile as"
        " 'select clock_timestamp() + interval ''3 seconds''' $$"
    )
    value(quiet, "select pgque.force_next_tick('q')")
    loop.settle()
    sent = send(quiet, "q")
    assert [loop.look() for _ in range(3)] == [1, 1, 1]
    assert drain(quiet, "q") == []
    value(quiet, "select pg_temp.later()")
    assert loop.look() == 1
    assert drain(quiet, "q") == [sent]
    loop.settle()


def test_a_tick_gap_above_the_tick_period_is_kept(
    quiet: Connection, background: Callable[..., Any], connect: Callable[..., Connection]
) -> None:
    configure(quiet, "q", tick_gap="30 seconds")
    first = send(quiet, "q")
    quiet.execute("call pgque.ticker_loop('300 milliseconds')")
    assert drain(quiet, "q") == []  # a loop that begins heeds the tick of another
    move_clock(quiet, "31 seconds")
    loop = background(
        lambda c: c.execute("call pgque.ticker_loop('1500 milliseconds')"), connect(quiet.info.dsn)
    )
    while not (found := drain(quiet, "q")):
        assert not loop.done
    send(quiet, "q")
    loop.result()
    assert (found, drain(quiet, "q")) == ([first], [])
    assert value(quiet, "select pgque.ticker()") == 1  # the gap is the loop's


def test_idle_ticks_are_made_when_they_are_due(quiet: Connection, loop: Loop) -> None:
    last = "select last_tick_id from pgque.get_queue_info('q')"
    before = value(quiet, last)
    assert loop.look() == 0
    configure(quiet, "q", ticker_idle_period="1 microsecond")
    assert [loop.look() for _ in range(3)] == [1, 1, 1]
    assert value(quiet, last) == before + 3
    configure(quiet, "q", ticker_idle_period="1 day")
    loop.settle()


def test_what_was_sent_while_the_ticker_had_a_pause_is_ticked_after_it(quiet: Connection, loop: Loop) -> None:
    configure(quiet, "q", ticker_paused="true")
    sent = send(quiet, "q")
    assert loop.look() == 0
    configure(quiet, "q", ticker_paused="false")
    loop.settle()
    assert drain(quiet, "q") == [sent]


def test_a_queue_that_is_locked_holds_up_no_other(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection]
) -> None:
    value(quiet, "select pgque.create_queue('locked')")
    configure(quiet, "locked", ticker_idle_period="1 day")
    subscribe(quiet, "locked")
    loop.settle()
    waits = send(quiet, "locked")
    other = transaction("read committed", quiet.info.dsn)
    sequence = value(quiet, "select q.queue_event_seq::text from pgque.queue q where q.queue_name = 'locked'")
    other.execute(f"alter sequence {sequence} cache 1")
    sent = send(quiet, "q")
    loop.look()
    assert drain(quiet, "q") == [sent]
    assert drain(quiet, "locked") == []
    other.rollback()
    loop.settle()
    assert drain(quiet, "locked") == [waits]


def test_ticks_go_on_while_a_table_of_all_queues_is_locked(
    quiet: Connection,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
) -> None:
    """VACUUM FULL and the like hold such locks."""
    other = transaction("read committed", quiet.info.dsn)
    other.execute(
        "lock table pgque.retry_queue, pgque.config, pgque.subscriber, pgque.queue_option in access exclusive mode"
    )
    loop = background(lambda c: c.execute("call pgque.ticker_loop('4 seconds')"), connect(quiet.info.dsn))
    for _ in range(2):
        _, last = ends(quiet)
        send(quiet, "q")
        while ends(quiet)[1] == last:
            assert not loop.done
    other.rollback()
    value(quiet, "select pgque.stop()")
    loop.result()


def test_a_queue_whose_tables_are_locked_is_looked_at_once_a_second(
    quiet: Connection, loop: Loop, transaction: Callable[..., Connection]
) -> None:
    """Each look waits for the lock for a while, and all other queues wait with it."""
    other = transaction("read committed", quiet.info.dsn)
    other.execute(f"lock table {leaf(quiet, 'q', kind='tick')} in access exclusive mode".encode())
    waits = send(quiet, "q")
    assert [loop.look() for _ in range(3)] == [1, 0, 0]
    other.rollback()
    assert loop.look() == 0
    move_clock(quiet, "1 second")
    loop.settle()
    assert drain(quiet, "q") == [waits]


def test_a_body_that_replaces_another_is_ticked_for_those_who_read_windows(
    quiet: Connection, loop: Loop
) -> None:
    post(quiet, "q", "first", key="k")
    loop.look()
    post(quiet, "q", "second", key="k")
    loop.look()
    assert rows(quiet, "select r.ev_data from pgque.read_window('q', %s, %s) r order by 1", *ends(quiet)) == [
        ("first",),
        ("second",),
    ]


def test_the_loop_and_a_drop_do_not_wait_for_each_other(
    quiet: Connection, transaction: Callable[..., Connection]
) -> None:
    for number in range(3):
        value(quiet, "select pgque.create_queue(%s)", f"more{number}")
    ticker = transaction("read committed", quiet.info.dsn)
    value(ticker, "select cardinality((pgque._queues_due(pgque._ticked_queues(), '{}', '0')).looks)")
    # It has all sequences locked now.
    quiet.execute("set statement_timeout = '5s'")
    assert value(quiet, "select pgque.drop_queue('more1')") == 1
    send(quiet, "q")
    ticker.rollback()
    value(quiet, "select pgque.maint()")
    left = (
        "select count(*) from pg_class c where c.relnamespace = 'pgque'::regnamespace and c.relname like %s"
    )
    gone = value(quiet, "select max(q.queue_id) - 1 from pgque.queue q")
    assert value(quiet, left, f"event\\_{gone}\\_%") == 0


def test_a_queue_that_is_dropped_is_forgotten(quiet: Connection, loop: Loop) -> None:
    value(quiet, "select pgque.create_queue('goes')")
    loop.settle()
    value(quiet, "select pgque.drop_queue('goes')")
    sent = send(quiet, "q")
    assert loop.look() == 1
    assert drain(quiet, "q") == [sent]
    loop.settle()


@pytest.mark.slow
def test_the_loop_serves_every_one_of_more_queues_than_it_checks_together(own: Connection) -> None:
    for number in range(1, 512):
        value(own, "select pgque.create_queue(%s)", f"q{number}")
    unserved = "select count(*) from pgque.get_queue_info() i where i.ev_new > 0"
    for _ in range(2):
        value(own, "select count(pgque.send(q.queue_name, 'x')) from pgque.queue q where q.queue_id % 3 = 0")
        assert value(own, unserved) > 160
        for _ in range(5):  # a slow machine takes more than one; a queue that is passed over stays so
            own.execute("call pgque.ticker_loop('6 seconds')")
            if value(own, unserved) == 0:
                break
        assert value(own, unserved) == 0


def test_what_gives_way_to_messages_is_done_in_the_end(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    """Ticks that were asked for, and rotation, of more queues than a round of the loop has time for."""
    value(own, "select pgque.set_tick_period_ms(1)")
    for number in range(60):
        value(own, "select pgque.create_queue(%s)", f"q{number}")
        configure(own, f"q{number}", ticker_idle_period="1 day", rotation_period="1 microsecond")
        if number % 2:
            send(own, f"q{number}")
        else:
            value(own, "select pgque.force_next_tick(%s)", f"q{number}")
    loop = background(lambda c: c.execute("call pgque.ticker_loop('60 seconds')"), connect(own_dsn))
    done = (
        "select count(*) filter (where q.queue_cur_table > 0), count(*) filter (where i.last_tick_id > 1)"
        " from pgque.queue q cross join pgque.get_queue_info(q.queue_name) i"
    )
    wait_until(lambda: rows(own, done) == [(30, 60)], "every tick and rotation", timeout=50)
    value(own, "select pgque.stop()")
    loop.result(20)


def test_a_queue_with_keys_is_looked_at_when_a_body_is_replaced_and_not_else(
    quiet: Connection, loop: Loop
) -> None:
    first = value(quiet, "select pgque.send('q', 't', '1'::text, key => 'k')")
    loop.settle()
    assert loop.look() == 0
    assert value(quiet, "select pgque.send('q', 't', '2'::text, key => 'k')") == first
    assert loop.look() == 1
    loop.settle()
    assert [message.payload for message in receive(quiet, "q")] == ["2"]
