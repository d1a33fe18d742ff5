"""The archive of a queue: find a message, and send it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from . import export
from .page import END, SHOWN, Page

if TYPE_CHECKING:
    from typing_extensions import LiteralString

PER_PAGE = 50
FILTERS = ("type", "key", "consumer", "since", "until", "text")


_LISTED = (
    "select a.archive_id, a.msg_id, a.outcome, a.consumer_name, a.type, a.key, a.sent_at, a.archived_at,"
    " a.receive_count, coalesce(octet_length(a.payload), octet_length(a.payload_bytes), 0) as payload_size,"
    " left(a.payload, %(cut)s) as payload, substr(a.payload_bytes, 1, %(cut)s) as payload_bytes"
    " from pgque.archive_list(%(queue)s, %(most)s, since => %(since)s::timestamptz,"
    " until => %(until)s::timestamptz, only_type => %(type)s, only_key => %(key)s,"
    " only_consumer => %(consumer)s, matching => %(text)s, before_id => %(before)s) as a"
)


REPLAY: LiteralString = "select pgque.archive_replay(%s)"


def show(page: Page) -> Response:
    """Show the newest archived messages that match."""
    name = page.form.need("queue")
    filters = {key: page.form.get(key) for key in FILTERS}
    longer = bool(page.form.get("longer"))
    asked = {**page.filters(FILTERS), "queue": name, "before": page.form.number("before", END)}
    if export.wanted(page):
        following = export.searched(page, _LISTED, asked, "archive_id")
        return export.answer(page, f"archive-{name}", following)
    rows = page.search(_LISTED, {**asked, "most": PER_PAGE, "cut": SHOWN})
    return page.shown(
        "archive.html",
        queue=name,
        rows=rows or [],
        stopped=rows is None,
        longer=longer,
        filters=filters,
        filtered=any(filters.values()),
        before=page.form.get("before"),
        following=rows[-1]["archive_id"] if rows and len(rows) == PER_PAGE else None,
        may_admin=page.may_change("admin", name),
    )


def replay(page: Page) -> Response:
    """Send an archived message again."""
    number = page.value(REPLAY, [page.form.number("id")])
    return page.done(
        f"Message {number} was sent to every consumer.", "/archive", queue=page.form.need("queue")
    )
