"""The values that the client returns and takes: frozen, slotted, and nothing but data."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, cast, overload

from .codec.convert import MisfitError, converter, name_of
from .codec.decode import parse_json
from .errors import PgquePayloadError

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # A Message without an argument is one whose value may be anything, as that of json.loads.
    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

M = TypeVar("M")

# str travels as text, byte for byte; bytes as bytes; None as NULL; anything else as JSON, such as dict, list,
# numbers, models, and what an encoder replaces.
Payload: TypeAlias = object

# Lengths of time: a timedelta, or a number of seconds.
Seconds: TypeAlias = int | float | timedelta

# Values of queue settings; a timedelta becomes an interval, None returns to the default.
Setting: TypeAlias = str | int | float | bool | timedelta | Mapping[str, object] | None


class _Decoding:
    """The decoder of a message, and its value once that was read; both are no columns."""

    __slots__ = ("_decoder", "_value")

    _decoder: Callable[[Message], object]
    _value: object


@dataclass(frozen=True, slots=True)
class Message(_Decoding, Generic[T_co]):
    """Describe one message of a batch, as `receive` and `peek` return it.

    `payload` is its text, or `payload_bytes` its bytes; `value` and `into(Model)` read them. A handler with a
    `Message[Model]` gets one whose `value` is a Model.

    `receive_count` is 1 at the first delivery. A message gets its outcome by its batch: `ack(batch_id)`
    acknowledges all messages of the batch that were not rejected before. Columns that the server does not
    fill are None.

    `headers` are read as `json` reads a payload. If they are nested too deeply, reading them raises
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
    headers: dict[str, Any] | None = None
    key: str | None = None
    payload_bytes: bytes | None = None
    receive_count: int | None = None
    last_error: str | None = None
    expires_at: datetime | None = None
    queue: str | None = None

    def json(self) -> Any:
        """Return the payload parsed as JSON. A whole number of more than 4,300 digits is a Decimal.

        Raises ValueError if the payload is not JSON, nested too deeply, or None.
        """
        if self.payload is None:
            raise ValueError(f"message {self.msg_id} has no payload")
        return parse_json(self.payload)

    @property
    def value(self) -> T_co:
        """Return the payload as a Python value.

        In the handler of a `Message[Model]` it is a Model, otherwise the result of the `decoder`. Without
        either it is bytes for bytes, None for NULL, and the value of the JSON for anything else. Raises
        PgquePayloadError for a payload that cannot be decoded.
        """
        try:
            return cast(T_co, self._value)
        except AttributeError:
            value = self._decoded()
        object.__setattr__(self, "_value", value)
        return cast(T_co, value)

    @overload
    def into(self, model: builtins.type[M]) -> M: ...

    @overload
    def into(self, model: object) -> object: ...

    def into(self, model: object) -> object:
        """Return the payload as a validated value of a type.

        `model` is any type that pydantic validates: a dataclass, a pydantic model, `dict[str, int]`, `UUID`,
        `Order | None`; or a msgspec Struct. A text is validated as JSON, also one that was sent as bytes;
        `str` and `bytes`, and subclasses such as a StrEnum, take it as it is. With a `decoder`, its result
        is validated. An Enum comes back only if its values are values of JSON.

        Raises PgquePayloadError for a payload that does not fit; its text names up to three problems without
        the values, except for the tag of a discriminated union, and the library's error is its `__cause__`.
        Raises TypeError for a type that no payload becomes, such as a list of Structs (put the list into a
        Struct), and ImportError if pydantic is missing or older than 2.10: `pip install "./python[typed]"`.
        """
        convert = converter(model)
        try:
            if hasattr(self, "_decoder"):
                return convert(self._decoded(), False)
            return convert(self.payload if self.payload_bytes is None else self.payload_bytes, True)
        except RecursionError:
            problem, cause = "payload: nested too deeply", None
        except MisfitError as misfit:
            problem, cause = str(misfit), misfit.__cause__
        raise PgquePayloadError(
            f"message {self.msg_id} does not fit {name_of(model)}: {problem}", queue=self.queue
        ) from cause

    def _decoded(self) -> object:
        if hasattr(self, "_decoder"):
            return self._decoder(self)
        if self.payload_bytes is not None or self.payload is None:
            return self.payload_bytes
        try:
            return parse_json(self.payload)
        except ValueError as error:
            raise PgquePayloadError(
                f"message {self.msg_id} is not JSON, its text is in message.payload: {error}",
                queue=self.queue,
            ) from error

    def __reduce__(self) -> tuple[object, ...]:
        """Return the state for pickle and copy, with the value, or the decoder if the value was not read."""
        kept = next((name for name in ("_value", "_decoder") if hasattr(self, name)), None)
        state = (kept, getattr(self, kept)) if kept else None
        return _restored, (type(self), [getattr(self, field.name) for field in fields(self)], state)


def _restored(cls: type[Message], row: list[object], state: tuple[str, object] | None) -> Message:
    message = cls(*row)  # type: ignore[arg-type]
    if state is not None:
        object.__setattr__(message, *state)
    return message


def typed(message: Message, model: type[M]) -> Message[M]:
    """Return a message whose `value` is its payload as a model. Raises PgquePayloadError."""
    object.__setattr__(message, "_value", message.into(model))
    return cast("Message[M]", message)


def with_decoder(message: Message, decoder: Callable[[Message], object]) -> None:
    """Set the decoder of a new message's payload."""
    object.__setattr__(message, "_decoder", decoder)


@dataclass(frozen=True, slots=True)
class Event:
    """Describe a message to send, with its options; for `send` and `send_batch`.

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
    """Describe one stored event, as `get_batch_events` returns it (PgQ's names without the prefix `ev_`)."""

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
    """Describe the window that an open batch was cut from."""

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
    """Report for one message id if its outcome counts; if `ok` is False, `reason` has the cause.

    Reasons are "not in this batch", "settled already", "cancelled", "lost to another worker" and "batch not
    open".
    """

    msg_id: int
    ok: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class SendResult:
    """Report the id of the event; `deduped` is true if an earlier send with this key has sent it."""

    event_id: int
    deduped: bool


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Describe the settings of a queue and its load."""

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
    """Describe the position and the lag of a consumer; `pending_events` is an estimate from the ticks."""

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
    """Describe a dead letter, with the reason of its last failure.

    `payload_size` is in bytes. `dl_held` is set if it was given up with `drop_policy` "hold".
    """

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
    ev_headers: dict[str, Any] | None = None
    ev_key: str | None = None
    ev_bytes: bytes | None = None
    payload_size: int = 0
    receive_count: int = 0
    dl_held: bool = False


@dataclass(frozen=True, slots=True)
class QueueRights:
    """Describe the rights of a role to a queue, or to all queues if `queue_name` is None."""

    queue_name: str | None
    see: bool
    produce: bool
    consume: bool
    admin: bool


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Describe the leases of one worker of a consumer; `lease_until` is when the first of them expires.

    `waiting` is the number of messages that wait for a key of which the worker has a message, with
    `key_concurrency`.
    """

    queue: str
    consumer: str
    worker: str
    batches: int
    messages: int
    last_seen: datetime | None
    lease_until: datetime | None
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """Describe a message as `list` and `get` of `client.messages` return it, once for each consumer.

    `status` is pending, processing, delayed, retry, expired, dead, failed or archived. `dl_id` is set if it
    is a dead letter; pass it to `client.dlq.requeue`.
    """

    msg_id: int
    consumer_name: str | None
    status: str
    type: str | None
    payload: str | None
    headers: dict[str, Any] | None
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
    dl_id: int | None = None


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """Describe the state of a message for one consumer; `status` as in `QueuedMessage`."""

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
    """Describe a message that was delivered more than once without an outcome, or was given up for that.

    `dl_id` is set if it is a dead letter; pass it to `client.dlq.requeue`.
    """

    msg_id: int
    consumer_name: str | None
    receive_count: int | None
    last_error: str | None
    status: str
    dl_id: int | None


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """Describe a message of the archive, with its worker and its outcome."""

    archive_id: int
    queue: str
    consumer_name: str | None
    msg_id: int
    type: str | None
    payload: str | None
    payload_bytes: bytes | None
    headers: dict[str, Any] | None
    key: str | None
    sent_at: datetime | None
    archived_at: datetime
    receive_count: int | None
    worker: str | None
    outcome: str | None


@dataclass(frozen=True, slots=True)
class RecurringMessage:
    """Describe a message that the ticker sends at its times, as `client.recurring.list` returns it.

    `status` is active, paused, ended, or failing: then the last attempt failed with `last_error`, and the
    ticker tries again. `next_run` is None while it is paused or ended. `last_run` and `last_msg_id` are those
    of the last message. `registered_at` is the time of the last `client.recurring.create`, which a Worker
    calls when it starts.
    """

    name: str
    queue_name: str
    status: str
    cron: str
    timezone: str
    next_run: datetime | None
    last_run: datetime | None
    last_msg_id: int | None
    last_error: str | None
    type_name: str | None
    payload: str | None
    payload_bytes: bytes | None
    headers: dict[str, Any] | None
    key: str | None
    delay: timedelta | None
    ttl: timedelta | None
    partition_key: str | None
    catch_up: str
    starts_at: datetime | None
    ends_at: datetime | None
    created_by: str
    created_at: datetime
    registered_at: datetime


@dataclass(frozen=True, slots=True)
class QueueSetting:
    """Describe a setting of a queue, as `queue_settings` returns it.

    `value` and `default_value` are text, or None for none. `source` is "queue", "all queues"
    (`set_default_config`) or "built in".
    """

    setting: str
    value: str | None
    default_value: str | None
    source: str
    type: str
    description: str


@dataclass(frozen=True, slots=True)
class Rate:
    """Count the messages that came to a queue from `start_at` until the next one begins."""

    start_at: datetime
    events: int


@dataclass(frozen=True, slots=True)
class HistoryBucket:
    """Describe what a queue or a consumer did from `start_at` until the next one begins.

    All figures are None if no samples were taken then; the lag is also None if it was not measured.
    """

    start_at: datetime
    sent: int | None
    delivered: int | None
    failed: int | None
    dead: int | None
    lag_seconds: float | None
    pending_events: int | None


@dataclass(frozen=True, slots=True)
class LagSample:
    """Describe the lag of a consumer at a time: the age of its oldest pending message in seconds, and how
    many are pending."""

    at: datetime
    consumer: str
    lag_seconds: float
    pending_events: int


@dataclass(frozen=True, slots=True)
class Action:
    """Describe a change that a role made by hand: the role, the call, and its arguments without payloads."""

    at: datetime
    role_name: str
    application: str | None
    call: str
    queue: str | None
    args: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class DeadReason:
    """Count the dead letters of a consumer that have one reason, in which N stands for any number."""

    consumer_name: str
    reason: str
    dead_letters: int
    held: int
    oldest: datetime
    newest: datetime
    newest_dl_id: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Count the messages that `client.dlq.replay_all` sent again, and those that it could not send."""

    replayed: int
    failed: int
    first_error: str | None


@dataclass(frozen=True, slots=True)
class StatusRow:
    """Describe one line of `pgque.status()`."""

    component: str
    status: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class Metric:
    """Describe one figure. Names with `_total` only grow; `_seconds` and `_bytes` are units."""

    metric: str
    queue: str | None
    consumer: str | None
    value: float | None


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Describe the result of one check: `status` is ok, warn or fail, `advice` is what to do."""

    check_name: str
    queue: str | None
    status: str
    detail: str | None
    advice: str | None


def columns(cls: type, alias: str) -> str:
    """List the fields of a dataclass as the select list of a query over `alias`, in their order."""
    return ", ".join(f"{alias}.{field.name}" for field in fields(cls))
