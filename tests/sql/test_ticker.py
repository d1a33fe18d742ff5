"""When a tick is made, by whom, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    column,
    configure,
    drain,
    forced_tick,
    move_clock,
    pump,
    receive,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)


def heard(listener: Connection) -> list[tuple[str, str]]:
    """Return the notifications that are there: a marker sent last says that none is on its way."""
    listener.execute("listen marker")
    listener.execute("notify marker")
    found = []
    for note in listener.notifies(timeout=10):
        if note.channel == "marker":
            break
        found.append((note.channel, note.payload))
    return found


def test_a_tick_is_made_at_once_for_a_lone_message_and_only_once(conn: Connection, subscribed: str) -> None:
    assert tick(conn, subscribed) is None
    sent = send(conn, subscribed)
    made = tick(conn, subscribed)
    assert made is not None
    assert tick(conn, subscribed) is None
    assert value(conn, "select i.last_tick_id from pgque.get_queue_info(%s) as i", subscribed) == made
    assert drain(conn, subscribed) == [sent]


def test_a_forced_tick_is_made_without_a_reason(conn: Connection, subscribed: str) -> None:
    last = value(conn, "select pgque.force_next_tick(%s)", subscribed)
    assert tick(conn, subscribed) == last + 1
    assert tick(conn, subscribed) is None
    assert value(conn, "select pgque.force_tick(%s)", subscribed) == last + 1
    assert tick(conn, subscribed) == last + 2


def test_a_tick_that_an_old_snapshot_asks_for_hides_no_message(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    old = transaction("repeatable read")
    first = send(conn, subscribed)
    tick(conn, subscribed)
    assert drain(conn, subscribed) == [first]
    second = send(conn, subscribed)
    last = tick(conn, subscribed)
    assert last is not None
    assert value(old, "select pgque.force_next_tick(%s)", subscribed) < last
    old.execute("commit")
    assert drain(conn, subscribed) == [second]
    assert tick(conn, subscribed) == last + 1


def test_an_idle_queue_ticks_once_an_idle_period(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    assert tick(own, "q") is None
    move_clock(own, "61 seconds")
    assert tick(own, "q") is not None
    assert tick(own, "q") is None
    configure(own, "q", ticker_idle_period="10 minutes")
    move_clock(own, "10 minutes")
    assert tick(own, "q") is None
    move_clock(own, "12 minutes")
    assert tick(own, "q") is not None


def test_a_tick_waits_for_the_count_or_the_lag_that_was_set(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", ticker_max_count=10, ticker_max_lag="30 seconds")
    send_many(own, "q", 9)
    assert tick(own, "q") is None
    send(own, "q")
    assert tick(own, "q") is not None
    send(own, "q")
    assert tick(own, "q") is None
    move_clock(own, "31 seconds")
    assert tick(own, "q") is not None


def test_ticker_for_all_queues_counts_its_ticks(own: Connection) -> None:
    for name in ("a", "b", "c"):
        value(own, "select pgque.create_queue(%s)", name)
    assert value(own, "select pgque.ticker()") == 0
    send(own, "a")
    send(own, "c")
    assert value(own, "select pgque.ticker()") == 2
    assert value(own, "select pgque.ticker()") == 0


def test_two_tickers_at_once_make_one_tick(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    sent = send(conn, subscribed)
    one = transaction()
    assert tick(one, subscribed) is not None
    other = background(lambda c: tick(c, subscribed))
    wait_for_lock(other.pid)
    # The ticker of all queues does not wait.
    conn.execute("set lock_timeout = '3s'")
    value(conn, "select pgque.ticker()")
    one.execute("commit")
    assert other.result() is None
    assert drain(conn, subscribed) == [sent]


def test_a_ticker_that_waited_makes_a_tick_for_what_came_meanwhile(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    sent = [send(conn, subscribed)]
    one = transaction()
    first = tick(one, subscribed)
    other = background(lambda c: tick(c, subscribed))
    wait_for_lock(other.pid)
    sent.append(send(conn, subscribed))
    one.execute("commit")
    second = other.result()
    assert first is not None
    assert second == first + 1
    assert drain(conn, subscribed, count=1) == sent


def test_a_rolled_back_tick_loses_nothing(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    sent = send(conn, subscribed)
    one = transaction()
    assert tick(one, subscribed) is not None
    one.execute("rollback")
    assert receive(conn, subscribed) == []
    assert tick(conn, subscribed) is not None
    assert drain(conn, subscribed) == [sent]


def test_tickers_and_producers_at_once_lose_nothing_and_repeat_nothing(
    conn: Connection, background: Callable[..., Any], subscribed: str
) -> None:
    stop: list[bool] = []

    def ticking(c: Connection) -> None:
        while not stop:
            value(c, "select pgque.ticker()")

    def producing(c: Connection) -> list[int]:
        sent = []
        for _ in range(150):
            with c.transaction():
                sent.append(send(c, subscribed))
                sent.append(send(c, subscribed))
        return sent

    tickers = [background(ticking) for _ in range(2)]
    producers = [background(producing) for _ in range(3)]
    got: list[int] = []
    while not all(p.done for p in producers):
        got += drain(conn, subscribed, count=5)
    stop.append(True)
    for job in tickers:
        job.result()
    forced_tick(conn, subscribed)
    got += drain(conn, subscribed)
    assert len(got) == len(set(got))
    assert sorted(got) == sorted(i for p in producers for i in p.result())


def test_a_tick_with_messages_notifies_once_and_nothing_else_does(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    listener = connect()
    listener.execute(f'listen "pgque_{subscribed}"'.encode())
    send_many(conn, subscribed, 3)
    assert heard(listener) == []
    made = tick(conn, subscribed)
    assert heard(listener) == [(f"pgque_{subscribed}", str(made))]
    tick(conn, subscribed)
    receive(conn, subscribed)
    value(conn, "select pgque.maint()")
    assert heard(listener) == []


def test_an_idle_tick_does_not_notify(own: Connection, own_dsn: str) -> None:
    value(own, "select pgque.create_queue('q')")
    with psycopg.connect(own_dsn, autocommit=True) as listener:
        listener.execute("listen pgque_q")
        move_clock(own, "2 minutes")
        assert tick(own, "q") is not None
        assert heard(listener) == []


def test_a_tick_that_covers_messages_notifies_whatever_its_reason(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    configure(conn, subscribed, ticker_max_lag="1 hour", ticker_idle_period="1 microsecond")
    listener = connect()
    listener.execute(f'listen "pgque_{subscribed}"'.encode())
    send(conn, subscribed)
    made = tick(conn, subscribed)
    assert heard(listener) == [(f"pgque_{subscribed}", str(made))]


def test_a_paused_ticker_makes_no_tick_until_it_goes_on(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, ticker_paused=True)
    sent = send(conn, subscribed)
    assert tick(conn, subscribed) is None
    value(conn, "select pgque.ticker()")
    assert receive(conn, subscribed) == []
    configure(conn, subscribed, ticker_paused=None)
    assert tick(conn, subscribed) is not None
    assert drain(conn, subscribed) == [sent]


def test_an_external_ticker_sets_id_time_and_sequence(conn: Connection, subscribed: str) -> None:
    error = refused("PQ005", rows, conn, "select pgque.ticker(%s, 10::bigint, now(), 5::bigint)", subscribed)
    assert subscribed in str(error)
    configure(conn, subscribed, external_ticker=True)
    sent = send(conn, subscribed)
    refused("PQ005", tick, conn, subscribed)
    value(conn, "select pgque.ticker()")
    assert receive(conn, subscribed) == []
    assert value(conn, "select pgque.ticker(%s, 10::bigint, now(), 5::bigint)", subscribed) == 10
    assert drain(conn, subscribed) == [sent]
    for tick_id, seq in ((10, 5), (9, 6), (11, 4)):
        refused(
            "PQ005",
            rows,
            conn,
            "select pgque.ticker(%s, %s::bigint, now(), %s::bigint)",
            subscribed,
            tick_id,
            seq,
        )
    for arguments in ("null, now(), 9", "12, null, 9"):
        refused("PQ005", rows, conn, f"select pgque.ticker(%s, {arguments})", subscribed)


def quick(conn: Connection) -> None:
    value(conn, "select pgque.set_tick_period_ms(10)")


def test_the_loop_delivers_messages_retries_and_late_commits(
    own: Connection, own_dsn: str, connect: Callable[..., Connection], background: Callable[..., Any]
) -> None:
    quick(own)
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    loop = background(lambda c: c.execute("call pgque.ticker_loop('20 seconds')"), connect(own_dsn))
    listener = connect(own_dsn)
    listener.execute("listen pgque_q")
    late = connect(own_dsn, autocommit=False)
    last = send(late, "q", "late")

    def next_batch() -> list[Any]:
        while not (batch := receive(own, "q")):
            assert list(listener.notifies(timeout=10, stop_after=1)), "no notification"
        return batch

    sent = send(own, "q")
    batch = next_batch()
    assert [m.msg_id for m in batch] == [sent]
    rows(own, "select pgque.nack(%s, array[%s::bigint], '100 milliseconds')", batch[0].batch_id, sent)
    value(own, "select pgque.ack(%s)", batch[0].batch_id)
    batch = next_batch()
    assert [(m.msg_id, m.retry_count) for m in batch] == [(sent, 1)]
    value(own, "select pgque.ack(%s)", batch[0].batch_id)
    late.commit()
    assert [m.msg_id for m in next_batch()] == [last]
    value(own, "select pgque.stop()")
    loop.result(20)


def test_stop_ends_the_loop_and_status_reports_whether_it_runs(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    quick(own)
    value(own, "select pgque.create_queue('q')")

    def status() -> str:
        found: str = value(own, "select s.status from pgque.status() as s where s.component = 'ticker'")
        return found

    assert status() == "stopped"
    loop = background(lambda c: c.execute("call pgque.ticker_loop()"), connect(own_dsn))
    wait_until(lambda: status() == "running", "the loop runs")
    assert value(own, "select h.status from pgque.health() as h where h.check_name = 'ticker'") == "ok"
    value(own, "select pgque.stop()")
    loop.result(20)
    assert status() == "stopped"


def delivered(own: Connection, wait_until: Callable[..., None]) -> None:
    """Expect that a running loop ticks queue q."""
    before = value(own, "select i.last_tick_id from pgque.get_queue_info('q') as i")
    send(own, "q")
    wait_until(
        lambda: value(own, "select i.last_tick_id from pgque.get_queue_info('q') as i") > before,
        "a loop ticks",
        10,
    )


@pytest.mark.parametrize("how", ["terminate", "cancel", "end"])
def test_a_second_loop_takes_over_when_the_first_ends(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
    how: str,
) -> None:
    quick(own)
    value(own, "select pgque.create_queue('q')")
    run_for = "1 second" if how == "end" else "50 seconds"
    first = background(lambda c: c.execute(f"call pgque.ticker_loop('{run_for}')".encode()), connect(own_dsn))
    delivered(own, wait_until)
    second = background(lambda c: c.execute("call pgque.ticker_loop('50 seconds')"), connect(own_dsn))
    delivered(own, wait_until)
    if how == "end":
        first.result(20)
    else:
        value(own, f"select pg_{how}_backend(%s)", first.pid)
        with pytest.raises(psycopg.OperationalError):
            first.result(20)
    # The session of the first is still open where it was only cancelled.
    delivered(own, wait_until)
    value(own, "select pgque.stop()")
    second.result(20)


def test_the_loop_works_where_sessions_default_to_repeatable_read(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    quick(own)
    value(own, "select pgque.create_queue('q')")
    loop = background(
        lambda c: c.execute("call pgque.ticker_loop('30 seconds')"),
        connect(own_dsn, options="-c default_transaction_isolation=repeatable\\ read"),
    )
    wait_until(
        lambda: (
            loop.done
            or value(own, "select s.status from pgque.status() as s where s.component = 'ticker'")
            == "running"
        ),
        "the loop runs",
    )
    delivered(own, wait_until)
    value(own, "select pgque.stop()")
    loop.result(20)


@pytest.mark.parametrize("period", [0, -1, 60001, None])
def test_a_tick_period_out_of_range_is_refused(conn: Connection, period: int | None) -> None:
    refused("PQ005", rows, conn, "select pgque.set_tick_period_ms(%s)", period)


def test_a_tick_goes_to_the_disk_though_the_session_does_not_wait_for_it(
    conn: Connection, subscribed: str
) -> None:
    send(conn, subscribed)
    with conn.transaction():
        conn.execute("set local synchronous_commit = off")
        assert tick(conn, subscribed) is not None
        assert value(conn, "show synchronous_commit") == "local"


@pytest.mark.parametrize("first", ["tick", "advice", "send"])
def test_an_external_ticker_goes_on_behind_its_last_tick_after_a_restore(own: Connection, first: str) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    external = (
        "select pgque.ticker('q', %s, clock_timestamp() - interval '1 hour' + %s * interval '1 minute', %s)"
    )
    configure(own, "q", external_ticker="true")
    own.execute("update pgque.tick set tick_time = tick_time - interval '1 day'")
    assert value(own, external, 7, 7, 10) == 7
    sent = [send(own, "q")]
    own.execute("update pgque.queue set queue_xid = '7'")
    if first == "advice":
        (advice,) = column(own, "select advice from pgque.health() where queue = 'q'")
        own.execute(advice.encode())
    elif first == "send":
        sent.append(send(own, "q"))
    assert value(own, external, 9, 9, 20) == 9
    value(own, "select pgque.maint()")
    assert value(own, external, 10, 10, 30) == 10
    assert drain(own, "q") == sent
    # Who keeps offsets of his own is told that there is more than these ticks say.
    refused("PQ015", rows, own, "select * from pgque.read_window('q', 7, 10)")


def test_a_queue_that_names_its_transaction_without_the_time_is_restored(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = [send(own, "q")]
    last = tick(own, "q")
    assert last is not None
    # What a load does whose transaction has the id of the one that wrote the row.
    own.execute("update pgque.queue set queue_xid = pg_current_xact_id()")
    assert value(own, "select q.queue_restored and not q.queue_open from pgque.queue as q")
    sent.append(send(own, "q"))
    assert value(own, "select pgque.tick_for('q', 'latest')") >> 32 > last >> 32
    pump(own)
    tick(own, "q")
    assert drain(own, "q") == sent


def test_a_paused_queue_that_was_restored_is_repaired_by_the_advice_of_health(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", ticker_paused="true")
    own.execute("update pgque.queue set queue_xid = '7'")
    (advice,) = column(own, "select advice from pgque.health() where queue = 'q' and check_name = 'tables'")
    own.execute(advice.encode())
    checks = dict(rows(own, "select check_name, advice from pgque.health() where queue = 'q'"))
    assert checks["tables"] is None
    own.execute(checks["ticks"].encode())
    assert rows(own, "select * from pgque.health() where queue = 'q' and status <> 'ok'") == []


def test_an_external_ticker_has_its_ids_to_itself(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, external_ticker="true")
    external = "select pgque.ticker(%s, %s, now(), 1000)"
    assert value(conn, external, subscribed, 5 << 32) == 5 << 32
    value(conn, "select pgque.purge(%s)", subscribed)
    assert value(conn, "select pgque.tick_for(%s, 'latest')", subscribed) == (5 << 32) + 1
    assert value(conn, external, subscribed, (5 << 32) + 2) == (5 << 32) + 2


def test_the_loop_runs_in_a_session_that_reads_only_by_default(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send(own, "q")
    own.execute("set default_transaction_read_only = on")
    own.execute("call pgque.ticker_loop('100 milliseconds')")
    own.execute("set default_transaction_read_only = off")
    assert len(receive(own, "q")) == 1


@pytest.mark.parametrize("setting", ["transaction_timeout", "statement_timeout"])
def test_a_timeout_that_is_shorter_than_the_tick_period_does_not_end_the_loop_with_an_error(
    own: Connection, setting: str
) -> None:
    if setting == "transaction_timeout" and own.info.server_version < 170000:
        pytest.skip("new in PostgreSQL 17")
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send(own, "q")
    value(own, "select pgque.set_tick_period_ms(60000)")
    own.execute(f"set {setting} = '1s'".encode())
    own.execute("call pgque.ticker_loop('2 seconds')")
    assert value(own, f"show {setting}") == "1s"
    own.execute(f"set {setting} = 0".encode())
    assert len(receive(own, "q")) == 1
