"""Run `python -m support.django_project enqueue`, or a command of Django in its place.

`enqueue` starts in an empty database. It meets each error of a database without what tasks need, migrates,
and enqueues tasks, of which the worker's part is looked at by tests/python/test_django_tasks.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any

import django
import psycopg
from django.conf import settings
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command, execute_from_command_line

import pgque


class Abandoned(Exception):
    """Raised to leave a transaction."""


@contextmanager
def refused(error: type[BaseException], *told: str) -> Iterator[None]:
    """Expect an error whose text has these parts."""
    try:
        yield
    except error as caught:
        for part in told:
            assert part in str(caught), str(caught)
    else:
        raise AssertionError(f"no {error.__name__}")


def database_problems() -> list[str]:
    """Return what the checks of the database find: the messages with their hints."""
    found = run_checks(tags=["database"], databases=["default"], include_deployment_checks=True)
    return [f"{problem.id} {problem.msg}: {problem.hint}" for problem in found if "pgque" in problem.id]


def worker_problems() -> None:
    """Meet the errors of the command pgque_worker that need no pgque."""
    with refused(CommandError, "no-such"):
        call_command("pgque_worker", backend="no-such")
    with refused(CommandError, "'dummy'", "DummyBackend", "--backend"):
        call_command("pgque_worker", backend="dummy")
    with refused(CommandError, "'lite' of tasks is sqlite"):
        call_command("pgque_worker", backend="lite")
    with refused(CommandError, "there is no queue 'mial'", "mail, default"):
        call_command("pgque_worker", queues=["mial"])
    with refused(CommandError, "concurrency"):
        call_command("pgque_worker", concurrency=0)


def settings_problems() -> None:
    """Meet the errors of settings."""
    from pgque.django.tasks import PgqueBackend

    def errors(**params: Any) -> list[str]:
        return [problem.id for problem in PgqueBackend("x", params).check()]

    assert errors() == []
    assert errors(OPTIONS={"database": "lite"}) == ["pgque.E002"]
    assert errors(OPTIONS={"database": "none"}) == ["pgque.E001"]
    assert errors(QUEUES=["q" * 43]) == []
    assert errors(QUEUES=["q" * 43], OPTIONS={"priorities": [1]}) == ["pgque.E003"]
    assert errors(QUEUES=["mail", "mail-10"], OPTIONS={"priorities": [-10]}) == ["pgque.E004"]
    with refused(ImproperlyConfigured, "TASKS['x'] has unknown OPTIONS ['Database']", "'database'"):
        errors(OPTIONS={"Database": "default"})
    for bad in (5, [1.5], [True], [101], ["1"]):
        with refused(ImproperlyConfigured, "must be a list of whole numbers from -100 to 100"):
            errors(OPTIONS={"priorities": bad})


def without_what_it_needs() -> None:
    """Meet the errors of a database without pgque, and without queues; migrate between these."""
    from django.db import connection

    from . import jobs

    with refused(pgque.PgqueVersionError, "pgque"):
        jobs.write.enqueue("no pgque")
    with refused(CommandError, "pgque.django.Install()"):
        call_command("pgque_worker")
    assert [text[:9] for text in database_problems()] == ["pgque.W001"[:9]] * 2
    call_command("migrate", verbosity=0)
    with refused(pgque.PgqueQueueNotFoundError, "mail"):
        jobs.write.enqueue("no queue")
    with refused(CommandError, "check --deploy --database default"):
        call_command("pgque_worker")
    with connection.cursor() as cursor:
        cursor.execute("select pgque.create_queue('mail')")
        create = "pgque.django.CreateQueue('mail+10'), pgque.django.Subscribe('mail+10', 'tasks')."
        subscribe = "Run a migration with pgque.django.Subscribe('mail', 'tasks')."
        problems = database_problems()
        assert any(text.endswith(create) for text in problems), problems
        assert any(text.endswith(subscribe) and "no consumer 'tasks'" in text for text in problems), problems
        cursor.execute("create table ran (id serial, what text)")
        for queue in ("mail", "mail+10", "mail-10", "default", "default+10", "default-10"):
            cursor.execute("select pgque.create_queue(%s), pgque.subscribe(%s, 'tasks')", [queue, queue])
        cursor.execute("select pgque.subscribe('default', 'plain')")
        cursor.execute("select pgque.create_queue('shard-10'), pgque.subscribe('shard-10', 'plain')")
    assert database_problems() == []
    assert settings.API in sys.modules


def the_role_of_the_worker() -> None:
    """Connect as a worker does, with a role that the settings assume."""
    from django.db import connection

    from pgque.django.tasks import PgqueBackend

    options = connection.settings_dict["OPTIONS"]
    options.update({"assume_role": "pgque_reader", "isolation_level": 2, "options": "-c work_mem=1MB"})
    with psycopg.connect(PgqueBackend("x", {}).dsn()) as conn:
        row = conn.execute("select current_user, current_setting('work_mem')").fetchone()
    options.clear()
    assert row == ("pgque_reader", "1MB"), row


def a_queue_named_as_a_priority() -> None:
    """Run a task of a queue whose name ends as a priority does."""
    from pgque.django.tasks import PgqueBackend

    backend = PgqueBackend("plain", {"QUEUES": ["shard-10"], "OPTIONS": {"priorities": [-10]}})
    name = "support.django_project.jobs.give_up"
    message = pgque.Message(1, 1, name, '{"args": [], "kwargs": {}}', queue="shard-10")
    assert isinstance(backend.perform(message, "worker"), pgque.Dead)


def what_is_refused() -> None:
    """Meet the errors of tasks."""
    from . import jobs

    exceptions = import_module(f"{settings.API}.exceptions")
    invalid = getattr(exceptions, "InvalidTask", None) or exceptions.InvalidTaskError
    with refused(invalid, "priority 5 is none of [-10, 0, 10]", "TASKS['default']"):
        jobs.write.using(priority=5)
    with refused(invalid, "priority"):
        jobs.write.using(backend="plain", queue_name="default", priority=10)
    with refused(invalid, "mial"):
        jobs.write.using(queue_name="mial")
    with refused(invalid, "aware"):
        jobs.write.using(run_after=datetime(2030, 1, 1))
    with refused(TypeError, "Unsupported type"):
        jobs.write.enqueue(object())
    with refused(pgque.PgqueBadArgumentError, "'lite' is sqlite"):
        jobs.write.using(backend="lite", queue_name="default").enqueue("x")


def enqueue_and_abandon(text: str) -> None:
    """Enqueue a task in a transaction, or a savepoint, that is rolled back."""
    from django.db import transaction

    from . import jobs

    with suppress(Abandoned), transaction.atomic():
        jobs.write.enqueue(text)
        raise Abandoned


def enqueue() -> None:
    """Enqueue tasks in transactions, and look at what `enqueue` returns."""
    from django.db import transaction
    from django.utils import timezone

    from . import jobs

    enqueued: list[str] = []

    def on_enqueued(sender: Any, task_result: Any, **kwargs: Any) -> None:
        enqueued.append(task_result.id)

    jobs.signals.task_enqueued.connect(on_enqueued)
    with transaction.atomic():
        result = jobs.write.enqueue("kept", with_signals=True)
        enqueue_and_abandon("inner, gone")
    enqueue_and_abandon("gone")
    assert len(set(enqueued)) == 3
    assert (result.id, result.status, result.attempts) == (enqueued[0], "READY", 0)
    assert result.id.startswith("mail/") and len(result.id) < 64
    assert (result.args, result.kwargs) == (["kept"], {"with_signals": True})
    assert (result.is_finished, result.backend) == (False, "default")
    for ask in (result.refresh, lambda: jobs.write.get_result(result.id)):
        with refused(NotImplementedError):
            ask()

    async def enqueue_async() -> None:
        await jobs.write.aenqueue("asynchronous")
        await jobs.write_async.using(run_after=timezone.now() - timedelta(hours=1)).aenqueue("coroutine")

    asyncio.run(enqueue_async())
    jobs.write.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("later")
    jobs.write.using(priority=-10).enqueue("low")
    jobs.write.using(priority=10).enqueue("high")
    jobs.write.using(queue_name="default", priority=10).enqueue("high in another queue")
    jobs.write.using(backend="plain", queue_name="default").enqueue("plain")
    jobs.fail_at_first.using(priority=-10).enqueue()
    jobs.give_up.enqueue()
    jobs.divide.enqueue(0, with_signals=True)
    jobs.break_connection.enqueue()
    jobs.write.enqueue("after the lost connection")
    pgque.send("default", "mail", [1], type="support.django_project.jobs.write")
    pgque.send("default", "mail", {"args": [], "kwargs": {}}, type="support.django_project.jobs.note")


STEPS = [
    settings_problems,
    worker_problems,
    without_what_it_needs,
    the_role_of_the_worker,
    a_queue_named_as_a_priority,
    what_is_refused,
    enqueue,
]

if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "support.django_project.settings"
    if sys.argv[1] == "enqueue":
        django.setup()
        for step in STEPS:
            step()
    else:
        execute_from_command_line(sys.argv)
