"""Old names of methods and arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class Renamed(Generic[P, R]):
    """Give a method of one of a client's groups an older name, whose use is a DeprecationWarning that names
    the new one.

    In the body of the client's class: `old_name = Renamed("group", Group.method)`.
    """

    def __init__(self, group: str, method: Callable[Concatenate[Any, P], R]) -> None:
        self._group = group
        self._method = method
        self._new = f"{group}.{method.__name__}"
        self.__doc__ = f"Do the same as `{self._new}`, its new name."

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Callable[P, R]:
        found: Any = self._method
        if instance is None:  # tools that list the members of a class do not use them
            return cast(Callable[P, R], found)
        told = f"{owner.__name__}.{self._old} is now called {self._new}"
        warnings.warn(told, DeprecationWarning, stacklevel=2)
        return cast(Callable[P, R], found.__get__(getattr(instance, self._group)))


def renamed(what: str, old: str, new: str, given: R) -> R:
    """Return what a caller passed or set under an older name, with a DeprecationWarning that names the new
    one. To be called by what the caller calls."""
    warnings.warn(f"{old} of {what} is now called {new}", DeprecationWarning, stacklevel=3)
    return given
