"""Out of a backlog while a transaction holds xmin, and once it has let go, beside other queues in PostgreSQL."""

from __future__ import annotations

from bench import elsewhere, peers
from bench.measure import Bench, Row


def measure(bench: Bench) -> list[Row]:
    """Measure all systems, one process each, ten messages at a time."""
    return peers.measure(bench, [peers.Load("drain", "drain", 1, (peers.HELD,), peers.ALL, 10)])


def drain(bench: Bench) -> list[Row]:
    """Beside pgqueuer, procrastinate and a SKIP LOCKED table."""
    return elsewhere.run("bench.drain", bench)


if __name__ == "__main__":
    elsewhere.main(measure)
