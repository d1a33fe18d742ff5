"""Short forms of the calls that the SQL tests make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psycopg
import pytest

Connection = psycopg.Connection[Any]


class Message(NamedTuple):
    """What receive() returns, in its order."""

    msg_id: int
    batch_id: int
    type: str
    payload: str | None
    retry_count: int
    created_at: Any
    extra1: str | None
    extra2: str | None
    extra3: str | None
    extra4: str | None
    headers: Any
    key: str | None
    payload_bytes: bytes | None
    receive_count: int
    last_error: str | None
    expires_at: Any
    queue: str


def rows(conn: Connection, query: str, *args: Any) -> list[Any]:
    """Run a statement and return its rows; none if it has no result."""
    cursor = conn.execute(query.encode(), args or None)
    return cursor.fetchall() if cursor.description else []


def value(conn: Connection, query: str, *args: Any) -> Any:
    """Run a statement and return the first column of its first row, or None."""
    found = rows(conn, query, *args)
    return found[0][0] if found else None


def column(conn: Connection, query: str, *args: Any) -> list[Any]:
    """Run a statement and return its first column."""
    return [row[0] for row in rows(conn, query, *args)]


def send(conn: Connection, queue: str, payload: str = "x") -> int:
    """Send one message; return its id."""
    result: int = value(conn, "select pgque.send(%s, %s::text)", queue, payload)
    return result


def send_many(conn: Connection, queue: str, count: int) -> list[int]:
    """Send messages 1 to count with one call; return their ids."""
    ids: list[int] = value(
        conn,
        "select pgque.send_batch(%s, 'default', array(select g::text from generate_series(1, %s) as g))",
        queue,
        count,
    )
    return ids


def subscribe(conn: Connection, queue: str, consumer: str = "c") -> int:
    """Subscribe a consumer at the newest tick."""
    result: int = value(conn, "select pgque.subscribe(%s, %s)", queue, consumer)
    return result


def tick(conn: Connection, queue: str) -> int | None:
    """Tick the queue if there is a reason."""
    result: int | None = value(conn, "select pgque.ticker(%s)", queue)
    return result


def forced_tick(conn: Connection, queue: str) -> int:
    """Tick the queue in any case."""
    value(conn, "select pgque.force_next_tick(%s)", queue)
    result = tick(conn, queue)
    assert result is not None
    return result


def receive(
    conn: Connection, queue: str, consumer: str = "c", count: int = 100, ack_batch: int | None = None
) -> list[Message]:
    """Receive up to count messages, and finish a batch in the same call."""
    and_ack = "" if ack_batch is None else ", ack_batch => %s"  # 0.1.0 has no such argument
    finish = [] if ack_batch is None else [ack_batch]
    found = rows(conn, f"select * from pgque.receive(%s, %s, %s{and_ack})", queue, consumer, count, *finish)
    return [Message(*row[: len(Message._fields)]) for row in found]


def receive_coop(
    conn: Connection, queue: str, worker: str, count: int = 100, dead: str | None = None, consumer: str = "c"
) -> list[Message]:
    """Receive up to count messages as a worker of consumer c."""
    found = rows(
        conn, "select * from pgque.receive_coop(%s, %s, %s, %s, %s)", queue, consumer, worker, count, dead
    )
    return [Message(*row[: len(Message._fields)]) for row in found]


def ack(conn: Connection, batch_id: int) -> int:
    """Finish a batch."""
    result: int = value(conn, "select pgque.ack(%s)", batch_id)
    return result


def nack(conn: Connection, message: Message, after: str = "0", reason: str | None = None) -> int:
    """Fail one message of its batch."""
    result: int = value(
        conn,
        "select pgque.nack(%s, row(%s::bigint, null, null, null, null, null, null, null, null, null, null, null, null,"
        " null, null, null, null)::pgque.delivery, %s::interval, %s)",
        message.batch_id,
        message.msg_id,
        after,
        reason,
    )
    return result


def nack_ids(
    conn: Connection, batch_id: int, ids: list[int], after: str = "0", reason: str | None = None
) -> list[Any]:
    """Fail messages by their ids; return (msg_id, ok, reason) rows."""
    return rows(
        conn,
        "select * from pgque.nack(%s, %s::bigint[], %s::interval, %s)",
        batch_id,
        ids,
        after,
        reason,
    )


def slices(conn: Connection, queue: str, consumer: str = "c", count: int = 100) -> Iterator[list[Message]]:
    """Receive and ack until nothing is left; yield each batch."""
    while batch := receive(conn, queue, consumer, count):
        assert len({m.batch_id for m in batch}) == 1
        assert len(batch) <= count
        yield batch
        assert ack(conn, batch[0].batch_id) == 1


def drain(conn: Connection, queue: str, consumer: str = "c", count: int = 100) -> list[int]:
    """Receive and ack until nothing is left; return the ids."""
    return [m.msg_id for batch in slices(conn, queue, consumer, count) for m in batch]


def payloads(conn: Connection, queue: str, consumer: str = "c", count: int = 100) -> list[str | None]:
    """Receive and ack until nothing is left; return the payloads."""
    return [m.payload for batch in slices(conn, queue, consumer, count) for m in batch]


def pump(conn: Connection) -> int:
    """Put due retries back into the log."""
    result: int = value(conn, "select pgque.maint_retry_events()")
    return result


def forward_letters(conn: Connection) -> int | None:
    """Let a ticker forward dead letters; return how many it tried."""
    result: int | None = value(conn, "select pgque._forward_letters()")
    return result


def configure(conn: Connection, queue: str, **settings: Any) -> None:
    """Set parameters of a queue."""
    for name, setting in settings.items():
        value(
            conn,
            "select pgque.set_queue_config(%s, %s, %s)",
            queue,
            name,
            None if setting is None else str(setting),
        )


def rotate(conn: Connection, queue: str, *, patient: bool = False) -> int:
    """Ask for a rotation, as if the rotation period had passed."""
    configure(conn, queue, rotation_period="1 microsecond")
    return rotate_if_due(conn, queue, patient=patient)


def rotate_if_due(conn: Connection, queue: str, *, patient: bool) -> int:
    """Rotate once; autovacuum may hold a table for a moment, so with patience more than once."""
    for _ in range(500 if patient else 1):
        if value(conn, "select pgque.maint_rotate_tables_step1(%s)", queue):
            return 1
        if patient:
            time.sleep(0.01)
    return 0


def leaf(conn: Connection, queue: str, number: int | None = None, kind: str = "event") -> str:
    """Name one of a queue's tables, by default the one that events go to now."""
    current: str = value(conn, "select pgque.current_event_table(%s)", queue)
    base, now = current.rsplit("_", 1)
    return f"{base.replace('pgque.event', f'pgque.{kind}')}_{now if number is None else number}"


def queue_bytes(conn: Connection, queue: str) -> int:
    """Bytes on disk of a queue, from metrics()."""
    return int(
        value(
            conn,
            "select m.value from pgque.metrics() as m where m.metric = 'pgque_queue_bytes' and m.queue = %s",
            queue,
        )
    )


def refused(sqlstate: str, call: Callable[..., Any], *args: Any) -> psycopg.Error:
    """Expect the call to raise this SQLSTATE; return the error. Errors of pgque need a hint."""
    with pytest.raises(psycopg.Error) as caught:
        call(*args)
    error = caught.value
    assert error.sqlstate == sqlstate, f"{error.sqlstate}: {error}"
    if sqlstate.startswith("PQ"):
        assert error.diag.message_hint, f"no hint: {error}"
    return error


def need_prepared_transactions(conn: Connection) -> None:
    """Skip the test on a server that has none, as one that is not the tests' own may."""
    if value(conn, "show max_prepared_transactions") == "0":
        pytest.skip("the server has max_prepared_transactions = 0")


def change_function(conn: Connection, name: str, *changes: tuple[str, str]) -> None:
    """Replace texts, each of which must be there once, in a function of the engine."""
    source = value(conn, "select pg_get_functiondef(%s::regproc)", f"pgque.{name}")
    for old, new in changes:
        assert source.count(old) == 1, (name, old)
        source = source.replace(old, new)
    conn.execute(source.encode())


def compact_soon(conn: Connection, size: int = 65_536) -> None:
    """Let the journal turn at so many bytes instead of 4 MB, and without waiting a minute in between."""
    change_function(conn, "_compact_journal", ("4194304", str(size)), ("interval '1 minute'", "interval '0'"))


def compact_patiently(conn: Connection, wait: str = "100ms") -> None:
    """Let compaction wait for its locks at every call, not in one of ten where a leaf has more than 64 MB."""
    change_function(conn, "_lock_journal", ("67108864", "0"), ("0.1", "1"), ("100ms", wait))


def set_clock(conn: Connection, to: str) -> None:
    """Let the engine's clock tell what an expression gives. Only in a database of one's own."""
    conn.execute(
        "create or replace function pgque.clock() returns timestamptz language sql volatile as"
        f" $$ select {to} $$".encode()
    )


def move_clock(conn: Connection, by: str) -> None:
    """Set the engine's clock ahead. Only in a database of one's own."""
    set_clock(conn, f"pg_catalog.clock_timestamp() + interval '{by}'")


def dead_tuples(conn: Connection) -> dict[str, int]:
    """Dead tuples of the tables of the schema that have some, once statistics are current."""
    if value(conn, "select to_regprocedure('pg_stat_force_next_flush()')") is not None:
        conn.execute("select pg_stat_force_next_flush()")
        conn.execute("select pg_stat_clear_snapshot()")
    else:  # 14: a session tells the collector at most twice a second, which answers from as old a file
        for _ in range(2):
            conn.execute("select pg_sleep(0.6)")
    return dict(
        rows(
            conn,
            "select t.relname, t.n_dead_tup from pg_stat_all_tables as t"
            " where t.schemaname = 'pgque' and t.n_dead_tup > 0",
        )
    )


def take(
    conn: Connection,
    queue: str,
    worker: str = "w1",
    count: int = 100,
    timeout: str | None = None,
    consumer: str = "c",
    ack_batch: int | None = None,
) -> list[Message]:
    """Receive up to count messages as a worker of the consumer's pool."""
    found = rows(
        conn,
        "select * from pgque.receive(%s, %s, %s, worker => %s, visibility_timeout => %s::interval, ack_batch => %s)",
        queue,
        consumer,
        count,
        worker,
        timeout,
        ack_batch,
    )
    batch = [Message(*row[: len(Message._fields)]) for row in found]
    assert len(batch) <= count
    return batch


def ids(batch: list[Message]) -> list[int]:
    """Name the messages of a batch."""
    return [m.msg_id for m in batch]


def settle(conn: Connection, queue: str) -> int | None:
    """Do what the loop does each tick: forward dead letters, put due messages back, then tick."""
    forward_letters(conn)
    pump(conn)
    return tick(conn, queue)


def offer(conn: Connection, queue: str, count: int = 1) -> list[int]:
    """Send messages 1 to count and tick; return their ids."""
    sent = send_many(conn, queue, count)
    tick(conn, queue)
    return sent


def work_off(
    conn: Connection, queue: str, worker: str = "w1", count: int = 100, consumer: str = "c"
) -> list[Message]:
    """Take and ack until nothing is left; return the messages."""
    done: list[Message] = []
    while batch := take(conn, queue, worker, count, consumer=consumer):
        done += batch
        for batch_id in {m.batch_id for m in batch}:
            assert ack(conn, batch_id) == 1
    return done


def outcome(conn: Connection, call: str, batch_id: int, ids: list[int], *args: Any) -> dict[int, Any]:
    """Call ack, nack, dead or archive with ids; return {msg_id: reason}, where None is a success."""
    more = ", %s" * len(args)
    found = rows(
        conn,
        f"select o.msg_id, o.ok, o.reason from pgque.{call}(%s, %s::bigint[]{more}) as o",
        batch_id,
        ids,
        *args,
    )
    assert len({f[0] for f in found}) == len(found)
    for _, ok, reason in found:
        assert ok is (reason is None)
    return {f[0]: f[2] for f in found}


def release(conn: Connection, batch_id: int, ids: list[int] | None = None) -> int:
    """Hand a batch, or some of its messages, back."""
    result: int = value(conn, "select pgque.release(%s, %s::bigint[])", batch_id, ids)
    return result


def extend(conn: Connection, batch_id: int, by: str) -> int:
    """Prolong the lease of a batch."""
    result: int = value(conn, "select pgque.extend(%s, %s::interval)", batch_id, by)
    return result


def set_visibility(conn: Connection, batch_id: int, to: str) -> int:
    """Let the lease of a batch end so long from now."""
    result: int = value(conn, "select pgque.set_visibility(%s, %s::interval)", batch_id, to)
    return result


_TYPES = {
    "payload": "text",
    "headers": "jsonb",
    "key": "text",
    "delay": "interval",
    "deliver_at": "timestamptz",
    "ttl": "interval",
    "partition_key": "text",
}


def post(conn: Connection, queue: str, payload: Any = "x", type_name: str = "default", **options: Any) -> int:
    """Send one message with the named options of send(); bytes go as bytea."""
    kind = "bytea" if isinstance(payload, bytes) else "text"
    named = "".join(f", {name} => %s::{_TYPES[name]}" for name in options)
    result: int = value(
        conn,
        f"select pgque.send(%s, %s, %s::{kind}{named})",
        queue,
        type_name,
        payload,
        *options.values(),
    )
    return result


def status(conn: Connection, queue: str, msg_id: int) -> dict[str, str]:
    """Tell the status of a message for each consumer, from message_status()."""
    return dict(
        rows(
            conn,
            "select s.consumer_name, s.status from pgque.message_status(%s, %s) as s",
            queue,
            msg_id,
        )
    )


def dead_letters(conn: Connection, queue: str) -> dict[int, str]:
    """Tell the reason of each dead letter of a queue, by message id."""
    return dict(rows(conn, "select d.ev_id, d.dl_reason from pgque.dlq_inspect(%s, 100000) as d", queue))


def row_counts(conn: Connection) -> dict[str, int]:
    """Count the rows of every table of the schema that has some."""
    names = column(
        conn,
        "select c.relname from pg_class as c"
        " where c.relnamespace = 'pgque'::regnamespace and c.relkind = 'r' order by c.relname",
    )
    counts = {name: int(value(conn, f'select count(*) from pgque."{name}"')) for name in names}
    return {name: count for name, count in counts.items() if count}


def figure(conn: Connection, metric: str, queue: str) -> float:
    """Sum a metric of a queue over its consumers."""
    return float(
        value(
            conn,
            "select coalesce(sum(m.value), 0) from pgque.metrics() as m where m.metric ~ %s and m.queue = %s",
            metric,
            queue,
        )
    )


def tries(connection: Connection, queue: str, calls: list[str]) -> dict[str, str | None]:
    """Call each; return the SQLSTATE of each, None where it worked."""
    found: dict[str, str | None] = {}
    for call in calls:
        try:
            connection.execute(call.format(q=f"'{queue}'").encode())
            found[call] = None
        except psycopg.Error as error:
            found[call] = error.sqlstate
    return found
