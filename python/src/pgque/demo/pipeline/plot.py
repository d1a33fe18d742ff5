"""The plot: messages per second of each micro-batch, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .processes import MicroBatch

_COLOURS = {"changes": "#1f77b4", "totals": "#ff7f0e"}
_RED = "#d62728"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 380, 70, 20, 60, 50


def _step(span: float, lines: int) -> float:
    """Return a round distance for about so many grid lines."""
    rough = max(span, 1e-9) / lines
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min(n for n in (1, 2, 5, 10) if n * power >= rough)


def save_plot(
    path: Path, title: str, batches: Sequence[MicroBatch], began: float, kills: Sequence[float]
) -> None:
    """Draw a bar per micro-batch, as wide as it took, and a line per kill. Times are seconds since 1970."""
    ends = [batch.start + batch.seconds for batch in batches] + [*kills, began + 1]
    span = max(ends) - began
    most = max([batch.rows / batch.seconds for batch in batches if batch.seconds], default=1.0)

    def x(time: float) -> float:
        return _LEFT + (time - began) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / most * (_HEIGHT - _TOP - _BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    step = _step(most, 5)
    for n in range(int(most / step) + 1):
        at = y(n * step)
        out.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{n * step:,.0f}</text>')
    step = _step(span, 10)
    for n in range(int(span / step) + 1):
        at = x(began + n * step)
        out.append(
            f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{n * step:g}</text>'
        )
    for batch in batches:
        if batch.seconds:
            left, top = x(batch.start), y(batch.rows / batch.seconds)
            wide, high = max(x(batch.start + batch.seconds) - left, 1), _HEIGHT - _BOTTOM - top
            name = escape(f"{batch.query} {batch.number}: {batch.rows:,} messages in {batch.seconds:.2f} s")
            out.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" stroke="white"'
                f' fill="{_COLOURS[batch.query]}" fill-opacity="0.6"><title>{name}</title></rect>'
            )
    for kill in kills:
        at = x(kill)
        out.append(
            f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{_RED}" stroke-dasharray="4"/>'
            f'<text x="{at:.1f}" y="{_TOP - 5}" text-anchor="middle" fill="{_RED}">kill -9</text>'
        )
    for n, (query, colour) in enumerate(_COLOURS.items()):
        left = _WIDTH - 190 + 90 * n
        out.append(f'<rect x="{left}" y="14" width="10" height="10" fill="{colour}" fill-opacity="0.6"/>')
        out.append(f'<text x="{left + 15}" y="23">{query}</text>')
    middle, centre = (_HEIGHT + _TOP - _BOTTOM) / 2, (_WIDTH + _LEFT) / 2
    turned = f'transform="translate(16 {middle}) rotate(-90)" text-anchor="middle"'
    out += [
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" stroke="black"/>',
        f'<text x="{centre}" y="{_HEIGHT - 10}" text-anchor="middle">seconds since the start</text>',
        f"<text {turned}>messages/s of a micro-batch</text>",
        "</svg>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(out) + "\n")
