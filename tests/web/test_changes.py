"""What the page creates, changes and removes: a form, a preview with the SQL that runs, one confirmation."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

import psycopg
import pytest
from httpx2 import Response
from psycopg import sql

from conftest import Role, Roles
from pgque.web.change import PREVIEW
from pgque.web.changes import CHANGES
from support.pages import Browser, text
from support.threads import running

Connection = psycopg.Connection[tuple[Any, ...]]
NewBrowser = Callable[..., Browser]
Tick = Callable[[str], object]

FIELD = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')
SQL = re.compile(r'<pre class="sql"[^>]*><bdi>(.*?)</bdi></pre>', re.S)


def shown_sql(page: Response) -> str:
    """Return the SQL of a preview."""
    found = SQL.search(page.text)
    assert found is not None, text(page)
    return unescape(found[1])


def confirmed(b: Browser, path: str, preview: Response, code: int = 200, /, **typed: str) -> Response:
    """Press the button of a preview: send its hidden fields, as a browser does."""
    form = preview.text.split(f'action="{path}')[1]
    fields = {name: unescape(value) for name, value in FIELD.findall(form) if name != "csrf"}
    return b.post(path, code, **{**fields, **typed})


@pytest.fixture
def names(conn: Connection) -> Iterator[Callable[[str], str]]:
    """names(text) is a name for a queue that is dropped in the end."""
    made: list[str] = []

    def do(name: str) -> str:
        made.append(name)
        return name

    yield do
    for name in made:
        conn.execute(
            "select pgque.drop_queue(q.queue_name, true) from pgque.queue as q where q.queue_name = %s",
            [name],
        )


def test_a_queue_is_created_and_dropped_and_what_was_shown_is_what_ran(
    browser: NewBrowser, admin: Role, conn: Connection, names: Callable[[str], str], tick: Tick
) -> None:
    name = names('it\'s "new" \\ <b>')
    b = browser(admin)
    assert 'href="/queue/create"' in b.get("/").text
    page = b.post("/queue/create/preview", new=name, max_retries="7")
    assert "Create a queue" in text(page)
    shown = shown_sql(page)
    assert conn.execute("select count(*) from pgque.queue where queue_name = %s", [name]).fetchone() == (0,)
    page = confirmed(b, "/queue/create", page)
    assert f"Queue {name} was created." in text(page)
    assert page.url.path == "/queue"
    value = "select value from pgque.queue_settings(%s) where setting = 'max_retries'"
    assert conn.execute(value, [name]).fetchone() == ("7",)
    # The text that was shown does the same, typed into psql.
    conn.execute("select pgque.drop_queue(%s, true)", [name])
    assert conn.execute(shown.encode()).fetchone() == (1,)
    assert conn.execute(value, [name]).fetchone() == ("7",)

    # Once more, by a name that is taken; and with a value that is none: the form keeps what was typed.
    page = b.post("/queue/create", 400, new=name, max_retries="8")
    assert "there is a queue of this name" in text(page)
    assert 'id="new" name="new"' in page.text
    assert 'value="8"' in page.text
    assert (
        page.text.index('id="new"')
        < page.text.index('id="wrong"')
        < page.text.index('id="visibility_timeout"')
    )
    page = b.post("/queue/create", 400, new=names("other"), max_retries="lots")
    assert (
        page.text.index('id="max_retries"')
        < page.text.index('id="wrong"')
        < page.text.index('id="retention_period"')
    )
    assert 'value="lots"' in page.text
    page = b.post("/queue/create", 400, new="x" * 58)
    assert (
        page.text.index('id="new"')
        < page.text.index('id="wrong"')
        < page.text.index('id="visibility_timeout"')
    )
    assert "Name is empty" in text(b.post("/queue/create/preview", 400))

    conn.execute("select pgque.subscribe(%s, 'c')", [name])
    conn.execute("select pgque.send_batch(%s, array['a', 'b', 'c'])", [name])
    tick(name)
    batch = conn.execute(
        "select max(batch_id) from pgque.receive(%s, 'c', 1, 'w', '1 hour')", [name]
    ).fetchone()
    assert batch is not None
    page = b.get("/queue/drop", queue=name)
    assert (
        "Consumers 1 Pending, of the slowest 3 Processing 1 Retries and delayed messages 0 Dead letters 0"
        in text(page)
    )
    assert (
        shown_sql(page) == sql.SQL("select pgque.drop_queue({}, true)").format(sql.Literal(name)).as_string()
    )
    again = confirmed(b, "/queue/drop", page, 400)
    assert "Type the name of the queue to confirm." in text(again)
    again = confirmed(b, "/queue/drop", page, 400, typed=name[:-1])
    assert conn.execute("select count(*) from pgque.queue where queue_name = %s", [name]).fetchone() == (1,)
    page = confirmed(b, "/queue/drop", again, typed=name)
    assert f"Queue {name} was dropped." in text(page)
    assert conn.execute("select count(*) from pgque.queue where queue_name = %s", [name]).fetchone() == (0,)
    calls = conn.execute(
        "select a.call from pgque.list_actions(%s) as a where a.role_name = %s order by a.at",
        [name, admin.name],
    ).fetchall()
    assert calls == [("create_queue",), ("drop_queue",)]


def test_consumers_are_subscribed_changed_and_unsubscribed(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    role = "select role from pgque.get_consumer_info(%s, %s)"
    limit = (
        "select s.sub_key_concurrency from pgque.subscriber as s join pgque.consumer as c on c.co_id = s.sub_consumer"
        " join pgque.queue as q on q.queue_id = s.sub_queue where q.queue_name = %s and c.co_name = %s and s.sub_keyed"
    )
    b = browser(admin)
    for name, fields, expected in (
        ("alone", {"kind": "own", "start_at": "latest"}, ("normal", None)),
        ("pool's", {"kind": "workers", "start_at": "earliest"}, ("pool", None)),
        (
            "keyed",
            {"kind": "workers", "start_at": "2030-01-31T14:30", "key_concurrency": "2"},
            ("pool", (2,)),
        ),
    ):
        page = b.post("/queue/subscribe/preview", queue=queue, consumer=name, **fields)
        assert "Starts after tick 1" in text(page)
        assert f"Consumer {name} is subscribed." in text(confirmed(b, "/queue/subscribe", page))
        assert conn.execute(role, [queue, name]).fetchone() == (expected[0],)
        assert conn.execute(limit, [queue, name]).fetchone() == expected[1]
    assert "keyed shared by workers, key_concurrency 2" in text(b.get("/queue", queue=queue))
    # One that is there is neither moved nor made another kind.
    page = b.post("/queue/subscribe", 400, queue=queue, consumer="alone", kind="workers", start_at="latest")
    assert "subscribed already" in text(page)
    assert conn.execute(role, [queue, "alone"]).fetchone() == ("normal",)
    for name, fields in (
        ("start_at", {"start_at": "never"}),
        ("key_concurrency", {"key_concurrency": "many"}),
        ("key_concurrency", {"key_concurrency": "1", "kind": "own"}),
        ("kind", {"kind": "none"}),
    ):
        page = b.post(
            "/queue/subscribe/preview",
            400,
            **{"queue": queue, "consumer": "x", "kind": "workers", "start_at": "latest", **fields},
        )
        assert re.search(rf'name="{name}"[^>]*aria-invalid="true"', page.text), name

    page = b.get("/queue/consumer", queue=queue, consumer="keyed")
    assert 'name="key_concurrency" value="2"' in page.text
    for fields, said, expected in (
        ({"kind": "workers", "key_concurrency": "5"}, "set_key_concurrency", ("pool", (5,))),
        ({"kind": "own"}, "null), pgque.unshare_consumer", ("normal", None)),
        ({"kind": "workers", "key_concurrency": "1"}, "share_consumer", ("pool", (1,))),
        ({"kind": "workers"}, "NULL)", ("pool", None)),
        ({"kind": "own"}, "select pgque.unshare_consumer", ("normal", None)),
        ({"kind": "workers"}, "select pgque.share_consumer", ("pool", None)),
    ):
        page = b.post("/queue/consumer/preview", queue=queue, consumer="keyed", **fields)
        assert said in shown_sql(page)
        confirmed(b, "/queue/consumer", page)
        assert conn.execute(role, [queue, "keyed"]).fetchone() == (expected[0],)
        assert conn.execute(limit, [queue, "keyed"]).fetchone() == expected[1]

    conn.execute("select pgque.send_batch(%s, array['a', 'b', 'c'])", [queue])
    tick(queue)
    row = conn.execute(
        "select batch_id, msg_id from pgque.receive(%s, 'keyed', 2, 'w', '1 hour')", [queue]
    ).fetchone()
    assert row is not None
    conn.execute("select pgque.nack(%s, array[%s::bigint], '1 hour')", row)
    page = b.get("/queue/unsubscribe", queue=queue, consumer="keyed")
    assert "Pending 3" in text(page)
    assert "Retries 1 Processing 1" in text(page)
    page = confirmed(b, "/queue/unsubscribe", page)
    assert "Consumer keyed was unsubscribed." in text(page)
    assert conn.execute("select count(*) from pgque.get_consumer_info(%s)", [queue]).fetchone() == (2,)
    b.get("/queue/unsubscribe", 404, queue=queue, consumer="keyed")


def test_recurring_messages_are_created_changed_and_deleted(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection
) -> None:
    name = f"it's nightly {queue}"
    b = browser(admin)
    form = {
        "name": name, "queue": queue, "cron": "0 3 * * *", "timezone": "Europe/Berlin", "type": "report", "kind": "json",
        "payload": '{"a": "it\'s"}', "headers": '{"h": 1}', "catch_up": "none", "key": "k", "delay": "5 minutes",
        "ttl": "1 hour", "partition_key": "p", "starts_at": "2030-01-31 14:30+00", "ends_at": "2040-01-31 14:30+00",
    }  # fmt: skip
    page = b.post("/recurring/create/preview", **form)
    assert "Run 1 2030-02-01 02:00:00 UTC Run 2 2030-02-02 02:00:00 UTC" in text(page)
    shown = shown_sql(page)
    assert f"{name} was created." in text(confirmed(b, "/recurring/create", page))
    everything = (
        "select queue_name, cron, timezone, type_name, payload, headers, key, delay, ttl, partition_key, catch_up,"
        " starts_at, ends_at, payload_bytes from pgque.list_recurring() where name = %s"
    )
    made = conn.execute(everything, [name]).fetchone()
    assert made is not None
    assert made[:6] == (queue, "0 3 * * *", "Europe/Berlin", "report", '{"a": "it\'s"}', {"h": 1})
    conn.execute("select pgque.drop_recurring(%s)", [name])
    conn.execute(shown.encode())
    assert conn.execute(everything, [name]).fetchone() == made

    page = b.post("/recurring/create/preview", 400, **form)
    assert "there is a recurring message of this name" in text(page)
    assert re.search(r'name="name"[^>]*aria-invalid="true"', page.text)
    for field, value in (
        ("cron", "61 * * * *"), ("timezone", "Mars/Base"), ("queue", "no such queue"), ("headers", "[1"), ("cron", ""),
        ("ttl", "-1 day"),
    ):  # fmt: skip
        page = b.post(
            "/recurring/create", 400, **{**form, "name": f"{name} 2", "payload": '"x"', field: value}
        )
        assert re.search(rf'name="{field}"[^>]*aria-invalid="true"', page.text), (field, text(page))
    page = b.post("/recurring/create/preview", 400, **{**form, "name": f"{name} 2", "kind": "bytes"})
    assert re.search(r'name="payload"[^>]*aria-invalid="true"', page.text)

    # The form begins with all that is set, so that a change of one field keeps the others.
    page = b.get("/recurring/change", name=name)
    fields = dict(re.findall(r'<input id="(\w+)" name="\w+" value="([^"]*)"', page.text))
    fields |= dict(re.findall(r'<textarea id="(\w+)"[^>]*>\n(.*?)</textarea>', page.text, re.S))
    fields |= {"catch_up": "none", "kind": "text", "name": name, "cron": "0 4 * * *"}
    page = b.post("/recurring/change/preview", **{key: unescape(value) for key, value in fields.items()})
    assert f"{name} was changed." in text(confirmed(b, "/recurring/change", page))
    assert conn.execute(everything, [name]).fetchone() == (made[0], "0 4 * * *", *made[2:])

    page = b.get("/recurring/drop", name=name)
    assert f"Queue {queue}" in text(page)
    assert "was deleted." in text(confirmed(b, "/recurring/drop", page))
    assert conn.execute(everything, [name]).fetchone() is None
    # It is not created again by a form that is still open.
    assert "not found" in text(
        b.post("/recurring/change", 404, **{key: unescape(value) for key, value in fields.items()})
    )
    b.get("/recurring/drop", 404, name=name)
    calls = conn.execute(
        "select a.call from pgque.list_actions(%s) as a where a.role_name = %s order by a.at",
        [queue, admin.name],
    ).fetchall()
    assert calls == [("create_recurring",), ("create_recurring",), ("drop_recurring",)]
    # What is hidden cannot be kept by a change.
    conn.execute("select pgque.create_recurring(%s, %s, '0 3 * * *', 't', 'secret'::text)", [name, queue])
    b = browser(admin, hide_payloads=True)
    assert "secret" not in b.get("/recurring/change", 400, name=name).text
    conn.execute("select pgque.drop_recurring(%s)", [name])


def test_rights_to_a_queue_are_granted_and_revoked(
    browser: NewBrowser, admin: Role, reader: Role, roles: Roles, queue: str, conn: Connection
) -> None:
    one = roles()
    b = browser(admin)
    assert "No role has a right to this queue alone." in text(b.get("/queue/access", queue=queue))
    for right in ("produce", "consume", "admin"):
        page = b.post("/queue/grant/preview", queue=queue, role=one.name, right=right)
        assert shown_sql(page) == f"select pgque.grant_queue('{queue}', '{one.name}', '{right}')"
        page = confirmed(b, "/queue/grant", page)
        assert page.url.path == "/queue/access"
        assert f"{one.name} {right}:" in text(page)
    assert "had the right admin already" in text(
        b.post("/queue/grant", queue=queue, role=one.name, right="admin")
    )
    page = b.post("/queue/grant", 400, queue=queue, role="no such role", right="admin")
    assert "role not found" in text(page)
    assert re.search(r'name="role"[^>]*aria-invalid="true"', page.text)
    page = b.get("/queue/revoke", queue=queue, role=one.name, right="admin")
    page = confirmed(b, "/queue/revoke", page)
    assert f"{one.name} admin:" not in text(page)
    rights = "select right_name from pgque.queue_right where right_role = %s::regrole order by 1"
    assert conn.execute(rights, [one.name]).fetchall() == [("consume",), ("produce",)]
    calls = conn.execute(
        "select a.call from pgque.list_actions(%s) as a where a.role_name = %s", [queue, admin.name]
    )
    assert [row[0] for row in calls].count("grant_queue") == 3

    b = browser(reader)
    assert "Access" not in text(b.get("/queue", queue=queue))
    b.get("/queue/access", 403, queue=queue)
    browser(admin).get("/queue/access", 404, queue="no such queue")


def test_settings_are_saved_all_or_none_and_never_over_what_somebody_else_has_set(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, connect: Callable[..., Connection],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    def values() -> dict[str, str]:
        rows = conn.execute("select setting, value from pgque.queue_settings(%s)", [queue]).fetchall()
        return dict(rows)

    b = browser(admin)
    was = {
        "queue": queue,
        "was-max_retries": "5",
        "was-max_depth": "0",
        "was-visibility_timeout": values()["visibility_timeout"],
    }
    typed = {"set-max_retries": "9", "set-max_depth": "-1", "set-visibility_timeout": "7 minutes"}
    # One is refused: none is set, the form keeps all that was typed, and the error is beside its field.
    page = b.post("/queue/settings", 400, **was, **typed)
    assert values()["max_retries"] == "5"
    for name in ("max_retries", "max_depth", "visibility_timeout"):
        assert f'name="set-{name}" value="{typed[f"set-{name}"]}"' in page.text
    assert re.findall(r'id="error-(\w+)"', page.text) == ["max_depth"]
    # The other fields are as they were in the database, so that the next Save changes none of them.
    assert (
        "<option selected>false</option>"
        in page.text.split('name="set-ticker_paused"')[1].split("</select>")[0]
    )
    assert 'name="was-ticker_paused" value="false"' in page.text
    assert re.search(r'<details class="group" open>\s*<summary><h2>Storage and limits', page.text)
    page = b.post("/queue/settings", 400, **was, **{**typed, "set-max_depth": "1", "set-max_retries": "lots"})
    assert re.findall(r'id="error-(\w+)"', page.text) == ["max_retries"]
    page = b.post("/queue/settings", 400, **{"queue": queue, "set-dead_letter_queue": "no such queue"})
    assert re.findall(r'id="error-(\w+)"', page.text) == ["dead_letter_queue"]

    # Somebody else sets one of them after the form was opened, and after the preview.
    conn.execute("select pgque.alter_queue(%s, %s)", [queue, '{"max_retries": 6}'])
    typed["set-max_depth"] = "100"
    page = b.post("/queue/settings", 409, **was, **typed)
    assert "somebody else has set one meanwhile" in text(page)
    assert "max_retries 6 changed by somebody else It was 5 when this form was opened. 9" in text(page)
    assert values()["max_depth"] == "0"
    page = b.post("/queue/settings/preview", **was, **typed)
    assert "changed by somebody else" in text(page)
    conn.execute("select pgque.alter_queue(%s, %s)", [queue, '{"max_retries": 7}'])
    page = confirmed(b, "/queue/settings", page, 409)
    assert "max_retries 7 changed by somebody else It was 6" in text(page)

    # Somebody else has set one, and has not committed yet.
    holder = connect(autocommit=False)
    holder.execute("select pgque.alter_queue(%s, %s)", [queue, '{"max_retries": 8}'])
    pages: list[Response] = []
    ended = threading.Event()

    def save() -> None:
        pages.append(confirmed(b, "/queue/settings", page, 409))
        ended.set()

    waiting = (
        b"select from pg_stat_activity where wait_event_type = 'Lock' and query like '%pgque.alter_queue%'"
    )
    with running(save, holder.rollback, 20):
        wait_until(lambda: ended.is_set() or conn.execute(waiting).fetchone() is not None)
        holder.commit()
        assert ended.wait(20)
    assert "max_retries 8 changed by somebody else It was 7" in text(pages[0])
    page = confirmed(b, "/queue/settings", pages[0])
    assert "max_depth is now 100, max_retries is now 9, visibility_timeout is now 00:07:00." in text(page)
    assert values()["max_depth"] == "100"
    page = b.post("/queue/settings/preview", edit="1", **was, **typed)
    assert 'name="set-max_retries" value="9"' in page.text


def test_no_field_of_a_change_is_taken_as_sql_or_markup(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection
) -> None:
    attacks = ("'; select pgque.drop_queue('%s', true); --", "\\'; select 1; --", "%(queue)s %s %b", "x') or pg_sleep(9) is null; --",
               "<script>alert(1)</script>", "{{7*7}} {new} {0}", "\u202e\u2019")  # fmt: skip
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    conn.execute("select pgque.create_recurring('r', %s, '0 3 * * *', 't', 'x'::text)", [queue])
    before = {row[0] for row in conn.execute("select queue_name from pgque.queue").fetchall()}
    good = {
        "queue": queue, "consumer": "c", "new": "made by a test", "role": admin.name, "right": "consume", "name": "r",
        "kind": "workers", "start_at": "latest", "cron": "0 3 * * *", "timezone": "UTC", "type": "t", "catch_up": "one",
    }  # fmt: skip
    b = browser(admin)
    tried = 0
    try:
        for change in CHANGES:
            kind = "text" if change.path.startswith("/recurring") else "workers"
            for name in [*change.about, *(field.name for field in change.fields)]:
                for attack in (attacks[0], *(attacks[1 + (tried + n) % (len(attacks) - 1)] for n in (0, 1))):
                    value = attack.replace("'%s'", f"'{queue}'")
                    fields = {**good, "kind": kind, name: value, "typed": "not it"}
                    addresses = [change.path + PREVIEW, change.path] if change.fields else [change.path]
                    pages = [b.client.get(change.path, params=fields)]
                    for path in addresses:
                        fields["csrf"] = re.findall(
                            r'name="csrf" value="([^"]+)"', b.get("/send", queue=queue).text
                        )[0]
                        pages.append(b.client.post(path, data=fields))
                    for page in pages:
                        assert page.status_code < 500, (change.path, name, attack, text(page))
                        assert "syntax error" not in page.text.replace("invalid input syntax", ""), (
                            change.path,
                            name,
                        )
                        assert "<script>" not in page.text, (change.path, name)
                        seen = re.sub(
                            r"<textarea.*?</textarea>|<(input|button|option|a) [^>]*>",
                            "",
                            page.text,
                            flags=re.S,
                        )
                        assert "\u202e" not in seen, (change.path, name)
                    tried += 1
        assert tried > 120
        assert conn.execute("select count(*) from pgque.get_queue_info(%s)", [queue]).fetchone() == (1,)
    finally:
        made = {row[0] for row in conn.execute("select queue_name from pgque.queue").fetchall()} - before
        for name in made:
            conn.execute("select pgque.drop_queue(%s, true)", [name])
        conn.execute(
            "select pgque.drop_recurring(r.name) from pgque.list_recurring() as r where r.queue_name = %s",
            [queue],
        )


def test_a_role_without_the_right_is_offered_no_change_and_is_refused(
    browser: NewBrowser, roles: Roles, reader: Role, queue: str, conn: Connection
) -> None:
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    conn.execute("select pgque.create_recurring('r', %s, '0 3 * * *', 't', 'x'::text)", [queue])
    one = roles()
    conn.execute("select pgque.grant_queue(%s, %s, 'consume')", [queue, one.name])
    fields = {
        "queue": queue, "consumer": "c", "new": "no queue", "role": one.name, "right": "admin", "name": "r", "typed": queue,
        "kind": "text", "start_at": "latest", "cron": "0 3 * * *", "timezone": "UTC", "type": "t", "catch_up": "one",
        "was-max_retries": "5", "set-max_retries": "1",
    }  # fmt: skip
    may = {"/queue/subscribe", "/queue/consumer", "/queue/unsubscribe"}
    tried = set()
    for role in (one, reader):
        b = browser(role)
        for change in CHANGES:
            if change.path in may:
                continue
            sent = {**fields, "name": "other"} if change.path == "/recurring/create" else fields
            page = b.client.get(change.path, params=sent)
            assert page.status_code == 403 or "This role may not do it" in text(page), change.path
            assert '<pre class="sql"' not in page.text
            b.post(change.path, 403, **sent)
            tried.add(change.path)
        b.post("/queue/settings", 403, **fields)
        page = b.get("/queue", queue=queue)
        assert "Save…" not in text(page)
        assert "Drop…" not in text(page)
    assert len(tried) == len(CHANGES) - len(may)
    assert conn.execute("select count(*) from pgque.queue where queue_name = 'no queue'").fetchone() == (0,)
    conn.execute("select pgque.drop_recurring('r')")


def test_no_form_changes_a_queue_that_was_created_again(
    browser: NewBrowser, admin: Role, conn: Connection, names: Callable[[str], str], tick: Tick
) -> None:
    name = names("created again")

    def create() -> None:
        conn.execute("select pgque.create_queue(%s)", [name])
        conn.execute("select pgque.subscribe(%s, 'c')", [name])
        conn.execute("select pgque.send_batch(%s, array['a', 'b'])", [name])
        tick(name)

    create()
    b = browser(admin)
    settings = {"queue": name, "set-max_retries": "3", "was-max_retries": "5"}
    shown = {
        "/queue/drop": b.get("/queue/drop", queue=name),
        "/queue/purge": b.get("/queue/purge", queue=name),
        "/queue/unsubscribe": b.get("/queue/unsubscribe", queue=name, consumer="c"),
        "/message/cancel": b.get("/message/cancel", queue=name, id=1),
        "/message/do": b.get("/message/ask", queue=name, id=1, action="retry", consumer="c"),
        "/queue/settings": b.post("/queue/settings/preview", **settings),
        "/queue/settings/preview": b.get("/queue/settings", queue=name),
        "/queue/grant": b.post("/queue/grant/preview", queue=name, role=admin.name, right="consume"),
        "/dead/purge": b.get("/dead/purge", queue=name),
    }
    conn.execute("select pgque.drop_queue(%s, true)", [name])
    create()
    state = (
        "select count(*), (select s.value from pgque.queue_settings(%s) as s where s.setting = 'max_retries')"
        " from pgque.list_messages(%s, 'pending') as m"
    )
    for path, page in shown.items():
        form = page.text.split(f'method="post" action="{path}')[-1]
        fields = {key: unescape(value) for key, value in FIELD.findall(form) if key != "csrf"}
        # Where it was asked from, an error has a place; a preview has none.
        code = 200 if fields.get("back") else 400
        refused = text(b.post(path, code, **{**fields, "typed": name, "set-max_retries": "3"}))
        assert f"queue {name} was created again or loaded from a dump" in refused, (path, refused)
    assert conn.execute(state, [name, name]).fetchone() == (2, "5")
    assert "Message 1 is cancelled; it was pending." in text(
        confirmed(b, "/message/cancel", b.get("/message/cancel", queue=name, id=1))
    )


def test_a_change_of_a_recurring_message_keeps_what_was_not_edited_and_what_others_did(
    browser: NewBrowser, admin: Role, conn: Connection, queue: str
) -> None:
    name, b = f"kept {queue}", browser(admin)
    create = (
        "select pgque.create_recurring(%s, %s, %s, 'report', %s::text, key => E'a\nb', delay => '1 month',"
        " ends_at => '12000-01-01', headers => '{\"h\": 1.12345678901234567890123}'::jsonb)"
    )
    read = (
        "select r.payload, r.key, r.delay::text, r.ends_at, r.headers::text, r.type_name, r.cron"
        " from (select name, payload, key, delay, ends_at::text, headers, type_name, cron"
        " from pgque.list_recurring()) as r where r.name = %s"
    )

    def preview(**edited: str) -> Response:
        """Send the form as a browser does: it drops a first line break and writes the others its own way."""
        form = b.get("/recurring/change", name=name).text.split('<form method="post"')[-1]
        fields = {key: unescape(value) for key, value in FIELD.findall(form) if key != "csrf"}
        for key, value in re.findall(r'<input id="(\w+)" name="\w+" value="([^"]*)"', form):
            fields[key] = re.sub(r"[\r\n]", "", unescape(value))
        for key, value in re.findall(r'<textarea id="(\w+)"[^>]*>\n?(.*?)</textarea>', form, re.S):
            fields[key] = re.sub(r"\r\n?|\n", "\r\n", unescape(value))
        fields |= {"catch_up": "one", "kind": "text"}
        return b.post("/recurring/change/preview", **{**fields, **edited})

    for payload in ("a\nb", "\nfirst", "last\n", "a\r\nb", "a\rb"):
        conn.execute(create, [name, queue, "0 3 * * *", payload])
        before = conn.execute(read, [name]).fetchone()
        assert before is not None
        page = confirmed(b, "/recurring/change", preview(type="other"))
        assert f"{name} was changed." in text(page)
        assert conn.execute(read, [name]).fetchone() == (*before[:5], "other", before[6])
    assert before is not None
    page = confirmed(b, "/recurring/change", preview(payload="typed\r\nhere"))
    assert conn.execute(read, [name]).fetchone() == ("typed\nhere", *before[1:5], "other", before[6])

    page, dropping = preview(type="third"), b.get("/recurring/drop", name=name)
    conn.execute(create, [name, queue, "0 4 * * *", "theirs"])
    theirs = conn.execute(read, [name]).fetchone()
    assert f"{name} was changed since this form was opened" in text(
        confirmed(b, "/recurring/change", page, 400)
    )
    assert f"{name} was changed since this form was opened" in text(confirmed(b, "/recurring/drop", dropping))
    assert conn.execute(read, [name]).fetchone() == theirs
    assert f"{name} was deleted." in text(
        confirmed(b, "/recurring/drop", b.get("/recurring/drop", name=name))
    )
