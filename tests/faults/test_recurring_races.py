"""Recurring messages while two tickers run, a session is killed, and somebody changes them: nothing is sent twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import Connection, column, forced_tick, receive, refused, rows, set_clock, value

Connect = Callable[..., Connection]
RUN = "select pgque.maint_recurring()"


def clock(conn: Connection, time: str) -> None:
    set_clock(conn, f"timestamptz '2026-01-01 {time}Z'")


def sent(conn: Connection) -> list[str]:
    """The times of the runs that were sent and committed."""
    forced_tick(conn, "q")
    return [message.headers["pgque-recurring"]["run_at"][11:16] for message in receive(conn, "q")]


@pytest.fixture
def due(own: Connection) -> Connection:
    """A queue q with a consumer c, and a recurring message r whose run at 01:00 is due."""
    clock(own, "00:00")
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c')")
    value(own, "select pgque.create_recurring('r', 'q', '0 * * * *', 't', 'x')")
    clock(own, "01:00")
    return own


@pytest.fixture
def running(due: Connection, own_dsn: str, transaction: Connect) -> Connection:
    """A transaction of another ticker that has sent the run and has not committed."""
    other = transaction(dsn=own_dsn)
    assert value(other, RUN) == 1
    return other


def test_a_second_ticker_neither_waits_nor_sends_the_runs_that_the_first_one_has_locked(
    due: Connection, running: Connection
) -> None:
    due.execute("set statement_timeout = '5s'")
    assert value(due, RUN) == 0
    running.commit()
    assert value(due, RUN) == 0
    assert sent(due) == ["01:00"]


@pytest.mark.parametrize("end", ["rollback", "killed"])
def test_a_run_that_was_not_committed_is_sent_by_the_next_ticker(
    due: Connection, running: Connection, end: str
) -> None:
    if end == "killed":
        value(due, "select pg_terminate_backend(%s, 5000)", running.info.backend_pid)
    else:
        running.rollback()
    assert value(due, RUN) == 1
    assert value(due, RUN) == 0
    assert sent(due) == ["01:00"]


def test_a_ticker_that_waited_for_nothing_reads_what_another_one_committed_meanwhile(
    due: Connection, own_dsn: str, transaction: Connect
) -> None:
    """The transaction is older than the run of the other ticker."""
    old = transaction(dsn=own_dsn)
    assert value(due, RUN) == 1
    assert value(old, RUN) == 0
    old.commit()
    assert sent(due) == ["01:00"]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_ticker_with_an_old_snapshot_is_refused(
    due: Connection, own_dsn: str, transaction: Connect, isolation: str
) -> None:
    old = transaction(isolation, own_dsn)
    refused("25000", value, old, RUN)


CHANGES: dict[str, tuple[str, list[str], list[str]]] = {
    "paused": ("select pgque.pause_recurring('r')", ["01:00"], []),
    "dropped": ("select pgque.drop_recurring('r')", ["01:00"], []),
    "the same": ("select pgque.create_recurring('r', 'q', '0 * * * *', 't', 'x')", ["01:00"], ["02:00"]),
    "changed": ("select pgque.create_recurring('r', 'q', '30 * * * *', 't', 'x')", ["01:00"], ["01:30"]),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_a_change_waits_for_a_run_and_counts_from_then_on(
    due: Connection,
    running: Connection,
    own_dsn: str,
    transaction: Connect,
    background: Callable[..., Any],
    wait_for_lock: Callable[[int], None],
    how: str,
    isolation: str,
) -> None:
    call, before, after = CHANGES[how]
    other = transaction(isolation, own_dsn)
    change = background(lambda c: value(c, call), other)
    wait_for_lock(change.pid)
    running.commit()
    change.result()
    other.commit()
    assert value(due, RUN) == 0
    clock(due, "02:00")
    assert value(due, RUN) == len(after)
    assert sent(due) == before + after


@pytest.mark.parametrize("how", CHANGES)
def test_a_ticker_does_not_wait_for_a_change_and_heeds_it_once_committed(
    due: Connection, own_dsn: str, transaction: Connect, how: str
) -> None:
    call, before, _ = CHANGES[how]
    other = transaction(dsn=own_dsn)
    value(other, call)
    due.execute("set statement_timeout = '5s'")
    assert value(due, RUN) == 0
    other.commit()
    expected = before if how == "the same" else []
    assert value(due, RUN) == len(expected)
    assert sent(due) == expected


def test_resumed_with_an_old_snapshot_it_begins_anew(
    due: Connection, own_dsn: str, transaction: Connect
) -> None:
    value(due, "select pgque.pause_recurring('r')")
    old = transaction("repeatable read", own_dsn)
    clock(due, "03:00")
    value(old, "select pgque.resume_recurring('r')")
    old.commit()
    assert value(due, RUN) == 0
    clock(due, "04:00")
    assert value(due, RUN) == 1
    assert sent(due) == ["04:00"]


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_one_that_is_sent_now_beside_a_run_changes_no_schedule(
    due: Connection, own_dsn: str, transaction: Connect, isolation: str
) -> None:
    old = transaction(isolation, own_dsn)
    assert value(due, RUN) == 1
    clock(due, "01:07")
    value(old, "select pgque.run_recurring('r')")
    assert value(due, RUN) == 0
    old.commit()
    assert value(due, RUN) == 0
    assert sorted(sent(due)) == ["01:00", "01:07"]
    clock(due, "02:00")
    assert value(due, RUN) == 1


def test_the_journal_is_not_emptied_under_a_run(due: Connection, own_dsn: str, transaction: Connect) -> None:
    turn = "select pgque._compact_recurring()"
    filler = (
        "insert into pgque.recurring_run select -1, g, now(), null, null, null, null, 0, null, null, l.last_value"
        " from generate_series(1, 20000) g, pgque.recurring_leaf l"
    )
    due.execute(filler.encode())
    running = transaction(dsn=own_dsn)
    assert value(running, RUN) == 1
    assert value(due, turn) == 1, "the other leaf is written from now on"
    assert value(due, turn) == 0, "the run is not committed"
    running.commit()
    assert value(due, turn) == 1
    assert value(due, RUN) == 0
    assert sent(due) == ["01:00"]


def test_a_ticker_that_waits_for_the_journal_to_be_emptied_sends_nothing_again(
    due: Connection,
    own_dsn: str,
    transaction: Connect,
    background: Callable[..., Any],
    wait_for_lock: Callable[[int], None],
) -> None:
    assert value(due, RUN) == 1
    due.execute("select setval('pgque.recurring_leaf', 1)")
    compaction = transaction(dsn=own_dsn)
    assert value(compaction, "select pgque._compact_recurring()") == 1
    # As the loop that was there before: with a plan, and without the short lock_timeout.
    due.execute("alter function pgque.maint_recurring() set lock_timeout = '20s'")
    other = transaction(dsn=own_dsn)
    job = background(lambda c: value(c, RUN), other)
    wait_for_lock(job.pid)
    compaction.commit()
    assert job.result() == 0
    other.commit()
    assert sent(due) == ["01:00"]


def test_of_two_sessions_that_create_a_name_the_second_one_changes_it(
    own: Connection,
    own_dsn: str,
    transaction: Connect,
    background: Callable[..., Any],
    wait_for_lock: Callable[[int], None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    create = "select pgque.create_recurring('r', 'q', '0 3 * * *', %s, 'x')"
    one, two = transaction(dsn=own_dsn), transaction(dsn=own_dsn)
    assert value(one, create, "first") == 1
    second = background(lambda c: value(c, create, "second"), two)
    wait_for_lock(second.pid)
    one.commit()
    assert second.result() == 0
    two.commit()
    assert column(own, "select l.type_name from pgque.list_recurring() l") == ["second"]


def test_a_name_that_an_old_snapshot_does_not_show_is_a_reason_to_try_again(
    own: Connection, own_dsn: str, transaction: Connect
) -> None:
    value(own, "select pgque.create_queue('q')")
    create = "select pgque.create_recurring('r', 'q', '0 3 * * *', 't', 'x')"
    old = transaction("repeatable read", own_dsn)
    value(own, create)
    refused("40001", value, old, create)
    old.rollback()
    assert value(old, create) == 0


def test_of_two_roles_that_create_a_name_the_second_one_is_refused(
    own: Connection,
    roles: Any,
    connect: Connect,
    background: Callable[..., Any],
    wait_for_lock: Callable[[int], None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    create = "select pgque.create_recurring('r', 'q', '0 3 * * *', 't', 'x')"
    one, two = (connect(roles("writer", dbname=own.info.dbname).dsn, autocommit=False) for _ in range(2))
    assert value(one, create) == 1
    second = background(lambda c: value(c, create), two)
    wait_for_lock(second.pid)
    one.commit()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        second.result()


def test_a_queue_is_not_renamed_between_the_check_of_a_name_and_the_definition(
    own: Connection,
    own_dsn: str,
    transaction: Connect,
    background: Callable[..., Any],
    wait_for_lock: Callable[[int], None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    creates, renames = transaction(dsn=own_dsn), transaction(dsn=own_dsn)
    value(creates, "select pgque.create_recurring('r', 'q', '0 3 * * *', 't', 'x')")
    rename = background(lambda c: value(c, "select pgque.rename_queue('q', 'new')"), renames)
    wait_for_lock(rename.pid)
    creates.commit()
    rename.result()
    renames.commit()
    assert column(own, "select l.queue_name from pgque.list_recurring() l") == ["new"]
    # And the other way round.
    renames.execute("begin")
    value(renames, "select pgque.rename_queue('new', 'newer')")
    create = background(
        lambda c: value(c, "select pgque.create_recurring('s', 'new', '0 3 * * *', 't', 'x')"), creates
    )
    wait_for_lock(create.pid)
    renames.commit()
    create.result()
    creates.commit()
    assert rows(own, "select l.name, l.queue_name from pgque.list_recurring() l") == [
        ("r", "newer"),
        ("s", "newer"),
    ]
