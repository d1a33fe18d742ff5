"""The ASGI application: addresses, sessions, and headers of every answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from importlib.resources import files

try:
    import jinja2  # noqa: F401
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as _error:
    from ..errors import PgqueError as _PgqueError

    raise _PgqueError(
        f"the web page needs a package that is not installed: {_error.name}",
        hint="pip install './python[web]' (in the repository of pgque)",
    ) from _error

from ..errors import (
    PgqueBadArgumentError,
    PgqueConnectionError,
    PgqueConsumerNotFoundError,
    PgqueError,
    PgqueMessageNotFoundError,
    PgquePermissionDeniedError,
    PgqueQueueNotFoundError,
)
from . import (
    actions,
    archive,
    changes,
    dead,
    failing,
    find,
    login,
    messages,
    overview,
    queue,
    recurring,
    send,
    settings,
    streams,
)
from .config import Config
from .figures import Figures
from .page import Form, Page, address, rendered
from .sessions import Session
from .shared import COOKIE, LOGIN_COOKIE, Shared

log = logging.getLogger("pgque.web")

MOST_LOGIN_BYTES = 10_000  # of a form of a user who is not logged in
BODY_TIMEOUT = 10  # seconds for the whole body of a request

Handler = Callable[[Page], Response]

READS: dict[str, Handler] = {
    "/": overview.show,
    "/queue": queue.show,
    "/queue/settings": settings.show,
    "/queue/access": queue.show_access,
    "/queue/seek": queue.ask_seek,
    "/dead": dead.show,
    "/dead/purge": dead.ask_purge,
    "/failing": failing.show,
    "/messages": messages.show,
    "/message": messages.show_one,
    "/message/cancel": messages.ask_cancel,
    "/message/ask": messages.ask,
    "/message/edit": messages.ask_edit,
    "/search": find.show,
    "/send": send.show,
    "/recurring": recurring.show,
    "/archive": archive.show,
    "/streams": streams.show,
    "/actions": actions.show,
    "/job": dead.show_job,
    **changes.READS,
}
CHANGES: dict[str, Handler] = {
    "/queue/settings": settings.save,
    "/queue/pause": queue.pause,
    "/queue/resume": queue.resume,
    "/queue/reclaim": queue.reclaim,
    "/queue/reclaim/worker": queue.reclaim_worker,
    "/queue/retry": queue.retry_now,
    "/queue/seek": queue.seek,
    "/message/cancel": messages.cancel,
    "/message/do": messages.do,
    "/message/edit": messages.edit,
    "/dead/do": dead.do,
    "/dead/purge": dead.purge,
    "/failing/archive": failing.archive,
    "/send": send.send,
    "/recurring/do": recurring.do,
    "/archive/replay": archive.replay,
    **changes.RUNS,
}
# Forms that show a question and change nothing.
ASKS: dict[str, Handler] = {"/dead/ask": dead.ask, "/queue/settings/preview": settings.ask, **changes.ASKS}

STATIC = {
    "style.css": "text/css",
    "live.js": "text/javascript",
    "copy.js": "text/javascript",
    "time.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self';"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Site(Shared):
    """The web page as an ASGI application."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, READS)
        self._figures = Figures(config)
        self._app = Starlette(
            routes=[
                *(Route(path, self._reading(handler), methods=["GET"]) for path, handler in READS.items()),
                *(Route(p, self._changing(h, False), methods=["POST"]) for p, h in CHANGES.items()),
                *(Route(p, self._changing(h, True), methods=["POST"]) for p, h in ASKS.items()),
                Route("/login", self._login_page, methods=["GET"]),
                Route("/login", self._log_in, methods=["POST"]),
                Route("/logout", self._log_out, methods=["POST"]),
                Route("/healthz", self._alive, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                *(Route(f"/static/{name}", _static(name, kind)) for name, kind in STATIC.items()),
            ],
            exception_handlers={HTTPException: self._refused, PgqueError: self._failed},  # type: ignore[dict-item]
        )
        self._app.router.redirect_slashes = False  # it redirects to the host that a client names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            return
        root = scope.get("root_path", "")
        if self.config.path_prefix and not root.endswith(self.config.path_prefix):
            root += self.config.path_prefix
        path = scope["path"]
        if root and (path + "/").startswith(root + "/"):
            path = path[len(root) :] or "/"  # the first page, with or without a slash
            scope = {**scope, "path": root + path}
        scope = {**scope, "root_path": root, "pgque.path": path}

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {pair[0].decode().lower() for pair in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in HEADERS.items() if name not in own),
                ]
            await send(message)

        await self._app(scope, receive, send_safely)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            else:
                await run_in_threadpool(self.close)
                await send({"type": "lifespan.shutdown.complete"})
                return

    # -- pages for users who are logged in ----------------------------------------

    def _reading(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            session = self.session(request)
            if session is None:
                return RedirectResponse(address(request, "/login", {"next": _here(request)}), status_code=303)
            return await run_in_threadpool(self._serve, handler, request, session, request.url.query, True)

        return endpoint

    def _changing(self, handler: Handler, asks: bool) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            session = self.session(request)
            if session is None:
                return RedirectResponse(address(request, "/login", {"ended": 1}), status_code=303)
            body = await self._body(request, self.config.most_bytes)
            self._check_form(request, session.token, Form.read(body))
            return await run_in_threadpool(self._serve, handler, request, session, body, asks)

        return endpoint

    def _serve(
        self, handler: Handler, request: Request, session: Session, fields: str, reads: bool
    ) -> Response:
        """Run a handler on a connection of the session. Show its error, on the page before if possible."""
        sent = hashlib.sha256(f"{request.url.path} {fields}".encode()).hexdigest()
        try:
            form = Form.read(fields, request.method == "POST")
            if not reads and form.get("once") and not session.once(sent):
                raise PgqueBadArgumentError(
                    "this form was sent already, and it runs only once",
                    hint="Check its result; it may take a while. Then reload the page to send it again.",
                )
            timeout = None if reads else self.config.change_timeout
            with session.connections.take(reads, timeout) as connection:
                page = Page(self, request, session, connection, form)
                if request.method == "POST":
                    page.check_identity()
                if reads:
                    return handler(page)
                if not page.writable:
                    raise PgquePermissionDeniedError(
                        "this page is read only", hint="Log in to the primary server."
                    )
                try:
                    return handler(page)
                finally:
                    self.samples.forget(session.database)
        except PgqueError as error:
            if session.connections.over:
                self.sessions.end(session)
                to = {"next": _here(request)} if request.method == "GET" else {"ended": 1}
                return RedirectResponse(address(request, "/login", {**to, "changed": 1}), status_code=303)
            if not isinstance(error, (PgqueConnectionError, PgqueBadArgumentError)):
                session.forms.pop(sent, None)  # nothing was done
            back = Form.read(fields).get("back") if not reads else ""
            if back and not isinstance(error, PgqueConnectionError):
                session.flash("error", str(error))
                # Else the browser keeps the fragment of the form, and what follows looks as if it was done.
                return RedirectResponse(f"{address(request, self.own_path(back), {})}#main", status_code=303)
            return self._error(request, error)

    def _error(self, request: Request, error: PgqueError) -> Response:
        status = next(
            (code for kind, code in _STATUS.items() if isinstance(error, kind)),
            504 if error.sqlstate == "57014" else 400,
        )
        return rendered(
            self, request, "error.html", status=status, title="That did not work", text=str(error), page=None
        )

    async def _failed(self, request: Request, error: PgqueError) -> Response:
        return self._error(request, error)

    async def _refused(self, request: Request, error: HTTPException) -> Response:
        texts = {404: "There is no such page.", 405: "This address does not accept this kind of request."}
        return rendered(
            self,
            request,
            "error.html",
            status=error.status_code,
            title="That did not work",
            text=texts.get(error.status_code, error.detail),
            page=None,
        )

    # -- login --------------------------------------------------------------------

    async def _login_page(self, request: Request) -> Response:
        form = Form.read(request.url.query)
        why = [text for name, text in _WHY.items() if form.get(name)]
        return login.show(self, request, form.get("next"), error=" ".join(why))

    async def _log_in(self, request: Request) -> Response:
        form = Form.read(await self._body(request, MOST_LOGIN_BYTES))
        token = self.cookie(request, LOGIN_COOKIE)
        self._check_form(request, token, form)
        return await login.log_in(self, request, form, self.session(request))

    async def _log_out(self, request: Request) -> Response:
        form = Form.read(await self._body(request, MOST_LOGIN_BYTES))
        session = self.session(request)
        if session is not None:
            self._check_form(request, session.token, form)
            await run_in_threadpool(self.sessions.end, session)
        answer = RedirectResponse(address(request, "/login", {}), status_code=303)
        self.set_cookie(request, answer, COOKIE, None)
        return answer

    async def _alive(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, request: Request) -> Response:
        return await run_in_threadpool(self._figures.ready, request)

    async def _metrics(self, request: Request) -> Response:
        if not self._figures.allowed(request):
            return PlainTextResponse(
                "a token is needed: Authorization: Bearer ...\n",
                status_code=401,
                headers={"www-authenticate": "Bearer"},
            )
        return await run_in_threadpool(self._figures.text, request)

    def close(self) -> None:
        """End all sessions, and close the connections of /metrics."""
        super().close()
        self._figures.close()

    # -- requests --------------------------------------------------------------------

    def _check_form(self, request: Request, token: str | None, form: Form) -> None:
        """Refuse a form that another site made, or that belongs to a session that is over."""
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise HTTPException(403, "The form came from another site.")
        if token is None or not self.signer.csrf_fits(token, form.get("csrf")):
            raise HTTPException(403, "The form is out of date. Go back, reload the page, and try again.")

    async def _body(self, request: Request, most: int) -> str:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/x-www-form-urlencoded":
            raise HTTPException(415, "Send a form.")
        try:
            return await asyncio.wait_for(_read(request, most), BODY_TIMEOUT)
        except (asyncio.TimeoutError, ClientDisconnect):
            raise HTTPException(408, "The form did not arrive in time.") from None
        except UnicodeDecodeError:
            raise HTTPException(400, "The form is not in URL encoding.") from None


# Why somebody has to log in
_WHY = {
    "changed": "The password or the right to log in of this role has changed: log in again.",
    "ended": "Nothing was changed: the session has ended. Log in and try again.",
}
_STATUS: dict[type[PgqueError], int] = {
    PgqueQueueNotFoundError: 404,
    PgqueConsumerNotFoundError: 404,
    PgqueMessageNotFoundError: 404,
    PgquePermissionDeniedError: 403,
    PgqueConnectionError: 503,
    PgqueBadArgumentError: 400,
}


async def _read(request: Request, most: int) -> str:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise HTTPException(413, f"The form is larger than {most:,} bytes.")
    return body.decode("ascii")


def _here(request: Request) -> str:
    path: str = request.scope["pgque.path"]
    return f"{path}?{request.url.query}" if request.url.query else path


def _static(name: str, kind: str) -> ASGIApp:
    body = (files(__package__) / "static" / name).read_bytes()

    async def endpoint(request: Request) -> Response:
        return Response(body, media_type=kind, headers={"cache-control": "max-age=300"})

    return endpoint  # type: ignore[return-value]
