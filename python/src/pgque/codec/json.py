"""How Python values become JSON: what `json` encodes, and types that JSON lacks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any, TypeAlias
from uuid import UUID

from ..errors import PgquePayloadError

# Takes a value of a type that this module does not know, and returns what is encoded in its place.
Encoder: TypeAlias = Callable[[Any], object]

# Returns what is encoded in place of a value; the encoder is for values inside of it.
_Rule: TypeAlias = Callable[[Any, Encoder | None], object]


def as_json(value: object, encoder: Encoder | None = None, name: str = "payload") -> str:
    """Return the JSON text of a value, which errors call `name`.

    Raises ValueError for NaN and infinity, which JSON lacks, PgquePayloadError for a value that is nested too
    deeply, and TypeError for a value that neither this module nor the encoder knows.
    """
    try:
        return _as_json(value, encoder, name)
    except RecursionError:
        raise PgquePayloadError(f"{name}: nested too deeply, or contains itself") from None


def _as_json(value: object, encoder: Encoder | None, name: str) -> str:
    try:
        if encoder is None:
            return _encode(value)
        return json.JSONEncoder(
            ensure_ascii=False, allow_nan=False, default=lambda item: _replaced(item, encoder)
        ).encode(value)
    except TypeError:
        # A key that is no text, or a value that cannot be encoded: this way knows where.
        return _encode(_plain(value, name, encoder))


def is_known(value: Any) -> bool:
    """Return whether a value is encoded without an encoder, apart from the values inside of it."""
    return isinstance(value, (str, int, float, dict, list, tuple, type(None))) or _rule_of(value) is not None


def duration(value: timedelta) -> str:
    """Return a length of time as ISO 8601 has it: P1DT3600S."""
    microseconds = abs(value // timedelta(microseconds=1))
    days, microseconds = divmod(microseconds, 86_400_000_000)
    seconds, microseconds = divmod(microseconds, 1_000_000)
    fraction = f".{microseconds:06}".rstrip("0") if microseconds else ""
    return f"{'-' if value < timedelta(0) else ''}P{days}DT{seconds}{fraction}S"


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise ValueError(f"{value} is no number that can be sent")
    return str(value)


def _model(value: Any, encoder: Encoder | None) -> object:
    """Do what `model_dump(mode="json", by_alias=True)` does, also for a dataclass of pydantic."""
    serializer = type(value).__pydantic_serializer__
    # A ValueError of pydantic tells of a type that it does not know.
    try:
        return serializer.to_python(
            value, mode="json", by_alias=True, fallback=lambda item: _replaced(item, encoder)
        )
    except ValueError as error:
        raise TypeError(str(error)) from error


def _struct(value: Any, encoder: Encoder | None) -> object:
    import msgspec

    return msgspec.to_builtins(value, str_keys=True, enc_hook=lambda item: _replaced(item, encoder))


def _dataclass(value: Any, encoder: Encoder | None) -> object:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


_RULES: dict[type, _Rule] = {
    Enum: lambda value, _: value.value,
    datetime: lambda value, _: value.isoformat(),
    date: lambda value, _: value.isoformat(),
    time: lambda value, _: value.isoformat(),
    timedelta: lambda value, _: duration(value),
    Decimal: lambda value, _: _decimal(value),
    UUID: lambda value, _: str(value),
    PurePath: lambda value, _: str(value),
    set: lambda value, _: list(value),
    frozenset: lambda value, _: list(value),
}


def _rule_of(value: object) -> _Rule | None:
    kind: Any = type(value)
    return _rule_of_type(kind)


@lru_cache(maxsize=1024)
def _rule_of_type(kind: type) -> _Rule | None:
    for known, rule in _RULES.items():
        if issubclass(kind, known):
            return rule
    if hasattr(kind, "__pydantic_serializer__"):
        return _model
    if hasattr(kind, "__struct_fields__"):
        return _struct
    if dataclasses.is_dataclass(kind):
        return _dataclass
    return None


def _replaced(value: Any, encoder: Encoder | None = None) -> object:
    """Return what is encoded in place of a value that `json` does not encode."""
    rule = _rule_of(value)
    if rule is not None:
        return rule(value, encoder)
    if encoder is not None:
        return encoder(value)
    raise TypeError(f"cannot encode {type(value)}: pass encoder=, a function that replaces such values")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_replaced).encode


def _plain(value: object, path: str, encoder: Encoder | None) -> object:
    """Return a value as dict, list and what `json` encodes, with keys that it takes. Raises TypeError with
    the path of a value that cannot be encoded."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        return {
            _key(key, path, encoder): _plain(item, path + step(key), encoder) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, path + step(number), encoder) for number, item in enumerate(value)]
    try:
        replaced = _replaced(value, encoder)
    except TypeError as error:
        for name in _field_names(type(value)):
            _plain(getattr(value, name, None), f"{path}.{name}", encoder)
        raise TypeError(f"{path}: {error}") from error
    return _plain(replaced, path, encoder)


def _key(key: object, path: str, encoder: Encoder | None) -> object:
    plain = _plain(key, f"{path}, in a key", encoder)
    if isinstance(plain, (dict, list)):
        raise TypeError(f"{path}: a key of a JSON object cannot be {type(key)}")
    return plain


def step(part: object) -> str:
    """Return how a path goes on to a member or an item: `.name`, `[3]`."""
    return f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"


def _field_names(kind: Any) -> list[str]:
    """Return the names of the fields of a model."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [*getattr(kind, "model_fields", ()), *getattr(kind, "__struct_fields__", ())]
