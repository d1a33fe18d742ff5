"""What is shipped: the SQL file, the types, one version, clean imports."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import pgque
from pgque.ops import monitoring
from pgque.ops.install import sql_text

ROOT = Path(__file__).resolve().parents[2]
THROUGH = "pgque-0.8.0.sql.xz"
SOURCE = ROOT / "python" / "src"


def test_the_packaged_sql_is_the_installable_file() -> None:
    assert sql_text().encode() == (ROOT / "sql" / "pgque.sql").read_bytes()


def test_the_sql_files_are_relative_links_in_the_repository() -> None:
    folder = ROOT / "python" / "src" / "pgque" / "ops"
    assert str((folder / "pgque.sql").readlink()) == "../../../../sql/pgque.sql"
    assert str((folder / THROUGH).readlink()) == f"../../../../tests/sql/previous/{THROUGH}"


def test_the_sql_and_the_package_have_one_version() -> None:
    match = re.search(r"function pgque\.version\(\).*?'(\d+\.\d+\.\d+(?:-rc\d+)?)'", sql_text(), re.DOTALL)
    assert match is not None
    assert match[1] == pgque.__version__


def test_types_are_shipped() -> None:
    assert files("pgque").joinpath("py.typed").is_file()


def test_every_public_name_exists_and_none_is_a_module() -> None:
    assert len(set(pgque.__all__)) == len(pgque.__all__)
    for name in pgque.__all__:
        assert hasattr(pgque, name)


def test_importing_the_package_loads_neither_the_command_nor_the_server_launcher() -> None:
    unwanted = {
        "click",
        "rich",
        "pgque.cli",
        "pgque.demo",
        "pgque.ops.embedded",
        "multiprocessing",
        "pgque.asgi",
        "django",
        "pgque.ops.exporter",
        "prometheus_client",
        "opentelemetry",
        "pgque.top",
        "textual",
    }
    code = f"import sys, pgque; print(sorted(set(sys.modules) & {unwanted}))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_an_earlier_module_path_is_a_second_name_of_the_module_of_today() -> None:
    code = """
import json, sys, warnings
from importlib import import_module
from pgque.earlier import EARLIER
warnings.simplefilter("always")
told = {}
for name, new in EARLIER.items():
    with warnings.catch_warnings(record=True) as caught:
        earlier = import_module(f"pgque.{name}")
    told[name] = [str(w.message) for w in caught if w.category is DeprecationWarning]
    assert earlier is import_module(f"pgque.{new}") is getattr(sys.modules["pgque"], name)
    assert earlier.__spec__.name == earlier.__name__ == f"pgque.{new}"
print(json.dumps(told))
"""
    told = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert {name for name, warned in told.items() if not warned} == {"embedded", "exporter"}
    assert told["workers"] == [
        "the module pgque.workers is now pgque.twins.workers: import public names from pgque"
    ]


def test_an_earlier_module_path_that_is_documented_has_types() -> None:
    """`make check` runs mypy over this."""
    import pgque.embedded
    import pgque.exporter
    from pgque.exporter import render

    functions: list[Callable[..., bytes]] = [render, pgque.exporter.render]
    assert functions == [pgque.ops.exporter.render] * 2
    assert pgque.embedded is pgque.ops.embedded


def test_the_client_and_the_command_are_found_where_they_were_before_these_were_folders() -> None:
    code = """
import sys, pgque.client, pgque.cli
assert not {"psycopg", "click"} & set(sys.modules)
from pgque.client import PgqueClient, connect
assert (PgqueClient, connect) == (pgque.PgqueClient, pgque.connect)
from pgque.cli import main
main(["--version"])
"""
    told = subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True)
    assert told == f"pgque, version {pgque.__version__}\n"


def test_the_top_of_the_package_is_short_and_a_generated_module_lies_in_the_folder_of_twins() -> None:
    folder = SOURCE / "pgque"
    entries = {path.name for path in folder.iterdir() if path.name != "__pycache__"}
    assert len(entries) <= 26, sorted(entries)
    assert {name for name in entries if name.startswith("_")} == {"__init__.py", "_version.py"}
    generated = {path for path in folder.rglob("*.py") if path.read_text().startswith("# Generated from ")}
    assert generated == {path for path in folder.joinpath("twins").iterdir() if path.suffix == ".py"} - {
        folder / "twins" / "__init__.py"
    }


def test_every_extra_that_the_code_names_exists() -> None:
    named = {
        extra
        for path in SOURCE.rglob("*.py")
        for extra in re.findall(r"(?:pgque|/python)\[(\w+)\]", path.read_text())
    }
    assert {"metrics", "spark", "typed"} <= named
    assert named <= set(metadata("pgque").get_all("Provides-Extra", []))


def _modules() -> dict[str, Path]:
    """Return the modules of the package, packages too, by their full names."""
    found = {}
    for path in [*SOURCE.joinpath("pgque").rglob("*.py"), *SOURCE.joinpath("pyspark_pgque").rglob("*.py")]:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(name: str, text: str, modules: set[str], *, is_package: bool) -> set[str]:
    """Return the modules that a module imports anywhere: in its functions and for type checking too."""
    package = name if is_package else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                found.add(submodule if submodule in modules else source)
    return found & modules


def _import_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle, or []."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_no_module_imports_one_that_imports_it_wherever_the_import_stands() -> None:
    modules = _modules()
    imports = {
        name: _imported(name, path.read_text(), set(modules), is_package=path.name == "__init__.py")
        for name, path in modules.items()
    }
    assert {"pgque.twins.consumer", "pgque.demo.servers", "pgque.spark.source"} <= imports.keys()
    assert "pgque.twins.client" in imports["pgque.twins.consumer"]
    assert "pgque.runtime.processes" in imports["pgque.runtime.concurrency"]  # in a function
    assert "pgque.demo" in imports["pgque.cli.program"]
    assert _import_cycle(imports) == []


@pytest.mark.parametrize(
    "back",
    [
        "from .a import x",
        "from . import a",
        "import p.a",
        "from p import a",
        "def f():\n    from .a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x",
    ],
)
def test_an_import_cycle_is_found_in_every_form_of_import(back: str) -> None:
    modules = {"p", "p.a", "p.b"}
    texts = {"p.a": "from .b import y", "p.b": back}
    imports = {name: _imported(name, text, modules, is_package=False) for name, text in texts.items()}
    assert set(_import_cycle(imports)) == {"p.a", "p.b"}
    texts["p.b"] = "x = 1"
    imports = {name: _imported(name, text, modules, is_package=False) for name, text in texts.items()}
    assert _import_cycle(imports) == []


def _done(*arguments: str | Path, **options: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["folder", "sdist"])
def test_a_built_wheel_holds_the_sql_itself(way: str, tmp_path: Path) -> None:
    source = ROOT / "python"
    if way == "sdist":
        _done("pip", "install", "-q", "--target", tmp_path / "tools", "hatchling")
        path = {**os.environ, "PYTHONPATH": str(tmp_path / "tools")}
        _done("hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=source, env=path)
        [source] = tmp_path.glob("pgque-*.tar.gz")
    _done("pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source)
    [wheel] = tmp_path.glob("pgque-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("pgque/ops/pgque.sql") == (ROOT / "sql" / "pgque.sql").read_bytes()
        assert (
            archive.read(f"pgque/ops/{THROUGH}")
            == (ROOT / "tests" / "sql" / "previous" / THROUGH).read_bytes()
        )
        assert "pgque/py.typed" in archive.namelist()
        for name in ("figures.sql", *monitoring.FILES):
            assert archive.read(f"pgque/ops/monitoring/{name}").decode() == monitoring.text(name)
