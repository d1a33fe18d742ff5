"""Queues with their settings and rights, and the installation."""

from __future__ import annotations

from collections.abc import Mapping

from ..codec import encode
from ..types import QueueRights, QueueSetting, Seconds, Setting, columns
from .calling import AsyncGroup


class AsyncAdmin(AsyncGroup):
    """Queues with their settings and rights, and the installation."""

    async def create_queue(self, queue: str, config: Mapping[str, Setting] | None = None) -> int:
        """Create a queue and return 1, or 0 if its name is taken; that queue keeps its settings. Calls
        `pgque.create_queue`.

        Raises PgqueInvalidNameError, and PgqueBadArgumentError for a setting that is unknown or out of range.
        """
        if config is None:
            return await self._client._value(
                int, "select pgque.create_queue(%(queue)s::text)", {"queue": queue}
            )
        return await self._client._value(
            int,
            "select pgque.create_queue(%(queue)s::text, %(config)s::jsonb)",
            {"queue": queue, "config": encode.config_json(config)},
        )

    async def alter_queue(self, queue: str, config: Mapping[str, Setting]) -> None:
        """Change settings of a queue, all or none, and return their number; None restores a default. Calls
        `pgque.alter_queue`. Raises PgqueQueueNotFoundError, PgqueBadArgumentError."""
        await self._client._run(
            "select pgque.alter_queue(%(queue)s::text, %(config)s::jsonb)",
            {"queue": queue, "config": encode.config_json(config)},
        )

    async def rename_queue(self, queue: str, new_name: str) -> int:
        """Rename a queue; its `queue_uid` stays. Calls `pgque.rename_queue`. Raises PgqueQueueNotFoundError,
        PgqueQueueExistsError, PgqueInvalidNameError."""
        return await self._client._value(
            int,
            "select pgque.rename_queue(%(queue)s::text, %(new)s::text)",
            {"queue": queue, "new": new_name},
        )

    async def drop_queue(self, queue: str, force: bool = False) -> int:
        """Drop a queue; `force` also drops its consumers and messages. Calls `pgque.drop_queue`. Raises
        PgqueQueueNotFoundError, PgqueQueueInUseError."""
        with self._client._unlimited():
            return await self._client._value(
                int,
                "select pgque.drop_queue(%(queue)s::text, %(force)s::bool)",
                {"queue": queue, "force": force},
            )

    async def queue_settings(self, queue: str) -> list[QueueSetting]:
        """Return the settings of a queue with their defaults, units and meaning. Calls
        `pgque.queue_settings`. Raises PgqueQueueNotFoundError."""
        return await self._client._rows(
            f"select {columns(QueueSetting, 's')} from pgque.queue_settings(%(queue)s::text) as s",
            {"queue": queue},
            QueueSetting,
        )

    async def queue_config(self, queue: str) -> dict[str, str | None]:
        """Return the settings in force for a queue, as text. Calls `pgque.queue_settings`. Raises
        PgqueQueueNotFoundError."""
        pairs = await self._client._rows(
            "select s.setting, s.value from pgque.queue_settings(%(queue)s::text) as s",
            {"queue": queue},
            _pair,
        )
        return dict(pairs)

    async def set_queue_config(self, queue: str, param: str, value: Setting) -> None:
        """Change one setting of a queue; None restores its default. Calls `pgque.set_queue_config`. Raises
        PgqueQueueNotFoundError, PgqueBadArgumentError."""
        await self._client._run(
            "select pgque.set_queue_config(%(queue)s::text, %(param)s::text, %(value)s::text)",
            {"queue": queue, "param": param, "value": encode.setting_text(value)},
        )

    async def set_default_config(self, param: str, value: Setting) -> None:
        """Change the default of a setting for all queues that do not set it; None restores the built-in
        default. Calls `pgque.set_default_config`. Raises PgqueBadArgumentError."""
        await self._client._run(
            "select pgque.set_default_config(%(param)s::text, %(value)s::text)",
            {"param": param, "value": encode.setting_text(value)},
        )

    async def pause(self, queue: str) -> None:
        """Pause a queue: senders get PgqueQueueDisabledError, consumers still receive. Calls `pgque.pause`.
        Raises PgqueQueueNotFoundError."""
        await self._client._run("select pgque.pause(%(queue)s::text)", {"queue": queue})

    async def resume(self, queue: str) -> None:
        """Resume a paused queue. Calls `pgque.resume`. Raises PgqueQueueNotFoundError."""
        await self._client._run("select pgque.resume(%(queue)s::text)", {"queue": queue})

    async def purge(self, queue: str) -> int:
        """Remove all messages of a queue: pending, delayed, processing and retry. Calls `pgque.purge`.

        Dead letters and the archive stay. Returns how many messages the slowest consumer had ahead of it.
        Raises PgqueQueueNotFoundError.
        """
        with self._client._unlimited():
            return await self._client._value(int, "select pgque.purge(%(queue)s::text)", {"queue": queue})

    async def grant_queue(self, queue: str, role: str, right: str) -> bool:
        """Grant a role a right to one queue: `produce`, `consume`, or `admin`, which includes both. Calls
        `pgque.grant_queue`.

        Returns False if the role has the right. Raises PgqueQueueNotFoundError, PgqueBadArgumentError, and
        PgqueError if there is no such role.
        """
        given = await self._client._value(
            int,
            "select pgque.grant_queue(%(queue)s::text, %(role)s::text, %(right)s::text)",
            {"queue": queue, "role": role, "right": right},
        )
        return given == 1

    async def revoke_queue(self, queue: str, role: str, right: str | None = None) -> int:
        """Revoke rights that `grant_queue` gave, by default all, and return their number. Calls
        `pgque.revoke_queue`. Raises as `grant_queue`."""
        return await self._client._value(
            int,
            "select pgque.revoke_queue(%(queue)s::text, %(role)s::text, %(right)s::text)",
            {"queue": queue, "role": role, "right": right},
        )

    async def my_rights(self) -> list[QueueRights]:
        """Return the rights of this connection's role: to all queues first, then to single queues. Calls
        `pgque.my_rights`."""
        return await self._client._rows(
            f"select {columns(QueueRights, 'r')} from pgque.my_rights() as r", {}, QueueRights
        )

    async def maint(self) -> None:
        """Do all maintenance that is due: retries, rotation, retention. Calls `pgque.maint`."""
        with self._client._unlimited():
            await self._client._run("select pgque.maint()")

    async def expire_messages(self, queue: str) -> int:
        """Delete expired messages from the retry queue, and return their number. Calls
        `pgque.expire_messages`."""
        with self._client._unlimited():
            return await self._client._value(
                int, "select pgque.expire_messages(%(queue)s::text)", {"queue": queue}
            )

    async def set_schedule(self, job: str, every: Seconds | str) -> str:
        """Set how often the job "expire" or "delete_expired" runs; "" turns it off. Calls
        `pgque.set_schedule`.

        `every` is seconds or an interval. Returns the one in force. If the new one is invalid, the old one
        stays, and PgqueBadArgumentError is raised.
        """
        return await self._client._value(
            str,
            "select pgque.set_schedule(%(job)s::text, %(every)s::text)",
            {
                "job": job,
                "every": every if isinstance(every, str) else encode.setting_text(encode.interval(every)),
            },
        )

    async def set_history(self, what: str, keep: Seconds | None) -> None:
        """Set for how many seconds at least the history of "actions" or "lags" is kept; None turns it off.
        Calls `pgque.set_history`. Raises PgqueBadArgumentError."""
        await self._client._run(
            "select pgque.set_history(%(what)s::text, %(keep)s::interval)",
            {"what": what, "keep": None if keep is None else encode.interval(keep)},
        )

    async def start(self) -> None:
        """Schedule the ticker with pg_cron. Calls `pgque.start`. Raises PgqueNoSchedulerError if pg_cron is
        missing."""
        await self._client._run("select pgque.start()")

    async def stop(self) -> None:
        """Remove the ticker from pg_cron's schedule. Calls `pgque.stop`."""
        await self._client._run("select pgque.stop()")


def _pair(name: str, value: str | None) -> tuple[str, str | None]:
    return name, value
