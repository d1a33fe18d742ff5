"""The settings of a queue that a consumer or a worker needs, and what it logs of a failed handler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..codec.encode import total_seconds
from ..errors import described
from ..types import Message, Seconds


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The name of a queue, and the settings that decide what becomes of its failed messages."""

    name: str
    max_retries: int = 0
    max_receive_attempts: int = 0
    drop_policy: str = "dead_letter"

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, str | None]) -> QueueSettings:
        """Return the settings that `queue_config` returned."""
        return cls(
            name,
            int(config["max_retries"] or 0),
            int(config["max_receive_attempts"] or 0),
            config["drop_policy"] or "",
        )

    def failure_text(
        self,
        message: Message,
        consumer: str,
        error: BaseException,
        after: Seconds | None,
        leased: bool,
        given_up_for: str | None = None,
    ) -> str:
        """Return what to log of a handler that failed; `leased` is a message of a worker's batch, and one
        that is `given_up_for` a reason is not retried."""
        retries = message.retry_count or 0
        attempt, limit = retries + 1, self.max_retries + 1
        if leased:
            attempt = message.receive_count or 1
            limit = min(self.max_receive_attempts, attempt + self.max_retries - retries)
        if given_up_for is not None:
            following = f"no retry for {given_up_for}, drop_policy {self.drop_policy}"
        elif attempt >= limit:
            following = f"no retry is left, drop_policy {self.drop_policy}"
        elif after is None:
            following = "retry as the queue's retry_backoff says"
        else:
            following = f"retry in {total_seconds(after):g} s"
        return (
            f"handler failed: queue {self.name}, consumer {consumer}, type {message.type!r},"
            f" message {message.msg_id}, attempt {attempt} of {limit}, {following}: {described(error)}"
        )
