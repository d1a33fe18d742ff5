"""A queue for tests, on a real server: send, let a worker work, read the outcomes.

In conftest.py, for pytest:

    from pgque.testing import pgque_queue

In a test:

    def test_without_an_address_the_message_is_a_dead_letter(pgque_queue):
        pgque_queue.send({"to": "nobody"}, type="welcome")
        pgque_queue.work(worker)
        assert [letter.dl_reason for letter in pgque_queue.dead] == ["no address"]

The server is started with the first test that needs it, by `pgque.embedded`, and is stopped with pytest. Each
test has a database of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg import sql

from .ops import embedded
from .ops.install import install
from .runtime.runtime import AsyncRuntime
from .twins.client import PgqueClient
from .twins.runtime import Runtime
from .types import ArchivedMessage, DeadLetter, Event, Message, Payload, QueuedMessage

__all__ = ["TestQueue", "pgque_queue"]

W = TypeVar("W", Runtime, AsyncRuntime)

_TEMPLATE = "pgque_template"
_SERVER = pytest.StashKey[embedded.Server]()

# More messages than a test has.
_ALL = 1_000_000


class TestQueue:
    """Send to a queue with one consumer, let a worker work, and read the outcomes.

    Args:
        dsn: connection string of a database with pgque.
        name: name of the queue, which is created.
        consumer: name of its consumer.
    """

    __test__ = False  # not a test class

    def __init__(self, dsn: str, name: str = "test", consumer: str = "test") -> None:
        self.dsn = dsn
        self.name = name
        self.consumer = consumer
        self.client = PgqueClient.connect(dsn, autocommit=True)
        self._handled: dict[int, Message] = {}
        self.client.admin.create_queue(name)
        self.client.subscribe(name, consumer)

    def __enter__(self) -> TestQueue:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.client.close()

    def send(self, payload: Payload | Event, **options: Any) -> int:
        """Send a message and return its id; options as of `PgqueClient.send`."""
        return self.client.send(self.name, payload, **options)

    def send_batch(
        self, payloads: Sequence[Payload | Event], *, type: str | None = None, **options: Any
    ) -> list[int]:
        """Send messages and return their ids; options as of `PgqueClient.send_batch`."""
        return self.client.send_batch(self.name, payloads, type=type, **options)

    def retry_now(self) -> int:
        """Make all messages in state retry due, and return their number. Calls `pgque.retry_now`."""
        return self.client.consumers.retry_now(self.name, self.consumer)

    def work(self, worker: Runtime | AsyncRuntime, *, timeout: float = 30) -> list[Message]:
        """Run a worker or consumer until its queue has nothing left to receive, and return the messages that
        its handlers got.

        A copy of the worker runs on this queue: with its settings, handlers and hooks, but in threads or
        tasks of this process. It also handles messages that handlers send to this queue. It does not handle
        messages in state delayed or retry. Raises TimeoutError after so many seconds. In a running event loop
        use `work_async`.
        """
        if isinstance(worker, AsyncRuntime):
            return asyncio.run(self.work_async(worker, timeout=timeout))
        copy, handled = self._copy(worker)
        count = -1
        while count < len(handled):
            count = len(handled)
            self._tick()
            with _stopped_after(copy, timeout):
                copy.run(until_idle=True)
        return handled

    async def work_async(self, worker: AsyncRuntime, *, timeout: float = 30) -> list[Message]:
        """Run an AsyncWorker or AsyncConsumer until its queue has nothing left to receive; see `work`."""
        copy, handled = self._copy(worker)
        count = -1
        while count < len(handled):
            count = len(handled)
            self._tick()
            with _stopped_after(copy, timeout):
                await copy.run(until_idle=True)
        return handled

    def _tick(self) -> None:
        self.client.force_next_tick(self.name)
        self.client.ticker(self.name)

    def _copy(self, worker: W) -> tuple[W, list[Message]]:
        """Return a worker on this queue with the settings, handlers and hooks of another, and a list that
        fills with the messages that it handles."""
        settings = {**worker._settings(), "queues": {self.name: 1}, "consumer": self.consumer}
        copy = worker._made(self.dsn, **settings, concurrency=worker.concurrency)
        handled: list[Message] = []

        def record(message: Message) -> None:
            handled.append(message)
            self._handled[message.msg_id] = message

        copy.before(record)
        copy._handlers.add_all(worker._handlers)
        copy._middleware.add_all(worker._middleware.hooks)
        return copy, handled

    @property
    def done(self) -> list[Message]:
        """Return the messages that were acknowledged, without those in the archive."""
        unfinished = {message.msg_id for message in self.client.messages.list(self.name, None, _ALL)}
        return [message for message in self._handled.values() if message.msg_id not in unfinished]

    @property
    def waiting(self) -> list[QueuedMessage]:
        """Return the messages that were not received yet, delayed ones too."""
        return [
            message
            for status in ("pending", "delayed")
            for message in self.client.messages.list(self.name, status, _ALL)
        ]

    @property
    def retried(self) -> list[QueuedMessage]:
        """Return the messages in state retry."""
        return self.client.messages.list(self.name, "retry", _ALL)

    @property
    def dead(self) -> list[DeadLetter]:
        """Return the dead letters."""
        return self.client.dlq.inspect(self.name, _ALL)

    @property
    def archived(self) -> list[ArchivedMessage]:
        """Return the messages in the archive."""
        return self.client.archived.list(self.name, _ALL)


@contextmanager
def _stopped_after(worker: Runtime | AsyncRuntime, seconds: float) -> Iterator[None]:
    """Stop a worker that is not idle after so many seconds, and raise TimeoutError; KeyboardInterrupt where a
    signal stopped it."""
    too_long = threading.Event()

    def stop() -> None:
        too_long.set()
        worker.stop()

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if too_long.is_set():
        raise TimeoutError(f"the worker still had messages after {seconds:g} s")
    if worker._stopper.is_set():
        raise KeyboardInterrupt


@pytest.fixture
def pgque_queue(request: pytest.FixtureRequest) -> Iterator[TestQueue]:
    """Return a new queue, in a database of its own."""
    server = _server(request.config)
    name = f"test_{secrets.token_hex(4)}"
    with psycopg.connect(server.dsn, autocommit=True, prepare_threshold=None) as admin:
        database = sql.Identifier(name)
        admin.execute(sql.SQL("create database {} template {}").format(database, sql.Identifier(_TEMPLATE)))
        try:
            with TestQueue(server.dsn_for(name)) as queue:
                yield queue
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(database))


def _server(config: pytest.Config) -> embedded.Server:
    """Return the server of this run of pytest, with a database to copy."""
    server = config.stash.get(_SERVER, None)
    if server is None:
        server = embedded.start()
        config.add_cleanup(server.stop)
        with psycopg.connect(server.dsn, autocommit=True, prepare_threshold=None) as admin:
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(_TEMPLATE)))
        install(server.dsn_for(_TEMPLATE))
        config.stash[_SERVER] = server
    return server
