"""`pgque health`, `pgque start`, and the systemd unit of `pgque ticker`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgque
from pgque.cli.health import advice

Connection = psycopg.Connection[tuple[Any, ...]]


def run(dsn: str, *arguments: str, code: int = 0) -> str:
    """Run the command at 80 columns, check its exit code, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pgque.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PGQUE_DSN": dsn, "COLUMNS": "80"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code in (0, 3, 4) else done.stderr


@pytest.fixture
def ticked(fresh_dsn: str) -> Iterator[str]:
    """A new database with pgque, and `pgque ticker` running: nothing is wrong."""
    run(fresh_dsn, "install")
    ticker = subprocess.Popen([sys.executable, "-m", "pgque.cli", "ticker", "--quiet", "--dsn", fresh_dsn])
    with psycopg.connect(fresh_dsn, autocommit=True) as conn:
        running = "select status = 'running' from pgque.status() where component = 'ticker'"
        while conn.execute(running).fetchone() != (True,):
            assert ticker.poll() is None
    yield fresh_dsn
    ticker.send_signal(signal.SIGTERM)
    ticker.wait(20)


def commands(text: str) -> list[str]:
    return [line.strip().removeprefix("$ ") for line in text.splitlines() if line.startswith("      $ ")]


def test_health_shows_problems_only_worst_first_and_the_commands_that_mend_them(ticked: str) -> None:
    assert run(ticked, "health") == "all is well\n"
    name = "it's [red] \\ odd"
    with pgque.connect(ticked) as client:
        client.admin.create_queue(name)
        client.subscribe(name, "c")
        client.admin.set_queue_config(name, "max_depth", 2)
        client.admin.create_queue("aside")
        client.admin.pause("aside")
    text = run(ticked, "health", code=4)
    assert text.startswith("warn  queue aside, senders\n      paused: send is refused\n")
    assert commands(text) == ["pgque resume aside"]
    with pgque.connect(ticked) as client:
        client.send_batch(name, "t", ["1", "2"])
    text = run(ticked, "health", code=3)
    assert text.startswith(f"fail  queue {name}, senders\n")
    assert text.index("fail") < text.index("warn")
    assert max(len(line) for line in text.splitlines() if "$" not in line) <= 80
    for command in commands(text):
        words = shlex.split(command)
        assert words[0] == "pgque"
        run(ticked, *words[1:])
    assert run(ticked, "health") == "all is well\n"
    everything = run(ticked, "health", "--all")
    assert everything.count("\nok ") > 10


def test_health_as_json_has_the_commands_too(ticked: str) -> None:
    assert json.loads(run(ticked, "health", "--json")) == []
    with pgque.connect(ticked) as client:
        client.admin.create_queue("q")
        client.admin.pause("q")
    (row,) = json.loads(run(ticked, "health", "--json", code=4))
    assert (row["check_name"], row["status"], row["commands"]) == ("senders", "warn", ["pgque resume q"])
    rows = json.loads(run(ticked, "health", "--json", "--all", code=4))
    assert {row["status"] for row in rows} == {"ok", "warn"}
    assert rows[0]["status"] == "warn"


def test_health_without_a_database_is_an_error_and_not_a_failed_check(ticked: str) -> None:
    assert "PQ" not in run("host=/nowhere", "health", code=1)
    run(ticked, "health", "--nonsense", code=2)


def test_health_watches_until_it_is_interrupted(ticked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with pgque.connect(ticked) as client:
        client.admin.create_queue("q")
        client.admin.pause("q")
    watch = subprocess.Popen(
        [sys.executable, "-m", "pgque.cli", "health", "--watch", "--json", "--dsn", ticked],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watch.stdout is not None
    for _ in range(2):
        assert [row["check_name"] for row in json.loads(watch.stdout.readline())] == ["senders"]
    watch.send_signal(signal.SIGINT)
    watch.communicate(timeout=20)
    assert watch.returncode == 4


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (None, []),
        ("Look again.", [("Look again", False)]),
        ("select pgque.resume('it''s')", [("""pgque resume 'it'"'"'s'""", True)]),
        (r"select pgque.resume( E'a\\b')", [(r"pgque resume 'a\b'", True)]),
        (
            "Start it, or: select pgque.unsubscribe('q', 'c (old)'). Then wait.",
            [("Start it, or:", False), ("pgque unsubscribe q 'c (old)'", True), ("Then wait", False)],
        ),
        (
            "select pgque.alter_queue('q', '{\"ticker_paused\": false}')",
            [("pgque config set q ticker_paused false", True)],
        ),
        (
            "select pgque.alter_queue('q', '[')",
            [("""psql -c 'select pgque.alter_queue('"'"'q'"'"', '"'"'['"'"')'""", True)],
        ),
        ("select pgque.ticker('q')", [("""psql -c 'select pgque.ticker('"'"'q'"'"')'""", True)]),
        (
            "alter system set cron.host = '/run/pg'; restart the server; select pgque.start();",
            [
                ("""psql -c 'alter system set cron.host = '"'"'/run/pg'"'"''""", True),
                ("restart the server", False),
                ("pgque start", True),
            ],
        ),
        (
            'Then revoke: revoke SELECT, INSERT on all tables in schema pgque from "a;b"; revoke USAGE on schema pgque from c',
            [
                ("Then revoke:", False),
                ("psql -c 'revoke SELECT, INSERT on all tables in schema pgque from \"a;b\"'", True),
                ("psql -c 'revoke USAGE on schema pgque from c'", True),
            ],
        ),
    ],
)
def test_an_advice_in_sql_becomes_commands_for_a_shell(
    text: str | None, pieces: list[tuple[str, bool]]
) -> None:
    assert advice(text) == pieces


def test_start_and_stop_without_pg_cron_give_a_hint(ticked: str) -> None:
    assert "pgque ticker" in run(ticked, "start", code=1)
    assert run(ticked, "stop") == "stopped\n"


def test_the_ticker_prints_a_systemd_unit_that_systemd_accepts(tmp_path: Path) -> None:
    dsn = "dbname=mydb application_name='50% \"x\"'"
    text = run(dsn, "ticker", "--systemd-unit")
    assert 'Environment="PGQUE_DSN=dbname=mydb application_name=\'50%% \\"x\\"\'"' in text
    assert "ticker --quiet\n" in text
    assert "password" in run("dbname=mydb password=secret", "ticker", "--systemd-unit", code=1)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    path = tmp_path / "pgque-ticker.service"
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
