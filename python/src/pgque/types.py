"""The values that the client hands out and takes: frozen, slotted, and nothing but data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import TypeAlias

from ._decode import parse_json

# str travels as text, byte for byte; bytes as bytes; dict, list, numbers and booleans as JSON; None as NULL.
Payload: TypeAlias = (
    str | bytes | bytearray | memoryview | Mapping[str, object] | Sequence[object] | int | float | bool | None
)

# Lengths of time: a timedelta, or a number of seconds.
Seconds: TypeAlias = int | float | timedelta

# Values of queue settings; a timedelta becomes an interval, None returns to the default.
Setting: TypeAlias = str | int | float | bool | timedelta | Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Message:
    """Hold one message of a batch, as `receive` and `peek` return it.

    `receive_count` is 1 at the first delivery. A message is settled by its batch: `ack(batch_id)` finishes
    all of the batch that was not nacked before. Columns that the server does not fill yet are None.

    `headers` are read as `json` reads a payload; if they are nested too deeply, who looks into them gets a
    ValueError.
    """

    msg_id: int
    batch_id: int
    type: str | None
    payload: str | None
    retry_count: int | None = None
    created_at: datetime | None = None
    extra1: str | None = None
    extra2: str | None = None
    extra3: str | None = None
    extra4: str | None = None
    headers: dict[str, object] | None = None
    key: str | None = None
    payload_bytes: bytes | None = None
    receive_count: int | None = None
    last_error: str | None = None
    expires_at: datetime | None = None
    queue: str | None = None

    def json(self) -> object:
        """Parse the payload as JSON. A whole number of more than 4,300 digits is a Decimal.

        Raises ValueError when it is not JSON or nested too deeply, and also when the message has no payload.
        """
        if self.payload is None:
            raise ValueError(f"message {self.msg_id} has no payload")
        return parse_json(self.payload)


@dataclass(frozen=True, slots=True)
class Event:
    """Hold a message to be sent, with all that goes with it; for `send` and `send_batch`.

    `delay` and `ttl` are seconds or a timedelta; a `deliver_at` without time zone is local time. For the
    other fields see `send`.
    """

    type: str
    payload: Payload
    headers: Mapping[str, object] | None = None
    key: str | None = None
    delay: Seconds | None = None
    deliver_at: datetime | None = None
    ttl: Seconds | None = None
    partition_key: str | None = None


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """Hold one stored event, as `get_batch_events` returns it (names as in PgQ, without the prefix
    `ev_`)."""

    id: int
    time: datetime
    txid: int | None
    retry: int | None
    type: str | None
    data: str | None
    extra1: str | None = None
    extra2: str | None = None
    extra3: str | None = None
    extra4: str | None = None


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Hold the window that an open batch was cut from."""

    queue_name: str
    consumer_name: str
    batch_start: datetime
    batch_end: datetime
    prev_tick_id: int
    tick_id: int
    lag: timedelta
    seq_start: int
    seq_end: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Say whether the outcome given for one message id counts; `reason` tells why not when `ok` is False.

    Reasons are "not in this batch", "settled already", "lost to another worker" and "batch not open".
    """

    msg_id: int
    ok: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class SendResult:
    """Hold the id of the event, and whether an earlier send with the same key made this one needless."""

    event_id: int
    deduped: bool


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Hold the settings of a queue and how busy it is."""

    queue_name: str
    queue_ntables: int
    queue_cur_table: int
    queue_rotation_period: timedelta
    queue_switch_time: datetime | None
    queue_external_ticker: bool
    queue_ticker_paused: bool
    queue_ticker_max_count: int
    queue_ticker_max_lag: timedelta
    queue_ticker_idle_period: timedelta
    ticker_lag: timedelta | None
    ev_per_sec: float | None
    ev_new: int | None
    last_tick_id: int | None
    queue_paused: bool
    queue_max_retries: int | None


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """Hold where a consumer stands; `pending_events` is an estimate from the ticks."""

    queue_name: str
    consumer_name: str
    lag: timedelta | None
    last_seen: timedelta | None
    last_tick: int | None
    current_batch: int | None
    next_tick: int | None
    pending_events: int | None
    role: str | None
    skipped_events: int | None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Hold a message that used up its retries, with the reason of the last failure."""

    dl_id: int
    dl_time: datetime
    dl_reason: str | None
    ev_id: int
    ev_time: datetime
    ev_retry: int | None
    ev_type: str | None
    ev_data: str | None
    ev_extra1: str | None = None
    ev_extra2: str | None = None
    ev_extra3: str | None = None
    ev_extra4: str | None = None
    consumer_name: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Hold what one worker of a consumer has in hand; `lease_until` is the earliest of its deadlines."""

    queue: str
    consumer: str
    worker: str
    batches: int
    messages: int
    last_seen: datetime | None
    lease_until: datetime | None


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """Hold a message as `list_messages` shows it, once for each consumer.

    `status` is pending, processing, delayed, retry, expired, dead, failed or archived.
    """

    msg_id: int
    consumer_name: str | None
    status: str
    type: str | None
    payload: str | None
    headers: dict[str, object] | None
    key: str | None
    payload_bytes: bytes | None
    created_at: datetime | None
    available_at: datetime | None
    receive_count: int | None
    retry_count: int | None
    last_error: str | None
    expires_at: datetime | None
    worker: str | None
    batch_id: int | None


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """Hold what became of a message with one consumer; `status` as in `QueuedMessage`."""

    consumer_name: str | None
    status: str
    receive_count: int | None
    retry_count: int | None
    available_at: datetime | None
    worker: str | None
    batch_id: int | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class PoisonMessage:
    """Hold a message that was delivered more than once without an outcome, or died of that.

    `dl_id` is set when it is a dead letter, and is what `dlq_requeue` takes.
    """

    msg_id: int
    consumer_name: str | None
    receive_count: int | None
    last_error: str | None
    status: str
    dl_id: int | None


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """Hold a message of the archive, with who handled it and how it ended."""

    archive_id: int
    queue: str
    consumer_name: str | None
    msg_id: int
    type: str | None
    payload: str | None
    payload_bytes: bytes | None
    headers: dict[str, object] | None
    key: str | None
    sent_at: datetime | None
    archived_at: datetime
    receive_count: int | None
    worker: str | None
    outcome: str | None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Count what `dlq_replay_all` sent again and what it could not."""

    replayed: int
    failed: int
    first_error: str | None


@dataclass(frozen=True, slots=True)
class StatusRow:
    """Hold one line of `pgque.status()`."""

    component: str
    status: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class Metric:
    """Hold one figure; names ending in `_total` only grow, `_seconds` and `_bytes` are units."""

    metric: str
    queue: str | None
    consumer: str | None
    value: float | None


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Hold the result of one check: `status` is ok, warn or fail, `advice` says what to do."""

    check_name: str
    queue: str | None
    status: str
    detail: str | None
    advice: str | None


def columns(cls: type, alias: str) -> str:
    """List the fields of a dataclass as the select list of a query over `alias`, in their order."""
    return ", ".join(f"{alias}.{field.name}" for field in fields(cls))
