-- ---------------------------------------------------------------------------
-- consume: subscribe, receive, ack
-- ---------------------------------------------------------------------------

-- The subscriber for a queue and a consumer, or a worker of it, without a
-- lock; PQ001 or PQ011 if there is none.
create or replace function pgque._subscriber(p_queue text, p_consumer text, p_caller name default current_user) returns pgque.subscriber
language plpgsql as $$
declare
  v_sub  pgque.subscriber;
begin
  select s.* into v_sub
  from pgque.queue q
  join pgque.consumer c on c.co_queue in (0, q.queue_id) and c.co_name = p_consumer collate pg_catalog."default"
  join pgque.subscriber s on s.sub_queue = q.queue_id and s.sub_consumer = c.co_id and s.sub_main is null
  where q.queue_name = p_queue collate pg_catalog."default"
    and (p_caller = current_user collate pg_catalog."C" or pg_catalog.pg_has_role(p_caller, 'pgque_reader', 'usage') or pgque._may(p_caller, 'consume', q.queue_id));
  if not found then
    if (pgque._queue(p_queue, p_caller, 'consume')).queue_name <> p_queue collate pg_catalog."default" then
      return pgque._subscriber((pgque._queue(p_queue)).queue_name, p_consumer);
    end if;
    perform pgque._fail('PQ011', pg_catalog.format('not subscriber to queue: %s/%s', pg_catalog.quote_ident(p_queue), coalesce(pg_catalog.quote_ident(p_consumer), 'null')),
      'select pgque.subscribe(queue, consumer) makes it one.');
  end if;
  return v_sub;
end
$$;

-- Locks a subscriber against its own other calls and returns its role; an old
-- snapshot that does not know of a change since fails with 40001.
create or replace function pgque._lock_subscriber(p_sub int) returns text
language plpgsql as $$
declare
  v_role  text;
begin
  select s.sub_role into v_role from pgque.subscriber s where s.sub_id = p_sub for no key update;
  if not found then
    perform pgque._fail('PQ011', 'not subscriber to queue any more', 'It was unsubscribed while this call waited.');
  end if;
  return v_role;
end
$$;

-- The same, and returns its position.
create or replace function pgque._lock_position(p_sub int) returns pgque.position
language plpgsql as $$
begin
  perform pgque._lock_subscriber(p_sub);
  return pgque._position(p_sub);
end
$$;

-- The tick that start_at means: latest, earliest, a tick id, or a time (the
-- last tick before it).
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
  perform pgque._fail('PQ005', pg_catalog.format('queue %I has no tick %s', p_queue.queue_name, coalesce(p_start_at, 'null')),
    'Start at latest, earliest, the id of a tick that is still there, or a timestamp.');
exception
  when data_exception then
    perform pgque._fail('PQ005', pg_catalog.format('can not start at %L on queue %I', p_start_at, p_queue.queue_name),
      'Start at latest, earliest, the id of a tick that is still there, or a timestamp.');
end
$$;

-- Adds a subscriber row with its first position; the low 20 bits of its id are
-- taken once only.  After 2^31 numbers the sequence begins again: a number whose
-- earlier subscriber left positions or retries is passed over.
create or replace function pgque._add_subscriber(
  p_queue_id int, p_consumer int, p_role text, p_main int, p_worker text, p_tick pgque.tick, p_caller name
) returns int
language plpgsql set enable_seqscan = off as $$
declare
  v_seq       regclass := pg_catalog.pg_get_serial_sequence('pgque.subscriber', 'sub_id');
  v_position  pgque.position;
  v_id        int;
begin
  perform pgque._need_place(p_queue_id, p_caller);
  for v_try in 0..2097152 loop
    v_id := pg_catalog.nextval(v_seq);
    if not exists (select from pgque.subscriber s where (s.sub_id & 1048575) = (v_id & 1048575))
      and not exists (select from pgque.position p where p.pos_sub = v_id)
      and not exists (select from pgque.retry_queue r where r.ev_owner = v_id)
    then
      insert into pgque.subscriber (sub_id, sub_queue, sub_consumer, sub_role, sub_main, sub_worker)
      values (v_id, p_queue_id, p_consumer, p_role, p_main, p_worker)
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
      'Unsubscribe consumers and subconsumers that nobody uses: select queue_name, consumer_name, last_seen from pgque.get_consumer_info() order by last_seen desc;');
  end if;
  v_position.pos_main := p_main;
  v_position.pos_seq := 0;
  v_position.pos_last_batch := 0;
  v_position.pos_skipped := 0;
  perform pgque._append_position(pgque._at_tick(v_position, p_tick));
  return v_position.pos_sub;
end
$$;

-- Keeps a role that has a right to this queue only within the queue's
-- max_consumers; PQ003 if that many are there.  Such roles subscribe to a queue
-- one after the other, and in a transaction whose snapshot shows them all.
create or replace function pgque._need_place(p_queue_id int, p_caller name) returns void
language plpgsql set enable_seqscan = off as $$
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
    perform pgque._fail('PQ003', pg_catalog.format('queue %I has as many consumers as it may have', v_queue.queue_name),
      pg_catalog.format('Unsubscribe consumers that nobody uses. Or let an administrator of all queues raise the limit: select pgque.set_queue_config(%L, ''max_consumers'', ''%s'');',
        v_queue.queue_name, 2 * v_queue.queue_max_consumers::bigint),
      pg_catalog.format('max_consumers is %s; subconsumers count too.', v_queue.queue_max_consumers));
  end if;
end
$$;

create or replace function pgque.subscribe(queue_name text, consumer_name text, start_at text default 'latest', keyed_order boolean default false, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_new  int := pgque._subscribe($1, $2, 'normal', $3, caller);
  v_sub  pgque.subscriber;
begin
  if $4 is true then
    v_sub := pgque._subscriber($1, $2, caller);
    if v_new = 0 and not v_sub.sub_keyed then
      perform pgque._fail('PQ006', format('consumer %I of queue %I is subscribed without keyed order', $2, $1),
        'Unsubscribe it first, or subscribe another consumer.');
    elsif v_new = 1 then
      update pgque.subscriber s set sub_keyed = true, sub_role = 'pool' where s.sub_id = v_sub.sub_id;
    end if;
  end if;
  return v_new;
end
$$;
comment on function pgque.subscribe(text, text, text, boolean, pgque.caller) is
  'Subscribes a consumer to a queue and returns 1. Returns 0 if it was subscribed already; its position stays. start_at: latest (messages after the '
  'newest tick), earliest (all that are still stored), the id of a tick, or a timestamp. keyed_order: messages of one partition_key or key are '
  'delivered to workers one at a time, in order. Errors: PQ001 no such queue; PQ003 the role has a right to this queue only, and the queue has '
  'max_consumers consumers; PQ004 a name that has not 1 to 1000 bytes; PQ005 no such start_at.';

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
  perform pgque._let_keys_be_said(v_queue);
  -- The lock keeps rotation from emptying the tick that is about to be used.
  select q.* into v_queue from pgque.queue q where q.queue_id = v_queue.queue_id for share;
  if not found then
    perform pgque._no_queue(p_queue);
  end if;
  perform pgque._rebase(v_queue.queue_id);
  perform pgque._add_subscriber(v_queue.queue_id, v_co, p_role, null, null, pgque._find_tick(v_queue, p_start_at), p_caller);
  return 1;
exception
  when unique_violation then
    return 0;
end
$$;

-- The id of the name of a queue's consumer, made known if it is new.
create or replace function pgque._consumer(p_consumer text, p_queue_id int) returns int
language plpgsql as $$
declare
  v_id  int;
begin
  if coalesce(p_consumer, '') = '' or pg_catalog.octet_length(p_consumer) > 1000 then
    perform pgque._fail('PQ004', 'invalid consumer name', 'A consumer name has 1 to 1000 bytes; any character is allowed.');
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

create or replace function pgque.register_consumer(queue_name text, consumer_name text) returns int
language sql as $$ select pgque.subscribe($1, $2, 'latest', false) $$;
comment on function pgque.register_consumer(text, text) is 'PgQ''s name for subscribe(queue_name, consumer_name).';

create or replace function pgque.register_consumer_at(queue_name text, consumer_name text, tick_id bigint, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue     pgque.queue;
  v_sub       pgque.subscriber;
  v_position  pgque.position;
begin
  if register_consumer_at.tick_id is null then
    return pgque.subscribe(register_consumer_at.queue_name, register_consumer_at.consumer_name, 'latest', false, caller);
  end if;
  if pgque.subscribe(register_consumer_at.queue_name, register_consumer_at.consumer_name, register_consumer_at.tick_id::text, false, caller) = 1 then
    return 1;
  end if;
  v_queue := pgque._queue(register_consumer_at.queue_name, caller, 'consume');
  v_sub := pgque._subscriber(v_queue.queue_name, register_consumer_at.consumer_name, caller);
  -- The numbers in a pool's journal follow the clock, so no primary key stops an old snapshot.
  perform pgque._need_read_committed('register_consumer_at() for a pool of workers') where v_sub.sub_role = 'pool';
  -- As in seek().
  perform pgque._let_keys_be_said(v_queue) where register_consumer_at.tick_id > (pgque._position(v_sub.sub_id)).pos_tick;
  perform from pgque.queue q where q.queue_id = v_queue.queue_id for share;
  v_position := pgque._lock_position(v_sub.sub_id);
  v_position.pos_high := greatest(v_position.pos_high, v_position.pos_tick, v_position.pos_next_tick);
  perform pgque._append_position(pgque._at_tick(v_position, pgque._find_tick(v_queue, register_consumer_at.tick_id::text)));
  return 0;
end
$$;
comment on function pgque.register_consumer_at(text, text, bigint, pgque.caller) is
  'Subscribes a consumer at a tick and returns 1. A consumer that is subscribed already is moved to that tick, its open batch is dropped, and 0 is '
  'returned. tick_id NULL: the newest tick; a subscribed consumer is not moved. Errors: PQ001 no such queue; PQ005 the tick is gone.';

create or replace function pgque.unsubscribe(queue_name text, consumer_name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
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
  -- What an old snapshot does not see maintenance finds.
  delete from pgque.retry_queue r where r.ev_owner = v_main;
  delete from pgque.subscriber s where s.sub_id = v_main;
  get diagnostics v_rows = row_count;
  return v_count + v_rows;
end
$$;
comment on function pgque.unsubscribe(text, text, pgque.caller) is
  'Removes a consumer from a queue with its workers and its pending retries; its dead letters stay. Returns the number of subscribers removed, 0 if '
  'it was not subscribed. Errors: PQ001 no such queue.';

create or replace function pgque.unregister_consumer(queue_name text, consumer_name text) returns int
language sql as $$ select pgque.unsubscribe($1, $2) $$;
comment on function pgque.unregister_consumer(text, text) is 'PgQ''s name for unsubscribe().';

-- Opens the window that follows a position: up to the furthest of the next 100
-- ticks before which no more than p_max events were numbered, so that a
-- consumer which lags behind many small ticks gets full batches; at least one
-- tick.  No window if there is no further tick.
create or replace function pgque._open_window(p_position pgque.position, p_queue_id int, p_max bigint) returns pgque.position
language plpgsql set enable_seqscan = off as $$
declare
  v_reader  text;
  v_tick    pgque.tick;
begin
  select q.queue_reader into v_reader from pgque.queue q where q.queue_id = p_queue_id;
  if not found then
    raise undefined_table;
  elsif v_reader = pgque.version() then
    execute 'select * from pgque._ticks_' || p_queue_id || '($1, $2, $3)' into v_tick using p_position.pos_tick, p_position.pos_event_seq, p_max;
    if v_tick.tick_id is not null then
      p_position := pgque._with_window(p_position, v_tick);
    end if;
    return p_position;
  end if;
  for v_tick in execute pg_catalog.format(
    'select t.* from (%s) t where t.tick_id > %s order by t.tick_id limit 100', pgque._ticks_sql(p_queue_id), p_position.pos_tick)
  loop
    exit when v_tick.tick_event_seq > p_position.pos_event_seq + p_max and p_position.pos_next_tick is not null;
    p_position := pgque._with_window(p_position, v_tick);
  end loop;
  return p_position;
exception
  when undefined_table or undefined_function then
    -- The queue was dropped meanwhile, or a table of it is gone.
    if pgque._old_snapshot() then
      perform pgque._fail('serialization_failure', 'the queue was dropped since this transaction began', 'Retry the transaction.');
    elsif not exists (select from pgque.queue q where q.queue_id = p_queue_id) then
      perform pgque._takes_nothing(p_queue_id);
    end if;
    raise;
end
$$;

-- A position whose window ends at a tick.
create or replace function pgque._with_window(p_position pgque.position, p_tick pgque.tick) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.pos_next_tick := p_tick.tick_id;
  p_position.pos_next_snapshot := p_tick.tick_snapshot;
  p_position.pos_next_event_seq := p_tick.tick_event_seq;
  return p_position;
end
$$;

-- A position at a tick, with no window and no batch.
create or replace function pgque._at_tick(p_position pgque.position, p_tick pgque.tick) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.pos_tick := p_tick.tick_id;
  p_position.pos_snapshot := p_tick.tick_snapshot;
  p_position.pos_event_seq := p_tick.tick_event_seq;
  p_position.pos_next_tick := null;
  p_position.pos_next_snapshot := null;
  p_position.pos_next_event_seq := null;
  p_position.pos_done_id := null;
  p_position.pos_done_count := 0;
  p_position.pos_last_id := null;
  p_position.pos_batch := null;
  p_position.pos_attempt := 1;
  p_position.pos_fresh := 0 * p_position.pos_fresh;
  return p_position;
end
$$;

-- A position at the end of its window.
create or replace function pgque._past_window(p_position pgque.position) returns pgque.position
language plpgsql immutable as $$
begin
  return pgque._at_tick(p_position, row(
    null, null, p_position.pos_next_tick, null, p_position.pos_next_snapshot, p_position.pos_next_event_seq)::pgque.tick);
end
$$;

-- A consumer's position behind a batch: inside the window after a slice, at
-- the window's end after its last one.  A worker's is empty then.
create or replace function pgque._behind(p_position pgque.position, p_batch pgque.position) returns pgque.position
language plpgsql immutable as $$
begin
  if p_position.pos_main is not null then
    return pgque._at_tick(p_position, null);
  end if;
  if p_position.pos_sub <> p_batch.pos_sub then
    p_position := pgque._as_batch_of(p_position, p_batch);
  end if;
  if p_batch.pos_last_id is null then
    return pgque._past_window(p_position);
  end if;
  p_position.pos_done_id := p_batch.pos_last_id;
  p_position.pos_last_id := null;
  p_position.pos_batch := null;
  p_position.pos_attempt := 1;
  return p_position;
end
$$;

-- The window and the batch of one position in the name of another subscriber.
create or replace function pgque._as_batch_of(p_subscriber pgque.position, p_batch pgque.position) returns pgque.position
language plpgsql immutable as $$
begin
  p_batch.pos_sub := p_subscriber.pos_sub;
  p_batch.pos_main := p_subscriber.pos_main;
  p_batch.pos_seq := p_subscriber.pos_seq;
  p_batch.pos_last_batch := p_subscriber.pos_last_batch;
  p_batch.pos_skipped := p_subscriber.pos_skipped;
  return p_batch;
end
$$;

create or replace function pgque.receive(
  queue_name text, consumer_name text, max_return int default 100, worker text default null,
  visibility_timeout interval default null, ack_batch bigint default null, caller pgque.caller default current_user
) returns setof pgque.delivery
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set work_mem = '64MB' set jit = off as $$
declare
  v_sub      pgque.subscriber;
  v_cursor   pgque.position;   -- the consumer's position
  v_ahead    pgque.position;   -- the same with its next window open
  v_batch    pgque.position;   -- whose batch it is: the same, or the worker's
  v_member   int;
  v_token    bigint;
  v_open     boolean;            -- an open batch comes again
  v_acks     boolean := false;   -- ack_batch is its open batch
  v_max      bigint := receive.max_return;
  v_and      text := '';
  v_rows     text;
  v_query    text;
  v_row      pgque.delivery;
  v_more     boolean;
  v_count    bigint := 0;
  v_next_id  bigint;
  v_queue    pgque.queue;
  v_sifted   record;
  v_sifts    boolean;
  v_small    boolean;
  v_look     bigint;
  v_looked   bigint := 0;
  v_skip     bigint[];
  v_leaf     int;
begin
  if receive.max_return is null or receive.max_return < 1 then
    perform pgque._fail('PQ005', format('max_return must be at least 1, for queue %s', coalesce(quote_ident(receive.queue_name), 'null')),
      'It is the greatest number of messages to hand out.');
  end if;
  v_sub := pgque._subscriber(receive.queue_name, receive.consumer_name, caller);
  if v_sub.sub_role <> 'coop_main' and receive.worker is not null then
    return query select * from pgque._hand_out(v_sub, v_max, receive.worker, receive.visibility_timeout, pgque._batch_for(caller, receive.ack_batch));
    return;
  end if;
  if receive.ack_batch is not null then
    -- Its own batch is finished with the row that says what comes next.
    v_acks := v_sub.sub_role = 'normal' and receive.ack_batch & 1048575 = v_sub.sub_id & 1048575
      and not exists (select from pgque.queue q where q.queue_id = v_sub.sub_queue and q.queue_archive_on_ack);
    if not v_acks then
      if v_sub.sub_role = 'coop_main' then
        -- Before the worker whose batch it may be, as everybody does.
        perform pgque._lock_subscriber(v_sub.sub_id);
      end if;
      perform pgque._ack(pgque._batch_for(caller, receive.ack_batch));
    end if;
  end if;
  if receive.visibility_timeout is not null then
    perform pgque._fail('PQ005', format('visibility_timeout is for workers, not for consumer %I of queue %I', receive.consumer_name, receive.queue_name),
      'Pass worker => name too. A consumer on its own keeps its batch until it finishes it.');
  elsif receive.worker is not null then
    v_member := pgque._worker(v_sub, receive.worker);
  elsif v_sub.sub_role <> 'normal' then
    perform pgque._need_alone(v_sub, receive.queue_name, receive.consumer_name);
  end if;
  if not v_acks then
    -- An idle poll takes no lock, writes nothing and needs no transaction id.
    v_ahead := pgque._position(v_sub.sub_id);
    if v_ahead.pos_next_tick is null then
      v_ahead := pgque._open_window(v_ahead, v_sub.sub_queue, v_max);
    end if;
    if v_ahead.pos_next_tick is null and (v_member is null or (pgque._position(v_member)).pos_batch is null) then
      return;
    end if;
  end if;

  if pgque._lock_subscriber(v_sub.sub_id) <> v_sub.sub_role then
    -- Workers share it since this call began.
    return query select r.*
    from pgque.queue q, pgque.consumer c, pgque.receive(q.queue_name, c.co_name, $3, $4, $5, case when v_acks then $6 end) r
    where q.queue_id = v_sub.sub_queue and c.co_id = v_sub.sub_consumer;
    return;
  elsif v_member is not null then
    perform pgque._lock_subscriber(v_member);
  end if;
  -- The leaf for both, as long as they are locked and nothing is carried over.
  v_leaf := pgque._journal_leaf();
  v_cursor := pgque._position(v_sub.sub_id, v_leaf);
  v_acks := v_acks and v_cursor.pos_batch is not distinct from receive.ack_batch;
  if v_acks then
    v_cursor := pgque._behind(v_cursor, v_cursor);
  end if;
  if v_cursor.pos_seq is distinct from v_ahead.pos_seq then
    v_ahead := v_cursor;
  end if;
  v_batch := v_ahead;
  if v_member is not null then
    v_batch := pgque._position(v_member, v_leaf);
  end if;
  v_open := v_batch.pos_batch is not null;
  if v_open then
    -- It comes whole, whatever max_return says now, since ack() finishes it whole.
    v_max := null;
    v_and := pgque._unsettled_condition(v_batch);
  else
    v_batch := pgque._as_batch_of(v_batch, v_ahead);
    v_token := pgque._new_batch_id(v_batch);
    v_batch.pos_batch := v_token;
    v_batch.pos_last_batch := v_token;
  end if;

  loop
    if v_batch.pos_next_tick is null then
      v_batch := pgque._open_window(v_batch, v_sub.sub_queue, v_max);
      exit when v_batch.pos_next_tick is null;
    end if;
    select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue;
    v_sifts := v_queue.queue_keyed or v_queue.queue_expiring;
    if v_sifts and not v_open then
      -- Each key takes a lock; what is not delivered is looked through quickly.
      v_look := case when v_queue.queue_keyed then 200 else greatest(1000, least(v_max, 10000)) end;
      v_max := least(v_max, v_look);
    end if;
    -- A small window is read straight, by functions whose plans the session keeps.
    v_small := coalesce(not v_open and not v_sifts and v_max <= 1000 and v_queue.queue_reader = pgque.version()
      and v_batch.pos_done_count < 2 * v_max and v_batch.pos_next_event_seq - v_batch.pos_event_seq <= greatest(20 * v_max, 5000)
      and (v_batch.pos_tick < v_batch.pos_high) is not true, false);
    if not v_small then
      v_rows := pgque._batch_sql(v_sub, v_batch, v_and, coalesce(v_look, v_max));
      v_query := format(
        'select e.ev_id, %s::bigint, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,'
        ' e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,'
        ' coalesce(e.ev_retry, 0) + %s, e.ev_error, e.ev_expires, %L::text'
        ' from (%s) e order by e.ev_id limit ',
        v_batch.pos_batch, v_batch.pos_attempt, v_queue.queue_name, v_rows);
    end if;
    if v_sifts then
      v_sifted := pgque._sift_batch(v_queue, v_sub, v_rows, v_max, v_look);
      v_count := v_sifted.looked;
      v_next_id := v_sifted.next_id;
      v_skip := v_sifted.skip;
      return query
        select e.ev_id, v_batch.pos_batch, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,
          e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,
          coalesce(e.ev_retry, 0) + v_batch.pos_attempt, e.ev_error, e.ev_expires, v_queue.queue_name
        from unnest(v_sifted.rows) e;
      if v_count > 0 and not found and not v_open then
        -- Nothing of it is to be delivered: go on behind it, now or next time.
        v_looked := v_looked + v_count * case when v_queue.queue_keyed then 10 else 1 end;
        v_batch.pos_last_id := v_next_id - 1;
        v_batch.pos_done_count := v_batch.pos_done_count + v_count;
        v_batch := pgque._as_batch_of(v_batch, pgque._behind(pgque._as_batch_of(v_cursor, v_batch), v_batch));
        v_batch.pos_batch := v_token;
        v_count := 0;
        v_next_id := null;
        v_skip := null;
        exit when v_looked > 10000;
        continue;
      end if;
    elsif v_max <= 1000 then
      if v_small then
        v_query := 'select * from pgque._events_' || v_sub.sub_queue || '($1, $2, $3, $4, $5, $6, $7, $8)';
      else
        v_query := v_query || (v_max + 1);
      end if;
      -- The row after the last one says where the batch ends.
      for v_row in
        execute v_query
        using v_batch.pos_snapshot, v_batch.pos_next_snapshot, coalesce(v_sub.sub_main, v_sub.sub_id), coalesce(v_batch.pos_done_id, 0), v_max + 1,
          v_batch.pos_batch, v_batch.pos_attempt, v_queue.queue_name
      loop
        if v_count = v_max then
          v_next_id := v_row.msg_id;
          exit;
        end if;
        v_count := v_count + 1;
        return next v_row;
      end loop;
    else
      -- A loop costs more per row than to look for the end afterwards, and to
      -- count first is a third of the price of sorting in vain.
      return query execute v_query || coalesce(v_max::text, 'all');
      get diagnostics v_count = row_count;
      if v_count = v_max then
        execute format('select count(*) > %s from (select from (%s) e limit %s) e', v_max, v_rows, v_max + 1) into v_more;
        if v_more then
          execute format('select e.ev_id from (%s) e order by e.ev_id offset %s limit 1', v_rows, v_max) into v_next_id;
        end if;
      end if;
    end if;
    exit when v_count > 0 or v_open;
    -- An empty window: go on behind it.
    v_batch := pgque._past_window(v_batch);
    v_batch.pos_batch := v_token;
  end loop;

  if v_open and v_count = 0 then
    -- Every message of it was settled: it is done.
    perform pgque._append_position(pgque._behind(v_batch, v_batch));
    return query select * from pgque.receive($1, $2, $3, $4);
    return;
  elsif v_open then
    return;
  elsif v_count = 0 then
    -- Nothing but empty windows: remember that, so that they can be reclaimed.
    if v_acks or v_batch.pos_tick > v_cursor.pos_tick or v_batch.pos_done_id is distinct from v_cursor.pos_done_id then
      v_batch.pos_batch := null;
      perform pgque._append_position(pgque._as_batch_of(v_cursor, v_batch));
    end if;
    return;
  end if;
  v_batch.pos_last_id := v_next_id - 1;
  v_batch.pos_done_count := v_batch.pos_done_count + v_count;
  if cardinality(v_skip) > 0 then
    perform pgque._note(v_batch.pos_batch, v_batch.pos_sub, v_skip, null, v_leaf);
  end if;
  perform pgque._append_position(v_batch, v_leaf);
  if v_member is not null then
    perform pgque._append_position(pgque._behind(v_cursor, v_batch), v_leaf);
  end if;
end
$$;
comment on function pgque.receive(text, text, int, text, interval, bigint, pgque.caller) is
  'Delivers the consumer''s next messages as one batch: at most max_return, in the order of their ids; no rows if there are none. Without worker, the '
  'same batch is redelivered under its id until ack(batch_id), without the messages that were nacked. With worker (any name), the messages are leased '
  'to the worker for visibility_timeout (NULL: the queue''s setting, 30 seconds). Each call of each worker gets other messages, redeliveries first, '
  'then new ones. When the lease expires, messages without an outcome are redelivered to the next worker that calls, with receive_count + 1; for them '
  'the batch ids of earlier deliveries are invalid from then on. ack_batch: a batch that is acknowledged first, in the same transaction. Call it in a '
  'transaction of its own, or in one with the work and the ack for exactly-once. Errors: PQ001 no such queue; PQ004 invalid worker name; PQ005 '
  'max_return is below 1, visibility_timeout is not positive or above 100 years, or the consumer has workers and worker is NULL; PQ006 the consumer '
  'has received a batch without worker, and worker is set; PQ011 not subscribed; 25000 with worker in a transaction that is not READ COMMITTED.';

-- The messages of a batch of a queue with keys or expiry: those that are to be
-- delivered, and those of the slice that are not.  p_max null: all of p_rows;
-- p_look null: the batch was handed out before and comes again.
create or replace function pgque._sift_batch(
  p_queue pgque.queue, p_sub pgque.subscriber, p_rows text, p_max bigint, p_look bigint,
  out rows pgque.event[], out looked bigint, out next_id bigint, out skip bigint[]
)
language plpgsql as $$
declare
  v_now      timestamptz := pgque.clock();
  v_rows     pgque.event[];
  v_ids      bigint[];
  v_claim    record;
  v_expired  pgque.event[];
begin
  execute pg_catalog.format('select array_agg(row(e.*)::pgque.event order by e.ev_id) from (select * from (%s) e order by e.ev_id limit %L) e', p_rows, p_look + 1)
  into v_rows;
  looked := coalesce(pg_catalog.cardinality(v_rows), 0);
  if p_look is null or looked = 0 then
    rows := pgque._with_bodies(p_queue.queue_id, v_rows);
    return;
  end if;
  if looked > p_look then
    next_id := (v_rows[looked]).ev_id;
    v_rows := v_rows[:p_look];
  end if;
  v_claim := pgque._claim(p_queue, v_rows);
  v_ids := array(
    select e.ev_id from pg_catalog.unnest(v_claim.rows) e
    where (e.ev_id in (select pg_catalog.unnest((select v_claim.busy || v_claim.gone)))) is not true and (e.ev_expires > v_now) is not false
    order by e.ev_id
    limit p_max + 1);
  if pg_catalog.cardinality(v_ids) > p_max then
    next_id := v_ids[p_max + 1];
    v_ids := v_ids[:p_max];
  end if;
  -- The slice: what is before next_id.
  skip := array(select e.ev_id from pg_catalog.unnest(v_rows) e where (e.ev_id >= next_id) is not true and (e.ev_id in (select pg_catalog.unnest((select v_ids)))) is not true);
  looked := pg_catalog.cardinality(skip) + pg_catalog.cardinality(v_ids);
  rows := array(select e from pg_catalog.unnest(v_claim.rows) e where (e.ev_id in (select pg_catalog.unnest((select v_ids)))) is true order by e.ev_id);
  insert into pgque.retry_queue
  select (pgque._waiting(e, p_sub, 0, v_now, null, null)).* from pg_catalog.unnest(v_claim.rows) e
  where (e.ev_id in (select pg_catalog.unnest((select v_claim.busy)))) is true and (e.ev_id in (select pg_catalog.unnest((select skip)))) is true
  on conflict do nothing;
  v_expired := array(
    select e from pg_catalog.unnest(v_claim.rows) e
    where (e.ev_id in (select pg_catalog.unnest((select skip)))) is true
      and (e.ev_id in (select pg_catalog.unnest((select v_claim.busy || v_claim.gone)))) is not true);
  perform pgque._tally(p_queue.queue_id, p_sub.sub_id, 'expired', pg_catalog.cardinality(v_expired));
  -- Expired messages are sealed too: an older snapshot may not show that a body was replaced.
  perform pgque._seal(p_queue.queue_id, rows || v_expired);
end
$$;

-- One condition on row addresses for each table, null where there is nothing to
-- read, by the map of a position's window; null if it has no usable map.  p_max
-- as in _batch_sql().
--
-- Every chunk but the last holds at least 25 events for everybody, so as many
-- chunks as p_max needs and one more hold the batch and what comes after it.
create or replace function pgque._map_conditions(p_queue_id int, p_pos pgque.position, p_max bigint) returns text[]
language plpgsql as $$
declare
  v_filenodes  oid[] := pgque._filenodes(p_queue_id);
  v_tids       text[] := array_fill(null::text, array[3]);
  v_lo         tid[];
  v_hi         tid[];
  v_mapped     boolean;
begin
  -- One statement: a map that another consumer makes meanwhile is there for
  -- both questions or for none.
  select array[min(m.map_lo[1]), min(m.map_lo[2]), min(m.map_lo[3])], array[max(m.map_hi[1]), max(m.map_hi[2]), max(m.map_hi[3])],
    count(*) > 0 or exists (
      select from pgque.window_map m
      where m.map_queue = p_queue_id and m.map_from = p_pos.pos_tick and m.map_to = p_pos.pos_next_tick
        and m.map_valid and m.map_filenodes = v_filenodes)
  into v_lo, v_hi, v_mapped
  from (
    -- Two consumers may have made the same map.
    select distinct on (m.map_id_hi) m.map_lo, m.map_hi
    from pgque.window_map m
    where m.map_queue = p_queue_id and m.map_from = p_pos.pos_tick and m.map_to = p_pos.pos_next_tick
      and m.map_valid and m.map_filenodes = v_filenodes
      and m.map_id_hi > coalesce(p_pos.pos_done_id, 0)
      and (p_pos.pos_last_id is null or m.map_id_lo <= p_pos.pos_last_id)
    order by m.map_id_hi
    limit p_max / 25 + 2
  ) m;
  if not v_mapped then
    return null;
  end if;
  for n in 1..3 loop
    if v_lo[n] is not null then
      v_tids[n] := pg_catalog.format('e.ctid >= %L::tid and e.ctid <= %L::tid', v_lo[n], v_hi[n]);
    end if;
  end loop;
  return v_tids;
end
$$;

-- A condition that leaves out what is settled in an open batch.
create or replace function pgque._unsettled_condition(p_batch pgque.position) returns text
language sql stable as $$
  select pg_catalog.format(
    ' and e.ev_id not in (select s.set_ev_id from pgque.settled s where s.set_batch = %1$L)', p_batch.pos_batch)
$$;

-- Finishes a batch: exactly its messages, no others.  1, or 0 when the batch
-- is not open.
create or replace function pgque._ack(p_batch bigint, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_sub      int;
  v_role     text;
  v_archive  boolean;
  v_count    bigint;
  v_leaf     int;
  v_batch    pgque.position;
begin
  select s.sub_id, s.sub_role, q.queue_archive_on_ack into v_sub, v_role, v_archive
  from pgque.subscriber s
  join pgque.queue q on q.queue_id = s.sub_queue
  where (s.sub_id & 1048575) = (p_batch & 1048575)::int
    and (caller = current_user collate "C" or pg_has_role(caller, 'pgque_reader', 'usage') or pgque._may(caller, 'consume', s.sub_queue));
  if v_archive then
    if v_role = 'pool' then
      perform pg_advisory_xact_lock(p_batch);
      if not pgque._still_whole(v_sub, p_batch) then
        return 0;
      end if;
    end if;
    select count(*) into v_count from pgque._settle(p_batch, null, 'archive', null, 'acked', false);
    if v_role = 'pool' then
      return (v_count > 0)::int;
    end if;
  elsif v_role = 'pool' then
    return pgque._close_lease(v_sub, p_batch);
  end if;
  perform from pgque.subscriber s where s.sub_id = v_sub for no key update;
  if not found then
    return 0;
  end if;
  v_leaf := pgque._journal_leaf();
  v_batch := pgque._position(v_sub, v_leaf);
  if v_batch.pos_batch is distinct from p_batch then
    return 0;
  end if;
  perform pgque._append_position(pgque._behind(v_batch, v_batch), v_leaf);
  return 1;
end
$$;

create or replace function pgque.ack(batch_id bigint) returns int
language sql as $$ select pgque._ack($1) $$;
comment on function pgque.ack(bigint) is
  'Acknowledges a batch: exactly the messages that were delivered with it, all or none. Returns 1. Returns 0 if the batch was acknowledged before, '
  'or, for a worker''s batch, once one of its messages went to another worker or was removed; ack(batch_id, msg_ids) then acknowledges the others.';

create or replace function pgque.finish_batch(batch_id bigint) returns int
language sql as $$ select pgque.ack($1) $$;
comment on function pgque.finish_batch(bigint) is 'PgQ''s name for ack(batch_id).';

-- Opens the next whole window as a batch, PgQ's way: one tick to the next, or
-- what receive() left of one.  An open batch comes again.  Null if there is no
-- further tick.  What receive() would not deliver is no part of the batch, and
-- bodies stay as they are from here on: nobody may read the batch before
-- finish_batch().  With a worker, a subconsumer, the batch is that worker's.
create or replace function pgque._next_batch(
  queue_name text, consumer_name text, worker text, min_lag interval, min_count int, min_interval interval, caller pgque.caller default current_user,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_sub     pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_queue   pgque.queue;
  v_leaf    int;
  v_member  int;
  v_cursor  pgque.position;   -- the consumer's position
  v_batch   pgque.position;   -- whose batch it is: the same, or the worker's
  v_open    boolean;
  v_prev    pgque.tick;
  v_cur     pgque.tick;
begin
  if $3 is null then
    perform pgque._need_alone(v_sub, $1, $2);
  else
    v_member := pgque._worker(v_sub, $3);
  end if;
  v_cursor := pgque._position(v_sub.sub_id);
  if v_cursor.pos_next_tick is null and (pgque._open_window(v_cursor, v_sub.sub_queue, 0)).pos_next_tick is null
    and (v_member is null or (pgque._position(v_member)).pos_batch is null)
  then
    return;
  end if;
  v_cursor := pgque._lock_position(v_sub.sub_id);
  if v_member is null then
    perform pgque._need_alone(pgque._subscriber($1, $2, caller), $1, $2);
    v_batch := v_cursor;
  else
    v_batch := pgque._lock_position(v_member);
  end if;
  v_open := v_batch.pos_batch is not null;
  if not v_open then
    v_batch := pgque._as_batch_of(v_batch, v_cursor);
  end if;
  v_prev := pgque._tick(v_sub.sub_queue, v_batch.pos_tick);
  if not v_open then
    if v_batch.pos_next_tick is null then
      execute format(
        'select t.* from (%s) t where t.tick_id > $1'
        ' and ($2 is null or t.tick_time <= $3 - $2)'
        ' and (($4 is null and $5 is null) or t.tick_event_seq >= $6 + $4 or t.tick_time >= $7 + $5)'
        ' order by t.tick_id limit 1', pgque._ticks_sql(v_sub.sub_queue))
      into v_cur
      using v_batch.pos_tick, min_lag, pgque.clock(), min_count, min_interval, v_prev.tick_event_seq, v_prev.tick_time;
      if v_cur.tick_id is null then
        return;
      end if;
      v_batch := pgque._with_window(v_batch, v_cur);
    end if;
    v_batch.pos_last_id := null;
    v_batch.pos_batch := pgque._new_batch_id(v_batch);
    v_batch.pos_last_batch := v_batch.pos_batch;
    v_leaf := pgque._journal_leaf();
    select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue;
    if v_queue.queue_keyed or v_queue.queue_expiring then
      perform pgque._note(v_batch.pos_batch, v_batch.pos_sub, s.skip, null, v_leaf)
      from pgque._sift_batch(v_queue, v_sub,
        pgque._batch_sql(v_sub, v_batch, format(' and (e.ev_key is not null or e.ev_expires <= %L)', pgque.clock())), null, 2147483647) s
      where cardinality(s.skip) > 0;
    end if;
    perform pgque._append_position(v_batch, v_leaf);
    if v_member is not null then
      perform pgque._append_position(pgque._behind(v_cursor, v_batch), v_leaf);
    end if;
  elsif v_member is not null then
    -- A worker that asks is alive, as PgQ has it.
    perform pgque._append_position(v_batch, pgque._carry_over(v_batch));
  end if;
  v_cur := pgque._tick(v_sub.sub_queue, v_batch.pos_next_tick);
  batch_id := v_batch.pos_batch;
  cur_tick_id := v_cur.tick_id;
  cur_tick_time := v_cur.tick_time;
  cur_tick_event_seq := v_cur.tick_event_seq;
  prev_tick_id := v_prev.tick_id;
  prev_tick_time := v_prev.tick_time;
  prev_tick_event_seq := v_prev.tick_event_seq;
end
$$;

-- No argument caller: with it a call with a subconsumer and six nulls could be
-- this one as well.
create or replace function pgque.next_batch_custom(
  queue_name text, consumer_name text, min_lag interval, min_count int, min_interval interval,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language sql as $$ select * from pgque._next_batch($1, $2, null, $3, $4, $5) $$;
comment on function pgque.next_batch_custom(text, text, interval, int, interval) is
  'Opens a batch as next_batch_info() does, for a bigger window: it ends at a tick that is at least min_lag old, and spans at least min_count events '
  'or min_interval of time. NULL is no condition.';

create or replace function pgque.next_batch_info(
  queue_name text, consumer_name text,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language sql as $$ select * from pgque._next_batch($1, $2, null, null, null, null) $$;
comment on function pgque.next_batch_info(text, text) is
  'Opens a batch as next_batch() does, and returns its id with the ids, times and event sequences of its two ticks.';

create or replace function pgque.next_batch(queue_name text, consumer_name text) returns bigint
language sql as $$ select b.batch_id from pgque._next_batch($1, $2, null, null, null, null) b $$;
comment on function pgque.next_batch(text, text) is
  'Opens the next window between two ticks as a batch, and returns its id; NULL if there is no further tick. An open batch is returned again. Read it '
  'with get_batch_events(), close it with finish_batch(). It may be empty. Errors: PQ001 no such queue; PQ005 the consumer has workers; PQ011 not '
  'subscribed.';

-- The subscriber that owns a batch and its position, without a lock; PQ012
-- when the batch is not open.
create or replace function pgque._open_batch(p_batch bigint, out sub pgque.subscriber, out pos pgque.position)
language plpgsql as $$
begin
  sub := pgque._batch_owner(p_batch);
  if sub.sub_id is not null then
    pos := pgque._position(sub.sub_id);
  end if;
  if pos.pos_batch is distinct from p_batch or p_batch is null then
    perform pgque._no_batch(p_batch);
  end if;
end
$$;

-- The query that reads the rows of a position's window, as columns of
-- pgque.event: those of its open batch, or, with p_max, of the next batch of
-- at most p_max messages.  p_and is one more condition on e.
--
-- A window that is far bigger than a batch, or of which two batches were handed
-- out, is read by its map.  A consumer
-- that was moved back can meet an event and its own retry in one window: then
-- the retry stands for both.
create or replace function pgque._batch_sql(
  p_sub pgque.subscriber, p_pos pgque.position, p_and text default '', p_max bigint default null
) returns text
language plpgsql set enable_seqscan = off as $$
declare
  v_xids    text;
  v_by_map  boolean;
  v_tids    text[];
  v_rows    text;
begin
  if p_max is null then
    v_by_map := exists (
      select from pgque.window_map m
      where m.map_queue = p_sub.sub_queue and m.map_from = p_pos.pos_tick and m.map_to = p_pos.pos_next_tick);
  else
    v_by_map := p_pos.pos_done_count >= 2 * p_max
      or p_pos.pos_next_event_seq - p_pos.pos_event_seq > greatest(20 * p_max, 5000);
  end if;
  if v_by_map then
    -- From here on no table can be rewritten under its row addresses.
    execute pg_catalog.format('lock table pgque.event_%1$s_0, pgque.event_%1$s_1, pgque.event_%1$s_2 in access share mode', p_sub.sub_queue);
    v_tids := pgque._map_conditions(p_sub.sub_queue, p_pos, p_max);
  end if;
  if v_tids is null then
    v_xids := coalesce(pgque._xid_condition(p_pos.pos_snapshot, p_pos.pos_next_snapshot), 'false');
    if v_by_map and p_max is not null then
      perform pgque._map_window(p_sub.sub_queue, p_pos.pos_tick, p_pos.pos_next_tick, v_xids);
      v_tids := pgque._map_conditions(p_sub.sub_queue, p_pos, p_max);
    end if;
  end if;
  if v_tids is not null then
    v_xids := pgque._xid_filter(p_pos.pos_snapshot, p_pos.pos_next_snapshot);
  end if;
  v_rows := pgque._rows_sql(p_sub.sub_queue,
    pgque._slice_condition(v_xids || p_and, coalesce(p_sub.sub_main, p_sub.sub_id), p_pos.pos_done_id, p_pos.pos_last_id),
    v_tids);
  if p_pos.pos_tick < p_pos.pos_high then
    v_rows := pg_catalog.format('select distinct on (e.ev_id) e.* from (%s) e order by e.ev_id, e.ev_txid desc', v_rows);
  end if;
  return v_rows;
end
$$;

-- One event of an open batch, if it is where it most likely is: in the table that
-- is written, of a transaction between the last tick and the first that still ran
-- at this one, in a window that is small.  If not, this is null, and _batch_sql()
-- finds it.  Ids rise with transaction ids, nearly, so it is looked for from the
-- end that is nearer.
create or replace function pgque._near_event(p_queue pgque.queue, p_sub pgque.subscriber, p_pos pgque.position, p_id bigint) returns pgque.event
language plpgsql set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_lo   xid8 := pg_catalog.pg_snapshot_xmax(p_pos.pos_snapshot);
  v_end  xid8 := pg_catalog.pg_snapshot_xmax(p_pos.pos_next_snapshot);
  v_row  pgque.event;
begin
  -- What another ticker says of ids need not be so.
  if p_id is null or p_id < 1 or p_id > p_pos.pos_last_id or p_pos.pos_tick < p_pos.pos_high
    or p_pos.pos_next_event_seq - p_pos.pos_event_seq > 5000 or p_queue.queue_external_ticker
  then
    return null;
  end if;
  if pg_catalog.pg_snapshot_xmin(p_pos.pos_next_snapshot) < v_end then
    v_end := coalesce(
      (select x.xid from pg_catalog.pg_snapshot_xip(p_pos.pos_next_snapshot) x (xid) where x.xid >= v_lo order by x.xid limit 1), v_end);
  end if;
  execute pg_catalog.concat('select * from pgque.event_', p_queue.queue_id, '_', p_queue.queue_cur_table,
    ' e where e.ev_txid >= ''', v_lo, ''' and e.ev_txid < ''', v_end, ''' and e.ev_id = ', p_id,
    case when p_id - p_pos.pos_event_seq > p_pos.pos_next_event_seq - p_id then ' order by e.ev_txid desc' end, ' limit 1')
  into v_row;
  if p_id <= p_pos.pos_done_id or v_row.ev_owner <> coalesce(p_sub.sub_main, p_sub.sub_id) then
    return null;
  end if;
  return v_row;
end
$$;

create or replace function pgque.get_batch_events(
  batch_id bigint, caller pgque.caller default current_user,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_open  record := pgque._open_batch(pgque._batch_for(caller, $1));
  v_sub   pgque.subscriber := v_open.sub;
  v_rows  pgque.event[];
begin
  if (select q.queue_keyed from pgque.queue q where q.queue_id = v_sub.sub_queue) then
    execute format('select array_agg(row(e.*)::pgque.event) from (%s) e', pgque._open_sql(v_open.sub, v_open.pos)) into v_rows;
    return query execute format('select %s from unnest($1) e order by e.ev_id', pgque._event_columns())
    using pgque._with_bodies(v_sub.sub_queue, v_rows);
    return;
  end if;
  return query execute format('select %s from (%s) e order by e.ev_id', pgque._event_columns(), pgque._open_sql(v_open.sub, v_open.pos));
end
$$;
comment on function pgque.get_batch_events(bigint, pgque.caller) is
  'Returns the events of an open batch in the order of their ids, as stored. Errors: PQ012 the batch is not open.';

-- The query of an open batch: where messages may be left out as it is opened,
-- without those that have an outcome.
create or replace function pgque._open_sql(p_sub pgque.subscriber, p_pos pgque.position) returns text
language sql as $$
  select pgque._batch_sql(p_sub, p_pos, case when q.queue_keyed or q.queue_expiring then pgque._unsettled_condition(p_pos) else '' end)
  from pgque.queue q
  where q.queue_id = p_sub.sub_queue
$$;

create or replace function pgque._event_columns() returns text
language sql stable as $$
  select 'e.ev_id, e.ev_time, e.ev_txid, e.ev_retry, e.ev_type, e.ev_data, e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4,'
    ' e.ev_headers, e.ev_key, e.ev_bytes, e.ev_expires, e.ev_error'::text
$$;

-- The query of an open batch, for those who may read the leaves themselves.
create or replace function pgque._cursor_sql(p_batch bigint) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_open  record := pgque._open_batch(p_batch);
begin
  return pgque._open_sql(v_open.sub, v_open.pos);
end
$$;

-- extra_where runs with the caller's rights and sees pg_catalog and pgque only.
create or replace function pgque.get_batch_cursor(
  batch_id bigint, cursor_name text, quick_limit int, extra_where text,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_cursor  refcursor := $2;
begin
  if coalesce($2, '') = '' or ($3 >= 0) is not true then
    perform pgque._fail('PQ005', format('a cursor over batch %s needs a name and a count that is not negative', coalesce($1::text, 'null')),
      'Pass any name that is free in this transaction, and FETCH from it.');
  end if;
  open v_cursor for execute format('select %s from (%s) e where true %s order by e.ev_id',
    pgque._event_columns(), pgque._cursor_sql($1), coalesce('and (' || $4 || ')', ''));
  return query execute format('fetch forward %s from %I', $3, $2);
end
$$;
comment on function pgque.get_batch_cursor(bigint, text, int, text) is
  'Opens a cursor over an open batch and returns its first quick_limit events. Fetch the rest from cursor_name in the same transaction. extra_where: '
  'an SQL condition on the event columns; never build it from untrusted input. Errors: PQ012 the batch is not open.';

create or replace function pgque.get_batch_cursor(
  batch_id bigint, cursor_name text, quick_limit int,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language sql as $$ select * from pgque.get_batch_cursor($1, $2, $3, null) $$;
comment on function pgque.get_batch_cursor(bigint, text, int) is 'The same without extra_where.';

create or replace function pgque.get_batch_info(
  batch_id bigint, caller pgque.caller default current_user,
  out queue_name text, out consumer_name text, out batch_start timestamptz, out batch_end timestamptz,
  out prev_tick_id bigint, out tick_id bigint, out lag interval, out seq_start bigint, out seq_end bigint
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_open  record := pgque._open_batch(pgque._batch_for(caller, $1));
  v_sub   pgque.subscriber := v_open.sub;
  v_prev  pgque.tick;
  v_cur   pgque.tick;
begin
  v_prev := pgque._tick(v_sub.sub_queue, (v_open.pos).pos_tick);
  v_cur := pgque._tick(v_sub.sub_queue, (v_open.pos).pos_next_tick);
  queue_name := (select q.queue_name from pgque.queue q where q.queue_id = v_sub.sub_queue);
  consumer_name := pgque._subscriber_name(v_sub);
  batch_start := v_prev.tick_time;
  batch_end := v_cur.tick_time;
  prev_tick_id := v_prev.tick_id;
  tick_id := v_cur.tick_id;
  lag := pgque.clock() - v_cur.tick_time;
  seq_start := v_prev.tick_event_seq;
  seq_end := v_cur.tick_event_seq;
end
$$;
comment on function pgque.get_batch_info(bigint, pgque.caller) is
  'Returns what an open batch spans: queue, consumer, times and ids of its two ticks, their event sequences, and lag, the age of its end. Errors: '
  'PQ012 the batch is not open.';

-- A consumer's name; for a worker consumer.worker.
create or replace function pgque._subscriber_name(p_sub pgque.subscriber) returns text
language sql stable as $$
  select c.co_name || coalesce('.' || p_sub.sub_worker, '') from pgque.consumer c where c.co_id = p_sub.sub_consumer
$$;
