"""Install, again, over itself, and uninstall."""

from __future__ import annotations

import contextlib
import lzma
import re
import shutil
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from conftest import OWNER, as_owner
from sql.helpers import (
    Connection,
    ack,
    column,
    drain,
    extend,
    forced_tick,
    ids,
    nack_ids,
    offer,
    outcome,
    receive,
    receive_coop,
    refused,
    rows,
    send,
    send_many,
    set_visibility,
    subscribe,
    take,
    tick,
    value,
)
from support import catalog, servers
from support.servers import TestServer

SOURCE = servers.SQL_FILE.read_bytes()


FLOOR = "0.7.0"  # upgrades start here
OLD = "0.4.3"  # an upgrade from before that goes through 0.8.0
THROUGH = "0.8.0"
# What an upgrade makes of schema and data is tried from every version at each landing. Everything else about upgrades
# is tried from the oldest and the newest one, and from those between in make test-long.
BETWEEN = ["0.7.1", THROUGH, "0.10.0", "0.11.0"]
NEWEST = "0.12.0"
EVERY_EARLIER = [FLOOR, *(pytest.param(version, marks=pytest.mark.slow) for version in BETWEEN), NEWEST]
EARLIER = [FLOOR, *(pytest.param(version, marks=pytest.mark.long) for version in BETWEEN), NEWEST]


def install(dsn: str) -> list[str]:
    """Install in one transaction; return what the server said."""
    notices: list[str] = []
    with as_owner(dsn) as connection:
        connection.add_notice_handler(lambda d: notices.append(f"{d.severity}: {d.message_primary}"))
        connection.execute(SOURCE)
    return notices


def schema(dsn: str) -> list[str]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return list(catalog.schema(connection))


def test_an_install_prints_nothing_and_a_second_one_changes_nothing(fresh_dsn: str) -> None:
    assert install(fresh_dsn) == []
    first = schema(fresh_dsn)
    assert install(fresh_dsn) == []
    assert schema(fresh_dsn) == first


@pytest.fixture
def psql(server: TestServer) -> str:
    """The server's own psql, or the one of the path."""
    if server.process is not None and (server.process.bindir / "psql").is_file():
        return str(server.process.bindir / "psql")
    found = shutil.which("psql")
    if found is None:
        pytest.skip("no psql")
    return found


def run_psql(psql: str, dsn: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [psql, "-X", "-q", *options, "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", str(servers.SQL_FILE)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_psql_installs_it_in_one_transaction_and_prints_nothing(psql: str, fresh_dsn: str) -> None:
    for _ in range(2):
        done = run_psql(psql, fresh_dsn, "-1")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("options", [["-1"], []])
def test_an_upgrade_removes_what_an_earlier_version_had_with_other_arguments(
    psql: str, fresh_dsn: str, options: list[str]
) -> None:
    install(fresh_dsn)
    first = schema(fresh_dsn)
    old = (
        "create function pgque.receive(text, text, int) returns int language sql as 'select 1'",
        "create function pgque._ticks_sql(text) returns int language sql as 'select 1'",
    )
    with as_owner(fresh_dsn) as connection:
        for function in old:
            connection.execute(function.encode())
    owner = psycopg.conninfo.make_conninfo(fresh_dsn, options=f"-c role={OWNER}" if OWNER else "")
    done = run_psql(psql, owner, *options)
    assert (done.returncode, done.stdout) == (0, "")
    assert [line for line in done.stderr.splitlines() if "already exists, skipping" not in line] == []
    assert schema(fresh_dsn) == first


def test_an_upgrade_statement_by_statement_is_refused_and_changes_nothing(
    psql: str, own: Connection, own_dsn: str
) -> None:
    """Between two statements, calls would find no outcomes of batches, and deliver them again. psql without options
    goes on after an error, so that the session ends."""
    current = value(own, "select pgque.version()")
    own.execute(
        "create or replace function pgque.version() returns text language sql immutable as $$ select '0.8.0'::text $$"
    )
    before = schema(own_dsn)
    owner = psycopg.conninfo.make_conninfo(own_dsn, options=f"-c role={OWNER}" if OWNER else "")
    refused = subprocess.run(
        [psql, "-X", "-d", owner, "-f", str(servers.SQL_FILE)], capture_output=True, text=True, check=False
    )
    assert refused.returncode != 0
    assert "needs one transaction" in refused.stderr and "option -1" in refused.stderr
    assert schema(own_dsn) == before
    assert run_psql(psql, owner, "-1").returncode == 0
    assert value(own, "select pgque.version()") == current


def test_an_install_that_is_rolled_back_leaves_nothing(fresh_dsn: str) -> None:
    with psycopg.connect(fresh_dsn) as connection:
        connection.execute(SOURCE)
        connection.rollback()
        assert value(connection, "select to_regnamespace('pgque')") is None


def test_an_ordinary_role_that_may_create_in_the_database_installs_it(
    fresh_dsn: str, roles: Any, server: TestServer
) -> None:
    dbname = psycopg.conninfo.conninfo_to_dict(fresh_dsn)["dbname"]
    owner = roles(dbname=dbname)
    with psycopg.connect(fresh_dsn, autocommit=True) as connection:
        connection.execute(f"grant create on database {dbname} to {owner.name}".encode())
    install(owner.dsn)
    with psycopg.connect(owner.dsn, autocommit=True) as connection:
        value(connection, "select pgque.create_queue('q')")
        subscribe(connection, "q")
        sent = send(connection, "q")
        tick(connection, "q")
        assert drain(connection, "q") == [sent]
        value(connection, "select pgque.maint()")
        connection.execute("call pgque.ticker_loop('100 milliseconds')")
    install(owner.dsn)
    with psycopg.connect(owner.dsn, autocommit=True) as connection:
        value(connection, "select pgque.uninstall()")
        assert value(connection, "select to_regnamespace('pgque')") is None


def test_an_owner_that_is_no_superuser_commits_sinks_of_others_and_health_names_what_it_cannot_see(
    fresh_dsn: str, roles: Any, connect: Callable[..., Connection]
) -> None:
    dbname = psycopg.conninfo.conninfo_to_dict(fresh_dsn)["dbname"]
    owner, user = roles(dbname=dbname), roles("writer", "admin", dbname=dbname)
    admin = connect(fresh_dsn)
    admin.execute(f"grant create on database {dbname} to {owner.name}".encode())
    install(owner.dsn)
    other = connect(user.dsn, autocommit=False)
    attempt, _ = rows(other, "select * from pgque.sink_begin('s', 0)")[0]
    assert value(other, "select pgque.sink_commit('s', 0, array[%s]::uuid[], 0)", attempt) == "applied"
    looker = connect(user.dsn)
    health = "select h.detail, h.advice from pgque.health() h where h.check_name = 'open transactions'"
    (hidden,) = rows(looker, health)
    assert hidden == (
        f"other transactions write, and their age is hidden from {owner.name}",
        f"To see their age: grant pg_read_all_stats to {owner.name}.",
    )
    admin.execute(f"grant pg_read_all_stats to {owner.name}".encode())
    (seen,) = rows(looker, health)
    assert seen[0].startswith(f"oldest writing transaction: pid {other.info.backend_pid} (role ")
    assert seen[1] is None
    other.rollback()
    assert rows(looker, health) == [("none", None)]
    value(connect(owner.dsn), "select pgque.uninstall()")


def earlier(version: str) -> str:
    """Return the SQL of a released version, kept beside the tests."""
    return lzma.decompress(
        (Path(__file__).parent / "previous" / f"pgque-{version}.sql.xz").read_bytes()
    ).decode()


def install_earlier(dsn: str, version: str) -> None:
    """Install a released version."""
    with as_owner(dsn) as connection:
        connection.execute(earlier(version).encode())
        assert value(connection, "select pgque.version()") == version


def upgrade(dsn: str, version: str | None) -> None:
    """Install over a version, and over one from before the floor as its hint says."""
    if version == OLD:
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            install(dsn)
        install_earlier(dsn, THROUGH)
    install(dsn)


@pytest.mark.parametrize("version", [OLD, *EVERY_EARLIER])
def test_an_upgraded_schema_is_the_one_of_a_fresh_install(
    version: str, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    install_earlier(fresh_dsn, version)
    own = connect(fresh_dsn)
    value(own, "select pgque.create_queue('q')")
    upgrade(fresh_dsn, version)
    own.execute("set role pgque_writer")
    own.execute("insert into pgque.sink_bulk (queue, payload) values ('q', 'x')")
    own.execute("reset role")
    value(own, "select pgque.drop_queue('q')")
    after_a_queue = "select pgque.create_queue('r'), pgque.drop_queue('r'), pgque.maint_tables()"
    own.execute(after_a_queue)
    upgraded = schema(fresh_dsn)
    value(own, "select pgque.uninstall()")
    install(fresh_dsn)
    own.execute(after_a_queue)
    assert upgraded == schema(fresh_dsn)


@pytest.mark.parametrize("version", EARLIER)
def test_an_upgrade_keeps_every_function_that_a_running_call_of_an_earlier_version_may_need(
    version: str, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    """A call that began before the upgrade goes on with its old body: 42883 if a function is missing that it calls next.

    A function may get further arguments that have a default. If others change, earlier.sql needs a function with
    the old ones. (The argument caller is always last, and no body of these versions passes it on by place.) What
    earlier.sql of that version has is for calls of versions before it.
    """
    before, rest = re.split("-- -+\n-- earlier:", earlier(version))
    own = connect(fresh_dsn)
    with as_owner(fresh_dsn) as connection:
        connection.execute((before + rest[re.search("-- -+\n-- grants\n", rest).start() :]).encode())  # type: ignore[union-attr]
    own.execute(
        "create table public.before as select p.oid::regprocedure::text as signature, p.proname, p.prorettype,"
        " array(select t from unnest(p.proargtypes) with ordinality as a (t, n) where t <> 'pgque.caller'::regtype order by n)"
        " as arguments from pg_proc as p where p.pronamespace = 'pgque'::regnamespace"
    )
    install(fresh_dsn)
    missing = column(
        own,
        "select b.signature from public.before as b where not exists (select from pg_proc as p"
        " where p.pronamespace = 'pgque'::regnamespace and p.proname = b.proname and p.prorettype = b.prorettype"
        " and (p.proargtypes::oid[])[0:cardinality(b.arguments) - 1] = b.arguments"
        " and p.pronargs - cardinality(b.arguments) <= p.pronargdefaults)",
    )
    # The result of the first became a record in 0.8.0: only next_batch() calls it, and has found it before it can
    # wait. That of the second became a number in 0.11.0: no function calls it.
    changed = (
        "pgque.next_batch_custom(text,text,text,interval,integer,interval,interval,pgque.caller)",
        "pgque.read_window_cursor(",
    )
    assert [signature for signature in missing if not signature.startswith(changed)] == []


def test_the_archive_of_before_an_upgrade_is_read_on_demand(
    fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    """Nobody knows if archive_on_ack was on all the time. What is there is told from what is in the queue."""
    install_earlier(fresh_dsn, OLD)
    own = connect(fresh_dsn)
    value(own, "select pgque.create_queue('q', '{\"archive_on_ack\": true}')")
    subscribe(own, "q")
    sent = [send(own, "q") for _ in range(4)]
    forced_tick(own, "q")
    batch = receive(own, "q", count=2)
    value(own, "select pgque.ack(%s)", batch[0].batch_id)
    batch = receive(own, "q")
    rows(own, "select * from pgque.ack(%s, %s)", batch[0].batch_id, sent[2:3])
    upgrade(fresh_dsn, OLD)
    archive = "select pgque.subscribe_archive('q', %s, %s, %s)"
    refused("PQ005", value, own, archive, "s", "c", False)
    assert value(own, archive, "s", "c", True) == 1
    subscribe(own, "q", "young")
    assert value(own, archive, "s2", "young", False) == 1
    rows(own, "select * from pgque.dead(%s, %s)", batch[0].batch_id, sent[3:])
    start = value(own, "select pgque.open_stream('q', 's')")
    found = [row[0] for row in rows(own, "select * from pgque.archive_read('q', 's', %s, 0, null)", start)]
    window = "select * from pgque.read_window('q', %s, pgque.tick_for('q', 'latest'))"
    assert found + [row[0] for row in rows(own, window, start)] == sent
    value(own, "select pgque.uninstall()")


@pytest.mark.parametrize("version", [None, OLD, *EVERY_EARLIER])
def test_installing_over_data_keeps_queues_batches_retries_and_dead_letters(
    version: str | None, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    own_dsn = fresh_dsn
    if version is None:
        install(own_dsn)
    else:
        install_earlier(own_dsn, version)
    own = connect(own_dsn)
    value(own, "select pgque.create_queue('q', '{\"max_retries\": 1}'::jsonb)")
    for name in ("c", "d"):
        subscribe(own, "q", name)
    value(own, "select pgque.register_subconsumer('q', 'group', 'w')")
    sent = send_many(own, "q", 6)
    tick(own, "q")
    batch = receive(own, "q", count=4)
    nack_ids(own, batch[0].batch_id, sent[:1], "1 hour")
    done = receive(own, "q", "d", 2)
    ack(own, done[0].batch_id)
    held = rows(own, "select msg_id, batch_id from pgque.receive_coop('q', 'group', 'w', 3)")
    upgrade(own_dsn, version)
    assert [m.msg_id for m in receive(own, "q")] == sent[1:4]
    assert receive(own, "q")[0].batch_id == batch[0].batch_id
    assert ack(own, batch[0].batch_id) == 1
    assert drain(own, "q") == sent[4:]
    assert drain(own, "q", "d") == sent[2:]
    assert rows(own, "select msg_id, batch_id from pgque.receive_coop('q', 'group', 'w', 3)") == held
    assert (
        value(own, "select param_value from pgque.queue_config('q') where param_name = 'max_retries'") == "1"
    )
    value(own, "select pgque.retry_now('q', 'c')")
    assert drain(own, "q") == sent[:1]


@pytest.mark.parametrize("version", [OLD, *EARLIER])
def test_a_batch_finished_before_an_upgrade_is_not_open_after_it(
    version: str, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    install_earlier(fresh_dsn, version)
    own = connect(fresh_dsn)
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    value(own, "select pgque.register_subconsumer('q', 'group', 'w')")
    send_many(own, "q", 6)
    tick(own, "q")
    done = [receive(own, "q", count=2), receive_coop(own, "q", "w", 2, consumer="group")]
    assert [ack(own, batch[0].batch_id) for batch in done] == [1, 1]
    held = [receive(own, "q", count=2), receive_coop(own, "q", "w", 2, consumer="group")]
    upgrade(fresh_dsn, version)
    for batch in done:
        assert ack(own, batch[0].batch_id) == 0
        assert [ok for _, ok, _ in nack_ids(own, batch[0].batch_id, ids(batch))] == [False, False]
        refused("PQ012", rows, own, "select * from pgque.get_batch_events(%s)", batch[0].batch_id)
    assert [ack(own, batch[0].batch_id) for batch in held] == [1, 1]
    assert [ack(own, batch[0].batch_id) for batch in held] == [0, 0]


@pytest.mark.parametrize("version", EVERY_EARLIER)
def test_what_became_of_batches_before_and_during_an_upgrade_counts_after_it(
    version: str,
    fresh_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    """Rows of both leaves are converted. Calls that waited for the upgrade go on with their old bodies."""
    install_earlier(fresh_dsn, version)
    own, other = connect(fresh_dsn), connect(fresh_dsn, autocommit=False)
    value(own, "select pgque.create_queue('q')")
    for name in ("c", "alone", "shared"):
        subscribe(own, "q", name)
    offer(own, "q", 20)
    shared = take(own, "q", "w", 2, consumer="shared")
    part, longer, moved, shelved, closed, lost = (take(own, "q", f"w{n}", 3, "2 hours") for n in range(6))
    alone = receive(own, "q", "alone", 3)
    outcome(own, "ack", part[0].batch_id, ids(part)[:1])
    for _ in range(2):
        extend(own, longer[0].batch_id, "1 hour")
    for batch in (moved, shelved, lost):
        set_visibility(own, batch[0].batch_id, "3 hours")
    own.execute("update pgque.journal set journal_cur = 1 - journal_cur")
    ack(own, closed[0].batch_id)
    for batch in (moved, alone):
        nack_ids(own, batch[0].batch_id, ids(batch)[:1], "1 day")
    other.execute("select from pgque.retry_queue where ev_id = %s for update", [ids(lost)[0]])
    assert outcome(own, "ack", lost[0].batch_id, ids(lost)[:1]) == {ids(lost)[0]: "lost to another worker"}
    other.rollback()
    leases = "select worker, batches, messages, lease_until from pgque.list_workers('q', 'c')"
    before = rows(own, leases)
    own.execute("alter function pgque._compact_journal() set lock_timeout = '1min'")
    with as_owner(fresh_dsn) as upgrade:
        upgrade.execute(SOURCE)
        jobs = [
            background(call, connect(fresh_dsn))
            for call in (
                lambda c: extend(c, longer[0].batch_id, "1 hour"),
                lambda c: outcome(c, "ack", moved[0].batch_id, ids(moved)[1:2]),
                lambda c: outcome(c, "ack", part[0].batch_id, ids(part)[:2]),
                lambda c: value(c, "select pgque._compact_journal()"),
                lambda c: value(c, "select pgque.unshare_consumer('q', 'shared')"),
            )
        ]
        for job in jobs:
            wait_for_lock(job.pid)
        assert rows(upgrade, leases) == before
    results = [job.result() for job in jobs]
    # Bodies from before 0.10.0 do not know the journal of today. Those since then do, and compact it unless another
    # of the calls has it.
    compacted = results[3]
    assert compacted == 0 or version not in (FLOOR, "0.7.1", THROUGH)
    assert results == [
        3,
        {ids(moved)[1]: None},
        {ids(part)[0]: "settled already", ids(part)[1]: None},
        compacted,
        1,
    ]
    assert ack(own, shared[0].batch_id) == 0
    later = "select lease_until from pgque.list_workers('q', 'c') where worker = 'w1'"
    assert value(own, later) - before[1][3] == timedelta(hours=1)
    assert value(own, "select pgque._compact_journal()") == 1 - compacted
    assert [m.msg_id for m in receive(own, "q", "alone")] == ids(alone)[1:]
    assert outcome(own, "ack", moved[0].batch_id, ids(moved)[:1]) == {ids(moved)[0]: "settled already"}
    tried = [part, longer, moved, shelved, closed, lost, alone]
    assert [ack(own, batch[0].batch_id) for batch in tried] == [1, 1, 1, 1, 0, 0, 1]
    assert [ack(own, batch[0].batch_id) for batch in tried] == [0] * len(tried)


@pytest.mark.parametrize("version", EARLIER)
def test_keyed_order_is_kept_and_key_concurrency_counts_what_an_earlier_version_delivered(
    version: str, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    install_earlier(fresh_dsn, version)
    own = connect(fresh_dsn)
    value(own, "select pgque.create_queue('q'), pgque.subscribe('q', 'c', keyed_order => true)")
    subscribe(own, "q", "pool")
    own.execute("create view public.workers as select * from pgque.list_workers()")
    value(
        own,
        "select pgque.send_batch('q', 't', %s::text[], partition_keys => %s::text[])",
        ["a"] * 5,
        ["a"] * 5,
    )
    tick(own, "q")
    ordered = take(own, "q", "w", 10, "1 day")
    batches = [take(own, "q", f"w{n}", n, "1 day", "pool") for n in (1, 2)]
    assert [len(batch) for batch in (ordered, *batches)] == [1, 1, 2]
    nack_ids(own, batches[1][0].batch_id, ids(batches[1])[:1], "0")
    upgrade(fresh_dsn, version)
    assert take(own, "q", "w2") == []
    assert value(own, "select pgque.set_key_concurrency('q', 'pool', 2)") == 1
    assert (
        take(own, "q", "w3", consumer="pool") == []
    )  # two are leased, one is to be tried again, two are new
    assert value(own, "select pgque.set_key_concurrency('q', 'c', 3)") == 1
    assert len(take(own, "q", "w2")) == 2
    assert ack(own, batches[0][0].batch_id) == 1
    assert ids(take(own, "q", "w3", consumer="pool")) == ids(batches[1])[:1]
    assert column(own, "select waiting from pgque.list_workers('q', 'pool')") == [2, 2]
    own.execute("drop view public.workers")


@pytest.mark.parametrize("version", EARLIER)
def test_an_upgrade_marks_queues_and_takes_none_for_restored(
    version: str, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    install_earlier(fresh_dsn, version)
    own = connect(fresh_dsn)
    for queue in ("q", "loaded"):
        value(own, "select pgque.create_queue(%s)", queue)
    own.execute("update pgque.queue set queue_xid = '7' where queue_name = 'loaded'")
    last = forced_tick(own, "q")
    install(fresh_dsn)
    marked = "select q.queue_name, q.queue_xid > (1::bigint << 62)::text::xid8, q.queue_restored from pgque.queue as q order by q.queue_id"
    assert rows(own, marked) == [("q", True, False), ("loaded", False, True)]
    assert forced_tick(own, "q") == last + 1
    value(own, "select pgque.ticker('loaded')")
    assert rows(own, marked) == [("q", True, False), ("loaded", True, False)]


@pytest.mark.parametrize("version", [OLD, *EARLIER])
def test_every_queue_has_the_functions_of_a_new_one_when_the_upgrade_ends(
    version: str, fresh_dsn: str, connect: Callable[..., Connection]
) -> None:
    install_earlier(fresh_dsn, version)
    own = connect(fresh_dsn)
    for n in range(8):
        value(own, "select pgque.create_queue(%s)", f"q{n}")
        last = forced_tick(own, f"q{n}")
    upgrade(fresh_dsn, version)
    value(own, "select pgque.create_queue('new')")
    found = rows(
        own,
        "select q.queue_name, array_agg(regexp_replace(pg_get_functiondef(r), format('_%1$s(_|\\()|map_queue = %1$s ', q.queue_id), 'N', 'g')"
        " || p.proacl::text order by r::text) from pgque.queue q, pgque._readers_of(q.queue_id) r"
        " join pg_proc p on p.oid = r group by q.queue_id, q.queue_name",
    )
    made = dict(found)
    assert [name for name in made if made[name] != made["new"]] == []
    assert len(made) == 9
    assert len(made["new"]) == 7
    ticked = "select pg_sequence_last_value(queue_tick_seq) from pgque.queue where queue_name = 'q7'"
    assert value(own, ticked) >= last


def test_a_second_install_keeps_no_lock_on_a_table_a_sequence_or_a_function_of_a_queue(
    own: Connection, own_dsn: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    with as_owner(own_dsn) as again:
        again.execute(SOURCE)
        held = rows(
            again,
            "select coalesce(p.proname, c.relname) from pg_locks as l left join pg_class as c on c.oid = l.relation"
            " left join pg_proc as p on l.classid = 'pg_proc'::regclass and p.oid = l.objid"
            " where l.pid = pg_backend_pid() and coalesce(p.proname, c.relname) ~ '^_?(event|tick|ordinary)s?_[0-9]+'",
        )
    assert held == []


@pytest.mark.parametrize("kind", ["ticks", "events", "ordinary"])
def test_a_call_names_the_function_that_a_queue_lacks_and_an_install_creates_it(
    own: Connection, own_dsn: str, kind: str
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send_many(own, "q", 3)
    tick(own, "q")
    (lost,) = column(
        own, "select r::text from pgque._readers_of(1) r where r::text ~ %s limit 1", f"_{kind}_1(_0)?\\("
    )
    own.execute(f"drop function {lost}".encode())
    if kind != "ordinary":
        own.execute("set pgque.ordinary = off")
    error = refused("42883", receive, own, "q")
    assert f"pgque._{kind}_1" in str(error.diag.message_primary)
    assert "nstall this version of pgque again" in str(error.diag.message_hint) or kind != "ticks"
    install(own_dsn)
    assert drain(own, "q") == sent


@pytest.mark.parametrize(
    ("version", "error", "hint"),
    [
        ("0.6.0", r"cannot upgrade from pgque 0\.6\.0 to {this}", "pgque install --version 0.8.0"),
        ("99.0.0", "newer than {this} of this", "version 99.0.0 or later"),
    ],
)
def test_a_version_that_is_too_old_or_newer_than_the_file_is_refused_and_stays_as_it_is(
    own: Connection, own_dsn: str, version: str, error: str, hint: str
) -> None:
    error = error.format(this=value(own, "select pgque.version()"))
    own.execute(
        f"create or replace function pgque.version() returns text language sql immutable as $$ select '{version}'::text $$".encode()
    )
    before = schema(own_dsn)
    with pytest.raises(psycopg.errors.FeatureNotSupported, match=error) as caught:
        install(own_dsn)
    assert hint in str(caught.value.diag.message_hint)
    assert schema(own_dsn) == before


@pytest.mark.parametrize(
    ("there", "file", "is_newer"),
    [
        ("9.0.0", "9.0.0-rc2", False),
        ("9.0.0-rc2", "9.0.0-rc1", False),
        ("9.0.0-rc2", "8.9.9", False),
        ("9.0.0-rc9", "9.0.0-rc10", True),
        ("9.0.0-rc2", "9.0.0", True),
    ],
)
def test_a_file_upgrades_to_a_later_candidate_or_its_release_only(
    own: Connection, own_dsn: str, there: str, file: str, is_newer: bool
) -> None:
    this = str(value(own, "select pgque.version()"))
    own.execute(
        f"create or replace function pgque.version() returns text language sql immutable as $$ select '{there}'::text $$".encode()
    )
    with (
        as_owner(own_dsn) as connection,
        contextlib.nullcontext()
        if is_newer
        else pytest.raises(psycopg.errors.FeatureNotSupported, match=f"newer than {file}"),
    ):
        connection.execute(SOURCE.replace(f"'{this}'".encode(), f"'{file}'".encode()))
    assert value(own, "select pgque.version()") == (file if is_newer else there)


@pytest.mark.parametrize("call", ["archive", "dead", "nack", "ack"])
def test_outcomes_by_ids_that_wait_for_an_upgrade_are_of_these_messages_only(
    fresh_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    call: str,
) -> None:
    install_earlier(fresh_dsn, THROUGH)
    own, waiting = connect(fresh_dsn), connect(fresh_dsn)
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send_many(own, "q", 10)
    tick(own, "q")
    batch = value(own, "select min(r.batch_id) from pgque.receive('q', 'c') as r")
    query = f"select count(*) from pgque.{call}(%s, %s::bigint[])"
    with as_owner(fresh_dsn) as upgrade:
        upgrade.execute(SOURCE)
        told = background(lambda c: value(c, query, batch, [sent[9], sent[0]]), waiting)
        wait_for_lock(waiting.info.backend_pid)
    ended = {sent[0], sent[9]}
    try:
        told.result()
    except psycopg.errors.SerializationFailure:
        ended = set()
    left = "select array_agg(r.msg_id order by r.msg_id) from pgque.receive('q', 'c') as r"
    assert value(own, left) == [msg_id for msg_id in sent if msg_id not in ended]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("version", [None, EARLIER[-1]])
def test_installing_under_load_neither_deadlocks_nor_loses(
    fresh_dsn: str, connect: Callable[..., Connection], background: Callable[..., Any], version: str | None
) -> None:
    if version is None:
        install(fresh_dsn)
    else:
        install_earlier(fresh_dsn, version)
    own_dsn, own = fresh_dsn, connect(fresh_dsn)
    value(own, "select pgque.set_tick_period_ms(10)")
    for name in ("q", "p"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
        value(own, "select pgque.set_queue_config(%s, 'rotation_period', '1 microsecond')", name)
    stop: list[bool] = []

    # The loop of 0.7.0 ends if it meets the upgrade's lock while it checks a queue; its scheduler starts it again.
    ends = () if version is None else (psycopg.errors.LockNotAvailable,)
    # A delivery of an earlier version that waits for the upgrade may have to be repeated (see earlier.sql).
    overtaken = () if version is None else (psycopg.errors.SerializationFailure,)

    def loop(c: Connection) -> None:
        while not stop:
            with contextlib.suppress(*ends):
                c.execute("call pgque.ticker_loop('2 seconds')")

    def maintain(c: Connection) -> None:
        while not stop:
            value(c, "select pgque.maint()")

    def produce(queue: str) -> Callable[[Connection], list[int]]:
        def run(c: Connection) -> list[int]:
            sent: list[int] = []
            while not stop:
                sent += send_many(c, queue, 3)
            return sent

        return run

    def consume(queue: str) -> Callable[[Connection], list[int]]:
        def run(c: Connection) -> list[int]:
            got: list[int] = []
            while not stop:
                with contextlib.suppress(*overtaken):
                    batch = receive(c, queue)
                    if batch and ack(c, batch[0].batch_id):
                        got += ids(batch)
            return got

        return run

    others = [background(loop, connect(own_dsn)), background(maintain, connect(own_dsn))]
    producers = [background(produce(q), connect(own_dsn)) for q in ("q", "p")]
    consumers = [background(consume(q), connect(own_dsn)) for q in ("q", "p")]
    try:
        for _ in range(8):
            install(own_dsn)
    finally:
        stop.append(True)
    for job in others:
        job.result(60)
    for queue, producer, consumer in zip(("q", "p"), producers, consumers, strict=True):
        sent, got = producer.result(60), consumer.result(60)
        assert len(sent) > 20
        tick(own, queue)
        assert got + drain(own, queue, count=1_000) == sent


def test_an_install_waits_for_no_reader_and_no_open_batch(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send(own, "q")
    tick(own, "q")
    consumer = connect(own_dsn, autocommit=False)
    receive(consumer, "q")
    with as_owner(own_dsn) as connection:
        connection.execute("set lock_timeout = '5s'")
        connection.execute(SOURCE)
    consumer.commit()


def test_uninstalling_leaves_nothing_but_the_roles(own: Connection, own_dsn: str) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    send(own, "q")
    tick(own, "q")
    receive(own, "q")
    value(own, "select pgque.uninstall()")
    assert value(own, "select to_regnamespace('pgque')") is None
    left = rows(
        own,
        "select c.relname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace"
        " where n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast') and n.nspname !~ '^pg_temp|^pg_toast_temp'",
    )
    assert left == []
    assert (
        value(
            own,
            "select count(*) from pg_roles where rolname in ('pgque_reader', 'pgque_writer', 'pgque_admin')",
        )
        == 3
    )
    install(own_dsn)
    assert value(own, "select pgque.create_queue('q')") == 1


def test_uninstalling_is_refused_while_tables_of_others_would_lose_data(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    own.execute(
        b"create schema mine; create table mine.harmless (a int, body text);"
        b"create trigger watch after insert on mine.harmless for each row execute function pgque.jsontriga('q');"
        b"create view mine.lag as select * from pgque.get_consumer_info()"
    )
    keeping = {
        "column b of table mine.t": b"create table mine.t (a int, b pgque.caller)",
        "column c of table mine.u": b"create table mine.u (a int, c pgque.message[])",
        "column e of table mine.w": b"create domain mine.d as pgque.outcome; create table mine.w (e mine.d)",
        "table mine.typed": b"create table mine.typed of pgque.message",
    }
    for made in keeping.values():
        own.execute(made)
    error = refused("2BP01", value, own, "select pgque.uninstall()")
    for thing in keeping:
        assert thing in str(error.diag.message_detail)
    assert "harmless" not in str(error.diag.message_detail)
    assert send(own, "q")
    own.execute(
        b"alter table mine.t alter b type name; alter table mine.u drop c; alter table mine.w drop e; drop table mine.typed"
    )
    value(own, "select pgque.uninstall()")
    assert value(own, "select to_regnamespace('pgque')") is None
    assert (
        value(
            own,
            "select count(*) from information_schema.columns where table_schema = 'mine' and column_name = 'b'",
        )
        == 1
    )


@pytest.mark.parametrize(("first", "then"), [("queue", "event"), ("event", "queue"), ("tick", "config")])
def test_uninstalling_lets_a_transaction_that_uses_pgque_end_first(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    first: str,
    then: str,
) -> None:
    value(own, "select pgque.create_queue('q')")
    user = connect(own_dsn, autocommit=False)
    user.execute("set local deadlock_timeout = '1min'")
    rows(user, f"select from pgque.{first}")
    uninstall = background(lambda c: value(c, "select pgque.uninstall()"), connect(own_dsn, autocommit=False))
    wait_for_lock(uninstall.pid)
    rows(user, f"select from pgque.{then}")
    user.commit()
    uninstall.result()
    assert value(uninstall.connection, "show lock_timeout") == "0"
    uninstall.connection.commit()
    assert value(own, "select to_regnamespace('pgque')") is None


def test_only_the_owner_uninstalls(own: Connection, roles: Any, own_dsn: str) -> None:
    admin = roles("admin", dbname=psycopg.conninfo.conninfo_to_dict(own_dsn)["dbname"])
    with psycopg.connect(admin.dsn, autocommit=True) as connection:
        refused("42501", rows, connection, "select pgque.uninstall()")


def test_start_without_pg_cron_gives_a_hint(own: Connection) -> None:
    error = refused("PQ014", rows, own, "select pgque.start()")
    assert "pgque ticker" in str(error.diag.message_hint)
    value(own, "select pgque.stop()")
