"""The web page of the test database, and browsers that are logged in to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pgque.web
from conftest import Role
from support.pages import Browser, over_tcp
from support.servers import TestServer


@pytest.fixture(scope="session")
def tcp_dsn(server: TestServer, dsn: str) -> str:
    """The test database over TCP, where the server asks for passwords; without user and password."""
    return over_tcp(server.process, dsn)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for figures and for work on dead letters, however slow the machine is."""
    monkeypatch.setattr("pgque.web.samples.SOON", 60)
    monkeypatch.setattr("pgque.web.dead.SOON", 60)
    monkeypatch.setattr("pgque.web.page.SEARCH", 60_000)


@pytest.fixture
def browser(tcp_dsn: str) -> Iterator[Callable[..., Browser]]:
    """browser(role) is logged in; browser() is not. Options are those of pgque.web.app()."""
    opened: list[Any] = []

    def do(role: Role | None = None, **options: Any) -> Browser:
        app = pgque.web.app(tcp_dsn, **options)
        opened.append(app)
        browser = Browser(app)
        if role is not None:
            page = browser.log_in(role)
            assert page.status_code == 200, page.text
            assert "Log out" in page.text
        return browser

    yield do
    for app in opened:
        app.close()
