"""The payloads that the demo sends: files of the standard library, or the lines of a file."""

from __future__ import annotations

import json
import os
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..cli.common import visible

_BROKEN = {
    "never_closed.py": b"def f(:\n    return (1,\n",
    "bad_indent.py": b"if True:\n        x = 1\n    y = 2\n",
    "not_utf8.py": b"name = '\xff\xfe'\n",
}


def library_files() -> list[tuple[Path, str]]:
    """Return the Python files of the standard library, each with the top-level package it belongs to."""
    found: dict[Path, str] = {}
    for root in {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
            for name in sorted(names):
                if name.endswith(".py"):
                    path = Path(folder, name)
                    found[path] = path.relative_to(root).parts[0].removesuffix(".py")
    return list(found.items())


def _compiles(path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except Exception:
            return False
    return True


def has_broken(files: Sequence[tuple[Path, str]]) -> bool:
    """Return whether some of the files are broken on purpose; their names begin with "bad"."""
    return any(path.name.startswith("bad") and not _compiles(path) for path, _ in files)


def good_lines(path: Path, console: Console) -> list[str]:
    """Return the lines of a JSON Lines file that are JSON, and report the others with their numbers."""
    lines: list[str] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                json.loads(text, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                console.print(
                    f"{visible(str(path))}, line {number}: not sent, {visible(str(error))}", style="yellow"
                )
                continue
            lines.append(text)
    return lines


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def library_messages(own: Path, console: Console) -> list[str]:
    """Return a message for each Python file of the standard library; some of the files do not compile."""
    console.print("Looking for the Python files of the standard library …")
    files = library_files()
    if has_broken(files):
        note = "some that Python's own tests need do not compile"
    else:
        for name, content in _BROKEN.items():
            (own / name).write_bytes(content)
            files.append((own / name, "broken"))
        note = f"{len(_BROKEN)} of them do not compile, which the demo adds to show retries"
    console.print(f"{len(files):,} files, a message for each; {note}")
    return [
        json.dumps({"path": str(file), "package": package, "size": file.stat().st_size})
        for file, package in files
    ]
