"""Where the demo runs, and what drives the ticker there."""

from __future__ import annotations

import dataclasses
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import psycopg
from rich.console import Console

from ..cli.common import visible
from ..errors import PgqueError, PgqueNoSchedulerError
from ..ops import embedded
from ..twins.client import PgqueClient, connect

STARTED = 90.0  # seconds to wait for the ticker
IMAGE = "pgque"


@dataclasses.dataclass(slots=True)
class Place:
    """A server for the demo: how to reach it, what to call it, and what is left to do when it stays up."""

    dsn: str
    title: str
    psql: str = "psql"
    stop_hint: str = ""
    tcp: str = (
        ""  # where it asks for a password, without user and password; empty for a server that was given
    )


@contextmanager
def find_place(dsn: str, server: str, keep: bool, console: Console) -> Iterator[Place]:
    if dsn or server == "dsn":
        yield Place(dsn, "the given server")
    elif server == "docker":
        with _docker(keep, console) as place:
            yield place
    else:
        with _own_server(server, keep, console) as place:
            yield place


@contextmanager
def _own_server(kind: str, keep: bool, console: Console) -> Iterator[Place]:
    running: embedded.Server | None = None
    for prefer in ("local", "embedded") if kind == "auto" else (kind,):
        try:
            binaries = embedded.find_server(prefer)
            preload = ("pg_cron",) if binaries.has_extension("pg_cron") else ()
            console.print(f"Starting PostgreSQL from {binaries.bindir} …", soft_wrap=True)
            running = embedded.start(binaries.bindir, preload=preload, keep=keep)
            break
        except embedded.EmbeddedServerError as error:
            if prefer == "embedded" or kind != "auto":
                raise
            console.print(f"No local server: {visible(str(error).splitlines()[0])}")
    if running is None:
        raise embedded.EmbeddedServerError("no server")
    psql = running.bindir / "psql"
    try:
        yield Place(
            running.dsn,
            f"PostgreSQL {running.version}, {running.kind}",
            str(psql) if psql.exists() else "psql",
            f"kill -INT {running.pid}; sleep 2; rm -rf {shlex.quote(str(running.socket_dir))}",
            f"host=127.0.0.1 port={running.port} dbname=postgres",
        )
    except BaseException:
        running.stop("immediate")
        raise
    if not keep:
        running.stop()


@contextmanager
def _docker(keep: bool, console: Console) -> Iterator[Place]:
    def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(["docker", *arguments], text=True, capture_output=True, check=False)
        except OSError as error:
            raise embedded.EmbeddedServerError(f"docker can not be run: {error}") from error
        if check and done.returncode:
            raise embedded.EmbeddedServerError(f"docker {arguments[0]}: {done.stderr.strip()[-2000:]}")
        return done

    if docker("image", "inspect", IMAGE, check=False).returncode:
        folder = next(
            (p for p in (Path.cwd(), *Path(__file__).resolve().parents) if (p / "Dockerfile").exists()), None
        )
        if folder is None:
            raise embedded.EmbeddedServerError(
                f"there is no image {IMAGE!r}, and no Dockerfile to build it from"
            )
        console.print(f"Building the image {IMAGE} …")
        docker("build", "-t", IMAGE, str(folder))
    console.print(f"Starting the image {IMAGE} …")
    password = secrets.token_hex(8)
    name = docker(
        "run", "-d", "-e", f"POSTGRES_PASSWORD={password}", "-p", "127.0.0.1::5432", IMAGE
    ).stdout.strip()
    try:
        port = docker("port", name, "5432/tcp").stdout.split()[0].rpartition(":")[2]
        dsn = f"host=127.0.0.1 port={port} user=postgres dbname=postgres password={password}"
        _wait_for(dsn)
        yield Place(
            dsn,
            f"Docker image {IMAGE}",
            stop_hint=f"docker rm -fv {name[:12]}",
            tcp=f"host=127.0.0.1 port={port} dbname=postgres",
        )
    except BaseException:
        docker("rm", "-f", "-v", name, check=False)
        raise
    if not keep:
        docker("rm", "-f", "-v", name, check=False)


def _wait_for(dsn: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(dsn, connect_timeout=5, prepare_threshold=None).close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class Driver:
    """Whatever runs the ticker: pg_cron in the server, or `pgque ticker` beside it."""

    def __init__(self, dsn: str, keep: bool, console: Console) -> None:
        self._console = console
        self._process: subprocess.Popen[bytes] | None = None
        self._dsn = dsn
        self._keep = keep
        self.title = "pg_cron"

    def __enter__(self) -> Driver:
        with connect(self._dsn, autocommit=True) as client:
            if self._ticking(client):
                if not any(
                    row.component == "scheduler" and row.status == "scheduled"
                    for row in client.monitor.status()
                ):
                    self.title = "the ticker that runs there already"
                return self
            try:
                with suppress(psycopg.Error):
                    client.conn.execute("create extension if not exists pg_cron")
                client.admin.start()
                self._wait(client)
                return self
            except PgqueNoSchedulerError:
                pass
            self._start_process()
            self._wait(client)
        return self

    @staticmethod
    def _ticking(client: PgqueClient) -> bool:
        return any(row.component == "ticker" and row.status == "running" for row in client.monitor.status())

    def _wait(self, client: PgqueClient) -> None:
        """Wait until the ticker runs; a pg_cron older than 1.5 starts its jobs at the full minute."""
        began, told = time.monotonic(), False
        while not self._ticking(client):
            waited = time.monotonic() - began
            if waited > STARTED:
                raise PgqueError(f"{self.title} did not start to tick within {STARTED:.0f} seconds")
            if waited > 2 and not told:
                told = True
                self._console.print(f"Waiting for {self.title}, which may start at the full minute only …")
            time.sleep(0.05)

    def _start_process(self) -> None:
        self.title = "pgque ticker"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pgque.cli", "ticker", "--quiet", "--dsn", self._dsn],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if self._keep else None,
            start_new_session=True,
        )

    @property
    def stop_hint(self) -> str:
        return f"kill {self._process.pid}" if self._process is not None else ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and not (self._keep and error is None):
            end(self._process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that the demo started."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
