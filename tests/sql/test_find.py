"""Messages are found: one by its id, some by filters, all of them page by page."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row

from sql.helpers import (
    Connection,
    ack,
    configure,
    forced_tick,
    nack_ids,
    offer,
    outcome,
    post,
    pump,
    receive,
    refused,
    rotate,
    rows,
    send,
    send_many,
    status,
    subscribe,
    take,
    tick,
    value,
)

LIST = "select * from pgque.list_messages('q'"
Rows = list[Any]


def listed(conn: Connection, arguments: str = "", *args: Any) -> Rows:
    """Return what list_messages('q' …) returns, as named tuples."""
    with conn.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(f"{LIST}{arguments})".encode(), args or None).fetchall()


def found(conn: Connection, msg_id: int) -> Rows:
    """Return what get_message() returns."""
    with conn.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute("select * from pgque.get_message('q', %s)", [msg_id]).fetchall()


def paged(conn: Connection, size: int, arguments: str = "") -> Rows:
    """Read a list page by page."""
    result: Rows = []
    after = 0
    while page := listed(conn, f", null, {size}, after_id => {after}{arguments}"):
        assert len({row.msg_id for row in page[:-1]}) <= size
        result += page
        after = page[-1].msg_id
    return result


def downwards(conn: Connection, size: int, arguments: str = "", *args: Any) -> Rows:
    """Read a list page by page, the newest first."""
    result: Rows = []
    before = 2**63 - 1
    while page := listed(conn, f", limit_count => {size}, before_id => {before}{arguments}", *args):
        assert len({row.msg_id for row in page[:-1]}) <= size
        result += page
        before = page[-1].msg_id
    return result


def key(row: Any) -> tuple[int, str, str]:
    return row.msg_id, row.consumer_name or "", row.status


def agree(conn: Connection) -> Rows:
    """Check that each way to look at a message shows the same; return all there are."""
    everything = listed(conn, ", null, 100000")
    by_id = defaultdict(list)
    for row in everything:
        by_id[row.msg_id].append(row)
    last = value(
        conn,
        "select pg_sequence_last_value(q.queue_event_seq) from pgque.queue as q where q.queue_name = 'q'",
    )
    for msg_id in range(1, last + 3):
        if msg_id in by_id:
            assert sorted(map(str, found(conn, msg_id))) == sorted(map(str, by_id[msg_id]))
            assert status(conn, "q", msg_id) == {row.consumer_name: row.status for row in by_id[msg_id]}
        else:
            refused("PQ010", found, conn, msg_id)
            refused("PQ010", status, conn, "q", msg_id)
    for size in (1, 7):
        assert sorted(map(str, paged(conn, size))) == sorted(map(str, everything))
    return everything


@pytest.mark.parametrize("seed", [1, 3])
def test_one_message_a_page_and_the_whole_list_agree(
    own: Connection, seed: int, connect: Callable[..., Any]
) -> None:
    """Random work: senders that commit late, keys, delays, retries, dead letters, several ticks and rotations."""
    choose = random.Random(seed)  # noqa: S311
    value(own, "select pgque.create_queue('q', '{\"max_retries\": 1, \"max_receive_attempts\": 2}')")
    for consumer in ("a", "b"):
        subscribe(own, "q", consumer)
    late = [connect(own.info.dsn) for _ in range(2)]
    for connection in late:
        connection.execute("begin")
        connection.execute("select pg_current_xact_id()")
    delays = seed == 3  # without, the log is in the order of ids, and is read in parts
    for n in range(60):
        act = choose.randrange(9)
        if act <= 2:
            post(own, "q", f"body {n}", choose.choice("xyz"))
        elif act == 3:
            post(choose.choice([*late, own]), "q", f"late {n}", "x")
        elif act == 4 and delays and n % 2:
            post(own, "q", f"keyed {n}", "y", key=choose.choice("kl"))
        elif act == 4 and delays:
            post(own, "q", f"delayed {n}", "y", delay=choose.choice(("1 microsecond", "1 hour")))
            pump(own)
        elif act == 5:
            forced_tick(own, "q")
        elif act == 6 and n > 20:
            batch = take(own, "q", "w", 2, consumer="a")
            if batch and choose.random() < 0.7:
                outcome(
                    own,
                    choose.choice(("nack", "dead", "ack", "archive")),
                    batch[0].batch_id,
                    [batch[0].msg_id],
                )
        elif act == 7 and n > 20:
            plain = receive(own, "q", "b", 3)
            if plain and choose.random() < 0.8:
                nack_ids(own, plain[0].batch_id, [plain[0].msg_id], "0")
                ack(own, plain[0].batch_id)
        elif act == 8 and n > 40 and late:
            late.pop().execute("commit")
        if n == 30:
            rotate(own, "q")
    everything = agree(own)
    assert {row.status for row in everything} > {"pending"}
    for connection in late:
        connection.execute("commit")
    forced_tick(own, "q")
    everything = agree(own)

    def filtered(keep: Callable[[Any], bool]) -> Rows:
        return [row for row in everything if keep(row)]

    times = sorted({row.created_at for row in everything})
    middle = times[len(times) // 2]
    for arguments, args, keep in [
        (", only_status => 'pending'", [], lambda m: m.status == "pending"),
        (", only_status => 'retry'", [], lambda m: m.status == "retry"),
        (", only_status => 'processing'", [], lambda m: m.status == "processing"),
        (", only_status => 'delayed'", [], lambda m: m.status == "delayed"),
        (", only_status => 'dead'", [], lambda m: m.status == "dead"),
        (", only_status => 'archived'", [], lambda m: m.status == "archived"),
        (", only_type => 'x'", [], lambda m: m.type == "x"),
        (", only_key => 'k'", [], lambda m: m.key == "k"),
        (", only_consumer => 'b'", [], lambda m: m.consumer_name == "b"),
        (", since => %s", [middle], lambda m: m.created_at >= middle),
        (", until => %s", [middle], lambda m: m.created_at < middle),
        (", matching => 'BODY 1'", [], lambda m: "body 1" in m.payload),
        (", after_id => 20, only_type => 'y'", [], lambda m: m.msg_id > 20 and m.type == "y"),
    ]:
        assert listed(own, f", limit_count => 100000{arguments}", *args) == filtered(keep), arguments
        if "after_id" not in arguments:
            # The newest first, page by page: each id once, with all its rows
            assert [key(row) for row in downwards(own, 7, arguments, *args)] == sorted(
                map(key, filtered(keep)), key=lambda place: (-place[0], *place[1:])
            ), arguments
    # A batch of many ids is read in parts of the log.
    assert listed(own, ", 'pending', 3") == filtered(lambda m: m.status == "pending")[:3]


def test_a_long_list_is_read_in_parts(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = [msg_id for _ in range(8) for msg_id in offer(own, "q", 1500)]
    post(own, "q", "needle", "rare")
    tick(own, "q")
    last = sent[-1] + 1
    assert [row.msg_id for row in listed(own, ", 'pending', 5")] == sent[:5]
    assert [row.msg_id for row in listed(own, ", 'pending', 5, after_id => %s", sent[7000])] == sent[
        7001:7006
    ]
    assert [row.msg_id for row in listed(own, ", 'pending', 5, only_type => 'rare'")] == [last]
    assert [row.msg_id for row in listed(own, ", null, 5, matching => 'Needle'")] == [last]
    assert [row.payload for row in found(own, last)] == ["needle"]
    assert [row.msg_id for row in listed(own, ", 'pending', 100000")] == [*sent, last]
    # Only the part of the log where a message can be is read.
    blocks = (
        "select sum(pg_stat_get_xact_blocks_fetched(c.oid)) from pg_class as c where c.relname ~ '^event_1_0'"
    )
    with own.transaction():
        before = value(own, blocks)
        found(own, sent[6000])
        read = value(own, blocks) - before
    whole = value(own, "select sum(pg_relation_size(l.leaf)) / 8192 from pgque._leaves(1) as l")
    assert 0 < read < whole / 2

    # The newest first: the end of the log, or the part between two ids
    for arguments, expected in (
        (", null, 5, before_id => 9223372036854775807", [last, *sent[:-5:-1]]),
        (f", null, 5, before_id => {sent[7000]}", sent[6999:6994:-1]),
        (
            f", null, 5000, before_id => {sent[7000]}, after_id => {sent[6996]}",
            sent[6999:6996:-1],
        ),
        (f", null, 5, only_type => 'none', before_id => {sent[7000]}, after_id => {sent[6800]}", []),
    ):
        with own.transaction():
            before = value(own, blocks)
            assert [row.msg_id for row in listed(own, arguments)] == expected
            read = value(own, blocks) - before
        assert 0 < read < whole / 2, arguments
    assert [row.msg_id for row in downwards(own, 4000)] == [last, *reversed(sent)]


def test_what_is_known_of_a_message_is_told_from_its_sending_to_its_end(own: Connection) -> None:
    value(own, "select pgque.create_queue('q', '{\"max_retries\": 5}')")
    subscribe(own, "q")

    def history(msg_id: int) -> list[tuple[Any, ...]]:
        with own.cursor(row_factory=namedtuple_row) as cursor:
            story: list[Any] = cursor.execute(
                "select * from pgque.message_history('q', %s)", [msg_id]
            ).fetchall()
        times = [row.at for row in story if row.at]
        assert times == sorted(times)
        return [(row.event, row.consumer_name, row.worker, row.detail) for row in story]

    sent = [post(own, "q", f"body {n}", "x", ttl="1 day") for n in range(4)]
    delayed = post(own, "q", "later", "x", delay="1 hour")
    assert [row[0] for row in history(sent[0])] == ["sent", "expires"]
    assert ("due", None, None, None) in history(delayed)
    tick(own, "q")
    assert [row[0] for row in history(sent[0])] == ["sent", "ticked", "expires"]
    batch = take(own, "q", "w")[0].batch_id
    leased = history(sent[0])
    assert ("delivered", "c", "w", "delivery 1") in leased
    assert ("lease expires", "c", "w", None) in leased
    outcome(own, "nack", batch, [sent[0]], "1 hour", "no answer")
    assert ("due", "c", None, "rejected 1 time, no answer") in history(sent[0])
    outcome(own, "dead", batch, [sent[1]], "no such order")
    assert ("dead", "c", None, "1 delivery, no such order") in history(sent[1])
    outcome(own, "archive", batch, [sent[2]])
    assert ("archived", "c", "w", "archived, 1 delivery") in history(sent[2])
    ack(own, batch)
    assert history(sent[3])[-1] == ("done", None, None, None)
    # What somebody did by hand is part of it.
    value(own, "select pgque.cancel('q', %s)", sent[0])
    assert [row[0] for row in history(sent[0])][-2:] == ["cancel", "cancelled"]
    for unknown in (0, 99, None):
        refused("PQ010", history, unknown)
    refused("PQ001", rows, own, "select pgque.message_history('none', 1)")


def test_a_late_message_is_found_although_old_transactions_ticked(
    own: Connection, connect: Callable[..., Any]
) -> None:
    """A tick, and the one that follows, are stored by transactions that began before the sender's."""
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    subscribe(own, "q", "other")
    old, sender = (connect(own.info.dsn, autocommit=False) for _ in range(2))
    for connection in (old, sender):
        connection.execute("select pg_current_xact_id()")
    late = send_many(sender, "q", 4500)
    for _ in range(2):
        forced_tick(old, "q")
        old.commit()
    sender.commit()
    assert [row.status for row in found(own, late[0])] == ["pending"] * 2
    assert status(own, "q", late[-1]) == {"c": "pending", "other": "pending"}
    listing = listed(own, ", null, 100000, only_consumer => 'c'")
    assert [row.msg_id for row in listing] == late


def test_a_message_is_found_where_another_system_ticks(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    configure(own, "q", external_ticker="true")
    subscribe(own, "q")
    sent = [send(own, "q") for _ in range(3)]
    value(own, "select pgque.ticker('q', 1000, now(), 500)")
    value(own, "select pgque.ticker('q', 1001, now(), 1500)")
    assert [row.msg_id for n in sent for row in found(own, n)] == sent
    assert [row.msg_id for row in listed(own)] == sent
    # The numbers stay in the ticks when the queue is ticked here again.
    configure(own, "q", external_ticker="false")
    sent.append(send(own, "q"))
    forced_tick(own, "q")
    assert [row.msg_id for n in sent for row in found(own, n)] == sent
    assert [row.msg_id for row in listed(own, ", 'pending', 100, after_id => 2")] == sent[2:]


@pytest.mark.parametrize("worker", [None, "w"])
def test_a_message_that_is_delivered_while_it_is_listed_is_in_the_list(
    own: Connection,
    own_dsn: str,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
    worker: str | None,
) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    if worker:
        value(own, "select pgque.share_consumer('q', 'c')")
    sent = offer(own, "q", 2)
    # A list reads these notes when it has read what is leased, and before it reads the rest; an ordinary
    # delivery does not read them.
    between = connect(own_dsn, autocommit=False)
    between.execute("lock table pgque.queue_option in access exclusive mode")
    listing = background(listed, connect(own_dsn))
    wait_for_lock(listing.pid)
    got = take(own, "q", worker) if worker else receive(own, "q")
    assert [m.msg_id for m in got] == sent
    between.commit()
    assert [m[0] for m in listing.result()] == sent


def test_wrong_use_of_lists_is_refused(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    refused("PQ005", listed, own, ", 'lost'")
    refused("PQ005", listed, own, ", ''")
    refused("PQ005", listed, own, ", null, -1")
    refused("PQ010", value, own, "select pgque.get_message('q', null)")
    with pytest.raises(psycopg.errors.InvalidDatetimeFormat):
        listed(own, ", since => 'yesterday noon or so'")
    assert listed(own, ", null, 0, after_id => 0") == []
    subscribe(own, "q")
    send(own, "q")
    for far in (2**63 - 1, 2**63 - 2):
        assert listed(own, ", after_id => %s", far) == []
    assert len(listed(own, ", after_id => %s", -(2**63))) == 1
    for none in (2**63 - 1, 0, -(2**63)):
        refused("PQ010", found, own, none)
        refused("PQ010", status, own, "q", none)


def check_filters(conn: Connection, call: str, number: str, first: str, at: str) -> None:
    """Compare each filter of a list with the same over the whole list, and the pages of the list."""

    def read(arguments: str = "", *args: Any) -> Rows:
        with conn.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute(
                f"select * from pgque.{call}('q'{arguments})".encode(), args or None
            ).fetchall()

    everything = read()
    numbers = [getattr(row, number) for row in everything]
    assert numbers == sorted(numbers, reverse=True)
    pages: Rows = []
    while page := read(", 3, before_id => %s", getattr(pages[-1], number) if pages else None):
        assert len(page) <= 3
        pages += page
    assert pages == everything
    middle = getattr(everything[len(everything) // 2], at)
    for arguments, args, keep in (
        (", only_type => 'x'", [], lambda m: getattr(m, first + "type") == "x"),
        (", only_key => 'k'", [], lambda m: getattr(m, first + "key") == "k"),
        (", only_consumer => 'b'", [], lambda m: m.consumer_name == "b"),
        (", since => %s", [middle], lambda m: getattr(m, at) >= middle),
        (", until => %s", [middle], lambda m: getattr(m, at) < middle),
        (", matching => 'bODY 1'", [], lambda m: (m.ev_data if first else m.payload) == "Body 1"),
        (', matching => \'"n": "d"\'', [], lambda m: (m.ev_data if first else m.payload) == "Body 3"),
        (", limit_count => null", [], lambda m: True),
        (", limit_count => -1", [], lambda m: False),
    ):
        assert read(arguments, *args) == [row for row in everything if keep(row)], (call, arguments)


def test_dead_letters_and_the_archive_are_listed_by_filters_and_page_by_page(own: Connection) -> None:
    value(own, "select pgque.create_queue('q', '{\"drop_policy\": \"hold\"}')")
    for consumer in ("a", "b"):
        subscribe(own, "q", consumer)
    for n, kind in enumerate("xyxyz"):
        post(own, "q", f"Body {n}", kind, headers=f'{{"n": "{chr(65 + n)}"}}')
    post(own, "q", b"\x00\xff", "z", key="k")
    tick(own, "q")
    for consumer in ("a", "b"):
        batch = take(own, "q", "w", consumer=consumer)
        for m in batch[:3] + batch[5:]:
            outcome(own, "dead", batch[0].batch_id, [m.msg_id], f"error {m.msg_id}")
        rows(own, "select * from pgque.archive(%s)", batch[0].batch_id)

    check_filters(own, "dlq_inspect", "dl_id", "ev_", "dl_time")
    check_filters(own, "archive_list", "archive_id", "", "archived_at")
    letters = "select ev_id, payload_size, receive_count, dl_held, ev_headers->>'n', ev_bytes from pgque.dlq_inspect('q'"
    assert rows(own, f"{letters}, reason => 'error 2', only_consumer => 'a')") == [(2, 6, 1, True, "B", None)]
    assert len(rows(own, f"{letters}, reason => 'error N')")) == 8
    assert rows(own, f"{letters}, 1)") == [(6, 2, 1, True, None, b"\x00\xff")]
    for reason in ("error 2", "error N"):
        number = 2 if reason == "error 2" else 8
        own.execute("begin")
        own.execute("savepoint replayed")
        assert value(own, "select pgque.dlq_requeue_all('q', null, %s)", reason) == number
        own.execute("rollback to replayed")
        assert value(own, "select replayed from pgque.dlq_replay_all('q', null, %s)", reason) == number
        own.execute("rollback")
    own.execute("update pgque.dead_letter set dl_held = false")
    assert value(own, "select pgque.dlq_purge('q', '0', 'error 2')") == 2

    # Some time zones have names that mean others in a style that is not ISO.
    for _ in range(3):
        post(own, "q", "one more")
    forced_tick(own, "q")
    batch = take(own, "q", "w", 1, consumer="a")
    own.execute("set timezone = 'Asia/Kolkata'")
    own.execute("set datestyle = 'SQL, DMY'")
    outcome(own, "archive", batch[0].batch_id, [batch[0].msg_id])
    for call in ("list_messages", "dlq_inspect", "archive_list"):
        count = f"select count(*) from pgque.{call}('q'"
        everything = value(own, f"{count})")
        assert everything > 0
        assert value(own, f"{count}, since => now() - interval '10 minutes')") == everything, call
        assert value(own, f"{count}, until => now() - interval '10 minutes')") == 0, call


def test_the_history_of_a_message_has_no_action_of_an_earlier_queue_of_the_name(own: Connection) -> None:
    for _ in range(2):
        value(own, "select pgque.create_queue('again'), pgque.subscribe('again', 'c')")
        msg_id = send(own, "again")
        found = rows(own, "select h.event from pgque.message_history('again', %s) as h", msg_id)
        assert found == [("sent",)]
        value(own, "select pgque.cancel('again', %s)", msg_id)
        value(own, "select pgque.drop_queue('again', true)")
