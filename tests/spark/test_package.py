"""How PySpark finds the data source, and what must be importable without the rest."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pgque.spark
from conftest import Role
from spark.conftest import built_wheel, tcp
from sql.helpers import Connection, forced_tick, send
from support.servers import TestServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Makes modules look as if they were not installed.
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Hidden())
"""


def python(code: str, hidden: tuple[str, ...] = ()) -> str:
    """Run code in a process of its own, without some modules; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE.format(names=set(hidden)) + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NOTHING_BUT_PYSPARK = ("psycopg", "psycopg_pool", "pyarrow", "pandas", "numpy", "tenacity", "click", "rich")


def test_the_module_that_pyspark_imports_needs_nothing_but_pyspark() -> None:
    code = """
import pyspark_pgque
from pyspark.sql.datasource import DataSource
assert issubclass(pyspark_pgque.DefaultSource, DataSource)
print(pyspark_pgque.DefaultSource.name())
try:
    pyspark_pgque.DefaultSource({}).streamWriter(None, False)
except ImportError as error:
    print(error)
"""
    name, told = python(code, NOTHING_BUT_PYSPARK).splitlines()
    assert name == "pgque"
    assert "pip install './python[spark]'" in told
    assert "psycopg" in told


@pytest.mark.parametrize("package", ["psycopg", "pyarrow", "adbc_driver_postgresql"])
def test_a_package_that_the_driver_lacks_is_an_error_with_a_hint(package: str) -> None:
    code = """
import pyspark_pgque
try:
    pyspark_pgque.DefaultSource({"queue": "q"}).reader(None)
except ImportError as error:
    print(error)
"""
    told = python(code, (package,))
    assert f"No module named '{package}'. Install pgque[spark]" in told
    assert "pip install './python[spark]'" in told


def test_functions_of_the_driver_say_what_is_missing() -> None:
    code = """
import pgque.spark
try:
    pgque.spark.queues(None, host="localhost")
except ImportError as error:
    print(error)
"""
    assert "No module named 'psycopg'. Install pgque[spark]" in python(code, ("psycopg",))


# Python imports this when it starts.
HIDE_FROM_TASKS = """
import sys
if sys.orig_argv[-1] == "pyspark.worker":
"""

WITHOUT = """
from pgque.spark import write_jdbc
def told(call):
    try:
        call()
    except Exception as error:
        print("TOLD", " ".join(str(error).split()), flush=True)
pgque = spark.read.format("pgque").options(url=sys.argv[1], queue=sys.argv[2])
told(lambda: pgque.load().collect())
told(lambda: write_jdbc(spark.range(1).selectExpr("cast(id as string) as payload"), sys.argv[2], url=sys.argv[1]))
"""


@pytest.mark.slow  # starts a session
def test_what_a_task_and_the_jvm_lack_is_named_with_what_to_install(
    server: TestServer, dsn: str, conn: Connection, queue: str, run_driver: Callable[..., Any], tmp_path: Path
) -> None:
    send(conn, queue, "x")
    forced_tick(conn, queue)
    hide = HIDE.format(names={"adbc_driver_postgresql"}).strip().splitlines()
    (tmp_path / "sitecustomize.py").write_text(HIDE_FROM_TASKS + "".join(f"    {line}\n" for line in hide))
    driver = run_driver(
        WITHOUT,
        tcp(server, dsn),
        queue,
        conf={"spark.driver.extraClassPath": "", "spark.executor.extraClassPath": ""},
        env={"PYTHONPATH": str(tmp_path)},
    )
    driver.finish()
    task, jvm = (line for line in driver.output().splitlines() if line.startswith("TOLD"))
    assert "No module named 'adbc_driver_postgresql'. Install pgque[spark]" in task
    assert "spark.jars.packages=org.postgresql:postgresql:" in jvm
    assert "libpostgresql-jdbc-java" in jvm


def test_a_psycopg_without_its_library_is_an_error_with_a_hint() -> None:
    code = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "psycopg":
            raise ImportError("no pq wrapper available")
sys.meta_path.insert(0, Broken())
import pyspark_pgque
try:
    pyspark_pgque.DefaultSource({}).streamWriter(None, False)
except ImportError as error:
    print(error)
"""
    assert "./python[spark]" in python(code)


HEAVY = {
    *("psycopg", "psycopg_pool", "psycopg_binary", "pyarrow", "pandas", "adbc_driver_manager"),
    *("adbc_driver_postgresql", "click", "rich", "tenacity", "prometheus_client", "opentelemetry", "sqlite3"),
    *("pgque.client", "pgque.twins", "pgque.types", "pgque.runtime"),
}


def test_a_process_that_connects_to_no_server_imports_the_data_source_and_nothing_heavy() -> None:
    # Spark starts a process for most steps of a query, and gives it some seconds.
    code = """
import sys, pyspark.worker
before = set(sys.modules)
import pyspark_pgque
assert pyspark_pgque.DefaultSource.__module__ == "pgque.spark.datasource"
print(*set(sys.modules) - before)
"""
    found = set(python(code, ("numpy",)).split())
    assert found & HEAVY == set()
    others = {name for name in found if name.split(".")[0] not in ("pgque", "pyspark", "pyspark_pgque")}
    assert others <= set(sys.stdlib_module_names)


def test_the_helpers_import_without_pyspark_and_pyarrow() -> None:
    code = "import pgque.spark, sys; print(sorted({'pyspark', 'pyarrow', 'pandas'} & set(sys.modules)))"
    assert python(code, ("pyspark", "pyarrow", "pandas", "numpy")) == "[]\n"


def test_every_public_name_is_there() -> None:
    assert sorted(pgque.spark.__all__) == [
        "dead",
        "foreach_batch",
        "foreach_batch_once",
        "queues",
        "register",
        "write_jdbc",
    ]
    for name in pgque.spark.__all__:
        assert callable(getattr(pgque.spark, name))


def test_pyspark_finds_the_format_and_it_can_be_registered_too(
    spark: SparkSession, reader: Role, conn: Connection, queue: str
) -> None:
    send(conn, queue, "x")
    forced_tick(conn, queue)
    for _ in range(2):
        frame = spark.read.format("pgque").options(url=reader.dsn, queue=queue).load()
        assert [row.payload for row in frame.collect()] == ["x"]
        pgque.spark.register(spark)


@pytest.mark.slow
def test_a_built_wheel_has_the_module_that_pyspark_imports(tmp_path: Path) -> None:
    wheel = built_wheel(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"pyspark_pgque/__init__.py", "pgque/spark/source.py", "pgque/spark/sink.py"} <= set(names)
