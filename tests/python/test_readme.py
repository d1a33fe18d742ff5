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
    """Return the tests that a document names and no file has."""
    missing = []
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py::\w+)`", document):
        file, test = name.split("::")
        path = ROOT / "tests" / file
        found = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
        if test not in {f.name for f in found if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}:
            missing.append(name)
    return missing


def _items(document: str, section: str) -> list[str]:
    """Return the items of the lists of a section."""
    text = document.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0].split("\n### How it is tested")[0]
    return re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE)


def test_each_test_that_a_guarantee_names_exists() -> None:
    document = RELIABILITY.read_text(encoding="utf-8")
    assert _missing(document) == []
    guarantees = _items(document, "Guarantees")
    assert len(guarantees) > 30
    for guarantee in guarantees:
        assert re.search(r"\.\n  `\w+/test_\w+\.py::test_", guarantee), f"no test shows: {guarantee}"
    limits = _items(document, "What is not guaranteed")
    assert len(limits) > 10
    for limit in limits:
        assert re.match(r"\*\*.*\.\*\* .+?(\. |, so ).+\.$", limit), (
            f"what is not promised, why, what to do: {limit}"
        )


@pytest.mark.parametrize(("page", "at_least"), [("security", 3), ("managed", 2)])
def test_each_file_of_tests_that_a_page_names_exists(page: str, at_least: int) -> None:
    text = (ROOT / "python" / "docs" / f"{page}.md").read_text(encoding="utf-8")
    files = re.findall(r"`([a-z]+/test_\w+\.py)`", text)
    assert len(files) >= at_least
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
