-- ---------------------------------------------------------------------------
-- maintain: rotation, compaction, retention, restore
-- ---------------------------------------------------------------------------

-- Returns the tick up to which every subscriber of a queue is done; the newest tick if
-- there is no subscriber.
create or replace function pgque._slowest_tick(p_queue_id int) returns bigint
language plpgsql as $$
declare
  v_tick  bigint;
begin
  select min(p.pos_tick) into v_tick
  from pgque.subscriber s
  cross join lateral pgque._oldest_needed_position(s.sub_id) p
  where s.sub_queue = p_queue_id and s.sub_main is null;
  return coalesce(v_tick, (pgque._last_tick((select q from pgque.queue q where q.queue_id = p_queue_id))).tick_id);
end
$$;

-- Deletes the ticks of the other tables that one table has rows behind, before that table
-- is emptied.  A tick that is stored promises that every row behind it is stored too:
-- a reader of offsets may begin there, also while no consumer keeps rows for it.  Only a
-- transaction that was open across a rotation breaks this: its rows are in the older
-- table, behind the first ticks of the newer one.
create or replace function pgque._delete_ticks(p_queue_id int, p_n int) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_first  pg_snapshot;
  v_late   xid8[];
begin
  execute pg_catalog.format('select t.tick_snapshot from (%s) t where t.slot <> $1 order by t.tick_id limit 1', pgque._ticks_sql(p_queue_id))
  into v_first using p_queue_id * 3 + p_n;
  execute pg_catalog.format(
    'select array(select e.ev_txid from pgque.event_%1$s_%2$s e where e.ev_txid >= $1 union select e.ev_txid from pgque.event_%1$s_%2$s e where e.ev_txid = any ($2))',
    p_queue_id, p_n)
  into v_late
  using pg_catalog.pg_snapshot_xmax(v_first), array(select pg_catalog.pg_snapshot_xip(v_first));
  if v_late <> '{}' then
    for v_n in 1..2 loop
      execute pg_catalog.format(
        'delete from pgque.tick_%s_%s t where exists (select from unnest($1) x (txid) where not pg_visible_in_snapshot(x.txid, t.tick_snapshot))',
        p_queue_id, (p_n + v_n) % 3)
      using v_late;
    end loop;
  end if;
end
$$;

-- Empties the oldest table and makes it the current one, unless there is nothing to
-- reclaim.  A table with a row or a tick that is ahead of a position is never emptied.
-- The rows are checked under the table's own lock.  A writer that still uses this table
-- as the current one either waits for the lock, and stores a row that is read later, or
-- has committed, and its row is seen now.
-- Rotation does not wait for the lock: pg_dump or an open writer postpones it.  But a
-- rotation that is late by a whole period sometimes waits for a tenth of a second.
-- Otherwise consumers with overlapping transactions could postpone it without end.
create or replace function pgque.maint_rotate_tables_step1(queue_name text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '1s' set jit = off as $$
declare
  v_queue     pgque.queue := pgque._queue($1);
  v_id        int := v_queue.queue_id;
  v_next      int;
  v_event     text;
  v_tick      text;
  v_current   text;
  v_slowest   pgque.tick;
  v_needed    boolean;
  v_floor     bigint;
begin
  perform pgque._need_read_committed('rotation');
  if v_queue.queue_restored or not (pgque._is_due(v_queue.queue_switch_time, v_queue.queue_rotation_period)
    or pg_total_relation_size(format('pgque.tick_%s_%s', v_id, v_queue.queue_cur_table)) >= v_queue.queue_tick_storage / 3)
  then
    return 0;
  end if;
  v_next := (v_queue.queue_cur_table + 1) % 3;
  -- Copies newer bodies of messages in the retry queue that are in this table only.
  -- Most of this work is done, and committed, before the table is locked.
  if pgque._keyed(v_queue) then
    begin
      if not pg_try_advisory_xact_lock(hashtext('pgque.rotate'), v_id) or pgque._refresh_retries(v_id, v_next) = 0 then
        perform pgque._undo_block();
      end if;
    exception
      when lock_not_available or sqlstate 'PQ099' then
        null;
    end;
  end if;
  begin
    -- Even reading a table's size waits for its lock, so one session at a time.
    if not pg_try_advisory_xact_lock(hashtext('pgque.rotate'), v_id) then
      return 0;
    end if;
    v_event := format('pgque.event_%s_%s', v_id, v_next);
    v_tick := format('pgque.tick_%s_%s', v_id, v_next);
    v_current := format('pgque.%s_%s_%s', '%s', v_id, v_queue.queue_cur_table);
    -- Idle ticks alone are worth a rotation only once they fill some pages.
    if pg_relation_size(v_event) = 0 and pg_relation_size(format(v_current, 'event')) = 0
      and pg_relation_size(format('pgque.event_%s_%s', v_id, (v_next + 1) % 3)) = 0
      and pg_relation_size(format(v_current, 'tick')) < 131072
    then
      perform pgque._undo_block();
    end if;
    -- All checks so far took no lock, so that a call without a result writes nothing.
    perform from pgque.queue q
    where q.queue_id = v_id and q.queue_cur_table = v_queue.queue_cur_table and q.queue_switch_time = v_queue.queue_switch_time
    for no key update skip locked;
    if not found then
      perform pgque._undo_block();
    end if;
    if pg_relation_size(v_event) > 0 or pg_relation_size(v_tick) > 0 then
      -- Before the tables are locked, since there may be thousands of consumers.  No
      -- consumer is moved back meanwhile, because that needs the queue's row.
      v_slowest := pgque._tick(v_id, pgque._slowest_tick(v_id));
      if random() < 0.1 and pgque._is_due(v_queue.queue_switch_time, 2 * v_queue.queue_rotation_period) then
        perform set_config('lock_timeout', '100ms', true);
        execute format('lock table %s, %s in access exclusive mode', v_event, v_tick);
      else
        execute format('lock table %s, %s in access exclusive mode nowait', v_event, v_tick);
      end if;
      execute format(
        'select $3 is null or exists (select from %s e where e.ev_txid >= $1)'
        ' or exists (select from %1$s e where e.ev_txid = any ($2))'
        ' or exists (select from %s t where t.tick_id >= $3)', v_event, v_tick)
      into v_needed
      using pg_snapshot_xmax(v_slowest.tick_snapshot), array(select pg_snapshot_xip(v_slowest.tick_snapshot)), v_slowest.tick_id;
      if v_needed is distinct from false then
        perform pgque._undo_block();
      end if;
      -- A session that has such a row locked may wait for the table: then this call
      -- fails.
      perform pgque._refresh_retries(v_id, v_next, null, 'nowait') where pgque._keyed(v_queue);
      perform pgque._delete_ticks(v_id, v_next);
      execute format('truncate %s, %s', v_event, v_tick);
    end if;
    execute format('select t.tick_event_seq from (%s) t order by t.tick_id limit 1', pgque._ticks_sql(v_id)) into v_floor;
    update pgque.queue q
    set queue_cur_table = v_next, queue_switch_time = pgque.clock(), queue_floor = coalesce(v_floor, q.queue_floor), queue_xid = pgque._mark()
    where q.queue_id = v_id;
    return 1;
  exception
    -- A table that cannot be emptied yet must not stay locked.
    when lock_not_available or sqlstate 'PQ099' then
      return 0;
  end;
end
$$;
comment on function pgque.maint_rotate_tables_step1(text) is
  'Rotates a queue: empties its oldest table and makes it the current one, if rotation_period has passed and every consumer has passed the table''s '
  'messages. Returns 1. Returns 0 if there was nothing to do, a consumer still needs the table, or the table is locked. Errors: PQ001 no such queue; '
  '25000 in a REPEATABLE READ or SERIALIZABLE transaction.';

create or replace function pgque.maint_rotate_tables_step2() returns int
language sql as $$ select 0 $$;
comment on function pgque.maint_rotate_tables_step2() is 'Does nothing and returns 0: PgQ''s second half of a rotation.';

-- Returns the bytes of one leaf of the journal, and of the tables that rotate with it.
create or replace function pgque._journal_size(p_leaf int) returns bigint
language sql volatile as $$
  select sum(pg_catalog.pg_relation_size(('pgque.' || t.kind || '_' || p_leaf)::regclass))
  from (values ('position'), ('settled'), ('tally')) t (kind)
$$;

-- Makes the other leaf of the journal the current one, and notes it for polls.
create or replace function pgque._rotate_journal(p_cur int) returns void
language plpgsql as $$
begin
  update pgque.journal j set journal_cur = 1 - p_cur, journal_flipped_at = pg_catalog.clock_timestamp() where j.journal_id = 1;
  perform pg_catalog.setval('pgque.journal_leaf', 1 - p_cur);
end
$$;

-- Locks the journal's row against transactions with old snapshots (see _journal_leaf),
-- and a leaf, which is to be emptied, against all.  Waits in one of ten calls if a leaf
-- has more than 64 MB.  Then new transactions wait behind this one: those with a lock
-- on the row would never all be gone at once where their transactions overlap.  Returns
-- whether all is locked.  Only the caller's next statement sees what others committed
-- meanwhile.
create or replace function pgque._lock_journal(p_size bigint, p_leaf text default null) returns boolean
language plpgsql set lock_timeout = '100ms' as $$
declare
  v_how  text := 'exclusive mode' || case when p_size <= 67108864 or pg_catalog.random() >= 0.1 then ' nowait' else '' end;
begin
  execute 'lock table pgque.journal in ' || v_how;
  if p_leaf is not null then
    execute pg_catalog.format('lock table %s in access %s', p_leaf, v_how);
  end if;
  return true;
exception
  when lock_not_available then
    return false;
end
$$;

-- Compacts the journal of positions once the current leaf has more than 4 MB, at most
-- once a minute.  One call makes the other leaf the current one.  After its commit, a
-- later call copies, under each subscriber's lock, the rows of subscribers that did not
-- write since, and empties the old leaf.  Locked subscribers are left for the next
-- call.  Where transactions with old snapshots write to both leaves all the time, the
-- journal turns in the call that empties.  Returns 1 if something was done.
create or replace function pgque._compact_journal() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '100ms' set jit = off as $$
declare
  v_cur      int;
  v_flipped  timestamptz;
  v_size     bigint;
  v_old      bigint;
  v_due      boolean;
  v_sub      pgque.subscriber;
begin
  perform pgque._need_read_committed('compaction');
  select j.journal_cur, j.journal_flipped_at into v_cur, v_flipped from pgque.journal j where j.journal_id = 1;
  if not found then
    return 0;
  end if;
  if coalesce(pg_sequence_last_value('pgque.journal_leaf'), 0) <> v_cur then
    perform setval('pgque.journal_leaf', v_cur);   -- a turn of the journal was rolled back, or came from a dump
  end if;
  v_size := pgque._journal_size(v_cur);
  v_old := pgque._journal_size(1 - v_cur);
  -- A restore sees by positions without consumers that the consumers are missing.  So
  -- positions do not stay when the last consumer is unsubscribed.
  v_due := (v_size >= 4194304 or pg_relation_size('pgque.position_' || v_cur) > 0 and not exists (select from pgque.subscriber))
    and v_flipped not between clock_timestamp() - interval '1 minute' and clock_timestamp();
  if v_old = 0 then
    if not v_due or not pgque._lock_journal(v_size) then
      return 0;
    end if;
    -- Another call may have turned the journal meanwhile, and a transaction with an old
    -- snapshot may have written to the other leaf.
    if (select j.journal_cur from pgque.journal j where j.journal_id = 1) <> v_cur or pgque._journal_size(1 - v_cur) > 0 then
      return 0;
    end if;
    perform pgque._rotate_journal(v_cur);
    return 1;
  end if;
  for v_sub in select s.* from pgque.subscriber s where not pgque._has_copied(s.sub_id, v_cur) for no key update skip locked loop
    perform pgque._copy_position(pgque._position(v_sub.sub_id), v_cur);
    perform pgque._copy_leases(v_sub, v_cur);
  end loop;
  if not pgque._lock_journal(greatest(v_size, v_old), format('pgque.position_%s, pgque.settled_%1$s, pgque.tally_%1$s', 1 - v_cur)) then
    return 0;
  end if;
  -- Another call may have emptied the leaf, and turned the journal, meanwhile; and there
  -- may be new subscribers.
  if (select j.journal_cur from pgque.journal j where j.journal_id = 1) <> v_cur
    or exists (select from pgque.subscriber s where not pgque._has_copied(s.sub_id, v_cur))
  then
    return 0;
  end if;
  -- Counters continue.
  insert into pgque.tally (tal_queue, tal_sub, tal_what, tal_count, leaf)
  select t.tal_queue, t.tal_sub, t.tal_what, sum(t.tal_count), v_cur
  from pgque.tally t
  where t.leaf = 1 - v_cur and exists (select from pgque.queue q where q.queue_id = t.tal_queue)
  group by 1, 2, 3;
  -- If a batch has messages in the retry queue, its worker may still use the batch id,
  -- and its outcomes count.
  insert into pgque.position
  select (pgque._in_leaf(p, v_cur)).*
  from (select distinct r.ev_owner, r.ev_batch from pgque.retry_queue r where r.ev_batch is not null) h
  join pgque.position p on p.leaf = 1 - v_cur and p.pos_sub + 0 = h.ev_owner and p.pos_batch = h.ev_batch
  on conflict do nothing;
  insert into pgque.settled (set_batch, set_what, set_ev_id, set_until, leaf)
  select s.set_batch, s.set_what, s.set_ev_id, s.set_until, v_cur
  from (select distinct r.ev_batch from pgque.retry_queue r where r.ev_batch is not null) h
  join pgque.settled s on s.leaf = 1 - v_cur and s.set_batch = h.ev_batch
  on conflict do nothing;
  execute format('truncate pgque.position_%s, pgque.settled_%1$s, pgque.tally_%1$s', 1 - v_cur);
  -- A reader with an old snapshot gets 40001, since this row changed.
  update pgque.journal j set journal_emptied_at = clock_timestamp() where j.journal_id = 1;
  if v_due then
    perform pgque._rotate_journal(v_cur);
  end if;
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Returns whether a leaf has a subscriber's position, and all rows of its open batches.
create or replace function pgque._has_copied(p_sub int, p_cur int) returns boolean
language plpgsql as $$
declare
  v_position  pgque.position := pgque._position_in(p_sub, p_cur);
begin
  return v_position.pos_sub is not null
    and not exists (select from pg_catalog.unnest(v_position.pos_open) o (token) where not pgque._is_copied(p_sub, o.token, p_cur));
end
$$;

-- Moves consumers that lag beyond the queue's retention period forward to the last tick
-- before it, so that a consumer that no longer reads cannot fill the disk.  drop_policy
-- applies to the messages that it misses, and to messages that wait for it in the retry
-- queue for longer.  One call drops some 10,000 messages of a consumer, so that ticks
-- do not wait for long.  Returns 0 only if there is nothing more to do.
create or replace function pgque._retain(p_queue_id int) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue   pgque.queue;
  v_cutoff  timestamptz;
  v_to      pgque.tick;
  v_young   bigint;
  v_sub     pgque.subscriber;
  v_count   int := 0;
begin
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id and not q.queue_restored;
  v_cutoff := pgque.clock() - v_queue.queue_retention_period;
  -- This runs for every queue, so its locks are released at once.
  begin
    -- The last tick before the first young one, by their ids: a clock that was set back
    -- for a while left ticks among the young ones that look old.
    execute format('select min(t.tick_id) from (%s) t where t.tick_time between $1 and $2', pgque._ticks_sql(p_queue_id))
    into v_young using v_cutoff, pgque.clock();
    execute format(
      'select t.* from (%s) t where t.tick_time < $1 and t.tick_id < $2 order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue_id))
    into v_to using v_cutoff, coalesce(v_young, 9223372036854775807);
    perform pgque._undo_block();
  exception
    when sqlstate 'PQ099' then
      null;
  end;
  if v_to.tick_id is not null then
    for v_sub in
      select s.*
      from pgque.subscriber s
      where s.sub_queue = p_queue_id and s.sub_main is null and (pgque._oldest_needed_position(s.sub_id)).pos_tick < v_to.tick_id
      for no key update skip locked
    loop
      v_count := v_count + pgque._move_forward(v_queue, v_sub, v_to);
    end loop;
  end if;
  return v_count + pgque._give_up_retries(v_queue, v_cutoff);
end
$$;

-- Moves one consumer forward, to a tick or so far that it drops some 10,000 messages.
-- If a window is open, it only begins later: how far it was delivered stays known.
-- Returns 1, or 0 if the consumer did not move.
create or replace function pgque._move_forward(p_queue pgque.queue, p_sub pgque.subscriber, p_to pgque.tick) returns int
language plpgsql as $$
declare
  v_position  pgque.position := pgque._position(p_sub.sub_id);
  v_dropped   bigint := 0;
  v_left      bigint;
  v_upto      pgque.tick := p_to;
  v_mine      bigint[];
  v_held      record;
  v_moved     boolean := false;
begin
  -- Leased messages may still be finished, but not from the log.  Batches are locked
  -- together, since a server has no room for thousands of locks.
  v_mine := pgque._try_lock_batches(p_sub, array(select h.token from pgque._open_batches(p_sub.sub_id) h where (h.lease).pos_tick < p_to.tick_id limit 200));
  for v_held in select h.token, h.lease, h.until from pgque._open_batches(p_sub.sub_id) h where h.token = any (v_mine) loop
    if exists (select from pgque._states(p_sub.sub_id, array[v_held.token]) s where s.place = 'log') then
      if p_sub.sub_role <> 'pool' then
        -- A batch whose lease has no end is not kept for longer than other messages.  A
        -- client that acknowledges a dropped message gets the answer that it has its
        -- outcome.
        v_dropped := pgque._give_up_to(p_queue, p_sub, v_held.lease, p_to, 10000);
        v_position.pos_skipped := v_position.pos_skipped + v_dropped;
      end if;
      if v_dropped < 10000 then
        v_left := pgque._move_to_retry(p_sub, v_held.lease, v_held.until);
        -- A batch without messages is finished: ack() of it returns 0.
        perform pgque._record(v_held.token, 'closed') where v_left = 0 and p_sub.sub_role <> 'pool';
      end if;
      v_moved := true;
    end if;
  end loop;
  v_position := pgque._next_from(v_position);
  v_position.pos_open := pgque._still_open(p_sub, v_position.pos_open);
  if v_position.pos_tick < p_to.tick_id then
    v_moved := true;
    if v_position.pos_next_tick < v_upto.tick_id then
      v_upto := pgque._tick(p_queue.queue_id, v_position.pos_next_tick);
    end if;
    if v_upto.tick_event_seq - v_position.pos_event_seq > 10000 then
      v_upto := pgque._tick(p_queue.queue_id, pgque.next_tick(p_queue.queue_name, v_position.pos_tick, 10000, null, v_upto.tick_id));
    end if;
    v_position.pos_skipped := v_position.pos_skipped + pgque._give_up_to(p_queue, p_sub, v_position, v_upto);
    if v_upto.tick_id < v_position.pos_next_tick then
      v_position.pos_tick := v_upto.tick_id;
      v_position.pos_snapshot := v_upto.tick_snapshot;
      v_position.pos_event_seq := v_upto.tick_event_seq;
    else
      v_position := pgque._at_tick(v_position, v_upto);
    end if;
  end if;
  if v_moved then
    perform pgque._append_position(v_position);
  end if;
  return v_moved::int;
end
$$;

-- Gives up the messages of a position's window or batch up to a tick that have no
-- outcome.  Returns how many, at most p_most.
create or replace function pgque._give_up_to(
  p_queue pgque.queue, p_sub pgque.subscriber, p_position pgque.position, p_to pgque.tick, p_most int default null
) returns bigint
language plpgsql as $$
declare
  v_rows   text;
  v_keyed  pgque.event[];
  v_claim  record;
  v_event  pgque.event;
  v_ids    bigint[];
begin
  v_rows := pg_catalog.format('select * from (%s) e order by e.ev_id limit %L', pgque._undone_sql(p_sub,
    case when p_position.pos_next_tick < p_to.tick_id then p_position else pgque._with_window(p_position, p_to) end), p_most);
  if pgque._keyed(p_queue) then
    -- As in receive(): a message whose body is being replaced goes to the retry queue.
    execute pg_catalog.format('select array_agg(%s) from (%s) e where e.ev_key is not null', pgque._slim('null'), v_rows) into v_keyed;
    v_claim := pgque._claim(p_queue, v_keyed);
    execute pg_catalog.format(
      'insert into pgque.retry_queue select (pgque._as_retry(e, $1, 0, pgque.clock(), null, null)).* from (%s) e'
      ' where (e.ev_id in (select pg_catalog.unnest((select $2)))) is true on conflict do nothing', pgque._renewed_sql(p_queue.queue_id, v_rows))
    using p_sub, v_claim.busy;
    -- A sender with an older snapshot does not see that they are dropped.
    perform pgque._seal(p_queue.queue_id, array(
      select r from pg_catalog.unnest(v_claim.rows) r where (r.ev_id in (select pg_catalog.unnest((select v_claim.busy || v_claim.gone)))) is not true));
    v_rows := pgque._renewed_sql(p_queue.queue_id, pg_catalog.format(
      'select e.* from (%s) e where e.ev_id not in (select b.id from pg_catalog.unnest(%L::bigint[]) b (id))', v_rows, v_claim.busy || v_claim.gone));
  end if;
  for v_event in execute pg_catalog.format('select e.* from (%s) e order by e.ev_id', v_rows) loop
    v_ids := v_ids || v_event.ev_id;
    if v_event.ev_expires <= pgque.clock() then
      perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'expired', 1);
    else
      perform pgque._give_up(p_queue, p_sub, pgque._as_retry(v_event, p_sub, coalesce(v_event.ev_retry, 0), null, null, null), 'retention period passed');
    end if;
  end loop;
  perform pgque._record(p_position.pos_batch, 'outcome', v_ids) where p_position.pos_batch is not null;
  return coalesce(pg_catalog.cardinality(v_ids), 0);
end
$$;

-- Gives up messages of the retry queue that could be delivered since before p_cutoff.  The
-- time counts from when a message was due, and not from the send: a message with a long
-- delay keeps its retries.  A lease without an end does not keep a message: then the time
-- counts from the delivery.  Returns 1 if it gave up 10,000, the most for one call.
create or replace function pgque._give_up_retries(p_queue pgque.queue, p_cutoff timestamptz) returns int
language plpgsql as $$
declare
  v_held   bigint[];
  v_aside  record;
  v_item   pgque.retry_queue;
  v_sub    pgque.subscriber;
  v_count  int := 0;
begin
  v_held := array(
    select h.ev_batch
    from (
      select distinct e.ev_owner, e.ev_batch from pgque.retry_queue e
      where e.ev_queue = p_queue.queue_id and e.ev_time < p_cutoff and e.ev_retry_after = 'infinity'
    ) h
    where coalesce((pgque._lease(h.ev_owner, h.ev_batch)).pos_time, '-infinity') < p_cutoff);
  v_aside := pgque._claim_retries(p_queue.queue_id, array(
    select pgque._slim_retry(e)
    from (
      select e.* from pgque.retry_queue e
      where e.ev_queue = p_queue.queue_id and e.ev_retry_after < p_cutoff and e.ev_owner <> 0
        and e.ev_key is not null and e.ev_receives = 0
      limit 10000
      for update skip locked
    ) e));
  for v_item in
    with found as materialized (
      select e.ctid from pgque.retry_queue e
      where e.ev_queue = p_queue.queue_id and e.ev_owner <> 0 and (e.ev_retry_after < p_cutoff or e.ev_batch = any (v_held))
        and (e.ev_key is null or e.ev_receives > 0
          or (e.ev_owner, e.ev_id) in (select f.owner, f.id from unnest(v_aside.owners, v_aside.ids) f (owner, id)))
      limit 10000
      for update skip locked
    )
    delete from pgque.retry_queue r using found f
    where r.ctid = f.ctid
    returning r.*
  loop
    v_count := v_count + 1;
    select s.* into v_sub from pgque.subscriber s where s.sub_id = v_item.ev_owner;
    if found then
      perform pgque._give_up(p_queue, v_sub, v_item, 'retention period passed');
    end if;
  end loop;
  return (v_count = 10000)::int;
end
$$;

-- Returns the query for the rows of a position's slice or batch that have no outcome.
-- p_and is one more condition on e.
create or replace function pgque._undone_sql(p_sub pgque.subscriber, p_pos pgque.position, p_and text default '') returns text
language sql stable as $$
  select pgque._rows_sql(p_sub.sub_queue, pgque._slice_condition(p_sub.sub_id, p_pos.pos_done_id, p_pos.pos_last_id)
    || coalesce(' and not (' || pgque._has_outcome_sql(p_pos.pos_batch) || ')', '') || p_and || pgque._not_cancelled_sql(p_sub.sub_queue, p_pos),
    null, pgque._xids(p_pos.pos_snapshot, p_pos.pos_next_snapshot))
$$;

-- Returns the query for the rows that a subscriber has ahead of it in a snapshot: not
-- passed by its position, not delivered from its window, and without an outcome in its
-- open batch.  p_and is one more condition on e; p_tids as for _rows_sql(); p_xids: only
-- rows of these transactions.
create or replace function pgque._unfinished_sql(
  p_sub pgque.subscriber, p_position pgque.position, p_snapshot pg_snapshot, p_and text default '', p_tids text[] default null,
  p_xids int8multirange default '{(,)}'
) returns text
language sql stable as $$
  select pgque._rows_sql(p_sub.sub_queue, pg_catalog.format('(e.ev_owner is null or e.ev_owner = %s)', p_sub.sub_id)
    || coalesce(' and not (e.ev_id <= ' || p_position.pos_done_id
      || pg_catalog.format(' and pg_catalog.pg_visible_in_snapshot(e.ev_txid, %L))', p_position.pos_next_snapshot), '')
    || coalesce(' and not (' || pgque._has_outcome_sql(p_position.pos_batch)
      || pg_catalog.format(' and pg_catalog.pg_visible_in_snapshot(e.ev_txid, %L))', p_position.pos_next_snapshot), '') || p_and || pgque._not_cancelled_sql(p_sub.sub_queue, p_position),
    p_tids, pgque._xids(p_position.pos_snapshot, p_snapshot) * p_xids)
$$;

-- Locks a queue's consumers and batches until the transaction ends.  A session that
-- works with a batch may receive next, which needs the consumer.  So the function does
-- not wait while it has the consumers locked: it releases them first.
create or replace function pgque._lock_consumers(p_queue_id int) returns void
language plpgsql as $$
declare
  v_wait  text := pg_catalog.current_setting('lock_timeout');
  v_end   timestamptz := pg_catalog.clock_timestamp() + coalesce(nullif(v_wait::interval, '0'), '1 minute');
begin
  loop
    begin
      -- A delivery whose transaction stays open holds its consumer.
      perform pg_catalog.set_config('lock_timeout', greatest(pg_catalog.ceil(extract(epoch from v_end - pg_catalog.clock_timestamp()) * 1000), 1) || 'ms', true);
      perform from pgque.subscriber s where s.sub_queue = p_queue_id order by s.sub_main nulls first, s.sub_id for no key update;
      if pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque.batches'), p_queue_id) then
        perform pg_catalog.set_config('lock_timeout', v_wait, true);
        return;
      end if;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' or lock_not_available then
        null;
    end;
    -- A session that waits for this lock blocks others from their batches.
    begin
      perform pg_catalog.set_config('lock_timeout', '50ms', true);
      perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.batches'), p_queue_id);
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        perform pg_catalog.pg_sleep(0.02);
    end;
    if pg_catalog.clock_timestamp() > v_end then
      perform pgque._fail('lock_not_available', pg_catalog.format('an open transaction holds a consumer or a batch of queue %I', (
        select q.queue_name from pgque.queue q where q.queue_id = p_queue_id)), 'Try again after it commits, or end its session.');
    end if;
  end loop;
end
$$;

-- The rows stay in the log until rotation.  So that nobody reads them again, the purge
-- gives all stored ticks the snapshot of its own one: windows that begin or end there have
-- no purged message.  The ticks keep their ids, for readers with offsets of their own.
create or replace function pgque.purge(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_sub    pgque.subscriber;
  v_pos    pgque.position;
  v_last   pgque.tick;
  v_count  bigint;
begin
  perform pgque._need_read_committed('purge()');
  perform pgque._rebase(v_queue.queue_id);
  perform pgque._wait_for_keyed_sends(v_queue);
  -- Calls that move a consumer to a stored tick wait here; those with an older snapshot get
  -- 40001, since the row changes.
  update pgque.queue q set queue_xid = pgque._queue_xid(q) where q.queue_id = v_queue.queue_id;
  perform pgque._no_queue(v_queue.queue_name) where not found;
  perform pgque._lock_consumers(v_queue.queue_id);
  v_count := pgque._depth(v_queue.queue_id);
  perform pg_advisory_xact_lock(hashtext('pgque.tick'), v_queue.queue_id);
  v_queue := pgque._queue(v_queue.queue_name);
  v_last := pgque._last_tick(v_queue);
  -- A block with an exception handler is a subtransaction, which _store_tick() needs, and
  -- the same counts for the ticks that get the values of this one.
  begin
    perform pgque._store_tick(v_queue, pgque._next_tick_id(v_queue, v_last.tick_id), pgque.clock(), pgque._tick_snapshot(), null, false);
    v_last := pgque._last_tick(v_queue);
    for n in 0..2 loop
      execute format('update pgque.tick_%s_%s t set tick_snapshot = $1, tick_event_seq = $2 where t.tick_id < $3', v_queue.queue_id, n)
      using v_last.tick_snapshot, v_last.tick_event_seq, v_last.tick_id;
    end loop;
  exception
    when sqlstate 'PQ099' then
      raise;
  end;
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = v_queue.queue_id and s.sub_main is null loop
    v_pos := pgque._position(v_sub.sub_id);
    perform pgque._record(o.token, 'closed') from unnest(v_pos.pos_open) o (token);
    v_pos.pos_open := '{}';
    v_pos.pos_lapse := null;
    v_pos.pos_high := greatest(v_pos.pos_high, v_pos.pos_next_tick);
    perform pgque._append_position(pgque._at_tick(v_pos, v_last));
  end loop;
  -- A message that another session has locked keeps the outcome that the other session
  -- gives it.
  with found as materialized (
    select e.ctid from pgque.retry_queue e where e.ev_queue = v_queue.queue_id for update skip locked
  )
  delete from pgque.retry_queue r using found f
  where r.ctid = f.ctid;
  perform pgque._record_action('purge', v_queue.queue_name, jsonb_build_object('messages', v_count));
  return v_count;
end
$$;
comment on function pgque.purge(text, pgque.caller) is
  'Removes every committed message of a queue: pending, delayed and leased messages, and retries. No call can read them again, also not for a '
  'consumer that subscribes at earliest or is moved back. Dead letters and the archive stay. For a batch that was open, ack() then returns 0 or '
  'false. Rotation later empties the tables on disk. Returns the number of messages that the slowest consumer had ahead of it. Errors: PQ001 no such '
  'queue; 25000 not READ COMMITTED.';

create or replace function pgque.maint_lapsed() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub    pgque.subscriber;
  v_queue  pgque.queue;
  v_pos    pgque.position;
  v_rows   pgque.retry_queue[];
  v_count  int := 0;
begin
  for v_sub in select s.* from pgque.subscriber s where s.sub_role = 'pool' loop
    select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue;
    continue when v_queue.queue_restored is not false;
    v_pos := pgque._position(v_sub.sub_id);
    if v_pos.pos_lapse <= pgque.clock() and v_queue.queue_max_receive_attempts = 1 then
      perform from pgque.subscriber s where s.sub_id = v_sub.sub_id for no key update skip locked;
      continue when not found;
      perform pgque._append_position(pgque._collect_expired(v_sub, pgque._next_from(pgque._position(v_sub.sub_id)), pgque.clock()));
    end if;
    v_rows := array(
      select pgque._slim_retry(r)
      from (
        select r.* from pgque.retry_queue r
        where r.ev_owner = v_sub.sub_id and r.ev_retry_after <= pgque.clock() and r.ev_receives >= v_queue.queue_max_receive_attempts
        limit 10000 - v_count
        for update skip locked
      ) r);
    perform pgque._choose_retries(v_queue, v_sub, v_rows, pgque.clock());
    v_count := v_count + cardinality(v_rows);
    exit when v_count >= 10000;
  end loop;
  return v_count;
end
$$;
comment on function pgque.maint_lapsed() is
  'Part of maint(): gives up messages whose last lease expired and whose attempts are used up, at most 10,000, also if no worker receives for the '
  'consumer. Returns their number.';

-- Empties side tables without live rows, so that not even their dead rows stay.  A
-- table in use is skipped.
create or replace function pgque._empty_side_tables() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_count  int := 0;
begin
  v_count := v_count + pgque._compact_idempotency();
  -- Retries of consumers that no longer exist.  Without any consumer they may not be
  -- loaded from a dump yet.
  delete from pgque.retry_queue r
  where exists (select from pgque.subscriber) and r.ev_owner in (
    with recursive owner (id) as (
      select min(o.ev_owner) from pgque.retry_queue o
      union all
      select (select min(o.ev_owner) from pgque.retry_queue o where o.ev_owner > w.id) from owner w where w.id is not null
    )
    select w.id from owner w where w.id > 0 and not exists (select from pgque.subscriber s where s.sub_id = w.id));
  -- Delayed messages that were sent while their queue was dropped, and what a drop with
  -- an old snapshot left behind.
  delete from pgque.retry_queue r
  where r.ev_queue in (
    with recursive queue (id) as (
      select min(o.ev_queue) from pgque.retry_queue o
      union all
      select (select min(o.ev_queue) from pgque.retry_queue o where o.ev_queue > w.id) from queue w where w.id is not null
    )
    select w.id from queue w where pgque._is_dropped(w.id));
  delete from pgque.dead_letter d
  where d.dl_queue_id in (
    with recursive queue (id) as (
      select min(o.dl_queue_id) from pgque.dead_letter o
      union all
      select (select min(o.dl_queue_id) from pgque.dead_letter o where o.dl_queue_id > w.id) from queue w where w.id is not null
    )
    select w.id from queue w where pgque._is_dropped(w.id));
  delete from pgque.subscriber s where not exists (select from pgque.queue q where q.queue_id = s.sub_queue) and pgque._is_dropped(s.sub_queue);
  delete from pgque.queue_right r where not exists (select from pgque.queue q where q.queue_id = r.right_queue) and pgque._is_dropped(r.right_queue);
  delete from pgque.bad_record b where not exists (select from pgque.subscriber s where s.sub_id = b.bad_sub);
  perform pgque._tidy_rights();
  v_count := v_count + pgque._empty('pgque.bad_record', true) + pgque._empty('pgque.retry_queue', true) + pgque._empty('pgque.dead_letter', true);
  -- The map is a cache: a window that is still open gets a new one.
  if pg_relation_size('pgque.window_map') > 268435456 or exists (select from pgque.window_map) and not exists (
    select from pgque.subscriber s
    cross join lateral pgque._position(s.sub_id) p
    where (pgque._next_from(p)).pos_done_id is not null
      -- A reader of offsets stands before its window until it has read all of it.
      or s.sub_offsets and exists (select from pgque.window_map m where m.map_queue = s.sub_queue and m.map_from = p.pos_tick))
  then
    v_count := v_count + pgque._empty('pgque.window_map', false);
  end if;
  return v_count;
end
$$;

-- Returns whether a queue was dropped.  Tables without a row of their queue may be those
-- of a dump that is being loaded.
create or replace function pgque._is_dropped(p_queue_id int) returns boolean
language sql as $$
  select not exists (select from pgque.queue q where q.queue_id = p_queue_id)
    and (exists (select from pgque.dropped_queue d where d.queue_id = p_queue_id) or pg_catalog.to_regclass('pgque.tick_' || p_queue_id || '_0') is null)
$$;

-- Truncates a table that has pages, if its lock is free and, with p_only_if_empty, if it has
-- no row.  This is checked before the lock is taken, since others would wait for it, and
-- again under the lock.
create or replace function pgque._empty(p_table regclass, p_only_if_empty boolean) returns int
language plpgsql as $$
declare
  v_check  text := pg_catalog.format('select not (%L and exists (select from %s))', p_only_if_empty, p_table);
  v_may    boolean := pg_catalog.pg_relation_size(p_table) > 0;
begin
  if v_may then
    execute v_check into v_may;
  end if;
  if v_may then
    execute pg_catalog.format('lock table %s in access exclusive mode nowait', p_table);
    execute v_check into v_may;
  end if;
  if v_may then
    execute pg_catalog.format('truncate %s', p_table);
  end if;
  return v_may::int;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Returns whether it is time to do something again that was done at p_last; a null
-- interval means never.  A p_last in the future counts as due: the clock was set back.
create or replace function pgque._is_due(p_last timestamptz, p_every interval) returns boolean
language sql volatile as $$ select p_every is not null and (pgque.clock() < p_last or pgque.clock() >= p_last + p_every) $$;

-- Returns the parts of maint(), in this order, and whether each runs for each queue.
create or replace function pgque._maint_functions(out func_name text, out each_queue boolean) returns setof record
language sql immutable as $$
  values ('pgque.maint_retry_events', false), ('pgque.maint_recurring', false), ('pgque.maint_lapsed', false), ('pgque.maint_expire', false), ('pgque.maint_lags', false),
    ('pgque.maint_retain', true), ('pgque.maint_rotate_tables_step1', true),
    ('pgque.maint_tables', false)
$$;

create or replace function pgque.maint_operations(out func_name text, out func_arg text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query
    select f.func_name, q.queue_name
    from pgque._maint_functions() with ordinality f (func_name, each_queue, n)
    left join pgque.queue q on f.each_queue
    where not f.each_queue
      or q.queue_id is not null
        and (f.func_name <> 'pgque.maint_rotate_tables_step1' or pgque._is_due(q.queue_switch_time, q.queue_rotation_period))
    order by f.n, q.queue_id;
end
$$;
comment on function pgque.maint_operations() is 'Returns the operations of maint(), one call a row, for a scheduler that commits after each call.';

create or replace function pgque.maint_retain(queue_name text) returns int
language sql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
  select pgque._retain((pgque._queue($1)).queue_id)
$$;
comment on function pgque.maint_retain(text) is
  'Part of maint(): moves consumers that lag beyond the queue''s retention_period forward, past messages that they never received, and returns the '
  'number of consumers moved. get_consumer_info() counts the skipped messages. Errors: PQ001 no such queue.';

create or replace function pgque.maint_tables() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_part   text;
  v_lacks  text;
  v_done   int;
  v_count  int := 0;
begin
  if pgque._is_loading() then
    -- One warning a round, whatever the number of queues is.
    v_lacks := pgque._lacking();
    if v_lacks is not null then
      raise warning using message = 'pgque: maintenance waits for the end of a restore: ' || v_lacks, hint = pgque._restore_advice();
    end if;
    return 0;
  elsif not pg_try_advisory_xact_lock(hashtext('pgque.rotate'), 0) then
    return 0;
  end if;
  -- A failure in one part must not stop the others.  _drop_leaves is last: all others
  -- use the tables that it locks.
  foreach v_part in array array['_note_complete_later', '_copy_options', '_compact_journal', '_compact_stage', '_compact_epochs', '_compact_recurring', '_rotate_history', '_empty_side_tables', '_trim_cron_history', '_fill_archive', '_drop_archive_leaves', '_drop_leaves'] loop
    begin
      execute format('select pgque.%I()', v_part) into v_done;
      v_count := v_count + v_done;
    exception
      when invalid_transaction_state then
        raise;
      when others then
        raise warning 'pgque: % failed: % (%)', v_part, sqlerrm, sqlstate;
    end;
  end loop;
  return v_count;
end
$$;
comment on function pgque.maint_tables() is
  'Part of maint(): maintains the tables that all queues share. Returns how many steps there were to do; 0 when all is done.';

-- Runs one of maint_operations().  A failure is reported, and the next call tries
-- again.
create or replace function pgque._maint_operation(p_func text, p_arg text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '1s' set jit = off as $$
declare
  v_done  int;
begin
  if not exists (select from pgque._maint_functions() f where f.func_name = p_func) then
    perform pgque._fail('PQ005', format('not a maintenance operation: %L', p_func), 'List the operations: select * from pgque.maint_operations();');
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

-- A rotation keeps a dozen locks until the transaction ends.  If the server has no room
-- for all queues, the next call does the rest.
create or replace function pgque.maint() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_room   bigint := greatest(pgque._lock_room() / 16, 1);
  v_count  int;
  v_op     record;
  v_done   int;
begin
  perform pgque._need_read_committed('maintenance');
  v_count := coalesce(pgque._forward_letters(), 0);
  for v_op in
    select o.func_name, o.func_arg, o.func_name = 'pgque.maint_rotate_tables_step1' as rotates, o.func_name = 'pgque.maint_retain' as retains
    from pgque.maint_operations() o
  loop
    continue when v_op.rotates and v_room = 0;
    loop
      v_done := pgque._maint_operation(v_op.func_name, v_op.func_arg);
      v_count := v_count + v_done;
      exit when v_done = 0 or not v_op.retains;
    end loop;
    v_room := v_room - case when v_op.rotates then v_done else 0 end;
  end loop;
  return v_count;
end
$$;
comment on function pgque.maint() is
  'Does all maintenance now: dead letters that go to other queues, delayed messages, retention, rotation, compaction. It is for a scheduler that does not run the loop. Two calls at '
  'once do no harm. Returns how many steps there were to do. Errors: 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';
