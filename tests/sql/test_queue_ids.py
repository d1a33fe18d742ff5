"""A queue has an id for life: it serves wherever its name does, and renaming keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    forward_letters,
    ids,
    nack,
    offer,
    outcome,
    post,
    refused,
    rows,
    send,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)

# Every call that takes a queue, in an order that works; {q} is the queue.
CALLS = [
    "select pgque.set_queue_config({q}, 'max_retries', '3')",
    "select pgque.alter_queue({q}, '{{\"max_retries\": 4}}'::jsonb)",
    "select pgque.queue_config({q})",
    "select pgque.subscribe({q}, 'd')",
    "select pgque.subscribe({q}, 'e', 'earliest')",
    "select pgque.register_consumer({q}, 'f')",
    "select pgque.send({q}, 'x'::text)",
    "select pgque.send({q}, '1'::jsonb)",
    "select pgque.send({q}, 't', 'x'::text)",
    "select pgque.send({q}, 't', '1'::jsonb)",
    "select pgque.send({q}, 't', '\\x00'::bytea, key => 'k')",
    "select pgque.send({q}, 't', 'x'::text, 'p')",
    "select pgque.send_batch({q}, array['x'])",
    "select pgque.send_batch({q}, 't', array['1'::jsonb])",
    "select pgque.send_batch({q}, 't', array['a'::bytea])",
    "select * from pgque.send_idem({q}, 't', 'x'::text, 'idem')",
    "select pgque.insert_event({q}, 't', 'x')",
    "select pgque.current_event_table({q})",
    "select pgque.force_next_tick({q})",
    "select pgque.force_tick({q})",
    "select pgque.ticker({q})",
    "select * from pgque.peek({q}, 3)",
    "select * from pgque.receive({q}, 'c', 1, worker => 'w')",
    "select * from pgque.receive({q}, 'd', 1)",
    "select * from pgque.receive_coop({q}, 'g', 'w', 1)",
    "select pgque.touch_subconsumer({q}, 'g', 'w')",
    "select pgque.register_subconsumer({q}, 'g', 'v')",
    "select pgque.unregister_subconsumer({q}, 'g', 'v', 1)",
    "select * from pgque.next_batch_info({q}, 'f')",
    "select * from pgque.list_workers({q})",
    "select * from pgque.list_workers({q}, 'c')",
    "select pgque.reclaim({q}, 'c')",
    "select pgque.retry_now({q}, 'c')",
    "select * from pgque.list_poison({q})",
    "select pgque.archive_poison({q})",
    "select * from pgque.dlq_inspect({q})",
    "select * from pgque.dlq_inspect({q}, reason => 'x', before_id => 9)",
    "select pgque.dlq_requeue_all({q}, 10)",
    "select * from pgque.dlq_replay_all({q})",
    "select pgque.dlq_purge({q})",
    "select * from pgque.list_messages({q})",
    "select * from pgque.list_messages({q}, only_type => 't', after_id => 0)",
    "select * from pgque.archive_list({q})",
    "select * from pgque.archive_list({q}, only_type => 't', until => now())",
    "select pgque.archive_purge({q}, now() - interval '1 year')",
    "select pgque.expire_messages({q})",
    "select pgque.delete_expired({q})",
    "select * from pgque.get_queue_info({q})",
    "select * from pgque.get_consumer_info({q})",
    "select * from pgque.get_consumer_info({q}, 'c')",
    "select * from pgque.health({q})",
    "select * from pgque.metrics({q})",
    "select * from pgque.overview({q})",
    "select pgque.pause({q})",
    "select pgque.resume({q})",
    "select pgque.maint_rotate_tables_step1({q})",
    "select pgque.grant_queue({q}, '{role}', 'consume')",
    "select pgque.revoke_queue({q}, '{role}')",
    "select pgque.purge_key({q}, 'k')",
    "select * from pgque.message_history({q}, 1)",
    "select pgque.cancel({q}, 1)",
    "select pgque.share_consumer({q}, 'd')",
    "select pgque.set_key_concurrency({q}, 'd', null)",
    "select pgque.unshare_consumer({q}, 'd')",
    "select pgque.purge({q})",
    "select pgque.unsubscribe({q}, 'f')",
    "select pgque.unregister_consumer({q}, 'd')",
    "select pgque.rename_queue({q}, 'other name')",
    "select pgque.rename_queue({q}, 'q')",
    "select pgque.drop_queue({q}, true)",
]


def uid(conn: Connection, queue: str = "q") -> str:
    """The id of a queue."""
    return str(value(conn, "select q.queue_uid from pgque.queue as q where q.queue_name = %s", queue))


@pytest.mark.parametrize("upper", [False, True])
def test_the_id_of_a_queue_serves_wherever_its_name_does(own: Connection, nobody: Any, upper: bool) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    name = uid(own)
    if upper:
        name = name.upper()
    for call in CALLS:
        rows(own, call.format(q=f"'{name}'", role=nobody.name))
    assert rows(own, "select * from pgque.queue") == []


def test_every_function_that_takes_a_queue_takes_its_id(own: Connection) -> None:
    """No function is left out of the list above."""
    found = rows(
        own,
        "select distinct p.proname from pg_proc as p"
        " where p.pronamespace = 'pgque'::regnamespace and p.proname !~ '^_' and p.prokind = 'f'"
        " and p.proargnames[1] ~ '^(i_|p_)?queue(_name)?$'"
        " and (p.proargmodes is null or p.proargmodes[1] = 'i') and p.proargtypes[0] = 'text'::regtype",
    )
    listed = {call.split("pgque.")[1].split("(")[0] for call in CALLS}
    # Same argument, and a test of its own elsewhere or the same look-up as a listed one.
    same = {
        "create_queue",
        "seek",
        "next_batch",
        "next_batch_custom",
        "register_consumer_at",
        "subscribe_subconsumer",
        "unsubscribe_subconsumer",
        "message_status",
        "get_message",
        "tick_for",
        "seek_to_time",
        "next_tick",
        "next_window",
        "queue_incarnation",
        "read_window",
        "sink_commit",
        "maint_retain",
        "split_window",
        "open_stream",
        "stream_lag",
        "stage_dead",
        "unstage_dead",
        "subscribe_archive",
        "archive_of",
        "archive_next",
        "archive_read",
        "archive_read_cursor",
        "queue_settings",
        "dlq_reasons",
        "queue_rates",
        "consumer_lags",
        "history",
        "list_actions",  # by the name that the queue had
        "dead",  # of a reader that keeps its own offsets
    }
    missing = {f[0] for f in found} - listed - same
    assert missing == set()


def test_an_id_that_belongs_to_no_queue_is_no_queue(conn: Connection) -> None:
    other = value(conn, "select gen_random_uuid()::text")
    assert "queue not found" in str(refused("PQ001", send, conn, other))


def test_an_id_is_shown_wherever_queues_are_listed(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    assert str(value(own, "select i.queue_uid from pgque.get_queue_info() as i")) == uid(own)
    assert str(value(own, "select i.queue_uid from pgque.get_queue_info('q') as i")) == uid(own)


def test_a_message_names_its_queue_also_to_those_who_ask_by_id(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for consumer in ("alone", "pool"):
        subscribe(own, "q", consumer)
    value(own, "select pgque.register_subconsumer('q', 'group', 'w')")
    send(own, "q")
    tick(own, "q")
    for call in (
        "receive(%s, 'alone')",
        "receive(%s, 'pool', worker => 'w')",
        "receive_coop(%s, 'group', 'w')",
    ):
        assert rows(own, f"select m.queue from pgque.{call} as m", uid(own)) == [("q",)]


@pytest.mark.parametrize("how", ["create", "rename"])
def test_a_name_that_is_the_id_of_another_queue_captures_nothing(own: Connection, how: str) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    value(own, "select pgque.create_queue('thief')")
    name = uid(own)
    if how == "create":
        error = refused("PQ004", value, own, "select pgque.create_queue(%s)", name)
    else:
        error = refused("PQ004", value, own, "select pgque.rename_queue('thief', %s)", name)
    assert name in str(error)
    send(own, name)
    tick(own, "q")
    assert len(take(own, "q")) == 1


def test_renaming_keeps_the_id_the_messages_the_consumers_and_their_batches(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    before = uid(own)
    sent = offer(own, "q", 5)
    (a, b) = take(own, "q", "w1", 2)
    nack(own, a, "0", "again")
    assert value(own, "select pgque.rename_queue('q', 'r')") == 1
    assert uid(own, "r") == before
    refused("PQ001", send, own, "q")
    refused("PQ001", take, own, "q")
    assert outcome(own, "ack", b.batch_id, [b.msg_id]) == {b.msg_id: None}
    settle(own, "r")
    got = work_off(own, "r", "w2")
    assert sorted(ids(got)) == [sent[0], *sent[2:]]
    assert {m.queue for m in got} == {"r"}
    later = send(own, before)
    tick(own, "r")
    assert ids(work_off(own, "r")) == [later]


def test_a_session_that_sent_before_the_rename_sends_on_by_the_new_name(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    other = connect(own_dsn)
    for _ in range(7):  # past the point where plans become generic
        send(other, "q")
    value(own, "select pgque.rename_queue('q', 'r')")
    refused("PQ001", send, other, "q")
    send(other, "r")
    tick(own, "r")
    assert len(work_off(other, "r")) == 8


def test_a_name_that_is_taken_or_bad_is_refused(own: Connection) -> None:
    for name in ("q", "r"):
        value(own, "select pgque.create_queue(%s)", name)
    call = "select pgque.rename_queue(%s, %s)"
    refused("PQ002", value, own, call, "q", "r")
    for bad in ("", "n" * 58, None):
        error = refused("PQ004", value, own, call, "q", bad)
        assert error
    refused("PQ001", value, own, call, "nobody", "x")
    assert uid(own, "q") != uid(own, "r")


def test_a_queue_dropped_and_made_again_has_another_id(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    before = uid(own)
    value(own, "select pgque.drop_queue('q')")
    value(own, "select pgque.create_queue('q')")
    assert uid(own) != before
    refused("PQ001", send, own, before)


def test_notifications_follow_the_new_name(
    own: Connection, own_dsn: str, connect: Callable[..., Connection]
) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.rename_queue('q', 'r')")
    ear = connect(own_dsn)
    ear.execute("listen pgque_r")
    send(own, "r")
    tick_id = tick(own, "r")
    got = list(ear.notifies(timeout=30, stop_after=1))
    assert [n.payload for n in got] == [str(tick_id)]


@pytest.mark.parametrize("state", ["in flight", "delayed", "retry", "consumer only"])
def test_a_queue_in_use_is_dropped_only_with_force(own: Connection, state: str) -> None:
    value(own, "select pgque.create_queue('q')")
    if state == "delayed":
        post(own, "q", delay="1 hour")
    else:
        subscribe(own, "q")
    if state in ("in flight", "retry"):
        offer(own, "q", 1)
        (message,) = take(own, "q")
        if state == "retry":
            nack(own, message, "1 hour")
    error = refused("PQ006", value, own, "select pgque.drop_queue('q')")
    assert "q" in str(error)
    refused("PQ006", value, own, "select pgque.drop_queue('q', false)")
    assert value(own, "select pgque.drop_queue('q', true)") == 1
    value(own, "select pgque.create_queue('q')")
    assert value(own, "select pgque.drop_queue('q')") == 1


def test_a_queue_whose_messages_are_all_done_is_still_its_consumers(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    offer(own, "q", 3)
    work_off(own, "q")
    refused("PQ006", value, own, "select pgque.drop_queue('q')")
    value(own, "select pgque.unsubscribe('q', 'c')")
    assert value(own, "select pgque.drop_queue('q', true)") == 1


def test_settings_follow_the_queue_through_a_rename(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", max_depth=1, dead_letter_queue="q.dlq")
    value(own, "select pgque.rename_queue('q', 'r')")
    subscribe(own, "r")
    send(own, "r")
    refused("PQ003", send, own, "r")
    tick(own, "r")
    (message,) = take(own, "r")
    outcome(own, "dead", message.batch_id, [message.msg_id], "x")
    forward_letters(own)
    found: list[Any] = rows(own, "select * from pgque.peek('q.dlq', 5)")
    assert len(found) == 1
    assert ack(own, message.batch_id) in (0, 1)
