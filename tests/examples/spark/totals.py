"""Add up orders for each customer with Spark, in a table; run the job again for new orders, nothing counts twice.

Run it where PySpark and Java 17 are: python tests/examples/spark/totals.py, or with a connection string of a
database with pgque.

Prints:
    run 1: ann 250, bob 30
    run 2: ann 300, bob 30, eve 1
    run 3: ann 307, bob 30, eve 1
    dead letters: {"customer": "ann"}, no JSON
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit

sys.path.append(str(Path(__file__).resolve().parent.parent))

from _server import database

import pgque
from pgque.spark import dead, foreach_batch_once

QUEUE = "example_spark_orders"
ADD = """
insert into example_spark_total as t (customer, total) values (%s, %s)
on conflict (customer) do update set total = t.total + excluded.total
"""


def run_job(spark: SparkSession, dsn: str, checkpoint: str) -> None:
    """Read what is new in the queue, and add it to the table."""

    database = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}

    # The rows and the number of the micro-batch are one transaction, so a repetition writes nothing.
    @foreach_batch_once(dsn, "example_totals")
    def add(conn: psycopg.Connection, batch: DataFrame, epoch: int) -> None:
        incomplete = batch.where("customer is null or amount is null")
        dead(incomplete, QUEUE, "totals", lit("no customer or no amount"), **database)
        for row in batch.dropna(subset=["customer", "amount"]).groupBy("customer").sum("amount").collect():
            conn.execute(ADD, tuple(row))

    orders = (
        spark.readStream.format("pgque")
        .options(**database)
        .option("queue", QUEUE)
        .option("consumer", "totals")
        .option("startingAt", "earliest")
        .option("payloadSchema", "customer string, amount bigint")
        .option("badRecords", "dead")  # or one payload that is no JSON would stop the job for ever
        .load()
    )
    writer = orders.writeStream.foreachBatch(add).trigger(availableNow=True)
    writer.option("checkpointLocation", checkpoint).start().awaitTermination()


def order(customer: str, amount: int) -> dict[str, object]:
    """Return the payload of an order."""
    return {"customer": customer, "amount": amount}


def main(dsn: str) -> None:
    """Run the job twice; the second time it begins where the first one ended."""
    with pgque.connect(dsn) as client:
        client.conn.execute(
            "create table example_spark_total (customer text primary key, total bigint not null)"
        )
        client.admin.create_queue(QUEUE)
        client.subscribe(QUEUE, "totals")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # for the Python workers of Spark
    spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
    new = [
        [order("ann", 50), order("bob", 30), order("ann", 200)],
        [order("ann", 50), order("eve", 1), {"customer": "ann"}, "no JSON"],
        [order("ann", 7)],
    ]
    with tempfile.TemporaryDirectory() as checkpoint:
        for number, orders in enumerate(new, 1):
            with pgque.connect(dsn) as client:
                client.send_batch(QUEUE, orders)
            with pgque.connect(dsn) as client:
                client.force_next_tick(QUEUE)
                client.ticker(QUEUE)
            run_job(spark, dsn, checkpoint)
            with psycopg.connect(dsn) as conn:
                totals = conn.execute("select customer, total from example_spark_total order by 1").fetchall()
            print(f"run {number}: {', '.join(f'{who} {total}' for who, total in totals)}")
    with pgque.connect(dsn) as client:
        letters = sorted(str(letter.ev_data) for letter in client.dlq.inspect(QUEUE))
    print("dead letters:", ", ".join(reversed(letters)))
    spark.stop()


if __name__ == "__main__":
    with database() as dsn:
        main(dsn)
