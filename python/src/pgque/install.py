"""Put the SQL side into a database, and take it out again."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

import psycopg

from ._dsn import given_or_default
from ._encode import FIND_VERSION, check_not_newer
from ._version import __version__
from .errors import from_psycopg


def sql_text() -> str:
    """Return the SQL file of this package's version."""
    return files("pgque").joinpath("pgque.sql").read_text(encoding="utf-8")


def refuse_downgrade(ask: Callable[[str], object]) -> None:
    """Raise PgqueVersionError if the database has a newer version than this package.

    `ask` runs a query and returns the first value of the first row, or None.
    """
    if ask(FIND_VERSION):
        check_not_newer(str(ask("select pgque.version()")), __version__)


def install(dsn: str = "") -> str:
    """Install or upgrade pgque in one transaction, and return its version. A second run changes nothing.

    Raises PgqueConnectionError, PgqueError if the role may not create a schema and roles, and
    PgqueVersionError if the database has a newer version than this package.
    """
    try:
        with psycopg.connect(given_or_default(dsn), prepare_threshold=None) as conn:

            def ask(question: str) -> object:
                row = conn.execute(question.encode()).fetchone()
                return row[0] if row else None

            refuse_downgrade(ask)
            conn.execute(sql_text().encode())
            return str(ask("select pgque.version()"))
    except psycopg.Error as error:
        raise from_psycopg(error) from error


def uninstall(dsn: str = "") -> None:
    """Remove pgque with all its queues and messages; roles stay. Calls `pgque.uninstall`."""
    try:
        with psycopg.connect(given_or_default(dsn), prepare_threshold=None) as conn:
            conn.execute("select pgque.uninstall()")
    except psycopg.Error as error:
        raise from_psycopg(error) from error
