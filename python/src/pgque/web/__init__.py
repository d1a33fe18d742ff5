"""Serve the web page: `pgque web`, or `app()` to mount it in your own ASGI application.

It needs `pip install './python[web]'`. Each user logs in as a PostgreSQL role, and every query runs with the
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

    Args:
        dsn: names host, port and database, or several of them. Only /metrics uses its user and password,
            because each user of the page logs in.
        path_prefix: path below which a proxy serves the page. Leave it out if the application is mounted in
            another one.
        read_only: refuse every change.
        hide_payloads: show neither payloads nor headers.
        metrics_token: bearer token that /metrics requires. Without one, /metrics answers only requests of
            this machine.
        max_connections: most connections of all sessions together to each database, by default an eighth of
            the server's. One role may have half of them, or 2.

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
