"""Print what an install of pgque creates, read from the system catalogs.

    python -m support.catalog schema      relations, columns, constraints, functions, comments, grants
    python -m support.catalog reference   the function reference, see support/reference.py

The output is the same on every supported PostgreSQL version, so it can be committed and compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from support import servers
from support.reference import BadReference, reference

Connection = psycopg.Connection[tuple[Any, ...]]

# Who may do what, without the owner's own rights: privilege*group means with grant option.
GRANTS = """
  coalesce((
    select string_agg(g.grantee || '=' || g.privileges, ' ' order by g.grantee)
    from (
      select case when x.grantee = 0 then 'PUBLIC' else pg_catalog.pg_get_userbyid(x.grantee) end as grantee,
             string_agg(lower(x.privilege_type) || case when x.is_grantable then '*' else '' end, ','
                        order by x.privilege_type) as privileges
      from pg_catalog.aclexplode(coalesce({acl}, pg_catalog.acldefault('{kind}', {owner}))) as x
      where x.grantee <> {owner}
      group by x.grantee
    ) as g), '-')
"""

DOMAINS = f"""
select t.typname, pg_catalog.format_type(t.typbasetype, t.typtypmod), t.typnotnull,
       (select string_agg(k.conname || ' ' || pg_catalog.pg_get_constraintdef(k.oid), ' ' order by k.conname collate "C")
        from pg_catalog.pg_constraint as k where k.contypid = t.oid and k.contype = 'c') as checks,
       {GRANTS.format(acl="t.typacl", kind="T", owner="t.typowner")} as grants,
       pg_catalog.obj_description(t.oid, 'pg_type') as comment
from pg_catalog.pg_type as t
where t.typnamespace = 'pgque'::regnamespace and t.typtype = 'd'
order by t.typname collate "C"
"""

FUNCTIONS = f"""
select p.oid, p.proname, p.prokind::text,
       pg_catalog.pg_get_function_arguments(p.oid) as arguments,
       pg_catalog.pg_get_function_result(p.oid) as result,
       l.lanname,
       case p.provolatile when 'i' then 'immutable' when 's' then 'stable' else 'volatile' end as volatility,
       p.prosecdef, p.proisstrict, p.proparallel::text, p.proconfig,
       pg_catalog.obj_description(p.oid, 'pg_proc') as comment,
       {GRANTS.format(acl="p.proacl", kind="f", owner="p.proowner")} as grants,
       pg_catalog.pg_get_function_identity_arguments(p.oid) as identity
from pg_catalog.pg_proc as p
join pg_catalog.pg_language as l on l.oid = p.prolang
where p.pronamespace = 'pgque'::regnamespace
order by p.proname collate "C", pg_catalog.pg_get_function_identity_arguments(p.oid) collate "C"
"""

RELATIONS = f"""
select c.oid, c.relname, c.relkind::text, c.reloptions,
       case when c.relkind in ('p') then pg_catalog.pg_get_partkeydef(c.oid) end as partition_key,
       pg_catalog.pg_get_expr(c.relpartbound, c.oid) as bound,
       pg_catalog.obj_description(c.oid, 'pg_class') as comment,
       {GRANTS.format(acl="c.relacl", kind="r", owner="c.relowner")} as grants,
       c.relpersistence::text
from pg_catalog.pg_class as c
where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'S', 'c', 'f')
order by c.relname collate "C"
"""

COLUMNS = f"""
select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull,
       pg_catalog.pg_get_expr(d.adbin, d.adrelid), a.attidentity::text, a.attgenerated::text,
       pg_catalog.col_description(a.attrelid, a.attnum),
       case when a.attacl is null then '-' else
         {GRANTS.format(acl="a.attacl", kind="c", owner="c.relowner")} end
from pg_catalog.pg_attribute as a
join pg_catalog.pg_class as c on c.oid = a.attrelid
left join pg_catalog.pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = %s and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""

CONSTRAINTS = """
select k.conname, pg_catalog.pg_get_constraintdef(k.oid)
from pg_catalog.pg_constraint as k
where k.conrelid = %s and k.contype in ('c', 'p', 'u', 'f', 'x')
order by k.conname collate "C"
"""

INDEXES = """
select pg_catalog.pg_get_indexdef(i.indexrelid)
from pg_catalog.pg_index as i
join pg_catalog.pg_class as c on c.oid = i.indexrelid
where i.indrelid = %s
  and not exists (
    select from pg_catalog.pg_constraint as k where k.conindid = i.indexrelid and k.conrelid = i.indrelid)
order by c.relname collate "C"
"""

TRIGGERS = """
select pg_catalog.pg_get_triggerdef(t.oid)
from pg_catalog.pg_trigger as t
where t.tgrelid = %s and not t.tgisinternal
order by t.tgname collate "C"
"""

RULES = """
select r.rulename, r.ev_type::text, r.is_instead
from pg_catalog.pg_rewrite as r
where r.ev_class = %s and r.rulename <> '_RETURN'
order by r.rulename collate "C"
"""

ROLES = """
select r.rolname, r.rolcanlogin, r.rolinherit, r.rolsuper, r.rolcreaterole, r.rolcreatedb,
       (select string_agg(g.rolname, ', ' order by g.rolname collate "C")
        from pg_catalog.pg_auth_members as m
        join pg_catalog.pg_roles as g on g.oid = m.roleid
        where m.member = r.oid)
from pg_catalog.pg_roles as r
where r.rolname in ('pgque_reader', 'pgque_writer', 'pgque_admin', 'pgque_user')
order by r.rolname collate "C"
"""

RELATION_KINDS = {
    "r": "table", "p": "partitioned table", "v": "view", "m": "materialized view", "S": "sequence",
    "c": "type", "f": "foreign table",
}  # fmt: skip


@contextmanager
def installed() -> Iterator[Connection]:
    """Yield a connection to a new database with pgque, on the server that the tests would choose."""
    server = servers.choose()
    try:
        name = "pgque_catalog"
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(f"drop database if exists {name} with (force)")
            admin.execute(f"create database {name} template template0")
        try:
            with psycopg.connect(server.dsn_for(name)) as connection:
                connection.execute(servers.SQL_FILE.read_bytes())
                connection.commit()
                connection.execute("set search_path = ''")
                yield connection
        finally:
            with psycopg.connect(server.dsn, autocommit=True) as admin:
                admin.execute(f"drop database {name} with (force)")
    finally:
        server.stop()


def schema(connection: Connection) -> Iterator[str]:
    """Yield the lines of the schema dump."""
    yield "What an install of pgque creates. Generated by `make schema`; `make check` compares it."
    yield ""
    for name, login, inherit, superuser, createrole, createdb, member in connection.execute(ROLES).fetchall():
        words = [
            "login" if login else "nologin",
            "inherit" if inherit else "noinherit",
            *(
                w
                for w, yes in (("SUPERUSER", superuser), ("CREATEROLE", createrole), ("CREATEDB", createdb))
                if yes
            ),
        ]
        yield f"role {name} {' '.join(words)}" + (f" member of {member}" if member else "")
    row = connection.execute(
        f"select {GRANTS.format(acl='n.nspacl', kind='n', owner='n.nspowner')},"
        " pg_catalog.obj_description(n.oid, 'pg_namespace')"
        " from pg_catalog.pg_namespace as n where n.nspname = 'pgque'"
    ).fetchone()
    assert row is not None
    yield f"schema pgque  grants: {row[0]}"
    if row[1]:
        yield f"  -- {_line(row[1])}"

    for name, base, notnull, checks, grants, comment in connection.execute(DOMAINS).fetchall():
        yield ""
        yield f"domain {name} as {base}{' not null' if notnull else ''}  grants: {grants}"
        if comment:
            yield f"  -- {_line(comment)}"
        if checks:
            yield f"  constraint {checks}"

    for oid, name, kind, options, key, bound, comment, grants, persistence in connection.execute(
        RELATIONS
    ).fetchall():
        yield ""
        extra = "".join(
            [
                " unlogged" if persistence == "u" else "",
                f" partition by {key}" if key else "",
                f" {bound}" if bound else "",
                f" with ({', '.join(options)})" if options else "",
            ]
        )
        yield f"{RELATION_KINDS[kind]} {name}{extra}  grants: {grants}"
        if comment:
            yield f"  -- {_line(comment)}"
        if kind == "S":
            continue
        for column, kind_of, notnull, default, identity, generated, note, column_grants in connection.execute(
            COLUMNS, [oid]
        ).fetchall():
            words = [column, kind_of]
            if notnull:
                words.append("not null")
            if identity:
                words.append(f"identity {'always' if identity == 'a' else 'by default'}")
            if default:
                words.append(("generated " if generated else "default ") + default)
            line = "  " + " ".join(words)
            if column_grants != "-":
                line += f"  grants: {column_grants}"
            yield line + (f"  -- {_line(note)}" if note else "")
        for constraint, definition in connection.execute(CONSTRAINTS, [oid]).fetchall():
            yield f"  constraint {constraint} {definition}"
        for (definition,) in connection.execute(INDEXES, [oid]).fetchall():
            yield f"  {definition}"
        for (definition,) in connection.execute(TRIGGERS, [oid]).fetchall():
            yield f"  {definition}"
        for rule, event, instead in connection.execute(RULES, [oid]).fetchall():
            what = {"1": "select", "2": "update", "3": "insert", "4": "delete"}[event]
            yield f"  rule {rule} on {what}{' instead' if instead else ''}"

    for row in connection.execute(FUNCTIONS).fetchall():
        (
            _,
            name,
            kind,
            arguments,
            result,
            language,
            volatility,
            definer,
            strict,
            parallel,
            config,
            comment,
            grants,
            _,
        ) = row
        yield ""
        yield f"{_routine(kind)} {name}({arguments})" + (f" returns {result}" if result else "")
        words = [language, volatility, "SECURITY DEFINER" if definer else "invoker"]
        if strict:
            words.append("strict")
        if parallel != "u":
            words.append(f"parallel {'safe' if parallel == 's' else 'restricted'}")
        words.extend(f"set {setting}" for setting in config or [])
        yield f"  {' '.join(words)}  grants: {grants}"
        if comment:
            yield f"  -- {_line(comment)}"


def _routine(kind: str) -> str:
    return {"p": "procedure", "a": "aggregate"}.get(kind, "function")


def _line(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    """Run the command line."""
    what = {"schema": schema, "reference": reference}.get(sys.argv[1] if len(sys.argv) == 2 else "")
    if what is None:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with installed() as connection:
            lines = list(what(connection))
    except BadReference as error:
        print(f"reference: {error}", file=sys.stderr)
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
