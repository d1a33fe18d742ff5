"""The web page of a demo that is kept, with a login made for it, and the messages that go on coming."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from psycopg import sql
from rich.console import Console

from ..twins.client import connect
from .servers import Place, end

ROLE = "pgque_demo"
PORT = 8811
NEEDED = ("starlette", "jinja2", "uvicorn")


class Page:
    """The command `pgque web` for the demo's own server, and a role that may log in to it.

    With `shown` false it does nothing. An error of the demo ends what was started; otherwise it stays up.
    """

    def __init__(self, place: Place, shown: bool, console: Console) -> None:
        self._place = place
        self._shown = shown
        self._console = console
        self._processes: list[subprocess.Popen[bytes]] = []
        self._password = secrets.token_hex(6)
        self.address = ""

    def __enter__(self) -> Page:
        if self._shown and self._place.tcp:
            if all(importlib.util.find_spec(name) for name in NEEDED):
                self._create_role()
                self._serve()
                self.tell()
            else:
                self._console.print("No web page: it needs pip install './python[web]'")
        return self

    def tell(self) -> None:
        """Print the address, and the login."""
        if self.address:
            self._console.print(f"The web page: {self.address}", soft_wrap=True)
            self._console.print(f"  log in as {ROLE}, password {self._password}", soft_wrap=True)

    def _create_role(self) -> None:
        with connect(self._place.dsn, autocommit=True) as client:
            client.conn.execute(
                sql.SQL("create role {} login password {} in role pgque_admin").format(
                    sql.Identifier(ROLE), sql.Literal(self._password)
                )
            )

    def _serve(self) -> None:
        """Listen on the port that the documents name, or on any other where it is taken."""
        for port in (PORT, 0):
            process = self._start("pgque.cli", "web", "--port", str(port), dsn=self._place.tcp)
            if process.stdout is not None:
                self.address = process.stdout.readline().decode().strip()
                process.stdout.close()
            if self.address:
                return
            end(self._processes.pop())
        self._console.print("The web page does not start: see what pgque web says.")

    def keep_sending(self, path: Path | None) -> None:
        """Go on with a message a second, handled by workers, until the process is ended."""
        self._start("pgque.demo.flow", *([] if path is None else [str(path)]), dsn=self._place.dsn)

    def _start(self, module: str, *arguments: str, dsn: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if module == "pgque.cli" else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PGQUE_DSN": dsn},
        )
        self._processes.append(process)
        return process

    @property
    def stop_hint(self) -> str:
        """The command that ends what goes on."""
        return f"kill {' '.join(str(each.pid) for each in self._processes)}" if self._processes else ""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for process in self._processes:
                end(process)
