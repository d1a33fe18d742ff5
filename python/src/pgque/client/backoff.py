"""Pauses between attempts to reach the database."""

from __future__ import annotations

import random
from collections.abc import Iterator

# The first pause is random between 0 and this many seconds; the bound doubles with each further one.
FIRST_PAUSE = 0.1


def first_pause() -> float:
    """Return a random pause in seconds before the first attempt to connect again."""
    return random.uniform(0, FIRST_PAUSE)  # noqa: S311


def pauses(longest: float) -> Iterator[float]:
    """Return random pauses in seconds, whose bound doubles up to the longest."""
    bound = FIRST_PAUSE
    while True:
        yield random.uniform(0, bound)  # noqa: S311
        bound = min(2 * bound, longest)
