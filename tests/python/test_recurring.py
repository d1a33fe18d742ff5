"""Recurring messages from Python and from the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

import pgque
from pgque.cli import main
from support import threads

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def client(dsn: str) -> Iterator[pgque.PgqueClient]:
    """A client that finds no recurring message of other tests, and leaves none behind."""
    with pgque.connect(dsn, autocommit=True) as client:
        drop_all(client)
        yield client
        drop_all(client)


def drop_all(client: pgque.PgqueClient) -> None:
    for message in client.recurring.list():
        client.recurring.drop(message.name)


@pytest.fixture
def pool(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    return queue


def only(client: pgque.PgqueClient) -> pgque.RecurringMessage:
    """The one recurring message that there is."""
    (message,) = client.recurring.list()
    return message


# -- the client ------------------------------------------------------------


def test_a_recurring_message_is_created_listed_changed_and_dropped(
    client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    starts = datetime(2090, 1, 1, tzinfo=timezone.utc)
    assert client.recurring.create(
        "nightly",
        pool,
        "0 3 * * *",
        {"report": 1},
        type="report",
        headers={"a": 1},
        key="k",
        delay=5,
        ttl=timedelta(hours=1),
        partition_key="p",
        timezone="Europe/Berlin",
        catch_up="all",
        starts_at=starts,
        ends_at=starts + timedelta(days=9),
    )
    message = only(client)
    assert (message.name, message.queue_name, message.status, message.cron) == (
        "nightly",
        pool,
        "active",
        "0 3 * * *",
    )
    assert message.next_run == datetime(2090, 1, 1, 2, tzinfo=timezone.utc)
    assert (message.type_name, json.loads(message.payload or ""), message.headers) == (
        "report",
        {"report": 1},
        {"a": 1},
    )
    assert (message.key, message.delay, message.ttl, message.partition_key) == (
        "k",
        timedelta(seconds=5),
        timedelta(hours=1),
        "p",
    )
    assert (message.timezone, message.catch_up, message.starts_at) == ("Europe/Berlin", "all", starts)
    assert not client.recurring.create("nightly", pool, "0 3 * * *", pgque.Event("event", b"bytes"))
    assert (only(client).type_name, only(client).payload_bytes) == ("event", b"bytes")
    sent = client.recurring.run("nightly")
    tick(pool)
    [received] = client.receive(pool, "c")
    assert (received.msg_id, received.payload_bytes) == (sent, b"bytes")
    assert received.headers is not None
    assert received.headers["pgque-recurring"]["name"] == "nightly"
    assert only(client).last_msg_id == sent
    assert [client.recurring.pause("nightly"), client.recurring.pause("nightly")] == [True, False]
    assert only(client).status == "paused"
    assert [client.recurring.resume("nightly"), client.recurring.resume("nightly")] == [True, False]
    client.recurring.drop("nightly")
    assert client.recurring.list() == []


def test_errors_have_their_classes_and_hints(client: pgque.PgqueClient, pool: str) -> None:
    with pytest.raises(pgque.PgqueBadArgumentError, match="five fields"):
        client.recurring.create("r", pool, "every day")
    with pytest.raises(pgque.PgqueBadArgumentError, match="no such date"):
        client.recurring.create("r", pool, "0 0 31 2 *")
    with pytest.raises(pgque.PgqueQueueNotFoundError):
        client.recurring.create("r", "no such queue", "0 3 * * *")
    with pytest.raises(pgque.PgqueInvalidNameError):
        client.recurring.create("", pool, "0 3 * * *")
    with pytest.raises(pgque.PgqueMessageNotFoundError, match="list_recurring"):
        client.recurring.drop("r")
    with pytest.raises(ValueError, match="deliver_at"):
        client.recurring.create("r", pool, "0 3 * * *", pgque.Event("t", 1, deliver_at=datetime.now()))


def test_the_async_client_has_the_same_calls(dsn: str, client: pgque.PgqueClient, pool: str) -> None:
    async def call() -> None:
        async with await pgque.connect_async(dsn, autocommit=True) as other:
            assert await other.recurring.create("r", pool, "90 seconds", "x")
            assert [message.name for message in await other.recurring.list()] == ["r"]
            assert await other.recurring.pause("r")
            assert await other.recurring.resume("r")
            assert await other.recurring.run("r") > 0
            await other.recurring.drop("r")

    asyncio.run(call())
    assert client.recurring.list() == []


# -- workers ------------------------------------------------------------


def test_a_worker_registers_what_its_handlers_are_for(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    seen: list[object] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c")

    @worker.every("0 3 1 1 *", type="nightly", payload={"all": True}, timezone="Europe/Berlin")
    def nightly(message: pgque.Message) -> None:
        seen.append(message.json())

    assert client.recurring.list() == []
    with threads.running(worker.run, worker.stop, 20):
        wait_until(lambda: client.recurring.list() != [], "it is registered")
        client.recurring.run(f"{pool}/nightly")
        tick(pool)
        wait_until(lambda: seen == [{"all": True}], "it is handled")
    first = only(client)
    assert (first.name, first.cron, first.timezone) == (f"{pool}/nightly", "0 3 1 1 *", "Europe/Berlin")

    again = pgque.Worker(dsn, queue=pool, consumer="c")
    again.every("0 4 1 1 *", type="nightly")(nightly)
    with threads.running(again.run, again.stop, 20):
        wait_until(lambda: only(client).cron == "0 4 1 1 *", "it is changed")
    assert only(client).registered_at > first.registered_at
    assert only(client).created_at == first.created_at


def test_an_async_worker_does_the_same(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    seen: list[str | None] = []

    async def call() -> None:
        worker = pgque.AsyncWorker(dsn, queue=pool, consumer="c")

        @worker.every("1 hour", type="often", payload="x", name="mine")
        async def often(message: pgque.Message) -> None:
            seen.append(message.payload)
            worker.stop()

        running = asyncio.create_task(worker.run())
        await asyncio.to_thread(wait_until, lambda: client.recurring.list() != [], "it is registered")
        client.recurring.run("mine")
        tick(pool)
        await running

    asyncio.run(call())
    assert seen == ["x"]


def test_a_worker_of_several_queues_names_one_and_encodes_with_its_own_encoder(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    @dataclass
    class Night:
        rooms: int

    class Booking:
        rooms = 3

    def encode(value: object) -> object:
        assert isinstance(value, Booking)
        return {"rooms": value.rooms}

    other = f"{pool}2"
    client.admin.create_queue(other)
    client.subscribe(other, "c")
    seen: list[object] = []
    worker = pgque.Worker(dsn, queues={pool: 1, other: 1}, consumer="c", encoder=encode)
    for queue in (None, "missing"):
        with pytest.raises(ValueError, match=f"one of {pool}, {other}"):
            worker.every("1 hour", type="night", queue=queue)

    @worker.every("1 hour", type="night", queue=other, payload=Booking())
    def handle(night: Night) -> None:
        seen.append(night)

    worker.run(until_idle=True)
    assert (only(client).name, only(client).queue_name) == (f"{other}/night", other)
    client.recurring.run(f"{other}/night")
    tick(other)
    worker.run(until_idle=True)
    assert seen == [Night(3)]


def test_two_of_one_name_and_what_is_no_handler_are_refused(dsn: str, pool: str) -> None:
    worker = pgque.Worker(dsn, queue=pool, consumer="c")
    worker.every("1 hour", type="t")(print)
    with pytest.raises(ValueError, match="name="):
        worker.every("2 hours", type="t")
    worker.every("2 hours", type="t", name="other")(print)
    with pytest.raises(TypeError, match="function"):
        worker.every("2 hours", type="u")(1)  # type: ignore[type-var]


def test_a_worker_with_a_bad_schedule_ends_with_the_error(
    dsn: str, client: pgque.PgqueClient, pool: str
) -> None:
    worker = pgque.Worker(dsn, queue=pool, consumer="c")
    worker.every("0 0 31 2 *", type="t")(print)
    with pytest.raises(pgque.PgqueBadArgumentError, match="no such date"):
        worker.run()


PROGRAM = """
import sys

import pgque

dsn, queue = sys.argv[1:]
worker = pgque.Worker(dsn, queue=queue, consumer="c", use="processes", concurrency=2)

@worker.every("0 3 1 1 *", type="nightly", payload="x")
def nightly(message):
    with pgque.connect(dsn) as client:
        client.send(queue, "handled", type="answer")

@worker.handler("answer")
def answer(message):
    pass

if __name__ == "__main__":
    worker.run()
"""


def test_a_worker_in_processes_registers_it_too(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, tmp_path: Path
) -> None:
    client.subscribe(pool, "answers")
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    process = subprocess.Popen([sys.executable, str(path), dsn, pool])
    try:
        wait_until(lambda: client.recurring.list() != [], "it is registered", timeout=30)
        client.recurring.run(f"{pool}/nightly")

        def answered() -> bool:
            tick(pool)
            batch = client.receive(pool, "answers")
            if batch:
                client.ack(batch[0].batch_id)
            return "handled" in [message.payload for message in batch]

        wait_until(answered, "it is handled", timeout=30)
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


# -- the command line ------------------------------------------------------------


def test_the_commands(dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    def run(*arguments: str, code: int = 0, stdin: str | None = None) -> str:
        result = CliRunner().invoke(
            main, ["recurring", *arguments], env={"PGQUE_DSN": dsn, "COLUMNS": "200"}, input=stdin
        )
        assert result.exit_code == code, result.output
        return result.output

    assert "none" in run("list")
    create = ["create", "nightly", pool, "0 3 * * *", "-", "--type", "report", "--header", "a=1"]
    assert "nightly is created" in run(*create, "--timezone", "Europe/Berlin", "--ttl", "1h", stdin="text")
    assert "nightly is changed" in run(*create, "--starts-at", "2090-01-01 00:00:00", stdin="text")
    [row] = json.loads(run("list", "--json"))
    assert (row["name"], row["cron"], row["payload"]) == ("nightly", "0 3 * * *", "text")
    assert "nightly" in run("list")
    assert "nightly is paused" in run("pause", "nightly")
    assert "already" in run("pause", "nightly")
    assert "nightly is resumed" in run("resume", "nightly")
    assert "not paused" in run("resume", "nightly")
    sent = int(run("run", "nightly"))
    tick(pool)
    [message] = client.receive(pool, "c")
    assert (message.msg_id, message.type, message.payload) == (sent, "report", "text")
    assert "nightly is dropped" in run("drop", "nightly")
    assert "hint: " in run("drop", "nightly", code=1)
    assert "five fields" in run("create", "bad", pool, "whenever", "x", code=1)
    run("create", "bad", pool, "0 3 * * *", "x", "--catch-up", "some", code=2)
