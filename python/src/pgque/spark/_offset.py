"""Where a stream stands, as Spark's checkpoint keeps it.

A place is a tick and the incarnation of its queue, because a queue that is dropped and created again, or
restored from a dump, has other messages behind a tick with the same id. An offset has {"tick": 17,
"incarnation": "…"} with option queue, {"ticks": {"orders": 17}, "incarnations": {"orders": "…"}} with option
queues. Offsets of pgque 0.7.0 and before have ticks alone, and get the incarnation of the queue that is there
with the next micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias


class Place(NamedTuple):
    """A tick of a queue, and the incarnation that it belongs to; None if it is not known."""

    tick: int
    incarnation: str | None = None


# Of each queue
Places: TypeAlias = dict[str, Place]


def dump(queue: str | None, places: Mapping[str, Place]) -> dict[str, Any]:
    """Return places as the part of an offset: those of one queue, or of several if `queue` is None."""
    known = {name: place.incarnation for name, place in places.items() if place.incarnation is not None}
    if queue is None:
        ticks = {name: place.tick for name, place in places.items()}
        return {"ticks": ticks, **({"incarnations": known} if known else {})}
    one = {} if queue not in known else {"incarnation": known[queue]}
    return {"queue": queue, "tick": places[queue].tick, **one}


def load(queue: str | None, part: Mapping[str, Any]) -> Places:
    """Return the places of a part of an offset."""
    if queue is not None:
        return {queue: Place(part["tick"], part.get("incarnation"))}
    known = part.get("incarnations", {})
    return {name: Place(tick, known.get(name)) for name, tick in part["ticks"].items()}
