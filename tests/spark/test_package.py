"""How PySpark finds the data source, and what must be importable without the rest."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pgque.spark
from conftest import Role
from sql.helpers import Connection, forced_tick, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]

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
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT / "python"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"pyspark_pgque/__init__.py", "pgque/spark/source.py", "pgque/spark/sink.py"} <= set(names)
