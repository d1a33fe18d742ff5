"""`pgque web`: what it refuses before it listens."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from pgque.cli import main
from pgque.cli.common import is_loopback
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
