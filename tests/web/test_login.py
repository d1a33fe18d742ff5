"""Who gets in, how a session ends, and what strangers get."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from httpx2 import Response
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgque.web
from conftest import Role, Roles
from faults.clusters import programs_of, started
from pgque.errors import PgqueBadArgumentError, PgqueConnectionError
from pgque.web import database, sessions
from pgque.web.config import Database
from pgque.web.jobs import Job
from pgque.web.sessions import Attempts
from support import servers
from support.pages import Browser, csrf, over_tcp, text
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
    for n in range(100):
        assert attempts.wait(f"10.0.0.{n}", "admin") == 0
        attempts.failed(f"10.0.0.{n}", "admin")
    assert attempts.wait("10.0.1.1", "admin") > 0
    assert attempts.wait("10.0.0.1", "somebody") == 0


def at_once(calls: Sequence[Callable[[], Response]]) -> list[Response]:
    """Return what the calls return that all begin together."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Response]) -> Response:
        barrier.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_twelve_correct_logins_at_once_succeed_and_twenty_wrong_ones_try_five_passwords(
    browser: NewBrowser, reader: Role, tcp_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = browser()
    running, most, tried, counted = [0], [0], [0], threading.Lock()
    really = database.log_in

    def noted(*args: Any) -> Any:
        with counted:
            running[0] += 1
            tried[0] += 1
            most[0] = max(most[0], running[0])
        try:
            time.sleep(0.05)  # so that they overlap on any machine
            return really(*args)
        finally:
            with counted:
                running[0] -= 1

    monkeypatch.setattr(database, "log_in", noted)
    people = [Browser(first.client.app) for _ in range(12)]
    pages = at_once([partial(b.log_in, reader) for b in people])
    assert [page.status_code for page in pages] == [200] * 12
    assert all("Log out" in page.text for page in pages)
    assert 1 < most[0] <= sessions.LOGINS
    tried[0] = 0
    strangers = [Browser(first.client.app) for _ in range(20)]
    pages = at_once([partial(b.log_in, reader, password=f"guess {n}") for n, b in enumerate(strangers)])
    assert sorted(page.status_code for page in pages) == [401] * 5 + [429] * 15
    assert tried[0] == 5


def test_logins_to_a_database_that_does_not_answer_keep_nobody_out_of_another_one(
    tcp_dsn: str, reader: Role
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        other = make_conninfo(tcp_dsn, port=silent.getsockname()[1], connect_timeout=8)
        app = pgque.web.app([tcp_dsn, other])
        strangers = [Role(f"nobody{n}", make_conninfo("", password="x")) for n in range(8)]
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(Browser(app).log_in, role, database="1") for role in strangers]
            time.sleep(1)
            began = time.monotonic()
            assert Browser(app).log_in(reader).status_code == 200
            assert time.monotonic() - began < 5
            assert [answer.result().status_code for answer in answers] == [503] * 8
        app.close()  # type: ignore[attr-defined]


def test_a_database_that_cannot_be_reached_is_no_wrong_password(
    server: TestServer, reader: Role, roles: Roles, tcp_dsn: str, conn: Connection
) -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        port = nobody_listens.getsockname()[1]
        b = Browser(app := pgque.web.app([tcp_dsn, make_conninfo(tcp_dsn, port=port)]))
        for _ in range(7):
            page = b.log_in(reader, database="1")
            assert page.status_code == 503
            assert "The database cannot be reached" in text(page)
    # It takes no more connections of this role: the password is right, and was asked for.
    conn.execute(sql.SQL("alter role {} connection limit 0").format(sql.Identifier(reader.name)))
    for _ in range(7):
        assert b.log_in(reader).status_code == 503
    conn.execute(sql.SQL("alter role {} connection limit -1").format(sql.Identifier(reader.name)))
    assert b.log_in(reader).status_code == 200
    # The server repeats the name, whose words are none of its own.
    named = Role("permission denied for database", make_conninfo("", password="x"))
    codes = [Browser(app).log_in(named).status_code for _ in range(6)]
    assert codes == [401] * 5 + [429]
    # A role that may not log in is refused as one that does not exist.
    locked = roles("reader")
    conn.execute(sql.SQL("alter role {} nologin").format(sql.Identifier(locked.name)))
    stranger = Browser(app)
    codes = [stranger.log_in(locked).status_code for _ in range(6)]
    assert codes == [401] * 5 + [429]
    app.close()  # type: ignore[attr-defined]


@pytest.mark.programs
def test_a_server_that_has_no_connection_left_is_no_wrong_password(
    server: TestServer, wait_until: Callable[..., None]
) -> None:
    bindir = programs_of(server, "pg_ctl")
    with ExitStack() as stack:
        own = stack.enter_context(
            started(bindir, settings={"max_connections": "5", "superuser_reserved_connections": "2"})
        )
        with psycopg.connect(own.dsn, autocommit=True) as conn:
            conn.execute(servers.SQL_FILE.read_bytes())
            conn.execute("create role looks login password 'x' in role pgque_reader")
        app = pgque.web.app(over_tcp(own, own.dsn))
        stack.callback(app.close)  # type: ignore[attr-defined]
        role = Role("looks", make_conninfo("", user="looks", password="x"))
        with ExitStack() as taken:
            for _ in range(3):
                taken.enter_context(psycopg.connect(own.dsn))
            for _ in range(6):
                page = Browser(app).log_in(role)
                assert (page.status_code, "cannot be reached" in text(page)) == (503, True), text(page)
        with psycopg.connect(own.dsn, autocommit=True) as conn:  # a transaction sees the others as they were
            left = "select count(*) = 1 from pg_stat_activity where backend_type = 'client backend'"
            wait_until(lambda: conn.execute(left).fetchone() == (True,), "the others have ended")
            assert Browser(app).log_in(role).status_code == 200


@pytest.mark.programs
def test_a_server_that_goes_down_after_it_took_the_password_is_no_wrong_password(
    server: TestServer, wait_until: Callable[..., None]
) -> None:
    with ExitStack() as stack:
        own = stack.enter_context(started(programs_of(server, "pg_ctl"), settings={}))
        conn = stack.enter_context(psycopg.connect(own.dsn, autocommit=True))
        conn.execute(servers.SQL_FILE.read_bytes())
        conn.execute("create role looks login password 'x' in role pgque_reader")
        app = pgque.web.app(over_tcp(own, own.dsn))
        stack.callback(app.close)  # type: ignore[attr-defined]
        role = Role("looks", make_conninfo("", user="looks", password="x"))
        conn.execute("alter system set post_auth_delay = '9s'")
        conn.execute("select pg_reload_conf()")
        row = conn.execute("show data_directory").fetchone()
        assert row is not None
        parent = (Path(row[0]) / "postmaster.pid").read_text().split()[0]

        def beginning() -> list[int]:
            listed = subprocess.run(
                ["ps", "-o", "pid=,args=", "--ppid", parent], capture_output=True, text=True, check=True
            ).stdout.splitlines()
            return [int(line.split()[0]) for line in listed if ": looks " in line]

        time.sleep(1)  # only a new session has the setting, and that one would take as long
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(Browser(app).log_in, role)
            wait_until(lambda: beginning() != [], "the password was taken")
            time.sleep(0.5)
            os.kill(beginning()[0], signal.SIGKILL)
            page = answer.result()
        assert (page.status_code, "cannot be reached" in text(page)) == (503, True), text(page)


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
    browser: NewBrowser, nobody: Role, reader: Role, tcp_dsn: str
) -> None:
    page = browser().log_in(nobody)
    assert page.status_code == 401
    assert "This role has no right in pgque. Grant it" in text(page)
    elsewhere = make_conninfo(tcp_dsn, dbname="postgres")
    b = Browser(app := pgque.web.app([tcp_dsn, elsewhere]))
    assert "Database" in text(b.get("/login"))
    assert "pgque is not installed" in text(b.log_in(reader, database="1"))
    assert b.log_in(reader, database="0").status_code == 200
    app.close()  # type: ignore[attr-defined]
    with pytest.raises(PgqueBadArgumentError, match="names no database"):
        pgque.web.app("host=localhost")


def test_a_writer_logs_in_and_sends_to_each_queue(
    browser: NewBrowser, writer: Role, queue: str, conn: Connection
) -> None:
    b = browser(writer)
    page = b.get("/", name=queue.upper())
    assert f'href="/send?queue={queue}"' in page.text
    assert "No queue with such a name." in text(b.get("/", name="no such queue"))
    page = b.get("/send", queue=queue)
    assert ">Queue</a>" not in page.text  # it would be an error
    page = b.post("/send", queue=queue, type="t", payload="of a writer")
    assert "was sent." in text(page)
    assert conn.execute("select ev_new from pgque.get_queue_info(%s)", [queue]).fetchone() == (1,)
    assert "permission denied" in text(b.get("/queue", 403, queue=queue))
    assert "/search" not in b.get("/recurring").text  # it reads no messages
    # With a right to see one queue it sees figures of that one.
    conn.execute("select pgque.grant_queue(%s, %s, 'consume')", [queue, writer.name])
    assert "1 queue " in text(browser(writer).get("/"))


@pytest.mark.parametrize(
    ("change", "at_once"),
    [
        ("nologin", True),
        ("valid until '2001-01-01'", True),
        ("password 'another'", False),
        ("", True),  # it is dropped
    ],
)
def test_a_session_ends_when_its_role_may_not_log_in_again(
    browser: NewBrowser, server: TestServer, dsn: str, conn: Connection, change: str, at_once: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = f"leaves_{secrets.token_hex(4)}"
    role = Role(name, make_conninfo(dsn, user=name, password="x"))
    conn.execute(f"create role {name} login password 'x' in role pgque_reader".encode())
    tried = [0]
    really = database.Connections.log_in

    def noted(self: database.Connections) -> Any:
        tried[0] += 1
        return really(self)

    monkeypatch.setattr(database.Connections, "log_in", noted)
    try:
        b, other = browser(role), browser(role)
        if change:
            conn.execute(f"alter role {name} {change}".encode())
        else:
            conn.execute(f"drop role {name}".encode())
        if not at_once:
            assert "Log out" in b.get("/").text
            monkeypatch.setattr(database, "POOL_AGE", 0.0)  # instead of five minutes
        tried[0] = 0
        page = b.client.get("/recurring", headers={"pgque-live": "1"})
        assert page.url.path == "/login"
        assert "The password or the right to log in of this role has changed: log in again." in text(page)
        for _ in range(3):
            assert "Log in" in text(b.get("/"))
        assert tried[0] == (0 if at_once else 1)
        page = other.client.post("/queue/pause", data={"csrf": "x", "queue": "x"})
        assert page.status_code == 403
        session = next(iter(other.client.app.sessions._held.values()))  # type: ignore[attr-defined]
        token = other.client.app.signer.csrf(session.token)  # type: ignore[attr-defined]
        page = other.client.post("/queue/pause", data={"csrf": token, "queue": "x"})
        assert "has changed: log in again. Nothing was changed" in text(page)
    finally:
        conn.execute(f"drop role if exists {name}".encode())


def test_all_sessions_share_the_connections_that_the_page_may_have(
    browser: NewBrowser, roles: Roles, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "POOL_WAIT", 0.3)
    greedy, other = roles("reader"), roles("reader")

    def connected(role: Role) -> int:
        row = conn.execute("select count(*) from pg_stat_activity where usename = %s", [role.name]).fetchone()
        assert row is not None
        return int(row[0])

    b = browser(greedy, max_connections=8)
    site: Any = b.client.app
    people = [b, *(Browser(site) for _ in range(9))]
    for person in people[1:]:
        assert person.log_in(greedy).status_code == 200
    for person in people:
        person.get("/")
    assert connected(greedy) <= 4
    late = Browser(site)
    assert late.log_in(other).status_code == 200
    with ExitStack() as taken:
        mine = [s.connections for s in site.sessions._held.values() if s.user == greedy.name]
        for connections in mine[:4]:
            taken.enter_context(connections.take(True))
        assert connected(greedy) == 4
        page = people[9].get("/recurring", 503)
        assert "all 4 connections that this page has for your role are in use" in text(page)
        assert "Try again in a few seconds." in text(page)
        late.get("/recurring")
    people[9].get("/recurring")
    # All of the page's: the idle ones make room, whoever they were of.
    with ExitStack() as taken:
        third = Browser(site)
        assert third.log_in(roles("reader")).status_code == 200
        for connections in [s.connections for s in site.sessions._held.values() if s.user == other.name]:
            for _ in range(3):
                taken.enter_context(connections.take(True))
            with pytest.raises(PgqueConnectionError, match="all 3 connections of this session"):
                taken.enter_context(connections.take(True))
        # Work on many dead letters leaves the last one to pages.
        taken.enter_context(mine[0].take(False, lasting=True))
        taken.enter_context(mine[0].take(False, lasting=True))
        with pytest.raises(PgqueConnectionError, match="all 3 connections of this session"):
            taken.enter_context(mine[0].take(False, lasting=True))
        third.get("/recurring")
        row = conn.execute(
            "select count(*) from pg_stat_activity where application_name = 'pgque web'"
        ).fetchone()
        assert row is not None
        assert row[0] <= 8


def test_a_session_with_fewer_connections_comes_first(tcp_dsn: str, reader: Role, conn: Connection) -> None:
    password = str(conninfo_to_dict(reader.dsn)["password"])
    lender = database.Lender(4)
    first, second = (
        database.log_in(lender, Database("x", tcp_dsn), reader.name, password, 10) for _ in range(2)
    )
    order: list[str] = []

    def take(name: str, connections: database.Connections) -> None:
        with connections.take(True):
            order.append(name)
            time.sleep(0.1)

    with ExitStack() as held:
        one, two = held.enter_context(ExitStack()), held.enter_context(ExitStack())
        one.enter_context(first.take(True))
        two.enter_context(first.take(True))
        threads = [threading.Thread(target=take, args=("first", first)) for _ in range(3)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 10
        while len(lender._waiting) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        threads.append(threading.Thread(target=take, args=("second", second)))
        threads[-1].start()
        while len(lender._waiting) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        assert order == []
        one.close()
        for thread in threads:
            thread.join(20)
    assert order == ["second", "first", "first", "first"]
    first.close()
    second.close()


def test_work_on_dead_letters_leaves_a_connection_to_the_pages_of_its_role_however_few_there_are(
    browser: NewBrowser, reader: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "POOL_WAIT", 0.5)
    b = browser(reader, max_connections=2)
    session = next(iter(b.client.app.sessions._held.values()))  # type: ignore[attr-defined]
    with session.connections.take(False, lasting=True):
        b.get("/recurring")
        with pytest.raises(PgqueConnectionError), session.connections.take(False, lasting=True):
            pass


def test_by_default_the_page_has_an_eighth_of_the_servers_connections(
    browser: NewBrowser, reader: Role, conn: Connection
) -> None:
    app: Any = browser(reader).client.app
    row = conn.execute("select current_setting('max_connections')::int").fetchone()
    assert row is not None
    (lender,) = app.lenders.values()
    assert lender._most == max(row[0] // 8, 4)
    with pytest.raises(PgqueBadArgumentError, match="max_connections"):
        pgque.web.app("dbname=x", max_connections=1)


def test_a_page_that_is_left_open_does_not_keep_its_session(browser: NewBrowser, reader: Role) -> None:
    b = browser(reader)
    session = next(iter(b.client.app.sessions._held.values()))  # type: ignore[attr-defined]
    for seconds in (29 * 60, 90):
        session.used -= seconds
        last = b.client.get("/", headers={"pgque-live": "1"})
    assert last.url.path == "/login"
    b.log_in(reader)
    session = next(iter(b.client.app.sessions._held.values()))  # type: ignore[attr-defined]
    for _ in range(2):
        session.used -= 29 * 60
        assert "Log out" in b.get("/").text


def test_a_session_outlasts_its_work_by_the_idle_time(browser: NewBrowser, reader: Role) -> None:
    b = browser(reader)
    session = next(iter(b.client.app.sessions._held.values()))  # type: ignore[attr-defined]
    job, release = Job("work", "/", [1]), threading.Event()
    session.jobs[job.key] = job
    job.start(lambda: nullcontext((lambda _: release.wait(60), lambda *_: [])))
    session.used -= 3600  # nobody has made a request since then, but the page of the work is open
    live = {"pgque-live": "1"}
    assert b.client.get("/job", params={"key": job.key}, headers=live).url.path == "/job"
    release.set()
    job.join(10)
    assert "1 of 1 done." in text(b.client.get("/job", params={"key": job.key}, headers=live))
    session.used -= 31 * 60
    assert b.client.get("/", headers=live).url.path == "/login"


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
        ({"csrf": token}, {"origin": "http://["}),
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
        assert b.client.get("/messages", params={"queue": queue, "before": number}).status_code == 400, number


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
    # The address of the prefix itself, as people type it; a queue may have its name.
    q = Browser(short := pgque.web.app(tcp_dsn, path_prefix="/q"))
    page = q.client.get("/q")
    assert page.url.path == "/q/login"
    password = str(conninfo_to_dict(reader.dsn)["password"])
    q.client.post("/q/login", data={"csrf": csrf(page), "user": reader.name, "password": password})
    for path in ("/q", "/q/"):
        page = q.client.get(path)
        assert (page.status_code, page.url.path) == (200, path)
        assert "Log out" in page.text
    assert q.client.get("/qx").status_code == 404
    short.close()  # type: ignore[attr-defined]
    app.close()  # type: ignore[attr-defined]
    mounted.close()  # type: ignore[attr-defined]
    for wrong in ("pgque", "/pgque/", "//pgque"):
        with pytest.raises(PgqueBadArgumentError):
            pgque.web.app(tcp_dsn, path_prefix=wrong)
