"""pg_cron on a server as Debian's packages set it up: over TCP it asks for a password, which pg_cron has not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    role: str

    @property
    def dsn(self) -> str:
        """Return how somebody who has a password comes in."""
        return make_conninfo(self.process.tcp_dsn, dbname=DATABASE, user=self.role)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a new autocommit connection."""
        return psycopg.connect(self.dsn, autocommit=True)

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


@pytest.fixture
def debian() -> Iterator[Debian]:
    binaries = servers.cron_binaries()
    if binaries is None:
        pytest.skip("no server with pg_cron")
    settings = {**servers.TEST_SETTINGS, "timezone": "UTC", "cron.host": "localhost"}
    settings["cron.database_name"] = DATABASE
    with embedded.start(
        binaries.bindir, preload=["pg_cron"], settings={**settings, "max_worker_processes": "20"}
    ) as process:
        # Peer knows the role of the server's own user; on Debian that is postgres.
        user = process.data_dir.owner()
        with psycopg.connect(process.dsn, autocommit=True) as admin:
            if user != "postgres":
                admin.execute(
                    sql.SQL("create role {} superuser login password {}").format(
                        sql.Identifier(user), sql.Literal(process.password)
                    )
                )
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))
        (process.data_dir / "pg_hba.conf").write_text(DEBIAN_HBA)
        process.restart()
        server = Debian(process, user)
        with server.connect() as connection:
            connection.execute("create extension pg_cron")
        with psycopg.connect(server.dsn) as install:
            install.execute(servers.SQL_FILE.read_bytes())
        yield server


def fails(debian: Debian, wait_until: WaitUntil) -> str:
    """Start, see that nothing ticks, and return the remedy."""
    told: list[str] = []
    with debian.connect() as connection:
        connection.add_notice_handler(lambda notice: told.append(notice.message_hint or ""))
        assert connection.execute("select pgque.start()").fetchone()
    assert any("pgque.status()" in hint for hint in told)
    debian.begin_jobs()
    wait_until(lambda: debian.status("scheduler")[0] == "failing", "the failed run", timeout=70)
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
        assert connection.execute(check).fetchone() == ("ok", None)


@pytest.mark.parametrize("remedy", ["socket", "workers"])
def test_status_and_health_name_the_failed_run_and_a_remedy_that_works(
    debian: Debian, wait_until: WaitUntil, remedy: str
) -> None:
    advice = fails(debian, wait_until)
    socket, workers = advice.split(" Or: ")
    chosen = socket if remedy == "socket" else workers
    with debian.connect() as connection:
        for statement in re.findall(r"alter system set [^;]*", chosen):
            connection.execute(statement.encode())
    debian.process.restart()
    with debian.connect() as connection:
        for statement in re.findall(r"select pgque[^;]*", chosen):
            connection.execute(statement.encode())
    ticks(debian, wait_until)


def test_the_settings_and_statements_of_the_page_make_it_tick(debian: Debian, wait_until: WaitUntil) -> None:
    text = (servers.REPOSITORY / "python" / "docs" / "ticker.md").read_text()
    section = text[text.index("## pg_cron") : text.index("## The program")]
    settings = dict(re.findall(r"^([\w.]+) = '(.*)'$", section, re.MULTILINE))
    assert settings == {
        "shared_preload_libraries": "pg_cron",
        "cron.database_name": "mydb",
        "cron.host": "/var/run/postgresql",
    }
    statements = re.findall(r"-c '([^']*)'", section)
    with debian.connect() as connection:
        connection.execute("drop extension pg_cron")
        connection.execute(
            sql.SQL("alter system set cron.host = {}").format(sql.Literal(str(debian.process.socket_dir)))
        )
    debian.process.restart()
    with debian.connect() as connection:
        for statement in statements:
            connection.execute(statement.encode())
    ticks(debian, wait_until)


def test_an_owner_whom_peer_does_not_know_is_told_the_two_lines_that_let_it_in(
    debian: Debian, wait_until: WaitUntil
) -> None:
    """The launcher comes through the socket as the server's own user, not as the owner of pgque."""
    with debian.connect() as connection:
        connection.execute("select pgque.uninstall()")
        connection.execute(
            sql.SQL("create role app superuser login password {}").format(
                sql.Literal(debian.process.password)
            )
        )
        connection.execute(
            sql.SQL("alter system set cron.host = {}").format(sql.Literal(str(debian.process.socket_dir)))
        )
    app = Debian(debian.process, "app")
    with psycopg.connect(app.dsn) as install:
        install.execute(servers.SQL_FILE.read_bytes())
    debian.process.restart()
    advice = fails(app, wait_until)
    hba, ident = re.findall(r'"([^"]*)"', advice)
    for name, line in (
        ("pg_hba.conf", hba),
        ("pg_ident.conf", ident.replace(" postgres ", f" {debian.role} ")),
    ):
        path = debian.process.data_dir / name
        path.write_text(f"{line}\n{path.read_text()}")
    ticks(app, wait_until)


def test_the_failed_connections_of_a_bad_night_are_cleared_away(
    debian: Debian, wait_until: WaitUntil
) -> None:
    """They have no time, so their age says nothing."""
    fails(debian, wait_until)
    with debian.connect() as connection:
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
def test_pgque_start_waits_for_the_first_tick_and_says_what_it_found(debian: Debian, works: bool) -> None:
    if works:
        with debian.connect() as connection:
            connection.execute("alter system set cron.use_background_workers = on")
        debian.process.restart()
    command = [sys.executable, "-m", "pgque.cli", "start", "--wait", "75s", "--dsn", debian.dsn]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == (0 if works else 3), said
    if works:
        assert "ticking" in done.stdout
    else:
        assert re.search(r"connection\s+failed", said)
        assert "cron.host" in said
