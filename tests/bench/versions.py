# ruff: noqa: RUF001
"""This version beside an earlier one, in a second database of the same server: `--against VERSION`.

Both do the same in turn, in plain SQL that both know, with the loop at work in one database at a time.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from bench.cost import Cost, Meter, own_seconds
from bench.crew import WARM_UP, Begin, Crew, Done
from bench.latency import Latency
from bench.measure import Bench, Number, Row, one, queue, ticking

QUEUE = "measured"
NOISY = 3  # sessions; each sleeps a millisecond between two commits
LOOP = "select a.pid from pg_stat_activity a where a.datname = current_database() and a.query like 'call pgque.ticker_loop%'"
NOISE = """do $$
declare v_until timestamptz := clock_timestamp() + interval '{seconds} seconds';
begin
  set synchronous_commit = off;
  while clock_timestamp() < v_until loop
    insert into noise values (1);
    commit;
    perform pg_sleep(0.0005);
  end loop;
end $$"""


@dataclass(frozen=True, slots=True)
class Task:
    """A process sends at a rate by the clock, or listens as one consumer, for some seconds."""

    consumer: str | None
    rate: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Case:
    """Messages at a rate for one or more consumers that listen; of the seconds the first are not counted."""

    rate: float
    seconds: float
    consumers: int = 1
    tick_gap: str | None = None

    @property
    def warm_up(self) -> float:
        """How many seconds are not counted."""
        return min(5.0, self.seconds / 4)


@dataclass(frozen=True, slots=True)
class Paid:
    """The result of a case: the latency of the first consumer, and what the server paid for it."""

    latency: Latency
    cost: Cost
    messages: float

    @property
    def cpu(self) -> float:
        """CPU seconds a second of the server in all."""
        return (self.cost.cpu_s or 0.0) / self.cost.seconds

    @property
    def wal(self) -> float:
        """Bytes of WAL a message."""
        return self.cost.wal_bytes / self.messages


def take_part(task: Task, begin: Begin) -> Done:
    """Send, or listen and take."""
    done = Done()
    with psycopg.connect(begin.dsn, autocommit=True) as conn:
        if task.consumer is not None:
            _listen(conn, task.consumer, begin() + task.seconds, done)
            return done
        for _ in range(WARM_UP):
            conn.execute("select pgque.send(%s, '{\"n\": -1}'::text)", (QUEUE,))
        began = begin()
        for number in range(int(task.rate * task.seconds)):
            if (wait := began + number / task.rate - time.monotonic()) > 0:
                time.sleep(wait)
            conn.execute(
                "select pgque.send(%s, %s::text)", (QUEUE, json.dumps({"n": number, "pad": "x" * 80}))
            )
            done.count += 1
    return done


def _listen(conn: psycopg.Connection, consumer: str, until: float, done: Done) -> None:
    conn.execute(f'listen "pgque_{QUEUE}"'.encode())
    while (left := until - time.monotonic()) > 0:
        rows = conn.execute(
            "select r.batch_id, r.payload from pgque.receive(%s, %s, 1000) r", (QUEUE, consumer)
        ).fetchall()
        if rows:
            now = time.monotonic()
            done.numbers.extend(json.loads(row[1])["n"] for row in rows)
            done.times.extend(array("d", [now]) * len(rows))
            conn.execute("select pgque.ack(%s)", (rows[0][0],))
        else:
            for _ in conn.notifies(timeout=min(left, 1), stop_after=1):
                pass


def measured(bench: Bench, case: Case) -> Paid:
    """Measure one case in one database."""
    afterwards = 1.0
    names = [f"c{number}" for number in range(case.consumers)]
    with bench.connect() as admin, Meter(bench) as meter:
        admin.execute("select pgque.create_queue(%s)", (QUEUE,))
        if case.tick_gap is not None:
            admin.execute("select pgque.set_queue_config(%s, 'tick_gap', %s)", (QUEUE, case.tick_gap))
        for name in names:
            admin.execute("select pgque.subscribe(%s, %s)", (QUEUE, name))
        admin.execute("vacuum analyze")
        admin.execute("checkpoint")
        with Crew(bench, 1 + len(names), take_part) as team, ticking(bench):
            tasks = [Task(name, 0, case.seconds + afterwards) for name in names]
            began = team.begin([*tasks, Task(None, case.rate, case.seconds)])
            time.sleep(max(0.0, began + case.warm_up - time.monotonic()))
            before = meter.read()
            time.sleep(max(0.0, began + case.seconds - time.monotonic()))
            cost = meter.read() - before
            done = team.finish()
        admin.execute("select pgque.drop_queue(%s, true)", (QUEUE,))
    end = began + case.seconds + afterwards
    return Paid(
        Latency.of(done[0], began, case.rate, case.warm_up, case.seconds, end),
        cost,
        case.rate * (case.seconds - case.warm_up),
    )


def both(bench: Bench, case: Case) -> tuple[Paid, Paid]:
    """Measure a case here and in the earlier version."""
    assert bench.against is not None
    theirs = measured(bench.against, case)
    return measured(bench, case), theirs


def _latency_row(what: str, ours: Paid, theirs: Paid, p50: float, p99: float | None) -> Row:
    a, b = ours.latency, theirs.latency
    values: dict[str, Number] = {
        f"{side}_{key}": getattr(of, key)
        for side, of in (("ours", a), ("theirs", b))
        for key in Latency.__slots__
    }
    return Row(
        f"{what}, p50 / p99 / p99.9",
        a.in_words(),
        b.in_words(),
        a.p50 / b.p50,
        f"≤ {p50:g}" + ("" if p99 is None else f" / ≤ {p99:g}") + " ms",
        a.p50 <= p50 and (p99 is None or a.p99 <= p99) and a.missing == 0,
        "",
        values,
    )


def _ratio_row(what: str, unit: str, figures: Iterable[float], most: float | None, note: str = "") -> Row:
    ours, theirs = figures
    return Row(
        what,
        f"{ours:,.2f} {unit}",
        f"{theirs:,.2f} {unit}",
        ours / theirs if theirs else None,
        "" if most is None else f"≤ {most:g} ×",
        most is None or ours <= most * theirs,
        note,
        {"ours": ours, "theirs": theirs},
    )


def _loop_cpu(bench: Bench, seconds: float, *, rest: float) -> float:
    """Return the CPU seconds a minute of the loop's session, some seconds after it began."""
    with bench.connect() as conn, ticking(bench):
        time.sleep(rest)
        pid = int(one(conn, LOOP))
        before = own_seconds(pid)
        time.sleep(seconds)
        return (own_seconds(pid) - before) * 60 / seconds


@contextmanager
def _noise(bench: Bench, seconds: float) -> Iterator[None]:
    """Commit, some 2,000 times a second, what is none of pgque's business."""
    with bench.connect() as admin:
        admin.execute("create table noise (n int)")
        with Crew(bench, NOISY, _make_noise) as team:
            team.begin([Task(None, 0, seconds)] * NOISY)
            yield
            team.finish()


def _make_noise(task: Task, begin: Begin) -> Done:
    with psycopg.connect(begin.dsn, autocommit=True) as conn:
        begin()
        conn.execute(NOISE.format(seconds=task.seconds).encode())
    return Done()


def _beside_noise(bench: Bench, seconds: float) -> tuple[float, float]:
    """Return the CPU seconds a minute of the loop beside other commits, and their number a second."""
    rest = seconds / 4
    with bench.connect() as conn, _noise(bench, 2 * seconds + 4):
        before, began = one(conn, "select count(*) from noise"), time.monotonic()
        cpu = _loop_cpu(bench, seconds, rest=rest)
        after = one(conn, "select count(*) from noise")
        return cpu, (after - before) / (time.monotonic() - began)


def latency(bench: Bench) -> list[Row]:
    """Latency at rates and what it costs, beside the earlier version."""
    assert bench.against is not None
    rows, sides = [], (bench, bench.against)
    scale = 0.1 if bench.quick else 1.0
    at_200: tuple[Paid, Paid] | None = None
    lasting = {1: 60.0, 20: 40.0, 200: 30.0, 1000: 20.0}
    for rate in (20, 200, 1000):
        ours, theirs = both(bench, Case(rate, lasting[rate] * scale))
        at_200 = (ours, theirs) if rate == 200 else at_200
        rows.append(_latency_row(f"{rate:,}/s", ours, theirs, 15, 40))
        ours = measured(bench, Case(rate, lasting[rate] * scale, tick_gap="5 milliseconds"))
        rows.append(_latency_row(f"{rate:,}/s, tick_gap 5 ms", ours, theirs, 8, 30))
    rows.append(_latency_row("1/s", *both(bench, Case(1, lasting[1] * scale)), 12, 30))
    assert at_200 is not None
    rows.append(_ratio_row("WAL a message at 200/s", "kB", (p.wal / 1000 for p in at_200), 1.5))
    rows.append(_ratio_row("server at 200/s, 1 consumer", "CPU s/min", (p.cpu * 60 for p in at_200), 2.5))
    ten = both(bench, Case(200, lasting[200] * scale, consumers=10))
    rows.append(_ratio_row("server at 200/s, 10 consumers", "CPU s/min", (p.cpu * 60 for p in ten), 2.5))
    seconds = 30 * scale
    (ours_cpu, per_s), (theirs_cpu, _) = (_beside_noise(side, seconds) for side in sides)
    note = f"{per_s:,.0f} other commits a second"
    rows.append(_ratio_row("loop beside other commits", "CPU s/min", (ours_cpu, theirs_cpu), None, note))
    made = 0
    for count in (1, 20) if bench.quick else (1, 100, 1000):
        for side in sides:
            with side.connect() as conn:
                for number in range(made, count):
                    queue(conn, f"idle{number}")
                conn.execute("vacuum analyze")
        made = count
        what = f"idle loop, {count:,} queue" + ("s" if count > 1 else "")
        rows.append(
            _ratio_row(what, "CPU s/min", (_loop_cpu(side, seconds, rest=seconds / 3) for side in sides), 1.3)
        )
    busy = both(bench, Case(200, lasting[200] * scale))
    rows.append(_latency_row(f"200/s among {made:,} idle queues", *busy, 25, None))
    for side in sides:
        with side.connect() as conn:
            for number in range(made):
                conn.execute("select pgque.drop_queue(%s, true)", (f"idle{number}",))
    return rows
