-- ---------------------------------------------------------------------------
-- dead: dead letters
-- ---------------------------------------------------------------------------

-- A message nobody will be given again goes where its queue says.
create or replace function pgque._bury(p_queue pgque.queue, p_sub pgque.subscriber, p_item pgque.retry_queue, p_reason text) returns void
language plpgsql as $$
begin
  if p_queue.queue_drop_policy = 'drop' then
    perform pgque._tally(p_queue.queue_id, p_sub.sub_id, 'dropped', 1);
    return;
  elsif p_queue.queue_drop_policy = 'dead_letter' and p_queue.queue_dead_letter_queue is not null then
    begin
      perform pgque._send(
        (select q.queue_name from pgque.queue q where q.queue_id = p_queue.queue_dead_letter_queue), p_item.ev_type, p_item.ev_data,
        p_item.ev_extra1, p_item.ev_extra2, p_item.ev_extra3, p_item.ev_extra4,
        coalesce(p_item.ev_headers, '{}') || jsonb_build_object('pgque_dead', jsonb_build_object(
          'queue', p_queue.queue_name,
          'consumer', (select c.co_name from pgque.consumer c where c.co_id = p_sub.sub_consumer),
          'msg_id', p_item.ev_id, 'reason', p_reason, 'receive_count', p_item.ev_receives,
          'retry_count', coalesce(p_item.ev_retry, 0), 'dead_at', pgque.clock())),
        p_item.ev_bytes);
      return;
    exception
      when sqlstate 'PQ001' or sqlstate 'PQ003' or sqlstate 'PQ013' or undefined_table then
        -- It takes nothing now, or is just gone; the message is not to be lost.
        null;
    end;
  end if;
  perform pgque._add_dead_letter(p_item, p_sub.sub_consumer, p_reason, p_queue.queue_drop_policy = 'hold');
end
$$;

-- Puts a message among the dead letters of a consumer; false if it is there.
create or replace function pgque._add_dead_letter(p_item pgque.retry_queue, p_consumer int, p_reason text, p_held boolean) returns boolean
language plpgsql as $$
begin
  insert into pgque.dead_letter (dl_queue_id, dl_consumer_id, dl_time, dl_reason, dl_receives, dl_held, ev_error,
    ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)
  values (p_item.ev_queue, p_consumer, pgque.clock(), p_reason, p_item.ev_receives, p_held, coalesce(p_item.ev_error, p_reason),
    p_item.ev_id, p_item.ev_time, p_item.ev_txid, p_item.ev_retry, p_item.ev_type, p_item.ev_data,
    p_item.ev_extra1, p_item.ev_extra2, p_item.ev_extra3, p_item.ev_extra4,
    p_item.ev_headers, p_item.ev_key, p_item.ev_bytes, p_item.ev_expires)
  on conflict on constraint dead_letter_once do nothing;
  return found;
end
$$;

create or replace function pgque.dlq_inspect(
  queue_name text, limit_count int default 100, caller pgque.caller default current_user,
  out dl_id bigint, out dl_time timestamptz, out dl_reason text,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text, out consumer_name text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
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
comment on function pgque.dlq_inspect(text, int, pgque.caller) is
  'Returns the newest dead letters of a queue, at most limit_count, with consumer and reason. Errors: PQ001 no such queue.';

-- Takes a dead letter out of the table, or PQ008.  Two sessions can not take
-- the same one.
create or replace function pgque._exhume(p_dl_id bigint, p_caller name) returns pgque.dead_letter
language plpgsql as $$
declare
  v_dead  pgque.dead_letter;
begin
  delete from pgque.dead_letter d
  where d.dl_id = p_dl_id and pgque._may(p_caller, 'admin', d.dl_queue_id)
  returning d.* into v_dead;
  if not found then
    perform pgque._fail('PQ008', pg_catalog.format('not a dead letter: %s', coalesce(p_dl_id::text, 'null')),
      'It was replayed, requeued or purged already; select * from pgque.dlq_inspect(queue) lists what is there.');
  end if;
  return v_dead;
end
$$;

create or replace function pgque.dlq_replay(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_dead  pgque.dead_letter := pgque._exhume(dlq_replay.dl_id, caller);
begin
  return pgque._send(
    (select q.queue_name from pgque.queue q where q.queue_id = v_dead.dl_queue_id), v_dead.ev_type, v_dead.ev_data,
    v_dead.ev_extra1, v_dead.ev_extra2, v_dead.ev_extra3, v_dead.ev_extra4, v_dead.ev_headers, v_dead.ev_bytes);
end
$$;
comment on function pgque.dlq_replay(bigint, pgque.caller) is
  'Sends a dead letter as a new message to every consumer of its queue, deletes the dead letter, and returns the new id. Errors: PQ008 no such dead '
  'letter; PQ013 the queue is paused.';

create or replace function pgque.dlq_replay_all(queue_name text, caller pgque.caller default current_user, out replayed int, out failed int, out first_error text)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
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
comment on function pgque.dlq_replay_all(text, pgque.caller) is
  'Replays all dead letters of a queue. Returns replayed (how many were sent), failed (how many could not be sent, and stay) and first_error. Errors: '
  'PQ001 no such queue.';

create or replace function pgque.dlq_requeue(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_dead  pgque.dead_letter := pgque._exhume(dlq_requeue.dl_id, caller);
  v_sub   int;
begin
  select s.sub_id into v_sub
  from pgque.subscriber s
  where s.sub_queue = v_dead.dl_queue_id and s.sub_consumer = v_dead.dl_consumer_id and s.sub_main is null
  for key share;
  if not found then
    perform pgque._fail('PQ011', format('not subscriber to queue: the consumer of dead letter %s was unsubscribed', $1),
      'Subscribe it again, or send the message to every consumer with pgque.dlq_replay(dl_id).');
  end if;
  perform pgque._depth_grows(v_dead.dl_queue_id);
  insert into pgque.retry_queue as r (ev_retry_after, ev_queue, ev_owner, ev_error,
    ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires, ev_lane)
  select pgque.clock(), v_dead.dl_queue_id, s.sub_id, v_dead.ev_error,
    v_dead.ev_id, v_dead.ev_time, v_dead.ev_txid, v_dead.ev_type, v_dead.ev_data, v_dead.ev_extra1, v_dead.ev_extra2,
    v_dead.ev_extra3, v_dead.ev_extra4, v_dead.ev_headers, v_dead.ev_key, v_dead.ev_bytes,
    -- One that had expired is given another life.
    case when v_dead.ev_expires > pgque.clock() then v_dead.ev_expires end,
    pgque._lane(s, v_dead.ev_key, v_dead.ev_extra1)
  from pgque.subscriber s
  where s.sub_id = v_sub
  -- It may wait there already: its consumer was moved back and failed it again.
  on conflict on constraint retry_queue_pkey do update
  set ev_retry_after = case when r.ev_batch is not null and r.ev_retry_after > excluded.ev_retry_after then r.ev_retry_after else excluded.ev_retry_after end,
    ev_batch = case when r.ev_retry_after > excluded.ev_retry_after then r.ev_batch end, ev_retry = null,
    ev_receives = case when r.ev_batch is not null and r.ev_retry_after > excluded.ev_retry_after then 1 else 0 end;
  return v_dead.ev_id;
end
$$;
comment on function pgque.dlq_requeue(bigint, pgque.caller) is
  'Requeues a dead letter: the consumer that failed it receives the message again. Returns the message''s id, which stays. Its retries '
  'count from zero. A message that is older than retention_period gets one attempt. Errors: PQ008 no such dead letter; PQ011 that consumer was '
  'unsubscribed.';

create or replace function pgque.dlq_requeue_all(queue_name text, limit_count int default null, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
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
comment on function pgque.dlq_requeue_all(text, int, pgque.caller) is
  'Requeues the oldest dead letters of a queue, at most limit_count (NULL: all), and returns their number. Dead letters of unsubscribed consumers '
  'stay. Errors: PQ001 no such queue.';

-- A null would delete none without a word.
create or replace function pgque.dlq_purge(queue_name text, older_than interval default '30 days', caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_count  bigint;
begin
  if $2 is null then
    perform pgque._fail('PQ005', format('dlq_purge of queue %I needs an age', v_queue.queue_name),
      'Leave older_than out for 30 days; ''0'' deletes all of them.');
  end if;
  delete from pgque.dead_letter d
  where d.dl_queue_id = v_queue.queue_id and d.dl_time < pgque.clock() - $2 and not d.dl_held;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function pgque.dlq_purge(text, interval, pgque.caller) is
  'Deletes the dead letters of a queue that are older than older_than, counted from when they were given up, and returns their number. Held ones '
  '(drop_policy hold) stay. Errors: PQ001 no such queue; PQ005 older_than is NULL.';

create or replace function pgque.archive_poison(queue_name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_dead   pgque.dead_letter;
  v_sub    pgque.subscriber;
  v_count  int := 0;
begin
  for v_dead in
    select d.* from pgque.dead_letter d
    where d.dl_id in (select p.dl_id from pgque.list_poison(v_queue.queue_name, 100000) p where p.dl_id is not null)
    for update skip locked
  loop
    v_sub.sub_consumer := v_dead.dl_consumer_id;
    execute pgque._archive_sql(null, 'select d.*, d.dl_receives as ev_receives, null::text as ev_worker from pgque.dead_letter d where d.dl_id = $3', v_queue.queue_id)
    using v_sub, null::text, v_dead.dl_id, null, null, 'poison'::text;
    delete from pgque.dead_letter d where d.dl_id = v_dead.dl_id;
    v_count := v_count + 1;
  end loop;
  perform pgque._tally(v_queue.queue_id, 0, 'archived', v_count);
  return v_count;
end
$$;
comment on function pgque.archive_poison(text, pgque.caller) is
  'Moves the dead letters that list_poison() returns to the archive, with outcome poison. Returns their number.';
