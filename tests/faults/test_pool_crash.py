"""Workers, their backends and the server are killed; nothing is lost, no token is issued twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from pgque import embedded
from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    extend,
    forced_tick,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    post,
    settle,
    subscribe,
    take,
    value,
    work_off,
)
from support import servers
from support.servers import TestServer


@pytest.fixture
def durable(server: TestServer) -> Iterator[embedded.Server]:
    """A server of the test's own that writes to disk what it says it wrote."""
    bindir = server.process.binaries.bindir if server.process else None
    try:
        own = embedded.start(bindir, settings={"fsync": "on", "shared_buffers": "32MB"})
    except embedded.EmbeddedServerError as error:
        pytest.skip(f"no server of its own: {error}")
    with own:
        with psycopg.connect(own.dsn) as connection:
            connection.execute(servers.SQL_FILE.read_bytes())
        with psycopg.connect(own.dsn, autocommit=True) as connection:
            value(connection, "select pgque.create_queue('q')")
            subscribe(connection, "q")
        yield own


def crash(server: embedded.Server) -> Connection:
    """Kill the server, start it again, and connect."""
    server.kill()
    server.restart()
    return psycopg.connect(server.dsn, autocommit=True)


def test_deliveries_without_a_durable_commit_are_lost_or_kept_but_no_message_is_lost(
    durable: embedded.Server,
) -> None:
    conn: Connection = psycopg.connect(durable.dsn, autocommit=True)
    seen: set[int] = set()
    done: Counter[int] = Counter()
    sent: list[int] = []
    for hours in range(1, 5):
        sent += offer(conn, "q", 60)
        conn.execute("set synchronous_commit = off")
        held: list[tuple[int, list[int]]] = []
        for worker in range(10):
            batch = take(conn, "q", f"w{worker}", 5, "10 minutes")
            if batch:
                assert batch[0].batch_id not in seen, "a token was issued again"
                seen.add(batch[0].batch_id)
                held.append((batch[0].batch_id, ids(batch)))
        conn.execute("set synchronous_commit = on")
        for token, members in held[:4]:
            assert ack(conn, token) == 1
            done.update(members)
        conn.close()
        conn = crash(durable)
        # A token from before the crash settles its own messages or none.
        for token, members in held[4:6]:
            result = outcome(conn, "ack", token, members)
            done.update(i for i, reason in result.items() if reason is None)
        move_clock(conn, f"{hours} hours")
        forced_tick(conn, "q")
    configure(conn, "q", max_receive_attempts=1000)
    while batch := take(conn, "q", "last", 100, "10 days"):
        for m in batch:
            assert m.batch_id not in seen, "a token was issued again"
        done.update(ids(batch))
        for token in {m.batch_id for m in batch}:
            assert ack(conn, token) == 1
    assert done == Counter(sent)
    assert dead_letters(conn, "q") == {}
    conn.close()


def test_a_crash_right_after_a_delivery_leaves_no_batch_id_that_acks_other_messages(
    durable: embedded.Server,
) -> None:
    conn: Connection = psycopg.connect(durable.dsn, autocommit=True)
    sent = offer(conn, "q", 9)
    conn.execute("set synchronous_commit = off")
    before = [take(conn, "q", f"w{n}", 3) for n in range(3)]
    conn.close()
    conn = crash(durable)
    move_clock(conn, "1 hour")
    after = []
    while batch := take(conn, "q", "new", 2, "1 day"):
        after.append(batch)
    held = {m.msg_id: m.batch_id for b in after for m in b}
    assert sorted(held) == sent
    assert {m.batch_id for b in before for m in b}.isdisjoint(held.values())
    for batch in before:
        assert ack(conn, batch[0].batch_id) == 0
        assert extend(conn, batch[0].batch_id, "1 hour") == 0
    for batch in after:
        assert outcome(conn, "ack", batch[0].batch_id, ids(batch)) == dict.fromkeys(ids(batch))
    conn.close()


def test_acks_nacks_delays_keys_and_dead_letters_survive_a_crash(durable: embedded.Server) -> None:
    conn: Connection = psycopg.connect(durable.dsn, autocommit=True)
    a, b, c, d = offer(conn, "q", 4)
    batch = take(conn, "q")
    token = batch[0].batch_id
    outcome(conn, "ack", token, [a])
    nack(conn, batch[1], "10 minutes", "later")
    outcome(conn, "dead", token, [c], "broken")
    delayed = post(conn, "q", "delayed", delay="10 minutes")
    keyed = post(conn, "q", "old", key="k")
    assert post(conn, "q", "new", key="k") == keyed
    conn.close()
    conn = crash(durable)
    assert post(conn, "q", "newest", key="k") == keyed
    assert extend(conn, token, "1 second") in (0, 1)
    forced_tick(conn, "q")
    assert [(m.msg_id, m.payload) for m in work_off(conn, "q") if m.msg_id != d] == [(keyed, "newest")]
    conn.close()
    conn = crash(durable)
    move_clock(conn, "11 minutes")
    settle(conn, "q")
    got = {m.msg_id: m.receive_count for m in work_off(conn, "q")}
    got.pop(d, None)
    assert got == {b: 2, delayed: 1}
    assert dead_letters(conn, "q") == {c: "broken"}
    conn.close()


def _drain(dsn: str, name: str, size: int, table: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        token = None
        empty = 0
        while empty < 3:
            batch = take(conn, "q", name, size, "10 minutes", ack_batch=token)
            token = batch[0].batch_id if batch else None
            empty = 0 if batch else empty + 1
            for m in batch:
                conn.execute(f"insert into {table} values (%s, %s)".encode(), [name, m.msg_id])
            if not batch:
                time.sleep(0.05)


def start(*args: Any, target: Callable[..., None] = _drain) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    return process


@pytest.mark.slow  # starts 20 processes
def test_20_processes_that_drain_10000_messages_see_each_exactly_once(own: Connection, own_dsn: str) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    own.execute("create table public.seen (worker text, msg_id bigint)")
    sent = []
    for _ in range(5):
        sent += offer(own, "q", 2000)
    processes = [start(own_dsn, f"w{n}", 1 + n * 2, "public.seen") for n in range(20)]
    for process in processes:
        process.join(150)
        assert process.exitcode == 0
    found = Counter(row[0] for row in own.execute("select msg_id from public.seen"))
    assert found == Counter(sent)
    assert work_off(own, "q", "after") == []
    workers = value(own, "select count(distinct worker) from public.seen")
    assert workers > 10


def _hang(dsn: str, name: str, size: int, table: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        batch = take(conn, "q", name, size, "2 seconds")
        for m in batch:
            conn.execute(f"insert into {table} values (%s, %s)".encode(), [name, m.msg_id])
        time.sleep(600)


def test_the_messages_of_a_killed_process_come_back_by_themselves(own: Connection, own_dsn: str) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    own.execute("create table public.seen (worker text, msg_id bigint)")
    sent = offer(own, "q", 10)
    victim = start(own_dsn, "victim", 6, "public.seen", target=_hang)
    try:
        deadline = time.monotonic() + 30
        while value(own, "select count(*) from public.seen") < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
    assert ids(take(own, "q", "w2", timeout="1 hour")) == sent[6:]
    got: list[int] = []
    deadline = time.monotonic() + 20
    while len(got) < 6 and time.monotonic() < deadline:
        batch = take(own, "q", "w2", timeout="1 hour")
        assert {m.receive_count for m in batch} <= {2}
        got += ids(batch)
        time.sleep(0.05)
    assert sorted(got) == sent[:6]


def test_a_backend_killed_in_the_middle_of_its_calls_loses_nothing(
    own: Connection, own_dsn: str, connect: Callable[..., Connection], background: Callable[..., Any]
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    configure(own, "q", max_receive_attempts=1000)
    sent = []
    for _ in range(10):
        sent += offer(own, "q", 100)
    done: Counter[int] = Counter()

    def worker(name: str) -> Callable[[Connection], None]:
        def run(c: Connection) -> None:
            try:
                while batch := take(c, "q", name, 3, "1 hour"):
                    result = outcome(c, "ack", batch[0].batch_id, ids(batch))
                    done.update(i for i, reason in result.items() if reason is None)
            except psycopg.OperationalError:
                return

        return run

    for turn in range(6):
        jobs = [background(worker(f"w{turn}-{n}"), connect(own_dsn)) for n in range(3)]
        time.sleep(0.05)
        for job in jobs:
            value(own, "select pg_terminate_backend(%s, 5000)", job.pid)
        for job in jobs:
            job.result()
        move_clock(own, f"{2 * turn + 2} hours")
    got = done + Counter(ids(work_off(own, "q", "last")))
    # An ack whose answer never came may have counted: its messages are in neither list, or in one.
    assert set(got) <= set(sent)
    assert max(got.values()) == 1
    assert len(set(sent) - set(got)) <= 6 * 3 * 3
    assert dead_letters(own, "q") == {}
