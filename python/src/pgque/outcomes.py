"""The outcomes that a handler of a worker or a consumer can return or raise."""

from __future__ import annotations

from datetime import timedelta

from .client.renamed import renamed
from .codec.encode import interval
from .errors import PgqueBadArgumentError, described
from .types import Seconds

_MAX_RETRY_AFTER = timedelta(days=3650)


def retry_interval(after: Seconds | None, name: str = "retry_after") -> timedelta | None:
    """Return when a failed message is redelivered.

    Raises PgqueBadArgumentError for a value that is no length of time, is negative, or is over ten years.
    """
    try:
        length = interval(after)
    except (OverflowError, TypeError, ValueError):
        length = timedelta(-1)
    if length is not None and not timedelta(0) <= length <= _MAX_RETRY_AFTER:
        raise PgqueBadArgumentError(f"{name} must be from 0 seconds to ten years, not {after!r}")
    return length


def reason_of(value: object) -> str | None:
    """Return a reason, a text or an error, as text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, BaseException):
        return described(value)
    try:
        return str(value)
    except Exception as error:
        return described(error)


class HandlerOutcome(Exception):
    """Mark the classes that a handler may return or raise as the outcome of its message."""


class Retry(HandlerOutcome):
    """Reject the message: it is redelivered after some seconds; None is `retry_after` of the worker or
    consumer.

    The reason may be an error. Raises PgqueBadArgumentError for a negative length of time, or one over ten
    years.
    """

    def __init__(
        self, retry_after: Seconds | None = None, reason: object = None, *, after: Seconds | None = None
    ) -> None:
        if after is not None:
            retry_after = renamed("Retry", "after", "retry_after", after)
        self.reason: str | None = reason_of(reason)
        super().__init__(self.reason or "")
        self.retry_after: timedelta | None = retry_interval(retry_after)

    @property
    def after(self) -> timedelta | None:
        """Return `retry_after`: an earlier name."""
        return renamed("Retry", "after", "retry_after", self.retry_after)

    @after.setter
    def after(self, after: timedelta | None) -> None:
        self.retry_after = renamed("Retry", "after", "retry_after", after)


class Dead(HandlerOutcome):
    """Give the message up, without more retries. The reason may be an error."""

    def __init__(self, reason: object = None) -> None:
        self.reason: str | None = reason_of(reason)
        super().__init__(self.reason or "")


class Outcomes(dict[int, object]):
    """Give messages of a batch handler outcomes of their own, by `msg_id`.

        outcomes = pgque.Outcomes()
        outcomes[message.msg_id] = pgque.Dead("no address")
        return outcomes

    A value is a Retry, a Dead, a Release, or an error, which counts as if a handler had raised it for that
    message. Messages that are not in it are handled.
    """


class Release(HandlerOutcome):
    """Release the message: it can be received at once, by any worker. It does not count as failed, so
    `retry_count` stays.

    `receive_count` counts each delivery. A worker's message is given up after `max_receive_attempts` of them;
    a `Consumer` has no such limit.
    """
