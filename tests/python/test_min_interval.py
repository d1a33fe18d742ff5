"""min_interval of consumers and workers: a pause after a batch that was not full, in which nothing is
held."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import pgque
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]

CLASSES = [pgque.Consumer, pgque.AsyncConsumer, pgque.Worker, pgque.AsyncWorker]

# A pause of a day: what comes before its end was not waited for.
DAY = 86400.0

NAME = "pauses"


class Runner:
    """One kind of consumer with a handler that records each message."""

    def __init__(self, dsn: str, queue: str, kind: str, most: int) -> None:
        self.seen: list[pgque.Message] = []
        is_async = kind.startswith("async ")
        kind = kind.removeprefix("async ")
        options: dict[str, Any] = {"queue": queue, "min_interval": DAY}
        made: Any
        if kind == "worker":
            made = pgque.AsyncWorker if is_async else pgque.Worker
            options |= {"consumer": "c", "concurrency": most, "prefetch": most}
        else:
            made = pgque.AsyncConsumer if is_async else pgque.Consumer
            options |= {"name": "c", "max_messages": most, "poll_interval": 600}
            options |= {"subconsumer": "s"} if kind == "subconsumer" else {}
            options |= {"transactional": True} if kind == "transactional" else {}
        self._it = made(f"{dsn} application_name={NAME}", **options)
        self._is_async = is_async
        register = self._it.handler if kind == "worker" else self._it.on
        register("*")(self._handle_async if is_async else self._handle)
        self.stop = self._it.stop

    def _handle(self, message: pgque.Message, *conn: object) -> None:
        self.seen.append(message)

    async def _handle_async(self, message: pgque.Message, *conn: object) -> None:
        self.seen.append(message)

    def run(self, **options: bool) -> None:
        run = self._it.run if hasattr(self._it, "run") else self._it.start
        if self._is_async:
            asyncio.run(run(**options))
        else:
            run(**options)

    def end_pause(self) -> None:
        for paused in getattr(self._it, "_sources", [self._it]):
            setattr(paused, "due_at" if hasattr(paused, "due_at") else "_due_at", 0.0)
        self._it._stopper.wake()

    def payloads(self) -> list[str]:
        return sorted(str(message.payload) for message in self.seen)

    def sizes(self) -> list[int]:
        """Return how many messages each batch had."""
        return list(Counter(message.batch_id for message in self.seen).values())


def running(runner: Runner) -> AbstractContextManager[threading.Thread]:
    """Run a consumer or worker in a thread, and stop it at the end."""
    return threads.running(runner.run, runner.stop, 20)


KINDS = ["consumer", "transactional", "subconsumer", "worker"]


# Two of the async classes are enough, because the sync ones are generated from them.
@pytest.fixture(params=[*KINDS, "async consumer", "async worker"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def feed(client: pgque.PgqueClient, queue: str, kind: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    if kind.endswith("subconsumer"):
        client.subscribe_subconsumer(queue, "c", "s", convert_normal=True)
    return queue


def _idle(conn: Connection) -> bool:
    """Say whether the consumer has nothing in hand: no transaction, no batch; and did not ask for more after
    its last ack, which a transactional handler gives over a connection of its own."""
    [(in_hand,)] = conn.execute(
        "select (select count(*) from pgque.get_consumer_info() where current_batch is not null)"
        " + (select count(*) from pgque.get_queue_info() as i, pgque.list_workers(i.queue_name))"
    ).fetchall()
    sessions = conn.execute(
        "select bool_and(state = 'idle' and xact_start is null),"
        " (array_agg(query like '%%pgque.receive%%' order by state_change desc))[1]"
        " from pg_stat_activity where application_name = %s",
        [NAME],
    ).fetchall()
    return in_hand == 0 and sessions == [(True, False)]


def _send(client: pgque.PgqueClient, queue: str, tick: Tick, *payloads: str) -> None:
    client.send_batch(queue, "t", payloads)
    tick(queue)


def test_what_is_ticked_in_the_pause_comes_in_one_batch_and_nothing_is_held_meanwhile(
    dsn: str, client: pgque.PgqueClient, feed: str, tick: Tick, wait_until: Wait, conn: Connection, kind: str
) -> None:
    runner = Runner(dsn, feed, kind, 10)
    _send(client, feed, tick, "a")
    with running(runner):
        wait_until(lambda: runner.payloads() == ["a"] and _idle(conn), "it pauses")
        for payload in "bcd":
            _send(client, feed, tick, payload)
        wait_until(lambda: _idle(conn), "it still pauses")
        runner.end_pause()
        wait_until(lambda: runner.payloads() == ["a", "b", "c", "d"])
    assert runner.sizes() == [1, 3]


def test_a_full_batch_is_followed_at_once(
    dsn: str, client: pgque.PgqueClient, feed: str, tick: Tick, wait_until: Wait, conn: Connection, kind: str
) -> None:
    runner = Runner(dsn, feed, kind, 2)
    for payloads in ("ab", "cdef", "g"):
        _send(client, feed, tick, *payloads)
    with running(runner):
        wait_until(lambda: runner.payloads() == [*"abcdefg"] and _idle(conn), "it pauses")
    assert runner.sizes() == [2, 2, 2, 1]


def test_a_backlog_is_drained_without_pauses_though_its_batches_are_not_full(
    dsn: str, feed: str, wait_until: Wait, conn: Connection, kind: str
) -> None:
    """A batch ends with the hundredth tick at the latest. A session sends and ticks, without a call for
    each."""
    runner = Runner(dsn, feed, kind, 500)
    sent = [f"{number:03}" for number in range(250)]
    conn.execute(
        "do $$ begin for n in 0 .. 249 loop"
        f" perform pgque.send('{feed}', to_char(n, 'FM000')); commit;"
        f" perform pgque.force_next_tick('{feed}'); perform pgque.ticker('{feed}'); commit;"
        " end loop; end $$".encode()
    )
    conn.execute(
        "update pgque.event set ev_time = ev_time - interval '2 days'"
        " where slot / 3 = (select queue_id from pgque.queue where queue_name = %s)",
        [feed],
    )
    with running(runner):
        wait_until(lambda: runner.payloads() == sent, "all are there")
    assert len(runner.sizes()) > 2


def test_a_stop_ends_the_pause(
    dsn: str, client: pgque.PgqueClient, feed: str, tick: Tick, wait_until: Wait, conn: Connection, kind: str
) -> None:
    runner = Runner(dsn, feed, kind, 10)
    _send(client, feed, tick, "a")
    with running(runner) as thread:
        wait_until(lambda: runner.payloads() == ["a"] and _idle(conn), "it pauses")
        _send(client, feed, tick, "b")
        runner.stop()
        thread.join(10)
        assert not thread.is_alive()
    assert runner.payloads() == ["a"]


def test_a_signal_ends_the_pause(
    dsn: str, client: pgque.PgqueClient, feed: str, tick: Tick, wait_until: Wait, conn: Connection, kind: str
) -> None:
    runner = Runner(dsn, feed, kind, 10)
    _send(client, feed, tick, "a")
    paused: list[bool] = []

    def signal_when_it_pauses() -> None:
        try:
            wait_until(lambda: runner.payloads() == ["a"] and _idle(conn), "it pauses")
        except BaseException:
            runner.stop()
            raise
        paused.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_when_it_pauses)
    thread.start()
    runner.run()
    thread.join()
    assert paused


def test_a_lost_connection_does_not_end_the_pause(
    dsn: str, client: pgque.PgqueClient, feed: str, tick: Tick, wait_until: Wait, conn: Connection, kind: str
) -> None:
    runner = Runner(dsn, feed, kind, 10)
    _send(client, feed, tick, "a")
    with running(runner):
        wait_until(lambda: runner.payloads() == ["a"] and _idle(conn), "it pauses")
        pids = [
            pid
            for pid, _ in conn.execute(
                "select pid, pg_terminate_backend(pid) from pg_stat_activity where application_name = %s",
                [NAME],
            )
        ]
        _send(client, feed, tick, "b")
        wait_until(
            lambda: (
                conn.execute("select from pg_stat_activity where pid = any (%s)", [pids]).rowcount == 0
                and _idle(conn)
            ),
            "it is connected again",
        )
        _send(client, feed, tick, "c")
        _send(client, feed, tick, "d")
        wait_until(lambda: _idle(conn), "it still pauses")
        runner.end_pause()
        wait_until(lambda: runner.payloads() == ["a", "b", "c", "d"])
    assert runner.sizes() == [1, 3]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "wrong", [-1, -0.001, math.nan, math.inf, -math.inf, DAY + 1, None, "5", True, timedelta(seconds=5)]
)
def test_what_is_no_length_of_a_pause_is_refused(cls: Any, wrong: object) -> None:
    name = "consumer" if "consumer" in inspect.signature(cls).parameters else "name"
    with pytest.raises(
        pgque.PgqueBadArgumentError, match=r"min_interval must be from 0 to 86400 seconds, not "
    ):
        cls(queue="q", **{name: "c"}, min_interval=wrong)
    for right in (0, 0.5, DAY):
        assert cls(queue="q", **{name: "c"}, min_interval=right).min_interval == right


@pytest.mark.parametrize("cls", CLASSES)
def test_without_it_there_is_no_pause(cls: Any) -> None:
    assert inspect.signature(cls).parameters["min_interval"].default == 0


@pytest.mark.parametrize("kind", ["worker", "async worker"], indirect=True)
def test_a_worker_that_ends_when_idle_does_not_pause(
    dsn: str, client: pgque.PgqueClient, feed: str, tick: Tick, kind: str
) -> None:
    runner = Runner(dsn, feed, kind, 10)
    client.send_batch(feed, "t", ["a", "b"])
    tick(feed)
    with threads.running(lambda: runner.run(until_idle=True), runner.stop, 20) as thread:
        thread.join(20)
        assert not thread.is_alive()
    assert runner.payloads() == ["a", "b"]
