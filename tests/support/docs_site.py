"""What `make docs` writes beside the pages: the references of Python and of the command line, llms.txt.

A hook of MkDocs, named in python/mkdocs.yml. Everything comes from docstrings, --help and the index of the pages.
"""

from __future__ import annotations

import inspect
import lzma
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import pgque
from pgque.codec.encode import FLOOR, _numbers

REPOSITORY = Path(__file__).resolve().parents[2]
INDEX = "python/docs/README.md"
MODULES = {
    "pgque.testing": "Tests of handlers",
    "pgque.spark": "Spark",
    "pgque.alembic": "Alembic",
    "pgque.django.operations": "Django's migrations",
    "pgque.asgi": "Workers in a web application",
    "pgque.embedded": "A server for development",
}
TITLES = {
    "functions": "Functions",
    "classes": "Client, consumers, workers",
    "types": "Types and outcomes",
    "errors": "Errors",
}
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)[^)]*\)")
COMMAND_LINE = """# Command line

::: mkdocs-click
    :module: pgque.cli
    :command: main
    :prog_name: pgque
    :depth: 1
    :style: plain
    :list_subcommands: true
"""  # its epilogue, which all commands have, is left out by mkdocs-click


def settings() -> str:
    """Return a section for each setting, from the table in the reference of the SQL functions."""
    text = (REPOSITORY / "sql" / "REFERENCE.md").read_text(encoding="utf-8")
    section = text.split("\n## Settings\n")[1].partition("\n## ")[0].replace("](#", "](REFERENCE.md#")
    introduction, *rows = section.split("\n| ")
    earlier = {
        path.name.removeprefix("pgque-").removesuffix(".sql.xz"): lzma.decompress(path.read_bytes()).decode()
        for path in sorted((REPOSITORY / "tests" / "sql" / "previous").glob("pgque-*.sql.xz"))
        if _numbers(path.name.removeprefix("pgque-").removesuffix(".sql.xz")) >= FLOOR
    }
    page = f"# Settings\n{introduction}\n"
    for row in rows[1:]:
        name, kind, default, unit, values, where, meaning = (cell.strip() for cell in row.split(" | ", 6))
        known = (
            version for version, sql in earlier.items() if re.search(rf"\b(queue_)?{name.strip('`')}\b", sql)
        )
        since = next(known, pgque.__version__)
        page += (
            f"\n## {name}\n\n{meaning.rstrip(' |')}\n\n"
            f"- Type: {kind}{f', in {unit}' if unit else ''}. Default: {default}.{f' Values: {values}.' if values else ''}\n"
            f"- Set for: {where}.{'' if since == min(earlier) else f' Since {since}.'}\n"
        )
    return page


def public() -> dict[str, list[str]]:
    """Return the names of the package, a list for each page; twins of asyncio follow the sync ones."""
    pages: dict[str, list[str]] = {"functions": [], "classes": [], "types": [], "errors": []}
    for name in sorted(pgque.__all__, key=lambda name: (name.replace("Async", ""), "Async" in name)):
        value = getattr(pgque, name)
        if not inspect.isclass(value):
            if callable(value):
                pages["functions"].append(name)
        elif value.__module__.endswith((".types", ".outcomes")):
            pages["types"].append(name)
        else:
            pages["errors" if issubclass(value, BaseException) else "classes"].append(name)
    return pages


def entry(name: str, *, members: bool = True, constructor: bool = True) -> str:
    """Return the line that mkdocstrings replaces by what the docstrings say."""
    options = "" if members else "      members: false\n"
    options += "" if constructor else "      merge_init_into_class: false\n"
    return f"\n::: {name}\n" + (f"    options:\n{options}" if options else "")


def references() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of each generated page."""
    yield "sql/settings.md", settings()
    yield "python/reference/command-line.md", COMMAND_LINE
    for page, names in public().items():
        text = f"# {TITLES[page]}\n"
        for name in names:
            twin = name.replace("Async", "")
            text += entry(f"pgque.{name}", members=twin == name, constructor=page != "errors")
            if twin != name:
                text += f"\nThe methods are those of [{twin}][pgque.{twin}], to be awaited.\n"
        yield f"python/reference/{page}.md", text
    for module, title in MODULES.items():
        yield f"python/reference/{module}.md", f"# {title}\n" + entry(module)


def index(root: Path) -> Iterator[str]:
    """Yield the index of all pages as llmstxt.org has it: a heading for each section, a link and a text for each page."""
    page = root / INDEX
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            yield f"\n{line}\n"
        elif line.startswith("- ["):
            links, _, about = line.removeprefix("- ").partition(": ")
            about = LINK.sub(r"\1", about)
            for title, target in LINK.findall(links):
                path = (page.parent / target).resolve().relative_to(root.resolve())
                yield f"- [{title}]({path})" + (f": {about}" if about else "")
    yield "\n## References, from docstrings and --help\n"
    for path, text in references():
        title = text.splitlines()[0].removeprefix("# ")
        yield f"- [{title}]({path.removesuffix('.md')}.html)"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path, text in references():
        files.append(File.generated(config, path, content=text))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, the pages in Markdown to which it leads, and llms-full.txt with all of them."""
    root, site = Path(config.docs_dir), Path(config.site_dir)
    summary = (root / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    text = "\n".join(["# pgque", "", "> " + summary.replace("\n", "\n> "), *index(root)]) + "\n"
    (site / "llms.txt").write_text(text, encoding="utf-8")
    linked = [root / target for _, target in LINK.findall(text)]
    lacking = [
        path.name for path in (root / INDEX).parent.glob("*.md") if path not in [*linked, root / INDEX]
    ]
    if lacking:
        raise PluginError(
            f"llms.txt lacks pages, as {INDEX} has no item that begins with a link to them: {lacking}"
        )
    pages = [
        page
        for page in linked
        if page.suffix == ".md" and not page.stem.lower().startswith("changelog") and page.exists()
    ]
    full = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    (site / "llms-full.txt").write_text(full, encoding="utf-8")
    for page in root.rglob("*.md"):
        shutil.copy(page, site / page.relative_to(root))
