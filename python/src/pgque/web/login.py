"""The login page."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from . import database, shared
from .config import Database
from .page import Form, address, rendered
from .sessions import Session

log = logging.getLogger("pgque.web")

MOST_USER = 200  # characters of a name that are read; a role's has at most 63 bytes
LOGIN_WAIT = 10.0  # seconds that a login waits for others that run
LOGIN_POLL = 0.05  # seconds between checks


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


async def log_in(site: shared.Shared, request: Request, form: Form, before: Session | None) -> Response:
    """Begin a session if the database accepts user and password.

    A login waits here for its turn, where it keeps no thread from those who are logged in.
    """
    user = form.get("user")[:MOST_USER]
    client = request.client.host if request.client else ""
    wanted = form.number("database", 0)
    chosen = site.config.databases[wanted if 0 <= wanted < len(site.config.databases) else 0]
    until = time.monotonic() + LOGIN_WAIT
    while (wait := site.attempts.wait(client, user)) == 0 and not site.attempts.begin(client, user, chosen):
        if time.monotonic() > until:
            busy = "Too many logins run at once. Try again in a few seconds."
            return show(site, request, form.get("next"), error=busy, status=503)
        await asyncio.sleep(LOGIN_POLL)
    if wait > 0:
        error = f"Too many failed logins. Try again in {math.ceil(wait / 60)} min."
        return show(site, request, form.get("next"), error=error, status=429)
    return await run_in_threadpool(_log_in, site, request, form, before, client, user, chosen)


def _log_in(
    site: shared.Shared,
    request: Request,
    form: Form,
    before: Session | None,
    client: str,
    user: str,
    chosen: Database,
) -> Response:
    following = form.get("next")
    try:
        connections = database.log_in(
            site.lenders[chosen], chosen, user, form.get("password"), site.config.statement_timeout
        )
        site.attempts.succeeded(client, user)
    except database.LoginRefusedError as refused:
        if isinstance(refused, database.WrongPasswordError):
            site.attempts.failed(client, user)
        status = 503 if isinstance(refused, database.UnreachableError) else 401
        return show(site, request, following, error=str(refused), status=status)
    finally:
        site.attempts.end(client, user, chosen)
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
