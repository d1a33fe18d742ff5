-- ---------------------------------------------------------------------------
-- observe: information, metrics, health
-- ---------------------------------------------------------------------------

-- PgQ's view of who reads what.
create or replace function pgque._read_position(p_sub int) returns pgque.position_0
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return pgque._position(p_sub);
end
$$;

create or replace view pgque.subscription as
select s.sub_id, s.sub_queue, s.sub_consumer, p.pos_tick as sub_last_tick, p.pos_time as sub_active,
  p.pos_batch as sub_batch, p.pos_next_tick as sub_next_tick, s.sub_role, s.sub_main, s.sub_worker
from pgque.subscriber s
cross join lateral pgque._read_position(s.sub_id) p;

-- Whether a queue's six tables are there; the loop goes on without it if not.
create or replace function pgque._missing_leaf(p_queue_id int) returns text
language sql stable as $$
  select min(l.leaf) from pgque._leaves(p_queue_id) l where pg_catalog.to_regclass(l.leaf) is null
$$;

-- All queues, or one: settings in force, ticker lag, events a second over the
-- last minute, events since the last tick.
create or replace function pgque.get_queue_info(
  i_queue_name text default null,
  out queue_name text, out queue_ntables int, out queue_cur_table int, out queue_rotation_period interval,
  out queue_switch_time timestamptz, out queue_external_ticker boolean, out queue_ticker_paused boolean,
  out queue_ticker_max_count int, out queue_ticker_max_lag interval, out queue_ticker_idle_period interval,
  out ticker_lag interval, out ev_per_sec double precision, out ev_new bigint, out last_tick_id bigint,
  out queue_paused boolean, out queue_max_retries int, out queue_uid uuid
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue;
  v_last   pgque.tick;
  v_old    pgque.tick;
begin
  if $1 is not null then
    perform pgque._queue($1);
  end if;
  for v_queue in select q.* from pgque.queue q where $1 is null or q.queue_name = $1 order by q.queue_name loop
    v_last := null;
    v_old := null;
    if pgque._missing_leaf(v_queue.queue_id) is null then
      v_last := pgque._last_tick(v_queue);
      execute format('select t.* from (%s) t where t.tick_time >= $1 order by t.tick_id limit 1', pgque._ticks_sql(v_queue.queue_id))
      into v_old using v_last.tick_time - interval '1 minute';
    end if;
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
    ticker_lag := pgque.clock() - v_last.tick_time;
    ev_per_sec := (v_last.tick_event_seq - v_old.tick_event_seq) / nullif(extract(epoch from v_last.tick_time - v_old.tick_time), 0);
    ev_new := coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0) - v_last.tick_event_seq;
    last_tick_id := v_last.tick_id;
    queue_paused := v_queue.queue_paused;
    queue_max_retries := v_queue.queue_max_retries;
    queue_uid := v_queue.queue_uid;
    return next;
  end loop;
end
$$;

-- All consumers and workers, of one queue, or one consumer: how far behind,
-- when last seen, what is pending.
create or replace function pgque.get_consumer_info(
  i_queue_name text default null, i_consumer_name text default null,
  out queue_name text, out consumer_name text, out lag interval, out last_seen interval, out last_tick bigint,
  out current_batch bigint, out next_tick bigint, out pending_events bigint, out role text, out skipped_events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_sub   pgque.subscriber;
  v_pos   pgque.position_0;
  v_tick  pgque.tick;
begin
  if $1 is not null then
    perform pgque._queue($1);
  end if;
  if $2 is not null and $1 is not null and not exists (
    select from pgque.subscriber s where pgque._subscriber_name(s) = $2 and s.sub_queue = (pgque._queue($1)).queue_id)
  then
    perform pgque._subscriber($1, $2);
  end if;
  for v_sub in
    select s.*
    from pgque.subscriber s
    join pgque.queue q on q.queue_id = s.sub_queue
    where ($1 is null or q.queue_name = $1) and ($2 is null or pgque._subscriber_name(s) = $2)
    order by q.queue_name, pgque._subscriber_name(s)
  loop
    v_pos := pgque._position(v_sub.sub_id);
    v_tick := null;
    if pgque._missing_leaf(v_sub.sub_queue) is null then
      v_tick := pgque._tick(v_sub.sub_queue, v_pos.pos_tick);
    end if;
    select q.queue_name, coalesce(pg_sequence_last_value(q.queue_event_seq), 0) - v_pos.pos_event_seq
    into queue_name, pending_events
    from pgque.queue q where q.queue_id = v_sub.sub_queue;
    consumer_name := pgque._subscriber_name(v_sub);
    lag := pgque.clock() - v_tick.tick_time;
    last_seen := pgque.clock() - v_pos.pos_time;
    last_tick := v_pos.pos_tick;
    current_batch := v_pos.pos_batch;
    next_tick := v_pos.pos_next_tick;
    role := v_sub.sub_role;
    skipped_events := v_pos.pos_skipped;
    return next;
  end loop;
end
$$;

-- The next n messages nobody has finished, without touching anything: what the
-- slowest consumer, or the one named, has before it, ticked or not.
create or replace function pgque.peek(queue_name text, n int default 10, consumer_name text default null) returns setof pgque.delivery
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1);
  v_sub    pgque.subscriber;
  v_pos    pgque.position_0;
  v_cond   text;
begin
  if $2 is null or $2 < 1 then
    raise exception using
      errcode = 'PQ005',
      message = format('peek at queue %I needs a positive number of messages', $1),
      hint = 'select * from pgque.peek(queue, 10);';
  end if;
  if $3 is not null then
    v_sub := pgque._subscriber($1, $3);
    v_pos := pgque._position(v_sub.sub_id);
  else
    v_pos.pos_snapshot := (pgque._tick(v_queue.queue_id, pgque._slowest_tick(v_queue.queue_id))).tick_snapshot;
  end if;
  v_cond := coalesce(pgque._xid_condition(v_pos.pos_snapshot, pg_current_snapshot()), 'false')
    || coalesce(' and (e.ev_owner is null or e.ev_owner = ' || v_sub.sub_id || ')', '')
    || coalesce(' and not (e.ev_id <= ' || v_pos.pos_done_id || format(' and pg_visible_in_snapshot(e.ev_txid, %L))',
      v_pos.pos_next_snapshot), '');
  return query execute format(
    'select e.ev_id, null::bigint, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,'
    ' e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,'
    ' coalesce(e.ev_retry, 0), e.ev_error, e.ev_expires, %L::text'
    ' from (%s) e order by e.ev_id, e.ev_txid desc limit %s',
    $1, pgque._rows_sql(v_queue.queue_id, v_cond), $2);
end
$$;

-- One figure a row, for a collector: name, queue, consumer, value.  Counts of
-- events are taken from sequences and are exact up to rolled-back sends.
create or replace function pgque.metrics(out metric text, out queue text, out consumer text, out value double precision) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue;
  v_last   pgque.tick;
begin
  return query
    select 'pgque_dead_tuples', null::text, null::text, coalesce(sum(t.n_dead_tup), 0)::double precision
    from pg_stat_all_tables t where t.schemaname = 'pgque';
  return query
    select 'pgque_schema_bytes', null::text, null::text, coalesce(sum(pg_total_relation_size(c.oid)), 0)::double precision
    from pg_class c where c.relnamespace = 'pgque'::regnamespace and c.relkind = 'r';
  for v_queue in select q.* from pgque.queue q order by q.queue_name loop
    continue when pgque._missing_leaf(v_queue.queue_id) is not null;
    v_last := pgque._last_tick(v_queue);
    return query
      select m.metric, v_queue.queue_name, null::text, m.value::double precision
      from (values
        ('pgque_queue_events_total', coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0)::numeric),
        ('pgque_queue_last_tick_id', v_last.tick_id),
        ('pgque_queue_ticker_lag_seconds', extract(epoch from pgque.clock() - v_last.tick_time)),
        ('pgque_queue_bytes', (select sum(pg_total_relation_size(to_regclass(l.leaf))) from pgque._leaves(v_queue.queue_id) l)),
        ('pgque_queue_rotation_age_seconds', extract(epoch from pgque.clock() - v_queue.queue_switch_time)),
        ('pgque_queue_retries', (select count(*) from pgque.retry_queue r where r.ev_queue = v_queue.queue_id)),
        ('pgque_queue_dead_letters', (select count(*) from pgque.dead_letter d where d.dl_queue_id = v_queue.queue_id)),
        ('pgque_queue_paused', v_queue.queue_paused::int)
      ) m (metric, value);
    return query
      select m.metric, i.queue_name, i.consumer_name, m.value::double precision
      from pgque.get_consumer_info(v_queue.queue_name) i
      cross join lateral (values
        ('pgque_consumer_lag_seconds', extract(epoch from i.lag)),
        ('pgque_consumer_last_seen_seconds', extract(epoch from i.last_seen)),
        ('pgque_consumer_pending_events', i.pending_events::numeric),
        ('pgque_consumer_skipped_events_total', i.skipped_events::numeric),
        ('pgque_consumer_open_batch', (i.current_batch is not null)::int::numeric)
      ) m (metric, value)
      where m.value is not null;
  end loop;
end
$$;

-- One check a row: ok, warn or fail, what was found, and what to do about it.
create or replace function pgque.health(out check_name text, out queue text, out status text, out detail text, out advice text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue    pgque.queue;
  v_last     pgque.tick;
  v_new      boolean;
  v_missing  text;
  v_found    record;
begin
  select s.status, s.detail into v_found from pgque.status() s where s.component = 'ticker';
  check_name := 'ticker'; queue := null;
  status := case when v_found.status = 'running' then 'ok' else 'warn' end;
  detail := v_found.detail;
  advice := case when v_found.status <> 'running' then 'select pgque.start() with pg_cron, or run: pgque ticker. A scheduler of your own that calls ticker() is fine too.' end;
  return next;

  for v_queue in select q.* from pgque.queue q order by q.queue_name loop
    queue := v_queue.queue_name;
    check_name := 'tables';
    v_missing := pgque._missing_leaf(v_queue.queue_id);
    if v_missing is not null then
      status := 'fail';
      detail := format('table %s is missing', v_missing);
      advice := format('Restore it from a backup, or select pgque.drop_queue(%L, true) and create the queue again.', queue);
      return next;
      continue;
    end if;
    status := 'ok'; detail := 'all six tables are there'; advice := null;
    if v_queue.queue_restored then
      status := 'warn';
      detail := 'the queue was loaded from a dump and was not used since';
      advice := format('select pgque.ticker(%L)', queue);
    end if;
    return next;
    continue when v_queue.queue_restored;

    v_last := pgque._last_tick(v_queue);
    check_name := 'ticks';
    v_new := coalesce(pgque._tick_reason(v_queue, v_last, pg_current_snapshot()) = 'events', false);
    status := case
      when v_queue.queue_external_ticker then 'ok'
      when v_queue.queue_ticker_paused then 'warn'
      when v_new and pgque.clock() - v_last.tick_time > interval '1 minute' then 'fail'
      when v_new and pgque.clock() - v_last.tick_time > interval '5 seconds' then 'warn'
      else 'ok'
    end;
    detail := format('last tick %s, %s ago%s', v_last.tick_id, date_trunc('milliseconds', pgque.clock() - v_last.tick_time),
      case when v_new then ', committed events wait for one' else '' end);
    advice := case
      when v_queue.queue_ticker_paused then format('select pgque.set_queue_config(%L, ''ticker_paused'', null)', queue)
      when status <> 'ok' then 'Start the ticker: select pgque.start(), or pgque ticker.'
    end;
    return next;

    check_name := 'rotation';
    select i.consumer_name, i.lag into v_found from pgque.get_consumer_info(queue) i order by i.last_tick limit 1;
    status := case
      when pgque.clock() - v_queue.queue_switch_time > 4 * v_queue.queue_rotation_period
        and (select sum(pg_relation_size(to_regclass(l.leaf))) from pgque._leaves(v_queue.queue_id) l where l.kind = 'event') > 67108864 then 'warn'
      else 'ok'
    end;
    detail := format('last rotation %s ago, slowest consumer %s', date_trunc('seconds', pgque.clock() - v_queue.queue_switch_time), coalesce(v_found.consumer_name, '(none)'));
    advice := case when status <> 'ok' then 'Let the slowest consumer catch up or unsubscribe it; look for a lock on the queue''s tables (pg_dump, an open transaction).' end;
    return next;

    check_name := 'consumers';
    status := case
      when v_found.lag > v_queue.queue_retention_period then 'fail'
      when v_found.lag > v_queue.queue_retention_period / 2 then 'warn'
      else 'ok'
    end;
    detail := coalesce('consumer ' || v_found.consumer_name || ' lags ' || date_trunc('milliseconds', v_found.lag), 'no consumer');
    advice := case when status <> 'ok' then format('Past %s it is moved forward and misses events. Start it, or unsubscribe it.', v_queue.queue_retention_period) end;
    return next;

    check_name := 'retries';
    select count(*) as n, pgque.clock() - min(r.ev_retry_after) as overdue into v_found
    from pgque.retry_queue r where r.ev_queue = v_queue.queue_id and r.ev_retry_after < pgque.clock();
    status := case when v_found.overdue > interval '1 minute' then 'fail' when v_found.overdue > interval '5 seconds' then 'warn' else 'ok' end;
    detail := format('%s due', v_found.n);
    advice := case when status <> 'ok' then 'The ticker moves them: select pgque.start(), pgque ticker, or pgque.maint().' end;
    return next;

    check_name := 'dead letters';
    select count(*) as n, max(d.dl_time) as newest into v_found from pgque.dead_letter d where d.dl_queue_id = v_queue.queue_id;
    status := case when v_found.n > 0 then 'warn' else 'ok' end;
    detail := format('%s', v_found.n) || coalesce(', newest at ' || v_found.newest, '');
    advice := case when v_found.n > 0 then format('select * from pgque.dlq_inspect(%L), then dlq_requeue, dlq_replay or dlq_purge', queue) end;
    return next;
  end loop;

  check_name := 'open transactions'; queue := null;
  select a.pid, pgque.clock() - a.xact_start as age into v_found
  from pg_stat_activity a
  where a.backend_xid is not null and a.datname = current_database() and a.pid <> pg_backend_pid()
  order by a.xact_start limit 1;
  status := case when v_found.age > interval '1 hour' then 'warn' else 'ok' end;
  detail := coalesce('oldest writing transaction: pid ' || v_found.pid || ', ' || date_trunc('seconds', v_found.age), 'none');
  advice := case when status <> 'ok' then 'What it sent is delivered when it commits; everything else is not held up.' end;
  return next;
end
$$;
