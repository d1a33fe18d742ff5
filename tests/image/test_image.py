"""The image of the Dockerfile: PostgreSQL 17 with pg_cron and pgque, ticking."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from testcontainers.community.postgres import PostgresContainer

from pgque import embedded
from support import images, processes, servers

# On a machine that has not built the images yet, the first test installs their packages.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def image() -> str:
    return images.build("database")


@pytest.fixture(scope="module")
def container(image: str) -> Iterator[PostgresContainer]:
    with PostgresContainer(
        image, username="app", password="it's secret", dbname="shop", driver=None
    ) as running:
        yield running


@pytest.fixture
def inside(container: PostgresContainer) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    with psycopg.connect(conninfo(container), autocommit=True) as connection:
        yield connection


def conninfo(container: PostgresContainer) -> str:
    return psycopg.conninfo.make_conninfo(
        host=container.get_container_host_ip(),
        port=str(container.get_exposed_port(5432)),
        user=container.username,
        password=container.password,
        dbname=container.dbname,
    )


def test_send_and_receive_work_at_once(
    inside: psycopg.Connection[tuple[Any, ...]], wait_until: Callable[..., None]
) -> None:
    """No install, no start, no manual tick: pg_cron in the image ticks."""
    inside.execute("select pgque.create_queue('orders')")
    inside.execute("select pgque.subscribe('orders', 'billing')")
    sent = inside.execute("""select pgque.send('orders', '{"id": 1}'::jsonb)""").fetchone()
    got: list[tuple[Any, ...]] = []

    def received() -> bool:
        got.extend(inside.execute("select * from pgque.receive('orders', 'billing', 10)").fetchall())
        return bool(got)

    wait_until(received, "the message", timeout=15)
    assert sent is not None
    assert got[0][0] == sent[0]
    assert inside.execute("select pgque.ack(%s)", [got[0][1]]).fetchone() == (1,)


def test_it_is_postgresql_17_with_pg_cron(inside: psycopg.Connection[tuple[Any, ...]]) -> None:
    assert inside.info.server_version // 10000 == 17
    extensions = {
        row[0] for row in inside.execute("select e.extname from pg_catalog.pg_extension as e").fetchall()
    }
    assert "pg_cron" in extensions


def test_psql_in_the_container_needs_no_password(container: PostgresContainer) -> None:
    code, output = container.exec(["psql", "-U", "app", "-d", "shop", "-Atc", "select pgque.version()"])
    assert code == 0, output
    assert output.decode().strip()


def test_the_password_is_asked_for_over_tcp(container: PostgresContainer) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(psycopg.conninfo.make_conninfo(conninfo(container), password="wrong"))


def test_another_database_gets_pgque_as_an_extension(container: PostgresContainer) -> None:
    code, output = container.exec(["createdb", "-U", "app", "other"])
    assert code == 0, output
    with psycopg.connect(psycopg.conninfo.make_conninfo(conninfo(container), dbname="other")) as connection:
        connection.execute("create extension pgque")
        assert connection.execute("select pgque.create_queue('q')").fetchone() == (1,)


def test_an_extension_of_every_earlier_version_can_be_updated(
    inside: psycopg.Connection[tuple[Any, ...]],
) -> None:
    found = {
        row[0]
        for row in inside.execute(
            "select p.source from pg_catalog.pg_extension_update_paths('pgque') as p"
            " where p.target = pgque.version() and p.path is not null"
        ).fetchall()
    }
    makefile = (servers.REPOSITORY / "sql" / "Makefile").read_text()
    [earlier] = re.findall(r"^EARLIER *:= *(.*)$", makefile, re.MULTILINE)
    assert found >= set(earlier.split()) != set()


def test_the_files_alone_are_an_extension_for_a_server_that_mounts_them() -> None:
    """As CloudNativePG mounts an image volume: a folder with share/extension, named in extension_control_path."""
    binaries = embedded.find_server("embedded")
    assert binaries.major >= 18, binaries
    made = _docker(
        "create", images.build("extension"), "-"
    )  # a container needs a command, and is not started
    container = made.decode().strip()
    with processes.own_folder(0o755) as folder:
        try:
            subprocess.run(
                ["tar", "-C", folder, "-xf", "-", "share"], input=_docker("export", container), check=True
            )
        finally:
            _docker("rm", container)
        settings = {"extension_control_path": f"{folder}/share:$system"}
        with (
            embedded.start(binaries.bindir, settings=settings) as server,
            psycopg.connect(server.dsn, autocommit=True) as connection,
        ):
            connection.execute("create extension pgque")
            assert connection.execute("select pgque.create_queue('q')").fetchone() == (1,)


def _docker(*arguments: str) -> bytes:
    return subprocess.run([images.client(), *arguments], stdout=subprocess.PIPE, check=True).stdout


def test_messages_survive_a_restart_and_flow_again(
    container: PostgresContainer, wait_until: Callable[..., None]
) -> None:
    with psycopg.connect(conninfo(container), autocommit=True) as connection:
        connection.execute("select pgque.create_queue('kept')")
        connection.execute("select pgque.subscribe('kept', 'c')")
        connection.execute("select pgque.send('kept', 'before'::text)")
    container.get_wrapped_container().restart(timeout=20)

    def reachable() -> bool:
        try:
            psycopg.connect(conninfo(container), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    wait_until(reachable, "the restarted server", timeout=30)
    with psycopg.connect(conninfo(container), autocommit=True) as connection:
        connection.execute("select pgque.send('kept', 'after'::text)")
        got: list[str] = []

        def received() -> bool:
            rows = connection.execute(
                "select m.payload, m.batch_id from pgque.receive('kept', 'c', 10) as m"
            ).fetchall()
            got.extend(row[0] for row in rows)
            for batch in {row[1] for row in rows}:
                connection.execute("select pgque.ack(%s)", [batch])
            return len(got) >= 2

        wait_until(received, "both messages", timeout=15)
    assert got == ["before", "after"]


def test_without_a_password_it_refuses_and_names_the_setting(image: str) -> None:
    client = shutil.which("docker")
    assert client is not None
    done = subprocess.run(
        [client, "run", "--rm", image], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "POSTGRES_PASSWORD" in done.stderr


def test_docker_stop_ends_it_cleanly_and_soon(image: str) -> None:
    with PostgresContainer(image, driver=None) as running:
        wrapped = running.get_wrapped_container()
        begin = time.monotonic()
        wrapped.stop(timeout=30)
        assert time.monotonic() - begin < 15
        assert b"database system is shut down" in wrapped.logs()
