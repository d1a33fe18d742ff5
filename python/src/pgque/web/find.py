"""Find a message in all queues: by its id, key, type, or a text in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ..errors import PgqueError, PgqueMessageNotFoundError, PgqueQueueNotFoundError
from .messages import LOOKED, PEEKED
from .page import END, MOST_RIGHTS, Page, Row

if TYPE_CHECKING:
    from typing_extensions import LiteralString

WINDOW = 20_000  # newest ids of a queue that are searched
LONG_WINDOW = 1_000_000  # in a longer search
MOST_FOUND = 50
LEAST = 50  # milliseconds for the dead letters or the archive of one queue
FIELDS = ("key", "type", "text")

_FOUND = "m.msg_id, m.consumer_name, m.status, m.type, m.key, m.created_at"
_BY_ID: LiteralString = f"select {_FOUND} from pgque.get_message(%(queue)s, %(id)s) as m"
_STATUS: LiteralString = """
select %(id)s::bigint as msg_id, m.consumer_name, m.status, null as type, null as key, null as created_at
from pgque.message_status(%(queue)s, %(id)s) as m
"""
_LISTED: LiteralString = (
    f"select {_FOUND} from pgque.list_messages(%(queue)s, null, %(most)s, %(type)s, %(key)s,"
    " matching => %(text)s, after_id => %(after)s, before_id => %(before)s) as m"
)
# Those with an older id than the messages that are searched
_DEAD: LiteralString = """
select d.ev_id as msg_id, d.consumer_name, case when d.dl_held then 'failed' else 'dead' end as status,
  d.ev_type as type, d.ev_key as key, d.ev_time as created_at
from pgque.dlq_inspect(%(queue)s, %(most)s, only_type => %(type)s, only_key => %(key)s,
  matching => %(text)s) as d
"""
_ARCHIVED: LiteralString = """
select a.msg_id, a.consumer_name, 'archived' as status, a.type, a.key, a.sent_at as created_at
from pgque.archive_list(%(queue)s, %(most)s, only_type => %(type)s, only_key => %(key)s,
  matching => %(text)s) as a
"""


class Search:
    """A search in queues, which ends when its time is used up and keeps how far it came."""

    def __init__(self, page: Page, wanted: str) -> None:
        self.page = page
        self.wanted = wanted
        known = len(wanted) < 25 and wanted.isascii() and wanted.isdigit() and int(wanted) < END
        self.id = int(wanted) if known else None
        self.window = LONG_WINDOW if page.form.get("longer") else WINDOW
        self.found: dict[tuple[Any, ...], Row] = {}
        self.looked = 0  # queues
        self.since: Any = None  # all messages that were sent later were searched, in these queues
        self.partly: list[str] = []  # queues whose older dead letters or archive took too long

    @property
    def full(self) -> bool:
        """Return True if enough was found."""
        return len(self.found) >= MOST_FOUND

    def run(self, queues: Iterable[Row]) -> None:
        """Search one queue after the other, first all of them for the id, because that is cheap."""
        rows = list(queues)
        if self.id is not None:
            for row in rows:
                if self.full or not self.page.time_left:
                    return
                self._keep(row["queue_name"], "id", self._by_id(row))
        for row in rows:
            if self.full or not self.page.time_left:
                return
            try:
                done = self._newest(row["queue_name"]) if row["admin"] else self._next(row["queue_name"])
            except PgqueQueueNotFoundError:
                continue  # it was dropped meanwhile
            if not done:
                return
            self.looked += 1

    def _keep(self, queue: str, by: str, rows: list[Row] | None) -> bool:
        """Keep the rows that were found. Return False if the search was stopped (None)."""
        for row in rows or []:
            if not self.full:
                key = (queue, row["msg_id"], row["consumer_name"], row["status"])
                self.found.setdefault(key, {"queue": queue, "by": by, **row})
        return rows is not None

    def _by_id(self, row: Row) -> list[Row] | None:
        asked = {"queue": row["queue_name"], "id": self.id}
        try:
            return self.page.search(_BY_ID if row["admin"] else _STATUS, asked)
        except (PgqueMessageNotFoundError, PgqueQueueNotFoundError):
            return []

    def _fields(self) -> Iterable[dict[str, object]]:
        for field in FIELDS:
            if field != "text" or not self.page.hides_payloads:
                yield {**dict.fromkeys(FIELDS), field: self.wanted, "by": field}

    def _newest(self, queue: str) -> bool:
        """Search the newest messages of a queue, then its older dead letters and archived messages."""
        asked: dict[str, object] = {**dict.fromkeys(FIELDS), "queue": queue, "most": 1}
        asked |= {"before": END, "after": 0}
        newest = self.page.search(_LISTED, asked)
        if newest is None:
            return False
        low = max(newest[0]["msg_id"] - self.window, 0) if newest else 0
        asked |= {"after": low, "most": MOST_FOUND}
        for field in self._fields():
            if not self._keep(queue, str(field["by"]), self.page.search(_LISTED, {**asked, **field})):
                return False
        if low:
            oldest = self.page.search(_LISTED, {**asked, "before": None, "most": 1})
            at = oldest[0]["created_at"] if oldest else None
            self.since = max((one for one in (at, self.since) if one is not None), default=None)
            for query in (_DEAD, _ARCHIVED):
                for field in self._fields():
                    rows = self.page.search(query, {**asked, **field}, LEAST)
                    if not self._keep(queue, str(field["by"]), rows):
                        self.partly.append(queue)
                        break
        return True

    def _next(self, queue: str) -> bool:
        """Search the next messages of a queue: only roles that administer it may read others."""
        asked: dict[str, object] = {"queue": queue, "looked": LOOKED, "most": MOST_FOUND, "before": END}
        asked |= {"since": None, "until": None, "cut": 0}
        return all(
            self._keep(queue, str(field["by"]), self.page.search(PEEKED, {**asked, **field}))
            for field in self._fields()
        )


def show(page: Page) -> Response:
    """Show messages of all queues with this id, key or type, or with this text in them."""
    wanted, of = page.form.get("q").strip(), page.form.get("of")
    search = Search(page, wanted)
    queues = page.rows(
        "select r.queue_name, r.admin from pgque.my_rights() as r"
        " where r.consume and r.queue_name is not null order by r.queue_name <> %s, r.queue_name limit %s",
        [of, MOST_RIGHTS],
    )
    error = ""
    if wanted:
        try:
            search.run(queues)
        except PgqueError as failure:
            error = str(failure)
    return page.shown(
        "search.html",
        wanted=wanted,
        of=of,
        error=error,
        rows=list(search.found.values()),
        full=search.full,
        most=MOST_FOUND,
        window=search.window,
        looked=search.looked,
        total=len(queues),
        since=search.since,
        partly=sorted(set(search.partly)),
        longer=bool(page.form.get("longer")),
        looked_next=LOOKED if any(not row["admin"] for row in queues) else 0,
    )
