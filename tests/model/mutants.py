"""Engines that are broken on purpose, and the machine that must notice; see tests/history/mutants.py for others."""

from __future__ import annotations

from hypothesis.stateful import RuleBasedStateMachine

from history.mutants import MUTANTS as SEEN_IN_HISTORIES
from model.consumers import Consumers
from model.workers import Workers

MUTANTS: dict[str, tuple[type[RuleBasedStateMachine], list[tuple[str, str]]]] = {
    "a nack does not count": (
        Consumers,
        [
            (
                "    p_item.ev_retry := coalesce(p_item.ev_retry, 0) + 1;",
                "    p_item.ev_retry := coalesce(p_item.ev_retry, 0);",
            )
        ],
    ),
    "an open batch comes again with what was settled": (
        Consumers,
        [
            (
                "p_and || ' and not (' || pgque._has_outcome_sql(p_lease.pos_batch) || ')', p_places",
                "p_and, p_places",
            )
        ],
    ),
    "a slice ends one message too late": (
        Consumers,
        [
            (
                "          if v_count = v_room or v_bytes > $7 and v_count > 0 then\n            v_pos.pos_last_id := v_last;",
                "          if v_count = v_room or v_bytes > $7 and v_count > 0 then\n            v_pos.pos_last_id := v_row.msg_id;",
            ),
            ("[p_max] end as last_id", "[p_max + 1] end as last_id"),
        ],
    ),
    "rotation looks at no row": (Consumers, SEEN_IN_HISTORIES["rotation looks at no row"][1]),
    "what lapsed goes out in one piece": (
        Workers,
        [
            (
                "v_piece := case when v_lapsed and p_sub.sub_role = 'pool' then pgque._redelivery_size(v_rows[1].ev_receives, v_attempts, p_max) else p_max end;",
                "v_piece := p_max;",
            )
        ],
    ),
    "a lease that is extended ends from now": (
        Workers,
        [
            (
                "v_until := case when p_extend then greatest(v_state.until, v_now) else v_now end + p_span;",
                "v_until := v_now + p_span;",
            )
        ],
    ),
    "who takes over leaves the batch id": (
        Workers,
        SEEN_IN_HISTORIES["who takes over leaves the batch id"][1],
    ),
    "a hand-out does not seal the body": (
        Workers,
        SEEN_IN_HISTORIES["a hand-out does not seal the body"][1],
    ),
}
