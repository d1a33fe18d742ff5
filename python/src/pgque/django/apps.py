"""The app of Django that has the command `pgque_worker` and the checks of databases."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks


class PgqueConfig(AppConfig):
    """Register the command and the checks."""

    name = "pgque.django"
    label = "pgque"
    verbose_name = "pgque"

    def ready(self) -> None:
        """Register the checks of databases, for `manage.py check --deploy --database NAME`."""
        from .checks import check_databases

        # With `deploy`, or `migrate` would run them before the migration that creates the queues.
        checks.register(checks.Tags.database, deploy=True)(check_databases)
