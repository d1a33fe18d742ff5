"""A base backup and the archived log, recovered to a point in the middle of work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import psycopg
import pytest

from faults import test_pool_restore, test_restore
from faults.clusters import base_backup, folder_for, new_database, programs_of, run, started, until
from pgque import embedded
from sql.helpers import Connection, ack, drain, extend, ids, offer, send_many, take, value, work_off
from support.servers import TestServer

pytestmark = [pytest.mark.slow, pytest.mark.programs]


@dataclass
class Recovered:
    """The recovered server, and what was left to do at the point."""

    server: embedded.Server
    alone: test_restore.Left
    pool: test_pool_restore.Left
    lost: int
    lost_ids: list[int]


@pytest.fixture
def recovered(server: TestServer) -> Iterator[Recovered]:
    """A backup that was taken in the middle of work, recovered to a point; the work went on after it."""
    bindir = programs_of(server, "pg_basebackup")
    with ExitStack() as stack:
        primary = stack.enter_context(started(bindir, settings={"archive_mode": "on"}))
        archive = stack.enter_context(folder_for(primary))
        folder = stack.enter_context(folder_for(primary))
        with psycopg.connect(primary.dsn, autocommit=True) as admin:
            admin.execute(f"alter system set archive_command = 'cp %p {archive}/%f'".encode())
            admin.execute("select pg_reload_conf()")
        for name in ("alone", "pool"):
            new_database(primary.dsn, name, "file")
        alone: Connection = stack.enter_context(psycopg.connect(primary.dsn_for("alone"), autocommit=True))
        pool: Connection = stack.enter_context(psycopg.connect(primary.dsn_for("pool"), autocommit=True))
        left = test_restore.fill(alone, primary.dsn_for("alone"))
        data = base_backup(primary, folder)
        pool_left = test_pool_restore.fill(pool)
        value(alone, "select pg_create_restore_point('here')")

        # What is not to be: everybody finishes his work, and there is more.
        for name in ("fresh", "sliced", "open"):
            drain(alone, "q", name)
        send_many(alone, "q", 10)
        drain(alone, "q", "fresh")
        assert extend(pool, pool_left.token, "1 hour") == 3
        lost = take(pool, "q", "w3", 3)
        offer(pool, "q", 10)
        work_off(pool, "q", "w4")
        segment = value(alone, "select pg_walfile_name(pg_switch_wal())")
        until(
            lambda: value(alone, "select last_archived_wal >= %s from pg_stat_archiver", segment),
            "it is archived",
        )
        alone.close()
        pool.close()
        primary.kill()
        with (data / "postgresql.auto.conf").open("a") as conf:
            conf.write(
                f"restore_command = 'cp {archive}/%f %p'\nrecovery_target_name = 'here'\n"
                "recovery_target_action = 'promote'\narchive_mode = off\n"
            )
        run(folder, "touch", data / "recovery.signal")
        copy = stack.enter_context(started(bindir, data))
        with psycopg.connect(copy.dsn, autocommit=True) as conn:
            until(lambda: not value(conn, "select pg_is_in_recovery()"), "it is recovered")
        yield Recovered(copy, left, pool_left, lost[0].batch_id, ids(lost))


def test_a_backup_recovered_to_a_point_delivers_what_was_left_at_that_point(recovered: Recovered) -> None:
    with psycopg.connect(recovered.server.dsn_for("alone"), autocommit=True) as conn:
        assert value(conn, "select pg_walfile_name(pg_current_wal_lsn())").startswith("00000002")
        test_restore.check(conn, recovered.alone)
    with psycopg.connect(recovered.server.dsn_for("pool"), autocommit=True) as conn:
        # A batch that was handed out after the point is nobody's.
        assert ack(conn, recovered.lost) == 0
        left = test_pool_restore.check_held(conn, recovered.pool)
        again = take(conn, "q", "w9", 3, "1 second")
        assert ids(again) == recovered.lost_ids
        assert again[0].batch_id != recovered.lost
        assert ack(conn, recovered.lost) == 0
        test_pool_restore.check(conn, left)
