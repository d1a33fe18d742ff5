"""Where PySpark finds the data source `pgque`: it looks into every module that is called pyspark_*.

One such module that fails to import hides all others, so this one always imports.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource

try:
    from pgque.spark.datasource import PgqueDataSource as DefaultSource
except Exception as error:
    _reason = f"{type(error).__name__}: {error}"

    class DefaultSource(DataSource):  # type: ignore[no-redef]
        """Say what is missing."""

        def __init__(self, options: object) -> None:
            raise ImportError(f"the data source pgque needs: pip install './python[spark]' ({_reason})")

        @classmethod
        def name(cls) -> str:
            """Return the name for `format()`."""
            return "pgque"


__all__ = ["DefaultSource"]
