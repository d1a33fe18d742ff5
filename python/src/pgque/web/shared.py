"""State that all requests share: options, sessions, figures and templates."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from .config import Config
from .database import Lender
from .look import FILTERS
from .samples import Samples
from .sessions import Attempts, Session, Sessions, Signer

COOKIE = "pgque_session"
LOGIN_COOKIE = "pgque_login"  # of a user who has no session yet, for the CSRF token of the form
LIVE = "pgque-live"  # the header of requests that the script makes to keep a page up to date


class Shared:
    """State that all requests share. `pages` are the addresses that a browser may be sent to."""

    def __init__(self, config: Config, pages: Iterable[str]) -> None:
        self.config = config
        self.signer = Signer()
        self.sessions = Sessions(config)
        self.attempts = Attempts()
        self.lenders = {database: Lender(config.max_connections) for database in config.databases}
        self.samples = Samples(config.sample_period)
        self.templates = Environment(
            loader=PackageLoader("pgque.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.filters.update(FILTERS)
        self._pages = frozenset(pages)

    def close(self) -> None:
        """End all sessions."""
        self.sessions.end_all()

    def session(self, request: Request) -> Session | None:
        """Return the session of a request, or None."""
        return self.sessions.find(self.cookie(request, COOKIE), LIVE in request.headers)

    def cookie(self, request: Request, name: str) -> str | None:
        """Return the token of a signed cookie, or None."""
        return self.signer.token(request.cookies.get(_of_port(request, name)))

    def set_cookie(self, request: Request, answer: Response, name: str, token: str | None) -> None:
        """Set a signed cookie, or delete it."""
        path, name = request.scope["root_path"] or "/", _of_port(request, name)
        if token is None:
            answer.delete_cookie(name, path=path)
            return
        answer.set_cookie(
            name,
            self.signer.signed(token),
            path=path,
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
        )

    def own_path(self, text: str) -> str:
        """Return an address of this site without its prefix: the text, or the first page if it is none."""
        try:
            parts = urlsplit(text)
        except ValueError:
            return "/"
        if (
            parts.scheme
            or parts.netloc
            or parts.path not in self._pages
            or any(c in text for c in "\\\r\n\t")
        ):
            return "/"
        return f"{parts.path}?{parts.query}" if parts.query else parts.path


def _of_port(request: Request, name: str) -> str:
    """Return the name of a cookie: a browser sends the cookies of a host to each of its ports."""
    port = re.search(r":(\d{1,5})$", request.headers.get("host", ""))
    return f"{name}_{port[1]}" if port else name
