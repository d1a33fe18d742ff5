"""How Python values become SQL arguments. Shared by the sync and the async client."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeAlias, TypeGuard

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .errors import PgqueBadArgument, PgqueVersionError
from .types import Message, Payload, Seconds, Setting

MessageOrId: TypeAlias = Message | int


def is_bytes(payload: object) -> TypeGuard[bytes | bytearray | memoryview]:
    """Say whether a payload travels as bytes."""
    return isinstance(payload, (bytes, bytearray, memoryview))


def is_text(payload: Payload) -> TypeGuard[str | None]:
    """Say whether a payload travels as text and not as JSON. Raises TypeError for bytes."""
    if is_bytes(payload):
        raise TypeError("bytes are sent one message at a time, with send(), and without an idempotency key")
    return payload is None or isinstance(payload, str)


def as_json(value: object) -> str:
    """Return the JSON text of a value. Raises ValueError for NaN and infinity, which JSON lacks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def send_arguments(payload: Payload, headers: Mapping[str, object] | None) -> tuple[dict[str, object], str]:
    """Return the payload and headers of `pgque.send` as parameters, and the SQL that names them."""
    if is_bytes(payload):
        value: object = bytes(payload)
        cast = "bytea"
    else:
        value, cast = payload_and_cast(payload)
    sql = f"%(payload)s::{cast}"
    if headers is None:
        return {"payload": value}, sql
    return {"payload": value, "headers": as_json(headers)}, f"{sql}, %(headers)s::jsonb"


def payload_and_cast(payload: Payload) -> tuple[str | None, str]:
    """Return a payload as it goes over the wire, with the SQL type to cast it to."""
    if is_text(payload):
        return payload, "text"
    return as_json(payload), "jsonb"


def payloads_and_cast(payloads: Iterable[Payload]) -> tuple[list[str | None], str]:
    """Return a batch of payloads with the SQL array type.

    A batch of JSON values only goes as jsonb and is validated and stored canonical by the server; one that
    mixes text and JSON goes as text.
    """
    if isinstance(payloads, (str, bytes, bytearray, Mapping)):
        raise TypeError("payloads must be a sequence of payloads, not a single one")
    batch = list(payloads)
    encoded = [payload if is_text(payload) else as_json(payload) for payload in batch]
    some_json = any(not is_text(payload) for payload in batch)
    some_text = any(isinstance(payload, str) for payload in batch)
    return encoded, "jsonb[]" if some_json and not some_text else "text[]"


def interval(value: Seconds | None) -> timedelta | None:
    """Return a length of time as an interval; plain numbers are seconds."""
    if value is None or isinstance(value, timedelta):
        return value
    return timedelta(seconds=value)


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
    return start_at.isoformat() if isinstance(start_at, datetime) else str(start_at)


def message_id(message: MessageOrId) -> int:
    """Return the id of a message."""
    return message.msg_id if isinstance(message, Message) else int(message)


def message_ids(messages: Sequence[MessageOrId]) -> list[int]:
    """Return the ids of messages, in their order."""
    return [message_id(message) for message in messages]


# So that a connection which silently died is noticed within half a minute and not after hours.
_WATCHFUL = {
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


def watchful(dsn: str, name: str) -> str:
    """Return a connection string that notices a dead network, and has a name; what `dsn` says stays.

    Raises PgqueBadArgument when it is not a connection string.
    """
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise PgqueBadArgument(f"not a connection string: {error}") from error
    added = {key: value for key, value in _WATCHFUL.items() if key not in given}
    return make_conninfo(dsn, fallback_application_name=name[:63], **added)


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
