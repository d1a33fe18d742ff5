"""The plot, as an SVG: messages sent and processed, how far each stage is behind, and its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from .report import QUERIES, Counts, Run

# What is drawn, with its colour: `sent` is the load, `tally` the plain consumer at the end.
_COLOURS = {"sent": "#555555", "changes": "#1f77b4", "totals": "#ff7f0e", "tally": "#2ca02c"}
_LABELS = {
    "sent": "sent: the load",
    **{query: f"{query}: {name}" for query, name in QUERIES.items()},
    "tally": "tally: plain consumer of what changes sends",
}
_RED = "#d62728"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM, _GAP = 900, 680, 80, 20, 86, 46, 34
_PANELS = (0.46, 0.27, 0.27)  # shares of the height

Curve = list[tuple[float, int]]


def _step(span: float, lines: int) -> float:
    """Return a round distance for about so many grid lines."""
    rough = max(span, 1e-9) / lines
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min(n for n in (1, 2, 5, 10) if n * power >= rough)


class _Time:
    """The axis of time, which all diagrams share. Of each of `cuts` a twentieth is left, or a second."""

    def __init__(self, begin: float, end: float, cuts: Sequence[tuple[float, float]]) -> None:
        self.begin, self.end, self._cuts = begin, end, cuts
        self.span = end - begin - sum(until - since for since, until in cuts)
        self._gap = max(self.span / 20, 1.0)

    def x(self, time: float) -> float:
        """Return the place of a moment."""
        wide = self.span + sum(min(until - since, self._gap) for since, until in self._cuts)
        return _LEFT + self._worth(min(max(time, self.begin), self.end)) / wide * (_WIDTH - _LEFT - _RIGHT)

    def _worth(self, time: float) -> float:
        worth = time - self.begin
        for since, until in self._cuts:
            inside = min(max(time - since, 0.0), until - since)
            worth -= inside * (1 - min(self._gap / (until - since), 1.0))
        return worth

    def is_cut(self, time: float) -> bool:
        """Whether a moment is where the axis is squeezed."""
        return any(since < time < until and until - since > self._gap for since, until in self._cuts)


class _Panel:
    """One of the diagrams."""

    def __init__(self, number: int, title: str, most: float, time: _Time) -> None:
        room = _HEIGHT - _TOP - _BOTTOM - _GAP * (len(_PANELS) - 1)
        self.top = _TOP + room * sum(_PANELS[:number]) + _GAP * number
        self.bottom = self.top + room * _PANELS[number]
        self._title, self._most, self.x = title, max(most, 1), time.x

    def y(self, value: float) -> float:
        return self.bottom - value / self._most * (self.bottom - self.top)

    def frame(self) -> Iterator[str]:
        """Draw the title, the axes and the grid."""
        yield f'<text x="{_LEFT}" y="{self.top - 8:.1f}" font-weight="bold">{escape(self._title)}</text>'
        step = _step(self._most, 4)
        for n in range(int(self._most / step) + 1):
            at = self.y(n * step)
            yield f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#e4e4e4"/>'
            yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{n * step:,.0f}</text>'
        axes = f"M{_LEFT} {self.top:.1f}V{self.bottom:.1f}H{_WIDTH - _RIGHT}"
        yield f'<path d="{axes}" fill="none" stroke="black"/>'

    def steps(self, name: str, curve: Curve) -> str:
        """Draw a value that stays until it changes."""
        path, last = "", None
        for time, value in curve:
            if value != last:
                at = f"{self.x(time):.1f}"
                path += f"M{at} {self.y(value):.1f}" if last is None else f"H{at}V{self.y(value):.1f}"
                last = value
        dash = ' stroke-dasharray="6 3"' if name == "sent" else ""
        path += f"H{_WIDTH - _RIGHT}"
        return (
            f'<path class="{name}" d="{path}" fill="none" stroke="{_COLOURS[name]}" stroke-width="2"{dash}/>'
        )


def save_plot(path: Path, title: str, run: Run) -> None:
    """Draw the run from its first message on, with a line for each kill."""
    samples = run.samples or [(run.began, Counts())]
    curves: dict[str, Curve] = {
        "sent": [(time, counts.sent) for time, counts in samples],
        "changes": [(time, counts.changed) for time, counts in samples],
        "totals": [(time, counts.added + counts.dead) for time, counts in samples],
        "tally": [(time, counts.received) for time, counts in samples],
    }
    behind: dict[str, Curve] = {  # ticks are seen a little late: never below 0
        "changes": [(time, max(c.sent - c.changed - c.dead, 0)) for time, c in samples],
        "totals": [(time, max(c.sent - c.added - c.dead, 0)) for time, c in samples],
        "tally": [(time, max(c.changed - c.received, 0)) for time, c in samples],
    }
    first = run.first
    end = max([first + 1, samples[-1][0], *(batch.start + batch.seconds for batch in run.batches)]) + 0.2
    starts = _starts(run)
    time = _Time(first - 0.2, end, [(since, until) for since, until, _ in starts])
    fastest = max([batch.rows / batch.seconds for batch in run.batches if batch.seconds], default=1.0)
    panels = [
        _Panel(0, "messages sent, and processed", samples[-1][1].sent, time),
        _Panel(1, "messages behind", max(value for curve in behind.values() for _, value in curve), time),
        _Panel(2, "messages/s of each micro-batch, as wide as it took", fastest, time),
    ]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for n, (name, label) in enumerate(_LABELS.items()):
        left, top = _LEFT + 390 * (n % 2), 34 + 16 * (n // 2)
        out.append(f'<rect x="{left}" y="{top}" width="14" height="8" fill="{_COLOURS[name]}"/>')
        out.append(f'<text x="{left + 20}" y="{top + 8}">{escape(label)}</text>')
    out += _bands(starts, panels)
    for panel in panels:
        out += panel.frame()
    out += [panels[0].steps(name, curve) for name, curve in curves.items()]
    out += [panels[1].steps(name, curve) for name, curve in behind.items()]
    out += _bars(run, panels[2])
    step = _step(time.span, 12)
    for n in range(int((end - first) / step) + 1):
        if not time.is_cut(first + n * step):
            at = time.x(first + n * step)
            out.append(f'<text x="{at:.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{n * step:g}</text>')
    out += [
        f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        f"seconds since the first message was sent, {first - run.began:.0f} s after the start</text>",
        "</svg>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(out) + "\n")


def _bars(run: Run, panel: _Panel) -> Iterator[str]:
    for batch in run.batches:
        if batch.seconds:
            left, top = panel.x(batch.start), panel.y(batch.rows / batch.seconds)
            wide = max(panel.x(batch.start + batch.seconds) - left, 1)
            name = escape(f"{batch.query} {batch.number}: {batch.rows:,} messages in {batch.seconds:.2f} s")
            yield (
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{panel.bottom - top:.1f}"'
                f' fill="{_COLOURS[batch.query]}" fill-opacity="0.6" stroke="white">'
                f"<title>{name}</title></rect>"
            )


def _starts(run: Run) -> list[tuple[float, float, str]]:
    """Return when Spark starts, up to the end of its first micro-batch, and the label: first after the load,
    then after each kill."""
    moments = list(run.kills)
    if run.batches and not any(batch.start <= run.loaded for batch in run.batches):
        moments = sorted({run.loaded, *moments})
    found = []
    for since, after in zip(moments, [*moments, math.inf][1:], strict=True):
        ends = [batch.start + batch.seconds for batch in run.batches if batch.start > since]
        until = min([*ends, after]) if ends else since + 0.01
        what = ["kill -9"] if since in run.kills else []
        if until in ends:
            what.append(f"{until - since:.0f} s to Spark's first micro-batch")
        found.append((since, until, ", ".join(what)))
    return found


def _bands(starts: Sequence[tuple[float, float, str]], panels: Sequence[_Panel]) -> Iterator[str]:
    """Mark when Spark starts, and each kill."""
    for n, (since, until, label) in enumerate(starts):
        is_kill = label.startswith("kill")
        colour = _RED if is_kill else _COLOURS["sent"]
        left, right = panels[0].x(since), panels[0].x(until)
        for panel in panels:
            yield (
                f'<rect x="{left:.1f}" y="{panel.top:.1f}" width="{right - left:.1f}"'
                f' height="{panel.bottom - panel.top:.1f}" fill="{colour}" fill-opacity="0.1"/>'
            )
            if is_kill:
                yield (
                    f'<path class="kill" d="M{left:.1f} {panel.top:.1f}V{panel.bottom:.1f}" stroke="{_RED}"'
                    ' stroke-dasharray="4"/>'
                )
        at = panels[0].bottom - 6 - 15 * (n % 3)
        yield f'<text x="{left + 4:.1f}" y="{at:.1f}" fill="{colour}">{label}</text>'
