-- ---------------------------------------------------------------------------
-- order: messages of one key one at a time (keyed_order)
-- ---------------------------------------------------------------------------

-- A lane is the messages of a consumer that share a key or a partition key.  _choose()
-- calls _leased_lanes() and moves messages of a busy lane to the retry queue.  _due()
-- calls _heads_of_lanes() to choose those of them that are next.

-- Returns the key whose order a pool keeps.  An index cannot hold long keys, so these are
-- hashed.  Two keys with one hash share a lane: they are ordered more than they need.
create or replace function pgque._lane(p_sub pgque.subscriber, p_key text, p_extra1 text) returns text
language sql immutable as $$
  select case
    when not p_sub.sub_keyed then null
    when pg_catalog.octet_length(coalesce(p_key, p_extra1)) > 1000 then pg_catalog.hashtextextended(coalesce(p_key, p_extra1), 0)::text
    else coalesce(p_key, p_extra1)
  end
$$;

-- Returns the lanes of a consumer's messages that came from the log and are leased.
create or replace function pgque._leased_lanes(p_sub pgque.subscriber) returns text[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_held   record;
  v_some   text[];
  v_lanes  text[] := '{}';
begin
  for v_held in select h.lease, h.settled from pgque._open_batches(p_sub.sub_id) h loop
    v_some := (v_held.lease).pos_keys;
    if v_held.settled > 0 then
      execute pg_catalog.format('select array_agg(pgque._lane($1, e.ev_key, e.ev_extra1)) from (%s) e', pgque._unsettled_sql(p_sub, v_held.lease))
      into v_some using p_sub;
    end if;
    v_lanes := v_lanes || v_some;
  end loop;
  return array_remove(v_lanes, null);
end
$$;

-- With keyed order: returns the first message of each lane in the retry queue that has
-- none leased, if it is due.  It reads the messages that are due.  If these are many,
-- and most are not the first of their lane, it reads each lane, and the messages
-- without one.
create or replace function pgque._heads_of_lanes(
  p_sub pgque.subscriber, p_max bigint, p_now timestamptz, p_but bigint[], p_from timestamptz default '-infinity'
)
returns pgque.retry_queue[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_out    text[];
  v_lanes  text[];
  v_free   bigint[];   -- messages without a lane
  v_count  bigint;
begin
  -- The leased message of a lane may have been sent later than the first one.
  v_out := pgque._leased_lanes(p_sub) || array(
    select r.ev_lane from pgque.retry_queue r
    where r.ev_owner = p_sub.sub_id and r.ev_batch is not null and r.ev_retry_after > p_now and r.ev_lane is not null);
  select count(*), pg_catalog.array_agg(distinct r.ev_lane) filter (where r.ev_lane is not null), pg_catalog.array_agg(r.ev_id) filter (where r.ev_lane is null)
  into v_count, v_lanes, v_free
  from (
    select r.ev_id, r.ev_lane from pgque.retry_queue r
    where r.ev_owner = p_sub.sub_id and r.ev_retry_after >= p_from and r.ev_retry_after <= p_now order by r.ev_retry_after limit 1000) r;
  if v_count = 1000 then
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
    v_free := array(
      select r.ev_id from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_lane is null and r.ev_retry_after >= p_from and r.ev_retry_after <= p_now
      order by r.ev_retry_after
      limit 1000);
  end if;
  -- One index lookup for each key and for each message, whatever the planner expects.
  return array(
    select pgque._slim_retry(r)
    from (
      select r.*
      from (
        select h.place
        from (select pg_catalog.unnest(v_lanes) except select pg_catalog.unnest(v_out)) l (lane)
        cross join lateral (
          select h.ctid as place from pgque.retry_queue h where h.ev_owner = p_sub.sub_id and h.ev_lane = l.lane order by h.ev_id limit 1) h
        union all
        select f.place
        from pg_catalog.unnest(v_free) i (id)
        cross join lateral (select f.ctid as place from pgque.retry_queue f where f.ev_owner + 0 = p_sub.sub_id and f.ev_id = i.id offset 0) f
      ) found
      join pgque.retry_queue r on r.ctid = found.place
      where r.ev_retry_after <= p_now and (r.ev_id in (select pg_catalog.unnest((select p_but)))) is not true
      order by r.ev_batch is null, r.ev_id
      limit p_max
      for update of r skip locked
    ) r);
end
$$;
