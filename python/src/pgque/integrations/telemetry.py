"""Call the observers of handlers, OpenTelemetry and Prometheus, if the program has enabled them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import datetime, timezone
from typing import Final, Protocol

from ..types import Message

# Upper bounds of histograms, in seconds: from 1 ms to an hour.
BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 1800.0, 3600.0),
)

_NOTHING: Final = nullcontext()


class Observer(Protocol):
    """An object with methods that are called for the messages that a worker or consumer handles."""

    def handling(self, messages: Sequence[Message], consumer: str) -> AbstractContextManager[None]:
        """Return a block in which the handler of messages runs, of one or of a batch."""

    def note_outcome(self, message: Message, consumer: str, outcome: str) -> None:
        """Take note of an outcome: ack, archive, nack, dead, release or lost."""

    def note_overrun(self, message: Message, consumer: str) -> None:
        """Take note that a handler runs beyond its time limit, or without one for many leases."""

    def note_reconnect(self, queue: str, consumer: str) -> None:
        """Take note that the database is connected to again."""


# Replaced and not changed: handlers run in threads.
_observers: tuple[Observer, ...] = ()


def add(observer: Observer) -> None:
    """Add an observer, which is called from now on."""
    global _observers
    _observers = (*_observers, observer)


def remove(observer: Observer | None) -> None:
    """Remove an observer, which is no longer called."""
    global _observers
    _observers = tuple(other for other in _observers if other is not observer)


def handling(messages: Sequence[Message], consumer: str) -> AbstractContextManager[object]:
    """Return the block in which the handler of messages runs."""
    observers = _observers
    if not observers:
        return _NOTHING
    stack = ExitStack()
    for observer in observers:
        stack.enter_context(observer.handling(messages, consumer))
    return stack


def note_outcome(message: Message, consumer: str, outcome: str) -> None:
    """Report the outcome of a message to the observers."""
    for observer in _observers:
        observer.note_outcome(message, consumer, outcome)


def note_overrun(message: Message, consumer: str) -> None:
    """Report to the observers that the handler of a message runs for too long."""
    for observer in _observers:
        observer.note_overrun(message, consumer)


def note_reconnect(queue: str, consumer: str) -> None:
    """Report to the observers that a worker or consumer connects to the database again."""
    for observer in _observers:
        observer.note_reconnect(queue, consumer)


def is_redelivered(message: Message) -> bool:
    """Return whether a message was delivered before."""
    return (message.receive_count or 1) > 1 or (message.retry_count or 0) > 0


def waited(message: Message) -> float | None:
    """Return the seconds since a message was sent, by the clocks of this machine and of the server; None for
    one that was delivered before, which also waited for its retry."""
    if message.created_at is None or is_redelivered(message):
        return None
    return max(0.0, (datetime.now(timezone.utc) - message.created_at).total_seconds())
