"""The image's entry script and links, without an engine: with other paths, on a local server with pg_cron."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgque import embedded
from pgque.codec.encode import FLOOR, _numbers
from support import processes, servers

Wait = Callable[..., None]

# The script asks for PostgreSQL 17's locales; the socket is where the test can make it.
INITDB = """#!/bin/sh
for word do
  shift
  case $word in --locale-provider=* | --builtin-locale=*) [ {major} -ge 17 ] || continue ;; esac
  set -- "$@" "$word"
done
{bindir}/initdb "$@" && echo "unix_socket_directories = '{folder}/sockets'" >> "$2/postgresql.conf"
"""


class Image:
    """The script in a folder of its own, and what it starts."""

    def __init__(self, folder: Path, binaries: embedded.Binaries) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.scripts = folder / "initdb.d"
        for name, mode in (("bin", 0o755), ("initdb.d", 0o755), ("share", 0o755), ("sockets", 0o1777)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
        shutil.copy(servers.SQL_FILE, folder / "share")
        self._write("bin/initdb", INITDB.format(bindir=binaries.bindir, major=binaries.major, folder=folder))
        text = (servers.REPOSITORY / "tests" / "image" / "entrypoint.sh").read_text()
        for path, here in (
            ("/usr/share/pgque", "share"),
            ("/docker-entrypoint-initdb.d", "initdb.d"),
            ("/var/run/postgresql", "sockets"),
        ):
            assert path in text
            text = text.replace(path, str(folder / here))
        self._write("entrypoint.sh", text)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = str(probe.getsockname()[1])
        self._environment = {
            "PATH": f"{folder / 'bin'}:{binaries.bindir}:/usr/bin:/bin",
            "PGDATA": str(self.data),
            "PGHOST": str(folder / "sockets"),
            "PGPORT": self._port,
        }

    def _write(self, name: str, text: str, mode: int = 0o755) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(mode)

    def on_first_start(self, name: str, text: str, mode: int = 0o644) -> None:
        """Put a file into docker-entrypoint-initdb.d."""
        self._write(f"initdb.d/{name}", text, mode)

    def secret(self, name: str, text: str) -> str:
        """Return the path of a file that only its owner, here and in the image root, may read."""
        self._write(name, text, 0o400)
        return str(self.folder / name)

    def start(self, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.folder / "entrypoint.sh", "-c", "listen_addresses=127.0.0.1"],
            env=self._environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def refuses(self, **environment: str) -> str:
        """Start it and return what it says when it ends with an error."""
        with self.start(**environment) as run:
            output, _ = run.communicate(timeout=60)
        assert run.returncode == 1, output
        return output

    def connect(self, **how: str) -> psycopg.Connection[tuple[Any, ...]]:
        there = {"host": str(self.folder / "sockets"), "port": self._port}
        return psycopg.connect(psycopg.conninfo.make_conninfo("", **(there | how)), autocommit=True)


@pytest.fixture
def image() -> Iterator[Image]:
    binaries = servers.cron_binaries()
    if binaries is None:
        pytest.skip("no server with pg_cron")
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("no user postgres")
    with processes.own_folder() as folder:
        yield Image(folder, binaries)


def answers(image: Image, run: subprocess.Popen[str], **how: str) -> Callable[[], bool]:
    """Return a function that tells whether the server takes connections."""

    def asked() -> bool:
        assert run.poll() is None, run.communicate()[0]
        try:
            image.connect(**how).close()
        except psycopg.OperationalError:
            return False
        return True

    return asked


@pytest.mark.pg_cron
def test_the_first_start_reads_secrets_of_root_and_runs_every_kind_of_init_script(
    image: Image, wait_until: Wait
) -> None:
    insert = 'psql -q -U "$POSTGRES_USER" -d "$POSTGRES_DB" -c "insert into ran values (\'$0 $POSTGRES_PASSWORD\')"'
    image.on_first_start("1.sql", "create table ran (what text);")
    image.on_first_start("2.sh", f"#!/bin/bash\nset -u\n{insert}\nexit 0\n", 0o755)
    image.on_first_start("3.sh", f"{insert}\necho $not_set\nexit 0\n")
    image.on_first_start("4.sql", "insert into ran values ('after an exit');")
    there = {"host": "127.0.0.1", "user": "postgres", "dbname": "postgres"}
    with image.start(POSTGRES_PASSWORD_FILE=image.secret("password", "secret\n")) as run:
        wait_until(answers(image, run, **there, password="secret"), "the server", timeout=60)
        with image.connect(user="postgres", dbname="postgres") as connection:
            ran = [row[0] for row in connection.execute("select r.what from ran as r").fetchall()]
            assert ran == [
                f"{image.scripts}/2.sh secret",
                f"{image.folder}/entrypoint.sh secret",
                "after an exit",
            ]
            connection.execute("select pgque.create_queue('kept')")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            image.connect(**there, password="wrong")
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=30)
    assert not (image.data / "pgque.unfinished").exists()
    with image.start() as run:
        wait_until(answers(image, run, **there, password="secret"), "the server", timeout=60)
        with image.connect(user="postgres", dbname="postgres") as connection:
            assert connection.execute("select q.queue_name from pgque.queue as q").fetchone() == ("kept",)
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=30)


@pytest.mark.pg_cron
def test_a_value_and_a_file_for_one_setting_are_refused(image: Image) -> None:
    told = image.refuses(POSTGRES_PASSWORD="a", POSTGRES_PASSWORD_FILE=image.secret("password", "b"))
    assert "Both POSTGRES_PASSWORD and POSTGRES_PASSWORD_FILE are set" in told
    assert not (image.data / "PG_VERSION").exists()


@pytest.mark.pg_cron
def test_a_set_up_that_is_stopped_ends_at_once_and_does_not_count_as_done(
    image: Image, wait_until: Wait
) -> None:
    image.on_first_start("1.sh", f"#!/bin/sh\n: > {image.folder}/sockets/reached\nsleep 600\n", 0o755)
    with image.start(POSTGRES_PASSWORD="secret") as run:
        wait_until((image.folder / "sockets" / "reached").exists, "the init script", timeout=60)
        began = time.monotonic()
        run.terminate()
        run.communicate(timeout=30)
        assert time.monotonic() - began < 8
        assert run.returncode != 0
    wait_until(lambda: not processes.running(image.folder), "the end of all that was started")
    before = sorted(image.data.rglob("*"))
    told = image.refuses(POSTGRES_PASSWORD="secret")
    assert "cut off" in told
    assert "docker volume rm" in told
    assert sorted(image.data.rglob("*")) == before


@pytest.mark.pg_cron
def test_a_set_up_that_fails_gives_the_reason_and_does_not_count_as_done(
    image: Image, wait_until: Wait
) -> None:
    image.on_first_start("1.sql", "select 1/0;")
    with image.start(POSTGRES_PASSWORD="secret") as run:
        output, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "division by zero" in output
    wait_until(lambda: not processes.running(image.folder), "the end of all that was started")
    assert "cut off" in image.refuses(POSTGRES_PASSWORD="secret")


@pytest.mark.pg_cron
def test_an_initdb_that_was_cut_off_does_not_count_as_done(image: Image) -> None:
    image.data.mkdir()
    (image.data / "pgque.unfinished").mkdir()
    assert "cut off" in image.refuses(POSTGRES_PASSWORD="secret")


@pytest.mark.pg_cron
def test_files_that_are_no_cluster_are_left_alone(image: Image) -> None:
    image.data.mkdir()
    (image.data / "mine").write_text("kept")
    assert "not empty" in image.refuses(POSTGRES_PASSWORD="secret")
    assert [path.name for path in image.data.iterdir()] == ["mine"]


def test_packages_and_images_have_the_extension_and_an_update_from_every_earlier_version(
    tmp_path: Path,
) -> None:
    sql = servers.REPOSITORY / "sql"
    subprocess.run(["sh", sql / "files.sh", tmp_path], check=True)
    [version] = re.findall(r"default_version *= *'(.*)'", (tmp_path / "pgque.control").read_text())
    previous = servers.REPOSITORY / "tests" / "sql" / "previous"
    earlier = [path.name[len("pgque-") : -len(".sql.xz")] for path in previous.glob("pgque-*.sql.xz")]
    earlier = [each for each in earlier if _numbers(each) >= FLOOR]
    wanted = {f"pgque--{version}.sql", *(f"pgque--{each}--{version}.sql" for each in earlier)}
    assert wanted <= {path.name for path in tmp_path.glob("*.sql")}
    for path in tmp_path.glob("*.sql"):
        assert path.read_bytes() == servers.SQL_FILE.read_bytes()
