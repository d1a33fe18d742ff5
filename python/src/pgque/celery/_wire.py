"""Messages of kombu as messages of pgque: their JSON is the payload, the name of the task is the type."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from kombu.utils.json import dumps, loads

from ..types import Event

# A message as kombu's virtual transports have it: body, headers, properties.
Raw = dict[str, Any]


def event_of(raw: Mapping[str, Any]) -> Event:
    """Return what to send for a message. A task with an ETA is delayed in the database until then."""
    headers = raw.get("headers") or {}
    return Event(
        type=str(headers.get("task") or "message"), payload=dumps(raw), deliver_at=_eta(headers.get("eta"))
    )


def _eta(text: object) -> datetime | None:
    """Return the time of an ETA that is to come; None if it has no time zone, since that of the worker's
    application counts then."""
    try:
        eta = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return eta if eta is not None and eta.tzinfo is not None and eta > datetime.now(timezone.utc) else None


def raw_of(payload: object, tag: str, is_redelivered: bool) -> Raw | None:
    """Return the message of a payload, or None if it is not one of kombu."""
    try:
        raw = loads(payload)
        properties = raw["properties"]
        info = properties["delivery_info"]
    except (ValueError, TypeError, LookupError):
        return None
    properties["delivery_tag"] = tag
    raw["redelivered"] = info["redelivered"] = is_redelivered
    return raw  # type: ignore[no-any-return]
