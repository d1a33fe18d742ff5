"""The queues of a worker, and which of them it receives from next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..types import Message
from .batches import OwnBatch
from .left import LeftBatch
from .queue_settings import QueueSettings

Priority = Literal["weighted", "strict"]


@dataclass(slots=True, eq=False)
class Source:
    """One queue of a worker.

    `used` counts the messages received, divided by the weight: of the queues that have messages, the one with
    the least is next.
    """

    queue: str  # as the worker was given it
    weight: float
    settings: QueueSettings
    due_at: float = 0.0  # the earliest time of the next receive, by the monotonic clock
    polled_at: float = float("-inf")
    is_empty: bool = False  # the last receive brought nothing, and there was no notification since
    is_idle: bool = True  # the last receive brought nothing
    used: float = 0.0
    # For a consumer that reads alone: its last batch, and the messages that an earlier process left.
    batch: OwnBatch[Message] | None = None
    left: LeftBatch = field(default_factory=LeftBatch)


def check_weights(
    queue: str | None, queues: Mapping[str, float] | None, priority: Priority
) -> dict[str, float]:
    """Return the weights of a worker's queues.

    Raises TypeError without a queue, and ValueError for what is no weight or no priority.
    """
    if (queue is None) == (queues is None):
        raise TypeError("a worker needs queue=..., or queues={name: weight, ...}, and not both")
    if queues is not None and not isinstance(queues, Mapping):
        raise TypeError("queues must be a mapping of names to weights: {name: weight, ...}")
    if priority not in ("weighted", "strict"):
        raise ValueError(f"priority must be 'weighted' or 'strict', not {priority!r}")
    weights = {str(queue): 1.0} if queues is None else dict(queues)
    if not weights:
        raise ValueError("queues must name at least one queue")
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise ValueError(f"the weight of queue {name} must be a number above 0, not {weight!r}")
    return weights


class Sources:
    """The queues of a worker.

    Args:
        weights: the queues with their weights.
        priority: "weighted" shares messages by the weights where all queues have a backlog; "strict" receives
            from a queue only while those with a greater weight are empty; those of equal weight take turns.
        poll_interval: seconds after which an empty queue is polled again without a notification.
    """

    def __init__(self, weights: Mapping[str, float], priority: Priority, poll_interval: float) -> None:
        self._sources = [Source(queue, weight, QueueSettings(queue)) for queue, weight in weights.items()]
        self._strict = sorted(self._sources, key=lambda source: -source.weight)
        self._is_strict = priority == "strict"
        self._poll_interval = poll_interval
        self._used = 0.0  # of the source that was chosen last

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources)

    def next(self, now: float) -> Source | None:
        """Return the source to receive from, or None while all are empty or pause."""
        ready = [source for source in self._strict if self._ready_at(source) <= now]
        if not ready:
            return None
        if self._is_strict:
            equals = [source for source in ready if source.weight == ready[0].weight]
            return min(equals, key=lambda source: source.polled_at)
        return min(ready, key=lambda source: source.used)

    def next_at(self) -> float:
        """Return when a source is to be received from, if no notification comes before."""
        return min(self._ready_at(source) for source in self._sources)

    def _ready_at(self, source: Source) -> float:
        if source.batch is not None and source.batch.unfinished > 0:
            return math.inf
        if source.is_empty:
            return max(source.due_at, source.polled_at + self._poll_interval)
        return source.due_at

    def note_asked(self, source: Source, now: float) -> None:
        """Take note that messages are received from a source; a notification that comes meanwhile counts."""
        source.polled_at = now
        source.is_empty = True

    def note_received(self, source: Source, count: int) -> None:
        """Take note of the number of messages that were received."""
        if count == 0:
            source.is_idle = True
            return
        if source.is_idle:
            # A queue does not catch up on the share that it did not use while it was empty.
            source.used = max(source.used, self._used)
        self._used = source.used
        source.used += count / source.weight
        source.is_empty = source.is_idle = False

    def are_empty(self) -> bool:
        """Return whether no queue had messages when it was last received from."""
        return all(source.is_empty for source in self._sources)

    def of(self, queue: str | None) -> Source | None:
        """Return the source with a queue of this name."""
        for source in self._sources:
            if source.settings.name == queue:
                return source
        return None

    def wake(self, queue: str | None) -> None:
        """Take note that a queue may have messages; all queues, where none has this name."""
        found = self.of(queue)
        for source in self._sources if found is None else [found]:
            source.is_empty = False
