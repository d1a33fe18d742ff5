"""How Python values become SQL arguments. Shared by the sync and the async client."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TypeAlias, TypeGuard, TypeVar, overload

from psycopg import AsyncConnection, Connection

from .errors import PgqueVersionError
from .types import Event, Message, Payload, Seconds, Setting

T = TypeVar("T")

MessageOrId: TypeAlias = Message | int


def is_bytes(payload: object) -> TypeGuard[bytes | bytearray | memoryview]:
    """Say whether a payload travels as bytes."""
    return isinstance(payload, (bytes, bytearray, memoryview))


def as_json(value: object) -> str:
    """Return the JSON text of a value. Raises ValueError for NaN and infinity, which JSON lacks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def payload_and_cast(payload: Payload) -> tuple[str | bytes | None, str]:
    """Return a payload as it goes over the wire, with the SQL type to cast it to."""
    if is_bytes(payload):
        return bytes(payload), "bytea"
    if payload is None or isinstance(payload, str):
        return payload, "text"
    return as_json(payload), "jsonb"


def text_and_cast(payload: Payload) -> tuple[str | None, str]:
    """Return a payload that can not be bytes. Raises TypeError if it is."""
    value, cast = payload_and_cast(payload)
    if isinstance(value, bytes):
        raise TypeError("bytes are not sent with an idempotency key")
    return value, cast


def payloads_and_cast(payloads: Iterable[Payload]) -> tuple[list[str | bytes | None], str]:
    """Return a batch of payloads with the SQL array type.

    A batch of JSON values only goes as jsonb and is validated and stored canonical by the server; one that
    mixes text and JSON goes as text. Raises TypeError where bytes are mixed with anything else.
    """
    encoded: list[str | bytes | None] = []
    casts = set()
    for payload in payloads:
        value, cast = payload_and_cast(payload)
        encoded.append(value)
        if value is not None:
            casts.add(cast)
    if "bytea" in casts and len(casts) > 1:
        raise TypeError("a batch is of bytes, or of text and JSON: send them in two")
    return encoded, f"{casts.pop() if len(casts) == 1 else 'text'}[]"


def arguments(given: Mapping[str, tuple[str, object]]) -> tuple[str, dict[str, object]]:
    """Return the SQL of named arguments, from name to type and value, and their parameters.

    Those that are None are left out, so that the server's default holds.
    """
    found = {name: value for name, (_, value) in given.items() if value is not None}
    return "".join(f", {name} => %({name})s::{given[name][0]}" for name in found), found


def send_arguments(event: Event) -> tuple[str, dict[str, object]]:
    """Return the payload and the options of `pgque.send` as SQL and parameters."""
    value, cast = payload_and_cast(event.payload)
    sql, params = arguments(
        {
            "headers": ("jsonb", None if event.headers is None else as_json(event.headers)),
            "key": ("text", event.key),
            "delay": ("interval", interval(event.delay)),
            "deliver_at": ("timestamptz", moment(event.deliver_at)),
            "ttl": ("interval", interval(event.ttl)),
            "partition_key": ("text", event.partition_key),
        }
    )
    return f"%(payload)s::{cast}{sql}", {"payload": value, **params}


def event_of(type: str, payload: Payload | Event, options: Mapping[str, object]) -> Event:
    """Return a message as an event; options that are given win over those of an event."""
    event = payload if isinstance(payload, Event) else Event(type, payload)
    given = {name: value for name, value in options.items() if value is not None}
    return replace(event, **given) if given else event  # type: ignore[arg-type]


def batch_events(
    type: str, payloads: Iterable[Payload | Event], options: Mapping[str, Sequence[object] | None]
) -> list[Event]:
    """Return a batch as events: each payload with its elements of the lists.

    Raises ValueError for a list that is not as long as the payloads, or an event of another type, and
    TypeError for a single payload.
    """
    if isinstance(payloads, (str, bytes, bytearray, Mapping)):
        raise TypeError("payloads must be a sequence of payloads, not a single one")
    batch = [event_of(type, item, {}) for item in payloads]
    if any(event.type != type for event in batch):
        raise ValueError(f"a batch is of one type: all its events must be of type {type!r}")
    given: dict[str, Sequence[object]] = {}
    for name, values in options.items():
        if values is not None:
            given[name] = values
            if len(values) != len(batch):
                raise ValueError(f"{len(values)} values of {name} for {len(batch)} payloads")
    if not given:
        return batch
    return [
        event_of(type, event, {name: values[n] for name, values in given.items()})
        for n, event in enumerate(batch)
    ]


def batch_arguments(batch: Sequence[Event]) -> tuple[str, dict[str, object]]:
    """Return the payloads and the options of `pgque.send_batch` as SQL and parameters."""
    values, cast = payloads_and_cast(event.payload for event in batch)
    headers = [None if event.headers is None else as_json(event.headers) for event in batch]
    sql, params = arguments(
        {
            "headers": ("jsonb[]", _unless_empty(headers)),
            "keys": ("text[]", _unless_empty([event.key for event in batch])),
            "delays": ("interval[]", _unless_empty([interval(event.delay) for event in batch])),
            "deliver_ats": ("timestamptz[]", _unless_empty([moment(event.deliver_at) for event in batch])),
            "ttls": ("interval[]", _unless_empty([interval(event.ttl) for event in batch])),
            "partition_keys": ("text[]", _unless_empty([event.partition_key for event in batch])),
        }
    )
    return f"%(payloads)s::{cast}{sql}", {"payloads": values, **params}


def _unless_empty(values: list[T]) -> list[T] | None:
    return values if any(value is not None for value in values) else None


def interval(value: Seconds | None) -> timedelta | None:
    """Return a length of time as an interval; plain numbers are seconds."""
    if value is None or isinstance(value, timedelta):
        return value
    return timedelta(seconds=value)


def total_seconds(value: Seconds) -> float:
    """Return a length of time in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


@overload
def moment(value: datetime) -> datetime: ...


@overload
def moment(value: datetime | None) -> datetime | None: ...


def moment(value: datetime | None) -> datetime | None:
    """Return a time with its zone. One without is local time, as everywhere in Python; the server would take
    it for one of the session's zone."""
    if value is None or value.tzinfo is not None:
        return value
    try:
        return value.astimezone()
    except (OverflowError, ValueError):  # at an end of the calendar
        return value.replace(tzinfo=timezone.utc)


def setting_text(value: Setting) -> str | None:
    """Return a setting as the text that `set_queue_config` takes."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, timedelta):
        return f"{value.total_seconds()} seconds"
    return as_json(value)


def config_json(config: Mapping[str, Setting]) -> str:
    """Return settings as the JSON object that `create_queue` and `alter_queue` take."""
    return as_json(
        {
            name: setting_text(value) if isinstance(value, timedelta) else value
            for name, value in config.items()
        }
    )


def start_text(start_at: str | int | datetime) -> str:
    """Return where to start as the text that `subscribe` takes."""
    return moment(start_at).isoformat() if isinstance(start_at, datetime) else str(start_at)


def message_id(message: MessageOrId) -> int:
    """Return the id of a message."""
    return message.msg_id if isinstance(message, Message) else int(message)


def message_ids(messages: Sequence[MessageOrId]) -> list[int]:
    """Return the ids of messages, in their order."""
    return [message_id(message) for message in messages]


def ids_or_none(messages: Sequence[MessageOrId] | None) -> list[int] | None:
    """Return the ids of messages, or None for all of a batch."""
    return None if messages is None else message_ids(messages)


# Characters of a reason that are kept.
_MAX_REASON = 4000


def reason_text(reason: str | None, conn: Connection[object] | AsyncConnection[object]) -> str | None:
    """Return a reason that the database of a connection can store: no NUL, no half characters, none that its
    encoding lacks, and not without end."""
    if reason is None or conn.closed:  # the call that follows raises what it is
        return reason
    text = reason[:_MAX_REASON].replace("\x00", "")
    server = conn.info.parameter_status("server_encoding")
    if server not in ("UTF8", "SQL_ASCII", conn.info.parameter_status("client_encoding")):
        codec = "ascii"  # the server converts, and Python does not know its names of encodings
    else:
        codec = "utf-8" if conn.info.encoding == "ascii" else conn.info.encoding
    return text.encode(codec, "replace").decode(codec)


# No call may fail before the answer is known: it would abort the caller's transaction. So look the function
# up first.
FIND_VERSION = """
select has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute')
from pg_catalog.pg_namespace as n
join pg_catalog.pg_proc as p on p.pronamespace = n.oid
where n.nspname = 'pgque' and p.proname = 'version' and p.pronargs = 0
"""


def check_version(server: str | None, package: str) -> None:
    """Raise PgqueVersionError unless the database has the version that the package was made for.

    The first two numbers have to agree; `server` is None where pgque is not installed.
    """
    if server is None:
        raise PgqueVersionError(
            "this database has no pgque; install it with: pgque install --dsn …",
            hint="pgque install --dsn …",
        )
    if server.split(".")[:2] != package.split(".")[:2]:
        cure = "pgque install --dsn …"
        advice = f"upgrade the database with: {cure}"
        if _numbers(server) > _numbers(package):
            cure = "pip install --upgrade pgque"
            advice = f"upgrade the package with: {cure}"
        raise PgqueVersionError(
            f"this database has pgque {server}, and the Python package is {package}; {advice}", hint=cure
        )


def check_not_newer(server: str, package: str) -> None:
    """Raise PgqueVersionError where an install would take the database back to an older version."""
    if _numbers(server) > _numbers(package):
        cure = "pip install --upgrade pgque"
        raise PgqueVersionError(
            f"this database has pgque {server}, which is newer than this package's {package}; "
            f"upgrade the package with: {cure}",
            hint=cure,
        )


def _numbers(version: str) -> list[int]:
    return [int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")]
