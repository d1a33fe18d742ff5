"""`pgque web` in a real browser, wide and narrow, in both colours. Pictures are kept below build/web."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, sync_playwright
from psycopg.conninfo import conninfo_to_dict

from conftest import Queues, Role, Roles
from pgque import embedded
from pgque.web.site import READS
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


@pytest.fixture
def new_address(tcp_dsn: str) -> Iterator[str]:
    """The address of a page that has read nothing, for tests that expect the figures of their own queues. A page
    shows those of an earlier test for as long as twenty times what a busy server took to read them."""
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
    """Return the overview's link, which appears once the figures are read."""
    return page.locator("#problem-dead-letters").get_by_role("link", name=f"Show dead letters of {queue}")


def test_somebody_who_is_paged_mends_it(
    opened: Open, new_address: str, admin: Role, filled: str, conn: Connection
) -> None:
    page = opened(new_address, viewport={"width": 1200, "height": 900})
    page.goto(f"{new_address}/queue?queue={filled}")
    log_in(page, admin, "wrong")
    assert page.get_by_role("alert").inner_text().startswith("Login failed.")
    log_in(page, admin)
    assert page.get_by_role("heading", level=1).inner_text() == f"Queue {filled}"

    # Dead letters, from the first page in three clicks
    page.goto(new_address)
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

    page.get_by_role("button", name="Reclaim worker w1 of consumer mailers").click()
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
    html = (
        f'<form method="post" action="{new_address}/queue/pause"><input name="queue" value="{filled}"></form>'
    )
    for site in ("http://127.0.0.1:1/", "http://elsewhere.example/"):
        page.route(site, lambda route: route.fulfill(content_type="text/html", body=html))
        page.goto(site)
        page.evaluate("document.forms[0].submit()")
        page.wait_for_url(f"{new_address}/**")
    row = conn.execute("select queue_paused from pgque.queue where queue_name = %s", [filled]).fetchone()
    assert row == (False,)

    page.goto(new_address)
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
        # They only look, or log out.
        assert set(page.get_by_role("button").all_inner_texts()) == {"Find", "Show", "Log out"}
        page.get_by_role("link", name="Dead letters", exact=True).click()
        assert '"id"' not in page.content()
        assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).borderRadius") == "8px"

        page = opened(address, one)
        page.locator("tbody tr").first.wait_for()  # its figures may be taken for the first time
        assert page.locator("tbody tr").count() == 1
        page.get_by_role("link", name=filled, exact=True).first.click()
        assert page.locator(".tabs a").all_inner_texts() == ["Queue", "Messages"]


@pytest.mark.parametrize("width", [390, 1024, 1440, 1920])
def test_no_button_is_cut_off_at_any_width(
    opened: Open,
    address: str,
    admin: Role,
    queue: str,
    conn: Connection,
    tick: Callable[[str], object],
    width: int,
) -> None:
    """Types, reasons and payloads are as long as they are in real queues."""
    conn.execute("select pgque.subscribe(%s, 'a-consumer-with-a-name-of-some-length')", [queue])
    conn.execute(
        "select pgque.send_batch(%s, 'com.example.orders.order_created.v2', array(select format("
        '\'{"tenant": "a-tenant", "source": "checkout", "id": "%%s"}\', md5(n::text)) from generate_series(1, 9) n))',
        [queue],
    )
    tick(queue)
    rows = conn.execute(
        "select batch_id, msg_id from pgque.receive(%s, 'a-consumer-with-a-name-of-some-length', 9, 'w', '1 hour')",
        [queue],
    ).fetchall()
    batch, ids = rows[0][0], [row[1] for row in rows]
    reason = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='payments.internal.example.org', port=443): "
    conn.execute("select pgque.dead(%s, %s, %s)", [batch, ids[:3], reason + "x" * 200])
    conn.execute(
        "select pgque.nack(%s, %s, retry_after => '1 hour', reason => %s)", [batch, ids[3:6], reason]
    )
    conn.execute("select pgque.archive(%s, %s)", [batch, ids[6:8]])
    page = opened(address, admin, viewport={"width": width, "height": 900})
    for path in ("dead", "archive", "messages", "failing", "queue"):
        page.goto(f"{address}/{path}?queue={queue}")
        cut = page.evaluate(
            """() => [...document.querySelectorAll("main button, main a.button, main input[type=checkbox]")].filter((one) => {
              const box = one.getBoundingClientRect();
              const region = one.closest(".scroll")?.getBoundingClientRect() ?? { left: 0, right: innerWidth };
              const middle = box.top + box.height / 2;
              const top = document.elementFromPoint(box.left + box.width / 2, middle);
              const seen = middle < 0 || middle > innerHeight || top === one || one.contains(top);
              return box.left < region.left - 1 || box.right > Math.min(region.right, innerWidth) + 1 || !seen;
            }).map((one) => one.textContent || one.name)"""
        )
        assert cut == [], (path, width)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (path, width)
        if path in ("dead", "archive"):
            buttons = page.locator("tbody button")
            assert buttons.count() > 1
            # What all payloads begin with is above them, once.
            assert re.fullmatch(r'…[0-9a-f]{32}"}', page.locator("td.line").first.inner_text())
            assert page.get_by_text("… stands for what each payload begins with").count() == 1
            picture(page, f"{path}-{width}")
    if width == 1920:
        page.goto(f"{address}/dead?queue={queue}")
        box = page.locator(".scroll").last.bounding_box()
        assert box is not None
        assert box["width"] > 1700


@pytest.mark.parametrize("width", [360, 1024, 1440])
def test_times_and_names_are_neither_cut_off_nor_broken_nor_above_one_another(
    opened: Open, new_address: str, admin: Role, filled: str, width: int
) -> None:
    page = opened(new_address, admin, viewport={"width": width, "height": 900})
    for path in ("/", f"/queue?queue={filled}"):
        page.goto(new_address + path)
        page.locator("table.cards tbody tr").first.wait_for(timeout=60_000)
        # As long as they are after a bad night
        page.locator("main").evaluate(
            "e => { for (const cell of e.querySelectorAll('td.n')) cell.textContent = 'expired 23 h 59 min ago';"
            " for (const cell of e.querySelectorAll('tbody th')) cell.textContent = 'legacy_import'; }"
        )
        cut = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.dataset.label)"
        assert page.locator("table.cards td.n, .facts dt").evaluate_all(cut) == []
        lines = "all => all.map(e => { const r = document.createRange(); r.selectNodeContents(e); return r.getClientRects().length; })"
        assert set(page.locator("table.cards tbody th").evaluate_all(lines)) == {1}


def test_a_payload_is_copied_by_a_button_or_selected(
    opened: Open, address: str, admin: Role, filled: str, conn: Connection
) -> None:
    page = opened(address, admin, permissions=["clipboard-read", "clipboard-write"])
    row = conn.execute("select min(msg_id) from pgque.list_messages(%s)", [filled]).fetchone()
    assert row is not None
    page.goto(f"{address}/message?queue={filled}&id={row[0]}")
    shown = page.get_by_label("Payload", exact=True).inner_text()
    page.get_by_role("button", name="Copy the payload").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == shown == '{\n  "id": 1\n}'

    # A browser that gives a page no clipboard, as over plain HTTP, selects the text.
    page.reload()
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
    page.get_by_role("button", name="Copy the payload").click()
    page.get_by_role("button", name="Selected: copy it now").wait_for()
    assert page.evaluate("getSelection().toString()").strip() == shown
    # Without scripts there is no button, and the text is there to be selected.
    page = opened(address, admin, java_script_enabled=False)
    page.goto(f"{address}/message?queue={filled}&id={row[0]}")
    assert page.get_by_role("button", name="Copy the payload").count() == 0
    assert page.get_by_label("Payload", exact=True).inner_text() == shown


def test_pages_are_read_without_scripts(opened: Open, new_address: str, admin: Role, filled: str) -> None:
    page = opened(new_address, admin, java_script_enabled=False)
    dead_letters_of(page, filled).click(timeout=60_000)
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
    assert "Sent since the last tick\n0" in facts.inner_text()
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


def test_times_are_in_the_zone_of_the_browser_and_show_utc_also_after_the_page_was_renewed(
    opened: Open, address: str, admin: Role, queue: str, conn: Connection
) -> None:
    conn.execute(
        "select pgque.subscribe(%s, 'c'), pgque.create_recurring(%s, %s, '0 12 * * *', 't', 'x')",
        [queue, queue, queue],
    )
    utc = conn.execute("select next_run from pgque.list_recurring() where name = %s", [queue]).fetchone()
    assert utc is not None
    try:
        page = opened(address, admin, timezone_id="Asia/Kolkata")
        page.goto(f"{address}/recurring")
        row = page.get_by_role("row").filter(has_text=queue)
        at = row.locator("time").first
        assert at.inner_text().endswith(" 17:30:00")
        assert at.get_attribute("title") == f"{utc[0]:%Y-%m-%d} 12:00:00 UTC"
        assert page.get_by_role("columnheader", name="Next run").inner_text() == "Next run (local time)"
        assert (
            "Times are in Asia/Kolkata" in page.locator("footer").inner_text()
            or "Asia/Calcutta" in page.locator("footer").inner_text()
        )
        page.goto(f"{address}/queue?queue={queue}&range=24h")
        label = page.locator(".times time").last
        assert label.inner_text() == page.evaluate(
            "(at) => new Date(at).toLocaleTimeString('sv', {hour: '2-digit', minute: '2-digit', timeZone: 'Asia/Kolkata'})",
            label.get_attribute("datetime"),
        )
        assert "GMT+5:30" in (page.locator("[data-at] title").first.text_content() or "")
        # As live.js does it
        page.evaluate(
            "async () => { const fresh = new DOMParser().parseFromString(await (await fetch(location.href)).text(), 'text/html');"
            " document.querySelector('[data-live]').replaceWith(fresh.querySelector('[data-live]')); }"
        )
        assert "GMT+5:30" in (page.locator("[data-at] title").first.text_content() or "")
        without = opened(address, admin, timezone_id="Asia/Kolkata", java_script_enabled=False)
        without.goto(f"{address}/recurring")
        found = without.get_by_role("row").filter(has_text=queue).locator("time").first
        assert found.inner_text().endswith(" 12:00:00")
        assert without.get_by_role("columnheader", name="Next run").inner_text() == "Next run (UTC)"
        assert "Times are in UTC." in without.locator("footer").inner_text()
    finally:
        conn.execute("select pgque.drop_recurring(%s)", [queue])


def test_an_open_page_goes_on_after_a_click_and_pauses_only_while_somebody_types(
    opened: Open, address: str, admin: Role, filled: str, new_queue: Queues, conn: Connection
) -> None:
    new_queue()
    page = opened(address)
    page.clock.install()
    page.goto(f"{address}/queue?queue={filled}")
    log_in(page, admin)
    facts, paused = page.locator(".facts").first, page.get_by_text("Paused while you type.")

    def sent(number: int) -> None:
        """Send one more message, and wait until the page shows it."""
        conn.execute("select pgque.send(%s, 'x'::text)", [filled])
        page.clock.run_for(10_100)
        facts.get_by_text(str(number), exact=True).first.wait_for()

    before = int(facts.get_by_text("Sent since the last tick").locator("..").locator("dd").inner_text())
    # A click into a table, which takes the focus.
    page.get_by_role("region", name="Workers").get_by_text("w1").click()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Workers"
    sent(before + 1)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Workers"
    # A button and a link keep the focus, each the one of its row.
    for role, name in (("button", "Retry now: consumer billing"), ("link", "Purge…")):
        page.get_by_role(role, name=name).focus()  # type: ignore[arg-type]
        before += 1
        sent(before + 1)
        focused = page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
        assert focused == name
    assert paused.count() == 0

    # A text that is selected stays.
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.facts'))")
    paused.wait_for()
    assert paused.get_attribute("role") == "status"
    assert paused.is_visible()
    conn.execute("select pgque.send(%s, 'x'::text)", [filled])
    page.clock.run_for(30_000)
    assert facts.get_by_text(str(before + 2), exact=True).count() == 0
    page.evaluate("getSelection().removeAllRanges()")
    page.clock.run_for(10_100)
    facts.get_by_text(str(before + 2), exact=True).first.wait_for()
    assert paused.count() == 0

    # The first page has a form in its live part.
    page.goto(address)
    field = page.get_by_label("Name contains")
    for _ in range(120):  # viewers share figures, which may be from before there was a second queue
        if field.count():
            break
        page.wait_for_timeout(500)
        page.goto(address)
    field.wait_for()
    at = page.get_by_text("Figures of")
    field.focus()
    page.clock.run_for(100)
    paused.wait_for()
    field.fill("q")
    field.blur()  # it is left, but not sent yet
    page.clock.run_for(30_000)
    assert field.input_value() == "q"
    assert paused.is_visible()
    shown = at.inner_text()
    field.fill("")
    field.blur()
    page.clock.run_for(100)
    paused.wait_for(state="detached")
    page.wait_for_timeout(1000)
    for _ in range(120):  # the figures of all queues may be taken slowly, and then serve for longer
        page.clock.run_for(10_100)
        page.wait_for_timeout(500)
        if at.inner_text() != shown:
            break
    assert at.inner_text() != shown


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


EVERY_RULE = (
    "axe.run({resultTypes: ['violations'],"
    " rules: Object.fromEntries(axe.getRules().map(rule => [rule.ruleId, {enabled: true}]))})"
)
NOT_AIMED_AT = {"color-contrast-enhanced"}  # level AAA


def violations(page: Page, axe: str) -> list[tuple[str, str]]:
    """Return the rules of axe-core that a page violates, best practices and experimental ones included."""
    page.evaluate(axe)
    result = page.evaluate(EVERY_RULE)
    assert len(result["passes"]) > 10
    return [
        (rule["id"], rule["nodes"][0]["html"][:200])
        for rule in result["violations"]
        if rule["id"] not in NOT_AIMED_AT
    ]


@pytest.mark.parametrize("width", [1440, 390])
def test_an_operator_creates_a_queue_with_a_consumer_sends_and_changes_two_settings(
    opened: Open, address: str, admin: Role, axe: str, conn: Connection, width: int
) -> None:
    name = f"made in a browser {width}"
    found: list[tuple[str, ...]] = []
    page = opened(address, admin, viewport={"width": width, "height": 900})

    def looked(title: str) -> None:
        """Keep a picture of this step, which fits and can be used by everybody."""
        picture(page, f"{title}-{width}")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, title
        found.extend((title, *rule) for rule in violations(page, axe))

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


def test_state_and_queues_are_in_view_with_eight_problems(
    opened: Open, new_address: str, admin: Role, filled: str, new_queue: Queues, conn: Connection
) -> None:
    conn.execute("select pgque.set_queue_config(%s, 'max_depth', '10')", [filled])
    conn.execute("select pgque.create_recurring('eighth', %s, '* * * * *', 't', 'x'::text)", [new_queue()])
    for change in (
        "pgque.pause(%s)",
        "pgque.alter_queue(%s, '{\"ticker_paused\": true}')",
        "pgque.subscribe(%s, 'late')",
    ):
        conn.execute(f"select {change}".encode(), [new_queue()])
    for _ in range(3):
        conn.execute("select pgque.pause(%s)", [new_queue()])
    problems = "select count(*) from pgque.health() where status <> 'ok'"
    try:
        row = conn.execute(problems).fetchone()
        assert row is not None
        assert row[0] >= 8
        for width, height in ((1440, 900), (390, 800)):
            page = opened(new_address, admin, viewport={"width": width, "height": height})
            page.locator(".kinds a").first.wait_for(timeout=60_000)
            picture(page, f"state-{width}")
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            bottom = "e => e.getBoundingClientRect().bottom"
            assert page.locator(".strip").evaluate(bottom) < height
            if width == 1440:
                rows = page.locator("tbody tr")
                assert rows.nth(min(rows.count(), 8) - 1).evaluate(bottom) <= height
        # From the top to a kind, and to its queues
        page.get_by_role("navigation", name="Problems").get_by_role("link", name="sending is paused").click()
        group = page.locator("#problem-paused")
        assert group.evaluate("e => e.matches(':target')")
        group.locator("summary").click()
        group.get_by_role("link", name="Show the queue").first.click()
        assert page.get_by_role("button", name="Resume sending").is_visible()
    finally:
        conn.execute("select pgque.drop_recurring('eighth')")


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
    dead = conn.execute("select min(dl_id) from pgque.dlq_inspect(%s)", [filled]).fetchone()
    assert dead is not None
    # Every page, those that are added later too, with all that pages ask for.
    asked = {
        "queue": filled,
        "consumer": "billing",
        "id": 8,
        "to": "latest",
        "role": admin.name,
        "right": "consume",
        "action": "retry",
        "dl_id": dead[0],
        "q": "created",
    }
    paths = {path: f"{path}?{urlencode(asked)}" for path in READS}
    paths |= {path: f"{paths[path]}&name=nightly" for path in READS if path.startswith("/recurring/")}
    paths["/login"] = "/login"
    del paths["/job"]  # there is none
    found = []
    for name, width, scheme in (("dark", 1200, "dark"), ("phone", 360, "light")):
        page = opened(address, admin, viewport={"width": width, "height": 800}, color_scheme=scheme)
        for title, path in paths.items():
            answer = page.goto(address + path)
            assert answer is not None
            assert answer.status == 200, path
            picture(page, f"{title.strip('/').replace('/', '-') or 'overview'}-{name}")
            too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert too_wide <= 0, (title, name, too_wide)
            found += [(title, name, *rule) for rule in violations(page, axe)]
        # With the keyboard alone: the first key leads past the navigation, and every focus can be seen.
        page.goto(address + paths["/queue"])
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    conn.execute("select pgque.drop_recurring('nightly')")
    assert found == []
