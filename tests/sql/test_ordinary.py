"""An ordinary delivery, which is one statement of its queue, does what the general way does, and no more."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from model.bench import turn_journal
from sql import test_install
from sql.helpers import (
    Connection,
    Message,
    ack,
    column,
    forced_tick,
    ids,
    move_clock,
    nack_ids,
    offer,
    outcome,
    post,
    receive,
    release,
    rows,
    send,
    send_many,
    subscribe,
    take,
    tick,
    value,
)

STEPS = 100


def deliver(conn: Connection, worker: str | None, count: int = 100, **options: Any) -> list[Message]:
    """Receive as the worker, or without one."""
    return (
        receive(conn, "q", count=count, **options)
        if worker is None
        else take(conn, "q", worker, count, **options)
    )


def count_calls(conn: Connection, call: Callable[[], Any]) -> dict[str, int]:
    """Count how often a call, in a transaction of its own, runs each function of pgque."""
    conn.execute("set track_functions = 'all'")
    with conn.transaction():
        query = "select f.funcname, f.calls from pg_stat_xact_user_functions f where f.schemaname = 'pgque'"
        before = dict(rows(conn, query))
        call()
        return {
            name: calls - before.get(name, 0)
            for name, calls in rows(conn, query)
            if calls > before.get(name, 0)
        }


def is_ordinary(conn: Connection, call: Callable[[], Any]) -> bool:
    """Return whether a call that delivers did it in the ordinary way."""
    counted = count_calls(conn, call)
    ordinary = sum(calls for name, calls in counted.items() if name.startswith(("_ordinary_", "_mapped_")))
    assert "_begin_delivery" in counted or ordinary == 1, counted
    return "_begin_delivery" not in counted


@pytest.fixture(params=[None, "w"], ids=["alone", "worker"])
def worker(pool: Connection, request: pytest.FixtureRequest) -> str | None:
    """How the consumer c of queue q receives; it has done so before."""
    chosen: str | None = request.param
    offer(pool, "q")
    assert ack(pool, deliver(pool, chosen)[0].batch_id) == 1
    return chosen


def test_a_delivery_and_its_ack_are_six_statements_or_five_of_a_worker_and_an_empty_poll_is_one(
    pool: Connection, worker: str | None
) -> None:
    try:
        pool.execute("load 'auto_explain'")
    except psycopg.Error:
        pytest.skip("the server has no auto_explain, or only superusers may load it")
    ran: list[str] = []
    for setting in (
        "auto_explain.log_nested_statements = on",
        "auto_explain.log_min_duration = 0",
        "client_min_messages = log",
    ):
        pool.execute(f"set {setting}".encode())
    offer(pool, "q", 3)
    pool.add_notice_handler(lambda notice: ran.append(notice.message_primary or ""))
    for _ in range(2):  # a plan is made first
        batch = deliver(pool, worker)
        assert deliver(pool, worker) == ([] if worker else batch)
        ran.clear()
        assert ack(pool, batch[0].batch_id) == 1
        acked = len(ran) - 1  # without the client's own statement
        ran.clear()
        assert deliver(pool, worker) == []
        polled = len(ran) - 1
        offer(pool, "q", 3)
        ran.clear()
        batch = deliver(pool, worker)
        delivered = len(ran) - 1
        assert ack(pool, batch[0].batch_id) == 1
        offer(pool, "q", 3)
    assert (delivered, acked, polled) == (3, 2 if worker else 3, 1), ran


def test_an_empty_poll_takes_no_transaction_id(pool: Connection, worker: str | None) -> None:
    with pool.transaction():
        assert deliver(pool, worker) == []
        assert value(pool, "select pg_current_xact_id_if_assigned()") is None


@pytest.mark.parametrize("worker", [None, "w"], ids=["alone", "worker"])
def test_a_poll_finds_a_tick_of_before_an_upgrade_that_its_sequence_does_not_have(
    fresh_dsn: str, connect: Callable[..., Connection], worker: str | None
) -> None:
    """Up to 0.5 the sequence of ticks was only set to force a tick."""
    test_install.install_earlier(fresh_dsn, "0.7.0")
    own = connect(fresh_dsn)
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    offer(own, "q")
    assert ack(own, deliver(own, worker)[0].batch_id) == 1
    value(own, "update pgque.queue set queue_reader = null returning setval(queue_tick_seq, 1)")
    sent = send(own, "q")
    value(own, "select pgque.ticker('q')")
    value(own, "select setval(queue_tick_seq, 2) from pgque.queue")
    test_install.install(fresh_dsn)
    assert ids(deliver(own, worker)) == [sent]
    value(own, "select pgque.uninstall()")


def test_an_open_delivery_uses_only_the_leaf_of_the_journal_that_is_written(
    pool: Connection, worker: str | None
) -> None:
    for _ in range(2):
        offer(pool, "q", 2)
        with pool.transaction():
            first = deliver(pool, worker, 1)
            second = deliver(pool, worker, 1, ack_batch=first[0].batch_id)
            assert ids(second) == [first[0].msg_id + 1]
            assert ack(pool, second[0].batch_id) == 1
            locked = column(
                pool,
                "select distinct right(l.relation::regclass::text, 1)::int from pg_locks l"
                " where l.pid = pg_backend_pid() and l.relation::regclass::text ~ '^pgque.(position|settled)_[01]$'",
            )
            assert locked == [value(pool, "select j.journal_cur from pgque.journal j")]
        assert turn_journal(pool)
        assert value(pool, "select pgque.maint_tables()") > 0  # it empties the other one


def test_a_message_whose_transaction_ran_at_the_first_tick_of_the_window_is_delivered(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection], worker: str | None
) -> None:
    sender = connect(own_dsn, autocommit=False)
    late = send(sender, "q", "late")
    other = connect(own_dsn, autocommit=False)
    later = send(other, "q", "later")
    offer(pool, "q")
    assert ack(pool, deliver(pool, worker)[0].batch_id) == 1
    sender.commit()
    early = offer(pool, "q")
    batch: list[Message] = []
    assert is_ordinary(pool, lambda: batch.extend(deliver(pool, worker)))
    assert ids(batch) == [late, *early]
    other.commit()
    forced_tick(pool, "q")
    assert is_ordinary(pool, lambda: batch.extend(deliver(pool, worker, ack_batch=batch[0].batch_id)))
    assert ids(batch) == [late, *early, later]


def test_a_batch_that_ends_where_the_window_ends_leaves_nothing(pool: Connection, worker: str | None) -> None:
    sent = offer(pool, "q", 6)
    assert ids(first := deliver(pool, worker, 3)) == sent[:3]
    assert ids(second := deliver(pool, worker, 3, ack_batch=first[0].batch_id)) == sent[3:]
    assert value(
        pool, "select p.pos_last_id is null from pgque.position p where p.pos_batch = %s", second[0].batch_id
    )
    assert deliver(pool, worker, 3, ack_batch=second[0].batch_id) == []


def test_a_consumer_that_lags_by_many_ticks_reads_some_of_them(pool: Connection, worker: str | None) -> None:
    for _ in range(250):
        send(pool, "q")
        forced_tick(pool, "q")
    read = "select sum(t.idx_tup_fetch) from pg_stat_xact_all_tables t where t.schemaname = 'pgque' and t.relname like 'tick\\_%'"
    for _ in range(2):
        with pool.transaction():
            before = value(pool, read)
            batch = deliver(pool, worker, 1)
            assert value(pool, read) - before <= 110
        assert len(batch) == 1
        assert ack(pool, batch[0].batch_id) == 1


@pytest.mark.parametrize("count", [1, 10, 100])
def test_a_backlog_is_delivered_in_the_ordinary_way(pool: Connection, worker: str | None, count: int) -> None:
    for _ in range(3):
        send_many(pool, "q", 300)
        forced_tick(pool, "q")
    batch: list[Message] = []
    assert is_ordinary(pool, lambda: batch.extend(deliver(pool, worker, count)))
    assert len(batch) == count


@pytest.mark.parametrize("count", [1, 10, 100])
def test_the_rest_of_a_big_window_is_delivered_in_the_ordinary_way(
    pool: Connection, own_dsn: str, connect: Callable[..., Connection], worker: str | None, count: int
) -> None:
    """The first batch makes the map, by which the others are read."""
    sender, never = (connect(own_dsn, autocommit=False) for _ in range(2))
    late = send_many(sender, "q", 10)
    send_many(never, "q", 10)
    offer(pool, "q")
    assert ack(pool, deliver(pool, worker)[0].batch_id) == 1
    sender.commit()
    sent = late + send_many(pool, "q", 1200)
    forced_tick(pool, "q")
    after = offer(pool, "q")
    batch = deliver(pool, worker, count)
    got = ids(batch)
    read = "select sum(t.seq_tup_read + t.idx_tup_fetch) from pg_stat_xact_all_tables t where t.relname like 'event\\_%'"

    def go_on(found: list[Message], **options: Any) -> None:
        found += deliver(pool, worker, count, **options)

    for fused in (True, False, True, False):
        token = batch[0].batch_id
        assert fused or ack(pool, token) == 1
        following: list[Message] = []
        with pool.transaction():
            before = value(pool, read)
            options = {"ack_batch": token} if fused else {}
            assert is_ordinary(pool, functools.partial(go_on, following, **options))
            assert value(pool, read) - before <= count + 100
        batch = following
        got += ids(batch)
    assert got == sent[: 5 * count]
    while batch := deliver(pool, worker, 500, ack_batch=batch[0].batch_id):
        got += ids(batch)
    assert got == sent + after
    never.rollback()


def test_batches_in_the_ordinary_way_end_where_a_big_window_ends(
    pool: Connection, worker: str | None
) -> None:
    sent = offer(pool, "q", 1001)
    got = ids(batch := deliver(pool, worker, 991))
    for count in (1, 9):
        got += ids(batch := deliver(pool, worker, count, ack_batch=batch[0].batch_id))
    assert got == sent
    done = "select p.pos_last_id is null from pgque.position p where p.pos_batch = %s"
    assert value(pool, done, batch[0].batch_id)
    assert deliver(pool, worker, 1, ack_batch=batch[0].batch_id) == []


# What an ack of a batch of three messages waits for: what the ack then returns, and how many are delivered again.
WAITS: dict[str | None, dict[str, tuple[int, int]]] = {
    None: {
        "select pgque.share_consumer('q', 'c')": (0, 3),
        "select pgque.register_subconsumer('q', 'c', 'a', true)": (0, 3),
        "select pgque.unsubscribe('q', 'c')": (0, 0),
        "select pgque.ack(%(batch)s)": (0, 0),
        "select pgque.ack(%(batch)s, %(first)s)": (1, 0),
        "select pgque.release(%(batch)s, %(first)s)": (1, 1),
    },
    "w": {
        "select pgque.unshare_consumer('q', 'c')": (0, 3),
        "select pgque.reclaim('q', 'c')": (0, 3),
        "select pgque.release(%(batch)s)": (0, 3),
        "select pgque.ack(%(batch)s)": (0, 0),
        "select pgque.ack(%(batch)s, %(first)s)": (1, 0),
        "select pgque.release(%(batch)s, %(first)s)": (1, 1),
        "select pgque.set_visibility(%(batch)s, '1 hour')": (1, 0),
        "select pgque.receive('q', 'c', 1, worker => 'x')": (0, 2),
    },
}


@pytest.mark.parametrize("worker", WAITS, ids=["alone", "worker"])
def test_an_ack_that_waited_counts_if_the_batch_is_still_open_and_else_its_messages_are_delivered_again(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    worker: str | None,
) -> None:
    other = connect(own_dsn, autocommit=False)
    for call, (acked, redelivered) in WAITS[worker].items():
        value(own, "select pgque.create_queue('q')")
        subscribe(own, "q")
        sent = offer(own, "q", 3)
        batch = deliver(own, worker)[0].batch_id
        if "'x'" in call:
            move_clock(own, "1 hour")
        other.execute(call.encode(), {"batch": batch, "first": sent[:1]})
        waiting = background(lambda c, batch=batch: ack(c, batch), connect(own_dsn))
        wait_for_lock(waiting.pid)
        other.commit()
        assert waiting.result() == acked, call
        role = value(own, "select max(s.sub_role) from pgque.subscriber s where s.sub_main is null")
        got: list[int] = []
        while role and (again := deliver(own, {"normal": None, "pool": "w", "coop_main": "a"}[role])):
            got += ids(again)
            assert ack(own, again[0].batch_id) == 1
        assert sorted(got) == (sent[:1] if redelivered == 1 else sent[3 - redelivered :]), call
        assert ack(own, batch) == 0
        value(own, "select pgque.drop_queue('q', true)")


@pytest.mark.parametrize("turned", [False, True])
def test_a_worker_that_waited_for_the_consumer_receives_what_the_other_one_left(
    pool: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    turned: bool,
) -> None:
    """Also if the other leaf of the journal became the current one meanwhile."""
    offer(pool, "q")
    assert ack(pool, take(pool, "q")[0].batch_id) == 1
    sent = offer(pool, "q", 4)
    first = connect(own_dsn, autocommit=False)
    assert ids(take(first, "q", "w1", 2)) == sent[:2]
    waiting = background(lambda c: take(c, "q", "w2", 2), connect(own_dsn))
    wait_for_lock(waiting.pid)
    if turned:
        assert turn_journal(pool)
    first.commit()
    assert ids(waiting.result()) == sent[2:]
    assert take(pool, "q", "w3") == []
    for _ in range(3):
        value(pool, "select pgque.maint_tables()")
    assert (
        not turned or value(pool, "select pgque._journal_size(1 - j.journal_cur) from pgque.journal j") == 0
    )
    assert ack(pool, waiting.result()[0].batch_id) == 1


def test_a_batch_larger_than_max_bytes_and_the_first_message_with_a_key_or_a_ttl_take_the_general_way(
    pool: Connection, worker: str | None
) -> None:
    def next_is_ordinary(*posted: dict[str, Any], **options: Any) -> bool:
        for one in posted:
            post(pool, "q", **one)
        tick(pool, "q")
        batch: list[Message] = []
        ordinary = is_ordinary(pool, lambda: batch.extend(deliver(pool, worker, **options)))
        assert len(batch) == len(posted)
        assert ack(pool, batch[0].batch_id) == 1
        return ordinary

    assert next_is_ordinary({"payload": "x" * 50}, {"payload": "y" * 50})
    sent = offer(pool, "q", 3)
    query = "select r.msg_id, r.batch_id from pgque.receive('q', 'c', 10, %s, max_bytes => 2) r"
    got = rows(pool, query, worker)
    assert [msg_id for msg_id, _ in got] == sent[:2]
    assert ack(pool, got[0][1]) == 1
    assert ack(pool, rows(pool, query, worker)[0][1]) == 1
    assert not next_is_ordinary({"key": "a"}, {})
    assert next_is_ordinary({}, {})  # the note is not in the queue's row yet, and none of these has a key
    assert not next_is_ordinary({"ttl": "1 hour"})
    value(pool, "select pgque.maint_tables()")
    assert not next_is_ordinary({}, {})


class Side:
    """A queue, its consumers, and a session that delivers in one of the two ways."""

    def __init__(self, dsn: str, connect: Callable[..., Connection], queue: str, ordinary: bool) -> None:
        self.conn, self.queue = connect(dsn), queue
        self.sender = connect(dsn, autocommit=False)
        self.conn.execute(f"set pgque.ordinary = {'on' if ordinary else 'off'}".encode())
        value(self.conn, "select pgque.create_queue(%s)", queue)
        value(self.conn, "select pgque.set_queue_config(%s, 'rotation_period', '1 microsecond')", queue)
        for consumer in ("c", "p"):
            subscribe(self.conn, queue, consumer)
        self.batches: list[list[Message]] = []

    def receive(self, worker: str | None, count: int, acked: int | None, max_bytes: int | None) -> list[Any]:
        """Receive, and acknowledge the batch that came so many before the last one."""
        found = rows(
            self.conn,
            "select * from pgque.receive(%s, %s, %s, worker => %s, visibility_timeout => %s::interval, ack_batch => %s, max_bytes => %s)",
            self.queue,
            "p" if worker else "c",
            count,
            worker,
            "1 hour" if worker else None,
            None if acked is None else self.batch(acked)[0].batch_id,
            max_bytes,
        )
        batch = [Message(*row) for row in found]
        if batch and (not self.batches or batch[0].batch_id != self.batches[-1][0].batch_id):
            self.batches.append(batch)
        return [(m.msg_id, m.payload, m.retry_count, m.receive_count, m.last_error, m.key) for m in batch]

    def batch(self, number: int) -> list[Message]:
        return self.batches[-1 - number % len(self.batches)]

    def settle(self, call: str, number: int, every: int) -> Any:
        """Give a batch, or each n-th message of it, an outcome."""
        batch = self.batch(number)
        token, some = batch[0].batch_id, ids(batch)[::every]
        if call == "ack":
            return ack(self.conn, token)
        if call == "nack":
            return nack_ids(self.conn, token, some, "0", "why")
        if call == "release":
            return release(self.conn, token, some)
        return outcome(self.conn, call.partition(" ")[0], token, some)

    def state(self) -> list[Any]:
        """Return where the consumers stand, and what waits for them."""
        return [
            rows(
                self.conn,
                "select distinct on (s.sub_id) c.co_name, s.sub_role, p.pos_tick, p.pos_next_tick, p.pos_done_id, p.pos_last_id, p.pos_fresh,"
                " p.pos_shelf, p.pos_done_count, p.pos_high, p.pos_skipped, p.pos_worker, p.pos_snapshot is null, p.pos_event_seq"
                " from pgque.subscriber s join pgque.consumer c on c.co_id = s.sub_consumer join pgque.queue q on q.queue_id = s.sub_queue"
                " join pgque.position p on p.pos_sub = s.sub_id where q.queue_name = %s order by s.sub_id, p.pos_seq desc",
                self.queue,
            ),
            rows(
                self.conn,
                "select c.co_name, r.ev_id, r.ev_retry, r.ev_receives, r.ev_worker, r.ev_batch is null from pgque.retry_queue r"
                " join pgque.subscriber s on s.sub_id = r.ev_owner join pgque.consumer c on c.co_id = s.sub_consumer"
                " join pgque.queue q on q.queue_id = s.sub_queue where q.queue_name = %s order by 1, 2",
                self.queue,
            ),
        ]


def turn(side: Side) -> None:
    turn_journal(side.conn)


def maintain(side: Side) -> None:
    value(side.conn, "select pgque.maint_tables()")


def choose(rng: random.Random, delivered: bool, last_tick: int) -> tuple[str, Callable[[Side], Any]]:
    """Return a call by chance, and its name."""
    what = rng.choice(
        ["send", "send", "open", "commit", "tick", "tick", "tick"]
        + 5 * ["receive"]
        + 2 * ["settle"]
        + ["other"]
    )
    if what == "other" or (what == "settle" and not delivered):
        what = rng.choice(["key", "ttl", "rotate", "archive", "seek", "turn", "maintain"])
    count = rng.choice([1, 1, 2, 5, 40, 700])  # the last one makes a window that is read by its map
    archived = rng.choice(["true", "false"])
    tick_id = last_tick - rng.randint(1, 5)
    settled = (
        rng.choice(["ack", "ack", "ack", "nack", "release", "dead", "ack some"]),
        rng.choice([0, 0, 1, 2]),
        rng.choice([1, 2, 3]),
    )
    received = (
        rng.choice([None, None, "w1", "w2"]),
        rng.choice([1, 2, 3, 7, 100]),
        rng.choice([None, 0, 0, 1]) if delivered else None,
        rng.choice([None, None, 3, 1000]),
    )
    calls: dict[str, Callable[[Side], Any]] = {
        "send": lambda side: send_many(side.conn, side.queue, count),
        "open": lambda side: send(side.sender, side.queue),
        "commit": lambda side: side.sender.commit(),
        "tick": lambda side: forced_tick(side.conn, side.queue),
        "receive": lambda side: side.receive(*received),
        "settle": lambda side: side.settle(*settled),
        "key": lambda side: post(side.conn, side.queue, key="a"),
        "ttl": lambda side: post(side.conn, side.queue, ttl="1 hour"),
        "rotate": lambda side: value(side.conn, "select pgque.maint_rotate_tables_step1(%s)", side.queue),
        "archive": lambda side: value(
            side.conn, "select pgque.set_queue_config(%s, 'archive_on_ack', %s)", side.queue, archived
        ),
        "seek": lambda side: value(side.conn, "select pgque.seek(%s, 'c', %s, true)", side.queue, tick_id),
        # These are for both queues.
        "turn": turn,
        "maintain": maintain,
    }
    return what, calls[what]


def test_any_calls_have_the_same_results_whether_deliveries_are_ordinary_or_not(
    own_dsn: str, connect: Callable[..., Connection]
) -> None:
    seed = int(os.environ.get("PGQUE_SEED") or random.SystemRandom().randrange(10**9))
    print(f"PGQUE_SEED={seed}")
    rng = random.Random(seed)  # noqa: S311
    sides = [Side(own_dsn, connect, name, ordinary) for name, ordinary in (("on", True), ("off", False))]
    deliveries, last_tick = 0, 1
    for step in range(STEPS):
        what, call = choose(rng, bool(sides[0].batches), last_tick)
        answers: list[Any] = []
        for side in sides:
            try:
                answers.append(call(side))
            except psycopg.Error as error:
                answers.append(error.sqlstate)
        assert answers[0] == answers[1], f"step {step}: {what}"
        assert sides[0].state() == sides[1].state(), f"step {step}: {what}"
        if what == "tick":
            last_tick = answers[0]
        deliveries += what == "receive" and bool(answers[0])
    assert deliveries > STEPS / 30
