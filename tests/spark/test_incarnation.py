"""Checkpoints and queues that are not what they were: created again, restored from a dump, restored twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from conftest import Role
from faults.restores import sessions_end
from faults.test_restore import program, run
from spark.conftest import tcp
from spark.test_source import Batches, Source, failure, newest_spark, payloads
from sql.helpers import Connection, forced_tick, send, subscribe, value
from support.servers import TestServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def source(spark: SparkSession, reader: Role, queue: str, scratch: Path) -> Source:
    return Source(spark, reader, queue, scratch)


@pytest.fixture(autouse=True)
def _no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def put(conn: Connection, queue: str, *texts: str) -> None:
    """Send messages, a tick for each."""
    for text in texts:
        send(conn, queue, text)
        forced_tick(conn, queue)


def create_again(conn: Connection, queue: str, *texts: str) -> None:
    """Drop a queue and create it again, with consumer c as before, and these messages."""
    with conn.transaction():
        value(conn, "select pgque.drop_queue(%s, true)", queue)
        value(conn, "select pgque.create_queue(%s)", queue)
        subscribe(conn, queue, "c")
    put(conn, queue, *texts)


def texts(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


def pending(conn: Connection, queue: str) -> int:
    found: int = value(conn, "select i.pending_events from pgque.get_consumer_info(%s, 'c') as i", queue)
    return found


def replayed(source: Source, **given: object) -> list[Any]:
    """Run a micro-batch again that failed, and then to what is there, which 4.0 and 4.1 do in another run."""
    found = payloads(source.run(source.stream(**given)))
    return found if newest_spark() else found + payloads(source.run(source.stream(**given)))


def offset_files(source: Source) -> list[Path]:
    """Return the files of a checkpoint that hold its offsets, the oldest first."""
    files = (file for file in Path(source.checkpoint, "offsets").iterdir() if file.name.isdigit())
    return sorted(files, key=lambda file: int(file.name))


def last_offset(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(offset_files(source)[-1].read_text().splitlines()[-1])
    return found


def forget_incarnations(source: Source) -> None:
    """Make of a checkpoint one of pgque 0.7.0, whose offsets have only ticks."""
    for file in offset_files(source):
        *head, last = file.read_text().splitlines()
        offset = json.loads(last)
        assert offset.pop("incarnation", None) or offset.pop("incarnations", None)
        file.write_text("\n".join([*head, json.dumps(offset)]))
        file.with_name(f".{file.name}.crc").unlink()


# --- Created again ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5, 12], ids=["fewer ticks", "as many ticks", "more ticks"])
def test_a_queue_that_was_created_again_is_not_read_on(source: Source, conn: Connection, count: int) -> None:
    put(conn, source.queue, *texts("old", 5))
    source.run(source.stream(startingAt="earliest"))
    create_again(conn, source.queue, *texts("new", count))
    told = failure(source.run, source.stream())
    assert "PgqueTickNotFoundError" in told
    assert f"queue {source.queue} was created again or loaded from a dump" in told
    assert "Start again with another checkpoint" in told
    assert pending(conn, source.queue) == count
    assert payloads(source.run(source.stream(failOnDataLoss=False))) == texts("new", count)
    put(conn, source.queue, "newest")
    assert payloads(source.run(source.stream())) == ["newest"]


def test_another_checkpoint_reads_the_queue_that_was_created_again(
    source: Source, conn: Connection, tmp_path: Path
) -> None:
    put(conn, source.queue, *texts("old", 3))
    source.run(source.stream(startingAt="earliest"))
    create_again(conn, source.queue, *texts("new", 5))
    found = source.run(source.stream(), checkpoint=str(tmp_path / "other"))
    assert payloads(found) == texts("new", 5)


@pytest.mark.parametrize("lossy", [False, True])
def test_a_query_notices_that_its_queue_is_created_again_while_it_runs(
    source: Source, conn: Connection, wait_until: Callable[..., None], lossy: bool
) -> None:
    put(conn, source.queue, *texts("old", 3))
    box: Batches = []
    query = source.start(source.stream(startingAt="earliest", failOnDataLoss=not lossy), box)
    query.processAllAvailable()
    create_again(conn, source.queue, *texts("new", 9))
    if lossy:
        wait_until(lambda: len(payloads(box)) >= 12, "the query reads the new queue", 60)
        assert payloads(box) == texts("old", 3) + texts("new", 9)
        query.processAllAvailable()
        put(conn, source.queue, "newest")
        query.processAllAvailable()
        assert payloads(box)[12:] == ["newest"]
    else:
        wait_until(lambda: not query.isActive, "the query ends", 60)
        assert f"queue {source.queue} was created again" in str(query.exception())
        assert payloads(box) == texts("old", 3)


def test_a_micro_batch_of_the_former_queue_is_not_read_again_from_the_new_one(
    source: Source, conn: Connection
) -> None:
    put(conn, source.queue, *texts("old", 3))
    source.run(source.stream(startingAt="earliest"))
    put(conn, source.queue, *texts("planned", 3))
    source.run(source.stream(), fail=1)
    create_again(conn, source.queue, *texts("new", 12))
    assert "was created again" in failure(source.run, source.stream())
    assert replayed(source, failOnDataLoss=False) == texts("new", 12)


def test_one_of_several_queues_is_created_again(
    source: Source, conn: Connection, new_queue: Callable[[], str]
) -> None:
    names = [new_queue(), new_queue()]
    both = ",".join(names)
    for name in names:
        put(conn, name, *texts("old", 3))
    source.run(source.stream(queues=both, startingAt="earliest"))
    assert set(last_offset(source)["incarnations"]) == set(names)
    create_again(conn, names[1], *texts("new", 9))
    put(conn, names[0], "next")
    assert f"queue {names[1]} was created again" in failure(source.run, source.stream(queues=both))
    found = payloads(source.run(source.stream(queues=both, failOnDataLoss=False)))
    assert sorted(found) == sorted([*texts("new", 9), "next"])


# --- Restored -----------------------------------------------------------------------------------------


@pytest.fixture
def copies(
    server: TestServer, own_dsn: str, fresh_dsn: str, reader: Role, tmp_path: Path
) -> Callable[[str], tuple[str, str]]:
    """copies(queue) dumps the database of own_dsn and restores it into itself and into another one."""

    def do(queue: str) -> tuple[str, str]:
        dump = tmp_path / "dump"
        run(program("pg_dump", server), "-Fc", "-d", own_dsn, "-f", str(dump))
        with psycopg.connect(own_dsn, autocommit=True) as conn:
            conn.execute("drop schema pgque cascade")
        for dsn in (own_dsn, fresh_dsn):
            run(program("pg_restore", server), "--exit-on-error", "-d", dsn, str(dump))
            sessions_end(dsn)
        return tcp(server, own_dsn), tcp(server, fresh_dsn)

    return do


def test_two_queues_restored_from_one_dump_are_not_one_to_a_checkpoint(
    spark: SparkSession, scratch: Path, own_dsn: str, copies: Callable[[str], tuple[str, str]]
) -> None:
    with psycopg.connect(own_dsn, autocommit=True) as conn:
        value(conn, "select pgque.create_queue('q')")
        subscribe(conn, "q", "c")
        put(conn, "q", *texts("old", 3))

    def of(dsn: str) -> Source:
        return Source(spark, Role("", dsn), "q", scratch)

    source = of(own_dsn)
    assert payloads(source.run(source.stream())) == texts("old", 3)
    before = source.checkpoint
    first, second = (of(dsn) for dsn in copies("q"))
    for one, prefix in ((first, "first"), (second, "second")):
        with psycopg.connect(one.role.dsn, autocommit=True) as conn:
            value(conn, "select pgque.ticker()")
            put(conn, "q", *texts(prefix, 5 if prefix == "first" else 9))
    # The checkpoint from before the dump fits neither, and the consumer lacks nothing.
    told = failure(first.run, first.stream(), checkpoint=before)
    assert "queue q was created again or loaded from a dump" in told
    assert payloads(first.run(first.stream()))[-5:] == texts("first", 5)
    told = failure(second.run, second.stream(), checkpoint=first.checkpoint)
    assert "queue q was created again or loaded from a dump" in told
    assert payloads(second.run(second.stream()))[-9:] == texts("second", 9)


# --- Checkpoints of pgque 0.7.0 -----------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
def test_a_checkpoint_without_incarnations_goes_on_and_gets_them(
    source: Source, conn: Connection, several: bool
) -> None:
    how = {"queues": source.queue} if several else {}
    put(conn, source.queue, *texts("old", 3))
    source.run(source.stream(startingAt="earliest", **how))
    forget_incarnations(source)
    assert payloads(source.run(source.stream(**how))) == []
    assert ("incarnations" if several else "incarnation") in last_offset(source)
    files = len(offset_files(source))
    assert payloads(source.run(source.stream(**how))) == []
    assert len(offset_files(source)) == files
    put(conn, source.queue, "next")
    assert payloads(source.run(source.stream(**how))) == ["next"]
    create_again(conn, source.queue, *texts("new", 12))
    assert "was created again" in failure(source.run, source.stream(**how))


def test_a_checkpoint_without_incarnations_is_read_on_with_what_is_new(
    source: Source, conn: Connection
) -> None:
    put(conn, source.queue, *texts("old", 3))
    source.run(source.stream(startingAt="earliest"))
    put(conn, source.queue, *texts("failed", 3))
    source.run(source.stream(), fail=1)
    forget_incarnations(source)
    put(conn, source.queue, "next")
    assert replayed(source) == [*texts("failed", 3), "next"]


def test_a_checkpoint_without_incarnations_is_refused_beyond_the_newest_tick(
    source: Source, conn: Connection
) -> None:
    put(conn, source.queue, *texts("old", 9))
    source.run(source.stream(startingAt="earliest"))
    forget_incarnations(source)
    create_again(conn, source.queue, *texts("new", 3))
    told = failure(source.run, source.stream())
    assert f"tick not found: 10 of queue {source.queue}, whose newest tick is 4" in told
