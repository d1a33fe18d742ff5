"""One vocabulary: results of new functions are called queue, msg_id, payload, type, reason. Old names stay for clients."""

from __future__ import annotations

import re

from sql.helpers import Connection, rows, send, value
from support.reference import WORDS

# Names that a new function must not give to a column of its result or to an argument. dl_id is the number of a dead letter.
OLD = re.compile(
    r"(ev|co|sub)_\w+|dl_(?!id$)\w+|queue_\w+|consumer_name|subconsumer_name|type_name|(\w+_)?events?(_\w+)?"
)
# Every function takes queue_name, consumer_name and type_name, so a new one does as well.
OLD_ARGUMENT = re.compile(r"(ev|co|sub)_\w+|dl_(?!id$)\w+|(\w+_)?events?(_\w+)?")

EVENT = {
    *("ev_id", "ev_time", "ev_txid", "ev_retry", "ev_type"),
    *("ev_data", "ev_extra1", "ev_extra2", "ev_extra3", "ev_extra4"),
    *("ev_headers", "ev_key", "ev_bytes", "ev_expires", "ev_error"),
}
# The functions and views that had old names in their results when this test was written. Clients read them by name.
# A name that is added here is a decision against the reader: give the new column its word instead.
KNOWN = {
    "archive_list": {"consumer_name"},
    "archive_read": EVENT,
    "consumer_lags": {"pending_events"},
    "dlq_inspect": (EVENT - {"ev_expires", "ev_error"})
    | {"consumer_name", "dl_held", "dl_reason", "dl_time"},
    "dlq_reasons": {"consumer_name"},
    "get_batch_cursor": EVENT,
    "get_batch_events": EVENT,
    "get_batch_info": {"consumer_name", "queue_name"},
    "get_consumer_info": {"consumer_name", "pending_events", "queue_name", "skipped_events"},
    "get_message": {"consumer_name"},
    "get_queue_info": {
        *(
            "ev_new",
            "ev_per_sec",
            "queue_cur_table",
            "queue_external_ticker",
            "queue_max_retries",
            "queue_name",
        ),
        *(
            "queue_ntables",
            "queue_paused",
            "queue_rotation_period",
            "queue_switch_time",
            "queue_ticker_idle_period",
        ),
        *("queue_ticker_max_count", "queue_ticker_max_lag", "queue_ticker_paused", "queue_uid"),
    },
    "history": {"pending_events"},
    "list_messages": {"consumer_name"},
    "list_poison": {"consumer_name"},
    "list_recurring": {"queue_name", "type_name"},
    "message_history": {"consumer_name", "event"},
    "message_status": {"consumer_name"},
    "my_rights": {"queue_name"},
    "next_batch_custom": {"cur_tick_event_seq", "prev_tick_event_seq"},
    "next_batch_info": {"cur_tick_event_seq", "prev_tick_event_seq"},
    "overview": {"ev_per_sec", "events", "pending_events"},
    "queue_rates": {"events"},
    "read_window": EVENT,
    "send_idem": {"event_id"},
    "stream_lag": {"events_behind"},
    "subscription": {
        *(
            "sub_active",
            "sub_batch",
            "sub_consumer",
            "sub_id",
            "sub_key_concurrency",
            "sub_last_tick",
            "sub_main",
        ),
        *("sub_next_tick", "sub_queue", "sub_role", "sub_worker"),
    },
}
KNOWN_ARGUMENTS = {
    "archive_next": {"max_events"},
    "event_retry": {"event_id"},
    "insert_event": {"ev_data", "ev_extra1", "ev_extra2", "ev_extra3", "ev_extra4", "ev_type"},
    "next_tick": {"max_events"},
    "next_window": {"max_events"},
    "ticker": {"event_seq"},
}

NAMES = """
    select p.proname::text as name, n.name as column, coalesce(p.proargmodes[n.place], 'i') in ('o', 'b', 't') as is_result
    from pg_catalog.pg_proc as p cross join unnest(p.proargnames) with ordinality as n (name, place)
    where p.pronamespace = 'pgque'::regnamespace and p.proname !~ '^_'
    union all
    select c.relname::text, a.attname::text, true
    from pg_catalog.pg_class as c join pg_catalog.pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    where c.relnamespace = 'pgque'::regnamespace and c.relkind = 'v'"""


def named(conn: Connection, old: re.Pattern[str], results: bool) -> dict[str, set[str]]:
    """Return the functions and views with such names, each with these names."""
    found: dict[str, set[str]] = {}
    for name, column, is_result in rows(conn, NAMES):
        if is_result == results and old.fullmatch(column):
            found.setdefault(name, set()).add(column)
    return found


def test_a_new_function_or_view_returns_no_column_with_an_old_name(conn: Connection) -> None:
    assert named(conn, OLD, True) == KNOWN


def test_a_new_function_takes_no_argument_with_an_old_name(conn: Connection) -> None:
    assert named(conn, OLD_ARGUMENT, False) == KNOWN_ARGUMENTS


def test_the_reference_translates_the_old_names_that_hold_a_message(conn: Connection) -> None:
    translated = {name for names in WORDS for name in re.findall(r"\w+_\w+", names)} | {
        "ev_extra2",
        "ev_extra3",
    }
    assert EVENT - {"ev_txid"} <= translated
    assert KNOWN["dlq_inspect"] | KNOWN["get_consumer_info"] <= translated | {"ev_txid"}
    columns = {
        column
        for name, column, _ in rows(conn, NAMES)
        if name in ("list_messages", "dead_letters", "receive")
    }
    delivery = {
        row[0]
        for row in rows(
            conn, "select attname::text from pg_attribute where attrelid = 'pgque.delivery'::regclass"
        )
    }
    words = {word for word in WORDS.values() if " " not in word} - {"worker"}
    assert words <= columns | delivery


def test_dead_letters_are_listed_with_the_words_of_messages_and_only_to_administrators_of_all_queues(
    own: Connection,
) -> None:
    for queue in ("q", "other"):
        value(own, "select pgque.create_queue(%s)", queue)
        value(own, "select pgque.subscribe(%s, 'c')", queue)
        send(own, queue, f"of {queue}")
        value(own, "select pgque.force_next_tick(%s)", queue)
        value(own, "select pgque.ticker(%s)", queue)
        batch = value(own, "select min(batch_id) from pgque.receive(%s, 'c')", queue)
        rows(own, "select * from pgque.dead(%s, array[1::bigint], 'no good')", batch)
    query = "select queue, consumer, msg_id, type, payload, reason, held from pgque.dead_letters"
    assert rows(own, f"{query} where queue = 'q'") == [("q", "c", 1, "default", "of q", "no good", False)]
    # As the table: a role with a right to one queue reads neither.
    grants = """
        select g.grantee::regrole::text, c.relname::text from pg_class c, aclexplode(c.relacl) g
        where c.oid in ('pgque.dead_letter'::regclass, 'pgque.dead_letters'::regclass) and g.grantee <> c.relowner"""
    assert sorted(rows(own, grants)) == [("pgque_admin", "dead_letter"), ("pgque_admin", "dead_letters")]
