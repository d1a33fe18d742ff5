"""A backend for tasks of Django 6.0 and newer, or of the package django-tasks.

TASKS = {"default": {"BACKEND": "pgque.django.tasks.PgqueBackend", "QUEUES": ["default"]}}

`enqueue` sends over the connection of Django, so the task is committed with the data of its request.
`manage.py pgque_worker` runs tasks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from traceback import format_exception
from types import ModuleType
from typing import Any

import psycopg
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections
from django.utils import timezone
from django.utils.module_loading import import_string
from psycopg.conninfo import make_conninfo

from ..outcomes import Dead, HandlerOutcome
from ..twins.calls import send
from ..types import Message


def _api() -> ModuleType:
    """Return the package with the API of tasks: django_tasks where the project has it among its apps, else
    Django's own, else django_tasks."""
    is_app = any(app.partition(".")[0] == "django_tasks" for app in settings.INSTALLED_APPS)
    for name in ["django_tasks"] if is_app else ["django.tasks", "django_tasks"]:
        if find_spec(name) is not None:
            return import_module(name)
    raise ImportError(
        "tasks need Django 6.0 or the package django-tasks, and neither is installed:"
        " pip install django-tasks"
    )


_tasks = _api()
_base = import_module(f"{_tasks.__name__}.base")
_signals = import_module(f"{_tasks.__name__}.signals")
_Backend: Any = import_module(f"{_tasks.__name__}.backends.base").BaseTaskBackend
_exceptions = import_module(f"{_tasks.__name__}.exceptions")
_InvalidTask = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError
_Status = _base.TaskResultStatus

task_backends = _tasks.task_backends

# Ids of results have less than 64 characters: the queue, a slash, and the id of a message.
_MAX_QUEUE_BYTES = 43

_OPTIONS = {"database", "consumer", "priorities"}


class PgqueBackend(_Backend):
    """Enqueue tasks as messages of pgque, one queue of pgque for each queue and priority of tasks.

    Results are not kept: `get_result` and `refresh` raise NotImplementedError.

    OPTIONS:
        database: the alias of the database that has pgque, "default".
        consumer: the name of the consumer that runs tasks, "tasks".
        priorities: the priorities that tasks may have besides 0, [] by default. A queue named mail with the
            priorities [10, -10] needs the queues of pgque mail+10, mail and mail-10. A worker starts a task
            only while none with a higher priority waits. Of two queues of one priority the first one in
            QUEUES goes first: to share, start a worker for each.

    Routers do not count: a task is sent over the connection of `database`, whatever transaction is open on
    another one. `manage.py check` finds a database that is not PostgreSQL, and two queues with one name, such
    as mail-10 beside mail with priority -10; `check --deploy --database default` finds missing queues.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        unknown = set(self.options) - _OPTIONS
        if unknown:
            raise ImproperlyConfigured(
                f"TASKS[{alias!r}] has unknown OPTIONS {sorted(unknown)}; known are {sorted(_OPTIONS)}"
            )
        self.database: str = self.options.get("database", "default")
        self.consumer: str = self.options.get("consumer", "tasks")
        self.priorities = _priorities(alias, self.options.get("priorities", []))
        self.supports_priority = len(self.priorities) > 1
        # In the order of the settings, which the set of the base class does not keep.
        self.queue_names: list[str] = list(dict.fromkeys(params.get("QUEUES", ["default"])))

    def pgque_queues(self, queue_names: Sequence[str] | None = None) -> dict[str, float]:
        """Return the queues of pgque with a weight each, the highest priority first."""
        return {
            _queue(name, priority): weight
            for weight, priority in reversed([*enumerate(sorted(self.priorities), 1)])
            for name in (self.queue_names if queue_names is None else queue_names)
        }

    def validate_task(self, task: Any) -> None:
        """Raise InvalidTask for a task that cannot be enqueued, such as one with a priority that the settings
        do not name."""
        super().validate_task(task)
        if task.priority not in self.priorities:
            raise _InvalidTask(
                f"priority {task.priority} is none of {sorted(self.priorities)}, which OPTIONS['priorities']"
                f" of TASKS[{self.alias!r}] names"
            )

    def enqueue(self, task: Any, args: Sequence[object], kwargs: dict[str, object]) -> Any:
        """Send a task in the open transaction of Django's connection, and return its TaskResult. Calls
        `pgque.send`.

        In autocommit the task is enqueued at once. Raises InvalidTask, TypeError for arguments that are no
        JSON, and the errors of `pgque.send`: PgqueQueueNotFoundError, PgqueVersionError if the database has
        no pgque, …
        """
        self.validate_task(task)
        result = self._result(
            task, "", _Status.READY, args, kwargs, enqueued_at=timezone.now(), attempted_at=None, workers=[]
        )
        run_after: datetime | None = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        queue = _queue(task.queue_name, task.priority)
        msg_id = send(
            self.database,
            queue,
            {"args": result.args, "kwargs": result.kwargs},
            type=task.module_path,
            deliver_at=run_after,
        )
        result = replace(result, id=f"{queue}/{msg_id}")
        _signals.task_enqueued.send(type(self), task_result=result)
        return result

    def perform(self, message: Message, worker: str) -> object:
        """Run the task of a message, and return its result, for the handler of a worker.

        The signal task_started is sent for each attempt, and task_finished for each that returns or fails;
        not for one that asks for another attempt or gives up. The id of a result is that of `enqueue`. Of its
        workers only the last one is known: an earlier one is "". No transaction is open around the task. Each
        thread has a connection of Django as in a request, which CONN_MAX_AGE keeps.
        """
        close_old_connections()
        try:
            return self._perform(message, worker)
        finally:
            close_old_connections()

    def _perform(self, message: Message, worker: str) -> object:
        args, kwargs = _arguments(message)
        result = self._result(
            self._task(message),
            f"{message.queue}/{message.msg_id}",
            _Status.RUNNING,
            args,
            kwargs,
            enqueued_at=message.created_at,
            attempted_at=timezone.now(),
            workers=[*[""] * ((message.receive_count or 1) - 1), worker],
        )
        _signals.task_started.send(type(self), task_result=result)
        context = [_base.TaskContext(task_result=result)] if result.task.takes_context else []
        try:
            returned: object = result.task.call(*context, *result.args, **result.kwargs)
        except HandlerOutcome:  # the task asks for another attempt, or gives up
            raise
        except Exception as error:
            path = f"{type(error).__module__}.{type(error).__qualname__}"
            trace = "".join(format_exception(error))
            result.errors.append(_base.TaskError(exception_class_path=path, traceback=trace))
            self._finish(result, _Status.FAILED)
            raise
        if not isinstance(returned, HandlerOutcome):
            object.__setattr__(result, "_return_value", returned)
            self._finish(result, _Status.SUCCESSFUL)
        return returned

    def _finish(self, result: Any, status: Any) -> None:
        # As Django's own backends do it: results are frozen for everybody else.
        object.__setattr__(result, "finished_at", timezone.now())
        object.__setattr__(result, "status", status)
        _signals.task_finished.send(type(self), task_result=result)

    def _task(self, message: Message) -> Any:
        """Return the task that a message names, with its queue and priority.

        Raises ImportError for a name that this version of the program does not have, TypeError for what is no
        task.
        """
        task = import_string(message.type or "")
        if not isinstance(task, _base.Task):
            raise TypeError(f"{message.type} is no task")
        name, priority = self._source(message.queue or "")
        return task.using(backend=self.alias, queue_name=name, priority=priority)

    def _source(self, queue: str) -> tuple[str, int]:
        """Return the queue of tasks and the priority that a queue of pgque is for.

        A queue of tasks may itself have a name that ends as a priority does, such as shard-1.
        """
        for name in self.queue_names:
            for priority in self.priorities:
                if queue == _queue(name, priority):
                    return name, priority
        priority = next((one for one in self.priorities if one and queue.endswith(_suffix(one))), 0)
        return queue.removesuffix(_suffix(priority)), priority

    def _result(
        self,
        task: Any,
        id: str,
        status: Any,
        args: Sequence[object],
        kwargs: dict[str, object],
        *,
        enqueued_at: datetime | None,
        attempted_at: datetime | None,
        workers: list[str],
    ) -> Any:
        return _base.TaskResult(
            task=task,
            id=id,
            status=status,
            enqueued_at=enqueued_at,
            started_at=attempted_at,
            last_attempted_at=attempted_at,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=workers,
        )

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Return the errors of the settings that need no connection; `checks.py` has the others."""
        where = f"TASKS[{self.alias!r}]"
        if self.database not in connections:
            return [
                checks.Error(
                    f"the database {self.database!r} of tasks is not in DATABASES",
                    hint=f"Name one of {', '.join(connections)} as OPTIONS['database'].",
                    obj=where,
                    id="pgque.E001",
                )
            ]
        vendor = connections[self.database].vendor
        if vendor != "postgresql":
            return [
                checks.Error(
                    f"pgque needs PostgreSQL, and the database {self.database!r} of tasks is {vendor}",
                    hint="Name a database of PostgreSQL as OPTIONS['database'].",
                    obj=where,
                    id="pgque.E002",
                )
            ]
        return [*self._long_names(where), *self._names_given_twice(where)]

    def _long_names(self, where: str) -> list[checks.CheckMessage]:
        return [
            checks.Error(
                f"the name of queue {queue!r} has more than {_MAX_QUEUE_BYTES} bytes",
                hint="Ids of results hold the name and have less than 64 characters: choose a shorter one.",
                obj=where,
                id="pgque.E003",
            )
            for queue in self.pgque_queues()
            if len(queue.encode()) > _MAX_QUEUE_BYTES
        ]

    def _names_given_twice(self, where: str) -> list[checks.CheckMessage]:
        given = Counter(_queue(name, priority) for name in self.queue_names for priority in self.priorities)
        return [
            checks.Error(
                f"the queue {queue!r} of pgque would hold tasks of two queues of QUEUES",
                hint="The name of one is that of the other with a priority: choose another name.",
                obj=where,
                id="pgque.E004",
            )
            for queue, times in given.items()
            if times > 1
        ]

    def dsn(self) -> str:
        """Return how a worker reaches the database: what Django passes to the driver, without what is not of
        libpq."""
        connection = connections[self.database]
        known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
        params = {
            name: value
            for name, value in connection.get_connection_params().items()
            if name in known and value is not None
        }
        role = connection.settings_dict["OPTIONS"].get("assume_role")
        if role:
            escaped = re.sub(r"([\\\s])", r"\\\1", role)
            params["options"] = f"{params.get('options', '')} -c role={escaped}".strip()
        return make_conninfo("", **params)


def _priorities(alias: str, given: Any) -> frozenset[int]:
    """Return the priorities with 0 among them. Raises ImproperlyConfigured for what is none."""
    least, greatest = _base.TASK_MIN_PRIORITY, _base.TASK_MAX_PRIORITY
    if not isinstance(given, (list, tuple, set, frozenset)) or not all(
        type(priority) is int and least <= priority <= greatest for priority in given
    ):
        raise ImproperlyConfigured(
            f"OPTIONS['priorities'] of TASKS[{alias!r}] must be a list of whole numbers from {least} to"
            f" {greatest}, not {given!r}"
        )
    return frozenset({0, *given})


def _suffix(priority: int) -> str:
    return f"{priority:+d}" if priority else ""


def _queue(name: str, priority: int) -> str:
    """Return the name of the queue of pgque for tasks of a queue and a priority."""
    return f"{name}{_suffix(priority)}"


def _arguments(message: Message) -> tuple[list[object], dict[str, object]]:
    """Return the arguments that a message holds. Raises Dead for one that `enqueue` did not send."""
    try:
        payload: Any = message.json()
        return [*payload["args"]], {**payload["kwargs"]}
    except (TypeError, ValueError, KeyError) as error:
        raise Dead(f"the payload is not one of a task: {error!r}") from error
