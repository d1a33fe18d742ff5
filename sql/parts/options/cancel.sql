-- ---------------------------------------------------------------------------
-- cancel: a message that is no longer delivered
-- ---------------------------------------------------------------------------

-- A cancelled message of the retry queue is deleted, and one that a batch has gets its
-- outcome there.  The log is append only: there a row of owner -2 ends a message, as in
-- purge_key().  Its ev_key is '', which no message has, and its ev_retry is the subscriber
-- for whom the message ends; 0: for all, later ones too.  The row is appended to the current
-- table, so it is there as long as the message.
--
-- Deliveries search for such rows in one case only: a consumer that has the
-- message ahead of it is treated as if it had been moved back from a tick after the message
-- (pos_high).  Until it has passed that tick, its deliveries are not ordinary, and
-- _must_choose() makes them choose.
--
-- The rest of the engine handles cancelled messages in these places:
--   * _must_choose() and _choose(), which choose messages of the log.
--   * _add_subscriber(): a consumer may begin before a cancelled message.
--   * Everything that finds messages ahead of a consumer adds _not_cancelled_sql().

-- Appends the row that ends a message.  p_key: its key, or ''.
create or replace function pgque._append_end(p_queue_id int, p_id bigint, p_time timestamptz, p_key text, p_retry int) returns void
language sql as $$
  insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_key)
  select q.queue_id * 3 + q.queue_cur_table, -2, p_id, p_time, pg_catalog.pg_current_xact_id(), p_retry, p_key
  from pgque.queue q
  where q.queue_id = p_queue_id
  on conflict do nothing
$$;

-- Returns the condition that a row e was cancelled for a subscriber; null: for all.
create or replace function pgque._cancelled_sql(p_queue_id int, p_sub int) returns text
language sql immutable as $$
  select '(select true from (' || pg_catalog.string_agg(pg_catalog.format(
    'select from pgque.event_%s_%s c where c.ev_key = '''' and c.ev_id = e.ev_id and c.ev_retry in (0, %s)'
    ' and (c.ev_owner is null or c.ev_owner <= 0)', p_queue_id, n, coalesce(p_sub, 0)), ' union all ') || ') c limit 1)'
  from pg_catalog.generate_series(0, 2) n
$$;

-- Returns one more condition on e for a query of messages that are ahead of a position.
create or replace function pgque._not_cancelled_sql(p_queue_id int, p_pos pgque.position) returns text
language sql immutable as $$
  select case when p_pos.pos_tick < p_pos.pos_high then ' and ' || pgque._cancelled_sql(p_queue_id, p_pos.pos_sub) || ' is null' else '' end
$$;

-- Returns the batches of a consumer that may have a message.
create or replace function pgque._batches_with(p_sub int, p_id bigint) returns setof bigint
language sql as $$
  select h.token from pgque._open_batches(p_sub) h where p_id > coalesce((h.lease).pos_done_id, 0) and (p_id > (h.lease).pos_last_id) is not true
  union
  select r.ev_batch from pgque.retry_queue r where r.ev_owner + 0 = p_sub and r.ev_id = p_id and r.ev_batch is not null
$$;

-- Returns a tick id that is above those of all ticks that do not show what is committed
-- now.  A ticker that has taken its snapshot may store one more: this waits for it.  The
-- sequence has the newest tick, also for a snapshot that does not show it (see _store_tick).
--
--   session 1: a ticker takes its snapshot
--   session 2: sends message 5 and commits
--   session 3: cancels message 5, while tick 8 is the newest
--   result:    session 1 stores tick 9, which does not show message 5: a consumer that
--              stands there still has it ahead
create or replace function pgque._tick_after_now(p_queue_id int) returns bigint
language plpgsql as $$
begin
  begin
    -- cancel() holds all workers back meanwhile.
    perform pg_catalog.set_config('lock_timeout', '1min', true) where pg_catalog.current_setting('lock_timeout') = '0';
    perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.tick'), p_queue_id);
    perform pgque._undo_block();
  exception
    when sqlstate 'PQ099' then
      null;
    when lock_not_available then
      perform pgque._fail('lock_not_available', pg_catalog.format('an open transaction ticks queue %I', (
        select q.queue_name from pgque.queue q where q.queue_id = p_queue_id)), 'Try again after it commits, or end its session.');
  end;
  return (select pg_catalog.pg_sequence_last_value(q.queue_tick_seq) + 1 from pgque.queue q where q.queue_id = p_queue_id);
end
$$;

-- Takes a message from consumers that are locked with their batches, and ends it in the
-- log for p_one; null: for all.  Returns whether that changed anything.
create or replace function pgque._cancel(p_queue pgque.queue, p_subs pgque.subscriber[], p_one int, p_id bigint) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_had    int[];   -- the consumers that had it
  v_sub    pgque.subscriber;
  v_pos    pgque.position;
  v_event  pgque.event;
  v_until  bigint;
  v_ahead  boolean;
begin
  v_had := array(
    select s.sub_id
    from pg_catalog.unnest(p_subs) s
    cross join lateral pgque._batches_with(s.sub_id, p_id) b (token)
    cross join lateral pgque._set_outcomes(b.token, array[p_id], 'ack', null, null, true) o
    where o.ok);
  -- This waits for a pump that moves the message into the log.
  with gone as (
    delete from pgque.retry_queue r
    where r.ev_queue = p_queue.queue_id and r.ev_id = p_id and (p_one is null or r.ev_owner = p_one)
    returning r.ev_owner
  )
  select v_had || pg_catalog.array_agg(g.ev_owner) into v_had from gone g;
  v_until := pgque._tick_after_now(p_queue.queue_id);
  foreach v_sub in array p_subs loop
    v_pos := pgque._current_position(v_sub, pgque._position(v_sub.sub_id));
    execute pg_catalog.format('select exists (%s)',
      pgque._unfinished_sql(v_sub, pgque._next_from(v_pos), pg_catalog.pg_current_snapshot(), ' and e.ev_id = ' || p_id))
    into v_ahead;
    if v_ahead then
      v_had := v_had || v_sub.sub_id;
      v_pos.pos_high := greatest(v_pos.pos_high, v_until);
      perform pgque._append_position(v_pos);
    end if;
  end loop;
  perform pgque._count(p_queue.queue_id, h.id, 'cancelled', 1) from (select distinct pg_catalog.unnest(v_had)) h (id);
  v_event := pgque._event_in_log(p_queue, p_id);
  if v_event.ev_id is null then
    return pg_catalog.cardinality(v_had) > 0;
  end if;
  perform pgque._note_once(p_queue.queue_id, 'cancelled');
  -- The next message with its key is a new one.
  perform pgque._seal(p_queue.queue_id, array[v_event]);
  perform pgque._append_end(p_queue.queue_id, p_id, v_event.ev_time, '', coalesce(p_one, 0));
  return true;
end
$$;

-- Returns a message as it is in the log; null if it is not there, or this transaction sent
-- it.
create or replace function pgque._event_in_log(p_queue pgque.queue, p_id bigint) returns pgque.event
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_event  pgque.event;
begin
  execute pg_catalog.format('select e.* from (%s) e limit 1', pgque._rows_sql(p_queue.queue_id,
    'e.ev_id = $1 and (e.ev_owner is null or e.ev_owner > 0) and pg_catalog.pg_visible_in_snapshot(e.ev_txid, pg_catalog.pg_current_snapshot())',
    null, pgque._span_xids(p_queue, p_id - 1, p_id)))
  into v_event using p_id;
  return v_event;
end
$$;

create or replace function pgque.cancel(queue_name text, msg_id bigint, consumer_name text default null, caller pgque.caller default current_user) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue   pgque.queue := pgque._queue($1, caller, 'admin');
  v_one     int := case when $3 is not null then (pgque._subscriber(v_queue.queue_name, $3, caller)).sub_id end;
  v_keys    text[];
  v_states  text[];
  v_state   text;
begin
  perform pgque._need_read_committed('cancel()');
  perform pgque._no_message(v_queue, $2) where ($2 > 0) is not true;
  perform pgque._rebase(v_queue.queue_id);
  -- Undone, because it locks tables that are locked after the consumers.
  begin
    v_keys := array_remove((pgque._event_in_log(v_queue, $2)).ev_key || array(select m.key from pgque._messages(v_queue, $2, 100) m), null);
    perform pgque._undo_block();
  exception
    when sqlstate 'PQ099' then
      null;
  end;
  perform pgque._lock_keys(v_queue.queue_id, v_keys) where cardinality(v_keys) > 0;
  -- A consumer that subscribes waits for this lock, and rotation leaves the queue alone.
  perform from pgque.queue q where q.queue_id = v_queue.queue_id for no key update;
  perform pgque._lock_consumers(v_queue.queue_id);
  v_queue := pgque._queue(v_queue.queue_name, caller, 'admin');
  v_states := array(select m.status from pgque._messages(v_queue, $2, 100) m where $3 is null or m.consumer_name = $3 or m.status = 'delayed');
  if $3 is not null and 'delayed' = any (v_states) then
    perform pgque._fail('PQ005', format('message %s of queue %I is delayed: no consumer has it yet', $2, v_queue.queue_name),
      'Cancel it for all consumers, without consumer_name.');
  end if;
  v_state := coalesce(
    (select s.state
    from unnest('{processing,retry,pending,delayed,expired,failed,dead,archived}'::text[]) with ordinality s (state, n)
    where s.state = any (v_states)
    order by s.n
    limit 1),
    pgque._ended_state(v_queue, v_one, $2));
  if v_state is null then
    perform pgque._no_message(v_queue, $2);
  end if;
  if v_state <> 'cancelled' and pgque._cancel(v_queue, array(
    select s from pgque.subscriber s
    where s.sub_queue = v_queue.queue_id and s.sub_main is null and (v_one is null or s.sub_id = v_one)
    order by s.sub_id), v_one, $2)
  then
    perform pgque._record_action('cancel', v_queue.queue_name, jsonb_build_object('msg_id', $2, 'consumer_name', $3, 'state', v_state));
  end if;
  return v_state;
end
$$;
comment on function pgque.cancel(text, bigint, text, pgque.caller) is
  'Cancels a message for one consumer, or without consumer_name for every consumer, later ones included: it is no longer delivered. Returns the '
  'state in which the message was found: processing, retry, pending, delayed, expired, dead, failed or archived, as in list_messages() (with several '
  'consumers the first of these that applies), else cancelled (before), or done if no consumer has it. A delayed message is deleted, so that a '
  'second call does not find it. Dead letters and the archive stay. If a worker has the message, its lease ends: extend() counts one less, and the '
  'worker''s outcome for it has the reason cancelled. Readers that keep their own offsets, such as Spark, still see the message. Errors: PQ001 no '
  'such queue; PQ005 consumer_name is set and the message is delayed; PQ010 no such message; PQ011 not subscribed; 25000 not READ COMMITTED; 55P03 '
  'an open transaction holds a consumer or a batch of the queue, or ticks it, for a minute (lock_timeout, if it is set).';

-- Returns the state of a message that no consumer has; null if it is not in the log.
create or replace function pgque._ended_state(p_queue pgque.queue, p_sub int, p_id bigint) returns text
language plpgsql as $$
begin
  return case
    when pgque._is_cancelled(p_queue.queue_id, p_sub, p_id) then 'cancelled'
    when (pgque._event_in_log(p_queue, p_id)).ev_id is not null then 'done'
  end;
end
$$;

create or replace function pgque._is_cancelled(p_queue_id int, p_sub int, p_id bigint) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_found  boolean;
begin
  execute 'select ' || pgque._cancelled_sql(p_queue_id, p_sub) || ' from (select $1 as ev_id) e' into v_found using p_id;
  return v_found is true;
end
$$;
