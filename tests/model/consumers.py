"""Consumers on their own: several of one queue, each with every message, in order, until it acks."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from model.bench import Bench, Tick, at, messages, refusal, turn_journal
from sql.helpers import Connection, Message, outcome, rotate_if_due, rows, value

MINUTE = 60_000


@dataclass(slots=True)
class Row:
    """An event in the log."""

    id: int
    payload: str
    sent: int
    leaf: int
    order: int = 0  # which commit it came with; 0 is none yet
    owner: int | None = None  # the subscription whose retry it is
    retry: int = 0
    error: str | None = None
    lapses: int = 0  # how often it was received and dropped since its first retry


@dataclass(slots=True)
class Waiting:
    """A message in the retry queue: of one subscription, or delayed for everybody."""

    id: int
    payload: str
    sent: int
    due: int
    owner: int | None
    retry: int = 0
    error: str | None = None
    held: bool = False  # in an open batch
    lapses: int = 0

    def row(self) -> Row:
        """Return it as it is delivered."""
        return Row(self.id, self.payload, self.sent, 0, 0, self.owner, self.retry, self.error, self.lapses)


@dataclass(slots=True)
class Position:
    """Where a consumer stands."""

    sub: int
    tick: Tick
    window: Tick | None = None
    done: int | None = None
    token: int | None = None
    last: int | None = None
    settled: set[int] = field(default_factory=set)
    high: int = 0
    taken: list[Row] | None = None  # the open batch, if it is of the retry queue
    given: bool = False  # until it is given a batch it may be read by offsets

    def untouched(self) -> bool:
        """Whether nothing behind its tick was given out."""
        return self.done is None and self.token is None

    def past(self) -> None:
        """Go to the end of the window."""
        assert self.window is not None
        self.tick, self.window, self.done = self.window, None, None

    def finish(self) -> None:
        """Go behind the open batch."""
        if self.taken is not None:
            self.taken = None
        elif self.last is None:
            self.past()
        else:
            self.done = self.last
        self.token, self.last, self.settled = None, None, set()

    def move(self, tick: Tick) -> None:
        """Go to a tick, dropping what is open."""
        self.high = max(self.high, self.tick.id, self.window.id if self.window else 0)
        self.tick, self.window, self.done = tick, None, None
        self.token, self.last, self.settled, self.taken = None, None, set(), None


@dataclass(slots=True)
class Dead:
    """A dead letter."""

    consumer: str
    id: int
    reason: str
    error: str
    payload: str
    sent: int
    time: int


@dataclass(slots=True)
class Writer:
    """A transaction that sends and is still open."""

    leaf: int | None  # of its snapshot, if that is its own
    rows: list[Row] = field(default_factory=list)
    delayed: list[Waiting] = field(default_factory=list)
    leaves: set[int] = field(default_factory=set)
    undone: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Queue:
    """All that the model knows. Nothing in it comes from the server but ids of batches."""

    max_retries: int
    max_window: int = 0
    last_id: int = 0
    durable_id: int = 0  # up to here a commit has made the server remember that ids were given
    commits: int = 0
    leaf: int = 0
    switched: int = -1
    dirty: set[int] = field(
        default_factory=set
    )  # leaves into which anything was written, if only rolled back
    forced: bool = False
    subs: int = 0
    log: list[Row] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)
    positions: dict[str, Position] = field(default_factory=dict)
    batches: dict[int, tuple[str, list[int]]] = field(default_factory=dict)  # every id of a batch ever
    closed_settled: dict[int, set[int]] = field(default_factory=dict)
    writers: dict[int, Writer] = field(default_factory=dict)
    turned: bool = False  # what was said about finished batches may be forgotten

    def between(self, position: Position) -> list[Row]:
        """List what is in the open window behind what is done."""
        assert position.window is not None
        found = [
            r
            for r in self.log
            if position.tick.upto < r.order <= position.window.upto
            and r.owner in (None, position.sub)
            and (position.done is None or r.id > position.done)
        ]
        if position.tick.id < position.high:
            newest = {r.id: r for r in sorted(found, key=lambda r: r.order)}
            found = list(newest.values())
        found.sort(key=lambda r: r.id)
        assert len({r.id for r in found}) == len(found), "the model is wrong"
        return found

    def batch(self, position: Position) -> list[Row]:
        """List the messages of the open batch, settled ones too."""
        if position.taken is not None:
            return position.taken
        return [r for r in self.between(position) if position.last is None or r.id <= position.last]

    def open_window(self, position: Position, count: int) -> None:
        """Take the next tick, and those behind it while one batch may hold what was numbered."""
        ahead = [t for t in self.ticks if t.id > position.tick.id][:100]
        for tick in ahead:
            if position.window is not None and tick.seq > position.tick.seq + count:
                break
            position.window = tick

    def receive(self, consumer: str, count: int, now: int) -> list[Row]:
        """Say which messages come; a new batch has the id -1 until the server's is known."""
        position = self.positions[consumer]
        if position.token is not None:
            left = [r for r in self.batch(position) if r.id not in position.settled]
            if left:
                return left
            self.close(consumer)
        if self.take_due(position, count, now):
            assert position.taken is not None
            return position.taken
        while True:
            if position.window is None:
                self.open_window(position, count)
            if position.window is None:
                return []
            found = self.between(position)
            if found:
                position.last = found[count].id - 1 if len(found) > count else None
                position.token, position.given = -1, True
                return found[:count]
            position.past()

    def take_due(self, position: Position, count: int, now: int) -> bool:
        """Open a batch of the messages that are due in the retry queue, if there are some."""
        due = [w for w in self.waiting if w.owner == position.sub and w.due <= now and not w.held]
        due = sorted(due, key=lambda w: (w.due, w.id))[:count]
        if due:
            for waiting in due:
                waiting.held = True
            position.taken = sorted((w.row() for w in due), key=lambda r: r.id)
            position.token, position.given = -1, True
        return bool(due)

    def next_batch(self, consumer: str, now: int) -> None:
        """Open a batch if none is open: a window, its rest, or a part of it, which may be empty."""
        position = self.positions[consumer]
        most = self.max_window or sys.maxsize
        if position.token is not None or self.take_due(position, most, now):
            return
        if position.window is None:
            self.open_window(position, min(500, most))
        if position.window is not None:
            found = self.between(position)
            position.last = found[most - 1].id if len(found) > most else None
            position.token, position.given = -1, True

    def close(self, consumer: str) -> None:
        """Finish the open batch."""
        position = self.positions[consumer]
        assert position.token is not None
        self.closed_settled[position.token] = position.settled
        self.waiting = [w for w in self.waiting if not (w.owner == position.sub and w.held)]
        position.finish()

    def drop(self, consumer: str, now: int) -> None:
        """Remember what was said about a batch that is dropped."""
        position = self.positions[consumer]
        if position.token is not None:
            self.closed_settled[position.token] = position.settled
        for waiting in self.waiting:
            if waiting.owner == position.sub and waiting.held:
                waiting.held, waiting.due = False, now
                waiting.lapses += 1

    def settled(self, consumer: str, msg_id: int) -> None:
        """A message of the open batch gets its outcome."""
        position = self.positions[consumer]
        position.settled.add(msg_id)
        self.waiting = [
            w for w in self.waiting if not (w.owner == position.sub and w.held and w.id == msg_id)
        ]

    def bury(self, consumer: str, row: Row, reason: str | None, otherwise: str, now: int) -> None:
        """Make a dead letter, unless it is one."""
        if not any(d.consumer == consumer and d.id == row.id for d in self.dead):
            why = reason or otherwise
            self.dead.append(
                Dead(consumer, row.id, why, reason or row.error or why, row.payload, row.sent, now)
            )

    def wait(self, consumer: str, row: Row, due: int, error: str | None) -> None:
        """Put a message into the retry queue, in place of an older self."""
        sub = self.positions[consumer].sub
        self.waiting = [w for w in self.waiting if (w.owner, w.id) != (sub, row.id)]
        self.waiting.append(
            Waiting(row.id, row.payload, row.sent, due, sub, row.retry + 1, error, lapses=row.lapses)
        )

    def slowest(self) -> Tick:
        """Find the tick behind which nobody needs anything."""
        return min((p.tick for p in self.positions.values()), key=lambda t: t.id, default=self.ticks[-1])


CONSUMERS = ("ann", "bob", "eve")
ENDS = ("commit", "rollback", "killed")
consumers = st.sampled_from(CONSUMERS)
counts = st.sampled_from([1, 2, 3, 7, 100])
picks = st.integers(0, 63)  # which of what there is: modulo


class Consumers(RuleBasedStateMachine):
    """Calls of producers, the ticker, consumers and an operator, in any order."""

    bench: ClassVar[Bench]

    def __init__(self) -> None:
        super().__init__()
        self.bench.number += 1
        self.queue = f"q{self.bench.number}"
        self.sessions: dict[int, Connection] = {}
        self.never: set[int] = set()  # ids of batches whose transaction did not commit
        self.m = Queue(0)

    @property
    def now(self) -> int:
        return self.bench.now

    @property
    def conn(self) -> Connection:
        return self.bench.conn

    @initialize(
        max_retries=st.sampled_from([0, 1, 2, 5]),
        max_window=st.sampled_from([0, 1, 4]),
        subscribed=st.integers(1, 3),
        ordinary=st.booleans(),
    )
    def create(self, max_retries: int, max_window: int, subscribed: int, ordinary: bool) -> None:
        self.bench.deliver(ordinary=ordinary)
        value(
            self.conn,
            "select pgque.create_queue(%s, jsonb_build_object('max_retries', %s::int, 'max_window', %s::int,"
            " 'rotation_period', '1 microsecond'))",
            self.queue,
            max_retries,
            max_window,
        )
        self.m.max_retries, self.m.max_window = max_retries, max_window
        self.m.ticks = [Tick(1, self.now, 0, 0, 0)]
        for name in CONSUMERS[:subscribed]:
            self._subscribe(name, "latest", 0)
        self.bench.move(0.1)
        self.send(9, "ticked")

    # -- producers --------------------------------------------------------------------------------------------

    def _sent(self, ids: list[int], payloads: list[str], leaf: int) -> list[Row]:
        expected = list(range(self.m.last_id + 1, self.m.last_id + 1 + len(payloads)))
        assert ids == expected, "ids of messages are not the next ones"
        self.m.last_id += len(payloads)
        self.m.dirty.add(leaf)
        return [Row(i, p, self.now, leaf) for i, p in zip(ids, payloads, strict=True)]

    def _committed(self, sent: list[Row], delayed: list[Waiting] | None = None) -> None:
        self.m.commits += 1
        for row in sent:
            row.order = self.m.commits
        self.m.log += sent
        self.m.waiting += delayed or []
        if sent or delayed:
            self.m.durable_id = self.m.last_id

    def _send(self, conn: Connection, count: int) -> tuple[list[int], list[str]]:
        payloads = [f"{self.m.last_id + n}" for n in range(1, count + 1)]
        if count == 1:
            return [value(conn, "select pgque.send(%s, %s::text)", self.queue, payloads[0])], payloads
        return value(
            conn, "select pgque.send_batch(%s, 'default', %s::text[])", self.queue, payloads
        ), payloads

    def _send_later(self, conn: Connection, delay: int) -> Waiting:
        payload = f"{self.m.last_id + 1} later"
        found = value(
            conn,
            "select pgque.send(%s, 'default', %s::text, delay => %s)",
            self.queue,
            payload,
            timedelta(seconds=delay),
        )
        self.m.last_id += 1
        assert found == self.m.last_id
        return Waiting(found, payload, self.now, self.now + delay * 1000, None)

    @rule(
        count=st.sampled_from([1, 1, 2, 3, 9]),
        how=st.sampled_from(["ticked", "ticked", "commit", "commit", "later", "rollback", "killed"]),
    )
    def send(self, count: int, how: str) -> None:
        if how in ("ticked", "commit"):
            self._committed(self._sent(*self._send(self.conn, count), self.m.leaf))
            if how == "ticked":
                self._tick()
        elif how == "later":
            self._committed([], [self._send_later(self.conn, count * 20)])
        else:
            session = self.bench.connect(autocommit=False)
            self._sent(*self._send(session, count), self.m.leaf)
            self.bench.end(session, how)

    @rule(
        pick=picks,
        what=st.sampled_from(
            ["begin", "begin old", "send", "undone", "later", "commit", "commit", "rollback", "killed"]
        ),
        count=st.integers(1, 3),
    )
    def transact(self, pick: int, what: str, count: int) -> None:
        """Transactions that stay open for long, with and without a snapshot of their own."""
        if what.startswith("begin") or not self.sessions:
            if len(self.sessions) < 3:
                self._begin(what == "begin old")
                self._send_in_transaction(-1, count, "stay")
        elif what in ENDS:
            self._end(pick, what)
        else:
            self._send_in_transaction(pick, count, what)

    def _begin(self, old_snapshot: bool) -> None:
        number = max(self.m.writers, default=0) + 1
        session = self.sessions[number] = self.bench.connect(autocommit=False)
        if old_snapshot:
            session.execute("set transaction isolation level repeatable read")
            session.execute("select 1")
        self.m.writers[number] = Writer(self.m.leaf if old_snapshot else None)

    def _send_in_transaction(self, pick: int, count: int, how: str) -> None:
        number = self._pick(list(self.sessions), pick)
        session, writer = self.sessions[number], self.m.writers[number]
        leaf = self.m.leaf if writer.leaf is None else writer.leaf
        if how == "later":
            writer.delayed.append(self._send_later(session, 30))
            return
        if how == "undone":
            session.execute("savepoint s")
        sent = self._sent(*self._send(session, count), leaf)
        if how == "undone":
            session.execute("rollback to savepoint s")
            writer.undone.add(leaf)
        else:
            writer.rows += sent
            writer.leaves.add(leaf)

    def _end(self, pick: int, end: str) -> None:
        number = self._pick(list(self.sessions), pick)
        writer = self.m.writers.pop(number)
        self.bench.end(self.sessions.pop(number), end)
        if end == "commit":
            self.bench.seen["late commits"] += bool(writer.rows and writer.rows[0].id <= self.m.ticks[-1].seq)
            self._committed(writer.rows, writer.delayed)

    # -- the ticker -------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0, 0.5, 11, 31, 61, 250]), forced=st.sampled_from([False, False, True]))
    def time_passes(self, seconds: float, forced: bool) -> None:
        """The loop does its work after a while."""
        self.bench.move(seconds)
        self._pump()
        if forced:
            self._force_next_tick()
        self._tick()

    def _tick(self) -> None:
        last = self.m.ticks[-1]
        wanted = (
            self.m.forced or self.now - last.time >= MINUTE or any(r.order > last.upto for r in self.m.log)
        )
        answer = value(self.conn, "select pgque.ticker(%s)", self.queue)
        assert answer == (last.id + 1 if wanted else None)
        if wanted:
            self.m.forced = False
            self.m.ticks.append(Tick(last.id + 1, self.now, self.m.last_id, self.m.commits, self.m.leaf))

    def _force_next_tick(self) -> None:
        assert value(self.conn, "select pgque.force_next_tick(%s)", self.queue) == self.m.ticks[-1].id
        self.m.forced = True

    def _pump(self) -> None:
        given = {p.sub for p in self.m.positions.values() if p.given}
        due = [w for w in self.m.waiting if w.due <= self.now and w.owner not in given]
        assert value(self.conn, "select pgque.maint_retry_events()") >= len(due)
        self.m.waiting = [w for w in self.m.waiting if w not in due]
        if due:
            self.m.dirty.add(self.m.leaf)
            self.m.last_id += len(due)  # which show the loop that something came, and count in max_depth
        self._committed(
            [Row(w.id, w.payload, w.sent, self.m.leaf, 0, w.owner, w.retry, w.error) for w in due]
        )

    def _may_rotate(self) -> bool | None:
        """Whether a rotation is to be done; None if that hangs on what the model does not know."""
        following = (self.m.leaf + 1) % 3
        slowest = self.m.slowest()
        if self.now == self.m.switched or any(following in w.leaves for w in self.m.writers.values()):
            return False
        if any(r.leaf == following and r.order > slowest.upto for r in self.m.log):
            return False
        if any(t.leaf == following and t.id >= slowest.id for t in self.m.ticks):
            return False
        if any(following in w.undone for w in self.m.writers.values()):
            return None
        if not self.m.dirty:
            return False
        return True if self.m.log else None  # what was rolled back may be vacuumed away

    def _rotate(self) -> None:
        expected = self._may_rotate()
        answer = rotate_if_due(self.conn, self.queue, patient=expected is True)
        assert expected is None or answer == int(expected)
        if answer == 1:
            self.m.switched = self.now
            self.bench.seen["rotations"] += 1
            self.m.leaf = (self.m.leaf + 1) % 3
            self.m.log = [r for r in self.m.log if r.leaf != self.m.leaf]
            self.m.ticks = [t for t in self.m.ticks if t.leaf != self.m.leaf]
            self.m.dirty.discard(self.m.leaf)

    def _compact(self, pick: int) -> None:
        """Turn the journal, or bring it to an end."""
        if pick % 2 and turn_journal(self.conn):
            self.m.turned = True
            self.bench.seen["journal turns"] += 1
        elif pick % 2 == 0:
            value(self.conn, "select pgque.maint_tables()")

    # -- consumers --------------------------------------------------------------------------------------------

    def _subscribe(self, consumer: str, where: str, back: int) -> None:
        ticks = self.m.ticks
        if where == "tick":
            tick = next((t for t in ticks if t.id == ticks[-1].id - back), None)
            start = str(max(ticks[-1].id - back, 0))
        elif where == "time":
            moment = self.now - back * 7000
            tick = max((t for t in ticks if t.time <= moment), key=lambda t: (t.time, t.id), default=None)
            # If there is none before it, the nearest: the first, and of several at that time the last.
            tick = tick or min(ticks, key=lambda t: (t.time, -t.id))
            start = at(moment).isoformat()
        else:
            tick = ticks[-1] if where == "latest" else ticks[0]
            start = where
        call = "select pgque.subscribe(%s, %s, %s)"
        if consumer in self.m.positions:
            assert value(self.conn, call, self.queue, consumer, start) == 0
        elif tick is None:
            assert refusal(lambda: value(self.conn, call, self.queue, consumer, start)) == "PQ005"
        else:
            assert value(self.conn, call, self.queue, consumer, start) == 1
            self.m.subs += 1
            self.m.positions[consumer] = Position(self.m.subs, tick)

    def _unsubscribe(self, consumer: str) -> None:
        expected = int(consumer in self.m.positions)
        assert value(self.conn, "select pgque.unsubscribe(%s, %s)", self.queue, consumer) == expected
        if expected:
            self.m.drop(consumer, self.now)
            gone = self.m.positions.pop(consumer).sub
            for token in [token for token, (name, _) in self.m.batches.items() if name == consumer]:
                self.m.closed_settled.pop(token, None)  # its batches are of no consumer
            self.m.waiting = [w for w in self.m.waiting if w.owner != gone]
            # The journal has no other consumer, so it may be emptied.
            self.m.turned = self.m.turned or not self.m.positions

    def _seek(self, consumer: str, back: int, how: str) -> None:
        goal = max(self.m.ticks[-1].id - back, 0)
        tick = next((t for t in self.m.ticks if t.id == goal), None)
        position = self.m.positions.get(consumer)
        if how == "register":
            call = partial(
                value, self.conn, "select pgque.register_consumer_at(%s, %s, %s)", self.queue, consumer, goal
            )
            if tick is None:
                assert refusal(call) == "PQ005"
            elif position is None:
                assert call() == 1
                self.m.subs += 1
                self.m.positions[consumer] = Position(self.m.subs, tick)
            else:
                assert call() == 0
                self.m.drop(consumer, self.now)
                position.move(tick)
            return
        call = partial(
            value, self.conn, "select pgque.seek(%s, %s, %s, %s)", self.queue, consumer, goal, how == "force"
        )
        if position is None:
            assert refusal(call) == "PQ011"
        elif goal <= position.tick.id if how == "seek" else goal == position.tick.id and position.untouched():
            assert call() == position.tick.id
        elif tick is None:
            assert refusal(call) == "PQ015"
        else:
            assert call() == goal
            self.m.drop(consumer, self.now)
            position.move(tick)

    def _receive(self, conn: Connection, consumer: str, count: int, finish: int | None = None) -> int | None:
        """Receive, finishing a batch in the same call, compare with the model, and return the id of the batch."""
        holder = None if finish is None else self._holder(finish)
        if holder is not None:
            self.bench.seen["acks with a receive"] += 1
            self.m.close(holder)
        before = self.m.positions[consumer].token
        expected = self.m.receive(consumer, count, self.now)
        position = self.m.positions[consumer]
        self.bench.seen["batches again"] += before is not None and before == position.token
        call = "select * from pgque.receive(%s, %s, %s, ack_batch => %s)"
        got = messages(rows(conn, call, self.queue, consumer, count, finish))
        tokens = {m.batch_id for m in got}
        assert len(tokens) == (1 if expected else 0), (
            f"{len(tokens)} batches, {len(expected)} messages expected"
        )
        if position.token == -1:
            (position.token,) = tokens
            self.bench.seen["batches"] += 1
            self.bench.seen["messages"] += len(got)
            self.bench.seen["retries"] += sum(r.retry > 0 for r in expected)
            self.bench.seen["slices"] += position.last is not None
            assert position.token not in self.m.batches and position.token not in self.never
            self.m.batches[position.token] = (consumer, [r.id for r in expected])
        elif expected:
            assert tokens == {before}
        assert [self._seen(m) for m in got] == [
            (r.id, r.payload, at(r.sent), r.retry, r.retry + 1 + r.lapses, r.error, self.queue)
            for r in expected
        ]
        return position.token

    @staticmethod
    def _seen(m: Message) -> tuple[Any, ...]:
        return (m.msg_id, m.payload, m.created_at, m.retry_count, m.receive_count, m.last_error, m.queue)

    @rule(consumer=consumers, count=counts)
    def receive(self, consumer: str, count: int) -> None:
        if consumer in self.m.positions:
            self._receive(self.conn, consumer, count)
        else:
            call = "select * from pgque.receive(%s, %s, %s)"
            assert refusal(lambda: rows(self.conn, call, self.queue, consumer, count)) == "PQ011"

    @rule(consumer=consumers, finish=st.booleans())
    def next_batch(self, consumer: str, finish: bool) -> None:
        """Open a batch by PgQ's name."""
        if consumer not in self.m.positions:
            return
        token = value(self.conn, "select pgque.next_batch(%s, %s)", self.queue, consumer)
        self.m.next_batch(consumer, self.now)
        position = self.m.positions[consumer]
        assert (token is None) == (position.token is None)
        if token is None:
            return
        members = [r.id for r in self.m.batch(position)]
        if position.token == -1:
            position.token = token
            assert token not in self.m.batches and token not in self.never
            self.m.batches[token] = (consumer, members)
            self.bench.seen["batches of next_batch"] += 1
            self.bench.seen["parts"] += position.last is not None
        assert token == position.token
        found = [row[0] for row in rows(self.conn, "select ev_id from pgque.get_batch_events(%s)", token)]
        assert found == [i for i in members if position.taken is None or i not in position.settled]
        if finish:
            self._ack(self.conn, token)

    @rule(consumer=consumers, count=st.sampled_from([1, 2, 3, 7]), batches=st.integers(1, 3))
    def consume(self, consumer: str, count: int, batches: int) -> None:
        """Receive and ack, some batches."""
        for _ in range(batches if consumer in self.m.positions else 0):
            token = self._receive(self.conn, consumer, count)
            if token is None:
                break
            self._ack(self.conn, token)

    def _holder(self, token: int) -> str | None:
        """Name the consumer that has this batch open."""
        return next((c for c, p in self.m.positions.items() if p.token == token), None)

    def _ack(self, conn: Connection, token: int) -> None:
        holder = self._holder(token)
        assert value(conn, "select pgque.ack(%s)", token) == (0 if holder is None else 1)
        if holder is not None:
            self.bench.seen["acks"] += 1
            self.m.close(holder)

    def _settle(
        self, conn: Connection, token: int, ids: list[int], how: str, after: int | None, reason: str | None
    ) -> None:
        """Say something about messages of a batch; the answers are those of the model."""
        holder = self._holder(token)
        members = {r.id: r for r in self.m.batch(self.m.positions[holder])} if holder else {}
        settled = self.m.positions[holder].settled if holder else self.m.closed_settled.get(token, set())
        if how == "ack":
            answers = outcome(conn, "ack", token, ids)
        elif how == "dead":
            answers = outcome(conn, "dead", token, ids, reason)
        else:
            wait = None if after is None else timedelta(seconds=after)
            answers = outcome(conn, "nack", token, ids, wait, reason)
        assert list(answers) == ids
        for i in ids:
            if holder and i in members and i not in settled:
                assert answers[i] is None
                self.m.settled(holder, i)
                self._failed(holder, members[i], how, after, reason)
            elif holder is None and i in settled:
                assert answers[i] == "settled already" or (self.m.turned and answers[i] == "batch not open")
            elif i in settled:
                assert answers[i] == "settled already"
            else:
                assert answers[i] == ("not in this batch" if holder else "batch not open")

    def _failed(self, holder: str, row: Row, how: str, after: int | None, reason: str | None) -> None:
        if how == "dead":
            self.m.bury(holder, row, reason, "dead", self.now)
        elif how == "nack" and row.retry >= self.m.max_retries:
            self.m.bury(holder, row, reason, "retries used up", self.now)
        elif how == "nack":
            self.m.wait(holder, row, self.now + (60 if after is None else after) * 1000, reason)

    @staticmethod
    def _pick(of: list[Any], pick: int) -> Any:
        return of[pick % len(of)]

    def _token(self, pick: int) -> int | None:
        """Choose a batch: mostly an open one, else any that ever was, or never became one."""
        now_open = [p.token for p in self.m.positions.values() if p.token is not None]
        if pick % 4 and now_open:
            return self._pick(now_open, pick)  # type: ignore[no-any-return]
        ever = [*self.m.batches, *sorted(self.never)]
        return ever[-1 - (pick // 4) % len(ever)] if ever else None

    @rule(pick=picks, count=counts, next_one=st.booleans())
    def ack(self, pick: int, count: int, next_one: bool) -> None:
        token = self._token(pick)
        if token is None:
            return
        holder = self._holder(token)
        self._ack(self.conn, token)
        if next_one and holder is not None:
            self._receive(self.conn, holder, count)

    @rule(consumer=consumers, pick=picks, count=counts)
    def ack_and_receive(self, consumer: str, pick: int, count: int) -> None:
        """In one call: mostly the consumer's own batch, else one of another, or one that is not open any more."""
        if consumer in self.m.positions:
            own = self.m.positions[consumer].token
            self._receive(
                self.conn, consumer, count, own if own is not None and pick % 3 else self._token(pick)
            )

    @rule(
        pick=picks,
        first=picks,
        count=st.integers(1, 4),
        stranger=st.booleans(),
        how=st.sampled_from(["ack", "nack", "nack", "nack", "dead"]),
        after=st.sampled_from([0, 0, 10, 100, None]),
        reason=st.sampled_from([None, "bad"]),
    )
    def settle(
        self,
        pick: int,
        first: int,
        count: int,
        stranger: bool,
        how: str,
        after: int | None,
        reason: str | None,
    ) -> None:
        token = self._token(pick)
        if token is None:
            return
        members = self.m.batches.get(token, ("", []))[1]
        ids = [members[(first + n) % len(members)] for n in range(min(count, len(members)))]
        if stranger:
            # One that is in another batch, or in none.
            ids += [
                i for i in (members[-1] + 1 if members else 1, self.m.last_id + 1000) if i not in members
            ][:1]
        self._settle(self.conn, token, ids, how, after, reason)

    @rule(pick=picks, first=picks, how=st.sampled_from(["nack", "retry"]))
    def fail_one(self, pick: int, first: int, how: str) -> None:
        """The calls for one message raise where the others answer."""
        token = self._token(pick)
        if token is None:
            return
        holder = self._holder(token)
        members = {r.id: r for r in self.m.batch(self.m.positions[holder])} if holder else {}
        known = self.m.batches.get(token, ("", []))[1]
        msg_id = self._pick([*known, self.m.last_id + 1000], first)
        settled = self.m.positions[holder].settled if holder else self.m.closed_settled.get(token, set())
        if how == "nack":
            query = (
                "select pgque.nack(%s, row(%s::bigint, null, null, null, null, null, null, null, null, null)::pgque.message,"
                " '5 s', 'one')"
            )
        else:
            query = "select pgque.event_retry(%s, %s, 5)"
        call = partial(value, self.conn, query, token, msg_id)
        if holder is None and msg_id in settled:
            try:
                assert call() == (1 if how == "nack" else 0)
            except Exception as error:
                assert self.m.turned and getattr(error, "sqlstate", "") == "PQ012", error
        elif holder is None:
            assert refusal(call) == "PQ012"
        elif msg_id not in members:
            assert refusal(call) == "PQ007"
        elif msg_id in settled:
            assert call() == (1 if how == "nack" else 0)
        else:
            assert call() == 1
            self.m.settled(holder, msg_id)
            if how == "nack":
                self._failed(holder, members[msg_id], "nack", 5, "one")
            else:
                self.m.wait(holder, members[msg_id], self.now + 5000, None)

    @rule(
        consumer=consumers, count=counts, fail=st.integers(0, 2), ack=st.booleans(), end=st.sampled_from(ENDS)
    )
    def work(self, consumer: str, count: int, fail: int, ack: bool, end: str) -> None:
        """Receive, fail some and ack in one transaction; a crash in the middle takes all of it back."""
        if consumer not in self.m.positions:
            return
        before = copy.deepcopy(self.m)
        session = self.bench.connect(autocommit=False)
        token = self._receive(session, consumer, count)
        if token is not None:
            if fail:
                self._settle(session, token, self.m.batches[token][1][:fail], "nack", 0, "in a transaction")
            if ack:
                self._ack(session, token)
        self.bench.end(session, end)
        self.bench.seen[f"work: {end}"] += 1
        if end != "commit":
            self.never |= set(self.m.batches) - set(before.batches)
            self.m = before

    # -- dead letters -----------------------------------------------------------------------------------------

    def _letters(self) -> list[tuple[Any, ...]]:
        return rows(
            self.conn,
            "select d.dl_id, d.consumer_name, d.ev_id, d.dl_reason, d.ev_data, d.ev_time, d.dl_time"
            " from pgque.dlq_inspect(%s, 100000) as d order by d.consumer_name, d.ev_id",
            self.queue,
        )

    def _dead_letters(self, pick: int, how: str) -> None:
        found = self._letters()
        self.m.dead.sort(key=lambda d: (d.consumer, d.id))
        assert [f[1:] for f in found] == [
            (d.consumer, d.id, d.reason, d.payload, at(d.sent), at(d.time)) for d in self.m.dead
        ]
        if how == "purge":
            old = [d for d in self.m.dead if d.time < self.now - 200_000]
            assert value(self.conn, "select pgque.dlq_purge(%s, '200 s')", self.queue) == len(old)
            self.m.dead = [d for d in self.m.dead if d not in old]
        elif how == "requeue all":
            there = [d for d in self.m.dead if d.consumer in self.m.positions]
            assert value(self.conn, "select pgque.dlq_requeue_all(%s)", self.queue) == len(there)
            for dead in there:
                self._requeue(dead)
        elif found and how in ("requeue", "replay"):
            dead = self._pick(self.m.dead, pick)
            dl_id = self._pick(found, pick)[0]
            call = partial(value, self.conn, f"select pgque.dlq_{how}(%s)", dl_id)
            if how == "replay":
                self._committed(self._sent([call()], [dead.payload], self.m.leaf))
                self.m.dead.remove(dead)
            elif dead.consumer not in self.m.positions:
                assert refusal(call) == "PQ011"
                return
            else:
                assert call() == dead.id
                self._requeue(dead)
            assert refusal(call) == "PQ008"

    def _requeue(self, dead: Dead) -> None:
        self.bench.seen["requeued"] += 1
        self.m.dead.remove(dead)
        sub = self.m.positions[dead.consumer].sub
        waits = next((w for w in self.m.waiting if (w.owner, w.id) == (sub, dead.id)), None)
        if waits is None:
            self.m.waiting.append(Waiting(dead.id, dead.payload, dead.sent, self.now, sub, 0, dead.error))
        elif waits.held:
            waits.retry = 0
            held = next(r for r in self.m.positions[dead.consumer].taken or [] if r.id == dead.id)
            held.retry = 0
        else:
            waits.due, waits.retry = self.now, 0

    @rule(
        what=st.sampled_from(
            [
                "rotate",
                "rotate",
                "rotate",
                "compact",
                "subscribe",
                "subscribe",
                "unsubscribe",
                "seek",
                "seek",
                "look",
                "requeue",
                "requeue",
                "requeue all",
                "replay",
                "purge",
                "crash",
            ]
        ),
        consumer=consumers,
        pick=picks,
    )
    def operate(self, what: str, consumer: str, pick: int) -> None:
        if what == "rotate":
            for _ in range(1 + pick % 3):
                self.bench.move(0.01)
                self._rotate()
        elif what == "compact":
            self._compact(pick)
        elif what == "subscribe":
            where = ("latest", "latest", "earliest", "tick", "time")[pick % 5]
            self._subscribe(consumer, where, pick // 5)
        elif what == "unsubscribe" and pick % 3 == 0:
            self._unsubscribe(consumer)
        elif what == "seek":
            self._seek(consumer, pick // 3 % 7, ("seek", "force", "register")[pick % 3])
        elif what == "crash" and self.bench.server is not None:
            self._crash()
        elif what in ("look", "requeue", "requeue all", "replay", "purge"):
            self._dead_letters(pick, what)

    # -- the server dies --------------------------------------------------------------------------------------

    def _crash(self) -> None:
        self.bench.seen["crashes"] += 1
        self.bench.restart()
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()
        self.m.writers.clear()
        # Ids may be skipped, and those of transactions that did not commit may be given again.
        found, payloads = self._send(self.conn, 1)
        assert self.m.durable_id < found[0] <= self.m.last_id + 33
        self.m.last_id = found[0] - 1
        self._committed(self._sent(found, payloads, self.m.leaf))

    # -- the end ----------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and self.m.ticks:
                self._to_the_end()
        finally:
            self.bench.drop(self.queue)

    def _to_the_end(self) -> None:
        """What is committed comes to everybody, and nothing is left behind."""
        if self.bench.server is not None:
            self._crash()
        while self.sessions:
            self._end(0, "commit")
        self.time_passes(500, True)
        for consumer in list(self.m.positions):
            while (token := self._receive(self.conn, consumer, 50)) is not None:
                self._ack(self.conn, token)
        self._dead_letters(0, "look")
        count = "select count(*) from pgque.retry_queue r join pgque.queue q on q.queue_id = r.ev_queue where q.queue_name = %s"
        assert value(self.conn, count, self.queue) == len(self.m.waiting) == 0
