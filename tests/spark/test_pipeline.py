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

from pgque import PgqueClient
from pgque.demo.pipeline import TABLES, records
from pgque.demo.pipeline.report import checks
from pgque.ops.install import install


def _run(tmp_path: Path, *arguments: str, timeout: float = 400, **env: str) -> tuple[int, str, Path]:
    """Run the pipeline in a process of its own; return the exit code, the output and the plot."""
    plot = tmp_path / "plot.svg"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pgque.demo.pipeline",
            "--server",
            "embedded",
            "--plot",
            str(plot),
            *arguments,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
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
    for stage in ("load: Spark JDBC", "changes: Spark", "totals: Spark", "tally: queue changes"):
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
    command = [sys.executable, "-m", "pgque.demo.pipeline", "--server", "embedded", "--records", "300"]
    with subprocess.Popen(
        [*command, "--plot", str(tmp_path / "plot.svg")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        jobs: list[str] = []
        while run.poll() is None and not jobs:
            time.sleep(0.2)
            find = ["pgrep", "-P", str(run.pid), "-f", "pgque.demo.pipeline.job"]
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
    found = records.find_records()
    assert len(found.stanzas) > 500
    assert "standard library" in found.source
    assert all(records.field(stanza, "Package") for stanza in found.stanzas)
    assert not any("\n\n" in stanza for stanza in found.stanzas)


def test_records_are_damaged_only_where_none_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    good = "Package: a\nVersion: 1\nSection: s\nMaintainer: m\nInstalled-Size: 1"
    monkeypatch.setattr(records, "_debian", lambda: [good] * 20)
    found = records.find_records()
    assert (len(found.stanzas), found.damaged) == (25, 5)
    assert all("X-Damaged" in stanza for stanza in found.stanzas[-5:])
    monkeypatch.setattr(records, "_debian", lambda: [good, "Package: b"])
    assert records.find_records().damaged == 0


def _stanza(name: str, section: str = "net", size: str = "10") -> str:
    return f"Package: {name}\nVersion: 1\nSection: {section}\nMaintainer: m\nArchitecture: all\nInstalled-Size: {size}"


# What is done to the outcome, and the numbers of the checks that must fail then.
SABOTAGE: list[tuple[str, set[int]]] = [
    ("select 1", set()),
    ("update pipeline.total set packages = packages + 1, installed_kb = installed_kb + 10", {0, 1}),
    ("delete from pipeline.total where section = 'mail'", {0, 1}),
    ("update pipeline.total set installed_kb = installed_kb + 1", {1}),
    ("update pipeline.total set maintainer = 'another'", {1}),
    ("insert into pipeline.received select * from pipeline.received limit 1", {2}),
    ("delete from pipeline.received where package = 'b'", {2}),
    ("update pipeline.received set package = 'a'", {2}),
    ("select pgque.dlq_purge('packages', '-1 day')", {0, 1, 2}),
    ("select pgque.dead('packages', 'totals', array[2], array['bad after all'])", {0, 1, 2}),
]


def test_the_comparison_notices_what_is_lost_doubled_or_changed(fresh_dsn: str) -> None:
    stanzas = [_stanza("a"), _stanza("b"), _stanza("c", "mail"), _stanza("d", size="")]
    install(fresh_dsn)
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        client = PgqueClient(conn)
        client.admin.create_queue("packages")
        client.subscribe("packages", "totals")
        ids = client.send_batch("packages", "stanza", stanzas)
        client.force_next_tick("packages")
        client.ticker("packages")
        conn.execute("select pgque.dead('packages', 'totals', %s, array['bad'])", [ids[3:]])
        conn.execute(f"create schema pipeline; {TABLES}".encode())
        conn.execute("insert into pipeline.total values ('net', 'm', 2, 20), ('mail', 'm', 1, 10)")
        conn.execute(
            "insert into pipeline.received"
            " select p, '1', 'all', s, 'small', 0 from (values ('a', 'net'), ('b', 'net'), ('c', 'mail')) v (p, s)"
        )
        noticed = []
        for statement, _ in SABOTAGE:
            with conn.transaction(force_rollback=True):
                conn.execute(statement.replace("array[2]", f"array[{ids[1]}]").encode())
                results = checks(client, records.Records(stanzas, "", 0))
                noticed.append((statement, {n for n, check in enumerate(results) if not check.good}))
    assert noticed == SABOTAGE
