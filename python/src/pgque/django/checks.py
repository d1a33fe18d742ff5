"""The checks of databases: does each have what its tasks need?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Warning
from django.db import DatabaseError, connections

from ..transaction.adapters import unprepared


def check_databases(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Return a warning for each queue of tasks that is missing in these databases."""
    if not databases or not getattr(settings, "TASKS", None):
        return []
    from .tasks import PgqueBackend, task_backends

    return [
        warning
        for backend in task_backends.all()
        if isinstance(backend, PgqueBackend) and backend.database in databases
        for warning in _missing(backend)
    ]


def _missing(backend: Any) -> Iterator[CheckMessage]:
    connection = connections[backend.database]
    if connection.vendor != "postgresql":
        return  # an error of PgqueBackend.check
    try:
        with connection.cursor() as cursor, unprepared(connection.connection):
            cursor.execute("select pg_catalog.to_regproc('pgque.version') is not null")
            if not cursor.fetchone()[0]:
                yield Warning(
                    f"pgque is not installed in the database {backend.database!r}",
                    hint="Run a migration with pgque.django.Install().",
                    obj=f"TASKS[{backend.alias!r}]",
                    id="pgque.W001",
                )
                return
            cursor.execute("select q.queue_name from pgque.get_queue_info() as q")
            queues = {name for (name,) in cursor.fetchall()}
            cursor.execute(
                "select c.queue_name from pgque.get_consumer_info() as c where c.consumer_name = %s",
                [backend.consumer],
            )
            subscribed = {name for (name,) in cursor.fetchall()}
    except DatabaseError as error:
        yield Warning(
            f"the queues of tasks in the database {backend.database!r} cannot be checked: {error}",
            obj=f"TASKS[{backend.alias!r}]",
            id="pgque.W003",
        )
        return
    for queue in backend.pgque_queues():
        if queue not in subscribed:
            create = f"pgque.django.CreateQueue({queue!r}), " if queue not in queues else ""
            what = "is missing" if create else f"has no consumer {backend.consumer!r}"
            yield Warning(
                f"the queue {queue!r} {what} in the database {backend.database!r}",
                hint=f"Run a migration with {create}pgque.django.Subscribe({queue!r}, {backend.consumer!r}).",
                obj=f"TASKS[{backend.alias!r}]",
                id="pgque.W002",
            )
