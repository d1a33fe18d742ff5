-- ---------------------------------------------------------------------------
-- outcomes: what becomes of a message, retry, dead letters, archive
-- ---------------------------------------------------------------------------

-- Gives messages of an open batch their outcome; p_ids null means all that have
-- none yet.  p_what: ack, archive, nack (again after p_after, or exhausted),
-- retry (again in any case), dead, release (again at once).  The rows
-- are read again from where they are stored, so nothing a client says but the
-- ids is believed, and each message gets one outcome.  Raises nothing for a
-- batch that is lost: the answer says so message by message.  A message that
-- somebody else has locked, and may be taking over, is lost; with p_wait it is
-- waited for, since a caller that raises an error has to be sure.
create or replace function pgque._settle(p_batch bigint, p_ids bigint[], p_what text, p_after interval, p_reason text, p_wait boolean)
returns setof pgque.outcome
language plpgsql as $$
declare
  v_sub    pgque.subscriber;
  v_queue  pgque.queue;
  v_lease  pgque.position;
  v_closed  boolean := true;
  v_until  timestamptz;
  v_open   boolean;            -- messages of it are still in the log
  v_leaf   int;
  v_and    text := '';
  v_row    pgque.event;
  v_rows   pgque.event[];
  v_new    bigint[];
  v_gone   bigint[];
  v_items  pgque.retry_queue[] := '{}';
  v_item   pgque.retry_queue;
begin
  p_ids := pgque._flat(p_ids);
  -- Nobody unsubscribes it until this is committed; of a pool, others go on meanwhile.
  select s.* into v_sub
  from pgque.subscriber s
  where (s.sub_id & 1048575) = (p_batch & 1048575)::int and s.sub_role <> 'pool'
  for no key update;
  if not found then
    select s.* into v_sub from pgque.subscriber s where (s.sub_id & 1048575) = (p_batch & 1048575)::int for key share;
  end if;
  select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue;
  if v_sub.sub_role = 'pool' then
    perform pg_catalog.pg_advisory_xact_lock(p_batch);
    v_lease := pgque._lease(v_sub.sub_id, p_batch);
    select t.closed, coalesce(t.until, v_lease.pos_until) into v_closed, v_until from pgque._lease_state(p_batch) t;
    v_open := v_lease.pos_fresh > 0 and not v_closed;
    if v_open and pgque._old_snapshot() then
      -- Where rows are locked, an old snapshot is found out.
      perform pgque._shelve(v_queue, v_sub, v_lease, v_until);
      v_open := false;
    end if;
  elsif v_sub.sub_id is not null then
    v_leaf := pgque._journal_leaf();
    v_lease := pgque._carried_position(v_sub.sub_id, v_leaf);
    v_open := v_lease.pos_batch = p_batch;
    if v_open is not true then
      v_lease := null;
    end if;
  end if;

  if v_open and v_sub.sub_role = 'pool' then
    v_rows := pgque._lease_rows(v_sub, v_lease, p_ids);
    -- One may be settled in the leaf that is not written any more.
    v_new := pgque._note(p_batch, v_sub.sub_id, array(
      select r.ev_id
      from pg_catalog.unnest(v_rows) r
      where not exists (select from pgque.settled s where s.set_batch = p_batch and s.set_ev_id = r.ev_id)));
    if p_ids is null or (pgque._lease_state(p_batch)).settled >= v_lease.pos_done_count then
      perform pgque._note(p_batch, v_sub.sub_id, array[0]);
    end if;
  elsif v_open then
    if pg_catalog.cardinality(p_ids) = 1 then
      v_row := pgque._near_event(v_queue, v_sub, v_lease, p_ids[1]);
      if v_row.ev_id is null then
        execute pgque._batch_sql(v_sub, v_lease, ' and e.ev_id = ' || coalesce(p_ids[1]::text, 'null')) || ' limit 1' into v_row;
      end if;
      if v_row.ev_id is not null then
        v_rows := array[v_row];
      end if;
    else
      if p_ids is not null then
        v_and := pg_catalog.format(' and e.ev_id = any (%L::bigint[])', pg_catalog.array_remove(p_ids, null));
      end if;
      execute pg_catalog.format('select array_agg(row(e.*)::pgque.event) from (select e.* from (%s) e limit %L) e',
        pgque._batch_sql(v_sub, v_lease, v_and), pg_catalog.cardinality(p_ids)) into v_rows;
    end if;
    v_new := pgque._note(p_batch, v_sub.sub_id, array(select r.ev_id from pg_catalog.unnest(v_rows) r), null, v_leaf);
    if v_new is not null then
      -- The batch is another one now: an old snapshot must not use what it shows.
      perform pgque._append_position(v_lease, v_leaf);
      if v_queue.queue_keyed then
        v_rows := pgque._with_bodies(v_sub.sub_queue, v_rows);
      end if;
    end if;
  end if;

  if v_new is not null and p_what <> 'ack' then
    v_items := array(
      select pgque._waiting(r, v_sub, coalesce(r.ev_retry, 0) + case when v_sub.sub_role = 'pool' then 1 else v_lease.pos_attempt end,
        null, null, v_lease.pos_worker)
      from pg_catalog.unnest(v_rows) r
      where (r.ev_id in (select pg_catalog.unnest((select v_new)))) is true);
  end if;
  if v_sub.sub_role = 'pool' then
    if p_wait then
      perform from pgque.retry_queue r
      where r.ev_owner = v_sub.sub_id and r.ev_batch = p_batch and r.ev_id = any (p_ids)
      for update;
    end if;
    with found as materialized (
      -- Whatever somebody else has locked is being taken over.
      select e.ctid from pgque.retry_queue e
      where e.ev_owner = v_sub.sub_id and e.ev_batch = p_batch
        -- The index finds one message of many; many are looked up in a hash table.
        and e.ev_id >= coalesce((select min(i.id) from pg_catalog.unnest(p_ids) i (id)), 0)
        and e.ev_id <= coalesce((select max(i.id) from pg_catalog.unnest(p_ids) i (id)), 9223372036854775807)
        and (p_ids is null or (e.ev_id in (select pg_catalog.unnest((select p_ids)))) is true)
      order by e.ev_id
      for update skip locked
    ),
    gone as (
      delete from pgque.retry_queue r using found f
      where r.ctid = f.ctid
      returning r.*
    )
    select v_items || coalesce(pg_catalog.array_agg(row(g.*)::pgque.retry_queue), '{}'),
      v_new || pg_catalog.array_agg(g.ev_id), pg_catalog.array_agg(g.ev_id + 4611686018427387904)
    into v_items, v_new, v_gone
    from gone g;
    if p_ids is not null and v_gone is not null then
      -- So that the batch is known to be whole but for them; see _still_whole().
      perform pgque._note(p_batch, v_sub.sub_id, v_gone);
    end if;
    if p_ids is not null and pg_catalog.cardinality(p_ids) > coalesce(pg_catalog.cardinality(v_new), 0) and exists (
      select from pgque.retry_queue r
      where r.ev_owner = v_sub.sub_id and r.ev_batch = p_batch and (r.ev_id in (select pg_catalog.unnest((select p_ids)))) is true)
    then
      -- Who has one of them locked may let go of it again; but the caller is told
      -- that it is lost, so an ack of all that is left must not finish it.
      perform pgque._note(p_batch, v_sub.sub_id, array[9223372036854775807]);
    end if;
  end if;

  if p_what = 'archive' then
    perform pgque._archive(v_queue, v_sub, v_items, p_reason);
  elsif p_what <> 'ack' then
    foreach v_item in array v_items loop
      if p_what = 'dead'
        or (p_what = 'nack' and (coalesce(v_item.ev_retry, 0) >= v_queue.queue_max_retries
          or (v_sub.sub_role = 'pool' and v_item.ev_receives >= v_queue.queue_max_receive_attempts)))
      then
        v_item.ev_error := coalesce(p_reason, v_item.ev_error);
        perform pgque._bury(v_queue, v_sub, v_item, coalesce(p_reason, case
          when p_what = 'dead' then 'dead'
          when coalesce(v_item.ev_retry, 0) >= v_queue.queue_max_retries then 'retries used up'
          else 'receive attempts used up'
        end));
        continue;
      end if;
      v_item.ev_batch := null;
      v_item.ev_worker := null;
      if p_what in ('nack', 'retry') then
        v_item.ev_retry := coalesce(v_item.ev_retry, 0) + 1;
        v_item.ev_error := p_reason;
      end if;
      v_item.ev_retry_after := case
        when p_what in ('nack', 'retry') then pgque.clock() + coalesce(p_after, pgque._backoff(v_queue.queue_retry_backoff, v_item.ev_retry))
        else pgque.clock()
      end;
      insert into pgque.retry_queue select v_item.*
      -- As in _shelve().
      on conflict (ev_owner, ev_id, ev_queue) do update
      set (ev_retry_after, ev_receives, ev_batch, ev_worker, ev_retry, ev_error)
        = (excluded.ev_retry_after, excluded.ev_receives, excluded.ev_batch, excluded.ev_worker, excluded.ev_retry, excluded.ev_error);
    end loop;
  end if;

  if p_ids is null or pg_catalog.cardinality(p_ids) = pg_catalog.cardinality(v_new) then
    return query select n, true, null::text from pg_catalog.unnest(coalesce(p_ids, v_new)) n;
  else
    return query
      select i.id, i.ok,
        case
          when i.ok then null
          when exists (
            select from pgque.retry_queue r
            where v_sub.sub_role = 'pool' and r.ev_owner = v_sub.sub_id and r.ev_id = i.id and r.ev_batch is not null) then 'lost to another worker'
          when i.id in (select r.ev_id from pg_catalog.unnest((select v_rows)) r) then 'settled already'
          when exists (select from pgque.settled s where s.set_batch = p_batch and s.set_ev_id in (i.id, i.waited)) then 'settled already'
          when v_lease.pos_sub is null or (v_closed and v_sub.sub_role = 'pool') then 'batch not open'
          else 'not in this batch'
        end
      from (
        select u.id, case when u.id between 1 and 4611686018427387903 then u.id + 4611686018427387904 end as waited,
          (u.id in (select pg_catalog.unnest((select v_new)))) is true as ok
        from pg_catalog.unnest(p_ids) u (id)
      ) i;
  end if;
end
$$;

-- How long to wait before a message is tried for the n-th time again.
create or replace function pgque._backoff(p_backoff jsonb, p_n int) returns interval
language sql volatile as $$
  select case
    when p_backoff is null then interval '60 seconds'
    else make_interval(secs => (least(
        coalesce((p_backoff->>'cap')::double precision, 3600),
        coalesce((p_backoff->>'base')::double precision, 1) * power(coalesce((p_backoff->>'factor')::double precision, 2), least(p_n, 100) - 1))
      * (1 - coalesce((p_backoff->>'jitter')::double precision, 0) * random())))
  end
$$;

-- A message nobody will be given again goes where its queue says.
create or replace function pgque._bury(p_queue pgque.queue, p_sub pgque.subscriber, p_item pgque.retry_queue, p_reason text) returns void
language plpgsql as $$
begin
  if p_queue.queue_drop_policy = 'drop' then
    perform pgque._tally(p_queue.queue_id, p_sub.sub_id, 'dropped', 1);
    return;
  elsif p_queue.queue_drop_policy = 'dead_letter' and p_queue.queue_dead_letter_queue is not null then
    begin
      perform pgque._send(
        (select q.queue_name from pgque.queue q where q.queue_id = p_queue.queue_dead_letter_queue), p_item.ev_type, p_item.ev_data,
        p_item.ev_extra1, p_item.ev_extra2, p_item.ev_extra3, p_item.ev_extra4,
        coalesce(p_item.ev_headers, '{}') || jsonb_build_object('pgque_dead', jsonb_build_object(
          'queue', p_queue.queue_name,
          'consumer', (select c.co_name from pgque.consumer c where c.co_id = p_sub.sub_consumer),
          'msg_id', p_item.ev_id, 'reason', p_reason, 'receive_count', p_item.ev_receives,
          'retry_count', coalesce(p_item.ev_retry, 0), 'dead_at', pgque.clock())),
        p_item.ev_bytes);
      return;
    exception
      when sqlstate 'PQ001' or sqlstate 'PQ003' or sqlstate 'PQ013' or undefined_table then
        -- It takes nothing now, or is just gone; the message is not to be lost.
        null;
    end;
  end if;
  perform pgque._add_dead_letter(p_item, p_sub.sub_consumer, p_reason, p_queue.queue_drop_policy = 'hold');
end
$$;

-- Puts a message among the dead letters of a consumer; false if it is there.
create or replace function pgque._add_dead_letter(p_item pgque.retry_queue, p_consumer int, p_reason text, p_held boolean) returns boolean
language plpgsql as $$
begin
  insert into pgque.dead_letter (dl_queue_id, dl_consumer_id, dl_time, dl_reason, dl_receives, dl_held, ev_error,
    ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)
  values (p_item.ev_queue, p_consumer, pgque.clock(), p_reason, p_item.ev_receives, p_held, coalesce(p_item.ev_error, p_reason),
    p_item.ev_id, p_item.ev_time, p_item.ev_txid, p_item.ev_retry, p_item.ev_type, p_item.ev_data,
    p_item.ev_extra1, p_item.ev_extra2, p_item.ev_extra3, p_item.ev_extra4,
    p_item.ev_headers, p_item.ev_key, p_item.ev_bytes, p_item.ev_expires)
  on conflict on constraint dead_letter_once do nothing;
  return found;
end
$$;

-- A span of time from now that must neither be negative nor end when no client
-- can read the time any more.
create or replace function pgque._not_negative(p_span interval, p_name text, p_batch bigint) returns interval
language plpgsql immutable as $$
begin
  if p_span < '0' then
    perform pgque._fail('PQ005', pg_catalog.format('%s must not be negative, for batch %s', p_name, p_batch),
      'It is a time from now on, such as ''30 seconds''.');
  elsif p_span > '100 years' then
    perform pgque._fail('PQ005', pg_catalog.format('%s must not be longer than 100 years, for batch %s', p_name, p_batch),
      'Not every client can read the time when that ends.');
  end if;
  return p_span;
end
$$;

-- The answer about one message of a batch, or an error if it is not there.
create or replace function pgque._answer(p_outcome pgque.outcome, p_batch bigint) returns pgque.outcome
language plpgsql as $$
begin
  if p_outcome.reason = 'not in this batch' then
    perform pgque._fail('PQ007', pg_catalog.format('message %s is not in batch %s', coalesce(p_outcome.msg_id::text, 'null'), p_batch),
      'Pass a message of this batch, as receive() returned it.');
  elsif p_outcome.reason in ('batch not open', 'lost to another worker') then
    perform pgque._no_batch(p_batch);
  end if;
  return p_outcome;
end
$$;

create or replace function pgque.nack(batch_id bigint, msg pgque.message, retry_after interval default null, reason text default null, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  perform pgque._answer(f, $1) from pgque._settle(pgque._batch_for(caller, $1), array[($2).msg_id], 'nack', pgque._not_negative($3, 'retry_after', $1), $4, true) f;
  return 1;
end
$$;
comment on function pgque.nack(bigint, pgque.message, interval, text, pgque.caller) is
  'The same as nack(batch_id, msg pgque.delivery, ...), for clients that write the ten columns of pgque.message.';

create or replace function pgque.nack(batch_id bigint, msg pgque.delivery, retry_after interval default null, reason text default null, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  perform pgque._answer(f, $1) from pgque._settle(pgque._batch_for(caller, $1), array[($2).msg_id], 'nack', pgque._not_negative($3, 'retry_after', $1), $4, true) f;
  return 1;
end
$$;
comment on function pgque.nack(bigint, pgque.delivery, interval, text, pgque.caller) is
  'Rejects one message of an open batch and returns 1, also when repeated. The message is redelivered to this consumer after retry_after (NULL: the '
  'queue''s retry_backoff), or becomes a dead letter once the queue''s max_retries are used up. The rest of the batch stays open: acknowledge it when '
  'done. Of msg only msg_id counts. For a worker''s batch whose lease expired, the call waits for a transaction that may be taking the message over. '
  'Errors: PQ005 retry_after is negative; PQ007 the message is not in this batch; PQ012 the batch is not open.';

create or replace function pgque.nack(batch_id bigint, msg_ids bigint[], retry_after interval default null, reason text default null, caller pgque.caller default current_user)
returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return query select f.* from pgque._settle(pgque._batch_for(caller, $1), coalesce($2, '{}'), 'nack', pgque._not_negative($3, 'retry_after', $1), $4, false) f;
end
$$;
comment on function pgque.nack(bigint, bigint[], interval, text, pgque.caller) is
  'Rejects many messages of an open batch, by id. Returns one row a message as ack(batch_id, msg_ids) does: msg_id, ok, and the reason if not ok. '
  'Errors: PQ005 retry_after is negative or above 100 years.';

create or replace function pgque.ack(batch_id bigint, msg_ids bigint[], caller pgque.caller default current_user) returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_archive  boolean;
begin
  select q.queue_archive_on_ack into v_archive
  from pgque.subscriber s
  join pgque.queue q on q.queue_id = s.sub_queue
  where (s.sub_id & 1048575) = ($1 & 1048575)::int;
  return query select f.* from pgque._settle(pgque._batch_for(caller, $1), coalesce($2, '{}'), case when v_archive then 'archive' else 'ack' end, null, 'acked', false) f;
end
$$;
comment on function pgque.ack(bigint, bigint[], pgque.caller) is
  'Acknowledges some messages of a batch; the others stay in it. Returns one row a message: msg_id, ok, and the reason if not ok (not in this batch, '
  'settled already, lost to another worker, batch not open). Once it returned "lost to another worker", an ack of the whole batch returns 0: it could '
  'acknowledge that message too, if the transaction of the other worker is rolled back. With archive_on_ack the messages are kept in the archive.';

-- Gives messages up at once, as if their attempts were used up.
create or replace function pgque._dead(p_batch bigint, p_ids bigint[], p_reason text, caller pgque.caller default current_user) returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return query select f.* from pgque._settle(pgque._batch_for(caller, $1), coalesce($2, '{}'), 'dead', null, $3, false) f;
end
$$;

create or replace function pgque.dead(batch_id bigint, msg_ids bigint[], reason text default null) returns setof pgque.outcome
language sql as $$ select * from pgque._dead($1, $2, $3) $$;
comment on function pgque.dead(bigint, bigint[], text) is
  'Gives up messages of a batch at once: drop_policy applies to them (by default they become dead letters), with the reason. Returns one row a '
  'message as ack(batch_id, msg_ids) does.';

create or replace function pgque.archive(batch_id bigint, msg_ids bigint[] default null, caller pgque.caller default current_user) returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return query select f.* from pgque._settle(pgque._batch_for(caller, $1), $2, 'archive', null, 'archived', false) f;
end
$$;
comment on function pgque.archive(bigint, bigint[], pgque.caller) is
  'Acknowledges messages of a batch, all by default, and keeps them in the archive; see archive_list(). Returns one row a message as ack(batch_id, '
  'msg_ids) does.';

-- Leases are of workers only.
create or replace function pgque._need_pool(p_batch bigint) returns void
language plpgsql as $$
begin
  if (pgque._batch_owner(p_batch)).sub_role <> 'pool' then
    perform pgque._fail('PQ005', pg_catalog.format('batch %s is not leased', p_batch),
      'Only receive() with a worker leases messages; a consumer on its own keeps its batch until it finishes it.');
  end if;
end
$$;

create or replace function pgque.release(batch_id bigint, msg_ids bigint[] default null, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  batch_id := pgque._batch_for(caller, $1);
  perform pgque._need_pool($1);
  return (select count(*) from pgque._settle($1, $2, 'release', null, null, false) f where f.ok);
end
$$;
comment on function pgque.release(bigint, bigint[], pgque.caller) is
  'Releases messages of a worker''s batch, all by default, and returns their number. Any worker can receive them at once; their receive_count stays. '
  'Errors: PQ005 the batch is not a worker''s.';

create or replace function pgque.set_visibility(batch_id bigint, visibility_timeout interval, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_sub    pgque.subscriber;
  v_lease  pgque.position;
  v_until  timestamptz;
  v_held   int;
begin
  batch_id := pgque._batch_for(caller, $1);
  perform pgque._need_pool($1);
  if pgque._not_negative(coalesce($2, '-1 second'), 'visibility_timeout', $1) = '0' then
    return pgque.release($1);
  end if;
  v_sub := pgque._batch_owner($1);
  perform pg_advisory_xact_lock($1);
  v_lease := pgque._lease(v_sub.sub_id, $1);
  v_until := pgque.clock() + $2;
  with found as materialized (
    select e.ctid from pgque.retry_queue e
    where e.ev_owner = v_sub.sub_id and e.ev_batch = $1
    order by e.ev_id
    for update skip locked
  )
  update pgque.retry_queue r set ev_retry_after = v_until
  from found f
  where r.ctid = f.ctid;
  get diagnostics v_held = row_count;
  if v_lease.pos_fresh > 0 and not (pgque._lease_state($1)).closed then
    v_held := v_held + cardinality(pgque._shelve(null, v_sub, v_lease, v_until));
  end if;
  return v_held;
end
$$;
comment on function pgque.set_visibility(bigint, interval, pgque.caller) is
  'Sets when the lease on a worker''s batch expires, counted from now; 0 releases the batch. Returns the number of messages still leased, 0 if the '
  'batch is lost. Errors: PQ005 visibility_timeout is NULL, negative or above 100 years.';

create or replace function pgque.extend(batch_id bigint, by interval, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_sub    int;
  v_lease  pgque.position;
  v_state  record;
  v_until  timestamptz;
  v_count  int := 0;
  v_held   int;
begin
  batch_id := pgque._batch_for(caller, $1);
  perform pgque._need_pool($1);
  perform pgque._not_negative(coalesce($2, '-1 second'), 'the time to add', $1);
  v_sub := (pgque._batch_owner($1)).sub_id;
  perform pg_advisory_xact_lock($1);
  v_lease := pgque._lease(v_sub, $1);
  v_state := pgque._lease_state($1);
  with found as materialized (
    select e.ctid from pgque.retry_queue e
    where e.ev_owner = v_sub and e.ev_batch = $1
    order by e.ev_id
    for update skip locked
  )
  update pgque.retry_queue r set ev_retry_after = greatest(r.ev_retry_after, pgque.clock()) + $2
  from found f
  where r.ctid = f.ctid;
  get diagnostics v_held = row_count;
  if v_lease.pos_fresh > 0 and not v_state.closed then
    v_until := greatest(coalesce(v_state.until, v_lease.pos_until), pgque.clock()) + $2;
    perform pgque._note($1, v_sub, array[v_state.moved - 1], v_until);
    v_count := v_lease.pos_done_count - v_state.settled;
    if pgque._old_snapshot() then
      -- An old snapshot does not see that the batch was closed; now it meets that row.
      perform pgque._shelve(null, pgque._batch_owner($1), v_lease, v_until);
    end if;
  end if;
  return v_count + v_held;
end
$$;
comment on function pgque.extend(bigint, interval, pgque.caller) is
  'Extends the lease on a worker''s batch by an interval; it never shortens the lease. Returns the number of messages still leased, 0 if the batch is '
  'lost. Errors: PQ005 the interval is negative or above 100 years.';

create or replace function pgque.event_retry(batch_id bigint, event_id bigint, retry_time timestamptz, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_now  timestamptz := pgque.clock();
begin
  return (
    select (pgque._answer(f, $1)).ok::int
    from pgque._settle(pgque._batch_for(caller, $1), array[$2], 'retry',
      -- An infinite one has no distance from now.
      pgque._not_negative(case when $3 is not null then least(greatest($3, v_now), v_now + interval '101 years') - v_now end, 'the time until then', $1),
      null, true) f);
end
$$;
comment on function pgque.event_retry(bigint, bigint, timestamptz, pgque.caller) is
  'Rejects one event of an open batch: it is redelivered to this consumer at retry_time (NULL: as nack() does), however often it failed before. '
  'Returns 1, or 0 if it was rejected already. Errors: PQ005 more than 100 years from now; PQ007 the event is not in this batch; PQ012 the batch is '
  'not open.';

create or replace function pgque.event_retry(batch_id bigint, event_id bigint, retry_seconds int) returns int
language sql as $$ select pgque.event_retry($1, $2, pgque.clock() + pg_catalog.make_interval(secs => $3::pg_catalog.float8)) $$;
comment on function pgque.event_retry(bigint, bigint, int) is 'The same with a number of seconds from now.';

-- Whether a batch is open in any way.
create or replace function pgque._is_open(p_batch bigint) returns boolean
language plpgsql as $$
declare
  v_sub  pgque.subscriber := pgque._batch_owner(p_batch);
begin
  if v_sub.sub_role = 'pool' then
    return ((pgque._lease(v_sub.sub_id, p_batch)).pos_fresh > 0 and not (pgque._lease_state(p_batch)).closed) is true
      or exists (select from pgque.retry_queue r where r.ev_owner = v_sub.sub_id and r.ev_batch = p_batch);
  end if;
  return v_sub.sub_id is not null and (pgque._position(v_sub.sub_id)).pos_batch is not distinct from p_batch;
end
$$;

create or replace function pgque.batch_retry(batch_id bigint, retry_seconds int, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  batch_id := pgque._batch_for(caller, $1);
  if not pgque._is_open($1) then
    perform pgque._no_batch($1);
  end if;
  return (select count(*) from pgque._settle($1, null, 'retry', pgque._not_negative(make_interval(secs => $2), 'retry_seconds', $1), null, false));
end
$$;
comment on function pgque.batch_retry(bigint, int, pgque.caller) is
  'Rejects every event of an open batch that was not rejected already, and returns their number. They are redelivered in retry_seconds from now '
  '(NULL: as nack() does). Finish the batch afterwards. Errors: PQ005 the number is negative; PQ012 the batch is not open.';

-- The consumers on their own, whose retries come back through the log, and 0:
-- delayed messages are for everybody.  Workers take theirs where they wait.
create or replace function pgque._pumped() returns setof int
language sql stable as $$
  select 0 union all select s.sub_id from pgque.subscriber s where s.sub_role in ('normal', 'coop_main')
$$;

create or replace function pgque.maint_retry_events() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '200ms' set enable_seqscan = off set jit = off as $$
declare
  v_now       timestamptz := pgque.clock();   -- a volatile function is in no index condition
  v_queue_id  int;
  v_count     int := 0;
begin
  for v_queue_id in
    select distinct d.ev_queue
    from pgque._pumped() o (id)
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
  return v_count;
end
$$;
comment on function pgque.maint_retry_events() is
  'Moves messages whose retry is due back into their queues, for their consumers alone, at most 10,000 of each queue. Returns their number; the next '
  'tick delivers them.';

-- Claims messages with keys that wait for their consumer's first delivery, in rows
-- that the caller has locked.  Gives back those that may leave: they have their
-- newest bodies, and nobody is replacing them.
create or replace function pgque._claim_aside(p_queue_id int, p_rows pgque.retry_queue[], out owners int[], out ids bigint[])
language plpgsql as $$
declare
  v_claim  record;
begin
  if pg_catalog.cardinality(p_rows) = 0 then
    return;
  end if;
  v_claim := pgque._claim((select q from pgque.queue q where q.queue_id = p_queue_id), array(select pgque._event(r) from pg_catalog.unnest(p_rows) r));
  select pg_catalog.array_agg(r.ev_owner), pg_catalog.array_agg(r.ev_id) into owners, ids
  from pg_catalog.unnest(p_rows) r
  where r.ev_id not in (select b.id from pg_catalog.unnest(v_claim.busy) b (id));
  perform pgque._refresh_waiting(p_queue_id, null, ids) where ids is not null;   -- null stands for all ids
end
$$;

create or replace function pgque._retry_queue(p_queue_id int) returns int
language plpgsql as $$
declare
  v_txid   xid8 := pg_catalog.pg_current_xact_id();
  v_now    timestamptz;
  v_aside  record;
  v_count  int;
begin
  perform pgque._rebase(p_queue_id);
  v_now := pgque.clock();   -- what was put there just now is due
  v_aside := pgque._claim_aside(p_queue_id, array(
    select e.item
    from pgque.subscriber s
    cross join lateral (
      select e as item from pgque.retry_queue e
      where e.ev_owner = s.sub_id and e.ev_retry_after <= v_now and e.ev_key is not null and e.ev_receives = 0
      order by e.ev_retry_after
      limit 10000
      for update skip locked
    ) e
    where s.sub_queue = p_queue_id and s.sub_id in (select o.id from pgque._pumped() o (id))
    limit 10000));
  with found as materialized (
    select e.ctid
    from (
      select o.id from pgque._pumped() o (id)
      where o.id = 0 or exists (select from pgque.subscriber s where s.sub_id = o.id and s.sub_queue = p_queue_id)
    ) o
    cross join lateral (
      select e.ctid from pgque.retry_queue e
      where e.ev_owner = o.id and e.ev_queue = p_queue_id and e.ev_retry_after <= v_now
        and (e.ev_key is null or e.ev_receives > 0 or e.ev_owner = 0
          or (e.ev_owner, e.ev_id) in (select f.owner, f.id from rows from (pg_catalog.unnest(v_aside.owners), pg_catalog.unnest(v_aside.ids)) f (owner, id)))
      order by e.ev_retry_after
      limit 10000
      for update skip locked
    ) e
    limit 10000
  ),
  due as (
    delete from pgque.retry_queue r using found f
    where r.ctid = f.ctid
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
  -- An id that nobody gets: by it the loop sees that there is something to tick.
  perform pg_catalog.nextval(q.queue_event_seq) from pgque.queue q where q.queue_id = p_queue_id and v_count > 0;
  return v_count;
end
$$;

create or replace function pgque.dlq_inspect(
  queue_name text, limit_count int default 100, caller pgque.caller default current_user,
  out dl_id bigint, out dl_time timestamptz, out dl_reason text,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text, out consumer_name text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query
    select d.dl_id, d.dl_time, d.dl_reason, d.ev_id, d.ev_time, d.ev_txid, d.ev_retry, d.ev_type, d.ev_data,
      d.ev_extra1, d.ev_extra2, d.ev_extra3, d.ev_extra4, c.co_name
    from pgque.dead_letter d
    join pgque.consumer c on c.co_id = d.dl_consumer_id
    where d.dl_queue_id = v_queue.queue_id
    order by d.dl_id desc
    limit case when $2 < 0 then 0 else $2 end;
end
$$;
comment on function pgque.dlq_inspect(text, int, pgque.caller) is
  'Returns the newest dead letters of a queue, at most limit_count, with consumer and reason. Errors: PQ001 no such queue.';

-- Takes a dead letter out of the table, or PQ008.  Two sessions can not take
-- the same one.
create or replace function pgque._exhume(p_dl_id bigint, p_caller name) returns pgque.dead_letter
language plpgsql as $$
declare
  v_dead  pgque.dead_letter;
begin
  delete from pgque.dead_letter d
  where d.dl_id = p_dl_id and pgque._may(p_caller, 'admin', d.dl_queue_id)
  returning d.* into v_dead;
  if not found then
    perform pgque._fail('PQ008', pg_catalog.format('not a dead letter: %s', coalesce(p_dl_id::text, 'null')),
      'It was replayed, requeued or purged already; select * from pgque.dlq_inspect(queue) lists what is there.');
  end if;
  return v_dead;
end
$$;

create or replace function pgque.dlq_replay(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_dead  pgque.dead_letter := pgque._exhume(dlq_replay.dl_id, caller);
begin
  return pgque._send(
    (select q.queue_name from pgque.queue q where q.queue_id = v_dead.dl_queue_id), v_dead.ev_type, v_dead.ev_data,
    v_dead.ev_extra1, v_dead.ev_extra2, v_dead.ev_extra3, v_dead.ev_extra4, v_dead.ev_headers, v_dead.ev_bytes);
end
$$;
comment on function pgque.dlq_replay(bigint, pgque.caller) is
  'Sends a dead letter as a new message to every consumer of its queue, deletes the dead letter, and returns the new id. Errors: PQ008 no such dead '
  'letter; PQ013 the queue is paused.';

create or replace function pgque.dlq_replay_all(queue_name text, caller pgque.caller default current_user, out replayed int, out failed int, out first_error text)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_id     bigint;
begin
  replayed := 0;
  failed := 0;
  for v_id in select d.dl_id from pgque.dead_letter d where d.dl_queue_id = v_queue.queue_id order by d.dl_id loop
    begin
      perform pgque.dlq_replay(v_id);
      replayed := replayed + 1;
    exception
      when others then
        failed := failed + 1;
        first_error := coalesce(first_error, sqlerrm);
    end;
  end loop;
end
$$;
comment on function pgque.dlq_replay_all(text, pgque.caller) is
  'Replays all dead letters of a queue. Returns replayed (how many were sent), failed (how many could not be sent, and stay) and first_error. Errors: '
  'PQ001 no such queue.';

create or replace function pgque.dlq_requeue(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_dead  pgque.dead_letter := pgque._exhume(dlq_requeue.dl_id, caller);
  v_sub   int;
begin
  select s.sub_id into v_sub
  from pgque.subscriber s
  where s.sub_queue = v_dead.dl_queue_id and s.sub_consumer = v_dead.dl_consumer_id and s.sub_main is null
  for key share;
  if not found then
    perform pgque._fail('PQ011', format('not subscriber to queue: the consumer of dead letter %s was unsubscribed', $1),
      'Subscribe it again, or send the message to every consumer with pgque.dlq_replay(dl_id).');
  end if;
  insert into pgque.retry_queue as r (ev_retry_after, ev_queue, ev_owner, ev_error,
    ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires, ev_lane)
  select pgque.clock(), v_dead.dl_queue_id, s.sub_id, v_dead.ev_error,
    v_dead.ev_id, v_dead.ev_time, v_dead.ev_txid, v_dead.ev_type, v_dead.ev_data, v_dead.ev_extra1, v_dead.ev_extra2,
    v_dead.ev_extra3, v_dead.ev_extra4, v_dead.ev_headers, v_dead.ev_key, v_dead.ev_bytes,
    -- One that had expired is given another life.
    case when v_dead.ev_expires > pgque.clock() then v_dead.ev_expires end,
    pgque._lane(s, v_dead.ev_key, v_dead.ev_extra1)
  from pgque.subscriber s
  where s.sub_id = v_sub
  -- It may wait there already: its consumer was moved back and failed it again.
  on conflict on constraint retry_queue_pkey do update
  set ev_retry_after = case when r.ev_batch is not null and r.ev_retry_after > excluded.ev_retry_after then r.ev_retry_after else excluded.ev_retry_after end,
    ev_batch = case when r.ev_retry_after > excluded.ev_retry_after then r.ev_batch end, ev_retry = null, ev_receives = 0;
  return v_dead.ev_id;
end
$$;
comment on function pgque.dlq_requeue(bigint, pgque.caller) is
  'Requeues a dead letter: the next tick delivers the message to the consumer that failed it. Returns the message''s id, which stays. Its retries '
  'count from zero. A message that is older than retention_period gets one attempt. Errors: PQ008 no such dead letter; PQ011 that consumer was '
  'unsubscribed.';

create or replace function pgque.dlq_requeue_all(queue_name text, limit_count int default null, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return (
    select count(pgque.dlq_requeue(x.dl_id))
    from (
      select d.dl_id
      from pgque.dead_letter d
      where d.dl_queue_id = v_queue.queue_id
        and exists (
          select from pgque.subscriber s
          where s.sub_queue = d.dl_queue_id and s.sub_consumer = d.dl_consumer_id and s.sub_main is null)
      order by d.dl_id
      limit case when $2 < 0 then 0 else $2 end
      for update of d skip locked
    ) x);
end
$$;
comment on function pgque.dlq_requeue_all(text, int, pgque.caller) is
  'Requeues the oldest dead letters of a queue, at most limit_count (NULL: all), and returns their number. Dead letters of unsubscribed consumers '
  'stay. Errors: PQ001 no such queue.';

-- A null would delete none without a word.
create or replace function pgque.dlq_purge(queue_name text, older_than interval default '30 days', caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_count  bigint;
begin
  if $2 is null then
    perform pgque._fail('PQ005', format('dlq_purge of queue %I needs an age', v_queue.queue_name),
      'Leave older_than out for 30 days; ''0'' deletes all of them.');
  end if;
  delete from pgque.dead_letter d
  where d.dl_queue_id = v_queue.queue_id and d.dl_time < pgque.clock() - $2 and not d.dl_held;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function pgque.dlq_purge(text, interval, pgque.caller) is
  'Deletes the dead letters of a queue that are older than older_than, counted from when they were given up, and returns their number. Held ones '
  '(drop_policy hold) stay. Errors: PQ001 no such queue; PQ005 older_than is NULL.';

create or replace function pgque.archive_poison(queue_name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_dead   pgque.dead_letter;
  v_sub    pgque.subscriber;
  v_count  int := 0;
begin
  for v_dead in
    delete from pgque.dead_letter d
    where d.dl_id in (select p.dl_id from pgque.list_poison(v_queue.queue_name, 100000) p where p.dl_id is not null)
    returning d.*
  loop
    v_sub.sub_queue := v_dead.dl_queue_id;
    v_sub.sub_consumer := v_dead.dl_consumer_id;
    v_sub.sub_id := 0;
    perform pgque._archive(v_queue, v_sub, array[row(null, v_dead.dl_queue_id, v_dead.ev_id, v_dead.ev_time, v_dead.ev_txid, 0, v_dead.ev_retry,
      v_dead.ev_type, v_dead.ev_data, v_dead.ev_extra1, v_dead.ev_extra2, v_dead.ev_extra3, v_dead.ev_extra4,
      v_dead.ev_headers, v_dead.ev_key, v_dead.ev_bytes, v_dead.ev_expires, v_dead.ev_error,
      v_dead.dl_receives, null, null, null)::pgque.retry_queue], 'poison');
    v_count := v_count + 1;
  end loop;
  return v_count;
end
$$;
comment on function pgque.archive_poison(text, pgque.caller) is
  'Moves the dead letters that list_poison() returns to the archive, with outcome poison. Returns their number.';

create or replace function pgque.retry_now(queue_name text, consumer_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber((pgque._queue($1, caller, 'admin')).queue_name, $2);
  v_now    timestamptz := pgque.clock();
  v_count  bigint;
begin
  update pgque.retry_queue r set ev_retry_after = v_now
  where r.ev_owner = v_sub.sub_id and r.ev_retry_after > v_now and r.ev_batch is null;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;
comment on function pgque.retry_now(text, text, pgque.caller) is
  'Makes every message of a consumer that waits for another attempt due now, for example after a repair, or after a clock that was ahead. Returns '
  'their number. Errors: PQ001 no such queue; PQ011 not subscribed.';

create or replace function pgque.reclaim(queue_name text, consumer_name text, older_than interval default '0', caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber((pgque._queue($1, caller, 'admin')).queue_name, $2);
  v_token  bigint;
  v_count  int := 0;
begin
  if $3 is null then
    perform pgque._fail('PQ005', format('older_than must not be null, for consumer %I of queue %I', $2, $1),
      'Pass the age of the batches to hand back, such as ''10 minutes''; ''0'' hands back all.');
  end if;
  for v_token in
    select o.token
    from unnest((pgque._position(v_sub.sub_id)).pos_open) o (token)
    cross join lateral pgque._lease(v_sub.sub_id, o.token) l
    where (l.pos_time > pgque.clock() - $3 and l.pos_time <= pgque.clock()) is false and not (pgque._lease_state(o.token)).closed
    union
    select r.ev_batch
    from pgque.retry_queue r
    cross join lateral pgque._lease(v_sub.sub_id, r.ev_batch) l
    where r.ev_owner = v_sub.sub_id and r.ev_batch is not null
      and (l.pos_time > pgque.clock() - $3 and l.pos_time <= pgque.clock()) is not true
  loop
    -- A worker that is just settling its batch is left alone.
    if pg_try_advisory_xact_lock(v_token) and pgque.release(v_token) > 0 then
      v_count := v_count + 1;
    end if;
  end loop;
  return v_count;
end
$$;
comment on function pgque.reclaim(text, text, interval, pgque.caller) is
  'Releases the batches of a consumer''s workers that were received longer ago than older_than, whether or not their leases expired. Returns the '
  'number of batches. Errors: PQ005 older_than is NULL.';

create or replace function pgque.purge(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_sub    pgque.subscriber;
  v_pos    pgque.position;
  v_last   pgque.tick;
  v_token  bigint;
  v_count  bigint;
begin
  perform pgque._need_read_committed('purge()');
  perform pgque._rebase(v_queue.queue_id);
  perform pgque._let_keys_be_said(v_queue);
  -- Batches before subscribers, as a worker does that acks and receives in one
  -- transaction; then every subscriber, so that nobody hands out meanwhile.
  perform pg_advisory_xact_lock(o.token)
  from pgque.subscriber s
  cross join lateral unnest((pgque._position(s.sub_id)).pos_open) o (token)
  where s.sub_queue = v_queue.queue_id and s.sub_role = 'pool';
  perform from pgque.subscriber s where s.sub_queue = v_queue.queue_id order by s.sub_main nulls first, s.sub_id for no key update;
  v_count := pgque._depth(v_queue.queue_id);
  perform pg_advisory_xact_lock(hashtext('pgque.tick'), v_queue.queue_id);
  v_queue := pgque._queue(v_queue.queue_name);
  v_last := pgque._last_tick(v_queue);
  perform pgque._store_tick(v_queue, pgque._next_tick_id(v_queue, v_last.tick_id), pgque.clock(), pgque._tick_snapshot(), null, false);
  v_last := pgque._last_tick(v_queue);
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = v_queue.queue_id loop
    v_pos := pgque._position(v_sub.sub_id);
    foreach v_token in array coalesce(v_pos.pos_open, '{}') loop
      perform pg_try_advisory_xact_lock(v_token);
      perform pgque._note(v_token, v_sub.sub_id, array[0]);
    end loop;
    v_pos.pos_open := '{}';
    v_pos.pos_lapse := null;
    v_pos.pos_high := greatest(v_pos.pos_high, v_pos.pos_next_tick);
    perform pgque._append_position(pgque._at_tick(v_pos, case when v_pos.pos_main is null then v_last end));
  end loop;
  -- What somebody settles just now is left to him.
  with found as materialized (
    select e.ctid from pgque.retry_queue e where e.ev_queue = v_queue.queue_id for update skip locked
  )
  delete from pgque.retry_queue r using found f
  where r.ctid = f.ctid;
  return v_count;
end
$$;
comment on function pgque.purge(text, pgque.caller) is
  'Removes every committed message of a queue: pending, leased, delayed and to be retried. Dead letters and the archive stay. ack() of batches that '
  'are open now returns 0 or false. Returns the number of messages that the slowest consumer had ahead of it. Errors: PQ001 no such queue; 25000 not '
  'READ COMMITTED.';

create or replace function pgque.purge_key(queue_name text, key text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_last   pgque.event;
  v_count  bigint;
begin
  perform pgque._need_read_committed('purge_key()');
  if $2 is null then
    perform pgque._fail('PQ005', format('purge_key of queue %I needs a key', v_queue.queue_name),
      'To remove everything use pgque.purge(queue).');
  end if;
  perform pgque._lock_keys(v_queue.queue_id, array[$2]);
  delete from pgque.retry_queue r where r.ev_queue = v_queue.queue_id and r.ev_key = $2 and r.ev_owner = 0;
  get diagnostics v_count = row_count;
  -- Only now: the pump, which that waits for, may have moved it into the log.
  v_last := pgque._last_of_key(v_queue.queue_id, $2);
  if v_last.ev_id is not null and coalesce(v_last.ev_owner, 0) = 0 and not pgque._passed(v_queue.queue_id, v_last.ev_id, $2) then
    insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_key)
    select q.queue_id * 3 + q.queue_cur_table, -2, v_last.ev_id, v_last.ev_time, pg_current_xact_id(), v_last.ev_retry + 1, $2
    from pgque.queue q
    where q.queue_id = v_queue.queue_id;
    v_count := v_count + 1;
  end if;
  return v_count;
end
$$;
comment on function pgque.purge_key(text, text, pgque.caller) is
  'Removes the pending message with a key. Returns 1, or 0 if there is none. Errors: PQ001 no such queue; PQ005 key is NULL; 25000 not READ '
  'COMMITTED.';
