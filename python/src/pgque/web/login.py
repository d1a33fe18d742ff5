"""The login page."""

from __future__ import annotations

import logging
import math
import secrets

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from . import database, shared
from .page import Form, address, rendered
from .sessions import Session

log = logging.getLogger("pgque.web")

MOST_USER = 200  # characters of a name that are looked at; a role's has at most 63 bytes


def show(
    site: shared.Shared, request: Request, following: str, *, error: str = "", status: int = 200
) -> Response:
    """Return the login form."""
    token = site.cookie(request, shared.LOGIN_COOKIE) or secrets.token_urlsafe(32)
    answer = rendered(
        site,
        request,
        "login.html",
        status=status,
        databases=site.config.databases,
        csrf=site.signer.csrf(token),
        following=following,
        error=error,
        page=None,
    )
    site.set_cookie(request, answer, shared.LOGIN_COOKIE, token)
    return answer


def log_in(site: shared.Shared, request: Request, form: Form, before: Session | None) -> Response:
    """Begin a session if the database accepts user and password."""
    following, user = form.get("next"), form.get("user")[:MOST_USER]
    client = request.client.host if request.client else ""
    wait = site.attempts.begin(client, user)
    if wait > 0:
        return show(
            site,
            request,
            following,
            error=f"Too many failed logins. Try again in {math.ceil(wait / 60)} min.",
            status=429,
        )
    wanted = form.number("database", 0)
    if not 0 <= wanted < len(site.config.databases):
        wanted = 0
    chosen = site.config.databases[wanted]
    try:
        connections = database.log_in(chosen, user, form.get("password"), site.config.statement_timeout)
    except database.LoginRefusedError as refused:
        return show(site, request, following, error=str(refused), status=401)
    site.attempts.succeeded(client, user)
    if before is not None:
        site.sessions.end(before)
    try:
        session = site.sessions.begin(chosen, user, connections)
    except database.LoginRefusedError as refused:
        return show(site, request, following, error=str(refused), status=503)
    log.info("login of %r to %s", user, chosen.label)
    answer = RedirectResponse(address(request, site.own_path(following), {}), status_code=303)
    site.set_cookie(request, answer, shared.COOKIE, session.token)
    site.set_cookie(request, answer, shared.LOGIN_COOKIE, None)
    return answer
