-- ---------------------------------------------------------------------------
-- key_concurrency: how many messages of one key are leased at a time
-- ---------------------------------------------------------------------------

-- A lane is the messages of a consumer that share a key or a partition key.  _choose()
-- calls _leased_lanes() and moves messages of a busy lane to the retry queue.  _due()
-- calls _heads_of_lanes() to choose those of them that are next.
--
-- With key_concurrency 1 (keyed_order), the first message of a lane blocks the others until
-- it has an outcome, also while it waits for another attempt: so the order is kept.  Above 1,
-- only leased messages count.

-- Returns the lane of a message.  An index cannot hold long keys, so these are hashed.  Two
-- keys with one hash share a lane: fewer of their messages are leased at a time.
create or replace function pgque._lane(p_key text, p_extra1 text) returns text
language sql immutable as $$
  select case
    when pg_catalog.octet_length(coalesce(p_key, p_extra1)) > 1000 then pg_catalog.hashtextextended(coalesce(p_key, p_extra1), 0)::text
    else coalesce(p_key, p_extra1)
  end
$$;

-- Returns the lane and the worker of each leased message of a consumer.  A batch that was
-- delivered before the consumer had key_concurrency has no pos_keys.
create or replace function pgque._leased_lanes(p_sub pgque.subscriber, out lane text, out worker text) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_held  record;
begin
  for v_held in select h.lease, h.settled from pgque._open_batches(p_sub.sub_id) h loop
    if v_held.settled = 0 and (v_held.lease).pos_keys is not null then
      return query select k, (v_held.lease).pos_worker from pg_catalog.unnest((v_held.lease).pos_keys) k;
    else
      return query execute pg_catalog.format(
        'select l.lane, $1 from (%s) e cross join lateral pgque._lane(e.ev_key, e.ev_extra1) l (lane) where l.lane is not null',
        pgque._unsettled_sql(p_sub, v_held.lease))
      using (v_held.lease).pos_worker;
    end if;
  end loop;
  return query
    select r.ev_lane, r.ev_worker from pgque.retry_queue r
    where r.ev_owner = p_sub.sub_id and r.ev_batch is not null and r.ev_retry_after > pgque.clock() and r.ev_lane is not null;
end
$$;

-- Returns the messages of a batch in the retry queue whose lease expired, and whose lane has
-- as many leased without them as it may have: their lease cannot begin again.  No other
-- message of the consumer is leased until the transaction ends.
--
--   worker 1: has message 2, and its lease expires
--   worker 2: receives message 1 of the same key
--   worker 1: extends its lease: message 2 would be leased beside message 1
create or replace function pgque._without_room(p_sub pgque.subscriber, p_batch bigint) returns bigint[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now  timestamptz := pgque.clock();
begin
  -- A lease that ends just now may expire before the lock is there.
  if not exists (
    select from pgque.retry_queue r
    where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch and r.ev_retry_after <= v_now + interval '1 second' and r.ev_lane is not null)
  then
    return null;
  end if;
  perform from pgque.subscriber s where s.sub_id = p_sub.sub_id for no key update;
  v_now := pgque.clock();
  return array(
    select r.ev_id
    from (
      select r.ev_id, r.ev_lane, pg_catalog.row_number() over (partition by r.ev_lane order by r.ev_id) as place
      from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch and r.ev_retry_after <= v_now and r.ev_lane is not null
    ) r
    left join (select l.lane, count(*) as n from pgque._leased_lanes(p_sub) l group by 1) l on l.lane = r.ev_lane
    -- An old snapshot may not show what is leased.
    where pgque._old_snapshot() or r.place + coalesce(l.n, 0) > p_sub.sub_key_concurrency);
end
$$;

-- With key_concurrency: returns the first messages of each lane in the retry queue that are
-- due, as many as may be leased beside those that are.  First it chooses from the next 1000
-- messages that are due.  If these do not suffice, because most wait for a few busy lanes, it
-- reads the first messages of each lane, and those without one.
create or replace function pgque._heads_of_lanes(
  p_sub pgque.subscriber, p_max bigint, p_now timestamptz, p_but bigint[], p_from timestamptz default '-infinity'
)
returns pgque.retry_queue[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_out    text[] := array(select l.lane from pgque._leased_lanes(p_sub) l);
  v_order  boolean := p_sub.sub_key_concurrency = 1;   -- the first message of a lane is next, or none
  v_lanes  text[];     -- lanes whose first messages are chosen
  v_ids    bigint[];   -- messages that are chosen themselves
  v_more   boolean;
  v_rows   pgque.retry_queue[];
begin
  -- As in _choose(), what is leased of a lane counts as its first messages.
  select count(*) = 1000 + coalesce(pg_catalog.cardinality(v_out), 0), pg_catalog.array_agg(distinct d.ev_lane) filter (where d.ev_lane is not null and v_order and d.ev_id > 0),
    pg_catalog.array_agg(d.ev_id) filter (where d.ev_lane is null or not v_order and d.ev_id > 0 and d.place <= p_sub.sub_key_concurrency)
  into v_more, v_lanes, v_ids
  from (
    select d.*, pg_catalog.row_number() over (partition by d.ev_lane, d.ev_id in (select pg_catalog.unnest((select p_but))) order by d.ev_id) as place
    from (
      (select r.ev_id, r.ev_lane from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_retry_after >= p_from and r.ev_retry_after <= p_now order by r.ev_retry_after limit 1000)
      union all
      select 0, o.lane from pg_catalog.unnest(v_out) o (lane)
    ) d
  ) d;
  loop
    -- One index lookup for each lane and for each message, whatever the planner expects.
    v_rows := array(
      select pgque._slim_retry(r)
      from (
        select r.*
        from (
          select h.place
          from (
            select l.lane, p_sub.sub_key_concurrency - sum(l.leased) as room
            from (select pg_catalog.unnest(v_lanes) as lane, 0 as leased union all select pg_catalog.unnest(v_out), 1) l
            group by 1
            having min(l.leased) = 0 and sum(l.leased) < p_sub.sub_key_concurrency
          ) l
          cross join lateral (
            select h.ctid as place
            from pgque.retry_queue h
            where h.ev_owner = p_sub.sub_id and h.ev_lane = l.lane
              and (v_order or h.ev_retry_after <= p_now and (h.ev_id in (select pg_catalog.unnest((select p_but)))) is not true)
            order by h.ev_id
            limit l.room) h
          union all
          select f.place
          from pg_catalog.unnest(v_ids) i (id)
          cross join lateral (select f.ctid as place from pgque.retry_queue f where f.ev_owner + 0 = p_sub.sub_id and f.ev_id = i.id offset 0) f
        ) found
        join pgque.retry_queue r on r.ctid = found.place
        where r.ev_retry_after <= p_now and (r.ev_id in (select pg_catalog.unnest((select p_but)))) is not true
        order by r.ev_batch is null, r.ev_id
        limit p_max
        for update of r skip locked
      ) r);
    exit when not v_more or pg_catalog.cardinality(v_rows) = p_max;
    v_more := false;
    v_lanes := array(
      with recursive lane (lane) as (
        (select r.ev_lane from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane is not null order by r.ev_lane limit 1)
        union all
        select (
          select r.ev_lane from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane > l.lane order by r.ev_lane limit 1)
        from lane l
        where l.lane is not null
      )
      select l.lane from lane l where l.lane is not null);
    v_ids := array(
      select r.ev_id from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_lane is null and r.ev_retry_after >= p_from and r.ev_retry_after <= p_now
      order by r.ev_retry_after
      limit 1000);
  end loop;
  return v_rows;
end
$$;

-- Returns the lanes of a consumer for which messages wait that are due: those that have as
-- many leased as they may have, and with 1 those whose first message waits for another
-- attempt.
create or replace function pgque._waiting_lanes(p_sub pgque.subscriber, out lane text, out messages bigint) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now  timestamptz := pgque.clock();
begin
  return query
    select w.lane, w.messages
    from (
      select r.ev_lane as lane, count(*) filter (where r.ev_retry_after <= v_now) as messages,
        min(r.ev_id) filter (where r.ev_retry_after > v_now) < min(r.ev_id) filter (where r.ev_retry_after <= v_now) as is_behind
      from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_lane is not null
      group by 1
    ) w
    left join (select l.lane, count(*) as n from pgque._leased_lanes(p_sub) l group by 1) l on l.lane = w.lane
    where p_sub.sub_keyed and w.messages > 0 and (l.n >= p_sub.sub_key_concurrency or p_sub.sub_key_concurrency = 1 and w.is_behind);
end
$$;

-- Returns how many messages wait for the keys of each worker's messages.
create or replace function pgque._waiting_for_workers(p_sub pgque.subscriber, out worker text, out messages bigint) returns setof record
language sql as $$
  select l.worker, sum(w.messages)::bigint
  from pgque._waiting_lanes(p_sub) w
  join (select distinct l.lane, l.worker from pgque._leased_lanes(p_sub) l where p_sub.sub_keyed) l on l.lane = w.lane
  group by 1
$$;

-- Returns key_concurrency as subscribe() and set_key_concurrency() get it; PQ005 if it is
-- not valid.
create or replace function pgque._need_key_concurrency(p_queue text, p_consumer text, p_limit int, p_order boolean default null) returns int
language plpgsql as $$
begin
  if p_limit < 1 then
    perform pgque._fail('PQ005', pg_catalog.format('key_concurrency must be at least 1, for consumer %I of queue %I', p_consumer, p_queue),
      'Pass how many messages of one key may be leased at a time: 1 keeps their order. Null is no limit.');
  elsif p_order and p_limit > 1 then
    perform pgque._fail('PQ005', pg_catalog.format('keyed_order is key_concurrency 1, and not %s, for consumer %I of queue %I', p_limit, p_consumer, p_queue),
      'Pass one of them. With more than one message of a key at a time, their order is not kept.');
  end if;
  return coalesce(p_limit, case when p_order then 1 end);
end
$$;

-- Stores key_concurrency of a consumer whose row is locked.
create or replace function pgque._set_key_concurrency(p_sub pgque.subscriber, p_limit int) returns void
language sql as $$
  update pgque.subscriber s
  set sub_role = 'pool', sub_keyed = p_limit is not null, sub_key_concurrency = coalesce(p_limit, 1)
  where s.sub_id = p_sub.sub_id
$$;

-- Stores key_concurrency of a consumer that was just subscribed.  One that was subscribed
-- before must have this limit.
create or replace function pgque._subscribe_keyed(p_queue text, p_consumer text, p_new boolean, p_limit int, p_caller name) returns void
language plpgsql as $$
declare
  v_sub  pgque.subscriber := pgque._subscriber(p_queue, p_consumer, p_caller);
begin
  if p_new then
    perform pgque._set_key_concurrency(v_sub, p_limit);
  elsif pgque._key_concurrency(v_sub) is distinct from p_limit then
    perform pgque._fail('PQ006', pg_catalog.format('consumer %I of queue %I is subscribed with key_concurrency %s', p_consumer, p_queue,
        coalesce(pgque._key_concurrency(v_sub)::text, 'null')),
      pg_catalog.format('To change it: select pgque.set_key_concurrency(%L, %L, %s);', p_queue, p_consumer, p_limit));
  end if;
end
$$;

-- Returns key_concurrency of a consumer; null: no limit.
create or replace function pgque._key_concurrency(p_sub pgque.subscriber) returns int
language sql immutable as $$ select case when p_sub.sub_keyed then p_sub.sub_key_concurrency end $$;

create or replace function pgque.set_key_concurrency(queue_name text, consumer_name text, key_concurrency int, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub  pgque.subscriber := pgque._subscriber($1, $2, caller);
begin
  perform pgque._need_key_concurrency($1, $2, $3);
  perform pgque._need_read_committed('to set key_concurrency');
  perform pgque._lock_subscriber(v_sub.sub_id);
  v_sub := pgque._subscriber($1, $2, caller);
  if v_sub.sub_role <> 'pool' then
    perform pgque._fail('PQ006', format('consumer %I of queue %I has no workers', $2, $1),
      case when v_sub.sub_role = 'normal' then format('Turn it into a pool of workers first: select pgque.share_consumer(%L, %L);', $1, $2)
        else 'Subscribe another consumer. This one has subconsumers.' end);
  elsif pgque._key_concurrency(v_sub) is not distinct from $3 then
    return 0;
  end if;
  perform pgque._set_key_concurrency(v_sub, $3);
  perform pgque._record_action('set_key_concurrency', $1, jsonb_build_object('consumer_name', $2, 'key_concurrency', $3));
  return 1;
end
$$;
comment on function pgque.set_key_concurrency(text, text, int, pgque.caller) is
  'Sets how many messages of one key the workers of a consumer have at most, all together. A message without key counts by its partition_key. With '
  '1, the messages of a key are delivered in order (keyed_order). NULL: no limit. The limit holds for the next deliveries, and messages that are '
  'leased count. Returns 1, or 0 if the limit was this already. Errors: PQ001 no such queue; PQ005 the limit is below 1; PQ006 the consumer has no '
  'workers; PQ011 not subscribed; 25000 not READ COMMITTED.';
