"""Choose the class that reads or writes for the data source `pgque`, by the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from . import _connect, _window, options
from ._history import PgqueHistoryReader
from ._needs import check_packages, packages
from ._servers import PgqueServersReader
from .sink import PgqueStreamWriter, PgqueWriter
from .source import PgqueReader, PgqueStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def _parsed(given: Mapping[str, str], mode: str) -> options.Options:
    """Return the options, with libpq's parameters in place of a url, for which tasks would need psycopg.

    Raises ImportError with the command that installs it, if a package of pgque[spark] is missing.
    """
    with packages():
        import psycopg  # noqa: F401
    check_packages("pyarrow", "adbc_driver_postgresql")
    parsed = options.parse(given, mode)
    return replace(parsed, connection=_connect.parameters(parsed.connection))


class PgqueDataSource(DataSource):
    """Read and write the queues of pgque: `spark.read.format("pgque")`, and so on.

    Columns when reading: msg_id, type, payload, key, created_at, retry_count, and others if asked for; with
    payloadSchema or schema(), columns of the payload.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for `format()`."""
        return "pgque"

    def schema(self) -> str:
        """Return the columns."""
        return _window.ddl(options.parse(self.options, options.BATCH_READ, options.STREAM_READ))

    def reader(self, schema: StructType) -> PgqueReader:
        """Return a reader of a batch."""
        return PgqueReader(_parsed(self.options, options.BATCH_READ), schema)

    def streamReader(self, schema: StructType) -> PgqueStreamReader:
        """Return a reader of a stream."""
        parsed = _parsed(self.options, options.STREAM_READ)
        if parsed.servers is not None:
            return PgqueServersReader(parsed, schema)
        if parsed.startingAt == options.ARCHIVE:
            return PgqueHistoryReader(parsed, schema)
        return PgqueStreamReader(parsed, schema)

    def writer(self, schema: StructType, overwrite: bool) -> PgqueWriter:
        """Return a writer of a batch."""
        return PgqueWriter(_parsed(self.options, options.BATCH_WRITE), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> PgqueStreamWriter:
        """Return a writer of a stream's micro-batches."""
        return PgqueStreamWriter(_parsed(self.options, options.STREAM_WRITE), schema, overwrite)
