"""The fixtures of the SQL tests serve here too."""

from __future__ import annotations

from sql.conftest import own, subscribed, transaction
from sql.test_install import psql

__all__ = ["own", "psql", "subscribed", "transaction"]
