-- ---------------------------------------------------------------------------
-- retry: messages that are due, and notifications
-- ---------------------------------------------------------------------------

-- Returns the owners whose messages the pump moves from the retry queue into the log:
-- 0, since delayed messages are for every consumer, and consumers that are read by
-- offsets, since their readers read only the log.  All other consumers receive from the
-- retry queue.
create or replace function pgque._pump_owners() returns setof int
language sql as $$
  select 0
  union all
  select s.sub_id
  from pgque.subscriber s
  where s.sub_role = 'normal' and (s.sub_offsets
    -- A consumer that never received a batch may be read by offsets too.
    or exists (select from pgque.retry_queue r where r.ev_owner = s.sub_id)
      -- While a dump is loaded, it may have no position yet.
      and case when exists (select from pgque.queue q where q.queue_id = s.sub_queue and not q.queue_restored)
        then (pgque._position(s.sub_id)).pos_last_batch = 0 end)
$$;

create or replace function pgque.maint_retry_events() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '200ms' set enable_seqscan = off set jit = off as $$
declare
  v_now       timestamptz := pgque.clock();   -- a volatile function cannot be used in an index condition
  v_queue_id  int;
  v_count     int := 0;
begin
  if pgque._loading() is not null then
    return 0;   -- maint_tables() warns
  end if;
  for v_queue_id in select q.queue_id from pgque.queue q where q.queue_restored order by q.queue_id limit greatest(pgque._lock_room() / 32, 1) loop
    begin
      continue when (select pgque._lacks(q) from pgque.queue q where q.queue_id = v_queue_id) is not null;
      perform pgque._rebase(v_queue_id);
      v_now := pgque.clock();   -- messages that were put there just now are due
    exception
      when others then
        raise warning 'pgque: no retries for queue %: % (%)', v_queue_id, sqlerrm, sqlstate;
    end;
  end loop;
  for v_queue_id in
    select distinct d.ev_queue
    from pgque._pump_owners() o (id)
    cross join lateral (
      select distinct r.ev_queue from pgque.retry_queue r where r.ev_owner = o.id and r.ev_retry_after <= v_now
    ) d
  loop
    begin
      v_count := v_count + pgque._retry_queue(v_queue_id);
    exception
      when others then
        raise warning 'pgque: no retries for queue %: % (%)', v_queue_id, sqlerrm, sqlstate;
    end;
  end loop;
  return v_count + pgque._notify_due(v_now);
end
$$;
comment on function pgque.maint_retry_events() is
  'Moves delayed messages that are due into their queues, at most 10,000 or about a megabyte of each queue; the next tick delivers them. Retries of consumers that are '
  'read by offsets are moved in the same way. All other consumers receive a retry as soon as it is due, and sessions that listen are notified. '
  'Returns the number of messages that became due or were moved.';

-- Notifies the consumers for whom a message became due since the last call, and returns
-- the number of messages.  Every five seconds it notifies for all messages that are
-- due, because the rows may have been committed later.
create or replace function pgque._notify_due(p_now timestamptz) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_since  timestamptz := least(pgque._last_notified(), p_now);
  v_all    boolean := p_now >= pgque._next_five(v_since);
  v_queue  record;
  v_count  int := 0;
begin
  for v_queue in
    select s.sub_queue as id, sum(r.n) filter (where r.new) as n
    from pgque.subscriber s
    cross join lateral (
      select r.ev_retry_after > v_since as new, count(*) as n
      from pgque.retry_queue r
      where r.ev_owner = s.sub_id and r.ev_retry_after > case when v_all then '-infinity' else v_since end and r.ev_retry_after <= p_now and r.ev_batch is null
      group by 1
    ) r
    where s.sub_id not in (select o.id from pgque._pump_owners() o (id))
    group by 1
  loop
    begin
      perform pgque._notify(q, (pgque._last_tick(q)).tick_id) from pgque.queue q where q.queue_id = v_queue.id and not q.queue_restored;
      v_count := v_count + coalesce(v_queue.n, 0);
    exception
      when lock_not_available or undefined_table then
        null;   -- health() names it
    end;
  end loop;
  if found then
    perform pg_catalog.setval('pgque.woken', pg_catalog.ceil(extract(epoch from p_now) * 1000000)::bigint);
  end if;
  return v_count;
end
$$;

create or replace function pgque._next_five(p_time timestamptz) returns timestamptz
language sql immutable as $$ select pg_catalog.to_timestamp(5 * (pg_catalog.floor(extract(epoch from p_time) / 5) + 1)) $$;

create or replace function pgque._last_notified() returns timestamptz
language sql as $$ select pg_catalog.to_timestamp(coalesce(pg_catalog.pg_sequence_last_value('pgque.woken'), 0) / 1000000.0) $$;

-- Returns when maint_retry_events() has work; null if the retry queue is empty, or if one
-- of the tables is locked: the loop calls this in each round, and must not wait.
create or replace function pgque._next_retry() returns timestamptz
language plpgsql set enable_seqscan = off set jit = off set lock_timeout = '20ms' as $$
declare
  v_since  timestamptz := least(pgque._last_notified(), pgque.clock());
begin
  if not exists (select from pgque.retry_queue) then
    return null;
  end if;
  return (
    select min(case when o.pumped or r.due > v_since then r.due else pgque._next_five(v_since) end)
    from (
      select o.id, true as pumped from pgque._pump_owners() o (id)
      union all
      select s.sub_id, false from pgque.subscriber s where s.sub_id not in (select o.id from pgque._pump_owners() o (id))
    ) o
    cross join lateral (
      (select r.ev_retry_after as due from pgque.retry_queue r
      where r.ev_owner = o.id and (o.id = 0 or r.ev_batch is null)
      order by r.ev_retry_after
      limit 1)
      union all
      (select r.ev_retry_after from pgque.retry_queue r
      where r.ev_owner = o.id and r.ev_retry_after > v_since and r.ev_batch is null
      order by r.ev_retry_after
      limit 1)
    ) r);
exception
  when lock_not_available then
    return null;
end
$$;

-- Returns how many bytes of messages a call moves, so that ticks do not wait for long:
-- those that begin within this number.
create or replace function pgque._bytes_of_a_call() returns bigint
language sql immutable as $$ select 1000000::bigint $$;

-- Moves messages of one queue that are due into the log, and returns their number.
create or replace function pgque._retry_queue(p_queue_id int) returns int
language plpgsql as $$
declare
  v_txid    xid8 := pg_catalog.pg_current_xact_id();
  v_now     timestamptz;
  v_aside   record;
  v_found   record;
  v_places  tid[] := '{}';
  v_bytes   bigint := 0;
  v_count   int;
begin
  perform pgque._rebase(p_queue_id);
  if not exists (select from pgque.queue q where q.queue_id = p_queue_id) then
    return 0;
  end if;
  v_now := pgque.clock();   -- messages that were put there just now are due
  v_aside := pgque._claim_retries(p_queue_id, array(
    select pgque._slim_retry(e.item)
    from pgque.subscriber s
    cross join lateral (
      select e as item from pgque.retry_queue e
      where e.ev_owner = s.sub_id and e.ev_retry_after <= v_now and e.ev_key is not null and e.ev_receives = 0
      order by e.ev_retry_after
      limit 10000
      for update skip locked
    ) e
    where s.sub_queue = p_queue_id and s.sub_id in (select o.id from pgque._pump_owners() o (id))
    limit 10000));
  -- A loop, since it ends with the bytes of those that it could lock: messages that an open
  -- transaction has locked do not hold back those behind them.
  for v_found in
    select e.place, e.bytes
    from (
      select o.id from pgque._pump_owners() o (id)
      where o.id = 0 or exists (select from pgque.subscriber s where s.sub_id = o.id and s.sub_queue = p_queue_id)
    ) o
    cross join lateral (
      select e.ctid as place, pgque._size(e.ev_data, e.ev_bytes, e.ev_headers) as bytes
      from pgque.retry_queue e
      where e.ev_owner = o.id and e.ev_queue = p_queue_id and e.ev_retry_after <= v_now
        and (e.ev_key is null or e.ev_receives > 0 or e.ev_owner = 0
          or (e.ev_owner, e.ev_id) in (select f.owner, f.id from rows from (pg_catalog.unnest(v_aside.owners), pg_catalog.unnest(v_aside.ids)) f (owner, id)))
      order by e.ev_retry_after
      limit 10000
      for update skip locked
    ) e
    limit 10000
  loop
    v_places := v_places || v_found.place;
    v_bytes := v_bytes + v_found.bytes;
    exit when v_bytes >= pgque._bytes_of_a_call();
  end loop;
  with due as (
    delete from pgque.retry_queue r
    where r.ctid = any (v_places)
    returning r.*
  )
  insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data,
    ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires, ev_error)
  select q.queue_id * 3 + q.queue_cur_table, nullif(d.ev_owner, 0), d.ev_id, d.ev_time, v_txid,
    case when d.ev_owner = 0 and d.ev_key is not null then 0 else d.ev_retry end, d.ev_type, d.ev_data,
    d.ev_extra1, d.ev_extra2, d.ev_extra3, d.ev_extra4, d.ev_headers, d.ev_key, d.ev_bytes, d.ev_expires, d.ev_error
  from due d
  join pgque.queue q on q.queue_id = d.ev_queue;
  get diagnostics v_count = row_count;
  -- Each of these messages enters the log under an old id, and takes an unused one too:
  -- the loop sees by it that there is something to tick, and max_depth counts ids.
  perform pgque._note_once(q.queue_id, 'moved') from pgque.queue q where q.queue_id = p_queue_id and v_count > 0;
  perform pg_catalog.nextval(q.queue_event_seq) from pgque.queue q, pg_catalog.generate_series(1, v_count) where q.queue_id = p_queue_id;
  return v_count;
end
$$;

create or replace function pgque.retry_now(queue_name text, consumer_name text, msg_id bigint default null, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber((pgque._queue($1, caller, 'admin')).queue_name, $2);
  v_now    timestamptz := pgque.clock();
  v_count  bigint;
begin
  update pgque.retry_queue r set ev_retry_after = v_now
  where r.ev_owner = v_sub.sub_id and r.ev_retry_after > v_now and r.ev_batch is null and ($3 is null or r.ev_id = $3);
  get diagnostics v_count = row_count;
  perform pgque._record_action('retry_now', $1, jsonb_build_object('consumer_name', $2, 'msg_id', $3, 'messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.retry_now(text, text, bigint, pgque.caller) is
  'Makes all pending retries of a consumer due now, for example after a repair, or after a clock that was ahead. msg_id: only this message. Returns their number. Errors: '
  'PQ001 no such queue; PQ011 not subscribed.';
