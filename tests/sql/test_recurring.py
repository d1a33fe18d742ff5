"""Recurring messages: the ticker sends them at their times, once, and says what keeps it from that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    column,
    dead_tuples,
    forced_tick,
    post,
    receive,
    refused,
    row_counts,
    rows,
    send_many,
    set_clock,
    subscribe,
    tick,
    value,
)


def clock(conn: Connection, time: str) -> None:
    """Set the clock of the engine, in UTC."""
    set_clock(conn, f"timestamptz '{time}Z'")


def every(conn: Connection, cron: str, name: str = "r", queue: str = "q", **options: Any) -> int:
    """Create a recurring message; return 1 if it is new."""
    named = "".join(f", {option} => %s" for option in options)
    result: int = value(
        conn,
        f"select pgque.create_recurring(%s, %s, %s, 'due', 'x'{named})",
        name,
        queue,
        cron,
        *options.values(),
    )
    return result


def maint(conn: Connection) -> int:
    """Send all that is due. A call stops after a fifth of a second, so a busy machine may need several."""
    sent = 0
    while count := value(conn, "select pgque.maint_recurring()"):
        sent += count
    return sent


def fired(conn: Connection, queue: str = "q") -> list[str]:
    """Receive and ack what was sent; return the times of its runs."""
    forced_tick(conn, queue)
    found = []
    while batch := receive(conn, queue, count=5000):
        found += [message.headers["pgque-recurring"]["run_at"] for message in batch]
        ack(conn, batch[0].batch_id)
    return found


def listed(conn: Connection, columns: str, name: str = "r") -> Any:
    """Columns of one row of list_recurring()."""
    (found,) = rows(conn, f"select {columns} from pgque.list_recurring() l where l.name = %s", name)
    return found[0] if len(found) == 1 else found


def health(conn: Connection) -> list[tuple[str, str | None, str, str | None]]:
    """The checks of recurring messages that are not ok: status, queue, detail, advice."""
    return rows(
        conn,
        "select h.status, h.queue, h.detail, h.advice from pgque.health() h"
        " where h.check_name = 'recurring' and h.status <> 'ok'",
    )


@pytest.fixture
def new_year(pool: Connection) -> Connection:
    """A queue q with a consumer c, and a clock that stands at the beginning of 2026."""
    clock(pool, "2026-01-01 00:00:00")
    pool.execute("set timezone = 'UTC'")
    return pool


def test_a_message_is_sent_at_its_time_and_once(new_year: Connection) -> None:
    assert every(new_year, "0 3 * * *", headers='{"trace": "4bf9"}', partition_key="p") == 1
    assert listed(new_year, "l.next_run::text, l.last_run, l.status") == (
        "2026-01-01 03:00:00+00",
        None,
        "active",
    )
    clock(new_year, "2026-01-01 02:59:59")
    assert maint(new_year) == 0
    clock(new_year, "2026-01-01 03:00:00")
    assert maint(new_year) == 1
    assert maint(new_year) == 0
    forced_tick(new_year, "q")
    (message,) = receive(new_year, "q")
    assert (message.type, message.payload, message.extra1) == ("due", "x", "p")
    assert message.headers == {
        "trace": "4bf9",
        "pgque-recurring": {"name": "r", "run_at": "2026-01-01T03:00:00Z"},
    }
    assert listed(new_year, "l.next_run::text, l.last_run::text, l.last_msg_id") == (
        "2026-01-02 03:00:00+00",
        "2026-01-01 03:00:00+00",
        message.msg_id,
    )


@pytest.mark.parametrize("payload", ["'{\"a\": 1}'::jsonb", "'\\x00ff'::bytea", "null::text"])
def test_payloads_are_those_of_send(new_year: Connection, payload: str) -> None:
    value(new_year, f"select pgque.create_recurring('r', 'q', '0 3 * * *', 't', {payload})")
    clock(new_year, "2026-01-01 03:00:00")
    maint(new_year)
    value(new_year, f"select pgque.send('q', 't', {payload})")
    forced_tick(new_year, "q")
    ours, theirs = receive(new_year, "q")
    assert (ours.payload, ours.payload_bytes) == (theirs.payload, theirs.payload_bytes)
    assert listed(new_year, "l.payload, l.payload_bytes") == (ours.payload, ours.payload_bytes)


def test_key_delay_and_ttl_are_options_of_each_message(new_year: Connection) -> None:
    every(new_year, "0 * * * *", key="k", ttl="30 minutes")
    every(new_year, "0 * * * *", "late", delay="10 minutes")
    clock(new_year, "2026-01-01 01:00:00")
    assert maint(new_year) == 2
    forced_tick(new_year, "q")
    (message,) = receive(new_year, "q")
    assert message.key == "k"
    assert str(message.expires_at) == "2026-01-01 01:30:00+00:00"
    clock(new_year, "2026-01-01 01:10:00")
    value(new_year, "select pgque.maint_retry_events()")
    ack(new_year, message.batch_id)
    assert fired(new_year) == ["2026-01-01T01:00:00Z"]


@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [("none", []), ("one", ["07"]), ("all", ["01", "02", "03", "04", "05", "06", "07"])],
)
def test_after_an_outage_missed_runs_are_caught_up_as_wanted(
    new_year: Connection, catch_up: str, expected: list[str]
) -> None:
    every(new_year, "0 * * * *", catch_up=catch_up)
    clock(new_year, "2026-01-01 07:59:00")
    assert maint(new_year) == len(expected)
    assert fired(new_year) == [f"2026-01-01T{hour}:00:00Z" for hour in expected]
    assert listed(new_year, "l.next_run::text") == "2026-01-01 08:00:00+00"
    clock(new_year, "2026-01-01 08:00:30")
    assert maint(new_year) == 1, "half a minute late is not missed"
    assert fired(new_year) == ["2026-01-01T08:00:00Z"]


def test_at_most_a_thousand_runs_are_caught_up(new_year: Connection) -> None:
    every(new_year, "1 second", catch_up="all")
    clock(new_year, "2026-01-01 02:00:00")
    assert maint(new_year) == 1000
    assert maint(new_year) == 0
    found = fired(new_year)
    assert (len(set(found)), found[0], found[-1]) == (1000, "2026-01-01T00:00:01Z", "2026-01-01T00:16:40Z")
    assert listed(new_year, "l.next_run::text") == "2026-01-01 02:00:01+00"


def test_of_runs_that_are_caught_up_a_queue_takes_what_it_has_room_for(new_year: Connection) -> None:
    value(new_year, "select pgque.alter_queue('q', '{\"max_depth\": 4}')")
    every(new_year, "0 * * * *", catch_up="all")
    clock(new_year, "2026-01-01 07:30:00")
    assert maint(new_year) == 4
    assert listed(new_year, "l.status, l.last_run::text") == ("active", "2026-01-01 04:00:00+00")
    clock(new_year, "2026-01-01 07:30:02")
    assert maint(new_year) == 0
    assert listed(new_year, "l.status, l.last_run::text") == ("failing", "2026-01-01 04:00:00+00")
    assert fired(new_year) == [f"2026-01-01T0{hour}:00:00Z" for hour in (1, 2, 3, 4)]
    clock(new_year, "2026-01-01 07:31:00")
    assert maint(new_year) == 3
    assert listed(new_year, "l.status, l.next_run::text") == ("active", "2026-01-01 08:00:00+00")
    assert fired(new_year) == [f"2026-01-01T0{hour}:00:00Z" for hour in (5, 6, 7)]


@pytest.mark.parametrize("cron", ["* * * * * *", "7 seconds", "13 5 29 2 *", "*/7 3 * * mon"])
def test_the_run_that_is_caught_up_is_the_last_one(new_year: Connection, cron: str) -> None:
    every(new_year, cron)
    clock(new_year, "2029-05-17 12:34:56")
    assert maint(new_year) == 1
    (run,) = fired(new_year)
    last, following = listed(new_year, "l.last_run, l.next_run")
    assert run == last.strftime("%Y-%m-%dT%H:%M:%SZ")
    schedule = f"pgque._next_run(r, '{last}') from pgque.recurring r"
    assert value(new_year, f"select {schedule}") == following, "no run is between"
    assert str(last) <= "2029-05-17 12:34:56+00:00" < str(following)


def test_an_interval_is_counted_from_its_creation_and_keeps_its_beat(new_year: Connection) -> None:
    clock(new_year, "2026-01-01 00:00:10.7")
    every(new_year, "90 seconds")
    clock(new_year, "2026-01-01 00:01:39")
    assert maint(new_year) == 0
    for time, run in [("00:01:40", "00:01:40"), ("00:03:20", "00:03:10"), ("00:04:40", "00:04:40")]:
        clock(new_year, f"2026-01-01 {time}")
        assert maint(new_year) == 1
        assert fired(new_year) == [f"2026-01-01T{run}Z"]


def test_after_ends_at_it_has_ended(new_year: Connection) -> None:
    every(new_year, "0 * * * *", starts_at="2026-01-01 02:00Z", ends_at="2026-01-01 03:00Z", catch_up="all")
    clock(new_year, "2026-01-01 12:00:00")
    assert maint(new_year) == 2
    assert fired(new_year) == ["2026-01-01T02:00:00Z", "2026-01-01T03:00:00Z"]
    assert listed(new_year, "l.status, l.next_run") == ("ended", None)
    assert maint(new_year) == 0
    assert health(new_year) == []


def test_a_pause_is_not_caught_up(new_year: Connection) -> None:
    every(new_year, "0 * * * *", catch_up="all")
    assert value(new_year, "select pgque.pause_recurring('r')") == 1
    assert value(new_year, "select pgque.pause_recurring('r')") == 0
    assert listed(new_year, "l.status, l.next_run") == ("paused", None)
    clock(new_year, "2026-01-01 05:30:00")
    assert maint(new_year) == 0
    assert value(new_year, "select pgque.resume_recurring('r')") == 1
    assert value(new_year, "select pgque.resume_recurring('r')") == 0
    assert maint(new_year) == 0
    assert listed(new_year, "l.status, l.next_run::text") == ("active", "2026-01-01 06:00:00+00")


def test_one_can_be_sent_now_besides_its_schedule(new_year: Connection) -> None:
    every(new_year, "0 3 * * *")
    sent = value(new_year, "select pgque.run_recurring('r')")
    assert listed(new_year, "l.last_msg_id, l.next_run::text") == (sent, "2026-01-01 03:00:00+00")
    value(new_year, "select pgque.pause_recurring('r')")
    clock(new_year, "2026-01-01 00:30:00.5")
    value(new_year, "select pgque.run_recurring('r')")
    assert fired(new_year) == ["2026-01-01T00:00:00Z", "2026-01-01T00:30:00Z"]


def test_creating_it_again_changes_it_and_keeps_its_next_run(new_year: Connection) -> None:
    assert every(new_year, "90 seconds") == 1
    clock(new_year, "2026-01-01 00:01:00")
    assert every(new_year, "90 seconds") == 0
    assert value(new_year, "select pgque.create_recurring('r', 'q', '90 seconds', 'other', 'y')") == 0
    columns = "l.next_run::text, l.type_name, l.created_at::text, l.registered_at::text"
    assert listed(new_year, columns) == (
        "2026-01-01 00:01:30+00",
        "other",
        "2026-01-01 00:00:00+00",
        "2026-01-01 00:01:00+00",
    )
    assert every(new_year, "80 seconds") == 0
    assert listed(new_year, "l.next_run::text, l.type_name") == ("2026-01-01 00:02:20+00", "due")
    value(new_year, "select pgque.pause_recurring('r')")
    every(new_year, "70 seconds")
    assert listed(new_year, "l.status") == "paused"


def test_a_run_that_was_due_before_a_change_is_still_sent(new_year: Connection) -> None:
    every(new_year, "0 * * * *")
    clock(new_year, "2026-01-01 01:00:01")
    every(new_year, "0 * * * *", key="k")
    assert maint(new_year) == 1


def test_a_dropped_one_is_gone(new_year: Connection) -> None:
    every(new_year, "0 * * * *")
    assert value(new_year, "select pgque.drop_recurring('r')") == 1
    for call in ("drop", "pause", "resume", "run"):
        refused("PQ010", value, new_year, f"select pgque.{call}_recurring('r')")
    clock(new_year, "2026-01-01 01:00:00")
    assert maint(new_year) == 0
    assert every(new_year, "0 * * * *") == 1
    assert maint(new_year) == 0, "another one of this name begins anew"


def test_wrong_arguments_are_refused(new_year: Connection) -> None:
    refused("PQ001", every, new_year, "0 3 * * *", "r", "nowhere")
    for name in ("", "n" * 201, None):
        refused("PQ004", every, new_year, "0 3 * * *", name)
    for options in (
        {"catch_up": "some"},
        {"catch_up": None},
        {"headers": "[]"},
        {"key": ""},
        {"delay": "-1 second"},
        {"ttl": "101 years"},
    ):
        refused("PQ005", lambda options=options: every(new_year, "0 3 * * *", **options))
    error = refused("PQ005", every, new_year, ",".join(["*"] * 501) + " * * * *")
    assert "longer than 1000 bytes" in str(error.diag.message_primary)
    assert rows(new_year, "select * from pgque.list_recurring()") == []


# --- What fails ----------------------------------------------------------------------------------


@pytest.fixture
def two(new_year: Connection) -> Connection:
    """Two recurring messages: r goes to q, and fine to a queue of its own."""
    value(new_year, "select pgque.create_queue('other')")
    subscribe(new_year, "other")
    every(new_year, "0 * * * *")
    every(new_year, "0 * * * *", "fine", "other")
    return new_year


BREAK = {
    "paused": ("select pgque.pause('q')", "select pgque.resume('q')", "queue is paused", "pgque.resume"),
    "gone": ("select pgque.drop_queue('q', true)", "select pgque.create_queue('q')", "queue not found", "create_queue"),
    "full": (
        "select pgque.alter_queue('q', '{\"max_depth\": 1}')",
        "select pgque.alter_queue('q', '{\"max_depth\": 10}')",
        "queue full",
        "max_depth",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", BREAK)
def test_what_can_not_be_sent_is_tried_again_and_stops_no_other(two: Connection, how: str) -> None:
    broken, mended, detail, advice = BREAK[how]
    send_many(two, "q", 1)
    tick(two, "q")
    value(two, broken)
    clock(two, "2026-01-01 01:00:00")
    assert maint(two) == 1
    assert fired(two, "other") == ["2026-01-01T01:00:00Z"]
    assert listed(two, "l.status") == "failing"
    assert detail in listed(two, "l.last_error")
    ((status, queue, text, hint),) = health(two)
    assert (status, queue) == ("fail", "q")
    assert detail in str(text)
    assert "2026-01-01 01:00:00" in str(text)
    assert advice in str(hint)
    value(two, mended)
    assert maint(two) == 0, "not in a hot loop"
    clock(two, "2026-01-01 01:00:02")
    assert maint(two) == 1
    assert (listed(two, "l.status"), health(two)) == ("active", [])
    assert listed(two, "l.last_run::text, l.last_error") == ("2026-01-01 01:00:00+00", None)


def test_attempts_are_a_minute_apart_in_the_end(two: Connection) -> None:
    value(two, "select pgque.pause('q')")
    value(two, "select pgque.drop_recurring('fine')")
    clock(two, "2026-01-01 01:00:00")
    maint(two)
    gaps = []
    for _ in range(9):
        now, due = rows(two, "select pgque.clock(), pgque._recurring_at()")[0]
        gaps.append((due - now).total_seconds())
        clock(two, f"{due - timedelta(seconds=1):%Y-%m-%d %H:%M:%S}")
        maint(two)
        assert value(two, "select pgque._recurring_at()") == due, "too early for an attempt"
        clock(two, f"{due:%Y-%m-%d %H:%M:%S}")
        maint(two)
    assert gaps == [2, 4, 8, 16, 32, 64, 64, 64, 64]
    assert "10 attempts failed" in str(health(two)[0][2])


def test_a_queue_that_will_not_take_the_next_run_is_a_warning_before_it(two: Connection) -> None:
    value(two, "select pgque.pause('q')")
    ((status, queue, text, hint),) = health(two)
    assert (status, queue) == ("warn", "q")
    assert "queue is paused" in str(text)
    assert "pgque.resume" in str(hint)


def test_what_nobody_sends_is_a_warning(two: Connection) -> None:
    clock(two, "2026-01-01 01:01:01")
    assert [(status, queue) for status, queue, *_ in health(two)] == [("warn", "other"), ("warn", "q")]
    assert {hint for *_, hint in health(two)} == {
        "See the check ticker. To send it now: select pgque.maint_recurring()"
    }


def test_a_locked_queue_is_not_waited_for(
    two: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    other = transaction(dsn=own_dsn)
    leaf = value(two, "select pgque.current_event_table('q')")
    other.execute(f"lock table {leaf} in access exclusive mode".encode())
    clock(two, "2026-01-01 01:00:00")
    two.execute("set statement_timeout = '5s'")
    assert maint(two) == 1
    assert "lock timeout" in listed(two, "l.last_error")
    other.rollback()
    clock(two, "2026-01-01 01:00:02")
    assert maint(two) == 1


def test_a_renamed_queue_is_followed(new_year: Connection) -> None:
    every(new_year, "0 * * * *")
    value(new_year, "select pgque.rename_queue('q', 'new')")
    value(new_year, "select pgque.create_queue('q')")
    clock(new_year, "2026-01-01 01:00:00")
    assert maint(new_year) == 1
    assert listed(new_year, "l.queue_name") == "new"
    assert fired(new_year, "new") == ["2026-01-01T01:00:00Z"]


def test_a_queue_with_recurring_messages_is_dropped_with_force_only(new_year: Connection) -> None:
    value(new_year, "select pgque.create_queue('plain')")
    every(new_year, "0 * * * *", queue="plain")
    error = refused("PQ006", value, new_year, "select pgque.drop_queue('plain')")
    assert "drop_recurring" in str(error.diag.message_hint)
    value(new_year, "select pgque.drop_queue('plain', true)")
    assert [(status, queue) for status, queue, *_ in health(new_year)] == [("warn", "plain")]


# --- Rights --------------------------------------------------------------------------------------


@pytest.fixture
def producer(new_year: Connection, roles: Any) -> Any:
    """A role that may send to q and no more."""
    role = roles(dbname=new_year.info.dbname)
    value(new_year, "select pgque.grant_queue('q', %s, 'produce')", role.name)
    return role


def test_the_right_of_the_creator_is_checked_at_each_run(
    new_year: Connection, producer: Any, connect: Callable[..., Connection]
) -> None:
    every(connect(producer.dsn), "0 * * * *")
    clock(new_year, "2026-01-01 01:00:00")
    assert maint(new_year) == 1
    value(new_year, "select pgque.revoke_queue('q', %s)", producer.name)
    clock(new_year, "2026-01-01 02:00:00")
    assert maint(new_year) == 0
    ((status, queue, text, hint),) = health(new_year)
    assert (status, queue) == ("fail", "q")
    assert "permission denied for queue q" in str(text)
    assert f"grant_queue('q', '{producer.name}', 'produce')" in str(hint)
    refused("42501", value, new_year, "select pgque.run_recurring('r')")
    value(new_year, "select pgque.grant_queue('q', %s, 'produce')", producer.name)
    clock(new_year, "2026-01-01 02:00:02")
    assert maint(new_year) == 1
    assert health(new_year) == []


def test_one_of_a_role_that_is_gone_fails(new_year: Connection, connect: Callable[..., Connection]) -> None:
    new_year.execute("create role passing")
    try:
        value(new_year, "select pgque.grant_queue('q', 'passing', 'produce')")
        new_year.execute("set role passing")
        every(new_year, "0 * * * *")
        new_year.execute("reset role")
    finally:
        new_year.execute("reset role")
        new_year.execute("drop owned by passing")
        new_year.execute("drop role passing")
    clock(new_year, "2026-01-01 01:00:00")
    assert maint(new_year) == 0
    ((status, queue, text, hint),) = health(new_year)
    assert (status, queue) == ("fail", "q")
    assert "role not found: passing" in str(text)
    assert "create_recurring" in str(hint)
    assert listed(new_year, "l.created_by") == "passing"
    assert every(new_year, "0 * * * *") == 0
    clock(new_year, "2026-01-01 02:00:00")
    assert maint(new_year) == 1


def test_the_creator_and_administrators_of_its_queue_change_it_and_nobody_else(
    new_year: Connection, producer: Any, roles: Any, connect: Callable[..., Connection]
) -> None:
    name = new_year.info.dbname
    stranger, other, consumer, admin = (roles(dbname=name) for _ in range(4))
    value(new_year, "select pgque.create_queue('elsewhere')")
    for role, queue, right in [
        (stranger, "elsewhere", "admin"),
        (other, "q", "produce"),
        (consumer, "q", "consume"),
        (admin, "q", "admin"),
    ]:
        value(new_year, "select pgque.grant_queue(%s, %s, %s)", queue, role.name, right)
    creator = connect(producer.dsn)
    every(creator, "0 * * * *", headers='{"a": 1}')
    calls = [f"select pgque.{call}_recurring('r')" for call in ("pause", "resume", "run", "drop")]
    for role in (stranger, other, consumer):
        conn = connect(role.dsn)
        for call in calls:
            refused("42501", value, conn, call)
    refused("42501", every, connect(stranger.dsn), "0 * * * *", "r", "elsewhere")
    refused("42501", every, connect(other.dsn), "0 * * * *")
    refused("42501", every, connect(consumer.dsn), "0 * * * *", "mine")
    refused("42501", every, connect(stranger.dsn), "0 * * * *", "mine")
    seen = "select l.name, l.payload, l.headers from pgque.list_recurring() l"
    assert rows(connect(stranger.dsn), seen) == []
    assert rows(connect(other.dsn), seen) == [("r", None, None)]
    for role in (producer, consumer, admin):
        assert rows(connect(role.dsn), seen) == [("r", "x", {"a": 1})]
    for call in calls[:3]:
        value(creator, call)
        value(connect(admin.dsn), call)
    assert every(connect(admin.dsn), "0 * * * *") == 0
    assert listed(new_year, "l.created_by") == admin.name
    refused("42501", value, creator, calls[3])
    value(connect(admin.dsn), calls[3])


def test_a_caller_that_is_null_changes_and_sees_nothing(
    new_year: Connection, producer: Any, connect: Callable[..., Connection]
) -> None:
    creator = connect(producer.dsn)
    every(creator, "0 * * * *")
    null = "(values (1)) o left join (select current_user::pgque.caller as c where false) n on true"
    for call in ("pause", "resume", "run", "drop"):
        refused("42501", value, creator, f"select pgque.{call}_recurring('r', n.c) from {null}")
    assert rows(creator, f"select l.* from {null} cross join lateral pgque.list_recurring(n.c) l") == []


def test_members_of_the_creating_role_change_it(
    new_year: Connection, roles: Any, connect: Callable[..., Connection]
) -> None:
    team, member = roles("writer", dbname=new_year.info.dbname), roles(dbname=new_year.info.dbname)
    new_year.execute(f"grant {team.name} to {member.name}".encode())
    every(connect(team.dsn), "0 * * * *")
    assert value(connect(member.dsn), "select pgque.pause_recurring('r')") == 1


def test_writers_and_readers(new_year: Connection, roles: Any, connect: Callable[..., Connection]) -> None:
    writer, reader = (
        connect(roles(right, dbname=new_year.info.dbname).dsn) for right in ("writer", "reader")
    )
    assert every(writer, "0 * * * *") == 1
    refused("42501", every, reader, "0 * * * *", "other")
    refused("42501", value, reader, "select pgque.drop_recurring('r')")
    refused("42501", maint, writer)
    assert rows(reader, "select l.name, l.payload from pgque.list_recurring() l") == [("r", "x")]
    assert value(writer, "select pgque.drop_recurring('r')") == 1


def test_a_role_with_a_right_to_one_queue_creates_a_hundred_at_most(
    new_year: Connection,
    own_dsn: str,
    producer: Any,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[[int], None],
) -> None:
    one = connect(producer.dsn, autocommit=False)
    for number in range(100):
        every(one, "0 3 * * *", f"r{number}")
    late = background(lambda c: every(c, "0 3 * * *", "more"), connect(producer.dsn))
    wait_for_lock(late.pid)
    one.commit()
    with pytest.raises(psycopg.Error) as error:
        late.result()
    assert error.value.sqlstate == "PQ003"
    assert "pgque_writer" in str(error.value.diag.message_hint)
    assert every(one, "0 4 * * *", "r7") == 0, "one that is there may change"
    one.commit()
    one.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    refused("25000", every, one, "0 4 * * *", "r7")
    assert every(new_year, "0 3 * * *", "more") == 1


# --- The clock, the journal, dumps ----------------------------------------------------------------


def test_a_clock_that_is_set_back_by_a_year_is_not_waited_for(new_year: Connection) -> None:
    clock(new_year, "2027-01-01 00:30:00")
    every(new_year, "0 * * * *")
    clock(new_year, "2027-01-01 01:00:00")
    assert maint(new_year) == 1
    clock(new_year, "2026-01-01 05:30:00")
    assert maint(new_year) == 0
    assert listed(new_year, "l.next_run::text") == "2026-01-01 06:00:00+00"
    clock(new_year, "2026-01-01 06:00:00")
    assert maint(new_year) == 1


def test_a_clock_that_is_corrected_sends_nothing_twice(new_year: Connection) -> None:
    every(new_year, "* * * * *")
    clock(new_year, "2026-01-01 00:01:00")
    assert maint(new_year) == 1
    clock(new_year, "2026-01-01 00:00:30")
    assert maint(new_year) == 0
    clock(new_year, "2026-01-01 00:01:01")
    assert maint(new_year) == 0


def test_definitions_that_come_out_of_a_dump_begin_anew(new_year: Connection) -> None:
    """Loading a dump computes generated columns in another transaction: as this update does."""
    every(new_year, "0 * * * *", catch_up="all")
    every(new_year, "0 * * * *", "paused", catch_up="all")
    value(new_year, "select pgque.pause_recurring('paused')")
    new_year.execute("update pgque.recurring set rec_xid = '7'")
    clock(new_year, "2026-01-05 07:30:00")
    assert maint(new_year) == 0
    assert listed(new_year, "l.status, l.next_run::text") == ("active", "2026-01-05 08:00:00+00")
    clock(new_year, "2026-01-05 08:00:00")
    assert maint(new_year) == 1
    assert fired(new_year) == ["2026-01-05T08:00:00Z"]
    value(new_year, "select pgque.resume_recurring('paused')")
    assert maint(new_year) == 0


def test_runs_leave_no_dead_rows_and_their_journal_is_emptied(new_year: Connection) -> None:
    every(new_year, "0 * * * *")
    every(new_year, "0 4 1 1 *", "yearly")
    every(new_year, "0 * * * *", "dropped")
    value(new_year, "select pgque.drop_recurring('dropped')")
    clock(new_year, "2026-01-01 01:00:00")
    assert maint(new_year) == 1
    before = dead_tuples(new_year)
    filler = (
        "insert into pgque.recurring_run select u.run_rec, nextval('pgque.recurring_n'), u.run_at, u.run_for, u.run_next,"
        " u.run_due, u.run_msg, 0, null, null, %s from pgque.recurring_run u cross join generate_series(1, 20000)"
        " where u.run_n = (select max(m.run_n) from pgque.recurring_run m where m.run_due is not null)"
    )
    shown = "l.next_run, l.last_run, l.last_msg_id"
    for hour in range(2, 8):
        at = listed(new_year, shown), listed(new_year, shown, "yearly")
        new_year.execute(filler.encode(), [value(new_year, "select last_value from pgque.recurring_leaf")])
        for _ in range(3):
            value(new_year, "select pgque.maint_tables()")
        assert (listed(new_year, shown), listed(new_year, shown, "yearly")) == at
        counts = row_counts(new_year)
        assert counts.get("recurring_run_0", 0) + counts.get("recurring_run_1", 0) == 2
        clock(new_year, f"2026-01-01 {hour:02d}:00:00")
        assert maint(new_year) == (2 if hour == 4 else 1)
    after = dead_tuples(new_year)
    names = {name for name in after if name.startswith("recurring")}
    assert {name: after[name] for name in names} == {name: before.get(name, 0) for name in names}


def test_the_loop_knows_when_the_first_is_due(new_year: Connection) -> None:
    def due() -> str | None:
        result: str | None = value(new_year, "select pgque._recurring_at()::text")
        return result

    assert due() is None
    every(new_year, "0 3 * * *")
    every(new_year, "0 5 * * *", "later")
    assert due() == "2026-01-01 03:00:00+00"
    every(new_year, "0 2 * * *", "sooner")
    assert due() == "2026-01-01 02:00:00+00"
    value(new_year, "select pgque.drop_recurring('sooner')")
    assert maint(new_year) == 0
    assert due() == "2026-01-01 03:00:00+00"
    value(new_year, "select pgque.pause('q')")
    clock(new_year, "2026-01-01 03:00:00")
    maint(new_year)
    assert due() == "2026-01-01 03:00:02+00"
    for name in ("r", "later"):
        value(new_year, "select pgque.pause_recurring(%s)", name)
    maint(new_year)
    assert due() is None
    value(new_year, "select pgque.resume_recurring('later')")
    assert due() == "2026-01-01 05:00:00+00"


def test_maint_sends_what_is_due_for_a_scheduler_without_the_loop(new_year: Connection) -> None:
    every(new_year, "0 * * * *")
    clock(new_year, "2026-01-01 01:00:00")
    assert ("pgque.maint_recurring", None) in rows(new_year, "select * from pgque.maint_operations()")
    value(new_year, "select pgque.maint()")
    assert fired(new_year) == ["2026-01-01T01:00:00Z"]


def test_a_loop_with_nothing_due_reads_no_table_of_theirs_but_for_maintenance(pool: Connection) -> None:
    every(pool, "0 0 1 1 *")
    maint(pool)
    pool.execute("set track_functions = 'all'")
    pool.execute("call pgque.ticker_loop('2 seconds')")
    calls = dict(
        rows(
            pool,
            "select f.funcname, f.calls from pg_stat_user_functions f"
            " where f.funcname in ('maint_recurring', '_recurring_due', '_loop_state')",
        )
    )
    assert calls["_loop_state"] > 10
    assert calls["maint_recurring"] == 1, "one pass of the maintenance"
    assert calls["_recurring_due"] <= 2


def test_the_loop_goes_on_while_their_table_is_locked(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    every(pool, "1 second")
    other = transaction(dsn=own_dsn)
    other.execute("lock table pgque.recurring in access exclusive mode")
    sent = post(pool, "q")
    pool.execute("call pgque.ticker_loop('3 seconds')")
    assert [message.msg_id for message in receive(pool, "q")] == [sent]
    other.rollback()
    assert maint(pool) == 1


def test_a_time_zone_that_the_server_lacks_is_shown(new_year: Connection) -> None:
    """As where a dump is loaded: first the definition begins anew, then a run is due."""
    every(new_year, "0 * * * *")
    new_year.execute("update pgque.recurring set rec_timezone = 'Mars/Olympus', rec_xid = '7'")
    assert maint(new_year) == 0
    assert ["Mars/Olympus" in str(detail) for _, _, detail, _ in health(new_year)] == [True]
    new_year.execute("update pgque.recurring set rec_timezone = 'UTC'")
    assert maint(new_year) == 0
    new_year.execute("update pgque.recurring set rec_timezone = 'Mars/Olympus'")
    clock(new_year, "2026-01-01 01:00:00")
    assert maint(new_year) == 0
    assert ["Mars/Olympus" in str(detail) for _, _, detail, _ in health(new_year)] == [True]


def test_one_that_can_not_begin_after_a_restore_stops_no_other(two: Connection) -> None:
    two.execute(
        "update pgque.recurring set rec_timezone = 'Mars/Olympus', rec_xid = '7' where rec_name = 'r'"
    )
    clock(two, "2026-01-01 01:00:00")
    assert maint(two) == 1
    assert fired(two, "other") == ["2026-01-01T01:00:00Z"]
    assert value(two, "select pgque._recurring_at()::text") == "2026-01-01 01:00:01+00", "not in a hot loop"


def test_the_loop_sends_them_and_ticks(pool: Connection) -> None:
    every(pool, "1 second")
    every(pool, "* * * * * *", "cron")
    pool.execute("call pgque.ticker_loop('3500 milliseconds')")
    found = [message.headers["pgque-recurring"] for message in receive(pool, "q", count=100)]
    for name in ("r", "cron"):
        times = [header["run_at"] for header in found if header["name"] == name]
        assert len(times) >= 2
        assert times == sorted(set(times))


def test_a_keyed_one_that_waits_is_replaced(new_year: Connection) -> None:
    every(new_year, "0 * * * *", key="k", catch_up="all")
    clock(new_year, "2026-01-01 05:00:00")
    assert maint(new_year) == 5
    assert fired(new_year) == ["2026-01-01T05:00:00Z"]
    assert post(new_year, "q", key="k") > 0
    assert column(new_year, "select l.name from pgque.list_recurring() l") == ["r"]
