"""The code blocks of the documents run as written and print what the documents show; the examples run."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from conftest import install
from pgque.errors import BY_SQLSTATE
from support.documents import ROOT, BadPage, Page, difference, read, run_example
from support.servers import TestServer

DOCS = sorted((ROOT / "python" / "docs").glob("*.md"))
EXAMPLES = sorted(
    path
    for pattern in ("*.py", "*/demo.py")
    for path in (ROOT / "tests" / "examples").glob(pattern)
    if not path.name.startswith("_")
)
# Where nothing is installed yet: the page does it.
FROM_NOTHING = [ROOT / "README.md", ROOT / "python" / "README.md"]
PAGES = [*FROM_NOTHING, *DOCS]
LINKED = [*PAGES, ROOT / "python" / "SPARK.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "sql").glob("*.md"))]

# Of all pages that people write. A page that grows is a decision: another becomes shorter.
WORDS = 27_000
# Nobody reads these from start to end: two say what earlier versions changed, one is generated.
NOT_COUNTED = ("CHANGELOG.md", "changelog-before-0.8.md", "REFERENCE.md")

# One more block that nobody runs is a decision: change the number together with the page.
NOT_RUN = {
    "README.md": 4,
    "python/README.md": 1,
    "python/SPARK.md": 5,
    "python/docs/benchmarks.md": 1,
    "python/docs/docker.md": 3,
    "python/docs/frameworks.md": 1,
    "python/docs/managed.md": 1,
    "python/docs/monitoring.md": 4,
    "python/docs/outbox.md": 1,
    "python/docs/replicas.md": 2,
    "python/docs/ticker.md": 2,
    "python/docs/top.md": 1,
    "python/docs/upgrade.md": 2,
    "python/docs/web.md": 1,
    "python/docs/workers.md": 3,
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_blocks_of_a_document_run_and_print_what_it_shows(
    path: Path, server: TestServer, fresh_dsn: str, tmp_path: Path
) -> None:
    if path not in FROM_NOTHING:
        install(fresh_dsn)
    bindir = server.process.bindir if server.process is not None else None
    page = Page(path, fresh_dsn, tmp_path, bindir)
    assert page.run() == sum(block.runs for block in page.blocks)


def test_the_blocks_that_are_not_run_are_counted() -> None:
    pages = [*PAGES, ROOT / "python" / "SPARK.md"]
    blocks = {name(path): read(path.read_text(encoding="utf-8")) for path in pages}
    found = {page: sum(not block.runs for block in found) for page, found in blocks.items()}
    assert {page: count for page, count in found.items() if count} == NOT_RUN


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1200


def test_the_documents_are_short() -> None:
    """Changelogs and generated texts (the function reference and Spark's options) do not count."""
    pages = [path for path in LINKED if path.name not in NOT_COUNTED]
    assert ROOT / "sql" / "RELIABILITY.md" in pages
    texts = {name(path): path.read_text(encoding="utf-8") for path in pages}
    options = texts["python/SPARK.md"].split("\n## Options\n")[1].partition("\n## ")[0]
    counts = {page: len(text.replace(options, "").split()) for page, text in texts.items()}
    assert sum(counts.values()) <= WORDS, counts


def test_the_runbook_has_a_section_for_each_alert() -> None:
    rules = (ROOT / "python" / "src" / "pgque" / "ops" / "monitoring" / "alerts.yml").read_text(
        encoding="utf-8"
    )
    runbook = (ROOT / "python" / "docs" / "runbook.md").read_text(encoding="utf-8")
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(alerts) > 10
    assert [alert for alert in alerts if f"\n## {alert}\n" not in runbook] == []


def test_the_commands_of_the_runbook_fit_the_functions(fresh_dsn: str) -> None:
    """Each is called, and may fail with an error of pgque only."""
    install(fresh_dsn)
    page = (ROOT / "python" / "docs" / "runbook.md").read_text(encoding="utf-8")
    text, questions = page.split("\n## Questions\n")
    commands = [f"select * from pgque.{call}" for call in re.findall(r"`(\w+\([^`]*\))`", questions)]
    commands += [found for found in re.findall(r"`(select [^`]*)`", text) if "pgque" in found]
    assert len(commands) > 25
    values = {"dl_id": "1", "tick": "pgque.tick_for('orders', 'latest')"}
    failed = []
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        conn.execute("select pgque.create_queue('orders'), pgque.subscribe('orders', 'billing')")
        for command in commands:
            called = re.sub(r"\b(?:dl_id|tick)\b(?!')", lambda word: values[word[0]], command)
            try:
                with conn.transaction(force_rollback=True):
                    conn.execute(called.encode())
            except psycopg.Error as error:
                if (error.sqlstate or "")[:2] != "PQ":
                    failed.append(f"{command}: {error}")
    assert failed == []


def test_the_page_of_errors_has_each_code_with_its_class() -> None:
    page = (ROOT / "python" / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = {code: f"| {code} | `{kind.__name__}` |" for code, kind in BY_SQLSTATE.items() if code[:2] == "PQ"}
    assert [code for code, row in rows.items() if row not in page] == []


def anchors(text: str) -> set[str]:
    """Return the fragments that lead to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```$", "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", LINKED, ids=name)
def test_each_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    prose = re.sub(r"(?ms)^ *```.*?^ *```$|`[^`\n]*`", "", text)
    for link in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose):
        target, _, fragment = "".join(link).partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        if fragment:
            assert fragment in anchors(file.read_text(encoding="utf-8")), link


def test_each_page_is_in_the_index_and_in_the_menu_of_the_site() -> None:
    index = (ROOT / "python" / "docs" / "README.md").read_text(encoding="utf-8")
    menu = (ROOT / "python" / "mkdocs.yml").read_text(encoding="utf-8")
    assert [path.name for path in DOCS if path.name != "README.md" and f"({path.name})" not in index] == []
    assert [name(path) for path in LINKED if f": {name(path)}\n" not in menu] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_an_example_runs(path: Path, own_dsn: str, tmp_path: Path) -> None:
    run_example(path, own_dsn, tmp_path)


# --- The rules of the pages, see support/documents.py -------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("```\nselect 1\n```\n", "a block of language ''"),
        ("```pyhton\nprint()\n```\n", "a block of language 'pyhton'"),
        ("<!-- not run -->\n```ini\nx\n```\n", "a block of language 'ini'"),
        ("<!-- not run: why -->\nSome text.\n```ini\nx\n```\n", "a block of language 'ini'"),
        ("```sql\nselect 1\n", "has no end"),
        ("```text\n1\n```\n", "output of no block"),
        ("```sh\ntrue\n```\n```text\n1\n```\n```text\n2\n```\n", "output of no block"),
        ("Install:\n\n    pip install pgque\n", "an indented block"),
    ],
)
def test_a_page_that_breaks_the_rules_fails(text: str, told: str) -> None:
    with pytest.raises(BadPage, match=told):
        read(text)


def test_a_mark_belongs_to_the_next_block_only() -> None:
    text = (
        "<!-- not run: needs a cluster -->\n```ini\nx\n```\n```text\ny\n```\n```sh\nz\n```\n```text\nw\n```\n"
    )
    with pytest.raises(BadPage, match="output of no block"):
        read(text.replace("```sh\nz\n```\n", ""))
    blocks = read(text.replace("```text\ny\n```\n", ""))
    assert [(block.runs, block.output) for block in blocks] == [(False, None), (True, "w\n")]


def test_a_block_that_runs_last_may_be_stopped_too() -> None:
    marks = ("run last", "run last; stopped after its output", "stopped after its output", "figures", "")
    text = "".join(f"<!-- {mark} -->\n```sh\ntrue\n```\n" for mark in marks)
    stopped = "stopped after its output"
    found = [(block.last, block.mark) for block in read(text)]
    assert found == [(True, ""), (True, stopped), (False, stopped), (False, ""), (False, "")]
    with pytest.raises(BadPage, match="output of no block"):
        read(text + "<!-- run last -->\n```text\n```\n")


def test_output_is_compared_whole() -> None:
    assert difference(" a | b \n---\n 1 | …\n", "\n a | b\n---\n 1 | 4711  \n\n") is None
    assert difference("begin\n…\nend", "begin\nmuch\nmore\nend") is None
    assert difference("begin\n…\nend", "begin\nend") is None
    for wrong in ("begin\nmore", "", "begin\nend\nmore", "Begin\nend"):
        assert difference("begin\n…\nend", wrong) is not None
    assert difference("1.5", "1x5") is not None


BAD_BLOCKS = {
    "```sql\nselect 1/0;\n```\n": "(?s)line 1 .sql.: .*division by zero",
    "Text\n\n```sql\nselect 1 as n;\n```\n```text\n n\n---\n 2\n(1 row)\n```\n": "line 3 .sql.: --- the page shows",
    "```sh\nfalse\n```\n": "line 1 .sh.: ended with 1",
    "```python\nprint(1)\nraise ValueError(2)\n```\n": "(?s)line 1 .python.: failed:\n1\n.*line 3.*ValueError: 2",
    "```python\nprint(1)\n```\n```text\n2\n```\n": "--- it prints\n1",
    "```python\nraise KeyboardInterrupt\n```\n": "stopped",
    "```python\nimport os; os._exit(3)\n```\n": "ended with 3",
    "<!-- stopped after its output -->\n```python\npass\n```\n": "none is shown",
    "<!-- stopped after its output -->\n```python\nprint(1)\n```\n```text\n2\n```\n": "ended by itself",
    "<!-- stopped after its output -->\n```sh\ntrue\n```\n": "only Python",
}


@pytest.mark.parametrize("text", BAD_BLOCKS)
def test_a_block_that_does_not_do_what_the_page_shows_fails(
    text: str, server: TestServer, fresh_dsn: str, tmp_path: Path
) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    bindir = server.process.bindir if server.process is not None else None
    with pytest.raises(BadPage, match=BAD_BLOCKS[text]):
        Page(path, fresh_dsn, tmp_path, bindir).run()


def test_a_page_is_one_session_in_its_own_database(server: TestServer, own_dsn: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "<!-- run last -->\n```python\nprint(n)\n```\n```text\n7\n```\n"
        "```sql\nselect 5 as n \\gset\n```\n```sql\nselect :n + 1 as n, current_database() = 'mydb' as own;\n```\n"
        "```text\n n | own\n---+-----\n 6 | t\n(1 row)\n```\n"
        "```python\nimport psycopg\nn = 7\n```\n"
        "<!-- stopped when: select true -->\n"
        "```python\nimport time\ntime.sleep(1000)\n```\n"
        "```python\nwith psycopg.connect('dbname=mydb') as conn:\n"
        "    print(n, conn.info.dbname == 'mydb')\n```\n"
        "```text\n7 True\n```\n"
        "```sh\nsleep 1000 &\nls README.md\n```\n```text\nREADME.md\n```\n"
    )
    bindir = server.process.bindir if server.process is not None else None
    page = Page(path, own_dsn, tmp_path, bindir)
    assert page.run() == 7
    assert conninfo_to_dict(own_dsn)["dbname"] != "mydb"
