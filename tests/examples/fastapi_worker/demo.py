"""Serve an application with FastAPI and uvicorn; a worker runs inside it.

Run it: python tests/examples/fastapi_worker/demo.py, or with a connection string of a database with pgque.

Prints:
    POST /orders: 200 {"order":1}
    GET /orders/1: 200 {"confirmed":true}
    GET /health: 200 []
    the server has ended
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parent))

from _server import database, export, started  # noqa: E402

import pgque  # noqa: E402

_UVICORN = [sys.executable, "-m", "uvicorn", "app:app", "--port=0", "--no-access-log"]


def main(dsn: str) -> None:
    """Place an order, and wait until it is confirmed."""
    with pgque.connect(dsn) as client:
        client.conn.execute(
            "create table orders (id int generated always as identity, address text, confirmed bool default false)"
        )
        client.admin.create_queue("example_orders")
        client.subscribe("example_orders", "confirming")

    with started(_UVICORN, cwd=FOLDER, stderr=subprocess.PIPE) as server:
        for line in server.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"http://[0-9.:]+", line):
                url = found[0]
                break

        def ask(path: str, method: str = "GET") -> str:
            request = urllib.request.Request(url + path, method=method)  # noqa: S310
            with urllib.request.urlopen(request) as answer:  # noqa: S310
                return f"{method} {path.partition('?')[0]}: {answer.status} {answer.read().decode()}"

        print(ask("/orders?address=ann@example.com", "POST"))
        while "true" not in (confirmed := ask("/orders/1")):
            time.sleep(0.1)
        print(confirmed)
        print(ask("/health"))
    print("the server has ended")


if __name__ == "__main__":
    with database() as dsn:
        export(dsn)
        main(dsn)
