"""On a standby every page that reads works, and nothing else is offered."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pgque.web
from conftest import Role
from faults.clusters import base_backup, folder_for, programs_of, started, until
from pgque.web.site import CHANGES, READS
from support import servers
from support.pages import Browser, over_tcp, text
from support.servers import TestServer

pytestmark = [pytest.mark.programs, pytest.mark.slow]  # two servers and a base backup


def filled(conn: psycopg.Connection[Any]) -> int:
    """Make a queue with messages in many states, a stream and two roles; return a message that is dead."""
    conn.execute(servers.SQL_FILE.read_bytes())
    conn.execute("create role reads login password 'x' in role pgque_reader")
    conn.execute("create role works login password 'x'")
    conn.execute("create role mends login password 'x' in role pgque_admin")
    conn.execute("grant select on pgque.subscriber, pgque.sink_epoch, pgque.sink_attempt to mends")
    conn.execute("select pgque.create_queue('q'), pgque.create_queue('other')")
    conn.execute(
        "select pgque.grant_queue('q', 'works', 'produce'), pgque.grant_queue('q', 'works', 'consume')"
    )
    conn.execute(
        "select pgque.subscribe('q', 'c'), pgque.subscribe('q', 'solo'), pgque.open_stream('q', 'spark')"
    )
    conn.execute(
        "select pgque.send_batch('q', 'kind', array(select 'payload ' || n from generate_series(1, 9) n))"
    )
    conn.execute("select pgque.force_tick('q'), pgque.ticker()")
    rows = conn.execute("select batch_id, msg_id from pgque.receive('q', 'c', 6, 'w', '1 hour')").fetchall()
    batch, ids = rows[0][0], [row[1] for row in rows]
    conn.execute("select pgque.dead(%s, %s, 'no such address')", [batch, ids[:2]])
    conn.execute("select pgque.nack(%s, %s, '1 hour', 'busy')", [batch, ids[2:3]])
    conn.execute("select pgque.archive(%s, %s)", [batch, ids[3:4]])
    conn.execute("select pgque.send('q', 'kind', 'later'::text, delay => '1 hour')")
    conn.execute("select pgque.create_recurring('nightly', 'q', '0 3 * * *', 't', 'x'::text)")
    return int(ids[0])


def test_everything_is_read_and_nothing_else_is_offered(server: TestServer) -> None:
    bindir = programs_of(server, "pg_basebackup")
    with ExitStack() as stack:
        primary = stack.enter_context(started(bindir))
        with psycopg.connect(primary.dsn, autocommit=True) as conn:
            dead = filled(conn)
        folder = stack.enter_context(folder_for(primary))
        standby = stack.enter_context(started(bindir, base_backup(primary, folder, "-R")))
        with (
            psycopg.connect(primary.dsn, autocommit=True) as conn,
            psycopg.connect(standby.dsn, autocommit=True) as there,
        ):
            until(lambda: conn.execute("select 1 from pg_stat_replication").fetchone(), "the standby follows")
            # Its rows come to the standby while somebody looks.
            conn.execute("select pgque.send('q', 'kind', 'the newest'::text)")
            at = conn.execute("select pg_current_wal_insert_lsn()").fetchone()
            reached = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
            until(lambda: there.execute(reached, at).fetchone() == (True,), "the standby has caught up")
        app = pgque.web.app(over_tcp(standby, standby.dsn))
        stack.callback(app.close)  # type: ignore[attr-defined]
        fields = {
            "queue": "q", "id": str(dead), "consumer": "solo", "to": "latest", "name": "nightly",
            "action": "retry", "dl_id": "1", "role": "mends", "right": "consume",
        }  # fmt: skip
        shown = {
            "mends": set(READS) - {"/job"},
            "reads": {
                "/",
                "/queue",
                "/queue/purge",
                "/queue/seek",
                "/messages",
                "/message",
                "/send",
                "/recurring",
            },
            "works": {
                "/",
                "/queue",
                "/queue/purge",
                "/queue/seek",
                "/messages",
                "/message",
                "/send",
                "/recurring",
            },
        }
        for user, paths in shown.items():
            b = Browser(app)
            b.log_in(Role(user, make_conninfo("", user=user, password="x")))
            for path in sorted(paths):
                page = b.get(path, **fields)
                assert "The database is read only: everything is shown, nothing can be changed." in text(
                    page
                ), path
                assert page.text.count('<form method="post"') == 1, path  # log out
            for path in CHANGES:
                page = b.post(
                    path,
                    403,
                    **fields,
                    setting="max_retries",
                    value="1",
                    one="requeue 1",
                    tick="1",
                    worker="w",
                )
                assert "read only" in text(page), path
        b = Browser(app)
        page = b.log_in(Role("mends", make_conninfo("", user="mends", password="x")))
        assert "dead letters" in text(page)
        for path, words in {
            "/queue": "spark", "/messages": "the newest", "/failing": "busy", "/dead": "no such address",
            "/archive": "archived c", "/recurring": "nightly", "/streams": "spark", "/message": "dead",
            "/actions": "create_queue",
        }.items():  # fmt: skip
            asked = {} if path == "/archive" else fields
            assert words in text(b.get(path, **{"queue": "q", **asked})), path
