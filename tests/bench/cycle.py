# ruff: noqa: RUF001
"""What small batches, bulk and a held xmin cost beside an earlier version: `--against VERSION`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.cost import DEAD, STATISTICS_DELAY, held_xmin
from bench.measure import PAYLOAD, Bench, Connection, Row, one, queue

QUEUE = "cycle"


def cpu(conn: Connection) -> float:
    """Return the CPU seconds of a session so far, to the nanosecond."""
    return int(Path(f"/proc/{conn.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9


@dataclass(frozen=True, slots=True)
class Case:
    """A consumer on its own or a worker takes and acknowledges ``count`` messages; at most the target.

    A tick has as many, or ``tick``.
    """

    what: str
    target: float
    count: int = 1
    tick: int = 0
    worker: bool = False
    ack_batch: bool = False
    config: str = "{}"
    keyed_order: bool = False


CASES = (
    Case("receive + ack of 1, consumer", 0.60),
    Case("receive + ack of 1, worker", 0.60, worker=True),
    Case("receive with ack_batch of 1, consumer", 0.65, ack_batch=True),
    Case("receive with ack_batch of 1, worker", 0.65, worker=True, ack_batch=True),
    Case("receive + ack of 10, consumer", 0.50, 10),
    Case("receive + ack of 10, worker", 0.50, 10, worker=True),
    Case("receive + ack of 100, consumer", 0.60, 100),
    Case("receive + ack of 100, worker", 0.60, 100, worker=True),
    Case("idle poll, consumer", 1, 0),
    Case("idle poll, worker", 1, 0, worker=True),
    # The window is read by its map.
    Case("1 of a tick of 1,000, consumer", 0.80, tick=1000),
    Case("1 of a tick of 1,000, worker", 0.80, tick=1000, worker=True),
    Case("1 of a tick of 1,000 with ack_batch, consumer", 0.80, tick=1000, ack_batch=True),
    Case("10 of a tick of 1,000, consumer", 0.80, 10, 1000),
    Case("10 of a tick of 10,000, worker", 0.80, 10, 10000, worker=True),
    # No ordinary deliveries: these must not become slower.
    Case("receive + ack of 1 with a ttl, consumer", 1.05, config='{"message_ttl": "1 hour"}'),
    Case("receive + ack of 1 with a ttl, worker", 1.05, worker=True, config='{"message_ttl": "1 hour"}'),
    Case("receive + ack of 3 in keyed order", 1.05, 3, worker=True, keyed_order=True),
    Case(
        "receive + ack of 1 with a throughput_limit",
        1.05,
        worker=True,
        config='{"throughput_limit": 1000000}',
    ),
)


class Side:
    """One of the two databases, with sessions that send and that receive."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.producer, self.consumer, self.keyed_order = bench.connect(), bench.connect(), case.keyed_order
        queue(self.producer, QUEUE)
        self.producer.execute("select pgque.alter_queue(%s, %s::jsonb)", (QUEUE, case.config))
        self.producer.execute("select pgque.subscribe(%s, 'pool', 'latest', %s)", (QUEUE, case.keyed_order))

    def close(self) -> None:
        """Drop the queue."""
        self.producer.execute("select pgque.drop_queue(%s, true)", (QUEUE,))
        self.producer.close()
        self.consumer.close()

    def send(self, count: int) -> None:
        """Send messages, and tick."""
        if count:
            keys = (
                ", partition_keys => array(select g::text from generate_series(1, 3) g)"
                if self.keyed_order
                else ""
            )
            self.producer.execute(
                f"select pgque.send_batch(%s, 't', array_fill(%s::text, array[%s]){keys})".encode(),
                (QUEUE, PAYLOAD, count),
            )
            self.producer.execute("select pgque.ticker(%s)", (QUEUE,))

    def take(self, case: Case, ack: int | None = None) -> int | None:
        """Receive and acknowledge; return the batch if it is still open."""
        worker = ", worker => 'w'" if case.worker else ""
        rows = self.consumer.execute(
            f"select batch_id from pgque.receive(%s, %s, %s{worker}{'' if ack is None else ', ack_batch => %s'})".encode(),
            (
                QUEUE,
                "pool" if case.worker else "c",
                case.count if case.tick else 1000,
                *([] if ack is None else [ack]),
            ),
        ).fetchall()
        if not rows:
            return None
        batch: int = rows[0][0]
        if not case.ack_batch:
            self.consumer.execute("select pgque.ack(%s)", (batch,))
            return None
        return batch

    def drain(self, case: Case) -> None:
        """Take what is there, of both consumers."""
        for worker in (False, True):
            while (batch := self.take(Case("", 0, worker=worker, ack_batch=True))) is not None:
                self.consumer.execute("select pgque.ack(%s)", (batch,))

    def cycles(self, case: Case, rounds: int) -> float:
        """Return the CPU seconds that the consumer's session used in a cycle."""
        self.drain(case)
        used, open_batch, left = 0.0, None, 0
        for _ in range(rounds):
            if left < case.count:
                left = case.tick or case.count
                self.send(left)
            left -= case.count
            before = cpu(self.consumer)
            open_batch = self.take(case, open_batch)
            used += cpu(self.consumer) - before
        return used / rounds


@contextmanager
def sides(bench: Bench, case: Case) -> Iterator[tuple[Side, Side]]:
    """Open both databases."""
    assert bench.against is not None
    ours, theirs = Side(bench, case), Side(bench.against, case)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def _alternating(
    rounds: int, ours: Callable[[], float], theirs: Callable[[], float]
) -> tuple[float, float, float]:
    """Run both in turn; return both medians, and the median of the ratios."""
    ours(), theirs()
    pairs = [(ours(), theirs()) if n % 2 else (theirs(), ours())[::-1] for n in range(rounds)]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def small(bench: Bench) -> list[Row]:
    """Server CPU of small batches."""
    rows = []
    cycles = bench.pick(300, 60)
    for case in CASES:
        with sides(bench, case) as (ours, theirs):
            a, b, ratio = _alternating(
                bench.pick(9, 3),
                partial(ours.cycles, case, cycles),
                partial(theirs.cycles, case, cycles),
            )
        rows.append(
            Row(
                case.what,
                f"{a * 1e6:,.0f} µs",
                f"{b * 1e6:,.0f} µs",
                ratio,
                f"≤ {case.target:g} ×",
                ratio <= case.target,
                "CPU of the consumer's session",
                {"ours_us": a * 1e6, "theirs_us": b * 1e6, "ratio": ratio},
            )
        )
    return rows


def held(bench: Bench) -> list[Row]:
    """Cycles under a held xmin: the last tenth over the first, and dead tuples."""
    rows = []
    total = bench.pick(20_000, 2_000)
    for what, every, target in (("all acknowledged", 0, 1.15), ("5 % nacked", 20, 1.3)):
        count = total if every == 0 else total // 2
        figures = []
        assert bench.against is not None
        for side in (bench, bench.against):
            figures.append(_held(side, count, every))
        (a, dead), (b, dead_b) = figures
        rows.append(
            Row(
                f"held xmin, {count:,} cycles, {what}: last tenth over first",
                f"{a:.2f}",
                f"{b:.2f}",
                a / b,
                f"≤ {target:g}",
                a <= target and (every > 0 or dead < 100),
                f"dead tuples: {dead:,.0f} and {dead_b:,.0f}",
                {"ours": a, "theirs": b, "dead": dead, "dead_theirs": dead_b},
            )
        )
    return rows


def _held(bench: Bench, cycles: int, nack_every: int) -> tuple[float, float]:
    case = Case("", 0)
    side = Side(bench, case)
    try:
        with held_xmin(bench):
            parts = []
            for part in range(10):
                before = cpu(side.consumer)
                for n in range(cycles // 10):
                    side.send(1)
                    if nack_every and n % nack_every == 0:
                        _nack(side)
                    side.take(case)
                parts.append((cpu(side.consumer) - before) / (cycles // 10))
                if part == 0 and nack_every:
                    side.producer.execute("select pgque.maint_retry_events()")
            side.consumer.execute(f"select pg_sleep({STATISTICS_DELAY})".encode())
            dead = float(one(side.producer, DEAD))
    finally:
        side.close()
    return parts[-1] / parts[0], dead


def _nack(side: Side) -> None:
    found = side.consumer.execute(
        "select array_agg(r.msg_id), min(r.batch_id) from pgque.receive(%s, 'c', 1000) r", (QUEUE,)
    ).fetchone()
    assert found is not None
    if found[1] is not None:
        side.consumer.execute("select pgque.nack(%s, %s::bigint[], '0', 'x')", (found[1], found[0]))
        side.consumer.execute("select pgque.ack(%s)", (found[1],))
        side.producer.execute("select pgque.maint_retry_events()")
