"""A nightly pipeline: a recurring message starts it, a job for each shop adds up sales, the last one reports.

Run it: python tests/examples/nightly.py, or with a connection string of a database with pgque.

Prints:
    nightly: active, at 0 3 * * * Europe/Berlin
    3 jobs
    south fails: the till is offline
    report: east 30, north 12, south 7, total 49
"""

from __future__ import annotations

import psycopg
from _server import database

import pgque

SET_UP = """
create table example_sale (shop text, amount int);
insert into example_sale values ('north', 5), ('north', 7), ('east', 30), ('south', 7);
create table example_night (night text primary key, shops int);
create table example_total (night text, shop text, total int, primary key (night, shop));
"""


def make_worker(dsn: str) -> pgque.Worker:
    """Return the worker of the pipeline. In production any number of them may run."""
    worker = pgque.Worker(dsn, queue="example_nightly", consumer="workers", concurrency=1)

    @worker.every("0 3 * * *", type="nightly", name="example_nightly", timezone="Europe/Berlin")
    def start(message: pgque.Message) -> None:
        """Send a job for each shop; all of them or none, and once, though the message may be delivered twice."""
        night = message.headers["pgque-recurring"]["run_at"]
        with psycopg.connect(dsn) as conn:
            shops = [row[0] for row in conn.execute("select distinct shop from example_sale")]
            begun = conn.execute(
                "insert into example_night values (%s, %s) on conflict do nothing", [night, len(shops)]
            )
            if begun.rowcount:
                jobs = [{"night": night, "shop": shop} for shop in sorted(shops)]
                pgque.send_batch(conn, "example_nightly", jobs, type="add up")
                print(len(jobs), "jobs")

    @worker.handler("add up")
    def add_up(message: pgque.Message) -> None:
        """Write the total of a shop; whoever writes the last one sends the report's message with it."""
        job = message.json()
        if job["shop"] == "south" and message.receive_count == 1:
            print("south fails: the till is offline")
            raise pgque.Retry(retry_after=0, reason="the till is offline")
        with psycopg.connect(dsn) as conn:
            # One job of a night at a time, so that one of them sees that it is the last.
            conn.execute("select pg_advisory_xact_lock(hashtext(%(night)s))", job)
            added = conn.execute(
                "insert into example_total select %(night)s, %(shop)s, sum(amount) from example_sale"
                " where shop = %(shop)s on conflict do nothing",
                job,
            )
            query = (
                "select shops = (select count(*) from example_total where night = %(night)s)"
                " from example_night where night = %(night)s"
            )
            if added.rowcount and conn.execute(query, job).fetchone()[0]:
                pgque.send(conn, "example_nightly", job["night"], type="report")

    @worker.handler("report")
    def report(message: pgque.Message) -> None:
        """Print the totals of a night."""
        query = "select shop, total from example_total where night = %s order by shop"
        with psycopg.connect(dsn) as conn:
            totals = dict(conn.execute(query, [message.payload]).fetchall())
        lines = [f"{shop} {total}" for shop, total in totals.items()]
        print(f"report: {', '.join(lines)}, total {sum(totals.values())}")
        worker.stop()

    return worker


def main(dsn: str) -> None:
    """Set the pipeline up, and run it now instead of at three o'clock."""
    with pgque.connect(dsn) as client:
        client.conn.execute(SET_UP)
        client.admin.create_queue("example_nightly")
        client.subscribe("example_nightly", "workers")
    worker = make_worker(dsn)
    worker.run(until_idle=True)  # creates the recurring message
    with pgque.connect(dsn) as client:
        (nightly,) = (r for r in client.recurring.list() if r.name == "example_nightly")
        print(f"nightly: {nightly.status}, at {nightly.cron} {nightly.timezone}")
        client.recurring.run("example_nightly")
    worker.run()


if __name__ == "__main__":
    with database() as dsn:
        main(dsn)
