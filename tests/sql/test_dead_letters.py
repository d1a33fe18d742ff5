"""Dead letters of workers: where they go, how they come back, poison, backoff."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    column,
    configure,
    dead_letters,
    forced_tick,
    ids,
    move_clock,
    nack,
    nack_ids,
    offer,
    outcome,
    post,
    receive,
    refused,
    rows,
    send,
    send_many,
    settle,
    status,
    subscribe,
    take,
    tick,
    value,
    work_off,
)


def bury(conn: Connection, queue: str, count: int = 1, reason: str = "broken") -> list[int]:
    """Make dead letters by dead(); return their message ids."""
    offer(conn, queue, count)
    batch = take(conn, queue)
    assert len(batch) == count
    assert outcome(conn, "dead", batch[0].batch_id, ids(batch), reason) == dict.fromkeys(ids(batch))
    return ids(batch)


def letter(conn: Connection, queue: str, msg_id: int) -> int:
    """Name the dead letter of a message."""
    return int(
        value(conn, "select d.dl_id from pgque.dlq_inspect(%s) as d where d.ev_id = %s", queue, msg_id)
    )


def test_an_edited_dead_letter_is_requeued_and_the_archive_keeps_what_it_was(
    conn: Connection, subscribed: str
) -> None:
    subscribe(conn, subscribed, "d")
    sent = post(conn, subscribed, '{"to": "nobody"}', "mail", headers='{"trace": "1"}', partition_key="p")
    raw = post(conn, subscribed, b"\x00", "mail")
    tick(conn, subscribed)
    batch = take(conn, subscribed)
    outcome(conn, "dead", batch[0].batch_id, [sent, raw], "no such address")
    edit = "select pgque.dlq_edit(%s, %s, %s, %s)"
    dl_id = letter(conn, subscribed, sent)

    # Headers are checked as those of a send; then nothing has changed.
    refused("PQ005", value, conn, edit, dl_id, "x", None, "[]")
    assert letter(conn, subscribed, sent) == dl_id
    assert value(conn, "select count(*) from pgque.archive_list(%s)", subscribed) == 0

    assert value(conn, edit, dl_id, '{"to": "somebody"}', "mail.again", "{}") == sent
    assert value(conn, edit, letter(conn, subscribed, raw), "text", None, None) == raw
    again = take(conn, subscribed)
    assert [(m.msg_id, m.type, m.payload, m.payload_bytes, m.headers, m.retry_count) for m in again] == [
        (sent, "mail.again", '{"to": "somebody"}', None, {}, 0),
        (raw, "mail", "text", None, None, 0),
    ]
    # Only the consumer that failed it; the other one gets it once, as it was sent.
    assert [m.payload for m in receive(conn, subscribed, "d")] == ['{"to": "nobody"}', None]
    assert rows(
        conn,
        "select msg_id, consumer_name, outcome, payload, payload_bytes, headers, type"
        " from pgque.archive_list(%s) order by msg_id",
        subscribed,
    ) == [
        (sent, "c", "edited", '{"to": "nobody"}', None, {"trace": "1"}, "mail"),
        (raw, "c", "edited", None, b"\x00", None, "mail"),
    ]
    assert (
        value(
            conn,
            "select count(*) from pgque.list_actions(%s) as a where a.call = 'dlq_edit' and a.args->>'msg_id' = %s",
            subscribed,
            str(sent),
        )
        == 1
    )
    refused("PQ008", value, conn, edit, dl_id, "x", None, None)


def test_an_edit_reaches_a_message_that_its_consumer_has_again(conn: Connection, subscribed: str) -> None:
    send(conn, subscribed)
    forced_tick(conn, subscribed)
    [message] = receive(conn, subscribed)
    outcome(conn, "dead", message.batch_id, [message.msg_id], "broken")
    ack(conn, message.batch_id)
    dl_id = letter(conn, subscribed, message.msg_id)
    # Moved back, it failed the message once more, and now a worker has that.
    value(conn, "select pgque.seek(%s, 'c', 1, true)", subscribed)
    [again] = receive(conn, subscribed)
    nack_ids(conn, again.batch_id, [again.msg_id], "0")
    ack(conn, again.batch_id)
    value(conn, "select pgque.share_consumer(%s, 'c')", subscribed)
    [held] = take(conn, subscribed)
    assert value(conn, "select pgque.dlq_edit(%s, 'mended')", dl_id) == message.msg_id
    assert value(conn, "select pgque.ack(%s)", held.batch_id) == 0  # the worker knows only what was wrong
    assert [(m.msg_id, m.payload) for m in take(conn, subscribed)] == [(message.msg_id, "mended")]


def test_one_retry_is_made_due_and_one_lease_is_released(conn: Connection, subscribed: str) -> None:
    sent = offer(conn, subscribed, 4)
    batch = take(conn, subscribed)
    outcome(conn, "nack", batch[0].batch_id, sent[:2], "1 hour", "later")
    now = "select pgque.retry_now(%s, 'c', %s)"
    assert value(conn, now, subscribed, sent[1]) == 1
    assert value(conn, now, subscribed, sent[1]) == 0
    assert value(conn, now, subscribed, sent[2]) == 0  # it is leased
    assert ids(take(conn, subscribed)) == [sent[1]]

    release = "select pgque.reclaim(%s, 'c', msg_id => %s)"
    assert value(conn, release, subscribed, sent[0]) == 0  # no worker has it
    assert value(conn, release, subscribed, sent[2]) == 1
    assert value(conn, release, subscribed, sent[2]) == 0
    assert status(conn, subscribed, sent[3]) == {"c": "processing"}
    assert ids(take(conn, subscribed)) == [sent[2]]
    # The rest of the batch is still the worker's.
    assert outcome(conn, "ack", batch[0].batch_id, [sent[3]]) == {sent[3]: None}
    assert value(conn, "select pgque.reclaim(%s, 'c', '1 hour', %s)", subscribed, sent[2]) == 0  # too young
    noted = rows(
        conn,
        "select a.call, (a.args->>'msg_id')::bigint from pgque.list_actions(%s) as a"
        " where a.call in ('retry_now', 'reclaim') order by a.at",
        subscribed,
    )
    assert noted == [("retry_now", sent[1]), ("reclaim", sent[2])]


def test_a_requeued_dead_letter_keeps_its_id_begins_anew_and_goes_to_its_consumer_only(
    conn: Connection, subscribed: str
) -> None:
    subscribe(conn, subscribed, "d")
    (sent,) = bury(conn, subscribed)
    assert ids(take(conn, subscribed, "w1", consumer="d")) == [sent]
    dl_id = letter(conn, subscribed, sent)
    assert value(conn, "select pgque.dlq_requeue(%s)", dl_id) == sent
    settle(conn, subscribed)
    (again,) = take(conn, subscribed, "w9")
    assert (again.msg_id, again.receive_count, again.retry_count) == (sent, 1, 0)
    assert take(conn, subscribed, "w1", consumer="d") == []
    assert dead_letters(conn, subscribed) == {}
    refused("PQ008", value, conn, "select pgque.dlq_requeue(%s)", dl_id)
    assert ack(conn, again.batch_id) == 1


@pytest.mark.parametrize("dl_id", [0, -1, 10**12, None])
def test_what_is_no_dead_letter_is_not_requeued(conn: Connection, dl_id: int | None) -> None:
    refused("PQ008", value, conn, "select pgque.dlq_requeue(%s::bigint)", dl_id)


def test_a_requeued_message_has_all_its_attempts_again(pool: Connection) -> None:
    configure(pool, "q", max_receive_attempts=2)
    (sent,) = bury(pool, "q")
    value(pool, "select pgque.dlq_requeue(%s)", letter(pool, "q", sent))
    for number in range(1, 5):
        move_clock(pool, f"{number} hours")
        settle(pool, "q")
        batch = take(pool, "q")
        assert [(m.msg_id, m.receive_count) for m in batch] == ([(sent, number)] if number < 3 else [])
    assert dead_letters(pool, "q") == {sent: "receive attempts used up"}


def test_all_are_requeued_up_to_a_limit(conn: Connection, subscribed: str) -> None:
    sent = bury(conn, subscribed, 5)
    assert value(conn, "select pgque.dlq_requeue_all(%s, 3)", subscribed) == 3
    assert len(dead_letters(conn, subscribed)) == 2
    assert value(conn, "select pgque.dlq_requeue_all(%s, 100)", subscribed) == 2
    settle(conn, subscribed)
    assert sorted(ids(work_off(conn, subscribed))) == sent


def test_of_two_sessions_that_requeue_one_message_one_succeeds(
    conn: Connection,
    subscribed: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    (sent,) = bury(conn, subscribed)
    dl_id = letter(conn, subscribed, sent)
    one = transaction()
    value(one, "select pgque.dlq_requeue(%s)", dl_id)
    other = background(lambda c: value(c, "select pgque.dlq_requeue(%s)", dl_id))
    wait_for_lock(other.pid)
    one.execute("commit")
    refused("PQ008", other.result)
    settle(conn, subscribed)
    assert ids(work_off(conn, subscribed)) == [sent]


def test_the_dead_go_to_a_nominated_queue_that_serves_several(
    conn: Connection, new_queue: Callable[..., str]
) -> None:
    grave, a, b = new_queue(), new_queue(), new_queue()
    subscribe(conn, grave, "undertaker")
    dead = {}
    for source in (a, b):
        subscribe(conn, source)
        configure(conn, source, dead_letter_queue=grave)
        post(conn, source, f"from {source}", "kind", headers=json.dumps({"own": 1}), key="k")
        tick(conn, source)
        (message,) = take(conn, source)
        outcome(conn, "dead", message.batch_id, [message.msg_id], "broken")
        assert take(conn, source) == []
        dead[source] = message.msg_id
    settle(conn, grave)
    got = work_off(conn, grave, consumer="undertaker")
    assert [(m.payload, m.type, m.receive_count, m.queue) for m in got] == [
        (f"from {source}", "kind", 1, grave) for source in (a, b)
    ]
    for message, source in zip(got, (a, b), strict=True):
        assert message.headers["own"] == 1
        about = message.headers["pgque_dead"]
        assert (about["queue"], about["consumer"], about["msg_id"]) == (source, "c", dead[source])
        assert (about["reason"], about["receive_count"], about["retry_count"]) == ("broken", 1, 0)
        assert about["dead_at"]


def test_the_dead_without_headers_get_some_in_the_nominated_queue(
    conn: Connection, subscribed: str, new_queue: Callable[..., str]
) -> None:
    grave = new_queue()
    subscribe(conn, grave)
    configure(conn, subscribed, dead_letter_queue=grave, max_retries=0)
    offer(conn, subscribed, 2)
    batch = take(conn, subscribed)
    nack_ids(conn, batch[0].batch_id, ids(batch), "0", "text of the error")
    settle(conn, grave)
    got = work_off(conn, grave)
    assert [m.payload for m in got] == ["1", "2"]
    assert {m.headers["pgque_dead"]["reason"] for m in got} == {"text of the error"}


def test_names_that_end_in_dlq_are_reserved_and_made_on_demand(
    own: Connection,
) -> None:
    value(own, "select pgque.create_queue('orders')")
    subscribe(own, "orders")
    refused("PQ004", value, own, "select pgque.create_queue('orders.dlq')")
    refused("PQ004", value, own, "select pgque.create_queue('orders.dlq', '{}'::jsonb)")
    refused("PQ004", value, own, "select pgque.rename_queue('orders', 'x.dlq')")
    refused("PQ001", configure_grave, own, "orders", "nowhere")
    configure_grave(own, "orders", "orders.dlq")
    subscribe(own, "orders.dlq", "u")
    offer(own, "orders", 1)
    (message,) = take(own, "orders")
    outcome(own, "dead", message.batch_id, [message.msg_id], "x")
    settle(own, "orders.dlq")
    assert [m.payload for m in work_off(own, "orders.dlq", consumer="u")] == ["1"]


def configure_grave(conn: Connection, queue: str, grave: str) -> None:
    configure(conn, queue, dead_letter_queue=grave)


def test_a_dead_letter_queue_has_none_of_its_own(own: Connection) -> None:
    for name in ("a", "b", "grave"):
        value(own, "select pgque.create_queue(%s)", name)
    configure_grave(own, "a", "grave")
    refused("PQ005", configure_grave, own, "grave", "b")
    refused("PQ005", configure_grave, own, "b", "b")
    configure_grave(own, "b", "grave")
    refused("PQ005", configure_grave, own, "grave", "grave.dlq")
    # a has a dead-letter queue, so it can not become one.
    value(own, "select pgque.create_queue('x')")
    refused("PQ005", configure_grave, own, "x", "a")


def test_what_dies_in_a_dead_letter_queue_is_a_dead_letter_there(own: Connection) -> None:
    for name in ("a", "grave"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
    configure_grave(own, "a", "grave")
    bury(own, "a")
    settle(own, "grave")
    (message,) = take(own, "grave")
    outcome(own, "dead", message.batch_id, [message.msg_id], "again")
    assert dead_letters(own, "grave") == {message.msg_id: "again"}


def test_poison_is_listed_and_archived(pool: Connection) -> None:
    configure(pool, "q", max_receive_attempts=2, max_retries=9)
    sent = offer(pool, "q", 2)
    (a, b) = take(pool, "q")
    outcome(pool, "ack", b.batch_id, [b.msg_id])
    nack(pool, a, "0", "it hurts")
    (a,) = take(pool, "q")
    move_clock(pool, "1 hour")
    value(pool, "select pgque.maint()")
    call = "select p.msg_id, p.consumer_name, p.receive_count, p.last_error, p.dl_id is not null from pgque.list_poison('q') as p"
    assert rows(pool, call) == [(sent[0], "c", 2, "it hurts", True)]
    assert value(pool, "select pgque.archive_poison('q')") == 1
    assert rows(pool, call) == []
    assert dead_letters(pool, "q") == {}
    assert rows(pool, "select a.msg_id, a.payload from pgque.archive_list('q') as a") == [(sent[0], "1")]


def test_the_last_error_is_seen_wherever_the_message_is(pool: Connection) -> None:
    (sent,) = offer(pool, "q", 1)
    (message,) = take(pool, "q")
    nack(pool, message, "1 hour", "ünlucky")
    assert rows(pool, "select l.last_error from pgque.list_messages('q') as l") == [("ünlucky",)]
    assert rows(pool, "select s.last_error from pgque.message_status('q', %s) as s", sent) == [("ünlucky",)]
    move_clock(pool, "2 hours")
    settle(pool, "q")
    (message,) = take(pool, "q")
    assert message.last_error == "ünlucky"
    assert rows(pool, "select s.last_error from pgque.message_status('q', %s) as s", sent) == [("ünlucky",)]
    outcome(pool, "dead", message.batch_id, [sent], "enough")
    assert dead_letters(pool, "q") == {sent: "enough"}


def test_dead_without_a_reason_keeps_the_last_error_in_sight(pool: Connection) -> None:
    (sent,) = offer(pool, "q", 1)
    (message,) = take(pool, "q")
    assert rows(pool, "select msg_id, ok from pgque.dead(%s, %s::bigint[])", message.batch_id, [sent]) == [
        (sent, True)
    ]
    assert list(dead_letters(pool, "q")) == [sent]
    assert status(pool, "q", sent) == {"c": "dead"}


def waits(conn: Connection, retries: int) -> list[float]:
    """Fail a new message so often; return the seconds it has to wait each time."""
    send(conn, "q")
    tick(conn, "q")
    found = []
    for _ in range(retries):
        value(conn, "select pgque.maint_retry_events()")
        tick(conn, "q")
        (message,) = take(conn, "q")
        rows(conn, "select * from pgque.nack(%s, %s::bigint[])", message.batch_id, [message.msg_id])
        wait = value(
            conn,
            "select extract(epoch from l.available_at - pgque.clock()) from pgque.list_messages('q') as l where l.msg_id = %s",
            message.msg_id,
        )
        found.append(float(wait))
        now = value(conn, "select extract(epoch from pgque.clock() - clock_timestamp())")
        move_clock(conn, f"{float(now) + float(wait) + 1} seconds")
    return found


def test_backoff_grows_by_its_factor_up_to_its_cap(pool: Connection) -> None:
    backoff = {"base": 10, "factor": 3, "cap": 200, "jitter": 0}
    configure(pool, "q", retry_backoff=json.dumps(backoff), max_retries=9, max_receive_attempts=99)
    assert [round(w / 10) for w in waits(pool, 5)] == [1, 3, 9, 20, 20]


def test_jitter_spreads_and_stays_within_its_share(pool: Connection) -> None:
    backoff = {"base": 1000, "factor": 1, "cap": 1000, "jitter": 0.5}
    configure(pool, "q", retry_backoff=json.dumps(backoff), max_retries=99, max_receive_attempts=99)
    found = waits(pool, 20)
    assert len({round(w) for w in found}) > 5
    assert all(499 <= w <= 1501 for w in found)


def test_a_wait_named_by_the_nack_wins_over_backoff(pool: Connection) -> None:
    configure(pool, "q", retry_backoff='{"base": 100, "factor": 2, "cap": 1000, "jitter": 0}')
    offer(pool, "q", 1)
    (message,) = take(pool, "q")
    nack(pool, message, "1 second")
    move_clock(pool, "3 seconds")
    settle(pool, "q")
    assert ids(take(pool, "q")) == [message.msg_id]


def test_a_backoff_of_many_retries_overflows_nothing(pool: Connection) -> None:
    backoff = {"base": 1, "factor": 1000, "cap": 60, "jitter": 0}
    configure(pool, "q", retry_backoff=json.dumps(backoff), max_retries=400, max_receive_attempts=500)
    assert max(waits(pool, 110)) <= 61


@pytest.mark.parametrize(
    "backoff",
    [
        '{"base": -1, "factor": 2, "cap": 10}',
        '{"base": 1, "factor": 2, "cap": 10, "jitter": 2}',
        '{"base": "x"}',
        "[]",
        "nonsense",
        '{"bass": 1}',
    ],
)
def test_a_backoff_that_makes_no_sense_is_refused(conn: Connection, queue: str, backoff: str) -> None:
    refused("PQ005", value, conn, "select pgque.set_queue_config(%s, 'retry_backoff', %s)", queue, backoff)


@pytest.fixture
def three_kinds(own: Connection) -> Connection:
    """Nine dead letters of two consumers: two reasons that differ by more than numbers, and no reason."""
    value(own, "select pgque.create_queue('q')")
    for consumer in ("c", "d"):
        subscribe(own, "q", consumer)
    send_many(own, "q", 6)
    forced_tick(own, "q")
    for consumer, count in (("c", 6), ("d", 3)):
        for number, message in enumerate(receive(own, "q", consumer, count)):
            reason = ("no order 17 in utf-8", "no order 18 in utf-8", "timeout after 3 s", None)[number % 4]
            rows(
                own,
                "select * from pgque.dead(%s, array[%s::bigint], %s)",
                message.batch_id,
                message.msg_id,
                reason,
            )
    return own


def test_dead_letters_are_counted_by_reason_whatever_numbers_it_has(three_kinds: Connection) -> None:
    found = rows(three_kinds, "select consumer_name, reason, dead_letters, held from pgque.dlq_reasons('q')")
    assert found == [
        ("c", "no order N in utf-8", 4, 0),
        ("d", "no order N in utf-8", 2, 0),
        ("c", "dead", 1, 0),
        ("c", "timeout after N s", 1, 0),
        ("d", "timeout after N s", 1, 0),
    ]
    newest = column(
        three_kinds, "select newest_dl_id from pgque.dlq_reasons('q') where reason = 'no order N in utf-8'"
    )
    assert sorted(newest) == column(
        three_kinds,
        "select max(dl_id) from pgque.dead_letter where dl_reason ~ 'order' group by dl_consumer_id order by 1",
    )
    refused("PQ001", value, three_kinds, "select pgque.dlq_reasons('none')")


@pytest.mark.parametrize(
    "call",
    [
        "select pgque.dlq_requeue_all('q', null, %s)",
        "select replayed from pgque.dlq_replay_all('q', null, %s)",
        "select pgque.dlq_purge('q', '0', %s)",
    ],
)
def test_all_dead_letters_of_one_reason_are_requeued_replayed_or_purged_and_no_other(
    three_kinds: Connection, call: str
) -> None:
    assert value(three_kinds, call, "no such reason") == 0
    assert value(three_kinds, call, "no order N in utf-8") == 6
    left = "select dl_reason from pgque.dlq_inspect('q') order by 1"
    assert column(three_kinds, left) == ["dead", "timeout after 3 s", "timeout after 3 s"]
    assert value(three_kinds, call, "dead") == 1
    assert column(three_kinds, left) == ["timeout after 3 s"] * 2


def test_a_replay_of_all_can_be_done_in_parts(three_kinds: Connection) -> None:
    part = "select replayed from pgque.dlq_replay_all('q', 4)"
    assert [value(three_kinds, part) for _ in range(4)] == [4, 4, 1, 0]


def test_one_dead_letter_is_deleted_by_its_number_a_held_one_too(three_kinds: Connection) -> None:
    three_kinds.execute("update pgque.dead_letter set dl_held = true where dl_id = 1")
    assert value(three_kinds, "select pgque.dlq_delete(1)") == 1
    assert len(rows(three_kinds, "select * from pgque.dlq_inspect('q')")) == 8
    refused("PQ008", value, three_kinds, "select pgque.dlq_delete(1)")
