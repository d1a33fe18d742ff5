"""The fixtures of the SQL tests serve here too."""

from __future__ import annotations

from sql.conftest import own, subscribed, transaction

__all__ = ["own", "subscribed", "transaction"]
