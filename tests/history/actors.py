"""Those who send, receive, work, maintain and look."""

from __future__ import annotations

import random
import time
from typing import Any

import psycopg

from history.record import COLUMNS, Delivery, History, Sent, Session

LOG, KEYED, OTHER = "history", "keys", "other"  # the queues
MAX_RETRIES = 3
MAX_RECEIVES = 6
POISON = 37  # every so many messages of a producer fail always
KEYS = 8

OLD = ("repeatable read", "repeatable read", "repeatable read", "serializable")


def level(rng: random.Random, old: float = 0.3) -> str:
    return rng.choice(OLD) if rng.random() < old else "read committed"


def amount(h: History, rng: random.Random) -> int:
    return rng.randint(1, 50) if h.producing.is_set() else 300


# --- those who send -------------------------------------------------------------------------------


SEND = """
    select pgque.send(%s, 't', %s::text, key => %s, deliver_at => d.due, ttl => %s::interval, partition_key => %s),
      extract(epoch from d.due)::float8
    from (select pgque.clock() + %s * interval '1 ms' as due offset 0) as d"""


class Producer:
    """Sends to one queue, in transactions of every kind."""

    def __init__(self, h: History, name: str, rng: random.Random, queue: str) -> None:
        self.h, self.rng, self.queue = h, rng, queue
        self.session = Session(h, name, rng)
        self.bursts = 0
        self.open: list[Sent] = []  # by the transaction that is open

    def loop(self) -> None:
        while self.h.producing.is_set():
            self.open = []
            with self.h.survive(self.session.name):
                self.session.ready()
                self.step()
            time.sleep(self.rng.random() * 0.06)

    def step(self) -> None:
        rng, session = self.rng, self.session
        if rng.random() < 0.5:
            self.send()
            return
        session.begin(level(rng, 0.4))
        session.run("select 1 from pgque.queue")
        long = rng.random() < 0.15
        for _ in range(rng.randint(1, 4)):
            time.sleep(rng.random() * (0.8 if long else 0.01))
            if rng.random() < 0.3:
                session.run("savepoint s")
                before = len(self.open)
                self.send()
                if rng.random() < 0.5:
                    session.run("rollback to s")
                    for sent in self.open[before:]:
                        sent.cancelled = True
            else:
                self.send()
        (session.rollback if rng.random() < 0.2 else session.commit)()

    def note(self, call: Any, count: int, **options: Any) -> list[Sent]:
        new = [Sent(self.session.payload(), call, self.queue, **options) for _ in range(count)]
        with self.h.lock:
            self.h.sent.update((sent.payload, sent) for sent in new)
        self.open += new
        return new

    def send(self) -> None:
        if self.rng.random() < (0.75 if self.queue == KEYED else 0.15):
            self.send_with_options()
        else:
            self.send_plain()

    def send_plain(self) -> None:
        rng, session = self.rng, self.session
        kind = rng.random()
        if session.number >= 60 and self.queue == LOG and (self.bursts == 0 or kind > 0.997):
            self.bursts += 1
            call, count = session.note("send_batch of 1500"), 1500  # a window that needs a map
        else:
            count = 1 if kind < 0.5 else rng.randint(1, 40)
            call = session.note(f"send of {count}")
        new = self.note(call, count)
        texts = [sent.payload for sent in new]
        bulk = 1 < count < 1500
        if bulk and kind > 0.9:
            query = "insert into pgque.sink_bulk (queue, payload) select %s, t from unnest(%s::text[]) as t"
            session.make(call, query, self.queue, texts)
        elif bulk and kind > 0.85:
            session.perform(call, lambda: session.copy(self.queue, texts))
        elif count > 1:
            found = session.make(call, "select pgque.send_batch(%s, 't', %s::text[])", self.queue, texts)
            for sent, msg_id in zip(new, found[0][0], strict=True):
                sent.id = msg_id
        else:
            new[0].id = session.make(call, "select pgque.send(%s, %s::text)", self.queue, texts[0])[0][0]

    def send_with_options(self) -> None:
        rng, session = self.rng, self.session
        key = lane = ttl = delay = None
        burst = 1
        dice = rng.random()
        if self.queue == KEYED and dice < 0.55:
            key = lane = f"k{rng.randrange(KEYS)}"
            burst = rng.choice([1, 1, 2, 3, 4])
        elif dice < 0.75:
            lane = f"k{rng.randrange(KEYS)}"
        if self.queue == KEYED and rng.random() < 0.2:
            ttl = rng.choice(["80 ms", "400 ms", "1 hour"])
        if rng.random() < (0.1 if key else 0.4):
            delay = rng.choice([50, 200, 600])
        for _ in range(burst):
            call = session.note(f"send (key {key}, partition key {lane}, ttl {ttl}, delay {delay})")
            (sent,) = self.note(call, 1, key=key, lane=lane, short=ttl not in (None, "1 hour"))
            args = (self.queue, sent.payload, key, ttl, None if key else lane, delay)
            sent.id, sent.due = session.make(call, SEND, *args)[0]


def produce(h: History, rng: random.Random, name: str, queue: str) -> None:
    Producer(h, name, rng, queue).loop()


# --- those who receive whole batches --------------------------------------------------------------

RECEIVE = f"{COLUMNS} from pgque.receive(%s, %s, %s)"
RECEIVE_AND_ACK = f"{COLUMNS} from pgque.receive(%s, %s, %s, ack_batch => %s)"
RECEIVE_COOP = f"{COLUMNS} from pgque.receive_coop(%s, %s, %s, %s, '300 ms')"


def consume_plain(h: History, rng: random.Random, name: str, queue: str, pace: float) -> None:
    """Autocommit: receive, sometimes crash, ack, alone or with the next receive."""
    session = Session(h, name, rng)
    known: set[int] = set()
    last: list[Delivery] = []  # to be acked with the next receive
    unsure = False  # whether a receive whose answer is lost may have opened the batch
    while h.running.is_set():
        with h.survive(name):
            session.ready()
            if name not in h.since:
                session.run("select pgque.subscribe(%s, %s, 'latest')", queue, name)
                h.since[name] = time.monotonic()
            sure, unsure = not unsure, True
            args = (queue, name, amount(h, rng), last[0].batch if last else None)
            batch = session.receive(name, f"receive({name})", RECEIVE_AND_ACK, *args, finish=last)
            unsure, last = False, []
            if not batch:
                time.sleep(0.02)
                continue
            for d in batch:
                d.fresh = sure and d.batch not in known
            known.add(batch[0].batch)
            if h.producing.is_set():
                if rng.random() < 0.05:
                    session.crash()
                    continue
                time.sleep(rng.random() * pace)
            if rng.random() < 0.5:
                last = batch
                continue
            try:
                session.say_all(name, "ack", batch)
                h.finished(name, batch)
            except psycopg.Error:
                if session.doubtful():
                    h.finished(name, batch)
                raise


def keep(session: Session, consumer: str, batch: list[Delivery]) -> None:
    query = "insert into results select %s, * from unnest(%s::bigint[], %s::text[])"
    session.run(query, consumer, [d.id for d in batch], [d.payload for d in batch])


def fails(payload: str, rng: random.Random, rate: float = 0.05) -> bool:
    return int(payload.rpartition(":")[2]) % POISON == 0 or rng.random() < rate


def consume(h: History, rng: random.Random, name: str, consumer: str, queue: str) -> None:
    """Work and ack in one transaction, partly with old snapshots: one that shares its consumer with another
    session (once), one that fails messages (retries), a subconsumer that may be silent for long (coop)."""
    session = Session(h, name, rng)
    while h.running.is_set():
        with h.survive(name):
            session.ready()
            isolation = level(rng, 0.4) if consumer == "once" else "read committed"
            inside = consumer == "once" and rng.random() < 0.5
            ask: tuple[Any, ...] = (f"receive({consumer})", RECEIVE, queue, consumer, amount(h, rng))
            if consumer == "coop":
                ask = (f"receive_coop({consumer})", RECEIVE_COOP, queue, consumer, name, amount(h, rng))
            owner = name if consumer == "coop" else consumer
            batch = [] if inside else session.receive(consumer, *ask, owner=owner, fresh=False)
            bad = [d for d in batch if consumer != "once" and fails(d.payload, rng)]
            early = rng.random() < 0.5
            if bad and early:
                session.say(consumer, "nack", bad, rng.choice([0, 0, 20, 200]))
            if h.producing.is_set() and batch:
                if rng.random() < 0.08:
                    session.crash()  # what was nacked is settled, the rest comes again
                    continue
                if consumer == "coop" and rng.random() < 0.05:
                    time.sleep(0.6)
            session.begin(isolation)
            if isolation in OLD:
                session.run("select 1")
                time.sleep(rng.random() * 0.1)
            if inside:
                batch = session.receive(consumer, *ask, fresh=False)
            if not batch:
                session.rollback()
                time.sleep(0.02)
                continue
            if bad and not early:
                session.say(consumer, "nack", bad, rng.choice([0, 0, 20, 200]))
            rest = [d for d in batch if d not in bad]
            keep(session, consumer, rest)
            if rest and session.say_all(consumer, "ack", rest) != 1:
                session.rollback()
                h.count("ack 0")
                continue
            session.commit()
            h.finished(consumer, rest)


# --- workers --------------------------------------------------------------------------------------

TAKE = f"{COLUMNS} from pgque.receive(%s, %s, %s, worker => %s, visibility_timeout => %s * interval '1 s', ack_batch => %s)"


class Worker:
    """One of a pool: leases, outcomes message by message, silence, death."""

    def __init__(self, h: History, rng: random.Random, name: str, consumer: str, queue: str) -> None:
        self.h, self.rng, self.consumer, self.queue = h, rng, consumer, queue
        self.session = Session(h, name, rng)
        self.last: list[Delivery] = []  # to be acked with the next receive

    def take(self) -> list[Delivery]:
        rng, session = self.rng, self.session
        lease = rng.choice([0.3, 0.5, 1.0])
        count = rng.choice([1, 3, 10, 50] if self.h.producing.is_set() else [10, 100])
        token = self.last[0].batch if self.last else None
        what = f"receive({self.consumer}, {count}, {lease} s)"
        relaxed = rng.random() < 0.5 and session.tx is None
        session.relax(relaxed)
        args = (self.queue, self.consumer, count, session.name, lease, token)
        try:
            batch = session.receive(
                self.consumer,
                what,
                TAKE,
                *args,
                owner=session.name,
                finish=self.last,
                lease=lease,
                relaxed=relaxed,
            )
        finally:
            session.relax(False)
        self.last = []
        return batch

    def loop(self) -> None:
        while self.h.running.is_set():
            with self.h.survive(self.session.name):
                self.session.ready()
                batch = self.take()
                if batch:
                    self.work(batch)
                else:
                    time.sleep(0.02)

    def work(self, batch: list[Delivery]) -> None:
        rng, session, h = self.rng, self.session, self.h
        calm = not h.producing.is_set()
        poison = [d for d in batch if int(d.payload.rpartition(":")[2]) % (2 * POISON) == 0]
        if poison and len(batch) <= 3 and rng.random() < 0.5:
            return  # died of it
        if not calm and rng.random() < 0.04:
            if rng.random() < 0.5:
                session.crash()
            return
        if rng.random() < 0.08:
            how = rng.choice(["extend", "extend", "set_visibility"])
            session.say_all(self.consumer, how, batch, rng.choice([100, 400]))
        if not calm and rng.random() < 0.05:
            time.sleep(rng.random() * 1.2)  # perhaps beyond the lease
        left = list(batch)
        lanes = self.consumer == "lanes"  # a failed message holds its key back: let there be many
        bad = [d for d in batch if fails(d.payload, rng, 0.25 if lanes and not calm else 0.05)]
        if bad:
            session.say(self.consumer, "nack", bad, rng.choice([0, 200, 400] if lanes else [0, 0, 20, 200]))
            left = [d for d in left if d not in bad]
        if left and rng.random() < 0.02:
            session.say(self.consumer, "dead", left[:1], "given up")
            left = left[1:]
        if left and not calm and rng.random() < 0.05:
            some = left[: rng.randint(1, len(left))]
            call = session.said(self.consumer, "release", some, False)[0].call
            session.make(call, "select pgque.release(%s, %s::bigint[])", some[0].batch, [d.id for d in some])
            left = [d for d in left if d not in some]
        if not left:
            return
        if rng.random() < 0.4:
            some = left[: rng.randint(1, len(left))]
            self.ack(some, whole=False)
            left = [d for d in left if d not in some]
        if left and not calm and rng.random() < 0.3 and len(left) == len(batch):
            self.last = left
        elif left and (calm or rng.random() < 0.9 or len(left) == len(batch)):
            self.ack(left, whole=True)

    def ack(self, batch: list[Delivery], whole: bool) -> None:
        """An ack; one whose answer is lost may have counted."""
        session, old = self.session, self.rng.random() < 0.2
        session.last = None
        try:
            if old:
                session.begin(self.rng.choice(OLD))
                session.run("select 1")
            if whole:
                settled = [d.id for d in batch] if session.say_all(self.consumer, "ack", batch) else []
            else:
                settled = session.say(self.consumer, "ack", batch)
            if old:
                session.commit()
        except psycopg.Error:
            if session.doubtful():
                self.h.finished(self.consumer, batch)
            raise
        self.h.finished(self.consumer, [d for d in batch if d.id in settled])


class CarefulWorker(Worker):
    """Writes its results in the transaction of its ack."""

    def work(self, batch: list[Delivery]) -> None:
        rng, session = self.rng, self.session
        bad = [d for d in batch if fails(d.payload, rng)]
        good = [d for d in batch if d not in bad]
        if self.h.producing.is_set():
            if rng.random() < 0.04:
                session.crash()
                return
            if rng.random() < 0.08:
                time.sleep(rng.random() * 1.2)
        session.begin(level(rng))
        if bad:
            session.say(self.consumer, "nack", bad, rng.choice([0, 20]))
        settled = session.say(self.consumer, "ack", good) if good else []
        keep(session, self.consumer, [d for d in good if d.id in settled])
        if rng.random() < 0.05:
            session.rollback()
        else:
            session.commit()
            self.h.finished(self.consumer, [d for d in good if d.id in settled])


def work(h: History, rng: random.Random, name: str, consumer: str, queue: str) -> None:
    kind = CarefulWorker if consumer == "pool_once" else Worker
    kind(h, rng, name, consumer, queue).loop()


# --- those who maintain, operate, look and pass by -------------------------------------------------


def loop(h: History, rng: random.Random, name: str) -> None:
    session = Session(h, name, rng)
    while h.running.is_set():
        with h.survive(name):
            session.ready()
            session.run("call pgque.ticker_loop('2 s')")


def maintain(h: History, rng: random.Random, name: str) -> None:
    session = Session(h, name, rng)
    while h.running.is_set():
        with h.survive(name):
            session.ready()
            dice = rng.random()
            if dice < 0.2:
                session.begin()
                session.run("select pgque.maint()")
                time.sleep(rng.random() * 0.1)
                session.run(rng.choice(["commit", "rollback"]))
            elif dice < 0.3:
                session.run("select pgque.maint_retry_events()")
            elif dice < 0.35:
                session.run("select pgque.expire_messages(%s)", rng.choice([LOG, KEYED]))
            else:
                query = "select pgque.maint_rotate_tables_step1(%s)"
                h.count("rotations", session.run(query, rng.choice([LOG, LOG, KEYED]))[0][0])
        time.sleep(rng.random() * 0.12)


def turn(h: History, rng: random.Random, name: str) -> None:
    """Compact the journal of positions all the time; set_up() lets it turn at a few kilobytes."""
    session = Session(h, name, rng)
    turned = None
    while h.running.is_set():
        with h.survive(name):
            session.ready()
            session.run("select pgque.maint_tables()")
            before, turned = turned, session.run("select j.journal_flipped_at::text from pgque.journal j")
            h.count("journal turns", before not in (None, turned))
        time.sleep(rng.random() * 0.1)


def requeue(h: History, rng: random.Random, name: str) -> None:
    """One of two who give dead letters back; they may choose the same one."""
    session = Session(h, name, rng)
    while h.producing.is_set():
        with h.survive(name):
            session.ready()
            found = session.run(
                "select dl_id, ev_id, consumer_name from pgque.dlq_inspect(%s, 10)", rng.choice([LOG, KEYED])
            )
            for dl_id, msg_id, consumer in found[: rng.randint(0, 3)]:
                call = session.note(f"dlq_requeue({dl_id}) of {msg_id}")
                with h.lock:
                    h.requeues.append((call, consumer, dl_id, msg_id))
                session.make(call, "select pgque.dlq_requeue(%s)", dl_id)
                h.count("requeues")
        time.sleep(rng.random() * 0.3)


LOOKS = (
    "select * from pgque.list_messages(%s)",
    "select * from pgque.list_workers(%s)",
    "select * from pgque.list_poison(%s)",
    "select * from pgque.peek(%s)",
    "select * from pgque.dlq_inspect(%s)",
    "select * from pgque.get_queue_info(%s)",
    "select * from pgque.get_consumer_info(%s)",
    "select pgque.metrics() where %s <> ''",
    "select pgque.health() where %s <> ''",
    "select pgque.status() where %s <> ''",
)


def look(h: History, rng: random.Random, name: str) -> None:
    session = Session(h, name, rng)
    while h.producing.is_set():
        with h.survive(name):
            session.ready()
            session.run(rng.choice(LOOKS), rng.choice([LOG, KEYED]))
            if rng.random() < 0.1:
                session.run("select pgque.pause(%s)", KEYED)
                time.sleep(rng.random() * 0.1)
                session.run("select pgque.resume(%s)", KEYED)
        time.sleep(rng.random() * 0.2)


def pass_by(h: History, rng: random.Random, name: str) -> None:
    """A consumer that comes and goes, another queue that is purged, and one that is made and dropped."""
    session = Session(h, name, rng)
    while h.producing.is_set():
        with h.survive(name):
            session.ready()
            session.run("set lock_timeout = '2s'")
            session.limited = True
            queue = rng.choice([LOG, KEYED])
            session.run("select pgque.subscribe(%s, 'passer', %s)", queue, rng.choice(["latest", "earliest"]))
            for _ in range(rng.randint(0, 3)):
                found = session.run("select batch_id from pgque.receive(%s, 'passer', 20)", queue)
                if found and rng.random() < 0.7:
                    session.run("select pgque.ack(%s)", found[0][0])
            session.run("select pgque.unsubscribe(%s, 'passer')", queue)
            session.run("select pgque.send(%s, 'x'::text)", OTHER)
            session.run("select pgque.receive(%s, 'c', worker => 'w')", OTHER)
            session.run("select pgque.purge(%s)", OTHER)
            session.run("select pgque.create_queue('churn')")
            session.run("select pgque.subscribe('churn', 'c')")
            session.run("select pgque.send('churn', 'x')")
            session.run("select pgque.ticker('churn')")
            session.run("select pgque.receive('churn', 'c')")
            session.run("select pgque.drop_queue('churn', true)")
        time.sleep(0.2 + rng.random() * 0.6)


def vacuum(h: History, rng: random.Random, name: str) -> None:
    session = Session(h, name, rng)
    while h.producing.is_set():
        with h.survive(name):
            session.ready()
            session.run("set lock_timeout = '200ms'")
            session.limited = True
            table = rng.choice(["retry_queue", "dead_letter", "event_1_0", "event_1_1", "event_1_2", "queue"])
            full = "full " if table.startswith("event") and rng.random() < 0.5 else ""
            session.run(f"vacuum {full}pgque.{table}")
        time.sleep(rng.random() * 0.6)
