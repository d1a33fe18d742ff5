-- ---------------------------------------------------------------------------
-- receive: deliveries
-- ---------------------------------------------------------------------------

create or replace function pgque.receive(
  queue_name text, consumer_name text, max_return int default 100, worker text default null,
  visibility_timeout interval default null, ack_batch bigint default null, max_bytes bigint default null,
  caller pgque.caller default current_user
) returns setof pgque.delivery
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set work_mem = '64MB' set jit = off as $$
declare
  v_turn    record;
  v_sub     pgque.subscriber;
  v_queue   pgque.queue;
  v_pos     pgque.position;
  v_token   bigint;
  v_room    bigint;
  v_sifted  record;
  v_rows    text;
  v_row     pgque.delivery;
  v_limit   bigint;
  v_last    bigint;
  v_count   bigint := 0;
  v_bytes   bigint := 0;
  v_passed  bigint := 0;   -- messages that may not be delivered now
  v_tried   boolean := false;
  v_leaf    int;
  v_poll    record;
  v_known   int;   -- the consumer, if a poll has found it
begin
  if $7 < 1 then
    perform pgque._fail('PQ005', format('max_bytes must be at least 1, for queue %s', coalesce(quote_ident($1), 'null')),
      'Pass the number of bytes that fit into your memory, such as 64000000, or null.');
  end if;
  if $6 is not null then
    perform pgque._ack(pgque._batch_for(caller, $6));
  end if;
  if $3 >= 1 and ($4 is null or octet_length($4) between 1 and 1000) and ($5 is null or $4 is not null and $5 > '0' and $5 <= '100 years')
    and pgque._may_be_ordinary() and current_setting('transaction_read_only') = 'off'
  then
    v_leaf := coalesce(pg_sequence_last_value('pgque.journal_leaf'), 0);
    if v_leaf = 0 then
      v_poll := pgque._poll_0($1, $2, $4, caller, $3);
    else
      v_poll := pgque._poll_1($1, $2, $4, caller, $3);
    end if;
    if v_poll.idle then
      return;
    elsif v_poll.locked and $3 <= 1000 then
      return query execute 'select * from pgque.' || case when v_poll.mapped then '_mapped_' else '_ordinary_' end || v_poll.queue || '_' || v_leaf || '($1, $2, $3, $4, $5, $6, $7, $8)'
      using v_poll.sub, $3::bigint, $7, $4, coalesce($5, v_poll.lease), v_poll.attempts, $1, v_poll.looked;
      if found then
        return;
      end if;
    end if;
    v_known := v_poll.sub;
  end if;
  v_turn := pgque._begin_delivery($1, $2, $3, $4, $5, caller, v_known);
  v_sub := v_turn.sub;
  if v_sub.sub_id is null then
    return;
  end if;
  v_queue := v_turn.queue;
  v_pos := v_turn.pos;
  v_room := v_turn.room;
  v_token := pgque._new_batch_id(v_pos);
  if v_turn.open is not null then
    return query select * from pgque._redeliver(v_sub, v_queue, v_turn.open);
    if found then
      return;
    end if;
    -- Every message of the batch has its outcome: it is finished.
    v_pos := pgque._finish_empty_batch(v_sub, v_pos, v_turn.open);
  end if;

  if v_turn.due and v_room > 0 then
    v_pos.pos_shelf := pgque._lease_retries(v_queue, v_sub, v_token, v_room, $4, v_turn.until, $7, lower(v_pos.pos_due));
    if v_pos.pos_shelf is null then
      v_pos.pos_shelf := 0;
      v_room := 0;
    elsif v_pos.pos_shelf > 0 then
      return query select * from pgque._retries_of_batch(v_sub.sub_id, v_token, v_queue.queue_name);
      v_pos := case when v_pos.pos_done_id is null then pgque._with_window(v_pos, null) else v_pos end;   -- the window was opened for nothing
    end if;
  end if;

  -- An empty answer means that no message can be delivered: the call passes any number of
  -- messages whose key is busy, and of purged and expired ones.  A statement_timeout, or a
  -- client that gives the call up, would take that back, and the next call could not get
  -- further: so half of the timeout is the limit, and 10 seconds.
  while v_pos.pos_shelf = 0 and v_count = 0 and v_room > 0 loop
    exit when v_tried and clock_timestamp() > statement_timestamp() + least(nullif(current_setting('statement_timeout')::interval, '0') / 2, '10 seconds');
    v_tried := true;
    if v_pos.pos_next_tick is null then
      v_pos := pgque._open_window(v_pos, v_queue.queue_id, pgque._span($3, case when v_sub.sub_role = 'pool' then $4 end));
      exit when v_pos.pos_next_tick is null;
    end if;
    v_pos.pos_last_id := null;
    if pgque._must_choose(v_sub, v_pos) then
      v_sifted := pgque._choose(v_queue, v_sub, v_pos, v_token, v_room, v_passed, $7);
      v_pos := v_sifted.pos;
      v_passed := v_passed + v_pos.pos_done_count;
      if v_sifted.rows is not null then
        return query execute v_sifted.rows using v_token, v_queue.queue_name, v_sifted.ids;
        get diagnostics v_count = row_count;
      end if;
    else
      if v_room <= 1000 and not pgque._is_big(v_pos, v_room) and (v_pos.pos_tick < v_pos.pos_high) is not true then
        -- A small window is read directly, by functions whose plans the session keeps.
        v_rows := 'select * from pgque._events_' || v_queue.queue_id || '($3, $4, $5, $6, $7, $1, 1, $2)';
      else
        v_rows := pgque._delivery_sql(pgque._slice_sql(v_sub, v_pos, '', v_room)) || ' limit $7';
      end if;
      -- A loop costs more for each row, but it finds out whether there is one message
      -- more than fits.
      v_limit := v_room + ($7 is not null or v_room <= 1000 and v_pos.pos_next_event_seq - v_pos.pos_event_seq >= v_room)::int;
      if v_limit > v_room then
        for v_row in
          execute v_rows
          using v_token, v_queue.queue_name, v_pos.pos_snapshot, v_pos.pos_next_snapshot, v_sub.sub_id, coalesce(v_pos.pos_done_id, 0), v_limit
        loop
          v_bytes := v_bytes + case when $7 is not null then pgque._size(v_row.payload, v_row.payload_bytes, v_row.headers) else 0 end;
          if v_count = v_room or v_bytes > $7 and v_count > 0 then
            v_pos.pos_last_id := v_last;
            exit;
          end if;
          v_count := v_count + 1;
          v_last := v_row.msg_id;
          return next v_row;
        end loop;
      else
        return query execute v_rows
        using v_token, v_queue.queue_name, v_pos.pos_snapshot, v_pos.pos_next_snapshot, v_sub.sub_id, coalesce(v_pos.pos_done_id, 0), v_limit;
        get diagnostics v_count = row_count;
        v_pos.pos_last_id := case when v_count = v_room then pgque._id_of_row(pgque._slice_sql(v_sub, v_pos, '', v_room), v_room) end;
      end if;
      v_pos.pos_done_count := v_count;
    end if;
    v_pos.pos_fresh := 1;
    if v_count = 0 then
      v_pos := pgque._next_from(v_pos);
    end if;
  end loop;
  perform pgque._store_delivery(v_sub, v_queue, v_pos, v_turn.leaf, v_count, v_token, $4, v_turn.until, v_turn.changed is true
    or (v_pos.pos_tick, v_pos.pos_done_id, v_pos.pos_open) is distinct from ((v_turn.pos).pos_tick, (v_turn.pos).pos_done_id, (v_turn.pos).pos_open));
end
$$;
comment on function pgque.receive(text, text, int, text, interval, bigint, bigint, pgque.caller) is
  'Delivers the consumer''s next messages as one batch: at most max_return, in the order of their ids; no rows if there are none. A batch holds '
  'redeliveries or new messages, and redeliveries go first. Without worker, the same batch is redelivered under its id until ack(batch_id), without '
  'the messages that were nacked. With worker (any name), the messages are leased to the worker for visibility_timeout (NULL: the queue''s setting, '
  '30 seconds). Each call of each worker gets other messages. When the lease expires, messages without an outcome are redelivered to the next worker '
  'that calls, with receive_count + 1; for them the batch ids of earlier deliveries are invalid from then on. The last attempt of a message is '
  'delivered alone: to a worker that holds no other message, and in a batch of one. ack_batch: a batch that is acknowledged first, in the same '
  'transaction. max_bytes: a new batch ends before its payloads and headers exceed this number of bytes, with at least one message. A delivery locks '
  'the consumer until the transaction ends. So receive in a transaction of its own, and do the work and the ack in another one; workers that '
  'receive, work and acknowledge in one transaction take turns. Errors: PQ001 no such queue; PQ004 invalid worker name; PQ005 max_return or '
  'max_bytes is below 1, visibility_timeout is not positive or above 100 years, or the consumer has workers and worker is NULL; PQ006 the consumer '
  'has received a batch without worker, and worker is set; PQ011 not subscribed; 25000 with worker in a transaction that is not READ COMMITTED.';

-- Returns how many bytes a message adds to a batch.
create or replace function pgque._size(p_data text, p_bytes bytea, p_headers jsonb) returns bigint
language sql stable as $$
  select coalesce(pg_catalog.octet_length(p_data), 0)::bigint + coalesce(pg_catalog.octet_length(p_bytes), 0) + coalesce(pg_catalog.pg_column_size(p_headers), 0)
$$;

-- Begins a delivery: returns if there is nothing to do (sub is null then), and locks the
-- consumer.
--   * pos: where the delivery begins, with its next window if that is known
--   * open: an open batch, which is redelivered
--   * due: whether messages may be due in the retry queue
--   * room: how many messages it may deliver
--   * until: when the lease ends
--   * changed: whether pos must be stored in any case
--
-- p_sub: the consumer, if a poll has found it and that there may be something to do.
create or replace function pgque._begin_delivery(
  p_queue text, p_consumer text, p_max bigint, p_worker text, p_timeout interval, p_caller name, p_sub int,
  out sub pgque.subscriber, out queue pgque.queue, out pos pgque.position, out leaf int, out open bigint, out due boolean,
  out room bigint, out until timestamptz, out changed boolean
)
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now    timestamptz;
  v_found  record;
begin
  if p_sub is not null then
    select s.* into sub from pgque.subscriber s
    where s.sub_id = p_sub and s.sub_role = case when p_worker is null then 'normal' else 'pool' end
    for no key update;
  end if;
  while sub.sub_id is null loop
    perform pgque._need_max_return(p_max, p_queue);
    sub := pgque._subscriber(p_queue, p_consumer, p_caller);
    if (sub.sub_role = 'normal' and p_worker is null or sub.sub_role = 'pool' and p_worker <> '' and pg_catalog.octet_length(p_worker) <= 1000) is not true
      or p_timeout is not null and (p_worker is null or p_timeout <= '0' or p_timeout > '100 years') or pgque._old_snapshot()
    then
      sub := pgque._refuse_or_share(sub, p_max, p_worker, p_timeout, p_queue, p_consumer);
    end if;
    -- A poll that finds nothing takes no lock, writes nothing and needs no
    -- transaction id.
    if pgque._is_idle(sub, p_max, p_worker) then
      sub := null;
      return;
    end if;
    -- The consumer may become a pool, or get other settings, after this call began.
    select s.* into sub from pgque.subscriber s where s.sub_id = sub.sub_id and s.sub_role = sub.sub_role for no key update;
  end loop;
  v_now := pgque.clock();
  leaf := pgque._journal_leaf();
  pos := pgque._position(sub.sub_id, leaf);
  open := pgque._open_batch_of(sub, pos, p_worker, leaf);
  select q as queue, (
      select r.ev_retry_after
      from pgque.retry_queue r
      where r.ev_owner = sub.sub_id and r.ev_retry_after >= pgque._due_from(pos.pos_due, v_now) and r.ev_retry_after <= v_now
      order by r.ev_retry_after
      limit 1) as due,
    sub.sub_role = 'pool' and exists (
      select from pgque.retry_queue r
      where r.ev_owner = sub.sub_id and r.ev_worker = p_worker and r.ev_batch is not null and r.ev_receives > coalesce(r.ev_retry, 0) + 1
        and r.ev_receives >= q.queue_max_receive_attempts and r.ev_retry_after + '0' > v_now) as alone   -- its last attempt (see _may_be_poison); + '0' keeps the planner from all that wait
  into v_found from pgque.queue q where q.queue_id = sub.sub_queue;
  queue := v_found.queue;
  due := v_found.due is not null;
  pos.pos_due := pgque._due_after(pos.pos_due, v_now, v_found.due);
  if sub.sub_role = 'coop_main' then
    perform pgque._touch(pgque._worker(sub, p_worker));
  end if;
  room := case when v_found.alone then 0 else p_max end;
  until := case when sub.sub_role = 'pool' then v_now + coalesce(p_timeout, queue.queue_visibility_timeout) else 'infinity' end;
  if open is not null then
    return;
  end if;
  pos := pgque._next_from(pos);
  changed := (v_now >= pos.pos_lapse or pg_catalog.cardinality(pos.pos_open) >= pos.pos_prune) is true;
  if changed then
    pos := pgque._collect_expired(sub, pos, v_now);
    due := true;
  end if;
  if queue.queue_throughput_limit > 0 and sub.sub_role = 'pool' then
    pos.pos_paid := pgque._limit_unused_since(pos.pos_paid, v_now);
    room := least(room, pg_catalog.floor(extract(epoch from v_now - pos.pos_paid) * queue.queue_throughput_limit + 0.000001)::bigint);
  end if;
end
$$;

-- Returns whether a consumer has nothing to receive, by what this call's snapshot shows.
create or replace function pgque._is_idle(p_sub pgque.subscriber, p_max bigint, p_worker text) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_pos  pgque.position := pgque._position(p_sub.sub_id);
  v_now  timestamptz := pgque.clock();
begin
  if pgque._open_batch_of(p_sub, v_pos, p_worker, pgque._journal_leaf()) is not null then
    return false;
  end if;
  v_pos := pgque._next_from(v_pos);
  if v_pos.pos_next_tick is not null or v_now >= v_pos.pos_lapse
    or exists (
      select from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_retry_after >= pgque._due_from(v_pos.pos_due, v_now) and r.ev_retry_after <= v_now)
  then
    return false;
  end if;
  -- The sequence has the newest tick (see _store_tick), so that most polls read no table of
  -- ticks.  An old snapshot may not show this tick.
  return exists (
      select from pgque.queue q
      where q.queue_id = p_sub.sub_queue and pg_catalog.pg_sequence_last_value(q.queue_tick_seq) <= v_pos.pos_tick)
    or pgque._old_snapshot() and (pgque._open_window(v_pos, p_sub.sub_queue, p_max)).pos_next_tick is null;
end
$$;

create or replace function pgque._need_max_return(p_max bigint, p_queue text) returns void
language plpgsql as $$
begin
  if (p_max >= 1) is not true then
    perform pgque._fail('PQ005', pg_catalog.format('max_return must be at least 1, for queue %s', coalesce(pg_catalog.quote_ident(p_queue), 'null')),
      'Pass the highest number of messages to return, such as 100.');
  end if;
end
$$;

-- Handles a call that does not fit the consumer's role or its arguments.  It raises an
-- error, or turns a consumer that was never used into a pool.
create or replace function pgque._refuse_or_share(
  p_sub pgque.subscriber, p_max bigint, p_worker text, p_timeout interval, p_queue text, p_consumer text
) returns pgque.subscriber
language plpgsql as $$
begin
  perform pgque._need_max_return(p_max, p_queue);
  if p_sub.sub_role = 'coop_main' and p_worker is not null then
    perform pgque._worker(p_sub, p_worker);
  elsif p_worker is null then
    perform pgque._need_alone(p_sub, p_queue, p_consumer);
  else
    perform pgque._need_read_committed('receive() for a worker');
    if p_worker = '' or pg_catalog.octet_length(p_worker) > 1000 then
      perform pgque._fail('PQ004', pg_catalog.format('invalid worker name for queue %I', p_queue),
        'A worker name has 1 to 1000 bytes; any character is allowed.');
    elsif p_timeout <= '0' or p_timeout > '100 years' then
      perform pgque._fail('PQ005', pg_catalog.format('visibility_timeout must be positive and at most 100 years, for queue %I', p_queue),
        'Pass the time until others may get the messages of the worker, such as ''5 minutes''.');
    end if;
    -- A consumer that has received a batch on its own stays as it is: the process that
    -- reads it could not continue.
    if pgque._lock_subscriber(p_sub.sub_id) = 'normal' and (pgque._position(p_sub.sub_id)).pos_last_batch > 0 then
      perform pgque._fail('PQ006', pg_catalog.format('consumer %s of queue %I reads on its own', pgque._subscriber_name(p_sub), p_queue),
        pg_catalog.format('Subscribe another consumer for the workers. Or stop its reader and turn it into a pool of workers: select pgque.share_consumer(%L, %L);',
          p_queue, pgque._subscriber_name(p_sub)));
    end if;
    update pgque.subscriber s set sub_role = 'pool' where s.sub_id = p_sub.sub_id and s.sub_role = 'normal';
    return (select s from pgque.subscriber s where s.sub_id = p_sub.sub_id);
  end if;
  if p_timeout is not null then
    perform pgque._fail('PQ005', pg_catalog.format('visibility_timeout is for workers, not for consumer %I of queue %I', p_consumer, p_queue),
      'Pass worker => name too. A consumer without workers keeps its batch until it finishes it.');
  end if;
  return p_sub;
end
$$;

-- Delivers an open batch again, without the messages that have an outcome.  All other
-- messages are delivered, whatever max_return is now, since ack() finishes the whole
-- batch.
create or replace function pgque._redeliver(p_sub pgque.subscriber, p_queue pgque.queue, p_batch bigint) returns setof pgque.delivery
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_state  record;
begin
  select s.* into v_state from pgque._states(p_sub.sub_id, array[p_batch]) s;
  if v_state.place = 'log' then
    return query execute pgque._delivery_sql(pgque._renewed_sql(p_sub.sub_queue, pgque._unsettled_sql(p_sub, v_state.lease))) using p_batch, p_queue.queue_name;
  else
    return query select * from pgque._retries_of_batch(p_sub.sub_id, p_batch, p_queue.queue_name);
  end if;
end
$$;

-- Finishes a batch with no message left, and returns the position.
create or replace function pgque._finish_empty_batch(p_sub pgque.subscriber, p_pos pgque.position, p_batch bigint) returns pgque.position
language plpgsql as $$
begin
  perform pgque._record(p_batch, 'closed');
  p_pos := pgque._next_from(p_pos);
  p_pos.pos_open := pg_catalog.array_remove(p_pos.pos_open, p_batch);
  return p_pos;
end
$$;

-- Returns the query of an open batch, as columns of pgque.event: its messages from the
-- log that have no outcome, or those in the retry queue under its id.
create or replace function pgque._batch_sql(p_sub pgque.subscriber, p_batch bigint) returns text
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_state  record;
begin
  select s.* into v_state from pgque._states(p_sub.sub_id, array[p_batch]) s;
  if v_state.place = 'log' then
    return pgque._renewed_sql(p_sub.sub_queue, pgque._unsettled_sql(p_sub, v_state.lease));
  end if;
  return pg_catalog.format(
    'select null::int as slot, null::int as ev_owner, r.ev_id, r.ev_time, r.ev_txid, r.ev_retry, r.ev_type, r.ev_data, r.ev_extra1, r.ev_extra2, r.ev_extra3,'
    ' r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes, r.ev_expires, r.ev_error from pgque.retry_queue r where r.ev_owner = %s and r.ev_batch = %s',
    p_sub.sub_id, p_batch);
end
$$;

-- Returns a query for rows of pgque.event as they are delivered, in the batch $1 of the
-- queue named $2.
create or replace function pgque._delivery_sql(p_rows text, p_where text default '') returns text
language sql immutable as $$
  select 'select e.ev_id, $1, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,'
    ' e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,'
    ' coalesce(e.ev_retry, 0) + 1, e.ev_error, e.ev_expires, $2 from (' || p_rows || ') e' || p_where || ' order by e.ev_id'
$$;

-- Returns the id of the p_n-th row of a slice, if there are more than that.  Counting
-- first costs a third of sorting for nothing.
create or replace function pgque._id_of_row(p_rows text, p_n bigint) returns bigint
language plpgsql as $$
declare
  v_more  boolean;
  v_id    bigint;
begin
  execute pg_catalog.format('select count(*) > %s from (select from (%s) e limit %s) e', p_n, p_rows, p_n + 1) into v_more;
  if v_more then
    execute pg_catalog.format('select e.ev_id from (%s) e order by e.ev_id offset %s limit 1', p_rows, p_n - 1) into v_id;
  end if;
  return v_id;
end
$$;

-- Stores a delivery of p_count messages from the log, or the position up to which there
-- was nothing to deliver.
create or replace function pgque._store_delivery(
  p_sub pgque.subscriber, p_queue pgque.queue, p_pos pgque.position, p_leaf int, p_count bigint, p_token bigint, p_worker text, p_until timestamptz, p_changed boolean
) returns void
language plpgsql as $$
begin
  if p_count + p_pos.pos_shelf = 0 then
    if not p_changed then
      return;
    end if;
    p_pos.pos_batch := null;
    p_pos.pos_fresh := 0;
    if p_sub.sub_role = 'normal' then
      p_pos.pos_open := '{}';
    end if;
  else
    p_pos.pos_batch := p_token;
    p_pos.pos_last_batch := p_token;
    p_pos.pos_worker := p_worker;
    p_pos.pos_until := p_until;
    p_pos.pos_fresh := (p_count > 0)::int;
    p_pos.pos_prune := coalesce(p_pos.pos_prune, 64);
    if p_sub.sub_role = 'normal' then
      p_pos.pos_open := array[p_token];
    elsif p_count > 0 or p_sub.sub_role = 'coop_main' then
      p_pos.pos_open := coalesce(p_pos.pos_open, '{}') || p_token;
      p_pos.pos_lapse := least(p_pos.pos_lapse, p_pos.pos_until);
    end if;
    if p_queue.queue_throughput_limit > 0 then
      p_pos.pos_paid := p_pos.pos_paid + (p_count + p_pos.pos_shelf) * interval '1 second' / p_queue.queue_throughput_limit;
    end if;
    if p_sub.sub_offsets then
      update pgque.subscriber s set sub_offsets = false where s.sub_id = p_sub.sub_id;
    end if;
  end if;
  perform pgque._append_position(p_pos, p_leaf);
end
$$;

-- Returns the messages of a batch that are in the retry queue.
create or replace function pgque._retries_of_batch(p_sub int, p_batch bigint, p_queue text) returns setof pgque.delivery
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return query
    select r.ev_id, p_batch, r.ev_type, r.ev_data, coalesce(r.ev_retry, 0), r.ev_time,
      r.ev_extra1, r.ev_extra2, r.ev_extra3, r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes,
      r.ev_receives, r.ev_error, r.ev_expires, p_queue
    from pgque.retry_queue r
    where r.ev_owner = p_sub and r.ev_batch = p_batch
    order by r.ev_id;
end
$$;
