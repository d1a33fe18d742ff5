"""One request of a user who is logged in: queries, rights, forms and answers."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlencode

import psycopg
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from ..errors import (
    PgqueBadArgumentError,
    PgqueError,
    PgquePermissionDeniedError,
    PgqueTickNotFoundError,
    from_psycopg,
)
from ..ops.overview import ROLE_QUERY
from .database import Connection, Parameters
from .sessions import Session
from .shared import LIVE, Shared

if TYPE_CHECKING:
    from typing_extensions import LiteralString

Row = dict[str, Any]
T = TypeVar("T")

MOST_RIGHTS = 10_000  # that a session remembers
SEARCH = 700  # milliseconds after which the searches of a page are stopped
SHOWN = 1_000  # characters of a payload that a list reads, to skip what all of them share
END = 2**63 - 1  # an id above all others
MOST_EXPORTED = 10_000  # rows of a list that is a file
LONG_SEARCH = 9_000  # milliseconds, for a longer search
RIGHTS_KEPT = 60.0  # seconds that what a role may do with a queue is believed
STREAMS_KEPT = 30.0  # seconds for which it is remembered whether there are streams

_STREAMS = """
select exists (select from pgque.subscriber as s where s.sub_offsets)
  or exists (select from pgque.sink_epoch as e where not e.once)
  or exists (select from pgque.sink_attempt as a where a.epoch is not null)
"""

_ROLE: LiteralString = (
    "select r.*, coalesce(("
    " select bool_and(pg_catalog.has_table_privilege(pg_catalog.to_regclass(t.name), 'select'))"
    " from (values ('pgque.queue'), ('pgque.consumer'), ('pgque.subscriber'), ('pgque.sink_epoch'),"
    " ('pgque.sink_attempt')) as t (name)), false) as streams from (" + ROLE_QUERY + ") as r"
)


class Form:
    """The fields of a form or of a query string: texts, without those that are empty."""

    def __init__(self, fields: Sequence[tuple[str, str]]) -> None:
        self.fields = [(name, value) for name, value in fields if value != ""]

    @classmethod
    def read(cls, body: str, posted: bool = False) -> Form:
        """Return the fields of a text in URL encoding. Raises PgqueBadArgumentError for more than 20,000.

        `posted`: a browser has written every line break of a form as CR LF, whatever it was.
        """
        try:
            fields = parse_qsl(body, keep_blank_values=True, max_num_fields=20_000)
        except ValueError as error:
            raise PgqueBadArgumentError(f"the form cannot be read: {error}") from error
        if any("\0" in value for _, value in fields):
            raise PgqueBadArgumentError("PostgreSQL stores no text with the character NUL")
        if posted:
            fields = [(name, value.replace("\r\n", "\n")) for name, value in fields]
        return cls(fields)

    def get(self, name: str, default: str = "") -> str:
        """Return the last value of a field."""
        return next((value for key, value in reversed(self.fields) if key == name), default)

    def need(self, name: str) -> str:
        """Return the value of a field. Raises PgqueBadArgumentError if it is empty."""
        value = self.get(name)
        if not value:
            raise PgqueBadArgumentError(f"the field {name} is empty")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a field as a whole number. Raises PgqueBadArgumentError."""
        text = self.get(name)
        if not text and default is not None:
            return default
        return _number(name, text)

    def numbers(self, name: str) -> list[int]:
        """Return all values of a field as whole numbers. Raises PgqueBadArgumentError."""
        return [_number(name, value) for key, value in self.fields if key == name]


def in_utc(text: str) -> str:
    """Return a text with the zone UTC if it is a time from the field of a browser, which has no zone."""
    return f"{text}Z" if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?", text) else text


def _number(name: str, text: str) -> int:
    digits = text.strip()
    known = len(digits) < 25 and digits.isascii() and digits.removeprefix("-").isdigit()
    if not known or abs(int(digits)) >= 2**63:
        raise PgqueBadArgumentError(f"the field {name} is no whole number: {text[:50]!r}")
    return int(digits)


class Page:
    """One request: the form, the session, its connection, and ways to answer."""

    def __init__(
        self, site: Shared, request: Request, session: Session, connection: Connection, form: Form
    ) -> None:
        self.site = site
        self.request = request
        self.session = session
        self.connection = connection
        self.form = form
        self.role = self.one(_ROLE)
        self._searched = 0  # milliseconds

    def text_filter(self) -> str:
        """Return the text to find in payloads. Raises PgqueBadArgumentError if they are hidden.

        A search would show a hidden payload. If the text were ignored, an action on all messages that match
        would be one on all messages.
        """
        wanted = self.form.get("text")
        if wanted and self.site.config.hide_payloads:
            raise PgqueBadArgumentError(
                "payloads are hidden, so this page does not search in them", hint="Leave the text out."
            )
        return wanted

    def filters(self, names: Sequence[str]) -> dict[str, object]:
        """Return fields of a search: None for those that are empty, times in UTC."""
        found: dict[str, object] = {}
        for name in names:
            value = self.text_filter() if name == "text" else self.form.get(name)
            found[name] = (in_utc(value) if name in ("since", "until") else value) or None
        return found

    @property
    def hides_payloads(self) -> bool:
        """Return True if this page shows no payloads and headers."""
        return self.site.config.hide_payloads

    # -- rights ----------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Return True if changes are possible: neither the page nor the server is read only."""
        return not (self.site.config.read_only or self.role["standby"])

    @property
    def has_streams(self) -> bool:
        """Return True if there are streams or sinks that the role may see."""
        return bool(self.role["streams"]) and self.site.samples.get(
            self.session.database, "streams", lambda: bool(self.value(_STREAMS)), STREAMS_KEPT
        )

    def may(self, right: str, queue: str) -> bool:
        """Return whether the role has a right to a queue: see, produce, consume or admin."""
        every = {"see": "reader", "produce": "writer", "consume": "reader", "admin": "admin"}[right]
        if self.role["admin"] or self.role[every]:
            return True
        return bool(self._rights().get(queue, {}).get(right))

    @property
    def only_sends(self) -> bool:
        """Return True if the role may send to queues but sees no figures of them, as a pgque_writer."""
        if self.role["admin"] or self.role["reader"]:
            return False
        rights = self._rights().values()
        return any(row["produce"] for row in rights) and not any(row["see"] for row in rights)

    @property
    def sends(self) -> bool:
        """Return True if the page offers to send to any queue."""
        if not self.writable or self.role["admin"] or self.role["writer"]:
            return self.writable
        return any(row["produce"] for row in self._rights().values())

    def _rights(self) -> dict[str | None, Row]:
        if self.session.rights is None or time.monotonic() - self.session.rights[0] > RIGHTS_KEPT:
            try:
                rows = self.rows("select * from pgque.my_rights() limit %s", [MOST_RIGHTS])
            except PgquePermissionDeniedError:
                rows = []
            self.session.rights = time.monotonic(), {row["queue_name"]: row for row in rows}
        return self.session.rights[1]

    def may_change(self, right: str, queue: str) -> bool:
        """Return whether the page offers a change that needs this right."""
        return self.writable and self.may(right, queue)

    # -- the queue that a form is about ------------------------------------------

    def identity(self, queue: str | None) -> list[tuple[str, str]]:
        """Return the field by which a form that is sent is not about another queue of the same name."""
        if queue is None or not self.may("consume", queue):
            return []
        return [("incarnation", str(self.value("select pgque.queue_incarnation(%s)", [queue])))]

    def check_identity(self) -> None:
        """Raise PgqueTickNotFoundError if the queue of the form was created again since it was shown."""
        shown, queue = self.form.get("incarnation"), self.form.get("queue")
        if shown and queue and [("incarnation", shown)] != self.identity(queue):
            raise PgqueTickNotFoundError(
                f"queue {queue} was created again or loaded from a dump since this page was shown",
                sqlstate="PQ015",
                hint="Nothing was changed. Open the queue again to see its present state.",
            )

    # -- queries ---------------------------------------------------------------

    def rows(
        self, query: LiteralString, parameters: Parameters = (), timeout: float | None = None
    ) -> list[Row]:
        """Return the rows of a query, which has a limit of its own. Raises PgqueError."""
        try:
            cursor = self.connection.execute(query, parameters, timeout)
            return cursor.fetchall() if cursor.description else []
        except psycopg.errors.QueryCanceled as error:
            raise PgqueError(
                "the database did not answer in time",
                sqlstate=error.sqlstate,
                hint="Try again, or ask for less.",
            ) from error
        except psycopg.Error as error:
            raise from_psycopg(error) from error
        except UnicodeEncodeError as error:
            raise PgqueBadArgumentError("a text is not valid Unicode") from error

    def search(
        self, query: LiteralString, parameters: Parameters = (), most: int | None = None
    ) -> list[Row] | None:
        """Return the rows of a query that may read very much, or None if it was stopped for that.

        The times of all searches of a page add up. `most`: milliseconds for this one.
        """
        began = time.monotonic()
        milliseconds = max(min(self.search_time - self._searched, most or self.search_time), 50)
        try:
            return self.within(milliseconds, query, parameters)
        finally:
            self._searched += round((time.monotonic() - began) * 1000)

    @property
    def search_time(self) -> int:
        """Return the milliseconds that the searches of this page may take together: more for a file."""
        return LONG_SEARCH if self.form.get("longer") or self.form.get("format") else SEARCH

    @property
    def time_left(self) -> bool:
        """Return True if the searches of this page have time left."""
        return self._searched < self.search_time

    def within(
        self, milliseconds: int, query: LiteralString, parameters: Parameters = ()
    ) -> list[Row] | None:
        """Return the rows of a query, or None if it was stopped after this many milliseconds."""
        try:
            return self.rows(query, parameters, milliseconds / 1000)
        except PgqueError as error:
            if error.sqlstate != "57014":
                raise
            return None

    def one(self, query: LiteralString, parameters: Parameters = ()) -> Row:
        """Return the first row of a query, or an empty one."""
        found = self.rows(query, parameters)
        return found[0] if found else {}

    def value(self, query: LiteralString, parameters: Parameters = ()) -> Any:
        """Return the one value of a query."""
        return next(iter(self.one(query, parameters).values()), None)

    def sql(self, query: LiteralString, parameters: Parameters = ()) -> str:
        """Return a statement as it is typed into psql. It is only shown: the one that runs has parameters."""
        try:
            return self.connection.rendered(query, parameters)
        except psycopg.Error as error:
            raise from_psycopg(error) from error
        except UnicodeEncodeError as error:
            raise PgqueBadArgumentError("a text is not valid Unicode") from error

    def elsewhere(self, ask: Callable[[Page], T]) -> Callable[[], T]:
        """Return a call that asks over another connection of this session, after this page was answered."""

        def run() -> T:
            timeout = self.site.config.figures_timeout
            with self.session.connections.take(True, timeout) as connection:
                return ask(Page(self.site, self.request, self.session, connection, Form([])))

        return run

    # -- answers ---------------------------------------------------------------

    def url(self, path: str, **query: object) -> str:
        """Return the address of a page below the prefix."""
        return address(self.request, path, query)

    def shown(self, template: str, *, status: int = 200, **values: object) -> Response:
        """Return a page made from a template."""
        return rendered(
            self.site,
            self.request,
            template,
            status=status,
            page=self,
            role=self.role,
            session=self.session,
            csrf=self.site.signer.csrf(self.session.token),
            once=secrets.token_hex(8),  # for forms that must not be sent twice
            mark=self.site.signer.mark(self.session.token),
            # The script that keeps a page up to date shows none of them.
            flashes=[] if LIVE in self.request.headers else self.session.take_flashes(),
            writable=self.writable,
            hide_payloads=self.hides_payloads,
            most_exported=MOST_EXPORTED,
            **values,
        )

    def done(self, text: str, path: str, **query: object) -> Response:
        """Return an answer that leads to another page, which shows the text."""
        self.session.flash("ok", text)
        return self.go(path, **query)

    def go(self, path: str, **query: object) -> Response:
        """Send the browser to another page."""
        return RedirectResponse(self.url(path, **query), status_code=303)


def own(path: str, **query: object) -> str:
    """Return the address of a page without the prefix, as the field `back` of a form has it."""
    kept = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}{'?' + urlencode(kept) if kept else ''}"


def address(request: Request, path: str, query: Mapping[str, object]) -> str:
    """Return the address of a page below the prefix that this request came by."""
    return f"{request.scope.get('root_path', '')}{own(path, **query)}"


def rendered(
    site: Shared, request: Request, template: str, *, status: int = 200, **values: object
) -> Response:
    """Return a page for anybody."""

    def url(path: str, **query: object) -> str:
        return address(request, path, query)

    text = site.templates.get_template(template).render(
        url=url, own=own, path=request.scope["pgque.path"], **values
    )
    return HTMLResponse(text, status_code=status)
