"""How soon a queue may tick again: its gap, its consumers, the period; and what bounds the storage of its ticks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    configure,
    drain,
    forced_tick,
    leaf,
    refused,
    rows,
    send,
    set_clock,
    subscribe,
    tick,
    value,
)


def stop_clock(conn: Connection, ms: int) -> None:
    """Let the engine's clock stand at a millisecond of the test's time."""
    set_clock(conn, f"timestamptz '2040-01-01' + interval '{ms} milliseconds'")


@dataclass
class Ticked:
    """A queue q that ticked at 0 ms, and what the loop knows of it."""

    conn: Connection
    known: str

    def looks_at(self, ms: int, period: str = "100 milliseconds") -> str:
        """Tell whether the loop checks the queue at that time, or when it will."""
        stop_clock(self.conn, ms)
        ((now, early, at),) = rows(
            self.conn,
            "select cardinality(s.looks), cardinality(s.early), round(extract(epoch from s.early_until - timestamptz '2040-01-01') * 1000)"
            " from pgque._queues_due(pgque._ticked_queues(), %s::pgque.look[], %s) s",
            self.known,
            period,
        )
        if now:
            assert early == 0
            return "now"
        return f"at {at}" if early else "never"


@pytest.fixture
def ticked(own: Connection) -> Ticked:
    stop_clock(own, -1_000_000)
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", ticker_idle_period="1 day")
    subscribe(own, "q")
    stop_clock(own, 0)
    send(own, "q")
    known = value(
        own,
        "select array(select pgque._check_queue(l) from pgque._queues_due(pgque._ticked_queues(), '{}', '100 milliseconds') s,"
        " unnest(s.looks) l)::text",
    )
    send(own, "q")
    return Ticked(own, known)


def test_a_queue_ticks_again_when_its_gap_has_passed(ticked: Ticked) -> None:
    assert ticked.looks_at(1) == "at 20"
    assert ticked.looks_at(19) == "at 20"
    assert ticked.looks_at(20) == "now"


def test_the_gap_of_a_queue_and_its_default_change_at_once(ticked: Ticked) -> None:
    value(ticked.conn, "select pgque.set_default_config('tick_gap', '50 milliseconds')")
    assert ticked.looks_at(1) == "at 50"
    configure(ticked.conn, "q", tick_gap="5 milliseconds")
    assert ticked.looks_at(1) == "at 5"
    value(ticked.conn, "select pgque.set_queue_config('q', 'tick_gap', null)")
    assert ticked.looks_at(1) == "at 50"


def test_the_gap_is_four_milliseconds_a_consumer_and_at_most_the_period(ticked: Ticked) -> None:
    for number in range(14):
        subscribe(ticked.conn, "q", f"c{number}")
    assert ticked.looks_at(1) == "at 60"
    for number in range(14, 30):
        subscribe(ticked.conn, "q", f"c{number}")
    assert ticked.looks_at(1) == "at 100"
    assert ticked.looks_at(1, "40 milliseconds") == "at 40"
    assert ticked.looks_at(1, "1 second") == "at 124"


def test_the_workers_of_a_pool_count_as_one_consumer(ticked: Ticked) -> None:
    for number in range(30):
        value(ticked.conn, "select pgque.register_subconsumer('q', 'pool', %s)", f"w{number}")
    assert ticked.looks_at(1) == "at 20"


def test_a_forced_tick_waits_for_no_gap(ticked: Ticked) -> None:
    value(ticked.conn, "select pgque.force_next_tick('q')")
    assert ticked.looks_at(1) == "now"


def test_a_tick_later_than_now_is_not_waited_for(ticked: Ticked) -> None:
    assert ticked.looks_at(-5_000) == "now"


def test_a_gap_keeps_back_no_other_queue(ticked: Ticked) -> None:
    value(ticked.conn, "select pgque.create_queue('other')")
    send(ticked.conn, "other")
    stop_clock(ticked.conn, 1)
    ((looks, early),) = rows(
        ticked.conn,
        "select array(select q.queue_name from unnest(s.looks) l join pgque.queue q using (queue_id)),"
        " array(select q.queue_name from unnest(s.early) l join pgque.queue q using (queue_id))"
        " from pgque._queues_due(pgque._ticked_queues(), %s::pgque.look[], '100 milliseconds') s",
        ticked.known,
    )
    assert (looks, early) == (["other"], ["q"])


@pytest.mark.parametrize("gap", ["0", "0.5 milliseconds", "60.001 seconds", "-1 second", "soon", ""])
def test_a_gap_out_of_range_is_refused(conn: Connection, queue: str, gap: str) -> None:
    for call, names in (
        ("set_queue_config(%s, 'tick_gap', %s)", (queue,)),
        ("set_default_config('tick_gap', %s)", ()),
    ):
        error = refused("PQ005", rows, conn, f"select pgque.{call}", *names, gap)
        assert "1 millisecond to 1 minute" in str(error.diag.message_hint)


@pytest.mark.parametrize("share", [None, -1, 0, 101])
def test_a_share_out_of_range_is_refused(own: Connection, share: int | None) -> None:
    assert value(own, "select pgque.set_tick_share(40)") == 40
    error = refused("PQ005", rows, own, "select pgque.set_tick_share(%s::int)", share)
    assert "1 to 100 percent" in str(error.diag.message_hint)
    assert value(own, "select s.share from pgque._loop_state() s") == 0.4


def test_storage_too_small_for_a_table_of_ticks_is_refused(conn: Connection, queue: str) -> None:
    for bad in ("1048575", "-1", "64 MB", "1 hour"):
        refused("PQ005", rows, conn, "select pgque.set_queue_config(%s, 'tick_storage', %s)", queue, bad)


def tick_often(conn: Connection, queue: str, until: Callable[[], bool]) -> None:
    """Tick until something is so."""
    for _ in range(50):
        conn.execute(
            f"do $$ begin for i in 1..500 loop perform pgque.force_next_tick('{queue}'); perform pgque.ticker('{queue}');"
            " end loop; end $$".encode()
        )
        if until():
            return
    raise AssertionError("25,000 ticks did not do it")


def test_ticks_that_fill_their_part_of_the_storage_bring_the_next_rotation(
    conn: Connection, subscribed: str
) -> None:
    def is_full() -> bool:
        name = leaf(conn, subscribed, kind="tick")
        return bool(value(conn, "select pg_total_relation_size(%s::regclass) >= 1048576 / 3", name))

    rotation = "select pgque.maint_rotate_tables_step1(%s)"
    subscribe(conn, subscribed, "slow")
    configure(conn, subscribed, tick_storage=1048576)
    sent = []
    turns = []
    for _ in range(4):
        sent.append(send(conn, subscribed))
        forced_tick(conn, subscribed)
        assert value(conn, rotation, subscribed) == 0, "neither is the period over nor the table full"
        tick_often(conn, subscribed, is_full)
        assert drain(conn, subscribed) == sent[-1:]
        turns.append(value(conn, rotation, subscribed))
    assert turns == [1, 1, 0, 0], "the third table is the one that the slow consumer reads"
    assert drain(conn, subscribed, "slow") == sent
    assert value(conn, rotation, subscribed) == 1
    assert value(conn, rotation, subscribed) == 0


def test_the_loop_asks_for_a_rotation_at_each_thousandth_tick(ticked: Ticked) -> None:
    conn = ticked.conn
    configure(conn, "q", tick_storage=1048576)
    tick_often(
        conn,
        "q",
        lambda: bool(
            value(conn, "select pg_total_relation_size(%s::regclass) > 400000", leaf(conn, "q", kind="tick"))
        ),
    )
    look = (  # as if the last tick was long ago, so that no gap is left
        "select l.ticked from pgque._queues_due(pgque._ticked_queues(), '{}', '100 milliseconds') s,"
        " unnest(s.looks) k, pgque._check_queue(row(k.queue_id, k.event_seq, k.tick_seq, '-infinity', k.settled, k.ticked)) l"
    )
    table = leaf(conn, "q", kind="tick")
    for _ in range(1_000):
        send(conn, "q")
        assert value(conn, look)
        if leaf(conn, "q", kind="tick") != table:
            break
    assert leaf(conn, "q", kind="tick") != table
    assert value(conn, "select max(t.tick_id) from pgque.tick t") % 1_000 == 0
    drain(conn, "q")
    last = send(conn, "q")
    tick(conn, "q")
    assert drain(conn, "q") == [last]


@pytest.mark.slow  # the loop uses 3 % of a core
def test_no_queue_starves_where_the_loop_may_use_hardly_anything(
    own: Connection,
    background: Callable[..., Any],
    connect: Callable[..., Connection],
    wait_until: Callable[..., None],
) -> None:
    """Ten queues get messages all the time; twenty others get one each, one after the other."""
    names = [f"q{number}" for number in range(30)]
    for name in names:
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    value(own, "select pgque.set_tick_share(3)")
    loop = background(lambda c: c.execute("call pgque.ticker_loop('1 hour')"), connect(own.info.dsn))

    def busy(conn: Connection) -> None:
        while not value(conn, "select exists (select from pgque.config c where c.stopped_at is not null)"):
            for name in names[:10]:
                send(conn, name)

    sender = background(busy, connect(own.info.dsn))
    for name in names[10:]:
        sent = send(own, name)
        got: list[int] = []

        def arrived(name: str = name, got: list[int] = got) -> bool:
            got.extend(drain(own, name))
            return bool(got)

        wait_until(arrived, f"the message of {name}", timeout=60)
        assert got == [sent]
    value(own, "select pgque.stop()")
    sender.result()
    loop.result()


def meanwhile(
    conn: Connection,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    seconds: int,
    query: str,
) -> int:
    """Run the loop for some seconds and a query again and again beside it; return how often that ran."""
    loop = background(
        lambda c: (
            c.execute("set track_functions = 'all'")
            and c.execute(f"call pgque.ticker_loop('{seconds} seconds')")
        ),
        connect(conn.info.dsn),
    )
    count = 0
    while not loop.done:
        conn.execute(query.encode())
        count += 1
    loop.result()
    return count


def test_a_smaller_share_of_a_core_makes_fewer_ticks(
    own: Connection, connect: Callable[..., Connection], background: Callable[..., Any]
) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", tick_gap="1 millisecond")
    last = "select max(t.tick_id) from pgque.tick t"
    ticks = [value(own, last)]
    for share in (1, 100):
        value(own, "select pgque.set_tick_share(%s)", share)
        meanwhile(own, connect, background, 2, "select pgque.send('q', 'x'::text)")
        ticks.append(value(own, last))
    few, many = ticks[1] - ticks[0], ticks[2] - ticks[1]
    assert 0 < 3 * few < many


def test_other_commits_make_the_loop_compare_snapshots_and_nothing_else(
    own: Connection,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    """Here no queue may tick again for a minute, and what commits has nothing to do with them."""
    own.execute("create table other (n int)")
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", tick_gap="1 minute")
    value(own, "select pgque.set_tick_period_ms(60000)")
    send(own, "q")
    commits = meanwhile(own, connect, background, 2, "insert into other values (1)")
    calls = "select f.calls from pg_stat_user_functions f where f.funcname = '_queues_due' and f.calls > 0"
    wait_until(lambda: rows(own, calls), "the statistics of the loop")
    assert value(own, calls) <= 5 < 20 < commits


def test_checks_become_rarer_some_seconds_after_the_last_message(
    own: Connection, connect: Callable[..., Connection], background: Callable[..., Any]
) -> None:
    """Each check is a sleep of the loop's session, which gives up its core for it."""
    value(own, "select pgque.create_queue('q')")

    def sleeps(status: Path, seconds: float) -> int:
        counts = []
        for pause in (seconds, 0):
            counts.append(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.M)[0]))
            time.sleep(pause)
        return counts[1] - counts[0]

    for _ in range(4):  # a machine that is busy slows the first checks too
        loop = background(lambda c: c.execute("call pgque.ticker_loop('7 seconds')"), connect(own.info.dsn))
        status = Path(f"/proc/{loop.pid}/status")
        if not status.exists():
            pytest.skip("the server's processes are not on this machine")
        send(own, "q")
        soon = sleeps(status, 2)
        time.sleep(2.5)
        later = sleeps(status, 2)
        loop.result()
        if 2 * later < soon:
            break
    assert 2 * later < soon


def test_a_queue_that_is_locked_keeps_the_others_ticking(
    own: Connection,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    transaction: Callable[..., Connection],
) -> None:
    for name in ("q", "locked"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    send(own, "locked")
    other = transaction("read committed", own.info.dsn)
    other.execute(f"lock table {leaf(own, 'locked', kind='tick')} in access exclusive mode".encode())
    last = "select max(t.tick_id) from pgque.tick_1_0 t"
    before = value(own, last)
    meanwhile(own, connect, background, 5, "select pgque.send('q', 'x'::text)")
    assert value(own, last) - before > 20
    other.rollback()


def test_a_queue_that_is_made_while_a_loop_with_a_long_period_runs_is_ticked_by_it(
    own: Connection,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    value(own, "select pgque.set_tick_period_ms(60000)")
    loop = background(lambda c: c.execute("call pgque.ticker_loop('5 seconds')"), connect(own.info.dsn))
    wait_until(
        lambda: value(own, "select s.status from pgque.status() s where s.component = 'ticker'") == "running"
    )
    value(own, "select pgque.create_queue('q')")
    send(own, "q")
    loop.result()
    assert value(own, "select max(t.tick_id) from pgque.tick t") == 2
