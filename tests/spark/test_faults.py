"""Drivers, connections and servers die under a stream from queue to queue: what is sent arrives once."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from conftest import Role
from pgque import embedded
from sql.helpers import Connection, configure, forced_tick, leaf, payloads, receive, rows, subscribe, value
from support import servers
from support.servers import TestServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

SPARK_CONF = {"spark.master": "local[2,3]"}  # a failed task is run again

# A driver of its own; it finds `spark`.
JOB = """
import os
source, target, checkpoint = sys.argv[1:4]
url = os.environ["JOB_URL"]
rows = (
    spark.readStream.format("pgque")
    .option("queues" if "," in source else "queue", source)
    .options(url=url, consumer="job", startingAt="earliest", numPartitions="2")
    .load()
)
writer = rows.selectExpr(
    "type", "concat('<', payload, '>') as payload", "if(crc32(payload) % 3 = 0, 0.2, null) as delay",
    "if(crc32(payload) % 5 = 0, payload, null) as key", "3600 as ttl",
).writeStream.format("pgque")
writer = writer.options(url=url, queue=target, checkpointLocation=checkpoint, replaceByKey="true")
if len(sys.argv) > 4:
    writer = writer.trigger(availableNow=True)
query = writer.start()
print("RUNNING", flush=True)
query.awaitTermination()
"""


@pytest.fixture
def worker(roles: Callable[..., Role]) -> Role:
    """The role of the job: it may read and write, nothing else."""
    return roles("reader", "writer")


@pytest.fixture
def target(new_queue: Callable[[], str], conn: Connection) -> str:
    """A queue with a consumer check."""
    name = new_queue()
    subscribe(conn, name, "check")
    return name


def expected(sent: Counter[str]) -> Counter[str | None]:
    """Tell what the job makes of payloads."""
    return Counter({f"<{payload}>": n for payload, n in sent.items()})


def numbers(first: int, last: int) -> Counter[str]:
    """Count payloads first to last - 1."""
    return Counter(str(n) for n in range(first, last))


def put(conn: Connection, queue: str, sent: Counter[str]) -> None:
    """Send payloads in one transaction, and tick."""
    value(conn, "select pgque.send_batch(%s, 'default', %s::text[])", queue, list(sent.elements()))
    forced_tick(conn, queue)


def take(conn: Connection, queue: str) -> Counter[str | None]:
    """Receive all there is; what is delayed, once it is due."""
    delayed = (
        "select exists (select from pgque.retry_queue as r join pgque.queue as q on q.queue_id = r.ev_queue"
        " where q.queue_name = %s)"
    )
    while value(conn, delayed, queue):
        value(conn, "select pgque.maint_retry_events()")
    forced_tick(conn, queue)
    return Counter(payloads(conn, queue, "check", 5_000))


def dice(seed: int) -> random.Random:
    """Return chance that can be had again."""
    return random.Random(seed)  # noqa: S311


class Traffic:
    """Producers of every temper, a ticker and a reader of the target, each in a thread, until told to stop."""

    def __init__(self, dsn: str, sources: list[str], target: str, seed: int) -> None:
        self.sent: Counter[str] = Counter()
        self.got: Counter[str | None] = Counter()
        self.ticks_spanned = 0
        self._dsn, self._sources, self._target, self._seed = dsn, sources, target, seed
        self._lock = threading.Lock()
        self._produce, self._run = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        self._produce.set()
        self._run.set()
        self._producers = [threading.Thread(target=self._guard, args=(self._quick, 0))]
        self._producers += [threading.Thread(target=self._guard, args=(self._slow, n)) for n in (1, 2, 3)]
        self._others = [
            threading.Thread(target=self._guard, args=(call, 9)) for call in (self._ticker, self._collect)
        ]
        for thread in self._producers + self._others:
            thread.start()

    def stop_producers(self) -> None:
        """Have every producer finish its transaction."""
        self._produce.clear()
        for thread in self._producers:
            thread.join(30)

    def stop(self) -> None:
        """End all threads; raise what one of them raised."""
        self.stop_producers()
        self._run.clear()
        for thread in self._others:
            thread.join(30)
        if self._errors:
            raise self._errors[0]

    def _guard(self, call: Callable[[Connection, random.Random, int], None], number: int) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                call(connection, dice(self._seed + number), number)
        except BaseException as error:
            self._errors.append(error)
            self._produce.clear()

    def _send(self, conn: Connection, batch: list[str]) -> None:
        source = self._sources[len(batch) % len(self._sources)]
        value(conn, "select pgque.send_batch(%s, 'default', %s::text[])", source, batch)

    def _quick(self, conn: Connection, chance: random.Random, number: int) -> None:
        sent = 0
        while self._produce.is_set():
            batch = [f"{number}-{sent + n}" for n in range(chance.randint(1, 20))]
            sent += len(batch)
            kept = chance.random() > 0.05
            with contextlib.suppress(psycopg.Rollback), conn.transaction():
                self._send(conn, batch)
                if not kept:
                    raise psycopg.Rollback
            if kept:
                with self._lock:
                    self.sent.update(batch)
            time.sleep(chance.uniform(0, 0.08))

    def _slow(self, conn: Connection, chance: random.Random, number: int) -> None:
        sent = 0
        newest = (
            "select max(t.tick_id) from pgque.tick as t join pgque.queue as q on t.tick_queue = q.queue_id"
        )
        newest += " where q.queue_name = %s"
        while self._produce.is_set():
            whole: list[str] = []
            kept = chance.random() > 0.2
            before = value(conn, newest, self._sources[0])
            with contextlib.suppress(psycopg.Rollback), conn.transaction():
                for _ in range(chance.randint(2, 12)):
                    batch = [f"{number}-{sent + n}" for n in range(chance.randint(1, 20))]
                    sent += len(batch)
                    whole += batch
                    self._send(conn, batch)
                    time.sleep(chance.uniform(0, 0.5))
                if not kept:
                    raise psycopg.Rollback
            if kept:
                with self._lock:
                    self.sent.update(whole)
                    self.ticks_spanned += (value(conn, newest, self._sources[0]) or 0) - (before or 0)

    def _ticker(self, conn: Connection, chance: random.Random, number: int) -> None:
        turn = 0
        while self._run.is_set():
            turn += 1
            for name in (*self._sources, self._target):
                value(conn, "select pgque.ticker(%s)", name)
            if turn % 10 == 0:
                value(conn, "select pgque.maint()")
            time.sleep(0.05)

    def _collect(self, conn: Connection, chance: random.Random, number: int) -> None:
        while self._run.is_set():
            batch = receive(conn, self._target, "check", 2_000)
            self.got.update(m.payload for m in batch)
            if batch:
                value(conn, "select pgque.ack(%s)", batch[0].batch_id)
            else:
                time.sleep(0.02)


def lively(conn: Connection, *queues: str) -> None:
    """Tick and rotate these queues often."""
    for queue in queues:
        configure(
            conn,
            queue,
            ticker_max_lag="40 milliseconds",
            ticker_idle_period="1 second",
            rotation_period="3 seconds",
        )


def survive_kills(
    run_driver: Callable[..., Any],
    dsn: str,
    conn: Connection,
    worker: Role,
    sources: list[str],
    target: str,
    checkpoint: Path,
    wait_until: Callable[..., None],
    kills: int,
) -> None:
    """Kill the driver under traffic, as its position moves and at random moments; what was sent has to arrive,
    once."""
    position = "select i.last_tick from pgque.get_consumer_info(%s, 'job') as i"
    seed = secrets.randbelow(10**9)
    chance = dice(seed)
    lively(conn, *sources, target)
    # Before the first message, since what nobody waits for is gone with the next rotations.
    for source in sources:
        subscribe(conn, source, "job")
    traffic = Traffic(dsn, sources, target, seed)
    try:
        for round_ in range(kills + 1):
            driver = run_driver(JOB, ",".join(sources), target, str(checkpoint), env={"JOB_URL": worker.dsn})
            driver.wait_for("RUNNING")
            before = traffic.got.total()
            wait_until(
                lambda d=driver, b=before: traffic.got.total() > b or not d.running,
                f"round {round_} of seed {seed} makes progress",
                90,
            )
            assert driver.running, driver.output()[-4000:]
            if round_ < kills:
                if round_ % 2:
                    time.sleep(chance.uniform(0, 2.5))
                else:
                    # When the position moves, the checkpoint must have what it stands for.
                    stands = [value(conn, position, source) for source in sources]
                    while [value(conn, position, source) for source in sources] == stands and driver.running:
                        pass
                assert driver.running, driver.output()[-4000:]
                driver.kill()
        traffic.stop_producers()

        def complete() -> bool:
            return traffic.got.total() >= traffic.sent.total() or not driver.running

        wait_until(complete, f"the end of seed {seed}", 120)
        # Behind this one nothing can be on its way.  The ticker of the traffic finds it.
        traffic.sent.update(["last"])
        value(conn, "select pgque.send(%s, 'last'::text)", sources[0])
        wait_until(complete, f"the last message of seed {seed}", 60)
        assert driver.running, driver.output()[-4000:]
        driver.end()
    finally:
        traffic.stop()
    got = traffic.got + take(conn, target)
    assert got == expected(traffic.sent), f"seed {seed}"
    assert traffic.sent.total() > 1_000
    assert traffic.ticks_spanned > 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_drivers_lose_and_double_nothing(
    run_driver: Callable[..., Any],
    dsn: str,
    conn: Connection,
    worker: Role,
    new_queue: Callable[[], str],
    target: str,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    sources = [new_queue(), new_queue()]
    survive_kills(run_driver, dsn, conn, worker, sources, target, tmp_path / "checkpoint", wait_until, 1)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.timeout(1800)
def test_drivers_killed_many_times_lose_and_double_nothing(
    run_driver: Callable[..., Any],
    dsn: str,
    conn: Connection,
    worker: Role,
    new_queue: Callable[[], str],
    target: str,
    tmp_path: Path,
    wait_until: Callable[..., None],
    count: int,
) -> None:
    sources = [new_queue() for _ in range(count)]
    survive_kills(run_driver, dsn, conn, worker, sources, target, tmp_path / "checkpoint", wait_until, 8)


# --- At a chosen moment -------------------------------------------------------------------------------


class Stream:
    """A stream from queue to queue in the module's session, which can be started again."""

    def __init__(self, spark: SparkSession, dsn: str, source: str, target: str, checkpoint: Path) -> None:
        self._spark, self._dsn, self._checkpoint = spark, dsn, checkpoint
        self.source, self.target = source, target
        self.query: StreamingQuery
        self.start()

    def start(self) -> None:
        """Start the query, or go on where it ended."""
        frame = (
            self._spark.readStream.format("pgque")
            .options(
                url=self._dsn, queue=self.source, consumer="job", startingAt="earliest", numPartitions="2"
            )
            .load()
        )
        self.query = (
            frame.selectExpr("type", "concat('<', payload, '>') as payload")
            .writeStream.format("pgque")
            .options(url=self._dsn, queue=self.target, checkpointLocation=str(self._checkpoint))
            .start()
        )

    def failed(self) -> str | None:
        """Return why the query ended, None while it runs."""
        if self.query.isActive:
            return None
        return str(self.query.exception())


@pytest.fixture
def stream(
    spark: SparkSession, worker: Role, queue: str, target: str, tmp_path: Path
) -> Iterator[Callable[..., Stream]]:
    """stream() starts a stream from the queue to the target as the role of the job."""
    started: list[Stream] = []

    def do(dsn: str | None = None) -> Stream:
        started.append(Stream(spark, dsn or worker.dsn, queue, target, tmp_path / "checkpoint"))
        return started[-1]

    yield do
    for one in started:
        one.query.stop()


class Watch:
    """Collect what comes out of the target, and see whom the job's sessions wait for."""

    def __init__(self, conn: Connection, stream: Stream, wait_until: Callable[..., None]) -> None:
        self.conn, self.stream, self._wait_until = conn, stream, wait_until
        self.got: Counter[str | None] = Counter()

    def arrive(self, sent: Counter[str], timeout: float = 60) -> None:
        """Wait until as much has arrived as was sent, and see that it is the same."""

        def enough() -> bool:
            self.got += take(self.conn, self.stream.target)
            return self.got.total() >= sent.total() or self.stream.failed() is not None

        self._wait_until(enough, "all arrives", timeout)
        assert self.stream.failed() is None, self.stream.failed()
        assert self.got == expected(sent)

    def waiting(self, query: str) -> int:
        """Wait until a session of the job waits for a lock in such a query; return its pid."""
        found: list[Any] = []

        def seen() -> bool:
            found[:] = rows(
                self.conn,
                "select a.pid from pg_stat_activity as a where a.application_name like 'pgque-spark/%%'"
                " and a.datname = current_database() and a.wait_event_type = 'Lock' and a.query ilike %s",
                f"%{query}%",
            )
            return bool(found) or self.stream.failed() is not None

        self._wait_until(seen, f"{query} waits", 60)
        assert self.stream.failed() is None, self.stream.failed()
        return int(found[0][0])

    def failed(self) -> str:
        """Wait until the query has failed; return why."""
        self._wait_until(lambda: self.stream.failed() is not None, "the query fails", 60)
        return str(self.stream.failed())


@pytest.fixture
def watch(conn: Connection, wait_until: Callable[..., None]) -> Callable[[Stream], Watch]:
    """watch(stream): what comes out of it."""
    return lambda stream: Watch(conn, stream, wait_until)


def hold(connect: Callable[..., Connection], *tables: str, mode: str = "share") -> Connection:
    """Lock tables: share keeps out who writes, access exclusive who reads too."""
    holder = connect(autocommit=False)
    holder.execute(f"lock table {', '.join(tables)} in {mode} mode".encode())
    return holder


def kill_session(conn: Connection, pid: int) -> None:
    """End a session and wait until it is gone."""
    assert value(conn, "select pg_terminate_backend(%s, 10000)", pid)


STAGE = ("pgque.sink_stage_0", "pgque.sink_stage_1")
EPOCHS = ("pgque.sink_epoch_0", "pgque.sink_epoch_1")

# What a session of that kind is doing when it waits
KINDS = {
    "reader": "pgque.read_window_cursor(",
    "staging": 'COPY "pgque" . "sink_stage',
    "commit": "sink_commit",
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("times", [1, 2])
def test_a_session_that_is_ended_is_made_up_for(
    stream: Callable[..., Stream],
    watch: Callable[[Stream], Watch],
    conn: Connection,
    connect: Callable[..., Connection],
    queue: str,
    kind: str,
    times: int,
) -> None:
    watched = watch(stream())
    put(conn, queue, numbers(0, 100))
    watched.arrive(numbers(0, 100))
    if kind == "reader":
        # Nobody can send behind this lock: what is to be read gets visible by a tick.
        value(conn, "select pgque.send_batch(%s, 'default', %s::text[])", queue, list(numbers(100, 200)))
        holder = hold(connect, leaf(conn, queue), mode="access exclusive")
        forced_tick(conn, queue)
    else:
        holder = hold(connect, *(STAGE if kind == "staging" else EPOCHS))
        put(conn, queue, numbers(100, 200))
    gone: set[int] = set()
    for _ in range(times):
        pid = watched.waiting(KINDS[kind])
        assert pid not in gone
        gone.add(pid)
        kill_session(conn, pid)
    holder.rollback()
    if kind == "commit" and times == 2:
        # One more try is made; then the query fails and says so.
        watched.failed()
        watched.stream.start()
    watched.arrive(numbers(0, 200))
    put(conn, queue, numbers(200, 300))
    watched.arrive(numbers(0, 300))


def test_a_driver_whose_session_is_ended_connects_again_and_keeps_its_consumer(
    stream: Callable[..., Stream],
    watch: Callable[[Stream], Watch],
    conn: Connection,
    queue: str,
    wait_until: Callable[..., None],
) -> None:
    def owner() -> int | None:
        found: int | None = value(
            conn,
            "select a.pid from pg_stat_activity as a join pg_locks as l on l.pid = a.pid"
            " where l.locktype = 'advisory' and l.granted and a.application_name like 'pgque-spark/%%'"
            " and a.datname = current_database()",
        )
        return found

    watched = watch(stream())
    sent: Counter[str] = Counter()
    for turn in range(3):
        sent += numbers(turn * 100, turn * 100 + 100)
        put(conn, queue, numbers(turn * 100, turn * 100 + 100))
        watched.arrive(sent)
        before = owner()
        assert before is not None
        kill_session(conn, before)
        wait_until(lambda b=before: owner() not in (None, b), "the consumer is taken again", 30)
    sent += numbers(300, 400)
    put(conn, queue, numbers(300, 400))
    watched.arrive(sent)


def test_a_transaction_open_over_many_ticks_arrives_when_it_commits(
    stream: Callable[..., Stream],
    watch: Callable[[Stream], Watch],
    conn: Connection,
    connect: Callable[..., Connection],
    queue: str,
) -> None:
    watched = watch(stream())
    late, never = connect(autocommit=False), connect(autocommit=False)
    sent: Counter[str] = Counter()
    for turn in range(12):
        for open_one, name in ((late, "late"), (never, "never")):
            value(open_one, "select pgque.send(%s, %s::text)", queue, f"{name}-{turn}")
        put(conn, queue, numbers(turn * 10, turn * 10 + 10))
        sent += numbers(turn * 10, turn * 10 + 10)
        if turn % 4 == 3:
            watched.arrive(sent)
    late.commit()
    never.rollback()
    put(conn, queue, Counter(["last"]))
    sent += Counter([f"late-{turn}" for turn in range(12)] + ["last"])
    watched.arrive(sent)


# --- The server ---------------------------------------------------------------------------------------


@pytest.fixture
def durable(server: TestServer) -> Iterator[embedded.Server]:
    """A server of the test's own that writes to disk what it says it wrote."""
    bindir = server.process.binaries.bindir if server.process else None
    try:
        own = embedded.start(bindir, settings={"fsync": "on", "shared_buffers": "64MB"})
    except embedded.EmbeddedServerError as error:
        pytest.skip(f"no server of its own: {error}")
    with own:
        with psycopg.connect(own.dsn) as connection:
            connection.execute(servers.SQL_FILE.read_bytes())
        yield own


def test_a_server_that_stops_between_staging_and_commit_loses_and_doubles_nothing(
    spark: SparkSession, durable: embedded.Server, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    def open_conn(*, autocommit: bool = True) -> Connection:
        return psycopg.connect(durable.dsn, autocommit=autocommit)

    def staged() -> int:
        return int(
            value(
                conn,
                "select coalesce(sum(s.rows), 0) from pgque.sink_stage as s",
            )
        )

    conn = open_conn()
    for name in ("source", "target"):
        value(conn, "select pgque.create_queue(%s)", name)
    subscribe(conn, "target", "check")
    put(conn, "source", numbers(0, 300))
    stream = Stream(spark, durable.dsn, "source", "target", tmp_path / "checkpoint")
    sent = numbers(0, 300)
    try:
        watched = Watch(conn, stream, wait_until)
        watched.arrive(sent)
        for turn in range(2):
            holder = hold(open_conn, *EPOCHS)
            batch = numbers(300 + turn * 300, 600 + turn * 300)
            sent += batch
            put(conn, "source", batch)
            watched.waiting("sink_commit")
            assert staged() >= 300
            durable.restart("immediate")
            for connection in (conn, holder):
                connection.close()
            conn = watched.conn = open_conn()
            assert staged() >= 300, "what was staged outlives a crash"
            told = watched.failed()
            assert "password" not in told
            stream.start()
            watched.arrive(sent)
        put(conn, "source", numbers(900, 1_000))
        watched.arrive(sent + numbers(900, 1_000))
    finally:
        stream.query.stop()
        conn.close()


class NoStandby:
    """A server whose commits wait, once done, for a standby that is not there."""

    def __init__(self, server: embedded.Server, wait_until: Callable[..., None]) -> None:
        self._server, self._wait_until = server, wait_until
        self._probe: threading.Thread | None = None
        self._over = threading.Event()

    def connect(self, *, autocommit: bool = True) -> Connection:
        """Open a session that does not wait."""
        return psycopg.connect(self._server.dsn, autocommit=autocommit, options="-c synchronous_commit=local")

    def waiting(self, conn: Connection, like: str) -> list[int]:
        """Return the sessions that wait in such a query."""
        found = rows(
            conn,
            "select pid from pg_stat_activity where wait_event = 'SyncRep' and application_name like %s",
            like,
        )
        return [row[0] for row in found]

    def _set(self, conn: Connection, name: str) -> None:
        conn.execute(f"alter system set synchronous_standby_names = '{name}'".encode())
        value(conn, "select pg_reload_conf()")

    def begin(self, conn: Connection) -> None:
        """Have commits wait from now on."""

        def probe() -> None:
            with psycopg.connect(self._server.dsn, autocommit=True, application_name="probe") as own:
                # The setting reaches this session before the server's checkpointer has it: only then do commits wait.
                while not self._over.is_set():
                    own.execute("create table if not exists probe ()")
                    own.execute("drop table probe")

        self._over.clear()
        self._set(conn, "nobody")
        self._probe = threading.Thread(target=probe)
        self._probe.start()
        self._wait_until(lambda: self.waiting(conn, "probe"), "commits wait", 60)

    def end(self, conn: Connection) -> None:
        """Let go of all commits."""
        self._over.set()
        self._set(conn, "")
        if self._probe is not None:
            self._probe.join(20)


@pytest.fixture
def no_standby(durable: embedded.Server, wait_until: Callable[..., None]) -> NoStandby:
    """A server whose commits can be made to wait."""
    return NoStandby(durable, wait_until)


@pytest.fixture
def own(no_standby: NoStandby) -> Iterator[Connection]:
    """A connection to that server, with queues source and target."""
    with no_standby.connect() as conn:
        for name in ("source", "target"):
            value(conn, "select pgque.create_queue(%s)", name)
        subscribe(conn, "target", "check")
        yield conn


def commit_without_answer(
    no_standby: NoStandby, own: Connection, alive: Callable[[], bool], wait_until: Callable[..., None]
) -> int:
    """Have the next commit of the job go through and wait then; return its session."""
    holder = hold(no_standby.connect, *EPOCHS)
    put(own, "source", numbers(100, 600))
    waits = "select pid from pg_stat_activity where wait_event_type = 'Lock' and query like '%%sink_commit%%'"
    wait_until(lambda: rows(own, waits) or not alive(), "the commit begins", 120)
    assert alive()
    no_standby.begin(own)
    holder.close()
    wait_until(lambda: no_standby.waiting(own, "pgque-spark/%"), "the commit is done and waits", 20)
    (pid,) = no_standby.waiting(own, "pgque-spark/%")
    return pid


def test_a_commit_that_went_through_and_lost_its_session_is_not_made_twice(
    spark: SparkSession,
    no_standby: NoStandby,
    own: Connection,
    durable: embedded.Server,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    stream = Stream(spark, durable.dsn, "source", "target", tmp_path / "checkpoint")
    try:
        watched = Watch(own, stream, wait_until)
        put(own, "source", numbers(0, 100))
        watched.arrive(numbers(0, 100))
        pid = commit_without_answer(no_standby, own, lambda: stream.failed() is None, wait_until)
        kill_session(own, pid)
        # It did go through, and the query was not told.
        watched.got += take(own, "target")
        assert watched.got == expected(numbers(0, 600))
        no_standby.end(own)
        put(own, "source", numbers(600, 700))
        watched.arrive(numbers(0, 700))
    finally:
        stream.query.stop()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_commit_that_went_through_and_lost_its_driver_is_not_made_twice(
    run_driver: Callable[..., Any],
    no_standby: NoStandby,
    own: Connection,
    durable: embedded.Server,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    def start() -> Any:
        return run_driver(
            JOB, "source", "target", str(tmp_path / "checkpoint"), "now", env={"JOB_URL": durable.dsn}
        )

    # The first and only micro-batch: Spark asks where it begins again.
    put(own, "source", numbers(0, 100))
    driver = start()
    pid = commit_without_answer(no_standby, own, lambda: driver.running, wait_until)
    driver.kill()
    no_standby.end(own)
    # Let go is not done yet: others see the commit once its session has run on, and finds nobody to tell.
    wait_until(
        lambda: not rows(own, "select pid from pg_stat_activity where pid = %s", pid), "its session ends"
    )
    got = take(own, "target")
    assert expected(numbers(0, 100)) <= got
    start().finish()
    got += take(own, "target")
    assert got == expected(numbers(0, 600))


# --- Executors in processes of their own --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_executors_of_a_cluster_read_and_write_and_one_that_dies_is_made_up_for(
    run_driver: Callable[..., Any],
    conn: Connection,
    connect: Callable[..., Connection],
    worker: Role,
    queue: str,
    target: str,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    def staging() -> bool:
        return bool(
            value(
                conn,
                "select count(*) from pg_stat_activity where application_name like 'pgque-spark/%%'"
                " and datname = current_database() and wait_event_type = 'Lock' and query ilike 'copy%%'",
            )
        )

    for first in (0, 1_000):
        put(conn, queue, numbers(first, first + 1_000))
    holder = hold(connect, *STAGE)
    import pyspark

    driver = run_driver(
        JOB,
        queue,
        target,
        str(tmp_path / "checkpoint"),
        "now",
        conf={"spark.master": "local-cluster[2,1,1024]", "spark.executor.memory": "512m"},
        env={"JOB_URL": worker.dsn, "SPARK_HOME": str(Path(pyspark.__file__).parent)},
    )
    wait_until(lambda: staging() or not driver.running, "tasks stage", 120)
    assert driver.running, driver.output()[-4000:]
    victims = driver.processes("CoarseGrainedExecutorBackend")
    assert victims, "executors have processes of their own"
    os.kill(victims[0], signal.SIGKILL)
    holder.rollback()
    driver.finish(150)
    assert take(conn, target) == expected(numbers(0, 2_000))
