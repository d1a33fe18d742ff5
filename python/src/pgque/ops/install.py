"""Put the SQL side into a database, and take it out again."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files

import psycopg

from .._version import __version__
from ..client.dsn import with_keepalives
from ..client.limit import LimitedConnection
from ..codec.encode import FIND_VERSION, THROUGH, check_not_newer
from ..errors import PgqueBadArgumentError, from_psycopg


def sql_text(version: str | None = None) -> str:
    """Return the SQL file of this package's version, or that of 0.8.0.

    Databases before 0.7.0 are upgraded to 0.8.0 first. Raises PgqueBadArgumentError for another version.
    """
    if version in (None, __version__):
        return files("pgque.ops").joinpath("pgque.sql").read_text(encoding="utf-8")
    if version != THROUGH:
        raise PgqueBadArgumentError(
            f"this package has no SQL of version {version}", hint=f"It has {THROUGH} and {__version__}."
        )
    return lzma.decompress(files("pgque.ops").joinpath(f"pgque-{THROUGH}.sql.xz").read_bytes()).decode()


def refuse_downgrade(ask: Callable[[str], object]) -> None:
    """Raise PgqueVersionError if the database has a newer version than this package.

    `ask` runs a query and returns the first value of the first row, or None.
    """
    if ask(FIND_VERSION):
        check_not_newer(str(ask("select pgque.version()")), __version__)


@contextmanager
def _connected(dsn: str) -> Iterator[LimitedConnection[tuple[object, ...]]]:
    """Connect, for one transaction whose statements may take any time. An interruption ends them at once."""
    with LimitedConnection.connect(with_keepalives(dsn), prepare_threshold=None) as conn:
        conn.command_timeout = None
        yield conn


def install(dsn: str = "", *, version: str | None = None) -> str:
    """Install or upgrade pgque in one transaction, and return its version. A second run changes nothing.

    A database before 0.7.0 is upgraded with `version="0.8.0"` first. Raises PgqueConnectionError,
    PgqueError if the role may not create a schema and roles or the database is before 0.7.0, and
    PgqueVersionError if the database has a newer version than this package.
    """
    source = sql_text(version).encode()
    try:
        with _connected(dsn) as conn:

            def ask(question: str) -> object:
                row = conn.execute(question.encode()).fetchone()
                return row[0] if row else None

            refuse_downgrade(ask)
            conn.execute(source)
            return str(ask("select pgque.version()"))
    except psycopg.Error as error:
        raise from_psycopg(error) from error


def uninstall(dsn: str = "") -> None:
    """Remove pgque with all its queues and messages; roles stay. Calls `pgque.uninstall`."""
    try:
        with _connected(dsn) as conn:
            conn.execute("select pgque.uninstall()")
    except psycopg.Error as error:
        raise from_psycopg(error) from error
