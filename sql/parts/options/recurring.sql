-- ---------------------------------------------------------------------------
-- recurring: messages that the ticker sends at their times
-- ---------------------------------------------------------------------------

-- A definition (pgque.recurring) changes only when a role changes it.  Each run appends
-- a row to a journal (pgque.recurring_run), in the transaction that sends the message.
-- The newest of these rows names the next run.  A sequence holds the time of the
-- earliest run, so that the loop reads no table before that time.  If a definition is
-- committed after the loop read the sequence, the next maintenance finds it, within five
-- seconds.
-- Delivery knows nothing of it: the loop and maint() call maint_recurring(), and health()
-- and metrics() call _recurring_health().

-- Returns when the first run is due; null if there is none.
create or replace function pgque._recurring_at() returns timestamptz
language sql volatile as $$ select pg_catalog.to_timestamp(nullif(pg_catalog.pg_sequence_last_value('pgque.recurring_at'), 0) / 1000000.0) $$;

create or replace function pgque._set_recurring_at(p_at timestamptz) returns void
language plpgsql as $$
begin
  if p_at is distinct from pgque._recurring_at() then
    perform pg_catalog.setval('pgque.recurring_at', coalesce(extract(epoch from p_at) * 1000000, 0)::bigint);
  end if;
end
$$;

-- Returns the row of the journal that names the next run of a definition.
create or replace function pgque._last_run(p_id int, p_since bigint) returns pgque.recurring_run
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_run  pgque.recurring_run;
begin
  select u.* into v_run
  from pgque.recurring_run u
  where u.run_rec = p_id and u.run_n >= p_since and u.run_due is not null
  order by u.run_n desc
  limit 1;
  return v_run;
end
$$;

-- Returns every definition that is not paused, and when its next run, or the next
-- attempt of a failed run, is due.  -infinity means that its schedule has to begin
-- again: after a restore, or because the clock was set back by more than an hour.
create or replace function pgque._recurring_due(p_now timestamptz, out id int, out due timestamptz) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  -- The last run of each definition, as _last_run() finds it for one.  One query is
  -- cheaper than a call for each.
  return query
    select r.rec_id, case when not r.rec_restored and u.run_at <= p_now + interval '1 hour' then u.run_due else '-infinity' end
    from pgque.recurring r
    left join lateral (
      select u.run_at, u.run_due
      from pgque.recurring_run u
      where u.run_rec = r.rec_id and u.run_n >= r.rec_since and u.run_due is not null
      order by u.run_n desc
      limit 1
    ) u on true
    where not r.rec_paused;
end
$$;

create or replace function pgque._append_run(p_run pgque.recurring_run) returns void
language plpgsql as $$
begin
  p_run.run_n := pg_catalog.nextval('pgque.recurring_n');
  p_run.run_failures := coalesce(p_run.run_failures, 0);
  p_run.leaf := (select l.last_value from pgque.recurring_leaf l);
  insert into pgque.recurring_run select p_run.*;
end
$$;

-- Begins the schedule of a definition now: missed runs are not caught up.  The caller
-- has its row locked.
create or replace function pgque._begin_schedule(p_id int) returns void
language plpgsql as $$
declare
  v_rec  pgque.recurring;
  v_run  pgque.recurring_run;
begin
  update pgque.recurring r set rec_since = pg_catalog.nextval('pgque.recurring_n'), rec_xid = pgque._mark() where r.rec_id = p_id returning r.* into v_rec;
  v_run.run_rec := p_id;
  v_run.run_at := pgque.clock();
  v_run.run_next := coalesce(pgque._next_run(v_rec, v_run.run_at), 'infinity');
  v_run.run_due := v_run.run_next;
  perform pgque._append_run(v_run);
  perform pgque._set_recurring_at(least(pgque._recurring_at(), nullif(v_run.run_due, 'infinity'))) where not v_rec.rec_paused;
end
$$;

-- Returns the queue that a definition sends to.  Raises an error if there is none, or
-- if the role that created the definition may not send to it.
create or replace function pgque._recurring_queue(p_rec pgque.recurring) returns pgque.queue
language plpgsql as $$
declare
  v_queue  pgque.queue;
begin
  select q.* into v_queue from pgque.queue q where q.queue_name = p_rec.rec_queue;
  if not found then
    perform pgque._no_queue(p_rec.rec_queue);
  elsif not exists (select from pg_catalog.pg_roles r where r.rolname = p_rec.rec_role) then
    perform pgque._fail('undefined_object', pg_catalog.format('role not found: %I', p_rec.rec_role),
      'Call create_recurring() again, as a role that may send to the queue.');
  elsif not pgque._may(p_rec.rec_role, 'produce', v_queue.queue_id) then
    perform pgque._no_right(p_rec.rec_role, 'produce', v_queue.queue_name);
  end if;
  return v_queue;
end
$$;

-- Sends the message of one run.
create or replace function pgque._send_run(p_rec pgque.recurring, p_run timestamptz) returns bigint
language plpgsql as $$
begin
  return pgque._send_as((pgque._recurring_queue(p_rec)).queue_name, p_rec.rec_type, p_rec.rec_data, p_rec.rec_bytes,
    coalesce(p_rec.rec_headers, '{}') || pg_catalog.jsonb_build_object('pgque-recurring', pg_catalog.jsonb_build_object(
      'name', p_rec.rec_name, 'run_at', pg_catalog.to_char(p_run at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))),
    p_rec.rec_key, p_rec.rec_delay, null, p_rec.rec_ttl, p_rec.rec_partition_key);
end
$$;

-- Sends the runs of one definition that are due, and returns the number of messages.
-- The definition is locked before its journal is read, so no run is sent twice.  A
-- failure is recorded, and tried again after 2, 4, ... 64 seconds.
create or replace function pgque._run_recurring(p_id int, p_now timestamptz) returns int
language plpgsql as $$
declare
  v_rec    pgque.recurring;
  v_run    pgque.recurring_run;
  v_next   timestamptz;
  v_left   timestamptz;
  v_count  int := 0;
begin
  select r.* into v_rec from pgque.recurring r where r.rec_id = p_id and not r.rec_paused for no key update skip locked;
  if not found then
    return 0;
  end if;
  v_run := pgque._last_run(v_rec.rec_id, v_rec.rec_since);
  if v_rec.rec_restored or (v_run.run_at <= p_now + interval '1 hour') is not true then
    perform pgque._begin_schedule(p_id);
    return 0;
  elsif v_run.run_due > p_now then
    return 0;
  end if;
  v_run.run_at := p_now;
  v_run.run_msg := null;
  begin
    v_next := v_run.run_next;
    if v_rec.rec_catch_up <> 'all' then
      v_next := pgque._latest_run(v_rec, v_next, p_now);
    end if;
    while v_next <= p_now and v_count < 1000 and (v_rec.rec_catch_up <> 'none' or v_next >= p_now - interval '1 minute') loop
      begin
        v_run.run_msg := pgque._send_run(v_rec, v_next);
      exception
        when others then
          if v_count = 0 then
            raise;
          end if;
          v_left := v_next;   -- a queue may never have room for all runs: messages that it took stay sent
          exit;
      end;
      v_run.run_for := v_next;
      v_count := v_count + 1;
      v_next := pgque._next_run(v_rec, v_next);
    end loop;
    v_run.run_next := coalesce(v_left, pgque._next_run(v_rec, p_now), 'infinity');
    v_run.run_due := case when v_left is null then v_run.run_next else p_now + interval '2 seconds' end;
    v_run.run_failures := 0;
    v_run.run_error := null;
    v_run.run_hint := null;
  exception
    when others then
      if v_run.run_failures = 0 then
        raise warning 'pgque: recurring message % is not sent: % (%)', pg_catalog.quote_ident(v_rec.rec_name), sqlerrm, sqlstate;
      end if;
      get stacked diagnostics v_run.run_error = message_text, v_run.run_hint = pg_exception_hint;
      v_run.run_failures := v_run.run_failures + 1;
      v_run.run_due := p_now + interval '1 second' * 2 ^ least(v_run.run_failures, 6);
      v_run.run_msg := null;
      v_count := 0;
  end;
  perform pgque._append_run(v_run);
  return v_count;
end
$$;

create or replace function pgque.maint_recurring() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '50ms' set jit = off as $$
declare
  v_now    timestamptz := pgque.clock();
  v_end    timestamptz := clock_timestamp() + interval '200 milliseconds';
  v_id     int;
  v_next   timestamptz;
  v_count  int := 0;
begin
  perform pgque._need_read_committed('maintenance');
  if pgque._lacking() is not null then
    return 0;
  end if;
  for v_id in select d.id from pgque._recurring_due(v_now) d where d.due <= v_now order by d.due loop
    begin
      v_count := v_count + pgque._run_recurring(v_id, v_now);
    exception
      when others then
        raise warning 'pgque: no run of recurring message %: % (%)', v_id, sqlerrm, sqlstate;
    end;
    exit when clock_timestamp() > v_end;
  end loop;
  select min(d.due) into v_next from pgque._recurring_due(v_now) d;
  -- If a session has locked a recurring message, or its schedule cannot begin, it is
  -- tried again after a second.
  perform pgque._set_recurring_at(case when v_next <= v_now and (v_count = 0 or v_next = '-infinity') then v_now + interval '1 second' else nullif(v_next, 'infinity') end);
  return v_count;
end
$$;
comment on function pgque.maint_recurring() is
  'Part of maint(): sends the recurring messages that are due, for about a fifth of a second, and returns their number. The loop calls it when a '
  'message is due. Errors: 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';

-- Rows of dropped definitions, and all but the newest row of each definition, are not
-- copied.
create or replace function pgque._compact_recurring() returns int
language plpgsql as $$
declare
  v_cur  int := (select l.last_value from pgque.recurring_leaf l);
begin
  if pg_catalog.pg_relation_size('pgque.recurring_run_' || (1 - v_cur)) = 0 then
    if pg_catalog.pg_relation_size('pgque.recurring_run_' || v_cur) < 1048576 then
      return 0;
    end if;
    perform pg_catalog.setval('pgque.recurring_leaf', 1 - v_cur);
    return 1;
  end if;
  execute pg_catalog.format('lock table pgque.recurring_run_%s in access exclusive mode nowait', 1 - v_cur);
  insert into pgque.recurring_run
  select u.run_rec, u.run_n, u.run_at, u.run_for, u.run_next, u.run_due, u.run_msg, u.run_failures, u.run_error, u.run_hint, v_cur
  from pgque.recurring r
  join pgque.recurring_run u on u.run_rec = r.rec_id and u.leaf = 1 - v_cur
  where u.run_n in (
    (select max(n.run_n) from pgque.recurring_run n where n.run_rec = r.rec_id and n.run_due is not null),
    (select max(n.run_n) from pgque.recurring_run n where n.run_rec = r.rec_id and n.run_msg is not null));
  execute pg_catalog.format('truncate pgque.recurring_run_%s', 1 - v_cur);
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Returns whether a role created a definition, or is a member of the role that did.
create or replace function pgque._is_creator(p_caller name, p_role name) returns boolean
language sql stable as $$
  select exists (select from pg_catalog.pg_roles r where r.rolname = p_role and (r.rolname = p_caller or pg_catalog.pg_has_role(p_caller, r.oid, 'usage')))
$$;

-- Returns the definition of a name, for the role that created it or an administrator of
-- its queue.
create or replace function pgque._recurring(p_name text, p_caller name) returns pgque.recurring
language plpgsql as $$
declare
  v_rec  pgque.recurring;
begin
  select r.* into v_rec from pgque.recurring r where r.rec_name = p_name collate pg_catalog."default";
  if not found then
    perform pgque._fail('PQ010', pg_catalog.format('recurring message not found: %s', coalesce(pg_catalog.quote_ident(p_name), 'null')),
      'List the names: select name from pgque.list_recurring();');
  elsif not pgque._is_creator(p_caller, v_rec.rec_role)
    and not pgque._may(p_caller, 'admin', (select q.queue_id from pgque.queue q where q.queue_name = v_rec.rec_queue))
  then
    perform pgque._fail('insufficient_privilege', pg_catalog.format('permission denied for recurring message %I', p_name),
      'Call it as the role that created it, or as an administrator of its queue. Names are unique in the database: to create one, choose another name.');
  end if;
  return v_rec;
end
$$;

-- A queue has at most a hundred recurring messages of roles with a right to this queue
-- only, because the ticker reads all of them.
create or replace function pgque._create_recurring(
  p_name text, p_queue text, p_cron text, p_type text, p_data text, p_bytes bytea, p_headers jsonb, p_key text, p_delay interval, p_ttl interval,
  p_partition_key text, p_timezone text, p_catch_up text, p_starts_at timestamptz, p_ends_at timestamptz, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(p_queue, caller, 'produce');
  v_now    timestamptz := pgque.clock();
  v_old    pgque.recurring;
  v_rec    pgque.recurring;
begin
  if coalesce(p_name, '') = '' or octet_length(p_name) > 200 then
    perform pgque._fail('PQ004', format('invalid name of a recurring message: %s', coalesce(quote_ident(left(p_name, 100)), 'null')),
      'A name has 1 to 200 bytes; any character is allowed.');
  elsif p_catch_up is null or p_catch_up not in ('none', 'one', 'all') then
    perform pgque._fail('PQ005', format('invalid catch_up of recurring message %I: %s', p_name, quote_nullable(p_catch_up)), 'Use none, one or all.');
  end if;
  perform pgque._check_options(v_queue.queue_name, 1, array[p_headers], array[p_key], array[p_delay], null, array[p_ttl], array[p_partition_key]);
  -- The queue keeps its name until this transaction commits.
  select q.* into v_queue from pgque.queue q where q.queue_id = v_queue.queue_id for key share;
  if not found then
    perform pgque._no_queue(p_queue);
  elsif not pgque._may(caller, 'produce', null) then
    perform pgque._need_read_committed('create_recurring() with a right to this queue only');
    perform pg_advisory_xact_lock(hashtext('pgque.count_recurring'), v_queue.queue_id);
  end if;
  -- If two sessions create one name, the second sees the definition of the first.
  perform pg_advisory_xact_lock(hashtext('pgque.create_recurring'), hashtext(p_name));
  perform from pgque.recurring r where r.rec_name = p_name collate "default" for no key update;
  if found then
    v_old := pgque._recurring(p_name, caller);
  end if;
  if v_old.rec_queue is distinct from v_queue.queue_name and not pgque._may(caller, 'produce', null)
    and (select count(*) from pgque.recurring r where r.rec_queue = v_queue.queue_name) >= 100
  then
    perform pgque._fail('PQ003', format('queue %I has 100 recurring messages', v_queue.queue_name),
      'Drop one with pgque.drop_recurring(name), or create it as a member of pgque_writer.');
  end if;
  v_rec := v_old;
  if v_old.rec_id is null or v_old.rec_restored or (v_old.rec_cron, lower(v_old.rec_timezone), v_old.rec_starts_at, v_old.rec_ends_at)
    is distinct from (p_cron, lower(p_timezone), p_starts_at, p_ends_at)
  then
    v_rec := pgque._schedule(p_cron, p_timezone, p_starts_at, p_ends_at);
  end if;
  insert into pgque.recurring as r (rec_name, rec_queue, rec_role, rec_cron, rec_timezone, rec_every, rec_anchor,
    rec_seconds, rec_minutes, rec_hours, rec_days, rec_months, rec_weekdays, rec_fixed, rec_either, rec_starts_at, rec_ends_at, rec_catch_up,
    rec_type, rec_data, rec_bytes, rec_headers, rec_key, rec_delay, rec_ttl, rec_partition_key, rec_created_at, rec_registered_at, rec_xid)
  values (p_name, v_queue.queue_name, caller, v_rec.rec_cron, v_rec.rec_timezone, v_rec.rec_every, v_rec.rec_anchor,
    v_rec.rec_seconds, v_rec.rec_minutes, v_rec.rec_hours, v_rec.rec_days, v_rec.rec_months, v_rec.rec_weekdays, v_rec.rec_fixed, v_rec.rec_either,
    v_rec.rec_starts_at, v_rec.rec_ends_at, p_catch_up,
    p_type, p_data, p_bytes, p_headers, p_key, p_delay, p_ttl, p_partition_key, v_now, v_now, pgque._mark())
  on conflict (rec_name) do update set (rec_queue, rec_role, rec_cron, rec_timezone, rec_every, rec_anchor,
    rec_seconds, rec_minutes, rec_hours, rec_days, rec_months, rec_weekdays, rec_fixed, rec_either, rec_starts_at, rec_ends_at, rec_catch_up,
    rec_type, rec_data, rec_bytes, rec_headers, rec_key, rec_delay, rec_ttl, rec_partition_key, rec_registered_at, rec_xid)
  = (excluded.rec_queue, excluded.rec_role, excluded.rec_cron, excluded.rec_timezone, excluded.rec_every, excluded.rec_anchor,
    excluded.rec_seconds, excluded.rec_minutes, excluded.rec_hours, excluded.rec_days, excluded.rec_months, excluded.rec_weekdays, excluded.rec_fixed, excluded.rec_either,
    excluded.rec_starts_at, excluded.rec_ends_at, excluded.rec_catch_up,
    excluded.rec_type, excluded.rec_data, excluded.rec_bytes, excluded.rec_headers, excluded.rec_key, excluded.rec_delay, excluded.rec_ttl,
    excluded.rec_partition_key, excluded.rec_registered_at, excluded.rec_xid)
  returning r.rec_id into v_rec.rec_id;
  if v_rec is distinct from v_old then
    perform pgque._begin_schedule(v_rec.rec_id);
    perform pgque._record_action('create_recurring', v_queue.queue_name, jsonb_build_object('name', p_name, 'cron', p_cron, 'timezone', p_timezone, 'type_name', p_type));
  end if;
  return (v_old.rec_id is null)::int;
end
$$;

create or replace function pgque.create_recurring(
  name text, queue_name text, cron text, type_name text, payload text, headers jsonb default null, key text default null,
  delay interval default null, ttl interval default null, partition_key text default null, timezone text default 'UTC',
  catch_up text default 'one', starts_at timestamptz default null, ends_at timestamptz default null
) returns int
language sql as $$ select pgque._create_recurring($1, $2, $3, $4, $5, null, $6, $7, $8, $9, $10, $11, $12, $13, $14) $$;

create or replace function pgque.create_recurring(
  name text, queue_name text, cron text, type_name text, payload jsonb, headers jsonb default null, key text default null,
  delay interval default null, ttl interval default null, partition_key text default null, timezone text default 'UTC',
  catch_up text default 'one', starts_at timestamptz default null, ends_at timestamptz default null
) returns int
language sql as $$ select pgque._create_recurring($1, $2, $3, $4, $5::pg_catalog.text, null, $6, $7, $8, $9, $10, $11, $12, $13, $14) $$;

create or replace function pgque.create_recurring(
  name text, queue_name text, cron text, type_name text, payload bytea, headers jsonb default null, key text default null,
  delay interval default null, ttl interval default null, partition_key text default null, timezone text default 'UTC',
  catch_up text default 'one', starts_at timestamptz default null, ends_at timestamptz default null
) returns int
language sql as $$ select pgque._create_recurring($1, $2, $3, $4, null, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) $$;

-- The comments differ in the payload only.
do $$
declare
  v_comment  text[];
  v_rest     constant text :=
    'The ticker sends it at its times. Returns 1 if it is new, else 0. name: 1 to 200 bytes, unique in the database. cron: five fields (minute hour '
    'day month weekday), six fields with seconds first, or an interval of 1 second to 366 days, counted from starts_at or from now. The fields take '
    '*, lists, ranges, steps and names. A date matches if its day or its weekday matches; if one of these fields is *, only the other one counts. '
    'timezone: a name of pg_timezone_names. A fixed hour that the clock skips runs right after the change, and an hour that the clock repeats runs '
    'once; hours with * or / follow real time. catch_up: the missed runs that are sent: none (of those missed by more than a minute), one (the last '
    'run) or all (at most 1,000; if the queue is full, the rest follows later). starts_at, ends_at: no run is earlier or later. headers, key, delay, '
    'ttl and partition_key are options of send(). Each message has the header pgque-recurring with name and run_at. At each run the role that made '
    'this call needs the right to send to the queue. A call that does not change cron, timezone, starts_at and ends_at keeps the next run; a paused '
    'message stays paused. Errors: PQ001 no such queue; PQ003 the queue has 100 recurring messages, and the role has a right to this queue only; '
    'PQ004 invalid name; PQ005 invalid schedule or option; 25000 the role has a right to this queue only, and the '
    'transaction is not READ COMMITTED; 42501 the name belongs to another role.';
begin
  foreach v_comment slice 1 in array array[
    ['text', 'Creates a recurring message whose payload is a text, or changes the one of this name. '],
    ['jsonb', 'Creates a recurring message whose payload is JSON, or changes the one of this name. '],
    ['bytea', 'Creates a recurring message whose payload is bytes, or changes the one of this name. ']]
  loop
    execute format('comment on function pgque.create_recurring(text, text, text, text, %s, jsonb, text, interval, interval, text, text, text, timestamptz, timestamptz) is %L',
      v_comment[1], v_comment[2] || v_rest);
  end loop;
end
$$;

create or replace function pgque.next_runs(
  cron text, timezone text default 'UTC', n int default 5, starts_at timestamptz default null, ends_at timestamptz default null
) returns setof timestamptz
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_rec  pgque.recurring := pgque._schedule($1, $2, $4, $5);
  v_run  timestamptz := pgque.clock();
begin
  if (n between 1 and 100) is not true then
    perform pgque._fail('PQ005', format('no such number of runs: %s', coalesce(n::text, 'null')), 'Pass n from 1 to 100.');
  end if;
  for v_i in 1..n loop
    v_run := pgque._next_run(v_rec, v_run);
    exit when v_run is null;
    return next v_run;
  end loop;
end
$$;
comment on function pgque.next_runs(text, text, int, timestamptz, timestamptz) is
  'Returns when a recurring message with this schedule would run next: n times (1 to 100), or fewer before ends_at. cron, timezone, starts_at and '
  'ends_at mean what they mean for create_recurring(); an interval without starts_at counts from now. Only for the role pgque_writer. Errors: PQ005 '
  'invalid schedule or n.';

create or replace function pgque.drop_recurring(name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_rec  pgque.recurring := pgque._recurring($1, caller);
begin
  delete from pgque.recurring r where r.rec_id = v_rec.rec_id;
  perform pgque._record_action('drop_recurring', v_rec.rec_queue, jsonb_build_object('name', $1));
  return 1;
end
$$;
comment on function pgque.drop_recurring(text, pgque.caller) is
  'Drops a recurring message and returns 1. Messages that were sent stay. For the role that created it and for administrators of its queue. '
  'Errors: PQ010 no such recurring message.';

create or replace function pgque.pause_recurring(name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_rec  pgque.recurring := pgque._recurring($1, caller);
begin
  update pgque.recurring r set rec_paused = true, rec_xid = pgque._mark() where r.rec_id = v_rec.rec_id;
  perform pgque._record_action('pause_recurring', v_rec.rec_queue, jsonb_build_object('name', $1)) where not v_rec.rec_paused;
  return (not v_rec.rec_paused)::int;
end
$$;
comment on function pgque.pause_recurring(text, pgque.caller) is
  'Pauses a recurring message and returns 1, or 0 if it was paused. For the role that created it and for administrators of its queue. Errors: PQ010 no '
  'such recurring message.';

create or replace function pgque.resume_recurring(name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_rec  pgque.recurring := pgque._recurring($1, caller);
begin
  if v_rec.rec_paused then
    update pgque.recurring r set rec_paused = false, rec_xid = pgque._mark() where r.rec_id = v_rec.rec_id;
    perform pgque._begin_schedule(v_rec.rec_id);
    perform pgque._record_action('resume_recurring', v_rec.rec_queue, jsonb_build_object('name', $1));
  end if;
  return v_rec.rec_paused::int;
end
$$;
comment on function pgque.resume_recurring(text, pgque.caller) is
  'Resumes a paused recurring message and returns 1, or 0 if it was not paused. Runs that were missed meanwhile are not caught up. For the role that '
  'created it and for administrators of its queue. Errors: PQ010 no such recurring message.';

create or replace function pgque.run_recurring(name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_rec  pgque.recurring := pgque._recurring($1, caller);
  v_run  pgque.recurring_run;
begin
  v_run.run_rec := v_rec.rec_id;
  v_run.run_at := pgque.clock();
  v_run.run_for := date_trunc('second', v_run.run_at);
  v_run.run_msg := pgque._send_run(v_rec, v_run.run_for);
  perform pgque._append_run(v_run);
  perform pgque._record_action('run_recurring', v_rec.rec_queue, jsonb_build_object('name', $1, 'msg_id', v_run.run_msg));
  return v_run.run_msg;
end
$$;
comment on function pgque.run_recurring(text, pgque.caller) is
  'Sends a recurring message now, besides its schedule and also while it is paused, and returns the id of the message. For the role that created it '
  'and for administrators of its queue. Errors: PQ003 the queue is full; PQ010 no such recurring message; PQ013 the queue is paused; 42501 the role '
  'that created it may no longer send to the queue.';

create or replace function pgque.list_recurring(
  caller pgque.caller default current_user,
  out name text, out queue_name text, out status text, out cron text, out timezone text, out next_run timestamptz, out last_run timestamptz,
  out last_msg_id bigint, out last_error text, out type_name text, out payload text, out payload_bytes bytea, out headers jsonb, out key text,
  out delay interval, out ttl interval, out partition_key text, out catch_up text, out starts_at timestamptz, out ends_at timestamptz,
  out created_by text, out created_at timestamptz, out registered_at timestamptz
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query
    select r.rec_name, r.rec_queue,
      case when r.rec_paused then 'paused' when u.run_error is not null then 'failing' when u.run_next = 'infinity' then 'ended' else 'active' end,
      r.rec_cron, r.rec_timezone, case when not r.rec_paused and not r.rec_restored then nullif(u.run_next, 'infinity') end,
      s.run_for, s.run_msg, u.run_error, r.rec_type,
      case when v.may_read then r.rec_data end, case when v.may_read then r.rec_bytes end, case when v.may_read then r.rec_headers end, r.rec_key,
      r.rec_delay, r.rec_ttl, r.rec_partition_key, r.rec_catch_up, r.rec_starts_at, r.rec_ends_at,
      r.rec_role::text, r.rec_created_at, r.rec_registered_at
    from pgque.recurring r
    left join pgque.queue q on q.queue_name = r.rec_queue
    cross join lateral (select pgque._is_creator(caller, r.rec_role) or pgque._may(caller, 'consume', q.queue_id) offset 0) v (may_read)
    cross join lateral pgque._last_run(r.rec_id, r.rec_since) u
    left join lateral (
      select s.run_for, s.run_msg from pgque.recurring_run s where s.run_rec = r.rec_id and s.run_msg is not null order by s.run_n desc limit 1
    ) s on true
    where v.may_read or pgque._may(caller, 'see', q.queue_id)
    order by r.rec_name;
end
$$;
comment on function pgque.list_recurring(pgque.caller) is
  'Returns the recurring messages of the calling role, and those of the queues to which it has a right. status: active, paused, failing (the last '
  'attempt failed, see last_error; the ticker tries again) or ended (no run before ends_at). next_run: NULL while it is paused or ended. last_run, '
  'last_msg_id: of the last message that was sent. registered_at: time of the last create_recurring(), which a Worker calls when it starts. '
  'payload and headers are NULL for a role that may not read the queue and did not create the message.';

-- Returns what keeps recurring messages from being sent, now or at their next run.
create or replace function pgque._recurring_health(out check_name text, out queue text, out status text, out detail text, out advice text) returns setof record
language plpgsql as $$
declare
  v_rec    pgque.recurring;
  v_run    pgque.recurring_run;
  v_error  text;
begin
  check_name := 'recurring';
  select 'ok', 'recurring messages: ' || pg_catalog.count(*) into status, detail from pgque.recurring having pg_catalog.count(*) > 0;
  if not found then
    return;
  end if;
  return next;
  for v_rec in select r.* from pgque.recurring r where not r.rec_paused order by r.rec_name loop
    v_run := pgque._last_run(v_rec.rec_id, v_rec.rec_since);
    continue when v_run.run_due = 'infinity';
    queue := v_rec.rec_queue;
    v_error := v_run.run_error;
    advice := v_run.run_hint;
    begin
      if v_error is null and (pgque._recurring_queue(v_rec)).queue_paused then
        perform pgque._need_open(v_rec.rec_queue);
      end if;
      perform pgque._next_run(v_rec, pgque.clock()) where v_rec.rec_restored;   -- this server may lack the time zone
    exception
      when others then
        get stacked diagnostics v_error = message_text, advice = pg_exception_hint;
    end;
    if v_error is null and not v_rec.rec_restored and v_run.run_due < pgque.clock() - interval '1 minute' then
      v_error := 'the ticker did not send it';
      advice := 'See the check ticker. To send it now: select pgque.maint_recurring()';
    end if;
    if v_error is not null then
      status := case when v_run.run_failures > 0 then 'fail' else 'warn' end;
      detail := pg_catalog.format('recurring message %I, due at %s: %s%s', v_rec.rec_name, v_run.run_next, v_error,
        case when v_run.run_failures > 0 then pg_catalog.format('; %s attempts failed', v_run.run_failures) end);
      return next;
    end if;
  end loop;
end
$$;
