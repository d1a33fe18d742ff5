"""The command that serves the web page."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path

import click

from .common import echo, is_loopback

MOST_CONNECTIONS = 1000  # of browsers at once; more get the answer 503
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--dsn",
    "dsns",
    multiple=True,
    metavar="DSN",
    help="Connection string or URL; repeat it for several databases. Only /metrics uses its user and"
    " password [default: PGQUE_DSN, then the PG* variables].",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8811, show_default=True, help="0: any free one."
)
@click.option("--path-prefix", default="", metavar="/PATH", help="Path below which a proxy serves the page.")
@click.option(
    "--max-connections",
    type=click.IntRange(min=2),
    metavar="N",
    help="Most connections of all sessions to each database; one role has at most half of them, or 2"
    " [default: an eighth of the server's max_connections].",
)
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--hide-payloads", is_flag=True, help="Show neither payloads nor headers.")
@click.option("--tls-cert", type=_FILE, help="Certificate, in PEM format, to serve https.")
@click.option("--tls-key", type=_FILE, help="Its key, in PEM format.")
@click.option(
    "--metrics-token-file",
    type=_FILE,
    help="File with the bearer token that /metrics requires [default: PGQUE_METRICS_TOKEN; without a token,"
    " /metrics answers only this machine].",
)
@click.option(
    "--insecure", is_flag=True, help="Listen beyond this machine without TLS, for example behind a proxy."
)
def web(
    dsns: tuple[str, ...],
    host: str,
    port: int,
    path_prefix: str,
    max_connections: int | None,
    read_only: bool,
    hide_payloads: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    metrics_token_file: Path | None,
    insecure: bool,
) -> None:
    """Serve the web page, until SIGTERM or SIGINT.

    Users log in as roles of the database, with the rights of these roles. Needs pgque[web].
    """
    token = _token(metrics_token_file)
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together")
    if not is_loopback(host) and tls_cert is None and not insecure:
        raise click.UsageError(
            f"{host} can be reached from other machines, and passwords would travel in the clear:"
            " give --tls-cert and --tls-key, or --insecure behind a proxy that has TLS"
        )
    from ..web import app

    site = app(
        dsns or "",
        path_prefix=path_prefix,
        read_only=read_only,
        hide_payloads=hide_payloads,
        metrics_token=token,
        max_connections=max_connections,
    )
    import uvicorn

    from ..web.protocol import REQUEST, Protocol

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)

    class Server(uvicorn.Server):
        """A server that prints its address once it can be opened."""

        async def startup(self, *args: object, **options: object) -> None:
            if tls_cert:  # asyncio waits a minute for a client that does not begin TLS, and counts it nowhere
                loop = asyncio.get_running_loop()
                loop.create_server = partial(  # type: ignore[method-assign]
                    loop.create_server, ssl_handshake_timeout=REQUEST
                )
            await super().startup(*args, **options)  # type: ignore[arg-type]
            if self.started:
                number = self.servers[0].sockets[0].getsockname()[1]
                shown = f"[{host}]" if ":" in host else host
                echo(f"http{'s' if tls_cert else ''}://{shown}:{number}{path_prefix}/")
                sys.stdout.flush()

    server = Server(
        uvicorn.Config(
            site,
            host=host,
            port=port,
            http=Protocol,
            ws="none",
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
            access_log=False,  # addresses have what people search for
            server_header=False,
            log_config=None,
            log_level="warning",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=3,
        )
    )
    server.run()
    if not server.started:
        sys.exit(1)


def _token(file: Path | None) -> str:
    """Return the token of a file, which is no secret to other processes as an option is."""
    if file is None:
        return os.environ.get("PGQUE_METRICS_TOKEN", "")
    token = file.read_text().strip()
    if not token.isascii() or not token or not token.isprintable():
        raise click.UsageError(f"{file} has no token: write one line of ASCII characters into it")
    return token


COMMANDS: list[click.Command] = [web]
