"""Batch handlers beside handlers of one message: both write a row for each message into a table.

One process, four threads. A handler of one message commits its row by itself, over a connection of its thread;
with `transactional=True` both use the connection that they are given.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

import pgque
from bench.measure import Bench, Connection, Row
from bench.workers import fill, judge, rest

SIZE = 500
GOAL = 5.0

_INSERT = "insert into bench.stored select m, p from unnest(%s::bigint[], %s::text[]) as u (m, p)"


def _store(conn: psycopg.Connection[Any], messages: Sequence[pgque.Message]) -> None:
    ids = [message.msg_id for message in messages]
    conn.execute(_INSERT, (ids, [message.payload for message in messages]))


def drain(bench: Bench, conn: Connection, by_batch: bool, transactional: bool) -> tuple[float, str]:
    """Store a backlog; return messages a second, and in capitals what is wrong."""
    count = bench.pick(100_000, 20_000) if by_batch else bench.pick(15_000, 4_000)
    name = f"batches {by_batch} {transactional}"
    conn.execute("create table bench.stored (msg_id bigint, payload text)")
    fill(conn, name, count)
    worker = pgque.Worker(bench.dsn, queue=name, consumer="c", transactional=transactional)
    own = threading.local()
    opened: list[psycopg.Connection[Any]] = []

    def mine() -> psycopg.Connection[Any]:
        if not hasattr(own, "conn"):
            own.conn = psycopg.connect(bench.dsn, autocommit=True)
            opened.append(own.conn)
        found: psycopg.Connection[Any] = own.conn
        return found

    store: Callable[..., None]
    if by_batch:

        def store(messages: list[pgque.Message], given: Any = None) -> None:
            _store(given or mine(), messages)

        worker.batch_handler("*", size=SIZE)(store)
    else:

        def store(message: pgque.Message, given: Any = None) -> None:
            _store(given or mine(), [message])

        worker.handler("*")(store)
    began = time.perf_counter()
    worker.run(until_idle=True)
    took = time.perf_counter() - began
    for connection in opened:
        connection.close()
    stored = [row[0] for row in conn.execute("select msg_id from bench.stored")]
    fault = judge(count, stored, rest(conn, name))
    conn.execute("drop table bench.stored")
    conn.execute("select pgque.drop_queue(%s, true)", (name,))
    return count / took, fault


def batches(bench: Bench) -> list[Row]:
    """Backlogs, with and without transactions that are shared with the acks."""
    rows = []
    with bench.connect() as conn:
        for transactional in (False, True):
            found: dict[bool, list[float]] = {True: [], False: []}
            faults: set[str] = set()
            for _ in range(bench.pick(3, 1)):
                for by_batch in (True, False):
                    per_s, fault = drain(bench, conn, by_batch, transactional)
                    found[by_batch].append(per_s)
                    faults |= {fault} - {""}
            ours, single = statistics.median(found[True]), statistics.median(found[False])
            rows.append(
                Row(
                    f"batch handler of {SIZE} into a table{', transactional' if transactional else ''}",
                    f"{ours:,.0f}/s",
                    f"{single:,.0f}/s",
                    ours / single,
                    f"≥ {GOAL:g}",
                    not faults and ours >= GOAL * single,
                    "; ".join(faults) or "beside handlers of one message; each row once",
                    {"batch_per_s": ours, "single_per_s": single, "ratio": ours / single},
                )
            )
    return rows
