"""How values look on a page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone

from markupsafe import Markup, escape

from ..cli.common import visible
from ..ops import units
from ..ops.units import NOTHING, number, readable, size, span

SHORT = 120  # characters of a text in a table
MOST_SHOWN = 200_000  # characters, or bytes, of a payload on its page

_QUOTED = r"'(?:[^']|'')*'"
# What a check advises in SQL, and the buttons that do it
_BUTTONS = (
    (re.compile(rf"select pgque\.resume\({_QUOTED}\)"), "press Resume sending on the page of the queue"),
    (
        re.compile(
            rf"Read the reasons: select \* from pgque\.dlq_inspect\({_QUOTED}\)\. When the cause is mended: "
            rf"select pgque\.dlq_requeue_all\({_QUOTED}\)"
        ),
        "open the dead letters, then requeue, replay or delete them",
    ),
    (
        re.compile(rf"select pgque\.alter_queue\({_QUOTED}, '{{\"(\w+)\": \"?([^\"}}]*)\"?}}'\)"),
        r"set \1 to \2 on the page of the queue",
    ),
)


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


def payload(row: dict[str, object]) -> dict[str, str]:
    """Return kind (JSON, text, bytes or none) and text of a message's payload, or of its start."""
    raw, whole = row["payload_bytes"], row["payload"]
    if isinstance(raw, bytes):
        return {"kind": "bytes", "text": raw.hex(" ", 2)}
    if whole is None:
        return {"kind": "none", "text": ""}
    shown = str(whole)
    if shown.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return {"kind": "JSON", "text": json.dumps(json.loads(shown), indent=2, ensure_ascii=False)}
    return {"kind": "text", "text": shown}


def detail(value: str | None) -> Markup:
    """Return what a check found, with the times and lengths of time as the page writes them."""
    return text(readable(value or ""))


def advice(value: str | None) -> Markup:
    """Return the advice of a check: buttons of the page in place of the SQL that does the same."""
    shown = value or ""
    for statement, words in _BUTTONS:
        shown = statement.sub(words, shown)
    return text(shown)


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
    "payload": payload,
    "as_json": as_json,
    "detail": detail,
    "advice": advice,
}
