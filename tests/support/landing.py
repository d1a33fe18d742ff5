"""Which cases of a test run at each landing, and which in `make test-long` only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def at_a_landing(some: Sequence[Any], all_of_them: Iterable[Any]) -> list[Any]:
    """Return parameters: some for each landing, and the rest of all for `make test-long`."""
    rest = [case for case in all_of_them if case not in some]
    return [
        *some,
        *(pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.long) for c in rest),
    ]
