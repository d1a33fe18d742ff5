"""The rules of the house for text: each finds what it is for, and nothing in text that keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.proofread import LONGEST, house_style, only, page, python, sql

LONG = "Word " * (LONGEST + 1)

BROKEN = {
    "page.md": [
        ("Rows are handed\nout.", 1, "'handed out'"),
        ("# Title\n\nWhat is sent arrives.", 3, "'What'"),
        ("- One.\n- Who sends waits.", 2, "'Who'"),
        (f"Short.\n\n{LONG}.", 3, f"{LONGEST + 1} words"),
    ],
    "part.sql": [
        ("-- It is not read any\n-- more.", 1, "more'"),
        ("comment on table t is\n  'Rows. '\n  'What is left.';", 2, "'What'"),
        (f"comment on table t is '{LONG}';", 1, f"{LONGEST + 1} words"),
    ],
    "module.py": [
        ('"""Whether it is open."""', 1, "'Whether'"),
        ('def f():\n    """Return it.\n\n    What is left is lost.\n    """', 4, "'What'"),
        ("a = 1  # in vain", 1, "'in vain'"),
    ],
}

KEPT = {
    "page.md": [
        "## What differs\n\n| What | Who |\n|---|---|\n| What it is. | x |\n",
        f"What is a tick? It ends a batch.\n\n```text\nhanded out {LONG}\n```\n`lapsed` rows.",
        f"{'Word ' * 30}; {'word ' * 30}.\n- {'Word ' * 30}\n- {'Word ' * 30}\n",
    ],
    "part.sql": ["select 'handed_out', lapsed from t; -- read again"],
    "module.py": ['"""Return what is left."""\n\nfor_ever = "handed out"'],
}

READERS = {".md": page, ".sql": sql, ".py": python}


def found(name: str, text: str) -> list[tuple[int, str]]:
    path = Path(name)
    return list(house_style(path, text, only(text, READERS[path.suffix](text))))


@pytest.mark.parametrize(
    ("name", "text", "line", "told"), [(name, *case) for name, cases in BROKEN.items() for case in cases]
)
def test_text_that_breaks_a_rule_is_found(name: str, text: str, line: int, told: str) -> None:
    ((where, wrong),) = found(name, text)
    assert where == line
    assert told in wrong


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in KEPT.items() for text in texts])
def test_text_that_keeps_the_rules_is_not(name: str, text: str) -> None:
    assert found(name, text) == []
