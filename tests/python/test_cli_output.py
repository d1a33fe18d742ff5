"""What the command `pgque` prints: text as it is, tables that fit, messages that say what was done."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

import pgque
from pgque.cli import main
from pgque.ops.titles import title

Tick = Callable[[str], int | None]
Connection = psycopg.Connection[tuple[Any, ...]]
Run = Callable[..., Result]

COMMAND = [sys.executable, "-m", "pgque.cli"]
ESCAPES = "\x1b[31mred\x1b[0m \x9b1m \u202e \x07"


@pytest.fixture
def run(dsn: str) -> Run:
    """Run the command in this process, with the width of a narrow terminal unless `columns` says else."""

    def do(*arguments: str, code: int = 0, stdin: str | None = None, columns: str = "80") -> Result:
        env = {"PGQUE_DSN": dsn, "COLUMNS": columns}
        result = CliRunner().invoke(main, list(arguments), env=env, input=stdin)
        assert result.exit_code == code, result.output
        return result

    return do


def shell(line: str, dsn: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which "$@" is the command."""
    return subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND],
        env={**os.environ, "PGQUE_DSN": dsn, **env},
        capture_output=True,
        check=False,
        timeout=60,
    )


def on_terminal(dsn: str, *arguments: str) -> str:
    """Return what the command prints on a terminal of 80 columns."""
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=end,
        stdout=end,
        stderr=end,
        env={**os.environ, "PGQUE_DSN": dsn, "COLUMNS": "80", "TERM": "xterm"},
    ):
        os.close(end)
        out = b""
        with suppress(OSError):  # a terminal without a process
            while more := os.read(terminal, 4096):
                out += more
        os.close(terminal)
    return out.decode()


# -- text ------------------------------------------------------------


@pytest.mark.parametrize("payload", ["[/x]", "[red]x[/red]", ":x: :smile:", r"\[x", "[link=http://x]y"])
def test_a_payload_is_text_and_no_markup(
    run: Run, client: pgque.PgqueClient, queue: str, payload: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    run("send", queue, payload)
    assert payload in run("peek", queue, columns="200").stdout
    tick(queue)
    assert run("receive", queue, "c").stdout == f"{payload}\n"


def test_a_name_is_text_and_no_markup(run: Run, queue: str) -> None:
    name = f"{queue[:30]} a[/b]:x:"
    run("create", name)
    for command in (["queues"], ["peek", name], ["dlq", "list", name], ["config", "get", name]):
        assert name in run(*command, columns="200").stdout
    assert name in run("drop", name).stdout
    assert name in run("peek", name, code=1).stderr


@pytest.mark.parametrize("wide", [[], ["--wide"]])
def test_a_table_shows_control_characters_and_obeys_none(
    run: Run, client: pgque.PgqueClient, queue: str, wide: list[str]
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, f"{ESCAPES}\nnext")
    text = run("peek", queue, *wide, columns="200").stdout
    assert r"\x1b[31mred\x1b[0m \x9b1m \u202e \x07\nnext" in text


def test_no_output_on_a_terminal_has_escape_sequences_of_a_message(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, ESCAPES, type="\x1b[2J")
    tick(queue)
    for command in (
        ["peek", queue, "--json"],
        ["messages", queue],
        ["receive", queue, "c", "--no-ack"],
        ["receive", queue, "c", "--no-ack", "--json"],
        ["drop", f"none{ESCAPES}"],
    ):
        text = on_terminal(dsn, *command)
        assert "pgque" in text or "red" in text or "2J" in text
        for sequence in ("\x1b[31m", "\x1b[2J", "\x9b", "\u202e", "\x07"):
            assert sequence not in text, command


def test_a_pipe_gets_a_payload_as_it_is(dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick) -> None:
    client.subscribe(queue, "c")
    client.send(queue, ESCAPES)
    tick(queue)
    as_json = shell(f'"$@" receive {queue} c --no-ack --json', dsn).stdout
    assert json.loads(as_json)["payload"] == ESCAPES
    assert shell(f'"$@" receive {queue} c', dsn).stdout.decode() == f"{ESCAPES}\n"


def test_standard_input_is_sent_byte_for_byte(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    shell(f"printf 'a\\r\\nb\\n' | \"$@\" send {queue}", dsn)
    shell(f"printf 'x\\r\\n\\ny' | \"$@\" send {queue} --lines", dsn)
    shell(f"printf '' | \"$@\" send {queue} --lines", dsn)
    tick(queue)
    assert [m.payload for m in client.receive(queue, "c")] == ["a\r\nb\n", "x", "", "y"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("printf 'a\\377' | \"$@\" send {queue}", 1, "standard input is not valid utf-8: byte 2"),
        ("printf '\\377' | \"$@\" send {queue} --lines", 1, "standard input is not valid utf-8: byte 1"),
        ("printf 'a\\0b' | \"$@\" send {queue}", 1, "NUL"),
        ('"$@" send {queue} <&-', 1, "standard input is closed"),
        ('"$@" purge {queue} <&-', 2, "give --yes"),
        ('"$@" send {queue} "$(printf \'\\377\')"', 2, "not valid UTF-8"),
        ("PGQUE_DSN=$(printf '\\377') \"$@\" queues", 2, "not valid UTF-8"),
        ('"$@" archive purge {queue} --older-than 800000d', 2, "longer than 36525 days"),
        ('"$@" queues >/dev/full', 1, "cannot print: No space left on device"),
        ('"$@" queues --json >/dev/full', 1, "cannot print: No space left on device"),
        ('"$@" send {queue} x >/dev/full', 1, "cannot print: No space left on device"),
        ('"$@" --help >/dev/full', 1, "cannot print: No space left on device"),
        ('"$@" queues >&-', 1, "standard output is closed"),
        ('"$@" receive {queue} c >&-', 2, "standard output is closed"),
    ],
)
def test_input_and_output_that_fail_are_an_error_of_one_line(
    dsn: str, queue: str, line: str, code: int, said: str
) -> None:
    done = shell(line.format(queue=queue), dsn, LC_ALL="C.UTF-8")
    err = done.stderr.decode()
    assert (done.returncode, "Traceback" in err, said in err) == (code, False, True), err


def test_what_could_not_be_printed_is_received_again(
    dsn: str, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x")
    tick(queue)
    assert shell(f'"$@" receive {queue} c >/dev/full', dsn).returncode == 1
    assert shell(f'"$@" receive {queue} c', dsn).stdout == b"x\n"


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_a_character_that_the_locale_lacks_is_escaped(
    dsn: str, client: pgque.PgqueClient, queue: str, env: dict[str, str], tick: Tick
) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "é")
    tick(queue)
    table = shell(f'"$@" peek {queue}', dsn, **env)
    assert (table.returncode, table.stderr) == (0, b"")
    assert len({len(line) for line in table.stdout.decode().splitlines()[1:]}) == 1
    [message] = json.loads(shell(f'"$@" peek {queue} --json', dsn, **env).stdout)
    assert message["payload"] == "é"
    assert shell(f'"$@" receive {queue} c', dsn, **env).returncode == 0


# -- tables ------------------------------------------------------------


def _fill(client: pgque.PgqueClient, conn: Connection, queue: str, consumer: str, tick: Tick) -> None:
    """Give every listing command rows, with long texts where a text may be long."""
    client.admin.create_queue(queue, {"max_retries": 0, "archive_on_ack": True, "visibility_timeout": 1})
    client.subscribe(queue, consumer)
    client.subscribe(queue, f"{consumer[:50]} 2")
    client.send_batch(queue, "order.created", ["long text " * 100, "word" * 100, "c", "d"])
    tick(queue)
    batch = client.receive(queue, consumer, worker="worker-on-host-17-with-pid-12345")
    client.dead(batch[0].batch_id, [batch[0].msg_id], "reason " * 60)
    client.archive(batch[0].batch_id, [batch[1].msg_id])
    client.recurring.create("nightly", queue, "0 3 * * *", "x")


NAMES = [("orders", "billing"), ("a-queue-with-a-name-of-57-bytes-".ljust(57, "x"), "a-consumer-" * 5)]


@pytest.mark.parametrize(("queue_name", "consumer"), NAMES)
def test_every_table_fits_into_80_columns(
    run: Run, client: pgque.PgqueClient, conn: Connection, queue_name: str, consumer: str, tick: Tick
) -> None:
    _fill(client, conn, queue_name, consumer, tick)
    try:
        for arguments in _tables(queue_name):
            lines = run(*arguments).stdout.splitlines()
            # A command stays one line, so that it can be copied.
            assert max(len(line) for line in lines if not line.startswith("      $ ")) <= 80, arguments
            head = " ".join(line for line in lines if line.startswith("┃"))
            whole = run(*arguments, "--wide").stdout
            assert all(word in whole for word in head.replace("┃", " ").split()), arguments
            # A time to the second in UTC, a length of time with its units; a setting as it is set
            assert arguments[0] == "config" or not re.search(
                r"\d:\d\d\.\d|\d:\d\d[+-]\d\d|\d days?, ", whole
            ), arguments
    finally:
        client.recurring.drop("nightly")
        client.admin.drop_queue(queue_name, force=True)


def _tables(queue: str) -> list[list[str]]:
    return [
        ["queues"],
        ["metrics"],
        ["metrics", queue],
        ["status"],
        ["config", "get", queue],
        ["peek", queue],
        ["messages", queue],
        ["message", queue, "1"],
        ["workers"],
        ["poison", "list", queue],
        ["dlq", "list", queue],
        ["archive", "list", queue],
        ["recurring", "list"],
    ]


# What the page says otherwise: it shows links in place of ids, and lengths of time in place of times.
_NOT_ON_THE_PAGE = {"Archive id", "Dead letter", "Time zone", "Last error", "Lease expires (UTC)"}
_NOT_ON_THE_PAGE |= {"Last received (UTC)"}


def test_the_columns_of_a_list_have_the_words_of_the_page(
    run: Run, client: pgque.PgqueClient, conn: Connection, queue: str, tick: Tick
) -> None:
    page = set()
    for path in (Path(pgque.__file__).parent / "web" / "templates").glob("*.html"):
        page |= set(re.findall(r"<th scope=\"col\"[^>]*>([^<{]+)</th>", path.read_text()))
    name = f"{queue}_listed"
    _fill(client, conn, name, "billing", tick)
    try:
        for arguments in _tables(name):
            if arguments[0] in ("dlq", "messages", "message", "archive", "workers", "recurring"):
                lines = run(*arguments, columns="300").stdout.splitlines()
                head = next(line for line in lines if line.startswith("┃"))
                words = {word.strip() for word in head.strip("┃").split("┃")}
                assert words <= page | _NOT_ON_THE_PAGE, arguments
                assert len(words & page) >= 4, arguments
    finally:
        client.recurring.drop("nightly")
        client.admin.drop_queue(name, force=True)


@pytest.mark.parametrize("columns", ["80", "40", "20"])
def test_no_list_leaves_out_or_cuts_the_ids_that_commands_take(
    run: Run, client: pgque.PgqueClient, conn: Connection, columns: str, tick: Tick
) -> None:
    name, consumer = NAMES[1]
    _fill(client, conn, name, consumer, tick)
    try:
        conn.execute(
            "select setval(q.queue_event_seq, 4000000000000000) from pgque.queue as q where q.queue_name = %s",
            [name],
        )
        client.send(name, "word " * 100)
        tick(name)
        [last] = client.receive(name, consumer, worker="w", visibility_timeout=60)
        client.dead(last.batch_id, [last.msg_id], "reason " * 60)
        [letter] = [row for row in client.dlq.inspect(name) if row.ev_id == last.msg_id]
        shown = run("dlq", "list", name, columns=columns).stdout
        assert "4000000000000001" in shown
        assert re.search(rf"│ +{letter.ev_id} │ +{letter.dl_id} │", shown)
        assert "4000000000000001" in run("messages", name, columns=columns).stdout
    finally:
        client.recurring.drop("nightly")
        client.admin.drop_queue(name, force=True)


def test_json_keeps_the_names_of_columns_and_exact_values(
    run: Run, client: pgque.PgqueClient, conn: Connection, queue: str, tick: Tick
) -> None:
    name = f"{queue}_json"
    _fill(client, conn, name, "c", tick)
    try:
        [letter] = json.loads(run("dlq", "list", name, "--json").stdout)
        assert {"dl_id", "ev_id", "ev_data", "dl_reason", "consumer_name"} <= set(letter)
        assert datetime.fromisoformat(letter["dl_time"]) == client.dlq.inspect(name)[0].dl_time
    finally:
        client.recurring.drop("nightly")
        client.admin.drop_queue(name, force=True)


def test_names_are_folded_and_not_cut(run: Run, client: pgque.PgqueClient, tick: Tick) -> None:
    queue, consumer = NAMES[1]
    client.admin.create_queue(queue)
    client.subscribe(queue, consumer)
    try:
        rows = [line for line in run("queues").stdout.splitlines() if line.startswith("│")]
        first = "".join(row.split("│")[1].strip() for row in rows)
        assert first.count(queue) >= 2  # with the queues, and with the consumers
    finally:
        client.admin.drop_queue(queue, force=True)


def test_wide_shows_all_columns_in_full(run: Run, client: pgque.PgqueClient, queue: str) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x" * 1000)
    short = run("messages", queue)
    assert "x" * 100 not in short.stdout
    wide = run("messages", queue, "--wide").stdout
    assert "x" * 1000 in wide
    for field in json.loads(run("messages", queue, "--json").stdout)[0]:
        assert title(field) in wide
    peek = run("peek", queue).stdout
    assert "x" * 1000 not in peek.replace("\n", "")
    assert "Long texts are shortened. --wide shows all." in peek
    assert "x" * 1000 in run("peek", queue, "--wide").stdout


def test_peek_shows_the_messages_of_the_consumer_named(
    run: Run, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "slow")
    client.subscribe(queue, "quick")
    client.send(queue, "first")
    tick(queue)
    client.ack(client.receive(queue, "quick")[0].batch_id)
    client.send(queue, "second")

    def peeked(*options: str) -> list[str]:
        return [row["payload"] for row in json.loads(run("peek", queue, "--json", *options).stdout)]

    assert peeked() == peeked("--consumer", "slow") == ["first", "second"]
    assert peeked("--consumer", "quick") == ["second"]
    assert "nobody" in run("peek", queue, "--consumer", "nobody", code=1).stderr


def test_columns_that_do_not_fit_are_named(run: Run, client: pgque.PgqueClient, queue: str) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "x")
    narrow = run("messages", queue, columns="40").stdout
    assert max(map(len, narrow.splitlines()[:-2])) <= 40
    assert "Left out:" in narrow and "--wide shows all." in narrow.replace("\n", " ")


def test_a_pipe_gets_rows_of_one_line(dsn: str, client: pgque.PgqueClient, queue: str) -> None:
    client.subscribe(queue, "c")
    client.send(queue, "word " * 35)
    out = shell(f'unset COLUMNS; "$@" peek {queue}', dsn).stdout.decode()
    assert "word " * 34 in out


def test_the_list_of_dead_letters_names_the_consumer(
    run: Run, client: pgque.PgqueClient, queue: str, tick: Tick
) -> None:
    client.subscribe(queue, "billing-of-dead")
    client.send(queue, "x")
    tick(queue)
    [message] = client.receive(queue, "billing-of-dead", worker="w")
    client.dead(message.batch_id, [message.msg_id], "no good")
    assert "billing-of-dead" in run("dlq", "list", queue).stdout


# -- what was done ------------------------------------------------------------


def test_commands_print_what_they_did(run: Run, queue: str) -> None:
    name = f"{queue}_said"
    assert run("create", name, "--subscribe", "c").stdout == (
        f"queue {name} is created\nconsumer c is subscribed to queue {name}\n"
    )
    assert run("create", name).stdout == f"queue {name} exists already\n"
    assert run("create", name, "--set", "max_retries=1").stdout == (
        f"queue {name} exists already; its settings stay\n"
    )
    assert run("subscribe", name, "d").stdout == f"consumer d is subscribed to queue {name}\n"
    assert run("subscribe", name, "d").stdout == (
        f"consumer d was subscribed to queue {name} already; its position stays\n"
    )
    assert run("unsubscribe", name, "d").stdout == f"consumer d is unsubscribed from queue {name}\n"
    assert run("unsubscribe", name, "d").stdout == f"consumer d was not subscribed to queue {name}\n"
    assert run("pause", name).stdout == f"queue {name} is paused\n"
    assert run("resume", name).stdout == f"queue {name} is open for senders\n"
    assert run("config", "set", name, "max_retries", "9").stdout == f"max_retries of queue {name} is 9\n"
    assert "by default" in run("config", "set", name, "max_retries").stdout
    assert run("rename", name, f"{name}2").stdout == f"queue {name} is now {name}2\n"
    assert run("drop", f"{name}2", "--force").stdout == f"queue {name}2 is dropped\n"


def test_messages_that_nobody_gets_are_mentioned(
    run: Run, queue: str, client: pgque.PgqueClient, tick: Tick
) -> None:
    name = f"{queue} alone"
    remedy = f"pgque subscribe '{name}' CONSUMER --from earliest"
    created = run("create", name)
    assert created.stdout == f"queue {name} is created\n"
    assert remedy in created.stderr
    sent = run("send", name, "x")
    assert int(sent.stdout) > 0
    assert f"queue {name} has no consumer" in sent.stderr and remedy in sent.stderr
    tick(name)
    run("subscribe", name, "c", "--from", "earliest")
    assert run("send", name, "y").stderr == ""
    tick(name)
    assert run("receive", name, "c").stdout == "x\ny\n"
    assert run("create", f"{name}2", "--subscribe", "c").stderr == ""
    run("drop", name, "--force")


def test_a_sender_without_the_right_to_consume_gets_no_false_warning(
    dsn: str, run: Run, queue: str, nobody: Any, client: pgque.PgqueClient
) -> None:
    client.subscribe(queue, "c")
    client.admin.grant_queue(queue, nobody.name, "produce")
    own = psycopg.conninfo.make_conninfo(dsn, options=f"-c role={nobody.name}")
    sent = run("send", queue, "x", "--dsn", own)
    assert sent.stdout.strip().isdigit()
    assert sent.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["dlq", "requeue", "jobs"], "ids of dead letters, which pgque dlq list QUEUE shows, or --all QUEUE"),
        (["dlq", "requeue"], "ids of dead letters, which pgque dlq list QUEUE shows, or --all QUEUE"),
        (["dlq", "replay", "jobs"], "ids of dead letters"),
        (["archive", "replay", "jobs"], "pgque archive list QUEUE"),
        (["ack", "jobs"], "batch_id"),
        (["message", "q", "x"], "pgque messages QUEUE"),
    ],
)
def test_a_name_in_place_of_an_id_is_an_error_that_names_what_is_wanted(
    run: Run, arguments: list[str], wanted: str
) -> None:
    assert wanted in " ".join(run(*arguments, code=2).stderr.split())


def test_uninstall_prints_one_line(fresh_dsn: str) -> None:
    shell('"$@" install && "$@" create q', fresh_dsn)
    with psycopg.connect(fresh_dsn) as own:
        notices: list[str | None] = []
        own.add_notice_handler(lambda notice: notices.append(notice.message_primary))
        own.execute("select pgque.uninstall()")
        assert notices == []
        own.rollback()
    done = shell('"$@" uninstall --yes', fresh_dsn)
    assert (done.stdout, done.stderr) == (b"pgque is removed\n", b"")


def test_the_shell_can_complete_commands() -> None:
    env = {**os.environ, "_PGQUE_COMPLETE": "bash_complete", "COMP_WORDS": "pgque dlq re", "COMP_CWORD": "2"}
    code = "import sys; from pgque.cli import main; main(prog_name='pgque')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert {"plain,requeue", "plain,replay"} <= set(done.stdout.split())
