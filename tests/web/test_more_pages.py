"""Streams and sinks, messages that keep failing, one worker's leases, and what monitoring reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from starlette.testclient import TestClient

import pgque.web
from conftest import Role
from pgque.web import figures
from support import jit
from support.pages import Browser, served, text
from support.servers import TestServer

Connection = psycopg.Connection[tuple[Any, ...]]
NewBrowser = Callable[..., Browser]
Tick = Callable[[str], object]


def test_streams_and_sinks_are_shown_to_those_who_may_read_them(
    browser: NewBrowser,
    admin: Role,
    reader: Role,
    queue: str,
    conn: Connection,
    connect: Callable[..., Connection],
    tick: Tick,
) -> None:
    conn.execute(
        f"grant select on pgque.subscriber, pgque.sink_epoch, pgque.sink_attempt to {admin.name}".encode()
    )
    stream = connect(autocommit=True, application_name="pgque-spark/the-stream")
    stream.execute("select pgque.open_stream(%s, 'lakehouse')", [queue])
    conn.execute("select pgque.open_stream(%s, 'left behind')", [queue])
    conn.execute("select pgque.send_batch(%s, array['a', 'b', 'c'])", [queue])
    tick(queue)
    sink = f"sink of {queue} <b>"
    for epoch in (6, 7):
        conn.execute("select pgque.sink_begin(%s, %s)", [sink, epoch])
        conn.execute("select pgque.sink_commit(%s, %s, array[]::uuid[], 0)", [sink, epoch])
    conn.execute("select pgque.sink_begin(%s, 8)", [sink])
    conn.execute("select pgque.sink_begin(%s, 0)", [f"new {sink}"])
    b = browser(admin)
    assert ">Streams</a>" in b.get("/").text
    page = text(b.get("/streams"))
    assert f"lakehouse {queue} pgque-spark/the-stream pid {stream.info.backend_pid}" in page
    assert f"left behind {queue}" in page
    assert f"{sink} 7" in page
    assert "at once epoch 8, 1 attempt, since" in page
    assert f"new {sink} none" in page
    stream.close()

    b = browser(reader)
    assert ">Streams</a>" not in b.get("/").text
    b.get("/streams", 403)


def test_none_of_the_pages_queries_is_compiled(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, server: TestServer
) -> None:
    problem = jit.problem(server.dsn)
    if problem is not None:
        pytest.skip(problem)
    conn.execute(
        f"grant select on pgque.subscriber, pgque.sink_epoch, pgque.sink_attempt to {admin.name}".encode()
    )
    conn.execute(f"alter role {admin.name} set jit_above_cost = 0".encode())
    conn.execute("select pgque.open_stream(%s, 'lakehouse')", [queue])
    b = browser(admin)
    b.get("/")
    b.get("/streams")
    b.get("/queue", queue=queue)
    jit.compiled(server.dsn)  # creates the extension, and fails if nothing can be compiled
    with psycopg.connect(server.dsn, autocommit=True) as counted:
        found = counted.execute(
            "select s.query, s.jit_functions from pg_stat_statements as s"
            " where s.toplevel and s.query like '%%pgque.%%' and s.userid = %s::regrole",
            [admin.name],
        ).fetchall()
    assert any("pgque.subscriber" in query for query, _ in found)
    assert [query for query, functions in found if functions > 0] == []


def test_messages_that_keep_failing_are_shown_and_poison_is_archived(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    conn.execute("select pgque.set_queue_config(%s, 'max_receive_attempts', '3')", [queue])
    b = browser(admin)
    page = text(b.get("/failing", queue=queue))
    assert "No poison message." in page
    assert "No message is in state retry." in page

    ids = [
        row[0]
        for row in conn.execute(
            "select unnest(pgque.send_batch(%s, array['kills', 'fails']))", [queue]
        ).fetchall()
    ]
    tick(queue)
    first = conn.execute("select batch_id from pgque.receive(%s, 'c', 10, 'w', '1 hour')", [queue]).fetchone()
    assert first is not None
    conn.execute(
        "select pgque.nack(%s, %s, retry_after => '1 hour', reason => 'printer 7 on fire')",
        [first[0], ids[1:]],
    )
    conn.execute("select pgque.reclaim(%s, 'c')", [queue])
    for _ in range(2):
        conn.execute("select from pgque.receive(%s, 'c', 10, 'w', '1 hour')", [queue])
        page = text(b.get("/failing", queue=queue))
        conn.execute("select pgque.reclaim(%s, 'c')", [queue])
    assert f"{ids[0]} processing c 3" in page
    assert "In state retry: 1" in page
    assert f'href="/failing?queue={queue}#retries">' in b.get("/queue", queue=queue).text
    assert "printer N on fire default c 1 1" in page
    assert f"{ids[1]} c default 1 1" in page
    # The next delivery would be one too many.
    conn.execute("select from pgque.receive(%s, 'c', 10, 'w', '1 hour')", [queue])
    assert f"{ids[0]} dead c 3" in text(b.get("/failing", queue=queue))
    assert "1 message archived." in text(b.post("/failing/archive", queue=queue))
    assert "No poison message." in text(b.get("/failing", queue=queue))


def test_the_leases_of_one_worker_are_released(
    browser: NewBrowser, admin: Role, queue: str, conn: Connection, tick: Tick
) -> None:
    conn.execute("select pgque.subscribe(%s, 'c')", [queue])
    conn.execute("select pgque.send_batch(%s, array['a', 'b', 'c'])", [queue])
    tick(queue)
    for worker, most in (("stuck", 2), ("busy", 1)):
        conn.execute("select from pgque.receive(%s, 'c', %s, %s, '1 hour')", [queue, most, worker])
    b = browser(admin)
    assert 'aria-label="Reclaim worker stuck of consumer c"' in b.get("/queue", queue=queue).text
    fields = {"queue": queue, "consumer": "c"}
    assert "Released 2 messages of worker stuck." in text(
        b.post("/queue/reclaim/worker", worker="stuck", **fields)
    )
    rows = conn.execute("select worker, messages from pgque.list_workers(%s)", [queue]).fetchall()
    assert rows == [("busy", 1)]
    assert "Worker stuck has no lease now." in text(b.post("/queue/reclaim/worker", worker="stuck", **fields))


def test_a_server_that_is_back_is_ready_at_once(tcp_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, True]

    def slowly(_: object) -> bool:
        time.sleep(0.2)
        return answers.pop(0)

    monkeypatch.setattr(figures, "PING_KEPT", 0)
    monkeypatch.setattr(figures, "_answers", slowly)
    app = pgque.web.app(tcp_dsn)
    assert [TestClient(app).get("/readyz").status_code for _ in range(2)] == [503, 200]
    app.close()  # type: ignore[attr-defined]


def test_figures_are_for_this_machine_or_for_who_has_the_token(
    tcp_dsn: str, dsn: str, queue: str, tmp_path: Path
) -> None:
    def answer(client: TestClient, path: str = "/metrics", **headers: str) -> int:
        return client.get(path, headers=headers).status_code

    here: dict[str, Any] = {"base_url": "http://127.0.0.1:8811", "client": ("127.0.0.1", 5000)}
    own = pgque.web.app([dsn, make_conninfo(tcp_dsn, port="1")])
    client = TestClient(own, **here)
    page = client.get("/metrics")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "pgque_up 1.0" in page.text
    assert f'pgque_queue_consumers{{queue="{queue}"}} 0.0' in page.text
    assert "pgque_up 0.0" in client.get("/metrics?database=1").text
    for number in ("2", "x", "-1", "%C2%B2"):
        assert answer(client, f"/metrics?database={number}") == 404
    assert client.get("/readyz").text == "ok\n"
    assert answer(client, "/readyz?database=1") == 503
    assert answer(client, "/readyz?database=2") == 404
    # Nobody else: not another machine, nor through a proxy, nor a page of another site that calls itself this host.
    assert answer(TestClient(own, base_url=here["base_url"], client=("192.0.2.1", 5000))) == 401
    for name, value in (
        ("x-forwarded-for", "127.0.0.1"),
        ("forwarded", "for=127.0.0.1"),
        ("host", "evil.example"),
    ):
        assert answer(client, **{name: value}) == 401, name
    own.close()  # type: ignore[attr-defined]

    # The page works for those who log in where its own user may not read: that is not what readyz asks.
    app = pgque.web.app(tcp_dsn, metrics_token="sesame")
    client = TestClient(app, client=("192.0.2.1", 5000))
    page = client.get("/metrics")
    assert page.status_code == 401
    assert page.headers["www-authenticate"] == "Bearer"
    assert "sesame" not in page.text + repr(app.config)  # type: ignore[attr-defined]
    for wrong in ("Bearer sesam", "sesame", "Basic sesame", "Bearer", "Bearer ses\u00e4me"):
        assert client.get("/metrics", headers={b"authorization": wrong.encode("latin-1")}).status_code == 401
    assert answer(client, "/metrics?token=sesame") == 401
    assert answer(client, authorization="Bearer sesame") == 200
    assert answer(TestClient(app, **here)) == 401
    assert client.get("/readyz").status_code == 200
    app.close()  # type: ignore[attr-defined]

    import urllib.error
    import urllib.request

    token = tmp_path / "token"
    token.write_text("sesame\n")
    with served(dsn, "--metrics-token-file", str(token)) as address:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address}/metrics", timeout=10)  # noqa: S310
        asked = urllib.request.Request(  # noqa: S310
            f"{address}/metrics", headers={"authorization": "Bearer sesame"}
        )
        with urllib.request.urlopen(asked, timeout=10) as page:  # noqa: S310
            assert b"pgque_up 1.0" in page.read()
