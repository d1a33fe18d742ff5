"""Engines that are broken on purpose: what the judge must say, and the replacements in the SQL file."""

from __future__ import annotations

MUTANTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "rotation looks at no row": (
        "never arrived",
        [("if v_needed is distinct from false then", "if false then")],
    ),
    "a window leaves out what ran when it began": (
        "never arrived",
        [
            (
                "if pg_catalog.pg_snapshot_xmin(p_from) < pg_catalog.pg_snapshot_xmax(p_from) then\n    v_xids := v_xids + (",
                "if false then\n    v_xids := v_xids + (",
            ),
            ("if pg_catalog.cardinality(v_late) > 0 then", "if false then"),
            ("where pg_catalog.pg_visible_in_snapshot(x.xid, w.next_snapshot)", "where false"),
        ],
    ),
    "a window begins at xmin": (
        "came again after its ack",
        [
            (
                "v_lo    bigint := pg_catalog.pg_snapshot_xmax(p_from)::text::bigint;",
                "v_lo    bigint := pg_catalog.pg_snapshot_xmin(p_from)::text::bigint;",
            ),
            (
                "v_lo    xid8 := pg_catalog.pg_snapshot_xmax(p_from);",
                "v_lo    xid8 := pg_catalog.pg_snapshot_xmin(p_from);",
            ),
            (
                "select pg_catalog.pg_snapshot_xmax(w.snapshot), pg",
                "select pg_catalog.pg_snapshot_xmin(w.snapshot), pg",
            ),
        ],
    ),
    "ack drops the rest of the window": (
        "never arrived",
        [
            (
                "if p_position.pos_last_id is null then\n      return pgque._past_window(p_position);",
                "if true then\n      return pgque._past_window(p_position);",
            ),
            ("case when count(*) > p_max then", "case when false then"),
        ],
    ),
    "an ack of some closes the lease": (
        "never arrived",
        [
            (
                "if v_sub.sub_role = 'pool' and (p_ids is null or v_state.settled + pg_catalog.cardinality(v_new) >= v_lease.pos_done_count) then",
                "if v_sub.sub_role = 'pool' then",
            )
        ],
    ),
    "a map that was made twice counts twice": (
        "never arrived",
        [
            ("select distinct on (m.map_id_hi) m.map_lo, m.map_hi", "select m.map_lo, m.map_hi"),
            ("and m.map_valid and m.map_filenodes = v_filenodes)", "and m.map_valid)"),
            ("and m.map_valid and m.map_filenodes = v_filenodes\n", "and m.map_valid\n"),
        ],
    ),
    "the journal turns under an old snapshot": (
        "times",
        [
            (
                "    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1 for share;",
                "    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1;",
            ),
            (
                "if found and pgque._old_snapshot() then\n    p_position.leaf",
                "if false then\n    p_position.leaf",
            ),
        ],
    ),
    "a hand-out takes no lock": (
        # Two deliveries at once get the same number, which the primary key refuses.
        "handed out while its lease lived|unexpected 23505 .*position_",
        [
            (
                "and s.sub_role = sub.sub_role for no key update;",
                "and s.sub_role = sub.sub_role for key share;",
            ),
            ("'normal' else 'pool' end\n    for no key update;", "'normal' else 'pool' end;"),
            ("          for no key update\n        ) h on true;", "        ) h on true;"),
        ],
    ),
    "who takes over leaves the batch id": (
        "had lost it",
        [
            ("set ev_batch = p_token, ev_worker", "set ev_batch = coalesce(r.ev_batch, p_token), ev_worker"),
            (
                "select * from pgque._retries_of_batch(v_sub.sub_id, v_token, v_queue.queue_name);",
                "select r.ev_id, v_token, r.ev_type, r.ev_data, coalesce(r.ev_retry, 0), r.ev_time, r.ev_extra1, r.ev_extra2,"
                " r.ev_extra3, r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes, r.ev_receives, r.ev_error, r.ev_expires, v_queue.queue_name"
                " from pgque.retry_queue r where r.ev_owner = v_sub.sub_id and r.ev_retry_after = v_turn.until;",
            ),
        ],
    ),
    "a message that waits does not hold its key back": (
        "overtook",
        [
            (
                "where p_sub.sub_key_concurrency = 1 and l.what = 'good' and exists",
                "where p_sub.sub_key_concurrency = 0 and l.what = 'good' and exists",
            ),
            ("v_order or h.ev_retry_after <= p_now", "h.ev_retry_after <= p_now"),
        ],
    ),
    "any number of messages of a key is leased": (
        "too many messages of key|overtook|are out at once",
        [("order by p.ev_id) > p_sub.sub_key_concurrency then", "order by p.ev_id) > 100 then")],
    ),
    "a dead letter stays when it is requeued": (
        "requeued twice",
        [
            (
                "delete from pgque.dead_letter d\n"
                "  where d.dl_id = p_dl_id and pgque._may(p_caller, 'admin', d.dl_queue_id)\n"
                "  returning d.* into v_dead;",
                "select d.* into v_dead from pgque.dead_letter d where d.dl_id = p_dl_id;",
            )
        ],
    ),
    "a hand-out does not seal the body": (
        "two bodies|was given",
        [
            ("and not pgque._is_passed(p_queue.queue_id, v_last.ev_id, v_last.sent_by)\n", "\n"),
            (
                "where q.queue_id = p_queue_id and r.ev_key is not null and s.sealed is not true",
                "where false",
            ),
        ],
    ),
    "a delay is forgotten": (
        "came before",
        [("array_agg(case when d.due > v_now then d.due end)", "array_agg(null::timestamptz)")],
    ),
    "an expired message is handed out": (
        "came afterwards",
        [
            (
                "when e.ev_expires <= v_now then 'expired' when e.ev_id = any (v_busy)",
                "when e.ev_id = any (v_busy)",
            )
        ],
    ),
    "receive attempts have no limit": (
        "more than",
        [
            (
                "case when p_sub.sub_role = 'pool' then p_queue.queue_max_receive_attempts else 2147483647 end;",
                "2147483647;",
            ),
            (
                "if v_row.ev_expires <= p_now or p_sub.sub_role = 'pool' and v_row.ev_receives >= p_queue.queue_max_receive_attempts then",
                "if v_row.ev_expires <= p_now then",
            ),
        ],
    ),
}


# Those that only readers of whole batches can notice, and rarely.
NARROW = {"a map that was made twice counts twice", "the journal turns under an old snapshot"}


def broken(script: str, mutant: str) -> str:
    """The engine with the mutant's replacements; each text must be there once."""
    return replaced(script, mutant, MUTANTS[mutant][1])


def replaced(script: str, mutant: str, replacements: list[tuple[str, str]]) -> str:
    """The engine with some replacements."""
    for good, bad in replacements:
        found = script.count(good)
        assert found == 1, f"the engine changed: adapt the mutant {mutant!r}, {found} times: {good}"
        script = script.replace(good, bad)
    return script
