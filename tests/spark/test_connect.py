"""Where Spark is a server: the examples of SPARK.md over Spark Connect, and as a declarative pipeline."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from conftest import install
from support.documents import ROOT, Page, ticking

# Slow, and so on the newest PySpark only.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SPARK = ROOT / "python" / "SPARK.md"
BIN = Path(sys.executable).parent

# What Spark Connect cannot do.
JDBC = """
from pyspark.sql import SparkSession
from pgque.spark import foreach_batch
foreach_batch("orders")(SparkSession.builder.getOrCreate().range(1), 0)
"""


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def spark_home() -> str:
    """Return the folder of Spark's own programs."""
    import pyspark

    return str(Path(pyspark.__file__).parent)


@contextmanager
def connect_server(folder: Path, variables: Mapping[str, str], conf: Mapping[str, str]) -> Iterator[str]:
    """Run a Spark Connect server; yield its address."""
    port = free_port()
    command = [
        str(BIN / "spark-submit"),
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
    ]
    for name, setting in {**conf, "spark.connect.grpc.binding.port": str(port)}.items():
        command += ["--conf", f"{name}={setting}"]
    log = folder / "connect.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "spark-internal"],
            env={**variables, "SPARK_HOME": spark_home()},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def test_the_examples_run_over_spark_connect(
    tcp_dsn: str,
    spark_page: Callable[..., Page],
    spark_conf: dict[str, str],
    spark_variables: dict[str, str],
    tmp_path: Path,
) -> None:
    install(tcp_dsn)
    page = spark_page(SPARK, {**spark_variables, "SPARK_REMOTE": "filled in below"})
    server = {
        name: value
        for name, value in page.env.items()
        if not name.startswith(("SPARK_REMOTE", "PYSPARK_SUBMIT"))
    }
    page.replace['table="shop.pgque_epoch"'] = 'table="shop.pgque_epoch", query_id="first"'
    with connect_server(tmp_path, server, spark_conf) as address:
        page.env["SPARK_REMOTE"] = address
        assert page.run(lambda block: block.language in ("sql", "python")) > 8
        refused = subprocess.run(
            [sys.executable, "-c", JDBC],
            env=page.env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert "PgqueBadArgumentError: foreach_batch cannot count partitions" in refused.stderr, refused.stderr
    with psycopg.connect(tcp_dsn) as conn:
        assert conn.execute("select distinct query from shop.pgque_epoch").fetchall() == [("first",)]
        assert conn.execute("select count(*) from shop.sale where order_id = 1").fetchone() == (1,)


def test_the_example_runs_as_a_declarative_pipeline(
    tcp_dsn: str, spark_page: Callable[..., Page], spark_conf: dict[str, str], tmp_path: Path
) -> None:
    install(tcp_dsn)
    variables = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    page = spark_page(SPARK, variables)
    (spec,) = (block.code for block in page.blocks if block.language == "yaml")
    (code,) = (block.code for block in page.blocks if "pyspark import pipelines" in block.code)
    project = tmp_path / "project"
    (project / "transformations").mkdir(parents=True)
    (project / "spark-pipeline.yml").write_text(page.fill(spec))
    (project / "transformations" / "large_orders.py").write_text(page.fill(code))
    with (
        psycopg.connect(tcp_dsn, autocommit=True) as conn,
        ticking(tcp_dsn),
        # Its own server, which `spark-pipelines run` starts if it is told none, has a port that is fixed.
        connect_server(tmp_path, page.env, spark_conf) as address,
    ):
        conn.execute("select pgque.create_queue('orders'), pgque.create_queue('large_orders')")
        conn.execute(
            "select pgque.subscribe('orders', 'pipeline'), pgque.subscribe('large_orders', 'shipping')"
        )
        conn.execute(
            "select pgque.send('orders', '{\"total\": 99}'), pgque.send('orders', '{\"total\": 250}')"
        )
        done = subprocess.run(
            [str(BIN / "spark-pipelines"), "run", "--remote", address],
            cwd=project,
            env=page.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        sent = conn.execute("select type, payload from pgque.peek('large_orders', 10)").fetchall()
    assert sent == [("order.large", '{"total": 250}')]
