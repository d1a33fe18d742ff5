"""The sync client: each call against a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from psycopg_pool import ConnectionPool

import pgque
from pgque.ops.exporter import render
from pgque.ops.install import uninstall
from pgque.ops.ticker import run_ticker

Tick = Callable[[str], int | None]
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def consumer(client: pgque.PgqueClient, queue: str) -> str:
    client.subscribe(queue, "c")
    return "c"


@pytest.mark.parametrize(
    ("payload", "stored"),
    [
        ("plain text", "plain text"),
        ("  kept byte for byte\n\t", "  kept byte for byte\n\t"),
        ("", ""),
        ("žluťoučký 🐎", "žluťoučký 🐎"),
        ({"b": 1, "a": [True, None, "ü"]}, {"b": 1, "a": [True, None, "ü"]}),
        ([1, 2.5], [1, 2.5]),
        (7, 7),
        (True, True),
        (None, None),
    ],
)
def test_a_payload_comes_back_as_it_was_sent(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick, payload: Any, stored: object
) -> None:
    msg_id = client.send(queue, payload, type="t")
    tick(queue)
    [message] = client.receive(queue, consumer)
    assert (message.msg_id, message.type, message.queue) == (msg_id, "t", queue)
    if isinstance(payload, str) or payload is None:
        assert message.payload == stored
    else:
        assert message.json() == stored
    assert message.retry_count == 0
    assert message.receive_count == 1
    assert isinstance(message.created_at, datetime)


def test_the_default_type_is_default(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send(queue, "x")
    tick(queue)
    assert [message.type for message in client.receive(queue, consumer)] == ["default"]


def test_an_event_brings_its_own_type(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send(queue, pgque.Event("order.created", {"id": 1}))
    tick(queue)
    [message] = client.receive(queue, consumer)
    assert (message.type, message.json()) == ("order.created", {"id": 1})


@pytest.mark.parametrize("payload", [bytes(range(256)), bytearray(b"raw"), memoryview(b"raw"), b""])
def test_bytes_arrive_as_bytes(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick, payload: Any
) -> None:
    client.send(queue, payload)
    tick(queue)
    [message] = client.receive(queue, consumer)
    assert (message.payload, message.payload_bytes) == (None, bytes(payload))


def test_bytes_are_not_sent_with_an_idempotency_key(client: pgque.PgqueClient, queue: str) -> None:
    with pytest.raises(TypeError, match="bytes"):
        client.send_idem(queue, b"raw", "key")


@pytest.mark.parametrize("payload", ["text", {"a": 1}, b"raw"])
def test_headers_travel_with_the_message_and_its_retry(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick, payload: Any
) -> None:
    headers = {"trace": "4bf9", "n": 1, "nested": {"a": [True, None]}}
    client.send(queue, payload, headers=headers)
    tick(queue)
    [message] = client.receive(queue, consumer)
    assert message.headers == headers
    client.nack(message.batch_id, message, retry_after=0)
    client.ack(message.batch_id)
    client.admin.maint()
    tick(queue)
    [again] = client.receive(queue, consumer)
    assert (again.msg_id, again.headers, again.payload_bytes) == (
        message.msg_id,
        headers,
        message.payload_bytes,
    )


def test_a_number_that_json_lacks_is_refused_before_it_is_sent(client: pgque.PgqueClient, queue: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        client.send(queue, {"x": float("nan")})


@pytest.mark.parametrize(
    "payloads",
    [["a", "b", None], [{"a": 1}, [2], None], ["text", {"json": True}, None, 3]],
    ids=["text", "json", "mixed"],
)
def test_a_batch_gives_ids_in_input_order(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick, payloads: list[Any]
) -> None:
    ids = client.send_batch(queue, "t", payloads)
    tick(queue)
    got = {message.msg_id: message for message in client.receive(queue, consumer)}
    assert list(got) == ids
    for msg_id, payload in zip(ids, payloads, strict=True):
        message = got[msg_id]
        assert payload == (message.payload if isinstance(payload, str | None) else message.json())


def test_an_empty_batch_sends_nothing(client: pgque.PgqueClient, queue: str) -> None:
    assert client.send_batch(queue, "t", []) == []


@pytest.mark.parametrize("payloads", ["text", {"a": 1}])
def test_a_single_payload_is_no_batch(client: pgque.PgqueClient, queue: str, payloads: Any) -> None:
    with pytest.raises(TypeError, match="sequence"):
        client.send_batch(queue, "t", payloads)


def test_a_second_send_with_one_key_is_deduplicated(client: pgque.PgqueClient, queue: str) -> None:
    first = client.send_idem(queue, {"n": 1}, "key", ttl=timedelta(minutes=1))
    second = client.send_idem(queue, {"n": 2}, "key", ttl=60)
    assert (first.deduped, second) == (False, pgque.SendResult(first.event_id, True))


def test_an_unacked_batch_is_redelivered_and_an_acked_one_is_not(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send_batch(queue, "t", ["a", "b", "c"])
    tick(queue)
    first = client.receive(queue, consumer, 2)
    assert [m.payload for m in first] == ["a", "b"]
    again = client.receive(queue, consumer, 2)
    assert [(m.msg_id, m.batch_id) for m in again] == [(m.msg_id, m.batch_id) for m in first]
    assert client.ack(first[0].batch_id) == 1
    assert client.ack(first[0].batch_id) == 0
    rest = client.receive(queue, consumer, max_messages=2)
    assert [m.payload for m in rest] == ["c"]
    assert client.pgq.finish_batch(rest[0].batch_id) == 1
    assert client.receive(queue, consumer) == []


def test_nack_takes_a_message_or_an_id(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send_batch(queue, "t", ["a", "b"])
    tick(queue)
    a, b = client.receive(queue, consumer)
    assert client.nack(a.batch_id, a, retry_after=0, reason="first") == 1
    assert client.nack(a.batch_id, b.msg_id, timedelta(0)) == 1
    client.ack(a.batch_id)
    client.admin.maint()
    tick(queue)
    again = client.receive(queue, consumer)
    assert [(m.msg_id, m.retry_count, m.last_error) for m in again] == [
        (a.msg_id, 1, "first"),
        (b.msg_id, 1, None),
    ]


def test_nack_of_several_returns_the_outcome_of_each(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send_batch(queue, "t", ["a", "b"])
    tick(queue)
    a, b = client.receive(queue, consumer)
    outcomes = client.nack(a.batch_id, [a, b.msg_id, 999_999], 60, "why")
    assert [(o.msg_id, o.ok) for o in outcomes] == [(a.msg_id, True), (b.msg_id, True), (999_999, False)]
    assert outcomes[2].reason


def test_a_message_without_retries_left_becomes_a_dead_letter_and_can_be_given_back(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.admin.set_queue_config(queue, "max_retries", 0)
    msg_id = client.send(queue, {"id": 1}, type="t")
    tick(queue)
    [message] = client.receive(queue, consumer)
    client.nack(message.batch_id, message, reason="no good")
    client.ack(message.batch_id)
    [letter] = client.dlq.inspect(queue)
    assert (letter.ev_id, letter.ev_type, letter.dl_reason, letter.consumer_name) == (
        msg_id,
        "t",
        "no good",
        "c",
    )
    client.dlq.requeue(letter.dl_id)
    assert client.dlq.inspect(queue) == []
    client.admin.maint()
    tick(queue)
    [back] = client.receive(queue, consumer)
    assert (back.msg_id, back.json()) == (msg_id, {"id": 1})
    with pytest.raises(pgque.PgqueNotDeadLetterError):
        client.dlq.requeue(letter.dl_id)


def test_dead_letters_are_replayed_purged_and_requeued_together(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.admin.alter_queue(queue, {"max_retries": 0})

    def fail_all() -> None:
        tick(queue)
        batch = client.receive(queue, consumer)
        client.nack(batch[0].batch_id, batch, 0, "bad")
        client.ack(batch[0].batch_id)

    client.send_batch(queue, "t", ["a", "b", "c"])
    fail_all()
    first, *_ = client.dlq.inspect(queue)
    assert client.dlq.replay(first.dl_id) > 0
    assert client.dlq.replay_all(queue) == pgque.ReplayResult(2, 0, None)
    assert client.dlq.inspect(queue) == []
    fail_all()
    assert client.dlq.requeue_all(queue, 1) == 1
    assert client.dlq.purge(queue) == 0
    assert client.dlq.purge(queue, older_than=0) == 2


def test_dead_letters_are_counted_by_reason_and_dealt_with_reason_by_reason(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.admin.alter_queue(queue, {"max_retries": 0})
    client.send_batch(queue, ["a"] * 8)
    tick(queue)
    batch = client.receive(queue, consumer)
    for number, message in enumerate(batch):
        client.nack(message.batch_id, message, 0, ("no order 1", "no order 2", "late", "other")[number % 4])
    client.ack(batch[0].batch_id)
    reasons = client.dlq.reasons(queue)
    assert {(r.consumer_name, r.reason, r.dead_letters, r.held) for r in reasons} == {
        (consumer, "no order N", 4, 0),
        (consumer, "late", 2, 0),
        (consumer, "other", 2, 0),
    }
    assert reasons[0].oldest <= reasons[0].newest
    assert client.dlq.requeue_all(queue, 3, reason="no order N") == 3
    assert client.dlq.requeue_all(queue, reason="no order N") == 1
    assert client.dlq.replay_all(queue, limit=1, reason="late") == pgque.ReplayResult(1, 0, None)
    assert client.dlq.purge(queue, 0, reason="other") == 2
    (left,) = client.dlq.reasons(queue)
    assert client.dlq.delete(left.newest_dl_id) in [m.msg_id for m in batch]
    assert client.dlq.reasons(queue) == []


def test_the_past_is_read(client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick) -> None:
    client.admin.pause(queue)
    client.admin.resume(queue)
    calls = [action.call for action in client.monitor.list_actions(queue)]
    assert calls == ["resume", "pause", "subscribe", "create_queue"]
    (newest, *_) = client.monitor.list_actions(queue, limit=1)
    assert [action.call for action in client.monitor.list_actions(queue, before=newest.at)] == calls[1:]
    client.send_batch(queue, ["a", "b"])
    tick(queue)
    rates = client.monitor.queue_rates(queue, since=60, buckets=6)
    assert (len(rates), sum(rate.events for rate in rates)) == (6, 2)
    assert client.consumers.lags(queue, consumer) == []
    past = client.monitor.history(queue, consumer, since=60, buckets=6)
    assert len(past) == len(client.monitor.history(buckets=6)) == 6
    assert (past[1].start_at - past[0].start_at).total_seconds() == 10
    settings = {row.setting: row for row in client.admin.queue_settings(queue)}
    assert settings["max_retries"].source in ("built in", "all queues")
    client.admin.set_history("lags", timedelta(days=7))
    with pytest.raises(pgque.PgqueBadArgumentError):
        client.admin.set_history("other", 60)


def test_a_late_subscriber_can_start_at_the_earliest_message(
    client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.send(queue, "before")
    tick(queue)
    now = datetime.now(timezone.utc)
    client.send(queue, "after")
    tick_id = tick(queue)
    assert tick_id is not None
    assert client.subscribe(queue, "earliest", "earliest") == 1
    assert client.subscribe(queue, "latest", "latest") == 1
    assert client.subscribe(queue, "tick", tick_id - 1) == 1
    assert client.subscribe(queue, "time", now) == 1
    assert client.subscribe(queue, "time", now) == 0
    seen = {
        name: [m.payload for m in client.receive(queue, name)]
        for name in ("earliest", "latest", "tick", "time")
    }
    assert seen == {"earliest": ["before", "after"], "latest": [], "tick": ["after"], "time": ["after"]}


def test_peek_takes_nothing(client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick) -> None:
    client.send_batch(queue, "t", ["a", "b", "c"])
    tick(queue)
    assert [m.payload for m in client.peek(queue, 2)] == ["a", "b"]
    assert len(client.receive(queue, consumer)) == 3


def test_peek_shows_the_next_messages_of_the_slowest_consumer_or_of_the_one_named(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.subscribe(queue, "quick")
    sent = [client.send(queue, str(n)) for n in range(3)]
    tick(queue)
    batch = client.receive(queue, "quick")
    assert client.ack(batch[0].batch_id) == 1
    sent.append(client.send(queue, "later"))
    assert [message.msg_id for message in client.peek(queue)] == sent
    assert [message.msg_id for message in client.peek(queue, consumer=consumer)] == sent
    assert [message.msg_id for message in client.peek(queue, 2, consumer=consumer)] == sent[:2]
    assert [message.msg_id for message in client.peek(queue, consumer="quick")] == sent[3:]
    with pytest.raises(pgque.PgqueConsumerNotFoundError):
        client.peek(queue, consumer="nobody")


def test_the_batch_functions_of_pgq_work(
    client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    ids = client.send_batch(queue, "t", ["a", "b"])
    tick(queue)
    batch_id = client.pgq.next_batch(queue, consumer)
    assert batch_id is not None
    events = client.pgq.get_batch_events(batch_id)
    assert [(e.id, e.type, e.data) for e in events] == [(ids[0], "t", "a"), (ids[1], "t", "b")]
    info = client.pgq.get_batch_info(batch_id)
    assert (info.queue_name, info.consumer_name) == (queue, consumer)
    assert info.batch_start <= info.batch_end
    assert client.pgq.event_retry(batch_id, ids[0], 60) == 1
    assert client.pgq.event_retry(batch_id, ids[1], datetime.now(timezone.utc) + timedelta(hours=1)) == 1
    assert client.pgq.batch_retry(batch_id, 60) == 0
    assert client.pgq.finish_batch(batch_id) == 1
    assert client.pgq.next_batch(queue, consumer) is None


def test_workers_of_one_consumer_share_its_messages(
    client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    assert client.subscribe_subconsumer(queue, "group", "w1") == 1
    assert client.subscribe_subconsumer(queue, "group", "w1") == 0
    client.subscribe_subconsumer(queue, "group", "w2")
    client.send_batch(queue, "t", [str(n) for n in range(10)])
    tick(queue)
    one = client.receive_coop(queue, "group", "w1", max_messages=5)
    two = client.receive_coop(queue, "group", "w2", max_messages=5, dead_interval=60)
    assert [m.payload for m in one] == ["0", "1", "2", "3", "4"]
    assert [m.payload for m in two] == ["5", "6", "7", "8", "9"]
    assert client.touch_subconsumer(queue, "group", "w1") == 1
    with pytest.raises(pgque.PgqueError):
        client.receive(queue, "group")
    client.ack(one[0].batch_id)
    assert client.unsubscribe_subconsumer(queue, "group", "w1") == 1
    assert client.unsubscribe_subconsumer(queue, "group", "w2", 1) == 1


def test_a_queue_is_made_configured_paused_and_dropped(client: pgque.PgqueClient) -> None:
    name = "Ünïcode; 'queue' \"x\""
    assert client.admin.create_queue(name, {"max_retries": 3, "rotation_period": timedelta(hours=1)}) == 1
    assert client.admin.create_queue(name) == 0
    [info] = client.monitor.get_queue_info(name)
    assert (info.queue_name, info.queue_max_retries, info.queue_rotation_period) == (
        name,
        3,
        timedelta(hours=1),
    )
    assert client.admin.queue_config(name)["max_retries"] == "3"
    client.admin.set_queue_config(name, "max_retries", None)
    [info] = client.monitor.get_queue_info(name)
    assert info.queue_max_retries == 5
    client.admin.pause(name)
    with pytest.raises(pgque.PgqueQueueDisabledError):
        client.send(name, "x")
    client.admin.resume(name)
    client.send(name, "x")
    client.subscribe(name, "c")
    with pytest.raises(pgque.PgqueQueueInUseError):
        client.admin.drop_queue(name)
    assert client.admin.drop_queue(name, force=True) == 1


def test_figures_and_health_are_read(client: pgque.PgqueClient, queue: str, consumer: str) -> None:
    assert client.monitor.version() == pgque.__version__
    assert {row.component for row in client.monitor.status()} >= {"pgque", "ticker"}
    assert any(metric.queue == queue for metric in client.monitor.metrics())
    assert {check.status for check in client.monitor.health()} <= {"ok", "warn", "fail"}
    assert [info.queue_name for info in client.monitor.get_queue_info(queue)] == [queue]
    assert queue in {info.queue_name for info in client.monitor.get_queue_info()}
    [info] = client.consumers.get_info(queue, consumer)
    assert (info.queue_name, info.consumer_name, info.current_batch) == (queue, consumer, None)
    assert consumer in {info.consumer_name for info in client.consumers.get_info(queue)}
    assert len(client.consumers.get_info()) >= 1
    assert client.unsubscribe(queue, consumer) == 1
    assert client.unsubscribe(queue, consumer) == 0


def test_ticker_all_ticks_every_queue_with_news(client: pgque.PgqueClient, queue: str, consumer: str) -> None:
    client.send(queue, "x")
    client.force_next_tick(queue)
    assert client.ticker_all() >= 1
    assert client.ticker(queue) is None
    assert len(client.receive(queue, consumer)) == 1


# -- transactions ------------------------------------------------------------


def test_a_wrapped_connection_is_neither_committed_nor_closed(dsn: str, queue: str, conn: Connection) -> None:
    with psycopg.connect(dsn) as own:
        with pgque.PgqueClient(own) as client:
            client.send(queue, "x")
        assert not own.closed
        assert own.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        own.rollback()
    assert pgque.PgqueClient(conn).peek(queue) == []


def test_checking_the_version_leaves_no_transaction_open(dsn: str) -> None:
    with pgque.connect(dsn) as client:
        assert client.conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_leaving_the_block_commits_and_an_exception_rolls_back(
    dsn: str, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    with pgque.connect(dsn) as own:
        own.send(queue, "kept")
    with pytest.raises(RuntimeError, match="on purpose"), pgque.connect(dsn) as own:
        own.send(queue, "gone")
        raise RuntimeError("on purpose")
    assert own.conn.closed
    tick(queue)
    assert [m.payload for m in client.receive(queue, consumer)] == ["kept"]


def test_with_autocommit_each_call_is_a_transaction(dsn: str, conn: Connection, queue: str) -> None:
    with pgque.connect(dsn, autocommit=True) as own:
        own.send(queue, "x")
        assert own.conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_connection_with_another_row_factory_can_be_wrapped(dsn: str, queue: str) -> None:
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as own:
        assert pgque.PgqueClient(own).send(queue, "x") > 0


def test_a_connection_whose_cursors_read_text_only_can_be_wrapped(
    dsn: str, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send(queue, {"n": 1}, headers={"n": 2}, ttl=60)
    tick(queue)
    with psycopg.connect(dsn, cursor_factory=psycopg.ClientCursor) as own:
        [message] = pgque.PgqueClient(own).receive(queue, consumer)
    assert (message.json(), message.headers) == ({"n": 1}, {"n": 2})
    assert isinstance(message.expires_at, datetime)


def test_a_pool_lends_a_connection_for_one_transaction(
    dsn: str, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    with ConnectionPool(dsn, min_size=1, max_size=2, open=True) as pool:
        with pgque.PgqueClient.from_pool(pool) as borrowed:
            borrowed.send(queue, "kept")
        with pytest.raises(RuntimeError, match="on purpose"), pgque.PgqueClient.from_pool(pool) as borrowed:
            borrowed.send(queue, "gone")
            raise RuntimeError("on purpose")
    tick(queue)
    assert [m.payload for m in client.receive(queue, consumer)] == ["kept"]


def test_receive_work_and_ack_share_a_transaction(
    dsn: str, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send(queue, "x")
    tick(queue)
    with pgque.connect(dsn) as own:
        [message] = own.receive(queue, consumer)
        own.ack(message.batch_id)
        own.conn.rollback()
    assert [m.payload for m in client.receive(queue, consumer)] == ["x"]


# -- values ------------------------------------------------------------


def test_a_message_without_a_payload_is_not_json() -> None:
    with pytest.raises(ValueError, match="no payload"):
        pgque.Message(1, 2, "t", None).json()
    with pytest.raises(json.JSONDecodeError):
        pgque.Message(1, 2, "t", "not json").json()


def test_values_are_frozen_and_have_no_dict() -> None:
    message = pgque.Message(1, 2, "t", "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.payload = "y"  # type: ignore[misc]
    assert not hasattr(message, "__dict__")


def test_the_variable_pgque_dsn_counts_wherever_no_connection_string_is_given(
    own_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUE_DSN", own_dsn)
    monkeypatch.setenv("PGHOST", "/nowhere")
    with pgque.connect() as client:
        client.admin.create_queue("q")
        client.subscribe("q", "c")
        client.subscribe("q", "pool")
        client.send("q", "m")

    async def version() -> str:
        async with await pgque.connect_async() as there:
            return await there.monitor.version()

    assert asyncio.run(version()) == pgque.__version__
    ticking = threading.Event()
    ticker = threading.Thread(target=run_ticker, args=("", ticking))
    ticker.start()
    seen: list[str | None] = []
    try:
        with pgque.PgqueClient.connect(autocommit=True) as client:
            while client.monitor.get_queue_info("q")[0].ev_new:
                assert ticker.is_alive()
        worker = pgque.Worker("", queue="q", consumer="pool")
        worker.handler("*")(lambda message: seen.append(message.payload))
        worker.run(until_idle=True)
        consumer = pgque.Consumer("", queue="q", consumer="c")

        @consumer.handler("*")
        def last(message: pgque.Message) -> None:
            seen.append(message.payload)
            consumer.stop()

        consumer.run()
    finally:
        ticking.set()
        ticker.join(20)
    assert seen == ["m", "m"]
    assert b"pgque_queue_events_total" in render()
    uninstall()
    with pytest.raises(pgque.PgqueVersionError):
        pgque.connect()
    with pytest.raises(pgque.PgqueConnectionError, match="/elsewhere"):
        pgque.connect("host=/elsewhere")
