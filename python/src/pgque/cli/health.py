"""The commands that check the health, and those that start and stop the ticker."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import timedelta

import click

from ..errors import PgqueError
from ..ops.units import readable
from ..twins.client import PgqueClient
from ..types import HealthCheck
from .common import EXIT_NOTHING, as_dict, connect, dsn_option, dump, echo, length_option

EXIT_WARNINGS = 4
WATCH_INTERVAL = 5.0  # seconds between two checks of --watch
MIN_WIDTH = 40  # characters a line, however narrow the terminal is

# -- the advice of health() as commands ---------------------------------------

_LITERAL = r"E?'(?:[^']|'')*'"
_STATEMENT = re.compile(
    rf"(?P<call>select (?:\* from )?pgque\.(?P<function>\w+)\((?P<arguments>(?:[^()']|{_LITERAL})*)\))"
    r"|(?P<shell>pgque ticker)"
    r"|(?P<other>(?:alter system set|alter role|grant|commit prepared|rollback prepared)"
    rf" (?:[^;.,']|\.\w|{_LITERAL})*"
    r"|revoke (?:[^;\"]|\"(?:[^\"]|\"\")*\")*)"
)
# Functions that have a command of pgque; {0} and so on are the arguments. All others are for psql.
_COMMANDS = {
    "start": "start",
    "status": "status",
    "resume": "resume {0}",
    "alter_queue": "config set {0} {1} {2}",
    "subscribe": "subscribe {0} {1} --from {2}",
    "unsubscribe": "unsubscribe {0} {1}",
    "dlq_inspect": "dlq list {0}",
    "dlq_requeue_all": "dlq requeue --all {0}",
    "drop_queue": "drop {0} --force",
}


def _argument(literal: str) -> str:
    """Return the value of an SQL literal."""
    text = literal.strip()
    escaped = text.startswith("E")
    text = text.removeprefix("E").removeprefix("'").removesuffix("'").replace("''", "'")
    return text.replace("\\\\", "\\") if escaped else text


def _one_setting(*arguments: str) -> list[str]:
    """Return queue, setting and value of an `alter_queue` that has one setting; nothing of any other."""
    try:
        queue, config = arguments
        ((name, value),) = json.loads(config).items()
    except (ValueError, AttributeError):
        return []
    return [queue, name, value if isinstance(value, str) else json.dumps(value)]


def _command(match: re.Match[str]) -> str:
    """Return a statement of an advice as a command for a shell."""
    if match["shell"]:
        return match["shell"]
    if match["call"]:
        pattern = _COMMANDS.get(match["function"])
        arguments = [_argument(text) for text in re.findall(rf"{_LITERAL}|[^',\s]+", match["arguments"])]
        if match["function"] == "alter_queue":
            arguments = _one_setting(*arguments)
        if pattern is not None and len(arguments) >= pattern.count("{"):
            return "pgque " + pattern.format(*map(shlex.quote, arguments))
    return f"psql -c {shlex.quote(match[0].strip())}"


def advice(text: str | None) -> list[tuple[str, bool]]:
    """Return the advice of `health()` in pieces: texts, and commands to type in a shell (True)."""
    pieces: list[tuple[str, bool]] = []
    rest = text or ""
    while match := _STATEMENT.search(rest):
        pieces += [(rest[: match.start()].strip(" ;,."), False), (_command(match), True)]
        rest = rest[match.end() :]
    pieces.append((rest.strip(" ;,."), False))
    return [piece for piece in pieces if piece[0]]


# -- commands ------------------------------------------------------------------


def worst_first(checks: Sequence[HealthCheck]) -> list[HealthCheck]:
    """Return the checks, failed ones first, then warnings."""
    return sorted(checks, key=lambda check: ("fail", "warn", "ok").index(check.status))


def _exit_code(checks: Sequence[HealthCheck]) -> int:
    found = {check.status for check in checks}
    return EXIT_NOTHING if "fail" in found else EXIT_WARNINGS if "warn" in found else 0


def print_checks(checks: Sequence[HealthCheck]) -> None:
    """Print the checks with their advice, wrapped at the terminal's width."""
    width = max(shutil.get_terminal_size().columns, MIN_WIDTH)

    def wrapped(text: str, indent: str) -> None:
        echo(
            textwrap.fill(
                text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
        )

    for check in checks:
        where = f"queue {check.queue}, {check.check_name}" if check.queue is not None else check.check_name
        wrapped(f"{check.status:<4}  {where}", "")
        wrapped(readable(check.detail or ""), " " * 6)
        for piece, command in advice(check.advice):
            if command:
                echo(f"      $ {piece}")
            else:
                wrapped(piece, " " * 6)
    if not checks:
        echo("all is well")


@click.command()
@dsn_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--all", "everything", is_flag=True, help="Also show the checks that are ok.")
@click.option(
    "--watch", is_flag=True, help=f"Repeat the checks every {WATCH_INTERVAL:.0f} seconds, until Ctrl-C."
)
def health(dsn: str, as_json: bool, everything: bool, watch: bool) -> None:
    """Show what is wrong, the worst first, and the commands that mend it.

    The exit code is 0 when all is well, 3 when a check fails, 4 when there are warnings only.
    """
    code = 0

    def show() -> int:
        with connect(dsn) as client:
            found = worst_first(client.monitor.health())
        shown = [c for c in found if everything or c.status != "ok" or c.check_name == "standby"]
        if watch and sys.stdout.isatty():
            click.clear()
        if as_json:
            commands = [[piece for piece, command in advice(check.advice) if command] for check in shown]
            rows = [{**as_dict(check), "commands": c} for check, c in zip(shown, commands, strict=True)]
            echo(dump(rows, indent=None if watch else 2))
        else:
            if watch:
                echo(time.strftime("%Y-%m-%d %H:%M:%S"))
            print_checks(shown)
        return _exit_code(found)

    try:
        while True:
            try:
                code = show()
            except PgqueError as error:
                if not watch:
                    raise
                code = 1
                echo(f"pgque: {error}", err=True)
            if not watch:
                break
            sys.stdout.flush()
            time.sleep(WATCH_INTERVAL)
    except KeyboardInterrupt:
        pass
    sys.exit(code)


def _states(client: PgqueClient) -> dict[str, tuple[str, str]]:
    return {row.component: (row.status or "", row.detail or "") for row in client.monitor.status()}


@click.command()
@dsn_option
@length_option("--wait", "How long to wait for the first tick.", default="90s")
def start(dsn: str, wait: timedelta) -> None:
    """Start the ticker in pg_cron, and wait until it ticks.

    The exit code is 3 when nothing ticks in that time.
    """
    with connect(dsn) as client:
        client.admin.start()
    deadline = time.monotonic() + wait.total_seconds()
    with connect(dsn, autocommit=True) as client:
        while True:
            states = _states(client)
            runs, fails = states["ticker"][0] == "running", states["scheduler"][0] == "failing"
            if runs and not fails:
                echo(f"ticking: {states['ticker'][1]}")
                return
            if fails or time.monotonic() > deadline:
                break
            time.sleep(min(0.5, max(deadline - time.monotonic(), 0.05)))
        found = next(check for check in client.monitor.health() if check.check_name == "ticker")
    echo(f"pgque: the ticker is scheduled, but does not run{' all the time' if runs else ''}", err=True)
    print_checks([found])
    sys.exit(EXIT_NOTHING)


@click.command()
@dsn_option
def stop(dsn: str) -> None:
    """Stop the running ticker loop, and remove it from the schedule of pg_cron."""
    with connect(dsn) as client:
        client.admin.stop()
    echo("stopped")


COMMANDS: list[click.Command] = [health, start, stop]
