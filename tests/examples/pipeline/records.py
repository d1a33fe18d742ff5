"""What goes into the pipeline: real records, as stanzas of text in the format of Debian's package index."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from pgque.demo.files import library_files

_FEW = 1000  # records from which on an index is worth having
_EXPECTED = ("Package", "Version", "Section", "Maintainer", "Installed-Size")
_DAMAGED = 5


@dataclass(frozen=True, slots=True)
class Records:
    """Hold the stanzas, where they are from, and how many were damaged on purpose."""

    stanzas: list[str]
    source: str
    damaged: int


def find_records(limit: int | None = None) -> Records:
    """Return the records of this machine, the first `limit` of them.

    Where all of them have the fields that a package needs, some copies of real ones lose one.
    """
    stanzas, source = _debian(), "packages known to apt (apt-cache dumpavail)"
    if not stanzas:
        stanzas = [*_distributions(), *_library()]
        source = "Python distributions and files of the standard library, since there is no apt index here"
    stanzas = stanzas[:limit]
    damaged = [] if any(not all(field(s, name) for name in _EXPECTED) for s in stanzas) else _damage(stanzas)
    return Records(stanzas + damaged, source, len(damaged))


def field(stanza: str, name: str) -> str:
    """Return a field of a stanza, '' where it has none."""
    found = re.search(rf"(?m)^{name}:(.*)$", stanza)
    return found[1].strip(" ") if found else ""


def _debian() -> list[str]:
    if shutil.which("apt-cache") is None:
        return []
    found = _dump()
    if len(found) < _FEW and os.geteuid() == 0:
        subprocess.run(
            ["apt-get", "update", "-qq"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
        )
        found = _dump()
    return found if len(found) >= _FEW else []


def _dump() -> list[str]:
    done = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=False)
    return [
        stanza.strip("\n") for stanza in done.stdout.decode(errors="replace").split("\n\n") if stanza.strip()
    ]


def _damage(stanzas: list[str]) -> list[str]:
    """Copy some stanzas without one of the fields, and say so in them."""
    step = max(len(stanzas) // _DAMAGED, 1)
    return [
        re.sub(rf"(?m)^{name}:.*\n?", "", stanza) + "\nX-Damaged: on purpose, by make pipeline"
        for name, stanza in zip(_EXPECTED, stanzas[::step], strict=False)
    ]


def _distributions() -> Iterator[str]:
    for distribution in importlib.metadata.distributions():
        about = distribution.metadata.json
        maintainer = next(
            (about[k] for k in ("maintainer_email", "author_email", "maintainer", "author") if k in about), ""
        )
        yield _stanza(
            Package=str(about.get("name", "")),
            Version=str(about.get("version", "")),
            Section="python",
            Maintainer=str(maintainer),
            Architecture="all",
            Installed_Size=str(sum(file.size or 0 for file in distribution.files or []) // 1024 or ""),
            Homepage=str(about.get("home_page", "")),
            Depends=", ".join(re.split(r"[\s;\[(<>=!~]", need)[0] for need in distribution.requires or []),
        )


def _library() -> Iterator[str]:
    for path, package in library_files():
        text = path.read_text(errors="replace")
        author = re.search(r"(?m)^__author__ *= *[\"'](.+)[\"']", text)
        yield _stanza(
            Package="/".join(path.parts[path.parts.index(package) :]) if package in path.parts else path.name,
            Version=platform.python_version(),
            Section=f"stdlib/{package}",
            Maintainer=author[1] if author else "Python",
            Architecture="all",
            Installed_Size=str(-(-len(text) // 1024)),
            Depends=", ".join(sorted(set(re.findall(r"(?m)^(?:import|from) +(\w+)", text)))),
        )


def _stanza(**fields: str) -> str:
    return "\n".join(f"{k.replace('_', '-')}: {' '.join(v.split())}" for k, v in fields.items() if v)
