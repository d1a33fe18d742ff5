"""A dump restored: every consumer gets exactly what it lacked, wherever it is restored."""

from __future__ import annotations

import lzma
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from faults.clusters import folder_for, programs_of, started
from faults.clusters import run as run_in
from pgque import embedded
from sql.helpers import (
    Connection,
    ack,
    configure,
    drain,
    move_clock,
    nack,
    nack_ids,
    pump,
    receive,
    receive_coop,
    refused,
    rotate,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)
from support import servers
from support.servers import TestServer


@dataclass(frozen=True)
class Left:
    """What each consumer of queue q still lacks, and its dead letters."""

    lacking: dict[str, list[int]]
    dead: list[int]


@dataclass(frozen=True)
class Dump(Left):
    """A plain SQL dump."""

    path: Path
    xid: int
    psql: str


def program(name: str, server: TestServer) -> str:
    """Find a client program that fits the server, or skip."""
    if server.process is not None and (server.process.bindir / name).is_file():
        return str(server.process.bindir / name)
    found = shutil.which(name)
    if found is not None:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        if int(said.split(")")[1].strip().split(".")[0]) >= int(server.version.split(".")[0]):
            return found
    pytest.skip(f"no {name} for PostgreSQL {server.version}")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def send_once(conn: Connection) -> tuple[bool, str, int]:
    """Send to queue once by a key, in an epoch and in a part of one; tell what was said to that."""
    (attempt, stage) = rows(conn, "select attempt, stage from pgque.sink_begin('whole', 7)")[0]
    conn.execute(
        f"insert into {stage} (attempt, n, queue, payload) values (%s, 0, 'once', 'x')".encode(), [attempt]
    )
    part = conn.execute(
        "insert into pgque.sink (queue, payload, sink_id, epoch, part, parts) values ('once', 'x', 'cut', 3, 0, 2)"
    )
    return (
        value(conn, "select s.deduped from pgque.send_idem('once', 't', 'x'::text, 'key', '1 day') as s"),
        value(conn, "select pgque.sink_commit('whole', 7, array[%s::uuid], 1)", attempt),
        part.rowcount,
    )


def fill(conn: Connection, dsn: str) -> Left:
    """Leave consumers of queue q in every state, and two queues without; return what each lacks."""
    for other in ("empty", "paused"):
        value(conn, "select pgque.create_queue(%s)", other)
        subscribe(conn, other, "c")
    recurring = "select pgque.create_recurring('hourly', 'empty', '0 * * * *', 't', 'x', catch_up => 'all')"
    value(conn, recurring)
    send(conn, "paused", "before the dump")
    value(conn, "select pgque.pause('paused')")
    value(conn, "select pgque.create_queue('once')")
    subscribe(conn, "once", "c")
    assert send_once(conn) == (False, "applied", 1)
    value(conn, "select pgque.create_queue('q')")
    for name in ("done", "fresh", "sliced", "open", "retried", "waiting", "buried"):
        subscribe(conn, "q", name)
    for worker in ("a", "b"):
        value(conn, "select pgque.register_subconsumer('q', 'group', %s)", worker)
    first = send_many(conn, "q", 10)
    tick(conn, "q")
    late: Connection = psycopg.connect(dsn)
    late_id = send(late, "q", "late")
    second = send_many(conn, "q", 10)
    tick(conn, "q")
    lacking: dict[str, list[int]] = {}

    assert drain(conn, "q", "done") == first + second
    lacking["done"] = []
    lacking["fresh"] = first + second

    for size in (3, 4):
        ack(conn, receive(conn, "q", "sliced", size)[0].batch_id)
    lacking["sliced"] = first[7:] + second

    ack(conn, receive(conn, "q", "open", 2)[0].batch_id)
    receive(conn, "q", "open", 5)
    lacking["open"] = first[2:] + second

    # Two messages of an open batch were nacked; one is back in the log, one waits for an hour.
    batch = receive(conn, "q", "retried", 6)
    nack(conn, batch[1])
    pump(conn)
    nack(conn, batch[4], "1 hour")
    lacking["retried"] = first + second

    batch = receive(conn, "q", "waiting", 10)
    nack_ids(conn, batch[0].batch_id, first[:3], "1 hour")
    ack(conn, batch[0].batch_id)
    lacking["waiting"] = first[:3] + second

    configure(conn, "q", max_retries=0)
    batch = receive(conn, "q", "buried", 10)
    nack_ids(conn, batch[0].batch_id, first[:2], reason="broken")
    ack(conn, batch[0].batch_id)
    configure(conn, "q", max_retries=5)
    lacking["buried"] = second

    held = receive_coop(conn, "q", "a", 3, consumer="group")
    nack(conn, held[0], "1 hour")
    ack(conn, receive_coop(conn, "q", "b", 4, consumer="group")[0].batch_id)
    lacking["group"] = first[:3] + first[7:] + second

    late.commit()
    late.close()
    tick(conn, "q")
    unticked = send_many(conn, "q", 3)
    for name in lacking:
        lacking[name] = sorted([*lacking[name], late_id, *unticked])
    return Left(lacking, first[:2])


@pytest.fixture(scope="module")
def dump(server: TestServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dump]:
    """A dump of a busy database on a server that has used up many transaction ids."""
    pg_dump, psql = program("pg_dump", server), program("psql", server)
    name = "pgque_dumped"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(f"drop database if exists {name} with (force)".encode())
        admin.execute(f"create database {name} template template0".encode())
    dsn = server.dsn_for(name)
    try:
        with psycopg.connect(dsn, autocommit=True) as conn:
            with conn.transaction():
                conn.execute(servers.SQL_FILE.read_bytes())
            conn.execute(
                "do $$ begin for n in 1..100000 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
            left = fill(conn, dsn)
            xid = int(value(conn, "select pg_current_xact_id()::text"))
        path = tmp_path_factory.mktemp("dump") / "dump.sql"
        run(pg_dump, "-d", dsn, "-f", str(path))
        yield Dump(left.lacking, left.dead, path, xid, psql)
    finally:
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(f"drop database if exists {name} with (force)".encode())


def restore(dump: Dump, dsn: str) -> None:
    run(dump.psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", str(dump.path))


def everything(conn: Connection, queue: str, consumer: str, size: int = 7) -> list[int]:
    """Deliver until nothing is left, retries included."""
    got: list[int] = []
    for _ in range(4):
        pump(conn)
        tick(conn, queue)
        if consumer == "group":
            for worker in ("a", "b"):
                while batch := receive_coop(conn, queue, worker, size, consumer="group"):
                    got += [m.msg_id for m in batch]
                    ack(conn, batch[0].batch_id)
        else:
            got += drain(conn, queue, consumer, size)
    return got


def check(conn: Connection, dump: Left) -> None:
    """Every consumer gets what it lacked, once; sends, ticks, rotation and the rest go on."""
    move_clock(conn, "2 hours")
    got = {name: sorted(everything(conn, "q", name)) for name in dump.lacking}
    assert got == dump.lacking
    assert sorted(r[0] for r in rows(conn, "select ev_id from pgque.dlq_inspect('q')")) == dump.dead
    for (dl_id,) in rows(conn, "select dl_id from pgque.dlq_inspect('q')"):
        value(conn, "select pgque.dlq_requeue(%s)", dl_id)
    assert everything(conn, "q", "buried") == dump.dead
    assert everything(conn, "q", "fresh") == []
    value(conn, "select pgque.unsubscribe('q', 'newcomer')")
    for _ in range(5):
        sent = send_many(conn, "q", 4)
        assert tick(conn, "q") is not None
        for name in dump.lacking:
            assert everything(conn, "q", name, 3) == sent
        assert rotate(conn, "q", patient=True) == 1
    assert send_once(conn)[:2] == (True, "duplicate")
    value(conn, "select pgque.ticker()")
    assert len(everything(conn, "once", "c")) == 3
    value(conn, "select pgque.resume('paused')")
    send(conn, "paused", "after")
    send(conn, "empty", "after")
    value(conn, "select pgque.ticker()")
    assert len(everything(conn, "paused", "c")) == 2
    assert len(everything(conn, "empty", "c")) == 1
    value(conn, "select pgque.maint()")
    assert {r[0] for r in rows(conn, "select status from pgque.health() where queue is not null")} == {"ok"}


def check_recurring(conn: Connection) -> None:
    """What was missed since the dump is not caught up, and the schedule goes on."""
    move_clock(conn, "1 day")
    assert value(conn, "select pgque.maint_recurring()") == 0
    due = "select l.status, l.next_run > pgque.clock() from pgque.list_recurring() l"
    assert rows(conn, due) == [("active", True)]
    move_clock(conn, "1 day 1 hour")
    assert value(conn, "select pgque.maint_recurring()") == 1
    value(conn, "select pgque.ticker()")
    assert [message.payload for message in receive(conn, "empty")] == ["x"]


FIRST_CALLS: dict[str, Callable[[Connection], object]] = {
    "ticker": lambda c: value(c, "select pgque.ticker()"),
    "ticker of the queue": lambda c: (value(c, "select pgque.force_next_tick('q')"), tick(c, "q")),
    "loop": lambda c: c.execute("call pgque.ticker_loop('200 milliseconds')"),
    "receive": lambda c: receive(c, "q", "open"),
    "set_queue_config": lambda c: configure(c, "q", rotation_period="3 hours"),
    "pause and resume": lambda c: (value(c, "select pgque.pause('q')"), value(c, "select pgque.resume('q')")),
    "maint": lambda c: value(c, "select pgque.maint()"),
    "rotate": lambda c: rotate(c, "q"),
    "subscribe": lambda c: value(c, "select pgque.subscribe('q', 'newcomer')"),
    "install": lambda c: c.execute(servers.SQL_FILE.read_bytes()),
    "health": lambda c: rows(c, "select * from pgque.health()"),
    "retention": lambda c: value(c, "select pgque.maint_retain('q')"),
}


@pytest.fixture(scope="module")
def young(server: TestServer) -> Iterator[embedded.Server]:
    """A second cluster, whose transaction ids are far below those in the dump."""
    bindir = server.process.binaries.bindir if server.process else None
    try:
        other = embedded.start(bindir, settings=dict(servers.TEST_SETTINGS))
    except embedded.EmbeddedServerError as error:
        pytest.skip(f"no second server: {error}")
    with other:
        with psycopg.connect(other.dsn, autocommit=True) as admin:
            for role in ("reader", "writer", "admin", "user"):
                admin.execute(f"create role pgque_{role}".encode())
        yield other


@pytest.fixture(params=["same cluster", "young cluster"])
def restored(
    request: pytest.FixtureRequest, dump: Dump, server: TestServer, connect: Callable[..., Connection]
) -> Iterator[Connection]:
    """A connection to the restored database, beside the original or in the young cluster."""
    if request.param == "same cluster":
        base, dsn_for = server.dsn, server.dsn_for
    else:
        other = request.getfixturevalue("young")
        base, dsn_for = other.dsn, other.dsn_for
    name = f"pgque_restored_{secrets.token_hex(4)}"
    with psycopg.connect(base, autocommit=True) as admin:
        admin.execute(f"create database {name} template template0".encode())
        try:
            restore(dump, dsn_for(name))
            with psycopg.connect(dsn_for(name), autocommit=True) as conn:
                if request.param == "young cluster":
                    assert int(value(conn, "select pg_current_xact_id()::text")) < dump.xid - 10_000
                yield conn
        finally:
            admin.execute(f"drop database {name} with (force)".encode())


def test_health_reports_that_a_queue_was_restored(dump: Dump, restored: Connection) -> None:
    found = rows(
        restored, "select queue, advice from pgque.health() where status = 'warn' and check_name = 'tables'"
    )
    assert {f[0] for f in found} == {"q", "empty", "paused", "once"}
    assert all(f[1] for f in found)


@pytest.mark.parametrize("first", FIRST_CALLS)
def test_every_consumer_receives_unfinished_messages_whatever_is_called_first(
    dump: Dump, restored: Connection, first: str
) -> None:
    FIRST_CALLS[first](restored)
    check(restored, dump)


def test_runs_of_recurring_messages_since_the_dump_are_not_caught_up(
    dump: Dump, restored: Connection
) -> None:
    check_recurring(restored)


def test_a_send_is_the_first_call_after_a_restore(dump: Dump, restored: Connection) -> None:
    new = send(restored, "q", "new")
    assert new > max(dump.lacking["fresh"])
    move_clock(restored, "2 hours")
    for name, lacking in dump.lacking.items():
        assert sorted(everything(restored, "q", name)) == [*lacking, new]


def test_a_tick_id_from_after_the_dump_is_refused(dump: Dump, restored: Connection) -> None:
    last = value(restored, "select pgque.tick_for('q', 'latest')")
    for _ in range(5):
        send(restored, "q", "new")
        tick(restored, "q")
    for seen in (last + 1, last + 3):
        refused("PQ015", value, restored, "select pgque.next_tick('q', %s)", seen)


def test_an_ack_and_a_nack_of_a_batch_from_before_the_dump_count(dump: Dump, restored: Connection) -> None:
    conn = restored
    batch = receive(conn, "q", "open")
    nack(conn, batch[0])
    assert ack(conn, batch[0].batch_id) == 1
    done = {m.msg_id for m in batch[1:]}
    move_clock(conn, "2 hours")
    got = sorted(everything(conn, "q", "open"))
    assert got == [i for i in dump.lacking["open"] if i not in done]


def test_a_restored_queue_that_was_used_is_dumped_and_restored_again(
    dump: Dump, server: TestServer, fresh_dsn: str, connect: Callable[..., Connection], tmp_path: Path
) -> None:
    restore(dump, fresh_dsn)
    conn = connect(fresh_dsn)
    value(conn, "select pgque.ticker()")
    pump(conn)
    tick(conn, "q")
    finished = receive(conn, "q", "done", 2)
    assert ack(conn, finished[0].batch_id) == 1
    conn.close()
    again = tmp_path / "again.sql"
    run(program("pg_dump", server), "-d", fresh_dsn, "-f", str(again))
    name = conninfo_to_dict(fresh_dsn)["dbname"]
    second = f"{name}_2"
    admin = connect(server.dsn)
    admin.execute(f"create database {second} template template0".encode())
    try:
        restore(Dump({}, [], again, 0, dump.psql), server.dsn_for(second))
        with psycopg.connect(server.dsn_for(second), autocommit=True) as last:
            value(last, "select pgque.ticker()")
            move_clock(last, "2 hours")
            for consumer, expected in dump.lacking.items():
                done = [m.msg_id for m in finished] if consumer == "done" else []
                assert sorted([*done, *everything(last, "q", consumer)]) == expected
    finally:
        admin.execute(f"drop database {second} with (force)".encode())


def test_a_pending_key_of_several_streams_and_consumers_is_delivered_to_each_after_a_restore(
    dump: Dump,
    server: TestServer,
    fresh_dsn: str,
    own_dsn: str,
    connect: Callable[..., Connection],
    tmp_path: Path,
) -> None:
    """The message waits for each of them in the retry queue, and enters the log for each."""
    old = connect(own_dsn)
    value(old, "select pgque.create_queue('q')")
    for name in ("s1", "s2"):
        value(old, "select pgque.open_stream('q', %s, 'earliest')", name)
    for name in ("c1", "c2"):
        subscribe(old, "q", name)
    sent = [
        value(old, "select pgque.send('q', 't', %s::text, key => %s, delay => %s::interval)", *options)
        for options in (("plain", None, None), ("body", "K", None), ("later", None, "1 second"))
    ]
    gone = value(old, "select pgque.send('q', 'cancelled'::text)")
    assert value(old, "select pgque.cancel('q', %s)", gone) == "pending"
    tick(old, "q")
    path = tmp_path / "streams.sql"
    run(program("pg_dump", server), "-d", own_dsn, "-f", str(path))
    restore(Dump({}, [], path, 0, dump.psql), fresh_dsn)
    conn = connect(fresh_dsn)
    notices: list[str | None] = []
    conn.add_notice_handler(lambda d: notices.append(d.message_primary))
    move_clock(conn, "1 hour")
    for _ in range(3):
        value(conn, "select pgque.maint()")
        tick(conn, "q")
    assert notices == []
    for name in ("s1", "s2"):
        read = rows(
            conn,
            "select w.ev_id from (select pgque.open_stream('q', %s) as t) as o,"
            " lateral pgque.read_window('q', o.t, pgque.tick_for('q', 'latest'), %s) as w",
            name,
            name,
        )
        assert sorted(r[0] for r in read) == sent
    for name in ("c1", "c2"):
        assert sorted(everything(conn, "q", name)) == sent
    assert value(conn, "select count(*) from pgque.retry_queue") == 0


def earlier(version: str) -> bytes:
    return lzma.decompress(
        (Path(__file__).parents[1] / "sql" / "previous" / f"pgque-{version}.sql.xz").read_bytes()
    )


def next_xid(conn: Connection) -> int:
    return int(value(conn, "select pg_snapshot_xmax(pg_current_snapshot())::text"))


def burn(conn: Connection, upto: int) -> None:
    """Use up transaction ids, so that the next one is this."""
    value(conn, "select set_config('test.upto', %s, false)", str(upto))
    conn.execute(
        "do $$ begin while pg_snapshot_xmax(pg_current_snapshot())::text::bigint < current_setting('test.upto')::bigint"
        " loop perform pg_current_xact_id(); commit; end loop; end $$"
    )
    assert next_xid(conn) == upto


@pytest.mark.parametrize(("version", "first"), [("this", "send"), ("0.7.0", "ticker")])
def test_a_queue_is_restored_as_the_transaction_that_wrote_it_elsewhere(
    server: TestServer, young: embedded.Server, tmp_path: Path, version: str, first: str
) -> None:
    """Clusters that are set up by the same script use the same ids."""
    old, new = (f"pgque_twin_{secrets.token_hex(4)}" for _ in range(2))
    dump = tmp_path / "dump.sql"
    try:
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(f"create database {old} template template0".encode())
        with psycopg.connect(young.dsn, autocommit=True) as admin:
            admin.execute(f"create database {new} template template0".encode())
        with psycopg.connect(server.dsn_for(old), autocommit=True) as conn:
            conn.execute(servers.SQL_FILE.read_bytes() if version == "this" else earlier(version))
            value(conn, "select pgque.create_queue('q')")
            subscribe(conn, "q", "fresh")
            subscribe(conn, "q", "done")
            with psycopg.connect(young.dsn, autocommit=True) as other:
                xid = max(next_xid(conn), next_xid(other) + 5_000)
            burn(conn, xid)
            configure(conn, "q", max_retries=7)
            sent = send_many(conn, "q", 3)
            tick(conn, "q")
            burn(conn, xid + 10_000)
            sent += send_many(conn, "q", 3)
            tick(conn, "q")
            assert drain(conn, "q", "done") == sent
        run(program("pg_dump", server), "-d", server.dsn_for(old), "-f", str(dump))
        script = re.sub(r"^\\(un)?restrict .*\n", "", dump.read_text(), flags=re.MULTILINE)
        before, rest = script.split("COPY pgque.queue (", 1)
        settings = "\n".join(re.findall(r"^(?:SET |SELECT pg_catalog.set_config).*", before, re.MULTILINE))
        for part in (before, f"{settings}\nCOPY pgque.queue ({rest}"):
            dump.write_text(part)
            if part is not before:
                with psycopg.connect(young.dsn, autocommit=True) as conn:
                    burn(conn, xid)
            run(
                *(program("psql", server), "-X", "-q", "-v", "ON_ERROR_STOP=1"),
                *("-d", young.dsn_for(new), "-f", str(dump)),
            )
        with psycopg.connect(young.dsn_for(new), autocommit=True) as conn:
            assert value(conn, "select q.xmin::text from pgque.queue q") == str(xid)
            conn.execute(servers.SQL_FILE.read_bytes())
            if first == "ticker":
                value(conn, "select pgque.ticker()")
            later = send_many(conn, "q", 3)
            assert sorted(everything(conn, "q", "done")) == later
            assert sorted(everything(conn, "q", "fresh")) == sent + later
    finally:
        for dsn, name in ((server.dsn, old), (young.dsn, new)):
            with psycopg.connect(dsn, autocommit=True) as admin:
                admin.execute(f"drop database if exists {name} with (force)".encode())


@pytest.mark.slow
@pytest.mark.programs
def test_a_dump_loaded_by_a_transaction_with_the_id_of_the_one_that_wrote_the_queue_is_restored(
    server: TestServer, tmp_path: Path
) -> None:
    bindir = programs_of(server, "pg_dump", "psql")
    same = 20_000
    burn = f"do $$ begin while pg_current_xact_id() < '{same - 1}' loop commit; end loop; end $$".encode()
    path = tmp_path / "dump.sql"
    assert server.process is not None
    with folder_for(server.process) as folder:
        with started(bindir, folder / "old") as old, psycopg.connect(old.dsn, autocommit=True) as conn:
            for role in ("reader", "writer", "admin", "user"):
                conn.execute(f"create role pgque_{role}".encode())
        # A copy even has the system identifier and the database number of the original.
        run_in(folder, "cp", "-a", folder / "old", folder / "new")
        with started(bindir, folder / "old") as old, psycopg.connect(old.dsn, autocommit=True) as conn:
            with conn.transaction():
                conn.execute(servers.SQL_FILE.read_bytes())
            left = fill(conn, old.dsn)
            conn.execute(burn)
            assert next_xid(conn) == same
            configure(conn, "q", max_retries=5)
            run(str(bindir / "pg_dump"), "-d", old.dsn, "-f", str(path))
        with started(bindir, folder / "new") as new, psycopg.connect(new.dsn, autocommit=True) as conn:
            conn.execute(burn)
            run(
                str(bindir / "psql"),
                "-X",
                "-q",
                "-1",
                "-v",
                "ON_ERROR_STOP=1",
                "-d",
                new.dsn,
                "-f",
                str(path),
            )
            assert (
                value(conn, "select q.xmin::text from pgque.queue as q where q.queue_name = 'q'") == f"{same}"
            )
            sent = send_many(conn, "q", 5)
            assert min(sent) > max(left.lacking["fresh"])
            check(conn, Left({name: ids + sent for name, ids in left.lacking.items()}, left.dead))
