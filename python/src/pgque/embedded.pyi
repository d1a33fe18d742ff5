"""What a type checker sees of `pgque.embedded`, which `earlier.py` finds."""

from .ops.embedded import *  # noqa: F403
