"""Add up orders for each customer with Spark, in a table; run the job again for new orders, nothing counts twice.

Run it where PySpark and Java 17 are: python tests/examples/spark/totals.py, or with a connection string of a
database with pgque.

Prints:
    run 1: ann 250, bob 30
    run 2: ann 300, bob 30, eve 1
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession

sys.path.append(str(Path(__file__).resolve().parent.parent))

from _server import database

import pgque
from pgque.spark import foreach_batch_once

QUEUE = "example_spark_orders"
ADD = """
insert into example_spark_total as t (customer, total) values (%s, %s)
on conflict (customer) do update set total = t.total + excluded.total
"""


def run_job(spark: SparkSession, dsn: str, checkpoint: str) -> None:
    """Read what is new in the queue, and add it to the table."""

    # The rows and the number of the micro-batch are one transaction, so a repetition writes nothing.
    @foreach_batch_once(dsn, "example_totals")
    def add(conn: psycopg.Connection, batch: DataFrame, epoch: int) -> None:
        for row in batch.groupBy("customer").sum("amount").collect():
            conn.execute(ADD, tuple(row))

    orders = (
        spark.readStream.format("pgque")
        .options(**{name: str(value) for name, value in conninfo_to_dict(dsn).items()})
        .option("queue", QUEUE)
        .option("consumer", "totals")
        .option("startingAt", "earliest")
        .option("payloadSchema", "customer string, amount bigint")
        .load()
    )
    writer = orders.writeStream.foreachBatch(add).trigger(availableNow=True)
    writer.option("checkpointLocation", checkpoint).start().awaitTermination()


def main(dsn: str) -> None:
    """Run the job twice; the second time it begins where the first one ended."""
    with pgque.connect(dsn) as client:
        client.conn.execute("create table example_spark_total (customer text primary key, total bigint)")
        client.create_queue(QUEUE)
        client.subscribe(QUEUE, "totals")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # for the Python workers of Spark
    spark = SparkSession.builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
    new = [[("ann", 50), ("bob", 30), ("ann", 200)], [("ann", 50), ("eve", 1)]]
    with tempfile.TemporaryDirectory() as checkpoint:
        for number, orders in enumerate(new, 1):
            with pgque.connect(dsn) as client:
                client.send_batch(QUEUE, [{"customer": who, "amount": amount} for who, amount in orders])
            with pgque.connect(dsn) as client:
                client.force_next_tick(QUEUE)
                client.ticker(QUEUE)
            run_job(spark, dsn, checkpoint)
            with psycopg.connect(dsn) as conn:
                totals = conn.execute("select customer, total from example_spark_total order by 1").fetchall()
            print(f"run {number}: {', '.join(f'{who} {total}' for who, total in totals)}")
    spark.stop()


if __name__ == "__main__":
    with database() as dsn:
        main(dsn)
