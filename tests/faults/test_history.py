"""Random work against one server, with everything that can go wrong; the recorded history is judged afterwards.

PGQUE_SEED repeats a run's choices (the interleaving is the server's); PGQUE_HISTORY_SECONDS sets the length,
PGQUE_HISTORY_SQL names another engine to judge.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.servers import SQL_FILE

Row = tuple[Any, ...]
Connection = psycopg.Connection[Row]

QUEUE = "history"
MAX_RETRIES = 3
POISON = 37  # every so many messages of a producer fail always

# Errors that a client of a faulty server has to expect and to answer by trying again.
EXPECTED = (
    psycopg.OperationalError,  # a backend that was ended; 40001, 40P01 and 55P03 are among them
    psycopg.InterfaceError,
)


def rows(conn: Connection, query: str, *values: Any) -> list[Row]:
    cursor = conn.execute(query, values)
    return cursor.fetchall() if cursor.description else []


def value(conn: Connection, query: str, *values: Any) -> Any:
    return rows(conn, query, *values)[0][0]


@dataclass
class History:
    """What happened, as the clients saw it."""

    dsn: str
    seed: int
    seconds: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    producing: threading.Event = field(default_factory=threading.Event)
    running: threading.Event = field(default_factory=threading.Event)
    fate: dict[str, str] = field(default_factory=dict)  # payload -> committed, rolled back, unknown
    begun: dict[str, float] = field(default_factory=dict)  # payload -> when its transaction began
    seen: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    done: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    since: dict[str, float] = field(default_factory=dict)
    owners: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    contents: dict[int, tuple[int, ...]] = field(default_factory=dict)
    acks: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    stats: Counter[str] = field(default_factory=Counter)
    sessions: list[Session] = field(default_factory=list)

    def fault(self, text: str) -> None:
        with self.lock:
            self.faults.append(text)

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.stats[what] += number

    @contextmanager
    def survive(self, who: str) -> Iterator[None]:
        """Expected errors end the step; others are faults."""
        try:
            yield
        except EXPECTED as error:
            self.count(f"{type(error).__name__}")
        except psycopg.Error as error:
            if error.sqlstate == "PQ012":  # the batch went to another worker
                self.count("PQ012")
            else:
                self.fault(f"{who}: unexpected {error.sqlstate} {error}")


class Session:
    """A connection that is opened again when it broke."""

    def __init__(self, history: History, name: str) -> None:
        self.history, self.name = history, name
        self._conn: Connection | None = None
        history.sessions.append(self)

    def __call__(self) -> Connection:
        if self._conn is None or self._conn.closed:
            self._conn = psycopg.connect(self.history.dsn, autocommit=True, application_name=self.name)
        elif self._conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self._conn.execute("rollback")
        return self._conn

    def crash(self) -> None:
        """Go away without a word, with whatever is open."""
        if self._conn is not None:
            self._conn.close()


# --- those who send -------------------------------------------------------------------------------


def produce(h: History, name: str, rng: random.Random) -> None:
    session = Session(h, name)
    number = bursts = 0
    while h.producing.is_set():
        pending: list[str] = []
        cancelled: list[str] = []
        committing = False
        started = time.monotonic()

        def fresh(count: int, pending: list[str] = pending, started: float = started) -> list[str]:
            nonlocal number
            new = [f"{name}:{number + i}" for i in range(count)]
            number += count
            with h.lock:
                for payload in new:
                    h.fate[payload] = "unknown"
                    h.begun[payload] = started
            pending.extend(new)
            return new

        def send(conn: Connection, fresh: Callable[[int], list[str]] = fresh) -> None:
            nonlocal bursts
            kind = rng.random()
            if number >= 60 and (bursts == 0 or kind > 0.999):  # a window that needs a map
                bursts += 1
                rows(conn, "select pgque.send_batch(%s, 't', %s::text[])", QUEUE, fresh(1500))
            elif kind < 0.7:
                rows(conn, "select pgque.send(%s, %s::text)", QUEUE, fresh(1)[0])
            else:
                size = rng.randint(1, 40)
                rows(conn, "select pgque.send_batch(%s, 't', %s::text[])", QUEUE, fresh(size))

        try:
            conn = session()
            mode = rng.random()
            if mode < 0.5:
                committing = True
                send(conn)
            else:
                level = "repeatable read" if rng.random() < 0.4 else "read committed"
                conn.execute(f"begin isolation level {level}")
                rows(conn, "select 1 from pgque.queue")
                long = rng.random() < 0.15
                for _ in range(rng.randint(1, 4)):
                    time.sleep(rng.random() * (0.8 if long else 0.01))
                    if rng.random() < 0.3:
                        conn.execute("savepoint s")
                        before = len(pending)
                        send(conn)
                        if rng.random() < 0.5:
                            conn.execute("rollback to s")
                            cancelled += pending[before:]
                            del pending[before:]
                    else:
                        send(conn)
                if rng.random() < 0.2:
                    cancelled += pending
                    pending.clear()
                    conn.execute("rollback")
                else:
                    committing = True
                    conn.execute("commit")
            fate = "committed"
        except EXPECTED as error:
            h.count(f"send: {type(error).__name__}")
            fate = "unknown" if committing else "rolled back"
        except psycopg.Error as error:
            h.fault(f"{name}: unexpected {error.sqlstate} {error}")
            fate = "unknown"
        with h.lock:
            h.fate.update(dict.fromkeys(pending, fate))
            h.fate.update(dict.fromkeys(cancelled, "rolled back"))
        time.sleep(rng.random() * 0.02)


# --- those who receive ----------------------------------------------------------------------------


def note(h: History, owner: str, batch: Sequence[Row], whole: bool) -> None:
    """Record a batch (msg_id, batch_id, payload, retry_count) and look at what must always hold."""
    ids = tuple(row[0] for row in batch)
    if any(a >= b for a, b in pairwise(ids)):
        h.fault(f"{owner}: batch {batch[0][1]} is not in the order of ids: {ids}")
    if len({row[1] for row in batch}) != 1:
        h.fault(f"{owner}: several batch ids in one call")
    if any(row[3] > MAX_RETRIES for row in batch):
        h.fault(f"{owner}: more than {MAX_RETRIES} retries")
    with h.lock:
        h.stats["batches"] += 1
        h.owners[batch[0][1]].add(owner)
        if whole and h.contents.setdefault(batch[0][1], ids) != ids:
            h.faults.append(f"{owner}: batch {batch[0][1]} changed its messages")


RECEIVE = "select msg_id, batch_id, payload, retry_count from pgque.receive(%s, %s, %s)"
RECEIVE_COOP = (
    "select msg_id, batch_id, payload, retry_count from pgque.receive_coop(%s, %s, %s, %s, '300 ms')"
)


def consume_plain(h: History, name: str, rng: random.Random, pace: float) -> None:
    """Autocommit: receive, sometimes crash, ack."""
    session = Session(h, name)
    while h.running.is_set():
        with h.survive(name):
            conn = session()
            if name not in h.since:
                rows(conn, "select pgque.subscribe(%s, %s, 'latest')", QUEUE, name)
                h.since[name] = time.monotonic()
            batch = rows(conn, RECEIVE, QUEUE, name, rng.randint(1, 50))
            if not batch:
                time.sleep(0.02)
                continue
            note(h, name, batch, True)
            h.seen[name] += [row[2] for row in batch]
            if rng.random() < 0.05:
                session.crash()
                continue
            time.sleep(rng.random() * pace if h.producing.is_set() else 0)
            taken = value(conn, "select pgque.ack(%s)", batch[0][1])
            with h.lock:
                h.acks[batch[0][1]] += taken
            # A batch that comes again after an ack of unknown outcome was not finished before.
            h.done[name].update(row[2] for row in batch)


def keep(conn: Connection, consumer: str, batch: Sequence[Row]) -> None:
    rows(
        conn,
        "insert into results select %s, * from unnest(%s::bigint[], %s::text[])",
        consumer,
        [row[0] for row in batch],
        [row[2] for row in batch],
    )


def finish(h: History, conn: Connection, consumer: str, batch_id: int, batch: Sequence[Row]) -> None:
    """In a transaction: work, ack, commit."""
    keep(conn, consumer, batch)
    if value(conn, "select pgque.ack(%s)", batch_id) != 1:
        conn.execute("rollback")
        h.count("ack 0")
        return
    conn.execute("commit")
    with h.lock:
        h.acks[batch_id] += 1


def consume_exactly_once(h: History, consumer: str, session_name: str, rng: random.Random) -> None:
    """Work and ack in one transaction; two sessions of one consumer, partly with old snapshots."""
    session = Session(h, session_name)
    while h.running.is_set():
        with h.survive(session_name):
            conn = session()
            old = rng.random() < 0.4
            level = "repeatable read" if old else "read committed"
            inside = rng.random() < 0.5
            batch: list[Row] = []
            if not inside:
                batch = rows(conn, RECEIVE, QUEUE, consumer, rng.randint(1, 50))
            conn.execute(f"begin isolation level {level}")
            if old:
                rows(conn, "select 1")
                time.sleep(rng.random() * 0.1)
            if inside:
                batch = rows(conn, RECEIVE, QUEUE, consumer, rng.randint(1, 50))
            if not batch:
                conn.execute("rollback")
                time.sleep(0.02)
                continue
            note(h, consumer, batch, not old and not inside)
            if rng.random() < 0.05:
                session.crash()
                continue
            finish(h, conn, consumer, batch[0][1], batch)


def fails(payload: str, rng: random.Random) -> bool:
    return int(payload.split(":")[1]) % POISON == 0 or rng.random() < 0.05


def consume_with_retries(h: History, consumer: str, rng: random.Random) -> None:
    session = Session(h, consumer)
    while h.running.is_set():
        with h.survive(consumer):
            conn = session()
            batch = rows(conn, RECEIVE, QUEUE, consumer, rng.randint(1, 50))
            if not batch:
                time.sleep(0.02)
                continue
            note(h, consumer, batch, False)
            bad = [row for row in batch if fails(row[2], rng)]
            early = rng.random() < 0.3
            if not early:
                conn.execute("begin")
            for row in bad:
                rows(
                    conn,
                    "select pgque.nack(%s, array[%s]::bigint[], %s * interval '1 ms', 'bad')",
                    row[1],
                    row[0],
                    rng.choice([0, 0, 20, 200]),
                )
            if early:
                if rng.random() < 0.3:
                    session.crash()  # what was nacked is settled, the rest comes again
                    continue
                conn.execute("begin")
            finish(h, conn, consumer, batch[0][1], [row for row in batch if row not in bad])


def work(h: History, consumer: str, worker: str, rng: random.Random) -> None:
    """One of several workers, which now and then is silent for so long that it loses its batch."""
    session = Session(h, worker)
    while h.running.is_set():
        with h.survive(worker):
            conn = session()
            batch = rows(conn, RECEIVE_COOP, QUEUE, consumer, worker, rng.randint(1, 50))
            if not batch:
                time.sleep(0.02)
                continue
            note(h, worker, batch, False)
            batch_id = batch[0][1]
            if rng.random() < 0.1:
                rows(conn, "select pgque.nack(%s, array[%s]::bigint[], '0', 'w')", batch_id, batch[0][0])
                batch = batch[1:]
            if rng.random() < 0.05:
                time.sleep(0.6)
            elif rng.random() < 0.05:
                session.crash()
                continue
            conn.execute("begin")
            finish(h, conn, consumer, batch_id, batch)


# --- those who maintain and those who disturb -----------------------------------------------------


def loop(h: History, name: str, rng: random.Random) -> None:
    session = Session(h, name)
    while h.running.is_set():
        with h.survive(name):
            session().execute("call pgque.ticker_loop('2 s')")


def maintain(h: History, name: str, rng: random.Random) -> None:
    session = Session(h, name)
    while h.running.is_set():
        with h.survive(name):
            conn = session()
            if rng.random() < 0.2:
                conn.execute("begin")
                rows(conn, "select pgque.maint()")
                time.sleep(rng.random() * 0.1)
                conn.execute(rng.choice(["commit", "rollback"]))
            else:
                h.count("rotations", value(conn, "select pgque.maint_rotate_tables_step1(%s)", QUEUE))
        time.sleep(rng.random() * 0.06)


def turn(h: History, name: str, rng: random.Random) -> None:
    """Turn the journal of positions as _compact_journal() does, without waiting for 4 MB and a minute."""
    session = Session(h, name)
    while h.running.is_set():
        with h.survive(name):
            conn = session()
            conn.execute("begin")
            found = rows(conn, "select journal_cur from pgque.journal for no key update skip locked")
            if found:
                other = 1 - found[0][0]
                size = (
                    f"select pg_relation_size('pgque.position_{other}')"
                    f" + pg_relation_size('pgque.settled_{other}')"
                )
                if value(conn, size) == 0:
                    rows(
                        conn,
                        "update pgque.journal set journal_cur = %s, journal_flipped_at = clock_timestamp()",
                        other,
                    )
                    h.count("journal turns")
            conn.execute("commit")
            for _ in range(8):
                rows(conn, "select pgque.maint_tables()")
                time.sleep(0.03)


def kill(h: History, name: str, rng: random.Random) -> None:
    session = Session(h, name)
    while h.producing.is_set():
        time.sleep(0.1 + rng.random() * 0.5)
        with h.survive(name):
            pids = rows(
                session(),
                "select pid from pg_stat_activity where datname = current_database()"
                " and backend_type = 'client backend' and application_name <> ''"
                " and application_name not in ('kill', 'judge')",
            )
            rows(session(), "select pg_terminate_backend(%s)", rng.choice(pids)[0])
            h.count("kills")


def dump(h: History, name: str, rng: random.Random) -> None:
    """Locks what pg_dump locks, and once in a while holds back xmin."""
    session = Session(h, name)
    while h.producing.is_set():
        with h.survive(name):
            conn = session()
            conn.execute("begin isolation level repeatable read")
            conn.execute("set local lock_timeout = '1s'")
            tables = rng.choice(
                [["event_1_0"], ["event_1_1", "tick_1_2"], ["position_0"], ["queue", "tick_1_0"]]
            )
            for table in tables:
                conn.execute(f"lock table pgque.{table} in access share mode")
            time.sleep(rng.random() * 0.4)
            conn.execute("commit")
        time.sleep(rng.random() * 0.4)


def churn(h: History, name: str, rng: random.Random) -> None:
    """Another queue that comes and goes."""
    session = Session(h, name)
    while h.producing.is_set():
        with h.survive(name):
            conn = session()
            conn.execute("set lock_timeout = '2s'")
            rows(conn, "select pgque.create_queue('churn')")
            rows(conn, "select pgque.subscribe('churn', 'c')")
            rows(conn, "select pgque.send('churn', 'x')")
            rows(conn, "select pgque.ticker('churn')")
            rows(conn, "select pgque.receive('churn', 'c')")
            rows(conn, "select pgque.drop_queue('churn', true)")
        time.sleep(0.3 + rng.random())


# --- the run and the judge ------------------------------------------------------------------------

PRODUCERS = 4
PLAIN = ("plain_fast", "plain_slow", "plain_late")
KEPT = ("once", "retries", "coop")


def run(dsn: str, script: str, seed: int, seconds: float) -> History:
    h = History(dsn, seed, seconds)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(script)
        conn.execute("create table results (consumer text, msg_id bigint, payload text)")
        value(conn, "select pgque.create_queue(%s)", QUEUE)
        rows(conn, "select pgque.set_queue_config(%s, 'rotation_period', '20 milliseconds')", QUEUE)
        rows(conn, "select pgque.set_queue_config(%s, 'max_retries', %s)", QUEUE, str(MAX_RETRIES))
        rows(conn, "select pgque.set_tick_period_ms(20)")
        for consumer in ("plain_fast", "plain_slow", "once", "retries"):
            rows(conn, "select pgque.subscribe(%s, %s)", QUEUE, consumer)
            h.since[consumer] = 0
        for worker in ("w1", "w2", "w3"):
            rows(conn, "select pgque.register_subconsumer(%s, 'coop', %s)", QUEUE, worker)
    h.producing.set()
    h.running.set()
    crew: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        *[(produce, (f"p{n}",)) for n in range(PRODUCERS)],
        (consume_plain, ("plain_fast", 0.002)),
        (consume_plain, ("plain_slow", 0.06)),
        (consume_exactly_once, ("once", "once_1")),
        (consume_exactly_once, ("once", "once_2")),
        (consume_with_retries, ("retries",)),
        *[(work, ("coop", worker)) for worker in ("w1", "w2", "w3")],
        (loop, ("loop_1",)),
        (loop, ("loop_2",)),
        (maintain, ("maint_1",)),
        (maintain, ("maint_2",)),
        (turn, ("turn",)),
        (kill, ("kill",)),
        (dump, ("dump",)),
        (churn, ("churn",)),
    ]
    threads = []

    def start(call: Callable[..., None], names: tuple[Any, ...]) -> None:
        rng = random.Random(f"{seed} {call.__name__} {names}")  # noqa: S311
        plain = call is consume_plain
        args = (h, names[0], rng, names[1]) if plain else (h, *names, rng)

        def guarded() -> None:
            try:
                call(*args)
            except Exception as error:  # a bug of this test
                h.fault(f"{call.__name__}{names}: {type(error).__name__} {error}")

        threads.append(threading.Thread(target=guarded, daemon=True))
        threads[-1].start()

    for call, names in crew:
        start(call, names)
    time.sleep(seconds / 2)
    start(consume_plain, ("plain_late", 0.002))
    time.sleep(seconds / 2)
    h.producing.clear()
    with psycopg.connect(dsn, autocommit=True, application_name="judge") as conn:
        # Producers and disturbers end; everything must arrive now, as long as there is progress.
        for thread in threads[:PRODUCERS]:
            thread.join(20)
        left, since = -1, time.monotonic()
        while left != 0 and time.monotonic() < since + 6:
            time.sleep(0.2)
            now = sum(len(lost) for lost in missing(h, conn).values())
            if now != left:
                left, since = now, time.monotonic()
        h.running.clear()
        for thread in threads:
            thread.join(20)
        for session in h.sessions:
            session.crash()
        h.faults += [f"hangs: {t}" for t in threads if t.is_alive()]
        judge(h, conn)
    return h


def arrived(h: History, conn: Connection) -> dict[str, set[str]]:
    """What each consumer finished, one way or the other."""
    got = {name: set(h.done[name]) for name in PLAIN}
    for name in KEPT:
        got[name] = {
            row[0]
            for row in rows(
                conn,
                "select payload from results where consumer = %s union all"
                " select d.ev_data from pgque.dead_letter d join pgque.consumer c on c.co_id = d.dl_consumer_id"
                " where c.co_name = %s",
                name,
                name,
            )
        }
    return got


def missing(h: History, conn: Connection) -> dict[str, list[str]]:
    got = arrived(h, conn)
    with h.lock:
        # What one consumer got was committed, so all must get it.
        sent = {p for p, fate in h.fate.items() if fate == "committed"}.union(*got.values())
        late = {p for p in sent if h.begun[p] > h.since.get("plain_late", float("inf"))}
    return {
        name: lost for name in got if (lost := sorted((late if name == "plain_late" else sent) - got[name]))
    }


def judge(h: History, conn: Connection) -> None:
    for name, lost in missing(h, conn).items():
        h.faults.append(f"{name}: {len(lost)} messages never arrived, such as {lost[:5]}")
    ghosts = {p for p, fate in h.fate.items() if fate == "rolled back"}
    for name, got in arrived(h, conn).items():
        if wrong := got & ghosts:
            h.faults.append(f"{name}: rolled-back messages arrived: {sorted(wrong)[:5]}")
    for name in PLAIN:
        newest: dict[str, int] = {}
        known: set[str] = set()
        for payload in h.seen[name]:
            if payload in known:
                continue
            known.add(payload)
            producer, _, number = payload.partition(":")
            if int(number) < newest.get(producer, -1):
                h.faults.append(f"{name}: {payload} after {producer}:{newest[producer]}")
                break
            newest[producer] = int(number)
    h.faults += [f"batch {b} acked {n} times" for b, n in h.acks.items() if n > 1]
    h.faults += [f"batch {b} has several owners: {o}" for b, o in h.owners.items() if len(o) > 1]
    for consumer, payload, count in rows(
        conn,
        "select consumer, payload, count(*) from ("
        "  select consumer, payload from results union all"
        "  select c.co_name, d.ev_data from pgque.dead_letter d join pgque.consumer c on c.co_id = d.dl_consumer_id"
        ") x group by 1, 2 having count(*) > 1 limit 5",
    ):
        h.faults.append(f"{consumer}: {payload} was worked off {count} times")
    time.sleep(1)  # the statistics come a little later
    for table, updates, deletes in rows(
        conn,
        "select relname, n_tup_upd, n_tup_del from pg_stat_user_tables where schemaname = 'pgque'"
        " and relname ~ '^(event|tick|position|settled)_' and n_tup_upd + n_tup_del > 0",
    ):
        h.faults.append(f"{table} has {updates} updated and {deletes} deleted rows")
    h.stats["messages"] = sum(fate == "committed" for fate in h.fate.values())
    h.stats["dead letters"] = value(conn, "select count(*) from pgque.dead_letter")


def _script() -> str:
    return Path(os.environ.get("PGQUE_HISTORY_SQL") or SQL_FILE).read_text()


def _seed() -> int:
    return int(os.environ.get("PGQUE_SEED") or random.SystemRandom().randrange(10**9))


def _check(h: History) -> None:
    summary = f"PGQUE_SEED={h.seed}: {dict(h.stats)}"
    print(summary)
    assert not h.faults, "\n".join([summary, *h.faults[:30]])
    assert h.stats["messages"] > 100 and h.stats["batches"] > 50, summary
    assert h.stats["rotations"] > 0 and h.stats["journal turns"] > 0, summary


@pytest.mark.timeout(120)
def test_history(fresh_dsn: str) -> None:
    seconds = float(os.environ.get("PGQUE_HISTORY_SECONDS", "12"))
    _check(run(fresh_dsn, _script(), _seed(), seconds))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_long_history(fresh_dsn: str) -> None:
    _check(run(fresh_dsn, _script(), _seed(), 300))


# What is broken, what the judge must say, and the replacements in the engine. The last two were real.
MUTANTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "rotation looks at no row": (
        "never arrived",
        [("if v_needed is distinct from false then", "if false then")],
    ),
    "a window leaves out what ran when it began": (
        "never arrived",
        [("if v_late is not null then", "if false then")],
    ),
    "ack drops the rest of the window": (
        "never arrived",
        [
            (
                "if p_batch.pos_last_id is null then\n    return pgque._past_window(p_position);",
                "if true then\n    return pgque._past_window(p_position);",
            )
        ],
    ),
    "a map that was made twice counts twice": (
        "never arrived",
        [
            ("select distinct on (m.map_id_hi) m.map_lo, m.map_hi", "select m.map_lo, m.map_hi"),
            ("and m.map_valid and m.map_filenodes = pgque._filenodes(p_sub.sub_queue)", "and m.map_valid"),
        ],
    ),
    "the journal turns under an old snapshot": (
        "times",
        [
            (
                "    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1 for share;",
                "    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1 for key share;",
            ),
            (
                "if v_leaf = 0 or v_old_snapshot then\n    insert into pgque.position_0",
                "if v_leaf = 0 then\n    insert into pgque.position_0",
            ),
            ("if v_appended and (v_leaf = 1 or v_old_snapshot) then", "if v_appended and v_leaf = 1 then"),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_engine_is_caught(fresh_dsn: str, mutant: str) -> None:
    """The judge can say no."""
    script = _script()
    verdict, replacements = MUTANTS[mutant]
    for good, bad in replacements:
        assert script.count(good) == 1, f"the engine changed: adapt the mutant {mutant!r}"
        script = script.replace(good, bad)
    h = run(fresh_dsn, script, _seed(), 6)
    print(f"{mutant}: {h.faults[:5]}")
    assert any(verdict in fault for fault in h.faults), f"not caught: {mutant}; {dict(h.stats)}"
