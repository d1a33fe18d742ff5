"""`pgque web`: what it refuses before it listens."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import pytest
import trustme
import uvicorn
from click.testing import CliRunner
from starlette.types import Receive, Scope, Send

from pgque.cli import main
from pgque.cli.common import is_loopback
from pgque.cli.web import MOST_CONNECTIONS
from pgque.web import protocol
from support.pages import served


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org"])  # noqa: S104
def test_it_listens_beyond_this_machine_only_with_tls_or_by_an_option(host: str) -> None:
    assert not is_loopback(host)
    done = CliRunner().invoke(main, ["web", "--dsn", "dbname=x", "--host", host])
    assert done.exit_code == 2
    assert "--tls-cert and --tls-key, or --insecure" in done.output


def test_loopback_needs_no_tls() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))


def test_wrong_options_are_errors_with_a_hint(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("")
    for options, words in (
        (["--tls-cert", str(cert)], "--tls-cert and --tls-key belong together"),
        (["--path-prefix", "pgque/"], "not a path prefix"),
        (["--dsn", "host=localhost"], "names no database"),
        (["--dsn", "nonsense"], "not a connection string"),
    ):
        done = CliRunner(env={"PGDATABASE": "", "PGSERVICE": "", "PGQUE_DSN": ""}).invoke(
            main, ["web", *([] if "--dsn" in options else ["--dsn", "dbname=x"]), *options]
        )
        assert done.exit_code in (1, 2), options
        assert words in done.output, options


def test_the_package_imports_nothing_of_it() -> None:
    code = "import pgque, pgque.cli, sys; print({'starlette', 'jinja2', 'uvicorn', 'markupsafe'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_clients_that_send_nothing_more_keep_nobody_out_and_lose_their_connections(tcp_dsn: str) -> None:
    with served(tcp_dsn) as address, ExitStack() as slow:
        host, port = address.removeprefix("http://").split(":")
        silent = [
            slow.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(3)
        ]
        silent[0].sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
        for n in range(150):
            one = slow.enter_context(socket.create_connection((host, int(port)), timeout=10))
            # Some stop within the headers, some within the form.
            kind = b"content-type: application/x-www-form-urlencoded\r\ncontent-length: 1000\r\n\r\nx="
            one.sendall(b"POST /login HTTP/1.1\r\nhost: x\r\n" + (kind if n % 2 else b""))
        with urllib.request.urlopen(f"{address}/login", timeout=10) as answer:  # noqa: S310
            assert answer.status == 200
        assert [one.recv(100) for one in silent] == [b""] * 3


def test_a_connection_that_was_good_once_is_lost_as_well_when_its_client_stops(tcp_dsn: str) -> None:
    whole = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    part = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: "
    body = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
    with served(tcp_dsn) as address, ExitStack() as slow:
        host, port = address.removeprefix("http://").split(":")

        def opened() -> socket.socket:
            return slow.enter_context(socket.create_connection((host, int(port)), timeout=30))

        def status(one: socket.socket) -> int:
            answer = HTTPResponse(one)
            answer.begin()
            answer.read()
            return answer.status

        def status_of_new() -> int:
            one = opened()
            one.sendall(whole)
            return status(one)

        def ends(one: socket.socket, drop: bytes) -> bool:
            """Whether the connection ends although one byte comes after the other."""
            for _ in range(30):
                one.settimeout(0.5)
                try:
                    if one.recv(100_000) == b"":
                        return True
                except TimeoutError:
                    one.sendall(drop)
                except OSError:
                    return True
            return False

        # Headers that come slowly after an answer, also of a request that came together with the one before.
        for first in (whole + part, whole):
            kept = opened()
            kept.sendall(first)
            assert status(kept) == 200
            if first == whole:
                kept.sendall(part)
            assert ends(kept, b"x")
        # A body that no page reads
        unread = opened()
        unread.sendall(body)
        assert status(unread) == 404
        assert ends(unread, b"x")
        # A connection that goes on sending requests lives on.
        busy = opened()
        for _ in range(4):
            busy.sendall(whole)
            assert status(busy) == 200
            time.sleep(2)

        # More than half of all connections: one without a request is closed at once.
        crowd = [opened() for _ in range(MOST_CONNECTIONS // 2 + 1)]
        assert status_of_new() == 200  # they were accepted before
        busy.sendall(whole)
        assert status(busy) == 200
        busy.settimeout(3)
        assert busy.recv(100) == b""
        del crowd


def test_with_tls_a_client_that_stops_loses_its_connection_as_soon(tcp_dsn: str, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    with (
        served(tcp_dsn, "--tls-cert", str(cert), "--tls-key", str(key)) as address,
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=30) as silent,
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=30) as greeted,
    ):
        stopped = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode()).wrap_bio(
            incoming := ssl.MemoryBIO(), outgoing := ssl.MemoryBIO(), server_hostname="localhost"
        )
        while True:
            try:
                stopped.do_handshake()
            except ssl.SSLWantReadError:
                greeted.sendall(outgoing.read())
                incoming.write(greeted.recv(100_000))
            else:
                greeted.sendall(outgoing.read())
                break
        began = time.monotonic()
        assert silent.recv(100) == b""
        while greeted.recv(100_000):  # tickets, and that the server closes; the client does not agree
            pass
        assert time.monotonic() - began < 12


def test_a_client_that_does_not_read_its_answer_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "ANSWER", 1.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        length = 50_000_000 if scope["path"] == "/large" else 1_000_000
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * length})

    config = uvicorn.Config(app, port=0, http=protocol.Protocol, log_level="error", limit_concurrency=10)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        for request in (b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /large HTTP/1.0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as idle:
                idle.sendall(request)
                for _ in range(100):
                    time.sleep(0.1)
                    if server.server_state.connections == set():
                        break
                assert server.server_state.connections == set()
        # A slow one has its time as long as it reads.
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
            slow.sendall(b"GET /large HTTP/1.0\r\n\r\n")
            got, began = 0, time.monotonic()
            while piece := slow.recv(1_000_000):
                got += len(piece)
                if time.monotonic() - began < 4:
                    time.sleep(0.2)
            assert got > 50_000_000
            assert time.monotonic() - began > 3
    finally:
        server.should_exit = True
        thread.join(20)
