"""Workers that share a consumer: leases, redelivery, poison, keys, delay, ttl, limits."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal, getcontext
from math import ceil
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from model.bench import Bench, Tick, at, messages, turn_journal
from sql.helpers import Connection, ack, outcome, release, rotate_if_due, rows, value

getcontext().prec = 40
MINUTE = 60_000


@dataclass(slots=True)
class Message:
    """A message, wherever it is."""

    id: int
    payload: str
    sent: int
    key: str | None = None
    expires: int | None = None


@dataclass(slots=True)
class Row:
    """A row of the log: a message, or (no message) something that was said about one with a key."""

    id: int
    leaf: int
    order: int
    key: str | None
    message: Message | None
    handed: bool = False
    purged: bool = False


@dataclass(slots=True)
class Waiting:
    """A message in the retry queue: of the pool, or delayed for everybody."""

    message: Message
    due: int
    delayed: bool = False
    receives: int = 0
    retry: int = 0
    token: int | None = None
    worker: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Lease:
    """What one hand-out took from the log and has no outcome yet."""

    token: int
    worker: str
    until: int
    tick: Tick
    held: dict[int, Message]


@dataclass(slots=True)
class Batch:
    """Every hand-out ever."""

    members: list[int]
    at: int
    said: set[int] = field(default_factory=set)  # settled one by one by its holder
    forgotten: bool = False  # compaction may have forgotten what it was


def piece(receives: int, attempts: int, asked: int) -> int:
    """How many messages that lapsed go out together."""
    n = min(attempts, 5)
    if n - receives <= 1:
        return 1
    share = Decimal(asked) ** (Decimal(n - receives - 1) / Decimal(n - 2))
    return ceil(share.quantize(Decimal("1e-12")))


VISIBILITY = 30_000  # the queue's setting
WORKERS = ("w1", "w2", "w3")
KEYS = ("k1", "k2")
workers = st.sampled_from(WORKERS)
picks = st.integers(0, 63)
ttls = st.sampled_from([None, None, 0, 20, 200])


class Workers(RuleBasedStateMachine):
    """Calls of producers, workers and an operator, in any order."""

    bench: ClassVar[Bench]

    def __init__(self) -> None:
        super().__init__()
        self.bench.number += 1
        self.queue = f"q{self.bench.number}"
        self.session: Connection | None = None  # a transaction that sends and stays open
        self.unsent: list[Row] = []
        self.last_id = 0
        self.commits = 0
        self.leaf = 0
        self.switched = -1
        self.log: list[Row] = []
        self.ticks: list[Tick] = []
        self.waiting: list[Waiting] = []
        self.leases: dict[int, Lease] = {}
        self.batches: dict[int, Batch] = {}
        self.dead: dict[int, tuple[Waiting, str]] = {}
        self.archived: list[int] = []
        self.counts = {"expired": 0, "dropped": 0, "cancelled": 0}
        self.cancelled: dict[int, Row | None] = {}  # with the row that ended each in the log
        self.window: Tick | None = None
        self.done: int | None = None
        self.paid = 0  # microseconds
        self.seals: list[Row] = []
        self.from_tick = self.tick_at = Tick(0, 0, 0, 0, 0)
        self.turned = False

    @property
    def now(self) -> int:
        return self.bench.now

    @property
    def conn(self) -> Connection:
        return self.bench.conn

    @initialize(
        attempts=st.sampled_from([1, 2, 3, 5, 1000]),
        max_retries=st.sampled_from([0, 2, 1000]),
        rate=st.sampled_from([0, 0, 3]),
        policy=st.sampled_from(["dead_letter", "dead_letter", "drop"]),
        message_ttl=st.sampled_from([0, 0, 300]),
        compacts=st.booleans(),
        ordinary=st.booleans(),
    )
    def create(
        self,
        attempts: int,
        max_retries: int,
        rate: int,
        policy: str,
        message_ttl: int,
        compacts: bool,
        ordinary: bool,
    ) -> None:
        self.bench.deliver(ordinary=ordinary)
        self.attempts, self.max_retries, self.rate, self.compacts = attempts, max_retries, rate, compacts
        self.policy, self.message_ttl = policy, message_ttl
        value(
            self.conn,
            "select pgque.create_queue(%s, jsonb_build_object('max_receive_attempts', %s::int, 'max_retries', %s::int,"
            " 'throughput_limit', %s::int, 'drop_policy', %s::text, 'message_ttl', %s::text, 'rotation_period', '1 microsecond'))",
            self.queue,
            attempts,
            max_retries,
            rate,
            policy,
            f"{message_ttl} seconds",
        )
        assert value(self.conn, "select pgque.subscribe(%s, 'c')", self.queue) == 1
        self.tick_at = Tick(1, self.now, 0, 0, 0)
        self.ticks = [self.tick_at]
        self.bench.move(1)
        self._send_batch(7)
        self.pump_and_tick()

    # -- producers --------------------------------------------------------------------------------------------

    def _commit(self, *rows_: Row) -> None:
        self.commits += 1
        for row in rows_:
            row.order = self.commits
        self.log += rows_

    def _row(self, message: Message) -> Row:
        return Row(message.id, self.leaf, 0, message.key, message)

    def _expires(self, ttl: int | None) -> int | None:
        seconds = self.message_ttl if ttl is None else ttl
        return self.now + seconds * 1000 if seconds else None

    def _next(self, payload: str, ttl: int | None = None, key: str | None = None) -> Message:
        self.last_id += 1
        return Message(self.last_id, payload, self.now, key, self._expires(ttl))

    def _send_batch(self, count: int) -> None:
        payloads = [f"{self.last_id + n}" for n in range(1, count + 1)]
        ids = value(self.conn, "select pgque.send_batch(%s, 'default', %s::text[])", self.queue, payloads)
        sent = [self._next(p) for p in payloads]
        assert ids == [m.id for m in sent]
        self._commit(*[self._row(m) for m in sent])

    def _pending(self, key: str, *, expired_too: bool = False) -> Row | None:
        """Find the message with a key that is in the log and was handed out to nobody."""
        said = [r for r in self.log if r.key == key]
        if not said:
            return None
        newest = max(r.id for r in said)
        row = next((r for r in said if r.id == newest and r.message is not None), None)
        if row is None or row.handed or row.purged or self._passed(row):
            return None
        assert row.message is not None
        return row if expired_too or not self._expired(row.message) else None

    def _passed(self, row: Row) -> bool:
        behind = row.order <= self.tick_at.upto
        return behind or bool(
            self.window and row.order <= self.window.upto and self.done is not None and row.id <= self.done
        )

    def _expired(self, message: Message) -> bool:
        return message.expires is not None and message.expires <= self.now

    @rule(
        key=st.sampled_from([None, *KEYS, *KEYS]),
        ttl=ttls,
        delay=st.sampled_from([None, None, 0, 10, 100]),
    )
    def send(self, key: str | None, ttl: int | None, delay: int | None) -> None:
        payload = f"after {self.last_id} at {self.now}"
        found = value(
            self.conn,
            "select pgque.send(%s, 'default', %s::text, key => %s, ttl => %s, delay => %s)",
            self.queue,
            payload,
            key,
            None if ttl is None else timedelta(seconds=ttl),
            None if delay is None else timedelta(seconds=delay),
        )
        if key is not None:
            delayed = [
                w for w in self.waiting if w.delayed and w.message.key == key and not self._expired(w.message)
            ]
            row = self._pending(key)
            old = delayed[-1].message if delayed else row.message if row else None
            if old is not None:
                assert found == old.id, "a pending message is replaced"
                self.bench.seen["replaced"] += 1
                old.payload, old.expires = payload, self._expires(ttl)
                if not delayed:
                    self.last_id += 1  # which shows the loop that something came
                    self._commit(Row(old.id, self.leaf, 0, key, None))
                return
        message = self._next(payload, ttl, key)
        assert found == message.id
        if delay:
            self.waiting.append(Waiting(message, self.now + delay * 1000, delayed=True))
        else:
            self._commit(self._row(message))

    def _purge_key(self, key: str) -> None:
        delayed = [w for w in self.waiting if w.delayed and w.message.key == key]
        row = self._pending(key, expired_too=True)
        found = value(self.conn, "select pgque.purge_key(%s, %s)", self.queue, key)
        assert found == len(delayed) + (row is not None)
        self.waiting = [w for w in self.waiting if w not in delayed]
        if row is not None:
            row.purged = True
            self._commit(Row(row.id, self.leaf, 0, key, None))

    def _cancel(self, pick: int) -> None:
        """Cancel a message that somebody has or will get, for all."""
        waiting = {w.message.id: w for w in self.waiting}
        leases = {i: o for o in self.leases.values() for i in o.held}
        ahead = {r.id: r for r in self.log if r.message and not r.purged and not self._passed(r)}
        known = sorted({*waiting, *leases, *ahead})
        if not known:
            return
        i = known[pick % len(known)]
        found = value(self.conn, "select pgque.cancel(%s, %s)", self.queue, i)
        state, held, message = "pending", False, ahead[i].message if i in ahead else None
        if i in leases:
            message, held, state = leases[i].held[i], leases[i].until > self.now, "retry"
        elif i in waiting:
            w = waiting[i]
            message, held = w.message, w.token is not None and w.due > self.now
            state = "delayed" if w.delayed else "retry" if w.receives else "pending"
        assert message is not None
        assert found == ("processing" if held else "expired" if self._expired(message) else state)
        token = leases[i].token if i in leases else waiting[i].token if i in waiting else None
        if token is not None:
            self._remove(token, i)
            self.batches[token].said.add(i)
        elif i in waiting:
            self.waiting.remove(waiting[i])
        self.cancelled[i] = None
        self.counts["cancelled"] += 1
        self.bench.seen["cancelled"] += 1
        stored = [r for r in self.log if r.id == i and r.message]
        if stored:
            stored[0].purged = True
            row = self.cancelled[i] = Row(i, self.leaf, 0, None, None)
            self._commit(row)
            assert value(self.conn, "select pgque.cancel(%s, %s)", self.queue, i) == "cancelled"

    @rule(count=st.sampled_from([1, 5, 12]), covered=st.sampled_from([True, True, True, False]))
    def offer(self, count: int, covered: bool) -> None:
        self._send_batch(count)
        if covered:
            self.pump_and_tick()

    def _send_in_a_transaction_that_stays_open(self, end: str) -> None:
        if self.session is None:
            self.session = self.bench.connect(autocommit=False)
            found = value(self.session, "select pgque.send(%s, 'late'::text)", self.queue)
            message = self._next("late")
            assert found == message.id
            self.unsent = [self._row(message)]
            return
        self.bench.end(self.session, end)
        self.session = None
        if end == "commit":
            self._commit(*self.unsent)
        self.unsent = []

    # -- the ticker and the operator --------------------------------------------------------------------------

    @rule()
    def pump_and_tick(self) -> None:
        self._pump()
        self._tick()

    def _pump(self) -> None:
        due = [w for w in self.waiting if w.delayed and w.due <= self.now]
        assert value(self.conn, "select pgque.maint_retry_events()") >= len(due)
        self.waiting = [w for w in self.waiting if w not in due]
        if due:
            self.last_id += len(due)  # which shows the loop that something came
            self._commit(*[self._row(w.message) for w in due])

    def _tick(self) -> None:
        last = self.ticks[-1]
        wanted = self.now - last.time >= MINUTE or any(r.order > last.upto for r in self.log)
        assert value(self.conn, "select pgque.ticker(%s)", self.queue) == (last.id + 1 if wanted else None)
        if wanted:
            self.ticks.append(Tick(last.id + 1, self.now, self.last_id, self.commits, self.leaf))

    def _rotate(self) -> None:
        following = (self.leaf + 1) % 3
        needed = min(
            (o.tick for o in self.leases.values() if o.held), key=lambda t: t.id, default=self.tick_at
        )
        needed = min(needed, self.tick_at, key=lambda t: t.id)
        safe = self.now > self.switched and not (
            any(r.leaf == following for r in self.unsent)
            or any(r.leaf == following and r.order > needed.upto for r in self.log)
            or any(t.leaf == following and t.id >= needed.id for t in self.ticks)
        )
        sure = safe and bool(self.log)  # what was rolled back may be vacuumed away
        answer = rotate_if_due(self.conn, self.queue, patient=sure)
        assert answer == 1 or not sure, "there is something to reclaim and nothing in the way"
        assert answer == 0 or safe, "something of the oldest table is needed"
        if answer == 1:
            self.switched = self.now
            self.bench.seen["rotations"] += 1
            self.leaf = following
            self.log = [r for r in self.log if r.leaf != following]
            self.ticks = [t for t in self.ticks if t.leaf != following]

    def _compact(self) -> None:
        if turn_journal(self.conn):
            self.turned = True
        value(self.conn, "select pgque.maint_tables()")
        for token, batch in self.batches.items():
            batch.forgotten = batch.forgotten or (self.turned and token not in self.leases)

    def _expire_messages(self) -> None:
        gone = [
            w
            for w in self.waiting
            if self._expired(w.message)
            and (w.token is None or w.due <= self.now)
            and not (w.message.key is not None and w.receives == 0 and not w.delayed)
        ]
        assert value(self.conn, "select pgque.expire_messages(%s)", self.queue) == len(gone)
        self.waiting = [w for w in self.waiting if w not in gone]
        self.counts["expired"] += len(gone)

    def _maint_lapsed(self) -> None:
        if self.attempts == 1:
            self._reap()
        spent = [
            w for w in self.waiting if not w.delayed and w.due <= self.now and w.receives >= self.attempts
        ]
        assert value(self.conn, "select pgque.maint_lapsed()") == len(spent)
        self._weed(spent)

    def _maint(self) -> None:
        """Do all that maint() does, one call after the other."""
        value(self.conn, "select pgque.set_schedule('expire', '')")
        others = [name for (name, _) in rows(self.conn, "select * from pgque.maint_operations()")]
        rotation = ["rotate_tables_step1"] if self.now > self.switched else []
        parts = ["retry_events", "recurring", "lapsed", "expire", "lags", "retain", *rotation, "tables"]
        assert others == [f"pgque.maint_{part}" for part in parts]
        self._pump()
        self._maint_lapsed()
        assert value(self.conn, "select pgque.maint_expire()") == 0, "the reaper is off"
        assert value(self.conn, "select pgque.maint_retain(%s)", self.queue) == 0, "nobody lags for days"
        self._rotate()
        value(self.conn, "select pgque.maint_tables()")

    def _purge(self) -> None:
        ahead = [
            r
            for r in self.log
            if r.message and not r.purged and not self._passed(r) and not self._expired(r.message)
        ]
        depth = len(ahead) + len(self.waiting) + sum(len(o.held) for o in self.leases.values())
        found = value(self.conn, "select pgque.purge(%s)", self.queue)
        if not any(r.key for r in self.log):
            assert found == depth
        self.leases.clear()
        self.waiting.clear()
        last = self.ticks[-1]
        self.tick_at = Tick(last.id + 1, self.now, self.last_id, self.commits, self.leaf)
        self.window = self.done = None
        self.ticks.append(self.tick_at)

    # -- workers ----------------------------------------------------------------------------------------------

    def _reap(self) -> bool:
        """Move what is left of leases that ended to the retry queue, to be taken at once."""
        lapsed = [o for o in self.leases.values() if o.until <= self.now]
        for lease in lapsed:
            self._shelve(lease, self.now)
        return bool(lapsed)

    def _shelve(self, lease: Lease, due: int) -> None:
        for message in lease.held.values():
            self.waiting.append(Waiting(message, due, receives=1, token=lease.token, worker=lease.worker))
        del self.leases[lease.token]

    def _due(self, but: list[Waiting], of: int | None, limit: int) -> list[Waiting]:
        found = [w for w in self.waiting if not w.delayed and w.due <= self.now and w not in but]
        if of is not None:
            found = [w for w in found if (w.receives if w.token is not None else -1) == of]
        return sorted(found, key=lambda w: (w.due, w.message.id))[:limit]

    def _weed(self, among: list[Waiting]) -> list[Waiting]:
        """Take out what expired or has no attempt left; return the others."""
        good = []
        for w in among:
            if self._expired(w.message):
                self.counts["expired"] += 1
                self.waiting.remove(w)
            elif w.receives >= self.attempts:
                self.waiting.remove(w)
                self._bury(w, (w.error if w.token is None else None) or "receive attempts used up")
            else:
                good.append(w)
        return good

    def _bury(self, w: Waiting, reason: str) -> None:
        self.bench.seen["died"] += 1
        if self.policy == "drop":
            self.counts["dropped"] += 1
        else:
            self.dead[w.message.id] = (w, reason)

    def _is_suspect(self, w: Waiting) -> bool:
        """Whether a message has its last attempt before it, and a delivery of it was lost."""
        return w.receives == self.attempts - 1 and w.receives > w.retry

    def _is_busy_with_one(self, worker: str) -> bool:
        """Whether a worker has such a message, and so gets no other."""
        return any(
            w.worker == worker and w.token is not None and w.due > self.now
            and w.receives >= self.attempts and w.receives > w.retry + 1
            for w in self.waiting
        )  # fmt: skip

    def _holds(self, worker: str) -> bool:
        return any(o.worker == worker and o.until > self.now for o in self.leases.values()) or any(
            w.worker == worker and w.token is not None and w.due > self.now for w in self.waiting
        )

    def _take_waiting(self, most: int, worker: str) -> tuple[list[Waiting], bool]:
        """Choose what is redelivered, and whether anything at all is delivered besides."""
        busy: list[Waiting] = []
        while first := self._due(busy, None, 1):
            (head,) = first
            lapsed = head.token is not None
            if self._is_suspect(head) and not self._expired(head.message):
                if head.due > self.now - VISIBILITY and self._holds(worker):
                    return [], True
                most = 1
            size = piece(head.receives, self.attempts, most) if lapsed else most
            spent = head.receives >= self.attempts or self._expired(head.message)
            look = self._due(busy, head.receives if lapsed else -1, max(most, 1000) if spent else size)
            if most > 1:
                look = [w for w in look if not self._is_suspect(w) or self._expired(w.message)]
            good = self._weed(look)
            busy += [w for w in look if w not in good]
            if good:
                return good[:size], True
        return [], False

    def _from_log(self, most: int) -> list[Message]:
        """Choose new messages: of one window, in order, less what expired or was purged."""
        while True:
            if self.window is None:
                for tick in [t for t in self.ticks if t.id > self.tick_at.id][:100]:
                    if self.window is not None and tick.seq > self.tick_at.seq + max(most, 1000):
                        break
                    self.window = tick
            if self.window is None:
                return []
            ahead = [
                r
                for r in self.log
                if r.message
                and self.tick_at.upto < r.order <= self.window.upto
                and (self.done is None or r.id > self.done)
            ]
            ahead.sort(key=lambda r: r.id)
            good: list[Message] = []
            looked = 0
            for row in ahead:
                if len(good) == most:
                    break
                looked += 1
                assert row.message is not None
                if row.purged:
                    continue
                if row.key is not None:
                    self.seals.append(Row(row.id, self.leaf, 0, row.key, None))
                if self._expired(row.message):
                    self.counts["expired"] += 1
                    continue
                good.append(row.message)
                row.handed = True
            self.from_tick = self.tick_at
            if looked == len(ahead):
                self.tick_at, self.window, self.done = self.window, None, None
            else:
                self.done = ahead[looked - 1].id
            if good:
                return good

    @rule(worker=workers, most=st.sampled_from([1, 2, 5]), seconds=st.sampled_from([0.5, 1, 6, 6, 40, 100]))
    def take_later(self, worker: str, most: int, seconds: float) -> None:
        self.bench.move(seconds)
        self.take(worker, most, 5, None)

    @rule(most=st.sampled_from([2, 5]), moved=st.booleans(), lost=st.sampled_from([1, 1, 2]), other=picks)
    def lose_some(self, most: int, moved: bool, lost: int, other: int) -> None:
        """A lease ends, and somebody takes a part; then its old holder speaks."""
        before = len(self.batches)
        self.take("w1", most, 5, None)
        if len(self.batches) == before:
            return
        token = list(self.batches)[-1]
        if moved:
            self._set_visibility(token, 3)
        self.bench.move(6)
        self.take("w2", lost, 30, None)
        if other % 3 == 0:
            self._ack_expected(token, ack(self.conn, token))

    @rule(
        worker=workers,
        most=st.sampled_from([1, 2, 5, 50]),
        timeout=st.sampled_from([5, 30, None, 300]),
        ack_pick=st.sampled_from([None, None, None, 1, 2, 3]),
    )
    def take(self, worker: str, most: int, timeout: int | None, ack_pick: int | None) -> None:
        acked = None if ack_pick is None else self._token(ack_pick)
        answer = None if acked is None or not self.batches[acked].forgotten else self._would_answer(acked)
        got = messages(
            rows(
                self.conn,
                "select * from pgque.receive(%s, 'c', %s, worker => %s, visibility_timeout => %s, ack_batch => %s)",
                self.queue,
                most,
                worker,
                None if timeout is None else timedelta(seconds=timeout),
                acked,
            )
        )
        if acked is not None and not self._ack_expected(acked, answer):
            acked = None
        self.seals.clear()
        until = self.now + (30 if timeout is None else timeout) * 1000
        self._reap()
        if self.rate:
            self.paid = max(self.paid, self.now * 1000 - 1_000_000)
            most = min(most, ((self.now * 1000 - self.paid) * self.rate + 1) // 1_000_000)
        if self._is_busy_with_one(worker):
            most = 0
        again, only = self._take_waiting(most, worker) if most else ([], False)
        fresh = [] if only or not most else self._from_log(most)
        for w in again:
            w.receives += 1
            w.worker, w.due = worker, until
        expected = [
            (w.message, w.retry, w.receives, w.error) for w in sorted(again, key=lambda w: w.message.id)
        ] + [(m, 0, 1, None) for m in fresh]
        assert [
            (
                m.msg_id,
                m.payload,
                m.key,
                m.created_at,
                m.expires_at,
                m.retry_count,
                m.receive_count,
                m.last_error,
                m.queue,
            )
            for m in got
        ] == [
            (
                m.id,
                m.payload,
                m.key,
                at(m.sent),
                None if m.expires is None else at(m.expires),
                retry,
                receives,
                error,
                self.queue,
            )
            for m, retry, receives, error in expected
        ]
        if self.seals:
            self._commit(*self.seals)
        if not got:
            return
        (token,) = {m.batch_id for m in got}
        assert token not in self.batches
        self.bench.seen["batches"] += 1
        self.bench.seen["messages"] += len(got)
        self.bench.seen["again"] += len(again)
        self.bench.seen["pieces of what lapsed"] += any(w.token is not None for w in again)
        self.batches[token] = Batch([m.msg_id for m in got], self.now)
        for w in again:
            w.token = token
        if fresh:
            self.leases[token] = Lease(token, worker, until, self.from_tick, {m.id: m for m in fresh})
        if self.rate:
            self.paid += round(len(got) * 1_000_000 / self.rate)

    def _take_in_vain(self, pick: int) -> None:
        """A worker that is killed, or changes its mind, before it commits has taken nothing."""
        session = self.bench.connect(autocommit=False)
        token = value(session, "select min(r.batch_id) from pgque.receive(%s, 'c', 5, 'w1') as r", self.queue)
        if token is not None and pick % 3 == 0:
            assert ack(session, token) == 1
        self.bench.end(session, "killed" if pick % 2 else "rollback")
        if token is not None:
            self.bench.seen["taken in vain"] += 1
            assert ack(self.conn, token) == 0

    def _token(self, pick: int) -> int | None:
        """Choose a batch: mostly one that still has something, else one of the last that were."""
        held = {w.token for w in self.waiting if w.token is not None} | set(self.leases)
        if held and pick % 4:
            return sorted(held)[pick // 4 % len(held)]
        ever = list(self.batches)
        return ever[-1 - pick // 4 % min(len(ever), 8)] if ever else None

    def _held(self, token: int) -> dict[int, Waiting]:
        """Map what a batch still has, as it would wait; what is in the log was received once."""
        held = {w.message.id: w for w in self.waiting if w.token == token}
        lease = self.leases.get(token)
        for message in lease.held.values() if lease else []:
            held[message.id] = Waiting(message, 0, receives=1, worker=lease.worker if lease else None)
        return held

    def _remove(self, token: int, msg_id: int) -> None:
        lease = self.leases.get(token)
        if lease and lease.held.pop(msg_id, None):
            if not lease.held:
                del self.leases[token]
            return
        self.waiting = [w for w in self.waiting if not (w.token == token and w.message.id == msg_id)]

    def _would_answer(self, token: int) -> int:
        """Ask what an ack would answer, and take it back: a receive with an ack does not say."""
        session = self.bench.connect(autocommit=False)
        answer = ack(session, token)
        self.bench.end(session, "rollback")
        return answer

    def _ack_expected(self, token: int, answer: int | None) -> bool:
        """Finish a batch if it is whole; check the answer, if it is known."""
        held, batch = self._held(token), self.batches[token]
        whole = bool(held) and set(batch.members) <= set(held) | batch.said
        if answer is not None:
            self.bench.seen["acks of what is not whole"] += bool(held) and not whole
            assert answer == int(whole) or (batch.forgotten and held and answer == 1)
            whole = answer == 1
        if whole:
            for msg_id in held:
                self._remove(token, msg_id)
        return whole

    @rule(
        pick=picks,
        first=picks,
        count=st.integers(1, 6),
        how=st.sampled_from(["ack", "nack", "nack", "dead", "archive"]),
        after=st.sampled_from([0, 0, 10, None]),
        reason=st.sampled_from([None, "bad"]),
    )
    def settle(
        self, pick: int, first: int, count: int, how: str, after: int | None, reason: str | None
    ) -> None:
        token = self._token(pick)
        if token is None:
            return
        batch, held = self.batches[token], self._held(token)
        ids = [batch.members[(first + n) % len(batch.members)] for n in range(min(count, len(batch.members)))]
        ids.append(self.last_id + 1000)
        if how == "nack":
            wait = None if after is None else timedelta(seconds=after)
            answers = outcome(self.conn, how, token, ids, wait, reason)
        else:
            answers = outcome(self.conn, how, token, ids, *([reason] if how == "dead" else []))
        assert list(answers) == ids
        for i in ids:
            if i not in held:
                other = any(w.message.id == i and w.token not in (None, token) for w in self.waiting)
                if self.cancelled.get(i) in self.log and i in self.cancelled:
                    assert answers[i] == "cancelled"
                elif other:
                    assert answers[i] == "lost to another worker"
                elif i in batch.said and not self.turned:
                    assert answers[i] == "settled already"
                else:
                    assert answers[i] in ("not in this batch", "batch not open", "settled already")
                    assert i in batch.members or answers[i] != "settled already"
                continue
            assert answers[i] is None
            self._remove(token, i)
            batch.said.add(i)
            w = held[i]
            if how == "archive":
                self.archived.append(i)
            elif how == "dead":
                w.error = reason or w.error
                self._bury(w, reason or "dead")
            elif how == "nack" and (w.retry >= self.max_retries or w.receives >= self.attempts):
                why = "retries used up" if w.retry >= self.max_retries else "receive attempts used up"
                w.error = reason or w.error
                self._bury(w, reason or why)
            elif how == "nack":
                due = self.now + (60 if after is None else after) * 1000
                self.waiting.append(
                    replace(w, token=None, worker=None, retry=w.retry + 1, error=reason, due=due)
                )

    def _hand_back(self, token: int, ids: list[int]) -> None:
        for i in ids:
            w = self._held(token)[i]
            self._remove(token, i)
            self.waiting.append(replace(w, token=None, worker=None, due=self.now))

    def _release(self, token: int, first: int, count: int) -> None:
        batch, held = self.batches[token], self._held(token)
        ids = [batch.members[(first + n) % len(batch.members)] for n in range(min(count, len(batch.members)))]
        good = [i for i in (ids or held) if i in held]
        assert release(self.conn, token, ids or None) == len(good)
        self._hand_back(token, good)
        if ids:
            batch.said |= set(good)

    def _extend(self, token: int, by: int) -> None:
        found = value(self.conn, "select pgque.extend(%s, %s)", token, timedelta(seconds=by))
        assert found == len(self._held(token))
        for w in self.waiting:
            if w.token == token:
                w.due = max(w.due, self.now) + by * 1000
        if token in self.leases:
            self.leases[token].until = max(self.leases[token].until, self.now) + by * 1000

    def _set_visibility(self, token: int, to: int) -> None:
        held = list(self._held(token))
        found = value(self.conn, "select pgque.set_visibility(%s, %s)", token, timedelta(seconds=to))
        assert found == len(held)
        if to == 0:
            self._hand_back(token, held)
            return
        if token in self.leases:
            self._shelve(self.leases[token], 0)
        for w in self.waiting:
            if w.token == token:
                w.due = self.now + to * 1000

    def _reclaim(self, seconds: int) -> None:
        old = [t for t, b in self.batches.items() if b.at <= self.now - seconds * 1000 and self._held(t)]
        found = value(self.conn, "select pgque.reclaim(%s, 'c', %s)", self.queue, timedelta(seconds=seconds))
        assert found == len(old)
        for token in old:
            self._hand_back(token, list(self._held(token)))

    def _look_who_works(self) -> None:
        """What list_messages says is being processed is what is held."""
        found = rows(
            self.conn,
            "select m.msg_id, m.worker, m.batch_id, m.receive_count, m.available_at"
            " from pgque.list_messages(%s, 'processing', 1000) as m",
            self.queue,
        )
        held = [
            (w.message.id, w.worker, w.token, w.receives, at(w.due))
            for w in self.waiting
            if w.token is not None and w.due > self.now
        ]
        held += [
            (i, o.worker, o.token, 1, at(o.until))
            for o in self.leases.values()
            if o.until > self.now
            for i in o.held
        ]
        assert [tuple(f) for f in found] == sorted(held)

    @rule(
        pick=picks,
        first=picks,
        count=st.integers(0, 6),
        how=st.sampled_from(["ack", "ack", "release", "extend", "extend", "set", "set", "set 0"]),
        seconds=st.sampled_from([0, 3, 3, 60]),
    )
    def hold_or_let_go(self, pick: int, first: int, count: int, how: str, seconds: int) -> None:
        token = self._token(pick)
        if token is None:
            return
        if how == "ack":
            self._ack_expected(token, ack(self.conn, token))
        elif how == "release":
            self._release(token, first, count)
        elif how == "extend":
            self._extend(token, seconds)
        else:
            self._set_visibility(token, 0 if how == "set 0" else seconds)
        self._look_who_works()

    @rule(
        what=st.sampled_from(
            [
                "rotate",
                "rotate",
                "compact",
                "expire",
                "lapsed",
                "maint",
                "purge key",
                "purge",
                "cancel",
                "cancel",
                "cancel",
                "reclaim",
                "look",
                "letters",
                "requeue",
                "requeue",
                "transaction",
                "transaction",
                "transaction",
                "in vain",
                "in vain",
            ]
        ),
        pick=picks,
    )
    def operate(self, what: str, pick: int) -> None:
        if what == "rotate":
            for _ in range(1 + pick % 3):
                self.bench.move(0.01)
                self._rotate()
        elif what == "compact" and self.compacts:
            self._compact()
        elif what == "expire":
            self._expire_messages()
        elif what == "lapsed":
            self._maint_lapsed()
        elif what == "purge key":
            self._purge_key(KEYS[pick % 2])
        elif what == "cancel":
            self._cancel(pick)
        elif what == "maint":
            self._maint()
        elif what == "purge" and pick % 4 == 0:
            self._purge()
        elif what == "reclaim":
            self._reclaim((0, 20, 100)[pick % 3])
        elif what == "look":
            self._look_who_works()
        elif what == "in vain":
            self._take_in_vain(pick)
        elif what == "transaction":
            self._send_in_a_transaction_that_stays_open(("commit", "commit", "rollback", "killed")[pick % 4])
        elif what in ("letters", "requeue"):
            self._dead_letters(pick, "look" if what == "letters" else what)

    # -- dead letters -----------------------------------------------------------------------------------------

    def _dead_letters(self, pick: int, how: str) -> None:
        found = rows(
            self.conn,
            "select d.ev_id, d.dl_reason, d.ev_data, d.dl_id from pgque.dlq_inspect(%s, 100000) as d order by d.ev_id",
            self.queue,
        )
        assert [f[:3] for f in found] == [
            (i, reason, w.message.payload) for i, (w, reason) in sorted(self.dead.items())
        ]
        if how == "requeue" and found:
            msg_id, _, _, dl_id = found[pick % len(found)]
            assert value(self.conn, "select pgque.dlq_requeue(%s)", dl_id) == msg_id
            w, reason = self.dead.pop(msg_id)
            if self._expired(w.message):
                w.message.expires = None  # it is given another life
            self.waiting.append(Waiting(w.message, self.now, error=w.error or reason))

    # -- the end ----------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and self.ticks:
                self._to_the_end()
        finally:
            self.bench.drop(self.queue)

    def _to_the_end(self) -> None:
        """Everything comes to its end: done, dead, dropped or expired, and nobody holds anything."""
        if self.session is not None:
            self._send_in_a_transaction_that_stays_open("commit")
        for _ in range(500):
            self.bench.move(400)
            self.pump_and_tick()
            before = len(self.batches)
            self.take("w1", 50, 300, None)
            if len(self.batches) > before:
                token = list(self.batches)[-1]
                self._ack_expected(token, ack(self.conn, token))
            elif not self.waiting and not self.leases:
                break
        self._dead_letters(0, "look")
        assert value(self.conn, "select count(*) from pgque.retry_queue") == 0
        assert rows(self.conn, "select * from pgque.list_workers(%s)", self.queue) == []
        found = rows(
            self.conn,
            "select m.metric, sum(m.value)::int from pgque.metrics() m where m.queue = %s"
            " and m.metric in ('pgque_messages_expired_total', 'pgque_messages_dropped_total', 'pgque_messages_cancelled_total') group by 1",
            self.queue,
        )
        assert {metric.split("_")[2]: n for metric, n in found} == {w: n for w, n in self.counts.items() if n}
        archived = rows(self.conn, "select a.msg_id from pgque.archive_list(%s, 100000) as a", self.queue)
        assert sorted(a[0] for a in archived) == sorted(self.archived)
