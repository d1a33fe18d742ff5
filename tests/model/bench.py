"""What both machines stand on: a database with a clock that is set, sessions that die, and how a machine is run."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from pgque import embedded
from sql.helpers import Connection, Message, rows, value
from support.servers import SQL_FILE

EPOCH = datetime(2040, 1, 1, tzinfo=timezone.utc)


@dataclass(slots=True)
class Tick:
    """A snapshot: the commits it shows, and the ids that were given out."""

    id: int
    time: int
    seq: int
    upto: int
    leaf: int


@dataclass(slots=True)
class Bench:
    """A database of one's own whose clock stands until it is moved."""

    dsn: str
    conn: Connection
    server: embedded.Server | None = None  # one that may be killed
    now: int = 0  # milliseconds
    number: int = 0
    opened: list[Connection] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def move(self, seconds: float) -> None:
        """Let time pass."""
        self.now += round(seconds * 1000)
        # A sequence is outside of transactions, so every session sees the new time at once.
        value(self.conn, "select setval('public.model_clock', %s)", self.now)

    def deliver(self, *, ordinary: bool) -> None:
        """Choose one of the two ways to deliver; the model answers the same."""
        self.conn.execute(f"set pgque.ordinary = {'on' if ordinary else 'off'}".encode())

    def connect(self, *, autocommit: bool = True) -> Connection:
        """Open another session."""
        session: Connection = psycopg.connect(self.dsn, autocommit=autocommit)
        self.opened.append(session)
        return session

    def drop(self, queue: str) -> None:
        """Close the sessions of an example, whatever they were doing, and drop its queue."""
        for session in self.opened:
            session.close()
        self.opened.clear()
        self.conn.execute("set lock_timeout = '20s'")
        value(
            self.conn,
            "select pgque.drop_queue(q.queue_name, true) from pgque.queue q where q.queue_name = %s",
            queue,
        )

    def end(self, session: Connection, how: str) -> None:
        """End a session's transaction: commit, roll back, or kill the process that serves it."""
        if how == "commit":
            session.commit()
        elif how == "rollback":
            session.rollback()  # closing alone returns before the server has let go of the locks
        elif how == "killed":
            value(self.conn, "select pg_terminate_backend(%s, 10000)", session.info.backend_pid)
        session.close()

    def restart(self) -> None:
        """Kill the whole server and start it again."""
        assert self.server is not None
        self.server.kill()
        self.server.restart()
        self.conn.close()
        self.conn = psycopg.connect(self.dsn, autocommit=True)


def engine() -> str:
    """The engine to judge; PGQUE_MODEL_SQL names another one."""
    return Path(os.environ.get("PGQUE_MODEL_SQL") or SQL_FILE).read_text()


def prepare(dsn: str, server: embedded.Server | None = None, script: str | None = None) -> Bench:
    """Give a database with pgque, or with the engine in script, a clock that is set."""
    bench = Bench(dsn, psycopg.connect(dsn, autocommit=True), server)
    if script is not None:
        bench.conn.execute(script.encode())
    bench.conn.execute("create sequence public.model_clock")
    bench.conn.execute("grant select on sequence public.model_clock to public")  # whoever owns pgque
    bench.conn.execute(
        "create or replace function pgque.clock() returns timestamptz language sql volatile as"
        " $$ select timestamptz '2040-01-01 00:00:00+00' + (select c.last_value from public.model_clock c)"
        " * interval '1 millisecond' $$"
    )
    bench.move(1)
    return bench


def at(milliseconds: int) -> datetime:
    """Tell a time of the model as the database writes it."""
    return EPOCH + timedelta(milliseconds=milliseconds)


def turn_journal(conn: Connection) -> bool:
    """Turn the journal of positions as maintenance does, without waiting for 4 MB; false if it is not ready."""
    return bool(
        rows(
            conn,
            "select pgque._rotate_journal(j.journal_cur) from pgque.journal j"
            " where pgque._journal_size(1 - j.journal_cur) = 0",
        )
    )


def refusal(call: Callable[[], object]) -> str:
    """Call what must be refused; return the SQLSTATE."""
    try:
        answer = call()
    except psycopg.Error as error:
        return error.sqlstate or str(error)
    raise AssertionError(f"not refused but answered: {answer!r}")


def messages(found: list[Any]) -> list[Message]:
    """Read what receive() returned."""
    return [Message(*row[: len(Message._fields)]) for row in found]


def run(
    machine: type[RuleBasedStateMachine],
    examples: int,
    steps: int,
    *,
    shrink: bool = not os.environ.get("PGQUE_NO_SHRINK"),
    want: Collection[str] = (),
) -> int:
    """Run a machine with a new seed, or the one in PGQUE_SEED; what failed is printed as few steps as do it.

    What is wanted must be seen. A few sequences may miss it by chance: then as many others follow. Returns how
    often that many were run.
    """
    on: Bench = machine.bench  # type: ignore[attr-defined]
    for runs in range(1, 2 if os.environ.get("PGQUE_SEED") else 7):
        _run(machine, examples, steps, shrink)
        if all(on.seen[what] for what in want):
            return runs
    raise AssertionError(f"wanted {want}, saw {dict(on.seen)}")


def _run(machine: type[RuleBasedStateMachine], examples: int, steps: int, shrink: bool) -> None:
    seed = int(os.environ.get("PGQUE_SEED") or random.SystemRandom().randrange(10**9))
    print(f"PGQUE_SEED={seed}")
    hypothesis.seed(seed)(machine)
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("PGQUE_MODEL_EXAMPLES") or examples),
            stateful_step_count=steps,
            phases=phases,
            database=None,
            deadline=None,
            derandomize=False,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
