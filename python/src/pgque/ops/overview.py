"""The overview of the web page and the terminal: problems, and figures of the queues."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .problems import kind

if TYPE_CHECKING:
    from typing_extensions import LiteralString

Row = dict[str, Any]

MOST_QUEUES = 5000
MOST_READERS = 200  # consumers of one queue, and workers
PAUSE = 4  # times as long as the database took for an answer, it is not asked again
REMEMBERED = 60.0  # seconds over which rates are calculated

STATES = ("fail", "warn", "ok")

# The role of the session, and its rights.
ROLE_QUERY: LiteralString = """
select current_user::text as name, pgque.version() as version,
  pg_catalog.pg_is_in_recovery() or exists (
    select from pg_catalog.pg_settings as s
    where s.name = 'default_transaction_read_only' and s.reset_val = 'on') as standby,
  pg_catalog.pg_has_role(r.reader, 'usage') as reader, pg_catalog.pg_has_role(r.writer, 'usage') as writer,
  pg_catalog.pg_has_role(r.admin, 'usage') as admin
from (values ('pgque_reader'::name, 'pgque_writer'::name, 'pgque_admin'::name)) as r (reader, writer, admin)
"""

# Of all queues that the role has a right to, or of one. Each takes `most`, how many rows it may return.
OVERVIEW_QUERY: LiteralString = "select o.* from pgque.overview() as o limit %(most)s"
ONE_QUERY: LiteralString = "select o.* from pgque.overview(%(queue)s) as o limit %(most)s"
# Figures that need no checks, for the case that the checks take too long.
QUEUES_QUERY: LiteralString = (
    "select i.queue_name as queue, i.queue_paused as paused, i.ev_per_sec"
    " from pgque.get_queue_info() as i limit %(most)s"
)
READERS_QUERY: LiteralString = (
    "select consumer_name, lag, last_seen, last_tick, current_batch is not null as open_batch,"
    " pending_events, role, skipped_events from pgque.get_consumer_info(%(queue)s)"
    " order by role = 'coop_member', lag desc nulls last, consumer_name limit %(most)s"
)
WORKERS_QUERY: LiteralString = (
    "select consumer, worker, batches, messages, waiting, pgque.clock() - last_seen as last_seen,"
    " case when lease_until < 'infinity' then lease_until - pgque.clock() end as lease_left"
    " from pgque.list_workers(%(queue)s) order by last_seen nulls last, consumer, worker limit %(most)s"
)
MOST: Mapping[str, object] = {"most": MOST_QUEUES + 1}  # the server's row is one

# Shown in place of the checks.
SLOW: Row = {
    "check_name": "health",
    "queue": None,
    "status": "warn",
    "detail": "the checks took too long, so they are not shown",
    "advice": "Wait until the server is less busy, or run pgque health.",
}


@dataclass(frozen=True, slots=True)
class Totals:
    """The figures of many queues together; None is unknown."""

    states: Mapping[str, int]  # how many queues are in each state
    rate: float | None
    out: float | None
    backlog: float | None
    oldest: float | None
    dead: float | None


@dataclass(slots=True)
class Figures:
    """The figures of one queue; None is unknown to this role."""

    name: str
    paused: bool
    rate: float | None
    out: float | None = None  # of the slowest consumer
    sent: float = 0  # messages, ever
    backlog: float | None = None
    oldest: float | None = None
    retries: float | None = None
    dead: float | None = None
    in_flight: float | None = None
    disk: float | None = None
    consumers: float = 0
    problems: list[Row] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return the status of the worst check: fail, warn or ok."""
        found = {row["status"] for row in self.problems}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


def read(rows: Iterable[Row]) -> tuple[list[Row], dict[str, Figures]]:
    """Return the problems, the worst first, and the queues by name, from rows of OVERVIEW_QUERY."""
    problems: list[Row] = []
    queues: dict[str, Figures] = {}
    for row in rows:
        name = row["queue"]
        found = [
            {"queue": name, "kind": kind(problem, bool(row["paused"]), bool(row["ticker_paused"])), **problem}
            for problem in row.get("problems") or ()
        ]
        problems += found
        if name is not None:
            queues[name] = Figures(
                name,
                bool(row["paused"]),
                row["ev_per_sec"],
                sent=row.get("events") or 0,
                backlog=row.get("pending_events"),
                oldest=row.get("lag_seconds"),
                retries=row.get("retries"),
                dead=row.get("dead_letters"),
                in_flight=row.get("in_flight"),
                disk=row.get("bytes"),
                consumers=row.get("consumers") or 0,
                problems=found,
            )
    problems.sort(key=worst_first)
    return problems, queues


def worst_first(problem: Row) -> tuple[bool, bool, str, str]:
    """Return a sort key for problems: failed checks first, and those of the server before a queue's."""
    return (
        problem["status"] != "fail",
        problem["queue"] is not None,
        problem["queue"] or "",
        problem["check_name"],
    )


def totals(queues: Collection[Figures]) -> Totals:
    """Return the sums of the figures of these queues."""

    def known(name: str) -> list[float]:
        return [value for queue in queues if (value := getattr(queue, name)) is not None]

    def total(name: str) -> float | None:
        return sum(known(name)) if known(name) else None

    states = {state: sum(queue.state == state for queue in queues) for state in STATES}
    oldest = max(known("oldest"), default=None)
    return Totals(states, total("rate"), total("out"), total("backlog"), oldest, total("dead"))


Counts = dict[str, tuple[float, float]]


def counts(queues: Iterable[Figures]) -> Counts:
    """Return of each queue how many messages were ever sent, and how many the slowest consumer has ahead."""
    return {queue.name: (queue.sent, queue.backlog) for queue in queues if queue.backlog is not None}


def add_rates(queues: Iterable[Figures], earlier: Counts, seconds: float) -> None:
    """Fill in how many messages a second the slowest consumer finished since the counts of then."""
    for queue in queues:
        if queue.name in earlier and queue.backlog is not None:
            sent, backlog = earlier[queue.name]
            queue.out = max(queue.sent - sent - (queue.backlog - backlog), 0) / seconds


class History:
    """Counts of the last minute, from which the rates of finished messages are calculated. For one thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, Counts]] = []

    def note(self, queues: Collection[Figures]) -> None:
        """Remember the counts, and fill in the rates since the oldest ones that are kept."""
        now = time.monotonic()
        self._kept.append((now, counts(queues)))
        while len(self._kept) > 2 and now - self._kept[1][0] > REMEMBERED:
            self._kept.pop(0)
        since, earlier = self._kept[0]
        if now > since:
            add_rates(queues, earlier, now - since)
