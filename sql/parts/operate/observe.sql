-- ---------------------------------------------------------------------------
-- observe: information, metrics, health
-- ---------------------------------------------------------------------------

-- Returns the position of a subscriber as PgQ's view shows it.
create or replace function pgque._position_of(p_sub int) returns pgque.position
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub       pgque.subscriber;
  v_position  pgque.position := pgque._position(p_sub);
  v_time      timestamptz := v_position.pos_time;
begin
  select s.* into v_sub from pgque.subscriber s where s.sub_id = p_sub;
  v_position := case when v_sub.sub_main is null then pgque._current_position(v_sub, v_position) else pgque._batch_of_worker(v_sub) end;
  v_position.pos_time := v_time;
  v_position.pos_until := null;   -- not every client can read an infinite time
  v_position.pos_lapse := null;
  if v_sub.sub_role = 'pool' then
    v_position.pos_batch := null;
  end if;
  return v_position;
end
$$;

-- Returns the open batch of a subconsumer, or no row.
create or replace function pgque._batch_of_worker(p_member pgque.subscriber) returns pgque.position
language plpgsql as $$
declare
  v_main  pgque.subscriber;
begin
  select s.* into v_main from pgque.subscriber s where s.sub_id = p_member.sub_main;
  return pgque._lease(v_main.sub_id, pgque._open_batch_of(v_main, pgque._position(v_main.sub_id), p_member.sub_worker));
end
$$;

create or replace view pgque.subscription as
select s.sub_id, s.sub_queue, s.sub_consumer, p.pos_tick as sub_last_tick, p.pos_time as sub_active,
  p.pos_batch as sub_batch, p.pos_next_tick as sub_next_tick, s.sub_role, s.sub_main, s.sub_worker,
  case when s.sub_keyed then s.sub_key_concurrency end as sub_key_concurrency
from pgque.subscriber s
cross join lateral pgque._position_of(s.sub_id) p;
comment on view pgque.subscription is 'Lists the consumers of all queues and their workers, and how far each has read.';
comment on column pgque.subscription.sub_id is 'Number of the subscription.';
comment on column pgque.subscription.sub_queue is 'The queue: queue.queue_id.';
comment on column pgque.subscription.sub_consumer is 'The consumer: consumer.co_id.';
comment on column pgque.subscription.sub_last_tick is 'The tick up to which the consumer has finished; NULL for a worker without a batch.';
comment on column pgque.subscription.sub_active is 'When the consumer last received, finished or was touched.';
comment on column pgque.subscription.sub_batch is 'The open batch, or NULL.';
comment on column pgque.subscription.sub_next_tick is 'The end of the window that the consumer reads, or NULL.';
comment on column pgque.subscription.sub_role is 'normal, pool (with workers that lease messages), coop_main (with subconsumers) or coop_member (a subconsumer).';
comment on column pgque.subscription.sub_main is 'For a subconsumer, the sub_id of its consumer.';
comment on column pgque.subscription.sub_worker is 'For a subconsumer, its name.';
comment on column pgque.subscription.sub_key_concurrency is 'How many messages of one key its workers may have at a time; NULL: no limit. Set by set_key_concurrency().';

-- Returns the name of a table of a queue that is missing, or null.  The loop skips such
-- a queue.
create or replace function pgque._missing_leaf(p_queue_id int) returns text
language plpgsql stable as $$
begin
  return (select min(l.leaf) from pgque._leaves(p_queue_id) l where pg_catalog.to_regclass(l.leaf) is null);
end
$$;

-- Returns whether a queue was dropped since its row was read.  Its tables may stay for
-- a while.
create or replace function pgque._was_dropped(p_queue_id int) returns boolean
language plpgsql as $$
begin
  return not exists (select from pgque.queue q where q.queue_id = p_queue_id) or pgque._missing_leaf(p_queue_id) is not null;
end
$$;

-- Returns the sessions that hold locks on a queue's tables, or with p_alone exclusive
-- ones; null if there are none.
create or replace function pgque._lockers(p_queue_id int, p_alone boolean) returns text
language sql stable as $$
  select pg_catalog.string_agg(distinct coalesce('pid ' || l.pid, 'a prepared transaction'), ', ')
  from pg_catalog.pg_locks l
  join pgque._leaves(p_queue_id) f on l.relation = pg_catalog.to_regclass(f.leaf)
  where l.locktype = 'relation' and l.granted and l.pid is distinct from pg_catalog.pg_backend_pid()
    and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
    and (l.mode = 'AccessExclusiveLock' or not p_alone)
$$;

-- Shortens lock_timeout for a function that reads every queue: it waits only briefly
-- for the tables of a locked one, and returns what it knows without them.  The caller
-- undoes its block, and this setting with it.
create or replace function pgque._shorten_lock_timeout() returns void
language sql as $$ select pg_catalog.set_config('lock_timeout', '200ms', true) $$;

-- Returns how many messages a second were sent to a queue: since its last tick that is a
-- minute old, found backwards, since a busy queue has too many ticks to read, or since
-- the first tick of a younger queue.  p_last: the last tick.
create or replace function pgque._rate(p_queue pgque.queue, p_last pgque.tick) returns double precision
language plpgsql as $$
declare
  v_before  timestamptz := pgque.clock() - interval '1 minute';
  v_tick    pgque.tick;
begin
  if p_last.tick_time <= v_before then
    return 0;
  end if;
  execute pg_catalog.format('select t.* from pgque.tick_%s_%s t where t.tick_time <= $1 order by t.tick_id desc limit 1', p_queue.queue_id, p_queue.queue_cur_table)
  into v_tick using v_before;
  if v_tick.tick_id is null then
    execute pg_catalog.format('select t.* from (%s) t where t.tick_time <= $1 order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue.queue_id))
    into v_tick using v_before;
  end if;
  if v_tick.tick_id is null then
    execute pg_catalog.format('select t.* from (%s) t order by t.tick_id limit 1', pgque._ticks_sql(p_queue.queue_id)) into v_tick;
  end if;
  -- For a second at least: a burst after the creation is no rate.
  return (p_last.tick_event_seq - v_tick.tick_event_seq) / greatest(extract(epoch from pgque.clock() - v_tick.tick_time), 1);
end
$$;

-- These functions read each queue with the same statements.  One plan for all queues
-- takes less time than one plan for each (plan_cache_mode).  The plan has to use
-- indexes: one queue may have nearly all retries and dead letters.  Without sequential
-- scans even small tables seem to be worth parallel workers, which would be started for
-- each queue.
create or replace function pgque.get_queue_info(
  i_queue_name text default null, caller pgque.caller default current_user,
  out queue_name text, out queue_ntables int, out queue_cur_table int, out queue_rotation_period interval,
  out queue_switch_time timestamptz, out queue_external_ticker boolean, out queue_ticker_paused boolean,
  out queue_ticker_max_count int, out queue_ticker_max_lag interval, out queue_ticker_idle_period interval,
  out ticker_lag interval, out ev_per_sec double precision, out ev_new bigint, out last_tick_id bigint,
  out queue_paused boolean, out queue_max_retries int, out queue_uid uuid
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queue  pgque.queue;
  v_last   pgque.tick;
  v_rate   double precision;
  v_seq    bigint;
begin
  if $1 is not null then
    i_queue_name := (pgque._queue($1, caller, 'see')).queue_name;
  end if;
  for v_queue in
    select q.* from pgque.queue q
    where ($1 is null and pgque._may(caller, 'see', q.queue_id)) or q.queue_name = $1 collate "default"
    order by q.queue_name
  loop
    v_last := null;
    v_rate := null;
    begin
      perform pgque._shorten_lock_timeout();
      if pgque._missing_leaf(v_queue.queue_id) is null then
        v_last := pgque._last_tick(v_queue);
        v_rate := pgque._rate(v_queue, v_last);
      end if;
      v_seq := coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0);
      if not exists (select from pgque.queue q where q.queue_id = v_queue.queue_id) then
        perform pgque._no_queue(v_queue.queue_name);
      end if;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        v_last := null;
        v_rate := null;
      when others then
        if $1 is not null or not pgque._was_dropped(v_queue.queue_id) then
          raise;
        end if;
        continue;   -- the queue was dropped meanwhile
    end;
    return query
      select v_queue.queue_name, v_queue.queue_ntables, v_queue.queue_cur_table, v_queue.queue_rotation_period, v_queue.queue_switch_time,
        v_queue.queue_external_ticker, v_queue.queue_ticker_paused, v_queue.queue_ticker_max_count, v_queue.queue_ticker_max_lag,
        v_queue.queue_ticker_idle_period, pgque.clock() - v_last.tick_time,
        v_rate, v_seq - v_last.tick_event_seq, v_last.tick_id, v_queue.queue_paused, v_queue.queue_max_retries, v_queue.queue_uid;
  end loop;
end
$$;
comment on function pgque.get_queue_info(text, pgque.caller) is
  'Returns one row for each queue, or for one queue: settings, ticker_lag (age of the last tick), ev_per_sec (over the last minute, or since the queue was created), ev_new (events '
  'since the last tick), last_tick_id. Values are NULL if another session has a table of the queue locked. Errors: PQ001 no such queue.';

-- Returns the subscribers of a queue, or those of a name, each with its newest
-- position.  Both leaves in one statement: a position may move from one to the other.
-- Batches that were closed since are not in pos_open: most consumers have no other, and
-- the state of a batch takes longer to find out than all else.
create or replace function pgque._positions(p_queue_id int, p_name text default null) returns table (sub pgque.subscriber, pos pgque.position)
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_found  record;
begin
  for v_found in
    select s as sub, case when n.pos_sub is null then pgque._position(s.sub_id) else row(n.*)::pgque.position end as pos,
      case when pg_catalog.cardinality(n.pos_open) > 0 then array(
        select o.id
        from pg_catalog.unnest(n.pos_open) with ordinality o (id, n)
        where not exists (select from pgque.settled c where c.set_batch = o.id and c.set_ev_id = 0 and c.set_what = 'closed')
        order by o.n) end as open
    from pgque.subscriber s
    left join lateral (
      select p.* from pgque.position p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1
    ) n on true
    where s.sub_queue = p_queue_id and (p_name is null or pgque._subscriber_name(s) = p_name)
  loop
    sub := v_found.sub;
    pos := v_found.pos;
    pos.pos_open := coalesce(v_found.open, pos.pos_open);
    return next;
  end loop;
end
$$;

-- Returns when a message was sent that a snapshot shows and a subscriber has not
-- finished; null if there is none.  Any such message will do: one index lookup.
create or replace function pgque._unfinished(p_sub pgque.subscriber, p_pos pgque.position, p_snapshot pg_snapshot) returns timestamptz
language plpgsql set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_sent  timestamptz;
begin
  execute pg_catalog.format('select e.ev_time from (%s) e limit 1', pgque._unfinished_sql(p_sub, p_pos, p_snapshot,
    ' and (e.ev_expires is null or e.ev_expires > $1)'))
  into v_sent using pgque.clock();
  return v_sent;
end
$$;

-- Returns since when a message in the log is pending for a subscriber: the time of the
-- first tick that shows one; null if there is none.  A message that no tick shows yet
-- is pending since the last tick, or since it was sent if that is later.  The later of
-- two ticks shows all that the earlier one shows.  So a binary search over tick ids
-- finds the first.
create or replace function pgque._pending_since(p_sub pgque.subscriber, p_pos pgque.position, p_last pgque.tick) returns timestamptz
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_low    bigint := p_pos.pos_tick;
  v_high   bigint := p_last.tick_id;
  v_since  timestamptz := p_last.tick_time;
  v_sent   timestamptz;
  v_mid    bigint := v_low + 1;   -- this is the tick, if messages come without a pause
  v_tick   pgque.tick;
begin
  v_sent := pgque._unfinished(p_sub, p_pos, pg_catalog.pg_current_snapshot());
  if v_sent is null then
    return null;   -- most consumers are here
  elsif p_pos.pos_tick = p_last.tick_id or pgque._unfinished(p_sub, p_pos, p_last.tick_snapshot) is null then
    return greatest(v_since, v_sent);
  end if;
  while v_high - v_low > 1 loop
    execute pg_catalog.format('select t.* from (%s) t where t.tick_id >= $1 order by t.tick_id limit 1', pgque._ticks_sql(p_sub.sub_queue))
    into v_tick using v_mid;
    if v_tick.tick_id >= v_high then
      v_high := v_mid;
    elsif pgque._unfinished(p_sub, p_pos, v_tick.tick_snapshot) is null then
      v_low := v_tick.tick_id;
    else
      v_high := v_mid;
      v_since := v_tick.tick_time;
    end if;
    v_mid := v_low + (v_high - v_low) / 2;
  end loop;
  return v_since;
end
$$;

-- Returns the columns of get_consumer_info() for some subscribers of one queue.  With
-- p_blind, only those that need no table of the queue.  p_last, p_new: the last tick of
-- the queue, and whether it has rows that this tick does not show, if the caller knows.
-- p_retries: false if the caller knows that the retry queue has nothing of the queue.
create or replace function pgque._consumers(
  p_queue pgque.queue, p_subs pgque.subscriber[], p_positions pgque.position[], p_blind boolean, p_last pgque.tick default null, p_new boolean default null,
  p_retries boolean default true,
  out queue_name text, out consumer_name text, out lag interval, out last_seen interval, out last_tick bigint,
  out current_batch bigint, out next_tick bigint, out pending_events bigint, out role text, out skipped_events bigint
) returns setof record
language plpgsql as $$
declare
  v_sub  pgque.subscriber;
  v_pos  pgque.position;
  v_due  record;
  v_now  timestamptz := pgque.clock();   -- no index is searched for the result of a volatile function
begin
  if not p_blind and p_last.tick_id is null then
    p_last := pgque._last_tick(p_queue);
  end if;
  queue_name := p_queue.queue_name;
  for n in 1..coalesce(pg_catalog.cardinality(p_subs), 0) loop
    v_sub := p_subs[n];
    v_pos := p_positions[n];
    last_seen := pgque.clock() - v_pos.pos_time;
    consumer_name := pgque._subscriber_name(v_sub);
    v_pos := case when v_sub.sub_main is null then pgque._current_position(v_sub, v_pos) else pgque._batch_of_worker(v_sub) end;
    last_tick := v_pos.pos_tick;
    current_batch := v_pos.pos_batch;
    next_tick := v_pos.pos_next_tick;
    role := v_sub.sub_role;
    skipped_events := p_positions[n].pos_skipped;
    if not p_blind then
      pending_events := coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0) - v_pos.pos_event_seq;
      if v_sub.sub_main is null then
        -- A consumer at the last tick has nothing pending if nothing came since.
        lag := case when v_pos.pos_tick <> p_last.tick_id or p_new is not false or v_pos.pos_snapshot::text <> p_last.tick_snapshot::text
          then pgque.clock() - pgque._pending_since(v_sub, v_pos, p_last) end;
        -- What was rolled back has drawn ids, too.
        pending_events := case when lag is null then 0 else pending_events end;
      else
        lag := case when v_pos.pos_batch is not null then pgque.clock() - (pgque._tick(v_sub.sub_queue, pgque._end_tick(v_pos))).tick_time end;
      end if;
      if v_sub.sub_main is null and (p_retries or v_pos.pos_lapse <= v_now) then
        -- Messages that may be received again, or were not delivered yet because of
        -- their order.  Those in the open window are pending anyway.
        select coalesce(sum(w.n) filter (where w.behind), 0) as n, min(w.since) as since into v_due
        from (
          select count(*) as n, min(r.ev_retry_after) as since, r.ev_id <= v_pos.pos_event_seq as behind
          from pgque.retry_queue r where r.ev_owner = v_sub.sub_id and r.ev_retry_after <= v_now
          group by 3
          union all
          select (l.lease).pos_done_count - l.settled, l.until, (l.lease).pos_tick < v_pos.pos_tick
          from pgque._expired_batches(v_sub.sub_id, v_pos) l
          union all
          -- Redelivered to a consumer whose leases never expire, and not finished
          select r.n, l.pos_time, r.behind
          from (
            select count(*) as n, r.ev_batch, r.ev_id <= v_pos.pos_event_seq as behind
            from pgque.retry_queue r
            where v_sub.sub_role <> 'pool' and r.ev_owner = v_sub.sub_id and r.ev_batch is not null and r.ev_retry_after > v_now
            group by 2, 3
          ) r
          cross join lateral pgque._lease(v_sub.sub_id, r.ev_batch) l
        ) w;
        pending_events := pending_events + v_due.n;
        lag := greatest(lag, pgque.clock() - v_due.since);
      end if;
      lag := greatest(lag, '0');   -- also if nothing is pending, and if the clock was set back
    end if;
    return next;
  end loop;
  -- A session that waited for a table may have waited for a DROP of the queue.
  if not p_blind and not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id) then
    perform pgque._no_queue(p_queue.queue_name);
  end if;
end
$$;

create or replace function pgque.get_consumer_info(
  i_queue_name text default null, i_consumer_name text default null, caller pgque.caller default current_user,
  out queue_name text, out consumer_name text, out lag interval, out last_seen interval, out last_tick bigint,
  out current_batch bigint, out next_tick bigint, out pending_events bigint, out role text, out skipped_events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queue      pgque.queue;
  v_subs       pgque.subscriber[];
  v_positions  pgque.position[];
  v_locked     boolean;
begin
  if $1 is not null then
    i_queue_name := (pgque._queue($1, caller, 'see')).queue_name;
  end if;
  if $2 is not null and $1 is not null and not exists (
    select from pgque.subscriber s where pgque._subscriber_name(s) = $2 and s.sub_queue = (pgque._queue($1, caller, 'see')).queue_id)
  then
    perform pgque._subscriber($1, $2, caller);
  end if;
  for v_queue in
    select q.*
    from pgque.queue q
    where ($1 is null and pgque._may(caller, 'see', q.queue_id)) or q.queue_name = $1 collate "default"
    order by q.queue_name
  loop
    select array_agg(p.sub order by pgque._subscriber_name(p.sub)), array_agg(p.pos order by pgque._subscriber_name(p.sub))
    into v_subs, v_positions
    from pgque._positions(v_queue.queue_id, $2) p;
    continue when v_subs is null;
    v_locked := false;
    begin
      perform pgque._shorten_lock_timeout();
      return query select c.* from pgque._consumers(v_queue, v_subs, v_positions, pgque._missing_leaf(v_queue.queue_id) is not null) c;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        v_locked := true;
      when others then
        if not pgque._was_dropped(v_queue.queue_id) then
          raise;
        elsif $1 is not null then
          perform pgque._no_queue($1);
        end if;   -- else the queue was dropped meanwhile
    end;
    if v_locked then
      return query select c.* from pgque._consumers(v_queue, v_subs, v_positions, true) c;
    end if;
  end loop;
end
$$;
comment on function pgque.get_consumer_info(text, text, pgque.caller) is
  'Returns one row for each consumer and worker, of all queues or of one, or for one consumer: lag (age of the oldest pending message; 0 if none is '
  'pending), last_seen, ticks, open batch, pending_events (also messages that may be redelivered, without those that a worker has leased) and skipped_events (lost to retention). lag and '
  'pending_events are NULL if another session has a table of the queue locked. A worker is named consumer.worker. Errors: PQ001 no such queue; PQ011 '
  'not subscribed.';

-- Ids are read range by range, as in _messages_ahead().
create or replace function pgque.peek(queue_name text, n int default 10, consumer_name text default null, caller pgque.caller default current_user) returns setof pgque.delivery
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
  v_sub    pgque.subscriber;
  v_pos    pgque.position;
  v_tick   pgque.tick;
  v_rows   text;
  v_upto   bigint;
  v_length bigint := greatest(100, n);
  v_count  bigint;
  v_once   text := '';
  v_lapsed pgque.position;
begin
  if $2 is null or $2 < 1 then
    perform pgque._fail('PQ005', format('peek at queue %I needs a positive number of messages', $1),
      'select * from pgque.peek(queue, 10);');
  end if;
  if $3 is not null then
    v_sub := pgque._subscriber($1, $3, caller);
    v_pos := pgque._current_position(v_sub, pgque._position(v_sub.sub_id));
  else
    v_tick := pgque._tick(v_queue.queue_id, pgque._slowest_tick(v_queue.queue_id));
    v_pos.pos_snapshot := v_tick.tick_snapshot;
    v_pos.pos_event_seq := v_tick.tick_event_seq;
    v_pos.pos_tick := v_tick.tick_id;
    v_pos.pos_high := case when pgque._noted(v_queue.queue_id, '{cancelled}') then v_tick.tick_id + 1 end;
  end if;
  loop
    v_upto := greatest(v_upto, v_pos.pos_done_id, v_pos.pos_event_seq, 0) + v_length;
    if v_upto >= pg_sequence_last_value(v_queue.queue_event_seq) is not false then
      v_upto := null;
    end if;
    v_rows := pgque._rows_sql(v_queue.queue_id, coalesce('(e.ev_owner is null or e.ev_owner = ' || v_sub.sub_id || ')', 'e.ev_owner is null')
      || coalesce(' and not (e.ev_id <= ' || v_pos.pos_done_id || format(' and pg_visible_in_snapshot(e.ev_txid, %L))', v_pos.pos_next_snapshot), '')
      || coalesce(' and e.ev_id <= ' || v_upto, '') || pgque._not_cancelled_sql(v_queue.queue_id, v_pos),
      null, pgque._xids(v_pos.pos_snapshot, pg_current_snapshot()) * pgque._span_xids(v_queue, 0, v_upto));
    exit when v_upto is null;
    execute format('select count(distinct e.ev_id) from (%s) e', v_rows) into v_count;
    exit when v_count >= $2;
    v_length := 8 * v_length;
  end loop;
  for v_lapsed in select (l.lease).* from pgque._expired_batches(v_sub.sub_id, v_pos) l loop
    -- After a move back, a row may be ahead of the position and in an expired batch.
    v_once := 'distinct on (e.ev_id, e.ev_txid, e.ev_retry)';
    v_rows := v_rows || ' union all ' || pgque._undone_sql(v_sub, v_lapsed);
  end loop;
  v_rows := pgque._renewed_sql(v_queue.queue_id, format('select %s e.* from (%s) e order by e.ev_id, e.ev_txid desc, e.ev_retry limit %s', v_once, v_rows, $2));
  return query execute format(
    $q$
    with log as materialized (%s)
    select e.ev_id, null::bigint, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,
      e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,
      coalesce(e.ev_retry, 0), e.ev_error, e.ev_expires, $2
    from log e
    union all (
      select distinct on (r.ev_id) r.ev_id, null::bigint, r.ev_type, r.ev_data, coalesce(r.ev_retry, 0), r.ev_time,
        r.ev_extra1, r.ev_extra2, r.ev_extra3, r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes,
        greatest(r.ev_receives, r.ev_retry, 0), r.ev_error, r.ev_expires, $2
      from pgque.retry_queue r
      where r.ev_queue = $1 and r.ev_retry_after <= $5 and ($3 is null or r.ev_owner in (0, $3))
        and not exists (select from log e where e.ev_id = r.ev_id)
        and not (r.ev_key is not null and r.ev_receives = 0 and exists (
          select from pg_catalog.unnest(pgque._key_rows($1, array[pgque._as_event(pgque._slim_retry(r))])) s where s.ev_owner = -2))
      order by r.ev_id
      limit $4)
    order by 1
    limit $4
    $q$, v_rows)
  using v_queue.queue_id, v_queue.queue_name, v_sub.sub_id, $2, pgque.clock();
end
$$;
comment on function pgque.peek(text, int, text, pgque.caller) is
  'Returns the next n messages that a consumer has not finished, without receiving them. consumer_name: NULL means the slowest consumer. Messages '
  'also count before a tick covers them, and retries once they are due. batch_id is NULL. Errors: PQ001 no such queue; PQ005 n is below 1; PQ011 '
  'not subscribed.';

-- Returns the first tick by which an id had been drawn; all columns are null if there
-- is none yet.  A binary search over tick ids, since there are too many ticks to read.
create or replace function pgque._tick_of_event(p_queue pgque.queue, p_id bigint) returns pgque.tick
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_tick  pgque.tick;
begin
  execute pg_catalog.format(
    $q$
    with recursive search as (
      select $2 - 1 as low, $3 + 1 as high
      union all
      select case when m.tick_event_seq < $1 then m.tick_id else s.low end, case when m.tick_event_seq < $1 then s.high else (s.low + s.high) / 2 end
      from search s
      left join lateral (select t.tick_id, t.tick_event_seq from (%1$s) t where t.tick_id >= (s.low + s.high) / 2 order by t.tick_id limit 1) m on true
      where s.high - s.low > 1
    )
    select t.* from search s cross join lateral (select t.* from (%1$s) t where t.tick_id = s.high) t where s.high - s.low <= 1
    $q$, pgque._ticks_sql(p_queue.queue_id))
  into v_tick using p_id, (pgque._find_tick(p_queue, 'earliest')).tick_id, (pgque._last_tick(p_queue)).tick_id;
  return v_tick;
end
$$;

-- Returns the transactions that may have sent messages with ids above p_after, up to
-- p_upto.  A null leaves that end open.
--
-- A sender has its transaction's id before it draws a message's id.  Let A be the last
-- tick before the first id was drawn, and B the first tick after the last one was
-- drawn.
--   * The sender ran at tick A, or began after it.
--   * Its transaction's id is lower than the one that stored the row of tick B (see
--     _store_tick).  xmin has only 32 bits of that id: the others are taken from the
--     current id.
-- If messages entered the log under older ids (see _noted), there is no upper end.
create or replace function pgque._span_xids(p_queue pgque.queue, p_after bigint, p_upto bigint) returns int8multirange
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_tick  pgque.tick;
  v_now   bigint := pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint;
  v_xid   bigint;
  v_xids  int8multirange := '{(,)}';
begin
  if pgque._noted(p_queue.queue_id, '{external}') then
    return v_xids;   -- another system numbered events
  end if;
  if p_after > 0 then
    v_tick := pgque._tick_of_event(p_queue, p_after + 1);
    execute pg_catalog.format('select t.* from (%s) t where $1 is null or t.tick_id < $1 order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue.queue_id))
    into v_tick using v_tick.tick_id;
    if v_tick.tick_id is not null then
      v_xids := pgque._xids(v_tick.tick_snapshot, null);
    end if;
  end if;
  if p_upto is not null and not pgque._noted(p_queue.queue_id, '{moved}') then
    v_tick := pgque._tick_of_event(p_queue, p_upto);
    execute pg_catalog.format('select t.xmin::text::bigint from pgque.tick_%s_%s t where t.tick_id = $1 and t.xmin <> ''2''', p_queue.queue_id, coalesce(v_tick.slot, 0) % 3)
    into v_xid using v_tick.tick_id;
    v_xids := v_xids * pg_catalog.int8multirange(pg_catalog.int8range(null, v_now + ((v_xid - v_now + 2147483648 & 4294967295) - 2147483648)));
  end if;
  return v_xids;
end
$$;

-- Returns where the rows of a message are in the log, as _rows_sql() takes it: a
-- condition on row addresses for each table, null for none.
create or replace function pgque._row_addresses(p_queue pgque.queue, p_id bigint) returns text[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_places  text[];
begin
  execute pg_catalog.format(
    $q$
    select array_agg('e.ctid = any (' || quote_literal(f.tids) || '::tid[])' order by l.n)
    from generate_series(0, 2) l (n)
    left join (select r.n, array_agg(r.tid) as tids from (%s) r group by r.n) f on f.n = l.n
    $q$, pgque._rows_sql(p_queue.queue_id, 'e.ev_id = $1 and (e.ev_owner is null or e.ev_owner > 0)', null,
      pgque._span_xids(p_queue, p_id - 1, p_id), 'e.slot % 3 as n, e.ctid as tid'))
  into v_places using p_id;
  return v_places;
end
$$;

-- Returns all messages of a queue, or one (p_id), with one row for each consumer that
-- has it.  Of each kind, these are the first p_limit rows by id that satisfy p_where,
-- or more: all rows of one message are returned together.  With p_before they are the last
-- ones below that id.  p_where is a condition on a row m of the result.  p_status,
-- p_consumer, p_after and p_before, which are part of p_where too, avoid needless reads.
-- These are several statements, and messages move meanwhile.  So that none is missed, the
-- positions are read first: a message that is delivered later is still ahead of them.  And
-- each place is read before the one that its messages move to.
create or replace function pgque._messages(
  p_queue pgque.queue, p_id bigint, p_limit int, p_where text default 'true', p_status text default null, p_consumer text default null, p_after bigint default 0,
  p_before bigint default null,
  out msg_id bigint, out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now     timestamptz := pgque.clock();
  v_subs    pgque.subscriber[];
  v_at      pgque.position[];
  v_sub     pgque.subscriber;
  v_held    record;
  v_and     text := case when p_id is null then '' else ' and e.ev_id = ' || p_id end;
  v_places  text[];
begin
  if p_id < 1 then
    return;
  end if;
  p_after := least(greatest(p_after, p_id - 1), 4611686018427387904);   -- no id is higher
  if p_id is not null then
    v_places := pgque._row_addresses(p_queue, p_id);
  end if;
  select pg_catalog.array_agg(p.sub order by (p.sub).sub_id), pg_catalog.array_agg(p.pos order by (p.sub).sub_id) into v_subs, v_at
  from pgque._positions(p_queue.queue_id, p_consumer) p
  where (p.sub).sub_main is null;
  if coalesce(p_status, 'processing') in ('processing', 'retry', 'expired') then
    for n in 1..coalesce(pg_catalog.cardinality(v_subs), 0) loop
      v_sub := v_subs[n];
      for v_held in
        select h.* from pgque._states(v_sub.sub_id, (v_at[n]).pos_open) h
        where h.place = 'log' and ((h.lease).pos_last_id <= p_after or (h.lease).pos_done_id >= coalesce(p_id, p_before - 1)) is not true
      loop
        return query execute pgque._messages_sql(pgque._renewed_sql(p_queue.queue_id, pgque._unsettled_sql(v_sub, v_held.lease, v_and, v_places)), $q$
          case when e.ev_expires <= $2 and $4 <= $2 then 'expired' when $4 > $2 then 'processing' else 'retry' end,
          case when $4 = 'infinity' then e.ev_time else $4 end, coalesce(e.ev_retry, 0) + $6, $5, case when $4 > $2 then $7 end
          $q$, p_where, p_before is not null)
        using v_sub.sub_consumer, v_now, p_limit, v_held.until, (v_held.lease).pos_worker, (v_sub.sub_role = 'pool')::int, v_held.token;
      end loop;
    end loop;
  end if;
  if coalesce(p_status, 'delayed') in ('pending', 'processing', 'delayed', 'retry', 'expired') then
    return query execute pgque._limited_sql(pgque._retry_messages_sql(), p_where, p_before is not null)
    using p_queue.queue_id, v_now, p_limit, coalesce(p_id, p_before - 1), p_after;
  end if;
  for n in 1..coalesce(pg_catalog.cardinality(v_subs), 0) loop
    return query select m.* from pgque._messages_ahead(p_queue, v_subs[n], p_limit, p_where, p_status, p_after, v_places, v_at[n], p_before) m;
  end loop;
  if coalesce(p_status, 'dead') in ('dead', 'failed') then
    -- One consumer after the other, in the order of an index.
    for v_sub.sub_consumer in
      select c.co_id
      from pgque.consumer c
      where c.co_queue in (0, p_queue.queue_id) and (p_consumer is null or c.co_name = p_consumer)
        -- One lookup each; an EXISTS may become a join with all dead letters.
        and (select true from pgque.dead_letter d where d.dl_queue_id = p_queue.queue_id and d.dl_consumer_id = c.co_id limit 1)
    loop
      return query execute pgque._limited_sql(pgque._dead_messages_sql(' and d.dl_consumer_id = $6'), p_where, p_before is not null)
      using p_queue.queue_id, v_now, p_limit, coalesce(p_id, p_before - 1), p_after, v_sub.sub_consumer;
    end loop;
  end if;
  if coalesce(p_status, 'archived') = 'archived' then
    return query execute pgque._limited_sql(
      $q$
      select a.ev_id, c.co_name, 'archived', a.ev_type, a.ev_data, a.ev_headers, a.ev_key, a.ev_bytes, a.ev_time, null::timestamptz,
        a.arc_receives, coalesce(a.ev_retry, 0), a.ev_error, a.ev_expires, a.arc_worker, null::bigint, null::bigint
      from pgque.archive a
      left join pgque.consumer c on c.co_id = a.arc_consumer
      where a.ev_id > $5 and a.ev_id <= coalesce($4, 9223372036854775807) and $q$ || pgque._archived_by('a', p_queue.queue_id), p_where, p_before is not null)
    using p_queue.queue_id, v_now, p_limit, coalesce(p_id, p_before - 1), p_after;
  end if;
exception
  when others then
    perform pgque._no_queue(p_queue.queue_name) where not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id);   -- it was dropped meanwhile
    raise;
end
$$;

-- Returns the messages of _messages() that are in the log and that a consumer at p_position
-- (null: where it stands now) has not received.  It reads ids range by range, each eight
-- times as long as the one before, until it has enough: upwards, or downwards from
-- p_before.  (No sequential scans: if a table was analyzed when it had only the first
-- range, the planner expects that all its rows are in that range.)
create or replace function pgque._messages_ahead(
  p_queue pgque.queue, p_sub pgque.subscriber, p_limit int, p_where text, p_status text, p_after bigint, p_places text[], p_position pgque.position default null,
  p_before bigint default null,
  out msg_id bigint, out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_moved     boolean := pgque._noted(p_queue.queue_id, '{moved,external}');
  v_position  pgque.position := pgque._next_from(case when p_position.pos_sub is null then pgque._position(p_sub.sub_id) else p_position end);
  v_newest    bigint;
  v_after     bigint := p_after;
  v_upto      bigint;
  v_and       text := '';
  v_xids      int8multirange := '{(,)}';
  v_length    bigint := greatest(100, least(p_limit, 2000));
  v_count     bigint;
  v_found     bigint := 0;
begin
  if p_status not in ('pending', 'retry', 'expired') or p_status = 'expired' and not pgque._expiring(p_queue)
    or p_status = 'retry' and not v_moved
  then
    return;
  end if;
  v_newest := pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq);
  if p_before <= v_newest then
    v_upto := p_before - 1;
  end if;
  loop
    if p_places is null then
      if p_before is not null then
        -- The last range has all that is left: a message with an old id may be ahead too.
        v_after := coalesce(v_upto, v_newest, 0) - v_length;
        if pgque._noted(p_queue.queue_id, '{external}') or v_after <= greatest(p_after, v_position.pos_event_seq) then
          v_after := p_after;
        end if;
      else
        v_upto := greatest(v_after, v_position.pos_event_seq) + v_length;
        if v_moved or v_upto >= v_newest is not false then
          v_upto := null;
        end if;
      end if;
      v_and := pg_catalog.format(' and e.ev_id > %s%s', v_after, ' and e.ev_id <= ' || v_upto);
      v_xids := pgque._span_xids(p_queue, v_after, v_upto);
    end if;
    return query execute pgque._messages_sql(
      pgque._renewed_sql(p_queue.queue_id, pgque._unfinished_sql(p_sub, v_position, pg_catalog.pg_current_snapshot(), v_and, p_places, v_xids)), $q$
        case when e.ev_expires <= $2 then 'expired' when e.ev_owner is not null then 'retry' else 'pending' end,
        e.ev_time, coalesce(e.ev_retry, 0), null::text, null::bigint
        $q$, p_where, p_before is not null)
    using p_sub.sub_consumer, pgque.clock(), p_limit;
    get diagnostics v_count = row_count;
    v_found := v_found + v_count;
    exit when v_found >= p_limit or p_places is not null or case when p_before is null then v_upto is null else v_after = p_after end;
    if p_before is null then
      v_after := v_upto;
    else
      v_upto := v_after;
    end if;
    v_length := 8 * v_length;
  end loop;
end
$$;

-- Returns the query for the messages of _messages() that are in the retry queue.
create or replace function pgque._retry_messages_sql() returns text
language sql immutable as $f$
  select $q$
    select r.ev_id, c.co_name,
      case
        when r.ev_expires <= $2 and (r.ev_batch is null or r.ev_retry_after <= $2) then 'expired'
        when r.ev_owner = 0 then 'delayed'
        when r.ev_batch is not null and r.ev_retry_after > $2 then 'processing'
        when r.ev_receives = 0 then 'pending'
        else 'retry'
      end,
      r.ev_type, r.ev_data, r.ev_headers, r.ev_key, r.ev_bytes, r.ev_time, case when r.ev_retry_after < 'infinity' then r.ev_retry_after else r.ev_time end,
      greatest(r.ev_receives, r.ev_retry), coalesce(r.ev_retry, 0),
      r.ev_error, r.ev_expires, r.ev_worker, case when r.ev_retry_after > $2 then r.ev_batch end, null::bigint
    from pgque.retry_queue r
    left join pgque.subscriber s on s.sub_id = r.ev_owner
    left join pgque.consumer c on c.co_id = s.sub_consumer
    where r.ev_queue = $1 and r.ev_id > $5 and r.ev_id <= coalesce($4, 9223372036854775807)
    $q$
$f$;

-- Returns the query for the messages of _messages() that are dead letters, with one more
-- condition.
create or replace function pgque._dead_messages_sql(p_and text) returns text
language sql immutable as $f$
  select $q$
    select d.ev_id, c.co_name, case when d.dl_held then 'failed' else 'dead' end,
      d.ev_type, d.ev_data, d.ev_headers, d.ev_key, d.ev_bytes, d.ev_time, null::timestamptz, greatest(d.dl_receives, d.ev_retry), coalesce(d.ev_retry, 0),
      d.ev_error, d.ev_expires, null::text, null::bigint, d.dl_id
    from pgque.dead_letter d
    join pgque.consumer c on c.co_id = d.dl_consumer_id
    where d.dl_queue_id = $1 and d.ev_id > $5 and d.ev_id <= coalesce($4, 9223372036854775807)
  $q$ || p_and
$f$;

-- Returns a query for rows of pgque.event as _messages() returns them for consumer $1.
-- p_state: expressions for status, available_at, receive_count, worker and batch id.
create or replace function pgque._messages_sql(p_rows text, p_state text, p_where text, p_down boolean default false) returns text
language sql immutable as $f$
  select pgque._limited_sql(pg_catalog.format(
    $q$
    select e.ev_id, (select c.co_name from pgque.consumer c where c.co_id = $1), x.status, e.ev_type, e.ev_data, e.ev_headers, e.ev_key, e.ev_bytes,
      e.ev_time, x.available_at, x.receives, coalesce(e.ev_retry, 0), e.ev_error, e.ev_expires, x.worker, x.batch, null::bigint
    from (%s) e
    cross join lateral (select %s) x (status, available_at, receives, worker, batch)
    $q$, p_rows, p_state), p_where, p_down)
$f$;

-- Returns a query for the first $3 rows by id that satisfy a condition, or with p_down
-- for the last ones, and the other rows of the message where they end.
create or replace function pgque._limited_sql(p_rows text, p_where text, p_down boolean default false) returns text
language sql immutable as $f$
  select pg_catalog.format(
    $q$
    select m.*
    from (%s) m (msg_id, consumer_name, status, type, payload, headers, key, payload_bytes, created_at, available_at, receive_count, retry_count,
      last_error, expires_at, worker, batch_id, dl_id)
    where %s
    order by m.msg_id%s
    fetch first $3 rows with ties
    $q$, p_rows, p_where, case when p_down then ' desc' else '' end)
$f$;

-- No index serves the filters: one of the log by type made send_batch take 1.4 times as
-- long, and a filter that a million pending messages do not satisfy takes 0.2 to 0.6 s
-- without it.  With many consumers this is read for each of them.
create or replace function pgque.list_messages(
  queue_name text, only_status text default null, limit_count int default 100, only_type text default null, only_key text default null,
  only_consumer text default null, since timestamptz default null, until timestamptz default null, matching text default null,
  after_id bigint default null, before_id bigint default null, caller pgque.caller default current_user,
  out msg_id bigint, out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set datestyle = 'ISO' set enable_sort = on set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_where  text;
begin
  if $2 not in ('pending', 'processing', 'delayed', 'retry', 'expired', 'dead', 'failed', 'archived') then
    perform pgque._fail('PQ005', format('unknown status %L, for queue %I', $2, v_queue.queue_name),
      'Use pending, processing, delayed, retry, expired, dead, failed or archived, or null for all.');
  elsif $3 is null or $3 < 0 then
    perform pgque._fail('PQ005', format('limit_count must not be negative, for queue %I', v_queue.queue_name),
      'Pass the highest number of messages to list, such as 100.');
  end if;
  v_where := concat_ws(' and ', 'm.msg_id > ' || coalesce($10, 0), 'm.msg_id < ' || $11, 'm.status = ' || quote_literal($2), 'm.type = ' || quote_literal($4),
    'm.key = ' || quote_literal($5), 'm.consumer_name = ' || quote_literal($6), 'm.created_at >= ' || quote_literal($7), 'm.created_at < ' || quote_literal($8),
    pgque._matching_sql($9, 'pg_catalog.left(m.payload, 100000), m.headers::text, m.last_error'));
  -- The planner takes a status for rare, and would read and sort the whole retry queue.
  perform set_config('enable_sort', 'off', true) where $2 in ('retry', 'delayed') and coalesce($4, $5, $6) is null;
  return query
    select m.msg_id, m.consumer_name, m.status, m.type, m.payload, m.headers, m.key, m.payload_bytes, m.created_at, m.available_at,
      m.receive_count, m.retry_count, m.last_error, m.expires_at, m.worker, m.batch_id, m.dl_id
    from (
      select m.*, row_number() over (order by o.place, m.consumer_name) as n, rank() over (order by o.place) as begins
      from pgque._messages(v_queue, null, $3, v_where, $2, $6, coalesce($10, 0), $11) m
      cross join lateral (select case when $11 is null then m.msg_id else -m.msg_id end as place) o
    ) m
    where m.n <= $3 or m.begins <= $3 and coalesce($10, $11) is not null
    order by m.n;
end
$$;
comment on function pgque.list_messages(text, text, int, text, text, text, timestamptz, timestamptz, text, bigint, bigint, pgque.caller) is
  'Returns the messages of a queue by id, at most limit_count, one row for each consumer, without receiving them. only_status: pending, '
  'processing, delayed, retry, expired, dead, failed (dead with drop_policy hold) or archived. only_type, only_key, only_consumer: only those of '
  'this type, key or consumer. since, until: only those created at since or later, and before until. matching: only those with this text in the '
  'payload (its first 100,000 characters), the headers or last_error, in upper or lower case (of the letters that the database''s locale knows). '
  'after_id: only those with a greater id. before_id: only those with a lower id, the newest first. To read page by page, begin with after_id 0, or '
  'with before_id 9223372036854775807, and continue with the last msg_id; a message then has all its rows, '
  'so there may be a few more than limit_count. available_at: when the message can be received, or its lease expires. dl_id: set if it is a dead '
  'letter. A filter that few messages satisfy makes the call read all of them, for each consumer: with only_consumer, for one. Errors: PQ001 no such queue; PQ005 another status, or limit_count '
  'is negative.';

create or replace function pgque.get_message(
  queue_name text, inout msg_id bigint, caller pgque.caller default current_user,
  out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query
    select m.msg_id, m.consumer_name, m.status, m.type, m.payload, m.headers, m.key, m.payload_bytes, m.created_at, m.available_at,
      m.receive_count, m.retry_count, m.last_error, m.expires_at, m.worker, m.batch_id, m.dl_id
    from pgque._messages(v_queue, $2, 100) m
    where $2 is not null
    order by m.consumer_name;
  if not found then
    perform pgque._no_message(v_queue, $2);
  end if;
end
$$;
comment on function pgque.get_message(text, bigint, pgque.caller) is
  'Returns one message, a row for each consumer that still has it, without receiving it. status is one of those of list_messages(). available_at: '
  'when the message can be received, or its lease expires. dl_id: set if it is a dead letter. Errors: PQ001 no such queue; PQ010 no consumer has it.';

create or replace function pgque.message_history(
  queue_name text, msg_id bigint, caller pgque.caller default current_user,
  out at timestamptz, out event text, out consumer_name text, out worker text, out number bigint, out detail text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $f$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_event  pgque.event := pgque._event_in_log(v_queue, $2);
  v_tick   pgque.tick;
  v_ended  text := case when v_event.ev_id is not null then 'done' end;
begin
  -- Without the note, no index serves the search for what was cancelled.
  if v_ended = 'done' and pgque._noted(v_queue.queue_id, '{cancelled}') then
    v_ended := pgque._ended_state(v_queue, null, $2);
  end if;
  if v_event.ev_id is not null and not pgque._noted(v_queue.queue_id, '{moved,external}') then
    v_tick := pgque._tick_of_event(v_queue, $2);   -- else the order of ids is not the one of ticks
  end if;
  return query execute format(
    $q$
    with m as materialized (
      select m.* from pgque._messages($1, $2, 100) m where $2 is not null
    ),
    found as (
      select coalesce($3, min(m.created_at)) as at, 'sent' as event, null::text as consumer_name, null::text as worker, null::bigint as number, null::text as detail
      from m
      having coalesce($3, min(m.created_at)) is not null
      union all
      select $4, 'ticked', null, null, $5, null where $5 is not null
      union all
      select l.pos_time, 'delivered', m.consumer_name, m.worker, m.batch_id, 'delivery ' || nullif(m.receive_count, 0)
      from m
      join pgque.consumer c on c.co_name = m.consumer_name
      join pgque.subscriber s on s.sub_queue = $6 and s.sub_consumer = c.co_id and s.sub_main is null
      cross join lateral pgque._lease(s.sub_id, m.batch_id) l
      where m.status = 'processing' and l.pos_time is not null
      union all
      select m.available_at, case m.status when 'processing' then 'lease expires' else 'due' end, m.consumer_name, m.worker, null,
        concat_ws(', ', case when m.retry_count > 0 then 'rejected ' || m.retry_count || case m.retry_count when 1 then ' time' else ' times' end end, m.last_error)
      from m
      where m.status in ('retry', 'delayed') or m.status = 'processing' and m.worker is not null   -- who reads alone has no lease
      union all
      select m.expires_at, 'expires', m.consumer_name, null, null, null from m where m.status <> 'archived' and isfinite(m.expires_at)
      union all
      select d.dl_time, m.status, m.consumer_name, null, d.dl_id, concat_ws(', ', case when m.receive_count > 0 then m.receive_count || case m.receive_count when 1 then ' delivery' else ' deliveries' end end, d.dl_reason)
      from m
      cross join lateral (select d.* from pgque.dead_letter d where d.dl_id = m.dl_id limit 1) d   -- the planner would read all for a join
      union all
      select a.archived_at, 'archived', c.co_name, a.arc_worker, a.archive_id, concat_ws(', ', a.arc_outcome, case when a.arc_receives > 0 then a.arc_receives || case a.arc_receives when 1 then ' delivery' else ' deliveries' end end)
      from pgque.archive a
      left join pgque.consumer c on c.co_id = a.arc_consumer
      where a.ev_id = $2 and %s
      union all
      select null, $8, null, null, null, null where $8 is not null and not exists (select from m)
      union all
      select a.act_time, a.act_call, a.act_args ->> 'consumer_name', null, null, 'by ' || a.act_role
      from (select a.* from pgque.action a order by a.act_time desc limit 1000) a
      where a.act_queue = $7 and a.act_args ->> 'msg_id' = $2::text and a.act_time >= ($1).queue_created_at   -- not of an earlier queue of this name
    )
    select f.at, f.event, f.consumer_name, f.worker, f.number, nullif(f.detail, '')
    from found f
    order by f.at nulls last, f.event <> 'sent', f.event, f.consumer_name
    $q$, pgque._archived_by('a', v_queue.queue_id))
  using v_queue, $2, v_event.ev_time, v_tick.tick_time, v_tick.tick_id, v_queue.queue_id, v_queue.queue_name, v_ended;
  if not found then
    perform pgque._no_message(v_queue, $2);
  end if;
end
$f$;
comment on function pgque.message_history(text, bigint, pgque.caller) is
  'Returns what is known of one message, the oldest first: at, event, consumer_name, worker, number, detail. Nothing is stored for it: the rows come from the '
  'log, open batches, retries, dead letters, the archive and the newest 1,000 actions. event: sent, ticked (the first tick that may cover it), '
  'delivered, lease expires, due, expires, dead, failed, archived, done or cancelled (without a time), or the function that a role called for it. number: the tick_id of ticked, the batch_id of delivered, the dl_id of dead and failed, the archive_id of archived. Errors: '
  'PQ001 no such queue; PQ010 nothing is known of the message.';

create or replace function pgque._no_message(p_queue pgque.queue, p_id bigint) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ010', pg_catalog.format('message not found: %s of queue %I', coalesce(p_id::text, 'null'), p_queue.queue_name),
    'Check the id. Every consumer is done with the message, it was cancelled, or it was never committed.');
end
$$;

create or replace function pgque.message_status(
  queue_name text, msg_id bigint, caller pgque.caller default current_user,
  out consumer_name text, out status text, out receive_count int, out retry_count int, out available_at timestamptz,
  out worker text, out batch_id bigint, out last_error text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
begin
  return query
    select m.consumer_name, m.status, m.receive_count, m.retry_count, m.available_at, m.worker, m.batch_id, m.last_error
    from pgque._messages(v_queue, $2, 100) m
    where $2 is not null
    order by m.consumer_name;
  if not found then
    perform pgque._no_message(v_queue, $2);
  end if;
end
$$;
comment on function pgque.message_status(text, bigint, pgque.caller) is
  'Returns the state of one message, a row for each consumer that still has it. status: pending, processing, delayed, retry, expired, dead, failed '
  '(dead with drop_policy hold) or archived. Errors: PQ001 no such queue; PQ010 no consumer has it.';

-- Up to 0.8 it had a column less, and CREATE OR REPLACE cannot add one.
do $$
begin
  perform pgque._drop_function(p.oid)
  from pg_proc p
  where p.oid = to_regprocedure('pgque.list_workers(text, text, pgque.caller)') and 'waiting' <> all (p.proargnames);
end
$$;
create or replace function pgque.list_workers(
  queue_name text default null, consumer_name text default null, caller pgque.caller default current_user,
  out queue text, out consumer text, out worker text, out batches int, out messages bigint, out last_seen timestamptz, out lease_until timestamptz,
  out waiting bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue;
begin
  if $1 is not null then
    v_queue := pgque._queue($1, caller, 'see');
  end if;
  return query
    select q.queue_name, c.co_name, h.worker, count(distinct h.token)::int, sum(h.messages)::bigint, max(h.at), min(h.until), sum(h.waiting)::bigint
    from pgque.subscriber s
    join pgque.queue q on q.queue_id = s.sub_queue
    join pgque.consumer c on c.co_id = s.sub_consumer
    cross join lateral (
      select (l.lease).pos_worker as worker, l.token, (l.lease).pos_done_count - l.settled as messages, (l.lease).pos_time as at, l.until, 0 as waiting
      from pgque._open_batches(s.sub_id) l
      union all
      select r.ev_worker, r.ev_batch, 1, null, r.ev_retry_after, 0
      from pgque.retry_queue r
      where r.ev_owner = s.sub_id and r.ev_batch is not null and r.ev_retry_after > pgque.clock()
      union all
      select b.worker, null, 0, null, null, b.messages from pgque._waiting_for_workers(s) b
    ) h
    where s.sub_role = 'pool' and (($1 is null and pgque._may(caller, 'see', q.queue_id)) or q.queue_id = v_queue.queue_id) and ($2 is null or c.co_name = $2)
    group by q.queue_name, c.co_name, h.worker
    order by q.queue_name, c.co_name, h.worker;
end
$$;
comment on function pgque.list_workers(text, text, pgque.caller) is
  'Returns the workers that have messages now: batches, messages, last_seen (when the worker last received), lease_until (when the first of its '
  'leases expires), waiting (messages that wait for a key of which the worker has a message; see key_concurrency). Errors: PQ001 no such queue.';

create or replace function pgque.list_poison(
  queue_name text, limit_count int default 100, caller pgque.caller default current_user,
  out msg_id bigint, out consumer_name text, out receive_count int, out last_error text, out status text, out dl_id bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  -- A message that was delivered again is in the retry queue or a dead letter.
  return query execute format(
    $q$
    select m.msg_id, m.consumer_name, m.receive_count, m.last_error, m.status, m.dl_id
    from (
      (%s)
      union all
      (%s)
    ) m
    order by m.receive_count desc, m.msg_id
    limit $7
    $q$, pgque._limited_sql(pgque._retry_messages_sql(), 'm.receive_count > m.retry_count + 1'),
    pgque._limited_sql(pgque._dead_messages_sql($d$ and (greatest(d.dl_receives, d.ev_retry) > coalesce(d.ev_retry, 0) + 1 or d.dl_reason = 'receive attempts used up')$d$), 'true'))
  using v_queue.queue_id, pgque.clock(), 100000, null::bigint, 0::bigint, null::int, case when $2 < 0 then 0 else $2 end;
end
$$;
comment on function pgque.list_poison(text, int, pgque.caller) is
  'Returns messages that were delivered more than once without an outcome, or were given up for that reason. They may kill their workers. dl_id is '
  'set if the message is a dead letter. Errors: PQ001 no such queue.';
