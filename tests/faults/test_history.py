"""Random work against one server, with everything that can go wrong; the recorded history is judged afterwards.

PGQUE_SEED repeats a run's choices (the interleaving is the server's), PGQUE_HISTORY_SECONDS sets its length,
PGQUE_HISTORY_FAULTS what goes wrong ("kill,proxy"), PGQUE_HISTORY_SQL names another engine to judge. What failed is
in build/history-SEED.txt; with PGQUE_HISTORY_AUDIT=1 also what became of a lost message in the tables.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from conftest import create_database, drop_database
from history import faults, harness
from history.mutants import MUTANTS, NARROW, broken
from history.record import History, Session
from pgque import embedded
from support.servers import SQL_FILE, TestServer

# Seeds of runs that failed once, and their faults. A seed repeats what is tried, not how it interleaves: the
# interleavings themselves are in test_history_findings.py.
REMEMBERED = [
    (211, "proxy,client"),  # rotation and a hand-out with a key: deadlock
    (304, "clock"),  # a refused nack, and the ack of its batch lost the message
    (413, "disk,dump"),  # the same, and health() failed for a queue that was dropped
    (414, "proxy,kill,timeouts,clock"),  # the same loss
]

# Those for every landing show that the judge can say no. `make verify-long` has the others too, some of which take luck to
# be seen within seconds, and which tests in tests/sql notice at each landing.
SOON_SEEN = {"ack drops the rest of the window", "receive attempts have no limit"}


def _script() -> str:
    return Path(os.environ.get("PGQUE_HISTORY_SQL") or SQL_FILE).read_text()


def _seed() -> int:
    return int(os.environ.get("PGQUE_SEED") or random.SystemRandom().randrange(10**9))


def _seconds(default: float) -> float:
    return float(os.environ.get("PGQUE_HISTORY_SECONDS") or default)


def _is_enough(h: History) -> bool:
    """Return whether enough has happened for a run that finds no fault to mean something."""
    seen = h.stats
    return seen["batches"] > 50 and seen["rotations"] > 0 and seen["journal turns"] > 0


def _check(h: History) -> None:
    summary = f"PGQUE_SEED={h.seed}: {dict(h.stats)}"
    print(summary)
    if h.faults:
        h.write(SQL_FILE.parents[1] / "build" / f"history-{h.seed}.txt")
    assert not h.faults, "\n".join([summary, *h.faults[:30]])
    assert _is_enough(h) and h.stats["messages"] > 100, summary


@pytest.fixture
def own_server(server: TestServer) -> Iterator[faults.OwnServer]:
    """A server that may be killed, on a disk that may be filled."""
    bindir = server.process.binaries.bindir if server.process else None
    try:
        own = faults.OwnServer(bindir)
    except embedded.EmbeddedServerError as error:
        pytest.skip(f"no server of its own: {error}")
    try:
        yield own
    finally:
        own.stop()


def _with_faults(own: faults.OwnServer, names: set[str], seed: int, seconds: float) -> None:
    unknown = names - set(faults.FAULTS)
    assert not unknown, f"no such fault: {unknown}; there are {sorted(faults.FAULTS)}"
    if own.disk is None and "disk" in names:
        if names == {"disk"}:
            pytest.skip(f"no disk can be mounted: {own.no_disk}")
        print(f"without a full disk: {own.no_disk}")
    _check(harness.run(own.database(), _script(), seed, seconds, names, own, enough=_is_enough))


def _names() -> set[str]:
    return set(os.environ.get("PGQUE_HISTORY_FAULTS", "").split(",")) - {""} or set(faults.FAULTS)


@pytest.mark.slow  # half a minute of random work
@pytest.mark.timeout(400)
def test_a_history_without_faults_is_as_promised(fresh_dsn: str) -> None:
    _check(harness.run(fresh_dsn, _script(), _seed(), _seconds(12), enough=_is_enough))


def test_a_run_that_fails_leaves_nobody_behind(fresh_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the judge is ill")

    monkeypatch.setattr(harness, "conclude", fail)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="the judge is ill"):
        harness.run(fresh_dsn, _script(), 1, 1)
    assert set(threading.enumerate()) <= before
    with psycopg.connect(fresh_dsn) as conn:
        others = (
            "datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
        )
        row = conn.execute(f"select count(*) from pg_stat_activity where {others}".encode()).fetchone()
    assert row == (0,)


@pytest.mark.slow  # some seconds of random work
def test_who_ends_behind_a_savepoint_keeps_nobody_waiting(
    fresh_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rude(h: History, rng: random.Random, name: str) -> None:
        session = Session(h, name, rng)
        session.ready()
        session.begin()
        session.run("select from pgque.queue for share")
        session.run("savepoint s")
        with suppress(psycopg.errors.DivisionByZero):
            session.run("select 1 / 0")

    everybody = harness.crew
    monkeypatch.setattr(harness, "crew", lambda narrow: [*everybody(narrow), (rude, "rude", ())])
    h = harness.run(fresh_dsn, _script(), 1, 1)
    assert not h.faults


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_history_with_faults_is_as_promised(own_server: faults.OwnServer) -> None:
    _with_faults(own_server, _names(), _seed(), _seconds(15))


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_history_with_one_kind_of_fault_is_as_promised(own_server: faults.OwnServer, fault: str) -> None:
    _with_faults(own_server, {fault}, _seed(), 8)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("seed", "names"), REMEMBERED)
def test_a_seed_that_failed_once_does_not_fail(own_server: faults.OwnServer, seed: int, names: str) -> None:
    _with_faults(own_server, set(names.split(",")), seed, 12)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_long_history_with_faults_is_as_promised(own_server: faults.OwnServer) -> None:
    _with_faults(own_server, _names(), _seed(), _seconds(300))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant", [m if m in SOON_SEEN else pytest.param(m, marks=pytest.mark.long) for m in MUTANTS]
)
def test_a_broken_engine_is_caught(server: TestServer, mutant: str) -> None:
    """The judge can say no, at the latest after some runs: what happens in eight seconds is chance."""
    verdict = MUTANTS[mutant][0]
    deadline = time.monotonic() + 240
    for attempt in itertools.count():
        name = create_database(server, "pgque_mutant")
        try:
            dsn = server.dsn_for(name)
            h = harness.run(
                dsn, broken(_script(), mutant), _seed() + attempt, 8, {"kill"}, narrow=mutant in NARROW
            )
        finally:
            drop_database(server, name)
        print(f"{mutant}: {h.faults[:5]}")
        if any(re.search(verdict, fault) for fault in h.faults):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"not caught: {mutant}; {dict(h.stats)}")
