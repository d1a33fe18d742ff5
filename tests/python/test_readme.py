"""The tests that the documents name exist; test_documents.py runs their code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RELIABILITY = ROOT / "sql" / "RELIABILITY.md"
INTERNALS = ROOT / "sql" / "README.md"


def _missing(document: str) -> list[str]:
    """Name the tests of a document that no file has, or that no row of a table names as a test."""
    missing = []
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py::\w+)`", document):
        file, test = name.split("::")
        path = ROOT / "tests" / file
        found = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
        if test not in {f.name for f in found if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}:
            missing.append(name)
    return missing


def _rows(document: str, section: str) -> list[list[str]]:
    """Read the rows of the tables of a section, without their heads."""
    text = document.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    return [
        re.split(r"(?<!\\) \| ", row.strip("| ")) for table in tables for row in table.strip().split("\n")
    ]


def test_each_test_that_a_guarantee_names_exists() -> None:
    document = RELIABILITY.read_text(encoding="utf-8")
    assert _missing(document) == []
    guarantees = _rows(document, "Guarantees")
    assert len(guarantees) > 30
    for guarantee, *shown in guarantees:
        assert len(shown) == 1 and "::test_" in shown[0], f"no test shows: {guarantee}"
    limits = _rows(document, "What is not guaranteed")
    assert len(limits) > 10
    for row in limits:
        assert len(row) == 3 and all(row), f"what is not promised, why, what to do: {row}"


@pytest.mark.parametrize("page", ["security", "managed"])
def test_each_file_of_tests_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / "python" / "docs" / f"{page}.md").read_text(encoding="utf-8")
    files = re.findall(r"`([a-z]+/test_\w+\.py)`", text)
    assert len(files) > 2
    assert [file for file in files if not (ROOT / "tests" / file).is_file()] == []


def test_each_function_that_internals_name_exists() -> None:
    names = set(re.findall(r"`(_[a-z_]+)[`(]", INTERNALS.read_text(encoding="utf-8")))
    made = (ROOT / "sql" / "pgque.sql").read_text(encoding="utf-8")
    assert len(names) > 5
    assert sorted(name for name in names if f"function pgque.{name}(" not in made) == []


def test_a_test_that_is_gone_is_missed() -> None:
    known, gone = (
        "sql/test_model.py::test_any_calls_of_workers_agree_with_the_model",
        "sql/test_model.py::test_of_old",
    )
    assert _missing(f"| a guarantee | `{known}`, `{gone}`, `sql/test_none.py::test_x` |") == [
        gone,
        "sql/test_none.py::test_x",
    ]
