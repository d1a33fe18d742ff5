"""What the pages show and change, for roles with many rights and with few."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from html import unescape
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import psycopg
import pytest

from conftest import Queues, Role, Roles
from pgque.client.limit import LimitedConnection
from pgque.ops.overview import SLOW
from pgque.ops.problems import KINDS
from pgque.ops.units import NOTHING
from pgque.web import chart, overview
from pgque.web.config import Config, databases
from pgque.web.look import detail
from pgque.web.page import Page
from pgque.web.site import Site
from support.pages import Browser, over_tcp, text
from support.servers import REPOSITORY, TestServer
from support.silent import silent_path
from support.threads import running

Connection = psycopg.Connection[tuple[Any, ...]]
NewBrowser = Callable[..., Browser]
Tick = Callable[[str], object]

# Nothing of it may become part of a page, a statement or a header.
EVIL = "x'\"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}%s\u202e\x1b[31m"
NAME = "<b>&'\"/../%2e;--"


def leased(
    conn: Connection, tick: Tick, queue: str, payloads: list[str], worker: str = "w1"
) -> tuple[int, list[int]]:
    """Send messages and lease them to a worker of consumer c; return the batch and the ids."""
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    conn.execute("select pgque.send_batch(%s, 'kind', %s::text[])", [queue, payloads])
    tick(queue)
    rows = conn.execute(
        "select batch_id, msg_id from pgque.receive(%s, 'c', 100, %s, '1 hour')", [queue, worker]
    ).fetchall()
    return rows[0][0], [row[1] for row in rows]


def states(conn: Connection, queue: str) -> dict[str, int]:
    rows = conn.execute("select status, count(*) from pgque.list_messages(%s) group by 1", [queue]).fetchall()
    return dict(rows)


def test_the_overview_begins_with_the_state_and_leads_to_what_is_wrong(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    batch, ids = leased(conn, tick, queue, ["a", "b", "c"])
    conn.execute("select pgque.dead(%s, %s, 'no such address')", [batch, ids[:2]])
    conn.execute("select pgque.pause(%s)", [queue])
    b = browser(admin)
    page = text(b.get("/"))
    assert (
        page.index("Failed")
        < page.index("sending is paused")
        < page.index("Retries")
        < page.index("What is wrong")
        < page.index("Resume sending when senders may send again.")
        < page.index("Sent, messages a second")
    )
    assert re.search(r"\b2, newest at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", page)
    assert re.search(r"Dead letters \d", page)

    shown = b.get("/queue", queue=queue)
    assert "paused" in text(shown)
    assert f'href="/dead?queue={queue}"' in shown.text
    assert 'href="#actions"' in shown.text  # a page does not lead to itself
    assert f"/queue?queue={queue}#" not in shown.text
    page = text(b.post("/queue/resume", queue=queue))
    assert "The queue is open for senders." in page
    assert "Pause sending" in page

    # A queue that is full leads to what empties it, and to its limit.
    conn.execute("select pgque.set_queue_config(%s, 'max_depth', '1')", [queue])
    page = b.get("/queue", queue=queue).text
    for place in ("consumers", "setting-max_depth"):
        assert f'href="#{place}"' in page


def test_checks_are_written_as_the_page_writes() -> None:
    for given, written in (
        ("last tick 7, 02:04:02.775 ago", "last tick 7, 2 h 4 min ago"),
        ("for 3 days 01:00:00", "for 3 d 1 h"),
        ("newest at 2026-11-25 23:28:04.233411+03", "newest at 2026-11-25 20:28:04 UTC"),
        ("newest at 2026-11-25 01:58:04+05:30", "newest at 2026-11-24 20:28:04 UTC"),
        ("<b> 00:00:00", "&lt;b&gt; 0 s"),
        *[
            (name, name)
            for name in ("2026-99-99 99:99:99+00", "0001-01-01 00:00:00+14", "\u0662\u0662:00:00")
        ],
    ):
        assert detail(given) == f"<bdi>{written}</bdi>"
    assert detail(None) == ""


def test_a_paused_ticker_leads_to_its_setting_and_one_that_does_not_run_does_not(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection
) -> None:
    b = browser(admin)
    shown = "Set ticker_paused to false."
    assert shown not in text(b.get("/queue", queue=queue))
    conn.execute("select pgque.alter_queue(%s, '{\"ticker_paused\": true}')", [queue])
    page = b.get("/queue", queue=queue)
    assert shown in text(page)
    assert 'href="#setting-ticker_paused"' in page.text


def test_every_check_has_a_kind(server: TestServer) -> None:
    """The checks are named in the sources: the table needs each of them, and has no other."""
    named = set()
    for source in ("operate/health.sql", "options/recurring.sql"):
        sql = (REPOSITORY / "sql" / "parts" / source).read_text()
        named |= set(re.findall(r"check_name := '([^']+)'|select '([a-z ]+)', queue,", sql))
    checks = {one or other for one, other in named} - {"figures"}
    assert len(checks) > 15
    assert checks == set(KINDS) - {"paused", "paused ticker", SLOW["check_name"]}


def test_problems_are_grouped_by_kind_with_one_advice_and_their_queues_below_it(
    browser: NewBrowser,
    admin: Role,
    reader: Role,
    new_queue: Queues,
    conn: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overview, "MOST_OF_GROUP", 2)
    names = [new_queue(f"grouped_{n}") for n in range(4)]
    for name in names:
        conn.execute("select pgque.pause(%s)", [name])
    page = browser(admin).get("/").text
    [group] = re.findall(r'<section class="problem warn" id="problem-paused">.*?</section>', page, re.DOTALL)
    assert re.search(r"sending is paused in \d+ queues", group)
    assert group.count("Resume sending when senders may send again.") == 1
    assert group.count("#actions") == 2
    assert re.search(r"And \d+ more", group)
    assert 'href="#problem-paused"' in page  # from the top
    # A role that may not open the dead letters is not led there.
    conn.execute("select pgque.set_queue_config(%s, 'max_retries', '0')", [names[0]])
    assert "/dead?" not in browser(reader).get("/queue", queue=names[0]).text


def test_the_first_page_asks_for_all_queues_in_one_statement(
    browser: NewBrowser, admin: Role, new_queue: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it asks does not grow with the number of queues."""
    asked: list[str] = []
    rows = Page.rows

    def counted(page: Page, query: Any, *rest: Any) -> list[dict[str, Any]]:
        asked.append(query)
        return rows(page, query, *rest)

    monkeypatch.setattr(Page, "rows", counted)
    counts = []
    for names in (["one"], ["two", "three", "four"]):
        for name in names:
            new_queue(f"counted_{name}")
        b = browser(admin)
        asked.clear()
        b.get("/")
        counts.append(len(asked))
        assert sum("pgque.overview" in query for query in asked) <= 1
    assert counts[0] == counts[1]


def test_the_rates_of_what_comes_in_and_goes_out(
    browser: NewBrowser, reader: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    conn.execute("select pgque.send_batch(%s, array_fill('x'::text, array[100]))", [queue])
    tick(queue)
    b = browser(reader)
    samples = b.client.app.samples  # type: ignore[attr-defined]

    def out() -> str:
        row = b.get("/", name=queue).text.split("<tbody>")[1]
        return str(re.findall(r'data-label="Out, per second">([^<]*)<', row)[0])

    assert out() == NOTHING  # nobody has looked before
    [(taken, counts)] = next(iter(samples._counts.values()))
    samples._counts[next(iter(samples._counts))] = [(taken - 20, counts)]
    conn.execute("select pgque.send_batch(%s, array_fill('x'::text, array[50]))", [queue])
    batch = conn.execute("select max(batch_id) from pgque.receive(%s, 'c', 100)", [queue]).fetchone()
    assert batch is not None
    conn.execute("select pgque.ack(%s)", [batch[0]])
    tick(queue)
    samples.forget(b.client.app.config.databases[0])  # type: ignore[attr-defined]
    assert 0 < float(out()) <= 5  # 100 messages in 20 s and a little


def test_queues_are_shown_by_name_and_order_in_pages(
    browser: NewBrowser, reader: Role, new_queue: Queues, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert overview.PER_PAGE == 50
    monkeypatch.setattr(overview, "PER_PAGE", 2)
    for name in ("page_a", "page_b", "page_c"):
        new_queue(name)
    conn.execute("select pgque.pause('page_c')")
    b = browser(reader)
    pages = [b.get("/", name="page_", order="name", page=n) for n in (1, 2)]
    first, second = (re.split("</?tbody>", page.text)[1] for page in pages)
    assert "page_a" in first
    assert "page_b" in first
    assert "page_c" not in first
    assert "Page 1 of 2" in text(pages[0])
    assert "page_a" not in second
    assert "page_c" in second
    rows = re.split("</?tbody>", b.get("/", name="PAGE_").text)[1]
    assert rows.index("page_c") < rows.index("page_a")  # the paused one comes first
    assert "No queue has a name like this." in text(b.get("/", name="nothing like it"))
    b.get("/", page=-1)
    b.get("/", page=99)
    b.get("/", order="x' or 1")


def test_settings_are_shown_with_their_source_and_edited_in_place(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection
) -> None:
    value = "select param_value from pgque.queue_config(%s) where param_name = %s"
    b = browser(admin)

    def shown(name: str, page: Any = None) -> str:
        page = page or b.get("/queue", queue=queue)
        return text_of(page.text.split(f'id="setting-{name}"')[1].split('class="setting"')[0])

    def text_of(html: str) -> str:
        class Page:
            text = html

        return text(Page())  # type: ignore[arg-type]

    assert "built in How often a rejected message is redelivered" in shown("max_retries")
    assert "retries Default: 5" in shown("max_retries")
    fields = {
        "queue": queue,
        "was-max_retries": "5",
        "set-max_retries": "3",
        "was-max_depth": "0",
        "set-max_depth": "0",
    }
    said = text(b.post("/queue/settings/preview", **fields))
    assert "Save 1 setting of queue" in said
    assert "max_retries 5 3 How often a rejected message is redelivered" in said
    assert f"""select pgque.alter_queue('{queue}', '{{"max_retries": "3"}}'::jsonb)""" in said
    assert conn.execute(value, [queue, "max_retries"]).fetchone() == ("5",)  # to ask changes nothing
    assert "max_retries is now 3." in text(b.post("/queue/settings", **fields))
    assert conn.execute(value, [queue, "max_retries"]).fetchone() == ("3",)
    assert "this queue" in shown("max_retries")
    said = text(b.get("/queue", queue=queue))
    assert said.index("Changed for this queue 1: max_retries") < said.index("Delivery and failures")

    try:
        conn.execute("select pgque.set_default_config('message_ttl', '3 days')")
        assert "all queues" in shown("message_ttl")
        assert "Default: 3 days" in shown("message_ttl")
    finally:
        conn.execute("select pgque.set_default_config('message_ttl', null)")

    # The button Default, in the form as a browser sends it
    fields = {"queue": queue, "was-max_retries": "3", "set-max_retries": "7", "default": "max_retries"}
    page = b.post("/queue/settings/preview", **fields)
    assert "max_retries 3 default: 5" in text(page)
    assert '{"max_retries": null}' in text(page)
    page = b.post("/queue/settings", **{"queue": queue, "was-max_retries": "3"})
    assert "max_retries is now 5." in text(page)
    assert "built in" in shown("max_retries")
    assert "nothing to save" in text(b.post("/queue/settings/preview", queue=queue))

    page = b.get("/queue", queue=queue)
    for choice in ("drop", "dead_letter", "hold"):
        assert f">{choice}</option>" in page.text
    # Every setting is there, and has a meaning.
    names = [
        row[0] for row in conn.execute("select param_name from pgque.queue_config(%s)", [queue]).fetchall()
    ]
    for name in names:
        assert len(shown(name, page)) > len(name) + 30, name


def test_consumers_and_workers_are_shown_reclaimed_and_moved(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    conn.execute("select pgque.subscribe(%s, 'solo')", [queue])
    leased(conn, tick, queue, ["a", "b", "c"], worker="slow worker")
    b = browser(admin)
    page = text(b.get("/queue", queue=queue))
    assert "c shared by workers" in page
    assert "solo reads on its own" in page
    assert "slow worker c 3 1" in page
    page = text(b.post("/queue/reclaim", queue=queue, consumer="c"))
    assert "Released 1 batch of consumer c" in page
    row = conn.execute(
        "select count(*) from pgque.receive(%s, 'c', 100, 'other', '1 hour')", [queue]
    ).fetchone()
    assert row == (3,)

    page = text(b.get("/queue/seek", queue=queue, consumer="solo", to="latest"))
    assert "Skips, in messages 3" in page
    latest = conn.execute("select pgque.tick_for(%s, 'latest')", [queue]).fetchone()
    assert latest is not None
    page = text(b.post("/queue/seek", queue=queue, consumer="solo", tick=latest[0]))
    assert f"Consumer solo stands at tick {latest[0]}." in page
    page = text(b.get("/queue/seek", queue=queue, consumer="solo", to="earliest"))
    assert "Repeats, in messages 3" in page
    b.get("/queue/seek", 400, queue=queue, consumer="solo", to="never")
    b.post("/queue/seek", 400, queue=queue, consumer="solo", tick=1, incarnation="no UUID")
    b.get("/queue/seek", 404, queue=queue, consumer="nobody", to="latest")


def test_a_consumer_is_not_moved_to_a_tick_of_a_queue_that_was_created_again(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    conn.execute("select pgque.subscribe(%s, 'solo')", [queue])
    b = browser(admin)
    page = b.get("/queue/seek", queue=queue, consumer="solo", to="latest")
    found = re.search(r'name="incarnation" value="([0-9a-f-]+)"', page.text)
    assert found is not None
    conn.execute("select pgque.drop_queue(%s, true)", [queue])
    conn.execute("select pgque.create_queue(%s)", [queue])
    conn.execute("select pgque.subscribe(%s, 'solo')", [queue])
    page = b.post("/queue/seek", 400, queue=queue, consumer="solo", tick=1, incarnation=found[1])
    assert f"queue {queue} was created again" in text(page)


def test_a_purge_asks_first_and_removes_everything(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    leased(conn, tick, queue, ["a", "b"])
    conn.execute("select pgque.send(%s, 'c'::text), pgque.send(%s, 'd'::text)", [queue, queue])
    b = browser(admin)
    page = text(b.get("/queue/purge", queue=queue))
    assert "Purge this queue?" in page
    assert "ahead of it 2" in page
    assert states(conn, queue) == {"processing": 2, "pending": 2}  # to ask changes nothing
    assert "The queue is empty. The slowest consumer had" in text(b.post("/queue/purge", queue=queue))
    assert states(conn, queue) == {}


def test_a_message_is_cancelled_after_a_question(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    leased(conn, tick, queue, ["a", "b"])
    found = conn.execute("select min(m.msg_id) from pgque.list_messages(%s) as m", [queue]).fetchone()
    assert found is not None
    b = browser(admin)
    assert "Cancel…" in text(b.get("/message", queue=queue, id=found[0]))
    page = text(b.get("/message/cancel", queue=queue, id=found[0]))
    assert f"Cancel message {found[0]}?" in page
    assert "readers by offset still see it" in page
    assert states(conn, queue) == {"processing": 2}
    assert f"Message {found[0]} is cancelled; it was processing." in text(
        b.post("/message/cancel", queue=queue, id=found[0])
    )
    assert states(conn, queue) == {"processing": 1}
    assert "cancel" in text(b.get("/actions", of=queue))


def test_a_change_waits_for_a_lock_for_longer_than_a_call_may_take_elsewhere(
    browser: NewBrowser,
    admin: Role,
    queue: str,
    conn: Connection,
    connect: Any,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LimitedConnection, "command_timeout", 0.5)
    b = browser(admin)
    conn.execute("select pgque.send(%s, 'a'::text)", [queue])
    holder = connect(autocommit=False)
    holder.execute("select from pgque.queue where queue_name = %s for update", [queue])
    pages: list[str] = []
    waiting = (
        b"select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like '%pgque.purge%'"
        b" and clock_timestamp() > query_start + interval '1 second'"
    )
    ended = threading.Event()

    def purge() -> None:
        pages.append(text(b.post("/queue/purge", queue=queue)))
        ended.set()

    with running(purge, holder.rollback, 20):
        wait_until(lambda: ended.is_set() or conn.execute(waiting).fetchone())
        holder.rollback()
        assert ended.wait(20)
    assert "The queue is empty." in pages[0]


def test_a_page_is_shown_over_another_connection_after_the_one_of_its_session_went_silent(
    tcp_dsn: str, admin: Role, queue: str
) -> None:
    with silent_path(tcp_dsn) as path:
        site = Site(Config(databases([path.dsn])))
        try:
            b = Browser(site)
            b.log_in(admin)
            path.silence(new_ones=False)
            assert queue in text(b.get("/queue", queue=queue))
        finally:
            site.close()


def test_dead_letters_by_reason_requeued_replayed_and_deleted(
    browser: NewBrowser,
    admin: Role,
    queue: str,
    conn: Connection,
    tick: Tick,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, ids = leased(conn, tick, queue, [f"payload {n}" for n in range(60)])
    conn.execute("select pgque.dead(%s, %s, 'bounced')", [batch, ids[:55]])
    conn.execute("select pgque.dead(%s, %s, null)", [batch, ids[55:58]])
    b = browser(admin)
    page = b.get("/dead", queue=queue)
    said = text(page)
    assert "bounced c 55" in said
    assert "dead c 3" in said
    assert "All: 58" in said
    assert page.text.count('type="checkbox"') == 50
    assert "Older" in said
    dl_ids = [
        row[0]
        for row in conn.execute("select dl_id from pgque.dlq_inspect(%s) order by 1", [queue]).fetchall()
    ]
    assert text(b.get("/dead", queue=queue, before=dl_ids[8])).count("Requeue Replay") == 8

    # One, those that are chosen, all that match
    assert "1 requeued." in text(b.post("/dead/do", queue=queue, one=f"requeue {dl_ids[0]}"))
    page = b.post("/dead/ask", queue=queue, action="replay", id=[str(dl_ids[1]), str(dl_ids[2])])
    assert "Replay 2 dead letters?" in text(page)
    assert states(conn, queue)["dead"] == 57
    page = b.post("/dead/do", queue=queue, action="replay", id=[str(dl_ids[1]), str(dl_ids[2])])
    assert "2 replayed." in text(page)
    page = b.post("/dead/ask", queue=queue, action="requeue", all=1, reason="bounced", text="PAYLOAD 1")
    assert "Requeue 10 dead letters?" in text(page)  # 10 to 19: 1 is replayed
    upto = page.text.split('name="upto" value="')[1].split('"')[0]
    page = b.post(
        "/dead/do", queue=queue, action="requeue", all=1, reason="bounced", text="PAYLOAD 1", upto=upto
    )
    assert "10 requeued." in text(page)
    assert states(conn, queue)["dead"] == 45
    assert "Matching: 3" in text(b.get("/dead", queue=queue, reason="dead"))
    assert "Matching: 0" in text(b.get("/dead", queue=queue, type="other"))

    # There may be more than a page looks at.
    monkeypatch.setattr("pgque.web.dead.LOOKED", 2)
    assert "Matching: 2 or more" in text(b.get("/dead", queue=queue, reason="dead"))
    every = {"queue": queue, "action": "delete", "all": 1, "reason": "dead"}
    assert "Delete 2 or more dead letters?" in text(b.post("/dead/ask", **every))
    assert "3 deleted." in text(b.post("/dead/do", **every))
    monkeypatch.setattr("pgque.web.dead.LOOKED", 10_000)

    # What cannot be done says why
    page = b.post("/dead/do", queue=queue, one=f"requeue {dl_ids[0]}")
    assert "1 no longer dead letters: somebody else requeued" in text(page)
    conn.execute("select pgque.unsubscribe(%s, 'c')", [queue])
    monkeypatch.setattr("pgque.web.dead.LOOKED", 10)  # what fails keeps nothing from those that are older
    page = b.post("/dead/do", queue=queue, action="requeue", all=1)
    monkeypatch.setattr("pgque.web.dead.LOOKED", 10_000)
    assert "42 not requeued." in text(page)
    assert "was unsubscribed" in text(page)
    assert "No dead letter is chosen." in text(b.post("/dead/ask", queue=queue, action="requeue"))
    b.post("/dead/do", 400, queue=queue, one="drop 1")
    b.post("/dead/ask", 400, queue=queue, action="drop", all=1)

    page = b.post("/dead/ask", queue=queue, action="delete", id=[str(dl_ids[-4])])
    assert "Delete 1 dead letter?" in text(page)
    assert "1 deleted." in text(b.post("/dead/do", queue=queue, action="delete", id=[str(dl_ids[-4])]))
    assert "Older than 1 day 0" in text(b.get("/dead/purge", queue=queue, older_than="1 day"))
    page = b.get("/dead/purge", queue=queue, older_than="0")
    assert "Older than 0 41" in text(page)
    until = unescape(page.text.split('name="until" value="')[1].split('"')[0])
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    batch, ids = leased(conn, tick, queue, ["given up after the others were counted"])
    conn.execute("select pgque.dead(%s, %s, 'x')", [batch, ids])
    assert "41 deleted." in text(b.post("/dead/purge", queue=queue, until=until))
    assert f"{len(ids)} deleted." in text(b.post("/dead/purge", queue=queue, until="2100-01-01"))
    assert "This queue has no dead letters." in text(b.get("/dead", queue=queue))


def test_work_on_many_dead_letters_goes_on_while_its_page_shows_how_far_it_is(
    browser: NewBrowser,
    admin: Role,
    queue: str,
    conn: Connection,
    connect: Callable[..., Connection],
    tick: Tick,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgque.web.dead.SOON", 0.1)
    batch, ids = leased(conn, tick, queue, ["a", "b", "c"])
    conn.execute("select pgque.dead(%s, %s, 'x')", [batch, ids])
    b = browser(admin)
    holder = connect(autocommit=False)
    holder.execute("select from pgque.dead_letter where ev_id = %s for update", [ids[1]])
    page = b.post("/dead/do", queue=queue, action="requeue", all=1)
    assert page.url.path == "/job"
    assert 'http-equiv="refresh"' in page.text
    job = next(iter(next(iter(b.client.app.sessions._held.values())).jobs.values()))  # type: ignore[attr-defined]
    wait_until(lambda: "1 of 3 done." in text(b.get("/job", key=job.key)), "the second is waited for")
    holder.rollback()
    job.join(10)
    page = b.get("/job", key=job.key)
    assert "3 of 3 done. It has ended." in text(page)
    assert "refresh" not in page.text
    assert states(conn, queue) == {"retry": 3} or states(conn, queue) == {"pending": 3}
    assert "no longer known" in text(b.get("/job", key="x"))


def test_messages_are_found_and_one_is_shown_with_all_that_is_known(
    browser: NewBrowser,
    admin: Role,
    queue: str,
    conn: Connection,
    tick: Tick,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, ids = leased(conn, tick, queue, ['{"name": "Ann", "n": [1, 2]}', "plain text", "third"])
    conn.execute("select pgque.nack(%s, %s, '1 hour', 'printer on fire')", [batch, ids[:1]])
    conn.execute("select pgque.ack(%s, %s)", [batch, ids[2:]])
    sent = conn.execute(
        "select pgque.send(%s, 'bin', '\\x00ff'::bytea, key => 'k1', headers => %s::jsonb, delay => '1 hour')",
        [queue, '{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'],
    ).fetchone()
    assert sent is not None
    b = browser(admin)
    page = text(b.get("/messages", queue=queue))
    for words in ("retry c kind", "processing c kind", "delayed bin k1", "printer on fire"):
        assert words in page, page
    assert "third" not in page
    for query, found in (
        ({"status": "retry"}, ids[0]), ({"type": "bin"}, sent[0]), ({"key": "k1"}, sent[0]),
        ({"text": "ANN"}, ids[0]), ({"consumer": "c", "status": "processing"}, ids[1]),
    ):  # fmt: skip
        page = b.get("/messages", queue=queue, **query).text.split("<tbody>")[1]
        assert page.count('<th scope="row">') == 1, query
        assert f"id={found}" in page
    # One row a page: a message has one for each consumer.
    monkeypatch.setattr("pgque.web.messages.PER_PAGE", 1)
    conn.execute("select pgque.subscribe(%s, 'd', 'earliest')", [queue])
    address, seen = f"/messages?queue={queue}", []
    while address:
        page = b.client.get(address).text
        seen += re.findall(r'id=(\d+)">\d+</a>|Consumer"><bdi>(\w)</bdi>', page)
        more = re.search(r'href="([^"]*)">Older', page)
        address = unescape(more[1]) if more else ""
    rows = conn.execute(
        "select msg_id::text, consumer_name from pgque.list_messages(%s) order by msg_id desc, 2", [queue]
    ).fetchall()
    assert [one for one, _ in seen if one] == [row[0] for row in rows]
    assert [one for _, one in seen if one] == [row[1] for row in rows if row[1]]
    monkeypatch.undo()
    conn.execute("select pgque.unsubscribe(%s, 'd')", [queue])
    assert "No message matches." in text(b.get("/messages", queue=queue, until="2001-01-01T00:00"))
    assert "printer" in text(b.get("/messages", queue=queue, since="2001-01-01T00:00"))
    b.get("/messages", 400, queue=queue, status="odd")
    b.get("/messages", 400, queue=queue, since="soon")

    page = text(b.get("/message", queue=queue, id=ids[0]))
    assert "c retry 1 1" in page
    assert "printer on fire" in page
    assert '"name": "Ann",' in page
    assert "JSON, 28 bytes" in page
    assert "c processing 1 0" in text(b.get("/message", queue=queue, id=ids[1]))
    page = text(b.get("/message", queue=queue, id=sent[0]))
    assert "Trace id 4bf92f3577b34da6a3ce929d0e0e4736" in page
    assert "bytes, 2 bytes" in page
    assert "00ff" in page
    assert "every consumer has finished it" in text(b.get("/message", queue=queue, id=ids[2]))
    assert "it was never sent" in text(b.get("/message", 404, queue=queue, id=999))


def test_a_test_message_is_sent_with_its_options_and_errors_keep_what_was_typed(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection
) -> None:
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    b = browser(admin)
    b.get("/send", queue=queue)
    page = b.post(
        "/send", queue=queue, type="t", kind="json", payload='{"a": 1}', headers='{"h": "v"}', key="k",
        delay="1 hour", ttl="2 hours", partition_key="p",
    )  # fmt: skip
    assert "was sent." in text(page)
    row = conn.execute(
        "select type, payload, headers, key, status, expires_at > now() + '1 hour' from pgque.list_messages(%s)",
        [queue],
    ).fetchone()
    assert row == ("t", '{"a": 1}', {"h": "v"}, "k", "delayed", True)
    b.post("/send", queue=queue, kind="bytes", payload="00 ff 10", deliver_at="2099-01-01T00:00")
    b.post("/send", queue=queue, payload=EVIL.replace("\x1b", ""))
    rows = conn.execute(
        "select payload, payload_bytes, type from pgque.list_messages(%s) where key is null order by msg_id",
        [queue],
    ).fetchall()
    assert rows == [(None, b"\x00\xff\x10", "default"), (EVIL.replace("\x1b", ""), None, "default")]

    for fields in ({"kind": "json", "payload": "{oops <b>"}, {"kind": "bytes", "payload": "zz <b>"},
                   {"payload": "a <b>", "delay": "-1 day"}, {"payload": "a <b>", "headers": "[]"}):  # fmt: skip
        page = b.post("/send", 400, queue=queue, **fields)
        assert 'role="alert"' in page.text
        assert fields["payload"].replace("<b>", "&lt;b&gt;") in page.text
    assert len(conn.execute("select from pgque.list_messages(%s)", [queue]).fetchall()) == 3


def test_recurring_messages_and_the_archive(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    name = f"nightly {NAME}"
    conn.execute("select pgque.create_recurring(%s, %s, '0 3 * * *', 't', 'x'::text)", [name, queue])
    b = browser(admin)
    assert f"{name} active" in text(b.get("/recurring"))
    assert "was sent." in text(b.post("/recurring/do", name=name, action="run"))
    assert "is paused." in text(b.post("/recurring/do", name=name, action="pause"))
    page = text(b.get("/recurring"))
    assert f"{name} paused" in page
    assert "Resume" in page
    assert "is active again." in text(b.post("/recurring/do", name=name, action="resume"))
    b.post("/recurring/do", 400, name=name, action="drop")
    batch, ids = leased(conn, tick, queue, ["find me", "not me"])
    conn.execute("select pgque.archive(%s)", [batch])
    found = b.get("/archive", queue=queue, text="FIND")
    assert "find me" in text(found)
    assert "not me" not in text(found)
    number = found.text.split('name="id" value="')[1].split('"')[0]
    # An impatient second click sends no second message; the next form may.
    for path in ("/archive", "/send", "/recurring"):
        assert 'name="once" value="' in b.get(path, queue=queue).text, path
    again = "this form was sent already"
    back = f"/archive?queue={queue}"
    for once in ("one", "one", "two"):
        page = text(b.post("/archive/replay", queue=queue, id=number, once=once, back=back))
        assert ("was sent to every consumer." in page) != (again in page)
    assert states(conn, queue) == {"archived": 3, "pending": 2}
    b.post("/send", queue=queue, payload="x", once="three")
    assert again in text(b.post("/send", 400, queue=queue, payload="x", once="three"))
    b.post("/send", queue=queue, payload="y", once="three")
    assert states(conn, queue) == {"archived": 3, "pending": 4}
    assert "c archived" in text(b.get("/message", queue=queue, id=ids[0]))
    conn.execute("select pgque.drop_recurring(%s)", [name])


def test_a_role_with_a_right_to_one_queue_sees_that_queue_and_is_offered_what_it_may_do(
    browser: NewBrowser, roles: Roles, new_queue: Queues, conn: Connection, tick: Tick
) -> None:
    own, read, write, other = (new_queue() for _ in range(4))
    role = roles()
    conn.execute(
        "select pgque.grant_queue(%s, %s, 'admin'), pgque.grant_queue(%s, %s, 'consume'), pgque.grant_queue(%s, %s, 'produce')",
        [own, role.name, read, role.name, write, role.name],
    )
    for name in (own, read, write, other):
        leased(conn, tick, name, [f"payload of {name}"])
    b = browser(role)
    page = text(b.get("/"))
    for name in (own, read, write):
        assert name in page
    assert other not in page
    # A queue without a right, and one that does not exist, look the same.
    answers = [b.get("/queue", 403, queue=name) for name in (other, "no such queue")]
    assert text(answers[0]).replace(other, "") == text(answers[1]).replace('"no such queue"', "").replace(
        "no such queue", ""
    )

    every = (
        'href="/messages?', 'href="/dead?', 'href="/archive?', 'href="/send?', "Purge", "Pause sending", ">Save…<", "Reclaim",
    )  # fmt: skip
    offered = {
        own: every,
        read: ('href="/messages?',),
        write: ('href="/send?',),
    }
    for name, words in offered.items():
        page = b.get("/queue", queue=name).text
        for word in every:
            assert (word in page) == (word in words), (name, word)
    # max_consumers limits this role too.
    assert 'aria-label="max_depth"' in b.get("/queue", queue=own).text
    assert 'aria-label="max_consumers"' not in b.get("/queue", queue=own).text

    conn.execute("select pgque.send(%s, 'new payload'::text)", [read])
    assert "new payload" in text(b.get("/messages", queue=read))
    assert "may not send" in text(b.get("/send", queue=read))
    two = {"was-max_retries": "5", "set-max_retries": "2"}
    assert "is now 2" in text(b.post("/queue/settings", queue=own, **two))
    assert "Create a recurring message" in text(b.get("/recurring"))
    # What is not offered is refused as well.
    for name in (read, write, other):
        b.post("/queue/settings", 403, queue=name, **two)
        b.post("/queue/pause", 403, queue=name)
        b.post("/queue/purge", 403, queue=name)
        b.get("/dead", 403, queue=name)
        b.post("/dead/purge", 403, queue=name, until="2100-01-01")
        b.get("/archive", 403, queue=name)
    b.post("/send", 400, queue=read, payload="x")
    b.post("/send", queue=write, payload="x")


def test_viewers_share_figures_but_a_role_is_shown_its_own_queues_only(
    browser: NewBrowser,
    admin: Role,
    reader: Role,
    roles: Roles,
    new_queue: Queues,
    conn: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, other = new_queue(), new_queue()
    one = roles()
    conn.execute("select pgque.grant_queue(%s, %s, 'consume'), pgque.pause(%s)", [own, one.name, other])
    taken: list[str] = []
    really = overview._taken

    def counted(page: Page) -> object:
        taken.append(page.role["name"])
        return really(page)

    monkeypatch.setattr(overview, "_taken", counted)
    first = browser(admin)
    first.client.app.samples._period = 600  # type: ignore[attr-defined]
    second, third = Browser(first.client.app), Browser(first.client.app)
    second.log_in(reader)
    third.log_in(one)
    for b in (first, second, first):
        assert f"{other} : sending is paused" in text(b.get("/"))
    page = third.get("/")
    assert own in page.text
    assert other not in page.text
    assert taken == [admin.name, one.name]
    # A right that is lost, and a new role of that name: what was taken before is not shown.
    conn.execute("select pgque.revoke_queue(%s, %s, 'consume')", [own, one.name])
    assert own not in third.get("/").text
    first.post("/queue/pause", queue=own)
    paused = re.findall(r'id="problem-paused">.*?</section>', second.get("/").text, re.DOTALL)[0]
    assert own in paused  # a change is seen at once


def test_a_page_that_is_read_only_offers_nothing_and_refuses_all(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    batch, ids = leased(conn, tick, queue, ["secret payload", "another"])
    conn.execute("select pgque.dead(%s, %s, 'x')", [batch, ids[:1]])
    b = browser(admin, read_only=True, hide_payloads=True)
    for path in ("/queue", "/messages", "/dead", "/archive"):
        page = b.get(path, queue=queue)
        assert "This page is read only" in text(page)
        assert page.text.count('<form method="post"') == 1, path  # log out
        assert "secret payload" not in page.text
    assert "secret payload" not in b.get("/message", queue=queue, id=ids[0]).text
    from pgque.web.site import CHANGES

    for path in CHANGES:
        page = b.post(
            path,
            403,
            queue=queue,
            one="requeue 1",
            older_than="0",
            action="run",
            name="x",
            setting="max_retries",
            value="1",
            consumer="c",
        )
        assert "read only" in text(page)
    assert states(conn, queue) == {"processing": 1, "dead": 1}
    # To search in what is hidden would show it, and without the text all would match.
    for path in ("/dead", "/messages", "/archive"):
        assert "does not search in them" in text(b.get(path, 400, queue=queue, text="no such text"))
    b = browser(admin, hide_payloads=True)
    fields = {"queue": queue, "action": "delete", "all": 1, "text": "no such text"}
    b.post("/dead/ask", 400, **fields)
    b.post("/dead/do", 400, **fields)
    assert states(conn, queue) == {"processing": 1, "dead": 1}

    # So is the page of a role or a database that changes nothing; a standby is one.
    conn.execute(f"alter role {admin.name} set default_transaction_read_only = on".encode())
    b = browser(admin)
    assert "The database is read only" in text(b.get("/queue", queue=queue))
    b.post("/queue/pause", 403, queue=queue)


def test_no_text_of_a_user_becomes_markup_or_sql(
    browser: NewBrowser, admin: Role, new_queue: Queues, conn: Connection, tick: Tick
) -> None:
    queue = new_queue(NAME)
    conn.execute("select pgque.subscribe(%s, %s)", [queue, EVIL])
    conn.execute(
        "select pgque.send(%s, %s, %s::text, headers => jsonb_build_object(%s::text, %s::text), partition_key => %s)",
        [queue, EVIL, EVIL, EVIL, EVIL, EVIL],
    )
    conn.execute("select pgque.send(%s, %s, %s::text, key => %s)", [queue, EVIL, EVIL, EVIL])
    tick(queue)
    rows = conn.execute(
        "select batch_id, msg_id from pgque.receive(%s, %s, 100, %s, '1 hour')", [queue, EVIL, EVIL]
    ).fetchall()
    conn.execute("select pgque.dead(%s, %s, %s)", [rows[0][0], [rows[0][1]], EVIL])
    conn.execute(
        "select pgque.create_recurring(%s, %s, '0 3 * * *', %s, %s::text)", [EVIL, queue, EVIL, EVIL]
    )
    b = browser(admin)
    pages = [b.get("/"), b.get("/recurring")]
    pages += [
        b.get(path, queue=queue)
        for path in ("/queue", "/messages", "/dead", "/archive", "/send", "/queue/purge", "/dead/purge")
    ]
    pages += [b.get("/message", queue=queue, id=row[1]) for row in rows]
    pages.append(b.get("/queue/seek", queue=queue, consumer=EVIL))
    for path in ("/messages", "/dead", "/archive"):
        for field in ("type", "text", "consumer", "key", "reason"):
            pages.append(b.get(path, queue=queue, **{field: EVIL}))
    pages.append(b.post("/dead/ask", queue=queue, action="requeue", all=1, reason=EVIL))
    pages.append(b.post("/queue/settings/preview", **{"queue": queue, "set-max_retries": EVIL}))
    pages.append(b.post("/queue/settings", 409, **{"queue": queue, "set-max_retries": EVIL}))
    was = {"was-max_retries": "5", "was-drop_policy": "dead_letter"}
    pages.append(
        b.post(
            "/queue/settings", 400, queue=queue, **{"set-max_retries": EVIL, "set-drop_policy": EVIL}, **was
        )
    )
    pages.append(
        b.post("/send", 400, queue=queue, payload=EVIL.replace("\x1b", ""), headers=EVIL.replace("\x1b", ""))
    )
    pages.append(b.post("/dead/purge", 400, queue=queue, until=EVIL))
    pages.append(b.get("/dead/purge", 400, queue=queue, older_than=EVIL))
    pages.append(b.client.get("/login", params={"next": EVIL}))
    for page in pages:
        assert "<script>" not in page.text
        assert "<img" not in page.text
        assert "<b>" not in page.text
        # Fields hold what was typed; everything else shows what cannot be seen.
        shown = re.sub(r"<textarea.*?</textarea>|<(input|button|option|a) [^>]*>", "", page.text, flags=re.S)
        assert "\x1b" not in shown
        assert "\u202e" not in shown
    conn.execute("select pgque.drop_recurring(%s)", [EVIL])


def sampled(conn: psycopg.Connection[Any], queue: str, gap: tuple[int, int] = (0, 0)) -> None:
    """Write samples of three hours, one a minute, of a queue with consumers c and d; none in a gap (minutes ago).

    60 messages a minute are sent and delivered to c, 30 to d; c fails one a minute, and d lags by its minutes.
    """
    conn.execute("select pgque.subscribe(%s, 'c'), pgque.subscribe(%s, 'd')", [queue, queue])
    conn.execute("truncate pgque.sample, pgque.sample_hour")
    conn.execute("select setval('pgque.sampled', extract(epoch from pgque.clock())::bigint)")
    conn.execute(
        "insert into pgque.sample (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed,"
        " smp_redelivered, smp_removed, smp_dead, smp_gap)"
        " select pgque.clock() - (180 - n) * interval '1 minute', f.queue, f.sub, f.lag, f.lag, l.last_value,"
        " f.sent * n, f.passed * n, f.failed * n, 0, 0,"
        " case when f.queue = 0 and (n = 0 or 180 - n = %(until)s)"
        "  then pgque.clock() - (case when n = 0 then 180 else %(since)s end) * interval '1 minute' end"
        " from pgque.sample_leaf as l, generate_series(0, 180) as n"
        " cross join lateral (select 0, 0, 0, 60, 90, 1 union all"
        "  select q.queue_id, 0, null, 60, null, null from pgque.queue as q where q.queue_name = %(queue)s union all"
        "  select s.sub_queue, s.sub_id, case when c.co_name = 'd' then n else 0 end, null,"
        "   case when c.co_name = 'd' then 30 else 60 end, case when c.co_name = 'd' then 0 else 1 end"
        "  from pgque.queue as q join pgque.subscriber as s on s.sub_queue = q.queue_id"
        "  join pgque.consumer as c on c.co_id = s.sub_consumer where q.queue_name = %(queue)s"
        " ) as f (queue, sub, lag, sent, passed, failed)"
        " where not (180 - n > %(until)s and 180 - n < %(since)s)",
        {"queue": queue, "since": gap[0], "until": gap[1]},
    )


def bars(page: str, title: str) -> list[str]:
    """Return what the bars of a chart say, gaps too, without their time."""
    [figure] = [part for part in page.split("<figure")[1:] if f"<figcaption>{title}<" in part]
    return re.findall(
        r"<title>\d\d-\d\d \d\d:\d\d UTC, [^:]*: (.*?)</title>", figure.partition("</figure>")[0]
    )


def test_a_role_that_only_looks_is_offered_neither_dead_letters_nor_a_recurring_message(
    browser: NewBrowser, admin: Role, reader: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    batch, ids = leased(conn, tick, queue, ["a", "b"])
    conn.execute("select pgque.dead(%s, %s, 'x')", [batch, ids])
    for role, offered in ((admin, True), (reader, False)):
        b = browser(role)
        assert (f'href="/dead?queue={queue}' in b.get("/", name=queue).text) is offered
        assert ("Create a recurring message" in text(b.get("/recurring"))) is offered


def test_the_scale_of_a_rate_fits_a_queue_with_little_traffic() -> None:
    width = timedelta(minutes=5)
    rows = [{"start_at": datetime(2030, 1, 1, tzinfo=timezone.utc) + n * width} for n in range(2)]

    def levels(highest: float, least: float = 0.001) -> list[str]:
        return chart.drawn("", "hour", rows, width, [0, highest], str, least).levels

    assert levels(0.028) == ["0.05", "0.025", "0"]
    assert levels(0.3) == ["0.5", "0.25", "0"]
    assert levels(0) == levels(0.3, 1) == ["1", "0.5", "0"]
    assert levels(1_500) == ["2,000", "1,000", "0"]


def test_charts_show_what_was_sampled_of_a_queue_and_of_each_consumer(
    browser: NewBrowser, admin: Role, reader: Role, queue: str, conn: Connection
) -> None:
    sampled(conn, queue)
    for role in (admin, reader):
        b = browser(role)
        page = b.get("/queue", queue=queue, range="1h").text
        assert bars(page, "Sent, messages a second")[:-1] == ["1 a second"] * 19
        assert bars(page, "Delivered, messages a second")[:-1] == ["1.5 a second"] * 19
        assert bars(page, "Failed deliveries")[:-1] == ["3"] * 19
        assert bars(page, "Messages given up") == []
        assert bars(page, "Oldest pending, seconds")[0] == "2 min 3 s"
        page = b.get("/queue", queue=queue, range="1h", consumer="c").text
        assert bars(page, "Delivered, messages a second")[:-1] == ["1 a second"] * 19
        assert bars(page, "Oldest pending, seconds") == []
        page = b.get("/queue", queue=queue, range="1h", consumer="d").text
        assert bars(page, "Failed deliveries") == []
        assert bars(page, "Delivered, messages a second")[:-1] == ["0.5 a second"] * 19
        b.get("/queue", 404, queue=queue, consumer="nobody")
        assert bars(b.get("/", range="1h").text, "Sent, messages a second")[:-1] == ["1 a second"] * 19


def test_a_time_without_samples_is_a_gap_in_the_charts(
    browser: NewBrowser, reader: Role, queue: str, conn: Connection
) -> None:
    sampled(conn, queue, gap=(40, 20))
    answer = browser(reader).get("/queue", queue=queue, range="1h")
    for title in ("Sent, messages a second", "Oldest pending, seconds"):
        found = bars(answer.text, title)
        assert [n for n, words in enumerate(found) if words == "no sample"] == [7, 8, 9, 10, 11, 12]
        assert len(found) == 20
    assert "No samples for 18 min." in text(answer)
    # Before the first sample, too: it was taken three hours ago.
    page = browser(reader).get("/queue", queue=queue, range="6h").text
    assert bars(page, "Sent, messages a second").count("no sample") in range(38, 42)


def test_the_range_stays_with_the_other_fields_of_a_page(
    browser: NewBrowser, reader: Role, queue: str, conn: Connection
) -> None:
    sampled(conn, queue)
    b = browser(reader)
    for path, fields in (("/queue", {"queue": queue, "consumer": "c"}), ("/", {"order": "name"})):
        for name in ("1h", "6h", "24h", "7d"):
            page = b.get(path, **fields, range=name).text
            links = re.findall(r'<a href="([^"#]+)#charts"( aria-current="true")?>', page)
            assert len(links) == 4
            [current] = [unescape(to) for to, mark in links if mark]
            query = dict(parse_qsl(urlsplit(current).query))
            assert query == {**fields, "range": name}
            assert b.client.get(current).status_code == 200
    assert 'aria-current="true">6 hours' in b.get("/queue", queue=queue, range="century").text


def test_who_did_what_is_shown_to_administrators(
    browser: NewBrowser, admin: Role, reader: Role, new_queue: Queues
) -> None:
    one, other = new_queue(NAME), new_queue()
    b = browser(admin)
    for name in (one, other):
        b.post("/queue/settings", queue=name, **{"was-max_retries": "5", "set-max_retries": "3"})
    page = text(b.get("/actions", of=one))
    assert f"{admin.name} pgque web {one}" in page
    assert '"param_value": "3"' in page or '"max_retries": "3"' in page, page
    assert other not in page
    assert other in text(b.get("/actions"))
    assert "No action is noted." in text(b.get("/actions", of=one, before="2001-01-01T00:00:00+00:00"))
    b.get("/actions", 400, before="soon")
    b = browser(reader)
    assert "Actions" not in text(b.get("/"))
    b.get("/actions", 403)


def test_a_queue_that_is_locked_keeps_nobody_from_the_pages(
    server: TestServer, own_dsn: str, admin: Role
) -> None:
    site = Site(Config(databases([over_tcp(server.process, own_dsn)])))
    try:
        with psycopg.connect(own_dsn, autocommit=True) as conn, psycopg.connect(own_dsn) as holder:
            conn.execute("select pgque.create_queue('orders'), pgque.create_queue('locked')")
            holder.execute("select pgque.drop_queue('locked', true)")
            b = Browser(site)
            pages = [b.log_in(admin), b.get("/queue", queue="locked"), b.get("/queue", queue="orders")]
            assert all('class="chart"' in page.text for page in pages)
            assert all("orders" in text(page) or "locked" in text(page) for page in pages)
    finally:
        site.close()


def test_a_database_that_takes_too_long_for_its_checks_still_shows_its_queues(
    server: TestServer, own_dsn: str, admin: Role
) -> None:
    with psycopg.connect(own_dsn, autocommit=True) as conn:
        conn.execute("select pgque.create_queue('orders')")
        conn.execute(
            "create or replace function pgque._recurring_health(out check_name text, out queue text,"
            " out status text, out detail text, out advice text) returns setof record language sql as $$"
            " select 'x', null, 'ok', null, pg_catalog.pg_sleep(60)::text $$"
        )
    site = Site(
        Config(databases([over_tcp(server.process, own_dsn)]), statement_timeout=1, figures_timeout=1)
    )
    try:
        b = Browser(site)
        page = text(b.log_in(admin))
        assert "the checks took too long, so they are not shown" in page
        assert "orders" in page
    finally:
        site.close()
