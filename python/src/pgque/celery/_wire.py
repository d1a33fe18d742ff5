"""Messages of kombu as messages of pgque: their JSON is the payload, the name of the task is the type."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from kombu.utils.json import dumps, loads

from ..types import Event

# A message as kombu's virtual transports have it: body, headers, properties.
Raw = dict[str, Any]

# The type of a message that is no task
NO_TASK = "message"


def event_of(raw: Mapping[str, Any]) -> Event:
    """Return what to send for a message. A task with an ETA is delayed in the database until then, and a
    message with an expiration is not delivered after it."""
    headers = raw.get("headers") or {}
    expiration = raw["properties"].get("expiration")  # milliseconds, as a text
    return Event(
        type=str(headers.get("task") or NO_TASK),
        payload=dumps(raw),
        deliver_at=_eta(headers.get("eta")),
        ttl=None if expiration is None else max(int(expiration), 1) / 1000,
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
    """Return the message of a payload with its body decoded, or None if it is not one of kombu: an error of
    kombu that it may cause would end each worker that receives it."""
    try:
        raw = loads(payload)
        properties, headers, body = raw["properties"], raw.get("headers"), raw["body"]
        info = properties["delivery_info"]
        if properties.pop("body_encoding", None) == "base64":
            raw["body"] = b64decode(body, validate=True)
        properties["delivery_tag"] = tag
        raw["redelivered"] = info["redelivered"] = is_redelivered
        is_message = (
            isinstance(body, str)
            and isinstance(info["routing_key"], str)
            and isinstance(headers, dict | None)
            and isinstance(task_id_of(raw), str | None)
        )
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
    return raw if is_message else None


def task_id_of(raw: Raw) -> Any:
    """Return the id of the task of a message, or None."""
    return (raw.get("headers") or {}).get("id")
