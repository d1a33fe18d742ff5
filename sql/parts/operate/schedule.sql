-- ---------------------------------------------------------------------------
-- schedule: the loop and pg_cron
-- ---------------------------------------------------------------------------

create or replace function pgque.set_tick_period_ms(ms int) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._init();
  update pgque.config c set tick_period_ms = $1;
  perform pgque._record_action('set_tick_period_ms', null, jsonb_build_object('ms', $1));
  return $1;
exception
  when check_violation or not_null_violation then
    perform pgque._fail('PQ005', format('tick period out of range: %s ms', coalesce($1::text, 'null')), 'Use 1 to 60000 milliseconds.');
end
$$;
comment on function pgque.set_tick_period_ms(int) is
  'Sets the longest gap that the loop leaves between two ticks of a queue with messages, unless the queue''s tick_gap is longer: 1 to 60000 '
  'milliseconds (default 100). Returns it. A running loop follows at once. Errors: PQ005 out of range.';

create or replace function pgque.set_tick_share(percent int) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._init();
  update pgque.config c set tick_share = $1;
  perform pgque._record_action('set_tick_share', null, jsonb_build_object('percent', $1));
  return $1;
exception
  when check_violation or not_null_violation then
    perform pgque._fail('PQ005', format('share out of range: %s', coalesce($1 || ' %', 'null')),
      'Use 1 to 100 percent of a core; 15 is the default.');
end
$$;
comment on function pgque.set_tick_share(int) is
  'Sets how much of one core the loop may use for checks and ticks, 1 to 100 percent (default 15), and returns it. Above it, gaps between ticks grow. '
  'A running loop follows at once. Errors: PQ005 out of range.';

-- Returns the queues that a ticker serves.
create or replace function pgque._ticked_queues() returns int[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return array(
    select q.queue_id from pgque.queue q
    where not q.queue_external_ticker and not q.queue_ticker_paused
    order by q.queue_id);
end
$$;

-- Returns the settings of the loop and the time of the last stop(); the defaults while the
-- table is locked, since ticks must not wait for it.
create or replace function pgque._loop_bounds(out stopped_at timestamptz, out period interval, out share float8)
language plpgsql set lock_timeout = '20ms' as $$
begin
  period := '100 milliseconds';
  share := 0.15;
  select max(c.stopped_at), coalesce(max(c.tick_period_ms) * interval '1 millisecond', period), coalesce(max(c.tick_share) / 100.0, share)
  into stopped_at, period, share
  from pgque.config c;
exception
  when lock_not_available then
    null;
end
$$;

-- Returns what the loop reads in each round: the time of the last stop(), the period,
-- the shortest gap between two ticks of a queue, the loop's share of a core, whether
-- retries or recurring messages are due, and when to check the queues even if nothing
-- happened.
create or replace function pgque._loop_state(
  out stopped_at timestamptz, out period interval, out gap interval, out share float8, out retries boolean, out look_at timestamptz
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_now    timestamptz := clock_timestamp();
  v_retry  timestamptz;
begin
  select c.* into stopped_at, period, share from pgque._loop_bounds() c;
  select least(min(q.queue_tick_gap), period), v_now + least('1 second', min(least(q.queue_ticker_idle_period, nullif(q.queue_ticker_max_lag, '0'))))
  into gap, look_at
  from pgque.queue q;
  v_retry := least(pgque._next_retry(), pgque._recurring_at());
  retries := coalesce(v_retry <= v_now, false);
  look_at := least(look_at, case when retries then v_now + period else v_retry end);
end
$$;

-- Takes the lock of the loop, which ends with each transaction: a cancelled loop leaves
-- nothing behind.  The loop takes the lock again after each commit and keeps it while
-- it sleeps, so a second loop waits.
create or replace function pgque._loop_lock() returns boolean
language sql as $$
  select pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque'), pg_catalog.hashtext('pgque.ticker_loop'))
$$;

-- Returns when a loop ends: before statement_timeout would end it.
create or replace function pgque._loop_end(p_start timestamptz, p_run_for interval) returns timestamptz
language sql set search_path = pg_catalog, pgque, pg_temp as $$
  select least(
    p_start + coalesce(p_run_for, '55 seconds'),
    case when t.timeout > '0' then p_start + greatest(t.timeout - interval '2 seconds', t.timeout / 2) end)
  from (select current_setting('statement_timeout')::interval) t (timeout)
$$;

-- Sleeps until p_until, or until the loop has something to check (see _loop_check).  It
-- checks every p_nap.
create or replace function pgque._loop_sleep(
  p_until timestamptz, p_nap interval, p_ready timestamptz, p_due timestamptz, p_seen text
) returns void
language plpgsql set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_began  timestamptz := clock_timestamp();
  v_now    timestamptz := v_began;
begin
  -- A time before v_began: the clock was set back.
  while v_now >= v_began and v_now < p_until and (v_now < p_ready or v_now < p_due and pg_current_snapshot()::text = p_seen) loop
    -- pg_sleep() rounds up to whole milliseconds.
    perform pg_sleep(greatest(extract(epoch from least(
      case when v_now < p_ready then p_ready - v_now else least(p_nap, p_due - v_now) end, p_until - v_now)) - 0.0007, 0.0001));
    v_now := clock_timestamp();
  end loop;
end
$$;

-- Returns what the loop maintains.  Retention is a matter of days and takes long for
-- many queues, so it is last, and runs only with p_retain.
create or replace function pgque._loop_operations(p_retain boolean, out funcs text[], out args text[])
language sql set search_path = pg_catalog, pgque, pg_temp as $$
  select array_agg(o.func_name order by o.func_name = 'pgque.maint_retain', o.n), array_agg(o.func_arg order by o.func_name = 'pgque.maint_retain', o.n)
  from pgque.maint_operations() with ordinality o (func_name, func_arg, n)
  where p_retain or o.func_name <> 'pgque.maint_retain'
$$;

-- A procedure that commits may have neither SET nor SECURITY DEFINER.  So in those
-- below all names are qualified, operators get the types that they are for (else an
-- operator in public might fit better), and all work is in functions.

-- Runs maintenance for so long that messages do not wait.  retains becomes true when
-- retention has done a part of its work.
create or replace procedure pgque._loop_maintain(
  p_funcs pg_catalog.text[], p_args pg_catalog.text[], inout done pg_catalog.int4, inout retains pg_catalog.bool
)
language plpgsql as $$
declare
  v_end  pg_catalog.timestamptz := pg_catalog.clock_timestamp() + '20 milliseconds'::pg_catalog.interval;
begin
  while done < pg_catalog.cardinality(p_funcs) and pg_catalog.clock_timestamp() <= v_end loop
    done := done + 1;
    if pgque._maint_operation(p_funcs[done], p_args[done]) > 0 and p_funcs[done] = 'pgque.maint_retain' then
      done := done - 1;
      retains := true;
    end if;
    commit and chain;
    perform pgque._loop_lock();
  end loop;
end
$$;

-- Checks queues and ticks those that have messages.  From full_at on it checks all
-- queues, before that only the hot ones, which had messages at the last check.  p_known
-- is the state of the queues p_ids that the loop keeps; looked is the new state of the
-- checked ones.  The next check follows when the server's snapshot has changed, but not
-- before ready, and at the latest when it is due.
--
-- The loop pays for checks and ticks with pauses, so that they take no more than its
-- share of a core.  It does not pay for waits, and a quiet second pays in advance.  A
-- check of all queues waits until its cost is at most half of the share.
create or replace procedure pgque._loop_check(
  p_began pg_catalog.timestamptz, p_period pg_catalog.interval, p_gap pg_catalog.interval, p_share pg_catalog.float8,
  p_known pgque.look[], p_ids pg_catalog.int4[], p_mark pg_catalog.timestamptz, p_work pg_catalog.interval,
  inout hot pgque.look[], inout due pg_catalog.timestamptz, inout full_at pg_catalog.timestamptz, inout paid pg_catalog.timestamptz,
  inout active pg_catalog.timestamptz, out ready pg_catalog.timestamptz, out looked pgque.look[]
)
language plpgsql as $$
declare
  v_all       pg_catalog.bool := p_began >= full_at;
  v_old       pgque.look[] := case when v_all then p_known else hot end;
  v_queues    pg_catalog.int4[] := case when v_all then pgque._ticked_queues() else array(select h.queue_id from pg_catalog.unnest(hot) h) end;
  v_count     pg_catalog.int4 := pg_catalog.cardinality(v_queues);
  v_survey    pg_catalog.record;
  v_look      pgque.look;
  v_idle      pg_catalog.bool;
  v_new       pg_catalog.bool;
  v_news      pg_catalog.int4 := 0;
  v_at        pg_catalog.int4;
  v_quiet     pg_catalog.bool;                            -- some queue is not hot
  v_stall     pg_catalog.interval := '20 milliseconds';   -- a step that takes longer waits for a lock, or for the machine
  v_took      pg_catalog.interval;
  v_cost      pg_catalog.interval := '0';                 -- of the check and of idle ticks; the rest is p_work
  v_wait      pg_catalog.timestamptz := 'infinity';       -- when the first hot queue may tick
  v_idle_end  pg_catalog.timestamptz;
begin
  hot := '{}';
  looked := '{}';
  p_work := least(p_work, v_stall);
  while pg_catalog.cardinality(v_queues) > 0 loop
    select s.* into v_survey from pgque._queues_due(v_queues[:500], v_old, p_period) s;
    v_cost := v_cost + least(pg_catalog.clock_timestamp() - p_mark,
      v_stall + least(pg_catalog.cardinality(v_queues), 500)::pg_catalog.float8 * '0.1 milliseconds'::pg_catalog.interval);
    v_queues := v_queues[501:];
    hot := pg_catalog.array_cat(hot, v_survey.early);
    due := least(due, v_survey.early_until);
    v_wait := least(v_wait, v_survey.early_until);
    -- Not with all these sequences locked: another session may drop one.
    if pg_catalog.cardinality(v_survey.looks) + pg_catalog.cardinality(v_queues) > 0 then
      commit and chain;
      perform pgque._loop_lock();
    end if;
    p_mark := pg_catalog.clock_timestamp();
    v_at := 0;
    foreach v_look in array v_survey.looks loop
      v_idle := v_look.ticked;
      v_new := v_all and pg_catalog.array_position(p_ids, v_look.queue_id) is null;
      if v_new then
        -- A new loop knows no queue; while it reads thousands of them, some have
        -- messages.
        v_news := v_news + 1;
        continue when v_news > 100;
      elsif v_idle then
        -- An idle tick can wait for the next check of all queues, a message of another
        -- queue cannot.
        v_idle_end := coalesce(v_idle_end, p_mark + greatest(v_cost, '10 milliseconds'::pg_catalog.interval));
        if p_mark > v_idle_end then
          due := p_began;
          exit;
        end if;
      end if;
      v_look := pgque._check_queue(v_look);
      looked := pg_catalog.array_append(looked, v_look);
      v_took := pg_catalog.clock_timestamp() - p_mark;
      p_mark := p_mark + v_took;
      v_took := case when v_new then '0' else least(v_took, v_stall) end;
      if v_idle then
        v_cost := v_cost + v_took;
      else
        p_work := p_work + v_took;
        if v_look.ticked or not v_look.settled then
          hot := pg_catalog.array_append(hot, v_look);
          v_wait := least(v_wait, case when v_look.ticked then least(v_look.tick_time, p_mark) + p_gap else p_began end);
          active := case when v_look.ticked then p_began else active end;
        end if;
      end if;
      -- Each queue leaves a dozen locks behind, and a server has not many.
      v_at := v_at + 1;
      if v_look.ticked or v_at % 50 = 0 then
        commit and chain;
        perform pgque._loop_lock();
        p_mark := pg_catalog.clock_timestamp();
      end if;
    end loop;
  end loop;
  v_quiet := v_all and pg_catalog.cardinality(hot) < v_count;
  paid := greatest(paid, p_began - '1 second'::pg_catalog.interval)
    + case when v_quiet then p_work / (p_share / 2::pg_catalog.float8) else (p_work + v_cost) / p_share end;
  full_at := case
    when v_news > 100 then p_mark
    when v_quiet then p_mark + least(2::pg_catalog.float8 / p_share * v_cost, greatest(p_period, '1 second'::pg_catalog.interval))
    -- If no queue is quiet, none can have messages before the first may tick again.
    when v_all then least(v_wait, p_mark + least(p_period, '1 second'::pg_catalog.interval))
    else full_at
  end;
  due := case when v_all and v_news <= 100 then due else least(due, full_at) end;
  ready := greatest(paid, least(v_wait, full_at));
end
$$;

-- The ticker: it ticks, moves messages that are due and maintains, for just under a
-- minute (or run_for), and commits after each step.  pg_cron or `pgque ticker` calls it
-- again and again.  A second loop waits for the first and takes over within a tick
-- period.  A round in which no transaction of the server began or ended does nothing.
-- A round without work writes nothing and uses no transaction id.
--
-- The loop compares snapshots every five milliseconds; after some seconds without a
-- message it compares them four times a period.  A queue ticks as soon as its last tick
-- is old enough (_queues_due()).
create or replace procedure pgque.ticker_loop(run_for pg_catalog.interval default null)
language plpgsql as $$
declare
  v_start     pg_catalog.timestamptz := pg_catalog.clock_timestamp();
  v_end       pg_catalog.timestamptz := pgque._loop_end(v_start, run_for);
  v_limit     pg_catalog.text := nullif(pg_catalog.current_setting('transaction_timeout', true), '0');   -- PostgreSQL 17
  v_began     pg_catalog.timestamptz := v_start;
  v_woke      pg_catalog.timestamptz;
  v_state     pg_catalog.record;
  v_nap       pg_catalog.interval;
  v_seen      pg_catalog.text := '';
  v_pump      pg_catalog.timestamptz := v_start;
  v_letters   pg_catalog.timestamptz := v_start;
  v_sent      pg_catalog.int8;
  v_mark      pg_catalog.timestamptz;
  v_work      pg_catalog.interval;
  v_ready     pg_catalog.timestamptz := v_start;
  v_due       pg_catalog.timestamptz := v_start;
  v_full      pg_catalog.timestamptz := v_start;
  v_paid      pg_catalog.timestamptz := v_start;
  v_active    pg_catalog.timestamptz := v_start;
  v_hot       pgque.look[] := '{}';
  v_looked    pgque.look[];
  v_look      pgque.look;
  v_at        pg_catalog.int4;
  v_ids       pg_catalog.int4[] := '{}';
  v_known     pgque.look[] := '{}';
  v_maint     pg_catalog.timestamptz := v_start;
  v_passes    pg_catalog.int4 := 0;
  v_funcs     pg_catalog.text[] := '{}';
  v_args      pg_catalog.text[];
  v_done      pg_catalog.int4 := 0;
  v_retains   pg_catalog.bool := false;
begin
  if pg_catalog.pg_is_in_recovery() then
    perform pgque._no_standby('ticker_loop() cannot run');
  end if;
  -- Whatever the session's defaults are.  CHAIN keeps them.
  commit;
  set transaction isolation level read committed, read write;
  -- Each nap is a transaction.
  if v_limit is not null then
    perform pg_catalog.set_config('transaction_timeout', '0', false);
  end if;
  loop
    if not pgque._loop_lock() then
      exit when pg_catalog.clock_timestamp() >= v_end;
      perform pg_catalog.pg_sleep(0.05);
      commit and chain;
      continue;
    end if;
    v_woke := v_began;
    v_began := pg_catalog.clock_timestamp();
    select s.* into v_state from pgque._loop_state() s;
    -- If the clock was set back, all times of this loop are in the future: another loop
    -- begins.
    exit when v_state.stopped_at > v_start or v_began >= v_end or v_began < v_woke;
    v_nap := least(v_state.period / 4::pg_catalog.float8,
      case when v_began < v_active + '3 seconds'::pg_catalog.interval then least(v_state.gap, '5 milliseconds'::pg_catalog.interval) end);

    if v_began >= v_ready and (v_began >= v_due or pg_catalog.pg_current_snapshot()::pg_catalog.text <> v_seen) then
      v_seen := pg_catalog.pg_current_snapshot()::pg_catalog.text;
      v_due := v_state.look_at;
      v_mark := v_began; v_work := '0';
      if v_began >= v_letters then
        v_sent := pgque._forward_letters();
        v_mark := pg_catalog.clock_timestamp();
        v_work := v_mark - v_began;
        -- A twentieth of the time is enough, even if a held xmin keeps the index entries of
        -- many forwarded letters; and a queue that takes no letters now can wait.
        v_letters := v_mark + greatest(20::pg_catalog.float8 * v_work, case when v_sent = 0 then '1 second'::pg_catalog.interval end);
        if v_sent is not null then
          commit and chain;
          perform pgque._loop_lock();
        end if;
      end if;
      if v_state.retries and v_began >= v_pump then
        perform pgque._maint_operation('pgque.maint_retry_events', null), pgque._maint_operation('pgque.maint_recurring', null);
        v_work := pg_catalog.clock_timestamp() - v_began;
        -- If the step waited for a lock, or had much to do, the other steps run first.
        v_pump := v_began + case when v_work > '100 milliseconds'::pg_catalog.interval then '1 second'::pg_catalog.interval else '0' end;
        commit and chain;
        perform pgque._loop_lock();
        v_mark := pg_catalog.clock_timestamp();
      end if;
      call pgque._loop_check(v_began, v_state.period, v_state.gap, v_state.share, v_known, v_ids, v_mark, v_work,
        v_hot, v_due, v_full, v_paid, v_active, v_ready, v_looked);
      foreach v_look in array v_looked loop
        v_at := coalesce(pg_catalog.array_position(v_ids, v_look.queue_id), pg_catalog.cardinality(v_ids) + 1);
        v_ids[v_at] := v_look.queue_id;
        v_known[v_at] := v_look;
      end loop;
    end if;

    if (v_done = pg_catalog.cardinality(v_funcs) or v_retains) and pg_catalog.clock_timestamp() >= v_maint then
      v_maint := pg_catalog.clock_timestamp() + '5 seconds'::pg_catalog.interval;
      select o.funcs, o.args into v_funcs, v_args from pgque._loop_operations(v_passes % 12 = 0 or v_retains) o;
      v_done := 0;
      v_retains := false;
      v_passes := v_passes + 1;
    end if;
    if v_done < pg_catalog.cardinality(v_funcs) then
      call pgque._loop_maintain(v_funcs, v_args, v_done, v_retains);
    end if;

    commit and chain;
    perform pgque._loop_lock();
    perform pgque._loop_sleep(least(pg_catalog.clock_timestamp() + v_state.period, v_end), v_nap, v_ready, v_due, v_seen);
    commit and chain;
  end loop;
  if v_limit is not null then
    perform pg_catalog.set_config('transaction_timeout', v_limit, false);
  end if;
end
$$;
comment on procedure pgque.ticker_loop(interval) is
  'Runs the loop for run_for (NULL: 55 seconds): it ticks, moves messages that are due, forwards dead letters, maintains, and commits after each step. A queue ticks as '
  'soon as its tick_gap has passed since its last tick. Call it again and again outside a transaction, as pg_cron (see start()) and the command '
  'pgque ticker do. A second loop waits for the first.';

-- Returns whether the owner of pgque can use pg_cron: null if it is not in this
-- database, false without a right to its schema.
create or replace function pgque._has_cron() returns boolean
language sql stable as $$
  select pg_catalog.has_schema_privilege(n.oid, 'usage')
  from pg_catalog.pg_namespace n
  where n.nspname = 'cron' and exists (select from pg_catalog.pg_proc p where p.pronamespace = n.oid and p.proname = 'schedule' and p.pronargs = 3)
$$;

-- Returns the names of the jobs that start() may create.
create or replace function pgque._job_names() returns text[]
language sql immutable as $$ select '{pgque,pgque standby,pgque reboot}'::text[] $$;

-- Raises PQ014 for an owner without a right to pg_cron.  p_cause: what pg_cron said.
create or replace function pgque._no_cron_rights(p_cause text default null) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ014', pg_catalog.format('role %I may not schedule jobs%s', current_user, ': ' || p_cause),
    case when p_cause is null then pg_catalog.format('grant usage on schema cron to %I;', current_user)
      else pg_catalog.format('Give role %I the right that the message names, then call start() again.', current_user) end);
end
$$;

-- With pg_cron 1.5 or newer, one job is restarted within a second of any failure.
-- Older versions know only minutes: there a second job takes over and runs for five
-- seconds of the next minute, while the first one begins again.
create or replace function pgque.start() returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_job     bigint;
  v_hint    text;
  v_other   text;
  v_gaps    text;
  v_until   text := $q$call pgque.ticker_loop(date_trunc('minute', clock_timestamp()) + interval '%s seconds' - clock_timestamp())$q$;
begin
  if pgque._has_cron() is null then
    perform pgque._fail('PQ014', format('pg_cron is not in database %I', current_database()),
      'Run `pgque ticker` beside the server instead, or have any scheduler call pgque.ticker() and pgque.maint(). '
        'For pg_cron: add it to shared_preload_libraries, set cron.database_name to this database, and create extension pg_cron.');
  elsif not pgque._has_cron() then
    perform pgque._no_cron_rights();
  end if;
  perform pgque._unschedule();
  -- A job keeps its database when it is scheduled again under its name.
  execute 'select string_agg(format(''select cron.unschedule(%s)'', j.jobid), ''; '' order by j.jobid), min(j.database) from cron.job j'
    ' where j.jobname = any (pgque._job_names()) and j.username = current_user'
  into v_hint, v_other;
  if v_other is not null then
    perform pgque._fail('PQ014', format('pg_cron has jobs of pgque for database %I', v_other),
      format('If they came with a dump, or the ticker moves to this database, remove them: %s; then call pgque.start() again.', v_hint));
  end if;
  update pgque.config c set stopped_at = null;
  begin
    execute 'select cron.schedule($1, $2, $3)' into v_job using 'pgque', '1 second', 'call pgque.ticker_loop()';
  exception
    when insufficient_privilege then
      perform pgque._no_cron_rights(sqlerrm);
    when invalid_parameter_value then
      execute 'select cron.schedule($1, $2, $3)' into v_job using 'pgque', '* * * * *', format(v_until, 59.7);
      execute 'select cron.schedule($1, $2, $3)' using 'pgque standby', '* * * * *', format(v_until, 64.7);
      execute 'select cron.schedule($1, $2, $3)' using 'pgque reboot', '@reboot', format(v_until, 59.7);
  end;
  execute 'select j.database from cron.job j where j.jobid = $1 and j.database <> pg_catalog.current_database()' into v_other using v_job;
  if v_other is not null then
    perform pgque._fail('PQ014', format('pg_cron works for database %I, not for %I', v_other, current_database()),
      format('Set cron.database_name to %I and restart the server, or run `pgque ticker`.', current_database()));
  end if;
  select g.failure, g.remedy into v_gaps, v_hint from pgque._cron_gaps() g;
  if v_gaps is not null then
    raise warning using
      message = 'pgque: ' || v_gaps,
      hint = v_hint;
  end if;
  raise notice using
    message = format('pgque: pg_cron job %s is created and has not run yet', v_job),
    hint = 'Check that it runs: select * from pgque.status(); It starts within seconds, with pg_cron 1.4 at the next full minute.';
  perform pgque._record_action('start', null);
  return v_job;
end
$$;
comment on function pgque.start() is
  'Schedules the loop with pg_cron in this database, and returns the job''s id. A second call replaces the job. Errors: PQ014 pg_cron is not in '
  'this database or works for another one, the owner has no right to schema cron, or pg_cron has jobs of pgque for another database.';

create or replace function pgque.stop() returns void
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._init() where pgque._loading() is null;
  update pgque.config c set stopped_at = clock_timestamp();
  perform pgque._unschedule();
  perform pgque._record_action('stop', null);
end
$$;
comment on function pgque.stop() is
  'Stops the running loop, also one that pg_cron did not start. Removes the pg_cron jobs of this database, and those of databases that no longer '
  'exist.';

-- Removes our jobs of this database, and of databases that no longer exist: a database
-- that is renamed leaves its jobs behind.
create or replace function pgque._unschedule() returns void
language plpgsql as $$
begin
  if pgque._has_cron() then
    execute 'select cron.unschedule(j.jobid) from cron.job j'
      ' where j.jobname = any (pgque._job_names())'
      ' and (j.database = pg_catalog.current_database() or not exists (select from pg_catalog.pg_database d where d.datname = j.database))';
  elsif not pgque._has_cron() then
    raise warning using
      message = pg_catalog.format('pgque: role %I may not see the jobs of pg_cron: if there are jobs of pgque, they keep running', current_user),
      hint = pg_catalog.format('grant usage on schema cron to %I; then call it again.', current_user);
  end if;
end
$$;

-- Keeps a day of pg_cron's history of our own jobs.
create or replace function pgque._trim_cron_history() returns int
language plpgsql as $$
declare
  v_count  int := 0;
begin
  if pgque._has_cron() and pg_catalog.to_regclass('cron.job_run_details') is not null then
    execute 'delete from cron.job_run_details d using cron.job j'
      ' where j.jobid = d.jobid and j.jobname = any (pgque._job_names())'
      -- A connection that failed has no end time.
      ' and (d.end_time < pg_catalog.now() - interval ''1 day'' or d.start_time is null and d.status = ''failed''
        and d.runid < (select pg_catalog.max(m.runid) from cron.job_run_details m) - 1000)';
    get diagnostics v_count = row_count;
  end if;
  return v_count;
exception
  when insufficient_privilege then
    return 0;
end
$$;

-- Returns whether statement_timeout ends the runs of a job that begins only once a
-- minute (pg_cron 1.4), and the remedy.  Only these jobs are affected, and a run cannot
-- lift the limit of its own statement.
create or replace function pgque._cron_gaps(out failure text, out remedy text)
language plpgsql as $$
declare
  v_role   text;
  v_limit  text;
begin
  if pgque._has_cron() is not true then
    return;
  end if;
  execute 'select min(j.username) from cron.job j'
    ' where j.jobname = ''pgque'' and j.schedule = ''* * * * *'' and j.active and j.database = pg_catalog.current_database()'
  into v_role;
  -- The value that the server uses for the job's session.  The value of this session is
  -- that of the server, if neither a role nor a database has changed it.
  select l.value into v_limit
  from (
    select pg_catalog.split_part(c.setting, '=', 2) as value, s.setrole = 0 as all_roles, s.setdatabase = 0 as all_databases
    from pg_catalog.pg_db_role_setting s
    cross join lateral pg_catalog.unnest(s.setconfig) c (setting)
    where pg_catalog.split_part(c.setting, '=', 1) = 'statement_timeout'
      and s.setrole in (0, (select r.oid from pg_catalog.pg_roles r where r.rolname = v_role))
      and s.setdatabase in (0, (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()))
    union all
    select g.setting, null, null
    from pg_catalog.pg_settings g
    where g.name = 'statement_timeout' and g.source in ('configuration file', 'command line')
  ) l
  order by l.all_roles nulls last, l.all_databases
  limit 1;
  if v_role is not null and v_limit ~ '^\s*[1-9]' then
    v_limit := v_limit || case when v_limit ~ '[a-z]' then '' else 'ms' end;
    if v_limit::interval < interval '1 minute' then
      failure := pg_catalog.format('statement_timeout is %2$s for role %1$I: it ends each run early, and pg_cron starts the next one only at the next full minute',
        v_role, v_limit);
      remedy := pg_catalog.format('alter role %I in database %I set statement_timeout = 0; the next run then ticks without pauses.',
        v_role, pg_catalog.current_database());
    end if;
  end if;
end
$$;

-- Returns how the newest run of our jobs failed, if it did, and the remedy.  If that
-- cannot be known, the remedy is how to find out.  A failed login comes before a
-- statement_timeout, because without a login there is no run that it could end.
create or replace function pgque._cron_failure(out failure text, out remedy text)
language plpgsql as $$
declare
  v_recorded  text;
  v_run       record;
begin
  select g.failure, g.remedy into failure, remedy from pgque._cron_gaps() g;
  if pgque._has_cron() is not true or pg_catalog.to_regclass('cron.job_run_details') is null then
    return;
  elsif not (pg_catalog.has_table_privilege('cron.job', 'select') and pg_catalog.has_table_privilege('cron.job_run_details', 'select')) then
    remedy := coalesce(remedy, pg_catalog.format('To see how runs end: grant select on cron.job, cron.job_run_details to %I;', current_user));
    return;
  end if;
  -- An ordinary owner may not read this setting: current_setting() would raise 42501, the
  -- view has no row.
  v_recorded := (select g.setting from pg_catalog.pg_settings g where g.name = 'cron.log_run');
  if v_recorded = 'off' then
    remedy := coalesce(remedy, 'Runs are not recorded (cron.log_run is off): see the server''s log.');
    return;
  end if;
  execute 'select d.status, d.return_message, d.start_time, j.nodename'
    ' from cron.job j join cron.job_run_details d on d.jobid = j.jobid'
    ' where j.jobname = any (pgque._job_names()) and j.database = pg_catalog.current_database()'
    '   and d.status in (''running'', ''succeeded'', ''failed'')'
    '   and d.runid > (select pg_catalog.max(m.runid) from cron.job_run_details m) - 10000'   -- jobs of others may run as often
    ' order by d.runid desc limit 1'
  into v_run;
  if v_run.status = 'failed' and (failure is null or v_run.return_message ilike '%connect%') then
    failure := pg_catalog.concat_ws(' ', 'the last run failed', 'at ' || pg_catalog.date_trunc('seconds', v_run.start_time))
      || ': ' || pg_catalog.btrim(coalesce(v_run.return_message, 'see the server''s log'), E' \n');
    remedy := case
      -- The launcher logs in as the owner, from the server's account of the operating
      -- system.  A line in pg_hba.conf that lets it in could keep others out: the first
      -- line that fits a login decides.
      when v_run.return_message ilike '%connect%' then pg_catalog.format(
        'pg_cron cannot log in as role %1$I at %2$s. Let it run without a login: alter system set cron.use_background_workers = on; restart the server;'
        ' with pg_cron 1.4 other jobs then wait for the ticker. Or: '
        || case when v_run.nodename like '/%' then 'alter system set cron.host = ''localhost''; restart the server; select pgque.start(); and ' else '' end
        || 'put the line "%3$s:*:*:%1$s:PASSWORD" into ~/.pgpass of the server''s account of the operating system (chmod 600).',
        current_user, v_run.nodename, case when v_run.nodename like '/%' then 'localhost' else v_run.nodename end)
      when v_run.return_message ilike '%background%' or v_run.return_message ilike '%startup timeout%' then
        'alter system set max_worker_processes = 20 (one for each job that runs, and those of the server); restart the server.'
      else 'See select * from cron.job_run_details order by runid desc, and the server''s log.'
    end;
  elsif failure is null and v_run.status is null and v_recorded is null then
    remedy := 'No run is recorded. If this stays so, see the server''s log: cron.log_run may be off.';
  end if;
exception
  when insufficient_privilege or undefined_column then
    remedy := coalesce(remedy, pg_catalog.format('How runs end cannot be read: %s.', sqlerrm));
end
$$;

create or replace function pgque.status(out component text, out status text, out detail text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_standby  boolean := pg_is_in_recovery();
  v_loop     int;
  v_jobs     text;
  v_failure  text;
  v_remedy   text;
begin
  component := 'pgque'; status := pgque.version(); detail := version();
  return next;
  -- Between two transactions the loop holds no lock for a moment: check again.
  for i in 1..3 loop
    select l.pid into v_loop
    from pg_locks l
    where l.locktype = 'advisory' and l.granted
      and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and l.classid::bigint = (hashtext('pgque')::bigint & 4294967295) and l.objid::bigint = (hashtext('pgque.ticker_loop')::bigint & 4294967295);
    exit when found;
    perform pg_sleep(0.02);
  end loop;
  component := 'scheduler'; status := 'none'; detail := 'pg_cron is not in this database';
  if pgque._has_cron() then
    execute 'select string_agg(format(''%s (%s)'', j.jobname, j.schedule), '', '') from cron.job j'
      ' where j.jobname = any (pgque._job_names()) and j.active and j.database = pg_catalog.current_database()'
    into v_jobs;
    status := case when v_jobs is null then 'stopped' else 'scheduled' end;
    detail := coalesce(v_jobs, 'select pgque.start()');
    if v_jobs is not null and not v_standby then
      if v_loop is null then
        select c.failure, c.remedy into v_failure, v_remedy from pgque._cron_failure() c;
      else
        select g.failure, g.remedy into v_failure, v_remedy from pgque._cron_gaps() g;
      end if;
      status := case when v_failure is null then 'scheduled' else 'failing' end;
      detail := concat_ws('. ', concat_ws('; ', detail, v_failure), v_remedy);
    end if;
  elsif not pgque._has_cron() then
    status := 'hidden';
    detail := format('pg_cron is installed, and role %1$I may not use it: grant usage on schema cron to %1$I;', current_user);
  end if;
  return next;
  component := 'ticker';
  status := case when v_standby then 'standby' when v_loop is null then 'stopped' else 'running' end;
  detail := coalesce('pid ' || v_loop, case
      when v_standby then 'this server is a standby: the loop runs on its primary'
      when v_failure is not null then 'no loop runs: see scheduler'
      when v_jobs is not null then 'no loop runs yet: pg_cron starts one within seconds, with pg_cron 1.4 at the next full minute'
      else 'no loop runs: select pgque.start(), or pgque ticker'
    end) || format(', period %s ms', (select coalesce(max(c.tick_period_ms), 100) from pgque.config c));
  return next;
  component := 'queues'; status := (select count(*)::text from pgque.queue);
  detail := (select count(*)::text from pgque.subscriber s where s.sub_main is null) || ' subscriptions';
  return next;
end
$$;
comment on function pgque.status() is 'Returns what is installed, scheduled and running, one row each: pgque (its version), scheduler, ticker, queues.';

-- Returns tables and columns outside the schema that would be dropped with its types
-- and tables.
create or replace function pgque._foreign_data() returns setof text
language sql stable set search_path = pg_catalog, pgque, pg_temp as $$
  with recursive gone as (
    select 'pg_type'::regclass::oid as classid, t.oid as objid, 0 as objsubid from pg_type t where t.typnamespace = 'pgque'::regnamespace
    union
    select 'pg_class'::regclass, c.oid, 0 from pg_class c where c.relnamespace = 'pgque'::regnamespace
    union
    select d.classid, d.objid, d.objsubid
    from gone g
    join pg_depend d on d.refclassid = g.classid and d.refobjid = g.objid and (g.objsubid = 0 or d.refobjsubid = g.objsubid)
    where d.deptype <> 'e' and d.classid in ('pg_type'::regclass, 'pg_class'::regclass)
  )
  select pg_describe_object(g.classid, g.objid, g.objsubid)
  from gone g
  join pg_class c on c.oid = g.objid and g.classid = 'pg_class'::regclass
  where c.relkind in ('r', 'p', 'f', 'm') and c.relnamespace <> 'pgque'::regnamespace and c.relnamespace <> 'pg_toast'::regnamespace
  order by 1
$$;

-- client_min_messages suppresses the notice that names each object of the schema.
create or replace function pgque.uninstall() returns void
language plpgsql set search_path = pg_catalog, pgque, pg_temp set client_min_messages = warning as $$
declare
  v_foreign  text := (select string_agg(f.what, ', ') from pgque._foreign_data() f (what));
begin
  if not pg_catalog.pg_has_role((select n.nspowner from pg_catalog.pg_namespace n where n.nspname = 'pgque'), 'usage') then
    perform pgque._fail('insufficient_privilege', 'only the owner of schema pgque may uninstall it',
      'Run it as the role that installed it.');
  elsif v_foreign is not null then
    perform pgque._fail('dependent_objects_still_exist', 'tables outside schema pgque use its types or tables, and would lose data',
      'Drop these columns and tables, or give the columns other types (alter table ... alter column ... type ...). Nothing was changed.',
      v_foreign);
  end if;
  perform pgque.stop();
  perform pgque._execute_insistently(
    case when exists (select from pg_catalog.pg_extension e where e.extname = 'pgque') then 'drop extension pgque cascade; ' else '' end
    || 'drop schema if exists pgque cascade');
end
$$;
comment on function pgque.uninstall() is
  'Removes schema pgque with all queues and messages, and the pg_cron jobs. The roles stay. Errors: 42501 the caller does not own the schema; '
  '2BP01 tables outside the schema have columns of its types, which would be dropped too.';
