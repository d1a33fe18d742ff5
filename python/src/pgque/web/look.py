"""How values look on a page."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timezone
from decimal import Decimal

from markupsafe import Markup, escape

from ..cli.common import visible
from ..ops import units
from ..ops.problems import of
from ..ops.units import NOTHING, number, readable, size, span

SHORT = 120  # characters of a text in a table
LEAST_SHARED = 12  # characters that all payloads of a list share: fewer are shown in each row
MOST_SHOWN = 200_000  # characters, or bytes, of a payload on its page


def moment(value: datetime | None, zone: str = " UTC") -> Markup:
    """Return a time in UTC, to the second, with its exact value for machines; `zone` follows it."""
    if value is None:
        return escape(NOTHING)
    at = value.astimezone(timezone.utc)
    return Markup('<time datetime="{}">{}{}</time>').format(at.isoformat(), units.moment(at), zone)


def plain(value: object) -> str:
    """Return a user's text without control characters, for a title or a label."""
    return visible("" if value is None else str(value))


def text(value: object) -> Markup:
    """Return a user's text: no control characters, and its direction changes nothing around it."""
    if value is None or value == "":
        return escape("")
    return Markup("<bdi>{}</bdi>").format(visible(str(value), keep="\n\t"))


def short(value: object) -> Markup:
    """Return the start of a user's text."""
    whole = "" if value is None else str(value)
    return text(whole if len(whole) <= SHORT else whole[: SHORT - 1] + "…")


def shared(rows: Iterable[dict[str, object]], column: str) -> str:
    """Return the text with which the payloads of all rows begin, if it is worth showing once instead.

    It ends with a character that is no part of a word, a number or an accent, so that none is cut.
    """
    texts = [str(row[column]) for row in rows if row[column] is not None]
    if len(texts) < 2 or len(set(texts)) < 2:
        return ""
    prefix, other = min(texts), max(texts)  # what these two begin with all others begin with
    end = next((n for n, (a, b) in enumerate(zip(prefix, other, strict=False)) if a != b), len(prefix))
    while end and (
        prefix[end - 1].isalnum()
        or prefix[end - 1] == "\\"
        or any(unicodedata.combining(text[end]) for text in texts if len(text) > end)
    ):
        end -= 1
    return prefix[:end] if end >= LEAST_SHARED else ""


def after(value: object, prefix: str) -> str:
    """Return a payload with … in place of the text with which all payloads of its list begin."""
    whole = "" if value is None else str(value)
    return f"…{whole[len(prefix) :]}" if prefix and whole.startswith(prefix) else whole


def _exact(digits: str) -> float:
    """Return a number. Raises ValueError for one that would be written as another one."""
    value = float(digits)
    if not math.isfinite(value) or Decimal(digits) != Decimal(repr(value)):
        raise ValueError
    return value


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def payload(row: dict[str, object]) -> dict[str, str]:
    """Return kind (JSON, text, bytes or none) and text of a message's payload, or of its start.

    JSON that would not be written as what it is, such as a number of many digits, is text.
    """
    raw, whole = row["payload_bytes"], row["payload"]
    if isinstance(raw, bytes):
        return {"kind": "bytes", "text": raw.hex(" ", 2)}
    if whole is None:
        return {"kind": "none", "text": ""}
    shown = str(whole)
    if shown.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            value = json.loads(shown, parse_float=_exact, parse_constant=_exact, object_pairs_hook=_distinct)
            return {"kind": "JSON", "text": json.dumps(value, indent=2, ensure_ascii=False)}
    return {"kind": "text", "text": shown}


def detail(value: str | None) -> Markup:
    """Return the detail of a check, with times and lengths of time as the page writes them."""
    return text(readable(value or ""))


def advice(problem: dict[str, object]) -> Markup:
    """Return the advice for a problem: that for the page that mends it, or else that of the check."""
    return text(of(problem).words or problem["advice"])


def as_json(value: object, indent: int | None = 2) -> str:
    """Return a value as JSON."""
    return json.dumps(value, indent=indent, ensure_ascii=False)


FILTERS: dict[str, Callable[..., object]] = {
    "number": number,
    "span": span,
    "size": size,
    "moment": moment,
    "text": text,
    "plain": plain,
    "short": short,
    "shared": shared,
    "after": after,
    "payload": payload,
    "as_json": as_json,
    "detail": detail,
    "advice": advice,
    "kind": of,
}
