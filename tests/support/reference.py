"""Write the function reference from the catalogs and from reference_examples.sql.

`python -m support.catalog reference` prints it. Signatures, comments, rights and settings come from an
installed database; groups and examples from the file beside this module, which says how it is written.
A function whose comment begins with "Earlier name of", "Earlier form of" or "Part of" another one is in the
chapter of earlier names instead, without an example.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]

EXAMPLES = Path(__file__).with_name("reference_examples.sql")
LINE = 110  # columns of a signature


class BadReference(ValueError):
    """A public function without group, example or comment, or an example of something that is not there."""


@dataclass
class Example:
    """The SQL that shows one function or view. mark is empty, "commits" or "not run"."""

    name: str
    line: int
    sql: str = ""
    mark: str = ""
    reason: str = ""


@dataclass
class Group:
    """Functions for one kind of user, in the order of the file."""

    title: str
    text: str = ""
    examples: list[Example] = field(default_factory=list)


@dataclass
class Examples:
    """All of reference_examples.sql."""

    before_title: str
    before: str
    groups: list[Group]

    def all(self) -> list[Example]:
        """Return the examples of all groups."""
        return [example for group in self.groups for example in group.examples]


def read_examples(text: str) -> Examples:
    """Return what the text of reference_examples.sql says. Raises BadReference for a line out of place."""
    found = Examples("", "", [])
    seen: dict[str, int] = {}
    example: Example | None = None
    introduction = False  # within the lines that introduce a group
    body: list[str] = []

    def end() -> None:
        sql = "\n".join(body).strip()
        body.clear()
        if example is not None:
            if not sql:
                raise BadReference(f"line {example.line}: {example.name} has no example")
            example.sql = sql
        elif found.before_title and not found.groups:
            found.before = sql

    for number, line in enumerate(text.splitlines(), 1):
        if title := re.fullmatch(r"-- (before|group): (.+)", line):
            end()
            example, introduction = None, title[1] == "group"
            if introduction:
                found.groups.append(Group(title[2]))
            else:
                found.before_title = title[2]
        elif name := re.fullmatch(r"-- ([a-z][a-z0-9_]*)", line):
            end()
            introduction = False
            if not found.groups:
                raise BadReference(f"line {number}: {name[1]} is in no group")
            if name[1] in seen:
                raise BadReference(f"line {number}: {name[1]} has an example in line {seen[name[1]]}")
            seen[name[1]] = number
            example = Example(name[1], number)
            found.groups[-1].examples.append(example)
        elif mark := re.fullmatch(r"-- (commits|not run): (.+)", line):
            if example is None:
                raise BadReference(f"line {number}: a mark that belongs to no example")
            example.mark, example.reason = mark[1], mark[2]
        elif introduction:
            introduction = bool(line)
            found.groups[-1].text += line.removeprefix("--").strip() + "\n" if line else ""
        elif example is not None or (found.before_title and not found.groups):
            body.append(line)
        elif line and not line.startswith("--"):
            raise BadReference(f"line {number}: SQL that belongs to no example")
    end()
    return found


# --- What the catalogs say ---------------------------------------------------------------------------

FUNCTIONS = """
select p.oid, p.proname, p.prokind::text,
       pg_catalog.pg_get_function_arguments(p.oid),
       coalesce(pg_catalog.pg_get_function_result(p.oid), ''),
       pg_catalog.obj_description(p.oid, 'pg_proc'),
       array(select distinct pg_catalog.pg_get_userbyid(x.grantee)::text
             from pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) as x
             where x.grantee <> p.proowner and x.privilege_type = 'EXECUTE' order by 1)
from pg_catalog.pg_proc as p
where p.pronamespace = 'pgque'::regnamespace and p.proname !~ '^_'
order by p.oid
"""

VIEWS = """
select c.oid, c.relname, 'v',
       (select pg_catalog.string_agg(a.attname || ' ' || pg_catalog.format_type(a.atttypid, a.atttypmod), ', ' order by a.attnum)
        from pg_catalog.pg_attribute as a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
       '',
       pg_catalog.obj_description(c.oid, 'pg_class'),
       array(select distinct pg_catalog.pg_get_userbyid(x.grantee)::text
             from pg_catalog.aclexplode(coalesce(c.relacl, pg_catalog.acldefault('r', c.relowner))) as x
             where x.grantee <> c.relowner order by 1)
from pg_catalog.pg_class as c
where c.relnamespace = 'pgque'::regnamespace and c.relkind = 'v' and c.relname !~ '^_'
order by c.oid
"""

# The settings of a queue, in the order of _setting_types(), and those of the loop.
SETTINGS = """
select t.param, t.type, a.attname, pg_catalog.col_description(a.attrelid, a.attnum),
       pg_catalog.pg_get_expr(d.adbin, d.adrelid),
       array(select pg_catalog.pg_get_constraintdef(k.oid) from pg_catalog.pg_constraint as k
             where k.conrelid = a.attrelid and k.contype = 'c' and a.attnum = any (k.conkey) order by k.conname)
from pgque._setting_types() with ordinality as t (param, type, n)
left join pg_catalog.pg_attribute as a on a.attrelid = 'pgque.queue'::regclass and a.attname = 'queue_' || t.param
left join pg_catalog.pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
order by t.n
"""

LOOP_SETTINGS = """
select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attname,
       pg_catalog.col_description(a.attrelid, a.attnum),
       pg_catalog.pg_get_expr(d.adbin, d.adrelid),
       array(select pg_catalog.pg_get_constraintdef(k.oid) from pg_catalog.pg_constraint as k
             where k.conrelid = a.attrelid and k.contype = 'c' and a.attnum = any (k.conkey) order by k.conname)
from pg_catalog.pg_attribute as a
left join pg_catalog.pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = 'pgque.config'::regclass and a.attnum > 0 and not a.attisdropped
  and pg_catalog.col_description(a.attrelid, a.attnum) ~ 'Set by '
order by a.attnum
"""

TYPE_COLUMNS = """
select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), pg_catalog.col_description(a.attrelid, a.attnum)
from pg_catalog.pg_attribute as a
where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""

CALLER = re.compile(r",? ?caller pgque\.caller DEFAULT CURRENT_USER")
UNIT = re.compile(r"\s*\bUnit: ([^.]+)\.$")
EARLIER = re.compile(r"(Earlier (?:name|form)|Part) of (\w+)\(\)[:.]\s*")
SET_BY = re.compile(r"\s*\bSet by (\w+)(\([^)]*\))\.")
PAYLOAD = re.compile(r"(?<=\bpayload )\w+|(?<=\bpayloads )\w+")
EARLIER_NAMES = "Earlier names"
OLD_COLUMNS = "Old names of columns"
# Old names of columns, which existing clients read, and the words of new functions, of the page and of the commands.
WORDS = {
    "ev_id, event_id": "msg_id",
    "ev_data": "payload",
    "ev_bytes": "payload_bytes",
    "ev_type, type_name": "type",
    "ev_headers": "headers",
    "ev_key": "key",
    "ev_extra1 to ev_extra4": "extra1 to extra4",
    "ev_time": "created_at",
    "ev_expires": "expires_at",
    "ev_retry": "retry_count",
    "ev_error": "last_error",
    "dl_reason": "reason",
    "dl_time": "dead_at",
    "dl_held": "held",
    "queue_name": "queue",
    "consumer_name": "consumer",
    "subconsumer_name": "worker",
    "pending_events": "pending messages",
    "skipped_events": "missed messages",
    "ev_new": "messages after the last tick",
    "ev_per_sec": "messages a second",
}
# Types whose values have no unit of their own.
NUMBERS = frozenset({"int", "integer", "bigint"})
NONE = ""


@dataclass
class Routine:
    """A function, procedure or view."""

    name: str
    signature: str
    text: str
    errors: str
    roles: str

    @property
    def instead(self) -> str | None:
        """The name of the function to call instead, None if it is this one."""
        found = EARLIER.match(self.text)
        return found[2] if found else None


def reference(connection: Connection, examples: Examples | None = None) -> Iterator[str]:
    """Yield the lines of the reference. Raises BadReference when something public has no group or example."""
    if examples is None:
        examples = read_examples(EXAMPLES.read_text())
    row = connection.execute("select pgque.version()").fetchone()
    assert row is not None
    found = _routines(connection)
    routines, earlier = documented(found), [routine for routine in found if routine.instead]
    _compare(routines, earlier, examples)
    yield f"# pgque {row[0]}: function reference"
    yield ""
    yield "Generated by `make reference`, from the comments in the database and the examples in"
    yield "[reference_examples.sql](../tests/support/reference_examples.sql), which are tested. Names are in schema `pgque`."
    yield ""
    yield "| for | functions |"
    yield "|---|---|"
    for group in examples.groups:
        links = ", ".join(f"[{example.name}](#{example.name})" for example in group.examples)
        yield f"| {_link(group.title)} | {links} |"
    yield f"| {_link(EARLIER_NAMES)} | what to call instead |"
    yield f"| {_link(OLD_COLUMNS)} | what `ev_data` and the like mean |"
    yield f"| {_link('Settings')} | of queues and of the loop |"
    yield f"| {_link('Types')} | what `receive`, `ack` and others return |"
    yield ""
    yield "- **Roles** are those that may call the function besides the owner. `pgque_admin` is a member of `pgque_reader` and"
    yield "  `pgque_writer`. `pgque_user` may call it for the queues that it has a right to (see [grant_queue](#grant_queue))."
    yield "- Functions for `pgque_user` have a last argument `caller`. Leave it out, as here."
    yield "- **Errors** are SQLSTATEs. Besides them any call can fail with 42501 (no right)."
    yield f"- **Words**: some results have [old names of columns](#{anchor(OLD_COLUMNS)}), such as `ev_data` for the payload."
    yield f"- The examples follow on those of {_link(examples.before_title)}: `:batch` and the like are variables of psql."
    for group in examples.groups:
        yield ""
        yield f"## {group.title}"
        if group.text:
            yield ""
            yield group.text.strip()
        for example in group.examples:
            yield ""
            yield from _entry(example, routines[example.name])
    yield ""
    yield from _earlier(earlier)
    yield ""
    yield from _words()
    yield ""
    yield from _settings(connection)
    yield ""
    yield from _types(connection)
    yield ""
    yield f"## {examples.before_title}"
    yield ""
    yield "Run once, in a new database:"
    yield ""
    yield "```sql"
    yield examples.before
    yield "```"


def documented(found: Sequence[Routine]) -> dict[str, list[Routine]]:
    """Return the functions and views that are no earlier names, by name."""
    routines: dict[str, list[Routine]] = {}
    for routine in found:
        if not routine.instead:
            routines.setdefault(routine.name, []).append(routine)
    return routines


def _compare(routines: dict[str, list[Routine]], earlier: Sequence[Routine], examples: Examples) -> None:
    known = {example.name: example for example in examples.all()}
    wrong = [
        *(f"{name} has no group and no example" for name in sorted(routines.keys() - known.keys())),
        *(
            f"line {known[name].line}: an example of {name}, which is no public function or view"
            for name in sorted(known.keys() - routines.keys())
        ),
        *(
            f"line {example.line}: the example of {example.name} does not use pgque.{example.name}"
            for example in known.values()
            if not re.search(rf"\bpgque\.{example.name}\b", example.sql)
        ),
        *(
            f"{name} has no comment (comment on function … in sql/parts)"
            for name, overloads in sorted(routines.items())
            if not all(routine.text for routine in overloads)
        ),
        *(
            f"{routine.name} says to call {routine.instead}, which has no entry"
            for routine in earlier
            if routine.instead not in routines
        ),
    ]
    if wrong:
        raise BadReference("\n".join(wrong))


def _routines(connection: Connection) -> list[Routine]:
    """Return the public functions and views in the order of their definition."""
    found: list[Routine] = []
    for query in (FUNCTIONS, VIEWS):
        for _, name, kind, arguments, result, comment, roles in connection.execute(query).fetchall():
            text, _, errors = " ".join((comment or "").split()).partition(" Errors: ")
            signature = _view(name, arguments) if kind == "v" else _signature(name, kind, arguments, result)
            who = ", ".join(f"`{role}`" for role in roles) or "the owner only"
            found.append(Routine(name, signature, text, errors, who))
    return found


def _entry(example: Example, overloads: Sequence[Routine]) -> Iterator[str]:
    yield f"### {example.name}"
    # Overloads that differ only in the type of the payload have one block.
    kinds: dict[str, list[Routine]] = {}
    for routine in overloads:
        kinds.setdefault(PAYLOAD.sub("", routine.signature), []).append(routine)
    for alike in kinds.values():
        yield ""
        yield "```sql"
        yield "\n".join(routine.signature for routine in alike)
        yield "```"
        texts = [_sentences(routine.text) for routine in alike]
        common = _common_end(texts) if len(texts) > 1 else []
        for text in texts:
            yield f"{'- ' if len(alike) > 1 else ''}{' '.join(text[: len(text) - len(common)])}"
        if common:
            yield ""
            yield " ".join(common)
        for errors in dict.fromkeys(routine.errors for routine in alike if routine.errors):
            yield ""
            yield f"Errors: {errors}"
    yield ""
    yield "Example:"
    yield "```sql"
    yield example.sql
    yield "```"
    roles = list(dict.fromkeys(routine.roles for routine in overloads))
    yield f"Roles: {'; '.join(roles)}."


def _sentences(text: str) -> list[str]:
    """Return the sentences of a comment."""
    return re.split(r"(?<=\.) ", text)


def _common_end(texts: Sequence[Sequence[str]]) -> list[str]:
    """Return the sentences with which all texts end; each text keeps its first one for itself."""
    common: list[str] = []
    for sentences in zip(*(reversed(text[1:]) for text in texts), strict=False):
        if len(set(sentences)) > 1:
            break
        common.insert(0, sentences[0])
    return common


def _earlier(routines: Sequence[Routine]) -> Iterator[str]:
    yield f"## {EARLIER_NAMES}"
    yield ""
    yield "They stay, and behave as before. New code calls the function that is named here."
    yield ""
    yield "| function | is | meaning |"
    yield "|---|---|---|"
    for routine in sorted(routines, key=lambda routine: routine.name):
        call = " ".join(routine.signature.split()).partition(") returns ")[0].removesuffix(")") + ")"
        kind = EARLIER.match(routine.text)
        assert kind is not None
        meaning = routine.text[kind.end() :]
        if routine.errors:
            meaning += f" Errors: {routine.errors}"
        yield f"| `{call}` | {kind[1].lower()} of [{kind[2]}](#{kind[2]}) | {meaning[:1].upper()}{meaning[1:]} |"


def _words() -> Iterator[str]:
    yield f"## {OLD_COLUMNS}"
    yield ""
    yield "Functions and tables that existing clients read keep their column names. New ones use the word, and so do the"
    yield "view [dead_letters](#dead_letters), the page and the tables of the commands (`--json` has the names of SQL)."
    yield "Arguments are called `queue_name`, `consumer_name` and `type_name` in almost all functions."
    yield ""
    yield "| old name | word |"
    yield "|---|---|"
    for old, word in WORDS.items():
        names = re.sub(r"\w*_\w+", lambda name: f"`{name[0]}`", old)
        yield f"| {names} | {re.sub(r'^[a-z_0-9]+$|extra[0-9]', lambda name: f'`{name[0]}`', word)} |"


def _short(sql: str) -> str:
    """Return SQL of the catalogs as one would write it."""
    for long, brief in (
        (r"\btimestamp with time zone\b", "timestamptz"),
        (r"\binteger\b", "int"),
        (r" DEFAULT ((?:'[^']*'|\w+))(?:::[a-z]+(?:\[\])?)?", lambda m: f" default {m[1]}"),
        (r"\bNULL\b", "null"),
        (r"\bSETOF\b", "setof"),
        (r"\bTABLE\(", "table ("),
        (r"\bIN ", ""),
    ):
        sql = re.sub(long, brief, sql)
    return sql


def _signature(name: str, kind: str, arguments: str, result: str) -> str:
    given, returned = [], []
    for argument in filter(None, _short(CALLER.sub("", arguments)).strip(", ").split(", ")):
        mode, _, rest = argument.partition(" ")
        if mode != "OUT":
            given.append(rest if mode == "INOUT" else argument)
        if mode in ("OUT", "INOUT"):
            returned.append(rest)
    result = _short(result)
    if returned and result in ("setof record", "record"):
        result = f"{'table ' if result.startswith('setof') else ''}({', '.join(returned)})"
    call = f"{'call ' if kind == 'p' else ''}pgque.{name}({', '.join(given)})"
    if not result:
        return _wrap(call)
    if len(call) + len(result) + 9 <= LINE:
        return f"{call} returns {result}"
    return _wrap(call) + "\n" + _wrap(f"  returns {result}")


def _view(name: str, columns: str) -> str:
    return _wrap(f"view pgque.{name} ({_short(columns)})")


def _wrap(text: str) -> str:
    """Return the text in lines that end after a comma."""
    lines = [""]
    for piece in text.split(", "):
        if lines[-1] and len(lines[-1]) + len(piece) + 3 > LINE:
            lines.append("    " + piece)
        else:
            lines[-1] += (", " if lines[-1] else "") + piece
    return ",\n".join(lines)


# --- Settings and types ------------------------------------------------------------------------------


def _settings(connection: Connection) -> Iterator[str]:
    yield "## Settings"
    yield ""
    yield "- *queue*: [alter_queue](#alter_queue) sets it for one queue, and [create_queue](#create_queue) from the start."
    yield "  [queue_settings](#queue_settings) returns the values in force."
    yield "- *all queues*: [set_default_config](#set_default_config) sets the default of the queues that have no value of their own."
    yield "- *loop*: it is set by the function named, for the loop that ticks and maintains all queues of the database."
    yield "- An interval is written as `5 minutes`. NULL as the value restores the default."
    yield ""
    yield "| setting | type | default | unit | values | where | meaning |"
    yield "|---|---|---|---|---|---|---|"
    for query, loop in ((SETTINGS, False), (LOOP_SETTINGS, True)):
        for name, kind, column, comment, default, checks in connection.execute(query).fetchall():
            if not comment:
                raise BadReference(
                    f"setting {name} has no comment (comment on column pgque.queue.queue_{name})"
                )
            meaning, unit = UNIT.sub("", comment), UNIT.search(comment)
            if kind in NUMBERS and unit is None:
                raise BadReference(
                    f"setting {name} is a number without a unit: end its comment with 'Unit: messages.'"
                )
            if loop:
                setter = SET_BY.search(meaning)
                assert setter is not None, name
                where = f"loop: [{setter[1]}{setter[2]}](#{setter[1]})"
                meaning = SET_BY.sub("", meaning)
            else:
                where = "queue, all queues" if _has_default(connection, name) else "queue"
            yield (
                f"| `{name}` | {'name of a queue' if kind == 'queue' else _short(kind)} | {_default(connection, default)}"
                f" | {unit[1] if unit else NONE} | {_values(connection, kind, column, checks)} | {where} | {meaning} |"
            )


def _has_default(connection: Connection, name: str) -> bool:
    """Return whether set_default_config() takes the setting."""
    try:
        with connection.transaction():
            connection.execute("select pgque.set_default_config(%s, null)", [name])
    except psycopg.Error as error:
        if error.sqlstate != "PQ005":
            raise
        return False
    return True


def _default(connection: Connection, expression: str | None) -> str:
    if expression is None:
        return "none"
    row = connection.execute(f"select {expression}".encode()).fetchone()
    assert row is not None
    return f"`{_value(row[0])}`"


def _value(value: object) -> str:
    """Return a value as one would write it: 2 hours for 7200 seconds."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, timedelta):
        return str(value)
    for unit, size in (
        ("year", timedelta(days=365)),
        ("day", timedelta(days=1)),
        ("hour", timedelta(hours=1)),
        ("minute", timedelta(minutes=1)),
        ("second", timedelta(seconds=1)),
        ("millisecond", timedelta(milliseconds=1)),
    ):
        count, rest = divmod(value, size)
        if count and not rest:
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "0"


def _values(connection: Connection, kind: str, column: str, checks: Sequence[str]) -> str:
    """Return the values that the check constraints of a column allow."""
    if kind == "boolean":
        return "`true`, `false`"
    found = []
    for check in checks:
        if listed := re.search(r"= ANY \(ARRAY\[(.+)\]\)", check):
            found.append(", ".join(f"`{value}`" for value in re.findall(r"'([^']*)'", listed[1])))
            continue
        for sign, text, cast in re.findall(rf"\b{column} (>=|<=|>|<) (?:'([^']*)'|\d+)(?:::(\w+))?", check):
            limit = text or re.findall(rf"\b{column} {re.escape(sign)} (\d+)", check)[0]
            row = connection.execute(f"select %s::{cast or kind}".encode(), [limit]).fetchone()
            assert row is not None
            words = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}[sign]
            found.append(f"{words} {_value(row[0])}")
    return ", ".join(found) or NONE


def _types(connection: Connection) -> Iterator[str]:
    yield "## Types"
    for name in ("delivery", "outcome"):
        row = connection.execute(
            "select pg_catalog.obj_description(%s::regtype, 'pg_type')", [f"pgque.{name}"]
        ).fetchone()
        assert row is not None
        yield ""
        yield f"### pgque.{name}"
        yield ""
        yield row[0]
        yield ""
        yield "| column | type | meaning |"
        yield "|---|---|---|"
        for column, kind, comment in connection.execute(TYPE_COLUMNS, [f"pgque.{name}"]).fetchall():
            yield f"| `{column}` | {_short(kind)} | {comment} |"


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _link(title: str) -> str:
    return f"[{title}](#{anchor(title)})"
