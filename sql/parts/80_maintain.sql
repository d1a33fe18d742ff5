-- ---------------------------------------------------------------------------
-- maintain: rotation, compaction, retention, restore
-- ---------------------------------------------------------------------------

-- The tick up to which every subscriber of a queue is done; the newest tick if
-- nobody subscribed.
create or replace function pgque._slowest_tick(p_queue_id int) returns bigint
language plpgsql as $$
declare
  v_tick  bigint;
begin
  select min(p.pos_tick) into v_tick
  from pgque.subscriber s
  cross join lateral pgque._position(s.sub_id) p
  where s.sub_queue = p_queue_id;
  return coalesce(v_tick, (pgque._last_tick((select q from pgque.queue q where q.queue_id = p_queue_id))).tick_id);
end
$$;

-- Rotates a queue: empties the oldest table and makes it the current one.
-- Returns 1 if it did.  It is not done while the rotation period has not
-- passed, while there is nothing to reclaim, and never while the table holds
-- one row or one tick that is not behind every position.  That is judged under
-- the table's own lock, on its rows: a writer that still thinks of this table
-- as the current one is either waiting for the lock, and will store a row that
-- is read later, or has committed, and its row is looked at now.  The lock is
-- not waited for: pg_dump or an open writer only postpones.
create or replace function pgque.maint_rotate_tables_step1(queue_name text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '1s' as $$
declare
  v_queue     pgque.queue := pgque._queue($1);
  v_id        int := v_queue.queue_id;
  v_next      int;
  v_event     text;
  v_tick      text;
  v_current   text;
  v_slowest   pgque.tick;
  v_needed    boolean;
begin
  perform pgque._need_read_committed('rotation');
  if v_queue.queue_restored or pgque.clock() < v_queue.queue_switch_time + v_queue.queue_rotation_period then
    return 0;
  end if;
  -- Even to ask for a table's size waits for its lock, so one at a time.
  if not pg_try_advisory_xact_lock(hashtext('pgque.rotate'), v_id) then
    return 0;
  end if;
  v_next := (v_queue.queue_cur_table + 1) % 3;
  v_event := format('pgque.event_%s_%s', v_id, v_next);
  v_tick := format('pgque.tick_%s_%s', v_id, v_next);
  v_current := format('pgque.%s_%s_%s', '%s', v_id, v_queue.queue_cur_table);
  -- Idle ticks alone are worth a rotation only once they fill some pages.
  if pg_relation_size(v_event) = 0 and pg_relation_size(format(v_current, 'event')) = 0
    and pg_relation_size(format(v_current, 'tick')) < 131072
  then
    return 0;
  end if;
  -- All that was asked without a lock, so that asking in vain writes nothing.
  perform from pgque.queue q
  where q.queue_id = v_id and q.queue_cur_table = v_queue.queue_cur_table and q.queue_switch_time = v_queue.queue_switch_time
  for no key update skip locked;
  if not found then
    return 0;
  end if;
  if pg_relation_size(v_event) > 0 or pg_relation_size(v_tick) > 0 then
    execute format('lock table %s, %s in access exclusive mode nowait', v_event, v_tick);
    v_slowest := pgque._tick(v_id, pgque._slowest_tick(v_id));
    execute format(
      'select exists (select from %s e where e.ev_txid >= $1)'
      ' or exists (select from %1$s e where e.ev_txid = any ($2))'
      ' or exists (select from %s t where t.tick_id >= $3)', v_event, v_tick)
    into v_needed
    using pg_snapshot_xmax(v_slowest.tick_snapshot), array(select pg_snapshot_xip(v_slowest.tick_snapshot)), v_slowest.tick_id;
    if v_needed is distinct from false then
      return 0;
    end if;
    execute format('truncate %s, %s', v_event, v_tick);
  end if;
  update pgque.queue q
  set queue_cur_table = v_next, queue_switch_time = pgque.clock(), queue_xid = pg_current_xact_id()
  where q.queue_id = v_id;
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;

-- PgQ's second half of a rotation.  Here the first half is enough.
create or replace function pgque.maint_rotate_tables_step2() returns int
language sql as $$ select 0 $$;

-- Compacts the journal of positions once the leaf that is written has grown
-- past 4 MB, at most once a minute.  One call turns writers to the other leaf;
-- after that commit a later call brings over, under each subscriber's lock,
-- what nobody brought over by working, and empties the old leaf.  Whatever is
-- locked is left for the next call.  Returns 1 if something was done.
create or replace function pgque._compact_journal() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_cur      int;
  v_flipped  timestamptz;
  v_id       int;
begin
  perform pgque._need_read_committed('compaction');
  select j.journal_cur, j.journal_flipped_at into v_cur, v_flipped from pgque.journal j where j.journal_id = 1;
  if not found then
    return 0;
  end if;
  if pg_relation_size('pgque.position_' || (1 - v_cur)) = 0 and pg_relation_size('pgque.settled_' || (1 - v_cur)) = 0 then
    if pg_relation_size('pgque.position_' || v_cur) + pg_relation_size('pgque.settled_' || v_cur) < 4194304
      or v_flipped > clock_timestamp() - interval '1 minute'
    then
      return 0;
    end if;
    perform from pgque.journal j where j.journal_id = 1 and j.journal_cur = v_cur for no key update skip locked;
    if not found then
      return 0;
    end if;
    update pgque.journal j set journal_cur = 1 - v_cur, journal_flipped_at = clock_timestamp() where j.journal_id = 1;
    return 1;
  end if;
  for v_id in
    select s.sub_id
    from pgque.subscriber s
    where not exists (select from pgque.position_0 p where v_cur = 0 and p.pos_sub = s.sub_id)
      and not exists (select from pgque.position_1 p where v_cur = 1 and p.pos_sub = s.sub_id)
    for no key update skip locked
  loop
    perform pgque._carry_over(pgque._position(v_id));
  end loop;
  execute format('lock table pgque.position_%s, pgque.settled_%1$s in access exclusive mode nowait', 1 - v_cur);
  if exists (
    select from pgque.subscriber s
    where not exists (select from pgque.position_0 p where v_cur = 0 and p.pos_sub = s.sub_id)
      and not exists (select from pgque.position_1 p where v_cur = 1 and p.pos_sub = s.sub_id))
  then
    return 0;
  end if;
  execute format('truncate pgque.position_%s, pgque.settled_%1$s', 1 - v_cur);
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Moves consumers that lag beyond the queue's retention period forward to the
-- last tick before it, so that a consumer which never comes back can not fill
-- the disk.  What it misses is counted in its position.  Returns the number of
-- subscribers moved.
create or replace function pgque._retain(p_queue_id int) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_cutoff    timestamptz;
  v_to        pgque.tick;
  v_id        int;
  v_position  pgque.position_0;
  v_count     int := 0;
begin
  select pgque.clock() - q.queue_retention_period into v_cutoff from pgque.queue q where q.queue_id = p_queue_id and not q.queue_restored;
  execute format('select t.* from (%s) t where t.tick_time < $1 order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue_id))
  into v_to using v_cutoff;
  if v_to.tick_id is null then
    return 0;
  end if;
  for v_id in
    select s.sub_id
    from pgque.subscriber s
    where s.sub_queue = p_queue_id and (pgque._position(s.sub_id)).pos_tick < v_to.tick_id
    for no key update skip locked
  loop
    v_position := pgque._position(v_id);
    if v_position.pos_tick < v_to.tick_id then
      if v_position.pos_main is null then
        v_position.pos_high := greatest(v_position.pos_high, v_position.pos_next_tick);
        v_position.pos_skipped := v_position.pos_skipped + v_to.tick_event_seq - v_position.pos_event_seq;
        perform pgque._append_position(pgque._at_tick(v_position, v_to));
      else
        perform pgque._append_position(pgque._at_tick(v_position, null));
      end if;
      v_count := v_count + 1;
    end if;
  end loop;
  return v_count;
end
$$;

-- Makes a queue that was loaded from a dump usable.  Its events and ticks name
-- transactions of another cluster, which mean nothing here.  What each
-- consumer had not finished is worked out within the old numbers, put into its
-- retry queue to be due at once, and the queue starts over with a tick of this
-- cluster.  Until then it takes no events, so old and new numbers never mix.
create or replace function pgque._rebase(p_queue_id int) returns boolean
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue     pgque.queue;
  v_last      pgque.tick;
  v_sub       pgque.subscriber;
  v_position  pgque.position_0;
  v_rows      text;
begin
  if not exists (select from pgque.queue q where q.queue_id = p_queue_id and q.queue_restored) then
    return false;
  end if;
  perform pgque._need_read_committed('a restored queue');
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id for update;
  if not found or not v_queue.queue_restored then
    return false;
  end if;
  v_last := pgque._last_tick(v_queue);
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = p_queue_id order by s.sub_main nulls first, s.sub_id for no key update loop
    v_position := pgque._position(v_sub.sub_id);
    if v_position.pos_main is null then
      -- Everything behind its position, less what it finished of the window.
      v_rows := pgque._rows_sql(p_queue_id, format(
        '(e.ev_owner is null or e.ev_owner = %s) and not pg_visible_in_snapshot(e.ev_txid, %L)%s', v_sub.sub_id, v_position.pos_snapshot,
        coalesce(' and not (e.ev_id <= ' || v_position.pos_done_id || format(' and pg_visible_in_snapshot(e.ev_txid, %L))', v_position.pos_next_snapshot), '')));
    elsif v_position.pos_batch is not null then
      v_rows := pgque._rows_sql(p_queue_id, pgque._slice_condition(
        pgque._xid_filter(v_position.pos_snapshot, v_position.pos_next_snapshot), v_sub.sub_main, v_position.pos_done_id, v_position.pos_last_id));
    else
      continue;
    end if;
    execute format(
      'insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_retry, ev_error,'
      ' ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)'
      ' select $1, %s, %s, e.ev_retry, e.ev_error,'
      ' e.ev_id, e.ev_time, e.ev_txid, e.ev_type, e.ev_data, e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes, e.ev_expires'
      ' from (%s) e where (true%s)%s on conflict do nothing',
      p_queue_id, coalesce(v_sub.sub_main, v_sub.sub_id), v_rows, pgque._unsettled_condition(v_position),
      -- What is settled in its batch may be back behind the window as a retry.
      coalesce(' or not pg_visible_in_snapshot(e.ev_txid, ' || quote_literal(v_position.pos_next_snapshot) || ')', ''))
    using pgque.clock();
  end loop;
  execute (select 'truncate ' || string_agg(l.leaf, ', ') from pgque._leaves(p_queue_id) l);
  update pgque.queue q set queue_xid = pg_current_xact_id() where q.queue_id = p_queue_id returning q.* into v_queue;
  perform pgque._store_tick(v_queue, v_last.tick_id + 1, pgque.clock(), pgque._tick_snapshot(), null, false);
  v_last := pgque._last_tick(v_queue);
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = p_queue_id loop
    v_position := pgque._position(v_sub.sub_id);
    perform pgque._append_position(pgque._at_tick(v_position, case when v_position.pos_main is null then v_last end));
  end loop;
  return true;
end
$$;

-- Empties side tables that hold nothing live, so that not even their dead rows
-- stay.  A table in use is left alone.
create or replace function pgque._sweep() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_count  int := 0;
begin
  delete from pgque.idempotency_key k where k.idem_expires < pgque.clock();
  if pg_relation_size('pgque.idempotency_key') > 0 and not exists (select from pgque.idempotency_key) then
    v_count := v_count + pgque._empty('pgque.idempotency_key', 'true');
  end if;
  if pg_relation_size('pgque.retry_queue') > 0 and not exists (select from pgque.retry_queue) then
    v_count := v_count + pgque._empty('pgque.retry_queue', 'true');
  end if;
  if pg_relation_size('pgque.dead_letter') > 0 and not exists (select from pgque.dead_letter) then
    v_count := v_count + pgque._empty('pgque.dead_letter', 'true');
  end if;
  -- The map is a cache: what an open window still needs is made again.
  if pg_relation_size('pgque.window_map') > 67108864 or exists (select from pgque.window_map) and not exists (
    select from pgque.subscriber s
    cross join lateral pgque._position(s.sub_id) p
    where p.pos_done_id is not null)
  then
    v_count := v_count + pgque._empty('pgque.window_map', 'false');
  end if;
  return v_count;
end
$$;

-- Truncates a table if its lock is free and, with p_only_if_empty, no row is
-- in it once it is locked.
create or replace function pgque._empty(p_table regclass, p_only_if_empty boolean) returns int
language plpgsql as $$
declare
  v_rows  boolean := false;
begin
  execute pg_catalog.format('lock table %s in access exclusive mode nowait', p_table);
  if p_only_if_empty then
    execute pg_catalog.format('select exists (select from %s)', p_table) into v_rows;
  end if;
  if v_rows then
    return 0;
  end if;
  execute pg_catalog.format('truncate %s', p_table);
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;

-- What maint() does, one row a call, for a scheduler that wants to commit
-- after each.
create or replace function pgque.maint_operations(out func_name text, out func_arg text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return query
    select 'pgque.maint_retry_events'::text, null::text
    union all
    select f.func_name, q.queue_name
    from pgque.queue q, (values ('pgque.maint_retain'), ('pgque.maint_rotate_tables_step1')) f (func_name)
    union all
    select 'pgque.maint_tables', null;
end
$$;

-- Retention of one queue; see _retain.
create or replace function pgque.maint_retain(queue_name text) returns int
language sql security definer set search_path = pg_catalog, pgque, pg_temp as $$
  select pgque._retain((pgque._queue($1)).queue_id)
$$;

-- Maintenance of the tables all queues share.
create or replace function pgque.maint_tables() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  if not pg_try_advisory_xact_lock(hashtext('pgque.rotate'), 0) then
    return 0;
  end if;
  return pgque._compact_journal() + pgque._compact_stage() + pgque._compact_epochs() + pgque._sweep() + pgque._drop_leaves() + pgque._trim_cron_history();
end
$$;

-- Does one of maint_operations(); what fails is reported and left for the next
-- time.
create or replace function pgque._maint_operation(p_func text, p_arg text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '1s' as $$
declare
  v_done  int;
begin
  if p_func not in (select o.func_name from pgque.maint_operations() o) then
    raise exception using
      errcode = 'PQ005',
      message = format('not a maintenance operation: %L', p_func),
      hint = 'select * from pgque.maint_operations() lists them.';
  end if;
  execute format('select %s(%s)', p_func, quote_literal(p_arg)) into v_done;
  return v_done;
exception
  when invalid_transaction_state or sqlstate 'PQ005' then
    raise;
  when others then
    raise warning 'pgque: % failed for %: % (%)', p_func, coalesce(p_arg, 'all queues'), sqlerrm, sqlstate;
    return 0;
end
$$;

-- All maintenance, for any scheduler; the loop does the same.  Returns how
-- much there was to do.  Two at once do no harm.
create or replace function pgque.maint() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  perform pgque._need_read_committed('maintenance');
  return (select sum(pgque._maint_operation(o.func_name, o.func_arg)) from pgque.maint_operations() o);
end
$$;
