"""What the compared programs do for their shop: the same for all of them, and not counted."""

from collections.abc import Iterable
from typing import Any

import psycopg

SET_UP = """
create table orders (id int primary key deferrable initially deferred, confirmed bool not null default false);
create table offline (id int, times int);
create table attempts (id int);
create table charges (id int, amount int);
create table reports (written timestamptz);
create table clicks (id int, page text, stored_in xid8 default pg_current_xact_id());
"""


async def charge(id: int, amount: int) -> None:
    """Charge a customer. ConnectionError as often as the table `offline` says; ValueError if below zero."""
    await _run("insert into attempts (id) values (%s) returning id", [id])
    if amount < 0:
        raise ValueError("a negative amount")
    offline = "update offline set times = times - 1 where id = %s and times > 0 returning id"
    if await _run(offline, [id]):
        raise ConnectionError("the bank does not answer")
    await _run("insert into charges (id, amount) values (%s, %s) returning id", [id, amount])


async def report() -> None:
    """Write the report of this moment."""
    await _run("insert into reports (written) values (now()) returning written", [])


async def confirm(order: int) -> None:
    """Confirm an order."""
    await _run("update orders set confirmed = true where id = %s returning id", [order])


async def store(clicks: Iterable[dict[str, Any]], conn: psycopg.AsyncConnection[Any] | None = None) -> None:
    """Store clicks in one transaction: the caller's, or one of its own."""
    if conn is None:
        async with await psycopg.AsyncConnection.connect() as conn:
            return await store(clicks, conn)
    statement = "insert into clicks (id, page) values (%(id)s, %(page)s)"
    await conn.cursor().executemany(statement, list(clicks))
    return None


async def _run(statement: str, parameters: list[Any]) -> list[Any]:
    async with await psycopg.AsyncConnection.connect() as conn:
        return await (await conn.execute(statement.encode(), parameters)).fetchall()
