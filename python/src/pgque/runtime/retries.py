"""Choose the outcome of a message whose handler raised, and the pause before a retry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from ..errors import PgqueBadArgumentError
from ..outcomes import retry_interval
from ..types import Message, Seconds

ErrorClasses: TypeAlias = type[BaseException] | Iterable[type[BaseException]]


@dataclass(frozen=True, slots=True)
class Retries:
    """Decide about the failed messages of a handler.

    Args:
        retry_on: classes of errors after which a message is redelivered; None is all.
        dead_on: classes of errors after which a message is given up.
        backoff: pause before each retry, of which the last is that of all further ones.
    """

    retry_on: tuple[type[BaseException], ...] | None = None
    dead_on: tuple[type[BaseException], ...] = ()
    backoff: tuple[timedelta, ...] = ()

    def gives_up(self, error: BaseException) -> bool:
        """Return whether a message is given up after an error. An error that is no Exception, such as
        SystemExit, is not the fault of its message unless `dead_on` names it."""
        if isinstance(error, self.dead_on):
            return True
        return (
            self.retry_on is not None
            and isinstance(error, Exception)
            and not isinstance(error, self.retry_on)
        )

    def after(self, message: Message) -> timedelta | None:
        """Return the pause before the next retry of a message, or None if others decide about it."""
        if not self.backoff:
            return None
        return self.backoff[min(message.retry_count or 0, len(self.backoff) - 1)]


DEFAULT = Retries()


def retries(
    retry_on: ErrorClasses | None, dead_on: ErrorClasses, backoff: Seconds | Sequence[Seconds] | None
) -> Retries:
    """Return what a handler was registered with.

    Raises TypeError for what is no class of errors, and PgqueBadArgumentError for what is no pause.
    """
    if backoff is None:
        pauses: Sequence[Seconds] = ()
    elif isinstance(backoff, Sequence):
        pauses = backoff
        if not pauses:
            raise PgqueBadArgumentError(
                "backoff must have at least one pause", hint="Leave it out, or pass seconds."
            )
    else:
        pauses = (backoff,)
    lengths = [retry_interval(pause, "backoff") for pause in pauses]
    return Retries(
        None if retry_on is None else _classes(retry_on, "retry_on"),
        _classes(dead_on, "dead_on"),
        tuple(length for length in lengths if length is not None),
    )


def _classes(given: ErrorClasses, name: str) -> tuple[type[BaseException], ...]:
    found = (given,) if isinstance(given, type | str) else tuple(given)
    for each in found:
        if not (isinstance(each, type) and issubclass(each, BaseException)):
            raise TypeError(f"{name} takes classes of errors, such as ConnectionError, not {each!r}")
    return found
