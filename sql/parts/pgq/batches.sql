-- ---------------------------------------------------------------------------
-- batches: PgQ's way to receive
-- ---------------------------------------------------------------------------

-- Opens a batch, PgQ's way: messages in the retry queue that are due, else the next
-- window (see _next_window), or the rest of one that was begun, by receive() or by a batch
-- of max_window messages.  The id of an open batch is returned again.  Null if nothing is
-- due and there is no further tick.  Messages that receive() would not deliver are left
-- out, and bodies are final from here on, since a client may read the batch only when it
-- finishes it.  With a worker, a subconsumer, the batch belongs to that worker.
create or replace function pgque._open_batch(
  queue_name text, consumer_name text, worker text, min_lag interval, min_count int, min_interval interval, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_turn   record := pgque._begin_delivery($1, $2, 1, $3, null, caller, null);
  v_sub    pgque.subscriber := v_turn.sub;
  v_queue  pgque.queue := v_turn.queue;
  v_pos    pgque.position := v_turn.pos;
  v_max    bigint := nullif(v_queue.queue_max_window, 0);
  v_token  bigint;
  v_count  bigint := 0;
begin
  if v_sub.sub_id is null or v_turn.open is not null then
    return v_turn.open;
  end if;
  v_token := pgque._new_batch_id(v_pos);
  if v_turn.due then
    v_pos.pos_shelf := pgque._lease_retries(v_queue, v_sub, v_token, least(10000, v_max), $3, v_turn.until, p_from => lower(v_pos.pos_due));
  end if;
  if v_pos.pos_shelf = 0 then
    if v_pos.pos_done_id is null then
      v_pos := pgque._next_window(v_pos, v_queue, $4, $5, $6);
      if v_pos.pos_next_tick is null then
        perform pgque._store_delivery(v_sub, v_queue, v_pos, v_turn.leaf, 0, null, null, null, v_turn.changed);
        return null;
      end if;
    end if;
    v_pos.pos_last_id := case when v_max is not null then
      pgque._cut(v_queue.queue_id, v_pos, pgque._slice_condition(v_sub.sub_id, v_pos.pos_done_id, null), v_max) end;
    -- The number of messages is not known yet.
    v_pos.pos_done_count := case when v_pos.pos_last_id is null then greatest(v_pos.pos_next_event_seq - v_pos.pos_event_seq, 1) else v_max end;
    v_count := v_pos.pos_done_count;
    if pgque._must_choose(v_sub, v_pos) then
      perform pgque._choose(v_queue, v_sub, v_pos, v_token, 2147483647, null::bigint);
    end if;
  end if;
  perform pgque._store_delivery(v_sub, v_queue, v_pos, v_turn.leaf, v_count, v_token, $3, v_turn.until, true);
  return v_token;
end
$$;

-- Opens a batch and returns its two ticks too.  To look up these costs as much as half of
-- opening the batch, so next_batch() does not.
create or replace function pgque._next_batch(
  queue_name text, consumer_name text, worker text, min_lag interval, min_count int, min_interval interval, caller pgque.caller default current_user,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub    pgque.subscriber;
  v_lease  pgque.position;
  v_prev   pgque.tick;
  v_cur    pgque.tick;
begin
  batch_id := pgque._open_batch($1, $2, $3, $4, $5, $6, caller);
  if batch_id is null then
    return;
  end if;
  v_sub := pgque._batch_owner(batch_id);
  v_lease := pgque._lease(v_sub.sub_id, batch_id);
  v_prev := pgque._tick(v_sub.sub_queue, v_lease.pos_tick);
  v_cur := pgque._tick(v_sub.sub_queue, pgque._end_tick(v_lease));
  cur_tick_id := v_cur.tick_id;
  cur_tick_time := v_cur.tick_time;
  cur_tick_event_seq := v_cur.tick_event_seq;
  prev_tick_id := v_prev.tick_id;
  prev_tick_time := v_prev.tick_time;
  prev_tick_event_seq := v_prev.tick_event_seq;
end
$$;

-- Opens the window of a batch.  Without conditions it ends as that of receive() does, at
-- the furthest tick up to ticker_max_count events (max_window if that is less), so that a
-- consumer that lags by many small ticks catches up.  A condition on the size chooses the
-- nearest tick that fits: its caller decides how big windows are.
create or replace function pgque._next_window(
  p_pos pgque.position, p_queue pgque.queue, p_min_lag interval, p_min_count int, p_min_interval interval
) returns pgque.position
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_max    bigint := least(p_queue.queue_ticker_max_count, nullif(p_queue.queue_max_window, 0));
  v_sized  boolean := p_min_count is not null or p_min_interval is not null;
  v_prev   pgque.tick;
  v_tick   pgque.tick;
begin
  p_pos := pgque._with_window(p_pos, null);
  if p_min_lag is null and not v_sized then
    return pgque._open_window(p_pos, p_queue.queue_id, v_max);
  end if;
  v_prev := pgque._tick(p_queue.queue_id, p_pos.pos_tick);
  for v_tick in
    execute pg_catalog.format(
      'select t.* from (%s) t where t.tick_id > $1'
      ' and ($2 is null or t.tick_time <= $3 - $2)'
      ' and (($4 is null and $5 is null) or t.tick_event_seq >= $6 + $4 or t.tick_time >= $7 + $5)'
      ' order by t.tick_id limit $8', pgque._ticks_sql(p_queue.queue_id))
    using p_pos.pos_tick, p_min_lag, pgque.clock(), p_min_count, p_min_interval, v_prev.tick_event_seq, v_prev.tick_time,
      case when v_sized then 1 else 100 end
  loop
    exit when p_pos.pos_next_tick is not null and v_tick.tick_event_seq > p_pos.pos_event_seq + v_max;
    p_pos := pgque._with_window(p_pos, v_tick);
  end loop;
  return p_pos;
end
$$;

-- Returns the tick that ends a batch.  A batch from the retry queue ends at the tick
-- where it began.
create or replace function pgque._end_tick(p_lease pgque.position) returns bigint
language sql immutable as $$ select case when p_lease.pos_fresh > 0 or p_lease.pos_shelf = 0 then p_lease.pos_next_tick else p_lease.pos_tick end $$;

-- There is no argument caller: with it, a call with a subconsumer and six nulls would
-- be ambiguous.
create or replace function pgque.next_batch_custom(
  queue_name text, consumer_name text, min_lag interval, min_count int, min_interval interval,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language sql as $$ select * from pgque._next_batch($1, $2, null, $3, $4, $5) $$;
comment on function pgque.next_batch_custom(text, text, interval, int, interval) is
  'Opens a batch with conditions on its end; NULL is no condition. min_lag: the batch ends at a tick that is at least this old. min_count, '
  'min_interval: it ends at the nearest tick so that it spans at least this number of messages or this time. The result is batch_id (NULL if there '
  'is none), and the ids, times and event sequences of the batch''s two ticks. Errors: PQ001 no such queue; PQ005 the consumer has workers; PQ011 '
  'not subscribed.';

create or replace function pgque.next_batch_info(
  queue_name text, consumer_name text,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language sql as $$ select * from pgque._next_batch($1, $2, null, null, null, null) $$;
comment on function pgque.next_batch_info(text, text) is
  'Opens the next window between two ticks as a batch; see next_batch(). The result is batch_id (NULL if there is none), and the ids, times and '
  'event sequences of the batch''s two ticks. If the batch is a part of a window (see max_window), the ticks are those of the window. Errors: PQ001 '
  'no such queue; PQ005 the consumer has workers; PQ011 not subscribed.';

create or replace function pgque.next_batch(queue_name text, consumer_name text) returns bigint
language sql as $$ select pgque._open_batch($1, $2, null, null, null, null) $$;
comment on function pgque.next_batch(text, text) is
  'Opens the next window between two ticks as a batch, and returns its id, or NULL if there is no further tick and no retry is due. A consumer that '
  'lags gets a window of several ticks, up to ticker_max_count events; a single tick may have more, unless max_window is set: then a larger window '
  'becomes several batches. Retries that are due come first, at most 10,000 in a batch of their own, whose two ticks are the same. While a batch is '
  'open, its id is returned again. A batch may be empty. Read it with get_batch_events() and close it with finish_batch(). Errors: PQ001 no such '
  'queue; PQ005 the consumer has workers; PQ011 not subscribed.';

-- Returns the delivery of an open batch, without a lock; PQ012 if it is not open.
create or replace function pgque._open_lease(p_sub pgque.subscriber, p_batch bigint) returns pgque.position
language plpgsql as $$
begin
  if not pgque._is_open(p_sub, p_batch) then
    perform pgque._no_batch(p_batch);
  end if;
  return pgque._lease(p_sub.sub_id, p_batch);
end
$$;

-- Returns the query of an open batch: all of it, or, if messages may be left out when
-- it is opened, or cancelled since, those without an outcome.
create or replace function pgque._open_sql(p_batch bigint) returns text
language plpgsql as $$
declare
  v_sub    pgque.subscriber := pgque._batch_owner(p_batch);
  v_state  record;
begin
  select s.* into v_state from pgque._states(v_sub.sub_id, array[p_batch]) s;
  if v_state.place = 'log' and exists (
    select from pgque.queue q
    where q.queue_id = v_sub.sub_queue and not q.queue_keyed and not q.queue_expiring and not pgque._noted(q.queue_id, '{key,ttl,cancelled}'))
  then
    return pgque._slice_sql(v_sub, v_state.lease);
  end if;
  perform pgque._open_lease(v_sub, p_batch);
  return pgque._batch_sql(v_sub, p_batch);
end
$$;

create or replace function pgque.get_batch_events(
  batch_id bigint, caller pgque.caller default current_user,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query execute format('select %s from (%s) e order by e.ev_id', pgque._event_columns(), pgque._open_sql(pgque._batch_for(caller, $1)));
end
$$;
comment on function pgque.get_batch_events(bigint, pgque.caller) is
  'Returns the events of an open batch in the order of their ids, as stored. Errors: PQ012 the batch is not open.';

-- Returns the query of an open batch for roles that may read the leaves themselves.
create or replace function pgque._cursor_sql(p_batch bigint) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return pgque._open_sql(p_batch);
end
$$;

-- extra_where runs with the caller's rights and sees pg_catalog and pgque only.
create or replace function pgque.get_batch_cursor(
  batch_id bigint, cursor_name text, quick_limit int, extra_where text,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_cursor  refcursor := $2;
begin
  if coalesce($2, '') = '' or ($3 >= 0) is not true then
    perform pgque._fail('PQ005', format('a cursor over batch %s needs a name and a count that is not negative', coalesce($1::text, 'null')),
      'Pass any name that is free in this transaction, and FETCH from it.');
  end if;
  open v_cursor for execute format('select %s from (%s) e where true %s order by e.ev_id',
    pgque._event_columns(), pgque._cursor_sql($1), coalesce('and (' || $4 || ')', ''));
  return query execute format('fetch forward %s from %I', $3, $2);
end
$$;
comment on function pgque.get_batch_cursor(bigint, text, int, text) is
  'Opens a cursor over an open batch and returns its first quick_limit events. Fetch the rest from cursor_name in the same transaction. extra_where: '
  'an SQL condition on the event columns; never build it from untrusted input. Errors: PQ012 the batch is not open.';

create or replace function pgque.get_batch_cursor(
  batch_id bigint, cursor_name text, quick_limit int,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language sql as $$ select * from pgque.get_batch_cursor($1, $2, $3, null) $$;
comment on function pgque.get_batch_cursor(bigint, text, int) is
  'Opens a cursor over an open batch and returns its first quick_limit events. Fetch the rest from cursor_name in the same transaction. Errors: '
  'PQ012 the batch is not open.';

create or replace function pgque.get_batch_info(
  batch_id bigint, caller pgque.caller default current_user,
  out queue_name text, out consumer_name text, out batch_start timestamptz, out batch_end timestamptz,
  out prev_tick_id bigint, out tick_id bigint, out lag interval, out seq_start bigint, out seq_end bigint
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._batch_owner(pgque._batch_for(caller, $1));
  v_lease  pgque.position := pgque._open_lease(v_sub, $1);
  v_prev   pgque.tick := pgque._tick(v_sub.sub_queue, v_lease.pos_tick);
  v_cur    pgque.tick := pgque._tick(v_sub.sub_queue, pgque._end_tick(v_lease));
begin
  queue_name := (select q.queue_name from pgque.queue q where q.queue_id = v_sub.sub_queue);
  consumer_name := pgque._subscriber_name(v_sub) || coalesce('.' || v_lease.pos_worker, '');
  batch_start := v_prev.tick_time;
  batch_end := v_cur.tick_time;
  prev_tick_id := v_prev.tick_id;
  tick_id := v_cur.tick_id;
  lag := pgque.clock() - v_cur.tick_time;
  seq_start := v_prev.tick_event_seq;
  seq_end := v_cur.tick_event_seq;
end
$$;
comment on function pgque.get_batch_info(bigint, pgque.caller) is
  'Returns what an open batch spans: queue, consumer, times and ids of its two ticks, their event sequences, and lag, the age of its end. For a part of a window (see max_window) '
  'these are of the window. Errors: '
  'PQ012 the batch is not open.';
