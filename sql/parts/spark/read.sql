-- ---------------------------------------------------------------------------
-- read: windows without side effects, for Spark and others that keep offsets
-- ---------------------------------------------------------------------------

-- A tick id says nothing without the queue that it is of.  A queue that is dropped and
-- created again begins with tick 1.  Two copies of a queue, restored from one dump, have
-- one queue_uid and then ticks of their own with equal ids.  So a reader that keeps tick
-- ids outside of the database keeps the incarnation beside them, and each function below
-- compares it, in the statement that uses the tick: the queue may be dropped and created
-- between two calls.
create or replace function pgque._incarnation(p_queue pgque.queue) returns uuid
language sql immutable as $$ select coalesce(p_queue.queue_incarnation, p_queue.queue_uid) $$;

-- Returns the queue, or raises PQ015 if it is another incarnation than the caller's.
-- Null is not compared: callers of earlier versions keep no incarnation.
create or replace function pgque._need_incarnation(p_queue pgque.queue, p_incarnation uuid) returns pgque.queue
language plpgsql as $$
begin
  if p_incarnation <> pgque._incarnation(p_queue) then
    perform pgque._fail('PQ015', pg_catalog.format('queue %I was created again or loaded from a dump, and its ticks begin anew', p_queue.queue_name),
      'Begin again where the consumer stands (Spark: with a new checkpoint): the stored tick is of the former queue.',
      pg_catalog.format('The tick is of incarnation %s, and the queue is incarnation %s.', p_incarnation, pgque._incarnation(p_queue)));
  end if;
  return p_queue;
end
$$;

create or replace function pgque.queue_incarnation(queue_name text, caller pgque.caller default current_user) returns uuid
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
begin
  if v_queue.queue_restored and current_setting('transaction_read_only') = 'off' then
    -- Otherwise the next tick would change what this call returns.
    perform pgque._rebase(v_queue.queue_id);
    v_queue := pgque._queue($1, caller, 'consume');
  end if;
  return pgque._incarnation(v_queue);
end
$$;
comment on function pgque.queue_incarnation(text, pgque.caller) is
  'Returns the identity of the queue that its tick ids belong to. Store it beside every tick id that you keep outside of the database, and pass both: if the '
  'queue was dropped and created again since, or loaded from a dump, its ticks began anew, and the call fails instead of reading other messages. rename_queue() and upgrades keep the '
  'incarnation. So do copies of a whole database (create database … template) or server: each continues with the same ids, so read a copy from its own checkpoints. A queue '
  'that was loaded from a dump is repaired first. Errors: PQ001 no such queue; 25000 in a REPEATABLE READ or SERIALIZABLE transaction, if the queue is to be repaired.';

-- Refuses a tick that is newer than all of the queue with PQ015.
create or replace function pgque._not_future_tick(p_queue pgque.queue, p_tick_id bigint) returns void
language plpgsql as $$
declare
  v_last  bigint := (pgque._last_tick(p_queue)).tick_id;
begin
  if p_tick_id > v_last then
    perform pgque._fail('PQ015', pg_catalog.format('tick not found: %s of queue %I, whose newest tick is %s', p_tick_id, p_queue.queue_name, v_last),
      'Begin again where the consumer stands (Spark: with a new checkpoint): the tick is of a queue that was dropped, or of a later state than the one that was '
      'restored. A standby may lag: repeat the call there, or ask the primary.');
  end if;
end
$$;

-- Returns a stored tick, or raises PQ015.
create or replace function pgque._need_tick(p_queue pgque.queue, p_tick_id bigint) returns pgque.tick
language plpgsql as $$
declare
  v_tick  pgque.tick := pgque._tick(p_queue.queue_id, p_tick_id);
  v_last  bigint;
begin
  if v_tick.tick_id is null then
    perform pgque._not_future_tick(p_queue, p_tick_id);
    v_last := (pgque._last_tick(p_queue)).tick_id;
    perform pgque._fail('PQ015', pg_catalog.format('tick not found: %s of queue %I; it has ', coalesce(p_tick_id::text, 'null'), p_queue.queue_name)
        -- A snapshot from before all its tables were emptied
        || case when v_last is null then 'none that this transaction sees' else pg_catalog.format('ticks %s to %s', (pgque._find_tick(p_queue, 'earliest')).tick_id, v_last) end,
      'Start at a later tick. To keep ticks and events until you have read them, subscribe a consumer: rotation deletes those that all consumers have passed.');
  end if;
  return v_tick;
end
$$;

create or replace function pgque.tick_for(queue_name text, start_at text, incarnation uuid default null, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
begin
  if $2 ~ '^[0-9]{1,19}$' and $2::numeric <= 9223372036854775807 then
    return (pgque._need_tick(v_queue, $2::bigint)).tick_id;
  end if;
  return (pgque._find_tick(v_queue, $2)).tick_id;
end
$$;
comment on function pgque.tick_for(text, text, uuid, pgque.caller) is
  'Returns the id of a tick. start_at: earliest, latest, an id, or a timestamp (the last tick before it). incarnation: see queue_incarnation(). Errors: PQ001 no '
  'such queue; PQ005 no such start_at; PQ015 the tick is not stored, or the queue is another incarnation.';

create or replace function pgque.next_tick(
  queue_name text, after_tick bigint, max_events bigint default null, max_ticks int default null, upto bigint default null, incarnation uuid default null,
  caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_after  pgque.tick;
  v_tick   pgque.tick;
  v_last   bigint;
  v_next   bigint;
begin
  if least($3, $4) < 1 then
    perform pgque._fail('PQ005', format('max_events and max_ticks must be at least 1, for queue %I', v_queue.queue_name),
      'Leave them out, or pass null, for no limit.');
  end if;
  v_after := pgque._need_tick(v_queue, $2);
  v_last := (pgque._last_tick(v_queue)).tick_id;
  if v_last <= $2 then
    return null;
  elsif coalesce($3, $4, $5) is null then
    return v_last;
  end if;
  for v_tick in
    execute format('select t.* from (%s) t where t.tick_id > $1 and t.tick_id <= $2 order by t.tick_id limit $3', pgque._ticks_sql(v_queue.queue_id))
    using $2, least(v_last, $5), $4
  loop
    exit when v_tick.tick_event_seq - v_after.tick_event_seq > $3 and v_next is not null;
    v_next := v_tick.tick_id;
  end loop;
  return v_next;
end
$$;
comment on function pgque.next_tick(text, bigint, bigint, int, bigint, uuid, pgque.caller) is
  'Returns the tick that ends the next piece of work after after_tick, or NULL if there is no further tick. The piece is whole ticks: at least '
  'one, at most max_ticks, none after upto, and as many as hold max_events events. One tick can hold more than max_events. incarnation: see queue_incarnation(). '
  'Errors: PQ001 no such queue; PQ005 a limit is below 1; PQ015 the tick is not stored, or the queue is another incarnation.';

create or replace function pgque.next_window(
  queue_name text, after_tick bigint, after_id bigint default null, max_events bigint default null, max_ticks int default null, upto bigint default null,
  consumer_name text default null, incarnation uuid default null, cut boolean default false, caller pgque.caller default current_user,
  out to_tick bigint, out upto_id bigint
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_max    bigint := case when v_queue.queue_max_window > 0 then least($4, v_queue.queue_max_window) end;
  v_from   pgque.tick;
  v_to     pgque.tick;
begin
  if $3 is null then
    to_tick := pgque.next_tick($1, $2, coalesce(v_max, $4), $5, $6, incarnation, caller);
  elsif $6 is null or least($4, $6 - $2) < 1 then
    perform pgque._fail('PQ005', format('next_window needs a limit of at least 1, and with after_id the tick that ends the window, for queue %I', v_queue.queue_name),
      'Pass what the call before returned: its upto_id as after_id, and its to_tick as upto.');
  else
    to_tick := (pgque._need_tick(v_queue, $6)).tick_id;
  end if;
  if to_tick is null or not cut and v_max is null then
    return;
  end if;
  v_from := pgque._need_tick(v_queue, $2);
  v_to := pgque._tick(v_queue.queue_id, to_tick);
  if v_max is null and v_to.tick_event_seq - v_from.tick_event_seq > 2 * $4 then
    v_max := $4;
  end if;
  if v_max is not null then
    upto_id := pgque._cut(v_queue.queue_id, pgque._part_of_window(v_from, v_to, $3, null), pgque._row_condition($1, $7, $3, null), v_max);
  end if;
end
$$;
comment on function pgque.next_window(text, bigint, bigint, bigint, int, bigint, text, uuid, boolean, pgque.caller) is
  'Returns where the next piece of work ends, for a reader that has read up to after_tick. to_tick: the tick that ends the piece; NULL if there is '
  'no further tick. upto_id: NULL for whole ticks. With a max_window of the queue, a piece has at most this number of events, and at most '
  'max_events. A larger window is cut: the piece has its ids up to upto_id, and the next call continues it with the same after_tick, this upto_id as '
  'after_id, and this to_tick as upto. cut: without max_window, a window is cut if it has more than twice max_events, as one tick may. Read a piece '
  'with read_window(queue_name, after_tick, to_tick, after_id => …, upto_id => …). It has more events only if several have its last id (bodies of a '
  'key). consumer_name: its retries count as well. incarnation: see queue_incarnation(). Errors: PQ001 no such queue; PQ005 a limit is below 1, or '
  'after_id without upto; PQ011 not subscribed; PQ015 a tick is not stored, or the queue is another incarnation.';

-- Returns a part of the window between two ticks as a position: the ids above p_after, up to
-- p_upto.
create or replace function pgque._part_of_window(p_from pgque.tick, p_to pgque.tick, p_after bigint, p_upto bigint) returns pgque.position
language plpgsql as $$
declare
  v_pos  pgque.position;
begin
  v_pos := pgque._with_window(pgque._at_tick(v_pos, p_from), p_to);
  v_pos.pos_done_id := p_after;
  v_pos.pos_last_id := p_upto;
  return v_pos;
end
$$;

-- Returns the condition for the rows of a window that a reader of offsets gets: those for
-- every consumer and, with a consumer, its retries, with ids in (p_after, p_upto].  Each body
-- of a key is a row (owner 0), with the id of the first.
create or replace function pgque._row_condition(p_queue text, p_consumer text, p_after bigint, p_upto bigint) returns text
language plpgsql as $$
begin
  return case when p_consumer is null then '(e.ev_owner is null or e.ev_owner = 0)'
      else pg_catalog.format('(e.ev_owner is null or e.ev_owner in (0, %s))', (pgque._subscriber(p_queue, p_consumer)).sub_id) end
    || coalesce(' and e.ev_id > ' || p_after, '') || coalesce(' and e.ev_id <= ' || p_upto, '');
end
$$;

-- The same window is split in the same way as long as its ticks are stored: by their
-- event sequences alone.
create or replace function pgque.split_window(
  queue_name text, inout from_tick bigint, inout to_tick bigint, inout parts int, incarnation uuid default null, out part int,
  inout after_id bigint default null, inout upto_id bigint default null, caller pgque.caller default current_user
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_from   pgque.tick;
  v_to     pgque.tick;
  v_share  bigint;
begin
  if ($2 <= $3 and $4 >= 1) is not true then
    perform pgque._bad_window(v_queue.queue_name, $2, $3);
  end if;
  v_from := pgque._need_tick(v_queue, $2);
  v_to := pgque._need_tick(v_queue, $3);
  -- The share of events of one piece.  A run is the ticks that begin within one share; a
  -- part of a window is one run.  A run makes as many pieces as shares pass until the next
  -- run.  The first piece of a run has no lower bound and the last no upper one: the
  -- window also has ids that were drawn before its first tick.
  v_share := greatest((v_to.tick_event_seq - v_from.tick_event_seq + $4 - 1) / $4, 1);
  return query execute format(
    $q$
    select r.from_tick, r.to_tick, p.parts, g.part,
      case g.part when 0 then $6 else p.lo + p.step * g.part end, case g.part when p.parts - 1 then $7 else p.lo + p.step * (g.part + 1) end
    from (
      select min(t.prev) as from_tick, max(t.tick_id) as to_tick, min(t.prev_seq) as lo, max(t.tick_event_seq) as hi,
        coalesce(lead(t.share) over (order by t.share), ($4 + $5 - 1) / $5) - t.share as shares
      from (
        -- A tick that begins at the end belongs to the last share.
        select t.*, case when coalesce($6, $7) is null then least(t.prev_seq - $3, greatest($4 - 1, 0)) / $5 else 0 end as share
        from (
          select t.tick_id, t.tick_event_seq, lag(t.tick_id, 1, $1) over w as prev, lag(t.tick_event_seq, 1, $3) over w as prev_seq
          from (%s) t
          where t.tick_id > $1 and t.tick_id <= $2
          window w as (order by t.tick_id)
        ) t
      ) t
      group by t.share
    ) r
    cross join lateral (select greatest(r.lo, $6) as lo, least(r.hi, $7) as hi) i
    cross join lateral (select greatest(case when coalesce($6, $7) is null then r.shares else least(i.hi - i.lo, $8) end, 1)::int) n (parts)
    cross join lateral (select n.parts, i.lo, greatest(i.hi - i.lo, 0) / n.parts as step) p
    cross join lateral generate_series(0, p.parts - 1) g (part)
    order by r.from_tick, g.part
    $q$, pgque._ticks_sql(v_queue.queue_id))
  using $2, $3, v_from.tick_event_seq, v_to.tick_event_seq - v_from.tick_event_seq, v_share, after_id, upto_id, $4;
end
$$;
comment on function pgque.split_window(text, bigint, bigint, int, uuid, bigint, bigint, pgque.caller) is
  'Splits the window between two ticks into at most parts pieces with about as many events each: runs of ticks, and ranges of ids of a tick with many events. Each row '
  'has the arguments of a call of read_window(): from_tick, to_tick, after_id and upto_id. Earlier versions of the client use parts and part (a remainder of the ids) '
  'instead of the ids: a reader needs one of the two. after_id, upto_id: split only this part of the window; see next_window(). incarnation: see queue_incarnation(). '
  'Errors: PQ001 no such queue; PQ005 no such window; PQ015 a tick is not stored, or the queue is another incarnation.';

-- Refuses a window, or a part of one, with PQ005.
create or replace function pgque._bad_window(p_queue text, p_from bigint, p_to bigint) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ005', pg_catalog.format('invalid window of queue %I: ticks %s to %s', p_queue, coalesce(p_from::text, 'null'), coalesce(p_to::text, 'null')),
    'Pass a from_tick up to to_tick, at least 1 for parts, and a part from 0 to parts - 1.');
end
$$;

-- Returns the query for the rows that became visible between two ticks.  It returns the
-- same rows whenever it runs.  So a message's ttl is compared with the window's end and not
-- with the clock.
create or replace function pgque._window_sql(
  p_queue text, p_from bigint, p_to bigint, p_consumer text, p_types text[], p_parts int, p_part int, p_incarnation uuid, p_caller name,
  p_after bigint default null, p_upto bigint default null, p_columns text[] default null, p_ordered boolean default true, p_by_key boolean default false
) returns text
language plpgsql set datestyle = 'ISO' as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue(p_queue, p_caller, 'consume'), p_incarnation);
  v_from   pgque.tick;
  v_to     pgque.tick;
  v_cond   text;
begin
  if (p_from <= p_to and p_parts >= 1 and p_part between 0 and p_parts - 1) is not true then
    perform pgque._bad_window(p_queue, p_from, p_to);
  end if;
  v_from := pgque._need_tick(v_queue, p_from);
  v_to := pgque._need_tick(v_queue, p_to);
  v_cond := pg_catalog.format('(e.ev_expires is null or e.ev_expires > %L::timestamptz) and ', v_to.tick_time)
    || pgque._row_condition(p_queue, p_consumer, p_after, p_upto)
    || case when p_types is null then '' else pg_catalog.format(' and e.ev_type = any (%L::text[])', pg_catalog.array_remove(p_types, null)) end
    || case when p_parts = 1 then '' else pg_catalog.format(' and %s %% %s = %s', case when p_by_key
      then '(coalesce(hashtextextended(coalesce(e.ev_key, e.ev_extra1) collate "C", 0), e.ev_id) & 9223372036854775807)' else 'e.ev_id' end, p_parts, p_part) end;
  -- The bodies of a key have one id: the newest comes last, and then a retry.
  return pg_catalog.format('select %s from (%s) e', pgque._read_columns(v_queue.queue_name, p_columns),
      pgque._rows_of_window_sql(v_queue.queue_id, pgque._part_of_window(v_from, v_to, p_after, p_upto), v_cond))
    || case when p_ordered then ' order by e.ev_id, coalesce(e.ev_owner, 0) > 0, coalesce(e.ev_retry, 0)' else '' end;
end
$$;

-- Returns the list of what a reader selects from rows e: columns of read_window(), or what
-- Spark makes of them.  A query that computes it itself would need the rows of a function,
-- which the server stores before it returns the first.
create or replace function pgque._read_columns(p_queue text, p_columns text[]) returns text
language plpgsql as $$
declare
  v_found    text;
  v_unknown  text;
begin
  if p_columns is null then
    return pgque._event_columns();
  end if;
  select pg_catalog.string_agg(coalesce(m.what || ' as ' || c.name, 'e.' || v.name), ', ' order by c.n),
    min(coalesce(c.name, 'null')) filter (where coalesce(m.name, v.name) is null)
  into v_found, v_unknown
  from pg_catalog.unnest(p_columns) with ordinality c (name, n)
  left join (values
    ('key', 'coalesce(e.ev_key, e.ev_extra1)'),
    ('payload', $q$coalesce(e.ev_bytes, pg_catalog.convert_to(e.ev_data, 'UTF8'))$q$),
    ('header_names', 'case when e.ev_headers is not null then array(select h.key from pg_catalog.jsonb_each_text(e.ev_headers) h) end'),
    ('header_values', 'case when e.ev_headers is not null then array(select h.value from pg_catalog.jsonb_each_text(e.ev_headers) h) end')
  ) m (name, what) on m.name = c.name
  left join pg_catalog.regexp_split_to_table(pg_catalog.replace(pgque._event_columns(), 'e.', ''), ', ') v (name) on v.name = c.name;
  if v_found is null or v_unknown is not null then
    perform pgque._fail('PQ005', pg_catalog.format('no such column: %s, to read from queue %I', coalesce(v_unknown, 'none given'), p_queue),
      pg_catalog.format('Choose from %s, key, payload, header_names and header_values, or leave the argument columns out for those of read_window().',
        pg_catalog.replace(pgque._event_columns(), 'e.', '')));
  end if;
  return v_found;
end
$$;

-- Returns how many rows one FETCH should get: these are in the memory of the server and of
-- the client at once.  Rows are below 2 kB, or compressed to that, if no table has TOAST.
create or replace function pgque._rows_to_fetch(p_queue_id int) returns int
language sql stable as $$
  select case when bool_or(pg_catalog.pg_relation_size(c.reltoastrelid) > 0) then 200 else 2000 end
  from pg_catalog.generate_series(0, 2) n
  join pg_catalog.pg_class c on c.oid = pg_catalog.to_regclass(pg_catalog.format('pgque.event_%s_%s', p_queue_id, n))
$$;

-- Not stable: the tick may be younger than the calling statement.
create or replace function pgque.read_window(
  queue_name text, from_tick bigint, to_tick bigint, consumer_name text default null, types text[] default null,
  parts int default 1, part int default 0, incarnation uuid default null, after_id bigint default null, upto_id bigint default null,
  caller pgque.caller default current_user,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set work_mem = '64MB' set jit = off as $$
begin
  return query execute pgque._window_sql($1, $2, $3, $4, $5, $6, $7, incarnation, caller, after_id, upto_id);
end
$$;
comment on function pgque.read_window(text, bigint, bigint, text, text[], int, int, uuid, bigint, bigint, pgque.caller) is
  'Returns the events between two ticks in the order of their ids, without side effects. consumer_name: its retries too, if it is read by offsets. types: only events of these '
  'types. parts and part: only ids whose remainder by parts is part. after_id, upto_id: only ids above the first, up to the second; see next_window(). While a consumer stands at from_tick or before, each call returns the same rows. '
  'incarnation: see queue_incarnation(); without it, a queue that was created again can have other events between ticks with these ids. '
  'Errors: PQ001 no such queue; PQ005 no such window; PQ011 not subscribed; PQ015 a tick is not stored, or the queue is another incarnation.';

-- A cursor streams: the rows of a function are all stored before the first is returned.
create or replace function pgque.read_window_cursor(
  cursor_name text, queue_name text, from_tick bigint, to_tick bigint, consumer_name text default null, types text[] default null,
  parts int default 1, part int default 0, incarnation uuid default null, after_id bigint default null, upto_id bigint default null,
  columns text[] default null, ordered boolean default true, by_key boolean default false, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set cursor_tuple_fraction = 1 set work_mem = '64MB' set jit = off as $$
begin
  perform pgque._open_cursor($1, $2, pgque._window_sql($2, $3, $4, $5, $6, $7, $8, incarnation, caller, after_id, upto_id, $12, ordered, by_key));
  return pgque._rows_to_fetch((pgque._queue($2, caller, 'consume')).queue_id);
end
$$;
comment on function pgque.read_window_cursor(text, text, bigint, bigint, text, text[], int, int, uuid, bigint, bigint, text[], boolean, boolean, pgque.caller) is
  'Opens a cursor named cursor_name over the rows of read_window(), and returns how many rows to FETCH at once, in the same transaction: 2000, or '
  '200 if the queue may have rows above 2 kB. It is the fastest way to read a window: the server stores no rows. columns: only these columns of '
  'read_window(), or key (the key or the partition key), payload (as bytes), header_names, header_values. ordered: by id; false is cheaper. A sort '
  'takes up to the work_mem of the session. by_key: parts and part divide the keys instead of the ids, so that each key is in one part; messages '
  'without a key are divided by id. Errors: PQ001 no such queue; PQ005 no such window or column; PQ011 not subscribed; PQ015 a tick is not stored, '
  'or the queue is another incarnation; 42P03 the transaction has a cursor with this name.';

-- Opens a cursor over a query.
create or replace function pgque._open_cursor(p_cursor text, p_queue text, p_sql text) returns void
language plpgsql as $$
declare
  v_cursor  refcursor := p_cursor;
begin
  if coalesce(p_cursor, '') = '' then
    perform pgque._fail('PQ005', pg_catalog.format('a cursor over queue %s needs a name', coalesce(pg_catalog.quote_ident(p_queue), 'null')),
      'Pass any name that is free in this transaction, and FETCH from it.');
  end if;
  open v_cursor no scroll for execute p_sql;
end
$$;

-- Waits for senders that replace a body, as subscribe() does: otherwise the consumer
-- would pass the body that they commit later.
create or replace function pgque.seek(queue_name text, consumer_name text, tick_id bigint, force boolean default false, incarnation uuid default null,
  caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub       pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_queue     pgque.queue;
  v_position  pgque.position;
  v_current   pgque.position;
  v_tick      bigint;
begin
  perform pgque._need_alone(v_sub, $1, $2);
  perform pgque._wait_for_keyed_sends(q)
  from pgque.queue q
  where q.queue_id = v_sub.sub_queue and $3 > (pgque._position(v_sub.sub_id)).pos_tick;
  -- The lock keeps rotation from emptying the table of this tick.
  select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue for share;
  perform pgque._need_incarnation(v_queue, incarnation);
  perform pgque._depth_grows(v_queue.queue_id) where $4;
  v_sub.sub_role := pgque._lock_subscriber(v_sub.sub_id);
  perform pgque._need_alone(v_sub, $1, $2);
  v_position := pgque._position(v_sub.sub_id);
  v_current := pgque._current_position(v_sub, v_position);
  v_tick := v_current.pos_tick;
  -- One that stands at the tick may have received a part of what follows.
  if $3 is null or ($4 is not true and $3 > v_tick) or $4 and ($3 <> v_tick or v_current.pos_done_id is not null or v_current.pos_batch is not null) then
    perform pgque._promote_dead(v_sub, v_queue, v_tick, $3);
    perform pgque._move_to(v_sub, v_position, pgque._need_tick(v_queue, $3));
    -- The move of a running stream is no change by hand.
    perform pgque._record_action('seek', v_queue.queue_name, jsonb_build_object('consumer_name', $2, 'from_tick', v_tick, 'tick_id', $3))
    where pgque._stream_pid(v_sub) is distinct from pg_backend_pid();
    return $3;
  end if;
  -- A stream that commits a tick has read its archive.
  update pgque.subscriber s set sub_history = null where s.sub_id = v_sub.sub_id and s.sub_history is not null;
  return v_tick;
end
$$;
comment on function pgque.seek(text, text, bigint, boolean, uuid, pgque.caller) is
  'Moves a consumer forward to a tick, or with force also back, and returns the tick where it stands. Without force, a tick that it has passed '
  'changes nothing. An open batch is dropped. Messages that stage_dead() noted up to the tick become dead letters. incarnation: see '
  'queue_incarnation(). Errors: PQ001 no such queue; PQ005 the consumer has workers; PQ011 not subscribed; PQ015 the tick is not stored, or the '
  'queue is another incarnation.';

-- With no event before the earliest stored tick, nothing that was sent is missing.
create or replace function pgque.seek_to_time(queue_name text, consumer_name text, at timestamptz, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set datestyle = 'ISO' set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_queue  pgque.queue;
  v_tick   pgque.tick;
begin
  select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue;
  v_tick := pgque._find_tick(v_queue, $3::text);
  if v_tick.tick_time > $3 and v_tick.tick_event_seq > 0 then
    perform pgque._fail('PQ015', format('queue %I has no tick as old as %s: its earliest is from %s', v_queue.queue_name, $3, v_tick.tick_time),
      format('Some messages from before that time may no longer be stored. To replay all that are: select pgque.seek_to_time(%L, %L, %L); '
        'To keep messages for longer after all consumers have finished them, raise rotation_period: they stay for two to three times as long.',
        v_queue.queue_name, $2, v_tick.tick_time));
  end if;
  -- The name may be that of another queue by now.
  return pgque.seek(v_queue.queue_name, $2, v_tick.tick_id, true, pgque._incarnation(v_queue), caller);
end
$$;
comment on function pgque.seek_to_time(text, text, timestamptz, pgque.caller) is
  'Moves a consumer back or forward to a time, and returns the tick where it stands: the last one at or before this time. It receives everything '
  'that became visible later, also what it has acknowledged; a few messages from just before may be among it. An open batch is dropped. Messages that all '
  'consumers have finished stay for two to three rotation_period. Errors: PQ001 no such queue; PQ005 at is NULL, or the consumer has workers; '
  'PQ011 not subscribed; PQ015 older ticks are no longer stored: the error names the earliest.';

create or replace function pgque._stream_key(p_sub pgque.subscriber) returns int
language sql immutable as $$ select pg_catalog.hashtext(p_sub.sub_queue || ' ' || p_sub.sub_consumer) $$;

-- Returns the session that has a consumer's stream open, or null.
create or replace function pgque._stream_pid(p_sub pgque.subscriber) returns int
language sql volatile as $$
  select l.pid
  from pg_catalog.pg_locks l
  where l.locktype = 'advisory' and l.granted and l.objsubid = 2
    and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
    and l.classid::bigint = (pg_catalog.hashtext('pgque.stream')::bigint & 4294967295) and l.objid::bigint = (pgque._stream_key(p_sub)::bigint & 4294967295)
$$;

create or replace function pgque.open_stream(queue_name text, consumer_name text, start_at text default 'latest', incarnation uuid default null,
  caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub     pgque.subscriber;
  v_holder  record;
begin
  perform pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  perform pgque._subscribe($1, $2, 'normal', $3, caller);
  v_sub := pgque._subscriber($1, $2, caller);
  perform pgque._need_incarnation(q, incarnation) from pgque.queue q where q.queue_id = v_sub.sub_queue;
  perform pgque._need_alone(v_sub, $1, $2);
  if not pg_try_advisory_lock(hashtext('pgque.stream'), pgque._stream_key(v_sub)) then
    select a.pid, a.application_name into v_holder from pg_stat_activity a where a.pid = pgque._stream_pid(v_sub);
    perform pgque._fail('PQ006', format('consumer %I of queue %I is read by another stream: pid %s, application %L', $2, $1, v_holder.pid, v_holder.application_name),
      'End the other stream, or use another consumer: each stream needs one of its own.');
  end if;
  -- From now on redeliveries must be in the log.
  update pgque.subscriber s set sub_offsets = true where s.sub_id = v_sub.sub_id and not s.sub_offsets;
  return (pgque._current_position(v_sub, pgque._position(v_sub.sub_id))).pos_tick;
end
$$;
comment on function pgque.open_stream(text, text, text, uuid, pgque.caller) is
  'Opens a stream for a reader that keeps its own offsets, and returns the tick where the consumer stands. Subscribes the consumer at start_at if '
  'it is new, and reserves it for this session until the session ends. incarnation: see queue_incarnation(). Errors: PQ001 no such queue; PQ005 no such start_at, '
  'or the consumer has workers; PQ006 another session has reserved it; PQ015 the queue is another incarnation.';

create or replace function pgque.dead(queue_name text, consumer_name text, msg_ids bigint[], reasons text[], caller pgque.caller default current_user) returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub  pgque.subscriber := pgque._subscriber($1, $2, caller);
begin
  perform pgque._need_alone(v_sub, $1, $2);
  if cardinality($3) is distinct from cardinality($4) or $3 is null then
    perform pgque._fail('PQ005', format('msg_ids and reasons must have the same number of elements, for consumer %I of queue %I', $2, $1),
      'Pass two arrays: the ids, and a reason for each.');
  end if;
  return query select * from pgque._dead_upto(v_sub, (pgque._last_tick(pgque._queue($1, caller, 'consume'))).tick_snapshot, $3, $4);
end
$$;

-- Uses the newest body of a key (owner 0) up to the snapshot.  Arrays may be long, and
-- the planner has no statistics of a young table: without the settings it would compare
-- each id with each.
create or replace function pgque._dead_upto(p_sub pgque.subscriber, p_upto pg_snapshot, p_ids bigint[], p_reasons text[]) returns setof pgque.outcome
language plpgsql set enable_nestloop = off set jit = off as $$
begin
  return query execute pg_catalog.format(
    $q$
    select i.id, b.ok is true, case when b.ok then null when b.ok is null then 'not found behind the position' else 'dead already' end
    from unnest($1, $2) with ordinality i (id, reason, n)
    left join (select distinct on (e.ev_id) e.* from (%s) e order by e.ev_id, e.ev_txid desc, e.ev_retry desc) e on e.ev_id = i.id
    left join lateral (
      select pgque._add_dead_letter(pgque._as_retry(row(e.*)::pgque.event, $3, case when e.ev_owner > 0 then coalesce(e.ev_retry, 0) else 0 end + 1, null, null, null), $3.sub_consumer, i.reason, false) as ok
      where e.ev_id is not null offset 0) b on true
    order by i.n
    $q$, pgque._rows_sql(p_sub.sub_queue, pg_catalog.format('(e.ev_owner is null or e.ev_owner in (0, %s)) and e.ev_id = any ($1)', p_sub.sub_id), null,
      pgque._xids((pgque._position(p_sub.sub_id)).pos_snapshot, p_upto)))
  using p_ids, p_reasons, p_sub;
end
$$;
comment on function pgque.dead(text, text, bigint[], text[], pgque.caller) is
  'Dead-letters messages that the consumer has passed, each with its reason. Returns one row for each message: msg_id, ok, and the reason if ok is '
  'false. A message that is dead already stays as it is, so the call can be repeated. Errors: PQ001 no such queue; PQ005 not as many reasons as '
  'msg_ids; PQ011 not subscribed.';
