"""What the pipeline prints at its end, and whether what came out is what went in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pgque.cli.common import visible
from pgque.demo.report import tuples
from pgque.twins.client import PgqueClient

from . import records
from .processes import MicroBatch
from .records import Records


@dataclass(frozen=True, slots=True)
class Counts:
    """Hold how far the messages have come: into queue packages and into queue changes, as of their newest
    ticks, and out of both."""

    sent: int = 0
    changed: int = 0
    added: int = 0
    dead: int = 0
    received: int = 0


@dataclass(slots=True)
class Run:
    """Hold what is known of a run besides what is in the database; times in seconds since 1970."""

    began: float
    seconds: float = 0.0
    sending: float = 0.0
    receiving: float = 0.0
    samples: list[tuple[float, Counts]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    in_flight: list[dict[str, int]] = field(default_factory=list)
    batches: list[MicroBatch] = field(default_factory=list)

    @property
    def first(self) -> float:
        """When the first message was there; the start if none was."""
        return next((time for time, counts in self.samples if counts.sent), self.began)

    @property
    def loaded(self) -> float:
        """When the last message was there."""
        return next(
            (time for time, counts in self.samples if counts.sent == self.samples[-1][1].sent), self.began
        )


@dataclass(frozen=True, slots=True)
class Check:
    """Hold one comparison of what came out with what went in."""

    name: str
    expected: int
    found: int
    good: bool


def checks(client: PgqueClient, sent: Records) -> list[Check]:
    """Compare the dead letters, the totals and the changes with the input, as multisets."""
    letters = Counter(letter.ev_data or "" for letter in client.dlq.inspect("packages", 1_000_000))
    dead = letters.total()
    names: Counter[tuple[str, ...]] = Counter()
    packages: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for stanza in sent:
        if letters[stanza]:
            letters[stanza] -= 1
            continue
        about = records.fields(stanza)
        names[tuple(about.get(name, "") for name in ("Package", "Version", "Architecture"))] += 1
        group = about.get("Section", "").rpartition("/")[2], about.get("Maintainer", "")
        size = about.get("Installed-Size", "")
        packages[group] += 1
        sizes[group] += int(size) if size.isdecimal() else 0
    totals = client.conn.execute(
        "select section, maintainer, packages, installed_kb::bigint from pipeline.total"
    ).fetchall()
    received = client.conn.execute("select package, version, architecture from pipeline.received").fetchall()
    expected = {group: (number, sizes[group]) for group, number in packages.items()}
    found = {(row[0], row[1]): (row[2], row[3]) for row in totals}
    out = sum(number for number, _ in found.values()) + dead
    return [
        Check(
            "records sent = added up + dead letters",
            len(sent),
            out,
            out == len(sent) and not letters.total(),
        ),
        Check("totals per section and maintainer", len(expected), len(found), found == expected),
        Check(
            "changes received, package by package", names.total(), len(received), names == Counter(received)
        ),
    ]


def report(client: PgqueClient, sent: Records, run: Run, console: Console) -> bool:
    """Print the tables; return whether all checks held."""
    results = checks(client, sent)
    _dead_letters(client, console)
    _sections(client, console)

    table = Table(title="Summary", title_justify="left", show_header=False)
    total = len(sent)
    rows = [
        ("records", sent.title),
    ]
    for kill, caught in zip(run.kills, run.in_flight, strict=True):
        where = " and ".join(f"{n} of {query}" for query, n in caught.items())
        rows.append(
            (
                f"kill -9 after {kill - run.began:.0f} s",
                f"in micro-batch {where}" if where else "between micro-batches",
            )
        )
    if run.batches:
        done = min(batch.start + batch.seconds for batch in run.batches)
        text = f"{run.first - run.began:.0f} s to the first message, {done - run.began:.0f} s to the end of the first micro-batch"
        rows.append(("Spark's start", text))
    starts = f"{len(run.kills) + 1} starts" if run.kills else "the start"
    rows.append(("total time", f"{run.seconds:.0f} s, with {starts} of Spark's streaming job"))
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)
    console.print(_stages(run, total))

    table = Table(title="Exactly once?", title_justify="left")
    for heading in ("", "expected", "found", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for check in results:
        answer = Text("yes") if check.good else Text("NO", style="red")
        table.add_row(check.name, f"{check.expected:,}", f"{check.found:,}", answer)
    console.print(table)
    return all(check.good for check in results)


def _dead_letters(client: PgqueClient, console: Console) -> None:
    groups: dict[str, list[str]] = {}
    for letter in client.dlq.inspect("packages", 1_000_000):
        name = records.fields(letter.ev_data or "").get("Package") or "without a name"
        groups.setdefault(letter.dl_reason or "", []).append(name)
    table = Table(title="Dead letters of consumer totals", title_justify="left")
    table.add_column("reason")
    table.add_column("messages", justify="right")
    table.add_column("such as", overflow="fold")
    for reason, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        table.add_row(visible(reason), f"{len(names):,}", visible(", ".join(sorted(names)[:2])))
    console.print(table)


def _sections(client: PgqueClient, console: Console) -> None:
    table = Table(title="Largest sections", title_justify="left")
    for heading in ("section", "packages", "maintainers", "MB installed", "received: large", "dependencies"):
        table.add_column(heading, justify="left" if heading == "section" else "right")
    for section, packages, maintainers, size, large, depends in tuples(client, _SECTIONS):
        table.add_row(
            visible(str(section)),
            f"{packages:,}",
            f"{maintainers:,}",
            f"{size / 1024:,.0f}",
            f"{large:,}",
            f"{depends:,}",
        )
    console.print(table)


_SECTIONS = """
select t.*, r.large, r.dependencies
from (
  select section, sum(packages)::bigint as packages, count(*) as maintainers,
    sum(installed_kb)::bigint as size
  from pipeline.total
  group by section
) t
left join (
  select section, count(*) filter (where size_class = 'large') as large,
    sum(dependencies)::bigint as dependencies
  from pipeline.received
  group by section
) r using (section)
order by t.packages desc, t.section
limit 5
"""


def _stages(run: Run, total: int) -> Table:
    """Return how many rows a second each stage takes while it works, and all of them together."""
    table = Table(title="Stages, while they work", title_justify="left")
    for heading in ("stage", "messages", "seconds", "messages/s", "micro-batches"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")

    def stage(name: str, messages: int, seconds: float, batches: str = "") -> None:
        rate = f"{messages / seconds:,.0f}" if seconds else "none"
        table.add_row(name, f"{messages:,}", f"{seconds:.1f}", rate, batches)

    def stream(name: str, batches: list[MicroBatch]) -> None:
        rows, seconds = [batch.rows for batch in batches], [batch.seconds for batch in batches]
        about = (
            f"{min(rows):,} to {max(rows):,} in {min(seconds):.1f} to {max(seconds):.1f} s" if rows else ""
        )
        stage(name, sum(rows), sum(seconds), f"{len(rows)}: {about}" if rows else "none")

    last = run.samples[-1][1] if run.samples else Counts()
    stage("load: Spark JDBC, file to queue", last.sent, run.sending)
    for query, name in QUERIES.items():
        own = [batch for batch in run.batches if batch.query == query]
        stream(f"{query}: {name}", own)
        stream("  … of it behind, after the load", [batch for batch in own if batch.start > run.loaded])
    stage("tally: plain Python, queue to a table", last.received, run.receiving)
    if last.sent:
        stage("all, from first sent to last received", min(last.sent, total), run.samples[-1][0] - run.first)
    return table


QUERIES = {"changes": "Spark, queue to queue", "totals": "Spark, queue to a table"}
