"""A database without pg_cron: start() says what to do instead."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest


def test_start_without_pg_cron_names_the_command_that_ticks_instead(
    conn: psycopg.Connection[tuple[Any, ...]],
) -> None:
    row = conn.execute(
        "select count(*) from pg_catalog.pg_extension as e where e.extname = 'pg_cron'"
    ).fetchone()
    assert row == (0,), "the test database must not have pg_cron"
    with pytest.raises(psycopg.Error) as caught:
        conn.execute("select pgque.start()")
    assert caught.value.sqlstate == "PQ014"
    assert "pgque ticker" in (caught.value.diag.message_hint or "")


def test_stop_and_status_work_without_pg_cron(conn: psycopg.Connection[tuple[Any, ...]]) -> None:
    conn.execute("select pgque.stop()")
    rows = conn.execute("select * from pgque.status()").fetchall()
    assert rows
