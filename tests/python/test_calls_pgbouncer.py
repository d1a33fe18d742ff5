"""The functions of the module behind PgBouncer in transaction mode, where each transaction may get another session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import pgque
from pgque.ops.ticker import run_ticker
from support import pgbouncer
from support.connections import DRIVERS, KINDS

pytestmark = pytest.mark.pgbouncer

Tick = Callable[[str], int | None]
# A connection of asyncpg that prepares statements is none for such a pooler; that of a pool here does not.
KINDS_TRIED = [*(name for name in DRIVERS if not name.startswith("asyncpg")), "asyncpg of a pool"]


@pytest.fixture(scope="module")
def bouncer(dsn: str) -> Iterator[str]:
    """Connection string through a PgBouncer with two sessions that take turns."""
    with pgbouncer.through(dsn) as pooled:
        yield pooled


@pytest.mark.parametrize("name", KINDS_TRIED)
def test_sessions_change_between_transactions_and_none_keeps_a_statement(
    name: str, bouncer: str, dsn: str, queue: str, tick: Tick
) -> None:
    sessions: set[int] = set()
    ids: list[int] = []
    with (
        pgque.connect(dsn, autocommit=True) as client,
        psycopg.connect(bouncer, prepare_threshold=None) as other,
    ):
        client.subscribe(queue, "c")
        other.execute("select 1")  # has one session, so that the pooler needs a second one
        with KINDS[name](bouncer) as opened:
            opened.execute("select 1")
            opened.rollback()
            other.rollback()
            for number in range(8):  # more than psycopg runs before it prepares
                ids.append(opened.send(queue, {"n": number}, headers={"n": number}))
                ids.extend(opened.send_batch(queue, [b"x", b"y"], ttls=[60, None]))
                [[pid, left]] = opened.execute(
                    "select pg_backend_pid(), (select count(*) from pg_prepared_statements where name <> '')"
                )
                sessions.add(pid)
                assert left == 0
                opened.commit()
            tick(queue)
            while batch := opened.receive(queue, "c", 5):
                assert opened.ack(batch[0].batch_id) == 1
                assert [m.msg_id for m in batch] == ids[: len(batch)]
                ids = ids[len(batch) :]
                opened.commit()
            opened.rollback()
    assert len(sessions) == 2
    assert ids == []


def test_a_consumer_a_worker_and_the_ticker_work_through_the_pooler(
    bouncer: str, dsn: str, queue: str
) -> None:
    """The session of a statement changes, and psycopg prepares what a loop repeats: such a call is retried."""
    got: dict[str, list[str]] = {"alone": [], "pool": []}
    with pgque.connect(dsn, autocommit=True) as client:
        for name in got:
            client.subscribe(queue, name)
    consumer = pgque.Consumer(bouncer, queue=queue, consumer="alone", poll_interval=0.1, transactional=True)
    worker = pgque.Worker(bouncer, queue=queue, consumer="pool")
    stop = threading.Event()

    @consumer.handler("*")
    def alone(message: pgque.Message, conn: psycopg.Connection[Any]) -> None:
        conn.execute("select 1")
        got["alone"].append(str(message.payload))

    @worker.handler("*")
    def pool(message: pgque.Message) -> None:
        got["pool"].append(str(message.payload))

    calls = (consumer.run, worker.run, lambda: run_ticker(bouncer, stop))
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    try:
        sent = [str(number) for number in range(20)]
        for payload in sent:
            with pgque.connect(bouncer) as client:
                client.send(queue, payload)
        deadline = time.monotonic() + 60
        while not all(set(payloads) == set(sent) for payloads in got.values()):
            assert time.monotonic() < deadline, got
            time.sleep(0.02)
    finally:
        consumer.stop()
        worker.stop()
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
