"""End-to-end latency at offered rates, beside other queues in PostgreSQL.

An open loop: message n is due n / rate seconds after the start, and its latency counts from then, whenever it
was really sent. What never came counts as if it came at the end.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from bench import elsewhere
from bench.crew import WARM_UP, Crew, Done, Job, use_system
from bench.measure import Bench, Row, percentile, ticking
from bench.peers import ALL, OURS
from bench.systems import SYSTEMS

SENDERS = 4
RATES, QUICK_RATES = (100, 500, 1000, 2000), (200,)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from due to taken."""

    p50: float
    p99: float
    p999: float
    missing: int

    @classmethod
    def of(cls, done: Done, began: float, rate: float, warm_up: float, seconds: float, end: float) -> Latency:
        """Work out the figures of what one taker got, without the messages of the first seconds."""
        arrivals: dict[int, float] = {}
        for number, at in zip(done.numbers, done.times, strict=True):
            arrivals.setdefault(number, at)
        due = range(int(warm_up * rate), int(seconds * rate))
        times = [(arrivals.get(n, end) - began - n / rate) * 1000 for n in due]
        p50, p99, p999 = (percentile(times, share) for share in (0.5, 0.99, 0.999))
        return cls(p50, p99, p999, sum(n not in arrivals for n in due))

    def in_words(self) -> str:
        """Tell the figures."""
        text = " / ".join(f"{ms:,.0f}" if ms >= 10 else f"{ms:.1f}" for ms in (self.p50, self.p99, self.p999))
        return f"{text} ms" + (f", {self.missing:,} NEVER CAME" if self.missing else "")


def at_rate(bench: Bench, team: Crew[Job, Done], name: str, rate: int) -> Latency:
    """Offer messages at a rate for a while to one system with one worker as its documentation has it."""
    # Afterwards: what is on its way may take so long.
    seconds, warm_up, afterwards = (2.0, 0.5, 1.0) if bench.quick else (40.0, 5.0, 10.0)
    expected = SENDERS * WARM_UP + int(seconds * rate)
    system = SYSTEMS[name](bench.dsn)
    with ExitStack() as stack:
        system.set_up(notify=True)
        stack.callback(system.clear)
        if name in OURS:
            stack.enter_context(ticking(bench))
        sends = [
            Job(name, "send", ("c0",), seconds, rate=rate, first=n, step=SENDERS) for n in range(SENDERS)
        ]
        began, done = team.run([Job(name, "work", ("c0",), seconds + afterwards, expected=expected), *sends])
    return Latency.of(done[0], began, rate, warm_up, seconds, began + seconds + afterwards)


def measure(bench: Bench) -> list[Row]:
    """Measure all systems at all rates."""
    rows = []
    with Crew(bench, SENDERS + 1, use_system) as team:
        for rate in QUICK_RATES if bench.quick else RATES:
            found = {name: at_rate(bench, team, name, rate) for name in ALL}
            ours = found["pgque"]
            rows.append(
                Row(
                    f"latency at {rate:,}/s, p50 / p99 / p99.9",
                    ours.in_words(),
                    found["by hand"].in_words(),
                    ours.p50 / found["by hand"].p50,
                    "all come",
                    not any(found[name].missing for name in OURS),
                    "\n".join(
                        f"{SYSTEMS[name].title} {found[name].in_words()}" for name in ALL if name != "pgque"
                    ),
                    {"rate": rate}
                    | {
                        f"{name}: {key}": getattr(latency, key)
                        for name, latency in found.items()
                        for key in Latency.__slots__
                    },
                )
            )
    return rows


def latency(bench: Bench) -> list[Row]:
    """Beside pgqueuer, procrastinate and a SKIP LOCKED table."""
    return elsewhere.run("bench.latency", bench)


if __name__ == "__main__":
    elsewhere.main(measure)
