"""The state machines of tests/sql/test_model.py for longer, with a server that is killed; and that they can fail.

PGQUE_SEED repeats a run, PGQUE_MODEL_EXAMPLES sets how many sequences of calls are tried, PGQUE_MODEL_SQL names
another engine to judge.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from history.mutants import replaced
from model import bench
from model.consumers import Consumers
from model.mutants import MUTANTS
from model.workers import Workers
from pgque import embedded
from support.servers import TestServer

# It takes many sequences to see them: left to `make verify-long`, because tests in tests/sql notice them at each landing.
LATE_SEEN = {
    "a lease that is extended ends from now",
    "a hand-out does not seal the body",
    "what lapsed goes out in one piece",
    "an open batch comes again with what was settled",
}


@pytest.fixture
def prepared(own_dsn: str) -> Iterator[bench.Bench]:
    """A database of one's own whose clock is set."""
    found = bench.prepare(own_dsn, script=os.environ.get("PGQUE_MODEL_SQL") and bench.engine())
    yield found
    found.conn.close()


@pytest.fixture
def durable(server: TestServer) -> Iterator[bench.Bench]:
    """The same on a server that may be killed."""
    bindir = server.process.binaries.bindir if server.process else None
    settings = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "32MB"}
    try:
        own = embedded.start(bindir, settings=settings)
    except embedded.EmbeddedServerError as error:
        pytest.skip(f"no server of its own: {error}")
    with own:
        found = bench.prepare(own.dsn, own, bench.engine())
        yield found
        found.conn.close()


def _consumers(on: bench.Bench, examples: int, *wanted: str) -> None:
    class Machine(Consumers):
        bench = on

    wanted = wanted or ("retries", "late commits", "rotations", "requeued")
    runs = bench.run(Machine, examples, 50, want=wanted)
    assert on.seen["batches"] > 3 * examples * runs, on.seen


def _workers(on: bench.Bench, examples: int, *wanted: str) -> None:
    class Machine(Workers):
        bench = on

    wanted = wanted or (
        "again",
        "pieces of what lapsed",
        "acks of what is not whole",
        "replaced",
        "died",
        "rotations",
    )
    runs = bench.run(Machine, examples, 50, want=wanted)
    assert on.seen["batches"] > 3 * examples * runs, on.seen


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_calls_of_consumers_agree_with_the_model_while_the_server_is_killed(
    durable: bench.Bench,
) -> None:
    _consumers(durable, 30, "crashes", "retries")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_any_calls_of_workers_agree_with_the_model_in_a_longer_run(prepared: bench.Bench) -> None:
    _workers(prepared, 60, "again", "died", "rotations")


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("run", "examples"), [(_consumers, 800), (_workers, 1500)])
def test_any_calls_agree_with_the_model_for_minutes(
    prepared: bench.Bench, run: Callable[[bench.Bench, int], None], examples: int
) -> None:
    run(prepared, examples)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_replaces_what_the_engine_has_once(mutant: str) -> None:
    assert replaced(bench.engine(), mutant, MUTANTS[mutant][1]) != bench.engine()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=pytest.mark.long) if m in LATE_SEEN else m for m in MUTANTS]
)
def test_a_broken_engine_differs_from_the_model(fresh_dsn: str, mutant: str) -> None:
    machine, replacements = MUTANTS[mutant]
    on = bench.prepare(fresh_dsn, script=replaced(bench.engine(), mutant, replacements))

    class Machine(machine):  # type: ignore[misc, valid-type]
        bench = on

    with on.conn, pytest.raises(AssertionError) as caught:
        bench.run(Machine, 400, 50, shrink=False)
    print(f"{mutant}: {str(caught.value)[:300]}")
