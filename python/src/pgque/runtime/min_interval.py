"""The setting `min_interval` of consumers and workers: the least time from one receive to the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone

from ..errors import PgqueBadArgumentError
from ..types import Message

# Longest `min_interval`, in seconds: a day.
_MAX_INTERVAL = 86400


def check_min_interval(value: float) -> None:
    """Raise PgqueBadArgumentError for a value that cannot be the `min_interval` of a consumer or a worker."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_INTERVAL:  # nan is not in between
        raise PgqueBadArgumentError(f"min_interval must be from 0 to {_MAX_INTERVAL} seconds, not {value!r}")


def next_receive_at(
    received_at: float, min_interval: float, messages: Sequence[Message], max_count: int
) -> float:
    """Return when to receive again after a batch, in seconds of the monotonic clock.

    At once if the batch was full. Otherwise `min_interval` after the youngest of its messages was sent, so
    that what was sent since waits no longer: a batch can be small although more is pending.
    """
    if len(messages) >= max_count:
        return received_at
    youngest = max((message.created_at for message in messages if message.created_at), default=None)
    age = (datetime.now(timezone.utc) - youngest).total_seconds() if youngest else 0.0
    return min(max(time.monotonic() - age, received_at - min_interval), received_at) + min_interval
