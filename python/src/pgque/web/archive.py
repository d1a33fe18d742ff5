"""The archive of a queue: find a message, and send it again."""

from __future__ import annotations

from starlette.responses import Response

from .page import Page

PER_PAGE = 50
FILTERS = ("type", "key", "consumer", "since", "until", "text")


def show(page: Page) -> Response:
    """Show the newest archived messages that match."""
    name = page.form.need("queue")
    filters = {key: page.form.get(key) for key in FILTERS}
    longer = bool(page.form.get("longer"))
    rows = page.search(
        "select a.archive_id, a.msg_id, a.outcome, a.consumer_name, a.type, a.key, a.sent_at, a.archived_at,"
        " left(a.payload, 200) as payload, a.payload_bytes is not null as is_bytes"
        " from pgque.archive_list(%(queue)s, %(most)s, since => %(since)s::timestamptz,"
        " until => %(until)s::timestamptz, only_type => %(type)s, only_key => %(key)s,"
        " only_consumer => %(consumer)s, matching => %(text)s, before_id => %(before)s) as a",
        {
            **page.filters(FILTERS),
            "queue": name,
            "before": page.form.number("before", 2**63 - 1),
            "most": PER_PAGE,
        },
    )
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
    number = page.value("select pgque.archive_replay(%s)", [page.form.number("id")])
    return page.done(
        f"Message {number} was sent to every consumer.", "/archive", queue=page.form.need("queue")
    )
