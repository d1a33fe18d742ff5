"""The messages of a queue, and the page of one message."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from ..errors import PgqueMessageNotFoundError
from .change import Statement
from .look import MOST_SHOWN
from .page import Page, Row

LOOKED = 2_000  # next messages that a page looks at for a role that may not list all
PER_PAGE = 50
MOST_LETTERS = 10_000  # newest dead letters whose reasons are looked for
LIVE = ("pending", "processing", "delayed", "retry", "expired")
STATES = (*LIVE, "dead", "failed", "archived")

# What a list shows of a payload; the page of one message shows more of it.
_COLUMNS = """
m.msg_id, m.consumer_name, m.status, m.type, left(m.payload, 200) as payload,
m.payload_bytes is not null as is_bytes, m.key, m.created_at, m.receive_count, m.last_error
"""

# After the id 0 a message has all its rows on one page, so a page may have a few more.
_LISTED = (
    "select "
    + _COLUMNS
    + """
from pgque.list_messages(%(queue)s, %(status)s, %(most)s, %(type)s, %(key)s, %(consumer)s,
  %(since)s::timestamptz, %(until)s::timestamptz, %(text)s, %(after)s) as m
"""
)

_PEEKED = (
    "select "
    + _COLUMNS
    + """
from (
  select null::text as consumer_name, 'pending' as status, p.* from pgque.peek(%(queue)s, %(looked)s) as p
) as m
where (%(type)s::text is null or m.type = %(type)s) and (%(key)s::text is null or m.key = %(key)s)
  and (%(since)s::timestamptz is null or m.created_at >= %(since)s::timestamptz)
  and (%(until)s::timestamptz is null or m.created_at < %(until)s::timestamptz)
  and (%(text)s::text is null
    or strpos(lower(concat_ws(' ', m.payload, m.headers::text, m.last_error)), lower(%(text)s)) > 0)
  and m.msg_id > %(after)s
order by m.msg_id limit %(most)s
"""
)

_WHOLE = """
m.type, m.key, m.created_at, m.headers, left(m.payload, %(most)s) as payload,
substr(m.payload_bytes, 1, %(most)s) as payload_bytes,
coalesce(octet_length(m.payload), octet_length(m.payload_bytes), 0) as size,
case when isfinite(m.expires_at) then m.expires_at end as expires_at
"""

_STATE = """
m.consumer_name, m.status, m.receive_count, m.retry_count,
case when isfinite(m.available_at) then m.available_at end as available_at, m.worker, m.batch_id, m.last_error
"""

FILTERS = ("status", "type", "key", "consumer", "since", "until", "text")


def show(page: Page) -> Response:
    """Show messages of a queue by state and filter; without the right to administer it, the next ones."""
    name, form = page.form.need("queue"), page.form
    admin = page.may("admin", name)
    filters = {key: form.get(key) for key in FILTERS}
    asked = page.filters(FILTERS)
    asked |= {"queue": name, "after": form.number("after", 0), "most": PER_PAGE, "looked": LOOKED}
    longer = bool(form.get("longer"))
    rows = page.search(_LISTED, asked) if admin else page.rows(_PEEKED, asked)
    return page.shown(
        "messages.html",
        queue=name,
        messages=rows or [],
        stopped=rows is None,
        longer=longer,
        looked=LOOKED,
        states=STATES,
        is_admin=admin,
        filters=filters,
        filtered=any(filters.values()),
        after=form.get("after"),
        following=rows[-1]["msg_id"] if rows and len(rows) >= PER_PAGE else None,
        may_send=page.may_change("produce", name),
    )


def show_one(page: Page) -> Response:
    """Show one message: its payload, and where each consumer has it."""
    name, number = page.form.need("queue"), page.form.number("id")
    asked: dict[str, object] = {"queue": name, "id": number, "most": MOST_SHOWN, "looked": LOOKED}
    admin = page.may("admin", name)
    states, message = _found(page, asked) if admin else _found_by_consumer(page, asked)
    return page.shown(
        "message.html",
        status=200 if states else 404,
        queue=name,
        number=number,
        states=states,
        message=message,
        letters=_letters(page, name, states) if admin else [],
        most_shown=MOST_SHOWN,
        trace=_trace(message.get("headers")),
        may_admin=page.may_change("admin", name),
        may_cancel=any(row["status"] in LIVE for row in states),
    )


def ask_cancel(page: Page) -> Response:
    """Ask before a message is cancelled."""
    name, number = page.form.need("queue"), page.form.number("id")
    states = [
        ((row["consumer_name"] or "all consumers"), row["status"])
        for row in page.rows(
            "select m.consumer_name, m.status from pgque.get_message(%s, %s) as m", [name, number]
        )
    ]
    return page.shown(
        "confirm.html",
        queue=name,
        title=f"Cancel message {number}?",
        facts=states,
        text="It is no longer delivered to any consumer. If a worker has it, its handler runs on, and the"
        " outcome does not count. Streams and others who read by offsets still see it. It cannot be undone.",
        sql=page.sql(*_cancel(name, number)),
        action="/message/cancel",
        fields=[("queue", name), ("id", number)],
        button="Cancel the message",
        keep="Keep it",
        danger=True,
        allowed=page.may_change("admin", name),
        back=("/message", {"queue": name, "id": number}),
    )


def _cancel(name: str, number: int) -> Statement:
    return "select pgque.cancel(%s, %s)", [name, number]


def cancel(page: Page) -> Response:
    """Cancel a message for all consumers."""
    name, number = page.form.need("queue"), page.form.number("id")
    state = page.value(*_cancel(name, number))
    before = " before" if state == "cancelled" else ""
    return page.done(f"Message {number} was {state}{before}.", "/messages", queue=name)


def _found(page: Page, asked: dict[str, object]) -> tuple[list[Row], Row]:
    try:
        rows = page.rows(
            "select " + _STATE + ", " + _WHOLE + ", m.dl_id from pgque.get_message(%(queue)s, %(id)s) as m",
            asked,
        )
    except PgqueMessageNotFoundError:
        return [], {}
    return rows, rows[0]


def _found_by_consumer(page: Page, asked: dict[str, object]) -> tuple[list[Row], Row]:
    """Return the states, and the message if it is among the next ones: more is for administrators."""
    try:
        states = page.rows("select " + _STATE + " from pgque.message_status(%(queue)s, %(id)s) as m", asked)
    except PgqueMessageNotFoundError:
        return [], {}
    return states, page.one(
        "select " + _WHOLE + " from pgque.peek(%(queue)s, %(looked)s) as m where m.msg_id = %(id)s", asked
    )


def _letters(page: Page, name: str, states: list[Row]) -> list[Row]:
    """Return the dead letters among the states, with their reason if they are among the newest."""
    dead = [row for row in states if row["dl_id"] is not None]
    if not dead:
        return []
    known = {
        row["dl_id"]: row
        for row in page.rows(
            "select d.dl_id, d.dl_time, d.dl_reason from pgque.dlq_inspect(%s, %s) as d"
            " where d.dl_id = any (%s)",
            [name, MOST_LETTERS, [row["dl_id"] for row in dead]],
        )
    }
    unknown: Row = {"dl_time": None, "dl_reason": None}
    return [{**row, **known.get(row["dl_id"], {**unknown, "dl_reason": row["last_error"]})} for row in dead]


def _trace(headers: object) -> str:
    """Return the trace id of W3C trace context, if the headers have one."""
    value = headers.get("traceparent") if isinstance(headers, Mapping) else None
    parts = value.split("-") if isinstance(value, str) else []
    return parts[1] if len(parts) == 4 else ""
