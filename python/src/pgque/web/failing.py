"""Messages that keep failing: those that may kill their workers, and those that wait for another retry."""

from __future__ import annotations

import re

from starlette.responses import Response

from .page import Page, Row

MOST_POISON = 100
LOOKED = 2_000  # messages that a page looks at: poison by deliveries, retries by id
MOST_GROUPS = 50
PER_PAGE = 50

_NUMBER = re.compile(r"\d+")


def show(page: Page) -> Response:
    """Show poison messages, retries by error, and the messages that failed most often."""
    name = page.form.need("queue")
    longer = bool(page.form.get("longer"))
    waiting = page.search(
        "select m.msg_id, m.consumer_name as consumer, m.type, m.retry_count, m.receive_count,"
        " left(m.last_error, 1000) as last_error, m.available_at"
        " from pgque.list_messages(%s, 'retry', %s) as m",
        [name, LOOKED],
    )
    poison = page.search(
        "select p.msg_id, p.consumer_name as consumer, p.receive_count, p.last_error, p.status, p.dl_id"
        " from pgque.list_poison(%s, %s) as p where p.status <> 'archived' limit %s",
        [name, LOOKED, MOST_POISON],
    )
    retries = waiting or []
    return page.shown(
        "failing.html",
        queue=name,
        poison=poison or [],
        stopped=poison is None,
        unknown=waiting is None,
        longer=longer,
        retries=sorted(retries, key=lambda row: -row["retry_count"])[:PER_PAGE],
        waiting=len(retries),
        errors=_by_error(retries),
        looked=LOOKED,
        dead=sum(row["dl_id"] is not None for row in poison or []),
        may_admin=page.may_change("admin", name),
    )


def _by_error(rows: list[Row]) -> list[Row]:
    """Return how many rows have the same consumer, type and error, numbers aside, most frequent first."""
    groups: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        error = _NUMBER.sub("N", row["last_error"] or "")[:200]
        group = groups.setdefault(
            (row["consumer"], row["type"], error),
            {"error": error, "consumer": row["consumer"], "type": row["type"], "n": 0, "highest": 0},
        )
        group["n"] += 1
        group["highest"] = max(group["highest"], row["retry_count"])
    return sorted(groups.values(), key=lambda group: -group["n"])[:MOST_GROUPS]


def archive(page: Page) -> Response:
    """Move the dead letters among the poison messages to the archive."""
    name = page.form.need("queue")
    count = page.value("select pgque.archive_poison(%s)", [name])
    return page.done(f"{count:,} {'message' if count == 1 else 'messages'} archived.", "/failing", queue=name)
