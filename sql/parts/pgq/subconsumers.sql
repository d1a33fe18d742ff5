-- ---------------------------------------------------------------------------
-- subconsumers: PgQ's cooperative consumers
-- ---------------------------------------------------------------------------

-- PgQ's way to share one position, kept for its clients: workers are registered by
-- name, and each holds one batch.  A subconsumer is a worker whose lease has no end:
-- its open batch is redelivered to it.  If a worker was silent for longer than
-- dead_interval, a call moves its batch to another worker, through the retry queue.
--
-- A subconsumer's newest row in the journal records when it last called.  The rest of
-- the engine handles subconsumers where _begin_delivery() calls _worker(), to find out whether
-- one is registered, and _touch().

-- Refuses a call for a consumer on its own if the consumer has workers.
create or replace function pgque._need_alone(p_sub pgque.subscriber, p_queue text, p_consumer text) returns void
language plpgsql as $$
begin
  if p_sub.sub_role in ('coop_main', 'pool') then
    perform pgque._fail('PQ005', pg_catalog.format('consumer %I of queue %I has workers', p_consumer, p_queue),
      case p_sub.sub_role
        when 'pool' then 'Share its messages as a worker: pgque.receive(queue, consumer, max_return, worker => name), in Python Worker. '
        'To get every message, subscribe another consumer: pgque.subscribe(queue, name). To move this one, use pgque.register_consumer_at(queue, consumer, tick_id).'
        else 'Use pgque.receive_coop(queue, consumer, subconsumer) or pgque.next_batch(queue, consumer, subconsumer).' end);
  end if;
end
$$;

-- Returns the subscriber row of a worker, or null.
create or replace function pgque._find_worker(p_main int, p_worker text) returns int
language plpgsql as $$
begin
  return (select s.sub_id from pgque.subscriber s where s.sub_main = p_main and s.sub_worker = p_worker collate pg_catalog."default");
end
$$;

create or replace function pgque._worker(p_main pgque.subscriber, p_worker text) returns int
language plpgsql as $$
declare
  v_sub  int := pgque._find_worker(p_main.sub_id, p_worker);
begin
  if v_sub is null then
    perform pgque._fail('PQ011', pg_catalog.format('not subscriber to queue: worker %s of %s', coalesce(pg_catalog.quote_ident(p_worker), 'null'), pgque._subscriber_name(p_main)),
      'Register it with pgque.register_subconsumer(queue, consumer, subconsumer), or use pgque.receive_coop().');
  end if;
  return v_sub;
end
$$;

create or replace function pgque.register_subconsumer(
  queue_name text, consumer_name text, subconsumer_name text, convert_normal boolean default false, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_main      pgque.subscriber;
  v_position  pgque.position;
  v_batch     bigint;   -- the open batch of the consumer's own reader
begin
  if coalesce($3, '') = '' or octet_length($3) > 1000 then
    perform pgque._fail('PQ004', format('invalid worker name for consumer %s of queue %s', coalesce(quote_ident($2), 'null'), coalesce(quote_ident($1), 'null')),
      'A worker name has 1 to 1000 bytes; any character is allowed.');
  end if;
  perform pgque._subscribe($1, $2, 'coop_main', 'latest', caller);
  v_main := pgque._subscriber($1, $2, caller);
  if pgque._find_worker(v_main.sub_id, $3) is not null then
    return 0;
  end if;
  v_position := pgque._lock_position(v_main.sub_id);
  v_main := pgque._subscriber($1, $2, caller);
  if v_main.sub_role = 'pool' then
    perform pgque._fail('PQ006', format('consumer %I of queue %I has workers with leases', $2, $1),
      'Use pgque.receive(queue, consumer, max_return, worker => name), or another consumer.');
  elsif v_main.sub_role = 'normal' then
    if $4 is not true then
      perform pgque._fail('PQ006', format('consumer %I of queue %I reads on its own', $2, $1),
        'Give it subconsumers: select pgque.register_subconsumer(queue, consumer, subconsumer, true);');
    end if;
    v_batch := pgque._open_batch_of(v_main, v_position, null);
    update pgque.subscriber s set sub_role = 'coop_main' where s.sub_id = v_main.sub_id;
  end if;
  perform pgque._add_subscriber(v_main.sub_queue, v_main.sub_consumer, 'coop_member', v_main.sub_id, $3, null, caller);
  if v_batch is not null then
    perform pgque._give_batch(v_main, v_batch, $3, 0);
  end if;
  return 1;
exception
  when unique_violation then
    return 0;
end
$$;
comment on function pgque.register_subconsumer(text, text, text, boolean, pgque.caller) is
  'Registers a worker (subconsumer) of a consumer, and subscribes the consumer if it is new. Returns 1, or 0 if the worker was registered already. '
  'convert_normal: turns a consumer that reads on its own into one with workers. The worker then gets the consumer''s open batch under a new id, '
  'without the messages that have an outcome. Errors: PQ001 no such queue; PQ004 a name is empty or longer than 1000 bytes; PQ006 the consumer '
  'reads on its own and convert_normal is not true.';

create or replace function pgque.subscribe_subconsumer(
  queue_name text, consumer_name text, subconsumer_name text, convert_normal boolean default false
) returns int
language sql as $$ select pgque.register_subconsumer($1, $2, $3, $4) $$;
comment on function pgque.subscribe_subconsumer(text, text, text, boolean) is 'Earlier name of register_subconsumer().';

create or replace function pgque.unregister_subconsumer(
  queue_name text, consumer_name text, subconsumer_name text, batch_handling int default 0, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_main   pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_sub    int;
  v_batch  bigint;
begin
  perform pgque._lock_subscriber(v_main.sub_id);
  v_sub := pgque._find_worker(v_main.sub_id, $3);
  if v_sub is null then
    return 0;
  end if;
  perform pgque._lock_subscriber(v_sub);
  v_batch := pgque._open_batch_of(v_main, pgque._position(v_main.sub_id), $3);
  if v_batch is not null then
    if $4 is distinct from 1 then
      perform pgque._fail('PQ006', format('worker %I of consumer %I of queue %I holds a batch', $3, $2, $1),
        'Finish the batch, or pass batch_handling => 1 to reject its messages.');
    end if;
    perform pgque._set_outcomes(v_batch, null, 'nack', '0', 'worker unregistered', false);
    perform pgque._record(v_batch, 'closed');
  end if;
  delete from pgque.subscriber s where s.sub_id = v_sub;
  return 1;
end
$$;
comment on function pgque.unregister_subconsumer(text, text, text, int, pgque.caller) is
  'Removes a worker (subconsumer) and returns 1, or 0 if there is none. batch_handling: for a worker with an open batch, 0 is an error, and 1 '
  'rejects the messages of the batch, which are retried or become dead letters. Errors: PQ001 no such queue; PQ006 the worker has an open batch; '
  'PQ011 not subscribed.';

create or replace function pgque.unsubscribe_subconsumer(
  queue_name text, consumer_name text, subconsumer_name text, batch_handling int default 0
) returns int
language sql as $$ select pgque.unregister_subconsumer($1, $2, $3, $4) $$;
comment on function pgque.unsubscribe_subconsumer(text, text, text, int) is 'Earlier name of unregister_subconsumer().';

create or replace function pgque.touch_subconsumer(queue_name text, consumer_name text, subconsumer_name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_main  pgque.subscriber := pgque._subscriber($1, $2, caller);
begin
  perform pgque._lock_subscriber(v_main.sub_id);
  perform pgque._touch(pgque._worker(v_main, $3));
  return 1;
end
$$;
comment on function pgque.touch_subconsumer(text, text, text, pgque.caller) is
  'Marks a worker (subconsumer) as alive: dead_interval counts from now. Returns 1. Errors: PQ001 no such queue; PQ011 no such worker.';

-- Gives the oldest batch whose worker was silent for longer than p_dead_interval to
-- another worker.  A worker that has a batch takes none over.  A worker that holds its
-- own lock is alive.
create or replace function pgque._take_over(p_main pgque.subscriber, p_worker text, p_dead_interval interval) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_dead  record;
begin
  for v_try in 0..1 loop
    select h.token, h.sub_id into v_dead
    from (
      -- OFFSET keeps the planner from reading the position of each worker of the group: of
      -- one that was removed meanwhile there is none, which is an error.
      select b.token, s.sub_id
      from pgque._states(p_main.sub_id, (pgque._position(p_main.sub_id)).pos_open) b
      join pgque.subscriber s on s.sub_main = p_main.sub_id and s.sub_worker = (b.lease).pos_worker
      where b.place is not null
      offset 0
    ) h
    cross join lateral pgque._position(h.sub_id) p
    where p.pos_time < pgque.clock() - p_dead_interval
      and pgque._open_batch_of(p_main, pgque._position(p_main.sub_id), p_worker) is null
    order by p.pos_time
    limit 1;
    if not found then
      return;
    elsif v_try = 0 then
      perform pgque._lock_subscriber(p_main.sub_id);
    end if;
  end loop;
  perform from pgque.subscriber s where s.sub_id = v_dead.sub_id for no key update skip locked;
  if found and (pgque._position(v_dead.sub_id)).pos_time < pgque.clock() - p_dead_interval then
    perform pgque._give_batch(p_main, v_dead.token, p_worker, 1);
  end if;
end
$$;

-- Gives an open batch to a worker, under a new batch id, without messages that have an
-- outcome.  p_deliveries is added to their count.  The caller holds the consumer's
-- lock.
create or replace function pgque._give_batch(p_main pgque.subscriber, p_batch bigint, p_worker text, p_deliveries int) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_pos    pgque.position := pgque._next_from(pgque._position(p_main.sub_id));
  v_token  bigint := pgque._new_batch_id(v_pos);
  v_state  record;
  v_fresh  bigint := 0;
begin
  select s.* into v_state from pgque._states(p_main.sub_id, array[p_batch]) s;
  if v_state.place = 'log' then
    v_fresh := pgque._move_to_retry(p_main, v_state.lease, 'infinity', v_token, p_worker, p_deliveries);
  end if;
  update pgque.retry_queue r set ev_batch = v_token, ev_worker = p_worker, ev_receives = r.ev_receives + p_deliveries
  where r.ev_owner = p_main.sub_id and r.ev_batch = p_batch;
  get diagnostics v_pos.pos_shelf = row_count;
  v_pos.pos_shelf := v_pos.pos_shelf + v_fresh;
  perform pgque._record(p_batch, 'closed');
  v_pos.pos_open := pg_catalog.array_remove(v_pos.pos_open, p_batch);
  perform pgque._store_delivery(p_main, null, v_pos, pgque._journal_leaf(), 0, v_token, p_worker, 'infinity', true);
end
$$;

-- Notes that a worker is alive.
create or replace function pgque._touch(p_member int) returns void
language plpgsql as $$
begin
  perform pgque._append_position(pgque._lock_position(p_member));
end
$$;

-- Registers a worker on first use and takes over a batch for it if dead_interval
-- is given.
create or replace function pgque._join(
  queue_name text, consumer_name text, subconsumer_name text, dead_interval interval, caller pgque.caller default current_user
) returns void
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  int := (pgque._queue($1, caller, 'consume')).queue_id;
  v_main   int := (select s.sub_id from pgque._subscriber_by_name(v_queue, $2) s);
begin
  if pgque._find_worker(v_main, $3) is null then
    perform pgque.register_subconsumer($1, $2, $3, false, caller);
    v_main := (pgque._subscriber($1, $2, caller)).sub_id;
  end if;
  if $4 < '0' then
    perform pgque._fail('PQ005', format('dead_interval must not be negative, for consumer %I of queue %I', $2, $1),
      'Pass the time that a worker may be silent before another one gets its batch, such as ''5 minutes''.');
  elsif $4 is not null then
    perform pgque._take_over(pgque._subscriber($1, $2, caller), $3, $4);
  end if;
end
$$;

create or replace function pgque.receive_coop(
  queue_name text, consumer_name text, subconsumer_name text, max_return int default 100, dead_interval interval default null, max_bytes bigint default null,
  caller pgque.caller default current_user
) returns setof pgque.delivery
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._join($1, $2, $3, $5, caller);
  return query select * from pgque.receive($1, $2, $4, $3, max_bytes => $6);
end
$$;
comment on function pgque.receive_coop(text, text, text, int, interval, bigint, pgque.caller) is
  'Delivers the consumer''s next messages as one batch to one of several workers (subconsumers) that share it; each worker gets other messages. '
  'Registers the worker on first use. max_return: the most messages of a batch. dead_interval: if a worker was silent for longer, its batch is taken '
  'over first, under a new batch id. max_bytes: a new batch ends before its payloads and headers exceed this number of bytes, with at least one '
  'message. Errors: PQ001 no such queue; PQ004 invalid name; PQ005 max_return or max_bytes is below 1, or dead_interval is negative; PQ006 the '
  'consumer reads on its own.';

-- There is no argument caller, as in next_batch_custom() without a subconsumer.
create or replace function pgque.next_batch_custom(
  queue_name text, consumer_name text, subconsumer_name text, min_lag interval, min_count int, min_interval interval,
  dead_interval interval default null,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language sql as $$
  select pgque._join($1, $2, $3, $7);
  select * from pgque._next_batch($1, $2, $3, $4, $5, $6);
$$;
comment on function pgque.next_batch_custom(text, text, text, interval, int, interval, interval) is
  'Opens a batch with conditions on its end for one of several workers (subconsumers) that share a consumer; each worker gets other windows. '
  'Registers the worker on first use. NULL is no condition. min_lag: the batch ends at a tick that is at least this old. min_count, min_interval: it '
  'ends at the nearest tick so that it spans at least this number of messages or this time. dead_interval: if a worker was silent for longer, its '
  'batch is taken over first, under a new batch id. The result is batch_id (NULL if there is none), and the ids, times and event sequences of the '
  'batch''s two ticks. Errors: PQ001 no such queue; PQ004 invalid name; PQ005 dead_interval is negative; PQ006 the consumer reads on its own.';

create or replace function pgque.next_batch(
  queue_name text, consumer_name text, subconsumer_name text, dead_interval interval default null
) returns bigint
language sql as $$
  select pgque._join($1, $2, $3, $4);
  select pgque._open_batch($1, $2, $3, null, null, null);
$$;
comment on function pgque.next_batch(text, text, text, interval) is
  'Opens a batch for one of several workers (subconsumers) that share a consumer; each worker gets other windows. Registers the worker on first '
  'use. dead_interval: if a worker was silent for longer, its batch is taken over first, under a new batch id. Errors: PQ001 no such queue; PQ004 '
  'invalid name; PQ005 dead_interval is negative; PQ006 the consumer reads on its own.';
