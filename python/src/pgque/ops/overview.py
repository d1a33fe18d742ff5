"""What the overview shows, on the web page and in the terminal: what is wrong, and figures of the queues."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import LiteralString

Row = dict[str, Any]

MOST_QUEUES = 5000
MOST_READERS = 200  # consumers of one queue, and workers
PAUSE = 4  # times as long as the database took for an answer, it is not asked again
REMEMBERED = 60.0  # seconds over which rates are calculated

STATES = ("fail", "warn", "ok")

# Which figure a metric is: of several consumers the highest value, or the sum.
METRICS = {
    "pgque_queue_events_total": ("sent", "total"),
    "pgque_queue_retries": ("retries", "total"),
    "pgque_queue_dead_letters": ("dead", "total"),
    "pgque_queue_consumers": ("consumers", "total"),
    "pgque_queue_bytes": ("disk", "total"),
    "pgque_messages_in_flight": ("in_flight", "total"),
    "pgque_consumer_lag_seconds": ("oldest", "highest"),
    "pgque_consumer_pending_events": ("backlog", "highest"),
}

# Who asks, and what this role may see and change.
ROLE_QUERY: LiteralString = """
select current_user::text as name, pgque.version() as version,
  pg_catalog.pg_is_in_recovery() or exists (
    select from pg_catalog.pg_settings as s
    where s.name = 'default_transaction_read_only' and s.reset_val = 'on') as standby,
  pg_catalog.pg_has_role(r.reader, 'usage') as reader, pg_catalog.pg_has_role(r.writer, 'usage') as writer,
  pg_catalog.pg_has_role(r.admin, 'usage') as admin
from (values ('pgque_reader'::name, 'pgque_writer'::name, 'pgque_admin'::name)) as r (reader, writer, admin)
"""

# The queries of the overview. Each takes `most`, how many rows it may return.
QUEUES_QUERY: LiteralString = (
    "select queue_name, ev_per_sec, queue_paused from pgque.get_queue_info() limit %(most)s"
)
PROBLEMS_QUERY: LiteralString = (
    "select check_name, queue, status, detail, advice from pgque.health() where status <> 'ok'"
    " order by status <> 'fail', queue nulls first, check_name limit %(most)s"
)
METRICS_QUERY: LiteralString = (
    "select metric, queue, max(value) as highest, sum(value) as total from pgque.metrics()"
    " where metric = any (%(metrics)s) and queue is not null group by metric, queue limit %(most)s"
)
# Of all queues that a role without pgque_reader has a right to.
OWN_PROBLEMS_QUERY: LiteralString = PROBLEMS_QUERY.replace("health()", "health(null)")
OWN_METRICS_QUERY: LiteralString = METRICS_QUERY.replace("metrics()", "metrics(null)")
# Of one queue, which they take as `queue`.
ONE_PROBLEMS_QUERY: LiteralString = PROBLEMS_QUERY.replace("health()", "health(%(queue)s)")
ONE_METRICS_QUERY: LiteralString = METRICS_QUERY.replace("metrics()", "metrics(%(queue)s)")
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
METRICS_ASKED: Mapping[str, object] = {"metrics": list(METRICS), "most": len(METRICS) * MOST_QUEUES}
MOST: Mapping[str, object] = {"most": MOST_QUEUES}

# Shown in place of the checks.
SLOW: Row = {
    "check_name": "health",
    "queue": None,
    "status": "warn",
    "detail": "the checks took too long, so they are not shown",
    "advice": "Wait until the server is less busy, or run pgque health.",
}


@dataclass(slots=True)
class Figures:
    """What the overview knows of one queue; None is unknown to this role."""

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
        """fail, warn or ok, by the worst check."""
        found = {row["status"] for row in self.problems}
        return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


def figures(rows: Iterable[Row]) -> dict[str, Figures]:
    """Return the queues of QUEUES_QUERY by name."""
    return {
        row["queue_name"]: Figures(row["queue_name"], bool(row["queue_paused"]), row["ev_per_sec"])
        for row in rows
    }


def add_problems(queues: Mapping[str, Figures], rows: Iterable[Row]) -> None:
    """Give each queue the failed checks that name it."""
    for row in rows:
        if row["queue"] in queues:
            queues[row["queue"]].problems.append(row)


def add_metrics(queues: Mapping[str, Figures], rows: Iterable[Row]) -> None:
    """Fill in what METRICS_QUERY found."""
    for row in rows:
        if row["queue"] in queues:
            figure, which = METRICS[row["metric"]]
            setattr(queues[row["queue"]], figure, row[which])


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
    """Counts of the last minute, from which the rates of what leaves are calculated. For one thread."""

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
