# ruff: noqa: RUF001
"""What is measured beside other queues in PostgreSQL: rates, and what a million messages cost the server.

Each cell is one load in one state of the database for one system: a fresh schema, a checkpoint, then the clock.
The systems take turns within a load, on one server with the same durability.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from bench import elsewhere
from bench.cost import STATISTICS_DELAY, Cost, Meter, analytic_reader, held_xmin
from bench.crew import Crew, Done, Job, judge, use_system
from bench.measure import Bench, Number, Row, ticking
from bench.systems import SYSTEMS, payload

CLEAN, HELD, READER = "clean", "held xmin", "analytic reader"
SENDERS = ("pgque", "by hand", "pgqueuer", "procrastinate")
WORKERS = ("pgque workers", "by hand", "pgqueuer", "procrastinate")
OURS = ("pgque", "pgque workers")
ALL = ("pgque", "pgque workers", "by hand", "pgqueuer", "procrastinate")
BULK = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the systems: ``processes`` send or take, ``size`` at a time, for ``consumers``."""

    title: str
    verb: str
    processes: int
    states: tuple[str, ...]
    systems: tuple[str, ...] = SENDERS
    size: int | None = None
    consumers: int = 1


@dataclass(slots=True)
class Cell:
    """What one system did."""

    per_s: float
    messages: int
    cost: Cost
    fault: str = ""
    left: int = 0
    recovered_per_s: float = 0.0
    series: dict[str, list[Number]] = field(default_factory=dict)

    @property
    def per_cpu_second(self) -> float:
        """Return the messages for a CPU second of the server, 0 if that is not known."""
        return self.messages / self.cost.cpu_s if self.cost.cpu_s else 0.0

    def values(self) -> dict[str, Number]:
        """Return the figures."""
        counts: dict[str, Number] = {"per_s": self.per_s, "messages": self.messages, "left": self.left}
        if self.recovered_per_s:
            counts["recovered_per_s"] = self.recovered_per_s
        return counts | self.cost.per_million(self.messages)

    def in_words(self) -> str:
        """Tell the figures."""
        cost = self.cost.per_million(self.messages)
        cpu = f"{cost['cpu_s_per_million']:,.0f} s CPU, " if "cpu_s_per_million" in cost else ""
        return (
            f"{self.per_s:,.0f}/s: {cpu}{cost['wal_mb_per_million']:,.0f} MB WAL,"
            f" {cost['xids_per_million']:,.0f} xids, {cost['dead_per_million']:,.0f} dead"
            + (f"; {self.left:,} not taken in time" if self.left else "")
            + (f"; {self.fault}" if self.fault else "")
        )


def loads(bench: Bench) -> Iterator[Load]:
    """Give what is measured; of each kind something if it is to be quick."""
    quick = bench.quick
    one, two, three = (CLEAN,), (CLEAN, HELD), (CLEAN, HELD, READER)
    for n in (1,) if quick else (1, 4, 16):
        yield Load(f"single sends, {n} connection{'s' if n > 1 else ''}", "send", n, two)
    yield Load(f"sends of {BULK:,}", "bulk", 1, one if quick else two, size=BULK)
    for size in (10,) if quick else (1, 10, 100):
        with_size = tuple(s for s in SENDERS if size in (SYSTEMS[s].sizes or (1,)))
        yield Load(f"consume, {size} at a time", "work", 1, three, with_size, size)
    for n in (4,) if quick else (1, 4):
        yield Load(f"worker pool of {n}", "work", n, one if quick else three, WORKERS)
    for n in (5,) if quick else (1, 5, 20):
        title = f"fan-out to {n} consumer{'s' if n > 1 else ''}"
        yield Load(title, "fan-out", min(n, 4), one if quick else two, SENDERS, 100, n)


class Field:
    """Where the cells are measured."""

    def __init__(self, bench: Bench, team: Crew[Job, Done], meter: Meter) -> None:
        self.bench, self.team, self.meter = bench, team, meter
        self.seconds = 0.5 if bench.quick else 8.0
        self.drain_seconds, self.held_seconds = (2.0, 1.0) if bench.quick else (60.0, 40.0)

    def cell(self, load: Load, name: str, state: str) -> Cell:
        """Measure one."""
        consumers = tuple(f"c{n}" for n in range(load.consumers))
        system = SYSTEMS[name](self.bench.dsn, consumers)
        with ExitStack() as stack:
            system.set_up()
            stack.callback(system.clear)
            if name in OURS:
                stack.enter_context(ticking(self.bench))
            seconds = self.drain_seconds if load.verb == "drain" else self.seconds
            size = load.size if system.sizes else None
            speed = system.pace * (size or system.usual) * seconds
            count = BULK * max(1, round(min(system.most, speed * load.processes) / BULK))
            if load.verb in ("work", "drain"):
                system.open()
                for first in range(0, count, BULK):
                    system.send_many([payload(first + n) for n in range(BULK)])
                system.close()
            self.meter.conn.execute("vacuum analyze")
            self.meter.conn.execute("checkpoint")
            held = stack.enter_context(ExitStack())
            if state == HELD:
                held.enter_context(held_xmin(self.bench))
            elif state == READER:
                stack.enter_context(analytic_reader(self.bench, self.meter))
            dead = self.meter.dead()
            if load.verb in ("send", "bulk"):
                job = Job(name, load.verb, consumers, seconds, load.size)
                result = self._sends([job] * load.processes)
            else:
                parts = [consumers[n :: load.processes] for n in range(load.processes)]
                if load.consumers == 1:
                    parts = [consumers] * load.processes
                works = [Job(name, "work", part, seconds, size) for part in parts]
                if load.verb == "fan-out":
                    # Half the time for sending
                    count = max(1, round(min(system.most, speed) / 2 / load.consumers / 100)) * 100
                    sender = Job(name, "bulk", consumers, seconds, 100, count=count)
                    result = self._works(works, count, load.consumers, sender)
                else:
                    result = self._works(works, count, 1, None, held.close if load.verb == "drain" else None)
            time.sleep(0.1 if self.bench.quick else STATISTICS_DELAY)
            result.cost.dead = max(self.meter.dead() - dead, 0.0)
            return result

    def _sends(self, jobs: Sequence[Job]) -> Cell:
        began = self.team.begin(jobs)
        before = self.meter.read()
        done = self.team.finish()
        cost = self.meter.read() - before
        count = sum(d.count for d in done)
        return Cell(count / max(max(d.last for d in done) - began, 1e-9), count, cost)

    def _works(
        self,
        jobs: list[Job],
        count: int,
        copies: int,
        sender: Job | None,
        release: Callable[[], None] | None = None,
    ) -> Cell:
        """Have a backlog taken, or what a sender sends meanwhile; the meters run from the first delivery on.

        ``release`` lets go of xmin after ``held_seconds``.
        """
        expected = count * copies
        jobs = [replace(job, expected=expected) for job in jobs] + ([sender] if sender else [])
        began = self.team.begin(jobs)
        before, seen_before = self.meter.read(), 0
        at: list[Number] = []
        dead: list[Number] = []
        released = 0.0
        while not self.team.is_done() and self.team.seen < expected:
            if not sender and not seen_before and self.team.seen:
                before, seen_before = self.meter.read(), self.team.seen
            if release and not released and time.monotonic() > began + self.held_seconds:
                release()
                released = time.monotonic()
            if not sender and time.monotonic() > began + len(at) + 1:
                at.append(time.monotonic() - began)
                dead.append(self.meter.dead())
            time.sleep(0.002)
        after = self.meter.read()
        seen = self.team.seen
        done = self.team.finish()
        works = done[:-1] if sender else done
        times = sorted(t for d in works for t in d.times)
        if len(times) < 2:
            return Cell(0.0, max(len(times), 1), after - before, "NOTHING CAME")
        start = began if sender else times[0]
        capped = seen < expected
        cell = Cell(
            (len(times) - (0 if sender else 1)) / max(times[-1] - start, 1e-9),
            max(seen - seen_before, 1),
            after - before,
            judge(count, works, not capped, copies),
            expected - seen if sender else 0,
        )
        per_second = [0] * (int(times[-1] - began) + 1)
        for when in times:
            per_second[int(when - began)] += 1
        cell.series = {"second": at, "dead": dead, "per_s": list(per_second)}
        if released:
            cell.series["released"] = [released - began]
            later = sum(t > released for t in times)
            cell.recovered_per_s = later / max(times[-1] - released, 1e-9) if later > 1 else 0.0
        return cell


def row_of(load: Load, state: str, cells: dict[str, Cell]) -> Row:
    """Put the systems of one load and state in a line."""
    mine = next(name for name in cells if name in OURS)
    ours, hand = cells[mine], cells["by hand"]
    others = [cell for name, cell in cells.items() if name not in OURS]
    best = max(cell.per_cpu_second for cell in others)
    best_package = max(cells[name].per_cpu_second for name in cells if name not in (*OURS, "by hand"))
    ratio = ours.per_cpu_second / best if best else None
    over_packages = ours.per_cpu_second / best_package if best_package else 0.0
    is_faster = ours.per_s > max(cell.per_s for cell in others)
    faults = [name for name, cell in cells.items() if cell.fault]
    return Row(
        f"{load.title}, {state}",
        f"{ours.per_s:,.0f}/s",
        f"{hand.per_s:,.0f}/s",
        ratio,
        "> 1 ×, and faster" if state == HELD else "> 1 ×",
        (ratio is None or ratio > 1) and (state != HELD or is_faster) and not faults,
        f"per CPU second {over_packages:.2f} × the best package; each, for a million messages:\n"
        + "\n".join(f"{SYSTEMS[name].title} {cell.in_words()}" for name, cell in cells.items()),
        {"over_packages": over_packages}
        | {f"{name}: {key}": value for name, cell in cells.items() for key, value in cell.values().items()},
        {f"{name}: {key}": line for name, cell in cells.items() for key, line in cell.series.items()}
        if load.verb == "drain"
        else {},
    )


def measured(bench: Bench, wanted: Sequence[Load]) -> Iterator[tuple[Load, str, dict[str, Cell]]]:
    """Measure the loads; give each one with a state and what the systems did."""
    count = max(load.processes for load in wanted) + 1
    with Crew(bench, count, use_system) as team, Meter(bench) as meter:
        place = Field(bench, team, meter)
        for number, load in enumerate(wanted):
            for state in load.states:
                turn = load.systems if number % 2 == 0 else load.systems[::-1]
                cells = {name: place.cell(load, name, state) for name in turn}
                yield load, state, {name: cells[name] for name in load.systems}


def measure(bench: Bench) -> list[Row]:
    """Measure all loads; the ratio is messages per CPU second of the server over the best of the others."""
    return [row_of(*found) for found in measured(bench, list(loads(bench)))]


def peers(bench: Bench) -> list[Row]:
    """Beside pgqueuer, procrastinate and a SKIP LOCKED table."""
    return elsewhere.run("bench.peers", bench)


if __name__ == "__main__":
    elsewhere.main(measure)
