"""Read, transform and write queues with PySpark.

    spark.readStream.format("pgque").option("queue", "orders").option("consumer", "spark").load()

PySpark finds the format if `pgque[spark]` is installed. The functions here do the rest: `write_jdbc` and
`foreach_batch` need Spark's JDBC and PostgreSQL's driver, and also work with Spark 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import PgqueBadArgumentError, PgqueError
from ._once import foreach_batch_once, stream_id

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from ..types import Outcome

__all__ = ["dead", "foreach_batch", "foreach_batch_once", "queues", "register", "write_jdbc"]

_CHUNK = 1000
_QUEUES = (
    "queue string, read boolean, write boolean, admin boolean, paused boolean, tick_id bigint,"
    " pending bigint, lag double,"
    " consumers array<struct<consumer: string, tick_id: bigint, pending: bigint, lag: double>>"
)


def register(spark: SparkSession) -> None:
    """Register `format("pgque")` in a session that does not find it."""
    from pyspark.errors import AnalysisException

    from .datasource import PgqueDataSource

    try:
        spark.dataSource.register(PgqueDataSource)
    except AnalysisException as error:
        # PySpark 4.0 refuses a format that it has already found.
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def write_jdbc(
    df: DataFrame,
    queue: str | None = None,
    *,
    batch_size: int = 1000,
    num_partitions: int | None = None,
    replace_by_key: bool = False,
    **connection: str,
) -> None:
    """Send the rows of a frame through Spark's JDBC, at least once: each partition is one transaction.

    Columns are those of the sink: payload, and type, headers, key, partition_key, delay, deliver_at, ttl,
    queue. Frames of payload, type, headers and queue go into `pgque.sink_bulk`, others into `pgque.sink`.
    With `replace_by_key`, the column key is the key of send(), otherwise the partition key.
    `num_partitions` bounds the connections; `connection` is url, host, port, dbname, user, password and so
    on, as for `format("pgque")`. The password travels as a property, never in the url.

    Raises PgqueBadArgumentError before anything is sent when a column does not fit.
    """
    rows, table = _rows(df, queue, replace_by_key)
    _jdbc(rows, table, queue, batch_size, num_partitions, connection)


def foreach_batch(
    queue: str | None = None,
    *,
    sink_id: str | None = None,
    batch_size: int = 1000,
    num_partitions: int | None = None,
    replace_by_key: bool = False,
    **connection: str,
) -> Callable[[DataFrame, int], None]:
    """Return a function for `writeStream.foreachBatch` that sends micro-batches through JDBC.

    Each partition of a micro-batch is sent once, also when Spark replays it: `pgque.sink` remembers
    (sink_id, epoch, partition). A replay must have the partitions of the first run: another number of them
    is refused, but the same number cut elsewhere is not noticed. `num_partitions=1` is safe on any cluster.
    `sink_id` is by default the query's id and the queue; two sends of one micro-batch to one queue need one
    each.
    """
    given = dict(connection)

    def send(df: DataFrame, epoch: int) -> None:
        from pyspark.sql import functions as f

        if not hasattr(df.sparkSession, "sparkContext"):
            raise PgqueBadArgumentError(
                "foreach_batch cannot count partitions in Spark Connect: use writeStream.format('pgque')",
                sqlstate="PQ005",
            )
        query = stream_id(df)
        if not (sink_id or query):
            raise PgqueBadArgumentError("foreach_batch cannot see the query's id: give sink_id")
        sink = sink_id or f"{query}/{queue or ''}"
        if num_partitions is not None:
            df = df.coalesce(num_partitions)
        rows, _ = _rows(df, queue, replace_by_key)
        rows = (
            rows.withColumn("sink_id", f.lit(sink))
            .withColumn("epoch", f.lit(epoch).cast("bigint"))
            .withColumn("part", f.spark_partition_id())
            .withColumn("parts", f.lit(df.rdd.getNumPartitions()))
        )
        _jdbc(rows, "pgque.sink", queue, batch_size, None, given)

    return send


def dead(
    df: DataFrame, queue: str, consumer: str, reason: str | Column = "reason", **connection: str
) -> list[Outcome]:
    """Make dead letters of messages that a stream has read. Calls `pgque.dead`.

    `df` has a column msg_id; `reason` is the name of a column, or an expression. Meant for foreachBatch,
    where the messages of the micro-batch are still there; a replay changes nothing. The ids and reasons are
    collected by the driver.

    Returns the outcome of each id; `ok` is False if the message is dead already or cannot be found.
    """
    from pyspark.sql import functions as f

    from ..types import Outcome
    from . import _connect
    from .options import connection_options

    given = connection_options(connection)
    column = f.col(reason) if isinstance(reason, str) else reason
    rows = df.select(f.col("msg_id").cast("bigint"), column.cast("string")).collect()
    found: list[Outcome] = []
    if not rows:
        return found
    with _connect.errors(queue), _connect.connect(given, f"pgque-spark/{queue}/{consumer}/dead") as conn:
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            result = conn.execute(
                "select d.msg_id, d.ok, d.reason from pgque.dead(%s, %s, %s::bigint[], %s::text[]) as d",
                [queue, consumer, [row[0] for row in chunk], [row[1] for row in chunk]],
            )
            found += [Outcome(*row) for row in result]
    return found


def queues(spark: SparkSession, **connection: str) -> DataFrame:
    """Return the queues that the role has a right to, as a frame. Calls `pgque.my_rights`,
    `pgque.get_queue_info` and `pgque.get_consumer_info` in the driver, once.

    Columns: queue; read, write and admin (rights of the role); paused; tick_id (the newest); pending
    (messages that the slowest consumer has ahead of it), lag (age of the oldest of them in seconds);
    consumers, an array of consumer, tick_id (where it stands), pending and lag. A figure is null if nobody
    has subscribed, if another session has a table of the queue locked, or if the role may only send.
    `connection` is url, host, port, dbname, user, password and so on, as for `format("pgque")`.
    """
    from . import _connect
    from .options import connection_options

    given = connection_options(connection)
    with _connect.errors(), _connect.connect(given, "pgque-spark/queues", autocommit=True) as conn:
        rights = conn.execute(
            "select r.queue_name, r.consume, r.produce, r.admin, r.see from pgque.my_rights() as r"
        ).fetchall()
        infos: dict[str, tuple[bool, int | None]] = {}
        consumers: dict[str, list[tuple[str, int | None, int | None, float | None]]] = {}
        if any(right[-1] for right in rights):
            for name, *info in conn.execute(
                "select i.queue_name, i.queue_paused, i.last_tick_id from pgque.get_queue_info() as i"
            ):
                infos[name] = (info[0], info[1])
            for name, *one in conn.execute(
                "select i.queue_name, i.consumer_name, i.last_tick, i.pending_events,"
                " extract(epoch from i.lag)::float8 from pgque.get_consumer_info() as i"
            ):
                consumers.setdefault(name, []).append((one[0], one[1], one[2], one[3]))
    rows = []
    for name, *may, _ in rights:
        if name is None:  # the rights to all queues
            continue
        paused, tick = infos.get(name, (None, None))
        theirs = consumers.get(name, [])
        pending = max((one[2] for one in theirs if one[2] is not None), default=None)
        lag = max((one[3] for one in theirs if one[3] is not None), default=None)
        rows.append((name, *may, paused, tick, pending, lag, theirs))
    return spark.createDataFrame(rows, _QUEUES)


def _rows(df: DataFrame, queue: str | None, replace_by_key: bool) -> tuple[DataFrame, str]:
    """Return the frame with the columns of the views, and the view that takes them."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import BinaryType, MapType

    from ._schema import NULL_QUEUE, check_schema

    names = check_schema(df.schema, queue, replace_by_key)
    columns: list[Column] = []
    table = "pgque.sink_bulk"
    queues = [f.col(f"`{names['queue']}`")] if "queue" in names else []
    queues.append(f.raise_error(NULL_QUEUE).cast("string") if queue is None else f.lit(queue))
    columns.append(f.coalesce(*queues).alias("queue"))
    for name, theirs in names.items():
        column = f.col(f"`{theirs}`")
        kind = df.schema[theirs].dataType
        if name == "queue":
            continue
        if name not in {"type", "payload", "headers"} or isinstance(kind, BinaryType):
            table = "pgque.sink"
        if name == "headers" and isinstance(kind, MapType):
            column = f.to_json(column)
        columns.append(column.alias("payload_bytes" if isinstance(kind, BinaryType) else name))
    return df.select(*columns), table


def _jdbc(
    rows: DataFrame,
    table: str,
    queue: str | None,
    batch_size: int,
    num_partitions: int | None,
    connection: Mapping[str, str],
) -> None:
    from . import _connect
    from .options import connection_options

    given, name = connection_options(connection), f"pgque-spark/{queue or 'queues'}/jdbc"
    url, properties = _connect.jdbc(given, name)
    if not _connect.leads_to_server(given, name):
        # The driver's names of prepared statements are the same in each connection, so behind a pooler in
        # transaction mode the second one would fail with 42P05.
        properties["prepareThreshold"] = "0"
    writer = (
        rows.write.format("jdbc")
        .option("url", url)
        .option("driver", "org.postgresql.Driver")
        .option("dbtable", table)
        .option("batchsize", batch_size)
        .options(**properties)
    )
    if num_partitions is not None:
        writer = writer.option("numPartitions", num_partitions)
    no_driver = False
    try:
        writer.mode("append").save()
    except Exception as error:
        # Of py4j or of Spark Connect
        no_driver = "ClassNotFoundException" in str(error) and "org.postgresql.Driver" in str(error)
        if not no_driver:
            raise
    if no_driver:
        raise PgqueError(
            "Spark has no JDBC driver for PostgreSQL. Start the session (with Spark Connect, the server) with"
            " spark.jars.packages=org.postgresql:postgresql:42.7.7; or with a file, such as that of Debian's"
            " libpostgresql-jdbc-java: spark.jars=/usr/share/java/postgresql.jar"
        )
