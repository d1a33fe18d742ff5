"""The first page: what is wrong, and all queues."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from starlette.responses import Response

from ..errors import PgqueError, PgquePermissionDeniedError, PgqueQueueNotFoundError
from ..ops.overview import (
    METRICS,
    METRICS_ASKED,
    METRICS_QUERY,
    MOST,
    ONE_METRICS_QUERY,
    ONE_PROBLEMS_QUERY,
    OWN_METRICS_QUERY,
    OWN_PROBLEMS_QUERY,
    PROBLEMS_QUERY,
    QUEUES_QUERY,
    SLOW,
    STATES,
    Figures,
    add_metrics,
    add_problems,
    add_rates,
    counts,
    figures,
)
from . import chart, export
from .database import Parameters
from .page import Page, Row

if TYPE_CHECKING:
    from typing_extensions import LiteralString

PER_PAGE = 50
MOST_PROBLEMS = 100
MOST_OF_ONE = 100  # problems, and figures, of one queue
CHARTED = 20  # busiest queues whose rates are added up

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
    """What all viewers with the same rights see, and when it was taken."""

    problems: list[Row]
    queues: list[Figures]
    at: datetime


def show(page: Page) -> Response:
    """Show the problems, a chart of the rates, and the queues, 50 a page."""
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
        problems=problems[:MOST_PROBLEMS],
        more_problems=max(len(problems) - MOST_PROBLEMS, 0),
        queues=found[(number - 1) * PER_PAGE : number * PER_PAGE],
        found=len(found),
        total=len(queues),
        orders=ORDERS,
        order=order,
        name=page.form.get("name"),
        number=number,
        pages=pages,
        rates=rates(page, queues),
        at=taken.at,
    )


def _row(queue: Figures) -> Row:
    """Return a queue as a row of a file: its state, then its figures."""
    figures = {one.name: getattr(queue, one.name) for one in fields(queue) if one.name != "problems"}
    return {"name": queue.name, "state": queue.state} | figures


def shared(page: Page) -> Shown | None:
    """Return problems and figures, or None if they are being taken for the first time.

    They are the same for all members of pgque_reader, so taken once for them.
    """
    key = "figures" if page.role["reader"] else f"figures of {_rights(page)}"
    return page.site.samples.soon(page.session.database, key, page.elsewhere(_taken))


def _rights(page: Page) -> str:
    """Return what changes with the role and with its rights, so that nobody sees what was seen before."""
    return str(
        page.value(
            "select concat((select r.oid from pg_catalog.pg_roles as r where r.rolname = current_user), ' ',"
            " pg_catalog.md5(pg_catalog.string_agg(m::text, ' ' order by m.queue_name)))"
            " from pgque.my_rights() as m"
        )
    )


def _taken(page: Page) -> Shown:
    at = datetime.now(timezone.utc)
    queues = figures(page.rows(QUEUES_QUERY, MOST))
    reader = page.role["reader"]
    problems = _in_time(page, PROBLEMS_QUERY if reader else OWN_PROBLEMS_QUERY, MOST)
    if problems is None:
        problems = [SLOW]
    add_problems(queues, problems)
    add_metrics(queues, _in_time(page, METRICS_QUERY if reader else OWN_METRICS_QUERY, METRICS_ASKED) or [])
    if reader:
        page.site.samples.remember(page.session.database, counts(queues.values()))
        _rate(page, queues)
    return Shown(problems, list(queues.values()), at)


def of_one(page: Page, info: Row) -> Figures:
    """Return the figures of one queue, taken now."""
    queues = figures([info])
    queue = queues[info["queue_name"]]
    asked = {"queue": queue.name, "metrics": list(METRICS), "most": MOST_OF_ONE}
    problems = _in_time(page, ONE_PROBLEMS_QUERY, asked)
    add_problems(queues, [{**SLOW, "queue": queue.name}] if problems is None else problems)
    add_metrics(queues, _in_time(page, ONE_METRICS_QUERY, asked) or [])
    if page.role["reader"]:
        _rate(page, queues)
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


def rates(page: Page, queues: list[Figures]) -> chart.Chart | None:
    """Return the chart of the busiest queues together, or None without queues or in time."""
    if not queues:
        return None
    busiest = sorted(queues, key=lambda queue: -(queue.rate or 0))[:CHARTED]
    names = [queue.name for queue in busiest]
    key = "rates" if page.role["reader"] else f"rates of {_rights(page)}"
    try:
        return page.site.samples.get(page.session.database, key, lambda: chart.rates(page, names), chart.KEPT)
    except (PgqueQueueNotFoundError, PgquePermissionDeniedError):
        return None  # a queue was dropped since the figures were taken
