"""What a send costs and whom it stops: max_depth with many consumers, first keys, batches with many keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    configure,
    drain,
    forced_tick,
    offer,
    payloads,
    post,
    receive,
    refused,
    rotate,
    rows,
    send,
    take,
    tick,
    value,
    work_off,
)

NO_LOOK = """
create or replace function pgque._oldest_needed_position(p_sub int) returns pgque.position
language plpgsql as $$ begin raise 'a send looks at every consumer'; end $$
"""


def test_far_from_the_limit_a_send_reads_no_consumer_and_no_tick_and_remembers_nothing(
    pool: Connection,
) -> None:
    configure(pool, "q", max_depth=100)
    offer(pool, "q", 10)
    pool.execute(NO_LOOK)
    with pool.transaction():
        for _ in range(80):
            send(pool, "q")
        ticks = "select count(*) from pg_locks where pid = pg_backend_pid() and relation::regclass::text ~ 'tick_'"
        assert value(pool, ticks) == 0
    assert value(pool, "select coalesce(current_setting('pgque.depth_1', true), '')") == ""


def test_a_send_below_the_limit_postpones_no_rotation(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    configure(pool, "q", max_depth=100)
    for _ in range(3):
        offer(pool, "q", 1)
        drain(pool, "q")
        forced_tick(pool, "q")
        drain(pool, "q")
        assert rotate(pool, "q") == 1
    sender = transaction(dsn=own_dsn)
    send(sender, "q")
    forced_tick(pool, "q")
    drain(pool, "q")
    assert rotate(pool, "q") == 1
    sender.commit()


def test_delayed_messages_count_below_the_oldest_tick(pool: Connection) -> None:
    configure(pool, "q", max_depth=3)
    value(pool, "select pgque.send('q', 't', 'x', delay => '1 hour')")
    for _ in range(2):
        offer(pool, "q", 1)
    refused("PQ003", send, pool, "q")
    drain(pool, "q")
    send(pool, "q")
    send(pool, "q")
    refused("PQ003", send, pool, "q")


def test_after_rotations_a_queue_is_as_full_as_it_is_for_a_consumer_from_the_earliest_tick(
    pool: Connection,
) -> None:
    for _ in range(3):
        offer(pool, "q", 2)
        drain(pool, "q")
        forced_tick(pool, "q")
        drain(pool, "q")
        assert rotate(pool, "q") == 1
    value(pool, "select pgque.subscribe('q', 'new', 'earliest')")
    (stored,) = rows(pool, "select pending_events from pgque.get_consumer_info('q', 'new')")[0]
    assert stored > 0
    configure(pool, "q", max_depth=stored + 3)
    for _ in range(3):
        send(pool, "q")
    refused("PQ003", send, pool, "q")


COUNT_LOOKS = """
create sequence public.looks;
grant usage on sequence public.looks to public;
alter function pgque._oldest_needed_position(int) rename to _real_need;
create function pgque._oldest_needed_position(p_sub int) returns pgque.position
language sql as $$ select p.* from pgque._real_need(p_sub) p, nextval('public.looks') $$
"""


def filled(conn: Connection, other: Connection, **settings: int) -> int:
    """Store five messages that c has passed; let another session send one, which it remembers; return the first tick."""
    first = value(conn, "select pgque.tick_for('q', 'earliest')")
    offer(conn, "q", 5)
    drain(conn, "q")
    forced_tick(conn, "q")
    drain(conn, "q")
    configure(conn, "q", **settings)
    send(other, "q")
    assert int(value(other, "select split_part(current_setting('pgque.depth_1'), ' ', 1)")) >= 9
    return int(first)


def test_a_session_counts_the_depth_once_for_as_many_messages_as_there_is_room(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    for number in range(10):
        value(pool, "select pgque.subscribe('q', %s, 'latest')", f"other {number}")
    configure(pool, "q", max_depth=1_000_000)
    other = connect(own_dsn)
    offer(pool, "q", 50)
    for consumer in ["c", *(f"other {number}" for number in range(10))]:
        drain(pool, "q", consumer)
    configure(pool, "q", max_depth=40)
    pool.execute(COUNT_LOOKS)
    for conn in (pool, other):
        for _ in range(15):
            send(conn, "q")
    assert value(pool, "select last_value from public.looks") == 2 * 11


@pytest.mark.parametrize(
    "call",
    [
        "select pgque.seek('q', 'c', %s, true)",
        "select pgque.register_consumer_at('q', 'c', %s)",
        "select pgque.subscribe('q', 'new', %s::text)",
    ],
)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_consumer_that_goes_back_fills_the_queue_for_every_session(
    pool: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    transaction: Callable[..., Connection],
    call: str,
    end: str,
) -> None:
    other, mover = connect(own_dsn), transaction(dsn=own_dsn)
    first = filled(pool, other, max_depth=4)
    value(mover, call, first)
    send(other, "q")
    mover.execute(end.encode())
    if end == "commit":
        refused("PQ003", send, other, "q")
        configure(pool, "q", max_depth=8)
    send(other, "q")


def test_requeued_dead_letters_fill_the_queue_for_every_session(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    offer(pool, "q", 3)
    batch = receive(pool, "q")
    for message in batch:
        value(pool, "select pgque.dead('q', 'c', array[%s::bigint], array['x'])", message.msg_id)
    drain(pool, "q")
    other = connect(own_dsn)
    filled(pool, other, max_depth=4)
    assert value(pool, "select pgque.dlq_requeue_all('q')") == 3
    refused("PQ003", send, other, "q")


def test_an_old_snapshot_leaves_nothing_to_remember(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    configure(pool, "q", max_depth=4)
    for _ in range(10):
        refused("P0001", value, pool, "do $$ begin perform pgque.send('q', 'x'); raise 'no'; end $$")
    old = transaction("repeatable read", own_dsn)
    for _ in range(4):
        send(pool, "q")
    send(old, "q")  # its snapshot shows an empty queue
    old.rollback()
    refused("PQ003", send, old, "q")


@pytest.mark.parametrize("change", ["lower", "dropped", "forged", "savepoint"])
def test_what_a_session_remembers_ends(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection], change: str
) -> None:
    other = connect(own_dsn)
    filled(pool, other, max_depth=4)
    if change == "lower":
        configure(pool, "q", max_depth=1)
    elif change == "dropped":
        value(pool, "select pgque.drop_queue('q', true)")
        value(pool, "select pgque.create_queue('q')")
        value(pool, "select pgque.subscribe('q', 'c')")
        configure(pool, "q", max_depth=1)
        send(other, "q")
    elif change == "forged":
        for _ in range(3):
            send(other, "q")
        other.execute(
            "select set_config(n, regexp_replace(current_setting(n), '^[0-9]+', '1000'), false) from (values ('pgque.depth_1')) v (n)"
        )
    else:
        other.execute("begin")
        other.execute("savepoint s")
        for _ in range(3):
            send(other, "q")
        other.execute("rollback to savepoint s")
        for _ in range(3):
            send(other, "q")
    refused("PQ003", send, other, "q")
    other.rollback()


@pytest.mark.parametrize("option", ["key => 'k'", "ttl => '1 day'"])
def test_the_first_key_or_ttl_of_a_queue_stops_nobody(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection], option: str
) -> None:
    sender = transaction(dsn=own_dsn)
    value(sender, f"select pgque.send('q', 't', 'first', {option})")
    pool.execute("set statement_timeout = '5s'")
    value(pool, "select pgque.send('q', 't', 'a', key => 'other')")
    value(pool, "select pgque.send('q', 't', 'b', ttl => '1 hour')")
    value(pool, "select pgque.pause('q')")
    value(pool, "select pgque.resume('q')")
    configure(pool, "q", max_retries=3, message_ttl="1 day")
    value(pool, "select pgque.set_default_config('max_retries', '4')")
    assert rotate(pool, "q") == 1
    forced_tick(pool, "q")
    assert payloads(pool, "q") == ["a", "b"]
    sender.commit()
    forced_tick(pool, "q")
    assert payloads(pool, "q") == ["first"]


def test_a_subscription_does_not_wait_for_the_first_key(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    sender = transaction(dsn=own_dsn)
    first = value(sender, "select pgque.send('q', 't', 'one', key => 'k')")
    assert value(sender, "select pgque.send('q', 't', 'two', key => 'k')") == first
    pool.execute("set statement_timeout = '5s'")
    value(pool, "select pgque.subscribe('q', 'new')")
    assert value(pool, "select pgque.purge('q')") == 0
    sender.commit()
    for consumer in ("c", "new"):
        forced_tick(pool, "q")
        assert payloads(pool, "q", consumer) == ["two"]


@pytest.mark.parametrize("option", ["key => 'k'", "ttl => '1 day'"])
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_an_option_is_noted_with_its_message_or_not_at_all(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection], option: str, isolation: str
) -> None:
    query = "select pgque._keyed(q), pgque._expiring(q) from pgque.queue q"
    sender = transaction(isolation, own_dsn)
    value(sender, f"select pgque.send('q', 't', 'x', {option})")
    sender.rollback()
    assert rows(pool, query) == [(False, False)]
    for _ in range(2):
        value(pool, f"select pgque.send('q', 't', 'x', {option})")
    assert rows(pool, query) == [("key" in option, "ttl" in option)]
    assert value(pool, "select count(*) from pgque.queue_option") == 1
    value(pool, "select pgque.drop_queue('q', true)")
    assert value(pool, "select count(*) from pgque.queue_option") == 0


BATCH = "select pgque.send_batch('q', 't', array_agg(k), keys => array_agg(k)) from unnest(%s::text[]) k"
BUCKET_LOCKS = """
select count(*) from pg_locks l, pgque.queue q
where l.pid = %s and l.locktype = 'advisory' and l.granted and l.classid::bigint = pgque._bucket_class(q.queue_id)::bigint & 4294967295
"""


@pytest.mark.parametrize("count", [201, 3000])
def test_a_batch_that_waits_for_one_key_stops_no_other_key(
    pool: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    wait_until: Callable[..., None],
    count: int,
) -> None:
    assert take(pool, "q") == []
    held, others = "held", [f"other {n}" for n in range(20)]
    others = [
        key for key in others if value(pool, "select pgque._bucket(%s) <> pgque._bucket(%s)", key, held)
    ]
    for key in others:
        post(pool, "q", "old", key=key)
    sender = transaction(dsn=own_dsn)
    first = post(sender, "q", "by the sender", key=held)
    keys = [held, *(f"batch {n}" for n in range(count - 1))]
    batch = background(lambda c: value(c, BATCH, keys), connect(own_dsn))
    wait_for_lock(batch.pid)
    pool.execute("set statement_timeout = '5s'")
    wait_until(lambda: value(pool, BUCKET_LOCKS, batch.pid) == 0, "the batch releasing its locks")
    for key in others:
        post(pool, "q", "new", key=key)
    tick(pool, "q")
    assert [m.payload for m in take(pool, "q", count=100)] == ["new"] * len(others)
    assert not batch.done
    sender.commit()
    assert batch.result()[0] == first
    tick(pool, "q")
    got = {m.key: m.payload for m in work_off(pool, "q", count=100)}
    assert {key: got[key] for key in keys} == {key: key for key in keys}


def test_a_batch_with_many_keys_takes_a_thousand_locks_at_most(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    sender = transaction(dsn=own_dsn)
    value(sender, BATCH, [f"k{n}" for n in range(5000)])
    assert 200 < value(pool, "select count(*) from pg_locks where pid = %s", sender.info.backend_pid) < 1100
    sender.rollback()
    value(sender, BATCH, [f"k{n}" for n in range(200)])
    assert value(pool, "select count(*) from pg_locks where pid = %s", sender.info.backend_pid) < 450
    sender.rollback()


def test_two_batches_that_wait_for_each_other_are_a_deadlock_and_no_endless_wait(
    pool: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
) -> None:
    senders = {key: transaction(dsn=own_dsn) for key in "ab"}
    for key, sender in senders.items():
        post(sender, "q", "one", key=key)
    keys = ["a", "b", *(f"k{n}" for n in range(300))]
    jobs = [background(lambda c: value(c, BATCH, keys), sender) for sender in senders.values()]
    ends = []
    for job in jobs:
        try:
            ends.append(len(job.result()))
        except psycopg.errors.DeadlockDetected:
            ends.append(0)
            job.connection.rollback()
        else:
            job.connection.commit()
    assert sorted(ends) == [0, 302]


def test_a_batch_with_many_keys_heeds_lock_timeout(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    sender = transaction(dsn=own_dsn)
    post(sender, "q", "x", key="k7")
    pool.execute("set lock_timeout = '80ms'")
    refused("55P03", value, pool, BATCH, [f"k{n}" for n in range(300)])
    sender.commit()
    assert len(value(pool, BATCH, [f"k{n}" for n in range(300)])) == 300
    assert value(pool, "select current_setting('lock_timeout')") == "80ms"
