"""Install each package of build/dist and use it, away from the repository.

python -m support.try_packages

It installs Debian's packages and puts files beside those of Debian's server, so it needs root, and removes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

import psycopg

from pgque import embedded
from support.servers import REPOSITORY

DIST = REPOSITORY / "build" / "dist"
# Not `pgxn`: it starts scripts whose first line names the environment in which pip built its cached wheel.
PGXN = REPOSITORY / ".venv" / "dist" / "bin" / "pgxnclient"
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
# What each extra must bring, by the modules of pgque that need it.
EXTRAS = {
    "binary": "psycopg, psycopg_binary",
    "celery": "celery, pgque.celery",
    "dev": "mypy, pytest",
    "django": "django_tasks, pgque.django.operations",
    "embedded": "pgque.embedded",
    "metrics": "pgque.exporter",
    "otel": "opentelemetry.trace",
    "spark": "pyarrow, adbc_driver_postgresql, pgque.spark",
    "top": "pgque.top.app",
    "typed": "pydantic",
    "web": "pgque.web.site, uvicorn",
}
USE = """
import sys
import pgque
from pgque import embedded
from pgque.ops.install import install
with embedded.start() as server:
    install(server.dsn)
    client = pgque.connect(server.dsn, autocommit=True)
    client.admin.create_queue("q")
    client.subscribe("q", "c")
    sent = client.send("q", {"id": 1})
    client.force_next_tick("q")
    client.ticker("q")
    [message] = client.receive("q", "c")
    assert (message.msg_id, message.value) == (sent, {"id": 1}), message
    client.ack(message.batch_id)
    assert pgque.__file__.startswith(sys.prefix), pgque.__file__
"""


def done(text: str) -> None:
    """Report a success in the words of the CI's summary."""
    print(f"  ok    {text}", flush=True)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program and return its output; end with that output if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    found = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {found.returncode}:\n{found.stdout}")
    return found.stdout


def the_only(pattern: str) -> Path:
    """Return the file of build/dist that a pattern names."""
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"build/dist: {len(found)} files {pattern}")
    return found[0]


def try_wheel(work: Path) -> None:
    """Install the wheel with each extra alone into an environment of its own, and use it."""
    wheel = the_only("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        extras = Parser().parsestr(archive.read(metadata).decode()).get_all("Provides-Extra", [])
    if set(extras) != set(EXTRAS):
        raise SystemExit(f"extras that are not tried: {set(extras) ^ set(EXTRAS)}")
    for extra, modules in EXTRAS.items():
        python = work / extra / "bin" / "python"
        run(sys.executable, "-m", "venv", "--without-pip", work / extra)
        run(sys.executable, *PIP, "--python", python, "install", "--no-compile", f"{wheel}[{extra}]")
        run(python, "-c", f"import pgque, {modules}", cwd=work)
        done(f"wheel with [{extra}]: import {modules}")
    run(work / "embedded" / "bin" / "python", "-c", USE, cwd=work)
    done("wheel: install, send, receive, acknowledge")


def try_extension(bindir: Path, how: str, *create: str | Path) -> None:
    """Create the extension in a new cluster, by SQL or by a program that gets the server's address."""
    with embedded.start(bindir) as server, psycopg.connect(server.dsn, autocommit=True) as connection:
        if create:
            parts = psycopg.conninfo.conninfo_to_dict(server.tcp_dsn)
            os.environ.update(PGPASSWORD=str(parts["password"]), PGSSLMODE="disable")
            where = (
                f"--host={parts['host']}",
                f"--port={parts['port']}",
                f"--username={parts['user']}",
                f"--dbname={parts['dbname']}",
            )
            run(*create[:-1], *where, create[-1])
        else:
            connection.execute("create extension pgque")
        row = connection.execute(
            "select e.extversion = pgque.version(), pgque.create_queue('q'), pgque.send('q', 'x'::text)"
            " from pg_catalog.pg_extension as e where e.extname = 'pgque'"
        ).fetchone()
        if row != (True, 1, 1):
            raise SystemExit(f"{how}: {row}")
        connection.execute("drop extension pgque cascade")
        done(f"{how}: create extension, send, drop extension on PostgreSQL {server.version}")


def try_server_packages() -> None:
    """Install the PGXN zip and the Debian package into Debian's server, one after the other, and remove them."""
    bindirs = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if not bindirs:
        raise SystemExit("no server of Debian in /usr/lib/postgresql")
    bindir = bindirs[-1]
    config = bindir / "pg_config"
    control = Path(run(config, "--sharedir").strip()) / "extension" / "pgque.control"
    if control.exists():
        raise SystemExit(f"pgque is installed in this server already: {control}")

    archive = the_only("*.zip")
    run(PGXN, "install", "--yes", "--pg_config", config, archive)
    try:
        try_extension(bindir, "PGXN zip", PGXN, "load", "--yes", "--pg_config", config, archive)
    finally:
        run(PGXN, "uninstall", "--yes", "--pg_config", config, archive)
    if control.exists():
        raise SystemExit(f"pgxn uninstall left {control}")

    name = f"postgresql-{bindir.parent.name}-pgque"
    run("dpkg", "--install", the_only(f"{name}_*.deb"))
    try:
        try_extension(bindir, "Debian package")
    finally:
        run("dpkg", "--remove", name)
    if control.exists():
        raise SystemExit(f"dpkg --remove left {control}")


def main() -> int:
    """Try all packages but the image, which tests/image tries."""
    # Programs run there, which a folder in memory may not allow.
    with tempfile.TemporaryDirectory(prefix="pgque-packages-", dir="/tmp") as work:
        try_wheel(Path(work))
    try_server_packages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
