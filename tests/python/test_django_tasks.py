"""Django's tasks on pgque: enqueued in the transaction of a request, run by manage.py pgque_worker.

With the API of the package django-tasks, and with that of Django 6.0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
import pytest

import pgque
from conftest import create_database, drop_database
from support.documents import ROOT, environment
from support.processes import ended
from support.servers import TestServer

# Django 6.0, which `make` installs beside the other one.
DJANGO_6 = Path(sys.prefix) / "django-6"


class Project:
    """The project of Django in support/django_project, in an empty database."""

    def __init__(self, api: str, dsn: str) -> None:
        self.dsn = dsn
        path = [ROOT / "tests", ROOT / "tests" / "examples" / "django_tasks"]
        if api == "django.tasks" and django.VERSION < (6, 0):
            path.append(DJANGO_6)
        self._env = {
            **environment(dsn, []),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "TASKS_API": api,
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of the project."""
        return subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-W",
                "ignore::ResourceWarning",
                "-m",
                "support.django_project",
                *arguments,
            ],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> str:
        """Run a command of the project, and return what it prints."""
        with ended(self.start(*arguments)) as process:
            printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0, printed
        return printed


@pytest.fixture(scope="module", params=["django_tasks", "django.tasks"])
def project(request: pytest.FixtureRequest, server: TestServer) -> Iterator[Project]:
    """A project with each API of tasks, which has enqueued tasks; see support/django_project/__main__.py."""
    name = create_database(server, "pgque_django")
    try:
        found = Project(request.param, server.dsn_for(name))
        found.run("enqueue")
        yield found
    finally:
        drop_database(server, name)


def ran(client: pgque.PgqueClient) -> list[object]:
    """Return what tasks noted, in order, and forget it."""
    conn = client.conn
    rows: Any = conn.execute("with gone as (delete from ran returning *) select what from gone order by id")
    return [row[0] for row in rows]


def tick(client: pgque.PgqueClient) -> None:
    """Have everything received that was sent."""
    for queue in ("mail", "mail+10", "mail-10", "default", "default+10"):
        client.force_next_tick(queue)
    client.ticker_all()


def test_tasks_are_enqueued_in_a_transaction_and_run_by_a_worker(project: Project) -> None:
    with pgque.connect(project.dsn, autocommit=True) as client:
        tick(client)
        printed = project.run(
            "pgque_worker",
            "--skip-checks",  # of the backend that is refused
            "--until-idle",
            "--concurrency=1",
            "--retry-after=3600",
            "--queue=mail",
            "--queue=default",
        )
        assert "runs tasks of mail+10, default+10, mail, default, mail-10, default-10 until" in printed
        assert printed.endswith("done\n")
        order = ran(client)
        assert sorted(order[:2], key=str) == ["high", "high in another queue"]
        # Queues of one priority take turns: the task of the other queue is anywhere among these.
        assert 2 <= order.index("plain") < order.index("low")
        order.remove("plain")
        assert order[2:] == [
            "mail RUNNING 1 [] None",
            "kept",
            "mail SUCCESSFUL 1 [] KEPT",
            "asynchronous",
            "coroutine",
            "mail RUNNING 1 [] None",
            "mail FAILED 1 ['ZeroDivisionError'] None",
            "after the lost connection",
            "low",
            "attempt 2 of mail -10 by ['', 'worker']",
        ]
        left = [
            ((m.type or "").rpartition(".")[2], m.status, (m.last_error or "").partition(":")[0])
            for m in client.messages.list("mail")
        ]
        assert sorted(left) == [
            ("break_connection", "retry", "OperationalError"),
            ("divide", "retry", "ZeroDivisionError"),
            ("give_up", "dead", "no address"),
            ("note", "retry", "TypeError"),
            ("write", "dead", "the payload is not one of a task"),
            ("write", "delayed", ""),
        ]


def test_sigterm_lets_tasks_finish(project: Project) -> None:
    with pgque.connect(project.dsn, autocommit=True) as client:
        client.admin.purge("mail")
        client.conn.execute("select pg_advisory_lock(1)")
        type_name = "support.django_project.jobs.wait_for_lock"
        msg_id = client.send("mail", {"args": [], "kwargs": {}}, type=type_name)
        tick(client)
        with ended(project.start("pgque_worker", "--skip-checks", "--queue=mail")) as worker:
            assert worker.stdout is not None
            assert "until SIGTERM" in worker.stdout.readline()
            while "waits" not in ran(client):
                time.sleep(0.05)
            worker.terminate()
            client.conn.execute("select pg_advisory_unlock(1)")
            assert worker.stdout.read().endswith("stopped\n")
            assert worker.wait(20) == 0
        assert ran(client) == ["has waited"]
        assert msg_id not in [message.msg_id for message in client.messages.list("mail")]
