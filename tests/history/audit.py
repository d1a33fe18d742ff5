"""A trail of every change of what waits and of dead letters, for a message that got lost (PGQUE_HISTORY_AUDIT=1).

Clients see answers; this says which session changed which row, in which transaction and by which call.
"""

from __future__ import annotations

import os

from history.record import Connection

WANTED = bool(os.environ.get("PGQUE_HISTORY_AUDIT"))

SCRIPT = """
    create table trail (
      at timestamptz default clock_timestamp(), who text default current_setting('application_name'),
      xid xid8 default pg_current_xact_id(), call text default left(current_query(), 100),
      op text, tab text, owner int, id bigint, batch bigint, due timestamptz, receives int, retry int);
    create function trail() returns trigger language plpgsql security definer set search_path = public, pg_catalog as $$
    declare
      v_row  jsonb := to_jsonb(case when tg_op = 'DELETE' then old else new end);
    begin
      insert into trail (op, tab, owner, id, batch, due, receives, retry)
      select tg_op, tg_table_name, coalesce(r.ev_owner, r.dl_consumer_id), r.ev_id, r.ev_batch, r.ev_retry_after,
        coalesce(r.ev_receives, r.dl_receives), r.ev_retry
      from jsonb_to_record(v_row) r (ev_owner int, dl_consumer_id int, ev_id bigint, ev_batch bigint,
        ev_retry_after timestamptz, ev_receives int, dl_receives int, ev_retry int);
      return null;
    end $$;
    create trigger trail after insert or update or delete on pgque.retry_queue for each row execute function trail();
    create trigger trail after insert or update or delete on pgque.dead_letter for each row execute function trail();
"""


def follow(conn: Connection) -> None:
    """Begin the trail, if it is wanted."""
    if WANTED:
        conn.execute(SCRIPT.encode())


def trail(conn: Connection, msg_id: int) -> list[str]:
    """Tell what was done to messages with this id."""
    if not WANTED:
        return []
    query = "select row(t.*)::text from trail t where t.id = %s order by t.at"
    return [f"TRAIL {row[0]}" for row in conn.execute(query, (msg_id,))]
