"""Recurring messages: when they run, and run, pause or resume them."""

from __future__ import annotations

from starlette.responses import Response

from ..errors import PgqueBadArgumentError
from .page import Page

MOST = 500


def show(page: Page) -> Response:
    """List the recurring messages that the role may see."""
    rows = page.rows(
        "select r.name, r.queue_name, r.status, r.cron, r.timezone, r.next_run, r.last_run, r.last_msg_id,"
        " r.last_error, r.type_name, r.created_by from pgque.list_recurring() as r"
        " order by r.status = 'active', r.next_run nulls last, r.name limit %s",
        [MOST + 1],
    )
    for row in rows:
        row["may"] = page.writable and (
            row["created_by"] == page.role["name"] or page.may("admin", row["queue_name"])
        )
    return page.shown("recurring.html", queue=None, rows=rows[:MOST], more=len(rows) > MOST)


def do(page: Page) -> Response:
    """Run, pause or resume one."""
    name, action = page.form.need("name"), page.form.need("action")
    if action == "run":
        number = page.value("select pgque.run_recurring(%s)", [name])
        return page.done(f"{name}: message {number} was sent.", "/recurring")
    if action == "pause":
        page.value("select pgque.pause_recurring(%s)", [name])
        return page.done(f"{name} is paused.", "/recurring")
    if action == "resume":
        page.value("select pgque.resume_recurring(%s)", [name])
        return page.done(f"{name} is active again. Runs that were missed are not caught up.", "/recurring")
    raise PgqueBadArgumentError(f"no such action: {action[:50]!r}")
