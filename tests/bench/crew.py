"""Processes that are measured together, and how they send and take messages: one way of it for every system."""

from __future__ import annotations

import threading
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import Any, Generic, Protocol, TypeVar

from bench.measure import Bench
from bench.systems import SYSTEMS, payload

WARM_UP = 8  # calls before the clock: psycopg prepares a statement with its sixth execution


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does.

    ``send`` sends single messages one after the other; or, if a ``rate`` is given, each at its time by the
    clock, message n being due n / rate seconds after the start. ``bulk`` sends ``size`` at a time. Both number
    their messages ``first``, ``first + step`` and so on, and end after ``seconds`` or ``count`` messages. ``work``
    takes ``size`` at a time until all processes together have seen ``expected`` deliveries, or the seconds are over.
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


@dataclass(frozen=True, slots=True)
class Begin:
    """Says that this process is ready, and waits for the common start; ``counts`` has a number of each process."""

    pipe: Pipe
    dsn: str
    counts: Any
    index: int

    def __call__(self) -> float:
        self.pipe.send(None)
        at: float = self.pipe.recv()
        while (wait := at - time.monotonic()) > 0:
            time.sleep(wait)
        return at


def _send(job: Job, begin: Begin) -> Done:
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


def _work(job: Job, begin: Begin) -> Done:
    system = SYSTEMS[job.system](begin.dsn, job.consumers)
    counts, index = begin.counts, begin.index
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


def use_system(job: Job, begin: Begin) -> Done:
    """Send to a system, or take from it."""
    return _work(job, begin) if job.verb == "work" else _send(job, begin)


class Timed(Protocol):
    """A job of any kind tells how long it takes."""

    @property
    def seconds(self) -> float: ...


J = TypeVar("J", bound=Timed)
D = TypeVar("D")


def member(do: Callable[[J, Begin], D], begin: Begin) -> None:
    """Do one job after another; the body of a process."""
    while True:
        try:
            job = begin.pipe.recv()
        except (EOFError, OSError):  # the parent is done
            return
        try:
            begin.pipe.send(do(job, begin))
        except Exception:
            begin.pipe.send(traceback.format_exc())


class Crew(Generic[J, D]):
    """Processes that are there before any clock starts; ``do`` does a job in one of them."""

    def __init__(self, bench: Bench, count: int, do: Callable[[J, Begin], D]) -> None:
        context = get_context("spawn")  # the parent has threads
        self.counts = context.RawArray("q", count)
        self._pipes: list[Pipe] = []
        self._processes = []
        self._busy: list[Pipe] = []
        self._until = 0.0
        for index in range(count):
            ours, theirs = context.Pipe()
            begin = Begin(theirs, bench.dsn, self.counts, index)
            process = context.Process(target=member, args=(do, begin), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Crew[J, D]:
        return self

    def begin(self, jobs: Sequence[J], at: float = 0.0) -> float:
        """Start the jobs together, at a time if one is given; return when."""
        self._busy = self._pipes[: len(jobs)]
        for index in range(len(self.counts)):
            self.counts[index] = 0
        for pipe, job in zip(self._busy, jobs, strict=True):
            pipe.send(job)
        for pipe in self._busy:
            if (answer := pipe.recv()) is not None:
                raise RuntimeError(f"a process failed:\n{answer}")
        at = max(at, time.monotonic() + 0.05)
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

    def finish(self) -> list[D]:
        """Wait for the jobs; return what each did."""
        answers = []
        for pipe in self._busy:
            if not pipe.poll(max(self._until - time.monotonic(), 0)):
                raise TimeoutError("a process does not stop")
            answers.append(pipe.recv())
            if isinstance(answers[-1], str):
                raise RuntimeError(f"a process failed:\n{answers[-1]}")
        return answers

    def run(self, jobs: Sequence[J], at: float = 0.0) -> tuple[float, list[D]]:
        """Start the jobs together, at a time if one is given; return when they started, and what each did."""
        return self.begin(jobs, at), self.finish()

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def judge(expected: int, done: Sequence[Done], is_complete: bool = True, copies: int = 1) -> str:
    """Tell what was lost or came too often; each number is expected once for each consumer."""
    times = Counter(n for d in done for n in d.numbers if n >= 0)
    twice = sum(n - copies for n in times.values() if n > copies)
    lost = expected * copies - sum(min(n, copies) for n in times.values())
    faults = [f"{twice:,} TOO MANY"] if twice else []
    if is_complete and lost > 0:
        faults.append(f"{lost:,} LOST")
    return ", ".join(faults)
