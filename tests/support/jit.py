"""The guard over JIT: PostgreSQL compiles none of the statements that pgque's functions run.

A function that forbids a kind of plan (enable_seqscan = off) may get a plan with the planner's penalty, and that
alone passes jit_above_cost: compiling takes longer than the statement, at each call. The servers of the tests
have JIT on, as PostgreSQL has it by default, and pg_stat_statements counts what was compiled.
"""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

EXTENSION = "pg_stat_statements"
# All statements of functions too, and room for those of a whole run
SETTINGS: Mapping[str, str] = {f"{EXTENSION}.track": "all", f"{EXTENSION}.max": "20000"}

CONTROL = "pgque_jit_control"
_COMPILE_ONE = f"""
do $$
begin
  set local jit = on;
  set local jit_above_cost = 0;
  perform sum(g.n) as {CONTROL} from pg_catalog.generate_series(1, 10) as g (n);
end
$$
"""
# The statements of functions that were compiled; those of a test itself are its own business.
_COMPILED = f"""
select s.calls, s.jit_functions, s.query
from {EXTENSION} as s
where s.jit_functions > 0 and not s.toplevel
order by s.jit_functions desc
"""


def problem(dsn: str) -> str | None:
    """Return why a server cannot tell what it compiled, or None."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "select current_setting('server_version_num')::int, pg_catalog.pg_jit_available(),"
            " current_setting('shared_preload_libraries')"
        ).fetchone()
    assert row is not None
    version, available, preloaded = row
    if version < 150000:
        return "PostgreSQL 14 does not count what it compiles"
    if not available:
        return "this server has no JIT (Debian: the package of the server needs libllvm)"
    return None if EXTENSION in preloaded else f"this server has no {EXTENSION}"


def compiled(dsn: str) -> list[str]:
    """Return the statements of functions that were compiled since the server started, after a control.

    Raises AssertionError if the control, which has to be compiled, was not.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"create extension if not exists {EXTENSION}")
        connection.execute(_COMPILE_ONE)
        found = connection.execute(_COMPILED).fetchall()
    assert any(CONTROL in query for _, _, query in found), "JIT compiled nothing, not even the control"
    return [
        f"{functions} functions in {calls} calls: {query}"
        for calls, functions, query in found
        if CONTROL not in query
    ]


def forget(dsn: str) -> None:
    """Forget what was compiled so far."""
    if problem(dsn) is None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"create extension if not exists {EXTENSION}")
            connection.execute("select pg_stat_statements_reset()")
