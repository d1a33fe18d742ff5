"""Keep a demo busy: a message a second, and dead letters that can be requeued.

`python -m pgque.demo.flow [FILE]`, with the database in PGQUE_DSN. It ends with SIGTERM, and when the
database is away.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from psycopg.conninfo import make_conninfo
from rich.console import Console

from ..twins.client import connect
from .files import good_lines, library_messages
from .signals import clean_ends
from .work import QUEUE, compile_worker, size_worker

PERIOD = 1.0  # seconds from message to message
LATE_EVERY = 30  # messages, of which one names a file that is not there yet
LATE_BY = 5  # messages, after which the file is there: by then its message was given up
MOST_DEAD = 50  # dead letters, beyond which none is added
WORKERS = 2


def run(dsn: str, path: Path | None) -> None:
    """Send and handle messages until SIGTERM. Raises PgqueConnectionError when the database is away."""
    context = multiprocessing.get_context("spawn")
    console = Console(quiet=True)
    with tempfile.TemporaryDirectory(prefix="pgque-demo-") as name, connect(dsn, autocommit=True) as client:
        own = Path(name)
        messages = good_lines(path, console) if path else library_messages(own, console)
        type_ = "line" if path else "file"
        named = make_conninfo(dsn, application_name="pgque demo")
        for n in range(1, WORKERS + 1):
            context.Process(target=compile_worker, args=(named, f"worker-{n}"), daemon=True).start()
        context.Process(target=size_worker, args=(named,), daemon=True).start()
        late = own / "late.py"
        for n in count():
            if n % LATE_EVERY == 0 and len(client.dlq.inspect(QUEUE, MOST_DEAD)) < MOST_DEAD:
                late = own / f"late_{n // LATE_EVERY + 1}.py"
                client.send(QUEUE, json.dumps({"path": str(late), "package": "late", "size": 8}), type="file")
            elif n % LATE_EVERY == LATE_BY:
                late.write_text("x = 1\n\n")
            else:
                client.send(QUEUE, random.choice(messages), type=type_)  # noqa: S311
            time.sleep(PERIOD)


if __name__ == "__main__":
    with clean_ends():
        run(os.environ["PGQUE_DSN"], Path(sys.argv[1]) if len(sys.argv) > 1 else None)
