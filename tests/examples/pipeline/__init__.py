"""The data pipeline: real records through Spark and two queues, exactly once.

load.py writes records with Spark's JDBC into queue `packages`; job.py reads them as a stream, adds them up,
and sends on what tally.py, a plain consumer, receives. The job may be killed, or end: then it is started
again, as a supervisor would. At the end what came out is compared with what went in.
"""

from __future__ import annotations

import platform
import random
import secrets
import shlex
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psycopg
from psycopg import sql
from rich.console import Console

from pgque.cli.common import line_width, plain_console, visible
from pgque.demo.report import tuples
from pgque.demo.servers import Driver, Place, find_place
from pgque.demo.signals import clean_ends
from pgque.errors import PgqueError
from pgque.ops.embedded import EmbeddedServerError
from pgque.ops.install import install
from pgque.twins.client import PgqueClient, connect

from .plot import save_plot
from .processes import Program, environment, micro_batches, missing, seconds_told, started, unfinished
from .records import Records, find_records
from .report import Counts, Run, report

ROLE = "pgque_pipeline"
RECORDS = 500_000
STALLED = 180.0  # seconds without any progress until the pipeline gives up
RESTARTS = 2  # how often a streaming job that ended by itself is started again

TABLES = """
create table pipeline.total (
  section       text not null,
  maintainer    text not null,
  packages      bigint not null,
  installed_kb  bigint not null,
  primary key (section, maintainer)
);
create table pipeline.received (
  package       text not null,
  version       text not null,
  architecture  text not null,
  section       text not null,
  size_class    text not null,
  dependencies  int not null,
  number        bigint generated always as identity primary key
);
"""


def run_pipeline(
    *,
    server: str = "auto",
    kills: int = 0,
    keep: bool = False,
    number: int = RECORDS,
    plot: Path | None = None,
) -> int:
    """Run the pipeline and return its exit code: 0 when each record came out exactly once.

    `kills` is how many times the streaming job is killed on its way; `number` is how many records
    go through it; `plot` is where the SVG goes, by default the folder for temporary files.
    """
    console = plain_console(line_width() or 120)
    lacks = missing()
    if lacks is not None:
        console.print(f"pgque pipeline: {visible(lacks)}", style="red")
        return 1
    try:
        with clean_ends(), ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgque-pipeline-")))
            records = find_records(number)
            console.print(f"Records: {records.title}; {records.source}")
            place = stack.enter_context(find_place("", server, keep, console))
            version = install(place.dsn)
            driver = stack.enter_context(Driver(place.dsn, keep, console))
            python = platform.python_version()
            console.print(f"{place.title}; pgque {version}; driven by {driver.title}; Python {python}")
            # With kills, bound micro-batches, so that there are some to kill.
            connection = _prepare(place, {"max_window": len(records) // 4 + 1} if kills else {})
            run = Run(time.time())
            _Pipeline(place, records, environment(connection, folder), folder, console).run(run, kills)
            run.batches = micro_batches(folder)
            with connect(place.dsn, autocommit=True) as client:
                good = report(client, records, run, console)
            path = plot or Path(tempfile.gettempdir(), "pgque-pipeline.svg")
            save_plot(path, f"{len(records):,} records through Spark", run)
            console.print(f"Load, lag and micro-batches over time: {visible(str(path))}", soft_wrap=True)
            _farewell(place, driver, keep, console)
            return 0 if good else 1
    except (PgqueError, psycopg.Error, EmbeddedServerError) as error:
        console.print(f"pgque pipeline: {visible(str(error))}", style="red")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


def _prepare(place: Place, settings: dict[str, int]) -> dict[str, str]:
    """Make queues, tables and a role that may use them and no more; return libpq's variables for it."""
    password = secrets.token_hex(16)
    with connect(place.dsn, autocommit=True) as client:
        client.admin.create_queue("packages", settings)
        client.admin.create_queue("changes")
        client.subscribe("changes", "tally")
        for consumer in ("changes", "totals"):  # before the first record is sent, so that they miss none
            client.subscribe("packages", consumer)
        conn = client.conn
        role = sql.Identifier(ROLE)
        conn.execute(sql.SQL("create role {} login password {}").format(role, password))
        conn.execute(sql.SQL("grant pgque_reader, pgque_writer to {}").format(role))
        conn.execute(sql.SQL("create schema pipeline authorization {}").format(role))
        with conn.transaction():
            conn.execute(sql.SQL("set local role {}").format(role))
            conn.execute(TABLES)
        host = conn.info.host
        return {
            "PGHOST": "127.0.0.1" if not host or host.startswith("/") else host,  # JDBC has no Unix sockets
            "PGPORT": str(conn.info.port),
            "PGDATABASE": conn.info.dbname,
            "PGUSER": ROLE,
            "PGPASSWORD": password,
        }


class _Pipeline:
    def __init__(
        self, place: Place, records: Records, env: dict[str, str], folder: Path, console: Console
    ) -> None:
        self._place = place
        self._total = len(records)
        self._env = env
        self._folder = folder
        self._console = console
        self._programs: list[Program] = []
        self._shown = "", -5.0
        self._input = folder / "records.txt"
        with self._input.open("w") as file:
            file.writelines(f"{stanza}\n\n" for stanza in records)

    def _start(self, name: str, *arguments: str) -> Program:
        program = Program(name, list(arguments), self._env, self._folder)
        self._programs.append(program)
        return program

    def _job(self) -> Program:
        return self._start("job", str(self._folder / "checkpoints"))

    def _again(self, job: Program) -> Program:
        self._programs.remove(job)
        return self._job()

    def run(self, run: Run, kills: int) -> None:
        """Run everything until all records came through, or nothing moves any more."""
        try:
            with connect(self._place.dsn, autocommit=True) as client:
                self._console.print("starting Spark twice: to write the records, and to stream them")
                load = self._start("load", str(self._input))
                job, tally = self._job(), self._start("tally")
                self._watch(client, load, job, tally, run, kills)
                run.seconds = time.time() - run.began
        finally:
            for program in self._programs:
                program.kill()

    def _watch(
        self, client: PgqueClient, load: Program, job: Program, tally: Program, run: Run, kills: int
    ) -> None:
        checkpoints = self._folder / "checkpoints"
        plan = [(n + random.uniform(-0.3, 0.3)) / (kills + 1) for n in range(1, kills + 1)]  # noqa: S311
        counts, moved, restarts = Counts(), time.monotonic(), 0
        while True:
            time.sleep(0.1)
            before, counts = counts, _counts(client)
            done, now = counts.added + counts.dead, time.monotonic()
            run.samples.append((time.time(), counts))
            if counts != before:
                moved = now
            self._show(run, counts)
            for program in (job, tally, load):
                if program.code is None or (program is load and program.code == 0):
                    continue
                if program is not job or restarts == RESTARTS:
                    raise PgqueError(f"{program.name} ended with {program.code}:\n{program.told()}")
                restarts += 1
                self._console.print(
                    f"the streaming job ended with {program.code}; starting it again. It wrote:", style="red"
                )
                self._console.print(visible(program.told(), keep="\n\t"))
                job, moved = self._again(job), now
            if plan and (done + counts.received) / 2 >= plan[0] * self._total:
                plan.pop(0)
                time.sleep(random.uniform(0, 0.5))  # noqa: S311
                job.kill()
                run.kills.append(time.time())
                run.in_flight.append(unfinished(checkpoints))
                self._console.print("kill -9 of the streaming job; starting it again")
                job, moved = self._again(job), time.monotonic()
            elif done >= self._total and counts.received >= counts.added and not unfinished(checkpoints):
                break
            elif now - moved > STALLED:
                self._console.print(f"nothing moved for {STALLED:.0f} seconds; the job wrote:", style="red")
                self._console.print(visible(job.told(), keep="\n\t"))
                break
        self._show(run, counts, every=0)
        job.kill()
        _drain(client)
        run.sending, run.receiving = seconds_told(load, "SENT"), seconds_told(tally, "RECEIVED")

    def _show(self, run: Run, counts: Counts, every: float = 2) -> None:
        """Print what is new, every two seconds, or the same again after five."""
        if counts.sent:
            text = (
                f"of {self._total:,} sent {counts.sent:,}, added up {counts.added:,},"
                f" dead letters {counts.dead:,}; changes received {counts.received:,}"
            )
        else:
            text = f"Spark starts: {started(self._folder)}"
        shown, at = self._shown
        seconds = time.time() - run.began
        if seconds - at >= (5 if text == shown else every):
            self._shown = text, seconds
            self._console.print(f"{seconds:4.0f} s: {text}")


_COUNTS = """
select
  coalesce(max(t.tick_event_seq) filter (where q.queue_name = 'packages'), 0),
  coalesce(max(t.tick_event_seq) filter (where q.queue_name = 'changes'), 0),
  (select coalesce(sum(t.packages), 0)::bigint from pipeline.total t),
  (select count(*) from pgque.dead_letter),
  (select coalesce(max(r.number), 0) from pipeline.received r)
from pgque.tick t
join pgque.queue q on q.queue_id = t.tick_queue
"""


def _counts(client: PgqueClient) -> Counts:
    return Counts(*tuples(client, _COUNTS)[0])


def _drain(client: PgqueClient) -> None:
    """Wait until the plain consumer has received all that was sent."""
    client.force_next_tick("changes")
    client.ticker("changes")
    last = client.monitor.get_queue_info("changes")[0].last_tick_id or 0
    deadline = time.monotonic() + STALLED
    while (
        client.consumers.get_info("changes", "tally")[0].last_tick or 0
    ) < last and time.monotonic() < deadline:
        time.sleep(0.1)


def _farewell(place: Place, driver: Driver, keep: bool, console: Console) -> None:
    if not keep:
        console.print(
            "make pipeline KILL=2 kills the streaming job twice; KEEP=1 leaves the server up to look around."
        )
        return
    stop = "; ".join(hint for hint in (driver.stop_hint, place.stop_hint) if hint)
    for line in (
        "The server stays up, with the tables in schema pipeline:",
        f"  {shlex.join([place.psql, place.dsn])}",
        *([f"Stop it with: {stop}"] if stop else []),
    ):
        console.print(line, soft_wrap=True)
