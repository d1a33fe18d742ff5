"""What a caller with few rights, or one who was there before the install, can not make the owner's functions do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from conftest import create_database, drop_database, install
from faults.fuzzing import Fuzzer, good_for, literal, populate
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
    subscribe,
    take,
    tick,
    value,
)
from sql.test_install import run_psql
from support import servers

# A canary: it counts when it runs as whoever made it, the owner of everything, and a count is not rolled back.
CANARY = """
create schema if not exists {schema};
create sequence {schema}.ran;
create sequence {schema}.escaped;
grant usage on schema {schema} to public;
grant all on all sequences in schema {schema} to public;
create function {schema}.hit(what text) returns boolean language plpgsql volatile set search_path = pg_catalog as $f$
begin
  perform nextval('{schema}.ran');
  if current_user = {owner} then
    perform nextval('{schema}.escaped');
    raise warning 'escaped: %', what;
  end if;
  return true;
end $f$;
"""

# Operators and functions of a hostile schema that do what those of pg_catalog do, and call the canary. Exact ones win
# where the hostile schema is searched first. Closer ones, with argument types for which pg_catalog needs a cast, win
# even where pg_catalog is searched first.
SHADOWS = r"""
do $do$
declare
  v_schema  text := {schema};
  v_exact   boolean := {exact};
  v_types   text[] := array['"char"', 'bool', 'int2', 'int4', 'int8', 'numeric', 'float8', 'text', 'name', 'interval', 'timestamptz',
    'timestamp', 'date', 'oid', 'regclass', 'regprocedure', 'xid8', 'jsonb', 'uuid', 'bytea', 'text[]', 'int8[]', 'tid'];
  v_few     text[] := array['int4', 'int8', 'numeric', 'text', 'name', 'interval', 'timestamptz', 'regclass', 'regprocedure'];
  v_it      record;
  v_type    text;
  v_n       int := 0;
begin
  set local check_function_bodies = off;
  set local search_path = pg_catalog;
  set local client_min_messages = error;
  for v_it in
    select o.oprname as name, format_type(o.oprleft, null) as l, format_type(o.oprright, null) as r, format_type(o.oprresult, null) as res
    from pg_operator o
    where v_exact and o.oprnamespace = 'pg_catalog'::regnamespace and o.oprkind = 'b'
      and o.oprname in ('=', '<>', '<', '>', '<=', '>=', '+', '-', '*', '/', '%', '||', '~', '~*', '&', '|', '>>', '<<', '->', '->>', '?', '@>')
      and o.oprleft = any (v_types::regtype[]) and o.oprright = any (v_types::regtype[])
    union all
    select n.name, l, r, null
    from unnest(v_types) l, unnest(v_types) r,
      unnest(array['=', '<>', '<', '>', '<=', '>=', '+', '-', '*', '/', '%', '||', '~', '&', '|', '>>', '<<', '->>', '@>']) n (name)
    where not exists (
      select from pg_operator o
      where o.oprname = n.name and o.oprnamespace = 'pg_catalog'::regnamespace and o.oprleft = l::regtype and o.oprright = r::regtype)
  loop
    begin
      v_type := v_it.res;
      if v_type is null then
        execute format('select pg_typeof(null::%s operator(pg_catalog.%s) null::%s)', v_it.l, v_it.name, v_it.r) into v_type;
      end if;
      v_n := v_n + 1;
      execute format('create function %I.op_%s(%s, %s) returns %s language plpgsql set search_path = pg_catalog as %L',
        v_schema, v_n, v_it.l, v_it.r, v_type,
        format('begin perform %I.hit(%L); return $1 operator(pg_catalog.%s) $2; end', v_schema, v_it.l || ' ' || v_it.name || ' ' || v_it.r, v_it.name));
      execute format('create operator %I.%s (function = %I.op_%s, leftarg = %s, rightarg = %s)', v_schema, v_it.name, v_schema, v_n, v_it.l, v_it.r);
    exception
      when others then
        null;
    end;
  end loop;
  for v_it in
    with used as (
      select distinct m[1] as name
      from regexp_matches({source}, '([a-z_][a-z0-9_]*)\(', 'g') m
      where m[1] in (select p.proname from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace)
        and not exists (select from pg_proc p where p.pronamespace = 'pg_catalog'::regnamespace and p.proname = m[1] and (p.prokind <> 'f' or p.proretset))
    )
    select 'make_interval' as name, 'secs ' || t as args, 'interval' as res, 'secs => $1' as given from unnest(array['int4', 'int8', 'numeric']) t
    union all
    select u.name, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
      (select string_agg('$' || g, ', ') from generate_series(1, p.pronargs) g)
    from used u
    join pg_proc p on p.proname = u.name and p.pronamespace = 'pg_catalog'::regnamespace and p.provariadic = 0
    where v_exact
    union all
    select u.name, t, null, '$1'
    from used u, unnest(v_types) t
    where not exists (select from pg_proc p where p.proname = u.name and p.pronamespace = 'pg_catalog'::regnamespace and p.proargtypes::oid[] = array[t::regtype]::oid[])
    union all
    select u.name, l || ', ' || r, null, '$1, $2'
    from used u, unnest(v_few) l, unnest(v_few) r
    where not exists (select from pg_proc p where p.proname = u.name and p.pronamespace = 'pg_catalog'::regnamespace and p.proargtypes::oid[] = array[l::regtype, r::regtype]::oid[])
    union all
    select 'format', 'text, ' || l || ', ' || r, 'text', '$1, $2, $3' from unnest(v_few) l, unnest(v_few) r
  loop
    begin
      v_type := v_it.res;
      if v_type is null then
        execute format('select pg_typeof(pg_catalog.%I(%s))', v_it.name, regexp_replace(v_it.args, '([^,]+)', 'null::\1', 'g')) into v_type;
      end if;
      execute format('create function %I.%I(%s) returns %s language plpgsql set search_path = pg_catalog as %L',
        v_schema, v_it.name, v_it.args, v_type,
        format('begin perform %I.hit(%L); return pg_catalog.%I(%s); end', v_schema, v_it.name || '(' || v_it.args || ')', v_it.name, v_it.given));
    exception
      when others then
        null;
    end;
  end loop;
end
$do$;
"""


def lay_traps(conn: Connection, schema: str, exact: bool) -> None:
    """Fill a schema with the canary and with operators and functions that call it."""
    owner = literal(value(conn, "select current_user"))
    conn.execute(CANARY.format(schema=schema, owner=owner).encode())
    source = literal(servers.SQL_FILE.read_text())
    traps = (
        SHADOWS.replace("{schema}", literal(schema))
        .replace("{exact}", str(exact))
        .replace("{source}", source)
    )
    conn.execute(traps.encode())
    with conn.transaction():
        conn.execute("set local search_path = pg_catalog")
        made = dict(
            rows(
                conn,
                "select 'operators', count(*) from pg_operator where oprnamespace = %s::regnamespace"
                " union all select 'functions', count(*) from pg_proc where pronamespace = %s::regnamespace and proname !~ '^op_'",
                schema,
                schema,
            )
        )
    assert made["operators"] > 500 and made["functions"] > 100, made
    rows(conn, "select pg_catalog.setval(%s, 1, false)", f"{schema}.escaped")


def escaped(conn: Connection, schema: str) -> bool:
    """Whether the canary ran as the owner."""
    found: bool = value(conn, f"select is_called from {schema}.escaped")
    return found


def heard(conn: Connection) -> list[str]:
    """Collect what the canary says on a connection."""
    said: list[str] = []
    conn.add_notice_handler(lambda d: said.append(d.message_primary or ""))
    return said


@pytest.fixture(scope="module")
def trapped(server: servers.TestServer, installed: str) -> Iterator[str]:
    """A database with pgque whose schema public, searched as by default, is full of traps."""
    name = create_database(server, "pgque_trapped", installed)
    try:
        with psycopg.connect(server.dsn_for(name), autocommit=True) as conn:
            lay_traps(conn, "public", exact=False)
        yield name
    finally:
        drop_database(server, name)


@pytest.fixture
def trapped_dsn(server: servers.TestServer, trapped: str) -> Iterator[str]:
    """A copy of it for one test."""
    name = create_database(server, "pgque_trap", trapped)
    try:
        yield server.dsn_for(name)
    finally:
        drop_database(server, name)


# -- functions and operators of others -----------------------------------


def test_an_install_runs_no_function_of_somebody_else(fresh_dsn: str) -> None:
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        lay_traps(conn, "public", exact=False)
        said = heard(conn)
        conn.execute(servers.SQL_FILE.read_bytes())
        assert not escaped(conn, "public"), set(said)


def test_an_install_statement_by_statement_runs_no_function_of_somebody_else(
    fresh_dsn: str, psql: str
) -> None:
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        lay_traps(conn, "public", exact=False)
        done = run_psql(psql, fresh_dsn)
        assert (done.returncode, escaped(conn, "public")) == (0, False), done.stderr[:2000]


def test_an_upgrade_runs_no_function_of_somebody_else(trapped_dsn: str) -> None:
    with psycopg.connect(trapped_dsn, autocommit=True) as conn:
        value(conn, "select pgque.create_queue('q')")
        said = heard(conn)
        conn.execute("begin")
        conn.execute(servers.SQL_FILE.read_bytes())
        conn.execute("commit")
        assert not escaped(conn, "public"), set(said)


def test_the_loop_runs_no_function_of_somebody_else(trapped_dsn: str) -> None:
    with psycopg.connect(trapped_dsn, autocommit=True) as conn:
        value(conn, "select pgque.create_queue('q')")
        subscribe(conn, "q")
        sent = send(conn, "q")
        value(conn, "select pgque.send('q', 't', 'x'::text, delay => '1 microsecond')")
        said = heard(conn)
        conn.execute("set statement_timeout = '1min'")
        conn.execute("call pgque.ticker_loop('300 milliseconds')")
        conn.execute("call pgque.ticker_loop()") if value(conn, "select pgque.stop()") else None
        assert not escaped(conn, "public"), set(said)
        assert sent in drain(conn, "q")


def test_no_call_of_the_owner_runs_a_function_of_somebody_else(trapped_dsn: str) -> None:
    with psycopg.connect(trapped_dsn, autocommit=True) as conn:
        found = {}
        with psycopg.connect(trapped_dsn, autocommit=True) as other:
            other.execute("set search_path = pg_catalog")
            populate(other)
            fuzzer = Fuzzer(other, "traps")
            said = heard(conn)
            for function in fuzzer.functions:
                if function.kind == "p" or function.name.startswith("_"):
                    continue
                fuzzer.scene.ids = good_for(function, other)
                fuzzer.conn = conn
                conn.execute("begin")
                fuzzer.run(function.name, function.call([fuzzer.sensible(*arg) for arg in function.args]))
                conn.execute("rollback")
                if said:
                    found[f"{function.name}/{len(function.args)}"] = sorted(set(said))
                    said.clear()
        assert found == {}
        assert not escaped(conn, "public")


@pytest.fixture(scope="module")
def snared(server: servers.TestServer, installed: str) -> Iterator[str]:
    """A populated database and a schema evil that shadows what pg_catalog has."""
    name = create_database(server, "pgque_snared", installed)
    try:
        with psycopg.connect(server.dsn_for(name), autocommit=True) as conn:
            populate(conn)
            lay_traps(conn, "evil", exact=True)
        yield server.dsn_for(name)
    finally:
        drop_database(server, name)


@pytest.mark.parametrize("member", ["reader", "writer", "admin"])
def test_no_function_of_a_caller_runs_as_the_owner(
    snared: str, roles: Any, connect: Callable[..., Connection], member: str
) -> None:
    own = connect(snared)
    role = roles(member, dbname=own.info.dbname)
    calm, hostile = connect(role.dsn), connect(role.dsn)
    for name in column(
        own,
        "select relname from pg_class where relnamespace = 'pgque'::regnamespace and relkind in ('r', 'p', 'v', 'S')",
    ):
        hostile.execute(f'create temp table "{name}" (x int)'.encode())
    hostile.execute("create type pg_temp.message as (x int); create type pg_temp.outcome as (x int)")
    hostile.execute("set search_path = evil, pg_temp, public, pgque, pg_catalog")
    said = heard(hostile)
    value(own, "select setval('evil.ran', 1, false)")
    assert value(hostile, "select 1 = 1")
    assert value(own, "select is_called from evil.ran")

    fuzzer = Fuzzer(own, "hostile")
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    for function in fuzzer.functions:
        if function.kind == "p":
            continue
        fuzzer.scene.ids = good_for(function, own)
        call = function.call([fuzzer.sensible(*arg) for arg in function.args])
        for conn, states in ((calm, before), (hostile, after)):
            conn.execute("begin")
            try:
                conn.execute(call.encode())
                states[call] = "ok"
            except psycopg.Error as error:
                states[call] = error.sqlstate or ""
            conn.execute("rollback")
            conn.execute("select pg_catalog.pg_advisory_unlock_all()")
    assert not escaped(own, "evil"), set(said)
    assert {c: (s, after[c]) for c, s in before.items() if s != after[c]} == {}
    assert "ok" in before.values()


# -- text that wants to be SQL -------------------------------------------

PAYLOADS = [
    "'; select evil.hit('quote'); --",
    "') or evil.hit('paren') or ('' = '",
    "\\'; select evil.hit('backslash'); --",
    "\"; select evil.hit('ident'); --",
    "$$; select evil.hit('dollar'); $$",
    "$q$ || evil.hit('tag') || $q$",
    "1; select evil.hit('number')",
    "x' || evil.hit('concat')::text || '",
    "%s%I%L%1$s%%",
    "evil.hit('call')",
    "pgque.version(); select evil.hit('func')",
    "\u02bc; select evil.hit(\u02bcunicode\u02bc); \u2044\u2044",
    "\u202e\u0007\r\n--",
]


@pytest.mark.parametrize("standard", ["on", "off"])
def test_hostile_text_is_received_as_it_was_sent(own: Connection, standard: str) -> None:
    own.execute(CANARY.format(schema="evil", owner=literal(value(own, "select current_user"))).encode())
    own.execute(f"set standard_conforming_strings = {standard}; set escape_string_warning = off".encode())
    for payload in PAYLOADS:
        live_with(own, payload)
        assert not value(own, "select is_called from evil.ran"), payload


def live_with(own: Connection, payload: str) -> None:
    """Use the text for every name, key, reason and setting of a queue, and find it there again."""
    name = payload[:30]
    value(own, "select pgque.create_queue(%s)", name)
    assert value(own, "select pgque.subscribe(%s, %s)", name, payload) == 1
    assert value(own, "select pgque.subscribe(%s, 'pool')", name) == 1
    subscribe(own, name, "k")
    sent = value(
        own,
        "select pgque.send(%s, %s, %s::text, headers => jsonb_build_object(%s::text, %s::text), partition_key => %s)",
        name, payload, payload, payload, payload, payload,
    )  # fmt: skip
    for form in ("text[]", "jsonb[]"):
        value(
            own, f"select pgque.send_batch(%s, %s, array[to_jsonb(%s::text)]::{form})", name, payload, payload
        )
    key = value(own, "select pgque.send(%s, 't', %s::text, key => %s)", name, payload, payload)
    assert value(own, "select pgque.send(%s, 't', 'newer'::text, key => %s)", name, payload) == key
    (first,) = rows(
        own, "select * from pgque.send_idem(%s, %s, %s::text, %s)", name, payload, payload, payload
    )
    assert rows(own, "select * from pgque.send_idem(%s, 't', 'x'::text, %s)", name, payload) == [
        (first[0], True)
    ]
    for view in ("sink", "sink_bulk"):
        rows(
            own,
            f"insert into pgque.{view} (queue, type, payload) values (%s, %s, %s)",
            name,
            payload,
            payload,
        )
    end = forced_tick(own, name)

    (message, *_) = receive(own, name, payload)
    assert (message.msg_id, message.type, message.payload, message.headers, message.extra1, message.queue) == (
        sent, payload, payload, {payload: payload}, payload, name,
    )  # fmt: skip
    refused("PQ011", receive, own, name, payload + "x")
    assert rows(
        own, "select m.ok from pgque.dead(%s, array[%s::bigint], %s) m", message.batch_id, sent, payload
    ) == [(True,)]
    ((reason, consumer),) = rows(own, "select dl_reason, consumer_name from pgque.dlq_inspect(%s)", name)
    assert (reason, consumer) == (payload, payload)
    assert ack(own, message.batch_id) == 1
    (leased, *_) = take(own, name, payload, consumer="pool")
    assert (leased.payload, leased.queue) == (payload, name)
    assert column(own, "select worker from pgque.list_workers(%s)", name) == [payload]
    assert rows(
        own, "select ok from pgque.nack(%s, array[%s::bigint], '0', %s)", leased.batch_id, sent, payload
    ) == [(True,)]
    assert payload in column(own, "select last_error from pgque.message_status(%s, %s)", name, sent)

    typed = "select ev_id from pgque.read_window(%s, 1, %s, types => array[%s])"
    assert sent in column(own, typed, name, end, payload)
    assert column(own, typed, name, end, payload + "x") == []
    with own.transaction():
        rows(own, "select pgque.read_window_cursor(%s, %s, 1, %s, 'k', array[%s])", name, name, end, payload)
        quoted = value(own, "select quote_ident(%s)", name)
        assert sent in [r[0] for r in rows(own, f"fetch all from {quoted}")]
    with own.transaction():
        batch = receive(own, name, "k")[0].batch_id
        assert rows(own, "select ev_id from pgque.get_batch_cursor(%s, %s, 1)", batch, name)
    for info in (
        "get_queue_info",
        "get_consumer_info",
        "queue_config",
        "peek",
        "list_messages",
        "list_poison",
        "dlq_inspect",
    ):
        assert rows(own, f"select * from pgque.{info}(%s)", name) is not None
    for info in ("metrics", "health", "overview"):
        assert name in column(own, f"select queue from pgque.{info}()")
    for call in (
        "select pgque.alter_queue(%s, jsonb_build_object(%s::text, '1'))",
        "select pgque.alter_queue(%s, jsonb_build_object('max_retries', %s::text))",
        "select pgque.alter_queue(%s, jsonb_build_object('drop_policy', %s::text))",
        "select pgque.set_queue_config(%s, 'rotation_period', %s)",
        "select pgque.create_queue(%s || 'x', jsonb_build_object(%s::text, '1'))",
        "select pgque.subscribe(%s, 'new', %s)",
        "select pgque.tick_for(%s, %s)",
        "select * from pgque.list_messages(%s, %s)",
    ):
        refused("PQ005", rows, own, call, name, payload)
    refused(
        "PQ001",
        rows,
        own,
        "select pgque.alter_queue(%s, jsonb_build_object('dead_letter_queue', %s || '!'))",
        name,
        payload,
    )
    assert (
        value(
            own,
            "select pgque.alter_queue(%s, jsonb_build_object('dead_letter_queue', %s::text))",
            name,
            name[:20] + ".dlq",
        )
        == 1
    )
    for call in (
        "pgque.set_default_config(%s, %s)",
        "pgque.set_schedule(%s, %s)",
        "pgque._maint_operation(%s, %s)",
    ):
        refused("PQ005", rows, own, f"select {call}", payload, payload)
    refused("PQ005", rows, own, "select pgque.set_default_config('visibility_timeout', %s)", payload)
    refused("PQ005", rows, own, "select pgque.set_schedule('expire', %s)", payload)
    assert value(own, "select pgque.rename_queue(%s, %s)", name, name + " ") == 1
    value(own, "select pgque.maint()")
    assert value(own, "select pgque.drop_queue(%s, true)", name + " ") == 1


def test_a_sink_id_and_a_headers_text_are_no_sql(own: Connection) -> None:
    own.execute(CANARY.format(schema="evil", owner=literal(value(own, "select current_user"))).encode())
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    for payload in PAYLOADS[:-1]:
        ((attempt, stage),) = rows(own, "select * from pgque.sink_begin(%s, 1)", payload)
        rows(
            own,
            f"insert into {stage} (attempt, n, queue, type, payload) values (%s, 0, 'q', 't', %s)",
            attempt,
            payload,
        )
        assert (
            value(own, "select pgque.sink_commit(%s, 1, array[%s::uuid], 1)", payload, attempt) == "applied"
        )
        rows(
            own,
            "insert into pgque.sink (queue, payload, sink_id, epoch, part) values ('q', %s, %s || '2', 1, 0)",
            payload,
            payload,
        )
        for view in ("sink", "sink_bulk"):
            refused(
                "PQ005",
                rows,
                own,
                f"insert into pgque.{view} (queue, payload, headers) values ('q', 'x', %s)",
                payload,
            )
    tick(own, "q")
    assert sorted(m.payload or "" for m in receive(own, "q")) == sorted(PAYLOADS[:-1] * 2)
    assert not value(own, "select is_called from evil.ran")


# -- what others set up before or after the install ----------------------


def test_the_install_refuses_a_schema_of_somebody_else(fresh_dsn: str, roles: Any) -> None:
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        mallory = roles(dbname=conn.info.dbname)
        conn.execute(f"grant create on database {conn.info.dbname} to {mallory.name}".encode())
        with psycopg.connect(mallory.dsn, autocommit=True) as own:
            own.execute("create schema pgque")
            own.execute("create function pgque.clock() returns timestamptz language sql as 'select now()'")
        try:
            with pytest.raises(psycopg.Error):
                install(fresh_dsn)
            assert column(conn, "select proname from pg_proc where pronamespace = 'pgque'::regnamespace") == [
                "clock"
            ]
        finally:
            conn.execute(f"drop owned by {mallory.name} cascade".encode())


@pytest.mark.parametrize(
    "thing",
    [
        "create function pgque.clock() returns timestamptz language sql volatile as 'select now()'",
        "create table pgque.config (config_id int, tick_period_ms int, stopped_at timestamptz)",
        "create type pgque.outcome as (msg_id bigint, ok boolean, reason text)",
        "create sequence pgque.sink_leaf as int minvalue 0 maxvalue 1",
    ],
    ids=["function", "table", "type", "sequence"],
)
def test_the_install_takes_over_nothing_of_somebody_else_in_its_schema(
    fresh_dsn: str, roles: Any, thing: str
) -> None:
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        mallory = roles(dbname=conn.info.dbname)
        conn.execute("create schema pgque")
        conn.execute(f"grant all on schema pgque to {mallory.name}".encode())
        with psycopg.connect(mallory.dsn, autocommit=True) as own:
            own.execute(thing.encode())
        try:
            with pytest.raises(psycopg.Error):
                install(fresh_dsn)
        finally:
            conn.execute(f"drop owned by {mallory.name} cascade".encode())


GIVEN_TO_PUBLIC = """
select c.oid::regclass::text || ': ' || string_agg(a.privilege_type, ' ')
from pg_class c, aclexplode(c.relacl) a where c.relnamespace = 'pgque'::regnamespace and a.grantee = 0 group by c.oid
union all
select p.oid::regprocedure::text
from pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where p.pronamespace = 'pgque'::regnamespace and a.grantee = 0
union all
select 'domain ' || t.typname
from pg_type t, aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) a where t.typnamespace = 'pgque'::regnamespace and t.typtype = 'd' and a.grantee = 0
union all
select 'schema ' || a.privilege_type
from pg_namespace n, aclexplode(n.nspacl) a where n.nspname = 'pgque' and a.grantee = 0
order by 1
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_default_privileges_give_nothing_of_pgque_away(fresh_dsn: str, when: str) -> None:
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        if when == "after":
            install(fresh_dsn)
        for kind in ("tables", "sequences", "functions", "types", "schemas"):
            conn.execute(f"alter default privileges grant all on {kind} to public".encode())
        install(fresh_dsn)
        assert column(conn, GIVEN_TO_PUBLIC) == []
        value(conn, "select pgque.create_queue('q', '{\"archive_on_ack\": true}')")
        subscribe(conn, "q")
        sent = send(conn, "q")
        tick(conn, "q")
        assert drain(conn, "q") == [sent]
        assert column(conn, GIVEN_TO_PUBLIC) == []


def test_messages_fire_no_event_trigger_and_a_queue_that_one_forbids_is_not_half_made(
    own: Connection,
) -> None:
    own.execute("create sequence public.fired")
    own.execute(
        "create function public.note() returns event_trigger language plpgsql as"
        " $$ begin perform nextval('public.fired');"
        " if current_setting('my.forbid', true) = 'yes' then raise exception 'no' using errcode = 'ZZ999'; end if; end $$"
    )
    value(own, "select pgque.create_queue('q')")
    for event in ("ddl_command_start", "ddl_command_end", "sql_drop", "table_rewrite"):
        own.execute(f"create event trigger note_{event} on {event} execute function public.note()".encode())
    own.execute("select setval('public.fired', 1, false)")
    subscribe(own, "q")
    for _ in range(4):
        sent = send(own, "q")
        tick(own, "q")
        assert drain(own, "q") == [sent]
        value(own, "select pgque.set_queue_config('q', 'rotation_period', '1 microsecond')")
        value(own, "select pgque.maint()")
    assert not value(own, "select is_called from public.fired")
    own.execute("set my.forbid = 'yes'")
    refused("ZZ999", value, own, "select pgque.create_queue('no')")
    assert value(own, "select count(*) from pgque.get_queue_info()") == 1
    own.execute("set my.forbid = 'no'")
    assert value(own, "select pgque.create_queue('no')") == 1
    assert value(own, "select is_called from public.fired")
    for event in ("ddl_command_start", "ddl_command_end", "sql_drop", "table_rewrite"):
        own.execute(f"drop event trigger note_{event}".encode())


def test_a_role_can_not_take_more_than_it_was_given(own: Connection, own_dsn: str, roles: Any) -> None:
    database = own.info.dbname
    nobody, reader, writer, admin = (
        roles(*groups, dbname=database) for groups in ([], ["reader"], ["writer"], ["admin"])
    )
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send(own, "q")
    relations = column(
        own,
        "select oid::regclass::text from pg_class where relnamespace = 'pgque'::regnamespace and relkind in ('r', 'p', 'v')",
    )
    for role in (nobody, reader, writer, admin):
        with psycopg.connect(role.dsn, autocommit=True) as conn:
            statements = [
                f"set session authorization {own.info.user}",
                f"set role {own.info.user}",
                f"alter default privileges for role {own.info.user} in schema pgque grant execute on functions to public",
                "grant pgque_admin to pgque_reader",
                f"grant pgque_admin to {nobody.name}",
                "create or replace function pgque.clock() returns timestamptz language sql as 'select now()'",
                "alter function pgque.version() owner to current_user",
                "alter function pgque.ack(bigint) reset all",
                "drop function pgque.version()",
                "create rule x as on insert to pgque.sink do instead nothing",
                "create trigger x before insert on pgque.event_1_0 for each row execute function pg_catalog.suppress_redundant_updates_trigger()",
                "alter table pgque.event_1_0 disable trigger all",
                "create policy p on pgque.queue",
                "comment on schema pgque is 'mine'",
                "create event trigger x on ddl_command_end execute function pgque.version()",
                "select pg_catalog.setval('pgque.event_1_seq', 1)",
                "select pg_catalog.setval('pgque.sink_leaf', 1)",
                "select 1 from pgque.queue for update",
                "set session_replication_role = replica",
            ]
            statements += [
                f"set role {group}"
                for group in ("pgque_reader", "pgque_writer", "pgque_admin")
                if role is nobody
            ]
            statements += [f"lock table {name} in access exclusive mode" for name in relations]
            statements += [f"truncate {name}" for name in relations]
            for statement in statements:
                with pytest.raises(psycopg.Error) as caught, conn.transaction():
                    conn.execute(statement.encode())
                assert caught.value.sqlstate in ("42501", "0LP01", "42809"), (role, statement, caught.value)
    tick(own, "q")
    assert drain(own, "q") == [sent]


def test_a_member_that_does_not_inherit_has_the_rights_only_after_set_role(
    own: Connection, own_dsn: str, roles: Any
) -> None:
    member = roles(dbname=own.info.dbname)
    own.execute(f"alter role {member.name} noinherit".encode())
    own.execute(f"grant pgque_writer to {member.name}".encode())
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    with psycopg.connect(member.dsn, autocommit=True) as conn:
        refused("42501", value, conn, "select pgque.send('q', 'x'::text)")
        for view in ("sink", "sink_bulk"):
            refused("42501", rows, conn, f"insert into pgque.{view} (queue, payload) values ('q', 'x')")
        conn.execute("set role pgque_writer")
        sent = [value(conn, "select pgque.send('q', 'x'::text)")]
        for n, view in enumerate(("sink", "sink_bulk")):
            rows(conn, f"insert into pgque.{view} (queue, payload) values ('q', 'x')")
            sent.append(sent[0] + n + 1)
        assert value(conn, "select current_user") == "pgque_writer"
        conn.execute("reset role")
        refused("42501", value, conn, "select pgque.send('q', 'x'::text)")
    tick(own, "q")
    assert drain(own, "q") == sent


HOSTILE_TABLE = """
create domain evil.d as text check (evil.hit('domain'));
create function evil.say(what text) returns text language sql immutable as $f$ select case when evil.hit(what) then what end $f$;
create function evil.before() returns trigger language plpgsql as $f$ begin perform evil.hit('trigger'); return coalesce(new, old); end $f$;
create table evil.t (id int primary key default evil.hit('default')::int, a evil.d default 'x', b text generated always as (evil.say(a)) stored,
  constraint c check (evil.hit('check')));
create index on evil.t (evil.say(a)) where evil.say(b) is not null;
create trigger a_before before insert or update or delete on evil.t for each row execute function evil.before();
create trigger z_after after insert or update or delete on evil.t for each row when (old is null or evil.hit('when')) execute function evil.before();
create view evil.v as select id, a from evil.t;
create rule v as on insert to evil.v do instead insert into pgque.sink (queue, payload) values ('q', evil.say(new.a));
create rule w as on insert to evil.v do also insert into pgque.sink_bulk (queue, payload, headers) values ('q', evil.say('also'), evil.say('{}'));
"""


def test_nothing_that_the_owner_of_a_table_puts_on_it_runs_as_the_owner_of_pgque(
    own: Connection, roles: Any
) -> None:
    own.execute(CANARY.format(schema="evil", owner=literal(value(own, "select current_user"))).encode())
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    mallory = roles("writer", dbname=own.info.dbname)
    own.execute(f"grant all on schema evil to {mallory.name}".encode())
    with psycopg.connect(mallory.dsn, autocommit=True) as conn:
        conn.execute(HOSTILE_TABLE.replace("when (old is null or evil.hit('when')) ", "").encode())
        for trigger in ("jsontriga", "logutriga", "sqltriga"):
            for when, on in (("before", "update"), ("after", "insert or update or delete")):
                conn.execute(
                    f"create trigger m_{trigger}_{when} {when} {on} on evil.t for each row execute function pgque.{trigger}('q', 'backup')".encode()
                )
        rows(conn, "insert into evil.t (id, a) values (1, 'x'), (2, 'y')")
        rows(conn, "update evil.t set a = 'z'")
        rows(conn, "delete from evil.t where id = 1")
        rows(conn, "insert into evil.v (id, a) values (3, 'rule')")
        for view in ("sink", "sink_bulk"):
            rows(
                conn,
                f"insert into pgque.{view} (queue, type, payload) select 'q', evil.say('type'), evil.say('payload')",
            )
        assert value(conn, "select pgque.send('q', evil.say('send')::evil.d::text)")
        assert value(conn, "select pgque.send_batch('q', 't', array(select evil.say('batch')))")
        ((attempt, stage),) = rows(conn, "select * from pgque.sink_begin(evil.say('sink'), 1)")
        rows(
            conn,
            f"insert into {stage} (attempt, n, queue, payload) values (%s, 0, 'q', evil.say('stage'))",
            attempt,
        )
        assert value(conn, "select pgque.sink_commit('sink', 1, array[%s::uuid], 1)", attempt) == "applied"
    assert value(own, "select is_called from evil.ran")
    assert not escaped(own, "evil")
    tick(own, "q")
    found = receive(own, "q")
    own.execute(f"drop owned by {mallory.name} cascade".encode())
    assert Counter(m.type for m in found) == {
        "I:id": 4, "I": 2, "U:id": 8, "U": 4, "D:id": 2, "D": 1, "default": 4, "type": 2, "t": 1,
    }  # fmt: skip


def test_a_session_that_lies_about_its_parts_harms_only_itself(
    own: Connection, own_dsn: str, roles: Any
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    part = "insert into pgque.sink (queue, payload, sink_id, epoch, part, parts) select 'q', %s || g, 's', 0, 0, 1 from generate_series(1, 3) g"
    liar, honest = (roles("writer", dbname=own.info.dbname) for _ in range(2))
    with psycopg.connect(liar.dsn) as conn:
        xid = value(conn, "select pg_current_xact_id()::text")
        rows(conn, "select set_config('pgque.sink_parts', %s, false)", f"\n0 0 s\t{xid}+")
        rows(conn, part, "liar")
        conn.commit()
    for _ in range(2):
        with psycopg.connect(honest.dsn) as conn:
            rows(conn, part, "honest")
    with psycopg.connect(liar.dsn) as conn:
        xid = value(conn, "select pg_current_xact_id()::text")
        rows(conn, "select set_config('pgque.sink_parts', %s, false)", f"\n0 0 s\t{xid}-")
        rows(conn, part, "left out")
        conn.commit()
    tick(own, "q")
    assert [m.payload for m in receive(own, "q")] == [
        "liar1",
        "liar2",
        "liar3",
        "honest1",
        "honest2",
        "honest3",
    ]


# -- settings of the session ---------------------------------------------

SETTINGS = [
    {"standard_conforming_strings": "off", "escape_string_warning": "off"},
    {"backslash_quote": "off"},
    {"datestyle": "SQL, DMY", "timezone": "Asia/Kolkata"},
    {"datestyle": "Postgres, MDY", "timezone": "Asia/Shanghai"},
    {"datestyle": "German", "timezone": "America/St_Johns"},
    {"timezone": "XYZ-13:30"},
    {"timezone_abbreviations": "India", "datestyle": "SQL"},
    {"intervalstyle": "sql_standard"},
    {"intervalstyle": "iso_8601"},
    {"intervalstyle": "postgres_verbose"},
    {"bytea_output": "escape"},
    {"extra_float_digits": "-15"},
    {"array_nulls": "off"},
    {"transform_null_equals": "on"},
    {"row_security": "off"},
    {"quote_all_identifiers": "on"},
    {"check_function_bodies": "off"},
    {"client_encoding": "LATIN1"},
    {"search_path": ""},
    {"search_path": "pg_temp, pgque"},
    {"plpgsql.variable_conflict": "use_variable"},
    {"plpgsql.variable_conflict": "use_column"},
    {"plpgsql.extra_errors": "all"},
    {"plpgsql.print_strict_params": "on"},
    {"lc_messages": "C", "lc_numeric": "C", "lc_monetary": "C", "lc_time": "C"},
    {"work_mem": "64kB", "temp_buffers": "100"},
    {"plan_cache_mode": "force_generic_plan"},
    {"plan_cache_mode": "force_custom_plan"},
    {"enable_nestloop": "off", "enable_indexscan": "off", "enable_bitmapscan": "off", "enable_indexonlyscan": "off"},
    {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_material": "off", "enable_sort": "off"},
    {"enable_seqscan": "off", "enable_tidscan": "off", "enable_partition_pruning": "off"},
    {"enable_hashagg": "off", "enable_incremental_sort": "off", "geqo_threshold": "2", "join_collapse_limit": "1"},
    {"from_collapse_limit": "1", "constraint_exclusion": "on", "cursor_tuple_fraction": "0"},
    {"parallel_setup_cost": "0", "parallel_tuple_cost": "0", "min_parallel_table_scan_size": "0"},
    {"synchronous_commit": "off"},
    {"default_transaction_deferrable": "on"},
    {"xmloption": "document", "xmlbinary": "hex"},
    {"pgque.sink_parts": "1 0 s\t1+\n1 0 s\t1-"},
    {"pgque.sink_parts": "\n0 0 s\t999999999+\n0 1 s\t3-"},
]  # fmt: skip


def answers(conn: Connection, queue: str) -> list[Any]:
    """A message's life and what the functions say about it; nothing that depends on when it was run."""
    say: list[Any] = []

    def ask(query: str, *args: Any) -> list[Any]:
        try:
            say.append(rows(conn, query, *args))
        except psycopg.Error as error:
            say.append((error.sqlstate, error.diag.message_primary))
        found = say[-1]
        return found if isinstance(found, list) else []

    ask(
        "select pgque.create_queue('"
        + queue
        + '\', \'{"message_ttl": "2 hours", "retry_backoff": {"base": 0.5, "cap": 7}}\')'
    )
    ask(f"select pgque.subscribe('{queue}', c) from unnest(array['c', 'd']) c")
    ask(
        f"select pgque.subscribe('{queue}', 'one', '1'), pgque.tick_for('{queue}', '1'), pgque.tick_for('{queue}', 'latest')"
    )
    ask(f"select pgque.register_consumer_at('{queue}', 'two', 1)")
    ask(
        f"select pgque.send('{queue}', 'a''b', E'c\\\\d\"'::text, headers => '{{\"x\": [1.10, null]}}', partition_key => E'\\\\1')"
    )
    ask(f"select pgque.send('{queue}', 't', decode('00ff5c', 'hex'))")
    ask(
        f"select pgque.send_batch('{queue}', null, array['1', null, E'NULL\\\\'], keys => array[null, 'k', 'NULL'])"
    )
    ask(f"select pgque.send_batch('{queue}', 't', array['{{\"a\": 1e2}}', 'null']::jsonb[])")
    ask(f"select pgque.send('{queue}', 't', 'late'::text, delay => '1 day', ttl => '1 mon 2 days 03:04:05')")
    ask(f"select * from pgque.send_idem('{queue}', 't', 'x'::text, E'i\\\\d', '1 hour')")
    ask(f"select * from pgque.send_idem('{queue}', 't', 'x'::text, E'i\\\\d', '1 hour')")
    ask(
        f"insert into pgque.sink (queue, payload, sink_id, epoch, part) select '{queue}', g::text, '{queue}', 0, 0 from generate_series(1, 3) g"
    )
    ask(
        f"insert into pgque.sink_bulk (queue, payload) select '{queue}', g::text from generate_series(1, 20) g"
    )
    ask(f"select pgque.force_next_tick('{queue}'), pgque.ticker('{queue}')")
    ask(
        f"select ev_id, ev_type, ev_data, ev_bytes, ev_headers, ev_key from pgque.read_window('{queue}', 1, 2)"
    )
    ask(f"select ev_id from pgque.read_window('{queue}', 1, 2, 'c', array['t', null, E'a''b'])")
    ask(f"select from_tick, to_tick, parts, part from pgque.split_window('{queue}', 1, 2, 3)")
    got = ask(
        f"select msg_id, type, payload, payload_bytes, headers, extra1, key, retry_count from pgque.receive('{queue}', 'c', 10)"
    )
    batch = value(conn, f"select batch_id from pgque.receive('{queue}', 'c', 1) limit 1")
    ids = [g[0] for g in got]
    ask(
        "select * from pgque.nack(%s, array[%s, null, 99]::bigint[], '1 second', E'no\\\\good')",
        batch,
        ids[0],
    )
    ask("select * from pgque.dead(%s, array[%s, null]::bigint[], 'dead')", batch, ids[1])
    ask("select * from pgque.event_retry(%s, %s, 3)", batch, ids[2])
    ask("select ev_id, ev_data, ev_bytes from pgque.get_batch_events(%s)", batch)
    ask(
        "select queue_name, consumer_name, prev_tick_id, tick_id, seq_start, seq_end from pgque.get_batch_info(%s)",
        batch,
    )
    ask("select pgque.ack(%s)", batch)
    leased = ask(
        f"select msg_id, payload, receive_count from pgque.receive('{queue}', 'd', 4, worker => E'w\\\\', visibility_timeout => '1 hour')"
    )
    token = value(
        conn, f"select (pgque._position(s.sub_id)).pos_last_batch from pgque._subscriber('{queue}', 'd') s"
    )
    ask("select * from pgque.ack(%s, array[%s, null]::bigint[])", token, leased[0][0])
    ask(
        "select pgque.extend(%s, '1 minute'), pgque.release(%s, array[%s]::bigint[])",
        token,
        token,
        leased[1][0],
    )
    ask(f"select worker, batches, messages from pgque.list_workers('{queue}')")
    ask(
        f"select msg_id, consumer_name, status, payload, headers, key, retry_count, last_error, worker from pgque.list_messages('{queue}')"
    )
    ask(f"select dl_reason, ev_id, ev_data from pgque.dlq_inspect('{queue}')")
    ask(f"select consumer_name, last_tick, pending_events, role from pgque.get_consumer_info('{queue}')")
    ask(
        f"select queue_rotation_period = '2 hours', ev_new, last_tick_id from pgque.get_queue_info('{queue}')"
    )
    ask(f"select pgque.set_queue_config('{queue}', 'visibility_timeout', '00:01:30.5')")
    ask(
        f"select param_name, case when param_name ~ 'period|lag|timeout|ttl' then (param_value::interval = '00:01:30.5')::text else null end from pgque.queue_config('{queue}')"
    )
    ask(
        "select pgque.set_default_config('rotation_period', '1 day 02:03:04'), pgque.set_default_config('rotation_period', null)"
    )
    ask(
        f"select check_name, status from pgque.health() where queue = '{queue}' and check_name in ('tables', 'rotation', 'dead letters')"
    )
    ask(f"select pgque.dlq_requeue_all('{queue}'), pgque.purge_key('{queue}', 'k'), pgque.purge('{queue}')")
    conn.execute(f"create table public.{queue} (id int primary key, b text)".encode())
    for trigger in ("jsontriga", "logutriga", "sqltriga"):
        conn.execute(
            f"create trigger {trigger} after insert or update on public.{queue} for each row execute function pgque.{trigger}('{queue}', 'backup')".encode()
        )
    conn.execute(f"insert into public.{queue} values (1, E'a/b c\\\\d''\"' || chr(233))".encode())
    conn.execute(f"update public.{queue} set b = null".encode())
    ask(f"select pgque.force_next_tick('{queue}') > 0, pgque.ticker('{queue}') > 0")
    ask(
        f"select type, replace(payload, chr(34), ''), extra1 = 'public.{queue}' or extra1 = '{queue}' or extra1 like '%\"%', extra2 from pgque.receive('{queue}', 'c')"
    )
    conn.execute(f"drop table public.{queue}".encode())
    ask(f"select pgque.drop_queue('{queue}', true)")
    return say


@pytest.fixture(scope="module")
def calm(server: servers.TestServer, installed: str) -> Iterator[tuple[str, list[Any]]]:
    """A database, and the answers that it gives under the settings that are usual."""
    name = create_database(server, "pgque_calm", installed)
    try:
        with psycopg.connect(server.dsn_for(name), autocommit=True) as conn:
            yield server.dsn_for(name), answers(conn, "qqqq")
    finally:
        drop_database(server, name)


@pytest.mark.slow  # every setting of a session with every call
@pytest.mark.usefixtures("may_compile")  # the settings forbid plans
def test_settings_of_the_session_change_no_result(calm: tuple[str, list[Any]]) -> None:
    dsn, usual = calm
    wrong = {}
    for n, settings in enumerate(SETTINGS):
        with psycopg.connect(dsn, autocommit=True) as conn:
            try:
                for name, setting in settings.items():
                    conn.execute("select pg_catalog.set_config(%s, %s, false)", [name, setting])
            except (psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue):
                continue  # not on this server
            found = answers(conn, f"q{n:03}")
        differs = [
            (a, b)
            for a, b in zip(usual, found, strict=True)
            if repr(a).replace("qqqq", "Q") != repr(b).replace(f"q{n:03}", "Q")
        ]
        if differs:
            wrong[str(settings)] = differs[:3]
    assert wrong == {}


MADE = """
select p.oid::regprocedure::text, pg_get_functiondef(p.oid) from pg_proc p where p.pronamespace = 'pgque'::regnamespace
union all
select c.conrelid::regclass || ' ' || c.conname, pg_get_constraintdef(c.oid) from pg_constraint c where c.connamespace = 'pgque'::regnamespace
union all
select d.adrelid::regclass || ' ' || d.adnum, pg_get_expr(d.adbin, d.adrelid)
from pg_attrdef d join pg_class c on c.oid = d.adrelid where c.relnamespace = 'pgque'::regnamespace
union all
select c.oid::regclass::text, coalesce(pg_get_viewdef(nullif(c.oid, case when c.relkind <> 'v' then c.oid end)), '') || c.relkind::text
from pg_class c where c.relnamespace = 'pgque'::regnamespace and c.relkind <> 'i'
union all
select r.ev_class::regclass || ' ' || r.rulename, pg_get_ruledef(r.oid) from pg_rewrite r join pg_class c on c.oid = r.ev_class where c.relnamespace = 'pgque'::regnamespace
union all
select i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid) from pg_index i join pg_class c on c.oid = i.indrelid where c.relnamespace = 'pgque'::regnamespace
union all
select t.tgname, pg_get_triggerdef(t.oid) from pg_trigger t join pg_class c on c.oid = t.tgrelid where c.relnamespace = 'pgque'::regnamespace and not t.tgisinternal
order by 1, 2
"""
ODD = {
    "standard_conforming_strings": "off", "escape_string_warning": "off", "datestyle": "SQL, DMY", "timezone": "Asia/Kolkata",
    "intervalstyle": "sql_standard", "bytea_output": "escape", "extra_float_digits": "-15", "array_nulls": "off",
    "transform_null_equals": "on", "row_security": "off", "quote_all_identifiers": "on", "check_function_bodies": "off",
    "plpgsql.variable_conflict": "use_column", "search_path": "pg_temp, public", "default_transaction_deferrable": "on",
    "default_transaction_isolation": "repeatable read", "lc_messages": "C", "enable_seqscan": "off", "enable_nestloop": "off",
    "jit": "off",  # else the install itself would be compiled, which support/jit.py counts
}  # fmt: skip


def test_an_install_and_an_upgrade_under_odd_settings_make_the_same(
    own: Connection, connect: Callable[..., Connection], fresh_dsn: str
) -> None:
    odd = connect(fresh_dsn)
    own.execute("set datestyle = iso")
    for round_ in ("install", "upgrade"):
        for name, setting in ODD.items():
            odd.execute("select pg_catalog.set_config(%s, %s, false)", [name, setting])
        odd.execute(servers.SQL_FILE.read_bytes())
        odd.execute("reset all")
        odd.execute("set datestyle = iso")
        assert dict(rows(odd, MADE)) == dict(rows(own, MADE)), round_
        # What the owner put there himself, and that is not ours by name, stays.
        odd.execute("create or replace function pgque.mine() returns int language sql as 'select 1'")
        own.execute("create or replace function pgque.mine() returns int language sql as 'select 1'")
