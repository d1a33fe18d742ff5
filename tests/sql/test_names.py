"""Names are data: any text of 1 to 57 bytes is a queue, any text a consumer or a worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sql.helpers import (
    Connection,
    ack,
    column,
    configure,
    drain,
    forced_tick,
    nack,
    payloads,
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

NAMES = [
    "with space",
    "MixedCase",
    'double"quote',
    "single'quote",
    "semi;colon",
    "back\\slash",
    "per%cent %s %I",
    "$1 $$ :x",
    "dot.ted.name",
    "tab\tnew\nline",
    "ü" * 28 + "x",
    "漢" * 19,
    "😀" * 14,
    "n" * 57,
    "x'); drop schema pgque cascade; --",
    'x"; drop schema pgque cascade; --',
    "{}",
    "queue",
    "select",
    "0",
    " ",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_lives_a_whole_life(
    conn: Connection,
    connect: Callable[..., Connection],
    new_queue: Callable[[str], str],
    name: str,
) -> None:
    new_queue(name)
    assert value(conn, "select pgque.create_queue(%s)", name) == 0
    assert subscribe(conn, name, name) == 1
    assert subscribe(conn, name, name) == 0
    assert value(conn, "select pgque.subscribe(%s, 'other', 'earliest')", name) == 1
    configure(conn, name, max_retries=0)
    listener = connect()
    listener.execute(value(conn, "select format('listen %%I', 'pgque_' || %s)", name).encode())
    sent = [
        send(conn, name, name),
        *send_many(conn, name, 2),
        value(conn, "select pgque.insert_event(%s, %s, %s)", name, name, name),
        value(conn, "select event_id from pgque.send_idem(%s, %s, %s::text, %s)", name, name, name, name),
    ]
    made = tick(conn, name)
    (note,) = listener.notifies(timeout=10, stop_after=1)
    assert (note.channel, note.payload) == (f"pgque_{name}", str(made))
    assert column(conn, "select payload from pgque.peek(%s, 10, 'other')", name) == [
        name,
        "1",
        "2",
        name,
        name,
    ]
    batch = receive(conn, name, name)
    assert [m.msg_id for m in batch] == sent
    assert {m.queue for m in batch} == {name}
    info = rows(
        conn,
        "select queue_name, consumer_name, prev_tick_id, tick_id from pgque.get_batch_info(%s)",
        batch[0].batch_id,
    )
    assert info[0][:2] == (name, name)
    assert nack(conn, batch[0], "0", name) == 1
    assert [m.msg_id for m in receive(conn, name, name)] == sent[1:]
    ack(conn, batch[0].batch_id)
    ((dl_id, reason),) = rows(conn, "select dl_id, dl_reason from pgque.dlq_inspect(%s)", name)
    assert reason == name
    value(conn, "select pgque.dlq_requeue(%s)", dl_id)
    pump(conn)
    tick(conn, name)
    assert payloads(conn, name, name) == [name]
    assert drain(conn, name, "other") == sent
    ((queue_name, last_tick),) = rows(
        conn, "select queue_name, last_tick_id from pgque.get_queue_info(%s)", name
    )
    assert queue_name == name
    assert value(conn, "select consumer_name from pgque.get_consumer_info(%s, %s)", name, name) == name
    assert rows(conn, "select * from pgque.queue_config(%s)", name)
    assert value(conn, "select count(*) from pgque.health() where queue = %s", name) > 0
    assert value(conn, "select count(*) from pgque.metrics() where queue = %s", name) > 0
    value(conn, "select pgque.register_consumer_at(%s, %s, %s)", name, name, last_tick)
    value(conn, "select pgque.pause(%s)", name)
    error = refused("PQ013", send, conn, name)
    assert name.strip() in str(error).replace('""', '"')
    value(conn, "select pgque.resume(%s)", name)
    assert rotate(conn, name) == 1
    value(conn, "select pgque.maint()")
    value(conn, "select pgque.register_subconsumer(%s, %s, %s, true)", name, name, name)
    send(conn, name, "last")
    tick(conn, name)
    (message,) = receive_coop(conn, name, name, consumer=name)
    value(conn, "select pgque.touch_subconsumer(%s, %s, %s)", name, name, name)
    ack(conn, message.batch_id)
    forced_tick(conn, name)
    assert value(conn, "select pgque.unregister_subconsumer(%s, %s, %s)", name, name, name) == 1
    assert value(conn, "select pgque.unsubscribe(%s, %s)", name, name) == 1
    error = refused("PQ006", rows, conn, "select pgque.drop_queue(%s)", name)
    assert value(conn, "select pgque.drop_queue(%s, true)", name) == 1
    error = refused("PQ001", send, conn, name)
    assert "queue not found" in str(error)
    assert value(conn, "select pgque.version()")


@pytest.mark.parametrize("name", ["", "n" * 58, "ü" * 29, None])
def test_a_queue_name_of_no_or_too_many_bytes_is_refused(conn: Connection, name: str | None) -> None:
    refused("PQ004", rows, conn, "select pgque.create_queue(%s)", name)


@pytest.mark.parametrize("name", ["", "n" * 1001, None])
def test_a_consumer_or_worker_name_of_no_or_too_many_bytes_is_refused(
    conn: Connection, subscribed: str, name: str | None
) -> None:
    refused("PQ004", rows, conn, "select pgque.subscribe(%s, %s)", subscribed, name)
    refused("PQ004", rows, conn, "select pgque.register_subconsumer(%s, 'c', %s, true)", subscribed, name)


def test_names_that_differ_in_case_or_space_are_different(
    conn: Connection, new_queue: Callable[[str], str]
) -> None:
    for name in ("case", "CASE", "case "):
        new_queue(name)
        subscribe(conn, name)
        send(conn, name, name)
        tick(conn, name)
    for name in ("case", "CASE", "case "):
        assert payloads(conn, name) == [name]


def test_a_dropped_name_can_be_used_again_at_once(conn: Connection, subscribed: str) -> None:
    send(conn, subscribed)
    value(conn, "select pgque.drop_queue(%s, true)", subscribed)
    assert value(conn, "select pgque.create_queue(%s)", subscribed) == 1
    refused("PQ011", receive, conn, subscribed)
    subscribe(conn, subscribed)
    new = send(conn, subscribed)
    tick(conn, subscribed)
    assert drain(conn, subscribed) == [new]
