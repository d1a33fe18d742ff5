"""The batch that an earlier process of a consumer left open when it was killed, perhaps by a handler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

from ..types import ConsumerInfo, Message
from .batches import RELEASE, MessageOutcome

log = logging.getLogger("pgque.consumer")

_ENDED = "the process that handled this message ended before it reported an outcome"


class LeftBatch:
    """Find the message that ends the process, where a consumer reads alone.

    It is not known which message of the batch was handled then, so they are received one at a time: if one of
    them ends this process too, the next process finds it alone. A message that is found alone, and was left
    before, is rejected, so that it is dead after the queue's `max_retries`. One end of a process may have
    another cause.
    """

    def __init__(self) -> None:
        self._batch_id: int | None = None
        self._alone: set[int] = set()
        self.is_known = False

    def note_open(self, found: Sequence[ConsumerInfo]) -> None:
        """Take note of the batch that is open before this process receives one."""
        self._batch_id = next((info.current_batch for info in found if info.current_batch is not None), None)
        self.is_known = True

    def count(self, most: int) -> int:
        """Return how many messages to receive."""
        return 1 if self._alone else most

    def outcome(self, received: Sequence[Message], retry_after: timedelta | None) -> MessageOutcome | None:
        """Return the outcome of a batch that was received, or None if it is to be handled."""
        if self._batch_id is None:
            return None
        if not received or received[0].receive_count == 1:
            self._alone.clear()  # due retries come first: those that did not come have expired, say
        self._alone.difference_update(message.msg_id for message in received)
        if not received or received[0].batch_id != self._batch_id:
            return None
        first = received[0]
        if len(received) == 1 and (first.receive_count or 1) > (first.retry_count or 0) + 1:
            log.warning("message %s of queue %s is rejected: %s", first.msg_id, first.queue, _ENDED)
            return MessageOutcome("nack", retry_after, _ENDED)
        self._alone = {message.msg_id for message in received}
        log.warning(
            "the process that had batch %s of queue %s ended before it reported the outcomes: its %s messages"
            " are received one at a time, so that one that ends it is found",
            first.batch_id,
            first.queue,
            len(received),
        )
        return RELEASE
