"""Connection strings: where they come from, and what long-lived connections add."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import PgqueBadArgumentError

if TYPE_CHECKING:
    from typing_extensions import LiteralString

# So that a connection which silently died is noticed within half a minute and not after hours.
_KEEPALIVES = {
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

# The same for the server's side: when a client's host is lost, nothing closes its connection. The server
# would keep the session, and with it the locks of an open transaction, until the system's keepalives notice,
# mostly after two hours. For a session that is not shared through a pooler. A role's own settings stay.
SERVER_KEEPALIVES: LiteralString = (
    "select pg_catalog.set_config(k.name, k.value, false)"
    " from (values ('tcp_keepalives_idle', '15'), ('tcp_keepalives_interval', '5'),"
    " ('tcp_keepalives_count', '3')) as k (name, value)"
    " join pg_catalog.pg_settings as s on s.name = k.name and s.source = 'default'"
)


def given_or_default(dsn: str) -> str:
    """Return a connection string, or if it is empty that of the variable PGQUE_DSN."""
    return dsn or os.environ.get("PGQUE_DSN", "")


def keepalives(given: Mapping[str, object]) -> dict[str, str]:
    """Return the parameters that notice a dead network, without those that are given."""
    return {
        key: value
        for key, value in _KEEPALIVES.items()
        if key not in given and not (key == "connect_timeout" and "PGCONNECT_TIMEOUT" in os.environ)
    }


def with_keepalives(dsn: str, application_name: str | None = None) -> str:
    """Return a connection string that notices a dead network, and may have a name; what `dsn` says stays.

    Raises PgqueBadArgumentError when it is not a connection string.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    dsn = given_or_default(dsn)
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        raise PgqueBadArgumentError(f"not a connection string: {error}") from error
    added = keepalives(given)
    if application_name is not None:
        added["fallback_application_name"] = application_name[:63]
    return make_conninfo(dsn, **added)
