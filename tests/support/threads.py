"""Something that runs until it is stopped, in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def running(
    run: Callable[[], object], stop: Callable[[], object], seconds: float
) -> Iterator[threading.Thread]:
    """Run it in a thread; stop it at the end, which may take so long, and raise what it raised."""
    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stop()
        thread.join(seconds)
    assert not thread.is_alive()
    if failure:
        raise failure[0]
