"""No function of pgque lets PostgreSQL compile its statements; support/jit.py looks at what was compiled."""

from __future__ import annotations

from sql.helpers import Connection, column, send, value


def test_each_function_that_callers_enter_or_that_forbids_a_plan_switches_jit_off(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    send(own, "q")
    assert (
        column(
            own,
            "select p.oid::regprocedure::text from pg_proc as p where p.pronamespace = 'pgque'::regnamespace"
            " and (p.prosecdef or exists (select from unnest(p.proconfig) as c (setting) where c.setting like 'enable\\_%%=off'))"
            " and ('jit=off' = any (p.proconfig)) is not true",
        )
        == []
    )
    assert (
        value(
            own,
            "select count(*) from pg_proc as p where p.proname ~ '^_events_[0-9]+$' and 'jit=off' = any (p.proconfig)",
        )
        == 1
    )
