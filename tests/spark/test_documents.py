"""The code blocks of the documents that need Spark run as written and print what the documents show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from conftest import Role, install
from support.documents import ROOT, Page
from support.servers import TestServer

README = ROOT / "README.md"
SPARK = ROOT / "python" / "SPARK.md"


# Slow, and so on the newest PySpark only: the handler for Ctrl-C of 4.0 breaks the connection to its JVM.
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", [README, SPARK], ids=lambda path: path.name)
def test_the_blocks_of_a_document_run_on_spark(
    path: Path,
    server: TestServer,
    tcp_dsn: str,
    roles: Callable[..., Role],
    spark_variables: dict[str, str],
    tmp_path: Path,
) -> None:
    if path != README:  # which installs
        install(tcp_dsn)
    role = roles("reader", "writer")
    parts = conninfo_to_dict(role.dsn)
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"*:*:*:{role.name}:{parts['password']}\n")
    at = conninfo_to_dict(tcp_dsn)
    page = Page(
        path,
        tcp_dsn,
        tmp_path,
        server.process.bindir if server.process is not None else None,
        replace={
            '"user": "spark"': f'"user": "{role.name}"',
            '"user", "spark"': f'"user", "{role.name}"',
            "/var/lib/spark": str(tmp_path),
            "//localhost/": f"//{at['host']}:{at['port']}/",
        },
        env={**spark_variables, "PGPASSFILE": str(passwords)},
    )
    assert page.run(lambda block: block.language != "python" or path == SPARK or "spark" in block.code) > 3
