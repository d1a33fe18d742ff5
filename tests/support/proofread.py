"""Have codespell and proselint read what people read: pages, comments, docstrings, messages.

python -m support.proofread

Both tools get a copy of each file without all else, line by line.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

from support.servers import REPOSITORY

CONFIG = Path(__file__).with_name("proselint.json")
# Words that codespell takes for a wrong spelling of others: SQL's, and the name of a time zone.
WORDS = "inout,ist,copys"
PAGES = ("*.md", "python/*.md", "python/docs/*.md", "sql/*.md")
SQL = ("sql/parts/**/*.sql", "tests/support/reference_examples.sql")
PYTHON = ("python/src/**/*.py", "python/tools/*.py", "tests/**/*.py")
SHELL = ("Makefile", "Dockerfile", ".ci/run", "tests/**/*.sh", "tests/support/requirements*.txt")

# proselint's own check for this takes a heading and the sentence below it for a repetition.
TWICE = re.compile(r"\b(?!that |had )([a-z]+)(?: |\n *(?:--|#)? *)\1\b(?![-_])")

Span = tuple[int, int]


def page(text: str) -> Iterator[Span]:
    """Yield what lies between blocks of code, code in a line, comments and the targets of links."""
    at = 0
    for code in re.finditer(r"(?ms)^ *```.*?^ *```$|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", text):
        yield at, code.start()
        at = code.end()
    yield at, len(text)


def sql(text: str) -> Iterator[Span]:
    """Yield comments, and texts of more than one word."""
    for found in re.finditer(r"--[^\n]*|'(?:[^']|'')*'", text):
        if " " in found[0]:
            yield found.start() + 1, found.end() - (found[0][0] == "'")


def shell(text: str) -> Iterator[Span]:
    """Yield comments."""
    for found in re.finditer(r"(?m)(?:^|\s)#[^\n]*", text):
        yield found.span()


def python(text: str) -> Iterator[Span]:
    """Yield comments and docstrings."""
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield lines[token.start[0] - 1] + token.start[1], lines[token.end[0] - 1] + token.end[1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            found = node.body[0]
            assert found.end_lineno is not None
            yield lines[found.lineno - 1], lines[found.end_lineno]


def only(text: str, spans: Iterator[Span]) -> str:
    """Return the text with a star for each piece that lies outside of the spans, line by line."""
    kept = bytearray(len(text))
    for start, end in spans:
        kept[start:end] = b"\1" * (end - start)
    marked = "".join(char if keep or char == "\n" else "\0" for char, keep in zip(text, kept, strict=True))
    return re.sub("\0+", " * ", re.sub("(?m)^\0+$", "", marked))


def main() -> int:
    """Write the copies and run both tools on them; return 1 if either finds something."""
    with tempfile.TemporaryDirectory() as folder:
        names: list[str] = []
        twice: list[str] = []
        for patterns, reader in ((PAGES, page), (SQL, sql), (PYTHON, python), (SHELL, shell)):
            for path in sorted({path for pattern in patterns for path in REPOSITORY.glob(pattern)}):
                if "previous" in path.parts or path.is_symlink():
                    continue
                name = path.relative_to(REPOSITORY)
                copy = Path(folder, name).with_name(name.name + ".txt")
                copy.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text(encoding="utf-8")
                prose = only(text, reader(text))
                copy.write_text(prose, encoding="utf-8")
                names.append(str(copy.relative_to(folder)))
                for found in TWICE.finditer(prose):
                    line = prose.count("\n", 0, found.start()) + 1
                    twice.append(f"{name}:{line}: {found[1]!r} stands there twice")
        commands = (
            [sys.executable, "-m", "codespell_lib", "--ignore-words-list", WORDS, *names],
            [str(Path(sys.executable).with_name("proselint")), "check", "--config", str(CONFIG), *names],
        )
        print(*twice, sep="\n", end="\n" if twice else "")
        codes = [subprocess.run(command, cwd=folder, check=False).returncode for command in commands]
    return int(any([*codes, twice]))


if __name__ == "__main__":
    sys.exit(main())
