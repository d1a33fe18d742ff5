"""The command that shows the overview in a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta

import click
from rich.cells import cell_len

from ..errors import PgqueError
from ..top.columns import COLUMNS, LEAST, cells, fitting, ordered
from ..top.source import Overview, Source
from ..types import HealthCheck
from .common import dsn_option, echo, length_option, line_width
from .health import print_checks

LEAST_INTERVAL = timedelta(seconds=1)
BETWEEN = 1.0  # seconds between the two readings of --once


def _interactive() -> bool:
    streams = (sys.stdin, sys.stdout, sys.stderr)
    terminals = all(stream is not None and stream.isatty() for stream in streams)
    return terminals and os.environ.get("TERM", "") not in ("", "dumb")


async def _read(dsn: str) -> Overview:
    source = Source(dsn, read_only=True)
    try:
        # The rate of what leaves is the difference of two readings.
        await source.overview()
        await asyncio.sleep(BETWEEN)
        return await source.overview()
    finally:
        await source.close()


def _print(overview: Overview) -> None:
    print_checks(
        [
            HealthCheck(row["check_name"], row["queue"], row["status"], row["detail"], row["advice"])
            for row in overview.problems
        ]
    )
    rows = [cells(queue) for queue in ordered(overview.queues.values(), COLUMNS[0].name)]
    rows.insert(0, [column.title for column in COLUMNS])
    width = line_width()
    kept = fitting(COLUMNS, width)
    fixed = sum(COLUMNS[at].width for at in kept)
    longest = max(cell_len(text) for row in rows for text in row) + 1
    left = longest if width is None else max(width - fixed, LEAST)
    echo("")
    for row in rows:
        echo("".join(COLUMNS[at].shown(row[at], left) for at in kept).rstrip())


@click.command()
@dsn_option
@length_option("--interval", "Time between two refreshes, at least 1s; longer after a slow answer.", "5s")
@click.option("--read-only", is_flag=True, help="Offer no change, and have the database refuse it.")
@click.option("--once", is_flag=True, help="Print one frame as text, and exit.")
def top(dsn: str, interval: timedelta, read_only: bool, once: bool) -> None:
    """Show the queues live in the terminal: failed checks first, then rates, backlog and dead letters.

    The last line shows the keys. If standard input or output is no terminal, one frame is printed as text.
    Needs pgque[top], except for such a frame.
    """
    if interval < LEAST_INTERVAL:
        raise click.BadParameter("at least 1s", param_hint="--interval")
    if once or not _interactive():
        _print(asyncio.run(_read(dsn)))
        return
    try:
        from ..top import app
    except ImportError as error:
        raise PgqueError(
            f"pgque top needs Textual: {error}",
            hint='pip install "./python[top]" (in the repository of pgque), or print one frame: --once',
        ) from error
    sys.exit(app.run(dsn, interval.total_seconds(), read_only))


COMMANDS: list[click.Command] = [top]
