"""What a type checker sees of `pgque.exporter`, which `earlier.py` finds."""

from .ops.exporter import *  # noqa: F403
