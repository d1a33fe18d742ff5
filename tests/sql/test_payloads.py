"""Bodies and headers come out as they went in, wherever a message has been."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    Message,
    ack,
    change_function,
    configure,
    dead_letters,
    dead_tuples,
    figure,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    post,
    release,
    row_counts,
    rows,
    settle,
    subscribe,
    take,
    tick,
    value,
    work_off,
)


@pytest.fixture
def pool(own: Connection) -> Connection:
    """A database of its own with a queue q and its consumer c."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    configure(own, "q", max_receive_attempts=50, max_retries=50)
    return own


HEADERS = {"trace": "00-ab", "n": [1, None, True, 1.5], "deep": {"ü": "\u0001\n\\"}, "": ""}
BODIES: dict[str, Any] = {
    "all bytes": bytes(range(256)),
    "no byte": b"",
    "ten megabytes of bytes": bytes(range(256)) * 40_960,
    "text": "plain",
    "no character": "",
    "unusual text": "\u0001 \t\r\n \\ \\x00 '\" %s ü 🐘 \ufeff\u202e",
    "ten megabytes of text": "0123456789" * 1_048_576,
}


def send_body(conn: Connection, body: Any, **options: Any) -> int:
    return post(conn, "q", body, "kind", headers=json.dumps(HEADERS), partition_key="p", **options)


def check(message: Message, msg_id: int, body: Any) -> None:
    assert message.msg_id == msg_id
    assert (message.type, message.headers, message.extra1) == ("kind", HEADERS, "p")
    if isinstance(body, bytes):
        assert message.payload is None
        assert message.payload_bytes is not None
        assert bytes(message.payload_bytes) == body
    else:
        assert message.payload_bytes is None
        assert message.payload == body


@pytest.mark.parametrize("name", BODIES)
def test_a_body_survives_retry_expired_lease_release_dead_letter_requeue_and_archive(
    pool: Connection, name: str
) -> None:
    body = BODIES[name]
    sent = send_body(pool, body, key="k")
    tick(pool, "q")
    (message,) = take(pool, "q")
    check(message, sent, body)
    nack(pool, message, "0", "once more")
    settle(pool, "q")
    (message,) = take(pool, "q")
    check(message, sent, body)
    move_clock(pool, "1 hour")
    (message,) = take(pool, "q")
    check(message, sent, body)
    release(pool, message.batch_id)
    (message,) = take(pool, "q")
    check(message, sent, body)
    assert message.key == "k"
    outcome(pool, "dead", message.batch_id, [sent], "x")
    assert dead_letters(pool, "q") == {sent: "x"}
    value(pool, "select pgque.dlq_requeue(d.dl_id) from pgque.dlq_inspect('q') as d")
    settle(pool, "q")
    (message,) = take(pool, "q")
    check(message, sent, body)
    rows(pool, "select pgque.archive(%s)", message.batch_id)
    (archived,) = rows(
        pool,
        "select a.payload, a.payload_bytes, a.headers, a.type, a.archive_id from pgque.archive_list('q') as a",
    )
    if isinstance(body, bytes):
        assert (archived[0], bytes(archived[1])) == (None, body)
    else:
        assert archived[:2] == (body, None)
    assert archived[2:4] == (HEADERS, "kind")
    again = value(pool, "select pgque.archive_replay(%s)", archived[4])
    tick(pool, "q")
    (message,) = take(pool, "q")
    check(message._replace(extra1="p"), again, body)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_survives_a_delay_and_a_nominated_queue(pool: Connection, name: str) -> None:
    body = BODIES[name]
    configure(pool, "q", dead_letter_queue="q.dlq")
    subscribe(pool, "q.dlq", "u")
    sent = send_body(pool, body, delay="1 minute")
    move_clock(pool, "2 minutes")
    settle(pool, "q")
    (message,) = take(pool, "q")
    check(message, sent, body)
    outcome(pool, "dead", message.batch_id, [sent], "x")
    settle(pool, "q.dlq")
    (message,) = take(pool, "q.dlq", consumer="u")
    assert message.headers.pop("pgque_dead")["msg_id"] == sent
    check(message._replace(extra1="p"), message.msg_id, body)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_survives_replacement_by_key(pool: Connection, name: str) -> None:
    first = post(pool, "q", "old", key="k")
    tick(pool, "q")
    assert send_body(pool, BODIES[name], key="k") == first
    tick(pool, "q")
    (message,) = take(pool, "q")
    check(message._replace(extra1="p"), first, BODIES[name])


def test_jsonb_is_canonical_and_text_is_kept_byte_for_byte(pool: Connection) -> None:
    raw = '{"b": 1,   "a": [1.0, null], "b": 2}'
    for kind in ("jsonb", "text"):
        value(pool, f"select pgque.send('q', 't', %s::{kind}, delay => '1 minute')", raw)
    move_clock(pool, "2 minutes")
    settle(pool, "q")
    batch = take(pool, "q")
    release(pool, batch[0].batch_id)
    bodies = sorted(str(m.payload) for m in take(pool, "q"))
    assert bodies == sorted([raw, value(pool, "select %s::jsonb::text", raw)])


@pytest.mark.parametrize("kind", ["text", "jsonb", "bytea"])
def test_a_missing_body_stays_missing(pool: Connection, kind: str) -> None:
    sent = value(pool, f"select pgque.send('q', 't', null::{kind}, headers => '{{\"h\": 1}}')")
    tick(pool, "q")
    (message,) = take(pool, "q")
    nack(pool, message, "0")
    settle(pool, "q")
    (message,) = take(pool, "q")
    assert (message.msg_id, message.payload, message.payload_bytes) == (sent, None, None)
    assert message.headers == {"h": 1}


def test_a_batch_of_bytes_with_headers_keeps_each(pool: Connection) -> None:
    bodies = [bytes([n]) * n for n in range(256)]
    sent = value(
        pool,
        "select pgque.send_batch('q', 't', %s::bytea[], headers => %s::jsonb[])",
        bodies,
        [json.dumps({"n": n}) for n in range(256)],
    )
    tick(pool, "q")
    batch = take(pool, "q", count=1000)
    assert ids(batch) == sent
    assert [bytes(m.payload_bytes or b"") for m in batch] == bodies
    assert [m.headers for m in batch] == [{"n": n} for n in range(256)]
    assert ack(pool, batch[0].batch_id) == 1


@pytest.mark.parametrize("headers", ["[]", '"x"', "1"])
def test_headers_that_are_no_object_are_refused_or_kept(pool: Connection, headers: str) -> None:
    try:
        post(pool, "q", headers=headers)
    except Exception as error:
        assert getattr(error, "sqlstate", None) == "PQ005"
        return
    tick(pool, "q")
    assert take(pool, "q")[0].headers == json.loads(headers)


def test_send_idem_returns_the_first_id_within_its_ttl(pool: Connection) -> None:
    call = "select event_id, deduped from pgque.send_idem('q', 't', %s::text, %s, '1 hour')"
    ((first, deduped),) = rows(pool, call, "a", "i")
    assert deduped is False
    assert rows(pool, call, "b", "i") == [(first, True)]
    tick(pool, "q")
    assert [(m.msg_id, m.payload) for m in work_off(pool, "q")] == [(first, "a")]
    assert rows(pool, call, "c", "i") == [(first, True)]
    ((other, deduped),) = rows(pool, call, "d", "j")
    assert deduped is False
    move_clock(pool, "61 minutes")
    ((second, deduped),) = rows(pool, call, "e", "i")
    assert deduped is False and second > other > first
    tick(pool, "q")
    assert [m.payload for m in work_off(pool, "q")] == ["d", "e"]


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_the_memory_of_send_idem_is_reclaimed_without_dead_rows(pool: Connection, isolation: str) -> None:
    small = [
        (text, text.replace("4194304", "65536")) for text in ("v_size < 4194304 and", "when v_size < 4194304")
    ]
    change_function(pool, "_compact_idempotency", *small)
    for round_ in range(12):
        move_clock(pool, f"{round_ * 2} hours")
        with pool.transaction():
            pool.execute(f"set transaction isolation level {isolation}".encode())
            value(
                pool,
                "select count(*) from generate_series(1, 300) as g,"
                " pgque.send_idem('q', 't', 'x'::text, %s || g, '1 hour')",
                f"{round_}-",
            )
        tick(pool, "q")
        work_off(pool, "q", count=1000)
        value(pool, "select pgque.maint()")
    assert sum(n for t, n in row_counts(pool).items() if t.startswith("idem")) <= 1500
    assert sum(n for t, n in dead_tuples(pool).items() if t.startswith("idem")) < 100


def test_a_full_queue_still_recognises_what_it_has(pool: Connection) -> None:
    call = "select event_id, deduped from pgque.send_idem('q', 't', 'x'::text, 'i')"
    configure(pool, "q", max_depth=1)
    ((first, _),) = rows(pool, call)
    assert rows(pool, call) == [(first, True)]


def test_50_idempotent_senders_make_one_message(
    conn: Connection, subscribed: str, background: Callable[..., Any]
) -> None:
    call = "select event_id, deduped from pgque.send_idem(%s, 't', 'x'::text, 'i')"
    jobs = [background(lambda c: rows(c, call, subscribed)[0]) for _ in range(50)]
    found = [job.result() for job in jobs]
    assert len({f[0] for f in found}) == 1
    assert sorted(f[1] for f in found) == [False] + [True] * 49
    tick(conn, subscribed)
    assert len(work_off(conn, subscribed)) == 1
    assert figure(conn, "in_flight", subscribed) == 0
    assert offer(conn, subscribed, 1)
