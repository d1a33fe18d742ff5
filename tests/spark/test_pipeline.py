"""The example behind make pipeline: what comes out of it is what went in, also when it is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import psycopg
import pytest
from rich.console import Console

from examples.pipeline import TABLES, records
from examples.pipeline.plot import save_plot
from examples.pipeline.report import Counts, Run, checks, report
from pgque import PgqueClient
from pgque.ops.install import install

PATH = {"PYTHONPATH": str(Path(__file__).parents[1] / "examples")}


def _run(tmp_path: Path, *arguments: str, timeout: float = 400, **env: str) -> tuple[int, str, Path]:
    """Run the pipeline in a process of its own; return the exit code, the output and the plot."""
    plot = tmp_path / "plot.svg"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pipeline",
            "--server",
            "embedded",
            "--plot",
            str(plot),
            *arguments,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, **PATH, **env},
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, plot


def _answers(output: str) -> list[str]:
    """Return the last column of the table that says whether all came out once."""
    table = output.rpartition("Exactly once?")[2]
    return [line.split()[-2] for line in table.splitlines() if line.rstrip().endswith("│") and " │ " in line]


@pytest.mark.timeout(420)
def test_a_few_records_go_through_with_a_kill_on_the_way(tmp_path: Path) -> None:
    code, output, plot = _run(tmp_path, "--records", "300", "--kill", "1")
    assert code == 0, output
    assert _answers(output) == ["yes"] * 3, output
    assert "kill -9" in output
    assert "Spark starts: 0 of 2 sessions" in output
    for stage in (
        "load: Spark JDBC",
        "changes: Spark",
        "totals: Spark",
        "after the load",
        "tally: plain",
        "all",
    ):
        assert re.search(rf"{stage}[^│]*│ +\d+ │ +[\d.]+ │ +[\d,]+ │", output), output
    drawing = ElementTree.parse(plot).getroot()  # noqa: S314
    bars = [rect for rect in drawing.iter("{http://www.w3.org/2000/svg}rect") if list(rect)]
    assert len(bars) >= 2
    lines = Counter(line.get("class") for line in drawing.iter("{http://www.w3.org/2000/svg}path"))
    assert {name: lines[name] for name in ("sent", "changes", "totals", "tally", "kill")} == {
        "sent": 1,  # in the first panel
        "changes": 2,  # and how far it is behind
        "totals": 2,
        "tally": 2,
        "kill": 3,
    }


@pytest.mark.long  # a second run of the whole pipeline; the test above kills the job
@pytest.mark.timeout(420)
def test_a_job_that_ends_by_itself_is_started_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "--server", "embedded", "--records", "300"]
    with subprocess.Popen(
        [*command, "--plot", str(tmp_path / "plot.svg")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **PATH},
    ) as run:
        jobs: list[str] = []
        while run.poll() is None and not jobs:
            time.sleep(0.2)
            find = ["pgrep", "-P", str(run.pid), "-f", "pipeline.job"]
            jobs = subprocess.run(find, capture_output=True, text=True, check=False).stdout.split()
        for job in jobs:
            os.killpg(int(job), signal.SIGKILL)  # and its JVM
        output, _ = run.communicate(timeout=300)
    assert jobs, output
    assert run.returncode == 0, output
    assert "the streaming job ended with -9; starting it again" in output
    assert _answers(output) == ["yes"] * 3, output


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_records_go_through_with_kills_on_the_way(tmp_path: Path) -> None:
    code, output, _ = _run(tmp_path, "--kill", "4", timeout=850)
    assert code == 0, output
    assert _answers(output) == ["yes"] * 3, output


def test_without_java_the_error_names_what_is_missing(tmp_path: Path) -> None:
    code, output, _ = _run(tmp_path, JAVA_HOME=str(tmp_path))
    assert code == 1
    assert "Spark needs Java 17 or newer, and found none" in output
    assert "Traceback" not in output


def test_without_apt_the_records_are_of_what_python_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = records.find_records(100_000)
    assert len(found.real) > 500
    assert "standard library" in found.source
    assert all(records.fields(stanza)["Package"] for stanza in found.real)
    assert not any("\n\n" in stanza for stanza in found.real)
    assert len(list(found)) >= 100_000


def test_records_are_damaged_only_where_none_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    good = "Package: a\nVersion: 1\nSection: s\nMaintainer: m\nInstalled-Size: 1"
    monkeypatch.setattr(records, "_debian", lambda: [good] * 20)
    found = list(records.find_records(20))
    assert len(found) == 25
    assert all("X-Damaged" in stanza for stanza in found[-5:])
    monkeypatch.setattr(records, "_debian", lambda: [good, "Package: b"])
    assert len(list(records.find_records(2))) == 2


def test_too_few_records_are_repeated_with_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_debian", lambda: [_stanza("a"), _stanza("b", size="")])
    found = records.find_records(5)
    assert list(found) == [
        _stanza("a"), _stanza("b", size=""), _stanza("a#2"), _stanza("b#2", size=""), _stanza("a#3"),
    ]  # fmt: skip
    assert found.title == "5: 2 real ones, repeated with names such as name#2"
    assert list(records.find_records(2)) == [_stanza("a"), _stanza("b", size="")]


@pytest.mark.parametrize("sent", [None, 0, 3])
def test_a_run_in_which_nothing_moved_has_a_report_and_a_plot(
    fresh_dsn: str, tmp_path: Path, sent: int | None
) -> None:
    install(fresh_dsn)
    run = Run(1000.0, 180.0)
    if sent is not None:
        run.samples += [(1001.0, Counts()), (1180.0, Counts(sent=sent))]
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        client = PgqueClient(conn)
        client.admin.create_queue("packages")
        conn.execute(f"create schema pipeline; {TABLES}".encode())
        console = Console(record=True, width=120)
        assert not report(client, records.Records([_stanza("a")], 3, [], ""), run, console)
    assert _answers(console.export_text()) == ["NO"] * 3
    save_plot(tmp_path / "plot.svg", "nothing", run)
    ElementTree.parse(tmp_path / "plot.svg")  # noqa: S314


def _stanza(name: str, section: str = "net", size: str = "10") -> str:
    return f"Package: {name}\nVersion: 1\nSection: {section}\nMaintainer: m\nArchitecture: all\nInstalled-Size: {size}"


# What is done to the outcome, and the numbers of the checks that must fail then.
SABOTAGE: list[tuple[str, set[int]]] = [
    ("select 1", set()),
    ("update pipeline.total set packages = packages + 1, installed_kb = installed_kb + 10", {0, 1}),
    ("delete from pipeline.total where section = 'mail'", {0, 1}),
    ("update pipeline.total set installed_kb = installed_kb + 1", {1}),
    ("update pipeline.total set maintainer = 'another'", {1}),
    (
        "insert into pipeline.received"
        " select package, version, architecture, section, size_class, dependencies from pipeline.received limit 1",
        {2},
    ),
    ("delete from pipeline.received where package = 'c'", {2}),
    ("update pipeline.received set package = 'a'", {2}),
    ("update pipeline.received set package = 'a' where package = 'a#2'", {2}),
    ("select pgque.dlq_purge('packages', '-1 day')", {0, 1, 2}),
    ("select pgque.dead('packages', 'totals', array[2], array['bad after all'])", {0, 1, 2}),
]


def test_the_comparison_notices_what_is_lost_doubled_or_changed(fresh_dsn: str) -> None:
    sent = records.Records([_stanza("a"), _stanza("c", "mail")], 3, [_stanza("d", size="")], "")
    install(fresh_dsn)
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        client = PgqueClient(conn)
        client.admin.create_queue("packages")
        client.subscribe("packages", "totals")
        ids = client.send_batch("packages", "stanza", list(sent))
        client.force_next_tick("packages")
        client.ticker("packages")
        conn.execute("select pgque.dead('packages', 'totals', %s, array['bad'])", [ids[3:]])
        conn.execute(f"create schema pipeline; {TABLES}".encode())
        conn.execute("insert into pipeline.total values ('net', 'm', 2, 20), ('mail', 'm', 1, 10)")
        conn.execute(
            "insert into pipeline.received"
            " select p, '1', 'all', s, 'small', 0 from (values ('a', 'net'), ('c', 'mail'), ('a#2', 'net')) v (p, s)"
        )
        noticed = []
        for statement, _ in SABOTAGE:
            with conn.transaction(force_rollback=True):
                conn.execute(statement.replace("array[2]", f"array[{ids[1]}]").encode())
                results = checks(client, sent)
                noticed.append((statement, {n for n, check in enumerate(results) if not check.good}))
    assert noticed == SABOTAGE
