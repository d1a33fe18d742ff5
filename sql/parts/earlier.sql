-- ---------------------------------------------------------------------------
-- earlier: what running calls of an earlier version need during an upgrade
-- ---------------------------------------------------------------------------

-- A call that runs while this file is installed continues with its old body, that of
-- 0.7.0 at the earliest.  A call that has locked tables is not affected: the upgrade waits
-- for it.

-- For a receive() and a next_batch() that were waiting for the consumer.
create or replace function pgque._sift(
  p_queue pgque.queue, p_sub pgque.subscriber, p_pos pgque.position, p_token bigint, p_max bigint, p_whole boolean default false,
  out pos pgque.position, out ids bigint[], out rows text
)
language sql as $$ select * from pgque._sift(p_queue, p_sub, p_pos, p_token, p_max, case when not p_whole then 0::bigint end) $$;

-- For a receive() that was waiting for the consumer.
create or replace function pgque._find(p_queue text, p_consumer text, p_caller name, out sub pgque.subscriber, out leaf int, out archives boolean)
language sql as $$
  select s, j.journal_cur, q.queue_archive_on_ack
  from pgque._subscriber(p_queue, p_consumer, p_caller) s
  join pgque.queue q on q.queue_id = s.sub_queue
  cross join pgque.journal j
$$;

-- For a receive() that was waiting to acknowledge ack_batch.
create or replace function pgque._poll_0(
  p_queue text, p_consumer text, p_worker text, p_caller name,
  out idle boolean, out locked boolean, out sub int, out queue int, out attempts int, out lease interval, out looked timestamptz
)
language sql as $$
  select p.idle, p.locked, p.sub, p.queue, p.attempts, p.lease, p.looked from pgque._poll_0(p_queue, p_consumer, p_worker, p_caller, null) p
$$;

create or replace function pgque._poll_1(
  p_queue text, p_consumer text, p_worker text, p_caller name,
  out idle boolean, out locked boolean, out sub int, out queue int, out attempts int, out lease interval, out looked timestamptz
)
language sql as $$
  select p.idle, p.locked, p.sub, p.queue, p.attempts, p.lease, p.looked from pgque._poll_1(p_queue, p_consumer, p_worker, p_caller, null) p
$$;

-- For calls that were giving up messages.
create or replace function pgque._bury(p_queue pgque.queue, p_sub pgque.subscriber, p_item pgque.retry_queue, p_reason text) returns void
language sql as $$ select pgque._give_up(p_queue, p_sub, p_item, p_reason) $$;

-- For a health() that was checking queues.
create or replace function pgque._health_of(p_queues int[], out check_name text, out queue text, out status text, out detail text, out advice text)
returns setof record
language sql as $$ select h.check_name, h.queue, h.status, h.detail, h.advice from pgque._health_of(p_queues, false) h $$;

create or replace function pgque._queue_health(
  p_queue pgque.queue, p_pumped int[], out check_name text, out queue text, out status text, out detail text, out advice text
) returns setof record
language sql as $$
  select h.check_name, h.queue, h.status, h.detail, h.advice from pgque._queue_health(p_queue, p_pumped, false, true, true) h
$$;

create or replace function pgque._health_consumers(
  p_queue pgque.queue, p_last pgque.tick, p_consumers bigint, p_subs pgque.subscriber[], p_positions pgque.position[], p_cause text,
  out status text, out detail text, out advice text
)
language sql as $$
  select h.*
  from (select null) one
  left join lateral (
    select c.consumer_name, c.lag from pgque._consumers(p_queue, p_subs, p_positions, false, p_last) c order by c.lag desc, c.consumer_name limit 1
  ) l on true
  cross join lateral pgque._health_consumers(p_queue, p_consumers, l.consumer_name, l.lag, p_cause) h
$$;

create or replace function pgque._health_leases(p_queue pgque.queue, p_subs pgque.subscriber[], out status text, out detail text, out advice text)
language sql as $$
  select h.*
  from pgque._slowest_consumers(p_queue.queue_id) f
  cross join lateral pgque._health_leases(p_queue, f.subs, f.positions, true) h
$$;

-- For senders that were checking max_depth: they search the slowest consumer.
create or replace function pgque._first_event_seq(p_queue_id int) returns bigint
language sql as $$ select 0::bigint $$;

-- For calls that had begun to build a query when the upgrade overtook them.
create or replace function pgque._overtaken() returns text
language plpgsql as $$
begin
  perform pgque._fail('serialization_failure', 'pgque was upgraded while this call waited', 'Retry the transaction.');
  return null;
end
$$;

-- _chosen_sql() chose the messages, and its caller relies on that.
create or replace function pgque._chosen_sql(p_sub pgque.subscriber, p_lease pgque.position, p_ids bigint[]) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._xid_condition(p_from pg_snapshot, p_to pg_snapshot) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._slice_condition(p_xids text, p_owner int, p_after bigint, p_upto bigint) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._undone_condition(p_owner int, p_pos pgque.position) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._unfinished_condition(p_sub pgque.subscriber, p_position pgque.position, p_snapshot pg_snapshot) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._span(p_queue pgque.queue, p_after bigint, p_upto bigint) returns text
language sql as $$ select pgque._overtaken() $$;

create or replace function pgque._map_window(p_queue_id int, p_from bigint, p_to bigint, p_xids text) returns void
language plpgsql as $$
begin
  perform pgque._overtaken();
end
$$;

create or replace function pgque._window_sql(
  p_queue text, p_from bigint, p_to bigint, p_consumer text, p_types text[], p_parts int, p_part int, p_caller name
) returns text
language sql as $$ select pgque._overtaken() $$;

-- For a receive() or an ack() that was waiting.  The default of p_reader would make calls
-- of today's function ambiguous.
drop function if exists pgque._open_window(pgque.position, int, bigint, text);
create or replace function pgque._open_window(p_position pgque.position, p_queue_id int, p_max bigint, p_reader text) returns pgque.position
language sql as $$ select pgque._open_window($1, $2, $3) $$;

create or replace function pgque._turn(
  p_queue text, p_consumer text, p_max bigint, p_worker text, p_timeout interval, p_ack bigint, p_caller name,
  out sub pgque.subscriber, out queue pgque.queue, out pos pgque.position, out leaf int, out open bigint, out due boolean,
  out room bigint, out span bigint, out until timestamptz, out changed boolean
)
language sql as $$
  select pgque._ack(pgque._batch_for(p_caller, p_ack));
  select * from pgque._turn(p_queue, p_consumer, p_max, p_worker, p_timeout, p_caller, null);
$$;

create or replace function pgque._is_newer(p_position pgque.position, p_leaf int) returns boolean
language sql as $$ select true $$;

create or replace function pgque._with_options(p_queue_id int) returns pgque.queue
language sql as $$ select null::pgque.queue from pgque._overtaken() $$;

create or replace function pgque._note_finished(p_sub int, p_batch bigint) returns boolean
language sql as $$ select pgque._close(s, p_batch) = 1 from pgque.subscriber s where s.sub_id = p_sub $$;

-- For calls that end batches, such as purge(): of what up to 0.8 was noted by numbers,
-- they note 0, the end of a batch.
create or replace function pgque._note(p_batch bigint, p_sub int, p_ids bigint[], p_until timestamptz default null, p_leaf int default null) returns bigint[]
language sql as $$ select pgque._record(p_batch, case when p_ids = '{0}' then 'closed' else 'outcome' end::pgque.settled_what, p_ids) $$;

create or replace function pgque._is_closed(p_batch bigint) returns boolean
language sql as $$ select exists (select from pgque.settled s where s.set_batch = p_batch and s.set_what in ('closed', 'moved')) $$;

create or replace function pgque._not_closed(p_tokens bigint[]) returns bigint[]
language sql as $$ select null::bigint[] from pgque._overtaken() $$;

create or replace function pgque._lease_state(p_batch bigint, out closed boolean, out settled bigint, out moved bigint, out until timestamptz)
language sql as $$ select null::boolean, null::bigint, null::bigint, null::timestamptz from pgque._overtaken() $$;

-- For a compaction that waited: it would copy rows as they were before.  It ends as if
-- a table were locked, and the next one goes on.
create or replace function pgque._is_carried(p_sub int, p_cur int) returns boolean
language plpgsql as $$
begin
  raise lock_not_available;
end
$$;

-- Rows of the journal of outcomes as earlier versions wrote them, with set_sub: they are
-- copied below, come out of a dump of an extension, or from an insert that the upgrade
-- overtook.  set_ev_id was the id of a message, or:
--   * 0: the batch is closed.  A worker's batch that was moved was closed too.
--   * below 0: the end of its lease was moved, to set_until
--   * above 2^62: the message id - 2^62 got its outcome in the retry queue
--   * at least 2^62 + 2^61: the batch was moved to the retry queue
--   * the highest: its worker got the answer that a message is lost
create or replace function pgque._convert_outcome() returns trigger
language plpgsql as $$
begin
  new.set_what := case
    when new.set_ev_id = 0 then 'closed'
    when new.set_ev_id < 0 then 'extended'
    when new.set_ev_id = 9223372036854775807 then 'lost'
    when new.set_ev_id >= 6917529027641081856 then 'moved'
    else 'outcome'
  end;
  new.set_ev_id := case new.set_what when 'outcome' then new.set_ev_id & 4611686018427387903 when 'extended' then - new.set_ev_id else 0 end;
  new.set_sub := null;
  return new;
end
$$;
do $$
begin
  if not exists (select from pg_trigger t where t.tgrelid = 'pgque.settled'::regclass and t.tgname = 'convert_outcome') then
    create trigger convert_outcome before insert on pgque.settled for each row when (new.set_sub is not null) execute function pgque._convert_outcome();
  end if;
  if to_regclass('pgque.earlier_settled_0') is null then
    return;
  end if;
  perform set_config('jit', 'off', true);
  -- A transaction with an older snapshot gets 40001.
  update pgque.journal j set journal_cur = j.journal_cur;
  for v_leaf in 0..1 loop
    execute format(
      $sql$
      insert into pgque.settled_%1$s (set_batch, set_ev_id, set_sub, set_until)
      select e.set_batch, e.set_ev_id, e.set_sub, e.set_until
      from pgque.earlier_settled_%1$s e
      where not (e.set_ev_id = 0 and exists (select from pgque.subscriber s where s.sub_id = e.set_sub and s.sub_role = 'pool')
        and exists (select from pgque.earlier_settled_%1$s m where m.set_batch = e.set_batch and m.set_ev_id between 6917529027641081856 and 9223372036854775806))
      on conflict do nothing
      $sql$, v_leaf);
    execute format('drop table pgque.earlier_settled_%s', v_leaf);
  end loop;
  drop table if exists pgque.earlier_settled;
end
$$;

-- For a send() with a key that was waiting.
create or replace function pgque._last_of_key(p_queue_id int, p_key text) returns pgque.event
language plpgsql as $$
declare
  v_newest  record := pgque._newest_of_key(p_queue_id, p_key);
  v_event   pgque.event;
begin
  v_event.ev_id := v_newest.ev_id;
  v_event.ev_owner := v_newest.ev_owner;
  v_event.ev_retry := v_newest.ev_retry;
  v_event.ev_time := v_newest.ev_time;
  v_event.ev_expires := v_newest.ev_expires;
  return v_event;
end
$$;

create or replace function pgque._passed(p_queue_id int, p_id bigint, p_key text) returns boolean
language sql as $$ select pgque._is_passed($1, $2, n.sent_by) from pgque._newest_of_key($1, $3) n $$;

-- For an ack() that creates a table of the archive, and for a create_queue(), which would
-- not set the rights on all that it creates.
create or replace function pgque._keep_from_public(p_relation text) returns void
language plpgsql as $$
begin
  if pg_catalog.starts_with(p_relation, 'pgque.archive_') then
    perform pgque._set_rights(array[p_relation::regclass::oid]);
  else
    perform pgque._overtaken();
  end if;
end
$$;

-- For a receive() or a nack() that was waiting.
create or replace function pgque._lane(p_sub pgque.subscriber, p_key text, p_extra1 text) returns text
language sql as $$ select pgque._lane(p_key, p_extra1) where p_sub.sub_keyed $$;

create or replace function pgque._lanes_out(p_sub pgque.subscriber) returns text[]
language sql as $$ select array(select l.lane from pgque._leased_lanes(p_sub) l) $$;

-- Up to 0.8, only messages of a consumer in keyed order had a lane.
update pgque.retry_queue r set ev_lane = pgque._lane(r.ev_key, r.ev_extra1)
where r.ev_owner > 0 and r.ev_lane is null and coalesce(r.ev_key, r.ev_extra1) is not null;

-- For a maint_tables() that goes on.
create or replace function pgque._make_readers() returns int
language sql as $$ select 0 $$;

-- Functions that have other names since 0.9 keep a copy under the name of before.
do $$
declare
  v_copy    text;
  v_before  text := current_setting('quote_all_identifiers');
begin
  perform set_config('quote_all_identifiers', 'off', true);
  for v_copy in
    select replace(pg_get_functiondef(p.oid), ' pgque.' || n.now || '(', ' pgque.' || n.earlier || '(')
    from (values
      ('_undo_block', '_let_go'),
      ('_execute_insistently', '_insist'),
      ('_wait_for_keyed_sends', '_let_keys_be_said'),
      ('_check_queue', '_look_at'),
      ('_copy_position', '_carry_over'),
      ('_copy_leases', '_carry_leases'),
      ('_is_copied', '_carried'),
      ('_try_lock_batches', '_hold_batches'),
      ('_open_batches', '_held'),
      ('_expired_batches', '_lapsed'),
      ('_current_position', '_standing'),
      ('_oldest_needed_position', '_oldest_need'),
      ('_has_all_messages', '_still_whole'),
      ('_move_to_retry', '_shelve'),
      ('_collect_expired', '_reap'),
      ('_subscriber_by_name', '_named'),
      ('_begin_delivery', '_turn'),
      ('_limit_unused_since', '_paid_since'),
      ('_redeliver', '_again'),
      ('_finish_empty_batch', '_done_with'),
      ('_id_of_row', '_last_of'),
      ('_store_delivery', '_delivered'),
      ('_retries_of_batch', '_waiting_of'),
      ('_choose', '_sift'),
      ('_redelivery_size', '_piece'),
      ('_may_be_poison', '_is_suspect'),
      ('_worker_has_messages', '_holds'),
      ('_lease_retries', '_take_waiting'),
      ('_choose_retries', '_weed'),
      ('_as_retry', '_waiting'),
      ('_as_event', '_event'),
      ('_slim_retry', '_slim_waiting'),
      ('_count', '_tally'),
      ('_key_rows', '_said'),
      ('_claim_retry', '_claim_waiting'),
      ('_claim_retries', '_claim_aside'),
      ('_refresh_retries', '_refresh_waiting'),
      ('_contains', '_among'),
      ('_set_outcomes', '_settle'),
      ('_apply_outcome', '_apply'),
      ('_retry_or_dead', '_again_or_dead'),
      ('_outcome_or_error', '_answer'),
      ('_release_batch', '_hand_back'),
      ('_take_dead_letter', '_exhume'),
      ('_pump_owners', '_pumped'),
      ('_notify_due', '_wake'),
      ('_last_notified', '_woken'),
      ('_not_future_tick', '_not_beyond'),
      ('_delete_ticks', '_forget_ticks'),
      ('_delete_positions', '_forget_positions'),
      ('_rotate_history', '_turn_history'),
      ('_give_up_retries', '_give_up_waiting'),
      ('_give_up_to', '_drop_upto'),
      ('_lock_consumers', '_stop_all'),
      ('_empty_side_tables', '_sweep'),
      ('_shorten_lock_timeout', '_hurry'),
      ('_slowest_consumers', '_stragglers'),
      ('_row_addresses', '_places'),
      ('_was_dropped', '_is_gone'),
      ('_retry_messages_sql', '_waiting_messages_sql'),
      ('_record_action', '_did'),
      ('_end_tick', '_end_of')
    ) n (now, earlier)
    join pg_proc p on p.proname = n.now and p.pronamespace = 'pgque'::regnamespace
  loop
    execute v_copy;
  end loop;
  perform set_config('quote_all_identifiers', v_before, true);
end
$$;
