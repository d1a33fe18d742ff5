-- ---------------------------------------------------------------------------
-- stream: how far behind a reader of offsets is, and what it could not parse
-- ---------------------------------------------------------------------------

create or replace function pgque.stream_lag(
  queue_name text, consumer_name text, tick_id bigint, caller pgque.caller default current_user,
  out newest_tick bigint, out ticks_behind bigint, out events_behind bigint, out oldest_pending interval
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
  v_sub    pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_tick   pgque.tick := pgque._need_tick(v_queue, $3);
  v_last   pgque.tick := pgque._last_tick(v_queue);
  v_wait   text := current_setting('lock_timeout');
begin
  newest_tick := v_last.tick_id;
  execute format('select count(*) from (%s) t where t.tick_id > $1', pgque._ticks_sql(v_queue.queue_id)) into ticks_behind using $3;
  events_behind := greatest(coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0) - v_tick.tick_event_seq, 0);
  begin
    perform pgque._hurry();
    oldest_pending := greatest(coalesce(pgque.clock()
      - pgque._pending_since(v_sub, pgque._at_tick(pgque._position(v_sub.sub_id), v_tick), v_last), '0'), '0');
    perform set_config('lock_timeout', v_wait, true);
  exception
    when lock_not_available then
      null;
  end;
end
$$;
comment on function pgque.stream_lag(text, text, bigint, pgque.caller) is
  'Returns the lag of a consumer that keeps its own offsets and has read up to a tick: the newest tick of the queue, the number of ticks '
  '(ticks_behind) and events (events_behind, at most) after the tick, and the age of the oldest pending event (oldest_pending; 0 if none is '
  'pending, NULL if another session has a table of the queue locked). Errors: PQ001 no such queue; PQ011 not subscribed; PQ015 the tick is no '
  'longer stored.';

-- Rows live from the task that found them until the commit of its micro-batch, or until
-- the micro-batch is read again.  There is no foreign key: if an upgrade added one, it
-- would wait for all writers of subscriber.
create table if not exists pgque.bad_record (
  bad_sub     int not null,
  bad_tick    bigint not null,
  bad_ev_id   bigint not null,
  bad_reason  text,
  constraint bad_record_pkey primary key (bad_sub, bad_tick, bad_ev_id)
);
comment on table pgque.bad_record is 'Messages that a stream could not parse, until it commits its offsets. Internal: see stage_dead().';

create or replace function pgque.stage_dead(
  queue_name text, consumer_name text, tick_id bigint, msg_ids bigint[], reasons text[], caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
  v_sub    pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_count  int;
begin
  perform pgque._need_alone(v_sub, $1, $2);
  if cardinality($4) is distinct from cardinality($5) or $4 is null or $3 is null then
    perform pgque._fail('PQ005', format('stage_dead needs a tick, and as many reasons as msg_ids, for consumer %I of queue %I', $2, v_queue.queue_name),
      'Pass the end of the window, and two arrays: the ids, and a reason for each.');
  end if;
  insert into pgque.bad_record (bad_sub, bad_tick, bad_ev_id, bad_reason)
  select v_sub.sub_id, $3, b.id, b.reason
  from unnest($4, $5) b (id, reason)
  where b.id is not null
  on conflict do nothing;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function pgque.stage_dead(text, text, bigint, bigint[], text[], pgque.caller) is
  'Notes messages that a stream could not use, each with its reason, and returns how many are new. tick_id: the end of the window that they were '
  'read from. seek() makes them dead letters when it moves the consumer to that tick or beyond; unstage_dead() deletes the notes. Errors: PQ001 no '
  'such queue; PQ005 no tick, not as many reasons as msg_ids, or the consumer has workers; PQ011 not subscribed.';

create or replace function pgque.unstage_dead(queue_name text, consumer_name text, after_tick bigint, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
  v_sub    pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_count  int;
begin
  perform pgque._need_alone(v_sub, $1, $2);
  delete from pgque.bad_record b where b.bad_sub = v_sub.sub_id and b.bad_tick > $3;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function pgque.unstage_dead(text, text, bigint, pgque.caller) is
  'Deletes the notes of stage_dead() for windows that end after after_tick, because these are read again, and returns their number. Errors: PQ001 '
  'no such queue; PQ005 the consumer has workers; PQ011 not subscribed.';

-- Makes dead letters of the staged messages of windows up to a tick.  The caller has
-- not moved the consumer yet: messages that its position has passed may be deleted.
-- Notes up to the position are from before a restored dump or a seek back, and their
-- messages are read again.
create or replace function pgque._promote_dead(p_sub pgque.subscriber, p_queue pgque.queue, p_stands bigint, p_tick bigint) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_bad  record;
begin
  for v_bad in
    with gone as (
      delete from pgque.bad_record b
      where b.bad_sub = p_sub.sub_id and b.bad_tick <= p_tick
      returning b.*
    )
    select g.bad_tick, pg_catalog.array_agg(g.bad_ev_id) as ids, pg_catalog.array_agg(g.bad_reason) as reasons
    from gone g
    where g.bad_tick > p_stands
    group by g.bad_tick
    order by g.bad_tick
  loop
    perform pgque._dead_upto(p_sub, coalesce((pgque._tick(p_queue.queue_id, v_bad.bad_tick)).tick_snapshot,
      (pgque._tick(p_queue.queue_id, p_tick)).tick_snapshot), v_bad.ids, v_bad.reasons);
  end loop;
end
$$;
