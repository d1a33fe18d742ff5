"""Worker.before, after and error: what runs around the handlers."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgque

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


def _send(client: pgque.PgqueClient, queue: str, tick: Tick, *payloads: str) -> None:
    client.send_batch(queue, "t", payloads)
    tick(queue)


def _reasons(client: pgque.PgqueClient, queue: str) -> dict[str | None, str | None]:
    return {letter.ev_data: letter.dl_reason for letter in client.dlq.inspect(queue)}


def test_hooks_run_around_the_handler_those_after_it_in_reverse(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    told: list[str] = []
    worker = pgque.Worker(dsn, queue=pool, consumer="c", concurrency=1)
    for name in ("one", "two"):
        worker.before(lambda message, name=name: told.append(f"before {name} {message.payload}"))
        worker.after(lambda message, result, name=name: told.append(f"after {name} {result!r}"))
        worker.error(lambda message, error, name=name: told.append(f"error {name} {error!r}"))

    @worker.handler("*")
    def handle(message: pgque.Message) -> object:
        told.append(f"handle {message.payload}")
        if message.payload == "bad":
            raise ValueError("bad")
        if message.payload == "dead":
            raise pgque.Dead("no good")
        return 42

    _send(client, pool, tick, "good", "bad", "dead")
    worker.run(until_idle=True)
    assert told == [
        *("before one good", "before two good", "handle good", "after two 42", "after one 42"),
        *("before one bad", "before two bad", "handle bad"),
        *("error two ValueError('bad')", "error one ValueError('bad')"),
        *("before one dead", "before two dead", "handle dead", "after two Dead('no good')"),
        "after one Dead('no good')",
    ]
    assert _reasons(client, pool) == {"bad": "ValueError: bad", "dead": "no good"}


def test_hooks_of_an_async_worker_are_functions_of_either_kind(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    told: list[str] = []
    worker = pgque.AsyncWorker(dsn, queue=pool, consumer="c", concurrency=1)
    worker.before(lambda message: told.append("plain before"))
    worker.after(lambda message, result: told.append(f"plain after {result}"))

    @worker.before
    async def before(message: pgque.Message) -> None:
        await asyncio.sleep(0)
        told.append("before")

    @worker.after
    async def after(message: pgque.Message, result: object) -> None:
        await asyncio.sleep(0)
        told.append(f"after {result}")

    @worker.error
    async def error(message: pgque.Message, error: BaseException) -> None:
        await asyncio.sleep(0)
        told.append(f"error {error}")

    @worker.handler("*")
    async def handle(message: pgque.Message) -> int:
        if message.payload == "bad":
            raise ValueError("bad")
        return 42

    _send(client, pool, tick, "good", "bad")
    asyncio.run(worker.run(until_idle=True))
    assert told == [
        *("plain before", "before", "after 42", "plain after 42"),
        *("plain before", "before", "error bad"),
    ]
    assert _reasons(client, pool) == {"bad": "ValueError: bad"}


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_an_error_in_a_hook_is_the_failure_of_the_message(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, caplog: pytest.LogCaptureFixture, twin: str
) -> None:
    handled: list[str | None] = []
    errors: list[str] = []
    made: Any = pgque.Worker if twin == "sync" else pgque.AsyncWorker
    worker: pgque.Worker = made(dsn, queue=pool, consumer="c", concurrency=1)

    @worker.before
    def before(message: pgque.Message) -> None:
        if message.payload == "before":
            raise ValueError("before")
        if message.payload == "skip":
            raise pgque.Dead("skipped")

    @worker.after
    def after(message: pgque.Message, result: object) -> None:
        if message.payload == "after":
            raise ValueError("after")
        if message.payload == "change":
            raise pgque.Dead("changed")

    @worker.error
    def last(message: pgque.Message, error: BaseException) -> None:
        errors.append(str(error))

    @worker.error
    def first(message: pgque.Message, error: BaseException) -> None:
        raise RuntimeError("this hook is broken")

    def handle(message: pgque.Message) -> None:
        handled.append(message.payload)

    async def handle_async(message: pgque.Message) -> None:
        handle(message)

    worker.handler("*")(handle if twin == "sync" else handle_async)
    _send(client, pool, tick, "good", "before", "skip", "after", "change")
    if twin == "sync":
        worker.run(until_idle=True)
    else:
        asyncio.run(worker.run(until_idle=True))  # type: ignore[func-returns-value, arg-type]
    assert handled == ["good", "after", "change"]
    assert errors == ["before", "after"]
    assert _reasons(client, pool) == {
        "before": "ValueError: before",
        "skip": "skipped",
        "after": "ValueError: after",
        "change": "changed",
    }
    assert sum("an error hook failed for message" in text for text in caplog.messages) == 2


@pytest.mark.parametrize("twin", ["sync", "async"])
def test_context_variables_of_a_hook_reach_the_handler_and_no_other_message(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, twin: str
) -> None:
    session: contextvars.ContextVar[str] = contextvars.ContextVar("session", default="none")
    seen: list[tuple[str | None, str, str]] = []
    made: Any = pgque.Worker if twin == "sync" else pgque.AsyncWorker
    worker: pgque.Worker = made(dsn, queue=pool, consumer="c", concurrency=3)

    @worker.before
    def before(message: pgque.Message) -> None:
        if session.get() != "none":
            raise RuntimeError("the session of another message")
        session.set(f"session of {message.payload}")

    @worker.after
    def after(message: pgque.Message, result: object) -> None:
        seen.append((message.payload, str(result), session.get()))

    def handle(message: pgque.Message) -> str:
        return session.get()

    async def handle_async(message: pgque.Message) -> str:
        await asyncio.sleep(0)
        return session.get()

    worker.handler("*")(handle if twin == "sync" else handle_async)
    _send(client, pool, tick, *"abcdefgh")
    if twin == "sync":
        worker.run(until_idle=True)
    else:
        asyncio.run(worker.run(until_idle=True))  # type: ignore[func-returns-value, arg-type]
    assert sorted(seen, key=str) == [(x, f"session of {x}", f"session of {x}") for x in "abcdefgh"]
    assert _reasons(client, pool) == {}


PROGRAM = """
import sys
import pgque

worker = pgque.Worker(sys.argv[1], queue=sys.argv[2], consumer="c", concurrency=1, use="processes")

@worker.before
def before(message):
    raise pgque.Dead("by a hook")

@worker.handler("*")
def handle(message):
    pass

if __name__ == "__main__":
    worker.run()
"""


def test_hooks_run_in_processes(
    dsn: str, client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait, tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    _send(client, pool, tick, "a")
    process = subprocess.Popen([sys.executable, str(path), dsn, pool])
    try:
        wait_until(lambda: _reasons(client, pool) == {"a": "by a hook"}, timeout=30)
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_a_hook_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    worker = pgque.Worker(queue="q", consumer="c")

    async def hook(message: pgque.Message) -> None: ...

    for register in (worker.before, worker.after, worker.error):
        with pytest.raises(TypeError, match="coroutine function: use AsyncWorker"):
            register(hook)  # type: ignore[type-var]
        with pytest.raises(TypeError, match="has to be a function"):
            register("hook")  # type: ignore[type-var]
