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

`call` needs no server: it calls a handler with a payload, and returns the outcome.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import psycopg
import pytest
from psycopg import sql

from .codec import encode
from .codec.decode import parse_json
from .errors import PgqueBadArgumentError
from .ops import embedded
from .ops.install import install
from .runtime.batches import Batch, Item, MessageOutcome
from .runtime.concurrency import TaskPool, ThreadPool
from .runtime.runtime import AsyncRuntime
from .runtime.tasks import Task
from .runtime.workers import AsyncWorker
from .twins.client import PgqueClient
from .twins.runtime import Runtime
from .twins.workers import Worker
from .types import ArchivedMessage, DeadLetter, Event, Message, Payload, QueuedMessage

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MessageOutcome", "TestQueue", "call", "call_async", "pgque_queue"]

W = TypeVar("W", bound=Runtime | AsyncRuntime)

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
        self.client: PgqueClient = PgqueClient.connect(dsn, autocommit=True)
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
        messages in state delayed or retry. Raises TimeoutError after `timeout` seconds. In a running event
        loop use `work_async`.
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
        handled: list[Message] = []

        def record(message: Message) -> None:
            handled.append(message)
            self._handled[message.msg_id] = message

        copy = _copy_of(worker, self.dsn, record, queues={self.name: 1}, consumer=self.consumer)
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


def _copy_of(worker: W, dsn: str, *before: Callable[[Message], object], **settings: Any) -> W:
    """Return a worker with the settings, handlers and hooks of another, and hooks before those."""
    copy: W = worker._made(dsn, **{**worker._settings(), **settings}, concurrency=worker.concurrency)
    copy._middleware.add_all({"before": before})
    copy._handlers.add_all(worker._handlers)
    copy._middleware.add_all(worker._middleware.hooks)
    return copy


class CallOptions(TypedDict, total=False):
    """The options of `call`."""

    worker: Runtime | AsyncRuntime | None
    type: str | None
    headers: Mapping[str, object] | None
    key: str | None
    retry_count: int
    conn: object


@overload
def call(
    handler: Callable[..., object], payload: Payload, **options: Unpack[CallOptions]
) -> MessageOutcome: ...


@overload
def call(
    handler: Callable[..., object], *, payloads: Sequence[Payload], **options: Unpack[CallOptions]
) -> list[MessageOutcome]: ...


def call(
    handler: Callable[..., object],
    payload: Payload = None,
    *,
    payloads: Sequence[Payload] | None = None,
    **options: Unpack[CallOptions],
) -> MessageOutcome | list[MessageOutcome]:
    """Call a handler with a payload as its worker would, without a server, and return the outcome.

    The payload is encoded and decoded as if it had been sent. Hooks, `retry_on`, `dead_on` and `backoff`
    count; time limits do not. An outcome has an `action` ("ack", "archive", "nack", "dead" or "release"), a
    `retry_after` (a timedelta; None is as the queue has it) and a `reason`. The error of a handler is logged
    with its traceback, which pytest shows. In a running event loop use `call_async`.

    Args:
        handler: the function, coroutine function or task.
        payload: what is sent. A batch handler gets `payloads`, and a list of outcomes is returned.

    The options, all by name:

    - `worker`: the worker or consumer that has the handler. A task knows its own; any other function has no
      options of `handler` without it.
    - `type`: the message type; None is that of the handler.
    - `headers`, `key`: as of `send`.
    - `retry_count`: number of earlier failures; 0.
    - `conn`: the connection that a handler gets with `transactional=True`. Its writes are neither committed
      nor rolled back.

    Raises PgqueBadArgumentError if the worker does not have the handler, or the arguments do not fit it.
    """
    copy, item, more = _prepared(
        handler, [payload] if payloads is None else payloads, payloads is None, options
    )
    if isinstance(copy, AsyncRuntime):
        found = asyncio.run(_called_async(copy, item, more))
    else:
        copy._pool = ThreadPool(0, copy._handle)
        copy._handle(item, *more)
        found = _outcomes_of(copy)
    return found[0] if payloads is None else found


@overload
async def call_async(
    handler: Callable[..., object], payload: Payload, **options: Unpack[CallOptions]
) -> MessageOutcome: ...


@overload
async def call_async(
    handler: Callable[..., object], *, payloads: Sequence[Payload], **options: Unpack[CallOptions]
) -> list[MessageOutcome]: ...


async def call_async(
    handler: Callable[..., object],
    payload: Payload = None,
    *,
    payloads: Sequence[Payload] | None = None,
    **options: Unpack[CallOptions],
) -> MessageOutcome | list[MessageOutcome]:
    """Call a coroutine function in the running event loop; see `call`."""
    copy, item, more = _prepared(
        handler, [payload] if payloads is None else payloads, payloads is None, options
    )
    if not isinstance(copy, AsyncRuntime):
        raise PgqueBadArgumentError("call_async is for coroutine functions", hint="Use call.")
    found = await _called_async(copy, item, more)
    return found[0] if payloads is None else found


async def _called_async(copy: AsyncRuntime, item: Item, more: Sequence[object]) -> list[MessageOutcome]:
    copy._pool = TaskPool(0, copy._handle)
    await copy._handle(item, *more)
    return _outcomes_of(copy)


def _outcomes_of(copy: Runtime | AsyncRuntime) -> list[MessageOutcome]:
    return [outcome for _, _, outcome in copy._finished if outcome is not None]


def _prepared(
    handler: Callable[..., object], payloads: Sequence[Payload], is_one: bool, options: CallOptions
) -> tuple[Runtime | AsyncRuntime, Item, Sequence[object]]:
    """Return a worker that has the handler, what it would be given, and perhaps the connection."""
    name = getattr(handler, "__qualname__", repr(handler))
    conn = options.get("conn")
    worker = options.get("worker") or _worker_of(handler, is_one, conn is not None)
    if worker.transactional and conn is None:
        raise PgqueBadArgumentError(f"{name} needs conn=..., since its worker has transactional=True")
    if conn is not None and not worker.transactional:
        raise PgqueBadArgumentError(f"{name} gets no conn, since its worker does not have transactional=True")
    types = [each for each, its in worker._handlers.by_type.items() if its == handler]
    if not types:
        raise PgqueBadArgumentError(
            f"the worker has no handler {name}", hint="Pass the worker whose decorator the function has."
        )
    type = options.get("type") or (types[0] if types[0] != "*" else "default")
    copy = _copy_of(worker, "")
    messages = [_message(copy, number, type, each, options) for number, each in enumerate(payloads, 1)]
    found = copy._handlers.of(messages[0]) if messages else None
    if found is None or found.handler != handler:
        raise PgqueBadArgumentError(f"no message of type {type!r} goes to {name}")
    if is_one != (found.options.size is None):
        kind, argument = (
            ("batch handler", "payloads=[...]") if is_one else ("handler of one message", "payload")
        )
        raise PgqueBadArgumentError(f"{name} is a {kind}: pass {argument}")
    item = Item(Batch(messages, time.monotonic()), messages, together=not is_one)
    return copy, item, () if conn is None else (conn,)


def _worker_of(handler: Callable[..., object], is_one: bool, transactional: bool) -> Runtime | AsyncRuntime:
    """Return the worker of a task, or one that has a function as its only handler."""
    if isinstance(handler, Task) and isinstance(handler._worker, (Runtime, AsyncRuntime)):
        return handler._worker
    made = AsyncWorker if inspect.iscoroutinefunction(handler) else Worker
    worker: Any = made(queue="test", consumer="test", transactional=transactional)
    (worker.handler if is_one else worker.batch_handler)("*")(handler)
    found: Runtime | AsyncRuntime = worker
    return found


def _message(
    worker: Runtime | AsyncRuntime, number: int, type: str, payload: Payload, options: CallOptions
) -> Message:
    """Return a message as it would be received."""
    encoded, _ = encode.payload_and_cast(payload, worker.encoder)
    headers = encode.headers_json(Event(type, None, options.get("headers")), worker.encoder)
    retry_count = options.get("retry_count", 0)
    columns: dict[str, object] = {
        "msg_id": number,
        "batch_id": 1,
        "type": type,
        "payload_bytes" if isinstance(encoded, bytes) else "payload": encoded,
        "retry_count": retry_count,
        "receive_count": retry_count + 1,
        "created_at": datetime.now(timezone.utc),
        "headers": None if headers is None else parse_json(headers),
        "key": options.get("key"),
        "queue": next(iter(worker.queues)),
    }
    return worker._make_message(*[columns.get(field.name) for field in fields(Message)])


@contextmanager
def _stopped_after(worker: Runtime | AsyncRuntime, seconds: float) -> Iterator[None]:
    """Stop a worker that is not idle after some seconds, and raise TimeoutError, or KeyboardInterrupt if a
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
