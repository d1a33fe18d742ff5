"""Charts of the last hours and days: messages sent, delivered, failed and given up, and the lag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from ..ops.units import number, span
from .page import Page, Row

# Each range with its buckets. A sample a minute fills a bucket of three minutes, whenever the bucket begins.
RANGES = {
    "1h": ("1 hour", timedelta(hours=1), 20),
    "6h": ("6 hours", timedelta(hours=6), 72),
    "24h": ("24 hours", timedelta(hours=24), 72),
    "7d": ("7 days", timedelta(days=7), 84),
}
RANGE = "6h"  # unless another one is asked for
MARKS = 4  # times below a chart
KEPT = 60.0  # seconds that viewers share a chart
LIMIT = 3_000  # milliseconds after which a page does without it


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the picture: its place, its height in percent, and what it says. None is a gap."""

    n: int
    height: float | None
    at: datetime
    words: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as the template draws it."""

    title: str
    bars: list[Bar]
    levels: list[str]  # labels from top to bottom
    times: list[datetime]  # labels from left to right
    summary: str


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts of a page, with links to other ranges, and the consumers to choose from."""

    charts: list[Chart] | None  # None: the database took too long
    ranges: list[tuple[str, str, bool]]  # words, address, whether it is the one that is shown
    days: bool  # whether the labels need the day
    range: str
    consumers: list[str]
    consumer: str


def shown(page: Page, queue: str | None = None, consumers: Sequence[str] = (), seen_by: str = "") -> Charts:
    """Return the charts of a queue, of the one of its consumers that is asked for, or of all queues.

    The page's fields `range` and `consumer` choose. `seen_by` tells roles apart that see different queues.
    Raises PgqueConsumerNotFoundError.
    """
    wanted = page.form.get("range", RANGE)
    if wanted not in RANGES:
        wanted = RANGE
    consumer = page.form.get("consumer") if queue is not None else ""

    def taken() -> list[Chart] | None:
        return _taken(page, wanted, queue, consumer)

    key = f"charts {wanted} {seen_by} {queue!r} {consumer!r}"
    charts = page.site.samples.get(page.session.database, key, taken, KEPT)
    others = {name: value for name, value in page.form.fields if name != "range"}
    path = page.request.scope["pgque.path"]
    return Charts(
        charts,
        [(RANGES[key][0], page.url(path, **others, range=key), key == wanted) for key in RANGES],
        RANGES[wanted][1] > timedelta(days=1),
        wanted,
        list(consumers),
        consumer,
    )


def _taken(page: Page, wanted: str, queue: str | None, consumer: str) -> list[Chart] | None:
    words, since, buckets = RANGES[wanted]
    rows = page.within(
        LIMIT,
        "select h.* from pgque.history(%s, %s, %s, %s) as h order by h.start_at",
        [queue, consumer or None, since, buckets],
    )
    if rows is None:
        return None
    width = since / buckets
    seconds = width.total_seconds()

    def rate(column: str) -> Iterable[float | None]:
        return (None if row[column] is None else row[column] / seconds for row in rows)

    def each(value: float) -> str:
        return f"{number(value)} a second"

    found = [
        drawn("Sent, messages a second", words, rows, width, rate("sent"), each, 0.001),
        drawn("Delivered, messages a second", words, rows, width, rate("delivered"), each, 0.001),
    ]
    if queue is not None:
        found += [
            drawn("Failed deliveries", words, rows, width, (row["failed"] for row in rows), number),
            drawn("Messages given up", words, rows, width, (row["dead"] for row in rows), number),
            drawn("Oldest pending, seconds", words, rows, width, (row["lag_seconds"] for row in rows), span),
        ]
    return found


def drawn(
    title: str,
    words: str,
    rows: Sequence[Row],
    width: timedelta,
    values: Iterable[float | None],
    say: Callable[[float], str],
    least: float = 1,
) -> Chart:
    """Return a chart of values, one a bucket; None is one that was not sampled.

    `say` tells a value. The scale ends at `least` or above, so that a small value is no high bar.
    """
    points = list(values)
    known = [value for value in points if value is not None]
    highest = max(known, default=0.0)
    top = _round_up(highest, least if highest else 1)
    bars = [
        Bar(
            n,
            None if value is None else round(100 * value / top, 2),
            row["start_at"].astimezone(timezone.utc),
            f"{span(width)}: {'no sample' if value is None else say(value)}",
        )
        for n, (row, value) in enumerate(zip(rows, points, strict=True))
    ]
    start = bars[0].at
    times = [start + len(bars) * width * n / (MARKS - 1) for n in range(MARKS)]
    missing = span((len(points) - len(known)) * width)
    if not known:
        summary = f"No samples in the last {words}."
    else:
        last = "no sample" if points[-1] is None else say(points[-1])
        summary = f"The last {words}: {last} in the last {span(width)}, {say(highest)} at most."
        summary += f" No samples for {missing}." if len(known) < len(points) else ""
    return Chart(
        title,
        bars,
        [number(top * part) if top >= 1 else f"{top * part:g}" for part in (1, 0.5, 0)],
        times,
        summary,
    )


def _round_up(value: float, least: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten, at least `least`, which is such a power."""
    step = least
    while True:
        for factor in (1, 2, 5):
            if value <= step * factor:
                return step * factor
        step *= 10
