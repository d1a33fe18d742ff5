-- ---------------------------------------------------------------------------
-- restore: whether a dump was loaded completely
-- ---------------------------------------------------------------------------

-- A dump may be loaded in any order, by several sessions, while a ticker runs.  A queue
-- that is repaired (_rebase) before its consumers are loaded would lose what they had
-- not finished.  So nothing of a loaded queue is written or deleted before the restore
-- is complete.  These functions find out whether it is:
--   * pg_dump lets materialized views be filled last, after all data, indexes and
--     grants, in a parallel restore too.  So pgque.restore_complete is empty until the
--     restore has ended.  It is no member of the extension, since members are not in a
--     dump.  pg_upgrade and copies of the cluster keep it filled.
--   * A dump of 0.7.0 or earlier has no such view, and a load of data alone finds it
--     filled.  Then the data has to be consistent, and no session may be loading.
--   * The operator confirms it: confirm_restore() fills the view, and queue_xid 2 means
--     that no more is checked.

-- Creates the view that is filled at the end of a restore.
create or replace function pgque._note_complete() returns int
language plpgsql as $$
begin
  if pg_catalog.to_regclass('pgque.restore_complete') is not null then
    return 0;
  end if;
  -- One session after the other.  The session's copy of the catalog may be older than the
  -- lock.
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.restore'));
  create materialized view pgque.restore_complete as select true as complete;
  comment on materialized view pgque.restore_complete is
    'A dump fills it last, so it is empty while a restore goes on: the queues wait for that. Internal: see confirm_restore().';
  perform pgque._set_rights(array[pg_catalog.to_regclass('pgque.restore_complete')::oid]);
  return 1;
exception
  when duplicate_table then
    return 0;   -- another session created it
end
$$;

-- Creates the view of _note_complete() in a database of 0.7.0 or earlier, as a part of
-- maintenance.
create or replace function pgque._note_complete_later() returns int
language plpgsql as $$
begin
  return case when exists (select from pgque.queue) then pgque._note_complete() else 0 end;
end
$$;

-- Returns what shows that this database is being restored; null if nothing does.
create or replace function pgque._loading() returns text
language plpgsql as $$
begin
  if exists (select from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass('pgque.restore_complete') and not c.relispopulated) then
    return 'the restore has not ended: pgque.restore_complete is not filled yet';
  elsif not exists (select from pgque.queue) and exists (select from pgque._ownerless()) then
    return 'table pgque.queue is not loaded yet';
  end if;
  return null;
end
$$;

-- Returns the ids of queues that have tables, but no row.
create or replace function pgque._ownerless() returns setof int
language sql as $$
  select distinct pg_catalog.split_part(c.relname, '_', 2)::int
  from pg_catalog.pg_inherits i
  join pg_catalog.pg_class c on c.oid = i.inhrelid
  where i.inhparent = 'pgque.tick'::regclass and c.relname ~ '^tick_[0-9]+_[0-2]$'
    and not exists (select from pgque.queue q where q.queue_id = pg_catalog.split_part(c.relname, '_', 2)::int)
    and not exists (select from pgque.dropped_queue d where d.queue_id = pg_catalog.split_part(c.relname, '_', 2)::int)
$$;

-- Returns what a queue that was loaded from a dump lacks; null if nothing.
create or replace function pgque._lacks(p_queue pgque.queue) returns text
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_found  text := pgque._loading();
begin
  if v_found is not null or p_queue.queue_xid = '2' then
    return v_found;
  end if;
  v_found := pgque._loader();
  if v_found is not null then
    return v_found;
  end if;
  -- Data is loaded before the indexes of its table are created.
  select pg_catalog.format('table %s and its indexes are not complete', t.name) into v_found
  from (
    select l.leaf, case l.kind when 'tick' then 1 else 2 end from pgque._leaves(p_queue.queue_id) l
    union all
    select 'pgque.' || s.name, 1
    from (values ('consumer'), ('subscriber'), ('retry_queue'), ('dead_letter'), ('position_0'), ('position_1'), ('settled_0'), ('settled_1')) s (name)
  ) t (name, indexes)
  where (select count(*) from pg_catalog.pg_index i where i.indrelid = pg_catalog.to_regclass(t.name) and i.indisvalid) < t.indexes
  limit 1;
  if v_found is null and pg_catalog.to_regclass('pgque.restore_complete') is null then
    -- Grants are loaded at the end.  One that meets a TRUNCATE fails.
    select pg_catalog.format('the grants of %s are not loaded', c.oid::regclass) into v_found
    from pg_catalog.pg_class c
    where (c.oid in (select pg_catalog.to_regclass(l.leaf) from pgque._leaves(p_queue.queue_id) l) or c.oid = p_queue.queue_event_seq)
      and c.relacl is null
    limit 1;
  end if;
  if v_found is not null then
    return v_found;
  end if;
  -- The locks of the leaves are released at once: the repair locks them before all else.
  begin
    if (pgque._last_tick(p_queue)).tick_id is null then
      v_found := 'its ticks are not loaded';
    elsif pg_catalog.pg_sequence_last_value(p_queue.queue_tick_seq) is null then
      v_found := pg_catalog.format('the value of sequence %s is not loaded', p_queue.queue_tick_seq);
    elsif pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq) is null then
      execute pg_catalog.format('select %L where exists (%s)',
        pg_catalog.format('the value of sequence %s is not loaded', p_queue.queue_event_seq), pgque._rows_sql(p_queue.queue_id, 'true'))
      into v_found;
    end if;
    perform pgque._undo_block();
  exception
    when sqlstate 'PQ099' then
      null;
  end;
  if v_found is not null then
    return v_found;
  end if;
  if not exists (select from pgque.journal) then
    return 'table pgque.journal is not loaded';
  elsif not exists (select from pgque.subscriber) and exists (select from pgque.position) then
    return 'table pgque.subscriber is not loaded';
  end if;
  return (
    select case when c.co_id is null then 'the consumers are not loaded' else pg_catalog.format('the position of consumer %I is not loaded', c.co_name) end
    from pgque.subscriber s
    left join pgque.consumer c on c.co_id = s.sub_consumer
    where s.sub_queue = p_queue.queue_id and s.sub_main is null
      and (c.co_id is null or not exists (select from pgque.position p where p.pos_sub = s.sub_id))
    limit 1);
end
$$;

-- Returns which session loads a dump; null if none does.  COPY into the view pgque.sink
-- is an ordinary way to send.
create or replace function pgque._loader() returns text
language sql as $$
  select 'session ' || min(w.pid) || ' loads a dump'
  from (
    select a.pid from pg_catalog.pg_stat_activity a
    where a.datname = pg_catalog.current_database() and a.application_name = 'pg_restore' and a.pid <> pg_catalog.pg_backend_pid()
    union all
    select p.pid
    from pg_catalog.pg_stat_progress_copy p
    where p.datname = pg_catalog.current_database() and p.pid <> pg_catalog.pg_backend_pid()
      and exists (
        select from pg_catalog.pg_locks l
        join pg_catalog.pg_class c on c.oid = l.relation and c.relnamespace = 'pgque'::regnamespace
        where l.pid = p.pid and l.mode = 'RowExclusiveLock')
      and not exists (select from pg_catalog.pg_locks l where l.pid = p.pid and l.relation in ('pgque.sink'::regclass, 'pgque.sink_bulk'::regclass))
  ) w
  having count(*) > 0
$$;

-- Returns whether maintenance has to leave the tables that all queues share alone: a
-- queue that was loaded from a dump is not repaired yet.
create or replace function pgque._is_loading() returns boolean
language sql as $$
  select exists (select from pgque.queue q where q.queue_restored and q.queue_xid <> '2') or pgque._loading() is not null
$$;

-- Returns what this database lacks, or one of its first queues; null if nothing.
create or replace function pgque._lacking() returns text
language plpgsql as $$
declare
  v_queue  pgque.queue;
  v_lacks  text := pgque._loading();
begin
  for v_queue in select q.* from pgque.queue q where q.queue_restored and v_lacks is null order by q.queue_id limit 20 loop
    v_lacks := pg_catalog.format('queue %I: ', v_queue.queue_name) || pgque._lacks(v_queue);
    exit when v_lacks is not null;
  end loop;
  return v_lacks;
end
$$;

-- Returns whether the row that a trigger sees comes out of a dump, by a load of data
-- alone: this session loads a dump, and the queue is being restored.  The messages about
-- the row are in the same dump.  Each script of pg_dump and each session of pg_restore
-- turns check_function_bodies off.  A change by any other session is a new one, so it
-- fails as a send does.  A role without a right to the queue learns nothing of it, and
-- its send is refused.
create or replace function pgque._is_old_change(p_queue text, caller pgque.caller default current_user) returns boolean
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue;
begin
  if caller is null then
    perform pgque._no_right(caller, 'produce', p_queue);
  elsif current_setting('check_function_bodies')::boolean then
    return false;
  end if;
  select q.* into v_queue from pgque.queue q where q.queue_name = p_queue collate "default";
  return case
    when not pgque._may(caller, 'produce', v_queue.queue_id) then false
    when v_queue.queue_id is null then pgque._loading() is not null
    when v_queue.queue_restored then pgque._lacks(v_queue) is not null
    else false
  end;
end
$$;

-- Refuses a call that writes while a dump is being loaded: it could lose messages, or
-- take a number that a row of the dump has.
create or replace function pgque._need_loaded(p_queue pgque.queue) returns void
language plpgsql as $$
declare
  v_lacks  text := case when p_queue.queue_id is null then pgque._loading() else pgque._lacks(p_queue) end;
begin
  if p_queue.queue_id is null and v_lacks is null and not exists (select from pgque.queue) then
    v_lacks := pgque._loader();   -- of a dump it has just created the extension
  end if;
  if v_lacks is not null then
    perform pgque._fail('object_not_in_prerequisite_state',
      case when p_queue.queue_id is null then 'pgque is being loaded from a dump'
        else pg_catalog.format('queue %I was loaded from a dump that is not complete', p_queue.queue_name) end,
      'Retry when the restore has ended. If it has ended, see the advice of pgque.health().', pg_catalog.initcap(pg_catalog.left(v_lacks, 1)) || pg_catalog.substr(v_lacks, 2) || '.');
  end if;
end
$$;

-- Returns the advice of health() for a queue that lacks something.
create or replace function pgque._restore_advice() returns text
language sql immutable as $$
  select 'Wait until pg_restore or psql has ended. If it has ended, load what is missing. If all is there, or what is missing cannot be loaded: select pgque.confirm_restore()'::text
$$;

create or replace function pgque.confirm_restore() returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_lost   int[] := array(select o.id from pgque._ownerless() o (id) order by o.id);
  v_count  bigint;
begin
  if exists (select from pg_class c where c.oid = to_regclass('pgque.restore_complete') and not c.relispopulated) then
    refresh materialized view pgque.restore_complete;
  end if;
  if v_lost <> '{}' then
    raise warning 'pgque: tables of queues without a row in pgque.queue are dropped: queue_id %', array_to_string(v_lost, ', ');
    insert into pgque.dropped_queue (queue_id) select l.id from unnest(v_lost) l (id) on conflict do nothing;
  end if;
  perform pgque._note_complete_later();
  update pgque.queue q set queue_xid = '2' where q.queue_restored;
  get diagnostics v_count = row_count;
  perform pgque._record_action('confirm_restore', null, jsonb_build_object('queues', v_count));
  return v_count;
end
$$;
comment on function pgque.confirm_restore() is
  'Declares that the restore of this database is complete, and returns the number of queues that can now be used. Call it only if health() advises '
  'it: after data was loaded without the rest of the dump, or after a part of the restore failed. Data that was not loaded by then is lost: for '
  'example, a queue whose consumers are missing starts empty. Tables of queues that have no row in pgque.queue are dropped.';

-- Locks a queue that was loaded from a dump, its tables and its consumers.  Senders,
-- readers and workers of the queue repair it too, and hold some of these locks.
-- A worker that has its consumer's row may wait for the tables, so that this call waits
-- for rows only briefly, and _execute_insistently() releases the tables.  Raises PQ099 if there is
-- nothing left to repair, so that no lock stays.
create or replace function pgque._lock_restored(p_queue_id int) returns void
language plpgsql as $$
begin
  -- In the order of readers: the newest tick, other ticks, messages.
  execute (
    select 'lock table ' || pg_catalog.string_agg(l.leaf, ', ' order by l.kind desc, q.queue_id is null, l.n) || ' in access exclusive mode'
    from pgque._leaves(p_queue_id) l
    left join pgque.queue q on q.queue_id = p_queue_id and q.queue_cur_table = l.n);
  perform pg_catalog.set_config('lock_timeout', '50ms', true);
  perform from pgque.queue q where q.queue_id = p_queue_id and q.queue_restored for update;
  if not found then
    perform pgque._undo_block();
  end if;
  perform from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null order by s.sub_id for no key update;
end
$$;

-- Makes a queue that was loaded from a dump usable.  Its events and ticks name
-- transactions of another cluster, which mean nothing here.  The messages that a
-- consumer had not finished are found by the old numbers and go to its retry queue, due
-- at once.  The queue then begins again with a tick of this cluster.  Until then it
-- takes no events, so old and new numbers never mix.  Before the restore is complete it
-- fails with 55000.
create or replace function pgque._rebase(p_queue_id int) returns boolean
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue     pgque.queue;
  v_last      pgque.tick;
  v_sub       pgque.subscriber;
  v_position  pgque.position;
  v_open      bigint[];
  v_rows      text;
begin
  if not exists (select from pgque.queue q where q.queue_id = p_queue_id and q.queue_restored) then
    return false;
  end if;
  perform pgque._need_read_committed('a restored queue');
  begin
    perform pgque._execute_insistently(format('select pgque._lock_restored(%s)', p_queue_id));
  exception
    when sqlstate 'PQ099' then
      return false;
  end;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  perform pgque._need_loaded(v_queue);
  perform pgque._create_reader(p_queue_id);   -- those of the dump may be of an earlier version
  v_last := pgque._last_tick(v_queue);
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null order by s.sub_id for no key update loop
    v_open := array(select h.token from pgque._open_batches(v_sub.sub_id) h);
    if cardinality(pgque._try_lock_batches(v_sub, v_open, null)) < cardinality(v_open) then
      -- Waiting for the worker would be a deadlock if it asks for more messages.
      perform pgque._fail('serialization_failure', format('a worker is finishing a batch of queue %I, which was loaded from a dump', v_queue.queue_name),
        'Retry the transaction.');
    end if;
    perform pgque._move_to_retry(v_sub, h.lease, h.until) from pgque._open_batches(v_sub.sub_id) h;
    v_position := pgque._next_from(pgque._position(v_sub.sub_id));
    -- All rows ahead of its position, without those that it finished in the window.
    v_rows := pgque._rows_sql(p_queue_id, format(
      '(e.ev_owner is null or e.ev_owner = %s) and not pg_visible_in_snapshot(e.ev_txid, %L)%s', v_sub.sub_id, v_position.pos_snapshot,
      coalesce(' and not (e.ev_id <= ' || v_position.pos_done_id || format(' and pg_visible_in_snapshot(e.ev_txid, %L))', v_position.pos_next_snapshot), '')) || pgque._not_cancelled_sql(p_queue_id, v_position));
    execute format(
      'insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_retry, ev_error,'
      ' ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)'
      ' select $1, %s, %s, e.ev_retry, e.ev_error,'
      ' e.ev_id, e.ev_time, e.ev_txid, e.ev_type, e.ev_data, e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes, e.ev_expires'
      ' from (%s) e on conflict do nothing', p_queue_id, v_sub.sub_id, v_rows)
    using pgque.clock();
  end loop;
  perform pgque._refresh_retries(p_queue_id);
  update pgque.retry_queue r set ev_lane = pgque._lane(r.ev_key, r.ev_extra1)
  where r.ev_queue = p_queue_id and r.ev_owner > 0 and r.ev_lane is null and coalesce(r.ev_key, r.ev_extra1) is not null;
  execute (select 'truncate ' || string_agg(l.leaf, ', ') from pgque._leaves(p_queue_id) l);
  update pgque.queue q set queue_xid = pgque._mark(), queue_incarnation = gen_random_uuid() where q.queue_id = p_queue_id returning q.* into v_queue;
  -- An external ticker may continue at times that are past here.
  perform pgque._store_tick(v_queue, pgque._next_tick_id(v_queue, v_last.tick_id, true),
    case when v_queue.queue_external_ticker then v_last.tick_time else pgque.clock() end, pgque._tick_snapshot(),
    case when v_queue.queue_external_ticker then v_last.tick_event_seq end, false);
  v_last := pgque._last_tick(v_queue);
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null loop
    v_position := pgque._position(v_sub.sub_id);
    v_position.pos_lapse := null;
    v_position.pos_open := case when v_sub.sub_role = 'pool' then '{}' else pgque._still_open(v_sub, v_position.pos_open) end;
    perform pgque._append_position(pgque._at_tick(v_position, v_last));
  end loop;
  return true;
end
$$;
