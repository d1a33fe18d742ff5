"""One consumer's archive and then the queue, as one stream: each message once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import psycopg
import pytest

from conftest import Connect, Role
from sql.helpers import (
    Connection,
    Message,
    ack,
    column,
    configure,
    drain,
    forced_tick,
    ids,
    nack,
    payloads,
    post,
    pump,
    receive,
    refused,
    rotate,
    rows,
    send,
    send_many,
    subscribe,
    take,
    value,
)

T = TypeVar("T")
Found = list[tuple[int, str]]


@pytest.fixture
def archived(conn: Connection, queue: str) -> str:
    """A queue that archives, with consumer c."""
    configure(conn, queue, archive_on_ack="true", drop_policy="dead_letter")
    subscribe(conn, queue)
    return queue


class Stream:
    """A reader of the archive of c, and then of the queue."""

    def __init__(
        self, conn: Connection, queue: str, name: str = "s", incomplete: bool = False, new: int = 1
    ) -> None:
        self.conn = conn
        self.queue = queue
        self.name = name
        assert subscribe_archive(conn, queue, name, incomplete=incomplete) == new
        self.tick: int = value(conn, "select pgque.open_stream(%s, %s)", queue, name)
        self.after = 0

    def slice(self, count: int | None = None) -> Found | None:
        """Read the next piece of the archive; None if all is read."""
        upto = value(
            self.conn,
            "select pgque.archive_next(%s, %s, %s, %s, %s)",
            *(self.queue, self.name, self.tick, self.after, count),
        )
        if upto is None:
            return None
        found = self.read(self.after, upto)
        self.after = upto
        return found

    def read(self, after: int, upto: int) -> Found:
        query = "select a.ev_id, a.ev_data from pgque.archive_read(%s, %s, %s, %s, %s) as a"
        return rows(self.conn, query, self.queue, self.name, self.tick, after, upto)

    def archive(self, count: int | None = None) -> Found:
        """Read the rest of the archive."""
        found: Found = []
        while (piece := self.slice(count)) is not None:
            found += piece
        return found

    def log(self) -> Found:
        """Read what the queue has up to the newest tick."""
        newest = value(self.conn, "select pgque.tick_for(%s, 'latest')", self.queue)
        query = "select w.ev_id, w.ev_data from pgque.read_window(%s, %s, %s, %s) as w"
        found = rows(self.conn, query, self.queue, self.tick, newest, self.name)
        value(self.conn, "select pgque.seek(%s, %s, %s)", self.queue, self.name, newest)
        self.tick = newest
        return found

    def all(self, count: int | None = None) -> list[int]:
        """Return the ids of the rest of the archive, and of the queue."""
        return [number for number, _ in self.archive(count) + self.log()]


def subscribe_archive(
    conn: Connection, queue: str, name: str = "s", of: str = "c", incomplete: bool = False
) -> int:
    found: int = value(conn, "select pgque.subscribe_archive(%s, %s, %s, %s)", queue, name, of, incomplete)
    return found


def archive_of(conn: Connection, queue: str, name: str = "s") -> str | None:
    found: str | None = value(conn, "select pgque.archive_of(%s, %s)", queue, name)
    return found


class Actors:
    """Senders and workers of consumer c that do what comes to their minds."""

    def __init__(
        self, dice: random.Random, connect: Connect, conn: Connection, queue: str, alone: bool
    ) -> None:
        self.dice = dice
        self.conn = conn
        self.queue = queue
        self.alone = alone
        self.senders = [connect(autocommit=False) for _ in range(2)]
        self.sent: dict[int, str] = {}
        self.keyed: set[int] = set()
        self.number = 0
        self.batches: list[list[Message]] = []

    def payload(self) -> str:
        self.number += 1
        return str(self.number)

    def send(self) -> None:
        for _ in range(self.dice.randrange(1, 4)):
            payload = self.payload()
            self.sent[send(self.conn, self.queue, payload)] = payload

    def send_slowly(self) -> None:
        """Send in a transaction that stays open."""
        payload = self.payload()
        self.sent[send(self.dice.choice(self.senders), self.queue, payload)] = payload

    def commit(self) -> None:
        self.dice.choice(self.senders).commit()

    def send_later(self) -> None:
        payload = self.payload()
        self.sent[post(self.conn, self.queue, payload, delay="1 microsecond")] = payload

    def send_key(self) -> None:
        payload = self.payload()
        number = post(self.conn, self.queue, payload, key=f"k{self.dice.randrange(3)}")
        self.sent[number] = payload
        self.keyed.add(number)

    def replace_slowly(self) -> None:
        if self.senders[0].info.transaction_status == 0:
            payload = self.payload()
            number = post(self.senders[0], self.queue, payload, key=f"k{self.dice.randrange(3)}")
            self.sent[number] = payload
            self.keyed.add(number)

    def tick(self) -> None:
        pump(self.conn)
        forced_tick(self.conn, self.queue)

    def receive(self) -> None:
        count = self.dice.randrange(1, 12)
        if self.alone:
            batch = receive(self.conn, self.queue, "c", count)
        else:
            batch = take(self.conn, self.queue, "w", count, self.dice.choice(["1 microsecond", "1 hour"]))
        if batch:
            self.batches.append(batch)

    def settle(self) -> None:
        if not self.batches:
            return
        batch = self.batches.pop(self.dice.randrange(len(self.batches)))
        token = batch[0].batch_id
        some = [m.msg_id for m in batch if self.dice.random() < 0.4]
        call = self.dice.choice(
            [
                *["ack(%s)"] * 4,
                "ack(%s, %s::bigint[])",
                "nack(%s, %s::bigint[], '0')",
                "nack(%s, %s::bigint[], '1 hour')",
                "dead(%s, %s::bigint[], 'bad')",
                "archive(%s, %s::bigint[])",
                "ack(%s)" if self.alone else "release(%s, %s::bigint[])",
            ]
        )
        rows(self.conn, f"select * from pgque.{call}", token, *([some] if "[]" in call else []))
        if "[]" in call:
            self.batches.append(batch)

    def requeue(self) -> None:
        value(self.conn, "select pgque.dlq_requeue_all(%s, 1)", self.queue)

    def go_back(self) -> None:
        if self.alone:
            earliest = value(self.conn, "select pgque.tick_for(%s, 'earliest')", self.queue)
            value(self.conn, "select pgque.seek(%s, 'c', %s, true)", self.queue, earliest)

    def change_role(self) -> None:
        name = "share_consumer" if self.alone else "unshare_consumer"
        value(self.conn, f"select pgque.{name}(%s, 'c')", self.queue)
        self.alone = not self.alone

    def rotate(self) -> None:
        rotate(self.conn, self.queue)

    def act(self, times: int, keys: bool) -> None:
        calls: list[Callable[[], None]] = [self.send, self.tick, self.receive, self.settle] * 4
        calls += [self.send_slowly, self.commit, self.send_later, self.rotate] * 2
        calls += [self.requeue, self.go_back, self.change_role]
        if keys:
            calls += [self.send_key, self.replace_slowly] * 2
        for _ in range(times):
            self.patiently(self.dice.choice(calls))

    def patiently(self, call: Callable[[], T]) -> T | None:
        """Call; if a sender with a key is in the way, commit what it sent."""
        try:
            return call()
        except psycopg.errors.LockNotAvailable:
            self.senders[0].commit()
        return call()


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "keys"])
@pytest.mark.parametrize("seed", [3, 9, 24])  # with which c gets something done
def test_whatever_happens_each_message_is_read_once(
    conn: Connection, archived: str, connect: Connect, seed: int, keys: bool
) -> None:
    """Transactions stay open, leases expire, messages are nacked, dead, requeued, delayed or replaced, the
    consumer moves back and tables rotate, before the stream begins and while it reads."""
    dice = random.Random(f"{seed} {keys}")  # noqa: S311
    actors = Actors(dice, connect, conn, archived, alone=dice.random() < 0.5)
    conn.execute("set lock_timeout = '100ms'")
    actors.act(dice.randrange(60, 150), keys)
    for _ in range(12):  # so that much is done
        actors.tick()
        actors.receive()
        actors.settle()
    stream = actors.patiently(lambda: Stream(conn, archived))
    assert stream is not None
    found: Found = []
    while (piece := stream.slice(dice.randrange(1, 6))) is not None:
        found += piece
        actors.act(4, keys)
    from_archive = len(found)
    for _ in range(3):
        found += actors.patiently(stream.log) or []
        actors.act(5, keys)
    for sender in actors.senders:
        sender.commit()
    actors.tick()
    found += stream.log()
    assert from_archive > 0
    assert max(Counter(found).values()) == 1
    assert dict(sorted(found, key=lambda row: int(row[1]))) == actors.sent
    doubles = {number for number, n in Counter(number for number, _ in found).items() if n > 1}
    assert doubles <= actors.keyed


def test_the_archive_comes_in_pieces_and_then_the_queue(conn: Connection, archived: str) -> None:
    done = send_many(conn, archived, 7)
    forced_tick(conn, archived)
    drain(conn, archived)
    pending = send_many(conn, archived, 3)
    forced_tick(conn, archived)
    stream = Stream(conn, archived)
    assert archive_of(conn, archived) == "c"
    drain(conn, archived)
    assert [[number for number, _ in stream.slice(3) or []] for _ in range(3)] == [
        done[:3],
        done[3:6],
        done[6:],
    ]
    assert stream.slice(3) is None
    assert [number for number, _ in stream.log()] == pending
    assert archive_of(conn, archived) is None
    refused("PQ015", stream.slice)
    assert subscribe_archive(conn, archived) == 0
    assert archive_of(conn, archived) is None


def test_the_archive_is_read_even_if_no_tick_follows(conn: Connection, archived: str) -> None:
    send(conn, archived)
    forced_tick(conn, archived)
    drain(conn, archived)
    stream = Stream(conn, archived)
    stream.archive()
    value(conn, "select pgque.seek(%s, 's', %s)", archived, stream.tick)
    assert archive_of(conn, archived) is None


def test_columns_are_those_of_a_window(conn: Connection, archived: str) -> None:
    # As a consumer would have read it from the log
    subscribe(conn, archived, "other")
    post(conn, archived, '{"a": 1}', "order", headers='{"h": "1"}', partition_key="p", ttl="1 day")
    newest = forced_tick(conn, archived)
    window = "select * from pgque.read_window(%s, %s, %s)"
    (read,) = rows(conn, window, archived, newest - 1, newest)
    drain(conn, archived)
    stream = Stream(conn, archived)
    (found,) = rows(conn, "select * from pgque.archive_read(%s, 's', %s, 0, 100)", archived, stream.tick)
    assert found[2] is None
    assert found[:2] + found[3:] == read[:2] + read[3:]
    types = "select * from pgque.archive_read(%s, 's', %s, 0, 100, %s)"
    assert rows(conn, types, archived, stream.tick, ["order"]) == [found]
    assert rows(conn, types, archived, stream.tick, ["other"]) == []


def test_a_transaction_open_at_the_tick_is_read_from_the_queue(
    conn: Connection, archived: str, connect: Connect
) -> None:
    slow = connect(autocommit=False)
    late = send(slow, archived)
    done = send(conn, archived)
    forced_tick(conn, archived)
    drain(conn, archived)
    stream = Stream(conn, archived)
    slow.commit()
    forced_tick(conn, archived)
    # Now its id, which is the lower one, is in the archive too.
    assert drain(conn, archived) == [late]
    assert [number for number, _ in stream.archive()] == [done]
    assert [number for number, _ in stream.log()] == [late]


def test_a_message_that_was_delayed_at_the_tick_is_read_from_the_queue(
    conn: Connection, archived: str
) -> None:
    late = post(conn, archived, delay="1 microsecond")
    done = send(conn, archived)
    forced_tick(conn, archived)
    assert drain(conn, archived) == [done]
    stream = Stream(conn, archived)
    pump(conn)
    forced_tick(conn, archived)
    assert drain(conn, archived) == [late]
    assert [number for number, _ in stream.archive()] == [done]
    assert [number for number, _ in stream.log()] == [late]


def test_a_message_that_moves_while_the_archive_is_read_comes_once(
    conn: Connection, archived: str, connect: Connect
) -> None:
    sent = send_many(conn, archived, 4)
    forced_tick(conn, archived)
    batch = receive(conn, archived)
    for message in batch:
        nack(conn, message)
    ack(conn, batch[0].batch_id)
    stream = Stream(conn, archived)
    worker = connect(autocommit=False)
    again = receive(worker, archived)
    assert ids(again) == sent
    worker.execute("select * from pgque.dead(%s, %s::bigint[])", (again[0].batch_id, sent[:1]))
    ack(worker, again[0].batch_id)
    # Two tasks of a micro-batch, one before and one after the commit
    first = stream.read(0, sent[1])
    worker.commit()
    second = stream.read(sent[1], sent[3])
    assert [number for number, _ in first + second] == sent
    assert stream.read(0, sent[3]) == first + second
    assert column(conn, "select a.msg_id from pgque.archive_list(%s) as a order by 1", archived) == sent[1:]


def test_a_message_that_waits_with_an_older_body_comes_with_its_last(
    conn: Connection, archived: str, connect: Connect
) -> None:
    """While a key is being replaced, its message goes to the retry queue with the body that it has."""
    first, second = connect(autocommit=False), connect(autocommit=False)
    number = post(conn, archived, "old", key="k")
    forced_tick(conn, archived)
    assert post(first, archived, "new", key="k") == number
    assert receive(conn, archived) == []
    first.commit()
    forced_tick(conn, archived)
    post(second, archived, "never", key="k")
    assert receive(conn, archived) == []
    second.rollback()
    stream = Stream(conn, archived)
    assert stream.archive() == [(number, "new")]
    assert payloads(conn, archived) == ["new"]
    assert stream.log() == []


def test_a_worker_that_holds_a_batch_holds_the_tick_back(conn: Connection, archived: str) -> None:
    held = send_many(conn, archived, 2)
    before = forced_tick(conn, archived) - 1
    batch = take(conn, archived)
    done = send_many(conn, archived, 2)
    forced_tick(conn, archived)
    ack(conn, take(conn, archived)[0].batch_id)
    rows(conn, "select * from pgque.ack(%s, %s::bigint[])", batch[0].batch_id, held[:1])
    stream = Stream(conn, archived)
    assert stream.tick == before
    ack(conn, batch[0].batch_id)
    assert sorted(stream.all()) == held + done


def test_a_message_that_was_acknowledged_twice_comes_once(conn: Connection, archived: str) -> None:
    sent = send_many(conn, archived, 3)
    start = forced_tick(conn, archived) - 1
    drain(conn, archived)
    value(conn, "select pgque.seek(%s, 'c', %s, true)", archived, start)
    drain(conn, archived)
    assert len(rows(conn, "select * from pgque.archive_list(%s)", archived)) == 6
    stream = Stream(conn, archived)
    assert [number for number, _ in stream.archive()] == sent
    assert stream.log() == []


def restore(conn: Connection, queue: str) -> None:
    """Let the queue look as one that was loaded from a dump, and let its first use repair it."""
    conn.execute("update pgque.queue set queue_xid = '1' where queue_name = %s", (queue,))
    value(conn, "select pgque.ticker(%s)", queue)


@pytest.mark.parametrize("pumped", [False, True], ids=["waiting", "in the log"])
def test_a_reader_in_a_dump_reads_each_message_once(conn: Connection, archived: str, pumped: bool) -> None:
    """The repair makes retries of what was ahead of the reader and of the other consumer."""
    sent = send_many(conn, archived, 3)
    forced_tick(conn, archived)
    drain(conn, archived)
    Stream(conn, archived)
    sent += send_many(conn, archived, 3)
    forced_tick(conn, archived)
    drain(conn, archived)
    sent += send_many(conn, archived, 2)
    restore(conn, archived)
    stream = Stream(conn, archived, new=0)
    if pumped:
        pump(conn)
        forced_tick(conn, archived)
    found = stream.archive(2)
    pump(conn)
    forced_tick(conn, archived)
    assert [number for number, _ in found + stream.log()] == sent


def test_a_retry_that_is_in_the_log_is_not_lost(conn: Connection, archived: str) -> None:
    """The pump puts retries of a consumer that never received into the log."""
    sent = send_many(conn, archived, 3)
    restore(conn, archived)
    pump(conn)
    stream = Stream(conn, archived)
    first = [number for number, _ in stream.slice(2) or []]
    assert first == sent[:2]
    forced_tick(conn, archived)
    drain(conn, archived)
    assert first + stream.all() == sent


def test_an_archive_that_lacks_messages_is_refused(conn: Connection, queue: str) -> None:
    subscribe(conn, queue, "early")
    configure(conn, queue, archive_on_ack="true")
    subscribe(conn, queue, "whole")
    subscribe(conn, queue, "moved")
    sent = send_many(conn, queue, 2)
    newest = forced_tick(conn, queue)
    value(conn, "select pgque.seek(%s, 'moved', %s)", queue, newest)
    for consumer in ("early", "whole"):
        drain(conn, queue, consumer)
    assert subscribe_archive(conn, queue, "s1", "whole") == 1
    for consumer in ("early", "moved"):
        error = refused("PQ005", subscribe_archive, conn, queue, "s2", consumer)
        assert f"the archive of consumer {consumer} of queue {queue} lacks messages" in str(error)
    assert subscribe_archive(conn, queue, "s2", "early", incomplete=True) == 1
    # Off while it is read
    configure(conn, queue, archive_on_ack="false")
    configure(conn, queue, archive_on_ack="true")
    tick_id = value(conn, "select pgque.open_stream(%s, 's1')", queue)
    next_id = "select pgque.archive_next(%s, 's1', %s, 0, null, %s)"
    refused("PQ005", value, conn, next_id, queue, tick_id, False)
    assert value(conn, next_id, queue, tick_id, True) == sent[-1]
    refused("PQ005", subscribe_archive, conn, queue, "s4", "whole")


def test_the_default_of_all_queues_counts_too(own: Connection) -> None:
    value(own, "select pgque.set_default_config('archive_on_ack', 'true')")
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    assert subscribe_archive(own, "q", "s1") == 1
    value(own, "select pgque.set_default_config('archive_on_ack', null)")
    refused("PQ005", subscribe_archive, own, "q", "s2")


def test_names_and_rights_are_checked(
    conn: Connection, archived: str, roles: Callable[..., Role], connect: Connect
) -> None:
    refused("PQ005", subscribe_archive, conn, archived, "c", "c")
    refused("PQ011", subscribe_archive, conn, archived, "s", "nobody")
    refused("PQ001", subscribe_archive, conn, "no such queue")
    assert subscribe(conn, archived, "s") == 1  # nothing of the above subscribed it
    stream = Stream(conn, archived, "s2")
    consumer = connect(roles("reader").dsn)
    refused("42501", subscribe_archive, consumer, archived, "s3")
    for call in ("archive_next(%s, 's2', %s, 0)", "archive_read(%s, 's2', %s, 0, 9)"):
        refused("42501", value, consumer, f"select pgque.{call}", archived, stream.tick)
        # Its own subscription opens nobody else's archive.
        refused("PQ015", value, conn, f"select pgque.{call.replace('s2', 's')}", archived, stream.tick)
        refused("PQ015", value, conn, f"select pgque.{call}", archived, stream.tick + 1)
    refused("PQ005", stream.slice, 0)
    role = roles()
    value(conn, "select pgque.grant_queue(%s, %s, 'admin')", archived, role.name)
    assert subscribe_archive(connect(role.dsn), archived, "s4") == 1


def test_a_consumer_that_is_gone_ends_the_reading(conn: Connection, archived: str) -> None:
    send(conn, archived)
    forced_tick(conn, archived)
    nack(conn, receive(conn, archived)[0])
    stream = Stream(conn, archived)
    value(conn, "select pgque.unsubscribe(%s, 'c')", archived)
    # Another one of its name has none of its retries.
    subscribe(conn, archived)
    refused("PQ011", stream.slice)
    refused("PQ011", archive_of, conn, archived)
