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
_FIELD = re.compile(r"(?m)^([A-Za-z0-9-]+):(.*)$")
_NAME = re.compile(r"(?m)^Package:.*$")


@dataclass(frozen=True, slots=True)
class Records:
    """Hold the real stanzas, how many records they are repeated to, and the damaged ones behind these."""

    real: list[str]
    number: int
    damaged: list[str]
    source: str

    def __len__(self) -> int:
        return self.number + len(self.damaged)

    @property
    def title(self) -> str:
        """Return how many there are, and what they are."""
        real = len(self.real)
        repeated = f": {real:,} real ones, repeated with names such as name#2" if self.number > real else ""
        damaged = f", {len(self.damaged)} of them damaged on purpose" if self.damaged else ""
        return f"{len(self):,}{repeated}{damaged}"

    def __iter__(self) -> Iterator[str]:
        """Yield all records. A repeated package has a name of its own, such as 0ad#2, so that each record can
        be told from the others where it comes out."""
        for n in range(self.number):
            copy, at = divmod(n, len(self.real))
            stanza = self.real[at]
            yield stanza if copy == 0 else _NAME.sub(rf"\g<0>#{copy + 1}", stanza, count=1)
        yield from self.damaged


def find_records(number: int) -> Records:
    """Return the first `number` records of this machine, which are repeated if there are fewer.

    Where all of them have the fields that a package needs, copies of some lose one.
    """
    real, source = _debian(), "packages known to apt (apt-cache dumpavail)"
    if not real:
        real = [*_distributions(), *_library()]
        source = "Python distributions and files of the standard library, since there is no apt index here"
    real = real[:number]
    complete = all(all(fields(stanza).get(name) for name in _EXPECTED) for stanza in real)
    return Records(real, number, _damage(real) if complete else [], source)


def fields(stanza: str) -> dict[str, str]:
    """Return the fields of a stanza; of a name that is there twice, the first."""
    return {name: value.strip(" ") for name, value in reversed(_FIELD.findall(stanza))}


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
