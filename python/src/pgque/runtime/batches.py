"""The batches that a worker has leased, and the statements that receive them and report their outcomes.

Shared by the sync and the async side; nothing here waits.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ..codec import encode
from ..errors import PgqueBadArgumentError, described
from ..outcomes import Dead, HandlerOutcome, Outcomes, Release, Retry, reason_of, retry_interval
from ..types import Message, Seconds, columns

M = TypeVar("M", bound=Message)

log = logging.getLogger("pgque.worker")

# A statement and its parameters.
Statement = tuple[str, Mapping[str, object]]

# A delivery that is lost in a crash of the server is only a redelivery, so it need not wait for the disk.
_ASYNC_COMMIT = "(select set_config('synchronous_commit', 'off', true) offset 0) as async_commit"
# The role's own setting stays if the parameter is null.
_LOCK_TIMEOUT = (
    "(select set_config('lock_timeout', coalesce(%(lock_timeout)s::text, current_setting('lock_timeout')),"
    " true) offset 0) as lock_timeout"
)


# Actions that one call can take for all remaining messages of a batch.
_WHOLE_BATCH_ACTIONS = frozenset({"ack", "archive", "release"})
_LEASE_LOST = "lost to another worker"
_BATCH_LOST = "it went to another worker, or its acknowledgement was lost with the connection"


class Refused(NamedTuple):
    """An outcome that the server refused: of one message, or of the whole batch (None), and why."""

    msg_id: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class MessageOutcome:
    """The outcome of one message: what to do with it, when to retry it, and why."""

    action: Literal["ack", "archive", "nack", "dead", "release"]
    retry_after: timedelta | None = None
    reason: str | None = None

    @property
    def is_success(self) -> bool:
        """Return whether the message was handled."""
        return self.action in ("ack", "archive")

    @property
    def redelivers(self) -> bool:
        """Return whether the message is to be handled again, if it has attempts left."""
        return self.action in ("nack", "release")


ACK = MessageOutcome("ack")
ARCHIVE = MessageOutcome("archive")
RELEASE = MessageOutcome("release")


def outcome_of(returned: object, success: MessageOutcome, retry_after: timedelta | None) -> MessageOutcome:
    """Return the outcome of a message, from the value that its handler returned or the HandlerOutcome that it
    raised. Any other value is a success.

    A class of the program may have set the attributes without the checks of Retry and Dead. A wrong attribute
    is a failure of this message only, so that the outcomes of the others can be reported."""
    if isinstance(returned, type) and issubclass(returned, HandlerOutcome):
        returned = returned()
    match returned:
        case Retry(retry_after=after, reason=reason):
            try:
                own = retry_interval(after)
            except PgqueBadArgumentError as error:
                return failure_outcome(error, retry_after)
            return MessageOutcome("nack", retry_after if own is None else own, reason_of(reason))
        case Dead(reason=reason):
            return MessageOutcome("dead", None, reason_of(reason))
        case Release():
            return RELEASE
        case Outcomes():
            text = "Outcomes are of a batch handler: a handler of one message returns its outcome"
            return failure_outcome(TypeError(text), retry_after)
        case HandlerOutcome():
            # A class of the program derives from Retry or Dead without a call of their __init__.
            name = type(returned).__qualname__
            return failure_outcome(
                TypeError(f"{name} has none of the attributes of Retry or Dead"), retry_after
            )
    return success


def failure_outcome(
    error: BaseException, retry_after: timedelta | None, is_dead: bool = False
) -> MessageOutcome:
    """Return the outcome of a message whose handler failed; it `is_dead` where a retry is of no use."""
    if is_dead:
        return MessageOutcome("dead", None, described(error))
    return MessageOutcome("nack", retry_after, described(error))


class Batch(Generic[M]):
    """Keep the messages of a leased batch that have no outcome, and the outcomes to be reported."""

    def __init__(self, messages: Sequence[M], received_at: float) -> None:
        self.batch_id = messages[0].batch_id
        self.queue = messages[0].queue
        self.received_at = received_at  # before it was asked for, by the monotonic clock
        self.extended_at = received_at
        self.reported_at = received_at
        self.lost = False
        self.misses_some = False  # others may have ended some of its messages: cancelled them, say
        self.expiry_logged = False
        self._has_released = False  # those could still be acked, with the whole batch
        self._unreported = {message.msg_id for message in messages}
        self._outcomes: dict[int, MessageOutcome] = {}

    @property
    def unfinished(self) -> int:
        """Count the messages that have no outcome."""
        return len(self._unreported) - len(self._outcomes)

    @property
    def is_finished(self) -> bool:
        """Return whether the outcomes of all messages were reported."""
        return not self._unreported

    @property
    def has_outcomes(self) -> bool:
        """Return whether there are outcomes to be reported."""
        return bool(self._outcomes)

    @property
    def must_report(self) -> bool:
        """Return whether a handler still runs, or there is an outcome other than a release to be reported: a
        message without an outcome is redelivered anyway."""
        return self.unfinished > 0 or any(outcome.action != "release" for outcome in self._outcomes.values())

    def has_expired(self, visibility_timeout: float) -> bool:
        """Return whether others may receive its messages, because no extension was reported to the server for
        `visibility_timeout` seconds."""
        return time.monotonic() - self.extended_at > visibility_timeout

    def extension(self, now: float, lock_timeout: float | None = None) -> Statement:
        """Return the statement that extends the lease by the time that has passed."""
        return extend(self.batch_id, now - self.extended_at, lock_timeout)

    def note_extended(self, now: float, held: int | None) -> None:
        """Take note of how many messages an extension found to be leased.

        None is left also where all outcomes were reported meanwhile, in another thread. So the batch is lost
        only if messages have no outcome: what is reported too late is refused by the server. And for the same
        reason it is to be asked which messages are missing.
        """
        self.extended_at = now
        self.misses_some |= (held or 0) < len(self._unreported)
        if not held and self.unfinished > 0 and not self.lost:
            self.lost = True
            log.warning("batch %s is lost: its lease expired, or it was cancelled", self.batch_id)

    def record(self, msg_ids: Iterable[int], outcome: MessageOutcome) -> None:
        """Record the outcome of messages, to be reported."""
        for msg_id in msg_ids:
            if msg_id in self._unreported:
                self._outcomes[msg_id] = outcome

    def statements(self) -> list[Statement]:
        """Return the statements that report the outcomes; each returns those that the server refused."""
        return self.statements_for(self._outcomes, self.are_last(self._outcomes))

    def statements_for(self, outcomes: Mapping[int, MessageOutcome], are_last: bool) -> list[Statement]:
        """Return the statements that report these outcomes; each returns those that the server refused."""
        groups = _grouped(outcomes)
        statements = []
        can_be_whole = are_last and not self._has_released
        self._has_released |= any(outcome.action == "release" for outcome in groups)
        # Acks last: where every message has an outcome, one call acks the rest of the batch.
        for outcome in sorted(groups, key=lambda outcome: outcome.action == "ack"):
            is_rest = outcome.action == "ack" and not self._has_released
            if can_be_whole and outcome.action in _WHOLE_BATCH_ACTIONS and (is_rest or len(groups) == 1):
                statements.append(_report_batch(self.batch_id, outcome, groups[outcome]))
            else:
                statements.append(report(self.batch_id, outcome, groups[outcome]))
        return statements

    def are_last(self, outcomes: Mapping[int, MessageOutcome]) -> bool:
        """Return whether no other message of the batch is without a reported outcome."""
        return len(outcomes) == len(self._unreported)

    def note_last(self) -> None:
        """Take note that statements for the last outcomes of the batch were committed, in another
        transaction than those of `statements`."""

    def forget(self, msg_id: int) -> None:
        """Forget a message that needs no report: others have it, or its handler's transaction reported it."""
        self._unreported.discard(msg_id)
        self._outcomes.pop(msg_id, None)

    def mark_reported(self) -> None:
        """Forget the outcomes, after the transaction of `statements` was committed."""
        self.reported_at = time.monotonic()
        # In this order, so that another thread never counts them as unfinished.
        self._unreported -= self._outcomes.keys()
        self._outcomes.clear()

    def is_open(self, msg_id: int) -> bool:
        """Return whether a message still has no outcome."""
        return msg_id in self._unreported and msg_id not in self._outcomes

    def open_messages(self) -> list[int]:
        """Return the ids of the messages that have no outcome."""
        return [msg_id for msg_id in self._unreported if msg_id not in self._outcomes]

    def mark_message_reported(self, msg_id: int, outcome: MessageOutcome) -> None:
        """Forget one message, after its outcome was reported."""
        self._has_released |= outcome.action == "release"
        self.forget(msg_id)


class OwnBatch(Batch[M]):
    """Keep a batch that no worker shares: it has no lease, and stays open until it is acknowledged.

    Args:
        messages: the messages of the batch.
        received_at: as of `Batch`.
        sign: returns the statement by which a subconsumer shows that it is alive.
    """

    def __init__(
        self, messages: Sequence[M], received_at: float, sign: Callable[[float | None], Statement]
    ) -> None:
        super().__init__(messages, received_at)
        self._sign = sign
        self.is_closed = False

    @property
    def is_finished(self) -> bool:
        """Return whether the batch was acknowledged."""
        return self.is_closed

    @property
    def has_outcomes(self) -> bool:
        """Return whether there are outcomes to be reported, or the batch is to be closed."""
        return bool(self._outcomes) or (not self._unreported and not self.is_closed)

    def has_expired(self, visibility_timeout: float) -> bool:
        """Return False: a report finds out whether another subconsumer has the batch."""
        return False

    def extension(self, now: float, lock_timeout: float | None = None) -> Statement:
        """Return the statement by which a subconsumer shows that it is alive."""
        return self._sign(lock_timeout)

    def note_extended(self, now: float, held: int | None) -> None:
        """Take note that the sign was given."""
        self.extended_at = now

    def note_last(self) -> None:
        """Take note that the batch was closed."""
        self.is_closed = True

    def statements_for(self, outcomes: Mapping[int, MessageOutcome], are_last: bool) -> list[Statement]:
        """Return the statements that report these outcomes, and close the batch behind the last; each returns
        those that the server refused."""
        if self.is_closed:
            return []
        statements = [
            report(self.batch_id, outcome, msg_ids)
            for outcome, msg_ids in _grouped(outcomes).items()
            if outcome.action != "ack" or not are_last
        ]
        if are_last:
            sql = (
                f"select null::bigint, '{_BATCH_LOST}' from pgque.ack(%(batch)s::bigint) as r (done)"
                " where r.done = 0"
            )
            statements.append((sql, {"batch": self.batch_id}))
        return statements

    def mark_reported(self) -> None:
        """Forget the outcomes, after the transaction of `statements` was committed."""
        super().mark_reported()
        self.is_closed = not self._unreported


class Item(NamedTuple):
    """Messages of a batch that one thread or task handles: one, those that share a transaction, or those of a
    call of a batch handler."""

    batch: Batch[Message]
    messages: Sequence[Message]
    was_lost: bool = False  # whether the connection was lost while the messages were handled
    together: bool = False  # whether one call handles them

    def calls(self) -> Sequence[Sequence[Message]]:
        """Return the messages by calls of their handlers."""
        return [self.messages] if self.together else [[message] for message in self.messages]


@dataclass(slots=True, eq=False)
class Running:
    """An item that is handled, the messages that its handler has, since when, and where in the pool."""

    item: Item
    place: Any
    messages: Sequence[Message]
    since: float = math.inf  # until it begins
    is_logged: bool = False
    is_over: bool = False  # its outcome no longer counts
    is_reporting: bool = False  # its outcomes are in its transaction

    def others(self, messages: Sequence[Message] | None = None) -> list[Item]:
        """Return the messages of the item except `messages` (by default those that the handler has), as an
        item if there are some."""
        ids = {message.msg_id for message in messages or self.messages}
        others = [message for message in self.item.messages if message.msg_id not in ids]
        return [self.item._replace(messages=others, was_lost=False)] if others else []

    def note_started(self, messages: Sequence[Message]) -> None:
        """Take note that the handler has other messages."""
        self.since = time.monotonic()  # before them: other threads read both
        self.messages = messages
        self.is_logged = False


def _grouped(outcomes: Mapping[int, MessageOutcome]) -> Mapping[MessageOutcome, list[int]]:
    """Return the ids of the messages with each outcome."""
    found = iter(outcomes.values())
    first = next(found, None)
    if first is not None and all(outcome is first for outcome in found):
        return {first: list(outcomes)}
    groups: dict[MessageOutcome, list[int]] = defaultdict(list)
    for msg_id, outcome in outcomes.items():
        groups[outcome].append(msg_id)
    return groups


def report(batch_id: int, outcome: MessageOutcome, msg_ids: Sequence[int] | None) -> Statement:
    """Return the statement that reports the outcome of messages (a release: None is all); it returns those
    that the server refused."""
    if outcome.action == "release":
        return (
            f"select null::bigint, '{_LEASE_LOST}'"
            " from pgque.release(%(batch)s::bigint, %(msg_ids)s::bigint[]) as r (done) where r.done = 0",
            {"batch": batch_id, "msg_ids": _array(msg_ids)},
        )
    sql, params = encode.arguments(
        {
            "msg_ids": ("bigint[]", _array(msg_ids)),
            "retry_after": ("interval", outcome.retry_after),
            "reason": ("text", outcome.reason),
        }
    )
    return (
        f"select o.msg_id, o.reason from pgque.{outcome.action}(%(batch)s::bigint{sql}) as o where not o.ok",
        {"batch": batch_id, **params},
    )


def _report_batch(batch_id: int, outcome: MessageOutcome, msg_ids: Sequence[int]) -> Statement:
    """Return the statement that reports the outcome of all that is left of a batch."""
    if outcome.action == "ack":
        # It is refused whole when others have some of it; then those that are still leased are acked. The
        # case makes the second call wait for the first.
        return (
            "select o.msg_id, o.reason from (select pgque.ack(%(batch)s::bigint) offset 0) as r (done),"
            " lateral pgque.ack(%(batch)s::bigint, case r.done when 0 then %(msg_ids)s::bigint[] end) as o"
            " where r.done = 0 and not o.ok",
            {"batch": batch_id, "msg_ids": _array(msg_ids)},
        )
    if outcome.action == "archive":
        sql = "select o.msg_id, o.reason from pgque.archive(%(batch)s::bigint) as o where not o.ok"
        return sql, {"batch": batch_id}
    return report(batch_id, outcome, None)


def _array(ids: Sequence[int] | None) -> str | None:
    """Return ids as the text of an array, which is made much faster than a list is converted."""
    return None if ids is None else f"{{{','.join(map(str, ids))}}}"


def receive(
    queue: str, consumer: str, worker: str, count: int, visibility_timeout: Seconds, max_bytes: int | None
) -> Statement:
    """Return the statement that receives messages for a worker."""
    call = (
        "pgque.receive(%(queue)s::text, %(consumer)s::text, %(max)s::int,"
        " worker => %(worker)s::text, visibility_timeout => %(timeout)s::interval,"
        " max_bytes => %(bytes)s::bigint)"
    )
    return _delivery(
        call,
        {
            "queue": queue,
            "consumer": consumer,
            "max": count,
            "worker": worker,
            "timeout": encode.interval(visibility_timeout),
            "bytes": max_bytes,
        },
    )


def receive_alone(
    queue: str,
    consumer: str,
    subconsumer: str | None,
    count: int,
    dead_interval: Seconds | None,
    max_bytes: int | None,
) -> Statement:
    """Return the statement that receives the next batch of a consumer without workers, or of a
    subconsumer."""
    params: dict[str, object] = {"queue": queue, "consumer": consumer, "max": count, "bytes": max_bytes}
    if subconsumer is None:
        call = (
            "pgque.receive(%(queue)s::text, %(consumer)s::text, %(max)s::int, max_bytes => %(bytes)s::bigint)"
        )
        return _delivery(call, params)
    call = (
        "pgque.receive_coop(%(queue)s::text, %(consumer)s::text, %(subconsumer)s::text, %(max)s::int,"
        " %(dead)s::interval, %(bytes)s::bigint)"
    )
    return _delivery(call, {**params, "subconsumer": subconsumer, "dead": encode.interval(dead_interval)})


def _delivery(call: str, params: Mapping[str, object]) -> Statement:
    return f"select {columns(Message, 'm')} from {_ASYNC_COMMIT}, lateral {call} as m", params


def extend(batch_id: int, by: float, lock_timeout: float | None = None) -> Statement:
    """Return the statement that adds seconds to the lease of a batch; it returns how many messages are still
    leased, and fails if it waits for a lock longer than `lock_timeout` seconds."""
    return (
        f"select r.held from {_ASYNC_COMMIT}, {_LOCK_TIMEOUT},"
        " lateral pgque.extend(%(batch)s::bigint, %(by)s::interval) as r (held)",
        {"batch": batch_id, "by": encode.interval(by), "lock_timeout": _milliseconds(lock_timeout)},
    )


def touch(queue: str, consumer: str, subconsumer: str | None, lock_timeout: float | None) -> Statement:
    """Return the statement that reports that a subconsumer is alive; it fails if it waits for a lock longer
    than `lock_timeout` seconds."""
    return (
        f"select r.found from {_ASYNC_COMMIT}, {_LOCK_TIMEOUT}, lateral pgque.touch_subconsumer("
        "%(queue)s::text, %(consumer)s::text, %(subconsumer)s::text) as r (found)",
        {
            "queue": queue,
            "consumer": consumer,
            "subconsumer": subconsumer,
            "lock_timeout": _milliseconds(lock_timeout),
        },
    )


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{max(1, round(1000 * seconds))}ms"


def worker_name() -> str:
    """Return a name for a worker that no other has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
