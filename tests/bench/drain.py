# ruff: noqa: RUF001
"""Out of a backlog while a transaction holds xmin, and once it has let go, beside other queues in PostgreSQL."""

from __future__ import annotations

from bench import elsewhere
from bench.measure import Bench, Row
from bench.peers import ALL, HELD, OURS, Cell, Load, measured, row_of
from bench.systems import SYSTEMS


def recovery(load: Load, cells: dict[str, Cell]) -> Row:
    """Tell how fast the systems were once nothing held xmin any more, with what was left behind."""
    best = max(cell.recovered_per_s for name, cell in cells.items() if name not in OURS)
    ours = max(cells[name].recovered_per_s for name in cells if name in OURS)
    return Row(
        f"{load.title}, in recovery",
        f"{ours:,.0f}/s",
        f"{cells['by hand'].recovered_per_s:,.0f}/s",
        ours / best if best else None,
        "> 1 ×",
        ours > best,
        "after a transaction that held xmin had ended: "
        + ", ".join(
            f"{SYSTEMS[name].title} {cell.recovered_per_s:,.0f}/s"
            if cell.recovered_per_s
            else f"{SYSTEMS[name].title} had nothing left"
            for name, cell in cells.items()
        ),
        {
            f"{name}: recovered_per_s": cell.recovered_per_s
            for name, cell in cells.items()
            if cell.recovered_per_s
        },
    )


def measure(bench: Bench) -> list[Row]:
    """Measure all systems, one process each, ten messages at a time."""
    wanted = [Load("drain", "drain", 1, (HELD,), ALL, 10)]
    return [
        row
        for load, state, cells in measured(bench, wanted)
        for row in (row_of(load, state, cells), recovery(load, cells))
    ]


def drain(bench: Bench) -> list[Row]:
    """Beside pgqueuer, procrastinate and a SKIP LOCKED table."""
    return elsewhere.run("bench.drain", bench)


if __name__ == "__main__":
    elsewhere.main(measure)
