"""Any sequence of calls: what each answers is what a simple model of leases says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    dead_letters,
    forced_tick,
    ids,
    nack_ids,
    outcome,
    pump,
    rotate,
    rows,
    send_many,
    subscribe,
    take,
    tick,
    value,
)


@dataclass
class Known:
    """What is known of a message."""

    due: float = 0  # it may be taken from then on
    token: int | None = None  # who has it, or had it last
    settled: bool = False  # that holder has said what became of it
    receives: int = 0
    nacks: int = 0
    gone: str | None = None


@dataclass
class Model:
    """The queue under test and what it should hold."""

    conn: Connection
    dice: random.Random
    limit: int
    now: float = 0
    known: dict[int, Known] = field(default_factory=dict)
    batches: dict[int, list[int]] = field(default_factory=dict)
    handed: dict[int, float] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    said: dict[int, set[int]] = field(default_factory=dict)  # what a token's holder has settled one by one

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.conn.execute(
            "create or replace function pgque.clock() returns timestamptz language sql volatile as"
            f" $$ select timestamptz '2040-01-01' + interval '{self.now} seconds' $$".encode()
        )

    def send(self) -> None:
        for msg_id in send_many(self.conn, "q", self.dice.choice([1, 3, 20])):
            self.known[msg_id] = Known(due=self.now)
        tick(self.conn, "q")

    def bury_what_has_no_attempt_left(self) -> None:
        for known in self.known.values():
            if known.gone is None and known.receives >= self.limit and known.due <= self.now:
                known.gone = "dead"

    def take(self, count: int | None = None) -> int:
        takeable = {i for i, k in self.known.items() if k.gone is None and k.due <= self.now}
        spent = {i for i in takeable if self.known[i].receives >= self.limit}
        timeout = self.dice.choice([5, 30, 300])
        batch = take(
            self.conn,
            "q",
            f"w{self.dice.randrange(6)}",
            count or self.dice.choice([1, 2, 5, 50]),
            f"{timeout} seconds",
        )
        assert set(ids(batch)) <= takeable - spent
        assert len(set(ids(batch))) == len(batch)
        assert ids(batch) == sorted(ids(batch))
        if takeable - spent:
            assert batch, f"nothing came of {sorted(takeable)[:5]}"
        for message in batch:
            known = self.known[message.msg_id]
            known.receives += 1
            known.token, known.settled = message.batch_id, False
            known.due = self.now + timeout
            assert (message.receive_count, message.retry_count) == (known.receives, known.nacks)
        tokens = {m.batch_id for m in batch}
        assert len(tokens) <= 1
        for token in tokens:
            assert token not in self.batches
            self.batches[token] = ids(batch)
            self.handed[token] = self.now
            self.said[token] = set()
        return len(batch)

    def expected(self, token: int, members: list[int]) -> set[int]:
        """The messages that a call with this token settles."""
        return {
            i
            for i in members
            if self.known[i].token == token and not self.known[i].settled and self.known[i].gone is None
        }

    def settle(self) -> None:
        usable = [t for t in self.batches if t not in self.released]
        if not usable:
            return
        token = self.dice.choice(usable[-8:])
        members = self.batches[token]
        some = self.dice.sample(members, self.dice.randint(1, len(members)))
        good = self.expected(token, some)
        # A message that has used up its attempts may be buried as soon as its lease ends.
        maybe = {i for i in good if self.known[i].receives >= self.limit and self.known[i].due <= self.now}
        how = self.dice.choice(["ack", "ack", "whole", "nack", "dead", "release", "extend", "hide"])
        if how == "whole":
            good = self.expected(token, members)
            maybe = {
                i for i in good if self.known[i].receives >= self.limit and self.known[i].due <= self.now
            }
            if not maybe:
                # All that is left of the batch, or nothing.
                whole = set(members) <= good | self.said[token]
                assert ack(self.conn, token) == (1 if good and whole else 0)
                for i in good if whole else []:
                    self.known[i].gone = "acked"
                    self.said[token].add(i)
            return
        if how == "release":
            if maybe:
                return
            count = value(self.conn, "select pgque.release(%s, %s::bigint[])", token, some)
            assert count == len(good)
            self.released.add(token)
            for i in good:
                self.known[i].due = self.now
                self.said[token].add(i)
            return
        if how in ("extend", "hide"):
            every = self.expected(token, members)
            if any(self.known[i].due <= self.now for i in every):
                return
            by = self.dice.choice([3, 60])
            call = "extend" if how == "extend" else "set_visibility"
            assert value(self.conn, f"select pgque.{call}(%s, %s::interval)", token, f"{by} s") == len(every)
            for i in every:
                self.known[i].due = by + (self.known[i].due if how == "extend" else self.now)
            return
        if how == "nack":
            after = self.dice.choice([0, 10])
            found = {
                r[0]: None if r[1] else r[2] for r in nack_ids(self.conn, token, some, f"{after} s", "no")
            }
        else:
            after = 0
            found = outcome(self.conn, how, token, some, *(["bad"] if how == "dead" else []))
        assert set(found) == set(some)
        for i, reason in found.items():
            if i in maybe:
                if reason is not None:
                    self.known[i].gone = "dead"
                    continue
            else:
                assert (reason is None) == (i in good), (how, i, reason, self.known[i])
            if reason is None:
                known = self.known[i]
                known.settled = True
                self.said[token].add(i)
                if how == "nack":
                    known.nacks += 1
                    known.due = self.now + after
                    if known.receives >= self.limit:
                        known.gone = "dead"
                else:
                    known.gone = "acked" if how == "ack" else "dead"

    def keep_up(self) -> None:
        how = self.dice.choice(["maint", "rotate", "reclaim", "pump"])
        if how == "maint":
            value(self.conn, "select pgque.maint()")
        elif how == "rotate":
            forced_tick(self.conn, "q")
            rotate(self.conn, "q")
        elif how == "pump":
            pump(self.conn)
            tick(self.conn, "q")
        elif self.dice.random() < 0.3:
            value(self.conn, "select pgque.reclaim('q', 'c', '100 seconds')")
            for known in self.known.values():
                if known.token is not None and self.handed[known.token] < self.now - 100:
                    self.released.add(known.token)
                    if known.gone is None and not known.settled:
                        known.due = min(known.due, self.now)


@pytest.mark.parametrize("limit", [1000, 3])
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_calls_answers_as_the_model_says(own: Connection, seed: int, limit: int) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    configure(own, "q", max_retries=1000, max_receive_attempts=limit)
    model = Model(own, random.Random(f"{seed} {limit}"), limit)  # noqa: S311
    model.pass_time(1)
    for _ in range(250):
        step = model.dice.choice(["send", "take", "take", "settle", "settle", "settle", "time", "keep up"])
        model.pass_time(0.5)
        if step == "send":
            model.send()
        elif step == "take":
            model.take()
        elif step == "settle":
            model.settle()
        elif step == "time":
            model.pass_time(model.dice.choice([1, 6, 40]))
        else:
            model.keep_up()
    # Everything ends: acked by whoever takes it next, or dead.
    for _ in range(2000):
        model.pass_time(400)
        if not model.take(100):
            value(own, "select pgque.maint()")
            if not model.take(100):
                break
        token = list(model.batches)[-1]
        for i in model.batches[token]:
            model.known[i].gone = "acked"
        assert ack(own, token) == 1
    model.bury_what_has_no_attempt_left()
    dead = {i for i, k in model.known.items() if k.gone == "dead"}
    assert set(dead_letters(own, "q")) == dead
    assert {i for i, k in model.known.items() if k.gone is None} == set()
    assert value(own, "select count(*) from pgque.retry_queue") == 0
    assert rows(own, "select * from pgque.list_workers()") == []
