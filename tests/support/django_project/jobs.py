"""Tasks, which note in a table that they ran."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from django.conf import settings
from django.db import connection

import pgque

_api = import_module(settings.API)
task: Any = _api.task
signals: Any = import_module(f"{settings.API}.signals")


def note(text: str) -> None:
    """Write a text into the table."""
    with connection.cursor() as cursor:
        cursor.execute("insert into ran (what) values (%s)", [text])


def signal_name(sender: Any, task_result: Any, signal: Any, **kwargs: Any) -> None:
    """Note the end of a task that asks for it."""
    if task_result.kwargs.get("with_signals"):
        errors = [error.exception_class.__name__ for error in task_result.errors]
        value = task_result.return_value if task_result.status == "SUCCESSFUL" else None
        note(
            f"{task_result.id.partition('/')[0]} {task_result.status} {task_result.attempts} {errors} {value}"
        )


signals.task_started.connect(signal_name)
signals.task_finished.connect(signal_name)


@task(queue_name="mail")
def write(text: str, *, with_signals: bool = False) -> str:
    """Note a text."""
    note(text)
    return text.upper()


@task(queue_name="mail")
async def write_async(text: str) -> None:
    """Note a text from an event loop."""
    from asgiref.sync import sync_to_async

    await sync_to_async(note)(text)


@task(queue_name="mail", takes_context=True)
def fail_at_first(context: Any) -> None:
    """Ask for another attempt."""
    if context.attempt < 2:
        raise pgque.Retry(retry_after=0)
    result = context.task_result
    workers = ["" if name == "" else "worker" for name in result.worker_ids]
    note(f"attempt {context.attempt} of {result.task.queue_name} {result.task.priority} by {workers}")


@task(queue_name="mail")
def give_up() -> pgque.Dead:
    """Give up."""
    return pgque.Dead("no address")


@task(queue_name="mail")
def divide(by: int, *, with_signals: bool = False) -> float:
    """Fail with an error."""
    return 1 / by


@task(queue_name="mail")
def break_connection() -> None:
    """End the session of this thread, as a restart of the server does."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_terminate_backend(pg_backend_pid())")


@task(queue_name="mail")
def wait_for_lock() -> None:
    """Wait until nobody has the advisory lock 1."""
    note("waits")
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_lock_shared(1)")
        cursor.execute("select pg_advisory_unlock_shared(1)")
    note("has waited")
