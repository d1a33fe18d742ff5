"""Parts that the commands share: options, input, and the printing of text and rows."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, ParamSpec, TypeVar

import click
import psycopg
from psycopg import IsolationLevel
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table

from ..client.limit import COMMAND_TIMEOUT
from ..errors import PgqueError, from_psycopg
from ..ops import titles
from ..ops.units import moment, span
from ..twins.client import PgqueClient

P = ParamSpec("P")
R = TypeVar("R")

EXIT_NOTHING = 3

MAX_AGE = timedelta(days=36525)  # a century: dates so far away can still be calculated with
MAX_CELL = 200  # characters that a table shows of a text; --wide and --json show all
MAX_LINES = 4  # lines that a table shows of a text, on a terminal
MIN_TEXT_WIDTH = 16  # characters a line that a long text gets at least, before a table leaves out a column

# Ids that commands take: where they come first, no table leaves them out.
_IDS = ("msg_id", "dl_id", "archive_id", "ev_id")
# Texts of any length, which a table may shorten. Names it does not.
_TEXTS = (
    "payload",
    "payload_bytes",
    "headers",
    "ev_data",
    "ev_bytes",
    "ev_headers",
    "dl_reason",
    "last_error",
)

# Control characters and escape sequences, bidirectional overrides, and parts of characters. From a stranger's
# message they would reach the terminal of an operator.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

EXIT_CODES = """
\b
Exit codes:
  0  done
  1  error: the database, or pgque, refused
  2  wrong usage
  3  no message received or changed, a health check failed, or nothing ticks after start
  4  health: warnings only

The database is the one of --dsn or PGQUE_DSN. Missing parts come from PGHOST, PGPORT, PGDATABASE,
PGUSER, PGPASSWORD and the other PG* variables.
"""


def dsn_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add the option --dsn."""
    return click.option(
        "--dsn",
        default="",
        metavar="DSN",
        envvar="PGQUE_DSN",
        help="Connection string or URL [default: PGQUE_DSN, then the PG* variables].",
    )(command)


def command_timeout_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add the option --command-timeout, which `connect` reads itself."""
    return click.option(
        "--command-timeout",
        type=click.FloatRange(min=0),
        default=COMMAND_TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        envvar="PGQUE_COMMAND_TIMEOUT",
        expose_value=False,
        callback=lambda ctx, param, value: ctx.meta.update({"pgque.command_timeout": value or None}),
        help="Give up a call that the server does not answer in this time; 0 is no limit.",
    )(command)


def command_timeout() -> float | None:
    """Return the seconds of --command-timeout, None for no limit."""
    seconds: float | None = click.get_current_context().meta.get("pgque.command_timeout", COMMAND_TIMEOUT)
    return seconds


def connect(dsn: str, *, autocommit: bool = False) -> PgqueClient:
    """Return a client of the database, with the time limit of this command.

    Its transactions are READ COMMITTED, which some calls need, whatever the default of the database is.
    """
    client = PgqueClient.connect(dsn, autocommit=autocommit, command_timeout=command_timeout())
    client.conn.isolation_level = IsolationLevel.READ_COMMITTED
    return client


def commit(client: PgqueClient) -> None:
    """Commit, with the time limit of this command."""
    try:
        with client._limited():
            client.conn.commit()
    except psycopg.Error as error:
        raise from_psycopg(error) from error


def json_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options of commands that print tables: --json, and --wide, which `print_rows` reads itself."""
    wide = click.option(
        "--wide",
        is_flag=True,
        expose_value=False,
        callback=lambda ctx, param, value: ctx.meta.update({"pgque.wide": value}),
        help="Print all columns in full, however wide the terminal is.",
    )
    text = "Print JSON, with the names that columns have in SQL, instead of a table."
    return click.option("--json", "as_json", is_flag=True, help=text)(wide(command))


def yes_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add the option --yes."""
    return click.option("--yes", is_flag=True, help="Do not ask.")(command)


def length_option(
    name: str, help: str, default: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that adds an option for a length of time."""
    return click.option(
        name,
        default=default,
        show_default=default is not None,
        metavar="LENGTH",
        callback=lambda ctx, param, value: None if value is None else age(value),
        help=f"{help} As in 90s, 15m, 12h, 30d, 0s.",
    )


def limit_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add the option --limit."""
    return click.option(
        "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Most rows."
    )(command)


def age(text: str) -> timedelta:
    """Return a length of time such as 90s or 30d. Raises click.BadParameter."""
    match = re.fullmatch(r"(\d+)\s*(s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?)", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not an age such as 90s, 15m, 12h or 30d")
    seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2][0]]
    if seconds > MAX_AGE.total_seconds():
        raise click.BadParameter(f"{text!r} is longer than {MAX_AGE.days} days")
    return timedelta(seconds=seconds)


def parsed_ids(
    wanted: str,
) -> Callable[[click.Context, click.Parameter, str | tuple[str, ...]], int | list[int]]:
    """Return a callback that reads ids; `wanted` says of what, and what the command takes else."""

    def number(text: str) -> int:
        if re.fullmatch(r"[0-9]+", text) is None:
            raise click.BadParameter(f"{text!r} is no id. Give {wanted}.")
        return int(text)

    return lambda ctx, param, value: number(value) if isinstance(value, str) else [number(v) for v in value]


class Address(NamedTuple):
    """An address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parsed_address(ctx: click.Context, param: click.Parameter, value: str | None) -> Address | None:
    """Return the address that HOST:PORT or [HOST]:PORT names. Raises click.BadParameter."""
    if value is None:
        return None
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{value!r} is no HOST:PORT, such as 127.0.0.1:9187 or [::1]:9187")
    if ":" in host and not bracketed:
        raise click.BadParameter(f"{value!r} needs brackets around its address: [{host}]:{port}")
    return Address(host[1:-1] if bracketed else host, int(port))


def confirm(question: str, yes: bool) -> None:
    """Ask unless there is a --yes. Raises click.Abort when the answer is no."""
    if yes:
        return
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: give --yes")
    click.confirm(visible(question), abort=True)


def read_input() -> str:
    """Return standard input as text, without any change of its line ends. Raises PgqueError."""
    if sys.stdin is None:
        raise PgqueError("standard input is closed", hint="Give the payload as an argument.")
    encoding: str = sys.stdin.encoding or "utf-8"
    try:
        return sys.stdin.buffer.read().decode(encoding)
    except UnicodeDecodeError as error:
        raise PgqueError(
            f"standard input is not valid {encoding}: byte {error.start + 1}",
            hint="A payload is text. Send bytes from SQL or from a program.",
        ) from error


def visible(text: str, keep: str = "") -> str:
    """Return text in which characters that a terminal would obey are escaped, except those to `keep`."""

    def escaped(match: re.Match[str]) -> str:
        return match[0] if match[0] in keep else match[0].encode("unicode_escape").decode()

    return _UNSAFE.sub(escaped, text)


def echo(text: object, *, err: bool = False) -> None:
    """Print a line: into a pipe or a file as it is, on a terminal without what the terminal would obey."""
    stream = sys.stderr if err else sys.stdout
    if stream is None:
        if not err:
            raise PgqueError("standard output is closed", hint="Send it to a file, or to /dev/null.")
        return
    line = str(text)
    print(visible(line, keep="\n\t") if stream.isatty() else line, file=stream)


def warn_unread(client: PgqueClient, queue: str, messages: str) -> None:
    """Print a note if a queue has no consumer, unless the role may not know."""
    try:
        if client.consumers.get_info(queue):
            return
    except PgqueError:
        return
    echo(
        f"note: queue {queue} has no consumer: {messages}. Subscribe one:"
        f" pgque subscribe {shlex.quote(queue)} CONSUMER --from earliest",
        err=True,
    )


def as_dict(row: object) -> dict[str, object]:
    """Return a dataclass as a dict."""
    if not dataclasses.is_dataclass(row) or isinstance(row, type):
        raise TypeError("not a row")
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


def _plain(value: object) -> object:
    """Return a value as JSON has it: times in ISO format, lengths of time in seconds."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def dump(value: object, indent: int | None = None) -> str:
    """Return JSON text, in ASCII where standard output can show no more."""
    ascii_only = not _encoding().lower().startswith("utf")
    text = json.dumps(value, ensure_ascii=ascii_only, default=_plain, indent=indent)
    return _UNSAFE.sub(lambda match: match[0] if match[0] == "\n" else f"\\u{ord(match[0]):04x}", text)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return span(value)
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.1f}"
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, dict):
        return dump(value)
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    # Characters that the locale lacks are escaped before the widths are counted.
    return visible(str(value)).encode(_encoding(), "backslashreplace").decode(_encoding())


def plain_console(width: int | None = None) -> Console:
    """Return a console that prints what it is given: text is no markup and holds no emoji codes."""
    if sys.stdout is None:
        raise PgqueError("standard output is closed", hint="Send it to a file, or to /dev/null.")
    return Console(width=width, markup=False, emoji=False, highlight=False)


def line_width() -> int | None:
    """Return the width of the terminal, or of COLUMNS; None elsewhere, where lines may have any length."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def _widths(cells: Sequence[Sequence[str]], width: int | None, least: int) -> list[int]:
    """Return a width for each of the first columns: as many as fit, but `least`. A column has its head first.

    A column with more than MIN_TEXT_WIDTH characters may be folded, but not below that. The rest of the
    width goes to columns that need more.
    """
    wanted = [max(map(cell_len, column)) for column in cells]
    if width is None:
        return wanted
    heads = [max(map(len, column[0].split() or [""])) for column in cells]
    widths = [
        max(head, min(MIN_TEXT_WIDTH, max(map(cell_len, column[1:]))))
        for head, column in zip(heads, cells, strict=True)
    ]
    while len(widths) > least and sum(widths) + 3 * len(widths) + 1 > width:
        widths.pop()
    spare = max(width - sum(widths) - 3 * len(widths) - 1, 0)
    for place, at in enumerate(sorted(range(len(widths)), key=lambda n: wanted[n] - widths[n])):
        more = min(wanted[at] - widths[at], spare // (len(widths) - place))
        widths[at] += more
        spare -= more
    return widths


def _shortened(text: str, most: int) -> str:
    return text if cell_len(text) <= most else f"{set_cell_size(text, most - 1)}…"


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float, timedelta)) and not isinstance(value, bool))


def _wide() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get("pgque.wide"))


def print_table(title: str, rows: Iterable[Mapping[str, object]], of: str = "") -> None:
    """Print a table, or that there are no rows. Columns stand in the order of their importance.

    On a terminal the table fits: columns without a value and as many as needed of the last ones are left
    out, long texts are folded and shortened. With --wide everything is printed. `of` is the type of the rows,
    by which `titles` knows what a column means.
    """
    console = plain_console()
    rows = list(rows)
    if not rows:
        console.print(f"{visible(title)}: none")
        return
    wide, most, shortened = _wide(), None if _wide() else line_width(), False
    names: list[str] = []
    cells: list[list[str]] = []
    for name in rows[0]:
        column = [_cell(titles.word(name, row[name])) for row in rows]
        if not wide:
            if names and not any(column):
                continue
            short = [_shortened(text, MAX_CELL) for text in column]
            shortened, column = shortened or short != column, short
        names.append(name)
        cells.append([titles.title(name, of), *column])
    ids = next((n for n, name in enumerate(names) if name not in _IDS), len(names))
    widths = _widths(cells, most, max(ids, 1))
    table = Table()
    for at, (name, width) in enumerate(zip(names, widths, strict=False)):
        number = all(_is_number(row[name]) for row in rows)
        table.add_column(cells[at][0], width=width, overflow="fold", justify="right" if number else "left")
        if most is not None and name in _TEXTS:
            short = [_shortened(text, MAX_LINES * width) for text in cells[at]]
            shortened, cells[at] = shortened or short != cells[at], short
    for line in zip(*(column[1:] for column in cells[: len(widths)]), strict=True):
        table.add_row(*line)
    console.print(visible(title))
    plain_console(max(console.width, sum(widths) + 3 * len(widths) + 1)).print(table)
    left_out = ", ".join(column[0] for column in cells[len(widths) :])
    notes = [f"Left out: {left_out}."] if left_out else []
    notes += ["Long texts are shortened."] if shortened else []
    if notes:
        console.print(f"{' '.join(notes)} --wide shows all.")


def print_rows(title: str, rows: Iterable[object], as_json: bool, shown: Sequence[str] = ()) -> None:
    """Print rows as JSON, or as a table: of the columns `shown`, the most important first, or of all."""
    rows = list(rows)
    found = [as_dict(row) for row in rows]
    if as_json:
        echo(dump(found, indent=2))
        return
    first = [name for name in shown if found]
    if _wide() or not shown:
        first += [name for row in found[:1] for name in row if name not in shown]
    of = type(rows[0]).__name__ if rows else ""
    print_table(title, [{name: row[name] for name in first} for row in found], of)


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address is this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
