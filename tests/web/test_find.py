"""Messages that are searched for, lists that are kept as files, and what all payloads of a list share."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from conftest import Queues, Role, Roles
from pgque.web.look import after, shared
from support.pages import Browser, text

Connection = psycopg.Connection[tuple[Any, ...]]
NewBrowser = Callable[..., Browser]
Tick = Callable[[str], object]


def leased(conn: Connection, tick: Tick, queue: str, payloads: list[str]) -> tuple[int, list[int]]:
    """Send messages and lease them to worker w of consumer c; return the batch and the ids."""
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    conn.execute("select pgque.send_batch(%s, 'kind', %s::text[])", [queue, payloads])
    tick(queue)
    rows = conn.execute(
        "select batch_id, msg_id from pgque.receive(%s, 'c', 100, 'w', '1 hour')", [queue]
    ).fetchall()
    return rows[0][0], [row[1] for row in rows]


def test_what_all_payloads_of_a_list_begin_with_is_found_without_cutting_a_word() -> None:
    def prefix(*texts: str | None) -> str:
        found = shared([{"payload": one} for one in texts], "payload")
        assert all(after(one, found).endswith(one[len(found) :]) for one in texts if one is not None)
        return found

    begin = '{"tenant": "a", "id": '
    assert prefix(begin + "17}", begin + "18}", None) == begin  # not {"tenant": "a", "id": 1
    assert prefix(begin + '"order-1"', begin + '"order-2"') == begin + '"order-'
    assert prefix(begin + "17}") == prefix(None, None) == prefix() == ""  # nothing is shared
    assert prefix(begin + "1", begin + "1") == ""  # nothing would be left
    assert prefix('{"a": 1}', '{"a": 2}') == ""  # too short to be worth it
    assert prefix(begin, begin + "1") == begin  # one of them ends there
    assert after(begin, begin) == "…"
    assert prefix("größer größer größer 1", "größer größer größen 2") == "größer größer "
    # A letter and its accent stay together, and so does an escape.
    assert prefix("a b c d e f g. e\u0301", "a b c d e f g. e\u0300") == "a b c d e f g. "
    assert prefix('{"path": "c:\\\\n"}', '{"path": "c:\\\\t"}') == '{"path": "c:'
    assert after(None, begin) == ""
    assert after("other", begin) == "other"


EVIL_CELLS = ["=1+1", "+1", "-1", "@sum(a)", "\t=1", " =1", "\uff1d1", 'plain, "quoted"\nline']


def test_lists_are_kept_as_files_with_their_filter_and_without_formulas(
    browser: NewBrowser,
    admin: Role,
    queue: str,
    conn: Connection,
    tick: Tick,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, ids = leased(conn, tick, queue, EVIL_CELLS)
    conn.execute("select pgque.dead(%s, %s, '=cmd()')", [batch, ids[:3]])
    conn.execute("select pgque.archive(%s, %s)", [batch, ids[3:5]])
    conn.execute("select pgque.send(%s, 'bin', '\\x00ff'::bytea)", [queue])
    conn.execute("select pgque.pause(%s)", [queue])
    b = browser(admin)

    def kept(path: str, kind: str, **fields: object) -> tuple[list[dict[str, Any]], Any]:
        page = b.client.get(path, params={"format": kind, **fields})
        assert page.status_code == 200, page.text
        assert re.fullmatch(
            rf'attachment; filename="pgque-[\w.-]+\.{kind}"', page.headers["content-disposition"]
        )
        assert page.headers["x-content-type-options"] == "nosniff"
        if kind == "csv":
            assert page.headers["content-type"] == "text/csv; charset=utf-8"
            return list(csv.DictReader(io.StringIO(page.text, newline=""))), page
        assert page.headers["content-type"] == "application/json"
        return json.loads(page.text)["rows"], page

    everything, page = kept("/messages", "json", queue=queue)
    assert [row["msg_id"] for row in everything] == sorted(
        (row["msg_id"] for row in everything), reverse=True
    )
    assert {row["payload"] for row in everything} == {None, *EVIL_CELLS}
    assert everything[0]["payload_bytes"] == "00ff"
    assert everything[0]["payload_size"] == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", everything[0]["created_at"])
    assert json.loads(page.text)["more"] is None
    assert "pgque-more" not in page.headers
    cells, page = kept("/messages", "csv", queue=queue)
    assert [int(row["msg_id"]) for row in cells] == [row["msg_id"] for row in everything]
    for cell, row in zip(cells, everything, strict=True):
        harmless = row["payload"] in (None, EVIL_CELLS[-1])
        assert cell["payload"] == (row["payload"] or "" if harmless else "'" + row["payload"])
    # Page, filter and file agree.
    only, _ = kept("/messages", "csv", queue=queue, status="processing")
    assert {row["status"] for row in only} == {"processing"}
    for path, column, expected in (
        ("/dead", "ev_data", EVIL_CELLS[2::-1]),
        ("/archive", "payload", EVIL_CELLS[4:2:-1]),
    ):
        assert [row[column] for row in kept(path, "json", queue=queue)[0]] == expected
        assert [row[column] for row in kept(path, "csv", queue=queue)[0]] == ["'" + one for one in expected]
    assert kept("/dead", "csv", queue=queue, reason="=cmd()")[0][0]["dl_reason"] == "'=cmd()"
    assert kept("/dead", "csv", queue=queue, reason="none")[0] == []
    (row,) = kept("/", "json", name=queue)[0]
    assert (row["name"], row["paused"], row["dead"]) == (queue, True, 3)
    assert next(row["call"] for row in kept("/actions", "csv", of=queue)[0]) == "pause"
    for path in ("/messages", "/dead", "/archive"):
        shown = b.get(path, queue=queue).text
        assert f"{path}?format=csv&amp;queue={queue}" in shown
        assert b.client.get(path, params={"queue": queue, "format": "exe"}).status_code == 400

    # A file that was cut tells it, in its name and in the answer; it is read in parts.
    monkeypatch.setattr("pgque.web.export.AT_ONCE", 2)
    assert kept("/messages", "json", queue=queue)[0] == everything
    assert len(kept("/dead", "json", queue=queue)[0]) == 3
    monkeypatch.setattr("pgque.web.export.MOST_EXPORTED", 3)
    rows, page = kept("/messages", "json", queue=queue)
    assert (rows, json.loads(page.text)["more"]) == (everything[:3], "rows")
    assert page.headers["pgque-more"] == "rows"
    assert "-first-3.json" in page.headers["content-disposition"]
    monkeypatch.setattr("pgque.web.export.MOST_BYTES", 10)
    assert kept("/messages", "csv", queue=queue)[1].headers["pgque-more"] == "size"


def test_a_file_has_no_more_than_its_page_shows_to_this_role(
    browser: NewBrowser,
    admin: Role,
    reader: Role,
    roles: Roles,
    new_queue: Queues,
    queue: str,
    conn: Connection,
    tick: Tick,
) -> None:
    batch, ids = leased(conn, tick, queue, ["secret one", "secret two", "secret three"])
    conn.execute("select pgque.dead(%s, %s, 'broken')", [batch, ids[:1]])
    conn.execute("select pgque.archive(%s, %s)", [batch, ids[1:2]])
    hidden = browser(admin, hide_payloads=True)
    for path in ("/messages", "/dead", "/archive"):
        for kind in ("csv", "json"):
            page = hidden.client.get(path, params={"queue": queue, "format": kind})
            assert page.status_code == 200
            assert "secret" not in page.text
            assert "kind" in page.text
    other = roles()
    conn.execute("select pgque.grant_queue(%s, %s, 'admin')", [new_queue("other"), other.name])
    nobody = browser(other)
    for path, b, status in (
        ("/dead", browser(reader), 403), ("/archive", browser(reader), 403), ("/messages", nobody, 403), ("/actions", nobody, 403),
    ):  # fmt: skip
        page = b.client.get(path, params={"queue": queue, "format": "csv"})
        assert page.status_code == status, (path, text(page))
        assert "secret" not in page.text
