"""Payloads of JSON as columns, and what becomes of those that do not parse."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from conftest import Role
from sql.helpers import Connection, column, forced_tick, payloads, subscribe, value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BAD = [
    "no JSON",
    "",
    "[1]",
    '"text"',
    '{"id": "1"}',
    '{"id": 1.5}',
    '{"id": 9223372036854775808}',
    '{"id": 1',
    '{"id": 1} {"id": 2}',
    '{"id": 1}, "more": {"id": 2}',
    "}",
    '{"id": 1, "id": 2}',
    # pyarrow's error names the row, and what it could not read
    '{"at": "x in row ' + "9" * 5000 + '"}',
    '{"at": "\\u0000"}',
]


def put(conn: Connection, queue: str, *payloads: str | None) -> int:
    """Send texts, and tick."""
    value(conn, "select pgque.send_batch(%s, 'default', %s::text[])", queue, list(payloads))
    return forced_tick(conn, queue)


class Typed:
    """Frames and streams of one queue."""

    def __init__(self, spark: SparkSession, role: Role, queue: str, folder: Path) -> None:
        self.spark = spark
        self.role = role
        self.queue = queue
        self.checkpoint = str(folder / "checkpoint")

    def batch(self, schema: str | None = None, **options: str) -> DataFrame:
        reader = self.spark.read.format("pgque").options(url=self.role.dsn, queue=self.queue, **options)
        return (reader if schema is None else reader.schema(schema)).load()

    def stream(self, fail: int | None = None, **options: str) -> list[Any]:
        """Run consumer c to what is there; return the ids of the payloads."""
        box: list[Any] = []

        def each(batch: DataFrame, number: int) -> None:
            box.extend(row.id for row in batch.orderBy("msg_id").collect())
            if number == fail:
                raise RuntimeError("failed on purpose")

        query = (
            self.spark.readStream.format("pgque")
            .options(url=self.role.dsn, queue=self.queue, consumer="c", **options)
            .load()
            .writeStream.foreachBatch(each)
            .option("checkpointLocation", self.checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(60)
        except Exception as error:
            assert fail is not None and "failed on purpose" in str(error), error
        return box


@pytest.fixture
def typed(spark: SparkSession, reader: Role, queue: str, tmp_path: Path) -> Typed:
    return Typed(spark, reader, queue, tmp_path)


def told(do: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        do()
    return str(caught.value)


def test_columns_of_the_payload_have_the_types_of_the_schema(typed: Typed, conn: Connection) -> None:
    full = {
        "id": 7, "total": 2, "name": "ä\n\U0001f600", "paid": True, "price": 1.25, "day": "2026-01-02",
        "at": "2026-01-02T03:04:05+02:00", "tags": ["a", None], "item": {"n": 1, "on": "2026-01-02"}, "more": 1,
    }  # fmt: skip
    put(conn, typed.queue, json.dumps(full), json.dumps(full, indent=2), "{}", None)
    value(conn, "select pgque.send(%s, 'default', '{\"id\": 8}'::bytea)", typed.queue)
    forced_tick(conn, typed.queue)
    frame = typed.batch(
        payloadSchema="id bigint, total double, name string, paid boolean, price decimal(10,2), day date,"
        " at timestamp, tags array<string>, item struct<n: int, on: date>"
    )
    assert frame.columns[:5] == ["msg_id", "type", "key", "created_at", "retry_count"]
    found = frame.selectExpr(
        "id", "total", "name", "paid", "cast(price as string)", "cast(day as string)", "cast(at as string)",
        "to_json(tags)", "to_json(item)", "_corrupt",
    ).collect()  # fmt: skip
    whole = (
        7, 2.0, "ä\n\U0001f600", True, "1.25", "2026-01-02", "2026-01-02 01:04:05",
        '["a",null]', '{"n":1,"on":"2026-01-02"}', None,
    )  # fmt: skip
    nothing = (None,) * 10
    assert sorted(map(tuple, found), key=str) == [whole, whole, (8, *(None,) * 9), nothing, nothing]


def test_what_does_not_parse_is_in_a_column_of_its_own(typed: Typed, conn: Connection) -> None:
    good = [f'{{"id": {n}}}' for n in range(2000)]
    mixed = [*good[:500], *BAD, *good[500:]]
    put(conn, typed.queue, *mixed)
    value(conn, "select pgque.send(%s, 'default', '\\xff'::bytea)", typed.queue)
    forced_tick(conn, typed.queue)
    schema = "id bigint, at timestamp"
    found = typed.batch(payloadSchema=schema, columns="msg_id").orderBy("msg_id").collect()
    assert [row.id for row in found if row._corrupt is None] == list(range(2000))
    assert [row._corrupt for row in found if row._corrupt is not None] == [*BAD, "no UTF-8: \\xff"]
    assert all(row.id is None for row in found if row._corrupt is not None)


def test_what_parses_is_what_python_s_json_takes_for_an_object() -> None:
    import pyarrow as pa

    from pgque.spark._typed import Parser

    random = Random(5)  # noqa: S311
    atoms = ['{"id": 1}', '{"id":', '"id"', "{", "}", "[", "]", ":", ",", "1", "\n", "\\"]
    payloads = ["".join(random.choices(atoms, k=random.randint(0, 5))) for _ in range(5000)]
    _, bad = Parser([pa.field("id", pa.int64())])(pa.array(payloads))

    def parses(payload: str) -> bool:
        try:
            found = json.loads(payload)
        except ValueError:
            return False
        return isinstance(found, dict) and isinstance(found.get("id", 1), int)

    assert [row in bad for row in range(len(payloads))] == [not parses(payload) for payload in payloads]


def test_a_schema_of_ones_own_mixes_columns_of_message_and_payload(typed: Typed, conn: Connection) -> None:
    put(conn, typed.queue, '{"id": 1}', "bad")
    frame = typed.batch("_corrupt string, id bigint, type string")
    assert sorted(map(tuple, frame.collect()), key=str) == [("bad", None, "default"), (None, 1, "default")]
    assert sorted(row.payload for row in typed.batch("payload string").collect()) == ["bad", '{"id": 1}']


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schema": "id bigint"}, "needs a column _corrupt string"),
        ({"schema": "Type string, _corrupt string"}, "needs option payloadSchema"),
        ({"payloadSchema": "type string"}, "type"),
        ({"payloadSchema": "id map<string,int>"}, "from_json"),
        ({"payloadSchema": "id bigint not null"}, "cannot be NOT NULL"),
        ({"payloadSchema": "id struct<n: int not null>"}, "column id.n of the payload cannot be NOT NULL"),
        ({"schema": "payload string not null"}, "column payload of a message cannot be NOT NULL"),
        ({"payloadSchema": "id nonsense"}, "nonsense"),
        ({"payloadSchema": "id bigint", "schema": "id bigint"}, "exclude each other"),
        ({"badRecords": "dead"}, "for stream read, not for batch read"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(typed: Typed, options: dict[str, str], text: str) -> None:
    assert text in told(lambda: typed.batch(**options).collect())


def test_a_payload_schema_that_spark_does_not_read_is_shown_with_the_option(typed: Typed) -> None:
    text = told(lambda: typed.batch(payloadSchema="id bigint, total doubel"))
    assert 'Unsupported data type "DOUBEL"' in text
    # Spark's mark is below the wrong word.
    assert "-- option payloadSchema:\nid bigint, total doubel\n-----------------^^^" in text
    assert "-- option payloadSchema:\nid bigint,\n" in told(lambda: typed.batch(payloadSchema="id bigint,"))


def test_a_comment_in_a_payload_schema_ends_with_it(typed: Typed) -> None:
    frame = typed.batch(columns="msg_id", payloadSchema="id: bigint, `a b` struct<x int> -- the rest")
    assert frame.columns == ["msg_id", "id", "a b", "_corrupt"]


def test_a_temporary_view_is_typed_in_sql(typed: Typed, spark: SparkSession, conn: Connection) -> None:
    put(conn, typed.queue, '{"id": 1, "total": 2.5}', '{"id": 2, "total": 4}')
    spark.sql(
        f"create or replace temporary view typed using pgque options (url '{typed.role.dsn}',"
        f" queue '{typed.queue}', payloadSchema 'id bigint, total double')"
    )
    assert spark.sql("select sum(id), sum(total) from typed where _corrupt is null").first() == (3, 6.5)
    assert spark.read.table("typed").where("total > 3").select("id").first() == (2,)


def test_a_table_of_the_catalog_keeps_the_columns_and_gets_its_options_at_each_read(
    typed: Typed, spark: SparkSession, conn: Connection
) -> None:
    put(conn, typed.queue, '{"id": 1}', "bad")
    spark.sql("create table typed_orders (id bigint, _corrupt string) using pgque")
    try:
        given = f"url = '{typed.role.dsn}', queue = '{typed.queue}'"
        found = spark.sql(f"select id from typed_orders with ({given}) where _corrupt is null")
        assert found.collect() == [(1,)]
        options = {"url": typed.role.dsn, "queue": typed.queue}
        assert spark.read.options(**options).table("typed_orders").where("id is null").first() == (
            None,
            "bad",
        )
    finally:
        spark.sql("drop table typed_orders")


def dead_letters(conn: Connection, queue: str) -> list[str]:
    return column(conn, "select d.ev_data from pgque.dlq_inspect(%s, null) as d order by d.ev_id", queue)


def test_bad_records_are_dead_when_their_micro_batch_is_committed(typed: Typed, conn: Connection) -> None:
    subscribe(conn, typed.queue)
    options: Any = {"payloadSchema": "id bigint", "badRecords": "dead"}
    put(conn, typed.queue, '{"id": 1}', "bad 1", '{"id": "2"}')
    # Its micro-batch was not finished: nothing is dead, and with another schema the last one is good.
    assert typed.stream(fail=0, **options) == [1]
    assert dead_letters(conn, typed.queue) == []
    assert typed.stream(**options | {"payloadSchema": "id string"}) == ["2"]
    put(conn, typed.queue, "bad 2", '{"id": 3}')
    assert typed.stream(**options) == [3]
    assert dead_letters(conn, typed.queue) == ['{"id": 1}', "bad 1"]
    value(conn, "select pgque.seek(%s, 'c', pgque.tick_for(%s, 'latest'))", typed.queue, typed.queue)
    assert dead_letters(conn, typed.queue) == ['{"id": 1}', "bad 1", "bad 2"]
    assert value(conn, "select d.dl_reason from pgque.dlq_inspect(%s, 1) as d", typed.queue) == (
        "payload does not parse: Invalid value."
    )


def test_bad_records_of_a_part_are_dead_although_the_query_was_started_again_within_the_tick(
    typed: Typed, conn: Connection
) -> None:
    options: Any = {"payloadSchema": "id bigint", "badRecords": "dead", "startingAt": "earliest"}
    value(conn, "select pgque.set_queue_config(%s, 'max_window', '2')", typed.queue)
    put(conn, typed.queue, "bad 1", '{"id": 1}', '{"id": 2}', "bad 2", "bad 3")
    # Before 4.2 each run has one batch, and this one does not fail.
    assert typed.stream(fail=1, **options) in ([1, 2], [1])
    while found := typed.stream(**options):
        assert found == [2]
    put(conn, typed.queue, '{"id": 3}')
    assert typed.stream(**options) == [3]
    assert dead_letters(conn, typed.queue) == ["bad 1", "bad 2", "bad 3"]


def test_a_run_without_a_schema_forgets_what_the_run_before_it_could_not_parse(
    typed: Typed, conn: Connection
) -> None:
    subscribe(conn, typed.queue)
    put(conn, typed.queue, '{"id": 1}', '{"at": "\\u0000"}', "bad")
    typed.stream(fail=0, payloadSchema="id bigint, at timestamp", badRecords="dead")
    typed.stream(payloadSchema="id string")  # badRecords=keep
    put(conn, typed.queue, '{"id": "2"}')
    typed.stream(payloadSchema="id string")
    assert dead_letters(conn, typed.queue) == []


JOB = """
import os
source, target, checkpoint = sys.argv[1:4]
url = os.environ["JOB_URL"]
writer = (
    spark.readStream.format("pgque")
    .options(url=url, queue=source, consumer="c", payloadSchema="id bigint", badRecords="dead", numPartitions="2")
    .load()
    .selectExpr("cast(id as string) as payload")
    .writeStream.format("pgque")
    .options(url=url, queue=target, checkpointLocation=checkpoint)
)
if len(sys.argv) > 4:
    writer = writer.trigger(availableNow=True)
query = writer.start()
print("RUNNING", flush=True)
query.awaitTermination()
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_drivers_lose_and_double_no_message_and_no_dead_letter(
    run_driver: Callable[..., Any],
    roles: Callable[..., Role],
    new_queue: Callable[[], str],
    conn: Connection,
    queue: str,
    tmp_path: Path,
) -> None:
    target = new_queue()
    subscribe(conn, queue)
    subscribe(conn, target, "check")
    random = Random(1)  # noqa: S311
    arguments = (queue, target, str(tmp_path / "checkpoint"))
    env = {"JOB_URL": roles("reader", "writer").dsn}
    good: list[int] = []
    bad: list[int] = []

    def send(count: int) -> None:
        for _ in range(count):
            number = len(good) + len(bad)
            (bad if number % 5 == 0 else good).append(number)
            put(conn, queue, f"bad {number}" if number % 5 == 0 else f'{{"id": {number}}}')
            time.sleep(0.02)

    for _ in range(4):
        driver = run_driver(JOB, *arguments, env=env)
        driver.wait_for("RUNNING", 120)
        send(random.randint(150, 400))
        driver.kill()
    for _ in range(2):  # an availableNow run leaves its last micro-batch to the next one
        run_driver(JOB, *arguments, "to the end", env=env).finish()
        send(5)
    forced_tick(conn, target)
    assert sorted(int(str(p)) for p in payloads(conn, target, "check", 10_000)) == good[:-4]
    dead = [int(letter.removeprefix("bad ")) for letter in dead_letters(conn, queue)]
    assert sorted(dead) == bad[:-2]
