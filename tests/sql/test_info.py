"""Settings, information, health, metrics, retention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_tuples,
    drain,
    forced_tick,
    move_clock,
    nack,
    need_prepared_transactions,
    post,
    queue_bytes,
    receive,
    refused,
    row_counts,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)

QUEUE_INFO = [
    "queue_name", "queue_ntables", "queue_cur_table", "queue_rotation_period", "queue_switch_time",
    "queue_external_ticker", "queue_ticker_paused", "queue_ticker_max_count", "queue_ticker_max_lag",
    "queue_ticker_idle_period", "ticker_lag", "ev_per_sec", "ev_new", "last_tick_id",
]  # fmt: skip
CONSUMER_INFO = [
    "queue_name", "consumer_name", "lag", "last_seen", "last_tick", "current_batch", "next_tick", "pending_events",
]  # fmt: skip
MESSAGE = [
    "msg_id", "batch_id", "type", "payload", "retry_count", "created_at", "extra1", "extra2", "extra3", "extra4",
    "headers", "key", "payload_bytes", "receive_count", "last_error", "expires_at", "queue",
]  # fmt: skip


def columns(conn: Connection, query: str) -> list[str]:
    return [d.name for d in conn.execute(query.encode()).description or []]


def test_results_have_the_columns_that_clients_know_first(conn: Connection, subscribed: str) -> None:
    for call, expected in (
        ("select * from pgque.get_queue_info()", QUEUE_INFO),
        (f"select * from pgque.get_queue_info('{subscribed}')", QUEUE_INFO),
        ("select * from pgque.get_consumer_info()", CONSUMER_INFO),
        (f"select * from pgque.get_consumer_info('{subscribed}')", CONSUMER_INFO),
        (f"select * from pgque.get_consumer_info('{subscribed}', 'c')", CONSUMER_INFO),
        (f"select * from pgque.receive('{subscribed}', 'c')", MESSAGE),
        (f"select * from pgque.peek('{subscribed}')", MESSAGE),
        (f"select * from pgque.dlq_inspect('{subscribed}')", ["dl_id", "dl_time", "dl_reason", "ev_id", "ev_time"]),
        ("select * from pgque.status()", ["component", "status", "detail"]),
        (f"select * from pgque.dlq_replay_all('{subscribed}')", ["replayed", "failed", "first_error"]),
        (
            "select * from pgque.subscription",
            ["sub_id", "sub_queue", "sub_consumer", "sub_last_tick", "sub_active", "sub_batch", "sub_next_tick", "sub_role"],
        ),
        ("select * from pgque.consumer", ["co_id", "co_name"]),
        ("select * from pgque.queue", ["queue_id", "queue_name"]),
    ):  # fmt: skip
        assert columns(conn, call)[: len(expected)] == expected, call


def test_relations_that_people_query_have_their_columns(conn: Connection) -> None:
    for relation, expected in (
        ("tick", {"tick_queue", "tick_id", "tick_time", "tick_snapshot", "tick_event_seq"}),
        ("retry_queue", {"ev_retry_after", "ev_queue", "ev_id", "ev_data"}),
        ("dead_letter", {"dl_id", "dl_queue_id", "dl_consumer_id", "dl_time", "dl_reason", "ev_id"}),
        ("config", {"tick_period_ms"}),
    ):
        assert expected <= set(columns(conn, f"select * from pgque.{relation}"))


def test_queue_info_returns_settings_and_figures(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(
        own, "q", ticker_max_count=7, ticker_max_lag="3 s", ticker_idle_period="9 s", rotation_period="1 h"
    )
    send_many(own, "q", 5)
    (found,) = rows(
        own,
        "select queue_ntables, queue_cur_table, queue_rotation_period::text, queue_external_ticker, queue_ticker_paused,"
        " queue_ticker_max_count, queue_ticker_max_lag::text, queue_ticker_idle_period::text, ev_new, last_tick_id"
        " from pgque.get_queue_info('q')",
    )
    assert found == (3, 0, "01:00:00", False, False, 7, "00:00:03", "00:00:09", 5, 1)
    for seconds in range(1, 11):
        move_clock(own, f"{seconds} seconds")
        send_many(own, "q", 10)
        forced_tick(own, "q")
    (rate, new) = rows(own, "select ev_per_sec, ev_new from pgque.get_queue_info('q')")[0]
    assert 8 < rate < 13
    assert new == 0
    move_clock(own, "70 seconds")
    assert value(own, "select ev_per_sec from pgque.get_queue_info('q')") == 0
    assert 59 < value(own, "select extract(epoch from ticker_lag) from pgque.get_queue_info('q')") < 65


def test_a_burst_after_the_creation_of_a_queue_is_no_rate(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    send_many(own, "q", 400)
    tick(own, "q")
    assert value(own, "select ev_per_sec from pgque.get_queue_info('q')") <= 400
    move_clock(own, "40 seconds")
    assert 9 < value(own, "select ev_per_sec from pgque.get_queue_info('q')") <= 10
    tick(own, "q")
    assert 9 < value(own, "select ev_per_sec from pgque.get_queue_info('q')") <= 10


def test_messages_that_were_rolled_back_are_not_pending(conn: Connection, subscribed: str) -> None:
    pending = "select i.pending_events from pgque.get_consumer_info(%s, 'c') i"
    many = "insert into pgque.sink_bulk (queue, payload, headers) select %s, 'x', case g when 9 then '[]' end from generate_series(1, 9) g"
    refused("PQ005", value, conn, many, subscribed)
    assert value(conn, pending, subscribed) == 0
    send(conn, subscribed)
    assert value(conn, pending, subscribed) > 0


def test_consumer_info_returns_lag_and_pending_events(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    subscribe(own, "q", "d")
    send_many(own, "q", 5)
    tick(own, "q")
    move_clock(own, "100 seconds")
    drain(own, "q", "d")
    batch = receive(own, "q", count=2)[0].batch_id
    found = {
        r[0]: r[1:]
        for r in rows(
            own,
            "select consumer_name, extract(epoch from lag)::int, extract(epoch from last_seen)::int, last_tick,"
            " current_batch, next_tick, pending_events from pgque.get_consumer_info('q')",
        )
    }
    assert found["c"][2:] == (1, batch, 2, 5)
    assert abs(found["c"][0] - 100) < 5
    assert found["c"][1] < 5
    assert found["d"][2:] == (2, None, None, 0)
    assert rows(own, "select consumer_name from pgque.get_consumer_info('q', 'c')") == [("c",)]
    refused("PQ001", rows, own, "select * from pgque.get_consumer_info('p')")
    refused("PQ011", rows, own, "select * from pgque.get_consumer_info('q', 'nobody')")
    refused("PQ001", rows, own, "select * from pgque.get_queue_info('p')")


SETTINGS = {
    "ticker_max_count": ("500", "7", ["0", "-1", "x", "1.5", "99999999999"]),
    "ticker_max_lag": ("00:00:00", "00:00:05", ["-1 second", "x", ""]),
    "ticker_idle_period": ("00:01:00", "00:00:05", ["0", "-1 second", "x"]),
    "ticker_paused": ("false", "true", ["x", ""]),
    "external_ticker": ("false", "true", ["x"]),
    "rotation_period": ("02:00:00", "01:00:00", ["0", "-1 day", "x"]),
    "retention_period": ("7 days", "1 day", ["-1 day", "x"]),
    "max_retries": ("5", "0", ["-1", "x", "99999999999"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_set_read_restored_and_checked(conn: Connection, queue: str, name: str) -> None:
    default, other, wrong = SETTINGS[name]
    read = "select param_value from pgque.queue_config(%s) where param_name = %s"
    write = "select pgque.set_queue_config(%s, %s, %s)"
    assert value(conn, read, queue, name) == default
    assert value(conn, write, queue, name, other) == 1
    assert value(conn, read, queue, name) == other
    for bad in wrong:
        error = refused("PQ005", rows, conn, write, queue, name, bad)
        assert queue in str(error)
        assert name in str(error)
    assert value(conn, read, queue, name) == other
    assert value(conn, write, queue, name, None) == 1
    assert value(conn, read, queue, name) == default
    assert value(conn, write, queue, "queue_" + name, other) == 1
    assert value(conn, read, queue, name) == other


def test_no_period_has_a_part_that_leads_back(conn: Connection, queue: str) -> None:
    """-1 month 31 days is more than nothing as intervals compare, and nothing from the end of March on."""
    periods = [p for (p,) in rows(conn, "select param from pgque._setting_types() where type = 'interval'")]
    assert len(periods) >= 6
    for name in periods:
        for bad in ("-1 month 31 days", "1 month -29 days", "1 day -23:30:00", "-1 year 400 days"):
            error = refused(
                "PQ005", rows, conn, "select pgque.set_queue_config(%s, %s, %s)", queue, name, bad
            )
            assert "negative part" in str(error.diag.message_detail)
            error = refused("PQ005", rows, conn, "select pgque.set_default_config(%s, %s)", name, bad)
            assert "negative part" in str(error.diag.message_detail)
        good = "00:00:01.5" if name == "tick_gap" else "1 month 1 day 01:00:01"
        assert value(conn, "select pgque.set_queue_config(%s, %s, %s)", queue, name, good) == 1


def test_unknown_settings_are_refused_and_several_are_set_all_or_none(conn: Connection, queue: str) -> None:
    read = "select param_value from pgque.queue_config(%s) where param_name = 'max_retries'"
    for wrong in ("nonsense", "", None, "name", "id", "cur_table", "max_retries = 1; --"):
        refused("PQ005", rows, conn, "select pgque.set_queue_config(%s, %s, '1')", queue, wrong)
    alter = "select pgque.alter_queue(%s, %s::jsonb)"
    assert value(conn, alter, queue, '{"max_retries": 2, "rotation_period": "1 hour"}') == 2
    refused("PQ005", rows, conn, alter, queue, '{"max_retries": 3, "nonsense": 1}')
    for wrong in ("[]", "1", "null", None):
        refused("PQ005", rows, conn, alter, queue, wrong)
    assert value(conn, read, queue) == "2"
    refused("PQ001", rows, conn, alter, "no " + queue, "{}")
    refused("PQ001", rows, conn, "select pgque.set_queue_config(%s, 'max_retries', '1')", "no " + queue)


def test_a_queue_is_created_with_settings_or_not_at_all(own: Connection) -> None:
    create = "select pgque.create_queue(%s, %s::jsonb)"
    assert value(own, create, "q", '{"max_retries": 2}') == 1
    assert value(own, create, "q", '{"max_retries": 3}') == 0
    assert (
        value(own, "select param_value from pgque.queue_config('q') where param_name = 'max_retries'") == "2"
    )
    for wrong in ('{"nonsense": 2}', "[]", "null", "1"):
        refused("PQ005", rows, own, create, "p", wrong)
    refused("PQ001", send, own, "p")
    # An argument that is left out.
    assert value(own, create, "p", None) == 1
    assert value(own, "select queue_own from pgque.queue where queue_name = 'p'") == {}


def test_two_sessions_that_create_one_queue_at_once_make_one(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., object],
    wait_until: Callable[..., None],
) -> None:
    one = connect(own_dsn, autocommit=False)
    assert value(one, "select pgque.create_queue('q')") == 1
    other = background(lambda c: value(c, "select pgque.create_queue('q')"), connect(own_dsn))
    waiting = "select a.wait_event_type = 'Lock' from pg_stat_activity as a where a.pid = %s"
    wait_until(lambda: value(own, waiting, other.pid), "the second waits")  # type: ignore[attr-defined]
    one.commit()
    assert other.result() == 0  # type: ignore[attr-defined]


def test_health_is_all_ok_on_a_healthy_queue_and_names_what_is_wrong(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    status = "select status, detail, advice from pgque.health() where queue = 'q' and check_name = %s"
    checks = rows(own, "select check_name, status from pgque.health() where queue = 'q'")
    assert {s for _, s in checks} == {"ok"}
    send(own, "q")
    move_clock(own, "10 seconds")
    assert rows(own, status, "ticks")[0][0] == "warn"
    move_clock(own, "10 minutes")
    found = rows(own, status, "ticks")[0]
    assert found[0] == "fail" and found[2]
    tick(own, "q")
    assert rows(own, status, "ticks")[0][0] == "ok"
    configure(own, "q", max_retries=0)
    (message,) = receive(own, "q")
    nack(own, message)
    assert rows(own, status, "dead letters")[0][0] == "warn"
    assert "dlq" in rows(own, status, "dead letters")[0][2]
    ack(own, message.batch_id)
    configure(own, "q", ticker_paused=True)
    assert rows(own, status, "ticks")[0][0] == "warn"


CHECK = "select status, detail, advice from pgque.health() where queue = 'q' and check_name = %s"
LAG = "select value from pgque.metrics() where metric = 'pgque_consumer_lag_seconds' and consumer = %s"


@pytest.mark.parametrize("worker", ["", ", worker => 'w'"], ids=["plain", "pool"])
def test_a_consumer_with_nothing_pending_does_not_lag_however_long_the_queue_was_quiet(
    own: Connection, worker: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send(own, "q")
    forced_tick(own, "q")
    ((batch,),) = rows(own, f"select m.batch_id from pgque.receive('q', 'c', 10{worker}) as m")
    ack(own, batch)
    own.execute("begin; select pgque.send('q', 'rolled back'::text); rollback")
    for age in ("1 day", "6 days", "30 days"):
        move_clock(own, age)
        value(own, "select pgque.ticker()")
        assert rows(own, CHECK, "consumers") == [("ok", "nothing pending (1 consumer)", None)]
        assert value(own, LAG, "c") == 0
        assert value(own, "select lag from pgque.get_consumer_info()").total_seconds() == 0


def test_health_reports_how_long_the_oldest_message_has_been_pending(own: Connection) -> None:
    """Since the tick that showed it: after a quiet time, and also if it was sent with a delay or failed."""
    value(own, "select pgque.create_queue('q')")
    for consumer in ("c", "d"):
        subscribe(own, "q", consumer)
    for quiet in range(1, 40):
        move_clock(own, f"{quiet} hours")
        value(own, "select pgque.ticker()")
    own.execute("begin; select pgque.send('q', 'rolled back'::text); rollback")
    value(own, "select pgque.send('q', 'later', '1'::text, delay => '10 hours')")
    move_clock(own, "52 hours")
    value(own, "select pgque.maint_retry_events()")
    forced_tick(own, "q")
    for quiet in range(1, 20):
        move_clock(own, f"52 hours {quiet} minutes")
        forced_tick(own, "q")
    assert drain(own, "q", "d")
    assert 19 * 60 <= value(own, LAG, "c") < 19 * 60 + 30
    assert value(own, LAG, "d") == 0
    ((status, detail, advice),) = rows(own, CHECK, "consumers")
    assert status == "warn"
    assert "unsubscribe" in advice
    assert detail.startswith("00:19:")
    assert detail.endswith(" since the oldest pending message of consumer c (2 consumers)")
    assert "consumer c" in advice
    configure(own, "q", health_pending_warn="20 minutes")
    assert rows(own, CHECK, "consumers")[0][0] == "ok"
    configure(own, "q", health_pending_fail="18 minutes")
    assert rows(own, CHECK, "consumers")[0][0] == "fail"
    configure(own, "q", health_pending_warn="0", health_pending_fail="0")
    assert rows(own, CHECK, "consumers")[0][0] == "ok"
    configure(own, "q", retention_period="10 minutes")
    assert rows(own, CHECK, "consumers")[0][0] == "fail"  # retention is about to take it


def test_a_retry_that_a_plain_consumer_does_not_fetch_is_pending(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send(own, "q")
    forced_tick(own, "q")
    (message,) = receive(own, "q")
    nack(own, message, "1 minute")
    ack(own, message.batch_id)
    assert value(own, LAG, "c") == 0
    move_clock(own, "2 minutes")
    value(own, "select pgque.maint_retry_events()")
    forced_tick(own, "q")
    move_clock(own, "12 minutes")
    assert 660 <= value(own, LAG, "c") < 690
    assert rows(own, CHECK, "consumers")[0][0] == "warn"


def test_health_warns_of_messages_that_nobody_gets(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    assert rows(own, CHECK, "consumers") == [("ok", "no consumer", None)]
    send_many(own, "q", 3)
    ((status, detail, advice),) = rows(own, CHECK, "consumers")
    assert (status, detail) == ("warn", "3 recent messages that no consumer gets: the queue has none")
    configure(own, "q", health_pending_warn="0")  # a log that nobody has to read
    assert rows(own, CHECK, "consumers") == [("ok", "no consumer", None)]
    configure(own, "q", health_pending_warn="5 minutes")
    own.execute(advice[advice.index("select") :].encode())
    forced_tick(own, "q")
    assert rows(own, CHECK, "consumers")[0][0] == "ok"
    value(own, "select pgque.unsubscribe('q', 'my_consumer')")
    for _ in range(3):
        own.execute("update pgque.queue set queue_switch_time = queue_switch_time - interval '1 year'")
        forced_tick(own, "q")
        value(own, "select pgque.maint()")
    assert rows(own, CHECK, "consumers") == [("ok", "no consumer", None)]


def test_health_warns_of_a_paused_queue_and_of_one_that_is_nearly_full(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    assert rows(own, CHECK, "senders") == [("ok", "open", None)]
    value(own, "select pgque.pause('q')")
    ((status, detail, advice),) = rows(own, CHECK, "senders")
    assert (status, detail) == ("warn", "paused: send is refused")
    own.execute(advice.encode())
    configure(own, "q", max_depth=10)
    own.execute("begin; select pgque.send('q', 'rolled back'::text); rollback")
    send_many(own, "q", 7)
    assert rows(own, CHECK, "senders")[0][0] == "ok"
    send(own, "q")
    ((status, detail, advice),) = rows(own, CHECK, "senders")
    assert (status, detail) == ("warn", "open, depth 8 of max_depth 10")
    configure(own, "q", health_depth_warn=90)
    assert rows(own, CHECK, "senders")[0][0] == "ok"
    send_many(own, "q", 2)
    assert rows(own, CHECK, "senders")[0][:2] == ("fail", "open, depth 10 of max_depth 10")
    own.execute(advice[advice.index("select") :].encode())
    assert rows(own, CHECK, "senders")[0][0] == "ok"


def test_the_full_depth_counts_what_workers_hold(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.alter_queue('q', '{\"max_depth\": 10}')")
    subscribe(own, "q")
    send_many(own, "q", 10)
    forced_tick(own, "q")
    rows(own, "select * from pgque.receive('q', 'c', 10, worker => 'w', visibility_timeout => '1 hour')")
    assert rows(own, CHECK, "senders")[0][0] == "fail"


def test_health_counts_the_wait_for_a_tick_from_the_message_and_not_from_the_last_tick(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    move_clock(own, "55 seconds")
    send(own, "q")
    assert rows(own, CHECK, "ticks")[0][0] == "ok"
    move_clock(own, "65 seconds")
    assert rows(own, CHECK, "ticks")[0][0] == "warn"
    configure(own, "q", health_tick_warn="1 minute", health_tick_fail="2 minutes")
    assert rows(own, CHECK, "ticks")[0][0] == "ok"
    move_clock(own, "5 minutes")
    assert rows(own, CHECK, "ticks")[0][0] == "fail"
    # An external ticker may stop as well.
    configure(own, "q", external_ticker=True)
    assert rows(own, CHECK, "ticks")[0][0] == "fail"
    value(own, "select pgque.ticker('q', 100, pgque.clock(), 1)")
    assert rows(own, CHECK, "ticks")[0][0] == "ok"


@pytest.mark.parametrize("purged", [False, True])
def test_the_end_of_a_message_with_a_key_leaves_nothing_that_waits_for_a_tick(
    own: Connection, purged: bool
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    post(own, "q", key="k")
    tick(own, "q")
    if purged:
        assert value(own, "select pgque.purge_key('q', 'k')") == 1
    else:
        assert drain(own, "q") == [1]
    configure(own, "q", health_tick_warn="1 second")
    move_clock(own, "59 seconds")
    status, *_ = rows(own, CHECK, "ticks")[0]
    assert status == "ok"
    send(own, "q")
    move_clock(own, "70 seconds")
    assert rows(own, CHECK, "ticks")[0][0] == "warn"


def test_thresholds_are_settings_for_all_queues_too(own: Connection) -> None:
    for name in ("q", "own"):
        value(own, "select pgque.create_queue(%s)", name)
    configure(own, "own", health_pending_warn="1 hour")
    value(own, "select pgque.set_default_config('health_pending_warn', '1 minute')")
    setting = "select param_value from pgque.queue_config(%s) where param_name = 'health_pending_warn'"
    assert [value(own, setting, name) for name in ("q", "own")] == ["00:01:00", "01:00:00"]
    refused("PQ005", rows, own, "select pgque.set_default_config('health_depth_warn', '101')")


def test_health_names_what_can_hold_a_caller(own: Connection) -> None:
    check = "select status, detail from pgque.health() where check_name = 'stored callers'"
    assert rows(own, check) == [("ok", "none")]
    own.execute("create table public.t (who pgque.caller)")
    own.execute("create type public.y as (who pgque.caller)")
    own.execute("create function public.f(pgque.caller) returns int language sql as 'select 1'")
    own.execute("create table public.i (n name)")
    own.execute("create index the_index on public.i ((n::pgque.caller))")
    ((status, detail),) = rows(own, check)
    assert status == "fail"
    for part in ("who of table public.t", "type public.y", "public.f(", "public.the_index"):
        assert part in detail, detail


def test_health_and_metrics_of_a_crowd_of_consumers_are_few_rows_and_few_calls(own: Connection) -> None:
    """What one role with a right to consume can subscribe must not stop the looks of everybody."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q", "slow")
    send(own, "q")
    forced_tick(own, "q")
    value(own, "select count(pgque.subscribe('q', 'c' || n)) from generate_series(1, 400) n")
    value(own, "select pgque.set_queue_config('q', 'max_depth', '1')")
    own.execute("set track_functions = 'all'")
    own.execute("select pg_stat_reset()")
    figures = rows(own, "select metric, consumer, value from pgque.metrics()")
    assert ("pgque_queue_consumers", None, 401.0) in figures
    named = {consumer for _, consumer, _ in figures if consumer is not None}
    assert len(named) == 100 and "slow" in named
    checks = rows(own, "select status, detail from pgque.health() where queue = 'q'")
    assert any("401 consumers" in detail for _, detail in checks)
    assert any("slowest consumer slow" in detail for _, detail in checks)
    own.execute("select pg_stat_force_next_flush()" if own.info.server_version >= 150000 else "select 1")
    if own.info.server_version >= 150000:
        most = "select max(f.calls) from pg_stat_user_functions as f where f.schemaname = 'pgque'"
        assert value(own, most) < 1000


def test_the_overview_has_what_health_metrics_and_queue_info_say(own: Connection) -> None:
    for name in ("q", "r", "s"):
        value(own, "select pgque.create_queue(%s)", name)
        for consumer in ("c", "d"):
            subscribe(own, name, consumer)
        send_many(own, name, 5)
        forced_tick(own, name)
    taken = "select m.batch_id, m.msg_id from pgque.receive('q', 'c', 4, worker => 'w') as m order by 2"
    ((batch, first), (_, second), *_) = rows(own, taken)
    rows(own, "select pgque.dead(%s, array[%s::bigint], 'x')", batch, first)
    rows(own, "select pgque.nack(%s, array[%s::bigint], '1 hour')", batch, second)
    value(own, "select pgque.pause('r')")
    value(own, "select pgque.send('q', 'later', 'x'::text, delay => '1 day')")  # is no retry
    move_clock(own, "2 hours")
    send(own, "s")  # no tick shows it
    found = {
        r[0]: r[1:]
        for r in rows(
            own,
            "select o.queue, o.paused, o.events, o.pending_events, o.retries, o.dead_letters, o.in_flight, o.consumers,"
            " round(o.lag_seconds), o.bytes, o.ticker_paused from pgque.overview() as o",
        )
        if r[0] is not None
    }
    assert list(found) == ["q", "r", "s"]
    figures = "select coalesce(sum(value), 0) from pgque.metrics(%s) where metric = %s"
    highest = "select max(value) from pgque.metrics(%s) where metric = %s"
    for name, (paused, sent, pending, retries, dead, leased, consumers, lag, size, ticker) in found.items():
        info = rows(own, "select queue_paused, queue_ticker_paused from pgque.get_queue_info(%s)", name)
        assert [(paused, ticker)] == info
        for metric, got in (
            ("pgque_queue_events_total", sent),
            ("pgque_queue_dead_letters", dead),
            ("pgque_messages_in_flight", leased),
            ("pgque_queue_consumers", consumers),
        ):
            assert value(own, figures, name, metric) == got, (name, metric)
        assert retries == (name == "q")
        assert value(own, highest, name, "pgque_consumer_pending_events") == pending
        assert abs(value(own, highest, name, "pgque_consumer_lag_seconds") - lag) < 60
        assert size is None
    assert found["q"][3:6] == (1, 1, 2)
    problems = (
        "select o.queue, p.check_name, p.status, p.advice from pgque.overview() as o"
        " cross join jsonb_to_recordset(o.problems) as p (check_name text, status text, detail text, advice text)"
        " order by 1, 2"
    )
    checks = "select queue, check_name, status, advice from pgque.health() where status <> 'ok' order by 1, 2"
    assert rows(own, problems) == rows(own, checks) != []
    assert value(own, "select bytes from pgque.overview('q')") > 0
    refused("PQ001", rows, own, "select * from pgque.overview('none')")


def test_the_overview_shows_a_locked_queue_without_figures_and_the_others_with_them(
    own: Connection, transaction: Callable[..., Connection]
) -> None:
    for name in ("free", "held"):
        value(own, "select pgque.create_queue(%s)", name)
    other = transaction("read committed", own.info.dsn)
    leaf = value(own, "select 'pgque.tick_' || queue_id || '_0' from pgque.queue where queue_name = 'held'")
    other.execute(f"lock table {leaf}".encode())
    own.execute("set statement_timeout = '30s'")
    found = "select queue, paused, events, problems -> 0 ->> 'check_name' from pgque.overview() where queue is not null"
    assert rows(own, found) == [("free", False, 0, None), ("held", False, None, "tables")]
    other.rollback()


def test_the_overview_reads_ticks_positions_and_new_rows_of_a_queue_once(own: Connection) -> None:
    for number in range(10):
        value(own, "select pgque.create_queue(%s)", f"q{number}")
        for consumer in ("c", "d"):
            subscribe(own, f"q{number}", consumer)
        send_many(own, f"q{number}", 3)
        forced_tick(own, f"q{number}")
        for consumer in ("c", "d"):
            assert drain(own, f"q{number}", consumer)
    if own.info.server_version < 150000:
        pytest.skip("its statistics come late")
    own.execute("set track_functions = 'all'")
    calls = "select f.calls from pg_stat_user_functions as f where f.schemaname = 'pgque' and f.funcname = %s"
    for look, times in (("overview()", 1), ("health()", 1), ("metrics()", 1)):
        own.execute("select pg_stat_reset()")
        rows(own, f"select * from pgque.{look}")
        own.execute("select pg_stat_force_next_flush()")
        for part in ("_positions", "_has_new_rows", "_last_tick", "_slowest_consumers"):
            assert value(own, calls, part) == 10 * times, (look, part)
        # What is not there costs no query of its own: open batches, pending messages, retries, dead letters.
        nothing = ("_states", "_unfinished", "_health_retries", "_dead_letters_of")
        for part in nothing[: 2 if look == "metrics()" else None]:
            assert rows(own, calls, part) == [], (look, part)


def test_health_names_the_consumer_whose_worker_holds_rotation_up(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for consumer in ("a", "b"):
        subscribe(own, "q", consumer)
    send_many(own, "q", 2)
    forced_tick(own, "q")
    take = "select * from pgque.receive('q', 'b', %s, worker => %s, visibility_timeout => '1 hour')"
    assert len(rows(own, take, 1, "w")) == 1
    assert drain(own, "q", "a")
    send(own, "q")
    forced_tick(own, "q")
    for _ in range(2):
        assert len(rows(own, take, 1, "v")) == 1
    rotation = "select h.detail from pgque.health() as h where h.queue = 'q' and h.check_name = 'rotation'"
    assert str(value(own, rotation)).endswith("slowest consumer b")


def test_health_reports_the_cause_first_and_does_not_advise_to_unsubscribe_a_consumer_that_waits_for_ticks(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    everything = "select check_name, status, detail from pgque.health()"
    first = rows(own, everything)[0]
    assert first[:2] == ("ticker", "warn"), "no loop, and nothing waits"
    send(own, "q")
    move_clock(own, "2 hours")
    first = rows(own, everything)[0]
    assert first[:2] == ("ticker", "fail")
    assert first[2].endswith("and these queues wait: q")
    ((status, _, advice),) = rows(own, CHECK, "consumers")
    assert status == "fail"
    assert "check ticks" in advice
    assert "unsubscribe" not in advice
    forced_tick(own, "q")
    assert rows(own, everything)[0][1] == "warn"


def test_health_warns_before_the_retention_period_ends(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", retention_period="100 seconds", health_pending_warn="1 hour")
    subscribe(own, "q")
    send(own, "q")
    forced_tick(own, "q")
    for age, wanted in (("70 seconds", "ok"), ("85 seconds", "warn"), ("105 seconds", "fail")):
        move_clock(own, age)
        ((status, _, advice),) = rows(own, CHECK, "consumers")
        assert status == wanted, age
    assert advice.startswith(
        "It misses messages older than 00:01:40. To keep them longer: select pgque.alter_queue"
    )


def test_health_warns_of_messages_that_a_worker_has_had_for_long(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send_many(own, "q", 4)
    forced_tick(own, "q")
    assert rows(own, CHECK, "leases") == [("ok", "no worker holds a lease", None)]
    taken = "select m.batch_id, m.msg_id from pgque.receive('q', 'c', %s, worker => 'w1', visibility_timeout => '6 hours') as m"
    ((first, msg_id), *_) = rows(own, taken, 2)
    # A lease in the retry queue, too.
    rows(own, "select pgque.nack(%s, array[%s::bigint], '1 second')", first, msg_id)
    move_clock(own, "10 seconds")
    assert rows(own, taken, 1) != []
    move_clock(own, "5 hours")
    ((status, detail, advice),) = rows(own, CHECK, "leases")
    assert (status, detail) == ("warn", "05:00:00 is the age of the oldest lease, of worker w1 of consumer c")
    assert "select pgque.reclaim('q', 'c', '01:00:00')" in advice
    value(own, "select pgque.release(%s)", first)
    assert rows(own, CHECK, "leases")[0][0] == "warn"
    configure(own, "q", visibility_timeout="1 hour")
    assert rows(own, CHECK, "leases")[0][0] == "ok"
    configure(own, "q", visibility_timeout="1 minute")
    value(own, "select pgque.reclaim('q', 'c', '1 hour')")
    assert rows(own, CHECK, "leases")[0][0] == "ok"


def test_a_consumer_with_the_name_of_a_subconsumer_has_figures_of_its_own(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe_subconsumer('q', 'a', 'b')")
    subscribe(own, "q", "a.b")
    figures = rows(own, "select metric, consumer from pgque.metrics('q')")
    assert ("pgque_consumer_lag_seconds", "a.b") in figures
    assert len(figures) == len(set(figures))


def test_health_names_role_and_application_of_an_old_transaction(
    own: Connection, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    other = connect(own.info.dsn, autocommit=False, application_name="his job")
    send(other, "q")
    move_clock(own, "2 hours")
    detail = value(own, "select detail from pgque.health() where check_name = 'open transactions'")
    who = f"pid {other.info.backend_pid} (role {own.info.user}, application his job), 02:00:"
    # The owner of pgque may be no superuser.
    assert detail.startswith(
        (f"oldest writing transaction: {who}", "other transactions write, and their age is hidden")
    )


def test_health_names_a_prepared_transaction_that_was_forgotten(
    own: Connection, transaction: Callable[..., Connection]
) -> None:
    need_prepared_transactions(own)
    value(own, "select pgque.create_queue('q')")
    task = transaction("read committed", own.info.dsn)
    send(task, "q")
    task.execute("prepare transaction 'it''s old'")
    check = "select status, detail, advice from pgque.health() where check_name = 'open transactions'"
    try:
        (young,) = rows(own, check)
        assert young[0] == "ok"
        move_clock(own, "2 hours")
        ((status, detail, advice),) = rows(own, check)
        assert status == "warn"
        assert detail.startswith(
            f"oldest writing transaction: prepared by {own.info.user} as 'it''s old', 02:00:"
        )
        assert "rollback prepared 'it''s old'" in advice
    finally:
        own.execute("rollback prepared 'it''s old'")
    assert rows(own, check) == [("ok", "none", None)]


@pytest.mark.parametrize("how", ["lock 0", "lock 1", "drop"])
def test_health_reports_a_locked_queue_and_does_not_wait_for_it(
    own: Connection, transaction: Callable[..., Connection], how: str
) -> None:
    for name in ("free", "held"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    subscribe(own, "held", "d")
    other = transaction("read committed", own.info.dsn)
    if how == "drop":
        value(other, "select pgque.drop_queue('held', true)")
    else:
        leaf = "select 'pgque.tick_' || queue_id || '_' || %s from pgque.queue where queue_name = 'held'"
        other.execute(f"lock table {value(own, leaf, how[-1])}".encode())
    own.execute("set statement_timeout = '30s'")
    checks = rows(own, "select check_name, status, detail from pgque.health() where queue = 'held'")
    assert checks == [("tables", "fail", f"locked by pid {other.info.backend_pid}")]
    free = {r[0] for r in rows(own, "select status from pgque.health() where queue = 'free'")}
    assert free == {"ok"}
    queues = rows(own, "select queue_name, queue_ntables, ticker_lag is null from pgque.get_queue_info()")
    assert queues == [("free", 3, False), ("held", 3, True)]
    consumers = rows(own, "select queue_name, consumer_name, lag is null from pgque.get_consumer_info()")
    blind = how != "lock 1"  # a table without anything that is pending is not asked
    assert consumers == [("free", "c", False), ("held", "c", blind), ("held", "d", blind)]
    figures = {r[0] for r in rows(own, "select queue from pgque.metrics()")}
    assert figures == {None, "free"}
    other.rollback()
    assert {r[0] for r in rows(own, "select status from pgque.health() where queue = 'held'")} == {"ok"}


def test_health_waits_for_the_tables_that_all_queues_share(
    own: Connection,
    transaction: Callable[..., Connection],
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    for consumer in ("a", "b"):
        subscribe(own, "q", consumer)
    look = "select consumer_name, lag is null from pgque.get_consumer_info()"
    for table in ("position_0", "queue"):
        other = transaction("read committed", own.info.dsn)
        other.execute(f"lock table pgque.{table}".encode())
        job = background(lambda c: rows(c, look), connect(own.info.dsn))
        wait_for_lock(job.pid)
        other.execute("select pg_sleep(0.5)")  # longer than it waits for a queue's own tables
        other.commit()
        assert job.result() == [("a", False), ("b", False)]


def test_a_message_whose_lease_expired_is_pending_though_nobody_polled(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send_many(own, "q", 5)
    forced_tick(own, "q")
    take = "select m.msg_id, m.batch_id from pgque.receive('q', 'c', %s, worker => 'w') as m"
    ((_, first),) = rows(own, take, 1)
    ((_, second), _) = rows(own, take, 2)
    assert len(rows(own, take, 100)) == 2
    ack(own, first)
    rows(own, "select * from pgque.ack(%s, %s)", second, [sent[1]])
    info = "select pending_events, lag > '1 hour' from pgque.get_consumer_info('q', 'c')"
    assert rows(own, info) == [(0, False)]
    move_clock(own, "2 hours")
    value(own, "select pgque.ticker()")
    forced_tick(own, "q")
    assert rows(own, info) == [(3, True)]
    waiting = rows(own, "select msg_id from pgque.peek('q', 10, 'c')")
    assert [w[0] for w in waiting] == sent[2:]


def test_what_was_released_of_an_open_window_is_pending_once(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send_many(own, "q", 10)
    forced_tick(own, "q")
    ((batch,), *_) = rows(own, "select m.batch_id from pgque.receive('q', 'c', 5, worker => 'w') as m")
    value(own, "select pgque.release(%s)", batch)
    assert value(own, "select pending_events from pgque.get_consumer_info('q', 'c')") == 10
    assert [r[0] for r in rows(own, "select msg_id from pgque.peek('q', 20, 'c')")] == sent


def test_peek_shows_nothing_that_was_purged_where_it_waits_for_its_turn(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'c', 'latest', keyed_order => true)")
    take = "select m.payload from pgque.receive('q', 'c', worker => 'w', visibility_timeout => '1 day') as m"
    for turn in ("first", "second"):
        for key in ("a", "b"):
            value(own, "select pgque.send('q', 't', %s::text, key => %s)", f"{turn} {key}", key)
        forced_tick(own, "q")
        assert len(rows(own, take)) == (2 if turn == "first" else 0)
    waiting = "select payload from pgque.peek('q', 10, 'c')"
    assert rows(own, waiting) == [("second a",), ("second b",)]
    assert value(own, "select pgque.purge_key('q', 'b')") == 1
    assert rows(own, waiting) == [("second a",)]


def test_what_waits_for_workers_again_is_pending_and_makes_them_lag(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send_many(own, "q", 5)
    forced_tick(own, "q")
    info = "select pending_events, lag > '1 hour' from pgque.get_consumer_info('q', 'c')"
    (message, *_) = rows(own, "select m.batch_id from pgque.receive('q', 'c', worker => 'w') as m")
    assert rows(own, info) == [(0, False)]
    value(own, "select count(*) from pgque.nack(%s, %s, '1 day')", message[0], sent[:1])
    value(own, "select pgque.release(%s)", message[0])
    move_clock(own, "2 hours")
    value(own, "select pgque.ticker()")
    forced_tick(own, "q")
    assert rows(own, info) == [(4, True)]
    figure = "select value from pgque.metrics() where metric = 'pgque_consumer_pending_events'"
    assert value(own, figure) == 4
    checks = "select detail from pgque.health() where queue = 'q' and check_name in ('consumers', 'retries')"
    lag, retries = (r[0] for r in rows(own, checks))
    assert lag.startswith("02:00")
    assert lag.endswith(" since the oldest pending message of consumer c (1 consumer)")
    assert retries == "0 due, 4 wait for their consumers"
    assert [w[0] for w in rows(own, "select msg_id from pgque.peek('q', 10, 'c')")] == sent[1:]
    assert [w[0] for w in rows(own, "select msg_id from pgque.peek('q', 2, 'c')")] == sent[1:3]


def test_what_was_redelivered_to_a_consumer_on_its_own_is_pending_until_it_is_done(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    (sent,) = send_many(own, "q", 1)
    forced_tick(own, "q")
    (message,) = receive(own, "q", "c")
    nack(own, message)
    ack(own, message.batch_id)
    info = "select pending_events, lag > '1 hour' from pgque.get_consumer_info('q', 'c')"
    (again,) = receive(own, "q", "c")
    assert again.msg_id == sent
    assert rows(own, info) == [(1, False)]
    move_clock(own, "2 hours")
    value(own, "select pgque.ticker()")
    assert rows(own, info) == [(1, True)]
    assert rows(own, CHECK, "consumers")[0][0] == "fail"
    ack(own, again.batch_id)
    assert rows(own, info) == [(0, False)]


def test_a_table_that_is_full_of_large_payloads_is_worth_a_warning(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q", "gone")
    own.execute("alter table pgque.event_1_0 alter ev_data set storage external")
    value(own, "select count(pgque.send('q', repeat('x', 1000000))) from generate_series(1, 70)")
    forced_tick(own, "q")
    move_clock(own, "10 hours")
    rotation = "select status, advice from pgque.health() where queue = 'q' and check_name = 'rotation'"
    assert rows(own, rotation)[0][0] == "warn"


def test_metrics_are_one_row_a_figure(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send_many(own, "q", 4)
    forced_tick(own, "q")
    found = {
        (m, c): v for m, q, c, v in rows(own, "select metric, queue, consumer, value from pgque.metrics()")
    }
    assert found[("pgque_queue_events_total", None)] == 4
    assert found[("pgque_queue_last_tick_id", None)] == 2
    assert found[("pgque_consumer_pending_events", "c")] == 4
    assert found[("pgque_consumer_open_batch", "c")] == 0
    assert found[("pgque_queue_bytes", None)] > 0
    assert found[("pgque_queue_depth", None)] == 4
    assert ("pgque_queue_max_depth", None) not in found
    assert found[("pgque_queue_retention_seconds", None)] == 7 * 86_400
    assert found[("pgque_recurring_messages", None)] == found[("pgque_recurring_failing", None)] == 0
    assert found[("pgque_schema_bytes", None)] >= found[("pgque_queue_bytes", None)]
    receive(own, "q")
    assert value(own, "select value from pgque.metrics() where metric = 'pgque_consumer_open_batch'") == 1


def test_metrics_show_a_limit_a_recurring_message_that_fails_and_a_transaction_that_stays_open(
    own: Connection, transaction: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q', '{\"max_depth\": 10}')")
    value(own, "select pgque.create_recurring('r', 'q', '* * * * *', 't', 'x')")
    value(own, "select pgque.pause('q')")
    other = transaction("read committed", own.info.dsn)
    other.execute("create temp table t (n int)")
    move_clock(own, "10 minutes")
    figures = dict(rows(own, "select metric, value from pgque.metrics() where consumer is null"))
    assert figures["pgque_queue_max_depth"] == 10
    assert figures["pgque_recurring_messages"] == figures["pgque_recurring_failing"] == 1
    hidden = "select detail ~ 'hidden' from pgque.health() where check_name = 'open transactions'"
    if value(own, hidden):  # the owner is no superuser
        assert "pgque_oldest_transaction_seconds" not in figures
    else:
        assert 600 <= figures["pgque_oldest_transaction_seconds"] < 4_000
    other.rollback()
    assert (
        value(own, "select value from pgque.metrics() where metric = 'pgque_oldest_transaction_seconds'") == 0
    )


@pytest.mark.slow  # waits for rotations by the loop
def test_a_consumer_beyond_the_retention_period_is_moved_and_lets_rotation_go_on(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for consumer in ("alive", "dead", "stuck"):
        subscribe(own, "q", consumer)
    configure(own, "q", retention_period="1 day", rotation_period="1 hour")
    for _ in range(3):
        send_many(own, "q", 2_000)
        tick(own, "q")
    open_batch = receive(own, "q", "stuck", 10)
    sizes = []
    for hours in range(1, 160):
        move_clock(own, f"{hours} hours")
        send_many(own, "q", 500)
        tick(own, "q")
        drain(own, "q", "alive", count=10_000)
        value(own, "select pgque.maint()")
        sizes.append(queue_bytes(own, "q"))
    assert ack(own, open_batch[0].batch_id) == 0
    # What a day brings stays for the dead consumers, at most twice that on disk, and it does not grow.
    assert max(sizes[80:]) <= 1.2 * max(sizes[:80])
    found = {
        r[0]: r[1:]
        for r in rows(
            own,
            "select consumer_name, extract(epoch from lag)::int / 3600, skipped_events from pgque.get_consumer_info('q')",
        )
    }
    assert found["alive"] == (0, 0)
    assert 23 <= found["dead"][0] <= 26
    assert found["dead"][1] > 20_000
    got = drain(own, "q", "dead", count=1_000)
    assert 11_000 <= len(got) <= 13_500
    assert got == list(range(got[0], got[0] + len(got)))
    assert len(got) + found["dead"][1] == 3 * 2_000 + 159 * 500


def test_retention_moves_no_consumer_that_keeps_up(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    configure(own, "q", retention_period="1 day")
    send(own, "q")
    tick(own, "q")
    batch = receive(own, "q")
    move_clock(own, "3 days")
    # Nothing newer than a day came: the only tick before the period's end is where it stands or later.
    forced_tick(own, "q")
    value(own, "select pgque.maint()")
    if receive(own, "q") == batch:
        assert ack(own, batch[0].batch_id) == 1
    last = send(own, "q")
    tick(own, "q")
    assert last in drain(own, "q")
    assert value(own, "select pgque.maint_retain('q')") == 0


@pytest.mark.parametrize("policy", ["dead_letter", "drop"])
def test_retention_takes_a_long_backlog_in_parts(own: Connection, policy: str) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    configure(own, "q", drop_policy=policy)
    for _ in range(5):
        send_many(own, "q", 6_000)
        tick(own, "q")
    move_clock(own, "8 days")
    forced_tick(own, "q")
    moved = 0
    while value(own, "select pgque.maint_retain('q')") == 1:
        moved += 1
    assert moved == 5
    skipped = value(own, "select i.skipped_events from pgque.get_consumer_info('q', 'c') as i")
    assert skipped == 30_000
    assert row_counts(own).get("dead_letter", 0) == (30_000 if policy == "dead_letter" else 0)
    assert drain(own, "q") == []


def test_retention_in_parts_keeps_the_outcomes_of_an_open_window(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    for _ in range(5):
        sent = send_many(own, "q", 6_000)
        tick(own, "q")
    batch = receive(own, "q", count=50_000)
    assert len(batch) == 30_000
    done = [m.msg_id for m in batch if m.msg_id not in sent[:10]]
    value(own, "select count(*) from pgque.ack(%s, %s::bigint[])", batch[0].batch_id, done)
    move_clock(own, "8 days")
    while value(own, "select pgque.maint_retain('q')") == 1:
        pass
    assert (
        sorted(d[0] for d in rows(own, "select d.ev_id from pgque.dlq_inspect('q', 100) as d")) == sent[:10]
    )


def test_a_queue_with_nearly_all_dead_letters_makes_the_checks_of_the_others_no_slower(
    own: Connection,
) -> None:
    """A plan that is made for the average queue would read the whole table for each."""
    for number in range(20):
        value(own, "select pgque.create_queue(%s)", f"q{number}")
    subscribe(own, "q0")
    own.execute(
        b"insert into pgque.dead_letter (dl_queue_id, dl_consumer_id, dl_time, ev_id, ev_time, ev_txid)"
        b" select s.sub_queue, s.sub_consumer, now(), g, now(), pg_current_xact_id()"
        b" from pgque.subscriber s, generate_series(1, 20000) g"
    )
    own.execute(b"analyze pgque.dead_letter")
    own.execute(b"select pg_stat_reset()")
    for look in ("health()", "metrics()"):
        rows(own, f"select * from pgque.{look}")
    dead_tuples(own)  # the statistics are current then
    scans = "select seq_scan from pg_stat_user_tables where relname = 'dead_letter'"
    assert value(own, scans) == 0


def test_health_and_metrics_of_one_queue_are_those_rows_of_all(own: Connection) -> None:
    for queue in ("q", "r"):
        value(own, "select pgque.create_queue(%s)", queue)
        subscribe(own, queue)
        send_many(own, queue, 3)
        tick(own, queue)
    first = receive(own, "q", "c")
    nack(own, first[0])
    ack(own, first[0].batch_id)
    assert len(receive(own, "q", "c")) == 1
    value(own, "select pgque.create_recurring('daily', 'q', '0 0 * * *', 't', 'x'::text)")
    value(own, "select pgque.set_queue_config('q', 'max_retries', '0')")
    redelivered = "select m.consumer, m.value from pgque.metrics('q') as m where m.metric = 'pgque_messages_redelivered_total'"
    assert rows(own, redelivered) == [("c", 1)]
    checks = "select check_name, queue, status, advice from pgque.health({}) where queue {}"
    figures = "select metric, queue, consumer from pgque.metrics({}) where queue {}"
    for query in (checks, figures):
        assert rows(own, query.format("'q'", "is not null")) == rows(own, query.format("", "= 'q'")) != []
        both = rows(own, query.format("null", "is not null"))
        assert both == rows(own, query.format("", "in ('q', 'r')"))
    assert rows(own, "select queue from pgque.health('q') where queue is distinct from 'q'") == []
    refused("PQ001", rows, own, "select * from pgque.health('none')")
    refused("PQ001", rows, own, "select * from pgque.metrics('none')")


def test_a_server_without_room_for_the_locks_of_all_queues_is_asked_for_some(own: Connection) -> None:
    for n in range(6):
        value(own, "select pgque.create_queue(%s)", f"q{n}")
    own.execute("create or replace function pgque._lock_room() returns bigint language sql as $$ select 8 $$")
    checked = rows(own, "select h.status, h.detail from pgque.health() as h where h.check_name = 'queues'")
    assert [(status, detail.split(",")[0]) for status, detail in checked] == [
        ("warn", "4 of 6 queues are checked")
    ]
    assert value(own, "select count(distinct h.queue) from pgque.health() as h") == 4
    assert value(own, "select count(distinct m.queue) from pgque.metrics() as m") == 6
    own.execute("create or replace function pgque._lock_room() returns bigint language sql as $$ select 5 $$")
    assert value(own, "select count(distinct m.queue) from pgque.metrics() as m") == 5
    assert value(own, "select count(*) from pgque.health('q5')") == 8
