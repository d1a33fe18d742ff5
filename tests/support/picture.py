"""Print a picture of the documents: `python -m support.picture message > sql/message.svg`, or `make picture`.

No background, and a grey that can be read on white and on black, since a README is shown on both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape

Point = tuple[float, float]

WIDTH = 900
GREY, BLUE, GREEN, YELLOW, PINK, PURPLE = "#768390", "#2f81f7", "#2da44e", "#d4a72c", "#e85aad", "#8957e5"
TITLE = 15
LABEL = 12.5
LINE = 17  # from one line of text to the next


def text(
    at: Point, lines: Sequence[str], colour: str = GREY, size: float = LABEL, anchor: str = "middle"
) -> str:
    """Return lines of text, the first with its base line at a point."""
    x, y = at
    weight = ' font-weight="bold"' if size == TITLE else ""
    return "\n".join(
        f'<text x="{x:g}" y="{y + n * LINE:g}" fill="{colour}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
        f"{escape(line)}</text>"
        for n, line in enumerate(lines)
    )


def box(corner: Point, size: Point, title: str, lines: Sequence[str], colour: str) -> str:
    """Return a rounded box with a title and lines of text in its middle."""
    (x, y), (width, height) = corner, size
    top = y + height / 2 - len(lines) * LINE / 2 + TITLE / 3
    return "\n".join(
        (
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{colour}" fill-opacity="0.12"'
            f' stroke="{colour}" stroke-width="1.5"/>',
            text((x + width / 2, top), [title], colour, TITLE),
            text((x + width / 2, top + LINE), lines),
        )
    )


def arrow(points: Sequence[Point], colour: str = GREY) -> str:
    """Return a line through points with a head at its end."""
    way = " ".join(f"{x:g},{y:g}" for x, y in points)
    return (
        f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.5"'
        f' marker-end="url(#head-{colour[1:]})"/>'
    )


def head(colour: str) -> str:
    """Return the definition of an arrow's head."""
    return (
        f'<marker id="head-{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"'
        f' orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{colour}"/></marker>'
    )


def log(left: float, top: float, right: float, bottom: float) -> str:
    """Return the event log: messages enter at the left; ticks cut it into windows."""
    ticks = {"tick 42": left + 130, "tick 41": left + 270, "tick 40": right}
    edges = [left, *ticks.values()]
    parts = ("no tick yet", "next window", "window")
    looks = ((GREY, 0.0), (BLUE, 0.25), (BLUE, 1.0))
    middle = top + 60
    found = [
        f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}" rx="6" fill="none"'
        f' stroke="{GREY}" stroke-width="1.5"/>',
        f'<rect x="{edges[2]:g}" y="{top:g}" width="{right - edges[2]:g}" height="{bottom - top:g}" fill="{BLUE}"'
        ' fill-opacity="0.12"/>',
    ]
    for n, (part, (colour, opacity)) in enumerate(zip(parts, looks, strict=True)):
        centre = (edges[n] + edges[n + 1]) / 2
        found += [
            f'<rect x="{centre + 28 * (m - 1.5) - 7:g}" y="{middle - 18:g}" width="14" height="14" rx="2" fill="{colour}"'
            f' fill-opacity="{opacity:g}" stroke="{colour}" stroke-width="1.5"/>'
            for m in range(4 - (n == 0))
        ]
        found.append(text((centre, middle + 24), [part], colour))
    for name, x in ticks.items():
        found += [
            f'<line x1="{x:g}" y1="{top - 8:g}" x2="{x:g}" y2="{bottom:g}" stroke="{PURPLE}" stroke-width="2"/>',
            text((x, top - 12), [name], PURPLE),
        ]
    found.append(text((left + 10, top + LINE), ["log: three tables"], anchor="start"))
    return "\n".join(found)


def message() -> str:
    """Return the picture of a message's way."""
    parts = [
        box((16, 92), (120, 62), "1  send()", ["stores a row"], GREEN),
        arrow([(136, 123), (172, 123)], GREEN),
        box((246, 8), (120, 30), "2  ticker", [], PURPLE),
        arrow([(306, 38), (306, 52)], PURPLE),
        log(176, 76, 586, 166),
        text((640, 94), ["reads one", "window"], BLUE),
        arrow([(586, 128), (712, 128)], BLUE),
        box((716, 84), (168, 70), "3  receive()", ["delivers a batch", "with an id"], BLUE),
        arrow([(800, 154), (800, 208)], BLUE),
        box((716, 212), (168, 70), "4  your code", ["a worker's batch", "has a lease"], BLUE),
        # rejected
        arrow([(716, 232), (604, 232)], YELLOW),
        text((660, 224), ["nack, release"], YELLOW),
        text((660, 249), ["lease expired"], YELLOW),
        box((420, 206), (180, 66), "5  retry queue", ["failed, released,", "delayed"], YELLOW),
        arrow([(582, 206), (582, 190), (672, 190), (672, 142), (712, 142)], YELLOW),
        text((680, 180), ["redelivered", "when due"], YELLOW, anchor="start"),
        arrow([(420, 225), (240, 225), (240, 170)], YELLOW),
        text((250, 200), ["delayed, due:", "into the log"], YELLOW, anchor="start"),
        arrow([(76, 154), (76, 256), (416, 256)], YELLOW),
        text((84, 249), ["sent with a delay"], YELLOW, anchor="start"),
        # done
        arrow([(716, 266), (660, 266), (660, 373), (604, 373)], GREEN),
        text((652, 322), ["ack"], GREEN, anchor="end"),
        box((420, 340), (180, 66), "6  journal", ["one row: the batch", "is closed"], GREEN),
        arrow([(420, 373), (304, 373)], GREY),
        box((120, 340), (180, 66), "rotation", ["truncates a table that", "all positions passed"], GREY),
        arrow([(800, 282), (800, 336)], PINK),
        text((808, 314), ["last attempt"], PINK, anchor="start"),
        box((716, 340), (168, 66), "7  dead letter", ["kept for you:", "requeue, replay, purge"], PINK),
    ]
    return drawing(
        "A message's way: send, tick, window, delivery, ack or nack, retry queue, dead letter", 416, parts
    )


def messages(left: float, top: float, count: int, colour: str, opacity: float) -> str:
    """Return a row of messages."""
    return "\n".join(
        f'<rect x="{left + 24 * n:g}" y="{top:g}" width="14" height="14" rx="2" fill="{colour}"'
        f' fill-opacity="{opacity:g}" stroke="{colour}" stroke-width="1.5"/>'
        for n in range(count)
    )


def table(
    left: float, right: float, lines: Sequence[str], counts: Sequence[tuple[float, int]], colour: str
) -> str:
    """Return one of the three tables of the log, with messages."""
    top, bottom = 62, 132
    return "\n".join(
        (
            f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}" rx="6"'
            f' fill="{colour}" fill-opacity="0.08" stroke="{colour}" stroke-width="1.5"/>',
            text((left + 14, top + 18), lines, colour, anchor="start"),
            *(messages(x, top + 40, count, colour, 0.6) for x, count in counts),
        )
    )


def positions() -> str:
    """Return the picture of positions over the windows of a log."""
    ticks = {"tick 39": 234.0, "tick 40": 362.0, "tick 41": 490.0, "tick 42": 660.0}
    parts = [
        text((16, 24), ["older messages"], anchor="start"),
        arrow([(130, 20), (760, 20)]),
        text((884, 24), ["newer messages"], anchor="end"),
        table(16, 222, ["table 0"], [(30, 7)], GREY),
        table(226, 484, ["table 1"], [(250, 4), (378, 4)], BLUE),
        table(488, 884, ["table 2: send appends here"], [(508, 6), (680, 3)], GREEN),
    ]
    for name, x in ticks.items():
        parts += [
            f'<line x1="{x:g}" y1="54" x2="{x:g}" y2="138" stroke="{PURPLE}" stroke-width="2"/>',
            text((x, 49), [name], PURPLE),
        ]
    parts += [
        text((790, 156), ["no tick yet:", "not visible"]),
        # the windows that are read
        arrow([(362, 200), (362, 144)], YELLOW),
        text((362, 218), ["position of billing", "(a pool)"], YELLOW),
        f'<rect x="366" y="144" width="120" height="8" fill="{YELLOW}" fill-opacity="0.5"/>',
        text((426, 170), ["window"], YELLOW),
        arrow([(426, 176), (458, 196)], YELLOW),
        box(
            (462, 178),
            (176, 70),
            "batch of worker w1",
            ["lease until 12:00:30,", "then any worker gets it"],
            YELLOW,
        ),
        arrow([(660, 200), (660, 144)], PINK),
        text((660, 218), ["position of audit"], PINK, anchor="start"),
        text(
            (16, 160),
            ["passed by all positions:", "the next rotation empties", "table 0 with TRUNCATE"],
            anchor="start",
        ),
    ]
    return drawing(
        "A log: ticks cut it into windows; each consumer has a position; a worker has a lease", 262, parts
    )


def drawing(title: str, height: int, parts: Sequence[str]) -> str:
    """Return a picture of these parts."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            ' role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{title}</title>",
            "<defs>",
            *(head(colour) for colour in (GREY, BLUE, GREEN, YELLOW, PINK, PURPLE)),
            "</defs>",
            *parts,
            "</svg>",
        )
    )


if __name__ == "__main__":
    print({"message": message, "positions": positions}[sys.argv[1]]())
