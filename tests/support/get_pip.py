"""Install pip for the Python that runs this, as venv.sh asks where ensurepip is missing.

The newest wheel of pip comes from the index that PIP_INDEX_URL names, or from PyPI, and installs itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag, urljoin
from urllib.request import urlopen

INDEX = "https://pypi.org/simple"


class Wheels(HTMLParser):
    """Collect the wheels on an index page that this Python can use: version and link."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[tuple[int, ...], str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        link = values.get("href") or ""
        wheel = re.search(r"(?:^|/)pip-(\d+(?:\.\d+)+)-py3-none-any\.whl(?:#|$)", link)
        oldest = re.search(r">=\s*3\.(\d+)", values.get("data-requires-python") or "")
        if tag != "a" or wheel is None or "data-yanked" in values:
            return
        if oldest is None or sys.version_info[1] >= int(oldest[1]):
            self.found.append((tuple(int(part) for part in wheel[1].split(".")), link))


def read(url: str) -> bytes:
    with urlopen(url, timeout=30) as answer:  # noqa: S310  the index is the user's choice
        content: bytes = answer.read()
        return content


def main() -> None:
    page = (os.environ.get("PIP_INDEX_URL") or INDEX).rstrip("/") + "/pip/"
    wheels = Wheels()
    wheels.feed(read(page).decode())
    if not wheels.found:
        sys.exit(f"{page} has no wheel of pip for Python 3.{sys.version_info[1]}")
    url, fragment = urldefrag(urljoin(page, max(wheels.found)[1]))
    content = read(url)
    algorithm, _, expected = fragment.partition("=")
    if algorithm == "sha256" and hashlib.sha256(content).hexdigest() != expected:
        sys.exit(f"{url} is not what {page} says: its SHA-256 is another")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder, url.rpartition("/")[2])
        wheel.write_bytes(content)
        install = ["install", "-qq", "--disable-pip-version-check", "--no-index", str(wheel)]
        subprocess.run([sys.executable, f"{wheel}/pip", *install], check=True)


if __name__ == "__main__":
    main()
