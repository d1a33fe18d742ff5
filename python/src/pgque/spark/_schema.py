"""Check that a frame can be sent. Also works with Spark 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PgqueBadArgumentError
from .options import READ_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

_CONTENTS = (
    "payload (string or binary), type, headers (map<string,string> or string), key, partition_key, delay"
    " and ttl (seconds, or a string such as '1 hour'), deliver_at (timestamp), queue"
)
_WRITTEN = frozenset(
    {"payload", "type", "headers", "key", "partition_key", "delay", "ttl", "deliver_at", "queue"}
)
# A queue gives a message these columns. Spark's `insert into` fills them with nulls.
_ONLY_READ = frozenset(READ_COLUMNS) - _WRITTEN
NULL_QUEUE = "column queue has a null. Fill it, or set option queue for the rows that have none"


def only_read(schema: StructType) -> list[str]:
    """Return the columns that can only be read, as the frame names them."""
    return [column.name for column in schema.fields if column.name.lower() in _ONLY_READ]


def check_only_read(rows: pa.RecordBatch, names: list[str]) -> None:
    """Refuse a value in a column that can only be read. Raises PgqueBadArgumentError that names it."""
    for name in names:
        if rows.column(name).null_count < rows.num_rows:
            raise PgqueBadArgumentError(
                f"column {name} has a value, which the queue gives itself: leave the column out, for example"
                f" drop('{name}') or `insert into v (type, payload) select …`; or make it null"
            )


def check_schema(schema: StructType, queue: str | None, replace_by_key: bool) -> dict[str, str]:
    """Return the frame's names of the columns by those of pgque.sink, after checking that they fit.

    Without `replace_by_key`, the column key is the partition key. Raises PgqueBadArgumentError that names the
    column.
    """
    found: dict[str, str] = {}
    for column in schema.fields:
        name = column.name.lower()
        _check_column(name, column.dataType)
        target = "partition_key" if name == "key" and not replace_by_key else name
        if target in found:
            if found[target].lower() != name:
                raise PgqueBadArgumentError(
                    "columns key and partition_key are the same here: set option replaceByKey=true if a"
                    " message replaces the pending one with its key, or drop one of the columns"
                )
            raise PgqueBadArgumentError(f"column {column.name} comes twice")
        found[target] = column.name
    if "payload" not in found:
        raise PgqueBadArgumentError(
            "column payload is missing. Make one, for example selectExpr('to_json(struct(*)) as payload')"
        )
    if "queue" not in found and queue is None:
        raise PgqueBadArgumentError(
            "no queue is given: set option queue or add a column queue. insertInto() passes no options:"
            " use df.writeTo('t').options(…).append() or `insert into t with (queue = '…', …) …`"
        )
    return found


def _check_column(name: str, kind: DataType) -> None:
    from pyspark.sql.types import BinaryType, MapType, NumericType, StringType, TimestampType

    text = isinstance(kind, StringType)
    if name == "payload":
        good, cure = text or isinstance(kind, BinaryType), "to_json(payload) or cast(payload as string)"
    elif name == "headers":
        good = text or (
            isinstance(kind, MapType)
            and isinstance(kind.keyType, StringType)
            and isinstance(kind.valueType, StringType)
        )
        cure = "to_json(headers) or map(…)"
    elif name in {"type", "key", "partition_key", "queue"}:
        good, cure = text, f"cast({name} as string)"
    elif name in {"delay", "ttl"}:
        good, cure = text or isinstance(kind, NumericType), "give seconds"
    elif name == "deliver_at":
        good, cure = isinstance(kind, TimestampType), "cast(deliver_at as timestamp)"
    else:
        raise PgqueBadArgumentError(
            f"unknown column {name}; a sink takes {_CONTENTS}. Put the rest into payload or drop it, for"
            f" example drop('{name}')"
        )
    if not good:
        raise PgqueBadArgumentError(
            f"column {name} has type {kind.simpleString()}, and must be as in {_CONTENTS}: {cure}"
        )
