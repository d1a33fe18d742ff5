"""Messages that are searched for, lists that are kept as files, and what all payloads of a list share."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from html import unescape
from typing import Any

import psycopg
import pytest
from psycopg import sql

from conftest import Queues, Role, Roles
from pgque.ops import units
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

    def kept(path: str, kind: str, **fields: str | int) -> tuple[list[dict[str, Any]], Any]:
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


def test_what_can_be_done_with_one_message_is_offered_where_it_applies_and_noted(
    browser: NewBrowser, admin: Role, roles: Roles, queue: str, conn: Connection, tick: Tick
) -> None:
    batch, ids = leased(conn, tick, queue, ["retried", "leased", "archived", "acknowledged", "cancelled"])
    conn.execute(
        "select pgque.nack(%s, %s, retry_after => '1 hour', reason => 'no answer')", [batch, ids[:1]]
    )
    conn.execute("select pgque.archive(%s, %s)", [batch, ids[2:3]])
    conn.execute("select pgque.ack(%s, %s)", [batch, ids[3:4]])
    b = browser(admin)

    def shown(msg_id: int, code: int = 200) -> str:
        return text(b.get("/message", code, queue=queue, id=msg_id))

    page = shown(ids[0])
    assert "Retry now…" in page
    assert "Release the lease…" not in page
    assert re.search(
        r"History .* sent [\d: -]+ ticked [\d: -]+ tick \d+ due [\d: -]+ c rejected 1 time, no answer", page
    )
    ask = {"queue": queue, "id": ids[0], "action": "retry", "consumer": "c"}
    assert "Retry now: message" in text(b.get("/message/ask", **ask))
    assert "retry" in shown(ids[0])  # nothing was done yet
    assert f"Message {ids[0]} is due now." in text(b.post("/message/do", **ask))
    assert f"message {ids[0]} is not in state retry" in text(b.post("/message/do", **ask))

    page = shown(ids[1])
    assert "Release the lease…" in page
    assert "delivered" in page
    assert "Retry now…" not in page
    ask = {"queue": queue, "id": ids[1], "action": "release", "consumer": "c"}
    assert "Another worker may receive the message at once" in text(b.get("/message/ask", **ask))
    assert f"Message {ids[1]} was released" in text(b.post("/message/do", **ask))
    assert f"message {ids[1]} is with no worker" in text(b.post("/message/do", **ask))
    assert "Release the lease…" not in shown(ids[1])
    rows = conn.execute("select m.status from pgque.message_status(%s, %s) as m", [queue, ids[4]]).fetchall()
    assert rows == [("processing",)]  # the rest of the batch is still the worker's

    # Archived: no consumer has it any more, and it is found all the same.
    page = b.get("/message", queue=queue, id=ids[2]).text
    assert "Replay from the archive…" in page
    found = re.search(r'href="(/message/ask[^"]*archive_id[^"]*)"', page)
    assert found is not None
    question = b.client.get(found[1].replace("&amp;", "&"))
    assert "sent as a new message to every consumer" in text(question)
    number = re.search(r'name="id" value="(\d+)"', question.text)
    assert number is not None
    assert "was sent to every consumer" in text(b.post("/archive/replay", queue=queue, id=number[1]))

    page = shown(ids[3])
    assert "every consumer has finished it" in page
    assert " done " in page
    b.post("/message/cancel", queue=queue, id=ids[4])
    page = shown(ids[4])
    assert "it was cancelled" in page
    assert re.search(r"cancel [\d: -]+ by test_role", page)
    assert "it was never sent" in shown(999, 404)
    assert "403" in str(b.client.post("/message/do", data={"queue": queue}).status_code)
    b.get("/message/ask", 400, queue=queue, id=1, action="explode", consumer="c")

    noted = [row[0] for row in conn.execute("select call from pgque.list_actions(%s) order by at", [queue])]
    assert noted[-4:] == ["retry_now", "reclaim", "archive_replay", "cancel"]
    # Who only consumes is offered none of it, and is refused.
    consumer = roles()
    conn.execute("select pgque.grant_queue(%s, %s, 'consume')", [queue, consumer.name])
    c = browser(consumer)
    page = text(c.get("/message", queue=queue, id=ids[0]))
    assert "c retry" in page
    assert "Retry now" not in page
    assert "History" not in page
    for path in ("/message/do", "/message/edit"):
        ask = {"queue": queue, "id": ids[0], "action": "retry", "consumer": "c", "dl_id": 1}
        assert (
            c.client.post(path, data={"csrf": token(c), **{k: str(v) for k, v in ask.items()}}).status_code
            == 403
        )


def token(b: Browser) -> str:
    found = re.search(r'name="csrf" value="([^"]+)"', b.client.get("/").text)
    assert found is not None
    return found[1]


def test_a_dead_letter_is_edited_and_requeued_and_the_archive_keeps_the_original(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    payloads = ["\nfirst line is empty\r\nlast", '{"to": "nobody"}', "x" * 200_001]
    batch, ids = leased(conn, tick, queue, payloads)
    conn.execute("select pgque.dead(%s, %s, 'no such address')", [batch, ids])
    letters: dict[int, int] = dict(
        conn.execute("select ev_id, dl_id from pgque.dlq_inspect(%s)", [queue]).fetchall()
    )
    b = browser(admin)
    assert "Edit and requeue…" in text(b.get("/message", queue=queue, id=ids[1]))
    assert "Edit and requeue…" not in text(b.get("/message", queue=queue, id=ids[2]))
    assert "too large for a form" in text(b.get("/message/edit", 400, queue=queue, dl_id=letters[ids[2]]))
    b.get("/message/edit", 404, queue=queue, dl_id=10**9)

    form = {"queue": queue, "dl_id": letters[ids[1]], "type": "kind", "kind": "json"}
    shown = b.get("/message/edit", queue=queue, dl_id=letters[ids[1]])
    assert 'value="json" selected' in shown.text
    assert "The archive keeps the original, with outcome edited" in text(shown)
    # What is wrong is said in the form, which keeps what was typed; nothing was changed.
    page = b.post("/message/edit", 400, **form, payload="{not json", headers="{}")
    assert "{not json" in page.text
    assert "invalid input syntax for type json" in page.text
    b.post("/message/edit", 400, **form, payload="{}", headers="[1]")
    page = b.post("/message/edit", **form, payload='{"to": "somebody"}', headers='{"n": "1"}')
    assert f"Message {ids[1]} was edited and requeued." in text(page)
    assert "dlq_edit" in text(page)  # in its history
    b.post("/message/edit", 404, **form, payload="again")  # it is no dead letter any more

    # What is not edited stays as it is, byte by byte: a browser sends CR LF, and drops the first line break.
    shown = b.get("/message/edit", queue=queue, dl_id=letters[ids[0]])
    assert ">\n\nfirst line is empty" in shown.text
    form |= {"dl_id": letters[ids[0]], "kind": "text", "type": "other"}
    b.post("/message/edit", **form, payload="\r\nfirst line is empty\r\nlast", headers="")

    rows = conn.execute(
        "select msg_id, type, payload, headers from pgque.receive(%s, 'c', 100, 'w') order by 1", [queue]
    ).fetchall()
    assert rows == [(ids[0], "other", payloads[0], None), (ids[1], "kind", '{"to": "somebody"}', {"n": "1"})]
    kept = conn.execute(
        "select msg_id, type, payload, outcome from pgque.archive_list(%s) order by msg_id", [queue]
    ).fetchall()
    assert kept == [(ids[0], "kind", payloads[0], "edited"), (ids[1], "kind", payloads[1], "edited")]
    hidden = browser(admin, hide_payloads=True)
    assert "payloads are hidden" in text(hidden.get("/message/edit", 400, queue=queue, dl_id=letters[ids[2]]))


def test_an_edit_changes_nothing_but_what_was_edited_and_json_is_shown_as_it_is(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    payloads = ["a\rb\r\nc", '{"n": 1.12345678901234567890123}', '{"a": 1, "a": 2}', '{"n": 1.50, "i": [1]}']
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    for payload in payloads:
        conn.execute(
            "select pgque.send(%s, 'kind', %s::text,"
            ' headers => \'{"f": 1.12345678901234567890123, "e": 1e400}\'::jsonb)',
            [queue, payload],
        )
    tick(queue)
    received = conn.execute(
        "select batch_id, array_agg(msg_id) from pgque.receive(%s, 'c', 100, 'w') group by 1", [queue]
    ).fetchone()
    assert received is not None
    conn.execute("select pgque.dead(%s, %s, 'no such address')", received)
    b = browser(admin)
    letters = conn.execute(
        "select dl_id, ev_id, ev_data, ev_headers::text from pgque.dlq_inspect(%s) order by 1", [queue]
    ).fetchall()
    for letter, number, payload, headers in letters:
        page = b.get("/message/edit", queue=queue, dl_id=letter).text
        areas = re.findall(r'<textarea id="(\w+)"[^>]*>\n?(.*?)</textarea>', page, re.S)
        fields = {name: re.sub(r"\r\n?|\n", "\r\n", unescape(value)) for name, value in areas}
        shown = unescape(b.get("/message", queue=queue, id=number).text)
        b.post("/message/edit", queue=queue, dl_id=letter, type="other", kind="text", **fields)
        state = conn.execute(
            "select type, payload, headers::text from pgque.get_message(%s, %s)", [queue, number]
        ).fetchone()
        assert state == ("other", payload, headers)
        if "12345678901234567890123" in payload or '"a": 2' in payload:
            assert payload in shown  # not another number, and not one of two members
    assert '"n": 1.5,\n  "i": [\n    1' in shown


@pytest.mark.parametrize("digits", ["0" * 20 + "9" * 30, "0" * 25 + "9" * 5000])
def test_no_number_has_too_many_digits(browser: NewBrowser, admin: Role, queue: str, digits: str) -> None:
    b = browser(admin)
    assert "No message was found." in text(b.get("/search", q=digits))
    assert "does not exist" not in text(b.get("/search", q=digits))
    for path, field in (
        ("/messages", "before"),
        ("/dead", "upto"),
        ("/archive", "before"),
        ("/message", "id"),
    ):
        assert "is no whole number" in text(b.get(path, 400, queue=queue, **{field: digits}))


def test_a_message_is_found_in_all_queues_by_id_key_type_and_text_in_every_state(
    browser: NewBrowser, admin: Role, roles: Roles, new_queue: Queues, conn: Connection, tick: Tick
) -> None:
    one, two = new_queue("find_a"), new_queue("find_b")
    batch, ids = leased(conn, tick, one, [f"needle {n}" for n in range(4)])
    conn.execute("select pgque.nack(%s, %s, retry_after => '1 hour')", [batch, ids[:1]])
    conn.execute("select pgque.dead(%s, %s, 'broken')", [batch, ids[1:2]])
    conn.execute("select pgque.archive(%s, %s)", [batch, ids[2:3]])
    conn.execute("select pgque.subscribe(%s, 'd')", [two])
    conn.execute("select pgque.send(%s, 'rare.type', 'needle in another queue')", [two])
    conn.execute("select pgque.send(%s, 'kind', 'needle later', delay => '1 hour', key => 'order-1')", [two])
    mine = roles()
    conn.execute("select pgque.grant_queue(%s, %s, 'admin'), pgque.grant_queue(%s, %s, 'consume')",
                 [one, mine.name, two, mine.name])  # fmt: skip
    b = browser(mine)

    def found(wanted: str, client: Browser = b, **fields: object) -> list[tuple[str, str, str]]:
        page = client.get("/search", q=wanted, **fields).text
        return re.findall(
            r'queue=([^"&]+)&amp;id=(\d+)">.*?State"><span class="badge \w+">(\w+)<', page, re.DOTALL
        )

    # In the queue that it administers: pending, retry, processing, dead and archived messages
    in_one = {(row[1], row[2]) for row in found("NEEDLE") if row[0] == one}
    assert in_one == {
        (str(m), s) for m, s in zip(ids, ("retry", "dead", "archived", "processing"), strict=True)
    }
    # In the one that it consumes: those that come next
    assert (two, "1", "pending") in found("needle")
    assert found("rare.type") == [(two, "1", "pending")]
    everywhere = browser(admin)
    assert (two, "2", "delayed") in found("order-1", everywhere)
    assert {(one, str(ids[1]), "dead"), (two, str(ids[1]), "delayed")} <= set(
        found(str(ids[1]), everywhere, of=one)
    )
    assert found("no such thing") == []
    page = text(b.get("/search", q="no such thing"))
    assert "No message was found. Searched the newest 20,000 ids of 2 of 2 queues." in page
    assert "the next 2,000 messages" in page
    # The field is on every page, and begins with the queue that is shown.
    assert f'name="of" value="{one}"' in b.get("/messages", queue=one).text
    assert 'role="search"' in b.get("/").text
    # Who may read only one of them finds nothing of the other one.
    narrow = roles()
    conn.execute("select pgque.grant_queue(%s, %s, 'consume')", [two, narrow.name])
    assert {row[0] for row in found("needle", browser(narrow))} == {two}
    hidden = browser(mine, hide_payloads=True)
    assert found("needle", hidden) == []
    assert found("rare.type", hidden) == [(two, "1", "pending")]
    assert "Texts of payloads are not searched" in text(hidden.get("/search", q="needle"))


def test_a_search_is_bounded_and_says_how_far_it_looked(
    browser: NewBrowser,
    admin: Role,
    new_queue: Queues,
    conn: Connection,
    tick: Tick,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queues = [new_queue(f"bound_{n}") for n in range(3)]
    for queue in queues:
        conn.execute("select pgque.subscribe(%s, 'c')", [queue])
        conn.execute(
            "select pgque.send_batch(%s, 'first', array['old needle']),"
            " pgque.send_batch(%s, 'kind', array_fill('x'::text, array[300]))", [queue, queue],
        )  # fmt: skip
        tick(queue)
    b = browser(admin)
    # Digits that are no id: Python refuses to read so many.
    for digits in ("0" * 5000, "0" * 20 + "9" * 30, "9" * 19):
        assert "No message was found." in text(b.get("/search", q=digits))
        assert "is no whole number" in text(b.get("/message", 400, queue=queues[0], id=digits))
    monkeypatch.setattr("pgque.web.find.WINDOW", 100)
    page = text(b.get("/search", q="old needle", of=queues[0]))
    assert "No message was found." in page
    assert re.search(r"newest 100 ids of (\d+) of \1 queues, since \d{4}-", page)
    assert "Search longer" in page
    assert "Search longer" not in text(b.get("/search", q="old needle", of=queues[0], longer=1))
    assert queues[0] in text(b.get("/search", q="old needle", of=queues[0], longer=1))
    # Enough was found: a longer search would find the same.
    page = text(b.get("/search", q="kind", of=queues[0]))
    assert "These are the first 50." in page
    assert "Search longer" not in page
    # Old dead letters are found beside the newest messages.
    batch = conn.execute("select min(batch_id) from pgque.receive(%s, 'c', 10, 'w')", [queues[1]]).fetchone()
    assert batch is not None
    conn.execute("select pgque.dead(%s, array[1]::bigint[], 'broken')", [batch[0]])
    assert f"1 {queues[1]} dead c first" in text(b.get("/search", q="old needle", of=queues[1]))
    # Time is up after the first queue: the page says so, and the queue at hand was the first.
    monkeypatch.setattr("pgque.web.page.SEARCH", 1)
    page = text(b.get("/search", q="kind", of=queues[2]))
    assert re.search(r"ids of [01] of (?!1 )\d+ queues", page), page


def test_old_dead_letters_are_deleted_up_to_the_moment_that_was_shown_in_every_time_zone(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    batch, ids = leased(conn, tick, queue, ["before", "after"])
    conn.execute("select pgque.dead(%s, %s, 'no such address')", [batch, ids])
    # A zone whose hours changed within these months, whatever the date is
    conn.execute(sql.SQL("alter role {} set timezone = 'Europe/Berlin'").format(sql.Identifier(admin.name)))
    b = browser(admin)
    for months in (6, 12):
        page = b.get("/dead/purge", queue=queue, older_than=f"{months} months")
        found = re.search(r'name="until" value="([^"]+)"', page.text)
        assert found is not None
        conn.execute(
            "update pgque.dead_letter as d set dl_time = %s::timestamptz"
            " + case when ev_data = 'before' then -1 else 1 end * interval '1 minute'"
            " where dl_queue_id = (select queue_id from pgque.queue where queue_name = %s)",
            [found[1], queue],
        )
        assert f"{1 if months == 6 else 0:,} deleted." in text(
            b.post("/dead/purge", queue=queue, until=found[1])
        )
    rows = conn.execute("select ev_data from pgque.dlq_inspect(%s)", [queue]).fetchall()
    assert rows == [("after",)]


def test_a_small_number_is_not_rounded_to_twice_as_much() -> None:
    found = [
        units.number(value) for value in (0.025, 0.05, 0.14, 0.4, 0.999, 1.25, 99.94, 0, 3, 1234.5, -0.05)
    ]
    assert found == ["0.025", "0.05", "0.14", "0.4", "1", "1.2", "99.9", "0", "3", "1,234", "-0.05"]


def test_a_file_of_the_next_messages_tells_that_there_are_more(
    browser: NewBrowser, roles: Roles, queue: str, conn: Connection, tick: Tick
) -> None:
    role = roles()
    conn.execute(
        "select pgque.subscribe(%s, 'c'), pgque.grant_queue(%s, %s, 'consume')", [queue, queue, role.name]
    )
    send = "select pgque.send_batch(%s, array(select 'n' || n from generate_series(1, %s) as n))"
    conn.execute(send, [queue, 2000])
    tick(queue)
    b = browser(role)
    found = b.get("/messages", queue=queue, format="json").json()
    assert (len(found["rows"]), found["more"]) == (2000, None)
    conn.execute(send, [queue, 1])
    tick(queue)
    answer = b.get("/messages", queue=queue, format="json")
    assert (len(answer.json()["rows"]), answer.json()["more"]) == (2000, "looked")
    assert answer.headers["pgque-more"] == "looked"
    # A filter looks at as many, so what it did not find may be among the others.
    found = b.get("/messages", queue=queue, format="json", text="nowhere").json()
    assert (found["rows"], found["more"]) == ([], "looked")


def test_the_history_tells_of_no_lease_of_a_consumer_that_reads_alone(
    queue: str, conn: Connection, tick: Tick
) -> None:
    conn.execute("select pgque.subscribe(%s, 'alone'), pgque.subscribe(%s, 'shared')", [queue, queue])
    conn.execute("select pgque.send(%s, 'x'::text)", [queue])
    tick(queue)
    conn.execute("select pgque.receive(%s, 'alone', 1)", [queue])
    conn.execute("select pgque.receive(%s, 'shared', 1, 'w', '1 hour')", [queue])
    found = conn.execute(
        "select h.consumer_name, h.event, h.detail from pgque.message_history(%s, 1) as h"
        " where h.consumer_name is not null order by 1, 2",
        [queue],
    ).fetchall()
    assert found == [
        ("alone", "delivered", None),
        ("shared", "delivered", "delivery 1"),
        ("shared", "lease expires", None),
    ]
