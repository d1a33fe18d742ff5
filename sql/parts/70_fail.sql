-- ---------------------------------------------------------------------------
-- fail: nack, retry, dead letters
-- ---------------------------------------------------------------------------

-- Settles messages of an open batch as failed: each goes to the retry queue of
-- its consumer, or, when p_limited and its retries are used up, to the dead
-- letters.  p_ids null means all that are not settled.  The rows are read
-- again from the log, so nothing a client says but the ids is believed, and
-- the primary key of the settled messages lets each one fail once.
create or replace function pgque._fail(p_batch bigint, p_ids bigint[], p_after interval, p_reason text, p_limited boolean)
returns setof pgque.outcome
language plpgsql as $$
declare
  v_batch  pgque.position_0 := pgque._lock_batch(p_batch);
  v_sub    pgque.subscriber;
  v_limit  int;
  v_leaf   int;
  v_and    text := '';
  v_rows   pgque.event[];
  v_new    bigint[];
begin
  if v_batch.pos_sub is null then
    perform pgque._no_batch(p_batch);
  end if;
  select s.* into v_sub from pgque.subscriber s where s.sub_id = v_batch.pos_sub;
  if p_limited then
    select q.queue_max_retries into v_limit from pgque.queue q where q.queue_id = v_sub.sub_queue;
  end if;
  if pg_catalog.cardinality(p_ids) = 1 then
    v_and := ' and e.ev_id = ' || coalesce(p_ids[1]::text, 'null');
  elsif p_ids is not null then
    v_and := pg_catalog.format(' and e.ev_id = any (%L::bigint[])', p_ids);
  end if;
  execute pg_catalog.format('select array_agg(row(e.*)::pgque.event) from (select e.* from (%s) e limit %L) e',
    pgque._batch_sql(v_sub, v_batch, v_and), pg_catalog.cardinality(p_ids)) into v_rows;

  v_leaf := pgque._carry_over(v_batch);
  if v_leaf = 0 then
    with new as (
      insert into pgque.settled_0 (set_batch, set_ev_id, set_sub)
      select p_batch, r.ev_id, v_batch.pos_sub from pg_catalog.unnest(v_rows) r
      on conflict do nothing
      returning set_ev_id
    )
    select pg_catalog.array_agg(n.set_ev_id) into v_new from new n;
  else
    with new as (
      insert into pgque.settled_1 (set_batch, set_ev_id, set_sub)
      select p_batch, r.ev_id, v_batch.pos_sub from pg_catalog.unnest(v_rows) r
      on conflict do nothing
      returning set_ev_id
    )
    select pg_catalog.array_agg(n.set_ev_id) into v_new from new n;
  end if;

  if v_new is not null then
    -- The batch is another one now: an old snapshot must not use what it shows.
    perform pgque._append_position(v_batch, v_leaf);
    insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_retry, ev_error,
      ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)
    select pgque.clock() + p_after, v_sub.sub_queue, coalesce(v_sub.sub_main, v_sub.sub_id), coalesce(r.ev_retry, 0) + 1, p_reason,
      r.ev_id, r.ev_time, r.ev_txid, r.ev_type, r.ev_data, r.ev_extra1, r.ev_extra2, r.ev_extra3, r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes, r.ev_expires
    from pg_catalog.unnest(v_rows) r
    where r.ev_id = any (v_new) and (v_limit is null or coalesce(r.ev_retry, 0) < v_limit)
    on conflict do nothing;

    if v_limit is not null then
      perform pgque._add_dead_letter(v_sub.sub_queue, v_sub.sub_consumer, coalesce(p_reason, 'retries used up'), r)
      from pg_catalog.unnest(v_rows) r
      where r.ev_id = any (v_new) and coalesce(r.ev_retry, 0) >= v_limit;
    end if;
  end if;

  if p_ids is null then
    return query select n, true, null::text from pg_catalog.unnest(v_new) n;
  else
    return query
      select i.id, i.id = any (v_new) is true,
        case
          when i.id = any (v_new) then null
          when exists (select from pg_catalog.unnest(v_rows) r where r.ev_id = i.id) then 'settled already'
          else 'not in this batch'
        end
      from pg_catalog.unnest(p_ids) i (id);
  end if;
end
$$;

-- Puts one event among the dead letters of a consumer; false if it is there.
create or replace function pgque._add_dead_letter(p_queue_id int, p_consumer int, p_reason text, p_event pgque.event) returns boolean
language plpgsql as $$
begin
  insert into pgque.dead_letter (dl_queue_id, dl_consumer_id, dl_time, dl_reason, ev_error,
    ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)
  values (p_queue_id, p_consumer, pgque.clock(), p_reason, p_reason,
    p_event.ev_id, p_event.ev_time, p_event.ev_txid, p_event.ev_retry, p_event.ev_type, p_event.ev_data,
    p_event.ev_extra1, p_event.ev_extra2, p_event.ev_extra3, p_event.ev_extra4,
    p_event.ev_headers, p_event.ev_key, p_event.ev_bytes, p_event.ev_expires)
  on conflict on constraint dead_letter_once do nothing;
  return found;
end
$$;

-- A retry delay; negative ones are refused.
create or replace function pgque._retry_after(p_after interval, p_batch bigint) returns interval
language plpgsql immutable as $$
begin
  if p_after is null or p_after < '0' then
    raise exception using
      errcode = 'PQ005',
      message = pg_catalog.format('retry_after must not be negative, for batch %s', p_batch),
      hint = 'It is the time to wait before the message is delivered again.';
  end if;
  return p_after;
end
$$;

-- Fails one message of an open batch: it comes again after retry_after, or, if
-- its retries are used up, it becomes a dead letter.  The rest of the batch is
-- not touched; ack() finishes it.
create or replace function pgque._nack(p_batch bigint, p_msg_id bigint, p_after interval, p_reason text) returns int
language plpgsql as $$
declare
  v_outcome  record;
begin
  select f.* into v_outcome
  from pgque._fail(p_batch, array[p_msg_id], pgque._retry_after(p_after, p_batch), p_reason, true) f;
  if v_outcome.reason = 'not in this batch' then
    raise exception using
      errcode = 'PQ007',
      message = pg_catalog.format('message %s is not in batch %s', coalesce(p_msg_id::text, 'null'), p_batch),
      hint = 'Pass a message of this batch, as receive() returned it.';
  end if;
  return 1;
end
$$;

create or replace function pgque.nack(batch_id bigint, msg pgque.message, retry_after interval default '60 seconds', reason text default null) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return pgque._nack($1, ($2).msg_id, $3, $4);
end
$$;

create or replace function pgque.nack(batch_id bigint, msg pgque.delivery, retry_after interval default '60 seconds', reason text default null) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return pgque._nack($1, ($2).msg_id, $3, $4);
end
$$;

-- The same for many messages, set-based; one row each with its outcome.
create or replace function pgque.nack(batch_id bigint, msg_ids bigint[], retry_after interval default '60 seconds', reason text default null)
returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return query select f.* from pgque._fail($1, coalesce($2, '{}'), pgque._retry_after($3, $1), $4, true) f;
end
$$;

-- PgQ's way to fail an event: no limit on the number of retries.  1, or 0 if
-- that was done already.
create or replace function pgque.event_retry(batch_id bigint, event_id bigint, retry_time timestamptz) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_outcome  record;
begin
  select f.* into v_outcome
  from pgque._fail($1, array[$2], greatest($3 - pgque.clock(), '0'), null, false) f;
  if v_outcome.reason = 'not in this batch' then
    raise exception using
      errcode = 'PQ007',
      message = format('event %s is not in batch %s', coalesce($2::text, 'null'), $1),
      hint = 'Pass an event of this batch, as get_batch_events() returned it.';
  end if;
  return v_outcome.ok::int;
end
$$;

create or replace function pgque.event_retry(batch_id bigint, event_id bigint, retry_seconds int) returns int
language sql as $$ select pgque.event_retry($1, $2, pgque.clock() + make_interval(secs => $3)) $$;

-- Fails every event of a batch that has no outcome yet; returns their number.
create or replace function pgque.batch_retry(batch_id bigint, retry_seconds int) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return (
    select count(*)
    from pgque._fail($1, null, pgque._retry_after(make_interval(secs => $2), $1), null, false));
end
$$;

-- Puts what is due back into the log, for its consumer alone.  At most 10,000
-- of each queue a call, in one statement; returns their number.  A queue that
-- is broken is reported and left alone.
create or replace function pgque.maint_retry_events() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '1s' as $$
declare
  v_queue_id  int;
  v_count     int := 0;
begin
  for v_queue_id in select distinct r.ev_queue from pgque.retry_queue r where r.ev_retry_after <= pgque.clock() loop
    begin
      v_count := v_count + pgque._retry_queue(v_queue_id);
    exception
      when others then
        raise warning 'pgque: no retries for queue %: % (%)', v_queue_id, sqlerrm, sqlstate;
    end;
  end loop;
  return v_count;
end
$$;

create or replace function pgque._retry_queue(p_queue_id int) returns int
language plpgsql as $$
declare
  v_txid   xid8 := pg_catalog.pg_current_xact_id();
  v_count  int;
begin
  perform pgque._rebase(p_queue_id);
  with due as (
    delete from pgque.retry_queue r
    using (
      select d.ev_owner, d.ev_id
      from pgque.retry_queue d
      where d.ev_queue = p_queue_id and d.ev_retry_after <= pgque.clock()
      order by d.ev_retry_after
      limit 10000
      for update skip locked
    ) d
    where r.ev_owner = d.ev_owner and r.ev_id = d.ev_id
    returning r.*
  )
  insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data,
    ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires, ev_error)
  select q.queue_id * 3 + q.queue_cur_table, d.ev_owner, d.ev_id, d.ev_time, v_txid, d.ev_retry, d.ev_type, d.ev_data,
    d.ev_extra1, d.ev_extra2, d.ev_extra3, d.ev_extra4, d.ev_headers, d.ev_key, d.ev_bytes, d.ev_expires, d.ev_error
  from due d
  join pgque.queue q on q.queue_id = d.ev_queue
  join pgque.subscriber s on s.sub_id = d.ev_owner;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

-- The newest dead letters of a queue.
create or replace function pgque.dlq_inspect(
  queue_name text, limit_count int default 100,
  out dl_id bigint, out dl_time timestamptz, out dl_reason text,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text, out consumer_name text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1);
begin
  return query
    select d.dl_id, d.dl_time, d.dl_reason, d.ev_id, d.ev_time, d.ev_txid, d.ev_retry, d.ev_type, d.ev_data,
      d.ev_extra1, d.ev_extra2, d.ev_extra3, d.ev_extra4, c.co_name
    from pgque.dead_letter d
    join pgque.consumer c on c.co_id = d.dl_consumer_id
    where d.dl_queue_id = v_queue.queue_id
    order by d.dl_id desc
    limit case when $2 < 0 then 0 else $2 end;
end
$$;

-- Takes a dead letter out of the table, or PQ008.  Two sessions can not take
-- the same one.
create or replace function pgque._exhume(p_dl_id bigint) returns pgque.dead_letter
language plpgsql as $$
declare
  v_dead  pgque.dead_letter;
begin
  delete from pgque.dead_letter d where d.dl_id = p_dl_id returning d.* into v_dead;
  if not found then
    raise exception using
      errcode = 'PQ008',
      message = pg_catalog.format('not a dead letter: %s', coalesce(p_dl_id::text, 'null')),
      hint = 'It was replayed, requeued or purged already; select * from pgque.dlq_inspect(queue) lists what is there.';
  end if;
  return v_dead;
end
$$;

-- Sends a dead letter again as a new event, for every consumer; returns the
-- new id.
create or replace function pgque.dlq_replay(dl_id bigint) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_dead  pgque.dead_letter := pgque._exhume(dlq_replay.dl_id);
begin
  return pgque._send(
    (select q.queue_name from pgque.queue q where q.queue_id = v_dead.dl_queue_id), v_dead.ev_type, v_dead.ev_data,
    v_dead.ev_extra1, v_dead.ev_extra2, v_dead.ev_extra3, v_dead.ev_extra4, v_dead.ev_headers, v_dead.ev_bytes);
end
$$;

-- Sends all dead letters of a queue again; one that can not be sent stays.
create or replace function pgque.dlq_replay_all(queue_name text, out replayed int, out failed int, out first_error text)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1);
  v_id     bigint;
begin
  replayed := 0;
  failed := 0;
  for v_id in select d.dl_id from pgque.dead_letter d where d.dl_queue_id = v_queue.queue_id order by d.dl_id loop
    begin
      perform pgque.dlq_replay(v_id);
      replayed := replayed + 1;
    exception
      when others then
        failed := failed + 1;
        first_error := coalesce(first_error, sqlerrm);
    end;
  end loop;
end
$$;

-- Gives a dead letter back to the consumer that failed it, with its id and
-- with a clean count of retries; returns the id.
create or replace function pgque.dlq_requeue(dl_id bigint) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_dead  pgque.dead_letter := pgque._exhume(dlq_requeue.dl_id);
  v_sub   int;
begin
  select s.sub_id into v_sub
  from pgque.subscriber s
  where s.sub_queue = v_dead.dl_queue_id and s.sub_consumer = v_dead.dl_consumer_id and s.sub_main is null
  for key share;
  if not found then
    raise exception using
      errcode = 'PQ011',
      message = format('not subscriber to queue: the consumer of dead letter %s was unsubscribed', $1),
      hint = 'Subscribe it again, or send the message to every consumer with pgque.dlq_replay(dl_id).';
  end if;
  insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_error,
    ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)
  values (pgque.clock(), v_dead.dl_queue_id, v_sub, v_dead.ev_error,
    v_dead.ev_id, v_dead.ev_time, v_dead.ev_txid, v_dead.ev_type, v_dead.ev_data, v_dead.ev_extra1, v_dead.ev_extra2,
    v_dead.ev_extra3, v_dead.ev_extra4, v_dead.ev_headers, v_dead.ev_key, v_dead.ev_bytes, v_dead.ev_expires)
  -- It may wait there already: its consumer was moved back and failed it again.
  on conflict on constraint retry_queue_pkey do update
  set ev_retry_after = excluded.ev_retry_after, ev_retry = null;
  return v_dead.ev_id;
end
$$;

-- Requeues the oldest dead letters of a queue whose consumers are still there.
create or replace function pgque.dlq_requeue_all(queue_name text, limit_count int default null) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1);
begin
  return (
    select count(pgque.dlq_requeue(x.dl_id))
    from (
      select d.dl_id
      from pgque.dead_letter d
      where d.dl_queue_id = v_queue.queue_id
        and exists (
          select from pgque.subscriber s
          where s.sub_queue = d.dl_queue_id and s.sub_consumer = d.dl_consumer_id and s.sub_main is null)
      order by d.dl_id
      limit case when $2 < 0 then 0 else $2 end
      for update of d skip locked
    ) x);
end
$$;

-- Deletes dead letters of a queue that are older than an interval.
create or replace function pgque.dlq_purge(queue_name text, older_than interval default '30 days') returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1);
  v_count  bigint;
begin
  delete from pgque.dead_letter d
  where d.dl_queue_id = v_queue.queue_id and d.dl_time < pgque.clock() - $2;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
