"""pgque as an extension: its data is in a dump, and comes back like that of a plain install."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from faults import test_pool_restore, test_restore
from faults.clusters import folder_for, new_database, programs_of, run, started, with_extension
from pgque import embedded
from sql.helpers import (
    Connection,
    Message,
    ack,
    drain,
    extend,
    ids,
    nack_ids,
    offer,
    outcome,
    receive,
    receive_coop,
    rows,
    send,
    subscribe,
    take,
    tick,
    value,
    work_off,
)
from support import servers
from support.servers import TestServer

pytestmark = [pytest.mark.slow, pytest.mark.programs]


@dataclass
class Held:
    """What was sent, an id of a batch that is done, and the open batches: by next_batch(), by receive()."""

    sent: list[int]
    done: int
    whole: int
    batches: dict[str, list[Message]]


@dataclass
class Dumps:
    """Two dumps of databases with the extension, and servers that have its files."""

    old: embedded.Server
    young: embedded.Server
    folder: Path
    alone: test_restore.Left
    pool: test_pool_restore.Left
    held: Held


def fill(conn: Connection) -> Held:
    """Leave an open batch of each kind, of five messages: one is acked, one waits for a retry."""
    value(conn, "select pgque.create_queue('q')")
    for name in ("alone", "whole", "pool"):
        subscribe(conn, "q", name)
    value(conn, "select pgque.register_subconsumer('q', 'group', 'w')")
    sent = offer(conn, "q", 10)
    done = receive(conn, "q", "alone", 2)
    ack(conn, done[0].batch_id)
    whole = value(conn, "select pgque.next_batch('q', 'whole')")
    batches = {
        "alone": receive(conn, "q", "alone", 5),
        "group": receive_coop(conn, "q", "w", 5, consumer="group"),
        "pool": take(conn, "q", "w", 5, "1 hour", "pool"),
    }
    for batch in batches.values():
        outcome(conn, "ack", batch[0].batch_id, ids(batch)[:1])
        nack_ids(conn, batch[0].batch_id, ids(batch)[1:2], "1 hour")
    return Held(sent, done[0].batch_id, whole, batches)


@pytest.fixture(scope="module")
def dumps(server: TestServer) -> Iterator[Dumps]:
    bindir = programs_of(server, "pg_dump", "psql")
    with ExitStack() as stack:
        programs = stack.enter_context(with_extension(bindir))
        old = stack.enter_context(started(programs))
        young = stack.enter_context(started(programs))
        folder = stack.enter_context(folder_for(old))
        for name in ("alone", "pool", "held"):
            new_database(old.dsn, name, "extension")
        with psycopg.connect(old.dsn_for("alone"), autocommit=True) as conn:
            conn.execute(
                "do $$ begin for n in 1..20000 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
            alone = test_restore.fill(conn, old.dsn_for("alone"))
        with psycopg.connect(old.dsn_for("pool"), autocommit=True) as conn:
            pool = test_pool_restore.fill(conn)
        with psycopg.connect(old.dsn_for("held"), autocommit=True) as conn:
            held = fill(conn)
        for name in ("alone", "pool", "held"):
            run(folder, old.bindir / "pg_dump", "-d", old.dsn_for(name), "-f", folder / f"{name}.sql")
        yield Dumps(old, young, folder, alone, pool, held)


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


def test_consumers_of_an_extension_receive_unfinished_messages_after_a_restore(
    dumps: Dumps, target: embedded.Server
) -> None:
    with restored(dumps, target, "alone") as conn:
        assert value(conn, "select count(*) from pg_extension where extname = 'pgque'") == 1
        value(conn, "select pgque.ticker()")
        test_restore.check(conn, dumps.alone)


def test_recurring_messages_of_an_extension_are_restored_and_not_caught_up(
    dumps: Dumps, target: embedded.Server
) -> None:
    with restored(dumps, target, "alone") as conn:
        test_restore.check_recurring(conn)


def test_a_pool_of_an_extension_gets_what_it_lacked_after_a_restore(
    dumps: Dumps, target: embedded.Server
) -> None:
    with restored(dumps, target, "pool") as conn:
        test_pool_restore.check(conn, test_pool_restore.check_held(conn, dumps.pool))


@pytest.mark.parametrize("first", ["maint", "ack", "receive"])
def test_batches_that_were_open_are_open_after_a_restore_and_finish_once(
    dumps: Dumps, target: embedded.Server, first: str
) -> None:
    held = dumps.held
    with restored(dumps, target, "held") as conn:
        if first == "maint":
            value(conn, "select pgque.ticker()")
            value(conn, "select pgque.maint()")
        elif first == "receive":
            assert ids(receive(conn, "q", "alone")) == ids(held.batches["alone"])[2:]
            assert ids(receive_coop(conn, "q", "w", consumer="group")) == ids(held.batches["group"])[2:]
        assert ack(conn, held.done) == 0
        events = "select e.ev_id from pgque.get_batch_events(%s) as e"
        assert [i for (i,) in rows(conn, events, held.whole)] == held.sent
        assert extend(conn, held.batches["pool"][0].batch_id, "1 hour") == 3
        for batch in held.batches.values():
            token, left = batch[0].batch_id, ids(batch)[2:]
            assert nack_ids(conn, token, left[:1], "1 hour") == [(left[0], True, None)]
            assert [ack(conn, token), ack(conn, token)] == [1, 0]
        assert [ack(conn, held.whole), ack(conn, held.whole)] == [1, 0]
        more = [send(conn, "q")]
        tick(conn, "q")
        lacking = {name: held.sent[7 if name == "alone" else 5 :] + more for name in held.batches}
        assert drain(conn, "q", "alone") == lacking["alone"]
        assert drain(conn, "q", "whole") == more
        assert ids(work_off(conn, "q", "w", consumer="group")) == lacking["group"]
        assert ids(work_off(conn, "q", "w", consumer="pool")) == lacking["pool"]
        for name, batch in held.batches.items():
            value(conn, "select pgque.retry_now('q', %s)", name)
            again = (
                drain(conn, "q", name) if name == "alone" else ids(work_off(conn, "q", "w", consumer=name))
            )
            assert again == ids(batch)[1:3]


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


def test_two_first_installs_at_once_on_a_new_server_make_the_roles_once(
    server: TestServer, background: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    with started(programs_of(server, "initdb", "pg_ctl")) as fresh, ExitStack() as stack:
        admin = stack.enter_context(psycopg.connect(fresh.dsn, autocommit=True))
        found = []
        for name in ("one", "two"):
            admin.execute(f"create database {name} template template0".encode())
            dsn = psycopg.conninfo.make_conninfo(fresh.dsn, dbname=name)
            found.append(stack.enter_context(psycopg.connect(dsn)))
        first, second = found
        first.execute(servers.SQL_FILE.read_bytes())
        job = background(lambda c: c.execute(servers.SQL_FILE.read_bytes()), second)
        waits = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
        wait_until(
            lambda: value(admin, waits, job.pid), "the second install waits for the roles of the first"
        )
        first.commit()
        job.result()
        second.commit()
        assert [value(each, "select pgque.create_queue('q')") for each in found] == [1, 1]


def test_an_extension_of_before_the_oldest_that_is_updated_goes_through_0_8_0(
    server: TestServer, connect: Callable[..., Connection]
) -> None:
    """The files of 0.8.0 are installed besides those of this version, and one command runs both."""
    bindir = programs_of(server, "initdb", "pg_ctl")
    functions = "select p.oid::regprocedure::text from pg_proc p where p.pronamespace = 'pgque'::regnamespace order by 1"
    with (
        with_extension(bindir, "0.4.3", "0.8.0") as programs,
        started(programs) as main,
    ):
        new_database(main.dsn, "fresh", "extension")
        new_database(main.dsn, "updated", "extension", "0.4.3")
        conn = connect(main.dsn_for("updated"))
        held = fill(conn)
        conn.execute("alter extension pgque update")
        fresh = connect(main.dsn_for("fresh"))
        value(fresh, "select pgque.create_queue('q')")
        assert rows(conn, functions) == rows(fresh, functions)
        assert value(conn, "select e.extversion from pg_extension e where e.extname = 'pgque'") == value(
            conn, "select pgque.version()"
        )
        for batch in held.batches.values():
            assert ack(conn, batch[0].batch_id) == 1
        assert drain(conn, "q", "alone") == held.sent[7:]
        # Another update replaces the functions that are there. They are in a dump, and so are their rights.
        conn.execute(
            "do $$ begin execute replace(pg_get_functiondef('pgque._ticks_1'::regproc), 'declare', 'declare -- old'); end $$"
        )
        conn.execute(
            "create or replace function pgque.version() returns text language sql immutable as $$ select '0.8.0' $$"
        )
        conn.execute("update pg_extension set extversion = '0.8.0' where extname = 'pgque'")
        conn.execute("alter extension pgque update")
        readers = "select p.proname, pg_get_functiondef(p.oid), p.proacl::text from pgque._readers_of(1) r join pg_proc p on p.oid = r order by 1"
        assert rows(conn, readers) == rows(fresh, readers)
        with folder_for(main) as folder:
            run(folder, main.bindir / "pg_dump", "-d", main.dsn_for("updated"), "-f", folder / "updated.sql")
            new_database(main.dsn, "loaded", "none")
            run(
                folder,
                main.bindir / "psql",
                "-Xq",
                "-v",
                "ON_ERROR_STOP=1",
                "-d",
                main.dsn_for("loaded"),
                "-f",
                folder / "updated.sql",
            )
        loaded = connect(main.dsn_for("loaded"))
        assert rows(loaded, readers) == rows(conn, readers)
        value(loaded, "select pgque.drop_queue('q', true), pgque.maint()")


def test_an_update_of_the_extension_under_load_gives_no_call_an_error_and_loses_nothing(
    server: TestServer, wait_until: Callable[..., None]
) -> None:
    """Calls go on with the bodies of the version before while its functions are replaced."""
    bindir = programs_of(server, "initdb", "pg_ctl")
    previous = "0.8.0"
    with ExitStack() as stack:
        main = stack.enter_context(started(stack.enter_context(with_extension(bindir, previous))))
        new_database(main.dsn, "updated", "extension", previous)
        dsn = main.dsn_for("updated")
        conn = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        value(conn, "select pgque.create_queue('q')")
        for name in ("pool", "alone"):
            subscribe(conn, "q", name)
        done, errors = threading.Event(), []
        sent: list[int] = []
        got: dict[str, list[int]] = {"pool": [], "alone": []}

        def send_one(c: Connection) -> None:
            sent.append(send(c, "q"))

        def read(c: Connection, name: str, batch: list[Message]) -> None:
            if batch:
                ack(c, batch[0].batch_id)
                got[name] += ids(batch)

        calls: list[Callable[[Connection], object]] = [
            send_one,
            lambda c: read(c, "pool", take(c, "q", f"w{c.info.backend_pid}", 5, "1 minute", "pool")),
            lambda c: read(c, "pool", take(c, "q", f"w{c.info.backend_pid}", 5, "1 minute", "pool")),
            lambda c: read(c, "alone", receive(c, "q", "alone", 5)),
            lambda c: c.execute("call pgque.ticker_loop('300 milliseconds')"),
            lambda c: (value(c, "select pgque.maint()"), rows(c, "select * from pgque.health()")),
            lambda c: rows(c, "select * from pgque.metrics()"),
        ]

        def run_all_the_time(call: Callable[[Connection], object]) -> None:
            with psycopg.connect(dsn, autocommit=True) as c:
                while not done.is_set():
                    try:
                        call(c)
                    except psycopg.Error as error:
                        errors.append(f"{error.sqlstate}: {error}")

        threads = [threading.Thread(target=run_all_the_time, args=[call], daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        wait_until(lambda: min(len(sent), len(got["pool"]), len(got["alone"])) > 50, "everybody works", 60)
        value(conn, "alter extension pgque update")
        assert value(conn, "select pgque.version()") != previous
        before = len(sent)
        wait_until(
            lambda: len(sent) > before + 50 and set(sent[:before]) <= set(got["pool"]), "all go on", 60
        )
        done.set()
        for thread in threads:
            thread.join(30)
        assert errors == []
        tick(conn, "q")
        got["pool"] += ids(work_off(conn, "q", "w", 100, "pool"))
        got["alone"] += drain(conn, "q", "alone")
        assert {name: sorted(found) for name, found in got.items()} == {
            "pool": sorted(sent),
            "alone": sorted(sent),
        }
