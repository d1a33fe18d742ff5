"""`pgque metrics --serve`, `render` and Exporter: what Prometheus gets, and when it gets nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import pgque
from pgque import exporter
from pgque.cli import main
from support.processes import ended

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]
Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _figures(text: bytes) -> Figures:
    """Return the samples by name and labels; each family and each sample has to be there once."""
    found: Figures = {}
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation
        assert family.type == ("counter" if family.samples[0].name.endswith("_total") else "gauge")
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def _key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@contextmanager
def _served(source: exporter.Exporter, token: str | None = None) -> Iterator[str]:
    server = exporter.make_server(source, port=0, token=token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
        source.close()


def _get(url: str, token: str | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url)  # noqa: S310
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_text_has_each_figure_of_metrics_and_each_check_of_health(
    conn: Connection, new_queue: Callable[..., str], tick: Tick
) -> None:
    client = pgque.PgqueClient(conn)
    queue = new_queue('a "quoted" \\ queue\nof two lines' + os.urandom(4).hex())
    client.subscribe(queue, "c")
    client.admin.set_queue_config(queue, "max_depth", "5000")
    client.send_batch(queue, ["a", "b"])
    tick(queue)
    with conn.transaction():
        text = exporter.render(conn)
        assert conn.execute("show statement_timeout").fetchone() == ("0",)
    found = _figures(text)
    assert found[_key("pgque_up")] == 1
    assert found[_key("pgque_queue_events_total", queue=queue)] == 2
    assert found[_key("pgque_queue_max_depth", queue=queue)] == 5000
    assert found[_key("pgque_queue_retention_seconds", queue=queue)] == 7 * 86400
    assert found[_key("pgque_consumer_pending_events", queue=queue, consumer="c")] == 2
    assert found[_key("pgque_health_status", queue=queue, check="tables")] == 0
    names = {name for name, _ in found}
    assert {row.metric for row in client.monitor.metrics()} <= names
    assert {row.check_name for row in client.monitor.health()} == {
        dict(labels)["check"] for name, labels in found if name == "pgque_health_status"
    }
    assert conn.execute("show statement_timeout").fetchone() == ("0",)


@pytest.mark.prometheus
def test_promtool_is_content_with_the_text(dsn: str, queue: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=exporter.render(dsn), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_one_read_serves_many_scrapes(dsn: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = exporter._read

    def counted(conn: psycopg.Connection[object]) -> Any:
        reads.append(conn.info.backend_pid)
        return read(conn)

    monkeypatch.setattr(exporter, "_read", counted)
    with _served(exporter.Exporter(dsn, max_age=3600)) as url, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(_get, [f"{url}/metrics"] * 16))
    assert len(reads) == 1
    assert {status for status, _ in answers} == {200}
    assert len({text for _, text in answers}) == 1
    with _served(exporter.Exporter(dsn, max_age=0, max_share=1)) as url:
        _get(f"{url}/metrics")
        _get(f"{url}/metrics")
    assert len(reads) == 3
    assert reads[1] == reads[2]


def test_a_slow_read_keeps_nobody_waiting_and_serves_for_longer(
    dsn: str, conn: Connection, queue: str, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    source = exporter.Exporter(dsn, max_age=0, max_share=1)
    first = source.text()
    read, begun, go_on = exporter._read, threading.Event(), threading.Event()

    def slow(conn: psycopg.Connection[object]) -> Any:
        begun.set()
        assert go_on.wait(30)
        return read(conn)

    monkeypatch.setattr(exporter, "_read", slow)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(source.text)
        assert begun.wait(30)
        assert source.text() == first
        assert source.problem() is None
        go_on.set()
        assert second.result(30) != first
    source.close()
    monkeypatch.setattr(exporter, "_read", read)
    sparing = exporter.Exporter(dsn, max_age=0, max_share=0.0001)
    assert sparing.text() == sparing.text()
    sparing.close()
    with pytest.raises(ValueError, match="max_share"):
        exporter.Exporter(dsn, max_share=0)


def test_connections_are_bounded_and_a_slow_client_is_disconnected(
    dsn: str, queue: str, monkeypatch: pytest.MonkeyPatch, wait_until: Wait
) -> None:
    most = exporter._MAX_REQUESTS
    source = exporter.Exporter(dsn)
    with _served(source) as url, ExitStack() as slow:
        host, port = url.removeprefix("http://").split(":")

        def connect() -> socket.socket:
            return slow.enter_context(socket.create_connection((host, int(port)), timeout=30))

        def threads() -> int:
            return sum("process_request" in thread.name for thread in threading.enumerate())

        first = [connect() for _ in range(most)]
        for one in first:
            one.sendall(b"GET /metrics HTTP/1.0\r\n")  # and not the end of it
        wait_until(lambda: threads() == most)
        assert _get(f"{url}/metrics") == (503, b"too many requests at a time\n")
        more = [connect() for _ in range(2 * most)]
        wait_until(lambda: sum(_is_closed(one) for one in more) == most)
        assert threads() == 2 * most
        assert source._client is None  # nothing of this has reached the database
        for one in first[1:] + more:
            one.close()
        wait_until(lambda: threads() == 1)
        assert _get(f"{url}/metrics")[0] == 200
        monkeypatch.setattr(exporter, "_REQUEST_TIMEOUT", 0.1)
        late = connect()

        def drip() -> bool:  # never as long without a byte as the other limit says
            try:
                late.sendall(b"GET")
            except OSError:
                return True
            return _is_closed(late)

        wait_until(drip, timeout=30)
        assert not _is_closed(first[0])  # it came when the limit was longer


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_scrapes_and_probes_share_the_text_and_the_ping(
    dsn: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = exporter.Exporter(dsn, max_age=3600)
    assert source.text() is source.text()
    pings: list[None] = []
    monkeypatch.setattr(exporter.Exporter, "_ping", lambda self: pings.append(None))
    assert [source.problem() for _ in range(3)] == [None] * 3
    assert len(pings) == 3  # as if the last one were long ago
    monkeypatch.undo()
    monkeypatch.setattr(exporter, "_PING_AGE", 3600)
    assert source.problem() is None
    assert source._client is not None
    source._client.close()
    assert source.problem() is None  # not asked again
    source.close()


def test_a_token_is_asked_for_at_metrics_only(dsn: str, queue: str) -> None:
    with _served(exporter.Exporter(dsn), token="secret") as url:
        assert _get(f"{url}/metrics")[0] == 401
        assert _get(f"{url}/metrics", "secre")[0] == 401
        assert _get(f"{url}/metrics", "secret2")[0] == 401
        assert _get(f"{url}/metrics?x=1", "secret")[0] == 200
        assert _get(f"{url}/healthz") == (200, b"ok\n")
        assert _get(f"{url}/readyz") == (200, b"ok\n")
        assert _get(f"{url}/other")[0] == 404


def test_a_token_may_have_any_characters(dsn: str, queue: str) -> None:
    token = "sécret"
    with _served(exporter.Exporter(dsn), token=token) as url:
        assert _get(f"{url}/metrics", token.encode().decode("latin-1"))[0] == 200  # as curl sends it
        assert _get(f"{url}/metrics", "secret")[0] == 401


def test_a_database_that_cannot_be_read_is_reported_and_connected_to_again(
    dsn: str, conn: Connection, queue: str, new_queue: Callable[..., str]
) -> None:
    source = exporter.Exporter(dsn, max_age=0, max_share=1)
    with _served(source) as url:
        assert source._client is not None or _get(f"{url}/metrics")[0] == 200
        assert source._client is not None
        pid = source._client.conn.info.backend_pid
        conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
        assert _figures(_get(f"{url}/metrics")[1])[_key("pgque_up")] == 1
    away = exporter.Exporter(
        "host=127.0.0.1 port=1 password=hidden connect_timeout=2", max_age=0, max_share=1
    )
    with _served(away) as url:
        status, text = _get(f"{url}/metrics")
        assert (status, _figures(text)) == (200, {_key("pgque_up"): 0.0})
        status, text = _get(f"{url}/readyz")
        assert status == 503
        assert b"hidden" not in text
        assert _get(f"{url}/healthz") == (200, b"ok\n")
        with pytest.raises(pgque.PgqueConnectionError):
            away.check()


def test_a_role_needs_no_more_than_pgque_reader(roles: Callable[..., Any], queue: str) -> None:
    assert _figures(exporter.render(roles("reader").dsn))[_key("pgque_queue_paused", queue=queue)] == 0
    with pytest.raises(pgque.PgquePermissionDeniedError):
        exporter.render(roles().dsn)


def test_an_exporter_is_a_collector_of_a_registry(dsn: str, queue: str) -> None:
    registry = CollectorRegistry()
    source = exporter.Exporter(dsn)
    registry.register(source)
    assert source._client is None  # registering reads nothing
    assert registry.get_sample_value("pgque_queue_paused", {"queue": queue}) == 0
    source.close()


def test_the_command_serves_until_it_is_stopped(dsn: str, queue: str) -> None:
    command = [sys.executable, "-m", "pgque.cli", "metrics", "--dsn", dsn, "--serve", "127.0.0.1:0"]
    environment = {**os.environ, "PGQUE_METRICS_TOKEN": "secret"}
    with ended(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        assert _get(url)[0] == 401
        assert b"pgque_up 1.0" in _get(url, "secret")[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prometheus"], 0, "pgque_up 1.0"),
        (["--prometheus", "q"], 2, "for all queues"),
        (["--serve", "9187"], 2, "no HOST:PORT"),
        (["--serve", ":9187"], 2, "no HOST:PORT"),
        (["--serve", "::1:9187"], 2, "[::1]:9187"),
        (["--serve", "192.0.2.1:9187"], 1, "cannot listen on 192.0.2.1:9187"),
    ],
)
def test_the_command_prints_the_text_and_names_what_is_wrong(
    dsn: str, arguments: list[str], code: int, words: str
) -> None:
    done = CliRunner().invoke(main, ["metrics", "--dsn", dsn, *arguments])
    assert (done.exit_code, words in done.output) == (code, True), done.output


def test_without_prometheus_client_the_command_names_what_is_missing(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None; import pgque.cli;"
        "pgque.cli.main(['metrics', '--prometheus'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'pip install "./python[metrics]"' in done.stderr
