"""What readers, writers, operators and everybody else may do with workers and their messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from sql.helpers import Connection, ids, offer, refused, rows, settle, take, tries, value, work_off

READ = [
    "select * from pgque.receive({q}, 'c', 1, worker => 'w1')",
    "select pgque.ack(0)",
    "select * from pgque.ack(0, array[1]::bigint[])",
    "select * from pgque.nack(0, array[1]::bigint[])",
    "select * from pgque.dead(0, array[1]::bigint[], 'x')",
    "select * from pgque.archive(0)",
    "select pgque.release(0)",
    "select pgque.extend(0, '1 s')",
    "select pgque.set_visibility(0, '1 s')",
    "select * from pgque.list_workers({q})",
]
WRITE = [
    "select pgque.send({q}, 't', 'x'::text, key => 'k', delay => '1 s', ttl => '1 h', headers => '{{}}')",
    "select pgque.send({q}, 't', 'x'::text, key => 'k')",
    "select pgque.send({q}, 't', '\\x00'::bytea)",
    "select pgque.send_batch({q}, 't', array['x'], keys => array['k'])",
    "select * from pgque.send_idem({q}, 't', 'x'::text, 'i')",
]
OPERATE = [
    "select * from pgque.list_messages({q})",
    "select * from pgque.get_message({q}, 1)",
    "select pgque.purge_key({q}, 'k')",
    "select pgque.cancel({q}, 1)",
    "select pgque.archive_poison({q})",
    "select pgque.dlq_requeue_all({q}, 10)",
    "select pgque.expire_messages({q})",
    "select pgque.delete_expired({q})",
    "select pgque.archive_purge({q}, now())",
    "select pgque.set_queue_config({q}, 'max_depth', '100')",
    "select pgque.set_default_config('max_depth', null)",
    "select pgque.set_schedule('expire', '1 hour')",
    "select pgque.purge({q})",
    "select pgque.rename_queue({q}, {q} || 'x')",
]


@pytest.fixture
def started(conn: Connection, subscribed: str) -> str:
    """A queue with a pool, a message in it, and a letter for each state."""
    offer(conn, subscribed, 5)
    take(conn, subscribed, "w0", 1)
    return subscribed


def tries_as(role: Any, queue: str, calls: list[str]) -> dict[str, str | None]:
    """Call each as the role; return the SQLSTATE of each, None where it worked."""
    with psycopg.connect(role.dsn, autocommit=True) as connection:
        return tries(connection, queue, calls)


DENIED = "42501"


def test_a_reader_receives_and_acknowledges_and_does_nothing_else(started: str, reader: Any) -> None:
    assert tries_as(reader, started, READ) == dict.fromkeys(READ)
    assert tries_as(reader, started, WRITE + OPERATE) == dict.fromkeys(WRITE + OPERATE, DENIED)


def test_a_writer_sends_and_does_nothing_else(started: str, writer: Any) -> None:
    assert tries_as(writer, started, WRITE) == dict.fromkeys(WRITE)
    assert tries_as(writer, started, READ + OPERATE) == dict.fromkeys(READ + OPERATE, DENIED)


def test_an_operator_does_everything(started: str, admin: Any, conn: Connection) -> None:
    calls = READ + WRITE + OPERATE
    assert tries_as(admin, started, calls) == dict.fromkeys(calls)
    value(conn, "select pgque.set_schedule('expire', '1 minute')")
    value(conn, "select pgque.drop_queue(%s, true)", started + "x")


def test_a_role_sees_its_rights(
    conn: Connection, started: str, reader: Any, writer: Any, admin: Any, nobody: Any
) -> None:
    for role, rights in (
        (reader, (True, False, True, False)),
        (writer, (False, True, False, False)),
        (admin, (True, True, True, True)),
    ):
        with psycopg.connect(role.dsn, autocommit=True) as connection:
            told = {r[0]: r[1:] for r in rows(connection, "select * from pgque.my_rights()")}
        assert told[None] == told[started] == rights
    with psycopg.connect(nobody.dsn, autocommit=True) as connection:
        refused(DENIED, rows, connection, "select * from pgque.my_rights()")
    assert rows(conn, "select * from pgque.my_rights() limit 1") == [(None, True, True, True, True)]


def test_a_role_without_grant_gets_nothing(started: str, nobody: Any) -> None:
    calls = READ + WRITE + OPERATE
    assert tries_as(nobody, started, calls) == dict.fromkeys(calls, DENIED)


def test_nobody_but_its_owner_reads_or_writes_the_tables(
    conn: Connection, started: str, nobody: Any, reader: Any, writer: Any
) -> None:
    tables = [
        r[0]
        for r in rows(
            conn,
            "select c.relname from pg_class as c where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'p')"
            # What a writer stages for a sink is his own.
            " and c.relname !~ '^sink_stage'",
        )
    ]
    for role in (nobody, reader, writer):
        for privilege in ("insert", "update", "delete", "truncate"):
            allowed = rows(
                conn,
                "select t from unnest(%s::text[]) as t where has_table_privilege(%s, format('pgque.%%I', t), %s)",
                tables,
                role.name,
                privilege,
            )
            assert allowed == [], (role, privilege)
    assert (
        rows(
            conn,
            "select t from unnest(%s::text[]) as t where has_table_privilege(%s, format('pgque.%%I', t), 'select')",
            tables,
            nobody.name,
        )
        == []
    )


def test_public_may_execute_none_of_the_functions(conn: Connection, nobody: Any) -> None:
    assert (
        rows(
            conn,
            "select p.oid::regprocedure::text from pg_proc as p"
            " where p.pronamespace = 'pgque'::regnamespace and has_function_privilege(%s, p.oid, 'execute')",
            nobody.name,
        )
        == []
    )


def test_a_reader_and_a_writer_move_a_message_through_every_outcome(
    conn: Connection, subscribed: str, reader: Any, writer: Any, connect: Callable[..., Connection]
) -> None:
    source, sink = connect(writer.dsn), connect(reader.dsn)
    sent = [
        value(source, "select pgque.send(%s, 't', 'x'::text, key => %s)", subscribed, f"k{n}")
        for n in range(5)
    ]
    settle(conn, subscribed)
    batch = take(sink, subscribed)
    assert ids(batch) == sent
    token = batch[0].batch_id
    for call, msg_id, more in (
        ("ack", 0, ""),
        ("dead", 1, ", 'x'"),
        ("archive", 2, ""),
        ("nack", 3, ", '0'"),
    ):
        found = rows(
            sink, f"select o.ok from pgque.{call}(%s, array[%s]::bigint[]{more}) as o", token, sent[msg_id]
        )
        assert found == [(True,)], call
    assert value(sink, "select pgque.release(%s)", token) == 1
    settle(conn, subscribed)
    assert sorted(ids(work_off(sink, subscribed))) == sent[3:]
