"""Rights to single queues after a restore into another cluster: those of the roles with the same names, no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from faults.clusters import folder_for, new_database, programs_of, run, started, with_extension
from pgque import embedded
from sql.helpers import Connection, refused, rows, send, value
from support.servers import TestServer

pytestmark = [pytest.mark.programs, pytest.mark.slow]

RIGHTS = (
    "select r.right_role::text, r.right_name, r.right_role_name::text from pgque.queue_right r order by 1"
)


@pytest.fixture(scope="module", params=["plain", "extension"])
def clusters(
    request: pytest.FixtureRequest, server: TestServer
) -> Iterator[tuple[str, embedded.Server, embedded.Server]]:
    bindir = programs_of(server, "pg_dump", "psql")
    with ExitStack() as stack:
        programs = stack.enter_context(with_extension(bindir)) if request.param == "extension" else bindir
        yield request.param, *(stack.enter_context(started(programs)) for _ in range(2))


def as_role(conn: Connection, role: str) -> int:
    """Send as a role."""
    conn.execute(f"set role {role}".encode())
    try:
        return send(conn, "q")
    finally:
        conn.execute("reset role")


def test_the_number_of_a_dropped_role_gives_its_rights_to_no_other_role(
    clusters: tuple[str, embedded.Server, embedded.Server],
) -> None:
    how, old, young = clusters
    with psycopg.connect(old.dsn, autocommit=True) as conn:
        for role in ("early", "gone", "kept", "before"):
            conn.execute(f"create role {role}".encode())
        number = value(conn, "select 'gone'::regrole::oid::int")
    new_database(old.dsn, "mydb", how)
    with psycopg.connect(old.dsn_for("mydb"), autocommit=True) as conn:
        value(conn, "select pgque.create_queue('q')")
        for role in ("gone", "kept", "before"):
            value(conn, "select pgque.grant_queue('q', %s, 'produce')", role)
        conn.execute("alter role before rename to later")
        assert as_role(conn, "later")
        value(conn, "select pgque.maint_tables()")
        assert as_role(conn, "later")
        conn.execute("drop role gone")
        assert rows(conn, RIGHTS) == [
            (str(number), "produce", "gone"),
            ("kept", "produce", "kept"),
            ("later", "produce", "later"),
        ]
    with psycopg.connect(young.dsn, autocommit=True) as conn:
        stranger = "early"
        for n in range(1000):
            conn.execute(f"create role {stranger}".encode())
            if value(conn, "select %s::regrole::oid::int", stranger) == number:
                break
            stranger = f"stranger_{n}"
        assert value(conn, "select %s::regrole::oid::int", stranger) == number
        conn.execute(
            "create role later; create role kept; create role pgque_reader; create role pgque_writer"
        )
        conn.execute("create role pgque_user; create role pgque_admin in role pgque_reader, pgque_writer")
        conn.execute(f"grant pgque_user to later, kept, {stranger}".encode())
        conn.execute("create database restored template template0")
    with folder_for(old) as folder:
        run(folder, old.bindir / "pg_dump", "-d", old.dsn_for("mydb"), "-f", folder / "dump.sql")
        restore = (
            young.bindir / "psql",
            "-X",
            "-q",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            young.dsn_for("restored"),
        )
        run(folder, *restore, "-f", folder / "dump.sql")
    with psycopg.connect(young.dsn_for("restored"), autocommit=True) as conn:
        refused("42501", as_role, conn, stranger)
        conn.execute(f"set role {stranger}".encode())
        assert rows(conn, "select * from pgque.my_rights()") == [(None, False, False, False, False)]
        conn.execute("reset role")
        assert as_role(conn, "kept") and as_role(conn, "later")
        assert (stranger, "produce", "gone") in rows(conn, RIGHTS)
        value(conn, "select pgque.maint_tables()")
        assert rows(conn, RIGHTS) == [("kept", "produce", "kept"), ("later", "produce", "later")]
        assert value(conn, "select pgque.grant_queue('q', %s, 'produce')", stranger) == 1
        assert as_role(conn, stranger)
