"""A dump restored in any order, while a ticker runs: nothing is lost, and nothing is touched before the end."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from faults import restores, test_pool_restore, test_restore
from faults.clusters import folder_for, new_database, programs_of, run, started, with_extension
from pgque import embedded
from sql.helpers import (
    Connection,
    drain,
    receive,
    refused,
    rows,
    send,
    subscribe,
    tick,
    value,
)
from support.landing import at_a_landing
from support.servers import TestServer

pytestmark = [pytest.mark.slow, pytest.mark.programs]

KINDS = ("plain", "extension")
PREVIOUS = "0.7.0"  # the last one whose dumps do not say that they are complete


@dataclass
class Dumps:
    """Dumps in folder format, and a server that has the extension's files, those of the previous version too."""

    server: embedded.Server
    folder: Path
    alone: dict[str, test_restore.Left]
    pool: dict[str, test_pool_restore.Left]


def dump(server: embedded.Server, folder: Path, name: str, *options: str) -> Path:
    run(folder, server.bindir / "pg_dump", "-Fd", *options, "-f", folder / name, "-d", server.dsn_for(name))
    return folder / name


@pytest.fixture(scope="module")
def dumps(server: TestServer) -> Iterator[Dumps]:
    bindir = programs_of(server, "pg_dump", "pg_restore", "psql")
    with ExitStack() as stack:
        programs = stack.enter_context(with_extension(bindir, PREVIOUS))
        main = stack.enter_context(started(programs))
        folder = stack.enter_context(folder_for(main))
        alone, pool = {}, {}
        for kind in (*KINDS, "previous"):
            name = f"alone_{kind}"
            how, version = ("extension", PREVIOUS) if kind == "previous" else (kind, None)
            new_database(main.dsn, name, how, version)
            with psycopg.connect(main.dsn_for(name), autocommit=True) as conn:
                alone[kind] = test_restore.fill(conn, main.dsn_for(name))
            dump(main, folder, name)
        for kind in KINDS:
            new_database(main.dsn, f"pool_{kind}", kind)
            with psycopg.connect(main.dsn_for(f"pool_{kind}"), autocommit=True) as conn:
                pool[kind] = test_pool_restore.fill(conn)
            dump(main, folder, f"pool_{kind}")
        yield Dumps(main, folder, alone, pool)


def pg_restore(dumps: Dumps, dsn: str, *words: str | Path) -> None:
    restores.pg_restore(dumps.server.bindir, dumps.folder, dsn, *words)


@contextmanager
def fresh(server: embedded.Server) -> Iterator[str]:
    """Give a new database; drop it afterwards."""
    name = f"restored_{secrets.token_hex(4)}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"create database {name} template template0".encode())
        try:
            yield server.dsn_for(name)
        finally:
            admin.execute(f"drop database {name} with (force)".encode())


# Some for each landing only, because each restores a whole dump.
WAYS = at_a_landing(("psql", "pg_restore -1", "-j4", "sections"), restores.WAYS)


def load_twice(dumps: Dumps, source: str, dsn: str, *options: str) -> None:
    """Dump the schema and then, with these options, the data alone, and load each script."""
    bindir = dumps.server.bindir
    for part in (["--schema-only"], ["--data-only", *options]):
        script = dumps.folder / f"{secrets.token_hex(4)}.sql"
        run(dumps.folder, bindir / "pg_dump", *part, "-f", script, "-d", source)
        run(dumps.folder, bindir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", script)


def health(conn: Connection) -> list[tuple[str, str | None, str]]:
    """Return the checks of a restore that is not complete: check, queue, advice."""
    return [
        (check, queue, advice)
        for check, queue, status, detail, advice in rows(conn, "select * from pgque.health()")
        if status == "fail" and "dump that is not complete" in detail
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_consumer_receives_unfinished_messages_however_the_dump_is_loaded_while_a_ticker_runs(
    dumps: Dumps, kind: str, way: str
) -> None:
    # Each of these stores a row whose number the dump has too. check() removes the consumer.
    early = ["select pgque.subscribe('q', 'newcomer')"]
    if way != "psql":  # nothing shows that psql, which has just created an empty extension, goes on
        early += ["select pgque.set_tick_period_ms(100)", "select pgque.create_queue('q')"]
    with fresh(dumps.server) as dsn:
        with restores.ticker(dsn, *early):
            restores.load(way, dumps.server.bindir, dumps.folder, dsn, dumps.folder / f"alone_{kind}")
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert health(conn) == []
            test_restore.check(conn, dumps.alone[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["psql", "-j4"])
def test_a_pool_gets_what_it_lacked_however_the_dump_is_loaded_while_a_ticker_runs(
    dumps: Dumps, kind: str, way: str
) -> None:
    with fresh(dumps.server) as dsn:
        with restores.ticker(dsn):
            restores.load(way, dumps.server.bindir, dumps.folder, dsn, dumps.folder / f"pool_{kind}")
        with psycopg.connect(dsn, autocommit=True) as conn:
            test_pool_restore.check(conn, test_pool_restore.check_held(conn, dumps.pool[kind]))


# Which part of the data is loaded last: lines of `pg_restore -l`.
LAST = {
    "queues": r" queue ",
    "consumers": r" consumer ",
    "subscribers": r" subscriber ",
    "positions": r" position_[01] ",
    "outcomes": r" (settled_[01]|dead_letter) ",
    "retries": r" retry_queue ",
    "settings": r" (config|journal|queue_option) ",
    "recurring messages and keys": r" (recurring(_run_[01])?|(idempotency|sink_epoch)_[01]) ",
    "events": r" event_[0-9]+_[012] ",
    "ticks": r" tick_[0-9]+_[012] ",
    "sequences": r" SEQUENCE SET ",
}

# Calls that must fail before the end: of a queue, and others.
QUEUE_CALLS: dict[str, Callable[[Connection], object]] = {
    "send": lambda c: send(c, "q", "too early"),
    "receive": lambda c: receive(c, "q", "open"),
    "ticker of the queue": lambda c: tick(c, "q"),
    "subscribe": lambda c: value(c, "select pgque.subscribe('q', 'newcomer')"),
    "unsubscribe": lambda c: value(c, "select pgque.unsubscribe('q', 'open')"),
    "purge": lambda c: value(c, "select pgque.purge('q')"),
    "drop_queue": lambda c: value(c, "select pgque.drop_queue('q', true)"),
}
OTHER_CALLS: dict[str, Callable[[Connection], object]] = {
    "create_queue": lambda c: value(c, "select pgque.create_queue('another')"),
    "set_tick_period_ms": lambda c: value(c, "select pgque.set_tick_period_ms(100)"),
}


def load_part(dumps: Dumps, dsn: str, name: str, pattern: str, last: bool) -> None:
    """Load the data whose entry matches, or all other data; serially, as pg_restore -j may do it in its turn."""
    entries = run(dumps.folder, dumps.server.bindir / "pg_restore", "-l", dumps.folder / name).splitlines()
    data = [e for e in entries if re.search(r" (TABLE DATA|SEQUENCE SET) ", e)]
    chosen = [e for e in data if (re.search(pattern, e) is not None) == last]
    assert chosen
    listed = dumps.folder / "list"
    listed.write_text("\n".join(chosen) + "\n")
    pg_restore(dumps, dsn, "-L", listed, dumps.folder / name)


def section(dumps: Dumps, dsn: str, name: str, which: str) -> None:
    pg_restore(dumps, dsn, f"--section={which}", dumps.folder / name)


# A plain install differs in few of them: its tables are in the dump too.
PARTS = [("extension", part) for part in LAST] + [
    ("plain", p) for p in ("queues", "subscribers", "events", "sequences")
]


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_no_call_changes_anything_before_the_last_part_of_a_dump_is_loaded(
    dumps: Dumps, kind: str, part: str
) -> None:
    name = f"alone_{kind}"
    with fresh(dumps.server) as dsn:
        section(dumps, dsn, name, "pre-data")
        load_part(dumps, dsn, name, LAST[part], last=False)
        with psycopg.connect(dsn, autocommit=True) as conn:
            for call in QUEUE_CALLS.values():
                refused("PQ001" if part == "queues" else "55000", call, conn)
            for call in OTHER_CALLS.values():
                refused("55000", call, conn)
            with restores.ticker(dsn):
                pass
            value(conn, "select pgque.stop()")
            assert {found[0] for found in health(conn)} >= {"restore"}
            assert all("confirm_restore" in found[2] for found in health(conn))
        load_part(dumps, dsn, name, LAST[part], last=True)
        section(dumps, dsn, name, "post-data")
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert health(conn) == []
            test_restore.check(conn, dumps.alone[kind])


@pytest.mark.parametrize("way", at_a_landing(("psql", "-j4"), ("pg_restore",)))
def test_a_dump_of_the_previous_version_is_restored_while_a_ticker_runs(dumps: Dumps, way: str) -> None:
    with fresh(dumps.server) as dsn:
        with restores.ticker(dsn):
            restores.load(way, dumps.server.bindir, dumps.folder, dsn, dumps.folder / "alone_previous")
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert value(conn, "select pgque.version()") != PREVIOUS
            assert health(conn) == []
            test_restore.check(conn, dumps.alone["previous"])


@pytest.mark.parametrize(
    "part", at_a_landing(("subscribers", "positions"), ("queues", "consumers", "ticks", "sequences"))
)
def test_a_dump_of_the_previous_version_whose_last_part_is_missing_is_not_used(
    dumps: Dumps, part: str
) -> None:
    name = "alone_previous"
    with fresh(dumps.server) as dsn:
        section(dumps, dsn, name, "pre-data")
        load_part(dumps, dsn, name, LAST[part], last=False)
        with restores.ticker(dsn):
            pass
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert health(conn)
        load_part(dumps, dsn, name, LAST[part], last=True)
        section(dumps, dsn, name, "post-data")
        with psycopg.connect(dsn, autocommit=True) as conn:
            test_restore.check(conn, dumps.alone["previous"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_that_failed_is_loaded_later_and_nothing_is_lost(dumps: Dumps, kind: str) -> None:
    """The restore reached its end, and its log names a table that could not be loaded."""
    name = f"alone_{kind}"
    with fresh(dumps.server) as dsn:
        section(dumps, dsn, name, "pre-data")
        load_part(dumps, dsn, name, LAST["subscribers"], last=False)
        section(dumps, dsn, name, "post-data")
        with psycopg.connect(dsn, autocommit=True) as conn, restores.ticker(dsn):
            refused("55000", send, conn, "q", "too early")
            assert [found[1] for found in health(conn)] == ["empty", "once", "paused", "q"]
        load_part(dumps, dsn, name, LAST["subscribers"], last=True)
        with psycopg.connect(dsn, autocommit=True) as conn:
            test_restore.check(conn, dumps.alone[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_is_loaded_alone_is_used_after_the_operator_confirms_it(dumps: Dumps, kind: str) -> None:
    source = dumps.server.dsn_for(f"alone_{kind}")
    with fresh(dumps.server) as dsn:
        load_twice(dumps, source, dsn, "--disable-triggers")
        with psycopg.connect(dsn, autocommit=True) as conn:
            with restores.ticker(dsn):
                refused("55000", send, conn, "q", "too early")
            assert {found[1] for found in health(conn)} == {None, "empty", "once", "paused", "q"}
            conn.execute("grant select on pgque.event to public")
            rights = "select h.status from pgque.health() as h where h.check_name = 'rights'"
            assert value(conn, rights) == "ok"  # a dump grants and revokes at its end
            assert value(conn, "select pgque.confirm_restore()") == 4
            assert value(conn, rights) == "warn"
            conn.execute("revoke select on pgque.event from public")
            assert health(conn) == []
            test_restore.check(conn, dumps.alone[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [[], ["-j4"]])
def test_data_that_is_loaded_into_a_complete_schema_is_used_when_its_last_table_is_there(
    dumps: Dumps, kind: str, options: list[str]
) -> None:
    """pg_restore --schema-only fills the view. So only the data and the sessions show that more is to come."""
    with fresh(dumps.server) as dsn:
        pg_restore(dumps, dsn, "--schema-only", dumps.folder / f"alone_{kind}")
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert value(conn, "select complete from pgque.restore_complete")
        with restores.ticker(dsn):
            pg_restore(dumps, dsn, "--data-only", *options, dumps.folder / f"alone_{kind}")
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert health(conn) == []
            test_restore.check(conn, dumps.alone[kind])


def test_a_queue_without_consumers_is_used_at_once_after_a_restore(dumps: Dumps) -> None:
    """Consumers that were unsubscribed leave positions: maintenance removes them, so that nobody misses the consumers."""
    new_database(dumps.server.dsn, "lonely", "extension")
    with psycopg.connect(dumps.server.dsn_for("lonely"), autocommit=True) as conn:
        value(conn, "select pgque.create_queue('q')")
        subscribe(conn, "q")
        send(conn, "q", "for nobody")
        tick(conn, "q")
        value(conn, "select pgque.unsubscribe('q', 'c')")
        for _ in range(3):
            value(conn, "select pgque.maint()")
    dump(dumps.server, dumps.folder, "lonely")
    with fresh(dumps.server) as dsn:
        restores.load("-j2", dumps.server.bindir, dumps.folder, dsn, dumps.folder / "lonely")
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert health(conn) == []
            assert send(conn, "q", "after") == 2


def test_what_is_missing_is_given_up_when_the_operator_confirms(dumps: Dumps) -> None:
    with fresh(dumps.server) as dsn:
        section(dumps, dsn, "alone_extension", "pre-data")
        load_part(dumps, dsn, "alone_extension", LAST["queues"], last=False)
        section(dumps, dsn, "alone_extension", "post-data")
        with psycopg.connect(dsn, autocommit=True) as conn:
            notices: list[str] = []
            conn.add_notice_handler(lambda d: notices.append(d.message_primary or ""))
            assert value(conn, "select pgque.confirm_restore()") == 0
            assert "queue_id" in notices[0]
            for _ in range(5):
                value(conn, "select pgque.maint()")
            assert value(conn, "select pgque.create_queue('new')") == 1
            subscribe(conn, "new")
            sent = send(conn, "new", "x")
            tick(conn, "new")
            assert drain(conn, "new") == [sent]


def test_rows_of_a_dump_are_no_changes_for_the_trigger_of_their_table(dumps: Dumps) -> None:
    """A load of data alone fires triggers."""
    new_database(dumps.server.dsn, "traced", "plain")
    with psycopg.connect(dumps.server.dsn_for("traced"), autocommit=True) as conn:
        value(conn, "select pgque.create_queue('q')")
        subscribe(conn, "q")
        for name in ("a_first", "z_last"):
            conn.execute(f"create schema {name} create table item (id int primary key)".encode())
            conn.execute(
                f"create trigger traced after insert on {name}.item"
                " for each row execute function pgque.jsontriga('q')".encode()
            )
            conn.execute(f"insert into {name}.item values (1)".encode())
    source = dumps.server.dsn_for("traced")
    with fresh(dumps.server) as dsn:
        load_twice(dumps, source, dsn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert value(conn, "select count(*) from a_first.item") == 1
            value(conn, "select pgque.confirm_restore()")
            value(conn, "select pgque.ticker()")
            assert [m.payload for m in receive(conn, "q")] == ['{"id": 1}', '{"id": 1}']
            conn.execute("insert into z_last.item values (2)")


def test_a_change_while_a_dump_is_loaded_fails_rather_than_sends_nothing(dumps: Dumps) -> None:
    """Only rows that pg_restore or a script of pg_dump loads are old: a program's change is a new message."""
    new_database(dumps.server.dsn, "changed", "plain")
    with psycopg.connect(dumps.server.dsn_for("changed"), autocommit=True) as conn:
        value(conn, "select pgque.create_queue('q')")
        subscribe(conn, "q")
        conn.execute("create table item (id int primary key)")
        conn.execute(
            "create trigger traced after insert on item for each row execute function pgque.jsontriga('q')"
        )
    entries = run(
        dumps.folder,
        dumps.server.bindir / "pg_restore",
        "-l",
        dump(dumps.server, dumps.folder, "changed"),
    ).splitlines()
    with fresh(dumps.server) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        for last in (False, True):
            chosen = [e for e in entries if ("MATERIALIZED VIEW DATA" in e) == last]
            assert chosen
            (dumps.folder / "list").write_text("\n".join(chosen) + "\n")
            pg_restore(dumps, dsn, "-L", dumps.folder / "list", dumps.folder / "changed")
            if not last:
                refused("55000", lambda c: c.execute("insert into item values (1)"), conn)
        conn.execute("insert into item values (1)")
        tick(conn, "q")
        assert [m.payload for m in receive(conn, "q")] == ['{"id": 1}']


def test_a_dump_of_the_schema_needs_the_extension_to_have_the_data(dumps: Dumps) -> None:
    """pg_dump does not warn: the tables of an extension are not in a dump of their schema."""
    for name, options in (("short", ["-n", "pgque"]), ("whole", ["-n", "pgque", "-e", "pgque"])):
        source = dumps.server.dsn_for("alone_extension")
        run(
            dumps.folder,
            dumps.server.bindir / "pg_dump",
            "-Fd",
            *options,
            "-f",
            dumps.folder / name,
            "-d",
            source,
        )
    with fresh(dumps.server) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create extension pgque")
        restores.load("-j2", dumps.server.bindir, dumps.folder, dsn, dumps.folder / "short")
        assert [found[0] for found in health(conn)] == ["restore"]
        refused("55000", value, conn, "select pgque.create_queue('q')")
    with fresh(dumps.server) as dsn:
        restores.load("-j2", dumps.server.bindir, dumps.folder, dsn, dumps.folder / "whole")
        with psycopg.connect(dsn, autocommit=True) as conn:
            test_restore.check(conn, dumps.alone["extension"])
