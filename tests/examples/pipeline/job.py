"""A Structured Streaming job over one queue: two queries, both exactly once, which may be killed at any time.

    python job.py /path/to/checkpoints

PGHOST, PGDATABASE, PGUSER and so on say where the queues are. Query `changes` sends a message on for each
good package; query `totals` adds them up in a table, and puts bad ones among its consumer's dead letters.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from pgque.spark import dead, foreach_batch_once
from pgque.spark.listener import PgqueListener

VERSION = r"^([0-9]+:)?[0-9][A-Za-z0-9.+~-]*$"
WEB_PAGE = r"^https?://[^/ ]+\.[^/ ]+"
REQUIRED = {"Package": "package", "Version": "version", "Section": "section", "Maintainer": "maintainer"}

ADD = """
    insert into pipeline.total as t (section, maintainer, packages, installed_kb)
    select * from unnest(%s::text[], %s::text[], %s::bigint[], %s::bigint[])
    on conflict (section, maintainer) do update
    set packages = t.packages + excluded.packages, installed_kb = t.installed_kb + excluded.installed_kb
"""


def field(name: str) -> Column:
    """Return a field of the stanza in column payload, '' where it has none."""
    # Java finds a pattern that begins with text in half the time of one that begins with ^.
    lines = f.concat(f.lit("\n"), "payload")
    return f.trim(f.regexp_extract(lines, rf"(?d)\n{name}:(.*)", 1))


def parse(stanzas: DataFrame) -> DataFrame:
    """Turn stanzas into columns; column reason says what is wrong with one, '' if nothing is."""
    rows = stanzas.select(
        "msg_id",
        *[field(name).alias(column) for name, column in REQUIRED.items()],
        field("Architecture").alias("architecture"),
        field("Homepage").alias("homepage"),
        field("Depends").alias("depends"),
        field("Installed-Size").try_cast("bigint").alias("kb"),
    )
    problems = [f.when(f.col(c) == "", f"{name} is missing") for name, c in REQUIRED.items()] + [
        f.when((f.col("version") != "") & ~f.col("version").rlike(VERSION), "Version cannot be parsed"),
        f.when(f.coalesce("kb", f.lit(0)) <= 0, "Installed-Size is not a positive number"),
        f.when((f.col("homepage") != "") & ~f.col("homepage").rlike(WEB_PAGE), "Homepage is not a web page"),
    ]
    return rows.withColumns(
        {
            "reason": f.concat_ws("; ", *problems),
            "section": f.regexp_replace("section", "^.*/", ""),
            "size_class": f.when(f.col("kb") < 1024, "small")
            .when(f.col("kb") < 102_400, "medium")
            .otherwise("large"),
            "dependencies": f.when(f.col("depends") == "", 0).otherwise(f.size(f.split("depends", ","))),
        }
    )


@foreach_batch_once("", "totals", table="pipeline.epoch")  # "": PGHOST and so on
def add_up(conn: Any, batch: DataFrame, epoch: int) -> None:
    """Put the bad rows of a micro-batch among the dead letters, and add the good ones up, once."""
    # Both uses share one look at the payloads, and of that they need little.
    rows = parse(batch).select("msg_id", "reason", "section", "maintainer", "kb").persist()
    for outcome in dead(rows.where("reason != ''"), "packages", "totals"):
        if not outcome.ok and outcome.reason != "dead already":
            raise RuntimeError(f"message {outcome.msg_id}: {outcome.reason}")
    groups = (
        rows.where("reason = ''").groupBy("section", "maintainer").agg(f.count("*"), f.sum("kb")).collect()
    )
    rows.unpersist()
    if groups:
        conn.execute(ADD, [list(column) for column in zip(*groups, strict=True)])


def main(checkpoints: str) -> None:
    """Run both queries until one fails."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("pgque").setLevel(logging.INFO)  # not that of the root, or py4j logs each of its calls
    spark = SparkSession.builder.appName("packages").getOrCreate()
    spark.streams.addListener(PgqueListener())

    def packages(consumer: str) -> DataFrame:
        source = spark.readStream.format("pgque").option("queue", "packages").option("consumer", consumer)
        return source.option("startingAt", "earliest").option("numPartitions", 2).load()

    good = parse(packages("changes")).where("reason = ''")
    message = ["package", "version", "architecture", "section", "maintainer", "size_class", "dependencies"]
    changes = good.select(f.to_json(f.struct(*message)).alias("payload"), f.col("size_class").alias("type"))
    to_queue = changes.writeStream.format("pgque").option("queue", "changes")
    to_queue.queryName("changes").option("checkpointLocation", f"{checkpoints}/changes").start()

    to_table = packages("totals").writeStream.foreachBatch(add_up)
    to_table.queryName("totals").option("checkpointLocation", f"{checkpoints}/totals").start()

    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
