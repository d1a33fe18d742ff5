"""Write the table of comparison.md that counts the programs of tests/examples/compared.

python tools/compared.py           write it
python tools/compared.py --check   exit 1 when the committed one is stale, or pgque is not among the shortest
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

PYTHON = Path(__file__).resolve().parent.parent
PAGE = PYTHON / "docs" / "comparison.md"
PROGRAMS = PYTHON.parent / "tests" / "examples" / "compared"
TABLE = re.compile(r"(?<=\| program \|).*?(?=\n\n)", re.DOTALL)
LINK = "../../tests/examples/compared/with_pgque"
LIBRARIES = ("pgque", "procrastinate", "pgqueuer")
TITLES = {
    "send": "send in a transaction",
    "retries": "retries and dead letters",
    "periodic": "periodic task",
    "batch": "batches",
    "web": "FastAPI",
}


def lines(source: str) -> int:
    """Return how many lines of a program have code: no blank lines, comments, or docstring of the module."""
    docstring = ast.parse(source).body[0]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    without = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    found: set[int] = set()
    for token in tokens:
        if token.type not in without and token.string and token.start[0] > (docstring.end_lineno or 0):
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found)


def count() -> dict[str, list[int]]:
    """Return the lines of each program, in the order of LIBRARIES."""
    return {
        program: [
            lines((PROGRAMS / f"with_{library}" / f"{program}.py").read_text()) for library in LIBRARIES
        ]
        for program in TITLES
    }


def markdown(counts: dict[str, list[int]]) -> str:
    """Return the table, without its first cell."""
    rows = [f" {' | '.join(LIBRARIES)} |", "|---|" + "---|" * len(LIBRARIES)]
    rows += [
        f"| [{TITLES[program]}]({LINK}/{program}.py) | {' | '.join(map(str, each))} |"
        for program, each in counts.items()
    ]
    return "\n".join(rows)


def main() -> int:
    """Write or check the page; return the exit code."""
    counts = count()
    old = PAGE.read_text()
    new = TABLE.sub(lambda _: markdown(counts), old)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new)
        return 0
    if new != old:
        print(f"{PAGE.name} is stale; run: make generate", file=sys.stderr)
    longer = [program for program, each in counts.items() if each[0] > min(each)]
    if longer:
        print(f"longer with pgque than with another library: {', '.join(longer)}", file=sys.stderr)
    return int(new != old or bool(longer))


if __name__ == "__main__":
    sys.exit(main())
