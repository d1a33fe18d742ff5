"""Receiving in slices, again, at once, and windows of every shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    drain,
    forced_tick,
    leaf,
    nack_ids,
    payloads,
    receive,
    refused,
    rotate,
    rows,
    send,
    send_many,
    slices,
    subscribe,
    tick,
    value,
)


def test_an_open_batch_is_redelivered_with_its_id_and_messages_whatever_max_return_is(
    conn: Connection, subscribed: str
) -> None:
    send_many(conn, subscribed, 10)
    tick(conn, subscribed)
    first = receive(conn, subscribed, count=4)
    send_many(conn, subscribed, 10)
    tick(conn, subscribed)
    for count in (1, 4, 1000):
        again = receive(conn, subscribed, count=count)
        assert [(m.batch_id, m.msg_id) for m in again] == [(m.batch_id, m.msg_id) for m in first]


def test_nothing_to_receive_is_no_batch(conn: Connection, subscribed: str) -> None:
    assert receive(conn, subscribed) == []
    for _ in range(3):
        forced_tick(conn, subscribed)
        assert receive(conn, subscribed) == []
    assert value(conn, "select i.current_batch from pgque.get_consumer_info(%s) as i", subscribed) is None


def test_empty_windows_are_skipped_within_one_call(conn: Connection, subscribed: str) -> None:
    for _ in range(150):
        forced_tick(conn, subscribed)
    sent = [send(conn, subscribed)]
    tick(conn, subscribed)
    assert [m.msg_id for m in receive(conn, subscribed)] == sent


SIZES = [400, 400, 400, 5000, 100, 900, 1, 1]
BATCHES = [[400, 400], [400], [5000], [100, 900], [1, 1]]


@pytest.mark.parametrize("kind", ["text", "bytes", "big window", "ttl", "key", "keyed order", "retry"])
@pytest.mark.parametrize("call", ["receive(%s, 'c', 100, max_bytes => 1000)", "receive_coop(%s, 'c', 'w', max_bytes => 1000)",
    "receive(%s, 'c', 2000, worker => 'w', max_bytes => 1000)"])  # fmt: skip
def test_a_batch_ends_before_max_bytes_and_has_at_least_one_message(
    conn: Connection, queue: str, kind: str, call: str
) -> None:
    if "coop" in call:
        value(conn, "select pgque.register_subconsumer(%s, 'c', 'w')", queue)
    else:
        pool = "worker" in call
        value(
            conn,
            f"select pgque.subscribe(%s, 'c'{', keyed_order => true' * (pool and kind == 'keyed order')})",
            queue,
        )
    body = "convert_to(repeat('x', %s), 'UTF8')" if kind == "bytes" else "repeat('x', %s)"
    more = {
        "ttl": ", ttl => '1 hour'",
        "key": ", key => g::text",
        "keyed order": ", partition_key => g::text",
    }.get(kind, "")
    for number, size in enumerate(SIZES):
        sent = f"select pgque.send(%s, 't', {body}{more.replace('g::text', repr(str(number)))})"
        value(conn, sent, queue, size)
    if kind == "big window":
        send_many(conn, queue, 20_000)
    tick(conn, queue)
    if kind == "retry":
        taken = rows(conn, f"select batch_id, msg_id from pgque.{call.replace('1000', '100000')}", queue)
        ids = [msg_id for _, msg_id in taken]
        assert rows(conn, "select bool_and(ok) from pgque.nack(%s, %s, '0')", taken[0][0], ids) == [(True,)]
        ack(conn, taken[0][0])
    found: list[list[int]] = []
    while batch := rows(
        conn, f"select batch_id, coalesce(length(payload), length(payload_bytes)) from pgque.{call}", queue
    ):
        found.append([size for _, size in batch])
        assert ack(conn, batch[0][0]) == 1
        if len(found) == len(BATCHES):
            break
    assert found[:4] == BATCHES[:4] and found[4][:2] == BATCHES[4]


def test_max_bytes_below_one_is_refused(conn: Connection, subscribed: str) -> None:
    refused("PQ005", rows, conn, "select * from pgque.receive(%s, 'c', max_bytes => 0)", subscribed)


def test_a_window_is_in_the_order_of_ids_not_of_transactions(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    early = transaction()
    early.execute("select pg_current_xact_id()")
    late = transaction()
    send(late, subscribed, "first")
    late.execute("commit")
    send(early, subscribed, "second")
    early.execute("commit")
    tick(conn, subscribed)
    assert payloads(conn, subscribed, count=1) == ["first", "second"]


def test_send_tick_and_receive_in_one_transaction_lose_nothing(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    one = transaction()
    sent = [send(one, subscribed)]
    forced_tick(one, subscribed)
    assert receive(one, subscribed) == []
    sent.append(send(one, subscribed))
    forced_tick(one, subscribed)
    assert receive(one, subscribed) == []
    one.execute("commit")
    tick(conn, subscribed)
    assert drain(conn, subscribed) == sent


@pytest.mark.slow  # 200,000 messages
def test_a_window_of_200000_messages_is_delivered_in_slices_in_order(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    producer = connect(autocommit=False)
    sent: list[int] = []
    for _ in range(4):
        sent += send_many(producer, subscribed, 50_000)
    producer.commit()
    tick(conn, subscribed)
    assert drain(conn, subscribed, count=500) == sent


def test_a_big_window_with_holes_and_later_commits_is_delivered_whole(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    producers = [transaction() for _ in range(3)]
    kept: list[int] = []
    for step in range(30):
        ids = send_many(producers[step % 3], subscribed, 300)
        if step % 3 != 1:
            kept += ids
    producers[1].execute("rollback")
    producers[0].execute("commit")
    producers[2].execute("commit")
    tick(conn, subscribed)
    for number, batch in enumerate(slices(conn, subscribed, count=700)):
        assert [m.msg_id for m in batch] == kept[number * 700 : number * 700 + 700]
    assert number == (len(kept) - 1) // 700


def test_a_table_rewritten_by_vacuum_full_between_two_slices_loses_nothing(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    gone = transaction()
    send_many(gone, subscribed, 5_000)
    gone.execute("rollback")
    sent = send_many(conn, subscribed, 15_000)
    tick(conn, subscribed)
    got: list[int] = []
    for number, batch in enumerate(slices(conn, subscribed, count=500)):
        got += [m.msg_id for m in batch]
        if number in (4, 9):
            conn.execute(f"vacuum full {leaf(conn, subscribed)}".encode())
    assert got == sent


def test_a_slice_in_the_middle_of_a_big_window_can_be_received_again_and_nacked(
    conn: Connection, subscribed: str
) -> None:
    sent = send_many(conn, subscribed, 9_000)
    tick(conn, subscribed)
    got: list[int] = []
    for number, batch in enumerate(slices(conn, subscribed, count=1_000)):
        if number == 5:
            assert receive(conn, subscribed, count=1) == batch
            nack_ids(conn, batch[0].batch_id, [batch[3].msg_id], after="1 hour")
            rest = receive(conn, subscribed)
            assert [m.msg_id for m in rest] == [m.msg_id for m in batch if m.msg_id != batch[3].msg_id]
        got += [m.msg_id for m in batch]
    assert got == sent


def test_two_consumers_and_maintenance_share_a_big_window(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    subscribe(conn, subscribed, "other")
    sent = send_many(conn, subscribed, 8_000)
    tick(conn, subscribed)
    got: dict[str, list[int]] = {"c": [], "other": []}
    for step in range(16):
        for consumer in got:
            batch = receive(conn, subscribed, consumer, 600)
            if batch:
                got[consumer] += [m.msg_id for m in batch]
                ack(conn, batch[0].batch_id)
        if step % 3 == 0:
            value(conn, "select pgque.maint()")
    assert got == {"c": sent, "other": sent}


def test_a_receive_that_finishes_a_batch_archives_it_where_acks_do(conn: Connection, subscribed: str) -> None:
    configure(conn, subscribed, archive_on_ack="true")
    sent = send_many(conn, subscribed, 3)
    tick(conn, subscribed)
    first = receive(conn, subscribed, count=2)
    assert [m.msg_id for m in receive(conn, subscribed, ack_batch=first[0].batch_id)] == sent[2:]
    assert (
        value(conn, "select array_agg(msg_id order by msg_id) from pgque.archive_list(%s)", subscribed)
        == sent[:2]
    )


def test_two_consumers_that_map_one_window_at_once_both_get_all_of_it(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    subscribe(conn, subscribed, "d")
    sent = send_many(conn, subscribed, 8000)
    tick(conn, subscribed)
    got: dict[str, list[int]] = {"c": [], "d": []}
    open_ones = {name: transaction() for name in got}
    for name, one in open_ones.items():  # neither sees the other's map
        batch = receive(one, subscribed, name, 50)
        got[name] += [m.msg_id for m in batch]
        ack(one, batch[0].batch_id)
    for one in open_ones.values():
        one.execute("commit")
    for name in got:
        got[name] += drain(conn, subscribed, name, 50)
        assert got[name] == sent


def test_another_table_of_the_queue_may_be_emptied_in_the_middle_of_a_big_window(
    conn: Connection, subscribed: str
) -> None:
    sent = send_many(conn, subscribed, 8000)
    tick(conn, subscribed)
    got: list[int] = []
    for number, batch in enumerate(slices(conn, subscribed, "c", 50)):
        got += [m.msg_id for m in batch]
        if number == 3:
            conn.execute(f"vacuum full {leaf(conn, subscribed, 2)}".encode())
    assert got == sent


def done_by_c_and_failed_by_d(conn: Connection, queue: str) -> None:
    """Tick, and have two consumers take what came."""
    tick(conn, queue)
    for name in ("c", "d"):
        batch = receive(conn, queue, name, 10000)
        if name == "d":
            value(conn, "select pgque.batch_retry(%s, 0)", batch[0].batch_id)
        ack(conn, batch[0].batch_id)


def test_retries_of_another_consumer_in_a_big_window_hide_nothing(conn: Connection, subscribed: str) -> None:
    subscribe(conn, subscribed, "d")
    send_many(conn, subscribed, 3000)
    done_by_c_and_failed_by_d(conn, subscribed)
    value(conn, "select pgque.maint_retry_events()")
    sent = send_many(conn, subscribed, 6000)
    tick(conn, subscribed)
    assert drain(conn, subscribed, "c", 100) == sent
    assert len(drain(conn, subscribed, "d", 100)) == 9000


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 24, 25, 26, 50, 100])
def test_retries_of_another_consumer_between_the_messages_of_a_window_hide_nothing(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], size: int
) -> None:
    subscribe(conn, subscribed, "d")
    late = transaction()
    sent: list[int] = []
    for _ in range(30):
        sent += send_many(late, subscribed, 25)
        send_many(conn, subscribed, 5)
    done_by_c_and_failed_by_d(conn, subscribed)
    rotate(conn, subscribed)  # elsewhere than the messages, whose addresses would lead to all of them
    value(conn, "select pgque.maint_retry_events()")
    late.execute("commit")
    tick(conn, subscribed)
    assert drain(conn, subscribed, "c", size) == sent
    assert len(drain(conn, subscribed, "d", size)) == len(sent) + 150
