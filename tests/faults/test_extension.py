"""pgque as an extension: its data is in a dump, and comes back like that of a plain install."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from faults import test_restore, test_work_restore
from faults.clusters import folder_for, new_database, programs_of, run, started, with_extension
from pgque import embedded
from sql.helpers import Connection, drain, send, subscribe, tick, value
from support.servers import TestServer

pytestmark = [pytest.mark.slow, pytest.mark.programs]


@dataclass
class Dumps:
    """Two dumps of databases with the extension, and servers that have its files."""

    old: embedded.Server
    young: embedded.Server
    folder: Path
    alone: test_restore.Left
    pool: test_work_restore.Left


@pytest.fixture(scope="module")
def dumps(server: TestServer) -> Iterator[Dumps]:
    bindir = programs_of(server, "pg_dump", "psql")
    with ExitStack() as stack:
        programs = stack.enter_context(with_extension(bindir))
        old = stack.enter_context(started(programs))
        young = stack.enter_context(started(programs))
        folder = stack.enter_context(folder_for(old))
        for name in ("alone", "pool"):
            new_database(old.dsn, name, "extension")
        with psycopg.connect(old.dsn_for("alone"), autocommit=True) as conn:
            conn.execute(
                "do $$ begin for n in 1..20000 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
            alone = test_restore.fill(conn, old.dsn_for("alone"))
        with psycopg.connect(old.dsn_for("pool"), autocommit=True) as conn:
            pool = test_work_restore.fill(conn)
        for name in ("alone", "pool"):
            run(folder, old.bindir / "pg_dump", "-d", old.dsn_for(name), "-f", folder / f"{name}.sql")
        yield Dumps(old, young, folder, alone, pool)


@pytest.fixture(params=["same cluster", "young cluster"])
def target(request: pytest.FixtureRequest, dumps: Dumps) -> embedded.Server:
    return dumps.old if request.param == "same cluster" else dumps.young


def restored(dumps: Dumps, target: embedded.Server, name: str) -> Connection:
    """Restore a dump into a new database; return a connection to it."""
    database = f"restored_{secrets.token_hex(4)}"
    with psycopg.connect(target.dsn, autocommit=True) as admin:
        for role in ("reader", "writer", "admin"):
            if value(admin, "select to_regrole(%s)", f"pgque_{role}") is None:
                admin.execute(f"create role pgque_{role}".encode())
        admin.execute(f"create database {database} template template0".encode())
    dsn = target.dsn_for(database)
    run(
        dumps.folder,
        target.bindir / "psql",
        "-X",
        "-q",
        "-v",
        "ON_ERROR_STOP=1",
        "-d",
        dsn,
        "-f",
        dumps.folder / f"{name}.sql",
    )
    return psycopg.connect(dsn, autocommit=True)


def test_consumers_of_an_extension_get_what_they_lacked_after_a_restore(
    dumps: Dumps, target: embedded.Server
) -> None:
    with restored(dumps, target, "alone") as conn:
        assert value(conn, "select count(*) from pg_extension where extname = 'pgque'") == 1
        value(conn, "select pgque.ticker()")
        test_restore.check(conn, dumps.alone)


def test_a_pool_of_an_extension_gets_what_it_lacked_after_a_restore(
    dumps: Dumps, target: embedded.Server
) -> None:
    with restored(dumps, target, "pool") as conn:
        test_work_restore.check(conn, test_work_restore.check_held(conn, dumps.pool))


def test_a_restored_extension_makes_and_drops_queues_and_is_dumped_again(
    dumps: Dumps, target: embedded.Server
) -> None:
    with restored(dumps, target, "alone") as conn:
        assert value(conn, "select pgque.create_queue('new')") == 1
        subscribe(conn, "new")
        sent = send(conn, "new")
        tick(conn, "new")
        value(conn, "select pgque.drop_queue('q', true)")
        run(
            dumps.folder,
            target.bindir / "pg_dump",
            "-d",
            target.dsn_for(conn.info.dbname),
            "-f",
            dumps.folder / "again.sql",
        )
    with restored(dumps, target, "again") as conn:
        value(conn, "select pgque.ticker()")
        value(conn, "select pgque.maint()")
        tick(conn, "new")
        assert drain(conn, "new") == [sent]
        conn.execute("drop extension pgque cascade")
        assert value(conn, "select to_regnamespace('pgque')") is None
