"""Processes that send and take messages: one process a connection, one way of doing it for every system."""

from __future__ import annotations

import threading
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import Any

from bench.measure import Bench
from bench.systems import SYSTEMS, payload

WARM_UP = 8  # sends before the clock: psycopg prepares a statement with its sixth execution


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does.

    ``send`` sends single messages one after the other; or, if a ``rate`` is given, each at its time by the
    clock, message n being due n / rate seconds after the start. ``bulk`` sends ``size`` at a time. Both number their messages ``first``, ``first + step`` and
    so on, and end after ``seconds`` or ``count`` messages. ``work`` takes ``size`` at a time until all
    processes together have seen ``expected`` deliveries, or the seconds are over.
    """

    system: str
    verb: str
    consumers: tuple[str, ...]
    seconds: float
    size: int | None = None
    count: int | None = None
    rate: float = 0.0
    first: int = 0
    step: int = 1
    expected: int | None = None


@dataclass(slots=True)
class Done:
    """What one process did: how many messages, when the last one was done, and for ``work`` each number and time."""

    count: int = 0
    last: float = 0.0
    numbers: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))


def _send(job: Job, begin: Any) -> Done:
    system = SYSTEMS[job.system](begin.dsn, job.consumers)
    system.open()
    done = Done()
    try:
        if job.verb == "send":
            for _ in range(WARM_UP):
                system.send(payload(-1))
        began = done.last = begin()
        until, number, most = began + job.seconds, job.first, job.count or 1 << 60
        while done.count < most and done.last < until:
            if job.verb == "bulk":
                size = min(job.size or 1, most - done.count)
                system.send_many([payload(number + n) for n in range(size)])
                done.count += size
                number += size
            else:
                if job.rate:
                    due = began + number / job.rate
                    if due >= until:
                        break
                    if (wait := due - time.monotonic()) > 0:
                        time.sleep(wait)
                system.send(payload(number))
                done.count += 1
                number += job.step
            done.last = time.monotonic()
    finally:
        system.close()
    return done


def _work(job: Job, begin: Any, counts: Any, index: int) -> Done:
    system = SYSTEMS[job.system](begin.dsn, job.consumers)
    done = Done()
    numbers, times, clock = done.numbers.append, done.times.append, time.monotonic
    over, one = threading.Event(), threading.Lock()

    def seen(number: int) -> None:
        with one:  # handlers may be threads
            times(clock())
            numbers(number)
            counts[index] += 1

    until = begin() + job.seconds

    def watch() -> None:
        while not over.wait(0.01) and clock() < until:
            if job.expected is not None and sum(counts) >= job.expected:
                break
        while not over.is_set():  # it may not have begun yet
            system.stop()
            over.wait(0.1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        system.work(job.size, seen)
    finally:
        over.set()
        watcher.join()
    done.count = len(done.numbers)
    done.last = done.times[-1] if done.times else 0.0
    return done


class _Begin:
    """Says that this process is ready, and waits for the common start."""

    def __init__(self, pipe: Pipe, dsn: str) -> None:
        self.pipe, self.dsn = pipe, dsn

    def __call__(self) -> float:
        self.pipe.send(None)
        at: float = self.pipe.recv()
        while (wait := at - time.monotonic()) > 0:
            time.sleep(wait)
        return at


def member(pipe: Pipe, dsn: str, counts: Any, index: int) -> None:
    """Do one job after another; the body of a process."""
    begin = _Begin(pipe, dsn)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):  # the parent is done
            return
        try:
            pipe.send(_work(job, begin, counts, index) if job.verb == "work" else _send(job, begin))
        except Exception:
            pipe.send(traceback.format_exc())


class Crew:
    """Processes that are there before any clock starts."""

    def __init__(self, dsn: str, count: int) -> None:
        context = get_context("spawn")  # the parent has threads
        self.counts = context.RawArray("q", count)
        self._pipes: list[Pipe] = []
        self._processes = []
        self._busy: list[Pipe] = []
        self._until = 0.0
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=member, args=(theirs, dsn, self.counts, index), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def begin(self, jobs: Sequence[Job]) -> float:
        """Start the jobs together; return when."""
        self._busy = self._pipes[: len(jobs)]
        for index in range(len(self.counts)):
            self.counts[index] = 0
        for pipe, job in zip(self._busy, jobs, strict=True):
            pipe.send(job)
        for pipe in self._busy:
            if (answer := pipe.recv()) is not None:
                raise RuntimeError(f"a process failed:\n{answer}")
        at = time.monotonic() + 0.05
        self._until = at + max(job.seconds for job in jobs) + 120
        for pipe in self._busy:
            pipe.send(at)
        return at

    @property
    def seen(self) -> int:
        """Count the deliveries since the start."""
        return sum(self.counts)

    def is_done(self) -> bool:
        """Say whether every process has an answer."""
        return all(pipe.poll() for pipe in self._busy)

    def finish(self) -> list[Done]:
        """Wait for the jobs; return what each did."""
        answers = []
        for pipe in self._busy:
            if not pipe.poll(max(self._until - time.monotonic(), 0)):
                raise TimeoutError("a process does not stop")
            answers.append(pipe.recv())
            if not isinstance(answers[-1], Done):
                raise RuntimeError(f"a process failed:\n{answers[-1]}")
        return answers

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[Done]]:
        """Start the jobs together; return when they started, and what each did."""
        return self.begin(jobs), self.finish()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


@contextmanager
def crew(bench: Bench, count: int) -> Iterator[Crew]:
    """Have processes for a while."""
    result = Crew(bench.dsn, count)
    try:
        yield result
    finally:
        result.close()


def judge(expected: int, done: Sequence[Done], is_complete: bool = True, copies: int = 1) -> str:
    """Tell what was lost or came too often; each number is expected once for each consumer."""
    times = Counter(n for d in done for n in d.numbers if n >= 0)
    twice = sum(n - copies for n in times.values() if n > copies)
    lost = expected * copies - sum(min(n, copies) for n in times.values())
    faults = [f"{twice:,} TOO MANY"] if twice else []
    if is_complete and lost > 0:
        faults.append(f"{lost:,} LOST")
    return ", ".join(faults)
