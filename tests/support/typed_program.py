"""What users write with types: `make check` shows it to mypy and pyright, both strict. Nobody runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from fastapi import FastAPI
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import pgque
import pgque.asgi


@dataclass
class Order:
    """A payload."""

    id: int


worker = pgque.Worker("", queue="orders", consumer="c", concurrency=2)
consumer = pgque.Consumer("", queue="orders", consumer="c", transactional=True)
async_worker = pgque.AsyncWorker("", queue="orders", consumer="c")
async_consumer = pgque.AsyncConsumer("", queue="orders", consumer="c", transactional=True)


# -- handlers, with what they may ask for and return


@worker.handler("a")
def with_message(message: pgque.Message) -> None:
    order: int = message.json()["order"]
    same: int = message.value["order"]
    print(order + same, (message.headers or {})["a"]["b"], (message.type or "").upper())


@worker.handler("b")
def with_typed_message(message: pgque.Message[Order]) -> pgque.Dead | None:
    if message.value.id < 0:
        return pgque.Dead("negative")
    print(message.into(Order).id)
    return None


@worker.handler("c", retry_on=(ConnectionError, OSError), dead_on=ValueError, backoff=(1, 2))
def with_payload(order: Order) -> pgque.Release:
    if order.id < 0:
        raise pgque.Retry(retry_after=1, reason="negative")
    return pgque.Release()


@consumer.handler("a")
def with_connection(message: pgque.Message[Order], conn: psycopg.Connection) -> None:
    conn.execute("insert into bill (id) values (%s)", [message.value.id])


@consumer.handler("b")
def with_connection_of_rows(order: Order, conn: psycopg.Connection[dict[str, Any]]) -> None:
    conn.execute("insert into bill (id) values (%s)", [order.id])


@async_worker.handler("a")
async def async_with_message(message: pgque.Message) -> None:
    print(message)


@async_consumer.handler("a")
async def async_with_connection(message: pgque.Message, conn: psycopg.AsyncConnection) -> None:
    await conn.execute("insert into bill (id) values (%s)", [message.msg_id])


@worker.every("* * * * *", type="nightly", payload={"all": True})
def nightly(message: pgque.Message) -> None:
    print(message.json()["all"])


# A decorated function has the type that it had.
released: pgque.Release = with_payload(Order(1))
with_connection(pgque.Message(1, 1, "a", None), psycopg.connect())


# -- hooks


@worker.before
def begin(message: pgque.Message) -> None:
    print(message)


@worker.after
def end(message: pgque.Message, returned: object) -> None:
    print(message, returned)


@worker.error
def report(message: pgque.Message, error: BaseException) -> None:
    print(message, error)


@async_worker.before
async def async_begin(message: pgque.Message) -> None:
    print(message)


# -- connections of the caller's own

make_session = sessionmaker(create_engine("postgresql+psycopg://"))
make_async_session = async_sessionmaker(create_async_engine("postgresql+asyncpg://"))
sessions = scoped_session(make_session)


def with_sqlalchemy(session: Session) -> None:
    msg_id: int = pgque.send(session, "orders", {"order": 1}, type="t", delay=1.0, headers={"x": 1})
    msg_ids: list[int] = pgque.send_batch(session.connection(), "orders", [Order(1), Order(2)])
    print(msg_id, msg_ids)
    with make_session.begin() as own:
        pgque.send(own, "orders", "text")
        pgque.send(sessions, "orders", b"bytes")


async def with_async_sqlalchemy(session: AsyncSession) -> None:
    msg_id: int = await pgque.send_async(session, "orders", Order(1))
    msg_ids: list[int] = await pgque.send_batch_async(await session.connection(), "orders", [b"1"])
    print(msg_id, msg_ids)
    async with make_async_session.begin() as own:
        await pgque.send_async(own, "orders", "text")


def with_psycopg(pool: ConnectionPool, rows: ConnectionPool[psycopg.Connection[dict[str, Any]]]) -> None:
    with pool.connection() as conn, conn.cursor() as cursor:
        pgque.send(conn, "orders", Order(1))
        pgque.send(cursor, "orders", Order(1))
        for message in pgque.receive(conn, "orders", "c"):
            count: int = pgque.nack(conn, message.batch_id, message)
            pgque.ack(conn, message.batch_id)
            print(count, message.payload)
    for each in (pool, rows):
        pgque.send(each, "orders", "text")
        with pgque.PgqueClient.from_pool(each) as client:
            client.send("orders", Order(1))
    with ConnectionPool() as own, pgque.PgqueClient.from_pool(own) as client:
        row = client.conn.execute("select 1").fetchone()
        number: int = row[0] if row is not None else 0
        print(number)


async def with_async_psycopg(pool: AsyncConnectionPool) -> None:
    async with pool.connection() as conn:
        await pgque.send_async(conn, "orders", Order(1))
        for message in await pgque.receive_async(conn, "orders", "c"):
            await pgque.nack_async(conn, message.batch_id, message, reason="not mine")
    await pgque.send_async(pool, "orders", "text")
    async with await pgque.connect_async() as client, pgque.AsyncPgqueClient.from_pool(pool) as other:
        await client.send("orders", Order(1), type="order.created")
        print([message.value["order"] for message in await other.receive("orders", "c")])


# -- without handlers


def take() -> None:
    with pgque.WorkQueue("", "orders", consumer="c") as queue:
        queue.send({"to": "ann"}, type="welcome", key="ann", delay=0.5)
        for message in queue.messages(timeout=5):
            if message.type != "welcome":
                message.nack(retry_after=60, reason="not mine")


async def async_take() -> None:
    async with pgque.AsyncWorkQueue("", "orders", consumer="c") as queue:
        async for message in queue.messages(timeout=5):
            await message.dead("not mine")


# -- inside an application

pool = AsyncConnectionPool(open=False)


@asynccontextmanager
async def around(app: FastAPI) -> AsyncGenerator[dict[str, object]]:
    async with pool:
        yield {"pool": pool}


with_own_lifespan = FastAPI(lifespan=pgque.asgi.lifespan(async_worker, async_consumer, around=around))
with_pool = FastAPI(lifespan=pgque.asgi.lifespan(async_worker, around=lambda app: pool))
with_function = FastAPI(
    lifespan=pgque.asgi.lifespan(lambda: pgque.AsyncWorker("", queue="orders", consumer="c"))
)


# -- tasks and batches


@worker.task("welcome", retry_on=ConnectionError, backoff=(1, 10), timeout=30)
def welcome(order: Order) -> None:
    print(order.id)


@worker.task("welcome with a message")
def welcome_message(message: pgque.Message[Order]) -> None:
    print(message.value.id)


@worker.task("welcome with any message")
def welcome_plain(message: pgque.Message) -> None:
    print(message.json()["id"])


@consumer.task("welcome")
def welcome_with_connection(order: Order, conn: psycopg.Connection) -> None:
    conn.execute("insert into bill (id) values (%s)", [order.id])


@async_worker.task("welcome")
async def async_welcome(order: Order) -> None:
    print(order.id)


@worker.batch_handler("click", size=500)
def store(messages: list[pgque.Message[Order]]) -> None:
    print([message.value.id for message in messages])


@consumer.batch_handler("click")
def store_with_connection(orders: list[Order], conn: psycopg.Connection) -> None:
    conn.cursor().executemany("insert into bill (id) values (%s)", [[order.id] for order in orders])


@async_consumer.batch_handler("click")
async def async_store(messages: list[pgque.Message], conn: psycopg.AsyncConnection) -> pgque.Outcomes:
    await conn.execute("select 1")
    return pgque.Outcomes({messages[0].msg_id: pgque.Retry()})


def send_tasks(session: Session) -> None:
    sent: int = welcome.send(session, Order(1), delay=60)
    welcome.send(session, {"id": 1})  # type: ignore[arg-type]  # it takes an Order
    welcome(Order(1))
    welcome_message.send(session, Order(1))
    welcome_plain.send(session, {"id": 1})
    ids: list[int] = welcome.send_many(session, [Order(1), Order(2)])
    welcome_with_connection(Order(1), psycopg.connect())
    print(sent, ids)


async def async_send_tasks(session: AsyncSession) -> None:
    sent: int = await async_welcome.send_async(session, Order(1))
    await async_welcome(Order(1))
    print(sent)
