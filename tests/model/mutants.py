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
                "        v_item.ev_retry := coalesce(v_item.ev_retry, 0) + 1;",
                "        v_item.ev_retry := coalesce(v_item.ev_retry, 0);",
            )
        ],
    ),
    "an open batch comes again with what was settled": (
        Consumers,
        [("    v_and := pgque._unsettled_condition(v_batch);", "    v_and := '';")],
    ),
    "a slice ends one message too late": (
        Consumers,
        [
            (
                "  v_batch.pos_last_id := v_next_id - 1;\n  v_batch.pos_done_count := v_batch.pos_done_count + v_count;\n  if cardinality",
                "  v_batch.pos_last_id := v_next_id;\n  v_batch.pos_done_count := v_batch.pos_done_count + v_count;\n  if cardinality",
            )
        ],
    ),
    "rotation looks at no row": (Consumers, SEEN_IN_HISTORIES["rotation looks at no row"][1]),
    "what lapsed goes out in one piece": (
        Workers,
        [
            (
                "v_piece := case when lapsed then pgque._piece(v_rows[1].ev_receives, p_queue.queue_max_receive_attempts, p_max) else p_max end;",
                "v_piece := p_max;",
            )
        ],
    ),
    "a lease that is extended ends from now": (
        Workers,
        [
            (
                "v_until := greatest(coalesce(v_state.until, v_lease.pos_until), pgque.clock()) + $2;",
                "v_until := pgque.clock() + $2;",
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
