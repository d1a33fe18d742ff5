"""The functions of the module send, receive and settle in the transaction of whatever connection there is."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import pytest
from psycopg.types.json import set_json_dumps, set_json_loads
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.pool import NullPool
from wrapt import ObjectProxy

import pgque
from conftest import Roles, create_database, drop_database
from support.connections import DRIVERS, KINDS, POOLS, Abandoned, Open, asyncpg_connect, blocking

DUE = datetime(2041, 3, 4, 5, 6, 7, 89, tzinfo=timezone.utc)
# What a driver could take for a parameter, or escape.
ODD = "100% %s %(x)s %% :name $1 {0} ' \" \\ \n äß€😀"


# One queue, one client and one connection of each kind for the whole module; each test has a consumer of its
# own, which begins with what the test sends.


@pytest.fixture(scope="module")
def client(dsn: str) -> Iterator[pgque.PgqueClient]:
    """A client in autocommit, to compare with."""
    with pgque.connect(dsn, autocommit=True) as found:
        yield found


@pytest.fixture(scope="module")
def queue(client: pgque.PgqueClient) -> Iterator[str]:
    """The name of the queue."""
    client.admin.create_queue("calls")
    yield "calls"
    client.admin.drop_queue("calls", force=True)


# The drivers come first, so that a kind has one number, by which pytest keeps its tests together.
ALL = [*DRIVERS, *(name for name in KINDS if name not in DRIVERS)]
each_driver = pytest.mark.parametrize("connection", DRIVERS, indirect=True)


@pytest.fixture(scope="module", params=ALL)
def connection(request: pytest.FixtureRequest, dsn: str, queue: str) -> Iterator[Open]:
    """A connection of each kind. It is closed before its queue is dropped, which would wait for it."""
    with KINDS[request.param](dsn) as found:
        yield found


@pytest.fixture
def consumer(client: pgque.PgqueClient, queue: str) -> Iterator[str]:
    """The name of a consumer that is subscribed to the queue."""
    name = f"c_{secrets.token_hex(4)}"
    client.force_next_tick(queue)
    client.ticker(queue)
    client.subscribe(queue, name)
    yield name
    client.unsubscribe(queue, name)


@pytest.fixture
def opened(connection: Open, consumer: str) -> Iterator[Open]:
    """The connection. It leaves nothing open, for which the end of the consumer would wait."""
    yield connection
    connection.rollback()


Tick = Callable[[], int | None]
Read = Callable[[], list[pgque.Message]]


@pytest.fixture
def tick(client: pgque.PgqueClient, queue: str) -> Tick:
    """tick() makes everything committed so far receivable."""

    def tick() -> int | None:
        client.force_next_tick(queue)
        return client.ticker(queue)

    return tick


@pytest.fixture
def read(client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick) -> Read:
    """read() returns what the test has committed so far, and did not expire."""

    def read() -> list[pgque.Message]:
        tick()
        return client.peek(queue, 1000, consumer=consumer)

    return read


def payloads(messages: list[pgque.Message]) -> list[Any]:
    return [m.payload if m.payload_bytes is None else m.payload_bytes for m in messages]


# -- whose transaction it is ---------------------------------------------------------------------------


def test_messages_are_committed_and_rolled_back_with_the_transaction(
    opened: Open, queue: str, read: Read
) -> None:
    opened.send(queue, "gone")
    opened.send_batch(queue, ["gone", "too"], type="t")
    opened.rollback()
    [before] = opened.execute("select pg_current_xact_id()::text")
    first = opened.send(queue, "kept")
    others = opened.send_batch(queue, ["a", "b"], type="t")
    assert opened.execute("select pg_current_xact_id()::text") == [before]
    assert read() == []
    opened.commit()
    assert [(m.msg_id, m.payload) for m in read()] == list(
        zip([first, *others], ["kept", "a", "b"], strict=True)
    )


def test_a_savepoint_takes_its_messages_and_its_failed_calls_with_it(
    opened: Open, queue: str, read: Read
) -> None:
    opened.send(queue, "outer")
    with pytest.raises(Abandoned), opened.savepoint():
        opened.send(queue, "inner")
        raise Abandoned
    with opened.savepoint():
        opened.send(queue, "inner, kept")
    with pytest.raises(pgque.PgqueQueueNotFoundError), opened.savepoint():
        opened.send("no such queue", "x")
    opened.commit()
    assert payloads(read()) == ["outer", "inner, kept"]


def test_a_failed_transaction_refuses_the_next_call(opened: Open, queue: str) -> None:
    with pytest.raises(pgque.PgqueQueueNotFoundError):
        opened.send("no such queue", "x")
    with pytest.raises(pgque.PgqueError, match="transaction"):
        opened.send(queue, "x")
    opened.rollback()
    opened.send(queue, "x")


def test_received_and_acknowledged_in_one_transaction_with_the_effect(
    opened: Open, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send(queue, "x")
    tick()
    for end in (opened.rollback, opened.commit):
        [message] = opened.receive(queue, consumer)
        assert opened.ack(message.batch_id) == 1
        end()
    assert opened.receive(queue, consumer) == []
    opened.commit()
    assert opened.ack(message.batch_id) == 0


@pytest.mark.parametrize("name", POOLS)
def test_a_call_on_a_pool_is_a_transaction_of_its_own(
    name: str, dsn: str, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    with POOLS[name](dsn) as (pool, call):
        ids = [
            call("send", pool, queue, {"n": 1}, headers={"h": 1}),
            *call("send_batch", pool, queue, ["b"]),
        ]
        with pytest.raises(pgque.PgqueQueueNotFoundError):
            call("send", pool, "no such queue", "x")
        tick()
        batch = call("receive", pool, queue, consumer)
        assert [m.msg_id for m in batch] == ids
        assert batch[0].headers == {"h": 1}
        assert call("nack", pool, batch[0].batch_id, batch[0]) == 1
        assert call("ack", pool, batch[0].batch_id) == 1
    assert client.receive(queue, consumer) == []


# -- the same arguments and results as the client's ----------------------------------------------------


@dataclass
class Order:
    id: UUID
    placed: datetime
    total: Decimal


ORDER = Order(UUID(int=7), DUE, Decimal("9.90"))
PAYLOADS = [ODD, "", b"\x00\xff%s", bytearray(b"b"), {"n": [1, None, ODD]}, [], 1.5, True, None, ORDER, DUE]


@each_driver
def test_a_payload_arrives_as_it_is_sent_by_the_client(
    opened: Open, client: pgque.PgqueClient, queue: str, read: Read
) -> None:
    for payload in PAYLOADS:
        opened.send(queue, payload, type=ODD)
    opened.commit()
    for payload in PAYLOADS:
        client.send(queue, payload, type=ODD)
    found = [(m.type, m.payload, m.payload_bytes) for m in read()]
    assert found[: len(PAYLOADS)] == found[len(PAYLOADS) :]
    assert len(found) == 2 * len(PAYLOADS)


@each_driver
def test_models_an_encoder_and_a_decoder_work_as_with_the_client(
    opened: Open, queue: str, consumer: str, tick: Tick
) -> None:
    heavy = {"order": ORDER, "weight": 1j}
    with pytest.raises(TypeError, match=r"payload.weight: cannot encode <class 'complex'>"):
        opened.send(queue, heavy)
    opened.send(queue, heavy, headers={"at": 2j}, encoder=str)
    opened.send_batch(queue, [ORDER, {"n": 3j}], headers=[None, {"at": 4j}], encoder=str)
    opened.commit()
    tick()
    found = opened.receive(queue, consumer)
    assert found[1].into(Order) == ORDER
    assert [m.headers for m in found] == [{"at": "2j"}, None, {"at": "4j"}]
    assert isinstance(found[0].value, dict) and found[0].value["weight"] == "1j"
    assert found[2].value == {"n": "3j"}
    opened.rollback()
    again = opened.receive(queue, consumer, decoder=lambda message: len(message.payload or ""))
    assert [m.value for m in again] == [len(m.payload or "") for m in found]
    for name, option in {"send": "encoder", "send_batch": "encoder", "receive": "decoder"}.items():
        with pytest.raises(TypeError, match=f"{option} has to be a function, not 5"):
            opened.call(name, opened.target, queue, "x", **{option: 5})


OPTIONS: list[dict[str, Any]] = [
    {"headers": {"n": 1, "odd": ODD, "none": None}},
    {"key": ODD},
    {"ttl": timedelta(days=400, seconds=5, microseconds=7)},
    {"ttl": 90.5},
    # An hour at least: the queue is that of all tests here, which would read what becomes due.
    {"delay": 3600},
    {"delay": timedelta(days=1, hours=23)},
    {"deliver_at": DUE},
    {"deliver_at": DUE.replace(tzinfo=None)},  # local time
    {"headers": {"n": 1}, "key": "k", "delay": 3600, "ttl": 7200, "partition_key": "p"},
]


def is_near(one: datetime | None, other: datetime | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < timedelta(seconds=40)


def test_a_length_of_time_written_as_in_sql_is_named(client: pgque.PgqueClient, queue: str) -> None:
    with pytest.raises(TypeError, match=r"seconds or a timedelta, not '10 s'"):
        client.send(queue, "x", delay="10 s")  # type: ignore[arg-type]


@each_driver
def test_options_arrive_as_they_are_sent_by_the_client(
    opened: Open, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    pairs = []
    options = [{**each, "key": each["key"] + consumer} if "key" in each else each for each in OPTIONS]
    for given in options:
        ours = opened.send(queue, "x", **given)
        opened.commit()  # a key is locked until then
        pairs.append((ours, client.send(queue, "x", **given)))
    tick()
    rows = {m.msg_id: m for m in client.messages.list(queue, limit=1000)}
    for given, (ours, theirs) in zip(options, pairs, strict=True):
        if "key" in given:
            assert ours == theirs, given  # replaced
            assert rows[ours].headers == given.get("headers")
            continue
        one, other = rows[ours], rows[theirs]
        assert (one.status, one.headers) == (other.status, other.headers), given
        assert is_near(one.available_at, other.available_at), given
        assert is_near(one.expires_at, other.expires_at), given


@each_driver
def test_options_of_a_batch_and_of_an_event_arrive(
    opened: Open, queue: str, consumer: str, read: Read
) -> None:
    ids = opened.send_batch(
        queue,
        ["plain", {"n": 1}, None, pgque.Event("t", "event", headers={"of": "event"}, partition_key="e")],
        headers=[None, {"n": 1}, None, None],
        keys=[None, None, consumer, None],
        ttls=[None, 60, timedelta(days=2), None],
        partition_keys=["p", None, None, None],
        type="t",
    )
    assert opened.send_batch(queue, [b"\x00", b"\xff", None], type="t") != []
    assert opened.send_batch(queue, [{"n": 1}, {"n": 2}], delays=[None, None], type="t") != []
    assert opened.send_batch(queue, [], type="t") == []
    event = opened.send(
        queue, pgque.Event("of event", "x", headers={"n": 1}, ttl=5), headers={"n": 2}, ttl=600
    )
    opened.commit()
    found = {m.msg_id: m for m in read()}
    batch = [found.pop(msg_id) for msg_id in ids] + list(found.values())  # a key is numbered last
    assert payloads(batch[:7]) == ["plain", '{"n": 1}', None, "event", b"\x00", b"\xff", None]
    assert [m.headers for m in batch[:4]] == [None, {"n": 1}, None, {"of": "event"}]
    assert [m.extra1 for m in batch[:4]] == ["p", None, None, "e"]
    assert [m.expires_at is not None for m in batch[:4]] == [False, True, True, False]
    [last] = [m for m in batch if m.msg_id == event]
    assert (last.type, last.headers) == ("of event", {"n": 2})
    assert last.expires_at is not None and last.created_at is not None
    assert last.expires_at - last.created_at > timedelta(seconds=500)


def without_counts(messages: list[pgque.Message]) -> list[pgque.Message]:
    return [replace(m, receive_count=None) for m in messages]


@each_driver
def test_a_batch_is_what_the_client_receives(
    opened: Open, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    client.send_batch(
        queue, "t", ["a", {"n": ODD}, None], headers=[{"deep": [1, {"x": 10**30}]}] * 3, ttls=[60] * 3
    )
    client.send(queue, b"\x00\\ \xff", key=consumer, partition_key="p")
    tick()
    ours = opened.receive(queue, consumer)
    opened.commit()
    theirs = client.receive(queue, consumer)
    assert without_counts(ours) == without_counts(theirs)
    assert [type(m.payload_bytes) for m in ours] == [type(m.payload_bytes) for m in theirs]
    assert ours[0].created_at is not None and ours[0].created_at.utcoffset() == timedelta(0)
    # Half of it is taken back, the rest is finished.
    assert opened.nack(ours[0].batch_id, ours[0], 0, "a reason\x00 \ud800") == 1
    [outcome] = opened.nack(ours[0].batch_id, ours[1:2], timedelta(days=1), "later")
    assert outcome == pgque.Outcome(ours[1].msg_id, True, None)
    assert opened.ack(ours[0].batch_id, [ours[2], 2**40]) == [
        pgque.Outcome(ours[2].msg_id, True, None),
        pgque.Outcome(2**40, False, "not in this batch"),
    ]
    assert opened.ack(ours[0].batch_id) == 1
    opened.commit()
    [again] = client.receive(queue, consumer)
    assert (again.msg_id, again.last_error) == (ours[0].msg_id, "a reason ?")


@each_driver
def test_workers_share_a_consumer(
    opened: Open, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    ids = client.send_batch(queue, ["a", "b", "c"], type="t")
    tick()
    [first] = opened.receive(queue, consumer, 1, worker="w", visibility_timeout=timedelta(hours=1))
    second = opened.receive(queue, consumer, worker="w", ack_batch=first.batch_id)
    opened.commit()
    assert [m.msg_id for m in [first, *second]] == ids
    assert client.receive(queue, consumer, worker="v") == []


SETTINGS = [
    "set search_path = ''",
    "set datestyle = 'German, DMY'",
    "set intervalstyle = 'sql_standard'",
    "set timezone = 'Asia/Kathmandu'",
    "set bytea_output = 'escape'",
]


@each_driver
def test_settings_of_the_session_do_not_matter(
    opened: Open, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    for setting in SETTINGS:
        opened.execute(setting)
    delayed = opened.send(queue, "later", deliver_at=DUE)
    opened.send(queue, b"\x00\\'\xff", ttl=timedelta(days=1, hours=2, microseconds=3), headers={"n": 1})
    opened.commit()
    tick()
    ours = opened.receive(queue, consumer)
    opened.commit()
    assert without_counts(ours) == without_counts(client.receive(queue, consumer))
    [message] = ours
    assert message.payload_bytes == b"\x00\\'\xff"
    assert message.expires_at is not None and message.created_at is not None
    assert is_near(message.expires_at, message.created_at + timedelta(days=1, hours=2))
    opened.nack(message.batch_id, message, timedelta(days=3, hours=1))
    opened.commit()
    due = {m.msg_id: m.available_at for m in client.messages.list(queue, limit=1000)}
    assert due[delayed] == DUE
    assert is_near(due[message.msg_id], datetime.now(timezone.utc) + timedelta(days=3, hours=1))
    opened.execute("reset all")
    opened.commit()


# -- errors --------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Any, str], object]] = {
    "no queue": lambda on, queue: on.send("no such queue", "x"),
    "no queue for a batch": lambda on, queue: on.send_batch("no such queue", ["x"]),
    "a ttl below 0": lambda on, queue: on.send(queue, "x", ttl=-1),
    "headers that are no object": lambda on, queue: on.send(queue, "x", headers=[1]),
    "not subscribed": lambda on, queue: on.receive(queue, "nobody"),
    "no messages wanted": lambda on, queue: on.receive(queue, "nobody", 0),
    "no batch": lambda on, queue: on.nack(2**40, 1),
    "half a character": lambda on, queue: on.send(queue, "a\ud800"),
    "not a number of JSON": lambda on, queue: on.send(queue, {"n": float("nan")}),
    "a batch that is one": lambda on, queue: on.send_batch(queue, "abc"),
    "two lengths": lambda on, queue: on.send_batch(queue, ["a"], ttls=[1, 2], type="t"),
}


@each_driver
def test_errors_are_those_of_the_client(opened: Open, client: pgque.PgqueClient, queue: str) -> None:
    for wrong, call in WRONG.items():
        with pytest.raises(Exception) as expected:
            call(client, queue)
        with pytest.raises(type(expected.value)) as caught:
            call(opened, queue)
        opened.rollback()
        assert str(caught.value).partition(": utf")[0] == str(expected.value).partition(": utf")[0], wrong
        for name in ("sqlstate", "hint", "queue"):
            assert getattr(caught.value, name, None) == getattr(expected.value, name, None), wrong
        assert (caught.value.__cause__ is None) == (expected.value.__cause__ is None), wrong


@each_driver
def test_what_no_text_of_a_database_has_is_one_error_of_all(
    opened: Open, client: pgque.PgqueClient, queue: str
) -> None:
    calls: list[Callable[[Any, str], object]] = [
        lambda on, bad: on.send(queue, bad),
        lambda on, bad: on.send(queue, {"a": [bad]}),
        lambda on, bad: on.send(queue, "x", key=bad),
        lambda on, bad: on.send(queue, "x", headers={"a": bad}),
        lambda on, bad: on.send_batch(queue, ["x", bad], type="t"),
    ]
    for bad in ("a\x00b", "a\ud800"):
        for call in calls:
            for on in (opened, client):
                with pytest.raises(pgque.PgqueBadArgumentError) as caught:
                    call(on, bad)
                assert type(caught.value) is pgque.PgquePayloadError
                assert caught.value.hint
            opened.rollback()


@pytest.mark.parametrize("name", ALL)
def test_a_connection_that_is_closed_or_that_the_server_ended_is_a_connection_error(
    name: str, dsn: str, client: pgque.PgqueClient, queue: str
) -> None:
    with KINDS[name](dsn) as opened:
        [[pid]] = opened.execute("select pg_backend_pid()")
        client.conn.execute("select pg_terminate_backend(%s, 10000)", [pid])
        with pytest.raises(pgque.PgqueConnectionError):
            opened.send(queue, "x")
    with KINDS[name](dsn) as opened:
        opened.execute("select 1")
        opened.close()
        with pytest.raises(pgque.PgqueConnectionError):
            opened.send(queue, "x")


@pytest.fixture(scope="module")
def nobody(dsn: str, server: Any) -> Iterator[str]:
    """Connection string of a role without any grant."""
    factory = Roles(server, dsn)
    yield factory().dsn
    factory.drop_all()


@pytest.fixture(scope="module")
def without_pgque(server: Any) -> Iterator[str]:
    """Connection string of an empty database."""
    name = create_database(server, "pgque_fresh")
    yield server.dsn_for(name)
    drop_database(server, name)


@pytest.mark.parametrize("name", DRIVERS)
def test_a_role_that_may_not_send_gets_the_role_to_ask_for_and_a_database_without_pgque_the_way_to_install_it(
    name: str, nobody: str, without_pgque: str, queue: str
) -> None:
    with KINDS[name](nobody) as opened, pytest.raises(pgque.PgquePermissionDeniedError, match="pgque_writer"):
        opened.send(queue, "x")
    with KINDS[name](without_pgque) as opened, pytest.raises(pgque.PgqueVersionError, match="pgque install"):
        opened.send("q", "x")


# -- only some kinds have it ---------------------------------------------------------------------------


def test_in_a_pipeline_of_psycopg(dsn: str, queue: str, read: Read) -> None:
    with psycopg.connect(dsn) as conn:
        with conn.pipeline():
            later = conn.execute("select 1")
            first = pgque.send(conn, queue, "a")
            assert later.fetchone() == (1,)
            conn.execute("select 2")
            with pytest.raises(pgque.PgqueQueueNotFoundError), conn.transaction():
                pgque.send(conn, "no such queue", "x")
            second = pgque.send(conn, queue, "b")
        conn.commit()
        with conn.pipeline():
            with pytest.raises(pgque.PgqueQueueNotFoundError):
                pgque.send(conn, "no such queue", "x")
            with pytest.raises(pgque.PgqueError, match="pipeline aborted") as caught:
                pgque.send(conn, queue, "x")
            assert type(caught.value) is pgque.PgqueError  # the connection is not lost
            conn.rollback()
    assert [m.msg_id for m in read()] == [first, second]


def _engines(dsn: str) -> list[Engine]:
    """Engines of SQLAlchemy, one for each driver that blocks."""
    connects: dict[str, Any] = {"psycopg": psycopg.connect, "psycopg2": psycopg2.connect}
    return [
        create_engine(f"postgresql+{driver}://", creator=partial(connect, dsn), poolclass=NullPool)
        for driver, connect in connects.items()
    ]


def test_in_autocommit_each_call_is_committed(dsn: str, queue: str, read: Read) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        ids = [pgque.send(conn, queue, "x")]
    for engine in _engines(dsn):
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as sqlalchemy:
            ids.append(pgque.send(sqlalchemy, queue, "x"))
    old = psycopg2.connect(dsn)
    old.autocommit = True
    ids.append(pgque.send(old, queue, "x"))
    old.close()

    async def run() -> None:
        asyncpg_ = await asyncpg_connect(dsn)
        ids.append(await pgque.send_async(asyncpg_, queue, "x"))
        at_once = await asyncio.gather(
            *[pgque.send_async(asyncpg_, queue, "x") for _ in range(2)], return_exceptions=True
        )
        assert [type(each) for each in at_once] == [int, pgque.PgqueError]  # it is busy, not lost
        ids.extend(each for each in at_once if isinstance(each, int))
        await asyncpg_.close()

    asyncio.run(run())
    assert [m.msg_id for m in read()] == ids


def test_connections_that_stream_their_results_send_at_once(
    dsn: str, client: pgque.PgqueClient, queue: str, consumer: str, tick: Tick
) -> None:
    for engine in _engines(dsn):
        with engine.connect().execution_options(stream_results=True, yield_per=2) as conn:
            rows = conn.execute(text("select generate_series(1, 9)"))
            next(rows)
            pgque.send(conn, queue, engine.driver)
            assert len(rows.all()) == 8
            conn.commit()

    async def run() -> None:
        engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg_connect(dsn))
        async with engine.connect() as conn:
            await conn.execution_options(stream_results=True, yield_per=2)
            rows = await conn.stream(text("select generate_series(1, 9)"))
            await rows.fetchone()
            await pgque.send_async(conn, queue, "asyncpg")
            assert len(await rows.all()) == 8
            await conn.commit()
            tick()
            batch = await pgque.receive_async(conn, queue, consumer)
            assert payloads(batch) == ["psycopg", "psycopg2", "asyncpg"]
            assert await pgque.ack_async(conn, batch[0].batch_id) == 1
            await conn.commit()
        await engine.dispose()

    asyncio.run(run())
    assert client.receive(queue, consumer) == []


class Refusing(psycopg.adapt.Dumper, psycopg.adapt.Loader):
    """What a program may register with its connection, for its own statements."""

    def __init__(self, *_: Any) -> None:
        raise AssertionError("it is not for this package")

    dump = load = __init__  # type: ignore[assignment]


def test_what_a_program_registers_for_its_own_types_is_not_used(
    dsn: str, queue: str, consumer: str, tick: Tick
) -> None:
    def refuse(value: object) -> str:
        raise AssertionError(f"it is not for this package: {value!r}")

    with psycopg.connect(dsn, row_factory=psycopg.rows.class_row(Order)) as new:
        for kind in (dict, datetime, timedelta, UUID, Decimal):
            new.adapters.register_dumper(kind, Refusing)
        for name in ("jsonb", "timestamptz", "interval", "numeric", "uuid"):
            new.adapters.register_loader(name, Refusing)
        set_json_dumps(refuse, new)
        set_json_loads(refuse, new)
        old = psycopg2.connect(dsn)
        psycopg2.extras.register_default_jsonb(old, loads=refuse)
        for conn in (new, old):
            pgque.send(conn, queue, ORDER, headers={"n": 1}, ttl=60)
            pgque.send_batch(conn, queue, [{"n": 1}], headers=[{"n": 2}], deliver_ats=[DUE])
            conn.commit()
            tick()
            [message] = pgque.receive(conn, queue, consumer)
            assert (message.into(Order), message.headers) == (ORDER, {"n": 1})
            assert message.expires_at is not None
            pgque.ack(conn, message.batch_id)
            conn.commit()
        old.close()


def test_a_connection_inside_of_a_proxy_as_tracers_make_them(dsn: str, queue: str, read: Read) -> None:
    with psycopg.connect(dsn) as new:
        ids = [pgque.send(ObjectProxy(new), queue, "x")]
    old = psycopg2.connect(dsn)
    ids.append(pgque.send(ObjectProxy(old), queue, "x"))
    old.commit()
    old.close()
    with Session(_engines(dsn)[0]) as session, session.begin():
        ids.append(pgque.send(ObjectProxy(session), queue, "x"))
    assert [m.msg_id for m in read()] == ids


def test_a_cursor_keeps_the_rows_it_was_reading(dsn: str, queue: str) -> None:
    with psycopg.connect(dsn) as conn, conn.execute("select generate_series(1, 3)") as cursor:
        assert cursor.fetchone() == (1,)
        pgque.send(cursor, queue, "x")
        assert cursor.fetchall() == [(2,), (3,)]


def test_in_a_session_of_sqlalchemy_that_asyncio_runs(dsn: str, queue: str, read: Read) -> None:
    async def run() -> None:
        engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg_connect(dsn))
        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(lambda session: pgque.send(session, queue, "x"))
        await engine.dispose()

    asyncio.run(run())
    assert payloads(read()) == ["x"]


def test_with_rows_of_the_session_that_are_flushed_at_its_commit(own_dsn: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(own_dsn))
    Base.metadata.create_all(engine)
    with pgque.connect(own_dsn) as client:
        client.admin.create_queue("orders")
        client.subscribe("orders", "c")
    with pytest.raises(Abandoned), Session(engine) as session, session.begin():
        session.add(Order(id=1))
        pgque.send(session, "orders", {"id": 1})
        raise Abandoned
    with Session(engine) as session:
        session.add(Order(id=2))
        pgque.send(session, "orders", {"id": 2})
        session.commit()
        assert session.scalars(select(Order.id)).all() == [2]
    engine.dispose()
    with pgque.connect(own_dsn, autocommit=True) as client:
        client.force_next_tick("orders")
        client.ticker("orders")
        assert [m.json() for m in client.receive("orders", "c")] == [{"id": 2}]


def test_a_session_with_several_databases_has_to_name_one() -> None:
    with pytest.raises(pgque.PgqueBadArgumentError, match=r"session\.connection"):
        pgque.send(Session(), "q", "x")


def test_a_call_that_the_driver_stops_waiting_for_raises_a_timeout(dsn: str, queue: str) -> None:
    async def send() -> None:
        conn = await asyncpg_connect(dsn, command_timeout=0.2)
        try:
            await pgque.send_async(conn, queue, "x")
        finally:
            await conn.close()

    with psycopg.connect(dsn) as blocker:
        blocker.execute("lock table pgque.queue in access exclusive mode")
        with pytest.raises(pgque.PgqueConnectionError, match="no answer within the time"):
            asyncio.run(send())
        blocker.rollback()


# -- what is no connection -----------------------------------------------------------------------------


def _refused() -> list[tuple[str, Callable[[], Any], bool, str]]:
    """What is passed, whether to an asynchronous call, and what the error says."""
    return [
        ("a client", lambda: pgque.PgqueClient.__new__(pgque.PgqueClient), False, "pass its conn, or call"),
        (
            "an async client",
            lambda: pgque.AsyncPgqueClient.__new__(pgque.AsyncPgqueClient),
            True,
            "pass its conn, or call its method of the same",
        ),
        (
            "an engine",
            lambda: create_engine("postgresql+psycopg://"),
            False,
            r"with engine.begin\(\) as conn",
        ),
        (
            "an async engine",
            lambda: create_async_engine("postgresql+asyncpg://"),
            True,
            "async with engine.begin",
        ),
        (
            "an async engine, blocking",
            lambda: create_async_engine("postgresql+asyncpg://"),
            False,
            "async with engine",
        ),
        ("a session maker", sessionmaker, False, "pass one of it"),
        ("an async session", AsyncSession, False, "ends in _async"),
        ("a session", Session, True, "has no _async"),
        ("a pool", lambda: ConnectionPool(open=False), True, "has no _async"),
        ("an async pool", lambda: AsyncConnectionPool(open=False), False, "ends in _async"),
        ("a number", lambda: 5, False, "int is no connection: pass a psycopg"),
        ("nothing", lambda: None, True, "NoneType is no connection: pass a psycopg AsyncConnection"),
        ("an asyncpg error", asyncpg.PostgresError, False, "is no connection: pass a psycopg"),
        ("a text of sqlalchemy", lambda: text("select 1"), False, "is no connection: pass a psycopg"),
        ("a connection string", lambda: "dbname=x password=secret", True, "pgque.connect_async"),
    ]


@pytest.mark.parametrize(
    ("make", "is_async", "told"), [pytest.param(*case[1:], id=case[0]) for case in _refused()]
)
def test_what_is_no_connection_is_refused(make: Callable[[], Any], is_async: bool, told: str) -> None:
    target = make()
    with pytest.raises(TypeError, match=told) as caught:
        if is_async:
            asyncio.run(pgque.send_async(target, "q", "x"))
        else:
            pgque.send(target, "q", "x")
    assert "secret" not in str(caught.value)


def test_a_connection_given_to_the_other_twin_is_refused(opened: Open) -> None:
    if opened.call is blocking:
        with pytest.raises(TypeError, match=r"has no _async|a text is no connection"):
            asyncio.run(pgque.receive_async(opened.target, "q", "c"))
    else:
        with pytest.raises(TypeError, match="ends in _async"):
            pgque.receive(opened.target, "q", "c")


def test_another_database_of_sqlalchemy_is_refused() -> None:
    with (
        create_engine("sqlite://").connect() as conn,
        pytest.raises(pgque.PgqueBadArgumentError, match=r"sqlite\+pysqlite"),
    ):
        pgque.send(conn, "q", "x")


def test_a_text_is_no_connection_without_django_and_nothing_is_imported() -> None:
    code = """
import sys, pgque
libraries = {"sqlalchemy", "asyncpg", "django", "psycopg2", "alembic", "starlette", "fastapi"}
assert not libraries & set(sys.modules), libraries & set(sys.modules)
try:
    pgque.send("default", "q", "x")
except TypeError as error:
    print(error)
assert not libraries & set(sys.modules), libraries & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("a text is no connection: open one with pgque.connect(dsn)")


@pytest.mark.parametrize("name", ["send", "send_batch", "receive", "ack", "nack"])
def test_the_twins_have_the_arguments_of_the_methods(name: str) -> None:
    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()][1:]

    blocking_, awaited = getattr(pgque, name), getattr(pgque, f"{name}_async")
    method = arguments(getattr(pgque.PgqueClient, name))
    if name == "send_batch":  # the method takes an earlier order of its arguments, too
        method[1] = ("payloads", inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        method.remove(("payloads", None, inspect.Parameter.KEYWORD_ONLY))
    of_client = {"send": ["encoder"], "send_batch": ["encoder"], "receive": ["decoder"]}.get(name, [])
    method += [(option, None, inspect.Parameter.KEYWORD_ONLY) for option in of_client]
    assert arguments(blocking_) == arguments(awaited) == method
    assert inspect.iscoroutinefunction(awaited) and not inspect.iscoroutinefunction(blocking_)


MISTAKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "digits as ids": (lambda: pgque.ack(None, 1, "12"), "'12'"),  # type: ignore[arg-type]
    "an id as text": (lambda: pgque.nack(None, 1, "12"), "'12'"),  # type: ignore[arg-type]
    "no message": (lambda: pgque.nack(None, 1, None), "nack needs a message"),  # type: ignore[call-overload]
    "a time as text": (lambda: pgque.send(None, "q", 1, deliver_at="2030-01-01"), "a datetime"),  # type: ignore[arg-type]
    "keys as text": (lambda: pgque.send_batch(None, "q", [1, 2], keys="ab"), "sequence with a value"),
    "headers of all": (
        lambda: pgque.send_batch(None, "q", [1], headers={"a": 1}),  # type: ignore[arg-type]
        "sequence with a value for each",
    ),
}


@pytest.mark.parametrize(("call", "told"), MISTAKEN.values(), ids=MISTAKEN)
def test_arguments_that_would_be_taken_for_others_are_refused(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        call()
