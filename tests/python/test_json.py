"""JSON that PostgreSQL holds and Python's own reader refuses: a message that has some stops nobody."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest

import pgque
from support import servers

Tick = Callable[[str], int | None]
Connection = psycopg.Connection[tuple[Any, ...]]

LONG = "7" * 5000  # digits; more than Python makes an int of
DEEP = f"{'[' * 12_000}{']' * 12_000}"


def _is_read(text: str) -> bool:
    try:
        json.loads(text)
    except RecursionError:
        return False
    return True


# From 3.14 on Python reads as deep as its stack allows.
needs_limit = pytest.mark.skipif(_is_read(DEEP), reason="this Python reads what is nested as deeply")


@pytest.fixture
def subscribed(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c, where what fails is a dead letter."""
    client.subscribe(queue, "c")
    client.admin.set_queue_config(queue, "max_retries", 0)
    return queue


def _send(client: pgque.PgqueClient, queue: str, tick: Tick, **headers: str) -> None:
    """Send as programs in other languages do; each payload is the name of its headers."""
    client.conn.execute("set max_stack_depth = '4MB'")  # the deepest need more than the default
    for payload, value in headers.items():
        client.conn.execute(
            "select pgque.send(%s, 't', %s::text, headers => %s::jsonb)", [queue, payload, value]
        )
    tick(queue)


def test_headers_are_read_in_the_encoding_of_the_session(fresh_dsn: str) -> None:
    with psycopg.connect(fresh_dsn, autocommit=True) as admin:
        admin.execute("create database pgque_latin1 encoding 'LATIN1' locale 'C' template template0")
        try:
            dsn = psycopg.conninfo.make_conninfo(fresh_dsn, dbname="pgque_latin1")
            with psycopg.connect(dsn) as install:
                install.execute(servers.SQL_FILE.read_bytes())
            with pgque.PgqueClient.connect(dsn, autocommit=True) as client:
                assert client.conn.info.encoding == "iso8859-1"
                client.admin.create_queue("q")
                client.subscribe("q", "c")
                client.send("q", "x", headers={"name": "Zo\xeb"})
                client.ticker("q")
                (message,) = client.receive("q", "c")
                assert message.headers == {"name": "Zo\xeb"}
        finally:
            admin.execute("drop database pgque_latin1 with (force)")


def test_numbers_in_headers_keep_their_digits(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick
) -> None:
    _send(
        client,
        subscribed,
        tick,
        many=f'{{"n": {LONG}, "list": [-{LONG}, 1, 1.5]}}',
        exponent='{"n": 1e100000}',
        small='{"n": 1e-10000}',
    )
    batch = client.receive(subscribed, "c")
    assert [(message.payload, message.headers) for message in batch] == [
        ("many", {"n": Decimal(LONG), "list": [Decimal(f"-{LONG}"), 1, 1.5]}),
        ("exponent", {"n": Decimal("1e100000")}),
        ("small", {"n": 0.0}),
    ]
    assert isinstance(batch[0].headers["list"][1], int)  # type: ignore[index]
    assert [message.headers for message in client.messages.list(subscribed)] == [m.headers for m in batch]
    with psycopg.connect(dsn, cursor_factory=psycopg.ClientCursor) as own:
        assert pgque.PgqueClient(own).peek(subscribed)[0].headers == batch[0].headers


@needs_limit
def test_headers_that_are_nested_too_deeply_are_refused_where_they_are_looked_into(
    client: pgque.PgqueClient, subscribed: str, tick: Tick
) -> None:
    _send(client, subscribed, tick, deep=f'{{"a": 1, "deep": {DEEP}}}', good='{"a": 1}')
    deep, good = client.receive(subscribed, "c")
    assert (deep.payload, good.payload, good.headers) == ("deep", "good", {"a": 1})
    headers = deep.headers
    assert headers is not None
    looks: list[Callable[[], object]] = [
        lambda: headers["a"],
        lambda: headers.get("a"),
        lambda: "a" in headers,
        lambda: bool(headers),
        lambda: dict(headers),
        lambda: {**headers},
        lambda: list(headers.items()),
    ]
    for look in looks:
        with pytest.raises(ValueError, match="nested too deeply"):
            look()
    with pytest.raises(TypeError):  # and not {}
        client.send(subscribed, "x", headers=headers)
    assert "nested too deeply" in repr(deep)


@needs_limit
@pytest.mark.parametrize("kind", ["Consumer", "Worker", "WorkQueue", "AsyncConsumer", "AsyncWorker"])
def test_only_the_message_whose_handler_needs_such_headers_fails(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: str
) -> None:
    _send(
        client,
        subscribed,
        tick,
        digits=f'{{"trace": "a", "n": {LONG}}}',
        deep=f'{{"trace": "b", "deep": {DEEP}}}',
        good='{"trace": "c"}',
        unread=f'{{"deep": {DEEP}}}',
    )
    seen: dict[str | None, object] = {}

    def handle(message: pgque.Message) -> None:
        seen[message.payload] = None
        if len(seen) == 4:
            runner.stop()
        if message.payload != "unread":
            seen[message.payload] = (message.headers or {})["trace"]

    async def handle_async(message: pgque.Message) -> None:
        handle(message)

    runner: pgque.Consumer | pgque.Worker | pgque.AsyncConsumer | pgque.AsyncWorker
    if kind == "Consumer":
        runner = pgque.Consumer(dsn, queue=subscribed, name="c")
        runner.on("*")(handle)
        runner.start()
    elif kind == "Worker":
        runner = pgque.Worker(dsn, queue=subscribed, consumer="c", concurrency=1)
        runner.handler("*")(handle)
        runner.run()
    elif kind == "AsyncConsumer":
        runner = pgque.AsyncConsumer(dsn, queue=subscribed, name="c")
        runner.on("*")(handle_async)
        asyncio.run(runner.start())
    elif kind == "AsyncWorker":
        runner = pgque.AsyncWorker(dsn, queue=subscribed, consumer="c", concurrency=1)
        runner.handler("*")(handle_async)
        asyncio.run(runner.run())
    else:
        with pgque.WorkQueue(dsn, subscribed, consumer="c") as work:
            for message in work.messages(timeout=0):
                seen[message.payload] = None
                try:
                    seen[message.payload] = (message.headers or {}).get("trace")
                except ValueError as error:
                    if message.payload == "deep":
                        message.dead(f"ValueError: {error}")
    assert seen == {"digits": "a", "deep": None, "good": "c", "unread": None}
    [letter] = client.dlq.inspect(subscribed)
    assert letter.ev_data == "deep"
    assert str(letter.dl_reason).startswith("ValueError: these headers cannot be read: ")
    assert client.consumers.get_info(subscribed, "c")[0].current_batch is None


@pytest.mark.parametrize("leaf", [1, ("a",), {1: 2}, b"unknown"], ids=str)
def test_what_is_nested_too_deeply_is_one_error_before_it_is_sent(
    client: pgque.PgqueClient, queue: str, leaf: object
) -> None:
    deep = leaf
    for _ in range(100_000):
        deep = [deep]
    for encoder in (None, repr):
        with pytest.raises(pgque.PgquePayloadError, match="nested too deeply"):
            pgque.send(client.conn, queue, deep, encoder=encoder)


def test_a_payload_is_parsed_alike() -> None:
    def parse(payload: str) -> object:
        return pgque.Message(1, 2, "t", payload).json()

    assert parse(f'{{"n": {LONG}, "m": [1, -{LONG}]}}') == {"n": Decimal(LONG), "m": [1, Decimal(f"-{LONG}")]}
    assert parse("1e999999") == float("inf")
    with pytest.raises(pgque.PgquePayloadError, match="nested too deeply"):
        parse("[" * 100_000)
    with pytest.raises(json.JSONDecodeError):
        parse(f"[{LONG},")


@needs_limit
@pytest.mark.parametrize("command", [["peek"], ["messages"], ["archive", "list"]])
def test_the_command_lists_messages_with_such_headers(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, command: list[str]
) -> None:
    _send(client, subscribed, tick, digits=f'{{"n": {LONG}}}', deep=f'{{"deep": {DEEP}}}')
    if command[0] == "archive":
        batch = client.receive(subscribed, "c", worker="w")
        client.archive(batch[0].batch_id)
    for options in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "pgque.cli", *command, subscribed, *options, "--dsn", dsn],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
    headers = {row["payload"]: row["headers"] for row in json.loads(done.stdout)}
    assert headers["digits"] == {"n": LONG}
    assert "nested too deeply" in headers["deep"]
