"""For tests of the web page: the command, and a browser without a screen that is logged in as a role."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from typing import Any

from httpx2 import Response
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from starlette.testclient import TestClient

from conftest import Role
from pgque import embedded

CSRF = re.compile(r'name="csrf" value="([^"]+)"')


def over_tcp(server: embedded.Server | None, dsn: str) -> str:
    """Return a connection string to the same database, without user and password, where both are asked for."""
    parts = conninfo_to_dict(dsn)
    host = "127.0.0.1" if server is not None else parts["host"]
    return make_conninfo("", host=host, port=parts["port"], dbname=parts["dbname"])


class Browser:
    """What a person does with the page: log in, open, fill in a form and send it."""

    def __init__(self, app: Any, **options: Any) -> None:
        self.client = TestClient(app, **options)

    def log_in(self, role: Role, **fields: str) -> Response:
        """Send the login form; return the page that follows."""
        password = str(conninfo_to_dict(role.dsn)["password"])
        sent = {"csrf": csrf(self.client.get("/login")), "user": role.name, "password": password, **fields}
        return self.client.post("/login", data=sent)

    def get(self, path: str, code: int = 200, /, **query: Any) -> Response:
        """Open a page."""
        page = self.client.get(path, params={name: str(value) for name, value in query.items()})
        assert page.status_code == code, page.text
        return page

    def post(self, path: str, code: int = 200, /, **fields: Any) -> Response:
        """Send a form with the token of this session; return the page that follows."""
        data: dict[str, Any] = {"csrf": csrf(self.client.get("/"))}
        data |= {name: value if isinstance(value, list) else str(value) for name, value in fields.items()}
        page = self.client.post(path, data=data)
        assert page.status_code == code, page.text
        return page


def csrf(page: Response) -> str:
    """Return the token in the forms of a page."""
    found = CSRF.search(page.text)
    assert found is not None, page.text
    return found[1]


def text(page: Response) -> str:
    """Return what a page says, without its tags."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page.text)).split())


@contextmanager
def served(dsn: str, *options: str) -> Iterator[str]:
    """Run the command; yield its address without the last slash."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pgque.cli", "web", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PGQUE_DSN": dsn},
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert re.match("https?://127.0.0.1:", address), process.communicate(timeout=10)
        yield address.removesuffix("/")
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors, errors
