"""The programs of tests/examples/compared do the same with pgque as with other libraries, each in a database of its
own, and are run as their heads say."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from conftest import create_database, drop_database
from support.documents import ROOT, environment, ticking
from support.processes import ended
from support.servers import TestServer

FOLDER = ROOT / "tests" / "examples" / "compared"
OTHERS = ROOT / ".venv" / "compared"  # where make installs the other libraries
SHOP = re.compile(r'SET_UP = """(.*?)"""', re.DOTALL)
WORKERS = ["retries", "periodic", "batch", "web"]
PATIENCE = 60.0

CLICKS = 100
# Ids of charges: the bank does not answer at first, answers, does not answer after the last attempt; not to be charged
FLAKY, SOUND, EXHAUSTED, BAD = 1, 2, 3, 4


@dataclass(frozen=True)
class Library:
    """How SQL sends a message of a library, and what it calls a dead letter."""

    send: str
    exhaust: str
    sent: str
    dead: str


LIBRARIES = {
    "pgque": Library(
        send="select pgque.send(case %(task)s when 'charge' then 'payments' else 'clicks' end, %(task)s, %(payload)s)",
        exhaust="""
            do $$
            declare v_message pgque.message;
            begin
              perform pgque.ticker('payments');
              for attempt in 1..4 loop
                select * into v_message from pgque.receive('payments', 'charging', worker => 'test');
                perform pgque.nack(v_message.batch_id, v_message, '0 s'), pgque.ack(v_message.batch_id);
              end loop;
            end $$""",
        sent="select (payload::json ->> 'order')::int from pgque.list_messages('orders')",
        dead="select (ev_data::json ->> 'id')::int from pgque.dlq_inspect('payments')",
    ),
    "procrastinate": Library(
        send="insert into procrastinate_jobs (queue_name, task_name, args) values ('default',"
        " case %(task)s when 'charge' then 'retries.charge' else 'batch.click' end, %(payload)s)",
        exhaust="update procrastinate_jobs set attempts = 4",
        sent="select (args ->> 'order')::int from procrastinate_jobs where task_name = 'web.confirm'",
        dead="select (args ->> 'id')::int from procrastinate_jobs where status = 'failed'",
    ),
    "pgqueuer": Library(
        send="insert into pgqueuer (priority, status, entrypoint, payload)"
        " values (0, 'queued', %(task)s, convert_to(%(payload)s, 'UTF8'))",
        exhaust="update pgqueuer set attempts = 4",
        sent="select (convert_from(payload, 'UTF8')::json ->> 'order')::int from pgqueuer where entrypoint = 'confirm'",
        dead="select (convert_from(payload, 'UTF8')::json ->> 'id')::int from pgqueuer where status = 'failed'",
    ),
}


class Running:
    """The programs of one library."""

    def __init__(self, library: str, dsns: dict[str, str], logs: Path) -> None:
        self.library = LIBRARIES[library]
        self.folder = FOLDER / f"with_{library}"
        self._dsns = dsns
        self._logs = logs
        self._started: dict[str, subprocess.Popen[str]] = {}

    def environment(self, program: str) -> dict[str, str]:
        """Return the variables of a program: its database, and where it finds the libraries and the shop."""
        return {
            **environment(self._dsns[program], [OTHERS / "bin", Path(sys.executable).parent]),
            "PYTHONPATH": os.pathsep.join([str(OTHERS), str(FOLDER), "."]),
            "UVICORN_PORT": "0",
            "PROCRASTINATE_WORKER_FETCH_JOB_POLLING_INTERVAL": "0.5",
        }

    def command(self, program: str) -> list[str]:
        """Return what the head of a program says to run it."""
        head = (self.folder / f"{program}.py").read_text(encoding="utf-8")
        return shlex.split(head.split("\nRun it: ", 1)[1].split("\n", 1)[0])

    def start(self, program: str, stack: ExitStack) -> None:
        """Start a worker."""
        with (self._logs / program).open("w") as log:
            process = subprocess.Popen(
                self.command(program), cwd=self.folder, env=self.environment(program), stderr=log, text=True
            )
        self._started[program] = stack.enter_context(ended(process))

    def stop(self) -> dict[str, int]:
        """Stop all workers; return their exit codes."""
        for process in self._started.values():
            process.send_signal(signal.SIGINT)
        return {program: process.wait(PATIENCE) for program, process in self._started.items()}

    def log(self, program: str) -> str:
        """Return what a program has logged."""
        return (self._logs / program).read_text()

    def sql(self, program: str, statement: str, parameters: Any = None) -> list[Any]:
        """Run a statement in the database of a program; return the first column, if there is one."""
        with psycopg.connect(self._dsns[program], autocommit=True) as conn:
            cursor = conn.execute(statement.encode(), parameters)
            return [row[0] for row in cursor] if cursor.description else []

    def send(self, program: str, task: str, payloads: list[dict[str, Any]]) -> None:
        """Send messages to a worker, in one transaction."""
        with psycopg.connect(self._dsns[program]) as conn:
            for payload in payloads:
                conn.execute(self.library.send.encode(), {"task": task, "payload": json.dumps(payload)})

    def wait(self, program: str, statement: str, wanted: object) -> None:
        """Wait until a query has this result. Fails if the program ends, or after a minute."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.sql(program, statement)) != wanted:
            process = self._started[program]
            assert process.poll() is None, f"{program} ended with {process.returncode}:\n{self.log(program)}"
            assert time.monotonic() < deadline, f"{program}: {found}, not {wanted}:\n{self.log(program)}"
            time.sleep(0.05)

    def url(self, program: str) -> str:
        """Wait until a program serves, and return its address."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(r"running on (http://\S+)", self.log(program))):
            assert self._started[program].poll() is None, self.log(program)
            assert time.monotonic() < deadline, self.log(program)
            time.sleep(0.05)
        return found[1]


@pytest.fixture(scope="module", params=LIBRARIES)
def running(
    request: pytest.FixtureRequest,
    server: TestServer,
    installed: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    """The workers of a library, all running, and what they are to do has been sent."""
    library, names = request.param, {}
    try:
        # Copies of one database, in which the library is set up
        names["all"] = create_database(server, "pgque_compared", installed)
        running = Running(library, {"all": server.dsn_for(names["all"])}, tmp_path_factory.mktemp(library))
        running.sql("all", _shop())
        done = subprocess.run(
            ["sh", "-e", "set_up.sh"],
            cwd=running.folder,
            env=running.environment("all"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for program in [*WORKERS, "send"]:
            names[program] = create_database(server, "pgque_compared", names["all"])
            running._dsns[program] = server.dsn_for(names[program])
        running.sql("retries", "insert into offline values (%s, 1), (%s, 9)", [FLAKY, EXHAUSTED])
        running.send("retries", "charge", [{"id": EXHAUSTED, "amount": 10}])
        running.sql("retries", running.library.exhaust)
        running.send("retries", "charge", [{"id": id, "amount": 10} for id in (FLAKY, SOUND)])
        running.send("retries", "charge", [{"id": BAD, "amount": -1}])
        running.send("batch", "click", [{"id": id, "page": "/"} for id in range(CLICKS)])
        with ExitStack() as stack:
            for program in WORKERS:
                running.start(program, stack)
            if library == "pgque":
                for program in WORKERS:
                    stack.enter_context(ticking(running._dsns[program]))
            yield running
            assert running.stop() == dict.fromkeys(WORKERS, 0), [running.log(program) for program in WORKERS]
    finally:
        for name in names.values():
            drop_database(server, name)


def _shop() -> str:
    found = SHOP.search((FOLDER / "shop.py").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def test_an_order_and_its_message_are_committed_together_or_not_at_all(running: Running) -> None:
    codes = [
        subprocess.run(
            running.command("send"),
            cwd=running.folder,
            env=running.environment("send"),
            check=False,
            stderr=subprocess.DEVNULL,
        ).returncode
        for _ in range(2)  # the second time the id is found twice, at the commit
    ]
    assert codes == [0, 1]
    assert running.sql("send", "select id from orders") == [1]
    assert running.sql("send", running.library.sent) == [1]


def test_some_errors_are_retried_and_messages_that_are_given_up_are_kept(running: Running) -> None:
    running.wait("retries", "select id from charges order by id", [FLAKY, SOUND])
    running.wait("retries", f"select * from ({running.library.dead}) as d order by 1", [EXHAUSTED, BAD])
    attempts = running.sql("retries", "select id from attempts order by id")
    assert attempts == [FLAKY, FLAKY, SOUND, EXHAUSTED, BAD]


def test_a_task_runs_at_each_time(running: Running) -> None:
    seconds = "select count(distinct date_trunc('second', written)) >= 2 from reports"
    running.wait("periodic", seconds, [True])


def test_messages_are_stored_in_batches_and_once(running: Running) -> None:
    running.wait("batch", "select count(*) from clicks", [CLICKS])
    assert running.sql("batch", "select id from clicks order by id") == list(range(CLICKS))
    assert running.sql("batch", "select count(distinct stored_in) from clicks")[0] <= CLICKS / 2


def test_an_application_takes_an_order_and_its_worker_confirms_it(running: Running) -> None:
    order = f"{running.url('web')}/orders/7"
    assert httpx2.post(order).status_code == 200
    running.wait("web", "select id from orders where confirmed", [7])
    assert httpx2.post(order).status_code == 500
