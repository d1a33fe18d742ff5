"""What the commands have in common: options, and how rows are printed."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import ParamSpec, TypeVar

import click
from rich.console import Console
from rich.table import Table

P = ParamSpec("P")
R = TypeVar("R")

NOTHING = 3

EXIT_CODES = """
\b
Exit codes:
  0  done
  1  error: the database, or pgque, refused
  2  wrong usage
  3  nothing received or settled, a health check failed, or nothing ticks after start
  4  health: warnings only

The database is the one of --dsn or PGQUE_DSN; what they leave out comes from PGHOST, PGPORT,
PGDATABASE, PGUSER, PGPASSWORD and the other PG* variables.
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


def json_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add the option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(command)


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
    try:
        return timedelta(seconds=int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2][0]])
    except OverflowError as error:
        raise click.BadParameter(f"{text!r} is too long") from error


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


def dump(value: object, indent: int | None = None) -> str:
    """Return JSON text."""
    return json.dumps(value, ensure_ascii=False, default=_plain, indent=indent)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, timedelta):
        return str(timedelta(seconds=round(value.total_seconds(), 1))).removesuffix("00000")
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return str(value)


def print_table(title: str, rows: Iterable[Mapping[str, object]]) -> None:
    """Print a table, or that there are no rows."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    rows = list(rows)
    if not rows:
        console.print(f"{title}: none", markup=False, highlight=False)
        return
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(_cell(value).replace("[", r"\[") for value in row.values()))
    console.print(table)


def print_rows(title: str, rows: Iterable[object], as_json: bool, shown: Sequence[str] = ()) -> None:
    """Print rows as JSON, or as a table of all columns or of those `shown`."""
    found = [as_dict(row) for row in rows]
    if as_json:
        click.echo(dump(found, indent=2))
    else:
        print_table(title, [{name: row[name] for name in shown or row} for row in found])
