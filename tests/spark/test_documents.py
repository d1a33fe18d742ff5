"""The code blocks of the documents that need Spark run as written and print what the documents show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import install
from support.documents import ROOT, Page, run_example

SPARK = ROOT / "python" / "SPARK.md"
EXAMPLES = sorted((ROOT / "tests" / "examples" / "spark").glob("*.py"))


# Slow, and so on the newest PySpark only: the handler for Ctrl-C of 4.0 breaks the connection to its JVM.
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_blocks_of_the_page_on_spark_run(
    tcp_dsn: str, spark_page: Callable[..., Page], spark_variables: dict[str, str]
) -> None:
    install(tcp_dsn)
    assert spark_page(SPARK, spark_variables).run() > 3


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_on_spark(
    path: Path, tcp_dsn: str, spark_variables: dict[str, str], tmp_path: Path
) -> None:
    install(tcp_dsn)
    run_example(path, tcp_dsn, tmp_path, spark_variables)
