"""Connections that a task leaves to the next one in its worker process."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import Role
from pgque.errors import PgqueConnectionError, PgqueError, PgqueTickNotFoundError
from pgque.spark import _kept, options
from sql.helpers import Connection, column, forced_tick, rows, send_many, subscribe, value
from support import pgbouncer
from support.silent import silent_path

pytest.importorskip("pyspark")  # collected without it too, for make test
from pgque.spark._window import Task, Window, layout, read

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


def payload() -> StructType:
    from pyspark.sql.types import StructType

    return StructType().add("payload", "string")


@dataclass
class Reads:
    """Tasks of this process that read one tick of a queue."""

    conn: Connection
    dsn: str
    queue: str
    tick: int

    def task(self, **given: Any) -> Iterator[pa.RecordBatch]:
        parsed = options.parse({**self.given, **given}, options.STREAM_READ)
        window = Window(given.get("queue", self.queue), self.tick - 1, self.tick)
        return read(parsed, layout(parsed, payload()), Task([window]))

    @property
    def given(self) -> dict[str, str]:
        return {"url": self.dsn, "queue": self.queue, "consumer": "c", "columns": "payload"}

    def __call__(self, **given: Any) -> int:
        return sum(batch.num_rows for batch in self.task(**given))

    def sessions(self) -> list[tuple[Any, ...]]:
        return rows(
            self.conn,
            "select pid, application_name, state from pg_stat_activity"
            " where application_name like 'pgque-spark/%%' and datname = current_database()",
        )

    def pid(self) -> int:
        ((pid, _, _),) = self.sessions()
        return int(pid)


@pytest.fixture
def reads(conn: Connection, reader: Role, queue: str) -> Iterator[Reads]:
    """Tasks of a role that may read."""
    subscribe(conn, queue, "c")
    send_many(conn, queue, 100)
    yield Reads(conn, reader.dsn, queue, forced_tick(conn, queue))
    while _kept._idle:
        _kept._idle.popitem()[1][0].close()


def test_tasks_of_a_process_use_one_connection_which_is_idle_between_them(reads: Reads) -> None:
    assert reads() == 100
    pid = reads.pid()
    assert [reads(), reads()] == [100, 100]
    assert reads.sessions() == [(pid, "pgque-spark/idle", "idle")]
    assert value(reads.conn, "select count(*) from pg_locks where pid = %s", pid) == 0


def test_nothing_that_a_task_sets_is_there_in_the_next_transaction(reads: Reads) -> None:
    import adbc_driver_manager as adbc
    from adbc_driver_manager._reader import AdbcRecordBatchReader

    assert reads() == 100
    pid = reads.pid()
    told = "select pg_backend_pid() as pid, current_setting('application_name') as name,"
    told += " current_setting('transaction_read_only') as ro, current_setting('statement_timeout') as timeout"
    with (
        _kept.transaction({"url": reads.dsn}, "pgque-spark/next", {"statement_timeout": "7s"}) as conn,
        adbc.AdbcStatement(conn) as statement,
    ):
        statement.set_sql_query(told)
        stream, _ = statement.execute_query()
        found = AdbcRecordBatchReader._import_from_c(stream.address).read_all().to_pylist()
    assert found == [{"pid": pid, "name": "pgque-spark/next", "ro": "off", "timeout": "7s"}]


def test_a_kept_connection_that_was_killed_is_replaced_and_nobody_is_told(reads: Reads) -> None:
    assert reads() == 100
    pid = reads.pid()
    value(reads.conn, "select pg_terminate_backend(%s, 10000)", pid)
    assert reads() == 100
    assert reads.pid() != pid


def test_a_kept_connection_is_replaced_once(reads: Reads) -> None:
    assert reads() == 100
    role = value(reads.conn, "select usename from pg_stat_activity where pid = %s", reads.pid())
    reads.conn.execute(f"alter role {role} nologin".encode())
    value(reads.conn, "select pg_terminate_backend(%s, 10000)", reads.pid())
    with pytest.raises(PgqueError, match="not permitted to log in"):
        reads()


def test_messages_that_a_server_has_not_got_yet_are_not_left_out_as_lost(reads: Reads) -> None:
    send_many(reads.conn, reads.queue, 10)
    # The driver of a stream knows the tick; the task reads from a standby that lags, or from what was the
    # primary before a failover.
    reads.tick += 1
    with pytest.raises(PgqueTickNotFoundError, match="whose newest tick is"):
        reads(failOnDataLoss="false")
    assert forced_tick(reads.conn, reads.queue) == reads.tick
    assert reads(failOnDataLoss="false") == 10


def test_a_task_that_fails_or_is_left_closes_its_connection(
    reads: Reads, wait_until: Callable[..., None]
) -> None:
    with pytest.raises(PgqueError, match="queue not found"):
        reads(queue="no_such_queue")
    wait_until(lambda: not reads.sessions(), "the one that failed is closed")
    left = reads.task(fetchSize="10")
    next(left)
    ((_, name, state),) = reads.sessions()
    assert (name, state) == (f"pgque-spark/{reads.queue}/c", "idle in transaction")
    left.close()  # type: ignore[attr-defined]
    wait_until(lambda: not reads.sessions(), "the one that was left is closed")


def test_tasks_at_one_time_have_connections_of_their_own_and_one_is_kept(
    reads: Reads, wait_until: Callable[..., None]
) -> None:
    first, second = reads.task(fetchSize="10"), reads.task(fetchSize="10")
    next(first), next(second)
    assert len(reads.sessions()) == 2
    assert sum(batch.num_rows for task in (first, second) for batch in task) == 180
    wait_until(lambda: len(reads.sessions()) == 1, "the other is closed")


def test_a_connection_that_was_idle_for_long_is_closed_when_the_next_task_begins(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads() == 100
    pid = reads.pid()
    monkeypatch.setattr(_kept, "_IDLE_SECONDS", 0.0)
    assert reads() == 100
    assert reads.pid() != pid


def test_at_most_a_few_servers_have_a_kept_connection(reads: Reads, wait_until: Callable[..., None]) -> None:
    for number in range(_kept._MOST + 2):
        # A connection string of its own is what another server would have.
        assert reads(url=f"{reads.dsn} connect_timeout={number + 20}") == 100
    wait_until(lambda: len(reads.sessions()) == _kept._MOST, "the oldest are closed")


def test_a_path_that_went_silent_while_a_connection_was_idle_does_not_hold_the_next_task(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kept, "_ANSWER_SECONDS", 1.0)
    with silent_path(reads.dsn) as path:
        assert reads(url=path.dsn) == 100
        path.silence(new_ones=False)
        # The proxy acknowledges what is sent, so no keepalive notices.
        assert path.unanswered == 0
        assert reads(url=path.dsn) == 100
        assert path.unanswered == 1
        path.silence()
        with pytest.raises(PgqueConnectionError):
            reads(url=f"{path.dsn} connect_timeout=2")


def test_a_pooler_gives_its_sessions_to_others_between_two_tasks(dsn: str, reads: Reads) -> None:
    with pgbouncer.through(dsn) as pooled:
        assert [reads(url=pooled) for _ in range(3)] == [100] * 3
        assert [state for _, _, state in reads.sessions()] == ["idle"]


# --- Through Spark ------------------------------------------------------------------------------------


def test_the_micro_batches_of_a_stream_share_connections(
    spark: SparkSession, conn: Connection, reader: Role, queue: str, tmp_path: Path
) -> None:
    idle = "select pid from pg_stat_activity where usename = %s and application_name = 'pgque-spark/idle'"
    stream = spark.readStream.format("pgque").options(url=reader.dsn, queue=queue, consumer="c")
    frame = stream.options(numPartitions=1, pollIntervalMs=0).load()
    found: list[int] = []
    writer = frame.writeStream.foreachBatch(lambda df, _: found.append(len(df.collect())))
    query = writer.option("checkpointLocation", str(tmp_path)).start()
    kept: list[int] = []
    try:
        query.processAllAvailable()
        for _ in range(6):
            send_many(conn, queue, 10)
            forced_tick(conn, queue)
            query.processAllAvailable()
            kept += column(conn, idle, reader.name)
    finally:
        query.stop()
    assert sum(found) == 60
    assert len(kept) == 6
    # Spark may replace a worker.
    assert len(set(kept)) <= 2, kept


TASK = """
import base64, pickle, sys
parsed, schema, task = pickle.loads(base64.b64decode(sys.argv[1]))
from pgque.spark._window import layout, read
count = sum(batch.num_rows for batch in read(parsed, layout(parsed, schema), task))
print(count, sorted({"psycopg", "psycopg_binary", "pyarrow", "adbc_driver_postgresql"} & set(sys.modules)))
"""


def test_a_task_that_reads_imports_no_psycopg(reads: Reads) -> None:
    from pgque.spark.datasource import PgqueDataSource

    stream = PgqueDataSource(reads.given).streamReader(payload())
    task = Task([Window(reads.queue, reads.tick - 1, reads.tick)])
    pickled = pickle.dumps((stream._options, payload(), task))
    done = subprocess.run(
        [sys.executable, "-c", TASK, base64.b64encode(pickled).decode()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "100 ['adbc_driver_postgresql', 'pyarrow']\n"
