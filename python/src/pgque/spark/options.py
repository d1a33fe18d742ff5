"""Check the options of the data source `pgque` by one table, and print their documentation from it.

python -m pgque.spark.options     print the table in Markdown
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from ..errors import PgqueBadArgumentError

BATCH_READ = "batch read"
STREAM_READ = "stream read"
BATCH_WRITE = "batch write"
STREAM_WRITE = "stream write"
_READ = frozenset({BATCH_READ, STREAM_READ})
_WRITE = frozenset({BATCH_WRITE, STREAM_WRITE})
_ALL = _READ | _WRITE

EXACTLY_ONCE = "exactly-once"
AT_LEAST_ONCE = "at-least-once"
FAIL = "fail"
WAIT = "wait"

# Of startingAt
ARCHIVE = "archive"
# Of maxEventsPerTrigger: a bigint that no queue reaches
ALL = 2**62

KEEP = "keep"
DEAD = "dead"
BY_TICK = "tick"
BY_KEY = "key"
ROUND_ROBIN = "round-robin"

# Columns that can be read, in this order
READ_COLUMNS = (
    "server", "queue", "tick_id", "msg_id", "type", "payload", "key", "created_at", "retry_count", "headers"
)  # fmt: skip

# PostgreSQL's words for times
_TIMES = ("now", "today", "yesterday", "tomorrow", "epoch", "infinity", "-infinity")
# Spark's own, which it passes along.
_SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})


@dataclass(frozen=True, slots=True)
class Option:
    """Describe one option: `parse` turns its text into a value, and raises ValueError with what is
    allowed."""

    name: str
    default: str
    modes: frozenset[str]
    meaning: str
    parse: Callable[[str], object]
    since: str = "0.3"


# Of `create table … using pgque`, Spark hands the options to schema(), with its own beside them, and none to
# the reader or writer of the table.
_IN_CATALOG = (
    "option queue is missing. Spark does not pass the options of a table in its catalog on: give a table with"
    " columns its options at each use, `select … from t with (queue = '…', …)`, `insert into t with (…) …`,"
    " spark.read.options(…).table('t'), df.writeTo('t').options(…).append(); or use `create temporary view …"
    " using pgque options (…)`"
)


def _text(value: str) -> str:
    if not value:
        raise ValueError("a value that is not empty")
    return value


def _whole(value: str, least: int, most: int) -> int:
    if not (value.isdecimal() and len(value) < 20 and least <= int(value) <= most):
        raise ValueError(f"a whole number from {least} to {most}")
    return int(value)


def _count(value: str) -> int:
    return _whole(value, 1, 2**31 - 1)


def _count_or_all(value: str) -> int:
    try:
        return ALL if value.lower() == "all" else min(_whole(value, 1, 2**63 - 1), ALL)
    except ValueError as wanted:
        raise ValueError(f"{wanted}, or all") from None


def _duration(value: str) -> float:
    found = re.fullmatch(r"(\d{1,9}) *(ms|s|m|h)", value.strip().lower())
    if found is None:
        raise ValueError("a number of ms, s, m or h, such as 90s or 15m")
    return int(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2]]


def _half_a_day(value: str) -> int:
    return _whole(value, 1, 43200)


def _not_negative(value: str) -> int:
    return _whole(value, 0, 2**63 - 1)


def _place(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        # PostgreSQL reads times, also its own words for them; nothing else is without a digit.
        if value.lower() not in (*words, *_TIMES) and not any(c.isdecimal() for c in value):
            raise ValueError(f"{', '.join(words)}, a tick id or a time such as 2026-11-25 12:00+00")
        return value

    return parse


def _truth(value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise ValueError("true or false")
    return value.lower() == "true"


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.lower() not in allowed:
            raise ValueError(" or ".join(allowed))
        return value.lower()

    return parse


def _words(value: str) -> tuple[str, ...]:
    wanted = "names with commas between them, or a JSON array of strings"
    if value.lstrip().startswith("["):
        try:
            words = json.loads(value)
        except ValueError:
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(wanted)
    else:
        words = [word.strip() for word in value.split(",")]
    if not words or not all(words):
        raise ValueError(wanted)
    return tuple(words)


def _servers(value: str) -> tuple[str, ...]:
    if not value.startswith("@"):
        return _words(value)
    try:
        lines = [line.strip() for line in Path(value[1:]).read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(
            f"a list, or @ and a file that the driver can read ({value[1:]}: {reason})"
        ) from None
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ValueError("a list, or @ and a file with a server in each line")
    return found


def _columns(value: str) -> tuple[str, ...]:
    found = tuple(word.lower() for word in _words(value))
    unknown = [name for name in found if name not in READ_COLUMNS]
    if unknown or len(set(found)) < len(found):
        raise ValueError(f"some of {', '.join(READ_COLUMNS)}, each once")
    return found


_CONNECTION = (
    Option("url", "libpq's", _ALL, "connection string: postgresql://…, jdbc:postgresql://… or host=… dbname=…; Spark's UI may show a password in it", _text),
    Option("host", "PGHOST", _ALL, "server; this and the options below override `url`", _text),
    Option("port", "PGPORT", _ALL, "port", _text),
    Option("dbname", "PGDATABASE", _ALL, "database", _text),
    Option("user", "PGUSER", _ALL, "role", _text),
    Option("password", "PGPASSWORD", _ALL, "password; Spark masks an option of this name", _text),
    Option("passfile", "~/.pgpass", _ALL, "file with passwords, on every node", _text),
    Option("service", "PGSERVICE", _ALL, "name in the service file, on every node", _text),
    Option("sslmode", "prefer", _ALL, "as in libpq", _text),
    Option("sslrootcert", "", _ALL, "file as in libpq, on every node", _text),
    Option("sslcert", "", _ALL, "file as in libpq, on every node", _text),
    Option("sslkey", "", _ALL, "file as in libpq, on every node", _text),
)  # fmt: skip

OPTIONS: tuple[Option, ...] = (
    *_CONNECTION,
    Option("servers", "none", _ALL, "several servers in place of `host`: host, host:port or host:port/dbname, with commas between them; or @/path, a file with one in each line. The other connection options are for each of them", _servers, "0.7"),
    Option("queue", "required", _ALL, "queue to read, or to write if a row has no `queue`", _text),
    Option("queues", "none", _READ, "several queues in place of `queue`: names with commas between them; `*` stands for any text", _words, "0.7"),
    Option("consumer", "required", frozenset({STREAM_READ}), "consumer that keeps the messages for the stream; each query needs its own", _text),
    Option("consumer", "none", frozenset({BATCH_READ}), "also reads the retries of this consumer of a stream", _text),
    Option("startingAt", "committed", frozenset({STREAM_READ}), "start of a new consumer: committed or latest (from now on), earliest, a tick id, a time; archive (see From the archive to now). An existing consumer starts at its position", _place("committed", "latest", "earliest", ARCHIVE)),
    Option("archiveOf", "none", frozenset({STREAM_READ}), "with `startingAt=archive`: consumer of the queue whose archive is read first", _text, "0.7"),
    Option("startingAt", "earliest", frozenset({BATCH_READ}), "earliest, latest, a tick id, a time", _place("earliest", "latest")),
    Option("endingAt", "latest", frozenset({BATCH_READ}), "latest, earliest, a tick id, a time. latest is found by each action (PySpark 4.0) or a frame's first one (4.3): call `load()` again for newer messages", _place("earliest", "latest")),
    Option("maxEventsPerTrigger", "none", frozenset({STREAM_READ}), "most messages in a micro-batch, of all queues and servers: whole ticks, at least one, unless the queue has a `max_window`; all: one micro-batch of what is there", _count_or_all),
    Option("minEventsPerTrigger", "none", frozenset({STREAM_READ}), "a micro-batch waits for this number of new messages, except the first one of a run, and a run with `once` or `availableNow`", _count, "0.11"),
    Option("maxTriggerDelay", "15m", frozenset({STREAM_READ}), "with `minEventsPerTrigger`: longest wait, such as 500ms, 90s, 15m or 1h", _duration, "0.11"),
    Option("maxTicksPerTrigger", "none", frozenset({STREAM_READ}), "most ticks in a micro-batch, of each queue", _count),
    Option("numPartitions", "4", _READ, "most tasks, each with a connection", _count),
    Option("splitBy", BY_TICK, _READ, "how tasks share the messages: by tick (ranges of ticks or of ids), or by key (each gets all messages of its keys)", _one_of(BY_TICK, BY_KEY), "0.11"),
    Option("ordered", "false", _READ, "true: each task reads in the order of ids, which costs a sort; always so with `numPartitions=1` or `splitBy=key`", _truth, "0.11"),
    Option("fetchSize", "2000", _READ, "rows in a record batch, which the server and a task hold in memory; 200 by default if messages above 2 kB may be among them", _count),
    Option("types", "all", _READ, "message types that the server sends, with commas between them", _words),
    Option("columns", "all", _READ, "columns to read, in this order, with commas between them; the server sends no others. `tick_id`, the tick that made a message visible, only if named: it costs a query for each tick", _columns, "0.7"),
    Option("includeHeaders", "false", _READ, "adds the column headers map<string,string>", _truth),
    Option("payloadFormat", "text", _READ, "text: a string, null for a message of bytes; binary: bytes for both", _one_of("text", "binary")),
    Option("payloadSchema", "none", _READ, "columns of a JSON payload in place of the column payload: `id bigint, total double`", _text, "0.7"),
    Option("badRecords", KEEP, frozenset({STREAM_READ}), "keep: payloads that do not parse are in column `_corrupt`; dead: they become dead letters", _one_of(KEEP, DEAD), "0.7"),
    Option("failOnDataLoss", "true", _READ, "false: if ticks are gone, or the queue was created again, log a warning and go on with the earliest tick", _truth),
    Option("pollIntervalMs", "200", frozenset({STREAM_READ}), "milliseconds for which the driver remembers the newest tick", _not_negative),
    Option("delivery", EXACTLY_ONCE, _WRITE, "exactly-once: a micro-batch is sent whole and once; at-least-once: each task sends its rows", _one_of(EXACTLY_ONCE, AT_LEAST_ONCE)),
    Option("sinkId", "the query's id", frozenset({STREAM_WRITE}), "name under which the numbers of micro-batches are stored, see Exactly once", _text),
    Option("sinkId", "none", frozenset({BATCH_WRITE}), "with `epoch`: name for the stored numbers", _text),
    Option("epoch", "none", frozenset({BATCH_WRITE}), "with `sinkId`: number of this write, such as that of `foreachBatch`; it is written once", _not_negative),
    Option("spread", BY_KEY, _WRITE, "which of `servers` gets a row: key: number `crc32(key) % servers`, from 0 in the order of their names; round-robin: each in turn, only with `delivery=at-least-once`", _one_of(BY_KEY, ROUND_ROBIN), "0.7"),
    Option("replaceByKey", "false", _WRITE, "true: column `key` is the key of `send()`, so that a message replaces the pending one with its key. false: it is the partition key", _truth, "0.7"),
    Option("onFull", FAIL, _WRITE, "fail: a write to a queue that is full or paused fails. wait: it tries again", _one_of(FAIL, WAIT), "0.7"),
    Option("onFullTimeout", "300", _WRITE, "with `onFull=wait`: seconds until the write fails, at most 43200", _half_a_day, "0.7"),
    Option("batchSize", "1000", _WRITE, "messages in a row of the staging table, at most 1000", _count),
)  # fmt: skip

_CONNECTION_NAMES = frozenset(option.name for option in _CONNECTION)


@dataclass(frozen=True)
class Options:
    """Keep the parsed options; `connection` may hold a password and is never shown."""

    connection: Mapping[str, str] = field(repr=False, default_factory=dict)
    # Their names, host:port/dbname, sorted: so each process has the same
    servers: tuple[str, ...] | None = None
    queue: str | None = None
    consumer: str | None = None
    startingAt: str | None = None
    archiveOf: str | None = None
    endingAt: str = "latest"
    maxEventsPerTrigger: int | None = None
    minEventsPerTrigger: int | None = None
    maxTriggerDelay: float | None = None
    maxTicksPerTrigger: int | None = None
    numPartitions: int = 4
    splitBy: str = BY_TICK
    ordered: bool = False
    # None: the number that the server gives
    fetchSize: int | None = None
    types: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    queues: tuple[str, ...] | None = None
    includeHeaders: bool = False
    payloadFormat: str = "text"
    payloadSchema: str | None = None
    badRecords: str = KEEP
    failOnDataLoss: bool = True
    pollIntervalMs: int = 200
    delivery: str = EXACTLY_ONCE
    sinkId: str | None = None
    epoch: int | None = None
    spread: str = BY_KEY
    replaceByKey: bool = False
    onFull: str = FAIL
    onFullTimeout: int = 300
    batchSize: int = 1000

    @property
    def is_ordered(self) -> bool:
        """Return whether a task reads in the order of ids."""
        return self.ordered or self.numPartitions == 1 or self.splitBy == BY_KEY

    def at(self, server: str | None) -> Options:
        """Return the options for one of several servers."""
        from . import _connect

        if server is None:
            return self
        return replace(self, connection=_connect.at(self.connection, server), servers=None)


def parse(given: Mapping[str, str], *modes: str) -> Options:
    """Return the checked options of a read or a write; `modes` has several if it is not known yet which.

    Names are taken in any case. Raises PgqueBadArgumentError for an option that is unknown, out of place, out
    of range or missing; values of connection options are never part of the message.
    """
    if "provider" in given or (not given and modes == (BATCH_READ,)):
        raise PgqueBadArgumentError(_IN_CATALOG)
    modes = _narrowed(given, modes)
    # Two of a name, if it is not known yet what is read
    table: dict[str, list[Option]] = {}
    for option in OPTIONS:
        if option.modes & set(modes):
            table.setdefault(option.name.lower(), []).append(option)
    connection: dict[str, str] = {}
    values: dict[str, object] = {}
    for name, value in given.items():
        found = table.get(name.lower())
        if found is None:
            if name.lower() not in _SPARKS_OWN:
                raise PgqueBadArgumentError(_unknown(name, modes, table))
        elif found[0].name in _CONNECTION_NAMES:
            if value:
                connection[found[0].name] = value
        else:
            values[found[0].name] = _value(found, value)
    options = Options(connection=connection, **values)  # type: ignore[arg-type]
    _check_together(options, modes)
    if options.servers is None:
        return options
    from . import _connect

    return replace(options, servers=_connect.servers(options.servers, connection))


def _narrowed(given: Mapping[str, str], modes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modes that have all the options: schema() is asked before it is known whether to read a batch
    or a stream. If none has them, return all.

    Raises PgqueBadArgumentError for an option of streams without a consumer.
    """
    names = {name.lower() for name in given}
    places = {o.name: {mode for p in OPTIONS if p.name == o.name for mode in p.modes} for o in OPTIONS}
    known = {name: found for name, found in places.items() if name.lower() in names}
    left = tuple(mode for mode in modes if all(mode in found for found in known.values()))
    if len(modes) > 1 and left == (STREAM_READ,) and "consumer" not in names:
        name = next(name for name, found in known.items() if BATCH_READ not in found)
        raise PgqueBadArgumentError(
            f"option {name} is for stream read, not for batch read, and option consumer is missing: a stream"
            " needs a consumer of its own"
        )
    return left or modes


def connection_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the connection options among `given`, and refuse any other. Raises PgqueBadArgumentError."""
    table = {option.name.lower(): option for option in _CONNECTION}
    for name in given:
        if name.lower() not in table:
            raise PgqueBadArgumentError(
                f"unknown connection option {name}; known: {', '.join(o.name for o in _CONNECTION)}"
            )
    return {table[name.lower()].name: str(value) for name, value in given.items() if value}


def _value(found: list[Option], value: str) -> object:
    problem = ""
    for option in found:
        try:
            return option.parse(value)
        except ValueError as wanted:
            problem = problem or str(wanted)
    # A user who passes connection strings as servers has passwords in them.
    shown = "" if found[0].name == "servers" else f", not {value!r}"
    raise PgqueBadArgumentError(f"option {found[0].name} must be {problem}{shown}")


def _unknown(name: str, modes: tuple[str, ...], table: Mapping[str, list[Option]]) -> str:
    found = [o for o in OPTIONS if o.name.lower() == name.lower()]
    elsewhere = sorted({mode for option in found for mode in option.modes})
    if elsewhere:
        # A view has the same options for both.
        view = (
            ". A view to read and to insert into names its columns instead: create temporary view v (type"
            " string, payload string) using pgque options (…)"
            if modes == (BATCH_WRITE,) and BATCH_READ in elsewhere
            else ""
        )
        return (
            f"option {found[0].name} is for {' and '.join(elsewhere)}, not for {' and '.join(sorted(modes))}"
            f"{view}"
        )
    if name.lower() == "path":
        return "pgque has no path: set option('queue', …) and call load(), save() or start() without one"
    close = get_close_matches(name.lower(), table, n=1)
    meant = f", did you mean {table[close[0]][0].name}?" if close else ";"
    known = ", ".join(sorted(found[0].name for found in table.values()))
    return f"unknown option {name}{meant} known here: {known}"


def _check_together(options: Options, modes: tuple[str, ...]) -> None:
    if set(modes) <= _READ and (options.queue is None) == (options.queues is None):
        raise PgqueBadArgumentError(
            "option queue is missing: the queue to read; or option queues for several"
            if options.queue is None
            else "options queue and queues exclude each other"
        )
    for name, at in (("startingAt", options.startingAt), ("endingAt", options.endingAt)):
        if options.servers is not None and at == ARCHIVE:
            raise PgqueBadArgumentError(
                f"option {name} cannot be archive with option servers: it reads one queue"
            )
        if at is None or not at.isdecimal():
            continue
        if options.queues is not None:
            raise PgqueBadArgumentError(
                f"option {name} cannot be a tick with option queues: a tick is of one queue"
            )
        if options.servers is not None:
            raise PgqueBadArgumentError(
                f"option {name} cannot be a tick with option servers: a tick is of one server"
            )
    if modes == (STREAM_READ,) and options.consumer is None:
        raise PgqueBadArgumentError(
            "option consumer is missing: a stream needs a consumer of its own, which keeps what it has still"
            " to read"
        )
    if modes == (STREAM_READ,):
        _check_archive(options)
    if options.onFull == FAIL and options.onFullTimeout != Options.onFullTimeout:
        raise PgqueBadArgumentError("option onFullTimeout needs onFull=wait")
    if options.minEventsPerTrigger is None:
        if options.maxTriggerDelay is not None:
            raise PgqueBadArgumentError("option maxTriggerDelay needs minEventsPerTrigger")
    elif options.minEventsPerTrigger > (options.maxEventsPerTrigger or ALL):
        raise PgqueBadArgumentError(
            f"option minEventsPerTrigger is {options.minEventsPerTrigger}, above maxEventsPerTrigger, which is"
            f" {options.maxEventsPerTrigger}: no micro-batch can have both"
        )
    if modes == (BATCH_WRITE,) and (options.sinkId is None) != (options.epoch is None):
        raise PgqueBadArgumentError("options sinkId and epoch of a batch write need each other")
    if options.sinkId is not None and options.delivery == AT_LEAST_ONCE:
        raise PgqueBadArgumentError("option sinkId needs delivery exactly-once")
    if options.servers is None:
        if "server" in (options.columns or ()):
            raise PgqueBadArgumentError("column server needs option servers")
        if options.spread != BY_KEY:
            raise PgqueBadArgumentError("option spread needs option servers")
    elif options.delivery == EXACTLY_ONCE:
        if options.spread == ROUND_ROBIN:
            raise PgqueBadArgumentError(
                "option spread=round-robin needs delivery=at-least-once: a replay has its rows in another"
                " order, and would send some of them to another server"
            )
        if modes == (BATCH_WRITE,) and options.epoch is None:
            raise PgqueBadArgumentError(
                "a batch write to several servers is a transaction on each of them: give options sinkId and"
                " epoch, so that the same write, made again, completes what failed halfway; or"
                " delivery=at-least-once"
            )


def _check_archive(options: Options) -> None:
    if (options.startingAt == ARCHIVE) != (options.archiveOf is not None):
        raise PgqueBadArgumentError(
            "startingAt=archive needs option archiveOf: the consumer whose archive is read, and then the queue"
            if options.archiveOf is None
            else "option archiveOf needs startingAt=archive"
        )
    if options.archiveOf is None:
        return
    if options.queue is None:
        raise PgqueBadArgumentError("startingAt=archive needs option queue: it reads one queue")
    if options.archiveOf == options.consumer:
        raise PgqueBadArgumentError(
            f"options consumer and archiveOf are both {options.consumer}: the stream needs a consumer of its own"
        )
    if options.badRecords == DEAD:
        raise PgqueBadArgumentError(
            "badRecords=dead and startingAt=archive exclude each other: an archived message is not the"
            " stream's to reject. Keep what does not parse in column _corrupt"
        )


def markdown() -> str:
    """Return the table of options for the documentation."""
    lines = ["| option | default | for | meaning | since |", "|---|---|---|---|---|"]
    names = {_ALL: "all", _READ: "read", _WRITE: "write"}
    for option in OPTIONS:
        modes = names.get(option.modes) or ", ".join(sorted(option.modes))
        lines.append(
            f"| `{option.name}` | {option.default or 'none'} | {modes} | {option.meaning} | {option.since} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
