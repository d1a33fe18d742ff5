"""An upgrade from an earlier version while everybody works: the running calls of the old version end well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    drain,
    ids,
    offer,
    outcome,
    rows,
    send_many,
    subscribe,
    take,
    tick,
    value,
    work_off,
)
from sql.test_install import EARLIER, SOURCE, install_earlier

pytestmark = pytest.mark.timeout(60)


def upgrade(conn: Connection) -> None:
    with conn.transaction():
        conn.execute(SOURCE)


@pytest.fixture(params=EARLIER)
def old(request: pytest.FixtureRequest, fresh_dsn: str, connect: Callable[..., Connection]) -> Connection:
    """A database with an earlier version and a queue q with a pool c."""
    install_earlier(fresh_dsn, request.param)
    conn = connect(fresh_dsn)
    value(conn, "select pgque.create_queue('q')")
    subscribe(conn, "q")
    return conn


def held_up(observer: Connection, job: Any) -> bool:
    """Say whether the job waits for a lock, or sleeps to try again, or has ended."""
    found = value(observer, "select a.wait_event_type from pg_stat_activity as a where a.pid = %s", job.pid)
    return job.done or found in ("Lock", "Timeout")


def test_a_worker_in_a_transaction_and_an_upgrade_do_not_deadlock(
    old: Connection,
    fresh_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    sent = offer(old, "q", 30)
    worker = connect(fresh_dsn, autocommit=False)
    first = take(worker, "q", "w1", 5)
    worker.commit()
    value(worker, "select count(*) from pgque.list_messages('q', 'retry')")
    job = background(upgrade, connect(fresh_dsn))
    wait_until(lambda: held_up(old, job), "the upgrade meets the worker")
    second = take(worker, "q", "w1", 5, ack_batch=first[0].batch_id)
    assert ids(second) == sent[5:10]
    worker.commit()
    job.result()
    assert ack(worker, second[0].batch_id) == 1
    worker.commit()
    assert ids(work_off(old, "q", "w2")) == sent[10:]


@pytest.mark.parametrize("version", EARLIER)
@pytest.mark.parametrize("first", ["select pgque.ack(1)", "select pgque.maint_retry_events()"])
def test_a_consumer_in_a_transaction_and_an_upgrade_do_not_deadlock(
    fresh_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
    version: str,
    first: str,
) -> None:
    install_earlier(fresh_dsn, version)
    old = connect(fresh_dsn)
    value(old, "select pgque.create_queue('q')")
    subscribe(old, "q")
    sent = offer(old, "q", 5)
    consumer = connect(fresh_dsn, autocommit=False)
    value(consumer, first)
    job = background(upgrade, connect(fresh_dsn))
    wait_until(lambda: held_up(old, job), "the upgrade meets the consumer")
    assert drain(consumer, "q", count=2) == sent
    more = send_many(consumer, "q", 2)
    consumer.commit()
    job.result()
    tick(old, "q")
    assert drain(old, "q") == more


@pytest.mark.parametrize("call", ["ack", "nack", "dead"])
def test_a_call_that_an_upgrade_overtakes_ends_well_or_can_be_repeated(
    old: Connection,
    fresh_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
    call: str,
) -> None:
    offer(old, "q", 30)
    batch = take(old, "q", "w1", 5)
    holder = connect(fresh_dsn, autocommit=False)
    holder.execute("lock table pgque.event_1_0, pgque.event_1_1, pgque.event_1_2 in access exclusive mode")
    job = background(lambda c: outcome(c, call, batch[0].batch_id, ids(batch)[:2]), connect(fresh_dsn))
    wait_until(lambda: held_up(old, job), "the worker waits")
    assert not job.done
    upgrading = background(upgrade, connect(fresh_dsn))
    wait_until(lambda: held_up(old, upgrading), "the upgrade waits for the worker or is done")
    holder.rollback()
    upgrading.result()
    try:
        done = job.result()
    except psycopg.errors.SerializationFailure:
        done = outcome(old, call, batch[0].batch_id, ids(batch)[:2])
    assert done == dict.fromkeys(ids(batch)[:2])


def test_a_queue_whose_creation_an_upgrade_overtakes_has_the_rights_of_any_queue(
    old: Connection,
    fresh_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    old.execute("alter default privileges in schema pgque grant all on tables to public")
    upgrading = connect(fresh_dsn, autocommit=False)
    upgrading.execute(SOURCE)
    job = background(lambda c: value(c, "select pgque.create_queue('new')"), connect(fresh_dsn))
    wait_for_lock(job.pid)
    upgrading.commit()
    try:
        assert job.result() == 1
    except psycopg.errors.SerializationFailure:
        assert value(old, "select pgque.create_queue('new')") == 1
    rights = (
        "select regexp_replace(c.relname, '_[0-9]+_', '_'), c.relacl::text from pg_class c, pgque.queue q"
        " where q.queue_name = %s and c.relname ~ ('^(event|tick)_' || q.queue_id || '_([0-2]|seq)$') order by 1"
    )
    assert len(rows(old, rights, "new")) == 8
    assert rows(old, rights, "new") == rows(old, rights, "q")


def test_a_pool_in_the_middle_of_a_window_goes_on_after_the_upgrade(old: Connection) -> None:
    sent = offer(old, "q", 30)
    batch = take(old, "q", "w1", 5)
    assert ack(old, batch[0].batch_id) == 1
    upgrade(old)
    more = offer(old, "q", 5)
    value(old, "select pgque.maint()")
    assert ids(work_off(old, "q", "w2", 7)) == [*sent[5:], *more]
