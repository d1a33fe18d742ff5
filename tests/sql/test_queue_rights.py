"""Rights to single queues: who has them can do that and nothing else, whatever he tries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from sql.helpers import (
    Connection,
    ack,
    configure,
    forced_tick,
    forward_letters,
    nack_ids,
    offer,
    post,
    receive,
    refused,
    rows,
    send,
    subscribe,
    take,
    tick,
    tries,
    value,
)

DENIED = "42501"
RIGHTS = ("produce", "consume", "admin")

# What each right is needed for, with {q} for the queue.
NEEDS = {
    "produce": [
        "select pgque.send({q}, 'x'::text)",
        "select pgque.send({q}, 't', '{{}}'::jsonb, key => 'k', delay => '1 s')",
        "select pgque.send_batch({q}, array['x', 'y'])",
        "select pgque.send_batch({q}, 't', array['x'], ttls => array['1 hour'::interval])",
        "select * from pgque.send_idem({q}, 't', '{{}}'::jsonb, 'i')",
        "select pgque.insert_event({q}, 't', 'x')",
    ],
    "consume": [
        "select pgque.subscribe({q}, 'd')",
        "select pgque.register_consumer({q}, 'e')",
        "select pgque.register_consumer_at({q}, 'e', 1)",
        "select * from pgque.receive({q}, 'd')",
        "select * from pgque.receive({q}, 'f', worker => 'w')",
        "select pgque.next_batch({q}, 'd')",
        "select * from pgque.peek({q})",
        "select pgque.tick_for({q}, 'latest')",
        "select * from pgque.read_window({q}, 1, 1)",
        "select pgque.seek({q}, 'd', 1)",
        "select pgque.seek_to_time({q}, 'd', now())",
        "select pgque.open_stream({q}, 'd')",
        "select * from pgque.receive_coop({q}, 'g', 's')",
        "select pgque.next_batch({q}, 'g', 's', '1 s')",
        "select * from pgque.next_batch_custom({q}, 'd', null, null, null)",
        "select pgque.unsubscribe({q}, 'e')",
    ],
    "admin": [
        "select pgque.set_queue_config({q}, 'max_retries', '7')",
        "select pgque.alter_queue({q}, '{{\"max_retries\": null}}')",
        "select pgque.pause({q})",
        "select pgque.resume({q})",
        "select pgque.ticker({q})",
        "select pgque.force_tick({q})",
        "select * from pgque.list_messages({q})",
        "select * from pgque.get_message({q}, 1)",
        "select * from pgque.message_history({q}, 1)",
        "select * from pgque.list_poison({q})",
        "select * from pgque.dlq_inspect({q})",
        "select * from pgque.dlq_replay_all({q})",
        "select pgque.dlq_requeue_all({q})",
        "select pgque.dlq_purge({q})",
        "select * from pgque.archive_list({q})",
        "select pgque.archive_purge({q}, now())",
        "select pgque.purge_key({q}, 'k')",
        "select pgque.cancel({q}, 1)",
        "select pgque.reclaim({q}, 'f')",
        "select pgque.retry_now({q}, 'f')",
        "select pgque.expire_messages({q})",
        "select pgque.delete_expired({q})",
        "select pgque.archive_poison({q})",
        "select pgque.purge({q})",
    ],
}
EITHER = [
    "select * from pgque.get_queue_info({q})",
    "select * from pgque.queue_config({q})",
    "select * from pgque.list_workers({q})",
    "select * from pgque.health({q})",
    "select * from pgque.metrics({q})",
    "select * from pgque.overview({q})",
]
# Of all queues, or of the engine: not to be had with rights to single ones.
NEVER = [
    "select pgque.create_queue('mine')",
    "select pgque.rename_queue({q}, 'mine')",
    "select pgque.grant_queue({q}, current_user, 'admin')",
    "select pgque.revoke_queue({q}, current_user, 'admin')",
    "select pgque.set_default_config('max_retries', '1')",
    "select pgque.set_schedule('expire', '')",
    "select pgque.ticker()",
    "select pgque.maint()",
    "select pgque.start()",
    "select pgque.stop()",
    "select * from pgque.health()",
    "select * from pgque.metrics()",
    "select * from pgque.status()",
    "select pgque.sink_begin('s', 0)",
    "select pgque.current_event_table({q})",
    "select * from pgque.queue",
    "select * from pgque.event",
    "select * from pgque.queue_right",
    "select * from pgque.dead_letters",
    "insert into pgque.sink_bulk (queue, payload) values ({q}, 'x')",
    "update pgque.queue_right set right_name = 'admin'",
    "select pgque._may(current_user, 'admin', 1)",
    "select pgque._queue({q}, current_user, 'see')",
    "select pgque.set_queue_config({q}, 'max_consumers', '0')",
    "select pgque._set_outcomes(1, null, 'ack', null, null, false)",
]


@pytest.fixture
def one(conn: Connection, queue: str) -> str:
    """The queue the role has rights to; it has a consumer d and a pool f."""
    for consumer in ("d", "f"):
        subscribe(conn, queue, consumer)
    return queue


@pytest.fixture
def other(conn: Connection, new_queue: Callable[[], str]) -> str:
    """A queue the role has no right to, with a message, an open batch, a lease, a dead letter and an archive row."""
    queue = new_queue()
    configure(conn, queue, max_retries=0)
    for consumer in ("c", "pool", "archived"):
        subscribe(conn, queue, consumer)
    offer(conn, queue, 4)
    dying = receive(conn, queue, "c", 1)
    nack_ids(conn, dying[0].batch_id, [dying[0].msg_id])
    ack(conn, dying[0].batch_id)
    kept = receive(conn, queue, "archived", 1)
    rows(conn, "select * from pgque.archive(%s)", kept[0].batch_id)
    take(conn, queue, "w", 2, consumer="pool")
    assert receive(conn, queue, "c", 1)
    return queue


def grant(conn: Connection, queue: str, role: str, right: str) -> int:
    return int(value(conn, "select pgque.grant_queue(%s, %s, %s)", queue, role, right))


def revoke(conn: Connection, queue: str, role: str, right: str) -> int:
    return int(value(conn, "select pgque.revoke_queue(%s, %s, %s)", queue, role, right))


@pytest.fixture
def user(nobody: Any) -> Iterator[Connection]:
    """A session of a role that has nothing yet."""
    with psycopg.connect(nobody.dsn, autocommit=True) as connection:
        yield connection


def state(conn: Connection, queue: str) -> list[Any]:
    """What nobody without a right may change."""
    return [
        rows(conn, "select msg_id, consumer_name, status, receive_count from pgque.list_messages(%s)", queue),
        rows(
            conn,
            "select consumer_name, last_tick, current_batch, next_tick from pgque.get_consumer_info(%s)",
            queue,
        ),
        rows(conn, "select dl_id from pgque.dlq_inspect(%s)", queue),
        rows(conn, "select archive_id from pgque.archive_list(%s)", queue),
        rows(conn, "select * from pgque.queue_config(%s)", queue),
        rows(conn, "select * from pgque.list_workers(%s)", queue),
    ]


@pytest.mark.parametrize("right", RIGHTS)
def test_a_right_to_a_queue_is_that_right_and_to_that_queue(
    conn: Connection, one: str, other: str, nobody: Any, user: Connection, right: str
) -> None:
    assert grant(conn, one, nobody.name, right) == 1
    before = state(conn, other)
    for needed, calls in NEEDS.items():
        expected = None if needed == right or right == "admin" else DENIED
        assert tries(user, one, calls) == dict.fromkeys(calls, expected), needed
        assert tries(user, other, calls) == dict.fromkeys(calls, DENIED), needed
    assert tries(user, one, EITHER) == dict.fromkeys(EITHER)
    assert tries(user, other, EITHER) == dict.fromkeys(EITHER, DENIED)
    assert tries(user, one, NEVER) == dict.fromkeys(NEVER, DENIED)
    assert rows(user, "select queue_name from pgque.get_queue_info()") == [(one,)]
    for call in ("health", "metrics"):
        assert rows(user, f"select distinct queue from pgque.{call}(null)") == [(one,)]
    assert rows(user, "select * from pgque.my_rights()") == [
        (None, False, False, False, False),
        (one, True, right != "consume", right != "produce", right == "admin"),
    ]
    assert {name for (name,) in rows(user, "select queue_name from pgque.get_consumer_info()")} <= {one}
    assert rows(user, "select * from pgque.list_workers()") == []
    assert state(conn, other) == before


def test_a_queue_without_a_right_and_one_that_does_not_exist_give_the_same_error(
    conn: Connection, one: str, other: str, nobody: Any, user: Connection
) -> None:
    grant(conn, one, nobody.name, "admin")
    for call in (*NEEDS["produce"], *NEEDS["consume"], *NEEDS["admin"], *EITHER):
        there, missing = (
            refused(DENIED, rows, user, call.format(q=f"'{name}'")).diag for name in (other, "no such queue")
        )
        assert str(there.message_primary).replace(other, '"no such queue"') == missing.message_primary, call
        assert there.message_detail == missing.message_detail
    by_id = str(value(conn, "select queue_uid from pgque.get_queue_info(%s)", other))
    refused(DENIED, send, user, by_id)


FOLDING = "pg_temp.folding"
# The collation of the argument that names the queue: "C" is that of the type name.
COLLATIONS = ("", 'collate "C"', 'collate "POSIX"', f"collate {FOLDING}")


def make_folding(connection: Connection) -> None:
    """A collation by which upper and lower case are equal."""
    connection.execute(
        f"create collation if not exists {FOLDING} (provider = icu, locale = 'und-u-ks-level2', deterministic = false)".encode()
    )


def answer_in_full(connection: Connection, call: str, name: str) -> Any:
    """The answer to a call, or all that an error says, without the queue's name."""
    try:
        return rows(connection, call)
    except psycopg.Error as error:
        d = error.diag
        said = (d.sqlstate, d.message_primary, d.message_detail, d.message_hint, d.context)
        return [str(text).replace(f'"{name}"', "?").replace(name, "?") for text in said]


@pytest.mark.parametrize("collation", COLLATIONS)
def test_no_collation_of_an_argument_distinguishes_a_queue_without_a_right_from_one_that_does_not_exist(
    conn: Connection, one: str, other: str, nobody: Any, user: Connection, collation: str
) -> None:
    """Of every function that takes a queue's name; the context of the error counts too."""
    grant(conn, one, nobody.name, "admin")
    make_folding(user)
    told, tried = [], 0
    for function, arguments in rows(conn, ASKING):
        if {name for name, _ in arguments} & QUEUES:
            answers = []
            for name in (other, "missing-" + other, other.upper()):
                known = dict.fromkeys(QUEUES, f"'{name}' {collation}")
                known |= {
                    "consumer_name": "'c'",
                    "i_consumer_name": "'c'",
                    "p_bytes": "null",
                    "p_consumer": "'c'",
                }
                call = f"select * from pgque.{function}({spelled(arguments, known, '1')})"
                answers.append(answer_in_full(user, call, name))
            tried += 1
            # A trigger asks this one before it knows whether it sends: it is false for a role without a right.
            denied = function == "_is_old_change" or answers[0][0] == DENIED
            if answers[0] != answers[1] or answers[0] != answers[2] or not denied:
                told.append((function, answers))
    assert told == [], "\n".join(map(str, told))
    assert tried > 40
    for call in (*NEEDS["produce"], *NEEDS["consume"], *NEEDS["admin"], *EITHER):
        there, missing = (
            answer_in_full(user, call.format(q=f"'{name}' {collation}"), name)
            for name in (other, "no-such-queue")
        )
        assert there == missing, call


@pytest.mark.parametrize("collation", COLLATIONS)
def test_a_name_means_its_own_queue_and_consumer_whatever_its_collation(
    conn: Connection, one: str, nobody: Any, user: Connection, collation: str
) -> None:
    """Not another one that the collation takes for equal."""
    shouted = one.upper()
    value(conn, "select pgque.create_queue(%s)", shouted)
    try:
        subscribe(conn, shouted, "secret")
        grant(conn, one, nobody.name, "admin")
        make_folding(user)
        named = f"'{one}' {collation}"
        for call in NEEDS["produce"]:
            if "key =>" not in call:
                assert answer(user, call.format(q=named))[0][0] is not None, call
        assert {q for (q,) in rows(user, f"select queue_name from pgque.get_queue_info({named})")} == {one}
        assert {q for (q,) in rows(user, f"select queue_name from pgque.get_consumer_info({named})")} == {one}
        assert rows(user, f"select pgque.subscribe('{one}', 'SECRET' {collation})") == [(1,)]
        assert rows(user, f"select pgque.subscribe('{one}', 'D' {collation})") == [(1,)]
        assert {c for (c,) in rows(user, f"select consumer_name from pgque.get_consumer_info('{one}')")} == {
            "SECRET",
            "D",
            "d",
            "f",
        }
        assert rows(user, f"select pgque.unsubscribe('{one}', 'D' {collation})") == [(1,)]
        assert rows(user, f"select pgque.unsubscribe('{one}', 'd')") == [(1,)]
    finally:
        value(conn, "select pgque.drop_queue(%s, true)", shouted)


def test_a_producer_and_a_consumer_with_rights_to_one_queue_do_their_work(
    conn: Connection, queue: str, roles: Any
) -> None:
    producer, consumer = roles(), roles()
    grant(conn, queue, producer.name, "produce")
    grant(conn, queue, consumer.name, "consume")
    with (
        psycopg.connect(producer.dsn, autocommit=True) as p,
        psycopg.connect(consumer.dsn, autocommit=True) as c,
    ):
        for name in ("c", "pool"):
            subscribe(c, queue, name)
        sent = [send(p, queue) for _ in range(3)] + [post(p, queue, key="k", delay="0 s")]
        forced_tick(conn, queue)
        batch = receive(c, queue)
        assert [m.msg_id for m in batch] == sent
        assert value(c, "select queue_name from pgque.get_batch_info(%s)", batch[0].batch_id) == queue
        assert nack_ids(c, batch[0].batch_id, sent[:1]) == [(sent[0], True, None)]
        assert ack(c, batch[0].batch_id) == 1
        assert ack(c, batch[0].batch_id) == 0
        first = take(c, queue, "w", 2, consumer="pool")
        assert value(c, "select pgque.extend(%s, '1 minute')", first[0].batch_id) == 2
        second = rows(
            c,
            "select msg_id, batch_id from pgque.receive(%s, 'pool', 2, worker => 'w', ack_batch => %s)",
            queue,
            first[0].batch_id,
        )
        assert len(second) == 2
        assert value(c, "select pgque.release(%s)", second[0][1]) == 2


def by_id(conn: Connection, queue: str) -> dict[str, list[int]]:
    """Ids of what lies in the queue, by the name of the argument that takes one."""
    leases = rows(
        conn,
        "select distinct batch_id from pgque.list_messages(%s) where batch_id is not null",
        queue,
    )
    return {
        "batch_id": [lease for (lease,) in leases],
        "dl_id": [value(conn, "select dl_id from pgque.dlq_inspect(%s)", queue)],
        "archive_id": [value(conn, "select archive_id from pgque.archive_list(%s)", queue)],
    }


SAMPLES = {
    "text": "'x'",
    "integer": "1",
    "bigint": "1",
    "interval": "'1 second'",
    "jsonb": "jsonb_build_object()",  # without braces, which str.format() would fill
    "boolean": "true",
    "timestamp with time zone": "now()",
    "bytea": "'x'",
    "uuid": "'00000000-0000-4000-8000-000000000000'",
}
ASKING = """
select p.proname, array(
    select array[a.name, format_type(a.type, null)]
    from unnest(p.proargnames, coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargmodes) with ordinality a (name, type, mode, n)
    where coalesce(a.mode, 'i') in ('i', 'b')
    order by a.n)
from pg_proc p
where p.pronamespace = 'pgque'::regnamespace and p.prosecdef and 'pgque.caller'::regtype = any (p.proargtypes)
order by p.oid::regprocedure::text
"""


def spelled(arguments: list[list[str]], known: dict[str, str], ident: str) -> str:
    """The arguments of a call but the caller: known ones as they are, samples for the others, with this message id."""
    given = []
    for argument, type_name in arguments[:-1]:
        if argument in known:
            given.append(known[argument])
        elif type_name == "pgque.message":
            given.append(f"row({ident}, null, null, null, null, null, null, null, null, null)::pgque.message")
        elif type_name == "pgque.delivery":
            given.append(
                f"(select d from (select ({ident}, null, null, null, null, null, null, null, null, null,"
                " null, null, null, null, null, null, null)::pgque.delivery as d) s)"
            )
        elif argument == "msg_ids":
            given.append(f"array[{ident}]::bigint[]")
        elif type_name.endswith("[]"):
            given.append(f"array[{SAMPLES[type_name[:-2]]}]::{type_name}")
        else:
            given.append(f"{SAMPLES[type_name]}::{type_name}")
    return ", ".join(given)


def calls_by_id(conn: Connection, name: str, ident: str) -> Iterator[str]:
    """A call of each function that takes such an id, with {id} for it."""
    for function, arguments in rows(conn, ASKING):
        names = [argument for argument, _ in arguments]
        if name in names or (name == "batch_id" and "p_batch" in names):
            given = spelled(arguments, {name: "{id}", "p_batch": "{id}"}, ident)
            yield f"select * from pgque.{function}({given})"


def answer(connection: Connection, call: str) -> Any:
    try:
        return rows(connection, call)
    except psycopg.Error as error:
        return error.sqlstate, error.diag.message_primary


UNKNOWN = 2**40 + 4095


def of_unknown(got: Any, ident: int) -> str:
    """The answer to an id, as it would be for one that never was."""
    return re.sub(rf"\b{ident}\b", str(UNKNOWN), str(got))


def test_an_id_of_another_queue_is_as_good_as_one_that_never_was(
    conn: Connection, one: str, other: str, nobody: Any, user: Connection
) -> None:
    grant(conn, one, nobody.name, "admin")
    before = state(conn, other)
    found = by_id(conn, other)
    assert len(found["batch_id"]) >= 2
    message = value(conn, "select max(msg_id) from pgque.list_messages(%s)", other)
    tried = 0
    for name, taken in found.items():
        for call in calls_by_id(conn, name, str(message)):
            unknown = answer(user, call.format(id=UNKNOWN))
            for ident in taken:
                got = answer(user, call.format(id=ident))
                assert of_unknown(got, ident) == str(unknown), call
                tried += 1
    assert tried >= 2 * 12 + 3
    assert rows(user, f"select * from pgque.ack({found['batch_id'][0]})") == [(0,)]
    refused(
        DENIED,
        rows,
        user,
        f"select * from pgque.receive('{other}', 'c', ack_batch => {found['batch_id'][0]})",
    )
    subscribe(user, one, "own")
    offer(conn, one)
    assert rows(user, f"select * from pgque.receive('{one}', 'own', ack_batch => {found['batch_id'][0]})")
    assert state(conn, other) == before


QUEUES = {"queue_name", "queue", "p_queue", "i_queue_name"}
IDS = {"batch_id", "p_batch", "dl_id", "archive_id"}
# They find the queue by a name of their own: see test_recurring.py.
RECURRING = {f"{call}_recurring" for call in ("drop", "pause", "resume", "run", "list")}


def test_every_function_that_a_single_right_lets_call_asks_who_calls(conn: Connection) -> None:
    silent = rows(
        conn,
        "select p.oid::regprocedure::text from pg_proc as p"
        " where p.pronamespace = 'pgque'::regnamespace and p.prosecdef"
        " and has_function_privilege('pgque_user', p.oid, 'execute')"
        " and 'pgque.caller'::regtype <> all (p.proargtypes)",
    )
    assert silent == []
    for function, arguments in rows(conn, ASKING):
        names = {name for name, _ in arguments}
        assert names & QUEUES or names & IDS or function in RECURRING or function == "my_rights", function
        assert arguments[-1] == ["caller", "pgque.caller"], function


# A null whose type is pgque.caller already: the domain's check has no part in it. FROM clause, expression.
NULLS = {
    "an empty subquery": ("(values (1)) o", "(select current_user::pgque.caller where false)"),
    "nullif": ("(values (1)) o", "nullif(current_user::pgque.caller, current_user)"),
    "a column of an outer join": (
        "(values (1)) o left join (select current_user::pgque.caller as c where false) n on true",
        "n.c",
    ),
    "an element that is not there": ("(values (1)) o", "(array[current_user]::pgque.caller[])[2]"),
    "a window function": ("(select lag(current_user::pgque.caller) over () as c) n", "n.c"),
    "a subtotal": (
        "(select g.c from (select current_user::pgque.caller as c) g group by rollup (g.c) having g.c is null) n",
        "n.c",
    ),
}


NOT_NULL = ("23502", "domain pgque.caller does not allow null values")


def answer_to_null(user: Connection, form: str, call: str) -> Any:
    """The answer to a call, given up to its last argument, that passes such a null as the caller."""
    source, null = NULLS[form]
    return answer(user, f"select f.* from {source} cross join lateral pgque.{call}, {null}) f")


@pytest.mark.parametrize("form", NULLS)
@pytest.mark.parametrize("right", [None, "consume", "admin"])
def test_a_caller_that_is_null_has_no_right_whatever_function_is_called(
    conn: Connection, one: str, other: str, nobody: Any, user: Connection, form: str, right: str | None
) -> None:
    """Of every function that takes a caller, on a queue the role has no right to, and on its own."""
    grant(conn, one, nobody.name, right or "admin")
    if right is None:
        revoke(conn, one, nobody.name, "admin")
    before, own = state(conn, other), state(conn, one)
    ids = by_id(conn, other)
    message = str(value(conn, "select max(msg_id) from pgque.list_messages(%s)", other))
    through: list[tuple[str, Any, Any]] = []
    tried = 0
    for function, arguments in rows(conn, ASKING):
        names = {name for name, _ in arguments}
        for queue in (one, other) if names & QUEUES else ():
            known = dict.fromkeys(QUEUES, f"'{queue}'")
            known |= {"consumer_name": "'c'", "i_consumer_name": "'c'", "p_bytes": "null"}
            got = answer_to_null(user, form, f"{function}({spelled(arguments, known, message)}")
            tried += 1
            if got not in ((DENIED, f"permission denied for queue {queue}"), NOT_NULL):
                through.append((function, queue, got))
        for name in names & IDS:
            call = f"{function}({spelled(arguments, {name: '{id}'}, message)}"
            unknown = answer_to_null(user, form, call.format(id=UNKNOWN))
            for ident in ids["batch_id" if name == "p_batch" else name]:
                got = answer_to_null(user, form, call.format(id=ident))
                tried += 1
                if of_unknown(got, ident) != str(unknown):
                    through.append((function, ident, got))
    assert through == [], "\n".join(map(str, through))
    assert tried > 120
    for call in (
        "get_queue_info(null",
        "get_consumer_info(null, null",
        "list_workers(null, null",
        "health(null",
        "metrics(null",
        "overview(null",
    ):
        assert answer_to_null(user, form, call) in ([], NOT_NULL), call
    assert (state(conn, other), state(conn, one)) == (before, own)


def test_who_passes_null_as_the_caller_hears_what_to_do(
    conn: Connection, one: str, nobody: Any, user: Connection
) -> None:
    grant(conn, one, nobody.name, "consume")
    null = NULLS["an empty subquery"][1]
    error = refused(DENIED, rows, user, f"select * from pgque.peek('{one}', 10, null, {null})")
    assert "caller is null" in str(error.diag.message_detail)
    assert "Leave out the argument caller" in str(error.diag.message_hint)
    assert rows(user, f"select * from pgque.peek('{one}')") == []


FORGED = {
    "an argument": "select * from pgque.receive({q}, 'c', caller => {owner})",
    "a cast": "select * from pgque.receive({q}, 'c', caller => {owner}::text::pgque.caller)",
    "null": "select * from pgque.receive({q}, 'c', caller => null)",
    "an element of an array": "select r.* from unnest(array[{owner}]::pgque.caller[]) a, pgque.receive({q}, 'c', caller => a) r",
    "a field of a record": "select r.* from jsonb_to_record(jsonb_build_object('a', {owner})) j (a pgque.caller),"
    " pgque.receive({q}, 'c', caller => j.a) r",
    "a variable": "do $$ declare v pgque.caller := {owner}; begin perform pgque.receive({q}, 'c', caller => v); end $$",
    "a letter of a variable": "do $$ declare v pgque.caller := current_user; begin v[0] := 'x'; end $$",
    "names turned into an array of it": "select (array[{owner}::name]::pgque.caller[])[1]",
    "a polymorphic function": "create function pg_temp.f(anyelement, text) returns anyelement language sql as 'select $2';"
    " select pg_temp.f(current_user::pgque.caller, {owner})",
    "a polymorphic variable": "create function pg_temp.h(anyarray, text) returns anyelement language plpgsql"
    " as 'begin $1[1] := $2; return $1[1]; end'; select pg_temp.h(array[current_user]::pgque.caller[], {owner})",
    "a column list for a record": "create function pg_temp.r() returns setof record language sql as 'select {owner_quoted}::name';"
    " select a from pg_temp.r() r (a pgque.caller)",
    "the owner's name as a role": "set role {bare}",
}


@pytest.mark.parametrize("how", FORGED)
def test_the_caller_can_not_be_forged(
    conn: Connection, one: str, other: str, nobody: Any, user: Connection, how: str
) -> None:
    grant(conn, one, nobody.name, "admin")
    owner = value(conn, "select current_user")
    call = FORGED[how].format(q=f"'{other}'", owner=f"'{owner}'", owner_quoted=f"''{owner}''", bare=owner)
    with pytest.raises(psycopg.Error) as error:
        user.execute(call.encode())
    assert error.value.sqlstate in ("23514", "23502", DENIED), error.value


# Ways to keep a value. The server does not check a value again when somebody else reads it.
KEPT = {
    "a table": "create table mine.t (a pgque.caller)",
    "a temporary table": "create temp table t (a pgque.caller)",
    "an array in a table": "create table mine.t (a pgque.caller[])",
    "a table made of a query": "create table mine.t as select current_user::pgque.caller as a",
    "select into": "select current_user::pgque.caller as a into mine.t",
    "a column added": "create table mine.t (a name); alter table mine.t add b pgque.caller default current_user",
    "a column of another type": "create table mine.t (a name); alter table mine.t alter a type pgque.caller",
    "a view": "create view mine.v as select current_user::pgque.caller as a",
    "a materialized view": "create materialized view mine.v as select current_user::pgque.caller as a",
    "a domain on top": "create domain mine.d as pgque.caller",
    "a composite type": "create type mine.c as (a pgque.caller)",
    "an attribute added": "create type mine.c as (a name); alter type mine.c add attribute b pgque.caller",
    "a function's result": "create function mine.g() returns pgque.caller language sql as 'select current_user'",
    "a function's argument": "create function mine.g(pgque.caller) returns int language sql as 'select 1'",
}


@pytest.mark.parametrize("how", KEPT)
def test_nobody_can_keep_a_caller_and_pass_it_on(roles: Any, own: Connection, how: str) -> None:
    role = roles("pgque_admin", dbname=own.info.dbname)
    own.execute(f"create schema mine authorization {role.name}".encode())
    with psycopg.connect(role.dsn, autocommit=True) as session:
        error = refused(DENIED, session.execute, KEPT[how].encode())
        assert error.diag.message_primary == "permission denied for type pgque.caller"


def test_health_names_each_kind_of_object_that_can_hold_a_caller(own: Connection) -> None:
    query = "select status, detail from pgque.health() where check_name = 'stored callers'"
    own.execute(b"create schema mine; create view mine.harmless as select * from pgque.peek('q')")
    assert rows(own, query) == [("ok", "none")]
    own.execute(
        b"create table mine.t (a name, b pgque.caller, c pgque.caller[]);"
        b"create index i on mine.t ((a::pgque.caller));"
        b"create type mine.r as range (subtype = pgque.caller);"
        b"create type mine.c as (d pgque.caller);"
        b"create domain mine.d as pgque.caller[];"
        b"create function mine.f() returns pgque.caller language sql as 'select current_user'"
    )
    ((status, found),) = rows(own, query)
    assert status == "fail"
    for thing in (
        "column b of table mine.t",
        "column c of table mine.t",
        "index mine.i",
        "type mine.r",
        "column d of composite type mine.c",
        "type mine.d",
        "function mine.f()",
    ):
        assert thing in found, found


def test_who_runs_as_somebody_else_has_his_rights_and_not_the_sessions(roles: Any, own: Connection) -> None:
    """An index expression that a superuser's ANALYZE runs, and a trigger that a superuser's DELETE fires."""
    for name in ("one", "other"):
        value(own, "select pgque.create_queue(%s)", name)
    thief = roles("pg_read_all_data", dbname=own.info.dbname)
    grant(own, "one", thief.name, "consume")
    own.execute(f"create schema mine authorization {thief.name}".encode())
    with psycopg.connect(thief.dsn, autocommit=True) as session:
        session.execute(
            b"create table mine.t (id int primary key);"
            b"create function mine.steal(int) returns int immutable language plpgsql as $$ begin"
            b" perform pgque.subscribe('other', 'thief'); return $1; end $$;"
            b"create function mine.fired() returns trigger language plpgsql as $$ begin"
            b" perform pgque.subscribe('other', 'thief'); return old; end $$"
        )
        session.execute(b"create table mine.parent (id int primary key)")
        session.execute(b"create table mine.child (id int references mine.parent on delete cascade)")
        session.execute(b"insert into mine.parent values (1); insert into mine.child values (1)")
        session.execute(
            b"create trigger fired before delete on mine.child for each row execute function mine.fired()"
        )
        session.execute(b"create index on mine.t (mine.steal(id))")
        refused(DENIED, rows, session, "insert into mine.t values (1)")
    # The same by the superuser's hand: what runs as the table's owner has the owner's rights.
    refused(DENIED, rows, own, "delete from mine.parent")
    own.execute(
        b"create or replace function mine.steal(int) returns int immutable language plpgsql as 'begin return $1; end'"
    )
    own.execute(b"insert into mine.t values (1)")
    own.execute(
        b"create or replace function mine.steal(int) returns int immutable language plpgsql as $$ begin"
        b" perform pgque.subscribe('other', 'thief'); return $1; end $$"
    )
    refused(DENIED, rows, own, "analyze mine.t")
    refused(DENIED, rows, own, "reindex table mine.t")
    assert rows(own, "select * from pgque.get_consumer_info('other')") == []


def test_a_function_with_its_owners_rights_acts_with_its_owners_rights(roles: Any, own: Connection) -> None:
    for name in ("one", "other"):
        value(own, "select pgque.create_queue(%s)", name)
    owner, guest = roles(dbname=own.info.dbname), roles(dbname=own.info.dbname)
    grant(own, "one", owner.name, "produce")
    grant(own, "other", guest.name, "produce")
    own.execute(f"create schema app authorization {owner.name}; grant usage on schema app to public".encode())
    with psycopg.connect(owner.dsn, autocommit=True) as session:
        session.execute(
            b"create function app.post(text) returns bigint language sql security definer"
            b" set search_path = pg_catalog as $$ select pgque.send($1, 'x'::text) $$"
        )
    with psycopg.connect(guest.dsn, autocommit=True) as session:
        assert value(session, "select app.post('one')") == 1
        refused(DENIED, rows, session, "select app.post('other')")
        assert send(session, "other") == 1


def test_a_role_has_the_rights_of_the_roles_it_is_a_member_of(
    conn: Connection, queue: str, roles: Any
) -> None:
    group, member, stranger = roles(), roles(), roles()
    grant(conn, queue, group.name, "produce")
    conn.execute(f"grant {group.name} to {member.name}".encode())
    with psycopg.connect(member.dsn, autocommit=True) as session:
        assert send(session, queue)
        conn.execute(f"revoke {group.name} from {member.name}".encode())
        refused(DENIED, send, session, queue)
    with psycopg.connect(stranger.dsn, autocommit=True) as session:
        refused(DENIED, send, session, queue)


def test_rights_follow_a_role_and_a_queue_that_are_renamed_and_end_with_them(
    conn: Connection, new_queue: Callable[[], str], roles: Any
) -> None:
    queue = new_queue()
    role = roles()
    grant(conn, queue, role.name, "produce")
    rights = "select right_role::text, right_name from pgque.queue_right r join pgque.queue q on q.queue_id = r.right_queue where q.queue_name = %s"
    value(conn, "select pgque.rename_queue(%s, %s)", queue, queue + "-2")
    with psycopg.connect(role.dsn, autocommit=True) as session:
        assert send(session, queue + "-2")
        assert rows(conn, rights, queue + "-2") == [(role.name, "produce")]
        value(conn, "select pgque.drop_queue(%s, true)", queue + "-2")
        value(conn, "select pgque.create_queue(%s)", queue)
        refused(DENIED, send, session, queue)
    gone = f"{role.name}_gone"
    conn.execute(f"create role {gone}".encode())
    grant(conn, queue, gone, "consume")
    conn.execute(f"drop role {gone}".encode())
    assert grant(conn, queue, role.name, "produce") == 1
    assert rows(conn, rights, queue) == [(role.name, "produce")]
    conn.execute(f"create role {gone}".encode())
    grant(conn, queue, gone, "consume")
    conn.execute(f"drop role {gone}".encode())
    conn.execute(f"alter role {role.name} rename to {gone}".encode())
    try:
        value(conn, "select pgque.maint_tables()")
        assert rows(conn, rights, queue) == [(gone, "produce")]
    finally:
        conn.execute(f"alter role {gone} rename to {role.name}".encode())
        conn.execute("select pgque.maint_tables()")


def test_a_right_is_given_once_and_taken_once_and_bad_words_are_refused(
    conn: Connection, queue: str, nobody: Any
) -> None:
    assert grant(conn, queue, nobody.name, "consume") == 1
    assert grant(conn, queue, nobody.name, "consume") == 0
    assert revoke(conn, queue, nobody.name, "produce") == 0
    assert revoke(conn, queue, nobody.name, "consume") == 1
    assert revoke(conn, queue, nobody.name, "consume") == 0
    for right in RIGHTS:
        grant(conn, queue, nobody.name, right)
    assert value(conn, "select pgque.revoke_queue(%s, %s)", queue, nobody.name) == 3
    assert "produce" in str(refused("PQ005", grant, conn, queue, nobody.name, "everything").diag.message_hint)
    refused("PQ005", value, conn, "select pgque.grant_queue(%s, %s, null)", queue, nobody.name)
    refused("42704", grant, conn, queue, "no such role", "consume")
    refused("42704", grant, conn, queue, "public", "consume")
    refused("PQ001", grant, conn, "no such queue", nobody.name, "consume")


def test_of_two_who_give_one_right_at_once_one_gives_it(
    conn: Connection,
    dsn: str,
    queue: str,
    nobody: Any,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    first = connect(dsn, autocommit=False)
    assert grant(first, queue, nobody.name, "consume") == 1
    job = background(lambda c: grant(c, queue, nobody.name, "consume"), connect(dsn))
    wait_for_lock(job.pid)
    first.commit()
    assert job.result() == 0


def test_a_right_taken_back_ends_with_the_next_call(
    conn: Connection, queue: str, nobody: Any, user: Connection
) -> None:
    grant(conn, queue, nobody.name, "produce")
    assert send(user, queue)
    revoke(conn, queue, nobody.name, "produce")
    error = refused(DENIED, send, user, queue)
    assert queue in str(error.diag.message_primary)
    assert f"grant_queue('{queue}', '{nobody.name}', 'produce')" in str(error.diag.message_hint)


SETS_DEAD_LETTERS = "select pgque.set_queue_config(%s, 'dead_letter_queue', %s)"


def test_an_administrator_of_one_queue_reaches_no_other_through_its_settings(
    conn: Connection, one: str, other: str, nobody: Any, user: Connection
) -> None:
    grant(conn, one, nobody.name, "admin")
    refused(DENIED, value, user, SETS_DEAD_LETTERS, one, other)
    refused(DENIED, value, user, SETS_DEAD_LETTERS, one, one + ".dlq")
    assert not value(conn, "select count(*) from pgque.get_queue_info() where queue_name = %s", one + ".dlq")
    grant(conn, other, nobody.name, "produce")
    configure(user, one, dead_letter_queue=other)


def test_a_right_to_one_queue_adds_to_a_right_to_all(
    conn: Connection, one: str, other: str, writer: Any
) -> None:
    grant(conn, one, writer.name, "consume")
    with psycopg.connect(writer.dsn, autocommit=True) as session:
        for queue in (one, other):
            assert send(session, queue)
        tick(conn, one)
        assert receive(session, one, "d")
        refused(DENIED, receive, session, other)


def test_a_trigger_sends_with_the_rights_of_who_changes_the_table(roles: Any, own: Connection) -> None:
    for name in ("one", "other"):
        value(own, "select pgque.create_queue(%s)", name)
    role = roles(dbname=own.info.dbname)
    grant(own, "one", role.name, "produce")
    own.execute(f"create schema app authorization {role.name}".encode())
    with psycopg.connect(role.dsn, autocommit=True) as session:
        session.execute(b"create table app.t (id int primary key); create table app.u (id int primary key)")
        for table, queue in (("t", "one"), ("u", "other")):
            session.execute(
                f"create trigger changes after insert on app.{table} for each row"
                f" execute function pgque.jsontriga('{queue}')".encode()
            )
        session.execute(b"insert into app.t values (1)")
        refused(DENIED, rows, session, "insert into app.u values (1)")
        session.execute(b"grant usage on schema app to public; grant insert on app.t to public")
    assert value(own, "select count(*) from pgque.peek('one')") == 1
    for number, stranger in enumerate(
        (roles(dbname=own.info.dbname), roles("reader", dbname=own.info.dbname)), 2
    ):
        with psycopg.connect(stranger.dsn, autocommit=True) as session:
            error = refused(DENIED, rows, session, f"insert into app.t values ({number})")
            assert "table app.t" in str(error)
            own.execute((error.diag.message_hint or "").split(";")[0].encode())
            session.execute(f"insert into app.t values ({number})".encode())
    assert value(own, "select count(*) from pgque.peek('one')") == 3


def test_a_stranger_does_not_hear_that_a_queue_is_full(
    conn: Connection, one: str, other: str, nobody: Any, user: Connection
) -> None:
    grant(conn, one, nobody.name, "produce")
    configure(conn, other, max_depth=1)
    for sends in ("select pgque.send(%s, 'x')", "select pgque.send_batch(%s, array['x'])"):
        refused("PQ003", value, conn, sends, other)
        told = [
            str(refused(DENIED, value, user, sends, name)).replace(name, "")
            for name in (other, "no_such_queue")
        ]
        assert told[0] == told[1]


def test_a_right_to_one_queue_makes_no_more_consumers_than_the_queue_may_have(
    conn: Connection, queue: str, nobody: Any, user: Connection
) -> None:
    grant(conn, queue, nobody.name, "admin")
    configure(conn, queue, max_consumers=3)
    assert [subscribe(user, queue, name) for name in ("a", "b")] == [1, 1]
    # A consumer and a subconsumer of it.
    coop = "select count(*) from pgque.receive_coop(%s, 'coop', %s)"
    refused("PQ003", value, user, coop, queue, "w")
    assert value(user, "select pgque.unsubscribe(%s, 'a')", queue) == 1
    assert value(user, coop, queue, "w") == 0
    assert value(user, coop, queue, "w") == 0
    for call in (
        "select count(*) from pgque.receive_coop(%s, 'coop', 'v')",
        "select pgque.register_subconsumer(%s, 'coop', 'v')",
        "select pgque.subscribe_subconsumer(%s, 'new', 'v')",
        "select pgque.subscribe(%s, 'new')",
        "select pgque.subscribe(%s, 'new', keyed_order => true)",
        "select pgque.register_consumer(%s, 'new')",
        "select pgque.register_consumer_at(%s, 'new', 1)",
    ):
        error = refused("PQ003", value, user, call, queue)
        assert queue in str(error.diag.message_primary), call
        assert f"alter_queue('{queue}', '{{\"max_consumers\": 6}}')" in str(error.diag.message_hint)
    assert subscribe(user, queue, "b") == 0
    # Who administers this queue only can not raise it, and who has the role is not limited by it.
    for config in ("4", "0", None):
        refused(DENIED, value, user, "select pgque.set_queue_config(%s, 'max_consumers', %s)", queue, config)
    assert subscribe(conn, queue, "new") == 1
    configure(conn, queue, max_consumers=0)
    assert subscribe(user, queue, "newer") == 1


def test_of_two_roles_that_subscribe_at_once_one_takes_the_last_place(
    conn: Connection,
    queue: str,
    nobody: Any,
    user: Connection,
    connect: Callable[..., Connection],
    background: Callable[..., Any],
    wait_for_lock: Callable[..., None],
) -> None:
    grant(conn, queue, nobody.name, "consume")
    configure(conn, queue, max_consumers=1)
    first = connect(nobody.dsn, autocommit=False)
    assert subscribe(first, queue, "a") == 1
    job = background(lambda c: refused("PQ003", subscribe, c, queue, "b"), connect(nobody.dsn))
    wait_for_lock(job.pid)
    first.commit()
    job.result()
    # A snapshot that is older than the others' subscriptions does not show how many there are.
    value(user, "select pgque.unsubscribe(%s, 'a')", queue)
    user.execute("begin isolation level repeatable read")
    refused("25000", subscribe, user, queue, "b")
    user.execute("rollback")
    assert subscribe(user, queue, "b") == 1


def test_the_number_of_consumers_has_a_default_for_all_queues(own: Connection) -> None:
    value(own, "select pgque.create_queue('q')")
    limit = "select param_value from pgque.queue_config('q') where param_name = 'max_consumers'"
    assert value(own, limit) == "1000"
    assert value(own, "select pgque.set_default_config('max_consumers', '50')") == 1
    assert value(own, limit) == "50"
    refused("PQ005", value, own, "select pgque.set_default_config('max_consumers', '-1')")
    refused("PQ005", value, own, "select pgque.set_queue_config('q', 'max_consumers', '-1')")


def test_a_queue_for_dead_letters_is_named_to_those_with_a_right_to_it(
    conn: Connection, one: str, new_queue: Callable[[], str], nobody: Any, user: Connection
) -> None:
    """The right is asked for when the setting is made; dead letters go on as set until it is changed."""
    target = new_queue()
    grant(conn, one, nobody.name, "admin")
    grant(conn, target, nobody.name, "produce")
    configure(user, one, dead_letter_queue=target, max_retries=0)
    named = "select param_value from pgque.queue_config(%s) where param_name = 'dead_letter_queue'"
    assert value(user, named, one) == target
    revoke(conn, target, nobody.name, "produce")
    assert value(user, named, one) is None
    assert value(conn, named, one) == target
    offer(conn, one)
    batch = receive(user, one, "d")
    nack_ids(user, batch[0].batch_id, [batch[0].msg_id])
    forward_letters(conn)
    assert value(conn, "select count(*) from pgque.peek(%s)", target) == 1
    refused(DENIED, value, user, SETS_DEAD_LETTERS, one, target)
    configure(user, one, dead_letter_queue=None)
    assert value(conn, named, one) is None


def test_the_name_of_a_dropped_queue_stands_in_no_constraint(own: Connection) -> None:
    value(own, "select pgque.create_queue('a secret')")
    value(own, "select pgque.drop_queue('a secret')")
    checks = rows(own, "select pg_get_constraintdef(c.oid) from pg_constraint c where c.conname = 'dropped'")
    assert len(checks) == 3
    assert not any("secret" in check for (check,) in checks)
    (leaf,) = rows(
        own,
        "select c.conrelid::regclass::text from pg_constraint c where c.conname = 'dropped' order by 1 limit 1",
    )[0]
    refused("PQ001", rows, own, f"insert into {leaf} default values")
