"""Several servers as one stream, and as one sink: what is sent arrives once, whichever of them dies."""

from __future__ import annotations

import json
import logging
import random
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgque import embedded
from pgque.errors import (
    PgqueBadArgumentError,
    PgqueConnectionError,
    PgqueError,
    PgqueSinkEpochError,
    PgqueTickNotFoundError,
)
from pgque.spark.options import BATCH_WRITE, STREAM_READ, STREAM_WRITE, parse
from sql.helpers import Connection, configure, forced_tick, leaf, receive, rows, subscribe, value
from support import servers as support

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from pgque.spark._servers import PgqueServersReader
    from pgque.spark.sink import PgqueWriter

SPARK_CONF = {"spark.master": "local[2,3]"}  # a failed task is run again
PASSWORD = secrets.token_hex(8)


@dataclass
class Farm:
    """Three servers with a database app, and a queue on each."""

    servers: list[embedded.Server]
    queue: str = ""
    target: str = ""
    conns: list[Connection] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)

    def name(self, number: int) -> str:
        """Return the name of a server."""
        return f"127.0.0.1:{self.servers[number].port}/app"

    def names(self, *numbers: int) -> str:
        """Return option servers: of all if none is given."""
        return ",".join(self.name(number) for number in numbers or range(len(self.servers)))

    def connect(self, number: int) -> Connection:
        """Open a session of an administrator."""
        return psycopg.connect(self.servers[number].dsn_for("app"), autocommit=True)

    def again(self, number: int) -> None:
        """Start a server that was killed."""
        self.servers[number].restart()
        self.conns[number].close()
        self.conns[number] = self.connect(number)

    def options(self, *numbers: int, **more: str) -> dict[str, str]:
        """Return Spark's options."""
        return {"servers": self.names(*numbers), "user": "spark", "password": PASSWORD, **more}

    def put(self, number: int, *payloads: str) -> None:
        """Send to the queue of a server, and tick."""
        value(
            self.conns[number],
            "select pgque.send_batch(%s, 'default', %s::text[])",
            self.queue,
            list(payloads),
        )
        forced_tick(self.conns[number], self.queue)

    def take(self, number: int) -> Counter[str | None]:
        """Receive all that the target on a server got."""
        forced_tick(self.conns[number], self.target)
        got: Counter[str | None] = Counter()
        while batch := receive(self.conns[number], self.target, "check", 5_000):
            got.update(m.payload for m in batch)
            value(self.conns[number], "select pgque.ack(%s)", batch[0].batch_id)
        return got

    def reader(self, *numbers: int, **more: str) -> PgqueServersReader:
        """Return what Spark makes for a stream of servers."""
        from pyspark.sql.types import LongType, StringType, StructField, StructType

        from pgque.spark.datasource import PgqueDataSource

        given = {"columns": "server,msg_id,payload", "startingAt": "earliest", "numPartitions": "2"}
        given |= self.options(*numbers, queue=self.queue, consumer="job", pollIntervalMs="0", **more)
        names = given["columns"].split(",")
        schema = StructType(
            [StructField(name, LongType() if name == "msg_id" else StringType()) for name in names]
        )
        reader = PgqueDataSource({k: v for k, v in given.items() if v}).streamReader(schema)
        self._open.callback(reader.stop)
        return reader

    def lose(self, number: int, how: str) -> None:
        """Take from a stream what it reads on a server; "messages" leaves it as it is."""
        if how == "away":
            self.servers[number].kill()
        elif how == "dropped":
            value(self.conns[number], "select pgque.drop_queue(%s, true)", self.queue)
        elif how == "unsubscribed":
            value(self.conns[number], "select pgque.unsubscribe(%s, 'job')", self.queue)

    def writer(self, *numbers: int, epoch: int | None = 0, **more: str) -> PgqueWriter:
        """Return what Spark makes for a write of key and payload."""
        from pyspark.sql.types import StringType, StructField, StructType

        from pgque.spark.datasource import PgqueDataSource

        given = {"queue": self.target, "sinkId": self.target, "epoch": "" if epoch is None else str(epoch)}
        given |= {} if "host" in more else self.options(*numbers)
        schema = StructType([StructField("key", StringType()), StructField("payload", StringType())])
        given |= more
        return PgqueDataSource({k: v for k, v in given.items() if v}).writer(schema, False)

    def batch(self, **more: str) -> Counter[str]:
        """Read the queues once."""
        from pyspark.sql.types import StringType, StructField, StructType

        from pgque.spark.datasource import PgqueDataSource

        given = {**self.options(queue=self.queue), "columns": "payload", **more}
        schema = StructType([StructField("payload", StringType())])
        reader = PgqueDataSource(given).reader(schema)
        found: Counter[str] = Counter()
        for task in reader.partitions():
            for batch in reader.read(task):
                found.update(batch.column("payload").to_pylist())
        return found

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        for conn in self.conns:
            conn.close()


@pytest.fixture(scope="module")
def three() -> Iterator[list[embedded.Server]]:
    """Three servers, each with a database app and the role of the job."""
    settings = {**support.TEST_SETTINGS, "shared_buffers": "32MB", "max_connections": "60"}
    with ExitStack() as stack:
        found = []
        for _ in range(3):
            try:
                server = stack.enter_context(embedded.start(settings=settings))
            except embedded.EmbeddedServerError as error:
                pytest.skip(f"no servers of its own: {error}")
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("create database app")
            with psycopg.connect(server.dsn_for("app"), autocommit=True) as conn:
                conn.execute(support.SQL_FILE.read_bytes())
                conn.execute(f"create role spark login password '{PASSWORD}'".encode())
                conn.execute("grant pgque_reader, pgque_writer to spark")
            found.append(server)
        yield sorted(found, key=lambda server: str(server.port))


@pytest.fixture
def farm(three: list[embedded.Server]) -> Iterator[Farm]:
    """The servers, with a queue and a target of the test's own on each; a consumer check of the target."""
    unique = secrets.token_hex(4)
    with Farm(three, f"source_{unique}", f"target_{unique}") as found:
        for number, server in enumerate(three):
            if server.pid is None:
                server.restart()
            found.conns.append(found.connect(number))
            for queue in (found.queue, found.target):
                value(found.conns[number], "select pgque.create_queue(%s)", queue)
            value(found.conns[number], "select pgque.subscribe(%s, 'check')", found.target)
        yield found


def frame(*payloads: str, keys: Sequence[str | None] | None = None) -> Any:
    """Return rows as a task gets them."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays(
        [pa.array(keys or payloads, pa.string()), pa.array(payloads, pa.string())], names=["key", "payload"]
    )


def texts(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{n}" for n in range(count)]


def read(reader: PgqueServersReader, start: Any, end: Any) -> Counter[str]:
    """Read what lies between two offsets, as Spark's tasks do."""
    found: Counter[str] = Counter()
    for task in reader.partitions(start, end):
        for batch in reader.read(task):
            found.update(batch.column("payload").to_pylist())
    return found


def step(reader: PgqueServersReader, start: Any) -> tuple[Any, Counter[str]]:
    """Do a micro-batch; return where it ended, and what it read."""
    end = reader.latestOffset(start)
    return end, read(reader, start, end)


def ticks(offset: Any) -> dict[str, dict[str, int]]:
    return {server: found["ticks"] for server, found in offset["servers"].items()}


# --- Options ------------------------------------------------------------------------------------------

STREAM = {"queue": "q", "consumer": "c"}


def refused(given: dict[str, str], mode: str) -> str:
    with pytest.raises(PgqueBadArgumentError) as caught:
        parse(given, mode)
    return str(caught.value)


def test_a_list_of_servers_has_full_names_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPORT", raising=False)
    wanted = ("[::1]:5432/app", "db1:5432/app", "db1:6000/app", "db2:7/a%20b")
    file = tmp_path / "servers"
    file.write_text("# ours\ndb1\n\n  db2:7/a%20b\ndb1:6000\n[::1]\n")
    for given in (
        "db1,db2:7/a%20b, DB1:6000,[::1]",
        '["db1:6000", "db1", "[::1]", "db2:7/a%20b"]',
        f"@{file}",
    ):
        parsed = parse({**STREAM, "servers": given, "dbname": "app", "password": "s3cret"}, STREAM_READ)
        assert parsed.servers == wanted
    there = parsed.at("db2:7/a%20b")
    assert dict(there.connection) == {"host": "db2", "port": "7", "dbname": "a b", "password": "s3cret"}
    assert there.servers is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"servers": "db1:x"}, "'db1:x' is not host"),
        ({"servers": "u:s3cret@db1"}, "an entry is not host"),
        ({"servers": "u:s3cret@db1,,db2"}, "option servers must be names"),
        ({"servers": '["u:s3cret@db1"'}, "option servers must be names"),
        ({"servers": "db1/app?password=s3cret"}, "an entry is not host"),
        ({"servers": "host=db1 password=s3cret"}, "an entry is not host"),
        ({"servers": "db1/a/b"}, "is not host"),
        ({"servers": "db1?sslmode=require"}, "an entry is not host"),
        ({"servers": "db1,,db2"}, "option servers must be names"),
        ({"servers": "@/nowhere/at all"}, "/nowhere/at all: No such file"),
        ({"servers": "db1,db1:5432"}, "has db1:5432/app twice"),
        ({"servers": "db1", "host": "db2"}, "exclude each other"),
        ({"servers": "db1", "url": "postgresql://u:s3cret@db2/app"}, "exclude each other"),
        ({"servers": "db1", "dbname": ""}, "which database"),
        ({"servers": "db1", "startingAt": "17"}, "a tick is of one server"),
        ({"servers": "db1", "startingAt": "archive", "archiveOf": "b"}, "cannot be archive"),
        ({"columns": "server"}, "needs option servers"),
    ],
)
def test_what_is_no_list_of_servers_is_refused(
    given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGPORT", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    found = refused({**STREAM, "dbname": "app", **given}, STREAM_READ)
    assert told in found
    assert "s3cret" not in found


def test_what_a_sink_of_servers_cannot_do_is_refused() -> None:
    base = {"queue": "q", "servers": "db1,db2", "dbname": "app"}
    assert "needs delivery=at-least-once" in refused({**base, "spread": "round-robin"}, STREAM_WRITE)
    assert "give options sinkId and epoch" in refused(base, BATCH_WRITE)
    assert "spread needs option servers" in refused(
        {"queue": "q", "spread": "round-robin", "delivery": "at-least-once"}, BATCH_WRITE
    )
    assert parse({**base, "delivery": "at-least-once"}, BATCH_WRITE).spread == "key"


# --- Source -------------------------------------------------------------------------------------------


def test_a_stream_has_a_tick_of_each_server_and_numPartitions_tasks(farm: Farm) -> None:
    reader = farm.reader()
    start = reader.initialOffset()
    sent: Counter[str] = Counter()
    for number in range(3):
        farm.put(number, *texts(str(number), 30))
        sent.update(texts(str(number), 30))
    end = reader.latestOffset(start)
    assert set(ticks(end)) == {farm.name(n) for n in range(3)}
    assert end["consumer"] == "job"
    tasks = reader.partitions(start, end)
    assert len(tasks) == 2
    firsts = {task.windows[0].server for task in tasks}
    assert len(firsts) == 2, "tasks begin with different servers"
    for batch in (batch for task in tasks for batch in reader.read(task)):
        for server, payload in zip(batch.column("server"), batch.column("payload"), strict=True):
            assert server.as_py() == farm.name(int(payload.as_py()[0]))
    assert read(reader, start, end) == sent
    assert read(reader, start, end) == sent, "a replay is the same"
    figures = reader.reportLatestOffset()["servers"][farm.name(1)]["queues"][farm.queue]
    assert figures["eventsBehind"] == 0
    assert figures["replayedEpochs"] == 0


def test_a_limit_of_messages_is_shared_by_the_servers_that_have_some(farm: Farm) -> None:
    reader = farm.reader(maxEventsPerTrigger="40")
    at = reader.initialOffset()
    for number, count in ((0, 6), (1, 2)):
        for turn in range(count):
            farm.put(number, *texts(f"{number}-{turn}", 10))
    at, found = step(reader, at)
    assert Counter(text[0] for text in found) == {"0": 20, "1": 20}
    at, found = step(reader, at)
    assert Counter(text[0] for text in found) == {"0": 40}
    assert step(reader, at)[1] == Counter()


def test_a_server_that_is_away_is_named_and_the_stream_goes_on_when_it_is_back(farm: Farm) -> None:
    reader = farm.reader()
    start = reader.initialOffset()
    for number in range(3):
        farm.put(number, str(number))
    end = reader.latestOffset(start)
    tasks = reader.partitions(start, end)
    farm.servers[1].kill()
    told = f"^server {farm.name(1)}: "
    with pytest.raises(PgqueConnectionError, match=told):
        for task in tasks:
            list(reader.read(task))
    with pytest.raises(PgqueConnectionError, match=told):
        reader.latestOffset(end)
    reader.stop()
    with pytest.raises(PgqueConnectionError, match=told):
        farm.reader().initialOffset()
    farm.again(1)
    again = farm.reader()
    assert read(again, start, end) == Counter("012")
    farm.put(1, "more")
    end, found = step(again, end)
    assert found == Counter(["more"])


def test_a_server_joins_at_a_restart_where_its_consumer_stands(farm: Farm) -> None:
    value(farm.conns[2], "select pgque.subscribe(%s, 'job')", farm.queue)
    first = farm.reader(0, 1)
    start = first.initialOffset()
    for number in range(3):
        farm.put(number, f"old-{number}")
    at, found = step(first, start)
    assert found == Counter(["old-0", "old-1"])
    first.stop()
    second = farm.reader()
    end, found = step(second, at)
    assert found == Counter(["old-2"])
    second.stop()
    # Killed before it was done: planned again, also when the list has changed meanwhile.
    third = farm.reader(0)
    assert read(third, at, end) == Counter(["old-2"])
    # The second one was asked behind `at`: the first two were finished then.
    assert read(third, third.initialOffset(), end) == Counter(["old-2"])


def test_a_server_leaves_when_its_messages_are_read_and_comes_back_where_it_left(farm: Farm) -> None:
    first = farm.reader()
    at = first.initialOffset()
    for number in range(3):
        farm.put(number, f"a-{number}")
    at, found = step(first, at)
    assert len(found) == 3
    # Sent, but not in a tick yet
    value(farm.conns[2], "select pgque.send(%s, 'b-2'::text)", farm.queue)
    first.stop()
    second = farm.reader(0, 1)
    with pytest.raises(PgqueError) as caught:
        second.latestOffset(at)
    told = str(caught.value)
    assert told.startswith(f"server {farm.name(2)}: consumer job has messages to read in queue {farm.queue}")
    assert "failOnDataLoss=false" in told
    second.stop()
    third = farm.reader()
    forced_tick(farm.conns[2], farm.queue)
    at, found = step(third, at)
    assert found == Counter(["b-2"])
    third.stop()
    fourth = farm.reader(0, 1)
    farm.put(0, "c-0")
    at, found = step(fourth, at)
    assert found == Counter(["c-0"])
    assert set(ticks(at)) == {farm.name(0), farm.name(1)}
    fourth.commit(at)
    fourth.stop()
    farm.put(2, "d-2")
    fifth = farm.reader()
    assert step(fifth, at)[1] == Counter(["d-2"])


@pytest.mark.parametrize("how", ["messages", "away", "unsubscribed"])
def test_a_server_can_be_left_behind_on_purpose(
    farm: Farm, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = farm.reader()
    at = first.initialOffset()
    farm.put(2, "a", "b")
    first.stop()
    farm.lose(2, how)
    if how != "unsubscribed":
        with pytest.raises(PgqueError, match=f"server {farm.name(2)}: "):
            farm.reader(0, 1).latestOffset(at)
    with caplog.at_level(logging.WARNING, "pgque.spark"):
        reader = farm.reader(0, 1, failOnDataLoss="true" if how == "unsubscribed" else "false")
        assert set(ticks(reader.latestOffset(at))) == {farm.name(0), farm.name(1)}
    assert farm.name(2) in caplog.text
    if how == "unsubscribed":
        assert not rows(farm.conns[2], "select from pgque.get_consumer_info(%s)", farm.queue)


@pytest.mark.parametrize("how", ["away", "dropped", "unsubscribed"])
def test_a_lost_server_can_be_left_behind_in_the_middle_of_a_micro_batch(
    farm: Farm, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = farm.reader()
    start = first.initialOffset()
    for number in range(3):
        farm.put(number, str(number))
    end = first.latestOffset(start)
    first.stop()
    farm.lose(2, how)
    second = farm.reader(0, 1)
    with pytest.raises(PgqueError, match=f"^server {farm.name(2)}: ") as caught:
        second.partitions(start, end)
    assert "failOnDataLoss=false" in str(caught.value)
    second.stop()
    with caplog.at_level(logging.WARNING, "pgque.spark"):
        third = farm.reader(0, 1, failOnDataLoss="false")
        assert read(third, start, end) == Counter("01")
        assert set(ticks(third.latestOffset(end))) == {farm.name(0), farm.name(1)}
    assert f"server {farm.name(2)}: " in caplog.text
    if how == "unsubscribed":
        assert not rows(farm.conns[2], "select from pgque.get_consumer_info(%s)", farm.queue)


def test_a_server_that_is_away_is_no_reason_to_leave_another_one_behind(farm: Farm) -> None:
    first = farm.reader()
    at = first.initialOffset()
    first.stop()
    farm.servers[0].kill()
    with pytest.raises(PgqueConnectionError) as caught:
        farm.reader(0, 1).latestOffset(at)
    assert str(caught.value).startswith(f"server {farm.name(0)}: ")
    assert "failOnDataLoss" not in str(caught.value)


def test_a_queue_that_was_created_again_on_one_server_is_not_read_on(farm: Farm) -> None:
    for number in (0, 1):
        farm.put(number, *texts(f"old {number}", 3))
    reader = farm.reader(0, 1)
    at, _ = step(reader, reader.initialOffset())
    reader.stop()
    assert all(set(part["incarnations"]) == {farm.queue} for part in at["servers"].values())
    value(farm.conns[1], "select pgque.drop_queue(%s, true)", farm.queue)
    value(farm.conns[1], "select pgque.create_queue(%s)", farm.queue)
    subscribe(farm.conns[1], farm.queue, "job")
    for number in range(4):
        farm.put(1, f"new {number}")
    farm.put(0, "next")
    again = farm.reader(0, 1)
    with pytest.raises(PgqueTickNotFoundError) as caught:
        again.latestOffset(at)
    again.stop()
    assert f"server {farm.name(1)}: " in str(caught.value)
    assert f"queue {farm.queue} was created again" in str(caught.value)
    _, found = step(farm.reader(0, 1, failOnDataLoss="false"), at)
    assert found == Counter(["next", *(f"new {number}" for number in range(4))])


def test_a_server_whose_queue_was_created_again_does_not_leave_silently(farm: Farm) -> None:
    farm.put(1, *texts("old", 3))
    reader = farm.reader(0, 1)
    at, _ = step(reader, reader.initialOffset())
    reader.stop()
    value(farm.conns[1], "select pgque.drop_queue(%s, true)", farm.queue)
    value(farm.conns[1], "select pgque.create_queue(%s)", farm.queue)
    subscribe(farm.conns[1], farm.queue, "job")
    for number in range(4):
        farm.put(1, f"new {number}")
    # It has ticks enough for the checkpoint's to be among them.
    value(farm.conns[1], "select pgque.seek(%s, 'job', pgque.tick_for(%s, 'latest'))", farm.queue, farm.queue)
    with pytest.raises(PgqueTickNotFoundError, match="was created again"):
        farm.reader(0).latestOffset(at)


def test_offsets_of_servers_without_incarnations_go_on_and_get_them(farm: Farm) -> None:
    for number in (0, 1):
        farm.put(number, *texts(f"old {number}", 3))
    reader = farm.reader(0, 1)
    at, _ = step(reader, reader.initialOffset())
    reader.stop()
    for part in at["servers"].values():
        del part["incarnations"]
    again = farm.reader(0, 1)
    end, found = step(again, at)
    assert not found
    assert ticks(end) == ticks(at)
    assert all(set(part["incarnations"]) == {farm.queue} for part in end["servers"].values())
    assert again.latestOffset(end) == end


def test_one_database_under_two_names_is_refused(farm: Farm) -> None:
    twice = f"{farm.names(0)},localhost:{farm.servers[0].port}/app"
    for call in (
        lambda: farm.reader(0, servers=twice).initialOffset(),
        lambda: farm.writer(0, servers=twice).write(iter([frame("x")])),
        lambda: farm.batch(servers=twice),
    ):
        with pytest.raises(PgqueBadArgumentError, match="are one database with two names"):
            call()
    # And when a server has changed its name
    first = farm.reader(0)
    at = first.initialOffset()
    first.stop()
    with pytest.raises(PgqueBadArgumentError, match="are one database with two names"):
        farm.reader(0, servers=f"localhost:{farm.servers[0].port}/app").latestOffset(at)


def test_checkpoints_with_and_without_servers_do_not_replace_each_other(farm: Farm) -> None:
    reader = farm.reader()
    with pytest.raises(PgqueBadArgumentError, match="written without option servers"):
        reader.latestOffset({"consumer": "job", "queue": farm.queue, "tick": 1})
    at = reader.initialOffset()
    reader.stop()
    alone = farm.reader(
        0, servers="", columns="payload", host="127.0.0.1", port=str(farm.servers[0].port), dbname="app"
    )
    with pytest.raises(PgqueBadArgumentError, match="written with option servers"):
        alone.latestOffset(at)


def test_a_batch_reads_all_servers(farm: Farm) -> None:
    for number in range(3):
        farm.put(number, *texts(str(number), 5))
    assert farm.batch() == Counter(text for number in range(3) for text in texts(str(number), 5))
    farm.servers[2].kill()
    with pytest.raises(PgqueConnectionError, match=f"^server {farm.name(2)}: "):
        farm.batch()


# --- Sink ---------------------------------------------------------------------------------------------

PAYLOADS = texts("row", 60)


def share(
    number: int, of: Sequence[int] = (0, 1, 2), payloads: Sequence[str] = PAYLOADS
) -> Counter[str | None]:
    """Tell which rows, whose key is their payload, a server gets when these share them."""
    return Counter(p for p in payloads if of[zlib.crc32(p.encode()) % len(of)] == number)


def write(writer: PgqueWriter, *payloads: str) -> list[Any]:
    """Stage rows in two tasks; return their messages."""
    half = len(payloads) // 2
    return [writer.write(iter([frame(*part)])) for part in (payloads[:half], payloads[half:]) if part]


def test_rows_are_spread_by_the_hash_of_their_key_and_keep_their_order(farm: Farm) -> None:
    assert zlib.crc32(b"123456789") == 0xCBF43926, "for ever"
    keys = [None if n % 5 == 0 else f"k{n % 7}" for n in range(60)]
    writer = farm.writer()
    staged = [
        writer.write(iter([frame(*PAYLOADS[:25], keys=keys[:25]), frame(*PAYLOADS[25:], keys=keys[25:])]))
    ]
    writer.commit(staged)
    for number in range(3):
        wanted = [
            text
            for text, key in zip(PAYLOADS, keys, strict=True)
            if zlib.crc32((key or text).encode()) % 3 == number
        ]
        assert wanted
        forced_tick(farm.conns[number], farm.target)
        assert [m.payload for m in receive(farm.conns[number], farm.target, "check", 100)] == wanted


@pytest.mark.parametrize(
    ("how", "after"), [("killed", (0, 1, 2)), ("paused", (1,)), ("killed", (2, 0))], ids=str
)
def test_a_commit_that_fails_halfway_is_completed_by_its_replay_whatever_the_list(
    farm: Farm, how: str, after: tuple[int, ...]
) -> None:
    first = farm.writer()
    staged = write(first, *PAYLOADS)
    if how == "paused":
        value(farm.conns[1], "select pgque.pause(%s)", farm.target)
    else:
        farm.servers[1].kill()
    with pytest.raises(PgqueError, match=f"^server {farm.name(1)}: "):
        first.commit(staged)
    got = [farm.take(0), Counter(), farm.take(2)]
    assert got == [share(0), Counter(), Counter()]
    if how == "killed":
        # The stored list needs it.
        with pytest.raises(PgqueConnectionError, match=f"^server {farm.name(1)}: "):
            write(farm.writer(*after), *PAYLOADS)
        farm.again(1)
    else:
        value(farm.conns[1], "select pgque.resume(%s)", farm.target)
    for _ in range(2):
        again = farm.writer(*after)
        # Cut into other tasks
        again.commit([again.write(iter([frame(*PAYLOADS)]))])
        got = [one + farm.take(number) for number, one in enumerate(got)]
        assert got == [share(number) for number in range(3)]
    # What the first attempt staged is late now.
    first.commit(staged)
    new = texts("next", 40)
    last = farm.writer(*after, epoch=1)
    last.commit(write(last, *new))
    of = sorted(after)
    for number in range(3):
        assert farm.take(number) == share(number, of, new)


def test_a_list_that_was_stored_halfway_gives_way_to_one_that_counts(farm: Farm) -> None:
    zombie, other = [farm.name(0), farm.name(1)], [farm.name(1), farm.name(2)]
    with psycopg.connect(farm.servers[0].dsn_for("app", "spark")) as conn:
        assert value(conn, "select pgque.sink_servers(%s, 0, %s)", farm.target, zombie) == zombie
    second = farm.writer(1, 2)
    second.commit(write(second, *PAYLOADS))
    third = farm.writer(0, 1)
    staged = write(third, *PAYLOADS)
    assert {message.servers for message in staged} == {tuple(other)}
    third.commit(staged)
    assert [farm.take(number) for number in range(3)] == [Counter(), share(1, (1, 2)), share(2, (1, 2))]


def test_tasks_of_different_lists_that_race_agree_on_one(farm: Farm) -> None:
    lists = [(0, 1), (1, 2), (0, 1, 2), (0, 2)]
    with ThreadPoolExecutor(len(lists)) as pool:
        for epoch in range(4):
            barrier = threading.Barrier(len(lists))

            def stage(numbers: tuple[int, ...], epoch: int = epoch, barrier: Any = barrier) -> Any:
                writer = farm.writer(*numbers, epoch=epoch)
                barrier.wait()
                return writer, writer.write(iter([frame(*PAYLOADS)]))

            done = list(pool.map(stage, lists))
            agreed = {message.servers for _, message in done}
            assert len(agreed) == 1
            list(pool.map(lambda one: one[0].commit([one[1]]), done))
            got: Counter[str | None] = Counter()
            for number in range(3):
                got += farm.take(number)
            assert got == Counter(PAYLOADS)


def alone(farm: Farm, number: int, epoch: int = 0) -> PgqueWriter:
    """Return a writer without option servers."""
    return farm.writer(
        epoch=epoch,
        host="127.0.0.1",
        port=str(farm.servers[number].port),
        dbname="app",
        user="spark",
        password=PASSWORD,
    )


def test_an_epoch_that_one_server_has_whole_is_not_spread_when_it_is_replayed(farm: Farm) -> None:
    first = alone(farm, 1)
    first.commit(write(first, *PAYLOADS))
    second = farm.writer()
    second.commit(write(second, *PAYLOADS))
    assert [farm.take(number) for number in range(3)] == [Counter(), Counter(PAYLOADS), Counter()]


@pytest.mark.parametrize("committed", [False, True])
def test_an_epoch_that_is_spread_is_not_replayed_without_the_list(farm: Farm, committed: bool) -> None:
    late = alone(farm, 1)
    staged = write(late, *PAYLOADS)
    writer = farm.writer()
    messages = write(writer, *PAYLOADS)
    if committed:
        writer.commit(messages)
    with pytest.raises(PgqueSinkEpochError, match="spread over the servers"):
        late.commit(staged)
    writer.commit(messages)
    assert [farm.take(number) for number in range(3)] == [share(number) for number in range(3)]


def test_a_server_that_is_away_is_asked_before_anything_is_stored(farm: Farm) -> None:
    farm.servers[2].kill()
    with pytest.raises(PgqueConnectionError, match=f"^server {farm.name(2)}: "):
        write(farm.writer(), *PAYLOADS)
    # So a name that was wrong can be put right.
    second = farm.writer(0, 1)
    second.commit(write(second, *PAYLOADS))
    assert [farm.take(number) for number in range(2)] == [share(number, (0, 1)) for number in range(2)]


@pytest.mark.parametrize("what", ["rights", "version"])
def test_a_server_that_cannot_take_part_is_asked_before_anything_is_stored(farm: Farm, what: str) -> None:
    lacks, again = {
        "rights": ("revoke pgque_writer from spark", "grant pgque_writer to spark"),
        "version": (
            "alter function pgque.sink_servers rename to sink_servers_of_later",
            "alter function pgque.sink_servers_of_later rename to sink_servers",
        ),
    }[what]
    farm.conns[2].execute(lacks.encode())
    try:
        with pytest.raises(PgqueError, match=f"^server {farm.name(2)}: "):
            write(farm.writer(), *PAYLOADS)
        # So it can be taken from the list again.
        second = farm.writer(0, 1)
        second.commit(write(second, *PAYLOADS))
    finally:
        farm.conns[2].execute(again.encode())
    assert [farm.take(number) for number in range(2)] == [share(number, (0, 1)) for number in range(2)]


def test_a_server_that_left_the_list_and_is_needed_gives_an_error_with_the_reason(farm: Farm) -> None:
    write(farm.writer(), *PAYLOADS)
    farm.conns[2].execute("revoke pgque_writer from spark")
    try:
        with pytest.raises(PgqueError, match=f"^server {farm.name(2)}: permission denied") as caught:
            write(farm.writer(0, 1), *PAYLOADS)
    finally:
        farm.conns[2].execute("grant pgque_writer to spark")
    assert f"Epoch 0 of sink {farm.target} was begun with this server" in str(caught.value)


def test_in_turn_each_server_gets_as_many_rows_at_least_once(farm: Farm) -> None:
    writer = farm.writer(0, 1, 2, sinkId="", epoch=None, spread="round-robin", delivery="at-least-once")
    writer.commit([writer.write(iter([frame(*PAYLOADS[:20]), frame(*PAYLOADS[20:])]))])
    got = [farm.take(number) for number in range(3)]
    assert [one.total() for one in got] == [20, 20, 20]
    assert got[0] + got[1] + got[2] == Counter(PAYLOADS)


def test_a_full_server_is_waited_for(farm: Farm) -> None:
    configure(farm.conns[2], farm.target, max_depth=10)
    value(farm.conns[2], "select pgque.send_batch(%s, 'default', %s::text[])", farm.target, texts("old", 10))
    writer = farm.writer(0, 1, 2, onFull="wait", onFullTimeout="60")
    few = PAYLOADS[:9]
    staged = write(writer, *few)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(writer.commit, staged)
        with pytest.raises(TimeoutError):
            done.result(1)
        assert farm.take(0) == share(0, payloads=few)
        assert farm.take(2) == Counter(texts("old", 10))
        value(farm.conns[2], "select pgque.maint()")
        assert done.result(60) is None
    assert farm.take(2) == share(2, payloads=few)


# --- Both, with Spark ---------------------------------------------------------------------------------


def start(
    spark: SparkSession, farm: Farm, checkpoint: Path, sinks: Sequence[int] = (0, 1, 2), **more: str
) -> StreamingQuery:
    """Start a stream from the queue on all servers to the target on some."""
    source = farm.options(queue=farm.queue, consumer="job", startingAt="earliest", numPartitions="2", **more)
    sink = farm.options(*sinks, queue=farm.target)
    return (
        spark.readStream.format("pgque")
        .options(**source)
        .load()
        .selectExpr("concat('<', payload, '>') as payload")
        .writeStream.format("pgque")
        .options(**sink, checkpointLocation=str(checkpoint))
        .start()
    )


class Watch:
    """Collect what arrives on the servers."""

    def __init__(self, farm: Farm, wait_until: Callable[..., None]) -> None:
        self.by: list[Counter[str | None]] = [Counter(), Counter(), Counter()]
        self.sent: Counter[str | None] = Counter()
        self._farm, self._wait_until = farm, wait_until

    @property
    def got(self) -> Counter[str | None]:
        """What has arrived on all servers."""
        return self.by[0] + self.by[1] + self.by[2]

    def take(self) -> int:
        """Receive what there is; return how much has arrived so far."""
        for number in range(3):
            self.by[number] += self._farm.take(number)
        return self.got.total()

    def put(self, number: int, *payloads: str) -> None:
        """Send, and remember what has to arrive."""
        self._farm.put(number, *payloads)
        self.sent.update(f"<{payload}>" for payload in payloads)

    def arrive(self, query: StreamingQuery, timeout: float = 120) -> None:
        """Wait until as much has arrived as was sent, and see that it is the same."""

        self._wait_until(
            lambda: self.take() >= self.sent.total() or not query.isActive, "all arrives", timeout
        )
        assert query.isActive, str(query.exception())
        assert self.got == self.sent

    def failed(self, query: StreamingQuery) -> str:
        """Wait until the query has failed; return why."""
        self._wait_until(lambda: not query.isActive, "the query fails", 120)
        return str(query.exception())

    def waiting(self, number: int, text: str, query: StreamingQuery) -> int:
        """Wait until a session of the stream waits for a lock on a server in such a statement."""
        found: list[Any] = []

        def seen() -> bool:
            found[:] = rows(
                self._farm.conns[number],
                "select pid from pg_stat_activity where application_name like 'pgque-spark/%%'"
                " and wait_event_type = 'Lock' and query ilike %s",
                f"%{text}%",
            )
            return bool(found) or not query.isActive

        self._wait_until(seen, f"{text} waits", 120)
        assert query.isActive, str(query.exception())
        return int(found[0][0])

    def hold(self, number: int, *tables: str, mode: str = "share") -> Connection:
        """Lock tables of a server."""
        holder = self._farm.connect(number)
        holder.execute("begin")
        holder.execute(f"lock table {', '.join(tables)} in {mode} mode".encode())
        return holder


STAGE = ("pgque.sink_stage_0", "pgque.sink_stage_1")


@pytest.mark.timeout(300)
def test_servers_and_tasks_that_die_lose_and_double_nothing(
    spark: SparkSession,
    farm: Farm,
    tmp_path: Path,
    wait_until: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from pgque.spark.listener import PgqueListener

    registry = CollectorRegistry()
    listener = PgqueListener(f"dbname=postgres user=spark password={PASSWORD}", registry=registry)
    caplog.set_level(logging.INFO, "pgque.spark")
    spark.streams.addListener(listener)
    watch = Watch(farm, wait_until)
    query = start(spark, farm, tmp_path)
    try:
        for number in range(3):
            watch.put(number, *texts(f"a{number}", 200))
        watch.arrive(query)
        for number in range(3):
            line = f"server {farm.name(number)}, queue {farm.queue}, consumer job at tick"
            wait_until(lambda line=line: line in caplog.text, "the progress is logged", 20)
            assert f'server="{farm.name(number)}"' in generate_latest(registry).decode()
        # A reading and a writing task lose their sessions on one server, and are run again.
        value(
            farm.conns[1], "select pgque.send_batch(%s, 'default', %s::text[])", farm.queue, texts("b1", 200)
        )
        watch.sent.update(f"<{text}>" for text in texts("b1", 200))
        with watch.hold(1, leaf(farm.conns[1], farm.queue), mode="access exclusive"):
            forced_tick(farm.conns[1], farm.queue)
            value(
                farm.conns[1],
                "select pg_terminate_backend(%s, 10000)",
                watch.waiting(1, "pgque.read_window_cursor(", query),
            )
        watch.arrive(query)
        with watch.hold(2, *STAGE):
            watch.put(0, *texts("c0", 200))
            value(
                farm.conns[2],
                "select pg_terminate_backend(%s, 10000)",
                watch.waiting(2, 'COPY "pgque" . "sink_stage', query),
            )
        watch.arrive(query)
        # A server dies in the middle of a commit, which another one has behind it.
        holder = watch.hold(1, leaf(farm.conns[1], farm.target))
        for number in range(3):
            watch.put(number, *texts(f"d{number}", 200))
        watch.waiting(1, "sink_commit", query)
        farm.servers[1].kill()
        holder.close()
        told = watch.failed(query)
        assert f"server {farm.name(1)}: " in told
        assert PASSWORD not in told
        watch.by[0] += farm.take(0)
        assert any(str(text).startswith("<d") for text in watch.by[0])
        farm.again(1)
        # Goes on with another list, which does not count yet.
        query = start(spark, farm, tmp_path, (0,))
        watch.arrive(query)
        watch.put(1, *texts("e1", 200))
        watch.arrive(query)
        assert sum(str(text).startswith("<e") for text in watch.by[0]) == 200
        assert all(any(str(text).startswith("<d") for text in one) for one in watch.by)
    finally:
        query.stop()
        spark.streams.removeListener(listener)


JOB = """
import json, os
source, sink, checkpoint = (json.loads(os.environ[f"JOB_{name}"]) for name in ("SOURCE", "SINK", "CHECKPOINT"))
frame = spark.readStream.format("pgque").options(**source).load()
writer = frame.selectExpr("concat('<', payload, '>') as payload").writeStream.format("pgque").options(**sink)
if len(sys.argv) > 1:
    writer = writer.trigger(availableNow=True)
query = writer.option("checkpointLocation", checkpoint).start()
print("RUNNING", flush=True)
query.awaitTermination()
"""


def job(
    run_driver: Callable[..., Any], farm: Farm, checkpoint: Path, sinks: Sequence[int], *arguments: str
) -> Any:
    """Start a driver of its own."""
    source = farm.options(queue=farm.queue, consumer="job", startingAt="earliest", numPartitions="2")
    given = {"SOURCE": source, "SINK": farm.options(*sinks, queue=farm.target), "CHECKPOINT": str(checkpoint)}
    return run_driver(JOB, *arguments, env={f"JOB_{name}": json.dumps(one) for name, one in given.items()})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_driver_killed_between_two_servers_is_made_up_for_with_another_list(
    spark: SparkSession,
    run_driver: Callable[..., Any],
    farm: Farm,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    watch = Watch(farm, wait_until)
    for number in range(3):
        watch.put(number, *texts(f"a{number}", 300))
    with watch.hold(1, leaf(farm.conns[1], farm.target)):
        driver = job(run_driver, farm, tmp_path / "checkpoint", (0, 1, 2), "now")

        class Query:
            isActive = property(lambda self: driver.running)

            def exception(self) -> str:
                return str(driver.output()[-4000:])

        pid = watch.waiting(1, "sink_commit", Query())
        # Also what outlives the driver for a moment, and would go on.
        driver.end()
        value(farm.conns[1], "select pg_terminate_backend(%s, 10000)", pid)
    assert watch.take() == watch.by[0].total() > 0
    query = start(spark, farm, tmp_path / "checkpoint", (1, 2))
    try:
        watch.arrive(query)
        assert all(watch.by)
    finally:
        query.stop()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_drivers_servers_and_sessions_killed_many_times_lose_and_double_nothing(
    run_driver: Callable[..., Any], farm: Farm, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    seed = secrets.randbelow(10**9)
    chance = random.Random(seed)  # noqa: S311
    lists = [(0, 1, 2), (0, 1), (1, 2), (0, 2)]
    watch = Watch(farm, wait_until)
    for number in range(3):
        value(farm.conns[number], "select pgque.subscribe(%s, 'job')", farm.queue)
    kills: Counter[str] = Counter()
    sent = 0

    def traffic(seconds: float) -> None:
        nonlocal sent
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            number = chance.randrange(3)
            watch.put(number, *(f"{sent + n}" for n in range(chance.randint(1, 60))))
            sent = watch.sent.total()
            watch.take()
            for one in range(3):
                value(farm.conns[one], "select pgque.maint()")
            time.sleep(chance.uniform(0, 0.1))

    driver = job(run_driver, farm, tmp_path / "checkpoint", lists[0])
    driver.wait_for("RUNNING", 240)
    for _ in range(16):
        traffic(chance.uniform(1, 6))
        what = chance.choice(["driver", "driver", "server", "server", "sessions"])
        kills[what] += 1
        number = chance.randrange(3)
        if what == "driver":
            driver.kill()
        elif what == "server":
            farm.servers[number].kill()
            time.sleep(chance.uniform(0, 2))
            farm.again(number)
        else:
            rows(
                farm.conns[number],
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'pgque-spark/%%'",
            )
        time.sleep(chance.uniform(0, 1))
        if not driver.running:
            driver = job(run_driver, farm, tmp_path / "checkpoint", chance.choice(lists))
            driver.wait_for("RUNNING", 240)

    def complete() -> bool:
        nonlocal driver
        if not driver.running:
            driver = job(run_driver, farm, tmp_path / "checkpoint", lists[0])
        for one in range(3):
            forced_tick(farm.conns[one], farm.queue)
        return watch.take() >= watch.sent.total()

    wait_until(complete, f"the end of seed {seed} after {kills}", 240)
    watch.put(1, "last")
    wait_until(complete, f"the last message of seed {seed}", 120)
    driver.end()
    watch.take()
    assert watch.got == watch.sent, f"seed {seed}"
    assert kills.total() == 16
    assert watch.sent.total() > 1_000
