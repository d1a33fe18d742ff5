"""What workers have in hand, and how it is settled. Shared by the sync and the async side; nothing waits."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, Literal, NamedTuple, TypeVar

from . import _encode
from .errors import PgqueBadArgument, described
from .outcomes import Dead, HandlerOutcome, Release, Retry
from .types import Message, Seconds, columns

M = TypeVar("M", bound=Message)

# A statement and its parameters.
Call = tuple[str, Mapping[str, object]]

# A hand-out that is lost in a crash of the server is only a redelivery, so it need not wait for the disk.
_UNHURRIED = "(select set_config('synchronous_commit', 'off', true) offset 0) as unhurried"


# What can be done to all that is left of a batch at once.
_WHOLE = frozenset({"ack", "archive", "release"})
_NOT_HELD = "lost to another worker"

# Longest `min_interval`, in seconds: a day.
_LONGEST_INTERVAL = 86400


class Refused(NamedTuple):
    """Hold an outcome that did not count: the message (None for the whole batch) and why."""

    msg_id: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Say what to do with a message."""

    verb: Literal["ack", "archive", "nack", "dead", "release"]
    after: timedelta | None = None
    reason: str | None = None


def verdict_of(outcome: object, success: Verdict, retry_after: timedelta | None) -> Verdict:
    """Return what becomes of a message, from what its handler returned or the HandlerOutcome it raised."""
    if isinstance(outcome, type) and issubclass(outcome, HandlerOutcome):
        outcome = outcome()
    match outcome:
        case Retry(after=after, reason=reason):
            return Verdict("nack", retry_after if after is None else after, reason)
        case Dead(reason=reason):
            return Verdict("dead", None, reason)
        case Release():
            return Verdict("release")
    return success


def failure(error: BaseException, retry_after: timedelta | None) -> Verdict:
    """Return what becomes of a message whose handler failed."""
    return Verdict("nack", retry_after, described(error))


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The name of a queue, and the settings that say what becomes of its failed messages."""

    name: str
    max_retries: int = 0
    max_receive_attempts: int = 0
    drop_policy: str = "dead_letter"

    @classmethod
    def of(cls, name: str, config: Mapping[str, str | None]) -> QueueSettings:
        """Return what `queue_config` answered."""
        return cls(
            name,
            int(config["max_retries"] or 0),
            int(config["max_receive_attempts"] or 0),
            config["drop_policy"] or "",
        )

    def failure(
        self, message: Message, consumer: str, error: BaseException, after: Seconds | None, shared: bool
    ) -> str:
        """Return what to log of a handler that failed; `shared` is a message of a worker's batch."""
        retries = message.retry_count or 0
        attempt, limit = retries + 1, self.max_retries + 1
        if shared:
            attempt = message.receive_count or 1
            limit = min(self.max_receive_attempts, attempt + self.max_retries - retries)
        if attempt >= limit:
            following = f"no retry is left, drop_policy {self.drop_policy}"
        elif after is None:
            following = "retry as the queue's retry_backoff says"
        else:
            following = f"retry in {seconds(after):g} s"
        return (
            f"handler failed: queue {self.name}, consumer {consumer}, type {message.type!r},"
            f" message {message.msg_id}, attempt {attempt} of {limit}, {following}: {described(error)}"
        )


class Batch(Generic[M]):
    """Hold a batch that was handed out: what is not settled yet, and what is to become of it."""

    def __init__(self, messages: Sequence[M], received_at: float) -> None:
        self.batch_id = messages[0].batch_id
        self.received_at = received_at  # before it was asked for, by the monotonic clock
        self.extended_at = received_at
        self.told_at = received_at
        self.lost = False
        self.expiry_logged = False
        self._has_released = False  # those could still be acked, with the whole batch
        self._unsettled = {message.msg_id for message in messages}
        self._verdicts: dict[int, Verdict] = {}

    @property
    def unfinished(self) -> int:
        """Count the messages whose outcome is not known."""
        return len(self._unsettled) - len(self._verdicts)

    @property
    def is_settled(self) -> bool:
        """Say whether nothing is left to be done."""
        return not self._unsettled

    @property
    def has_verdicts(self) -> bool:
        """Say whether outcomes are known that the server was not told."""
        return bool(self._verdicts)

    @property
    def is_owed(self) -> bool:
        """Say whether a handler still runs, or something is known that silence would not say: a message that
        is not settled comes again."""
        return self.unfinished > 0 or any(verdict.verb != "release" for verdict in self._verdicts.values())

    def has_expired(self, visibility_timeout: Seconds) -> bool:
        """Say whether others may receive its messages: the server knows of no extension since."""
        return time.monotonic() - self.extended_at > seconds(visibility_timeout)

    def decide(self, msg_ids: Iterable[int], verdict: Verdict) -> None:
        """Note what is to become of messages."""
        self._verdicts.update((msg_id, verdict) for msg_id in msg_ids if msg_id in self._unsettled)

    def calls(self) -> list[Call]:
        """Return the statements that tell the server what is known; each gives the outcomes it refused."""
        groups: dict[Verdict, list[int]] = defaultdict(list)
        for msg_id, verdict in self._verdicts.items():
            groups[verdict].append(msg_id)
        calls = []
        can_be_whole = self.unfinished == 0 and not self._has_released
        self._has_released |= any(verdict.verb == "release" for verdict in groups)
        # Acks last: where all outcomes are known one call for the rest of the batch does for them.
        for verdict in sorted(groups, key=lambda verdict: verdict.verb == "ack"):
            is_rest = verdict.verb == "ack" and not self._has_released
            if can_be_whole and verdict.verb in _WHOLE and (is_rest or len(groups) == 1):
                calls.append(_settle_batch(self.batch_id, verdict, groups[verdict]))
            else:
                calls.append(settle(self.batch_id, verdict, groups[verdict]))
        return calls

    def told(self) -> None:
        """Take note that the statements of `calls` were committed."""
        self.told_at = time.monotonic()
        self._unsettled -= self._verdicts.keys()
        self._verdicts.clear()

    def holds(self, msg_id: int) -> bool:
        """Say whether the outcome of a message is still to be chosen."""
        return msg_id in self._unsettled and msg_id not in self._verdicts

    def undecided(self) -> list[int]:
        """Return the ids of the messages whose outcome is not known."""
        return [msg_id for msg_id in self._unsettled if msg_id not in self._verdicts]

    def drop(self, msg_id: int, verdict: Verdict) -> None:
        """Take note that the server was told the outcome of a message."""
        self._has_released |= verdict.verb == "release"
        self._unsettled.discard(msg_id)
        self._verdicts.pop(msg_id, None)


def settle(batch_id: int, verdict: Verdict, msg_ids: Sequence[int] | None) -> Call:
    """Return the statement that settles messages (a release: None is all); it gives those whose outcome was
    refused."""
    if verdict.verb == "release":
        return (
            f"select null::bigint, '{_NOT_HELD}'"
            " from pgque.release(%(batch)s::bigint, %(msg_ids)s::bigint[]) as r (done) where r.done = 0",
            {"batch": batch_id, "msg_ids": msg_ids},
        )
    sql, params = _encode.arguments(
        {
            "msg_ids": ("bigint[]", msg_ids),
            "retry_after": ("interval", verdict.after),
            "reason": ("text", verdict.reason),
        }
    )
    return (
        f"select o.msg_id, o.reason from pgque.{verdict.verb}(%(batch)s::bigint{sql}) as o where not o.ok",
        {"batch": batch_id, **params},
    )


def _settle_batch(batch_id: int, verdict: Verdict, msg_ids: Sequence[int]) -> Call:
    """Return the statement that settles all that is left of a batch."""
    if verdict.verb == "ack":
        # It is refused whole when others have some of it; then those that are still held are acked. The case
        # makes the second call wait for the first.
        return (
            "select o.msg_id, o.reason from (select pgque.ack(%(batch)s::bigint) offset 0) as r (done),"
            " lateral pgque.ack(%(batch)s::bigint, case r.done when 0 then %(msg_ids)s::bigint[] end) as o"
            " where r.done = 0 and not o.ok",
            {"batch": batch_id, "msg_ids": msg_ids},
        )
    if verdict.verb == "archive":
        sql = "select o.msg_id, o.reason from pgque.archive(%(batch)s::bigint) as o where not o.ok"
        return sql, {"batch": batch_id}
    return settle(batch_id, verdict, None)


def take(queue: str, consumer: str, worker: str, count: int, visibility_timeout: Seconds) -> Call:
    """Return the statement that receives messages for a worker."""
    return (
        f"select {columns(Message, 'm')} from {_UNHURRIED},"
        " lateral pgque.receive(%(queue)s::text, %(consumer)s::text, %(max)s::int,"
        " worker => %(worker)s::text, visibility_timeout => %(timeout)s::interval) as m",
        {
            "queue": queue,
            "consumer": consumer,
            "max": count,
            "worker": worker,
            "timeout": _encode.interval(visibility_timeout),
        },
    )


def extend(batch_id: int, by: float) -> Call:
    """Return the statement that adds seconds to the deadline of a batch; it gives how many messages are
    still held."""
    return (
        f"select r.held from {_UNHURRIED},"
        " lateral pgque.extend(%(batch)s::bigint, %(by)s::interval) as r (held)",
        {"batch": batch_id, "by": _encode.interval(by)},
    )


def worker_name() -> str:
    """Return a name for a worker that no other has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def check_min_interval(value: float) -> None:
    """Raise PgqueBadArgument for what cannot be the `min_interval` of a consumer or a worker."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _LONGEST_INTERVAL:  # nan is not in between
        raise PgqueBadArgument(f"min_interval must be from 0 to {_LONGEST_INTERVAL} seconds, not {value!r}")


def due_after(received_at: float, min_interval: float, count: int, most: int) -> float:
    """Return when to receive again after `count` messages of `most`: at once after a full batch."""
    return received_at + min_interval if count < most else received_at


def seconds(value: Seconds) -> float:
    """Return a length of time in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else float(value)
