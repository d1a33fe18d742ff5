"""Read and write offsets: the places where a stream stands, in Spark's checkpoint.

A place is a tick and the incarnation of its queue, because a queue that is dropped and created again, or
restored from a dump, has other messages behind a tick with the same id. An offset has {"tick": 17,
"incarnation": "…"} with option queue, {"ticks": {"orders": 17}, "incarnations": {"orders": "…"}} with option
queues. Offsets of pgque 0.7.0 and before have ticks alone, and get the incarnation of the queue that is there
with the next micro-batch.

A micro-batch may end within a window that has too many messages. Then "17:19:4711" stands for the tick: all
up to tick 17, and of the window between ticks 17 and 19 the ids up to 4711. A version before 0.9 refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias


class Place(NamedTuple):
    """Name a tick of a queue, and the incarnation that it belongs to; None if it is not known.

    Within a window, also the tick that ends it, and the id up to which it is read.
    """

    tick: int
    incarnation: str | None = None
    window: int | None = None
    after_id: int | None = None

    @property
    def is_part(self) -> bool:
        """Return whether the place is within a window."""
        return self.after_id is not None

    def same(self, other: Place) -> bool:
        """Return whether another place has the same tick and id."""
        return self._replace(incarnation=other.incarnation) == other

    def dumped(self) -> int | str:
        """Return the place as an offset has it."""
        return f"{self.tick}:{self.window}:{self.after_id}" if self.is_part else self.tick

    @classmethod
    def loaded(cls, written: int | str, incarnation: str | None) -> Place:
        """Return the place that an offset has."""
        if isinstance(written, int):
            return cls(written, incarnation)
        tick, window, after_id = (int(number) for number in written.split(":"))
        return cls(tick, incarnation, window, after_id)


# Of each queue
Places: TypeAlias = dict[str, Place]


def dump(queue: str | None, places: Mapping[str, Place]) -> dict[str, Any]:
    """Return places as the part of an offset: those of one queue, or of several if `queue` is None."""
    known = {name: place.incarnation for name, place in places.items() if place.incarnation is not None}
    if queue is None:
        ticks = {name: place.dumped() for name, place in places.items()}
        return {"ticks": ticks, **({"incarnations": known} if known else {})}
    one = {} if queue not in known else {"incarnation": known[queue]}
    return {"queue": queue, "tick": places[queue].dumped(), **one}


def load(queue: str | None, part: Mapping[str, Any]) -> Places:
    """Return the places of a part of an offset."""
    if queue is not None:
        return {queue: Place.loaded(part["tick"], part.get("incarnation"))}
    known = part.get("incarnations", {})
    return {name: Place.loaded(tick, known.get(name)) for name, tick in part["ticks"].items()}
