"""A database without pg_cron: start() says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgque import embedded
from support.documents import ticking
from support.servers import SQL_FILE, TEST_SETTINGS, TestServer


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


def test_a_role_that_is_no_superuser_installs_on_a_new_server_grants_and_ticks(
    server: TestServer, wait_until: Callable[..., None]
) -> None:
    """As on a managed service; see python/docs/managed.md."""
    bindir = server.process.binaries.bindir if server.process is not None else None
    with embedded.start(bindir, settings=TEST_SETTINGS) as new:
        with psycopg.connect(new.dsn, autocommit=True) as admin:
            admin.execute("create role boss login createdb password 'boss'")
            admin.execute("create database app owner boss")
            admin.execute("create role shop login password 'shop'")
        app = new.tcp_dsn
        boss = make_conninfo(app, user="boss", password="boss", dbname="app")
        with psycopg.connect(boss) as conn, pytest.raises(psycopg.Error, match="may not create") as caught:
            conn.execute(SQL_FILE.read_bytes())
        with psycopg.connect(new.dsn, autocommit=True) as admin:
            hint = caught.value.diag.message_hint or ""
            admin.execute(hint.split(": ")[1].split(";")[0].encode())
        with psycopg.connect(boss) as conn:
            conn.execute(SQL_FILE.read_bytes())
            conn.execute("select pgque.create_queue('orders'), pgque.subscribe('orders', 'billing')")
            conn.execute("select pgque.grant_queue('orders', 'shop', 'produce')")
            conn.execute("create role robot login password 'robot' in role pgque_admin")
        with ticking(make_conninfo(app, user="robot", password="robot", dbname="app")):
            with psycopg.connect(make_conninfo(app, user="shop", password="shop", dbname="app")) as shop:
                shop.execute("select pgque.send('orders', 'hello')")
            with psycopg.connect(boss, autocommit=True) as conn:
                query = "select count(*) from pgque.receive('orders', 'billing')"
                wait_until(lambda: conn.execute(query).fetchone() == (1,), "the message")
