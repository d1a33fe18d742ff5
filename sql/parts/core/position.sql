-- ---------------------------------------------------------------------------
-- position: where consumers stand
-- ---------------------------------------------------------------------------

-- Returns the newest row of a subscriber in one leaf.  Only this leaf is locked.  No
-- sequential scans: a plan made while the journal was short is kept while it grows.
create or replace function pgque._position_in(p_sub int, p_leaf int) returns pgque.position
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_position  pgque.position;
begin
  if p_leaf = 0 then
    select p.* into v_position from pgque.position_0 p where p.pos_sub = p_sub order by p.pos_seq desc limit 1;
  else
    select p.* into v_position from pgque.position_1 p where p.pos_sub = p_sub order by p.pos_seq desc limit 1;
  end if;
  return v_position;
end
$$;

-- Returns the newest row of a subscriber.  The current leaf is read first, and the
-- other one only if the current one has no row.  So the other leaf can be emptied while
-- consumers work.  A caller that will append holds the subscriber's row lock.
create or replace function pgque._position(p_sub int, p_leaf int default null) returns pgque.position
language plpgsql as $$
declare
  v_leaf      int := coalesce(p_leaf, pgque._journal_leaf());
  v_position  pgque.position;
begin
  -- Compaction may move the row from the second leaf to the first between the two
  -- reads.  Another read then finds it.
  for v_try in 1..10 loop
    v_position := pgque._position_in(p_sub, v_leaf);
    if v_position.pos_sub is null then
      v_position := pgque._position_in(p_sub, 1 - v_leaf);
    end if;
    if v_position.pos_sub is not null then
      return v_position;
    end if;
    v_leaf := pgque._journal_leaf();
  end loop;
  -- A snapshot that is older than a compaction sees the row in neither leaf.
  perform pgque._fail('serialization_failure', pg_catalog.format('the position of subscriber %s changed since this transaction began', p_sub),
    'Retry the transaction.');
end
$$;

-- Returns a position as a row of a leaf.
create or replace function pgque._in_leaf(p_position pgque.position, p_leaf int) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.leaf := p_leaf;
  return p_position;
end
$$;

-- Returns the leaf of the journal that is written.  A transaction with an old snapshot
-- locks the journal's row.  This keeps the journal from rotating, and fails with 40001
-- if it was rotated.  A read-only transaction needs no such lock.
create or replace function pgque._journal_leaf() returns int
language plpgsql as $$
declare
  v_leaf  int;
begin
  if not pgque._old_snapshot() or pg_catalog.current_setting('transaction_read_only') = 'on' then
    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1;
  else
    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1 for share;
  end if;
  return v_leaf;
end
$$;

-- Appends a position; the sequence number and the time are set here.  If the
-- transaction's snapshot does not show the newest row, the primary key stops it with
-- 40001.  So there is never a second newest row.  Such a transaction appends to both
-- leaves (see _leaves_for).  p_leaf is the current leaf, if the caller knows it.
create or replace function pgque._append_position(p_position pgque.position, p_leaf int default null) returns void
language plpgsql as $$
begin
  p_position.pos_seq := p_position.pos_seq + 1;
  p_position.pos_time := pgque.clock();
  p_position.leaf := coalesce(p_leaf, pgque._journal_leaf());
  insert into pgque.position select p_position.* on conflict do nothing;
  if found and pgque._old_snapshot() then
    p_position.leaf := 1 - p_position.leaf;
    insert into pgque.position select p_position.* on conflict do nothing;
  end if;
  if not found then
    perform pgque._fail('serialization_failure', pg_catalog.format('the position of subscriber %s changed since this transaction began', p_position.pos_sub),
      'Retry the transaction.');
  end if;
end
$$;

-- Copies a subscriber's newest row to a leaf, if it is not there.  The row is also the
-- record of the subscriber's batch: the lock of a pool's batch is taken too, so that an
-- ack that is not committed yet is not left behind.
create or replace function pgque._copy_position(p_position pgque.position, p_leaf int) returns void
language sql as $$
  insert into pgque.position
  select (pgque._in_leaf(p_position, p_leaf)).*
  from pgque.subscriber s
  where s.sub_id = p_position.pos_sub and (pgque._position_in(s.sub_id, p_leaf)).pos_sub is null
    and (p_position.pos_batch is null or pgque._try_lock_batches(s, array[p_position.pos_batch]) <> '{}')
  on conflict do nothing
$$;

-- Returns a batch id that was never issued before: the subscriber's low 20 bits under a
-- number that rises with the clock in quarters of a millisecond, and by at least one.
-- A counter alone is not enough: a crash, a failover or a restore can take back the
-- newest values of a counter, and an old batch id would then fit a new batch.
create or replace function pgque._new_batch_id(p_position pgque.position) returns bigint
language sql volatile as $$
  select (greatest(
      (p_position.pos_last_batch >> 20) + 1,
      ((extract(epoch from pg_catalog.clock_timestamp()) - 1735689600) * 4000)::bigint) << 20)
    | (p_position.pos_sub & 1048575)
$$;

-- Returns the position after a consumer's newest delivery.
create or replace function pgque._next_from(p_position pgque.position) returns pgque.position
language plpgsql immutable as $$
begin
  if p_position.pos_fresh > 0 then
    if p_position.pos_last_id is null then
      return pgque._past_window(p_position);
    end if;
    p_position.pos_done_id := p_position.pos_last_id;
    p_position.pos_last_id := null;
    p_position.pos_fresh := 0;
  end if;
  p_position.pos_batch := null;
  p_position.pos_shelf := 0;
  p_position.pos_keys := null;
  return p_position;
end
$$;

-- Returns from when on a delivery reads the retry queue.  Otherwise each query of the
-- messages that are due would pass the dead rows of all that were due before: while an old
-- transaction is open, vacuum cannot remove them.
--
-- The naive version remembers the time of the last query.  It loses messages:
--
--   session 1: nack, so that message 1 is due at 12:00:10; the transaction stays open
--   session 2: queries at 12:00:20 what is due, and finds nothing
--   session 1: commits
--   result:    message 1 is due before the last query, and no later query finds it
--
-- A query also misses a row if the clock is set back.  So a query begins a second before the one
-- before it, and after five seconds one query begins at the beginning again.  A message that
-- was committed more than a second after it was due waits for that query.
--
-- p_due begins where the next queries begin, and ends when one is to read everything.
create or replace function pgque._due_from(p_due tstzrange, p_now timestamptz) returns timestamptz
language sql immutable as $$ select case when p_due @> p_now then pg_catalog.lower(p_due) else '-infinity' end $$;

-- Returns p_due after a query at p_now, which found p_first as the first message that is
-- due; null: none.
create or replace function pgque._due_after(p_due tstzrange, p_now timestamptz, p_first timestamptz default null) returns tstzrange
language sql stable as $$
  select pg_catalog.tstzrange(least(p_first, p_now - interval '1 second'), case when p_due @> p_now then pg_catalog.upper(p_due) else p_now + interval '5 seconds' end)
$$;

-- Returns a position whose window ends at a tick.
create or replace function pgque._with_window(p_position pgque.position, p_tick pgque.tick) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.pos_next_tick := p_tick.tick_id;
  p_position.pos_next_snapshot := p_tick.tick_snapshot;
  p_position.pos_next_event_seq := p_tick.tick_event_seq;
  return p_position;
end
$$;

-- Returns a position at a tick, without a window and a batch of its own.
create or replace function pgque._at_tick(p_position pgque.position, p_tick pgque.tick) returns pgque.position
language sql immutable as $$ select pgque._past_window(pgque._with_window(p_position, p_tick)) $$;

-- Returns a position at the end of its window.
create or replace function pgque._past_window(p_position pgque.position) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.pos_tick := p_position.pos_next_tick;
  p_position.pos_snapshot := p_position.pos_next_snapshot;
  p_position.pos_event_seq := p_position.pos_next_event_seq;
  p_position.pos_next_tick := null;
  p_position.pos_next_snapshot := null;
  p_position.pos_next_event_seq := null;
  p_position.pos_done_id := null;
  p_position.pos_done_count := 0;
  p_position.pos_last_id := null;
  p_position.pos_batch := null;
  p_position.pos_fresh := 0;
  p_position.pos_shelf := 0;
  p_position.pos_keys := null;
  return p_position;
end
$$;

-- Opens the window that follows a position, up to the furthest of the next 100 ticks
-- before which no more than p_max events were numbered, and by at least one tick.  So a
-- consumer that lags by many small ticks gets full batches.  There is no window if
-- there is no further tick.
create or replace function pgque._open_window(p_position pgque.position, p_queue_id int, p_max bigint) returns pgque.position
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_name  text;
  v_tick  pgque.tick;
begin
  select q.queue_name into v_name from pgque.queue q where q.queue_id = p_queue_id;
  if not found then
    raise undefined_table;
  end if;
  execute 'select * from pgque._ticks_' || p_queue_id || '($1, $2, $3)' into v_tick using p_position.pos_tick, p_position.pos_event_seq, p_max;
  return case when v_tick.tick_id is null then p_position else pgque._with_window(p_position, v_tick) end;
exception
  when undefined_table or undefined_function then
    -- The queue was dropped meanwhile, or one of its tables or functions is missing.
    if pgque._old_snapshot() then
      perform pgque._fail('serialization_failure', 'the queue was dropped since this transaction began', 'Retry the transaction.');
    elsif not exists (select from pgque.queue q where q.queue_id = p_queue_id) then
      perform pgque._takes_nothing(p_queue_id);
    end if;
    perform pgque._fail(sqlstate, pg_catalog.format('queue %I: %s', v_name, sqlerrm),
      'If a function is missing, install this version of pgque again: it creates the functions of every queue.');
end
$$;
