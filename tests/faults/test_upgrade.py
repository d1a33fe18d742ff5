"""pg_upgrade to another major version: numbers of transactions go on, so everything does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from faults import test_pool_restore, test_restore
from faults.clusters import folder_for, new_database, run, runs, started, with_extension
from pgque import embedded
from sql.helpers import Connection, take, value
from support import servers
from support.servers import TestServer

pytestmark = [pytest.mark.slow, pytest.mark.programs]

# What pg_upgrade runs of each version.
OLD = ("postgres", "initdb", "pg_ctl", "pg_controldata", "pg_resetwal", "pg_config")
NEW = (*OLD, "pg_dump", "pg_dumpall", "pg_restore", "psql", "vacuumdb", "pg_upgrade")


def goes(old: embedded.Binaries, new: embedded.Binaries) -> bool:
    """Say whether pg_upgrade can go from one version to the other.

    Debian's 15.20 writes an option pg_attver to every column, which only a pg_dump that knows of it leaves out:
    without, pg_upgrade fails on any table at all.
    """
    return old.major < new.major and marks(old.bindir / "postgres") <= marks(new.bindir / "pg_dump")


def marks(program: Path) -> bool:
    return b"pg_attver" in program.read_bytes()


def two_versions(server: TestServer) -> tuple[embedded.Binaries, embedded.Binaries]:
    """Find an older and a newer server with all that pg_upgrade needs, the tests' own among them if possible."""
    if server.process is None:
        pytest.skip("the server was not started from binaries")
    mine = server.process.binaries
    found = [mine, *embedded._local_servers()]
    with suppress(embedded.EmbeddedServerError):
        found.append(embedded.find_server("embedded"))
    olds = [one for one in found if all(runs(one.bindir / name) for name in OLD)]
    news = [one for one in olds if all(runs(one.bindir / name) for name in NEW)]
    pairs = [(old, new) for old in olds for new in news if goes(old, new)]
    if not pairs:
        pytest.skip(f"no two versions that pg_upgrade can take: {', '.join(one.version for one in found)}")
    return max(pairs, key=lambda pair: (mine in pair, pair[1] is mine, pair[0].major))


@dataclass
class Upgraded:
    """The new server, the last transaction of the old one, and what was left to do in each database."""

    server: embedded.Server
    xid: int
    alone: dict[str, test_restore.Left]
    pool: dict[str, test_pool_restore.Left]


@pytest.fixture(scope="module")
def upgraded(server: TestServer) -> Iterator[Upgraded]:
    """A cluster with databases installed from the file and as an extension, taken over by a newer server."""
    older, newer = two_versions(server)
    with ExitStack() as stack:
        extended = stack.enter_context(with_extension(older.bindir))
        assert server.process is not None
        folders = [stack.enter_context(folder_for(server.process)) for _ in range(2)]
        old_data, new_data = (folder / "data" for folder in folders)
        alone, pool = {}, {}
        with started(extended, old_data) as old:
            for how in ("file", "extension"):
                for name in ("alone", "pool"):
                    new_database(old.dsn, f"{name}_{how}", how)
                with psycopg.connect(old.dsn_for(f"alone_{how}"), autocommit=True) as conn:
                    conn.execute(
                        "do $$ begin for n in 1..20000 loop perform pg_current_xact_id(); commit; end loop; end $$"
                    )
                    alone[how] = test_restore.fill(conn, old.dsn_for(f"alone_{how}"))
                with psycopg.connect(old.dsn_for(f"pool_{how}"), autocommit=True) as conn:
                    pool[how] = test_pool_restore.fill(conn)
            with psycopg.connect(old.dsn) as conn:
                xid = int(value(conn, "select pg_current_xact_id()::text"))
        with started(newer.bindir, new_data) as new:
            programs = new.bindir
            with psycopg.connect(new.dsn) as conn:
                checksums = value(conn, "select current_setting('data_checksums')") == "on"
        if checksums:  # both have them or none
            run(folders[1], programs / "pg_checksums", "--disable", "-D", new_data)
        run(folders[1], programs / "pg_upgrade", "-b", old.bindir, "-B", programs, "-d", old_data, "-D", new_data, "-U", "postgres", "-s", folders[1], "--no-sync", "-j", "2")  # fmt: skip
        yield Upgraded(stack.enter_context(started(newer.bindir, new_data)), xid, alone, pool)


@pytest.fixture(params=["file", "extension"])
def how(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def connect(upgraded: Upgraded, name: str) -> Connection:
    return psycopg.connect(upgraded.server.dsn_for(name), autocommit=True)


def test_consumers_receive_unfinished_messages_from_the_new_version(upgraded: Upgraded, how: str) -> None:
    with connect(upgraded, f"alone_{how}") as conn:
        assert int(value(conn, "select pg_current_xact_id()::text")) > upgraded.xid
        # Nothing is rebuilt: the log and the open batches are the old ones.
        assert value(conn, "select bool_or(q.queue_restored) from pgque.queue as q") is False
        assert value(conn, "select count(*) from pgque.health() where check_name = 'restore'") == 0
        test_restore.check(conn, upgraded.alone[how])


def test_a_pool_receives_unfinished_messages_and_leases_hold_in_the_new_version(
    upgraded: Upgraded, how: str
) -> None:
    left = upgraded.pool[how]
    with connect(upgraded, f"pool_{how}") as conn:
        if how == "file":
            conn.execute(servers.SQL_FILE.read_bytes())  # it installs over the old install
        assert not {m.msg_id for m in take(conn, "q", "w9", 100, "1 second")} & set(left.held)
        test_pool_restore.check(conn, test_pool_restore.check_held(conn, left))
