"""The command that runs a worker."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from ..errors import PgqueError
from ..integrations import prometheus
from ..runtime.liveness import Liveness
from ..runtime.runtime import AsyncRuntime
from ..twins.runtime import Runtime
from .common import EXIT_CODES, Address, dsn_option, parsed_address

log = logging.getLogger("pgque")


@click.command(epilog=EXIT_CODES)
@dsn_option
@click.argument("name", metavar="MODULE:WORKER")
@click.option(
    "--liveness-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Touch this file every second while the worker is alive and the database answers.",
)
@click.option("--until-idle", is_flag=True, help="End when no message is left that can be received now.")
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    callback=parsed_address,
    help="Serve the figures of the handlers to Prometheus, at /metrics.",
)
@click.option("--quiet", is_flag=True, help="Print only warnings and errors.")
@click.pass_context
def work(
    ctx: click.Context,
    dsn: str,
    name: str,
    liveness_file: Path | None,
    until_idle: bool,
    metrics: Address | None,
    quiet: bool,
) -> None:
    """Run the worker or consumer of a module, such as myapp.jobs:worker, until SIGTERM or SIGINT.

    The module is found in the current folder, or as Python finds modules. A worker that was made with a
    connection string keeps it, unless --dsn is given. Under systemd the command reports that it is ready, and
    with WatchdogSec= that it is alive.
    """
    worker = _find(name)
    if not worker.dsn or ctx.get_parameter_source("dsn") is ParameterSource.COMMANDLINE:
        worker.dsn = dsn
    if liveness_file is not None:
        worker.liveness_file = liveness_file
    worker._liveness = Liveness(worker.liveness_file, with_systemd=True)
    logging.basicConfig(
        format="%(asctime)s %(message)s", level=logging.WARNING if quiet else logging.INFO, stream=sys.stderr
    )
    if metrics is not None:
        _serve(metrics)
    log.info(
        "%s: consumer %s of %s, %s handlers at a time",
        *(worker._title, worker.consumer, ", ".join(worker.queues), worker.concurrency),
    )
    if isinstance(worker, AsyncRuntime):
        asyncio.run(worker.run(until_idle=until_idle))
    else:
        worker.run(until_idle=until_idle)


def _serve(address: Address) -> None:
    try:
        prometheus.serve(*address)
    except ImportError as error:
        raise PgqueError(str(error)) from error
    except OSError as error:
        raise PgqueError(
            f"cannot listen on {address}: {error.strerror or error}",
            hint="Name another address or port: --metrics 127.0.0.1:9189",
        ) from error


def _find(name: str) -> Runtime | AsyncRuntime:
    """Return the worker or consumer that a module holds. Raises click.BadParameter."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise click.BadParameter(f"{name!r} is no MODULE:WORKER, such as myapp.jobs:worker")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # one that the module imports
        raise click.BadParameter(f"there is no module {error.name!r} here") from None
    found = getattr(module, attribute, None)
    if not isinstance(found, Runtime | AsyncRuntime):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise click.BadParameter(f"{name} is {what}, not a Worker, a Consumer or an async one")
    return found


COMMANDS = [work]
