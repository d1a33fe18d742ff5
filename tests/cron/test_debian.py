"""pg_cron on a server as Debian's packages set it up: over TCP it asks for a password, which pg_cron has not."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgque import embedded
from support import servers

from .conftest import DATABASE

pytestmark = pytest.mark.pg_cron

WaitUntil = Callable[..., None]

# What pg_createcluster of Debian 12 and 13 writes, without its comments.
DEBIAN_HBA = """\
local   all             postgres                                peer
local   all             all                                     peer
host    all             all             127.0.0.1/32            scram-sha-256
host    all             all             ::1/128                 scram-sha-256
local   replication     all                                     peer
host    replication     all             127.0.0.1/32            scram-sha-256
host    replication     all             ::1/128                 scram-sha-256
"""


@dataclass(frozen=True, slots=True)
class Debian:
    """A server with Debian's pg_hba.conf, and the database of pg_cron and pgque in it."""

    process: embedded.Server
    owner: str
    account: str  # of the server in the operating system, and a superuser's name
    home: Path  # of that account

    def connect(self, role: str | None = None, **path: str) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a new autocommit connection of a role, the owner's if none is named, by its password."""
        dsn = make_conninfo(self.process.tcp_dsn, dbname=DATABASE, user=role or self.owner, **path)
        return psycopg.connect(dsn, autocommit=True)

    def ways_in(self) -> set[tuple[str, str]]:
        """Return the roles that can log in, and through what."""
        found = set()
        for role, path in product((self.owner, self.account), ("127.0.0.1", str(self.process.socket_dir))):
            with contextlib.suppress(psycopg.OperationalError), self.connect(role, host=path):
                found.add((role, path))
        return found

    def status(self, component: str) -> tuple[str, str]:
        """Return status and detail of a component."""
        with self.connect() as connection:
            row = connection.execute(
                "select status, detail from pgque.status() where component = %s", [component]
            ).fetchone()
        assert row is not None
        return row

    def begin_jobs(self) -> None:
        """Restart, after which every version of pg_cron begins our jobs at once."""
        self.process.restart()

    def follow(self, advice: str) -> None:
        """Do what the advice says, word by word."""
        entry = re.search(r'"([^"]*):PASSWORD"', advice)
        if entry:
            passwords = self.home / ".pgpass"
            passwords.write_text(f"{entry[1]}:{self.process.password}\n")
            passwords.chmod(0o600)
            shutil.chown(passwords, self.account)
        for pattern in (r"alter system set [^;]*", r"select pgque[^;]*"):
            with self.connect(self.account) as connection:
                for statement in re.findall(pattern, advice):
                    connection.execute(statement.encode())
            self.process.restart()


@pytest.fixture(params=["ordinary"])
def debian(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Debian]:
    """A server where an ordinary role owns pgque, as README has it, or with "account" a superuser."""
    binaries = servers.cron_binaries()
    if binaries is None:
        pytest.skip("no server with pg_cron")
    settings = {**servers.TEST_SETTINGS, "timezone": "UTC", "cron.host": "localhost"}
    settings["cron.database_name"] = DATABASE
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgque-home-")))
        monkeypatch.setenv("HOME", str(home))
        process = stack.enter_context(
            embedded.start(
                binaries.bindir, preload=["pg_cron"], settings={**settings, "max_worker_processes": "20"}
            )
        )
        # Peer knows the role of the server's own account; on Debian that is postgres.
        account = process.data_dir.owner()
        shutil.chown(home, account)
        owner = account if request.param == "account" else "boss"
        with psycopg.connect(process.dsn, autocommit=True) as admin:
            for role, options in ((account, "superuser"), ("boss", "createdb createrole")):
                if role != "postgres":
                    admin.execute(
                        sql.SQL("create role {} login password {} " + options).format(
                            sql.Identifier(role), sql.Literal(process.password)
                        )
                    )
        # Whoever administers this server lets boss use its password through the socket, too.
        (process.data_dir / "pg_hba.conf").write_text("local all boss scram-sha-256\n" + DEBIAN_HBA)
        process.restart()
        server = Debian(process, owner, account, home)
        with psycopg.connect(make_conninfo(process.tcp_dsn, user=owner), autocommit=True) as creator:
            creator.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))
        with server.connect() as install, install.transaction():
            install.execute(servers.SQL_FILE.read_bytes())
        with server.connect(account) as admin:
            admin.execute("create extension pg_cron")
        if owner != account:
            with server.connect() as connection, pytest.raises(psycopg.Error) as caught:
                connection.execute("select pgque.start()")
            with server.connect(account) as admin:
                admin.execute((caught.value.diag.message_hint or "").encode())
        yield server


def fails(debian: Debian, wait_until: WaitUntil) -> str:
    """Start, see that nothing ticks, and return the remedy."""
    told: list[str] = []
    with debian.connect() as connection:
        connection.add_notice_handler(lambda notice: told.append(notice.message_hint or ""))
        assert connection.execute("select pgque.start()").fetchone()
    assert any("pgque.status()" in hint for hint in told)
    debian.begin_jobs()
    wait_until(lambda: "the last run failed" in debian.status("scheduler")[1], "the failed run", timeout=70)
    assert debian.status("ticker")[0] == "stopped"
    with debian.connect() as connection:
        row = connection.execute(
            "select status, detail, advice from pgque.health() where check_name = 'ticker'"
        ).fetchone()
    assert row is not None
    assert row[0] == "fail"
    assert re.fullmatch(
        r"no loop runs: the last run failed( at [^:]*:\d+:\d+\+00)?: connection failed", row[1]
    )
    assert row[2] in debian.status("scheduler")[1]
    return str(row[2])


def ticks(debian: Debian, wait_until: WaitUntil) -> None:
    """Wait until the ticker runs; then status() and health() know of no failure."""
    debian.begin_jobs()
    wait_until(lambda: debian.status("ticker")[0] == "running", "the ticker", timeout=70)
    assert debian.status("scheduler")[0] == "scheduled"
    with debian.connect() as connection:
        check = "select status, advice from pgque.health() where check_name = 'ticker'"
        # The queues are late until each has its first tick.
        wait_until(lambda: connection.execute(check).fetchone() == ("ok", None), "health", timeout=20)


@pytest.mark.parametrize(
    ("debian", "host", "remedy"),
    [
        ("ordinary", "socket", "workers"),
        ("ordinary", "socket", "password"),
        ("ordinary", "localhost", "password"),
        ("account", "localhost", "workers"),
    ],
    indirect=["debian"],
)
def test_status_and_health_name_the_failed_run_and_a_remedy_that_works_and_takes_no_login_away(
    debian: Debian, wait_until: WaitUntil, host: str, remedy: str
) -> None:
    if host == "socket":
        with debian.connect(debian.account) as connection:
            connection.execute(
                sql.SQL("alter system set cron.host = {}").format(sql.Literal(str(debian.process.socket_dir)))
            )
        debian.process.restart()
    before = debian.ways_in()
    timeout = sql.SQL("alter role {} set statement_timeout = {}")
    with debian.connect(debian.account) as connection:
        # It would end each run early, but there is none.
        connection.execute(timeout.format(sql.Identifier(debian.owner), sql.Literal("5s")))
    advice = fails(debian, wait_until)
    with debian.connect(debian.account) as connection:
        connection.execute(timeout.format(sql.Identifier(debian.owner), sql.Literal("0")))
    workers, password = advice.split(" Or: ")
    debian.follow(workers if remedy == "workers" else password)
    ticks(debian, wait_until)
    assert debian.ways_in() == before
    assert before >= {(role, "127.0.0.1") for role in (debian.owner, debian.account)}


def test_the_settings_and_statements_of_the_page_make_it_tick(debian: Debian, wait_until: WaitUntil) -> None:
    text = (servers.REPOSITORY / "python" / "docs" / "ticker.md").read_text()
    section = text[text.index("## pg_cron") : text.index("## The program")]
    settings = dict(re.findall(r"^([\w.]+) = '?(.*?)'?$", section, re.MULTILINE))
    assert settings == {
        "shared_preload_libraries": "pg_cron",
        "cron.database_name": "mydb",
        "cron.use_background_workers": "on",
    }
    with debian.connect(debian.account) as connection:
        connection.execute("drop extension pg_cron")
        connection.execute("alter system set cron.use_background_workers = on")
    debian.process.restart()
    for line in section.splitlines():
        statements = re.findall(r"-c (?:'([^']*)'|\"((?:[^\"\\]|\\.)*)\")", line)
        with debian.connect(debian.account if "-u postgres" in line else None) as connection:
            for plain, quoted in statements:
                connection.execute(
                    (plain or quoted).replace("\\", "").replace("$USER", debian.owner).encode()
                )
    ticks(debian, wait_until)


def test_the_failed_connections_of_a_bad_night_are_cleared_away(
    debian: Debian, wait_until: WaitUntil
) -> None:
    """They have no time, so their age says nothing."""
    fails(debian, wait_until)
    with debian.connect(debian.account) as connection:
        connection.execute(
            "insert into cron.job_run_details (jobid, username, status)"
            " select j.jobid, j.username, 'failed' from cron.job j, generate_series(1, 3000)"
        )
        connection.execute("select pgque.maint()")
        left = connection.execute("select count(*) from cron.job_run_details").fetchone()
    assert left is not None
    assert left[0] <= 1010  # each second another one


@pytest.mark.slow  # waits for the full minute, as pg_cron 1.4 does
@pytest.mark.parametrize("works", [False, True], ids=["connection refused", "works"])
def test_pgque_start_waits_for_the_first_tick_and_prints_what_it_found(debian: Debian, works: bool) -> None:
    if works:
        with debian.connect(debian.account) as connection:
            connection.execute("alter system set cron.use_background_workers = on")
        debian.process.restart()
    command = [
        sys.executable,
        "-m",
        "pgque.cli",
        "start",
        "--wait",
        "75s",
        "--dsn",
        make_conninfo(debian.process.tcp_dsn, dbname=DATABASE, user=debian.owner),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == (0 if works else 3), said
    if works:
        assert "ticking" in done.stdout
    else:
        assert re.search(r"connection\s+failed", said)
        assert "cron.use_background_workers" in said
