"""The client's calls for work queues: options of sending, outcomes, and what operators look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

import pgque

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def pool(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    return queue


def _take(
    client: pgque.PgqueClient, queue: str, worker: str = "w1", count: int = 100, timeout: float = 30
) -> list[pgque.Message]:
    return client.receive(queue, "c", count, worker=worker, visibility_timeout=timeout)


# -- sending ------------------------------------------------------------


def test_a_pending_message_is_replaced_by_one_with_its_key(
    client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    first = client.send(pool, "old", key="k", headers={"n": 1})
    assert client.send(pool, {"new": True}, type="t", key="k", headers={"n": 2}) == first
    tick(pool)
    [message] = _take(client, pool)
    assert (message.msg_id, message.json(), message.type, message.key, message.headers) == (
        first,
        {"new": True},
        "t",
        "k",
        {"n": 2},
    )


def test_a_delayed_message_comes_when_its_time_has(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    client.send(pool, "by seconds", delay=0.3)
    client.send(pool, "by length", delay=timedelta(hours=1))
    client.send(pool, "by time", deliver_at=datetime.now(timezone.utc) + timedelta(milliseconds=300))
    client.send(pool, "now")
    tick(pool)
    assert [m.payload for m in _take(client, pool)] == ["now"]
    seen: set[str | None] = set()

    def both() -> bool:
        client.admin.maint()
        tick(pool)
        seen.update(m.payload for m in _take(client, pool))
        return len(seen) >= 2

    wait_until(both, "the delayed messages come")
    assert seen == {"by seconds", "by time"}


def test_an_expired_message_is_not_delivered(client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    client.send(pool, "short", ttl=0.05)
    client.send(pool, "long", ttl=timedelta(hours=1))
    time.sleep(0.06)  # the subject
    tick(pool)
    [message] = _take(client, pool)
    assert message.payload == "long"
    assert message.expires_at is not None


def test_an_event_brings_all_its_options(client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    client.send(pool, pgque.Event("t", b"\x00", headers={"a": 1}, key="k", ttl=60, partition_key="p"))
    tick(pool)
    [message] = _take(client, pool)
    assert (message.type, message.payload_bytes, message.headers, message.key, message.extra1) == (
        "t",
        b"\x00",
        {"a": 1},
        "k",
        "p",
    )
    assert message.expires_at is not None


def test_options_of_a_batch_are_for_each_message(client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    ids = client.send_batch(
        pool,
        "t",
        ["a", "b", "c"],
        headers=[{"n": 1}, None, {"n": 3}],
        keys=[None, "k", None],
        delays=[None, None, 3600],
        partition_keys=["p", None, None],
        ttls=[60, None, None],
    )
    tick(pool)
    a, b = _take(client, pool)
    assert [a.msg_id, b.msg_id] == ids[:2]
    assert [(m.headers, m.key, m.extra1) for m in (a, b)] == [({"n": 1}, None, "p"), (None, "k", None)]
    assert a.expires_at is not None
    assert b.expires_at is None


def test_a_batch_may_be_of_events_or_of_bytes(client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    client.send_batch(pool, "t", [pgque.Event("t", "a", key="k"), pgque.Event("t", "b"), "c"])
    client.send_batch(pool, "t", [bytes(range(256)), None, bytearray(b"")])
    tick(pool)
    got = _take(client, pool)
    assert {(m.payload, m.key) for m in got[:3]} == {("a", "k"), ("b", None), ("c", None)}
    assert [m.payload_bytes for m in got[3:]] == [bytes(range(256)), None, b""]


def test_a_batch_that_does_not_fit_together_is_refused(client: pgque.PgqueClient, pool: str) -> None:
    with pytest.raises(TypeError, match="bytes"):
        client.send_batch(pool, "t", [b"raw", "text"])
    with pytest.raises(ValueError, match="2 values of key for 1 payloads"):
        client.send_batch(pool, "t", ["a"], keys=["k", "l"])
    with pytest.raises(ValueError, match="one type"):
        client.send_batch(pool, "t", [pgque.Event("u", "a")])
    assert client.peek(pool) == []


@pytest.mark.parametrize(
    "options",
    [
        {"delay": -1},
        {"ttl": -1},
        {"key": ""},
        {"key": "x" * 1001},
        {"delay": 1, "deliver_at": datetime.now(timezone.utc)},
    ],
    ids=["delay", "ttl", "empty key", "long key", "both"],
)
def test_options_out_of_range_are_bad_arguments(client: pgque.PgqueClient, pool: str, options: Any) -> None:
    with pytest.raises(pgque.PgqueBadArgumentError) as caught:
        client.send(pool, "x", **options)
    assert caught.value.sqlstate == "PQ005"


def test_a_full_queue_raises_its_own_class(client: pgque.PgqueClient, pool: str) -> None:
    client.admin.set_queue_config(pool, "max_depth", 2)
    client.send_batch(pool, "t", ["a", "b"])
    with pytest.raises(pgque.PgqueQueueFullError) as caught:
        client.send(pool, "c")
    assert (caught.value.sqlstate, caught.value.queue) == ("PQ003", pool)


# -- receiving and outcomes ------------------------------------------------------------


def test_workers_get_different_messages(client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    client.send_batch(pool, "t", [str(n) for n in range(10)])
    tick(pool)
    one = _take(client, pool, "w1", 1)
    two = _take(client, pool, "w2")
    assert [m.payload for m in one + two] == [str(n) for n in range(10)]
    assert _take(client, pool, "w3") == []
    assert {m.receive_count for m in one + two} == {1}


@pytest.mark.parametrize("timeout", [0, -1, timedelta(0)])
def test_a_visibility_timeout_has_to_be_more_than_nothing(
    client: pgque.PgqueClient, pool: str, timeout: Any
) -> None:
    with pytest.raises(pgque.PgqueBadArgumentError):
        client.receive(pool, "c", worker="w", visibility_timeout=timeout)


def test_one_call_finishes_a_batch_and_takes_the_next(
    client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    client.send_batch(pool, "t", ["a", "b"])
    tick(pool)
    [a] = _take(client, pool, count=1)
    [b] = client.receive(pool, "c", 1, worker="w1", ack_batch=a.batch_id)
    assert b.payload == "b"
    assert client.ack(a.batch_id) == 0
    assert client.ack(b.batch_id) == 1


def test_each_message_of_a_batch_has_its_own_outcome(
    client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    client.send_batch(pool, "t", ["acked", "archived", "nacked", "dead", "released"])
    tick(pool)
    a, b, c, d, e = _take(client, pool)
    batch = a.batch_id
    assert client.ack(batch, [a]) == [pgque.Outcome(a.msg_id, True, None)]
    assert client.archive(batch, [b.msg_id]) == [pgque.Outcome(b.msg_id, True, None)]
    assert client.nack(batch, [c], retry_after=0, reason="again") == [pgque.Outcome(c.msg_id, True, None)]
    assert client.dead(batch, [d], "no good") == [pgque.Outcome(d.msg_id, True, None)]
    assert client.release(batch, [e]) == 1
    assert [o.ok for o in client.ack(batch, [a, 999_999])] == [False, False]
    back = {m.payload: m for m in _take(client, pool, "w2") + _take(client, pool, "w2")}
    assert set(back) == {"nacked", "released"}
    assert (back["nacked"].last_error, back["nacked"].retry_count, back["nacked"].receive_count) == (
        "again",
        1,
        2,
    )
    assert back["released"].retry_count == 0
    [letter] = client.dlq.inspect(pool)
    assert (letter.ev_id, letter.dl_reason) == (d.msg_id, "no good")
    [archived] = client.archived.list(pool)
    assert (archived.msg_id, archived.payload, archived.worker, archived.queue) == (
        b.msg_id,
        "archived",
        "w1",
        pool,
    )


def test_a_whole_batch_is_archived_or_released(client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    client.send_batch(pool, "t", ["a", "b"])
    tick(pool)
    batch = _take(client, pool)
    assert client.release(batch[0].batch_id) == 2
    batch = _take(client, pool, "w2")
    assert [o.ok for o in client.archive(batch[0].batch_id)] == [True, True]
    assert len(client.archived.list(pool)) == 2


def _take_over(client: pgque.PgqueClient, queue: str, wait_until: Wait) -> pgque.Message:
    """Wait until the only message comes to another worker."""
    found: list[pgque.Message] = []

    def lapsed() -> bool:
        found.extend(_take(client, queue, "w2"))
        return bool(found)

    wait_until(lapsed, "the message comes to another worker")
    return found[0]


def test_a_batch_can_be_held_longer_and_is_lost_otherwise(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    client.send(pool, "x")
    tick(pool)
    [message] = _take(client, pool, timeout=0.2)
    assert client.extend(message.batch_id, 0.1) == 1
    again = _take_over(client, pool, wait_until)
    assert (again.msg_id, again.receive_count) == (message.msg_id, 2)
    assert client.extend(message.batch_id, 60) == 0
    assert client.set_visibility(message.batch_id, 60) == 0
    assert client.ack(message.batch_id, [message]) == [
        pgque.Outcome(message.msg_id, False, "lost to another worker")
    ]
    with pytest.raises(pgque.PgqueBatchNotFoundError):
        client.nack(message.batch_id, message)
    with pytest.raises(pgque.PgqueBadArgumentError):
        client.extend(again.batch_id, -1)


def test_a_batch_whose_visibility_was_set_is_lost_like_any_other(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    client.send(pool, "x")
    tick(pool)
    [message] = _take(client, pool)
    assert client.set_visibility(message.batch_id, timedelta(seconds=0.1)) == 1
    _take_over(client, pool, wait_until)
    assert client.ack(message.batch_id, [message]) == [
        pgque.Outcome(message.msg_id, False, "lost to another worker")
    ]
    with pytest.raises(pgque.PgqueBatchNotFoundError):
        client.nack(message.batch_id, message)


def test_without_a_time_a_nacked_message_follows_the_backoff_of_its_queue(
    client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    client.admin.set_queue_config(pool, "retry_backoff", {"base": 0, "factor": 1, "cap": 0, "jitter": 0})
    client.send(pool, "x")
    tick(pool)
    [message] = _take(client, pool)
    assert client.nack(message.batch_id, message) == 1
    assert [m.retry_count for m in _take(client, pool)] == [1]


def test_messages_of_one_key_come_one_at_a_time_where_the_consumer_asks_for_it(
    client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c", keyed_order=True)
    client.send_batch(queue, "t", ["a1", "a2", "b1"], partition_keys=["a", "a", "b"])
    tick(queue)
    first = _take(client, queue, "w1", 1)
    assert [m.payload for m in first] == ["a1"]
    assert [m.payload for m in _take(client, queue, "w2", 1)] == ["b1"]
    assert _take(client, queue, "w3", 1) == []
    assert [(w.worker, w.waiting) for w in client.consumers.list_workers(queue)] == [("w1", 1), ("w2", 0)]
    client.ack(first[0].batch_id)
    assert [m.payload for m in _take(client, queue, "w3", 1)] == ["a2"]


def test_the_messages_of_one_key_that_workers_have_are_limited(
    client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c", key_concurrency=2)
    client.send_batch(queue, "t", ["a1", "a2", "a3", "a4"], partition_keys=["a"] * 4)
    tick(queue)
    assert [m.payload for m in _take(client, queue, "w1")] == ["a1", "a2"]
    assert [client.consumers.set_key_concurrency(queue, "c", 3) for _ in range(2)] == [1, 0]
    assert [m.payload for m in _take(client, queue, "w2")] == ["a3"]
    assert client.consumers.set_key_concurrency(queue, "c", None) == 1
    assert [m.payload for m in _take(client, queue, "w3")] == ["a4"]
    with pytest.raises(pgque.PgqueBadArgumentError):
        client.consumers.set_key_concurrency(queue, "c", 0)


# -- operating ------------------------------------------------------------


def test_workers_are_listed_and_their_batches_reclaimed(
    client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    client.send_batch(pool, "t", ["a", "b", "c"])
    tick(pool)
    _take(client, pool, "w1", 2)
    [worker] = client.consumers.list_workers(pool, "c")
    assert (worker.queue, worker.consumer, worker.worker, worker.batches, worker.messages) == (
        pool,
        "c",
        "w1",
        1,
        2,
    )
    assert worker.lease_until is not None
    assert any(w.queue == pool for w in client.consumers.list_workers())
    assert client.consumers.reclaim(pool, "c", older_than=timedelta(hours=1)) == 0
    assert client.consumers.reclaim(pool, "c") == 1
    assert len(_take(client, pool, "w2")) + len(_take(client, pool, "w2")) == 3


def test_a_consumer_is_shared_by_workers_and_read_on_its_own_again(
    client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    client.send_batch(pool, "t", ["retried", "open", "new"])
    tick(pool)
    alone = client.receive(pool, "c", 2)
    client.nack(alone[0].batch_id, [alone[0]], 0)
    with pytest.raises(pgque.PgqueQueueInUseError, match="share_consumer"):
        client.receive(pool, "c", worker="w1")
    assert [client.consumers.share(pool, "c") for _ in range(2)] == [1, 0]
    assert client.ack(alone[0].batch_id) == 0
    shared = client.receive(pool, "c", 2, worker="w1")
    assert {m.payload for m in shared} <= {"retried", "open"}
    assert [client.consumers.unshare(pool, "c") for _ in range(2)] == [1, 0]
    got: list[object] = []
    while batch := client.receive(pool, "c"):
        got += [m.payload for m in batch]
        assert client.ack(batch[0].batch_id) == 1
    assert sorted(map(str, got)) == ["new", "open", "retried"]


def test_messages_are_listed_with_their_status(client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    first, second = client.send_batch(pool, "t", [b"raw", b"x"], headers=[{"a": 1}, None])
    later = client.send(pool, "later", delay=3600)
    tick(pool)
    _take(client, pool, "w1", 1)
    status = {m.msg_id: m.status for m in client.messages.list(pool)}
    assert status == {first: "processing", second: "pending", later: "delayed"}
    [processing] = client.messages.list(pool, "processing", 10)
    assert (processing.payload_bytes, processing.headers, processing.worker) == (b"raw", {"a": 1}, "w1")
    [one] = client.messages.status(pool, first)
    assert (one.consumer_name, one.status, one.receive_count, one.worker) == ("c", "processing", 1, "w1")
    with pytest.raises(pgque.PgqueMessageNotFoundError):
        client.messages.status(pool, 10**12)
    assert client.messages.get(pool, first) == [processing]
    assert pgque.QueueRights(pool, True, True, True, True) in client.admin.my_rights()
    with pytest.raises(pgque.PgqueMessageNotFoundError):
        client.messages.get(pool, 10**12)
    at = processing.created_at
    assert at is not None
    for filters, expected in (
        ({"after_id": second}, [later]),
        ({"matching": '"A": 1'}, [first]),
        ({"matching": "LATER", "until": at}, []),
        ({"type": "default", "since": at}, [later]),
        ({"type": "t", "consumer": "c"}, [first, second]),
        ({"consumer": "nobody"}, []),
        ({"key": "k"}, []),
    ):
        assert [m.msg_id for m in client.messages.list(pool, **filters)] == expected, filters


def test_a_queue_or_a_key_is_purged(client: pgque.PgqueClient, pool: str, tick: Tick) -> None:
    client.send_batch(pool, "t", ["a", "b", "c"], keys=["k", None, None])
    tick(pool)
    assert client.messages.purge_key(pool, "k") == 1
    assert client.admin.purge(pool) >= 2  # as the slowest consumer counted them
    assert _take(client, pool) == []


def test_a_message_is_cancelled_for_all_or_for_one_consumer(
    client: pgque.PgqueClient, pool: str, tick: Tick
) -> None:
    first, second, third = client.send_batch(pool, "t", ["a", "b", "c"])
    tick(pool)
    assert client.cancel(pool, first) == "pending"
    assert client.cancel(pool, second, "c") == "pending"
    assert client.cancel(pool, second, "c") == "cancelled"
    (message,) = _take(client, pool)
    assert message.msg_id == third
    with pytest.raises(pgque.PgqueMessageNotFoundError):
        client.cancel(pool, third + 1000)


def test_poison_is_listed_archived_and_replayed(
    client: pgque.PgqueClient, pool: str, tick: Tick, wait_until: Wait
) -> None:
    client.admin.set_queue_config(pool, "max_receive_attempts", 1)
    msg_id = client.send(pool, "x")
    tick(pool)
    _take(client, pool, timeout=0.01)
    wait_until(lambda: _take(client, pool) == [] and client.dlq.inspect(pool) != [])
    [poison] = client.dlq.list_poison(pool)
    assert (poison.msg_id, poison.consumer_name, poison.status) == (msg_id, "c", "dead")
    assert poison.dl_id == client.dlq.inspect(pool)[0].dl_id
    assert client.dlq.archive_poison(pool) == 1
    assert client.dlq.list_poison(pool) == []
    [archived] = client.archived.list(pool, 10, datetime.now(timezone.utc) - timedelta(minutes=1))
    assert client.archived.replay(archived.archive_id) > msg_id
    tick(pool)
    assert [m.payload for m in _take(client, pool)] == ["x"]
    assert client.archived.purge(pool, datetime.now(timezone.utc) - timedelta(days=365)) == 0
    with pytest.raises(pgque.PgqueMessageNotFoundError):
        client.archived.replay(10**12)


def test_a_role_with_a_right_to_one_queue_uses_that_queue(
    client: pgque.PgqueClient, pool: str, new_queue: Callable[[], str], nobody: Any
) -> None:
    other = new_queue()
    assert client.admin.grant_queue(pool, nobody.name, "produce")
    assert not client.admin.grant_queue(pool, nobody.name, "produce")
    with pgque.connect(nobody.dsn, autocommit=True) as user:
        assert user.send(pool, "x") > 0
        with pytest.raises(pgque.PgquePermissionDeniedError, match=other):
            user.send(other, "x")
        with pytest.raises(pgque.PgquePermissionDeniedError, match=pool):
            user.subscribe(pool, "mine")
        assert client.admin.revoke_queue(pool, nobody.name, "produce")
        assert not client.admin.revoke_queue(pool, nobody.name, "produce")
        with pytest.raises(pgque.PgquePermissionDeniedError):
            user.send(pool, "x")
    with pytest.raises(pgque.PgqueBadArgumentError):
        client.admin.grant_queue(pool, nobody.name, "everything")


def test_queues_are_renamed_and_found_by_their_id(
    client: pgque.PgqueClient, pool: str, tick: Tick, conn: Connection
) -> None:
    new_name = f"{pool}_new"
    assert client.admin.rename_queue(pool, new_name) == 1
    with pytest.raises(pgque.PgqueQueueNotFoundError):
        client.send(pool, "x")
    client.send(new_name, "x")
    assert client.admin.rename_queue(new_name, pool) == 1
    row = conn.execute(
        "select q.queue_uid::text from pgque.queue as q where q.queue_name = %s", [pool]
    ).fetchone()
    assert row is not None
    tick(pool)
    assert [m.payload for m in _take(client, row[0])] == ["x"]


def test_defaults_hold_for_queues_without_a_value_of_their_own(client: pgque.PgqueClient, pool: str) -> None:
    before = client.admin.queue_config(pool)["max_receive_attempts"]
    client.admin.set_default_config("max_receive_attempts", 7)
    try:
        assert client.admin.queue_config(pool)["max_receive_attempts"] == "7"
        client.admin.set_queue_config(pool, "max_receive_attempts", 3)
        assert client.admin.queue_config(pool)["max_receive_attempts"] == "3"
    finally:
        client.admin.set_default_config("max_receive_attempts", None)
    client.admin.set_queue_config(pool, "max_receive_attempts", None)
    assert client.admin.queue_config(pool)["max_receive_attempts"] == before


def test_what_expired_is_taken_out_now_or_on_schedule(client: pgque.PgqueClient, pool: str) -> None:
    assert client.admin.expire_messages(pool) == 0
    assert client.dlq.delete_expired(pool) == 0
    with pytest.raises(pgque.PgqueBadArgumentError):
        client.admin.set_schedule("expire", "now and then")
    assert client.admin.set_schedule("expire", 60)
    assert client.admin.set_schedule("expire", "") == ""
