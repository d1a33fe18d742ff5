"""Workers at full tilt, everything at once: each message is finished exactly once, or dead."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    compact_soon,
    configure,
    dead_letters,
    forced_tick,
    ids,
    nack_ids,
    outcome,
    post,
    release,
    send_many,
    settle,
    subscribe,
    take,
    value,
    work_off,
)

PASSING = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected)


class Run:
    """What the threads of one run know of each other."""

    def __init__(self, dsn: str, seed: int, seconds: float) -> None:
        self.dsn, self.seed = dsn, seed
        self.end = time.monotonic() + seconds
        self.lock = threading.Lock()
        self.sent: set[int] = set()
        self.done: Counter[int] = Counter()
        self.deadlocks: list[str] = []

    def going(self) -> bool:
        return time.monotonic() < self.end

    def producer(self, number: int) -> Callable[[Connection], None]:
        def run(c: Connection) -> None:
            dice = random.Random(f"{self.seed} producer {number}")  # noqa: S311
            while self.going():
                isolation = dice.choice(["read committed", "repeatable read", "serializable"])
                c.execute(f"begin isolation level {isolation}".encode())
                try:
                    mine = send_many(c, "q", dice.randrange(1, 20))
                    if dice.random() < 0.3:
                        mine.append(post(c, "q", delay=f"{dice.choice([0, 50, 200])} milliseconds"))
                    if dice.random() < 0.3:
                        mine.append(post(c, "q", str(number), partition_key=dice.choice("abc")))
                    if dice.random() < 0.2:
                        time.sleep(dice.random() * 0.05)
                    if dice.random() < 0.1:
                        c.execute("rollback")
                        continue
                    c.execute("commit")
                    self.sent.update(mine)
                except PASSING as error:
                    c.execute("rollback")
                    self.note(error)
                time.sleep(0.005)

        return run

    def note(self, error: psycopg.Error) -> None:
        if isinstance(error, psycopg.errors.DeadlockDetected):
            self.deadlocks.append(str(error))

    def worker(self, number: int) -> Callable[[Connection], None]:
        def run(c: Connection) -> None:
            dice = random.Random(f"{self.seed} worker {number}")  # noqa: S311
            while self.going():
                try:
                    timeout = dice.choice(["30 milliseconds", "200 milliseconds", "1 hour"])
                    batch = take(
                        c, "q", f"w{number}-{dice.randrange(3)}", dice.choice([1, 3, 10, 100]), timeout
                    )
                    if not batch:
                        continue
                    fate = dice.random()
                    if fate < 0.1 and timeout != "1 hour":
                        continue  # it crashed
                    if fate < 0.25:
                        time.sleep(dice.random() * 0.06)
                    self.finish(c, dice, batch[0].batch_id, ids(batch))
                except PASSING as error:
                    if c.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                        c.execute("rollback")
                    self.note(error)

        return run

    def finish(self, c: Connection, dice: random.Random, token: int, members: list[int]) -> None:
        """Give the messages of a batch their outcome, in a transaction of any kind."""
        isolation = dice.choice(["read committed", "read committed", "repeatable read", "serializable"])
        c.execute(f"begin isolation level {isolation}".encode())
        bad = [i for i in members if dice.random() < 0.1]
        back = [i for i in members if dice.random() < 0.05 and i not in bad]
        good = [i for i in members if i not in bad and i not in back]
        if bad:
            nack_ids(c, token, bad, f"{dice.choice([0, 40])} milliseconds", "bad luck")
        if back:
            release(c, token, back)
        found = outcome(c, "ack", token, good) if good else {}
        if dice.random() < 0.1:
            c.execute("rollback")
            release(c, token)
            return
        c.execute("commit")
        with self.lock:
            self.done.update(i for i, reason in found.items() if reason is None)

    def keeper(self, c: Connection) -> None:
        dice = random.Random(f"{self.seed} keeper")  # noqa: S311
        while self.going():
            settle(c, "q")
            if dice.random() < 0.3:
                value(c, "select pgque.maint()")
            if dice.random() < 0.02:
                value(c, "select pgque.reclaim('q', 'c', '100 milliseconds')")


def stress(
    own: Connection, run: Run, connect: Callable[..., Connection], background: Callable[..., Any], keyed: bool
) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", rotation_period="1 microsecond", max_retries=1000, max_receive_attempts=1000)
    compact_soon(own)
    value(own, "select pgque.subscribe('q', 'c', 'latest', keyed_order => %s)", keyed)
    subscribe(own, "q", "other")
    jobs = [background(run.producer(n), connect(run.dsn)) for n in range(2)]
    jobs += [background(run.worker(n), connect(run.dsn)) for n in range(4)]
    jobs += [background(run.keeper, connect(run.dsn)) for _ in range(2)]
    for job in jobs:
        job.result(60)
    value(own, "select pgque.reclaim('q', 'c')")
    got: Counter[int] = Counter()
    empty = 0
    while empty < 3:
        time.sleep(0.25)
        settle(own, "q")
        forced_tick(own, "q")
        batch = work_off(own, "q", "last")
        got.update(ids(batch))
        empty = 0 if batch else empty + 1
    assert run.deadlocks == []
    assert dead_letters(own, "q") == {}
    total = run.done + got
    assert {i: n for i, n in total.items() if n > 1} == {}, "finished twice"
    assert run.sent - set(total) == set(), "lost"
    assert set(total) == run.sent, "never sent"
    assert value(own, "select count(*) from pgque.retry_queue") == 0


@pytest.mark.slow  # seconds of work by many processes
@pytest.mark.parametrize("keyed", [False, True])
def test_each_message_is_finished_exactly_once(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    keyed: bool,
) -> None:
    stress(own, Run(own_dsn, 1, 6), connect, background, keyed)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(6))
def test_each_message_is_finished_exactly_once_under_random_calls(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    seed: int,
) -> None:
    stress(own, Run(own_dsn, 100 + seed, 15), connect, background, seed % 2 == 1)
