"""Fan-out: two consumers get every order, and an audit that is added later records all of them once.

Run it: python tests/examples/fanout.py, or with a connection string of a database with pgque.

Prints:
    billing: 1, 2, 3
    shipping: 1, 2, 3
    the audit fails at order 2
    audit: 1 order.created, 2 order.created, 3 order.cancelled
"""

from __future__ import annotations

import psycopg
from _server import database

import pgque

QUEUE = "example_fanout"


def collect(dsn: str, name: str) -> None:
    """Consume three orders, and print them."""
    consumer = pgque.Consumer(dsn, queue=QUEUE, consumer=name)
    orders = []

    @consumer.handler("*")
    def note(message: pgque.Message) -> None:
        orders.append(str(message.json()["order"]))
        if len(orders) == 3:
            consumer.stop()

    consumer.run()
    print(f"{name}: {', '.join(orders)}")


def audit(dsn: str) -> None:
    """Record each message in the transaction of its acknowledgement: once, although a handler fails."""
    consumer = pgque.Consumer(dsn, queue=QUEUE, consumer="audit", transactional=True, retry_after=0)

    @consumer.handler("*")
    def record(message: pgque.Message, conn: psycopg.Connection) -> None:
        conn.execute("insert into example_audit values (%s, %s)", [message.json()["order"], message.type])
        if message.json()["order"] == 2 and message.retry_count == 0:
            print("the audit fails at order 2")
            raise ValueError("the row that was just written is rolled back")
        if conn.execute("select count(*) = 3 from example_audit").fetchone()[0]:
            consumer.stop()

    consumer.run()


def main(dsn: str) -> None:
    """Send three orders, and consume them three times."""
    with pgque.connect(dsn) as client:
        client.conn.execute("create table example_audit (number int, type text)")
        client.admin.create_queue(QUEUE)
        client.subscribe(QUEUE, "billing")
        client.subscribe(QUEUE, "shipping")
    with pgque.connect(dsn) as client:
        client.send(QUEUE, {"order": 1}, type="order.created")
        client.send(QUEUE, {"order": 2}, type="order.created")
        client.send(QUEUE, {"order": 3}, type="order.cancelled")
    collect(dsn, "billing")
    collect(dsn, "shipping")

    with pgque.connect(dsn) as client:
        client.subscribe(QUEUE, "audit", "earliest")  # what the others have done is still stored
    audit(dsn)
    with psycopg.connect(dsn) as conn:
        rows = conn.execute("select number, type from example_audit order by 1").fetchall()
    print("audit:", ", ".join(f"{number} {type_}" for number, type_ in rows))


if __name__ == "__main__":
    with database() as dsn:
        main(dsn)
