"""The messages of a queue, and the page of one message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.responses import Response

from ..errors import PgqueBadArgumentError, PgqueError, PgqueMessageNotFoundError
from . import archive, export
from .change import Statement, kept
from .look import MOST_SHOWN, payload
from .page import END, SHOWN, Page, Row

if TYPE_CHECKING:
    from typing_extensions import LiteralString

LOOKED = 2_000  # next messages that a page reads for a role that may not list all
PER_PAGE = 50
LIVE = ("pending", "processing", "delayed", "retry", "expired")
STATES = (*LIVE, "dead", "failed", "archived")


# A list shows the start of a payload; the page of one message shows more of it.
_COLUMNS = """
m.msg_id, m.consumer_name, m.status, m.type, m.key, m.created_at, m.receive_count, m.last_error,
coalesce(octet_length(m.payload), octet_length(m.payload_bytes), 0) as payload_size,
left(m.payload, %(cut)s) as payload, substr(m.payload_bytes, 1, %(cut)s) as payload_bytes
"""

# A message has all its rows on one page, so a page may have a few more.
_LISTED = (
    "select "
    + _COLUMNS
    + """
from pgque.list_messages(%(queue)s, %(status)s, %(most)s, %(type)s, %(key)s, %(consumer)s,
  %(since)s::timestamptz, %(until)s::timestamptz, %(text)s, null, %(before)s) as m
"""
)

PEEKED = (
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
  and m.msg_id < %(before)s
order by m.msg_id desc limit %(most)s
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
    asked |= {"queue": name, "before": form.number("before", END), "most": PER_PAGE, "looked": LOOKED}
    asked["cut"] = SHOWN
    query = _LISTED if admin else PEEKED
    if export.wanted(page):
        beyond = not admin and page.value(
            "select count(*) > %s from pgque.peek(%s, %s) as p", [LOOKED, name, LOOKED + 1]
        )
        following = export.searched(page, query, asked, "msg_id")
        return export.answer(page, f"messages-{name}", following, "looked" if beyond else "")
    longer = bool(form.get("longer"))
    rows = page.search(query, asked)
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
        before=form.get("before"),
        following=rows[-1]["msg_id"] if rows and len(rows) >= PER_PAGE else None,
        may_send=page.may_change("produce", name),
    )


def show_one(page: Page) -> Response:
    """Show one message: its payload, and where each consumer has it."""
    name, number = page.form.need("queue"), page.form.number("id")
    asked: dict[str, object] = {"queue": name, "id": number, "most": MOST_SHOWN, "looked": LOOKED}
    admin = page.may("admin", name)
    states, message = _found(page, asked) if admin else _found_by_consumer(page, asked)
    history = _history(page, name, number) if admin else []
    return page.shown(
        "message.html",
        status=200 if states or history else 404,
        queue=name,
        number=number,
        states=states,
        message=message,
        history=history,
        letters=[_letter(page, name, row["dl_id"]) for row in states if row["dl_id"]] if admin else [],
        archived=[row["number"] for row in history if row["event"] == "archived"],
        most_shown=MOST_SHOWN,
        trace=_trace(message.get("headers")),
        may_admin=page.may_change("admin", name),
        may_cancel=any(row["status"] in LIVE for row in states),
    )


# Changes for one consumer: title, call, meaning, and the words if it was done and if nothing was done.
_DEEDS: dict[str, tuple[str, LiteralString, str, str, str]] = {
    "retry": (
        "Retry now",
        "select pgque.retry_now(%(queue)s, %(consumer)s, %(id)s)",
        "The message is redelivered at once, without the rest of its delay.",
        "is due now",
        "is not in state retry",
    ),
    "release": (
        "Release the lease",
        "select pgque.reclaim(%(queue)s, %(consumer)s, msg_id => %(id)s)",
        "Another worker may receive the message at once, although this worker may still work on it."
        " The outcome of this worker does not count. It keeps the rest of its batch.",
        "was released and is redelivered at once",
        "is with no worker",
    ),
}


def ask(page: Page) -> Response:
    """Ask before a message is retried or released, or an archived one is replayed."""
    name, number, deed = page.form.need("queue"), page.form.number("id"), page.form.need("action")
    facts: list[tuple[str, object]] = [("Message", str(number))]
    fields: list[tuple[str, object]] = [("queue", name)]
    statement: Statement
    if deed == "replay":
        title, meaning, action = "Replay", "It is sent as a new message to every consumer.", "/archive/replay"
        archived = page.form.number("archive_id")
        statement = archive.REPLAY, [archived]
        fields.append(("id", archived))
        facts.append(("In the archive", str(archived)))
    else:
        consumer = page.form.need("consumer")
        title, call, meaning, _, _ = _deed(deed)
        action = "/message/do"
        statement = call, {"queue": name, "consumer": consumer, "id": number}
        fields += [("id", number), ("action", deed), ("consumer", consumer)]
        facts.append(("Consumer", consumer))
    return page.shown(
        "confirm.html",
        queue=name,
        title=f"{title}: message {number}?",
        facts=facts,
        text=meaning,
        sql=page.sql(*statement),
        action=action,
        fields=fields,
        button=title,
        danger=False,
        allowed=page.may_change("admin", name),
        back=("/message", {"queue": name, "id": number}),
    )


def do(page: Page) -> Response:
    """Retry or release one message for one consumer."""
    name, number, consumer = page.form.need("queue"), page.form.number("id"), page.form.need("consumer")
    _, call, _, done, not_done = _deed(page.form.need("action"))
    count = page.value(call, {"queue": name, "consumer": consumer, "id": number})
    if not count:
        page.session.flash(
            "error", f"Nothing was changed: message {number} {not_done} of consumer {consumer}."
        )
        return page.go("/message", queue=name, id=number)
    return page.done(f"Message {number} {done}.", "/message", queue=name, id=number)


def _deed(deed: str) -> tuple[str, LiteralString, str, str, str]:
    if deed not in _DEEDS:
        raise PgqueBadArgumentError(f"no such action: {deed[:50]!r}")
    return _DEEDS[deed]


def ask_edit(page: Page) -> Response:
    """Show the form to edit a dead letter."""
    letter = _editable(page)
    return _edit_form(page, letter, "")


def edit(page: Page) -> Response:
    """Requeue a dead letter as edited; after an error show the form again, with what was typed."""
    letter = _editable(page)
    form, name = page.form, page.form.need("queue")
    # A field that was not edited stays as it is, byte by byte.
    payload = kept(form.get("payload"), letter["ev_data"] or "")
    same = payload == (letter["ev_data"] or "")
    headers = kept(form.get("headers"), letter["ev_headers"] or "")
    typed = kept(form.get("type"), letter["ev_type"] or "", lines=False)
    asked = {
        "dl": letter["dl_id"],
        "payload": None if same else payload,
        "type": typed if typed != (letter["ev_type"] or "") else None,
        "headers": (headers or "{}") if headers != (letter["ev_headers"] or "") else None,
    }
    try:
        # A form that says JSON is checked by the server, as a send is.
        json_text = form.get("kind") == "json" and not same
        number = page.value(
            "select pgque.dlq_edit(%(dl)s, %(payload)s::jsonb::text, %(type)s, %(headers)s::jsonb)"
            if json_text
            else "select pgque.dlq_edit(%(dl)s, %(payload)s, %(type)s, %(headers)s::jsonb)",
            asked,
        )
    except PgqueError as error:
        return _edit_form(page, letter, str(error))
    return page.done(
        f"Message {number} was edited and requeued. The archive keeps the original.",
        "/message",
        queue=name,
        id=number,
    )


def _editable(page: Page) -> Row:
    """Return a dead letter whose whole payload is text that a form can show."""
    name, number = page.form.need("queue"), page.form.number("dl_id")
    if page.hides_payloads:
        raise PgqueBadArgumentError("payloads are hidden, so this page does not edit them")
    letter = _letter(page, name, number)
    if letter["dl_time"] is None:
        raise PgqueMessageNotFoundError(f"not a dead letter of the queue: {number}")
    if not letter["editable"]:
        raise PgqueBadArgumentError(
            f"the payload of message {letter['ev_id']} is bytes, or too large for a form",
            hint="Requeue or replay it, or call pgque.dlq_edit().",
        )
    return letter


def _edit_form(page: Page, letter: Row, error: str) -> Response:
    form, data = page.form, letter["ev_data"] or ""
    before = {"type": letter["ev_type"] or "", "payload": data, "headers": letter["ev_headers"] or ""}
    before["kind"] = "json" if payload({"payload": data, "payload_bytes": None})["kind"] == "JSON" else "text"
    return page.shown(
        "edit.html",
        status=400 if error else 200,
        queue=form.need("queue"),
        error=error,
        letter=letter,
        values={key: form.get(key) for key in before} if error else before,
        may_admin=page.may_change("admin", form.need("queue")),
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
        " outcome does not count. Streams of Spark and other readers by offset still see it."
        " This cannot be undone.",
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
    said = "had been cancelled before" if state == "cancelled" else f"is cancelled; it was {state}"
    return page.done(f"Message {number} {said}.", "/messages", queue=name)


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


def _history(page: Page, name: str, number: int) -> list[Row]:
    """Return the history of a message, the oldest event first."""
    try:
        return page.rows("select h.* from pgque.message_history(%s, %s) as h limit 200", [name, number])
    except PgqueMessageNotFoundError:
        return []


def _letter(page: Page, name: str, dl_id: int) -> Row:
    """Return one dead letter; without a time if it no longer is one."""
    found = page.one(
        "select d.dl_id, d.dl_time, d.dl_reason, d.ev_id, d.ev_type, d.consumer_name,"
        " d.ev_headers::text as ev_headers,"
        " left(d.ev_data, %(most)s) as ev_data,"
        " d.ev_bytes is null and coalesce(length(d.ev_data), 0) <= %(most)s as editable"
        " from pgque.dlq_inspect(%(queue)s, 1, before_id => %(below)s) as d where d.dl_id = %(dl)s",
        {"queue": name, "dl": dl_id, "below": min(dl_id, END - 1) + 1, "most": MOST_SHOWN},
    )
    return found or {"dl_id": dl_id, "dl_time": None}


def _trace(headers: object) -> str:
    """Return the trace id of W3C trace context, if the headers have one."""
    value = headers.get("traceparent") if isinstance(headers, Mapping) else None
    parts = value.split("-") if isinstance(value, str) else []
    return parts[1] if len(parts) == 4 else ""
