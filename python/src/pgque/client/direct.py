"""Find out whether a connection leads directly to the server, so that its prepared statements are its own."""

from __future__ import annotations

import os
import socket
from typing import TypeAlias

from psycopg import AsyncConnection, Connection

# Process id and client port of the session that answers. The port is null for a Unix socket.
ANSWERS = "pg_catalog.pg_backend_pid(), pg_catalog.inet_client_port()"

# Of the server: its process id, and when it began, since ids are used again. Where a server's container is
# started again, they are so at once.
Session: TypeAlias = tuple[int, str]


def is_direct(conn: Connection[object] | AsyncConnection[object], pid: object, port: object) -> bool:
    """Return whether a connection is known to be direct, from what the session that answered says of itself.

    PgBouncer and Odyssey give their clients process ids that they make up. Another pooler may pass on the id
    of one of the server's sessions, which need not run the next statement. So the port is compared, too: a
    session that is reached through a pooler knows the pooler's port, not the client's.
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
