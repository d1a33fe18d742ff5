"""Raise errors that name the command that installs a missing package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def packages() -> Iterator[None]:
    """Raise ImportError with the command that installs the package, in place of one that only names it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{str(error).splitlines()[0]}. Install pgque[spark] on the driver and on every executor, for the"
            f" Python that Spark runs (here {sys.executable}; PYSPARK_PYTHON names another one): pip install"
            " './python[spark]' in pgque's repository"
        ) from None


def check_packages(*names: str) -> None:
    """Raise ImportError with the command that installs it, if one of these packages cannot be found."""
    with packages():
        for name in names:
            if find_spec(name) is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
