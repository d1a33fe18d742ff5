"""The command `pgque`, run as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgque
from pgque.codec.encode import check_not_newer
from sql.test_install import install_earlier

Tick = Callable[[str], int | None]
Wait = Callable[..., None]
Connection = psycopg.Connection[tuple[Any, ...]]


def run(*arguments: str, stdin: str | None = None, code: int = 0, env: dict[str, str] | None = None) -> str:
    """Run the command, check its exit code, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pgque.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code in (0, 3) else done.stderr


def test_the_help_lists_every_command_and_the_exit_codes() -> None:
    text = run("--help")
    for word in (
        "install",
        "uninstall",
        "ticker",
        "demo",
        "send",
        "receive",
        "status",
        "queues",
        "dlq",
        "Exit codes",
    ):
        assert word in text
    assert pgque.__version__ in run("--version")


def test_install_is_repeatable_and_uninstall_leaves_nothing(fresh_dsn: str) -> None:
    assert run("install", "--dsn", fresh_dsn) == f"pgque {pgque.__version__}\n"
    run("create", "q", "--subscribe", "c", "--dsn", fresh_dsn)
    assert run("install", "--dsn", fresh_dsn) == f"pgque {pgque.__version__}\n"
    assert "q" in run("queues", "--dsn", fresh_dsn)
    run("uninstall", "--dsn", fresh_dsn, stdin="n\n", code=1)
    run("uninstall", "--yes", "--dsn", fresh_dsn)
    assert "pgque install" in run("queues", "--dsn", fresh_dsn, code=1)
    with psycopg.connect(fresh_dsn) as own:
        assert own.execute("select to_regnamespace('pgque')").fetchone() == (None,)


def test_a_database_before_the_oldest_that_is_upgraded_says_how_and_is_upgraded_so(fresh_dsn: str) -> None:
    install_earlier(fresh_dsn, "0.4.3")
    for call in ("install", "queues"):
        told = run(call, "--dsn", fresh_dsn, code=1)
        assert "0.4.3" in told and "pgque install --version 0.8.0" in told
    assert run("install", "--version", "0.8.0", "--dsn", fresh_dsn) == "pgque 0.8.0\n"
    assert run("install", "--dsn", fresh_dsn) == f"pgque {pgque.__version__}\n"
    assert "newer" in run("install", "--version", "0.8.0", "--dsn", fresh_dsn, code=1)


def test_install_does_not_take_a_newer_database_back(fresh_dsn: str) -> None:
    run("install", "--dsn", fresh_dsn)
    with psycopg.connect(fresh_dsn) as own:
        own.execute(
            "create or replace function pgque.version() returns text"
            " language sql as $$ select '99.0.0'::text $$"
        )
    assert "newer" in run("install", "--dsn", fresh_dsn, code=1)


@pytest.mark.parametrize(
    ("older", "newer"), [*pairwise(["0.9.3", "0.12.0", "1.0.0-rc1", "1.0.0-rc2", "1.0.0", "1.0.1-rc1"])]
)
def test_a_release_candidate_is_between_the_releases(older: str, newer: str) -> None:
    check_not_newer(older, newer)
    with pytest.raises(pgque.PgqueVersionError, match="newer"):
        check_not_newer(newer, older)


def test_a_message_goes_from_send_to_receive(
    dsn: str, queue: str, client: pgque.PgqueClient, tick: Tick
) -> None:
    run("create", queue, "--subscribe", "c", "--dsn", dsn)
    assert run("receive", queue, "c", "--dsn", dsn, code=3) == ""
    first = run("send", queue, '{"id": 1}', "--type", "t", "--dsn", dsn).split()
    run("send", queue, "--dsn", dsn, stdin="two\nlines")
    last = run("send", queue, "--lines", "--dsn", dsn, stdin="a\nb\n").split()
    tick(queue)
    assert run("receive", queue, "c", "--no-ack", "--max", "1", "--dsn", dsn) == '{"id": 1}\n'
    [message] = [
        json.loads(line)
        for line in run("receive", queue, "c", "--max", "1", "--json", "--dsn", dsn).splitlines()
    ]
    assert (message["msg_id"], message["type"], message["payload"]) == (int(first[0]), "t", '{"id": 1}')
    rest = [json.loads(line) for line in run("receive", queue, "c", "--json", "--dsn", dsn).splitlines()]
    assert [m["payload"] for m in rest] == ["two\nlines", "a", "b"]
    assert [str(m["msg_id"]) for m in rest[1:]] == last
    run("receive", queue, "c", "--dsn", dsn, code=3)
    # What was acknowledged is delivered again: the queue is younger than a day.
    assert "continues after tick 1\n" in run("seek", queue, "c", "--ago", "1d", "--dsn", dsn)
    assert run("receive", queue, "c", "--max", "1", "--dsn", dsn) == '{"id": 1}\n'
    run("seek", queue, "c", "--at", "9999-01-01", "--dsn", dsn)
    run("receive", queue, "c", "--dsn", dsn, code=3)
    run("seek", queue, "c", "--dsn", dsn, code=2)


def test_the_database_can_come_from_the_environment(dsn: str, queue: str) -> None:
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    names = {
        "host": "PGHOST",
        "port": "PGPORT",
        "user": "PGUSER",
        "dbname": "PGDATABASE",
        "password": "PGPASSWORD",
    }
    env = {names[name]: str(value) for name, value in parts.items() if name in names}
    assert run("send", queue, "x", env=env).strip().isdigit()


def test_errors_are_one_line_with_a_hint_and_exit_code_1(dsn: str) -> None:
    text = run("send", "no such queue", "x", "--dsn", dsn, code=1)
    assert text.startswith("pgque: queue not found")
    assert "hint: " in text
    run("send", "q", "x", "--dsn", "host=127.0.0.1 port=1 dbname=x user=x", code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["send"],
        ["receive", "q", "c", "--max", "0"],
        ["dlq", "requeue"],
        ["dlq", "purge", "q", "--older-than", "soon"],
        ["dlq", "purge", "q", "--older-than", "90"],
        ["dlq", "purge", "q", "--older-than", "6months"],
        ["dlq", "purge", "q", "--older-than", "500ms"],
        ["dlq", "purge", "q", "--older-than", "99999999999d"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    run(*arguments, code=2)


@pytest.mark.parametrize(
    "length", ["90s", "90 sec", "90 seconds", "1m", "2min", "1 hour", "3h", "12hrs", "1day", "30d"]
)
def test_lengths_of_time_have_a_unit(dsn: str, queue: str, length: str) -> None:
    run("dlq", "purge", queue, "--older-than", length, "--dsn", dsn)


def test_a_receiver_whose_messages_went_to_another_worker_while_it_printed_reports_the_loss(
    dsn: str, queue: str, client: pgque.PgqueClient, tick: Tick, wait_until: Wait
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x" * 1_000_000)
    tick(queue)
    receiving = ["receive", queue, "c", "--worker", "slow", "--visibility-timeout", "1s", "--dsn", dsn]
    command = [sys.executable, "-m", "pgque.cli", *receiving]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as slow:
        taken: list[pgque.Message] = []

        def took() -> bool:
            taken[:] = client.receive(queue, "c", worker="fast")
            return bool(taken)

        assert slow.stdout is not None
        first = os.read(slow.stdout.fileno(), 1).decode()
        wait_until(took)
        out, err = slow.communicate(timeout=30)
    assert first + out == "x" * 1_000_000 + "\n"
    assert (slow.returncode, err) == (
        3,
        "not acknowledged: another worker has messages of the batch, or it was acknowledged before\n",
    )
    assert client.ack(taken[0].batch_id) == 1


def test_a_release_of_nothing_is_exit_code_3(
    dsn: str, queue: str, client: pgque.PgqueClient, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, 1)
    tick(queue)
    [message] = client.receive(queue, "c", worker="w")
    assert run("release", str(message.batch_id), "--dsn", dsn) == "1 released\n"
    assert run("release", str(message.batch_id), "--dsn", dsn, code=3) == "0 released\n"


def test_lists_are_tables_or_json(dsn: str, queue: str, client: pgque.PgqueClient) -> None:
    client.subscribe(queue, "some [consumer]")
    assert queue in run("queues", "--dsn", dsn)
    assert "some [consumer]" in run("queues", "--dsn", dsn)
    [found] = [q for q in json.loads(run("queues", "--json", "--dsn", dsn)) if q["queue_name"] == queue]
    assert [c["consumer_name"] for c in found["consumers"]] == ["some [consumer]"]


def test_status_shows_parts_and_health(fresh_dsn: str) -> None:
    run("install", "--dsn", fresh_dsn)
    assert pgque.__version__ in run("status", "--dsn", fresh_dsn)
    report = json.loads(run("status", "--json", "--dsn", fresh_dsn))
    assert {row["component"] for row in report["status"]} >= {"ticker"}
    assert all(row["status"] in ("ok", "warn") for row in report["health"])


def test_status_fails_with_exit_code_3_when_a_queue_is_broken(fresh_dsn: str) -> None:
    run("install", "--dsn", fresh_dsn)
    run("create", "broken", "--dsn", fresh_dsn)
    with psycopg.connect(fresh_dsn) as own:
        row = own.execute("select pgque.current_event_table('broken')").fetchone()
        assert row is not None
        own.execute(f"drop table {row[0].removesuffix('_0')}_1")
    report = json.loads(run("status", "--json", "--dsn", fresh_dsn, code=3))
    assert "broken" in {row["queue"] for row in report["health"] if row["status"] == "fail"}


def test_dead_letters_are_listed_given_back_and_deleted(
    dsn: str, queue: str, client: pgque.PgqueClient, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    client.admin.set_queue_config(queue, "max_retries", 0)
    client.send_batch(queue, "t", ["a", "b", "c"])
    tick(queue)
    batch = client.receive(queue, "c")
    client.nack(batch[0].batch_id, batch, reason="[red]bad[/red]")
    client.ack(batch[0].batch_id)
    assert "[red]bad[/red]" in run("dlq", "list", queue, "--dsn", dsn)
    letters = json.loads(run("dlq", "list", queue, "--json", "--dsn", dsn))
    assert {letter["ev_data"] for letter in letters} == {"a", "b", "c"}
    ids = [str(letter["dl_id"]) for letter in letters]
    assert run("dlq", "requeue", ids[0], "--dsn", dsn) == "1 requeued\n"
    run("dlq", "requeue", ids[1], ids[0], "--dsn", dsn, code=1)  # all or none
    assert len(client.dlq.inspect(queue)) == 2
    assert run("dlq", "purge", queue, "--dsn", dsn) == "0 deleted\n"
    assert run("dlq", "requeue", "--all", queue, "--dsn", dsn) == "2 requeued\n"
    tick(queue)
    assert run("dlq", "purge", queue, "--older-than", "0s", "--dsn", dsn) == "0 deleted\n"


def test_a_message_is_cancelled(dsn: str, queue: str, client: pgque.PgqueClient, tick: Tick) -> None:
    client.subscribe(queue, "c")
    first, second, third = client.send_batch(queue, "t", ["a", "b", "c"])
    tick(queue)
    assert run("cancel", queue, str(first), "--yes", "--dsn", dsn) == f"message {first} was pending\n"
    assert (
        run("cancel", queue, str(second), "--consumer", "c", "--yes", "--dsn", dsn)
        == f"message {second} was pending\n"
    )
    assert (
        run("cancel", queue, str(second), "--consumer", "c", "--yes", "--dsn", dsn)
        == f"message {second} was cancelled before\n"
    )
    assert [message.msg_id for message in client.receive(queue, "c")] == [third]


# -- the ticker ------------------------------------------------------------


@pytest.fixture
def installed(fresh_dsn: str) -> str:
    """A database of its own, since a ticker ticks everything in it."""
    run("install", "--dsn", fresh_dsn)
    run("create", "q", "--subscribe", "c", "--dsn", fresh_dsn)
    return fresh_dsn


def _ticker(dsn: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pgque.cli", "ticker", "--dsn", dsn], stderr=subprocess.PIPE, text=True
    )


def _arrives(dsn: str, wait_until: Wait, payload: str) -> None:
    with pgque.connect(dsn, autocommit=True) as client:
        client.send("q", payload)
        got: list[pgque.Message] = []

        def there() -> bool:
            got[:] = client.receive("q", "c")
            return bool(got)

        wait_until(there, "the message is ticked", timeout=15)
        assert [message.payload for message in got] == [payload]
        client.ack(got[0].batch_id)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_ticker_makes_messages_receivable_and_stops_on_request(
    installed: str, wait_until: Wait, signum: int
) -> None:
    with _ticker(installed) as process:
        try:
            _arrives(installed, wait_until, "one")
            process.send_signal(signum)
            assert process.wait(30) == 0  # its loop would last for a minute
        finally:
            process.kill()


def test_the_ticker_goes_on_after_its_backend_was_terminated(installed: str, wait_until: Wait) -> None:
    with _ticker(installed) as process:
        try:
            for n in range(3):
                _arrives(installed, wait_until, str(n))
                with psycopg.connect(installed, autocommit=True) as own:
                    own.execute(
                        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                        " where application_name = 'pgque ticker'"
                    )
            _arrives(installed, wait_until, "last")
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_the_ticker_ends_with_an_error_where_pgque_is_missing(fresh_dsn: str) -> None:
    assert "pgque install" in run("ticker", "--dsn", fresh_dsn, code=1)


def test_the_ticker_stops_while_it_waits_for_a_server_that_is_not_there() -> None:
    with _ticker("host=127.0.0.1 port=1 dbname=x user=x") as process:
        try:
            assert process.stderr is not None
            assert "cannot tick" in process.stderr.readline()
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


# -- the demo ------------------------------------------------------------


def test_the_demo_sends_the_lines_of_a_file_and_reports_those_that_are_not_json(
    fresh_dsn: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n\nnot json\n[1, 2]\n\xff\n"text"\nNaN\n' + b'{"n": 1}\n' * 100)
    text = run("demo", "--dsn", fresh_dsn, "--file", str(path), "--workers", "2")
    for number in (3, 5, 7):
        assert f"line {number}: not sent" in text
    steps = [
        "Installing pgque",
        "Starting the ticker",
        "driven by",
        "processes: 2 workers",
        "sent 103 of 103",
    ]
    assert sorted(steps, key=text.index) == steps
    assert "103, each to 2 consumers" in text
    assert "exactly once for each consumer" in text
    # What the queue does by itself stands apart from the time that the workers took.
    run_, _, alone = text.partition("The queue by itself")
    assert "messages/s" not in run_ and "lines/s" in run_
    assert alone.count("messages/s") == 2
    assert "│ yes" in text


def test_the_demo_refuses_a_file_without_a_message(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("nothing\n")
    assert (
        "line 1"
        in subprocess.run(
            [sys.executable, "-m", "pgque.cli", "demo", "--file", str(path)],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    )


def test_the_demo_prints_a_file_as_text(fresh_dsn: str, tmp_path: Path) -> None:
    path = tmp_path / "[x] :x: [b].jsonl"
    path.write_text('"a"\nnot json\n')
    text = run("demo", "--dsn", fresh_dsn, "--file", str(path), "--workers", "1")
    assert "[x]:x:[b].jsonl,line2:notsent" in re.sub(r"\s", "", text)  # wherever the line is broken


@pytest.mark.slow
def test_the_demo_compiles_the_standard_library_exactly_once(fresh_dsn: str) -> None:
    text = run("demo", "--dsn", fresh_dsn, "--workers", "2")
    assert "│ yes" in text
    assert "SyntaxError" in text
