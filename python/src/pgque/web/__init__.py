"""The web page: `pgque web`, and `app()` to mount it in an ASGI application of one's own.

It needs `pip install './python[web]'`. Everybody logs in as a PostgreSQL role, and every query runs with the
rights of that role.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .config import Config, databases

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def app(
    dsn: str | Sequence[str] = "",
    *,
    path_prefix: str = "",
    read_only: bool = False,
    hide_payloads: bool = False,
    metrics_token: str = "",
    max_connections: int | None = None,
) -> ASGIApp:
    """Return the web page of one or several databases as an ASGI application.

    `dsn` names host, port and database. User and password in it are used by /metrics alone, since each
    person logs in.
    `path_prefix` is the path below which a proxy serves the page. Leave it out where the application is
    mounted in another one. `read_only` refuses every change. `hide_payloads` shows neither payloads nor
    headers. `metrics_token` is the bearer token that /metrics asks for; without one only this machine itself
    gets an answer. `max_connections` is the most that all sessions together have to each database, by default
    an eighth of the server's; half of them, at least 2, may be of one role.
    Raises PgqueBadArgumentError for a connection string that names no database, PgqueError without
    `pgque[web]`.
    """
    from .site import Site

    return Site(
        Config(
            databases=databases([dsn] if isinstance(dsn, str) else dsn),
            path_prefix=path_prefix,
            read_only=read_only,
            hide_payloads=hide_payloads,
            metrics_token=metrics_token,
            max_connections=max_connections,
        )
    )


__all__ = ["app"]
