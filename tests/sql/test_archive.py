"""Looking at messages, purging them, and the archive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    extend,
    figure,
    forced_tick,
    ids,
    move_clock,
    nack,
    offer,
    outcome,
    post,
    receive,
    refused,
    rotate,
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

ARCHIVE = (
    "select a.queue, a.consumer_name, a.msg_id, a.type, a.payload, a.headers, a.key, a.receive_count, a.worker, a.outcome"
    " from pgque.archive_list(%s) as a order by a.msg_id"
)


@pytest.mark.parametrize("whole", [True, False])
def test_an_archived_message_is_acked_and_kept_with_its_story(pool: Connection, whole: bool) -> None:
    sent = [post(pool, "q", f"body {n}", "kind", headers='{"h": 1}', key=f"k{n}") for n in range(2)]
    tick(pool, "q")
    batch = take(pool, "q", "w7")
    if whole:
        done = rows(pool, "select msg_id, ok from pgque.archive(%s)", batch[0].batch_id)
        assert sorted(done) == [(i, True) for i in sent]
    else:
        assert outcome(pool, "archive", batch[0].batch_id, sent) == dict.fromkeys(sent)
    found = rows(pool, ARCHIVE, "q")
    assert [f[:9] for f in found] == [
        ("q", "c", i, "kind", f"body {n}", {"h": 1}, f"k{n}", 1, "w7") for n, i in enumerate(sent)
    ]
    assert all(f[9] for f in found)
    times = rows(pool, "select a.sent_at, a.archived_at from pgque.archive_list('q') as a")
    assert [t[0] for t in sorted(times)] == sorted(m.created_at for m in batch)
    assert all(t[0] <= t[1] for t in times)
    move_clock(pool, "1 hour")
    assert take(pool, "q") == []
    assert ack(pool, batch[0].batch_id) == 0
    assert figure(pool, "archived", "q") == 2


def test_a_message_archived_in_a_transaction_that_rolls_back_is_redelivered(pool: Connection) -> None:
    sent = offer(pool, "q", 1)
    (message,) = take(pool, "q")
    pool.execute("begin")
    rows(pool, "select * from pgque.archive(%s)", message.batch_id)
    pool.execute("rollback")
    assert rows(pool, ARCHIVE, "q") == []
    move_clock(pool, "1 hour")
    assert ids(take(pool, "q")) == sent


@pytest.mark.parametrize("how", ["whole", "ids", "next", "plain"])
def test_a_queue_set_to_archive_keeps_whatever_is_acked(pool: Connection, how: str) -> None:
    configure(pool, "q", archive_on_ack="true")
    sent = offer(pool, "q", 3)
    batch = receive(pool, "q") if how == "plain" else take(pool, "q")
    token = batch[0].batch_id
    if how == "ids":
        outcome(pool, "ack", token, sent)
    elif how == "next":
        take(pool, "q", ack_batch=token)
    else:
        ack(pool, token)
    assert [f[2] for f in rows(pool, ARCHIVE, "q")] == sent
    configure(pool, "q", archive_on_ack="false")
    offer(pool, "q", 2)
    batch = receive(pool, "q") if how == "plain" else take(pool, "q")
    ack(pool, batch[0].batch_id)
    assert len(rows(pool, ARCHIVE, "q")) == 3


def test_of_a_batch_that_is_partly_nacked_only_the_rest_is_archived(pool: Connection) -> None:
    configure(pool, "q", archive_on_ack="true")
    sent = offer(pool, "q", 4)
    batch = take(pool, "q")
    nack(pool, batch[0], "1 hour")
    outcome(pool, "dead", batch[1].batch_id, [sent[1]], "x")
    assert ack(pool, batch[0].batch_id) == 1
    assert [f[2] for f in rows(pool, ARCHIVE, "q")] == sent[2:]


def test_each_consumers_ack_is_archived_for_itself(pool: Connection) -> None:
    subscribe(pool, "q", "d")
    (sent,) = offer(pool, "q", 1)
    for consumer in "cd":
        rows(pool, "select pgque.archive(%s)", take(pool, "q", consumer=consumer)[0].batch_id)
    assert sorted((f[2], f[1]) for f in rows(pool, ARCHIVE, "q")) == [(sent, "c"), (sent, "d")]


def test_an_archived_message_is_replayed_as_a_new_one(pool: Connection) -> None:
    sent = post(pool, "q", "body", "kind", headers='{"h": 1}', partition_key="p")
    tick(pool, "q")
    rows(pool, "select pgque.archive(%s)", take(pool, "q")[0].batch_id)
    archive_id = value(pool, "select a.archive_id from pgque.archive_list('q') as a")
    again = value(pool, "select pgque.archive_replay(%s)", archive_id)
    assert again > sent
    tick(pool, "q")
    (message,) = work_off(pool, "q")
    assert (message.msg_id, message.payload, message.type, message.headers, message.receive_count) == (
        again,
        "body",
        "kind",
        {"h": 1},
        1,
    )
    assert value(pool, "select pgque.archive_replay(%s)", archive_id) > again
    refused("PQ010", value, pool, "select pgque.archive_replay(%s)", 10**12)


def test_the_archive_is_listed_since_a_time_and_purged_by_leaves(pool: Connection) -> None:
    for day in range(0, 200, 10):
        move_clock(pool, f"{day} days")
        offer(pool, "q", 2)
        rows(pool, "select pgque.archive(%s)", take(pool, "q")[0].batch_id)
        value(pool, "select pgque.maint()")
    assert len(rows(pool, "select * from pgque.archive_list('q', 1000)")) == 40
    assert len(rows(pool, "select * from pgque.archive_list('q', 7)")) == 7
    recent = "select * from pgque.archive_list('q', 1000, pgque.clock() - interval '25 days')"
    assert len(rows(pool, recent)) == 6
    dropped = value(pool, "select pgque.archive_purge('q', pgque.clock() - interval '95 days')")
    assert dropped >= 1
    left = rows(pool, "select a.archived_at from pgque.archive_list('q', 1000) as a")
    assert 18 <= len(left) < 40
    assert value(pool, "select pgque.archive_purge('q', pgque.clock() - interval '95 days')") == 0
    assert len(rows(pool, recent)) == 6


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_the_first_archivers_of_a_day_do_not_wait_for_each_other(
    pool: Connection, transaction: Callable[..., Connection], isolation: str
) -> None:
    value(pool, "select pgque.create_queue('r')")
    for name, consumer in (("q", "d"), ("r", "c")):
        subscribe(pool, name, consumer)
    sent = offer(pool, "q")[0], offer(pool, "r")[0]
    batches = [
        receive(pool, name, consumer)[0].batch_id for name, consumer in (("q", "c"), ("q", "d"), ("r", "c"))
    ]
    archivers = [transaction(isolation, pool.info.dsn) for _ in batches]
    for archiver, batch in zip(archivers, batches, strict=True):
        archiver.execute("set local lock_timeout = '5s'")
        assert len(rows(archiver, "select * from pgque.archive(%s)", batch)) == 1
    for archiver in archivers:
        archiver.commit()
    for _ in range(2):  # maintenance moves them into leaves of their own
        found = rows(
            pool,
            "select a.archive_id, a.consumer_name, a.msg_id"
            " from pgque.archive_list('q', null, '2020-01-01Z', now() + interval '1 s') a",
        )
        assert {f[1:] for f in found} == {("c", sent[0]), ("d", sent[0])}
        assert [s for _, s in rows(pool, LISTED)] == ["archived", "archived"]
        assert value(pool, "select pgque.archive_replay(%s)", found[0][0]) > 0
        tick(pool, "q")
        for consumer in "cd":
            ack(pool, receive(pool, "q", consumer)[0].batch_id)
        value(pool, "select pgque.maint_tables()")
    assert value(pool, "select pg_relation_size('pgque.archive_0')") == 0
    (late,) = offer(pool, "r")
    rows(pool, "select pgque.archive(%s)", receive(pool, "r")[0].batch_id)
    assert value(pool, "select pgque.archive_purge('q', now() + interval '2 days')") == 1
    assert rows(pool, ARCHIVE, "q") == []
    assert [f[2] for f in rows(pool, ARCHIVE, "r")] == [sent[1], late]


def test_what_waits_for_its_leaf_of_the_archive_is_purged_too(pool: Connection) -> None:
    value(pool, "select pgque.create_queue('r')")
    for name in "qr":
        subscribe(pool, name, "d")
        offer(pool, name)
        rows(pool, "select pgque.archive(%s)", receive(pool, name, "d")[0].batch_id)
    assert value(pool, "select pgque.archive_purge('q', now() - interval '1 day')") == 0
    assert value(pool, "select pgque.archive_purge('q', now() + interval '2 days')") == 1
    assert rows(pool, ARCHIVE, "q") == []
    assert len(rows(pool, ARCHIVE, "r")) == 1
    assert value(pool, "select pgque.drop_queue('r', true)") == 1
    assert value(pool, "select count(*) from pgque.archive") == 0


def test_purging_the_archive_of_one_queue_keeps_anothers(pool: Connection) -> None:
    value(pool, "select pgque.create_queue('r')")
    subscribe(pool, "r")
    for name in "qr":
        offer(pool, name, 3)
        rows(pool, "select pgque.archive(%s)", take(pool, name)[0].batch_id)
    move_clock(pool, "400 days")
    value(pool, "select pgque.archive_purge('q', pgque.clock() - interval '100 days')")
    assert len(rows(pool, ARCHIVE, "r")) == 3
    assert rows(pool, ARCHIVE, "q") == []


LISTED = "select l.msg_id, l.status from pgque.list_messages('q', null, 1000) as l order by 1, 2"


def test_every_message_is_listed_with_its_status(pool: Connection) -> None:
    delayed = post(pool, "q", delay="1 hour")
    held, failed, buried, acked, archived, waiting = offer(pool, "q", 6)
    batch = take(pool, "q", "w1", 5)
    token = batch[0].batch_id
    nack(pool, batch[1], "1 hour", "why")
    outcome(pool, "dead", token, [buried], "broken")
    outcome(pool, "ack", token, [acked])
    outcome(pool, "archive", token, [archived])
    assert rows(pool, LISTED) == sorted(
        [
            (delayed, "delayed"),
            (held, "processing"),
            (failed, "retry"),
            (buried, "dead"),
            (archived, "archived"),
            (waiting, "pending"),
        ]
    ) or dict(rows(pool, LISTED)) == {
        delayed: "delayed",
        held: "processing",
        failed: "retry",
        buried: "dead",
        waiting: "pending",
    }
    for msg_id, expected in (
        (delayed, "delayed"),
        (held, "processing"),
        (failed, "retry"),
        (buried, "dead"),
        (archived, "archived"),
        (waiting, "pending"),
    ):
        # What is delayed waits for every consumer.
        assert list(status(pool, "q", msg_id).values()) == [expected]
        alone = rows(pool, "select l.msg_id from pgque.list_messages('q', %s) as l", expected)
        assert alone in ([(msg_id,)], [] if expected == "archived" else None)
    (row,) = rows(
        pool,
        "select l.consumer_name, l.type, l.payload, l.receive_count, l.retry_count, l.worker, l.batch_id, l.available_at > pgque.clock()"
        " from pgque.list_messages('q', 'processing') as l",
    )
    assert row[:7] == ("c", "default", "1", 1, 0, "w1", token)
    (row,) = rows(
        pool,
        "select l.receive_count, l.retry_count, l.last_error, extract(epoch from l.available_at - pgque.clock())"
        " from pgque.list_messages('q', 'retry') as l",
    )
    assert row[:3] == (1, 1, "why")
    assert 3500 < row[3] <= 3600
    refused("PQ005", rows, pool, "select * from pgque.list_messages('q', 'nonsense')")
    assert len(rows(pool, "select * from pgque.list_messages('q', null, 2)")) == 2


def test_a_message_whose_lease_expired_is_listed_as_available_again(pool: Connection) -> None:
    (sent,) = offer(pool, "q", 1)
    take(pool, "q")
    assert status(pool, "q", sent) == {"c": "processing"}
    move_clock(pool, "1 hour")
    assert status(pool, "q", sent)["c"] in ("pending", "retry")


def test_looking_changes_nothing(pool: Connection) -> None:
    sent = offer(pool, "q", 5)
    for _ in range(3):
        rows(pool, LISTED)
        rows(pool, "select * from pgque.message_status('q', %s)", sent[0])
        rows(pool, "select * from pgque.peek('q', 5)")
        rows(pool, "select * from pgque.list_workers()")
    assert [(m.msg_id, m.receive_count) for m in take(pool, "q")] == [(i, 1) for i in sent]


def test_a_message_has_a_status_per_consumer(pool: Connection) -> None:
    for name in ("d", "e", "f"):
        subscribe(pool, "q", name)
    (sent,) = offer(pool, "q", 1)
    take(pool, "q")
    outcome(pool, "dead", take(pool, "q", consumer="d")[0].batch_id, [sent], "x")
    rows(pool, "select pgque.archive(%s)", receive(pool, "q", "e")[0].batch_id)
    found = status(pool, "q", sent)
    assert found == {"c": "processing", "d": "dead", "e": "archived", "f": "pending"}


@pytest.mark.parametrize("msg_id", [0, -1, 10**15])
def test_a_message_that_nobody_knows_has_no_status(conn: Connection, subscribed: str, msg_id: int) -> None:
    refused("PQ010", rows, conn, "select * from pgque.message_status(%s, %s)", subscribed, msg_id)


def test_a_message_not_yet_ticked_is_pending(conn: Connection, subscribed: str) -> None:
    sent = send(conn, subscribed)
    assert status(conn, subscribed, sent) == {"c": "pending"}


def test_purging_takes_what_is_pending_in_flight_delayed_and_retried(pool: Connection) -> None:
    subscribe(pool, "q", "plain")
    offer(pool, "q", 6)
    batch = take(pool, "q", "w1", 2)
    nack(pool, batch[1], "1 hour")
    opened = receive(pool, "q", "plain", 3)
    post(pool, "q", delay="1 hour")
    post(pool, "q", key="k")
    send(pool, "q")  # not ticked yet
    assert value(pool, "select pgque.purge('q')") >= 8
    assert value(pool, "select pgque.purge('q')") == 0
    assert ack(pool, batch[0].batch_id) == 0
    assert set(outcome(pool, "ack", batch[0].batch_id, ids(batch)).values()) != {None}
    assert extend(pool, batch[0].batch_id, "1 minute") == 0
    assert ack(pool, opened[0].batch_id) == 0
    assert rows(pool, LISTED) == []
    move_clock(pool, "2 hours")
    settle(pool, "q")
    assert take(pool, "q") == []
    assert receive(pool, "q", "plain") == []
    later = [post(pool, "q", "new", key="k"), send(pool, "q")]
    tick(pool, "q")
    assert ids(work_off(pool, "q")) == later
    assert ids(receive(pool, "q", "plain")) == later


def test_an_uncommitted_send_survives_a_purge(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    one = transaction("read committed", own_dsn)
    kept = send(one, "q", "kept")
    send_many(pool, "q", 3)
    assert value(pool, "select pgque.purge('q')") == 3
    tick(pool, "q")
    one.execute("commit")
    assert value(pool, "select pgque.ticker('q')")
    assert ids(work_off(pool, "q")) == [kept]


def test_a_purge_that_is_rolled_back_purged_nothing(pool: Connection) -> None:
    sent = offer(pool, "q", 5)
    token = take(pool, "q", "w1", 2)[0].batch_id
    pool.execute("begin")
    value(pool, "select pgque.purge('q')")
    pool.execute("rollback")
    assert outcome(pool, "ack", token, sent[:2]) == dict.fromkeys(sent[:2])
    assert ids(work_off(pool, "q")) == sent[2:]


def test_a_purge_takes_the_dead_letters_of_nobody(pool: Connection) -> None:
    (sent,) = offer(pool, "q", 1)
    outcome(pool, "dead", take(pool, "q")[0].batch_id, [sent], "x")
    value(pool, "select pgque.purge('q')")
    assert status(pool, "q", sent) == {"c": "dead"}


def test_the_archive_outlives_rotation_and_its_consumer(pool: Connection) -> None:
    (sent,) = offer(pool, "q", 1)
    rows(pool, "select pgque.archive(%s)", take(pool, "q")[0].batch_id)
    for _ in range(4):
        offer(pool, "q", 5)
        work_off(pool, "q")
        forced_tick(pool, "q")
        rotate(pool, "q")
    value(pool, "select pgque.unsubscribe('q', 'c')")
    found: list[Any] = rows(pool, ARCHIVE, "q")
    assert [(f[1], f[2]) for f in found] == [("c", sent)]


def test_metrics_show_what_is_in_flight(pool: Connection) -> None:
    offer(pool, "q", 5)
    batch = take(pool, "q", "w1", 3)
    take(pool, "q", "w2", 1)
    assert figure(pool, "in_flight", "q") == 4
    ack(pool, batch[0].batch_id)
    assert figure(pool, "in_flight", "q") == 1


def test_a_purge_or_drop_of_an_archive_keeps_no_other_queue_waiting(
    own: Connection,
    own_dsn: str,
    transaction: Callable[..., Connection],
    background: Callable[..., Any],
    connect: Callable[..., Connection],
) -> None:
    for name in ("a", "b", "d"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
        configure(own, name, archive_on_ack="true")
        value(own, "select pgque.maint_tables()")
        offer(own, name)
        ack(own, receive(own, name)[0].batch_id)
    leaves = (
        "select count(*) from pg_inherits as i"
        " where i.inhparent = 'pgque.archive'::regclass and i.inhrelid <> 'pgque.archive_0'::regclass"
    )
    assert value(own, leaves) == 6  # of today and of tomorrow
    reader, admin = transaction(dsn=own_dsn), transaction(dsn=own_dsn)
    offer(own, "a", 2)
    ack(reader, receive(reader, "a", count=1)[0].batch_id)
    assert value(admin, "select pgque.archive_purge('b', now() + interval '2 days')") == 1
    assert value(admin, "select pgque.drop_queue('d', true)") == 1
    # Both are open, and it goes on.
    again = connect(own_dsn)
    again.execute("set lock_timeout = '5s'")
    offer(again, "b", 1)
    reader.commit()
    ack(again, receive(again, "a", count=1)[0].batch_id)
    admin.commit()
    assert value(own, "select count(*) from pgque.archive_list('b')") == 0
    assert value(own, "select count(*) from pgque.archive_list('a')") == 3
    # Only the one whose queue is gone: in the others something may still be archived.
    value(own, "select pgque.maint_tables()")
    assert value(own, leaves) == 4
    move_clock(own, "3 days")
    value(own, "select pgque.maint_tables()")
    assert value(own, leaves) == 5  # besides those of two days, the one with messages


def test_a_replay_locks_no_leaf_but_that_of_its_message(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    configure(own, "q", archive_on_ack="true")
    for day in range(5):
        move_clock(own, f"{day} days")
        offer(own, "q")
        ack(own, receive(own, "q")[0].batch_id)
    oldest = value(own, "select min(a.archive_id) from pgque.archive_list('q') as a")
    with own.transaction():
        value(own, "select pgque.archive_replay(%s)", oldest)
        locked = value(
            own,
            "select count(*) from pg_locks as l join pg_inherits as i on i.inhrelid = l.relation"
            " where l.pid = pg_backend_pid() and i.inhparent = 'pgque.archive'::regclass",
        )
    assert locked == 0
