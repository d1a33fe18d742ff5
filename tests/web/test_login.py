"""Who gets in, how a session ends, and what strangers get."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgque.web
from conftest import Role
from pgque.errors import PgqueBadArgumentError
from pgque.web.jobs import Job
from pgque.web.sessions import Attempts
from support.pages import Browser, csrf, text
from support.servers import TestServer

Connection = psycopg.Connection[tuple[Any, ...]]
NewBrowser = Callable[..., Browser]


def test_a_role_logs_in_with_its_password_and_everything_runs_as_that_role(
    browser: NewBrowser, reader: Role, conn: Connection
) -> None:
    b = browser()
    assert b.client.get("/queue?queue=x", follow_redirects=False).status_code == 303
    page = b.get("/")
    assert "Log in" in text(page)

    page = b.log_in(reader)
    assert page.status_code == 200
    assert reader.name in text(page)
    row = conn.execute("select count(*) from pg_stat_activity where usename = %s", [reader.name]).fetchone()
    assert row is not None
    assert row[0] in (1, 2)  # the figures of the first page are taken over a connection of their own

    # A browser sends the cookies of a host to all its ports: another page on this host has its own.
    elsewhere = Browser(b.client.app, base_url="http://testserver:8812")
    elsewhere.log_in(reader)
    assert "pgque_session_8812" in elsewhere.client.cookies
    elsewhere.client.cookies.update(dict(b.client.cookies))
    elsewhere.post("/logout")
    assert "Log out" in b.get("/").text

    cookie = next(c for c in b.client.cookies.jar if c.name == "pgque_session")
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite") == "lax"
    assert str(conninfo_to_dict(reader.dsn)["password"]) not in page.text + str(page.history[0].headers)


def test_wrong_passwords_are_refused_with_one_text_and_limited(
    browser: NewBrowser, reader: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The password of the process is none of those who log in.
    monkeypatch.setenv("PGPASSWORD", str(conninfo_to_dict(reader.dsn)["password"]))
    b = browser()
    wrong = [b.log_in(reader, password=password) for password in ("wrong", "", "wrong again")]
    wrong.append(b.log_in(reader, user="nobody_at_all", password="wrong"))
    for page in wrong:
        assert page.status_code == 401
        assert "Login failed. Check user and password" in text(page)
        assert "Log out" not in page.text
    for _ in range(2):
        assert b.log_in(reader, password="wrong").status_code == 401
    assert b.log_in(reader).status_code == 429  # the right one, too late
    assert b.log_in(reader, user="somebody_else").status_code == 401
    attempts = Attempts()  # of a stranger whose proxy passes on any address
    waits = [attempts.begin(f"10.0.0.{n}", "admin") for n in range(101)]
    assert waits[:100] == [0] * 100
    assert waits[100] > 0
    assert attempts.begin("10.0.0.1", "somebody") == 0


def test_a_server_that_asks_for_no_password_lets_nobody_in(
    server: TestServer, dsn: str, reader: Role
) -> None:
    if server.process is None:
        pytest.skip("the server was not started from binaries, so its sockets ask for a password too")
    parts = conninfo_to_dict(dsn)
    app = pgque.web.app(make_conninfo("", host=parts["host"], port=parts["port"], dbname=parts["dbname"]))
    b = Browser(app)
    page = b.log_in(reader, password="anything")
    assert page.status_code == 401
    assert "accepts this role without a password" in text(page)
    app.close()  # type: ignore[attr-defined]


def test_a_role_without_rights_and_a_database_without_pgque_get_an_error_with_a_hint(
    browser: NewBrowser, nobody: Role, writer: Role, reader: Role, tcp_dsn: str
) -> None:
    for role in (nobody, writer):
        page = browser().log_in(role)
        assert page.status_code == 401
        assert "has no right to read queues" in text(page)
    elsewhere = make_conninfo(tcp_dsn, dbname="postgres")
    b = Browser(app := pgque.web.app([tcp_dsn, elsewhere]))
    assert "Database" in text(b.get("/login"))
    assert "pgque is not installed" in text(b.log_in(reader, database="1"))
    assert b.log_in(reader, database="0").status_code == 200
    app.close()  # type: ignore[attr-defined]
    with pytest.raises(PgqueBadArgumentError, match="names no database"):
        pgque.web.app("host=localhost")


def test_log_out_and_time_end_a_session_and_its_connections(
    browser: NewBrowser, reader: Role, conn: Connection, wait_until: Callable[..., None]
) -> None:
    b = browser(reader)
    kept = dict(b.client.cookies)

    def connected() -> int:
        row = conn.execute(
            "select count(*) from pg_stat_activity where usename = %s", [reader.name]
        ).fetchone()
        assert row is not None
        return int(row[0])

    assert connected() in (1, 2)
    page = b.post("/logout")
    assert "Log in" in text(page)
    wait_until(lambda: connected() == 0, "its connections are closed")
    b.client.cookies.update(kept)  # who kept the cookie has nothing
    assert "Log in" in text(b.get("/"))

    assert b.log_in(reader).status_code == 200
    session = next(iter(b.client.app.sessions._held.values()))  # type: ignore[attr-defined]
    session.used -= 31 * 60
    page = b.client.post("/queue/pause", data={"queue": "any"})
    assert "Nothing was changed: the session has ended." in text(page)
    assert "Log in" in text(b.get("/"))
    wait_until(lambda: connected() == 0, "its connections are closed")

    assert b.log_in(reader).status_code == 200
    session = next(iter(b.client.app.sessions._held.values()))  # type: ignore[attr-defined]
    session.began = time.monotonic() - 13 * 3600
    assert "Log in" in text(b.get("/"))


def test_too_many_sessions_end_those_of_the_role_that_has_most(
    browser: NewBrowser, admin: Role, reader: Role
) -> None:
    def logged_in(b: Browser) -> bool:
        return "Log out" in b.get("/").text

    first = browser(admin)
    sessions = first.client.app.sessions  # type: ignore[attr-defined]
    sessions._config = replace(sessions._config, most_sessions=4)
    others = [Browser(first.client.app) for _ in range(4)]
    for b in others:
        assert b.log_in(reader).status_code == 200
    assert [logged_in(b) for b in (first, *others)] == [True, False, True, True, True]

    # A session in which work goes on stays.
    job, release = Job("work", "/", [1]), threading.Event()
    next(s for s in sessions._held.values() if s.user == admin.name).jobs["x"] = job
    job.start(lambda: nullcontext((lambda _: release.wait(60), lambda *_: [])))
    second = Browser(first.client.app)
    assert second.log_in(admin).status_code == 200
    third = Browser(first.client.app)
    assert third.log_in(admin).status_code == 200
    assert [logged_in(b) for b in (first, second, third)] == [True, False, True]
    sessions._config = replace(sessions._config, most_sessions=1)
    for session in list(sessions._held.values()):
        if not session.works:
            sessions.end(session)
    assert "logged in too often" in text(Browser(first.client.app).log_in(admin))
    release.set()
    job.join(10)
    assert second.log_in(admin).status_code == 200


def test_forged_cookies_and_forms_of_other_sites_are_refused(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection
) -> None:
    b = browser(admin)
    token = csrf(b.get("/"))
    paused = "select queue_paused from pgque.queue where queue_name = %s"
    for fields, headers in (
        ({}, {}),
        ({"csrf": "0" * 64}, {}),
        ({"csrf": "ü"}, {}),
        ({"csrf": token}, {"origin": "http://evil.example"}),
        ({"csrf": token}, {"origin": "null"}),
    ):
        page = b.client.post("/queue/pause", data={"queue": queue, **fields}, headers=headers)
        assert page.status_code == 403, (fields, headers)
    assert b.client.get("/queue/pause", params={"queue": queue}).status_code == 405
    assert b.client.post("/queue/pause", json={"queue": queue, "csrf": token}).status_code == 415
    assert conn.execute(paused, [queue]).fetchone() == (False,)
    good = {"queue": queue, "csrf": token}
    assert (
        b.client.post("/queue/pause", data=good, headers={"origin": "http://testserver"}).status_code == 200
    )
    assert conn.execute(paused, [queue]).fetchone() == (True,)

    # Another session's token does not fit, and neither does a cookie that this process did not sign.
    other = browser(admin)
    assert other.client.post("/queue/resume", data=good).status_code == 403
    value = b.client.cookies["pgque_session"]
    for forged in (
        "x",
        "x.y",
        "",
        value[:-1] + ("0" if value[-1] != "0" else "1"),
        value.split(".")[0] + ".",
    ):
        stranger = Browser(b.client.app, cookies={"pgque_session": forged})
        assert "Log in" in text(stranger.get("/"))
    # The login form has a token too.
    fresh = browser()
    sent = {"user": admin.name, "password": str(conninfo_to_dict(admin.dsn)["password"])}
    assert fresh.client.post("/login", data=sent).status_code == 403


def test_after_login_the_page_that_was_asked_for_follows_and_no_other_site(
    browser: NewBrowser, reader: Role, queue: str
) -> None:
    b = browser()
    page = b.client.get("/queue", params={"queue": queue})
    assert page.url.path == "/login"
    page = b.log_in(reader, next=page.url.params["next"])
    assert f"Queue {queue}" in text(page)
    for evil in (
        "//evil.example/", "https://evil.example/", "/\\evil.example", "\\\\evil.example", "javascript:alert(1)",
        "/login", "/queue/../../x", "http:evil.example", "/\t/evil.example", "///evil.example", "[",
    ):  # fmt: skip
        page = b.log_in(reader, next=evil)
        assert page.url.host == "testserver", evil
        assert page.url.path == "/", evil
    page = b.post("/queue/pause", back="//evil.example", queue="no such queue")
    assert page.url.path == "/"


def test_every_response_has_the_headers_that_browsers_need(browser: NewBrowser, reader: Role) -> None:
    b = browser(reader)
    for path in ("/", "/login", "/nothing", "/static/style.css", "/static/live.js", "/healthz", "/queue"):
        headers = b.client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == ("max-age=300" if "static" in path else "no-store")
    for path in ("/", "/login"):
        page = b.get(path).text
        assert " style=" not in page
        assert "<style" not in page
        assert " on" not in page.replace(" on 127", "").split("<body>")[1].split("<main")[0]
    assert "Secure" not in b.client.get("/login").headers["set-cookie"]
    safe = Browser(b.client.app, base_url="https://testserver")
    assert "Secure" in safe.client.get("/login").headers["set-cookie"]


def test_bodies_that_are_too_large_or_no_forms_are_refused(
    browser: NewBrowser, admin: Role, queue: str
) -> None:
    b = browser(admin)
    token = csrf(b.get("/"))
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (
        b.client.post("/send", data={"csrf": token, "queue": queue, "payload": "x" * 3_000_000}).status_code
        == 413
    )
    login = csrf(browser().get("/login"))
    assert browser().client.post("/login", data={"csrf": login, "user": "x" * 20_000}).status_code == 413
    assert b.client.post("/send", content=b"\xff\xfe", headers=form).status_code == 400
    assert b.client.post("/send", content=b"&".join([b"a=1"] * 30_000), headers=form).status_code == 400
    assert b.client.get("/messages?queue=%00").status_code == 400
    assert b.client.get("/messages?queue=%ff").status_code in (400, 403, 404)
    for number in ("x", "1e3", "9" * 30, "1;select 1", "-1' or '1'='1"):
        assert b.client.get("/message", params={"queue": queue, "id": number}).status_code == 400, number
        assert b.client.get("/messages", params={"queue": queue, "after": number}).status_code == 400, number


def test_below_a_prefix_every_address_has_it(
    browser: NewBrowser, reader: Role, queue: str, tcp_dsn: str
) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    app = pgque.web.app(tcp_dsn, path_prefix="/tools/pgque")
    mounted = pgque.web.app(tcp_dsn)
    whole = Starlette(routes=[Mount("/tools/pgque", app=mounted)])
    for asgi in (app, whole):
        b = Browser(asgi)
        page = b.client.get("/tools/pgque/queue", params={"queue": queue}, follow_redirects=False)
        assert page.headers["location"].startswith("/tools/pgque/login?next=%2Fqueue")
        page = b.client.get("/tools/pgque/login")
        assert 'action="/tools/pgque/login"' in page.text
        password = str(conninfo_to_dict(reader.dsn)["password"])
        sent = {"csrf": csrf(page), "user": reader.name, "password": password}
        page = b.client.post("/tools/pgque/login", data=sent, follow_redirects=False)
        assert page.headers["location"] == "/tools/pgque/"
        assert "Path=/tools/pgque;" in page.headers["set-cookie"]
        page = b.client.get("/tools/pgque/queue", params={"queue": queue})
        assert page.status_code == 200
        assert 'href="/tools/pgque/messages?' in page.text
        assert 'href="/m' not in page.text
    # Some proxies take the prefix off.
    assert 'action="/tools/pgque/login"' in Browser(app).client.get("/login").text
    app.close()  # type: ignore[attr-defined]
    mounted.close()  # type: ignore[attr-defined]
    for wrong in ("pgque", "/pgque/", "//pgque"):
        with pytest.raises(PgqueBadArgumentError):
            pgque.web.app(tcp_dsn, path_prefix=wrong)
