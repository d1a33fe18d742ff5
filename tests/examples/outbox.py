"""Send a message in the transaction that writes the data: there are both, or neither.

Run it: python tests/examples/outbox.py, or with a connection string of a database with pgque.

Prints:
    failed: the card was declined
    shipped order 2
    order 2 is shipped: True
"""

from __future__ import annotations

import psycopg
from _server import database

import pgque


def place_order(conn: psycopg.Connection, number: int, card: str) -> None:
    """Write an order and tell the others about it."""
    with conn.transaction():
        conn.execute("insert into example_order values (%s, false)", [number])
        pgque.send(conn, "example_orders", {"order": number}, type="order.placed")
        if card == "declined":
            raise ValueError("the card was declined")


def main(dsn: str) -> None:
    """Place two orders, of which one fails, and ship what was placed."""
    with psycopg.connect(dsn) as conn:
        conn.execute("create table if not exists example_order (number int primary key, shipped bool)")
        client = pgque.PgqueClient(conn)
        client.create_queue("example_orders")
        client.subscribe("example_orders", "shipping")

    with psycopg.connect(dsn) as conn:
        try:
            place_order(conn, 1, card="declined")
        except ValueError as error:
            print(f"failed: {error}")
        place_order(conn, 2, card="good")

    # The consumer does its work and acknowledges in one transaction too, so its effect is exactly once.
    consumer = pgque.Consumer(dsn, queue="example_orders", consumer="shipping", transactional=True)

    @consumer.handler("order.placed")
    def ship(message: pgque.Message, conn: psycopg.Connection) -> None:
        number = message.json()["order"]
        conn.execute("update example_order set shipped = true where number = %s", [number])
        print(f"shipped order {number}")
        consumer.stop()

    consumer.run()

    with psycopg.connect(dsn) as conn:
        for number, shipped in conn.execute("select number, shipped from example_order"):
            print(f"order {number} is shipped: {shipped}")


if __name__ == "__main__":
    with database() as dsn:
        main(dsn)
