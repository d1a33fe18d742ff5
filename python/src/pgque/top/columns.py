"""The columns of the overview: what they show, how wide they are, and how they sort."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from ..cli.common import visible
from ..ops.overview import STATES, Figures
from ..ops.units import number, span

LEAST = 12  # characters that a column without a width gets


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. A `width` of 0 is what the others leave.

    Texts stand below the first letter of the title. A narrow terminal leaves out the columns with the highest
    `rank` first, but none with 0.
    """

    name: str
    title: str
    width: int = 0
    right: bool = True  # numbers
    rank: int = 0

    def shown(self, text: str, left: int) -> str:
        """Return a text in the width of the column: cut, and padded. `left` is what the others leave."""
        width = self.width or left
        text = " " * (len(self.title) - len(self.title.lstrip())) + text
        if cell_len(text) >= width:
            text = f"{set_cell_size(text, width - 2)}…"
        return set_cell_size(text, width) if not self.right else " " * (width - cell_len(text)) + text


COLUMNS = (
    Column("state", "State", 7, right=False),
    Column("name", "Queue", right=False),
    Column("rate", "In/s", 7, rank=1),
    Column("out", "Out/s", 7, rank=4),
    Column("backlog", "Backlog", 9, rank=2),
    Column("oldest", "Oldest", 12, rank=3),
    Column("retries", "Retries", 9, rank=5),
    Column("dead", "Dead", 8),
)


def fitting(columns: Sequence[Column], width: int | None) -> list[int]:
    """Return the places of the columns that fit into a width; None is no limit."""
    kept = list(range(len(columns)))
    for at in sorted(kept, key=lambda n: -columns[n].rank):
        needed = sum(columns[n].width or LEAST for n in kept)
        if width is None or needed <= width or not columns[at].rank:
            break
        kept.remove(at)
    return kept


def count(value: float | None) -> str:
    """Return a number in at most 8 characters, up to a hundred thousand millions."""
    return f"{value / 1e6:,.2f} M" if value is not None and value >= 1e6 else number(value)


def cells(queue: Figures) -> list[str]:
    """Return the texts of a queue's row, in the order of COLUMNS. A paused queue takes no message in."""
    return [
        queue.state,
        visible(queue.name),
        "paused" if queue.paused else count(queue.rate),
        count(queue.out),
        count(queue.backlog),
        span(queue.oldest),
        count(queue.retries),
        count(queue.dead),
    ]


def ordered(queues: Iterable[Figures], column: str, backwards: bool = False) -> list[Figures]:
    """Return the queues by a column: the worst state, the highest number or the first name first.

    Numbers that are not known come last, whichever way the others go.
    """
    found = sorted(queues, key=lambda queue: queue.name)
    if column == "name":
        return found[::-1] if backwards else found
    if column == "state":
        found.sort(key=lambda queue: (STATES.index(queue.state), not queue.paused), reverse=backwards)
        return found
    known = [queue for queue in found if getattr(queue, column) is not None]
    known.sort(key=lambda queue: getattr(queue, column), reverse=not backwards)
    return known + [queue for queue in found if getattr(queue, column) is None]
