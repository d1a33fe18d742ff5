# ruff: noqa: RUF001
"""A Worker of one process with handlers of a millisecond, beside a loop written by hand in the same run.

The loop receives as many messages as there are handlers, runs them together, and acks the whole batch. It
records no outcome of a single message, extends no lease, and does not reconnect.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal

import pgque
from bench import workers as bench_workers
from bench.crew import Crew
from bench.measure import Bench, Connection, Row, percentile, queue, ticking
from bench.workers import Done, Job, do, fill, judge, rest

Use = Literal["tasks", "threads"]

HANDLER = 0.001  # seconds that a handler takes
SIZES: tuple[tuple[Use, int], ...] = (("tasks", 64), ("tasks", 256), ("threads", 16), ("threads", 64))
GOALS = {"tasks": 1.0, "threads": 0.8}
RATE = 1000  # messages a second, where latency is measured


@dataclass(slots=True)
class Handled:
    """The ids of the messages that handlers began, and when the first began and the last ended."""

    count: int
    ids: list[int] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    all_done: Callable[[], object] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: int = 0

    def begin(self, message: pgque.Message) -> None:
        """Note that a handler begins."""
        self.began = self.began or time.perf_counter()
        self.ids.append(message.msg_id)

    def end(self) -> None:
        """Note that a handler ends."""
        with self._lock:
            self._done += 1
            if self._done < self.count:
                return
        self.ended = time.perf_counter()
        self.all_done()

    async def in_task(self, message: pgque.Message) -> None:
        """Handle a message in a task."""
        self.begin(message)
        await asyncio.sleep(HANDLER)
        self.end()

    def in_thread(self, message: pgque.Message) -> None:
        """Handle a message in a thread."""
        self.begin(message)
        time.sleep(HANDLER)
        self.end()

    @property
    def per_s(self) -> float:
        """Return the messages a second."""
        return self.count / (self.ended - self.began)


def by_worker(bench: Bench, name: str, use: Use, concurrency: int, handled: Handled) -> None:
    """Handle the messages of a queue with a Worker."""
    if use == "tasks":

        async def run() -> None:
            worker = pgque.AsyncWorker(bench.dsn, queue=name, consumer="c", concurrency=concurrency)
            worker.handler("*")(handled.in_task)
            handled.all_done = worker.stop
            await worker.run()

        asyncio.run(run())
    else:
        worker = pgque.Worker(bench.dsn, queue=name, consumer="c", concurrency=concurrency)
        worker.handler("*")(handled.in_thread)
        handled.all_done = worker.stop
        worker.run()


def by_hand(bench: Bench, name: str, use: Use, concurrency: int, handled: Handled) -> None:
    """Handle the messages of a queue with a loop over receive, the handlers, and one ack."""
    if use == "tasks":

        async def run() -> None:
            async with await pgque.connect_async(bench.dsn, autocommit=True) as client:
                while batch := await client.receive(name, "c", concurrency, worker="by hand"):
                    await asyncio.gather(*map(handled.in_task, batch))
                    await client.ack(batch[0].batch_id)

        asyncio.run(run())
    else:
        with (
            pgque.connect(bench.dsn, autocommit=True) as client,
            ThreadPoolExecutor(concurrency) as executor,
        ):
            while batch := client.receive(name, "c", concurrency, worker="by hand"):
                list(executor.map(handled.in_thread, batch))
                client.ack(batch[0].batch_id)


def drain(
    bench: Bench,
    conn: Connection,
    how: Callable[[Bench, str, Use, int, Handled], None],
    use: Use,
    concurrency: int,
) -> tuple[float, str]:
    """Handle a backlog; return messages a second, and in capitals what is wrong."""
    count = bench.pick(30_000, 10_000) if use == "tasks" else bench.pick(15_000, 5_000)
    name = f"handlers {use} {concurrency}"
    fill(conn, name, count)
    handled = Handled(count)
    how(bench, name, use, concurrency, handled)
    fault = judge(count, handled.ids, rest(conn, name))
    conn.execute("select pgque.drop_queue(%s, true)", (name,))
    return handled.per_s, fault


def throughput(bench: Bench) -> Iterator[Row]:
    """Backlogs, by tasks and by threads."""
    rounds = bench.pick(5, 2)
    with bench.connect() as conn:
        for use, concurrency in SIZES:
            ours: list[float] = []
            hand: list[float] = []
            faults: set[str] = set()
            for turn in range(rounds):
                for how in (by_worker, by_hand) if turn % 2 == 0 else (by_hand, by_worker):
                    per_s, fault = drain(bench, conn, how, use, concurrency)
                    (ours if how is by_worker else hand).append(per_s)
                    faults |= {fault} - {""}
            ratio = statistics.median(a / b for a, b in zip(ours, hand, strict=True))
            yield Row(
                f"handlers of 1 ms in {concurrency} {use}",
                f"{statistics.median(ours):,.0f}/s",
                f"{statistics.median(hand):,.0f}/s",
                ratio,
                f"≥ {GOALS[use]}",
                not faults and ratio >= GOALS[use],
                "; ".join(faults) or "beside receive, gather, ack by hand; each message once",
                {
                    "concurrency": concurrency,
                    "worker_per_s": statistics.median(ours),
                    "by_hand_per_s": statistics.median(hand),
                    "ratio": ratio,
                },
            )


@contextmanager
def _sending(crew: Crew[Job, Done], name: str, seconds: float) -> Iterator[None]:
    """Have another process send at the rate while the block runs, which has to end with the last message."""
    crew.begin([Job("ours send", name, "", 0, seconds, per_second=RATE)])
    yield
    crew.finish()


def latency(bench: Bench, crew: Crew[Job, Done]) -> Iterator[Row]:
    """From send to handler at 1,000 a second: a Worker, and a loop that receives at each notification."""
    seconds = bench.pick(20, 4)
    with bench.connect() as conn, ticking(bench):
        found = {}
        for how in ("by hand", "worker"):
            name = f"latency {how}"
            queue(conn, name)
            taken: list[float] = []

            def note(message: pgque.Message, taken: list[float] = taken) -> None:
                assert message.created_at is not None
                taken.append((datetime.now(timezone.utc) - message.created_at).total_seconds())

            with _sending(crew, name, seconds):
                end = time.monotonic() + seconds + 1
                if how == "worker":
                    worker = pgque.Worker(bench.dsn, queue=name, consumer="c")
                    worker.handler("*")(note)
                    timer = threading.Timer(seconds + 1, worker.stop)
                    timer.start()
                    worker.run()
                else:
                    _receive_at_ticks(bench, name, note, end)
            conn.execute("select pgque.drop_queue(%s, true)", (name,))
            found[how] = percentile(taken[RATE:], 0.99) * 1000
    ratio = found["worker"] / found["by hand"]
    yield Row(
        f"from send to handler at {RATE:,}/s, p99",
        f"{found['worker']:.1f} ms",
        f"{found['by hand']:.1f} ms",
        ratio,
        "≤ 1.1 ×",
        ratio <= 1.1,
        "beside a loop that receives at each tick",
        {"worker_ms": found["worker"], "by_hand_ms": found["by hand"]},
    )


def _receive_at_ticks(bench: Bench, name: str, note: Callable[[pgque.Message], None], end: float) -> None:
    """Receive, handle and ack at each notification until the end."""
    with pgque.connect(bench.dsn, autocommit=True) as client:
        client.conn.execute(f'listen "pgque_{name}"'.encode())
        while time.monotonic() < end:
            while batch := client.receive(name, "c", worker="by hand"):
                for message in batch:
                    note(message)
                client.ack(batch[0].batch_id)
            for _ in client.conn.notifies(timeout=0.1, stop_after=1):
                pass


def workers(bench: Bench) -> list[Row]:
    """Throughput and latency of a Worker of one process, and what is measured with worker processes."""
    rows = list(throughput(bench))
    with Crew(bench, 1, do) as crew:
        rows += latency(bench, crew)
    return rows + bench_workers.workers(bench)
