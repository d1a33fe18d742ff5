-- ---------------------------------------------------------------------------
-- workers: competing processes, leases, redelivery
-- ---------------------------------------------------------------------------

-- A consumer whose messages workers compete for is a pool.  A hand-out is one
-- row in the journal of positions: it says what was handed out, to whom, until
-- when, and by that where the next one begins.  Its pos_seq is the batch id
-- without the subscriber's bits, so that a batch is found by its id.  That a
-- batch is closed is a row in the journal of settled messages.  So neither is
-- updated, and a worker needs no row of its own: names may come and go.
--
-- The log is for first deliveries.  Whatever comes again (a lease ended, a nack,
-- a release) waits in the retry queue, and is leased from there: ev_retry_after
-- is when it may be taken, ev_batch who has it.  So one rule serves all: who
-- takes a message that is due overwrites ev_batch, and from then on the old
-- batch id no longer fits.
--
-- Locks: hand-outs of one pool meet at the subscriber's row; whatever is said
-- about a batch meets at an advisory lock on its id, which a hand-out only
-- tries.  A hand-out is not done in REPEATABLE READ, whose snapshot may be older
-- than its lock; what is said about a batch is, since it either inserts a row
-- under a primary key or locks one.

-- Where a pool goes on behind its newest hand-out.
create or replace function pgque._next_from(p_position pgque.position) returns pgque.position
language plpgsql immutable as $$
begin
  if p_position.pos_fresh > 0 then
    if p_position.pos_last_id is null then
      return pgque._past_window(p_position);
    end if;
    p_position.pos_done_id := p_position.pos_last_id;
  end if;
  p_position.pos_last_id := null;
  p_position.pos_fresh := 0;
  return p_position;
end
$$;

-- The hand-out of a batch, or null.
create or replace function pgque._lease(p_sub int, p_batch bigint) returns pgque.position
language plpgsql set enable_seqscan = off as $$
declare
  v_position  pgque.position;
begin
  -- Both leaves in one statement: it may move from one to the other.
  select p.* into v_position
  from pgque.position p
  where p.pos_sub = p_sub and p.pos_seq = p_batch >> 20
  limit 1;
  if v_position.pos_last_batch = p_batch and v_position.pos_fresh is not null then
    return v_position;
  elsif pg_catalog.current_setting('transaction_isolation') <> 'read committed' then
    -- An old snapshot may see neither leaf's row: then this is 40001.
    perform pgque._journal_leaf();
  end if;
  return null;
end
$$;

-- What was said about the log part of a batch: whether it is closed, how many of
-- its messages have an outcome, how often its end was moved (negative) and
-- where to.
create or replace function pgque._lease_state(p_batch bigint, out closed boolean, out settled bigint, out moved bigint, out until timestamptz)
language plpgsql set enable_seqscan = off as $$
begin
  select coalesce(bool_or(s.set_ev_id = 0), false), count(*) filter (where s.set_ev_id between 1 and 4611686018427387903), coalesce(min(s.set_ev_id) filter (where s.set_ev_id < 0), 0),
    (array_agg(s.set_until order by s.set_ev_id) filter (where s.set_ev_id < 0))[1]
  into closed, settled, moved, until
  from (select distinct s.set_ev_id, s.set_until from pgque.settled s where s.set_batch = p_batch) s;
end
$$;

-- Notes messages of a batch as settled (ids above 0) or something about all of
-- it (see pgque.settled).  Returns the ids that were new.  An old snapshot
-- writes to both leaves, and gets 40001 if what it does not see is there.
create or replace function pgque._note(p_batch bigint, p_sub int, p_ids bigint[], p_until timestamptz default null, p_leaf int default null) returns bigint[]
language plpgsql as $$
declare
  v_leaves  int[] := pgque._leaves_for(coalesce(p_leaf, pgque._journal_leaf()));
  v_new     bigint[];
begin
  if pg_catalog.cardinality(p_ids) * pg_catalog.cardinality(v_leaves) = 1 then
    insert into pgque.settled (set_batch, set_ev_id, set_sub, set_until, leaf) values (p_batch, p_ids[1], p_sub, p_until, v_leaves[1]) on conflict do nothing;
    return case when found then p_ids end;
  end if;
  with new as (
    insert into pgque.settled (set_batch, set_ev_id, set_sub, set_until, leaf)
    select p_batch, i.id, p_sub, p_until, l.leaf
    from pg_catalog.unnest(p_ids) i (id)
    cross join pg_catalog.unnest(v_leaves) l (leaf)
    on conflict do nothing
    returning set_ev_id
  )
  select pg_catalog.array_agg(g.id) into v_new
  from (select n.set_ev_id as id from new n group by 1 having count(*) = pg_catalog.cardinality(v_leaves)) g;
  return v_new;
end
$$;

-- Whether a batch still has all of its messages but those that were settled one
-- by one: whoever is given some of it, or has been, or has them taken out, makes
-- it less.  Locks those that wait in the retry queue.  The caller holds the
-- batch's lock.  Nothing is known of a batch that compaction forgot, as 0.4.1 did
-- with those that waited.
create or replace function pgque._still_whole(p_sub int, p_batch bigint) returns boolean
language plpgsql set enable_seqscan = off as $$
declare
  v_lease    pgque.position;
  v_state    record;
  v_waiting  bigint;
  v_settled  bigint;
  v_moved    bigint;
  v_lost     boolean;
begin
  select count(*) into v_waiting
  from (
    select from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_batch = p_batch order by r.ev_id for update skip locked
  ) r;
  -- Those that were settled where they waited, how many an old snapshot noted
  -- only to put them there, and whether the holder was told that one is lost.
  select count(*) filter (where s.set_ev_id < 6917529027641081856),
    coalesce(max(s.set_ev_id - 6917529027641081856) filter (where s.set_ev_id < 9223372036854775807), 0),
    coalesce(bool_or(s.set_ev_id = 9223372036854775807), false)
  into v_settled, v_moved, v_lost
  from (select distinct s.set_ev_id from pgque.settled s where s.set_batch = p_batch and s.set_ev_id > 4611686018427387904) s;
  if v_lost then
    return false;
  end if;
  v_lease := pgque._lease(p_sub, p_batch);
  if v_lease.pos_sub is null then
    return true;
  end if;
  v_state := pgque._lease_state(p_batch);
  if v_lease.pos_fresh > 0 and v_state.closed then
    v_waiting := v_waiting - v_lease.pos_done_count + v_state.settled - greatest(v_moved, 0);
  end if;
  return v_waiting >= v_lease.pos_shelf - v_settled;
end
$$;

-- ack() of a whole lease.  The messages that wait in the retry queue under its
-- id are done as well: nobody has taken them.
create or replace function pgque._close_lease(p_sub int, p_batch bigint) returns int
language plpgsql set enable_seqscan = off as $$
declare
  v_lease   pgque.position;
  v_count   int := 0;
  v_done    int := 0;
begin
  perform pg_catalog.pg_advisory_xact_lock(p_batch);
  if pg_catalog.current_setting('transaction_isolation') = 'read committed' then
    -- The usual case in one statement.
    insert into pgque.settled (set_batch, set_ev_id, set_sub, leaf)
    select p_batch, 0, p_sub, (select j.journal_cur from pgque.journal j where j.journal_id = 1)
    from pgque.position p
    where p.pos_sub = p_sub and p.pos_seq = p_batch >> 20 and p.pos_last_batch = p_batch and p.pos_fresh > 0 and p.pos_shelf = 0
      and not exists (select from pgque.settled s where s.set_batch = p_batch and s.set_ev_id = 0)
    limit 1
    on conflict do nothing;
    if found then
      return 1;
    end if;
  end if;
  if not pgque._still_whole(p_sub, p_batch) then
    return 0;
  end if;
  v_lease := pgque._lease(p_sub, p_batch);
  if v_lease.pos_fresh > 0 and not (pgque._lease_state(p_batch)).closed then
    v_done := coalesce(pg_catalog.cardinality(pgque._note(p_batch, p_sub, array[0])), 0);
  end if;
  delete from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_batch = p_batch;
  get diagnostics v_count = row_count;
  return (v_count + v_done > 0)::int;
end
$$;

-- A hand-out to a worker: first what waits in the retry queue, then from the
-- log, at most p_max messages together.
--
-- Every expression and statement here is made ready anew in each transaction, so
-- what can be said in one is not said in two.
create or replace function pgque._hand_out(p_sub pgque.subscriber, p_max bigint, p_worker text, p_timeout interval, p_ack bigint)
returns setof pgque.delivery
language plpgsql set enable_seqscan = off as $$
declare
  v_now      timestamptz := pgque.clock();
  v_queue    pgque.queue;
  v_ahead    pgque.position;   -- before the lock, with its next window open
  v_first    pgque.position;
  v_pos      pgque.position;
  v_slice    record;
  v_token    bigint;
  v_max      bigint := p_max;
  v_leaf     int;
  v_due      boolean;
  v_waiting  record;
  v_lapsed   boolean;
  v_sifted   record;
  v_expired  bigint[];
  v_count    bigint := 0;
  v_looked   bigint := 0;
  v_room     bigint;
  v_row      pgque.delivery;
  v_last     bigint;
begin
  select q.* into v_queue from pgque.queue q where q.queue_id = p_sub.sub_queue;
  if p_worker = '' or pg_catalog.octet_length(p_worker) > 1000 or p_timeout <= '0' or p_timeout > '100 years'
    or pgque._old_snapshot()
  then
    perform pgque._refuse_worker(v_queue.queue_name, p_timeout);
  end if;
  if p_ack is null then
    null;
  elsif v_queue.queue_archive_on_ack or p_sub.sub_role = 'normal' or (p_ack & 1048575) <> (p_sub.sub_id & 1048575) then
    perform pgque.ack(p_ack);
  else
    perform pgque._close_lease(p_sub.sub_id, p_ack);
  end if;
  if p_sub.sub_role = 'normal' then
    perform pgque._make_pool(p_sub, v_queue.queue_name);
  end if;
  if p_ack is null then
    -- An idle poll takes no lock, writes nothing and needs no transaction id.
    v_ahead := pgque._next_from(pgque._position(p_sub.sub_id));
    if v_ahead.pos_next_tick is null then
      v_ahead := pgque._open_window(v_ahead, p_sub.sub_queue, greatest(p_max, 1000));
    end if;
    if v_ahead.pos_next_tick is null and (v_now >= v_ahead.pos_lapse) is not true
      and not exists (select from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_retry_after <= v_now)
    then
      return;
    end if;
  end if;

  if pgque._lock_subscriber(p_sub.sub_id) = 'coop_main' then
    -- It was given subconsumers since this call began.
    return query select r.*
    from pgque.queue q, pgque.consumer c, pgque.receive(q.queue_name, c.co_name, p_max::int, p_worker, p_timeout) r
    where q.queue_id = p_sub.sub_queue and c.co_id = p_sub.sub_consumer;
    return;
  end if;
  v_now := pgque.clock();
  select j.journal_cur, exists (select from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_retry_after <= v_now)
  into v_leaf, v_due
  from pgque.journal j where j.journal_id = 1;
  v_first := pgque._next_from(pgque._position(p_sub.sub_id, v_leaf));
  v_pos := v_first;
  v_token := pgque._new_batch_id(v_pos);
  v_pos.pos_worker := p_worker;
  v_pos.pos_until := v_now + coalesce(p_timeout, v_queue.queue_visibility_timeout);
  v_pos.pos_shelf := 0;
  v_pos.pos_keys := null;
  if v_now >= v_pos.pos_lapse or pg_catalog.cardinality(v_pos.pos_open) >= v_pos.pos_prune then
    v_pos := pgque._reap(v_queue, p_sub, v_pos, v_now);
    v_due := true;
  end if;
  if v_queue.queue_throughput_limit > 0 then
    -- What was not used within the last second is lost, and what was paid by a clock that has been set back.
    v_pos.pos_paid := greatest(
      case when v_pos.pos_paid <= v_now + interval '1 second' then v_pos.pos_paid end, v_now - interval '1 second');
    v_max := least(v_max, pg_catalog.floor(extract(epoch from v_now - v_pos.pos_paid) * v_queue.queue_throughput_limit + 0.000001)::bigint);
  end if;

  if v_due and v_max > 0 then
    select t.* into v_waiting from pgque._take_waiting(v_queue, p_sub, v_pos, v_token, v_max, v_now) t;
    v_pos.pos_shelf := v_waiting.taken;
    v_lapsed := v_waiting.lapsed;
    if v_waiting.taken > 0 then
      return query
        select r.ev_id, v_token, r.ev_type, r.ev_data, coalesce(r.ev_retry, 0), r.ev_time,
          r.ev_extra1, r.ev_extra2, r.ev_extra3, r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes,
          r.ev_receives, r.ev_error, r.ev_expires, v_queue.queue_name
        from pgque.retry_queue r
        where r.ev_owner = p_sub.sub_id and r.ev_batch = v_token
        order by r.ev_id;
    end if;
  end if;

  -- What lapsed may be poison: nothing else goes with it.
  while v_max > v_pos.pos_shelf and v_lapsed is not true and v_looked < 10000 loop
    if v_looked > 0 then
      v_pos := pgque._next_from(v_pos);
    end if;
    -- After a move back a message may come from both places: not in one batch.
    exit when v_pos.pos_shelf > 0 and v_pos.pos_tick < v_pos.pos_high;
    if v_pos.pos_next_tick is null and v_pos.pos_tick = v_ahead.pos_tick and v_ahead.pos_next_tick is not null then
      v_pos.pos_next_tick := v_ahead.pos_next_tick;   -- what it was before the lock
      v_pos.pos_next_snapshot := v_ahead.pos_next_snapshot;
      v_pos.pos_next_event_seq := v_ahead.pos_next_event_seq;
    elsif v_pos.pos_next_tick is null then
      v_pos := pgque._open_window(v_pos, p_sub.sub_queue, greatest(v_max, 1000));
    end if;
    exit when v_pos.pos_next_tick is null;
    v_room := v_max - v_pos.pos_shelf;
    -- A window that goes out whole is read straight.
    if v_room <= 1000 and v_pos.pos_done_id is null and v_pos.pos_next_event_seq - v_pos.pos_event_seq <= v_room
      and not p_sub.sub_keyed and (v_pos.pos_tick < v_pos.pos_high) is not true
      and exists (
        select from pgque.queue q
        where q.queue_id = p_sub.sub_queue and q.queue_reader = pgque.version() and not q.queue_keyed and not q.queue_expiring)
    then
      v_pos.pos_last_id := null;
      for v_row in
        execute 'select * from pgque._events_' || p_sub.sub_queue || '($1, $2, $3, 0, $4, $5, 1, $6)'
        using v_pos.pos_snapshot, v_pos.pos_next_snapshot, p_sub.sub_id, v_room + 1, v_token, v_queue.queue_name
      loop
        if v_count = v_room then
          v_pos.pos_last_id := v_last;
          exit;
        end if;
        v_count := v_count + 1;
        v_last := v_row.msg_id;
        return next v_row;
      end loop;
      v_pos.pos_done_count := v_count;
      v_pos.pos_fresh := v_count;
      exit when v_count > 0;
      v_pos := pgque._past_window(v_pos);
      continue;
    end if;
    v_slice := pgque._slice(p_sub, v_pos, case when p_sub.sub_keyed or v_looked > 0 then 1000 else v_max - v_pos.pos_shelf end);
    if v_slice.keyed and pg_catalog.cardinality(v_slice.ids) > 200 then
      -- Each key takes a lock.
      v_slice := pgque._slice(p_sub, v_pos, 200);
    end if;
    v_looked := v_looked + coalesce(pg_catalog.cardinality(v_slice.ids), 1) * case when v_slice.keyed then 10 else 1 end;
    v_pos.pos_done_count := pg_catalog.cardinality(v_slice.ids);
    v_pos.pos_last_id := case when v_slice.more then v_slice.ids[v_pos.pos_done_count] end;
    if v_slice.ids is null then
      v_pos := pgque._past_window(v_pos);
    elsif p_sub.sub_keyed or v_slice.keyed or v_pos.pos_done_count > v_max - v_pos.pos_shelf then
      v_sifted := pgque._sift(v_queue, p_sub, v_pos, pgque._slice_rows(p_sub.sub_queue, v_slice.ids, v_slice.tids, v_slice.leaves), v_token, v_max - v_pos.pos_shelf, v_now);
      v_pos := v_sifted.pos;
      return query
        select e.ev_id, v_token, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,
          e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,
          1, e.ev_error, e.ev_expires, v_queue.queue_name
        from pg_catalog.unnest(v_sifted.rows) e;
      get diagnostics v_count = row_count;
    else
      return query execute
        'select e.ev_id, $4, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,'
        ' e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,'
        ' coalesce(e.ev_retry, 0) + 1, e.ev_error, e.ev_expires, $5 from ('
        || pgque._slice_sql(p_sub.sub_queue, v_slice.leaves) || ') e where (e.ev_expires <= $6) is not true order by 1'
      using v_slice.ids, v_slice.tids, v_slice.leaves, v_token, v_queue.queue_name, v_now;
      get diagnostics v_count = row_count;
      if v_count < v_pos.pos_done_count then
        v_expired := array(
          select e.ev_id from pg_catalog.unnest(pgque._slice_rows(p_sub.sub_queue, v_slice.ids, v_slice.tids, v_slice.leaves)) e
          where e.ev_expires <= v_now);
        if pg_catalog.cardinality(v_expired) <> v_pos.pos_done_count - v_count then
          -- A table was being rewritten under the first look.
          perform pgque._rewritten();
        end if;
        perform pgque._tally(v_queue.queue_id, p_sub.sub_id, 'expired', pg_catalog.cardinality(v_expired));
        -- They are no part of the batch.
        perform pgque._note(v_token, p_sub.sub_id, v_expired) where v_count > 0;
      end if;
    end if;
    if v_slice.ids is not null then
      v_pos.pos_fresh := greatest(v_count, 1);   -- for _next_from(): this slice is behind us
    end if;
    exit when v_count > 0;
  end loop;

  if v_count = 0 then
    v_pos := pgque._next_from(v_pos);
  end if;
  if v_count + v_pos.pos_shelf > 0 then
    v_pos.pos_last_batch := v_token;
    v_pos.pos_seq := (v_token >> 20) - 1;
    if v_queue.queue_throughput_limit > 0 then
      v_pos.pos_paid := v_pos.pos_paid + (v_count + v_pos.pos_shelf) * interval '1 second' / v_queue.queue_throughput_limit;
    end if;
    if v_count > 0 then
      v_pos.pos_open := coalesce(v_pos.pos_open, '{}') || v_token;
      v_pos.pos_prune := coalesce(v_pos.pos_prune, 64);
      v_pos.pos_lapse := least(v_pos.pos_lapse, v_pos.pos_until);
    end if;
  elsif (v_pos.pos_tick, v_pos.pos_next_tick, v_pos.pos_done_id, v_pos.pos_open, v_pos.pos_lapse)
    is not distinct from (v_first.pos_tick, v_first.pos_next_tick, v_first.pos_done_id, v_first.pos_open, v_first.pos_lapse)
  then
    return;
  end if;
  -- As _append_position() does, in READ COMMITTED and under the lock.
  v_pos.pos_seq := v_pos.pos_seq + 1;
  v_pos.pos_time := v_now;
  v_pos.leaf := v_leaf;
  insert into pgque.position select v_pos.*;
end
$$;

-- What a worker may not ask for.
create or replace function pgque._refuse_worker(p_queue text, p_timeout interval) returns void
language plpgsql as $$
begin
  perform pgque._need_read_committed('receive() for a worker');
  if p_timeout <= '0' or p_timeout > '100 years' then
    perform pgque._fail('PQ005', pg_catalog.format('visibility_timeout must be positive and at most 100 years, for queue %I', p_queue),
      'It is how long the worker has before others get its messages.');
  end if;
  perform pgque._fail('PQ004', pg_catalog.format('invalid worker name for queue %I', p_queue),
    'A worker name has 1 to 1000 bytes; any character is allowed.');
end
$$;

-- Makes a consumer on its own a pool of workers, unless it has become
-- something else meanwhile.  One that has received a batch on its own stays as it
-- is: the process that reads it could not go on.
create or replace function pgque._make_pool(p_sub pgque.subscriber, p_queue text) returns void
language plpgsql as $$
begin
  if pgque._lock_subscriber(p_sub.sub_id) = 'normal' and (pgque._position(p_sub.sub_id)).pos_last_batch > 0 then
    perform pgque._fail('PQ006', pg_catalog.format('consumer %s of queue %I reads on its own', pgque._subscriber_name(p_sub), p_queue),
      pg_catalog.format('Subscribe another consumer for the workers. Or finish its batch, stop its reader, and subscribe it anew where it stands, '
        'which loses its pending retries: select i.last_tick, pgque.unsubscribe(%1$L, %2$L) from pgque.get_consumer_info(%1$L, %2$L) i; '
        'select pgque.subscribe(%1$L, %2$L, ''<last_tick>'');', p_queue, pgque._subscriber_name(p_sub)));
  end if;
  update pgque.subscriber s set sub_role = 'pool' where s.sub_id = p_sub.sub_id and s.sub_role = 'normal';
end
$$;

-- The next messages of a pool's window, at most p_max: their ids and where they
-- lie, whether there are more, and whether any has a key.  A window that is
-- longer than that is read once, in order, into the roster.
create or replace function pgque._slice(
  p_sub pgque.subscriber, p_pos pgque.position, p_max bigint,
  out ids bigint[], out leaves smallint[], out tids tid[], out more boolean, out keyed boolean
)
language plpgsql as $$
declare
  v_rows       text;
  v_filenodes  oid[];
  v_row        record;
  v_known      boolean := false;
  v_done       bigint := coalesce(p_pos.pos_done_id, 0);
  v_from       int;
begin
  if p_pos.pos_done_id is null and p_pos.pos_next_event_seq - p_pos.pos_event_seq <= p_max then
    v_rows := pgque._addresses_sql(p_sub, p_pos, pgque._xid_condition(p_pos.pos_snapshot, p_pos.pos_next_snapshot));
    if v_rows is not null then
      execute pg_catalog.format(
        'select array_agg(e.ev_id order by e.ev_id), array_agg(e.leaf order by e.ev_id), array_agg(e.tid order by e.ev_id), bool_or(e.keyed)'
        ' from (%s order by ev_id limit %s) e', v_rows, p_max + 1)
      into ids, leaves, tids, keyed;
    end if;
    more := pg_catalog.cardinality(ids) > p_max;
  else
    for v_try in 1..5 loop
      v_filenodes := pgque._filenodes(p_sub.sub_queue);
      loop
        select r.ros_id_hi, r.ros_ids, r.ros_leaves, r.ros_tids, r.ros_keyed, r.ros_last into v_row
        from pgque.roster r
        where r.ros_sub = p_sub.sub_id and r.ros_from = p_pos.pos_tick and r.ros_to = p_pos.pos_next_tick and r.ros_id_hi > v_done
          and r.ros_valid and r.ros_filenodes = v_filenodes
        order by r.ros_id_hi
        limit 1;
        exit when not found;
        v_known := true;
        -- The ids rise, so what is behind v_done is found by bisection.  There may
        -- be two rosters of a window.
        v_from := pg_catalog.width_bucket(v_done, v_row.ros_ids) + 1;
        ids := ids || v_row.ros_ids[v_from:];
        leaves := leaves || v_row.ros_leaves[v_from:];
        tids := tids || v_row.ros_tids[v_from:];
        keyed := coalesce(keyed, false) or v_row.ros_keyed;
        v_done := v_row.ros_id_hi;
        more := not v_row.ros_last or pg_catalog.cardinality(ids) > p_max;
        exit when pg_catalog.cardinality(ids) >= p_max;
      end loop;
      -- A roster that was made just now, and has nothing behind v_done, says that
      -- the window ends there.
      exit when v_known
        or (v_try > 1 and exists (
          select from pgque.roster r
          where r.ros_sub = p_sub.sub_id and r.ros_from = p_pos.pos_tick and r.ros_to = p_pos.pos_next_tick and r.ros_valid and r.ros_filenodes = v_filenodes))
        or pgque._make_roster(p_sub, p_pos) = 0;
      if v_try = 5 then
        perform pgque._rewritten();
      end if;
    end loop;
  end if;
  if pg_catalog.cardinality(ids) > p_max then
    ids := ids[:p_max];
    leaves := leaves[:p_max];
    tids := tids[:p_max];
  end if;
end
$$;

-- Where the messages of a window lie that belong to a subscriber; null if there
-- can be none.
create or replace function pgque._addresses_sql(p_sub pgque.subscriber, p_pos pgque.position, p_xids text) returns text
language sql stable as $$
  -- One that was moved back can meet an event and its own retry in one window.
  select case when p_pos.pos_tick < p_pos.pos_high then 'select distinct on (u.ev_id) u.* from (' || a.sql || ') u' else a.sql end
  from (
  select pg_catalog.string_agg(pg_catalog.format('select e.ev_id, %s::smallint as leaf, e.ctid as tid, e.ev_key is not null as keyed from pgque.event_%s_%s e where %s',
    n, p_sub.sub_queue, n, pgque._slice_condition(p_xids, p_sub.sub_id, p_pos.pos_done_id, null)), ' union all ') as sql
  from pg_catalog.generate_series(0, 2) n
  where p_xids is not null and pg_catalog.pg_relation_size(pg_catalog.format('pgque.event_%s_%s', p_sub.sub_queue, n)::regclass) > 0
  ) a
$$;

-- Returns the number of rows: 0 when the window is empty.
create or replace function pgque._make_roster(p_sub pgque.subscriber, p_pos pgque.position) returns int
language plpgsql as $$
declare
  v_rows   text;
  v_count  int;
begin
  -- The whole window, so that whoever asks for another part of it finds it too.
  p_pos.pos_done_id := null;
  v_rows := pgque._addresses_sql(p_sub, p_pos, pgque._xid_condition(p_pos.pos_snapshot, p_pos.pos_next_snapshot));
  if v_rows is null then
    return 0;
  end if;
  -- Sorted once: an ORDER BY in each aggregate sorts for each.
  execute pg_catalog.format(
    $q$
    insert into pgque.roster (leaf, ros_sub, ros_from, ros_to, ros_id_hi, ros_ids, ros_leaves, ros_tids, ros_keyed, ros_filenodes, ros_xid, ros_last)
    select %s, $1, $2, $3, a.ids[least(n + 99, cardinality(a.ids))], a.ids[n:n + 99], a.leaves[n:n + 99], a.tids[n:n + 99], true = any (a.keyed[n:n + 99]),
      $4, pgque._xid(), n + 100 > cardinality(a.ids)
    from (
      select array_agg(e.ev_id) as ids, array_agg(e.leaf) as leaves, array_agg(e.tid) as tids, array_agg(e.keyed) as keyed
      from (%s order by ev_id) e
      offset 0
    ) a
    cross join pg_catalog.generate_series(1, cardinality(a.ids), 100) n
    $q$, (select j.journal_cur from pgque.journal j where j.journal_id = 1), v_rows)
  using p_sub.sub_id, p_pos.pos_tick, p_pos.pos_next_tick, pgque._filenodes(p_sub.sub_queue);
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

-- The rows that a slice names: $1 ids, $2 addresses, $3 tables.  The planner is
-- not shown long arrays: it would weigh each element.  The ids rise, so each row
-- finds its own by bisection.
create or replace function pgque._slice_sql(p_queue_id int, p_leaves smallint[]) returns text
language plpgsql immutable as $$
begin
  if p_leaves[1] = all (p_leaves) then
    return 'select e.* from pgque.event_' || p_queue_id || '_' || p_leaves[1]
      || case when pg_catalog.cardinality(p_leaves) > 10
        then ' e where e.ctid = any ((select $2)::tid[]) and ($1)[pg_catalog.width_bucket(e.ev_id, $1)] = e.ev_id and $3 is not null'
        else ' e where e.ctid = any ($2) and e.ev_id = any ($1) and $3 is not null' end;
  end if;
  return (
    select pg_catalog.string_agg(pg_catalog.format(
      'select e.* from pgque.event_%s_%s e where e.ctid = any (array(select t.tid from unnest($2, $3) t (tid, leaf) where t.leaf = %2$s))'
      ' and ($1)[pg_catalog.width_bucket(e.ev_id, $1)] = e.ev_id', p_queue_id, n), ' union all ')
    from pg_catalog.generate_series(0, 2) n
    where n = any (p_leaves));
end
$$;

-- The same, which must be where the roster said.
create or replace function pgque._slice_rows(p_queue_id int, p_ids bigint[], p_tids tid[], p_leaves smallint[]) returns pgque.event[]
language plpgsql as $$
declare
  v_rows  pgque.event[];
begin
  execute 'select array_agg(row(e.*)::pgque.event order by e.ev_id) from (' || pgque._slice_sql(p_queue_id, p_leaves) || ') e'
  into v_rows using p_ids, p_tids, p_leaves;
  if coalesce(pg_catalog.cardinality(v_rows), 0) <> pg_catalog.cardinality(p_ids) then
    perform pgque._rewritten();
  end if;
  return v_rows;
end
$$;

create or replace function pgque._rewritten() returns void
language plpgsql as $$
begin
  perform pgque._fail('serialization_failure', 'a table of the queue was rewritten while it was read', 'Retry the transaction.');
end
$$;

-- The rows of a pool's batch that came from the log, those with p_ids or all,
-- less what is settled.
create or replace function pgque._lease_rows(p_sub pgque.subscriber, p_lease pgque.position, p_ids bigint[]) returns pgque.event[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_slice   record;
  v_ids     bigint[];
  v_leaves  smallint[];
  v_tids    tid[];
  v_rows    pgque.event[];
begin
  v_slice := pgque._slice(p_sub, p_lease, greatest(p_lease.pos_done_count, 1000));
  if v_slice.ids is null then
    perform pgque._rewritten();
  end if;
  select pg_catalog.array_agg(m.id), pg_catalog.array_agg(m.leaf), pg_catalog.array_agg(m.tid)
  into v_ids, v_leaves, v_tids
  from unnest(v_slice.ids, v_slice.leaves, v_slice.tids) m (id, leaf, tid)
  where (p_lease.pos_last_id is null or m.id <= p_lease.pos_last_id) and (p_ids is null or (m.id in (select pg_catalog.unnest((select p_ids)))) is true);
  if v_ids is null then
    return null;
  end if;
  v_rows := pgque._slice_rows(p_sub.sub_queue, v_ids, v_tids, v_leaves);
  if (select q.queue_keyed from pgque.queue q where q.queue_id = p_sub.sub_queue) then
    v_rows := pgque._with_bodies(p_sub.sub_queue, v_rows);
  end if;
  return v_rows;
end
$$;

-- Of batches that may be open those that are.
create or replace function pgque._not_closed(p_tokens bigint[]) returns bigint[]
language plpgsql set enable_seqscan = off as $$
begin
  return array(
    select o.token
    from pg_catalog.unnest(p_tokens) with ordinality o (token, n)
    where not exists (select from pgque.settled s where s.set_batch = o.token and s.set_ev_id = 0)
    order by o.n);
end
$$;

-- Looks at every batch of a pool that may be open.  Whatever is left of one whose
-- lease ended goes to the retry queue, to be taken at once; until somebody does,
-- the old batch id stays good.  A batch that its worker is just speaking about
-- is alive.
create or replace function pgque._reap(p_queue pgque.queue, p_sub pgque.subscriber, p_pos pgque.position, p_now timestamptz)
returns pgque.position
language plpgsql as $$
declare
  v_token  bigint;
  v_lease  pgque.position;
  v_state  record;
  v_open   bigint[] := '{}';
  v_lapse  timestamptz;
  v_tried  int := 0;
begin
  foreach v_token in array pgque._not_closed(p_pos.pos_open) loop
    v_state := pgque._lease_state(v_token);
    continue when v_state.closed;
    v_lease := pgque._lease(p_sub.sub_id, v_token);
    continue when v_lease.pos_sub is null;
    if coalesce(v_state.until, v_lease.pos_until) <= p_now and v_tried < 200 then
      -- The server has room for some thousand locks; the others come next time.
      v_tried := v_tried + 1;
      if pg_catalog.pg_try_advisory_xact_lock(v_token) then
        v_state := pgque._lease_state(v_token);
        continue when v_state.closed;
        if coalesce(v_state.until, v_lease.pos_until) <= p_now then
          perform pgque._shelve(p_queue, p_sub, v_lease, p_now);
          continue;
        end if;
      else
        v_state.until := p_now + interval '1 second';
      end if;
    end if;
    v_open := v_open || v_token;
    v_lapse := least(v_lapse, coalesce(v_state.until, v_lease.pos_until));
  end loop;
  p_pos.pos_open := v_open;
  p_pos.pos_prune := 2 * pg_catalog.cardinality(v_open) + 64;
  p_pos.pos_lapse := v_lapse;
  return p_pos;
end
$$;

-- Moves what is left of a batch from the log to the retry queue, still under its
-- batch id, to be taken from p_due on.
create or replace function pgque._shelve(p_queue pgque.queue, p_sub pgque.subscriber, p_lease pgque.position, p_due timestamptz) returns bigint[]
language plpgsql as $$
declare
  v_rows  pgque.event[] := pgque._unsettled_rows(p_sub, p_lease, null);
begin
  perform pgque._note(p_lease.pos_last_batch, p_sub.sub_id, array[0]);
  if pg_catalog.current_setting('transaction_isolation') <> 'read committed' then
    -- What an old snapshot does not see is found by the primary key.
    perform pgque._note(p_lease.pos_last_batch, p_sub.sub_id,
      array(select r.ev_id from pg_catalog.unnest(v_rows) r) || 6917529027641081856 + coalesce(pg_catalog.cardinality(v_rows), 0));
  end if;
  insert into pgque.retry_queue
  select (pgque._waiting(r, p_sub, coalesce(r.ev_retry, 0) + 1, p_due, p_lease.pos_last_batch, p_lease.pos_worker)).* from pg_catalog.unnest(v_rows) r
  -- A pool that was moved back may have the message waiting already: who holds it
  -- there loses it, so that this one comes.
  on conflict (ev_owner, ev_id, ev_queue) do update
  set (ev_retry_after, ev_receives, ev_batch, ev_worker) = (excluded.ev_retry_after, excluded.ev_receives, excluded.ev_batch, excluded.ev_worker);
  return array(select r.ev_id from pg_catalog.unnest(v_rows) r);
end
$$;

-- Those of a pool's hand-outs that are open: how many of their messages have an
-- outcome, and until when they are held.
create or replace function pgque._open_leases(p_sub int, p_tokens bigint[], out lease pgque.position, out settled bigint, out until timestamptz)
returns setof record
language sql as $$
  select l, s.settled, coalesce(s.until, l.pos_until)
  from pg_catalog.unnest(p_tokens) o (token)
  cross join lateral pgque._lease(p_sub, o.token) l
  cross join lateral pgque._lease_state(o.token) s
  where not s.closed
$$;

-- Those that have lapsed and that nobody asked for since.
create or replace function pgque._lapsed_leases(p_sub int, p_pos pgque.position, out lease pgque.position, out settled bigint, out until timestamptz)
returns setof record
language sql as $$
  -- Until the first of them may have lapsed none is looked at.
  select o.lease, o.settled, o.until
  from pgque._open_leases(p_sub, case when p_pos.pos_lapse <= pgque.clock() then p_pos.pos_open end) o
  where o.until <= pgque.clock()
$$;

-- The condition on e for the messages of a batch from the log that have no outcome
-- yet: what lies in its slice of the window, less what is settled.
create or replace function pgque._undone_condition(p_owner int, p_pos pgque.position, p_batch bigint) returns text
language sql stable as $$
  select pgque._slice_condition(
      coalesce(pgque._xid_condition(p_pos.pos_snapshot, p_pos.pos_next_snapshot), 'false'), p_owner, p_pos.pos_done_id, p_pos.pos_last_id)
    || pg_catalog.format(' and not exists (select from pgque.settled s where s.set_batch = %s and s.set_ev_id = e.ev_id)', p_batch)
$$;

-- The rows of a batch from the log that have no outcome yet.
create or replace function pgque._unsettled_rows(p_sub pgque.subscriber, p_lease pgque.position, p_ids bigint[]) returns pgque.event[]
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return (
    select pg_catalog.array_agg(r)
    from pg_catalog.unnest(pgque._lease_rows(p_sub, p_lease, p_ids)) r
    where not exists (select from pgque.settled s where s.set_batch = p_lease.pos_last_batch and s.set_ev_id = r.ev_id));
end
$$;

-- The key whose order a pool keeps.  An index takes no long ones; two that share
-- a lane keep an order too many.
create or replace function pgque._lane(p_sub pgque.subscriber, p_key text, p_extra1 text) returns text
language sql immutable as $$
  select case
    when not p_sub.sub_keyed then null
    when pg_catalog.octet_length(coalesce(p_key, p_extra1)) > 1000 then pg_catalog.hashtextextended(coalesce(p_key, p_extra1), 0)::text
    else coalesce(p_key, p_extra1)
  end
$$;

-- An event as it waits for a subscriber in the retry queue.
create or replace function pgque._waiting(
  p_event pgque.event, p_sub pgque.subscriber, p_receives int, p_due timestamptz, p_batch bigint, p_worker text
) returns pgque.retry_queue
language sql volatile as $$
  select row(p_due, p_sub.sub_queue, p_event.ev_id, p_event.ev_time, p_event.ev_txid, coalesce(p_sub.sub_main, p_sub.sub_id), p_event.ev_retry,
    p_event.ev_type, p_event.ev_data, p_event.ev_extra1, p_event.ev_extra2, p_event.ev_extra3, p_event.ev_extra4,
    p_event.ev_headers, p_event.ev_key, p_event.ev_bytes, p_event.ev_expires, p_event.ev_error,
    p_receives, p_batch, p_worker, pgque._lane(p_sub, p_event.ev_key, p_event.ev_extra1))::pgque.retry_queue
$$;

-- How many messages that lapsed go out together: fewer each time, and on the
-- last attempt each is alone.  One that was requeued while it was held counts from zero.
create or replace function pgque._piece(p_receives int, p_attempts int, p_max bigint) returns bigint
language sql immutable as $$
  select case
    when least(p_attempts, 5) - greatest(p_receives, 1) <= 1 then 1
    else pg_catalog.ceil(pg_catalog.power(p_max, (least(p_attempts, 5) - greatest(p_receives, 1) - 1)::numeric / (least(p_attempts, 5) - 2)))::bigint
  end
$$;

-- Locks messages that wait for a pool and are due, but for p_but: any (p_receives
-- null), of those that lapsed the ones with so many receives, or of the others (-1).
create or replace function pgque._due(
  p_sub pgque.subscriber, p_pos pgque.position, p_max bigint, p_now timestamptz, p_but bigint[], p_receives int
)
returns pgque.retry_queue[]
language plpgsql as $$
begin
  if p_sub.sub_keyed then
    return array(
      select r from pg_catalog.unnest(pgque._heads_of_lanes(p_sub, p_pos, p_max, p_now, p_but)) r
      where p_receives is null or p_receives = case when r.ev_batch is null then -1 else r.ev_receives end);
  end if;
  return array(
    select r
    from (
      select r.* from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_retry_after <= p_now and (r.ev_id in (select pg_catalog.unnest((select p_but)))) is not true
        and (p_receives is null or p_receives = case when r.ev_batch is null then -1 else r.ev_receives end)
      order by r.ev_retry_after, r.ev_id
      limit p_max
      for update skip locked
    ) r);
end
$$;

-- Leases messages that wait in the retry queue and are due.  Those whose
-- attempts are used up, or that expired, are not handed out but done with.
create or replace function pgque._take_waiting(
  p_queue pgque.queue, p_sub pgque.subscriber, p_pos pgque.position, p_token bigint, p_max bigint, p_now timestamptz,
  out taken int, out lapsed boolean
)
language plpgsql as $$
declare
  v_rows    pgque.retry_queue[];
  v_doomed  pgque.retry_queue[];
  v_good    pgque.retry_queue[];
  v_ids     bigint[];
  v_busy    bigint[] := '{}';
  v_piece   bigint;
  v_look    bigint;
begin
  taken := 0;
  for v_try in 0..99 loop
    -- The first says how many go together; the others stay unlocked, since
    -- their holder may be about to say something.
    v_rows := pgque._due(p_sub, p_pos, 1, p_now, v_busy, null);
    exit when pg_catalog.cardinality(v_rows) = 0;
    lapsed := v_rows[1].ev_batch is not null;
    v_piece := case when lapsed then pgque._piece(v_rows[1].ev_receives, p_queue.queue_max_receive_attempts, p_max) else p_max end;
    -- Those that are not to be delivered are weeded out many at a time.  After a
    -- try in which all were being replaced, it looks at twice as many.
    v_look := greatest(v_piece, least(1 << least(v_try, 10), 1000));
    if v_rows[1].ev_receives >= p_queue.queue_max_receive_attempts or v_rows[1].ev_expires <= p_now then
      v_look := greatest(v_look, 1000);
    end if;
    if v_look > 1 then
      v_rows := pgque._due(p_sub, p_pos, v_look, p_now, v_busy, case when lapsed then v_rows[1].ev_receives else -1 end);
    end if;
    v_doomed := array(
      select r from pg_catalog.unnest(v_rows) r
      where r.ev_receives >= p_queue.queue_max_receive_attempts or r.ev_expires <= p_now);
    v_good := pgque._weed(p_queue, p_sub, v_doomed, p_now);
    -- Of the others no more than go out, since with that their bodies are fixed.
    v_good := v_good || pgque._weed(p_queue, p_sub, array(
      select r from pg_catalog.unnest(v_rows) r
      where (r.ev_receives >= p_queue.queue_max_receive_attempts or r.ev_expires <= p_now) is not true), p_now,
      v_piece - pg_catalog.cardinality(v_good));
    -- Where none may go, all are gone, or wait for who is replacing them: of those it
    -- looks at no more than some thousands.
    v_busy := v_busy || array(select r.ev_id from pg_catalog.unnest(v_rows) r);
    v_ids := array(select r.ev_id from pg_catalog.unnest(v_good) r limit v_piece);
    if pg_catalog.cardinality(v_ids) > 0 then
      -- One look-up by index for each, whatever the planner takes their number for.
      with found as materialized (
        select f.ctid
        from pg_catalog.unnest(v_ids) i (id)
        cross join lateral (select e.ctid from pgque.retry_queue e where e.ev_owner = p_sub.sub_id and e.ev_id = i.id offset 0) f
      )
      update pgque.retry_queue r
      set ev_batch = p_token, ev_worker = p_pos.pos_worker, ev_retry_after = p_pos.pos_until, ev_receives = r.ev_receives + 1
      from found f
      where r.ctid = f.ctid;
      taken := pg_catalog.cardinality(v_ids);
      return;
    end if;
    exit when v_try >= 15 and pg_catalog.cardinality(v_doomed) = 0;
  end loop;
  lapsed := null;
end
$$;

-- Of messages that wait and are due, those that may be delivered, p_enough of them.
-- The others on the way are taken out: expired, or their attempts are used up.
create or replace function pgque._weed(
  p_queue pgque.queue, p_sub pgque.subscriber, p_rows pgque.retry_queue[], p_now timestamptz, p_enough bigint default null
)
returns pgque.retry_queue[]
language plpgsql as $$
declare
  v_row   pgque.retry_queue;
  v_good  pgque.retry_queue[] := '{}';
begin
  foreach v_row in array p_rows loop
    exit when pg_catalog.cardinality(v_good) >= p_enough;
    if v_row.ev_key is not null and v_row.ev_receives = 0 then
      v_row := pgque._claim_waiting(p_queue, p_sub, v_row);
      continue when v_row.ev_id is null;
    end if;
    if v_row.ev_expires <= p_now then
      delete from pgque.retry_queue r where r.ev_owner = v_row.ev_owner and r.ev_id = v_row.ev_id;
      perform pgque._tally(p_queue.queue_id, p_sub.sub_id, 'expired', 1);
    elsif v_row.ev_receives >= p_queue.queue_max_receive_attempts then
      delete from pgque.retry_queue r where r.ev_owner = v_row.ev_owner and r.ev_id = v_row.ev_id;
      perform pgque._bury(p_queue, p_sub, v_row, coalesce(case when v_row.ev_batch is null then v_row.ev_error end, 'receive attempts used up'));
    else
      v_good := v_good || v_row;
    end if;
  end loop;
  return v_good;
end
$$;

-- With keyed order: of keys that wait and are not out the first message, if it is
-- due.  It looks at what is due; only if that is much, and mostly not first of
-- its key, at each key and at what has none.
create or replace function pgque._heads_of_lanes(
  p_sub pgque.subscriber, p_pos pgque.position, p_max bigint, p_now timestamptz, p_but bigint[]
)
returns pgque.retry_queue[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_out  text[] := pgque._lanes_out(p_sub, p_pos);
  v_due  bigint[];
begin
  v_due := array(
    select r.ev_id from pgque.retry_queue r
    where r.ev_owner = p_sub.sub_id and r.ev_retry_after <= p_now order by r.ev_retry_after limit 1000);
  if pg_catalog.cardinality(v_due) = 1000 then
    v_due := v_due || array(
      with recursive lane (lane) as (
        (select r.ev_lane from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane is not null order by r.ev_lane limit 1)
        union all
        select (
          select r.ev_lane from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane > l.lane order by r.ev_lane limit 1)
        from lane l
        where l.lane is not null
      )
      select h.ev_id
      from lane l
      cross join lateral (
        select r.ev_id from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane = l.lane order by r.ev_id limit 1) h)
      || array(
        select r.ev_id from pgque.retry_queue r
        where r.ev_owner = p_sub.sub_id and r.ev_lane is null and r.ev_retry_after <= p_now order by r.ev_retry_after limit 1000);
  end if;
  return array(
    select r
    from (
      select r.*
      from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_id = any (v_due) and r.ev_retry_after <= p_now
        and (r.ev_id in (select pg_catalog.unnest((select p_but)))) is not true
        and (r.ev_lane is null
          or (r.ev_lane in (select pg_catalog.unnest((select v_out)))) is not true
            -- A message of the key that is out may be one that was sent later.
            and not exists (
              select from pgque.retry_queue o
              where o.ev_owner = p_sub.sub_id and o.ev_lane = r.ev_lane
                and (o.ev_id < r.ev_id or o.ev_batch is not null and o.ev_retry_after > p_now)))
      order by r.ev_batch is null, r.ev_id
      limit p_max
      for update skip locked
    ) r);
end
$$;

-- The keys of a pool's messages that came from the log and are out.
create or replace function pgque._lanes_out(p_sub pgque.subscriber, p_pos pgque.position) returns text[]
language plpgsql as $$
declare
  v_token  bigint;
  v_state  record;
  v_lease  pgque.position;
  v_lanes  text[] := '{}';
begin
  foreach v_token in array pgque._not_closed(p_pos.pos_open) loop
    v_state := pgque._lease_state(v_token);
    continue when v_state.closed;
    v_lease := pgque._lease(p_sub.sub_id, v_token);
    if v_state.settled = 0 then
      v_lanes := v_lanes || v_lease.pos_keys;
    else
      v_lanes := v_lanes || array(
        select pgque._lane(p_sub, e.ev_key, e.ev_extra1) from pg_catalog.unnest(pgque._unsettled_rows(p_sub, v_lease, null)) e);
    end if;
  end loop;
  return array_remove(v_lanes, null);
end
$$;

-- Goes through the rows of a slice, for queues and consumers with keys, and
-- returns what is handed out, at most p_max.  A message whose key is out or
-- waits already, or is just being replaced, goes to the retry queue; what was
-- purged or expired is left out.  The slice ends where it stopped.
create or replace function pgque._sift(
  p_queue pgque.queue, p_sub pgque.subscriber, p_pos pgque.position, p_rows pgque.event[], p_token bigint, p_max bigint, p_now timestamptz,
  out pos pgque.position, out rows pgque.event[]
)
language plpgsql as $$
declare
  v_row     pgque.event;
  v_lane    text;
  v_out     text[];
  v_skip    bigint[] := '{}';
  v_claim   record;
  v_looked  int := 0;
begin
  pos := p_pos;
  rows := '{}';
  v_claim := pgque._claim(p_queue, p_rows);
  if p_sub.sub_keyed then
    pos.pos_keys := '{}';
    v_out := pgque._lanes_out(p_sub, p_pos);
  end if;
  foreach v_row in array v_claim.rows loop
    if pg_catalog.cardinality(rows) = p_max then
      -- What follows stays in the window.
      pos.pos_last_id := (v_claim.rows[v_looked]).ev_id;
      exit;
    end if;
    v_looked := v_looked + 1;
    v_lane := pgque._lane(p_sub, v_row.ev_key, v_row.ev_extra1);
    if v_row.ev_id = any (v_claim.gone) then
      v_skip := v_skip || v_row.ev_id;
    elsif v_row.ev_expires <= p_now then
      v_skip := v_skip || v_row.ev_id;
      perform pgque._tally(p_queue.queue_id, p_sub.sub_id, 'expired', 1);
    elsif v_row.ev_id = any (v_claim.busy)
      or v_lane = any (v_out) or v_lane = any (pos.pos_keys)
      or (v_lane is not null and exists (select from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane = v_lane))
    then
      v_skip := v_skip || v_row.ev_id;
      insert into pgque.retry_queue
      select (pgque._waiting(v_row, p_sub, 0, p_now, null, null)).*
      on conflict do nothing;
    else
      rows := rows || v_row;
      if v_lane is not null then
        pos.pos_keys := pos.pos_keys || v_lane;
      end if;
    end if;
  end loop;
  pos.pos_done_count := v_looked;
  perform pgque._seal(p_queue.queue_id, rows);
  if pg_catalog.cardinality(rows) > 0 and pg_catalog.cardinality(v_skip) > 0 then
    perform pgque._note(p_token, p_sub.sub_id, v_skip);
  end if;
end
$$;

-- What was said about messages after they were sent: bodies (owner 0), seals
-- (-1), purges (-2).
create or replace function pgque._said(p_queue_id int, p_rows pgque.event[]) returns pgque.event[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_said  pgque.event[];
begin
  execute (
    select 'select array_agg(row(e.*)::pgque.event order by e.ev_id, e.ev_retry) from ('
      || pg_catalog.string_agg(pg_catalog.format(
        'select e.* from pgque.event_%s_%s e where e.ev_key = any ($1) and e.ev_id = any ($2) and e.ev_owner <= 0'
        ' and (e.ev_owner is null or e.ev_owner <= 0)', p_queue_id, n), ' union all ')
      || ') e'
    from pg_catalog.generate_series(0, 2) n)
  into v_said
  using array(select r.ev_key from pg_catalog.unnest(p_rows) r where r.ev_key is not null),
    array(select r.ev_id from pg_catalog.unnest(p_rows) r where r.ev_key is not null);
  return coalesce(v_said, '{}');
end
$$;

-- Messages with the newest body that their key was given, in order.
create or replace function pgque._with_bodies(p_queue_id int, p_rows pgque.event[], p_said pgque.event[] default null) returns pgque.event[]
language plpgsql as $$
begin
  p_said := coalesce(p_said, pgque._said(p_queue_id, p_rows));
  if pg_catalog.cardinality(p_said) = 0 then
    return p_rows;
  end if;
  return (
    select pg_catalog.array_agg(
      case
        when s.ev_id is null then r
        else row(r.slot, r.ev_owner, r.ev_id, r.ev_time, r.ev_txid, r.ev_retry, s.ev_type, s.ev_data, s.ev_extra1, s.ev_extra2, s.ev_extra3,
          s.ev_extra4, s.ev_headers, r.ev_key, s.ev_bytes, case when r.ev_error is null then s.ev_expires else r.ev_expires end,
          r.ev_error)::pgque.event
      end
      order by r.ev_id)
    from pg_catalog.unnest(p_rows) r
    left join (
      select distinct on (s.ev_id) s.* from pg_catalog.unnest(p_said) s where s.ev_owner = 0 order by s.ev_id, s.ev_retry desc
    ) s on s.ev_id = r.ev_id and r.ev_key is not null);
end
$$;

-- Before messages with keys are delivered for the first time, or passed: takes
-- their keys' locks and reads their bodies.  busy: somebody is replacing it, and is
-- not waited for; gone: it was purged.  A whole window may have more keys than one
-- transaction should lock: then one lock stands for all of them, and while senders
-- hold that one, the messages with the keys that are left over count as busy.
create or replace function pgque._claim(p_queue pgque.queue, p_rows pgque.event[], out rows pgque.event[], out busy bigint[], out gone bigint[])
language plpgsql as $$
declare
  v_class  int := pg_catalog.hashtext('pgque.keys');
  v_most   bigint := greatest(pgque._lock_room() / 4, 200);
  v_said   pgque.event[];
  v_ids    bigint[];
  v_keys   text[];
begin
  v_said := pgque._said(p_queue.queue_id, p_rows);
  select pg_catalog.array_agg(r.ev_id order by r.ev_id), pg_catalog.array_agg(r.ev_key order by r.ev_id) into v_ids, v_keys
  from pg_catalog.unnest(p_rows) r
  where r.ev_key is not null
    and not exists (select from pg_catalog.unnest(v_said) s where s.ev_id = r.ev_id and s.ev_owner < 0);
  busy := '{}';
  if (pg_catalog.cardinality(v_ids) > v_most and pg_catalog.pg_try_advisory_xact_lock(v_class, p_queue.queue_id)) is not true then
    busy := array(
      select r.id
      from rows from (pg_catalog.unnest(v_ids), pg_catalog.unnest(v_keys)) with ordinality r (id, key, n)
      where case
        when r.n > v_most or not pg_catalog.pg_try_advisory_xact_lock_shared(v_class, p_queue.queue_id) then true
        else not pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque.key ' || p_queue.queue_id), pg_catalog.hashtext(r.key))
      end);
  end if;
  -- Under the locks nothing more is said.
  v_said := pgque._said(p_queue.queue_id, p_rows);
  gone := array(select s.ev_id from pg_catalog.unnest(v_said) s where s.ev_owner = -2);
  rows := pgque._with_bodies(p_queue.queue_id, p_rows, v_said);
end
$$;

-- Notes that messages with keys were handed out: their bodies stay as they are.
-- An old snapshot may not show a body that was stored before a rotation and
-- committed since, so it notes that in all three tables: the unique index of each
-- knows its own rows only.
create or replace function pgque._seal(p_queue_id int, p_rows pgque.event[]) returns void
language plpgsql as $$
declare
  v_said          pgque.event[];
  v_old_snapshot  boolean := pgque._old_snapshot();
begin
  if not exists (select from pg_catalog.unnest(p_rows) r where r.ev_key is not null) then
    return;
  end if;
  if v_old_snapshot then
    -- So that the table is the one where senders write, or this one gets 40001.
    perform from pgque.queue q where q.queue_id = p_queue_id for share;
  end if;
  v_said := pgque._said(p_queue_id, p_rows);
  insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_key)
  select q.queue_id * 3 + n.n, -1, r.ev_id, r.ev_time, pg_catalog.pg_current_xact_id(), coalesce(s.newest, 0) + 1, r.ev_key
  from pgque.queue q
  join pg_catalog.generate_series(0, 2) n (n) on n.n = q.queue_cur_table or v_old_snapshot
  cross join pg_catalog.unnest(p_rows) r
  left join (
    select s.ev_id, max(s.ev_retry) as newest, min(s.ev_owner) < 0 as sealed from pg_catalog.unnest(v_said) s group by s.ev_id
  ) s on s.ev_id = r.ev_id
  where q.queue_id = p_queue_id and r.ev_key is not null and s.sealed is not true;
exception
  when unique_violation then
    perform pgque._fail('serialization_failure', 'the key of a message changed since this transaction began', 'Retry the transaction.');
end
$$;

-- The same for one that went to the retry queue before anybody got it; null if
-- it can not be handed out now.
create or replace function pgque._claim_waiting(p_queue pgque.queue, p_sub pgque.subscriber, p_row pgque.retry_queue) returns pgque.retry_queue
language plpgsql as $$
declare
  v_event  pgque.event := pgque._event(p_row);
  v_claim  record;
begin
  v_claim := pgque._claim(p_queue, array[v_event]);
  if p_row.ev_id = any (v_claim.gone) then
    delete from pgque.retry_queue r where r.ev_owner = p_row.ev_owner and r.ev_id = p_row.ev_id;
    return null;
  elsif p_row.ev_id = any (v_claim.busy) then
    return null;
  end if;
  perform pgque._seal(p_queue.queue_id, v_claim.rows);
  v_event := v_claim.rows[1];
  update pgque.retry_queue r
  set ev_type = v_event.ev_type, ev_data = v_event.ev_data, ev_extra1 = v_event.ev_extra1, ev_headers = v_event.ev_headers,
    ev_bytes = v_event.ev_bytes, ev_expires = v_event.ev_expires
  where r.ev_owner = p_row.ev_owner and r.ev_id = p_row.ev_id;
  p_row.ev_expires := v_event.ev_expires;
  return p_row;
end
$$;

-- A waiting message as the event it was.
create or replace function pgque._event(p_row pgque.retry_queue) returns pgque.event
language sql immutable as $$
  select row(null, null, p_row.ev_id, p_row.ev_time, p_row.ev_txid, p_row.ev_retry, p_row.ev_type, p_row.ev_data,
    p_row.ev_extra1, p_row.ev_extra2, p_row.ev_extra3, p_row.ev_extra4, p_row.ev_headers, p_row.ev_key, p_row.ev_bytes,
    p_row.ev_expires, p_row.ev_error)::pgque.event
$$;

-- Counts what nobody will see again.
create or replace function pgque._tally(p_queue_id int, p_sub int, p_what text, p_count bigint) returns void
language plpgsql as $$
begin
  if p_count > 0 then
    insert into pgque.tally values (p_queue_id, p_sub, p_what, p_count, pgque._journal_leaf());
  end if;
end
$$;

-- What a subscriber still needs: its position, or, of a pool, the oldest of its
-- open batches.  A pool that was given all of a window is behind it: nobody has
-- to ask once more before that shows.
create or replace function pgque._oldest_need(p_sub int) returns pgque.position
language plpgsql as $$
declare
  v_pos    pgque.position := pgque._next_from(pgque._position(p_sub));
  v_lease  pgque.position;
begin
  select l.* into v_lease
  from pg_catalog.unnest(pgque._not_closed(v_pos.pos_open)) o (token)
  cross join lateral pgque._lease(p_sub, o.token) l
  where l.pos_tick < v_pos.pos_tick
  order by l.pos_tick
  limit 1;
  if found then
    return v_lease;
  end if;
  return v_pos;
end
$$;
