"""A populated database, and calls of every function with sensible and with bad arguments."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import psycopg

from pgque.errors import BY_SQLSTATE
from sql.helpers import Connection, column, rows

# What a caller may be told besides our own codes: a wrong value, a transaction that can not do this, a missing right,
# a conflict to retry, something in use, a cancelled statement, a trigger function called by hand.
ALLOWED = re.compile(r"22...|25...|2D000|34000|40001|40P01|42501|42P03|55P03|55006|57014|0A000")
# A null that an assignment or RAISE could not take is an oversight of ours, not the caller's value.
NEVER = {"22004"}
# Calls of functions whose argument is SQL of the caller's.
OWN_SQL = re.compile(r"42...|21000|55000")

FUNCTIONS = """
select p.proname, p.prokind::text, p.proargnames::text[], array(
    select format_type(t.oid, null) from unnest(p.proargtypes::oid[]) with ordinality a (oid, n) join pg_type t on t.oid = a.oid
    where t.oid <> 'pgque.caller'::regtype order by a.n),
  p.pronargdefaults - ('pgque.caller'::regtype = any (p.proargtypes))::int
from pg_proc as p
where p.pronamespace = 'pgque'::regnamespace and p.proname not in ('uninstall', '_fail', '_loop_end')
  and (p.prokind <> 'p' or p.proname = 'ticker_loop')  -- its parts are called by it alone
  and p.prorettype <> 'trigger'::regtype
  and (p.proname not like '\\_%'
    or has_function_privilege('pgque_reader', p.oid, 'execute')
    or has_function_privilege('pgque_writer', p.oid, 'execute')
    or has_function_privilege('pgque_user', p.oid, 'execute')
    or has_function_privilege('pgque_admin', p.oid, 'execute'))
order by p.oid::regprocedure::text
"""

ODD = "%I %s'\"\\$$ ž☃"
QUEUES = ["plain", "pool", "keyed", "coop", "dead", "arch", "paused", "external", "other", ODD]

POPULATE = """
select pgque.create_queue('plain');
select pgque.create_queue('pool', '{"max_receive_attempts": 2, "message_ttl": "1 day"}');
select pgque.create_queue('keyed', '{"max_depth": 100000}');
select pgque.create_queue('coop');
select pgque.create_queue('dead', '{"max_retries": 0, "drop_policy": "hold", "dead_letter_queue": "dead.dlq"}');
select pgque.create_queue('arch', '{"archive_on_ack": true, "max_retries": 0}');
select pgque.create_queue('paused');
select pgque.create_queue('external', '{"external_ticker": true}');
select pgque.create_queue('other', '{"throughput_limit": 1000000, "retry_backoff": {"base": 0, "jitter": 1}}');
select pgque.create_queue({odd});
select pgque.subscribe(q.queue_name, c.name) from pgque.queue q, (values ('c'), ('d'), ('p')) c (name);
select pgque.subscribe('keyed', 'k', keyed_order => true);
select pgque.register_subconsumer('coop', 'group', w) from (values ('w1'), ('w2')) w (w);
select pgque.send(q.queue_name, 't', 'x'::text, headers => '{"a": 1}') from pgque.queue q, generate_series(1, 12)
where q.queue_open;
select pgque.send('keyed', 't', 'x'::text, key => 'k' || g % 5, ttl => '1 hour', partition_key => 'p' || g) from generate_series(1, 12) g;
select nextval(q.queue_event_seq) from pgque.queue q, generate_series(1, q.queue_id * 40);
select pgque.send(q.queue_name, 't', 'late'::text, delay => '1 hour', key => 'late') from pgque.queue q where q.queue_open;
select pgque.send_idem('plain', 't', 'x'::text, 'idem');
"""
TICKS = """
select pgque.force_next_tick(q.queue_name) from pgque.queue q;
select pgque.ticker();
"""
OPEN = """
select count(*) from pgque.queue q, lateral pgque.receive(q.queue_name, 'c', 5);
select count(*) from pgque.queue q, lateral pgque.receive(q.queue_name, 'p', 2, worker => 'w1', visibility_timeout => '1 day');
select count(*) from pgque.queue q, lateral pgque.receive(q.queue_name, 'p', 2, worker => 'w2', visibility_timeout => '1 microsecond');
select count(*) from pgque.queue q, lateral pgque.receive(q.queue_name, 'p', 1, worker => {odd}, visibility_timeout => '1 day');
select count(*) from pgque.receive('keyed', 'k', 3, worker => 'w1', visibility_timeout => '1 day');
select count(*) from pgque.receive_coop('coop', 'group', 'w1', 2);
select count(*) from pgque.receive_coop('coop', 'group', 'w2', 2);
select count(*) from pgque.receive('arch', 'd', 2) m, lateral pgque.archive(m.batch_id, array[m.msg_id]);
select count(*) from pgque.receive('plain', 'p', 1, worker => 'w1') m, lateral pgque.archive(m.batch_id);
select count(*) from pgque.receive('other', 'd', 2) m, lateral pgque.nack(m.batch_id, array[m.msg_id], '1 hour', 'later');
select count(*) from pgque.receive('dead', 'd', 2) m, lateral pgque.nack(m.batch_id, array[m.msg_id], '0', 'hold');
select count(*) from pgque.receive('plain', 'd', 2) m, lateral pgque.dead(m.batch_id, array[m.msg_id], 'no good');
select pgque.pause('paused');
"""


def literal(text: str | None) -> str:
    return "null" if text is None else "'" + text.replace("'", "''") + "'"


def long_text(length: int) -> str:
    """Text that does not compress."""
    return f"{random.Random(1).getrandbits(length * 4):x}"  # noqa: S311


NAMES: list[str | None] = [
    None, "", " ", "'", '"', "\\", "$$", "%", "%I %s %L %1$s", "'; drop table pgque.queue; --", "') or true --",
    "$1", "{}", "null", "-1", "ž☃𝄞", "\u202e\u0001", "a\nb\tc", "x" * 58, long_text(1000), long_text(9000),
    "plain", "PLAIN", ODD, "c", "w1", "x.dlq", "dead.dlq", "earliest", "infinity", "now", "1", "9223372036854775808", "1e400", "NaN",
    "00000000-0000-0000-0000-000000000000", "pgque.queue", "max_retries", "retry_backoff", "drop_policy", "1 day", "true", "k1", "late",
]  # fmt: skip
INTS: list[str | None] = [None, "0", "1", "-1", "2", "3", "1000", "100000", "2147483647", "-2147483648"]
BIGINTS = [
    *INTS,
    "4294967296",
    "9007199254740993",
    "9223372036854775806",
    "9223372036854775807",
    "-9223372036854775808",
]
INTERVALS: list[str | None] = [
    None, "0", "1 microsecond", "-1 microsecond", "1 second", "1 day", "-1 day", "1 month", "-1 month", "1 month -30 days", "1 month -31 days",
    "-1 month 30 days", "1 year 2 months 3 days 04:05:06.7", "100 years", "170000000 years", "-170000000 years", "infinity", "-infinity",
]  # fmt: skip
TIMES: list[str | None] = [
    None, "now", "epoch", "infinity", "-infinity", "2000-01-01Z", "9999-12-31Z", "294276-12-31 23:59:59.999999Z", "4714-11-24 00:00:00Z BC",
]  # fmt: skip
JSON: list[str | None] = [
    None, "null", "{}", "[]", "0", '"x"', "true", "[1]", '{"a": 1}', '{"": {"b": [1, null]}}', '{"%I": "%s"}', '{"pgque_dead": 1}',
    "1e131071", "[" * 500 + "]" * 500, '{"max_retries": 3}', '{"max_retries": "x"}', '{"queue_max_retries": -1}', '{"max_retries": null}',
    '{"no_such": 1}', '{"max_retries": {"a": 1}}', '{"rotation_period": "1 month -30 days"}', '{"ticker_max_lag": "infinity"}',
    '{"retry_backoff": {"base": 1e-400}}', '{"retry_backoff": {"base": 1, "factor": 1000, "cap": 31536000, "jitter": 1}}',
    '{"retry_backoff": {"base": "1"}}', '{"retry_backoff": [1]}', '{"retry_backoff": "{}"}', '{"retry_backoff": null, "max_depth": 1}',
    '{"drop_policy": "x"}', '{"dead_letter_queue": "plain"}', '{"dead_letter_queue": "new.dlq"}', '{"dead_letter_queue": "no such"}',
    '{"dead_letter_queue": ".dlq"}', '{"dead_letter_queue": 1}', '{"message_ttl": "1 microsecond"}', '{"message_ttl": "100 years"}',
    '{"max_depth": 9223372036854775807}', '{"throughput_limit": 2147483647}', '{"throughput_limit": 1}', '{"max_receive_attempts": 2147483647}',
    '{"visibility_timeout": "1 year"}', '{"external_ticker": true}', '{"ticker_paused": "yes"}', '{"ticker_max_count": 2147483648}',
    '{"max_retries": 1, "queue_max_retries": 2}', '{"retention_period": "0"}', '{"retention_period": "1 microsecond"}',
    '{"archive_on_ack": "maybe"}',
]  # fmt: skip
BYTES: list[str | None] = [None, "\\x", "\\x00", "\\xdeadbeef", "\\x" + "ff" * 20000]
UUIDS: list[str | None] = [
    None,
    "00000000-0000-0000-0000-000000000000",
    "ffffffff-ffff-ffff-ffff-ffffffffffff",
]
CLASSES: list[str | None] = [None, "0", "4294967295", "pg_class", "pgque.queue", "pgque.event"]
BOOLS: list[str | None] = [None, "true", "false"]
LOOKS: list[str | None] = [
    None, "(1,0,0,,t,f)", "(,,,,,)", "(2,9,9,2020-01-01,,)", "(2147483647,9223372036854775807,-1,9999-12-31,t,t)", "(-1,-9223372036854775808,0,0001-01-01,f,t)",
]  # fmt: skip
SCALARS: dict[str, list[str | None]] = {
    "text": NAMES, "integer": INTS, "bigint": BIGINTS, "interval": INTERVALS, "timestamp with time zone": TIMES, "jsonb": JSON,
    "bytea": BYTES, "uuid": UUIDS, "regclass": CLASSES, "boolean": BOOLS,
    "pgque.look": LOOKS,
}  # fmt: skip
FIELDS = {"pgque.message": 10, "pgque.delivery": 17}


def array_of(items: list[str | None]) -> str:
    def quoted(item: str | None) -> str:
        return "NULL" if item is None else '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "{" + ",".join(quoted(item) for item in items) + "}"


def arrays(kind: str, sample: list[str | None]) -> list[str | None]:
    """Arrays of each shape, of elements that are fine or not."""
    good = next(s for s in sample if s)
    found: list[str | None] = [
        None,
        "{}",
        "{NULL}",
        array_of([good]),
        array_of([good, None]),
        array_of([good] * 300),
    ]
    pair = array_of([good, good])
    found += [
        f"{{{pair},{pair}}}",
        f"{{{{{pair}}}}}",
        f"[5:6]={pair}",
        f"[-1:0]={pair}",
        f"[2147483640:2147483641]={pair}",
    ]
    return found + [array_of([s, good]) for s in sample[:40] if s is not None]


def rows_of(kind: str, ids: list[str | None]) -> list[str]:
    """Values of a composite type, as SQL."""
    rest = ", null" * (FIELDS[kind] - 1)
    return [f"null::{kind}"] + [f"row({i or 'null'}{rest})::{kind}" for i in ids]


class Function(NamedTuple):
    """A function to call: its arguments are names and types. Kind p is a procedure, v a view to insert into."""

    name: str
    kind: str
    args: list[tuple[str, str]]
    defaults: int

    def call(self, values: list[str]) -> str:
        if self.kind == "v":
            columns = ", ".join(name for name, _ in self.args[: len(values)])
            return f"insert into pgque.{self.name} ({columns}) values ({', '.join(values)})"
        verb = "call" if self.kind == "p" else "select * from"
        return f"{verb} pgque.{self.name}({', '.join(values)})"


SINK = [(name, "text") for name in ("queue", "type", "payload", "headers", "partition_key")]
EPOCH = [("sink_id", "text"), ("epoch", "bigint"), ("part", "integer"), ("parts", "integer")]
VIEWS = [
    Function("sink", "v", [*SINK, ("payload_bytes", "bytea")], 5),
    Function("sink", "v", [*SINK, *EPOCH], 4),
    Function("sink_bulk", "v", SINK[:4], 3),
]


@dataclass
class Scene:
    """What is in the database, to choose from."""

    ids: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def look(conn: Connection) -> Scene:
        def of(query: str) -> list[str]:
            return [str(v) for v in column(conn, query)]

        return Scene(
            {
                "queue": of("select queue_name from pgque.queue union all select queue_uid::text from pgque.queue limit 40"),
                "consumer": of("select co_name from pgque.consumer limit 20"),
                "worker": [*of("select distinct sub_worker from pgque.subscriber where sub_worker is not null limit 9"), "w1", "w2"],
                "batch": of(
                    "select b from pgque.subscriber s, pgque._position(s.sub_id) p, unnest(p.pos_open || p.pos_batch) b where b is not null"
                    " union select ev_batch from pgque.retry_queue where ev_batch is not null limit 60"
                ),
                "msg": of("select distinct ev_id from (select ev_id from pgque.event union all select ev_id from pgque.retry_queue) e limit 30"),
                "tick": of("select distinct tick_id from pgque.tick order by 1 limit 30"),
                "dl": of("select dl_id from pgque.dead_letter limit 20"),
                "archive": of("select archive_id from pgque.archive limit 20"),
                "attempt": of("select attempt from pgque._attempts() limit 9"),
                "sub": of("select sub_id from pgque.subscriber limit 20"),
                "queue_id": of("select queue_id from pgque.queue limit 20"),
            }
        )  # fmt: skip


KINDS = {
    "queue_name": "queue", "i_queue_name": "queue", "i_queue": "queue", "queue": "queue", "p_queue": "queue", "func_arg": "queue",
    "consumer_name": "consumer", "i_consumer_name": "consumer", "worker": "worker", "subconsumer_name": "worker",
    "batch_id": "batch", "p_batch": "batch", "ack_batch": "batch", "msg_id": "msg", "event_id": "msg", "tick_id": "tick", "after_tick": "tick",
    "from_tick": "tick", "to_tick": "tick", "upto": "tick", "dl_id": "dl", "archive_id": "archive", "attempts": "attempt",
    "msg_ids": "msg", "p_sub": "sub", "p_queue_id": "queue_id", "msg": "msg",
}  # fmt: skip
# What does not go together with the others.
LEFT_OUT = {"deliver_at", "deliver_ats", "p_deliver_at", "p_deliver_ats", "p_bytes", "payload_bytes"}
USUAL = {
    "max_return": "5", "visibility_timeout": "1 minute", "start_at": "latest", "limit_count": "10", "parts": "1", "part": "0", "n": "5",
    "cursor_name": "cur", "quick_limit": "2", "extra_where": "ev_id > 0", "headers": '{"a": 1}', "p_headers": '{"a": 1}', "key": "k1",
    "delay": "1 minute", "ttl": "1 hour", "idem_key": "i", "param_name": "max_retries", "param_value": "3", "param": "max_retries",
    "value": "7", "job": "expire", "every": "1 minute", "ms": "100", "run_for": "20 ms", "sink_id": "s", "epoch": "1", "row_count": "0",
    "config": '{"max_retries": 3}', "new_name": "renamed", "only_status": "pending", "retry_after": "1 second", "retry_seconds": "1",
    "min_count": "1", "max_events": "10", "max_ticks": "3", "p_func": "pgque.maint_retain", "p_arg": "plain", "p_format": "json",
    "p_op": "INSERT", "p_args": "[0:0]={plain}", "p_new": '{"a": 1}', "p_old": '{"a": 1}', "p_table": "pgque.queue", "p_seen": "true",
    "delays": "1 minute", "ttls": "1 hour", "p_delay": "1 minute", "p_delays": "1 minute", "p_ttl": "1 hour", "p_ttls": "1 hour",
    "role_name": "pgque_user", "right_name": "consume", "p_count": "1", "batch_handling": "1", "convert_normal": "true", "event_seq": "1000000", "older_than": "0", "dead_interval": "1 hour",
}  # fmt: skip


class Fuzzer:
    """Calls functions of one database and judges what comes back."""

    def __init__(self, conn: Connection, seed: str) -> None:
        self.conn = conn
        self.dice = random.Random(seed)  # noqa: S311
        self.functions = [
            Function(n, k, list(zip(a or [], t, strict=False)), d) for n, k, a, t, d in rows(conn, FUNCTIONS)
        ] + VIEWS
        self.scene = Scene.look(conn)
        self.done: list[str] = []  # what was called since the last commit
        self.outcomes: dict[str, Counter[str]] = {}
        self.faults: dict[tuple[str, str, str], str] = {}

    def hostile(self, name: str, kind: str) -> list[str]:
        """Every bad idea for an argument of this type, as SQL."""
        own = self.scene.ids.get(KINDS.get(name, ""), [])[:3]
        if kind in FIELDS:
            return rows_of(kind, [*BIGINTS, *own])
        if kind.endswith("[]"):
            sample = SCALARS[kind[:-2]]
            return [f"{literal(v)}::{kind}" for v in arrays(kind, [*own, *sample])]
        return [f"{literal(v)}::{kind}" for v in [*SCALARS[kind], *own]]

    def sensible(self, name: str, kind: str) -> str:
        """One that fits the argument's name; at times nothing."""
        mine: list[str] = self.scene.ids.get(KINDS.get(name, ""), [])
        if name in LEFT_OUT:
            return f"null::{kind}"
        if mine:
            chosen: str | None = self.dice.choice(mine)
        else:
            chosen = USUAL.get(name) or next(
                (v for v in SCALARS.get(kind.removesuffix("[]"), []) if v and v.strip()), None
            )
        if kind in FIELDS:
            return rows_of(kind, [chosen])[1]
        if kind.endswith("[]") and not (chosen or "").startswith("["):
            chosen = array_of([chosen])
        return f"{literal(chosen)}::{kind}"

    def run(self, function: str, statement: str) -> bool:
        """Run one statement inside a savepoint or, in autocommit, alone; note a fault."""
        inside = self.conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        if inside:
            self.conn.execute("savepoint fuzz")
        self.done.append(statement)
        state = "ok"
        try:
            rows(self.conn, statement)
        except psycopg.Error as error:
            state = error.sqlstate or "?"
            if not self.allowed(function, state, error):
                where = (error.diag.context or "").split("\n")[0]
                self.faults.setdefault(
                    (function, state, where),
                    f"{state} {error.diag.message_primary} [{where}]: {statement[:600]}",
                )
            if inside:
                self.conn.execute("rollback to savepoint fuzz")
        if inside and state == "ok":
            self.conn.execute("release savepoint fuzz")
        self.outcomes.setdefault(function, Counter())[state] += 1
        return state == "ok"

    @staticmethod
    def allowed(function: str, state: str, error: psycopg.Error) -> bool:
        if state.startswith("PQ"):
            return state in BY_SQLSTATE and bool(error.diag.message_hint) and bool(error.diag.message_primary)
        if function.startswith("_") and state[:2] in ("22", "23"):
            return True  # not for callers: these may be terse
        if function in ("grant_queue", "revoke_queue") and state == "42704":
            return True  # no such role
        if function == "get_batch_cursor" and OWN_SQL.fullmatch(state):
            return True
        return ALLOWED.fullmatch(state) is not None and state not in NEVER

    def judge(self, what: str) -> None:
        """Fail with everything that was found."""
        assert not self.faults, f"{what}:\n" + "\n".join(sorted(self.faults.values()))


def populate(own: Connection) -> None:
    own.execute("set statement_timeout = '20s'")
    own.execute("select pgque.resume('paused') from pgque.queue where queue_name = 'paused'")
    own.execute(
        "select pgque.set_default_config(t.param, null) from pgque._setting_types() t where t.param <> 'dead_letter_queue'"
    )
    for block in (POPULATE, TICKS, OPEN):
        for statement in block.split(";\n"):
            if statement.strip():
                try:
                    own.execute(statement.replace("{odd}", literal(ODD)).encode())
                except psycopg.Error as error:
                    # What is left of an earlier round may stand in the way.
                    assert (error.sqlstate or "").startswith("PQ"), statement


def good_for(function: Function, conn: Connection) -> dict[str, list[str]]:
    """Ids that fit together: of a worker's batch, or of a consumer's on its own."""
    ids = Scene.look(conn).ids
    names = {name for name, _ in function.args}
    alone = function.name in (
        "get_batch_events",
        "get_batch_info",
        "get_batch_cursor",
        "_cursor_sql",
        "event_retry",
        "batch_retry",
    )
    found = rows(
        conn,
        "select b.batch, (select array_agg(m.msg_id) from pgque.list_messages('plain') m where m.batch_id = b.batch and m.consumer_name = %s)"
        " from (select unnest(p.pos_open || p.pos_batch) as batch from pgque._subscriber('plain', %s) s, pgque._position(s.sub_id) p) b"
        " where b.batch is not null",
        *(["c", "c"] if alone else ["p", "p"]),
    )
    batch, messages = next((b, m) for b, m in found if m)
    ids |= {
        "batch": [str(batch)],
        "msg": [str(m) for m in messages],
        "queue": ["plain"],
        "consumer": ["p" if "worker" in names else "c"],
    }
    if "subconsumer_name" in names:
        ids |= {"queue": ["coop"], "consumer": ["group"]}
    if function.name in ("reclaim",):
        ids["consumer"] = ["p"]
    if "from_tick" in names:
        ids["tick"] = ids["tick"][:1]
    if function.name == "dlq_requeue":
        ids["dl"] = [str(v) for v in column(conn, "select dl_id from pgque.dlq_inspect('plain')")]
    if len(function.args) == 4 and function.name == "ticker":
        ids |= {"queue": ["external"], "tick": ["100"]}
    return ids
