"""The first page: the state of all queues, each of them, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from starlette.responses import Response

from ..errors import PgqueError
from ..ops.overview import (
    MOST,
    ONE_QUERY,
    OVERVIEW_QUERY,
    QUEUES_QUERY,
    SLOW,
    STATES,
    Figures,
    add_rates,
    counts,
    read,
    totals,
)
from ..ops.problems import grouped
from . import chart, export, send
from .database import Parameters
from .page import Page, Row

if TYPE_CHECKING:
    from typing_extensions import LiteralString

PER_PAGE = 50
MOST_OF_GROUP = 20  # queues that are listed below a kind of problems

ORDERS = {
    "state": "State",
    "name": "Queue",
    "backlog": "Backlog",
    "oldest": "Oldest pending",
    "rate": "In, per second",
    "out": "Out, per second",
    "retries": "Retries",
    "dead": "Dead letters",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """Figures that all viewers with the same rights share, and when they were read."""

    problems: list[Row]
    queues: list[Figures]
    at: datetime


def show(page: Page) -> Response:
    """Show the state of all queues together, the queues, 50 a page, the problems by kind, and charts."""
    if page.only_sends:
        return send.choose(page)
    taken = shared(page)
    if taken is None:
        return page.shown("wait.html")
    problems, queues = taken.problems, taken.queues
    wanted = page.form.get("name").lower()
    found = [queue for queue in queues if wanted in queue.name.lower()]
    order = page.form.get("order", "state")
    if order not in ORDERS:
        order = "state"
    if order == "state":
        found.sort(key=lambda queue: (STATES.index(queue.state), not queue.paused))
    elif order != "name":
        found.sort(key=lambda queue: -(getattr(queue, order) or 0))
    if export.wanted(page):
        return export.answer(page, "queues", export.listed([_row(queue) for queue in found]))
    pages = max((len(found) + PER_PAGE - 1) // PER_PAGE, 1)
    number = min(max(page.form.number("page", 1), 1), pages)
    return page.shown(
        "overview.html",
        problems=len(problems),
        groups=grouped(problems),
        totals=totals(queues),
        most=MOST_OF_GROUP,
        queues=found[(number - 1) * PER_PAGE : number * PER_PAGE],
        found=len(found),
        total=len(queues),
        orders=ORDERS,
        order=order,
        name=page.form.get("name"),
        number=number,
        pages=pages,
        charts=chart.shown(page, seen_by=_seen_by(page)) if queues else None,
        at=taken.at,
    )


def _row(queue: Figures) -> Row:
    """Return a queue as a row of a file: its state, then its figures."""
    figures = {one.name: getattr(queue, one.name) for one in fields(queue) if one.name != "problems"}
    return {"name": queue.name, "state": queue.state} | figures


def shared(page: Page) -> Shown | None:
    """Return problems and figures, or None while they are read for the first time.

    They are the same for all members of pgque_reader, so taken once for them.
    """
    key = f"figures {_seen_by(page)}"
    return page.site.samples.soon(page.session.database, key, page.elsewhere(_taken))


def _seen_by(page: Page) -> str:
    """Return a key that is the same for roles that see the same queues."""
    return "" if page.role["reader"] else f"of {_rights(page)}"


def _rights(page: Page) -> str:
    """Return a key that changes with the role and its rights, so that no role sees figures of others."""
    return str(
        page.value(
            "select concat((select r.oid from pg_catalog.pg_roles as r where r.rolname = current_user), ' ',"
            " pg_catalog.md5(pg_catalog.string_agg(m::text, ' ' order by m.queue_name)))"
            " from pgque.my_rights() as m"
        )
    )


def _taken(page: Page) -> Shown:
    at = datetime.now(timezone.utc)
    rows = _in_time(page, OVERVIEW_QUERY, MOST)
    if rows is None:
        _, queues = read(page.rows(QUEUES_QUERY, MOST))
        problems = [SLOW]
    else:
        problems, queues = read(rows)
    if page.role["reader"]:
        page.site.samples.remember(page.session.database, counts(queues.values()))
        _rate(page, queues)
    return Shown(problems, list(queues.values()), at)


def of_one(page: Page, info: Row) -> Figures:
    """Return the figures of one queue, taken now."""
    name = info["queue_name"]
    rows = _in_time(page, ONE_QUERY, {"queue": name, "most": 2})
    if rows is None:
        queue = Figures(
            name, bool(info["queue_paused"]), info["ev_per_sec"], problems=[{**SLOW, "queue": name}]
        )
    else:
        queue = read(rows)[1][name]
    if page.role["reader"]:
        _rate(page, {name: queue})
    return queue


def _rate(page: Page, queues: dict[str, Figures]) -> None:
    """Fill in how many messages a second the slowest consumer of each queue finished lately."""
    earlier, seconds = page.site.samples.earlier(page.session.database)
    if seconds > 1:
        add_rates(queues.values(), earlier, seconds)


def _in_time(page: Page, query: LiteralString, parameters: Parameters) -> list[Row] | None:
    """Return rows, or None if the database took too long: the rest of the page is shown all the same."""
    try:
        return page.rows(query, parameters)
    except PgqueError as error:
        if error.sqlstate != "57014":
            raise
        return None
