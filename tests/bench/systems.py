"""The systems that are compared, each through its own public calls, behind one small interface.

What is unequal, by the defaults that each one's documentation recommends, is said in ``UNEQUAL`` and kept
with the results.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import psycopg
from psycopg.types.string import TextLoader

from pgque import Consumer, PgqueClient, PgqueQueueNotFoundError, Worker

T = TypeVar("T")
Seen = Callable[[int], None]

QUEUE = "peers"
PAD = "x" * 80


def payload(number: int) -> str:
    """Return a message of about 100 bytes that tells its number."""
    return f'{{"n": {number}, "pad": "{PAD}"}}'


def number_of(text: str) -> int:
    """Return the number of a message."""
    return int(text[6 : text.index(",")])


class System:
    """One system: how to set it up, send, take and finish. A process that works has one of its own.

    ``pace`` is roughly how often one process takes in a second, for choosing the backlog, and ``usual`` how
    many at a time if not told; ``sizes`` are what its worker can be told, none if that is not offered.
    """

    title: ClassVar[str]
    pace: ClassVar[int]
    usual: ClassVar[int] = 1
    most: ClassVar[int] = 200_000
    sizes: ClassVar[tuple[int, ...]] = ()
    schema: ClassVar[str]

    def __init__(self, dsn: str, consumers: Sequence[str] = ("c0",)) -> None:
        self.dsn = dsn
        self.consumers = tuple(consumers)

    def set_up(self, *, notify: bool = False) -> None:
        """Make the system's tables anew, for these consumers; ``notify`` if somebody waits for single
        messages."""

    def clear(self) -> None:
        """Remove the system's tables."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(f"drop schema if exists {self.schema} cascade")

    def open(self) -> None:
        """Connect, to send."""

    def close(self) -> None:
        """Disconnect."""

    def send(self, text: str) -> None:
        """Send a message to the only consumer, durably."""

    def send_many(self, texts: list[str]) -> None:
        """Send messages to all consumers in one call, durably."""

    def work(self, size: int | None, seen: Seen) -> None:
        """Take messages, at most ``size`` at a time, tell their numbers, and finish them, until ``stop``."""

    def stop(self) -> None:
        """End ``work`` soon. Called from another thread, perhaps more than once, perhaps before it began."""


class Pgque(System):
    """pgque with plain consumers: one log, a cursor for each."""

    title = "pgque"
    pace = 900
    usual = 100
    most = 600_000
    sizes: ClassVar[tuple[int, ...]] = (1, 10, 100)

    def __init__(self, dsn: str, consumers: Sequence[str] = ("c0",)) -> None:
        super().__init__(dsn, consumers)
        self._running: list[Any] = []
        self._errors: list[BaseException] = []

    def set_up(self, *, notify: bool = False) -> None:
        self.clear()
        with PgqueClient.connect(self.dsn, autocommit=True) as client:
            client.admin.create_queue(QUEUE)
            for consumer in self.consumers:
                client.subscribe(QUEUE, consumer)

    def clear(self) -> None:
        with PgqueClient.connect(self.dsn, autocommit=True) as client, suppress(PgqueQueueNotFoundError):
            client.admin.drop_queue(QUEUE, force=True)

    def open(self) -> None:
        self.client = PgqueClient.connect(self.dsn, autocommit=True)

    def close(self) -> None:
        self.client.close()

    def send(self, text: str) -> None:
        self.client.send(QUEUE, text)

    def send_many(self, texts: list[str]) -> None:
        self.client.send_batch(QUEUE, "default", texts)

    def _worker(self, consumer: str, size: int | None, seen: Seen) -> Callable[[], None]:
        runner = Consumer(self.dsn, queue=QUEUE, name=consumer, max_messages=size or self.usual)
        runner.on("*")(lambda message: seen(number_of(message.payload or "")))
        self._running.append(runner)
        return runner.start

    def work(self, size: int | None, seen: Seen) -> None:
        def guarded(run: Callable[[], None]) -> None:
            try:
                run()
            except BaseException as error:
                self._errors.append(error)

        runs = [self._worker(consumer, size, seen) for consumer in self.consumers]
        threads = [threading.Thread(target=guarded, args=(run,)) for run in runs[1:]]
        for thread in threads:
            thread.start()
        runs[0]()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        for runner in self._running:
            runner.stop()


class PgqueWorkers(Pgque):
    """pgque with the workers of one consumer: leases, retries, several handlers at a time."""

    title = "pgque workers"
    pace = 700
    usual = 50
    sizes = ()

    def _worker(self, consumer: str, size: int | None, seen: Seen) -> Callable[[], None]:
        runner = Worker(self.dsn, queue=QUEUE, consumer=consumer)
        runner.handler("*")(lambda message: seen(number_of(message.payload or "")))
        self._running.append(runner)
        return runner.run


class SkipLocked(System):
    """A table as people write it by hand: taken with DELETE in the transaction that does the work."""

    title = "SKIP LOCKED table"
    pace = 1800
    usual = 10
    most = 400_000
    sizes = (1, 10, 100)
    schema = "by_hand"
    DELETE = (
        "delete from by_hand.jobs j using"
        " (select s.id from by_hand.jobs s where s.queue = %s order by s.id limit {} for update skip locked) s"
        " where j.id = s.id returning j.id, j.payload"
    )

    def set_up(self, *, notify: bool = False) -> None:
        self.clear()
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("create schema by_hand")
            conn.execute(
                "create table by_hand.jobs (id bigint generated always as identity primary key,"
                " queue text not null, created_at timestamptz not null default now(), payload jsonb not null)"
            )
            conn.execute("create index on by_hand.jobs (queue, id)")
            if notify:
                conn.execute(
                    "create function by_hand.tell() returns trigger language plpgsql as"
                    " $$ begin notify by_hand; return null; end $$"
                )
                conn.execute(
                    "create trigger tell after insert on by_hand.jobs"
                    " for each statement execute function by_hand.tell()"
                )

    def open(self) -> None:
        self.conn = psycopg.connect(self.dsn, autocommit=True)

    def close(self) -> None:
        self.conn.close()

    def send(self, text: str) -> None:
        self.conn.execute(
            "insert into by_hand.jobs (queue, payload) values (%s, %s)", (self.consumers[0], text)
        )

    def send_many(self, texts: list[str]) -> None:
        self.conn.execute(
            "insert into by_hand.jobs (queue, payload)"
            " select c, p::jsonb from unnest(%s::text[]) p, unnest(%s::text[]) c",
            (texts, list(self.consumers)),
        )

    def __init__(self, dsn: str, consumers: Sequence[str] = ("c0",)) -> None:
        super().__init__(dsn, consumers)
        self._over = threading.Event()

    def work(self, size: int | None, seen: Seen) -> None:
        delete = self.DELETE.format(size or self.usual).encode()
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.adapters.register_loader("jsonb", TextLoader)
            conn.execute("listen by_hand")
            while not self._over.is_set():
                came = 0
                for consumer in self.consumers:
                    with conn.transaction():
                        for _, text in conn.execute(delete, (consumer,)).fetchall():
                            came += 1
                            seen(number_of(text))
                if not came:
                    for _ in conn.notifies(timeout=0.1, stop_after=1):
                        pass

    def stop(self) -> None:
        self._over.set()


class Asynchronous(System):
    """A system that wants an event loop."""

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Made by what needs it first: who only clears a system has none of its packages."""
        return asyncio.new_event_loop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine."""
        return self.loop.run_until_complete(coroutine)


class Pgqueuer(Asynchronous):
    """pgqueuer over asyncpg, in the event loop that its own program uses."""

    title = "pgqueuer"
    pace = 500
    usual = 10
    sizes = (1, 10, 100)
    schema = "pgqueuer"

    def __init__(self, dsn: str, consumers: Sequence[str] = ("c0",)) -> None:
        super().__init__(dsn, consumers)
        self.pgq: Any = None

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop

    async def _connect(self) -> Any:
        import asyncpg

        parts = psycopg.conninfo.conninfo_to_dict(self.dsn)
        return await asyncpg.connect(
            host=parts.get("host"),
            port=parts.get("port"),
            user=parts.get("user"),
            password=parts.get("password"),
            database=parts.get("dbname"),
            server_settings={"search_path": self.schema},
        )

    def set_up(self, *, notify: bool = False) -> None:
        self.clear()
        self.open()
        self.run(self.connection.execute(f"create schema {self.schema}"))
        self.run(self.queries.install())
        self.close()

    def open(self) -> None:
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        self.connection = self.run(self._connect())
        self.queries = Queries(AsyncpgDriver(self.connection))

    def close(self) -> None:
        self.run(self.connection.close())

    def send(self, text: str) -> None:
        self.run(self.queries.enqueue(self.consumers[0], text.encode()))

    def send_many(self, texts: list[str]) -> None:
        rows = [(consumer, text.encode()) for text in texts for consumer in self.consumers]
        self.run(self.queries.enqueue([c for c, _ in rows], [p for _, p in rows], [0] * len(rows)))

    def work(self, size: int | None, seen: Seen) -> None:
        from pgqueuer import PgQueuer
        from pgqueuer.db import AsyncpgDriver

        async def take() -> None:
            connection = await self._connect()
            pgq = self.pgq = PgQueuer(AsyncpgDriver(connection))

            async def process(job: Any) -> None:
                seen(number_of(job.payload.decode()))

            for consumer in self.consumers:
                pgq.entrypoint(consumer)(process)
            try:
                await (pgq.run() if size is None else pgq.run(batch_size=size))
            finally:
                await connection.close()

        self.run(take())

    def stop(self) -> None:
        if self.pgq is not None and self.loop.is_running():
            self.loop.call_soon_threadsafe(self.pgq.shutdown.set)


class Procrastinate(Asynchronous):
    """procrastinate over psycopg, with asynchronous tasks."""

    title = "procrastinate"
    pace = 450
    most = 40_000
    schema = "procrastinate"

    def _app(self) -> Any:
        import procrastinate

        app = procrastinate.App(
            connector=procrastinate.PsycopgConnector(
                conninfo=psycopg.conninfo.make_conninfo(self.dsn, options=f"-csearch_path={self.schema}"),
            )
        )

        async def take(n: int, pad: str) -> None:
            if self.seen is not None:
                self.seen(n)

        self.take = app.task(name="take")(take)
        return app

    def __init__(self, dsn: str, consumers: Sequence[str] = ("c0",)) -> None:
        super().__init__(dsn, consumers)
        self.seen: Seen | None = None
        self.task: asyncio.Future[None] | None = None

    def set_up(self, *, notify: bool = False) -> None:
        self.clear()
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(f"create schema {self.schema}")
        self.open()
        self.run(self.app.schema_manager.apply_schema_async())
        self.close()

    def open(self) -> None:
        self.app = self._app()
        self.run(self.app.open_async())
        self.queues = {c: self.take.configure(queue=c) for c in self.consumers}

    def close(self) -> None:
        self.run(self.app.close_async())

    def send(self, text: str) -> None:
        self.run(self.queues[self.consumers[0]].defer_async(n=number_of(text), pad=PAD))

    def send_many(self, texts: list[str]) -> None:
        jobs = [{"n": number_of(text), "pad": PAD} for text in texts]
        for queue in self.queues.values():
            self.run(queue.batch_defer_async(*jobs))

    def work(self, size: int | None, seen: Seen) -> None:
        self.seen = seen

        async def take() -> None:
            async with self._app().open_async() as app:
                worker = app.run_worker_async(queues=list(self.consumers), install_signal_handlers=False)
                self.task = task = asyncio.ensure_future(worker)
                with suppress(asyncio.CancelledError):
                    await task

        self.run(take())

    def stop(self) -> None:
        task, self.task = self.task, None  # a second cancel would not wait for the job in hand
        if task is not None and self.loop.is_running():
            self.loop.call_soon_threadsafe(task.cancel)


SYSTEMS: dict[str, type[System]] = {
    "pgque": Pgque,
    "pgque workers": PgqueWorkers,
    "by hand": SkipLocked,
    "pgqueuer": Pgqueuer,
    "procrastinate": Procrastinate,
}

UNEQUAL = (
    "all: fsync on, synchronous_commit on, logged tables, one server; handlers do nothing; a process a connection",
    "pgque: an ack is durable; a hand-out to a worker is not, as lost in a crash it is only a redelivery;"
    " done messages stay until rotation; a message is seen at the next tick; pools have 4 threads a process",
    "pools: as many at a time as each does by itself: pgque up to 100, the table and pgqueuer 10, procrastinate 1",
    "pgque consumers and fan-out: one row for all consumers; the others write one for each of them",
    "SKIP LOCKED table: no retries, leases or results; the delete commits after the work; no NOTIFY but for latency",
    "pgqueuer: asynchronous driver asyncpg, where the others use psycopg; uvloop; NOTIFY on insert; a row in a"
    " log table for each change of a job's state, folded into statistics in the background; finishes in batches"
    " after the work, so many jobs of a process are in hand at once",
    "procrastinate: psycopg with a pool of 4; done jobs stay as rows with status, beside a row for each event;"
    " takes one job at a time; NOTIFY on insert",
)
