"""sql/REFERENCE.md: every public function has a chapter, a comment that keeps the rules, and an example that runs."""

from __future__ import annotations

import re
import secrets
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from conftest import create_database, drop_database
from support.documents import environment, psql_folder
from support.reference import EXAMPLES, BadReference, Example, anchor, read_examples, reference
from support.servers import REPOSITORY, TestServer

TEXT = EXAMPLES.read_text()
ALL = read_examples(TEXT)
REFERENCE = (REPOSITORY / "sql" / "REFERENCE.md").read_text()
ROLE = "shop"  # of the examples; roles are of the whole server, so the test has one of its own


@dataclass(frozen=True)
class Ready:
    """A database after what comes before the examples, and the variables that it set."""

    server: TestServer
    name: str
    role: str
    variables: dict[str, str]

    def psql(self, script: str, database: str | None = None) -> str:
        """Run a script in psql; return what it prints."""
        bindir = self.server.process.bindir if self.server.process is not None else None
        folder = psql_folder(bindir)
        assert folder is not None, "no psql here: install PostgreSQL's client, or pgque[embedded]"
        done = subprocess.run(
            [
                "psql",
                *("-X", "-q", "-v", "ON_ERROR_STOP=1"),
                *(word for name, value in self.variables.items() for word in ("-v", f"{name}={value}")),
                *("-f", "-"),
            ],
            input=re.sub(rf"\b{ROLE}\b(?!\.)", self.role, script),
            env=environment(self.server.dsn_for(database or self.name), [folder]),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def ready(server: TestServer, installed: str) -> Iterator[Ready]:
    """The database of the examples."""
    name = create_database(server, "pgque_reference", installed)
    role = f"{ROLE}_{secrets.token_hex(4)}"
    try:
        shown = Ready(server, name, role, {}).psql(ALL.before + "\n\\set\n")
        # psql's own variables are in upper case
        yield Ready(server, name, role, dict(re.findall(r"^([a-z_]+) = '(.*)'$", shown, re.MULTILINE)))
    finally:
        drop_database(server, name)
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(f"drop role if exists {role}".encode())


@pytest.mark.parametrize("example", ALL.all(), ids=lambda example: example.name)
def test_an_example_of_the_reference_runs(example: Example, ready: Ready) -> None:
    if example.mark == "commits":
        copy = create_database(ready.server, "pgque_reference", ready.name)
        try:
            ready.psql(example.sql, copy)
        finally:
            drop_database(ready.server, copy)
    elif example.mark == "not run":
        ready.psql(f"prepare example as {example.sql}")
    else:
        ready.psql(f"begin;\n{example.sql}\nrollback;")


def test_the_examples_that_are_not_run_are_known() -> None:
    assert [example.name for example in ALL.all() if example.mark == "not run"] == ["start"]


def test_an_example_that_fails_is_found(ready: Ready) -> None:
    with pytest.raises(AssertionError, match="queue not found"):
        ready.psql("begin;\nselect pgque.send('no such queue', 'x');\nrollback;")


# --- The generator ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("-- nack\n", "-- nack_it\n", "nack has no group and no example"),
        ("-- nack\n", "-- nack_it\n", "an example of nack_it, which is no public function or view"),
        ("pgque.nack(", "pgque.ack(", "the example of nack does not use pgque.nack"),
    ],
)
def test_the_reference_names_what_does_not_fit(own_dsn: str, old: str, new: str, told: str) -> None:
    assert old in TEXT
    with psycopg.connect(own_dsn) as connection, pytest.raises(BadReference, match=told):
        list(reference(connection, read_examples(TEXT.replace(old, new))))


def test_a_public_function_must_have_a_comment(own_dsn: str) -> None:
    with psycopg.connect(own_dsn) as connection, pytest.raises(BadReference, match="version has no comment"):
        connection.execute("comment on function pgque.version() is null")
        list(reference(connection))


def test_an_earlier_name_must_name_a_function_that_is_documented(own_dsn: str) -> None:
    with psycopg.connect(own_dsn) as connection:
        for named in ("extended", "queue_config"):  # there is no such function; an earlier name itself
            with pytest.raises(
                BadReference, match=f"set_visibility says to call {named}, which has no entry"
            ):
                connection.execute(
                    "comment on function pgque.set_visibility(bigint, interval, pgque.caller)"
                    f" is 'Earlier form of {named}().'".encode()
                )
                list(reference(connection))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("comment on column pgque.queue.queue_max_depth is null", "max_depth has no comment"),
        ("comment on column pgque.queue.queue_max_depth is 'Much.'", "max_depth is a number without a unit"),
    ],
)
def test_a_setting_must_have_a_comment_and_a_unit(own_dsn: str, change: str, told: str) -> None:
    with psycopg.connect(own_dsn) as connection, pytest.raises(BadReference, match=told):
        connection.execute(change.encode())
        list(reference(connection))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("-- send\nselect 1;\n", "line 1: send is in no group"),
        ("-- group: A\n\n-- send\n\n-- ack\nselect 1;\n", "line 3: send has no example"),
        ("-- group: A\n\n-- send\nselect 1;\n-- send\nselect 2;\n", "line 5: send has an example in line 3"),
        ("-- group: A\n\nselect 1;\n", "line 3: SQL that belongs to no example"),
        ("-- group: A\n-- not run: why\n", "line 2: a mark that belongs to no example"),
    ],
)
def test_a_line_out_of_place_is_refused(text: str, told: str) -> None:
    with pytest.raises(BadReference, match=re.escape(told)):
        read_examples(text)


# --- The page -----------------------------------------------------------------------------------------


def test_every_link_of_the_reference_leads_to_a_heading() -> None:
    headings = [anchor(title) for title in re.findall(r"^#+ (.+)$", REFERENCE, re.MULTILINE)]
    assert len(headings) == len(set(headings))
    assert set(re.findall(r"\]\(#([^)]+)\)", REFERENCE)) <= set(headings)
    for file in re.findall(r"\]\(([^#)]+)\)", REFERENCE):
        assert (REPOSITORY / "sql" / file).exists(), file


def test_every_public_function_is_in_one_chapter(dsn: str) -> None:
    public = """
        select p.proname, count(*) from pg_catalog.pg_proc as p
        where p.pronamespace = 'pgque'::regnamespace and p.proname !~ '^_' group by 1"""
    with psycopg.connect(dsn) as connection:
        functions: dict[str, int] = dict(connection.execute(public.encode()).fetchall())
        page = "\n".join(reference(connection))
    page = re.sub(r"(?s)Example:\n```sql\n.*?\n```\n", "", page)
    entries = re.findall(r"(?m)^### (\w+)$", page)
    assert len(entries) == len(set(entries))
    # A signature begins a line of a block, or a row of the chapter of earlier names.
    shown = Counter(
        re.findall(r"(?m)^(?:call |\| `)?pgque\.(\w+)\(", page.partition("\n## Before the examples\n")[0])
    )
    assert shown == functions


def test_pages_and_programs_call_documented_names(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        query = """
            select distinct p.proname from pg_catalog.pg_proc as p
            where p.pronamespace = 'pgque'::regnamespace
              and pg_catalog.obj_description(p.oid, 'pg_proc') ~ '^(Earlier (name|form)|Part) of '
              and not exists (
                select from pg_catalog.pg_proc as o where o.pronamespace = p.pronamespace and o.proname = p.proname
                  and pg_catalog.obj_description(o.oid, 'pg_proc') !~ '^(Earlier (name|form)|Part) of ')"""
        earlier = {row[0] for row in connection.execute(query.encode())}
    assert "queue_config" in earlier
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("python/*.md"), *REPOSITORY.glob("python/docs/*.md")]
    package = [
        path
        for path in (REPOSITORY / "python" / "src").rglob("*")
        if path.suffix in (".py", ".html", ".js") and "__pycache__" not in path.parts
    ]
    calls = {
        (path.name, name)
        for path in [*pages, *package]
        if path.name != "CHANGELOG.md"
        for name in re.findall(r"\bpgque\.(\w+)\(" if path in package else r"\b(\w+)\(", path.read_text())
        if name in earlier
    }
    # The client's method of this name, which no other function can serve
    assert calls == {("client.py", "set_visibility")}


def test_every_setting_is_in_the_reference(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        names = [row[0] for row in connection.execute("select param from pgque._setting_types()")]
    section = REFERENCE.split("\n## Settings\n")[1].split("\n## ")[0]
    shown = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert shown == [
        *names,
        "tick_period_ms",
        "expire_every",
        "delete_expired_every",
        "tick_share",
        "keep_actions",
        "keep_lags",
    ]


def test_a_comment_begins_with_what_the_caller_gets(dsn: str) -> None:
    query = """
        select p.oid::regprocedure::text, pg_catalog.obj_description(p.oid, 'pg_proc')
        from pg_catalog.pg_proc as p where p.pronamespace = 'pgque'::regnamespace and p.proname !~ '^_'"""
    with psycopg.connect(dsn) as connection:
        comments: dict[str, str] = {row[0]: row[1] for row in connection.execute(query.encode())}
    assert [
        signature
        for signature, comment in comments.items()
        if not re.match(
            r"[A-Z][a-z-]*s\b |PgQ's name for |(Earlier (name|form)|Part) of \w+\(\)[:.]", comment
        )
    ] == []
    # Words that mean something else in every other queue, or nothing; and errors are listed at the end.
    coined = re.compile(
        r"\b(hands? out|handed out|comes? again|laps\w+|looks?|bur(?:y|ied)|lets? go|answers?)\b"
    )
    assert {s: coined.findall(c) for s, c in comments.items() if coined.search(c)} == {}
    assert [s for s, c in comments.items() if re.search(r"\bPQ0\d\d\b", c.partition("Errors: ")[0])] == []


# Words that point at the comment of another object. A reader of \df+ sees one comment at a time.
LEANING = re.compile(
    r"^(The same|Same|Like|As|Likewise)\b|\b(as above|see above|one above|the above|those of (a )?texts?|[Ee]rrors: (as|those) (of|for|in)\b|the same (as|for)\b)"
)


def test_every_comment_stands_alone(dsn: str) -> None:
    query = """
        select coalesce(p.oid::regprocedure::text, t.oid::regtype::text, c.relname || coalesce('.' || a.attname, '')), d.description
        from pg_catalog.pg_description as d
        left join pg_catalog.pg_proc as p on d.classoid = 'pg_proc'::regclass and p.oid = d.objoid
        left join pg_catalog.pg_type as t on d.classoid = 'pg_type'::regclass and t.oid = d.objoid
        left join pg_catalog.pg_class as c on d.classoid = 'pg_class'::regclass and c.oid = d.objoid
        left join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attnum = d.objsubid and a.attnum > 0
        where 'pgque'::regnamespace in (p.pronamespace, t.typnamespace, c.relnamespace)"""
    with psycopg.connect(dsn) as connection:
        comments: dict[str, str] = dict(connection.execute(query.encode()).fetchall())
    assert len(comments) > 300
    assert {name: text for name, text in comments.items() if LEANING.search(text)} == {}
    assert [name for name, text in comments.items() if not re.search(r"[.)]$", text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "The same for JSON.",
        "Like send(), for bytes.",
        "Sends bytes. The options are those of a text.",
        "Sends bytes. Errors: as of send().",
    ],
)
def test_a_comment_that_leans_on_another_is_found(text: str) -> None:
    assert LEANING.search(text)


def test_overloads_raise_the_errors_of_each_other_and_share_their_text(dsn: str) -> None:
    """Those that differ in the type of the payload only; the reference shows once what their comments share."""
    query = """
        select p.proname, pg_catalog.replace(pg_catalog.regexp_replace(pg_catalog.pg_get_function_arguments(p.oid),
            '(payloads?) \\w+(\\[\\])?', '\\1'), ', caller pgque.caller DEFAULT CURRENT_USER', '') as arguments,
          pg_catalog.obj_description(p.oid, 'pg_proc')
        from pg_catalog.pg_proc as p where p.pronamespace = 'pgque'::regnamespace and p.proname !~ '^_'"""
    errors: dict[tuple[str, str], list[str]] = {}
    with psycopg.connect(dsn) as connection:
        for name, arguments, comment in connection.execute(query.encode()).fetchall():
            errors.setdefault((name, arguments), []).append(comment.partition("Errors: ")[2])
        page = "\n".join(reference(connection))
    alike = {key: found for key, found in errors.items() if len(found) > 1}
    assert {name for name, _ in alike} >= {"send", "send_batch", "send_idem", "create_recurring"}
    assert {key: found for key, found in alike.items() if len(set(found)) > 1} == {}
    assert page.count("headers: a JSON object that travels with the message.") == 1
