"""The async client does what the sync client does."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

import pgque

Tick = Callable[[str], int | None]
TOOL = Path(__file__).resolve().parents[2] / "python" / "tools" / "make_sync.py"


def test_messages_make_the_round_trip(dsn: str, queue: str, tick: Tick) -> None:
    async def send() -> list[int]:
        async with await pgque.connect_async(dsn) as client:
            assert await client.subscribe(queue, "c") == 1
            return [await client.send(queue, {"n": 1}), *await client.send_batch(queue, "t", ["a", "b"])]

    async def receive() -> list[pgque.Message]:
        async with await pgque.connect_async(dsn, autocommit=True) as client:
            batch = await client.receive(queue, "c")
            assert await client.nack(batch[0].batch_id, batch[0]) == 1
            assert [o.ok for o in await client.nack(batch[0].batch_id, batch[1:])] == [True, True]
            assert await client.ack(batch[0].batch_id) == 1
            return batch

    ids = asyncio.run(send())
    tick(queue)
    batch = asyncio.run(receive())
    assert [message.msg_id for message in batch] == ids
    assert batch[0].json() == {"n": 1}


def test_peek_takes_the_name_of_a_consumer(dsn: str, queue: str, tick: Tick) -> None:
    async def call() -> None:
        async with await pgque.connect_async(dsn, autocommit=True) as client:
            await client.subscribe(queue, "slow")
            await client.subscribe(queue, "quick")
            first = await client.send(queue, "first")
            await asyncio.to_thread(tick, queue)
            batch = await client.receive(queue, "quick")
            await client.ack(batch[0].batch_id)
            second = await client.send(queue, "second")
            assert [m.msg_id for m in await client.peek(queue)] == [first, second]
            assert [m.msg_id for m in await client.peek(queue, 1, consumer="slow")] == [first]
            assert [m.msg_id for m in await client.peek(queue, consumer="quick")] == [second]

    asyncio.run(call())


def test_errors_have_the_same_classes(dsn: str) -> None:
    async def call() -> None:
        async with await pgque.connect_async(dsn, autocommit=True) as client:
            with pytest.raises(pgque.PgqueQueueNotFoundError) as caught:
                await client.send("no such queue", "x")
            assert caught.value.queue == "no such queue"

    asyncio.run(call())


def test_a_database_without_pgque_is_refused(fresh_dsn: str) -> None:
    with pytest.raises(pgque.PgqueVersionError, match="pgque install"):
        asyncio.run(pgque.connect_async(fresh_dsn))


def test_an_exception_rolls_back_and_a_pool_commits(dsn: str, queue: str, tick: Tick) -> None:
    async def call() -> None:
        with pytest.raises(RuntimeError, match="on purpose"):
            async with await pgque.connect_async(dsn) as client:
                await client.send(queue, "gone")
                raise RuntimeError("on purpose")
        async with (
            AsyncConnectionPool(dsn, min_size=1, open=False) as pool,
            pgque.AsyncPgqueClient.from_pool(pool) as client,
        ):
            await client.subscribe(queue, "c")
            await client.send(queue, "kept")

    asyncio.run(call())
    tick(queue)
    with pgque.connect(dsn) as client:
        assert [m.payload for m in client.receive(queue, "c")] == ["kept"]


def test_a_wrapped_connection_is_left_in_its_transaction(dsn: str, queue: str) -> None:
    async def call() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as own:
            async with pgque.AsyncPgqueClient(own) as client:
                await client.send(queue, "x")
            assert own.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS

    asyncio.run(call())


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [
        (pgque.PgqueClient, pgque.AsyncPgqueClient),
        (pgque.Consumer, pgque.AsyncConsumer),
        (pgque.WorkQueue, pgque.AsyncWorkQueue),
        (pgque.WorkMessage, pgque.AsyncWorkMessage),
        (pgque.Worker, pgque.AsyncWorker),
    ],
)
def test_the_twins_have_the_same_methods_and_arguments(sync: type, asynchronous: type) -> None:
    def public(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(cls, callable)
            if not name.startswith("_")
        }

    assert public(sync) == public(asynchronous)


def test_the_sync_modules_are_current() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
