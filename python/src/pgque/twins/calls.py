# Generated from transaction/calls.py by tools/make_sync.py: edit that file and run the script again.
"""Functions that send, receive and acknowledge in the open transaction of the caller.

`twins/calls.py` is generated from `transaction/calls.py` by `tools/make_sync.py`; edit that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar, overload

from ..client import statements
from ..client.statements import Call
from ..codec import encode
from ..codec import payloads as _payloads
from ..codec.encode import MessageOrId
from ..codec.json import Encoder
from ..codec.payloads import Decoder
from ..errors import PgqueError
from ..integrations import opentelemetry as otel
from ..types import Event, Message, Outcome, Payload, Seconds
from ..transaction import portable
from ..transaction.adapters import run

T = TypeVar("T")


def send(
    conn: object,
    queue: str,
    payload: Payload | Event,
    *,
    type: str = "default",
    headers: Mapping[str, object] | None = None,
    key: str | None = None,
    delay: Seconds | None = None,
    deliver_at: datetime | None = None,
    ttl: Seconds | None = None,
    partition_key: str | None = None,
    encoder: Encoder | None = None,
) -> int:
    """Send one message in the open transaction of a connection and return its id. Calls `pgque.send`.

    `conn` is a connection of psycopg, SQLAlchemy or asyncpg, a psycopg cursor, a SQLAlchemy session, or a
    pool of psycopg_pool or asyncpg. The message is committed or rolled back with the transaction. On a
    connection in autocommit, and on a pool, each call is a transaction of its own.

    Options and errors are those of `PgqueClient.send`, and `encoder` is that of a client. Raises
    TypeError for what is no connection, and PgqueVersionError when the database has no pgque or an older
    one.

    The call costs one round trip. It passes payloads and headers as text or bytes, so your adapters for JSON,
    times, numbers or UUIDs and your row factory are not used; adapters and codecs for text, bytes and int
    are. In a psycopg pipeline each call waits for its result. While `stream()` of a psycopg cursor is being
    read, its connection is locked, and a call on it never returns: read the stream to its end first.
    The session that SQLAlchemy's `run_sync` passes to a function is one for the blocking `send`.
    """
    options = {
        "headers": headers,
        "key": key,
        "delay": delay,
        "deliver_at": deliver_at,
        "ttl": ttl,
        "partition_key": partition_key,
    }
    _payloads.check_functions(encoder=encoder)
    call = statements.send(queue, type, payload, options, encoder)
    with otel.timed("send", queue):
        return _value(conn, int, call)


def send_batch(
    conn: object,
    queue: str,
    payloads: Iterable[Payload | Event],
    *,
    type: str | None = None,
    headers: Sequence[Mapping[str, object] | None] | None = None,
    keys: Sequence[str | None] | None = None,
    delays: Sequence[Seconds | None] | None = None,
    deliver_ats: Sequence[datetime | None] | None = None,
    ttls: Sequence[Seconds | None] | None = None,
    partition_keys: Sequence[str | None] | None = None,
    encoder: Encoder | None = None,
) -> list[int]:
    """Send many messages of one type, all or none, and return their ids in input order. Calls
    `pgque.send_batch`.

    `conn` is what `send` takes; the other arguments are those of `PgqueClient.send_batch`, and
    `encoder` is that of a client.
    """
    options = {
        "headers": headers,
        "key": keys,
        "delay": delays,
        "deliver_at": deliver_ats,
        "ttl": ttls,
        "partition_key": partition_keys,
    }
    _payloads.check_functions(encoder=encoder)
    call = statements.send_batch(queue, type, payloads, options, encoder)
    with otel.timed("send", queue):
        return _value(conn, list, call)


def receive(
    conn: object,
    queue: str,
    consumer: str,
    max_messages: int = 100,
    *,
    worker: str | None = None,
    visibility_timeout: Seconds | None = None,
    ack_batch: int | None = None,
    max_bytes: int | None = statements.MAX_BYTES,
    decoder: Decoder | None = None,
) -> list[Message]:
    """Return the next batch, at most `max_messages` long, or [] if there is none. Calls `pgque.receive`.

    `conn` is as of `send`; the other arguments are those of `PgqueClient.receive`, and `decoder`
    is that of a client. If the transaction is rolled back, the batch is redelivered. Times of messages are in
    UTC.
    """
    _payloads.check_functions(decoder=decoder)
    make: Callable[..., Message] = _payloads.message_maker(Message, decoder)
    call, params = statements.receive(
        queue, consumer, max_messages, worker, visibility_timeout, ack_batch, max_bytes
    )
    with otel.timed("receive", queue, consumer):
        rows = run(conn, f"select {portable.MESSAGE} from {call} as m", params)
    return [portable.message(row, make) for row in rows]


@overload
def ack(conn: object, batch_id: int, msgs: None = None) -> int: ...


@overload
def ack(conn: object, batch_id: int, msgs: Sequence[MessageOrId]) -> list[Outcome]: ...


def ack(
    conn: object, batch_id: int, msgs: Sequence[MessageOrId] | None = None
) -> int | list[Outcome]:
    """Acknowledge a batch: return 1, or 0 if it was not open. Calls `pgque.ack`.

    With `msgs`, acknowledge only these messages, and return an Outcome for each. `conn` is as of
    `send`. In the transaction that writes the result of a message, result and acknowledgement are
    committed together.
    """
    if msgs is None:
        return _value(conn, int, statements.ack(batch_id))
    return _outcomes(conn, statements.outcomes("ack", batch_id, msgs))


@overload
def nack(
    conn: object,
    batch_id: int,
    msg: MessageOrId,
    retry_after: Seconds | None = None,
    reason: str | None = None,
) -> int: ...


@overload
def nack(
    conn: object,
    batch_id: int,
    msg: Sequence[MessageOrId],
    retry_after: Seconds | None = None,
    reason: str | None = None,
) -> list[Outcome]: ...


def nack(
    conn: object,
    batch_id: int,
    msg: MessageOrId | Sequence[MessageOrId],
    retry_after: Seconds | None = None,
    reason: str | None = None,
) -> int | list[Outcome]:
    """Reject messages of an open batch: they are redelivered after `retry_after` seconds. Calls `pgque.nack`.

    `conn` is as of `send`; the rest is as of `PgqueClient.nack`: 1 for one message, an Outcome for
    each of a sequence.
    """
    options = {
        "retry_after": ("interval", encode.interval(retry_after)),
        "reason": ("text", encode.clean_reason(reason)),
    }
    if not isinstance(msg, (Message, int)):
        return _outcomes(conn, statements.outcomes("nack", batch_id, msg, options))
    return _value(conn, int, statements.nack(batch_id, msg, options))


def _value(conn: object, kind: type[T], call: Call) -> T:
    """Return what a function returns."""
    sql, params = call
    rows = run(conn, f"select {sql}", params)
    value = rows[0][0] if rows else None
    if not isinstance(value, kind):
        raise PgqueError(f"the server answered {value!r} where {kind.__name__} was expected")
    return value


def _outcomes(conn: object, call: Call) -> list[Outcome]:
    sql, params = call
    rows = run(conn, f"select {statements.OUTCOME} from {sql} as o", params)
    return [Outcome(*row) for row in rows]  # type: ignore[arg-type]
