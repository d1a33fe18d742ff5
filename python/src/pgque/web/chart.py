"""Charts of the last hours: what was sent, from the ticks, and how far consumers lagged, from samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..ops.units import span
from .page import Page

HOURS = 3
BUCKETS = 90
WIDTH = timedelta(hours=HOURS) / BUCKETS  # of a bucket
KEPT = 60.0  # seconds that viewers share a chart
LIMIT = 3_000  # milliseconds after which a page does without it


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the picture: its place, its height in percent, and what it says."""

    n: int
    height: float
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What the template needs to draw the picture."""

    bars: list[Bar]
    levels: list[str]  # labels from top to bottom
    times: list[str]  # labels from left to right
    summary: str


def rates(page: Page, queues: Sequence[str]) -> Chart | None:
    """Return the chart of how many messages a second were sent to these queues together.

    None if it takes too long: while a queue is dropped, the tables of its ticks are locked.
    """
    rows = page.within(
        LIMIT,
        "select r.n, sum(r.events)::float8 as events from unnest(%s::text[]) as q (name)"
        " cross join lateral pgque.queue_rates(q.name, %s, %s) with ordinality as r (start_at, events, n)"
        " group by r.n order by r.n",
        [list(queues), timedelta(hours=HOURS), BUCKETS],
    )
    if rows is None:
        return None
    values = [row["events"] / WIDTH.total_seconds() for row in rows]
    return drawn(page.value("select pgque.clock()"), values, lambda rate: f"{_short(rate)} a second")


def lags(page: Page, queue: str) -> Chart | None:
    """Return the chart of the age of the oldest pending message of a queue, or None without samples.

    None too if it takes too long.
    """
    now: datetime = page.value("select pgque.clock()")
    rows = page.within(
        LIMIT,
        "select floor(extract(epoch from %(now)s - l.at) / %(width)s)::int as back, max(l.lag_seconds) as lag"
        " from pgque.consumer_lags(%(queue)s, null, %(since)s) as l group by 1 limit %(most)s",
        {
            "now": now,
            "width": WIDTH.total_seconds(),
            "queue": queue,
            "since": timedelta(hours=HOURS),
            "most": 2 * BUCKETS,
        },
    )
    if not rows:
        return None
    found = {BUCKETS - 1 - row["back"]: row["lag"] for row in rows}
    return drawn(now, [found.get(n, 0.0) for n in range(BUCKETS)], span)


def drawn(now: datetime, values: Sequence[float], words: Callable[[float], str]) -> Chart:
    """Return a chart of values, one a bucket, the last of which ends now; `words` tells a value."""
    highest = max(values, default=0.0)
    top = _round_up(highest)
    bars = []
    for n, value in enumerate(values):
        until = now - (len(values) - 1 - n) * WIDTH
        title = f"{until - WIDTH:%H:%M} to {until:%H:%M} UTC: {words(value)}"
        bars.append(Bar(n, round(100 * value / top, 2), title))
    times = [f"{now - timedelta(hours=back):%H:%M}" for back in range(HOURS, -1, -1)]
    last = values[-1] if values else 0.0
    summary = (
        f"The last {HOURS} hours, times in UTC. {words(last)} in the last"
        f" {WIDTH.total_seconds() / 60:.0f} min, {words(highest)} at most."
    )
    return Chart(bars, [_short(top * part) for part in (1, 0.5, 0)], times, summary)


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten, at least 1."""
    step = 1.0
    while True:
        for factor in (1, 2, 5):
            if value <= step * factor:
                return step * factor
        step *= 10


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"
