"""`pgque web` in a real browser, wide and narrow, in both colours. Pictures are kept below build/web."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, sync_playwright
from psycopg.conninfo import conninfo_to_dict

from conftest import Role, Roles
from pgque import embedded
from support import processes
from support.pages import served
from support.servers import REPOSITORY

CHROMIUM = shutil.which("chromium")
PICTURES = REPOSITORY / "build" / "web"
AXE = "axe-core@4.10.3"  # checks pages for what a screen reader or a keyboard cannot use
# Without these Chromium looks for hosts of its maker, and as root it does not start.
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium"),
]
Connection = psycopg.Connection[tuple[Any, ...]]
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def address(tcp_dsn: str) -> Iterator[str]:
    """The address of a page with the default options."""
    with served(tcp_dsn) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """opened(address, role, **options of the context) is a page after login; what it logs must be nothing."""
    contexts: list[BrowserContext] = []
    said: list[str] = []

    def do(address: str, role: Role | None = None, **options: Any) -> Page:
        context = chromium.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda message: said.append(message.text) if "status of 4" not in message.text else None,
        )
        page.on("pageerror", lambda error: said.append(str(error)))
        if role is not None:
            page.goto(f"{address}/login")
            log_in(page, role)
        return page

    yield do
    for context in contexts:
        context.close()
    assert said == []


def log_in(page: Page, role: Role, password: str | None = None) -> None:
    page.get_by_label("User").fill(role.name)
    page.get_by_label("Password").fill(password or str(conninfo_to_dict(role.dsn)["password"]))
    page.get_by_role("button", name="Log in").click()


def picture(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


@pytest.fixture
def filled(conn: Connection, queue: str, tick: Callable[[str], object]) -> str:
    """A queue with a consumer that is shared by workers, a worker that has messages, and dead letters."""
    conn.execute("select pgque.subscribe(%s, 'mailers'), pgque.subscribe(%s, 'billing')", [queue, queue])
    conn.execute(
        "select pgque.send_batch(%s, 'order.created', array(select format('{\"id\": %%s}', n) from generate_series(1, 24) n))",
        [queue],
    )
    tick(queue)
    rows = conn.execute(
        "select batch_id, msg_id from pgque.receive(%s, 'mailers', 24, 'w1', '1 hour')", [queue]
    ).fetchall()
    batch, ids = rows[0][0], [row[1] for row in rows]
    conn.execute("select pgque.dead(%s, %s, 'no such address: bounce 550')", [batch, ids[:5]])
    conn.execute(
        "select pgque.dead(%s, %s, 'TimeoutError: smtp.example.org did not answer within 30 s')",
        [batch, ids[5:8]],
    )
    return queue


def count(conn: Connection, queue: str, status: str) -> int:
    row = conn.execute("select count(*) from pgque.list_messages(%s, %s)", [queue, status]).fetchone()
    assert row is not None
    return int(row[0])


def dead_letters_of(page: Page, queue: str) -> Locator:
    """Return the overview's link. It appears late: viewers share figures for ten seconds, and longer where they
    are slow to take."""
    return page.locator(".problems li", has_text=f"{queue}: dead letters").get_by_role(
        "link", name="Show dead letters"
    )


def test_somebody_who_is_paged_mends_it(
    opened: Open, address: str, admin: Role, filled: str, conn: Connection
) -> None:
    page = opened(address, viewport={"width": 1200, "height": 900})
    page.goto(f"{address}/queue?queue={filled}")
    log_in(page, admin, "wrong")
    assert page.get_by_role("alert").inner_text().startswith("Login failed.")
    log_in(page, admin)
    assert page.get_by_role("heading", level=1).inner_text() == f"Queue {filled}"

    # Dead letters, from the first page in three clicks
    page.goto(address)
    picture(page, "overview")
    dead_letters_of(page, filled).click(timeout=60_000)
    picture(page, "dead-letters")
    page.get_by_role("button", name="Requeue all 8…").click()
    assert count(conn, filled, "dead") == 8
    page.get_by_role("button", name="Requeue 8").click()
    assert page.get_by_role("status").inner_text() == "8 requeued."
    assert count(conn, filled, "dead") == 0

    page.get_by_role("link", name="Queue", exact=True).click()
    page.get_by_text("Delivery and failures").click()
    page.get_by_label("max_retries", exact=True).fill("lots")
    page.get_by_role("button", name="Save…").click()
    page.get_by_role("button", name="Save", exact=True).click()
    refused = page.get_by_role("alert")
    refused.wait_for()
    assert refused.evaluate("e => e.getBoundingClientRect().bottom > 0")  # it is in view
    assert (
        'invalid input syntax for type integer: "lots"' in page.locator("#setting-max_retries").inner_text()
    )
    assert page.get_by_label("max_retries", exact=True).input_value() == "lots"
    page.get_by_label("max_retries", exact=True).fill("7")
    page.get_by_role("button", name="Save…").click()
    picture(page, "settings-preview")
    page.get_by_role("button", name="Save", exact=True).click()
    assert page.get_by_role("status").inner_text() == "max_retries is now 7."
    # What is set for this queue comes first, and is open.
    assert page.get_by_label("max_retries", exact=True).input_value() == "7"
    picture(page, "queue")

    page.get_by_role("button", name="Reclaim from worker w1 of consumer mailers").click()
    assert "Released 16 messages of worker w1" in page.get_by_role("status").inner_text()

    page.get_by_role("link", name="Messages").click()
    page.get_by_role("link", name="10", exact=True).first.click()
    assert '"id": 10' in page.get_by_label("Payload").inner_text()
    picture(page, "message")

    page.get_by_role("link", name="Queue", exact=True).click()
    page.get_by_role("link", name="Purge…").click()
    page.get_by_role("link", name="Cancel").click()
    assert count(conn, filled, "pending") > 0
    page.get_by_role("link", name="Purge…").click()
    picture(page, "purge")
    page.get_by_role("button", name="Purge the queue").click()
    assert page.get_by_role("status").inner_text().startswith("The queue is empty.")
    assert count(conn, filled, "pending") == 0

    # Another site has no part in this, not even one on this host.
    page.context.add_cookies([])
    html = f'<form method="post" action="{address}/queue/pause"><input name="queue" value="{filled}"></form>'
    for site in ("http://127.0.0.1:1/", "http://elsewhere.example/"):
        page.route(site, lambda route: route.fulfill(content_type="text/html", body=html))
        page.goto(site)
        page.evaluate("document.forms[0].submit()")
        page.wait_for_url(f"{address}/**")
    row = conn.execute("select queue_paused from pgque.queue where queue_name = %s", [filled]).fetchone()
    assert row == (False,)

    page.goto(address)
    page.get_by_role("button", name="Log out").click()
    page.go_back()
    page.reload()
    assert page.get_by_role("heading", level=1).inner_text() == "Log in"


def test_a_role_with_one_queue_and_a_page_that_is_read_only_below_a_prefix(
    opened: Open, tcp_dsn: str, admin: Role, roles: Roles, filled: str, conn: Connection
) -> None:
    one = roles()
    conn.execute("select pgque.grant_queue(%s, %s, 'consume')", [filled, one.name])
    with served(tcp_dsn, "--path-prefix", "/tools/pgque", "--read-only", "--hide-payloads") as address:
        page = opened(address, admin)
        page.get_by_role("link", name=filled, exact=True).first.click()
        assert "This page is read only" in page.locator(".notice").inner_text()
        assert page.get_by_role("button").all_inner_texts() == ["Log out"]
        page.get_by_role("link", name="Dead letters", exact=True).click()
        assert '"id"' not in page.content()
        assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).borderRadius") == "8px"

        page = opened(address, one)
        page.locator("tbody tr").first.wait_for()  # its figures may be taken for the first time
        assert page.locator("tbody tr").count() == 1
        page.get_by_role("link", name=filled, exact=True).first.click()
        assert page.locator(".tabs a").all_inner_texts() == ["Queue", "Messages"]


def test_pages_are_read_without_scripts(opened: Open, address: str, admin: Role, filled: str) -> None:
    page = opened(address, admin, java_script_enabled=False)
    link = dead_letters_of(page, filled)
    for _ in range(200):
        if link.count():
            break
        page.wait_for_timeout(500)
        page.reload()
    link.click()
    page.get_by_role("button", name="Requeue message 1", exact=True).click()
    assert page.get_by_role("status").inner_text() == "1 requeued."


def test_an_open_page_is_kept_up_to_date_and_shows_when_it_is_stale_or_of_another_login(
    opened: Open, address: str, admin: Role, reader: Role, queue: str, conn: Connection
) -> None:
    page = opened(address)
    page.clock.install()
    page.goto(f"{address}/queue?queue={queue}")
    log_in(page, admin)
    facts = page.locator(".facts").first
    assert "Since the last tick\n0" in facts.inner_text()
    conn.execute("select pgque.send(%s, 'x'::text)", [queue])
    page.clock.run_for(10_100)
    facts.get_by_text("1", exact=True).wait_for()

    page.route(f"{address}/queue?**", lambda route: route.fulfill(status=404))
    page.clock.run_for(10_100)
    page.get_by_text("Not up to date since").wait_for()
    page.unroute_all()
    page.clock.run_for(10_100)
    page.get_by_text("Not up to date since").wait_for(state="detached")

    # Another tab logs in as another role: the forms of this one must not act as that role.
    other = page.context.new_page()
    other.goto(f"{address}/login")
    log_in(other, reader)
    other.locator(".who").get_by_text(reader.name).wait_for()
    assert admin.name in page.locator(".who").inner_text()
    page.clock.run_for(10_100)
    page.locator(".who").get_by_text(reader.name).wait_for()


@pytest.mark.slow  # runs the demo
def test_a_newcomer_watches_the_demo_and_requeues_a_dead_letter(chromium: Browser) -> None:
    try:
        embedded.find_server("embedded")
    except embedded.EmbeddedServerError as error:
        pytest.skip(str(error))
    with processes.own_folder() as folder:
        (folder / "x.jsonl").write_text("1\n" * 500)
        command = [
            sys.executable,
            "-m",
            "pgque.cli",
            "demo",
            "--server",
            "embedded",
            "--workers",
            "1",
            "--keep",
        ]
        with subprocess.Popen(
            [*command, "--file", str(folder / "x.jsonl")],
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        ) as run:
            assert run.stdout is not None
            address = next(line for line in run.stdout if line.startswith("The web page: ")).split()[-1]
            *_, user, _, password = next(run.stdout).split()
            # While the demo runs
            page = chromium.new_page()
            page.goto(address)
            page.get_by_label("User").fill(user.removesuffix(","))
            page.get_by_label("Password").fill(password)
            page.get_by_role("button", name="Log in").click()
            page.get_by_role("link", name="pgque_demo", exact=True).wait_for()
            run.stdout.read()
            assert run.wait(60) == 0
        # Afterwards: the file of the message that was given up has come meanwhile.
        page.goto(f"{address}dead?queue=pgque_demo")
        for _ in range(60):
            if "No such file or directory" in page.content() and list(folder.glob("pgque-demo-*/late_1.py")):
                break
            page.wait_for_timeout(500)
            page.reload()
        picture(page, "demo")
        page.get_by_role("row", name="No such file").get_by_role("button", name="Requeue").click()
        assert page.get_by_role("status").inner_text() == "1 requeued."
        page.get_by_text("This queue has no dead letters.").wait_for()
        page.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, of the npm registry."""
    folder = REPOSITORY / "build" / "axe"
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    npm = shutil.which("npm")
    if not script.exists():
        if npm is None:
            pytest.skip("needs npm, to fetch axe-core")
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--no-save", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        subprocess.run([npm, "install", *options, AXE], check=True, timeout=120, capture_output=True)
    return script.read_text()


@pytest.mark.parametrize("width", [1440, 390])
def test_an_operator_creates_a_queue_with_a_consumer_sends_and_changes_two_settings(
    opened: Open, address: str, admin: Role, axe: str, conn: Connection, width: int
) -> None:
    name, found = f"made in a browser {width}", []
    page = opened(address, admin, viewport={"width": width, "height": 900})

    def looked(title: str) -> None:
        """Keep a picture of this step, which fits and can be used by everybody."""
        picture(page, f"{title}-{width}")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, title
        page.evaluate(axe)
        for rule in page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]:
            found.append((title, rule["id"], rule["nodes"][0]["html"][:200]))

    try:
        page.get_by_role("link", name="Create a queue…").click()
        page.get_by_label("Name").fill(name)
        looked("create-queue")
        page.get_by_role("button", name="Preview").click()
        assert (
            page.get_by_role("region", name="The SQL that runs").inner_text()
            == f"select pgque.create_queue('{name}')"
        )
        looked("create-queue-preview")
        page.get_by_role("button", name="Change it").click()
        assert page.get_by_label("Name").input_value() == name
        page.get_by_label("Retries").fill("2")
        page.get_by_role("button", name="Preview").click()
        page.get_by_role("button", name=f"Create queue {name}").click()
        assert page.get_by_role("status").inner_text().startswith(f"Queue {name} was created.")

        page.get_by_role("link", name="Subscribe a consumer…").click()
        page.get_by_label("Name").fill("mailers")
        page.get_by_label("Starts at").fill("never")
        page.get_by_role("button", name="Preview").click()
        assert page.get_by_role("alert").is_visible()
        looked("subscribe-refused")
        page.get_by_label("Starts at").fill("earliest")
        page.get_by_role("button", name="Preview").click()
        page.get_by_role("button", name="Subscribe consumer mailers").click()
        page.get_by_role("rowheader", name="mailers").wait_for()

        page.get_by_role("link", name="Send", exact=True).click()
        page.get_by_label("Payload", exact=True).fill("hello")
        page.get_by_role("button", name="Send").click()
        assert "was sent." in page.get_by_role("status").inner_text()

        # A link to a setting opens its group; the one button saves what was changed in two of them.
        page.goto(f"{address}/queue?queue={name}#setting-max_depth")
        depth = page.get_by_label("max_depth", exact=True)
        assert depth.is_visible()
        assert page.locator("details[open]").count() == 2  # with max_retries, which was set
        looked("queue-settings")
        depth.fill("1000")
        page.get_by_label("max_retries", exact=True).fill("9")
        depth.press("Enter")
        page.get_by_role("heading", name="Save 2 settings of queue").wait_for()
        assert '{"max_depth": "1000", "max_retries": "9"}' in page.locator("pre.sql").inner_text()
        looked("settings-preview")
        page.get_by_role("button", name="Save", exact=True).click()
        assert page.get_by_role("status").inner_text() == "max_depth is now 1000, max_retries is now 9."
        looked("queue-after")
        rows = conn.execute(
            "select setting, value from pgque.queue_settings(%s) where source = 'queue' order by 1", [name]
        ).fetchall()
        assert rows == [("max_depth", "1000"), ("max_retries", "9")]
        assert count(conn, name, "pending") == 1

        page.get_by_role("link", name="Access", exact=True).click()
        page.get_by_role("link", name="Grant a right…").click()
        page.get_by_label("Role").fill(admin.name)
        looked("grant")
        page.get_by_role("button", name="Preview").click()
        page.get_by_role("button", name=f"Grant consume to {admin.name}").click()
        looked("access")

        page.get_by_role("link", name="Queue", exact=True).click()
        page.get_by_role("link", name="Drop…").click()
        page.get_by_label("Name of the queue, to confirm").fill(name)
        looked("drop")
        page.get_by_role("button", name="Drop the queue").click()
        assert page.get_by_role("status").inner_text() == f"Queue {name} was dropped."
    finally:
        conn.execute(
            "select pgque.drop_queue(q.queue_name, true) from pgque.queue as q where q.queue_name = %s",
            [name],
        )
    assert found == []


@pytest.mark.slow  # each page is read twice by axe-core
def test_pages_fit_a_phone_and_can_be_used_by_keyboard_and_screen_reader(
    opened: Open, address: str, admin: Role, filled: str, axe: str, conn: Connection
) -> None:
    conn.execute("select pgque.create_recurring('nightly', %s, '0 3 * * *', 't', 'x'::text)", [filled])
    conn.execute("select pgque.open_stream(%s, 'lakehouse')", [filled])
    conn.execute("select pgque.sink_begin('warehouse', 3)")
    conn.execute(
        f"grant select on pgque.subscriber, pgque.sink_epoch, pgque.sink_attempt to {admin.name}".encode()
    )
    conn.execute(
        "select pgque.nack(w.batch_id, array[w.msg_id], '1 hour', 'printer on fire')"
        " from pgque.list_messages(%s, 'processing', 2) as w",
        [filled],
    )
    paths = {
        "overview": "/",
        "queue": f"/queue?queue={filled}",
        "messages": f"/messages?queue={filled}",
        "message": f"/message?queue={filled}&id=8",
        "failing": f"/failing?queue={filled}",
        "streams": "/streams",
        "dead": f"/dead?queue={filled}",
        "send": f"/send?queue={filled}",
        "archive": f"/archive?queue={filled}",
        "recurring": "/recurring",
        "actions": "/actions",
        "purge": f"/queue/purge?queue={filled}",
        "seek": f"/queue/seek?queue={filled}&consumer=billing&to=latest",
        "create": "/queue/create",
        "subscribe": f"/queue/subscribe?queue={filled}",
        "consumer": f"/queue/consumer?queue={filled}&consumer=billing",
        "drop": f"/queue/drop?queue={filled}",
        "settings": f"/queue/settings?queue={filled}",
        "access": f"/queue/access?queue={filled}",
        "recurring-change": "/recurring/change?name=nightly",
        "recurring-drop": "/recurring/drop?name=nightly",
        "login": "/login",
    }
    found = []
    for name, width, scheme in (("dark", 1200, "dark"), ("phone", 360, "light")):
        page = opened(address, admin, viewport={"width": width, "height": 800}, color_scheme=scheme)
        for title, path in paths.items():
            page.goto(address + path)
            picture(page, f"{title}-{name}")
            too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert too_wide <= 0, (title, name, too_wide)
            page.evaluate(axe)
            result = page.evaluate("axe.run({resultTypes: ['violations']})")
            assert len(result["passes"]) > 10
            for rule in result["violations"]:
                found.append((title, name, rule["id"], rule["nodes"][0]["html"][:200]))
        # With the keyboard alone: the first key leads past the navigation, and every focus can be seen.
        page.goto(address + paths["queue"])
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    conn.execute("select pgque.drop_recurring('nightly')")
    assert found == []
