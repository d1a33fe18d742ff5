"""Two transactions in every order: each acts and ends, and a step that waits for a lock is gone on with later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import psycopg

from sql.helpers import Connection, Message, drain, settle, value, work_off

# The first letter of a side in an order is its act, the second its end.
ORDERS = ("aabb", "abab", "abba", "bbaa", "baba", "baab")
# How the sides end, by order: both commit, one of them does not, one is killed while it acts or waits, and
# savepoint: what it did is undone and done once more, and then committed.
ENDS = {
    "aabb": "cc rc",
    "abab": "cc rc kc sc",
    "abba": "cc cr ck",
    "bbaa": "cc",
    "baba": "cc cr cs",
    "baab": "cc rc",
}
ENDS_BRIEF = {"aabb": "cc", "abab": "cc kc", "abba": "cc", "bbaa": "cc", "baba": "cc", "baab": "ck"}
# Where one side has a snapshot of its own, and where both have.
ENDS_OLD = {"aabb": "cc", "abab": "cc", "abba": "", "bbaa": "cc", "baba": "cc cr", "baab": ""}
ENDS_BOTH_OLD = {"aabb": "", "abab": "cc", "abba": "", "bbaa": "", "baba": "cc", "baab": ""}
WORDS = {"c": "commit", "r": "rollback", "k": "killed", "s": "savepoint"}
# Of those, what `make test` has: each order, and each way to end where the other side waits for it.
OFTEN = {"aabb": "cc", "abab": "cc rc sc", "abba": "ck", "bbaa": "cc", "baba": "cc", "baab": "rc"}
PATIENCE = 20.0


@dataclass(slots=True)
class State:
    """What a set-up made: a queue, the ids of its messages, a batch that somebody holds."""

    queue: str
    sent: list[int] = field(default_factory=list)
    held: list[Message] = field(default_factory=list)
    note: Any = None

    @property
    def token(self) -> int:
        """The id of the batch that is held."""
        return self.held[0].batch_id


@dataclass(slots=True)
class Side:
    """One of the two transactions, and what became of it."""

    name: str
    act: Callable[[Connection, State], Any]
    end: str
    isolation: str
    session: Session
    result: Any = None
    error: psycopg.Error | None = None
    committed: bool = False
    ended: bool = False
    waited: bool = False
    again: bool = False
    job: Future[None] | None = None
    later: list[Callable[[], None]] = field(default_factory=list)

    @property
    def says(self) -> Any:
        """What it answered, if that counts."""
        return self.result if self.committed else None

    def open(self) -> None:
        """Begin, so that an old snapshot is taken now."""
        if self.isolation != "read committed":
            self.session.conn.execute(f"begin isolation level {self.isolation}".encode())
            self.session.conn.execute("select 1")

    def do(self, state: State) -> None:
        """Begin if that was not done, and act."""
        conn = self.session.conn
        try:
            if self.isolation == "read committed":
                conn.execute("begin")
            if self.end == "savepoint":
                conn.execute("savepoint s")
                self.act(conn, state)
                conn.execute("rollback to savepoint s")
            self.result = self.act(conn, state)
        except psycopg.Error as error:
            self.error = error

    def finish(self) -> None:
        """End as was said. A transaction that failed is rolled back."""
        self.ended = True
        conn = self.session.conn
        try:
            if self.error is not None or self.end == "rollback":
                conn.execute("rollback")
            else:
                conn.execute("commit")
                self.committed = True
        except psycopg.Error as error:
            self.error = error
            if not conn.closed:
                conn.execute("rollback")

    def may_fail(self, allowed: frozenset[str]) -> bool:
        """Say whether its error is none that a caller need worry about."""
        if self.end == "killed" or self.error is None:
            return True
        stale = self.error.sqlstate == "40001" and self.isolation != "read committed"
        return (stale and self.end == "rollback") or self.error.sqlstate in allowed

    def busy(self) -> bool:
        """Say whether a step of it has not returned."""
        return self.job is not None and not self.job.done()


class Session:
    """A connection whose statements run in a thread of its own."""

    def __init__(self, dsn: str) -> None:
        self.conn: Connection = psycopg.connect(dsn, autocommit=True)
        self.conn.execute("set statement_timeout = '30s'")
        self.pid = self.conn.info.backend_pid
        self.thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.conn.close()
        self.thread.shutdown()


class Arena:
    """A database, two sessions that play in it, and one that prepares and looks."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.conn: Connection = psycopg.connect(dsn, autocommit=True)
        self._watcher: Connection = psycopg.connect(dsn, autocommit=True)
        self._sessions: dict[str, Session] = {}
        self._count = 0
        self._queue = ""
        self._kind = ""
        self._idle: dict[str, str] = {}
        self.conn.execute(
            "create or replace function pgque.clock() returns timestamptz language sql volatile as"
            " $$ select pg_catalog.clock_timestamp() + coalesce(nullif("
            "pg_catalog.current_setting('test.ahead', true), ''), '0')::pg_catalog.interval $$"
        )

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self.conn.close()
        self._watcher.close()

    def new_queue(self, kind: str = "", subscribed: bool = True, **config: Any) -> str:
        """Give a queue with nothing in it, and a consumer c. One of the same kind serves again and again."""
        self._kind = f"{kind} {sorted(config.items())}"
        self._queue = self._idle.pop(self._kind, "")
        if not self._queue:
            self._count += 1
            self._queue = f"q{self._count}"
            value(self.conn, "select pgque.create_queue(%s, %s::jsonb)", self._queue, json.dumps(config))
        if subscribed:
            value(self.conn, "select pgque.subscribe(%s, 'c')", self._queue)
        return self._queue

    def clear(self) -> None:
        """Take everything out of the queue of a case, if it is still there."""
        self.conn.execute("reset test.ahead")
        if value(self.conn, "select count(*) from pgque.queue as q where q.queue_name = %s", self._queue):
            value(self.conn, "select pgque.purge(%s)", self._queue)
            for consumer in ("c", "late"):
                value(self.conn, "select pgque.unsubscribe(%s, %s)", self._queue, consumer)
            value(self.conn, "select pgque.dlq_purge(%s, '-1 day')", self._queue)
            self._idle[self._kind] = self._queue

    def forget(self) -> None:
        """Leave the queue and the sessions of a case that failed alone."""
        for session in self._sessions.values():
            value(self._watcher, "select pg_terminate_backend(%s, 5000)", session.pid)
            session.close()
        self._sessions.clear()
        self.conn.execute("reset test.ahead")

    def ahead(self, by: str) -> None:
        """Let this session's clock go ahead."""
        value(self.conn, "select set_config('test.ahead', %s, false)", by)

    def rest(self, queue: str, consumer: str = "c") -> list[Message]:
        """Work off as a worker what a pool still has, a day later."""
        self.ahead("1 day")
        settle(self.conn, queue)
        done = work_off(self.conn, queue, "rest", consumer=consumer)
        self.ahead("0")
        return done

    def rest_alone(self, queue: str, consumer: str = "c") -> list[int]:
        """Work off what a consumer on its own still has, a day later."""
        self.ahead("1 day")
        settle(self.conn, queue)
        done = drain(self.conn, queue, consumer)
        self.ahead("0")
        return done

    def session(self, name: str) -> Session:
        """Give the session of a side, a new one if it was killed."""
        session = self._sessions.get(name)
        if session is None or session.conn.closed:
            if session is not None:
                session.close()
            session = self._sessions[name] = Session(self.dsn)
        return session

    def play(
        self, state: State, sides: dict[str, Side], order: str, allowed: frozenset[str] = frozenset()
    ) -> None:
        """Let the sides take their steps in this order. One that gets 40001 tries again at the end."""
        for side in sides.values():
            side.open()
        acted: set[str] = set()
        for name in order:
            side = sides[name]
            if name not in acted:
                acted.add(name)
                self._start(side, lambda side=side: side.do(state))  # type: ignore[misc]
            elif side.end == "killed":
                self._kill(side)
            elif side.busy():
                side.later.append(side.finish)
            else:
                self._start(side, side.finish)
            self._settle(sides)
        self._settle(sides, to_the_end=True)
        assert all(side.ended for side in sides.values())
        for side in sides.values():
            self._try_again(side, state)
            if side.error is not None and not side.may_fail(allowed):
                raise side.error

    def _start(self, side: Side, step: Callable[[], None]) -> None:
        side.job = side.session.thread.submit(step)

    def _settle(self, sides: dict[str, Side], to_the_end: bool = False) -> None:
        """Return once each step has returned or, unless to_the_end, waits for a lock."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for side in sides.values():
                if side.later and not side.busy():
                    self._start(side, side.later.pop(0))
            # Most steps return at once. In this order: one that has returned may have let the other go.
            wait([side.job for side in sides.values() if side.job is not None and side.busy()], 0.004)
            busy = [side for side in sides.values() if side.busy()]
            if not busy or (not to_the_end and all(self._is_blocked(side) for side in busy)):
                break
            assert time.monotonic() < deadline, f"{[side.name for side in busy]} do not go on"
        for side in sides.values():
            side.waited = side.waited or side in busy
            if side.job is not None and side.job.done():
                side.job.result()

    def _is_blocked(self, side: Side) -> bool:
        return bool(value(self._watcher, "select cardinality(pg_blocking_pids(%s)) > 0", side.session.pid))

    def _kill(self, side: Side) -> None:
        value(self._watcher, "select pg_terminate_backend(%s, 5000)", side.session.pid)
        if side.job is not None:
            side.job.result(PATIENCE)
        side.ended = True
        side.session.conn.close()

    def _try_again(self, side: Side, state: State) -> None:
        for _ in range(3):
            stale = side.error is not None and side.error.sqlstate == "40001"
            if not stale or side.isolation == "read committed" or side.end in ("rollback", "killed"):
                return
            side.again = True
            side.error = None
            side.open()
            side.do(state)
            side.finish()


def combinations(old: str, both_ways: bool, brief: bool) -> Iterator[tuple[str, str, str, str, str, bool]]:
    """Name order, ends and isolation levels of each case, and whether `make test` has it.

    old: the sides that may have an old snapshot. both_ways: the sides do different things.
    """
    rr = "repeatable read"
    rc = "read committed"
    levels = [(rc, rc, ENDS_BRIEF if brief else ENDS)]
    if "a" in old:
        levels.append((rr, rc, ENDS_OLD))
    if "b" in old:
        levels.append((rc, rr, ENDS_OLD))
    if "a" in old and "b" in old:
        levels.append((rr, rr, ENDS_BOTH_OLD))
    for order in ORDERS if both_ways else ORDERS[:3]:
        for level_a, level_b, ends in levels:
            # A side that has ended before the other one acts has no snapshot that is older than something.
            first = {"aabb": level_a, "bbaa": level_b}.get(order, rc)
            for end in ends[order].split():
                often = (brief or end in OFTEN[order].split()) and first == rc
                yield order, WORDS[end[0]], WORDS[end[1]], level_a, level_b, often
