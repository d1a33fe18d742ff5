"""Python values as payloads, typed messages and handlers, and payloads that do not fit."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import json
import logging
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType
from uuid import UUID

import msgspec
import psycopg
import pydantic
import pytest
from annotated_types import Len
from hypothesis import given
from hypothesis import strategies as st
from psycopg_pool import ConnectionPool
from typing_extensions import TypedDict

import pgque
from pgque import Message
from pgque.codec.convert import converter
from pgque.codec.json import as_json

if TYPE_CHECKING:
    from collections import OrderedDict as OnlyForTypeCheckers

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]

WHEN = datetime(2026, 1, 2, 3, 4, 5, 678000, timezone.utc)
ID = UUID("12345678-1234-5678-1234-567812345678")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Size(str, Enum):
    SMALL = "s"

    def __str__(self) -> str:
        return "not the value"


class Level(IntEnum):
    HIGH = 3


class Price(Enum):
    LOW = Decimal("1.50")


@dataclass
class Item:
    sku: str
    price: Decimal
    count: int = 1


@dataclass(frozen=True, slots=True)
class Order:
    id: UUID
    placed: datetime
    items: list[Item] = field(default_factory=list)
    color: Color | None = None
    due: timedelta | None = None
    file: Path | None = None
    tags: frozenset[str] = frozenset()
    sizes: Mapping[Size, int] = field(default_factory=dict)
    kind: Literal["new", 1] = "new"
    extra: Any = None


@dataclass
class Tree:
    name: str
    children: list[Tree] = field(default_factory=list)


@dataclass
class Positive:
    number: int

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError("it has to be positive")


class Welcome(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)

    to: str
    sent_at: datetime = pydantic.Field(default=WHEN, alias="sentAt")
    amount: Decimal = Decimal("1.5")


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    day: date


class Measured(pydantic.BaseModel):
    length: float


class Holder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    thing: Any
    inner: Any = None


@pydantic.dataclasses.dataclass
class Checked:
    number: Annotated[int, pydantic.Field(gt=0)]


class Numbers(pydantic.RootModel[list[int]]):
    pass


class Ping(msgspec.Struct, rename="camel"):
    host_name: str
    at: datetime
    path: Path | None = None
    every: timedelta = timedelta(0)


class Branch(msgspec.Struct):
    name: str
    children: list[Branch]


class Point(TypedDict):
    x: int
    y: int


Name = NewType("Name", str)


class Custom:
    """Something that only an encoder knows."""

    def __init__(self, text: str) -> None:
        self.text = text


def encode(value: object) -> object:
    if isinstance(value, Custom):
        return {"custom": value.text}
    raise TypeError(f"no {type(value).__name__} here")


@pytest.fixture
def subscribed(client: pgque.PgqueClient, queue: str) -> str:
    """The name of a queue with the consumer c."""
    client.subscribe(queue, "c")
    return queue


def _received(client: pgque.PgqueClient, queue: str, tick: Tick) -> list[Message]:
    tick(queue)
    batch = client.receive(queue, "c")
    client.ack(batch[0].batch_id)
    return batch


# -- what is stored, and comes back ----------------------------------------------------------------


ORDER = Order(
    ID,
    WHEN,
    [Item("a", Decimal("9.90")), Item("b", Decimal(1), 2)],
    Color.BLUE,
    timedelta(days=-1, seconds=1, microseconds=5),
    Path("/var/lib"),
    frozenset({"x"}),
    {Size.SMALL: 4},
    1,
    {"any": [1, None]},
)
ORDER_JSON: dict[str, object] = {
    "id": str(ID),
    "placed": "2026-01-02T03:04:05.678000+00:00",
    "items": [{"sku": "a", "price": "9.90", "count": 1}, {"sku": "b", "price": "1", "count": 2}],
    "color": "blue",
    "due": "-P0DT86398.999995S",
    "file": "/var/lib",
    "tags": ["x"],
    "sizes": {"s": 4},
    "kind": 1,
    "extra": {"any": [1, None]},
}

# A value, the JSON that is stored, and the type that it comes back as.
JSON_VALUES: list[tuple[object, object, object]] = [
    (ORDER, ORDER_JSON, Order),
    ([ORDER], [ORDER_JSON], list[Order]),
    (Tree("a", [Tree("b")]), {"name": "a", "children": [{"name": "b", "children": []}]}, Tree),
    (
        Welcome(to="ann"),
        {"to": "ann", "sentAt": "2026-01-02T03:04:05.678000Z", "amount": "1.5"},
        Welcome,
    ),
    ([Strict(day=date(2026, 1, 2))], [{"day": "2026-01-02"}], list[Strict]),
    (Checked(3), {"number": 3}, Checked),
    (Numbers([1, 2]), [1, 2], Numbers),
    (
        Ping("a", WHEN, Path("x"), timedelta(days=1, seconds=1)),
        {"hostName": "a", "at": "2026-01-02T03:04:05.678000Z", "path": "x", "every": "P1DT1S"},
        Ping,
    ),
    (WHEN, "2026-01-02T03:04:05.678000+00:00", datetime),
    (date(2026, 1, 2), "2026-01-02", date),
    (time(3, 4), "03:04:00", time),
    (timedelta(hours=1), "P0DT3600S", timedelta),
    (Decimal("1.50"), "1.50", Decimal),
    (ID, str(ID), UUID),
    (Color.RED, "red", Color),
    (Level.HIGH, 3, Level),
    (PurePosixPath("a/b"), "a/b", PurePosixPath),
    ({3}, [3], set[int]),
    (frozenset({"a"}), ["a"], frozenset[str]),
    ((1, "a"), [1, "a"], tuple[int, str]),
    ((1, 2), [1, 2], tuple[int, ...]),
    ({Color.RED: 1}, {"red": 1}, dict[Color, int]),
    ({Level.HIGH: 1}, {"3": 1}, dict[Level, int]),
    ({ID: [WHEN]}, {str(ID): ["2026-01-02T03:04:05.678000+00:00"]}, dict[UUID, list[datetime]]),
    ({date(2026, 1, 2): 1, 5: 2}, {"2026-01-02": 1, "5": 2}, dict[date | int, int]),
    ({"x": 1, "y": 2}, {"x": 1, "y": 2}, Point),
    (True, True, bool),
    (2.5, 2.5, float),
    ([1, "a", None, {"b": 1.5}], [1, "a", None, {"b": 1.5}], object),
]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_value_comes_back_as_its_type(
    client: pgque.PgqueClient, dsn: str, subscribed: str, tick: Tick, way: str
) -> None:
    values = [value for value, _, _ in JSON_VALUES]
    if way == "sync":
        for value in values:
            client.send(subscribed, value)
    else:

        async def send() -> None:
            async with await pgque.connect_async(dsn) as own:
                await own.send_batch(subscribed, "default", values)

        asyncio.run(send())
    for message, (value, stored, kind) in zip(_received(client, subscribed, tick), JSON_VALUES, strict=True):
        assert message.payload is not None
        assert json.loads(message.payload) == stored
        assert message.value == stored
        found = message.into(kind)
        assert found == value
        assert type(found) is type(value)


def test_text_and_bytes_stay_what_they_are(client: pgque.PgqueClient, subscribed: str, tick: Tick) -> None:
    sent: list[object] = ["{not json", Size.SMALL, b"\x00\xff", bytearray(b"[1]"), None, "[1]"]
    for value in sent:
        client.send(subscribed, value)
    text, enum, raw, json_bytes, null, json_text = _received(client, subscribed, tick)
    assert (text.payload, text.into(str)) == ("{not json", "{not json")
    assert (enum.payload, enum.into(Size)) == ("s", Size.SMALL)
    assert (raw.payload_bytes, raw.value, raw.into(bytes)) == (b"\x00\xff",) * 3
    assert json_bytes.into(list[int]) == json_text.into(list[int]) == json_text.value == [1]
    assert json_bytes.value == b"[1]"
    assert null.value is None
    assert null.into(Order | None) is None
    for message, kind in [(raw, str), (text, bytes), (null, str), (text, Order), (null, Order)]:
        with pytest.raises(pgque.PgquePayloadError):
            message.into(kind)
    with pytest.raises(pgque.PgquePayloadError, match=r"is not JSON, its text is in message\.payload"):
        _ = text.value


def test_every_way_of_sending_encodes(
    client: pgque.PgqueClient, dsn: str, subscribed: str, tick: Tick
) -> None:
    client.send(subscribed, pgque.Event("a", Item("a", Decimal(1)), headers={"at": WHEN}))
    client.send_batch(subscribed, "b", [Item("b", Decimal(1)), Color.RED], headers=[{"id": ID}, None])
    client.send_batch(subscribed, "b", [pgque.Event("b", Item("c", Decimal(1))), "text", Price.LOW])
    client.send_idem(subscribed, Item("d", Decimal(1)), "key")
    with pgque.WorkQueue(dsn, subscribed) as work:
        work.send(Item("e", Decimal(1)))
        work.send_batch([Item("f", Decimal(1))])
    batch = _received(client, subscribed, tick)
    assert [message.headers for message in batch[:2]] == [
        {"at": "2026-01-02T03:04:05.678000+00:00"},
        {"id": str(ID)},
    ]
    assert [m.into(Item).sku for m in batch if "sku" in str(m.payload)] == list("abcdef")
    assert [m.payload for m in batch if "sku" not in str(m.payload)] == ['"red"', "text", '"1.50"']


def test_one_value_is_not_taken_for_a_batch(client: pgque.PgqueClient, queue: str) -> None:
    for value in (Welcome(to="ann"), {"a": 1}, "text"):
        with pytest.raises(TypeError, match="not a single one"):
            client.send_batch(queue, "t", value)  # type: ignore[arg-type, unused-ignore]


# -- what cannot be sent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        [float("inf")],
        Decimal("nan"),
        {"a": Item("a", Decimal("-Infinity"))},
        {Color.RED: float("nan")},
        Measured(length=float("nan")),
        {"at": float("nan"), "key": {ID: 1}},
    ],
)
def test_no_number_is_refused(client: pgque.PgqueClient, queue: str, value: object) -> None:
    with pytest.raises(ValueError):
        client.send(queue, value)
    with pytest.raises(ValueError):
        client.send_batch(queue, "t", [1, value])


@contextmanager
def _socket() -> Iterator[socket.socket]:
    with socket.socket() as found:
        yield found


def test_the_error_names_the_path_of_a_value_that_cannot_be_encoded(
    client: pgque.PgqueClient, queue: str
) -> None:
    class Box(msgspec.Struct):
        content: Any

    with _socket() as it:
        told: list[tuple[object, str]] = [
            (it, "payload"),
            ({"items": [1, 2, 3, {"when": it}]}, "payload.items[3].when"),
            ({"a b": {7: it}}, "payload['a b'][7]"),
            (Tree("a", [it]), "payload.children[0]"),  # type: ignore[list-item]
            ({"x": Holder(thing={"y": (1, it)})}, "payload.x.thing.y[1]"),
            ([Box([Box(it)])], "payload[0].content[0].content"),
        ]
        for value, path in told:
            with pytest.raises(TypeError) as caught:
                client.send(queue, value)
            assert str(caught.value) == (
                f"{path}: cannot encode <class 'socket.socket'>: pass encoder=, a function that replaces"
                " such values"
            )
        with pytest.raises(TypeError, match=r"^headers\.a: cannot encode <class 'socket.socket'>"):
            client.send(queue, 1, headers={"a": it})
        with pytest.raises(TypeError, match=r"^setting\.retry_backoff\.a: cannot encode"):
            client.admin.create_queue("q", {"retry_backoff": {"a": it}})
    with pytest.raises(TypeError, match=r"^payload\.a: a key of a JSON object cannot be <class 'tuple'>"):
        client.send(queue, {"a": {(1, 2): 3}})
    with pytest.raises(TypeError, match="bytes"):
        client.send(queue, {"a": b"x"})
    with pytest.raises(TypeError, match=r"send message\.payload"):
        client.send(queue, Message(1, 2, "t", "x"))
    loop = Tree("a")
    loop.children.append(loop)
    for value in (loop, {ID: loop}):
        with pytest.raises(ValueError, match=r"Circular|contains itself"):
            client.send(queue, value)


# -- encoder and decoder ---------------------------------------------------------------------------


def test_an_encoder_replaces_what_is_unknown(dsn: str, conn: Connection, subscribed: str, tick: Tick) -> None:
    value = {"a": [Custom("x"), WHEN], ID: Holder(thing=Custom("y"), inner=Ping("z", WHEN))}
    with pgque.connect(dsn, encoder=encode) as own:
        own.send(subscribed, value)
        own.send(subscribed, Custom("top"), headers={"h": Custom("header")})
        own.send_batch(subscribed, "t", [Custom("batch")])
        own.send_idem(subscribed, Custom("idem"), "key")
        with pytest.raises(TypeError, match=r"^payload\[0\]\.thing: no object here$"):
            own.send(subscribed, [Holder(thing=object())])
    with pgque.PgqueClient.connect(dsn, encoder=lambda it: it.text) as own:
        own.send(subscribed, Custom("text"))
    with pgque.WorkQueue(dsn, subscribed, encoder=lambda it: it.text.encode()) as work:
        work.send(Custom("bytes"))
    with (
        ConnectionPool(dsn, min_size=1, max_size=1, open=True) as pool,
        pgque.PgqueClient.from_pool(pool, encoder=encode) as borrowed,
    ):
        borrowed.send(subscribed, Custom("pool"))

    async def send() -> None:
        async with await pgque.connect_async(dsn, encoder=encode) as own:
            await own.send(subscribed, Custom("async"))
        async with pgque.AsyncWorkQueue(dsn, subscribed, encoder=encode) as work:
            await work.send(Custom("async queue"))

    asyncio.run(send())
    batch = _received(pgque.PgqueClient(conn, encoder=encode), subscribed, tick)
    assert batch[0].value == {
        "a": [{"custom": "x"}, "2026-01-02T03:04:05.678000+00:00"],
        str(ID): {
            "thing": {"custom": "y"},
            "inner": {"hostName": "z", "at": "2026-01-02T03:04:05.678000Z", "path": None, "every": "P0D"},
        },
    }
    assert batch[1].headers == {"h": {"custom": "header"}}
    assert [m.payload or m.payload_bytes for m in batch[1:]] == [
        '{"custom": "top"}',
        '{"custom": "batch"}',
        '{"custom": "idem"}',
        "text",
        b"bytes",
        '{"custom": "pool"}',
        '{"custom": "async"}',
        '{"custom": "async queue"}',
    ]


def test_an_encoder_that_gives_the_value_back_ends(client: pgque.PgqueClient, queue: str, dsn: str) -> None:
    with pgque.connect(dsn, encoder=lambda value: value) as own:
        for value in (Custom("x"), [Custom("x")], {Custom("x"): 1}):
            with pytest.raises(ValueError):
                own.send(queue, value)


def decode(message: Message) -> object:
    """Read what a program in another language might write."""
    if message.payload == "again":
        raise pgque.Retry(retry_after=0)
    name, _, text = (message.payload or "").partition("=")
    return {name: int(text)}


def test_a_decoder_makes_the_value(
    client: pgque.PgqueClient, dsn: str, conn: Connection, subscribed: str, tick: Tick
) -> None:
    for payload in ("number=7", "number=x", "number=0", "again"):
        client.send(subscribed, payload)
    good, bad, unfit, again = _received(pgque.PgqueClient(conn, decoder=decode), subscribed, tick)
    assert good.value == {"number": 7}
    assert good.value is good.value
    assert good.into(Positive) == Positive(7)
    assert good.into(Checked) == Checked(7)
    assert good.into(dict[str, int]) == {"number": 7}
    with pytest.raises(
        pgque.PgquePayloadError, match=r"the decoder failed for message \d+: ValueError: inv"
    ) as e:
        _ = bad.value
    assert isinstance(e.value.__cause__, ValueError)
    assert e.value.queue == subscribed
    for kind in (Positive, Checked):
        with pytest.raises(pgque.PgquePayloadError, match=f"does not fit {kind.__name__}"):
            unfit.into(kind)
    with pytest.raises(pgque.Retry):
        _ = again.value
    with pgque.connect(dsn, decoder=decode) as own:
        assert own.peek(subscribed) == []
    client.send(subscribed, "number=8")
    tick(subscribed)
    with pgque.WorkQueue(dsn, subscribed, consumer="w", decoder=decode) as work:
        client.subscribe(subscribed, "w", "earliest")
        assert next(iter(work.messages(timeout=0))).value == {"number": 7}
    with pgque.connect(dsn, decoder=decode) as own:
        assert own.peek(subscribed, consumer="c")[0].value == {"number": 8}

    async def receive() -> object:
        async with await pgque.connect_async(dsn, decoder=decode) as own:
            return [message.value for message in await own.receive(subscribed, "c")]

    assert asyncio.run(receive()) == [{"number": 8}]


def test_a_decoder_may_return_what_the_model_asks_for() -> None:
    message = _message("x", lambda message: {"id": ID, "placed": WHEN, "items": [Item("a", Decimal(1))]})
    assert message.into(Order) == Order(ID, WHEN, [Item("a", Decimal(1))])
    order = Order(ID, WHEN)
    welcome, ping = Welcome(to="ann"), Ping("a", WHEN)
    assert _message("x", lambda message: order).into(Order) is order
    assert _message("x", lambda message: [welcome]).into(list[Welcome]) == [welcome]
    assert _message("x", lambda message: welcome).into(Welcome) is welcome
    assert _message("x", lambda message: ping).into(Ping) == ping


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_what_is_no_function_is_refused(dsn: str, conn: Connection, name: str) -> None:
    wrong: dict[str, Any] = {name: "json"}
    calls: list[Callable[[], object]] = [
        lambda: pgque.connect(dsn, **wrong),
        lambda: pgque.PgqueClient(conn, **wrong),
        lambda: pgque.WorkQueue(dsn, "q", **wrong),
        lambda: pgque.Worker(dsn, queue="q", consumer="c", **wrong),
        lambda: pgque.Consumer(dsn, queue="q", name="c", **wrong),
        lambda: pgque.AsyncWorker(dsn, queue="q", consumer="c", **wrong),
        lambda: pgque.AsyncConsumer(dsn, queue="q", name="c", **wrong),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"{name} has to be a function, not 'json'"):
            call()


def test_a_bad_setting_of_bad_payload_is_refused(dsn: str) -> None:
    wrong: Any = "ignore"
    with pytest.raises(ValueError, match="bad_payload must be 'dead' or 'retry'"):
        pgque.Worker(dsn, queue="q", consumer="c", bad_payload=wrong)
    with pytest.raises(ValueError, match="bad_payload must be 'dead' or 'retry'"):
        pgque.Consumer(dsn, queue="q", name="c", bad_payload=wrong)


# -- into ------------------------------------------------------------------------------------------


def _message(payload: str | None, decoder: Callable[[Message], object] | None = None) -> Message:
    from pgque.codec.payloads import message_maker

    make: Callable[..., Message] = Message
    return message_maker(make, decoder)(7, 1, "t", payload)


SECRET = "4711 1234"


@pytest.mark.parametrize(
    ("payload", "kind", "problem"),
    [
        ("{", Order, "payload: Invalid JSON: EOF while parsing an object"),
        ("[]", Order, "payload: Input should be an object"),
        (None, Order, "payload: Input should be an object"),
        ({"sku": SECRET, "price": SECRET}, Item, "payload.price: Input should be a valid decimal"),
        (
            {**ORDER_JSON, "items": [{}, {"sku": "a", "price": {}}], "due": SECRET},
            Order,
            "payload.items[0].sku: Field required; payload.items[0].price: Field required;"
            " payload.items[1].price: Decimal input should be an integer, float, string or Decimal object;"
            " and 1 more",
        ),
        ({"number": 0}, Positive, "payload: Value error, it has to be positive"),
        (0, Annotated[int, pydantic.Field(gt=0)], "payload: Input should be greater than 0"),
        ({"sentAt": SECRET}, Welcome, "payload.to: Field required; payload.sentAt: Input should be a valid datetime"),
        (SECRET, int | None, "payload: Input should be a valid integer"),
        ({"hostName": "a", "at": SECRET}, Ping, "payload.at: Invalid RFC3339 encoded datetime"),
        ({"hostName": "a", "at": WHEN.isoformat(), "path": 3}, Ping, "payload.path: Input is not a valid path"),
        ('{"hostName": "a"', Ping, "payload: Input data was truncated"),
        (None, Ping, "payload: Expected `object`, got `null`"),
        (None, str, "payload: expected str, got NoneType"),
        ("[]", bytes, "payload: expected bytes, got str"),
        ("[]", Size, "payload: is no Size"),
        ("four", Annotated[str, Len(0, 3)], "payload: String should have at most 3 characters"),
    ],
)  # fmt: skip
def test_the_error_of_a_payload_that_does_not_fit_leaves_the_payload_out(
    payload: object, kind: object, problem: str
) -> None:
    text = payload if isinstance(payload, str | None) and payload != SECRET else json.dumps(payload)
    with pytest.raises(pgque.PgquePayloadError) as caught:
        _message(text).into(kind)
    told = str(caught.value)
    assert told.startswith("message 7 does not fit ")
    assert problem in told
    assert SECRET not in told
    assert isinstance(caught.value, ValueError)


def test_into_follows_pydantic_but_does_not_parse_for_text() -> None:
    assert _message('{"number": "1", "more": 2}').into(Positive) == Positive(1)
    message = _message('"ann"')
    found = [message.into(kind) for kind in (str, Annotated[str, Len(0, 9)], Name, str | None)]
    assert found == ['"ann"', '"ann"', "ann", "ann"]


def test_a_type_that_no_payload_becomes_is_refused() -> None:
    @dataclass
    class Pinged:
        ping: Ping

    class Unknown(msgspec.Struct):
        thing: socket.socket

    for kind in (socket.socket, list[socket.socket], "Order", list[Ping], Pinged):
        with pytest.raises(TypeError, match=r"^no payload becomes .* Ask for a type that pydantic validates"):
            _message("{}").into(kind)
    with pytest.raises(NotImplementedError, match="no payload becomes"):  # not the fault of the payload
        _message('{"thing": 1}').into(Unknown)


def test_nesting_without_end_does_not_fit() -> None:
    depth = 100_000
    payload = '{"name": "a", "children": [' * depth + "]}" * depth
    with pytest.raises(pgque.PgquePayloadError, match="Invalid JSON: recursion limit exceeded"):
        _message(payload).into(Tree)
    with pytest.raises(pgque.PgquePayloadError, match="nested too deeply"):
        _message(payload).into(Branch)


def test_threads_that_ask_for_a_type_at_once_all_get_it() -> None:
    message, together = _message(as_json(ORDER)), threading.Barrier(8)
    converter.cache_clear()

    def read(_: int) -> object:
        together.wait()
        return message.into(Order)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [ORDER] * 8


_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)


@given(
    id=st.uuids(),
    placed=st.datetimes(timezones=st.just(timezone.utc) | st.none()),
    items=st.lists(
        st.builds(Item, st.text(), st.decimals(allow_nan=False, allow_infinity=False), st.integers())
    ),
    color=st.sampled_from(Color) | st.none(),
    due=st.timedeltas() | st.none(),
    tags=st.frozensets(st.text()),
    sizes=st.dictionaries(st.sampled_from(Size), st.integers()),
    kind=st.sampled_from(["new", 1]),
    extra=st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
)
def test_any_order_comes_back(**members: Any) -> None:
    order = Order(**members)
    assert converter(Order)(as_json(order), True) == order


# -- a message is still plain data -----------------------------------------------------------------


def test_a_message_is_copied_pickled_and_compared_by_its_columns() -> None:
    plain, decoded = _message("number=1"), _message("number=1", decode)
    assert plain == decoded
    assert hash(plain) == hash(decoded)
    assert repr(plain) == repr(decoded)
    assert dataclasses.asdict(plain) == dataclasses.asdict(decoded)
    assert [f.name for f in dataclasses.fields(Message)][:4] == ["msg_id", "batch_id", "type", "payload"]
    assert not hasattr(plain, "__dict__")
    for copied in (copy.copy(decoded), copy.deepcopy(decoded), pickle.loads(pickle.dumps(decoded))):  # noqa: S301
        assert copied == plain
        assert copied.value == {"number": 1}
    read = _message("number=2", lambda message: {"number": 2})
    assert read.value == {"number": 2}
    again = pickle.loads(pickle.dumps(read))  # noqa: S301  # its decoder could not be pickled
    assert again.value == {"number": 2}
    assert dataclasses.replace(plain, payload="3").value == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        read.payload = "y"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):  # TypeError: a defect of slots before Python 3.12
        read.value = 3  # type: ignore[misc]


# -- handlers --------------------------------------------------------------------------------------

KINDS = ["Worker", "AsyncWorker", "Consumer", "AsyncConsumer", "transactional", "async transactional"]
Runner = pgque.Worker | pgque.AsyncWorker | pgque.Consumer | pgque.AsyncConsumer


def _runner(kind: str, dsn: str, queue: str, **options: Any) -> Runner:
    """Return a worker or a consumer of one of KINDS."""
    if kind == "Worker":
        return pgque.Worker(dsn, queue=queue, consumer="c", **options)
    if kind == "AsyncWorker":
        return pgque.AsyncWorker(dsn, queue=queue, consumer="c", **options)
    options = {"transactional": "transactional" in kind, **options}
    if kind in ("AsyncConsumer", "async transactional"):
        return pgque.AsyncConsumer(dsn, queue=queue, name="c", poll_interval=0.05, **options)
    return pgque.Consumer(dsn, queue=queue, name="c", poll_interval=0.05, **options)


def _on(runner: Runner, type: str) -> Callable[[Any], Any]:
    return runner.handler(type) if isinstance(runner, pgque.Worker | pgque.AsyncWorker) else runner.on(type)


def _add(runner: Runner, handlers: Mapping[str, Callable[[Any], object]]) -> None:
    """Register handlers of one argument, as this runner calls them."""
    for type, handler in handlers.items():
        _on(runner, type)(_called(runner, handler))


def _called(runner: Runner, handler: Callable[[Any], object]) -> Callable[..., object]:
    asynchronous = isinstance(runner, pgque.AsyncWorker | pgque.AsyncConsumer)

    @functools.wraps(handler)
    def plain(*arguments: Any) -> object:
        return handler(arguments[0])

    @functools.wraps(handler)
    async def coroutine(*arguments: Any) -> object:
        return handler(arguments[0])

    return coroutine if asynchronous else plain


def _run(runner: Runner) -> None:
    """Run it until it is stopped."""
    if isinstance(runner, pgque.Worker):
        runner.run()
    elif isinstance(runner, pgque.Consumer):
        runner.start()
    else:
        asyncio.run(runner.run() if isinstance(runner, pgque.AsyncWorker) else runner.start())


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_gets_what_its_annotation_asks_for(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: str
) -> None:
    runner = _runner(kind, dsn, subscribed)
    seen: dict[str, object] = {}

    def welcome(message: Message[Welcome]) -> None:
        assert isinstance(message, Message)
        seen["welcome"] = message.value.to
        assert message.value is message.value
        assert message.json() == {"to": "ann"}

    def order(order: Order) -> None:
        seen["order"] = order

    def ping(ping: Annotated[Ping, "a ping"]) -> None:
        seen["ping"] = ping

    def numbers(message: pgque.Message[list[int]]) -> None:
        seen["numbers"] = sum(message.value)

    def text(text: str) -> None:
        seen["text"] = text

    def plain(message: Message) -> None:
        seen["plain"] = message.payload

    def bare(message):  # type: ignore[no-untyped-def]
        seen["bare"] = message.payload

    def end(message: Any) -> None:
        seen["end"] = type(message)
        runner.stop()

    handlers: list[Callable[[Any], object]] = [welcome, order, ping, numbers, text, plain, bare, end]
    _add(runner, {handler.__name__: handler for handler in handlers})
    client.send(subscribed, {"to": "ann"}, type="welcome")
    client.send(subscribed, ORDER, type="order")
    client.send(subscribed, Ping("a", WHEN), type="ping")
    client.send(subscribed, [1, 2], type="numbers")
    client.send(subscribed, "{", type="text")
    client.send(subscribed, "p", type="plain")
    client.send(subscribed, "b", type="bare")
    client.send(subscribed, 1, type="end")
    tick(subscribed)
    if isinstance(runner, pgque.Worker | pgque.AsyncWorker):
        runner.concurrency = 1
    _run(runner)
    assert seen == {
        "welcome": "ann",
        "order": ORDER,
        "ping": Ping("a", WHEN),
        "numbers": 3,
        "text": "{",
        "plain": "p",
        "bare": "b",
        "end": Message,
    }
    assert client.dlq.inspect(subscribed) == []
    assert not {status.status for status in client.messages.list(subscribed)} & {"retry", "dead"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", ["dead", "retry"])
def test_a_bad_payload_is_dead_with_the_reason_or_retried(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    tick: Tick,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    setting: str,
) -> None:
    options: dict[str, Any] = {} if setting == "dead" else {"bad_payload": "retry"}
    runner = _runner(kind, dsn, subscribed, retry_after=1000, **options)
    called = []

    def typed(message: Message[Item]) -> None:
        called.append(message)

    def asking(message: Message) -> None:
        message.into(Item)

    def own(message: Message) -> None:
        raise pgque.PgquePayloadError("no such customer")

    def failing(message: Message) -> None:
        raise ValueError("not of the payload")

    def end(message: Message) -> None:
        runner.stop()

    _add(runner, {"typed": typed, "asking": asking, "own": own, "failing": failing, "end": end})
    secret = {"sku": SECRET, "price": SECRET}
    for type in ("typed", "asking", "own", "failing"):
        client.send(subscribed, secret, type=type)
    client.send(subscribed, Item("good", Decimal(1)), type="typed")
    client.send(subscribed, 1, type="end")
    tick(subscribed)
    if isinstance(runner, pgque.Worker | pgque.AsyncWorker):
        runner.concurrency = 1
    with caplog.at_level(logging.WARNING):
        _run(runner)
    assert [message.value.sku for message in called] == ["good"]
    errors = {m.type: m.last_error for m in client.messages.list(subscribed) if m.status == "retry"}
    errors |= {letter.ev_type: letter.dl_reason for letter in client.dlq.inspect(subscribed)}
    assert {type: reason.partition("message")[0] for type, reason in errors.items() if reason} == {
        "typed": "PgquePayloadError: ",
        "asking": "PgquePayloadError: ",
        "own": "PgquePayloadError: no such customer",
        "failing": "ValueError: not of the payload",
    }
    assert str(errors["typed"]).endswith(" does not fit Item: payload.price: Input should be a valid decimal")
    dead = {letter.ev_type for letter in client.dlq.inspect(subscribed)}
    assert dead == ({"typed", "asking", "own"} if setting == "dead" else set())
    lines = [line for line in caplog.messages if line.startswith("handler failed")]
    assert len(lines) == 4
    assert sum("no retry for a bad payload, drop_policy dead_letter" in line for line in lines) == len(dead)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_of_a_worker_reads_for_its_handlers(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick, kind: str
) -> None:
    runner = _runner(kind, dsn, subscribed, decoder=decode, encoder=encode)
    seen: list[object] = []

    def typed(message: Message[Positive]) -> None:
        seen.append(message.value.number)

    def value(message: Message) -> None:
        seen.append(message.value)

    def again(message: Message) -> None:
        seen.append(message.receive_count)
        if message.receive_count == 1 and "Worker" in kind:
            _ = message.value

    def end(message: Message) -> None:
        runner.stop()

    _add(runner, {"typed": typed, "value": value, "again": again, "end": end})
    for type, payload in [("typed", "number=3"), ("value", "n=4"), ("typed", "x"), ("end", "")]:
        client.send(subscribed, payload, type=type)
    tick(subscribed)
    if isinstance(runner, pgque.Worker | pgque.AsyncWorker):
        runner.concurrency = 1
    _run(runner)
    assert seen == [3, {"n": 4}]
    [letter] = client.dlq.inspect(subscribed)
    assert "the decoder failed for message" in str(letter.dl_reason)


def test_a_decoder_may_have_a_message_retried(
    dsn: str, client: pgque.PgqueClient, subscribed: str, tick: Tick
) -> None:
    worker = pgque.Worker(dsn, queue=subscribed, consumer="c", decoder=decode)

    @worker.handler("*")
    def handle(message: Message[dict[str, int]]) -> None: ...

    @worker.handler("end")
    def end(message: Message) -> None:
        worker.stop()

    client.send(subscribed, "again")
    client.send(subscribed, "", type="end", delay=0)
    tick(subscribed)
    worker.run()
    [message] = [m for m in client.messages.list(subscribed) if m.payload == "again"]
    assert message.status in ("retry", "pending")
    assert client.dlq.inspect(subscribed) == []


class Mailer:
    """Has handlers of every form."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def method(self, order: Item) -> None:
        self.seen.append(order)

    def __call__(self, message: Message[Item]) -> None:
        self.seen.append(message.value)

    @classmethod
    def of_class(cls, order: Item) -> None:
        cls.last = order

    @staticmethod
    def static(order: Item) -> None:
        Mailer.last = order

    last: Item | None = None


def _logged(handler: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(handler)
    def inner(*args: object, **kwargs: object) -> object:
        return handler(*args, **kwargs)

    return inner


def _parsing(handler: Callable[..., object]) -> Callable[[Message], object]:
    @functools.wraps(handler)
    def inner(message):  # type: ignore[no-untyped-def]
        return handler(message.into(Item))

    return inner


def test_annotations_are_found_on_every_kind_of_callable(dsn: str) -> None:
    item = Item("a", Decimal(2))
    message = Message(1, 2, "t", as_json(item))
    seen: list[object] = []

    def two(note: str, order: Item) -> None:
        seen.append((note, order))

    def quoted(order: "Item") -> None:  # noqa: UP037
        seen.append(order)

    def positional(order: Item, /, conn: object = None) -> None:
        seen.append(order)

    def optional(order: Item | None) -> None:
        seen.append(order)

    def maybe(message: Message[Item] | None) -> None:
        assert message is not None
        seen.append(message.value)

    def documented(message: Annotated[Message[Annotated[Item, "an item"]], "a message"]) -> None:
        seen.append(message.value)

    def other_names_are_missing(order: Item, conn: OnlyForTypeCheckers[str, str] | None = None) -> None:
        seen.append(order)

    class Local(pydantic.BaseModel):
        sku: str

    def local(message: Message[Local]) -> None:
        seen.append(message.value.sku)

    mailer = Mailer()
    forms: list[tuple[Callable[..., object], Callable[[], object], object]] = [
        (functools.partial(two, "note"), seen.pop, ("note", item)),
        (quoted, seen.pop, item),
        (positional, seen.pop, item),
        (optional, seen.pop, item),
        (maybe, seen.pop, item),
        (documented, seen.pop, item),
        (other_names_are_missing, seen.pop, item),
        (local, seen.pop, "a"),
        (mailer.method, mailer.seen.pop, item),
        (mailer, mailer.seen.pop, item),
        (Mailer.of_class, lambda: Mailer.last, item),
        (Mailer.static, lambda: Mailer.last, item),
        (_logged(quoted), seen.pop, item),
        (_logged(mailer.method), mailer.seen.pop, item),
        (_parsing(quoted), seen.pop, item),
        (seen.append, seen.pop, message),
    ]
    for handler, result, expected in forms:
        worker = pgque.Worker(dsn, queue="q", consumer="c")
        assert worker.handler("t")(handler) is handler
        found: Any = worker._handlers.of(message)
        assert found is not None
        found.call(message)
        assert result() == expected, handler
        assert worker._handlers.by_type["t"] is handler

    def short(text: Annotated[str, Len(0, 3)]) -> None: ...

    worker = pgque.Worker(dsn, queue="q", consumer="c")
    worker.handler("t")(short)
    found = worker._handlers.of(message)
    assert found is not None
    with pytest.raises(pgque.PgquePayloadError, match="String should have at most 3 characters"):
        found.call(message)


def test_a_handler_may_take_any_message(dsn: str) -> None:
    if TYPE_CHECKING:
        from pgque import AsyncWorkMessage, WorkMessage

    def quoted(message: "Message") -> None: ...  # noqa: UP037
    def work(message: WorkMessage) -> None: ...
    def work_async(message: AsyncWorkMessage) -> None: ...
    def anything(message: Any) -> None: ...
    def thing(message: object) -> None: ...
    def either(message: Annotated[Message | None, "any"]) -> None: ...
    def any_value(message: Message[Any]) -> None: ...
    def nothing(*messages: object) -> None: ...

    handlers: list[Callable[[Any], object]]
    handlers = [quoted, work, work_async, anything, thing, either, any_value, nothing, print]
    for handler in handlers:
        consumer = pgque.Consumer(dsn, queue="q", name="c")
        consumer.on("t")(handler)
        found = consumer._handlers.of(Message(1, 2, "t", "x"))
        assert found is not None and found.call is handler


def test_an_annotation_that_is_no_model_is_refused_at_registration(dsn: str) -> None:
    class Bad:
        member: int

    @dataclass
    class Local:
        inner: Bad

    def no_model(thing: Bad) -> None: ...
    def in_message(message: Message[Bad]) -> None: ...
    def in_dataclass(message: Message[Local]) -> None: ...
    def connection(conn: Connection) -> None: ...

    refused: list[tuple[Callable[[Any], object], str]] = [
        (no_model, "Bad"),
        (in_message, "Bad"),
        (connection, "Connection"),
    ]
    for handler, what in refused:
        for decorate in (
            pgque.Worker(dsn, queue="q", consumer="c").handler("t"),
            pgque.Consumer(dsn, queue="q", name="c").on("t"),
        ):
            with pytest.raises(TypeError) as caught:
                decorate(handler)
            told = str(caught.value)
            assert told.startswith(f"handler {handler.__qualname__} asks for ")
            assert what in told
            assert told.endswith("A handler may ask for a Message, a Message[Model] or a Model.")
    worker = pgque.Worker(dsn, queue="q", consumer="c")
    with pytest.raises(TypeError, match=r"no payload becomes .*Local'>: name 'Bad' is not defined"):
        worker.handler("t")(in_dataclass)

    def unknown(message: Message[Missing]) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(
        TypeError, match=r"the annotation of handler .*unknown, 'Message\[Missing\]', cannot be read"
    ):
        worker.handler("t")(unknown)

    async_worker = pgque.AsyncWorker(dsn, queue="q", consumer="c")

    async def coroutine(thing: Bad) -> None: ...

    with pytest.raises(TypeError, match="asks for Bad"):
        async_worker.handler("t")(coroutine)


PROCESSES = """
import sys
from dataclasses import dataclass
import pgque

@dataclass
class Item:
    sku: str

def decode(message):
    return {"sku": message.payload}

worker = pgque.Worker(sys.argv[1], queue=sys.argv[2], consumer="c", use="processes", concurrency=1,
                      decoder=decode, bad_payload="retry", retry_after=1000)

@worker.handler("typed")
def typed(message: pgque.Message[Item]) -> None:
    with pgque.connect(sys.argv[1]) as client:
        client.send(sys.argv[3], message.value)

@worker.handler("bad")
def bad(numbers: list[int]) -> None: ...

if __name__ == "__main__":
    worker.run()
"""


def test_processes_have_typed_handlers_and_a_decoder(
    dsn: str,
    client: pgque.PgqueClient,
    subscribed: str,
    new_queue: Callable[[], str],
    tick: Tick,
    wait_until: Wait,
    tmp_path: Path,
) -> None:
    answers = new_queue()
    client.subscribe(answers, "c")
    program = tmp_path / "typed_worker.py"
    program.write_text(PROCESSES)
    client.send(subscribed, "x", type="bad")
    client.send(subscribed, "a", type="typed")
    tick(subscribed)
    running = subprocess.Popen([sys.executable, str(program), dsn, subscribed, answers])
    batch: list[Message] = []

    def is_answered() -> bool:
        tick(answers)
        batch.extend(client.receive(answers, "c"))
        return bool(batch)

    try:
        wait_until(is_answered, timeout=60)
        assert [message.value for message in batch] == [{"sku": "a"}]
        wait_until(lambda: [m.status for m in client.messages.list(subscribed)] == ["retry"], timeout=30)
    finally:
        running.terminate()
        running.wait(30)


def test_a_decoder_that_a_process_cannot_import_is_refused(dsn: str) -> None:
    worker = pgque.Worker(dsn, queue="q", consumer="c", use="processes", decoder=lambda message: 1)
    worker.handler("t")(print)
    with pytest.raises(TypeError, match="encoder and decoder in processes must be functions of a module"):
        worker.run()


# -- without the libraries -------------------------------------------------------------------------


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TYPED = """
import sys, pgque
from dataclasses import dataclass
from pgque.codec.json import as_json

@dataclass
class Item:
    sku: str

message = pgque.Message(1, 2, "t", as_json(Item("a")))
worker = pgque.Worker("", queue="q", consumer="c")

@worker.handler("text")
def text(text: str) -> None: ...

print(message.into(str), message.value, sorted({"pydantic", "msgspec"} & set(sys.modules)))

def handle(message: pgque.Message[Item]) -> None: ...

for ask in (lambda: message.into(Item), lambda: worker.handler("t")(handle)):
    try:
        print(ask())
    except ImportError as error:
        print(error)
"""


def test_only_other_types_than_text_need_pydantic() -> None:
    sent = """{"sku": "a"} {'sku': 'a'}"""
    plain, *typed = _python(TYPED).splitlines()
    assert plain == f"{sent} []"
    assert typed[0] == "Item(sku='a')"
    missing = "import sys; sys.modules.update(pydantic=None, msgspec=None)\n"
    plain, *refused = _python(missing + TYPED).splitlines()
    assert plain.startswith(sent)
    assert refused == ['Item needs pydantic 2.10 or newer: pip install "./python[typed]"'] * 2


def test_async_handlers_of_a_model_pass_type_checkers(dsn: str) -> None:
    worker = pgque.AsyncWorker(dsn, queue="q", consumer="c")

    @worker.handler("order")
    async def bill(order: Order) -> None:
        items: list[Item] = order.items
        assert items

    @worker.handler("welcome")
    async def welcome(message: Message[Welcome]) -> None:
        to: str = message.value.to
        assert to

    handlers: list[Callable[[Order], Awaitable[None]] | Callable[[Message[Welcome]], Awaitable[None]]]
    handlers = [bill, welcome]
    assert len(handlers) == len(worker._handlers.by_type)
    number: int = sum(Message(1, 2, "t", "[1, 2]").into(list[int]))
    assert number == 3
