-- ---------------------------------------------------------------------------
-- leases: release, extend and reclaim batches, share a consumer
-- ---------------------------------------------------------------------------

-- Returns the consumer of a pool's batch; PQ005 for any other batch, whose lease has no
-- end.
create or replace function pgque._pool_of(p_batch bigint) returns pgque.subscriber
language plpgsql as $$
declare
  v_sub  pgque.subscriber := pgque._batch_owner(p_batch);
begin
  if v_sub.sub_role <> 'pool' then
    perform pgque._fail('PQ005', pg_catalog.format('batch %s is not leased', p_batch),
      'Receive with a worker to get a lease. A consumer without workers keeps its batch until it finishes it.');
  end if;
  return v_sub;
end
$$;

create or replace function pgque.release(batch_id bigint, msg_ids bigint[] default null, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return (select count(*) from pgque._set_outcomes(pgque._batch_for(caller, $1), $2, 'release', null, null, false) f where f.ok);
end
$$;
comment on function pgque.release(bigint, bigint[], pgque.caller) is
  'Releases messages of a batch, all by default, and returns their number. They can be received at once, by any worker of the consumer. A release is '
  'no failure: retry_count stays; receive_count counts each delivery. A consumer without workers acknowledges the batch afterwards, and receives the '
  'messages in another one.';

create or replace function pgque.set_visibility(batch_id bigint, visibility_timeout interval, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  if pgque._not_negative(coalesce($2, '-1 second'), 'visibility_timeout', $1) = '0' then
    perform pgque._pool_of(pgque._batch_for(caller, $1));
    return pgque.release($1, null, caller);
  end if;
  return pgque._lease_until(pgque._batch_for(caller, $1), $2, false);
end
$$;
comment on function pgque.set_visibility(bigint, interval, pgque.caller) is
  'Earlier form of extend(): sets when the lease on a worker''s batch expires, counted from now, so that it can also shorten the lease; 0 releases '
  'the batch, as release() does. Returns the number of messages still leased, 0 if the batch is lost. Errors: PQ005 visibility_timeout is NULL, '
  'negative or above 100 years.';

create or replace function pgque.extend(batch_id bigint, by interval, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._not_negative(coalesce($2, '-1 second'), 'the time to add', $1);
  return pgque._lease_until(pgque._batch_for(caller, $1), $2, true);
end
$$;
comment on function pgque.extend(bigint, interval, pgque.caller) is
  'Extends the lease on a worker''s batch by an interval; it never shortens the lease. Returns the number of messages still leased, 0 if the batch is '
  'lost. Errors: PQ005 the interval is negative or above 100 years.';

-- Moves the end of a lease: to p_span from now, or, to extend it, by p_span.
create or replace function pgque._lease_until(p_batch bigint, p_span interval, p_extend boolean) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._pool_of(p_batch);
  v_now    timestamptz := pgque.clock();
  v_state  record;
  v_until  timestamptz;
  v_full   bigint[];
  v_held   int;
begin
  perform pgque._lock_batch(v_sub, p_batch) where v_sub.sub_id is not null;
  select s.* into v_state from pgque._states(v_sub.sub_id, array[p_batch]) s;
  if v_sub.sub_keyed then
    v_full := pgque._without_room(v_sub, p_batch);
  end if;
  with found as materialized (
    select e.ctid from pgque.retry_queue e
    where e.ev_owner = v_sub.sub_id and e.ev_batch = p_batch and (e.ev_id = any (v_full)) is not true
    order by e.ev_id
    for update skip locked
  )
  update pgque.retry_queue r set ev_retry_after = case when p_extend then greatest(r.ev_retry_after, v_now) else v_now end + p_span
  from found f
  where r.ctid = f.ctid;
  get diagnostics v_held = row_count;
  if v_state.place = 'log' then
    v_until := case when p_extend then greatest(v_state.until, v_now) else v_now end + p_span;
    if p_extend then
      perform pgque._record(p_batch, 'extended', array[v_state.extended + 1], v_until);   -- 40001 after another one that this snapshot does not show
    end if;
    if p_extend and not pgque._old_snapshot() then
      v_held := v_held + (v_state.lease).pos_done_count - v_state.settled;
    else
      -- A lease that may end earlier is checked in the retry queue.  And an old snapshot
      -- may not show that the batch was closed: to move it finds it out.
      v_held := v_held + pgque._move_to_retry(v_sub, v_state.lease, v_until);
    end if;
  end if;
  return v_held;
end
$$;

-- Releases the messages of a batch, so that any worker may receive them at once.  The
-- caller holds the batch's lock.
create or replace function pgque._release_batch(p_sub pgque.subscriber, p_batch bigint) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_state  record;
  v_fresh  bigint := 0;
  v_count  bigint;
begin
  select s.* into v_state from pgque._states(p_sub.sub_id, array[p_batch]) s;
  if v_state.place = 'log' then
    v_fresh := pgque._move_to_retry(p_sub, v_state.lease, pgque.clock(), 0);
  end if;
  -- A maintenance session that has one of them locked may roll back: this waits for it.
  update pgque.retry_queue r set ev_batch = null, ev_worker = null, ev_retry_after = pgque.clock()
  where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch;
  get diagnostics v_count = row_count;
  return v_fresh + v_count;
end
$$;

-- Returns the batches of a consumer that workers hold, also those whose lease expired.
create or replace function pgque._batches_of(p_sub int) returns setof bigint
language sql set enable_seqscan = off set jit = off as $$
  select h.token from pgque._open_batches(p_sub) h
  union
  select r.ev_batch from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_batch is not null
$$;

create or replace function pgque.reclaim(
  queue_name text, consumer_name text, older_than interval default '0', msg_id bigint default null, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber((pgque._queue($1, caller, 'admin')).queue_name, $2);
  v_now    timestamptz := pgque.clock();
  v_token  bigint;
  v_count  int := 0;
begin
  if $3 is null then
    perform pgque._fail('PQ005', format('older_than must not be null, for consumer %I of queue %I', $2, $1),
      'Pass the age of the batches to release, such as ''10 minutes''. ''0'' releases all of them.');
  end if;
  if $4 is not null then
    v_count := (
      select count(*)
      from pgque._batches_with(v_sub.sub_id, $4) b (id)
      cross join lateral pgque._lease(v_sub.sub_id, b.id) l
      cross join lateral pgque._set_outcomes(b.id, array[$4], 'release', null, null, true) o
      where v_sub.sub_role = 'pool' and (l.pos_time > v_now - $3 and l.pos_time <= v_now) is not true and o.ok);
    perform pgque._record_action('reclaim', $1, jsonb_build_object('consumer_name', $2, 'older_than', $3, 'msg_id', $4)) where v_count > 0;
    return v_count;
  end if;
  perform pgque._lock_subscriber(v_sub.sub_id);
  -- A worker that is just finishing its batch keeps it.
  foreach v_token in array pgque._try_lock_batches(v_sub, array(
    select b.id
    from pgque._batches_of(v_sub.sub_id) b (id)
    cross join lateral pgque._lease(v_sub.sub_id, b.id) l
    where v_sub.sub_role = 'pool' and (l.pos_time > v_now - $3 and l.pos_time <= v_now) is not true), 500)
  loop
    v_count := v_count + (pgque._release_batch(v_sub, v_token) > 0)::int;
  end loop;
  perform pgque._record_action('reclaim', $1, jsonb_build_object('consumer_name', $2, 'older_than', $3, 'batches', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.reclaim(text, text, interval, bigint, pgque.caller) is
  'Releases the batches of a consumer''s workers that were received longer ago than older_than, whether or not their leases expired. Returns the '
  'number of batches. msg_id: only this message is released, and the call returns 1, or 0 if no worker has it. While workers finish batches, one '
  'call releases at most 500: call it again. Errors: PQ001 no such queue; PQ005 older_than is NULL; PQ011 not subscribed.';

create or replace function pgque.share_consumer(queue_name text, consumer_name text, caller pgque.caller default current_user) returns int
language sql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$ select pgque._change_role($1, $2, 'normal', 'pool', caller) $$;
comment on function pgque.share_consumer(text, text, pgque.caller) is
  'Turns a consumer that reads on its own into a pool of workers: from now on, receive with worker => name. Its position and pending retries stay. '
  'An open batch goes to the workers, and its batch id is invalid. Returns 1, or 0 if it is a pool already. Errors: PQ001 no such queue; PQ006 it '
  'has subconsumers; PQ011 not subscribed; 25000 not READ COMMITTED.';

create or replace function pgque.unshare_consumer(queue_name text, consumer_name text, caller pgque.caller default current_user) returns int
language sql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$ select pgque._change_role($1, $2, 'pool', 'normal', caller) $$;
comment on function pgque.unshare_consumer(text, text, pgque.caller) is
  'Turns a pool of workers into a consumer that reads on its own: from now on, receive without worker. Its position and pending retries stay. '
  'Messages that workers hold are redelivered, and their batch ids are invalid. Returns 1, or 0 if it reads on its own already. Errors: PQ001 no '
  'such queue; PQ006 it has subconsumers, or key_concurrency; PQ011 not subscribed; 25000 not READ COMMITTED; 55P03 a worker is finishing a batch.';

create or replace function pgque._change_role(p_queue text, p_consumer text, p_from text, p_to text, p_caller name) returns int
language plpgsql as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber(p_queue, p_consumer, p_caller);
  v_token  bigint;
  v_open   bigint[];
begin
  perform pgque._need_read_committed('to change who reads a consumer');
  perform pgque._lock_subscriber(v_sub.sub_id);
  v_sub := pgque._subscriber(p_queue, p_consumer, p_caller);
  if v_sub.sub_role = p_to then
    return 0;
  elsif v_sub.sub_role <> p_from or v_sub.sub_keyed then
    perform pgque._fail('PQ006', pg_catalog.format('consumer %I of queue %I has %s', p_consumer, p_queue,
        coalesce('key_concurrency ' || pgque._key_concurrency(v_sub), 'subconsumers')),
      case when v_sub.sub_keyed then pg_catalog.format('Remove this limit first: select pgque.set_key_concurrency(%L, %L, null);', p_queue, p_consumer)
        else 'Subscribe another consumer.' end);
  end if;
  v_open := array(select pgque._batches_of(v_sub.sub_id));
  if pg_catalog.cardinality(pgque._try_lock_batches(v_sub, v_open, null)) < pg_catalog.cardinality(v_open) then
    perform pgque._fail('lock_not_available', pg_catalog.format('a batch of consumer %I of queue %I is being finished', p_consumer, p_queue), 'Try again.');
  end if;
  perform pgque._release_batch(v_sub, o.token), pgque._record(o.token, 'closed') from pg_catalog.unnest(v_open) o (token);
  perform pgque._end_batches(v_sub);
  update pgque.subscriber s set sub_role = p_to, sub_offsets = false where s.sub_id = v_sub.sub_id;
  perform pgque._record_action(case p_to when 'pool' then 'share_consumer' else 'unshare_consumer' end, p_queue, pg_catalog.jsonb_build_object('consumer_name', p_consumer));
  return 1;
end
$$;

-- Stores the position of a consumer without open batches.
create or replace function pgque._end_batches(p_sub pgque.subscriber) returns void
language plpgsql as $$
declare
  v_pos  pgque.position := pgque._next_from(pgque._position(p_sub.sub_id));
begin
  v_pos.pos_open := '{}';
  v_pos.pos_lapse := null;
  perform pgque._append_position(v_pos);
end
$$;
