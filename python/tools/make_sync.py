"""Make the sync modules, pgque.twins, from the async ones.

python tools/make_sync.py           write them
python tools/make_sync.py --check   exit 1 when a committed one is stale
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "pgque"
SOURCES = (
    *("client/calling.py", "client/client.py", "client/flat.py"),
    *("client/admin.py", "client/archived.py", "client/consumers.py", "client/dlq.py", "client/messages.py"),
    *("client/monitor.py", "client/pgq.py", "client/recurring.py"),
    "client/connection.py",
    "runtime/listen.py",
    "runtime/exchange.py",
    "runtime/transactional.py",
    "runtime/runtime.py",
    "runtime/consumer.py",
    "runtime/workers.py",
    "transaction/calls.py",
)

# In order; whole words only.
RULES = [
    # The connections that only one of the twins takes; before any of their names is changed.
    (
        "a connection of psycopg, SQLAlchemy or asyncpg, a psycopg cursor, a SQLAlchemy session, or\n"
        "    a pool of psycopg_pool or asyncpg\\.\n",
        "a connection of psycopg, psycopg2, SQLAlchemy or Django, a cursor, a SQLAlchemy session,\n"
        "    the alias of a database of Django, or a pool of psycopg_pool.\n",
    ),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"Awaitable\[(object|AsyncPgqueClient)\]", r"\1"),
    (r"Awaitable, ", ""),
    (r"\b__aenter__\b", "__enter__"),
    (r"\b__aexit__\b", "__exit__"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]"),
    (r"\bAsyncGenerator\b", "Generator"),
    (r"\bAsyncConnectionPool\b", "ConnectionPool"),
    (r"\bAsync(Limited)?Connection\b", r"\1Connection"),
    (r"\bAsyncRetrying\b", "Retrying"),
    (r"\bAsyncPgqueClient\b", "PgqueClient"),
    (r"\bAsync(Consumer|Runtime|Transactions|Calling|Flat|Group)\b", r"\1"),
    (r"\bAsync(Admin|Archived|Consumers|Dlq|Messages|Monitor|Pgq|Recurring)\b", r"\1"),
    (r"\bAsyncStopper\b", "Stopper"),
    (r"\bAsyncHandler\b", "Handler"),
    (r"\bAsyncTransactionalHandler\b", "TransactionalHandler"),
    (r"\bAsyncTaskDecorator\b", "TaskDecorator"),
    (r"\bconnect_async\b", "connect"),
    (r"\bAsyncCursor\b", "Cursor"),
    (r"\bAsyncWork(er|Queue|Message)\b", r"Work\1"),
    (r"\bTaskPool\b", "ThreadPool"),
    (r"\bAsyncLock\b", "Lock"),
    (r"\b(run_worker|call|run|send|send_batch|receive|ack|nack|_value|_outcomes)_async\b", r"\1"),
    (r"\bAsyncWatch\b", "Watch"),
    (r"\bcheck_async_handler\b", "check_handler"),
    # What only one of the twins has.
    (r'Literal\["tasks"\] = "tasks"', 'Literal["threads", "processes"] = "threads"'),
    (
        r'use: "tasks"\.',
        'use: "threads"; or "processes", and then handlers must be functions of a module, and the program\n'
        '            must call `run` under `if __name__ == "__main__":`, since each process imports it.',
    ),
]

HEADER = "# Generated from {source} by tools/make_sync.py: edit that file and run the script again.\n"


# A relative import, and the same from the folder of the twins.
IMPORT = re.compile(r"^( *from )(\.\.?)([\w.]*)( import )", re.MULTILINE)


def sync_source(name: str) -> str:
    """Return the sync twin of an async module as source text."""
    text = (PACKAGE / name).read_text(encoding="utf-8")
    docstring_end = text.index('"""', 3) + 3
    head, body = text[:docstring_end], text[docstring_end:]
    for pattern, replacement in RULES:
        body = re.sub(pattern, replacement, body)
    folder = name.partition("/")[0]

    def moved(found: re.Match[str]) -> str:
        before, dots, module, after = found.groups()
        path = module if dots == ".." else f"{folder}.{module}".rstrip(".")
        has_twin = f"{path.replace('.', '/')}.py" in SOURCES
        return before + (f".{path.rpartition('.')[2]}" if has_twin else f"..{path}") + after

    return HEADER.format(source=name) + head + IMPORT.sub(moved, body)


def main(arguments: list[str]) -> int:
    """Write the sync modules, or compare them when asked to check."""
    stale = []
    for source in SOURCES:
        wanted = sync_source(source)
        path = PACKAGE / "twins" / Path(source).name
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        stale.append(path.name)
        if "--check" not in arguments:
            path.write_text(wanted, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"stale, run python tools/make_sync.py: {', '.join(stale)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
