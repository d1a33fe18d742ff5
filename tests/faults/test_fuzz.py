"""Whatever a caller passes: an answer or an error he can understand, and queues that go on working."""

from __future__ import annotations

import os
import random
import time

import psycopg
import pytest

from faults.fuzzing import QUEUES, Function, Fuzzer, Scene, good_for, long_text, populate
from sql.helpers import (
    Connection,
    column,
    drain,
    move_clock,
    pump,
    receive,
    refused,
    rows,
    send,
    subscribe,
    tick,
    value,
)

SECONDS = float(os.environ.get("PGQUE_FUZZ_SECONDS", "15"))
SEED = os.environ.get("PGQUE_SEED") or str(random.SystemRandom().randrange(10**9))


@pytest.fixture
def populated(own: Connection) -> Connection:
    """A database with queues and consumers of every kind, and messages in every state."""
    populate(own)
    return own


@pytest.mark.usefixtures("may_compile")
@pytest.mark.timeout(900)  # calls every function, with a part of the bad values or with all
@pytest.mark.parametrize(
    "part", [pytest.param(0.25, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.long)]
)
def test_one_bad_argument_among_good_ones_gets_an_error_in_plain_words(
    populated: Connection, part: float
) -> None:
    fuzzer = Fuzzer(populated, SEED)
    populated.execute("set statement_timeout = '10s'; set lock_timeout = '2s'")
    for function in fuzzer.functions:
        if function.kind == "p":
            continue
        fuzzer.scene.ids = good_for(function, populated)
        for n, (name, kind) in enumerate(function.args):
            populated.execute("begin")
            for bad in fuzzer.hostile(name, kind):
                if fuzzer.dice.random() >= part:
                    continue
                populated.execute("savepoint before")
                values = [fuzzer.sensible(*arg) for arg in function.args]
                values[n] = bad
                fuzzer.run(function.name, function.call(values))
                populated.execute("rollback to savepoint before")
            populated.execute("rollback")
    fuzzer.judge(f"one bad argument, PGQUE_SEED={SEED}")


@pytest.mark.slow  # some thousand random calls
@pytest.mark.usefixtures("may_compile")
@pytest.mark.timeout(SECONDS + 150)
def test_random_calls_raise_nothing_internal_and_leave_every_queue_working(populated: Connection) -> None:
    conn = populated
    fuzzer = Fuzzer(conn, SEED)
    end = time.monotonic() + SECONDS
    deck: list[Function] = []
    number = decks = 0
    while time.monotonic() < end or number < 20 or decks < 2:  # until all functions were called
        number += 1
        fuzzer.done.clear()
        dice = fuzzer.dice
        alone = dice.random() < 0.1
        conn.execute("set statement_timeout = '5s'; set lock_timeout = '1s'; set client_min_messages = error")
        if not alone:
            level = dice.choices(["read committed", "repeatable read", "serializable"], [8, 1, 1])[0]
            conn.execute(f"begin isolation level {level}".encode())
            role = dice.choices(
                [None, "pgque_admin", "pgque_reader", "pgque_writer", "pgque_user"], [6, 2, 1, 1, 1]
            )[0]
            if role:
                conn.execute(f"set local role {role}".encode())
        for _ in range(dice.randrange(1, 40)):
            if not deck:
                deck = [f for f in fuzzer.functions for _ in range(2)]
                dice.shuffle(deck)
                decks += 1
            function = deck.pop()
            if function.kind == "p":
                if not alone:
                    continue
                conn.execute("set statement_timeout = '300ms'")
            values = [
                dice.choice(fuzzer.hostile(*arg)) if dice.random() < 0.25 else fuzzer.sensible(*arg)
                for arg in function.args
            ]
            given = dice.randrange(len(values) - function.defaults, len(values) + 1)
            fuzzer.run(function.name, function.call(values[:given]))
        if alone or dice.random() < 0.6:
            commit(conn)
            conn.execute("reset role; set statement_timeout = '20s'")
            if number % 8 == 0:
                check_all_queues(conn, f"PGQUE_SEED={SEED}, round {number}: " + ";\n".join(fuzzer.done))
                populate(conn)
            fuzzer.scene = Scene.look(conn)
        else:
            conn.execute("rollback")
    fuzzer.judge(f"PGQUE_SEED={SEED}, {number} rounds")
    print(f"{number} rounds, {sum(c.total() for c in fuzzer.outcomes.values())} calls")
    never = [f for f in {f.name for f in fuzzer.functions} if f not in fuzzer.outcomes and f != "ticker_loop"]
    assert never == [], f"never called: {never}"


def commit(conn: Connection) -> None:
    """Commit; a serialization failure at the end is an answer too."""
    try:
        conn.execute("commit")
    except psycopg.errors.SerializationFailure:
        conn.execute("rollback")


def check_all_queues(conn: Connection, what: str) -> None:
    """Every queue takes a message, ticks, and gives it to a consumer, who finishes it."""
    judge = f"judge {time.monotonic_ns()}"
    for name in column(
        conn,
        "select queue_name from pgque.queue where queue_name <> all (%s) offset 12",
        [*QUEUES, "dead.dlq"],
    ):
        value(conn, "select pgque.drop_queue(%s, true)", name)
    for name in column(conn, "select queue_name from pgque.queue order by queue_name"):
        try:
            value(conn, "select pgque.resume(%s)", name)
            value(
                conn,
                "select pgque.alter_queue(%s, (select jsonb_object_agg(t.param, null) from pgque._setting_types() t))",
                name,
            )
            value(conn, "select pgque.subscribe(%s, %s)", name, judge)
            sent = value(conn, "select pgque.send(%s, 't', 'judged'::text)", name)
            value(conn, "select pgque.force_next_tick(%s)", name)
            assert value(conn, "select pgque.ticker(%s)", name) is not None
            got: list[int] = []
            while found := rows(
                conn, "select batch_id, msg_id from pgque.receive(%s, %s, 10000)", name, judge
            ):
                got += [f[1] for f in found]
                assert value(conn, "select pgque.ack(%s)", found[0][0]) == 1
            assert sent in got
            value(conn, "select pgque.unsubscribe(%s, %s)", name, judge)
            for consumer, role in rows(
                conn,
                "select consumer_name, role from pgque.get_consumer_info(%s) where role in ('normal', 'pool')",
                name,
            ):
                worker = "w9" if role == "pool" else None
                for _ in range(1000):
                    found = rows(
                        conn,
                        "select batch_id from pgque.receive(%s, %s, 1000, worker => %s)",
                        name,
                        consumer,
                        worker,
                    )
                    if not found:
                        break
                    assert value(conn, "select pgque.ack(%s)", found[0][0]) == 1
        except (psycopg.Error, AssertionError) as error:
            raise AssertionError(f"queue {name!r}: {error}\nafter {what}") from error
    failing = rows(
        conn, "select * from pgque.health() where status = 'fail' and check_name in ('tables', 'ticks')"
    )
    assert failing == [], what


# -- what the fuzz found -------------------------------------------------


def test_delayed_messages_of_two_queues_do_not_meet(own: Connection) -> None:
    for name in ("a", "b"):
        value(own, "select pgque.create_queue(%s)", name)
        subscribe(own, name)
        assert value(own, "select pgque.send(%s, 't', 'x'::text, delay => '1 hour')", name) == 1
        assert value(own, "select pgque.send(%s, 't', 'y'::text, delay => '1 hour', key => 'k')", name) == 2
    assert value(own, "select pgque.purge('a')") == 2
    assert [m.msg_id for m in receive(own, "b")] == []
    move_clock(own, "2 hours")
    for name, expected in (("a", []), ("b", [1, 2])):
        pump(own)
        tick(own, name)
        assert drain(own, name) == expected


def test_a_long_partition_key_does_not_stop_a_keyed_pool(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    value(own, "select pgque.subscribe('q', 'k', keyed_order => true)")
    sent = []
    for payload, key in (("1", "a"), ("2", long_text(9000)), ("3", long_text(9000)), ("4", "a"), ("5", "b")):
        try:
            sent.append(
                value(own, "select pgque.send('q', 't', %s::text, partition_key => %s)", payload, key)
            )
        except psycopg.Error as error:
            assert (error.sqlstate, len(key)) == ("PQ005", 9000)
    tick(own, "q")
    got: list[int] = []
    while batch := rows(own, "select msg_id, batch_id from pgque.receive('q', 'k', 10, worker => 'w')"):
        got += [m[0] for m in batch]
        assert value(own, "select pgque.ack(%s)", batch[0][1]) == 1
    assert sorted(got) == sent


@pytest.mark.parametrize("setting", ["base", "cap", "jitter"])
def test_a_backoff_that_is_accepted_can_be_used(own: Connection, setting: str) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    try:
        value(
            own, "select pgque.alter_queue('q', %s::jsonb)", f'{{"retry_backoff": {{"{setting}": 1e-400}}}}'
        )
    except psycopg.Error as error:
        assert error.sqlstate == "PQ005"
    sent = send(own, "q")
    tick(own, "q")
    (message,) = receive(own, "q")
    assert rows(own, "select * from pgque.nack(%s, array[%s::bigint])", message.batch_id, sent) == [
        (sent, True, None)
    ]


@pytest.mark.parametrize(
    ("tick_id", "time_", "event_seq"),
    [
        ("9223372036854775807", "now", "1"),
        ("5", "infinity", "1"),
        ("5", "-infinity", "1"),
        ("5", "now", "9223372036854775807"),
    ],
)
def test_an_external_tick_that_would_break_the_queue_is_refused(
    own: Connection, tick_id: str, time_: str, event_seq: str
) -> None:
    value(own, "select pgque.create_queue('q', '{\"external_ticker\": true}')")
    subscribe(own, "q")
    refused(
        "PQ005",
        value,
        own,
        "select pgque.ticker('q', %s::bigint, %s::timestamptz, %s::bigint)",
        tick_id,
        time_,
        event_seq,
    )
    value(own, "select pgque.set_queue_config('q', 'external_ticker', null)")
    sent = send(own, "q")
    tick(own, "q")
    assert drain(own, "q") == [sent]
    for info in ("get_queue_info", "get_consumer_info", "metrics", "health"):
        assert rows(own, f"select * from pgque.{info}()")


@pytest.mark.parametrize("since", ["infinity", "-infinity"])
def test_infinite_times_are_times_to_the_archive(own: Connection, since: str) -> None:
    value(own, "select pgque.create_queue('q')")
    subscribe(own, "q")
    sent = send(own, "q")
    tick(own, "q")
    rows(own, "select * from pgque.archive(%s)", receive(own, "q")[0].batch_id)
    expected = [sent] if since == "-infinity" else []
    assert column(own, "select msg_id from pgque.archive_list('q', 10, %s::timestamptz)", since) == expected
    assert value(own, "select pgque.archive_purge('q', %s::timestamptz)", since) == 1 - len(expected)
