# ruff: noqa: RUF001
"""What queues cost that nobody uses, with the ticker at work, and how long it takes to make many."""

from __future__ import annotations

import time

from bench.cost import Cost, Meter
from bench.measure import Bench, Row, one, queue, ticking


def _rest(meter: Meter, seconds: float) -> Cost:
    before = meter.read()
    time.sleep(seconds)
    return meter.read() - before


def idle(bench: Bench) -> list[Row]:
    """1, 100 and 1,000 queues with a consumer each."""
    seconds = 2.0 if bench.quick else 60.0
    rows, made, took = [], 0, 0.0
    with bench.connect() as conn, Meter(bench) as meter:
        conn.execute("vacuum analyze")
        conn.execute("checkpoint")
        bare = _rest(meter, seconds)
        for count in (1, 20) if bench.quick else (1, 100, 1000):
            began, first = time.perf_counter(), made
            for number in range(first + 1, count + 1):
                queue(conn, f"idle{number}")
            took, made = took + time.perf_counter() - began, count
            # What making them left for the background to do is not what they cost at rest.
            conn.execute("vacuum analyze")
            conn.execute("checkpoint")
            with ticking(bench):
                time.sleep(1)
                ours = _rest(meter, seconds)
            per_minute = 60 / seconds
            cpu, rest = ((c.cpu_s or 0.0) * per_minute for c in (ours, bare))
            wal, xids = ours.wal_bytes * per_minute, ours.xids * per_minute
            rows.append(
                Row(
                    f"{count:,} idle queue{'s' if count > 1 else ''}, CPU a minute",
                    f"{cpu:.2f} s" if ours.cpu_s is not None else "–",
                    f"{rest:.2f} s" if bare.cpu_s is not None else "–",
                    None,
                    "",
                    True,
                    f"a minute: {wal / 1000:,.1f} kB WAL, {xids:,.0f} xids; bare: no queue, no ticker;"
                    f" made in {took:.1f} s",
                    {
                        "queues": count,
                        "cpu_s_per_minute": cpu,
                        "bare_cpu_s_per_minute": rest,
                        "wal_bytes_per_minute": wal,
                        "xids_per_minute": xids,
                        "create_s": took,
                    },
                )
            )
        for number in range(1, made + 1):
            conn.execute("select pgque.drop_queue(%s, true)", (f"idle{number}",))
        # Their tables go now, and not a few at a time beside what is measured next.
        while one(conn, "select count(*) from pgque.dropped_queue"):
            conn.execute("select pgque.maint_tables()")
    return rows
