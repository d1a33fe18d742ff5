"""The data source `pgque` of Spark: which class reads or writes, by the options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from . import _window, options
from ._history import PgqueHistoryReader
from ._servers import PgqueServersReader
from .sink import PgqueStreamWriter, PgqueWriter
from .source import PgqueReader, PgqueStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def _check_installed() -> None:
    """Raise ImportError that says what to install, if psycopg or its library is missing."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the data source pgque needs: pip install './python[spark]' ({type(error).__name__}: {error})"
        ) from None


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
        _check_installed()
        return PgqueReader(options.parse(self.options, options.BATCH_READ), schema)

    def streamReader(self, schema: StructType) -> PgqueStreamReader:
        """Return a reader of a stream."""
        _check_installed()
        parsed = options.parse(self.options, options.STREAM_READ)
        if parsed.servers is not None:
            return PgqueServersReader(parsed, schema)
        if parsed.startingAt == options.ARCHIVE:
            return PgqueHistoryReader(parsed, schema)
        return PgqueStreamReader(parsed, schema)

    def writer(self, schema: StructType, overwrite: bool) -> PgqueWriter:
        """Return a writer of a batch."""
        _check_installed()
        return PgqueWriter(options.parse(self.options, options.BATCH_WRITE), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> PgqueStreamWriter:
        """Return a writer of a stream's micro-batches."""
        _check_installed()
        return PgqueStreamWriter(options.parse(self.options, options.STREAM_WRITE), schema, overwrite)
