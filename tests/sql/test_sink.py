"""Sending by INSERT and COPY into the views, once per part of an epoch, and by staged epochs."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from conftest import Role
from sql.helpers import (
    Connection,
    Message,
    change_function,
    dead_tuples,
    drain,
    forced_tick,
    leaf,
    move_clock,
    need_prepared_transactions,
    payloads,
    pump,
    receive,
    refused,
    rotate,
    rows,
    send,
    subscribe,
    tick,
    value,
)

VIEWS = pytest.mark.parametrize("view", ["sink", "sink_bulk"])
ISOLATIONS = pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
OLD = pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])

BAD_HEADERS = ["", "x", "1", '"a"', "[]", "null", '{"a": 1', '{"a": "\\u0000"}', '{"a": 1e1000000}']


def insert(conn: Connection, view: str, *records: dict[str, Any]) -> int:
    """Insert rows with one statement; return how many the server says were inserted."""
    names = list(records[0])
    statement = sql.SQL("insert into pgque.{} ({}) values {}").format(
        sql.Identifier(view),
        sql.SQL(", ").join(map(sql.Identifier, names)),
        sql.SQL(", ").join(
            [sql.SQL("({})").format(sql.SQL(", ").join([sql.Placeholder()] * len(names)))] * len(records)
        ),
    )
    return conn.execute(statement, [record[name] for record in records for name in names]).rowcount


def copy(
    conn: Connection, table: str, names: str, records: Iterable[Sequence[Any]], types: Sequence[str] = ()
) -> int:
    """COPY rows into a view or table of pgque, binary if types are given; return how many were stored."""
    how = " (format binary)" if types else ""
    with conn.cursor() as cursor:
        with cursor.copy(f"copy {table} ({names}) from stdin{how}".encode()) as stream:
            if types:
                stream.set_types(list(types))
            for record in records:
                stream.write_row(list(record))
        return cursor.rowcount


def part_of(
    queue: str, payload: str, epoch: int = 0, part: int = 0, parts: int | None = None
) -> dict[str, Any]:
    """One row of a part of an epoch, for the sink of the queue's name."""
    return {
        "queue": queue,
        "payload": payload,
        "sink_id": queue,
        "epoch": epoch,
        "part": part,
        "parts": parts,
    }


def begin(conn: Connection, sink: str | None, epoch: int | None = 0) -> tuple[uuid.UUID, str]:
    """Begin an attempt; return it and the table to copy into."""
    ((attempt, stage),) = rows(conn, "select attempt, stage from pgque.sink_begin(%s, %s)", sink, epoch)
    return attempt, stage


def stage(conn: Connection, sink: str, queue: str, texts: Iterable[str], epoch: int | None = 0) -> uuid.UUID:
    """Stage payloads as a task does; return the attempt."""
    attempt, table = begin(conn, sink, epoch)
    copy(
        conn, table, "attempt, n, queue, payload", ((attempt, n, queue, text) for n, text in enumerate(texts))
    )
    return attempt


def commit(
    conn: Connection,
    sink: str,
    attempts: Sequence[Any],
    count: int | None,
    epoch: int | None = 0,
    servers: list[str] | None = None,
) -> str:
    """Commit an epoch, or a server's share of it."""
    done: str = value(
        conn,
        "select pgque.sink_commit(%s, %s, %s::uuid[], %s, %s)",
        sink,
        epoch,
        list(attempts),
        count,
        servers,
    )
    return done


def listed(conn: Connection, sink: str, servers: list[str], epoch: int = 0) -> list[str]:
    """Store the servers of an epoch; return those that are stored."""
    found: list[str] = value(conn, "select pgque.sink_servers(%s, %s, %s::text[])", sink, epoch, servers)
    return found


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(n) for n in range(first, first + count)]


def sent_back(conn: Connection, queue: str) -> list[Message]:
    """Tick and receive everything there is, leaving the batch open."""
    forced_tick(conn, queue)
    return receive(conn, queue, count=100_000)


def sent_texts(conn: Connection, queue: str) -> list[str | None]:
    """Tick, receive and ack everything; return the payloads."""
    forced_tick(conn, queue)
    return payloads(conn, queue, count=100_000)


def staged_bytes(conn: Connection) -> int:
    """Bytes of what is staged."""
    return int(
        value(
            conn,
            "select sum(pg_relation_size(c.oid)) from pg_class as c"
            " where c.relnamespace = 'pgque'::regnamespace and c.relname ~ '^sink_(stage|attempt)_[01]$'",
        )
    )


def epoch_bytes(conn: Connection) -> list[int]:
    return [value(conn, f"select pg_relation_size('pgque.sink_epoch_{n}')") for n in (0, 1)]


def compact_early(conn: Connection) -> None:
    """Let the leaves of stage and epochs turn when they hold anything, not many megabytes."""
    change_function(conn, "_compact_stage", ("67108864", "0"))
    change_function(conn, "_compact_epochs", ("4194304", "0"))


def maintain(conn: Connection, calls: int = 3) -> None:
    """Maintain the shared tables; unlike maint() this fails when a step of it does."""
    for _ in range(calls):
        value(conn, "select pgque.maint_tables()")


def turn_stage(conn: Connection, calls: int = 1) -> None:
    """Stage more dead rows than there are live ones, so that the leaf turns; then compact."""
    sink = f"dead {uuid.uuid4()}"
    for _ in range(8):
        stage(conn, sink, "q", ["dead"])
    assert commit(conn, sink, [], 0) == "applied"
    maintain(conn, calls)


@pytest.fixture
def ready(own: Connection) -> Connection:
    """A database of its own with a queue q and a consumer c, that compacts early."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    compact_early(own)
    turn_stage(own, 4)
    assert staged_bytes(own) == 0
    return own


# --- the views --------------------------------------------------------------------------------------------


@VIEWS
def test_a_row_is_a_message_of_the_default_type(conn: Connection, subscribed: str, view: str) -> None:
    assert insert(conn, view, {"queue": subscribed, "payload": "x"}) == 1
    (message,) = sent_back(conn, subscribed)
    assert (message.type, message.payload) == ("default", "x")
    assert [message.headers, message.extra1, message.payload_bytes, message.key] == [None] * 4
    assert message.retry_count == 0
    assert value(conn, "select clock_timestamp() - %s < '1 minute'", message.created_at)


@VIEWS
def test_every_column_travels_with_the_message(conn: Connection, subscribed: str, view: str) -> None:
    record: dict[str, Any] = {
        "queue": subscribed,
        "type": " Ty'pe\\ ",
        "payload": ' é 😀 \\n \n\t {"a":  1}',
        "headers": ' {"b": [1, null],  "a": "😀"} ',
    }
    if view == "sink":
        record["partition_key"] = "key %s %I"
    insert(conn, view, record)
    (message,) = sent_back(conn, subscribed)
    assert (message.type, message.payload) == (record["type"], record["payload"])
    assert message.headers == {"a": "😀", "b": [1, None]}
    assert message.extra1 == record.get("partition_key")


def test_bytes_travel_in_a_column_of_their_own(conn: Connection, subscribed: str) -> None:
    insert(conn, "sink", {"queue": subscribed, "payload_bytes": bytes(range(256))})
    insert(conn, "sink", {"queue": subscribed, "payload_bytes": b""})
    first, second = sent_back(conn, subscribed)
    assert (first.payload, first.payload_bytes) == (None, bytes(range(256)))
    assert (second.payload, second.payload_bytes) == (None, b"")


@VIEWS
def test_a_null_payload_and_an_empty_one_are_kept_apart(conn: Connection, subscribed: str, view: str) -> None:
    insert(conn, view, *({"queue": subscribed, "payload": p} for p in (None, "")))
    assert sent_texts(conn, subscribed) == [None, ""]


@VIEWS
def test_rows_of_one_statement_keep_their_order(conn: Connection, subscribed: str, view: str) -> None:
    insert(conn, view, *({"queue": subscribed, "payload": p} for p in "hgfedcba"))
    done = conn.execute(
        f"insert into pgque.{view} (queue, payload) select %s, g::text from generate_series(1, 3000) as g"
        " order by g %% 7, -g".encode(),
        [subscribed],
    )
    assert done.rowcount == 3_000
    found = sent_back(conn, subscribed)
    assert [m.msg_id for m in found] == list(range(found[0].msg_id, found[0].msg_id + 3_008))
    expected = sorted(range(1, 3_001), key=lambda g: (g % 7, -g))
    assert [m.payload for m in found] == [*"hgfedcba", *map(str, expected)]


@VIEWS
def test_one_statement_sends_to_several_queues(
    conn: Connection, new_queue: Callable[..., str], view: str
) -> None:
    names = [new_queue(), new_queue(f"{view} \\ \"quoted\" 'name' %s %I"), new_queue()]
    for name in names:
        subscribe(conn, name)
    insert(conn, view, *({"queue": names[n % 3], "payload": str(n)} for n in range(300)))
    for n, name in enumerate(names):
        assert sent_texts(conn, name) == [str(i) for i in range(n, 300, 3)]


@VIEWS
def test_an_expression_of_a_row_runs_once(conn: Connection, subscribed: str, view: str) -> None:
    conn.execute("create temp sequence once minvalue 0 start 0")
    conn.execute(
        (
            f"insert into pgque.{view} (queue, type, payload, headers) values "
            + ", ".join(
                ["(substr(%(q)s, 1, 500 + 0 * nextval('once')::int), nextval('once')::text,"
                " nextval('once')::text, jsonb_build_object('n', nextval('once'))::text)"] * 2
            )
        ).encode(),
        {"q": subscribed},
    )  # fmt: skip
    conn.execute(
        f"insert into pgque.{view} (payload, headers, queue, type)"
        " select nextval('once'), jsonb_build_object('n', nextval('once')), %s, nextval('once') + 0 * random()"
        " from generate_series(1, 100)".encode(),
        [subscribed],
    )
    assert value(conn, "select last_value from once") == 307
    found = sent_back(conn, subscribed)
    seen = [int(str(v)) for m in found for v in (m.type, m.payload, m.headers["n"])]
    assert len(found) == 102
    assert sorted(seen) == [n for n in range(308) if n not in (0, 4)]


@VIEWS
def test_a_prepared_statement_sees_what_became_of_its_queue(
    conn: Connection, new_queue: Callable[..., str], view: str
) -> None:
    queue = new_queue()
    statement = f"insert into pgque.{view} (queue, payload) values (%s, %s)".encode()

    def put(payload: str) -> None:
        conn.execute(statement, [queue, payload], prepare=True)

    for n in range(8):
        put(str(n))
    value(conn, "select pgque.pause(%s)", queue)
    refused("PQ013", put, "paused")
    value(conn, "select pgque.resume(%s)", queue)
    value(conn, "select pgque.drop_queue(%s)", queue)
    refused("PQ001", put, "dropped")
    value(conn, "select pgque.create_queue(%s)", queue)
    subscribe(conn, queue)
    put("again")
    assert sent_texts(conn, queue) == ["again"]


@VIEWS
def test_a_queue_made_while_a_statement_runs_gets_its_row_or_is_not_known(
    conn: Connection,
    new_queue: Callable[..., str],
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    view: str,
) -> None:
    blocker = transaction()
    blocker.execute("select pg_advisory_xact_lock(77)")
    statement = f"insert into pgque.{view} (queue, payload) select %s, pg_advisory_xact_lock_shared(77)"
    writer = background(lambda c: rows(c, statement, "made meanwhile " + view))
    wait_for_lock(writer.pid)
    queue = new_queue("made meanwhile " + view)
    subscribe(conn, queue)
    blocker.execute("commit")
    try:
        writer.result()
    except psycopg.Error as error:
        assert error.sqlstate == "PQ001"
        assert sent_texts(conn, queue) == []
    else:
        assert sent_texts(conn, queue) == [""]


def test_the_sink_returns_what_was_inserted(conn: Connection, subscribed: str) -> None:
    found = rows(
        conn,
        "insert into pgque.sink (queue, payload) values (%s, 'x'), (%s, 'y') returning queue, type, payload",
        subscribed,
        subscribed,
    )
    assert found == [(subscribed, None, "x"), (subscribed, None, "y")]
    assert sent_texts(conn, subscribed) == ["x", "y"]


def test_what_sink_bulk_can_not_do_is_refused_and_sends_nothing(conn: Connection, subscribed: str) -> None:
    conn.execute("create temp table t as select 1 as a")
    for statement in (
        "insert into pgque.sink_bulk (queue) values (%s) returning queue",
        "insert into pgque.sink_bulk (queue) values (%s) on conflict do nothing",
        "with d as (delete from t returning a) insert into pgque.sink_bulk (queue, payload) select %s, d.a from d",
    ):
        refused("0A000", rows, conn, statement, subscribed)
    assert sent_texts(conn, subscribed) == []
    assert value(conn, "select count(*) from t") == 1


def test_rows_that_a_statement_deletes_elsewhere_become_messages(conn: Connection, subscribed: str) -> None:
    conn.execute("create temp table t as select g as a from generate_series(1, 50) as g")
    conn.execute(
        "with d as (delete from t where a %% 2 = 0 returning a)"
        " insert into pgque.sink (queue, payload) select %s, d.a from d order by d.a",
        [subscribed],
    )
    assert sent_texts(conn, subscribed) == [str(n) for n in range(2, 51, 2)]
    assert value(conn, "select count(*) from t") == 25


@VIEWS
def test_copy_sends_as_text_as_csv_and_binary(conn: Connection, subscribed: str, view: str) -> None:
    names = "queue, type, payload, headers"
    records = [(subscribed, "t", f" {n}\t\\N\n", '{"n": "é"}') for n in range(300)]
    records[7] = (subscribed, None, None, None)  # type: ignore[assignment]
    assert copy(conn, f"pgque.{view}", names, records) == 300
    assert copy(conn, f"pgque.{view}", names, records, ["text"] * 4) == 300
    with conn.cursor().copy(
        f"copy pgque.{view} (payload, queue) from stdin (format csv, encoding 'LATIN1')".encode()
    ) as stream:
        stream.write(f'"é,""x""","{subscribed}"\n'.encode("latin-1"))
    found = sent_back(conn, subscribed)
    assert [m.msg_id for m in found] == list(range(found[0].msg_id, found[0].msg_id + 601))
    expected = [(r[1] or "default", r[2], {"n": "é"} if r[3] else None) for r in records]
    assert [(m.type, m.payload, m.headers) for m in found] == [
        *expected,
        *expected,
        ("default", 'é,"x"', None),
    ]


def test_copy_takes_bytes_and_keys(conn: Connection, subscribed: str) -> None:
    records = [(subscribed, bytes([n, 0, 255]), f"k{n}") for n in range(100)]
    for types in ([], ["text", "bytea", "text"]):
        copy(conn, "pgque.sink", "queue, payload_bytes, partition_key", records, types)
    assert [(m.payload_bytes, m.extra1) for m in sent_back(conn, subscribed)] == [r[1:] for r in records] * 2


@VIEWS
@pytest.mark.parametrize("how", ["insert", "copy"])
def test_one_bad_row_keeps_the_others_from_being_sent(
    conn: Connection, new_queue: Callable[..., str], subscribed: str, view: str, how: str
) -> None:
    paused = new_queue()
    value(conn, "select pgque.pause(%s)", paused)

    def put(*records: tuple[str | None, str | None]) -> None:
        if how == "copy":
            copy(conn, f"pgque.{view}", "queue, headers", records)
        else:
            insert(conn, view, *({"queue": q, "headers": h} for q, h in records))

    good = (subscribed, None)
    unknown = f"no \"{subscribed}\" 'q' %s %I \\"
    bad: list[tuple[str, str | None, str | None]] = [
        ("PQ001", unknown, None),
        ("PQ001", None, None),
        ("PQ001", "", None),
        ("PQ001", "x" * 100_000, None),
        ("PQ013", paused, None),
        *(("PQ005", subscribed, headers) for headers in BAD_HEADERS),
    ]
    for sqlstate, name, headers in bad:
        for at in range(3):
            records: list[tuple[str | None, str | None]] = [good, good]
            records.insert(at, (name, headers))
            error = refused(sqlstate, put, *records)
            assert (name or "") in (error.diag.message_primary or "").replace('""', '"')
        refused(sqlstate, put, (name, headers))
    assert sent_texts(conn, subscribed) == []
    value(conn, "select pgque.resume(%s)", paused)
    assert tick(conn, paused) is None
    put(good)
    assert sent_texts(conn, subscribed) == [None]


def test_a_message_has_text_or_bytes_but_not_both(conn: Connection, subscribed: str) -> None:
    both = {"payload": "", "payload_bytes": b""}
    assert subscribed in str(refused("PQ005", insert, conn, "sink", {"queue": subscribed, **both}))
    error = refused_with_pgque_error(insert, conn, "sink", {"queue": None, **both})
    assert error.sqlstate in ("PQ001", "PQ005")
    assert sent_texts(conn, subscribed) == []


def refused_with_pgque_error(call: Callable[..., Any], *args: Any) -> psycopg.Error:
    with pytest.raises(psycopg.Error) as caught:
        call(*args)
    assert str(caught.value.sqlstate).startswith("PQ"), f"{caught.value.sqlstate}: {caught.value}"
    return caught.value


@VIEWS
def test_nothing_destroys_or_changes_a_view(
    conn: Connection, writer: Any, subscribed: str, view: str
) -> None:
    insert(conn, view, {"queue": subscribed, "payload": "x"})
    with psycopg.connect(writer.dsn, autocommit=True) as w:
        assert rows(w, f"select * from pgque.{view}") == []
        assert rows(w, f"select 1 from pgque.{view} where 1 = 0") == []
        for role in (w, conn):
            for statement, states in (
                (f"update pgque.{view} set payload = 'y'", ("42501", "55000")),
                (f"delete from pgque.{view}", ("42501", "55000")),
                (f"truncate pgque.{view}", ("42501", "42809")),
                (f"drop table pgque.{view}", ("42501", "42809")),
                (f"create table pgque.{view} (queue text)", ("42501", "42P07")),
                (f"create table if not exists pgque.{view} (queue text)", ("42501", None)),
                (f"lock table pgque.{view}", ("42501", None)),
                (f"copy pgque.{view} to stdout", ("42809",)),
            ):
                try:
                    with role.transaction(force_rollback=True):
                        role.execute(statement.encode())
                except psycopg.Error as error:
                    assert error.sqlstate in states, (statement, error)
                else:
                    assert None in states and role is conn, statement
        for statement in (
            f"drop view pgque.{view}",
            f"create or replace view pgque.{view} as select 1 as queue",
            f"alter view pgque.{view} rename to gone",
            f"create rule r as on delete to pgque.{view} do instead nothing",
            f"create trigger t instead of delete on pgque.{view} for each row execute function pgque._sink_row()",
        ):
            refused("42501", rows, w, statement)
    assert sent_texts(conn, subscribed) == ["x"]


def test_a_writer_does_all_of_it_and_reads_no_message(
    conn: Connection, writer: Any, new_queue: Callable[..., str], subscribed: str
) -> None:
    later = new_queue()
    subscribe(conn, later)
    with psycopg.connect(writer.dsn, autocommit=True) as w:
        for queue in (subscribed, later):
            for view in ("sink", "sink_bulk"):
                insert(w, view, {"queue": queue, "type": "t", "payload": "1", "headers": "{}"})
                w.execute(
                    f"insert into pgque.{view} (queue, payload) select %s, '2'".encode(),
                    [queue],
                    prepare=True,
                )
                copy(w, f"pgque.{view}", "queue, payload", [(queue, "3")])
                copy(w, f"pgque.{view}", "queue, payload", [(queue, "4")], ["text", "text"])
            insert(w, "sink", part_of(queue, "5"))
            attempt = stage(w, queue, queue, ["6", "7"], 1)
            assert commit(w, queue, [attempt], 2, 1) == "applied"
            assert sent_texts(conn, queue) == [*"1234123456", "7"]
        attempt, table = begin(w, subscribed, 2)
        copy(w, table, "attempt, n, queue, payload", [(attempt, 0, subscribed, "secret")])
        ((event_table,),) = rows(conn, "select pgque.current_event_table(%s)", subscribed)
        tables = [f"pgque.sink_{kind}_{n}" for kind in ("stage", "attempt", "epoch") for n in (0, 1)]
        for relation in (*tables, "pgque.event", event_table, "pgque.queue", "pgque.dead_letter"):
            refused("42501", rows, w, f"select count(*) from {relation}")
            refused("42501", rows, w, f"copy {relation} to stdout")
            for statement in ("delete from", "truncate"):
                refused("42501", rows, w, f"{statement} {relation}")
        for n in (0, 1):
            row = f"insert into pgque.sink_stage_{n} (attempt, n, queue) values ('{attempt}', 9, 'q')"
            refused("42501", rows, w, row + " returning payload")
            refused("42501", rows, w, row + " on conflict (attempt, n) do update set payload = 'y'")
            refused(
                "42501",
                rows,
                w,
                f"insert into pgque.sink_attempt_{n} select gen_random_uuid(), 's', 1, now()",
            )
            refused(
                "42501",
                rows,
                w,
                f"insert into pgque.sink_epoch_{n} (sink_id, epoch, part) values ('s', 1, -1)",
            )
        for statement in (
            "select nextval('pgque.sink_leaf')",
            "update pgque.journal set journal_cur = 1",
            f"select setval(q.queue_event_seq, 1) from pgque.queue as q where '{subscribed}' <> ''",
            "select pgque.maint_tables()",
            "select pgque._claim_part('s', 0, 0, 1)",
        ):
            refused("42501", rows, w, statement)


@pytest.mark.parametrize("role", ["reader", "nobody"])
def test_who_may_not_write_can_not_use_the_sinks(
    subscribed: str, request: pytest.FixtureRequest, role: str
) -> None:
    with psycopg.connect(request.getfixturevalue(role).dsn, autocommit=True) as r:
        for view in ("sink", "sink_bulk"):
            refused("42501", insert, r, view, {"queue": subscribed})
            refused("42501", copy, r, f"pgque.{view}", "queue", [(subscribed,)])
            refused("42501", rows, r, f"select * from pgque.{view}")
        refused("42501", begin, r, subscribed)
        refused("42501", commit, r, subscribed, [], 0)
        for n in (0, 1):
            refused(
                "42501",
                copy,
                r,
                f"pgque.sink_stage_{n}",
                "attempt, n, queue",
                [(uuid.uuid4(), 0, subscribed)],
            )


# --- old snapshots, rotations, restores -------------------------------------------------------------------


def turn(conn: Connection, queue: str) -> None:
    """Send, deliver and rotate once, in transactions of their own."""
    send(conn, queue, "between")
    tick(conn, queue)
    drain(conn, queue)
    assert rotate(conn, queue) == 1
    forced_tick(conn, queue)
    drain(conn, queue)


WAYS: dict[str, Callable[[Connection, str], object]] = {
    "sink": lambda c, q: insert(c, "sink", {"queue": q, "payload": "old"}),
    "sink_bulk": lambda c, q: insert(c, "sink_bulk", {"queue": q, "payload": "old"}),
    "part": lambda c, q: insert(c, "sink", part_of(q, "old")),
    "copy": lambda c, q: copy(c, "pgque.sink", "queue, payload", [(q, "old")]),
    "copy bulk": lambda c, q: copy(c, "pgque.sink_bulk", "queue, payload", [(q, "old")]),
}


@ISOLATIONS
def test_a_row_written_with_a_snapshot_older_than_rotations_is_delivered_or_refused(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    for way, rotations in [*zip(WAYS, (1, 2, 3, 2, 1), strict=True), ("sink", 3), ("sink_bulk", 1)]:
        producer = transaction(isolation)
        for _ in range(rotations):
            turn(conn, subscribed)
        try:
            WAYS[way](producer, subscribed)
            forced_tick(conn, subscribed)
            drain(conn, subscribed)
            rotate(conn, subscribed)
            producer.execute("commit")
        except psycopg.errors.SerializationFailure:
            assert isolation != "read committed"
            producer.execute("rollback")
            WAYS[way](producer, subscribed)
        for _ in range(4):
            rotate(conn, subscribed)
        tick(conn, subscribed)
        for _ in range(4):
            rotate(conn, subscribed)
        assert payloads(conn, subscribed) == ["old"], (way, rotations)


@pytest.mark.parametrize("way", WAYS)
def test_a_transaction_has_its_id_before_it_draws_that_of_a_message(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    way: str,
) -> None:
    """Whoever looks for a message by its id relies on that (see _span in the SQL)."""
    blocker = transaction()
    sequence = value(
        conn, "select q.queue_event_seq::text from pgque.queue as q where q.queue_name = %s", subscribed
    )
    blocker.execute(f"alter sequence {sequence} cache 1".encode())
    sender = background(lambda c: WAYS[way](c, subscribed))
    wait_for_lock(sender.pid)
    has_id = "select a.backend_xid is not null from pg_catalog.pg_stat_activity as a where a.pid = %s"
    assert value(conn, has_id, sender.pid)
    blocker.execute("rollback")
    sender.result()
    tick(conn, subscribed)
    assert payloads(conn, subscribed) == ["old"]


@VIEWS
@OLD
def test_a_writer_that_began_before_rotations_and_goes_on_loses_nothing(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], view: str, isolation: str
) -> None:
    producer = transaction(isolation)
    insert(producer, view, {"queue": subscribed, "payload": "0"})
    for number in (1, 2, 3):
        send(conn, subscribed, "between")
        tick(conn, subscribed)
        drain(conn, subscribed)
        rotate(conn, subscribed)
        insert(producer, view, {"queue": subscribed, "payload": str(number)})
    producer.execute("commit")
    for _ in range(3):
        rotate(conn, subscribed)
    tick(conn, subscribed)
    rotate(conn, subscribed)
    assert payloads(conn, subscribed, count=3) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("way", ["sink", "sink_bulk", "staged"])
def test_a_writer_stopped_between_reading_the_queue_and_storing_is_delivered(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    way: str,
) -> None:
    turn(conn, subscribed)
    send(conn, subscribed, "between")
    attempts = [stage(conn, subscribed, subscribed, ["old"])] if way == "staged" else []
    blocker = transaction()
    blocker.execute(f"lock table {leaf(conn, subscribed)} in share mode".encode())
    if way == "staged":
        stopped = background(lambda c: commit(c, subscribed, attempts, 1))
    else:
        stopped = background(lambda c: WAYS[way](c, subscribed))
    wait_for_lock(stopped.pid)
    for _ in range(2):
        forced_tick(conn, subscribed)
        drain(conn, subscribed)
        assert rotate(conn, subscribed) == 1
        send(conn, subscribed, "between")
    forced_tick(conn, subscribed)
    drain(conn, subscribed)
    blocker.execute("commit")
    stopped.result()
    for _ in range(3):
        rotate(conn, subscribed)
    tick(conn, subscribed)
    for _ in range(3):
        rotate(conn, subscribed)
    assert payloads(conn, subscribed) == ["old"]


def test_a_row_opens_a_queue_that_came_out_of_a_dump(
    own: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    attempts: dict[str, uuid.UUID] = {}
    ways: dict[str, Callable[[Connection, str], object]] = {
        **WAYS,
        "staged": lambda c, q: commit(c, q, [attempts[q]], 1),
    }
    for way in ways:
        value(own, "select pgque.create_queue(%s)", way)
        for name in ("c", "other"):
            subscribe(own, way, name)
        send(own, way, "before")
        attempts[way] = stage(own, way, way, ["old"])
    # What loading a dump does to the row.
    own.execute("update pgque.queue set queue_xid = '7'")
    for way, do in ways.items():
        stale = transaction("repeatable read", own_dsn)
        refused("25000", do, stale, way)
        stale.execute("rollback")
        do(own, way)
        insert(own, "sink_bulk", {"queue": way, "payload": "later"})
    pump(own)
    for way in ways:
        forced_tick(own, way)
        for name in ("c", "other"):
            assert sorted(map(str, payloads(own, way, name))) == ["before", "later", "old"], way


# --- parts of epochs --------------------------------------------------------------------------------------


def test_a_part_that_came_out_of_a_dump_is_left_out_by_a_transaction_with_the_id_that_wrote_it(
    own: Connection, connect: Callable[..., Connection], own_dsn: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    part = part_of("q", "a", 3, 1)
    assert insert(own, "sink", part) == 1
    replay = connect(own_dsn)
    with replay.transaction():
        replay.execute("update pgque.sink_epoch_0 set txid = pg_current_xact_id()")
        assert insert(replay, "sink", part) == 0


def test_a_part_that_was_written_is_left_out_whole_when_it_is_written_again(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    first = [part_of(subscribed, p, 3, 1) for p in "abc"]
    with conn.transaction():
        assert [insert(conn, "sink", r) for r in first] == [1, 1, 1]
    replay = connect()
    with replay.transaction():
        assert [insert(replay, "sink", r) for r in first] == [0, 0, 0]
        assert insert(replay, "sink", *first) == 0
        assert insert(replay, "sink", *(r | {"part": 0} for r in first)) == 3
    third = connect()
    names = "queue, payload, sink_id, epoch, part"
    copied = [(subscribed, "x", subscribed, 3, n % 2) for n in range(10)]
    copy(third, "pgque.sink", names, copied)
    copy(connect(), "pgque.sink", names, [(*r[:4], 2) for r in copied])
    assert sent_texts(conn, subscribed) == [*"abcabc", *"x" * 10]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_twins_follow_each_other_and_one_of_them_writes(
    subscribed: str,
    conn: Connection,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    end: str,
) -> None:
    first = transaction()
    insert(first, "sink", part_of(subscribed, "first"))
    second = background(
        lambda c: [insert(c, "sink", part_of(subscribed, p)) for p in ("second", "second too")], transaction()
    )
    wait_for_lock(second.pid)
    insert(first, "sink", part_of(subscribed, "first too"))
    first.execute(end.encode())
    written = second.result()
    second.connection.execute("commit")
    if end == "commit":
        assert written == [0, 0]
        assert sent_texts(conn, subscribed) == ["first", "first too"]
    else:
        assert written == [1, 1]
        assert sent_texts(conn, subscribed) == ["second", "second too"]


def test_parts_of_one_epoch_do_not_wait_for_each_other(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    tasks = [transaction() for _ in range(4)]
    for n, task in enumerate(tasks):
        task.execute("set lock_timeout = '5s'")
        insert(task, "sink", part_of(subscribed, str(n), 0, n, 4))
    for task in reversed(tasks):
        task.execute("commit")
    assert sent_texts(conn, subscribed) == numbers(4)


def test_one_transaction_writes_several_parts_row_by_row(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    insert(conn, "sink", part_of(subscribed, "other", 0, 2))
    work = [part_of(subscribed, str(n), 0, n % 3) for n in range(30)]
    kept = [str(n) for n in range(30) if n % 3 != 2]
    task = connect()
    with task.transaction():
        for record in work[:10]:
            assert insert(task, "sink", record) == (record["part"] != 2)
        assert insert(task, "sink", *work[10:20]) == 7
        names = "queue, payload, sink_id, epoch, part"
        copy(task, "pgque.sink", names, [[r[n] for n in names.split(", ")] for r in work[20:]])
    replay = connect()
    assert insert(replay, "sink", *work) == 0
    assert sent_texts(conn, subscribed) == ["other", *kept]


def test_many_parts_in_turn_lose_no_row(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    statement = (
        "insert into pgque.sink (queue, payload, sink_id, epoch, part)"
        " select %s, g::text, %s, 0, g %% 600 from generate_series(0, 1499) as g"
    )
    with conn.transaction():
        assert conn.execute(statement, [subscribed, subscribed]).rowcount == 1_500
        assert insert(conn, "sink", part_of(subscribed, "last", 0, 0)) == 1
    assert connect().execute(statement, [subscribed, subscribed]).rowcount == 0
    refused("PQ016", insert, conn, "sink", part_of(subscribed, "autocommit", 0, 0))
    refused("PQ016", insert, conn, "sink", part_of(subscribed, "autocommit", 0, 599))
    assert sent_texts(conn, subscribed) == [*numbers(1_500), "last"]


def test_a_part_in_more_than_one_transaction_is_refused_every_time(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    one, two = (part_of(subscribed, p) for p in ("1", "2"))
    assert insert(conn, "sink", one) == 1
    error = refused("PQ016", insert, conn, "sink", two)
    assert subscribed in str(error) and "isolationLevel" in str(error.diag.message_hint)
    refused("PQ016", insert, conn, "sink", two)
    for _ in range(2):
        retry = connect()
        assert insert(retry, "sink", one) == 0
        refused("PQ016", insert, retry, "sink", two)
        refused("PQ016", insert, retry, "sink", one)
    assert insert(conn, "sink", one | {"part": 1}) == 1
    assert sent_texts(conn, subscribed) == ["1", "1"]


def test_a_part_whose_transaction_failed_is_written_by_the_same_session(
    conn: Connection, subscribed: str
) -> None:
    refused("PQ001", insert, conn, "sink", part_of(subscribed, "x") | {"queue": "no " + subscribed})
    with pytest.raises(ZeroDivisionError), conn.transaction():
        insert(conn, "sink", part_of(subscribed, "x"), part_of(subscribed, "y", part=1))
        raise ZeroDivisionError
    with conn.transaction():
        assert insert(conn, "sink", part_of(subscribed, "1"), part_of(subscribed, "2", part=1)) == 2
        assert insert(conn, "sink", part_of(subscribed, "3")) == 1
    assert sent_texts(conn, subscribed) == ["1", "2", "3"]


def test_a_replay_with_another_number_of_parts_is_refused(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    insert(conn, "sink", part_of(subscribed, "a", 0, 0, 2))
    for part in (0, 1, 3):
        error = refused("PQ016", insert, connect(), "sink", part_of(subscribed, "b", 0, part, 4))
        assert "2" in str(error) and "4" in str(error)
    assert insert(connect(), "sink", part_of(subscribed, "b", 0, 1, 2)) == 1
    assert insert(connect(), "sink", part_of(subscribed, "c", 1, 0, 4)) == 1
    assert sent_texts(conn, subscribed) == ["a", "b", "c"]


def test_an_epoch_older_than_the_newest_is_refused(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    for epoch in (0, 7, 7):
        insert(connect(), "sink", part_of(subscribed, str(epoch), epoch))
    error = refused("PQ016", insert, connect(), "sink", part_of(subscribed, "late", 6))
    assert "7" in str(error) and subscribed in str(error)
    refused("PQ016", insert, connect(), "sink", part_of(subscribed, "late", 6, 5))
    refused("PQ016", begin, conn, subscribed, 6)
    refused("PQ016", commit, conn, subscribed, [], 0, 6)
    assert insert(conn, "sink", part_of(subscribed, "other", 0) | {"sink_id": subscribed + "2"}) == 1
    assert insert(conn, "sink", part_of(subscribed, "2**63 - 1", 2**63 - 1)) == 1
    assert sent_texts(conn, subscribed) == ["0", "7", "other", "2**63 - 1"]


@OLD
def test_a_twin_with_an_old_snapshot_writes_nothing(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    stale = transaction(isolation)
    insert(conn, "sink", part_of(subscribed, "first"))
    refused("40001", insert, stale, "sink", part_of(subscribed, "stale"))
    stale.execute("rollback")
    assert insert(stale, "sink", part_of(subscribed, "stale")) == 0
    assert sent_texts(conn, subscribed) == ["first"]


def test_a_twin_whose_snapshot_is_older_than_any_step_writes_nothing(
    ready: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    transaction: Callable[..., Connection],
) -> None:
    def write(conn: Connection, sink: str, payload: str, epoch: int) -> int:
        return insert(conn, "sink", part_of("q", payload, epoch) | {"sink_id": sink})

    for newest in (5, 6):
        steps: list[Callable[[str], object]] = [
            lambda sink: write(ready, sink, "first", 5),
            *[lambda sink: write(ready, sink, "newer", 6)] * (newest - 5),
            *[lambda _: maintain(ready, 1)] * 4,
        ]
        for taken in range(len(steps)):
            for used in range(max(taken, 1), len(steps) + 1):
                sink = f"{newest} {taken} {used}"
                write(ready, sink, "before", 4)
                for step in steps[:taken]:
                    step(sink)
                stale = transaction("repeatable read", own_dsn)
                for step in steps[taken:used]:
                    step(sink)
                try:
                    assert write(stale, sink, "stale", 5) == 0, sink
                except psycopg.Error as error:
                    assert error.sqlstate in ("40001", "PQ016")
                stale.close()
                fresh = connect(own_dsn)
                if newest == 6 and used > 1:
                    refused("PQ016", write, fresh, sink, "again", 5)
                else:
                    assert write(fresh, sink, "again", 5) == 0
                fresh.close()
    assert set(sent_texts(ready, "q")) == {"before", "first", "newer"}


def test_a_writer_that_asked_for_the_leaf_just_before_it_was_rotated_stops_its_twins(
    ready: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    insert(ready, "sink", part_of("q", "before", 4))
    blocker = transaction("read committed", own_dsn)
    blocker.execute("lock table pgque.sink_epoch_0, pgque.sink_epoch_1 in share mode")
    writer = background(lambda c: insert(c, "sink", part_of("q", "first", 5)), connect(own_dsn))
    wait_for_lock(writer.pid)
    maintain(ready, 1)
    stale = transaction("repeatable read", own_dsn)
    blocker.execute("commit")
    assert writer.result() == 1
    maintain(ready, 3)
    with contextlib.suppress(psycopg.errors.SerializationFailure):
        assert insert(stale, "sink", part_of("q", "stale", 5)) == 0
    stale.execute("rollback")
    assert insert(connect(own_dsn), "sink", part_of("q", "again", 5)) == 0
    assert sent_texts(ready, "q") == ["before", "first"]


def test_epochs_that_all_count_are_left_in_peace(ready: Connection) -> None:
    for sink in range(20):
        with ready.transaction():
            insert(ready, "sink", part_of("q", "x") | {"sink_id": f"sink {sink}"})
    before = epoch_bytes(ready)
    maintain(ready, 4)
    assert epoch_bytes(ready) == before != [0, 0]


# Transactions with old snapshots write to both leaves: the call that empties one also turns them.
@pytest.mark.parametrize(("isolation", "calls"), [("read committed", 2), ("repeatable read", 1)])
def test_compaction_keeps_every_part_of_the_newest_epoch_of_each_sink(
    ready: Connection, own_dsn: str, connect: Callable[..., Connection], isolation: str, calls: int
) -> None:
    for sink in ("a", "b"):
        for epoch in range(5):
            with ready.transaction():
                for part in range(3):
                    insert(ready, "sink", part_of("q", "x", epoch, part, 3) | {"sink_id": sink})
    assert commit(ready, "c", [], 0, 9) == "applied"
    for number in range(6):
        for epoch in (2 * number, 2 * number + 1):  # more than half of all can be forgotten
            with ready.transaction():
                ready.execute(f"set transaction isolation level {isolation}".encode())
                for part in range(12):
                    insert(ready, "sink", part_of("q", "x", epoch, part) | {"sink_id": "d"})
        before = epoch_bytes(ready)
        maintain(ready, calls)
        assert epoch_bytes(ready) != before
        for sink in ("a", "b"):
            replay = connect(own_dsn)
            for part in range(3):
                assert insert(replay, "sink", part_of("q", "y", 4, part, 3) | {"sink_id": sink}) == 0
            refused("PQ016", insert, connect(own_dsn), "sink", part_of("q", "y", 3) | {"sink_id": sink})
            refused("PQ016", insert, connect(own_dsn), "sink", part_of("q", "y", 4, 3, 4) | {"sink_id": sink})
        assert commit(ready, "c", [], 0, 9) == "duplicate"
        refused("PQ016", commit, ready, "c", [], 0, 8)
    assert value(ready, "select count(*) from pgque.sink_epoch") < 80  # of 170 that were written
    assert set(sent_texts(ready, "q")) == {"x"}


def test_a_part_begun_in_a_savepoint_that_is_rolled_back_is_written_again(
    conn: Connection,
    connect: Callable[..., Connection],
    subscribed: str,
    transaction: Callable[..., Connection],
) -> None:
    task = transaction()
    insert(task, "sink", part_of(subscribed, "1"))
    task.execute("savepoint s")
    insert(task, "sink", part_of(subscribed, "gone"), part_of(subscribed, "gone", part=1))
    task.execute("rollback to savepoint s")
    assert insert(task, "sink", part_of(subscribed, "2"), part_of(subscribed, "3", part=1)) == 2
    task.execute("savepoint s")
    refused("PQ001", insert, task, "sink", part_of(subscribed, "x", part=2) | {"queue": "no " + subscribed})
    task.execute("rollback to savepoint s")
    task.execute("release savepoint s")
    task.execute("commit")
    other = connect()
    with other.transaction():
        assert insert(other, "sink", *(part_of(subscribed, "4", part=n) for n in range(3))) == 1
    assert sent_texts(conn, subscribed) == ["1", "2", "3", "4"]


def test_a_prepared_transaction_keeps_its_parts(
    conn: Connection, connect: Callable[..., Connection], subscribed: str, background: Callable[..., Any],
    wait_for_lock: Callable[..., None], transaction: Callable[..., Connection],
) -> None:  # fmt: skip
    need_prepared_transactions(conn)
    task = transaction()
    insert(task, "sink", part_of(subscribed, "first"))
    task.execute(f"prepare transaction '{subscribed}'".encode())
    twin = background(lambda c: insert(c, "sink", part_of(subscribed, "second")))
    wait_for_lock(twin.pid)
    conn.execute(f"commit prepared '{subscribed}'".encode())
    assert twin.result() == 0
    assert sent_texts(conn, subscribed) == ["first"]


def test_a_session_writes_a_part_again_whose_prepared_transaction_was_rolled_back(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    need_prepared_transactions(conn)
    task = transaction()
    insert(task, "sink", part_of(subscribed, "gone"))
    task.execute(f"prepare transaction '{subscribed}'".encode())
    task.execute(f"rollback prepared '{subscribed}'".encode())
    assert insert(task, "sink", part_of(subscribed, "written")) == 1
    refused("PQ016", insert, task, "sink", part_of(subscribed, "more"))
    assert sent_texts(conn, subscribed) == ["written"]


def test_what_names_no_part_of_an_epoch_is_refused(conn: Connection, subscribed: str) -> None:
    good = part_of(subscribed, "x")
    for wrong in (
        {"sink_id": ""},
        {"sink_id": "x" * 201},
        {"sink_id": "a\nb"},
        {"sink_id": "a\tb"},
        {"epoch": None},
        {"epoch": -1},
        {"epoch": -(2**63)},
        {"part": None},
        {"part": -1},
        {"part": -(2**31)},
    ):
        refused("PQ005", insert, conn, "sink", good | wrong)
    for name in (f"{subscribed} \\ 'x' \"y\" %s %I {{}}", "é😀" * 30, "0 0 0", " "):
        assert insert(conn, "sink", good | {"sink_id": name}) == 1
    # Without a sink a replay would be sent twice.
    for named in ({"epoch": 0}, {"part": 0}, {"parts": 1}):
        refused("PQ005", insert, conn, "sink", {"queue": subscribed, "payload": "x"} | named)
    assert len(sent_texts(conn, subscribed)) == 4


def test_sinks_with_like_names_are_strangers(conn: Connection, subscribed: str) -> None:
    with conn.transaction():
        for sink in ("s", "s 1", "1 s", "0 0 s", "s+", "s-"):
            for epoch, part in ((1, 11), (11, 1), (1, 1), (111, 0)):
                record = part_of(subscribed, "x", epoch, part) | {"sink_id": f"{subscribed} {sink} {epoch}"}
                assert insert(conn, "sink", record, record) == 2
    assert len(sent_texts(conn, subscribed)) == 48


# --- staged epochs ----------------------------------------------------------------------------------------


def test_an_epoch_is_what_its_attempts_staged_and_no_other(conn: Connection, subscribed: str) -> None:
    good = [stage(conn, subscribed, subscribed, [f"{a}{n}" for n in range(50)]) for a in "ab"]
    stage(conn, subscribed, subscribed, ["straggler"])
    with pytest.raises(ZeroDivisionError), conn.transaction():
        stage(conn, subscribed, subscribed, ["rolled back"])
        raise ZeroDivisionError
    assert sent_texts(conn, subscribed) == []
    assert commit(conn, subscribed, good, 100) == "applied"
    texts = [str(p) for p in sent_texts(conn, subscribed)]
    for a in "ab":
        assert [t for t in texts if t[0] == a] == [f"{a}{n}" for n in range(50)]
    assert len(texts) == 100


def test_staged_rows_are_sent_in_the_order_of_their_numbers_with_all_columns(
    conn: Connection, new_queue: Callable[..., str], subscribed: str
) -> None:
    other = new_queue(f"{subscribed} \"other\" %s 'x'")
    subscribe(conn, other)
    attempt, table = begin(conn, "all columns " + subscribed)
    names = "attempt, n, queue, type, payload, headers, payload_bytes, partition_key"
    records: list[tuple[Any, ...]] = []
    for n in range(400):
        text = (f"{n}\t\\N\n", None) if n % 3 else (None, bytes([0, n % 256]))
        kind, headers = (None, None) if n % 2 else (f"t{n}", f'{{"n": {n}}}')
        records.append(
            (attempt, n, (subscribed, other)[n % 5 == 0], kind, text[0], headers, text[1], f"k{n}")
        )
    shuffled = sorted(records, key=lambda r: (r[1] * 7919) % 400)
    copy(conn, table, names, shuffled[:200])
    types = ["uuid", "int4", "text", "text", "text", "jsonb", "bytea", "text"]
    binary = [(*r[:5], None if r[5] is None else Jsonb({"n": r[1]}), *r[6:]) for r in shuffled]
    copy(conn, table, names, binary[200:], types)
    assert commit(conn, "all columns " + subscribed, [attempt, attempt], 400) == "applied"
    for queue in (subscribed, other):
        expected = [
            (r[3] or "default", r[4], None if r[5] is None else {"n": r[1]}, r[6], r[7])
            for r in records
            if r[2] == queue
        ]
        found = sent_back(conn, queue)
        assert [(m.type, m.payload, m.headers, m.payload_bytes, m.extra1) for m in found] == expected


def test_a_staged_row_that_is_no_message_is_refused(conn: Connection, subscribed: str) -> None:
    attempt, table = begin(conn, subscribed)
    names = "attempt, n, queue, payload, headers, payload_bytes"
    good = (attempt, 0, subscribed, "x", "{}", None)
    copy(conn, table, names, [good])
    for sqlstate, wrong in (
        ("23505", good),
        ("23502", (attempt, 1, None, "x", None, None)),
        ("23502", (attempt, None, subscribed, "x", None, None)),
        ("23502", (None, 1, subscribed, "x", None, None)),
        ("23514", (attempt, 1, subscribed, "x", "[]", None)),
        ("23514", (attempt, 1, subscribed, "x", None, b"x")),
        ("22P02", (attempt, 1, subscribed, "x", "{", None)),
    ):
        refused(sqlstate, copy, conn, table, names, [(attempt, 2, subscribed, "y", None, None), wrong])
    assert commit(conn, subscribed, [attempt], 1) == "applied"
    assert sent_texts(conn, subscribed) == ["x"]


def stage_arrays(conn: Connection, attempt: uuid.UUID, table: str, n: int, queue: str, **arrays: Any) -> None:
    """Stage one row that holds several messages."""
    names = list(arrays)
    copy(conn, table, ", ".join(["attempt", "n", "queue", *names]), [(attempt, n, queue, *arrays.values())])


def test_a_row_of_arrays_is_sent_as_its_messages_in_order_among_single_ones(
    conn: Connection, new_queue: Callable[..., str], subscribed: str
) -> None:
    other = new_queue()
    subscribe(conn, other)
    attempt, table = begin(conn, subscribed)
    stage_arrays(
        conn, attempt, table, 1, subscribed, rows=3, payloads=["b", None, "d"], types=["t", None, "u"],
        queues=[None, None, other], all_headers=['{"a": 1}', None, None], partition_keys=[None, "k", None],
    )  # fmt: skip
    copy(conn, table, "attempt, n, queue, payload", [(attempt, 0, subscribed, "a")])
    stage_arrays(conn, attempt, table, 2, subscribed, rows=2, all_bytes=[b"\x00", b""])
    assert commit(conn, subscribed, [attempt], 6) == "applied"
    found = [(m.type, m.payload, m.headers, m.extra1, m.payload_bytes) for m in sent_back(conn, subscribed)]
    assert found == [
        ("default", "a", None, None, None),
        ("t", "b", {"a": 1}, None, None),
        ("default", None, None, "k", None),
        ("default", None, None, None, b"\x00"),
        ("default", None, None, None, b""),
    ]
    assert [(m.type, m.payload) for m in sent_back(conn, other)] == [("u", "d")]


def test_options_in_arrays_and_a_full_queue_mean_what_they_mean_in_rows(
    conn: Connection, subscribed: str
) -> None:
    attempt, table = begin(conn, subscribed)
    stage_arrays(
        conn, attempt, table, 0, subscribed, rows=3, payloads=["a", "b", "c"], keys=["k", None, "k"],
        delays=[None, "60", None], ttls=["1 day", None, None],
    )  # fmt: skip
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '3')", subscribed)
    for n in range(3):
        send(conn, subscribed, str(n))
    refused("PQ003", commit, conn, subscribed, [attempt], 3)
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '0')", subscribed)
    assert commit(conn, subscribed, [attempt], 3) == "applied"
    assert sent_texts(conn, subscribed) == ["0", "1", "2", "c"]
    assert value(conn, "select count(*) from pgque.retry_queue where ev_data = 'b'") > 0


def test_arrays_that_do_not_fit_together_are_refused_where_they_are_staged(
    conn: Connection, subscribed: str
) -> None:
    attempt, table = begin(conn, subscribed)
    for sqlstate, arrays in (
        ("23514", {"rows": 2, "payloads": ["a"]}),
        ("23514", {"rows": 1, "payloads": ["a"], "types": ["t", "u"]}),
        ("23514", {"rows": 1, "payloads": ["a"], "all_bytes": [b"a"]}),
        ("23514", {"rows": 1, "payloads": ["a"], "payload": "a"}),
        ("23514", {"rows": 1}),
        ("23514", {"payloads": ["a"]}),
        ("23514", {"payload": "a", "types": ["t"]}),
        ("23514", {"rows": 1, "payloads": ["a"], "all_headers": ["[]"]}),
        ("22P02", {"rows": 1, "payloads": ["a"], "all_headers": ["{"]}),
    ):
        refused(sqlstate, lambda a=arrays: stage_arrays(conn, attempt, table, 0, subscribed, **a))
    refused("PQ016", commit, conn, subscribed, [attempt], 1)


def test_compaction_keeps_arrays_of_what_is_staged(ready: Connection) -> None:
    attempt, table = begin(ready, "s")
    stage_arrays(ready, attempt, table, 0, "q", rows=2, payloads=["a", "b"], types=["t", None])
    turn_stage(ready, 4)
    assert commit(ready, "s", [attempt], 2) == "applied"
    assert [(m.type, m.payload) for m in sent_back(ready, "q")] == [("t", "a"), ("default", "b")]


def test_a_replay_is_a_duplicate_however_it_is_partitioned(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    first = [stage(conn, subscribed, subscribed, numbers(5, n), 4) for n in (0, 5)]
    assert commit(conn, subscribed, first, 10, 4) == "applied"
    other = connect()
    again = [stage(other, subscribed, subscribed, [n], 4) for n in numbers(10)]
    for attempts, count in ((again, 10), (first, 10), ([], 0), ([uuid.uuid4()], 77), (again, None)):
        assert commit(other, subscribed, attempts, count, 4) == "duplicate"
    assert commit(conn, subscribed, [stage(conn, subscribed, subscribed, ["next"], 5)], 1, 5) == "applied"
    refused("PQ016", commit, conn, subscribed, first, 10, 4)
    assert sent_texts(conn, subscribed) == [*numbers(10), "next"]


def test_rows_that_were_lost_stop_the_commit_and_it_can_be_done_again(
    conn: Connection, subscribed: str
) -> None:
    attempt = stage(conn, subscribed, subscribed, numbers(10))
    for attempts, count in (
        ([attempt], 11),
        ([attempt], 9),
        ([attempt], 0),
        ([attempt], -1),
        ([attempt], None),
        ([], 10),
        ([uuid.uuid4()], 10),
        ([attempt, None], 2**62),
    ):
        error = refused("PQ016", commit, conn, subscribed, attempts, count)
        assert subscribed in str(error)
    assert sent_texts(conn, subscribed) == []
    more = stage(conn, subscribed, subscribed, ["10"])
    assert commit(conn, subscribed, [attempt, more, None, uuid.uuid4()], 11) == "applied"
    assert sorted(map(str, sent_texts(conn, subscribed))) == sorted(numbers(11))


def test_an_attempt_belongs_to_its_sink_and_its_epoch(conn: Connection, subscribed: str) -> None:
    attempt = stage(conn, subscribed, subscribed, ["x"], 3)
    refused("PQ016", commit, conn, "other " + subscribed, [attempt], 1, 3)
    refused("PQ016", commit, conn, subscribed, [attempt], 1, 4)
    assert commit(conn, subscribed, [attempt], 1, 3) == "applied"
    refused("PQ016", commit, conn, subscribed, [attempt], 1, 4)
    assert sent_texts(conn, subscribed) == ["x"]


def test_an_empty_epoch_counts(conn: Connection, subscribed: str) -> None:
    assert commit(conn, subscribed, [], 0, 1) == "applied"
    assert commit(conn, subscribed, [], 0, 1) == "duplicate"
    refused("PQ016", commit, conn, subscribed, [], 0, 0)
    assert sent_texts(conn, subscribed) == []


def test_a_write_without_an_epoch_is_sent_once(conn: Connection, subscribed: str) -> None:
    attempts = [stage(conn, subscribed, subscribed, [t], None) for t in "abcd"]
    assert commit(conn, subscribed, attempts[:2], 2, None) == "applied"
    # The answer was lost and the call is made again.
    assert commit(conn, subscribed, attempts[:2], 2, None) == "duplicate"
    refused("PQ016", commit, conn, subscribed, attempts[1:3], 2, None)
    # Another write, which has nothing to do with the first.
    assert commit(conn, subscribed, attempts[2:3], 1, None) == "applied"
    refused("PQ016", commit, conn, subscribed, attempts[3:], 1, 0)
    assert commit(conn, subscribed, [stage(conn, subscribed, subscribed, ["0"])], 1) == "applied"
    assert commit(conn, subscribed, attempts[3:], 1, None) == "applied"
    assert sent_texts(conn, subscribed) == [*"abc0d"]


def test_attempts_are_sent_in_the_order_of_the_array(conn: Connection, subscribed: str) -> None:
    attempts = [stage(conn, subscribed, subscribed, numbers(3, 3 * n)) for n in range(30)]
    order = random.Random(2).sample(range(30), 30)  # noqa: S311
    assert commit(conn, subscribed, [*(attempts[n] for n in order), attempts[0]], 90) == "applied"
    assert sent_texts(conn, subscribed) == [str(3 * n + i) for n in order for i in range(3)]


def test_a_paused_queue_stops_the_epoch_until_it_is_resumed(
    conn: Connection, new_queue: Callable[..., str], subscribed: str
) -> None:
    open_queue = new_queue()
    subscribe(conn, open_queue)
    attempts = [
        stage(conn, subscribed, open_queue, numbers(3)),
        stage(conn, subscribed, subscribed, numbers(3)),
    ]
    value(conn, "select pgque.pause(%s)", subscribed)
    refused("PQ013", commit, conn, subscribed, attempts, 6)
    assert sent_texts(conn, open_queue) == []
    value(conn, "select pgque.resume(%s)", subscribed)
    assert commit(conn, subscribed, attempts, 6) == "applied"
    assert sent_texts(conn, open_queue) == sent_texts(conn, subscribed) == numbers(3)


def test_an_unknown_queue_stops_the_epoch_and_is_named(conn: Connection, subscribed: str) -> None:
    attempts = [stage(conn, subscribed, q, ["x"]) for q in (subscribed, f'no "{subscribed}"\' %s %I')]
    assert subscribed in str(refused("PQ001", commit, conn, subscribed, attempts, 2))
    assert sent_texts(conn, subscribed) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_who_commit_one_epoch_follow_each_other(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    end: str,
) -> None:
    attempts = [stage(conn, subscribed, subscribed, [t]) for t in ("first", "second")]
    one = transaction()
    assert commit(one, subscribed, attempts[:1], 1) == "applied"
    two = background(lambda c: commit(c, subscribed, attempts[1:], 1))
    wait_for_lock(two.pid)
    one.execute(end.encode())
    assert two.result() == ("duplicate" if end == "commit" else "applied")
    assert sent_texts(conn, subscribed) == ["first" if end == "commit" else "second"]


def test_an_epoch_keeps_the_first_list_of_servers_and_takes_no_commit_with_another(
    conn: Connection, subscribed: str
) -> None:
    first, other = ["a", "b"], ["b", "c"]
    assert listed(conn, subscribed, first, 4) == first
    assert listed(conn, subscribed, other, 4) == first
    attempt = stage(conn, subscribed, subscribed, ["x"], 4)
    for wrong in (None, other, ["b", "a"]):
        error = refused("PQ016", commit, conn, subscribed, [attempt], 1, 4, wrong)
        assert "spread over the servers a, b" in str(error)
    assert commit(conn, subscribed, [attempt], 1, 4, first) == "applied"
    assert commit(conn, subscribed, [attempt], 1, 4, first) == "duplicate"
    # Rows of other servers would be lost without a word.
    refused("PQ016", commit, conn, subscribed, [attempt], 1, 4, None)
    assert listed(conn, subscribed, other, 4) == first
    refused("PQ016", listed, conn, subscribed, other, 3)
    assert listed(conn, subscribed, other, 5) == other
    refused("PQ016", commit, conn, subscribed, [attempt], 1, 4, first)
    assert sent_texts(conn, subscribed) == ["x"]


def test_a_list_of_servers_is_for_the_role_that_stored_it(
    conn: Connection, subscribed: str, roles: Callable[..., Role], connect: Callable[..., Connection]
) -> None:
    """Who could store one for others would have them connect to a server of theirs."""
    first, second = (connect(roles("writer").dsn) for _ in range(2))
    assert listed(first, subscribed, ["elsewhere"]) == ["elsewhere"]
    assert "was stored by role" in str(refused("PQ016", listed, second, subscribed, ["a", "b"]))
    assert listed(first, subscribed, ["a", "b"]) == ["elsewhere"]
    assert listed(second, subscribed, ["a", "b"], 1) == ["a", "b"]


def test_an_epoch_that_was_committed_without_a_list_gets_none(conn: Connection, subscribed: str) -> None:
    attempt = stage(conn, subscribed, subscribed, ["x"])
    assert commit(conn, subscribed, [attempt], 1) == "applied"
    assert listed(conn, subscribed, ["a", "b"]) == []
    refused("PQ016", commit, conn, subscribed, [attempt], 1, 0, ["a", "b"])
    assert commit(conn, subscribed, [attempt], 1) == "duplicate"


@pytest.mark.parametrize("first", ["list", "commit"])
def test_a_list_and_a_commit_without_one_follow_each_other(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    first: str,
) -> None:
    attempt = stage(conn, subscribed, subscribed, ["x"])
    one = transaction()
    if first == "list":
        listed(one, subscribed, ["a", "b"])
        two = background(lambda c: refused("PQ016", commit, c, subscribed, [attempt], 1))
    else:
        commit(one, subscribed, [attempt], 1)
        two = background(lambda c: listed(c, subscribed, ["a", "b"]))
    wait_for_lock(two.pid)
    one.commit()
    assert two.result() == [] if first == "commit" else two.result()
    assert sent_texts(conn, subscribed) == (["x"] if first == "commit" else [])


def test_compaction_keeps_the_list_of_the_newest_epoch(ready: Connection) -> None:
    for epoch in range(3):
        assert listed(ready, "s", ["a", "b"], epoch) == ["a", "b"]
    for number in range(4):
        for epoch in (2 * number, 2 * number + 1):
            with ready.transaction():
                for part in range(12):
                    insert(ready, "sink", part_of("q", "x", epoch, part) | {"sink_id": "d"})
        before = epoch_bytes(ready)
        maintain(ready, 2)
        assert epoch_bytes(ready) != before
        assert listed(ready, "s", ["c"], 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("epoch", "servers"), [(None, ["a"]), (0, []), (0, None), (0, ["a", "a"]), (0, ["a", None])]
)
def test_a_list_of_servers_that_is_none_is_refused(
    conn: Connection, subscribed: str, epoch: int | None, servers: list[str] | None
) -> None:
    assert refused("PQ005", listed, conn, subscribed, servers, epoch).diag.message_hint


@OLD
def test_a_commit_needs_a_new_snapshot(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    old = transaction(isolation)
    attempt = stage(old, subscribed, subscribed, ["x"])
    error = refused("25000", commit, old, subscribed, [attempt], 1)
    assert error.diag.message_hint
    old.execute("rollback")
    with old.transaction():
        old.execute(f"set transaction isolation level {isolation}".encode())
        attempt = stage(old, subscribed, subscribed, ["x"])
    assert commit(conn, subscribed, [attempt], 1) == "applied"


def test_an_epoch_is_staged_and_committed_in_one_transaction(conn: Connection, subscribed: str) -> None:
    with conn.transaction():
        attempt = stage(conn, subscribed, subscribed, numbers(3))
        assert commit(conn, subscribed, [attempt], 3) == "applied"
        assert commit(conn, subscribed, [attempt], 3) == "duplicate"
    assert sent_texts(conn, subscribed) == numbers(3)


def test_an_epoch_comes_with_one_tick(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    attempts = [stage(conn, subscribed, subscribed, numbers(500, n * 500)) for n in range(4)]
    committer = transaction()
    send(conn, subscribed, "before")
    assert commit(committer, subscribed, attempts, 2_000) == "applied"
    send(conn, subscribed, "between")
    forced_tick(conn, subscribed)
    assert payloads(conn, subscribed) == ["before", "between"]
    committer.execute("commit")
    send(conn, subscribed, "after")
    assert tick(conn, subscribed) is not None
    batch = receive(conn, subscribed, count=10_000)
    assert [str(m.payload) for m in batch][-1] == "after"
    assert sorted(str(m.payload) for m in batch[:-1]) == sorted(numbers(2_000))


def test_a_staging_transaction_that_stays_open_stops_nobody(
    ready: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    long = transaction("read committed", own_dsn)
    slow = stage(long, "q", "q", ["slow"], 1)
    ready.execute("set lock_timeout = '5s'")
    for epoch in range(5):
        attempt = stage(ready, "other", "q", [str(epoch)], epoch)
        assert commit(ready, "other", [attempt], 1, epoch) == "applied"
        move_clock(ready, f"{5 * epoch + 5} minutes")
        value(ready, "select pgque.maint()")
        maintain(ready, 1)
    assert sent_texts(ready, "q") == numbers(5)
    refused("PQ016", commit, ready, "q", [slow], 1, 1)
    long.execute("commit")
    maintain(ready)
    assert commit(ready, "q", [slow], 1, 1) == "applied"
    assert sent_texts(ready, "q") == ["slow"]


# --- reclaiming what was staged ---------------------------------------------------------------------------


def test_what_is_staged_survives_compaction_of_either_leaf(
    ready: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    task = connect(own_dsn)
    tables = set()
    for turns in range(1, 7):
        sink = f"{turns} turns"
        attempts = []
        for number in range(turns):
            tables.add(begin(task, sink)[1])
            attempts.append(stage(task, sink, "q", numbers(20, number * 20)))
            turn_stage(ready, 1 + number % 2)
        assert commit(ready, sink, attempts, turns * 20) == "applied"
        assert sorted(int(str(t)) for t in sent_texts(ready, "q")) == list(range(turns * 20))
    assert len(tables) == 2
    move_clock(ready, "2 minutes")
    maintain(ready, 4)
    assert staged_bytes(ready) == 0


def test_what_is_copied_after_a_compaction_survives_the_next_ones(ready: Connection) -> None:
    for turns in range(1, 6):
        sink = f"{turns} turns"
        attempt, table = begin(ready, sink)
        for n in range(turns):
            turn_stage(ready, 1 + n % 2)
            copy(ready, table, "attempt, n, queue, payload", [(attempt, n, "q", str(n))])
        for _ in range(turns):
            turn_stage(ready)
        assert commit(ready, sink, [attempt], turns) == "applied"
        assert sent_texts(ready, "q") == numbers(turns)


def test_a_commit_waits_for_a_compaction_and_finds_what_it_moved(
    ready: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    attempts = [stage(ready, "q", "q", numbers(30))]
    turn_stage(ready)
    attempts.append(stage(ready, "q", "q", numbers(30, 30)))
    compaction = transaction("read committed", own_dsn)
    maintain(compaction, 1)
    committer = background(lambda c: commit(c, "q", attempts, 60), connect(own_dsn))
    wait_for_lock(committer.pid)
    compaction.execute("commit")
    assert committer.result() == "applied"
    assert sorted(int(str(t)) for t in sent_texts(ready, "q")) == list(range(60))


def test_a_compaction_does_not_wait_for_a_commit(
    ready: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    attempts = [stage(ready, "q", "q", numbers(30))]
    turn_stage(ready)
    committer = transaction("read committed", own_dsn)
    assert commit(committer, "q", attempts, 30) == "applied"
    ready.execute("set lock_timeout = '2s'")
    maintain(ready)
    committer.execute("rollback")
    maintain(ready)
    assert commit(ready, "q", attempts, 30) == "applied"
    assert sent_texts(ready, "q") == numbers(30)


def test_what_was_staged_a_day_ago_goes(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    attempt = stage(own, "q", "q", numbers(2_000))
    for hours in (1, 12, 23):
        move_clock(own, f"{hours} hours")
        maintain(own)
    assert staged_bytes(own) > 0
    move_clock(own, "25 hours")
    maintain(own)
    assert staged_bytes(own) == 0
    error = refused("PQ016", commit, own, "q", [attempt], 2_000)
    assert "0 rows" in str(error)
    assert sent_texts(own, "q") == []
    again = stage(own, "q", "q", numbers(3))
    assert commit(own, "q", [again], 3) == "applied"


def test_what_does_not_count_any_more_leaves_nothing_on_disk(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    other = connect(own_dsn, autocommit=False)
    for step in range(12):
        if step % 4 == 0:
            stage(other, "q", "q", numbers(3_000), None)
            other.rollback()
        elif step % 4 == 1:
            _, table = begin(other, "q", step)
            other.rollback()
            copy(own, table, "attempt, n, queue", [(uuid.uuid4(), 0, "q")])
        else:
            attempt = stage(own, "q", "q", numbers(3_000), step)
            assert commit(own, "q", [attempt], 3_000, step) == "applied"
            if step % 4 == 3:
                replayed = stage(own, "q", "q", numbers(3_000), step)
                assert commit(own, "q", [replayed], 3_000, step) == "duplicate"
        assert staged_bytes(own) > 0
        move_clock(own, f"{2 * step + 2} minutes")
        maintain(own)
        assert staged_bytes(own) == 0, step


def test_sinks_leave_no_dead_row_under_a_held_snapshot(
    ready: Connection, own_dsn: str, connect: Callable[..., Connection], wait_until: Callable[..., None]
) -> None:
    held = connect(own_dsn, autocommit=False)
    held.execute("set transaction isolation level repeatable read")
    held.execute("select pg_current_xact_id(), count(*) from pgque.queue")
    task = connect(own_dsn)
    for epoch in range(20):
        insert(task, "sink", *({"queue": "q", "payload": "x"} for _ in range(10)))
        insert(task, "sink_bulk", *({"queue": "q", "payload": "x"} for _ in range(10)))
        copy(task, "pgque.sink", "queue, payload", [("q", "x")] * 10)
        for _ in range(2):
            with psycopg.connect(own_dsn) as writer:
                for part in range(3):
                    insert(writer, "sink", part_of("q", "part", epoch, part, 3))
        attempts = [stage(task, "staged", "q", numbers(50), epoch) for _ in range(2)]
        assert commit(task, "staged", attempts, 100, epoch) == "applied"
        assert commit(task, "staged", attempts, 100, epoch) == "duplicate"
        if epoch % 4 == 0:
            move_clock(ready, f"{2 * epoch} minutes")
            maintain(ready, 1)
    assert len(sent_texts(ready, "q")) == 20 * (30 + 3 + 100)
    task.close()
    inserted = (
        "select sum(n_tup_ins) from pg_stat_all_tables where schemaname = 'pgque' and relname ~ '^event_'"
    )

    def others() -> dict[str, int]:
        # A turn of the leaves of epochs is an update of this row, for every 4 MB.
        return {table: dead for table, dead in dead_tuples(ready).items() if table != "journal"}

    wait_until(lambda: others() == {} and value(ready, inserted) >= 2_660, "statistics", 20)
    assert others() == {}
    move_clock(ready, "5 hours")
    maintain(ready, 4)
    assert staged_bytes(ready) == 0
    assert sum(epoch_bytes(ready)) <= 16_384
    held.rollback()


# --- everything at once -----------------------------------------------------------------------------------


class Work:
    """Writes numbered messages by epochs through sessions that may be ended at any moment."""

    def __init__(self, dsn: str, sink: str, seed: str) -> None:
        self.dsn = dsn
        self.sink = sink
        self.chance = random.Random(seed)  # noqa: S311
        self.session: Connection | None = None
        self.ended = 0

    def connection(self) -> Connection:
        if self.session is None or self.session.closed:
            self.session = psycopg.connect(self.dsn, autocommit=True, application_name="victim")
        return self.session

    def until_done(self, work: Callable[[], object]) -> None:
        """Do it, and again when the session was ended on the way, or what was staged is gone."""
        while True:
            try:
                work()
                return
            except psycopg.Error as error:
                if error.sqlstate == "PQ016" and "older than" in str(error):
                    return  # its twin is ahead
                if error.sqlstate not in (None, "57P01", "40001", "40P01"):
                    raise
                self.ended += 1
                if self.session is not None:
                    self.session.close()

    def stage_epochs(self, count: int) -> None:
        """Stage and commit epochs, each try cut into parts anew."""
        for epoch in range(count):
            self.until_done(lambda e=epoch: self.stage_epoch(e))  # type: ignore[misc]
        self.connection().close()

    def stage_epoch(self, epoch: int) -> None:
        texts = [f"{self.sink} {epoch} {n}" for n in range(20)]
        cut = self.chance.randrange(1, 20)
        attempts = [
            stage(self.connection(), self.sink, "q", piece, epoch) for piece in (texts[:cut], texts[cut:])
        ]
        stage(self.connection(), self.sink, "q", ["straggler"], epoch)
        commit(self.connection(), self.sink, attempts, 20, epoch)

    def write_parts(self, count: int) -> None:
        """Write epochs of two parts through the view."""
        for epoch in range(count):
            for part in range(2):
                self.until_done(lambda e=epoch, p=part: self.write_part(e, p))  # type: ignore[misc]
        self.connection().close()

    def write_part(self, epoch: int, part: int) -> None:
        if self.session is not None:
            self.session.close()  # as a driver does: a connection for each try
        with self.connection() as task:
            if self.chance.random() < 0.3:
                task.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            with task.transaction():
                for n in range(part * 10, part * 10 + 10):
                    insert(
                        task,
                        "sink",
                        part_of("q", f"{self.sink} {epoch} {n}", epoch, part, 2) | {"sink_id": self.sink},
                    )


def test_epochs_come_once_while_sessions_end_and_the_leaves_turn(
    ready: Connection, own_dsn: str, connect: Callable[..., Connection], background: Callable[..., Any]
) -> None:
    workers = {f"staged {n}": (Work(own_dsn, f"staged {n}", f"{n}"), 15) for n in range(2)}
    parts = {name: Work(own_dsn, "parts", name) for name in ("task", "twin")}
    jobs = [
        background(lambda _, w=w, c=c: w.stage_epochs(c), connect(own_dsn)) for w, c in workers.values()
    ] + [background(lambda _, w=w: w.write_parts(15), connect(own_dsn)) for w in parts.values()]
    chance = random.Random(1)  # noqa: S311
    while not all(job.done for job in jobs):
        maintain(ready, 1)
        if chance.random() < 0.05:
            rows(
                ready,
                "select pg_terminate_backend(a.pid) from pg_stat_activity as a"
                " where a.application_name = 'victim' and a.datname = current_database() order by random() limit 1",
            )
    for job in jobs:
        job.result()
    assert sum(w.ended for w in (*parts.values(), *(w for w, _ in workers.values()))) > 0
    expected = [f"{sink} {e} {n}" for sink in (*workers, "parts") for e in range(15) for n in range(20)]
    assert sorted(map(str, sent_texts(ready, "q"))) == sorted(expected)


# --- nonsense ---------------------------------------------------------------------------------------------


def test_nonsense_gets_an_error_that_names_what_is_wrong(conn: Connection, subscribed: str) -> None:
    names = [
        None,
        "",
        " ",
        "x" * 201,
        "é" * 150,
        "a\nb",
        "'; drop schema pgque; --",
        '"',
        "%s %I %L %%",
        "\\",
        "{}",
    ]
    epochs: list[int | None] = [None, 0, -1, 2**63 - 1, -(2**63)]
    arrays: list[list[Any] | None] = [None, [], [None], [uuid.uuid4()], [[uuid.uuid4()], [uuid.uuid4()]]]
    counts: list[int | None] = [None, 0, -1, 2**63 - 1]
    seen = set()

    def attempt(call: str, *args: Any) -> None:
        try:
            with conn.transaction(force_rollback=True):
                value(conn, call, *args)
            seen.add("ok")
        except psycopg.Error as error:
            assert error.sqlstate in ("PQ005", "PQ016"), (call, args, error)
            assert error.diag.message_hint, error
            seen.add(str(error.sqlstate))

    for name in names:
        for epoch in epochs:
            attempt("select pgque.sink_begin(%s, %s)", name, epoch)
            for array in arrays:
                for count in counts:
                    attempt("select pgque.sink_commit(%s, %s, %s::uuid[], %s)", name, epoch, array, count)
    assert seen == {"ok", "PQ005", "PQ016"}
    assert sent_texts(conn, subscribed) == []


def test_an_epoch_is_written_in_parts_or_as_a_whole_not_both(conn: Connection, subscribed: str) -> None:
    (attempt, stage) = rows(conn, "select attempt, stage from pgque.sink_begin(%s, 0)", subscribed)[0]
    copy(conn, stage, "attempt, n, queue, payload", [(attempt, 0, subscribed, "whole")])
    insert(conn, "sink", part_of(subscribed, "part"))
    refused("PQ016", value, conn, "select pgque.sink_commit(%s, 0, %s, 1)", subscribed, [attempt])
    (attempt, stage) = rows(conn, "select attempt, stage from pgque.sink_begin(%s, 1)", subscribed)[0]
    copy(conn, stage, "attempt, n, queue, payload", [(attempt, 0, subscribed, "whole")])
    assert value(conn, "select pgque.sink_commit(%s, 1, %s, 1)", subscribed, [attempt]) == "applied"
    refused("PQ016", insert, conn, "sink", part_of(subscribed, "part", 1))
    assert sent_texts(conn, subscribed) == ["part", "whole"]


def test_what_was_staged_twice_does_not_stop_maintenance(conn: Connection, subscribed: str) -> None:
    attempt, _ = begin(conn, subscribed)
    for n in (0, 1):  # a COPY that is made again after the leaves were changed
        copy(conn, f"pgque.sink_stage_{n}", "attempt, n, queue, payload", [(attempt, 0, subscribed, "x")])
    notices: list[str] = []
    conn.add_notice_handler(lambda notice: notices.append(str(notice.message_primary)))
    value(conn, "select pgque.maint_tables()")
    assert notices == []
    assert commit(conn, subscribed, [attempt], 1) == "applied"
    assert sent_texts(conn, subscribed) == ["x"]


# --- full queues, other roles of a session ----------------------------------------------------------------


def test_a_statement_into_the_bulk_view_stops_at_the_limit_and_sends_nothing(
    conn: Connection, new_queue: Callable[..., str]
) -> None:
    full, free = new_queue(), new_queue()
    for queue in (full, free):
        subscribe(conn, queue)
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '5')", full)
    with conn.transaction(force_rollback=True):
        insert(conn, "sink_bulk", *({"queue": full, "payload": "x"} for _ in range(4)))
    many = "insert into pgque.sink_bulk (queue, payload) select %s, n::text from generate_series(1, %s) n"
    refused("PQ003", rows, conn, many, full, 6)
    rows(conn, many, full, 3)
    mixed = "insert into pgque.sink_bulk (queue, payload) select (array[%s, %s])[1 + n %% 2], n::text from generate_series(1, %s) n"
    refused("PQ003", rows, conn, mixed, full, free, 6)
    rows(conn, mixed, full, free, 4)
    refused("PQ003", insert, conn, "sink_bulk", {"queue": full, "payload": "x"})
    assert len(sent_texts(conn, full)) == 5
    assert len(sent_texts(conn, free)) == 2
    rows(conn, many, full, 5)


def test_an_epoch_for_a_full_queue_is_refused_whole_and_can_be_written_later(
    conn: Connection, subscribed: str
) -> None:
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '5')", subscribed)
    first = stage(conn, subscribed, subscribed, numbers(4))
    assert commit(conn, subscribed, [first], 4) == "applied"
    second = stage(conn, subscribed, subscribed, numbers(2, 4), 1)
    refused("PQ003", commit, conn, subscribed, [second], 2, 1)
    assert commit(conn, subscribed, [first], 4) == "duplicate"
    assert sent_texts(conn, subscribed) == numbers(4)
    assert commit(conn, subscribed, [second], 2, 1) == "applied"
    assert sent_texts(conn, subscribed) == numbers(2, 4)


@VIEWS
def test_where_triggers_and_rules_do_not_work_a_row_is_refused_and_not_lost(
    conn: Connection, subscribed: str, view: str
) -> None:
    full = "queue, type, payload, headers"
    row = (subscribed, "t", "x", None)
    conn.execute("set session_replication_role = replica")
    refused("23514", insert, conn, view, {"queue": subscribed, "payload": "x"})
    refused("23514", insert, conn, view, dict(zip(full.split(", "), row, strict=True)))
    refused("23514", insert, conn, view, {"payload": "x"})
    refused("23514", copy, conn, f"pgque.{view}", full, [row])
    assert isinstance(send(conn, subscribed), int)
    conn.execute("reset session_replication_role")
    assert insert(conn, view, {"queue": subscribed, "payload": "x"}) == 1
    assert len(sent_texts(conn, subscribed)) == 2


def test_a_replay_with_and_without_a_number_of_parts_is_refused(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    insert(conn, "sink", part_of(subscribed, "a", 0, 0, 2))
    refused("PQ016", insert, connect(), "sink", part_of(subscribed, "b", 0, 1))
    insert(conn, "sink", part_of(subscribed, "c", 1, 0))
    error = refused("PQ016", insert, connect(), "sink", part_of(subscribed, "d", 1, 1, 2))
    assert "any number" in str(error)
    assert sent_texts(conn, subscribed) == ["a", "c"]


# --- the options of send() --------------------------------------------------------------------------------

OPTIONS = ("queue", "type", "payload", "payload_bytes", "key", "delay", "deliver_at", "ttl", "partition_key")


def put_option_rows(conn: Connection, way: str, queue: str, *records: dict[str, Any]) -> None:
    """Send rows with options through the view, by COPY, or staged as one epoch."""
    if way == "insert":
        for record in records:
            insert(conn, "sink", {"queue": queue} | record)
        return
    table, given = [(queue, *(r.get(name) for name in OPTIONS[1:])) for r in records], ", ".join(OPTIONS)
    if way == "copy":
        copy(conn, "pgque.sink", given, table)
        return
    sink = str(uuid.uuid4())
    attempt, where = begin(conn, sink)
    copy(conn, where, "attempt, n, " + given, ((attempt, n, *row) for n, row in enumerate(table)))
    assert commit(conn, sink, [attempt], len(table)) == "applied"


OPTION_WAYS = pytest.mark.parametrize("way", ["insert", "copy", "staged"])


@OPTION_WAYS
def test_options_mean_in_every_sink_what_they_mean_in_send(
    conn: Connection, subscribed: str, way: str
) -> None:
    put_option_rows(
        conn,
        way,
        subscribed,
        {"payload": "plain", "type": "t"},
        {"payload": "a", "key": "k", "type": "first"},
        {"payload": "b", "key": "k", "type": "second", "partition_key": "p"},
        {"payload": "60 s", "delay": "60"},
        {"payload": "2 h", "delay": "2 hours", "ttl": "1 day"},
        {"payload": "at", "deliver_at": "2020-01-01 00:00:00+00"},
        {"payload": "later", "deliver_at": "2099-01-01 00:00:00+00"},
        {"payload_bytes": b"\x00", "ttl": "3600.5"},
        {"payload": "gone", "ttl": "0.000001"},
        {"payload": "for ever", "ttl": "0"},
    )
    found = sent_back(conn, subscribed)
    # send_batch() gives messages with a key their ids last, and so does an epoch.
    assert {(m.type, m.payload, m.key, m.extra1) for m in found if m.payload_bytes is None} == {
        ("t", "plain", None, None),
        ("second", "b", "k", "p"),
        ("default", "at", None, None),
        ("default", "for ever", None, None),
    }
    assert len(found) == 5
    assert [bytes(m.payload_bytes) for m in found if m.payload_bytes is not None] == [b"\x00"]
    (expires,) = (m.expires_at for m in found if m.payload_bytes is not None)
    assert value(conn, "select %s - clock_timestamp() between '55 minutes' and '61 minutes'", expires)
    waiting = rows(
        conn,
        "select r.ev_data, extract(epoch from r.ev_retry_after - r.ev_time)::int, r.ev_expires is not null"
        " from pgque.retry_queue as r join pgque.queue as q on q.queue_id = r.ev_queue"
        " where q.queue_name = %s and r.ev_data <> 'later' order by 2",
        subscribed,
    )
    assert waiting == [("60 s", 60, False), ("2 h", 7200, True)]


@OPTION_WAYS
def test_an_option_that_send_refuses_is_refused_and_nothing_is_sent(
    conn: Connection, subscribed: str, way: str
) -> None:
    for wrong in (
        {"delay": "-1"},
        {"delay": "tomorrow"},
        {"delay": "1", "deliver_at": "2099-01-01 00:00:00+00"},
        {"ttl": "-1 day"},
        {"ttl": ""},
        {"ttl": "200 years"},
        {"deliver_at": "infinity"},
        {"key": ""},
        {"key": "k" * 1001},
    ):
        with conn.transaction(force_rollback=True):
            error = refused("PQ005", put_option_rows, conn, way, subscribed, {"payload": "x"}, wrong)
        assert subscribed in str(error) and error.diag.message_hint, wrong
    both = {"payload": "x", "payload_bytes": b"x", "delay": "1"}
    refused("23514" if way == "staged" else "PQ005", put_option_rows, conn, way, subscribed, both)
    assert sent_texts(conn, subscribed) == []


@OPTION_WAYS
def test_rows_with_options_stop_at_the_limit_and_at_a_pause(
    conn: Connection, subscribed: str, way: str
) -> None:
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '3')", subscribed)
    put_option_rows(
        conn, way, subscribed, {"payload": "a", "key": "k"}, {"payload": "b", "delay": "3600"}, {"ttl": "60"}
    )
    for one in (
        {"payload": "c"},
        {"payload": "c", "key": "other"},
        {"payload": "c", "ttl": "60"},
        {"delay": "60"},
    ):
        refused("PQ003", put_option_rows, conn, way, subscribed, one)
    put_option_rows(conn, way, subscribed, {"payload": "replaced", "key": "k"})
    value(conn, "select pgque.pause(%s)", subscribed)
    for one in ({"payload": "c"}, {"payload": "c", "key": "k"}):
        refused("PQ013", put_option_rows, conn, way, subscribed, one)
    value(conn, "select pgque.resume(%s)", subscribed)
    assert sorted(map(str, sent_texts(conn, subscribed))) == ["None", "replaced"]


def test_an_epoch_that_finds_a_full_queue_stores_nothing_before_it_is_refused(
    conn: Connection, subscribed: str
) -> None:
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '5')", subscribed)
    attempt = stage(conn, subscribed, subscribed, numbers(3))
    for n in range(3):
        send(conn, subscribed, str(n))
    last = "select pg_sequence_last_value(q.queue_event_seq) from pgque.queue as q where q.queue_name = %s"
    before = value(conn, last, subscribed)
    for _ in range(3):
        refused("PQ003", commit, conn, subscribed, [attempt], 3)
    assert value(conn, last, subscribed) == before


def test_an_epoch_larger_than_max_depth_is_refused_as_one_that_never_fits(
    conn: Connection, subscribed: str
) -> None:
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '5')", subscribed)
    attempt = stage(conn, subscribed, subscribed, numbers(6))
    error = refused("PQ005", commit, conn, subscribed, [attempt], 6)
    assert f"6 messages at once never fit into queue {subscribed} with max_depth 5" in str(error)
    assert "maxEventsPerTrigger" in str(error.diag.message_hint)
    value(conn, "select pgque.set_queue_config(%s, 'max_depth', '6')", subscribed)
    assert commit(conn, subscribed, [attempt], 6) == "applied"


def test_an_epoch_reads_its_queue_once(conn: Connection, subscribed: str) -> None:
    count = 20_000
    attempt = stage(conn, subscribed, subscribed, numbers(count))
    scans = "select pg_stat_get_xact_numscans('pgque.queue_name_key'::regclass)"
    with conn.transaction():
        before = value(conn, scans)
        assert commit(conn, subscribed, [attempt], count) == "applied"
        assert value(conn, scans) - before < 10
    assert sent_texts(conn, subscribed) == numbers(count)


def test_a_key_replaces_what_another_epoch_or_another_way_sent(conn: Connection, subscribed: str) -> None:
    value(conn, "select pgque.send(%s, 't', 'sent', key => 'k')", subscribed)
    for payload, way in (("inserted", "insert"), ("copied", "copy"), ("staged", "staged")):
        put_option_rows(conn, way, subscribed, {"payload": payload, "key": "k"})
    assert sent_texts(conn, subscribed) == ["staged"]


def test_a_part_with_options_is_written_once(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    first = part_of(subscribed, "a") | {"delay": "3600"}
    assert insert(conn, "sink", first) == 1
    assert insert(connect(), "sink", first) == 0
    assert (
        value(
            conn,
            "select count(*) from pgque.retry_queue as r join pgque.queue as q on q.queue_id = r.ev_queue where q.queue_name = %s",
            subscribed,
        )
        == 1
    )


def test_an_epoch_with_options_keeps_its_order_over_many_rows_types_and_queues(
    conn: Connection, new_queue: Callable[..., str], subscribed: str
) -> None:
    other = new_queue()
    subscribe(conn, other)
    attempts = []
    for share in range(2):
        attempt, table = begin(conn, subscribed)
        attempts.append(attempt)
        copy(
            conn,
            table,
            "attempt, n, queue, type, payload, ttl",
            (
                (
                    attempt,
                    n,
                    (subscribed, other)[n % 2],
                    f"t{n % 3}",
                    f"{share} {n}",
                    "1 day" if n % 5 == 0 else None,
                )
                for n in range(2_500)
            ),
        )
    assert commit(conn, subscribed, attempts, 5_000) == "applied"
    assert commit(conn, subscribed, attempts, 5_000) == "duplicate"
    for at, queue in enumerate((subscribed, other)):
        found = sent_back(conn, queue)
        expected = [(f"t{n % 3}", f"{share} {n}") for share in range(2) for n in range(at, 2_500, 2)]
        assert [(m.type, m.payload) for m in found] == expected
        assert sum(m.expires_at is not None for m in found) == 500


def test_two_epochs_with_the_same_keys_in_other_orders_do_not_wait_for_each_other(
    conn: Connection, connect: Callable[..., Connection], subscribed: str, transaction: Callable[..., Connection],
    background: Callable[..., Any], wait_for_lock: Callable[..., None],
) -> None:  # fmt: skip
    attempts = []
    for share in range(2):
        attempt, table = begin(conn, f"{subscribed} {share}")
        attempts.append(attempt)
        keys = range(300) if share else range(300)[::-1]
        copy(
            conn,
            table,
            "attempt, n, queue, payload, key",
            ((attempt, n, subscribed, str(share), f"k{key}") for n, key in enumerate(keys)),
        )
    first = transaction()
    assert commit(first, f"{subscribed} 0", [attempts[0]], 300) == "applied"
    second = background(lambda c: commit(c, f"{subscribed} 1", [attempts[1]], 300))
    wait_for_lock(second.pid)
    first.execute("commit")
    assert second.result() == "applied"
    assert sent_texts(conn, subscribed) == ["1"] * 300


def test_compaction_keeps_options_of_what_is_staged(ready: Connection) -> None:
    attempt, table = begin(ready, "s")
    copy(
        ready,
        table,
        "attempt, n, queue, payload, key, delay, ttl",
        [(attempt, 0, "q", "x", "k", None, "1 day"), (attempt, 1, "q", "y", None, "60", None)],
    )
    turn_stage(ready, 4)
    assert commit(ready, "s", [attempt], 2) == "applied"
    (message,) = sent_back(ready, "q")
    assert (message.payload, message.key) == ("x", "k") and message.expires_at is not None
    assert value(ready, "select count(*) from pgque.retry_queue where ev_data = 'y'") == 1
