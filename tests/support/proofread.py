"""Check the spelling and the style of pages, comments, docstrings and messages.

python -m support.proofread

codespell and proselint get a copy of each file with this text only, line by line. Rules of the house that a
program can check without false alarms are here: words that the glossary replaces, the length of sentences,
sentences without a subject, and the first word of a docstring.
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

# Generated: the texts are checked where they are written.
GENERATED = ("REFERENCE.md", "twins")

# Expressions that the house does not use in text for users, and what it says.
REPLACED = {
    r"hand(?:s|ed|ing)? out|hand-outs?": "deliver",
    r"c[oa]mes? again|coming again": "be redelivered",
    r"h[eo]lds? on to|holding on to": "have a lease on",
    r"lapses?|lapsed": "expire",
    r"bury|buries|buried": "give up, dead-letter",
    r"(?:is|are|was|were) owed|owes?": "pending",
    r"put(?:s|ting)? aside": "pending, delayed or retry",
    r"let(?:s|ting)? go": "release",
    r"sift\w*|exhume\w*|shelve\w*|weed(?:s|ed)?": "a plain verb",
    r"in vain": "without success",
    r"(?:says?|said) so": "the message that is shown",
    r"(?:is|are|was|were) told": "the subject that gets an error, or learns something",
    r"so many (?:bytes|days|messages|microseconds|milliseconds|rows|seconds|times)": "this many",
    r"any more(?! (?:batches|messages|rows|than))": "no longer",
    r"for ever": "without end",
    r"without a word": "without an error, or without notice",
    r"such a one|to who|for who": "the noun",
}
# A line may end between the words of an expression.
BETWEEN = r"(?: |\s*\n[ *#-]*)"
AVOIDED = re.compile("|".join(rf"\b({found})\b" for found in REPLACED).replace(" ", BETWEEN), re.IGNORECASE)

# Sentences that have no question mark and begin like this hide their subject.
SUBJECTLESS = re.compile(r"(?:What|Who|Whom|Whose|Whoever)\b(?!.*\?\W*$)", re.DOTALL)
LONGEST = 40  # words of a sentence

# A docstring begins with a verb that says what the caller gets, or names the thing.
OPENINGS = re.compile(r"(?:Be|Holds?|Says?|Such|What|Whether|Who|Whom|Whose)\b")

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


def running(prose: str) -> Iterator[tuple[int, str]]:
    """Yield the blocks of running text of a page, with their places: no headings, no tables."""
    for block in re.finditer(r"(?m)(?:^(?![ \t]*$)[^\n]*\n?)+", prose):
        at = block.start()
        for part in re.split(r"(?m)^(?=[ \t]*(?:[-*+#|]|\d+\.)[ ]|\|)", block[0]):
            if part.strip() and part.lstrip()[0] not in "#|":
                yield at, part
            at += len(part)


def commented(text: str) -> Iterator[tuple[int, str]]:
    """Yield the texts of COMMENT ON, with their places."""
    for found in re.finditer(r"(?m)^comment on [^;']*? is\s+((?:'(?:[^']|'')*'\s*)+);", text):
        yield found.start(1), re.sub(r"'\s*\n\s*'", "", found[1])[1:].rstrip().removesuffix("'")


def documented(text: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a program, with the numbers of their first lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found is not None:
                yield node.body[0].lineno, found


def sentences(prose: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a block of running text, with their places."""
    marker = re.match(r"[ \t]*(?:[-*+]|\d+\.)[ ]+", prose)
    at = marker.end() if marker else 0
    for end in re.finditer(r"[.!?][\"')*]*(?:\s+|\Z)|\Z", prose):
        if prose[at : end.end()].strip():
            yield at, prose[at : end.end()]
        at = end.end()


def judge(prose: str) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with the sentences of a block of running text, with the places."""
    for at, sentence in sentences(prose):
        for clause in re.split(r"[;:]\s", sentence):
            if (words := len(re.findall(r"[\w*][^\s]*", clause))) > LONGEST:
                yield at, f"{words} words, at most {LONGEST}: {' '.join(clause.split())[:60]} …"
        if found := SUBJECTLESS.match(sentence):
            yield at, f"a sentence that begins with {found[0]!r}: name its subject"


def avoided(prose: str) -> Iterator[tuple[int, str]]:
    """Yield the expressions that the house does not use, with their places."""
    for found in AVOIDED.finditer(prose):
        assert found.lastindex is not None
        yield found.start(), f"{' '.join(found[0].split())!r}: {list(REPLACED.values())[found.lastindex - 1]}"


def house_style(path: Path, text: str, prose: str) -> Iterator[tuple[int, str]]:
    """Yield what breaks the rules of the house in a file for users, with the lines."""

    def line(of: str, at: int) -> int:
        return of.count("\n", 0, at) + 1

    for at, wrong in avoided(prose):
        yield line(prose, at), wrong
    if path.suffix == ".md":
        for start, block in running(prose):
            for at, wrong in judge(block):
                yield line(prose, start + at), wrong
    elif path.suffix == ".sql":
        for start, block in commented(text):
            for _, wrong in judge(block):
                yield line(text, start), wrong
    else:
        for first, found in documented(text):
            if opening := OPENINGS.match(found):
                yield first, f"a docstring that begins with {opening[0]!r}: begin with a verb such as Return"
            items = re.sub(r"(?m)^ *(?=\w+: )", "- ", found)
            for start, block in running(items):
                for at, wrong in judge(block):
                    if start + at or not opening:
                        yield first + items.count("\n", 0, start + at), wrong


def only(text: str, spans: Iterator[Span]) -> str:
    """Return the text with a star for each piece that lies outside of the spans, line by line."""
    kept = bytearray(len(text))
    for start, end in spans:
        kept[start:end] = b"\1" * (end - start)
    marked = "".join(char if keep or char == "\n" else "\0" for char, keep in zip(text, kept, strict=True))
    return re.sub("\0+", " * ", re.sub("(?m)^\0+$", "", marked))


def main() -> int:
    """Write the copies, check them here, and run both tools on them; return 1 if any finds something."""
    with tempfile.TemporaryDirectory() as folder:
        names: list[str] = []
        wrong: list[str] = []
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
                    wrong.append(f"{name}:{line}: {found[1]!r} stands there twice")
                if name.parts[0] != "tests" and not set(GENERATED) & set(name.parts) and reader is not shell:
                    wrong += [f"{name}:{line}: {told}" for line, told in house_style(name, text, prose)]
        commands = (
            [sys.executable, "-m", "codespell_lib", "--ignore-words-list", WORDS, *names],
            [str(Path(sys.executable).with_name("proselint")), "check", "--config", str(CONFIG), *names],
        )
        print(*wrong, sep="\n", end="\n" if wrong else "")
        codes = [subprocess.run(command, cwd=folder, check=False).returncode for command in commands]
    return int(any([*codes, wrong]))


if __name__ == "__main__":
    sys.exit(main())
