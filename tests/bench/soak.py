# ruff: noqa: RUF001
"""Half an hour of steady traffic with rotation every few seconds: is anything worse at the end than at the start?"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cost import Cost, Meter
from bench.crew import WARM_UP, Crew, Done, Job, judge, use_system
from bench.measure import Bench, Number, Row, percentile, ticking
from bench.systems import QUEUE, SYSTEMS

RATE = 500
SENDERS, WORKERS = 2, 2
ROTATION = "3 seconds"


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that must not get worse: by more than a share, and by more than what is in the noise."""

    key: str
    title: str
    unit: str
    share: float
    noise: float
    is_better_high: bool = False

    def worse(self, first: float, last: float) -> bool:
        """Say whether the last figure is worse than the first."""
        change = first - last if self.is_better_high else last - first
        return change > max(first * self.share, self.noise)


MEASURES = (
    Measure("per_s", "deliveries", "/s", 0.05, 5, is_better_high=True),
    Measure("p50_ms", "latency p50", " ms", 0.2, 10),
    Measure("p99_ms", "latency p99", " ms", 0.2, 30),
    # Two journals are compacted when they have 4 MB: so much comes and goes.
    Measure("mb", "size of the schema", " MB", 0.25, 16),
    Measure("dead", "dead tuples in the schema", "", 0, 100),
    Measure("wal_per_message", "WAL a message", " bytes", 0.1, 50),
    Measure("cpu_us_per_message", "CPU a message", " µs", 0.2, 50),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The meters at one time."""

    reading: Cost
    bytes: float
    dead: float


def samples(meter: Meter, until: float, period: float, is_over: Callable[[], bool]) -> list[Sample]:
    """Read the meters once a period."""
    taken = [Sample(meter.read(), meter.bytes(), meter.dead())]
    due = time.monotonic() + period
    while due <= until and not is_over():
        time.sleep(max(0.0, due - time.monotonic()))
        taken.append(Sample(meter.read(), meter.bytes(), meter.dead()))
        due += period
    return taken


def over_time(taken: Sequence[Sample], began: float, done: Sequence[Done]) -> dict[str, list[Number]]:
    """Return a line for each measure, with a point for each time between two samples."""
    arrivals = sorted(
        (t, (t - began - n / RATE) * 1000)
        for d in done
        for n, t in zip(d.numbers, d.times, strict=True)
        if n >= 0
    )
    lines: dict[str, list[Number]] = {key: [] for key in ("second", *(m.key for m in MEASURES))}
    position = 0
    for before, after in itertools.pairwise(taken):
        spent, end = after.reading - before.reading, after.reading.seconds
        late: list[float] = []
        while position < len(arrivals) and arrivals[position][0] <= end:
            if arrivals[position][0] > before.reading.seconds:
                late.append(arrivals[position][1])
            position += 1
        count = max(len(late), 1)
        late = late or [spent.seconds * 1000]
        for key, value in {
            "second": end - began,
            "per_s": count / spent.seconds,
            "p50_ms": percentile(late, 0.5),
            "p99_ms": percentile(late, 0.99),
            "mb": after.bytes / 1e6,
            "dead": after.dead,
            "wal_per_message": spent.wal_bytes / count,
            "cpu_us_per_message": (spent.cpu_s or 0.0) / count * 1e6,
        }.items():
            lines[key].append(value)
    return lines


def soak(bench: Bench) -> list[Row]:
    """A plain consumer, and two workers of another one."""
    seconds = (bench.minutes or (1 if bench.quick else 30)) * 60
    period = 10.0 if seconds >= 300 else 5.0
    part = max(1, round(min(60.0, seconds / 4) / period))  # samples at each end
    system = SYSTEMS["pgque"](bench.dsn, ("plain", "pool"))
    with Crew(bench, SENDERS + 1 + WORKERS, use_system) as team, Meter(bench) as meter:
        for each in SYSTEMS.values():
            each(bench.dsn).clear()  # what an earlier measurement left would count as ours
        system.set_up()
        meter.conn.execute(
            "select pgque.alter_queue(%s, jsonb_build_object('rotation_period', %s::text))", (QUEUE, ROTATION)
        )
        meter.conn.execute("vacuum analyze")
        with ticking(bench):
            # Both get each message; they end when all came, or after a while.
            expected, at_most = 2 * (int(seconds * RATE) + SENDERS * WARM_UP), seconds + 15
            jobs = [
                Job("pgque", "work", ("plain",), at_most, expected=expected),
                *[Job("pgque workers", "work", ("pool",), at_most, expected=expected)] * WORKERS,
                *(
                    Job("pgque", "send", (), seconds, rate=RATE, first=n, step=SENDERS)
                    for n in range(SENDERS)
                ),
            ]
            began = team.begin(jobs)
            taken = samples(meter, began + seconds, period, team.is_done)
            done = team.finish()
        system.clear()
    sent = sum(d.count for d in done[1 + WORKERS :])
    plain, pool = done[:1], done[1 : 1 + WORKERS]
    faults = [
        f"{name}: {fault}"
        for name, takers in (("plain", plain), ("pool", pool))
        if (fault := judge(sent, takers))
    ]
    lines = over_time(taken, began, [*plain, *pool])
    rows = []
    for measure in MEASURES:
        line = lines[measure.key][1:]  # without the start
        size = min(part, len(line) // 2) or 1
        # The size and the dead tuples rise and fall with rotation: what counts is how high.
        pick = max if measure.key in ("mb", "dead") else _mean
        first, last = float(pick(line[:size])), float(pick(line[-size:]))
        worse = measure.worse(first, last)
        rows.append(
            Row(
                f"soak, {seconds / 60:g} min at {RATE}/s: {measure.title}",
                f"{last:,.1f}{measure.unit}",
                "–",
                last / first if first else None,
                f"within {measure.share:.0%}" if measure.share else f"< {measure.noise:g} more",
                not worse and not (faults and measure.key == "per_s"),
                f"last {size * period:.0f} s; first {first:,.1f}{measure.unit}; tolerance at least"
                f" {measure.noise:g}{measure.unit}" + (f"; {'; '.join(faults)}" if faults else ""),
                {"first": first, "last": last, "sent": sent},
                {"second": lines["second"][1:], measure.key: line},
            )
        )
    return rows


def _mean(values: Sequence[Number]) -> float:
    return sum(values) / len(values)
