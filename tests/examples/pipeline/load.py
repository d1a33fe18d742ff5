"""Write the stanzas of a file into queue `packages` with Spark's JDBC.

python load.py FILE PARTITIONS
"""

from __future__ import annotations

import sys
import time

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from pgque.spark import write_jdbc


def main(path: str, partitions: str) -> None:
    """Write each stanza as a message; each partition is one transaction."""
    spark = SparkSession.builder.appName("load").getOrCreate()
    stanzas = spark.read.text(path, lineSep="\n\n").select(
        f.col("value").alias("payload"), f.lit("stanza").alias("type")
    )
    stanzas = stanzas.repartition(int(partitions)).persist()
    count = stanzas.count()
    began = time.monotonic()
    write_jdbc(stanzas, "packages")
    print(f"SENT {count} {time.monotonic() - began:.3f}")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
