"""What strangers, other sites, texts of users and roles with few rights try, at every address of the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from httpx2 import Response
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from conftest import Queues, Role, Roles
from pgque.web import changes
from pgque.web.page import Form
from pgque.web.site import ASKS, CHANGES, READS
from support.pages import Browser, csrf, text

Connection = psycopg.Connection[tuple[Any, ...]]
NewBrowser = Callable[..., Browser]
Tick = Callable[[str], object]

# What each address needs so that its call reaches the database, beside the queue.
FIELDS: dict[str, str] = {
    "consumer": "c", "worker": "w", "id": "1", "key": "none", "name": "no recurring", "action": "requeue",
    "setting": "max_retries", "value": "3", "tick": "1", "to": "latest", "older_than": "1000 days",
    "payload": "x", "all": "1", "reason": "none at all", "type": "none", "text": "none", "before": "1", "after": "0",
    "past": "", "since": "2001-01-01T00:00", "until": "2001-01-01T00:00", "status": "pending", "order": "name",
    "page": "1", "of": "none", "kind": "text", "headers": "{}", "delay": "1 hour", "deliver_at": "", "ttl": "1 day",
    "partition_key": "p", "upto": "1", "one": "", "back": "", "next": "", "q": "1", "dl_id": "1", "archive_id": "1",
}  # fmt: skip
# Those that read no queue's name, or change what the other cases need.
NO_QUEUE = {
    "/",
    "/recurring",
    "/recurring/do",
    "/actions",
    "/streams",
    "/job",
    "/queue/create",
    "/recurring/drop",
    "/recurring/change",
    "/search",
}
# Those of changes.py have a test of their own, which gives every field.
DANGEROUS = {"/queue/pause", "/queue/seek", *changes.READS, *changes.ASKS, *changes.RUNS}

INJECTIONS = (
    "'; select pgque.drop_queue('%s', true); --", "x') or pg_sleep(9) is null; --", "$$||current_user||$$",
    "\\'; select 1; --", "%(queue)s %s %b %", '"x"', "1; drop schema pgque cascade", "\u2019 or 1=1", "{{7*7}}",
)  # fmt: skip
EVIL = "x'\"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}%s\u202e\x1b[31m"


def ask(b: Browser, token: str, path: str, fields: dict[str, str]) -> Response:
    """Call an address as a browser would: a form for what changes, a query string for what reads."""
    if path in READS and path not in CHANGES:
        return b.client.get(path, params=fields)
    return b.client.post(path, data={"csrf": token, **fields})


def test_strangers_and_other_sites_reach_no_address(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection
) -> None:
    before = conn.execute("select count(*) from pgque.list_actions()").fetchone()
    b, stranger = browser(admin), browser()
    fields = {"queue": queue, **FIELDS}
    forged = Browser(b.client.app, cookies={"pgque_session": b.client.cookies["pgque_session"][:-1] + "x"})
    for path in READS:
        for who in (stranger, forged):
            page = who.client.get(path, params=fields, follow_redirects=False)
            assert page.status_code == 303, path
            assert page.headers["location"].startswith("/login?next=%2F"), path
            assert queue not in page.text
    for path in {**CHANGES, **ASKS}:
        page = stranger.client.post(path, data=fields, follow_redirects=False)
        assert page.headers["location"] == "/login?ended=1", path
        # With the cookie, as a browser sends it for another site that tries, but without the token of the form.
        for data, headers in (
            (fields, {}),
            ({**fields, "csrf": "0" * 64}, {"origin": "http://evil.example"}),
        ):
            page = b.client.post(path, data=data, headers=headers, follow_redirects=False)
            assert page.status_code == 403, path
        if path not in READS:
            assert b.client.get(path, params=fields).status_code == 405, path
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            assert b.client.request(method, path).status_code == 405, (method, path)
    for path in (
        "/../etc/passwd",
        "/static/../site.py",
        "/static/%2e%2e/site.py",
        "/static/",
        "/login/",
    ):
        assert b.client.get(path).status_code == 404, path
    assert conn.execute("select count(*) from pgque.list_actions()").fetchone() == before

    # A session begins with a cookie of its own, and a login ends the one before.
    old = b.client.cookies["pgque_session"]
    fresh = Browser(b.client.app, cookies={"pgque_session": old})
    page = fresh.log_in(admin)
    assert "pgque_session=" in page.history[0].headers["set-cookie"]
    assert old not in page.history[0].headers["set-cookie"]
    assert "Log in" in text(Browser(b.client.app, cookies={"pgque_session": old}).get("/"))


def test_no_field_of_any_address_is_taken_as_sql(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    b = browser(admin)
    token = csrf(b.get("/"))
    read: set[str] = set()
    really = Form.get

    def noted(self: Form, name: str, default: str = "") -> str:
        read.add(name)
        return really(self, name, default)

    monkeypatch.setattr(Form, "get", noted)
    tried = 0
    for path in {**READS, **CHANGES, **ASKS}:
        if path in DANGEROUS:
            continue
        fields = {"queue": queue, **FIELDS}
        read.clear()
        ask(b, token, path, fields)
        for field in sorted(read - {"csrf", "back"}):
            for attack in (INJECTIONS[0], INJECTIONS[1 + tried % (len(INJECTIONS) - 1)]):
                value = attack.replace("'%s'", f"'{queue}'")
                page = ask(b, token, path, {**fields, field: value})
                assert page.status_code < 500, (path, field, attack, text(page))
                assert "syntax error" not in page.text, (path, field, attack)
                tried += 1
    assert tried > 150
    assert conn.execute("select count(*) from pgque.get_queue_info(%s)", [queue]).fetchone() == (1,)


def test_no_text_of_a_user_becomes_markup_on_the_pages_that_need_few_rights_to_fill(
    browser: NewBrowser, admin: Role, roles: Roles, new_queue: Queues, conn: Connection, tick: Tick,
    connect: Callable[..., Connection],
) -> None:  # fmt: skip
    queue, name = new_queue("<b>'\"&"), f"<i>'\"{admin.name}"
    conn.execute("select pgque.subscribe(%s, %s)", [queue, EVIL])
    conn.execute("select pgque.send_batch(%s, %s, array_fill(%s::text, array[4]))", [queue, EVIL, EVIL])
    tick(queue)
    rows = conn.execute(
        "select batch_id, msg_id from pgque.receive(%s, %s, 4, %s, '1 hour')", [queue, EVIL, EVIL]
    ).fetchall()
    batch, ids = rows[0][0], [row[1] for row in rows]
    conn.execute("select pgque.nack(%s, %s, retry_after => '1 hour', reason => %s)", [batch, ids[:1], EVIL])
    conn.execute("select pgque.dead(%s, %s, %s)", [batch, ids[1:3], EVIL])
    conn.execute("select pgque.archive(%s, %s)", [batch, ids[3:]])
    stream = connect(autocommit=True, application_name="<u>\"'"[:60])
    stream.execute("select pgque.open_stream(%s, %s)", [queue, f"stream {EVIL}"])
    sink = EVIL.replace("\x1b", "").replace("\u202e", "")
    conn.execute("select pgque.sink_begin(%s, 1)", [sink])
    conn.execute("select pgque.sink_commit(%s, 1, array[]::uuid[], 0)", [sink])
    # A role of that name, whose calls are noted under it
    conn.execute(
        sql.SQL("create role {} login password 'x' in role pgque_admin; grant select on pgque.subscriber,"
                " pgque.sink_epoch, pgque.sink_attempt to {}").format(*[sql.Identifier(name)] * 2)
    )  # fmt: skip
    b = browser()
    page = b.log_in(Role(name, make_conninfo(admin.dsn, user=name, password="x")))
    try:
        assert page.status_code == 200
        evil = {"queue": queue, "consumer": EVIL, "worker": EVIL}
        pages = [page, b.log_in(admin, user=f"{EVIL}", password=EVIL)]
        b.log_in(Role(name, make_conninfo(admin.dsn, user=name, password="x")))
        pages += [b.client.get(path, params={"queue": queue}) for path in READS]
        pages += [b.client.get(path, params=dict.fromkeys(FIELDS, EVIL) | {"queue": EVIL}) for path in READS]
        pages += [b.client.get("/streams"), b.client.get("/actions", params={"of": queue})]
        pages += [b.client.get("/message", params={"queue": queue, "id": one}) for one in ids]
        pages += [b.post("/queue/reclaim/worker", **evil), b.post("/queue/retry", **evil)]
        pages += [b.post("/dead/do", queue=queue, one="requeue 999", back="/dead?queue=" + EVIL)]
        pages += [b.client.get("/actions")]
        for page in pages:
            assert page.status_code < 500, page.text
            for tag in ("<script>", "<img", "<b>", "<i>", "<u>"):
                assert tag not in page.text, (page.url, tag)
            shown = re.sub(
                r"<textarea.*?</textarea>|<(input|button|option|a) [^>]*>", "", page.text, flags=re.S
            )
            assert "\x1b" not in shown, page.url
            assert "\u202e" not in shown, page.url
            # No text of a user ends up in a header beyond the address, where it is encoded.
            assert not re.search(r"[<>\x1b\u202e]", str(page.headers.get("location", "")))
        said = " ".join(text(page) for page in pages)
        for words in ("<u>", "<i>", "stream x'\"><script>", "alert(1)"):
            assert words in said
    finally:
        b.client.app.close()  # type: ignore[attr-defined]
        conn.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


def test_a_role_with_a_right_to_one_queue_cannot_find_out_which_others_exist(
    browser: NewBrowser, roles: Roles, new_queue: Queues, conn: Connection
) -> None:
    own, other, absent = new_queue("mine"), new_queue("theirs_1"), "absent_1"
    conn.execute("select pgque.subscribe(%s, 'c')", [other])
    role = roles()
    conn.execute("select pgque.grant_queue(%s, %s, 'admin')", [own, role.name])
    b = browser(role)
    token = csrf(b.get("/"))
    for path in {**READS, **CHANGES, **ASKS}:
        answers = []
        for name in (other, absent):
            page = ask(b, token, path, {"queue": name, **FIELDS})
            assert page.status_code < 500
            said = text(page).replace(name, "NAME").replace(f"queue={name}", "")
            answers.append((page.status_code, page.url.path, said))
        assert answers[0] == answers[1], path
        if path not in NO_QUEUE:
            assert answers[0][0] != 200 or "may not" in answers[0][2], path
    password = str(conninfo_to_dict(role.dsn)["password"])
    assert password not in b.get("/").text
