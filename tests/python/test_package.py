"""What is shipped: the SQL file, the types, one version, clean imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import pgque
from pgque.install import sql_text

ROOT = Path(__file__).resolve().parents[2]


def test_the_packaged_sql_is_the_installable_file() -> None:
    assert sql_text().encode() == (ROOT / "sql" / "pgque.sql").read_bytes()


def test_the_sql_file_is_a_relative_link_in_the_repository() -> None:
    link = ROOT / "python" / "src" / "pgque" / "pgque.sql"
    assert str(link.readlink()) == "../../../sql/pgque.sql"


def test_the_sql_and_the_package_have_one_version() -> None:
    match = re.search(r"function pgque\.version\(\).*?'(\d+\.\d+\.\d+)'", sql_text(), re.DOTALL)
    assert match is not None
    assert match[1] == pgque.__version__


def test_types_are_shipped() -> None:
    assert files("pgque").joinpath("py.typed").is_file()


def test_every_public_name_exists_and_none_is_a_module() -> None:
    assert len(set(pgque.__all__)) == len(pgque.__all__)
    for name in pgque.__all__:
        assert hasattr(pgque, name)


def test_importing_the_package_loads_neither_the_command_nor_the_server_launcher() -> None:
    unwanted = {"click", "rich", "pgque.cli", "pgque.demo", "pgque.embedded", "multiprocessing"}
    code = f"import sys, pgque; print(sorted(set(sys.modules) & {unwanted}))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


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
        assert archive.read("pgque/pgque.sql") == (ROOT / "sql" / "pgque.sql").read_bytes()
        assert "pgque/py.typed" in archive.namelist()
