# ruff: noqa: RUF001
"""The web page over many queues and messages: how long each page takes, and what ten open overviews cost."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import httpx2
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.cost import Meter
from bench.measure import Bench, Connection, Row, one, queue, ticking

ROLE = "pgque_bench_web"
PASSWORD = "bench"
BIG = "big"
VIEWERS = 10
PERIOD = 10.0  # seconds from one look of a viewer to the next, as the page itself refreshes
ROUNDS = 3
AT_ONCE = 10_000
CSRF = re.compile(r'name="csrf" value="([^"]+)"')


def web(bench: Bench) -> list[Row]:
    """1,000 queues, 5,000,000 pending messages, 200,000 dead letters; each page, and ten viewers of the first."""
    with bench.connect() as conn:
        note = fill(conn, *((20, 50_000, 2_000) if bench.quick else (1000, 5_000_000, 200_000)))
        with ticking(bench):
            return look(bench, conn, note)


def fill(conn: Connection, queues: int, pending: int, dead: int) -> str:
    """Make queues: a big one with two fifths of the messages, ten with as many, and small ones with the rest."""
    began = time.monotonic()
    names = [BIG, *(f"medium{n}" for n in range(10)), *(f"small{n:04}" for n in range(queues - 11))]
    for name in names:
        queue(conn, name)
    conn.execute("select pgque.subscribe(%s, 'audit'), pgque.subscribe(%s, 'search')", (BIG, BIG))
    conn.execute("select pgque.open_stream(%s, 'spark')", (BIG,))
    fifth = pending // 5
    shares = dict.fromkeys(names[11:], fifth // (queues - 11))
    shares |= dict.fromkeys(names[1:11], 2 * fifth // 10) | {BIG: 2 * fifth}
    letters = {BIG: dead // 2, **dict.fromkeys(names[1:11], dead // 20)}
    for name, share in shares.items():
        _send(conn, name, letters.get(name, 0))
        _bury(conn, name, letters.get(name, 0))
        _send(conn, name, share)
    _lease(conn)
    conn.execute("select pgque.create_recurring('nightly', 'big', '0 3 * * *', 't', 'x'::text)")
    conn.execute("vacuum analyze")
    conn.execute("checkpoint")
    total = sum(shares.values())
    return (
        f"{queues:,} queues, {total:,} pending messages, {sum(letters.values()):,} dead letters,"
        f" made in {time.monotonic() - began:.0f} s"
    )


def _send(conn: Connection, name: str, count: int) -> None:
    for first in range(0, count, AT_ONCE):
        conn.execute(
            "select pgque.send_batch(%s, 'kind ' || (%s::int %% 7), array("
            'select format(\'{"order": %%s, "customer": "customer %%s"}\', n, n %% 1000)'
            " from generate_series(%s::int + 1, least(%s::int + %s, %s)) as n)) is null",
            (name, first // AT_ONCE, first, first, AT_ONCE, count),
        )
        conn.execute("select pgque.force_next_tick(%s)", (name,))
        conn.execute("select pgque.ticker(%s)", (name,))


def _bury(conn: Connection, name: str, count: int) -> None:
    while count > 0:
        row = conn.execute(
            "with got as materialized (select batch_id, msg_id from pgque.receive(%s, 'c', %s, 'w', '1 hour'))"
            " select count(*), max(g.batch_id), array_agg(g.msg_id) from got as g",
            (name, min(count, AT_ONCE)),
        ).fetchone()
        assert row is not None
        assert row[0], f"no message of {name}"
        conn.execute("select pgque.dead(%s, %s, 'TimeoutError: no answer within 30 s')", (row[1], row[2]))
        count -= row[0]


def _lease(conn: Connection) -> None:
    """Let workers have messages of the big queue, and others wait for a retry."""
    for n in range(20):
        row = conn.execute(
            "with got as materialized (select batch_id, msg_id from pgque.receive(%s, 'c', 200, %s, '1 hour'))"
            " select max(g.batch_id), array_agg(g.msg_id) from got as g",
            (BIG, f"worker {n}"),
        ).fetchone()
        assert row is not None
        conn.execute("select pgque.nack(%s, %s, '1 hour', 'printer on fire')", (row[0], row[1][:100]))


def look(bench: Bench, conn: Connection, note: str) -> list[Row]:
    """Log in to the command, open every page, and let ten viewers look at the first one."""
    conn.execute(f"drop role if exists {ROLE}")
    conn.execute(f"create role {ROLE} login password '{PASSWORD}' in role pgque_admin")
    conn.execute(f"grant select on pgque.subscriber, pgque.sink_epoch, pgque.sink_attempt to {ROLE}")
    parts = conninfo_to_dict(bench.tcp or bench.dsn)
    where = {"host": parts["host"], "port": parts["port"], "dbname": parts["dbname"]}
    dsn = make_conninfo("", **where, user=ROLE, password=PASSWORD)
    try:
        with served(dsn) as address:
            return [*_pages(conn, address, note), _viewers(bench, address)]
    finally:
        conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = %s", (ROLE,))
        conn.execute(f"drop owned by {ROLE}")
        conn.execute(f"drop role {ROLE}")


@contextmanager
def served(dsn: str) -> Iterator[str]:
    """Run `pgque web`; yield its address without the last slash."""
    command = [sys.executable, "-m", "pgque.cli", "web", "--port", "0"]
    environment = {**os.environ, "PGQUE_DSN": dsn}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip().removesuffix("/")
        finally:
            process.send_signal(signal.SIGTERM)


def log_in(address: str) -> httpx2.Client:
    """Return a browser that is logged in."""
    client = httpx2.Client(base_url=address, follow_redirects=True, timeout=60)
    token = CSRF.search(client.get("/login").text)
    assert token is not None
    page = client.post("/login", data={"csrf": token[1], "user": ROLE, "password": PASSWORD})
    assert "Log out" in page.text, page.text
    return client


def addresses(conn: Connection) -> dict[str, str]:
    """Return what is opened, by what the table calls it."""
    ends = conn.execute(
        "select min(m.msg_id), max(m.msg_id) from pgque.list_messages(%s, 'pending', 1000) as m", (BIG,)
    ).fetchone()
    assert ends is not None
    letter = one(conn, "select max(d.ev_id) from pgque.dlq_inspect(%s, 1) as d", BIG)
    return {
        "queues": "/",
        "a queue": f"/queue?queue={BIG}",
        "a queue, charts of 7 days": f"/queue?queue={BIG}&range=7d",
        "a small queue": "/queue?queue=small0001",
        "find a text in all queues": f"/search?q=customer+999&of={BIG}",
        "find an id in all queues": f"/search?q={ends[1]}",
        "messages": f"/messages?queue={BIG}",
        "messages, older ones": f"/messages?queue={BIG}&before={ends[1]}",
        "messages by state": f"/messages?queue={BIG}&status=retry",
        "messages by type": f"/messages?queue={BIG}&type=kind+3",
        "messages by text": f"/messages?queue={BIG}&text=customer+999",
        "messages that are not there": f"/messages?queue={BIG}&key=none",
        "a message": f"/message?queue={BIG}&id={ends[1]}",
        "a dead message": f"/message?queue={BIG}&id={letter}",
        "failing": f"/failing?queue={BIG}",
        "dead letters": f"/dead?queue={BIG}",
        "dead letters by text": f"/dead?queue={BIG}&text=customer+999",
        "delete old dead letters": f"/dead/purge?queue={BIG}&older_than=1+day",
        "purge": f"/queue/purge?queue={BIG}",
        "move a consumer": f"/queue/seek?queue={BIG}&consumer=audit&to=latest",
        "archive": f"/archive?queue={BIG}",
        "recurring": "/recurring",
        "streams": "/streams",
        "actions": "/actions",
        "send": f"/send?queue={BIG}",
        "/metrics": "/metrics",
    }


def _pages(conn: Connection, address: str, note: str) -> list[Row]:
    rows = []
    with closing(log_in(address)) as client:
        began = time.perf_counter()
        while "Figures of" not in client.get("/").text:
            time.sleep(0.2)
        note = f"; figures after {time.perf_counter() - began:.1f} s; {note}"
        for what, path in addresses(conn).items():
            times, statuses = [], set()
            for _ in range(ROUNDS):
                began = time.perf_counter()
                statuses.add(client.get(path).status_code)
                times.append(time.perf_counter() - began)
            middle = statistics.median(times)
            told = "" if statuses == {200} else f"; answer {statuses}"
            rows.append(
                Row(
                    f"page: {what}",
                    f"{middle * 1000:,.0f} ms",
                    "–",
                    None,
                    "" if path == "/metrics" else "≤ 1 s",
                    (path == "/metrics" or max(times) <= 1) and not told,
                    f"the first time {times[0] * 1000:,.0f} ms{told}{note}",
                    {"median_s": middle, "first_s": times[0], "most_s": max(times)},
                )
            )
            note = ""
    return rows


def _viewers(bench: Bench, address: str) -> Row:
    """Ten viewers, whose browsers get the first page every ten seconds, against nobody."""
    seconds = 20.0 if bench.quick else 240.0  # with many queues the figures are refreshed every few minutes
    with ExitStack() as stack:
        viewers = [stack.enter_context(closing(log_in(address))) for _ in range(VIEWERS)]
        meter = stack.enter_context(Meter(bench))
        done = threading.Event()
        times: list[float] = []

        def watch(n: int) -> None:
            done.wait(n * PERIOD / VIEWERS)
            while not done.is_set():
                began = time.perf_counter()
                viewers[n].get("/")
                times.append(time.perf_counter() - began)
                done.wait(max(PERIOD - times[-1], 0))

        before = meter.read()
        time.sleep(seconds)
        bare = meter.read() - before
        threads = [threading.Thread(target=watch, args=(n,), daemon=True) for n in range(VIEWERS)]
        for thread in threads:
            thread.start()
        time.sleep(PERIOD)  # what the first of them asks for is not what they cost while they are open
        before = meter.read()
        time.sleep(seconds)
        ours = meter.read() - before
        done.set()
        for thread in threads:
            thread.join(60)
    share, rest = ((cost.cpu_s or 0.0) / cost.seconds for cost in (ours, bare))
    return Row(
        f"{VIEWERS} open overviews, CPU of the server",
        f"{share - rest:.1%} of a core",
        f"{rest:.1%}",
        None,
        "≤ 5 % of a core",
        share - rest <= 0.05,
        f"median {statistics.median(times) * 1000:,.0f} ms, most {max(times) * 1000:,.0f} ms; bare: the ticker alone",
        {
            "share": share - rest,
            "ticker_share": rest,
            "median_s": statistics.median(times),
            "most_s": max(times),
        },
    )
