"""The setting `min_interval` of consumers and workers: the least time from one receive to the next."""

from __future__ import annotations

from .errors import PgqueBadArgument

# Longest `min_interval`, in seconds: a day.
_MAX_INTERVAL = 86400


def check_min_interval(value: float) -> None:
    """Raise PgqueBadArgument for a value that cannot be the `min_interval` of a consumer or a worker."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_INTERVAL:  # nan is not in between
        raise PgqueBadArgument(f"min_interval must be from 0 to {_MAX_INTERVAL} seconds, not {value!r}")


def next_receive_at(received_at: float, min_interval: float, count: int, max_count: int) -> float:
    """Return when to receive again after `count` messages of `max_count`: at once after a full batch."""
    return received_at + min_interval if count < max_count else received_at
