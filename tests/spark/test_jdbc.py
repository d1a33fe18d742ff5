"""Spark's own JDBC writes, and COPY, into the views sink and sink_bulk, as a role that may only send."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from conftest import Role
from sql.helpers import Connection, forced_tick, leaf, payloads, receive, rotate, rows, subscribe, value

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPARK_CONF = {"spark.master": "local[2,2]"}  # a failed task is run once more

VIEWS = ("pgque.sink", "pgque.sink_bulk")
both_views = pytest.mark.parametrize("view", VIEWS)


@pytest.fixture
def queue(conn: Connection, queue: str) -> str:
    """A queue with a consumer c."""
    subscribe(conn, queue)
    return queue


def frame(spark: SparkSession, name: str, rows: int, pieces: int = 2, /, **columns: str) -> DataFrame:
    """Return rows with payloads 0 to count - 1 in that many partitions; columns are SQL expressions."""
    expressions = {"queue": f"'{name}'", "payload": "cast(id as string)", **columns}
    return spark.range(0, rows, 1, pieces).selectExpr(*[f"{e} as {c}" for c, e in expressions.items()])


def arrived(conn: Connection, queue: str) -> Counter[str | None]:
    """Receive everything that was committed; count the payloads."""
    forced_tick(conn, queue)
    return Counter(payloads(conn, queue, count=50_000))


def numbers(count: int) -> Counter[str | None]:
    """Count the payloads of frame()."""
    return Counter(str(n) for n in range(count))


def failure(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Expect the call to fail; return all that Spark tells."""
    with pytest.raises(Exception) as caught:
        call(*args, **options)
    return str(caught.value)


def last_id(conn: Connection, queue: str) -> int:
    """Take the next id of the queue's messages, by sending one."""
    return int(value(conn, "select pgque.send(%s, 'mark'::text)", queue))


# --- Numbers ------------------------------------------------------------------------------------------


def write_and_count(
    spark: SparkSession,
    jdbc: Any,
    conn: Connection,
    queue: str,
    view: str,
    parts: int,
    rewrite: bool,
    count: int,
) -> None:
    """Write rows; each arrives once, and each Spark partition is one transaction."""
    before = value(conn, "select pg_snapshot_xmax(pg_current_snapshot())")
    jdbc.write(frame(spark, queue, count, parts), view, rewrite=rewrite)
    writers = rows(
        conn,
        "select e.ev_txid, count(*) from pgque.event as e join pgque.queue as q on e.slot / 3 = q.queue_id"
        " where q.queue_name = %s and e.ev_txid >= %s group by 1",
        queue,
        before,
    )
    assert sorted(n for _, n in writers) == [count // parts] * parts
    assert arrived(conn, queue) == numbers(count)


# Each pair of values comes once; the long test below has all combinations.
@pytest.mark.parametrize(
    ("view", "parts", "rewrite"),
    [(view, parts, (view == VIEWS[0]) == (parts != 2)) for view in VIEWS for parts in (1, 2, 8)],
)
def test_rows_of_every_partition_arrive_once(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str, parts: int, rewrite: bool
) -> None:
    write_and_count(spark, jdbc, conn, queue, view, parts, rewrite, 2_000)


@both_views
def test_two_hundred_thousand_rows_arrive_once(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str
) -> None:
    write_and_count(spark, jdbc, conn, queue, view, 2, True, 200_000)


@pytest.mark.long
@both_views
@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("rewrite", [True, False], ids=["rewrite", "plain"])
def test_two_hundred_thousand_rows_arrive_once_however_they_are_written(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str, parts: int, rewrite: bool
) -> None:
    write_and_count(spark, jdbc, conn, queue, view, parts, rewrite, 200_000)


def test_rows_of_one_partition_keep_their_order(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    for view in VIEWS:
        jdbc.write(frame(spark, queue, 3_000, 1), view)
        forced_tick(conn, queue)
        assert payloads(conn, queue, count=5_000) == [str(n) for n in range(3_000)]


def test_one_write_feeds_many_queues(
    spark: SparkSession, jdbc: Any, conn: Connection, new_queue: Callable[[], str]
) -> None:
    first, second = new_queue(), new_queue()
    for view in VIEWS:
        for name in (first, second):
            value(conn, "select pgque.subscribe(%s, %s)", name, view)
        jdbc.write(frame(spark, first, 100, queue=f"if(id % 4 = 0, '{first}', '{second}')"), view)
        for name, residues in ((first, [0]), (second, [1, 2, 3])):
            forced_tick(conn, name)
            expected = Counter(str(n) for n in range(100) if n % 4 in residues)
            assert Counter(payloads(conn, name, view, 500)) == expected


# --- Columns ------------------------------------------------------------------------------------------


def test_every_column_of_sink_reaches_the_message(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    whole = frame(
        spark,
        queue,
        2,
        1,
        type="if(id = 0, 'order.created', null)",
        payload="if(id = 0, 'text ✓ 🐘', null)",
        headers="""if(id = 0, '{"trace": "a1"}', null)""",
        payload_bytes="if(id = 0, null, X'00FF41')",
        partition_key="if(id = 0, 'customer-7', null)",
    )
    jdbc.write(whole, "pgque.sink")
    forced_tick(conn, queue)
    first, second = receive(conn, queue)
    assert (first.type, first.payload, first.headers) == ("order.created", "text ✓ 🐘", {"trace": "a1"})
    assert (first.extra1, first.payload_bytes) == ("customer-7", None)
    assert (second.type, second.payload, second.headers) == ("default", None, None)
    assert (second.extra1, second.payload_bytes) == (None, b"\x00\xffA")


DELAYS = {"'1 hour'": 3600, "'90'": 90, "90": 90, "90.5D": 90, "cast(90.5 as decimal(9,2))": 90, "90L": 90}


def test_options_of_send_arrive_as_what_spark_has(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    for delay in DELAYS:
        jdbc.write(frame(spark, queue, 1, 1, delay=delay, payload="'delayed'", ttl="'1 day'"), "pgque.sink")
    for at in ("timestamp'2099-01-01 00:00:00'", "timestamp_ntz'2099-01-01 00:00:00'"):
        jdbc.write(frame(spark, queue, 1, 1, deliver_at=at), "pgque.sink")
    jdbc.write(frame(spark, queue, 3, 1, key="'k'", payload="cast(id as string)"), "pgque.sink")
    found = rows(
        conn,
        "select r.ev_data, r.ev_retry_after - r.ev_time, r.ev_retry_after, r.ev_expires - r.ev_time"
        " from pgque.retry_queue as r join pgque.queue as q on q.queue_id = r.ev_queue where q.queue_name = %s"
        " order by r.ev_id",
        queue,
    )
    assert [r[1].seconds for r in found[:6]] == list(DELAYS.values())
    assert {r[3].days for r in found[:6]} == {1}
    assert {r[2].year for r in found[6:]} <= {2098, 2099} and len(found) == 8
    forced_tick(conn, queue)
    assert [(m.key, m.payload) for m in receive(conn, queue)] == [("k", "2")]
    text = frame(spark, queue, 1, 1, deliver_at="'2099-01-01'")
    assert "deliver_at" in failure(jdbc.write, text, "pgque.sink")
    wrong = frame(spark, queue, 1, 1, delay="'soon'")
    told = failure(jdbc.write, wrong, "pgque.sink")
    assert queue in told and "delay" in told


def test_every_column_of_sink_bulk_reaches_the_message(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    whole = frame(
        spark,
        queue,
        2,
        1,
        type="if(id = 0, 'order.created', null)",
        payload="if(id = 0, 'text ✓ 🐘', null)",
        headers="""if(id = 0, '{"trace": "a1"}', null)""",
    )
    jdbc.write(whole, "pgque.sink_bulk")
    forced_tick(conn, queue)
    found = [(m.type, m.payload, m.headers) for m in receive(conn, queue)]
    assert found == [("order.created", "text ✓ 🐘", {"trace": "a1"}), ("default", None, None)]


@both_views
def test_columns_go_by_name_in_any_order_and_case(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str
) -> None:
    columns = frame(spark, queue, 10).selectExpr("payload as PayLoad", "'t' as TYPE", "queue as Queue")
    jdbc.write(columns, view)
    forced_tick(conn, queue)
    assert Counter((m.type, m.payload) for m in receive(conn, queue)) == Counter(
        ("t", str(n)) for n in range(10)
    )


# Expression, what arrives as payload
TYPES = {
    "string": ("'a\"b'", 'a"b'),
    "binary": ("cast('hi' as binary)", "\\x6869"),
    "long": ("cast(7 as long)", "7"),
    "int": ("cast(7 as int)", "7"),
    "double": ("cast(1.5 as double)", "1.5"),
    "decimal": ("cast(1.50 as decimal(5,2))", "1.50"),
    "boolean": ("true", "true"),
    # The driver adds a zone: cast to string before the write.
    "date": ("date'2026-03-01'", "2026-03-01 +00"),
    "array of strings": ("array('a', 'b c')", '{a,"b c"}'),
    "array of ints": ("array(1, 2)", "{1,2}"),
    "string that was a struct": ("to_json(named_struct('a', 1))", '{"a":1}'),
}


@both_views
def test_values_of_simple_types_arrive_as_their_text(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str
) -> None:
    for number, (name, (expression, _)) in enumerate(TYPES.items()):
        assert name
        jdbc.write(frame(spark, queue, 1, 1, payload=expression, type=f"'{number}'"), view)
    forced_tick(conn, queue)
    found = {m.type: m.payload for m in receive(conn, queue)}
    assert {name: found.get(str(n)) for n, name in enumerate(TYPES)} == {k: v for k, (_, v) in TYPES.items()}


@both_views
def test_times_arrive_as_their_text(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str
) -> None:
    for kind in ("timestamp", "timestamp_ntz"):
        jdbc.write(frame(spark, queue, 1, 1, payload=f"{kind}'2026-03-01 12:30:00'"), view)
    forced_tick(conn, queue)
    assert [str(m.payload)[:19] for m in receive(conn, queue)] == ["2026-03-01 12:30:00"] * 2


@pytest.mark.parametrize(
    "expression",
    ["named_struct('a', 1)", "map('a', 1)", "parse_json('{}')", "null"],
    ids=["struct", "map", "variant", "void"],
)
def test_values_without_a_text_are_refused_by_spark(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, expression: str
) -> None:
    for view in VIEWS:
        failure(jdbc.write, frame(spark, queue, 10, payload=expression), view)
    assert arrived(conn, queue) == Counter()


def test_bytes_take_binary_only_unless_the_url_leaves_types_open(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    text = frame(spark, queue, 1, 1, payload_bytes="'A'", payload="cast(null as string)")
    assert "bytea" in failure(jdbc.write, text, "pgque.sink")
    open_url = {**jdbc.options(stringtype="unspecified"), "dbtable": "pgque.sink"}
    text.write.format("jdbc").options(**open_url).mode("append").save()
    forced_tick(conn, queue)
    assert [m.payload_bytes for m in receive(conn, queue)] == [b"A"]


@both_views
@pytest.mark.parametrize("what", ["payload", "headers"])
def test_a_nul_character_takes_its_whole_partition_back(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str, what: str
) -> None:
    text = {
        "payload": "if(id = 150, char(0), 'x')",
        "headers": """if(id = 150, '{"a": "\\\\u0000"}', null)""",
    }
    failure(
        jdbc.write,
        frame(spark, queue, 400, 2, **{"payload": "'x'", what: text[what]}),
        view,
        numPartitions="1",
    )
    assert arrived(conn, queue) == Counter()


# --- Save modes, and names that are not there ---------------------------------------------------------


def shape(conn: Connection) -> list[Any]:
    """Everything that stands in the schema."""
    return rows(
        conn,
        "select c.oid, c.relname, c.relkind, c.relowner, c.relacl::text, c.relhasrules, c.relhastriggers"
        " from pg_class as c where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'v', 'p', 'm', 'f')"
        " order by c.oid",
    )


@both_views
@pytest.mark.parametrize("who", ["writer", "superuser"])
def test_no_save_mode_changes_or_destroys_anything(
    spark: SparkSession,
    jdbc: Any,
    jdbc_as: Callable[[Role], Any],
    roles: Callable[..., Role],
    conn: Connection,
    queue: str,
    view: str,
    who: str,
) -> None:
    if who == "superuser":
        role = roles()
        conn.execute(f"alter role {role.name} superuser".encode())
        jdbc = jdbc_as(role)
    before = shape(conn)
    lost = frame(spark, queue, 10, payload="'lost'")
    failure(jdbc.write, lost, view, "overwrite")
    failure(jdbc.write, lost, view, "overwrite", truncate="true")
    failure(jdbc.write, lost, view, "errorifexists")
    jdbc.write(lost, view, "ignore")
    assert shape(conn) == before
    jdbc.write(frame(spark, queue, 10), view, "append")
    assert arrived(conn, queue) == numbers(10)


def test_a_wrong_table_name_is_refused_and_creates_no_table(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    before = shape(conn)
    assert "permission denied for schema pgque" in failure(jdbc.write, frame(spark, queue, 10), "pgque.sinks")
    assert shape(conn) == before


@both_views
def test_an_unknown_column_is_refused_before_anything_is_sent(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str
) -> None:
    assert "prority" in failure(jdbc.write, frame(spark, queue, 10, prority="1"), view)
    assert arrived(conn, queue) == Counter()


def test_a_role_without_the_grant_is_refused(
    spark: SparkSession,
    jdbc_as: Callable[[Role], Any],
    nobody: Role,
    reader: Role,
    conn: Connection,
    queue: str,
) -> None:
    for role in (nobody, reader):
        for view in VIEWS:
            assert "permission denied" in failure(jdbc_as(role).write, frame(spark, queue, 10), view)
    assert arrived(conn, queue) == Counter()


def test_reading_a_view_gives_no_rows(spark: SparkSession, jdbc: Any, conn: Connection, queue: str) -> None:
    value(conn, "select pgque.send(%s, 'x'::text)", queue)
    for view in VIEWS:
        assert spark.read.format("jdbc").options(**jdbc.options(), dbtable=view).load().collect() == []
    assert arrived(conn, queue) == Counter(["x"])


# --- Errors -------------------------------------------------------------------------------------------


@both_views
@pytest.mark.parametrize("rewrite", [True, False], ids=["rewrite", "plain"])
def test_an_unknown_queue_fails_and_is_named(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str, rewrite: bool
) -> None:
    name = f"gone_{secrets.token_hex(4)}"
    bad = frame(spark, queue, 1_000, 1, queue=f"if(id = 700, '{name}', '{queue}')", payload="'secret-4711'")
    told = failure(jdbc.write, bad, view, rewrite=rewrite)
    assert name in told
    assert "secret-4711" not in told  # logServerErrorDetail=false
    assert arrived(conn, queue) == Counter()


@both_views
def test_a_queue_of_null_fails(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str
) -> None:
    bad = frame(spark, queue, 1_000, 1, queue=f"if(id = 700, null, '{queue}')")
    assert "queue" in failure(jdbc.write, bad, view).lower()
    without = spark.range(10).selectExpr("cast(id as string) as payload")
    assert "queue" in failure(jdbc.write, without, view).lower()
    assert arrived(conn, queue) == Counter()


@both_views
def test_a_paused_queue_fails_and_is_named(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str
) -> None:
    value(conn, "select pgque.pause(%s)", queue)
    told = failure(jdbc.write, frame(spark, queue, 100), view)
    assert queue in told and "paused" in told
    value(conn, "select pgque.resume(%s)", queue)
    assert arrived(conn, queue) == Counter()
    jdbc.write(frame(spark, queue, 100), view)
    assert arrived(conn, queue) == numbers(100)


@both_views
@pytest.mark.parametrize("headers", ["[1]", "{", '"a"', "null", "nonsense"])
def test_headers_that_are_no_object_fail_and_name_the_queue(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str, headers: str
) -> None:
    told = failure(
        jdbc.write,
        frame(spark, queue, 100, headers=f"if(id = 70, '{headers}', null)"),
        view,
        numPartitions="1",
    )
    assert queue in told and "headers" in told
    assert arrived(conn, queue) == Counter()


def test_text_and_bytes_in_one_row_fail_and_name_the_queue(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str
) -> None:
    told = failure(jdbc.write, frame(spark, queue, 10, payload_bytes="X'00'"), "pgque.sink")
    assert queue in told and "both text and bytes" in told
    assert arrived(conn, queue) == Counter()


# --- Transactions -------------------------------------------------------------------------------------

LEVELS = ["READ_UNCOMMITTED", "READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE", "NONE"]


@pytest.fixture
def gate(conn: Connection, jdbc: Any, spark: SparkSession) -> Callable[[str], DataFrame]:
    """gate(queue): 100 rows of one partition, which stop after the first 60 until the test lets go of a lock.

    The rows come out of the database through a cursor, and row 61 waits for the lock that conn holds.
    """
    value(conn, "select pg_advisory_lock(815)")

    def do(queue: str) -> DataFrame:
        source = (
            f"select '{queue}' as queue, g::text as payload, case when g = 60 then pg_advisory_lock_shared(815)::text end as type"
            " from generate_series(0, 99) as g"
        )
        options = {**jdbc.options(), "query": source, "fetchsize": "10"}
        return spark.read.format("jdbc").options(**options).load()

    return do


@both_views
@pytest.mark.parametrize("level", LEVELS)
def test_a_write_that_a_rotation_overtakes_loses_nothing(
    spark: SparkSession,
    jdbc: Any,
    conn: Connection,
    queue: str,
    view: str,
    level: str,
    gate: Callable[[str], DataFrame],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    def writers() -> list[Any]:
        return rows(
            conn,
            "select a.backend_xid is not null from pg_stat_activity as a"
            " where a.usename = %s and a.wait_event is distinct from 'advisory' and a.query ilike '%%insert%%'",
            jdbc.user,
        )

    def waits() -> bool:
        return bool(
            value(
                conn,
                "select count(*) from pg_stat_activity where usename = %s and wait_event = 'advisory'",
                jdbc.user,
            )
        )

    write = background(
        lambda _: jdbc.write(gate(queue), view, isolationLevel=level, batchsize="10", numPartitions="1")
    )
    wait_until(lambda: waits() or write.done, "the source waits", 60)
    assert not write.done
    # NONE has committed what came so far; the others hold their transaction open.
    assert writers() == [(level != "NONE",)]
    before = leaf(conn, queue)
    got = arrived(conn, queue)
    assert got == (numbers(60) if level == "NONE" else Counter())
    value(conn, "select pgque.send(%s, 'other'::text)", queue)
    got += arrived(conn, queue)
    rotate(conn, queue)
    assert leaf(conn, queue) != before
    for _ in range(3):
        value(conn, "select pgque.send(%s, 'other'::text)", queue)
        got += arrived(conn, queue)
        rotate(conn, queue)
    value(conn, "select pg_advisory_unlock(815)")
    write.result(60)
    got += arrived(conn, queue)
    rotate(conn, queue)
    got += arrived(conn, queue)
    assert got == numbers(100) + Counter({"other": 4})


def flaky(
    spark: SparkSession, queue: str, folder: Path, failures: int, *, dedup: str | None = None, parts: int = 2
) -> DataFrame:
    """Return 2,000 rows in parts; the last part fails after 700 of its rows, as often as said."""
    pad = "x" * 500  # enough rows leave the Python worker before it fails
    half = 2_000 // parts

    def make(part: int, _: Iterator[Any]) -> Iterator[Any]:
        for n in range(half):
            if n == 700 and part == parts - 1:
                tries = len(list(folder.iterdir()))
                if tries < failures:
                    (folder / str(tries)).touch()
                    raise RuntimeError("this task fails")
            row = (queue, f"{part * half + n} {pad}")
            yield row if dedup is None else (*row, dedup, 5, part, parts)

    schema = "queue string, payload string"
    if dedup is not None:
        schema += ", sink_id string, epoch long, part int, parts int"
    rdd = spark.sparkContext.parallelize(range(parts), parts).mapPartitionsWithIndex(make)
    return spark.createDataFrame(rdd, schema)


def short(found: Counter[str | None]) -> Counter[str | None]:
    """Leave out the padding."""
    return Counter({(k or "").split(" ")[0]: n for k, n in found.items()})


@both_views
def test_a_task_that_fails_and_is_retried_doubles_nothing(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str, tmp_path: Path
) -> None:
    before = last_id(conn, queue)
    jdbc.write(flaky(spark, queue, tmp_path, 1), view, batchsize="100")
    assert len(list(tmp_path.iterdir())) == 1
    # The first attempt had inserted rows: their ids are gone.
    assert last_id(conn, queue) - before > 2_001
    assert short(arrived(conn, queue)) == numbers(2_000) + Counter({"mark": 2})


@both_views
def test_a_session_that_is_ended_is_made_up_for(
    spark: SparkSession,
    jdbc: Any,
    conn: Connection,
    queue: str,
    view: str,
    gate: Callable[[str], DataFrame],
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    inside = (
        "select a.pid from pg_stat_activity as a where a.usename = %s and a.state = 'idle in transaction'"
        " and a.backend_xid is not null"
    )
    waits = "select count(*) from pg_stat_activity where usename = %s and wait_event = 'advisory'"
    write = background(lambda _: jdbc.write(gate(queue), view, batchsize="10", numPartitions="1"))
    wait_until(lambda: value(conn, waits, jdbc.user) or write.done, "the source waits", 60)
    ((pid,),) = rows(conn, inside, jdbc.user)
    assert value(conn, "select pg_terminate_backend(%s, 10000)", pid)
    value(conn, "select pg_advisory_unlock(815)")
    write.result(60)
    assert arrived(conn, queue) == numbers(100)


@both_views
def test_without_transactions_a_retried_task_doubles(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str, tmp_path: Path
) -> None:
    jdbc.write(flaky(spark, queue, tmp_path, 1), view, isolationLevel="NONE", batchsize="100")
    found = short(arrived(conn, queue))
    assert set(found) == set(numbers(2_000))
    assert max(found.values()) == 2


@both_views
def test_a_job_that_fails_leaves_whole_partitions_or_none(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, view: str, tmp_path: Path
) -> None:
    assert "this task fails" in failure(jdbc.write, flaky(spark, queue, tmp_path, 2), view, batchsize="100")
    left = short(arrived(conn, queue))
    first = Counter(str(n) for n in range(1_000))
    assert left in (Counter(), first)
    # What stayed comes again when the job is run again.
    jdbc.write(flaky(spark, queue, tmp_path, 2), view)
    assert left + short(arrived(conn, queue)) == left + numbers(2_000)


# --- Parts of an epoch --------------------------------------------------------------------------------


def dedup(
    spark: SparkSession, queue: str, sink: str, epoch: int = 0, parts: int = 2, count: int = 2_000
) -> DataFrame:
    """Return rows that name their part of an epoch."""
    return frame(
        spark,
        queue,
        count,
        parts,
        sink_id=f"'{sink}'",
        epoch=f"cast({epoch} as long)",
        part="spark_partition_id()",
        parts=str(parts),
    )


@pytest.fixture
def sink() -> str:
    """A new name for a sink."""
    return f"sink_{secrets.token_hex(5)}"


@pytest.mark.parametrize("rewrite", [True, False], ids=["rewrite", "plain"])
def test_a_replay_is_skipped(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, sink: str, rewrite: bool
) -> None:
    for _ in range(3):
        jdbc.write(dedup(spark, queue, sink), "pgque.sink", rewrite=rewrite)
    assert arrived(conn, queue) == numbers(2_000)
    jdbc.write(dedup(spark, queue, sink, epoch=1), "pgque.sink", rewrite=rewrite)
    assert arrived(conn, queue) == numbers(2_000)
    jdbc.write(dedup(spark, queue, f"{sink}_other"), "pgque.sink", rewrite=rewrite)
    assert arrived(conn, queue) == numbers(2_000)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_a_job_that_failed_is_made_whole_by_its_replay(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, sink: str, tmp_path: Path, level: str
) -> None:
    def write() -> None:
        jdbc.write(
            flaky(spark, queue, tmp_path, 3, dedup=sink), "pgque.sink", isolationLevel=level, batchsize="100"
        )

    failure(write)
    write()  # one more failure, then the task's retry
    assert len(list(tmp_path.iterdir())) == 3
    write()
    assert short(arrived(conn, queue)) == numbers(2_000)


def test_coalesced_partitions_keep_their_parts(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, sink: str
) -> None:
    jdbc.write(dedup(spark, queue, sink, parts=4), "pgque.sink", numPartitions="1")
    assert arrived(conn, queue) == numbers(2_000)
    # The parts are claimed, whichever partitions carry them.
    jdbc.write(dedup(spark, queue, sink, parts=4), "pgque.sink", numPartitions="3")
    jdbc.write(dedup(spark, queue, sink, parts=4), "pgque.sink")
    assert arrived(conn, queue) == Counter()


def test_a_replay_in_other_partitions_is_refused(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, sink: str
) -> None:
    jdbc.write(dedup(spark, queue, sink, parts=2), "pgque.sink")
    for parts in (1, 4):
        told = failure(jdbc.write, dedup(spark, queue, sink, parts=parts), "pgque.sink")
        assert sink in told and "parts" in told
    assert arrived(conn, queue) == numbers(2_000)


def test_an_epoch_older_than_the_newest_is_refused(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, sink: str
) -> None:
    jdbc.write(dedup(spark, queue, sink, epoch=7), "pgque.sink")
    told = failure(jdbc.write, dedup(spark, queue, sink, epoch=6), "pgque.sink")
    assert sink in told and "older" in told
    assert arrived(conn, queue) == numbers(2_000)


def test_without_transactions_parts_are_refused(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, sink: str
) -> None:
    for _ in range(2):
        told = failure(
            jdbc.write, dedup(spark, queue, sink), "pgque.sink", isolationLevel="NONE", batchsize="100"
        )
        assert sink in told and "transaction" in told
    # What the first statements sent is not taken for the whole.
    assert sum(arrived(conn, queue).values()) < 2_000


@pytest.mark.parametrize("column", ["epoch", "part"])
def test_a_part_that_is_not_named_whole_is_refused(
    spark: SparkSession, jdbc: Any, conn: Connection, queue: str, sink: str, column: str
) -> None:
    told = failure(jdbc.write, dedup(spark, queue, sink).drop(column), "pgque.sink")
    assert sink in told
    assert arrived(conn, queue) == Counter()


def test_two_writers_of_one_part_follow_each_other(
    spark: SparkSession,
    jdbc: Any,
    conn: Connection,
    connect: Callable[..., Connection],
    writer: Role,
    queue: str,
    sink: str,
    background: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    first = connect(writer.dsn, autocommit=False)
    insert = (
        "insert into pgque.sink (queue, payload, sink_id, epoch, part)"
        " select %s, g::text, %s, 0, 0 from generate_series(0, 99) as g"
    )
    for end, expected in ((first.rollback, numbers(50)), (first.commit, numbers(100))):
        sink += "x"
        first.execute(insert, [queue, sink])
        twin = background(
            lambda _, sink=sink: jdbc.write(
                dedup(spark, queue, sink, parts=1, count=50).drop("parts"), "pgque.sink"
            )
        )
        wait_until(
            lambda: (
                twin.done  # noqa: B023
                or value(
                    conn,
                    "select count(*) from pg_stat_activity where usename = %s and wait_event_type = 'Lock'",
                    writer.name,
                )
            ),
            "the twin waits",
            60,
        )
        assert not twin.done
        end()
        twin.result(60)
        assert arrived(conn, queue) == expected


# --- COPY ---------------------------------------------------------------------------------------------


@both_views
@pytest.mark.parametrize("way", ["text", "csv", "binary"])
def test_copy_sends(
    conn: Connection, connect: Callable[..., Connection], writer: Role, queue: str, view: str, way: str
) -> None:
    own = connect(writer.dsn)
    lines: list[tuple[str | None, ...]] = [
        (queue, None, str(n), '{"n": 1}' if n % 2 else None) for n in range(1_000)
    ]
    with (
        own.cursor() as cursor,
        cursor.copy(
            f"copy {view} (queue, type, payload, headers) from stdin (format {way})".encode()
        ) as copy,
    ):
        if way == "csv":
            for q, _, payload, headers in lines:
                quoted = "" if headers is None else '"' + headers.replace('"', '""') + '"'
                copy.write(f"{q},,{payload},{quoted}\n")
        else:
            if way == "binary":
                copy.set_types(["text"] * 4)
            for line in lines:
                copy.write_row(line)
    forced_tick(conn, queue)
    found = receive(conn, queue, count=2_000)
    assert [(m.payload, m.type, m.headers) for m in found] == [
        (str(n), "default", {"n": 1} if n % 2 else None) for n in range(1_000)
    ]


@both_views
@pytest.mark.parametrize(
    ("bad", "sqlstate"),
    [(["nowhere", "x", None], "PQ001"), ([None, "x", None], "PQ001"), (["", "x", "[]"], "PQ005")],
    ids=["unknown queue", "no queue", "headers"],
)
def test_copy_of_a_bad_row_sends_nothing(
    conn: Connection,
    connect: Callable[..., Connection],
    writer: Role,
    queue: str,
    view: str,
    bad: list[str | None],
    sqlstate: str,
) -> None:
    own = connect(writer.dsn)
    bad = [queue if bad[0] == "" else bad[0], *bad[1:]]
    with pytest.raises(psycopg.Error) as caught, own.cursor() as cursor:  # noqa: SIM117
        with cursor.copy(f"copy {view} (queue, payload, headers) from stdin".encode()) as copy:
            for n in range(100):
                copy.write_row(bad if n == 70 else (queue, str(n), None))
    assert caught.value.sqlstate == sqlstate
    assert arrived(conn, queue) == Counter()


def test_copy_skips_the_replay_of_a_part(
    conn: Connection, connect: Callable[..., Connection], writer: Role, queue: str, sink: str
) -> None:
    for _ in range(2):
        own = connect(writer.dsn)
        with (
            own.cursor() as cursor,
            cursor.copy(b"copy pgque.sink (queue, payload, sink_id, epoch, part) from stdin") as copy,
        ):
            for n in range(100):
                copy.write_row((queue, str(n), sink, 0, 0))
    assert arrived(conn, queue) == numbers(100)
