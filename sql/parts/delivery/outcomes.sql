-- ---------------------------------------------------------------------------
-- outcomes: what becomes of the messages of a batch
-- ---------------------------------------------------------------------------

-- Finishes a batch: exactly its messages.  Returns 1, or 0 if the batch is not open.
-- Another call may have changed the consumer's role while this one waited for the lock:
-- then that call has closed the batch.
create or replace function pgque._ack(p_batch bigint, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_found  record;
  v_sub    pgque.subscriber;
  v_count  bigint;
begin
  select s as sub, q.queue_archive_on_ack as archives into v_found
  from pgque.subscriber s, pgque.queue q
  where (s.sub_id & 1048575) = (p_batch & 1048575)::int and q.queue_id = s.sub_queue
    and (caller = current_user collate "C" or pg_has_role(caller, 'pgque_reader', 'usage') or pgque._may(caller, 'consume', s.sub_queue));
  if not found then
    return 0;
  elsif not v_found.archives and pgque._may_be_ordinary() and pgque._lock_batch(v_found.sub, p_batch)
    and (case pg_sequence_last_value('pgque.journal_leaf')
      when 1 then pgque._done_1(p_batch, (v_found.sub).sub_id) else pgque._done_0(p_batch, (v_found.sub).sub_id) end)
  then
    return 1;
  end if;
  v_sub := pgque._batch_owner(p_batch);
  if v_found.archives then
    if not pgque._lock_batch(v_sub, p_batch) or not pgque._is_open(v_sub, p_batch) or not pgque._has_all_messages(v_sub.sub_id, p_batch) then
      return 0;
    end if;
    select count(*) into v_count from pgque._set_outcomes(p_batch, null, 'archive', null, 'acked', false);
    if v_sub.sub_role = 'pool' then
      return (v_count > 0)::int;
    end if;
  end if;
  return pgque._close(v_sub, p_batch);
end
$$;

create or replace function pgque.ack(batch_id bigint) returns int
language sql as $$ select pgque._ack($1) $$;
comment on function pgque.ack(bigint) is
  'Acknowledges a batch: exactly the messages that were delivered with it, all or none. Returns 1, or 0 if the batch was acknowledged before. For '
  'a worker''s batch it also returns 0 after one of its messages was delivered to another worker or removed; acknowledge the others with '
  'ack(batch_id, msg_ids).';

-- Returns whether a sorted array has an id.  This is a binary search, because an IN over
-- unnest() compares each row with each id as soon as the ids exceed work_mem, and a join
-- does where the planner expects few.  The array is a parameter of dynamic SQL or
-- (select v_ids): otherwise PL/pgSQL copies it for each row.
create or replace function pgque._contains(p_sorted bigint[], p_id bigint) returns boolean
language sql immutable as $$ select (p_sorted[pg_catalog.width_bucket(p_id, p_sorted)] = p_id) is true $$;

-- Gives messages of an open batch their outcome.  p_ids null: all that have none yet.
-- p_what: ack, archive, nack (again after p_after, or given up), retry (again in any
-- case), dead, release (again at once).
-- The rows are read again from the tables: of a client's message only the id is used.
-- Each message gets one outcome.
-- For a lost batch this raises no error: the returned rows have the reason for each
-- message.  A message that another session has locked, and may be taking over, is lost.
-- With p_wait the call waits for it, since a caller that raises an error has to be
-- sure.
create or replace function pgque._set_outcomes(p_batch bigint, p_ids bigint[], p_what text, p_after interval, p_reason text, p_wait boolean)
returns setof pgque.outcome
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._batch_owner(p_batch);
  v_lease  pgque.position;
  v_state  record;
  v_rows   text;
  v_ids    bigint[];   -- p_ids, sorted
  v_log    bigint[];   -- those of v_ids that are in the log, sorted
  v_new    bigint[];   -- those that get their outcome now
  v_gone   bigint[];   -- those that get their outcome now and were in the retry queue
  v_ended  boolean;    -- whether a message of the queue was cancelled
begin
  p_ids := pgque._flat(p_ids);
  if p_ids is not null then
    v_ids := array(select i.id from pg_catalog.unnest(p_ids) i (id) where i.id is not null group by 1 order by 1);
  end if;
  if v_sub.sub_id is null then
    return query select i.id, false, 'batch not open' from pg_catalog.unnest(p_ids) i (id);
    return;
  end if;
  -- The consumer cannot be unsubscribed before this commits.  Other workers do not
  -- wait.
  perform from pgque.subscriber s where s.sub_id = v_sub.sub_id for key share;
  perform pgque._lock_batch(v_sub, p_batch);
  select s.* into v_state from pgque._states(v_sub.sub_id, array[p_batch]) s;
  v_lease := v_state.lease;
  if v_state.place = 'log' and pgque._old_snapshot() then
    -- To move the batch finds out whether the snapshot is too old.
    perform pgque._move_to_retry(v_sub, v_lease, v_state.until);
    v_state.place := 'retry';
  end if;
  if v_state.place = 'log' then
    v_rows := pgque._span_of_ids_sql(v_sub, v_lease, v_ids);
    execute pg_catalog.format('select array_agg(e.ev_id order by e.ev_id) from (%s) e where $1 is null or pgque._contains($1, e.ev_id)', v_rows)
    into v_log using v_ids;
    -- A message may be settled in the leaf that is no longer written.
    v_new := pgque._record(p_batch, 'outcome', array(
      select pg_catalog.unnest(v_log) except select s.set_ev_id from pgque.settled s where s.set_batch = p_batch and s.set_what = 'outcome'));
    if v_sub.sub_role = 'pool' and (p_ids is null or v_state.settled + pg_catalog.cardinality(v_new) >= v_lease.pos_done_count) then
      perform pgque._record(p_batch, 'closed');
    end if;
  end if;
  if p_wait then
    perform from pgque.retry_queue r where r.ev_owner = v_sub.sub_id and r.ev_batch = p_batch and r.ev_id = any (p_ids) for update;
  end if;
  v_gone := pgque._apply_outcome(v_sub, v_lease, p_batch, v_ids, v_rows, v_new, p_what, p_after, p_reason);
  v_new := array(select n from pg_catalog.unnest(v_new || v_gone) n order by n);
  if v_gone is not null and (p_ids is not null or v_sub.sub_role <> 'pool') then
    -- So the batch is known to be whole apart from them; see _has_all_messages().
    perform pgque._record(p_batch, 'outcome', v_gone);
  end if;
  if p_ids is null or pg_catalog.cardinality(p_ids) = pg_catalog.cardinality(v_new) then
    return query select n, true, null::text from pg_catalog.unnest(coalesce(p_ids, v_new)) n;
    return;
  end if;
  if exists (
    select from pgque.retry_queue r
    where r.ev_owner = v_sub.sub_id and r.ev_batch = p_batch and ((select v_ids))[pg_catalog.width_bucket(r.ev_id, (select v_ids))] = r.ev_id)   -- as _contains()
  then
    -- The session that has one of them locked may roll back.  But the caller gets the
    -- answer that it is lost, so an ack of the rest must not finish it.
    perform pgque._record(p_batch, 'lost');
  end if;
  v_ended := exists (select from pgque.queue_option o where o.opt_queue = v_sub.sub_queue and o.opt_name = 'cancelled');
  return query
    select i.id, i.ok,
      case
        when i.ok then null
        when v_ended and pgque._is_cancelled(v_sub.sub_queue, v_sub.sub_id, i.id) then 'cancelled'
        when v_sub.sub_role = 'pool' and i.taken then 'lost to another worker'
        when ((select v_log))[pg_catalog.width_bucket(i.id, (select v_log))] = i.id then 'settled already'
        when exists (select from pgque.settled s where s.set_batch = p_batch and s.set_what = 'outcome' and s.set_ev_id = i.id) then 'settled already'
        -- Which messages a batch had that was moved to the retry queue is no longer known.
        when v_state.place is null or v_state.place = 'retry' and v_lease.pos_fresh > 0 then 'batch not open'
        when i.taken then 'lost to another worker'
        else 'not in this batch'
      end
    from (
      select u.id,
        (((select v_new))[pg_catalog.width_bucket(u.id, (select v_new))] = u.id) is true as ok,
        exists (select from pgque.retry_queue r where r.ev_owner + 0 = v_sub.sub_id and r.ev_id = u.id and r.ev_batch is not null) as taken
      from pg_catalog.unnest(p_ids) u (id)
    ) i;
end
$$;

-- Returns the query of the messages of a batch from the log between the first and the
-- last of p_ids, which are sorted; null: all.
create or replace function pgque._span_of_ids_sql(p_sub pgque.subscriber, p_lease pgque.position, p_ids bigint[]) returns text
language plpgsql as $$
begin
  if p_ids is null then
    return pgque._slice_sql(p_sub, p_lease);
  end if;
  p_lease.pos_done_id := greatest(p_lease.pos_done_id, greatest(p_ids[1], 1) - 1);
  p_lease.pos_last_id := least(p_lease.pos_last_id, p_ids[pg_catalog.cardinality(p_ids)]);
  -- For one message of many an index is best.
  return pgque._slice_sql(p_sub, p_lease,
    case when pg_catalog.cardinality(p_ids) = 1 then ' and e.ev_id = ' || p_ids[1] else '' end, null, pgque._is_big(p_lease, 500));
end
$$;

-- Applies the outcome to the messages of a batch: to those of the log that p_new names,
-- and to those in the retry queue.  Returns the ids of the latter.  p_ids and p_new are
-- sorted.
create or replace function pgque._apply_outcome(
  p_sub pgque.subscriber, p_lease pgque.position, p_batch bigint, p_ids bigint[], p_rows text, p_new bigint[],
  p_what text, p_after interval, p_reason text
) returns bigint[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue;
  v_with   text;
  v_items  text;
  v_item   pgque.retry_queue;
  v_ids    bigint[];
begin
  if exists (select from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch) then
    -- Rows that another session has locked are being taken over.
    v_with := 'with found as materialized (select e.ctid from pgque.retry_queue e'
      ' where e.ev_owner = $1.sub_id and e.ev_batch = $3'
      ' and ($4 is null or e.ev_id between $4[1] and $4[pg_catalog.cardinality($4)] and pgque._contains($4, e.ev_id))'
      ' order by e.ev_id for update skip locked),'
      ' gone as (delete from pgque.retry_queue r using found f where r.ctid = f.ctid returning r.*)';
    v_items := 'select g.* from gone g';
  end if;
  if p_new is not null and p_what <> 'ack' then
    v_items := pg_catalog.concat_ws(' union all ', v_items, pg_catalog.format(
      'select (pgque._as_retry(e, $1, coalesce(e.ev_retry, 0) + 1, null, null, $2)).* from (%s) e'
      ' where pgque._contains($5, e.ev_id)', pgque._renewed_sql(p_sub.sub_queue, p_rows)));
  end if;
  if v_items is null then
    return null;
  elsif p_what = 'ack' then
    execute v_with || ' select array_agg(g.ev_id) from gone g' into v_ids using p_sub, p_lease.pos_worker, p_batch, p_ids;
    return v_ids;
  end if;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_sub.sub_queue;
  if p_what = 'archive' then
    execute pgque._archive_sql(v_with, v_items, v_queue.queue_id) into v_ids
    using p_sub, p_lease.pos_worker, p_batch, p_ids, p_new, p_reason;
    perform pgque._count(v_queue.queue_id, p_sub.sub_id, 'archived', pg_catalog.cardinality(v_ids));
  else
    -- Each gets the time of its turn, and messages become due by that time.
    for v_item in execute pg_catalog.concat_ws(' ', v_with, v_items, 'order by ev_id') using p_sub, p_lease.pos_worker, p_batch, p_ids, p_new loop
      v_ids := v_ids || v_item.ev_id;
      perform pgque._retry_or_dead(v_queue, p_sub, v_item, p_what, p_after, p_reason);
    end loop;
  end if;
  return nullif(array(select pg_catalog.unnest(v_ids) except select pg_catalog.unnest(p_new)), '{}');
end
$$;

-- Redelivers or gives up one message that was taken from its batch.
create or replace function pgque._retry_or_dead(
  p_queue pgque.queue, p_sub pgque.subscriber, p_item pgque.retry_queue, p_what text, p_after interval, p_reason text
) returns void
language plpgsql as $$
begin
  if p_what = 'dead'
    or (p_what = 'nack' and (coalesce(p_item.ev_retry, 0) >= p_queue.queue_max_retries
      or (p_sub.sub_role = 'pool' and p_item.ev_receives >= p_queue.queue_max_receive_attempts)))
  then
    p_item.ev_error := coalesce(p_reason, p_item.ev_error);
    perform pgque._give_up(p_queue, p_sub, p_item, coalesce(p_reason, case
      when p_what = 'dead' then 'dead'
      when coalesce(p_item.ev_retry, 0) >= p_queue.queue_max_retries then 'retries used up'
      else 'receive attempts used up'
    end));
    return;
  end if;
  p_item.ev_batch := null;
  p_item.ev_worker := null;
  p_item.ev_retry_after := pgque.clock();
  if p_what <> 'release' then
    p_item.ev_retry := coalesce(p_item.ev_retry, 0) + 1;
    p_item.ev_error := p_reason;
    p_item.ev_retry_after := p_item.ev_retry_after + coalesce(p_after, pgque._backoff(p_queue.queue_retry_backoff, p_item.ev_retry));
  end if;
  insert into pgque.retry_queue select p_item.*
  -- As in _move_to_retry().
  on conflict (ev_owner, ev_id, ev_queue) do update
  set (ev_retry_after, ev_receives, ev_batch, ev_worker, ev_retry, ev_error)
    = (excluded.ev_retry_after, excluded.ev_receives, excluded.ev_batch, excluded.ev_worker, excluded.ev_retry, excluded.ev_error);
end
$$;

-- Returns how long to wait before the n-th retry of a message.
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

-- Returns an interval from now, if it is neither negative nor so long that clients
-- cannot read its end.
create or replace function pgque._not_negative(p_span interval, p_name text, p_batch bigint) returns interval
language plpgsql immutable as $$
begin
  if p_span < '0' then
    perform pgque._fail('PQ005', pg_catalog.format('%s must not be negative, for batch %s', p_name, p_batch),
      'Pass an interval from now, such as ''30 seconds''.');
  elsif p_span > '100 years' then
    perform pgque._fail('PQ005', pg_catalog.format('%s must not be longer than 100 years, for batch %s', p_name, p_batch),
      'Pass a shorter interval. Some clients cannot read times that far in the future.');
  end if;
  return p_span;
end
$$;

-- Returns the outcome of one message of a batch, or raises an error if the message is
-- not there.
create or replace function pgque._outcome_or_error(p_outcome pgque.outcome, p_batch bigint) returns pgque.outcome
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
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._outcome_or_error(f, $1) from pgque._set_outcomes(pgque._batch_for(caller, $1), array[($2).msg_id], 'nack', pgque._not_negative($3, 'retry_after', $1), $4, true) f;
  return 1;
end
$$;
comment on function pgque.nack(bigint, pgque.message, interval, text, pgque.caller) is
  'Earlier form of nack(): rejects one message and returns 1, for clients that know only the ten columns of pgque.message. Errors: PQ005 retry_after '
  'is negative or above 100 years; PQ007 the message is not in this batch; PQ012 the batch is not open.';

create or replace function pgque.nack(batch_id bigint, msg pgque.delivery, retry_after interval default null, reason text default null, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._outcome_or_error(f, $1) from pgque._set_outcomes(pgque._batch_for(caller, $1), array[($2).msg_id], 'nack', pgque._not_negative($3, 'retry_after', $1), $4, true) f;
  return 1;
end
$$;
comment on function pgque.nack(bigint, pgque.delivery, interval, text, pgque.caller) is
  'Rejects one message of an open batch and returns 1, also when repeated. The message is redelivered to this consumer after retry_after (NULL: the '
  'queue''s retry_backoff), or becomes a dead letter once the queue''s max_retries are used up. The rest of the batch stays open: acknowledge it when '
  'done. Of msg only msg_id counts. For a worker''s batch whose lease expired, the call waits for a transaction that may be taking the message over. '
  'Errors: PQ005 retry_after is negative or above 100 years; PQ007 the message is not in this batch; PQ012 the batch is not open.';

create or replace function pgque.nack(batch_id bigint, msg_ids bigint[], retry_after interval default null, reason text default null, caller pgque.caller default current_user)
returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query select f.* from pgque._set_outcomes(pgque._batch_for(caller, $1), coalesce($2, '{}'), 'nack', pgque._not_negative($3, 'retry_after', $1), $4, false) f;
end
$$;
comment on function pgque.nack(bigint, bigint[], interval, text, pgque.caller) is
  'Rejects many messages of an open batch, by id. They are redelivered to this consumer after retry_after (NULL: the queue''s retry_backoff), or '
  'become dead letters once the queue''s max_retries are used up. Returns one row for each message: msg_id, ok, and the reason if ok is false. '
  'Errors: PQ005 retry_after is negative or above 100 years.';

create or replace function pgque.ack(batch_id bigint, msg_ids bigint[], caller pgque.caller default current_user) returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_archive  boolean;
begin
  select q.queue_archive_on_ack into v_archive
  from pgque.subscriber s
  join pgque.queue q on q.queue_id = s.sub_queue
  where (s.sub_id & 1048575) = ($1 & 1048575)::int;
  return query select f.* from pgque._set_outcomes(pgque._batch_for(caller, $1), coalesce($2, '{}'), case when v_archive then 'archive' else 'ack' end, null, 'acked', false) f;
end
$$;
comment on function pgque.ack(bigint, bigint[], pgque.caller) is
  'Acknowledges some messages of a batch; the others stay in it. Returns one row for each message: msg_id, ok, and the reason if ok is false (not in '
  'this batch, settled already, cancelled, lost to another worker, batch not open). After the reason "lost to another worker", an ack of the whole '
  'batch returns 0: if the transaction of the other worker is rolled back, that ack would include the message. With archive_on_ack the messages are '
  'kept in the archive.';

-- Gives up messages at once, as if their attempts were used up.
create or replace function pgque._dead(p_batch bigint, p_ids bigint[], p_reason text, caller pgque.caller default current_user) returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query select f.* from pgque._set_outcomes(pgque._batch_for(caller, $1), coalesce($2, '{}'), 'dead', null, $3, false) f;
end
$$;

create or replace function pgque.dead(batch_id bigint, msg_ids bigint[], reason text default null) returns setof pgque.outcome
language sql as $$ select * from pgque._dead($1, $2, $3) $$;
comment on function pgque.dead(bigint, bigint[], text) is
  'Gives up messages of a batch at once, with a reason: drop_policy applies to them, so that by default they become dead letters. Returns one row '
  'for each message: msg_id, ok, and the reason if ok is false.';
