"""Who did what, how far consumers lagged, how many messages came: what the engine remembers of its past."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    column,
    forced_tick,
    move_clock,
    receive,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    take,
    value,
)

# What is noted of each call, in this order on one queue.
ACTIONS: list[tuple[str, str | None, dict[str, Any] | None]] = [
    ("select pgque.alter_queue('q', '{\"max_retries\": 0}')", "q", {"max_retries": 0}),
    ("select pgque.alter_queue('q', '{\"max_receive_attempts\": null}')", "q", {"max_receive_attempts": None}),
    ("select pgque.set_default_config('max_retries', null)", None, {"max_retries": None}),
    ("select pgque.pause('q')", "q", None),
    ("select pgque.resume('q')", "q", None),
    ("select pgque.set_default_config('max_depth', '1000')", None, {"max_depth": "1000"}),
    ("select pgque.set_tick_share(20)", None, {"percent": 20}),
    ("select pgque.confirm_restore()", None, {"queues": 0}),
    ("select pgque.set_tick_period_ms(50)", None, {"ms": 50}),
    ("select pgque.set_schedule('expire', '2 minutes')", None, {"job": "expire", "every": "2 minutes"}),
    ("select pgque.grant_queue('q', 'pg_monitor', 'consume')", "q", {"role_name": "pg_monitor", "right_name": "consume"}),
    ("select pgque.revoke_queue('q', 'pg_monitor')", "q", {"role_name": "pg_monitor"}),
    ("select pgque.share_consumer('q', 'c')", "q", {"consumer_name": "c"}),
    ("select pgque.unshare_consumer('q', 'c')", "q", {"consumer_name": "c"}),
    ("select pgque.seek('q', 'd', (select max(tick_id) from pgque.tick))", "q", {"consumer_name": "d", "from_tick": 1, "tick_id": 2}),
    ("select pgque.dlq_requeue(1)", "q", {"dl_id": 1, "msg_id": 1}),
    ("select pgque.dlq_replay(2)", "q", {"dl_id": 2, "msg_id": 2}),
    ("select pgque.dlq_requeue_all('q', 2)", "q", {"limit_count": 2, "messages": 2}),
    ("select pgque.dlq_replay_all('q')", "q", {"replayed": 2, "failed": 0}),
    ("select pgque.retry_now('q', 'd')", "q", {"consumer_name": "d", "messages": 1}),
    ("select pgque.reclaim('q', 'w', '0')", "q", {"consumer_name": "w", "older_than": "00:00:00", "batches": 1}),
    ("select pgque.purge_key('q', 'k2')", "q", {"messages": 1}),
    ("select pgque.create_recurring('nightly', 'q', '0 3 * * *', 'report', 'secret')", "q",
     {"name": "nightly", "cron": "0 3 * * *", "timezone": "UTC", "type_name": "report"}),
    ("select pgque.pause_recurring('nightly')", "q", {"name": "nightly"}),
    ("select pgque.resume_recurring('nightly')", "q", {"name": "nightly"}),
    ("select pgque.drop_recurring('nightly')", "q", {"name": "nightly"}),
    ("select pgque.archive_purge('q', '2020-01-01Z')", "q", {"before": "2020-01-01T00:00:00+00:00"}),
    ("select pgque.purge('q')", "q", {}),
    ("select pgque.unsubscribe('q', 'd')", "q", {"consumer_name": "d"}),
    ("select pgque.set_history('actions', '60 days')", None, {"what": "actions", "keep": "60 days"}),
    ("select pgque.rename_queue('q', 'r')", "q", {"new_name": "r"}),
    ("select pgque.drop_queue('r', true)", "r", {"force": True}),
]  # fmt: skip


@pytest.fixture
def busy(own: Connection) -> Connection:
    """A queue with dead letters, a retry, a batch of a worker and a message with a key."""
    value(own, "select pgque.create_queue('q', '{\"max_retries\": 0}')")
    own.execute("set timezone = 'UTC'")
    for consumer in ("c", "d", "w"):
        subscribe(own, "q", consumer)
    send_many(own, "q", 6)
    value(own, "select pgque.send('q', 't', 'body'::text, key => 'k')")
    forced_tick(own, "q")
    batch = receive(own, "q", "c", 6)
    for message in batch:
        rows(
            own,
            "select * from pgque.dead(%s, array[%s::bigint], 'no good')",
            message.batch_id,
            message.msg_id,
        )
    assert take(own, "q", consumer="w", count=2)
    value(own, "select pgque.send('q', 't', 'newer'::text, key => 'k2')")
    own.execute(
        b"insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_id, ev_time, ev_txid)"
        b" select now() + interval '1 hour', s.sub_queue, s.sub_id, 1000, now(), pg_current_xact_id()"
        b" from pgque.subscriber s join pgque.consumer c on c.co_id = s.sub_consumer where c.co_name = 'd'"
    )
    return own


def actions(conn: Connection, columns: str = "call, queue, args") -> list[Any]:
    """What was noted, the oldest first."""
    return rows(conn, f"select {columns} from pgque.list_actions(limit_count => 1000)")[::-1]


def test_every_change_by_hand_is_noted_once_with_its_arguments_and_without_payloads(busy: Connection) -> None:
    before = len(actions(busy))
    for call, queue, wanted in ACTIONS:
        value(busy, call)
        noted = actions(busy)[before:]
        assert len(noted) == 1, (call, noted)
        name, on, args = noted[0]
        before += 1
        assert f"pgque.{name}(" in call
        assert on == queue, call
        assert (args or {}).items() >= (wanted or {}).items(), (call, args)
        assert "secret" not in str(args)


def test_what_changes_nothing_is_not_noted_and_neither_is_what_consumers_do(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    before = actions(own)
    assert [row[0] for row in before] == ["create_queue", "subscribe"]
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send_many(own, "q", 3)
    forced_tick(own, "q")
    batch = receive(own, "q")
    value(own, "select count(*) from pgque.nack(%s, array[%s::bigint])", batch[0].batch_id, batch[0].msg_id)
    value(own, "select pgque.ack(%s)", batch[0].batch_id)
    value(own, "select pgque.maint()")
    # A stream that goes on; somebody else who moves it is noted, see ACTIONS.
    value(own, "select pgque.subscribe('q', 'stream')")
    before = actions(own)
    value(own, "select pgque.open_stream('q', 'stream')")
    forced_tick(own, "q")
    latest = value(own, "select pgque.tick_for('q', 'latest')")
    assert value(own, "select pgque.seek('q', 'stream', %s)", latest) == latest
    value(own, "select pgque.unsubscribe('q', 'nobody')")
    value(own, "select pgque.dlq_purge('q')")
    value(own, "select pgque.reclaim('q', 'c')")
    assert actions(own) == before


def test_a_change_that_is_rolled_back_leaves_no_note(
    own: Connection, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    other = connect(own.info.dsn, autocommit=False)
    value(other, "select pgque.pause('q')")
    assert len(actions(own)) == 1
    other.rollback()
    assert len(actions(own)) == 1
    value(other, "select pgque.pause('q')")
    other.commit()
    assert [row[0] for row in actions(own)] == ["create_queue", "pause"]


def test_a_note_names_who_logged_in_and_only_administrators_of_all_queues_read_it(
    own: Connection, connect: Callable[..., Connection], roles: Any
) -> None:
    value(own, "select pgque.create_queue('q')")
    one, admin = roles(dbname=own.info.dbname), roles("admin", dbname=own.info.dbname)
    value(own, "select pgque.grant_queue('q', %s, 'admin')", one.name)
    his = connect(one.dsn, application_name="his console")
    value(his, "select pgque.pause('q')")
    for call in ("pgque.list_actions()", "pgque.action"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            rows(his, f"select * from {call}")
    hers = connect(admin.dsn)
    assert actions(hers, "role_name, application, call")[-1] == (one.name, "his console", "pause")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        rows(hers, "select * from pgque.action")
    # A role that somebody takes on is not who he is.
    own.execute("set role pgque_admin")
    value(own, "select pgque.resume('q')")
    assert actions(hers, "role_name, call")[-1] == (own.info.user, "resume")


def test_notes_are_filtered_limited_and_paged(own: Connection) -> None:
    for name in ("a", "b"):
        value(own, "select pgque.create_queue(%s)", name)
        for _ in range(3):
            value(own, "select pgque.pause(%s)", name)
    found = rows(own, "select at, call from pgque.list_actions('b', 2)")
    assert [call for _, call in found] == ["pause", "pause"]
    rest = rows(own, "select call, queue from pgque.list_actions('b', 10, %s)", found[-1][0])
    assert rest == [("pause", "b"), ("create_queue", "b")]
    assert rows(own, "select * from pgque.list_actions('none')") == []
    assert rows(own, "select * from pgque.list_actions(limit_count => -1)") == []


def test_actions_are_kept_as_long_as_set_and_leave_no_dead_row(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.set_history('actions', '10 days')")
    for day in range(0, 60, 3):
        move_clock(own, f"{day} days")
        value(own, "select pgque.pause('q')")
        for _ in range(2):  # one empties, the next lets it be written
            value(own, "select pgque.maint_tables()")
        kept = column(
            own,
            "select extract(day from pgque.clock() - at)::int from pgque.list_actions() where call = 'pause' order by 1",
        )
        # All of the last ten days, and nothing that is older than twice that and a day or two.
        assert kept[: min(day // 3 + 1, 4)] == [0, 3, 6, 9][: min(day // 3 + 1, 4)]
        assert max(kept) <= 24
    dead = (
        "select sum(n_dead_tup) from pg_stat_all_tables where schemaname = 'pgque' and relname like 'action%'"
    )
    assert value(own, dead) == 0


def test_a_note_that_is_not_committed_keeps_its_table_from_being_emptied_and_nobody_waits(
    own: Connection, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.set_history('actions', '10 days')")
    late = connect(own.info.dsn, autocommit=False)
    value(late, "select pgque.pause('q')")
    own.execute("set lock_timeout = '5s'")
    for day in (11, 22, 33, 44):
        move_clock(own, f"{day} days")
        value(own, "select pgque.set_tick_share(%s)", day)
        value(own, "select pgque.maint_tables()")
    late.commit()
    assert "pause" in [row[0] for row in actions(own)]
    for day in (55, 66, 77):
        move_clock(own, f"{day} days")
        value(own, "select pgque.set_tick_share(%s)", day)
        value(own, "select pgque.maint_tables()")
    assert "pause" not in [row[0] for row in actions(own)]


def test_histories_can_be_off_and_on_and_what_they_are_set_to_is_checked(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    assert value(own, "select pgque.set_history('actions', null)") is None
    value(own, "select pgque.pause('q')")
    value(own, "select pgque.set_history('actions', '1 day')")
    kept = ["create_queue", "set_history", "set_history"]
    assert [row[0] for row in actions(own)] == kept
    move_clock(own, "1 hour")
    value(own, "select pgque.set_history('actions', null)")
    for days in (30, 60):  # what was noted stays while nothing is
        move_clock(own, f"{days} days")
        value(own, "select pgque.maint_tables()")
    assert [row[0] for row in actions(own)] == [*kept, "set_history"]
    for what, keep in (
        ("actions", "0"),
        ("actions", "-1 day"),
        ("actions", "-1 month 31 days"),
        ("lags", "101 years"),
        ("other", "1 day"),
        (None, "1 day"),
    ):
        error = refused("PQ005", value, own, "select pgque.set_history(%s, %s::interval)", what, keep)
        assert "actions or lags" in str(error.diag.message_hint)


def test_nobody_waits_for_a_history_that_is_being_emptied_or_locked(
    own: Connection, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    other = connect(own.info.dsn, autocommit=False)
    own.execute("set statement_timeout = '20s'")
    for day in (40, 80, 120):
        move_clock(own, f"{day} days")
        value(own, "select pgque.pause('q')")
        value(other, "select pgque.maint_tables()")
        value(own, "select pgque.resume('q')")
        other.commit()
    assert len(actions(own)) < 7, "no history was emptied"
    subscribe(own, "q")
    send(own, "q")
    forced_tick(own, "q")
    move_clock(own, "121 days")
    other.execute("lock table pgque.action, pgque.sample in access exclusive mode")
    value(own, "select pgque.maint_tables()")
    value(own, "select pgque.maint_lags()")
    other.commit()
    value(own, "select pgque.maint_lags()")
    assert value(own, "select count(*) from pgque.sample where smp_sub > 0 and smp_lag > 1") == 1


def test_consumers_that_lag_are_sampled_each_minute_and_others_are_not(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for consumer in ("slow", "quick"):
        subscribe(own, "q", consumer)
    set_to = ["0 seconds", "90 seconds", "91 seconds", "3 minutes"]
    send_many(own, "q", 4)
    forced_tick(own, "q")
    batch = receive(own, "q", "quick")
    value(own, "select pgque.ack(%s)", batch[0].batch_id)
    taken = []
    for ahead in set_to:
        move_clock(own, ahead)
        assert value(own, "select pgque.maint_lags()") == 0
        taken.append(value(own, "select count(*) from pgque.sample where smp_sub > 0 and smp_lag > 1"))
    assert taken == [0, 1, 1, 2]
    lags = rows(own, "select consumer, round(lag_seconds / 10), pending_events from pgque.consumer_lags('q')")
    assert lags == [("slow", 9, 4), ("slow", 18, 4)]
    assert rows(own, "select * from pgque.consumer_lags('q', 'quick')") == []
    assert len(rows(own, "select * from pgque.consumer_lags('q', 'slow', '60 seconds')")) == 1
    refused("PQ011", value, own, "select pgque.consumer_lags('q', 'nobody')")
    refused("PQ001", value, own, "select pgque.consumer_lags('none')")
    for since in (None, "0", "-1 hour"):
        refused("PQ005", value, own, "select pgque.consumer_lags('q', null, %s::interval)", since)
    value(own, "select pgque.set_history('lags', null)")
    move_clock(own, "10 minutes")
    value(own, "select pgque.maint_lags()")
    assert value(own, "select count(*) from pgque.sample where smp_sub > 0 and smp_lag > 1") == 2


def test_a_queue_that_is_locked_has_no_sample_and_keeps_no_other_from_one(
    own: Connection, transaction: Callable[..., Connection]
) -> None:
    for name in ("held", "free"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
        send(own, name)
        forced_tick(own, name)
    for n in range(60):
        subscribe(own, "held", f"c{n}")
    send(own, "held")
    forced_tick(own, "held")
    move_clock(own, "1 hour")
    other = transaction("read committed", own.info.dsn)
    number = value(own, "select queue_id from pgque.queue where queue_name = 'held'")
    other.execute(f"lock table pgque.tick_{number}_0".encode())
    own.execute("set statement_timeout = '6s'")  # a wait for each of its consumers takes twice as long
    value(own, "select pgque.maint_lags()")
    assert value(own, "select count(*) from pgque.sample where smp_sub > 0 and smp_lag > 1") == 1
    assert len(rows(own, "select * from pgque.consumer_lags('free')")) == 1


def test_a_rate_counts_what_came_in_each_part_of_the_time(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    wanted = []
    for minute in range(1, 13):
        move_clock(own, f"{minute} minutes")
        send_many(own, "q", minute)
        forced_tick(own, "q")
        wanted.append(minute)
    move_clock(own, "12 minutes 30 seconds")
    found = rows(own, "select start_at, events from pgque.queue_rates('q', '12 minutes', 12)")
    assert [events for _, events in found] == wanted
    assert {later[0] - sooner[0] for sooner, later in itertools.pairwise(found)} == {
        found[1][0] - found[0][0]
    }
    assert sum(column(own, "select events from pgque.queue_rates('q', '1 hour', 7)")) == sum(wanted)
    assert column(own, "select events from pgque.queue_rates('q', '1 day', 1)") == [sum(wanted)]
    for since, parts in (("0", 5), ("2 years", 5), ("1 hour", 0), ("1 hour", 1001), (None, 5)):
        refused("PQ005", value, own, "select pgque.queue_rates('q', %s::interval, %s)", since, parts)


def test_settings_are_listed_with_their_defaults_and_where_they_come_from(own: Connection) -> None:
    value(own, "select pgque.create_queue('q', '{\"max_retries\": 3}')")
    value(own, "select pgque.set_default_config('tick_gap', '5 milliseconds')")
    found = {row[0]: row[1:] for row in rows(own, "select * from pgque.queue_settings('q')")}
    assert found.keys() == set(column(own, "select param_name from pgque.queue_config('q')"))
    assert found["max_retries"][:4] == ("3", "5", "queue", "int")
    assert found["tick_gap"][:4] == ("00:00:00.005", "5 milliseconds", "all queues", "interval")
    assert found["retention_period"][:4] == ("7 days", "7 days", "built in", "interval")
    assert found["dead_letter_queue"][:3] == (None, None, "built in")
    assert all(description for *_, description in found.values())
    refused("PQ001", value, own, "select pgque.queue_settings('none')")
