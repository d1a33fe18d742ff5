"""Every error: its SQLSTATE, a message that names the object, a hint."""

from __future__ import annotations

import pytest

from sql.helpers import Connection, ack, forced_tick, refused, rows, send, subscribe, tick, value

UNKNOWN_QUEUE = [
    "pgque.send({q}, 'x'::text)",
    "pgque.send({q}, '{{}}'::jsonb)",
    "pgque.send({q}, 't', 'x'::text)",
    "pgque.send({q}, 't', 'x'::text, 'k')",
    "pgque.send_batch({q}, array['x'])",
    "pgque.send_batch({q}, 't', array['1']::jsonb[])",
    "pgque.send_idem({q}, 't', 'x'::text, 'k')",
    "pgque.insert_event({q}, 't', 'x')",
    "pgque.insert_event({q}, 't', 'x', null, null, null, null)",
    "pgque.current_event_table({q})",
    "pgque.subscribe({q}, 'c')",
    "pgque.subscribe({q}, 'c', 'latest')",
    "pgque.register_consumer({q}, 'c')",
    "pgque.register_consumer_at({q}, 'c', 1)",
    "pgque.unsubscribe({q}, 'c')",
    "pgque.unregister_consumer({q}, 'c')",
    "pgque.receive({q}, 'c')",
    "pgque.receive_coop({q}, 'c', 'w')",
    "pgque.next_batch({q}, 'c')",
    "pgque.next_batch_info({q}, 'c')",
    "pgque.next_batch_custom({q}, 'c', null, null, null)",
    "pgque.next_batch({q}, 'c', 'w')",
    "pgque.next_batch_custom({q}, 'c', 'w', null, null, null, '1 s')",
    "pgque.register_subconsumer({q}, 'c', 'w')",
    "pgque.unregister_subconsumer({q}, 'c', 'w')",
    "pgque.touch_subconsumer({q}, 'c', 'w')",
    "pgque.peek({q})",
    "pgque.drop_queue({q})",
    "pgque.set_queue_config({q}, 'max_retries', '1')",
    "pgque.alter_queue({q}, '{{}}')",
    "pgque.queue_config({q})",
    "pgque.pause({q})",
    "pgque.resume({q})",
    "pgque.ticker({q})",
    "pgque.ticker({q}, 1::bigint, now(), 1::bigint)",
    "pgque.force_next_tick({q})",
    "pgque.force_tick({q})",
    "pgque.maint_rotate_tables_step1({q})",
    "pgque.get_queue_info({q})",
    "pgque.get_consumer_info({q})",
    "pgque.dlq_inspect({q})",
    "pgque.dlq_replay_all({q})",
    "pgque.dlq_requeue_all({q})",
    "pgque.dlq_purge({q})",
]


def test_an_unknown_queue_is_named(conn: Connection) -> None:
    for call in UNKNOWN_QUEUE:
        error = refused("PQ001", rows, conn, "select * from " + call.format(q="'No such queue'"))
        assert "queue not found" in str(error), call
        assert "No such queue" in str(error), call


UNKNOWN_CONSUMER = [
    "pgque.receive({q}, 'Nobody')",
    "pgque.next_batch({q}, 'Nobody')",
    "pgque.next_batch_info({q}, 'Nobody')",
    "pgque.next_batch_custom({q}, 'Nobody', null, null, null)",
    "pgque.touch_subconsumer({q}, 'Nobody', 'w')",
    "pgque.unregister_subconsumer({q}, 'Nobody', 'w')",
    "pgque.peek({q}, 1, 'Nobody')",
    "pgque.get_consumer_info({q}, 'Nobody')",
]


def test_an_unknown_consumer_is_named_with_its_queue(conn: Connection, queue: str) -> None:
    for call in UNKNOWN_CONSUMER:
        error = refused("PQ011", rows, conn, "select * from " + call.format(q=f"'{queue}'"))
        assert "not subscriber to queue" in str(error), call
        assert "Nobody" in str(error), call
        assert queue in str(error), call


UNKNOWN_BATCH = [
    "pgque.get_batch_events({b})",
    "pgque.get_batch_info({b})",
    "pgque.get_batch_cursor({b}, 'c', 1)",
    "pgque.get_batch_cursor({b}, 'c', 1, 'true')",
    "pgque.event_retry({b}, 1, 1)",
    "pgque.event_retry({b}, 1, now())",
    "pgque.batch_retry({b}, 1)",
    "pgque.nack({b}, null::pgque.message)",
    "pgque.nack({b}, null::pgque.delivery)",
]


@pytest.mark.parametrize("batch", ["4711", "0", "-1", "null", str(2**63 - 1)])
def test_an_unknown_batch_is_named(conn: Connection, batch: str) -> None:
    for call in UNKNOWN_BATCH:
        error = refused("PQ012", rows, conn, "select * from " + call.format(b=f"{batch}::bigint"))
        assert "batch not found" in str(error), call
        assert batch in str(error), call


def test_what_is_no_dead_letter_is_named(conn: Connection) -> None:
    for call in ("dlq_replay", "dlq_requeue"):
        for dl_id in ("4711", "null"):
            error = refused("PQ008", rows, conn, f"select pgque.{call}({dl_id})")
            assert dl_id in str(error)


def test_a_queue_with_consumers_is_dropped_only_with_force(conn: Connection, queue: str) -> None:
    subscribe(conn, queue)
    error = refused("PQ006", rows, conn, "select pgque.drop_queue(%s)", queue)
    assert queue in str(error)
    send(conn, queue)
    assert tick(conn, queue) is not None
    assert value(conn, "select pgque.drop_queue(%s, true)", queue) == 1
    refused("PQ001", send, conn, queue)


def test_a_queue_without_consumers_is_dropped_without_force(conn: Connection, queue: str) -> None:
    assert value(conn, "select pgque.drop_queue(%s)", queue) == 1


def test_negative_delays_are_refused(conn: Connection, queue: str) -> None:
    subscribe(conn, queue)
    send(conn, queue)
    tick(conn, queue)
    batch = value(conn, "select batch_id from pgque.receive(%s, 'c')", queue)
    for call in (
        "select pgque.nack(%s, array[1::bigint], '-1 s')",
        "select pgque.batch_retry(%s, -1)",
    ):
        error = refused("PQ005", rows, conn, call, batch)
        assert str(batch) in str(error)


def test_creating_and_subscribing_again_is_no_error(conn: Connection, queue: str) -> None:
    assert value(conn, "select pgque.create_queue(%s)", queue) == 0
    assert subscribe(conn, queue) == 1
    assert subscribe(conn, queue) == 0
    assert value(conn, "select pgque.register_consumer(%s, 'c')", queue) == 0


def test_a_null_argument_gets_an_error_that_names_it(conn: Connection, subscribed: str) -> None:
    refused("PQ005", value, conn, "select pgque.receive(null, 'c', null)")
    refused("PQ004", value, conn, "select pgque.register_subconsumer(%s, null, null)", subscribed)
    send(conn, subscribed)
    forced_tick(conn, subscribed)
    batch = value(conn, "select pgque.next_batch(%s, 'c')", subscribed)
    refused("PQ005", value, conn, "select pgque.get_batch_cursor(%s, 'x', null)", batch)
    assert ack(conn, batch) == 1
    refused("PQ012", value, conn, "select pgque.batch_retry(%s, 0)", batch)


def test_a_null_schedule_restores_the_default(own: Connection) -> None:
    value(own, "select pgque.set_schedule('expire', '5 minutes')")
    assert value(own, "select pgque.set_schedule('expire', null)") == "00:01:00"
    assert value(own, "select pgque.set_schedule('expire', '')") == ""
    assert value(own, "select pgque.set_schedule('delete_expired', null)") == ""
    refused("PQ005", value, own, "select pgque.set_schedule(null, null)")
