"""Creating and dropping queues beside long transactions of others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from conftest import Role
from sql.helpers import (
    Connection,
    ack,
    configure,
    drain,
    nack,
    payloads,
    post,
    receive,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    take,
    tick,
    tries,
    value,
)


def tables(conn: Connection) -> list[str]:
    """Name the tables of single queues."""
    return [
        r[0]
        for r in rows(
            conn,
            r"select c.relname from pg_class as c where c.relnamespace = 'pgque'::regnamespace"
            r" and c.relname ~ '^(event|tick)_\d' and c.relkind = 'r' order by 1",
        )
    ]


def test_queues_come_and_go_while_others_have_long_transactions(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    before = tables(own)
    sender = connect(own_dsn, autocommit=False)
    first = send(sender, "q", "long")
    reader = connect(own_dsn, autocommit=False)
    receive(reader, "q")
    own.execute("set lock_timeout = '3s'")
    for _ in range(2):
        value(own, "select pgque.create_queue('p')")
        subscribe(own, "p")
        sent = send(own, "p")
        tick(own, "p")
        assert drain(own, "p") == [sent]
        assert value(own, "select pgque.drop_queue('p', true)") == 1
        refused("PQ001", send, own, "p")
        value(own, "select pgque.maint()")
        # Nobody waits behind the drop.
        send(own, "q")
        tick(own, "q")
    sender.commit()
    reader.commit()
    tick(own, "q")
    assert first in drain(own, "q")
    value(own, "select pgque.maint()")
    assert tables(own) == before


@pytest.mark.parametrize(
    "sends",
    [
        "select pgque.send('q', 'x')",
        "insert into pgque.sink (queue, payload) values ('q', 'x')",
        "insert into pgque.sink_bulk (queue, payload) values ('q', 'x')",
    ],
)
def test_a_send_that_waits_for_a_drop_fails_with_queue_not_found(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., object],
    wait_until: Callable[..., None],
    sends: str,
) -> None:
    value(own, "select pgque.create_queue('q')")
    dropper = connect(own_dsn, autocommit=False)
    value(dropper, "select pgque.drop_queue('q')")
    writer = connect(own_dsn)
    writer.execute("set role pgque_writer")
    sender = background(lambda c: c.execute(sends.encode()), writer)
    waiting = "select a.wait_event_type = 'Lock' from pg_stat_activity as a where a.pid = %s"
    wait_until(lambda: value(own, waiting, sender.pid), "the sender waits")  # type: ignore[attr-defined]
    dropper.commit()
    refused("PQ001", sender.result)  # type: ignore[attr-defined]


def test_a_rolled_back_create_or_drop_leaves_things_as_they_were(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    before = tables(own)
    one = connect(own_dsn, autocommit=False)
    value(one, "select pgque.create_queue('q')")
    one.rollback()
    assert tables(own) == before
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send(own, "q")
    tick(own, "q")
    value(one, "select pgque.drop_queue('q', true)")
    one.rollback()
    assert drain(own, "q") == [sent]
    assert isinstance(one, psycopg.Connection)


def test_a_drop_lets_readers_of_the_queue_finish_in_whatever_order_they_read(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., object],
    wait_for_lock: Callable[..., None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send(own, "q")
    queue = value(own, "select q.queue_id from pgque.queue q")
    leaves = [f"pgque.{kind}_{queue}_{number}" for kind in ("tick", "event") for number in range(3)]
    for order in (leaves, leaves[::-1], leaves[3:] + leaves[:3]):
        reader = connect(own_dsn, autocommit=False)
        reader.execute("set lock_timeout = '900ms'")  # before the server looks for a deadlock
        reader.execute(f"lock table {order[0]} in access share mode")
        dropper = background(
            lambda c: value(c, "select pgque.drop_queue('q', true)"), connect(own_dsn, autocommit=False)
        )
        wait_for_lock(dropper.pid)  # type: ignore[attr-defined]
        for leaf in order[1:]:
            reader.execute(f"lock table {leaf} in access share mode")
        receive(reader, "q")
        reader.commit()
        assert dropper.result() == 1  # type: ignore[attr-defined]
        dropper.connection.rollback()  # type: ignore[attr-defined]


def test_the_tables_of_a_dropped_queue_go_though_other_queues_are_in_use(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    for name in ("gone", "q"):
        value(own, "select pgque.create_queue(%s)", name)
    subscribe(own, "q")
    send(own, "q")
    tick(own, "q")
    queue = value(own, "select q.queue_id from pgque.queue q where q.queue_name = 'gone'")
    consumer = connect(own_dsn, autocommit=False)
    receive(consumer, "q")
    assert value(own, "select pgque.drop_queue('gone')") == 1
    assert value(own, "select pgque.maint_tables()") == 1
    assert value(own, f"select to_regclass('pgque.event_{queue}_0')") is None
    assert value(own, f"select to_regclass('pgque.tick_{queue}_2')") is None
    consumer.commit()


def test_a_drop_that_is_not_committed_keeps_no_other_queue_waiting(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    for name in ("gone", "q"):
        value(own, "select pgque.create_queue(%s)", name)
    subscribe(own, "q")
    dropper = connect(own_dsn, autocommit=False)
    value(dropper, "select pgque.drop_queue('gone')")
    own.execute("set lock_timeout = '5s'")
    sent = send(own, "q")
    value(own, "select pgque.create_queue('new')")
    tick(own, "q")
    assert drain(own, "q") == [sent]
    dropper.commit()


def test_tables_of_dropped_queues_that_somebody_uses_keep_no_others(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    used = [f"used{n}" for n in range(4)]
    for name in used:
        value(own, "select pgque.create_queue(%s)", name)
    somebody = connect(own_dsn, autocommit=False)
    rows(somebody, "select * from pgque.get_queue_info()")  # holds locks on their sequences
    value(own, "select pgque.create_queue('free')")
    free = value(own, "select q.queue_id from pgque.queue q where q.queue_name = 'free'")
    for name in [*used, "free"]:
        value(own, "select pgque.drop_queue(%s)", name)
    for _ in range(200):
        value(own, "select pgque.maint_tables()")
        left = [row[0] for row in rows(own, "select d.queue_id from pgque.dropped_queue d")]
        if free not in left:
            break
    assert len(left) == 4 and free not in left
    somebody.commit()
    for _ in range(200):
        if value(own, "select pgque.maint_tables()") == 0:
            break
    assert rows(own, "select from pgque.dropped_queue") == []


def test_what_depends_on_a_table_of_a_dropped_queue_keeps_only_that(own: Connection) -> None:
    for name in ("gone", "other"):
        value(own, "select pgque.create_queue(%s)", name)
    gone, other = [r[0] for r in rows(own, "select q.queue_id from pgque.queue q order by q.queue_name")]
    own.execute(f"create view public.v as select e.ev_id from pgque.event_{gone}_1 e")
    said: list[str] = []
    own.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
    assert value(own, "select pgque.drop_queue('gone')") == 1
    assert value(own, "select pgque.drop_queue('other')") == 1
    assert value(own, "select pgque.maint()") == 1
    assert said == [
        f"pgque: cannot drop the tables of a dropped queue: view public.v depends on table event_{gone}_1"
    ]
    assert value(own, f"select to_regclass('pgque.event_{other}_1')") is None
    assert value(own, "select pgque.maint()") == 0
    assert len(said) == 2
    own.execute("drop view public.v")
    assert value(own, "select pgque.maint()") == 1
    assert value(own, f"select to_regclass('pgque.event_{gone}_1')") is None


def test_a_drop_waits_no_longer_than_lock_timeout_and_leaves_it_as_it_was(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    reader = connect(own_dsn, autocommit=False)
    send(reader, "q")
    own.execute("set lock_timeout = '150ms'")
    refused("55P03", value, own, "select pgque.drop_queue('q')")
    assert value(own, "show lock_timeout") == "150ms"
    reader.rollback()
    with own.transaction():
        assert value(own, "select pgque.drop_queue('q')") == 1
        assert value(own, "show lock_timeout") == "150ms"


BEFORE = {
    "receive": "select pgque.receive('q', 'c')",
    "ack": "select pgque.ack(r.batch_id) from pgque.receive('q', 'c') r limit 1",
    "unsubscribe": "select pgque.unsubscribe('q', 'other')",
    "configure": "select pgque.set_queue_config('q', 'max_retries', '7')",
    "send": "select pgque.send('q', 'x')",
}
AFTERWARDS = {
    "receive": "select pgque.receive('q', 'c')",
    "send": "select pgque.send('q', 'x')",
    "health": "select pgque.health()",
}


@pytest.mark.parametrize("first", BEFORE)
def test_a_transaction_that_uses_the_queue_goes_on_while_somebody_drops_it(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., object],
    wait_for_lock: Callable[..., None],
    first: str,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    for then in AFTERWARDS:
        subscribe(own, "q", "other")
        send(own, "q")
        tick(own, "q")
        user = connect(own_dsn, autocommit=False)
        rows(user, BEFORE[first])
        dropper = background(
            lambda c: value(c, "select pgque.drop_queue('q', true)"), connect(own_dsn, autocommit=False)
        )
        wait_for_lock(dropper.pid)  # type: ignore[attr-defined]
        rows(user, AFTERWARDS[then])
        user.commit()
        assert dropper.result() == 1  # type: ignore[attr-defined]
        dropper.connection.rollback()  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", ["alone", "workers"])
def test_a_drop_and_tight_loops_that_receive_do_not_deadlock(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    role: str,
) -> None:
    """The server looks for deadlocks at once, so that a lock in another order is one in this short test."""

    def impatient() -> Connection:
        conn = connect(own_dsn)
        conn.execute("set deadlock_timeout = '1ms'")
        return conn

    def loop(worker: str) -> Callable[[Connection], str | None]:
        def run(c: Connection) -> str | None:
            try:
                while True:
                    ready.add(worker)
                    batch = take(c, "q", worker, 2) if role == "workers" else receive(c, "q", count=2)
                    if batch:
                        ack(c, batch[0].batch_id)
            except psycopg.Error as error:
                return error.sqlstate

        return run

    for _ in range(3):
        ready: set[str] = set()
        value(own, "select pgque.create_queue('q')")
        subscribe(own, "q")
        send_many(own, "q", 5000)
        tick(own, "q")
        jobs = [background(loop(f"w{n}"), impatient()) for n in range(4)]
        while len(ready) < len(jobs):
            assert not any(job.done for job in jobs)
        assert value(impatient(), "select pgque.drop_queue('q', true)") == 1
        assert {job.result() for job in jobs} <= {"PQ001", "PQ011"}


@pytest.mark.parametrize("call", ["cancel('q', 1)", "purge('q')"])
def test_who_locks_the_queue_and_its_consumers_waits_for_a_drop(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    call: str,
) -> None:
    value(own, "select pgque.create_queue('q')")
    number = value(own, "select queue_id from pgque.queue where queue_name = 'q'")
    subscribe(own, "q")
    send(own, "q")
    tick(own, "q")
    user = connect(own_dsn, autocommit=False)
    receive(user, "q")
    # Once: drop_queue() would let the others pass after a while.
    dropper = background(
        lambda c: rows(c, "select pgque._drop_queue(%s, 'q', true)", number), connect(own_dsn)
    )
    wait_for_lock(dropper.pid)
    other = background(lambda c: refused("PQ001", value, c, f"select pgque.{call}"), connect(own_dsn))
    wait_for_lock(other.pid)
    user.commit()
    dropper.result()
    other.result()


def test_a_list_of_messages_that_waits_for_a_drop_finds_no_queue(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send(own, "q")
    tick(own, "q")
    dropper = connect(own_dsn, autocommit=False)
    assert value(dropper, "select pgque.drop_queue('q', true)") == 1
    reader = background(
        lambda c: refused("PQ001", rows, c, "select pgque.list_messages('q')"), connect(own_dsn)
    )
    wait_for_lock(reader.pid)
    dropper.commit()
    reader.result()


def test_two_who_use_what_the_other_drops_see_a_deadlock_and_one_goes_on(
    own: Connection, own_dsn: str, connect: Callable[..., Connection], background: Callable[..., object]
) -> None:
    sessions = {}
    for queue in ("a", "b"):
        value(own, "select pgque.create_queue(%s)", queue)
        sessions[queue] = connect(own_dsn, autocommit=False)
        send(sessions[queue], queue)
    drop = "select pgque.drop_queue(%s)"
    jobs = [
        background(lambda c: value(c, drop, "b"), sessions["a"]),
        background(lambda c: value(c, drop, "a"), sessions["b"]),
    ]
    ended = []
    for job in jobs:
        try:
            ended.append(job.result())  # type: ignore[attr-defined]
        except psycopg.errors.DeadlockDetected:
            ended.append("deadlock")
            job.connection.rollback()  # type: ignore[attr-defined]
    assert sorted(map(str, ended)) == ["1", "deadlock"]


def test_a_drop_that_is_refused_waits_for_nobody(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sender = connect(own_dsn, autocommit=False)
    send(sender, "q")
    own.execute("set statement_timeout = '3s'")
    refused("PQ006", value, own, "select pgque.drop_queue('q')")


@pytest.mark.parametrize(
    "options", ["key => 'k'", "ttl => '1 hour'", "delay => '1 hour'", "delay => '1 hour', key => 'k'"]
)
@pytest.mark.parametrize("used", [True, False])
def test_a_send_with_options_that_meets_a_drop_fails_with_queue_not_found(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., object],
    wait_until: Callable[..., None],
    options: str,
    used: bool,
) -> None:
    value(own, "select pgque.create_queue('q')")
    sends = f"select pgque.send('q', 't', 'x', {options})"
    if used:  # else the first use of such options is noted in the queue's row
        own.execute(sends.encode())
    dropper = connect(own_dsn, autocommit=False)
    value(dropper, "select pgque.drop_queue('q', true)")
    sender = background(lambda c: c.execute(sends.encode()), connect(own_dsn))
    waiting = "select a.wait_event_type = 'Lock' from pg_stat_activity as a where a.pid = %s"
    wait_until(
        lambda: sender.done or value(own, waiting, sender.pid),  # type: ignore[attr-defined]
        "the sender waits, unless it needs nothing of the queue's tables",
    )
    dropper.commit()
    if options == "delay => '1 hour'":
        sender.result()  # type: ignore[attr-defined]
        assert value(own, "select count(*) from pgque.retry_queue") == 1
        value(own, "select pgque.maint()")
    else:
        refused("PQ001", sender.result)  # type: ignore[attr-defined]
    assert value(own, "select count(*) from pgque.retry_queue") == 0


def test_what_fails_in_the_maintenance_of_tables_does_not_stop_the_rest(own: Connection) -> None:
    before = tables(own)
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.drop_queue('q')")
    own.execute(
        "create or replace function pgque._compact_stage() returns int language plpgsql"
        " as $$ begin raise exception 'no'; end $$"
    )
    value(own, "select pgque.maint_tables()")
    assert tables(own) == before


def test_a_publication_for_all_tables_refuses_no_change_of_a_queue(own: Connection) -> None:
    own.execute("create publication everything for all tables")
    own.execute("select pgque.create_queue('q'), pgque.subscribe('q', 'c'), pgque.subscribe('q', 'other')")
    configure(own, "q", max_retries=0, archive_on_ack=True)
    post(own, "q", "1", key="k", ttl="1 hour")
    post(own, "q", "2", key="k")
    post(own, "q", "3", delay="1 hour")
    own.execute("select pgque.create_recurring('r', 'q', '1 hour', 't', '{}'::text)")
    tick(own, "q")
    (message,) = receive(own, "q", "c")
    assert message.payload == "2"
    nack(own, message)
    assert value(own, "select pgque.dlq_requeue_all('q')") == 1
    assert payloads(own, "q") == ["2"]
    for _ in range(3):
        own.execute("select pgque.maint()")
    own.execute("select pgque.drop_recurring('r'), pgque.unsubscribe('q', 'other')")
    assert value(own, "select pgque.drop_queue('q', true)") == 1


def leftovers(conn: Connection) -> dict[str, int]:
    """Return how many rows other tables have of queues that do not exist."""
    return {
        table: value(
            conn,
            f"select count(*) from pgque.{table} t where not exists (select from pgque.queue q where q.queue_id = t.{key})",
        )
        for table, key in {
            "subscriber": "sub_queue",
            "dead_letter": "dl_queue_id",
            "queue_right": "right_queue",
            "retry_queue": "ev_queue",
        }.items()
    }


NOTHING = {"subscriber": 0, "dead_letter": 0, "queue_right": 0, "retry_queue": 0}
LAST_ATTEMPT = (
    "select pgque.nack(m.batch_id, array[m.msg_id], reason => 'broken')"
    " from pgque.receive('q', 'c', worker => 'w', visibility_timeout => '1 hour') m"
)


def attempt_from_the_retry_queue(own: Connection) -> None:
    """Leave a message whose next nack makes it a dead letter, without a look at the log."""
    value(own, "select pgque.create_queue('q', '{\"max_retries\": 1}')")
    subscribe(own, "q")
    send(own, "q")
    tick(own, "q")
    value(own, LAST_ATTEMPT)
    value(own, "select pgque.retry_now('q', 'c')")


def test_a_drop_waits_for_a_dead_letter_that_is_not_committed_and_deletes_it(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., object],
    wait_until: Callable[..., None],
) -> None:
    attempt_from_the_retry_queue(own)
    worker = connect(own_dsn, autocommit=False)
    value(worker, LAST_ATTEMPT)
    assert value(worker, "select count(*) from pgque.dead_letter") == 1
    drop = background(lambda c: value(c, "select pgque.drop_queue('q', true)"), connect(own_dsn))
    waiting = "select a.wait_event_type in ('Lock', 'Timeout') from pg_stat_activity as a where a.pid = %s"
    wait_until(lambda: value(own, waiting, drop.pid), "the drop waits")  # type: ignore[attr-defined]
    worker.commit()
    assert drop.result() == 1  # type: ignore[attr-defined]
    assert leftovers(own) == NOTHING


@pytest.mark.parametrize(
    "call",
    [
        LAST_ATTEMPT,
        "select pgque.subscribe('q', 'another')",
        "select pgque.grant_queue('q', 'pgque_writer', 'consume')",
    ],
)
def test_a_call_that_waits_for_a_drop_leaves_no_row_of_the_queue(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., object],
    wait_until: Callable[..., None],
    call: str,
) -> None:
    attempt_from_the_retry_queue(own)
    dropper = connect(own_dsn, autocommit=False)
    value(dropper, "select pgque.drop_queue('q', true)")
    late = background(lambda c: value(c, call), connect(own_dsn))
    waiting = "select a.wait_event_type = 'Lock' from pg_stat_activity as a where a.pid = %s"
    wait_until(lambda: value(own, waiting, late.pid), "the call waits")  # type: ignore[attr-defined]
    dropper.commit()
    with pytest.raises(psycopg.Error) as caught:
        late.result()  # type: ignore[attr-defined]
    assert caught.value.sqlstate in ("PQ001", "PQ011")
    assert leftovers(own) == NOTHING


def test_what_a_drop_with_an_old_snapshot_leaves_behind_is_deleted_by_maintenance(
    own: Connection, own_dsn: str, connect: Callable[..., Connection], nobody: Role
) -> None:
    value(own, "select pgque.create_queue('q', '{\"max_retries\": 0}')")
    subscribe(own, "q", "c")
    send(own, "q")
    tick(own, "q")
    value(own, "select pgque.ack(m.batch_id) from pgque.receive('q', 'c', worker => 'w') m")
    dropper = connect(own_dsn, autocommit=False)
    dropper.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    value(dropper, "select 1 from pgque.queue")
    send(own, "q")
    tick(own, "q")
    value(own, LAST_ATTEMPT)
    value(own, "select pgque.grant_queue('q', %s, 'consume')", nobody.name)
    subscribe(own, "q", "another")
    value(own, "select pgque.create_queue('other')")
    subscribe(own, "other")
    value(dropper, "select pgque.drop_queue('q', true)")
    dropper.commit()
    assert leftovers(own) == {**NOTHING, "dead_letter": 1, "queue_right": 1, "subscriber": 1}
    value(own, "select pgque.maint()")
    assert leftovers(own) == NOTHING
    assert value(own, "select count(*) from pgque.subscriber") == 1


@pytest.mark.slow  # a race of two statements, which no lock can hold apart: two seconds have several of them
def test_a_queue_that_is_renamed_is_never_without_its_consumer(
    conn: Connection, queue: str, background: Callable[..., Any]
) -> None:
    subscribe(conn, queue)
    other = f"{queue} renamed"
    errors: set[str | None] = set()

    def receives(c: Connection) -> None:
        while not renamed.done:
            errors.add(tries(c, other, ["select * from pgque.receive({q}, 'c')"]).popitem()[1])

    def renames(c: Connection) -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            value(c, "select pgque.rename_queue(%s, %s)", queue, other)
            value(c, "select pgque.rename_queue(%s, %s)", other, queue)

    renamed = background(renames)
    for reader in [background(receives), background(receives)]:
        reader.result()
    renamed.result()
    assert errors == {None, "PQ001"}
