"""Earlier packages against our SQL, and ours against the SQL of an earlier version.

A package works with every SQL of its minor version, and processes that are connected go on with the next one too.
previous/pgque-0.8.0.zip is the package as it was released, without its demo, page, Django and Spark:
git archive 2f00e3c:python/src pgque.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

import pgque
from pgque.ops.install import install
from pgque.ops.ticker import run_ticker
from sql.helpers import Connection, column, value
from sql.test_install import install_earlier
from support import servers

VERSION = "0.8.0"


@dataclass(frozen=True)
class Package:
    """A package as it was released, in a folder."""

    version: str
    folder: Path


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of the minor version before this one, unpacked."""
    folder = tmp_path_factory.mktemp("previous")
    with zipfile.ZipFile(Path(__file__).parent / "previous" / f"pgque-{VERSION}.zip") as archive:
        archive.extractall(folder)
    return Package(VERSION, folder)


PREAMBLE = """
import asyncio, sys, threading, time
import psycopg, pgque
from pgque.ticker import run_ticker
dsn, newer, folder, version = sys.argv[1:]
assert pgque.__version__ == version and pgque.__file__.startswith(folder), pgque.__file__

def until(condition, meanwhile=lambda: None):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        meanwhile()
        time.sleep(0.01)
"""


def run(package: Package, script: str, dsn: str) -> None:
    """Run a script with a released package."""
    arguments = [dsn, str(servers.SQL_FILE), str(package.folder), package.version]
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, *arguments],
        env={**os.environ, "PYTHONPATH": str(package.folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_processes_of_an_earlier_version_that_are_connected_go_on_after_the_upgrade(
    previous: Package, fresh_dsn: str
) -> None:
    install_earlier(fresh_dsn, previous.version)
    run(
        previous,
        """
client = pgque.connect(dsn, autocommit=True)
client.create_queue("q", {"max_retries": 0})
for consumer in ("plain", "read", "pool", "taken"):
    client.subscribe("q", consumer)
got = {"plain": [], "pool": []}

consumer = pgque.Consumer(dsn, queue="q", name="plain", poll_interval=0.1)
consumer.on("*")(lambda message: got["plain"].append(message.payload))
worker = pgque.Worker(dsn, queue="q", consumer="pool", concurrency=2)

@worker.handler("*")
def handle(message):
    got["pool"].append(message.payload)
    if message.type == "bad":
        raise ValueError("no good")

threads = [threading.Thread(target=call, daemon=True) for call in (consumer.start, worker.run)]
for thread in threads:
    thread.start()
work = pgque.WorkQueue(dsn, "q", consumer="taken")

def tick():
    client.conn.execute("select pgque.maint_retry_events(), pgque.ticker()")

def round_of(n):
    for found in got.values():
        found.clear()
    sent = [client.send("q", f"{n} one", headers={"a": 1})]
    sent += client.send_batch("q", "t", [f"{n} two", f"{n} three"], keys=[None, f"key {n}"])
    sent.append(work.send(f"{n} four"))
    sent.append(client.send("q", f"{n} bad", type="bad"))
    until(lambda: all(len(found) == 5 for found in got.values()), tick)
    assert sorted(got["plain"]) == sorted(got["pool"]) == sorted(f"{n} {m}" for m in ("one", "two", "three", "four", "bad"))
    until(lambda: client.dlq_inspect("q"))
    (letter,) = client.dlq_inspect("q")
    assert letter.ev_id == sent[-1] and "no good" in letter.dl_reason
    assert client.dlq_purge("q", 0) == 1

    messages = client.receive("q", "read")
    assert [m.msg_id for m in messages] == sent
    client.nack(messages[0].batch_id, messages[0], 0, "later")
    assert client.ack(messages[0].batch_id) == 1
    (letter,) = client.dlq_inspect("q")
    assert letter.ev_id == sent[0] and client.dlq_requeue(letter.dl_id) == sent[0]
    again = []
    until(lambda: again or again.extend(client.receive("q", "read")), tick)
    assert [m.msg_id for m in again] == sent[:1] and client.ack(again[0].batch_id) == 1
    taken = []
    for message in work.messages(timeout=0):
        taken.append(message.msg_id)
        assert message.ack() if len(taken) == 1 else True
    assert sorted(taken) == sent
    assert client.receive("q", "taken", worker="w") == []

round_of(1)
with psycopg.connect(dsn) as upgrade:
    upgrade.execute(open(newer, "rb").read())
with psycopg.connect(dsn) as check:
    assert check.execute("select pgque.version()").fetchone()[0] != pgque.__version__
round_of(2)
assert all(thread.is_alive() for thread in threads)
consumer.stop(); worker.stop()
for thread in threads:
    thread.join(20)
assert not any(thread.is_alive() for thread in threads)
""",
        fresh_dsn,
    )


def test_a_ticker_of_an_earlier_version_goes_on_through_the_upgrade(
    previous: Package, fresh_dsn: str
) -> None:
    install_earlier(fresh_dsn, previous.version)
    run(
        previous,
        """
client = pgque.connect(dsn, autocommit=True)
client.create_queue("q")
stop = threading.Event()
thread = threading.Thread(target=run_ticker, args=(dsn, stop), daemon=True)
thread.start()

def ticks():
    before = client.queue_info("q")[0].last_tick_id
    client.send("q", "x")
    until(lambda: client.queue_info("q")[0].last_tick_id > before)

ticks()
with psycopg.connect(dsn) as upgrade:
    upgrade.execute(open(newer, "rb").read())
ticks()
assert thread.is_alive()
stop.set()
thread.join(20)
""",
        fresh_dsn,
    )


def test_a_ticker_goes_on_when_an_upgrade_took_a_function_from_under_it(
    own_dsn: str, connect: Callable[..., Connection], wait_until: Callable[..., None]
) -> None:
    conn = connect(own_dsn)
    stop = threading.Event()
    failed: list[BaseException] = []

    def tick() -> None:
        try:
            run_ticker(own_dsn, stop)
        except BaseException as error:
            failed.append(error)

    def loops() -> list[int]:
        return column(
            conn,
            "select pid from pg_stat_activity"
            " where datname = current_database() and query ~ '^call pgque.ticker_loop'",
        )

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        wait_until(loops, "the loop runs")
        first = loops()
        conn.execute("alter function pgque._loop_state rename to _loop_state_of_old")
        wait_until(lambda: first[0] not in loops(), "it fails")
        conn.execute("alter function pgque._loop_state_of_old rename to _loop_state")
        wait_until(lambda: failed or _ticker(conn) == "running", "it runs again")
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert failed == []


def _ticker(conn: Connection) -> object:
    return value(conn, "select s.status from pgque.status() as s where s.component = 'ticker'")


def test_the_previous_version_that_connects_gets_the_hint_to_upgrade_the_package(
    previous: Package, dsn: str
) -> None:
    run(
        previous,
        """
from click.testing import CliRunner
from pgque.cli import main

async def connect_async():
    await pgque.connect_async(dsn)

own = psycopg.connect(dsn)
for call in (
    lambda: pgque.connect(dsn),
    lambda: asyncio.run(connect_async()),
    lambda: pgque.PgqueClient(own).send("q", "x"),
    lambda: pgque.WorkQueue(dsn, "q").send("x"),
    lambda: next(pgque.WorkQueue(dsn, "q", consumer="c").messages()),
    pgque.Consumer(dsn, queue="q", name="c", unknown_handler_policy="ack").start,
    pgque.Worker(dsn, queue="q", consumer="c", unknown_handler_policy="ack").run,
    lambda: run_ticker(dsn),
):
    try:
        call()
    except pgque.PgqueVersionError as error:
        assert pgque.__version__ in str(error) and "pip install --upgrade ./python" in error.hint, error
    else:
        raise AssertionError(f"{call} did not raise")
for command in (["send", "q", "x", "--dsn", dsn], ["queues", "--dsn", dsn], ["install", "--dsn", dsn]):
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 1 and "pip install --upgrade ./python" in done.output, done.output
own.close()
""",
        dsn,
    )


async def _connect_async(dsn: str) -> None:
    await pgque.connect_async(dsn)


async def _consume_async(dsn: str) -> None:
    await pgque.AsyncConsumer(dsn, queue="q", name="c", unknown_handler_policy="ack").start()


async def _work_async(dsn: str) -> None:
    await pgque.AsyncWorker(dsn, queue="q", consumer="c", unknown_handler_policy="ack").run()


CALLS: dict[str, Callable[[str], object]] = {
    "connect": pgque.connect,
    "connect_async": lambda dsn: asyncio.run(_connect_async(dsn)),
    "consumer": lambda dsn: pgque.Consumer(dsn, queue="q", name="c", unknown_handler_policy="ack").start(),
    "async consumer": lambda dsn: asyncio.run(_consume_async(dsn)),
    "worker": lambda dsn: pgque.Worker(dsn, queue="q", consumer="c", unknown_handler_policy="ack").run(),
    "async worker": lambda dsn: asyncio.run(_work_async(dsn)),
    "sending work queue": lambda dsn: pgque.WorkQueue(dsn, "q").send("x"),
    "receiving work queue": lambda dsn: next(pgque.WorkQueue(dsn, "q", consumer="c").messages()),
    "ticker": run_ticker,
}


def test_this_version_names_the_way_to_upgrade_an_earlier_database_and_then_works_with_its_messages(
    fresh_dsn: str,
) -> None:
    install_earlier(fresh_dsn, VERSION)
    with psycopg.connect(fresh_dsn, autocommit=True) as old:
        value(old, "select pgque.create_queue('q')")
        value(old, "select pgque.subscribe('q', 'c')")
        value(old, "select pgque.send('q', 'from before'::text)")
    for name, call in CALLS.items():
        with pytest.raises(pgque.PgqueVersionError) as caught:
            call(fresh_dsn)
        for word in (VERSION, pgque.__version__, "pgque install --dsn"):
            assert word in str(caught.value), name
        assert caught.value.hint == "pgque install --dsn …"
    for command in (["queues"], ["send", "q", "x"], ["ticker"]):
        done = subprocess.run(
            [sys.executable, "-m", "pgque.cli", *command],
            env={**os.environ, "PGQUE_DSN": fresh_dsn},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1, command
        assert "pgque install --dsn" in done.stderr, command
        assert "Traceback" not in done.stderr
    assert install(fresh_dsn) == pgque.__version__
    with pgque.connect(fresh_dsn, autocommit=True) as client:
        client.ticker_all()
        (message,) = client.receive("q", "c")
        assert message.payload == "from before"
        assert client.ack(message.batch_id) == 1


def test_a_function_that_the_database_lacks_is_named_with_the_command_that_installs(own_dsn: str) -> None:
    with pgque.connect(own_dsn, autocommit=True) as client:
        client.admin.create_queue("q")
        client.conn.execute("drop function pgque.list_poison")
        with pytest.raises(pgque.PgqueVersionError, match=r"pgque\.list_poison") as caught:
            client.dlq.list_poison("q")
        assert "pgque install --dsn" in str(caught.value.hint)
        assert caught.value.sqlstate == "42883"
        client.conn.execute("select pgque.uninstall()")
        with pytest.raises(pgque.PgqueVersionError, match="pgque") as caught:
            client.send("q", "x")
        assert "pgque install --dsn" in str(caught.value.hint)


def test_an_error_in_sql_of_the_callers_own_is_not_taken_for_a_wrong_version(own_dsn: str) -> None:
    with pgque.connect(own_dsn, autocommit=True) as client:
        client.admin.create_queue("q")
        client.conn.execute(
            "create function no_good() returns trigger language plpgsql as"
            " $$ begin perform no_such_function(); return new; end $$"
        )
        client.conn.execute(
            "create trigger t before insert on pgque.event_1_0 for each row execute function no_good()"
        )
        with pytest.raises(pgque.PgqueError) as caught:
            client.send("q", "x")
        assert caught.value.sqlstate == "42883"
        assert not isinstance(caught.value, pgque.PgqueVersionError)
