"""Read the archive of a consumer, and then its queue, as one stream.

The offset in the archive is the tick where the stream's consumer stands, and the id of the last message that
was read. Which messages belong to the archive, `archive_next` and `archive_read` decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import InputPartition

from ..errors import PgqueBadArgumentError
from . import _window
from ._compat import ReadLimit
from ._offset import Places
from .options import BY_KEY
from .source import PgqueStreamReader, refuse_loss


class PgqueHistoryReader(PgqueStreamReader):
    """Read a stream that begins in an archive.

    There, the offset is {"consumer": "spark", "queue": "orders", "tick": 17, "incarnation": "…", "archive":
    {"of": "billing", "after": 4711}}. When the archive is read, the offset is that of any stream of one
    queue.
    """

    # The offset that was planned last
    _at: Mapping[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Return the consumer's position: before the archive, if it has not read it yet."""
        offset = super().initialOffset()
        of = self._ask("select pgque.archive_of(%s, %s)", self._options.queue, self._options.consumer)
        return offset if of is None else {**offset, "archive": {"of": of, "after": 0}}

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return the end of the next piece of the archive; behind it, that of the next micro-batch."""
        at = self._here(start or self._at or self.initialOffset())
        self._reached = self._places(at)
        upto = self._next(at, self._limits(limit)[0]) if "archive" in at else None
        if upto is None:
            found = self._next_offset(_without(at), limit)
        else:
            driver = self._connected()
            self._reached = driver.known(self._reached)
            found = {**self._offset(self._reached), "archive": {**at["archive"], "after": upto}}
            # The queue goes on meanwhile.
            driver.forget_report()
            self._pace.planned(behind=True)
        self._finish(start)
        self._at = found
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split a piece of the archive by the ids of its messages, or what lies between two ticks."""
        self._begin(start, end)
        if "archive" not in end:
            self._at = end
            return super().partitions(_without(start), end)
        if end != self._at:
            self._replayed += 1
        self._at = end
        self._reached = self._places(end)
        begin = self._here(start)
        if self._here(end) is not end or "archive" not in begin:
            return []
        after, upto = begin["archive"]["after"], end["archive"]["after"]
        first = self._next(begin, 1)
        if first is None or first > upto:
            return []
        # The archive is not split by key.
        parts = 1 if self._options.splitBy == BY_KEY else self._options.numPartitions
        count = min(parts, upto - first + 1)
        bounds = [first - 1 + (upto - first + 1) * part // count for part in range(count + 1)]
        bounds[0] = after
        ((queue, place),) = self._reached.items()
        return [
            _window.Task([_window.Archived(queue, place, *piece)]) for piece in itertools.pairwise(bounds)
        ]

    def commit(self, end: dict[str, Any]) -> None:
        """Move the consumer's position, once the archive is read."""
        if "archive" not in end:
            super().commit(end)

    def _places(self, offset: Mapping[str, Any]) -> Places:
        return super()._places(_without(offset))

    def _here(self, offset: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the offset. If the queue was created again, it is where the consumer stands, or an error."""
        ((queue, place),) = self._places(offset).items()
        if "archive" not in offset or not self._connected().is_other(queue, place):
            return offset
        text = (
            f"the checkpoint stands in the archive of queue {queue}, and the queue was created again or"
            " loaded from a dump since"
        )
        refuse_loss(self._options, queue, text)
        return self.initialOffset()

    def _next(self, offset: Mapping[str, Any], count: int | None) -> int | None:
        """Return the end of the next `count` messages of the archive, or of all; None if there are none."""
        parsed = self._options
        ((queue, place),) = self._places(offset).items()
        of, after = offset["archive"]["of"], offset["archive"]["after"]
        if of != parsed.archiveOf:
            raise PgqueBadArgumentError(
                f"consumer {parsed.consumer} reads the archive of {of}, not of {parsed.archiveOf}:"
                f" set archiveOf={of}, or take a new consumer and another checkpoint"
            )
        if self._connected().is_anew(queue) and after > 0:
            text = (
                f"the checkpoint stands in the archive of queue {queue} behind message {after}, and consumer"
                f" {parsed.consumer} was made anew: the queue or the consumer was dropped meanwhile"
            )
            refuse_loss(parsed, queue, text)
        found: int | None = self._ask(
            "select pgque.archive_next(%s, %s, %s, %s, %s, %s, %s::uuid)",
            *(queue, parsed.consumer, place.tick, after, count, not parsed.failOnDataLoss, place.incarnation),
        )
        return found

    def _ask(self, query: str, *arguments: Any) -> Any:
        return self._connected().do(lambda conn: conn.execute(query, arguments).fetchone())[0]


def _without(offset: Mapping[str, Any]) -> dict[str, Any]:
    """Return an offset as that of a stream which has read the archive."""
    return {name: part for name, part in offset.items() if name != "archive"}
