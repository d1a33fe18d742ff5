"""Recurring messages, which the ticker sends at their times."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from datetime import datetime

from ..codec import encode
from ..types import Event, Payload, RecurringMessage, Seconds, columns
from .calling import NONE, AsyncGroup


class AsyncRecurring(AsyncGroup):
    """Recurring messages, which the ticker sends at their times."""

    async def create(
        self,
        name: str,
        queue: str,
        cron: str,
        payload: Payload | Event = None,
        *,
        type: str = "default",
        headers: Mapping[str, object] | None = None,
        key: str | None = None,
        delay: Seconds | None = None,
        ttl: Seconds | None = None,
        partition_key: str | None = None,
        timezone: str = "UTC",
        catch_up: str = "one",
        starts_at: datetime | None = None,
        ends_at: datetime | None = None,
    ) -> bool:
        """Create a message that the ticker sends at its times, or change the one of this name; return whether
        it is new. Calls `pgque.create_recurring`.

        Each message has the header `pgque-recurring` with `name` and `run_at`. At each run, the role that
        made this call needs the right to send to the queue. A call that does not change the times keeps the
        next run. A paused recurring message stays paused.

        Args:
            name: 1 to 200 bytes, once in the database.
            cron: five fields such as "0 3 * * mon-fri" (minute, hour, day, month, weekday), six with seconds
                first, or an interval such as "90 seconds", counted from `starts_at` or from now.
            payload: as of `send`. An `Event` brings its own type and options, but no `deliver_at`.
            timezone: the time zone of the fields of `cron`, such as "Europe/Berlin".
            catch_up: which missed runs are sent: "none", "one" for the last, or "all", at most 1,000.
            starts_at: no run is before; a datetime without time zone is local time.
            ends_at: no run is after.

        Raises PgqueQueueNotFoundError, PgqueQueueFullError, PgqueInvalidNameError, PgqueBadArgumentError,
        PgquePermissionDeniedError.
        """
        options = {
            "headers": headers,
            "key": key,
            "delay": delay,
            "ttl": ttl,
            "partition_key": partition_key,
        }
        event = encode.event_of(type, payload, options)
        if event.deliver_at is not None:
            raise ValueError("a recurring message has no deliver_at: its times are those of cron")
        sql, params = encode.send_arguments(event, self._client._encoder)
        more, schedule = encode.arguments(
            {
                "timezone": ("text", timezone),
                "catch_up": ("text", catch_up),
                "starts_at": ("timestamptz", encode.moment(starts_at)),
                "ends_at": ("timestamptz", encode.moment(ends_at)),
            }
        )
        new = await self._client._value(
            int,
            "select pgque.create_recurring(%(name)s::text, %(queue)s::text, %(cron)s::text, %(type)s::text,"
            f" {sql}{more})",
            {"name": name, "queue": queue, "cron": cron, "type": event.type, **params, **schedule},
        )
        return new == 1

    async def drop(self, name: str) -> None:
        """Drop a recurring message; messages that it sent stay. Calls `pgque.drop_recurring`. Raises
        PgqueMessageNotFoundError, PgquePermissionDeniedError."""
        await self._client._run("select pgque.drop_recurring(%(name)s::text)", {"name": name})

    async def pause(self, name: str) -> bool:
        """Pause a recurring message, and return False if it was paused. Calls `pgque.pause_recurring`. Raises
        as `drop`."""
        return (
            await self._client._value(int, "select pgque.pause_recurring(%(name)s::text)", {"name": name})
            == 1
        )

    async def resume(self, name: str) -> bool:
        """Resume a paused recurring message with its next run, and return False if it was not paused. Calls
        `pgque.resume_recurring`. Raises as `drop`."""
        return (
            await self._client._value(int, "select pgque.resume_recurring(%(name)s::text)", {"name": name})
            == 1
        )

    async def run(self, name: str) -> int:
        """Send a recurring message now, besides its times, and return the id of the message. Calls
        `pgque.run_recurring`. Raises as `drop` and `send`."""
        return await self._client._value(int, "select pgque.run_recurring(%(name)s::text)", {"name": name})

    async def list(self) -> builtins.list[RecurringMessage]:
        """Return the recurring messages that the role may see, with their last and next run. Calls
        `pgque.list_recurring`."""
        return await self._client._rows(
            f"select {columns(RecurringMessage, 'r')} from pgque.list_recurring() as r",
            NONE,
            RecurringMessage,
        )
