"""What the clients did and were told, and when: the record that is judged."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import psycopg

Row = tuple[Any, ...]
Connection = psycopg.Connection[Row]

# Errors that a client of a faulty server has to expect and to answer by trying again: a backend that was ended,
# timeouts, a full disk, 40001 and 40P01 are among them.
EXPECTED = (psycopg.OperationalError, psycopg.InterfaceError)
# The batch went to another, the dead letter was requeued by another, the queue is paused.
PASSING = ("PQ008", "PQ012", "PQ013")
# A commit that failed with one of these did not happen. After any other error it may have.
ROLLED_BACK = ("40", "55P03", "22", "23", "42", "53", "PQ")


@dataclass(slots=True)
class Tx:
    """A transaction: when it began, when its end was known, and what became of it."""

    begin: float
    end: float = inf
    fate: str = "unknown"

    def close(self, fate: str) -> None:
        self.end, self.fate = time.monotonic(), fate


@dataclass(slots=True)
class Call:
    """One statement of a client, as the client saw it."""

    n: int
    who: str
    what: str
    tx: Tx
    begin: float
    end: float = inf

    def __str__(self) -> str:
        return (
            f"#{self.n} {self.who} {self.what} [{self.begin % 1000:.3f} {self.end % 1000:.3f}] {self.tx.fate}"
        )


@dataclass(slots=True)
class Sent:
    """A message that somebody sent."""

    payload: str
    call: Call
    queue: str
    key: str | None = None
    lane: str | None = None  # the key of its order
    due: float | None = None  # in the engine's time
    short: bool = False  # its ttl is so short that it may expire
    id: int | None = None
    cancelled: bool = False  # by ROLLBACK TO

    @property
    def fate(self) -> str:
        return "rolled back" if self.cancelled else self.call.tx.fate

    @property
    def order(self) -> tuple[str, int]:
        """The session and the number within it."""
        session, _, number = self.payload.rpartition(":")
        return session, int(number)

    def __str__(self) -> str:
        return f"{self.payload} sent by {self.call}"


@dataclass(slots=True)
class Delivery:
    """A message in the answer of a receive."""

    call: Call
    consumer: str
    owner: str
    batch: int
    id: int
    payload: str
    retries: int
    receives: int
    expires: float | None
    lease: float | None = None  # seconds
    relaxed: bool = False  # committed without waiting for the disk
    fresh: bool = True  # the batch was handed out by this call

    def __str__(self) -> str:
        return f"batch {self.batch} ({self.receives} receives, {self.retries} retries) in {self.call}"


@dataclass(slots=True)
class Outcome:
    """What was said about a message; ok is the engine's answer."""

    call: Call
    what: str
    batch: int
    id: int
    ok: bool | None = None
    whole: bool = False  # said of the batch, not of this message

    @property
    def said(self) -> bool:
        return self.call.tx.fate != "rolled back" and self.ok is not False

    def __str__(self) -> str:
        answer = {True: "yes", False: "no", None: "no answer"}[self.ok]
        return f"{self.what} of {'all, with ' * self.whole}{self.id}: {answer}, {self.call}"


class EngineClock:
    """What pgque.clock() said when, in terms of this process's clock."""

    def __init__(self) -> None:
        self.skew = 0.0
        self.steps: list[tuple[float, float, float]] = [(-inf, -inf, 0.0)]  # change began, ended, offset

    def outlast(self, calls: Sequence[Call]) -> None:
        """Let a clock tick on in the statements that run while it is changed: they may have their plans already."""
        for number, (start, stop, offset) in enumerate(self.steps):
            busy = [call.end for call in calls if call.begin <= stop <= call.end < inf]
            self.steps[number] = (start, max([stop + 0.2, *busy]), offset)

    def spans(self, begin: float, end: float) -> Iterator[tuple[float, float, float]]:
        for number, (start, _, offset) in enumerate(self.steps):
            stop = self.steps[number + 1][1] if number + 1 < len(self.steps) else inf
            if start <= end and stop >= begin:
                yield max(start, begin), min(stop, end), offset

    def highest(self, begin: float, end: float) -> float:
        return max(stop + offset for _, stop, offset in self.spans(begin, end)) + self.skew

    def lowest(self, begin: float, end: float) -> float:
        return min(start + offset for start, _, offset in self.spans(begin, end)) + self.skew


@dataclass
class History:
    """Everything about a run."""

    dsn: str  # for those who are not disturbed
    seed: int
    routes: list[str] = field(default_factory=list)  # other ways to the server
    timeouts: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    producing: threading.Event = field(default_factory=threading.Event)
    running: threading.Event = field(default_factory=threading.Event)
    clock: EngineClock = field(default_factory=EngineClock)
    calls: list[Call] = field(default_factory=list)
    sent: dict[str, Sent] = field(default_factory=dict)
    deliveries: dict[str, list[Delivery]] = field(default_factory=lambda: defaultdict(list))
    outcomes: dict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    requeues: list[tuple[Call, str, int, int]] = field(default_factory=list)  # consumer, dl_id, msg_id
    done: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    since: dict[str, float] = field(default_factory=dict)
    crashes: list[tuple[float, float]] = field(default_factory=list)
    deadlocks: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    trail: list[str] = field(default_factory=list)  # see history.audit
    stats: Counter[str] = field(default_factory=Counter)
    sessions: list[Session] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        """End all sessions; no other one comes up."""
        self.over.set()
        for session in self.sessions:
            session.crash()

    def leave(self, who: str) -> None:
        """End the sessions of one; an error behind a savepoint leaves its transaction open, with its locks."""
        for session in self.sessions:
            if session.name == who:
                session.crash()

    def fault(self, text: str) -> None:
        with self.lock:
            self.faults.append(text)

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.stats[what] += number

    def call(self, who: str, what: str, tx: Tx | None = None, begin: float | None = None) -> Call:
        begin = time.monotonic() if begin is None else begin
        with self.lock:
            call = Call(len(self.calls) + 1, who, what, tx or Tx(begin), begin)
            self.calls.append(call)
        return call

    def ident(self, payload: str, msg_id: int) -> str:
        """A message by its payload, one with a key by its id: its body may be replaced."""
        sent = self.sent.get(payload)
        return payload if sent is None or sent.key is None else f"{sent.queue}#{msg_id}"

    def write(self, file: Path) -> None:
        """Write down everything that clients saw, for whoever has to find out what happened."""
        lines = [(call.begin, str(call)) for call in self.calls]
        lines += [
            (d.call.begin, f"  {d.payload} ({d.id}) to {name}: {d}")
            for name in self.deliveries
            for d in self.deliveries[name]
        ]
        lines += [
            (o.call.begin, f"  {name} said: {o}") for name in self.outcomes for o in self.outcomes[name]
        ]
        lines += [
            (call.begin, f"  {call}: {name}, dead letter {dl_id} of {msg_id}")
            for call, name, dl_id, msg_id in self.requeues
        ]
        lines += [(begin, f"CRASH [{begin % 1000:.3f} {end % 1000:.3f}]") for begin, end in self.crashes]
        lines += [
            (begin, f"CLOCK {offset:+} s [{begin % 1000:.3f} {end % 1000:.3f}]")
            for begin, end, offset in self.clock.steps[1:]
        ]
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join([*(line for _, line in sorted(lines)), *self.trail]))

    def finished(self, consumer: str, batch: Sequence[Delivery]) -> None:
        with self.lock:
            self.done[consumer].update(self.ident(d.payload, d.id) for d in batch)

    @contextmanager
    def survive(self, who: str) -> Iterator[None]:
        """Expected errors end the step; others are faults."""
        try:
            yield
        except EXPECTED as error:
            self.count(type(error).__name__)
            if isinstance(error, psycopg.errors.DeadlockDetected):
                with self.lock:
                    self.deadlocks.append(
                        f"{who}: deadlock: {error.diag.message_detail} {error.diag.context}"
                    )
        except psycopg.Error as error:
            if error.sqlstate in PASSING:
                self.count(str(error.sqlstate))
            else:
                where = error.diag.context or ""
                self.fault(f"{who}: unexpected {error.sqlstate} {error} {where}")


class Session:
    """A connection that is opened again when it broke, and records its calls."""

    def __init__(self, history: History, name: str, rng: random.Random, safe: bool = False) -> None:
        self.history, self.name, self.rng, self.safe = history, name, rng, safe
        self.generation = self.number = 0
        self.tx: Tx | None = None
        self.limited = self.relaxed = False
        self.last: Call | None = None
        self._conn: Connection | None = None
        history.sessions.append(self)

    def ready(self) -> Connection:
        """A connection with no transaction open."""
        h = self.history
        self.tx = None
        if self._conn is None or self._conn.closed:
            self.generation += 1
            self.limited = self.relaxed = False
            route = h.dsn if self.safe or not h.producing.is_set() else self.rng.choice([h.dsn, *h.routes])
            try:
                self._conn = psycopg.connect(
                    route, autocommit=True, application_name=self.name, connect_timeout=5
                )
            except psycopg.OperationalError:
                time.sleep(0.05)
                raise
            if self.rng.random() < 0.3:  # both ways to deliver, one beside the other
                self._conn.execute("set pgque.ordinary = off")
            if h.over.is_set():
                self._conn.close()
                raise psycopg.OperationalError("the run is over")
        elif self._conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self._conn.execute("rollback")
        self.relax(False)
        if not self.safe and (self.limited or (h.timeouts and self.rng.random() < 0.1)):
            self.limited = h.timeouts and h.producing.is_set() and self.rng.random() < 0.7
            spans = [self.rng.randint(5, 50) if self.limited else 0 for _ in range(2)]
            self._conn.execute(f"set statement_timeout = {spans[0]}")
            self._conn.execute(f"set lock_timeout = {spans[1]}")
        return self._conn

    def relax(self, relaxed: bool) -> None:
        """Commit without waiting for the disk from now on, or not any more; what failed may have counted."""
        if relaxed or self.relaxed:
            self.relaxed = True
            self.run(f"set synchronous_commit = {'off' if relaxed else 'on'}")
            self.relaxed = relaxed

    def payload(self) -> str:
        """A text that says which session sent it, and as which of its messages."""
        self.number += 1
        return f"{self.name}.{self.generation}:{self.number}"

    def run(self, query: str, *values: Any) -> list[Row]:
        """A statement that is not recorded."""
        assert self._conn is not None
        cursor = self._conn.execute(query.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def note(self, what: str) -> Call:
        """A call that is about to be made."""
        self.last = self.history.call(self.name, what, self.tx)
        return self.last

    def doubtful(self) -> bool:
        """Whether nobody knows what became of the last call."""
        return self.last is not None and self.last.tx.fate == "unknown"

    def make(self, call: Call, query: str, *values: Any) -> list[Row]:
        """Make the call; outside a transaction its fate is known with the answer."""
        return self.perform(call, lambda: self.run(query, *values))

    def perform(self, call: Call, action: Callable[[], list[Row]]) -> list[Row]:
        try:
            found = action()
        except psycopg.Error as error:
            call.end = time.monotonic()
            self._failed(call.tx, error, self.tx is None)
            raise
        call.end = time.monotonic()
        if self.tx is None:
            call.tx.close("committed")
        return found

    def copy(self, queue: str, texts: list[str]) -> list[Row]:
        assert self._conn is not None
        statement = "copy pgque.sink_bulk (queue, payload) from stdin"
        with self._conn.cursor() as cursor, cursor.copy(statement) as copy:
            for text in texts:
                copy.write_row((queue, text))
        return []

    def say(self, consumer: str, what: str, batch: Sequence[Delivery], *args: Any) -> list[int]:
        """ack, nack or dead of some messages; return the ids for which that was done."""
        outcomes = self.said(consumer, what, batch, False)
        more = {"nack": ", %s * interval '1 ms', 'bad'", "dead": ", %s"}.get(what, "")
        query = f"select msg_id from pgque.{what}(%s, %s::bigint[]{more}) where ok"
        found = self.make(outcomes[0].call, query, batch[0].batch, [d.id for d in batch], *args)
        good = [row[0] for row in found]
        for outcome in outcomes:
            outcome.ok = outcome.id in good
        return good

    def say_all(self, consumer: str, what: str, batch: Sequence[Delivery], *args: Any) -> Any:
        """ack of a whole batch, extend, set_visibility; batch is what is left of it."""
        outcomes = self.said(consumer, what, batch, True)
        more = ", %s * interval '1 ms'" * len(args)
        found = self.make(outcomes[0].call, f"select pgque.{what}(%s{more})", batch[0].batch, *args)[0][0]
        for outcome in outcomes if what == "ack" else ():
            outcome.ok = found == 1
        return found

    def _failed(self, tx: Tx, error: psycopg.Error, committing: bool) -> None:
        sure = not committing or (error.sqlstate or "").startswith(ROLLED_BACK)
        tx.close("rolled back" if sure else "unknown")
        self.tx = None

    def begin(self, level: str = "read committed") -> None:
        tx = Tx(time.monotonic())
        self.run(f"begin isolation level {level}")
        self.tx = tx

    def commit(self) -> None:
        assert self.tx is not None
        tx = self.tx
        try:
            self.run("commit")
        except psycopg.Error as error:
            self._failed(tx, error, True)
            raise
        tx.close("committed")
        self.tx = None

    def rollback(self) -> None:
        if self.tx is not None:
            self.tx.close("rolled back")
            self.tx = None
        self.run("rollback")

    def crash(self) -> None:
        """Go away without a word, with whatever is open."""
        if self.tx is not None:
            self.tx.close("rolled back")
            self.tx = None
        if self._conn is not None:
            self._conn.close()

    def receive(
        self,
        consumer: str,
        what: str,
        query: str,
        *values: Any,
        owner: str | None = None,
        finish: Sequence[Delivery] = (),
        relaxed: bool = False,
        **extra: Any,
    ) -> list[Delivery]:
        """Make a receive, which finishes a batch too, and record what it handed out.

        What becomes of the finished batch is known only if all goes well; then it is certain while the lease lives.
        """
        asked = None
        if finish:
            asked = self.said(consumer, "ack", finish, True)[0].call
            what += f" with ack of {finish[0].batch}"
        call = self.note(what)
        found = self.make(call, query, *values)
        if asked:
            asked.tx.close("unknown" if relaxed else "committed")
            asked.end = call.end
            self.history.finished(consumer, finish)
        of = owner or consumer
        batch = [Delivery(call, consumer, of, *_columns(row), relaxed=relaxed, **extra) for row in found]
        with self.history.lock:
            self.history.deliveries[consumer] += batch
            self.history.stats["batches"] += bool(batch)
        if len({d.batch for d in batch}) > 1:
            self.history.fault(f"{consumer}: several batch ids in {call}")
        return batch

    def said(self, consumer: str, what: str, batch: Sequence[Delivery], whole: bool) -> list[Outcome]:
        """Outcomes that are about to be asked for; their call is made by the caller."""
        text = f"{what}({batch[0].batch}{'' if whole else f', {[d.id for d in batch]}'})"
        call = self.note(text)
        new = [Outcome(call, what, d.batch, d.id, None, whole) for d in batch]
        with self.history.lock:
            self.history.outcomes[consumer] += new
        return new


COLUMNS = (
    "select msg_id, batch_id, payload, retry_count, receive_count, extract(epoch from expires_at)::float8"
)


def _columns(row: Row) -> tuple[int, int, str, int, int, float | None]:
    msg_id, batch_id, payload, retries, receives, expires = row
    return batch_id, msg_id, payload, retries, receives, expires
