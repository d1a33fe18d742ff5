-- ---------------------------------------------------------------------------
-- subscribe: consumers of a queue
-- ---------------------------------------------------------------------------

-- Returns the row of a consumer by name.  The server inlines it.  OFFSET 0 fixes the
-- order of the joins, so that the name is looked up first: without statistics the
-- planner would read all subscribers of the queue.
create or replace function pgque._subscriber_by_name(p_queue_id int, p_consumer text) returns setof pgque.subscriber
language sql stable as $$
  select s.*
  from (select c.co_id from pgque.consumer c where c.co_queue in (0, p_queue_id) and c.co_name = p_consumer collate pg_catalog."default" offset 0) c
  cross join lateral (select s.* from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_consumer = c.co_id and s.sub_main is null offset 0) s
$$;

-- Returns the subscriber for a queue and a consumer, without a lock.  Raises PQ001 or
-- PQ011 if there is none.
create or replace function pgque._subscriber(p_queue text, p_consumer text, p_caller name default current_user) returns pgque.subscriber
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_found  record;
  v_queue  pgque.queue;
begin
  select s as sub, q.queue_restored into v_found
  from pgque.queue q
  cross join lateral pgque._subscriber_by_name(q.queue_id, p_consumer) s
  where q.queue_name = p_queue collate pg_catalog."default"
    and (p_caller = current_user collate pg_catalog."C" or pg_catalog.pg_has_role(p_caller, 'pgque_reader', 'usage') or pgque._may(p_caller, 'consume', q.queue_id));
  if not found then
    -- p_queue is a queue_uid, or the queue has got this name since that query began.  The
    -- next query finds the queue by its id, because the queue may have another name by then.
    v_queue := pgque._queue(p_queue, p_caller, 'consume');
    select s as sub, v_queue.queue_restored into v_found from pgque._subscriber_by_name(v_queue.queue_id, p_consumer) s;
    if not found then
      perform pgque._fail('PQ011', pg_catalog.format('not subscriber to queue: %s/%s', pg_catalog.quote_ident(p_queue), coalesce(pg_catalog.quote_ident(p_consumer), 'null')),
        'Subscribe it first: select pgque.subscribe(queue, consumer);');
    end if;
  end if;
  if v_found.queue_restored then
    perform pgque._need_loaded(q) from pgque.queue q where q.queue_id = (v_found.sub).sub_queue;
  end if;
  return v_found.sub;
end
$$;

-- Locks a subscriber against its own other calls and returns its role.  A transaction
-- with an old snapshot that does not show a change since fails with 40001.
create or replace function pgque._lock_subscriber(p_sub int) returns text
language plpgsql as $$
declare
  v_role  text;
begin
  select s.sub_role into v_role from pgque.subscriber s where s.sub_id = p_sub for no key update;
  if not found then
    perform pgque._fail('PQ011', 'not subscriber to queue: the consumer was unsubscribed while this call waited', 'Subscribe the consumer again.');
  end if;
  return v_role;
end
$$;

-- Locks a subscriber as _lock_subscriber() does, and returns its position.
create or replace function pgque._lock_position(p_sub int) returns pgque.position
language plpgsql as $$
begin
  perform pgque._lock_subscriber(p_sub);
  return pgque._position(p_sub);
end
$$;

-- Returns the tick for start_at: latest, earliest, a tick id, or a time (the last tick
-- before it).
create or replace function pgque._find_tick(p_queue pgque.queue, p_start_at text) returns pgque.tick
language plpgsql as $$
declare
  v_tick   pgque.tick;
  v_ticks  text := pgque._ticks_sql(p_queue.queue_id);
begin
  if p_start_at is null then
    null;
  elsif p_start_at = 'latest' then
    v_tick := pgque._last_tick(p_queue);
  elsif p_start_at = 'earliest' then
    execute pg_catalog.format('select t.* from (%s) t order by t.tick_id limit 1', v_ticks) into v_tick;
  elsif p_start_at ~ '^[0-9]{1,19}$' then
    v_tick := pgque._tick(p_queue.queue_id, p_start_at::bigint);
  else
    execute pg_catalog.format('select t.* from (%s) t order by t.tick_time > $1, abs(extract(epoch from t.tick_time - $1)), t.tick_id desc limit 1', v_ticks)
    into v_tick using p_start_at::timestamptz;
  end if;
  if v_tick.tick_id is not null then
    return v_tick;
  end if;
  perform pgque._no_queue(p_queue.queue_name) where not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id);   -- it was dropped meanwhile
  perform pgque._fail('PQ005', pg_catalog.format('queue %I has no tick %s', p_queue.queue_name, coalesce(p_start_at, 'null')),
    'Start at latest, earliest, the id of a stored tick, or a timestamp.');
exception
  when data_exception then
    perform pgque._fail('PQ005', pg_catalog.format('cannot start at %L on queue %I', p_start_at, p_queue.queue_name),
      'Start at latest, earliest, the id of a stored tick, or a timestamp.');
end
$$;

-- Adds a subscriber row with its first position.  The low 20 bits of its id are unique.
-- After 2^31 numbers the sequence begins again: a number whose earlier subscriber left
-- positions or retries is skipped.
create or replace function pgque._add_subscriber(
  p_queue_id int, p_consumer int, p_role text, p_main int, p_worker text, p_tick pgque.tick, p_caller name
) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_seq       regclass := pg_catalog.pg_get_serial_sequence('pgque.subscriber', 'sub_id');
  v_position  pgque.position;
  v_id        int;
begin
  perform pgque._need_queue(p_queue_id);
  perform pgque._need_place(p_queue_id, p_caller);
  for v_try in 0..2097152 loop
    v_id := pg_catalog.nextval(v_seq);
    if not exists (select from pgque.subscriber s where (s.sub_id & 1048575) = (v_id & 1048575))
      and not exists (select from pgque.position p where p.pos_sub = v_id)
      and not exists (select from pgque.retry_queue r where r.ev_owner = v_id)
    then
      insert into pgque.subscriber (sub_id, sub_queue, sub_consumer, sub_role, sub_main, sub_worker, sub_archived)
      values (v_id, p_queue_id, p_consumer, p_role, p_main, p_worker,
        p_main is null and (select q.queue_archive_on_ack from pgque.queue q where q.queue_id = p_queue_id))
      on conflict ((sub_id & 1048575)) do nothing
      returning sub_id into v_position.pos_sub;
      exit when found;
    end if;
    if v_try % 65536 = 0 and (select pg_catalog.count(*) from pgque.subscriber) >= 1048576 then
      exit;
    end if;
  end loop;
  if v_position.pos_sub is null then
    perform pgque._fail('program_limit_exceeded', 'all 1048576 numbers of subscribers are taken',
      'Unsubscribe consumers and subconsumers that are not in use: select queue_name, consumer_name, last_seen from pgque.get_consumer_info() order by last_seen desc;');
  end if;
  v_position.pos_seq := 0;
  v_position.pos_last_batch := 0;
  v_position.pos_skipped := 0;
  if pgque._noted(p_queue_id, '{cancelled}') or pgque._old_snapshot() then
    v_position.pos_high := pgque._tick_after_now(p_queue_id);   -- see "cancel"
  end if;
  perform pgque._append_position(pgque._at_tick(v_position, p_tick));
  return v_position.pos_sub;
end
$$;

-- Limits a role that has a right to this queue only to the queue's max_consumers: PQ003
-- if there are that many.  These roles subscribe to a queue one after the other, in a
-- transaction whose snapshot shows all consumers.
create or replace function pgque._need_place(p_queue_id int, p_caller name) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue;
  v_count  bigint;
begin
  if pgque._may(p_caller, 'consume', null) then
    return;
  end if;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  if v_queue.queue_max_consumers = 0 then
    return;
  end if;
  perform pgque._need_read_committed('a new consumer of a role with a right to one queue');
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.subscribe'), p_queue_id);
  select pg_catalog.count(*) into v_count
  from (select from pgque.subscriber s where s.sub_queue = p_queue_id limit v_queue.queue_max_consumers) s;
  if v_count >= v_queue.queue_max_consumers then
    perform pgque._fail('PQ003', pg_catalog.format('queue %I has max_consumers consumers', v_queue.queue_name),
      pg_catalog.format('Unsubscribe consumers that are not in use. Or a member of pgque_admin raises the limit: select pgque.alter_queue(%L, ''{"max_consumers": %s}'');',
        v_queue.queue_name, 2 * v_queue.queue_max_consumers::bigint),
      pg_catalog.format('max_consumers is %s; subconsumers count too.', v_queue.queue_max_consumers));
  end if;
end
$$;

create or replace function pgque.subscribe(
  queue_name text, consumer_name text, start_at text default 'latest', keyed_order boolean default false, key_concurrency int default null,
  caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_new    int := pgque._subscribe($1, $2, 'normal', $3, caller);
  v_limit  int := pgque._need_key_concurrency($1, $2, $5, $4);
begin
  if v_limit is not null then
    perform pgque._subscribe_keyed($1, $2, v_new = 1, v_limit, caller);
  end if;
  perform pgque._record_action('subscribe', $1, jsonb_build_object('consumer_name', $2, 'start_at', $3, 'key_concurrency', v_limit)) where v_new = 1;
  return v_new;
end
$$;
comment on function pgque.subscribe(text, text, text, boolean, int, pgque.caller) is
  'Subscribes a consumer to a queue and returns 1. Returns 0 if the consumer was subscribed already; its position stays. start_at: latest (messages '
  'after the newest tick), earliest (all that are still stored), the id of a tick, or a timestamp (the last tick before it, else earliest). '
  'keyed_order: workers get the messages of one key (partition_key for messages without key) one at a time, in order. key_concurrency: workers get '
  'at most this many messages of one key at a time; 1 is keyed_order. Errors: PQ001 no such queue; PQ003 the role has a right to this queue only, '
  'and the queue has max_consumers consumers; PQ004 the name is empty or longer than 1000 bytes; PQ005 no such start_at, or key_concurrency is below '
  '1, or above 1 with keyed_order; PQ006 the consumer is subscribed with another key_concurrency; 25000 the role has a right to this '
  'queue only, and the transaction is not READ COMMITTED.';

create or replace function pgque._subscribe(p_queue text, p_consumer text, p_role text, p_start_at text, p_caller name) returns int
language plpgsql as $$
declare
  v_queue  pgque.queue;
  v_co     int;
begin
  v_queue := pgque._queue(p_queue, p_caller, 'consume');
  v_co := pgque._consumer(p_consumer, v_queue.queue_id);
  if exists (select from pgque.subscriber s where s.sub_queue = v_queue.queue_id and s.sub_consumer = v_co and s.sub_main is null) then
    return 0;
  end if;
  perform pgque._wait_for_keyed_sends(v_queue);
  -- The lock keeps rotation from emptying the table of this tick.
  select q.* into v_queue from pgque.queue q where q.queue_id = v_queue.queue_id for share;
  if not found then
    perform pgque._no_queue(p_queue);
  end if;
  perform pgque._rebase(v_queue.queue_id);
  perform pgque._depth_grows(v_queue.queue_id);
  perform pgque._add_subscriber(v_queue.queue_id, v_co, p_role, null, null, pgque._find_tick(v_queue, p_start_at), p_caller);
  return 1;
exception
  when unique_violation then
    return 0;
end
$$;

-- Returns the id of the name of a queue's consumer, and stores the name if it is new.
create or replace function pgque._consumer(p_consumer text, p_queue_id int) returns int
language plpgsql as $$
declare
  v_id  int;
begin
  if coalesce(p_consumer, '') = '' or pg_catalog.octet_length(p_consumer) > 1000 then
    perform pgque._fail('PQ004', pg_catalog.format('invalid consumer name for queue %I', (select q.queue_name from pgque.queue q where q.queue_id = p_queue_id)),
      'A consumer name has 1 to 1000 bytes; any character is allowed.');
  end if;
  for v_try in 1..2 loop
    select c.co_id into v_id
    from pgque.consumer c
    where c.co_queue in (0, p_queue_id) and c.co_name = p_consumer collate pg_catalog."default"
    order by c.co_queue
    limit 1;
    exit when found;
    insert into pgque.consumer (co_name, co_queue) values (p_consumer, p_queue_id) on conflict (co_queue, co_name) do nothing;
  end loop;
  return v_id;
end
$$;

-- Moves a consumer to a tick.  One on its own drops its open batch; workers keep theirs.
-- The archive lacks the messages that the consumer is moved past.
create or replace function pgque._move_to(p_sub pgque.subscriber, p_position pgque.position, p_tick pgque.tick) returns void
language plpgsql as $$
begin
  if p_sub.sub_role = 'normal' then
    perform pgque._drop_batch(p_sub, o.token) from pg_catalog.unnest(p_position.pos_open) o (token);
    p_position.pos_open := '{}';
  end if;
  update pgque.subscriber s set sub_archived = s.sub_archived and p_tick.tick_id <= p_position.pos_tick, sub_history = null
  where s.sub_id = p_sub.sub_id and (s.sub_archived and p_tick.tick_id > p_position.pos_tick or s.sub_history is not null);
  p_position.pos_high := greatest(p_position.pos_high, p_position.pos_tick, p_position.pos_next_tick);
  perform pgque._append_position(pgque._at_tick(p_position, p_tick));
end
$$;

-- Takes a batch from its worker.  Its messages from the log are passed, and those from
-- the retry queue are released.
create or replace function pgque._drop_batch(p_sub pgque.subscriber, p_batch bigint) returns void
language plpgsql as $$
begin
  perform pgque._record(p_batch, 'closed');
  perform pgque._release_batch(p_sub, p_batch);
end
$$;

-- Deletes the positions of former consumers once the last consumer is unsubscribed: in a
-- dump, positions without consumers show that the consumers are not loaded yet (_lacks).
create or replace function pgque._delete_positions() returns void
language sql as $$
  delete from pgque.position where not exists (select from pgque.subscriber)
$$;

create or replace function pgque.unsubscribe(queue_name text, consumer_name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(unsubscribe.queue_name, caller, 'consume');
  v_main   int;
  v_count  int;
  v_rows   int;
begin
  select s.sub_id into v_main
  from pgque.subscriber s
  join pgque.consumer c on c.co_id = s.sub_consumer
  where s.sub_queue = v_queue.queue_id and c.co_name = unsubscribe.consumer_name collate "default" and s.sub_main is null
  for update of s;
  if not found then
    return 0;
  end if;
  delete from pgque.subscriber s where s.sub_main = v_main;
  get diagnostics v_count = row_count;
  -- Maintenance deletes rows that this snapshot does not show.
  delete from pgque.retry_queue r where r.ev_owner = v_main;
  delete from pgque.subscriber s where s.sub_id = v_main;
  get diagnostics v_rows = row_count;
  perform pgque._delete_positions();
  perform pgque._record_action('unsubscribe', v_queue.queue_name, jsonb_build_object('consumer_name', unsubscribe.consumer_name)) where v_rows > 0;
  return v_count + v_rows;
end
$$;
comment on function pgque.unsubscribe(text, text, pgque.caller) is
  'Removes a consumer from a queue with its workers and its pending retries; its dead letters stay. Returns the number of subscribers removed, 0 if '
  'the consumer was not subscribed. Errors: PQ001 no such queue.';

-- Returns a consumer's name; for a worker consumer.worker.
create or replace function pgque._subscriber_name(p_sub pgque.subscriber) returns text
language plpgsql stable as $$
begin
  return (select c.co_name || coalesce('.' || p_sub.sub_worker, '') from pgque.consumer c where c.co_id = p_sub.sub_consumer);
end
$$;
