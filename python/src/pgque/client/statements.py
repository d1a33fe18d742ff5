"""The calls that the clients and the functions of the module share: the SQL of each, and its parameters.

Every parameter is written `%(name)s::type`. psycopg takes that as it is; `_portable` writes it for any
driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ..codec import encode
from ..codec.encode import MessageOrId
from ..codec.json import Encoder
from ..integrations import opentelemetry as otel
from ..types import Event, Outcome, Payload, Seconds, columns

# The call of a function, and its parameters by name.
Call: TypeAlias = tuple[str, dict[str, object]]
# How an outcome is selected.
OUTCOME = columns(Outcome, "o")


def send(
    queue: str,
    type: str,
    payload: Payload | Event,
    options: Mapping[str, object],
    encoder: Encoder | None,
) -> Call:
    """Return the call of `pgque.send`; options that are given win over those of an event."""
    event = encode.event_of(type, payload, options)
    sql, params = encode.send_arguments(otel.outgoing(event, queue), encoder)
    return (
        f"pgque.send(%(queue)s::text, %(type)s::text, {sql})",
        {"queue": queue, "type": event.type, **params},
    )


def send_batch(
    queue: str,
    type: str | None,
    payloads: Iterable[Payload | Event],
    options: Mapping[str, Sequence[object] | None],
    encoder: Encoder | None,
) -> Call:
    """Return the call of `pgque.send_batch`."""
    batch = encode.batch_events(type, payloads, options)
    sql, params = encode.batch_arguments([otel.outgoing(event, queue) for event in batch], encoder)
    return (
        f"pgque.send_batch(%(queue)s::text, %(type)s::text, {sql})",
        {"queue": queue, "type": batch[0].type if batch else type or "default", **params},
    )


# The drivers hold all of a batch in memory, several times.
MAX_BYTES = 64 * 1024 * 1024


def receive(
    queue: str,
    consumer: str,
    max_messages: int,
    worker: str | None,
    visibility_timeout: Seconds | None,
    ack_batch: int | None,
    max_bytes: int | None,
) -> Call:
    """Return the call of `pgque.receive`."""
    sql, params = encode.arguments(
        {
            "worker": ("text", worker),
            "visibility_timeout": ("interval", encode.interval(visibility_timeout)),
            "ack_batch": ("bigint", ack_batch),
            "max_bytes": ("bigint", max_bytes),
        }
    )
    return (
        f"pgque.receive(%(queue)s::text, %(consumer)s::text, %(max)s::int{sql})",
        {"queue": queue, "consumer": consumer, "max": max_messages, **params},
    )


def ack(batch_id: int) -> Call:
    """Return the call of `pgque.ack` for a whole batch."""
    return "pgque.ack(%(batch)s::bigint)", {"batch": batch_id}


def nack(batch_id: int, msg: MessageOrId, options: Mapping[str, tuple[str, object]]) -> Call:
    """Return the call of `pgque.nack` for one message."""
    sql, params = encode.arguments(options)
    return (
        "pgque.nack(%(batch)s::bigint, pg_catalog.jsonb_populate_record("
        f"null::pgque.message, pg_catalog.jsonb_build_object('msg_id', %(msg)s::bigint)){sql})",
        {"batch": batch_id, "msg": encode.message_id(msg), **params},
    )


def outcomes(
    function: str,
    batch_id: int,
    msgs: Sequence[MessageOrId] | None,
    options: Mapping[str, tuple[str, object]] | None = None,
) -> Call:
    """Return the call of a function that gives some messages of a batch one outcome. Raises TypeError where
    no message is given and the function needs some."""
    if msgs is None and function in ("nack", "dead"):
        raise TypeError(f"{function} needs a message, its id, or a sequence of these, not None")
    sql, params = encode.arguments({"msg_ids": ("bigint[]", encode.ids_or_none(msgs)), **(options or {})})
    return f"pgque.{function}(%(batch)s::bigint{sql})", {"batch": batch_id, **params}
