"""A queue whose table is gone or locked stops no other queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    drain,
    leaf,
    nack,
    payloads,
    pump,
    receive,
    rows,
    send,
    subscribe,
    tick,
    value,
)


def with_retry(conn: Connection, queue: str) -> int:
    """Leave a due retry of one message; return its id."""
    sent = send(conn, queue)
    tick(conn, queue)
    (message,) = receive(conn, queue)
    nack(conn, message)
    ack(conn, message.batch_id)
    return sent


@pytest.mark.parametrize("which", ["event 0", "event 1", "event 2", "tick 0", "tick 2", "all"])
def test_a_queue_with_a_missing_table_stops_no_other_and_health_names_it(own: Connection, which: str) -> None:
    names = ("a first", "broken", "z last")
    for name in names:
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    retries = {name: with_retry(own, name) for name in names}
    for name in names:
        send(own, name, "late")
    kinds = [("event", n) for n in range(3)] + [("tick", n) for n in range(3)]
    for kind, n in kinds:
        if which in (f"{kind} {n}", "all"):
            own.execute(f"drop table {leaf(own, 'a first', n, kind).replace('_1_', '_2_')} cascade".encode())
    good = [n for n in names if n != "broken"]

    assert pump(own) >= 2
    assert value(own, "select pgque.ticker()") >= 2
    value(own, "select pgque.maint()")
    for name in good:
        assert sorted(drain(own, name)) == sorted([retries[name], retries[name] + 1])
        send(own, name, "by the loop")
    own.execute("call pgque.ticker_loop('300 milliseconds')")
    for name in good:
        assert payloads(own, name) == ["by the loop"]
        assert rows(own, "select queue_name from pgque.get_queue_info(%s)", name) == [(name,)]
        assert rows(own, "select queue_name from pgque.get_consumer_info(%s)", name) == [(name,)]
    for info in ("get_queue_info", "get_consumer_info"):
        listed = {r[0] for r in rows(own, f"select queue_name from pgque.{info}()")}
        assert set(good) <= listed
    found = rows(own, "select queue, detail, advice from pgque.health() where status = 'fail'")
    assert {f[0] for f in found} == {"broken"}
    assert all(advice for _, _, advice in found)
    assert {r[0] for r in rows(own, "select queue from pgque.metrics() where queue is not null")} >= set(good)

    assert value(own, "select pgque.drop_queue('broken', true)") == 1
    assert value(own, "select pgque.create_queue('broken')") == 1
    subscribe(own, "broken")
    send(own, "broken", "new")
    tick(own, "broken")
    assert payloads(own, "broken") == ["new"]


@pytest.mark.timeout(60)
def test_a_locked_table_of_one_queue_does_not_keep_the_loop_from_the_others(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    value(own, "select pgque.set_tick_period_ms(10)")
    for name in ("locked", "free"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    send(own, "locked")
    table = leaf(own, "locked")
    locker = connect(own_dsn, autocommit=False)
    locker.execute(f"lock table {table} in access exclusive mode".encode())
    loop = background(lambda c: c.execute("call pgque.ticker_loop('50 seconds')"), connect(own_dsn))
    sent = send(own, "free")
    got: list[int] = []

    def delivered() -> bool:
        got.extend(drain(own, "free"))
        return got == [sent]

    wait_until(delivered, "the free queue delivers", 15)
    locker.rollback()
    wait_until(lambda: receive(own, "locked"), "the other one delivers once it is free", 15)
    value(own, "select pgque.stop()")
    loop.result(20)
