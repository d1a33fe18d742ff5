"""Draw the pictures of the web page in python/docs: `PYTHONPATH=tests python -m support.web_pictures`.

It needs Chromium, as tests/web/test_browser.py does. With Pillow the pictures are a third as large.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from playwright.sync_api import sync_playwright

from pgque import embedded
from support.pages import served
from support.servers import REPOSITORY, SQL_FILE

FOLDER = REPOSITORY / "python" / "docs"
# Each page, and how much of it is shown
PAGES = {
    "overview": ("/", 1240),
    "dead-letters": ("/dead?queue=orders", 820),
    "queue": ("/queue?queue=orders#charts", 820),
}
QUEUES = ("orders", "invoices", "mail", "thumbnails", "webhooks", "audit")
REASONS = (
    ("no such address: bounce 550", 61),
    ("TimeoutError: smtp.example.org did not answer within 30 s", 38),
    ("KeyError: 'customer'", 11),
)
# Six hours of samples, one a minute, of which half an hour is missing; the charts have hills and a valley.
HISTORY = """
with minute as (
  select n, pgque.clock() - (362 - n) * interval '1 minute' as at, 2400 + 1500 * sin(n / 25.0) + 900 * sin(n / 7.0) + 200 * sin(n) as messages,
    case when n between 210 and 240 then 30 + 3 * abs(n - 225) else 2 end as lag
  from generate_series(0, 360) as n
), figure as (
  select m.n, m.at, m.lag, sum(m.messages) over (order by m.n)::bigint as sent, (m.n / 9)::bigint as failed from minute as m
), series as (
  select 0 as queue, 0 as sub union all select q.queue_id, 0 from pgque.queue as q where q.queue_name = 'orders'
  union all select s.sub_queue, s.sub_id from pgque.subscriber as s join pgque.queue as q on q.queue_id = s.sub_queue where q.queue_name = 'orders'
)
insert into pgque.sample (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead, smp_gap)
select f.at, s.queue, s.sub, f.lag, 40 * f.lag, l.last_value, case when s.sub = 0 then f.sent end,
  case when s.queue = 0 then 2 * f.sent when s.sub > 0 then f.sent end, f.failed, 0, f.failed / 4,
  case when s.queue = 0 and f.n = 150 then f.at - interval '31 minutes' end
from figure as f, series as s, pgque.sample_leaf as l
where f.n not between 120 and 149
"""


def fill(conn: psycopg.Connection[Any]) -> None:
    """Make queues, with dead letters, workers and a backlog in the first one."""
    conn.execute(SQL_FILE.read_bytes())
    conn.execute("create role ops_admin login password 'x' in role pgque_admin")
    for name in QUEUES:
        conn.execute("select pgque.create_queue(%s)", [name])
    for name in QUEUES[:-1]:
        conn.execute("select pgque.subscribe(%s, 'billing')", [name])
    conn.execute("select pgque.subscribe('orders', 'mailers')")
    conn.execute(HISTORY)
    send(conn, 1500)
    for reason, count in REASONS:
        batch, ids = lease(conn, count, "mail-1")
        conn.execute("select pgque.dead(%s, %s, %s)", [batch, ids, reason])
    for n in range(1, 4):
        lease(conn, 30 * n, f"mail-{n}")


def send(conn: psycopg.Connection[Any], count: int) -> None:
    """Send orders, and make them receivable."""
    conn.execute(
        "select pgque.send_batch('orders', 'order.created',"
        ' array(select format(\'{"id": %%s, "total": %%s}\', n, n %% 90 + 10) from generate_series(1, %s) as n))',
        [count],
    )
    conn.execute("select pgque.force_next_tick('orders')")
    conn.execute("select pgque.ticker('orders')")


def lease(conn: psycopg.Connection[Any], count: int, worker: str) -> tuple[int, list[int]]:
    """Lease orders to a worker of mailers; return the batch and the ids."""
    rows = conn.execute(
        "select batch_id, msg_id from pgque.receive('orders', 'mailers', %s, %s, '1 hour')", [count, worker]
    ).fetchall()
    return rows[0][0], [row[1] for row in rows]


def main() -> None:
    """Draw them."""
    with embedded.start() as server, psycopg.connect(server.dsn, autocommit=True) as conn:
        fill(conn)

        def tick() -> None:
            with suppress(psycopg.OperationalError), psycopg.connect(server.dsn, autocommit=True) as ticker:
                ticker.execute("call pgque.ticker_loop()")

        threading.Thread(target=tick, daemon=True).start()
        with (
            served(f"host=127.0.0.1 port={server.port} dbname=postgres") as address,
            sync_playwright() as playwright,
        ):
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1240, "height": 820}, reduced_motion="reduce")
            page.goto(address)
            page.get_by_label("User").fill("ops_admin")
            page.get_by_label("Password").fill("x")
            page.get_by_role("button", name="Log in").click()
            page.get_by_role("link", name="orders", exact=True).first.wait_for()
            send(conn, 240)
            for name, (path, height) in PAGES.items():
                page.set_viewport_size({"width": 1240, "height": height})
                page.goto(address + path)
                file = FOLDER / f"web-{name}.png"
                page.screenshot(path=file)
                shrink(file)
                print(file.relative_to(REPOSITORY))
            browser.close()
        conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where query like 'call pgque%'")


def shrink(file: Path) -> None:
    """Reduce a picture to 64 colours, if Pillow is there."""
    if importlib.util.find_spec("PIL"):
        image: Any = importlib.import_module("PIL.Image")
        image.open(file).convert("RGB").quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    main()
