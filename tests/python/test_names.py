"""One way to say it: consumers and workers agree on names, and a call of SQL has the same name in Python."""

from __future__ import annotations

import asyncio
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import pgque
from pgque.client.renamed import Renamed

Tick = Callable[[str], int | None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def client(conn: Connection) -> pgque.PgqueClient:
    return pgque.PgqueClient(conn)


# Names of 0.6 with a warning: class without "Async", old name, new name.
RENAMED = [
    ("PgqueClient", "queue_info", "get_queue_info"),
    ("PgqueClient", "consumer_info", "get_consumer_info"),
]

# Python has no overloading, so the second form of ticker() has a name of its own.
NOT_NAMED_AS_IN_SQL = {
    "ticker_all": "ticker",
    # Names of the client from before 0.9.
    "queue_config": "queue_settings",
    "subscribe_subconsumer": "register_subconsumer",
    "unsubscribe_subconsumer": "unregister_subconsumer",
}


def test_an_old_name_works_and_warns_with_the_new_one(dsn: str, client: pgque.PgqueClient) -> None:
    found = {
        (name.removeprefix("Async"), old)
        for name in pgque.__all__
        if inspect.isclass(getattr(pgque, name))
        for old, value in vars(getattr(pgque, name)).items()
        if isinstance(value, Renamed)
    }
    assert found == {(owner, old) for owner, old, _ in RENAMED}

    async def call(name: str) -> object:
        async with await pgque.connect_async(dsn) as other:
            return await getattr(other, name)()

    for owner, old, new in RENAMED:
        with pytest.warns(DeprecationWarning, match=rf"^{owner}\.{old} is now called {new}$") as caught:
            assert type(getattr(client, old)()) is list
        assert caught[0].filename == __file__
        with pytest.warns(DeprecationWarning, match=rf"^Async{owner}\.{old} is now called {new}$"):
            assert type(asyncio.run(call(old))) is list


@pytest.mark.parametrize(
    "owner", [pgque.PgqueClient, pgque.AsyncPgqueClient, pgque.WorkQueue, pgque.WorkMessage]
)
def test_a_method_has_the_name_of_the_function_that_it_calls(owner: type) -> None:
    called = {
        name: match[1]
        for name, method in vars(owner).items()
        if inspect.isfunction(method)
        and (match := re.search(r"Calls\s+`pgque\.(\w+)`", method.__doc__ or ""))
    }
    assert "send" in called or "ack" in called
    different = {name: function for name, function in called.items() if name != function}
    assert different.items() <= {**NOT_NAMED_AS_IN_SQL, "messages": "receive"}.items()


def test_a_consumer_has_the_names_of_a_worker_and_keeps_its_earlier_ones_without_a_warning(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")

    def consume(runner: Any, *, early: bool) -> None:
        client.send(queue, "a", type="t")
        tick(queue)
        register, run = (runner.on, runner.start) if early else (runner.handler, runner.run)
        assert (runner.queue, runner.consumer, runner.name) == (queue, "c", "c")

        def handle(message: pgque.Message) -> None:
            runner.stop()

        async def handle_async(message: pgque.Message) -> None:
            runner.stop()

        if isinstance(runner, pgque.Consumer):
            register("t")(handle)
            run()
        else:
            register("t")(handle_async)
            asyncio.run(asyncio.wait_for(run(), 20))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for owner in (pgque.Consumer, pgque.AsyncConsumer):
            consume(owner(dsn, queue=queue, consumer="c"), early=False)
            consume(owner(dsn, queue=queue, name="c"), early=True)
    for given in ({}, {"name": "c", "consumer": "c"}):
        options: dict[str, Any] = {**given, "queue": queue}
        with pytest.raises(TypeError, match=r"consumer=\.\.\."):
            pgque.Consumer(dsn, **options)


def test_send_batch_takes_the_order_of_send_and_the_earlier_one(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    two = ["a", "b"]
    send = client.send_batch
    with pgque.WorkQueue(dsn, queue) as work_queue, warnings.catch_warnings():
        warnings.simplefilter("error")
        ways: list[tuple[str, Callable[[], list[int]]]] = [
            ("t", lambda: send(queue, two, type="t")),
            ("default", lambda: send(queue, two)),
            ("default", lambda: send(queue=queue, payloads=two)),
            ("t", lambda: send(queue, "t", two)),
            ("t", lambda: send(queue, "t", payloads=two)),
            ("t", lambda: send(queue=queue, type="t", payloads=two)),
            ("e", lambda: send(queue, [pgque.Event("e", "a"), pgque.Event("e", "b")])),
            (
                "e",
                lambda: work_queue.send_batch(
                    [pgque.Event("e", "a"), pgque.Event("e", "b")], keys=[None] * 2
                ),
            ),
        ]
        sent = {msg_id: type_ for type_, way in ways for msg_id in way()}
        tick(queue)
        got = {message.msg_id: message.type for message in client.receive(queue, "c")}
        assert got == sent
        assert len(sent) == 2 * len(ways)
        assert send(queue, []) == send(queue, "t", []) == []
    wrong: Any = send
    for arguments, options in (
        ((), {}),
        (("t",), {"payloads": two, "type": "t"}),
        ((two, "t"), {}),
        (("t", two, "x"), {}),
        (("t",), {}),
    ):
        with pytest.raises(TypeError, match="payloads"):
            wrong(queue, *arguments, **options)
    with pytest.raises(ValueError, match="one type"):
        send(queue, [pgque.Event("e", "a"), "b"])
