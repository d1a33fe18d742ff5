"""foreach_batch_once: micro-batches into PostgreSQL and into any database of the DB-API, each once."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from conftest import Role
from pgque.errors import PgqueBadArgumentError, PgqueConnectionError, PgqueError, PgqueSinkEpochError
from pgque.spark import foreach_batch_once
from sql.helpers import Connection, value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Target:
    """A database with a table `line`, and how to write into it."""

    def __init__(
        self, database: str | Callable[[], Any], table: str, placeholder: str, connect: Callable[[], Any]
    ) -> None:
        self.database, self.table, self._connect = database, table, connect
        self._insert = f"insert into line (value) values ({placeholder})"
        connection = connect()
        connection.execute("create table line (value varchar(50) not null)")
        connection.commit()
        connection.close()

    def write(self, connection: Any, batch: DataFrame, epoch: int) -> None:
        """Insert the rows of a micro-batch."""
        connection.cursor().executemany(self._insert, batch.toLocalIterator())

    def guarded(self, name: str = "lines", **options: Any) -> Callable[[DataFrame, int], None]:
        """Return write with the guard."""
        return foreach_batch_once(self.database, name, table=self.table, **options)(self.write)

    def lines(self) -> list[str]:
        """Return what was written."""
        connection = self._connect()
        found = connection.execute("select value from line order by value").fetchall()
        connection.close()
        return [row[0] for row in found]


@pytest.fixture
def shop(conn: Connection, nobody: Role) -> str:
    """A connection string of an ordinary role, whose schema `shop` comes first."""
    conn.execute(f"create schema shop_{nobody.name} authorization {nobody.name}".encode())
    conn.execute(f"alter role {nobody.name} set search_path = shop_{nobody.name}".encode())
    return nobody.dsn


@pytest.fixture(params=["postgresql", "sqlite3"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """A table in each of both."""
    if request.param == "sqlite3":

        def connect() -> sqlite3.Connection:
            return sqlite3.connect(tmp_path / "lines.db")

        return Target(connect, "pgque_epoch", "?", connect)
    dsn = request.getfixturevalue("shop")
    return Target(dsn, "pgque_epoch", "%s", lambda: psycopg.connect(dsn))


@pytest.fixture
def frame(spark: SparkSession) -> Callable[..., DataFrame]:
    """frame("a", "b"): a micro-batch of these lines."""
    return lambda *values: spark.createDataFrame([(v,) for v in values], "value string")


def test_a_replayed_epoch_is_left_out(target: Target, frame: Callable[..., DataFrame]) -> None:
    first = target.guarded(query_id="q")
    first(frame("a", "b"), 0)
    first(frame("a", "b"), 0)
    after_a_restart = target.guarded(query_id="q")
    after_a_restart(frame("a", "b"), 0)
    after_a_restart(frame("c"), 2)
    assert target.lines() == ["a", "b", "c"]


def test_names_and_streams_do_not_leave_out_what_is_of_another(
    target: Target, frame: Callable[..., DataFrame]
) -> None:
    for name, query in (("lines", "q1"), ("lines", "q2"), ("copies", "q1")):
        for _ in range(2):
            target.guarded(name, query_id=query)(frame("a"), 0)
    assert target.lines() == ["a", "a", "a"]


def test_an_epoch_older_than_the_newest_is_refused(target: Target, frame: Callable[..., DataFrame]) -> None:
    target.guarded(query_id="q")(frame("a"), 5)
    with pytest.raises(PgqueSinkEpochError, match="older than the newest epoch 5") as caught:
        target.guarded(query_id="q")(frame("b"), 4)
    assert caught.value.sqlstate == "PQ016"
    assert "new checkpointLocation" in (caught.value.hint or "")
    assert target.lines() == ["a"]


def test_what_a_write_did_before_it_failed_is_taken_back_with_its_epoch(
    target: Target, frame: Callable[..., DataFrame]
) -> None:
    def fails(connection: Any, batch: DataFrame, epoch: int) -> None:
        target.write(connection, batch, epoch)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        foreach_batch_once(target.database, "lines", query_id="q")(fails)(frame("a"), 0)
    assert target.lines() == []
    target.guarded(query_id="q")(frame("a"), 0)
    assert target.lines() == ["a"]


def test_a_write_that_hides_its_failed_transaction_does_not_lose_its_epoch(
    target: Target, frame: Callable[..., DataFrame]
) -> None:
    def hides(connection: Any, batch: DataFrame, epoch: int) -> None:
        target.write(connection, batch, epoch)
        if isinstance(connection, psycopg.Connection):
            with pytest.raises(psycopg.errors.UndefinedTable):
                connection.execute("select from nowhere")
        else:
            connection.rollback()

    with pytest.raises((PgqueError, psycopg.errors.InFailedSqlTransaction)):
        foreach_batch_once(target.database, "lines", query_id="q")(hides)(frame("a"), 0)
    target.guarded(query_id="q")(frame("a"), 0)
    assert target.lines() == ["a"]


def test_rows_of_a_connection_may_be_mappings(shop: str, frame: Callable[..., DataFrame]) -> None:
    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(shop, row_factory=psycopg.rows.dict_row)

    for epoch in (0, 1):
        foreach_batch_once(connect, "n", query_id="q")(lambda *_: None)(frame("a"), epoch)


def test_streams_are_distinguished_by_their_checkpoints(
    spark: SparkSession, target: Target, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()

    def run(checkpoint: str) -> None:
        lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(source))
        writer = lines.writeStream.foreachBatch(target.guarded())
        writer.trigger(availableNow=True).option(
            "checkpointLocation", str(tmp_path / checkpoint)
        ).start().awaitTermination()

    def crash_before_spark_knows(checkpoint: str) -> None:
        newest = max((tmp_path / checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        newest.unlink()
        newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)

    (source / "0").write_text("a\n")
    run("one")
    shutil.copytree(tmp_path / "one", tmp_path / "backup")
    crash_before_spark_knows("one")
    (source / "1").write_text("b\n")
    run("one")
    assert target.lines() == ["a", "b"]

    run("anew")  # numbers begin at 0 again, and nothing of it is lost
    assert target.lines() == ["a", "a", "b", "b"]

    crash_before_spark_knows("backup")
    with pytest.raises(Exception, match="older than the newest epoch 1"):
        run("backup")
    assert target.lines() == ["a", "a", "b", "b"]


def test_the_same_epoch_of_two_drivers_waits_and_is_written_once(
    shop: str, frame: Callable[..., DataFrame], wait_for_lock: Callable[..., None]
) -> None:
    target = Target(shop, "pgque_epoch", "%s", lambda: psycopg.connect(shop))
    target.guarded(query_id="q")(frame("a"), 0)
    writing, go_on, pids = threading.Event(), threading.Event(), list[int]()

    def connect() -> psycopg.Connection[Any]:
        connection = psycopg.connect(shop)
        pids.append(connection.info.backend_pid)
        return connection

    def slow(connection: Any, batch: DataFrame, epoch: int) -> None:
        target.write(connection, batch, epoch)
        writing.set()
        assert go_on.wait(60)

    batch = frame("b")
    first = threading.Thread(
        target=lambda: foreach_batch_once(connect, "lines", query_id="q")(slow)(batch, 1)
    )
    second = threading.Thread(
        target=lambda: foreach_batch_once(connect, "lines", query_id="q")(target.write)(batch, 1)
    )
    first.start()
    assert writing.wait(60)
    second.start()
    try:
        while len(pids) < 2 and second.is_alive():
            second.join(0.01)
        wait_for_lock(pids[1])
    finally:
        go_on.set()
        first.join()
        second.join()
    assert target.lines() == ["a", "b"]


def test_a_connection_that_commits_each_statement_is_refused(
    tmp_path: Path, frame: Callable[..., DataFrame]
) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "lines.db", isolation_level=None)

    target = Target(connect, "pgque_epoch", "?", connect)
    with pytest.raises(PgqueBadArgumentError, match="commits each statement"):
        target.guarded(query_id="q")(frame("a"), 0)
    assert target.lines() == []


def test_psycopg_refuses_a_commit_in_write_and_may_be_in_autocommit(
    shop: str, frame: Callable[..., DataFrame]
) -> None:
    target = Target(
        lambda: psycopg.connect(shop, autocommit=True), "pgque_epoch", "%s", lambda: psycopg.connect(shop)
    )

    def commits(connection: Any, batch: DataFrame, epoch: int) -> None:
        target.write(connection, batch, epoch)
        connection.commit()

    with pytest.raises(psycopg.ProgrammingError, match="commit"):
        foreach_batch_once(target.database, "lines", query_id="q")(commits)(frame("a"), 0)
    assert target.lines() == []
    target.guarded(query_id="q")(frame("a"), 0)
    assert target.lines() == ["a"]


def test_a_table_that_cannot_be_made_is_named_with_what_to_do(
    nobody: Role, frame: Callable[..., DataFrame]
) -> None:
    guarded = foreach_batch_once(nobody.dsn, "lines", table="pg_catalog.epoch", query_id="q")
    with pytest.raises(PgqueError, match=r"cannot create the table pg_catalog\.epoch") as caught:
        guarded(lambda *_: None)(frame("a"), 0)
    assert caught.value.sqlstate == "42501"
    assert "create table pg_catalog.epoch (name" in (caught.value.hint or "")


def test_without_a_stream_or_a_server_it_reports_that(frame: Callable[..., DataFrame]) -> None:
    with pytest.raises(PgqueBadArgumentError, match="give query_id"):
        foreach_batch_once("dbname=x", "lines")(lambda *_: None)(frame("a"), 0)
    with pytest.raises(PgqueConnectionError):
        foreach_batch_once("host=127.0.0.1 port=1", "lines", query_id="q")(lambda *_: None)(frame("a"), 0)


@pytest.mark.parametrize("name", ["", "a b", "a'", "é", "x" * 101])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(PgqueBadArgumentError, match="is not 1 to 100 letters"):
        foreach_batch_once("", name)
    with pytest.raises(PgqueBadArgumentError, match="is not 1 to 100 letters"):
        foreach_batch_once("", "lines", query_id=name)
    with pytest.raises(PgqueBadArgumentError, match="is no plain name"):
        foreach_batch_once("", "lines", table=name + " ")


# One stream into each database. The driver stops at a point of the micro-batch that is under way.
JOB = """
import os, sqlite3, time
from pgque.spark import foreach_batch_once
source, folder, point = sys.argv[1:4]
dsn = os.environ["JOB_DSN"]

def reach(name, here):
    if here == point:
        print(f"REACHED {name}", flush=True)  # one string: both streams print at once
        time.sleep(600)

def stream(name, database, insert):
    @foreach_batch_once(database, name)
    def write(connection, batch, epoch):
        reach(name, "marker")
        connection.cursor().executemany(insert, batch.toLocalIterator())
        reach(name, "rows")

    def batch(frame, epoch):
        write(frame, epoch)
        reach(name, "commit")

    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(source)
    writer = lines.writeStream.foreachBatch(batch).trigger(availableNow=True)
    return writer.option("checkpointLocation", f"{folder}/{name}").start()

streams = [
    stream("postgresql", dsn, "insert into line (value) values (%s)"),
    stream("sqlite3", lambda: sqlite3.connect(f"{folder}/lines.db"), "insert into line (value) values (?)"),
]
for each in streams:
    each.awaitTermination()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_drivers_killed_between_marker_rows_and_commit_lose_and_double_nothing(
    run_driver: Callable[..., Any],
    shop: str,
    conn: Connection,
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(tmp_path / "lines.db")

    targets = [
        Target(shop, "pgque_epoch", "%s", lambda: psycopg.connect(shop)),
        Target(connect, "pgque_epoch", "?", connect),
    ]
    source = tmp_path / "in"
    source.mkdir()
    written: list[str] = []
    for number, point in enumerate(("marker", "rows", "commit")):
        (source / str(number)).write_text(f"{number}a\n{number}b\n")
        driver = run_driver(JOB, str(source), str(tmp_path), point, env={"JOB_DSN": shop})
        for name in ("postgresql", "sqlite3"):
            driver.wait_for(f"REACHED {name}", 120)
        driver.kill()
        driver.end()
        wait_until(
            lambda: (
                value(conn, "select count(*) from pg_stat_activity where application_name ~ '/once$'") == 0
            ),
            "the server notices",
        )
        if point == "commit":  # of the first micro-batch, which the kills before left undone
            written = ["0a", "0b"]
        assert [target.lines() for target in targets] == [written, written]
    run_driver(JOB, str(source), str(tmp_path), "none", env={"JOB_DSN": shop}).finish(120)
    expected = [f"{number}{letter}" for number in range(3) for letter in "ab"]
    assert [target.lines() for target in targets] == [expected, expected]
