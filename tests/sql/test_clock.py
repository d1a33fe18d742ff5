"""A clock that is set back: what was done later than now is not waited for."""

from __future__ import annotations

import pytest

from sql.helpers import (
    Connection,
    Message,
    ack,
    configure,
    drain,
    move_clock,
    nack,
    post,
    pump,
    receive,
    row_counts,
    rows,
    send,
    set_clock,
    subscribe,
    take,
    tick,
    value,
)


@pytest.fixture
def ahead(own: Connection) -> Connection:
    """A queue q whose last tick and rotation were made by a clock a year ahead, with a consumer c."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    move_clock(own, "1 year")
    send(own, "q")
    tick(own, "q")
    assert len(drain(own, "q")) == 1
    configure(own, "q", rotation_period="1 hour")
    own.execute("update pgque.queue set queue_switch_time = pgque.clock()")
    return own


def test_messages_go_on_being_delivered(ahead: Connection) -> None:
    move_clock(ahead, "0")
    sent = send(ahead, "q")
    assert tick(ahead, "q") is not None
    assert [m.msg_id for m in receive(ahead, "q")] == [sent]
    # From then on it is as if nothing had been.
    assert tick(ahead, "q") is None


def test_an_idle_queue_ticks_once_and_then_with_its_period(ahead: Connection) -> None:
    move_clock(ahead, "0")
    assert tick(ahead, "q") is not None
    assert tick(ahead, "q") is None


def test_health_reports_that_messages_wait(ahead: Connection) -> None:
    move_clock(ahead, "0")
    check = "select h.status from pgque.health() as h where h.queue = 'q' and h.check_name = 'ticks'"
    assert value(ahead, check) == "ok"
    send(ahead, "q")
    assert value(ahead, check) == "fail"
    tick(ahead, "q")
    assert value(ahead, check) == "ok"


def test_rotation_goes_on(ahead: Connection) -> None:
    operations = "select o.func_name from pgque.maint_operations() as o"
    due = ("pgque.maint_rotate_tables_step1",)
    assert due not in rows(ahead, operations)
    move_clock(ahead, "0")
    assert due in rows(ahead, operations)
    assert value(ahead, "select pgque.maint_rotate_tables_step1('q')") == 1
    assert value(ahead, "select pgque.maint_rotate_tables_step1('q')") == 0


def test_cleanup_jobs_go_on_after_the_clock_was_set_back(ahead: Connection) -> None:
    value(ahead, "select pgque.set_schedule('expire', '1 hour')")
    value(ahead, "select pgque.maint_expire()")
    move_clock(ahead, "0")
    post(ahead, "q", delay="1 minute", ttl="2 minutes")
    move_clock(ahead, "10 minutes")
    assert value(ahead, "select pgque.maint_expire()") == 1
    assert "retry_queue" not in row_counts(ahead)


def test_a_cleanup_that_is_switched_off_stays_off(ahead: Connection) -> None:
    value(ahead, "select pgque.set_schedule('delete_expired', '1 minute')")
    value(ahead, "select pgque.maint_expire()")
    value(ahead, "select pgque.set_schedule('delete_expired', '')")
    move_clock(ahead, "0")
    post(ahead, "q", ttl="1 minute")
    tick(ahead, "q")
    (message,) = receive(ahead, "q")
    rows(ahead, "select * from pgque.dead(%s, array[%s::bigint], 'x')", message.batch_id, message.msg_id)
    move_clock(ahead, "10 minutes")
    assert value(ahead, "select pgque.maint_expire()") == 0
    assert row_counts(ahead)["dead_letter"] == 1


def test_a_cleanup_that_ran_just_now_does_not_run_again(ahead: Connection) -> None:
    value(ahead, "select pgque.set_schedule('expire', '1 hour')")
    for tenth in range(10):
        # Whatever part of a second is over.
        set_clock(
            ahead,
            f"date_trunc('day', pg_catalog.clock_timestamp()) + '{400 + tenth} days {tenth / 10} seconds'",
        )
        value(ahead, "select pgque.maint_expire()")
        before = value(ahead, "select pg_current_wal_insert_lsn()")
        value(ahead, "select pgque.maint_expire()")
        assert value(ahead, "select pg_current_wal_insert_lsn()") == before


def test_a_tick_of_a_clock_that_was_back_for_a_while_takes_nothing_young_into_retention(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    configure(own, "q", retention_period="1 hour")
    young = send(own, "q")
    tick(own, "q")
    move_clock(own, "-2 hours")
    send(own, "q")
    tick(own, "q")
    move_clock(own, "1 second")
    assert value(own, "select pgque.maint_retain('q')") == 0
    assert receive(own, "q")[0].msg_id == young


def test_workers_under_a_limit_of_throughput_go_on(ahead: Connection) -> None:
    configure(ahead, "q", throughput_limit=1000)
    subscribe(ahead, "q", "pool")
    for _ in range(2):
        send(ahead, "q")
    tick(ahead, "q")
    assert len(take(ahead, "q", count=1, consumer="pool")) == 1
    move_clock(ahead, "0")
    assert len(take(ahead, "q", count=1, consumer="pool")) == 1


def test_a_batch_that_was_delivered_later_than_now_is_reclaimed(ahead: Connection) -> None:
    subscribe(ahead, "q", "pool")
    sent = send(ahead, "q")
    tick(ahead, "q")
    assert len(take(ahead, "q", timeout="1 day", consumer="pool")) == 1
    move_clock(ahead, "0")
    assert value(ahead, "select pgque.reclaim('q', 'pool', '1 hour')") == 1
    assert [m.msg_id for m in take(ahead, "q", "w2", consumer="pool")] == [sent]


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_nacked_later_than_now_can_be_had_at_once(ahead: Connection, shared: bool) -> None:
    subscribe(ahead, "q", "pool")
    name = "pool" if shared else "c"

    def get() -> list[Message]:
        tick(ahead, "q")
        return take(ahead, "q", consumer="pool") if shared else receive(ahead, "q")

    sent = send(ahead, "q")
    (message,) = get()
    nack(ahead, message, "1 minute")
    ack(ahead, message.batch_id)
    move_clock(ahead, "0")
    pump(ahead)
    assert get() == []
    assert value(ahead, "select pgque.retry_now('q', %s)", name) == 1
    assert value(ahead, "select pgque.retry_now('q', %s)", name) == 0
    pump(ahead)
    assert [m.msg_id for m in get()] == [sent]


def test_what_a_worker_holds_is_not_made_due(ahead: Connection) -> None:
    subscribe(ahead, "q", "pool")
    send(ahead, "q")
    tick(ahead, "q")
    (message,) = take(ahead, "q", consumer="pool")
    nack(ahead, message)
    assert len(take(ahead, "q", consumer="pool")) == 1
    assert value(ahead, "select pgque.retry_now('q', 'pool')") == 0
    assert take(ahead, "q", "w2", consumer="pool") == []
