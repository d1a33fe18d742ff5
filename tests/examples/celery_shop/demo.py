"""Run a Celery application on pgque: a worker, retries, an ETA, remote control.

Run it: python tests/examples/celery_shop/demo.py, or with a connection string of a database with pgque.

Prints:
    done: at once, flaky 2, later, one of many, one of many
    inspect ping: pong
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parent))

from _server import database, export, started  # noqa: E402

_CELERY = [sys.executable, "-m", "celery", "-A", "tasks"]


def main(dsn: str) -> None:
    """Send tasks, and show what the worker did."""
    import psycopg
    import tasks

    import pgque.celery

    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create table done (id bigint generated always as identity, what text)")
        with started([*_CELERY, "worker", "--concurrency=2"], cwd=FOLDER, stdout=subprocess.DEVNULL):
            tasks.note.delay("at once")
            tasks.note.apply_async(("later",), countdown=2)  # waits in the database
            tasks.flaky.delay(2)
            with pgque.celery.bulk():  # one call
                for _ in range(2):
                    tasks.note.delay("one of many")
            with psycopg.connect(dsn) as own:
                with pgque.celery.bulk(own):  # in our own transaction
                    tasks.note.delay("never")
                own.rollback()
            found = "select string_agg(d.what, ', ' order by d.what) from done as d"
            while (done := conn.execute(found).fetchone()[0] or "").count(",") < 4:
                time.sleep(0.1)
            print("done:", done)
            print("inspect ping:", *{reply["ok"] for reply in tasks.app.control.inspect().ping().values()})


if __name__ == "__main__":
    with database() as dsn:
        export(dsn)
        os.environ["SHOP_DSN"] = dsn
        main(dsn)
