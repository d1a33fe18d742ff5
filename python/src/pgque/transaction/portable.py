"""Statements, parameters and rows that are the same for every driver, with any settings and adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TypeAlias

from ..client.statements import Call
from ..codec.decode import Unreadable, parse_json
from ..types import Message, columns

Row: TypeAlias = Sequence[object]

_PARAMETER = re.compile(r"%\((\w+)\)s(?:::(\w+)((?:\[\])?))?")
# Drivers encode values of these types differently, or as codecs and settings of the caller have it.
_AS_TEXT = frozenset({"jsonb", "interval", "timestamptz"})
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def portable(sql: str, params: Mapping[str, object]) -> Call:
    """Return a statement whose parameters are only text, bytes, integers, booleans, and lists of these."""

    def cast(found: re.Match[str]) -> str:
        name, type, array = found.groups()
        return f"%({name})s::text{array}::{type}{array}" if type in _AS_TEXT else found[0]

    return _PARAMETER.sub(cast, sql), {name: _plain(value) for name, value in params.items()}


def _plain(value: object) -> object:
    """Return a value as text where a driver could write it in its own way."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):  # with signs, so that every IntervalStyle reads the same
        return f"{value.days:+d} day {value.seconds:+d}.{value.microseconds:06d} second"
    return value


def numbered(sql: str, params: Mapping[str, object]) -> tuple[str, list[object]]:
    """Return a statement with $1, $2, … for its parameters, and their values."""
    numbers = {name: number for number, name in enumerate(params, 1)}

    def number(found: re.Match[str]) -> str:
        name, type, array = found.groups()
        return f"${numbers[name]}" + (f"::{type}{array}" if type else "")

    return _PARAMETER.sub(number, sql), list(params.values())


# How the columns of a message are selected that drivers read differently, and read back.
_COLUMNS = {
    "created_at": "(extract(epoch from m.created_at) * 1000000)::bigint",
    "expires_at": "(extract(epoch from m.expires_at) * 1000000)::bigint",
    "headers": "m.headers::text",
}
_NAMES = columns(Message, "m").split(", ")
MESSAGE = ", ".join(_COLUMNS.get(name.removeprefix("m."), name) for name in _NAMES)


def message(row: Row, make: Callable[..., Message]) -> Message:
    """Return the message that `make` makes of a row that was selected as `MESSAGE`."""
    values = {name.removeprefix("m."): value for name, value in zip(_NAMES, row, strict=True)}
    for name in ("created_at", "expires_at"):
        values[name] = _moment(values[name])
    values["headers"] = _headers(values["headers"])
    if values["payload_bytes"] is not None:
        values["payload_bytes"] = bytes(values["payload_bytes"])  # type: ignore[call-overload]
    return make(*values.values())


def _moment(microseconds: object) -> datetime | None:
    """Return the time that is this number of microseconds after the start of 1970, in UTC."""
    return _EPOCH + timedelta(microseconds=microseconds) if isinstance(microseconds, int) else None


def _headers(text: object) -> object:
    if not isinstance(text, str):
        return None
    try:
        return parse_json(text)
    except ValueError as error:
        return Unreadable(str(error))
