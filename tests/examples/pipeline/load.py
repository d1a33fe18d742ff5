"""Write the stanzas of a file into queue `packages` with Spark's JDBC.

python load.py FILE
"""

from __future__ import annotations

import sys
import time

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from pgque.spark import write_jdbc


def main(path: str) -> None:
    """Write each stanza as a message; each partition is one transaction."""
    # A partition is one transaction: Spark cuts the file into pieces of 8 MB.
    config = {"spark.sql.files.maxPartitionBytes": "8m"}
    spark = SparkSession.builder.appName("load").config(map=config).getOrCreate()
    stanzas = spark.read.text(path, lineSep="\n\n").withColumnRenamed("value", "payload")
    began = time.monotonic()
    write_jdbc(stanzas.withColumn("type", f.lit("stanza")), "packages")
    print(f"SENT {time.monotonic() - began:.3f}")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
