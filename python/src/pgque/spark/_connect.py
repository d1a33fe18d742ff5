"""Connect Spark's processes, by psycopg and by JDBC, and raise errors without secrets and payloads.

psycopg puts the failing row of a COPY into its errors, and Spark prints the whole chain of an exception. So
the errors raised here have no cause and no context.

Spark starts a Python process for most steps of a query, many of which connect to no server. So psycopg, which
takes 0.1 s of a core, is imported by the functions that need it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from ..errors import PgqueBadArgumentError, PgqueConnectionError, PgqueError, from_fields, from_psycopg
from ._needs import packages

if TYPE_CHECKING:
    import adbc_driver_manager as adbc
    import psycopg

    Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

# Options that the JDBC driver gets under the same name
_JDBC_PROPERTIES = ("user", "password", "sslmode", "sslrootcert", "sslcert", "sslkey")
_PLAIN = re.compile(r"[\w.:/%\[\]-]+")
_ENVIRONMENT = {
    "host": "PGHOST",
    "port": "PGPORT",
    "dbname": "PGDATABASE",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "sslmode": "PGSSLMODE",
}


@packages()
def parameters(connection: Mapping[str, str]) -> dict[str, str]:
    """Return connection options as libpq's parameters; the other options override the url.

    Raises PgqueBadArgumentError, whose message never holds the url.
    """
    url = connection.get("url", "")
    if not url:
        return {name: value for name, value in connection.items() if name != "url"}
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    if url.lower().startswith("jdbc:"):
        found = _from_jdbc(url)
    else:
        try:
            found = {k: str(v) for k, v in conninfo_to_dict(url).items() if v is not None}
        except psycopg.ProgrammingError:
            raise PgqueBadArgumentError(
                "option url is not a connection string; it is not shown here, since it may hold a password"
            ) from None
    return {**found, **{name: value for name, value in connection.items() if name != "url"}}


def _from_jdbc(url: str) -> dict[str, str]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    bad = PgqueBadArgumentError(
        "option url is not of the form jdbc:postgresql://host:port/database; it is not shown here, as it may"
        " hold a password"
    )
    if not url.lower().startswith("jdbc:postgresql://"):
        raise bad
    try:
        parts = urlsplit(url[len("jdbc:") :])
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        found = conninfo_to_dict(f"postgresql://{parts.netloc}{parts.path}")
    except (ValueError, psycopg.ProgrammingError):
        raise bad from None
    if given.get("ssl", "false").lower() != "false" and "sslmode" not in given:
        raise PgqueBadArgumentError("set sslmode=… in place of ssl=true in option url")
    return {
        **{name: str(value) for name, value in found.items() if value is not None},
        **{name: given[name] for name in _JDBC_PROPERTIES if given.get(name)},
    }


def servers(given: Sequence[str], connection: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of servers, host:port/dbname, sorted. Raises PgqueBadArgumentError."""
    shared = parameters(connection)
    if "host" in shared or "hostaddr" in shared:
        raise PgqueBadArgumentError("options servers and host exclude each other, also in option url")
    port = shared.get("port") or os.environ.get("PGPORT") or "5432"
    dbname = shared.get("dbname") or os.environ.get("PGDATABASE")
    found = [_server_name(server, port, dbname) for server in given]
    for name in found:
        if found.count(name) > 1:
            raise PgqueBadArgumentError(f"option servers has {name} twice")
    return tuple(sorted(found))


def _server_name(server: str, port: str, dbname: str | None) -> str:
    # An entry that may hold a password is not shown.
    shown = repr(server) if _PLAIN.fullmatch(server) else "an entry"
    bad = PgqueBadArgumentError(
        f"option servers: {shown} is not host, host:port or host:port/dbname; user and password are options"
        " of their own, and the same for all servers"
    )
    try:
        parts = urlsplit(f"//{server}")
        host, own_port, path = parts.hostname, parts.port, parts.path
    except ValueError:
        raise bad from None
    rest = (parts.username, parts.query, parts.fragment, path.count("/") > 1)
    if not host or any(rest) or any(c.isspace() or c == "," for c in server):
        raise bad
    database = unquote(path[1:]) or dbname
    if not database:
        raise PgqueBadArgumentError(
            f"option servers: which database of {shown}? Give option dbname, or host:port/dbname"
        )
    where = f"[{host}]" if ":" in host else host
    return f"{where}:{own_port or port}/{quote(database, safe='')}"


def at(connection: Mapping[str, str], server: str) -> dict[str, str]:
    """Return the connection options of one of several servers, by its name."""
    parts = urlsplit(f"//{server}")
    own = {"host": str(parts.hostname), "port": str(parts.port), "dbname": unquote(parts.path[1:])}
    return {**connection, **own}


@contextmanager
def of(server: str | None) -> Iterator[None]:
    """Put the name of a server into our errors, if there are several."""
    try:
        yield
    except PgqueError as error:
        text = str(error)
        if server is None or text.startswith(f"server {server}:"):
            raise
        named = type(error)(
            f"server {server}: {text}", sqlstate=error.sqlstate, hint=error.hint, queue=error.queue
        )
    else:
        return
    raise named


def tell_apart(seen: dict[str, str], server: str, conn: Connection) -> None:
    """Refuse a database that has two names in the list of servers: it would be read or written twice.

    `seen` has the databases before. A copy of a server has its identifiers, but was not started in the same
    microsecond.
    """
    row = conn.execute(
        "select extract(epoch from pg_postmaster_start_time()) || ' ' || d.oid from pg_database as d"
        " where d.datname = current_database()"
    )
    other = seen.setdefault(str(one(row)[0]), server)
    if other != server:
        raise PgqueBadArgumentError(
            f"servers {other} and {server} are one database with two names: use one of them"
        )


def session_name(queue: str | None, consumer: str | None) -> str:
    """Return the application_name of a reader's connection."""
    return f"pgque-spark/{queue}/{consumer or 'batch'}"


def dsn(connection: Mapping[str, str], name: str) -> str:
    """Return libpq's connection string of a session that appears under `name` in pg_stat_activity."""
    from ..client.dsn import given_or_default, keepalives

    given = parameters(connection or {"url": given_or_default("")})
    fixed = {"application_name": name[:63], "client_encoding": "utf8"}
    found = {**keepalives(given), **given, **fixed}
    quoted = {name: _escaped(value, "\\'") for name, value in found.items()}
    return " ".join(f"{name}='{value}'" for name, value in quoted.items())


def _escaped(value: str, quote: str) -> str:
    return value.replace("\\", "\\\\").replace("'", quote)


def literal(value: str | int | Sequence[str] | None) -> str:
    """Return a value as SQL, whatever the server's standard_conforming_strings."""
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        escaped = _escaped(value, "''")
        return f" E'{escaped}'"
    return f"array[{', '.join(map(literal, value))}]::text[]"


@packages()
def connect(connection: Mapping[str, str], name: str, *, autocommit: bool = False) -> Connection:
    """Open a connection that appears under `name` in pg_stat_activity."""
    import psycopg

    with errors():
        return psycopg.connect(dsn(connection, name), autocommit=autocommit, prepare_threshold=None)


@contextmanager
def errors(queue: str | None = None) -> Iterator[None]:
    """Turn psycopg's errors into ours, without the connection string, the rows and the cause."""
    with packages():
        import psycopg

    try:
        yield
    except psycopg.Error as error:
        found = explained(error, queue)
    else:
        return
    raise found


def explained(error: psycopg.Error, queue: str | None = None) -> PgqueError:
    """Return our error for one of psycopg's, with what to do in its message."""
    return _with_cure(from_psycopg(error, queue), error.diag.constraint_name, queue)


def explained_arrow(error: adbc.Error, queue: str | None = None) -> PgqueError:
    """Return our error for one of ADBC's, with what to do in its message."""
    import adbc_driver_manager as adbc

    diag = {
        name.decode() if isinstance(name, bytes) else name: value.decode(errors="replace")
        for name, value in error.details or ()
    }
    known = from_fields(
        diag.get("PG_DIAG_MESSAGE_PRIMARY") or str(error).strip(),
        sqlstate=error.sqlstate,
        hint=diag.get("PG_DIAG_MESSAGE_HINT"),
        context=diag.get("PG_DIAG_CONTEXT"),
        is_lost=isinstance(error, adbc.OperationalError),
        queue=queue,
    )
    return _with_cure(known, diag.get("PG_DIAG_CONSTRAINT_NAME"), queue)


def _with_cure(known: PgqueError, constraint: str | None, queue: str | None) -> PgqueError:
    text = str(known)
    hint = known.hint
    if known.sqlstate == "22021":
        text = "a string holds a NUL character or is not UTF-8, which PostgreSQL's text cannot hold"
        hint = "Replace it, for example with translate(payload, '\\u0000', ''), or send the column as binary."
    elif constraint == "sink_stage_all_headers" or (known.sqlstate == "22P02" and "json" in text):
        text = "column headers has a row that is no JSON object"
        hint = "Give a map<string,string>, or a string such as to_json(struct(…))."
    elif text.startswith("cannot start at "):
        text = f"option startingAt or endingAt: {text}"
    if hint and hint not in text:
        text = f"{text}. {hint}"
    new = type(known)(text, sqlstate=known.sqlstate, hint=hint, queue=queue)
    new.__suppress_context__ = True
    return new


def one(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the only row of a call."""
    row = cursor.fetchone()
    if row is None:
        raise PgqueError("the server returned no row")
    return row


def is_lost(error: BaseException) -> bool:
    """Return whether the connection was lost, so that the call may succeed on a new one."""
    import psycopg

    if isinstance(error, psycopg.Error):
        error = from_psycopg(error)
    return isinstance(error, PgqueConnectionError)


def leads_to_server(connection: Mapping[str, str], name: str) -> bool:
    """Return whether the options lead directly to the server, with no pooler between."""
    from ..client.direct import ANSWERS, is_direct

    with connect(connection, name, autocommit=True) as conn:
        row = conn.execute(f"select {ANSWERS}".encode()).fetchone()
        return row is not None and is_direct(conn, *row)


def jdbc(connection: Mapping[str, str], name: str) -> tuple[str, dict[str, str]]:
    """Return a JDBC url without secrets and the properties that go with it.

    The server's detail of an error is left out, because it holds the failing rows. Raises
    PgqueBadArgumentError for what JDBC cannot do: a Unix socket, a service file.
    """
    found = parameters(connection)
    if "service" in found:
        raise PgqueBadArgumentError("JDBC knows no service file: give host, dbname and user")
    for parameter, variable in _ENVIRONMENT.items():
        if os.environ.get(variable):
            found.setdefault(parameter, os.environ[variable])
    host = found.get("host") or found.get("hostaddr") or "localhost"
    if host.startswith(("/", "@")):
        raise PgqueBadArgumentError("JDBC knows no Unix sockets: give option host with a name or an address")
    hosts = host.split(",")
    ports = found.get("port", "5432").split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        raise PgqueBadArgumentError(
            f"{len(hosts)} hosts and {len(ports)} ports: give one port, or one for each host"
        )
    where = ",".join(
        f"{f'[{h}]' if ':' in h and not h.startswith('[') else h}:{p or 5432}"
        for h, p in zip(hosts, ports, strict=True)
    )
    dbname = found.get("dbname") or found.get("user", "postgres")
    extras = {
        "reWriteBatchedInserts": "true",
        "logServerErrorDetail": "false",
        "ApplicationName": name[:63],
    }
    query = "&".join(f"{key}={quote(value, safe='')}" for key, value in extras.items())
    url = f"jdbc:postgresql://{where}/{quote(dbname, safe='')}?{query}"
    return url, {key: found[key] for key in _JDBC_PROPERTIES if found.get(key)}
