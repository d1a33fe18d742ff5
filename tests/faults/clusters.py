"""Clusters besides the one of the tests: copies of one, and servers that have the extension's files."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest

from pgque import embedded
from support import servers
from support.servers import TestServer

SETTINGS: Mapping[str, str] = {
    "fsync": "off",
    "shared_buffers": "32MB",
    "max_prepared_transactions": "5",
}


def programs_of(server: TestServer, *names: str) -> Path:
    """Return the folder of the server's programs; skip where it has not all of these, or they do not run."""
    if server.process is None:
        pytest.skip("the server was not started from binaries")
    bindir = server.process.binaries.bindir
    missing = [name for name in names if not runs(bindir / name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} in {bindir}")
    return bindir


def runs(program: Path) -> bool:
    """Say whether there is such a program, and the machine has the libraries it needs."""
    try:
        return subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def started(
    bindir: Path, data_dir: Path | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[embedded.Server]:
    """Run a server, with the cluster in `data_dir` if there is one."""
    with embedded.start(bindir, data_dir=data_dir, settings={**SETTINGS, **(settings or {})}) as server:
        yield server


@contextmanager
def folder_for(server: embedded.Server) -> Iterator[Path]:
    """A folder that the account of this server owns; deleted afterwards."""
    owner = server.data_dir.stat()
    folder = Path(tempfile.mkdtemp(prefix="pgque-", dir=server.socket_dir.parent))
    os.chown(folder, owner.st_uid, owner.st_gid)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, *command: str | Path) -> str:
    """Run a program in a folder, as the folder's owner; return what it printed."""
    owner = folder.stat()
    is_root = os.geteuid() == 0
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_", "LANG"))},
            "LC_ALL": "C",
        },
        user=owner.st_uid if is_root else None,
        group=owner.st_gid if is_root else None,
        extra_groups=[] if is_root else None,
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-4000:]}"
    return done.stdout


def base_backup(server: embedded.Server, folder: Path, *options: str) -> Path:
    """Take a base backup into the folder; return the data directory, named so that CI finds what it left."""
    data = folder / "data"
    run(
        folder,
        server.bindir / "pg_basebackup",
        "-D",
        data,
        "-c",
        "fast",
        "--no-sync",
        *options,
        "-d",
        server.dsn,
    )
    return data


def until(condition: Callable[[], object], what: str, timeout: float = 30) -> None:
    """Ask until it is so; fail if it does not become so."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.01)


def new_database(dsn: str, name: str, how: str, version: str | None = None) -> None:
    """Create a database with pgque, from the file or as an extension, that of another version too, or without."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"create database {name} template template0".encode())
    if how == "none":
        return
    with psycopg.connect(psycopg.conninfo.make_conninfo(dsn, dbname=name)) as conn:
        extension = "create extension pgque" + (f" version '{version}'" if version else "")
        conn.execute(extension.encode() if how == "extension" else servers.SQL_FILE.read_bytes())


@contextmanager
def with_extension(bindir: Path, *previous: str) -> Iterator[Path]:
    """A copy of a server that has the extension's files, so that nothing is written into the installed one.

    The server finds its other files by the way from its programs to them, so only the programs are copied.
    With `previous` it has these versions too, and the way from each to the next.
    """
    if not runs(bindir / "pg_config"):
        pytest.skip(f"no pg_config in {bindir}: where its extensions are is not known")
    said = run(Path("/"), bindir / "pg_config", "--bindir", "--sharedir", "--pkglibdir").split()
    programs, share, libraries = (Path(line).resolve() for line in said)
    top = Path(os.path.commonpath([programs, share, libraries]))
    copy = Path(tempfile.mkdtemp(prefix="pgque-"))
    try:
        copy.chmod(0o755)
        shutil.copytree(programs, copy / programs.relative_to(top), symlinks=False)
        for folder in (libraries, share, share / "extension"):
            target = copy / folder.relative_to(top)
            target.mkdir(parents=True, exist_ok=True)
            for item in folder.iterdir():
                if item != share / "extension":
                    (target / item.name).symlink_to(item)
        control = servers.SQL_FILE.with_name("pgque.control")
        found = re.search(r"^default_version *= *'([^']*)'", control.read_text(), re.MULTILINE)
        assert found is not None
        extensions = copy / share.relative_to(top) / "extension"
        shutil.copy(control, extensions)
        shutil.copy(servers.SQL_FILE, extensions / f"pgque--{found[1]}.sql")
        for old, new in pairwise((*previous, found[1])):
            packed = Path(__file__).parents[1] / "sql" / "previous" / f"pgque-{old}.sql.xz"
            (extensions / f"pgque--{old}.sql").write_bytes(lzma.decompress(packed.read_bytes()))
            (extensions / f"pgque--{old}--{new}.sql").symlink_to(f"pgque--{new}.sql")
        if not runs(copy / programs.relative_to(top) / "initdb"):
            pytest.skip("programs of a wheel find their libraries only where they were installed")
        yield copy / programs.relative_to(top)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
