"""Ends that leave nothing running."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def clean_ends() -> Iterator[None]:
    """Turn SIGTERM, and SIGHUP of a closed terminal, into SystemExit, so that what was started is stopped.

    One that is ignored, as nohup has it, stays so.
    """
    handled = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    previous = {each: signal.signal(each, _exit) for each in handled}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _exit(signum: int, frame: object) -> None:
    if signum == signal.SIGHUP:  # shell and kernel may both send it: the second would cut the end short
        signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)
