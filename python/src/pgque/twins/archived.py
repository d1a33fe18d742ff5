# Generated from client/archived.py by tools/make_sync.py: edit that file and run the script again.
"""Archived messages."""

from __future__ import annotations

import builtins
from datetime import datetime

from ..codec import encode
from ..types import ArchivedMessage, columns
from .calling import Group


class Archived(Group):
    """Archived messages."""

    def list(
        self,
        queue: str,
        limit: int = 100,
        since: datetime | None = None,
        *,
        until: datetime | None = None,
        type: str | None = None,
        key: str | None = None,
        consumer: str | None = None,
        matching: str | None = None,
        before_id: int | None = None,
    ) -> builtins.list[ArchivedMessage]:
        """Return archived messages of a queue that satisfy all filters, the newest first, at most `limit`.
        Calls `pgque.archive_list`.

        `since` and `until` filter by the time of archiving; a datetime without time zone is local time.
        `matching` is a text in payload, headers or key, in upper or lower case. To read page by page, pass
        the last `archive_id` as `before_id`. Raises PgqueQueueNotFoundError.
        """
        return self._client._rows(
            f"select {columns(ArchivedMessage, 'a')}"
            " from pgque.archive_list(%(queue)s::text, %(limit)s::int, %(since)s::timestamptz,"
            " %(until)s::timestamptz, %(type)s::text, %(key)s::text, %(consumer)s::text, %(matching)s::text,"
            " %(before_id)s::bigint) as a",
            {
                "queue": queue,
                "limit": limit,
                "since": encode.moment(since),
                "until": encode.moment(until),
                "type": type,
                "key": key,
                "consumer": consumer,
                "matching": matching,
                "before_id": before_id,
            },
            ArchivedMessage,
        )

    def replay(self, archive_id: int) -> int:
        """Send an archived message again and return the new id. Calls `pgque.archive_replay`. Raises
        PgqueMessageNotFoundError, PgqueQueueDisabledError."""
        return self._client._value(
            int, "select pgque.archive_replay(%(archive)s::bigint)", {"archive": archive_id}
        )

    def purge(self, queue: str, before: datetime) -> int:
        """Delete the days (UTC) of the archive that ended before a time, and return their number. Calls
        `pgque.archive_purge`. A datetime without time zone is local time."""
        with self._client._unlimited():
            return self._client._value(
                int,
                "select pgque.archive_purge(%(queue)s::text, %(before)s::timestamptz)",
                {"queue": queue, "before": encode.moment(before)},
            )
