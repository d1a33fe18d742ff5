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
  v_position := case when v_sub.sub_main is null then pgque._standing(v_sub, v_position) else pgque._batch_of_worker(v_sub) end;
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
  p.pos_batch as sub_batch, p.pos_next_tick as sub_next_tick, s.sub_role, s.sub_main, s.sub_worker
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
create or replace function pgque._is_gone(p_queue_id int) returns boolean
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
create or replace function pgque._hurry() returns void
language sql as $$ select pg_catalog.set_config('lock_timeout', '200ms', true) $$;

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
  v_old    pgque.tick;
begin
  if $1 is not null then
    i_queue_name := (pgque._queue($1, caller, 'see')).queue_name;
  end if;
  for v_queue in
    select q.* from pgque.queue q
    where ($1 is null and pgque._may(caller, 'see', q.queue_id)) or q.queue_name = $1 collate "default"
    order by q.queue_name
  loop
    begin
      v_last := null;
      v_old := null;
      ev_new := null;
      queue_name := v_queue.queue_name;
      queue_ntables := v_queue.queue_ntables;
      queue_cur_table := v_queue.queue_cur_table;
      queue_rotation_period := v_queue.queue_rotation_period;
      queue_switch_time := v_queue.queue_switch_time;
      queue_external_ticker := v_queue.queue_external_ticker;
      queue_ticker_paused := v_queue.queue_ticker_paused;
      queue_ticker_max_count := v_queue.queue_ticker_max_count;
      queue_ticker_max_lag := v_queue.queue_ticker_max_lag;
      queue_ticker_idle_period := v_queue.queue_ticker_idle_period;
      queue_paused := v_queue.queue_paused;
      queue_max_retries := v_queue.queue_max_retries;
      queue_uid := v_queue.queue_uid;
      ticker_lag := null;
      ev_per_sec := null;
      last_tick_id := null;
      perform pgque._hurry();
      if pgque._missing_leaf(v_queue.queue_id) is null then
        v_last := pgque._last_tick(v_queue);
        -- The last tick that is a minute old, found backwards, since a busy queue has too many
        -- ticks to read; the first tick of a younger queue.
        execute format('select t.* from (%s) t where t.tick_time <= $1 order by t.tick_id desc limit 1', pgque._ticks_sql(v_queue.queue_id))
        into v_old using pgque.clock() - interval '1 minute';
        if v_old.tick_id is null then
          execute format('select t.* from (%s) t order by t.tick_id limit 1', pgque._ticks_sql(v_queue.queue_id)) into v_old;
        end if;
      end if;
      ticker_lag := pgque.clock() - v_last.tick_time;
      -- For a second at least: a burst after the creation is no rate.
      ev_per_sec := (v_last.tick_event_seq - v_old.tick_event_seq) / greatest(extract(epoch from pgque.clock() - v_old.tick_time), 1);
      ev_new := coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0) - v_last.tick_event_seq;
      last_tick_id := v_last.tick_id;
      if not exists (select from pgque.queue q where q.queue_id = v_queue.queue_id) then
        perform pgque._no_queue(queue_name);
      end if;
      return next;
      perform pgque._let_go();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        return next;
      when others then
        if $1 is not null or not pgque._is_gone(v_queue.queue_id) then
          raise;
        end if;   -- else the queue was dropped meanwhile
    end;
  end loop;
end
$$;
comment on function pgque.get_queue_info(text, pgque.caller) is
  'Returns one row for each queue, or for one queue: settings, ticker_lag (age of the last tick), ev_per_sec (over the last minute, or since the queue was created), ev_new (events '
  'since the last tick), last_tick_id. Values are NULL if another session has a table of the queue locked. Errors: PQ001 no such queue.';

-- Returns the subscribers of a queue, or those of a name, each with its newest
-- position.  Both leaves in one statement: a position may move from one to the other.
create or replace function pgque._positions(p_queue_id int, p_name text default null) returns table (sub pgque.subscriber, pos pgque.position)
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return query
    select s, case when n.pos_sub is null then pgque._position(s.sub_id) else row(n.*)::pgque.position end
    from pgque.subscriber s
    left join lateral (
      select p.* from pgque.position p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1
    ) n on true
    where s.sub_queue = p_queue_id and (p_name is null or pgque._subscriber_name(s) = p_name);
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
  if p_pos.pos_tick = p_last.tick_id or pgque._unfinished(p_sub, p_pos, p_last.tick_snapshot) is null then
    v_sent := pgque._unfinished(p_sub, p_pos, pg_catalog.pg_current_snapshot());
    return case when v_sent is not null then greatest(v_since, v_sent) end;
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
-- p_blind, only those that need no table of the queue.  p_last: the last tick of the
-- queue, if the caller knows it.
create or replace function pgque._consumers(
  p_queue pgque.queue, p_subs pgque.subscriber[], p_positions pgque.position[], p_blind boolean, p_last pgque.tick default null,
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
    v_pos := case when v_sub.sub_main is null then pgque._standing(v_sub, v_pos) else pgque._batch_of_worker(v_sub) end;
    last_tick := v_pos.pos_tick;
    current_batch := v_pos.pos_batch;
    next_tick := v_pos.pos_next_tick;
    role := v_sub.sub_role;
    skipped_events := p_positions[n].pos_skipped;
    if not p_blind then
      pending_events := coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0) - v_pos.pos_event_seq;
      if v_sub.sub_main is null then
        lag := pgque.clock() - pgque._pending_since(v_sub, v_pos, p_last);
        -- What was rolled back has drawn ids, too.
        pending_events := case when lag is null then 0 else pending_events end;
      else
        lag := case when v_pos.pos_batch is not null then pgque.clock() - (pgque._tick(v_sub.sub_queue, pgque._end_of(v_pos))).tick_time end;
      end if;
      if v_sub.sub_main is null then
        -- Messages that may be received again, or were not delivered yet because of
        -- their order.  Those in the open window are pending anyway.
        select coalesce(sum(w.n) filter (where w.behind), 0) as n, min(w.since) as since into v_due
        from (
          select count(*) as n, min(r.ev_retry_after) as since, r.ev_id <= v_pos.pos_event_seq as behind
          from pgque.retry_queue r where r.ev_owner = v_sub.sub_id and r.ev_retry_after <= v_now
          group by 3
          union all
          select (l.lease).pos_done_count - l.settled, l.until, (l.lease).pos_tick < v_pos.pos_tick
          from pgque._lapsed(v_sub.sub_id, v_pos) l
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
      perform pgque._hurry();
      return query select c.* from pgque._consumers(v_queue, v_subs, v_positions, pgque._missing_leaf(v_queue.queue_id) is not null) c;
      perform pgque._let_go();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        v_locked := true;
      when others then
        if not pgque._is_gone(v_queue.queue_id) then
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
    v_pos := pgque._standing(v_sub, pgque._position(v_sub.sub_id));
  else
    v_tick := pgque._tick(v_queue.queue_id, pgque._slowest_tick(v_queue.queue_id));
    v_pos.pos_snapshot := v_tick.tick_snapshot;
    v_pos.pos_event_seq := v_tick.tick_event_seq;
  end if;
  loop
    v_upto := greatest(v_upto, v_pos.pos_done_id, v_pos.pos_event_seq, 0) + v_length;
    if v_upto >= pg_sequence_last_value(v_queue.queue_event_seq) is not false then
      v_upto := null;
    end if;
    v_rows := pgque._rows_sql(v_queue.queue_id, coalesce('(e.ev_owner is null or e.ev_owner = ' || v_sub.sub_id || ')', 'e.ev_owner is null')
      || coalesce(' and not (e.ev_id <= ' || v_pos.pos_done_id || format(' and pg_visible_in_snapshot(e.ev_txid, %L))', v_pos.pos_next_snapshot), '')
      || coalesce(' and e.ev_id <= ' || v_upto, ''),
      null, pgque._xids(v_pos.pos_snapshot, pg_current_snapshot()) * pgque._span_xids(v_queue, 0, v_upto));
    exit when v_upto is null;
    execute format('select count(distinct e.ev_id) from (%s) e', v_rows) into v_count;
    exit when v_count >= $2;
    v_length := 8 * v_length;
  end loop;
  for v_lapsed in select (l.lease).* from pgque._lapsed(v_sub.sub_id, v_pos) l loop
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
          select from pg_catalog.unnest(pgque._said($1, array[pgque._event(pgque._slim_waiting(r))])) s where s.ev_owner = -2))
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
create or replace function pgque._places(p_queue pgque.queue, p_id bigint) returns text[]
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
-- or more: all rows of one message are returned together.  p_where is a condition on a
-- row m of the result.  p_status, p_consumer and p_after, which are part of p_where
-- too, avoid needless reads.
create or replace function pgque._messages(
  p_queue pgque.queue, p_id bigint, p_limit int, p_where text default 'true', p_status text default null, p_consumer text default null, p_after bigint default 0,
  out msg_id bigint, out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now     timestamptz := pgque.clock();
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
    v_places := pgque._places(p_queue, p_id);
  end if;
  for v_sub in
    select s.*
    from pgque.subscriber s
    where s.sub_queue = p_queue.queue_id and s.sub_main is null and (p_consumer is null or pgque._subscriber_name(s) = p_consumer)
    order by s.sub_id
  loop
    if coalesce(p_status, 'processing') in ('processing', 'retry', 'expired') then
      for v_held in
        select h.* from pgque._held(v_sub.sub_id) h
        where ((h.lease).pos_last_id <= p_after or (h.lease).pos_done_id >= p_id) is not true
      loop
        return query execute pgque._messages_sql(pgque._renewed_sql(p_queue.queue_id, pgque._unsettled_sql(v_sub, v_held.lease, v_and, v_places)), $q$
          case when e.ev_expires <= $2 and $4 <= $2 then 'expired' when $4 > $2 then 'processing' else 'retry' end,
          case when $4 = 'infinity' then e.ev_time else $4 end, coalesce(e.ev_retry, 0) + $6, $5, case when $4 > $2 then $7 end
          $q$, p_where)
        using v_sub.sub_consumer, v_now, p_limit, v_held.until, (v_held.lease).pos_worker, (v_sub.sub_role = 'pool')::int, v_held.token;
      end loop;
    end if;
    return query select m.* from pgque._messages_ahead(p_queue, v_sub, p_limit, p_where, p_status, p_after, v_places) m;
  end loop;
  if coalesce(p_status, 'delayed') in ('pending', 'processing', 'delayed', 'retry', 'expired') then
    return query execute pgque._limited_sql(pgque._waiting_messages_sql(), p_where) using p_queue.queue_id, v_now, p_limit, p_id, p_after;
  end if;
  if coalesce(p_status, 'dead') in ('dead', 'failed') then
    -- One consumer after the other, in the order of an index.
    for v_sub.sub_consumer in
      select c.co_id
      from pgque.consumer c
      where c.co_queue in (0, p_queue.queue_id) and (p_consumer is null or c.co_name = p_consumer)
        -- One lookup each; an EXISTS may become a join with all dead letters.
        and (select true from pgque.dead_letter d where d.dl_queue_id = p_queue.queue_id and d.dl_consumer_id = c.co_id limit 1)
    loop
      return query execute pgque._limited_sql(pgque._dead_messages_sql(' and d.dl_consumer_id = $6'), p_where)
      using p_queue.queue_id, v_now, p_limit, p_id, p_after, v_sub.sub_consumer;
    end loop;
  end if;
  if coalesce(p_status, 'archived') = 'archived' then
    return query execute pgque._limited_sql(
      $q$
      select a.ev_id, c.co_name, 'archived', a.ev_type, a.ev_data, a.ev_headers, a.ev_key, a.ev_bytes, a.ev_time, null::timestamptz,
        a.arc_receives, coalesce(a.ev_retry, 0), a.ev_error, a.ev_expires, a.arc_worker, null::bigint, null::bigint
      from pgque.archive a
      left join pgque.consumer c on c.co_id = a.arc_consumer
      where a.ev_id > $5 and a.ev_id <= coalesce($4, 9223372036854775807) and $q$ || pgque._archived_by('a', p_queue.queue_id), p_where)
    using p_queue.queue_id, v_now, p_limit, p_id, p_after;
  end if;
end
$$;

-- Returns those of them that are in the log and that a consumer has not received.  It
-- reads ids range by range, each eight times as long as the one before, until it has enough.
-- (No sequential scans: if a table was analyzed when it had only the first range, the
-- planner expects that all its rows are in that range.)
create or replace function pgque._messages_ahead(
  p_queue pgque.queue, p_sub pgque.subscriber, p_limit int, p_where text, p_status text, p_after bigint, p_places text[],
  out msg_id bigint, out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_moved     boolean := pgque._noted(p_queue.queue_id, '{moved,external}');
  v_position  pgque.position;
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
  v_position := pgque._next_from(pgque._position(p_sub.sub_id));
  loop
    if p_places is null then
      v_upto := greatest(v_upto, p_after, v_position.pos_event_seq) + v_length;
      if v_moved or v_upto >= pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq) is not false then
        v_upto := null;
      end if;
      v_and := pg_catalog.format(' and e.ev_id > %s%s', p_after, ' and e.ev_id <= ' || v_upto);
      v_xids := pgque._span_xids(p_queue, p_after, v_upto);
    end if;
    return query execute pgque._messages_sql(
      pgque._renewed_sql(p_queue.queue_id, pgque._unfinished_sql(p_sub, v_position, pg_catalog.pg_current_snapshot(), v_and, p_places, v_xids)), $q$
        case when e.ev_expires <= $2 then 'expired' when e.ev_owner is not null then 'retry' else 'pending' end,
        e.ev_time, coalesce(e.ev_retry, 0), null::text, null::bigint
        $q$, p_where)
    using p_sub.sub_consumer, pgque.clock(), p_limit;
    get diagnostics v_count = row_count;
    v_found := v_found + v_count;
    exit when v_upto is null or v_found >= p_limit;
    p_after := v_upto;
    v_length := 8 * v_length;
  end loop;
end
$$;

-- Returns the query for the messages of _messages() that are in the retry queue.
create or replace function pgque._waiting_messages_sql() returns text
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

-- Returns the query for those that are dead letters, with one more condition.
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
create or replace function pgque._messages_sql(p_rows text, p_state text, p_where text) returns text
language sql immutable as $f$
  select pgque._limited_sql(pg_catalog.format(
    $q$
    select e.ev_id, (select c.co_name from pgque.consumer c where c.co_id = $1), x.status, e.ev_type, e.ev_data, e.ev_headers, e.ev_key, e.ev_bytes,
      e.ev_time, x.available_at, x.receives, coalesce(e.ev_retry, 0), e.ev_error, e.ev_expires, x.worker, x.batch, null::bigint
    from (%s) e
    cross join lateral (select %s) x (status, available_at, receives, worker, batch)
    $q$, p_rows, p_state), p_where)
$f$;

-- Returns a query for the first $3 rows by id that satisfy a condition, and the other
-- rows of the last message.
create or replace function pgque._limited_sql(p_rows text, p_where text) returns text
language sql immutable as $f$
  select pg_catalog.format(
    $q$
    select m.*
    from (%s) m (msg_id, consumer_name, status, type, payload, headers, key, payload_bytes, created_at, available_at, receive_count, retry_count,
      last_error, expires_at, worker, batch_id, dl_id)
    where %s
    order by m.msg_id
    fetch first $3 rows with ties
    $q$, p_rows, p_where)
$f$;

-- No index serves the filters: one of the log by type made send_batch take 1.4 times as
-- long, and a filter that a million pending messages do not satisfy takes 0.2 to 0.6 s
-- without it.  With many consumers this is read for each of them.
create or replace function pgque.list_messages(
  queue_name text, only_status text default null, limit_count int default 100, only_type text default null, only_key text default null,
  only_consumer text default null, since timestamptz default null, until timestamptz default null, matching text default null,
  after_id bigint default null, caller pgque.caller default current_user,
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
  v_where := concat_ws(' and ', 'm.msg_id > ' || coalesce($10, 0), 'm.status = ' || quote_literal($2), 'm.type = ' || quote_literal($4),
    'm.key = ' || quote_literal($5), 'm.consumer_name = ' || quote_literal($6), 'm.created_at >= ' || quote_literal($7), 'm.created_at < ' || quote_literal($8),
    pgque._matching_sql($9, 'pg_catalog.left(m.payload, 100000), m.headers::text, m.last_error'));
  -- The planner takes a status for rare, and would read and sort the whole retry queue.
  perform set_config('enable_sort', 'off', true) where $2 in ('retry', 'delayed') and coalesce($4, $5, $6) is null;
  return query
    select m.msg_id, m.consumer_name, m.status, m.type, m.payload, m.headers, m.key, m.payload_bytes, m.created_at, m.available_at,
      m.receive_count, m.retry_count, m.last_error, m.expires_at, m.worker, m.batch_id, m.dl_id
    from (
      select m.*, row_number() over w as n, rank() over (order by m.msg_id) as begins
      from pgque._messages(v_queue, null, $3, v_where, $2, $6, coalesce($10, 0)) m
      window w as (order by m.msg_id, m.consumer_name)
    ) m
    where m.n <= $3 or m.begins <= $3 and $10 is not null
    order by m.n;
end
$$;
comment on function pgque.list_messages(text, text, int, text, text, text, timestamptz, timestamptz, text, bigint, pgque.caller) is
  'Returns the messages of a queue by id, at most limit_count, one row for each consumer, without receiving them. only_status: pending, '
  'processing, delayed, retry, expired, dead, failed (dead with drop_policy hold) or archived. only_type, only_key, only_consumer: only those of '
  'this type, key or consumer. since, until: only those created at since or later, and before until. matching: only those with this text in the '
  'payload (its first 100,000 characters), the headers or last_error, in upper or lower case (of the letters that the database''s locale knows). '
  'after_id: only those with a greater id. To read page by page, begin with 0 and continue with the last msg_id; a message then has all its rows, '
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
  'Returns one message, a row for each consumer that still has it, without receiving it. The columns are those of list_messages(). Errors: PQ001 '
  'no such queue; PQ010 no consumer has it.';

create or replace function pgque._no_message(p_queue pgque.queue, p_id bigint) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ010', pg_catalog.format('message not found: %s of queue %I', coalesce(p_id::text, 'null'), p_queue.queue_name),
    'Check the id. Every consumer is done with the message, or it was never committed.');
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
  'Returns the state of one message, a row for each consumer that still has it. The status is that of list_messages(). Errors: PQ010 no consumer '
  'has it.';

create or replace function pgque.list_workers(
  queue_name text default null, consumer_name text default null, caller pgque.caller default current_user,
  out queue text, out consumer text, out worker text, out batches int, out messages bigint, out last_seen timestamptz, out lease_until timestamptz
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue;
begin
  if $1 is not null then
    v_queue := pgque._queue($1, caller, 'see');
  end if;
  return query
    select q.queue_name, c.co_name, h.worker, count(distinct h.token)::int, sum(h.messages)::bigint, max(h.at), min(h.until)
    from pgque.subscriber s
    join pgque.queue q on q.queue_id = s.sub_queue
    join pgque.consumer c on c.co_id = s.sub_consumer
    cross join lateral (
      select (l.lease).pos_worker as worker, l.token, (l.lease).pos_done_count - l.settled as messages, (l.lease).pos_time as at, l.until
      from pgque._held(s.sub_id) l
      union all
      select r.ev_worker, r.ev_batch, 1, null, r.ev_retry_after
      from pgque.retry_queue r
      where r.ev_owner = s.sub_id and r.ev_batch is not null and r.ev_retry_after > pgque.clock()
    ) h
    where s.sub_role = 'pool' and (($1 is null and pgque._may(caller, 'see', q.queue_id)) or q.queue_id = v_queue.queue_id) and ($2 is null or c.co_name = $2)
    group by q.queue_name, c.co_name, h.worker
    order by q.queue_name, c.co_name, h.worker;
end
$$;
comment on function pgque.list_workers(text, text, pgque.caller) is
  'Returns the workers that have messages now: batches, messages, last_seen (when the worker last received), lease_until (when the first of its '
  'leases expires).';

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
    $q$, pgque._limited_sql(pgque._waiting_messages_sql(), 'm.receive_count > m.retry_count + 1'),
    pgque._limited_sql(pgque._dead_messages_sql($d$ and (greatest(d.dl_receives, d.ev_retry) > coalesce(d.ev_retry, 0) + 1 or d.dl_reason = 'receive attempts used up')$d$), 'true'))
  using v_queue.queue_id, pgque.clock(), 100000, null::bigint, 0::bigint, null::int, case when $2 < 0 then 0 else $2 end;
end
$$;
comment on function pgque.list_poison(text, int, pgque.caller) is
  'Returns messages that were delivered more than once without an outcome, or were given up for that reason. They may kill their workers. dl_id is '
  'set if the message is a dead letter.';

-- Returns how many consumers of a queue metrics() and health() report one by one: those
-- with the greatest lag.  All others are only in the sums.
create or replace function pgque._most_consumers() returns int
language sql immutable as $$ select 100 $$;

-- Returns the subscribers of a queue with the greatest lag and their positions, the
-- number of its consumers, and the slowest of them.  The messages that the slowest
-- still needs, those in its workers' batches included, have ids above slowest_seq.
create or replace function pgque._stragglers(
  p_queue_id int, out subs pgque.subscriber[], out positions pgque.position[], out consumers bigint, out slowest text, out slowest_seq bigint
)
language plpgsql as $$
begin
  with p as materialized (select p.sub, p.pos from pgque._positions(p_queue_id) p)
  select f.subs, f.positions, f.consumers, s.consumer_name, s.seq into subs, positions, consumers, slowest, slowest_seq
  from (
    select pg_catalog.array_agg(p.sub) as subs, pg_catalog.array_agg(p.pos) as positions, coalesce(pg_catalog.max(p.consumers), 0) as consumers
    from (
      select p.sub, p.pos, pg_catalog.count(*) filter (where (p.sub).sub_main is null) over () as consumers
      from p
      -- A worker without a batch needs no messages, whatever its position is.
      order by (p.sub).sub_main is not null and (p.pos).pos_batch is null, (p.pos).pos_tick
      limit pgque._most_consumers()
    ) p
  ) f
  left join (
    select pgque._subscriber_name(p.sub) as consumer_name, n.seq
    from p
    cross join lateral (
      select o.pos_tick, o.pos_event_seq from pgque._oldest_need((p.sub).sub_id) o where pg_catalog.cardinality((p.pos).pos_open) > 0
      union all
      -- The same as _next_from(), in one query for many consumers.
      select case when n.past then (p.pos).pos_next_tick else (p.pos).pos_tick end,
        case when n.past then (p.pos).pos_next_event_seq else (p.pos).pos_event_seq end
      from (select (p.pos).pos_fresh > 0 and (p.pos).pos_last_id is null) n (past)
      where pg_catalog.cardinality((p.pos).pos_open) > 0 is not true
    ) n (tick, seq)
    where (p.sub).sub_main is null
    order by n.tick
    limit 1
  ) s on true;
end
$$;

-- Returns the size of the tables of each queue with their indexes, by the queue's
-- number, and under 0 that of the shared tables; or only those of some queues.  A queue
-- with an exclusively locked table is left out.
create or replace function pgque._sizes(p_queues int[] default null) returns jsonb
language sql as $$
  with leaf as materialized (
    select i.inhrelid, pg_catalog.split_part(c.relname, '_', 2)::int as queue_id
    from pg_catalog.pg_inherits i
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    where i.inhparent in ('pgque.event'::regclass, 'pgque.tick'::regclass) and p_queues is null
    union all
    select pg_catalog.to_regclass(l.leaf), q.id
    from pg_catalog.unnest(p_queues) q (id)
    cross join lateral pgque._leaves(q.id) l
  ), heap as materialized (
    select c.oid, coalesce(l.queue_id, 0) as queue_id
    from pg_catalog.pg_class c
    left join leaf l on l.inhrelid = c.oid
    where c.relnamespace = 'pgque'::regnamespace and c.relkind = 'r'
      -- By their ids, since the catalog of a server with many queues is large.
      and c.oid = any (array(
        select l.inhrelid from leaf l
        union all
        select k.oid from pg_catalog.pg_class k where p_queues is null and k.relnamespace = 'pgque'::regnamespace))
  ), held as (
    select h.queue_id
    from heap h
    join pg_catalog.pg_locks k on k.relation = h.oid
    where k.locktype = 'relation' and k.mode = 'AccessExclusiveLock' and k.granted and k.pid is distinct from pg_catalog.pg_backend_pid()
      and k.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
  )
  select pg_catalog.jsonb_object_agg(s.queue_id, s.bytes)
  from (
    select p.queue_id, pg_catalog.sum(pg_catalog.pg_total_relation_size(p.oid)) as bytes
    from heap p
    where p.queue_id not in (select h.queue_id from held h)
    group by p.queue_id
  ) s
$$;

-- Returns the same; null if it has to wait for a lock.
create or replace function pgque._sizes_soon(p_queues int[] default null) returns jsonb
language plpgsql as $$
declare
  v_wait   text := pg_catalog.current_setting('lock_timeout');
  v_sizes  jsonb;
begin
  perform pgque._hurry();
  v_sizes := pgque._sizes(p_queues);
  perform pg_catalog.set_config('lock_timeout', v_wait, true);
  return v_sizes;
exception
  when lock_not_available then
    return null;
end
$$;

-- Returns the transaction of this database that has written for the longest time, if
-- there is one.  hidden: whether there are writing transactions whose age the owner may
-- not read.
create or replace function pgque._oldest_writer(out who text, out gid text, out age interval, out hidden boolean) returns setof record
language sql volatile as $$
  select w.who, w.gid, pgque.clock() - w.since,
    pg_catalog.bool_or(w.since is null) over () and not pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'usage')
  from (
    select 'pid ' || a.pid || coalesce(' (' || nullif(pg_catalog.concat_ws(', ', 'role ' || a.usename, 'application ' || nullif(a.application_name, '')), '') || ')', '') as who,
      null as gid, a.xact_start as since
    from pg_catalog.pg_stat_activity a
    where a.backend_xid is not null and a.datname = pg_catalog.current_database() and a.pid <> pg_catalog.pg_backend_pid()
    union all
    select pg_catalog.format('prepared by %I as %L', p.owner, p.gid), p.gid, p.prepared
    from pg_catalog.pg_prepared_xacts p
    where p.database = pg_catalog.current_database()
  ) w
  order by w.since
  limit 1
$$;

-- Checks how many transaction ids are left before PostgreSQL refuses new ones (54000), so
-- that nothing can be sent or delivered any more.  The same limit exists for ids of
-- multixacts, which row locks use.  The check needs no id itself, so it also runs then.
create or replace function pgque._health_ids(out status text, out detail text, out advice text)
language plpgsql as $$
declare
  v_found   record;
  v_holder  record;
begin
  -- PostgreSQL keeps the last three million ids for its repair, and warns below forty.
  select d.datname, a.what, 2144483648 - a.age as free into v_found
  from pg_catalog.pg_database d
  cross join lateral (values ('transaction ids', age(d.datfrozenxid)), ('multixact ids', pg_catalog.mxid_age(d.datminmxid))) a (what, age)
  order by a.age desc
  limit 1;
  status := case when v_found.free < 40000000 then 'fail' when v_found.free < 600000000 then 'warn' else 'ok' end;
  detail := pg_catalog.format('%s are left: %s million of 2144 (database %I)', v_found.what, v_found.free / 1000000, v_found.datname);
  if v_found.free <= 0 then
    detail := pg_catalog.format('no %s are left (database %I): PostgreSQL refuses each transaction that writes (54000)', v_found.what, v_found.datname);
  end if;
  if status = 'ok' then
    return;
  end if;
  -- Whatever keeps VACUUM from freezing rows comes first.
  select h.* into v_holder
  from (
    select age(p.transaction) as age, pg_catalog.format('prepared transaction %L of database %I', p.gid, p.database) as who,
      pg_catalog.format('rollback prepared %1$L (or commit prepared %1$L) in database %2$I', p.gid, p.database) as remedy
    from pg_catalog.pg_prepared_xacts p
    union all
    select greatest(age(s.xmin), age(s.catalog_xmin)), pg_catalog.format('replication slot %I', s.slot_name),
      case when s.active then 'let its receiver catch up, or end it and ' else '' end || pg_catalog.format('select pg_drop_replication_slot(%L)', s.slot_name)
    from pg_catalog.pg_replication_slots s
    union all
    select greatest(age(a.backend_xid), age(a.backend_xmin)), pg_catalog.format('transaction of pid %s', a.pid), pg_catalog.format('select pg_terminate_backend(%s)', a.pid)
    from pg_catalog.pg_stat_activity a
    where a.pid <> pg_catalog.pg_backend_pid()
  ) h
  where h.age > 100000000
  order by h.age desc
  limit 1;
  detail := detail || coalesce('; ' || v_holder.who || ' keeps them from being freed', '');
  advice := coalesce('First: ' || v_holder.remedy || '. Then', 'Run')
    || ' as a superuser: vacuumdb --all --freeze. If that does not help: "Preventing Transaction ID Wraparound Failures" in the manual of PostgreSQL';
end
$$;

-- Returns the metrics of one queue.
create or replace function pgque._queue_metrics(
  p_queue pgque.queue, p_bytes numeric, out metric text, out queue text, out consumer text, out value double precision
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_last   pgque.tick := pgque._last_tick(p_queue);
  v_now    timestamptz := pgque.clock();
  v_back   record;
  v_shown  int[];
begin
  select f.* into v_back from pgque._stragglers(p_queue.queue_id) f;
  v_shown := array(select s.sub_id from unnest(v_back.subs) s);
  return query
    select m.metric, p_queue.queue_name, null::text, m.value::double precision
    from (values
      ('pgque_queue_events_total', coalesce(pg_sequence_last_value(p_queue.queue_event_seq), 0)::numeric),
      ('pgque_queue_last_tick_id', v_last.tick_id),
      ('pgque_queue_ticker_lag_seconds', extract(epoch from pgque.clock() - v_last.tick_time)),
      ('pgque_queue_bytes', p_bytes),
      ('pgque_queue_rotation_age_seconds', extract(epoch from pgque.clock() - p_queue.queue_switch_time)),
      ('pgque_queue_retries', (select count(*) from pgque.retry_queue r where r.ev_queue = p_queue.queue_id)),
      ('pgque_queue_dead_letters', (
        select count(*) from pgque.dead_letter d
        where d.dl_queue_id = p_queue.queue_id and (d.dl_forward is null or d.dl_time < pgque.clock() - interval '1 minute'))),
      ('pgque_queue_consumers', v_back.consumers),
      ('pgque_queue_paused', p_queue.queue_paused::int),
      -- The same as in _health_senders(), far from the limit.
      ('pgque_queue_depth', case when v_back.consumers > 0 then coalesce(pg_sequence_last_value(p_queue.queue_event_seq), 0) - v_back.slowest_seq end),
      ('pgque_queue_max_depth', nullif(p_queue.queue_max_depth, 0)),
      ('pgque_queue_retention_seconds', extract(epoch from p_queue.queue_retention_period))
    ) m (metric, value)
    where m.value is not null;
  return query
    select 'pgque_messages_' || t.tal_what || '_total', p_queue.queue_name, c.co_name, sum(t.tal_count)::double precision
    from pgque.tally t
    left join pgque.subscriber s on s.sub_id = t.tal_sub and s.sub_id = any (v_shown)
    left join pgque.consumer c on c.co_id = s.sub_consumer
    where t.tal_queue = p_queue.queue_id
    group by t.tal_what, c.co_name;
  return query
    select 'pgque_messages_in_flight', p_queue.queue_name, c.co_name, sum(h.messages)::double precision
    from (
      select (p.sub).sub_id, (o.lease).pos_done_count - o.settled as messages
      from pgque._positions(p_queue.queue_id) p
      cross join lateral pgque._held((p.sub).sub_id) o
      where cardinality((p.pos).pos_open) > 0
      union all
      select s.sub_id, 1
      from pgque.subscriber s
      join pgque.retry_queue r on r.ev_owner = s.sub_id
      where s.sub_queue = p_queue.queue_id and r.ev_batch is not null and r.ev_retry_after + '0' > v_now   -- by the index of held ones
    ) h
    left join pgque.subscriber s on s.sub_id = h.sub_id and s.sub_id = any (v_shown)
    left join pgque.consumer c on c.co_id = s.sub_consumer
    group by c.co_name;
  return query
    select m.metric, i.queue_name, i.consumer_name, m.value::double precision
    from (
      -- A consumer may have the name of a subconsumer of another one: a.b.
      select distinct on (c.consumer_name) c.*
      from pgque._consumers(p_queue, v_back.subs, v_back.positions, false, v_last) c
      order by c.consumer_name, c.role = 'coop_member'
    ) i
    cross join lateral (values
      ('pgque_consumer_lag_seconds', extract(epoch from i.lag)),
      ('pgque_consumer_last_seen_seconds', extract(epoch from i.last_seen)),
      ('pgque_consumer_pending_events', i.pending_events::numeric),
      ('pgque_consumer_skipped_events_total', i.skipped_events::numeric),
      ('pgque_consumer_open_batch', (i.current_batch is not null)::int::numeric)
    ) m (metric, value)
    where m.value is not null;
end
$$;

create or replace function pgque.metrics(out metric text, out queue text, out consumer text, out value double precision) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_sizes  jsonb := pgque._sizes_soon();
begin
  return query
    select 'pgque_dead_tuples', null::text, null::text, coalesce(sum(t.n_dead_tup), 0)::double precision
    from pg_stat_all_tables t where t.schemaname = 'pgque';
  return query
    select 'pgque_oldest_transaction_seconds', null::text, null::text, coalesce(extract(epoch from w.age), 0)::double precision
    from (select) one
    left join pgque._oldest_writer() w on true
    where (w.hidden and w.age is null) is not true;
  return query
    select 'pgque_recurring_messages', null::text, null::text, count(*)::double precision from pgque.recurring;
  return query
    select 'pgque_recurring_failing', null::text, null::text, count(*)::double precision from pgque._recurring_health() h where h.status <> 'ok';
  return query
    select 'pgque_schema_bytes', null::text, null::text, sum(s.value::numeric)::double precision from jsonb_each_text(v_sizes) s having v_sizes is not null;
  return query select m.* from pgque._metrics_of(pgque._some_queues(array(select q.queue_id from pgque.queue q), 1), v_sizes) m;
end
$$;
comment on function pgque.metrics() is
  'Returns figures for a monitoring system, one a row: metric, queue, consumer, value. If a queue has more than 100 consumers '
  '(pgque_queue_consumers), the 100 with the greatest lag have rows of their own, and the others are summed. The call does not wait for locked '
  'tables: it leaves out the figures of their queues. If the server has no room for the locks of all queues (one a queue, see '
  'max_locks_per_transaction), the call leaves out some queues, chosen at random.';

create or replace function pgque.metrics(
  queue_name text, caller pgque.caller default current_user, out metric text, out queue text, out consumer text, out value double precision
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queues  int[] := pgque._some_queues(pgque._visible($1, caller), 1);
begin
  return query select m.* from pgque._metrics_of(v_queues, pgque._sizes_soon(v_queues)) m;
end
$$;
comment on function pgque.metrics(text, pgque.caller) is
  'Returns those figures of metrics() that concern one queue, or with NULL each queue that the caller has a right to. Any right to a queue is enough. Errors: PQ001 no such queue.';

-- Returns the metrics of some queues, in the order of their names; p_sizes as _sizes()
-- returns it.
create or replace function pgque._metrics_of(
  p_queues int[], p_sizes jsonb, out metric text, out queue text, out consumer text, out value double precision
) returns setof record
language plpgsql as $$
declare
  v_queue  pgque.queue;
begin
  for v_queue in select q.* from pgque.queue q where q.queue_id = any (p_queues) order by q.queue_name loop
    continue when not p_sizes ? v_queue.queue_id::text or pgque._missing_leaf(v_queue.queue_id) is not null;
    begin
      perform pgque._hurry();
      return query select f.* from pgque._queue_metrics(v_queue, (p_sizes ->> v_queue.queue_id::text)::numeric) f;
      perform pgque._let_go();
    exception
      when sqlstate 'PQ099' or lock_not_available then
        null;
      when others then
        if not pgque._is_gone(v_queue.queue_id) then
          raise;
        end if;   -- else the queue was dropped meanwhile
    end;
  end loop;
end
$$;

-- Returns the queue of that name, or with null all queues that the caller has a right
-- to.
create or replace function pgque._visible(p_queue text, p_caller name) returns int[]
language plpgsql as $$
begin
  if p_queue is not null then
    return array[(pgque._queue(p_queue, p_caller, 'see')).queue_id];
  end if;
  return array(select q.queue_id from pgque.queue q where pgque._may(p_caller, 'see', q.queue_id));
end
$$;

-- Returns as many of these queues as the server has locks for, chosen at random.
-- Reading the last value of a sequence locks it until the transaction ends.  p_locks:
-- the number of such locks for each queue.
create or replace function pgque._some_queues(p_queues int[], p_locks int) returns int[]
language sql as $$
  select case when pg_catalog.cardinality(p_queues) <= pgque._lock_room() / p_locks then p_queues else array(
    select q.id from pg_catalog.unnest(p_queues) q (id) order by pg_catalog.random() limit pgque._lock_room() / p_locks) end
$$;

-- Checks one queue, for _queue_health().
create or replace function pgque._health_tables(p_queue pgque.queue, out status text, out detail text, out advice text)
language plpgsql as $$
declare
  v_missing  text := pgque._missing_leaf(p_queue.queue_id);
begin
  status := 'ok';
  detail := 'all six tables are there';
  if v_missing is not null then
    status := 'fail';
    detail := format('table %s is missing', v_missing);
    advice := format('Restore it from a backup, or select pgque.drop_queue(%L, true) and create the queue again.', p_queue.queue_name);
  elsif p_queue.queue_restored then
    detail := pgque._lacks(p_queue);
    status := case when detail is null then 'warn' else 'fail' end;
    advice := case when detail is null then format('select pgque.ticker(%L)', p_queue.queue_name) else pgque._restore_advice() end;
    detail := coalesce('the queue was loaded from a dump that is not complete, so it neither ticks nor takes messages: ' || detail,
      'the queue was loaded from a dump and was not used since');
  end if;
end
$$;

-- Far from the limit the depth is computed from the ids, as in _room().  Near it the
-- messages are counted, except for queues with many consumers.
create or replace function pgque._health_senders(
  p_queue pgque.queue, p_consumers bigint, p_slowest text, p_slowest_seq bigint, out status text, out detail text, out advice text
)
language plpgsql as $$
declare
  v_crowd  boolean := p_consumers > pgque._most_consumers();
  v_warn   numeric := p_queue.queue_max_depth * coalesce(nullif(p_queue.queue_health_depth_warn, 0), 100) / 100.0;
  v_depth  bigint;
begin
  if p_queue.queue_max_depth > 0 and p_consumers > 0 then
    v_depth := coalesce(pg_sequence_last_value(p_queue.queue_event_seq), 0)
      - least(p_slowest_seq, (select min(r.ev_id) - 1 from pgque.retry_queue r where r.ev_queue = p_queue.queue_id));
    if v_depth >= v_warn and not v_crowd then
      v_depth := pgque._depth(p_queue.queue_id);
    end if;
  end if;
  status := case
    when v_depth >= p_queue.queue_max_depth and not v_crowd then 'fail'
    when p_queue.queue_paused or v_depth >= v_warn then 'warn'
    else 'ok'
  end;
  detail := concat_ws(', ', case when p_queue.queue_paused then 'paused: send is refused' else 'open' end,
    case when v_depth >= v_warn then 'depth ' else 'depth at most ' end || v_depth || ' of max_depth ' || p_queue.queue_max_depth);
  advice := nullif(concat_ws('; ',
    case when p_queue.queue_paused then format('select pgque.resume(%L)', p_queue.queue_name) end,
    case when v_depth >= v_warn then
      format('Start the slowest consumer%s, or raise the limit: select pgque.set_queue_config(%L, ''max_depth'', ''%s'')',
        ' (' || p_slowest || ')', p_queue.queue_name, 2 * p_queue.queue_max_depth) end), '');
end
$$;

create or replace function pgque._health_ticks(p_queue pgque.queue, p_last pgque.tick, out status text, out detail text, out advice text)
language plpgsql set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_waits  interval;   -- how long a message has waited for a tick
begin
  if pgque._tick_reason(p_queue, p_last, pg_current_snapshot()) = 'events' then
    -- The seal or the purge of a message with a key is no message.
    execute format('select $1 - greatest($2, e.ev_time) from (%s) e where (e.ev_owner < 0) is not true limit 1',
      pgque._rows_sql(p_queue.queue_id, 'true', null, pgque._xids(p_last.tick_snapshot, pg_current_snapshot())))
    into v_waits using pgque.clock(), p_last.tick_time;
    if p_last.tick_time > pgque.clock() then
      v_waits := p_last.tick_time - pgque.clock();   -- the clock was set back
    end if;
  end if;
  status := case
    when v_waits > nullif(p_queue.queue_health_tick_fail, '0') then 'fail'
    when v_waits > nullif(p_queue.queue_health_tick_warn, '0') or p_queue.queue_ticker_paused then 'warn'
    else 'ok'
  end;
  detail := format('last tick %s, %s ago', p_last.tick_id, date_trunc('milliseconds', pgque.clock() - p_last.tick_time))
    || coalesce(', messages have waited for the next one for ' || date_trunc('milliseconds', v_waits), '');
  advice := case
    when p_queue.queue_ticker_paused then format('select pgque.set_queue_config(%L, ''ticker_paused'', ''false'')', p_queue.queue_name)
    when status = 'ok' then null
    when p_queue.queue_external_ticker then format('Have the external ticker call pgque.ticker(%L, tick_id, time, event_seq).', p_queue.queue_name)
    when pgque._has_cron() then 'See the advice of the check ticker.'
    else 'Start the ticker beside the server: pgque ticker.'
  end;
end
$$;

create or replace function pgque._health_consumers(
  p_queue pgque.queue, p_last pgque.tick, p_consumers bigint, p_subs pgque.subscriber[], p_positions pgque.position[], p_cause text,
  out status text, out detail text, out advice text
)
language plpgsql as $$
declare
  v_soon    interval := 0.8 * p_queue.queue_retention_period;
  v_late    record;   -- the consumer whose oldest pending message is oldest
  v_unread  bigint;
begin
  status := 'ok';
  if p_consumers = 0 then
    detail := 'no consumer';
    execute format('select count(*) from (select from (%s) e limit 1000) e', pgque._rows_sql(p_queue.queue_id, 'e.ev_owner is null')) into v_unread;
    if v_unread > 0 then
      status := 'warn';
      detail := format('no consumer; recent messages that no consumer gets: %s', replace(v_unread::text, '1000', '1000 or more'));
      advice := format('A new consumer gets only later messages. To deliver the messages that are still there too: select pgque.subscribe(%L, ''my_consumer'', ''earliest'')',
        p_queue.queue_name);
    end if;
    return;
  end if;
  select c.consumer_name, c.lag into v_late
  from pgque._consumers(p_queue, p_subs, p_positions, false, p_last) c
  order by c.lag desc, c.consumer_name
  limit 1;
  status := case
    when v_late.lag > least(nullif(p_queue.queue_health_pending_fail, '0'), p_queue.queue_retention_period) then 'fail'
    when v_late.lag > least(nullif(p_queue.queue_health_pending_warn, '0'), v_soon) then 'warn'
    else 'ok'
  end;
  detail := case when p_consumers = 1 then '1 consumer, ' else p_consumers || ' consumers, ' end
    || case when v_late.lag > '0' then format('oldest message pending for consumer %s: %s', v_late.consumer_name, date_trunc('milliseconds', v_late.lag))
      else 'nothing pending' end;
  if status <> 'ok' then
    advice := concat_ws(' ',
      case when v_late.lag > v_soon then format('It misses messages older than %s. To keep them longer: select pgque.set_queue_config(%L, ''retention_period'', %L).',
        p_queue.queue_retention_period, p_queue.queue_name, 2 * p_queue.queue_retention_period) end,
      case when p_cause is not null then format('First follow the advice of the check %s of this queue: its consumers wait for that.', p_cause)
        else format('Start consumer %1$s. Only if nobody needs its messages any more, discard them with pgque.unsubscribe(%2$L, %1$L).', v_late.consumer_name, p_queue.queue_name)
      end,
      case when v_late.lag <= v_soon then format('It misses messages older than %s (retention_period).', p_queue.queue_retention_period) end);
  end if;
end
$$;

-- The owner's index finds those that are due (hence + 0): a queue may have many others.
create or replace function pgque._health_retries(p_queue pgque.queue, p_pumped int[], out status text, out detail text, out advice text)
language plpgsql as $$
declare
  v_now   timestamptz := pgque.clock();
  v_due   record;
  v_wait  bigint;
begin
  select count(*) as n, v_now - min(r.ev_retry_after) as overdue into v_due
  from pg_catalog.unnest(p_pumped) o (id)
  join pgque.retry_queue r on r.ev_owner = o.id
  where r.ev_queue + 0 = p_queue.queue_id and r.ev_retry_after < v_now;
  select count(*) into v_wait
  from pgque.subscriber s
  join pgque.retry_queue r on r.ev_owner = s.sub_id
  where s.sub_queue = p_queue.queue_id and s.sub_id <> all (p_pumped) and r.ev_retry_after <= v_now;
  status := case when v_due.overdue > interval '1 minute' then 'fail' when v_due.overdue > interval '5 seconds' then 'warn' else 'ok' end;
  detail := v_due.n || ' due' || case when v_wait > 0 then pg_catalog.format(', %s wait for their consumers', v_wait) else '' end;
  advice := case when v_due.overdue > interval '5 seconds' then 'See the check ticker: the ticker moves them. To move them once: select pgque.maint()' end;
end
$$;

-- Checks whether workers have had messages for much longer than a lease lasts: the
-- lease was extended again and again, or is long.  Leased messages are not pending, so
-- no other check shows them.
create or replace function pgque._health_leases(
  p_queue pgque.queue, p_subs pgque.subscriber[], out status text, out detail text, out advice text
)
language plpgsql as $$
declare
  v_now   timestamptz := pgque.clock();
  v_long  interval := greatest(10 * p_queue.queue_visibility_timeout, nullif(p_queue.queue_health_pending_fail, '0'));
  v_held  record;   -- the oldest one
begin
  select pgque._subscriber_name(s) as consumer, h.worker, v_now - h.since as age into v_held
  from pg_catalog.unnest(p_subs) s
  cross join lateral (
    select (o.lease).pos_worker as worker, (o.lease).pos_time as since from pgque._held(s.sub_id) o where o.until > v_now
    union all
    select l.pos_worker, l.pos_time
    from (select distinct r.ev_batch as id from pgque.retry_queue r where r.ev_owner = s.sub_id and r.ev_batch is not null and r.ev_retry_after + '0' > v_now) b
    cross join lateral pgque._lease(s.sub_id, b.id) l
  ) h
  where s.sub_role = 'pool'
  order by h.since
  limit 1;
  status := case when v_held.age > v_long and p_queue.queue_health_pending_fail > '0' then 'warn' else 'ok' end;
  detail := case when v_held.age is null then 'no worker holds a lease'
    else pg_catalog.format('worker %s of consumer %s has held a lease for %s', v_held.worker, v_held.consumer, pg_catalog.date_trunc('seconds', v_held.age)) end;
  advice := case when status <> 'ok' then pg_catalog.format('If the worker hangs, end it and release its messages: select pgque.reclaim(%L, %L, %L)',
    p_queue.queue_name, v_held.consumer, v_long) end;
end
$$;

-- Returns all checks of one queue; no row if it was dropped meanwhile.  p_pumped: see
-- _pumped().
create or replace function pgque._queue_health(
  p_queue pgque.queue, p_pumped int[], out check_name text, out queue text, out status text, out detail text, out advice text
) returns setof record
language plpgsql as $$
declare
  v_last     pgque.tick;
  v_back     record;
  v_ticks    record;
  v_retries  record;
begin
  check_name := 'tables';
  queue := p_queue.queue_name;
  select h.* into status, detail, advice from pgque._health_tables(p_queue) h;
  if status = 'fail' and not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id) then
    return;
  end if;
  return next;
  if status <> 'ok' then
    return;
  end if;

  -- A lock on any of these tables prevents ticks or rotation of the queue.
  execute format('lock table pgque.tick_%1$s_0, pgque.tick_%1$s_1, pgque.tick_%1$s_2 in access share mode', p_queue.queue_id);
  if not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id) then
    perform pgque._no_queue(p_queue.queue_name);   -- a session that waited for the lock may have waited for a DROP of the queue
  end if;
  v_last := pgque._last_tick(p_queue);
  select f.* into v_back from pgque._stragglers(p_queue.queue_id) f;
  return query select 'senders', queue, h.* from pgque._health_senders(p_queue, v_back.consumers, v_back.slowest, v_back.slowest_seq) h;
  v_ticks := pgque._health_ticks(p_queue, v_last);
  return query select 'ticks', queue, v_ticks.status, v_ticks.detail, v_ticks.advice;
  return query
    select 'rotation', queue, case when r.late then 'warn' else 'ok' end,
      format('last rotation %s ago, slowest consumer %s', date_trunc('seconds', pgque.clock() - p_queue.queue_switch_time), coalesce(v_back.slowest, '(none)')),
      case when r.late then 'Let the slowest consumer catch up, or unsubscribe it. Release the batches that its workers hold (list_workers) with reclaim(). End the sessions that lock the queue''s tables (pg_dump, an open transaction)'
        || coalesce(': ' || pgque._lockers(p_queue.queue_id, false), '') || '.' end
    from (
      select pgque.clock() - p_queue.queue_switch_time > 4 * p_queue.queue_rotation_period
        and (select sum(pg_table_size(to_regclass(l.leaf))) from pgque._leaves(p_queue.queue_id) l where l.kind = 'event') > 67108864 as late
      offset 0
    ) r;
  v_retries := pgque._health_retries(p_queue, p_pumped);
  return query
    select 'consumers', queue, h.*
    from pgque._health_consumers(p_queue, v_last, v_back.consumers, v_back.subs, v_back.positions,
      case when v_ticks.status <> 'ok' then 'ticks' when v_retries.status <> 'ok' then 'retries' end) h;
  return query select 'retries', queue, v_retries.status, v_retries.detail, v_retries.advice;
  return query select 'leases', queue, h.* from pgque._health_leases(p_queue, v_back.subs) h;
  return query
    select 'dead letters', queue, case when d.n + d.waiting > 0 then 'warn' else 'ok' end,
      d.n || coalesce(', newest at ' || d.newest, '') || case when d.waiting > 0 then format(', %s wait to be forwarded', d.waiting) else '' end,
      case
        when d.n > 0 then format('Read the reasons: select * from pgque.dlq_inspect(%1$L). When the cause is mended: select pgque.dlq_requeue_all(%1$L)', queue)
        when d.waiting > 0 then 'Resume the queue that dead_letter_queue names, raise its max_depth, or start its consumers.'
      end
    from (
      select count(*) filter (where l.dl_forward is null) as n, max(l.dl_time) filter (where l.dl_forward is null) as newest,
        count(*) filter (where l.dl_forward is not null and l.dl_time < pgque.clock() - interval '1 minute') as waiting
      from pgque.dead_letter l
      where l.dl_queue_id = p_queue.queue_id
    ) d;
end
$$;

-- Returns the checks of some queues, in the order of their names.
create or replace function pgque._health_of(
  p_queues int[], out check_name text, out queue text, out status text, out detail text, out advice text
) returns setof record
language plpgsql as $$
declare
  v_queue    pgque.queue;
  v_queues   int[] := pgque._some_queues(p_queues, 2);
  v_pumped   int[] := array(select o.id from pgque._pumped() o (id));
begin
  if cardinality(v_queues) < cardinality(p_queues) then
    check_name := 'queues';
    status := 'warn';
    detail := format('%s of %s queues are checked, chosen at random: the server has no room for more locks', cardinality(v_queues), cardinality(p_queues));
    advice := 'Raise max_locks_per_transaction, or check one queue at a time: select * from pgque.health(queue).';
    return next;
  end if;
  for v_queue in select q.* from pgque.queue q where q.queue_id = any (v_queues) order by q.queue_name loop
    begin
      perform pgque._hurry();
      return query select h.* from pgque._queue_health(v_queue, v_pumped) h;
      perform pgque._let_go();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        check_name := 'tables'; queue := v_queue.queue_name;
        detail := 'locked by ' || pgque._lockers(v_queue.queue_id, true);
        status := case when detail is null then 'warn' else 'fail' end;
        advice := case when detail is null then 'Check again. If the lock stays, find its session in pg_locks, among the tables of schema pgque.'
          else 'End that transaction, or wait for its end (VACUUM FULL, ALTER TABLE, a drop_queue() that is not committed). Until then the queue has no tick and no rotation.' end;
        detail := coalesce(detail, 'a table that the queues share was locked');
        return next;
      when others then
        if not pgque._is_gone(v_queue.queue_id) then
          raise;
        end if;   -- else the queue was dropped meanwhile
    end;
  end loop;
end
$$;

create or replace function pgque.health(
  queue_name text, caller pgque.caller default current_user, out check_name text, out queue text, out status text, out detail text, out advice text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queues  int[] := pgque._visible($1, caller);
begin
  return query select h.* from pgque._health_of(v_queues) h;
  return query
    select h.*
    from pgque._recurring_health() h
    where h.queue in (select q.queue_name from pgque.queue q where q.queue_id = any (v_queues));
end
$$;
comment on function pgque.health(text, pgque.caller) is
  'Returns those checks of health() that concern one queue, or with NULL each queue that the caller has a right to. Any right to a queue is enough. Errors: PQ001 no such queue.';

-- Checks whether roles have rights on objects of pgque that neither pgque nor its
-- documents grant: a restore into a database with default privileges gives such rights,
-- and so does an administrator.  A command names all objects of a kind if pgque itself
-- grants the role no such right on any of them, else at most 50 objects: the next check
-- names the rest.
create or replace function pgque._health_rights(out status text, out detail text, out advice text)
language plpgsql set enable_seqscan = on set jit = off as $$
begin
  with every as materialized (
    select r.class_id, r.object_id, r.right_name, r.is_grantable, r.is_ours, r.is_told,
      case r.kind when 'procedure' then 'function' else r.kind end as kind,
      case r.grantee when 0 then 'public' else r.grantee::regrole::text end as role_name,
      (select ' (' || pg_catalog.quote_ident(a.attname) || ')' from pg_catalog.pg_attribute a
       where r.column_id > 0 and a.attrelid = r.object_id and a.attnum = r.column_id) as column_name
    from pgque._rights() r
    where r.is_granted
  ),
  others as materialized (
    select e.*, e.kind in ('table', 'sequence', 'function') and not exists (
      select from every k
      where (k.is_ours or k.is_told) and k.role_name = e.role_name and k.kind = e.kind and k.right_name = e.right_name) as everywhere
    from every e
    where not e.is_ours and not e.is_told or e.is_ours and e.is_grantable
  ),
  roles as (
    select o.role_name, pg_catalog.format('%s: %s on %s %s%s (%s%s)', o.role_name, pg_catalog.string_agg(distinct o.right_name, ', '),
      count(distinct o.object_id), o.kind, case when count(distinct o.object_id) > 1 then 's' end,
      pgque._object_name(min(o.class_id), min(o.object_id)), case when count(distinct o.object_id) > 1 then ', …' end) as text
    from others o
    group by o.role_name, o.kind
  ),
  objects as (
    select o.role_name, o.kind, pgque._object_name(o.class_id, o.object_id) as object_name, o.is_ours,
      pg_catalog.string_agg(o.right_name || coalesce(o.column_name, ''), ', ' order by o.right_name, o.column_name) as rights,
      pg_catalog.bool_or(o.is_grantable) as is_grantable
    from others o
    where not o.everywhere
    group by o.role_name, o.kind, o.class_id, o.object_id, o.is_ours
  ),
  commands as (
    select o.role_name, o.kind, pg_catalog.format('revoke %s on all %ss in schema pgque from %s%s',
      pg_catalog.string_agg(distinct o.right_name, ', '), case o.kind when 'function' then 'routine' else o.kind end, o.role_name,
      case when pg_catalog.bool_or(o.is_grantable) then ' cascade' end) as text
    from others o
    where o.everywhere
    group by o.role_name, o.kind
    union all
    select o.role_name, o.kind, pg_catalog.format('revoke %s%s on %s %s from %s%s', case when o.is_ours then 'grant option for ' end, o.rights,
      case o.kind when 'function' then 'routine' else o.kind end,
      pg_catalog.array_to_string((pg_catalog.array_agg(o.object_name order by o.object_name))[:50], ', '), o.role_name,
      case when pg_catalog.bool_or(o.is_grantable) then ' cascade' end)
    from objects o
    group by o.role_name, o.kind, o.rights, o.is_ours
  )
  select (select pg_catalog.string_agg(r.text, '; ' order by r.text) from roles r),
    (select pg_catalog.string_agg(c.text, '; ' order by c.role_name, c.kind, c.text) from commands c)
  into detail, advice;
  status := case when detail is null then 'ok' else 'warn' end;
  detail := coalesce(detail, 'no role has rights on the objects of pgque that pgque did not grant');
  advice := 'Let these roles use pgque''s own roles or grant_queue(). Then revoke: ' || advice;
end
$$;

create or replace function pgque.health(out check_name text, out queue text, out status text, out detail text, out advice text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_found  record;
  v_cron   record;
begin
  check_name := 'ticker'; queue := null;
  select bool_or(s.status = 'running') filter (where s.component = 'ticker') as runs, max(s.detail) filter (where s.component = 'ticker') as detail,
    max(s.status) filter (where s.component = 'scheduler') as scheduler
  into v_found from pgque.status() s;
  select c.failure, c.remedy into v_cron from pgque._cron_failure() c;
  status := case when v_found.scheduler = 'failing' then 'fail' when v_found.runs then 'ok' else 'warn' end;
  detail := case when v_found.scheduler <> 'failing' then v_found.detail else concat(case when not v_found.runs then 'no loop runs: ' end, v_cron.failure) end;
  advice := case
    when v_found.scheduler = 'failing' then v_cron.remedy
    when v_found.runs then null
    when v_found.scheduler = 'scheduled' then 'Check again in a minute. If no loop runs then: ' || coalesce(v_cron.remedy, 'select * from pgque.status()')
    when v_found.scheduler = 'none' then 'Run beside the server: pgque ticker. Or have a scheduler call ticker() and maint().'
    else 'select pgque.start(). Or have a scheduler call ticker() and maint().'
  end;
  if pg_is_in_recovery() then
    check_name := 'standby'; status := 'ok'; advice := null;
    detail := 'this server is a standby: its queues follow the primary, which runs the ticker';
  end if;
  -- If queues wait for the ticker, its check is before theirs.
  return query
    with found as materialized (select h.* from pgque._health_of(array(select q.queue_id from pgque.queue q)) with ordinality h),
    waits as (select string_agg(distinct f.queue, ', ') as queues from found f where f.check_name in ('ticks', 'retries') and f.status = 'fail')
    select f.check_name, f.queue, f.status, f.detail, f.advice
    from (
      select health.check_name, null as queue, case when health.status = 'warn' and w.queues is not null then 'fail' else health.status end as status,
        health.detail || case when health.status = 'warn' and w.queues is not null then ', and these queues wait: ' || left(w.queues, 200) else '' end as detail,
        health.advice, 0 as ordinality
      from waits w
      union all
      select f.* from found f
    ) f
    order by f.ordinality;

  return query select h.* from pgque._recurring_health() h;

  detail := pgque._loading();
  if detail is not null then
    check_name := 'restore'; queue := null;
    status := 'fail';
    detail := 'this database was loaded from a dump that is not complete, so queues neither tick nor take messages: ' || detail;
    advice := pgque._restore_advice();
    return next;
  end if;

  -- In a column, an index or a type, a value of type caller is a right that can be
  -- passed on.
  check_name := 'stored callers'; queue := null;
  select string_agg(pg_describe_object(d.classid, d.objid, d.objsubid), ', ' order by d.classid, d.objid, d.objsubid) as objects into v_found
  from pg_depend d
  left join pg_proc p on d.classid = 'pg_proc'::regclass and p.oid = d.objid
  where d.refclassid = 'pg_type'::regclass and d.refobjid in ('pgque.caller'::regtype, 'pgque.caller[]'::regtype)
    and d.deptype <> 'i' and d.classid not in ('pg_constraint'::regclass, 'pg_rewrite'::regclass)
    and p.pronamespace is distinct from 'pgque'::regnamespace;
  status := case when v_found.objects is null then 'ok' else 'fail' end;
  detail := coalesce('these can hold a value of type pgque.caller: ' || v_found.objects, 'none');
  advice := case when v_found.objects is not null then
    'Drop them. Every role that can read a stored caller can act as the role that stored it, and a dump of them cannot be restored.' end;
  return next;

  check_name := 'rights'; queue := null;
  if pgque._loading() is null then
    select h.* into status, detail, advice from pgque._health_rights() h;
  else
    -- pg_restore grants and revokes at the end.
    status := 'ok'; detail := 'not checked while a dump is being loaded'; advice := null;
  end if;
  return next;

  check_name := 'open transactions'; queue := null;
  select w.who, w.gid, w.age, w.hidden into v_found from pgque._oldest_writer() w;
  status := case when v_found.age > interval '1 hour' then 'warn' else 'ok' end;
  detail := coalesce(nullif(concat_ws('; ',
    'oldest writing transaction: ' || v_found.who || ', ' || date_trunc('seconds', v_found.age),
    case when v_found.hidden then 'other transactions write, and their age is hidden from ' || current_user end), ''), 'none');
  advice := nullif(concat_ws(' ',
    case when status <> 'ok' then 'Its messages are delivered when it commits, and the tables that it used are not emptied before. Other messages are not delayed.' end,
    case when status <> 'ok' and v_found.gid is not null then format('End the prepared transaction: commit prepared %1$L, or rollback prepared %1$L.', v_found.gid) end,
    case when v_found.hidden then format('To see their age: grant pg_read_all_stats to %I.', current_user) end), '');
  return next;

  check_name := 'transaction ids';
  select h.* into status, detail, advice from pgque._health_ids() h;
  return next;

  check_name := 'notifications';
  status := case when pg_notification_queue_usage() < 0.5 then 'ok' else 'fail' end;
  detail := format('the server''s queue of notifications is %s %% full', round(100 * pg_notification_queue_usage()));
  advice := case when status <> 'ok' then
    'End the session that listens within an open transaction: the server''s log names it. Until then ticks do not notify, and consumers find messages at their next poll.' end;
  return next;
end
$$;
comment on function pgque.health() is
  'Returns one check a row: status (ok, warn or fail), detail (what was found) and advice (what to do). The settings health_* of a queue are its '
  'thresholds. For a queue whose tables are locked, it names the session that holds the lock. If the server has no room for the locks of all queues (two a queue, see '
  'max_locks_per_transaction), some queues are checked, chosen at random, and the check queues says so.';
