"""What history() shows of queues and consumers, and what its samples cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sql.helpers import (
    Connection,
    ack,
    forced_tick,
    ids,
    move_clock,
    nack_ids,
    receive,
    refused,
    rows,
    send,
    send_many,
    set_clock,
    subscribe,
    value,
)

Figures = tuple[Any, ...]
ALL = "sent, delivered, failed, dead, round(lag_seconds), pending_events"


def sample(conn: Connection, at: str) -> None:
    move_clock(conn, at)
    assert value(conn, "select pgque.maint_lags()") == 0


def history(conn: Connection, call: str, columns: str = ALL) -> list[Figures]:
    return rows(conn, f"select {columns} from pgque.history({call}) order by start_at")


def stored(conn: Connection) -> int:
    return int(value(conn, "select count(*) from pgque.sample"))


def test_what_is_sent_delivered_failed_and_given_up_is_counted_for_queue_and_consumer(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q', '{\"max_retries\": 1}'), pgque.create_queue('other')")
    value(own, "select pgque.subscribe('q', 'c'), pgque.subscribe('q', 'd')")
    sample(own, "0")
    send_many(own, "q", 10)
    forced_tick(own, "q")
    sample(own, "62 seconds")
    batch = receive(own, "q", "c", 6)
    nack_ids(own, batch[0].batch_id, ids(batch)[:1], "0")  # delivered again later, and then given up
    value(own, "select pgque.dead(%s, %s, 'no address')", batch[0].batch_id, ids(batch)[1:3])
    ack(own, batch[0].batch_id)
    sample(own, "124 seconds")
    again = receive(own, "q", "c", 1)
    assert ids(again) == ids(batch)[:1]
    nack_ids(own, again[0].batch_id, ids(again), "0")
    sample(own, "186 seconds")
    move_clock(own, "187 seconds")
    call = "'q', %s, '186 seconds', 3"
    assert history(own, call % "'c'", "sent, delivered, failed, dead") == [
        (10, 0, 0, 0),
        (0, 6, 2, 2),
        (0, 0, 2, 1),
    ]
    assert history(
        own, call % "'d'", "sent, delivered, failed, dead, round(lag_seconds), pending_events"
    ) == [
        (10, 0, 0, 0, 62, 10),
        (0, 0, 0, 0, 124, 10),
        (0, 0, 0, 0, 186, 10),
    ]
    assert history(own, call % "null", "sent, delivered, failed, dead") == [
        (10, 0, 0, 0),
        (0, 6, 2, 2),
        (0, 0, 2, 1),
    ]
    assert history(own, "null, null, '186 seconds', 3") == history(own, call % "null")
    assert history(own, "'other', null, '186 seconds', 3") == [(0, 0, 0, 0, 0, 0)] * 3


def test_a_message_given_up_counts_under_each_drop_policy(own: Connection) -> None:
    value(own, "select pgque.create_queue('later')")
    policies = {
        "keeps": "{}",
        "drops": '{"drop_policy": "drop"}',
        "forwards": '{"dead_letter_queue": "later"}',
    }
    for name, settings in policies.items():
        value(own, "select pgque.create_queue(%s, %s::jsonb), pgque.subscribe(%s, 'c')", name, settings, name)
    sample(own, "0")
    for name in policies:
        send_many(own, name, 3)
        forced_tick(own, name)
        batch = receive(own, name)
        value(own, "select pgque.dead(%s, %s, 'no address')", batch[0].batch_id, ids(batch))
    value(own, "select pgque.maint()")
    assert value(own, "select count(*) from pgque.dead_letter") == 3
    sample(own, "62 seconds")
    assert {name: history(own, f"'{name}', 'c', '1 minute', 1", "dead, failed") for name in policies} == {
        name: [(3, 3)] for name in policies
    }


def test_a_time_without_samples_is_null_and_counts_nowhere(own: Connection) -> None:
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c')")
    sample(own, "0")
    for minute in range(1, 41):
        move_clock(own, f"{62 * minute} seconds")
        send(own, "q")
        if not 10 <= minute < 30:  # nothing runs maint() then
            sample(own, f"{62 * minute} seconds")
    for call in ("'q'", "null"):
        sent = [row[0] for row in history(own, f"{call}, null, '40 minutes', 8", "sent")]
        assert [n for n, count in enumerate(sent) if count is None] == [2, 3, 4, 5]
        assert sum(count or 0 for count in sent) in range(17, 21)
        assert all(row == (None,) * 6 for row in history(own, f"{call}, null, '40 minutes', 8")[2:6])
    # Nothing is known of the time before the first sample and after the last one.
    assert history(own, "'q', null, '80 minutes', 16", "sent is null")[:9] == [(True,)] * 8 + [(False,)]
    move_clock(own, "62 minutes")
    assert history(own, "'q', null, '20 minutes', 4", "sent is null") == [(True,)] * 4


def test_a_queue_without_news_has_no_new_row_and_is_known_to_be_idle(own: Connection) -> None:
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c')")
    sample(own, "0")
    first = stored(own)
    for minute in range(1, 11):
        sample(own, f"{61 * minute} seconds")
    assert stored(own) == first == 3
    assert history(own, "'q', 'c', '10 minutes', 5") == [(0, 0, 0, 0, 0, 0)] * 5


def test_after_a_day_one_sample_an_hour_is_left_and_counts_go_on(own: Connection) -> None:
    set_clock(own, "timestamptz '2100-01-01 00:01Z'")
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c')")
    value(own, "select pgque.maint_lags()")
    for step in range(1, 3 * 24 * 4 + 1):  # three days, four times an hour
        set_clock(own, f"timestamptz '2100-01-01 00:01Z' + interval '{step * 15} minutes'")
        value(own, "select setval('pgque.sampled', extract(epoch from pgque.clock())::bigint - 120)")
        send(own, "q")
        value(own, "select pgque.maint_lags()")
        for _ in range(2):
            value(own, "select pgque.maint_tables()")
    assert value(own, "select count(*) from pgque.sample_hour where smp_queue > 0 and smp_sub = 0") in (
        72,  # with the first one, from where the counters go on
        73,
    )
    kept = value(own, "select max(smp_time) - min(smp_time) from pgque.sample")
    assert timedelta(days=1) <= kept <= timedelta(days=2, hours=1)
    sent = [row[0] for row in history(own, "'q', null, '2 days', 16", "sent")]
    assert sent == [12] * 16


def test_hours_count_what_the_minutes_counted_before_and_after_a_gap(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    sample(own, "0")
    for minute in range(1, 301):
        move_clock(own, f"{61 * minute} seconds")
        send(own, "q")
        if not 100 <= minute < 125:  # nothing runs maint() then
            value(own, "select pgque.maint_lags()")
    sums = [
        f"select sum(sent) from pgque.history({queue}, null, '305 minutes', 5)" for queue in ("null", "'q'")
    ]
    counted = [value(own, one) for one in sums]
    own.execute(
        "delete from pgque.sample where smp_time < (select max(smp_time) from pgque.sample)"
    )  # a day later
    assert [value(own, one) for one in sums] == counted == [274, 274]


def test_a_clock_that_was_set_back_makes_no_count_greater(own: Connection) -> None:
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c')")
    sample(own, "0")
    for minute in (*range(1, 11), *range(4, 21)):  # back by six minutes
        send(own, "q")
        sample(own, f"{61 * minute} seconds")
    for queue in ("null", "'q'"):
        assert value(own, f"select sum(sent) from pgque.history({queue}, null, '20 minutes', 20)") == 27


def test_a_run_that_follows_at_once_takes_no_samples_and_two_sessions_take_them_once(
    own: Connection, connect: Callable[..., Connection], transaction: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c')")
    other = connect(own.info.dsn, autocommit=False)
    value(other, "select pgque.maint_lags()")
    move_clock(own, "2 minutes")
    value(own, "select pgque.maint_lags()")  # the other one has not ended yet
    other.commit()
    assert stored(own) == 3
    value(own, "select pgque.maint_lags()")
    once = stored(own)
    value(own, "select pgque.maint_lags()")
    assert stored(own) == once
    refused("25000", value, transaction("repeatable read", own.info.dsn), "select pgque.maint_lags()")


def test_a_caller_sees_the_history_of_the_queues_that_it_has_a_right_to(own: Connection) -> None:
    for name in ("a", "b"):
        value(own, "select pgque.create_queue(%s), pgque.subscribe(%s, 'c')", name, name)
    sample(own, "0")
    send_many(own, "a", 3)
    send_many(own, "b", 4)
    sample(own, "1 minute")
    role = f"half_{value(own, 'select txid_current()')}"
    own.execute(f"create role {role}")
    try:
        own.execute(f"grant pgque_user to {role}")
        value(own, "select pgque.grant_queue('a', %s, 'consume')", role)
        call = "null, null, '1 minute', 1"
        assert history(own, call, "sent") == [(7,)]
        own.execute(f"set session authorization {role}")
        assert history(own, call, "sent") == [(3,)]
        refused("42501", rows, own, "select * from pgque.history('b')")
    finally:
        own.execute("reset session authorization")
        own.execute(f"drop owned by {role}; drop role {role}")


def test_arguments_are_checked(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for arguments in ("'q', null, '0'", "'q', null, null", "'q', null, '2 years'", "'q', null, '1 day', 0"):
        refused("PQ005", rows, own, f"select * from pgque.history({arguments})")
    refused("PQ005", rows, own, "select * from pgque.history(null, 'c')")
    refused("PQ001", rows, own, "select * from pgque.history('none')")
    refused("PQ011", rows, own, "select * from pgque.history('q', 'nobody')")


def test_a_sample_of_many_queues_is_the_same_statements_with_few_blocks_each(own: Connection) -> None:
    def cost(queues: int) -> tuple[int, int]:
        for n in range(value(own, "select count(*) from pgque.queue"), queues):
            value(own, "select pgque.create_queue(%s)", f"q{n}")
            subscribe(own, f"q{n}", "a")
            subscribe(own, f"q{n}", "b")
        found = []
        for _ in range(3):  # the first also plans, and reads catalogs
            value(own, "select setval('pgque.sampled', extract(epoch from pgque.clock())::bigint - 61)")
            [[[plan]]] = rows(own, "explain (analyze, buffers, format json) select pgque.maint_lags()")
            found.append(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
        return found[-1], stored(own)

    # A sample of a new hour also writes the rows of the hour before.
    set_clock(own, "pg_catalog.date_trunc('hour', pg_catalog.now()) + interval '30 minutes'")
    costs = [cost(queues) for queues in (5, 25, 45)]
    each = [(b[0] - a[0]) / 60 for a, b in itertools.pairwise(costs)]  # queue or consumer
    assert max(each) < 20, costs
    assert costs[-1][1] == 45 * 3 + 1  # one row each, and none while nothing happens
