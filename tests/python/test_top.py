"""`pgque top` in a terminal, against a real server."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from textual.app import App
from textual.containers import VerticalScroll

from conftest import Roles
from pgque.cli import main
from pgque.top.app import Top
from pgque.top.screens import Grid, Queue
from pgque.top.source import Source
from pgque.top.state import State
from sql.helpers import move_clock
from support.terminals import PATIENCE, Terminal, terminal

COMMAND = (sys.executable, "-m", "pgque.cli", "top")
ESCAPE, ENTER, TAB = "\x1b", "\r", "\t"
LONG = "a-queue-whose-name-is-longer-than-its-column"

Wait = Callable[..., None]


@contextmanager
def top(
    dsn: str, *options: str, columns: int = 80, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run the command in a terminal, until its first frame is there."""
    command = [*COMMAND, "--dsn", dsn, "--interval", "1s", *options]
    with terminal(*command, columns=columns, environment=environment) as found:
        found.wait_for("q Quit", "orders")
        yield found


@pytest.fixture
def database(own_dsn: str) -> str:
    """A database with queues: orders has dead letters and a worker that holds messages."""
    with psycopg.connect(own_dsn, autocommit=True) as connection:
        for name in ("mail", "orders", "billing", LONG):
            connection.execute("select pgque.create_queue(%s), pgque.subscribe(%s, 'clerk')", [name, name])
        send = "select pgque.send(%s, 'sale', n::text) from generate_series(1, %s) as n"
        for name, count in (("mail", 30), ("orders", 9), ("billing", 20)):
            connection.execute(send, [name, count])
        connection.execute("select pgque.force_next_tick(q.queue_name) from pgque.get_queue_info() as q")
        connection.execute("select pgque.ticker()")
        receive = (
            "select batch_id, array_agg(msg_id) from pgque.receive('orders', 'clerk', %s, %s, '1 hour')"
            " group by batch_id"
        )
        batch, ids = connection.execute(receive, [5, "desk-1"]).fetchone() or (0, [])
        connection.execute("select pgque.dead(%s, %s, 'no customer 17')", [batch, ids[:2]])
        connection.execute("select pgque.dead(%s, %s, 'no [bold]price\x1b[2J')", [batch, ids[2:3]])
        connection.execute("select pgque.ack(%s)", [batch])
        connection.execute(receive, [4, "desk-2"])
    return own_dsn


def value(dsn: str, query: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def names(shown: Terminal) -> list[str]:
    """The queues in the table, from top to bottom."""
    lines = shown.text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("State"))
    return [
        line.split()[1] for line in lines[start + 1 :] if line.startswith(("ok", "warn", "fail", "paused"))
    ]


def test_an_operator_finds_what_is_wrong_and_mends_it(database: str) -> None:
    with top(database, columns=120) as shown:
        # What is wrong comes first, then the queue with a problem.
        assert shown.text.index("WARN orders: dead letters: 3") < shown.text.index("State")
        assert names(shown)[0] == "orders"
        assert shown.line("warn ").split()[-1] == "3"
        shown.press("!")
        shown.wait_for("$ pgque dlq list orders", "esc Back")
        shown.press(ESCAPE)
        shown.wait_for("4 queues")

        # Everything fits into 80 x 24.
        shown.resize(80, 24)
        shown.wait_for("Dead\n", "a-queue-whose-nam…", "4 queues", "q Quit")
        assert all(len(line) <= 80 for line in shown.text.splitlines())

        # Sorted by name, by each figure, backwards.
        shown.press("s")
        shown.wait_for("Queue▲")
        assert names(shown) == [shown.line("a-queue").split()[1], "billing", "mail", "orders"]
        shown.press("sss")
        shown.wait_for("Backlog▼")
        assert names(shown)[:2] == ["mail", "billing"]
        shown.press("r")
        shown.wait_for("Backlog▲")
        assert names(shown)[-2:] == ["billing", "mail"]
        shown.press("S")
        shown.wait_for("Out/s▼")

        # Only queues with some letters in their name; q is a letter of it.
        shown.press("/OR/q")
        shown.wait_for("0 queues with 'OR/q' in the name")
        shown.press("\x7f\x7f")
        shown.wait_for("1 queue with 'OR' in the name")
        shown.press(ENTER)
        shown.wait_for("q Quit")
        assert names(shown) == ["orders"]

        # One queue: its consumers, its workers with what they hold, why messages died.
        shown.press(ENTER)
        shown.wait_for("Queue orders", "no customer N", "desk-2", "esc Back", "U Requeue all  q Quit")
        # Figures first, then words
        assert shown.line("desk-2").split()[:2] == ["4", "1"]
        assert shown.line("desk-2").split()[-2:] == ["desk-2", "clerk"]
        assert shown.line("no customer N").split()[0] == "2"
        assert "\n3 dead, " in shown.text
        assert r"no [bold]price\x1b[NJ" in shown.text

        shown.press("p")
        shown.wait_for("Pause queue orders?", "Consumers still receive.")
        shown.press("n")
        shown.wait_without("Pause queue orders?")
        assert value(database, "select queue_paused from pgque.get_queue_info('orders')") is False
        shown.press("p")
        shown.wait_for("Pause queue orders?")
        shown.press("y")
        shown.wait_for("Queue orders is paused.", "paused, 3 dead", "p Resume")
        assert "p Pause" not in shown.text
        shown.press("p")
        shown.wait_for("Resume queue orders?")
        shown.press("y")
        shown.wait_for("Queue orders is open for senders.", "p Pause")
        assert value(database, "select queue_paused from pgque.get_queue_info('orders')") is False

        shown.press("c")
        shown.wait_for("Release 1 batch with 4 messages, leased by 1 worker", "redelivered.")
        shown.press("y")
        shown.wait_for("Released 1 batch of consumer clerk.", "Workers with messages: none")

        # Those with the chosen reason, the most frequent one, then the rest. Each question names the count.
        shown.press("u")
        shown.wait_for("Requeue 2 dead letters of queue orders with the reason “no", "customer N”?")
        shown.press("y")
        shown.wait_for("Requeued 2 dead letters of queue orders.")
        shown.press("U")
        shown.wait_for("Requeue 1 dead letter of queue orders?")
        shown.press("y")
        shown.wait_for("Requeued 1 dead letter of queue orders.", "Dead letters by reason: none")
        assert value(database, "select count(*) from pgque.dlq_inspect('orders')") == 0
        shown.press(ESCAPE)
        shown.wait_for("State")
        shown.press(ESCAPE)
        shown.wait(lambda: len(names(shown)) == 4, "all queues")
        shown.press("q")
        assert shown.ended() == 0
        assert shown.restored


class Empty(App[None]):
    """The program without what reads: its screens show what a test gives them."""

    CSS = Top.CSS


def test_a_table_that_is_filled_while_the_screen_is_laid_out_is_shown(database: str) -> None:
    async def shown() -> None:
        source = Source(database, read_only=True)
        await source.connect()
        opened = await source.queue("orders")
        await source.close()
        state = State(source, interval=1)
        state.open("orders")
        screen = Queue(state)
        async with Empty().run_test(size=(80, 24)) as pilot:
            await pilot.app.push_screen(screen)
            grid = screen.query_one("#workers", Grid)
            while grid.size.width != 80:
                await pilot.pause(0.01)
            # The order that a busy machine makes: the table asks for room, gets what it needed before, and is filled.
            grid.display = True
            screen.query_one(VerticalScroll)._clear_arrangement_cache()  # by a heading that asked as well
            screen._refresh_layout()
            state.opened = opened
            screen.show()
            while grid.size.height != 2:
                await pilot.pause(0.01)

    asyncio.run(asyncio.wait_for(shown(), PATIENCE))


def test_what_a_role_may_not_do_is_refused_or_not_offered(database: str, roles: Roles) -> None:
    name = str(conninfo_to_dict(database)["dbname"])
    reader, one = roles("reader", dbname=name), roles(dbname=name)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("select pgque.grant_queue('orders', %s, 'consume')", [one.name])
        # As a standby is: its sessions can only read.
        connection.execute(f"alter role {one.name} set default_transaction_read_only = on".encode())
    with top(reader.dsn) as shown:
        shown.press("p")
        shown.wait_for("Pause queue orders?")
        shown.press("y")
        shown.wait_for("permission denied for function pause", "hint: Grant the role")
        shown.press(ENTER)
        shown.wait_for("Dead letters by reason: permission denied", "desk-2")
    with top(one.dsn) as shown:
        shown.wait_for("orders", "dead letters", "1 queue", "read only", "/ Filter")
        assert names(shown) == ["orders"]
        assert "p Pause" not in shown.text
        shown.press("p" + ENTER)
        shown.wait_for("Queue orders", "Dead letters by reason: ", "desk-2", "q Quit")
        assert not any(word in shown.text for word in ("Requeue", "Reclaim", "Pause"))


def test_figures_are_shown_in_full_at_80_columns_and_a_paused_queue_is_named(database: str) -> None:
    long = "a-queue-with-a-name-of-57-bytes-".ljust(57, "x")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("select pgque.create_queue(%s), pgque.subscribe(%s, 'clerk')", [long, long])
        connection.execute("select pgque.send(%s, 'sale', 'x')", [long])
        connection.execute("select pgque.force_next_tick(%s), pgque.ticker(%s)", [long, long])
        move_clock(connection, "26 hours")
        connection.execute("select pgque.pause('mail'), pgque.pause(%s)", [long])
    with top(database) as shown:
        late = [line for line in shown.text.splitlines() if ": consumers: " in line]
        assert late
        assert all(re.search(r": consumers: 1 d [12] h since the oldest", line) for line in late)
        # A failed check does not hide that a queue is paused.
        assert shown.line("fail   mail").split()[:3] == ["fail", "mail", "paused"]
        assert shown.line("fail   billing").split()[2] != "paused"
        assert not re.search(r"\d:\d\d:\d\d\.\d|\d days? ", shown.text)
        # The key of the queue with the cursor, wherever the cursor goes
        shown.press("/mail" + ENTER)
        shown.wait_for("1 queue with", "p Resume")
        shown.press(ESCAPE)
        shown.wait_for("5 queues")
        shown.press("/orders" + ENTER)
        shown.wait_for("1 queue with 'orders'", "p Pause")
        shown.press(ESCAPE)
        shown.wait_for("5 queues")
        for columns in (60, 40):
            shown.resize(columns, 24)
            shown.wait(lambda: shown.line("fail   orders").split()[-1:] == ["3"], "the dead letters")
            assert all(len(line) <= columns for line in shown.text.splitlines())
        shown.press("q")
        assert shown.ended() == 0


def test_one_frame_has_the_rate_of_what_leaves(database: str) -> None:
    """A consumer acknowledges between the two readings."""
    between = (
        "select count(*) from pg_stat_activity where application_name = 'pgque top' and state = 'idle'"
        " and datname = current_database() and state_change < clock_timestamp() - interval '0.2 s'"
    )
    with psycopg.connect(database, autocommit=True) as connection:
        receive = "select distinct batch_id from pgque.receive('mail', 'clerk', 30)"
        batch = connection.execute(receive).fetchone()
        assert batch is not None
        command = [*COMMAND, "--dsn", database, "--once"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while not value(database, between):
                assert process.poll() is None
            connection.execute("select pgque.ack(%s)", batch)
            lines = process.communicate()[0].splitlines()
    row = next(line for line in lines if line.split()[1:2] == ["mail"])
    assert float(row.split()[3]) > 5


@pytest.fixture
def locked_out(database: str) -> Iterator[Callable[[bool], None]]:
    """locked_out(True) ends the session of the command and lets none in; locked_out(False) does again."""
    name = str(conninfo_to_dict(database)["dbname"])
    with psycopg.connect(make_conninfo(database, dbname="postgres"), autocommit=True) as connection:

        def do(out: bool) -> None:
            connection.execute(
                sql.SQL("alter database {} with allow_connections {}").format(
                    sql.Identifier(name), sql.SQL("false" if out else "true")
                )
            )
            connection.execute(
                "select pg_catalog.pg_terminate_backend(a.pid, 5000) from pg_catalog.pg_stat_activity as a"
                " where a.application_name = 'pgque top' and a.datname = %s",
                [name],
            )

        yield do
        do(False)


@pytest.mark.slow  # connects again
def test_it_outlives_a_lost_connection(database: str, locked_out: Callable[[bool], None]) -> None:
    with top(database) as shown:
        locked_out(True)
        shown.wait_for("no connection, trying again: ")
        assert "orders" in names(shown)  # the last figures stay
        shown.press("p")
        shown.wait_for("Pause queue orders?")
        shown.press("y")
        shown.wait_without("Pause queue orders?")
        locked_out(False)
        shown.wait_without("trying again")
        locked_out(False)  # another one
        shown.press(ENTER)
        shown.wait_for("desk-2")
        shown.press("\x03")
        assert shown.ended() == 0
        assert shown.restored
    gone = "select count(*) from pg_catalog.pg_stat_activity where application_name = 'pgque top'"
    assert value(database, f"{gone} and datname = current_database()") == 0


# Raises where the screen is filled, once the queues are shown.
BROKEN = """
import sys
from pgque.cli import main
from pgque.top import screens
def broken(self):
    password = self.state.source._dsn
    raise RuntimeError("broken on purpose")
screens.Queues.action_reverse = broken
main(["top", *sys.argv[1:]])
"""


@pytest.mark.slow  # starts the command four times
def test_the_terminal_is_as_before_however_it_ends(database: str) -> None:
    with top(database, "--read-only") as shown:
        assert "read only" in shown.line("pgque top")
        assert "p Pause" not in shown.text
        shown.process.send_signal(signal.SIGTERM)
        assert shown.ended() == 128 + signal.SIGTERM
        assert shown.restored
    with top(database) as shown:
        shown.close()
        while shown.process.poll() is None:  # shell and kernel may both send it, at any moment of the end
            shown.process.send_signal(signal.SIGHUP)
        assert shown.process.returncode == 128 + signal.SIGHUP
    secret = make_conninfo(database, password="hidden-from-tracebacks")
    with terminal(sys.executable, "-c", BROKEN, "--dsn", secret, columns=200) as shown:
        shown.wait_for("q Quit")
        shown.press("r")
        assert shown.ended() == 1
        assert shown.restored
        assert "RuntimeError: broken on purpose" in shown.text
        assert b"hidden-from-tracebacks" not in shown.written


# The command without Textual.
BARE = "import sys; sys.modules['textual'] = None; from pgque.cli import main; main(['top', *sys.argv[1:]])"


def test_a_frame_is_printed_where_there_is_no_terminal(database: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    bare = (sys.executable, "-c", BARE, "--dsn", database)
    done = subprocess.run(bare, capture_output=True, text=True, check=True, env=environment)
    lines = done.stdout.splitlines()
    assert "warn  queue orders, dead letters" in lines
    assert lines[-5].split() == ["State", "Queue", "In/s", "Out/s", "Backlog", "Oldest", "Retries", "Dead"]
    assert lines[-4].split()[:2] == ["warn", "orders"]
    assert lines[-4].split()[-1] == "3"
    assert lines[-4].split()[3] == "0"  # out: it was read twice
    assert LONG in done.stdout
    assert "\x1b" not in done.stdout
    with terminal(*COMMAND, "--dsn", database, "--once") as shown:
        assert shown.ended() == 0
        assert "a-queue-whose-name-…" in shown.text
        assert b"\x1b" not in shown.written
    with terminal(*bare) as shown:
        assert shown.ended() == 1
        assert "pgque top needs Textual" in shown.text
        assert 'pip install "./python[top]"' in shown.text


def test_wrong_options_and_a_missing_database_are_errors_with_a_hint(dsn: str) -> None:
    done = CliRunner().invoke(main, ["top", "--interval", "0s"])
    assert done.exit_code == 2
    assert "at least 1s" in done.output
    done = CliRunner().invoke(main, ["top", "--dsn", make_conninfo(dsn, dbname="there is none")])
    assert done.exit_code == 1
    assert 'database "there is none" does not exist' in done.output
