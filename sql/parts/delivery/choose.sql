-- ---------------------------------------------------------------------------
-- choose: which messages of a slice, and of the retry queue, are delivered
-- ---------------------------------------------------------------------------

-- Returns whether a message of a window that is open may have to be left out or kept for later.
-- If one has a key or a ttl, or was cancelled, then its transaction, or an earlier one, has
-- noted that.
create or replace function pgque._must_choose(p_sub pgque.subscriber, p_pos pgque.position) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return p_sub.sub_keyed
    or exists (select from pgque.queue q where q.queue_id = p_sub.sub_queue and (q.queue_keyed or q.queue_expiring))
    or exists (
      select from pgque.queue_option o
      where o.opt_queue = p_sub.sub_queue and (o.opt_name in ('key', 'ttl') or o.opt_name = 'cancelled' and p_pos.pos_tick < p_pos.pos_high));
end
$$;

-- Chooses from the next messages of a window, at most p_max, if _must_choose().  A message
-- whose key or lane is busy goes to the retry queue.  Purged, cancelled and expired messages
-- are left out.  The slice ends at the last message that was checked.  ids are the messages
-- to deliver, and rows is the query for them.  p_passed is how many messages the caller has
-- passed since it last found one to deliver: the next slice is as long.  With null the slice
-- is the whole window, for a caller that reads the rest of it without this function.  p_bytes
-- limits the size of the messages to deliver; there is at least one.
create or replace function pgque._choose(
  p_queue pgque.queue, p_sub pgque.subscriber, p_pos pgque.position, p_token bigint, p_max bigint, p_passed bigint, p_bytes bigint default null,
  out pos pgque.position, out ids bigint[], out rows text
)
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now    timestamptz := pgque.clock();
  -- Each key takes a lock.  Messages that are not delivered are checked quickly.
  v_look   bigint := case
    when p_passed is not null then greatest(case when pgque._keyed(p_queue) then 200 else greatest(1000, least(p_max, 10000)) end, least(p_passed / 4, 20000))
  end;
  v_rows   pgque.event[];
  v_more   boolean;
  v_busy   bigint[] := '{}';
  v_gone   bigint[] := '{}';
  v_claim  record;
  v_ended  text := case when p_pos.pos_tick < p_pos.pos_high then pgque._cancelled_sql(p_queue.queue_id, p_sub.sub_id) end;
  v_out    text[];
  v_found  record;
  v_fit    bigint;
begin
  pos := p_pos;
  pos.pos_done_count := 0;
  execute pg_catalog.format('select array_agg(%s order by e.ev_id) from (select * from (%s) e order by e.ev_id limit %L) e',
    pgque._slim(case when p_sub.sub_keyed then 'pgque._lane(e.ev_key, e.ev_extra1)' else 'null' end),
    pgque._slice_sql(p_sub, p_pos, case when p_passed is null then pg_catalog.format(' and (e.ev_key is not null or e.ev_expires <= %L::timestamp at time zone ''UTC''%s)', v_now at time zone 'UTC', ' or ' || v_ended) else '' end, v_look),
    v_look + 1)
  into v_rows;
  if v_rows is null then
    return;
  end if;
  v_more := pg_catalog.cardinality(v_rows) > v_look;
  if v_more then
    v_rows := v_rows[:v_look];
  end if;
  if pgque._keyed(p_queue) then
    v_claim := pgque._claim(p_queue, v_rows);
    v_rows := v_claim.rows;
    v_busy := v_claim.busy;
    v_gone := v_claim.gone;
  end if;
  if v_ended is not null then
    execute pg_catalog.format('select $1 || array_agg(e.ev_id) from pg_catalog.unnest($2) e where %s', v_ended) into v_gone using v_gone, v_rows;
  end if;
  if p_sub.sub_keyed then
    v_out := array(select l.lane from pgque._leased_lanes(p_sub) l);
  end if;
  loop
    with looked as materialized (
      select e.ev_id, e.ev_extra1 as lane,
        case when e.ev_id = any (v_gone) then 'gone' when e.ev_expires <= v_now then 'expired' when e.ev_id = any (v_busy) then 'busy' else 'good' end as what
      from pg_catalog.unnest(v_rows) e
    ),
    -- The leased messages of a lane count as its first ones. If the order is kept, a message
    -- that waits counts too.
    placed as (
      select l.* from looked l
      union all
      select 0, o.lane, 'out' from pg_catalog.unnest(v_out) o (lane)
      union all
      select distinct 0, l.lane, 'out'
      from looked l
      where p_sub.sub_key_concurrency = 1 and l.what = 'good' and exists (select from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane = l.lane)
    ),
    judged as (
      select p.ev_id, p.lane,
        case
          when p.what = 'good' and p.lane is not null
            and pg_catalog.row_number() over (partition by p.lane, p.what in ('gone', 'expired') order by p.ev_id) > p_sub.sub_key_concurrency then 'busy'
          else p.what
        end as what
      from placed p
    ),
    counted as (
      select j.*, count(*) filter (where j.what = 'good') over (order by j.ev_id rows unbounded preceding) as n from judged j where j.what <> 'out'
    )
    select array_agg(c.ev_id order by c.ev_id) filter (where c.what = 'good') as good,
      array_agg(c.ev_id order by c.ev_id) filter (where c.what <> 'good') as skip,
      array_agg(c.ev_id order by c.ev_id) filter (where c.what = 'busy') as aside,
      array_agg(c.ev_id order by c.ev_id) filter (where c.what in ('good', 'expired')) as sealed,
      count(*) filter (where c.what = 'expired') as expired,
      array_agg(c.lane) filter (where c.what = 'good' and c.lane is not null) as lanes,
      max(c.ev_id) as last, count(*) as looked
    into v_found
    from counted c
    -- Messages after the last one stay in the window.
    where c.n < p_max or c.n = p_max and c.what = 'good';
    exit when p_bytes is null or pg_catalog.cardinality(v_found.good) > 1 is not true;
    pos.pos_last_id := v_found.last;
    execute pg_catalog.format(
      'select count(*) from (select sum(pgque._size(e.ev_data, e.ev_bytes, e.ev_headers)) over (order by e.ev_id) as bytes from (%s) e) s where s.bytes <= $2',
      pgque._renewed_sql(p_queue.queue_id, pgque._slice_sql(p_sub, pos, ' and pgque._contains($1, e.ev_id)')))
    into v_fit using v_found.good, p_bytes;
    exit when v_fit = pg_catalog.cardinality(v_found.good);
    p_max := greatest(v_fit, 1);
    p_bytes := null;
  end loop;
  pos.pos_last_id := case when v_more or v_found.looked < pg_catalog.cardinality(v_rows) then v_found.last end;
  pos.pos_done_count := v_found.looked;
  pos.pos_keys := case when p_sub.sub_keyed then coalesce(v_found.lanes, '{}') end;   -- null: not known
  ids := v_found.good;
  if v_found.aside is not null then
    execute pg_catalog.format(
      'insert into pgque.retry_queue select (pgque._as_retry(e, $1, 0, $2, null, null)).* from (%s) e on conflict do nothing',
      pgque._renewed_sql(p_queue.queue_id, pgque._slice_sql(p_sub, pos, ' and pgque._contains($3, e.ev_id)')))
    using p_sub, v_now, v_found.aside;
  end if;
  perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'expired', v_found.expired);
  if pgque._keyed(p_queue) then
    -- Expired messages too: an older snapshot may not show that a body was replaced.
    perform pgque._seal(p_queue.queue_id, array(
      select r from pg_catalog.unnest(v_rows) r
      where ((select v_found.sealed))[pg_catalog.width_bucket(r.ev_id, (select v_found.sealed))] = r.ev_id));   -- as _contains()
  end if;
  if v_found.skip is not null and (ids is not null or p_passed is null) then
    perform pgque._record(p_token, 'outcome', v_found.skip);
  end if;
  if ids is not null then
    rows := pgque._delivery_sql(pgque._renewed_sql(p_queue.queue_id, pgque._slice_sql(p_sub, pos)), ' where ($3)[pg_catalog.width_bucket(e.ev_id, $3)] = e.ev_id');
  end if;
end
$$;

-- Returns a row of the retry queue without the columns that may be large.
create or replace function pgque._slim_retry(p_row pgque.retry_queue) returns pgque.retry_queue
language sql immutable as $$
  select row(p_row.ev_retry_after, p_row.ev_queue, p_row.ev_id, p_row.ev_time, p_row.ev_txid, p_row.ev_owner, p_row.ev_retry,
    null, null, null, null, null, null, null, p_row.ev_key, null, p_row.ev_expires, null,
    p_row.ev_receives, p_row.ev_batch, p_row.ev_worker, p_row.ev_lane)::pgque.retry_queue
$$;

-- Returns an event as a row of the retry queue for a subscriber.
create or replace function pgque._as_retry(
  p_event pgque.event, p_sub pgque.subscriber, p_receives int, p_due timestamptz, p_batch bigint, p_worker text
) returns pgque.retry_queue
language sql volatile as $$
  select row(p_due, p_sub.sub_queue, p_event.ev_id, p_event.ev_time, p_event.ev_txid, coalesce(p_sub.sub_main, p_sub.sub_id), p_event.ev_retry,
    p_event.ev_type, p_event.ev_data, p_event.ev_extra1, p_event.ev_extra2, p_event.ev_extra3, p_event.ev_extra4,
    p_event.ev_headers, p_event.ev_key, p_event.ev_bytes, p_event.ev_expires, p_event.ev_error,
    p_receives, p_batch, p_worker, pgque._lane(p_event.ev_key, p_event.ev_extra1))::pgque.retry_queue
$$;

-- Returns how many messages with an expired lease are delivered together: fewer each
-- time, and on the last attempt each one alone.  With 5 attempts and 100 messages these
-- are 100, 22, 5, 1.  So a message that kills its worker is alone at last.  A message
-- that was requeued while it was leased counts from zero.
--
-- A worker that dies takes all that it holds with it.  So a message of which a delivery
-- was lost gets its last attempt alone in its worker: the worker holds nothing else, and
-- receives nothing until it is done (see _begin_delivery).  Otherwise messages that were delivered
-- beside poison would use up their attempts with it.
create or replace function pgque._redelivery_size(p_receives int, p_attempts int, p_max bigint) returns bigint
language sql immutable as $$
  select case
    when least(p_attempts, 5) - greatest(p_receives, 1) <= 1 then 1
    else pg_catalog.ceil(pg_catalog.power(p_max, (least(p_attempts, 5) - greatest(p_receives, 1) - 1)::numeric / (least(p_attempts, 5) - 2)))::bigint
  end
$$;

-- Returns whether a message that is due has its last attempt before it, and a delivery of
-- it was lost.  A delivery that ends with a nack adds one to both numbers.
create or replace function pgque._may_be_poison(p_receives int, p_retry int, p_attempts int) returns boolean
language sql immutable as $$ select p_receives = p_attempts - 1 and p_receives > coalesce(p_retry, 0) $$;

-- Returns whether a worker of a pool holds messages.
create or replace function pgque._worker_has_messages(p_sub pgque.subscriber, p_worker text, p_now timestamptz) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return exists (
      select from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_batch is not null and r.ev_worker = p_worker and r.ev_retry_after > p_now)
    or exists (select from pgque._open_batches(p_sub.sub_id) h where (h.lease).pos_worker = p_worker and h.until > p_now);
end
$$;

-- Locks messages of a consumer in the retry queue that are due, without those in p_but.
-- p_receives null: any of them; -1: those without an expired lease; else those with an
-- expired lease and p_receives deliveries.  None is due before p_from.
create or replace function pgque._due(p_sub pgque.subscriber, p_max bigint, p_now timestamptz, p_but bigint[], p_receives int, p_from timestamptz default '-infinity')
returns pgque.retry_queue[]
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  if p_sub.sub_keyed then
    return array(
      select r from pg_catalog.unnest(pgque._heads_of_lanes(p_sub, p_max, p_now, p_but, p_from)) r
      where p_receives is null or p_receives = case when r.ev_batch is null then -1 else r.ev_receives end);
  end if;
  return array(
    select pgque._slim_retry(r)
    from (
      select r.* from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_retry_after >= p_from and r.ev_retry_after <= p_now
        and (r.ev_id in (select pg_catalog.unnest((select p_but)))) is not true
        and (p_receives is null or p_receives = case when r.ev_batch is null then -1 else r.ev_receives end)
      order by r.ev_retry_after, r.ev_id
      limit p_max
      for update skip locked
    ) r);
end
$$;

-- Leases messages in the retry queue that are due, and returns their number.  Messages
-- that expired, or whose attempts are used up, are removed instead.  A message with an
-- expired lease may be poison: other messages are not delivered with it.  Returns null
-- if the worker has to finish what it holds first.  It waits for a visibility timeout at
-- most, since a name that many processes share may always hold something.  No message is
-- due before p_from.
create or replace function pgque._lease_retries(
  p_queue pgque.queue, p_sub pgque.subscriber, p_token bigint, p_max bigint, p_worker text, p_until timestamptz, p_bytes bigint default null,
  p_from timestamptz default '-infinity'
) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now       timestamptz := pgque.clock();
  v_attempts  int := case when p_sub.sub_role = 'pool' then p_queue.queue_max_receive_attempts else 2147483647 end;
  v_rows      pgque.retry_queue[];
  v_doomed    pgque.retry_queue[];
  v_good      pgque.retry_queue[];
  v_ids       bigint[];
  v_busy      bigint[] := '{}';
  v_lapsed    boolean;
  v_piece     bigint;
  v_look      bigint;
begin
  for v_try in 0..99 loop
    -- The first message decides how many are delivered together.  The others stay
    -- unlocked, since their holder may be about to acknowledge them.
    v_rows := pgque._due(p_sub, 1, v_now, v_busy, null, p_from);
    exit when pg_catalog.cardinality(v_rows) = 0;
    v_lapsed := v_rows[1].ev_batch is not null;
    if p_sub.sub_role = 'pool' and pgque._may_be_poison(v_rows[1].ev_receives, v_rows[1].ev_retry, v_attempts) and (v_rows[1].ev_expires <= v_now) is not true then
      if v_rows[1].ev_retry_after > v_now - p_queue.queue_visibility_timeout and pgque._worker_has_messages(p_sub, p_worker, v_now) then
        return null;
      end if;
      p_max := 1;
    end if;
    v_piece := case when v_lapsed and p_sub.sub_role = 'pool' then pgque._redelivery_size(v_rows[1].ev_receives, v_attempts, p_max) else p_max end;
    -- Messages that are not to be delivered are removed many at a time.  After a try in
    -- which all messages were being replaced, twice as many are read.
    v_look := greatest(v_piece, least(1 << least(v_try, 10), 1000));
    if v_rows[1].ev_receives >= v_attempts or v_rows[1].ev_expires <= v_now then
      v_look := greatest(v_look, 1000);
    end if;
    if v_look > 1 then
      v_rows := pgque._due(p_sub, v_look, v_now, v_busy, case when v_lapsed then v_rows[1].ev_receives else -1 end, p_from);
      if p_max > 1 then
        v_rows := array(
          select r from pg_catalog.unnest(v_rows) r where not pgque._may_be_poison(r.ev_receives, r.ev_retry, v_attempts) or r.ev_expires <= v_now);
      end if;
    end if;
    v_doomed := array(select r from pg_catalog.unnest(v_rows) r where r.ev_receives >= v_attempts or r.ev_expires <= v_now);
    v_good := pgque._choose_retries(p_queue, p_sub, v_doomed, v_now);
    -- No more of the others than are delivered, since a seal fixes their bodies.
    v_good := v_good || pgque._choose_retries(p_queue, p_sub,
      array(select r from pg_catalog.unnest(v_rows) r where (r.ev_receives >= v_attempts or r.ev_expires <= v_now) is not true), v_now,
      v_piece - pg_catalog.cardinality(v_good));
    -- If none can be delivered, all were removed, or are just being replaced: of those,
    -- no more than some thousands are read.
    v_busy := v_busy || array(select r.ev_id from pg_catalog.unnest(v_rows) r);
    v_ids := array(select r.ev_id from pg_catalog.unnest(v_good) r limit v_piece);
    if p_bytes is not null then
      v_ids := array(
        select s.id
        from (
          select i.id, i.n, sum(pgque._size(e.ev_data, e.ev_bytes, e.ev_headers)) over (order by i.n) as bytes
          from pg_catalog.unnest(v_ids) with ordinality i (id, n)
          cross join lateral (select e.* from pgque.retry_queue e where e.ev_owner + 0 = p_sub.sub_id and e.ev_id = i.id offset 0) e
        ) s
        where s.n = 1 or s.bytes <= p_bytes
        order by s.n);
    end if;
    if pg_catalog.cardinality(v_ids) > 0 then
      -- One index lookup for each message, whatever number of rows the planner expects.
      with found as materialized (
        select f.ctid
        from pg_catalog.unnest(v_ids) i (id)
        cross join lateral (select e.ctid from pgque.retry_queue e where e.ev_owner + 0 = p_sub.sub_id and e.ev_id = i.id offset 0) f
      )
      update pgque.retry_queue r
      set ev_batch = p_token, ev_worker = p_worker, ev_retry_after = p_until, ev_receives = r.ev_receives + 1
      from found f
      where r.ctid = f.ctid;
      -- A message that waited for its first delivery was not delivered before.
      perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'redelivered', count(*))
      from (select r.* from pg_catalog.unnest(v_good) r limit pg_catalog.cardinality(v_ids)) r
      where r.ev_receives > 0 or r.ev_retry > 0;
      return pg_catalog.cardinality(v_ids);
    end if;
    exit when v_try >= 15 and pg_catalog.cardinality(v_doomed) = 0;
  end loop;
  return 0;
end
$$;

-- Returns the given messages that may be delivered, at most p_enough.  Expired
-- messages among them, and those whose attempts are used up, are removed.  The limit of
-- attempts applies here, at a nack and in maint(), never while a lease lives.
create or replace function pgque._choose_retries(
  p_queue pgque.queue, p_sub pgque.subscriber, p_rows pgque.retry_queue[], p_now timestamptz, p_enough bigint default null
)
returns pgque.retry_queue[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_row   pgque.retry_queue;
  v_gone  pgque.retry_queue;
  v_good  pgque.retry_queue[] := '{}';
begin
  foreach v_row in array p_rows loop
    exit when pg_catalog.cardinality(v_good) >= p_enough;
    if v_row.ev_key is not null and v_row.ev_receives = 0 then
      v_row := pgque._claim_retry(p_queue, v_row);
      continue when v_row.ev_id is null;
    end if;
    if v_row.ev_expires <= p_now or p_sub.sub_role = 'pool' and v_row.ev_receives >= p_queue.queue_max_receive_attempts then
      delete from pgque.retry_queue r where r.ev_owner + 0 = v_row.ev_owner and r.ev_id = v_row.ev_id returning r.* into v_gone;
      if v_row.ev_expires <= p_now then
        perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'expired', 1);
      else
        perform pgque._give_up(p_queue, p_sub, v_gone, coalesce(case when v_gone.ev_batch is null then v_gone.ev_error end, 'receive attempts used up'));
      end if;
    else
      v_good := v_good || v_row;
    end if;
  end loop;
  return v_good;
end
$$;

-- Returns a row of the retry queue as the event it was.
create or replace function pgque._as_event(p_row pgque.retry_queue) returns pgque.event
language sql immutable as $$
  select row(null, null, p_row.ev_id, p_row.ev_time, p_row.ev_txid, p_row.ev_retry, p_row.ev_type, p_row.ev_data,
    p_row.ev_extra1, p_row.ev_extra2, p_row.ev_extra3, p_row.ev_extra4, p_row.ev_headers, p_row.ev_key, p_row.ev_bytes,
    p_row.ev_expires, p_row.ev_error)::pgque.event
$$;

-- Counts messages that are removed or redelivered.
create or replace function pgque._count(p_queue_id int, p_sub int, p_what text, p_count bigint) returns void
language plpgsql as $$
begin
  if p_count > 0 then
    insert into pgque.tally values (p_queue_id, p_sub, p_what, p_count, pgque._journal_leaf());
  end if;
end
$$;
