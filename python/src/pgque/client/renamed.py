"""Old names of methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Renamed(Generic[P, R]):
    """Give a method a second, older name, whose use is a DeprecationWarning that names the new one.

    In the body of a class: `old_name = Renamed(new_name)`.
    """

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._new = method.__name__
        self.__doc__ = f"Do the same as `{self._new}`, its new name."

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Callable[P, R]:
        if instance is not None:  # tools that list the members of a class do not use them
            warnings.warn(
                f"{owner.__name__}.{self._old} is now called {self._new}", DeprecationWarning, stacklevel=2
            )
        found: Callable[P, R] = getattr(owner if instance is None else instance, self._new)
        return found
