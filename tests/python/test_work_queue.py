"""WorkQueue: messages one at a time, and what becomes of them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pytest

import pgque

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def work(dsn: str, client: pgque.PgqueClient, queue: str) -> Iterator[pgque.WorkQueue]:
    client.subscribe(queue, "c")
    with pgque.WorkQueue(dsn, queue, consumer="c") as work:
        yield work


def _left(client: pgque.PgqueClient, queue: str) -> list[str | None]:
    """Return what another worker gets now."""
    found: list[str | None] = []
    while batch := client.receive(queue, "c", worker="other", visibility_timeout=60):
        found += [message.payload for message in batch]
    return found


def _held(client: pgque.PgqueClient, queue: str) -> int:
    return sum(worker.messages for worker in client.consumers.list_workers(queue, "c"))


def test_messages_are_acked_when_the_next_one_is_asked_for(
    client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick
) -> None:
    work.send({"n": 1}, type="t", headers={"a": 1})
    work.send_batch(["b", "c"], keys=["k", None])
    tick(work.queue)
    seen = sorted(
        work.messages(max_messages=2, timeout=0), key=lambda message: message.payload or "", reverse=True
    )
    assert [(m.type, m.payload, m.key, m.receive_count) for m in seen] == [
        ("t", seen[0].payload, None, 1),
        ("default", "c", None, 1),
        ("default", "b", "k", 1),
    ]
    assert (seen[0].json(), seen[0].headers) == ({"n": 1}, {"a": 1})
    assert _held(client, work.queue) == 0
    assert _left(client, work.queue) == []
    assert not seen[0].ack()  # it has its outcome


def test_another_outcome_can_be_chosen(client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick) -> None:
    work.send_batch(["ack", "archive", "nack", "dead", "release", "none"])
    tick(work.queue)
    with_release: list[str | None] = []
    for message in work.messages(timeout=0):
        with_release.append(message.payload)
        match message.payload:
            case "ack":
                assert message.ack()
            case "archive":
                assert message.archive()
            case "nack":
                assert message.nack(3600, "later \x00")
            case "dead":
                assert message.dead("no good")
            case "release" if message.receive_count == 1:
                assert message.release()
                assert not message.ack()
    assert with_release == ["ack", "archive", "nack", "dead", "release", "none", "release"]
    assert _held(client, work.queue) == 0
    assert [a.payload for a in client.archived.list(work.queue)] == ["archive"]
    assert [d.ev_data for d in client.dlq.inspect(work.queue)] == ["dead"]
    [retry] = client.messages.list(work.queue, "retry")
    assert (retry.payload, retry.last_error) == ("nack", "later ")


def test_leaving_the_loop_releases_messages_not_given_and_acks_those_done(
    client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick
) -> None:
    work.send_batch(["a", "b", "c", "d"])
    tick(work.queue)
    for message in work.messages():
        if message.payload == "b":
            break
    assert _left(client, work.queue) == ["c", "d"]
    assert client.consumers.reclaim(work.queue, "c") >= 2
    assert sorted(map(str, _left(client, work.queue))) == ["b", "c", "d"]


def test_an_exception_in_the_loop_does_not_ack_its_message(
    client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick
) -> None:
    work.send_batch(["a", "b"])
    tick(work.queue)
    with pytest.raises(RuntimeError, match="on purpose"):
        for _ in work.messages(visibility_timeout=0.3):
            raise RuntimeError("on purpose")
    seen = {message.payload for message in work.messages(timeout=1.5)}
    assert seen == {"a", "b"}


def test_a_message_sent_while_the_loop_waits_comes_at_once(
    client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick
) -> None:
    def later() -> None:
        client.send(work.queue, "x")
        tick(work.queue)

    timer = threading.Timer(0.1, later)
    timer.start()
    for message in work.messages(timeout=30):
        assert message.payload == "x"
        message.ack()
        break
    timer.join()


def test_a_slow_loop_keeps_the_rest_of_its_batch(
    client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick, wait_until: Wait
) -> None:
    work.send_batch(["a", "b", "c", "d"])
    tick(work.queue)
    seen = []
    for message in work.messages(visibility_timeout=0.5, timeout=0):
        seen.append(message.payload)
        assert message.extend(1)
        threading.Event().wait(0.3)  # work, longer than the timeout in sum
        assert _left(client, work.queue) == []
    assert seen == ["a", "b", "c", "d"]


def test_the_rest_of_a_batch_that_was_lost_is_not_given(
    client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick, wait_until: Wait
) -> None:
    work.send_batch(["a", "b", "c"])
    tick(work.queue)
    other: list[str | None] = []

    def taken() -> bool:
        other.extend(_left(client, work.queue))
        return len(other) == 3

    seen = []
    for message in work.messages(visibility_timeout=0.2, timeout=0):
        seen.append(message.payload)
        wait_until(taken, "another worker has them")
        assert not message.ack()
    assert seen == ["a"]


def test_two_loops_share_the_messages(
    dsn: str, client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick
) -> None:
    work.send_batch([str(n) for n in range(200)])
    tick(work.queue)
    seen: list[str | None] = []

    def drain() -> None:
        with pgque.WorkQueue(dsn, work.queue, consumer="c") as own:
            seen.extend(message.payload for message in own.messages(max_messages=7, timeout=0))

    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(int, map(str, seen))) == list(range(200))
    assert _left(client, work.queue) == []


def test_after_its_connection_was_lost_it_opens_another(
    client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick, conn: Connection
) -> None:
    work.send("a")
    tick(work.queue)
    with pytest.raises(pgque.PgqueConnectionError):
        for _ in work.messages():
            conn.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = %s",
                [f"pgque {work.queue}/c"],
            )
    work.send("b")
    tick(work.queue)
    assert [m.payload for m in work.messages(timeout=0)] == ["b"]


def _backend(conn: Connection, queue: str) -> int:
    row = conn.execute(
        "select pid from pg_stat_activity where application_name = %s", [f"pgque {queue}/c"]
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_what_is_sent_after_ctrl_c_in_an_ack_is_there_for_others(
    client: pgque.PgqueClient,
    work: pgque.WorkQueue,
    tick: Tick,
    conn: Connection,
    connect: Callable[..., Connection],
    wait_for_lock: Callable[[int], None],
) -> None:
    work.send_batch(["a", "b"])
    tick(work.queue)
    loop = work.messages(max_messages=1)
    first = next(loop)
    holder = connect(autocommit=False)
    holder.execute("select pg_advisory_xact_lock(%s)", [first.batch_id])
    pid, main = _backend(conn, work.queue), threading.get_ident()

    def interrupt() -> None:
        try:
            wait_for_lock(pid)
        finally:
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(loop)
    finally:
        thread.join(20)
        signal.signal(signal.SIGINT, before)
    holder.rollback()
    work.send("c")
    tick(work.queue)
    assert "c" in _left(client, work.queue)


async def _cancel(call: Awaitable[object], wait: Callable[[], None]) -> None:
    """Begin a call, and cancel it after a wait in a thread."""
    task = asyncio.ensure_future(call)
    await asyncio.to_thread(wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_is_sent_after_a_cancelled_ack_is_there_for_others(
    dsn: str,
    client: pgque.PgqueClient,
    queue: str,
    tick: Tick,
    conn: Connection,
    connect: Callable[..., Connection],
    wait_for_lock: Callable[[int], None],
) -> None:
    client.subscribe(queue, "c")
    client.send_batch(queue, "t", ["a", "b"])
    tick(queue)
    holder = connect(autocommit=False)

    async def call() -> None:
        async with pgque.AsyncWorkQueue(dsn, queue, consumer="c") as work:
            loop = work.messages(max_messages=1)
            first = await loop.__anext__()
            holder.execute("select pg_advisory_xact_lock(%s)", [first.batch_id])
            await _cancel(loop.__anext__(), lambda: wait_for_lock(_backend(conn, queue)))
            holder.rollback()
            await work.send("c")
            tick(queue)
            assert "c" in _left(client, queue)
            await work.send("d")
            tick(queue)
            assert [message.payload async for message in work.messages(timeout=0)] == ["d"]

    asyncio.run(call())


def test_after_a_cancelled_ack_of_one_message_the_loop_goes_on_over_the_same_connection(
    dsn: str,
    client: pgque.PgqueClient,
    queue: str,
    tick: Tick,
    conn: Connection,
    connect: Callable[..., Connection],
    wait_for_lock: Callable[[int], None],
) -> None:
    client.subscribe(queue, "c")
    client.send_batch(queue, "t", ["a", "b"])
    tick(queue)
    holder = connect(autocommit=False)

    async def call() -> None:
        async with pgque.AsyncWorkQueue(dsn, queue, consumer="c") as work:
            loop = work.messages(max_messages=2, timeout=0)
            first = await loop.__anext__()
            holder.execute("select pg_advisory_xact_lock(%s)", [first.batch_id])
            pid = _backend(conn, queue)
            await _cancel(first.ack(), lambda: wait_for_lock(pid))
            holder.rollback()
            assert [message.payload async for message in loop] == ["b"]
            assert _backend(conn, queue) == pid

    asyncio.run(call())
    assert _left(client, queue) == []
    assert _held(client, queue) == 0


def test_the_error_names_what_is_missing(dsn: str, queue: str) -> None:
    with pytest.raises(ValueError, match="name of its queue"):
        pgque.WorkQueue(dsn)
    with pgque.WorkQueue(dsn, queue) as work, pytest.raises(ValueError, match="name of its consumer"):
        next(iter(work.messages()))
    with (
        pgque.WorkQueue(dsn, "no such queue", consumer="c") as work,
        pytest.raises(pgque.PgqueQueueNotFoundError),
    ):
        next(iter(work.messages()))
    with (
        pgque.WorkQueue(dsn, queue, consumer="nobody") as work,
        pytest.raises(pgque.PgqueConsumerNotFoundError),
    ):
        next(iter(work.messages()))


def test_the_async_queue_does_the_same(dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick) -> None:
    client.subscribe(queue, "c")

    async def call() -> list[str | None]:
        async with pgque.AsyncWorkQueue(dsn, queue, consumer="c") as work:
            await work.send("a", key="k")
            await work.send_batch(["b", "c", "d"])
            tick(queue)
            seen = []
            async for message in work.messages(timeout=0):
                seen.append(message.payload)
                if message.payload == "b":
                    assert await message.dead("no good")
                assert await message.extend(5) or message.payload == "b"
            loop = work.messages(timeout=0)
            await work.send_batch(["x", "y"])
            tick(queue)
            assert (await loop.__anext__()).payload == "x"
            await loop.aclose()
            return seen

    assert asyncio.run(call()) == ["a", "b", "c", "d"]
    assert _left(client, queue) == ["y"]
    assert [d.ev_data for d in client.dlq.inspect(queue)] == ["b"]


@pytest.mark.parametrize("then", ["close at once", "settle", "send", "do something else"])
def test_closing_the_async_queue_releases_messages_that_a_loop_left_by_break_was_not_given(
    dsn: str,
    client: pgque.PgqueClient,
    queue: str,
    tick: Tick,
    caplog: pytest.LogCaptureFixture,
    then: str,
) -> None:
    client.subscribe(queue, "c")
    client.send_batch(queue, "t", ["a", "b", "c", "d"])
    tick(queue)

    async def call() -> None:
        async with pgque.AsyncWorkQueue(dsn, queue, consumer="c") as work:
            async for message in work.messages():
                if message.payload == "b":
                    break
            if then == "settle":
                assert await message.dead("no good")
            if then == "send":
                await work.send("e")
            if then == "do something else":
                await asyncio.sleep(0)  # in which asyncio begins to close the loop

    asyncio.run(call())
    assert _left(client, queue) == ["c", "d"]
    assert caplog.messages == []
    client.consumers.reclaim(queue, "c")
    assert sorted(map(str, _left(client, queue))) == (["c", "d"] if then == "settle" else ["b", "c", "d"])


def test_closing_the_queue_in_a_loop_releases_messages_that_it_was_not_given(
    client: pgque.PgqueClient, work: pgque.WorkQueue, tick: Tick, caplog: pytest.LogCaptureFixture
) -> None:
    work.send_batch(["a", "b", "c"])
    tick(work.queue)
    loop = work.messages()
    assert [next(loop).payload, next(loop).payload] == ["a", "b"]
    work.close()
    assert _left(client, work.queue) == ["c"]
    loop.close()
    assert caplog.messages == []
    client.consumers.reclaim(work.queue, "c")
    assert sorted(map(str, _left(client, work.queue))) == ["b", "c"]
