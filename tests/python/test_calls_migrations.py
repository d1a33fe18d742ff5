"""Install pgque and create queues in migrations: of Alembic, of Django, and as a file for somebody else."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import psycopg
import psycopg2
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from click.testing import CliRunner
from django.db import connections
from django.db.backends.sqlite3.base import DatabaseWrapper
from django.test.utils import override_settings
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import pgque
import pgque.alembic
import pgque.django
from pgque.cli import main
from pgque.ops.install import sql_text
from support.connections import asyncpg_connect, django_database

# What could be taken for a parameter of a statement.
ODD = "100% :name %(x)s $1 it's \\ é"

# All that an install defines: a colon or a percent sign that went missing would show. Queues have functions
# of their own, whose names end in a number.
DEFINED = r"""
select pgque.version(), count(*), md5(string_agg(p.prosrc || pg_get_function_arguments(p.oid), '' order by p.oid::regprocedure::text)),
  (select md5(string_agg(d.description, '' order by d.description)) from pg_description d
   join pg_proc f on f.oid = d.objoid and d.classoid = 'pg_proc'::regclass where f.pronamespace = 'pgque'::regnamespace)
from pg_proc p where p.pronamespace = 'pgque'::regnamespace and p.proname !~ '_\d+$'
"""


NEWER = "create or replace function pgque.version() returns text language sql as $$ select '99.0.0' $$"


def value(dsn: str, query: str) -> Any:
    """Return the first row of a query."""
    with psycopg.connect(dsn) as conn:
        return conn.execute(query.encode()).fetchone()


def is_installed(dsn: str) -> bool:
    return bool(value(dsn, "select to_regnamespace('pgque') is not null")[0])


@pytest.fixture(scope="module")
def defined(installed: str, server: Any) -> Any:
    """What the functions of an ordinary install are."""
    return value(server.dsn_for(installed), DEFINED)


# -- Alembic -------------------------------------------------------------------------------------------

ENV = """
from alembic import context

connection = context.config.attributes.get("connection")
if context.is_offline_mode():
    context.configure(dialect_name="postgresql")
else:
    context.configure(connection=connection)
with context.begin_transaction():
    context.run_migrations()
"""

REVISION = """
from alembic import op
import pgque.alembic

revision, down_revision = {revision!r}, {down!r}

def upgrade() -> None:
    {upgrade}

def downgrade() -> None:
    {downgrade}
"""


def revision(folder: Path, name: str, down: str | None, upgrade: str, downgrade: str = "pass") -> None:
    text = REVISION.format(revision=name, down=down, upgrade=upgrade, downgrade=downgrade)
    (folder / "versions" / f"{name}.py").write_text(text)


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder of migrations: pgque, then a queue with a consumer."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENV)
    revision(tmp_path, "one", None, "pgque.alembic.install(op)", "pgque.alembic.uninstall(op)")
    revision(
        tmp_path,
        "two",
        "one",
        f"pgque.alembic.create_queue(op, {ODD!r}, {{'max_retries': 3}})\n"
        f"    pgque.alembic.subscribe(op, {ODD!r}, 'billing', key_concurrency=2)",
        f"pgque.alembic.unsubscribe(op, {ODD!r}, 'billing')\n    pgque.alembic.drop_queue(op, {ODD!r})",
    )
    return tmp_path


Migrate = Callable[[str, str], None]


def _blocking(driver: str) -> Callable[[str, Path], Migrate]:
    connects: dict[str, Callable[[str], Any]] = {"psycopg": psycopg.connect, "psycopg2": psycopg2.connect}

    def make(dsn: str, scripts: Path) -> Migrate:
        def migrate(way: str, target: str) -> None:
            engine = create_engine(f"postgresql+{driver}://", creator=lambda: connects[driver](dsn))
            try:
                with engine.begin() as conn:
                    _migrate(conn, scripts, way, target)
            finally:
                engine.dispose()

        return migrate

    return make


def _awaited(driver: str) -> Callable[[str, Path], Migrate]:
    async def connect(dsn: str) -> Any:
        if driver == "asyncpg":
            return await asyncpg_connect(dsn)
        return await psycopg.AsyncConnection.connect(dsn)

    def make(dsn: str, scripts: Path) -> Migrate:
        async def run(way: str, target: str) -> None:
            engine = create_async_engine(f"postgresql+{driver}://", async_creator=lambda: connect(dsn))
            try:
                async with engine.begin() as conn:
                    await conn.run_sync(_migrate, scripts, way, target)
            finally:
                await engine.dispose()

        return lambda way, target: asyncio.run(run(way, target))

    return make


def _migrate(conn: Connection, scripts: Path, way: str, target: str) -> None:
    config = alembic.config.Config()
    config.set_main_option("script_location", str(scripts))
    config.attributes["connection"] = conn
    getattr(alembic.command, way)(config, target)


DRIVERS = {
    "psycopg": _blocking("psycopg"),
    "psycopg2": _blocking("psycopg2"),
    "async psycopg": _awaited("psycopg"),
    "asyncpg": _awaited("asyncpg"),
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_alembic_goes_up_and_down_and_what_fails_leaves_nothing(
    driver: str, fresh_dsn: str, scripts: Path, defined: Any
) -> None:
    migrate = DRIVERS[driver](fresh_dsn, scripts)
    revision(scripts, "three", "two", 'op.execute("select 1/0")')
    with pytest.raises(Exception, match="division by zero"):
        migrate("upgrade", "head")
    assert not is_installed(fresh_dsn)
    migrate("upgrade", "two")
    assert value(fresh_dsn, DEFINED) == defined
    with pgque.connect(fresh_dsn) as client:
        assert client.admin.queue_config(ODD)["max_retries"] == "3"
        [consumer] = client.consumers.get_info(ODD)
        assert consumer.consumer_name == "billing"
    with pytest.raises(Exception, match="division by zero"):
        migrate("upgrade", "head")
    assert value(fresh_dsn, "select version_num from alembic_version") == ("two",)
    migrate("downgrade", "one")
    assert value(fresh_dsn, "select count(*) from pgque.queue") == (0,)
    migrate("stamp", "base")
    with psycopg.connect(fresh_dsn) as conn:
        conn.execute(NEWER)
    with pytest.raises(pgque.PgqueVersionError, match="newer"):
        migrate("upgrade", "one")
    migrate("stamp", "one")
    migrate("downgrade", "base")
    assert not is_installed(fresh_dsn)


def test_alembic_prints_the_sql(scripts: Path, fresh_dsn: str, defined: Any) -> None:
    printed = io.StringIO()
    config = alembic.config.Config(output_buffer=printed)
    config.set_main_option("script_location", str(scripts))
    alembic.command.upgrade(config, "head", sql=True)
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        conn.execute(printed.getvalue().encode())
    assert value(fresh_dsn, DEFINED) == defined
    assert value(fresh_dsn, "select queue_name from pgque.queue") == (ODD,)


def test_alembic_refuses_another_database() -> None:
    with create_engine("sqlite://").connect() as conn:
        for options in ({}, {"as_sql": True, "output_buffer": io.StringIO()}):
            operations = Operations(MigrationContext.configure(conn, opts=options))
            for function in (pgque.alembic.install, pgque.alembic.uninstall):
                with pytest.raises(pgque.PgqueBadArgumentError, match="is sqlite"):
                    function(operations)


# -- Django --------------------------------------------------------------------------------------------

SETTINGS = """
DATABASES = {{"default": {{"ENGINE": "django.db.backends.postgresql", **{database!r}}}}}
INSTALLED_APPS = ["shop"]
USE_TZ = True
"""

MIGRATION = """
from django.db import migrations
import pgque.django

class Migration(migrations.Migration):
    dependencies = {dependencies!r}
    operations = [{operations}]
"""


class Project:
    """A Django project with one app, whose migrations a test writes."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self._folder = folder
        self._migrations = folder / "shop" / "migrations"
        self._migrations.mkdir(parents=True)
        for package in (folder / "shop", self._migrations):
            (package / "__init__.py").touch()
        names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
        parts = conninfo_to_dict(dsn)
        database = {key: parts[name] for name, key in names.items() if parts.get(name) is not None}
        (folder / "settings.py").write_text(SETTINGS.format(database=database))
        self._last: list[tuple[str, str]] = []

    def migration(self, name: str, *operations: str) -> None:
        """Write one more migration."""
        text = MIGRATION.format(dependencies=self._last, operations=", ".join(operations))
        (self._migrations / f"{name}.py").write_text(text)
        self._last = [("shop", name)]

    def manage(self, *commands: list[str]) -> subprocess.CompletedProcess[str]:
        """Run commands of Django, one after the other."""
        code = f"import django\nfrom django.core.management import call_command\n\ndjango.setup()\nfor command in {commands}:\n    call_command(*command)"
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=self._folder,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": str(self._folder)},
            capture_output=True,
            text=True,
            check=False,
        )

    def succeed(self, *commands: list[str]) -> str:
        """Run commands of Django that must succeed, and return what they print."""
        done = self.manage(*commands)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def read(self, name: str) -> str:
        """Return the text of a migration."""
        return (self._migrations / f"{name}.py").read_text()


@pytest.fixture
def project(tmp_path: Path, fresh_dsn: str) -> Project:
    """A Django project on an empty database: pgque, then a queue with a consumer."""
    project = Project(tmp_path, fresh_dsn)
    project.migration("0001_pgque", "pgque.django.Install()")
    project.migration(
        "0002_queue",
        f"pgque.django.CreateQueue({ODD!r}, {{'max_retries': 3}})",
        f"pgque.django.Subscribe({ODD!r}, 'billing', keyed_order=True, key_concurrency=1)",
    )
    project.migration("0003_upgrade", "pgque.django.Upgrade()")
    return project


def test_django_goes_up_and_down_and_what_fails_leaves_nothing(
    project: Project, fresh_dsn: str, defined: Any
) -> None:
    project.migration("0004_fails", "pgque.django.CreateQueue('half')", 'migrations.RunSQL("select 1/0")')
    assert "division by zero" in project.manage(["migrate"]).stderr
    assert value(fresh_dsn, DEFINED) == defined
    assert value(fresh_dsn, "select array_agg(q.queue_name) from pgque.queue as q") == ([ODD],)
    with pgque.connect(fresh_dsn) as client:
        assert client.admin.queue_config(ODD)["max_retries"] == "3"
        [consumer] = client.consumers.get_info(ODD)
        assert consumer.consumer_name == "billing"
    project.succeed(["migrate", "shop", "0001"])
    assert value(fresh_dsn, "select count(*) from pgque.queue") == (0,)
    assert value(fresh_dsn, DEFINED) == defined
    project.succeed(["migrate", "shop", "zero"])
    assert not is_installed(fresh_dsn)


def test_django_prints_the_sql_and_squashes_the_operations(
    project: Project, fresh_dsn: str, defined: Any
) -> None:
    printed, _, plan = project.succeed(
        ["sqlmigrate", "shop", "0001"],
        ["sqlmigrate", "shop", "0002"],
        ["squashmigrations", "--no-input", "-v0", "--squashed-name", "all", "shop", "0003"],
        ["migrate", "--plan"],
    ).partition("Planned operations:")
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        conn.execute(printed.encode())
    assert value(fresh_dsn, DEFINED) == defined
    assert value(fresh_dsn, "select queue_name from pgque.queue") == (ODD,)
    assert len(project.read("0001_all")) < 2000  # the calls, not the SQL
    assert [line.partition(" -> ")[0].strip() for line in plan.splitlines() if line] == [
        "shop.0001_all",
        "Install pgque",
        f"Create queue {ODD}",
        f"Subscribe billing to queue {ODD}",
        "Upgrade pgque",
    ]


class Nowhere:
    """A router that keeps all migrations away."""

    def allow_migrate(self, db: str, app_label: str, **hints: object) -> bool:
        return False


def test_another_database_and_a_newer_version_are_refused(own_dsn: str) -> None:
    connection = django_database("newer", own_dsn)
    with psycopg.connect(own_dsn) as conn:
        conn.execute(NEWER)
    for operation in (pgque.django.Install(), pgque.django.Upgrade()):
        with pytest.raises(pgque.PgqueVersionError, match="newer"), connection.schema_editor() as editor:
            operation.database_forwards("shop", editor, None, None)
    connection.close()
    lite = DatabaseWrapper({**connection.settings_dict, "NAME": ":memory:"}, "lite")
    connections["lite"] = lite
    with pytest.raises(pgque.PgqueBadArgumentError, match="'lite' is sqlite"), lite.schema_editor() as editor:
        pgque.django.CreateQueue("q").database_forwards("shop", editor, None, None)
    with override_settings(DATABASE_ROUTERS=[Nowhere()]), lite.schema_editor() as editor:
        for operation in (pgque.django.Install(), pgque.django.CreateQueue("q")):
            operation.database_forwards("shop", editor, None, None)
    lite.close()
    del connections["lite"]


# -- the command ---------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code, and what it prints."""
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


def test_the_command_prints_the_sql_of_the_install_or_writes_it_to_a_file(tmp_path: Path) -> None:
    assert command("install", "--dump-sql") == (0, sql_text())
    code, told = command("install", "--version", "0.8.0", "--dump-sql")
    assert (code, "select '0.8.0'::text" in told) == (0, True)
    file = tmp_path / "pgque.sql"
    assert command("install", "--dump-sql", "-o", str(file)) == (0, "")
    assert file.read_bytes() == sql_text().encode()
    code, told = command("install", "-o", str(file))
    assert (code, "--dump-sql" in told) == (2, True)
    code, told = command("install", "--dump-sql", "-o", str(tmp_path / "no" / "x"))
    assert (code, "No such file" in told) == (1, True)
