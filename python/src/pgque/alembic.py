"""Install pgque and create queues in migrations of Alembic.

def upgrade() -> None:
    pgque.alembic.install(op)
    pgque.alembic.create_queue(op, "orders")

def downgrade() -> None:
    pgque.alembic.drop_queue(op, "orders")
    pgque.alembic.uninstall(op)

Everything runs in the transaction of the migration. With `alembic upgrade --sql` it is printed instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Protocol

from .errors import PgqueBadArgumentError
from .ops import migrations
from .ops.install import refuse_downgrade, sql_text
from .transaction.adapters import unprepared
from .types import Setting


class Operations(Protocol):
    """Describe `alembic.op`, or an `Operations` object of Alembic."""

    def get_context(self) -> Any:
        """Return the context of the migration."""


def install(op: Operations) -> None:
    """Install pgque, or upgrade it to the version of this package.

    After an upgrade of the package, write one more migration that calls this; its downgrade is empty. Raises
    PgqueVersionError if the database has a newer version than this package.
    """
    context = op.get_context()
    _check(context)
    if not context.as_sql:
        with unprepared(context.bind.connection.driver_connection):
            refuse_downgrade(lambda question: context.bind.exec_driver_sql(question).scalar())
    _run(op, sql_text())


def uninstall(op: Operations) -> None:
    """Remove pgque with all its queues and messages; roles stay. Calls `pgque.uninstall`."""
    _run(op, migrations.UNINSTALL)


def create_queue(op: Operations, queue: str, config: Mapping[str, Setting] | None = None) -> None:
    """Create a queue; an existing one is not changed. Calls `pgque.create_queue`."""
    _run(op, migrations.create_queue(queue, config))


def drop_queue(op: Operations, queue: str, force: bool = False) -> None:
    """Drop a queue; pass `force` while it is in use. Calls `pgque.drop_queue`."""
    _run(op, migrations.drop_queue(queue, force))


def subscribe(
    op: Operations,
    queue: str,
    consumer: str,
    start_at: str | int | datetime | None = None,
    *,
    keyed_order: bool = False,
    key_concurrency: int | None = None,
) -> None:
    """Subscribe a consumer, with the arguments of `PgqueClient.subscribe`. Calls `pgque.subscribe`."""
    _run(op, migrations.subscribe(queue, consumer, start_at, keyed_order, key_concurrency))


def unsubscribe(op: Operations, queue: str, consumer: str) -> None:
    """Remove a consumer from a queue. Calls `pgque.unsubscribe`."""
    _run(op, migrations.unsubscribe(queue, consumer))


def _run(op: Operations, script: str) -> None:
    """Run a script as it is: a colon or a percent sign in it is no parameter."""
    context = op.get_context()
    _check(context)
    if context.as_sql:
        context.impl.static_output(script)
    elif context.dialect.driver == "asyncpg":  # which prepares what SQLAlchemy runs, one statement at a time
        context.bind.exec_driver_sql("select 1")  # begins the transaction
        context.bind.connection.dbapi_connection.run_async(lambda conn: conn.execute(script))
    else:
        with unprepared(context.bind.connection.driver_connection):
            context.bind.exec_driver_sql(script, execution_options={"no_parameters": True})


def _check(context: Any) -> None:
    """Raise PgqueBadArgumentError for a database that is not PostgreSQL."""
    if context.dialect.name != "postgresql":
        raise PgqueBadArgumentError(
            f"pgque needs PostgreSQL, and the database of this migration is {context.dialect.name}",
            hint="Call the functions of pgque.alembic in migrations of PostgreSQL only.",
        )
