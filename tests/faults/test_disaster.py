"""The server is lost and a standby takes over."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pgque
import pgque.web
from conftest import Connect, Role
from faults.clusters import base_backup, folder_for, programs_of, run, started, until
from faults.fuzzing import Fuzzer, populate
from pgque import embedded
from pgque.ops.ticker import run_ticker
from sql.helpers import (
    Connection,
    ack,
    column,
    configure,
    dead_letters,
    drain,
    extend,
    forced_tick,
    ids,
    move_clock,
    offer,
    outcome,
    payloads,
    post,
    receive,
    refused,
    rotate,
    rows,
    send,
    send_many,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)
from support import servers
from support.pages import Browser, over_tcp, text
from support.servers import TestServer
from support.terminals import terminal

pytestmark = [pytest.mark.slow, pytest.mark.programs]


@dataclass
class Pair:
    """A primary and a standby that has all that a commit on the primary has waited for."""

    primary: embedded.Server
    standby: embedded.Server
    connect: Connect

    def promote(self) -> Connection:
        """Kill the primary and make the standby the primary; return a connection to it."""
        self.primary.kill()
        conn = self.connect(self.standby.dsn)
        assert value(conn, "select pg_promote()")
        assert value(conn, "select pg_is_in_recovery()") is False
        return conn

    def cut(self, conn: Connection) -> None:
        """Take the standby off the primary: what is committed from now on is lost with the primary."""
        with psycopg.connect(self.standby.dsn, autocommit=True) as standby:
            standby.execute("alter system set primary_conninfo = ''")
            standby.execute("select pg_reload_conf()")
        until(lambda: rows(conn, "select 1 from pg_stat_replication") == [], "the standby is off")

    def caught_up(self, conn: Connection, standby: Connection) -> None:
        """Wait until the standby shows what is committed on the primary."""
        reached = value(conn, "select pg_current_wal_insert_lsn()")
        until(
            lambda: value(standby, "select pg_last_wal_replay_lsn() >= %s::pg_lsn", reached),
            "the standby has caught up",
        )


@pytest.fixture
def pair(server: TestServer, connect: Connect) -> Iterator[Pair]:
    """A primary with pgque and a queue q with consumers plain, c (a pool) and idle; and its standby."""
    bindir = programs_of(server, "pg_basebackup")
    with ExitStack() as stack:
        primary = stack.enter_context(started(bindir))
        with psycopg.connect(primary.dsn) as install:
            install.execute(servers.SQL_FILE.read_bytes())
        folder = stack.enter_context(folder_for(primary))
        data = base_backup(primary, folder, "-R")
        standby = stack.enter_context(started(bindir, data))
        with psycopg.connect(primary.dsn, autocommit=True) as conn:
            conn.execute("alter system set synchronous_standby_names = '*'")
            conn.execute("select pg_reload_conf()")
            until(
                lambda: column(conn, "select sync_state from pg_stat_replication") == ["sync"],
                "the standby is synchronous",
            )
            value(conn, "select pgque.create_queue('q')")
            for consumer in ("plain", "c", "idle"):
                subscribe(conn, "q", consumer)
            configure(conn, "q", max_receive_attempts=1000, max_retries=1000)
        yield Pair(primary, standby, connect)
        connect.close_all()


@dataclass
class Busy:
    """Everybody at work until the connection breaks, and what the server told them was done."""

    dsn: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: set[str] = field(default_factory=set)
    sent: dict[int, str] = field(default_factory=dict)
    seen: dict[int, str] = field(default_factory=dict)  # delivered, by anybody
    windows: dict[int, list[int]] = field(default_factory=dict)  # batches of the plain consumer
    tokens: dict[int, list[int]] = field(default_factory=dict)  # batches of workers
    acked: dict[str, set[int]] = field(default_factory=lambda: {"plain": set(), "c": set()})
    doubtful: dict[str, set[int]] = field(default_factory=lambda: {"plain": set(), "c": set()})
    dead: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, call: Callable[[Connection, str], None], name: str) -> None:
        conn: Connection = psycopg.connect(self.dsn, autocommit=True)

        def until_it_breaks() -> None:
            try:
                while True:
                    call(conn, name)
            except psycopg.OperationalError as error:
                if error.sqlstate and error.sqlstate[:2] not in ("57", "08"):
                    self.faults.append(f"{name}: {error.sqlstate} {error}")
            except Exception as error:
                self.faults.append(f"{name}: {type(error).__name__} {error}")
            finally:
                conn.close()

        thread = threading.Thread(target=until_it_breaks, daemon=True)
        thread.start()
        self.threads.append(thread)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()

    def note(self, batch: list[tuple[int, str | None]]) -> None:
        with self.lock:
            for msg_id, payload in batch:
                assert payload is not None
                if self.seen.setdefault(msg_id, payload) != payload:
                    self.faults.append(f"{msg_id} is {payload} and {self.seen[msg_id]}")

    def produce(self, conn: Connection, name: str) -> None:
        bodies = [f"{name} {len(self.asked)} {n}" for n in range(3)]
        with self.lock:
            self.asked.update(bodies)
        delays = (
            "array['1 hour', null, null]::interval[]" if len(self.asked) % 10 == 0 else "null::interval[]"
        )
        sent = value(conn, f"select pgque.send_batch('q', 't', %s::text[], delays => {delays})", bodies)
        with self.lock:
            self.sent.update(zip(sent, bodies, strict=True))

    def consume(self, conn: Connection, name: str) -> None:
        batch = receive(conn, "q", name, 7)
        if batch:
            self.note([(m.msg_id, m.payload) for m in batch])
            self.windows[batch[0].batch_id] = ids(batch)
            self.doubtful[name].update(ids(batch))
            if ack(conn, batch[0].batch_id) == 1:
                self.acked[name].update(ids(batch))

    def work(self, conn: Connection, name: str) -> None:
        """As the Python worker: a hand-out does not wait for the disk, nor for the standby; an ack does."""
        conn.execute("set synchronous_commit = off")
        batch = take(conn, "q", name, 5, "10 minutes")
        conn.execute("set synchronous_commit = on")
        if not batch:
            return
        self.note([(m.msg_id, m.payload) for m in batch])
        token, members = batch[0].batch_id, ids(batch)
        with self.lock:
            if token in self.tokens:
                self.faults.append(f"token {token} was issued twice")
            self.tokens[token] = members
            self.doubtful["c"].update(members)
        if token % 3 == 0:
            outcome(conn, "dead", token, members[:1], "broken")
            with self.lock:
                self.dead.update(members[:1])
        elif token % 3 == 1:
            outcome(conn, "nack", token, members[:1], "0")
            members = members[1:]
        if all(reason is None for reason in outcome(conn, "ack", token, members[1:]).values()):
            with self.lock:
                self.acked["c"].update(members[1:])

    def loop(self, conn: Connection, name: str) -> None:
        conn.execute("call pgque.ticker_loop('1 second')")

    def maintain(self, conn: Connection, name: str) -> None:
        value(conn, "select pgque.maint()")


def everything(conn: Connection) -> tuple[Counter[int], Counter[int]]:
    """Deliver until nothing is left, hours later; count what came to plain and to the pool."""
    plain: Counter[int] = Counter()
    pool: Counter[int] = Counter()
    for hours in range(2, 6):
        move_clock(conn, f"{hours} hours")
        settle(conn, "q")
        plain.update(drain(conn, "q", "plain"))
        pool.update(ids(work_off(conn, "q", f"late {hours}", 50)))
    return plain, pool


def goes_on(conn: Connection) -> None:
    """Ticks, deliveries and rotation go on."""
    drain(conn, "q", "idle", 1000)
    for _ in range(4):
        sent = send_many(conn, "q", 4)
        assert tick(conn, "q") is not None
        for consumer in ("plain", "idle"):
            assert drain(conn, "q", consumer, 3) == sent
        assert ids(work_off(conn, "q", "on", 3)) == sent
        assert rotate(conn, "q", patient=True) == 1
    conn.execute("call pgque.ticker_loop('100 milliseconds')")
    value(conn, "select pgque.maint()")


def test_a_promoted_standby_delivers_all_that_was_committed_and_nothing_that_was_acked(pair: Pair) -> None:
    conn = pair.connect(pair.primary.dsn)
    value(conn, "select pgque.set_tick_period_ms(10)")
    configure(conn, "q", rotation_period="100 milliseconds")
    busy = Busy(pair.primary.dsn)
    for name in ("p1", "p2"):
        busy.start(busy.produce, name)
    busy.start(busy.consume, "plain")
    for name in ("w1", "w2", "w3"):
        busy.start(busy.work, name)
    busy.start(busy.loop, "loop")
    busy.start(busy.maintain, "maintain")
    tables = set()

    def in_the_middle() -> bool:
        tables.add(value(conn, "select pgque.current_event_table('q')"))
        return len(tables) > 1 and min(map(len, [*busy.acked.values(), busy.dead])) > 10

    until(lambda: in_the_middle() or busy.faults, "everybody has done some work", 60)
    conn = pair.promote()
    busy.join()
    assert busy.faults == []

    # What is issued now was not issued before.
    new = post(conn, "q", "new")
    assert new > max([*busy.sent, *busy.seen])
    busy.sent[new] = "new"
    forced_tick(conn, "q")
    again = receive(conn, "q", "plain", 7)
    assert busy.windows.get(again[0].batch_id, ids(again)) == ids(again)
    fresh = take(conn, "q", "after", 5, "10 minutes")
    assert fresh[0].batch_id not in busy.tokens
    assert not {m.msg_id for m in fresh} & (busy.acked["c"] | busy.dead)

    # A batch from before is its worker's, or nobody's: what it acks is not delivered to others.
    for token, members in list(busy.tokens.items())[-3:]:
        result = outcome(conn, "ack", token, members)
        busy.acked["c"].update(i for i, reason in result.items() if reason is None)

    plain, pool = everything(conn)
    for name, got in (("plain", plain), ("c", pool)):
        assert max(got.values()) == 1, name
        assert not set(got) & busy.acked[name], name
        delivered = set(got) | busy.doubtful[name] | (set(dead_letters(conn, "q")) if name == "c" else set())
        assert set(busy.sent) <= delivered, name
        # What nobody was told was sent may be there: its sender's commit was on its way.
        assert set(got) <= set(busy.sent) | unacknowledged(conn, busy), name
    assert busy.dead <= set(dead_letters(conn, "q"))
    assert not busy.dead & set(pool)
    goes_on(conn)


def unacknowledged(conn: Connection, busy: Busy) -> set[int]:
    """The ids of messages whose sender got no answer; idle, which read nothing, has them all before it."""
    every = rows(
        conn,
        "select e.ev_id, e.ev_data from pgque.read_window('q', pgque.tick_for('q', 'earliest'), pgque.tick_for('q', 'latest')) as e",
    )
    assert len(every) == len({msg_id for msg_id, _ in every}) == len({body for _, body in every})
    for msg_id, body in every:
        assert body in busy.asked | {"new"}
        assert busy.seen.get(msg_id, body) == busy.sent.get(msg_id, body) == body
    return {msg_id for msg_id, _ in every} - set(busy.sent)


def test_commits_that_the_standby_lacked_are_undone_and_their_batches_belong_to_nobody(pair: Pair) -> None:
    conn = pair.connect(pair.primary.dsn)
    sent = offer(conn, "q", 2500)  # more than a batch: there are a window map and a roster
    done = receive(conn, "q", "plain", 10)
    assert ack(conn, done[0].batch_id) == 1
    kept = receive(conn, "q", "plain", 10)
    held = take(conn, "q", "w1", 10, "10 minutes")
    outcome(conn, "ack", held[0].batch_id, ids(held)[:4])
    pair.cut(conn)

    conn.execute("set synchronous_commit = local")
    lost_acks = ids(held)[4:]
    outcome(conn, "ack", held[0].batch_id, lost_acks)
    assert ack(conn, kept[0].batch_id) == 1
    lost_plain = receive(conn, "q", "plain", 10)
    assert ack(conn, lost_plain[0].batch_id) == 1
    lost = [take(conn, "q", f"lost {n}", 10, "10 minutes") for n in range(3)]
    send_many(conn, "q", 5)
    forced_tick(conn, "q")
    conn.close()

    conn = pair.promote()
    assert receive(conn, "q", "plain", 10) == kept
    assert ack(conn, lost_plain[0].batch_id) == 0
    assert ack(conn, kept[0].batch_id) == 1
    for batch in lost:
        assert ack(conn, batch[0].batch_id) == 0
        assert extend(conn, batch[0].batch_id, "1 hour") == 0
        assert set(outcome(conn, "nack", batch[0].batch_id, ids(batch)).values()) == {"batch not open"}
    again = take(conn, "q", "w2", 10, "10 minutes")
    assert ids(again) == ids(lost[0])
    assert again[0].batch_id not in {b[0].batch_id for b in lost}
    for batch in lost:
        assert ack(conn, batch[0].batch_id) == 0
    assert ack(conn, again[0].batch_id) == 1
    assert extend(conn, held[0].batch_id, "1 second") == len(lost_acks)
    plain, pool = everything(conn)
    assert sorted(plain.elements()) == sent[20:]
    assert sorted(pool.elements()) == sorted([*lost_acks, *sent[20:]])
    # What was sent last is not there, and the ids that are go on behind what is.
    assert post(conn, "q", "new") > sent[-1]
    tick(conn, "q")
    assert payloads(conn, "q", "plain") == [m.payload for m in work_off(conn, "q")] == ["new"]
    goes_on(conn)


def test_a_reader_that_has_seen_ticks_which_the_standby_had_not_gets_an_error(pair: Pair) -> None:
    conn = pair.connect(pair.primary.dsn)
    offer(conn, "q")
    kept = value(conn, "select pgque.tick_for('q', 'latest')")
    pair.cut(conn)
    conn.execute("set synchronous_commit = local")
    for _ in range(3):
        send_many(conn, "q", 1)
        seen = forced_tick(conn, "q")
    conn.close()

    conn = pair.promote()
    for _ in range(5):
        (sent,) = send_many(conn, "q", 1)
        newest = forced_tick(conn, "q")
    refused("PQ015", value, conn, "select pgque.next_tick('q', %s)", seen)
    assert newest > seen
    # From what the standby had, all is there.
    window = column(conn, "select ev_id from pgque.read_window('q', %s, %s)", kept, newest)
    assert len(window) == 5
    assert window[-1] == sent


def stage(conn: Connection, epoch: int) -> str:
    """Stage one message of an epoch; return the attempt."""
    ((attempt, table),) = rows(conn, "select attempt, stage from pgque.sink_begin('sink', %s)", epoch)
    conn.execute(
        f"insert into {table} (attempt, n, queue, payload) values (%s, 0, 'q', 'epoch {epoch}')".encode(),
        [attempt],
    )
    return str(attempt)


def commit(conn: Connection, epoch: int, attempt: str) -> str:
    answer: str = value(conn, "select pgque.sink_commit('sink', %s, array[%s::uuid], 1)", epoch, attempt)
    return answer


def test_prepared_sends_epochs_and_idempotency_keys_hold_on_the_new_primary(pair: Pair) -> None:
    conn = pair.connect(pair.primary.dsn)
    once = "select s.deduped from pgque.send_idem('q', 't', 'once'::text, 'key') as s"
    assert value(conn, once) is False
    assert commit(conn, 1, stage(conn, 1)) == "applied"
    staged = stage(conn, 2)
    with psycopg.connect(pair.primary.dsn) as sender:
        for name in ("committed", "undone"):
            sender.execute("select pgque.send('q', %s::text)", [name])
            sender.execute(f"prepare transaction '{name}'".encode())
            sender.commit()
    offer(conn, "q", 3)
    conn.close()
    conn = pair.promote()
    assert payloads(conn, "q", "plain") == ["once", "epoch 1", "1", "2", "3"]
    conn.execute("commit prepared 'committed'")
    conn.execute("rollback prepared 'undone'")
    assert value(conn, once) is True
    assert commit(conn, 1, stage(conn, 1)) == "duplicate"
    # What was staged is there too, and counts once.
    assert commit(conn, 2, staged) == "applied"
    assert commit(conn, 2, stage(conn, 2)) == "duplicate"
    assert tick(conn, "q") is not None
    assert payloads(conn, "q", "plain") == ["committed", "epoch 2"]
    assert sorted(str(m.payload) for m in work_off(conn, "q")) == [
        *("1", "2", "3", "committed", "epoch 1", "epoch 2", "once")
    ]
    goes_on(conn)


def test_consumer_worker_and_ticker_of_the_package_go_over_to_the_new_primary(pair: Pair) -> None:
    conn = pair.connect(pair.primary.dsn)
    dsn = make_conninfo(
        "",
        host=f"{pair.primary.socket_dir},{pair.standby.socket_dir}",
        port=f"{pair.primary.port},{pair.standby.port}",
        user="postgres",
        dbname="postgres",
        target_session_attrs="read-write",
    )
    got: dict[str, list[str]] = {"plain": [], "c": []}
    consumer = pgque.Consumer(dsn, queue="q", name="plain", poll_interval=0.2)
    worker = pgque.Worker(dsn, queue="q", consumer="c", concurrency=2, visibility_timeout=1)
    stop = threading.Event()

    @consumer.on("*")
    def consume(message: pgque.Message) -> None:
        got["plain"].append(str(message.payload))

    @worker.handler("*")
    def work(message: pgque.Message) -> None:
        got["c"].append(str(message.payload))

    threads = [
        threading.Thread(target=call, daemon=True)
        for call in (consumer.start, worker.run, lambda: run_ticker(dsn, stop))
    ]
    for thread in threads:
        thread.start()
    try:
        sent = {str(n) for n in range(20)}
        value(conn, "select pgque.send_batch('q', 't', %s::text[])", sorted(sent))
        until(lambda: all(set(found) == sent for found in got.values()), "everything is handled")
        conn.close()
        conn = pair.promote()
        sent |= {f"after {n}" for n in range(20)}
        value(conn, "select pgque.send_batch('q', 't', %s::text[])", sorted(s for s in sent if "after" in s))
        until(lambda: all(set(found) == sent for found in got.values()), "everything is handled over there")
    finally:
        consumer.stop()
        worker.stop()
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


# What looks and changes nothing. Left out: ages, and ev_new and pending_events, which come from a sequence; what is
# logged of that is up to 32 ahead.
LOOKS = [
    "select queue_name, last_tick_id, queue_cur_table, queue_paused, queue_uid from pgque.get_queue_info()",
    "select queue_name, consumer_name, last_tick, current_batch, next_tick, role, skipped_events from pgque.get_consumer_info()",
    "select * from pgque.peek('plain', 20)",
    "select * from pgque.peek('plain', 20, 'd')",
    "select * from pgque.read_window('plain', pgque.tick_for('plain', 'earliest'), pgque.tick_for('plain', 'latest'))",
    "select * from pgque.read_window('plain', pgque.tick_for('plain', 'earliest'), pgque.tick_for('plain', 'latest'), 'd', null, 2, 1)",
    "select pgque.next_tick('plain', pgque.tick_for('plain', 'earliest'), 5)",
    "select * from pgque.split_window('plain', pgque.tick_for('plain', 'earliest'), pgque.tick_for('plain', 'latest'), 3)",
    "select metric, queue, consumer from pgque.metrics() order by 1, 2, 3",
    "select check_name, queue, status from pgque.health() where check_name not in ('ticker', 'standby', 'ticks') order by 1, 2",
    "select component from pgque.status()",
    "select * from pgque.queue_config('plain')",
    "select * from pgque.list_workers()",
    "select * from pgque.list_messages('pool', null, 1000)",
    "select * from pgque.list_messages('keyed', null, 1000)",
    "select * from pgque.list_poison('plain')",
    "select * from pgque.dlq_inspect('plain')",
    "select * from pgque.archive_list('arch')",
    "select pgque.current_event_table('plain'), pgque.version()",
    "select sub_id, sub_last_tick, sub_batch from pgque.subscription",
]


def test_a_standby_serves_readers_and_refuses_changes(pair: Pair) -> None:
    conn = pair.connect(pair.primary.dsn)
    standby = pair.connect(pair.standby.dsn)
    populate(conn)
    send_many(conn, "plain", 3)
    fuzzer = Fuzzer(conn, "standby")
    pair.caught_up(conn, standby)
    for look in LOOKS:
        seen = rows(standby, look)
        assert seen == rows(conn, look), look
        assert seen, look
    msg_id = value(conn, "select min(m.msg_id) from pgque.list_messages('plain') as m")
    status = "select consumer_name, status from pgque.message_status('plain', %s)"
    assert rows(standby, status, msg_id) == rows(conn, status, msg_id) != []
    standby.execute("begin")
    standby.execute(
        "select pgque.read_window_cursor('w', 'plain', pgque.tick_for('plain', 'earliest'), pgque.tick_for('plain', 'latest'))"
    )
    assert rows(standby, "fetch all from w")
    standby.execute("rollback")

    for change in (
        "select pgque.send('plain', 'x'::text)",
        "insert into pgque.sink (queue, payload) values ('plain', 'x')",
        "insert into pgque.sink_bulk (queue, payload) values ('plain', 'x')",
        "select * from pgque.receive('plain', 'd')",
        "select * from pgque.receive('plain', 'p', worker => 'w')",
        "select pgque.subscribe('plain', 'new')",
        "select pgque.ticker('plain')",
        "select pgque.ticker()",
        "select pgque.maint()",
        "select pgque.create_queue('new')",
    ):
        refused("25006", rows, standby, change)
    for change in (
        "select pgque.send('plain', 'x'::text)",
        "select pgque.send('plain', 't', 'x'::text, key => 'k', delay => '1 hour')",
        "select pgque.send_batch('plain', 't', array['x'])",
        "select pgque.send_batch('plain', 't', array['x'], keys => array['k'])",
        # The loop says so at once, and does not go round a server that will never let it.
        "call pgque.ticker_loop('1 second')",
    ):
        refusal = refused("25006", rows, standby, change)
        assert "this server is a standby" in str(refusal), change
        assert "Connect to the primary" in (refusal.diag.message_hint or ""), change
    with pytest.raises(pgque.PgqueError, match="Connect to the primary"):
        pgque.PgqueClient(standby).receive("plain", "d")
    assert value(standby, "select status from pgque.status() where component = 'ticker'") == "standby"
    checks = rows(standby, "select check_name, status, advice from pgque.health() where queue is null")
    assert ("standby", "ok", None) in checks
    assert "ticker" not in {check[0] for check in checks}
    program = [sys.executable, "-m", "pgque.cli"]
    shown = subprocess.run(
        [*program, "health", "--dsn", pair.standby.dsn], capture_output=True, text=True, check=False
    )
    assert "this server is a standby" in " ".join(shown.stdout.split())
    ticker = subprocess.Popen(
        [*program, "ticker", "--quiet", "--dsn", pair.standby.dsn], stderr=subprocess.PIPE, text=True
    )
    assert ticker.stderr is not None
    assert "this server is a standby" in ticker.stderr.readline()
    ticker.terminate()
    ticker.communicate(timeout=20)

    # Every other function: with arguments that fit, nothing but an answer or a plain no.
    fuzzer.conn = standby
    for function in fuzzer.functions:
        for _ in range(2):
            fuzzer.run(
                function.name, function.call([fuzzer.sensible(name, kind) for name, kind in function.args])
            )
    fuzzer.judge("calls on a standby")
    states = {state for found in fuzzer.outcomes.values() for state in found}
    assert states >= {"ok", "25006"}


def test_page_and_terminal_of_a_standby_show_all_and_offer_no_change(pair: Pair) -> None:
    conn = pair.connect(pair.primary.dsn)
    populate(conn)
    send_many(conn, "plain", 3)
    conn.execute("create role web_admin login password 'secret' in role pgque_admin")
    pair.caught_up(conn, pair.connect(pair.standby.dsn))
    role = Role("web_admin", "password=secret")
    browser = Browser(pgque.web.app(over_tcp(pair.standby, pair.standby.dsn)))
    assert browser.log_in(role).status_code == 200
    msg_id = value(conn, "select min(m.msg_id) from pgque.list_messages('plain') as m")
    for path, query in {
        "/": {},
        "/recurring": {},
        **{path: {} for path in ("/queue", "/messages", "/dead", "/archive", "/send", "/queue/purge")},
        "/message": {"id": msg_id},
    }.items():
        page = browser.get(path, queue="plain", **query)
        assert "The database is read only" in text(page)
    page = browser.post("/queue/pause", 403, queue="plain")
    assert "read only" in text(page)
    browser.client.app.close()  # type: ignore[attr-defined]

    # So does the terminal.
    with terminal(sys.executable, "-m", "pgque.cli", "top", "--dsn", pair.standby.dsn) as shown:
        shown.wait_for("read only", "plain", "q Quit")
        assert "p Pause" not in shown.text
        shown.press("/plain\r")
        shown.wait_for("1 queue with 'plain'")
        shown.press("\r")
        shown.wait_for("Queue plain", "Consumers", "Dead letters by reason", "q Quit")
        assert not any(word in shown.text for word in ("Pause", "Reclaim", "Requeue"))


def test_health_names_what_uses_up_the_transaction_ids_when_postgresql_refuses_more(
    server: TestServer,
) -> None:
    bindir = programs_of(server, "pg_resetwal")
    assert server.process is not None
    settings = {"wal_level": "logical", "autovacuum": "off"}
    last = 2_145_386_496  # above the stop limit of a cluster that was never frozen, and the first id of a segment
    check = "select status, detail, advice from pgque.health() where check_name = 'transaction ids'"
    with folder_for(server.process) as folder:
        data = folder / "data"
        with started(bindir, data, settings) as main, psycopg.connect(main.dsn, autocommit=True) as conn:
            with conn.transaction():
                conn.execute(servers.SQL_FILE.read_bytes())
            value(conn, "select pgque.create_queue('q')")
            assert rows(conn, check)[0][0] == "ok"
            value(conn, "select pg_create_logical_replication_slot('forgotten', 'test_decoding')")
        run(folder, bindir / "pg_resetwal", "-f", "-x", str(last), data)
        segment = data / "pg_xact" / f"{last // 1_048_576:04X}"
        run(folder, "dd", "if=/dev/zero", f"of={segment}", "bs=256k", "count=1")
        with started(bindir, data, settings) as main, psycopg.connect(main.dsn, autocommit=True) as conn:
            refused("54000", send, conn, "q")
            ((status, detail, advice),) = rows(conn, check)
            assert status == "fail"
            assert "54000" in detail
            assert "replication slot forgotten" in detail
            assert "pg_drop_replication_slot('forgotten')" in advice
