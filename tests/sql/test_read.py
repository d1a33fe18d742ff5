"""Windows without side effects, for readers that keep their own offsets."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    column,
    configure,
    drain,
    forced_tick,
    move_clock,
    nack_ids,
    outcome,
    pump,
    receive,
    refused,
    rotate,
    rows,
    send,
    send_many,
    subscribe,
    tick,
    value,
)

OLD = pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
WINDOW = "select ev_id from pgque.read_window(%s, %s, %s, %s, %s, %s, %s)"


def window(
    conn: Connection,
    queue: str,
    start: int | None,
    end: int | None,
    consumer: str | None = None,
    types: Sequence[str | None] | None = None,
    parts: int | None = 1,
    part: int | None = 0,
) -> list[int]:
    """Return the ids of the messages between two ticks."""
    return column(
        conn, WINDOW, queue, start, end, consumer, None if types is None else list(types), parts, part
    )


def cursor_window(conn: Connection, *arguments: Any, name: str = "c", size: int = 3) -> list[Any]:
    """Read a window through a cursor, in a transaction that may not write."""
    found: list[Any] = []
    with conn.transaction():
        conn.execute("set transaction read only")
        places = ", ".join(["%s"] * len(arguments))
        value(conn, f"select pgque.read_window_cursor(%s, {places})", name, *arguments)
        fetch = psycopg.sql.SQL("fetch forward {} from {}").format(size, psycopg.sql.Identifier(name))
        while piece := conn.execute(fetch, binary=True).fetchall():
            found += piece
    return found


def split(conn: Connection, queue: str, start: int, end: int, parts: int) -> list[tuple[int, int, int, int]]:
    """Return the pieces of a window: from_tick, to_tick, parts, part."""
    given = [queue, start, end, parts]
    return rows(
        conn, "select from_tick, to_tick, parts, part from pgque.split_window(%s, %s, %s, %s)", *given
    )


def ranges(
    conn: Connection,
    queue: str,
    start: int,
    end: int,
    parts: int,
    *within: int | None,
    consumer: str | None = None,
) -> list[list[int]]:
    """Split a window, or its part within two ids, by ids; return the ids of the messages of each piece."""
    call = (
        "select from_tick, to_tick, after_id, upto_id from pgque.split_window(%s, %s, %s, %s, null, %s, %s)"
    )
    pieces = rows(conn, call, queue, start, end, parts, *(within or (None, None)))
    assert len(pieces) <= parts
    read = "select ev_id from pgque.read_window(%s, %s, %s, %s, after_id => %s, upto_id => %s)"
    return [column(conn, read, queue, begin, upto, consumer, *ids) for begin, upto, *ids in pieces]


def tick_for(conn: Connection, queue: str | None, start_at: str | None) -> int:
    found: int = value(conn, "select pgque.tick_for(%s, %s)", queue, start_at)
    return found


def next_tick(conn: Connection, queue: str, after: int | None, *limits: int | None) -> int | None:
    """Return the end of the next piece: limits are max_events, max_ticks, upto."""
    found: int | None = value(
        conn, f"select pgque.next_tick(%s, %s{', %s' * len(limits)})", queue, after, *limits
    )
    return found


def seek(
    conn: Connection, queue: str, tick_id: int | None, consumer: str | None = "c", force: bool = False
) -> int:
    found: int = value(conn, "select pgque.seek(%s, %s, %s, %s)", queue, consumer, tick_id, force)
    return found


def open_stream(conn: Connection, queue: str, consumer: str | None = "c", *start: str | None) -> int:
    found: int = value(
        conn, f"select pgque.open_stream(%s, %s{', %s' * len(start)})", queue, consumer, *start
    )
    return found


def dead(
    conn: Connection,
    queue: str,
    ids: Sequence[int | None] | None,
    reasons: Sequence[str | None] | None,
    consumer: str = "c",
) -> list[tuple[int | None, bool, str | None]]:
    return rows(
        conn, "select * from pgque.dead(%s, %s, %s::bigint[], %s::text[])", queue, consumer, ids, reasons
    )


def letters(conn: Connection, queue: str) -> dict[int, str]:
    """Return the dead letters: reasons by message."""
    return dict(rows(conn, "select ev_id, dl_reason from pgque.dlq_inspect(%s)", queue))


def batches(conn: Connection, queue: str, consumer: str) -> Iterator[tuple[int, int, list[int]]]:
    """Finish windows as a consumer, tick by tick; yield both ticks and the ids."""
    while True:
        ((batch, end, start),) = rows(
            conn,
            "select batch_id, cur_tick_id, prev_tick_id from pgque.next_batch_info(%s, %s)",
            queue,
            consumer,
        )
        if batch is None:
            return
        yield start, end, column(conn, "select ev_id from pgque.get_batch_events(%s)", batch)
        ack(conn, batch)


class History:
    """A queue with a random past, kept whole by the consumer `pin`, and what was committed to it."""

    def __init__(self, conn: Connection, connect: Callable[..., Connection], queue: str, seed: int) -> None:
        self.conn = conn
        self.queue = queue
        self.random = random.Random(seed)  # noqa: S311
        self.sessions = [connect(autocommit=False) for _ in range(4)]
        self.open: dict[int, list[int]] = {}
        self.sent: list[int] = []
        self.counter = itertools.count()
        for consumer in ("pin", "a", "b"):
            subscribe(conn, queue, consumer)
        configure(conn, queue, max_retries=100)
        self.first = tick_for(conn, queue, "latest")

    def send(self) -> None:
        """Send in one of the sessions, some to end much later."""
        number = self.random.randrange(len(self.sessions))
        session, ids = self.sessions[number], self.open.setdefault(number, [])
        how = self.random.randrange(4)
        count = self.random.choice([1, 1, 3, 20])
        session.execute("savepoint s")
        before: int = value(session, "select last_value from pgque.queue q, lateral (select pg_sequence_last_value(q.queue_event_seq) as last_value) s where queue_name = %s", self.queue) or 0  # fmt: skip
        if how == 0:
            found = send_many(session, self.queue, count)
        elif how == 1:
            found = [send(session, self.queue, str(next(self.counter)))]
        else:
            view = ("sink", "sink_bulk")[how - 2]
            session.execute(
                f"insert into pgque.{view} (queue, type, payload) select %s, 't' || g, g from generate_series(1, %s) g".encode(),
                [self.queue, count],
            )
            found = list(range(before + 1, before + 1 + count))
        if self.random.random() < 0.2:
            session.execute("rollback to savepoint s")
        else:
            ids += found
        if self.random.random() < 0.6:
            self.end(number)

    def end(self, number: int) -> None:
        ids = self.open.pop(number, [])
        if self.random.random() < 0.25:
            self.sessions[number].rollback()
        else:
            self.sessions[number].commit()
            self.sent += ids

    def retry(self, consumer: str) -> None:
        """Fail some messages of the consumer's next batch and bring older ones back."""
        batch = receive(self.conn, self.queue, consumer, self.random.choice([2, 10]))
        if batch:
            failed = self.random.sample([m.msg_id for m in batch], len(batch) // 2)
            nack_ids(self.conn, batch[0].batch_id, failed)
            ack(self.conn, batch[0].batch_id)
        pump(self.conn)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            chance = self.random.random()
            if chance < 0.55:
                self.send()
            elif chance < 0.75:
                forced_tick(self.conn, self.queue)
            elif chance < 0.85:
                self.retry(self.random.choice(["a", "b"]))
            elif chance < 0.93:
                rotate(self.conn, self.queue)
            else:
                self.end(self.random.randrange(len(self.sessions)))

    def finish(self) -> None:
        for number in list(self.open):
            self.end(number)
        forced_tick(self.conn, self.queue)

    def cut(self, pieces: int) -> list[tuple[int, int]]:
        """Cut the ticks so far into random windows."""
        last = tick_for(self.conn, self.queue, "latest")
        inner = self.random.sample(range(self.first + 1, last), min(pieces, last - self.first - 1))
        return list(itertools.pairwise([self.first, *sorted(inner), last]))


@pytest.fixture
def history(conn: Connection, connect: Callable[..., Connection], queue: str) -> Callable[[int], History]:
    return lambda seed: History(conn, connect, queue, seed)


# --- windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_windows_of_any_cut_hold_every_message_once(
    conn: Connection, history: Callable[[int], History], seed: int
) -> None:
    past = history(seed)
    past.go_on(70)
    past.finish()
    assert len(past.sent) > 30
    for pieces in (0, 4, 1_000):
        cut = past.cut(pieces)
        got = [window(conn, past.queue, start, end) for start, end in cut]
        assert sorted(itertools.chain(*got)) == sorted(past.sent)
        for (start, end), ids in zip(cut, got, strict=True):
            assert ids == sorted(ids)
            for parts in (2, 5):
                divided = [window(conn, past.queue, start, end, parts=parts, part=p) for p in range(parts)]
                assert sorted(itertools.chain(*divided)) == ids
            for parts in (2, 5):
                divided = [
                    window(conn, past.queue, f, t, parts=n, part=p)
                    for f, t, n, p in split(conn, past.queue, start, end, parts)
                ]
                assert len(divided) <= parts
                assert sorted(itertools.chain(*divided)) == ids
                assert sorted(itertools.chain(*ranges(conn, past.queue, start, end, parts))) == ids
                for after, upto in ((None, ids[len(ids) // 2]), (ids[len(ids) // 2], None)) if ids else ():
                    some = [i for i in ids if (after or 0) < i <= (upto or i)]
                    split_part = ranges(conn, past.queue, start, end, parts, after, upto)
                    assert list(itertools.chain(*split_part)) == some
            for consumer in ("a", "pin"):
                all_of = window(conn, past.queue, start, end, consumer)
                assert set(all_of) >= set(ids)
                assert (
                    sorted(itertools.chain(*ranges(conn, past.queue, start, end, 5, consumer=consumer)))
                    == all_of
                )


@pytest.mark.parametrize("seed", [4, 5])
def test_a_window_is_what_the_consumer_receives_between_the_same_ticks(
    conn: Connection, history: Callable[[int], History], seed: int
) -> None:
    past = history(seed)
    past.go_on(70)
    past.finish()
    for consumer in ("pin", "a", "b"):
        # What comes again is in a batch of its own, of no window.
        of_windows = [batch for batch in batches(conn, past.queue, consumer) if batch[0] != batch[1]]
        for number, (start, end, ids) in enumerate(of_windows):
            found = window(conn, past.queue, start, end, consumer)
            # The first batch may be what receive() left of a window.
            assert sorted(ids) == (found[len(found) - len(ids) :] if number == 0 else found)
            if consumer == "pin":
                assert window(conn, past.queue, start, end) == found


def test_a_tick_is_stored_no_longer_than_the_messages_behind_it(
    conn: Connection, queue: str, transaction: Callable[..., Connection]
) -> None:
    # Sent before a rotation and committed after it, so that the message is behind ticks of the next table
    late = transaction()
    sent = send(late, queue, "late")
    assert rotate(conn, queue) == 1
    send(conn, queue)
    before = forced_tick(conn, queue)
    late.execute("commit")
    after = forced_tick(conn, queue)
    assert window(conn, queue, before, after) == [sent]
    send(conn, queue)
    last = forced_tick(conn, queue)
    assert rotate(conn, queue) == 1
    forced_tick(conn, queue)
    assert window(conn, queue, before, after) == [sent]
    # The table of the message is emptied, that of the ticks is not.
    assert rotate(conn, queue) == 1
    refused("PQ015", window, conn, queue, before, last)
    refused("PQ015", window, conn, queue, before, after)
    assert tick_for(conn, queue, "earliest") == after
    assert len(window(conn, queue, after, last)) == 1


def test_a_window_never_changes(conn: Connection, history: Callable[[int], History]) -> None:
    past = history(99)
    past.go_on(40)
    forced_tick(conn, past.queue)
    cut = past.cut(4)
    asked = [
        (start, end, consumer, types, 2, part)
        for start, end in cut
        for consumer in (None, "a", "b", "pin")
        for types in (None, ["t1", "default"])
        for part in (0, 1)
    ]

    def read() -> list[list[Any]]:
        return [
            rows(conn, "select * from pgque.read_window(%s, %s, %s, %s, %s, %s, %s)", past.queue, *arguments)
            for arguments in asked
        ]

    before = read()
    pieces = [split(conn, past.queue, *ticks, 4) for ticks in cut]
    assert any(before)
    for _ in range(3):
        past.go_on(40)
        past.retry("a")
        past.retry("b")
        pump(conn)
        for _ in range(4):
            forced_tick(conn, past.queue)
            rotate(conn, past.queue)
        assert read() == before
        assert [split(conn, past.queue, *ticks, 4) for ticks in cut] == pieces


def test_a_retry_is_in_the_windows_of_its_consumer_alone(conn: Connection, queue: str) -> None:
    for consumer in ("a", "b"):
        subscribe(conn, queue, consumer)
    start = tick_for(conn, queue, "latest")
    sent = send_many(conn, queue, 4)
    tick(conn, queue)
    middle = tick_for(conn, queue, "latest")
    for consumer, failed in (("a", sent[:2]), ("b", sent[1:3])):
        batch = receive(conn, queue, consumer)[0].batch_id
        nack_ids(conn, batch, failed, reason=f"of {consumer}")
        assert window(conn, queue, start, middle, consumer) == sent
        ack(conn, batch)
        # Who reads by offsets from now on finds what comes again in the log.
        value(conn, "select pgque.open_stream(%s, %s)", queue, consumer)
    assert pump(conn) == 4
    tick(conn, queue)
    end = tick_for(conn, queue, "latest")
    subscribe(conn, queue, "late")
    assert window(conn, queue, middle, end, "a") == sent[:2]
    assert window(conn, queue, middle, end, "b") == sent[1:3]
    for other in (None, "late"):
        assert window(conn, queue, middle, end, other) == []
        assert window(conn, queue, start, end, other) == sent
    assert sorted(window(conn, queue, start, end, "a")) == sorted([*sent, *sent[:2]])
    found = rows(
        conn, "select ev_retry, ev_error from pgque.read_window(%s, %s, %s, 'a')", queue, middle, end
    )
    assert found == [(1, "of a"), (1, "of a")]


def test_a_window_shows_everything_a_message_has(conn: Connection, subscribed: str) -> None:
    start = tick_for(conn, subscribed, "latest")
    conn.execute(
        "insert into pgque.sink (queue, type, payload, headers, payload_bytes, partition_key) values"
        " (%s, 'a', 'é', '{\"x\": 1}', null, 'k'), (%s, null, null, null, '\\x00ff', null)",
        [subscribed, subscribed],
    )
    value(conn, "select pgque.insert_event(%s, null, null, '1', '2', '3', '4')", subscribed)
    end = tick(conn, subscribed)
    names = "ev_type, ev_data, ev_headers, ev_bytes, ev_extra1, ev_extra2, ev_extra3, ev_extra4"
    expected = [
        ("a", "é", {"x": 1}, None, "k", None, None, None),
        ("default", None, None, b"\x00\xff", None, None, None, None),
        (None, None, None, None, "1", "2", "3", "4"),
    ]
    found = rows(
        conn, f"select {names} from pgque.read_window(%s, %s, %s) order by ev_id", subscribed, start, end
    )
    assert found == expected
    ((ids, times, xids, rest),) = rows(
        conn,
        "select array_agg(ev_id), bool_and(ev_time between now() - interval '1 minute' and now()),"
        " count(distinct ev_txid), count(ev_retry) + count(ev_key) + count(ev_expires) + count(ev_error)"
        " from pgque.read_window(%s, %s, %s)",
        subscribed,
        start,
        end,
    )
    assert (times, xids, rest) == (True, 2, 0)
    assert [m.msg_id for m in receive(conn, subscribed)] == ids


def test_types_are_chosen_exactly(conn: Connection, subscribed: str) -> None:
    start = tick_for(conn, subscribed, "latest")
    kinds = ["a", "A", "a,b", "it's", 'say "x"', "\\", "{}", "null", "%s %I", "é", "", " a "]
    sent: dict[str | None, int] = {}
    for kind in [*kinds, None]:
        sent[kind] = value(conn, "select pgque.insert_event(%s, %s, 'x')", subscribed, kind)
    end = tick(conn, subscribed)
    for kind in kinds:
        assert window(conn, subscribed, start, end, types=[kind]) == [sent[kind]]
        assert window(conn, subscribed, start, end, types=[kind, None, "none"]) == [sent[kind]]
    assert window(conn, subscribed, start, end, types=list(kinds)) == [sent[k] for k in kinds]
    for nothing in ([], [None], ["none"]):
        assert window(conn, subscribed, start, end, types=nothing) == []
    assert window(conn, subscribed, start, end, types=None) == list(sent.values())


def test_a_window_between_a_tick_and_itself_is_empty(conn: Connection, subscribed: str) -> None:
    send(conn, subscribed)
    last = forced_tick(conn, subscribed)
    assert window(conn, subscribed, last, last) == []
    assert split(conn, subscribed, last, last, 5) == []
    assert next_tick(conn, subscribed, last) is None
    assert cursor_window(conn, subscribed, last, last) == []


def test_what_is_no_window_is_refused(conn: Connection, subscribed: str) -> None:
    first = tick_for(conn, subscribed, "latest")
    send(conn, subscribed)
    last = forced_tick(conn, subscribed)
    for read in (window, cursor_window):
        for ticks in ((last, first), (None, last), (first, None), (None, None)):
            refused("PQ005", read, conn, subscribed, *ticks)
        for parts in ((0, 0), (-1, 0), (2, 2), (2, -1), (None, 0), (2, None), (2**31 - 1, 2**31 - 1)):
            refused("PQ005", read, conn, subscribed, first, last, None, None, *parts)
        for ticks in ((0, last), (first, last + 1), (-(2**63), last), (first, 2**63 - 1)):
            error = refused("PQ015", read, conn, subscribed, *ticks)
            assert subscribed in str(error) and str(last) in str(error)
        refused("PQ001", read, conn, "no " + subscribed, first, last)
        refused("PQ001", read, conn, None, first, last)
        refused("PQ011", read, conn, subscribed, first, last, "nobody %s '\"")
    assert window(conn, subscribed, first, last, parts=2**31 - 1, part=2**31 - 2) == []
    for wrong in (
        (last, first, 2),
        (first, last, 0),
        (first, last, -1),
        (first, last, None),
        (None, last, 1),
    ):
        refused("PQ005", split, conn, subscribed, *wrong)
    refused("PQ015", split, conn, subscribed, 0, last, 2)
    refused("PQ015", split, conn, subscribed, first, last + 1, 2)


def test_a_pinned_window_outlives_rotations_and_goes_after_a_seek(conn: Connection, subscribed: str) -> None:
    start = tick_for(conn, subscribed, "latest")
    sent = send_many(conn, subscribed, 30)
    middle = forced_tick(conn, subscribed)
    for _ in range(6):
        send(conn, subscribed)
        forced_tick(conn, subscribed)
        rotate(conn, subscribed)
    assert window(conn, subscribed, start, middle) == sent
    last = forced_tick(conn, subscribed)
    assert seek(conn, subscribed, last) == last
    for _ in range(6):
        send(conn, subscribed)
        rotate(conn, subscribed)
        seek(conn, subscribed, forced_tick(conn, subscribed))
    error = refused("PQ015", window, conn, subscribed, start, middle)
    earliest = tick_for(conn, subscribed, "earliest")
    assert f"{start} " in str(error) and f"{earliest} " in str(error)
    refused("PQ015", next_tick, conn, subscribed, start)
    refused("PQ015", tick_for, conn, subscribed, str(start))
    assert next_tick(conn, subscribed, earliest, None, 1) == earliest + 1


def test_a_reader_in_the_middle_of_a_window_keeps_its_tables(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    start = tick_for(conn, subscribed, "latest")
    sent = send_many(conn, subscribed, 100)
    end = forced_tick(conn, subscribed)
    reading = transaction()
    value(reading, "select pgque.read_window_cursor('c', %s, %s, %s)", subscribed, start, end)
    got = column(reading, "fetch 10 from c")
    seek(conn, subscribed, end)
    conn.execute("set lock_timeout = '5s'")
    for _ in range(6):
        send(conn, subscribed)
        seek(conn, subscribed, forced_tick(conn, subscribed))
        rotate(conn, subscribed)
    got += column(reading, "fetch all from c")
    assert got == sent
    reading.execute("commit")
    for _ in range(6):
        send(conn, subscribed)
        seek(conn, subscribed, forced_tick(conn, subscribed))
        rotate(conn, subscribed)
    refused("PQ015", window, conn, subscribed, start, end)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_a_window_is_read_whatever_the_snapshot(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    start = tick_for(conn, subscribed, "latest")
    reading = transaction(isolation)
    sent = send_many(conn, subscribed, 5)
    end = forced_tick(conn, subscribed)
    try:
        assert window(reading, subscribed, start, end) == sent
    except psycopg.Error as error:
        # What such a snapshot does not show must not look like an empty window.
        assert isolation != "read committed"
        assert error.sqlstate == "PQ015"


def test_a_reader_role_reads_in_a_transaction_that_may_not_write(
    conn: Connection, reader: Any, subscribed: str
) -> None:
    start = tick_for(conn, subscribed, "latest")
    sent = send_many(conn, subscribed, 50)
    end = forced_tick(conn, subscribed)
    with psycopg.connect(reader.dsn, autocommit=True) as r:
        for name in ("c", "a \"b\" %s \\ 'x'", "x" * 63):
            found = cursor_window(r, subscribed, start, end, "c", ["default"], 1, 0, name=name, size=7)
            same = rows(r, "select * from pgque.read_window(%s, %s, %s)", subscribed, start, end)
            # psycopg leaves a binary xid8 as it is.
            assert [(*f[:2], *f[3:]) for f in found] == [(*f[:2], *f[3:]) for f in same]
            assert [f[0] for f in found] == sent
        r.execute("set default_transaction_read_only = on")
        assert window(r, subscribed, start, end, "c") == sent
        assert len(split(r, subscribed, start, end, 4)) == 4
        assert next_tick(r, subscribed, start) == end
        assert tick_for(r, subscribed, "latest") == end
        r.execute("reset default_transaction_read_only")
        with r.transaction():
            value(r, "select pgque.read_window_cursor('c', %s, %s, %s)", subscribed, start, end)
            with pytest.raises(psycopg.errors.DuplicateCursor), r.transaction():
                value(r, "select pgque.read_window_cursor('c', %s, %s, %s)", subscribed, start, end)
            assert len(column(r, "fetch all from c")) == 50
            refused("42501", column, r, "select count(*) from pgque.event")


def test_a_writer_may_not_read(subscribed: str, writer: Any) -> None:
    with psycopg.connect(writer.dsn, autocommit=True) as w:
        for call in (
            "select pgque.tick_for(%s, 'latest')",
            "select pgque.next_tick(%s, 1)",
            "select pgque.split_window(%s, 1, 1, 1)",
            "select pgque.read_window(%s, 1, 1)",
            "select pgque.read_window_cursor('c', %s, 1, 1)",
            "select pgque.seek(%s, 'c', 1)",
            "select pgque.open_stream(%s, 'c')",
            "select pgque.dead(%s, 'c', '{1}', '{x}')",
        ):
            refused("42501", rows, w, call, subscribed)


def test_reading_writes_nothing(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    start = tick_for(conn, subscribed, "latest")
    send_many(conn, subscribed, 50)
    end = forced_tick(conn, subscribed)
    reading = connect()
    with reading.transaction():
        window(reading, subscribed, start, end, "c")
        split(reading, subscribed, start, end, 4)
        next_tick(reading, subscribed, start, 10, 10, end)
        tick_for(reading, subscribed, "earliest")
        value(reading, "select pgque.read_window_cursor('c', %s, %s, %s, 'c')", subscribed, start, end)
        assert len(column(reading, "fetch all from c")) == 50
        assert value(reading, "select pg_current_xact_id_if_assigned()") is None


# --- cutting ----------------------------------------------------------------------------------------------


def ticks_of(conn: Connection, queue: str, counts: list[int]) -> list[int]:
    """Make a tick behind each so many messages; return all ticks, the first too."""
    found = [tick_for(conn, queue, "latest")]
    for count in counts:
        send_many(conn, queue, count)
        found.append(forced_tick(conn, queue))
    return found


def test_pieces_cover_a_window_whatever_its_ticks_hold(conn: Connection, subscribed: str) -> None:
    chance = random.Random(1)  # noqa: S311
    shapes = [
        [10, 0],
        [0, 10, 0, 0],
        [0, 0, 0],
        [1],
        [0, 1, 0],
        [1, 1, 1, 1, 1],
        [100, 1, 1],
        [1, 1, 100],
        [50, 0, 50, 0],
        [3, 0, 0, 200, 0, 2],
        *([chance.choice([0, 0, 1, 2, 10, 60]) for _ in range(8)] for _ in range(2)),
    ]
    for shape in shapes:
        ticks = ticks_of(conn, subscribed, shape)
        start, end = ticks[0], ticks[-1]
        ids = window(conn, subscribed, start, end)
        assert len(ids) == sum(shape)
        for parts in (1, 2, 3, 2**31 - 1):
            pieces = split(conn, subscribed, start, end, parts)
            assert pieces == split(conn, subscribed, start, end, parts), shape
            assert 1 <= len(pieces) <= parts, (shape, parts)
            assert len(pieces) <= sum(shape) + len(shape)
            got = [window(conn, subscribed, f, t, parts=n, part=p) for f, t, n, p in pieces]
            assert sorted(itertools.chain(*got)) == ids, (shape, parts)
            assert list(itertools.chain(*ranges(conn, subscribed, start, end, parts))) == ids, (shape, parts)
            # In order of ticks, without a gap: only then a reader can keep their order.
            runs = sorted({(f, t) for f, t, _, _ in pieces})
            assert [p[:2] for p in pieces] == sorted(p[:2] for p in pieces)
            assert [runs[0][0], *(t for _, t in runs)] == [*(f for f, _ in runs), end]
        seek(conn, subscribed, end)


def test_a_heavy_tick_is_split_and_light_ones_are_put_together(conn: Connection, subscribed: str) -> None:
    ticks = ticks_of(conn, subscribed, [10, 10, 1_000, 10, 10])
    pieces = split(conn, subscribed, ticks[0], ticks[-1], 4)
    sizes = [len(window(conn, subscribed, f, t, parts=n, part=p)) for f, t, n, p in pieces]
    assert len(sizes) in (3, 4)
    assert max(sizes) <= 520
    even = ticks_of(conn, subscribed, [25] * 40)
    pieces = split(conn, subscribed, even[0], even[-1], 4)
    sizes = [len(window(conn, subscribed, f, t, parts=n, part=p)) for f, t, n, p in pieces]
    assert sizes == [250] * 4
    assert {p[2:] for p in pieces} == {(1, 0)}
    one = ticks_of(conn, subscribed, [1_000])
    sizes = [
        len(window(conn, subscribed, f, t, parts=n, part=p))
        for f, t, n, p in split(conn, subscribed, one[0], one[-1], 8)
    ]
    assert sizes == [125] * 8
    found = ranges(conn, subscribed, one[0], one[-1], 8)
    assert [len(ids) for ids in found] == [125] * 8
    assert list(itertools.chain(*found)) == window(conn, subscribed, one[0], one[-1])
    middle = found[3][-1]
    halves = [
        *ranges(conn, subscribed, one[0], one[-1], 4, None, middle),
        *ranges(conn, subscribed, one[0], one[-1], 4, middle, None),
    ]
    assert [len(ids) for ids in halves] == [125] * 8


def test_the_pieces_of_a_part_of_a_window_stay_within_it(conn: Connection, subscribed: str) -> None:
    start, end = ticks_of(conn, subscribed, [20])
    ids = window(conn, subscribed, start, end)
    for after, upto in (
        (None, None),
        (ids[4], None),
        (None, ids[9]),
        (ids[4], ids[9]),
        (ids[4], ids[4]),
        (ids[-1], None),
        (0, 2**62),
    ):
        expected = [i for i in ids if (after or 0) < i <= (upto or i)]
        for parts in (1, 3, 100):
            assert (
                list(itertools.chain(*ranges(conn, subscribed, start, end, parts, after, upto))) == expected
            ), (after, upto)


# --- cursors ----------------------------------------------------------------------------------------------


def cursor_of(conn: Connection, queue: str, start: int, end: int, columns: str, **further: Any) -> list[Any]:
    """Return the rows of a cursor over some columns of a window."""
    named = {"columns": "{" + columns + "}", **further}
    given = ", ".join(f"{name} => %({name})s" for name in named)
    with conn.transaction():
        call = f"select pgque.read_window_cursor('c', %(queue)s, %(start)s, %(end)s, {given})"
        conn.execute(call, {"queue": queue, "start": start, "end": end, **named})
        return conn.execute("fetch all from c").fetchall()


def test_a_cursor_returns_the_columns_that_are_asked_for(conn: Connection, subscribed: str) -> None:
    start = tick_for(conn, subscribed, "latest")
    call = "select pgque.send(queue_name => %s, type_name => 't', payload => %s, headers => %s::jsonb, partition_key => %s)"
    value(conn, call, subscribed, "é", '{"a": 1, "b": null, "c": "x"}', "k")
    value(conn, "select pgque.send_batch(%s, 't', array['\\x00ff'::bytea])", subscribed)
    end = forced_tick(conn, subscribed)
    found = cursor_of(
        conn, subscribed, start, end, "payload,key,header_names,header_values,ev_id,ev_data,payload"
    )
    ids = window(conn, subscribed, start, end)
    utf8 = "é".encode()
    assert found == [
        (utf8, "k", ["a", "b", "c"], ["1", None, "x"], ids[0], "é", utf8),
        (b"\0\xff", None, None, None, ids[1], None, b"\0\xff"),
    ]
    for wrong in ("", "ev_id,slot", "EV_ID", "null", "ev_id; select 1", "e.ev_id"):
        with pytest.raises(psycopg.Error) as caught:
            cursor_of(
                conn,
                subscribed,
                start,
                end,
                '"' + wrong + '"' if wrong and wrong not in {"null", "ev_id,slot"} else wrong,
            )
        assert caught.value.sqlstate == "PQ005", wrong
        assert caught.value.diag.message_hint


def test_parts_by_key_keep_the_order_of_each_key(conn: Connection, subscribed: str) -> None:
    start = tick_for(conn, subscribed, "latest")
    call = "select pgque.send(queue_name => %s, type_name => 't', payload => 'x', partition_key => %s)"
    for n in range(60):
        value(conn, call, subscribed, None if n % 3 == 0 else f"k{n % 7}")
    end = forced_tick(conn, subscribed)
    ids = window(conn, subscribed, start, end)
    got = [
        cursor_of(conn, subscribed, start, end, "ev_id,key", parts=4, part=p, by_key=True) for p in range(4)
    ]
    assert sorted(i for part in got for i, _ in part) == ids
    for part in got:
        assert [i for i, _ in part] == sorted(i for i, _ in part)
    keys = [{key for _, key in part if key} for part in got]
    assert sum(map(len, keys)) == 7
    assert sum(map(bool, keys)) > 1
    assert [{i % 4 for i, key in part if key is None} for part in got] == [{0}, {1}, {2}, {3}]


def test_a_cursor_without_an_order_scans_a_window_once_and_stores_no_row(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    start = tick_for(conn, subscribed, "latest")
    value(
        conn,
        "select count(pgque.send_batch(%s, 't', array(select repeat('x', 200) from generate_series(1, 5000))))",
        subscribed,
    )
    end = forced_tick(conn, subscribed)
    scanned = "select sum(idx_tup_fetch + seq_tup_read)::int from pg_stat_xact_user_tables where relname ~ '^event_[0-9]+_[0-2]$'"
    stored: list[str] = []
    reading = connect()
    reading.add_notice_handler(lambda notice: stored.append(str(notice.message_primary)))
    reading.execute("set log_temp_files = 0; set client_min_messages = log")
    for ordered in (False, True):
        with reading.transaction():
            before = value(reading, scanned)
            reading.execute("set local work_mem = '64kB'")
            call = "select pgque.read_window_cursor('c', %s, %s, %s, ordered => %s)"
            assert value(reading, call, subscribed, start, end, ordered) == 2000
            count = 0
            while piece := column(reading, "fetch 50 from c"):
                count += len(piece)
            assert count == 5_000
            reading.execute("set local work_mem to default")  # the counters have a view that sorts
            assert value(reading, scanned) - before == 5_000
        # A sort of so many rows is stored in a file.
        assert bool([text for text in stored if "temporary file" in text]) is ordered


def test_fewer_rows_are_to_be_fetched_at_once_where_they_may_be_large(
    conn: Connection, subscribed: str
) -> None:
    start = tick_for(conn, subscribed, "latest")
    call = "select pgque.send(%s, (select string_agg(md5(i::text), '') from generate_series(1, 1000) i))"
    value(conn, call, subscribed)
    end = forced_tick(conn, subscribed)
    with conn.transaction():
        assert value(conn, "select pgque.read_window_cursor('c', %s, %s, %s)", subscribed, start, end) == 200


@OLD
def test_a_snapshot_from_before_a_truncation_reads_no_empty_window(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    start = tick_for(conn, subscribed, "latest")
    send_many(conn, subscribed, 5)
    end = forced_tick(conn, subscribed)
    reading = transaction(isolation)
    value(reading, "select 1")
    for _ in range(4):
        send(conn, subscribed)
        seek(conn, subscribed, forced_tick(conn, subscribed))
        rotate(conn, subscribed)
    call = "select pgque.read_window_cursor('c', %s, %s, %s, ordered => false)"
    refused("PQ015", value, reading, call, subscribed, start, end)


def test_the_next_piece_keeps_to_its_limits_by_whole_ticks(conn: Connection, subscribed: str) -> None:
    t = ticks_of(conn, subscribed, [10, 10, 0, 100, 1, 1])
    most = 2**63 - 1
    for after, limits, expected in (
        (0, (), 6),
        (0, (None, None, None), 6),
        (0, (most, None), 6),
        (0, (most, 2**31 - 1, most), 6),
        (0, (None, 1), 1),
        (0, (None, 3), 3),
        (0, (None, 100), 6),
        (0, (1,), 1),
        (0, (9,), 1),
        (0, (10,), 1),
        (0, (19,), 1),
        (0, (20,), 3),
        (0, (119,), 3),
        (0, (120,), 4),
        (0, (121,), 5),
        (0, (122,), 6),
        (0, (20, 2), 2),
        (0, (5, 4), 1),
        (2, (1,), 3),
        (3, (1,), 4),
        (3, (50,), 4),
        (0, (None, None, t[2]), 2),
        (0, (20, None, t[2]), 2),
        (0, (1, None, t[6]), 1),
        (0, (None, 1, t[6]), 1),
        (2, (None, None, most), 6),
        (2, (None, None, t[2]), None),
        (2, (1, 1, t[1]), None),
        (2, (None, None, -5), None),
        (6, (), None),
        (6, (1, 1, most), None),
    ):
        found = next_tick(conn, subscribed, t[after], *limits)
        assert found == (None if expected is None else t[expected]), (after, limits)
    for limits in ((0,), (-1,), (None, 0), (None, -1), (-most, 5), (5, -1)):
        assert subscribed in str(refused("PQ005", next_tick, conn, subscribed, t[0], *limits))
    for missing in (None, 0, -1, t[-1] + 1, most):
        error = refused("PQ015", next_tick, conn, subscribed, missing)
        assert subscribed in str(error)
        assert str(tick_for(conn, subscribed, "earliest")) in str(error) and str(t[-1]) in str(error)
    refused("PQ001", next_tick, conn, "no " + subscribed, t[0])


def test_steps_by_next_tick_meet_every_message_once(
    conn: Connection, history: Callable[[int], History]
) -> None:
    past = history(11)
    past.go_on(60)
    past.finish()
    every: list[tuple[int | None, ...]] = [(1,), (7,), (50, 3), (None, 2), (None, None)]
    for limits in every:
        position: int = past.first
        got: list[int] = []
        while (end := next_tick(conn, past.queue, position, *limits)) is not None:
            assert end > position
            got += window(conn, past.queue, position, end)
            position = end
        assert sorted(got) == sorted(past.sent)
        assert position == tick_for(conn, past.queue, "latest")


def test_a_limit_that_is_no_tick_of_an_external_ticker_ends_nothing(own: Connection) -> None:
    value(own, "select pgque.create_queue('q', '{\"external_ticker\": true}')")
    for tick_id, events in ((100, 10), (200, 20)):
        value(own, "select pgque.ticker('q', %s, clock_timestamp(), %s)", tick_id, events)
    assert next_tick(own, "q", 1, None, None, 50) is None
    assert next_tick(own, "q", 1, 5, 5, 50) is None
    assert next_tick(own, "q", 1, None, None, 150) == 100
    assert next_tick(own, "q", 1, 5) == 100
    assert next_tick(own, "q", 1, None, 1) == 100
    assert split(own, "q", 1, 200, 2) == [(1, 100, 1, 0), (100, 200, 1, 0)]
    at = value(own, "select clock_timestamp() + interval '1 hour'")
    for tick_id in (300, 400):
        value(own, "select pgque.ticker('q', %s, %s, 20)", tick_id, at)
    assert tick_for(own, "q", at.isoformat()) == 400


# --- where to start ---------------------------------------------------------------------------------------


def test_a_tick_is_found_by_name_by_id_and_by_time(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    made = {}
    for hours in range(1, 4):
        move_clock(own, f"{hours} hours")
        made[hours] = forced_tick(own, "q")
    assert tick_for(own, "q", "earliest") == 1
    assert tick_for(own, "q", "latest") == made[3]
    assert tick_for(own, "q", str(made[2])) == made[2]
    assert tick_for(own, "q", "000" + str(made[2])) == made[2]
    # The last tick before a time; the first there is if all are after it.
    for minutes, expected in (
        (-60, 1),
        (30, 1),
        (90, made[1]),
        (150, made[2]),
        (250, made[3]),
        (100_000, made[3]),
    ):
        at = value(own, "select clock_timestamp() + make_interval(mins => %s)", minutes)
        for text in (
            at.isoformat(),
            at.strftime("%Y-%m-%d %H:%M:%S.%f+00:00"),
            at.strftime("%a %b %d %H:%M:%S %Y UTC"),
        ):
            assert tick_for(own, "q", text) == expected, text
    own.execute("set timezone = 'Asia/Tokyo'")
    at = value(own, "select (now() at time zone 'UTC' + interval '90 minutes')::text || 'Z'")
    assert tick_for(own, "q", at) == made[1]


def test_what_is_no_start_is_refused(conn: Connection, subscribed: str) -> None:
    last = forced_tick(conn, subscribed)
    for missing in ("0", str(last + 1), "999999999999999999"):
        error = refused("PQ015", tick_for, conn, subscribed, missing)
        assert subscribed in str(error) and str(last) in str(error)
    for nonsense in (
        None, "", " ", "nonsense", "Latest", " latest", "-1", "+1", "1.5", "1e3", "0x1", "12345678901234567890",
        "9" * 5_000, "٣", "\uff11", "2020-13-45", "2020-01-01 25:00", "2020-01-01 Foo/Bar", "2020-01-01 00:00:00+99",
        "294277-01-01", "300000-01-01 BC", "12:00", "'; drop schema pgque; --", "%s %I %L", "\\", "{}",
    ):  # fmt: skip
        refused("PQ005", tick_for, conn, subscribed, nonsense)
        refused("PQ005", open_stream, conn, subscribed, "new", nonsense)
        refused("PQ005", rows, conn, "select pgque.subscribe(%s, 'new', %s)", subscribed, nonsense)
    for extreme in ("infinity", "0001-01-01"):
        try:
            assert tick_for(conn, subscribed, extreme) in (last, tick_for(conn, subscribed, "earliest"))
        except psycopg.Error as error:
            assert error.sqlstate == "PQ005"
    assert tick_for(conn, subscribed, "4713-01-01 BC") == tick_for(conn, subscribed, "earliest")
    assert tick_for(conn, subscribed, "294276-12-31") == last
    refused("PQ001", tick_for, conn, "no " + subscribed, "latest")
    refused("PQ001", tick_for, conn, None, None)
    refused("PQ011", rows, conn, "select * from pgque.get_consumer_info(%s, 'new')", subscribed)


# --- positions --------------------------------------------------------------------------------------------


def test_a_seek_moves_forward_only_unless_it_is_forced(conn: Connection, subscribed: str) -> None:
    t = ticks_of(conn, subscribed, [10, 10, 10])
    assert seek(conn, subscribed, t[1]) == t[1]
    assert seek(conn, subscribed, t[1]) == t[1]
    assert seek(conn, subscribed, t[0]) == t[1]
    assert seek(conn, subscribed, 0) == t[1]
    assert seek(conn, subscribed, t[2]) == t[2]
    assert [m.payload for m in receive(conn, subscribed)] == [str(n) for n in range(1, 11)]
    assert seek(conn, subscribed, t[0], force=True) == t[0]
    assert drain(conn, subscribed) == window(conn, subscribed, t[0], t[3])
    assert seek(conn, subscribed, t[1]) == t[3]
    for missing in (t[3] + 1, None, 2**63 - 1):
        error = refused("PQ015", seek, conn, subscribed, missing)
        assert subscribed in str(error)
        refused("PQ015", rows, conn, "select pgque.seek(%s, 'c', %s, true)", subscribed, missing)
    refused("PQ015", rows, conn, "select pgque.seek(%s, 'c', 0, true)", subscribed)
    refused("PQ011", seek, conn, subscribed, t[1], "nobody")
    refused("PQ011", seek, conn, subscribed, t[1], None)
    refused("PQ001", seek, conn, "no " + subscribed, t[1])
    assert value(conn, "select pgque.seek(%s, 'c', %s, null)", subscribed, t[1]) == t[3]
    assert seek(conn, subscribed, t[3]) == t[3]


def test_a_seek_to_a_time_delivers_all_messages_since_and_names_the_earliest_time_that_is_stored(
    conn: Connection, subscribed: str
) -> None:
    move = "select pgque.seek_to_time(%s, %s, %s)"

    def time_of(tick: int) -> datetime:
        found: datetime = value(
            conn, "select t.tick_time from pgque.tick t where t.tick_id = %s and t.tick_queue ="
            " (select q.queue_id from pgque.queue q where q.queue_name = %s)", tick, subscribed,
        )  # fmt: skip
        return found

    t = ticks_of(conn, subscribed, [10, 10, 10])
    everything = drain(conn, subscribed)
    created = time_of(tick_for(conn, subscribed, "earliest"))
    between = time_of(t[1]) + (time_of(t[2]) - time_of(t[1])) / 2
    assert value(conn, move, subscribed, "c", between) == t[1]
    assert drain(conn, subscribed) == window(conn, subscribed, t[1], t[3])
    assert value(conn, move, subscribed, "c", time_of(t[2])) == t[2]
    assert value(conn, move, subscribed, "c", "9999-01-01") == t[3]
    # The queue is not older than that: all its messages are there.
    for long_ago in (created - timedelta(days=1), "0001-01-01"):
        assert value(conn, move, subscribed, "c", long_ago) < t[1]
        assert drain(conn, subscribed) == everything
    for _ in range(4):
        send(conn, subscribed)
        seek(conn, subscribed, forced_tick(conn, subscribed))
        rotate(conn, subscribed)
    error = refused("PQ015", value, conn, move, subscribed, "c", between)
    statement = re.search(r"select pgque\.seek_to_time\([^;]*", error.diag.message_hint or "")
    assert statement is not None
    assert value(conn, statement[0]) == tick_for(conn, subscribed, "earliest")
    refused("PQ005", value, conn, move, subscribed, "c", None)
    refused("PQ011", value, conn, move, subscribed, "nobody", between)
    refused("PQ001", value, conn, move, "no " + subscribed, "c", between)
    value(conn, "select pgque.register_subconsumer(%s, 'c', 'w', true)", subscribed)
    refused("PQ005", value, conn, move, subscribed, "c", "9999-01-01")


@pytest.mark.parametrize("counts", [[4], [4, 2], [10]])
def test_a_seek_to_the_tick_after_which_a_part_was_received_delivers_all_that_follows(
    conn: Connection, subscribed: str, counts: list[int]
) -> None:
    t = ticks_of(conn, subscribed, [10])
    for count in counts:
        batch = receive(conn, subscribed, count=count)
        if count == 4:
            assert ack(conn, batch[0].batch_id) == 1
        else:
            outcome(conn, "ack", batch[0].batch_id, [batch[0].msg_id])
    assert value(conn, "select pgque.seek_to_time(%s, 'c', now() - interval '1 hour')", subscribed) == t[0]
    assert ack(conn, batch[0].batch_id) == 0
    assert drain(conn, subscribed) == window(conn, subscribed, t[0], t[1])


def test_a_seek_drops_an_open_batch_and_its_token_is_worth_nothing(conn: Connection, subscribed: str) -> None:
    t = ticks_of(conn, subscribed, [10, 10, 10])
    batch = receive(conn, subscribed, count=5)
    assert seek(conn, subscribed, t[0]) == t[0]
    assert receive(conn, subscribed, count=5) == batch
    assert seek(conn, subscribed, t[2]) == t[2]
    assert ack(conn, batch[0].batch_id) == 0
    assert nack_ids(conn, batch[0].batch_id, [batch[0].msg_id]) == [
        (batch[0].msg_id, False, "batch not open")
    ]
    assert drain(conn, subscribed, count=3) == window(conn, subscribed, t[2], t[3])
    # Back into the middle of what was done: all of it comes again.
    assert seek(conn, subscribed, t[1], force=True) == t[1]
    assert drain(conn, subscribed, count=7) == window(conn, subscribed, t[1], t[3])


def test_a_consumer_with_workers_is_not_moved(conn: Connection, subscribed: str) -> None:
    value(conn, "select pgque.register_subconsumer(%s, 'c', 'w', true)", subscribed)
    last = forced_tick(conn, subscribed)
    refused("PQ005", seek, conn, subscribed, last)
    refused("PQ005", open_stream, conn, subscribed)
    assert window(conn, subscribed, last, last, "c") == []


@OLD
def test_a_seek_from_an_old_snapshot_undoes_no_other(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], isolation: str
) -> None:
    t = ticks_of(conn, subscribed, [1, 1, 1])
    stale = transaction(isolation)
    seek(conn, subscribed, t[3])
    refused("40001", seek, stale, subscribed, t[1])
    stale.execute("rollback")
    assert seek(stale, subscribed, t[1]) == t[3]


def test_two_seeks_at_once_end_at_the_later_tick(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:  # fmt: skip
    t = ticks_of(conn, subscribed, [1, 1])
    one = transaction()
    assert seek(one, subscribed, t[2]) == t[2]
    two = background(lambda c: seek(c, subscribed, t[1]))
    wait_for_lock(two.pid)
    one.execute("commit")
    assert two.result() == t[2]
    assert receive(conn, subscribed) == []


# --- streams ----------------------------------------------------------------------------------------------


def test_a_stream_subscribes_its_consumer_once_and_returns_where_it_stands(
    conn: Connection, queue: str
) -> None:
    subscribe(conn, queue, "pin")
    t = ticks_of(conn, queue, [5, 5])
    assert open_stream(conn, queue, "default") == t[2]
    assert open_stream(conn, queue, "early", "earliest") == t[0]
    assert open_stream(conn, queue, "by id", str(t[1])) == t[1]
    t.append(forced_tick(conn, queue))
    for start in ("latest", str(t[0]), "nonsense", None):
        assert open_stream(conn, queue, "by id", start) == t[1]
    seek(conn, queue, t[2], "by id")
    assert open_stream(conn, queue, "by id", "earliest") == t[2]
    assert rows(conn, "select pgque.unsubscribe(%s, 'by id')", queue) == [(1,)]
    assert open_stream(conn, queue, "by id", "latest") == t[3]


def test_a_second_stream_of_one_consumer_gets_an_error_that_names_the_session_of_the_first(
    conn: Connection, connect: Callable[..., Connection], new_queue: Callable[..., str], reader: Any, wait_until: Callable[..., None]
) -> None:  # fmt: skip
    queue, other = new_queue("stream %s \"x\" 'y'"), new_queue()
    consumer = "c %I \"x\" 'y' \\"
    first = connect(reader.dsn, application_name="first 'app' %s")
    place = open_stream(first, queue, consumer)
    assert open_stream(first, queue, consumer) == place
    second = connect(reader.dsn)
    error = str(refused("PQ006", open_stream, second, queue, consumer))
    for word in ("stream %s", "c %I", str(first.info.backend_pid), "first ''app'' %s"):
        assert word in error, error
    # Others are free, and so is everything else about this one.
    open_stream(second, queue, "other consumer")
    open_stream(second, other, consumer)
    last = forced_tick(conn, queue)
    assert seek(second, queue, last, consumer) == last
    value(conn, "select pg_terminate_backend(%s, 5000)", first.info.backend_pid)
    wait_until(lambda: stream_is_free(second, queue, consumer), "the stream of a session that ended")
    refused("PQ006", open_stream, conn, queue, consumer)
    second.close()
    wait_until(lambda: stream_is_free(conn, queue, consumer), "the stream of a session that ended")


def stream_is_free(conn: Connection, queue: str, consumer: str) -> bool:
    try:
        open_stream(conn, queue, consumer)
    except psycopg.Error as error:
        assert error.sqlstate == "PQ006"
        return False
    return True


def test_the_lock_of_a_stream_outlives_the_transaction_that_took_it(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    for end in ("commit", "rollback"):
        first = transaction()
        open_stream(first, subscribed)
        first.execute(end.encode())
        first.execute("select 1")
        refused("PQ006", open_stream, conn, subscribed)
        first.close()
        while not stream_is_free(conn, subscribed, "c"):
            pass
        conn.execute("select pg_advisory_unlock_all()")


def test_a_stream_keeps_its_name_when_its_consumer_is_subscribed_anew(
    conn: Connection, connect: Callable[..., Connection], subscribed: str
) -> None:
    stream = connect()
    open_stream(stream, subscribed)
    value(conn, "select pgque.unsubscribe(%s, 'c')", subscribed)
    refused("PQ006", open_stream, conn, subscribed)
    subscribe(conn, subscribed)
    refused("PQ006", open_stream, conn, subscribed)
    open_stream(stream, subscribed)


def test_streams_of_one_new_consumer_at_once_give_one_stream(
    conn: Connection, queue: str, transaction: Callable[..., Connection], background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:  # fmt: skip
    first = transaction()
    open_stream(first, queue, "new")
    second = background(lambda c: open_stream(c, queue, "new"))
    wait_for_lock(second.pid)
    first.execute("commit")
    refused("PQ006", second.result)
    refused("PQ004", open_stream, conn, queue, "")
    refused("PQ004", open_stream, conn, queue, None)
    refused("PQ001", open_stream, conn, "no " + queue)


def test_a_stream_of_a_queue_that_came_out_of_a_dump_starts_with_what_it_lacked(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    for consumer in ("c", "done"):
        subscribe(own, "q", consumer)
    start = open_stream(own, "q")
    sent = send_many(own, "q", 20)
    end = forced_tick(own, "q")
    seek(own, "q", end, "done")
    sent.append(send(own, "q"))
    # What loading a dump does to the row.
    own.execute("update pgque.queue set queue_xid = '7'")
    assert window(own, "q", start, end, "c") == sent[:20]
    sent.append(send(own, "q"))
    pump(own)
    last = forced_tick(own, "q")
    refused("PQ015", window, own, "q", start, end, "c")
    assert sorted(window(own, "q", open_stream(own, "q"), last, "c")) == sent
    assert sorted(window(own, "q", open_stream(own, "q", "done"), last, "done")) == sent[20:]


# --- dead letters -----------------------------------------------------------------------------------------


def test_a_message_behind_the_position_becomes_a_dead_letter_once(conn: Connection, subscribed: str) -> None:
    start = tick_for(conn, subscribed, "latest")
    sent = send_many(conn, subscribed, 6)
    middle = forced_tick(conn, subscribed)
    more = send_many(conn, subscribed, 2)
    end = forced_tick(conn, subscribed)
    unticked = send(conn, subscribed)
    assert dead(conn, subscribed, [sent[2], sent[0]], ["it's %s", None]) == [
        (sent[2], True, None),
        (sent[0], True, None),
    ]
    assert letters(conn, subscribed) == {sent[2]: "it's %s", sent[0]: None}
    # Once, also when a micro-batch is replayed with other company.
    replay = dead(conn, subscribed, [sent[0], sent[1], sent[1], sent[2], more[0]], list("abcde"))
    assert replay == [
        (sent[0], False, "dead already"),
        (sent[1], True, None),
        (sent[1], False, "dead already"),
        (sent[2], False, "dead already"),
        (more[0], True, None),
    ]
    assert letters(conn, subscribed) == {sent[2]: "it's %s", sent[0]: None, sent[1]: "b", more[0]: "e"}
    gone = "not found behind the position"
    odd: list[int | None] = [None, -1, 0, 2**63 - 1, unticked, sent[-1] + 10_000]
    assert dead(conn, subscribed, odd, ["x"] * 6) == [(i, False, gone) for i in odd]
    # Behind a position that moved on it is not looked for any more.
    seek(conn, subscribed, middle)
    assert dead(conn, subscribed, [sent[3], more[1]], ["x", "y"]) == [
        (sent[3], False, gone),
        (more[1], True, None),
    ]
    assert window(conn, subscribed, start, end, "c") == [*sent, *more]
    assert dead(conn, subscribed, [], []) == []


def test_dead_refuses_what_it_can_not_pair(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 2)
    forced_tick(conn, subscribed)
    for ids, reasons in (([sent[0]], []), ([], ["x"]), (None, None), ([sent[0]], None), (None, ["x"])):
        refused("PQ005", dead, conn, subscribed, ids, reasons)
    refused("PQ011", dead, conn, subscribed, [sent[0]], ["x"], "nobody")
    refused("PQ001", dead, conn, "no " + subscribed, [sent[0]], ["x"])
    assert letters(conn, subscribed) == {}


def test_a_dead_letter_is_of_one_consumer_and_comes_back_to_it_alone(conn: Connection, queue: str) -> None:
    for consumer in ("a", "b"):
        subscribe(conn, queue, consumer)
    start = tick_for(conn, queue, "latest")
    sent = send_many(conn, queue, 3)
    end = forced_tick(conn, queue)
    assert dead(conn, queue, sent[:1], ["broken"], "a") == [(sent[0], True, None)]
    assert dead(conn, queue, sent[:1], ["broken too"], "b") == [(sent[0], True, None)]
    ids = rows(conn, "select consumer_name, dl_id from pgque.dlq_inspect(%s) order by 1", queue)
    assert [name for name, _ in ids] == ["a", "b"]
    assert value(conn, "select pgque.dlq_requeue(%s)", ids[0][1]) == sent[0]
    assert list(letters(conn, queue)) == [sent[0]]
    pump(conn)
    after = forced_tick(conn, queue)
    assert window(conn, queue, end, after, "a") == [sent[0]]
    assert window(conn, queue, end, after, "b") == window(conn, queue, end, after) == []
    assert window(conn, queue, start, after, "b") == sent
    # It can fail again.
    seek(conn, queue, end, "a")
    assert dead(conn, queue, sent[:1], ["again"], "a") == [(sent[0], True, None)]
    assert drain(conn, queue, "b") == sent


def test_a_retry_of_another_consumer_is_not_found(conn: Connection, queue: str) -> None:
    for consumer in ("a", "b"):
        subscribe(conn, queue, consumer)
    (sent,) = send_many(conn, queue, 1)
    end = forced_tick(conn, queue)
    batch = receive(conn, queue, "a")[0].batch_id
    nack_ids(conn, batch, [sent])
    ack(conn, batch)
    pump(conn)
    forced_tick(conn, queue)
    seek(conn, queue, end, "b")
    assert dead(conn, queue, [sent], ["x"], "b") == [(sent, False, "not found behind the position")]
    assert dead(conn, queue, [sent], ["x"], "a") == [(sent, True, None)]


def test_many_messages_die_at_once_in_the_order_asked(conn: Connection, subscribed: str) -> None:
    sent = send_many(conn, subscribed, 3_000)
    forced_tick(conn, subscribed)
    random.Random(3).shuffle(sent)  # noqa: S311
    outcome = dead(conn, subscribed, [*sent], [f"r{i}" for i in sent])
    assert [o[0] for o in outcome] == sent
    assert all(o[1] for o in outcome)
    found = rows(conn, "select ev_id, dl_reason from pgque.dlq_inspect(%s, 10000)", subscribed)
    assert dict(found) == {i: f"r{i}" for i in sent}


def test_two_sessions_that_give_up_one_message_make_one_dead_letter(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection], background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:  # fmt: skip
    (sent,) = send_many(conn, subscribed, 1)
    forced_tick(conn, subscribed)
    one = transaction()
    assert dead(one, subscribed, [sent], ["one"]) == [(sent, True, None)]
    two = background(lambda c: dead(c, subscribed, [sent], ["two"]))
    wait_for_lock(two.pid)
    one.execute("commit")
    assert two.result() == [(sent, False, "dead already")]
    assert letters(conn, subscribed) == {sent: "one"}


# --- old tables, nonsense ---------------------------------------------------------------------------------


def test_messages_stored_in_a_table_that_is_no_longer_current_are_in_their_window(
    conn: Connection, subscribed: str, transaction: Callable[..., Connection]
) -> None:
    old = transaction("repeatable read")
    rotations = 0
    for _ in range(2):
        send(conn, subscribed)
        seek(conn, subscribed, forced_tick(conn, subscribed))
        rotations += rotate(conn, subscribed)
        seek(conn, subscribed, forced_tick(conn, subscribed))
    assert rotations == 2
    start = tick_for(conn, subscribed, "latest")
    late = send(old, subscribed, "late")
    middle = forced_tick(conn, subscribed)
    old.execute("commit")
    end = forced_tick(conn, subscribed)
    assert window(conn, subscribed, start, middle) == []
    assert window(conn, subscribed, middle, end) == [late]
    for _ in range(4):
        rotate(conn, subscribed)
        forced_tick(conn, subscribed)
    assert window(conn, subscribed, middle, end) == window(conn, subscribed, start, end) == [late]


def test_nonsense_gets_an_error_that_names_what_is_wrong(conn: Connection, subscribed: str) -> None:
    texts = [
        None,
        "",
        "%s %I %L %%",
        "'; drop schema pgque; --",
        '"',
        "\\",
        "{}",
        "x" * 2_000,
        "é\n\t",
        subscribed,
        "c",
    ]
    ints: list[int | None] = [None, 0, -1, 1, 2, 2**31 - 1, -(2**31)]
    bigs = [*ints, 2**63 - 1, -(2**63)]
    lists: list[list[Any] | None] = [None, [], [None], [1], [1, None, -5], [2**63 - 1], [[1, 2], [3, 4]]]
    names: list[list[Any] | None] = [
        None,
        [],
        [None],
        ["x"],
        ["%s", None, '"\\{},'],
        [["a", "b"], ["c", "d"]],
    ]
    chance = random.Random(5)  # noqa: S311
    calls: list[tuple[str, tuple[list[Any], ...]]] = [
        ("pgque.tick_for(%s, %s)", (texts, texts)),
        ("pgque.next_tick(%s, %s, %s, %s, %s)", (texts, bigs, bigs, ints, bigs)),
        ("pgque.split_window(%s, %s, %s, %s)", (texts, bigs, bigs, ints)),
        ("pgque.read_window(%s, %s, %s, %s, %s, %s, %s)", (texts, bigs, bigs, texts, names, ints, ints)),
        ("pgque.read_window_cursor(%s, %s, %s, %s, %s, %s, %s, %s)", (texts, texts, bigs, bigs, texts, names, ints, ints)),
        ("pgque.seek(%s, %s, %s, %s)", (texts, texts, bigs, [None, False, True])),
        ("pgque.open_stream(%s, %s, %s)", (texts, texts, texts)),
        ("pgque.dead(%s, %s, %s::bigint[], %s::text[])", (texts, texts, lists, names)),
    ]  # fmt: skip
    send(conn, subscribed)
    forced_tick(conn, subscribed)
    good = 0
    for call, arguments in calls:
        for _ in range(60):
            chosen = [chance.choice(a) for a in arguments]
            if chance.random() < 0.7:
                chosen["pgque.read_window_cursor" in call] = subscribed
            try:
                with conn.transaction(force_rollback=True):
                    rows(conn, f"select {call}", *chosen)
                good += 1
            except psycopg.Error as error:
                assert str(error.sqlstate).startswith("PQ"), (call, chosen, error.sqlstate, error)
                assert error.diag.message_hint, (call, error)
    assert good > 5


def test_a_window_whose_end_is_younger_than_the_statement_is_read_whole(
    conn: Connection, subscribed: str, background: Callable[..., Any], wait_for_lock: Callable[..., None]
) -> None:
    first = forced_tick(conn, subscribed)

    def read(other: Connection) -> list[int]:
        other.execute(
            "create function pg_temp.later(queue text, after bigint) returns bigint language plpgsql as $$"
            " begin perform pg_advisory_xact_lock(4711); return pgque.next_tick(queue, after); end $$"
        )
        return column(
            other,
            "select ev_id from pgque.read_window(%s, %s, pg_temp.later(%s, %s))",
            subscribed,
            first,
            subscribed,
            first,
        )

    value(conn, "select pg_advisory_lock(4711)")
    reader = background(read)
    wait_for_lock(reader.pid)
    sent = send(conn, subscribed)
    forced_tick(conn, subscribed)
    value(conn, "select pg_advisory_unlock(4711)")
    assert reader.result() == [sent]
