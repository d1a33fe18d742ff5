-- ---------------------------------------------------------------------------
-- tick: record snapshots
-- ---------------------------------------------------------------------------

-- Returns the current snapshot, in which the calling transaction itself is never
-- visible.  A transaction that sends, ticks and sends again has one id.  If it were
-- visible in its own tick, a reader of that tick inside the transaction would miss the
-- second event.
create or replace function pgque._tick_snapshot() returns pg_snapshot
language plpgsql as $$
declare
  v_snapshot  pg_snapshot := pg_catalog.pg_current_snapshot();
  v_own       xid8 := pg_catalog.pg_current_xact_id_if_assigned();
begin
  if v_own is null or not pg_catalog.pg_visible_in_snapshot(v_own, v_snapshot) then
    return v_snapshot;
  end if;
  return (
    select least(pg_catalog.pg_snapshot_xmin(v_snapshot), v_own)::text || ':' || pg_catalog.pg_snapshot_xmax(v_snapshot)::text
      || ':' || pg_catalog.string_agg(x.xid::text, ',' order by x.xid)
    from (
      select s.xid from pg_catalog.pg_snapshot_xip(v_snapshot) s (xid)
      union
      select v_own
    ) x
  )::pg_snapshot;
end
$$;

-- Returns the newest tick of a queue.  Ticks go to the current table: if that has rows,
-- the newest is there.  (No sequential scans here and below: the planner expects no
-- rows in a table that was vacuumed while empty.)
create or replace function pgque._last_tick(p_queue pgque.queue) returns pgque.tick
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_tick  pgque.tick;
begin
  execute pg_catalog.format('select t.* from pgque.tick_%s_%s t order by t.tick_id desc limit 1', p_queue.queue_id, p_queue.queue_cur_table)
  into v_tick;
  if v_tick.tick_id is null then
    execute pg_catalog.format('select t.* from (%s) t order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue.queue_id)) into v_tick;
  end if;
  return v_tick;
end
$$;

create or replace function pgque._ticks_sql(p_queue_id int) returns text
language sql stable as $$
  select pg_catalog.format(
    'select * from pgque.tick_%1$s_0 union all select * from pgque.tick_%1$s_1 union all select * from pgque.tick_%1$s_2', p_queue_id)
$$;

-- Returns a tick by its id; all columns are null if it no longer exists.
create or replace function pgque._tick(p_queue_id int, p_tick_id bigint) returns pgque.tick
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_tick  pgque.tick;
begin
  execute pg_catalog.format('select t.* from (%s) t where t.tick_id = $1', pgque._ticks_sql(p_queue_id)) into v_tick using p_tick_id;
  return v_tick;
end
$$;

-- Returns whether a snapshot shows rows of a queue that its last tick does not show.
create or replace function pgque._has_new_rows(p_queue_id int, p_last pgque.tick, p_snapshot pg_snapshot) returns boolean
language plpgsql set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_found  boolean;
begin
  execute pg_catalog.format('select exists (%s)', pgque._rows_sql(p_queue_id, 'true', null, pgque._xids(p_last.tick_snapshot, p_snapshot)))
  into v_found;
  return v_found;
end
$$;

-- Returns why a queue gets a tick with this snapshot: 'events' (it shows events that no
-- tick covers), 'forced' or 'idle'.  Or returns why it gets none: 'nothing' (it shows
-- no such events), or null (too early to check).  p_new: what _has_new_rows() returned,
-- if the caller asked it.  The function only reads: no WAL, no transaction id.
create or replace function pgque._tick_reason(p_queue pgque.queue, p_last pgque.tick, p_snapshot pg_snapshot, p_new boolean default null) returns text
language plpgsql as $$
declare
  v_now    timestamptz := pgque.clock();
  v_count  bigint := coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0) - p_last.tick_event_seq;
  v_age    interval := v_now - p_last.tick_time;
  v_ahead  boolean := v_age < '-1 second';   -- the clock was set back, by more than a correction
  v_none   text;
begin
  if coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_tick_seq), 0) > p_last.tick_id then
    return 'forced';   -- without reading a table, which may be locked
  end if;
  if v_count >= p_queue.queue_ticker_max_count or v_ahead
    or v_age >= least(p_queue.queue_ticker_max_lag, p_queue.queue_ticker_idle_period)
  then
    if coalesce(p_new, pgque._has_new_rows(p_queue.queue_id, p_last, p_snapshot)) then
      return 'events';
    end if;
    v_none := 'nothing';
  end if;
  return case when v_ahead or v_age >= p_queue.queue_ticker_idle_period then 'idle' else v_none end;
end
$$;

-- Ticks one queue if a tick is due.  Returns the id of the new tick or null, the time
-- of the newest tick, and whether ticks now cover everything that is visible.  The lock
-- is taken before the snapshot, so the order of ticks is that of their snapshots.  It
-- is held to the end of the transaction, so a second ticker sees the tick of the first.
-- With p_gap no tick for messages follows another within the queue's tick_gap.
create or replace function pgque._tick_if_due(p_queue_id int, p_wait boolean, p_gap boolean default false, out new_id bigint, out last_time timestamptz, out covered boolean)
language plpgsql as $$
declare
  v_queue     pgque.queue;
  v_last      pgque.tick;
  v_snapshot  pg_snapshot;
  v_reason    text;
  v_class     int := pg_catalog.hashtext('pgque.tick');
begin
  perform pgque._need_read_committed('a tick');
  if p_wait then
    perform pg_catalog.pg_advisory_xact_lock(v_class, p_queue_id);
  elsif not pg_catalog.pg_try_advisory_xact_lock(v_class, p_queue_id) then
    return;
  end if;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  if v_queue.queue_restored then
    perform pgque._rebase(p_queue_id);
    select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  end if;
  if v_queue.queue_id is null then
    return;
  end if;
  v_last := pgque._last_tick(v_queue);
  v_snapshot := pgque._tick_snapshot();
  if pg_catalog.pg_snapshot_xmax(v_last.tick_snapshot) > pg_catalog.pg_snapshot_xmax(v_snapshot) then
    -- The dump is of an earlier version: the tick is from another cluster, although the
    -- queue's mark does not show it.
    update pgque.queue q set queue_xid = '1' where q.queue_id = p_queue_id;
    perform pgque._rebase(p_queue_id);
    v_last := pgque._last_tick((select q from pgque.queue q where q.queue_id = p_queue_id));
    new_id := v_last.tick_id;
    last_time := v_last.tick_time;
    return;
  end if;
  v_reason := pgque._tick_reason(v_queue, v_last, v_snapshot);
  if p_gap and v_reason = 'events' and v_last.tick_time between pgque.clock() - v_queue.queue_tick_gap and pgque.clock() then
    v_reason := null;
  end if;
  covered := v_reason is not null;
  last_time := v_last.tick_time;
  if v_reason <> 'nothing' then
    last_time := pgque.clock();
    new_id := pgque._store_tick(v_queue, pgque._next_tick_id(v_queue, v_last.tick_id), last_time, v_snapshot, null, v_reason <> 'idle');
  end if;
end
$$;

-- Returns the id of the next tick of a queue, or with p_anew the first of another era.
-- A server that was promoted or restored to an earlier time may have lost ticks that
-- readers with offsets of their own have seen: these ids must not be used again.  So an
-- era of 2^32 ids belongs to one timeline (its remainder by 256).  Another timeline
-- begins with its own next era.  An external ticker has its own ids.
create or replace function pgque._next_tick_id(p_queue pgque.queue, p_last bigint, p_anew boolean default false) returns bigint
language plpgsql as $$
declare
  v_era   bigint := p_last >> 32;
  v_line  int;
begin
  if p_queue.queue_external_ticker or pg_catalog.pg_is_in_recovery() then
    return p_last + 1;
  end if;
  v_line := (('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint - 1) % 256;
  if v_era % 256 = v_line and not p_anew then
    return p_last + 1;
  end if;
  return v_era + (v_line - v_era % 256 + 255) % 256 + 1 << 32;
end
$$;

-- Notifies sessions that listen to a queue.
create or replace function pgque._notify(p_queue pgque.queue, p_tick_id bigint) returns void
language plpgsql as $$
begin
  if pg_catalog.pg_notification_queue_usage() < 0.5 then
    perform pg_catalog.pg_notify('pgque_' || p_queue.queue_name, p_tick_id::text);
  end if;
end
$$;

-- Stores a tick and notifies listeners.  The commit waits for the disk whatever the
-- session's synchronous_commit is.  The row gets the id of a (sub)transaction that had
-- none when the sequence was read.  So every transaction that drew an id up to
-- p_event_seq has a lower id, see _span_xids().
create or replace function pgque._store_tick(
  p_queue pgque.queue, p_tick_id bigint, p_time timestamptz, p_snapshot pg_snapshot, p_event_seq bigint, p_notify boolean
) returns bigint
language plpgsql as $$
begin
  p_event_seq := coalesce(p_event_seq, pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0);
  if pg_catalog.current_setting('synchronous_commit') = 'off' then
    perform pg_catalog.set_config('synchronous_commit', 'local', true);
  end if;
  -- Set before the tick is visible: a session that reads the sequence knows that there
  -- is no newer tick.
  perform pg_catalog.setval(p_queue.queue_tick_seq, p_tick_id);
  insert into pgque.tick (slot, tick_queue, tick_id, tick_time, tick_snapshot, tick_event_seq)
  values (p_queue.queue_id * 3 + p_queue.queue_cur_table, p_queue.queue_id, p_tick_id, p_time, p_snapshot, p_event_seq);
  -- A listener in an open transaction lets the server's notification queue fill up, and
  -- then a commit fails.  A tick without a notification is better than no tick.
  if p_notify then
    perform pgque._notify(p_queue, p_tick_id);
  end if;
  return p_tick_id;
end
$$;

create or replace function pgque.ticker(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(ticker.queue_name, caller, 'admin');
begin
  if v_queue.queue_restored and (v_queue.queue_external_ticker or v_queue.queue_ticker_paused) then
    perform pgque._rebase(v_queue.queue_id);
    return null;
  elsif v_queue.queue_external_ticker then
    perform pgque._fail('PQ005', format('queue %I has an external ticker', v_queue.queue_name),
      'Pass the tick too: pgque.ticker(queue, tick_id, time, event_seq).');
  elsif v_queue.queue_ticker_paused then
    return null;
  end if;
  -- A block with an exception handler is a subtransaction, which _store_tick() needs.
  begin
    return (pgque._tick_if_due(v_queue.queue_id, true)).new_id;
  exception
    when sqlstate 'PQ099' then
      raise;
  end;
end
$$;
comment on function pgque.ticker(text, pgque.caller) is
  'Ticks one queue if a tick is due, and returns the tick''s id, else NULL. A tick covers committed messages only: send, commit, tick. A queue '
  'that was loaded from a dump is repaired first, even if it is paused or has an external ticker. Errors: PQ001 no such queue; PQ005 the queue has '
  'an external ticker; 25000 in a REPEATABLE READ or SERIALIZABLE transaction; 55000 the dump that it was loaded from is not complete.';

-- Each queue keeps two locks until the transaction ends, and eight with a tick.  If the
-- server has no room for all queues, a call serves some, chosen at random.
create or replace function pgque.ticker() returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_room   bigint := greatest(pgque._lock_room(), 8);
  v_all    boolean := (select count(*) from pgque.queue) <= v_room / 8;
  v_count  bigint := 0;
  v_id     int;
begin
  perform pgque._forward_letters();
  for v_id in select q.queue_id from pgque.queue q order by case when not v_all then random() end, q.queue_id loop
    exit when v_room < 8;
    if (pgque._check_queue(row(v_id, 0, 0, '-infinity', false, false))).ticked then
      v_count := v_count + 1;
      v_room := v_room - 6;
    end if;
    v_room := v_room - 2;
  end loop;
  return v_count;
end
$$;
comment on function pgque.ticker() is
  'Ticks every queue in which something committed since its last tick, and returns the number of ticks. It first forwards dead letters to the '
  'queues that dead_letter_queue names. If a queue is broken, the call raises a '
  'warning and ticks the other queues. Errors: 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';

-- Returns which of these queues the loop has to check now, by what it knows of them,
-- and which are early: their last tick is too young, or they failed less than a second
-- ago.
--
-- A settled queue is left out: ticks cover all its rows, and no new row can appear
-- while the sequences of its events and of its forced ticks stand still.  A sender
-- takes an id before it stores a row and locks the sequence until its transaction ends.
-- So no row with an older id is outstanding once no other session has that lock.  (A
-- row that enters the log under an old id takes an unused one too.)
--
-- Returned values reflect the moment of the call, before _check_queue() takes its snapshot.
-- ticked means that the queue was settled before, so it gets an idle or forced tick at
-- most.  Queues that may have messages are first, then forced ticks, then idle ones.  A
-- queue that is being dropped (its sequences are locked) is left out.  If a sequence is
-- missing, every queue is checked.
--
-- A queue waits for its tick_gap.  A tick wakes every consumer of the queue, so a queue
-- with many consumers waits longer: four milliseconds for each, and at most the tick
-- period.
create or replace function pgque._queues_due(
  p_queues int[], p_known pgque.look[], p_period interval, out looks pgque.look[], out early pgque.look[], out early_until timestamptz
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '20ms' set jit = off as $$
declare
  v_now     timestamptz := pgque.clock();
  v_locked  regclass[];
  v_free    int[];
begin
  select array_agg(l.look order by l.still, l.unforced, l.tick_time) filter (where not l.early),
    coalesce(array_agg(l.known) filter (where l.early), '{}'), min(l.due) filter (where l.early)
  into looks, early, early_until
  from (
    select k as known, f.still, k.tick_seq = s.tick_seq as unforced, k.tick_time,
      row(q.queue_id, s.event_seq, s.tick_seq, k.tick_time, case when k.event_seq = s.event_seq then nullif(k.settled, false) else false end,
        f.still)::pgque.look as look,
      d.due, coalesce(not f.still and k.tick_seq = s.tick_seq and (not q.queue_restored or k.settled is null) and d.due > v_now and k.tick_time <= v_now, false) as early
    from pgque.queue q
    cross join lateral (
      select coalesce(pg_sequence_last_value(q.queue_event_seq), 0), coalesce(pg_sequence_last_value(q.queue_tick_seq), 0)
      offset 0) s (event_seq, tick_seq)
    left join unnest(p_known) k on k.queue_id = q.queue_id
    cross join lateral (select (k.settled and k.event_seq = s.event_seq) is true) f (still)   -- settled, and no message was sent since
    left join lateral (
      select k.tick_time + case when k.settled is null then '1 second' else greatest(q.queue_tick_gap, least(p_period, 0.004 * interval '1 second' * (
        select count(*) from (select from pgque.subscriber c where c.sub_queue = q.queue_id and c.sub_main is null limit ceil(extract(epoch from p_period) / 0.004)) c))) end
    ) d (due) on k.tick_time > v_now - greatest(p_period, q.queue_tick_gap, '1 second') and not f.still
    where q.queue_id = any (p_queues)
      and (f.still and k.tick_seq = s.tick_seq and not q.queue_restored and k.tick_time + q.queue_ticker_idle_period > v_now) is not true
  ) l;
  looks := coalesce(looks, '{}');
  if exists (select from unnest(looks) k where k.settled is null) then
    v_locked := array(
      select l.relation
      from pg_locks l
      where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.pid is distinct from pg_backend_pid()
        and l.database = (select d.oid from pg_database d where d.datname = current_database()));
    looks := array(
      select row(k.queue_id, k.event_seq, k.tick_seq, k.tick_time, coalesce(k.settled, q.queue_event_seq <> all (v_locked)), k.ticked)::pgque.look
      from unnest(looks) with ordinality k
      join pgque.queue q on q.queue_id = k.queue_id
      order by k.ordinality);
  end if;
exception
  when others then
    begin
      v_free := array(
        select q.queue_id
        from pgque.queue q
        where q.queue_id = any (p_queues) and not exists (
          select from pg_locks l
          where l.relation in (q.queue_event_seq, q.queue_tick_seq) and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
            and l.database = (select d.oid from pg_database d where d.datname = current_database())));
      if cardinality(v_free) < cardinality(p_queues) then
        select s.* into looks, early, early_until from pgque._queues_due(v_free, p_known, p_period) s;
        return;
      end if;
    exception
      when lock_not_available then
        null;   -- an upgrade has the table of queues: each queue is checked, and waits for it
    end;
    looks := array(select row(q, 0, 0, null, false, false)::pgque.look from unnest(p_queues) q);
    early := '{}';
    early_until := null;
end
$$;

-- Ticks one queue for a ticker that serves all of them, and returns what it knows of
-- the queue then.  It does not wait for another ticker, and only briefly for a locked
-- table.  A broken queue causes a warning, and its settled is null.  A check without a
-- tick keeps no locks but those of the two sequences.
create or replace function pgque._check_queue(p_look pgque.look) returns pgque.look
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '200ms' set jit = off as $$
declare
  v_queue  pgque.queue;
  v_tick   record;
begin
  p_look.ticked := false;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_look.queue_id;
  if not found or v_queue.queue_external_ticker or v_queue.queue_ticker_paused then
    p_look.settled := false;
    return p_look;
  elsif v_queue.queue_restored and pgque._lacks(v_queue) is not null then
    -- Without a warning a second for each queue: maint_tables() warns.
    p_look.settled := null;
    p_look.tick_time := pgque.clock();
    perform pgque._undo_block();
  end if;
  -- A loop that has just begun does not know the last tick.
  v_tick := pgque._tick_if_due(v_queue.queue_id, false, p_look.tick_time is null);
  p_look.settled := p_look.settled and v_tick.covered is true;
  p_look.tick_time := v_tick.last_time;
  p_look.ticked := v_tick.new_id is not null;
  p_look.tick_seq := coalesce(v_tick.new_id, p_look.tick_seq);   -- a tick sets the sequence
  -- Many ticks fill their table long before the rotation period has passed.
  perform pgque._maint_operation('pgque.maint_rotate_tables_step1', v_queue.queue_name) where v_tick.new_id % 1000 = 0;
  perform pgque._undo_block() where not p_look.ticked and not v_queue.queue_restored;
  return p_look;
exception
  when sqlstate 'PQ099' then
    return p_look;
  when invalid_transaction_state then
    raise;
  when others then
    begin
      if exists (select from pgque.queue q where q.queue_id = v_queue.queue_id) then
        raise warning 'pgque: no tick for queue %: % (%)', quote_ident(v_queue.queue_name), sqlerrm, sqlstate;
      end if;   -- else the queue was dropped meanwhile
    exception
      when lock_not_available then
        null;   -- an upgrade has the table of queues
    end;
    p_look.settled := null;
    p_look.tick_time := pgque.clock();
    return p_look;
end
$$;

create or replace function pgque.ticker(queue_name text, tick_id bigint, tick_time timestamptz, event_seq bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(ticker.queue_name, caller, 'admin');
  v_last   pgque.tick;
begin
  perform pgque._need_read_committed('a tick');
  if not v_queue.queue_external_ticker then
    perform pgque._fail('PQ005', format('queue %I has no external ticker', v_queue.queue_name),
      format('Switch it on first: select pgque.alter_queue(%L, ''{"external_ticker": true}'');', v_queue.queue_name));
  end if;
  perform pgque._rebase(v_queue.queue_id);
  perform pg_advisory_xact_lock(hashtext('pgque.tick'), v_queue.queue_id);
  v_queue := pgque._queue(ticker.queue_name, caller, 'admin');
  v_last := pgque._last_tick(v_queue);
  if (ticker.tick_id > v_last.tick_id and ticker.event_seq >= v_last.tick_event_seq and ticker.tick_time >= v_last.tick_time) is not true then
    perform pgque._fail('PQ005', format('tick %s of queue %I is not after tick %s', coalesce(ticker.tick_id::text, 'null'), v_queue.queue_name, v_last.tick_id),
      'Pass a higher tick id, and an event sequence and a time that are not lower.',
      format('The last tick has event sequence %s and time %s.', v_last.tick_event_seq, v_last.tick_time));
  elsif not isfinite(ticker.tick_time) or greatest(ticker.tick_id, ticker.event_seq) > 4611686018427387904 then
    perform pgque._fail('PQ005', format('tick %s of queue %I leaves no room for another', ticker.tick_id, v_queue.queue_name),
      'Pass an id and an event sequence of at most 2^62, and a finite time.');
  end if;
  perform pgque._note_once(v_queue.queue_id, 'external');
  return pgque._store_tick(v_queue, ticker.tick_id, ticker.tick_time, pgque._tick_snapshot(), ticker.event_seq, true);
end
$$;
comment on function pgque.ticker(text, bigint, timestamptz, bigint, pgque.caller) is
  'Stores a tick with the id, time and event sequence of another system, for a queue with external_ticker, and returns its id. Errors: PQ001 no '
  'such queue; PQ005 no external ticker, or a tick that does not follow the last one; 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';

-- The request is kept in a sequence, so it leaves no row behind.  The sequence is only
-- counted up here: this snapshot may be older than the newest tick, and a value below
-- that tick would hide it from every receive().
create or replace function pgque.force_next_tick(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(force_next_tick.queue_name, caller, 'admin');
  v_last   bigint := (pgque._last_tick(v_queue)).tick_id;
begin
  perform nextval(v_queue.queue_tick_seq);
  return v_last;
end
$$;
comment on function pgque.force_next_tick(text, pgque.caller) is
  'Makes the next ticker() tick the queue, even if nothing was sent. Returns the id of the queue''s newest tick. Errors: PQ001 no such queue.';
