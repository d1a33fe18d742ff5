"""Any sequence of calls answers as a model in Python says. The longer runs are in tests/faults/test_long_model.py.

PGQUE_SEED repeats a run; what failed is shrunk to the fewest steps and printed as a program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from model import bench
from model.consumers import Consumers
from model.workers import Workers


@pytest.fixture
def prepared(own_dsn: str) -> Iterator[bench.Bench]:
    """A database of one's own whose clock is set."""
    found = bench.prepare(own_dsn, script=os.environ.get("PGQUE_MODEL_SQL") and bench.engine())
    yield found
    found.conn.close()


@pytest.mark.slow  # random calls beside a model
@pytest.mark.timeout(600)
def test_any_calls_of_consumers_agree_with_the_model(prepared: bench.Bench) -> None:
    class Machine(Consumers):
        bench = prepared

    bench.run(Machine, 18, 40)
    assert prepared.seen["batches"] > 20, prepared.seen


@pytest.mark.slow  # random calls beside a model
@pytest.mark.timeout(600)
def test_any_calls_of_workers_agree_with_the_model(prepared: bench.Bench) -> None:
    class Machine(Workers):
        bench = prepared

    bench.run(Machine, 40, 40)
    assert prepared.seen["batches"] > 20, prepared.seen
