"""Recurring messages that a worker registers when it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..types import Event


@dataclass(frozen=True, slots=True)
class Recurring:
    """The arguments of `client.recurring.create` for a queue of a worker."""

    name: str
    queue: str
    cron: str
    event: Event
    timezone: str
    catch_up: str

    def check_new(self, others: Iterable[Recurring]) -> None:
        """Raise ValueError if one of the others has the same name."""
        if any(other.name == self.name for other in others):
            raise ValueError(
                f"the worker has a recurring message {self.name!r}: give this one a name of its own, name=..."
            )


def own_queue(queues: Iterable[str], queue: str | None, what: str) -> str:
    """Return the queue that a worker sends to: the one that is named, or its only one.

    Raises ValueError if the worker has several and none is named, or does not receive from that one.
    """
    names = list(queues)
    if queue is None and len(names) == 1:
        return names[0]
    if queue not in names:
        raise ValueError(f"{what} needs a queue of its worker: queue=..., one of {', '.join(names)}")
    return queue
