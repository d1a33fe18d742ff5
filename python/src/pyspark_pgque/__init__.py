"""Register the data source `pgque`: PySpark imports every module that is called pyspark_* to find sources.

If one of these modules cannot be imported, PySpark finds none of them, so this one can always be imported.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource

try:
    from pgque.spark.datasource import PgqueDataSource as DefaultSource
except Exception as error:
    _reason = f"{type(error).__name__}: {error}"

    class DefaultSource(DataSource):  # type: ignore[no-redef]
        """Raise ImportError with the command that installs what is missing."""

        def __init__(self, options: object) -> None:
            raise ImportError(f"the data source pgque needs: pip install './python[spark]' ({_reason})")

        @classmethod
        def name(cls) -> str:
            """Return the name for `format()`."""
            return "pgque"


__all__ = ["DefaultSource"]
