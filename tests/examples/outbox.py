"""An outbox service: orders and their messages are there together, or neither; a consumer ships, a worker mails.

Run it: python tests/examples/outbox.py, or with a connection string of a database with pgque.

Prints:
    failed: the card was declined
    shipped order 2
    order 2 is shipped: True
    try 1 for order 2: the mail server is busy
    mail for order 2
"""

from __future__ import annotations

import psycopg
from _server import database

import pgque

QUEUE = "example_orders"


def place_order(conn: psycopg.Connection, number: int, card: str) -> None:
    """Write an order and tell the others about it."""
    with conn.transaction():
        conn.execute("insert into example_order values (%s, false)", [number])
        pgque.send(conn, QUEUE, {"order": number}, type="order.placed")
        if card == "declined":
            raise ValueError("the card was declined")


def ship_orders(dsn: str) -> None:
    """Do the work and acknowledge in one transaction too, so that its effect is exactly once."""
    consumer = pgque.Consumer(dsn, queue=QUEUE, consumer="shipping", transactional=True)

    @consumer.handler("order.placed")
    def ship(message: pgque.Message, conn: psycopg.Connection) -> None:
        number = message.json()["order"]
        conn.execute("update example_order set shipped = true where number = %s", [number])
        print(f"shipped order {number}")
        consumer.stop()

    consumer.run()


def send_mails(dsn: str) -> None:
    """Send a mail for each order. Any number of such workers share the mails; one may be sent twice."""
    worker = pgque.Worker(dsn, queue=QUEUE, consumer="mails")

    @worker.handler("order.placed")
    def mail(message: pgque.Message) -> None:
        number = message.json()["order"]
        if message.receive_count == 1:
            print(f"try 1 for order {number}: the mail server is busy")
            raise pgque.Retry(retry_after=0, reason="the mail server is busy")
        print(f"mail for order {number}")
        worker.stop()

    worker.run()


def main(dsn: str) -> None:
    """Place two orders, of which one fails; ship what was placed, and send a mail for it."""
    with psycopg.connect(dsn) as conn:
        conn.execute("create table if not exists example_order (number int primary key, shipped bool)")
        client = pgque.PgqueClient(conn)
        client.admin.create_queue(QUEUE)
        client.subscribe(QUEUE, "shipping")
        client.subscribe(QUEUE, "mails")

    with psycopg.connect(dsn) as conn:
        try:
            place_order(conn, 1, card="declined")
        except ValueError as error:
            print(f"failed: {error}")
        place_order(conn, 2, card="good")

    ship_orders(dsn)
    with psycopg.connect(dsn) as conn:
        for number, shipped in conn.execute("select number, shipped from example_order"):
            print(f"order {number} is shipped: {shipped}")
    send_mails(dsn)


if __name__ == "__main__":
    with database() as dsn:
        main(dsn)
