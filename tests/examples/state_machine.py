"""Move orders through their states with keyed order: several workers, and no state is skipped or repeated.

Run it: python tests/examples/state_machine.py, or with a connection string of a database with pgque.

Prints:
    steps: 60, failed once: 15
    orders: 20, all of them: new, paid, packed, shipped
"""

from __future__ import annotations

import threading

import psycopg
from _server import database

import pgque

QUEUE = "example_states"
STATES = ["new", "paid", "packed", "shipped"]
ORDERS = 20


def advance(conn: psycopg.Connection, order: int, state: str) -> None:
    """Move an order to the state after its own; again is allowed, since a message may be delivered twice."""
    (history,) = conn.execute(
        "select history from example_order where number = %s for update", [order]
    ).fetchone()
    if state not in history:
        if state != STATES[len(history)]:
            raise AssertionError(f"order {order} is {history[-1]} and cannot be {state}")
        conn.execute(
            "update example_order set history = history || %s::text where number = %s", [state, order]
        )


def main(dsn: str) -> None:
    """Send the steps of all orders, and let three workers with four threads each do them."""
    with pgque.connect(dsn) as client:
        client.conn.execute("create table example_order (number int primary key, history text[])")
        client.conn.execute(
            "insert into example_order select n, array['new'] from generate_series(1, %s) n", [ORDERS]
        )
        client.admin.create_queue(QUEUE)
        client.subscribe(QUEUE, "workers", keyed_order=True)
    with pgque.connect(dsn) as client:
        for state in STATES[1:]:
            steps = [{"order": number} for number in range(1, ORDERS + 1)]
            keys = [str(step["order"]) for step in steps]
            client.send_batch(QUEUE, steps, type=state, partition_keys=keys)

    failed, done = [], []
    workers = [pgque.Worker(dsn, queue=QUEUE, consumer="workers", concurrency=4) for _ in range(3)]

    def step(message: pgque.Message) -> None:
        order = message.json()["order"]
        # A message that is retried holds back the later ones of its key, and of no other.
        if order % 4 == 0 and message.receive_count == 1:
            failed.append(message.msg_id)
            raise pgque.Retry(retry_after=0.2)
        with psycopg.connect(dsn) as conn:
            advance(conn, order, message.type)
        done.append(message.msg_id)
        if len(done) == ORDERS * (len(STATES) - 1):
            for worker in workers:
                worker.stop()

    threads = []
    for worker in workers:
        worker.handler("*")(step)
        worker.error(lambda message, error: print("refused:", error))
        threads.append(threading.Thread(target=worker.run))
        threads[-1].start()
    for thread in threads:
        thread.join()
    print(f"steps: {len(done)}, failed once: {len(failed)}")
    with psycopg.connect(dsn) as conn:
        histories = conn.execute("select count(*), history from example_order group by history").fetchall()
    for number, history in histories:
        print(f"orders: {number}, all of them: {', '.join(history)}")


if __name__ == "__main__":
    with database() as dsn:
        main(dsn)
