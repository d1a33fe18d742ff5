"""The commands for monitoring systems: figures as text or over HTTP, and files of dashboards and alerts."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from contextlib import closing
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import FrameType

import click

from ..errors import PgqueError, is_permanent, one_line
from ..ops import monitoring as files
from .common import (
    Address,
    command_timeout,
    connect,
    dsn_option,
    echo,
    json_option,
    parsed_address,
    print_rows,
)


@click.command()
@dsn_option
@json_option
@click.option("--prometheus", is_flag=True, help="Print the text that Prometheus reads.")
@click.option(
    "--serve",
    metavar="HOST:PORT",
    callback=parsed_address,
    help="Serve the figures over HTTP, at /metrics, until SIGTERM or SIGINT.",
)
@click.option(
    "--token",
    envvar="PGQUE_METRICS_TOKEN",
    metavar="TEXT",
    help="Require this bearer token at /metrics [default: PGQUE_METRICS_TOKEN].",
)
@click.argument("queue", required=False)
def metrics(
    dsn: str, as_json: bool, prometheus: bool, serve: Address | None, token: str | None, queue: str | None
) -> None:
    """Show the figures of all queues, or of one: depth, leased messages, dead letters and so on.

    With --serve or --prometheus they are for Prometheus, with the checks of `pgque health`. The server also
    answers /healthz, and /readyz while the database can be read.
    """
    if prometheus or serve is not None:
        if queue is not None or as_json:
            raise click.UsageError("--serve and --prometheus are for all queues, and without --json")
        _for_prometheus(dsn, serve, token)
        return
    with connect(dsn) as client:
        rows = [row for row in client.monitor.metrics() if queue is None or row.queue == queue]
    print_rows("Metrics", rows, as_json, ("metric", "value", "queue", "consumer"))


def _for_prometheus(dsn: str, address: Address | None, token: str | None) -> None:
    try:
        from ..ops import exporter as exporters
    except ImportError as error:
        raise PgqueError(
            f"prometheus-client is missing: {error}",
            hint='pip install "./python[metrics]" (in the repository of pgque)',
        ) from error
    if address is None:
        echo(exporters.render(dsn, command_timeout=command_timeout()).decode().removesuffix("\n"))
        return
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    with closing(exporters.Exporter(dsn, command_timeout=command_timeout())) as exporter:
        try:
            exporter.check()
        except PgqueError as error:
            if is_permanent(error):
                raise
            echo(f"pgque: the database cannot be read yet: {one_line(error)}", err=True)
        try:
            server = exporters.make_server(exporter, address.host, address.port, token=token or None)
        except OSError as error:
            raise PgqueError(
                f"cannot listen on {address}: {error.strerror or error}",
                hint="Name another address or port: --serve 127.0.0.1:9188",
            ) from error
        _serve(server, address)


def _serve(server: ThreadingHTTPServer, address: Address) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    echo(f"serving http://{address._replace(port=server.server_port)}/metrics", err=True)
    stop.wait()
    server.shutdown()
    server.server_close()


@click.group()
def monitoring() -> None:
    """Export dashboards for Grafana, alert rules for Prometheus, and their configuration."""


@monitoring.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def export(folder: Path) -> None:
    """Write the files into a folder; files of the same names are replaced."""
    for path in files.export(folder):
        echo(f"{path}: {files.FILES[path.name]}")


COMMANDS: list[click.Command] = [metrics, monitoring]
