"""What a send costs and whom it stops: max_depth with many consumers, first keys, batches with many keys."""

from __future__ import annotations

from collections.abc import Callable

from sql.helpers import Connection, configure, drain, forced_tick, offer, refused, rotate, send, value

NO_LOOK = """
create or replace function pgque._oldest_need(p_sub int) returns pgque.position
language plpgsql as $$ begin raise 'a send looks at every consumer'; end $$
"""


def test_far_from_the_limit_a_send_looks_at_no_consumer(pool: Connection) -> None:
    configure(pool, "q", max_depth=100)
    offer(pool, "q", 10)
    pool.execute(NO_LOOK)
    for _ in range(80):
        send(pool, "q")


def test_a_send_below_the_limit_postpones_no_rotation(
    pool: Connection, own_dsn: str, transaction: Callable[..., Connection]
) -> None:
    configure(pool, "q", max_depth=100)
    for _ in range(3):
        offer(pool, "q", 1)
        drain(pool, "q")
        forced_tick(pool, "q")
        drain(pool, "q")
        assert rotate(pool, "q") == 1
    sender = transaction(dsn=own_dsn)
    send(sender, "q")
    forced_tick(pool, "q")
    drain(pool, "q")
    assert rotate(pool, "q") == 1
    sender.commit()


def test_delayed_messages_count_below_the_oldest_tick(pool: Connection) -> None:
    configure(pool, "q", max_depth=3)
    value(pool, "select pgque.send('q', 't', 'x', delay => '1 hour')")
    for _ in range(2):
        offer(pool, "q", 1)
    refused("PQ003", send, pool, "q")
    drain(pool, "q")
    send(pool, "q")
    send(pool, "q")
    refused("PQ003", send, pool, "q")
