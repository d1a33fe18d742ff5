"""What a handler of a worker can return or raise, besides returning anything else and failing."""

from __future__ import annotations

from datetime import timedelta

from ._encode import interval
from .errors import PgqueBadArgument
from .types import Seconds

_LONGEST = timedelta(days=3650)


class HandlerOutcome(Exception):
    """Be the base of what a handler says about its message."""


class Retry(HandlerOutcome):
    """Have the message come again after so many seconds; None leaves that to the queue.

    Raises PgqueBadArgument for a negative length of time, or one over ten years.
    """

    def __init__(self, after: Seconds | None = None, reason: str | None = None) -> None:
        super().__init__(reason or "")
        if isinstance(after, (int, float)) and not 0 <= after <= _LONGEST.total_seconds():
            raise PgqueBadArgument(f"after must be from 0 seconds to ten years, not {after!r}")
        length = interval(after)
        if length is not None and not timedelta(0) <= length <= _LONGEST:
            raise PgqueBadArgument(f"after must be from 0 seconds to ten years, not {after!r}")
        self.after = length
        self.reason = reason


class Dead(HandlerOutcome):
    """Give the message up, without more retries."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "")
        self.reason = reason


class Release(HandlerOutcome):
    """Hand the message back for any worker, at once; it does not count as failed."""
