-- ---------------------------------------------------------------------------
-- limits: max_depth and throughput_limit
-- ---------------------------------------------------------------------------

-- The rest of the engine handles limits in these places:
--   * Sending asks _room(); the sinks too, and the forwarding of dead letters.
--   * Calls that let the depth grow without a send call _depth_grows(): subscribe(), moves
--     of a consumer, and dlq_requeue().
--   * _begin_delivery(), with which a delivery begins, asks _limit_unused_since(), and
--     _store_delivery() adds what was delivered (pos_paid).
--   * health() and purge() ask _depth().

-- Returns whether a queue with max_depth has room for p_count more messages; PQ003 if
-- not.
create or replace function pgque._room(p_queue pgque.queue, p_count bigint) returns boolean
language sql as $$ select pgque._room_left(p_queue, p_count) >= p_count $$;

-- Returns how many more messages a queue with max_depth takes; PQ003 if fewer than
-- p_count.  Each message uses an id, and no consumer stands before queue_floor: so far
-- from the limit, a subtraction is enough.
-- Nearer to it the session remembers up to which id there is room: consumers only move
-- forward.  The remembered value is not valid
--   * after a change of the queue's row, such as another max_depth;
--   * after _depth_grows(), or while a transaction that called it is open;
--   * beyond a transaction with an old snapshot.
-- The value has a seal, because every role can set it.
create or replace function pgque._room_left(p_queue pgque.queue, p_count bigint) returns bigint
language plpgsql as $$
declare
  v_last    bigint := coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0);
  v_left    bigint := p_queue.queue_max_depth - (v_last - p_queue.queue_floor);
  v_name    text;
  v_known   text;
  v_upto    text;
  v_grown   bigint;
  v_class   int;
  v_steady  boolean;
begin
  if v_left >= p_count and v_last >= p_queue.queue_floor and not p_queue.queue_external_ticker
    -- Delayed messages and retries may be older.
    and not exists (select from pgque.retry_queue r where r.ev_queue = p_queue.queue_id and r.ev_id <= p_queue.queue_floor)
  then
    return v_left;
  end if;
  v_name := 'pgque.depth_' || p_queue.queue_id;
  v_known := pg_catalog.current_setting(v_name, true);
  v_upto := pg_catalog.split_part(v_known, ' ', 1);
  v_grown := coalesce(pg_catalog.pg_sequence_last_value('pgque.depth_growth'), 0);
  if v_known = pgque._sealed(v_upto, p_queue.queue_xid, v_grown) then
    v_left := v_upto::bigint - v_last;
    if v_left >= p_count then
      return v_left;
    end if;
  end if;
  -- Only a transaction that called _depth_grows() holds this lock for long.
  v_class := pg_catalog.hashtext('pgque.depth');
  v_steady := pg_catalog.pg_try_advisory_lock(v_class, p_queue.queue_id) and pg_catalog.pg_advisory_unlock(v_class, p_queue.queue_id);
  v_left := pgque._find_room(p_queue, p_count, v_last);
  if v_left is null then
    return greatest(p_queue.queue_max_depth, p_count);
  elsif v_steady then
    perform pg_catalog.set_config(v_name, pgque._sealed((v_last + v_left)::text, p_queue.queue_xid, v_grown), pgque._old_snapshot());
  end if;
  return v_left;
end
$$;

-- Call this before the depth of a queue grows without a send: before a consumer is
-- subscribed or moved back, and before a dead letter is requeued.  Senders then drop
-- the value that they remember, and remember none until this transaction ends.
create sequence if not exists pgque.depth_growth;

-- Returns the value that a session remembers, with a proof that pgque wrote it: writers
-- cannot read queue_xid.
create or replace function pgque._sealed(p_upto text, p_xid xid8, p_grown bigint) returns text
language sql immutable as $$
  select p_upto || ' ' || pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.concat_ws(' ', p_upto, p_xid, p_grown), 'UTF8')), 'hex')
$$;

create or replace function pgque._depth_grows(p_queue_id int) returns void
language plpgsql as $$
begin
  perform pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtext('pgque.depth'), p_queue_id);
  perform pg_catalog.nextval('pgque.depth_growth');
end
$$;

-- Returns how many more messages a queue takes after an id; PQ003 if fewer than
-- p_count, PQ005 if it never takes that many.  Null: there is no consumer and no delayed
-- message, so nothing counts.  The slowest consumer is searched; there may be ten thousand consumers.  Near the limit
-- the messages are counted, because rolled-back sends use ids too.  This is always so with
-- an external ticker, whose event_seq may mean anything.
create or replace function pgque._find_room(p_queue pgque.queue, p_count bigint, p_last bigint) returns bigint
language plpgsql as $$
declare
  v_waiting  bigint;
  v_oldest   bigint;
  v_left     bigint;
begin
  select min(r.ev_id) - 1 into v_waiting from pgque.retry_queue r where r.ev_queue = p_queue.queue_id;
  select least(min(p.pos_event_seq), v_waiting) into v_oldest
  from pgque.subscriber s
  cross join lateral pgque._oldest_needed_position(s.sub_id) p
  where s.sub_queue = p_queue.queue_id;
  if v_oldest is null then
    return null;
  end if;
  v_left := p_queue.queue_max_depth - (p_last - v_oldest);
  if v_left < p_count or p_queue.queue_external_ticker or v_oldest > p_last then
    v_left := p_queue.queue_max_depth - pgque._depth(p_queue.queue_id);
  end if;
  if p_count > p_queue.queue_max_depth then
    -- Not PQ003, on which callers try again.
    perform pgque._fail('PQ005', pg_catalog.format('%s messages at once never fit into queue %I with max_depth %s', p_count, p_queue.queue_name, p_queue.queue_max_depth),
      'Send fewer messages at a time (a stream of Spark: option maxEventsPerTrigger), or raise max_depth. Nothing was sent.');
  end if;
  if v_left < p_count then
    perform pgque._fail('PQ003', pg_catalog.format('queue full: %I', p_queue.queue_name),
      'Try again when the consumers have caught up, or raise max_depth. Nothing was sent.',
      pg_catalog.format('max_depth is %s.', p_queue.queue_max_depth));
  end if;
  return v_left;
end
$$;

-- Returns since when a throughput limit was not used: at most for a second, and without
-- a time in the future, which was recorded before the clock was set back.
create or replace function pgque._limit_unused_since(p_paid timestamptz, p_now timestamptz) returns timestamptz
language sql immutable as $$
  select greatest(case when p_paid <= p_now + interval '1 second' then p_paid end, p_now - interval '1 second')
$$;

-- Returns how many messages the slowest consumer has ahead of it or in open batches,
-- and adds the delayed ones.
create or replace function pgque._depth(p_queue_id int) returns bigint
language plpgsql as $$
declare
  v_sub    pgque.subscriber;
  v_held   record;
  v_count  bigint;
  v_part   bigint;
  v_own    bigint := 0;
  v_most   bigint := 0;
begin
  if pg_catalog.pg_current_xact_id_if_assigned() is not null then
    -- The snapshot does not show the messages of this transaction.
    execute pg_catalog.format('select count(*) from (%s) e', pgque._rows_sql(p_queue_id, 'e.ev_txid = $1 and e.ev_owner is null'))
    into v_own using pg_catalog.pg_current_xact_id();
  end if;
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null loop
    execute pg_catalog.format('select count(*) from (%s) e', pgque._unfinished_sql(v_sub, pgque._next_from(pgque._position(v_sub.sub_id)),
      pgque._tick_snapshot(), ' and (e.ev_expires is null or e.ev_expires > $1)')) into v_count using pgque.clock();
    v_count := v_count + v_own + (select count(*) from pgque.retry_queue r where r.ev_owner = v_sub.sub_id);
    for v_held in select h.lease, h.settled from pgque._open_batches(v_sub.sub_id) h loop
      v_part := (v_held.lease).pos_done_count - v_held.settled;
      if v_sub.sub_role <> 'pool' then
        -- The number of messages in a batch of next_batch() is not known yet.
        execute pg_catalog.format('select count(*) from (%s) e', pgque._undone_sql(v_sub, v_held.lease, ' and (e.ev_expires is null or e.ev_expires > $1)'))
        into v_part using pgque.clock();
      end if;
      v_count := v_count + v_part;
    end loop;
    v_most := greatest(v_most, v_count);
  end loop;
  return v_most + (select count(*) from pgque.retry_queue r where r.ev_owner = 0 and r.ev_queue = p_queue_id);
end
$$;
