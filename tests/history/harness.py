"""Sets a run up, lets everybody loose, waits until all that must arrive has, and has it judged."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

from history import actors, audit, faults
from history.actors import KEYED, LOG, MAX_RECEIVES, MAX_RETRIES, OTHER
from history.faults import Actor, OwnServer, Proxy
from history.judge import Judge, rows
from history.record import History
from sql.helpers import compact_patiently, compact_soon

PATIENCE = 8  # seconds without progress before what is missing is lost

# Those who go on until everything has arrived.
LASTING = (actors.consume_plain, actors.consume, actors.work, actors.loop, actors.maintain, actors.turn)


def crew(narrow: bool) -> list[Actor]:
    """Everybody but the faults; narrow: only those who read whole batches, who are the quicker for it."""
    plain: list[Actor] = [
        *[(actors.produce, f"p{n}", (LOG,)) for n in range(3)],
        (actors.consume_plain, "plain_fast", (LOG, 0.002)),
        (actors.consume_plain, "plain_slow", (LOG, 0.06)),
        *[(actors.consume, f"once_{n}", ("once", LOG)) for n in range(3)],
        (actors.consume, "retries", ("retries", LOG)),
        *[(actors.consume, f"c{n}", ("coop", LOG)) for n in range(3)],
        (actors.loop, "loop_1", ()),
        (actors.loop, "loop_2", ()),
        (actors.maintain, "maint_1", ()),
        (actors.maintain, "maint_2", ()),
        (actors.turn, "turn", ()),
    ]
    if narrow:
        return plain
    return [
        *plain,
        *[(actors.produce, f"k{n}", (KEYED,)) for n in range(2)],
        (actors.consume_plain, "plain_keys", (KEYED, 0.01)),
        *[(actors.work, f"w{n}", ("pool", LOG)) for n in range(3)],
        *[(actors.work, f"t{n}", ("pool_once", LOG)) for n in range(2)],
        *[(actors.work, f"x{n}", ("pool_keys", KEYED)) for n in range(2)],
        *[(actors.work, f"l{n}", ("lanes", KEYED)) for n in range(3)],
        *[(actors.work, f"d{n}", ("pairs", KEYED)) for n in range(2)],
        (actors.requeue, "requeue_1", ()),
        (actors.requeue, "requeue_2", ()),
        (actors.look, "look", ()),
        (actors.pass_by, "passer", ()),
        (actors.vacuum, "vacuum", ()),
    ]


def set_up(h: History, script: str, narrow: bool) -> None:
    with psycopg.connect(h.dsn, autocommit=True) as conn:
        conn.execute(script.encode())
        compact_soon(conn, 8192)
        compact_patiently(conn)  # somebody always reads a leaf
        conn.execute("create table results (consumer text, msg_id bigint, payload text)")
        audit.follow(conn)
        for queue in (LOG, KEYED, OTHER):
            rows(conn, "select pgque.create_queue(%s)", queue)
            for name, setting in (
                ("rotation_period", "100 milliseconds"),
                ("max_retries", MAX_RETRIES),
                ("max_receive_attempts", MAX_RECEIVES),
            ):
                rows(conn, "select pgque.set_queue_config(%s, %s, %s)", queue, name, str(setting))
        rows(conn, "select pgque.set_tick_period_ms(20)")
        wanted = {LOG: ["plain_fast", "plain_slow", "once", "retries"]}
        if not narrow:
            wanted = {
                LOG: [*wanted[LOG], "pool", "pool_once"],
                KEYED: ["plain_keys", "pool_keys", "lanes", "pairs"],
                OTHER: ["c"],
            }
        for queue, names in wanted.items():
            for consumer in names:
                limit = {"lanes": 1, "pairs": 2}.get(consumer)
                rows(conn, "select pgque.subscribe(%s, %s, key_concurrency => %s)", queue, consumer, limit)
                if queue != OTHER:
                    h.since[consumer] = 0
        for worker in range(3):
            rows(conn, "select pgque.register_subconsumer(%s, 'coop', %s)", LOG, f"c{worker}")
        h.since["coop"] = 0
        before = time.monotonic()
        found = rows(conn, "select extract(epoch from clock_timestamp())::float8")
        h.clock.skew = found[0][0] - (before + time.monotonic()) / 2


def run(
    dsn: str,
    script: str,
    seed: int,
    seconds: float,
    wrong: set[str] | None = None,
    own: OwnServer | None = None,
    narrow: bool = False,
    enough: Callable[[History], bool] | None = None,
) -> History:
    """Run everybody for so many seconds, on a busy machine for up to four times as long until there is
    `enough` to judge."""
    wrong = wrong or set()
    h = History(dsn, seed, timeouts="timeouts" in wrong)
    set_up(h, script, narrow)
    proxy = None
    if "proxy" in wrong and own is not None:
        database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        tcp = psycopg.conninfo.make_conninfo(own.server.tcp_dsn, dbname=database)
        proxy = Proxy(h, random.Random(f"{seed} proxy"), tcp)  # noqa: S311
        h.routes.append(proxy.dsn)
    h.producing.set()
    h.running.set()
    threads: dict[str, threading.Thread] = {}

    def start(call: Callable[..., None], name: str, args: tuple[Any, ...]) -> None:
        rng = random.Random(f"{seed} {name}")  # noqa: S311

        def guarded() -> None:
            try:
                call(h, rng, name, *args)
            except Exception as error:  # a bug of this test
                h.fault(f"{name}: {type(error).__name__} {error}")
            finally:
                h.leave(name)

        threads[name] = threading.Thread(target=guarded, daemon=True)
        threads[name].start()

    try:
        everybody = [*crew(narrow), *faults.crew(wrong, own)]
        for call, name, args in everybody:
            start(call, name, args)
        time.sleep(seconds / 2)
        start(actors.consume_plain, "plain_late", (LOG, 0.002))
        time.sleep(seconds / 2)
        end = time.monotonic() + 3 * seconds
        while enough and not enough(h) and not h.faults and time.monotonic() < end:
            time.sleep(0.1)
        h.producing.clear()
        # Producers and disturbers end; everything must arrive now, as long as there is progress.
        await_end(h, {name: threads[name] for call, name, _ in everybody if call not in LASTING})
        with psycopg.connect(dsn, autocommit=True, application_name="judge") as conn:
            rows(conn, "select set_config('lock_timeout', '30s', false)")
            conclude(h, conn, threads)
    finally:
        h.producing.clear()
        h.running.clear()
        if not h.over.is_set():  # this run failed: tell why, and nobody of it may disturb the next one
            print("\n".join([f"PGQUE_SEED={seed} failed, before that:", *h.faults]))
            with suppress(psycopg.OperationalError):
                print(f"who did what then:{end_all(h, threads)}")
            h.close()
        if proxy is not None:
            proxy.stop()
    return h


def activity(conn: psycopg.Connection[Any]) -> str:
    """Who does what in the server, and waits for whom."""
    query = (
        "select pid, application_name, state, wait_event_type, wait_event, pg_blocking_pids(pid),"
        " clock_timestamp() - xact_start, left(query, 120) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid() and xact_start is not null order by xact_start"
    )
    return "".join(f"\n  {', '.join(map(str, row))}" for row in rows(conn, query))


def await_end(h: History, threads: dict[str, threading.Thread]) -> None:
    """Wait for threads; if one does not end, say who waits for whom in the server, and end everybody there."""
    deadline = time.monotonic() + 30
    for thread in threads.values():
        thread.join(max(0, deadline - time.monotonic()))
    hang = [name for name, thread in threads.items() if thread.is_alive()]
    if hang:
        try:
            h.faults.append(f"hangs: {hang}{end_all(h, threads)}")
        except psycopg.OperationalError as error:
            raise AssertionError(
                "\n".join([f"hang: {hang}, and there is no server: {error}", *h.faults])
            ) from error


def end_all(h: History, threads: dict[str, threading.Thread]) -> str:
    """End everybody in the server, wait for the threads, and tell what everybody did."""
    with psycopg.connect(h.dsn, autocommit=True, application_name="judge") as conn:
        doing = activity(conn)
        everybody = "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        rows(conn, f"select pg_terminate_backend(pid) {everybody}")
    deadline = time.monotonic() + 10
    for thread in threads.values():
        thread.join(max(0, deadline - time.monotonic()))
    return doing


def conclude(h: History, conn: psycopg.Connection[Any], threads: dict[str, threading.Thread]) -> None:
    """Wait until everything arrived or nothing moves, stop everybody, and judge."""
    for queue in (LOG, KEYED):
        rows(conn, "select pgque.resume(%s)", queue)
        rows(conn, "select pgque.unsubscribe(%s, 'passer')", queue)
    judge = Judge(h, conn)
    began = since = time.monotonic()
    left, sure = -1, False
    while left != 0 and time.monotonic() < since + PATIENCE:
        time.sleep(0.3)
        now = judge.unfinished(sure)
        if not sure and now in (0, left):  # nothing moves, or all is done as far as the clients know
            sure, now = True, judge.unfinished(True)
        if now != left:
            left, since = now, time.monotonic()
    if left != 0:
        h.faults.append(f"nothing moves any more, {left} to go{activity(conn)}")
    h.stats["seconds to drain"] = round(time.monotonic() - began)
    h.running.clear()
    await_end(h, threads)
    h.close()
    began = time.monotonic()
    h.faults += judge.verdicts()
    # Producers lock what they like in one transaction, and VACUUM FULL locks tables; nobody else may meet a deadlock.
    h.faults += [d for d in h.deadlocks if not re.match(r"[pk]\d|look|vacuum|passer|dump", d)]
    h.stats["milliseconds to judge"] = round((time.monotonic() - began) * 1000)
    time.sleep(1)  # the statistics come a little later
    # Rotation deletes ticks of newer tables that a late writer left rows behind: see _forget_ticks(). A purge
    # updates the ticks of its queue.
    for table, updates, deletes in rows(
        conn,
        "select relname, n_tup_upd, n_tup_del from pg_stat_user_tables where schemaname = 'pgque'"
        " and relname ~ '^(event|tick|position|settled)_' and case when relname like 'tick%%'"
        " then n_tup_upd > 0 and relname not like 'tick_' || (select q.queue_id from pgque.queue q where"
        " q.queue_name = %s) || '_%%' else n_tup_upd + n_tup_del > 0 end",
        OTHER,
    ):
        h.faults.append(f"{table} has {updates} updated and {deletes} deleted rows")
    h.stats["messages"] = sum(s.fate == "committed" for s in h.sent.values())
    h.stats["calls"] = len(h.calls)
    h.stats["dead letters"] = rows(conn, "select count(*) from pgque.dead_letter")[0][0]
