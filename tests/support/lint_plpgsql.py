"""Check every PL/pgSQL function of an installed pgque with plpgsql_check; exit 1 if it finds errors.

Uses the first server binaries with plpgsql_check: PGQUE_TEST_BINDIR, else a local installation.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psycopg

from pgque import embedded
from support import servers

CHECK = """
select p.oid::regprocedure::text, c.level, c.lineno, c.sqlstate, c.message, c.detail, c.query
from pg_catalog.pg_proc as p
join pg_catalog.pg_language as l on l.oid = p.prolang and l.lanname = 'plpgsql'
left join lateral (
  select t.tgrelid from pg_catalog.pg_trigger as t where t.tgfoid = p.oid and not t.tgisinternal limit 1
) as used on true
cross join lateral public.plpgsql_check_function_tb(
  p.oid,
  case when p.prorettype = 'pg_catalog.trigger'::regtype
       then coalesce(used.tgrelid, 'public.sample'::regclass) else 0 end,
  fatal_errors => false, other_warnings => true, extra_warnings => true, security_warnings => true,
  performance_warnings => false
) as c
where p.pronamespace = 'pgque'::regnamespace
order by 1, c.lineno
"""


def binaries() -> embedded.Binaries | None:
    """Return server binaries that have plpgsql_check, or None."""
    chosen = os.environ.get("PGQUE_TEST_BINDIR")
    try:
        found = embedded.given(Path(chosen)) if chosen else embedded.find_server("local")
    except embedded.EmbeddedServerError:
        return None
    return found if found.has_extension("plpgsql_check") else None


def main() -> int:
    """Run the check; 77 means that no server with plpgsql_check was found."""
    found = binaries()
    if found is None:
        print("no local server with plpgsql_check (Debian: postgresql-NN-plpgsql-check)", file=sys.stderr)
        return 77
    errors = warnings = functions = 0
    # with pg_cron, so that what calls it can be checked too
    preload = ["pg_cron"] if found.has_extension("pg_cron") else []
    with (
        embedded.start(found.bindir, settings=servers.TEST_SETTINGS, preload=preload) as server,
        psycopg.connect(server.dsn) as connection,
    ):
        connection.execute(servers.SQL_FILE.read_bytes())
        for extension in preload:
            connection.execute(f"create extension {extension}")
        connection.execute("create extension plpgsql_check schema public")
        connection.execute("create table public.sample (id bigint primary key, name text, at timestamptz)")
        row = connection.execute(
            "select count(*) from pg_catalog.pg_proc as p"
            " join pg_catalog.pg_language as l on l.oid = p.prolang"
            " where p.pronamespace = 'pgque'::regnamespace and l.lanname = 'plpgsql'"
        ).fetchone()
        functions = row[0] if row else 0
        for name, level, line, state, message, detail, query in connection.execute(CHECK).fetchall():
            errors += level == "error"
            warnings += level != "error"
            if level == "error" or "-v" in sys.argv:
                text = " ".join(str(part) for part in (message, detail, query) if part)
                print(f"{name}:{line}: {level} {state}: {' '.join(text.split())}")
    print(f"PostgreSQL {found.version}: {functions} functions, {errors} errors, {warnings} warnings")
    return 1 if errors or not functions else 0


if __name__ == "__main__":
    raise SystemExit(main())
