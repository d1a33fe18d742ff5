"""Who may do what, and what a hostile caller can not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    column,
    drain,
    forced_tick,
    receive,
    refused,
    rows,
    send,
    tick,
    value,
)

FUNCTIONS = """
select p.oid::regprocedure::text, p.proname, p.prosecdef, p.prokind, p.proconfig
from pg_proc as p
where p.pronamespace = 'pgque'::regnamespace
order by 1
"""
RELATIONS = """
select c.oid::regclass::text, c.relkind::text
from pg_class as c
where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'S')
order by 1
"""
NEVER_GRANTED = {"uninstall"}


def test_a_role_without_grants_can_call_and_read_nothing(
    conn: Connection, subscribed: str, nobody: Any
) -> None:
    role = nobody.name
    allowed = [
        sig
        for sig, *_ in rows(conn, FUNCTIONS)
        if value(conn, "select has_function_privilege(%s, %s, 'execute')", role, sig)
    ]
    assert allowed == []
    for name, kind in rows(conn, RELATIONS):
        what = "sequence" if kind == "S" else "table"
        rights = (
            ("usage", "select", "update")
            if kind == "S"
            else ("select", "insert", "update", "delete", "truncate", "references", "trigger")
        )
        for right in rights:
            assert not value(conn, f"select has_{what}_privilege(%s, %s, %s)", role, name, right), (
                name,
                right,
            )
    for right in ("usage", "create"):
        assert not value(conn, "select has_schema_privilege(%s, 'pgque', %s)", role, right)
    with psycopg.connect(nobody.dsn, autocommit=True) as stranger:
        for call in (
            "select pgque.version()",
            f"select pgque.send('{subscribed}', 'x'::text)",
            f"select * from pgque.receive('{subscribed}', 'c')",
            "select pgque.create_queue('mine')",
            "select pgque.ack(1)",
            "select * from pgque.get_queue_info()",
            "select * from pgque.queue",
            "select * from pgque.event",
            "select * from pgque.subscription",
            "select * from pgque.dead_letter",
            "select * from pgque.dead_letters",
            "call pgque.ticker_loop('1 second')",
            "create table pgque.mine (x int)",
        ):
            refused("42501", rows, stranger, call)


def test_a_reader_consumes_and_a_writer_produces_and_neither_does_the_other(
    conn: Connection, subscribed: str, reader: Any, writer: Any
) -> None:
    with psycopg.connect(writer.dsn, autocommit=True) as w, psycopg.connect(reader.dsn, autocommit=True) as r:
        sent = send(w, subscribed)
        assert value(w, "select pgque.send(%s, 't', '{}'::jsonb)", subscribed) == sent + 1
        assert value(w, "select pgque.send_batch(%s, 't', array['a', 'b'])", subscribed) == [
            sent + 2,
            sent + 3,
        ]
        assert (
            value(w, "select event_id from pgque.send_idem(%s, 't', 'x'::text, 'k')", subscribed) == sent + 4
        )
        tick(conn, subscribed)
        assert value(r, "select pgque.subscribe(%s, 'mine')", subscribed) == 1
        batch = receive(r, subscribed)
        assert [m.msg_id for m in batch] == list(range(sent, sent + 5))
        value(
            r,
            "select pgque.nack(%s, m) from pgque.receive(%s, 'c') as m limit 1",
            batch[0].batch_id,
            subscribed,
        )
        assert ack(r, batch[0].batch_id) == 1
        assert rows(r, "select * from pgque.get_queue_info(%s)", subscribed)
        assert rows(r, "select * from pgque.get_consumer_info(%s)", subscribed)
        assert rows(r, "select * from pgque.health()")
        assert rows(r, "select * from pgque.metrics()")
        assert rows(r, "select * from pgque.status()")
        assert value(r, "select count(*) from pgque.peek(%s)", subscribed) >= 0
        assert value(r, "select pgque.unsubscribe(%s, 'mine')", subscribed) == 1
        for call in (
            f"select pgque.send('{subscribed}', 'x'::text)",
            f"select pgque.send_batch('{subscribed}', 't', array['x'])",
            f"select pgque.insert_event('{subscribed}', 't', 'x')",
            f"select * from pgque.send_idem('{subscribed}', 't', 'x'::text, 'k')",
        ):
            refused("42501", rows, r, call)
        for call in (
            f"select * from pgque.receive('{subscribed}', 'c')",
            f"select pgque.subscribe('{subscribed}', 'mine')",
            f"select pgque.unsubscribe('{subscribed}', 'c')",
            "select pgque.ack(1)",
            f"select pgque.next_batch('{subscribed}', 'c')",
            f"select * from pgque.peek('{subscribed}')",
            "select * from pgque.get_batch_events(1)",
        ):
            refused("42501", rows, w, call)
        for role in (r, w):
            for call in (
                "select pgque.create_queue('mine')",
                f"select pgque.drop_queue('{subscribed}', true)",
                f"select pgque.set_queue_config('{subscribed}', 'max_retries', '1')",
                f"select pgque.pause('{subscribed}')",
                "select pgque.ticker()",
                "select pgque.maint()",
                "select pgque.stop()",
                f"select * from pgque.dlq_inspect('{subscribed}')",
                f"select pgque.dlq_purge('{subscribed}')",
                "select * from pgque.get_batch_cursor(1, 'c', 1)",
                "call pgque.ticker_loop('1 second')",
                "select pgque.uninstall()",
                "select * from pgque.queue",
                "select * from pgque.event",
                "create table pgque.mine (x int)",
                "create function pgque.mine() returns int language sql as 'select 1'",
            ):
                refused("42501", rows, role, call)


def test_an_admin_can_do_all_of_it_but_not_create_objects_or_uninstall(
    conn: Connection, subscribed: str, admin: Any
) -> None:
    with psycopg.connect(admin.dsn, autocommit=True) as a:
        name = f"{subscribed} of admin"
        assert value(a, "select pgque.create_queue(%s)", name) == 1
        assert value(a, "select pgque.create_queue(%s, '{\"max_retries\": 0}'::jsonb)", name + "2") == 1
        value(a, "select pgque.alter_queue(%s, '{\"max_retries\": 0}'::jsonb)", name)
        value(a, "select pgque.subscribe(%s, 'c')", name)
        sent = send(a, name)
        value(a, "select pgque.force_next_tick(%s)", name)
        assert tick(a, name) is not None
        (message,) = receive(a, name)
        assert message.msg_id == sent
        assert rows(a, "select * from pgque.get_batch_cursor(%s, 'cur', 10)", message.batch_id) != []
        rows(a, "select pgque.nack(%s, array[%s::bigint])", message.batch_id, sent)
        ack(a, message.batch_id)
        (dl_id,) = column(a, "select dl_id from pgque.dlq_inspect(%s)", name)
        value(a, "select pgque.dlq_requeue(%s)", dl_id)
        value(a, "select pgque.maint()")
        value(a, "select pgque.ticker()")
        a.execute("call pgque.ticker_loop('100 milliseconds')")
        assert drain(a, name) == [sent]
        for relation in (
            "queue",
            "consumer",
            "subscription",
            "tick",
            "retry_queue",
            "dead_letter",
            "dead_letters",
            "config",
        ):
            rows(a, f"select * from pgque.{relation}")
        value(a, "select pgque.drop_queue(%s, true)", name)
        value(a, "select pgque.drop_queue(%s)", name + "2")
        for call in (
            "create table pgque.mine (x int)",
            "create function pgque.mine() returns int language sql as 'select 1'",
            "create type pgque.mine as (x int)",
            "select pgque.uninstall()",
            "update pgque.queue set queue_name = 'x'",
            "delete from pgque.dead_letter",
            "insert into pgque.event (slot) values (1)",
            "truncate pgque.retry_queue",
        ):
            refused("42501", rows, a, call)


def test_the_roles_have_the_rights_of_their_list_and_no_others(conn: Connection) -> None:
    granted: dict[str, set[str]] = {}
    for name, role in rows(conn, "select func_name, role_name from pgque._grants()"):
        granted.setdefault(name, set()).add(role)
    functions = rows(conn, FUNCTIONS)
    assert set(granted) <= {f[1] for f in functions}
    for sig, name, *_ in functions:
        if not name.startswith("_") and name not in NEVER_GRANTED:
            assert name in granted, f"{sig} is public by its name and granted to nobody"
        roles = granted.get(name, set())
        expected = {
            "pgque_reader": "pgque_reader" in roles,
            "pgque_writer": "pgque_writer" in roles,
            "pgque_admin": bool(roles),
        }
        actual = {
            role: value(conn, "select has_function_privilege(%s, %s, 'execute')", role, sig)
            for role in expected
        }
        assert actual == expected, sig


def test_reader_and_writer_are_siblings_and_admin_is_a_member_of_both(conn: Connection) -> None:
    def member(role: str, group: str) -> bool:
        result: bool = value(conn, "select pg_has_role(%s, %s, 'member')", role, group)
        return result

    assert not member("pgque_reader", "pgque_writer")
    assert not member("pgque_writer", "pgque_reader")
    assert member("pgque_admin", "pgque_reader")
    assert member("pgque_admin", "pgque_writer")


def test_every_definer_function_pins_its_search_path(conn: Connection) -> None:
    wrong = [
        sig
        for sig, _, definer, _, config in rows(conn, FUNCTIONS)
        if definer and "search_path=pg_catalog, pgque, pg_temp" not in (config or [])
    ]
    assert wrong == []


HOSTILE = """
create temp table queue (queue_id int, queue_name text, queue_open boolean, queue_cur_table int, queue_event_seq regclass);
create temp table event (slot int, ev_id bigint);
create temp table tick (tick_id bigint);
create temp table consumer (co_id int, co_name text);
create temp table subscriber (sub_id int);
create temp table position_0 (pos_sub int);
create temp table journal (journal_cur int);
create temp table retry_queue (ev_id bigint);
create temp table dead_letter (dl_id bigint);
create temp table pg_class (oid oid);
create temp table pg_proc (oid oid);
create type pg_temp.message as (x int);
create domain pg_temp.text as pg_catalog.int4;
create domain pg_temp.xid8 as pg_catalog.int4;
create function pg_temp.now() returns timestamptz language plpgsql as $$ begin raise exception 'hostile now'; end $$;
create function pg_temp.clock() returns timestamptz language plpgsql as $$ begin raise exception 'hostile clock'; end $$;
create function pg_temp.coalesce_(int) returns int language plpgsql as $$ begin raise exception 'hostile'; end $$;
create function pg_temp.eq(int, int) returns boolean language plpgsql as $$ begin raise exception 'hostile ='; end $$;
create function pg_temp.eq(pg_catalog.text, pg_catalog.text) returns boolean language plpgsql as $$ begin raise exception 'hostile ='; end $$;
create function pg_temp.eq(bigint, bigint) returns boolean language plpgsql as $$ begin raise exception 'hostile ='; end $$;
create operator pg_temp.= (function = pg_temp.eq, leftarg = int, rightarg = int);
create operator pg_temp.= (function = pg_temp.eq, leftarg = pg_catalog.text, rightarg = pg_catalog.text);
create operator pg_temp.= (function = pg_temp.eq, leftarg = bigint, rightarg = bigint);
create function pg_temp.plus(int, int) returns int language plpgsql as $$ begin raise exception 'hostile +'; end $$;
create operator pg_temp.+ (function = pg_temp.plus, leftarg = int, rightarg = int);
set search_path = pg_temp, public, pg_catalog;
"""


@pytest.mark.parametrize("who", ["reader and writer", "superuser"])
def test_a_hostile_search_path_and_shadowing_objects_change_nothing(
    conn: Connection, connect: Callable[..., Connection], subscribed: str, roles: Any, who: str
) -> None:
    role = roles("reader", "writer") if who != "superuser" else None
    hostile = connect(role.dsn) if role else connect()
    hostile.execute(HOSTILE)
    sent = [
        value(
            hostile,
            "select pgque.insert_event(%s::pg_catalog.text, 't'::pg_catalog.text, 'x'::pg_catalog.text)",
            subscribed,
        ),
        value(hostile, "select pgque.send(%s::pg_catalog.text, 'y'::pg_catalog.text)", subscribed),
        *value(
            hostile,
            "select pgque.send_batch(%s::pg_catalog.text, 't'::pg_catalog.text, array['z'::pg_catalog.text])",
            subscribed,
        ),
        value(
            hostile,
            "select event_id from pgque.send_idem(%s::pg_catalog.text, 't'::pg_catalog.text, 'x'::pg_catalog.text, 'k'::pg_catalog.text)",
            subscribed,
        ),
    ]
    if who == "superuser":
        assert value(hostile, "select pgque.ticker(%s::pg_catalog.text)", subscribed) is not None
        value(hostile, "select pgque.maint()")
    else:
        tick(conn, subscribed)
    batch = rows(
        hostile, "select * from pgque.receive(%s::pg_catalog.text, 'c'::pg_catalog.text)", subscribed
    )
    assert [b[0] for b in batch] == sent
    assert rows(hostile, "select * from pgque.get_batch_events(%s)", batch[0][1])
    rows(hostile, "select * from pgque.nack(%s, array[%s::bigint])", batch[0][1], sent[0])
    assert value(hostile, "select pgque.ack(%s)", batch[0][1]) == 1
    for info in ("get_queue_info", "get_consumer_info", "health", "metrics", "status"):
        assert rows(hostile, f"select * from pgque.{info}()")
    assert (
        value(hostile, "select pgque.unsubscribe(%s::pg_catalog.text, 'c'::pg_catalog.text)", subscribed) == 1
    )


@pytest.mark.parametrize("who", ["reader and writer", "superuser"])
def test_a_hostile_search_path_changes_nothing_for_sinks_and_windows(
    conn: Connection, connect: Callable[..., Connection], subscribed: str, roles: Any, who: str
) -> None:
    role = roles("reader", "writer") if who != "superuser" else None
    hostile = connect(role.dsn) if role else connect()
    hostile.execute(HOSTILE)
    queue = "%s::pg_catalog.text"
    (start,) = column(hostile, f"select pgque.tick_for({queue}, 'latest')", subscribed)
    for view in ("sink", "sink_bulk"):
        rows(
            hostile,
            f"insert into pgque.{view} (queue, payload, headers) values (%s, 'x', '{{}}')",
            subscribed,
        )
        with hostile.cursor().copy(f"copy pgque.{view} (queue, payload) from stdin".encode()) as stream:
            stream.write_row((subscribed, "x"))
    rows(
        hostile,
        "insert into pgque.sink (queue, payload, sink_id, epoch, part, parts) values (%s, 'x', %s, 0, 0, 1)",
        subscribed,
        subscribed,
    )
    ((attempt, stage),) = rows(hostile, f"select * from pgque.sink_begin({queue}, 1)", subscribed)
    rows(hostile, f"insert into {stage} (attempt, n, queue) values (%s, 0, %s)", attempt, subscribed)
    commit = f"select pgque.sink_commit({queue}, 1, array[%s::pg_catalog.uuid], 1)"
    assert value(hostile, commit, subscribed, attempt) == "applied"
    assert value(hostile, commit, subscribed, attempt) == "duplicate"
    end = forced_tick(conn, subscribed)
    assert value(hostile, f"select pgque.next_tick({queue}, %s, 1)", subscribed, start) == end
    assert rows(hostile, f"select * from pgque.split_window({queue}, %s, %s, 2)", subscribed, start, end)
    found = column(hostile, f"select ev_id from pgque.read_window({queue}, %s, %s)", subscribed, start, end)
    assert len(found) == 6
    with hostile.transaction():
        rows(hostile, f"select pgque.read_window_cursor('c', {queue}, %s, %s, 'c')", subscribed, start, end)
        assert column(hostile, "fetch all from c") == found
    assert value(hostile, f"select pgque.open_stream({queue}, 'c')", subscribed) == start
    rows(
        hostile,
        f"select * from pgque.dead({queue}, 'c', array[%s::bigint], array['x'])",
        subscribed,
        found[0],
    )
    assert value(hostile, f"select pgque.seek({queue}, 'c', %s)", subscribed, end) == end


def test_a_writer_can_store_nothing_that_is_no_message(
    conn: Connection, subscribed: str, writer: Any
) -> None:
    conn.execute("create schema evil")
    conn.execute(f"grant all on schema evil to {writer.name}".encode())
    try:
        with psycopg.connect(writer.dsn, autocommit=True) as w:
            w.execute(
                "create function evil.no(text, text) returns boolean immutable language sql as 'select false'"
            )
            for name in ("=", "<>"):
                w.execute(
                    f"create operator evil.{name} (function = evil.no, leftarg = text, rightarg = text)".encode()
                )
            w.execute("set search_path = evil, pg_catalog")
            for statement in (
                "insert into pgque.sink_bulk (queue, payload, headers) values (%s, 'x', '[1]')",
                "insert into pgque.sink (queue, payload, headers) values (%s, 'x', '[1]')",
                "select pgque.send(%s, 't', 'x', '[1]'::jsonb)",
                "select pgque._send(%s, 't', 'x', null, null, null, null, '[1]'::jsonb, null)",
                "select pgque._send(%s, 't', 'x', null, null, null, null, null, 'bytes')",
            ):
                with pytest.raises(psycopg.Error):
                    rows(w, statement, subscribed)
        forced_tick(conn, subscribed)
        assert receive(conn, subscribed) == []
    finally:
        conn.execute("drop schema evil cascade")


def test_an_admin_can_not_run_sql_of_his_own_as_the_owner(
    conn: Connection, subscribed: str, admin: Any
) -> None:
    conn.execute("create schema if not exists evil")
    conn.execute(f"grant all on schema evil to {admin.name}".encode())
    try:
        with psycopg.connect(admin.dsn, autocommit=True) as a:
            a.execute(
                "create function evil.who(text default null) returns int language plpgsql as"
                " $$ begin raise exception 'ran as %', current_user using errcode = 'ZZ999'; end $$"
            )
            for call in (
                "select pgque._maint_operation('evil.who', 'x')",
                "select pgque._maint_operation('evil.who()::text || pgque.version', null)",
            ):
                try:
                    rows(a, call)
                except psycopg.Error as error:
                    assert f"ran as {admin.name}" in str(error) or error.sqlstate != "ZZ999", error
            refused("PQ005", rows, a, "select pgque._maint_operation(null, '1')")
            send(a, subscribed)
            tick(a, subscribed)
            (message,) = receive(a, subscribed)
            seen = []
            try:
                with a.transaction():
                    rows(
                        a,
                        "select * from pgque.get_batch_cursor(%s, 'c', 10, 'evil.who() > 0')",
                        message.batch_id,
                    )
            except psycopg.Error as error:
                seen.append(str(error))
            assert not any("ran as" in s and admin.name not in s for s in seen), seen
    finally:
        conn.execute("drop schema evil cascade")


@pytest.mark.parametrize("trigger", ["jsontriga", "logutriga", "sqltriga"])
def test_a_trigger_runs_no_code_of_the_table_owner_as_the_owner_of_pgque(
    conn: Connection, subscribed: str, writer: Any, trigger: str
) -> None:
    conn.execute("create schema if not exists evil")
    conn.execute(f"grant all on schema evil to {writer.name}".encode())
    try:
        with psycopg.connect(writer.dsn, autocommit=True) as w:
            w.execute("create type evil.kind as enum ('a', 'b')")
            w.execute("create table evil.ran (who text)")
            w.execute("grant all on evil.ran to public")
            w.execute(
                "create function evil.to_json(evil.kind) returns json language plpgsql as"
                " $$ begin insert into evil.ran values (current_user); return '1'; end $$"
            )
            w.execute("create cast (evil.kind as json) with function evil.to_json(evil.kind)")
            w.execute("create table evil.t (id int primary key, p evil.kind)")
            try:
                w.execute(
                    f"create trigger x after insert or update on evil.t for each row execute function"
                    f" pgque.{trigger}('{subscribed}')".encode()
                )
                w.execute("insert into evil.t values (1, 'a')")
                w.execute("update evil.t set p = 'b'")
            except psycopg.Error as error:
                assert error.sqlstate == "42501"
            assert set(column(w, "select who from evil.ran")) <= {writer.name}
    finally:
        conn.execute("drop schema evil cascade")


def test_nobody_but_the_owner_may_create_in_the_schema(conn: Connection) -> None:
    for role in ("pgque_reader", "pgque_writer", "pgque_admin"):
        assert not value(conn, "select has_schema_privilege(%s, 'pgque', 'create')", role)
    public = column(
        conn,
        "select a.privilege_type from pg_namespace as n, aclexplode(n.nspacl) as a"
        " where n.nspname = 'pgque' and a.grantee = 0",
    )
    assert public == []


def test_a_new_queue_gives_rights_to_nobody(conn: Connection, subscribed: str) -> None:
    for name, kind in rows(conn, RELATIONS):
        if name.startswith("pgque.sink_stage"):  # writers append to them, and no more
            continue
        if kind in "rp" and ("_0" in name or "_1" in name or "_2" in name or "event" in name):
            for role in ("pgque_reader", "pgque_writer"):
                for right in ("select", "insert", "update", "delete", "truncate"):
                    assert not value(conn, "select has_table_privilege(%s, %s, %s)", role, name, right), name
