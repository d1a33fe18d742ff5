-- ---------------------------------------------------------------------------
-- expiry: messages that are not delivered after a time (ttl)
-- ---------------------------------------------------------------------------

-- The rest of the engine handles expiry in these places:
--   * Sending stores the time (_expires()), and notes that the queue has such messages:
--     _note_options(), or _note_settings() for the setting message_ttl.
--   * _choose() and _choose_retries(), which choose messages, leave out those that have expired.
--     An ordinary delivery has none (queue_expiring).  Lists show the status expired.
--   * maint() deletes them (maint_expire()).

-- Returns whether messages of a queue may expire: it has a message_ttl, or a message had
-- a ttl.
create or replace function pgque._expiring(p_queue pgque.queue) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return p_queue.queue_expiring or exists (select from pgque.queue_option o where o.opt_queue = p_queue.queue_id and o.opt_name = 'ttl');
end
$$;

-- Notes that messages of a queue may expire, because message_ttl was set.  The caller
-- has locked the row of the queue.
create or replace function pgque._note_expiring(p_queue_id int) returns void
language sql volatile as $$
  update pgque.queue q set queue_expiring = true, queue_xid = pgque._queue_xid(q)
  where q.queue_id = p_queue_id and q.queue_message_ttl > '0' and not q.queue_expiring
$$;

-- Returns when a message that is sent now expires; null means never.
create or replace function pgque._expires(p_queue pgque.queue, p_ttl interval default null) returns timestamptz
language sql volatile as $$
  select case when coalesce(p_ttl, p_queue.queue_message_ttl) > '0' then pgque.clock() + coalesce(p_ttl, p_queue.queue_message_ttl) end
$$;

create or replace function pgque._expire_messages(p_queue_id int) returns bigint
language plpgsql set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_gone   record;
  v_count  bigint := 0;
begin
  for v_gone in
    -- Materialized, or the subquery may run once for each row of the retry queue.
    with found as materialized (
      -- A message with a key that waits for its first delivery may have a newer body.
      select e.ctid from pgque.retry_queue e
      where e.ev_queue = p_queue_id and e.ev_expires <= pgque.clock() and (e.ev_batch is null or e.ev_retry_after <= pgque.clock())
        and not (e.ev_key is not null and e.ev_receives = 0 and e.ev_owner <> 0)
      for update skip locked
    ),
    gone as (
      delete from pgque.retry_queue r using found f
      where r.ctid = f.ctid
      returning r.ev_owner
    )
    select g.ev_owner, count(*) as n from gone g group by g.ev_owner
  loop
    perform pgque._count(p_queue_id, v_gone.ev_owner, 'expired', v_gone.n);
    v_count := v_count + v_gone.n;
  end loop;
  return v_count;
end
$$;

create or replace function pgque.expire_messages(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_count  bigint := pgque._expire_messages(v_queue.queue_id);
begin
  perform pgque._record_action('expire_messages', v_queue.queue_name, jsonb_build_object('messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.expire_messages(text, pgque.caller) is
  'Deletes expired messages from the retry queue now, and returns their number. Expired messages in the log are never delivered and need no call. '
  'Errors: PQ001 no such queue.';

create or replace function pgque._delete_expired(p_queue_id int) returns bigint
language plpgsql as $$
declare
  v_count  bigint;
begin
  delete from pgque.dead_letter d where d.dl_queue_id = p_queue_id and d.ev_expires <= pgque.clock() and not d.dl_held and d.dl_forward is null;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

create or replace function pgque.delete_expired(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_count  bigint := pgque._delete_expired(v_queue.queue_id);
begin
  perform pgque._record_action('delete_expired', v_queue.queue_name, jsonb_build_object('messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.delete_expired(text, pgque.caller) is
  'Deletes dead letters whose message has expired, and returns their number. Dead letters that drop_policy hold keeps stay. Errors: PQ001 no such '
  'queue.';

create or replace function pgque.maint_expire() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_config  pgque.config;
  v_count   int := 0;
begin
  if pgque._is_loading() then
    return 0;
  end if;
  select c.* into v_config from pgque.config c;
  if pgque._is_due(to_timestamp(coalesce(pg_sequence_last_value('pgque.expire_ran'), 0)), v_config.expire_every) then
    perform setval('pgque.expire_ran', floor(extract(epoch from pgque.clock()))::bigint);
    v_count := coalesce((select sum(pgque._expire_messages(q.queue_id)) from pgque.queue q), 0);
  end if;
  if pgque._is_due(to_timestamp(coalesce(pg_sequence_last_value('pgque.delete_expired_ran'), 0)), v_config.delete_expired_every) then
    perform setval('pgque.delete_expired_ran', floor(extract(epoch from pgque.clock()))::bigint);
    v_count := v_count + coalesce((select sum(pgque._delete_expired(q.queue_id)) from pgque.queue q), 0);
  end if;
  return v_count;
end
$$;
comment on function pgque.maint_expire() is
  'Part of maint(): runs the cleanup jobs of set_schedule() that are due, and returns the number of messages removed.';

create or replace function pgque.set_schedule(job text, every text) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._init();
  every := coalesce($2, case $1 when 'expire' then '00:01:00' else '' end);
  if $1 = 'expire' then
    update pgque.config c set expire_every = pgque._period(nullif($2, ''));
  elsif $1 = 'delete_expired' then
    update pgque.config c set delete_expired_every = pgque._period(nullif($2, ''));
  else
    raise data_exception using message = 'no such job';
  end if;
  perform pgque._record_action('set_schedule', null, jsonb_build_object('job', $1, 'every', $2));
  return $2;
exception
  when data_exception or check_violation then
    perform pgque._fail('PQ005', format('invalid schedule for %s: %s', quote_nullable($1), quote_nullable($2)),
      'Use job expire or delete_expired, and an interval such as 5 minutes, or an empty text for off. The schedule is unchanged.',
      sqlerrm);
end
$$;
comment on function pgque.set_schedule(text, text) is
  'Sets how often maint() runs a cleanup job, and returns the interval in force, an empty string for off. job: expire (deletes expired messages '
  'from the retry queue; 1 minute by default) or delete_expired (deletes dead letters whose message expired, but not held ones; off by default). '
  'every: an interval. An empty string turns the job off, NULL restores its default. Errors: PQ005 invalid job or interval; the schedule is '
  'unchanged then.';
