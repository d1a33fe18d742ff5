"""max_bytes: what one receive of a client, a consumer or a worker may bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import pgque
from support import threads

PAYLOADS = ["x" * size for size in (600, 600, 2000, 400, 500)]
SIZES = [1, 1, 1, 2]


@pytest.fixture
def client(conn: psycopg.Connection[tuple[Any, ...]]) -> pgque.PgqueClient:
    return pgque.PgqueClient(conn)


@pytest.fixture
def full(client: pgque.PgqueClient, queue: str, tick: Callable[[str], int | None]) -> str:
    """A queue with messages for the consumer c."""
    client.subscribe(queue, "c")
    client.send_batch(queue, "t", PAYLOADS)
    tick(queue)
    return queue


@pytest.mark.parametrize("limit", [1000, None, "default"])
@pytest.mark.parametrize("kind", ["consumer", "subconsumer", "worker"])
def test_a_batch_ends_before_max_bytes(
    dsn: str, client: pgque.PgqueClient, full: str, kind: str, limit: Any, wait_until: Callable[..., None]
) -> None:
    batches: dict[int, int] = {}
    options: dict[str, Any] = {} if limit == "default" else {"max_bytes": limit}

    def handle(message: pgque.Message) -> None:
        batches[message.batch_id] = batches.get(message.batch_id, 0) + 1

    runner: Any
    if kind == "worker":
        runner = pgque.Worker(dsn, queue=full, consumer="c", concurrency=10, use="threads", **options)
        runner.handler("*")(handle)
        run = runner.run
    else:
        if kind == "subconsumer":
            client.subscribe_subconsumer(full, "c", "s", convert_normal=True)
            options["subconsumer"] = "s"
        runner = pgque.Consumer(dsn, queue=full, name="c", **options)
        runner.on("*")(handle)
        run = runner.start
    with threads.running(run, runner.stop, 20):
        wait_until(lambda: sum(batches.values()) == len(PAYLOADS))
    assert [batches[key] for key in sorted(batches)] == (SIZES if limit == 1000 else [len(PAYLOADS)])


def test_a_client_receives_up_to_max_bytes(client: pgque.PgqueClient, full: str) -> None:
    sizes = []
    while batch := client.receive(full, "c", max_bytes=1000):
        sizes.append(len(batch))
        client.ack(batch[0].batch_id)
    assert sizes == SIZES


@pytest.mark.parametrize("cls", [pgque.Consumer, pgque.AsyncConsumer, pgque.Worker, pgque.AsyncWorker])
def test_max_bytes_below_one_is_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match="max_bytes must be at least 1"):
        cls(queue="q", consumer="c", max_bytes=0)
