"""Operations for migrations: each is a RunSQL, and runs in the transaction of its migration."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import router
from django.db.migrations.operations import RunSQL

from ..errors import PgqueBadArgumentError
from ..ops import migrations
from ..ops.install import refuse_downgrade, sql_text
from ..transaction.adapters import unprepared
from ..types import Setting


class _Operation(RunSQL):
    """The base of the operations: it writes their arguments to migrations, and refuses other databases."""

    def __init__(self, description: str, sql: str, reverse_sql: str, arguments: Mapping[str, object]) -> None:
        super().__init__(sql, reverse_sql)
        self._description = description
        self._arguments = {name: value for name, value in arguments.items() if value is not None}

    def deconstruct(self) -> tuple[str, list[object], dict[str, object]]:
        """Return the class and its arguments, as squashmigrations writes them."""
        return type(self).__name__, [], dict(self._arguments)

    def describe(self) -> str:
        """Return what the operation does, in a few words."""
        return self._description

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run the SQL where the routers allow it. Raises PgqueBadArgumentError for what is not PostgreSQL."""
        if router.allow_migrate(schema_editor.connection.alias, app_label, **self.hints):
            self._check(schema_editor)
        with unprepared(schema_editor.connection.connection):
            super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run the SQL that undoes the operation."""
        with unprepared(schema_editor.connection.connection):
            super().database_backwards(app_label, schema_editor, from_state, to_state)

    def _check(self, schema_editor: Any) -> None:
        """Raise PgqueBadArgumentError for a database that is not PostgreSQL."""
        connection = schema_editor.connection
        if connection.vendor != "postgresql":
            raise PgqueBadArgumentError(
                f"pgque needs PostgreSQL, and Django's database {connection.alias!r} is {connection.vendor}",
                hint="Let a database router keep this migration away from it (allow_migrate).",
            )


class Install(_Operation):
    """Install pgque. Reversed, it removes pgque with all queues and messages.

    Raises PgqueVersionError if the database has a newer version than the package.
    """

    def __init__(self) -> None:
        super().__init__("Install pgque", sql_text(), migrations.UNINSTALL, {})

    def _check(self, schema_editor: Any) -> None:
        """Raise also PgqueVersionError where the database has a newer version."""
        super()._check(schema_editor)

        def ask(question: str) -> object:
            connection = schema_editor.connection
            with connection.cursor() as cursor, unprepared(connection.connection):
                cursor.execute(question)
                row = cursor.fetchone()
                return row[0] if row else None

        if not schema_editor.collect_sql:
            refuse_downgrade(ask)


class Upgrade(Install):
    """Upgrade pgque to the version of the package. Reversed, it does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reverse_sql = RunSQL.noop
        self._description = "Upgrade pgque"


class CreateQueue(_Operation):
    """Create a queue, with settings. Reversed, it drops the queue, and fails with PQ006 while the queue is in
    use."""

    def __init__(self, queue: str, config: Mapping[str, Setting] | None = None) -> None:
        super().__init__(
            f"Create queue {queue}",
            migrations.create_queue(queue, config),
            migrations.drop_queue(queue),
            {"queue": queue, "config": config},
        )


class Subscribe(_Operation):
    """Subscribe a consumer, with the arguments of `PgqueClient.subscribe`. Reversed, it removes the
    consumer."""

    def __init__(
        self,
        queue: str,
        consumer: str,
        start_at: str | int | datetime | None = None,
        keyed_order: bool = False,
        key_concurrency: int | None = None,
    ) -> None:
        super().__init__(
            f"Subscribe {consumer} to queue {queue}",
            migrations.subscribe(queue, consumer, start_at, keyed_order, key_concurrency),
            migrations.unsubscribe(queue, consumer),
            {
                "queue": queue,
                "consumer": consumer,
                "start_at": start_at,
                "keyed_order": keyed_order,
                "key_concurrency": key_concurrency,
            },
        )
