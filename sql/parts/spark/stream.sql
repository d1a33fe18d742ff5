-- ---------------------------------------------------------------------------
-- stream: how far behind a reader of offsets is, what it could not parse, and what it
-- reads of the archive first
-- ---------------------------------------------------------------------------

create or replace function pgque.stream_lag(
  queue_name text, consumer_name text, tick_id bigint, incarnation uuid default null, after_id bigint default null, caller pgque.caller default current_user,
  out newest_tick bigint, out ticks_behind bigint, out events_behind bigint, out oldest_pending interval
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_sub    pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_tick   pgque.tick := pgque._need_tick(v_queue, $3);
  v_last   pgque.tick := pgque._last_tick(v_queue);
  v_wait   text := current_setting('lock_timeout');
begin
  newest_tick := v_last.tick_id;
  execute format('select count(*) from (%s) t where t.tick_id > $1', pgque._ticks_sql(v_queue.queue_id)) into ticks_behind using $3;
  events_behind := greatest(coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0) - greatest(v_tick.tick_event_seq, after_id), 0);
  begin
    perform pgque._shorten_lock_timeout();
    oldest_pending := greatest(coalesce(pgque.clock()
      - pgque._pending_since(v_sub, pgque._at_tick(pgque._position(v_sub.sub_id), v_tick), v_last), '0'), '0');
    perform set_config('lock_timeout', v_wait, true);
  exception
    when lock_not_available then
      null;
  end;
end
$$;
comment on function pgque.stream_lag(text, text, bigint, uuid, bigint, pgque.caller) is
  'Returns the lag of a consumer that keeps its own offsets and has read up to a tick: the newest tick of the queue, the number of ticks '
  '(ticks_behind) and events (events_behind, at most) after the tick, and the age of the oldest pending event (oldest_pending; 0 if none is '
  'pending, NULL if another session has a table of the queue locked). after_id: events of the next window up to this id are read too; oldest_pending counts them. incarnation: see queue_incarnation(). Errors: PQ001 no such queue; PQ011 not subscribed; '
  'PQ015 the tick is not stored, or the queue is another incarnation.';

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
  queue_name text, consumer_name text, tick_id bigint, msg_ids bigint[], reasons text[], incarnation uuid default null,
  caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_sub    pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_count  int;
begin
  perform pgque._need_alone(v_sub, $1, $2);
  if cardinality($4) is distinct from cardinality($5) or $4 is null or $3 is null then
    perform pgque._fail('PQ005', format('stage_dead needs a tick, and as many reasons as msg_ids, for consumer %I of queue %I', $2, v_queue.queue_name),
      'Pass the end of the window, and two arrays: the ids, and a reason for each.');
  end if;
  perform pgque._not_future_tick(v_queue, $3);
  insert into pgque.bad_record (bad_sub, bad_tick, bad_ev_id, bad_reason)
  select v_sub.sub_id, $3, b.id, b.reason
  from unnest($4, $5) b (id, reason)
  where b.id is not null
  on conflict do nothing;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function pgque.stage_dead(text, text, bigint, bigint[], text[], uuid, pgque.caller) is
  'Notes messages that a stream could not use, each with its reason, and returns how many are new. tick_id: the end of the window that they were '
  'read from. seek() makes them dead letters when it moves the consumer to that tick or beyond; unstage_dead() deletes the notes. incarnation: see '
  'queue_incarnation(). Errors: PQ001 no such queue; PQ005 no tick, not as many reasons as msg_ids, or the consumer has workers; PQ011 not subscribed; PQ015 the tick '
  'is newer than all of the queue, or the queue is another incarnation.';

create or replace function pgque.unstage_dead(queue_name text, consumer_name text, after_tick bigint, incarnation uuid default null, after_id bigint default null,
  caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_sub    pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_count  int;
begin
  perform pgque._need_alone(v_sub, $1, $2);
  perform pgque._not_future_tick(v_queue, $3);
  delete from pgque.bad_record b where b.bad_sub = v_sub.sub_id and b.bad_tick > $3 and (b.bad_ev_id <= after_id) is not true;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function pgque.unstage_dead(text, text, bigint, uuid, bigint, pgque.caller) is
  'Deletes the notes of stage_dead() for windows that end after after_tick, because these are read again, and returns their number. after_id: only those with a higher id. incarnation: see '
  'queue_incarnation(). Errors: PQ001 no such queue; PQ005 the consumer has workers; PQ011 not subscribed; PQ015 the tick is newer than all of the queue, or the queue '
  'is another incarnation.';

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

-- The archive of a consumer, and then the queue, as one stream: the reader subscribes at
-- the tick before the oldest message that the other consumer has not finished.  What came
-- before this tick, the other consumer has passed: so the message is in its archive, in its
-- retry queue or a dead letter of it, and stays among the three whatever becomes of it.
-- All the rest is read from the log.

create or replace function pgque.subscribe_archive(
  queue_name text, consumer_name text, archive_of text, incomplete boolean default false, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_of     pgque.subscriber;
  v_tick   bigint;
begin
  if $2 = $3 then
    perform pgque._fail('PQ005', format('consumer %I of queue %I can not read its own archive', $2, v_queue.queue_name),
      'Pass the name of a new consumer, and the one whose archive it reads.');
  elsif exists (select from pgque._subscriber_by_name(v_queue.queue_id, $2)) then
    return 0;
  end if;
  perform pgque._rebase(v_queue.queue_id);
  v_of := pgque._subscriber(v_queue.queue_name, $3);
  v_tick := (pgque._oldest_needed_position(v_of.sub_id)).pos_tick;
  -- Only now: what the consumer was moved past before that is noted.
  perform pgque._need_archived(v_queue.queue_name, v_of.sub_id, $4);
  if pgque._subscribe(v_queue.queue_name, $2, 'normal', v_tick::text, caller) = 0 then
    return 0;
  end if;
  update pgque.subscriber s set sub_history = v_of.sub_id where s.sub_id = (pgque._subscriber(v_queue.queue_name, $2)).sub_id;
  perform pgque._record_action('subscribe_archive', v_queue.queue_name, jsonb_build_object('consumer_name', $2, 'archive_of', $3, 'incomplete', nullif($4, false)));
  return 1;
end
$$;
comment on function pgque.subscribe_archive(text, text, text, boolean, pgque.caller) is
  'Subscribes a consumer that reads first the archive of another one (archive_of), with archive_next() and archive_read(), and then the queue. '
  'Returns 1, or 0 if the consumer was subscribed already: nothing changes then. The consumer stands at the tick from which on archive_of has not '
  'finished. Needs the right admin, as archive_list() does. incomplete: subscribes even if the archive lacks messages. Errors: PQ001 no such queue; '
  'PQ005 both names are the same, or the archive lacks messages that archive_of has passed since it was subscribed: archive_on_ack was not on all '
  'the time, or the consumer was moved forward; PQ011 archive_of is not subscribed.';

-- Refuses an archive that lacks messages that its subscriber has passed.
create or replace function pgque._need_archived(p_queue text, p_sub int, p_incomplete boolean) returns void
language plpgsql as $$
declare
  v_sub  pgque.subscriber;
begin
  select s.* into v_sub from pgque.subscriber s where s.sub_id = p_sub;
  if not v_sub.sub_archived and p_incomplete is not true then
    perform pgque._fail('PQ005', pg_catalog.format('the archive of consumer %I of queue %I lacks messages', pgque._subscriber_name(v_sub), p_queue),
      'Read what is there with incomplete => true (Spark: option failOnDataLoss=false). An archive has all messages since its consumer was subscribed if '
      'archive_on_ack is set before, and stays on.',
      'Since the consumer was subscribed, archive_on_ack was off for a time, or the consumer was moved forward, or pgque was upgraded from 0.6 or earlier.');
  end if;
end
$$;

create or replace function pgque.archive_of(queue_name text, consumer_name text, caller pgque.caller default current_user) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub  pgque.subscriber := pgque._subscriber($1, $2, caller);
begin
  if v_sub.sub_history is null then
    return null;
  end if;
  return pgque._subscriber_name(pgque._archives(v_sub));
end
$$;
comment on function pgque.archive_of(text, text, pgque.caller) is
  'Returns the name of the consumer whose archive a consumer still has to read (see subscribe_archive()), or NULL if there is none. After seek() was '
  'called for the consumer, it reads no archive. Errors: PQ001 no such queue; PQ011 not subscribed, or the other consumer was unsubscribed.';

-- The subscriber whose archive another one reads.
create or replace function pgque._archives(p_sub pgque.subscriber) returns pgque.subscriber
language plpgsql as $$
declare
  v_of  pgque.subscriber;
begin
  select s.* into v_of from pgque.subscriber s where s.sub_id = p_sub.sub_history;
  if not found then
    perform pgque._fail('PQ011', pg_catalog.format('not subscriber to queue: the consumer whose archive consumer %s reads was unsubscribed', pgque._subscriber_name(p_sub)),
      'Its pending retries are lost. select * from pgque.archive_list(queue) lists what is there.');
  end if;
  return v_of;
end
$$;

-- The query for what a consumer reads before it reads the log, with ids above p_after, up
-- to p_upto.  late are the ids that come from the log: their transactions were still open
-- at the tick, or the messages were delayed then, or replaced since, or the repair of a
-- restored queue made them retries of this consumer.  They are few, and _span_xids()
-- bounds where they are, unless old ids may enter the log at any time.  Retries of the
-- other consumer may be in the log too, see _pump_owners().  All is one statement, so that no
-- message moves while it looks for it.  p_first ends the queries for each place.
create or replace function pgque._archived_sql(
  p_queue pgque.queue, p_consumer text, p_tick_id bigint, p_after bigint, p_upto bigint, p_types text[], p_columns text, p_first text default ''
) returns text
language plpgsql set datestyle = 'ISO' as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber(p_queue.queue_name, p_consumer);
  v_of     pgque.subscriber;
  v_tick   pgque.tick := pgque._need_tick(p_queue, p_tick_id);
  v_upto   bigint := p_upto;
  v_ids    text;
  v_since  int8multirange := pgque._xids(v_tick.tick_snapshot, null);
  v_late   text;
  v_which  text;
begin
  if v_sub.sub_history is null or (pgque._current_position(v_sub, pgque._position(v_sub.sub_id))).pos_tick <> p_tick_id then
    perform pgque._fail('PQ015', pg_catalog.format('consumer %I of queue %I has no archive to read at tick %s', p_consumer, p_queue.queue_name, p_tick_id),
      'It has read it, or was subscribed anew or moved since. Begin again: subscribe another consumer with subscribe_archive().');
  end if;
  v_of := pgque._archives(v_sub);
  if not pgque._noted(p_queue.queue_id, '{external}') then
    v_upto := least(p_upto, v_tick.tick_event_seq);
  end if;
  v_ids := pg_catalog.format('e.ev_id > %s', coalesce(p_after, 0)) || coalesce(' and e.ev_id <= ' || v_upto, '');
  v_late := pg_catalog.format('(e.ev_owner is null or e.ev_owner in (0, %s)) and ', v_sub.sub_id) || v_ids;
  v_which := v_ids || ' and e.ev_id not in (select l.ev_id from late l)'
    || case when p_types is null then '' else pg_catalog.format(' and e.ev_type = any (%L::text[])', pg_catalog.array_remove(p_types, null)) end || p_first;
  return pg_catalog.format(
    $q$
    with late as materialized (
      select e.ev_id from (%1$s) e
      union all
      select e.ev_id from (%2$s) e where (select q.queue_keyed or pgque._noted(q.queue_id, '{moved,key}') from pgque.queue q where q.queue_id = %3$s)
      union all
      select e.ev_id from pgque.retry_queue e where e.ev_owner = %10$s and e.ev_queue = %3$s and %11$s
    )
    select distinct on (e.ev_id) %4$s
    from (
      (select %5$s from pgque.archive e where %13$s and e.arc_consumer = %6$s and %7$s)
      union all
      (select %8$s from pgque.dead_letter e where e.dl_queue_id = %3$s and e.dl_consumer_id = %6$s and %7$s)
      union all
      (select %8$s from (%9$s) e where %7$s)
      union all
      (select %8$s from (%12$s) e where %7$s)
    ) e
    order by e.ev_id
    $q$,
    pgque._rows_sql(p_queue.queue_id, v_late, null, v_since * pgque._span_xids(p_queue, null, v_upto), 'e.*', true),
    pgque._rows_sql(p_queue.queue_id, v_late, null, v_since, 'e.*', true),
    p_queue.queue_id, p_columns, pg_catalog.replace(pgque._event_columns(), 'e.ev_txid', 'null::xid8 as ev_txid'), v_of.sub_consumer,
    v_which, pgque._event_columns(), pgque._renewed_sql(p_queue.queue_id, pg_catalog.format(
      'select (pgque._as_event(e)).* from pgque.retry_queue e where e.ev_owner = %s and e.ev_queue = %s and %s', v_of.sub_id, p_queue.queue_id, v_ids)),
    v_sub.sub_id, v_ids,
    pgque._rows_sql(p_queue.queue_id, case when pgque._noted(p_queue.queue_id, '{moved}') then 'e.ev_owner = ' || v_of.sub_id else 'false' end, null, v_since),
    pgque._archived_by('e', p_queue.queue_id));
end
$$;

-- The settings make it merge the indexes of the days, and read no further than it has to.
create or replace function pgque.archive_next(
  queue_name text, consumer_name text, tick_id bigint, after_id bigint default 0, max_events bigint default null, incomplete boolean default false,
  incarnation uuid default null, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_bitmapscan = off set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'admin'), incarnation);
  v_next   bigint;
begin
  if $5 < 1 then
    perform pgque._fail('PQ005', format('max_events must be at least 1, for queue %I', v_queue.queue_name), 'Leave it out, or null, for no limit.');
  end if;
  execute format('select max(e.ev_id) from (select e.ev_id from (%s) e order by e.ev_id limit %s) e',
    pgque._archived_sql(v_queue, $2, $3, $4, null, null, 'e.ev_id', coalesce(' order by e.ev_id limit ' || $5, '')), coalesce($5::text, 'all'))
  into v_next;
  -- Only now: what was not archived, before that, is noted.
  perform pgque._need_archived(v_queue.queue_name, (pgque._subscriber(v_queue.queue_name, $2)).sub_history, $6);
  return v_next;
end
$$;
comment on function pgque.archive_next(text, text, bigint, bigint, bigint, boolean, uuid, pgque.caller) is
  'Returns the id of the last of the next max_events messages (NULL: of all) above after_id in the archive that a consumer reads first, for '
  'archive_read(); NULL if there are none. tick_id: where the consumer stands. Messages of the other consumer that wait for a retry, and its dead '
  'letters, count as archived. incomplete: reads on even if the archive lacks messages. incarnation: see queue_incarnation(). Errors: PQ001 no such '
  'queue; PQ005 the archive lacks messages, or max_events is below 1; PQ011 not subscribed, or the other consumer was unsubscribed; PQ015 the '
  'consumer has no archive to read, or does not stand at tick_id, or the queue is another incarnation.';

create or replace function pgque.archive_read(
  queue_name text, consumer_name text, tick_id bigint, after_id bigint, upto_id bigint, types text[] default null, incarnation uuid default null,
  caller pgque.caller default current_user,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set work_mem = '64MB' set jit = off as $$
begin
  return query execute pgque._archived_sql(pgque._need_incarnation(pgque._queue($1, caller, 'admin'), incarnation), $2, $3, $4, $5, $6, pgque._event_columns());
end
$$;
comment on function pgque.archive_read(text, text, bigint, bigint, bigint, text[], uuid, pgque.caller) is
  'Returns the messages with ids above after_id, up to upto_id, of the archive that a consumer reads first, in the order of their ids; see '
  'subscribe_archive(). The columns are those of read_window(); ev_txid may be NULL. types: only messages of these types. Each call returns the same '
  'messages, except those that were deleted: by archive_purge(), dlq_purge(), delete_expired() and the like, by drop_policy drop, or because they '
  'expired. Messages that went to a dead_letter_queue are not among them. incarnation: see queue_incarnation(). Errors: PQ001 no such queue; PQ011 '
  'not subscribed, or the other consumer was unsubscribed; PQ015 the consumer has no archive to read, or does not stand at tick_id, or the queue is '
  'another incarnation.';

create or replace function pgque.archive_read_cursor(
  cursor_name text, queue_name text, consumer_name text, tick_id bigint, after_id bigint, upto_id bigint, types text[] default null, incarnation uuid default null,
  columns text[] default null, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set cursor_tuple_fraction = 1 set work_mem = '64MB' set jit = off as $$
begin
  -- Checks the arguments now, and not at the first FETCH.
  perform pgque._archived_sql(pgque._need_incarnation(pgque._queue($2, caller, 'admin'), incarnation), $3, $4, $5, $6, $7, 'e.ev_id');
  -- Not over the query of archive_read(): its functions would run with the rights of the
  -- role that fetches.
  perform pgque._open_cursor($1, $2, format('select %s from pgque.archive_read(%L, %L, %L, %L, %L, %L, %L) e', pgque._read_columns($2, $9), $2, $3, $4, $5, $6, $7, $8));
  return 200;
end
$$;
comment on function pgque.archive_read_cursor(text, text, text, bigint, bigint, bigint, text[], uuid, text[], pgque.caller) is
  'Opens a cursor named cursor_name over the rows of archive_read(), and returns how many rows to FETCH at once, in the same transaction. columns: '
  'only these columns of archive_read(), or key, payload, header_names, header_values as read_window_cursor() has them. Errors: PQ001 no such queue; '
  'PQ005 no such column; PQ011 not subscribed, or the other consumer was unsubscribed; PQ015 the consumer has no archive to read, or does not stand '
  'at tick_id, or the queue is another incarnation; 42P03 the transaction has a cursor with this name.';
