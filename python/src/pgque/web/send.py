"""Send a test message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from ..errors import PgqueBadArgumentError, PgqueError
from .page import Page, in_utc

if TYPE_CHECKING:
    from typing_extensions import LiteralString

FIELDS = ("type", "kind", "payload", "headers", "key", "delay", "deliver_at", "ttl", "partition_key")
KINDS = {"text": "Text", "json": "JSON", "bytes": "Bytes, in hexadecimal"}

MOST_QUEUES = 100  # in the list of those that a role may send to

_QUEUES: LiteralString = (
    "select r.queue_name from pgque.my_rights() as r where r.produce"
    " and strpos(lower(r.queue_name), %(name)s) > 0 order by r.queue_name limit %(most)s"
)
_OPTIONS = (
    " headers => %(headers)s::jsonb, key => %(key)s, delay => %(delay)s::interval,"
    " deliver_at => %(deliver_at)s::timestamptz, ttl => %(ttl)s::interval,"
    " partition_key => %(partition_key)s)"
)


def show(page: Page) -> Response:
    """Show the form, or without a queue those that the role may send to."""
    return _form(page, "") if page.form.get("queue") else choose(page)


def choose(page: Page) -> Response:
    """Show the queues that the role may send to: the first page of those who see no figures of queues."""
    rows = page.rows(_QUEUES, {"name": page.form.get("name").lower(), "most": MOST_QUEUES + 1})
    return page.shown(
        "senders.html",
        queues=[row["queue_name"] for row in rows[:MOST_QUEUES]],
        more=len(rows) > MOST_QUEUES,
        name=page.form.get("name"),
    )


def _form(page: Page, error: str) -> Response:
    name = page.form.need("queue")
    return page.shown(
        "send.html",
        status=400 if error else 200,
        queue=name,
        error=error,
        kinds=KINDS,
        values={field: page.form.get(field) for field in FIELDS},
        may_send=page.may_change("produce", name),
    )


def send(page: Page) -> Response:
    """Send the message; after an error show the form again, with what was typed."""
    form = page.form
    name, kind = form.need("queue"), form.get("kind", "text")
    asked: dict[str, object] = {field: form.get(field) or None for field in FIELDS}
    asked |= {"queue": name, "type": form.get("type", "default"), "payload": form.get("payload")}
    asked["deliver_at"] = in_utc(form.get("deliver_at")) or None
    try:
        if kind == "json":
            query = "select pgque.send(%(queue)s, %(type)s, %(payload)s::jsonb,"
            number = page.value(query + _OPTIONS, asked)
        elif kind == "bytes":
            asked["payload"] = _bytes(form.get("payload"))
            number = page.value(
                "select pgque.send(%(queue)s, %(type)s, %(payload)s::bytea," + _OPTIONS, asked
            )
        else:
            number = page.value("select pgque.send(%(queue)s, %(type)s, %(payload)s::text," + _OPTIONS, asked)
    except PgqueError as error:
        return _form(page, str(error))
    return page.done(f"Message {number} was sent.", "/send", queue=name)


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text.removeprefix("\\x"))
    except ValueError as error:
        raise PgqueBadArgumentError("the payload is no hexadecimal number", hint="As in 00 ff 1e.") from error
