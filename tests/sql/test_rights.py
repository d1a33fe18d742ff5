"""The rights on pgque's objects are those that pgque grants, whatever default privileges its owner has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from conftest import OWNER, as_owner, create_database, default_privileges, drop_database, install
from sql.helpers import (
    Connection,
    ack,
    column,
    drain,
    forced_tick,
    leaf,
    receive,
    refused,
    rotate,
    rows,
    send,
    subscribe,
    tick,
    tries,
    value,
)
from sql.test_install import SOURCE, install_earlier
from sql.test_queue_rights import DENIED, NEEDS, NEVER
from support.servers import TestServer

OURS = ("pgque_reader", "pgque_writer", "pgque_admin", "pgque_user")

# Every right of a role that is not the owner, and of PUBLIC, on everything in the schema.
GRANTED = """
select o.what || ': ' || a.privilege_type || case when a.is_grantable then ' with grant option' else '' end
  || ' to ' || case a.grantee when 0 then 'public' else a.grantee::regrole::text end
from (
  select c.oid::regclass::text, c.relowner, c.relacl from pg_class c where c.relnamespace = 'pgque'::regnamespace
  union all
  select c.oid::regclass || '.' || t.attname, c.relowner, t.attacl
  from pg_class c join pg_attribute t on t.attrelid = c.oid where c.relnamespace = 'pgque'::regnamespace
  union all
  select p.oid::regprocedure::text, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
  from pg_proc p where p.pronamespace = 'pgque'::regnamespace
  union all
  select 'type ' || t.typname, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
  from pg_type t where t.typnamespace = 'pgque'::regnamespace and t.typelem = 0
  union all
  select 'schema', n.nspowner, coalesce(n.nspacl, acldefault('n', n.nspowner)) from pg_namespace n where n.nspname = 'pgque'
) o (what, owner, acl)
cross join aclexplode(o.acl) a
where a.grantee <> o.owner
order by 1
"""
RIGHTS = "select status, detail, advice from pgque.health() where check_name = 'rights'"


def fill(conn: Connection) -> None:
    """Have each kind of object that pgque creates while it runs."""
    conn.commit()
    conn.autocommit = True
    for queue in ("mine", "payroll"):
        value(conn, "select pgque.create_queue(%s, '{\"archive_on_ack\": true}')", queue)
        subscribe(conn, queue)
        send(conn, queue, "salary")
        tick(conn, queue)
        (message,) = receive(conn, queue)
        assert ack(conn, message.batch_id) == 1
    value(conn, "select pgque.maint_tables()")
    assert value(conn, "select count(*) from pg_inherits where inhparent = 'pgque.archive'::regclass") >= 2


@pytest.fixture(params=["superuser", "ordinary owner"])
def databases(
    request: pytest.FixtureRequest, server: TestServer, dsn: str, roles: Any
) -> Iterator[list[str]]:
    """Two empty databases, each by the connection string of the role that installs."""
    names = [create_database(server, "pgque_rights") for _ in range(2)]
    try:
        if request.param == "superuser":
            yield [server.dsn_for(name) for name in names]
        else:
            owner = roles()
            with psycopg.connect(dsn, autocommit=True) as admin:
                admin.execute(f"alter role {owner.name} createrole".encode())
                # Since PostgreSQL 16, as the role that created it has it.
                admin.execute(f"grant pgque_user to {owner.name} with admin option".encode())
                for name in names:
                    admin.execute(f"grant create on database {name} to {owner.name}".encode())
            yield [psycopg.conninfo.make_conninfo(owner.dsn, dbname=name) for name in names]
    finally:
        for name in names:
            drop_database(server, name)


def prepare(dsn: str, way: str, to: str | None) -> None:
    """Install in a way; to: the roles that default privileges, and grants on all objects, name."""
    with as_owner(dsn) as conn:
        if to and way == "fresh":
            default_privileges(conn, to)
        elif to and way == "upgrade":
            default_privileges(conn, to)
            # 0.7.0 refuses a schema in which other roles may create objects.
            conn.execute(f"alter default privileges revoke create on schemas from {to}".encode())
    if way == "upgrade":
        install_earlier(dsn, "0.7.0")
    if way != "fresh":
        if way == "over itself":
            install(dsn)
        with as_owner(dsn) as conn:
            fill(conn)
            if to:
                default_privileges(conn, to)
                for kind in ("tables", "sequences", "routines"):
                    conn.execute(f"grant all on all {kind} in schema pgque to {to}".encode())
                conn.execute(f"grant all on schema pgque to {to}".encode())
                conn.execute(f"grant all on type pgque.caller, pgque.message to {to}".encode())
    install(dsn)


@pytest.mark.parametrize("way", ["fresh", "over itself", "upgrade"])
def test_rights_end_as_those_of_an_install_without_default_privileges(
    databases: list[str], roles: Any, way: str
) -> None:
    app = roles().name
    to = ", ".join([app, "public", *OURS])
    granted = []
    for dsn, roles_named in zip(databases, (None, to), strict=True):
        prepare(dsn, way, roles_named)
        with as_owner(dsn) as conn:
            if roles_named:
                conn.execute(
                    f"alter default privileges grant all on tables to {app} with grant option".encode()
                )
                conn.execute(
                    f"alter default privileges in schema pgque grant all on sequences to {app}".encode()
                )
            if way == "fresh":
                fill(conn)
            value(conn, "select pgque.create_queue('later')")
            value(conn, "select pgque.maint_tables()")  # creates the readers that an upgrade lacks
            granted.append(set(column(conn, GRANTED)))
            assert rows(conn, RIGHTS)[0][0] == "ok"
    expected, found = granted
    assert expected <= found
    told = {
        f"pgque.{table}: SELECT to pgque_{role}"
        for table in ("queue", "consumer", "subscriber", "sink_epoch", "sink_attempt")
        for role in ("reader", "admin")
    }
    assert found - expected <= (set() if way == "fresh" else told)


@pytest.mark.parametrize("way", ["fresh", "over itself", "upgrade"])
def test_a_role_that_may_send_to_one_queue_does_nothing_else(
    databases: list[str], server: TestServer, roles: Any, way: str
) -> None:
    app = roles()
    dsn = databases[0]
    prepare(dsn, way, app.name)
    with as_owner(dsn) as conn:
        if way == "fresh":
            fill(conn)
        value(conn, "select pgque.grant_queue('mine', %s, 'produce')", app.name)
        relations = rows(
            conn,
            "select c.oid::regclass::text, c.relkind::text from pg_class c"
            " where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')",
        )
    dbname = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(psycopg.conninfo.make_conninfo(app.dsn, dbname=dbname), autocommit=True) as user:
        assert tries(user, "mine", NEEDS["produce"]) == dict.fromkeys(NEEDS["produce"])
        others = NEEDS["consume"] + NEEDS["admin"]
        assert tries(user, "mine", others) == dict.fromkeys(others, DENIED)
        assert tries(user, "mine", NEVER) == dict.fromkeys(NEVER, DENIED)
        others += NEEDS["produce"]
        assert tries(user, "payroll", others) == dict.fromkeys(others, DENIED)
        for name, kind in relations:
            calls = [f"select from {name}"]
            if kind == "S":
                calls = [f"select pg_catalog.setval('{name}', 1)", f"select last_value from {name}"]
            elif kind != "v":
                calls += [f"delete from {name}", f"truncate {name}", f"do $$ begin lock table {name}; end $$"]
            assert tries(user, "mine", calls) == dict.fromkeys(calls, DENIED)
        calls = [
            "create table pgque.mine (x int)",
            "create function pgque.mine() returns int language sql as 'select 1'",
            "create type pgque.mine as (x int)",
            "create temp table kept (who pgque.caller)",
        ]
        assert tries(user, "mine", calls) == dict.fromkeys(calls, DENIED)


def test_an_upgrade_leaves_grants_of_administrators_and_health_names_them_with_the_command(
    roles: Any, own: Connection, own_dsn: str
) -> None:
    page, analyst, boss = (roles(*groups, dbname=own.info.dbname) for groups in (["reader"], [], ["reader"]))
    assert rows(own, RIGHTS) == [
        ("ok", "no role has rights on the objects of pgque that pgque did not grant", None)
    ]
    value(own, "select pgque.create_queue('q')")
    streams = "pgque.queue, pgque.consumer, pgque.subscriber, pgque.sink_epoch, pgque.sink_attempt"
    own.execute(f"grant select on {streams} to {page.name}".encode())
    assert rows(own, RIGHTS)[0][0] == "ok"
    own.execute(f"grant usage, create on schema pgque to {analyst.name}".encode())
    own.execute(f"revoke create on schema pgque from {analyst.name}".encode())
    own.execute(
        f"grant select, update on all tables in schema pgque to {analyst.name} with grant option".encode()
    )
    own.execute(f"grant execute on procedure pgque.ticker_loop to {analyst.name}".encode())
    own.execute(f"grant usage on type pgque.caller to {analyst.name}".encode())
    own.execute("grant select (ev_data) on pgque.event to public")
    own.execute("grant select, delete on pgque.queue, pgque.config, pgque.settled to pgque_admin")
    with psycopg.connect(analyst.dsn, autocommit=True) as conn:
        conn.execute(f"grant select on pgque.event to {boss.name}".encode())
    before = column(own, GRANTED)
    install(own_dsn)
    # The rights of PUBLIC are pgque's to set.
    assert sorted(set(before) - set(column(own, GRANTED))) == ["pgque.event.ev_data: SELECT to public"]
    with psycopg.connect(page.dsn, autocommit=True) as reader:
        ((status, detail, advice),) = rows(reader, RIGHTS)
    assert status == "warn"
    assert (
        f"{analyst.name}: SELECT, UPDATE on " in detail
        and f"{boss.name}: SELECT on 1 table (pgque.event)" in detail
    )
    assert "pgque_admin: DELETE, SELECT on 3 tables (" in detail
    assert page.name not in detail
    commands = advice.partition("Then revoke: ")[2].split("; ")
    assert f"revoke SELECT, UPDATE on all tables in schema pgque from {analyst.name} cascade" in commands
    assert "revoke DELETE on all tables in schema pgque from pgque_admin" in commands
    assert "revoke SELECT on table pgque.settled from pgque_admin" in commands
    assert f"revoke EXECUTE on all routines in schema pgque from {analyst.name}" in commands
    assert f"revoke USAGE on type pgque.caller from {analyst.name}" in commands
    for command in commands:
        own.execute(command.encode())
    assert rows(own, RIGHTS)[0][0] == "ok"
    with psycopg.connect(page.dsn, autocommit=True) as reader:
        rows(reader, f"select from {streams}")


def test_create_queue_gives_no_rights_to_a_role_that_is_newer_than_its_snapshot(
    roles: Any, own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    session = installer(connect(own_dsn, autocommit=False))
    session.execute("set transaction isolation level repeatable read")
    assert rows(session, "select from pgque.queue") == []
    app = roles().name
    with as_owner(own_dsn) as conn:
        for kind in ("tables", "sequences", "functions"):
            conn.execute(f"alter default privileges in schema pgque grant all on {kind} to {app}".encode())
    value(session, "select pgque.create_queue('q')")
    session.commit()
    assert [right for right in column(own, GRANTED) if right.endswith(f" to {app}")] == []


def test_create_queue_reads_a_part_of_the_catalog_that_does_not_grow_with_the_number_of_objects(
    own: Connection,
) -> None:
    own.execute("do $$ begin for n in 1..2000 loop execute 'create sequence pgque.s' || n; end loop; end $$")
    for number in range(8):  # after five calls, plans are generic
        value(own, "select pgque.create_queue(%s)", f"q{number}")
    read = (
        "select seq_tup_read + idx_tup_fetch from pg_stat_xact_sys_tables where relid = 'pg_class'::regclass"
    )
    with own.transaction():
        before = value(own, read)
        value(own, "select pgque.create_queue('q')")
        assert value(own, read) - before < 1000


# -- other sessions ------------------------------------------------------------


@pytest.fixture
def given(nobody: Any, own: Connection) -> str:
    """A queue q, and a role to which a default privilege gave SELECT on its tables."""
    value(own, "select pgque.create_queue('q')")
    with as_owner(own.info.dsn) as conn:
        conn.execute(
            f"alter default privileges in schema pgque grant select on tables to {nobody.name}".encode()
        )
    own.execute(f"grant select on all tables in schema pgque to {nobody.name}".encode())
    return str(nobody.name)


def installer(connection: Connection) -> Connection:
    """Let the session act as the role that owns pgque in the test databases."""
    if OWNER:
        connection.execute(f"set session authorization {OWNER}".encode())
        connection.commit()
    return connection


def may_read(conn: Connection, role: str) -> list[str]:
    return column(
        conn,
        "select c.oid::regclass::text from pg_class c where c.relnamespace = 'pgque'::regnamespace"
        " and c.relkind in ('r', 'p', 'v') and has_table_privilege(%s, c.oid, 'select')",
        role,
    )


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize(
    "other", ["truncate {}", "revoke select on {} from {role}", "grant select on {} to pgque_reader"]
)
def test_an_upgrade_waits_for_a_session_that_changes_the_same_table_in_the_catalog(
    given: str, own: Connection, own_dsn: str, connect: Callable[..., Connection], background: Callable[..., Any],
    wait_for_lock: Callable[..., None], other: str, end: str,
) -> None:  # fmt: skip
    session = connect(own_dsn, autocommit=False)
    session.execute(other.format("pgque.event_1_1", role=given).encode())
    upgrade = background(lambda conn: conn.execute(SOURCE), installer(connect(own_dsn)))
    wait_for_lock(upgrade.pid)
    getattr(session, end)()
    upgrade.result()
    assert may_read(own, given) == []


def test_a_rotation_during_an_upgrade_is_postponed(
    given: str, own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    subscribe(own, "q")
    for number in range(3):
        send(own, "q")
        forced_tick(own, "q")
        drain(own, "q")
        assert number == 2 or rotate(own, "q") == 1
    full = leaf(own, "q", 0)
    assert value(own, f"select count(*) from {full}") == 1
    upgrade = installer(connect(own_dsn, autocommit=False))
    upgrade.execute(SOURCE)
    assert rotate(own, "q") == 0
    upgrade.commit()
    assert rotate(own, "q") == 1
    assert value(own, f"select count(*) from {full}") == 0
    assert may_read(own, given) == []


def test_an_upgrade_ends_though_a_table_stays_locked_and_names_it(
    given: str, own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    session = connect(own_dsn, autocommit=False)
    session.execute("lock table pgque.event_1_1, pgque.tick_1_2 in access exclusive mode")
    said: list[str] = []
    upgrade = installer(connect(own_dsn))
    upgrade.add_notice_handler(lambda d: said.append(f"{d.message_primary}; {d.message_hint}"))
    upgrade.execute(SOURCE)
    hint = "Install this version again, or follow the check rights of pgque.health()."
    assert sorted(
        text.partition(": ")[0] + ": " + text.partition(": ")[2].partition(": ")[0] for text in said
    ) == [
        "pgque: cannot set the rights on table pgque.event_1_1",
        "pgque: cannot set the rights on table pgque.tick_1_2",
    ]
    assert all(text.endswith(hint) for text in said)
    assert sorted(may_read(own, given)) == ["pgque.event_1_1", "pgque.tick_1_2"]
    assert rows(own, RIGHTS)[0][1].startswith(f"{given}: SELECT on 2 tables (")
    session.rollback()
    install(own_dsn)
    assert may_read(own, given) == []


def test_an_install_over_itself_changes_no_rights_in_the_catalog(own: Connection, own_dsn: str) -> None:
    value(own, "select pgque.create_queue('q')")
    versions = (
        "select c.oid::regclass::text, c.xmin::text from pg_class c where c.relnamespace = 'pgque'::regnamespace"
        " and c.relkind in ('r', 'p', 'S') order by 1"
    )
    before = rows(own, versions)
    install(own_dsn)
    assert rows(own, versions) == before


def test_an_upgrade_keeps_the_rights_to_single_queues_and_drops_those_of_dropped_roles(
    roles: Any, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    install_earlier(fresh_dsn, "0.7.0")
    own = connect(fresh_dsn)
    user, late = (roles(dbname=own.info.dbname) for _ in range(2))
    value(own, "select pgque.create_queue('q')")
    for name in (user.name, "pg_monitor"):
        value(own, "select pgque.grant_queue('q', %s, 'produce')", name)
    # What is left of a dropped role.
    own.execute("update pgque.queue_right set right_role = 4200000000 where right_role::text = 'pg_monitor'")
    install(fresh_dsn)
    # As a call of 0.7.0 that runs on, or a dump of its data, stores it.
    own.execute(
        "insert into pgque.queue_right select q.queue_id, %s::regrole, 'produce' from pgque.queue q",
        [late.name],
    )
    own.execute(f"grant pgque_user to {late.name}".encode())
    for role in (user, late):
        with psycopg.connect(role.dsn, autocommit=True) as conn:
            assert send(conn, "q")
    value(own, "select pgque.maint_tables()")
    assert sorted(column(own, "select right_role_name::text from pgque.queue_right")) == sorted(
        [user.name, late.name]
    )


def test_a_transaction_that_is_older_than_the_upgrade_gets_40001_and_not_42501(
    roles: Any, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    install_earlier(fresh_dsn, "0.7.0")
    own = connect(fresh_dsn)
    user, stranger = (roles(dbname=own.info.dbname) for _ in range(2))
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.create_queue('other')")
    value(own, "select pgque.grant_queue('q', %s, 'produce')", user.name)
    value(own, "select pgque.grant_queue('other', %s, 'produce')", stranger.name)
    session = connect(user.dsn, autocommit=False)
    session.execute("set transaction isolation level repeatable read")
    session.execute("select from pg_catalog.pg_class limit 1")
    install(fresh_dsn)
    with pytest.raises(psycopg.errors.SerializationFailure):
        send(session, "q")
    session.rollback()
    assert send(session, "q")
    session.rollback()
    other = connect(stranger.dsn, autocommit=False)
    other.execute("set transaction isolation level repeatable read")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        send(other, "q")


def test_grant_queue_of_an_owner_who_may_not_grant_roles_names_the_missing_grant(
    dsn: str, roles: Any, fresh_dsn: str
) -> None:
    """The roles belong to whoever installed first on this server."""
    second, shop = roles(), roles()
    database = psycopg.conninfo.conninfo_to_dict(fresh_dsn)["dbname"]
    with psycopg.connect(dsn, autocommit=True) as admin:
        if admin.info.server_version >= 160000:  # earlier, CREATEROLE is enough
            admin.execute(f"alter role {second.name} createrole".encode())
        admin.execute(f"grant create on database {database} to {second.name}".encode())
        second_dsn = psycopg.conninfo.make_conninfo(second.dsn, dbname=database)
        install(second_dsn)
        with psycopg.connect(second_dsn, autocommit=True) as conn:
            value(conn, "select pgque.create_queue('q')")
            grant = "select pgque.grant_queue('q', %s, 'produce')"
            error = refused("42501", value, conn, grant, shop.name)
            assert f"{second.name}, the owner of pgque, may not make {shop.name} a member" in str(error)
            hint = error.diag.message_hint or ""
            admin.execute(hint.split(": ")[1].split(";")[0].encode())
            assert value(conn, grant, shop.name) == 1
    with psycopg.connect(psycopg.conninfo.make_conninfo(shop.dsn, dbname=database)) as conn:
        assert send(conn, "q")
