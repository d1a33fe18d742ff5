"""A list as a file, CSV or JSON: what its page shows, with its filter and its rights."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from starlette.responses import Response

from ..errors import PgqueBadArgumentError
from .page import MOST_EXPORTED, Page, Row

if TYPE_CHECKING:
    from typing_extensions import LiteralString

AT_ONCE = 500  # rows of one query
MOST_BYTES = 32_000_000  # of a file
CUT = 100_000  # characters, or bytes, of a payload
KINDS = {"csv": "text/csv; charset=utf-8", "json": "application/json"}
PAYLOADS = ("payload", "payload_bytes", "ev_data", "ev_bytes")

# The next rows, at most this many, after the last row of the previous ones; None if the search was stopped.
Next = Callable[[int, "Row | None"], "list[Row] | None"]


def wanted(page: Page) -> bool:
    """Return whether a list is asked for as a file. Raises PgqueBadArgumentError for another kind of file."""
    kind = page.form.get("format")
    if kind and kind not in KINDS:
        raise PgqueBadArgumentError(f"no such format: {kind[:50]!r}", hint="Use csv or json.")
    return bool(kind)


def answer(page: Page, name: str, following: Next, beyond: str = "") -> Response:
    """Return a list as a file that the browser keeps: MOST_EXPORTED rows at most, and it tells of more.

    `beyond`: what the list as a whole leaves out, if it does.
    """
    kind = page.form.get("format")
    out = io.StringIO()
    write = _as_csv(out) if kind == "csv" else _as_json(out)
    count, more = 0, ""
    for row in _all(following):
        if row is None:
            more = "time"
        elif count >= MOST_EXPORTED:
            more = "rows"
        elif out.tell() > MOST_BYTES:
            more = "size"
        if row is None or more:
            break
        write({key: value for key, value in row.items() if not (page.hides_payloads and key in PAYLOADS)})
        count += 1
    more = more or beyond
    text = out.getvalue()
    if kind == "json":
        text = f'{{"rows": [{text}\n], "more": {json.dumps(more or None)}}}\n'
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"pgque-{name}")[:100] + (f"-first-{count}" if more else "")
    return Response(
        text.encode("utf-8", "backslashreplace"),
        media_type=KINDS[kind],
        headers={
            "content-disposition": f'attachment; filename="{stem}.{kind}"',
            **({"pgque-more": more} if more else {}),
        },
    )


def listed(rows: Sequence[Row]) -> Next:
    """Return rows that are in memory as `answer` asks for them."""

    def following(most: int, last: Row | None) -> list[Row]:
        return list(rows) if last is None else []

    return following


def searched(
    page: Page, query: LiteralString, asked: Mapping[str, object], by: str, most: str = "most"
) -> Next:
    """Return rows of a search as `answer` asks for them: each query goes on `before` the column `by` of the
    last row, and takes its number of rows as `most`."""

    def following(count: int, last: Row | None) -> list[Row] | None:
        place = {} if last is None else {"before": last[by]}
        return page.search(query, {**asked, most: count, "cut": CUT, **place})

    return following


def _all(following: Next) -> Iterator[Row | None]:
    last: Row | None = None
    while True:
        rows = following(AT_ONCE, last)
        if rows is None:
            yield None
            return
        yield from rows
        if len(rows) < AT_ONCE:
            return
        last = rows[-1]


def _as_csv(out: io.StringIO) -> Callable[[Row], None]:
    writer = csv.writer(out)

    def write(row: Row) -> None:
        if not out.tell():
            writer.writerow(row)
        writer.writerow(_harmless(_plain(value)) for value in row.values())

    return write


def _as_json(out: io.StringIO) -> Callable[[Row], None]:
    def write(row: Row) -> None:
        out.write(",\n" if out.tell() else "\n")
        out.write(json.dumps({key: _plain(value) for key, value in row.items()}, ensure_ascii=False))

    return write


def _plain(value: object) -> object:
    """Return a value as a file has it: times in ISO 8601 and UTC, bytes in hexadecimal, spans in seconds."""
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (bytes, memoryview)):
        return bytes(value).hex()
    return value


def _harmless(value: object) -> object:
    """Return a cell of CSV that no spreadsheet takes for a formula."""
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and re.match(r"[\s\x00-\x1f]*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]", value):
        return f"'{value}"
    return value
