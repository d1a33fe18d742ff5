# ruff: noqa: RUF001
"""What is measured: one function a subject, each with its bare-SQL floor in the same run."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.rows import TupleRow

Connection = psycopg.Connection[TupleRow]
Number = int | float

FLOOR_SQL = Path(__file__).with_name("floor.sql")
COLUMNS = (
    "ev_id, 0::bigint, ev_type, ev_data, coalesce(ev_retry, 0), ev_time, ev_extra1, ev_extra2, ev_extra3,"
    " ev_extra4, ev_headers, ev_key, ev_bytes, 1, ev_error, ev_expires, 'bench'::text"
)
PAYLOAD = '{"n": 1, "pad": "' + "x" * 80 + '"}'


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``ratio`` is ours over bare SQL, the way round that the target is given;
    ``series`` is what goes into plots."""

    what: str
    ours: str
    bare: str
    ratio: float | None
    target: str
    reached: bool
    note: str = ""
    values: dict[str, Number] = field(default_factory=dict)
    series: dict[str, list[Number]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bench:
    """A database with pgque and the floor in it. ``quick`` asks for fewer rounds, ``tcp`` is the way in
    for who cannot use a socket, ``minutes`` is the length of what runs for minutes, 0 if none was asked for.
    ``against`` is the database with the version to compare with, if one was asked for."""

    dsn: str
    quick: bool
    has_cron: bool
    tcp: str = ""
    minutes: float = 0
    against: Bench | None = None

    def connect(self, *, autocommit: bool = True) -> Connection:
        """Open a session."""
        return psycopg.connect(self.dsn, autocommit=autocommit)

    def pick(self, full: int, quick: int) -> int:
        """Return the number of rounds."""
        return quick if self.quick else full


def one(conn: Connection, query: str, *args: object) -> Number:
    """Return the only value of a query."""
    value = value_of(conn, query, *args)
    if not isinstance(value, int | float):
        raise TypeError(f"not a number: {value!r} from {query}")
    return value


def value_of(conn: Connection, query: str, *args: object) -> object:
    """Return the only value of a query, whatever it is."""
    row = conn.execute(query.encode(), args or None).fetchone()
    if row is None:
        raise LookupError(query)
    return row[0]


def queue(conn: Connection, name: str) -> None:
    """Make a queue with consumer ``c``."""
    conn.execute("select pgque.create_queue(%s)", (name,))
    conn.execute("select pgque.subscribe(%s, 'c')", (name,))


def paired(rounds: int, bare: Callable[[], Number], ours: Callable[[], Number]) -> tuple[float, float, float]:
    """Run both in turn; return both medians, and the median of the ratios of neighbours."""
    pairs = []
    for turn in range(rounds + 1):
        # Each one goes first as often as the other; the first round only warms up.
        if turn % 2:
            a = bare()
            b = ours()
        else:
            b = ours()
            a = bare()
        if turn:
            pairs.append((a, b))
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def send_one(bench: Bench) -> list[Row]:
    """`send` in a loop inside the server."""
    calls = 5000
    with bench.connect() as conn:
        queue(conn, "send")
        bare, ours, ratio = paired(
            bench.pick(21, 7),
            lambda: one(conn, "select bench.insert_loop(%s, %s)", calls, PAYLOAD),
            lambda: one(conn, "select bench.send_loop(%s, 'send', %s)", calls, PAYLOAD),
        )
    return [
        Row(
            "send inside the server",
            f"{ours / calls * 1000:.1f} µs",
            f"{bare / calls * 1000:.1f} µs",
            ratio,
            "≤ 3.5 ×",
            ratio <= 3.5,
            "bare INSERT of the same row, same index, looped in PL/pgSQL",
            {"ours_us": ours / calls * 1000, "bare_us": bare / calls * 1000, "ratio": ratio},
        )
    ]


def send_batches(bench: Bench) -> list[Row]:
    """`send_batch` at two sizes."""
    rows = []
    with bench.connect() as conn:
        queue(conn, "batch")
        for size in (1000, 10000):
            payloads = value_of(conn, "select bench.payloads(%s)", size)
            calls = 20000 // size
            bare, ours, ratio = paired(
                bench.pick(21, 7),
                lambda p=payloads, n=calls: one(conn, "select bench.insert_batches(%s, %s)", n, p),  # type: ignore[misc]
                lambda p=payloads, n=calls: one(conn, "select bench.send_batches(%s, 'batch', %s)", n, p),  # type: ignore[misc]
            )
            count = size * calls
            rows.append(
                Row(
                    f"send_batch of {size:,}",
                    f"{count / ours * 1000:,.0f}/s",
                    f"{count / bare * 1000:,.0f}/s",
                    1 / ratio,
                    "≥ 0.85",
                    1 / ratio >= 0.85,
                    "insert … select unnest of the same rows",
                    {
                        "size": size,
                        "ours_per_s": count / ours * 1000,
                        "bare_per_s": count / bare * 1000,
                        "ratio": 1 / ratio,
                    },
                )
            )
    return rows


def receive(bench: Bench) -> list[Row]:
    """`receive` of one window of 100,000, inside the server and into the client."""
    count = 100_000
    with bench.connect() as conn:
        queue(conn, "receive")
        conn.execute("select pgque.send_batch('receive', bench.payloads(%s))", (count,))
        conn.execute("select pgque.ticker('receive')")
        leaf = value_of(conn, "select pgque.current_event_table('receive')")

        def inside(query: str, *args: object) -> Number:
            conn.execute("begin")
            row = conn.execute(query.encode(), args).fetchone()
            conn.execute("rollback")
            assert row is not None and row[1] == count, row
            return float(row[0])

        def fetched(query: str, *args: object) -> Number:
            conn.execute("begin")
            began = time.perf_counter()
            rows = conn.execute(query.encode(), args or None).fetchall()
            took = time.perf_counter() - began
            conn.execute("rollback")
            assert len(rows) == count
            return took * 1000

        results = [
            (
                "inside the server",
                paired(
                    bench.pick(15, 5),
                    lambda: inside("select * from bench.select_ordered(%s::text::regclass)", leaf),
                    lambda: inside("select * from bench.receive_all('receive', 'c', %s)", count),
                ),
            ),
            (
                "into the client",
                paired(
                    bench.pick(9, 3),
                    lambda: fetched(f"select {COLUMNS} from {leaf} order by ev_id"),
                    lambda: fetched("select * from pgque.receive('receive', 'c', %s)", count),
                ),
            ),
        ]
    return [
        Row(
            f"receive of {count:,} {where}",
            f"{ours:.0f} ms",
            f"{bare:.0f} ms",
            ratio,
            "≤ 1.4 ×",
            ratio <= 1.4,
            "SELECT of the same rows and columns, ordered by id",
            {"ours_ms": ours, "bare_ms": bare, "ratio": ratio},
        )
        for where, (bare, ours, ratio) in results
    ]


def batch_sizes(bench: Bench) -> list[Row]:
    """What a message costs in a small and in a big batch, in the first and the eighth call of a session.

    From the sixth call on a session runs plans that were made for no value in particular.
    """
    calls, small, big = 8, 500, bench.pick(20_000, 5_000)
    kinds = {
        "worker: receive": ("{}", ", worker => 'w'", 0),
        "worker: ack": ("{}", ", worker => 'w'", 1),
        "queue with a ttl: receive": ('{"message_ttl": "1 day"}', "", 0),
        "archive_on_ack: ack": ('{"archive_on_ack": true}', "", 1),
    }

    def costs(kind: str, size: int) -> list[float]:
        """Microseconds a message of each call, in a session of its own."""
        config, worker, part = kinds[kind]
        found = []
        with bench.connect() as conn:
            conn.execute("select pgque.create_queue('sizes', %s)", (config,))
            conn.execute("select pgque.subscribe('sizes', 'c')")
            for _ in range(calls):
                conn.execute("select pgque.send_batch('sizes', 'default', bench.payloads(%s))", (size,))
            conn.execute("select pgque.ticker('sizes')")
            get = f"select min(batch_id), count(*) from pgque.receive('sizes', 'c', %s{worker})".encode()
            for _ in range(calls):
                began = time.perf_counter()
                batch = conn.execute(get, (size,)).fetchone()
                received = time.perf_counter()
                assert batch is not None
                assert batch[1] == size
                conn.execute("select pgque.ack(%s)", (batch[0],))
                took = (received - began, time.perf_counter() - received)
                found.append(took[part] / size * 1e6)
            conn.execute("select pgque.drop_queue('sizes', true)")
            while one(conn, "select count(*) from pgque.dropped_queue"):
                conn.execute("select pgque.maint_tables()")
        return found

    rows = []
    for kind in kinds:
        measured = {size: [costs(kind, size) for _ in range(bench.pick(5, 1))] for size in (small, big)}
        for call in (1, calls):
            in_small, in_big = (
                statistics.median(run[call - 1] for run in measured[size]) for size in (small, big)
            )
            rows.append(
                Row(
                    f"{kind}, call {call}, a message of {big:,}",
                    f"{in_big:.1f} µs",
                    f"{in_small:.1f} µs",
                    in_big / in_small,
                    "≤ 1.3 ×",
                    in_big <= 1.3 * in_small,
                    f"bare: in a batch of {small}",
                    {"small_us": in_small, "big_us": in_big, "ratio": in_big / in_small},
                )
            )
    return rows


def cycles(bench: Bench) -> list[Row]:
    """Send, tick, receive and ack, over and over, while other transactions hold xmin."""
    count = bench.pick(12000, 3000)
    times: list[float] = []
    bare: list[float] = []
    changed = (
        "select coalesce(sum(n_tup_upd + n_tup_del), 0)::float from pg_stat_all_tables"
        " where schemaname = 'pgque'"
    )
    with (
        bench.connect() as conn,
        bench.connect(autocommit=False) as reader,
        bench.connect(autocommit=False) as writer,
        bench.connect() as maint,
    ):
        queue(conn, "cycle")
        conn.execute("vacuum")
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select count(*) from bench.held")
        writer.execute("insert into bench.held values (1)")
        changed_before = one(maint, changed)

        def cycle() -> float:
            began = time.perf_counter()
            conn.execute("select pgque.send('cycle', %s::text)", (PAYLOAD,))
            conn.execute("select pgque.ticker('cycle')")
            got = conn.execute("select * from pgque.receive('cycle', 'c')").fetchall()
            assert len(got) == 1
            conn.execute("select pgque.ack(%s)", (got[0][1],))
            return time.perf_counter() - began

        def bare_cycle() -> float:
            began = time.perf_counter()
            for _ in range(4):
                conn.execute(
                    "insert into bench.plain (slot, ev_id, ev_time, ev_txid, ev_type, ev_data) values"
                    " (3, nextval('bench.seq'), clock_timestamp(), pg_current_xact_id(), 'default', %s)",
                    (PAYLOAD,),
                )
            return time.perf_counter() - began

        for _ in range(100):
            cycle()
        next_maint = time.monotonic() + 5
        for n in range(count):
            times.append(cycle())
            if n % 20 == 0:
                bare.append(bare_cycle())
            if time.monotonic() > next_maint:
                maint.execute("select pgque.maint()")  # as the loop does
                next_maint = time.monotonic() + 5
        time.sleep(1.5)
        conn.execute("select 1")  # both sessions hand in their statistics
        maint.execute("select 1")
        time.sleep(0.2)
        dead = one(
            maint,
            "select coalesce(sum(n_dead_tup), 0)::float from pg_stat_all_tables where schemaname = 'pgque'",
        )
        rewritten = one(maint, changed) - changed_before
        reader.rollback()
        writer.rollback()
    tenth = count // 10
    # Medians: on a shared machine a few stalls of the disk or of the scheduler make the means of both differ.
    first = statistics.median(times[:tenth]) * 1000
    last = statistics.median(times[-tenth:]) * 1000
    means = statistics.fmean(times[-tenth:]) / statistics.fmean(times[:tenth])
    bare_ms = statistics.median(bare) * 1000
    middle = statistics.median(times) * 1000
    drift = statistics.median(bare[-(len(bare) // 10) :]) / statistics.median(bare[: len(bare) // 10])
    return [
        Row(
            f"cycle over {count:,} batches, xmin held",
            f"{last:.2f} / {first:.2f} ms",
            f"{bare_ms:.2f} ms",
            last / first,
            "≤ 1.15 ×",
            last / first <= 1.15,
            f"medians of last tenth over first (means {means:.2f} ×, bare {drift:.2f} ×);"
            f" {middle / bare_ms:.2f} × four bare INSERTs",
            {
                "first_ms": first,
                "last_ms": last,
                "growth": last / first,
                "growth_of_means": means,
                "bare_growth": drift,
                **{
                    f"tenth_{n + 1}_ms": statistics.fmean(times[n * tenth : (n + 1) * tenth]) * 1000
                    for n in range(10)
                },
                "median_ms": middle,
                "bare_ms": bare_ms,
            },
        ),
        Row(
            "dead tuples in the schema after that",
            f"{dead:.0f}",
            "–",
            None,
            "< 100",
            dead < 100,
            f"{rewritten:.0f} rows updated or deleted meanwhile",
            {"dead": dead, "updated_or_deleted": rewritten},
        ),
    ]


@contextmanager
def ticking(bench: Bench, *, cron: bool = False) -> Iterator[None]:
    """Run the loop meanwhile: in a session of its own, or by pg_cron."""
    with bench.connect() as admin:
        done = threading.Event()

        def loop() -> None:
            with bench.connect() as conn:
                while not done.is_set():
                    conn.execute("call pgque.ticker_loop()")

        thread = threading.Thread(target=loop, daemon=True)
        if cron:
            admin.execute("select pgque.start()")
        else:
            thread.start()
        running = "select count(*) from pgque.status() where component = 'ticker' and status = 'running'"
        deadline = time.monotonic() + 90
        while not one(admin, running):
            if time.monotonic() > deadline:
                raise TimeoutError("the loop did not start")
            time.sleep(0.1)
        time.sleep(0.5)
        try:
            yield
        finally:
            done.set()
            admin.execute("select pgque.stop()")
            if thread.is_alive():
                thread.join(10)
            while one(admin, running):
                time.sleep(0.05)


class Listener:
    """A consumer that waits for the queue's NOTIFY and then receives."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.name = name
        self.conn = bench.connect()
        queue(self.conn, name)
        self.conn.execute(f'listen "pgque_{name}"')
        self.conn.execute("set application_name = 'bench listener'")

    def wait(self, count: int = 1, timeout: float = 20) -> tuple[float, int]:
        """Receive and finish until ``count`` messages came; return when the last one did, and how many."""
        came = 0
        deadline = time.perf_counter() + timeout
        while True:
            rows = self.conn.execute("select * from pgque.receive(%s, 'c', 1000)", (self.name,)).fetchall()
            now = time.perf_counter()
            if rows:
                came += len(rows)
                self.conn.execute("select pgque.ack(%s)", (rows[0][1],))
                if came >= count:
                    return now, came
            elif now > deadline:
                raise TimeoutError(f"{came} of {count} messages after {timeout} s")
            else:
                for _ in self.conn.notifies(timeout=2, stop_after=1):
                    pass


def round_trips(bench: Bench, count: int) -> float:
    """Return the median of INSERT + NOTIFY in one session until another has read the row, in ms."""
    times = []
    with bench.connect() as sender, bench.connect() as listener:
        listener.execute("listen bench")
        for _ in range(count):
            began = time.perf_counter()
            with sender.transaction():
                sender.execute(
                    "insert into bench.plain (slot, ev_id, ev_time, ev_txid, ev_type, ev_data) values"
                    " (3, nextval('bench.seq'), clock_timestamp(), pg_current_xact_id(), 'default', %s)",
                    (PAYLOAD,),
                )
                sender.execute("notify bench")
            for _ in listener.notifies(timeout=5, stop_after=1):
                pass
            listener.execute(
                "select * from bench.plain where ev_txid = (select max(ev_txid) from bench.plain)"
            ).fetchall()
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def latencies(bench: Bench, name: str, count: int, pause: tuple[float, float]) -> list[float]:
    """Send single messages at random times; return ms from the call of send to the end of receive."""
    listener = Listener(bench, name)
    chance = random.Random(7)  # noqa: S311
    times = []
    with bench.connect() as sender, listener.conn:
        for n in range(count + 5):
            time.sleep(chance.uniform(*pause))
            began = time.perf_counter()
            sender.execute("select pgque.send(%s, %s::text)", (name, PAYLOAD))
            arrived, _ = listener.wait()
            if n >= 5:
                times.append((arrived - began) * 1000)
    return times


def lone_message(bench: Bench) -> list[Row]:
    """End-to-end latency with default settings."""
    count = bench.pick(200, 60)
    with ticking(bench):
        times = latencies(bench, "lone", count, (0.15, 0.35))
    bare = round_trips(bench, 50)
    p50, worst = statistics.median(times), max(times)
    return [
        Row(
            "lone message, 100 ms tick, p50 / max",
            f"{p50:.0f} / {worst:.0f} ms",
            f"{bare:.1f} ms",
            p50 / bare,
            "≤ 60 / ≤ 150 ms",
            p50 <= 60 and worst <= 150,
            f"{count} messages, p99 {percentile(times, 0.99):.0f} ms; bare: INSERT + NOTIFY + SELECT",
            {"p50_ms": p50, "p99_ms": percentile(times, 0.99), "max_ms": worst, "bare_ms": bare},
        )
    ]


def fast_tick(bench: Bench) -> list[Row]:
    """End-to-end latency with a tick period of 10 ms, by the loop and by pg_cron."""
    rows = []
    count = bench.pick(500, 100)
    with bench.connect() as admin:
        for cron in (False, True) if bench.has_cron else (False,):
            admin.execute("select pgque.set_tick_period_ms(10)")
            with ticking(bench, cron=cron):
                times = latencies(bench, f"fast{cron:d}", count, (0.02, 0.1))
            admin.execute("select pgque.set_tick_period_ms(100)")
            bare = round_trips(bench, 50)
            p50, p99 = statistics.median(times), percentile(times, 0.99)
            rows.append(
                Row(
                    f"10 ms tick by {'pg_cron' if cron else 'the loop'}, p50 / p99",
                    f"{p50:.1f} / {p99:.1f} ms",
                    f"{bare:.1f} ms",
                    p50 / bare,
                    "≤ 8 / ≤ 30 ms",
                    p50 <= 8 and p99 <= 30,
                    f"{count} messages, max {max(times):.0f} ms; bare: INSERT + NOTIFY + SELECT",
                    {"p50_ms": p50, "p99_ms": p99, "max_ms": max(times), "bare_ms": bare},
                )
            )
    return rows


def late_commit(bench: Bench) -> list[Row]:
    """An event whose transaction commits after a later event was ticked and delivered."""
    count = bench.pick(30, 8)
    times = []
    with (
        ticking(bench),
        bench.connect() as sender,
        bench.connect(autocommit=False) as late,
    ):
        listener = Listener(bench, "late")
        with listener.conn:
            for _ in range(count):
                late.execute("select pgque.send('late', %s::text)", (PAYLOAD,))
                sender.execute("select pgque.send('late', %s::text)", (PAYLOAD,))
                listener.wait()
                time.sleep(0.2)
                began = time.perf_counter()
                late.commit()
                arrived, _ = listener.wait()
                times.append(arrived - began)
    return [
        Row(
            "late commit to delivery, median / max",
            f"{statistics.median(times):.3f} / {max(times):.3f} s",
            "–",
            None,
            "≤ 0.3 s",
            max(times) <= 0.3,
            f"{count} transactions that commit after a later tick",
            {"median_s": statistics.median(times), "max_s": max(times)},
        )
    ]


def big_window(bench: Bench) -> list[Row]:
    """One transaction's events, received 500 at a time."""
    rows = []
    with bench.connect() as conn:
        for count in (200_000, 1_000_000):
            name = f"big{count}"
            queue(conn, name)
            with conn.transaction():
                for _ in range(count // 20_000):
                    conn.execute("select pgque.send_batch(%s, bench.payloads(20000))", (name,))
            conn.execute("select pgque.ticker(%s)", (name,))
            if count == 200_000:
                leaf = value_of(conn, "select pgque.current_event_table(%s)", name)
                conn.execute(f"insert into bench.paged select * from {leaf}".encode())
                conn.execute("create index on bench.paged (ev_id)")
                conn.execute("analyze bench.paged")

            seen: list[int] = []
            slices: list[float] = []
            began = time.perf_counter()
            while True:
                start = time.perf_counter()
                got = conn.execute("select * from pgque.receive(%s, 'c', 500)", (name,)).fetchall()
                if not got:
                    break
                conn.execute("select pgque.ack(%s)", (got[0][1],))
                slices.append(time.perf_counter() - start)
                seen += (message[0] for message in got)
            took = time.perf_counter() - began
            complete = seen == sorted(set(seen)) and len(seen) == count

            began = time.perf_counter()
            last = paged = 0
            while page := conn.execute(
                f"select {COLUMNS} from bench.paged where ev_id > %s order by ev_id limit 500".encode(),
                (last,),
            ).fetchall():
                conn.execute("insert into bench.held values (1)")
                last = page[-1][0]
                paged += len(page)
            bare = paged / (time.perf_counter() - began)
            rate = len(seen) / took
            tenth = len(slices) // 10
            rows.append(
                Row(
                    f"window of {count:,}, receive(500) + ack",
                    f"{rate:,.0f}/s",
                    f"{bare:,.0f}/s",
                    rate / bare,
                    "all, ≥ 50,000/s",
                    complete and rate >= 50_000,
                    ("all" if complete else f"ONLY {len(set(seen)):,}")
                    + f"; a slice {statistics.median(slices) * 1000:.1f} ms, the slowest"
                    + f" {max(slices) * 1000:.0f} ms; bare: keyset pages, an INSERT each",
                    {
                        "received": len(set(seen)),
                        "per_s": rate,
                        "bare_per_s": bare,
                        "slice_ms": statistics.median(slices) * 1000,
                        "slowest_slice_ms": max(slices) * 1000,
                        "growth": statistics.fmean(slices[-tenth:])
                        / statistics.fmean(slices[tenth : 2 * tenth]),
                    },
                )
            )
            conn.execute("select pgque.drop_queue(%s, true)", (name,))
    return rows


def nacks(bench: Bench) -> list[Row]:
    """`nack` in a batch of 3,000: one message, and an array."""
    singles: list[float] = []
    many: list[float] = []
    bare: list[float] = []
    with bench.connect() as conn:
        queue(conn, "nack")
        for _ in range(bench.pick(5, 3)):
            conn.execute("select pgque.send_batch('nack', bench.payloads(3000))")
            conn.execute("select pgque.ticker('nack')")
            got = conn.execute("select * from pgque.receive('nack', 'c', 3000)").fetchall()
            assert len(got) == 3000
            batch = got[0][1]
            ids = [message[0] for message in got]
            random.Random(7).shuffle(ids)  # noqa: S311
            for n in range(60):
                bare.append(one(conn, "select bench.insert_failed(%s)", ids[n]))
                singles.append(one(conn, "select bench.nack_one(%s, %s)", batch, ids[n]))
            conn.execute("select pgque.ack(%s)", (batch,))
            conn.execute("truncate bench.failed")
            conn.execute("delete from pgque.retry_queue")

            conn.execute("select pgque.send_batch('nack', bench.payloads(3000))")
            conn.execute("select pgque.ticker('nack')")
            got = conn.execute("select * from pgque.receive('nack', 'c', 3000)").fetchall()
            many.append(one(conn, "select bench.nack_many(%s, %s)", got[0][1], [m[0] for m in got]))
            conn.execute("select pgque.ack(%s)", (got[0][1],))
            conn.execute("delete from pgque.retry_queue")
    single, array, floor = statistics.median(singles), statistics.median(many), statistics.median(bare)
    return [
        Row(
            "one nack in a batch of 3,000",
            f"{single:.2f} ms",
            f"{floor:.3f} ms",
            single / floor,
            "≤ 0.5 ms",
            single <= 0.5,
            f"p95 {percentile(singles, 0.95):.2f} ms; bare: one INSERT into an equal retry table",
            {"median_ms": single, "p95_ms": percentile(singles, 0.95), "bare_ms": floor},
        ),
        Row(
            "nack of all 3,000 in one array",
            f"{array:.0f} ms",
            f"{3000 * floor:.0f} ms",
            array / (3000 * floor),
            "set-based",
            array < 3000 * single / 3,
            f"{array / 3000 * 1000:.0f} µs a message; bare: 3,000 INSERTs",
            {"ms": array, "per_message_us": array / 3},
        ),
    ]


def retries(bench: Bench) -> list[Row]:
    """200 retries that become due together."""
    times = []
    with ticking(bench), bench.connect() as admin:
        listener = Listener(bench, "retry")
        conn = listener.conn
        with conn:
            for _ in range(bench.pick(8, 3)):
                conn.execute("select pgque.send_batch('retry', bench.payloads(200))")
                while not (got := conn.execute("select * from pgque.receive('retry', 'c', 1000)").fetchall()):
                    time.sleep(0.05)
                assert len(got) == 200
                conn.execute(
                    "select pgque.nack(%s, %s::bigint[], '1.2 seconds')", (got[0][1], [m[0] for m in got])
                )
                conn.execute("select pgque.ack(%s)", (got[0][1],))
                due_in = one(
                    admin,
                    "select extract(epoch from max(ev_retry_after) - clock_timestamp())::float"
                    " from pgque.retry_queue",
                )
                due = time.perf_counter() + due_in
                arrived, _ = listener.wait(200)
                times.append(arrived - due)
    return [
        Row(
            "200 retries due at once, until delivered",
            f"{statistics.median(times):.3f} / {max(times):.3f} s",
            "–",
            None,
            "≤ 0.5 s",
            max(times) <= 0.5,
            f"median / max of {len(times)}, from the due time of the last one",
            {"median_s": statistics.median(times), "max_s": max(times)},
        )
    ]


SUBJECTS: dict[str, Callable[[Bench], list[Row]]] = {
    "send": send_one,
    "batch": send_batches,
    "receive": receive,
    "sizes": batch_sizes,
    "cycle": cycles,
    "lone": lone_message,
    "fast": fast_tick,
    "late": late_commit,
    "window": big_window,
    "nack": nacks,
    "retry": retries,
}
