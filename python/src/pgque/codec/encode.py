"""How Python values become SQL arguments. Shared by the sync and the async client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any, TypeAlias, TypeGuard, TypeVar, overload

from psycopg import AsyncConnection, Connection

from ..client import direct
from ..errors import PgqueVersionError
from ..types import Event, Message, Payload, Seconds, Setting
from .json import Encoder, as_json, is_known

T = TypeVar("T")

MessageOrId: TypeAlias = Message | int


def is_bytes(payload: object) -> TypeGuard[bytes | bytearray | memoryview]:
    """Return whether a payload travels as bytes."""
    return isinstance(payload, (bytes, bytearray, memoryview))


def payload_and_cast(payload: Payload, encoder: Encoder | None = None) -> tuple[str | bytes | None, str]:
    """Return a payload as it goes over the wire, with the SQL type to cast it to.

    Raises TypeError for what cannot be encoded, and ValueError for NaN.
    """
    if encoder is not None and not (is_bytes(payload) or is_known(payload)):
        payload = encoder(payload)
    if is_bytes(payload):
        return bytes(payload), "bytea"
    if payload is None:
        return None, "text"
    if isinstance(payload, str):
        return str.__str__(payload), "text"  # also of an enum, where str() may return another text
    if isinstance(payload, Message):
        raise TypeError("a Message is no payload: send message.payload, or message.payload_bytes")
    return as_json(payload, encoder), "jsonb"


def text_and_cast(payload: Payload, encoder: Encoder | None = None) -> tuple[str | None, str]:
    """Return a payload that can not be bytes. Raises TypeError if it is."""
    value, cast = payload_and_cast(payload, encoder)
    if isinstance(value, bytes):
        raise TypeError("bytes are not sent with an idempotency key")
    return value, cast


def payloads_and_cast(
    payloads: Iterable[Payload], encoder: Encoder | None = None
) -> tuple[list[str | bytes | None], str]:
    """Return a batch of payloads with the SQL array type.

    A batch of JSON values only goes as jsonb and is validated and stored canonical by the server; one that
    mixes text and JSON goes as text. Raises TypeError where bytes are mixed with anything else.
    """
    encoded: list[str | bytes | None] = []
    casts = set()
    for payload in payloads:
        value, cast = payload_and_cast(payload, encoder)
        encoded.append(value)
        if value is not None:
            casts.add(cast)
    if "bytea" in casts and len(casts) > 1:
        raise TypeError("a batch has either bytes, or text and JSON: send two batches")
    return encoded, f"{casts.pop() if len(casts) == 1 else 'text'}[]"


def arguments(given: Mapping[str, tuple[str, object]]) -> tuple[str, dict[str, object]]:
    """Return the SQL of named arguments, from name to type and value, and their parameters.

    Those that are None are left out, so that the server's default holds.
    """
    found = {name: value for name, (_, value) in given.items() if value is not None}
    return "".join(f", {name} => %({name})s::{given[name][0]}" for name in found), found


def headers_json(event: Event, encoder: Encoder | None) -> str | None:
    """Return the headers of an event as JSON."""
    return None if event.headers is None else as_json(event.headers, encoder, "headers")


def send_arguments(event: Event, encoder: Encoder | None = None) -> tuple[str, dict[str, object]]:
    """Return the payload and the options of `pgque.send` as SQL and parameters."""
    value, cast = payload_and_cast(event.payload, encoder)
    sql, params = arguments(
        {
            "headers": ("jsonb", headers_json(event, encoder)),
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


def type_and_payloads(
    given: Sequence[Any], type: str | None, payloads: Iterable[Payload | Event] | None
) -> tuple[str | None, Iterable[Payload | Event]]:
    """Return the type and the payloads of `send_batch`, from its positional arguments behind the queue and
    its keywords. Raises TypeError for anything but (payloads), or the earlier (type, payloads)."""
    match [*given] if payloads is None else [*given, payloads]:
        case [only]:
            return type, only
        case [str() as first, second] if type is None:
            return first, second
    raise TypeError("send_batch takes a queue and payloads: send_batch(queue, payloads, type=...)")


def batch_events(
    type: str | None, payloads: Iterable[Payload | Event], options: Mapping[str, Sequence[object] | None]
) -> list[Event]:
    """Return a batch as events: each payload with its elements of the lists. Without a type it is that of
    the first event, or "default".

    Raises ValueError for a list that is not as long as the payloads, or an event of another type, and
    TypeError for a single payload, and for a single option in place of a list.
    """
    # A model of pydantic can be iterated over, too.
    if isinstance(payloads, (str, bytes, bytearray, Mapping)) or hasattr(payloads, "__pydantic_serializer__"):
        raise TypeError("payloads must be a sequence of payloads, not a single one")
    batch = [event_of("default" if type is None else type, item, {}) for item in payloads]
    type = batch[0].type if type is None and batch else type
    if any(event.type != type for event in batch):
        raise ValueError(f"a batch is of one type: all its events must be of type {type!r}")
    given: dict[str, Sequence[object]] = {}
    for name, values in options.items():
        if values is not None:
            if isinstance(values, (str, bytes, Mapping)):
                raise TypeError(f"{name} must be a sequence with a value for each payload, not {values!r}")
            given[name] = values
            if len(values) != len(batch):
                raise ValueError(f"{len(values)} values of {name} for {len(batch)} payloads")
    if not given:
        return batch
    return [
        event_of(event.type, event, {name: values[n] for name, values in given.items()})
        for n, event in enumerate(batch)
    ]


def batch_arguments(batch: Sequence[Event], encoder: Encoder | None = None) -> tuple[str, dict[str, object]]:
    """Return the payloads and the options of `pgque.send_batch` as SQL and parameters."""
    values, cast = payloads_and_cast((event.payload for event in batch), encoder)
    headers = [headers_json(event, encoder) for event in batch]
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
    try:
        return timedelta(seconds=value)
    except TypeError:
        raise TypeError(f"a length of time must be seconds or a timedelta, not {value!r}") from None


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
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise TypeError(f"a time must be a datetime, not {value!r}")
    if value.tzinfo is not None:
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
    return as_json(value, name="setting")


def config_json(config: Mapping[str, Setting]) -> str:
    """Return settings as the JSON object that `create_queue` and `alter_queue` take."""
    return as_json(
        {
            name: setting_text(value) if isinstance(value, timedelta) else value
            for name, value in config.items()
        },
        name="setting",
    )


def start_text(start_at: str | int | datetime) -> str:
    """Return where to start as the text that `subscribe` takes."""
    return moment(start_at).isoformat() if isinstance(start_at, datetime) else str(start_at)


def message_id(message: MessageOrId) -> int:
    """Return the id of a message."""
    return message.msg_id if isinstance(message, Message) else int(message)


def message_ids(messages: Sequence[MessageOrId]) -> list[int]:
    """Return the ids of messages, in their order. Raises TypeError for a text, whose digits would be ids."""
    if isinstance(messages, (str, bytes, bytearray)):
        raise TypeError(f"messages must be a sequence of messages or ids, not {messages!r}")
    return [message_id(message) for message in messages]


def ids_or_none(messages: Sequence[MessageOrId] | None) -> list[int] | None:
    """Return the ids of messages, or None for all of a batch."""
    return None if messages is None else message_ids(messages)


# Characters of a reason that are kept.
_MAX_REASON = 4000


def clean_reason(reason: str | None, codec: str = "utf-8") -> str | None:
    """Return a reason that a database can store: no NUL, no half characters, none that its encoding lacks,
    and not without end."""
    if reason is None:
        return None
    return reason[:_MAX_REASON].replace("\x00", "").encode(codec, "replace").decode(codec)


def reason_text(reason: str | None, conn: Connection[object] | AsyncConnection[object]) -> str | None:
    """Return a reason that the database of a connection can store."""
    if reason is None or conn.closed:  # the call that follows raises what it is
        return reason
    server = conn.info.parameter_status("server_encoding")
    if server not in ("UTF8", "SQL_ASCII", conn.info.parameter_status("client_encoding")):
        codec = "ascii"  # the server converts, and Python does not know its names of encodings
    else:
        codec = "utf-8" if conn.info.encoding == "ascii" else conn.info.encoding
    return clean_reason(reason, codec)


# No call may fail before the answer is known: it would abort the caller's transaction. So look the function
# up first. From the other columns a client finds out whether a pooler is between: asked here, that costs no
# round trip.
FIND_VERSION = f"""
select has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute'), {direct.ANSWERS}
from pg_catalog.pg_namespace as n
join pg_catalog.pg_proc as p on p.pronamespace = n.oid
where n.nspname = 'pgque' and p.proname = 'version' and p.pronargs = 0
"""


UPGRADE_PACKAGE = "pip install --upgrade ./python"
THROUGH = "0.8.0"  # upgrades databases that are older than what this version upgrades from
FLOOR = [0, 7, 0]
_RELEASED = 1000  # more than any release candidate


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
        if _numbers(server) < FLOOR:
            cure = f"pgque install --version {THROUGH} --dsn …, then {cure}"
        advice = f"upgrade the database with: {cure}"
        if _numbers(server) > _numbers(package):
            cure = UPGRADE_PACKAGE
            advice = f"upgrade the package with: {cure} (in the repository; pgque on PyPI is another package)"
        raise PgqueVersionError(
            f"this database has pgque {server}, and the Python package is {package}; {advice}", hint=cure
        )


def check_not_newer(server: str, package: str) -> None:
    """Raise PgqueVersionError where an install would take the database back to an older version."""
    if _numbers(server) > _numbers(package):
        raise PgqueVersionError(
            f"this database has pgque {server}, which is newer than this package's {package}; upgrade the "
            f"package with: {UPGRADE_PACKAGE} (in the repository; pgque on PyPI is another package)",
            hint=UPGRADE_PACKAGE,
        )


def _numbers(version: str) -> list[int]:
    """Return what versions are ordered by: 1.0.0-rc1 is before 1.0.0, and after 0.12.0."""
    numbers, candidate, its_number = version.partition("-rc")
    ordered = [int("".join(c for c in part if c.isdigit()) or 0) for part in numbers.split(".")]
    return [*ordered, int(its_number)] if candidate else [*ordered, _RELEASED]
