"""Does the record contradict what the engine promises? Each verdict names message, consumer and calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

from history import audit
from history.actors import KEYED, LOG, MAX_RECEIVES, MAX_RETRIES
from history.record import Call, Connection, Delivery, History, Outcome, Row, Sent

TOLERANCE = 0.05  # seconds between two readings of one clock
ASYNC_LOSS = 2.0  # seconds before a crash in which a commit that did not wait for the disk may be lost

ORDERED = ("plain_fast", "plain_slow", "plain_late", "plain_keys", "retries")
WHOLE = ("plain_fast", "plain_slow", "plain_late")  # their batches come again as they were
KEPT = ("once", "retries", "coop", "pool_once")  # they write into the table results
POOLS = ("pool", "pool_once", "pool_keys", "lanes", "pairs")
OF_KEYED = ("plain_keys", "pool_keys", "lanes", "pairs")

DEAD = "select c.co_name, d.ev_id, d.ev_data from pgque.dead_letter d join pgque.consumer c on c.co_id = d.dl_consumer_id"
WAITING = "from pgque.retry_queue r join pgque.queue q on q.queue_id = r.ev_queue where q.queue_name in ('history', 'keys')"


def rows(conn: Connection, query: str, *values: object) -> list[Row]:
    return conn.execute(query.encode(), values or None).fetchall()


def told(*things: object) -> str:
    flat = [t for thing in things for t in (thing if isinstance(thing, list) else [thing])]
    return "; ".join(str(thing) for thing in flat[:12]) or "nothing"


class Judge:
    """Goes through the record of a run."""

    def __init__(self, h: History, conn: Connection) -> None:
        self.h, self.conn = h, conn

    def arrived(self, sure: bool) -> dict[str, set[str]]:
        """What each consumer finished, one way or the other, by ident; if it must be sure, by the table of results."""
        h = self.h
        with h.lock:
            got = {name: set() if sure and name in KEPT else set(h.done[name]) for name in h.since}
        query = f"select consumer, msg_id, payload from results union all {DEAD}" if sure else DEAD
        for consumer, msg_id, payload in rows(self.conn, query):
            if consumer in got:
                got[consumer].add(h.ident(payload, msg_id))
        return got

    def missing(self, sure: bool = True) -> dict[str, list[str]]:
        """What was sent and has not arrived, by consumer."""
        h = self.h
        got = self.arrived(sure)
        with h.lock:
            sent = list(h.sent.values())
        found: dict[str, list[str]] = {}
        for queue in (LOG, KEYED):
            names = [name for name in got if (name in OF_KEYED) == (queue == KEYED)]
            # What one consumer got was committed, so all must get it.
            known = set().union(*(got[name] for name in names))
            needed: dict[str, float] = {}
            short: set[str] = set()
            for s in sent:
                if s.queue == queue and (s.key is None or s.id is not None):
                    ident = s.payload if s.key is None else f"{queue}#{s.id}"
                    if s.short:
                        short.add(ident)
                    elif s.fate == "committed" or ident in known:
                        needed[ident] = s.call.tx.begin
            for name in names:
                since = h.since[name]
                lost = [
                    i
                    for i, begin in needed.items()
                    if i not in got[name] and i not in short and begin >= since
                ]
                if lost:
                    found[name] = lost
        return found

    def unfinished(self, sure: bool) -> int:
        """How much is still to be waited for."""
        waiting: int = rows(self.conn, f"select count(*) {WAITING}")[0][0]
        return sum(len(lost) for lost in self.missing(sure).values()) + waiting

    def verdicts(self) -> Iterator[str]:
        self.prepare()
        yield from self.lost()
        for row in rows(
            self.conn,
            f"select ev_owner, ev_id, ev_data, ev_retry_after, ev_receives, ev_batch {WAITING} limit 3",
        ):
            yield f"left over in the retry queue: {row}"
        yield from self.requeued()
        yield from self.bodies()
        for name in self.h.deliveries:
            for rule in (
                self.results, self.never_committed, self.limits, self.times, self.after_ack, self.owners, self.exclusive
            ):  # fmt: skip
                yield from rule(name)
        for name in ORDERED:
            yield from self.order(name, lambda s: "" if s.due is None and s.key is None else None)
        for name in WHOLE:
            yield from self.contents(name)
        yield from self.order("lanes", lambda s: s.lane if s.due is None and s.key is None else None)
        yield from self.lanes("lanes")
        yield from self.crowds("pairs", 2)

    def prepare(self) -> None:
        """Sort out what is certain: deliveries that were committed, and not lost in a crash."""
        h = self.h
        h.clock.outlast(h.calls)
        self.firm: dict[str, list[Delivery]] = defaultdict(list)
        self.of: dict[str, dict[int, list[Delivery]]] = defaultdict(lambda: defaultdict(list))
        for name, deliveries in h.deliveries.items():
            for d in sorted(deliveries, key=lambda d: d.call.begin):
                if d.call.tx.fate == "committed" and not self.washed_out(d):
                    self.firm[name].append(d)
                    self.of[name][d.id].append(d)
        self.said: dict[str, dict[int, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
        for name, outcomes in h.outcomes.items():
            for o in outcomes:
                self.said[name][o.id].append(o)
        self.sends: dict[int, list[Sent]] = defaultdict(list)  # of a message with a key
        self.doubtful: set[str | None] = set()  # keys with a send of which nobody knows whether it counted
        for s in sorted((s for s in h.sent.values() if s.key is not None), key=lambda s: s.call.end):
            if s.fate == "unknown":
                self.doubtful.add(s.key)
            elif s.fate == "committed" and s.id is not None:
                self.sends[s.id].append(s)
        self.again: dict[str, set[int]] = defaultdict(set)
        for call, consumer, _, msg_id in h.requeues:
            if call.tx.fate != "rolled back":
                self.again[consumer].add(msg_id)
        self.dead: dict[str, set[int]] = defaultdict(set)
        for consumer, msg_id, _ in rows(self.conn, DEAD):
            self.dead[consumer].add(msg_id)
        self.kept: dict[str, Counter[int]] = defaultdict(Counter)
        for consumer, msg_id in rows(self.conn, "select consumer, msg_id from results"):
            self.kept[consumer][msg_id] += 1

    def washed_out(self, d: Delivery) -> bool:
        crashes = self.h.crashes if d.relaxed else []
        return any(d.call.end - 0.1 < end and d.call.end > begin - ASYNC_LOSS for begin, end in crashes)

    def handed_out(self, name: str, o: Outcome) -> Delivery | None:
        return next((d for d in self.of[name][o.id] if d.batch == o.batch), None)

    def alive(self, d: Delivery, until: float) -> bool:
        """Whether the lease of a delivery had certainly not ended at that time."""
        if d.lease is None:
            return True
        end = self.h.clock.lowest(d.call.begin, d.call.end) + d.lease
        return self.h.clock.highest(d.call.begin, until) < end - TOLERANCE

    def certain(self, name: str, o: Outcome) -> bool:
        """Whether this finished the message for good: it was said so, or the answer was lost on the way (an ack that
        went with a receive has none) and the lease lived."""
        if o.what != "ack" or o.call.tx.fate != "committed" or o.ok is False:
            return False
        d = self.handed_out(name, o)
        return o.ok is True or (o.whole and d is not None and self.alive(d, o.call.tx.end))

    def lost(self) -> Iterator[str]:
        """Every committed message is delivered, and finished, by every consumer."""
        for name, lost in self.missing().items():
            sent = self.h.sent.get(lost[0]) or next(
                s for s in self.h.sent.values() if lost[0] == f"{s.queue}#{s.id}"
            )
            seen = [d for d in self.h.deliveries[name] if lost[0] == self.h.ident(d.payload, d.id)]
            ids = {d.id for d in seen}
            said = [o for i in ids for o in self.said[name][i]]
            self.h.trail += [line for i in ids | {sent.id or 0} for line in audit.trail(self.conn, i)]
            yield f"{name}: {len(lost)} messages never arrived, such as {sent} (id {sent.id or ids}); seen: {told(seen, said)}"

    def results(self, name: str) -> Iterator[str]:
        """Exactly once into the table; what was acked is no dead letter."""
        twice = [i for i, count in self.kept[name].items() if count + (i in self.dead[name]) > 1]
        for i in twice[:3]:
            what = f"{self.kept[name][i]} times{' and is a dead letter' * (i in self.dead[name])}"
            yield f"{name}: {i} was worked off {what}: {told(self.of[name][i], self.said[name][i])}"
        for i in self.dead[name]:
            for o in self.said[name][i]:
                if self.certain(name, o):
                    yield f"{name}: {i} is a dead letter after {o}"
                    return

    def never_committed(self, name: str) -> Iterator[str]:
        """What was rolled back is seen by nobody, not even in a transaction that is rolled back."""
        for d in self.h.deliveries[name]:
            sent = self.h.sent.get(d.payload)
            if sent is None or sent.fate == "rolled back":
                yield f"{name}: {d.payload}, never committed ({sent}), arrived in {d}"
                return

    def limits(self, name: str) -> Iterator[str]:
        for d in self.h.deliveries[name]:
            if d.retries > MAX_RETRIES or (d.lease is not None and d.receives > MAX_RECEIVES):
                yield f"{name}: {d.payload} has more than {MAX_RETRIES} retries or {MAX_RECEIVES} receives: {d}"
                return
        for i, seen in self.of[name].items():
            number, counted = len({d.batch for d in seen}), max(d.receives for d in seen)
            if name in POOLS and number > counted and i not in self.again[name] and not self.h.crashes:
                yield f"{name}: {i} was delivered {number} times and counts {counted}: {told(seen)}"
                return

    def times(self, name: str) -> Iterator[str]:
        """Nothing comes before it is due, and nothing after it expired."""
        clock = self.h.clock
        for d in self.firm[name]:
            sent = self.h.sent[d.payload]
            if sent.key is not None:
                # The send that made the message counts; others of its key only change the body.
                sent = sent if sent.key in self.doubtful or d.id not in self.sends else self.sends[d.id][0]
            known = sent.key is None or sent.key not in self.doubtful
            if (
                known
                and sent.due is not None
                and clock.highest(sent.call.begin, d.call.end) < sent.due - TOLERANCE
            ):
                yield f"{name}: {d.payload} was due at {sent.due} ({sent}) and came before in {d}"
                return
            if (
                d.fresh
                and d.expires is not None
                and clock.lowest(d.call.begin, d.call.end) > d.expires + TOLERANCE
            ):
                yield f"{name}: {d.payload} expired at {d.expires} ({sent}) and came afterwards in {d}"
                return

    def after_ack(self, name: str) -> Iterator[str]:
        """A message whose ack was confirmed does not come again, and was nobody else's."""
        for i, outcomes in self.said[name].items():
            for o in outcomes:
                if not self.certain(name, o):
                    continue
                first = self.handed_out(name, o)
                for d in self.of[name][i]:
                    if d.call.begin > o.call.tx.end:
                        yield f"{name}: {d.payload} came again after its ack: {told(o, d)}"
                        return
                    later = first is not None and d.batch != o.batch and d.call.begin > first.call.end
                    if later and name in POOLS and o.ok and d.call.tx.end < o.call.begin:
                        yield f"{name}: {d.payload} was acked under a batch id that had lost it: {told(first, d, o)}"
                        return

    def owners(self, name: str) -> Iterator[str]:
        """A batch id has one owner, and an ack of it succeeds once."""
        owner: dict[int, Delivery] = {}
        for d in self.h.deliveries[name]:
            other = owner.setdefault(d.batch, d) if d.call.tx.fate == "committed" else d
            if other.owner != d.owner or (name in POOLS and other.call is not d.call):
                yield f"{name}: batch id {d.batch} was handed out twice: {told(other, d)}"
                return
        acked: dict[int, Outcome] = {}
        for o in self.h.outcomes[name]:
            # Of a lease, the part that lapsed and the rest may be acked by two calls.
            good = (
                o.whole and o.ok and o.what == "ack" and o.call.tx.fate == "committed" and name not in POOLS
            )
            if good and acked.setdefault(o.batch, o).call is not o.call:
                yield f"{name}: batch {o.batch} was acked twice: {told(acked[o.batch], o)}"
                return

    def order(self, name: str, group: Callable[[Sent], str | None]) -> Iterator[str]:
        """First deliveries are in the order in which a session sent."""
        newest: dict[tuple[str, str], tuple[int, Delivery]] = {}
        known: set[int] = set()
        for d in self.firm[name]:
            session, number = self.h.sent[d.payload].order
            lane = group(self.h.sent[d.payload])
            if d.id in known or lane is None:
                continue
            known.add(d.id)
            before = newest.get((session, lane))
            # Of two calls at one moment nobody knows which was first.
            if before is not None and number < before[0] and before[1].call.end <= d.call.begin:
                yield f"{name}: {d.payload} in {d} after {before[1].payload} in {before[1]}"
                return
            newest[session, lane] = (number, d)

    def contents(self, name: str) -> Iterator[str]:
        """A batch comes in the order of ids, and again as it was."""
        batches: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for d in self.h.deliveries[name]:
            batches[d.batch][d.call.n].append(d.id)
        for batch, calls in batches.items():
            first = next(iter(calls.values()))
            if any(a >= b for a, b in pairwise(first)) or any(ids != first for ids in calls.values()):
                yield f"{name}: batch {batch} is not in the order of ids, or changed its messages: {dict(calls)}"
                return

    def exclusive(self, name: str) -> Iterator[str]:
        """Nobody gets a message while the lease of another lives."""
        for i, seen in self.of[name].items() if name in POOLS else ():
            for one, two in pairwise(seen):
                if (
                    one.batch == two.batch
                    or one.call.end > two.call.begin
                    or not self.alive(one, two.call.end)
                ):
                    continue
                said = [o for o in self.said[name][i] if o.said and o.batch == one.batch]
                if not any(o.call.begin < two.call.end for o in said):
                    yield f"{name}: {one.payload} was handed out while its lease lived: {told(one, two)}"
                    return

    def lanes(self, name: str) -> Iterator[str]:
        """Keyed order: one message of a key at a time, and a message that was out holds its key back."""
        h = self.h
        out: dict[str, dict[int, Delivery]] = defaultdict(
            dict
        )  # by key, messages that were out and are not finished
        for d in self.firm[name]:
            lane = h.sent[d.payload].lane
            if lane is None:
                continue
            for other in [o for o in out[lane].values() if o.id != d.id and o.call.end < d.call.begin]:
                said = [o for o in self.said[name][other.id] if o.said and o.call.begin < d.call.end]
                finished = other.id in self.dead[name] | self.again[name] or any(
                    o.what in ("ack", "dead") for o in said
                )
                if (
                    other.expires is not None
                    and h.clock.highest(other.call.begin, d.call.end) > other.expires - TOLERANCE
                ):
                    finished = True
                if finished:
                    del out[lane][other.id]
                elif other.id < d.id:
                    yield f"{name}: {d.payload} overtook {other.payload} of key {lane}: {told(other, d)}; said: {told(said)}"
                    return
                elif self.alive(other, d.call.end) and not any(o.batch == other.batch for o in said):
                    yield f"{name}: {d.payload} and {other.payload} of key {lane} are out at once: {told(other, d)}"
                    return
            out[lane][d.id] = d

    def crowds(self, name: str, limit: int) -> Iterator[str]:
        """key_concurrency: so many messages of a key are leased at a time."""
        out: dict[str, dict[int, Delivery]] = defaultdict(dict)  # by key
        for d in self.firm[name]:
            lane = self.h.sent[d.payload].lane
            if lane is None:
                continue
            others = [
                o
                for o in out[lane].values()
                if o.id != d.id and (o.call is d.call or o.call.end < d.call.begin)
            ]
            for other in list(others):
                said = [o for o in self.said[name][other.id] if o.said and o.call.begin < d.call.end]
                done = other.id in self.dead[name] | self.again[name]
                if done or not self.alive(other, d.call.end) or any(o.batch == other.batch for o in said):
                    others.remove(other)
            if len(others) >= limit:
                yield f"{name}: too many messages of key {lane} are out at once: {told(*others, d)}"
                return
            out[lane][d.id] = d

    def bodies(self) -> Iterator[str]:
        """With a key: the last body that was committed before the first hand-out is what everybody gets."""
        seen: dict[int, Delivery] = {}
        for name in OF_KEYED:
            for d in self.firm[name]:
                sent = self.h.sent[d.payload]
                if sent.key is None:
                    continue
                first = seen.setdefault(d.id, d)
                if first.payload != d.payload:
                    yield f"message {d.id} of key {sent.key} has two bodies: {told(first.payload, first, d.payload, d)}"
                    return
                for later in self.sends[d.id]:
                    same = later.call.tx is sent.call.tx
                    if later.call.begin > (sent.call.end if same else sent.call.tx.end):
                        yield f"{name}: {d.payload} in {d}, but key {sent.key} was given {later}"
                        return

    def requeued(self) -> Iterator[str]:
        taken: dict[int, Call] = {}
        for call, consumer, dl_id, msg_id in self.h.requeues:
            if call.tx.fate == "committed" and taken.setdefault(dl_id, call) is not call:
                yield f"{consumer}: dead letter {dl_id} of {msg_id} was requeued twice: {told(taken[dl_id], call)}"
                return
