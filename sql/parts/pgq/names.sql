-- ---------------------------------------------------------------------------
-- names: PgQ's names for functions of core and delivery
-- ---------------------------------------------------------------------------

-- Nothing in core and delivery calls them.

create or replace function pgque.set_queue_config(queue_name text, param_name text, param_value text) returns int
language sql as $$ select pgque.alter_queue($1, pg_catalog.jsonb_build_object(coalesce($2, ''), $3)) $$;
comment on function pgque.set_queue_config(text, text, text) is
  'PgQ''s name for alter_queue(), for one setting: sets it and returns 1; NULL restores its default. Errors: PQ001 no such queue; PQ005 unknown '
  'setting or invalid value.';

create or replace function pgque.insert_event(
  queue_name text, ev_type text, ev_data text,
  ev_extra1 text, ev_extra2 text, ev_extra3 text, ev_extra4 text
) returns bigint
language sql as $$ select pgque._send($1, $2, $3, $4, $5, $6, $7, null, null) $$;
comment on function pgque.insert_event(text, text, text, text, text, text, text) is
  'PgQ''s name for send(): sends one message with the four extra texts of an event, and returns its id. Errors: PQ001 no such queue; PQ003 the queue '
  'is full; PQ013 the queue is paused.';

create or replace function pgque.insert_event(queue_name text, ev_type text, ev_data text) returns bigint
language sql as $$ select pgque._send($1, $2, $3, null, null, null, null, null, null) $$;
comment on function pgque.insert_event(text, text, text) is
  'PgQ''s name for send(): sends one message, whose extra texts are NULL, and returns its id. Errors: PQ001 no such queue; PQ003 the queue is full; '
  'PQ013 the queue is paused.';

create or replace function pgque.current_event_table(queue_name text) returns text
language sql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
  select format('pgque.event_%s_%s', q.queue_id, q.queue_cur_table) from pgque._queue($1) q
$$;
comment on function pgque.current_event_table(text) is
  'Returns the table that the queue''s messages go to now, schema-qualified, for COPY by the owner. With its column defaults, a row of ev_type and '
  'ev_data is a complete event. Call it again in each transaction: rotation changes the table. If an ev_id was taken in an earlier transaction, a '
  'tick may cover its row up to a minute later. Errors: PQ001 no such queue.';

create or replace function pgque.force_tick(queue_name text) returns bigint
language sql as $$ select pgque.force_next_tick($1) $$;
comment on function pgque.force_tick(text) is
  'PgQ''s name for force_next_tick(): makes the next ticker() tick the queue, and returns the id of the queue''s newest tick. Errors: PQ001 no such '
  'queue.';

create or replace function pgque.register_consumer(queue_name text, consumer_name text) returns int
language sql as $$ select pgque.subscribe($1, $2, 'latest', false) $$;
comment on function pgque.register_consumer(text, text) is
  'PgQ''s name for subscribe(): subscribes a consumer at the newest tick and returns 1, or 0 if it was subscribed already. Errors: PQ001 no such '
  'queue; PQ004 invalid name.';

create or replace function pgque.register_consumer_at(queue_name text, consumer_name text, tick_id bigint, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue     pgque.queue;
  v_sub       pgque.subscriber;
  v_position  pgque.position;
begin
  if register_consumer_at.tick_id is null then
    return pgque.subscribe(register_consumer_at.queue_name, register_consumer_at.consumer_name, 'latest', caller => caller);
  end if;
  if pgque.subscribe(register_consumer_at.queue_name, register_consumer_at.consumer_name, register_consumer_at.tick_id::text, caller => caller) = 1 then
    return 1;
  end if;
  v_queue := pgque._queue(register_consumer_at.queue_name, caller, 'consume');
  v_sub := pgque._subscriber(v_queue.queue_name, register_consumer_at.consumer_name, caller);
  -- As in seek().
  perform pgque._wait_for_keyed_sends(v_queue) where register_consumer_at.tick_id > (pgque._position(v_sub.sub_id)).pos_tick;
  perform from pgque.queue q where q.queue_id = v_queue.queue_id for share;
  perform pgque._depth_grows(v_queue.queue_id);
  v_sub.sub_role := pgque._lock_subscriber(v_sub.sub_id);
  perform pgque._promote_dead(v_sub, v_queue, (pgque._position(v_sub.sub_id)).pos_tick, register_consumer_at.tick_id);
  perform pgque._move_to(v_sub, pgque._position(v_sub.sub_id), pgque._find_tick(v_queue, register_consumer_at.tick_id::text));
  perform pgque._record_action('register_consumer_at', v_queue.queue_name, jsonb_build_object('consumer_name', register_consumer_at.consumer_name, 'tick_id', register_consumer_at.tick_id));
  return 0;
end
$$;
comment on function pgque.register_consumer_at(text, text, bigint, pgque.caller) is
  'Subscribes a consumer at a tick and returns 1. If it is subscribed already, it is moved to that tick, its open batch is dropped, and the call '
  'returns 0. tick_id NULL: the newest tick; a subscribed consumer is not moved. Errors: PQ001 no such queue; PQ005 the tick is no longer stored.';

create or replace function pgque.unregister_consumer(queue_name text, consumer_name text) returns int
language sql as $$ select pgque.unsubscribe($1, $2) $$;
comment on function pgque.unregister_consumer(text, text) is
  'PgQ''s name for unsubscribe(): removes a consumer from a queue with its workers and its pending retries, and returns the number of subscribers '
  'removed. Errors: PQ001 no such queue.';

create or replace function pgque.finish_batch(batch_id bigint) returns int
language sql as $$ select pgque.ack($1) $$;
comment on function pgque.finish_batch(bigint) is 'PgQ''s name for ack(): acknowledges a batch and returns 1, or 0 if it was acknowledged before or '
  'another worker has received one of its messages.';

create or replace function pgque.event_retry(batch_id bigint, event_id bigint, retry_time timestamptz, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_now  timestamptz := pgque.clock();
begin
  return (
    select (pgque._outcome_or_error(f, $1)).ok::int
    from pgque._set_outcomes(pgque._batch_for(caller, $1), array[$2], 'retry',
      -- An infinite time has no distance from now.
      pgque._not_negative(case when $3 is not null then least(greatest($3, v_now), v_now + interval '101 years') - v_now end, 'the time until then', $1),
      null, true) f);
end
$$;
comment on function pgque.event_retry(bigint, bigint, timestamptz, pgque.caller) is
  'Rejects one event of an open batch: it is redelivered to this consumer at retry_time (NULL: after the queue''s retry_backoff), however often it '
  'failed before. Returns 1, or 0 if it was rejected already. Errors: PQ005 more than 100 years from now; PQ007 the event is not in this batch; '
  'PQ012 the batch is not open.';

create or replace function pgque.event_retry(batch_id bigint, event_id bigint, retry_seconds int) returns int
language sql as $$ select pgque.event_retry($1, $2, pgque.clock() + pg_catalog.make_interval(secs => $3::pg_catalog.float8)) $$;
comment on function pgque.event_retry(bigint, bigint, int) is
  'Rejects one event of an open batch: it is redelivered to this consumer after a number of seconds (NULL: after the queue''s retry_backoff), '
  'however often it failed before. Returns 1, or 0 if it was rejected already. Errors: PQ005 more than 100 years from now; PQ007 the event is not in '
  'this batch; PQ012 the batch is not open.';

create or replace function pgque.batch_retry(batch_id bigint, retry_seconds int, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  batch_id := pgque._batch_for(caller, $1);
  perform pgque._open_lease(pgque._batch_owner($1), $1);
  return (select count(*) from pgque._set_outcomes($1, null, 'retry', pgque._not_negative(make_interval(secs => $2), 'retry_seconds', $1), null, false));
end
$$;
comment on function pgque.batch_retry(bigint, int, pgque.caller) is
  'Rejects every event of an open batch that was not rejected already, and returns their number. They are redelivered retry_seconds from now (NULL: '
  'after the queue''s retry_backoff). Finish the batch afterwards. Errors: PQ005 the number is negative; PQ012 the batch is not open.';
