"""The command that runs tasks."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ....errors import PgqueConsumerNotFoundError, PgqueError, PgqueQueueNotFoundError, PgqueVersionError
from ....twins.workers import Worker
from ....types import Message


class Command(BaseCommand):
    """Run the tasks of a PgqueBackend, over a connection of its own with the settings of DATABASES."""

    help = "Run the tasks of a PgqueBackend until SIGTERM or SIGINT; tasks that have begun are finished."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument("--backend", default="default", help="its alias in TASKS (default: default)")
        parser.add_argument(
            "--queue",
            action="append",
            dest="queues",
            metavar="NAME",
            help="a queue of tasks, instead of all QUEUES of the backend; may be repeated",
        )
        parser.add_argument(
            "--concurrency", type=int, default=4, help="how many tasks run at a time, in threads (4)"
        )
        parser.add_argument(
            "--retry-after",
            type=float,
            metavar="SECONDS",
            help="until a failed task runs again (the queue's setting)",
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=float,
            default=30,
            metavar="SECONDS",
            help="that tasks have to finish after SIGTERM (30)",
        )
        parser.add_argument(
            "--liveness-file", metavar="FILE", help="touch it every second while the worker is alive"
        )
        parser.add_argument(
            "--until-idle", action="store_true", help="end when no task is left that can run now"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Work. Raises CommandError where trying again cannot help."""
        backend = _backend(options["backend"])
        queues = _queues(backend, options["queues"])
        try:
            worker = Worker(
                backend.dsn(),
                queues=queues,
                priority="strict" if len(backend.priorities) > 1 else "weighted",
                consumer=backend.consumer,
                concurrency=options["concurrency"],
                retry_after=options["retry_after"],
                shutdown_timeout=options["shutdown_timeout"],
                liveness_file=options["liveness_file"],
            )
        except ValueError as error:
            raise CommandError(str(error)) from error

        @worker.handler("*")
        def perform(message: Message) -> object:
            return backend.perform(message, worker.worker)

        self.stdout.write(f"worker {worker.worker} runs tasks of {', '.join(queues)} until SIGTERM or Ctrl-C")
        self.stdout.flush()
        try:
            worker.run(until_idle=options["until_idle"])
        except PgqueVersionError as error:
            raise CommandError(
                f"{error}\nhint: pgque.django.Install() in a migration installs pgque, Upgrade() upgrades it"
            ) from error
        except (PgqueQueueNotFoundError, PgqueConsumerNotFoundError) as error:
            raise CommandError(
                f"{error}\nhint: see manage.py check --deploy --database {backend.database}"
            ) from error
        except PgqueError as error:
            raise CommandError(str(error)) from error
        self.stdout.write("stopped" if not options["until_idle"] else "done")


def _backend(alias: str) -> Any:
    """Return a backend of TASKS. Raises CommandError where it is none of pgque's, or cannot work."""
    try:
        from ...tasks import PgqueBackend, task_backends
    except ImportError as error:
        raise CommandError(str(error)) from error
    try:
        backend = task_backends[alias]
    except task_backends.exception_class as error:
        raise CommandError(str(error)) from error
    if not isinstance(backend, PgqueBackend):
        raise CommandError(
            f"TASKS[{alias!r}] is a {type(backend).__name__}, not pgque.django.tasks.PgqueBackend;"
            " name another one with --backend"
        )
    for problem in backend.check():
        raise CommandError(f"{problem.msg}\nhint: {problem.hint}")
    return backend


def _queues(backend: Any, names: list[str] | None) -> dict[str, float]:
    """Return the queues of pgque with their weights. Raises CommandError for a queue that QUEUES does not
    have, and where there is none."""
    for name in names or []:
        if backend.queues and name not in backend.queues:
            raise CommandError(f"there is no queue {name!r}; QUEUES has {', '.join(backend.queue_names)}")
    queues: dict[str, float] = backend.pgque_queues(names)
    if not queues:
        raise CommandError("QUEUES is empty: name queues with --queue")
    return queues
