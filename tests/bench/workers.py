# ruff: noqa: RUF001
"""What is measured with worker processes: each beside a hand-written SKIP LOCKED table in the same run.

The table and its statements are those of pgmq 1.5: a message is read by an UPDATE that moves its visible-from
time, and deleted by its id in a transaction of its own; both are durable. Ours acknowledges the last batch,
durably, and takes the next one, which needs no durable commit: two transactions in one round trip.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import psycopg
from psycopg.rows import TupleRow
from psycopg.types.string import TextLoader

from bench.cost import held_xmin
from bench.crew import WARM_UP, Begin, Crew
from bench.measure import PAYLOAD, Bench, Connection, Number, Row, one, percentile, queue, ticking

Style = Literal["floor", "pgmq", "ours", "one call", "floor steady", "ours steady", "floor send", "ours send"]

PROCESSES = (1, 2, 4, 8)
SIZES = (1, 10, 100)
BACKLOG = 50_000
GOAL = 1.8

# The limit is written into the text, so that the plan of the floor is made once.
FLOOR_READ = (
    "with cte as (select q.msg_id from bench.q_floor q where q.vt <= clock_timestamp()"
    " order by q.msg_id limit {} for update skip locked)"
    " update bench.q_floor m set vt = clock_timestamp() + interval '30 seconds', read_ct = m.read_ct + 1"
    " from cte where m.msg_id = cte.msg_id"
    " returning m.msg_id, m.read_ct, m.enqueued_at, m.vt, m.message"
)
FLOOR_DELETE = "delete from bench.q_floor q where q.msg_id = any (%s) returning q.msg_id"
PGMQ_READ = "select * from bench.q_read('q_floor', 30, {})"
PGMQ_DELETE = "select bench.q_delete('q_floor', %s)"
OURS_RECEIVE = (
    "select r.* from (select set_config('synchronous_commit', 'off', true) offset 0) s,"
    " lateral pgque.receive(%s, 'c', {}, worker => %s) r"
)
OURS_ONE_CALL = "select * from pgque.receive(%s, 'c', {}, worker => %s, ack_batch => %s)"


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does: take ``size`` at a time for ``seconds``, or send ``per_second``."""

    style: Style
    queue: str
    worker: str
    size: int
    seconds: float
    patience: float = 0.02  # seconds without a message after which a queue counts as drained
    per_second: int = 0


@dataclass(slots=True)
class Done:
    """What one process did. ``timed`` of the ``ids`` came while the clock ran, the last one at ``last``."""

    ids: list[int] = field(default_factory=list)
    timed: int = 0
    last: float = 0.0
    calls: int = 0
    empty: int = 0
    capped: bool = False
    calls_at: list[tuple[float, float]] = field(
        default_factory=list
    )  # seconds since the start, seconds it took


class Taker:
    """Takes messages from the floor, with ``finish`` as the last call."""

    def __init__(self, conn: Connection, job: Job) -> None:
        self.conn, self.job = conn, job
        self.read = (PGMQ_READ if job.style == "pgmq" else FLOOR_READ).format(job.size).encode()
        self.delete = PGMQ_DELETE if job.style == "pgmq" else FLOOR_DELETE

    def take(self) -> list[int]:
        """Read, then delete what was read."""
        ids = [row[0] for row in self.conn.execute(self.read).fetchall()]
        if ids:
            self.conn.execute(self.delete, (ids,))
        return ids

    def finish(self) -> None:
        """Nothing is open."""


class PipelinedTaker(Taker):
    """Acknowledges the last batch and takes the next in one round trip, as two transactions."""

    def __init__(self, conn: Connection, job: Job) -> None:
        super().__init__(conn, job)
        self.receive = OURS_RECEIVE.format(job.size).encode()
        self.batch: int | None = None

    def take(self) -> list[int]:
        """Acknowledge what came last, take the next."""
        with self.conn.pipeline() as pipeline:
            if self.batch is not None:
                self.conn.execute("select pgque.ack(%s)", (self.batch,))
                # A sync that does not wait for its answer, as pipeline.sync() would.
                pipeline.command_queue.append(self.conn.pgconn.pipeline_sync)
                pipeline.result_queue.append(None)
            cursor = self.conn.execute(self.receive, (self.job.queue, self.job.worker))
        return self._remember(cursor.fetchall())

    def _remember(self, rows: list[TupleRow]) -> list[int]:
        self.batch = rows[0][1] if rows else None
        if any(row[1] != self.batch for row in rows):
            raise AssertionError("one call gave messages of two batches")
        return [row[0] for row in rows]

    def finish(self) -> None:
        """Acknowledge what came last."""
        if self.batch is not None:
            self.conn.execute("select pgque.ack(%s)", (self.batch,))


class OneCallTaker(PipelinedTaker):
    """Does both in one call, which is durable as a whole."""

    def __init__(self, conn: Connection, job: Job) -> None:
        super().__init__(conn, job)
        self.receive = OURS_ONE_CALL.format(job.size).encode()

    def take(self) -> list[int]:
        """Acknowledge what came last, take the next."""
        arguments = (self.job.queue, self.job.worker, self.batch)
        return self._remember(self.conn.execute(self.receive, arguments).fetchall())


TAKERS = {"floor": Taker, "pgmq": Taker, "ours": PipelinedTaker, "one call": OneCallTaker}


def drain(conn: Connection, job: Job, start: Callable[[], float]) -> Done:
    """Take until nothing comes or the time is up."""
    done = Done()
    taker = TAKERS[job.style](conn, job)
    for _ in range(WARM_UP):
        done.ids += taker.take()
    warm = len(done.ids)
    began = done.last = start()
    while True:
        ids = taker.take()
        now = time.monotonic()
        done.calls += 1
        if ids:
            done.ids += ids
            done.last = now
        else:
            done.empty += 1
            if now - done.last > job.patience:
                break
            time.sleep(0.001)
        if now - began > job.seconds:
            done.capped = True
            break
    taker.finish()
    done.timed = len(done.ids) - warm
    return done


def steady(conn: Connection, job: Job, start: Callable[[], float]) -> Done:
    """Take what a sender sends; time the receives that bring something."""
    done = Done()
    floor = job.style == "floor steady"
    receive = (FLOOR_READ if floor else OURS_RECEIVE).format(job.size).encode()
    arguments = None if floor else (job.queue, job.worker)
    for _ in range(WARM_UP):
        conn.execute(receive, arguments).fetchall()
    began = done.last = start()
    # Two seconds longer than the sender, for what is on its way
    while (now := time.monotonic()) - began < job.seconds + 2:
        rows = conn.execute(receive, arguments).fetchall()
        took = time.monotonic() - now
        done.calls += 1
        if rows:
            done.calls_at.append((now - began, took))
            done.ids += [row[0] for row in rows]
            done.last = now
            if floor:
                conn.execute(FLOOR_DELETE, ([row[0] for row in rows],))
            else:
                conn.execute("select pgque.ack(%s)", (rows[0][1],))
        else:
            done.empty += 1
            time.sleep(0.02)
    done.timed = len(done.ids)
    return done


def send_steadily(conn: Connection, job: Job, start: Callable[[], float]) -> Done:
    """Send what is due every 10 ms."""
    done = Done()
    if job.style == "floor send":
        send = (
            "insert into bench.q_floor (message) select p::jsonb from unnest(%s::text[]) p returning msg_id"
        )
    else:
        send = f"select unnest(pgque.send_batch('{job.queue}', %s::text[]))"
    began = start()
    while (passed := time.monotonic() - began) < job.seconds:
        due = int(passed * job.per_second) - len(done.ids)
        if due > 0:
            # After a stall no more than a second's worth at once
            done.ids += [
                row[0] for row in conn.execute(send.encode(), ([PAYLOAD] * min(due, job.per_second),))
            ]
            done.calls += 1
        time.sleep(0.01)
    return done


def do(job: Job, begin: Begin) -> Done:
    """Take or send, as the style says."""
    # A connection a job: a session hands in its statistics when it ends.
    with psycopg.connect(begin.dsn, autocommit=True) as conn:
        conn.adapters.register_loader("jsonb", TextLoader)
        if job.style.endswith("steady"):
            return steady(conn, job, begin)
        if job.style.endswith("send"):
            return send_steadily(conn, job, begin)
        return drain(conn, job, begin)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A drained backlog: messages per second, and whether every message came once and only once."""

    per_s: float
    fault: str
    timed: int
    seconds: float
    empty: int


NUMBERS = itertools.count(1)


def traffic(kind: str) -> tuple[str, str, str]:
    """Return the arguments that half of the messages of a kind are sent with, and the floor's columns."""
    return {
        "plain": ("", "", ""),
        "delayed": (
            ", deliver_ats => array(select case when mod(i, 2) = 0 then %(due)s::timestamptz end"
            " from generate_series(1, 1000) i)",
            "vt",
            "case when mod(i, 2) = 0 then %(due)s::timestamptz else clock_timestamp() end",
        ),
        "keyed": (
            ", keys => array(select case when mod(i, 2) = 0 then 'key ' || %(n)s || '/' || i end"
            " from generate_series(1, 1000) i)",
            "key",
            "case when mod(i, 2) = 0 then 'key ' || %(n)s || '/' || i end",
        ),
    }[kind]


def fill(conn: Connection, name: str | None, count: int, kind: str = "plain", due: float = 0) -> float:
    """Fill a new queue, or the floor, by 1,000 messages a transaction; return the seconds it took."""
    arguments, columns, values = traffic(kind)
    moment = conn.execute("select clock_timestamp() + %s * interval '1 second'", (due,)).fetchone()
    assert moment is not None
    conn.execute("checkpoint")
    if name is None:
        conn.execute("truncate bench.q_floor")
        statement = (
            f"insert into bench.q_floor (message{columns and ', ' + columns})"
            f" select p::jsonb{values and ', ' + values}"
            " from unnest(bench.payloads(1000)) with ordinality as u (p, i)"
        )
    else:
        queue(conn, name)
        statement = f"select pgque.send_batch('{name}', 'default', bench.payloads(1000){arguments})"
    began = time.perf_counter()
    for n in range(-(-count // 1000)):
        values_ = {"due": moment[0], "n": n} if kind != "plain" else None
        conn.execute(statement.encode(), values_)
        if name is not None:
            conn.execute("select pgque.ticker(%s)", (name,))
    took = time.perf_counter() - began
    if name is None:
        conn.execute("vacuum analyze bench.q_floor")
    return took


def rest(conn: Connection, name: str | None) -> list[int]:
    """Return the ids of the messages that are still there."""
    if name is None:
        return [row[0] for row in conn.execute("select q.msg_id from bench.q_floor q")]
    ids: list[int] = []
    batch = None
    while rows := conn.execute(
        "select r.msg_id, r.batch_id from pgque.receive(%s, 'c', 5000, worker => 'rest', ack_batch => %s) r",
        (name, batch),
    ).fetchall():
        ids += [row[0] for row in rows]
        batch = rows[0][1]
    return ids


def judge(sent: int, seen: Sequence[int], left: Sequence[int]) -> str:
    """Tell in capitals what is wrong, or return nothing."""
    faults = []
    if twice := len(seen) + len(left) - len({*seen, *left}):
        faults.append(f"{twice:,} MESSAGES CAME TWICE")
    if missing := sent - len({*seen, *left}):
        faults.append(f"{missing:,} MESSAGES ARE MISSING")
    return ", ".join(faults)


def backlog(
    conn: Connection,
    crew: Crew[Job, Done],
    style: Style,
    processes: int,
    size: int,
    seconds: float,
    *,
    name: str | None = None,
    count: int = 0,
    at: float = 0.0,
    patience: float = 0.02,
) -> Outcome:
    """Drain a backlog with some processes."""
    filled = name is not None or count > 0
    if not filled:
        name = None if style in ("floor", "pgmq") else f"workers{next(NUMBERS)}"
        count = BACKLOG + -(-WARM_UP * processes * size // 1000) * 1000
        fill(conn, name, count)
    jobs = [Job(style, name or "", f"w{n}", size, seconds, patience=patience) for n in range(processes)]
    began, done = crew.run(jobs, at)
    capped = any(d.capped for d in done)
    left = rest(conn, name)
    fault = judge(count, [i for d in done for i in d.ids], left)
    if left and not capped:
        fault = f"{fault}, {len(left):,} LEFT BY ALL".lstrip(", ")
    took = max(max(d.last for d in done) - began, 1e-9)
    timed = sum(d.timed for d in done)
    if name is not None and not filled:
        conn.execute("select pgque.drop_queue(%s, true)", (name,))
    return Outcome(timed / took, fault, timed, took, sum(d.empty for d in done))


def over(ours: Sequence[Outcome], bare: Sequence[Outcome]) -> float:
    """Return the median of the ratios of neighbours in time."""
    return statistics.median(a.per_s / b.per_s for a, b in zip(ours, bare, strict=True))


def scaling(bench: Bench, crew: Crew[Job, Done]) -> Iterator[Row]:
    """1 to 8 processes with three sizes of a receive."""
    seconds = bench.pick(30, 15) / 10
    rounds = bench.pick(3, 1)
    styles: tuple[Style, ...] = ("floor", "ours", "pgmq", "one call")
    with bench.connect() as conn:
        for size in SIZES:
            rates: dict[str, list[float]] = {style: [] for style in styles}
            for processes in PROCESSES:
                found: dict[str, list[Outcome]] = {style: [] for style in styles}
                for turn in range(rounds):
                    for style in styles if turn % 2 == 0 else reversed(styles):
                        found[style].append(backlog(conn, crew, style, processes, size, seconds))
                rate = {s: statistics.median(o.per_s for o in found[s]) for s in styles}
                for style in styles:
                    rates[style].append(rate[style])
                what = f"{processes} process{'es' if processes > 1 else ''}, {size} a receive"
                for style in ("ours", "one call"):
                    ratio = over(found[style], found["floor"])
                    fault = "; ".join({o.fault for o in (*found[style], *found["floor"])} - {""})
                    one_call = style == "one call"
                    over_pgmq = over(found[style], found["pgmq"])
                    yield Row(
                        "  the same in one durable call" if one_call else what,
                        f"{rate[style]:,.0f}/s",
                        f"{rate['floor']:,.0f}/s",
                        ratio,
                        "" if one_call else f"≥ {GOAL}",
                        not fault and (one_call or ratio >= GOAL),
                        fault
                        or ("receive(ack_batch =>)" if one_call else "each message once")
                        + f"; {over_pgmq:.2f} × pgmq's own functions, {rate['pgmq']:,.0f}/s",
                        {
                            "processes": processes,
                            "size": size,
                            "ours_per_s": rate[style],
                            "bare_per_s": rate["floor"],
                            "ratio": ratio,
                            "pgmq_per_s": rate["pgmq"],
                            "over_pgmq": over_pgmq,
                            "messages": found[style][-1].timed,
                            "seconds": found[style][-1].seconds,
                            "empty_calls": found[style][-1].empty,
                        },
                    )
            rise = {s: rates[s][3] / rates[s][2] for s in styles}
            yield Row(
                f"from 4 to 8 processes, {size} a receive",
                f"× {rise['ours']:.2f}",
                f"× {rise['floor']:.2f}",
                rise["ours"] / rise["floor"],
                "> × 1",
                rise["ours"] > 1,
                f"in one durable call × {rise['one call']:.2f}",
                {"size": size, "ours": rise["ours"], "bare": rise["floor"], "one_call": rise["one call"]},
            )


def hand_outs(bench: Bench) -> Iterator[Row]:
    """A receive inside the server while other workers hold batches."""
    calls, rounds = 100, bench.pick(12, 4)
    known = (1, 10, 100)
    with bench.connect() as conn:
        conn.execute("set synchronous_commit = off")
        for size in (1, 10):
            count = (rounds + 1) * calls * size + 1000
            fill(conn, None, count)
            names = {workers: f"handout{size}_{workers}" for workers in known}
            for workers, name in names.items():
                fill(conn, name, count)
                for n in range(workers):
                    held = conn.execute(
                        "select * from pgque.receive(%s, 'c', 1, worker => %s, visibility_timeout => '1 hour')",
                        (name, f"w{n}"),
                    ).fetchall()
                    assert len(held) == 1
            times: dict[int, list[tuple[float, float]]] = {n: [] for n in (0, *known)}
            for turn in range(rounds + 1):
                for workers in (0, *known):
                    if workers:
                        query = f"call bench.hand_outs('{names[workers]}', 'c', 'w0', {size}, {calls})"
                    else:
                        query = f"call bench.hand_outs_floor({size}, {calls})"
                    row = conn.execute(query.encode()).fetchone()
                    assert row is not None
                    if turn:
                        times[workers].append(row)
            took = {n: tuple(statistics.median(t[i] for t in times[n]) for i in (0, 1)) for n in (0, *known)}
            for workers in known:
                receive, ack = took[workers]
                growth = receive / took[1][0]
                yield Row(
                    f"hand-out of {size}, {workers} worker{'s' if workers > 1 else ''} known",
                    f"{receive:.0f} µs",
                    f"{took[0][0]:.0f} µs",
                    receive / took[0][0],
                    "≤ 1.5 × that of 1" if workers > 1 else "",
                    growth <= 1.5,
                    f"{growth:.2f} × that of 1 worker; ack {ack:.0f} µs, bare DELETE {took[0][1]:.0f} µs",
                    {
                        "size": size,
                        "workers": workers,
                        "receive_us": receive,
                        "bare_receive_us": took[0][0],
                        "growth": growth,
                        "ack_us": ack,
                        "bare_delete_us": took[0][1],
                    },
                )
            for name in names.values():
                conn.execute("select pgque.drop_queue(%s, true)", (name,))


def dead_tuples(conn: Connection) -> dict[str, Number]:
    """Return the dead tuples of each table of the schema that has any."""
    time.sleep(1.2)  # other sessions hand in their statistics, at the latest after a second
    return dict(
        conn.execute(
            "select s.relname, s.n_dead_tup from pg_stat_all_tables s"
            " where s.schemaname = 'pgque' and s.n_dead_tup > 0 order by s.n_dead_tup desc"
        ).fetchall()
    )


def rewritten(conn: Connection) -> Number:
    """Return how many rows of the schema were updated or deleted so far."""
    return one(
        conn,
        "select coalesce(sum(n_tup_upd + n_tup_del), 0)::float from pg_stat_all_tables"
        " where schemaname = 'pgque'",
    )


def in_words(dead: dict[str, Number]) -> str:
    """Name the tables with the most dead tuples."""
    if not dead:
        return "no dead tuple"
    shown = ", ".join(f"{name} {count:,}" for name, count in itertools.islice(dead.items(), 4))
    return f"{sum(dead.values()):,} dead: {shown}" + (", …" if len(dead) > 4 else "")


def mixed(bench: Bench, crew: Crew[Job, Done]) -> Iterator[Row]:
    """Four processes, ten a receive, when half of the messages are delayed or have keys."""
    seconds, processes, size = 20.0, 4, 10
    count = BACKLOG + 1000
    plain: dict[str, float] = {}
    sent: dict[str, float] = {}
    with bench.connect() as conn, ticking(bench):
        for kind in ("plain", "delayed", "keyed"):
            rate = {}
            faults = set()
            conn.execute("vacuum")
            before = rewritten(conn)
            for style in ("floor", "ours"):
                name = None if style == "floor" else f"mixed_{kind}"
                wait = bench.pick(6, 3) if kind == "delayed" else 0
                at = time.monotonic() + wait
                took = fill(conn, name, count, kind, wait)
                if wait and time.monotonic() > at - 0.5:
                    faults.add(f"sending took {took:.1f} s")
                outcome = backlog(
                    conn,
                    crew,
                    style,
                    processes,
                    size,
                    seconds,
                    name=name,
                    count=count,
                    at=at,
                    patience=1.0,
                )
                rate[style] = outcome.per_s
                faults |= {outcome.fault} - {""}
            sent[kind] = count / took
            plain = plain or rate
            dead = dead_tuples(conn)
            changed = rewritten(conn) - before
            over_plain = rate["ours"] / plain["ours"]
            bare_over_plain = rate["floor"] / plain["floor"]
            what = {
                "plain": "plain traffic",
                "delayed": "half of it delayed",
                "keyed": "half of it with keys",
            }
            yield Row(
                f"{what[kind]}, {processes} processes, {size}",
                f"{rate['ours']:,.0f}/s",
                f"{rate['floor']:,.0f}/s",
                rate["ours"] / rate["floor"],
                "",
                not faults,
                "; ".join(
                    (
                        *faults,
                        f"{over_plain:.2f} × plain (bare {bare_over_plain:.2f} ×)",
                        f"sent at {sent[kind] / sent['plain']:.2f} × plain",
                        in_words(dead),
                        f"{changed:,.0f} rows updated or deleted",
                    )
                ),
                {
                    "ours_per_s": rate["ours"],
                    "bare_per_s": rate["floor"],
                    "over_plain": over_plain,
                    "bare_over_plain": bare_over_plain,
                    "sent_per_s": sent[kind],
                    "dead": sum(dead.values()),
                    "updated_or_deleted": changed,
                },
            )
            conn.execute("select pgque.drop_queue(%s, true)", (f"mixed_{kind}",))


def workers(bench: Bench) -> list[Row]:
    """Scaling, the cost of a hand-out, delays and keys."""
    with Crew(bench, max(PROCESSES), do) as crew:
        rows = list(scaling(bench, crew))
        rows += hand_outs(bench)
        rows += mixed(bench, crew)
    return rows


def run_steadily(
    crew: Crew[Job, Done], floor: bool, name: str, seconds: float, part: float
) -> tuple[float, float, str, list[Done]]:
    """Send and take 1,000 a second; return the p99 of a receive in the first and in the last part."""
    job = Job("floor steady" if floor else "ours steady", name, "", 10, seconds)
    jobs = [
        Job("floor send" if floor else "ours send", name, "", 0, seconds, per_second=1000),
        *(replace(job, worker=f"w{n}") for n in range(4)),
    ]
    _, (sender, *takers) = crew.run(jobs)
    seen = [i for d in takers for i in d.ids]
    fault = judge(len(sender.ids), seen, [])
    calls = [call for d in takers for call in d.calls_at]
    first = percentile([took for at, took in calls if 2 <= at < part], 0.99) * 1000
    last = percentile([took for at, took in calls if seconds - part <= at < seconds], 0.99) * 1000
    return first, last, fault, [sender, *takers]


def workers_long(bench: Bench) -> list[Row]:
    """1,000 messages a second for minutes while a transaction holds xmin."""
    seconds = 60.0 if bench.quick else (bench.minutes or 10) * 60
    part = min(60.0, seconds / 3)
    bare_seconds = min(60.0, seconds / 2)
    with Crew(bench, 5, do) as crew, bench.connect() as conn:
        conn.execute("vacuum")
        queue(conn, "long")
        before = rewritten(conn)
        with held_xmin(bench), ticking(bench):
            first, last, fault, done = run_steadily(crew, False, "long", seconds, part)
            dead = dead_tuples(conn)
            changed = rewritten(conn) - before
        conn.execute("truncate bench.q_floor")
        conn.execute("vacuum analyze bench.q_floor")
        with held_xmin(bench):
            bare = run_steadily(crew, True, "", bare_seconds, bare_seconds / 3)
    calls, empty = sum(d.calls for d in done[1:]), sum(d.empty for d in done[1:])
    total = sum(dead.values())
    faults = "; ".join({fault, bare[2]} - {""})
    return [
        Row(
            f"1,000/s for {seconds / 60:.0f} min, xmin held: p99 of receive",
            f"{last:.2f} / {first:.2f} ms",
            f"{bare[1]:.2f} / {bare[0]:.2f} ms",
            last / first,
            "≤ 1.2 ×",
            not faults and last / first <= 1.2,
            f"{faults + '; ' if faults else ''}last {part:.0f} s over first;"
            f" bare over {bare_seconds:.0f} s only: {bare[1] / bare[0]:.1f} ×;"
            f" {len(done[0].ids):,} sent, 4 processes, {calls:,} calls, {empty:,} of them empty",
            {
                "first_ms": first,
                "last_ms": last,
                "growth": last / first,
                "bare_first_ms": bare[0],
                "bare_last_ms": bare[1],
                "sent": len(done[0].ids),
                "calls": calls,
                "empty": empty,
            },
        ),
        Row(
            "dead tuples in the schema after that",
            f"{total:,}",
            "–",
            None,
            "< 100",
            total < 100,
            f"{in_words(dead)}; {changed:,.0f} rows updated or deleted meanwhile",
            {"dead": total, "updated_or_deleted": changed, **{f"dead_{n}": c for n, c in dead.items()}},
        ),
    ]
