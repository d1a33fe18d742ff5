"""Sending: every form, idempotent, by triggers, paused; looking ahead."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    drain,
    forced_tick,
    move_clock,
    nack,
    payloads,
    pump,
    receive,
    refused,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)


def sent_back(conn: Connection, queue: str) -> list[tuple[str, str | None]]:
    tick(conn, queue)
    return [(m.type, m.payload) for m in receive(conn, queue)]


def test_text_is_kept_byte_for_byte_and_jsonb_is_stored_canonical(conn: Connection, subscribed: str) -> None:
    value(conn, "select pgque.send(%s, %s::text)", subscribed, '{"b":1,  "a":2}')
    value(conn, "select pgque.send(%s, %s::jsonb)", subscribed, '{"b":1,  "a":2}')
    conn.execute(f"select pgque.send('{subscribed}', '{{\"b\":1,  \"a\":2}}')".encode())
    value(conn, "select pgque.send(%s, 't', %s::text)", subscribed, " \n\t\\ é 😀 ")
    value(conn, "select pgque.send(%s, 't', %s::jsonb)", subscribed, "[1]")
    value(conn, "select pgque.send(%s, 't', %s::text)", subscribed, None)
    assert sent_back(conn, subscribed) == [
        ("default", '{"b":1,  "a":2}'),
        ("default", '{"a": 2, "b": 1}'),
        ("default", '{"b":1,  "a":2}'),
        ("t", " \n\t\\ é 😀 "),
        ("t", "[1]"),
        ("t", None),
    ]
    refused("22P02", rows, conn, "select pgque.send(%s, 'nonsense'::jsonb)", subscribed)


def test_a_big_payload_comes_back_whole(conn: Connection, subscribed: str) -> None:
    big = "0123456789äöü" * 200_000
    send(conn, subscribed, big)
    assert sent_back(conn, subscribed) == [("default", big)]


def test_a_batch_is_sent_in_order_with_ids_in_input_order(conn: Connection, subscribed: str) -> None:
    ids = value(conn, "select pgque.send_batch(%s, 't', array['a', null, 'c'])", subscribed)
    assert ids == sorted(ids) and len(ids) == 3
    more = value(conn, "select pgque.send_batch(%s, array['d'])", subscribed)
    json_ids = value(conn, "select pgque.send_batch(%s, 't', array['1', '2']::jsonb[])", subscribed)
    value(conn, "select pgque.send_batch(%s, array['3']::jsonb[])", subscribed)
    assert [*ids, *more, *json_ids] == list(range(ids[0], ids[0] + 6))
    assert sent_back(conn, subscribed) == [
        ("t", "a"), ("t", None), ("t", "c"), ("default", "d"), ("t", "1"), ("t", "2"), ("default", "3"),
    ]  # fmt: skip


def test_an_empty_batch_sends_nothing_and_asks_nothing(conn: Connection, queue: str) -> None:
    for form in ("'{}'::text[]", "'{}'::jsonb[]"):
        assert value(conn, f"select pgque.send_batch(%s, 't', {form})", "no " + queue) == []
        assert value(conn, f"select pgque.send_batch(%s, {form})", "no " + queue) == []
        refused("PQ001", rows, conn, "select pgque.send_batch(%s, array['x'])", "no " + queue)
    assert tick(conn, queue) is None


def test_a_null_batch_is_refused(conn: Connection, queue: str) -> None:
    error = refused("PQ005", rows, conn, "select pgque.send_batch(%s, 't', null::text[])", queue)
    assert queue in str(error)


def test_a_batch_is_sent_whole_or_not_at_all(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    one = transaction()
    send_many(one, subscribed, 100)
    one.execute("rollback")
    assert sent_back(conn, subscribed) == []


def test_a_partition_key_is_kept_in_extra1(conn: Connection, subscribed: str) -> None:
    value(conn, "select pgque.send(%s, 't', 'x'::text, 'key')", subscribed)
    tick(conn, subscribed)
    assert receive(conn, subscribed)[0].extra1 == "key"


def test_an_idempotent_send_returns_the_first_id(conn: Connection, subscribed: str) -> None:
    call = "select event_id, deduped from pgque.send_idem(%s, 't', %s::text, %s)"
    ((first, deduped),) = rows(conn, call, subscribed, "one", "key")
    assert deduped is False
    assert rows(conn, call, subscribed, "two", "key") == [(first, True)]
    ((other, deduped),) = rows(conn, call, subscribed, "three", "other key")
    assert (other > first, deduped) == (True, False)
    tick(conn, subscribed)
    assert drain(conn, subscribed) == [first, other]
    assert rows(conn, call, subscribed, "four", "key") == [(first, True)]


def test_the_same_key_is_free_again_after_its_ttl_and_in_another_queue(own: Connection) -> None:
    for name in ("q", "p"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    call = "select event_id, deduped from pgque.send_idem(%s, 't', '{\"a\": 1}'::jsonb, 'key', '10 minutes', 'pk')"
    ((first, _),) = rows(own, call, "q")
    assert rows(own, call, "p")[0][1] is False
    move_clock(own, "9 minutes")
    assert rows(own, call, "q") == [(first, True)]
    move_clock(own, "11 minutes")
    ((second, deduped),) = rows(own, call, "q")
    assert (second > first, deduped) == (True, False)
    move_clock(own, "40 minutes")
    value(own, "select pgque.maint()")
    assert rows(own, call, "q")[0][1] is False
    tick(own, "q")
    assert [m.extra1 for m in receive(own, "q")] == ["pk"] * 3


def test_a_rolled_back_idempotent_send_leaves_the_key_free(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    call = "select event_id, deduped from pgque.send_idem(%s, 't', 'x'::text, 'key')"
    one = transaction()
    rows(one, call, subscribed)
    one.execute("rollback")
    assert rows(conn, call, subscribed)[0][1] is False


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_of_two_sessions_that_send_one_key_at_once_one_sends(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    end: str,
) -> None:
    call = "select event_id, deduped from pgque.send_idem(%s, 't', 'x'::text, 'key')"
    one = transaction()
    ((first, _),) = rows(one, call, subscribed)
    other = background(lambda c: rows(c, call, subscribed))
    wait_for_lock(other.pid)
    one.execute(end.encode())
    ((second, deduped),) = other.result()
    tick(conn, subscribed)
    assert drain(conn, subscribed) == [second]
    assert (deduped, second == first) == ((True, True) if end == "commit" else (False, False))


@pytest.mark.parametrize("arguments", ["null", "'k', '0'", "'k', '-1 hour'", "'k', null"])
def test_an_idempotent_send_needs_a_key_and_a_ttl(conn: Connection, queue: str, arguments: str) -> None:
    error = refused("PQ005", rows, conn, f"select pgque.send_idem(%s, 't', 'x'::text, {arguments})", queue)
    assert queue in str(error)


def test_a_paused_queue_refuses_senders_and_lets_consumers_drain(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 3)
    value(conn, "select pgque.pause(%s)", subscribed)
    for call in (
        "select pgque.send(%s, 'x'::text)",
        "select pgque.send(%s, 't', '{}'::jsonb)",
        "select pgque.send_batch(%s, array['x'])",
        "select pgque.insert_event(%s, 't', 'x')",
        "select pgque.send_idem(%s, 't', 'x'::text, 'k')",
    ):
        error = refused("PQ013", rows, conn, call, subscribed)
        assert subscribed in str(error)
    tick(conn, subscribed)
    batch = receive(conn, subscribed)
    assert [m.msg_id for m in batch] == sent
    nack(conn, batch[0])
    ack(conn, batch[0].batch_id)
    assert pump(conn) == 1
    tick(conn, subscribed)
    assert drain(conn, subscribed) == sent[:1]
    value(conn, "select pgque.resume(%s)", subscribed)
    last = send(conn, subscribed)
    tick(conn, subscribed)
    assert drain(conn, subscribed) == [last]
    for call in ("pause", "resume"):
        refused("PQ001", rows, conn, f"select pgque.{call}(%s)", "no " + subscribed)


def test_the_current_event_table_takes_plain_inserts_of_the_owner(conn: Connection, subscribed: str) -> None:
    table = value(conn, "select pgque.current_event_table(%s)", subscribed)
    with conn.cursor().copy(f"copy {table} (ev_type, ev_data) from stdin".encode()) as copy:
        copy.write_row(("t", "copied"))
    conn.execute(f"insert into {table} (ev_type, ev_data) values ('t', 'inserted')".encode())
    assert sent_back(conn, subscribed) == [("t", "copied"), ("t", "inserted")]


def test_peek_shows_what_is_next_and_touches_nothing(conn: Connection, subscribed: str) -> None:
    subscribe(conn, subscribed, "ahead")
    sent = send_many(conn, subscribed, 5)
    peek = "select msg_id from pgque.peek(%s, %s, %s)"
    assert [r[0] for r in rows(conn, "select msg_id from pgque.peek(%s, 2)", subscribed)] == sent[:2]
    tick(conn, subscribed)
    drain(conn, subscribed, "ahead")
    assert [r[0] for r in rows(conn, "select msg_id from pgque.peek(%s)", subscribed)] == sent
    assert rows(conn, peek, subscribed, 9, "ahead") == []
    batch = receive(conn, subscribed, count=2)
    assert [r[0] for r in rows(conn, peek, subscribed, 9, "c")] == sent
    ack(conn, batch[0].batch_id)
    assert [r[0] for r in rows(conn, peek, subscribed, 9, "c")] == sent[2:]
    assert drain(conn, subscribed, count=3) == sent[2:]
    assert rows(conn, "select msg_id from pgque.peek(%s)", subscribed) == []
    for n in (0, -1, None):
        refused("PQ005", rows, conn, "select * from pgque.peek(%s, %s)", subscribed, n)
    refused("PQ001", rows, conn, "select * from pgque.peek(%s)", "no " + subscribed)
    refused("PQ011", rows, conn, "select * from pgque.peek(%s, 1, 'nobody')", subscribed)


@pytest.fixture
def table(conn: Connection, subscribed: str) -> Any:
    """A table with a key, and the queue its changes may go to."""
    name = f"t_{subscribed}"
    conn.execute(f"create table {name} (id int, part text, body text, primary key (id, part))".encode())
    yield name
    conn.execute(f"drop table {name}".encode())


def watch(conn: Connection, table: str, function: str, when: str, *arguments: str) -> None:
    quoted = ", ".join("'" + a.replace("'", "''") + "'" for a in arguments)
    conn.execute(
        f"create trigger watch {when} on {table} for each row execute function pgque.{function}({quoted})".encode()
    )


def changes(conn: Connection, queue: str) -> list[Any]:
    tick(conn, queue)
    found = receive(conn, queue)
    if found:
        ack(conn, found[0].batch_id)
    return found


def test_jsontriga_records_changes_as_json(conn: Connection, subscribed: str, table: str) -> None:
    watch(conn, table, "jsontriga", "after insert or update or delete", subscribed, "backup")
    conn.execute(f"insert into {table} values (1, 'a', 'x')".encode())
    conn.execute(f"update {table} set body = 'y'".encode())
    conn.execute(f"delete from {table}".encode())
    found = changes(conn, subscribed)
    assert [m.type for m in found] == ["I:id,part", "U:id,part", "D:id,part"]
    assert [json.loads(m.payload)["body"] for m in found] == ["x", "y", "y"]
    assert {m.extra1 for m in found} <= {table, f"public.{table}"}
    assert found[0].extra2 is None
    assert json.loads(found[1].extra2)["body"] == "x"


def test_a_trigger_names_the_columns_of_the_key_and_not_what_its_index_includes(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    own.execute("create table public.t (id int, body text, primary key (id) include (body))")
    watch(own, "public.t", "jsontriga", "after insert", "q")
    own.execute("insert into public.t values (1, 'x')")
    assert [m.type for m in changes(own, "q")] == ["I:id"]


def test_logutriga_records_changes_url_encoded(conn: Connection, subscribed: str, table: str) -> None:
    watch(conn, table, "logutriga", "after insert or delete", subscribed)
    conn.execute(f"insert into {table} values (1, 'ä b&c=d', null)".encode())
    (message,) = changes(conn, subscribed)
    assert message.type == "I:id,part"
    assert set(message.payload.split("&")) == {"id=1", "part=%C3%A4%20b%26c%3Dd", "body"}


def test_sqltriga_records_changes_as_sql_that_can_be_run_again(
    conn: Connection, subscribed: str, table: str
) -> None:
    watch(conn, table, "sqltriga", "after insert or update or delete", subscribed)
    conn.execute(f"insert into {table} values (1, 'it''s', 'x')".encode())
    conn.execute(f"update {table} set body = null".encode())
    conn.execute(f"insert into {table} values (2, 'b', 'z')".encode())
    conn.execute(f"delete from {table} where id = 2".encode())
    found = changes(conn, subscribed)
    assert [m.type for m in found] == ["I", "U", "I", "D"]
    conn.execute(f"create table copy_{table} (like {table})".encode())
    try:
        forms = {"I": "insert into {} {}", "U": "update {} set {}", "D": "delete from {} where {}"}
        for m in found:
            conn.execute(forms[m.type].format(f"copy_{table}", m.payload).encode())
        assert rows(conn, f"select * from copy_{table}") == rows(conn, f"select * from {table}")
    finally:
        conn.execute(f"drop table copy_{table}".encode())


def test_a_trigger_ignores_columns_skips_and_denies(conn: Connection, subscribed: str, table: str) -> None:
    watch(conn, table, "jsontriga", "after insert or update", subscribed, "ignore=body", "pkey=id")
    conn.execute(f"insert into {table} values (1, 'a', 'x')".encode())
    conn.execute(f"update {table} set body = 'y'".encode())
    conn.execute(f"update {table} set part = 'b'".encode())
    found = changes(conn, subscribed)
    assert [m.type for m in found] == ["I:id", "U:id"]
    assert all("body" not in json.loads(m.payload) for m in found)
    conn.execute(f"drop trigger watch on {table}".encode())

    watch(conn, table, "jsontriga", "before insert", subscribed, "SKIP")
    conn.execute(f"insert into {table} values (7, 'a', 'x')".encode())
    assert value(conn, f"select count(*) from {table} where id = 7") == 0
    assert [m.type for m in changes(conn, subscribed)] == ["I:id,part"]
    conn.execute(f"drop trigger watch on {table}".encode())

    watch(conn, table, "jsontriga", "before delete", subscribed, "deny")
    error = refused("PQ013", rows, conn, f"delete from {table}")
    assert table in str(error)
    conn.execute(f"drop trigger watch on {table}".encode())

    watch(conn, table, "jsontriga", "before delete", subscribed, "nonsense")
    refused("PQ005", rows, conn, f"delete from {table}")


def test_a_before_trigger_lets_the_change_happen_also_when_the_queue_is_called_skip(
    conn: Connection, new_queue: Callable[[str], str], table: str
) -> None:
    queue = new_queue("skip")
    subscribe(conn, queue)
    watch(conn, table, "jsontriga", "before insert or update or delete", queue)
    conn.execute(f"insert into {table} values (1, 'a', 'x')".encode())
    conn.execute(f"update {table} set body = 'y'".encode())
    assert rows(conn, f"select * from {table}") == [(1, "a", "y")]
    conn.execute(f"delete from {table}".encode())
    assert rows(conn, f"select * from {table}") == []
    assert [m.type[0] for m in changes(conn, queue)] == ["I", "U", "D"]


def test_a_truncate_is_recorded_once(conn: Connection, subscribed: str, table: str) -> None:
    conn.execute(
        f"create trigger watch after truncate on {table} for each statement"
        f" execute function pgque.jsontriga('{subscribed}')".encode()
    )
    conn.execute(f"truncate {table}".encode())
    assert [m.type for m in changes(conn, subscribed)] == ["R"]


def test_a_trigger_without_a_queue_or_with_an_unknown_one_stops_the_change(
    conn: Connection, subscribed: str, table: str
) -> None:
    watch(conn, table, "jsontriga", "after insert")
    error = refused("PQ005", rows, conn, f"insert into {table} values (1, 'a', 'x')")
    assert table in str(error)
    conn.execute(f"drop trigger watch on {table}".encode())
    watch(conn, table, "jsontriga", "after insert", "no " + subscribed)
    refused("PQ001", rows, conn, f"insert into {table} values (1, 'a', 'x')")


def test_a_trigger_on_a_table_with_odd_names_records_them(conn: Connection, subscribed: str) -> None:
    conn.execute('create table "Odd ""Table" ("The Key" int primary key, "a,b" text)')
    try:
        watch(conn, '"Odd ""Table"', "sqltriga", "after insert or update", subscribed)
        conn.execute('insert into "Odd ""Table" values (1, \'x\')')
        conn.execute('update "Odd ""Table" set "a,b" = \'y\'')
        insert, update = changes(conn, subscribed)
        assert insert.extra1 in ('"Odd ""Table"', 'public."Odd ""Table"')
        assert update.payload == "\"a,b\" = 'y' where \"The Key\" = '1'"
    finally:
        conn.execute('drop table "Odd ""Table"')


def test_sqltriga_refuses_a_change_it_can_not_describe(conn: Connection, subscribed: str) -> None:
    name = f"nokey_{subscribed}"
    conn.execute(f"create table {name} (x int)".encode())
    try:
        watch(conn, name, "sqltriga", "after update", subscribed)
        conn.execute(f"insert into {name} values (1)".encode())
        try:
            conn.execute(f"update {name} set x = 2".encode())
        except psycopg.Error as error:
            assert error.sqlstate == "PQ005"
        else:
            (message,) = changes(conn, subscribed)
            assert message.payload is not None
    finally:
        conn.execute(f"drop table {name}".encode())


def test_sending_and_receiving_work_without_a_tick_in_between_later(
    conn: Connection, subscribed: str
) -> None:
    sent = send(conn, subscribed)
    assert receive(conn, subscribed) == []
    forced_tick(conn, subscribed)
    assert payloads(conn, subscribed) == ["x"]
    assert sent


def test_sqltriga_finds_rows_whose_key_is_null(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    own.execute("create table public.t (id int, part text, body text)")
    own.execute("create table public.copied (like public.t)")
    watch(own, "public.t", "sqltriga", "after insert or update or delete", "q", "pkey=id,part")
    own.execute("insert into public.t values (1, null, 'x'), (2, null, null), (3, 'c', 'z')")
    own.execute("update public.t set body = 'y' where id = 1")
    own.execute("update public.t set part = 'b' where id = 2")
    own.execute("delete from public.t where id = 1")
    forms = {"I": "insert into {} {}", "U": "update {} set {}", "D": "delete from {} where {}"}
    for m in changes(own, "q"):
        own.execute(forms[m.type].format("public.copied", m.payload).encode())
    assert rows(own, "select * from public.copied order by id") == [(2, "b", None), (3, "c", "z")]


@pytest.mark.parametrize("function", ["jsontriga", "logutriga", "sqltriga"])
def test_a_trigger_whose_key_is_no_column_refuses_the_change(
    conn: Connection, subscribed: str, table: str, function: str
) -> None:
    conn.execute(f"insert into {table} values (1, 'a', 'x')".encode())
    watch(conn, table, function, "after insert or update or delete", subscribed, "pkey=id,no such,neither")
    for change in (
        f"insert into {table} values (2, 'a')",
        f"update {table} set body = 'y'",
        f"delete from {table}",
    ):
        error = refused("PQ005", rows, conn, change)
        assert table in str(error)
        assert "no such, neither" in str(error)
    assert changes(conn, subscribed) == []


def test_json_and_a_fourth_literal_by_position_is_a_partition_key_as_with_text(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    own.execute("select pgque.send('q', 't', '{\"a\": 1}'::jsonb, 'key1')")
    own.execute("select pgque.send('q', 't', '{\"a\": 1}'::jsonb, null)")
    own.execute("select pgque.send('q', 't', '{\"a\": 1}'::jsonb, headers => '{\"h\": 1}')")
    own.execute("select pgque.send('q', 't', '{\"a\": 1}'::jsonb, '{\"h\": 2}'::jsonb)")
    error = refused("PQ005", rows, own, "select pgque.send('q', 't', '{\"a\": 1}'::jsonb, '{\"h\": 1}')")
    assert "headers =>" in str(error.diag.message_hint)
    forced_tick(own, "q")
    found = [(m.extra1, m.headers) for m in receive(own, "q")]
    assert found == [("key1", None), (None, None), (None, {"h": 1}), (None, {"h": 2})]


@pytest.mark.slow
def test_keys_that_hold_for_years_keep_no_others(own: Connection) -> None:
    for queue in ("q", "gone"):
        value(own, "select pgque.create_queue(%s)", queue)
    refused("PQ005", value, own, "select pgque.send_idem('q', 't', 'x', 'k', '101 years')")
    long = "select count(*) from generate_series(1, 5000) n, pgque.send_idem(%s, 't', 'x', n || repeat('x', 900), '100 years')"
    value(own, long, "gone")
    value(own, "select pgque.drop_queue('gone')")
    sizes = "select array[pg_relation_size('pgque.idempotency_0'), pg_relation_size('pgque.idempotency_1')]"
    for _ in range(3):
        value(own, "select pgque.maint_tables()")
    assert value(own, sizes) == [0, 0]
    value(own, long, "q")
    assert value(own, "select pgque.maint_tables()") > 0
    value(own, long.replace("n ||", "'a' || n ||").replace("100 years", "1 second"), "q")
    value(own, long.replace("n ||", "'b' || n ||").replace("100 years", "1 second"), "q")
    move_clock(own, "1 hour")
    for _ in range(6):
        value(own, "select pgque.maint_tables()")
    kept = value(
        own, "select (select count(*) from pgque.idempotency_0) + (select count(*) from pgque.idempotency_1)"
    )
    assert kept == 5000
    assert value(own, "select deduped from pgque.send_idem('q', 't', 'x', 1 || repeat('x', 900))") is True
