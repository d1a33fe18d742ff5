"""Everything at once: each message ends exactly once for each consumer, acked or dead."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    compact_soon,
    configure,
    drain,
    forced_tick,
    nack_ids,
    pump,
    receive,
    receive_coop,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)

ISOLATIONS = ["read committed", "repeatable read", "serializable"]
PASSING = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected)


def stress(
    own: Connection,
    dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    seconds: float,
    seed: int,
) -> None:
    value(own, "select pgque.set_tick_period_ms(5)")
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", rotation_period="1 microsecond", max_retries=2)
    compact_soon(own)
    for name in ("c", "d"):
        subscribe(own, "q", name)
    for worker in "wxy":
        value(own, "select pgque.register_subconsumer('q', 'group', %s)", worker)
    end = time.monotonic() + seconds
    sent: list[int] = []
    done: dict[str, Counter[int]] = {name: Counter() for name in ("c", "d", "group")}
    deadlocks: list[str] = []

    def producer(number: int) -> Callable[[Connection], None]:
        def run(c: Connection) -> None:
            dice = random.Random(f"{seed} producer {number}")  # noqa: S311
            while time.monotonic() < end:
                c.execute(f"begin isolation level {dice.choice(ISOLATIONS)}".encode())
                try:
                    mine = [send(c, "q")]
                    if dice.random() < 0.3:
                        time.sleep(dice.random() * 0.1)
                    mine += send_many(c, "q", dice.randrange(1, 30))
                    if dice.random() < 0.2:
                        c.execute("savepoint s")
                        send_many(c, "q", 5)
                        c.execute("rollback to savepoint s")
                    if dice.random() < 0.15:
                        c.execute("rollback")
                        continue
                    c.execute("commit")
                    sent.extend(mine)
                except PASSING as error:
                    c.execute("rollback")
                    if isinstance(error, psycopg.errors.DeadlockDetected):
                        deadlocks.append(str(error))

        return run

    def consumer(name: str, worker: str | None, number: int) -> Callable[[Connection], None]:
        def run(c: Connection) -> None:
            dice = random.Random(f"{seed} {name} {worker} {number}")  # noqa: S311
            while time.monotonic() < end:
                c.execute(f"begin isolation level {dice.choice(ISOLATIONS)}".encode())
                try:
                    size = dice.choice([1, 3, 10, 100])
                    if worker is None:
                        batch = receive(c, "q", name, size)
                    else:
                        dead = "20 milliseconds" if dice.random() < 0.2 else None
                        batch = receive_coop(c, "q", worker, size, dead, consumer=name)
                    apart = dice.random() < 0.4
                    if apart:
                        c.execute("commit")
                        if dice.random() < 0.1:
                            continue  # as if it crashed here
                        c.execute("begin")
                    kept = Counter(m.msg_id for m in batch)
                    finished = 0
                    if batch:
                        # Two sessions share consumer c and its batches: one does not know what the other nacked.
                        bad = [m.msg_id for m in batch if name != "c" and dice.random() < 0.05]
                        answers = nack_ids(c, batch[0].batch_id, bad) if bad else []
                        if "batch not open" in [reason for _, _, reason in answers]:
                            c.execute("rollback")  # another worker took it over
                            continue
                        for msg_id, ok, reason in answers:
                            assert ok, f"{msg_id} was handed out although it was settled: {reason}"
                            del kept[msg_id]
                        finished = ack(c, batch[0].batch_id)
                    if dice.random() < 0.1:
                        c.execute("rollback")
                        continue
                    c.execute("commit")
                    if finished:
                        done[name].update(kept)
                except PASSING as error:
                    c.execute("rollback")
                    if isinstance(error, psycopg.errors.DeadlockDetected):
                        deadlocks.append(str(error))
                except psycopg.Error as error:
                    assert error.sqlstate == "PQ012", error
                    c.execute("rollback")

        return run

    def loop(c: Connection) -> None:
        while time.monotonic() < end:
            c.execute("call pgque.ticker_loop('500 milliseconds')")

    def maintain(c: Connection) -> None:
        while time.monotonic() < end:
            value(c, "select pgque.ticker()")
            value(c, "select pgque.maint()")

    def neighbours(c: Connection) -> None:
        number = 0
        while time.monotonic() < end:
            number += 1
            value(c, "select pgque.create_queue(%s)", f"other {number}")
            subscribe(c, f"other {number}")
            send(c, f"other {number}")
            tick(c, f"other {number}")
            assert len(drain(c, f"other {number}")) == 1
            value(c, "select pgque.drop_queue(%s, true)", f"other {number}")
            rows(c, "select * from pgque.get_consumer_info('q')")
            rows(c, "select * from pgque.metrics()")

    work = [
        *(producer(n) for n in range(3)),
        consumer("c", None, 0),
        consumer("c", None, 1),
        consumer("d", None, 0),
        *(consumer("group", w, 0) for w in "wxy"),
        loop,
        maintain,
        neighbours,
    ]
    jobs = [background(job, connect(dsn)) for job in work]
    for job in jobs:
        job.result(seconds + 60)
    assert deadlocks == []
    for _ in range(8):
        pump(own)
        forced_tick(own, "q")
        for name in ("c", "d"):
            done[name].update(drain(own, "q", name, 500))
        for worker in "wxy":
            while batch := receive_coop(own, "q", worker, 500, consumer="group"):
                done["group"].update(m.msg_id for m in batch)
                ack(own, batch[0].batch_id)
    dead: dict[str, list[int]] = {name: [] for name in done}
    for name, msg_id in rows(own, "select consumer_name, ev_id from pgque.dlq_inspect('q', 1000000)"):
        dead[name].append(msg_id)
    assert len(sent) > 50 * seconds
    for name, counts in done.items():
        twice = [i for i, n in counts.items() if n > 1]
        assert twice == [], f"{name} finished messages twice"
        assert sorted([*counts, *dead[name]]) == sorted(sent), name


@pytest.mark.slow  # seconds of work by everybody
@pytest.mark.timeout(120)
def test_everything_at_once_for_some_seconds(
    own: Connection, own_dsn: str, connect: Callable[..., Connection], background: Callable[..., Any]
) -> None:
    stress(own, own_dsn, connect, background, 6, 1)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_everything_at_once_for_longer(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    seed: int,
) -> None:
    stress(own, own_dsn, connect, background, 30, seed + 2)
