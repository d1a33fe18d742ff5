"""Errors: the class comes from the SQLSTATE, the cause is kept."""

from __future__ import annotations

import re
import threading
from typing import Any

import psycopg
import pytest
from psycopg import sql

import pgque
from pgque import errors
from pgque.errors import BY_SQLSTATE, from_psycopg
from support import servers

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.mark.parametrize("state", sorted(BY_SQLSTATE))
def test_each_sqlstate_has_its_class(conn: Connection, state: str) -> None:
    raising = sql.SQL(
        "do $$ begin raise exception using errcode = {}, message = 'any text', hint = 'do this'; end $$"
    ).format(sql.Literal(state))
    with pytest.raises(psycopg.Error) as caught:
        conn.execute(raising)
    error = from_psycopg(caught.value, "q")
    assert type(error) is BY_SQLSTATE[state]
    assert (str(error), error.sqlstate, error.hint, error.queue) == (
        "any text\nhint: do this",
        state,
        "do this",
        "q",
    )


def test_every_code_of_the_sql_file_is_known() -> None:
    used = set(re.findall(r"errcode = '(PQ\d\d\d)'", servers.SQL_FILE.read_text()))
    assert used <= set(BY_SQLSTATE)
    assert sorted(BY_SQLSTATE) == ["22021", "22P05", "42501", *(f"PQ{n:03}" for n in range(1, 17))]


def test_an_unknown_queue_is_named_and_chained(client: pgque.PgqueClient) -> None:
    with pytest.raises(pgque.PgqueQueueNotFoundError, match="queue not found") as caught:
        client.send("no such queue", "x")
    assert caught.value.queue == "no such queue"
    assert caught.value.sqlstate == "PQ001"
    assert caught.value.hint
    assert isinstance(caught.value.__cause__, psycopg.Error)


def test_an_unknown_consumer_raises_its_own_class(client: pgque.PgqueClient, queue: str) -> None:
    with pytest.raises(pgque.PgqueConsumerNotFoundError, match="not subscriber to queue"):
        client.receive(queue, "nobody")


def test_an_unknown_batch_raises_its_own_class(client: pgque.PgqueClient) -> None:
    with pytest.raises(pgque.PgqueBatchNotFoundError, match="batch not found"):
        client.pgq.get_batch_events(1)


def test_a_foreign_message_cannot_be_nacked(client: pgque.PgqueClient, queue: str, tick: Any) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x")
    tick(queue)
    [message] = client.receive(queue, "c")
    with pytest.raises(pgque.PgqueMessageNotInBatchError):
        client.nack(message.batch_id, message.msg_id + 1)


@pytest.mark.parametrize("name", ["", "x" * 58, "ž" * 29])
def test_a_name_that_does_not_fit_is_refused(client: pgque.PgqueClient, name: str) -> None:
    with pytest.raises(pgque.PgqueInvalidNameError):
        client.admin.create_queue(name)


def test_an_unknown_setting_is_a_bad_argument(client: pgque.PgqueClient, queue: str) -> None:
    with pytest.raises(pgque.PgqueBadArgumentError):
        client.admin.set_queue_config(queue, "no_such_setting", 1)
    with pytest.raises(ValueError, match=re.escape(queue)):
        client.receive(queue, "c", 0)


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with pytest.raises(pgque.PgqueConnectionError) as caught:
        pgque.connect("host=127.0.0.1 port=1 connect_timeout=2 dbname=x user=x")
    assert isinstance(caught.value.__cause__, psycopg.OperationalError)


def test_a_lost_connection_is_a_connection_error(dsn: str, conn: Connection, queue: str) -> None:
    client = pgque.connect(dsn, autocommit=True)
    conn.execute("select pg_terminate_backend(%s)", [client.conn.info.backend_pid])
    with pytest.raises(pgque.PgqueConnectionError):
        for _ in range(100):
            client.send(queue, "x")
    with pytest.raises(pgque.PgqueConnectionError):
        client.send(queue, "x")
    client.close()


def test_a_missing_right_keeps_its_sqlstate(nobody: Any) -> None:
    with pgque.connect(nobody.dsn) as client:
        with pytest.raises(pgque.PgqueError) as caught:
            client.send("q", "x")
        client.conn.rollback()
    assert caught.value.sqlstate == "42501"


def test_reader_and_writer_can_connect_and_do_their_part(
    reader: Any, writer: Any, client: pgque.PgqueClient, queue: str, tick: Any
) -> None:
    client.subscribe(queue, "c")
    with pgque.connect(writer.dsn) as sender:
        sender.send(queue, {"n": 1})
    tick(queue)
    with pgque.connect(reader.dsn) as receiver:
        [message] = receiver.receive(queue, "c")
        assert receiver.nack(message.batch_id, message) == 1
        assert receiver.ack(message.batch_id) == 1


# -- versions ------------------------------------------------------------


def test_a_database_without_pgque_is_refused_with_the_command_that_installs(fresh_dsn: str) -> None:
    with pytest.raises(pgque.PgqueVersionError, match=r"pgque install --dsn"):
        pgque.connect(fresh_dsn)


@pytest.mark.parametrize(
    ("version", "advice"),
    [("0.0.9", "pgque install --dsn"), ("1.999.0", "pip install --upgrade ./python"), ("99.1.0", "pip")],
)
def test_a_version_that_the_package_does_not_know_is_refused(
    fresh_dsn: str, version: str, advice: str
) -> None:
    _pretend(fresh_dsn, version)
    with pytest.raises(pgque.PgqueVersionError, match=re.escape(version)) as caught:
        pgque.connect(fresh_dsn)
    assert advice in str(caught.value)


def test_another_patch_version_is_accepted(fresh_dsn: str) -> None:
    patched = pgque.__version__.rsplit(".", 1)[0] + ".99"
    _pretend(fresh_dsn, patched)
    with pgque.connect(fresh_dsn) as client:
        assert client.monitor.version() == patched


def test_a_refused_version_does_not_harm_the_transaction_of_a_wrapped_connection(fresh_dsn: str) -> None:
    with psycopg.connect(fresh_dsn) as own:
        own.execute("create table mine ()")
        with pytest.raises(pgque.PgqueVersionError):
            pgque.PgqueClient(own).send("q", "x")
        assert own.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        own.execute("select * from mine")
    with psycopg.connect(fresh_dsn) as own:
        with pytest.raises(pgque.PgqueVersionError):
            pgque.PgqueClient(own).send("q", "x")
        assert own.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def _pretend(dsn: str, version: str) -> None:
    with psycopg.connect(dsn) as own:
        own.execute("create schema pgque")
        own.execute(
            sql.SQL("create function pgque.version() returns text language sql as {}").format(
                sql.Literal(f"select '{version}'::text")
            )
        )


_LOSSES = {
    "26000": "deallocate all",  # the session does not have the statement
    "08P01": "deallocate all; prepare _pg3_0 (int) as select $1",  # it has another client's of that name
}


@pytest.mark.parametrize("sqlstate", _LOSSES)
def test_where_sessions_lose_prepared_statements_calls_go_on_without_them(
    dsn: str, queue: str, monkeypatch: pytest.MonkeyPatch, sqlstate: str
) -> None:
    """As behind a pooler in transaction mode that passes for the server: one call fails, in a way that is
    worth trying again."""
    monkeypatch.setattr(errors, "_behind_pooler", threading.Event())
    prepared = "select count(*) from pg_prepared_statements where not from_sql"

    def count_after_sends(client: pgque.PgqueClient) -> object:
        for n in range(10):
            client.send(queue, n)
        return client.conn.execute(prepared).fetchone()

    with pgque.connect(dsn, autocommit=True) as client:
        assert count_after_sends(client) == (1,)
        for statement in _LOSSES[sqlstate].split("; "):
            client.conn.execute(f"do $do$ begin execute '{statement}'; end $do$".encode())
        with pytest.raises(pgque.PgqueError) as error:
            client.send(queue, 10)
        assert error.value.sqlstate == sqlstate
        assert "prepare_threshold=None" in str(error.value.hint)
        assert not errors.is_permanent(error.value)
        assert count_after_sends(client) == (0,)
    with pgque.connect(dsn, autocommit=True) as client:
        assert count_after_sends(client) == (0,)
