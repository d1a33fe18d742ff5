"""Send in the transaction of Django: atomic, savepoints, on_commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, IntegrityError, transaction
from django.db.transaction import TransactionManagementError

import pgque
from support.connections import Abandoned, django_database

Tick = Callable[[str], int | None]


@pytest.fixture
def connection(dsn: str) -> Iterator[Any]:
    """Django's connection to the test database, in autocommit as Django has it."""
    found = django_database("django", dsn)
    yield found
    found.close()


@pytest.fixture
def sent(dsn: str, queue: str, tick: Tick) -> Callable[[], list[str | None]]:
    """sent() returns the payloads that were committed."""
    with pgque.connect(dsn) as client:
        client.subscribe(queue, "c")

    def sent() -> list[str | None]:
        tick(queue)
        with pgque.connect(dsn) as client:
            return [m.payload for m in client.peek(queue, 100, consumer="c")]

    return sent


def atomic(**options: Any) -> Any:
    return transaction.atomic(using="django", **options)


def test_in_autocommit_each_call_is_committed(
    connection: Any, queue: str, sent: Callable[[], list[str | None]]
) -> None:
    pgque.send(connection, queue, "a")
    pgque.send("django", queue, "b")
    assert sent() == ["a", "b"]
    assert connection.get_autocommit()


def test_atomic_blocks_take_their_messages_with_them(
    connection: Any, queue: str, sent: Callable[[], list[str | None]]
) -> None:
    with pytest.raises(Abandoned), atomic():
        pgque.send(connection, queue, "gone")
        raise Abandoned
    with atomic():
        pgque.send(connection, queue, "outer")
        with pytest.raises(Abandoned), atomic():
            pgque.send(connection, queue, "inner")
            raise Abandoned
        assert sent() == []
    assert sent() == ["outer"]


def test_on_commit_sends_after_the_commit_only(
    connection: Any, queue: str, sent: Callable[[], list[str | None]]
) -> None:
    def later(payload: str) -> None:
        transaction.on_commit(lambda: pgque.send(connection, queue, payload) and None, using="django")

    with atomic():
        later("kept")
        with pytest.raises(Abandoned), atomic():
            later("gone")
            raise Abandoned
        assert sent() == []
    assert sent() == ["kept"]


def test_an_error_breaks_the_block_as_any_statement_does(
    connection: Any, queue: str, sent: Callable[[], list[str | None]]
) -> None:
    with pytest.raises(pgque.PgqueQueueNotFoundError), atomic():
        pgque.send(connection, queue, "gone")
        pgque.send(connection, "no such queue", "x")
    with atomic():
        with pytest.raises(pgque.PgqueQueueNotFoundError), atomic():
            pgque.send(connection, "no such queue", "x")
        pgque.send(connection, queue, "kept")
    assert sent() == ["kept"]


def test_a_block_that_django_will_roll_back_refuses_the_call(connection: Any, queue: str) -> None:
    with atomic():
        with pytest.raises(IntegrityError), atomic(savepoint=False), connection.cursor() as cursor:
            cursor.execute("do $$ begin raise unique_violation; end $$")
        with pytest.raises(pgque.PgqueError, match="atomic") as caught:
            pgque.send(connection, queue, "x")
        assert isinstance(caught.value.__cause__, TransactionManagementError)


def test_the_names_of_django_itself_are_taken(
    connection: Any, queue: str, sent: Callable[[], list[str | None]]
) -> None:
    from django.db import connections
    from django.utils.connection import ConnectionProxy

    pgque.send(ConnectionProxy(connections, "django"), queue, "proxy")
    with connection.cursor() as cursor:
        pgque.send(cursor, queue, "cursor")
    assert sent() == ["proxy", "cursor"]


def test_a_database_that_pgque_cannot_use_is_named(connection: Any) -> None:
    from django.core.cache import cache
    from django.db import connections

    connections.databases["lite"] = {
        **connections.databases["django"],
        "ENGINE": "django.db.backends.sqlite3",
    }
    connections.databases["lite"]["NAME"] = ":memory:"
    with pytest.raises(pgque.PgqueBadArgumentError, match="'lite' is sqlite"):
        pgque.send("lite", "q", "x")
    with pytest.raises(
        pgque.PgqueBadArgumentError, match=r"one of Django's databases, which are .*django.*pgque.connect"
    ):
        pgque.send("dbname=x password=secret", "q", "x")
    with pytest.raises(TypeError, match="is no connection"):
        pgque.send(cache, "q", "x")


def test_statements_are_in_the_log_of_queries(connection: Any, queue: str) -> None:
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as queries:
        pgque.send(connection, queue, {"n": 1}, ttl=60)
    [statement] = queries.captured_queries
    assert "pgque.send(" in statement["sql"]


def test_in_an_event_loop_django_raises_its_own_error(connection: Any, queue: str) -> None:
    import asyncio

    async def call() -> None:
        pgque.send(connection, queue, "x")

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(call())
    with pytest.raises(TypeError, match="has no _async"):
        asyncio.run(pgque.send_async(connection, queue, "x"))


def test_errors_come_from_those_of_django(connection: Any) -> None:
    with pytest.raises(pgque.PgqueQueueNotFoundError) as caught:
        pgque.send(connection, "no such queue", "x")
    assert isinstance(caught.value.__cause__, DatabaseError)
    assert (caught.value.sqlstate, caught.value.queue) == ("PQ001", "no such queue")
