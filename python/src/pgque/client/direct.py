"""Whether a connection leads directly to the server, so that statements prepared on it are its own."""

from __future__ import annotations

import os
import socket

from psycopg import AsyncConnection, Connection

# Of the session that answers. A port is null where the session was reached through a Unix socket.
ANSWERS = "pg_catalog.pg_backend_pid(), pg_catalog.inet_client_port()"


def is_direct(conn: Connection[object] | AsyncConnection[object], pid: object, port: object) -> bool:
    """Return whether a connection is known to be direct, from what the session that answered says of itself.

    PgBouncer and Odyssey give their clients process ids that they make up. Another pooler may pass on that of
    a session of the server, which need not be the one that runs the next statement: but no session knows the
    port of a client that reaches it through somebody else.
    """
    return pid == conn.info.backend_pid and port == _own_port(conn)


def _own_port(conn: Connection[object] | AsyncConnection[object]) -> object:
    """Return the port of this side of a connection, None for a Unix socket, and False if it is not known."""
    try:
        with socket.socket(fileno=os.dup(conn.fileno())) as same:
            name = same.getsockname()
    except OSError:
        return False
    return name[1] if isinstance(name, tuple) else None
