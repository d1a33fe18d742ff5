-- ---------------------------------------------------------------------------
-- health: metrics and checks
-- ---------------------------------------------------------------------------

-- Returns how many consumers of a queue metrics() and health() report one by one: those
-- with the greatest lag.  All others are only in the sums.
create or replace function pgque._most_consumers() returns int
language sql immutable as $$ select 100 $$;

-- Returns the subscribers of a queue with the greatest lag and their positions, the
-- number of its consumers, and the slowest of them.  The messages that the slowest
-- still needs, those in its workers' batches included, have ids above slowest_seq.
create or replace function pgque._slowest_consumers(
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
      select o.pos_tick, o.pos_event_seq from pgque._oldest_needed_position((p.sub).sub_id) o where pg_catalog.cardinality((p.pos).pos_open) > 0
      union all
      -- Where each consumer reads on, as _next_from() finds it for one.  One query is
      -- cheaper than a call for each.
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

-- Returns the sizes as _sizes() does, or null if it has to wait for a lock.
create or replace function pgque._sizes_soon(p_queues int[] default null) returns jsonb
language plpgsql as $$
declare
  v_wait   text := pg_catalog.current_setting('lock_timeout');
  v_sizes  jsonb;
begin
  perform pgque._shorten_lock_timeout();
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
-- that no message can be sent or delivered.  The same limit exists for ids of
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

-- Returns how many dead letters of a queue stay, the time of the newest of them, and how
-- many have waited to be forwarded for a minute.  Younger ones are on their way.
create or replace function pgque._dead_letters_of(p_queue_id int, out stay bigint, out newest timestamptz, out waiting bigint)
language plpgsql as $$
begin
  select count(*) filter (where d.dl_forward is null), max(d.dl_time) filter (where d.dl_forward is null),
    count(*) filter (where d.dl_forward is not null and d.dl_time < pgque.clock() - interval '1 minute')
  into stay, newest, waiting
  from pgque.dead_letter d
  where d.dl_queue_id = p_queue_id;
end
$$;

-- Returns how many messages of a queue are leased now, a row for each lease.  The
-- subscribers are those of _slowest_consumers(): if they are not all, all are read.
create or replace function pgque._in_flight(p_queue_id int, p_subs pgque.subscriber[], p_positions pgque.position[], out sub_id int, out messages bigint)
returns setof record
language plpgsql as $$
declare
  v_now   timestamptz := pgque.clock();
  v_busy  int[];   -- those that may have an open batch
begin
  v_busy := case when cardinality(p_subs) < pgque._most_consumers()
    then array(select (p_subs[g.n]).sub_id from generate_subscripts(p_subs, 1) g (n) where cardinality((p_positions[g.n]).pos_open) > 0)
    else array(select (p.sub).sub_id from pgque._positions(p_queue_id) p where cardinality((p.pos).pos_open) > 0) end;
  return query
    select b.id, (o.lease).pos_done_count - o.settled
    from unnest(v_busy) b (id)
    cross join lateral pgque._open_batches(b.id) o
    union all
    select s.sub_id, 1
    from pgque.subscriber s
    join pgque.retry_queue r on r.ev_owner = s.sub_id
    where s.sub_queue = p_queue_id and r.ev_batch is not null and r.ev_retry_after + '0' > v_now;   -- by the index of held ones
end
$$;

-- Returns the metrics of one queue.
create or replace function pgque._queue_metrics(
  p_queue pgque.queue, p_bytes numeric, out metric text, out queue text, out consumer text, out value double precision
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_last   pgque.tick := pgque._last_tick(p_queue);
  v_back   record;
  v_shown  int[];
begin
  select f.* into v_back from pgque._slowest_consumers(p_queue.queue_id) f;
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
      ('pgque_queue_dead_letters', (select d.stay + d.waiting from pgque._dead_letters_of(p_queue.queue_id) d)),
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
    from pgque._in_flight(p_queue.queue_id, v_back.subs, v_back.positions) h
    left join pgque.subscriber s on s.sub_id = h.sub_id and s.sub_id = any (v_shown)
    left join pgque.consumer c on c.co_id = s.sub_consumer
    group by c.co_name;
  return query
    select m.metric, i.queue_name, i.consumer_name, m.value::double precision
    from (
      -- A consumer may have the name of a subconsumer of another one: a.b.
      select distinct on (c.consumer_name) c.*
      from pgque._consumers(p_queue, v_back.subs, v_back.positions, false, v_last, pgque._has_new_rows(p_queue.queue_id, v_last, pg_current_snapshot())) c
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
  'Returns the figures of one queue, or with NULL of each queue that the caller has a right to, one a row: metric, queue, consumer, value. The '
  'figures of the whole server are left out. Any right to a queue is enough. Errors: PQ001 no such queue.';

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
      perform pgque._shorten_lock_timeout();
      return query select f.* from pgque._queue_metrics(v_queue, (p_sizes ->> v_queue.queue_id::text)::numeric) f;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' or lock_not_available then
        null;
      when others then
        if not pgque._was_dropped(v_queue.queue_id) then
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
      format('Start the slowest consumer%s, or raise the limit: select pgque.alter_queue(%L, ''{"max_depth": %s}'')',
        ' (' || p_slowest || ')', p_queue.queue_name, 2 * p_queue.queue_max_depth) end), '');
end
$$;

create or replace function pgque._health_ticks(p_queue pgque.queue, p_last pgque.tick, p_new boolean default null, out status text, out detail text, out advice text)
language plpgsql set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_waits  interval;   -- how long a message has waited for a tick
begin
  if pgque._tick_reason(p_queue, p_last, pg_current_snapshot(), p_new) = 'events' then
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
    when p_queue.queue_ticker_paused then format('select pgque.alter_queue(%L, ''{"ticker_paused": false}'')', p_queue.queue_name)
    when status = 'ok' then null
    when p_queue.queue_external_ticker then format('Have the external ticker call pgque.ticker(%L, tick_id, time, event_seq).', p_queue.queue_name)
    when pgque._has_cron() then 'See the advice of the check ticker.'
    else 'Start the ticker beside the server: pgque ticker.'
  end;
end
$$;

-- p_latest: the consumer whose oldest pending message is oldest, and p_lag its age.
create or replace function pgque._health_consumers(
  p_queue pgque.queue, p_consumers bigint, p_latest text, p_lag interval, p_cause text,
  out status text, out detail text, out advice text
)
language plpgsql as $$
declare
  v_soon    interval := 0.8 * p_queue.queue_retention_period;
  v_unread  bigint;
begin
  status := 'ok';
  if p_consumers = 0 then
    detail := 'no consumer';
    execute format('select count(*) from (select from (%s) e limit 1000) e', pgque._rows_sql(p_queue.queue_id, 'e.ev_owner is null')) into v_unread;
    if v_unread > 0 and p_queue.queue_health_pending_warn > '0' then
      status := 'warn';
      detail := format('%s recent messages that no consumer gets: the queue has none', replace(v_unread::text, '1000', '1000 or more'));
      advice := format('A new consumer gets only later messages. To deliver the messages that are still there too: select pgque.subscribe(%L, ''my_consumer'', ''earliest'')',
        p_queue.queue_name);
    end if;
    return;
  end if;
  status := case
    when p_lag > least(nullif(p_queue.queue_health_pending_fail, '0'), p_queue.queue_retention_period) then 'fail'
    when p_lag > least(nullif(p_queue.queue_health_pending_warn, '0'), v_soon) then 'warn'
    else 'ok'
  end;
  detail := case when p_lag > '0' then format('%s since the oldest pending message of consumer %s', date_trunc('milliseconds', p_lag), p_latest)
      else 'nothing pending' end
    || case when p_consumers = 1 then ' (1 consumer)' else format(' (%s consumers)', p_consumers) end;
  if status <> 'ok' then
    advice := concat_ws(' ',
      case when p_lag > v_soon then format('It misses messages older than %s. To keep them longer: select pgque.alter_queue(%L, ''{"retention_period": "%s"}'').',
        p_queue.queue_retention_period, p_queue.queue_name, 2 * p_queue.queue_retention_period) end,
      case when p_cause is not null then format('First follow the advice of the check %s of this queue: its consumers wait for that.', p_cause)
        else format('Start consumer %1$s. Only if its messages are no longer needed, discard them with pgque.unsubscribe(%2$L, %1$L).', p_latest, p_queue.queue_name)
      end,
      case when p_lag <= v_soon then format('It misses messages older than %s (retention_period).', p_queue.queue_retention_period) end);
  end if;
end
$$;

-- The owner's index finds those that are due (hence + 0): a queue may have many others.
create or replace function pgque._health_retries(p_queue pgque.queue, p_pumped int[], p_subs pgque.subscriber[] default '{}', out status text, out detail text, out advice text)
language plpgsql as $$
declare
  v_now   timestamptz := pgque.clock();
  v_due   record;
  v_wait  bigint;
  v_keys  record;   -- those that are busy
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
  select count(*) as n, sum(l.messages) as messages into v_keys
  from pg_catalog.unnest(p_subs) s
  cross join lateral pgque._waiting_lanes(s) l
  where s.sub_keyed;
  detail := v_due.n || ' due' || case when v_wait > 0 then pg_catalog.format(', %s wait for their consumers', v_wait) else '' end
    || case when v_keys.n > 0 then pg_catalog.format(', %s of them for a busy key (keys: %s)', v_keys.messages, v_keys.n) else '' end;
  advice := case when v_due.overdue > interval '5 seconds' then 'See the check ticker: the ticker moves them. To move them once: select pgque.maint()' end;
end
$$;

-- Checks whether workers have had messages for much longer than a lease lasts: the
-- lease was extended again and again, or is long.  Leased messages are not pending, so
-- no other check shows them.
create or replace function pgque._health_leases(
  p_queue pgque.queue, p_subs pgque.subscriber[], p_positions pgque.position[], p_retries boolean, out status text, out detail text, out advice text
)
language plpgsql as $$
declare
  v_now   timestamptz := pgque.clock();
  v_long  interval := greatest(10 * p_queue.queue_visibility_timeout, nullif(p_queue.queue_health_pending_fail, '0'));
  v_held  record;   -- the oldest one
begin
  select pgque._subscriber_name(p_subs[g.n]) as consumer, h.worker, v_now - h.since as age into v_held
  from pg_catalog.generate_subscripts(p_subs, 1) g (n)
  cross join lateral (
    select (o.lease).pos_worker as worker, (o.lease).pos_time as since
    from pgque._open_batches((p_subs[g.n]).sub_id) o
    where pg_catalog.cardinality((p_positions[g.n]).pos_open) > 0 and o.until > v_now
    union all
    select l.pos_worker, l.pos_time
    from (
      select distinct r.ev_batch as id
      from pgque.retry_queue r
      where p_retries and r.ev_owner = (p_subs[g.n]).sub_id and r.ev_batch is not null and r.ev_retry_after + '0' > v_now
    ) b
    cross join lateral pgque._lease((p_subs[g.n]).sub_id, b.id) l
  ) h
  where (p_subs[g.n]).sub_role = 'pool'
  order by h.since
  limit 1;
  status := case when v_held.age > v_long and p_queue.queue_health_pending_fail > '0' then 'warn' else 'ok' end;
  detail := case when v_held.age is null then 'no worker holds a lease'
    else pg_catalog.format('%s is the age of the oldest lease, of worker %s of consumer %s', pg_catalog.date_trunc('seconds', v_held.age), v_held.worker, v_held.consumer) end;
  advice := case when status <> 'ok' then pg_catalog.format('If the worker hangs, end it and release its messages: select pgque.reclaim(%L, %L, %L)',
    p_queue.queue_name, v_held.consumer, v_long) end;
end
$$;

-- Returns which of some queues have rows in the retry queue, and which have dead letters:
-- most have neither, and one lookup each takes less time than the queries that would find
-- nothing.  Null if a table is locked.
create or replace function pgque._set_aside(p_queues int[], out retries int[], out dead int[])
language plpgsql as $$
begin
  perform pgque._shorten_lock_timeout();
  retries := array(select q.id from unnest(p_queues) q (id) where (select true from pgque.retry_queue r where r.ev_queue = q.id limit 1));
  dead := array(select q.id from unnest(p_queues) q (id) where (select true from pgque.dead_letter d where d.dl_queue_id = q.id limit 1));
  perform pgque._undo_block();
exception
  when sqlstate 'PQ099' then
    null;
  when lock_not_available then
    retries := null;
    dead := null;
end
$$;

-- Returns all checks of one queue; no row if it was dropped meanwhile.  p_pumped: see
-- _pump_owners().  p_retries, p_dead: whether it has any.  With p_figures there is one more row, with the figures of overview().
create or replace function pgque._queue_health(
  p_queue pgque.queue, p_pumped int[], p_figures boolean, p_retries boolean, p_dead boolean,
  out check_name text, out queue text, out status text, out detail text, out advice text, out figures jsonb
) returns setof record
language plpgsql as $$
declare
  v_last     pgque.tick;
  v_new      boolean;
  v_back     record;
  v_ticks    record;
  v_retries  record;
  v_late     record;   -- the consumers' lags
  v_dead     record;
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
  select f.* into v_back from pgque._slowest_consumers(p_queue.queue_id) f;
  return query select 'senders', queue, h.*, null::jsonb from pgque._health_senders(p_queue, v_back.consumers, v_back.slowest, v_back.slowest_seq) h;
  v_new := pgque._has_new_rows(p_queue.queue_id, v_last, pg_current_snapshot());
  v_ticks := pgque._health_ticks(p_queue, v_last, v_new);
  return query select 'ticks', queue, v_ticks.status, v_ticks.detail, v_ticks.advice, null::jsonb;
  return query
    select 'rotation', queue, case when r.late then 'warn' else 'ok' end,
      format('last rotation %s ago, slowest consumer %s', date_trunc('seconds', pgque.clock() - p_queue.queue_switch_time), coalesce(v_back.slowest, '(none)')),
      case when r.late then 'Let the slowest consumer catch up, or unsubscribe it. Release the batches that its workers hold (list_workers) with reclaim(). End the sessions that lock the queue''s tables (pg_dump, an open transaction)'
        || coalesce(': ' || pgque._lockers(p_queue.queue_id, false), '') || '.' end, null::jsonb
    from (
      select pgque.clock() - p_queue.queue_switch_time > 4 * p_queue.queue_rotation_period
        and (select sum(pg_table_size(to_regclass(l.leaf))) from pgque._leaves(p_queue.queue_id) l where l.kind = 'event') > 67108864 as late
      offset 0
    ) r;
  if p_retries then
    v_retries := pgque._health_retries(p_queue, p_pumped, v_back.subs);
  else
    select 'ok' as status, '0 due' as detail, null as advice into v_retries;
  end if;
  select pg_catalog.max(c.lag) as lag, pg_catalog.max(c.pending_events) as pending, (pg_catalog.array_agg(c.consumer_name order by c.lag desc, c.consumer_name))[1] as consumer
  into v_late
  from pgque._consumers(p_queue, v_back.subs, v_back.positions, false, v_last, v_new, p_retries) c;
  return query
    select 'consumers', queue, h.*, null::jsonb
    from pgque._health_consumers(p_queue, v_back.consumers, v_late.consumer, v_late.lag,
      case when v_ticks.status <> 'ok' then 'ticks' when v_retries.status <> 'ok' then 'retries' end) h;
  return query select 'retries', queue, v_retries.status, v_retries.detail, v_retries.advice, null::jsonb;
  return query select 'leases', queue, h.*, null::jsonb from pgque._health_leases(p_queue, v_back.subs, v_back.positions, p_retries) h;
  if p_dead then
    v_dead := pgque._dead_letters_of(p_queue.queue_id);
  else
    select 0::bigint as stay, null::timestamptz as newest, 0::bigint as waiting into v_dead;
  end if;
  return query
    select 'dead letters', queue, case when d.stay + d.waiting > 0 then 'warn' else 'ok' end,
      d.stay || coalesce(', newest at ' || d.newest, '') || case when d.waiting > 0 then format(', %s wait to be forwarded', d.waiting) else '' end,
      case
        when d.stay > 0 then format('Read the reasons: select * from pgque.dlq_inspect(%1$L). When the cause is mended: select pgque.dlq_requeue_all(%1$L)', queue)
        when d.waiting > 0 then 'Resume the queue that dead_letter_queue names, raise its max_depth, or start its consumers.'
      end, null::jsonb
    from (select v_dead.stay, v_dead.newest, v_dead.waiting) d;
  if p_figures then
    check_name := 'figures';
    status := 'ok'; detail := null; advice := null;
    figures := jsonb_build_object(
      'ev_per_sec', pgque._rate(p_queue, v_last),
      'events', coalesce(pg_sequence_last_value(p_queue.queue_event_seq), 0),
      'pending', v_late.pending,
      'lag', extract(epoch from v_late.lag),
      -- Neither delayed messages nor those that a worker has again
      'retries', (
        select count(*)
        from pgque.retry_queue r
        where p_retries and r.ev_queue = p_queue.queue_id and r.ev_owner <> 0 and r.ev_receives > 0 and (r.ev_batch is null or r.ev_retry_after <= pgque.clock())),
      'dead', v_dead.stay + v_dead.waiting,
      'in_flight', (select coalesce(sum(f.messages), 0) from pgque._in_flight(p_queue.queue_id, v_back.subs, v_back.positions) f),
      'consumers', v_back.consumers);
    return next;
  end if;
end
$$;

-- Returns the checks of some queues, in the order of their names.  p_figures: also the
-- figures that overview() shows.
create or replace function pgque._health_of(
  p_queues int[], p_figures boolean, out check_name text, out queue text, out status text, out detail text, out advice text, out figures jsonb
) returns setof record
language plpgsql as $$
declare
  v_queue    pgque.queue;
  v_queues   int[] := pgque._some_queues(p_queues, 2);
  v_pumped   int[] := array(select o.id from pgque._pump_owners() o (id));
  v_aside    record;
begin
  if cardinality(v_queues) < cardinality(p_queues) then
    check_name := 'queues';
    status := 'warn';
    detail := format('%s of %s queues are checked, chosen at random: the server has no room for more locks', cardinality(v_queues), cardinality(p_queues));
    advice := 'Raise max_locks_per_transaction, or check one queue at a time: select * from pgque.health(queue).';
    return next;
  end if;
  v_aside := pgque._set_aside(v_queues);
  for v_queue in select q.* from pgque.queue q where q.queue_id = any (v_queues) order by q.queue_name loop
    begin
      perform pgque._shorten_lock_timeout();
      return query select h.* from pgque._queue_health(
          v_queue, v_pumped, p_figures, (v_queue.queue_id = any (v_aside.retries)) is not false, (v_queue.queue_id = any (v_aside.dead)) is not false) h;
      perform pgque._undo_block();
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
        if not pgque._was_dropped(v_queue.queue_id) then
          raise;
        end if;   -- else the queue was dropped meanwhile
    end;
  end loop;
end
$$;

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

create or replace function pgque.health(
  queue_name text, caller pgque.caller default current_user, out check_name text, out queue text, out status text, out detail text, out advice text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queues  int[] := pgque._visible($1, caller);
begin
  return query select h.check_name, h.queue, h.status, h.detail, h.advice from pgque._health(v_queues, false) h;
end
$$;
comment on function pgque.health(text, pgque.caller) is
  'Returns the checks of one queue, or with NULL of each queue that the caller has a right to, one a row: status (ok, warn or fail), detail (what '
  'was found) and advice (what to do). The checks of the whole server are left out. Any right to a queue is enough. Errors: PQ001 no such queue.';

-- Returns the checks of some queues, with null of all queues and of the server;
-- p_figures: see _queue_health().
create or replace function pgque._health(
  p_queues int[], p_figures boolean, out check_name text, out queue text, out status text, out detail text, out advice text, out figures jsonb
) returns setof record
language plpgsql as $$
declare
  v_found  record;
  v_cron   record;
begin
  if p_queues is not null then
    return query select h.* from pgque._health_of(p_queues, p_figures) h;
    return query
      select h.*, null::jsonb
      from pgque._recurring_health() h
      where h.queue in (select q.queue_name from pgque.queue q where q.queue_id = any (p_queues));
    return;
  end if;
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
    with found as materialized (select h.* from pgque._health_of(array(select q.queue_id from pgque.queue q), p_figures) with ordinality h),
    waits as (select string_agg(distinct f.queue, ', ') as queues from found f where f.check_name in ('ticks', 'retries') and f.status = 'fail')
    select f.check_name, f.queue, f.status, f.detail, f.advice, f.figures
    from (
      select _health.check_name, null as queue, case when _health.status = 'warn' and w.queues is not null then 'fail' else _health.status end as status,
        _health.detail || case when _health.status = 'warn' and w.queues is not null then ', and these queues wait: ' || left(w.queues, 200) else '' end as detail,
        _health.advice, null::jsonb as figures, 0 as ordinality
      from waits w
      union all
      select f.* from found f
    ) f
    order by f.ordinality;

  return query select h.*, null::jsonb from pgque._recurring_health() h;

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

create or replace function pgque.health(out check_name text, out queue text, out status text, out detail text, out advice text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
begin
  return query select h.check_name, h.queue, h.status, h.detail, h.advice from pgque._health(null, false) h;
end
$$;
comment on function pgque.health() is
  'Returns one check a row: status (ok, warn or fail), detail (what was found) and advice (what to do). The settings health_* of a queue are its '
  'thresholds. For a queue whose tables are locked, it names the session that holds the lock. If the server has no room for the locks of all queues '
  '(two a queue, see max_locks_per_transaction), the call checks some queues, chosen at random. The check queues then warns.';

-- One pass over the queues for checks and figures: each takes its locks, and reads its
-- ticks and positions, once.
create or replace function pgque.overview(
  queue_name text default null, caller pgque.caller default current_user,
  out queue text, out paused boolean, out ev_per_sec double precision, out events bigint, out pending_events bigint, out lag_seconds double precision,
  out retries bigint, out dead_letters bigint, out in_flight bigint, out consumers bigint, out bytes bigint, out ticker_paused boolean, out problems jsonb
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queues  int[] := pgque._visible($1, caller);
  v_all     boolean := $1 is null and pgque._may(caller, 'see', null);
  v_sizes   jsonb := case when $1 is not null then pgque._sizes_soon(v_queues) end;
begin
  return query
    with found as materialized (
      select h.* from pgque._health(case when not v_all then v_queues end, true) with ordinality h
    ), seen as (
      select f.queue,
        pg_catalog.jsonb_agg(jsonb_build_object('check_name', f.check_name, 'status', f.status, 'detail', f.detail, 'advice', f.advice) order by f.ordinality)
          filter (where f.status <> 'ok') as problems,
        -- Each queue has one row with figures.
        (pg_catalog.array_agg(f.figures) filter (where f.figures is not null))[1] as figures
      from found f
      group by f.queue
    )
    select q.queue_name, q.queue_paused, (s.figures ->> 'ev_per_sec')::double precision, (s.figures ->> 'events')::bigint, (s.figures ->> 'pending')::bigint,
      (s.figures ->> 'lag')::double precision, (s.figures ->> 'retries')::bigint, (s.figures ->> 'dead')::bigint, (s.figures ->> 'in_flight')::bigint,
      (s.figures ->> 'consumers')::bigint, (v_sizes ->> q.queue_id::text)::bigint, q.queue_ticker_paused, coalesce(s.problems, '[]')
    from pgque.queue q
    left join seen s on s.queue = q.queue_name
    where q.queue_id = any (v_queues)
    union all
    select null, null, null, null, null, null, null, null, null, null, null, null, s.problems
    from seen s
    where s.queue is null and s.problems is not null
    order by 1 nulls first;
end
$$;
comment on function pgque.overview(text, pgque.caller) is
  'Returns the figures of the first page of pgque web and pgque top, one row for each queue that the caller has a right to, or for one queue. '
  'ev_per_sec: messages a second, over the last minute. events: messages sent, ever. pending_events, lag_seconds: greatest value of a consumer. '
  'retries: rejected messages, without delayed ones. in_flight: leased messages. bytes: only for one queue. problems: the rows of health() that are '
  'not ok, as a JSON array. For a member of pgque_reader, a first row without a queue has the problems of the whole server. Figures are NULL if '
  'another session has a table of the queue locked. Errors: PQ001 no such queue.';
