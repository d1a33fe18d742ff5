"""Rights of an extension where default privileges give them away, and rights that come out of a dump."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from conftest import default_privileges
from faults.clusters import folder_for, new_database, programs_of, run, started, with_extension
from pgque import embedded
from sql.helpers import Connection, column, refused, rows, send, value
from sql.test_rights import GRANTED, OURS, fill
from sql.test_rights import RIGHTS as HEALTH
from support import servers
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


@pytest.fixture(scope="module")
def extended(server: TestServer) -> Iterator[embedded.Server]:
    """A server with the files of the extension, also of 0.7.0."""
    bindir = programs_of(server, "pg_dump", "psql")
    with with_extension(bindir) as programs:
        folder = Path(run(Path("/"), programs / "pg_config", "--sharedir").strip()) / "extension"
        packed = Path(__file__).parents[1] / "sql" / "previous" / "pgque-0.7.0.sql.xz"
        (folder / "pgque--0.7.0.sql").write_bytes(lzma.decompress(packed.read_bytes()))
        version = (folder / "pgque.control").read_text().partition("default_version = '")[2].partition("'")[0]
        (folder / f"pgque--0.7.0--{version}.sql").write_bytes(servers.SQL_FILE.read_bytes())
        with started(programs) as running:
            with psycopg.connect(running.dsn, autocommit=True) as conn:
                for role in ("app", *OURS):
                    conn.execute(f"create role {role}".encode())
                conn.execute("grant pgque_reader, pgque_writer to pgque_admin")
            yield running


@pytest.mark.parametrize("way", ["create", "update"])
def test_an_extension_gives_no_rights_that_default_privileges_give_and_neither_does_its_dump(
    extended: embedded.Server, way: str
) -> None:
    granted = []
    for to in (None, ", ".join(["app", *OURS])):
        name = f"{way}_{'given' if to else 'plain'}"
        with psycopg.connect(extended.dsn, autocommit=True) as admin:
            admin.execute(f"create database {name} template template0".encode())
        with psycopg.connect(extended.dsn_for(name), autocommit=True) as conn:
            if to:
                default_privileges(conn, to)
            if way == "update":
                if to:  # 0.7.0 refuses a schema in which other roles may create objects
                    conn.execute(f"alter default privileges revoke create on schemas from {to}".encode())
                conn.execute("create extension pgque version '0.7.0'")
                fill(conn)
                if to:
                    default_privileges(conn, to)
                    conn.execute(f"grant create on schema pgque to {to}".encode())
                conn.execute("alter extension pgque update")
                value(conn, "select pgque.create_queue('later')")
                value(conn, "select pgque.maint_tables()")
            else:
                conn.execute("create extension pgque")
                fill(conn)
            granted.append(set(column(conn, GRANTED)))
            assert rows(conn, HEALTH)[0][0] == "ok"
    told = {
        right for right in granted[1] - granted[0] if right.endswith((" to pgque_reader", " to pgque_admin"))
    }
    assert granted[0] == granted[1] - told
    assert not told or way == "update"

    with psycopg.connect(extended.dsn, autocommit=True) as admin:
        admin.execute(f"create database {way}_restored template template0".encode())
    with psycopg.connect(extended.dsn_for(f"{way}_restored"), autocommit=True) as conn:
        default_privileges(conn, "app")
    with folder_for(extended) as folder:
        dump = folder / "dump.sql"
        run(folder, extended.bindir / "pg_dump", "-d", extended.dsn_for(f"{way}_given"), "-f", dump)
        naming = [line for line in dump.read_text().splitlines() if re.search(r"\bapp\b", line)]
        assert [line for line in naming if not line.startswith("ALTER DEFAULT PRIVILEGES")] == []
        to = extended.dsn_for(f"{way}_restored")
        run(folder, extended.bindir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", to, "-f", dump)
    with psycopg.connect(to, autocommit=True) as conn:
        # The tables of queues are no members of the extension: the restore created them under its default privileges.
        ((status, detail, advice),) = rows(conn, HEALTH)
        assert status == "warn" and "app: " in detail and "pgque.event_" in detail
        for command in advice.partition("Then revoke: ")[2].split("; "):
            conn.execute(command.encode())
        assert rows(conn, HEALTH)[0][0] == "ok"
        assert not [right for right in column(conn, GRANTED) if right.endswith(" to app")]
        assert send(conn, "mine")
