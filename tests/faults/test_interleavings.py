"""Pairs of calls that can race, in every order of their transactions, with every way these can end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from conftest import create_database, drop_database
from faults.interleave import Arena, Side, State, combinations
from sql.helpers import (
    Connection,
    Message,
    ack,
    compact_soon,
    dead_letters,
    drain,
    extend,
    forced_tick,
    ids,
    leaf,
    nack_ids,
    offer,
    outcome,
    post,
    pump,
    receive,
    receive_coop,
    release,
    rows,
    send,
    send_many,
    set_visibility,
    settle,
    take,
    tick,
    value,
    work_off,
)
from support.servers import TestServer

LOST = "lost to another worker"
Act = Callable[[Connection, State], Any]
Check = Callable[[Arena, State, Side, Side], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two acts that race, what there is before, and what must be so afterwards."""

    setup: Callable[[Arena], State]
    a: Act
    b: Act
    check: Check
    old: str
    both_ways: bool
    allowed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Case:
    """One order and one way to end of a pair."""

    pair: Pair
    order: str
    ends: tuple[str, str]
    levels: tuple[str, str]

    def __str__(self) -> str:
        short = {"read committed": "rc", "repeatable read": "rr"}
        return "-".join(
            [
                self.pair.check.__name__,
                *([when] if (when := self.pair.setup.__name__).startswith("before") else []),
                self.order,
                *self.ends,
                *(short[level] for level in self.levels),
            ]
        )


CASES: list[Any] = []


def pair(
    setup: Callable[[Arena], State],
    a: Act,
    b: Act | None = None,
    old: str = "",
    allowed: str = "",
    brief: bool = False,
) -> Callable[[Check], Check]:
    """Make a case of every order and end of a and b; without b, a races with itself.

    old: the sides that may have a snapshot older than what the other does. allowed: SQLSTATEs besides 40001
    that are no fault.
    """

    def register(check: Check) -> Check:
        one = Pair(setup, a, b or a, check, old, b is not None, frozenset(allowed.split()))
        for order, end_a, end_b, level_a, level_b, often in combinations(old, b is not None, brief):
            case = Case(one, order, (end_a, end_b), (level_a, level_b))
            CASES.append(pytest.param(case, id=str(case), marks=[] if often else pytest.mark.long))
        return check

    return register


@pytest.fixture(scope="module")
def arena(server: TestServer, installed: str) -> Iterator[Arena]:
    """A database for all cases; each has a queue of its own."""
    name = create_database(server, "pgque_pairs", installed)
    arena = Arena(server.dsn_for(name))
    # The journal may turn at any time.
    compact_soon(arena.conn, 1)
    yield arena
    arena.close()
    drop_database(server, name)


@pytest.mark.parametrize("case", CASES)
def test_in_every_order_and_with_every_end(arena: Arena, case: Case) -> None:
    state = case.pair.setup(arena)
    acts = {"a": case.pair.a, "b": case.pair.b}
    sides = {
        name: Side(name, acts[name], case.ends[n], case.levels[n], arena.session(name))
        for n, name in enumerate("ab")
    }
    try:
        arena.play(state, sides, case.order, case.pair.allowed)
        case.pair.check(arena, state, sides["a"], sides["b"])
    except BaseException:
        arena.forget()
        raise
    arena.clear()


WAITING = [("aabb", ""), ("abab", "b"), ("abba", "b"), ("bbaa", ""), ("baba", "a"), ("baab", "a")]


@pytest.mark.parametrize(
    ("order", "waiting", "end"),
    [
        *((order, waiting, "commit") for order, waiting in WAITING),
        *(("abab", "b", end) for end in ("rollback", "killed", "savepoint")),
    ],
)
def test_who_acts_second_is_seen_waiting_until_the_first_has_ended(
    arena: Arena, order: str, waiting: str, end: str
) -> None:
    arena.conn.execute("create table if not exists public.one as select 0 as n")
    arena.conn.execute("update public.one set n = 0")

    def add(c: Connection, _: State) -> int:
        result: int = value(c, "update public.one set n = n + 1 returning n")
        return result

    ends = {"a": end, "b": "commit"}
    level = "read committed"
    sides = {name: Side(name, add, ends[name], level, arena.session(name)) for name in "ab"}
    arena.play(State("none"), sides, order)
    counted = [side for side in sides.values() if side.committed]
    assert value(arena.conn, "select n from public.one") == len(counted)
    assert [side.name for side in counted] == (["a", "b"] if end in ("commit", "savepoint") else ["b"])
    assert "".join(side.name for side in sides.values() if side.waited) == waiting


@pytest.mark.parametrize("order", ["aabb", "abab", "bbaa", "baba"])
def test_an_old_snapshot_is_taken_before_the_first_step(arena: Arena, order: str) -> None:
    arena.conn.execute("create table if not exists public.one as select 0 as n")
    arena.conn.execute("update public.one set n = 0")

    def add(c: Connection, _: State) -> int:
        result: int = value(c, "update public.one set n = n + 1 returning n")
        return result

    sides = {name: Side(name, add, "commit", "repeatable read", arena.session(name)) for name in "ab"}
    arena.play(State("none"), sides, order)
    assert value(arena.conn, "select n from public.one") == 2
    assert [side.name for side in sides.values() if side.again] == ["b" if order[0] == "a" else "a"]


# -- what there is before ------------------------------------------------------


def ready(arena: Arena) -> State:
    """Four messages that nobody has received."""
    queue = arena.new_queue()
    return State(queue, offer(arena.conn, queue, 4))


def ready_pool(arena: Arena) -> State:
    """The same for a pool that has worked before."""
    queue = arena.new_queue()
    offer(arena.conn, queue, 1)
    work_off(arena.conn, queue)
    return State(queue, offer(arena.conn, queue, 4))


def opened(arena: Arena) -> State:
    """An open batch of two of four messages."""
    state = ready(arena)
    state.held = receive(arena.conn, state.queue, count=2)
    return state


def leased(arena: Arena) -> State:
    """A batch of three messages in the hands of w1."""
    queue = arena.new_queue()
    sent = offer(arena.conn, queue, 3)
    return State(queue, sent, take(arena.conn, queue, "w1", timeout="1 hour"))


def lapsed(arena: Arena) -> State:
    """A batch of three messages whose lease has ended."""
    queue = arena.new_queue()
    sent = offer(arena.conn, queue, 3)
    return State(queue, sent, take(arena.conn, queue, "w1", timeout="1 microsecond"))


def nacked(arena: Arena) -> State:
    """Four messages that were nacked and are due."""
    queue = arena.new_queue()
    sent = offer(arena.conn, queue, 4)
    token = take(arena.conn, queue, "w1")[0].batch_id
    nack_ids(arena.conn, token, sent, "0")
    return State(queue, sent)


def lanes(arena: Arena) -> State:
    """Four messages of two keys for a pool that keeps their order."""
    queue = arena.new_queue(subscribed=False)
    value(arena.conn, "select pgque.subscribe(%s, 'c', keyed_order => true)", queue)
    sent = [post(arena.conn, queue, partition_key=key) for key in ("k", "l", "k", "l")]
    tick(arena.conn, queue)
    return State(queue, sent)


def buried(arena: Arena) -> State:
    """Three dead letters of a pool."""
    state = leased(arena)
    outcome(arena.conn, "dead", state.token, state.sent, "x")
    state.note = [
        r[0] for r in rows(arena.conn, "select d.dl_id from pgque.dlq_inspect(%s) as d", state.queue)
    ]
    return state


# -- short forms ---------------------------------------------------------------


def once(got: list[int], sent: list[int]) -> None:
    """Each message once and nothing else."""
    assert Counter(got) == Counter(sent)


def kept(side: Side) -> list[Message]:
    """What a side got, if it keeps it."""
    found: list[Message] = side.says or []
    return found


def finish(arena: Arena, batch: list[Message]) -> list[int]:
    """Finish a batch that is somebody's, once."""
    if batch:
        assert outcome(arena.conn, "ack", batch[0].batch_id, ids(batch)) == dict.fromkeys(ids(batch))
        assert ack(arena.conn, batch[0].batch_id) == 0
    return ids(batch)


def accepted(side: Side) -> list[int]:
    """The messages whose outcome was accepted."""
    found: dict[int, Any] = side.says or {}
    return [i for i, reason in found.items() if reason is None]


def each_is_its_holders(arena: Arena, a: Side, b: Side) -> list[int]:
    """No two workers have one message, and neither batch id serves for the other's."""
    for mine, other in ((kept(a), kept(b)), (kept(b), kept(a))):
        if mine and other:
            assert mine[0].batch_id != other[0].batch_id
            assert None not in outcome(arena.conn, "ack", mine[0].batch_id, ids(other)).values()
    done = finish(arena, kept(a)) + finish(arena, kept(b))
    for side in (a, b):
        if not side.committed and side.result and isinstance(side.result, list):
            assert ack(arena.conn, side.result[0].batch_id) == 0
    return done


# -- receive and receive -------------------------------------------------------


@pair(ready, lambda c, s: receive(c, s.queue, count=2), old="ab")
def two_receives_of_a_consumer_get_one_batch(arena: Arena, state: State, a: Side, b: Side) -> None:
    batch = receive(arena.conn, state.queue, count=2)
    assert ids(batch) == state.sent[:2]
    for side in (a, b):
        if side.committed:
            assert side.result == batch
        elif side.result and not (a.committed or b.committed):
            # What was rolled back is no batch.
            assert side.result[0].batch_id != batch[0].batch_id
            assert ack(arena.conn, side.result[0].batch_id) == 0
    assert ack(arena.conn, batch[0].batch_id) == 1
    assert ack(arena.conn, batch[0].batch_id) == 0
    once(drain(arena.conn, state.queue), state.sent[2:])


def receive_and_ack(c: Connection, state: State) -> list[int]:
    batch = receive(c, state.queue, count=2)
    if batch:
        assert ack(c, batch[0].batch_id) == 1
    return ids(batch)


@pair(ready, receive_and_ack, old="ab")
def receive_and_ack_in_one_transaction_is_exactly_once(arena: Arena, state: State, a: Side, b: Side) -> None:
    once((a.says or []) + (b.says or []) + drain(arena.conn, state.queue), state.sent)


@pair(opened, lambda c, s: ack(c, s.token), lambda c, s: receive(c, s.queue, count=2), old="ab")
def an_ack_and_a_receive_of_a_consumer_agree_on_what_is_next(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    done = state.sent[:2] if a.committed else []
    if a.committed:
        assert a.result == 1
    assert ack(arena.conn, state.token) == int(not a.committed)
    done = state.sent[:2]
    if kept(b) and b.result[0].batch_id != state.token:
        assert ids(b.result) == state.sent[2:]
        assert receive(arena.conn, state.queue, count=2) == b.result
    once(done + drain(arena.conn, state.queue), state.sent)


def next_batch(c: Connection, state: State) -> list[Message]:
    return receive(c, state.queue, count=2, ack_batch=state.token)


@pair(opened, next_batch, lambda c, s: receive(c, s.queue, count=2), old="ab")
def a_receive_with_an_ack_and_one_without_agree_on_what_is_next(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    if a.committed:
        assert ids(a.result) == state.sent[2:]
        assert receive(arena.conn, state.queue, count=2) == a.result
    if kept(b) and b.result[0].batch_id != state.token:
        assert b.result == a.result
    assert ack(arena.conn, state.token) == int(not a.committed)
    once(state.sent[:2] + drain(arena.conn, state.queue), state.sent)


@pair(opened, next_batch, old="ab")
def two_receives_with_an_ack_of_one_batch_get_the_same_next_one(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    if a.committed and b.committed:
        assert a.result == b.result
    assert ack(arena.conn, state.token) == int(not a.committed and not b.committed)
    once(state.sent[:2] + drain(arena.conn, state.queue), state.sent)


def take_2(worker: str, count: int = 2) -> Act:
    return lambda c, s: take(c, s.queue, worker, count, "1 hour")


@pair(ready, take_2("wa"), take_2("wb"))
def two_workers_of_a_new_pool_get_different_messages(arena: Arena, state: State, a: Side, b: Side) -> None:
    done = each_is_its_holders(arena, a, b)
    later = arena.rest(state.queue)
    assert {m.receive_count for m in later} <= {1}
    once(done + ids(later), state.sent)


@pair(ready_pool, take_2("wa"), take_2("wb", 3))
def two_workers_get_different_messages(arena: Arena, state: State, a: Side, b: Side) -> None:
    done = each_is_its_holders(arena, a, b)
    once(done + ids(arena.rest(state.queue)), state.sent)


@pair(lapsed, take_2("wa"), take_2("wb"))
def two_workers_take_over_different_messages(arena: Arena, state: State, a: Side, b: Side) -> None:
    taken = ids(kept(a)) + ids(kept(b))
    if taken:
        found = outcome(arena.conn, "ack", state.token, taken)
        assert None not in found.values()
    done = each_is_its_holders(arena, a, b)
    once(done + ids(arena.rest(state.queue)), state.sent)


@pair(nacked, take_2("wa"), take_2("wb"))
def two_workers_get_different_nacked_messages(arena: Arena, state: State, a: Side, b: Side) -> None:
    done = each_is_its_holders(arena, a, b)
    later = arena.rest(state.queue)
    assert {(m.receive_count, m.retry_count) for m in later} <= {(2, 1)}
    once(done + ids(later), state.sent)


@pair(lanes, take_2("wa", 1), take_2("wb", 1))
def two_workers_get_messages_of_different_keys(arena: Arena, state: State, a: Side, b: Side) -> None:
    got = sorted(ids(kept(a)) + ids(kept(b)))
    assert got == state.sent[: len(got)]
    done = each_is_its_holders(arena, a, b)
    later = ids(arena.rest(state.queue))
    once(done + later, state.sent)


def take_and_ack(c: Connection, state: State) -> list[int]:
    batch = take(c, state.queue, "w", 2)
    if batch:
        assert ack(c, batch[0].batch_id) == 1
    return ids(batch)


@pair(ready_pool, take_and_ack)
def take_and_ack_in_one_transaction_is_exactly_once(arena: Arena, state: State, a: Side, b: Side) -> None:
    once((a.says or []) + (b.says or []) + ids(arena.rest(state.queue)), state.sent)


@pair(ready, lambda c, s: receive(c, s.queue, count=2), take_2("w"), old="a", allowed="PQ005 PQ006")
def a_receive_without_a_worker_meets_the_first_one_with(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert not (kept(a) and kept(b))
    if kept(a):
        assert ack(arena.conn, a.result[0].batch_id) == 1
    done = ids(kept(a)) + finish(arena, kept(b))
    # Who received on its own is refused to workers from then on.
    later = arena.rest_alone(state.queue) if kept(a) else ids(arena.rest(state.queue))
    once(done + later, state.sent)


def coop(arena: Arena) -> State:
    """A group of three whose first member holds two of four messages and is silent."""
    queue = arena.new_queue(subscribed=False)
    for worker in ("old", "wa", "wb"):
        value(arena.conn, "select pgque.register_subconsumer(%s, 'c', %s)", queue, worker)
    sent = offer(arena.conn, queue, 4)
    held = receive_coop(arena.conn, queue, "old", 2)
    return State(queue, sent, held)


@pair(
    coop,
    lambda c, s: receive_coop(c, s.queue, "wa", 2, "0 seconds"),
    lambda c, s: receive_coop(c, s.queue, "wb", 2, "0 seconds"),
    old="ab",
)
def two_subconsumers_take_over_and_go_on_without_sharing(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    holders = {worker: receive_coop(arena.conn, state.queue, worker, 2) for worker in ("old", "wa", "wb")}
    done: list[int] = []
    for batch in holders.values():
        if batch:
            assert ack(arena.conn, batch[0].batch_id) == 1
            assert ack(arena.conn, batch[0].batch_id) == 0
        done += ids(batch)
    tokens = [batch[0].batch_id for batch in holders.values() if batch]
    assert len(set(tokens)) == len(tokens)
    once(done, state.sent)


# -- an outcome and a take-over ------------------------------------------------


def say(how: str) -> Act:
    """Give all messages of the batch that is held an outcome."""

    def act(c: Connection, state: State) -> Any:
        if how == "ack":
            return ack(c, state.token)
        if how == "extend":
            return extend(c, state.token, "1 hour")
        if how == "set_visibility":
            return set_visibility(c, state.token, "1 hour")
        if how == "release":
            return release(c, state.token)
        if how == "nack":
            return {r[0]: r[2] for r in nack_ids(c, state.token, state.sent, "10 minutes", "x")}
        return outcome(
            c, "ack" if how == "ids" else "dead", state.token, state.sent, *(["x"] * (how == "dead"))
        )

    return act


def none_of_it_is_the_old_holders(arena: Arena, state: State, owned: list[int]) -> None:
    if owned:
        found = outcome(arena.conn, "ack", state.token, owned)
        assert set(found.values()) == {LOST}


@pair(lapsed, say("ack"), take_2("w2", 10), old="a")
def an_ack_meets_a_take_over(arena: Arena, state: State, a: Side, b: Side) -> None:
    owned = ids(kept(b))
    none_of_it_is_the_old_holders(arena, state, owned)
    done = set(state.sent) - set(owned) if a.says else set()
    once(finish(arena, kept(b)) + sorted(done) + ids(arena.rest(state.queue)), state.sent)


@pair(lapsed, say("ids"), take_2("w2", 10), old="a")
def an_ack_by_ids_meets_a_take_over(arena: Arena, state: State, a: Side, b: Side) -> None:
    none_of_it_is_the_old_holders(arena, state, ids(kept(b)))
    once(accepted(a) + finish(arena, kept(b)) + ids(arena.rest(state.queue)), state.sent)


@pair(lapsed, say("nack"), take_2("w2", 10), old="a")
def a_nack_meets_a_take_over(arena: Arena, state: State, a: Side, b: Side) -> None:
    none_of_it_is_the_old_holders(arena, state, ids(kept(b)))
    assert set(accepted(a)).isdisjoint(ids(kept(b)))
    done = finish(arena, kept(b))
    later = arena.rest(state.queue)
    assert {m.msg_id for m in later if m.retry_count == 1} == set(accepted(a))
    once(done + ids(later), state.sent)


@pair(lapsed, say("dead"), take_2("w2", 10), old="a")
def a_death_meets_a_take_over(arena: Arena, state: State, a: Side, b: Side) -> None:
    none_of_it_is_the_old_holders(arena, state, ids(kept(b)))
    assert sorted(dead_letters(arena.conn, state.queue)) == sorted(accepted(a))
    once(accepted(a) + finish(arena, kept(b)) + ids(arena.rest(state.queue)), state.sent)


@pair(lapsed, say("release"), take_2("w2", 10), old="a")
def a_release_meets_a_take_over(arena: Arena, state: State, a: Side, b: Side) -> None:
    none_of_it_is_the_old_holders(arena, state, ids(kept(b)))
    done = finish(arena, kept(b))
    later = arena.rest(state.queue)
    assert {m.receive_count for m in later} <= {2}
    once(done + ids(later), state.sent)


def says_what_is_still_held(arena: Arena, state: State, a: Side, b: Side) -> None:
    """What an old holder's words about a deadline promise while another takes over."""
    owned = ids(kept(b))
    none_of_it_is_the_old_holders(arena, state, owned)
    if a.committed:
        assert a.result == len(state.sent) - len(owned)
    if a.says:
        assert take(arena.conn, state.queue, "w3") == []
    once(finish(arena, kept(b)) + ids(arena.rest(state.queue)), state.sent)


@pair(lapsed, say("extend"), take_2("w2", 10), old="a")
def an_extension_meets_a_take_over_and_says_what_is_still_held(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    says_what_is_still_held(arena, state, a, b)


@pair(lapsed, say("set_visibility"), take_2("w2", 10), old="a")
def a_new_deadline_meets_a_take_over_and_says_what_is_still_held(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    says_what_is_still_held(arena, state, a, b)


def one_attempt(arena: Arena) -> State:
    """A lapsed batch of messages that had their only attempt."""
    queue = arena.new_queue(max_receive_attempts=1)
    sent = offer(arena.conn, queue, 3)
    return State(queue, sent, take(arena.conn, queue, "w1", timeout="1 microsecond"))


@pair(one_attempt, say("ids"), lambda c, s: value(c, "select pgque.maint_lapsed()"), old="a")
def an_ack_meets_the_judgement_of_maintenance(arena: Arena, state: State, a: Side, b: Side) -> None:
    dead = sorted(dead_letters(arena.conn, state.queue))
    assert set(accepted(a)).isdisjoint(dead)
    arena.rest(state.queue)
    once(accepted(a) + sorted(dead_letters(arena.conn, state.queue)), state.sent)


# -- two outcomes --------------------------------------------------------------


@pair(leased, say("nack"), say("ids"), old="ab")
def a_nack_and_an_ack_of_a_worker_give_each_message_one_outcome(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    assert set(accepted(a)).isdisjoint(accepted(b))
    later = arena.rest(state.queue)
    assert {m.msg_id for m in later if m.retry_count == 1} == set(accepted(a))
    once(accepted(b) + ids(later), state.sent)


@pair(leased, say("nack"), say("ack"), old="ab")
def a_nack_and_an_ack_of_the_whole_batch_give_each_message_one_outcome(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    done = set(state.sent) - set(accepted(a)) if b.says else set()
    if b.says:
        assert done
    once(sorted(done) + ids(arena.rest(state.queue)), state.sent)


@pair(leased, say("dead"), say("ids"), old="ab")
def a_death_and_an_ack_give_each_message_one_outcome(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert sorted(dead_letters(arena.conn, state.queue)) == sorted(accepted(a))
    once(accepted(a) + accepted(b) + ids(arena.rest(state.queue)), state.sent)


@pair(leased, say("ack"), old="ab")
def of_two_acks_of_a_worker_one_counts(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert (a.says or 0) + (b.says or 0) == min(1, a.committed + b.committed)
    once(ids(arena.rest(state.queue)), [] if a.says or b.says else state.sent)


@pair(leased, say("extend"), say("ack"), old="ab")
def an_extension_and_an_ack_leave_nothing_behind(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert b.says in (None, 1)
    once(ids(arena.rest(state.queue)), [] if b.says else state.sent)


@pair(leased, say("extend"), old="ab")
def two_extensions_both_add(arena: Arena, state: State, a: Side, b: Side) -> None:
    until = value(
        arena.conn,
        "select extract(epoch from w.lease_until - clock_timestamp()) / 3600 from pgque.list_workers(%s) as w",
        state.queue,
    )
    assert round(until) == 1 + a.committed + b.committed
    once(ids(arena.rest(state.queue)), state.sent)


@pair(leased, say("set_visibility"), say("nack"), old="ab")
def a_new_deadline_and_a_nack_lose_nothing(arena: Arena, state: State, a: Side, b: Side) -> None:
    later = arena.rest(state.queue)
    assert {m.msg_id for m in later if m.retry_count == 1} == set(accepted(b))
    once(ids(later), state.sent)


@pair(opened, lambda c, s: ack(c, s.token), old="ab")
def of_two_acks_of_a_consumer_one_counts(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert (a.says or 0) + (b.says or 0) == min(1, a.committed + b.committed)
    once(drain(arena.conn, state.queue), state.sent[2:] if a.says or b.says else state.sent)


def nack_first(c: Connection, state: State) -> bool | None:
    found: bool = nack_ids(c, state.token, state.sent[:1], "0", "x")[0][1]
    return found


@pair(opened, nack_first, lambda c, s: ack(c, s.token), old="ab")
def a_nack_and_an_ack_of_a_consumer_lose_nothing(arena: Arena, state: State, a: Side, b: Side) -> None:
    first = state.sent[:1]
    if a.committed and not a.result:
        assert b.says == 1
    if b.committed:
        assert b.result == 1
    elif a.says:
        assert ids(receive(arena.conn, state.queue)) == state.sent[1:2]
    done = state.sent[:2] if b.says else []
    back = first if a.says and b.says else []
    once(done + arena.rest_alone(state.queue), state.sent + back)


@pair(opened, nack_first, next_batch, old="ab")
def a_nack_and_a_receive_with_an_ack_of_a_consumer_lose_nothing(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    first = state.sent[:1]
    if a.committed and not a.result:
        assert b.committed
    if not b.committed and a.says:
        assert ids(receive(arena.conn, state.queue)) == state.sent[1:2]
    done = state.sent[:2] if b.committed else []
    back = first if a.says and b.committed else []
    once(done + arena.rest_alone(state.queue), state.sent + back)


@pair(opened, nack_first, old="ab")
def of_two_nacks_of_a_consumer_one_counts(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert bool(a.says) + bool(b.says) == min(1, a.committed + b.committed)
    assert ack(arena.conn, state.token) == 1
    back = state.sent[:1] if a.says or b.says else []
    once(arena.rest_alone(state.queue), state.sent[2:] + back)


# -- rotation ------------------------------------------------------------------


def spin(arena: Arena, work: Callable[[Connection, str], object]) -> State:
    """Three tables with events that are done with, and four messages to come in the current one."""
    queue = arena.new_queue("wheel", rotation_period="1 microsecond")
    conn = arena.conn
    for _ in range(9):
        offer(conn, queue, 2)
        work(conn, queue)
        forced_tick(conn, queue)
        work(conn, queue)
        sizes = [value(conn, "select pg_relation_size(%s)", leaf(conn, queue, n)) for n in range(3)]
        if 0 not in sizes:
            return State(queue, offer(conn, queue, 4))
        value(conn, "select pgque.maint_rotate_tables_step1(%s)", queue)
    raise AssertionError("the tables do not fill")


def full_wheel(arena: Arena) -> State:
    """A wheel of a consumer on its own."""
    return spin(arena, drain)


def full_wheel_pool(arena: Arena) -> State:
    """The same for a pool."""
    return spin(arena, work_off)


def wheel_of_a_held_batch(arena: Arena) -> State:
    """The same, and a worker holds them."""
    state = full_wheel_pool(arena)
    state.held = take(arena.conn, state.queue, "w1", timeout="1 hour")
    return state


def rotate_thrice(c: Connection, state: State) -> int:
    return sum(value(c, "select pgque.maint_rotate_tables_step1(%s)", state.queue) for _ in range(3))


def everything(arena: Arena, state: State) -> list[int]:
    """Receive it all, through as many rotations as come."""
    got: list[int] = []
    for _ in range(4):
        got += arena.rest_alone(state.queue)
        rotate_thrice(arena.conn, state)
        forced_tick(arena.conn, state.queue)
    return got


@pair(full_wheel, lambda c, s: send(c, s.queue), rotate_thrice, old="a")
def a_send_and_rotations_lose_no_message(arena: Arena, state: State, a: Side, b: Side) -> None:
    # What an open transaction of the old table holds up comes after it.
    assert tick(arena.conn, state.queue) is not None or not a.committed
    once(everything(arena, state), state.sent + ([a.result] if a.committed else []))


@pair(full_wheel, lambda c, s: send_many(c, s.queue, 3), rotate_thrice, old="a")
def a_batch_of_sends_and_rotations_lose_no_message(arena: Arena, state: State, a: Side, b: Side) -> None:
    once(everything(arena, state), state.sent + (a.says or []))


@pair(full_wheel, lambda c, s: receive(c, s.queue, count=2), rotate_thrice, old="a")
def a_receive_and_rotations_lose_no_message(arena: Arena, state: State, a: Side, b: Side) -> None:
    if a.committed:
        assert ids(a.result) == state.sent[:2]
        assert receive(arena.conn, state.queue, count=2) == a.result
    once(everything(arena, state), state.sent)


@pair(full_wheel, receive_and_ack, rotate_thrice, old="a")
def a_receive_with_its_ack_and_rotations_lose_no_message(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    once((a.says or []) + everything(arena, state), state.sent)


@pair(full_wheel_pool, take_2("w"), rotate_thrice)
def a_worker_and_rotations_lose_no_message(arena: Arena, state: State, a: Side, b: Side) -> None:
    rotate_thrice(arena.conn, state)
    assert ids(kept(a)) == (state.sent[:2] if a.committed else [])
    once(finish(arena, kept(a)) + ids(arena.rest(state.queue)), state.sent)


@pair(wheel_of_a_held_batch, say("nack"), rotate_thrice, old="a")
def a_nack_and_rotations_lose_no_message(arena: Arena, state: State, a: Side, b: Side) -> None:
    rotate_thrice(arena.conn, state)
    assert accepted(a) == (state.sent if a.committed else [])
    once(ids(arena.rest(state.queue)), state.sent)


@pair(wheel_of_a_held_batch, say("ack"), rotate_thrice, old="a")
def an_ack_and_rotations_agree(arena: Arena, state: State, a: Side, b: Side) -> None:
    if a.committed:
        assert a.result == 1
    rotate_thrice(arena.conn, state)
    once(ids(arena.rest(state.queue)), [] if a.committed else state.sent)


@pair(
    full_wheel,
    lambda c, s: value(c, "select pgque.subscribe(%s, 'late', 'earliest')", s.queue),
    rotate_thrice,
    old="a",
    allowed="PQ005",
)
def a_consumer_that_starts_at_the_oldest_tick_meets_a_rotation(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    rotate_thrice(arena.conn, state)
    if a.committed:
        assert a.result == 1
        assert set(state.sent) <= set(arena.rest_alone(state.queue, "late"))
    once(everything(arena, state), state.sent)


@pair(full_wheel, rotate_thrice)
def two_rotations_do_not_turn_too_far(arena: Arena, state: State, a: Side, b: Side) -> None:
    if a.committed and b.committed:
        # Up to the table that holds what is to come.
        assert a.result + b.result == 2
    once(everything(arena, state), state.sent)


# -- ticks ---------------------------------------------------------------------


def unticked(arena: Arena) -> State:
    """Two messages that no tick covers."""
    queue = arena.new_queue()
    state = State(queue, send_many(arena.conn, queue, 2))
    state.note = value(arena.conn, "select i.last_tick_id from pgque.get_queue_info(%s) as i", queue)
    return state


@pair(unticked, lambda c, s: tick(c, s.queue))
def of_two_ticks_one_covers_what_is_there(arena: Arena, state: State, a: Side, b: Side) -> None:
    made = [side.result for side in (a, b) if side.committed and side.result is not None]
    assert made == ([state.note + 1] if a.committed or b.committed else [])
    tick(arena.conn, state.queue)
    once(drain(arena.conn, state.queue), state.sent)


def force_and_tick(c: Connection, state: State) -> int | None:
    value(c, "select pgque.force_next_tick(%s)", state.queue)
    return tick(c, state.queue)


@pair(unticked, force_and_tick, lambda c, s: value(c, "select pgque.ticker()"))
def a_forced_tick_and_one_of_all_queues_follow_each_other(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    forced_tick(arena.conn, state.queue)
    once(drain(arena.conn, state.queue), state.sent)


def send_and_tick(c: Connection, state: State) -> int:
    sent = send(c, state.queue)
    value(c, "select pgque.force_next_tick(%s)", state.queue)
    tick(c, state.queue)
    return sent


@pair(unticked, send_and_tick, lambda c, s: tick(c, s.queue))
def a_send_with_a_tick_in_its_transaction_meets_a_tick(arena: Arena, state: State, a: Side, b: Side) -> None:
    got = drain(arena.conn, state.queue)
    forced_tick(arena.conn, state.queue)
    got += drain(arena.conn, state.queue)
    once(got, state.sent + ([a.result] if a.committed else []))


@pair(unticked, lambda c, s: send(c, s.queue), lambda c, s: tick(c, s.queue), old="a")
def a_send_and_a_tick_lose_no_message(arena: Arena, state: State, a: Side, b: Side) -> None:
    got = drain(arena.conn, state.queue)
    forced_tick(arena.conn, state.queue)
    got += drain(arena.conn, state.queue)
    once(got, state.sent + ([a.result] if a.committed else []))


@pair(unticked, lambda c, s: receive(c, s.queue), lambda c, s: tick(c, s.queue), old="a")
def a_receive_and_a_tick_lose_no_message(arena: Arena, state: State, a: Side, b: Side) -> None:
    tick(arena.conn, state.queue)
    if kept(a):
        assert receive(arena.conn, state.queue) == a.result
    once(drain(arena.conn, state.queue), state.sent)


# -- a queue that goes ---------------------------------------------------------


def unread(arena: Arena) -> State:
    """A queue without a consumer."""
    queue = arena.new_queue(subscribed=False)
    return State(queue, offer(arena.conn, queue, 2))


def drop(force: bool) -> Act:
    return lambda c, s: value(c, "select pgque.drop_queue(%s, %s)", s.queue, force)


def subscribe_late(c: Connection, state: State) -> int:
    result: int = value(c, "select pgque.subscribe(%s, 'c')", state.queue)
    return result


def is_there(arena: Arena, queue: str) -> bool:
    return bool(value(arena.conn, "select count(*) from pgque.queue as q where q.queue_name = %s", queue))


@pair(unread, subscribe_late, drop(False), old="ab", allowed="PQ001 PQ006 25000")
def a_queue_with_a_new_consumer_is_not_dropped(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert is_there(arena, state.queue) is not b.committed
    if a.committed:
        assert not b.committed
        (last,) = offer(arena.conn, state.queue, 1)
        once(drain(arena.conn, state.queue), [last])


@pair(unread, subscribe_late, drop(True), old="ab", allowed="PQ001")
def a_queue_goes_with_its_new_consumer(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert is_there(arena, state.queue) is not b.committed
    if a.committed and not b.committed:
        (last,) = offer(arena.conn, state.queue, 1)
        once(drain(arena.conn, state.queue), [last])


@pair(ready, lambda c, s: send(c, s.queue), drop(True), old="b", allowed="PQ001")
def a_queue_goes_with_what_was_sent_to_it(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert is_there(arena, state.queue) is not b.committed
    if not b.committed:
        tick(arena.conn, state.queue)
        once(drain(arena.conn, state.queue), state.sent + ([a.result] if a.committed else []))


@pair(ready, lambda c, s: receive(c, s.queue), drop(True), old="ab", allowed="PQ001 PQ011")
def a_queue_goes_while_a_consumer_receives(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert is_there(arena, state.queue) is not b.committed
    if not b.committed:
        once(drain(arena.conn, state.queue), state.sent)


@pair(ready, take_2("w"), drop(True), old="b", allowed="PQ001 PQ011")
def a_queue_goes_while_a_worker_receives(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert is_there(arena, state.queue) is not b.committed
    if not b.committed:
        once(finish(arena, kept(a)) + ids(arena.rest(state.queue)), state.sent)
    elif kept(a):
        assert ack(arena.conn, a.result[0].batch_id) == 0


@pair(leased, say("nack"), drop(True), old="ab")
def a_queue_goes_while_a_worker_fails_messages(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert is_there(arena, state.queue) is not b.committed
    if not b.committed:
        once(ids(arena.rest(state.queue)), state.sent)
    else:
        assert ack(arena.conn, state.token) == 0


@pair(leased, say("nack"), lambda c, s: value(c, "select pgque.unsubscribe(%s, 'c')", s.queue), old="ab")
def a_consumer_goes_while_a_worker_fails_messages(arena: Arena, state: State, a: Side, b: Side) -> None:
    if not b.committed:
        once(ids(arena.rest(state.queue)), state.sent)
        return
    assert ack(arena.conn, state.token) == 0
    assert value(arena.conn, "select pgque.drop_queue(%s, false)", state.queue) == 1


# -- dead letters --------------------------------------------------------------


@pair(buried, lambda c, s: value(c, "select pgque.dlq_requeue_all(%s)", s.queue), old="ab")
def two_requeues_of_all_give_each_dead_letter_back_once(arena: Arena, state: State, a: Side, b: Side) -> None:
    given = (a.says or 0) + (b.says or 0)
    left = len(dead_letters(arena.conn, state.queue))
    assert left + given == 3
    later = arena.rest(state.queue)
    assert {(m.receive_count, m.retry_count) for m in later} <= {(1, 0)}
    assert len(later) == given
    assert max(Counter(ids(later)).values(), default=1) == 1


@pair(buried, lambda c, s: value(c, "select pgque.dlq_requeue(%s)", s.note[0]), old="ab", allowed="PQ008")
def two_requeues_of_one_dead_letter_give_it_back_once(arena: Arena, state: State, a: Side, b: Side) -> None:
    given = [i for i in (a.says, b.says) if i is not None]
    assert len(given) <= 1
    once(ids(arena.rest(state.queue)), given)
    assert len(dead_letters(arena.conn, state.queue)) == 3 - len(given)


@pair(
    buried,
    lambda c, s: value(c, "select pgque.dlq_requeue(%s)", s.note[0]),
    lambda c, s: value(c, "select pgque.dlq_replay(%s)", s.note[0]),
    old="ab",
    allowed="PQ008",
)
def a_requeue_and_a_replay_of_one_dead_letter_send_one_message(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    given = [i for i in (a.says, b.says) if i is not None]
    assert len(given) <= 1
    once(ids(arena.rest(state.queue)), given)
    assert len(dead_letters(arena.conn, state.queue)) == 3 - len(given)


@pair(
    buried,
    lambda c, s: value(c, "select pgque.dlq_requeue_all(%s)", s.queue),
    lambda c, s: value(c, "select pgque.dlq_purge(%s, '0')", s.queue),
    old="ab",
)
def a_requeue_and_a_purge_of_dead_letters_count_each_once(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    left = len(dead_letters(arena.conn, state.queue))
    assert left + (a.says or 0) + (b.says or 0) == 3
    assert len(arena.rest(state.queue)) == (a.says or 0)


@pair(
    buried,
    lambda c, s: value(c, "select pgque.dlq_requeue_all(%s)", s.queue),
    lambda c, s: value(c, "select pgque.unsubscribe(%s, 'c')", s.queue),
    old="ab",
    allowed="PQ011",
)
def a_requeue_meets_the_end_of_its_consumer(arena: Arena, state: State, a: Side, b: Side) -> None:
    left = len(dead_letters(arena.conn, state.queue))
    assert left + (a.says or 0) == 3
    if not b.committed:
        assert len(arena.rest(state.queue)) == (a.says or 0)
        return
    value(arena.conn, "select pgque.dlq_purge(%s, '0')", state.queue)
    assert value(arena.conn, "select pgque.drop_queue(%s, false)", state.queue) == 1


def retrying(arena: Arena) -> State:
    """Two messages of a consumer that wait to be tried again, and it is read by offsets now."""
    state = opened(arena)
    nack_ids(arena.conn, state.token, ids(state.held), "1 hour", "x")
    assert ack(arena.conn, state.token) == 1
    once(drain(arena.conn, state.queue), state.sent[2:])
    value(arena.conn, "select pgque.retry_now(%s, 'c')", state.queue)
    value(arena.conn, "select pgque.open_stream(%s, 'c')", state.queue)
    return state


@pair(retrying, lambda c, s: pump(c))
def two_pumps_move_each_retry_once(arena: Arena, state: State, a: Side, b: Side) -> None:
    assert (a.says or 0) + (b.says or 0) <= 2
    once(arena.rest_alone(state.queue), state.sent[:2])


# -- keys ----------------------------------------------------------------------


def keyed(arena: Arena) -> State:
    """A message with a key, and nobody was given it."""
    queue = arena.new_queue("keyed")
    state = State(queue, [post(arena.conn, queue, "old", key="k")])
    tick(arena.conn, queue)
    return state


def keyed_pool(arena: Arena) -> State:
    """The same for a pool."""
    queue = arena.new_queue("keyed")
    offer(arena.conn, queue, 1)
    work_off(arena.conn, queue)
    state = State(queue, [post(arena.conn, queue, "old", key="k")])
    tick(arena.conn, queue)
    return state


def delayed_key(arena: Arena) -> State:
    """A delayed message with a key."""
    queue = arena.new_queue("keyed")
    return State(queue, [post(arena.conn, queue, "old", key="k", delay="1 hour")])


def replace(body: str) -> Act:
    return lambda c, s: post(c, s.queue, body, key="k")


def bodies(state: State, side: Side, body: str) -> list[tuple[int, str | None]]:
    """What is to be delivered after a send with the key."""
    (first,) = state.sent
    if not side.committed:
        return [(first, "old")]
    if side.result == first:
        return [(first, body)]
    return [(first, "old"), (side.result, body)]


def seen(batch: list[Message]) -> list[tuple[int, str | None]]:
    return [(m.msg_id, m.payload) for m in batch]


@pair(keyed_pool, replace("new"), take_2("w"), old="a")
def a_replacement_meets_a_hand_out_to_a_worker(arena: Arena, state: State, a: Side, b: Side) -> None:
    got = seen(kept(b))
    finish(arena, kept(b))
    got += seen(arena.rest(state.queue))
    assert sorted(got) == bodies(state, a, "new")


@pair(keyed, replace("new"), lambda c, s: receive(c, s.queue), old="ab")
def a_replacement_meets_a_receive(arena: Arena, state: State, a: Side, b: Side) -> None:
    got = seen(kept(b))
    if got:
        assert seen(receive(arena.conn, state.queue)) == got
        assert ack(arena.conn, b.result[0].batch_id) == 1
    arena.ahead("1 day")
    settle(arena.conn, state.queue)
    while batch := receive(arena.conn, state.queue):
        got += seen(batch)
        assert ack(arena.conn, batch[0].batch_id) == 1
        settle(arena.conn, state.queue)
    assert sorted(got) == bodies(state, a, "new")


@pair(keyed_pool, replace("a"), replace("b"), old="ab")
def of_two_replacements_the_last_is_delivered(arena: Arena, state: State, a: Side, b: Side) -> None:
    for side in (a, b):
        assert side.says in (None, state.sent[0])
    ((got, body),) = seen(arena.rest(state.queue))
    assert got == state.sent[0]
    assert body in ({s.name for s in (a, b) if s.committed} or {"old"})


@pair(
    keyed_pool,
    replace("new"),
    lambda c, s: value(c, "select pgque.purge_key(%s, 'k')", s.queue),
    old="a",
)
def a_replacement_meets_a_purge_of_its_key(arena: Arena, state: State, a: Side, b: Side) -> None:
    got = seen(arena.rest(state.queue))
    if not b.committed:
        assert got == [(state.sent[0], "new" if a.committed else "old")]
    elif a.committed and a.result != state.sent[0]:
        assert got == [(a.result, "new")]
    else:
        assert got == []


def pump_later(c: Connection, state: State) -> int:
    value(c, "select set_config('test.ahead', '2 hours', true)")
    return pump(c)


@pair(delayed_key, replace("new"), pump_later, old="a")
def a_replacement_meets_the_pump_that_moves_its_delayed_message(
    arena: Arena, state: State, a: Side, b: Side
) -> None:
    got = seen(arena.rest(state.queue))
    got += seen(arena.rest(state.queue))
    assert got == bodies(state, a, "new")


@pair(
    ready,
    lambda c, s: rows(c, "select * from pgque.send_idem(%s, 't', 'x', %s)", s.queue, f"k{s.sent[0]}")[0],
    old="ab",
)
def of_two_idempotent_sends_one_sends(arena: Arena, state: State, a: Side, b: Side) -> None:
    new = [side.result[0] for side in (a, b) if side.committed and not side.result[1]]
    same = {side.result[0] for side in (a, b) if side.committed}
    assert len(new) == len(same) == min(1, a.committed + b.committed)
    tick(arena.conn, state.queue)
    once(drain(arena.conn, state.queue), state.sent + new)


# -- the journal turns ---------------------------------------------------------


def turn(c: Connection, _: State) -> int:
    result: int = value(c, "select pgque.maint_tables()")
    return result


def bytes_of_the_other_leaf(arena: Arena) -> int:
    result: int = value(
        arena.conn,
        "select pgque._journal_size(1 - j.journal_cur) from pgque.journal as j",
    )
    return result


def before_turning(setup: Callable[[Arena], State]) -> Callable[[Arena], State]:
    """The next call of maintenance turns the journal."""

    def do(arena: Arena) -> State:
        state = setup(arena)
        for _ in range(5):
            if bytes_of_the_other_leaf(arena) == 0:
                break
            turn(arena.conn, state)
        assert bytes_of_the_other_leaf(arena) == 0
        return state

    do.__name__ = "before_turning"
    return do


def before_emptying(setup: Callable[[Arena], State]) -> Callable[[Arena], State]:
    """The journal has turned, and the next call of maintenance brings over what is in the old leaf."""

    def do(arena: Arena) -> State:
        state = before_turning(setup)(arena)
        turn(arena.conn, state)
        assert bytes_of_the_other_leaf(arena) > 0
        return state

    do.__name__ = "before_emptying"
    return do


def turned(arena: Arena) -> None:
    """Turn the journal all the way round."""
    for _ in range(4):
        value(arena.conn, "select pgque.maint_tables()")


def _journal_pairs() -> None:
    for when in (before_turning, before_emptying):

        @pair(when(ready), lambda c, s: receive(c, s.queue, count=2), turn, old="a", brief=True)
        def a_receive_while_the_journal_turns(
            arena: Arena, state: State, a: Side, b: Side, when: Callable[..., Any] = when
        ) -> None:
            if when is before_turning and b.committed and a.isolation == "read committed":
                assert b.result >= 1, "the journal did not turn"
            turned(arena)
            if a.committed:
                assert receive(arena.conn, state.queue, count=2) == a.result
            once(drain(arena.conn, state.queue), state.sent)

        @pair(when(opened), nack_first, turn, old="a", brief=True)
        def a_nack_of_a_consumer_while_the_journal_turns(
            arena: Arena, state: State, a: Side, b: Side
        ) -> None:
            turned(arena)
            assert a.says in (None, True)
            assert nack_ids(arena.conn, state.token, state.sent[:1], "0")[0][1] is not a.committed
            turned(arena)
            assert ack(arena.conn, state.token) == 1
            once(arena.rest_alone(state.queue), [*state.sent[2:], state.sent[0]])

        @pair(when(opened), lambda c, s: ack(c, s.token), turn, old="a", brief=True)
        def an_ack_of_a_consumer_while_the_journal_turns(
            arena: Arena, state: State, a: Side, b: Side
        ) -> None:
            turned(arena)
            assert a.says in (None, 1)
            assert ack(arena.conn, state.token) == int(not a.committed)
            once(drain(arena.conn, state.queue), state.sent[2:])

        @pair(when(opened), next_batch, turn, old="a", brief=True)
        def a_receive_with_an_ack_while_the_journal_turns(
            arena: Arena, state: State, a: Side, b: Side
        ) -> None:
            turned(arena)
            assert ack(arena.conn, state.token) == int(not a.committed)
            if a.committed:
                assert receive(arena.conn, state.queue, count=2) == a.result
            once(drain(arena.conn, state.queue), state.sent[2:])

        @pair(when(ready_pool), take_2("w"), turn, brief=True)
        def a_worker_while_the_journal_turns(arena: Arena, state: State, a: Side, b: Side) -> None:
            turned(arena)
            once(finish(arena, kept(a)) + ids(arena.rest(state.queue)), state.sent)

        @pair(when(leased), say("ack"), turn, old="a", brief=True)
        def an_ack_of_a_worker_while_the_journal_turns(arena: Arena, state: State, a: Side, b: Side) -> None:
            turned(arena)
            assert a.says in (None, 1)
            assert ack(arena.conn, state.token) == int(not a.committed)
            assert arena.rest(state.queue) == []

        def ack_first(c: Connection, state: State) -> dict[int, Any]:
            return outcome(c, "ack", state.token, state.sent[:1])

        @pair(when(leased), ack_first, turn, old="a", brief=True)
        def an_ack_by_id_while_the_journal_turns(arena: Arena, state: State, a: Side, b: Side) -> None:
            turned(arena)
            assert a.says in (None, {state.sent[0]: None})
            found = outcome(arena.conn, "ack", state.token, state.sent)
            assert [i for i, reason in found.items() if reason is not None] == (
                state.sent[:1] if a.committed else []
            )
            assert arena.rest(state.queue) == []

        @pair(when(leased), say("extend"), turn, old="a", brief=True)
        def an_extension_while_the_journal_turns(arena: Arena, state: State, a: Side, b: Side) -> None:
            turned(arena)
            assert a.says in (None, 3)
            arena.ahead("90 minutes")
            assert bool(take(arena.conn, state.queue, "w2")) is not a.committed
            once(ids(arena.rest(state.queue)), state.sent)

        @pair(when(lapsed), take_2("w2", 10), turn, brief=True)
        def a_take_over_while_the_journal_turns(arena: Arena, state: State, a: Side, b: Side) -> None:
            turned(arena)
            none_of_it_is_the_old_holders(arena, state, ids(kept(a)))
            once(finish(arena, kept(a)) + ids(arena.rest(state.queue)), state.sent)


_journal_pairs()


# -- purge and moving back -----------------------------------------------------


def purge(c: Connection, state: State) -> int:
    result: int = value(c, "select pgque.purge(%s)", state.queue)
    return result


@pair(ready_pool, take_2("w"), purge)
def a_worker_meets_a_purge(arena: Arena, state: State, a: Side, b: Side) -> None:
    mine = ids(kept(a))
    found = outcome(arena.conn, "ack", kept(a)[0].batch_id, mine) if mine else {}
    done = [i for i, reason in found.items() if reason is None]
    later = ids(arena.rest(state.queue))
    if b.committed:
        assert later == []
    else:
        once(done + later, state.sent)
    (last,) = offer(arena.conn, state.queue, 1)
    once(ids(arena.rest(state.queue)), [last])


@pair(leased, say("nack"), purge, old="a")
def a_nack_meets_a_purge(arena: Arena, state: State, a: Side, b: Side) -> None:
    later = ids(arena.rest(state.queue))
    if b.committed:
        # What was being said while it purged may stay.
        assert set(later) <= set(accepted(a))
        assert max(Counter(later).values(), default=1) == 1
    else:
        once(later, state.sent)
    (last,) = offer(arena.conn, state.queue, 1)
    once(ids(arena.rest(state.queue)), [last])


@pair(leased, say("ids"), purge, old="a")
def an_ack_meets_a_purge(arena: Arena, state: State, a: Side, b: Side) -> None:
    once(ids(arena.rest(state.queue)), [] if b.committed or accepted(a) else state.sent)
    assert ack(arena.conn, state.token) == 0


@pair(ready_pool, lambda c, s: send(c, s.queue), purge, old="a")
def a_send_meets_a_purge(arena: Arena, state: State, a: Side, b: Side) -> None:
    tick(arena.conn, state.queue)
    later = ids(arena.rest(state.queue))
    new = [a.result] if a.committed else []
    if b.committed:
        assert later in ([], new)
    else:
        once(later, state.sent + new)


@pair(ready, lambda c, s: receive(c, s.queue, count=2), purge, old="a")
def a_receive_of_a_consumer_meets_a_purge(arena: Arena, state: State, a: Side, b: Side) -> None:
    later = drain(arena.conn, state.queue)
    if not b.committed:
        once(later, state.sent)
    else:
        # One that received only afterwards has nothing, one before has lost its batch.
        assert later == []
        if kept(a):
            assert ack(arena.conn, a.result[0].batch_id) == 0


@pair(ready_pool, purge)
def two_purges_leave_a_queue_that_works(arena: Arena, state: State, a: Side, b: Side) -> None:
    (last,) = offer(arena.conn, state.queue, 1)
    kept_all = not (a.committed or b.committed)
    once(ids(arena.rest(state.queue)), [*(state.sent if kept_all else []), last])


def moved(arena: Arena) -> State:
    """A pool that holds one batch, has one waiting to be retried, and may be moved back to where it began."""
    queue = arena.new_queue()
    start = value(arena.conn, "select i.last_tick_id from pgque.get_queue_info(%s) as i", queue)
    sent = offer(arena.conn, queue, 4)
    nack_ids(arena.conn, take(arena.conn, queue, "w1", 1)[0].batch_id, sent[:1], "0", "x")
    held = take(arena.conn, queue, "w1", 2, "1 hour")
    return State(queue, sent, held, start)


def move_back(c: Connection, state: State) -> int:
    result: int = value(c, "select pgque.register_consumer_at(%s, 'c', %s)", state.queue, state.note)
    return result


@pair(moved, move_back, take_2("w2", 10), old="a", allowed="25000")
def a_pool_is_moved_back_while_a_worker_receives(arena: Arena, state: State, a: Side, b: Side) -> None:
    got = ids(state.held) + ids(kept(b))
    for batch in (state.held, kept(b)):
        if batch:
            assert ack(arena.conn, batch[0].batch_id) == 1
    got += ids(arena.rest(state.queue))
    assert set(got) == set(state.sent)
    if not a.committed:
        once(got, state.sent)


@pair(moved, move_back, lambda c, s: ack(c, s.token), old="ab", allowed="25000")
def a_pool_is_moved_back_while_a_worker_acks(arena: Arena, state: State, a: Side, b: Side) -> None:
    if b.committed:
        assert b.result == 1
    assert ack(arena.conn, state.token) == int(not b.committed)
    later = ids(arena.rest(state.queue))
    assert set(later) | set(ids(state.held)) == set(state.sent)
    if not a.committed:
        once(later + ids(state.held), state.sent)
