"""The queries and changes of `pgque top`, on one connection, which is opened again after it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import psycopg
from psycopg.rows import dict_row

from ..client.client import AsyncPgqueClient
from ..client.connection import open_client
from ..client.limit import END_WHEN_SILENT
from ..errors import PgqueConnectionError, PgqueError, from_psycopg
from ..ops.overview import (
    MOST,
    MOST_READERS,
    OVERVIEW_QUERY,
    QUEUES_QUERY,
    READERS_QUERY,
    ROLE_QUERY,
    SLOW,
    WORKERS_QUERY,
    Figures,
    History,
    Row,
    read,
)

if TYPE_CHECKING:
    from typing_extensions import LiteralString

T = TypeVar("T")

# The settings of one transaction. A setting of the session would stay with a pooler's session, where it would
# refuse other clients' sends.
SETTINGS_QUERY: LiteralString = (
    f"select {END_WHEN_SILENT}, pg_catalog.set_config('statement_timeout', %(timeout)s, true),"
    " case when %(only)s then pg_catalog.set_config('transaction_read_only', 'on', true) end"
)
# A requeue by reason takes the dead letters of all consumers, so their counts are added up.
REASONS_QUERY: LiteralString = (
    "select r.reason, sum(r.dead_letters)::bigint as count, pgque.clock() - max(r.newest) as age,"
    " string_agg(r.consumer_name, ', ' order by r.consumer_name) as consumers"
    " from pgque.dlq_reasons(%(queue)s) as r group by r.reason order by 2 desc, 1 limit %(most)s"
)

NAME = "pgque top"  # as pg_stat_activity shows it
TIMEOUT = "10s"  # of every statement
SLICE = 1000  # dead letters that one statement requeues
CLOSED_WITHIN = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Overview:
    """The problems, and all queues that the role may see."""

    problems: Sequence[Row] = ()
    queues: Mapping[str, Figures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Opened:
    """The details of an open queue; an error stands in place of rows that could not be read."""

    queue: str
    consumers: list[Row] | PgqueError
    workers: list[Row] | PgqueError
    reasons: list[Row] | PgqueError


class Source:
    """Ask the database, one question at a time. Every method raises PgqueError.

    A connection that was lost is opened again by the next question.
    """

    def __init__(self, dsn: str, read_only: bool = False) -> None:
        self._dsn = dsn
        self._read_only = read_only
        self._client: AsyncPgqueClient | None = None
        self._turn = asyncio.Lock()
        self._history = History()
        self._running: set[asyncio.Task[object]] = set()
        self.role: Row = {}
        self.place = ""

    @property
    def writable(self) -> bool:
        """Return True if changes are possible: neither the program nor the server is read only."""
        return not (self._read_only or self.role.get("standby"))

    @property
    def connected(self) -> bool:
        """Return True if there is a connection that is not known to be lost."""
        return self._client is not None and not self._client.conn.closed

    async def connect(self) -> None:
        """Open the connection. Raises PgqueConnectionError, and PgqueVersionError without pgque."""
        await self._ask(lambda client: asyncio.sleep(0))

    async def overview(self) -> Overview:
        """Return problems and queues: what the first page of `pgque web` shows."""
        return await self._ask(self._overview)

    async def queue(self, name: str) -> Opened:
        """Return the consumers, workers and dead letters of a queue."""
        return await self._ask(lambda client: self._queue(client, name))

    async def reasons(self, queue: str) -> list[Row]:
        """Return why the dead letters of a queue were given up, the most frequent reason first."""
        return await self._ask(lambda client: _rows(client, REASONS_QUERY, _of(queue)))

    async def pause(self, queue: str, paused: bool) -> None:
        """Close a queue for senders, or open it again."""
        await self._change(lambda client: client.admin.pause(queue) if paused else client.admin.resume(queue))

    async def reclaim(self, queue: str, consumer: str) -> int:
        """Release the batches of a consumer's workers, and return their number."""
        return await self._change(lambda client: client.consumers.reclaim(queue, consumer))

    async def requeue(
        self, queue: str, count: int, reason: str | None, progress: Callable[[int], object]
    ) -> int:
        """Requeue the oldest dead letters of a queue, at most `count`, and return how many were.

        `reason` is one of `reasons`; None stands for all. `progress` is called after each statement.
        """
        done = 0
        while done < count:
            most = min(SLICE, count - done)
            moved = await self._change(partial(_requeue, queue=queue, most=most, reason=reason))
            done += moved
            progress(done)
            if moved < most:
                break
        return done

    async def close(self) -> None:
        """End what is running and close the connection, but do not wait long for a database that is gone."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=CLOSED_WITHIN)
        if self._client is not None:
            await self._client.close()

    # -- one question --------------------------------------------------------------

    async def _ask(self, question: Callable[[AsyncPgqueClient], Awaitable[T]]) -> T:
        """Return the answer. A caller that stops waiting does not cancel the question; `close` does."""

        async def answered() -> T:
            async with self._turn:
                client = await self._connected()
                try:
                    return await question(client)
                except psycopg.Error as error:
                    raise from_psycopg(error) from error
                except PgqueConnectionError:
                    await self._forget()
                    raise
                finally:
                    if client.conn.closed:
                        self._client = None

        task = asyncio.create_task(answered())
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _change(self, change: Callable[[AsyncPgqueClient], Awaitable[T]]) -> T:
        """Return what a change returns. The change fails if nothing may be changed."""

        async def changed(client: AsyncPgqueClient) -> T:
            async with _settings(client, self._read_only):
                return await change(client)

        return await self._ask(changed)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to hear of it

    async def _connected(self) -> AsyncPgqueClient:
        if self._client is None:
            client = await open_client(self._dsn, NAME)
            try:
                self.role = (await _rows(client, ROLE_QUERY))[0]
            except psycopg.Error as error:
                await client.close()
                raise from_psycopg(error) from error
            except BaseException:
                await client.close()
                raise
            info = client.conn.info
            host = info.host if info.host and not info.host.startswith("/") else "localhost"  # a socket
            self.place = f"{info.dbname} at {host}:{info.port}"
            self._client = client
        return self._client

    async def _forget(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(psycopg.Error):
                await client.close()

    # -- what is asked -------------------------------------------------------------

    async def _overview(self, client: AsyncPgqueClient) -> Overview:
        rows = await _in_time(client, OVERVIEW_QUERY, MOST)
        if rows is None:
            _, queues = read(await _rows(client, QUEUES_QUERY, MOST))
            problems = [SLOW]
        else:
            problems, queues = read(rows)
        self._history.note(queues.values())
        return Overview(problems, queues)

    async def _queue(self, client: AsyncPgqueClient, name: str) -> Opened:
        return Opened(
            name,
            await _or_error(client, READERS_QUERY, name),
            await _or_error(client, WORKERS_QUERY, name),
            await _or_error(client, REASONS_QUERY, name),
        )


@asynccontextmanager
async def _settings(client: AsyncPgqueClient, read_only: bool) -> AsyncIterator[None]:
    """Run the block as a transaction whose statements end after a timeout, and which may be read only."""
    async with client.conn.transaction():
        await client.conn.execute(SETTINGS_QUERY, {"timeout": TIMEOUT, "only": read_only})
        yield


async def _rows(
    client: AsyncPgqueClient, query: LiteralString, parameters: Mapping[str, object] | None = None
) -> list[Row]:
    """Return the rows of a query, which changes nothing."""
    async with _settings(client, True), client.conn.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(query, parameters)
        return await cursor.fetchall()


async def _in_time(
    client: AsyncPgqueClient, query: LiteralString, parameters: Mapping[str, object]
) -> list[Row] | None:
    """Return rows, or None if the database took too long: the rest is shown all the same."""
    try:
        return await _rows(client, query, parameters)
    except psycopg.errors.QueryCanceled:
        return None


async def _requeue(client: AsyncPgqueClient, queue: str, most: int, reason: str | None) -> int:
    return await client.dlq.requeue_all(queue, most, reason)


async def _or_error(client: AsyncPgqueClient, query: LiteralString, queue: str) -> list[Row] | PgqueError:
    """Return rows, or the error of a database that still answers."""
    try:
        return await _rows(client, query, _of(queue))
    except psycopg.Error as error:
        found = from_psycopg(error, queue)
        if isinstance(found, PgqueConnectionError):
            raise found from error
        return found


def _of(queue: str) -> Mapping[str, object]:
    return {"queue": queue, "most": MOST_READERS}
