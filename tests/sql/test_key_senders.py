"""Keys with several senders at once, batches, and transactions that are still open."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    move_clock,
    nack_ids,
    outcome,
    post,
    receive,
    send,
    settle,
    take,
    tick,
    value,
    work_off,
)


def batch_with_keys(conn: Connection, queue: str, bodies: list[str], keys: list[str | None]) -> list[int]:
    result: list[int] = value(
        conn, "select pgque.send_batch(%s, 'default', %s::text[], keys => %s::text[])", queue, bodies, keys
    )
    return result


def test_elements_of_a_batch_have_keys_of_their_own(conn: Connection, subscribed: str) -> None:
    a = post(conn, subscribed, "a0", key="a")
    got = batch_with_keys(
        conn, subscribed, ["b1", "x", "a1", "b2", "y", "a2"], ["b", None, "a", "b", None, "a"]
    )
    assert got[2] == got[5] == a
    assert got[0] == got[3]
    assert len(set(got)) == 4
    tick(conn, subscribed)
    found = [(m.msg_id, m.payload) for m in work_off(conn, subscribed)]
    assert found == sorted([(a, "a2"), (got[0], "b2"), (got[1], "x"), (got[4], "y")])


@pytest.mark.slow
def test_two_batches_with_the_same_keys_in_opposite_order_do_not_deadlock(
    conn: Connection, subscribed: str, background: Callable[..., Any]
) -> None:
    keys: list[str | None] = [f"k{n}" for n in range(40)]

    def sender(reverse: bool) -> Callable[[Connection], None]:
        def run(c: Connection) -> None:
            for _ in range(25):
                batch_with_keys(c, subscribed, [str(k) for k in keys], keys[::-1] if reverse else keys)

        return run

    jobs = [background(sender(n % 2 == 0)) for n in range(4)]
    for job in jobs:
        job.result(60)
    tick(conn, subscribed)
    got = work_off(conn, subscribed)
    assert sorted(str(m.key) for m in got) == sorted(str(k) for k in keys)


def test_50_senders_of_one_key_make_one_message_with_the_last_committed_body(
    conn: Connection, subscribed: str, background: Callable[..., Any]
) -> None:
    value(conn, "create table if not exists public.last_body (n bigserial, body text, primary key (n))")
    value(conn, "truncate public.last_body")

    def sender(number: int) -> Callable[[Connection], set[int]]:
        def run(c: Connection) -> set[int]:
            found = set()
            for turn in range(3):
                with c.transaction():
                    found.add(post(c, subscribed, f"{number}/{turn}", key="k"))
                    # Whoever has sent holds the key, so this is the order of commits.
                    value(c, "insert into public.last_body (body) values (%s)", f"{number}/{turn}")
            return found

        return run

    jobs = [background(sender(n)) for n in range(50)]
    found: set[int] = set()
    for job in jobs:
        found |= job.result(60)
    assert len(found) == 1
    tick(conn, subscribed)
    last = value(conn, "select body from public.last_body order by n desc limit 1")
    assert [(m.msg_id, m.payload) for m in work_off(conn, subscribed)] == [(found.pop(), last)]


def test_senders_and_workers_at_once_lose_no_last_body(
    conn: Connection, subscribed: str, background: Callable[..., Any]
) -> None:
    take(conn, subscribed)
    seen: dict[str, list[tuple[int, str]]] = {}

    def sender(key: str) -> Callable[[Connection], list[int]]:
        return lambda c: [post(c, subscribed, str(n), key=key) for n in range(150)]

    def worker(name: str) -> Callable[[Connection], list[tuple[str, int, str]]]:
        def run(c: Connection) -> list[tuple[str, int, str]]:
            got = []
            for _ in range(400):
                tick(c, subscribed)
                for m in take(c, subscribed, name, 5):
                    got.append((str(m.key), m.msg_id, str(m.payload)))
                    outcome(c, "ack", m.batch_id, [m.msg_id])
            return got

        return run

    senders = {key: background(sender(key)) for key in "abc"}
    workers = [background(worker(f"w{n}")) for n in range(2)]
    sent = {key: job.result(60) for key, job in senders.items()}
    everything = [triple for job in workers for triple in job.result(90)]
    tick(conn, subscribed)
    everything += [(str(m.key), m.msg_id, str(m.payload)) for m in work_off(conn, subscribed)]
    for key, msg_id, body in everything:
        seen.setdefault(key, []).append((msg_id, body))
    for key, list_of_ids in sent.items():
        delivered = dict(seen[key])
        assert len(delivered) == len(seen[key]), "an id was delivered twice"
        assert set(delivered) == set(list_of_ids)
        # The body of each id is the last one that send() said went under it.
        expected = {msg_id: str(n) for n, msg_id in enumerate(list_of_ids)}
        assert delivered == expected


def test_many_messages_that_are_being_replaced_hide_none_that_is_not(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    plain = send(pool, "q", "plain")
    keys = [post(pool, "q", "old", key=f"k{n}") for n in range(190)]
    tick(pool, "q")
    sender = transaction("read committed", own_dsn)
    for n in range(190):
        post(sender, "q", "new", key=f"k{n}")
    batch = take(pool, "q", count=300)  # puts aside what is being replaced
    assert [m.msg_id for m in batch] == [plain]
    nack_ids(pool, batch[0].batch_id, [plain])
    assert [m.msg_id for m in take(pool, "q", count=1)] == [plain]
    sender.commit()
    rest = [m for _ in range(3) for m in take(pool, "q", count=300)]
    assert sorted(m.msg_id for m in rest) == keys
    assert {m.payload for m in rest} == {"new"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("plain", [True, False])
def test_an_uncommitted_replacement_blocks_no_receive_and_its_body_is_not_lost(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection], end: str, plain: bool
) -> None:
    first = post(pool, "q", "old", key="k")
    tick(pool, "q")
    pool.execute("set statement_timeout = '5s'")
    sender = transaction("read committed", own_dsn)
    promised = post(sender, "q", "new", key="k")
    others = [send(pool, "q", "other") for _ in range(3)]
    tick(pool, "q")

    def everything() -> list[tuple[int, str | None]]:
        got: list[tuple[int, str | None]] = []
        while batch := receive(pool, "q") if plain else take(pool, "q"):
            got += [(m.msg_id, m.payload) for m in batch]
            ack(pool, batch[0].batch_id)
        return got

    before = everything()
    assert [i for i, body in before if body == "other"] == others
    sender.execute(end.encode())
    value(pool, "select pgque.maint_retry_events()")
    # It may have been put aside for a moment.
    after: list[tuple[int, str | None]] = []
    end_of_patience = time.monotonic() + 3
    while time.monotonic() < end_of_patience and all(body == "other" for _, body in before + after):
        settle(pool, "q")
        after += everything()
    assert [i for i, body in before + after if body == "other"] == others
    keyed = [(i, body) for i, body in before + after if body != "other"]
    assert len({i for i, _ in keyed}) == len(keyed), "an id was delivered twice"
    if end == "commit":
        assert keyed[-1] == (promised, "new")
    else:
        assert keyed == [(first, "old")]


def test_an_uncommitted_first_send_of_a_key_that_is_rolled_back_leaves_nothing(
    pool: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    one = transaction("read committed", own_dsn)
    lost = post(one, "q", "lost", key="k")
    other = background(lambda c: post(c, "q", "kept", key="k"), connect(own_dsn))
    wait_for_lock(other.pid)
    one.execute("rollback")
    kept = other.result()
    assert kept != lost
    tick(pool, "q")
    assert [(m.msg_id, m.payload) for m in work_off(pool, "q")] == [(kept, "kept")]


def test_a_replacement_rolled_back_to_a_savepoint_did_not_happen(conn: Connection, subscribed: str) -> None:
    first = post(conn, subscribed, "old", key="k")
    conn.execute("begin")
    conn.execute("savepoint s")
    assert post(conn, subscribed, "new", key="k") == first
    conn.execute("rollback to savepoint s")
    conn.execute("commit")
    tick(conn, subscribed)
    assert [(m.msg_id, m.payload) for m in work_off(conn, subscribed)] == [(first, "old")]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@pytest.mark.parametrize("meanwhile", ["nothing", "sent", "received"])
def test_a_sender_with_an_old_snapshot_is_right_or_refused(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str, meanwhile: str
) -> None:
    take(conn, subscribed)
    bodies = {post(conn, subscribed, "old", key="k"): "old"}
    tick(conn, subscribed)
    stale = transaction(isolation)
    got = []
    if meanwhile == "sent":
        bodies[post(conn, subscribed, "between", key="k")] = "between"
    elif meanwhile == "received":
        got = [(m.msg_id, m.payload) for m in work_off(conn, subscribed)]
    try:
        mine = post(stale, subscribed, "mine", key="k")
        stale.execute("commit")
        bodies[mine] = "mine"
    except psycopg.errors.SerializationFailure:
        stale.execute("rollback")
        assert meanwhile != "nothing"
    tick(conn, subscribed)
    got += [(m.msg_id, m.payload) for m in work_off(conn, subscribed)]
    assert sorted(got) == sorted(bodies.items())


@pytest.mark.slow  # 20,000 locks
def test_a_batch_of_20000_keys_is_sent_and_delivered(pool: Connection) -> None:
    keys: list[str | None] = [f"key {n}" for n in range(20_000)]
    pool.execute("set statement_timeout = '60s'")
    sent = batch_with_keys(pool, "q", [str(k) for k in keys], keys)
    tick(pool, "q")
    assert len(set(sent)) == 20_000
    again = batch_with_keys(pool, "q", ["new"] * 10, keys[:10])
    assert again == sent[:10]
    tick(pool, "q")
    got = work_off(pool, "q", count=1000)
    assert [m.msg_id for m in got] == sent
    assert [m.payload for m in got[:11]] == ["new"] * 10 + ["key 10"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_uncommitted_replacement_of_a_delayed_message_blocks_no_pump_and_is_not_lost(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection], end: str
) -> None:
    first = post(pool, "q", "old", key="k", delay="1 minute")
    other = post(pool, "q", "other", delay="1 minute")
    sender = transaction("read committed", own_dsn)
    promised = post(sender, "q", "new", key="k", delay="1 minute")
    move_clock(pool, "5 minutes")
    pool.execute("set statement_timeout = '5s'")
    settle(pool, "q")
    got = [(m.msg_id, m.payload) for m in work_off(pool, "q")]
    assert (other, "other") in got
    sender.execute(end.encode())
    move_clock(pool, "10 minutes")
    settle(pool, "q")
    got += [(m.msg_id, m.payload) for m in work_off(pool, "q")]
    got.remove((other, "other"))
    assert len({i for i, _ in got}) == len(got)
    if end == "commit":
        assert got[-1] == (promised, "new")
    else:
        assert got == [(first, "old")]
