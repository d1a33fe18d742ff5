-- ---------------------------------------------------------------------------
-- schedule: the loop and pg_cron
-- ---------------------------------------------------------------------------

create or replace function pgque.set_tick_period_ms(ms int) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  perform pgque._init();
  update pgque.config c set tick_period_ms = $1;
  return $1;
exception
  when check_violation or not_null_violation then
    perform pgque._fail('PQ005', format('tick period out of range: %s ms', coalesce($1::text, 'null')), 'Use 1 to 60000 milliseconds.');
end
$$;
comment on function pgque.set_tick_period_ms(int) is
  'Sets the longest gap that the loop leaves between two ticks of a queue with messages, 1 to 60000 milliseconds (default 100), and returns it. A '
  'running loop follows at once. Errors: PQ005 out of range.';

create or replace function pgque.set_tick_share(percent int) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  perform pgque._init();
  update pgque.config c set tick_share = $1;
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

-- The queues that a ticker serves.
create or replace function pgque._ticked_queues() returns int[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return array(
    select q.queue_id from pgque.queue q
    where not q.queue_external_ticker and not q.queue_ticker_paused
    order by q.queue_id);
end
$$;

-- What the loop has to know now and then: when stop() was called last, the period,
-- the shortest gap between two ticks of a queue, the loop's share of a core, whether
-- retries are due, and when to look at the queues though nothing happened.
create or replace function pgque._loop_state(
  out stopped_at timestamptz, out period interval, out gap interval, out share float8, out retries boolean, out look_at timestamptz
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_now    timestamptz := clock_timestamp();
  v_retry  timestamptz;
begin
  select max(c.stopped_at), coalesce(max(c.tick_period_ms), 100) * interval '1 millisecond', coalesce(max(c.tick_share), 15) / 100.0
  into stopped_at, period, share
  from pgque.config c;
  select least(min(q.queue_tick_gap), period), v_now + least('1 second', min(least(q.queue_ticker_idle_period, nullif(q.queue_ticker_max_lag, '0'))))
  into gap, look_at
  from pgque.queue q;
  v_retry := pgque._next_retry();
  retries := coalesce(v_retry <= v_now, false);
  look_at := least(look_at, case when retries then v_now + period else v_retry end);
end
$$;

-- The ticker: ticks, moves due retries, maintains, for just under a minute (or
-- run_for), and commits after each step.  pg_cron or `pgque ticker` calls it again
-- and again.  A second loop waits for the first and takes over within a tick period.
-- A round in which no transaction of the server began or ended does nothing; a
-- round without work writes nothing and uses no transaction id.
--
-- The loop compares snapshots every five milliseconds, after some seconds without a
-- message four times a period.  A queue ticks as soon as its last tick is old enough
-- (_queues_due()).  Queues that had something at the last check are checked as soon as
-- the first of them may tick again; a check of all queues waits until its cost is at
-- most half of the loop's share of a core.  All checks and ticks are paid for with
-- pauses, so that they take no more than the share, waits for the disk aside; a
-- second that was quiet pays in advance.
--
-- A procedure that commits may have neither SET nor SECURITY DEFINER, so all
-- names are qualified, operators get the very types they are for (else one in
-- public might fit better), and all work is in functions.
create or replace procedure pgque.ticker_loop(run_for pg_catalog.interval default null)
language plpgsql as $$
declare
  v_start     pg_catalog.timestamptz := pg_catalog.clock_timestamp();
  v_timeout   pg_catalog.interval := pg_catalog.current_setting('statement_timeout')::pg_catalog.interval;
  v_limit     pg_catalog.text := nullif(pg_catalog.current_setting('transaction_timeout', true), '0');   -- PostgreSQL 17
  v_end       pg_catalog.timestamptz;
  v_lock      pg_catalog.int4 := pg_catalog.hashtext('pgque.ticker_loop');
  v_maint     pg_catalog.timestamptz := v_start;
  v_due       pg_catalog.timestamptz := v_start;
  v_full      pg_catalog.timestamptz := v_start;
  v_paid      pg_catalog.timestamptz := v_start;
  v_wait      pg_catalog.timestamptz := v_start;
  v_ready     pg_catalog.timestamptz := v_start;
  v_idle_end  pg_catalog.timestamptz;
  v_active    pg_catalog.timestamptz := v_start;
  v_next      pg_catalog.timestamptz := v_start;
  v_woke      pg_catalog.timestamptz := v_start;
  v_began     pg_catalog.timestamptz;
  v_mark      pg_catalog.timestamptz;
  v_work      pg_catalog.interval;
  v_cost      pg_catalog.interval;
  v_took      pg_catalog.interval;
  v_stall     pg_catalog.interval := '20 milliseconds';   -- what a step takes longer is a wait for a lock, or for the machine
  v_pump      pg_catalog.timestamptz := v_start;
  v_share     pg_catalog.float8;
  v_state     pg_catalog.record;
  v_nap       pg_catalog.interval;
  v_seen      pg_catalog.text := '';
  v_snapshot  pg_catalog.text;
  v_all       pg_catalog.bool;
  v_queues    pg_catalog.int4[];
  v_quiet     pg_catalog.int4;
  v_hot       pgque.look[] := '{}';
  v_old       pgque.look[];
  v_ids       pg_catalog.int4[] := '{}';
  v_known     pgque.look[] := '{}';
  v_survey    pg_catalog.record;
  v_found     pgque.look;
  v_idle      pg_catalog.bool;
  v_new       pg_catalog.bool;
  v_news      pg_catalog.int4;
  v_count     pg_catalog.int4;
  v_looked    pg_catalog.int4;
  v_at        pg_catalog.int4;
  v_passes    pg_catalog.int4 := 0;
  v_retains   pg_catalog.bool := false;
  v_ops       pg_catalog.text[] := '{}';
  v_args      pg_catalog.text[];
  v_op        pg_catalog.int4 := 0;
begin
  if pg_catalog.pg_is_in_recovery() then
    perform pgque._fail('read_only_sql_transaction', 'ticker_loop() cannot run on a standby', 'Run it on the primary.');
  end if;
  -- Whatever the session's defaults are; these go from one transaction to the
  -- next.
  commit;
  set transaction isolation level read committed, read write;
  -- Each nap is a transaction.
  if v_limit is not null then
    perform pg_catalog.set_config('transaction_timeout', '0', false);
  end if;
  v_end := v_start + coalesce(ticker_loop.run_for, '55 seconds'::pg_catalog.interval);
  if v_timeout > '0'::pg_catalog.interval then
    v_end := least(v_end, v_start + greatest(v_timeout - '2 seconds'::pg_catalog.interval, v_timeout / 2::pg_catalog.float8));
  end if;
  loop
    -- The lock goes with each transaction, so a loop that was cancelled leaves
    -- nothing behind, and is taken anew at once, through the nap too, so a second
    -- loop waits.
    if not pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque'), v_lock) then
      exit when pg_catalog.clock_timestamp() >= v_end;
      perform pg_catalog.pg_sleep(0.05);
      v_next := pg_catalog.clock_timestamp();
      commit and chain;
      continue;
    end if;
    v_began := pg_catalog.clock_timestamp();
    select s.* into v_state from pgque._loop_state() s;
    -- Where the clock was set back, all times of this loop lie ahead: another one begins.
    exit when v_state.stopped_at > v_start or v_began >= v_end or v_began < v_woke;
    v_woke := v_began;
    v_nap := v_state.period / 4::pg_catalog.float8;
    if v_began < v_active + '3 seconds'::pg_catalog.interval then
      v_nap := least(v_nap, v_state.gap, '5 milliseconds'::pg_catalog.interval);
    end if;

    v_snapshot := pg_catalog.pg_current_snapshot()::pg_catalog.text;
    if v_began >= v_ready and (v_snapshot <> v_seen or v_began >= v_due) then
      v_seen := v_snapshot;
      v_due := v_state.look_at;
      v_mark := v_began;
      v_work := '0';
      if v_state.retries and v_began >= v_pump then
        perform pgque.maint_retry_events();
        v_took := pg_catalog.clock_timestamp() - v_mark;
        -- Where it waited for a lock, or had much to do, the others come first.
        v_pump := v_began + case when v_took > '100 milliseconds'::pg_catalog.interval then '1 second'::pg_catalog.interval else '0' end;
        v_work := least(v_took, v_stall);
        commit and chain;
        perform pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque'), v_lock);
        v_mark := pg_catalog.clock_timestamp();
      end if;
      v_all := v_began >= v_full;
      v_queues := case when v_all then pgque._ticked_queues() else array(select h.queue_id from pg_catalog.unnest(v_hot) h) end;
      v_old := case when v_all then v_known else v_hot end;
      v_quiet := pg_catalog.cardinality(v_queues);
      v_hot := '{}';
      v_wait := 'infinity';
      v_cost := '0';
      v_news := 0;
      v_idle_end := null;
      while pg_catalog.cardinality(v_queues) > 0 loop
        v_count := least(pg_catalog.cardinality(v_queues), 500);
        select s.* into v_survey from pgque._queues_due(v_queues[:500], v_old, v_state.period) s;
        v_queues := v_queues[501:];
        v_hot := pg_catalog.array_cat(v_hot, v_survey.early);
        v_quiet := v_quiet - pg_catalog.cardinality(v_survey.early);
        v_wait := least(v_wait, v_survey.early_until);
        v_due := least(v_due, v_survey.early_until);
        v_cost := v_cost + least(pg_catalog.clock_timestamp() - v_mark, v_stall + 0.0001::pg_catalog.float8 * v_count::pg_catalog.float8 * '1 second'::pg_catalog.interval);
        -- Not with all these sequences locked: somebody may drop one.
        if pg_catalog.cardinality(v_survey.looks) + pg_catalog.cardinality(v_queues) > 0 then
          commit and chain;
          perform pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque'), v_lock);
        end if;
        v_mark := pg_catalog.clock_timestamp();
        v_looked := 0;
        foreach v_found in array v_survey.looks loop
          v_idle := v_found.ticked;
          v_at := pg_catalog.array_position(v_ids, v_found.queue_id);
          v_new := v_at is null;
          if v_new then
            -- A loop that begins knows no queue; while it gets to know thousands, some have messages.
            v_news := v_news + 1;
            continue when v_news > 100;
          elsif v_idle then
            -- An idle tick can wait for the next check of all queues, a message of another queue not.
            v_idle_end := coalesce(v_idle_end, v_mark + greatest(v_cost, '10 milliseconds'::pg_catalog.interval));
            if v_mark > v_idle_end then
              v_due := v_began;
              exit;
            end if;
          end if;
          v_found := pgque._look_at(v_found);
          v_looked := v_looked + 1;
          v_at := coalesce(v_at, pg_catalog.cardinality(v_ids) + 1);
          v_ids[v_at] := v_found.queue_id;
          v_known[v_at] := v_found;
          v_took := pg_catalog.clock_timestamp() - v_mark;
          v_mark := v_mark + v_took;
          if v_new then
            v_took := '0';
          end if;
          if v_idle then
            v_cost := v_cost + least(v_took, v_stall);
          else
            v_work := v_work + least(v_took, v_stall);
            if v_found.ticked or not v_found.settled then
              v_hot := pg_catalog.array_append(v_hot, v_found);
              v_quiet := v_quiet - 1;
              v_wait := least(v_wait, case when v_found.ticked then least(v_found.tick_time, v_mark) + v_state.gap else v_began end);
              v_active := case when v_found.ticked then v_began else v_active end;
            end if;
          end if;
          -- Each queue leaves a dozen locks behind, and a server has not many.
          if v_found.ticked or v_looked % 50 = 0 then
            commit and chain;
            perform pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque'), v_lock);
            v_mark := pg_catalog.clock_timestamp();
          end if;
        end loop;
      end loop;
      if v_all and v_quiet > 0 then
        v_full := v_mark + least(2::pg_catalog.float8 / v_state.share * v_cost, greatest(v_state.period, '1 second'::pg_catalog.interval));
        v_share := v_state.share / 2::pg_catalog.float8;
      else
        -- Where no queue is quiet, none can have anything before the first may tick again.
        v_full := case when v_all then least(v_wait, v_mark + least(v_state.period, '1 second'::pg_catalog.interval)) else v_full end;
        v_share := v_state.share;
        v_work := v_work + v_cost;
      end if;
      if v_news > 100 then
        v_full := v_mark;
      end if;
      if not v_all or v_news > 100 then
        v_due := least(v_due, v_full);
      end if;
      v_paid := greatest(v_paid, v_began - '1 second'::pg_catalog.interval) + v_work / v_share;
      v_ready := greatest(v_paid, least(v_wait, v_full));
    end if;

    if (v_op = pg_catalog.cardinality(v_ops) or v_retains) and pg_catalog.clock_timestamp() >= v_maint then
      v_maint := pg_catalog.clock_timestamp() + '5 seconds'::pg_catalog.interval;
      -- Retention is a matter of days, and asks much of many queues: last, and once a minute.
      select pg_catalog.array_agg(o.func_name order by o.func_name = 'pgque.maint_retain', o.n),
        pg_catalog.array_agg(o.func_arg order by o.func_name = 'pgque.maint_retain', o.n)
      into v_ops, v_args
      from pgque.maint_operations() with ordinality o (func_name, func_arg, n)
      where v_passes % 12 = 0 or v_retains or o.func_name <> 'pgque.maint_retain';
      v_op := 0;
      v_retains := false;
      v_passes := v_passes + 1;
    end if;
    -- So much of it as keeps no message waiting; the rest in the next period.
    v_began := pg_catalog.clock_timestamp();
    while v_op < pg_catalog.cardinality(v_ops) and pg_catalog.clock_timestamp() <= v_began + '20 milliseconds'::pg_catalog.interval loop
      v_op := v_op + 1;
      if pgque._maint_operation(v_ops[v_op], v_args[v_op]) > 0 and v_ops[v_op] = 'pgque.maint_retain' then
        -- It did a part of what there is.
        v_op := v_op - 1;
        v_retains := true;
      end if;
      commit and chain;
      perform pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque'), v_lock);
    end loop;

    commit and chain;
    perform pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque'), v_lock);
    -- pg_sleep() rounds up to whole milliseconds.
    v_next := least(pg_catalog.clock_timestamp() + v_state.period, v_end);
    loop
      v_began := pg_catalog.clock_timestamp();
      exit when v_began >= v_next or v_began < v_woke
        or v_began >= v_ready and (v_began >= v_due or pg_catalog.pg_current_snapshot()::pg_catalog.text <> v_seen);
      v_took := case when v_began < v_ready then v_ready - v_began else least(v_nap, v_due - v_began) end;
      perform pg_catalog.pg_sleep(greatest(extract(epoch from least(v_took, v_next - v_began)) - 0.0007, 0.0001));
    end loop;
    commit and chain;
  end loop;
  if v_limit is not null then
    perform pg_catalog.set_config('transaction_timeout', v_limit, false);
  end if;
end
$$;
comment on procedure pgque.ticker_loop(interval) is
  'Runs the loop for run_for (NULL: 55 seconds): it ticks, moves due retries and maintains, and commits after each step. A queue ticks as soon as its '
  'tick_gap has passed since its last tick. Call it again and again outside a transaction, as pg_cron (see start()) and the command pgque ticker do. '
  'A second loop waits for the first.';

-- Whether there is pg_cron for the owner of pgque: null if it is not in this
-- database, false if its schema is closed.
create or replace function pgque._has_cron() returns boolean
language sql stable as $$
  select pg_catalog.has_schema_privilege(n.oid, 'usage')
  from pg_catalog.pg_namespace n
  where n.nspname = 'cron' and exists (select from pg_catalog.pg_proc p where p.pronamespace = n.oid and p.proname = 'schedule' and p.pronargs = 3)
$$;

-- PQ014 for an owner whom pg_cron does not let in.
create or replace function pgque._no_cron_rights() returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ014', pg_catalog.format('role %I may not schedule jobs', current_user),
    pg_catalog.format('grant usage on schema cron to %I;', current_user));
end
$$;

-- With pg_cron 1.5 or newer it is one job that is restarted within a second of
-- any failure.  Older ones know minutes only: there a second job stands by, and
-- goes on for five seconds of the next minute, while the first begins again.
create or replace function pgque.start() returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
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
    ' where j.jobname in (''pgque'', ''pgque standby'', ''pgque reboot'') and j.username = current_user'
  into v_hint, v_other;
  if v_other is not null then
    perform pgque._fail('PQ014', format('pg_cron has jobs of these names for database %I', v_other),
      format('If they came with a dump, or the ticker is to run here from now on: %s; and call pgque.start() again.', v_hint));
  end if;
  update pgque.config c set stopped_at = null;
  begin
    execute 'select cron.schedule($1, $2, $3)' into v_job using 'pgque', '1 second', 'call pgque.ticker_loop()';
  exception
    when insufficient_privilege then
      perform pgque._no_cron_rights();
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
    message = format('pgque: pg_cron has job %s, and has not run it yet', v_job),
    hint = 'See whether it runs: select * from pgque.status(). It does within seconds, with pg_cron 1.4 at the next full minute.';
  return v_job;
end
$$;
comment on function pgque.start() is
  'Makes pg_cron run the loop in this database, once however often it is called, and returns the job''s id. Errors: PQ014 pg_cron is not in this '
  'database or works for another one, its schema is closed to the owner, or it has jobs of these names for another database.';

create or replace function pgque.stop() returns void
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
begin
  perform pgque._init();
  update pgque.config c set stopped_at = clock_timestamp();
  perform pgque._unschedule();
end
$$;
comment on function pgque.stop() is
  'Stops the running loop, whoever runs it, and removes the pg_cron jobs of this database, and of databases that are gone.';

-- Removes our jobs of this database, and of those that are gone: one that was
-- renamed leaves them behind.
create or replace function pgque._unschedule() returns void
language plpgsql as $$
begin
  if pgque._has_cron() then
    execute 'select cron.unschedule(j.jobid) from cron.job j'
      ' where j.jobname in (''pgque'', ''pgque standby'', ''pgque reboot'')'
      ' and (j.database = pg_catalog.current_database() or not exists (select from pg_catalog.pg_database d where d.datname = j.database))';
  elsif not pgque._has_cron() then
    raise warning using
      message = pg_catalog.format('pgque: role %I may not see the jobs of pg_cron: those of pgque go on, if there are any', current_user),
      hint = pg_catalog.format('grant usage on schema cron to %I; and call it again.', current_user);
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
      ' where j.jobid = d.jobid and j.jobname in (''pgque'', ''pgque standby'', ''pgque reboot'')'
      -- A connection that failed has no time.
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

-- Whether statement_timeout ends the runs of a job that begins only once a minute
-- (pg_cron 1.4), and what to do.  Such a job is for minutes only, and a run cannot
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
  -- As the server finds the setting for the job's session.  This session's value is
  -- that of the server where neither a role nor a database has changed it.
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
      failure := pg_catalog.format('statement_timeout is %2$s for role %1$I: it ends each run early, and pg_cron begins the next one only with the next minute',
        v_role, v_limit);
      remedy := pg_catalog.format('alter role %I in database %I set statement_timeout = 0; from the next run on it ticks all the time.',
        v_role, pg_catalog.current_database());
    end if;
  end if;
end
$$;

-- How the newest run of our jobs failed, if it did, and what to do; where that
-- cannot be known, how to find out.
create or replace function pgque._cron_failure(out failure text, out remedy text)
language plpgsql as $$
declare
  v_run  record;
begin
  select g.failure, g.remedy into failure, remedy from pgque._cron_gaps() g;
  if failure is not null then
    return;
  end if;
  if pgque._has_cron() is not true or pg_catalog.to_regclass('cron.job_run_details') is null then
    return;
  elsif pg_catalog.current_setting('cron.log_run', true) = 'off' then
    remedy := 'Runs are not recorded (cron.log_run is off): see the server''s log.';
    return;
  end if;
  execute 'select d.status, d.return_message, d.start_time, j.nodename, j.database'
    ' from cron.job j join cron.job_run_details d on d.jobid = j.jobid'
    ' where j.jobname in (''pgque'', ''pgque standby'', ''pgque reboot'') and j.database = pg_catalog.current_database()'
    '   and d.status in (''running'', ''succeeded'', ''failed'')'
    '   and d.runid > (select pg_catalog.max(m.runid) from cron.job_run_details m) - 10000'   -- jobs of others may run as often
    ' order by d.runid desc limit 1'
  into v_run;
  if v_run.status = 'failed' then
    failure := pg_catalog.concat_ws(' ', 'the last run failed', 'at ' || pg_catalog.date_trunc('seconds', v_run.start_time))
      || ': ' || pg_catalog.btrim(coalesce(v_run.return_message, 'see the server''s log'), E' \n');
    remedy := case
      when v_run.return_message ilike '%connect%' then pg_catalog.format(
        -- The launcher comes as the server's user of the operating system.
        case when v_run.nodename like '/%' then
          'pg_cron cannot log in as role %1$s through the socket in %2$s. Put "local %4$s %1$s peer map=pgque" first into pg_hba.conf'
          ' and "pgque postgres %1$s" into pg_ident.conf; select pg_reload_conf();'
        else
          'pg_cron cannot log in as role %1$s at %2$s. Let it use the socket: alter system set cron.host = %3$L; restart the server; select pgque.start();'
        end
        || ' Or: alter system set cron.use_background_workers = on; restart the server; with pg_cron 1.4 other jobs then wait for the ticker.',
        pg_catalog.quote_ident(current_user), v_run.nodename,
        coalesce((
          select nullif(pg_catalog.btrim(pg_catalog.split_part(g.setting, ',', 1), ' "'), '')
          from pg_catalog.pg_settings g where g.name = 'unix_socket_directories'), '/var/run/postgresql'),
        pg_catalog.quote_ident(pg_catalog.current_database()))
      when v_run.return_message ilike '%background%' or v_run.return_message ilike '%startup timeout%' then
        'alter system set max_worker_processes = 20 (one for each job that runs, and those of the server); restart the server.'
      else 'See select * from cron.job_run_details order by runid desc, and the server''s log.'
    end;
  end if;
exception
  when insufficient_privilege or undefined_column then
    remedy := pg_catalog.format('To see how runs end: grant select on cron.job, cron.job_run_details to %I;', current_user);
end
$$;

create or replace function pgque.status(out component text, out status text, out detail text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_loop     int;
  v_jobs     text;
  v_failure  text;
  v_remedy   text;
begin
  component := 'pgque'; status := pgque.version(); detail := version();
  return next;
  -- Between two transactions the loop holds no lock for a moment: look twice.
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
      ' where j.jobname in (''pgque'', ''pgque standby'', ''pgque reboot'') and j.active and j.database = pg_catalog.current_database()'
    into v_jobs;
    status := case when v_jobs is null then 'stopped' else 'scheduled' end;
    detail := coalesce(v_jobs, 'select pgque.start()');
    if v_jobs is not null then
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
    detail := format('pg_cron is here, but closed to role %1$I: grant usage on schema cron to %1$I;', current_user);
  end if;
  return next;
  component := 'ticker';
  status := case when v_loop is null then 'stopped' else 'running' end;
  detail := coalesce('pid ' || v_loop, case
      when v_failure is not null then 'no loop runs: see scheduler'
      when v_jobs is not null then 'no loop runs yet: pg_cron begins one within seconds, with pg_cron 1.4 at the next full minute'
      else 'no loop runs: select pgque.start(), or pgque ticker'
    end) || format(', period %s ms', (select coalesce(max(c.tick_period_ms), 100) from pgque.config c));
  return next;
  component := 'queues'; status := (select count(*)::text from pgque.queue);
  detail := (select count(*)::text from pgque.subscriber s where s.sub_main is null) || ' subscriptions';
  return next;
end
$$;
comment on function pgque.status() is 'Returns what is installed, scheduled and running, one row each: version, scheduler, ticker, queues.';

-- Tables and columns outside the schema that would go with its types and tables.
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

-- Without the notice that names each object of the schema.
create or replace function pgque.uninstall() returns void
language plpgsql set search_path = pg_catalog, pgque, pg_temp set client_min_messages = warning as $$
declare
  v_foreign  text := (select string_agg(f.what, ', ') from pgque._foreign_data() f (what));
begin
  if not pg_catalog.pg_has_role((select n.nspowner from pg_catalog.pg_namespace n where n.nspname = 'pgque'), 'usage') then
    perform pgque._fail('insufficient_privilege', 'only the owner of schema pgque may uninstall it',
      'Log in as the role that installed it.');
  elsif v_foreign is not null then
    perform pgque._fail('dependent_objects_still_exist', 'tables outside schema pgque use its types or tables, and would lose data',
      'Drop these columns and tables, or give the columns other types (alter table ... alter column ... type ...). Nothing was changed.',
      v_foreign);
  end if;
  perform pgque.stop();
  perform pgque._insist(
    case when exists (select from pg_catalog.pg_extension e where e.extname = 'pgque') then 'drop extension pgque cascade; ' else '' end
    || 'drop schema if exists pgque cascade');
end
$$;
comment on function pgque.uninstall() is
  'Removes schema pgque with all queues and messages, and the pg_cron jobs; the roles stay. Errors: 42501 the caller does not own the schema; 2BP01 '
  'tables outside the schema have columns of its types, which would be dropped too.';
