"""A consumer that uses PgQ's names, beside one that uses receive() and ack(), under the same load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bench.cost import Meter
from bench.measure import Bench, Connection, Row, one, queue, ticking

RATE, SLICE = 1000, 20
PAUSE = 0.01  # seconds after an empty answer

Consume = Callable[[Connection, str], int]


def _by_pgq(conn: Connection, name: str) -> int:
    found = conn.execute("select pgque.next_batch(%s, 'c')", [name]).fetchone()
    batch = found[0] if found else None
    if batch is None:
        return 0
    events = conn.execute("select ev_id, ev_data from pgque.get_batch_events(%s)", [batch]).fetchall()
    one(conn, f"select pgque.finish_batch({batch})")
    return len(events)


def _by_receive(conn: Connection, name: str) -> int:
    events = conn.execute(
        "select msg_id, payload, batch_id from pgque.receive(%s, 'c', 500)", [name]
    ).fetchall()
    if events:
        one(conn, f"select pgque.ack({events[0][2]})")
    return len(events)


def _at_rate(bench: Bench, meter: Meter, name: str, consume: Consume, seconds: float) -> tuple[float, int]:
    """Return the CPU seconds of the server, and the messages that were consumed."""
    with bench.connect() as admin:
        queue(admin, name)
    send = "select pgque.send_batch(%s, 't', %s::text[])"
    began = time.monotonic()

    def produce() -> None:
        with bench.connect() as conn:
            for number in range(int(seconds * RATE / SLICE)):
                time.sleep(max(0.0, began + number * SLICE / RATE - time.monotonic()))
                conn.execute(send, [name, ["x" * 200] * SLICE])

    before, seen = meter.read(), 0
    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    with bench.connect() as conn:
        # What is on its way may take a second more.
        while time.monotonic() < began + seconds + 1:
            found = consume(conn, name)
            seen += found
            if not found:
                time.sleep(PAUSE)
    producer.join()
    cost = meter.read() - before
    with bench.connect() as admin:
        admin.execute("select pgque.drop_queue(%s, true)", (name,))
    return cost.cpu_s or 0.0, seen


def pgq(bench: Bench) -> list[Row]:
    """CPU of the server, for a million messages at 1,000 a second."""
    seconds = 2.0 if bench.quick else 30.0
    with Meter(bench) as meter, ticking(bench):
        plain, plain_seen = _at_rate(bench, meter, "names_receive", _by_receive, seconds)
        names, names_seen = _at_rate(bench, meter, "names_pgq", _by_pgq, seconds)
    sent = int(seconds * RATE / SLICE) * SLICE
    return [
        Row(
            f"next_batch, get_batch_events, finish_batch at {RATE:,}/s, CPU",
            f"{names / sent * 1e6:,.0f} s",
            f"{plain / sent * 1e6:,.0f} s",
            names / plain if plain else None,
            "≤ 1.0",
            names <= plain and names_seen == plain_seen == sent,
            f"of the server, for a million messages; beside receive and ack; {names_seen:,} and {plain_seen:,}"
            f" of {sent:,} messages",
            {
                "names_cpu_s": names,
                "receive_cpu_s": plain,
                "sent": sent,
                "names_seen": names_seen,
                "receive_seen": plain_seen,
            },
        )
    ]
