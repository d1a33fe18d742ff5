"""Changes that roles made by hand."""

from __future__ import annotations

import re

from starlette.responses import Response

from ..errors import PgqueBadArgumentError
from . import export
from .page import Page, Row

PER_PAGE = 100


def show(page: Page) -> Response:
    """Show the newest actions, or those before a time; of all queues, or of one."""
    queue, before = page.form.get("of"), page.form.get("before")
    if before and not re.fullmatch(r"[0-9T:.+-]+", before):
        raise PgqueBadArgumentError(f"not a time: {before[:50]!r}")

    def listed(most: int, last: Row | None) -> list[Row]:
        return page.rows(
            "select a.at, a.role_name::text as role, a.application, a.call, a.queue, a.args"
            " from pgque.list_actions(%s, %s, %s::timestamptz) as a",
            [queue or None, most, (before or None) if last is None else last["at"]],
        )

    if export.wanted(page):
        return export.answer(page, f"actions-{queue}" if queue else "actions", listed)
    rows = listed(PER_PAGE, None)
    return page.shown(
        "actions.html",
        rows=rows,
        of=queue,
        before=before,
        following=rows[-1]["at"].isoformat() if len(rows) == PER_PAGE else None,
    )
