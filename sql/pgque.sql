-- pgque: a message queue and shared event log inside PostgreSQL.
--
-- Producers append events to a table.  A ticker records several times a second which
-- transactions have committed: a tick is a stored MVCC snapshot.  The rows that became
-- visible between two ticks are a window.  A window never changes: it can be read twice,
-- by many consumers, in slices, after a crash.  Every consumer has a position, the tick
-- up to which it is done, and moves it by appending one row to a journal.  Nothing on
-- that path is updated or deleted.
-- Each queue writes into one of three tables in turn.  A table whose rows every position
-- has passed is emptied with TRUNCATE.  So there is nothing to vacuum, and an old open
-- transaction costs nothing.
-- A message that is redelivered waits in the retry queue, and is delivered from there,
-- without a tick.
--
-- The folders of this source:
--   core       what is stored, and what every delivery needs: queues, rights, send, ticks,
--              windows, positions, leases
--   delivery   deliver a batch, in one statement (ordinary) or the general way (receive);
--              outcomes, retries, dead letters
--   options    keys, key_concurrency, cancel, expiry, times, limits, archive, recurring
--              messages, idempotency: one file for each
--   pgq        PgQ's way to receive, subconsumers, triggers, PgQ's names
--   spark      INSERT and COPY send; windows are read without side effects
--   operate    restore, maintenance, the loop, information, health, histories
--   earlier    what running calls of an earlier version need
--   grants     which role may call what
--
-- Rules that hold throughout, and that a change must keep:
--   * Take locks in this order: queue row, a batch's lock, consumer row, worker row,
--     leaf.  The lock of a pool's batch is an advisory lock on its id, under a shared
--     one for the queue.  The lock of any other batch is the consumer row itself.  Code
--     that holds a consumer row only tries batch locks, and code with another order uses
--     NOWAIT or SKIP LOCKED.
--   * A transaction's id is known before its event is stored, so every tick either saw
--     the transaction finished or lists it as running.
--   * A leaf is emptied only under its own lock, after checking its rows.
--
-- Install:  psql -qv ON_ERROR_STOP=1 -1f pgque.sql      (again to upgrade; prints nothing)
-- ---------------------------------------------------------------------------
-- base: schema, roles, clock, errors
-- ---------------------------------------------------------------------------

-- The next statement sees this only if both are in one transaction.
do $$
begin
  perform pg_catalog.set_config('pgque.one_transaction', 'on', true);
end
$$;

do $$
declare
  v_foreign  text;
  v_hint     text;
  v_before   int[];   -- the installed version
  v_this     int[];
  v_local    bool;
  v_role     text;
  v_version  text := '1.0.0-rc1';   -- what pgque.version() below returns
begin
  perform pg_catalog.set_config('client_min_messages', 'warning', true);
  -- Objects of other roles in schema public must not run here, also if the file runs
  -- statement by statement.  The last part restores the path.  CREATE EXTENSION sets a
  -- path of its own.
  v_local := exists (select from pg_catalog.pg_extension e where e.extname operator(pg_catalog.=) 'pgque');
  perform pg_catalog.set_config('pgque.path_before', pg_catalog.current_setting('search_path'), v_local);
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', v_local);
  -- Until the last part, functions of an earlier version with other arguments
  -- make calls ambiguous.
  perform pg_catalog.set_config('pgque.bodies_before', pg_catalog.current_setting('check_function_bodies'), v_local);
  perform pg_catalog.set_config('check_function_bodies', 'off', v_local);
  if to_regnamespace('pgque') is null then
    create schema pgque;
  end if;
  -- Rights on the schema that come from default privileges end before there is an object
  -- that they reach.  In an upgrade the roles of pgque keep USAGE.
  for v_role in
    select distinct case a.grantee when 0 then 'public' else a.grantee::regrole::text end
    from pg_namespace n
    join pg_default_acl d on d.defaclrole = n.nspowner and d.defaclobjtype = 'n'
    cross join lateral aclexplode(n.nspacl) a
    cross join lateral aclexplode(d.defaclacl) g
    where n.nspname = 'pgque' and n.nspowner::regrole = quote_ident(current_user)::regrole
      and a.grantee <> n.nspowner and g.grantee = a.grantee and g.privilege_type = a.privilege_type
  loop
    execute format('revoke %s on schema pgque from %s cascade', case when to_regclass('pgque.queue') is null then 'all' else 'create' end, v_role);
  end loop;
  -- Objects that another role put into the schema, or may put there, would run with our
  -- rights.
  select f.what, f.hint into v_foreign, v_hint
  from (
    select 'it belongs to ' || n.nspowner::regrole::text as what, n.nspowner as owner,
      format('Install as its owner, for example after: set role %s;', n.nspowner::regrole) as hint
    from pg_namespace n where n.nspname = 'pgque'
    union all
    select 'there is ' || p.oid::regprocedure::text || ' of ' || p.proowner::regrole::text, p.proowner, null
    from pg_proc p where p.pronamespace = 'pgque'::regnamespace
    union all
    select 'there is ' || c.oid::regclass::text || ' of ' || c.relowner::regrole::text, c.relowner, null
    from pg_class c where c.relnamespace = 'pgque'::regnamespace
    union all
    select 'there is the type ' || t.oid::regtype::text || ' of ' || t.typowner::regrole::text, t.typowner, null
    from pg_type t where t.typnamespace = 'pgque'::regnamespace
    union all
    select 'there is the operator ' || o.oid::regoperator::text || ' of ' || o.oprowner::regrole::text, o.oprowner, null
    from pg_operator o where o.oprnamespace = 'pgque'::regnamespace
    union all
    select coalesce(nullif(a.grantee, 0)::regrole::text, 'everybody') || ' may create objects in it', 0, null
    from pg_namespace n, aclexplode(n.nspacl) a
    where n.nspname = 'pgque' and a.privilege_type = 'CREATE' and a.grantee <> n.nspowner
  ) f
  where f.owner <> (select r.oid from pg_roles r where r.rolname = current_user)
  order by f.what
  limit 1;
  if v_foreign is not null then
    raise exception using
      errcode = 'insufficient_privilege',
      message = format('schema pgque has objects or rights of other roles: %s', v_foreign),
      hint = coalesce(v_hint, 'Remove these objects and rights, then install again. Or drop the schema.');
  end if;
  -- The last part drops what this file does not replace.
  perform pg_catalog.set_config('pgque.functions_before', coalesce((
    select string_agg(p.oid || p.ctid::text, ' ') from pg_proc p where p.pronamespace = 'pgque'::regnamespace), ''), v_local);
  perform pg_catalog.set_config('pgque.version_before', '', v_local);
  if to_regprocedure('pgque.version()') is not null then
    perform pg_catalog.set_config('pgque.version_before', pgque.version(), v_local);
    -- A release candidate is older than its release, which has no number there.
    v_before := string_to_array(substring(pgque.version() from '^[0-9.]+'), '.')::int[] || coalesce(substring(pgque.version() from '-rc([0-9]+)$')::int, 1000);
    v_this := string_to_array(substring(v_version from '^[0-9.]+'), '.')::int[] || coalesce(substring(v_version from '-rc([0-9]+)$')::int, 1000);
    if v_before < '{0,7,0}' then
      raise exception using
        errcode = 'feature_not_supported',
        message = format('cannot upgrade from pgque %s to %s', pgque.version(), v_version),
        detail = 'Upgrades start from 0.7.0. Nothing was changed.',
        hint = 'Install 0.8.0 first, which upgrades from 0.4.3 or later: pgque install --version 0.8.0; or with psql, the file that '
          'pgque install --version 0.8.0 --dump-sql prints. Then install this version again.';
    end if;
    if v_before > v_this then
      raise exception using
        errcode = 'feature_not_supported',
        message = format('this database has pgque %s, which is newer than %s of this file', pgque.version(), v_version),
        detail = 'Nothing was changed.',
        hint = format('Install sql/pgque.sql of version %s or later.', pgque.version());
    end if;
    -- Locks that the upgrade takes have to stay: calls between two of its statements would
    -- take finished batches for open ones.
    if pgque.version() <> v_version and coalesce(current_setting('pgque.one_transaction', true), '') <> 'on' then
      raise exception using
        errcode = 'no_active_sql_transaction',
        message = format('the upgrade from pgque %s to %s needs one transaction', pgque.version(), v_version),
        detail = 'Calls that run meanwhile would deliver acknowledged messages again. Nothing was changed.',
        hint = 'psql -qv ON_ERROR_STOP=1 -1f pgque.sql, with the option -1; or execute the file between begin and commit.';
    end if;
  end if;
  foreach v_role in array array['pgque_reader', 'pgque_writer', 'pgque_admin', 'pgque_user'] loop
    if to_regrole(v_role) is null then
      begin
        execute format('create role %I', v_role) || case v_role when 'pgque_admin' then ' in role pgque_reader, pgque_writer' else '' end;
      exception
        when unique_violation then
          null;   -- another database of the server installs at this moment
        when insufficient_privilege then
          raise exception using
            errcode = 'insufficient_privilege',
            message = format('role %I may not create the role %I', current_user, v_role),
            detail = sqlerrm,
            hint = format('As a superuser: alter role %1$I createrole; or create the roles: create role pgque_reader; create role pgque_writer; '
              'create role pgque_admin in role pgque_reader, pgque_writer; create role pgque_user; '
              'grant pgque_reader, pgque_writer, pgque_admin, pgque_user to %1$I with admin option.', current_user);
      end;
    end if;
  end loop;
  -- The role that calls a function.  Inside a function that runs with its owner's
  -- rights, current_user is the owner.  But the default of an argument is evaluated
  -- outside, and so is the check of a value that a caller passes.  A stored value is
  -- not checked again: only the owner may create a column, a function or a type of the
  -- domain.
  if to_regtype('pgque.caller') is null then
    create domain pgque.caller as name not null constraint caller_is_current_user check (value = current_user);
  end if;
  revoke usage on type pgque.caller from public;
exception
  when others then
    -- Without a transaction, psql goes on with the next statement, unless ON_ERROR_STOP is
    -- set.  Then nothing but the end of the session stops it.
    if coalesce(current_setting('pgque.one_transaction', true), '') <> 'on' then
      get stacked diagnostics v_hint = pg_exception_hint;
      raise warning using message = 'pgque: nothing was changed: ' || sqlerrm, hint = v_hint;
      perform set_config('role', 'none', true);   -- after SET ROLE, only the session's own role may do that
      perform pg_terminate_backend(pg_backend_pid());
    end if;
    raise;
end
$$;
comment on domain pgque.caller is
  'The role that calls a function. It is the default of each last argument of this type and the only value that the argument accepts: leave the '
  'argument out. Only the owner of pgque can create columns, functions or types of this domain, and should not.';

create or replace function pgque.version() returns text
language sql immutable as $$ select '1.0.0-rc1'::text $$;
comment on function pgque.version() is 'Returns the version of pgque in this database.';

-- Drops a function of an earlier version.  If a view uses it, it only gets another name.
create or replace function pgque._drop_function(p_func oid) returns void
language plpgsql as $$
declare
  v_sig   text := p_func::regprocedure;
  v_func  record;
begin
  select p.proname as name, case p.prokind when 'p' then 'procedure' else 'function' end as kind into v_func
  from pg_catalog.pg_proc p
  where p.oid = p_func;
  execute pg_catalog.format('drop %s %s', v_func.kind, v_sig);
exception
  when dependent_objects_still_exist then
    raise warning 'pgque: other objects use % of an earlier version; create them again', v_sig;
    if pg_catalog.left(v_func.name, 1) <> '_' then
      execute pg_catalog.format('alter %s %s rename to %I', v_func.kind, v_sig, '_earlier_' || v_func.name);
    end if;
end
$$;

-- The only clock of the engine.  A test moves time by replacing it.
create or replace function pgque.clock() returns timestamptz
language sql volatile as $$ select pg_catalog.clock_timestamp() $$;
comment on function pgque.clock() is 'Returns the current time as pgque sees it. Tests replace this function to move time.';

-- Raises an error.  Every error has a code of its own kind, a message that names the
-- object, and a hint with the next command.
create or replace function pgque._fail(p_code text, p_message text, p_hint text, p_detail text default null) returns void
language plpgsql as $$
begin
  if p_detail is null then
    raise exception using errcode = p_code, message = p_message, hint = p_hint;
  end if;
  raise exception using errcode = p_code, message = p_message, hint = p_hint, detail = p_detail;
end
$$;

-- Raises 25006 for a call that works on a primary only.  The result is for calls that
-- would take a transaction id.
create or replace function pgque._no_standby(p_what text) returns xid8
language plpgsql as $$
begin
  perform pgque._fail('read_only_sql_transaction', pg_catalog.format('%s: this server is a standby', p_what),
    'Connect to the primary, for example with host=a,b target_session_attrs=read-write.');
  return null;
end
$$;

-- Returns the id of a sender's transaction.  The planner inlines this function.
create or replace function pgque._sender_xid() returns xid8
language sql as $$
  select case when pg_catalog.pg_is_in_recovery() then pgque._no_standby('cannot send') else pg_catalog.pg_current_xact_id() end
$$;

-- The mark of the writing transaction, for generated columns: a hash of its id and of
-- the time it began.  The id alone is not enough: the transaction that loads a dump
-- into another cluster may have the id of the one that wrote the row.  Marks are 2^62
-- and more; 1 and 2 are for rows that came out of a dump (see queue_xid).
-- The function is declared immutable so that a generated column may use it.  It is
-- volatile on purpose: loading a dump computes the column again, in another
-- transaction.
create or replace function pgque._xid() returns xid8
language plpgsql immutable as $$
begin
  return (4611686018427387904 | (4611686018427387903 & pg_catalog.hashtextextended(
    pg_catalog.concat(pg_catalog.pg_current_xact_id(), ' ', extract(epoch from pg_catalog.transaction_timestamp())), 0)))::text::xid8;
end
$$;

-- Returns the mark in a statement that is planned once and run in many transactions.
create or replace function pgque._mark() returns xid8
language plpgsql as $$
declare
  v_mark  xid8;
begin
  execute 'select pgque._xid()' into v_mark;
  return v_mark;
end
$$;

-- Returns whether a role has a name, for a generated column, and so declared immutable
-- as _xid() is: loading a dump computes the column again.  A row of 0.7.0 has no name.
create or replace function pgque._is_role(p_role oid, p_name name) returns boolean
language plpgsql immutable as $$
begin
  return exists (select from pg_catalog.pg_roles r where r.oid = p_role and (p_name is null or r.rolname = p_name));
end
$$;

-- Returns the name of this session, which no other session has or had.  Exception: an
-- owner that is no superuser cannot see when other sessions began.  Then the start of
-- the server has to do, and a process id may recur.
create or replace function pgque._session() returns text
language sql stable as $$
  select pg_catalog.pg_backend_pid() || ' ' || extract(epoch from coalesce(a.backend_start, pg_catalog.pg_postmaster_start_time()))::text
  from pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
$$;

-- Refuses work that takes a snapshot of its own under a lock, when the
-- transaction's snapshot is older than that lock.
create or replace function pgque._need_read_committed(p_what text) returns void
language plpgsql as $$
begin
  if pgque._old_snapshot() then
    perform pgque._fail('invalid_transaction_state', pg_catalog.format('%s needs a READ COMMITTED transaction', p_what),
      pg_catalog.format('Call it in a READ COMMITTED transaction of its own. The snapshot of a REPEATABLE READ or SERIALIZABLE transaction may be older than what '
        'the call has to see. If that level is the default of this role: alter role %I set default_transaction_isolation = ''read committed''', session_user));
  end if;
end
$$;

-- Returns whether the transaction's snapshot may be older than the locks it takes.
create or replace function pgque._old_snapshot() returns boolean
language sql stable as $$
  select pg_catalog.current_setting('transaction_isolation') not in ('read committed', 'read uncommitted')
$$;

-- Returns the leaves of a journal that a row is written to; p_leaf is the current one.
-- Rows that an old snapshot does not see may be in either leaf.  So such a transaction
-- writes to both, and the primary key of one leaf stops it:
--   session 1: READ COMMITTED; reads "leaf 0"
--   session 2: compaction switches to leaf 1, commits
--   session 1: appends position 6 to leaf 0, commits
--   session 3: REPEATABLE READ, snapshot between these commits; appends position 6 to both
--   result:    leaf 0 refuses: 40001
create or replace function pgque._leaves_for(p_leaf int) returns int[]
language sql stable as $$ select case when pgque._old_snapshot() then array[0, 1] else array[p_leaf] end $$;

-- Ends a block that only read, or whose writes are to be undone, and that catches
-- PQ099.  The locks of the block are released; variables and returned rows stay.
-- Without this, a transaction that reads all queues would need more locks than a server
-- has.  (Not PQ000: a handler for a code that ends in 000 catches the whole class.)
create or replace function pgque._undo_block() returns void
language plpgsql as $$
begin
  raise exception sqlstate 'PQ099';
end
$$;

-- Executes a statement that takes locks in another order than other code.  It waits a
-- moment for a lock, then releases all locks and starts again, and waits longer each
-- time: in the end the server detects a deadlock.  The caller's lock_timeout limits the
-- whole.  It also starts again if another session has changed the catalog row that the
-- statement changes: a GRANT and a TRUNCATE of one table do not wait for each other, and
-- the second one fails.
create or replace function pgque._execute_insistently(p_statement text) returns void
language plpgsql as $$
declare
  v_wait      text := pg_catalog.current_setting('lock_timeout');
  v_limit     interval := nullif(v_wait::interval, '0');
  v_deadline  timestamptz := pg_catalog.clock_timestamp() + v_limit;
  v_patience  interval := least('50 milliseconds', v_limit);
  v_gone      int := 0;
begin
  loop
    begin
      perform pg_catalog.set_config('lock_timeout', pg_catalog.ceil(extract(epoch from v_patience) * 1000) || 'ms', true);
      execute p_statement;
      perform pg_catalog.set_config('lock_timeout', v_wait, true);
      return;
    exception
      when lock_not_available then
        if pg_catalog.clock_timestamp() > v_deadline then
          raise;
        end if;
      when undefined_table then
        -- Another session dropped a table since it was found.
        v_gone := v_gone + 1;
        if v_gone > 6 then
          raise;
        end if;
      when internal_error then
        v_gone := v_gone + 1;
        if v_gone > 6 or sqlerrm <> 'tuple concurrently updated' then
          raise;
        end if;
    end;
    perform pg_catalog.pg_sleep(0.01 + 0.03 * pg_catalog.random());
    v_patience := least(2 * v_patience, '1 minute');
  end loop;
end
$$;

-- Returns how many locks a transaction that serves all queues may have.  The other
-- locks of the server are for other sessions.
create or replace function pgque._lock_room() returns bigint
language sql stable as $$
  select pg_catalog.current_setting('max_locks_per_transaction')::bigint * 3 / 4
    * (pg_catalog.current_setting('max_connections')::bigint + pg_catalog.current_setting('max_prepared_transactions')::bigint)
$$;

-- Returns the interval of a setting, which must lead forward from every time: -1 month
-- 31 days is above 0 and may lead back.
create or replace function pgque._period(p_period text) returns interval
language plpgsql immutable as $$
declare
  v_period  interval := p_period::interval;
begin
  if least(extract(year from v_period), extract(month from v_period), extract(day from v_period),
    extract(hour from v_period), extract(minute from v_period), extract(second from v_period)) < 0
  then
    raise data_exception using message = pg_catalog.format('interval %L has a negative part', p_period);
  end if;
  return v_period;
end
$$;

-- Returns whether a retry_backoff setting is valid: base and cap in seconds, a factor,
-- and jitter, the share that is random.
create or replace function pgque._backoff_valid(p_backoff jsonb) returns boolean
language sql immutable as $$
  select case
    when p_backoff is null then true
    when jsonb_typeof(p_backoff) <> 'object' then false
    when exists (
      select from jsonb_each(p_backoff) b
      where b.key not in ('base', 'factor', 'cap', 'jitter') or jsonb_typeof(b.value) <> 'number'
        -- The delay is computed in double precision.
        or (b.value <> '0' and abs((b.value #>> '{}')::numeric) < 0.000001)) then false
    else coalesce((p_backoff->>'base')::numeric, 1) between 0 and 31536000
      and coalesce((p_backoff->>'factor')::numeric, 2) between 1 and 1000
      and coalesce((p_backoff->>'cap')::numeric, 3600) between 0 and 31536000
      and coalesce((p_backoff->>'jitter')::numeric, 0) between 0 and 1
  end
$$;
-- ---------------------------------------------------------------------------
-- tables
-- ---------------------------------------------------------------------------

-- An upgrade changes tables that calls lock in different orders.  So it locks all of
-- them before it changes one.  If one lock is not free within the time of a call, it
-- releases all and tries again.
do $$
declare
  v_before   text := current_setting('pgque.version_before');
  v_timeout  text := current_setting('lock_timeout');
  v_tables   text;
  v_holders  text;
begin
  if v_before in ('', pgque.version()) then
    return;
  end if;
  select string_agg(c.oid::regclass::text, ', ' order by c.relkind = 'v' desc, c.relname = 'queue' desc, c.relname) into v_tables
  from pg_class c
  where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'v')
    and not exists (select from pg_inherits i where i.inhrelid = c.oid and i.inhparent in ('pgque.event'::regclass, 'pgque.tick'::regclass, 'pgque.archive'::regclass));
  for v_try in 1..200 loop
    begin
      perform set_config('lock_timeout', '100ms', true);
      execute 'lock table ' || v_tables || ' in access exclusive mode';
      if to_regclass('pgque.archive') is not null and to_regclass('pgque.archive_0') is null then
        lock table only pgque.archive in share update exclusive mode;   -- it gets this leaf
      end if;
      perform set_config('lock_timeout', v_timeout, true);
      return;
    exception
      when lock_not_available then
        perform pg_sleep(0.05);
    end;
  end loop;
  select string_agg(distinct format('%s (%s)', l.pid, l.relation::regclass), ', ') into v_holders
  from pg_locks l
  join pg_class c on c.oid = l.relation
  where c.relnamespace = 'pgque'::regnamespace and l.granted and l.pid <> pg_backend_pid()
    and l.database = (select d.oid from pg_database d where d.datname = current_database());
  raise exception using
    errcode = 'lock_not_available',
    message = 'the upgrade cannot lock the tables of pgque within 30 seconds',
    detail = 'Locks are held by: ' || coalesce(v_holders, 'different sessions each time'),
    hint = 'End transactions that stay open (pg_stat_activity, pg_terminate_backend) and try again. Nothing was changed.';
end
$$;

-- Adds columns that earlier versions did not have.  A table that has all of them is not
-- locked.  p_columns is what follows ADD COLUMN, one a line.
create or replace function pgque._add_columns(p_table text, p_columns text) returns void
language plpgsql as $$
declare
  v_column  text;
begin
  foreach v_column in array pg_catalog.string_to_array(pg_catalog.btrim(p_columns, E' \n'), E';\n') loop
    v_column := pg_catalog.btrim(v_column, E' \n;');
    if not exists (
      select from pg_catalog.pg_attribute a
      where a.attrelid = p_table::regclass and a.attname = pg_catalog.split_part(v_column, ' ', 1) and not a.attisdropped)
    then
      execute pg_catalog.format('alter table %s add column %s', p_table, v_column);
    end if;
  end loop;
end
$$;

-- One row, created by pgque._init().
create table if not exists pgque.config (
  config_id       int not null default 1
    constraint config_pkey primary key
    constraint config_one_row check (config_id = 1),
  tick_period_ms  int not null default 100
    constraint config_tick_period check (tick_period_ms between 1 and 60000),
  stopped_at      timestamptz,
  defaults        jsonb not null default '{}'
    constraint config_defaults check (jsonb_typeof(defaults) = 'object'),
  expire_every    interval default '1 minute'
    constraint config_expire_every check (expire_every > '0'),
  delete_expired_every  interval
    constraint config_delete_expired_every check (delete_expired_every > '0'),
  tick_share      int not null default 15
    constraint config_tick_share check (tick_share between 1 and 100),
  keep_actions    interval default '30 days'
    constraint config_keep_actions check (keep_actions > '0'),
  keep_lags       interval default '7 days'
    constraint config_keep_lags check (keep_lags > '0')
);
comment on table pgque.config is 'Settings of the loop: one row, or none while all are default.';
comment on column pgque.config.config_id is 'Always 1.';
comment on column pgque.config.tick_period_ms is
  'Longest gap that the loop leaves between two ticks of a queue with messages. Set by set_tick_period_ms(). Unit: milliseconds.';
comment on column pgque.config.stopped_at is 'When stop() was called last. Loops that began before it end.';
comment on column pgque.config.expire_every is
  'How often maint() deletes expired messages from the retry queue; none: never. Set by set_schedule(''expire'', interval).';
comment on column pgque.config.delete_expired_every is
  'How often maint() deletes dead letters whose message expired; none: never. Set by set_schedule(''delete_expired'', interval).';

-- One row a queue.  queue_xid is the mark of the transaction that wrote the row, and
-- every statement that updates a row sets it.  In a row that was loaded from a dump it
-- is the mark of another transaction.  The generated columns show that, and
-- pgque._rebase() has to run before the queue takes events.  The mark 2 means that
-- confirm_restore() was called.
--   * queue_own: the settings that are the queue's own; the others follow
--     config.defaults
--   * queue_keyed, queue_expiring: whether a message ever had a key, a ttl.  They lag
--     behind the notes in queue_option: call _keyed(), _expiring()
--   * queue_health_...: when health() warns and when it fails; 0 is never
--   * queue_reader: unused; create_queue() of 0.8.0, which may run during an upgrade,
--     stores it
--   * queue_incarnation: since the last repair after a restore; see _incarnation()
create table if not exists pgque.queue (
  queue_id                 int generated by default as identity
    constraint queue_pkey primary key,
  queue_name               text not null
    constraint queue_name_key unique
    constraint queue_name_length check (octet_length(queue_name) between 1 and 57),
  queue_ntables            int not null default 3
    constraint queue_three_tables check (queue_ntables = 3),
  queue_cur_table          int not null default 0
    constraint queue_cur_table_range check (queue_cur_table between 0 and 2),
  queue_rotation_period    interval not null default '2 hours'
    constraint queue_rotation_period_range check (queue_rotation_period > '0' and queue_rotation_period <= '1 year'),
  queue_switch_time        timestamptz not null default pg_catalog.now(),
  queue_external_ticker    boolean not null default false,
  queue_ticker_paused      boolean not null default false,
  queue_ticker_max_count   int not null default 500
    constraint queue_ticker_max_count_positive check (queue_ticker_max_count > 0),
  queue_ticker_max_lag     interval not null default '0'
    constraint queue_ticker_max_lag_range check (queue_ticker_max_lag >= '0' and queue_ticker_max_lag <= '1 year'),
  queue_ticker_idle_period interval not null default '1 minute'
    constraint queue_ticker_idle_period_range check (queue_ticker_idle_period > '0' and queue_ticker_idle_period <= '1 year'),
  queue_max_retries        int not null default 5
    constraint queue_max_retries_range check (queue_max_retries >= 0),
  queue_retention_period   interval not null default '7 days'
    constraint queue_retention_period_range check (queue_retention_period > '0' and queue_retention_period <= '100 years'),
  queue_paused             boolean not null default false,
  queue_event_seq          regclass not null,
  queue_tick_seq           regclass not null,
  queue_uid                uuid not null default pg_catalog.gen_random_uuid(),
  queue_created_at         timestamptz not null default pg_catalog.now(),
  queue_xid                xid8 not null,
  queue_restored           boolean generated always as (queue_xid <> pgque._xid()) stored,
  queue_open               boolean generated always as (not queue_paused and queue_xid = pgque._xid()) stored,
  queue_own                jsonb not null default '{}'
    constraint queue_own_object check (jsonb_typeof(queue_own) = 'object'),
  queue_visibility_timeout interval not null default '30 seconds'
    constraint queue_visibility_timeout_range check (queue_visibility_timeout > '0' and queue_visibility_timeout <= '1 year'),
  queue_max_receive_attempts int not null default 5
    constraint queue_max_receive_attempts_range check (queue_max_receive_attempts >= 1),
  queue_drop_policy        text not null default 'dead_letter'
    constraint queue_drop_policy_known check (queue_drop_policy in ('drop', 'dead_letter', 'hold')),
  queue_dead_letter_queue  int
    constraint queue_dead_letter_queue_other check (queue_dead_letter_queue <> queue_id),
  queue_retry_backoff      jsonb
    constraint queue_retry_backoff_valid check (pgque._backoff_valid(queue_retry_backoff)),
  queue_message_ttl        interval not null default '0'
    constraint queue_message_ttl_range check (queue_message_ttl >= '0' and queue_message_ttl <= '100 years'),
  queue_max_depth          bigint not null default 0
    constraint queue_max_depth_range check (queue_max_depth >= 0),
  queue_throughput_limit   int not null default 0
    constraint queue_throughput_limit_range check (queue_throughput_limit >= 0),
  queue_archive_on_ack     boolean not null default false,
  queue_keyed              boolean not null default false,
  queue_expiring           boolean not null default false,
  queue_max_consumers      int not null default 1000
    constraint queue_max_consumers_range check (queue_max_consumers >= 0),
  queue_health_pending_warn interval not null default '5 minutes'
    constraint queue_health_pending_warn_range check (queue_health_pending_warn >= '0' and queue_health_pending_warn <= '100 years'),
  queue_health_pending_fail interval not null default '1 hour'
    constraint queue_health_pending_fail_range check (queue_health_pending_fail >= '0' and queue_health_pending_fail <= '100 years'),
  queue_health_tick_warn   interval not null default '5 seconds'
    constraint queue_health_tick_warn_range check (queue_health_tick_warn >= '0' and queue_health_tick_warn <= '100 years'),
  queue_health_tick_fail   interval not null default '1 minute'
    constraint queue_health_tick_fail_range check (queue_health_tick_fail >= '0' and queue_health_tick_fail <= '100 years'),
  queue_health_depth_warn  int not null default 80
    constraint queue_health_depth_warn_range check (queue_health_depth_warn between 0 and 100),
  queue_tick_gap           interval not null default '20 milliseconds'
    constraint queue_tick_gap_range check (queue_tick_gap >= '1 millisecond' and queue_tick_gap <= '1 minute'),
  queue_tick_storage       bigint not null default 67108864
    constraint queue_tick_storage_range check (queue_tick_storage >= 1048576),
  queue_reader             text,
  queue_incarnation        uuid,
  queue_floor              bigint not null default 0,
  queue_max_window         int not null default 0
    constraint queue_max_window_range check (queue_max_window >= 0)
) with (fillfactor = 50);
comment on table pgque.queue is 'The queues with their settings; see alter_queue().';
comment on column pgque.queue.queue_id is 'Number of the queue, as in the names of its tables.';
comment on column pgque.queue.queue_name is 'Name of the queue, 1 to 57 bytes.';
comment on column pgque.queue.queue_ntables is 'Number of tables that the queue''s messages rotate through: 3.';
comment on column pgque.queue.queue_cur_table is 'Number of the table that new messages are stored in: 0 to 2.';
comment on column pgque.queue.queue_rotation_period is
  'Shortest time between two rotations. The queue keeps between two and three periods of messages, and all that the slowest consumer has not '
  'finished.';
comment on column pgque.queue.queue_switch_time is 'Time of the last rotation.';
comment on column pgque.queue.queue_external_ticker is
  'Whether another system chooses the ticks, with ticker(queue_name, tick_id, tick_time, event_seq); the loop does not tick the queue then.';
comment on column pgque.queue.queue_ticker_paused is 'Whether the ticker skips the queue: no message becomes visible to consumers while it is true.';
comment on column pgque.queue.queue_ticker_max_count is 'How many new messages cause a tick before ticker_max_lag has passed. Unit: messages.';
comment on column pgque.queue.queue_ticker_max_lag is
  'How long new messages may wait for a tick while they are fewer than ticker_max_count; 0: they do not wait.';
comment on column pgque.queue.queue_ticker_idle_period is 'Time between two ticks while nothing is sent.';
comment on column pgque.queue.queue_max_retries is
  'How often a rejected message is redelivered before it is given up: n retries are n + 1 deliveries. Unit: retries.';
comment on column pgque.queue.queue_retention_period is
  'How far a consumer may lag. A consumer that lags for longer is moved forward, and the messages that it missed are given up (see drop_policy). '
  'Retries that were due for longer are given up as well. For a delayed message the time counts from when it could be delivered. 0 restores the '
  'default.';
comment on column pgque.queue.queue_paused is 'Whether senders are refused; see pause().';
comment on column pgque.queue.queue_event_seq is 'Sequence that the queue''s message ids are drawn from.';
comment on column pgque.queue.queue_tick_seq is
  'Sequence that the queue''s tick ids are drawn from. A value above the newest tick requests a tick; see force_next_tick().';
comment on column pgque.queue.queue_uid is 'Identity of the queue, unique in all databases; a queue that is created again has another one.';
comment on column pgque.queue.queue_created_at is 'When the queue was created.';
comment on column pgque.queue.queue_xid is 'Mark of the transaction that last wrote this row.';
comment on column pgque.queue.queue_restored is 'Whether the queue was loaded from a dump and not used since. Its first use after the end of the restore repairs it.';
comment on column pgque.queue.queue_open is 'Whether the queue takes messages.';
comment on column pgque.queue.queue_visibility_timeout is
  'How long a worker''s lease on a batch lasts, unless receive() is called with another time.';
comment on column pgque.queue.queue_max_receive_attempts is
  'How often a message is delivered to workers before it is given up; expired leases count too. Unit: deliveries.';
comment on column pgque.queue.queue_drop_policy is
  'Outcome of a message that is given up. dead_letter: it becomes a dead letter, which the ticker forwards to dead_letter_queue. hold: it becomes a dead letter '
  'that dlq_purge() and delete_expired() do not delete. drop: it is deleted, and metrics() counts it.';
comment on column pgque.queue.queue_dead_letter_queue is
  'Name of the queue that the ticker forwards dead letters to, under drop_policy dead_letter; none: they stay. While that queue is full or paused, '
  'they wait as dead letters; those given up before this setting changed stay. A name that ends in .dlq creates that queue. Set it for each queue.';
comment on column pgque.queue.queue_retry_backoff is
  'When a rejected message is redelivered, if nack() is called without a time: the n-th retry follows after base * factor ^ (n - 1) seconds, at most '
  'cap seconds. A random share of that time, up to jitter, is subtracted. The value is a JSON object; its defaults are {"base": 1, "factor": 2, '
  '"cap": 3600, "jitter": 0}. base and cap are 0 to 31536000, factor is 1 to 1000, jitter is 0 to 1. Without a value, every retry follows after a '
  'minute.';
comment on column pgque.queue.queue_message_ttl is
  'How long after it was sent a message may be delivered, unless it is sent with a ttl of its own; 0: no limit.';
comment on column pgque.queue.queue_max_depth is
  'How many messages the slowest consumer may have ahead of it before send() fails with PQ003; 0: no limit. It has no effect without a consumer. '
  'Unit: messages.';
comment on column pgque.queue.queue_throughput_limit is
  'How many messages a second each consumer with workers gets at most; 0: no limit. Unit: messages a second.';
comment on column pgque.queue.queue_archive_on_ack is 'Whether acknowledged messages are kept in the archive; see archive_list().';

-- Events and ticks are partitioned by slot = queue_id * 3 + table number, so
-- that one static INSERT reaches every queue.  Each leaf has its own index, by
-- ev_txid or tick_id, and the parents have none: a dump of the extension's
-- data would make it twice.
--   ev_owner   null: every consumer gets the row; above 0: this subscriber, to which the
--              row is a retry (a reader by offsets); 0, -1, -2: see keys and cancel
create table if not exists pgque.event (
  slot        int not null,
  ev_owner    int,
  ev_id       bigint not null,
  ev_time     timestamptz not null,
  ev_txid     xid8 not null,
  ev_retry    int,
  ev_type     text,
  ev_data     text,
  ev_extra1   text,
  ev_extra2   text,
  ev_extra3   text,
  ev_extra4   text,
  ev_headers  jsonb,
  ev_key      text,
  ev_bytes    bytea,
  ev_expires  timestamptz,
  ev_error    text
) partition by list (slot);
comment on table pgque.event is 'The events of all queues: append only, a partition for each of a queue''s three tables. Internal: read it through receive() or peek().';

create table if not exists pgque.tick (
  slot            int not null,
  tick_queue      int not null,
  tick_id         bigint not null,
  tick_time       timestamptz not null,
  tick_snapshot   pg_snapshot not null,
  tick_event_seq  bigint not null
) partition by list (slot);
comment on table pgque.tick is 'The ticks of all queues: the snapshots at which windows begin and end.';
comment on column pgque.tick.slot is 'Partition: queue_id * 3 + table number.';
comment on column pgque.tick.tick_queue is 'The queue: queue.queue_id.';
comment on column pgque.tick.tick_id is 'Number of the tick in its queue.';
comment on column pgque.tick.tick_time is 'When the tick was stored.';
comment on column pgque.tick.tick_snapshot is 'The snapshot: which transactions had finished at the tick.';
comment on column pgque.tick.tick_event_seq is 'Value of the queue''s event sequence at the tick.';

-- Rights of roles to one queue; see "rights".  A dump writes right_role as a name, but as
-- a number if the role was dropped, and another server may have given this number to
-- another role.  So a right counts only if right_role had the name right_role_name when
-- the row was written or loaded.
create table if not exists pgque.queue_right (
  right_queue  int not null,
  right_role   regrole not null,
  right_name   text not null
    constraint queue_right_known check (right_name in ('produce', 'consume', 'admin')),
  right_role_name  name,
  right_valid  boolean generated always as (pgque._is_role(right_role, right_role_name)) stored,
  constraint queue_right_pkey primary key (right_queue, right_role, right_name)
);
comment on table pgque.queue_right is 'Rights of roles to single queues; see grant_queue().';
comment on column pgque.queue_right.right_queue is 'The queue: queue.queue_id.';
comment on column pgque.queue_right.right_role is 'The role that has the right.';
comment on column pgque.queue_right.right_name is 'The right: produce, consume or admin.';
do $$
begin
  perform pgque._add_columns('pgque.queue_right', $c$
    right_role_name name;
    right_valid boolean generated always as (pgque._is_role(right_role, right_role_name)) stored$c$);
end
$$;
comment on column pgque.queue_right.right_role_name is 'Name of the role when maintenance saw it last.';
comment on column pgque.queue_right.right_valid is
  'Whether the role had this name when the row was written, or loaded from a dump. If not, the right counts for nothing, and maintenance deletes it.';

-- Dropped queues whose leaves are dropped when that blocks no other session.
create table if not exists pgque.dropped_queue (
  queue_id  int not null constraint dropped_queue_pkey primary key
);
comment on table pgque.dropped_queue is 'Dropped queues whose tables are not dropped yet. Internal.';

-- A name belongs to one queue, so that a transaction that subscribes a new name
-- blocks the name on no other queue.  A name of a database that is older than that has
-- co_queue 0, and is one of all queues.
create table if not exists pgque.consumer (
  co_id     int generated by default as identity
    constraint consumer_pkey primary key,
  co_name   text not null
    constraint consumer_name_length check (octet_length(co_name) between 1 and 1000),
  co_queue  int not null default 0,
  constraint consumer_name_key unique (co_queue, co_name)
);
comment on table pgque.consumer is 'Names of consumers.';
comment on column pgque.consumer.co_id is 'Number of the consumer.';
comment on column pgque.consumer.co_name is 'Name of the consumer.';

-- Consumers of a queue, and the workers of a consumer.  A call locks the row of its
-- consumer or worker, so that calls follow each other; deliveries hardly ever update it.
-- sub_keyed, sub_key_concurrency: whether the messages of one key that are leased at a time
-- are limited, and to how many.
-- sub_offsets: the consumer is read by offsets (open_stream), so its redeliveries must be
-- in the log.
-- sub_archived: what it passed since it was subscribed is in the archive, in the retry
-- queue or a dead letter.  sub_history: the subscriber whose archive it reads first.
-- The low 20 bits of sub_id are in every batch id (see pgque._new_batch_id).  The
-- sequence begins again after 2^31 numbers (see pgque._add_subscriber).
create table if not exists pgque.subscriber (
  sub_id        int generated by default as identity (cycle)
    constraint subscriber_pkey primary key,
  sub_queue     int not null,
  sub_consumer  int not null,
  sub_role      text not null default 'normal'
    constraint subscriber_role_known check (sub_role in ('normal', 'coop_main', 'coop_member', 'pool')),
  sub_main      int,
  sub_worker    text
    constraint subscriber_worker_length check (octet_length(sub_worker) between 1 and 1000),
  sub_keyed     boolean not null default false,
  sub_offsets   boolean not null default false,
  sub_archived  boolean not null default false,
  sub_history   int,
  sub_key_concurrency  int not null default 1
    constraint subscriber_key_concurrency_range check (sub_key_concurrency >= 1),
  constraint subscriber_member check ((sub_role = 'coop_member') = (sub_main is not null and sub_worker is not null))
);
comment on table pgque.subscriber is 'Identity of consumers and workers, locked to serialise their calls. Internal: see the view subscription.';

-- The journal of positions.  The row with the highest pos_seq of a subscriber is
-- true.  One that delivered a batch is also the record of that batch.
--   pos_tick                     finished up to here
--   pos_next_tick, pos_done_id   the window being read, and how far it is done
--   pos_snapshot ...             what the two ticks say
--   pos_high                     where it stood when it was moved back, or a tick after a
--                                message ahead of it that was cancelled
--   pos_batch, pos_last_id       the batch: ids above pos_done_id up to
--                                pos_last_id (null: to the end of the window)
--   pos_last_batch               the newest batch id that it was given
--   pos_worker, pos_until        whose the batch is and how long
--   pos_fresh                    above 0: these ids of the log were delivered, so the next
--                                delivery begins after them
--   pos_done_count               how many they are, with those that were left out and
--                                have their outcome; in a batch of next_batch() at most
--   pos_shelf                    how many came from the retry queue
--   pos_keys                     the order keys of its messages
--   pos_open, pos_prune          batches that may be open, and when to check them
--   pos_lapse                    no lease ends before this
--   pos_paid                     throughput: paid up to here
--   pos_due                      which part of the retry queue need not be read (see
--                                _due_from)
-- A subconsumer's rows say only when it was heard of.
create table if not exists pgque.journal (
  journal_id   int not null default 1
    constraint journal_pkey primary key
    constraint journal_one_row check (journal_id = 1),
  journal_cur  int not null default 0
    constraint journal_cur_range check (journal_cur in (0, 1)),
  journal_flipped_at  timestamptz not null default '-infinity',
  journal_epoch_cur   int not null default 0
    constraint journal_epoch_cur_range check (journal_epoch_cur in (0, 1)),
  journal_idem_cur    int not null default 0
    constraint journal_idem_cur_range check (journal_idem_cur in (0, 1)),
  journal_emptied_at  timestamptz not null default '-infinity'
);
comment on table pgque.journal is 'The current leaf of the positions. Internal.';
-- The current leaf, as a register that a call reads without a statement.  It is a hint:
-- _compact_journal() sets it, and whoever uses it compares it with the table.
create sequence if not exists pgque.journal_leaf as int minvalue 0 maxvalue 1;

create table if not exists pgque.position (
  pos_sub        int not null,
  pos_seq        bigint not null,
  pos_time       timestamptz not null,
  pos_tick       bigint,
  pos_snapshot   pg_snapshot,
  pos_event_seq  bigint,
  pos_next_tick  bigint,
  pos_next_snapshot   pg_snapshot,
  pos_next_event_seq  bigint,
  pos_done_id    bigint,
  pos_last_id    bigint,
  pos_batch      bigint,
  pos_last_batch bigint not null default 0,
  pos_done_count bigint not null default 0,
  pos_high       bigint,
  pos_skipped    bigint not null default 0,
  pos_worker     text,
  pos_until      timestamptz,
  pos_fresh      int,
  pos_shelf      int,
  pos_keys       text[],
  pos_open       bigint[],
  pos_prune      int,
  pos_lapse      timestamptz,
  pos_paid       timestamptz,
  leaf           int not null,
  pos_due        tstzrange
) partition by list (leaf);
comment on table pgque.position is 'Journal of positions; the newest row of a subscriber counts. Internal: see get_consumer_info().';

-- What became of batches and their messages.  The rows move from leaf to leaf together
-- with the positions.  set_what:
--   * outcome: the message set_ev_id has its outcome
--   * closed: the batch is finished
--   * moved: those of its messages from the log that had no outcome went to the retry
--     queue, under its id
--   * extended: its lease ends at set_until; set_ev_id counts the extensions
--   * lost: its worker got the answer that a message is lost
-- In the other rows set_ev_id is 0.  The key decides between two sessions that record the
-- same.
do $$
begin
  if to_regtype('pgque.settled_what') is null then
    create type pgque.settled_what as enum ('outcome', 'closed', 'moved', 'extended', 'lost');
    -- Up to 0.8, set_ev_id had these meanings by ranges of numbers (see earlier.sql).
    for v_leaf in 0..1 loop
      if to_regclass('pgque.settled_' || v_leaf) is not null then
        execute format('alter table pgque.settled_%s drop constraint settled_%1$s_pkey', v_leaf);
        execute format('alter table pgque.settled_%s rename to earlier_settled_%1$s', v_leaf);
      end if;
    end loop;
    alter table if exists pgque.settled rename to earlier_settled;
  end if;
end
$$;
create table if not exists pgque.settled (
  set_batch  bigint not null,
  set_ev_id  bigint not null default 0,
  set_until  timestamptz,
  leaf       int not null,
  set_what   pgque.settled_what not null,
  set_sub    int   -- rows of a dump of 0.8 have it (see earlier.sql)
) partition by list (leaf);
comment on table pgque.settled is 'Outcomes of batches and their messages. Internal.';

-- Places of the rows of a big window: a cache, see pgque._map_window.
create table if not exists pgque.window_map (
  map_queue      int not null,
  map_from       bigint not null,
  map_to         bigint not null,
  map_chunk      int not null,
  map_id_lo      bigint not null,
  map_id_hi      bigint not null,
  map_lo         tid[] not null,
  map_hi         tid[] not null,
  map_filenodes  oid[] not null,
  map_xid        xid8 not null,
  map_valid      boolean generated always as (map_xid = pgque._xid()) stored
);
comment on table pgque.window_map is 'Places of the rows of big windows: a cache. Internal.';

-- Messages that wait: for another attempt of a consumer, or with a delay and no
-- owner (0) yet.
--   ev_batch, ev_worker  its last batch, and its worker
--   ev_lane              its order key
create table if not exists pgque.retry_queue (
  ev_retry_after  timestamptz not null,
  ev_queue        int not null,
  ev_id           bigint not null,
  ev_time         timestamptz not null,
  ev_txid         xid8 not null,
  ev_owner        int not null,
  ev_retry        int,
  ev_type         text,
  ev_data         text,
  ev_extra1       text,
  ev_extra2       text,
  ev_extra3       text,
  ev_extra4       text,
  ev_headers      jsonb,
  ev_key          text,
  ev_bytes        bytea,
  ev_expires      timestamptz,
  ev_error        text,
  ev_receives     int not null default 0,
  ev_batch        bigint,
  ev_worker       text,
  ev_lane         text,
  -- Not the owner first: on a small table, the planner could choose this index to find the
  -- messages of an owner that are due, and would read all rows of the owner.
  constraint retry_queue_pkey primary key (ev_id, ev_owner, ev_queue)
);
comment on table pgque.retry_queue is
  'Messages to be redelivered to a consumer, also while a worker has them leased, and delayed messages for every consumer; see list_messages().';
comment on column pgque.retry_queue.ev_retry_after is 'When the message is due, or its lease expires.';
comment on column pgque.retry_queue.ev_queue is 'The queue: queue.queue_id.';
comment on column pgque.retry_queue.ev_owner is 'The subscriber that receives it: subscription.sub_id, or 0 for every consumer (a delayed message).';

create table if not exists pgque.dead_letter (
  dl_id           bigint generated by default as identity
    constraint dead_letter_pkey primary key,
  dl_queue_id     int not null,
  dl_consumer_id  int not null,
  dl_time         timestamptz not null,
  dl_reason       text,
  ev_id           bigint not null,
  ev_time         timestamptz not null,
  ev_txid         xid8 not null,
  ev_retry        int,
  ev_type         text,
  ev_data         text,
  ev_extra1       text,
  ev_extra2       text,
  ev_extra3       text,
  ev_extra4       text,
  ev_headers      jsonb,
  ev_key          text,
  ev_bytes        bytea,
  ev_expires      timestamptz,
  ev_error        text,
  dl_receives     int not null default 0,
  dl_held         boolean not null default false,
  dl_forward      int,
  constraint dead_letter_once unique (dl_queue_id, dl_consumer_id, ev_id)
);
comment on table pgque.dead_letter is 'Messages that were given up, once for each consumer; see the view dead_letters and dlq_inspect().';
comment on column pgque.dead_letter.dl_id is 'Number of the dead letter: the argument of dlq_requeue() and dlq_replay().';
comment on column pgque.dead_letter.dl_queue_id is 'The queue: queue.queue_id.';
comment on column pgque.dead_letter.dl_consumer_id is 'The consumer that failed it: consumer.co_id.';
comment on column pgque.dead_letter.dl_time is 'When the message became a dead letter.';
comment on column pgque.dead_letter.dl_reason is 'Why the message was given up: the reason of the last nack().';

-- The columns that retry_queue and dead_letter both have
do $$
declare
  v_column  record;
begin
  for v_column in
    select t.name as tab, c.*
    from (values ('retry_queue'), ('dead_letter')) t (name), (values
      ('ev_id', 'Id of the message.'),
      ('ev_time', 'When the message was sent.'),
      ('ev_txid', 'Transaction that stored it in the queue.'),
      ('ev_retry', 'How often the message failed; NULL: never.'),
      ('ev_type', 'Type of the message.'),
      ('ev_data', 'The payload.'),
      ('ev_extra1', 'Free text of the sender: the partition key, or a trigger''s table.'),
      ('ev_extra2', 'Free text of the sender.'),
      ('ev_extra3', 'Free text of the sender.'),
      ('ev_extra4', 'Free text of the sender.'),
      ('ev_headers', 'Metadata of the sender.'),
      ('ev_key', 'Key of a keyed message.'),
      ('ev_bytes', 'The payload, if it was sent as bytes.'),
      ('ev_expires', 'When the message expires; NULL: never.'),
      ('ev_error', 'The reason given when the message last failed.')
    ) c (name, text)
  loop
    execute format('comment on column pgque.%I.%I is %L', v_column.tab, v_column.name, v_column.text);
  end loop;
end
$$;

-- Messages of send_idem(), in two leaves.  The row of a key with the highest idem_n is
-- the valid one.
create table if not exists pgque.idempotency (
  idem_queue    int not null,
  idem_key      text not null,
  idem_n        bigint not null,
  idem_ev_id    bigint not null,
  idem_expires  timestamptz not null,
  leaf          int not null
) partition by list (leaf);
comment on table pgque.idempotency is 'Keys of send_idem() until their ttl ends. Internal.';

-- Messages that sinks have staged and not committed, in two leaves.  A row holds one
-- message, or as many as rows says in arrays, which costs less.  A sequence holds
-- the number of the current leaf, because a change of it leaves no dead row.  The
-- tables are not unlogged, as no table here is: if PostgreSQL crashes right after a
-- rolled-back TRUNCATE of an unlogged table, the next start can fail with "could not
-- create file ...: File exists".
create sequence if not exists pgque.sink_leaf as int minvalue 0 maxvalue 1;

-- Returns whether each text is a JSON object or null; 22P02 if one is no JSON.
create or replace function pgque._are_headers(p_headers text[]) returns boolean
language sql immutable as $$ select coalesce(pg_catalog.bool_and(pg_catalog.jsonb_typeof(h::jsonb) = 'object'), true) from pg_catalog.unnest(p_headers) h $$;


create table if not exists pgque.sink_attempt (
  attempt     uuid not null,
  sink_id     text not null,
  epoch       bigint,
  started_at  timestamptz not null,
  leaf        int not null
) partition by list (leaf);
comment on table pgque.sink_attempt is 'Attempts of sinks to write. Internal: see sink_begin().';
create table if not exists pgque.sink_stage (
  attempt        uuid not null,
  n              int not null,
  queue          text not null,
  type           text,
  payload        text,
  headers        jsonb
    constraint sink_stage_headers check (jsonb_typeof(headers) = 'object'),
  payload_bytes  bytea,
  partition_key  text,
  leaf           int not null,
  key            text,
  delay          text,
  deliver_at     timestamptz,
  ttl            text,
  constraint sink_stage_one_payload check (payload is null or payload_bytes is null)
) partition by list (leaf);
comment on table pgque.sink_stage is 'Messages that sinks have staged and not committed. Internal: see sink_begin().';

-- Epochs that sinks committed: whole epochs (part -1), and parts that were written row by
-- row, with transaction and session.  Part -2 is the list of servers that the epoch is
-- spread over.  Only a sink's newest epoch is needed.  An attempt of a write without
-- epochs is a sink of its own, once.  pgque.journal has the leaf that takes rows.
create table if not exists pgque.sink_epoch (
  sink_id       text not null,
  epoch         bigint not null,
  part          int not null,
  parts         int,
  txid          xid8 not null default pg_catalog.pg_current_xact_id(),
  session       text not null default pgque._session(),
  once          boolean not null default false,
  committed_at  timestamptz not null default pgque.clock(),
  leaf          int not null,
  servers       text[],
  servers_by    text
) partition by list (leaf);
comment on table pgque.sink_epoch is 'Epochs that sinks committed. Internal: see sink_commit().';

-- Counts of messages that were removed or redelivered, in two leaves; metrics() adds
-- them up.
create table if not exists pgque.tally (
  tal_queue  int not null,
  tal_sub    int not null,
  tal_what   text not null,
  tal_count  bigint not null,
  leaf       int not null
) partition by list (leaf);
comment on table pgque.tally is 'Counts of messages that were dropped, expired or archived. Internal: see metrics().';

-- Messages that are done and kept.  A leaf holds one day of one queue; bucket =
-- queue_id * 100000 + days since 2000-01-01.  Only maintenance creates these leaves: a
-- transaction that creates one lets others wait until it ends.  So the leaf archive_0,
-- bucket 0, takes messages whose leaf does not exist yet, until maintenance moves them.
create sequence if not exists pgque.archive_id_seq;
create table if not exists pgque.archive (
  bucket         bigint not null,
  archive_id     bigint not null default pg_catalog.nextval('pgque.archive_id_seq'),
  archived_at    timestamptz not null,
  arc_queue      int not null,
  arc_consumer   int not null,
  arc_worker     text,
  arc_outcome    text not null,
  arc_receives   int not null,
  ev_id          bigint not null,
  ev_time        timestamptz not null,
  ev_retry       int,
  ev_type        text,
  ev_data        text,
  ev_extra1      text,
  ev_extra2      text,
  ev_extra3      text,
  ev_extra4      text,
  ev_headers     jsonb,
  ev_key         text,
  ev_bytes       bytea,
  ev_expires     timestamptz,
  ev_error       text
) partition by list (bucket);
comment on table pgque.archive is 'Messages that are done and kept; a leaf holds one day of one queue. See archive_list().';
do $$
begin
  if to_regclass('pgque.archive_0') is null then
    create table pgque.archive_0 (like pgque.archive including defaults, constraint archive_0_pkey primary key (archive_id));
    create index archive_0_ev_id on pgque.archive_0 (ev_id);
    alter table pgque.archive attach partition pgque.archive_0 for values in (0);
  end if;
end
$$;
comment on table pgque.archive_0 is 'Archived messages that maintenance has not moved to the leaf of their queue and day yet. Internal.';

-- Messages that the ticker sends at their times; see "recurring".
--   * rec_every: an interval in seconds, counted from rec_anchor
--   * rec_seconds to rec_weekdays: the values that a cron expression allows
--   * rec_fixed: whether it names hours without * and /
--   * rec_either: whether a day matches if rec_days or rec_weekdays does
--   * rec_since: the number of the first run that counts
--   * rec_xid: as queue_xid
--   * rec_role: a name, so that a dump can be loaded where the role is missing
create table if not exists pgque.recurring (
  rec_id             int generated by default as identity
    constraint recurring_pkey primary key,
  rec_name           text not null
    constraint recurring_name_key unique
    constraint recurring_name_length check (octet_length(rec_name) between 1 and 200),
  rec_queue          text not null,
  rec_role           name not null,
  rec_paused         boolean not null default false,
  rec_cron           text not null,
  rec_timezone       text not null,
  rec_every          int,
  rec_anchor         timestamptz,
  rec_seconds        int[],
  rec_minutes        int[],
  rec_hours          int[],
  rec_days           int[],
  rec_months         int[],
  rec_weekdays       int[],
  rec_fixed          boolean,
  rec_either         boolean,
  rec_starts_at      timestamptz,
  rec_ends_at        timestamptz,
  rec_catch_up       text not null
    constraint recurring_catch_up_known check (rec_catch_up in ('none', 'one', 'all')),
  rec_type           text,
  rec_data           text,
  rec_bytes          bytea,
  rec_headers        jsonb,
  rec_key            text,
  rec_delay          interval,
  rec_ttl            interval,
  rec_partition_key  text,
  rec_created_at     timestamptz not null,
  rec_registered_at  timestamptz not null,
  rec_since          bigint not null default 0,
  rec_xid            xid8 not null,
  rec_restored       boolean generated always as (rec_xid <> pgque._xid()) stored,
  constraint recurring_schedule check (num_nonnulls(rec_every, rec_seconds) = 1
    and num_nonnulls(rec_seconds, rec_minutes, rec_hours, rec_days, rec_months, rec_weekdays, rec_fixed, rec_either) in (0, 8))
);
comment on table pgque.recurring is 'Recurring messages. Internal: see list_recurring().';

-- The runs of recurring messages, in two leaves.  The row with the highest run_n of
-- a definition counts; one without run_due was sent by run_recurring().
--   run_at, run_for            when it was sent or tried, and the time of the schedule
--   run_next, run_due          the next run, and when it is sent or tried again
--   run_msg                    the message, the last one of several
--   run_failures ...           attempts at the next run that failed, the last error
create sequence if not exists pgque.recurring_n;
create sequence if not exists pgque.recurring_leaf as int minvalue 0 maxvalue 1;
create table if not exists pgque.recurring_run (
  run_rec       int not null,
  run_n         bigint not null,
  run_at        timestamptz not null,
  run_for       timestamptz,
  run_next      timestamptz,
  run_due       timestamptz,
  run_msg       bigint,
  run_failures  int not null,
  run_error     text,
  run_hint      text,
  leaf          int not null
) partition by list (leaf);
comment on table pgque.recurring_run is 'Journal of the runs of recurring messages. Internal: see list_recurring().';

-- The time of the first recurring message that is due, in microseconds since 1970.
create sequence if not exists pgque.recurring_at minvalue 0;

-- History, in two leaves each: one is the current one, and the other is emptied when
-- all of its rows are older than the setting keeps them.
create sequence if not exists pgque.action_leaf as int minvalue 0 maxvalue 1;
create table if not exists pgque.action (
  act_time         timestamptz not null,
  act_role         name not null,
  act_application  text,
  act_call         text not null,
  act_queue        text,
  act_args         jsonb,
  leaf             int not null
) partition by list (leaf);
comment on table pgque.action is 'Changes by hand. Internal: see list_actions().';

-- Samples of figures that exist anyway, at most one a minute: counters, which go on from
-- row to row, so that a row that is missing loses nothing.  A queue's row has smp_sub 0,
-- and the row of all queues together has smp_queue 0 too.  There is no row while nothing
-- changes.
--   smp_sent          the event sequence: how many message ids were drawn
--   smp_passed        up to which of these ids the consumer has received, less what it missed
--   smp_redelivered, smp_removed   sums of the tally: redelivered; dropped and forwarded
--   smp_dead          dead letters that were there at a sample and are not forwarded
--   smp_mark          of all queues: the sequence of dead letters at the sample
--   smp_gap           of all queues: there is no sample between then and this row
create sequence if not exists pgque.sample_leaf as int minvalue 0 maxvalue 1;
create sequence if not exists pgque.sample_hour_leaf as int minvalue 0 maxvalue 1;
create sequence if not exists pgque.sampled minvalue 0;
create table if not exists pgque.sample (
  smp_time     timestamptz not null,
  smp_queue    int not null,
  smp_sub      int not null,
  smp_lag      real,
  smp_pending  bigint,
  leaf         int not null,
  smp_sent         bigint,
  smp_passed       bigint,
  smp_redelivered  bigint,
  smp_removed      bigint,
  smp_dead         bigint,
  smp_mark         bigint,
  smp_gap          timestamptz
) partition by list (leaf);
do $$
begin
  perform pgque._add_columns('pgque.sample', $c$
    smp_sent bigint;
    smp_passed bigint;
    smp_redelivered bigint;
    smp_removed bigint;
    smp_dead bigint;
    smp_mark bigint;
    smp_gap timestamptz$c$);
  if exists (select from pg_attribute a where a.attrelid = 'pgque.sample'::regclass and a.attname = 'smp_lag' and a.attnotnull) then
    alter table pgque.sample alter smp_lag drop not null, alter smp_pending drop not null;
  end if;
end
$$;
comment on table pgque.sample is 'Samples of queues and consumers, one a minute, for a day. Internal: see history() and consumer_lags().';
create table if not exists pgque.sample_hour (like pgque.sample) partition by list (leaf);
comment on table pgque.sample_hour is 'Samples of queues and consumers, one an hour: the last counters and the greatest lag. Internal: see history() and consumer_lags().';

-- Sequences as registers that leave no dead rows: the last runs of the cleanup jobs in
-- seconds since 1970, and the last notification of consumers for due messages in
-- microseconds.
create sequence if not exists pgque.expire_ran minvalue 0;
create sequence if not exists pgque.delete_expired_ran minvalue 0;
create sequence if not exists pgque.woken minvalue 0;

-- The journals are append only and have two leaves.  While one is the current one, the
-- valid rows of the other are copied to it, and the other is emptied.
do $$
declare
  v_journal  record;
  v_leaf     text;
begin
  for v_journal in
    select j.name, j.key, n as leaf
    from (values ('position', 'pos_sub, pos_seq'), ('settled', 'set_batch, set_ev_id, set_what'), ('tally', null), ('recurring_run', 'run_rec, run_n'), ('action', null), ('sample', null), ('sample_hour', null),
      ('idempotency', 'idem_queue, idem_key, idem_n'), ('sink_attempt', 'attempt'), ('sink_stage', 'attempt, n'), ('sink_epoch', 'sink_id, epoch, part')) j (name, key)
    cross join generate_series(0, 1) n
  loop
    v_leaf := format('%s_%s', v_journal.name, v_journal.leaf);
    if to_regclass('pgque.' || v_leaf) is null then
      execute format('create table pgque.%I partition of pgque.%I (leaf default %s%s) for values in (%3$s)',
        v_leaf, v_journal.name, v_journal.leaf, format(', constraint %I primary key (' || v_journal.key || ')', v_leaf || '_pkey'));
    end if;
  end loop;
end
$$;

-- Columns that 0.7.0, the oldest version to upgrade from, lacks, and constraints that it
-- has.
do $$
declare
  v_key  record;
begin
  perform pgque._add_columns('pgque.queue', $c$
    queue_incarnation uuid;
    queue_floor bigint not null default 0;
    queue_max_window int not null default 0 constraint queue_max_window_range check (queue_max_window >= 0)$c$);
  perform pgque._add_columns('pgque.dead_letter', 'dl_forward int');
  perform pgque._add_columns('pgque.position', 'pos_due tstzrange');
  if to_regclass('pgque.sink_stage_options') is not null then
    drop index pgque.sink_stage_options;
  end if;
  if not exists (select from pg_attribute a where a.attrelid = 'pgque.sink_stage'::regclass and a.attname = 'rows') then
    alter table pgque.sink_stage
      add rows int, add queues text[], add types text[], add payloads text[], add all_headers text[], add all_bytes bytea[],
      add partition_keys text[], add keys text[], add delays text[], add deliver_ats timestamptz[], add ttls text[],
      -- Compression would cost more than the rest of staging.
      alter queues set storage external, alter types set storage external, alter payloads set storage external,
      alter all_headers set storage external, alter all_bytes set storage external, alter partition_keys set storage external,
      alter keys set storage external, alter delays set storage external, alter deliver_ats set storage external, alter ttls set storage external,
      add constraint sink_stage_arrays check (
        case
          when rows is null then num_nonnulls(queues, types, payloads, all_headers, all_bytes, partition_keys, keys, delays, deliver_ats, ttls) = 0
          else num_nonnulls(payloads, all_bytes) = 1 and num_nonnulls(type, payload, headers, payload_bytes, partition_key, key, delay, deliver_at, ttl) = 0
            and rows = all (array_remove(array[cardinality(queues), cardinality(types), cardinality(payloads), cardinality(all_headers),
              cardinality(all_bytes), cardinality(partition_keys), cardinality(keys), cardinality(delays), cardinality(deliver_ats), cardinality(ttls)], null))
        end),
      add constraint sink_stage_all_headers check (all_headers is null or pgque._are_headers(all_headers));
  end if;
  perform pgque._add_columns('pgque.subscriber', 'sub_key_concurrency int not null default 1 constraint subscriber_key_concurrency_range check (sub_key_concurrency >= 1)');
  -- A parallel restore loads the tables of an extension in any order, so they refer to
  -- each other without foreign keys.  _need_queue() does their work.
  for v_key in
    select c.conrelid::regclass as tab, c.conname as name
    from pg_constraint c
    where c.contype = 'f' and c.conname in
      ('queue_right_queue_fkey', 'subscriber_queue_fkey', 'subscriber_consumer_fkey', 'dead_letter_queue_fkey', 'dead_letter_consumer_fkey')
      and c.conrelid in ('pgque.queue_right'::regclass, 'pgque.subscriber'::regclass, 'pgque.dead_letter'::regclass)
  loop
    execute format('alter table %s drop constraint %I', v_key.tab, v_key.name);
  end loop;
  if (select c.conkey[1] from pg_constraint c where c.conrelid = 'pgque.retry_queue'::regclass and c.conname = 'retry_queue_pkey')
    = (select a.attnum from pg_attribute a where a.attrelid = 'pgque.retry_queue'::regclass and a.attname = 'ev_owner')
  then
    alter table pgque.retry_queue drop constraint retry_queue_pkey,
      add constraint retry_queue_pkey primary key (ev_id, ev_owner, ev_queue);
  end if;
  -- No statistics of the retry queue: they may be of a moment in which a consumer had
  -- no rows there.  By them the planner would expect one row where there are thousands.
  if exists (
    select from pg_attribute a
    where a.attrelid = 'pgque.retry_queue'::regclass and a.attnum > 0 and not a.attisdropped and coalesce(a.attstattarget, -1) <> 0)
  then
    execute (
      select 'alter table pgque.retry_queue ' || string_agg(format('alter column %I set statistics 0', a.attname), ', ')
      from pg_attribute a
      where a.attrelid = 'pgque.retry_queue'::regclass and a.attnum > 0 and not a.attisdropped);
  end if;
end
$$;
-- Samples from before 0.12, which were all kept for the same time
insert into pgque.sample_hour (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf)
select max(s.smp_time), s.smp_queue, s.smp_sub, max(s.smp_lag), max(s.smp_pending), l.last_value
from pgque.sample s, pgque.sample_hour_leaf l
where not exists (select from pgque.sample n where n.smp_queue = 0) and not exists (select from pgque.sample_hour)
group by s.smp_queue, s.smp_sub, date_trunc('hour', s.smp_time), l.last_value;
comment on column pgque.config.keep_actions is
  'How long list_actions() goes back at least; none: actions are not recorded. Set by set_history(''actions'', interval).';
comment on column pgque.config.keep_lags is
  'How long history() and consumer_lags() go back at least; none: no samples are taken. Set by set_history(''lags'', interval).';
comment on column pgque.config.tick_share is
  'How much of one core the loop may use for checks and ticks; above it, gaps between ticks grow. Set by set_tick_share(). Unit: percent.';
comment on column pgque.dead_letter.dl_forward is
  'The dead_letter_queue that the loop forwards it to: queue.queue_id; NULL: it stays here.';
comment on column pgque.queue.queue_tick_gap is
  'Shortest time that the loop leaves between two ticks. With many consumers the loop leaves at least 4 ms for each, but no more than the tick '
  'period for all of them.';
comment on column pgque.queue.queue_tick_storage is
  'Size of the stored ticks: when those in the current table reach a third of it, the queue rotates before its period. Unit: bytes.';
comment on column pgque.queue.queue_reader is 'Unused since 0.9.';
comment on column pgque.queue.queue_floor is
  'Event sequence of the oldest tick that was stored at the last rotation: no consumer stands before it, so that max_depth is checked by a subtraction.';
comment on column pgque.queue.queue_max_window is
  'How many messages a batch of next_batch(), or a micro-batch of Spark, has at most; 0: no limit, so that a batch is whole windows. A larger window becomes '
  'several batches with the same two ticks. Unit: messages.';
comment on column pgque.queue.queue_incarnation is
  'Identity of the queue since it was loaded from a dump, because its ticks begin anew then; NULL if it never was: then queue_uid is its identity. '
  'See queue_incarnation().';
comment on column pgque.queue.queue_max_consumers is
  'How many consumers a queue may have, subconsumers included; 0: no limit. Beyond it subscribe() fails with PQ003 for roles that have a right to '
  'this queue only. Only a member of pgque_admin sets it. Unit: consumers.';
comment on column pgque.queue.queue_health_pending_warn is
  'health() warns when a consumer''s oldest pending message is older than this, or older than 80 % of retention_period. 0: only retention_period '
  'counts, and a queue without a consumer is no reason to warn.';
comment on column pgque.queue.queue_health_pending_fail is
  'health() fails when a consumer''s oldest pending message is older than this, or older than retention_period. 0: only retention_period counts. '
  'health() also warns when a worker has leased a message for longer than this and than ten times visibility_timeout; 0: it never does.';
comment on column pgque.queue.queue_health_tick_warn is 'health() warns when messages have waited longer for a tick; 0: never.';
comment on column pgque.queue.queue_health_tick_fail is 'health() fails when messages have waited longer for a tick; 0: never.';
comment on column pgque.queue.queue_health_depth_warn is
  'health() warns when the queue is this full; 0: never. A full queue fails. Unit: percent of max_depth.';

-- Indexes.  CREATE INDEX locks its table against writers even if the index exists, and
-- an upgrade must not.
do $$
declare
  v_index  record;
begin
  for v_index in
    select i.name, i.kind, i.on_rows
    from (values
      ('queue_uid_key', 'unique index', 'queue (queue_uid)'),
      ('subscriber_low_bits', 'unique index', 'subscriber ((sub_id & 1048575))'),
      ('subscriber_queue', 'index', 'subscriber (sub_queue)'),
      ('subscriber_consumer', 'unique index', 'subscriber (sub_queue, sub_consumer) where sub_main is null'),
      ('subscriber_worker', 'unique index', 'subscriber (sub_main, sub_worker) where sub_main is not null'),
      ('window_map_id', 'index', 'window_map (map_queue, map_from, map_to, map_id_hi)'),
      ('retry_queue_queue', 'index', 'retry_queue (ev_queue, ev_id)'),
      -- The messages of one consumer that are due.  Delayed messages have no consumer (0)
      -- yet.
      ('retry_queue_owner_due', 'index', 'retry_queue (ev_owner, ev_retry_after)'),
      ('retry_queue_held', 'index', 'retry_queue (ev_owner, ev_batch, ev_id) where ev_batch is not null'),
      -- Leased messages of which a delivery was lost.  They are few.
      ('retry_queue_suspect', 'index', 'retry_queue (ev_owner, ev_worker) where ev_batch is not null and ev_receives > coalesce(ev_retry, 0) + 1'),
      ('retry_queue_lane', 'index', 'retry_queue (ev_owner, ev_lane, ev_id) where ev_lane is not null'),
      -- Messages without a key that are due: any number of others may wait for their busy
      -- key.
      ('retry_queue_free_due', 'index', 'retry_queue (ev_owner, ev_retry_after) where ev_lane is null'),
      ('retry_queue_key', 'index', 'retry_queue (ev_queue, ev_key) where ev_key is not null'),
      -- A probe of the loop, which finds nothing as a rule.
      ('dead_letter_forward', 'index', 'dead_letter (dl_forward, dl_id) where dl_forward is not null'),
      -- A query for a batch compares pos_sub + 0.  Otherwise a plan without statistics also
      -- reads all rows of the consumer in the primary key.
      ('sample_0_of', 'index', 'sample_0 (smp_queue, smp_sub, smp_time)'),
      ('sample_1_of', 'index', 'sample_1 (smp_queue, smp_sub, smp_time)'),
      ('sample_hour_0_of', 'index', 'sample_hour_0 (smp_queue, smp_sub, smp_time)'),
      ('sample_hour_1_of', 'index', 'sample_hour_1 (smp_queue, smp_sub, smp_time)'),
      ('position_0_batch', 'index', 'position_0 (pos_batch) where pos_batch is not null'),
      ('position_1_batch', 'index', 'position_1 (pos_batch) where pos_batch is not null')
    ) i (name, kind, on_rows)
    where to_regclass('pgque.' || i.name) is null
  loop
    execute format('create %s %I on pgque.%s', v_index.kind, v_index.name, v_index.on_rows);
  end loop;
end
$$;

-- Types of a message as existing clients write it when they nack,
-- `row(...)::pgque.message` with ten values; of the same with our columns, as a
-- consumer gets it; and of the outcome of one message in a call for several.
do $$
begin
  if to_regtype('pgque.outcome') is null then
    create type pgque.outcome as (
      msg_id  bigint,
      ok      boolean,
      reason  text
    );
  end if;
  if to_regtype('pgque.look') is null then
    create type pgque.look as (
      queue_id   int,
      event_seq  bigint,
      tick_seq   bigint,
      tick_time  timestamptz,
      settled    boolean,
      ticked     boolean
    );
  end if;
  if to_regtype('pgque.message') is null then
    create type pgque.message as (
      msg_id         bigint,
      batch_id       bigint,
      type           text,
      payload        text,
      retry_count    int,
      created_at     timestamptz,
      extra1         text,
      extra2         text,
      extra3         text,
      extra4         text
    );
  end if;
  if to_regtype('pgque.delivery') is null then
    create type pgque.delivery as (
      msg_id         bigint,
      batch_id       bigint,
      type           text,
      payload        text,
      retry_count    int,
      created_at     timestamptz,
      extra1         text,
      extra2         text,
      extra3         text,
      extra4         text,
      headers        jsonb,
      key            text,
      payload_bytes  bytea,
      receive_count  int,
      last_error     text,
      expires_at     timestamptz,
      queue          text
    );
  end if;
end
$$;
comment on type pgque.message is 'Message as clients write it for nack(): the first ten columns of pgque.delivery.';
comment on type pgque.look is 'State of a queue that the loop keeps after a check. Internal.';
comment on type pgque.delivery is 'A message as receive() delivers it to a consumer.';
comment on column pgque.delivery.msg_id is 'Id of the message in its queue; it stays through retries and dead letters.';
comment on column pgque.delivery.batch_id is 'The batch that the message was delivered with: the argument of ack() and nack().';
comment on column pgque.delivery.type is 'Type that the sender gave; default if none.';
comment on column pgque.delivery.payload is 'The text or JSON that was sent.';
comment on column pgque.delivery.retry_count is 'How often the message was rejected before: 0 at first.';
comment on column pgque.delivery.created_at is 'When the message was sent.';
comment on column pgque.delivery.extra1 is 'Free text of the sender: the partition key, or a trigger''s table.';
comment on column pgque.delivery.extra2 is 'Free text of the sender.';
comment on column pgque.delivery.extra3 is 'Free text of the sender.';
comment on column pgque.delivery.extra4 is 'Free text of the sender.';
comment on column pgque.delivery.headers is 'Metadata that the sender gave: a JSON object.';
comment on column pgque.delivery.key is 'Key that the sender gave; NULL if none.';
comment on column pgque.delivery.payload_bytes is 'The payload, if it was sent as bytes; payload is NULL then.';
comment on column pgque.delivery.receive_count is 'Number of this delivery: 1 at first.';
comment on column pgque.delivery.last_error is 'Reason that was given when the message was rejected last.';
comment on column pgque.delivery.expires_at is 'When the message expires; NULL: never.';
comment on column pgque.delivery.queue is 'Name of the message''s queue.';
comment on type pgque.outcome is 'Outcome of one message, for calls that take several.';
comment on column pgque.outcome.msg_id is 'Id of the message.';
comment on column pgque.outcome.ok is 'Whether this call had the effect on the message.';
comment on column pgque.outcome.reason is
  'Why ok is false: not in this batch, settled already, cancelled, batch not open, lost to another worker; for dead(queue_name, …): not found behind '
  'the position, dead already.';
-- ---------------------------------------------------------------------------
-- queues: create, configure, pause, drop
-- ---------------------------------------------------------------------------

-- Returns the row of a queue, by its name or its queue_uid, or raises PQ001.  A caller
-- without a right to the queue gets 42501, whether the queue exists or not.  A caller
-- who may change the queue gets 55000 while it is being restored.
create or replace function pgque._queue(p_queue text, p_caller name default current_user, p_right text default 'see') returns pgque.queue
language plpgsql as $$
declare
  v_queue  pgque.queue;
begin
  select q.* into v_queue from pgque.queue q where q.queue_name = p_queue collate pg_catalog."default";
  if not found and p_queue collate pg_catalog."default" ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then
    select q.* into v_queue from pgque.queue q where q.queue_uid = p_queue::uuid;
  end if;
  if pgque._may(p_caller, p_right, v_queue.queue_id) is not true then
    perform pgque._no_right(p_caller, p_right, p_queue);
  elsif v_queue.queue_id is null then
    perform pgque._no_queue(p_queue);
  elsif v_queue.queue_restored and p_right <> 'see' then
    perform pgque._need_loaded(v_queue);
  end if;
  return v_queue;
end
$$;

create or replace function pgque._no_queue(p_queue text) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ001', pg_catalog.format('queue not found: %s', coalesce(pg_catalog.quote_ident(p_queue), 'null')),
    'Check the name. A reader or an administrator lists the queues: select queue_name from pgque.get_queue_info(); An administrator creates one: select pgque.create_queue(name);');
end
$$;

-- Creates the single rows of the tables that have one.  The install script does not, so
-- that a dump of the extension's data can be loaded.
create or replace function pgque._init() returns void
language plpgsql as $$
begin
  perform pgque._need_loaded(null);
  insert into pgque.config default values on conflict do nothing;
  insert into pgque.journal default values on conflict do nothing;
end
$$;

-- Creates one of a queue's six tables and attaches it.  ATTACH locks the parent in a
-- mode that does not block senders and readers of other queues.
create or replace function pgque._create_leaf(p_kind text, p_queue_id int, p_n int, p_event_seq regclass) returns void
language plpgsql as $$
declare
  v_leaf  text := pg_catalog.format('%s_%s_%s', p_kind, p_queue_id, p_n);
  v_slot  int := p_queue_id * 3 + p_n;
begin
  execute pg_catalog.format('create table pgque.%I (like pgque.%I including all)', v_leaf, p_kind);
  if p_kind = 'tick' then
    execute pg_catalog.format('alter table pgque.%I add constraint %I primary key (tick_id)', v_leaf, v_leaf || '_pkey');
  else
    execute pg_catalog.format('create index %I on pgque.%I (ev_txid)', v_leaf || '_txid', v_leaf);
    perform pgque._create_key_index(v_leaf);
    execute pg_catalog.format(
      'alter table pgque.%I alter slot set default %s, alter ev_id set default pg_catalog.nextval(%L),'
      ' alter ev_time set default pgque.clock(), alter ev_txid set default pg_catalog.pg_current_xact_id()',
      v_leaf, v_slot, p_event_seq);
  end if;
  execute pg_catalog.format('alter table pgque.%I attach partition pgque.%I for values in (%s)', p_kind, v_leaf, v_slot);
end
$$;

-- Creates the index by which senders and receivers find the rows of a key.  Messages
-- without a key are not in it.
create or replace function pgque._create_key_index(p_leaf text) returns void
language plpgsql as $$
begin
  execute pg_catalog.format(
    'create unique index %I on pgque.%I (ev_key, ev_id, ev_retry) where ev_key is not null and (ev_owner is null or ev_owner <= 0)',
    p_leaf || '_key', p_leaf);
end
$$;

-- The settings of a queue, as data: parameter name and type.  The column is
-- queue_<name>; its default is the setting's default and its check constraint
-- the setting's range.
create or replace function pgque._setting_types() returns table (param text, type text)
language sql immutable as $$
  values
    ('ticker_max_count', 'int'), ('ticker_max_lag', 'interval'), ('ticker_idle_period', 'interval'),
    ('tick_gap', 'interval'), ('tick_storage', 'bigint'), ('ticker_paused', 'boolean'), ('external_ticker', 'boolean'),
    ('rotation_period', 'interval'), ('retention_period', 'interval'),
    ('message_ttl', 'interval'), ('max_depth', 'bigint'), ('max_consumers', 'int'), ('throughput_limit', 'int'), ('max_window', 'int'),
    ('visibility_timeout', 'interval'), ('max_receive_attempts', 'int'), ('max_retries', 'int'), ('retry_backoff', 'jsonb'),
    ('drop_policy', 'text'), ('dead_letter_queue', 'queue'), ('archive_on_ack', 'boolean'),
    ('health_pending_warn', 'interval'), ('health_pending_fail', 'interval'),
    ('health_tick_warn', 'interval'), ('health_tick_fail', 'interval'), ('health_depth_warn', 'int')
$$;

create or replace function pgque._setting_type(p_param text) returns text
language sql immutable as $$ select t.type from pgque._setting_types() t where t.param = p_param $$;

-- Returns a parameter's name without PgQ's prefix queue_; PQ005 if there is no such
-- parameter.
create or replace function pgque._setting(p_name text, p_for text) returns text
language plpgsql as $$
declare
  v_param  text := pg_catalog.regexp_replace(p_name, '^queue_', '');
begin
  if pgque._setting_type(v_param) is null then
    perform pgque._fail('PQ005', pg_catalog.format('unknown parameter %L for %s', p_name, p_for),
      'Parameters: ' || (select pg_catalog.string_agg(t.param, ', ') from pgque._setting_types() t) || '.');
  end if;
  return v_param;
end
$$;

-- Returns the value of a setting as SQL.  Null is the default: the global one, or else
-- the one of the column.  The value of a setting that names a queue is the queue's id.
create or replace function pgque._setting_sql(p_param text, p_value text, p_queue text, p_caller name) returns text
language plpgsql as $$
declare
  v_type  text := pgque._setting_type(p_param);
begin
  if p_param = 'max_consumers' then
    -- This setting limits the administrator of one queue too.
    perform pgque._need_all(p_caller, 'max_consumers is set by roles that administer all queues');
  end if;
  if p_param = 'retention_period' and p_value::interval = '0' then
    p_value := null;
  end if;
  if p_value is null and p_queue is not null then
    p_value := (select c.defaults->>p_param from pgque.config c);
  end if;
  if p_value is null then
    return 'default';
  elsif v_type = 'queue' then
    return pgque._dead_letter_target(p_value, p_queue, p_caller);
  elsif v_type = 'interval' then
    perform pgque._period(p_value);
  end if;
  return pg_catalog.format('%L::%s', p_value, v_type);
end
$$;

-- Returns the id of the queue that takes the dead letters of another one.  If its name
-- ends in .dlq and it does not exist, it is created.
create or replace function pgque._dead_letter_target(p_target text, p_queue text, p_caller name) returns int
language plpgsql as $$
declare
  v_target  pgque.queue;
begin
  if p_target collate pg_catalog."default" like '%.dlq' and not exists (select from pgque.queue q where q.queue_name = p_target collate pg_catalog."default")
    and pgque._may(p_caller, 'produce', null)
  then
    perform pgque._create_queue(p_target, '{}');
  end if;
  v_target := pgque._queue(p_target, p_caller, 'produce');
  if v_target.queue_dead_letter_queue is not null or v_target.queue_name = p_queue or p_queue like '%.dlq'
    or exists (select from pgque.queue q join pgque.queue d on d.queue_id = q.queue_dead_letter_queue where d.queue_name = p_queue)
  then
    perform pgque._fail('PQ005', pg_catalog.format('queue %I cannot take the dead letters of queue %I', v_target.queue_name, p_queue),
      'Choose another queue. A queue that takes dead letters cannot have a dead_letter_queue itself: messages that fail there stay as dead letters, see dlq_inspect().');
  end if;
  return v_target.queue_id;
end
$$;

-- Returns columns and SQL values of the settings in a JSON object.
create or replace function pgque._settings_sql(p_queue text, p_config jsonb, p_caller name, out columns text[], out vals text[])
language plpgsql as $$
declare
  v_pair   record;
  v_param  text;
begin
  columns := '{}';
  vals := '{}';
  if pg_catalog.jsonb_typeof(p_config) is distinct from 'object' then
    perform pgque._fail('PQ005', pg_catalog.format('the configuration of queue %I must be a JSON object', p_queue),
      'Pass an object such as {"max_retries": 3, "rotation_period": "1 hour"}.');
  end if;
  for v_pair in select e.key, e.value from pg_catalog.jsonb_each_text(p_config) e loop
    v_param := pgque._setting(v_pair.key, pg_catalog.format('queue %I', p_queue));
    if 'queue_' || v_param = any (columns) then
      perform pgque._fail('PQ005', pg_catalog.format('%s of queue %I is given twice', v_param, p_queue),
        'Give the setting once, with or without the prefix queue_.');
    end if;
    columns := columns || pg_catalog.quote_ident('queue_' || v_param);
    vals := vals || pgque._setting_sql(v_param, v_pair.value, p_queue, p_caller);
  end loop;
end
$$;

-- Returns the queue's own settings after a change; null removes one.
create or replace function pgque._own_settings(p_own jsonb, p_config jsonb) returns jsonb
language sql immutable as $$
  select pg_catalog.jsonb_strip_nulls(p_own || coalesce(
    pg_catalog.jsonb_object_agg(pg_catalog.regexp_replace(e.key, '^queue_', ''), e.value), '{}'))
  from pg_catalog.jsonb_each(p_config) e
$$;

create or replace function pgque.create_queue(queue_name text, config jsonb default '{}') returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_new  int;
begin
  perform pgque._check_queue_name($1);
  v_new := pgque._create_queue($1, $2);
  perform pgque._record_action('create_queue', $1, nullif($2, '{}')) where v_new = 1;
  return v_new;
end
$$;
comment on function pgque.create_queue(text, jsonb) is
  'Creates a queue and returns 1. Returns 0 and changes nothing if the name is taken. queue_name: 1 to 57 bytes, any characters. config: a JSON '
  'object of settings as in alter_queue(), or NULL for none. Errors: PQ004 invalid name; PQ005 unknown setting or invalid value.';

create or replace function pgque._check_queue_name(p_name text) returns void
language plpgsql as $$
begin
  if coalesce(p_name, '') = '' or pg_catalog.octet_length(p_name) > 57 then
    perform pgque._fail('PQ004', pg_catalog.format('invalid queue name: %s', coalesce(pg_catalog.quote_ident(pg_catalog.left(p_name, 100)), 'null')),
      'A queue name has 1 to 57 bytes; any character is allowed.');
  elsif p_name ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then
    perform pgque._fail('PQ004', pg_catalog.format('invalid queue name: %I', p_name),
      'Choose a name that does not have the form of a queue_uid: functions accept the queue_uid in place of the name.');
  elsif p_name like '%.dlq' then
    perform pgque._fail('PQ004', pg_catalog.format('reserved queue name: %I', p_name),
      'Create a queue for dead letters with pgque.alter_queue(queue, ''{"dead_letter_queue": "name.dlq"}''), or choose a name that does not end in .dlq.');
  end if;
end
$$;

create or replace function pgque._create_queue(p_queue text, p_config jsonb) returns int
language plpgsql set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_id        int;
  v_seq       text;
  v_settings  record;
begin
  perform pgque._init(), pgque._note_complete();
  v_settings := pgque._settings_sql(p_queue,
    (select c.defaults from pgque.config c) || pgque._own_settings('{}', p_config), current_user);
  -- Two sessions that create the same name wait here; the second sees the queue of the
  -- first.
  perform pg_advisory_xact_lock(hashtext('pgque.create_queue'), hashtext(p_queue));
  if exists (select from pgque.queue q where q.queue_name = p_queue collate "default") then
    return 0;
  end if;
  v_id := nextval(pg_get_serial_sequence('pgque.queue', 'queue_id'));
  v_seq := format('pgque.event_%s_seq', v_id);
  execute format('create sequence %s', v_seq);
  execute format('create sequence pgque.tick_%s_seq', v_id);
  execute 'insert into pgque.queue (queue_id, queue_name, queue_event_seq, queue_tick_seq, queue_own, queue_xid'
    || coalesce(', ' || nullif(array_to_string(v_settings.columns, ', '), ''), '')
    || ') values ($1, $2, $3, $4, $5, pgque._xid()'
    || coalesce(', ' || nullif(array_to_string(v_settings.vals, ', '), ''), '') || ')'
  using v_id, p_queue, v_seq::regclass, format('pgque.tick_%s_seq', v_id)::regclass,
    pgque._own_settings('{}', p_config);
  perform pgque._note_settings(v_id);
  for n in 0..2 loop
    perform pgque._create_leaf('event', v_id, n, v_seq::regclass);
    perform pgque._create_leaf('tick', v_id, n, v_seq::regclass);
  end loop;
  perform pgque._create_reader(v_id);
  perform pgque._set_rights(array[v_seq::regclass::oid, format('pgque.tick_%s_seq', v_id)::regclass]
    || array(select l.leaf::regclass::oid from pgque._leaves(v_id) l));
  execute format('alter sequence %s owned by pgque.event.ev_id', v_seq);
  execute format('alter sequence pgque.tick_%s_seq owned by pgque.tick.tick_id', v_id);
  insert into pgque.tick (slot, tick_queue, tick_id, tick_time, tick_snapshot, tick_event_seq)
  values (v_id * 3, v_id, 1, pgque.clock(), pgque._tick_snapshot(), 0);
  perform setval(format('pgque.tick_%s_seq', v_id)::regclass, 1);
  return 1;
exception
  when unique_violation then
    -- The snapshot of this transaction is older than the commit that created the name.
    return 0;
  when data_exception or check_violation then
    perform pgque._bad_setting(p_queue, p_config, sqlerrm);
end
$$;

create or replace function pgque._settings_hint() returns text
language sql immutable as $$
  select 'Counts are integers. Periods are intervals such as ''2 hours'', of at most a year (retention_period and message_ttl: 100 years; tick_gap: 1 millisecond to 1 minute). tick_storage is at least 1048576 bytes. Switches are true or false. drop_policy is dead_letter, drop or hold. retry_backoff is a JSON object: {"base": 1, "factor": 2, "cap": 3600, "jitter": 0}, base and cap in seconds. null restores the default. The type and the meaning of each setting: select * from pgque.queue_settings(queue);'
$$;

create or replace function pgque._bad_setting(p_queue text, p_config jsonb, p_error text) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ005', pg_catalog.format('invalid configuration of queue %I: %s', p_queue, p_config),
    pgque._settings_hint(),
    p_error);
end
$$;

-- Returns what an update of a queue's row stores as queue_xid: the current transaction.
-- A row that came out of a dump keeps the old value, since only pgque._rebase() may
-- make it a row of this cluster.
create or replace function pgque._queue_xid(p_queue pgque.queue) returns xid8
language sql volatile as $$
  select case when p_queue.queue_restored then p_queue.queue_xid else pgque._mark() end
$$;

-- Lets options store what a change of a queue's settings means for good.  The caller has
-- changed the queue's row.
create or replace function pgque._note_settings(p_queue_id int) returns void
language sql volatile as $$
  select pgque._note_expiring(p_queue_id);
  select pgque._note_unarchived(p_queue_id);
$$;

create or replace function pgque.alter_queue(queue_name text, config jsonb, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue     pgque.queue := pgque._queue(alter_queue.queue_name, caller, 'admin');
  v_settings  record;
  v_sets      text;
begin
  v_settings := pgque._settings_sql(v_queue.queue_name, alter_queue.config, caller);
  select string_agg(c.col || ' = ' || c.val || ', ', '') into v_sets
  from unnest(v_settings.columns, v_settings.vals) c (col, val);
  if v_sets is not null then
    execute 'update pgque.queue q set ' || v_sets
      || 'queue_own = pgque._own_settings(q.queue_own, $2), queue_xid = pgque._queue_xid(q) where q.queue_id = $1'
    using v_queue.queue_id, alter_queue.config;
    perform pgque._note_settings(v_queue.queue_id);
    perform pgque._record_action('alter_queue', v_queue.queue_name, alter_queue.config);
  end if;
  return cardinality(v_settings.columns);
exception
  when data_exception or check_violation then
    perform pgque._bad_setting(alter_queue.queue_name, alter_queue.config, sqlerrm);
end
$$;
comment on function pgque.alter_queue(text, jsonb, pgque.caller) is
  'Sets settings of a queue, all or none, and returns their number. config: a JSON object such as {"max_retries": 3, "rotation_period": "1 hour"}; '
  'null restores a default, and periods are intervals. queue_settings() lists the settings with their values, units and meaning. Errors: PQ001 no '
  'such queue; PQ005 not an object, unknown setting or invalid value.';

-- Notes about a queue: its messages had keys or ttls; some entered the log under an id
-- that was drawn before (moved); another system ticked it (external); one was cancelled.
-- Senders append a row with the first key and the first ttl, and do not wait.  An
-- update of the queue's row would block pause() and subscribe() until they commit.  Two
-- first senders append two rows.
create table if not exists pgque.queue_option (
  opt_queue  int not null,
  opt_name   text not null
    constraint queue_option_known check (opt_name in ('key', 'ttl', 'moved', 'external', 'cancelled'))
);
comment on table pgque.queue_option is
  'Notes of each queue: a message had a key or a ttl, a message was moved into the log or cancelled, or another system ticked the queue. Internal.';
do $$
begin
  if not exists (
    select from pg_constraint c
    where c.conrelid = 'pgque.queue_option'::regclass and c.conname = 'queue_option_known' and pg_get_constraintdef(c.oid) like '%cancelled%')
  then
    alter table pgque.queue_option drop constraint queue_option_known,
      add constraint queue_option_known check (opt_name in ('key', 'ttl', 'moved', 'external', 'cancelled'));
  end if;
end
$$;
do $$
begin
  if to_regclass('pgque.queue_option_queue') is null then
    create index queue_option_queue on pgque.queue_option (opt_queue);
  end if;
  -- A publication for all tables lets no row be deleted from a table without a key.
  if (select c.relreplident from pg_class c where c.oid = 'pgque.queue_option'::regclass) <> 'f' then
    alter table pgque.queue_option replica identity full;
  end if;
end
$$;

-- Returns whether one of these is noted: 'moved' (the log has messages that are younger
-- than their ids: delayed ones, or retries of consumers that are read by offsets),
-- 'external' or 'cancelled'.
create or replace function pgque._noted(p_queue_id int, p_names text[]) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return exists (select from pgque.queue_option o where o.opt_queue = p_queue_id and o.opt_name = any (p_names));
end
$$;

create or replace function pgque._note_once(p_queue_id int, p_name text) returns void
language sql volatile as $$
  insert into pgque.queue_option select p_queue_id, p_name where not pgque._noted(p_queue_id, array[p_name])
$$;

-- Notes permanently that messages of a queue have keys, or expire.
create or replace function pgque._note_options(p_queue pgque.queue, p_keyed boolean, p_expiring boolean) returns void
language plpgsql as $$
begin
  if p_keyed and not pgque._keyed(p_queue) then
    insert into pgque.queue_option values (p_queue.queue_id, 'key');
  end if;
  if p_expiring and not pgque._expiring(p_queue) then
    insert into pgque.queue_option values (p_queue.queue_id, 'ttl');
  end if;
end
$$;

-- Copies the notes that messages of a queue have keys or expire to the queue's row, where
-- a poll reads them without a look-up (see "ordinary").
create or replace function pgque._copy_options() returns int
language plpgsql as $$
declare
  v_queue  record;
  v_count  int := 0;
begin
  for v_queue in
    select q.queue_id, n.keyed, n.expiring
    from (
      select o.opt_queue, pg_catalog.bool_or(o.opt_name = 'key') as keyed, pg_catalog.bool_or(o.opt_name = 'ttl') as expiring
      from pgque.queue_option o
      group by 1
    ) n
    join pgque.queue q on q.queue_id = n.opt_queue
    where n.keyed and not q.queue_keyed or n.expiring and not q.queue_expiring
    for no key update of q skip locked
  loop
    update pgque.queue q set queue_keyed = q.queue_keyed or v_queue.keyed, queue_expiring = q.queue_expiring or v_queue.expiring, queue_xid = pgque._queue_xid(q)
    where q.queue_id = v_queue.queue_id;
    v_count := v_count + 1;
  end loop;
  return v_count;
end
$$;

create or replace function pgque.queue_config(queue_name text, caller pgque.caller default current_user) returns table (param_name text, param_value text)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(queue_config.queue_name, caller, 'see');
begin
  return query
    select substr(e.key, 7),
      case when e.key = 'queue_dead_letter_queue' then (
          select q.queue_name from pgque.queue q
          where q.queue_id = v_queue.queue_dead_letter_queue and pgque._may(caller, 'see', q.queue_id))
        else e.value end
    from jsonb_each_text(to_jsonb(v_queue)) e
    where pgque._setting_type(substr(e.key, 7)) is not null
    order by 1;
end
$$;
comment on function pgque.queue_config(text, pgque.caller) is
  'Earlier form of queue_settings(): returns the settings of a queue with the values in force, one a row. Errors: PQ001 no such queue.';

-- The default of a setting is that of its column, the description is the column's
-- comment.
create or replace function pgque.queue_settings(
  queue_name text, caller pgque.caller default current_user,
  out setting text, out value text, out default_value text, out source text, out type text, out description text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(queue_settings.queue_name, caller, 'see');
begin
  return query
    select c.param_name, c.param_value,
      coalesce(d.defaults ->> c.param_name, (regexp_match(pg_get_expr(f.adbin, f.adrelid), '^''?(.*?)''?(::[a-z ]+)?$'))[1]),
      case when v_queue.queue_own ? c.param_name then 'queue' when d.defaults ? c.param_name then 'all queues' else 'built in' end,
      pgque._setting_type(c.param_name), col_description(a.attrelid, a.attnum)
    from pgque.queue_config(v_queue.queue_name, caller) c
    join pg_attribute a on a.attrelid = 'pgque.queue'::regclass and a.attname = 'queue_' || c.param_name
    left join pg_attrdef f on f.adrelid = a.attrelid and f.adnum = a.attnum
    left join pgque.config d on true
    order by 1;
end
$$;
comment on function pgque.queue_settings(text, pgque.caller) is
  'Returns the settings of a queue, one a row: the value in force, the default, where the value comes from (queue: set for this queue; all queues: '
  'set_default_config(); built in), the type, and what the setting does, with its unit. The value of dead_letter_queue is NULL for a role that has '
  'no right to that queue. Errors: PQ001 no such queue.';

create or replace function pgque.set_default_config(param text, value text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_param   text;
  v_column  text;
  v_value   text;
  v_fits    boolean;
  v_count   int;
begin
  v_param := pgque._setting(coalesce($1, ''), 'all queues');
  v_column := 'queue_' || v_param;
  if v_param = 'dead_letter_queue' then
    perform pgque._fail('PQ005', 'dead_letter_queue has no global default',
      'Set it for each queue with pgque.alter_queue().');
  end if;
  v_value := pgque._setting_sql(v_param, $2, null, current_user);
  if v_value <> 'default' then
    -- The range is that of the column's constraint.
    execute format('select true from (select %s as %I) q where %s',
      v_value, v_column, coalesce((
        select string_agg('(' || pg_get_expr(c.conbin, c.conrelid) || ')', ' and ')
        from pg_constraint c
        join pg_attribute a on a.attrelid = c.conrelid and c.conkey = array[a.attnum]
        where c.conrelid = 'pgque.queue'::regclass and c.contype = 'c' and a.attname = v_column), 'true'))
    into v_fits;
    if v_fits is null then
      raise check_violation using message = 'out of range';
    end if;
  end if;
  perform pgque._init();
  update pgque.config c set defaults = pgque._own_settings(c.defaults, jsonb_build_object(v_param, case when v_value <> 'default' then $2 end));
  execute format('update pgque.queue q set %I = %s, queue_xid = pgque._queue_xid(q) where not q.queue_own ? %L', v_column, v_value, v_param);
  get diagnostics v_count = row_count;
  perform pgque._note_settings(q.queue_id) from pgque.queue q;
  perform pgque._record_action('set_default_config', null, jsonb_build_object(v_param, $2));
  return v_count;
exception
  when data_exception or check_violation then
    perform pgque._fail('PQ005', format('invalid default for %I: %s', v_param, quote_nullable($2)),
      'The default is unchanged. ' || pgque._settings_hint(),
      sqlerrm);
end
$$;
comment on function pgque.set_default_config(text, text) is
  'Sets the default of a setting for all queues without a value of their own, and returns the number of queues changed. NULL restores the built-in '
  'default. The change applies from the next call of any session. Errors: PQ005 unknown setting, invalid value, or dead_letter_queue, which has no '
  'default for all queues.';

-- Names concern all queues, so a right to one queue is not enough.
create or replace function pgque.rename_queue(queue_name text, new_name text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1);
begin
  perform pgque._check_queue_name($2);
  update pgque.queue q set queue_name = $2, queue_xid = pgque._queue_xid(q) where q.queue_id = v_queue.queue_id;
  update pgque.recurring r set rec_queue = $2, rec_xid = case when r.rec_restored then r.rec_xid else pgque._mark() end
  where r.rec_queue = v_queue.queue_name;
  perform pgque._record_action('rename_queue', v_queue.queue_name, jsonb_build_object('new_name', $2));
  return 1;
exception
  when unique_violation then
    perform pgque._fail('PQ002', format('queue exists: %I', $2), 'Choose another name.');
end
$$;
comment on function pgque.rename_queue(text, text) is
  'Renames a queue and returns 1. queue_uid stays. Only for the role pgque_admin. Sessions that listen on pgque_<old name> get no more notifications. '
  'Errors: PQ001 no such queue; PQ002 the new name is taken; PQ004 invalid name.';

create or replace function pgque.pause(queue_name text, caller pgque.caller default current_user) returns void
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(pause.queue_name, caller, 'admin');
begin
  update pgque.queue q set queue_paused = true, queue_xid = pgque._queue_xid(q) where q.queue_id = v_queue.queue_id;
  perform pgque._record_action('pause', v_queue.queue_name);
end
$$;
comment on function pgque.pause(text, pgque.caller) is
  'Pauses a queue: sending fails, and consumers still receive its messages. Errors: PQ001 no such queue; senders get PQ013.';

create or replace function pgque.resume(queue_name text, caller pgque.caller default current_user) returns void
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(resume.queue_name, caller, 'admin');
begin
  update pgque.queue q set queue_paused = false, queue_xid = pgque._queue_xid(q) where q.queue_id = v_queue.queue_id;
  perform pgque._record_action('resume', v_queue.queue_name);
end
$$;
comment on function pgque.resume(text, pgque.caller) is 'Resumes a paused queue. Errors: PQ001 no such queue.';

-- Refuses to drop a queue that is in use.
create or replace function pgque._need_unused(p_queue pgque.queue) returns void
language plpgsql as $$
begin
  if exists (select from pgque.subscriber s where s.sub_queue = p_queue.queue_id) then
    perform pgque._fail('PQ006', pg_catalog.format('queue %I has consumers', p_queue.queue_name),
      'Unsubscribe them first, or call pgque.drop_queue(name, true).');
  elsif exists (select from pgque.recurring r where r.rec_queue = p_queue.queue_name) then
    perform pgque._fail('PQ006', pg_catalog.format('recurring messages are sent to queue %I', p_queue.queue_name),
      'Drop them first with pgque.drop_recurring(name), or call pgque.drop_queue(name, true). After that they fail until a queue of this name is created.');
  elsif exists (
      select from pgque.retry_queue r
      where r.ev_queue = p_queue.queue_id and (r.ev_owner = 0 or exists (select from pgque.subscriber s where s.sub_id = r.ev_owner)))
    or exists (select from pgque.dead_letter d where d.dl_queue_id = p_queue.queue_id)
    or exists (select from pgque.queue q where q.queue_dead_letter_queue = p_queue.queue_id)
  then
    perform pgque._fail('PQ006', pg_catalog.format('queue %I holds delayed messages or dead letters, or takes those of another queue', p_queue.queue_name),
      'Deliver or delete them first, or call pgque.drop_queue(name, true), which deletes them.');
  end if;
end
$$;

-- Raises the error for a call that found the queue and then waited while it was
-- dropped.  The check constraint runs with the rights of the inserting role, and
-- everybody can read its text: so it contains the queue's number and not its name.
create or replace function pgque._takes_nothing(p_queue_id int) returns boolean
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._fail('PQ001', format('queue not found: queue number %s was dropped while this call waited', p_queue_id),
    'Create it again with pgque.create_queue(name).');
  return false;
end
$$;

-- Keeps a queue from being dropped until the transaction ends, for a row that names it
-- in another table: PQ001 if it was dropped.  Without this, a dropped queue would leave
-- rows behind.  A drop in a transaction with an old snapshot may still leave some, and
-- maintenance deletes them (_empty_side_tables).
create or replace function pgque._need_queue(p_queue_id int) returns void
language plpgsql as $$
begin
  perform from pgque.queue q where q.queue_id = p_queue_id for key share;
  if not found then
    perform pgque._takes_nothing(p_queue_id);
  end if;
end
$$;

-- Drops a queue.  It locks the queue's row against purge(), cancel() and the like, then the
-- consumers and the tables, as deliveries do.  Writers of the tables lock the row last
-- (_need_queue), so the lock that waits for them is the last one.
create or replace function pgque._drop_queue(p_queue_id int, p_queue text, p_force boolean) returns void
language plpgsql as $$
declare
  v_queue   pgque.queue;
  v_leaves  text := (select pg_catalog.string_agg(l.leaf, ', ') from pgque._leaves(p_queue_id) l where pg_catalog.to_regclass(l.leaf) is not null);
  v_leaf    text;
begin
  perform from pgque.queue q where q.queue_id = p_queue_id for no key update;
  perform from pgque.subscriber s where s.sub_queue = p_queue_id order by s.sub_main nulls first, s.sub_id for update;
  if v_leaves is not null then
    execute pg_catalog.format('lock table %s in access exclusive mode', v_leaves);
  end if;
  -- This lock waits for transactions that stored a row of this queue (_need_queue).
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id for update;
  if not found then
    perform pgque._no_queue(p_queue);
  elsif p_force is not true then
    perform pgque._need_unused(v_queue);
  end if;
  update pgque.queue q set queue_dead_letter_queue = null, queue_xid = pgque._queue_xid(q) where q.queue_dead_letter_queue = p_queue_id;
  perform pgque._drop_archive(p_queue_id, null);
  delete from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null;
  delete from pgque.subscriber s where s.sub_queue = p_queue_id;
  perform pgque._delete_positions();
  delete from pgque.retry_queue r where r.ev_queue = p_queue_id;
  delete from pgque.dead_letter d where d.dl_queue_id = p_queue_id;
  delete from pgque.queue_right r where r.right_queue = p_queue_id;
  delete from pgque.queue_option o where o.opt_queue = p_queue_id;
  delete from pgque.queue q where q.queue_id = p_queue_id;
  if v_leaves is not null then
    execute 'truncate ' || v_leaves;
    for v_leaf in select l.leaf from pgque._leaves(p_queue_id) l where l.kind = 'event' and pg_catalog.to_regclass(l.leaf) is not null loop
      execute pg_catalog.format('alter table %s add constraint dropped check (pgque._takes_nothing(%s)) not valid', v_leaf, p_queue_id);
    end loop;
  end if;
  -- maint() does the rest: it needs locks that block every sender, and this transaction
  -- may stay open.
  insert into pgque.dropped_queue (queue_id) values (p_queue_id);
end
$$;

-- The tables are emptied at once.  maint() drops them when no other queue has to wait
-- for that.
create or replace function pgque.drop_queue(queue_name text, force boolean default false, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(drop_queue.queue_name, caller, 'admin');
begin
  if drop_queue.force is not true then
    -- An older snapshot does not show who has subscribed since.
    perform pgque._need_read_committed('drop_queue() without force');
    perform pgque._need_unused(v_queue);
  end if;
  perform pgque._execute_insistently(format('select pgque._drop_queue(%s, %L, %L)', v_queue.queue_id, v_queue.queue_name, drop_queue.force));
  perform pgque._record_action('drop_queue', v_queue.queue_name, jsonb_build_object('force', drop_queue.force));
  return 1;
end
$$;
comment on function pgque.drop_queue(text, boolean, pgque.caller) is
  'Drops a queue with its messages, retries and dead letters, and returns 1. force is needed while the queue has consumers, recurring messages, '
  'delayed messages, retries or dead letters, or takes the dead letters of another queue. Messages in the log that no consumer will get do not '
  'count. The call waits for open transactions that sent to the queue. Maintenance drops the empty tables later. Errors: PQ001 no such queue; '
  'PQ006 force is needed and is not true; 25000 without force in a REPEATABLE READ or SERIALIZABLE transaction.';

-- Returns the six tables of a queue.
create or replace function pgque._leaves(p_queue_id int) returns table (kind text, n int, leaf text)
language sql stable as $$
  select k.kind, g.n, pg_catalog.format('pgque.%s_%s_%s', k.kind, p_queue_id, g.n)
  from (values ('event'), ('tick')) k (kind), pg_catalog.generate_series(0, 2) g (n)
$$;

-- Drops the tables of dropped queues, if both parents can be locked at once: waiting
-- for these locks would block every sender.
-- While the parents are locked, each step blocks senders too, for example if a sequence
-- is locked.  So the function ends after about a tenth of a second, and the next call
-- continues.  It also takes no more queues than the server has locks for, two dozen a
-- queue.
-- The order is random, so that a table in use does not keep the others.
create or replace function pgque._drop_leaves() returns int
language plpgsql set lock_timeout = '50ms' as $$
declare
  v_room    bigint := greatest(pgque._lock_room() / 24, 1);
  v_end     timestamptz;
  v_id      int;
  v_leaves  text;
  v_detail  text;
  v_count   int := 0;
begin
  if not exists (select from pgque.dropped_queue) then
    return 0;
  end if;
  -- ONLY: without the tables of all other queues.
  lock table only pgque.event, only pgque.tick in access exclusive mode nowait;
  v_end := pg_catalog.clock_timestamp() + '100 milliseconds';
  for v_id in select d.queue_id from pgque.dropped_queue d order by pg_catalog.random() limit v_room loop
    exit when pg_catalog.clock_timestamp() > v_end;
    begin
      select pg_catalog.string_agg(l.leaf, ', ') into v_leaves
      from pgque._leaves(v_id) l
      where pg_catalog.to_regclass(l.leaf) is not null;
      if v_leaves is not null then
        execute 'drop table ' || v_leaves;
      end if;
      execute pg_catalog.format('drop sequence if exists pgque.event_%s_seq, pgque.tick_%1$s_seq', v_id);
      select 'drop function ' || pg_catalog.string_agg(r.func::text, ', ') into v_leaves from pgque._readers_of(v_id) r (func);
      if v_leaves is not null then
        execute v_leaves;
      end if;
      delete from pgque.dropped_queue d where d.queue_id = v_id;
      v_count := v_count + 1;
    exception
      when dependent_objects_still_exist then
        get stacked diagnostics v_detail = pg_exception_detail;
        raise warning 'pgque: cannot drop the tables of a dropped queue: %', v_detail
          using hint = 'Drop the objects that depend on them. The next maint() drops the tables.';
      when lock_not_available then
        null;
    end;
  end loop;
  return v_count;
exception
  when lock_not_available then
    return 0;
end
$$;
-- ---------------------------------------------------------------------------
-- rights: what a role may do with one queue
-- ---------------------------------------------------------------------------

-- pgque_writer, pgque_reader and pgque_admin are rights to all queues.  A role without
-- them can get a right to one queue.  It then becomes a member of pgque_user, which may
-- only call the functions that check the caller.  It stays a member: roles belong to
-- the cluster, rights to the database.

-- Returns true if a role has a right to a queue, else false.  Rights: produce; consume;
-- admin, which includes both and more; see, which is any right.  The owner's own
-- functions have all rights.  A caller that is null has no right: the domain
-- pgque.caller refuses null only when a value is converted to it, and an outer join or
-- an empty subquery may give a null later.
create or replace function pgque._may(p_caller name, p_right text, p_queue_id int) returns boolean
language plpgsql as $$
declare
  v_may  boolean := coalesce(
    p_caller = current_user collate pg_catalog."C"
    or pg_catalog.pg_has_role(p_caller, case p_right when 'produce' then 'pgque_writer' when 'admin' then 'pgque_admin' else 'pgque_reader' end, 'usage')
    or exists (
      select from pgque.queue_right r
      where r.right_queue = p_queue_id and (r.right_name in (p_right, 'admin') or p_right = 'see') and r.right_valid
        and pg_catalog.pg_has_role(p_caller, r.right_role, 'usage')),
    false);
begin
  -- An upgrade from 0.7.0 or earlier rewrites the table of rights, and to a transaction
  -- whose snapshot is older the table is empty.
  if not v_may and pgque._old_snapshot() and pg_catalog.pg_relation_filenode('pgque.queue_right') is distinct from (
    select c.relfilenode from pg_catalog.pg_class c where c.oid = 'pgque.queue_right'::regclass)
  then
    perform pgque._overtaken();
  end if;
  return v_may;
end
$$;

create or replace function pgque._no_right(p_caller name, p_right text, p_queue text) returns void
language plpgsql as $$
declare
  v_message  text := pg_catalog.format('permission denied for queue %s', coalesce(pg_catalog.quote_ident(p_queue), 'null'));
begin
  if p_caller is null then
    perform pgque._fail('insufficient_privilege', v_message, 'Leave out the argument caller. Its default is the role that calls.',
      'The argument caller is null.');
  end if;
  perform pgque._fail('insufficient_privilege', v_message,
    pg_catalog.format('If the queue exists, an administrator can grant the right: select pgque.grant_queue(%L, %L, %L);', p_queue, p_caller,
      case p_right when 'see' then 'consume' else p_right end),
    pg_catalog.format('Role %I lacks the right to %s it.', p_caller, case p_right when 'produce' then 'send to' when 'admin' then 'administer' else 'consume' end));
end
$$;

-- Refuses operations on one queue that its administrator may not do.
create or replace function pgque._need_all(p_caller name, p_message text) returns void
language plpgsql as $$
begin
  if not pgque._may(p_caller, 'admin', null) then
    perform pgque._fail('insufficient_privilege', p_message, 'Call it as a member of pgque_admin.');
  end if;
end
$$;

-- Returns a batch id, or null if the caller has no right to the batch's queue.  Then
-- the id counts as one that never existed.
create or replace function pgque._batch_for(p_caller name, p_batch bigint) returns bigint
language plpgsql as $$
begin
  if p_caller = current_user collate pg_catalog."C" or pg_catalog.pg_has_role(p_caller, 'pgque_reader', 'usage')
    or pgque._may(p_caller, 'consume', (pgque._batch_owner(p_batch)).sub_queue)
  then
    return p_batch;
  end if;
  return null;
end
$$;

create or replace function pgque.grant_queue(queue_name text, role_name text, right_name text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  int := pgque._right_queue($1, $2, $3);
begin
  perform pgque._need_queue(v_queue);
  insert into pgque.queue_right (right_queue, right_role, right_name, right_role_name)
  select v_queue, r.oid, $3, r.rolname from pg_roles r where r.rolname = $2
  on conflict do nothing;
  if not found then
    return 0;
  end if;
  if not pg_has_role($2, 'pgque_user', 'usage') then
    begin
      execute format('grant pgque_user to %I', $2);
    exception
      -- On PostgreSQL 16 and later it is not enough that a role may create roles.
      when insufficient_privilege then
        perform pgque._fail('insufficient_privilege', format('role %I, the owner of pgque, may not make %I a member of pgque_user', current_user, $2),
          format('As a superuser, or as the role that created pgque_user: grant pgque_user to %I with admin option; then call grant_queue() again.', current_user), sqlerrm);
    end;
  end if;
  perform pgque._record_action('grant_queue', $1, jsonb_build_object('role_name', $2, 'right_name', $3));
  return 1;
end
$$;
comment on function pgque.grant_queue(text, text, text) is
  'Grants a role a right to one queue. Returns 1, or 0 if the role has the right already. Rights: produce (send); consume (subscribe, receive, '
  'acknowledge and reject, read); admin (both, and the queue''s settings, ticks, dead letters, archive, purge and drop, but not its name and '
  'max_consumers). The role becomes a member of pgque_user. It needs none of the roles pgque_reader, pgque_writer and pgque_admin, which are for all '
  'queues. Errors: PQ001 no such queue; PQ005 no such right; 42704 no such role; 42501 the owner of pgque may not grant pgque_user.';

create or replace function pgque.revoke_queue(queue_name text, role_name text, right_name text default null) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  int := pgque._right_queue($1, $2, coalesce($3, 'admin'));
  v_role   oid := (select r.oid from pg_roles r where r.rolname = $2);
  v_count  int;
begin
  delete from pgque.queue_right r where r.right_queue = v_queue and r.right_role = v_role and ($3 is null or r.right_name = $3);
  get diagnostics v_count = row_count;
  perform pgque._record_action('revoke_queue', $1, jsonb_build_object('role_name', $2, 'right_name', $3)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.revoke_queue(text, text, text) is
  'Revokes a right that grant_queue() gave, by default all rights of the role to the queue, and returns the number of rights revoked. The role '
  'stays a member of pgque_user, which gives no right to a queue. Errors: PQ001 no such queue; PQ005 no such right; 42704 no such role.';

-- Applies the rules of _may() to all queues at once.
create or replace function pgque.my_rights(
  caller pgque.caller default current_user, out queue_name text, out see boolean, out produce boolean, out consume boolean, out admin boolean
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query
    with every as materialized (
      select r.see, pgque._may(caller, 'produce', null) as produce, r.see as consume, pgque._may(caller, 'admin', null) as admin
      from (select pgque._may(caller, 'see', null)) r (see)
    )
    select null::text, e.see, e.produce, e.consume, e.admin
    from every e
    union all (
      select q.queue_name, e.see or o.n > 0, e.produce or o.produce, e.consume or o.consume, e.admin or o.admin
      from every e
      cross join pgque.queue q
      cross join lateral (
        select count(*) as n, count(*) filter (where r.right_name <> 'consume') > 0 as produce,
          count(*) filter (where r.right_name <> 'produce') > 0 as consume, count(*) filter (where r.right_name = 'admin') > 0 as admin
        from pgque.queue_right r
        where r.right_queue = q.queue_id and r.right_valid and pg_has_role(caller, r.right_role, 'usage')
      ) o
      where e.see or e.produce or e.admin or o.n > 0
      order by q.queue_name
    );
end
$$;
comment on function pgque.my_rights(pgque.caller) is
  'Returns the rights of the caller: first a row for all queues (queue_name is NULL), then a row for each queue to which it has a right. see: call '
  'get_queue_info() and the like. produce: send. consume: subscribe, receive, acknowledge, reject and read. admin: all of these, and operate the '
  'queue; in the first row also the calls that concern no single queue. The rights come from pgque_reader (see and consume), pgque_writer '
  '(produce), pgque_admin or grant_queue().';

-- Deletes the rights of roles that do not exist, and stores the new names of renamed
-- roles.
create or replace function pgque._tidy_rights() returns void
language plpgsql as $$
begin
  delete from pgque.queue_right r where not r.right_valid or not exists (select from pg_catalog.pg_roles a where a.oid = r.right_role);
  update pgque.queue_right r set right_role_name = a.rolname
  from pg_catalog.pg_roles a
  where a.oid = r.right_role and r.right_role_name is distinct from a.rolname;
end
$$;

-- Returns the id of the queue for a change of rights, after a check of the arguments.
-- One such change runs at a time.
create or replace function pgque._right_queue(p_queue text, p_role text, p_right text) returns int
language plpgsql as $$
declare
  v_queue  pgque.queue := pgque._queue(p_queue);
begin
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.rights'));
  perform pgque._tidy_rights();
  if p_right is null or p_right not in ('produce', 'consume', 'admin') then
    perform pgque._fail('PQ005', pg_catalog.format('no such right to queue %I: %s', v_queue.queue_name, coalesce(pg_catalog.quote_literal(p_right), 'null')),
      'Use produce, consume or admin.');
  elsif not exists (select from pg_catalog.pg_roles r where r.rolname = p_role) then
    perform pgque._fail('undefined_object', pg_catalog.format('role not found: %s', coalesce(pg_catalog.quote_ident(p_role), 'null')),
      'Pass the name of a role as in pg_roles, without quotes.');
  end if;
  return v_queue.queue_id;
end
$$;

-- Up to 0.7.0 a right had no name of its role.
do $$
begin
  perform pgque._tidy_rights();
end
$$;
-- ---------------------------------------------------------------------------
-- send: append events
-- ---------------------------------------------------------------------------

-- Returns headers as they are stored: a JSON object, or PQ005.
create or replace function pgque._headers(p_queue text, p_headers jsonb) returns jsonb
language plpgsql strict immutable set search_path = pg_catalog, pgque, pg_temp as $$
begin
  if pg_catalog.jsonb_typeof(p_headers) <> 'object' then
    perform pgque._bad_headers(p_queue, p_headers::text);
  end if;
  return p_headers;
end
$$;

create or replace function pgque._headers(p_queue text, p_headers text) returns jsonb
language plpgsql strict immutable set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return pgque._headers(p_queue, p_headers::jsonb);
exception
  when data_exception then
    perform pgque._bad_headers(p_queue, p_headers);
end
$$;

create or replace function pgque._bad_headers(p_queue text, p_headers text) returns void
language plpgsql immutable as $$
begin
  perform pgque._fail('PQ005', pg_catalog.format('headers for queue %I must be a JSON object', p_queue),
    'Pass an object such as {"trace": "4bf92f35"}.',
    pg_catalog.left(p_headers, 200));
end
$$;

-- Appends one event and returns its id.  The transaction's id is taken before
-- the queue row is read, and one statement reads the row and stores the event
-- (see sql/README.md, "Writers and rotation").
create or replace function pgque._send(
  p_queue text, p_type text, p_data text,
  p_extra1 text, p_extra2 text, p_extra3 text, p_extra4 text, p_headers jsonb, p_bytes bytea, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_txid  xid8 := pgque._sender_xid();
  v_id    bigint;
begin
  if p_headers is not null then
    perform pgque._headers(p_queue, p_headers);
  end if;
  if p_bytes is not null and p_data is not null then
    perform pgque._fail('PQ005', format('a message for queue %s has both text and bytes', coalesce(quote_ident(p_queue), 'null')),
      'Pass text as payload or bytes as payload_bytes, and null for the other one.');
  end if;
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data,
    ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_bytes, ev_expires)
  select q.queue_id * 3 + q.queue_cur_table, nextval(q.queue_event_seq), pgque.clock(), v_txid, p_type, p_data,
    p_extra1, p_extra2, p_extra3, p_extra4, p_headers, p_bytes, pgque._expires(q)
  from pgque.queue q
  where q.queue_name = p_queue collate "default" and q.queue_open
    -- In this order: a role without a right must not learn that the queue is full.
    and case
      when caller = current_user collate "C" or pg_has_role(caller, 'pgque_writer', 'usage') or pgque._may(caller, 'produce', q.queue_id)
        then q.queue_max_depth = 0 or pgque._room(q, 1)
    end
  returning event.ev_id into v_id;
  if v_id is null then
    return pgque._send(pgque._need_open(p_queue, caller), p_type, p_data, p_extra1, p_extra2, p_extra3, p_extra4, p_headers, p_bytes);
  end if;
  return v_id;
end
$$;

-- Returns the name of a queue that takes events.  Raises an error if the queue does not
-- exist or is paused.  A queue that came out of a dump is repaired first.
create or replace function pgque._need_open(p_queue text, p_caller name default current_user) returns text
language plpgsql as $$
declare
  v_queue  pgque.queue := pgque._queue(p_queue, p_caller, 'produce');
begin
  if v_queue.queue_paused then
    perform pgque._fail('PQ013', pg_catalog.format('queue is paused: %I', v_queue.queue_name),
      pg_catalog.format('Resume it as an administrator: select pgque.resume(%L);', v_queue.queue_name));
  end if;
  perform pgque._rebase(v_queue.queue_id);
  return v_queue.queue_name;
end
$$;

-- Sends a message with options.
create or replace function pgque._send_as(
  p_queue text, p_type text, p_data text, p_bytes bytea, p_headers jsonb, p_key text,
  p_delay interval, p_deliver_at timestamptz, p_ttl interval, p_partition_key text, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  if p_key is null and p_delay is null and p_deliver_at is null and p_ttl is null then
    return pgque._send(p_queue, p_type, p_data, p_partition_key, null, null, null, p_headers, p_bytes, caller);
  end if;
  return (pgque._send_all(p_queue, p_type,
    case when p_bytes is null then array[p_data] end, case when p_bytes is not null then array[p_bytes] end,
    array[p_headers], array[p_key], array[p_delay], array[p_deliver_at], array[p_ttl], array[p_partition_key], caller))[1];
end
$$;

-- Returns the elements of an array in one dimension, counted from 1.
create or replace function pgque._flat(p_array anyarray) returns anyarray
language plpgsql immutable as $$
begin
  if pg_catalog.array_ndims(p_array) > 1 or pg_catalog.array_lower(p_array, 1) <> 1 then
    return array(select e from pg_catalog.unnest(p_array) e);
  end if;
  return p_array;
end
$$;

-- Refuses options that do not fit the messages or are invalid: PQ005.
create or replace function pgque._check_options(
  p_queue text, p_count int, p_headers jsonb[], p_keys text[],
  p_delays interval[], p_deliver_ats timestamptz[], p_ttls interval[], p_partition_keys text[]
) returns void
language plpgsql as $$
declare
  v_wrong  text;
begin
  select pg_catalog.string_agg(a.name, ', ') into v_wrong
  from (values ('headers', pg_catalog.cardinality(p_headers)), ('keys', pg_catalog.cardinality(p_keys)), ('delays', pg_catalog.cardinality(p_delays)),
    ('deliver_ats', pg_catalog.cardinality(p_deliver_ats)), ('ttls', pg_catalog.cardinality(p_ttls)),
    ('partition_keys', pg_catalog.cardinality(p_partition_keys))) a (name, n)
  where a.n <> p_count;
  if v_wrong is not null then
    perform pgque._fail('PQ005', pg_catalog.format('%s for queue %I must have as many elements as payloads, %s', v_wrong, p_queue, p_count),
      'Pass null for an element, or for the whole array, to leave it out.');
  end if;
  select o.wrong into v_wrong
  from (
    select case
        when o.delay < '0' then 'the delay of a message for queue %I is negative'
        when o.delay is not null and o.deliver_at is not null then 'a message for queue %I has both delay and deliver_at'
        when o.delay > '100 years' or o.deliver_at > pgque.clock() + interval '100 years' then 'a message for queue %I is delayed by more than 100 years'
        when o.ttl < '0' then 'the ttl of a message for queue %I is negative'
        when o.ttl > '100 years' then 'the ttl of a message for queue %I is longer than 100 years'
        when o.key = '' or pg_catalog.octet_length(o.key) > 1000 then 'the key of a message for queue %I must have 1 to 1000 bytes'
      end as wrong
    from rows from (pg_catalog.unnest(p_delays), pg_catalog.unnest(p_deliver_ats), pg_catalog.unnest(p_ttls), pg_catalog.unnest(p_keys))
      o (delay, deliver_at, ttl, key)
  ) o
  where o.wrong is not null
  limit 1;
  if v_wrong is not null then
    perform pgque._fail('PQ005', pg_catalog.format(v_wrong, p_queue),
      'Pass delay and ttl as intervals from now, deliver_at as a time. ttl 0 means that the message never expires.');
  end if;
  perform pgque._headers(p_queue, h) from pg_catalog.unnest(p_headers) h where h is not null;
end
$$;

-- Sends many messages of one type with options, given as arrays of one length or
-- null; all or none.
create or replace function pgque._send_all(
  p_queue text, p_type text, p_data text[], p_bytes bytea[], p_headers jsonb[], p_keys text[],
  p_delays interval[], p_deliver_ats timestamptz[], p_ttls interval[], p_partition_keys text[], caller pgque.caller default current_user
) returns bigint[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(p_queue, caller, 'produce');
begin
  return pgque._send_rows(v_queue, array_fill(p_type, array[coalesce(cardinality(p_data), cardinality(p_bytes))]),
    p_data, p_bytes, p_headers, p_keys, p_delays, p_deliver_ats, p_ttls, p_partition_keys);
end
$$;

-- Sends many messages with a type for each.  Data and bytes may both be given, with one
-- of them null in each message.  Returns ids in input order: taking the ids first is
-- faster than returning them from the insert.  A delayed message is stored in the retry
-- queue, for every consumer (owner 0).
create or replace function pgque._send_rows(
  p_queue pgque.queue, p_types text[], p_data text[], p_bytes bytea[], p_headers jsonb[], p_keys text[],
  p_delays interval[], p_deliver_ats timestamptz[], p_ttls interval[], p_partition_keys text[]
) returns bigint[]
language plpgsql set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_count    int := coalesce(cardinality(p_data), cardinality(p_bytes));
  v_txid     xid8 := pgque._sender_xid();
  v_now      timestamptz := pgque.clock();
  v_queue    pgque.queue := p_queue;
  v_plain    boolean[];
  v_without  int;
  v_due      timestamptz[];
  v_ends     timestamptz[];
  v_ids      bigint[];
  v_stored   int;
  v_delayed  int := 0;
  v_last     bigint;
begin
  -- Counted from 1 in one dimension, whatever the caller's arrays are.
  p_data := pgque._flat(p_data); p_bytes := pgque._flat(p_bytes); p_headers := pgque._flat(p_headers); p_keys := pgque._flat(p_keys);
  p_delays := pgque._flat(p_delays); p_deliver_ats := pgque._flat(p_deliver_ats); p_ttls := pgque._flat(p_ttls);
  p_partition_keys := pgque._flat(p_partition_keys);
  perform pgque._check_options(v_queue.queue_name, v_count, p_headers, p_keys, p_delays, p_deliver_ats, p_ttls, p_partition_keys);
  if not v_queue.queue_open then
    perform pgque._need_open(v_queue.queue_name);
    v_queue := pgque._queue(v_queue.queue_name);
  end if;
  select array_agg(p_keys[g] is null), count(*) filter (where p_keys[g] is null),
    array_agg(case when d.due > v_now then d.due end), array_agg(pgque._expires(v_queue, p_ttls[g]))
  into v_plain, v_without, v_due, v_ends
  from generate_series(1, v_count) g
  cross join lateral (select coalesce(p_deliver_ats[g], v_now + p_delays[g]) as due offset 0) d;
  perform pgque._note_options(v_queue, v_without < v_count, cardinality(array_remove(v_ends, null)) > 0);
  if v_queue.queue_max_depth > 0 and v_without > 0 then
    perform pgque._room(v_queue, v_without);
  end if;

  v_ids := array(select case when p then nextval(v_queue.queue_event_seq) end from unnest(v_plain) p);
  if v_without > 0 then
    insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_bytes, ev_headers, ev_expires, ev_extra1)
    select q.slot, m.id, v_now, v_txid, m.type, m.data, m.bytes, m.headers, m.ends, m.partition_key
    from (
      select q.queue_id * 3 + q.queue_cur_table as slot
      from pgque.queue q
      where q.queue_id = v_queue.queue_id and not q.queue_restored
      offset 0
    ) q, unnest(v_ids, p_types, p_data, p_bytes, p_headers, v_due, v_ends, p_partition_keys)
      m (id, type, data, bytes, headers, due, ends, partition_key)
    where m.id is not null and m.due is null;
    get diagnostics v_stored = row_count;
    insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_bytes, ev_headers, ev_expires, ev_extra1)
    select m.due, q.queue_id, 0, m.id, v_now, v_txid, m.type, m.data, m.bytes, m.headers, m.ends, m.partition_key
    from pgque.queue q, unnest(v_ids, p_types, p_data, p_bytes, p_headers, v_due, v_ends, p_partition_keys)
      m (id, type, data, bytes, headers, due, ends, partition_key)
    where q.queue_id = v_queue.queue_id and m.id is not null and m.due is not null;
    get diagnostics v_delayed = row_count;
    if v_stored + v_delayed < v_without then
      perform pgque._no_queue(v_queue.queue_name);   -- the queue was dropped meanwhile
    end if;
  end if;
  if v_without < v_count then
    perform pgque._lock_keys(v_queue.queue_id, p_keys);
    v_last := coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0);
    for v_n in 1..v_count loop
      continue when v_plain[v_n];
      v_ids[v_n] := pgque._send_keyed(v_queue, p_types[v_n], p_data[v_n], p_bytes[v_n], p_headers[v_n], p_keys[v_n], v_due[v_n], v_ends[v_n], p_partition_keys[v_n]);
    end loop;
  end if;
  -- Only now it is known which keys made a new message.  A delayed message counts even
  -- if no consumer has subscribed.
  if v_queue.queue_max_depth > 0 and (v_delayed > 0 or v_last < any (v_ids)) then
    perform pgque._room(v_queue, 0);
  end if;
  return v_ids;
end
$$;

-- Returns the query for the newest row of the key $1, and for the transaction that sent
-- its message; null: that row is no longer stored.
create or replace function pgque._newest_of_key_sql(p_queue_id int) returns text
language sql stable as $$
  select 'select l.ev_id, l.ev_owner, l.ev_retry, l.ev_time, l.ev_expires, f.ev_txid from (select e.* from ('
    || pg_catalog.string_agg('(select e.ev_id, e.ev_owner, e.ev_retry, e.ev_time, e.ev_expires from ' || l.rows
      || ' order by e.ev_key desc, e.ev_id desc, e.ev_retry desc limit 1)', ' union all ')
    || ') e order by e.ev_id desc, e.ev_retry desc limit 1) l left join lateral ('
    || pg_catalog.string_agg('select e.ev_txid from ' || l.rows || ' and e.ev_id = l.ev_id and e.ev_retry = 0', ' union all ')
    || ' limit 1) f on true'
  from (
    select pg_catalog.format('pgque.event_%s_%s e where e.ev_key = $1 and (e.ev_owner is null or e.ev_owner <= 0)', p_queue_id, n) as rows
    from pg_catalog.generate_series(0, 2) n
  ) l
$$;

-- Creates the function for that query, since a session keeps its plan.
create or replace function pgque._create_key_reader(p_queue_id int) returns void
language plpgsql as $$
begin
  perform pgque._compile(pg_catalog.format(
    'create or replace function pgque._key_%s(p_key text, out ev_id bigint, out ev_owner int, out ev_retry int, out ev_time timestamptz,'
    ' out ev_expires timestamptz, out sent_by xid8)'
    ' language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $body$'
    ' begin %s into ev_id, ev_owner, ev_retry, ev_time, ev_expires, sent_by; end $body$', p_queue_id, pgque._newest_of_key_sql(p_queue_id)));
end
$$;

-- Returns the newest row of a key.
create or replace function pgque._newest_of_key(
  p_queue_id int, p_key text,
  out ev_id bigint, out ev_owner int, out ev_retry int, out ev_time timestamptz, out ev_expires timestamptz, out sent_by xid8
)
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  execute 'select * from pgque._key_' || p_queue_id || '($1)'
  into ev_id, ev_owner, ev_retry, ev_time, ev_expires, sent_by using p_key;
end
$$;

-- Returns whether a consumer has passed a pending message that a transaction sent, or
-- reads it as part of a whole window.
create or replace function pgque._is_passed(p_queue_id int, p_id bigint, p_sent_by xid8) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return p_sent_by is null or exists (
    select
    from pgque.subscriber s
    cross join lateral pgque._next_from(pgque._position(s.sub_id)) p
    where s.sub_queue = p_queue_id and s.sub_main is null
      and not exists (select from pgque.retry_queue r where r.ev_owner + 0 = s.sub_id and r.ev_id = p_id)
      and (pg_catalog.pg_visible_in_snapshot(p_sent_by, p.pos_snapshot)
        or pg_catalog.pg_visible_in_snapshot(p_sent_by, p.pos_next_snapshot) and p_id <= p.pos_done_id));
end
$$;

-- The wrappers below have neither SET nor SECURITY DEFINER, so that they are
-- inlined into the calling statement and cost nothing.

create or replace function pgque.send(queue_name text, payload text) returns bigint
language sql as $$ select pgque._send($1, 'default', $2, null, null, null, null, null, null) $$;
comment on function pgque.send(text, text) is
  'Sends one text as a message of type default, kept byte for byte, and returns its id. Every consumer of the queue gets the message after this '
  'transaction commits and a tick follows. Errors: PQ001 no such queue; PQ003 the queue is full; PQ013 the queue is paused.';

create or replace function pgque.send(queue_name text, payload jsonb) returns bigint
language sql as $$ select pgque._send($1, 'default', $2::pg_catalog.text, null, null, null, null, null, null) $$;
comment on function pgque.send(text, jsonb) is
  'Sends one JSON value as a message of type default, stored in canonical form, and returns its id. Every consumer of the queue gets the message '
  'after this transaction commits and a tick follows. Errors: PQ001 no such queue; PQ003 the queue is full; PQ013 the queue is paused.';

create or replace function pgque.send(i_queue text, i_type text, i_payload text, i_partition_key text) returns bigint
language sql as $$ select pgque._send($1, $2, $3, $4, null, null, null, null, null) $$;
comment on function pgque.send(text, text, text, text) is
  'Earlier form of send(): sends one text with a type and a partition key, which is an option of send() now, and returns the message''s id. Errors: '
  'PQ001 no such queue; PQ003 the queue is full; PQ005 the partition key begins with { and may be meant as headers; name the argument headers or '
  'partition_key; PQ013 the queue is paused.';

create or replace function pgque.send(i_queue text, i_type text, i_payload jsonb, i_partition_key text) returns bigint
language sql as $$ select pgque._send($1, $2, $3::pg_catalog.text, pgque._no_headers($1, $4), null, null, null, null, null) $$;
comment on function pgque.send(text, text, jsonb, text) is
  'Earlier form of send(): sends one JSON value with a type and a partition key, which is an option of send() now, and returns the message''s id. '
  'Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 the partition key begins with { and may be meant as headers; name the argument '
  'headers or partition_key; PQ013 the queue is paused.';

-- Returns a partition key that is no JSON object.  Headers in its place must not silently
-- become a partition key.
create or replace function pgque._no_headers(p_queue text, p_key text) returns text
language plpgsql immutable as $$
begin
  if pg_catalog.ltrim(p_key) like '{%' then
    perform pgque._fail('PQ005', pg_catalog.format('the fourth argument of send() to queue %I looks like headers', p_queue),
      'Name the argument: headers => ''{"trace": "4bf92f35"}'', or partition_key => ''{...}''.');
  end if;
  return p_key;
end
$$;

create or replace function pgque.send(
  queue_name text, type_name text, payload text, headers jsonb default null, key text default null, delay interval default null,
  deliver_at timestamptz default null, ttl interval default null, partition_key text default null
) returns bigint
language sql as $$
  select case
    when $5 is null and $6 is null and $7 is null and $8 is null then pgque._send($1, $2, $3, $9, null, null, null, $4, null)
    else pgque._send_as($1, $2, $3, null, $4, $5, $6, $7, $8, $9)
  end
$$;

create or replace function pgque.send(
  queue_name text, type_name text, payload jsonb, headers jsonb default null, key text default null, delay interval default null,
  deliver_at timestamptz default null, ttl interval default null, partition_key text default null
) returns bigint
language sql as $$
  select case
    when $5 is null and $6 is null and $7 is null and $8 is null then pgque._send($1, $2, $3::pg_catalog.text, $9, null, null, null, $4, null)
    else pgque._send_as($1, $2, $3::pg_catalog.text, null, $4, $5, $6, $7, $8, $9)
  end
$$;

create or replace function pgque.send(
  queue_name text, type_name text, payload bytea, headers jsonb default null, key text default null, delay interval default null,
  deliver_at timestamptz default null, ttl interval default null, partition_key text default null
) returns bigint
language sql as $$ select pgque._send_as($1, $2, null, $3, $4, $5, $6, $7, $8, $9) $$;

-- The comments differ in the payload only.
do $$
declare
  v_comment  text[];
  v_options  constant text :=
    'headers: a JSON object that travels with the message. key: if a message with this key is pending (delivered to no consumer yet), its type, body, '
    'headers and expiry become those of this call, its time stays, and its id is returned. delay (from now) or deliver_at: the message is not delivered earlier. ttl: the message is not '
    'delivered later; 0 means that it never expires, NULL means the queue''s message_ttl. delay and ttl are at most 100 years. partition_key: kept '
    'in extra1; for a message without key, it is also the key that key_concurrency counts. Errors: PQ001 no such queue; PQ003 the queue is full; '
    'PQ005 invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does not see a change to the key.';
begin
  foreach v_comment slice 1 in array array[
    ['text', 'Sends one text as a message, kept byte for byte, and returns its id. '],
    ['jsonb', 'Sends one JSON value as a message, stored in canonical form, and returns its id. '],
    ['bytea', 'Sends bytes as one message and returns its id. Consumers get the bytes in payload_bytes, and payload is NULL. ']]
  loop
    execute format('comment on function pgque.send(text, text, %s, jsonb, text, interval, timestamptz, interval, text) is %L',
      v_comment[1], v_comment[2] || v_options);
  end loop;
end
$$;

-- Appends one event for each element with one statement, and returns ids in input
-- order.  Taking the ids first is faster than returning them from the insert.
create or replace function pgque._send_many(queue_name text, type_name text, payloads text[], caller pgque.caller default current_user) returns bigint[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_txid  xid8;
  v_id    int;
  v_seq   regclass;
  v_ids   bigint[];
begin
  if pgque._no_payloads($1, cardinality($3)) then
    return '{}';
  end if;
  v_txid := pgque._sender_xid();
  select q.queue_id, q.queue_event_seq into v_id, v_seq
  from pgque.queue q
  where q.queue_name = $1 collate "default" and q.queue_open
    and case
      when caller = current_user collate "C" or pg_has_role(caller, 'pgque_writer', 'usage') or pgque._may(caller, 'produce', q.queue_id)
        then q.queue_max_depth = 0 or pgque._room(q, cardinality($3))
    end;
  if found then
    v_ids := array(select nextval(v_seq) from generate_series(1, cardinality($3)));
    insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_expires)
    select q.slot, p.id, q.at, v_txid, $2, p.payload, q.ends
    from (
      select q.queue_id * 3 + q.queue_cur_table as slot, pgque.clock() as at, pgque._expires(q) as ends
      from pgque.queue q
      where q.queue_id = v_id and q.queue_open
      offset 0
    ) q, unnest($3, v_ids) p (payload, id);
    if found then
      return v_ids;
    end if;
  end if;
  return pgque._send_many(pgque._need_open($1, caller), $2, $3);
end
$$;

-- Returns whether there is nothing to send; PQ005 for a null array.
create or replace function pgque._no_payloads(p_queue text, p_count int) returns boolean
language plpgsql as $$
begin
  if p_count is null then
    perform pgque._fail('PQ005', pg_catalog.format('payloads for queue %s must not be null', coalesce(pg_catalog.quote_ident(p_queue), 'null')),
      'Pass an array; an empty one sends nothing.');
  end if;
  return p_count = 0;
end
$$;

create or replace function pgque.send_batch(queue_name text, payloads text[]) returns bigint[]
language sql as $$ select pgque._send_many($1, 'default', $2) $$;
comment on function pgque.send_batch(text, text[]) is
  'Sends many texts of type default without options, all or none, and returns their ids in the order of payloads. Errors: PQ001 no such queue; '
  'PQ003 the queue is full; PQ005 payloads is NULL, or more than max_depth; PQ013 the queue is paused.';

create or replace function pgque.send_batch(queue_name text, payloads jsonb[]) returns bigint[]
language sql as $$ select pgque._send_many($1, 'default', $2::pg_catalog.text[]) $$;
comment on function pgque.send_batch(text, jsonb[]) is
  'Sends many JSON values of type default without options, all or none, and returns their ids in the order of payloads. Errors: PQ001 no such '
  'queue; PQ003 the queue is full; PQ005 payloads is NULL, or more than max_depth; PQ013 the queue is paused.';

create or replace function pgque.send_batch(
  queue_name text, type_name text, payloads text[], headers jsonb[] default null, keys text[] default null, delays interval[] default null,
  deliver_ats timestamptz[] default null, ttls interval[] default null, partition_keys text[] default null
) returns bigint[]
language sql as $$
  select case
    when $4 is null and $5 is null and $6 is null and $7 is null and $8 is null and $9 is null then pgque._send_many($1, $2, $3)
    when pgque._no_payloads($1, pg_catalog.cardinality($3)) then '{}'
    else pgque._send_all($1, $2, $3, null, $4, $5, $6, $7, $8, $9)
  end
$$;
comment on function pgque.send_batch(text, text, text[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'Sends many texts, all or none, and returns their ids in the order of payloads. Each option is an array as long as payloads, or NULL, and an '
  'element means what the option of send() means. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 payloads is NULL or more than '
  'max_depth, an array of another length, or an invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does '
  'not see a change to the key.';

create or replace function pgque.send_batch(
  queue_name text, type_name text, payloads jsonb[], headers jsonb[] default null, keys text[] default null, delays interval[] default null,
  deliver_ats timestamptz[] default null, ttls interval[] default null, partition_keys text[] default null
) returns bigint[]
language sql as $$
  select case
    when $4 is null and $5 is null and $6 is null and $7 is null and $8 is null and $9 is null then pgque._send_many($1, $2, $3::pg_catalog.text[])
    when pgque._no_payloads($1, pg_catalog.cardinality($3)) then '{}'
    else pgque._send_all($1, $2, $3::pg_catalog.text[], null, $4, $5, $6, $7, $8, $9)
  end
$$;
comment on function pgque.send_batch(text, text, jsonb[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'Sends many JSON values, all or none, and returns their ids in the order of payloads. Each option is an array as long as payloads, or NULL, and an '
  'element means what the option of send() means. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 payloads is NULL or more than '
  'max_depth, an array of another length, or an invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does '
  'not see a change to the key.';

create or replace function pgque.send_batch(
  queue_name text, type_name text, payloads bytea[], headers jsonb[] default null, keys text[] default null, delays interval[] default null,
  deliver_ats timestamptz[] default null, ttls interval[] default null, partition_keys text[] default null
) returns bigint[]
language sql as $$
  select case when pgque._no_payloads($1, pg_catalog.cardinality($3)) then '{}' else pgque._send_all($1, $2, null, $3, $4, $5, $6, $7, $8, $9) end
$$;
comment on function pgque.send_batch(text, text, bytea[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'Sends many messages of bytes, all or none, and returns their ids in the order of payloads. Each option is an array as long as payloads, or NULL, '
  'and an element means what the option of send() means. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 payloads is NULL or more than '
  'max_depth, an array of another length, or an invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does '
  'not see a change to the key.';
-- ---------------------------------------------------------------------------
-- tick: record snapshots
-- ---------------------------------------------------------------------------

-- Returns the current snapshot, in which the calling transaction itself is never
-- visible.  A transaction that sends, ticks and sends again has one id.  If it were
-- visible in its own tick, a reader of that tick inside the transaction would miss the
-- second event.
create or replace function pgque._tick_snapshot() returns pg_snapshot
language plpgsql as $$
declare
  v_snapshot  pg_snapshot := pg_catalog.pg_current_snapshot();
  v_own       xid8 := pg_catalog.pg_current_xact_id_if_assigned();
begin
  if v_own is null or not pg_catalog.pg_visible_in_snapshot(v_own, v_snapshot) then
    return v_snapshot;
  end if;
  return (
    select least(pg_catalog.pg_snapshot_xmin(v_snapshot), v_own)::text || ':' || pg_catalog.pg_snapshot_xmax(v_snapshot)::text
      || ':' || pg_catalog.string_agg(x.xid::text, ',' order by x.xid)
    from (
      select s.xid from pg_catalog.pg_snapshot_xip(v_snapshot) s (xid)
      union
      select v_own
    ) x
  )::pg_snapshot;
end
$$;

-- Returns the newest tick of a queue.  Ticks go to the current table: if that has rows,
-- the newest is there.  (No sequential scans here and below: the planner expects no
-- rows in a table that was vacuumed while empty.)
create or replace function pgque._last_tick(p_queue pgque.queue) returns pgque.tick
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_tick  pgque.tick;
begin
  execute pg_catalog.format('select t.* from pgque.tick_%s_%s t order by t.tick_id desc limit 1', p_queue.queue_id, p_queue.queue_cur_table)
  into v_tick;
  if v_tick.tick_id is null then
    execute pg_catalog.format('select t.* from (%s) t order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue.queue_id)) into v_tick;
  end if;
  return v_tick;
end
$$;

create or replace function pgque._ticks_sql(p_queue_id int) returns text
language sql stable as $$
  select pg_catalog.format(
    'select * from pgque.tick_%1$s_0 union all select * from pgque.tick_%1$s_1 union all select * from pgque.tick_%1$s_2', p_queue_id)
$$;

-- Returns a tick by its id; all columns are null if it no longer exists.
create or replace function pgque._tick(p_queue_id int, p_tick_id bigint) returns pgque.tick
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_tick  pgque.tick;
begin
  execute pg_catalog.format('select t.* from (%s) t where t.tick_id = $1', pgque._ticks_sql(p_queue_id)) into v_tick using p_tick_id;
  return v_tick;
end
$$;

-- Returns whether a snapshot shows rows of a queue that its last tick does not show.
create or replace function pgque._has_new_rows(p_queue_id int, p_last pgque.tick, p_snapshot pg_snapshot) returns boolean
language plpgsql set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_found  boolean;
begin
  execute pg_catalog.format('select exists (%s)', pgque._rows_sql(p_queue_id, 'true', null, pgque._xids(p_last.tick_snapshot, p_snapshot)))
  into v_found;
  return v_found;
end
$$;

-- Returns why a queue gets a tick with this snapshot: 'events' (it shows events that no
-- tick covers), 'forced' or 'idle'.  Or returns why it gets none: 'nothing' (it shows
-- no such events), or null (too early to check).  p_new: what _has_new_rows() returned,
-- if the caller asked it.  The function only reads: no WAL, no transaction id.
create or replace function pgque._tick_reason(p_queue pgque.queue, p_last pgque.tick, p_snapshot pg_snapshot, p_new boolean default null) returns text
language plpgsql as $$
declare
  v_now    timestamptz := pgque.clock();
  v_count  bigint := coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0) - p_last.tick_event_seq;
  v_age    interval := v_now - p_last.tick_time;
  v_ahead  boolean := v_age < '-1 second';   -- the clock was set back, by more than a correction
  v_none   text;
begin
  if coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_tick_seq), 0) > p_last.tick_id then
    return 'forced';   -- without reading a table, which may be locked
  end if;
  if v_count >= p_queue.queue_ticker_max_count or v_ahead
    or v_age >= least(p_queue.queue_ticker_max_lag, p_queue.queue_ticker_idle_period)
  then
    if coalesce(p_new, pgque._has_new_rows(p_queue.queue_id, p_last, p_snapshot)) then
      return 'events';
    end if;
    v_none := 'nothing';
  end if;
  return case when v_ahead or v_age >= p_queue.queue_ticker_idle_period then 'idle' else v_none end;
end
$$;

-- Ticks one queue if a tick is due.  Returns the id of the new tick or null, the time
-- of the newest tick, and whether ticks now cover everything that is visible.  The lock
-- is taken before the snapshot, so the order of ticks is that of their snapshots.  It
-- is held to the end of the transaction, so a second ticker sees the tick of the first.
-- With p_gap no tick for messages follows another within the queue's tick_gap.
create or replace function pgque._tick_if_due(p_queue_id int, p_wait boolean, p_gap boolean default false, out new_id bigint, out last_time timestamptz, out covered boolean)
language plpgsql as $$
declare
  v_queue     pgque.queue;
  v_last      pgque.tick;
  v_snapshot  pg_snapshot;
  v_reason    text;
  v_class     int := pg_catalog.hashtext('pgque.tick');
begin
  perform pgque._need_read_committed('a tick');
  if p_wait then
    perform pg_catalog.pg_advisory_xact_lock(v_class, p_queue_id);
  elsif not pg_catalog.pg_try_advisory_xact_lock(v_class, p_queue_id) then
    return;
  end if;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  if v_queue.queue_restored then
    perform pgque._rebase(p_queue_id);
    select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  end if;
  if v_queue.queue_id is null then
    return;
  end if;
  v_last := pgque._last_tick(v_queue);
  v_snapshot := pgque._tick_snapshot();
  if pg_catalog.pg_snapshot_xmax(v_last.tick_snapshot) > pg_catalog.pg_snapshot_xmax(v_snapshot) then
    -- The dump is of an earlier version: the tick is from another cluster, although the
    -- queue's mark does not show it.
    update pgque.queue q set queue_xid = '1' where q.queue_id = p_queue_id;
    perform pgque._rebase(p_queue_id);
    v_last := pgque._last_tick((select q from pgque.queue q where q.queue_id = p_queue_id));
    new_id := v_last.tick_id;
    last_time := v_last.tick_time;
    return;
  end if;
  v_reason := pgque._tick_reason(v_queue, v_last, v_snapshot);
  if p_gap and v_reason = 'events' and v_last.tick_time between pgque.clock() - v_queue.queue_tick_gap and pgque.clock() then
    v_reason := null;
  end if;
  covered := v_reason is not null;
  last_time := v_last.tick_time;
  if v_reason <> 'nothing' then
    last_time := pgque.clock();
    new_id := pgque._store_tick(v_queue, pgque._next_tick_id(v_queue, v_last.tick_id), last_time, v_snapshot, null, v_reason <> 'idle');
  end if;
end
$$;

-- Returns the id of the next tick of a queue, or with p_anew the first of another era.
-- A server that was promoted or restored to an earlier time may have lost ticks that
-- readers with offsets of their own have seen: these ids must not be used again.  So an
-- era of 2^32 ids belongs to one timeline (its remainder by 256).  Another timeline
-- begins with its own next era.  An external ticker has its own ids.
create or replace function pgque._next_tick_id(p_queue pgque.queue, p_last bigint, p_anew boolean default false) returns bigint
language plpgsql as $$
declare
  v_era   bigint := p_last >> 32;
  v_line  int;
begin
  if p_queue.queue_external_ticker or pg_catalog.pg_is_in_recovery() then
    return p_last + 1;
  end if;
  v_line := (('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint - 1) % 256;
  if v_era % 256 = v_line and not p_anew then
    return p_last + 1;
  end if;
  return v_era + (v_line - v_era % 256 + 255) % 256 + 1 << 32;
end
$$;

-- Notifies sessions that listen to a queue.
create or replace function pgque._notify(p_queue pgque.queue, p_tick_id bigint) returns void
language plpgsql as $$
begin
  if pg_catalog.pg_notification_queue_usage() < 0.5 then
    perform pg_catalog.pg_notify('pgque_' || p_queue.queue_name, p_tick_id::text);
  end if;
end
$$;

-- Stores a tick and notifies listeners.  The commit waits for the disk whatever the
-- session's synchronous_commit is.  The row gets the id of a (sub)transaction that had
-- none when the sequence was read.  So every transaction that drew an id up to
-- p_event_seq has a lower id, see _span_xids().
create or replace function pgque._store_tick(
  p_queue pgque.queue, p_tick_id bigint, p_time timestamptz, p_snapshot pg_snapshot, p_event_seq bigint, p_notify boolean
) returns bigint
language plpgsql as $$
begin
  p_event_seq := coalesce(p_event_seq, pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0);
  if pg_catalog.current_setting('synchronous_commit') = 'off' then
    perform pg_catalog.set_config('synchronous_commit', 'local', true);
  end if;
  -- Set before the tick is visible: a session that reads the sequence knows that there
  -- is no newer tick.
  perform pg_catalog.setval(p_queue.queue_tick_seq, p_tick_id);
  insert into pgque.tick (slot, tick_queue, tick_id, tick_time, tick_snapshot, tick_event_seq)
  values (p_queue.queue_id * 3 + p_queue.queue_cur_table, p_queue.queue_id, p_tick_id, p_time, p_snapshot, p_event_seq);
  -- A listener in an open transaction lets the server's notification queue fill up, and
  -- then a commit fails.  A tick without a notification is better than no tick.
  if p_notify then
    perform pgque._notify(p_queue, p_tick_id);
  end if;
  return p_tick_id;
end
$$;

create or replace function pgque.ticker(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(ticker.queue_name, caller, 'admin');
begin
  if v_queue.queue_restored and (v_queue.queue_external_ticker or v_queue.queue_ticker_paused) then
    perform pgque._rebase(v_queue.queue_id);
    return null;
  elsif v_queue.queue_external_ticker then
    perform pgque._fail('PQ005', format('queue %I has an external ticker', v_queue.queue_name),
      'Pass the tick too: pgque.ticker(queue, tick_id, time, event_seq).');
  elsif v_queue.queue_ticker_paused then
    return null;
  end if;
  -- A block with an exception handler is a subtransaction, which _store_tick() needs.
  begin
    return (pgque._tick_if_due(v_queue.queue_id, true)).new_id;
  exception
    when sqlstate 'PQ099' then
      raise;
  end;
end
$$;
comment on function pgque.ticker(text, pgque.caller) is
  'Ticks one queue if a tick is due, and returns the tick''s id, else NULL. A tick covers committed messages only: send, commit, tick. A queue '
  'that was loaded from a dump is repaired first, even if it is paused or has an external ticker. Errors: PQ001 no such queue; PQ005 the queue has '
  'an external ticker; 25000 in a REPEATABLE READ or SERIALIZABLE transaction; 55000 the dump that it was loaded from is not complete.';

-- Each queue keeps two locks until the transaction ends, and eight with a tick.  If the
-- server has no room for all queues, a call serves some, chosen at random.
create or replace function pgque.ticker() returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_room   bigint := greatest(pgque._lock_room(), 8);
  v_all    boolean := (select count(*) from pgque.queue) <= v_room / 8;
  v_count  bigint := 0;
  v_id     int;
begin
  perform pgque._forward_letters();
  for v_id in select q.queue_id from pgque.queue q order by case when not v_all then random() end, q.queue_id loop
    exit when v_room < 8;
    if (pgque._check_queue(row(v_id, 0, 0, '-infinity', false, false))).ticked then
      v_count := v_count + 1;
      v_room := v_room - 6;
    end if;
    v_room := v_room - 2;
  end loop;
  return v_count;
end
$$;
comment on function pgque.ticker() is
  'Ticks every queue in which something committed since its last tick, and returns the number of ticks. It first forwards dead letters to the '
  'queues that dead_letter_queue names. If a queue is broken, the call raises a '
  'warning and ticks the other queues. Errors: 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';

-- Returns which of these queues the loop has to check now, by what it knows of them,
-- and which are early: their last tick is too young, or they failed less than a second
-- ago.
--
-- A settled queue is left out: ticks cover all its rows, and no new row can appear
-- while the sequences of its events and of its forced ticks stand still.  A sender
-- takes an id before it stores a row and locks the sequence until its transaction ends.
-- So no row with an older id is outstanding once no other session has that lock.  (A
-- row that enters the log under an old id takes an unused one too.)
--
-- Returned values reflect the moment of the call, before _check_queue() takes its snapshot.
-- ticked means that the queue was settled before, so it gets an idle or forced tick at
-- most.  Queues that may have messages are first, then forced ticks, then idle ones.  A
-- queue that is being dropped (its sequences are locked) is left out.  If a sequence is
-- missing, every queue is checked.
--
-- A queue waits for its tick_gap.  A tick wakes every consumer of the queue, so a queue
-- with many consumers waits longer: four milliseconds for each, and at most the tick
-- period.
create or replace function pgque._queues_due(
  p_queues int[], p_known pgque.look[], p_period interval, out looks pgque.look[], out early pgque.look[], out early_until timestamptz
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '20ms' set jit = off as $$
declare
  v_now     timestamptz := pgque.clock();
  v_locked  regclass[];
  v_free    int[];
begin
  select array_agg(l.look order by l.still, l.unforced, l.tick_time) filter (where not l.early),
    coalesce(array_agg(l.known) filter (where l.early), '{}'), min(l.due) filter (where l.early)
  into looks, early, early_until
  from (
    select k as known, f.still, k.tick_seq = s.tick_seq as unforced, k.tick_time,
      row(q.queue_id, s.event_seq, s.tick_seq, k.tick_time, case when k.event_seq = s.event_seq then nullif(k.settled, false) else false end,
        f.still)::pgque.look as look,
      d.due, coalesce(not f.still and k.tick_seq = s.tick_seq and (not q.queue_restored or k.settled is null) and d.due > v_now and k.tick_time <= v_now, false) as early
    from pgque.queue q
    cross join lateral (
      select coalesce(pg_sequence_last_value(q.queue_event_seq), 0), coalesce(pg_sequence_last_value(q.queue_tick_seq), 0)
      offset 0) s (event_seq, tick_seq)
    left join unnest(p_known) k on k.queue_id = q.queue_id
    cross join lateral (select (k.settled and k.event_seq = s.event_seq) is true) f (still)   -- settled, and no message was sent since
    left join lateral (
      select k.tick_time + case when k.settled is null then '1 second' else greatest(q.queue_tick_gap, least(p_period, 0.004 * interval '1 second' * (
        select count(*) from (select from pgque.subscriber c where c.sub_queue = q.queue_id and c.sub_main is null limit ceil(extract(epoch from p_period) / 0.004)) c))) end
    ) d (due) on k.tick_time > v_now - greatest(p_period, q.queue_tick_gap, '1 second') and not f.still
    where q.queue_id = any (p_queues)
      and (f.still and k.tick_seq = s.tick_seq and not q.queue_restored and k.tick_time + q.queue_ticker_idle_period > v_now) is not true
  ) l;
  looks := coalesce(looks, '{}');
  if exists (select from unnest(looks) k where k.settled is null) then
    v_locked := array(
      select l.relation
      from pg_locks l
      where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.pid is distinct from pg_backend_pid()
        and l.database = (select d.oid from pg_database d where d.datname = current_database()));
    looks := array(
      select row(k.queue_id, k.event_seq, k.tick_seq, k.tick_time, coalesce(k.settled, q.queue_event_seq <> all (v_locked)), k.ticked)::pgque.look
      from unnest(looks) with ordinality k
      join pgque.queue q on q.queue_id = k.queue_id
      order by k.ordinality);
  end if;
exception
  when others then
    begin
      v_free := array(
        select q.queue_id
        from pgque.queue q
        where q.queue_id = any (p_queues) and not exists (
          select from pg_locks l
          where l.relation in (q.queue_event_seq, q.queue_tick_seq) and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
            and l.database = (select d.oid from pg_database d where d.datname = current_database())));
      if cardinality(v_free) < cardinality(p_queues) then
        select s.* into looks, early, early_until from pgque._queues_due(v_free, p_known, p_period) s;
        return;
      end if;
    exception
      when lock_not_available then
        null;   -- an upgrade has the table of queues: each queue is checked, and waits for it
    end;
    looks := array(select row(q, 0, 0, null, false, false)::pgque.look from unnest(p_queues) q);
    early := '{}';
    early_until := null;
end
$$;

-- Ticks one queue for a ticker that serves all of them, and returns what it knows of
-- the queue then.  It does not wait for another ticker, and only briefly for a locked
-- table.  A broken queue causes a warning, and its settled is null.  A check without a
-- tick keeps no locks but those of the two sequences.
create or replace function pgque._check_queue(p_look pgque.look) returns pgque.look
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '200ms' set jit = off as $$
declare
  v_queue  pgque.queue;
  v_tick   record;
begin
  p_look.ticked := false;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_look.queue_id;
  if not found or v_queue.queue_external_ticker or v_queue.queue_ticker_paused then
    p_look.settled := false;
    return p_look;
  elsif v_queue.queue_restored and pgque._lacks(v_queue) is not null then
    -- Without a warning a second for each queue: maint_tables() warns.
    p_look.settled := null;
    p_look.tick_time := pgque.clock();
    perform pgque._undo_block();
  end if;
  -- A loop that has just begun does not know the last tick.
  v_tick := pgque._tick_if_due(v_queue.queue_id, false, p_look.tick_time is null);
  p_look.settled := p_look.settled and v_tick.covered is true;
  p_look.tick_time := v_tick.last_time;
  p_look.ticked := v_tick.new_id is not null;
  p_look.tick_seq := coalesce(v_tick.new_id, p_look.tick_seq);   -- a tick sets the sequence
  -- Many ticks fill their table long before the rotation period has passed.
  perform pgque._maint_operation('pgque.maint_rotate_tables_step1', v_queue.queue_name) where v_tick.new_id % 1000 = 0;
  perform pgque._undo_block() where not p_look.ticked and not v_queue.queue_restored;
  return p_look;
exception
  when sqlstate 'PQ099' then
    return p_look;
  when invalid_transaction_state then
    raise;
  when others then
    begin
      if exists (select from pgque.queue q where q.queue_id = v_queue.queue_id) then
        raise warning 'pgque: no tick for queue %: % (%)', quote_ident(v_queue.queue_name), sqlerrm, sqlstate;
      end if;   -- else the queue was dropped meanwhile
    exception
      when lock_not_available then
        null;   -- an upgrade has the table of queues
    end;
    p_look.settled := null;
    p_look.tick_time := pgque.clock();
    return p_look;
end
$$;

create or replace function pgque.ticker(queue_name text, tick_id bigint, tick_time timestamptz, event_seq bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(ticker.queue_name, caller, 'admin');
  v_last   pgque.tick;
begin
  perform pgque._need_read_committed('a tick');
  if not v_queue.queue_external_ticker then
    perform pgque._fail('PQ005', format('queue %I has no external ticker', v_queue.queue_name),
      format('Switch it on first: select pgque.alter_queue(%L, ''{"external_ticker": true}'');', v_queue.queue_name));
  end if;
  perform pgque._rebase(v_queue.queue_id);
  perform pg_advisory_xact_lock(hashtext('pgque.tick'), v_queue.queue_id);
  v_queue := pgque._queue(ticker.queue_name, caller, 'admin');
  v_last := pgque._last_tick(v_queue);
  if (ticker.tick_id > v_last.tick_id and ticker.event_seq >= v_last.tick_event_seq and ticker.tick_time >= v_last.tick_time) is not true then
    perform pgque._fail('PQ005', format('tick %s of queue %I is not after tick %s', coalesce(ticker.tick_id::text, 'null'), v_queue.queue_name, v_last.tick_id),
      'Pass a higher tick id, and an event sequence and a time that are not lower.',
      format('The last tick has event sequence %s and time %s.', v_last.tick_event_seq, v_last.tick_time));
  elsif not isfinite(ticker.tick_time) or greatest(ticker.tick_id, ticker.event_seq) > 4611686018427387904 then
    perform pgque._fail('PQ005', format('tick %s of queue %I leaves no room for another', ticker.tick_id, v_queue.queue_name),
      'Pass an id and an event sequence of at most 2^62, and a finite time.');
  end if;
  perform pgque._note_once(v_queue.queue_id, 'external');
  return pgque._store_tick(v_queue, ticker.tick_id, ticker.tick_time, pgque._tick_snapshot(), ticker.event_seq, true);
end
$$;
comment on function pgque.ticker(text, bigint, timestamptz, bigint, pgque.caller) is
  'Stores a tick with the id, time and event sequence of another system, for a queue with external_ticker, and returns its id. Errors: PQ001 no '
  'such queue; PQ005 no external ticker, or a tick that does not follow the last one; 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';

-- The request is kept in a sequence, so it leaves no row behind.  The sequence is only
-- counted up here: this snapshot may be older than the newest tick, and a value below
-- that tick would hide it from every receive().
create or replace function pgque.force_next_tick(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(force_next_tick.queue_name, caller, 'admin');
  v_last   bigint := (pgque._last_tick(v_queue)).tick_id;
begin
  perform nextval(v_queue.queue_tick_seq);
  return v_last;
end
$$;
comment on function pgque.force_next_tick(text, pgque.caller) is
  'Makes the next ticker() tick the queue, even if nothing was sent. Returns the id of the queue''s newest tick. Errors: PQ001 no such queue.';
-- ---------------------------------------------------------------------------
-- window: which rows lie between two snapshots
-- ---------------------------------------------------------------------------

-- Returns the ids of the transactions that are visible in p_to and not in p_from, as
-- ranges; with p_to null, of all transactions that are not visible in p_from.
--
-- The naive condition scans from the xmin of p_from: with one transaction that stays
-- open for a day, every window scans a day of rows.  Instead:
--   * Every id from xmax(p_from) up to xmax(p_to) was not visible in p_from.  So this
--     range is divided at the ids that still run in p_to.
--   * Of the ids below it, only those that ran in p_from can be new.  So they are added
--     one by one.
-- Rows of running transactions are in none of the ranges, and are not read.
create or replace function pgque._xids(p_from pg_snapshot, p_to pg_snapshot) returns int8multirange
language plpgsql stable as $$
declare
  v_lo    bigint := pg_catalog.pg_snapshot_xmax(p_from)::text::bigint;
  v_xids  int8multirange := pg_catalog.int8multirange(pg_catalog.int8range(v_lo, greatest(v_lo, pg_catalog.pg_snapshot_xmax(p_to)::text::bigint)));
begin
  if p_to is null then
    v_xids := pg_catalog.int8multirange(pg_catalog.int8range(v_lo, null));
  elsif pg_catalog.pg_snapshot_xmin(p_to) < pg_catalog.pg_snapshot_xmax(p_to) then
    v_xids := v_xids - (
      select coalesce(pg_catalog.range_agg(pg_catalog.int8range(x.xid::text::bigint, x.xid::text::bigint, '[]')), '{}')
      from pg_catalog.pg_snapshot_xip(p_to) x (xid));
  end if;
  if pg_catalog.pg_snapshot_xmin(p_from) < pg_catalog.pg_snapshot_xmax(p_from) then
    v_xids := v_xids + (
      select coalesce(pg_catalog.range_agg(pg_catalog.int8range(x.xid::text::bigint, x.xid::text::bigint, '[]')), '{}')
      from pg_catalog.pg_snapshot_xip(p_from) x (xid)
      where p_to is null or pg_catalog.pg_visible_in_snapshot(x.xid, p_to));
  end if;
  return v_xids;
end
$$;

-- Returns the transactions of _xids() as a filter on e.ev_txid that no index serves.  It
-- is for scans by row addresses, where the planner must not choose an index.
create or replace function pgque._xid_filter(p_from pg_snapshot, p_to pg_snapshot) returns text
language sql stable as $$
  select pg_catalog.format(
    '(pg_catalog.pg_visible_in_snapshot(e.ev_txid, %L) and not pg_catalog.pg_visible_in_snapshot(e.ev_txid, %L))', p_to, p_from)
$$;

-- Returns a query for the rows of a queue that satisfy a condition on e, over all three
-- tables.  A writer whose snapshot is older than a rotation stores into a table that is
-- no longer current, so each table is read.  Only a table without a page is left out,
-- unless p_all: rows that a tick covers were stored before.
--   * p_xids: only rows of these transactions
--   * p_tids: a range of row addresses in each table (three conditions, null for none)
--   * p_columns: what is selected
--
-- The naive condition for several ranges of ids, which joins them by OR, lets the
-- planner read the whole index and compare each entry with each range, if it takes the
-- table for small.  It does so until the first ANALYZE, so that a check whether there is
-- one new row reads all old ones.  Here each range is an index scan of a subquery, which
-- has no other plan.  OFFSET 0 keeps the planner from merging that subquery.
create or replace function pgque._rows_sql(
  p_queue_id int, p_condition text, p_tids text[] default null, p_xids int8multirange default null, p_columns text default 'e.*', p_all boolean default false
) returns text
language plpgsql as $$
declare
  v_merged  int8range := pg_catalog.range_merge(p_xids);
  v_many    boolean := p_tids is null and p_xids <> pg_catalog.int8multirange(v_merged);   -- several ranges
  v_leaf    text;
  v_part    text;
  v_sql     text;
begin
  if pg_catalog.isempty(v_merged) then
    p_condition := 'false';
  elsif v_many then
    p_condition := 'e.ev_txid >= x.lo and e.ev_txid < x.hi and ' || p_condition;
  elsif p_tids is null then
    p_condition := pg_catalog.concat_ws(' and ', 'e.ev_txid >= ' || pg_catalog.quote_literal(pg_catalog.lower(v_merged)) || '::xid8',
      'e.ev_txid < ' || pg_catalog.quote_literal(pg_catalog.upper(v_merged)) || '::xid8', p_condition);
  elsif p_xids is not null then
    p_condition := pg_catalog.format('e.ev_txid::text::bigint <@ %L::int8multirange and %s', p_xids, p_condition);
  end if;
  for n in 0..2 loop
    v_leaf := 'pgque.event_' || p_queue_id || '_' || n;
    if p_tids[n + 1] is not null or p_tids is null and (p_all or pg_catalog.pg_relation_size(v_leaf::regclass) > 0) then
      v_part := pg_catalog.concat('select ', p_columns, ' from ', v_leaf, ' e where ', p_tids[n + 1] || ' and ', p_condition);
      if v_many then
        v_part := pg_catalog.format(
          'select e.* from (select coalesce(pg_catalog.lower(r), 0)::text::xid8, coalesce(pg_catalog.upper(r), 9223372036854775807)::text::xid8'
          ' from pg_catalog.unnest(%L::int8multirange) r) x (lo, hi) cross join lateral (%s offset 0) e', p_xids, v_part);
      end if;
      v_sql := pg_catalog.concat_ws(' union all ', v_sql, v_part);
    end if;
  end loop;
  return coalesce(v_sql, pg_catalog.concat('select ', p_columns, ' from ', v_leaf, ' e where false'));
end
$$;

-- Returns the condition for the part of a window that belongs to one subscriber and has
-- its ids in (p_after, p_upto].  Either bound may be null.
create or replace function pgque._slice_condition(p_owner int, p_after bigint, p_upto bigint) returns text
language sql stable as $$
  select pg_catalog.format('(e.ev_owner is null or e.ev_owner = %s)', p_owner)
    || coalesce(' and e.ev_id > ' || p_after, '')
    || coalesce(' and e.ev_id <= ' || p_upto, '')
$$;

-- Reads a window once, and notes for every 25 events or a few more (without retries,
-- which belong to one subscriber each) their range of ids and, for each table, of row
-- addresses.  A slice is then a TID range scan.  The rows of a window are fixed and do
-- not move.  VACUUM FULL and the like give the table another file, which is noted too.
-- The map is a cache: without it, reading is only slower.
--
-- Rows are hashed by 25 ids each, and only these groups are sorted: sorting all rows
-- would take three times as long.  The planner takes each row for a group of its own, and
-- would sort them (enable_sort).
create or replace function pgque._map_window(p_queue_id int, p_from bigint, p_to bigint, p_xids int8multirange) returns void
language plpgsql set enable_sort = off set work_mem = '64MB' set jit = off as $$
begin
  execute pg_catalog.format(
    $q$
    insert into pgque.window_map (map_queue, map_from, map_to, map_chunk, map_id_lo, map_id_hi, map_lo, map_hi, map_filenodes, map_xid)
    select $1, $2, $3, g.chunk, min(g.id_lo), max(g.id_hi),
      array[min(g.tid_lo) filter (where g.n = 0), min(g.tid_lo) filter (where g.n = 1), min(g.tid_lo) filter (where g.n = 2)],
      array[max(g.tid_hi) filter (where g.n = 0), max(g.tid_hi) filter (where g.n = 1), max(g.tid_hi) filter (where g.n = 2)],
      $4, pgque._xid()
    from (
      select g.*, (greatest(sum(g.events) over (order by g.ids), 1)::bigint - 1) / 25 as chunk
      from (
        select w.ev_id / 25 as ids, w.n, count(*) filter (where w.ev_owner is null) as events,
          min(w.ev_id) as id_lo, max(w.ev_id) as id_hi, min(w.tid) as tid_lo, max(w.tid) as tid_hi
        from (%s) w
        group by w.ev_id / 25, w.n
      ) g
    ) g
    group by g.chunk
    $q$, pgque._rows_sql(p_queue_id, 'true', null, p_xids, 'e.ev_id, e.ev_owner, e.slot % 3 as n, e.ctid as tid'))
  using p_queue_id, p_from, p_to, pgque._filenodes(p_queue_id);
end
$$;

create or replace function pgque._filenodes(p_queue_id int) returns oid[]
language plpgsql stable as $$
begin
  return array[
    pg_catalog.pg_relation_filenode(pg_catalog.format('pgque.event_%s_0', p_queue_id)::regclass),
    pg_catalog.pg_relation_filenode(pg_catalog.format('pgque.event_%s_1', p_queue_id)::regclass),
    pg_catalog.pg_relation_filenode(pg_catalog.format('pgque.event_%s_2', p_queue_id)::regclass)];
end
$$;

-- Returns one condition on row addresses for each table by the map of a position's
-- window, with null for a table without rows to read.  Returns null if the window has
-- no usable map.  p_max as in _slice_sql().
--
-- Up to the end of chunk n there are more than 25 n events for all subscribers, and at
-- most 25 n + 25.  So m chunks in a row hold more than 25 (m - 1): those that p_max needs,
-- and two more, hold the batch and the message after it, even if the first is used up.
create or replace function pgque._map_conditions(p_queue_id int, p_pos pgque.position, p_max bigint) returns text[]
language plpgsql as $$
declare
  v_filenodes  oid[] := pgque._filenodes(p_queue_id);
  v_tids       text[] := array_fill(null::text, array[3]);
  v_lo         tid[];
  v_hi         tid[];
  v_mapped     boolean;
begin
  -- One statement: if another consumer makes a map meanwhile, both subqueries see it or
  -- neither does.
  select array[min(m.map_lo[1]), min(m.map_lo[2]), min(m.map_lo[3])], array[max(m.map_hi[1]), max(m.map_hi[2]), max(m.map_hi[3])],
    count(*) > 0 or exists (
      select from pgque.window_map m
      where m.map_queue = p_queue_id and m.map_from = p_pos.pos_tick and m.map_to = p_pos.pos_next_tick
        and m.map_valid and m.map_filenodes = v_filenodes)
  into v_lo, v_hi, v_mapped
  from (
    -- Two consumers may have made the same map.
    select distinct on (m.map_id_hi) m.map_lo, m.map_hi
    from pgque.window_map m
    where m.map_queue = p_queue_id and m.map_from = p_pos.pos_tick and m.map_to = p_pos.pos_next_tick
      and m.map_valid and m.map_filenodes = v_filenodes
      and m.map_id_hi > coalesce(p_pos.pos_done_id, 0)
      -- Chunks have the order of their ids, so the one with the last id is the last to read.
      and m.map_id_hi <= coalesce((
        select e.map_id_hi
        from pgque.window_map e
        where e.map_queue = p_queue_id and e.map_from = p_pos.pos_tick and e.map_to = p_pos.pos_next_tick
          and e.map_valid and e.map_filenodes = v_filenodes and e.map_id_hi >= p_pos.pos_last_id
        order by e.map_id_hi
        limit 1), 9223372036854775807)
    order by m.map_id_hi
    limit p_max / 25 + 3
  ) m;
  if not v_mapped then
    return null;
  end if;
  for n in 1..3 loop
    if v_lo[n] is not null then
      v_tids[n] := pg_catalog.format('e.ctid >= %L::tid and e.ctid <= %L::tid', v_lo[n], v_hi[n]);
    end if;
  end loop;
  return v_tids;
end
$$;

-- Returns the query that reads the rows of a position's window that satisfy p_condition,
-- as columns of pgque.event.  With p_places, only rows there are read.
--
-- A window that is far bigger than a batch of p_max messages is read by its map.  p_by_map
-- asks for the map in any case.
create or replace function pgque._rows_of_window_sql(
  p_queue_id int, p_pos pgque.position, p_condition text, p_max bigint default null, p_by_map boolean default false, p_places text[] default null
) returns text
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_by_map  boolean;
  v_xids    int8multirange;
  v_tids    text[] := p_places;
begin
  p_by_map := p_by_map or pgque._is_big(p_pos, p_max);
  v_by_map := p_by_map or p_max is null and pgque._is_mapped(p_queue_id, p_pos);
  if v_tids is null and v_by_map then
    -- From here on no table can be rewritten while its row addresses are used.
    execute pg_catalog.format('lock table pgque.event_%1$s_0, pgque.event_%1$s_1, pgque.event_%1$s_2 in access share mode', p_queue_id);
    v_tids := pgque._map_conditions(p_queue_id, p_pos, p_max);
  end if;
  if v_tids is null then
    v_xids := pgque._xids(p_pos.pos_snapshot, p_pos.pos_next_snapshot);
    if p_by_map then
      perform pgque._map_window(p_queue_id, p_pos.pos_tick, p_pos.pos_next_tick, v_xids);
      v_tids := pgque._map_conditions(p_queue_id, p_pos, p_max);
    end if;
  end if;
  if v_tids is not null then
    v_xids := null;
    p_condition := p_condition || ' and ' || pgque._xid_filter(p_pos.pos_snapshot, p_pos.pos_next_snapshot);
  end if;
  return pgque._rows_sql(p_queue_id, p_condition, v_tids, v_xids);
end
$$;

-- Returns whether a window has a map.
create or replace function pgque._is_mapped(p_queue_id int, p_pos pgque.position) returns boolean
language plpgsql as $$
begin
  return exists (
    select from pgque.window_map m
    where m.map_queue = p_queue_id and m.map_from = p_pos.pos_tick and m.map_to = p_pos.pos_next_tick);
end
$$;

-- Returns the query that reads the rows of a position's window above pos_done_id, up to
-- pos_last_id: those of a batch, or, with p_max, those of the next batch of at most p_max
-- messages.  p_and is one more condition on e.  A consumer that was moved back can find an
-- event and its own retry in one window: then the retry replaces the event.
create or replace function pgque._slice_sql(
  p_sub pgque.subscriber, p_pos pgque.position, p_and text default '', p_max bigint default null, p_by_map boolean default false,
  p_places text[] default null
) returns text
language plpgsql as $$
declare
  v_rows  text := pgque._rows_of_window_sql(p_sub.sub_queue, p_pos,
    pgque._slice_condition(p_sub.sub_id, p_pos.pos_done_id, p_pos.pos_last_id) || p_and, p_max, p_by_map, p_places);
begin
  if p_pos.pos_tick < p_pos.pos_high then
    v_rows := pg_catalog.format('select distinct on (e.ev_id) e.* from (%s) e order by e.ev_id, e.ev_txid desc', v_rows);
  end if;
  return v_rows;
end
$$;

-- Returns the id of the p_max-th of the rows of a position's window that satisfy
-- p_condition, if there are more: so a window can be cut into parts.  The rows of a window
-- are fixed, because each of its transactions had ended before its last tick.  So a part
-- is the same rows whenever it is read, and each row is in one part.  A part ends with all
-- rows of its last id: several bodies of a key may have the same id.
--
-- How many rows there are does not follow from the event sequences of the two ticks: a
-- transaction that ran across ticks drew its ids before the first of them.  So rows are
-- counted, as far as it matters.
create or replace function pgque._cut(p_queue_id int, p_pos pgque.position, p_condition text, p_max bigint) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_big     bigint := pgque._most_unmapped(p_max);
  v_by_map  boolean := pgque._is_mapped(p_queue_id, p_pos);
  v_count   bigint;
begin
  if not v_by_map then
    execute pg_catalog.format('select count(*) from (select from (%s) e limit %s) e', pgque._rows_of_window_sql(p_queue_id, p_pos, p_condition), v_big + 1)
    into v_count;
    if v_count <= p_max then
      return null;
    end if;
    v_by_map := v_count > v_big;
  end if;
  v_by_map := v_by_map and pg_catalog.current_setting('transaction_read_only') = 'off';   -- else by a map that is there
  return pgque._id_of_row(pgque._rows_of_window_sql(p_queue_id, p_pos, p_condition, case when v_by_map then p_max end, v_by_map), p_max);
end
$$;

-- Returns how many events a window has at most that is read as a whole for each batch of
-- p_max messages.  For a bigger one a map is worth its cost.
create or replace function pgque._most_unmapped(p_max bigint) returns bigint
language sql immutable as $$ select greatest(10 * p_max, 500) $$;

-- Returns whether a window is bigger than that.
create or replace function pgque._is_big(p_pos pgque.position, p_max bigint) returns boolean
language sql immutable as $$
  select coalesce(p_pos.pos_next_event_seq - p_pos.pos_event_seq > pgque._most_unmapped(p_max) and p_max is not null, false)
$$;

-- Returns how many events the next window of a consumer shall have.  Workers share a
-- window, so theirs is bigger than a batch.  It needs no map if its ticks allow that.
create or replace function pgque._span(p_max bigint, p_worker text) returns bigint
language sql immutable as $$
  select case when p_worker is null then p_max else least(greatest(p_max, 1000), pgque._most_unmapped(p_max)) end
$$;

-- Creates a queue's readers: functions whose text names the queue's tables, so that a
-- session plans them once.  Every queue always has those of this version, since they are
-- created together with the queue, again by each install, and when a queue that came out
-- of a dump is used first (_rebase).
--
-- _ticks_N: the furthest of the next 100 ticks before which no more than p_max events
-- were numbered, at least the next one.
--
-- _events_N: the first messages of a small window, p_limit at most, as they are
-- delivered.  As in _xids(), late are the transactions that ran at the
-- window's first tick and not at its last.
create or replace function pgque._create_reader(p_queue_id int, p_rights boolean default true) returns void
language plpgsql as $function$
declare
  v_events  text;
begin
  perform pgque._compile(pg_catalog.format(
    $template$
    create or replace function pgque._ticks_%1$s(p_tick bigint, p_event_seq bigint, p_max bigint) returns pgque.tick
    language plpgsql as $body$
    declare
      v_first  pgque.tick;
      v_tick   pgque.tick;
    begin
      -- The callers switch sequential scans off, for the plan that is kept.
      for v_tick in
        select t.*
        from (select * from pgque.tick_%1$s_0 union all select * from pgque.tick_%1$s_1 union all select * from pgque.tick_%1$s_2) t
        where t.tick_id > p_tick
        order by t.tick_id
        limit 100
      loop
        exit when v_tick.tick_event_seq > p_event_seq + p_max and v_first.tick_id is not null;
        v_first := v_tick;
      end loop;
      return v_first;
    end
    $body$
    $template$, p_queue_id));
  select pg_catalog.string_agg(pg_catalog.format(
    'select * from pgque.event_%s_%s e where %%1$s and (e.ev_owner is null or e.ev_owner = p_owner) and e.ev_id > p_after', p_queue_id, n), ' union all ')
  into v_events
  from pg_catalog.generate_series(0, 2) n;
  perform pgque._compile(pg_catalog.format(
    $template$
    create or replace function pgque._events_%s(
      p_from pg_snapshot, p_to pg_snapshot, p_owner int, p_after bigint, p_limit bigint, p_batch bigint, p_attempt int, p_queue text
    ) returns setof pgque.delivery
    language plpgsql set enable_seqscan = off set jit = off as $body$
    declare
      v_lo    xid8 := pg_catalog.pg_snapshot_xmax(p_from);
      v_end   xid8 := pg_catalog.pg_snapshot_xmax(p_to);
      v_late  xid8[];
    begin
      if pg_catalog.pg_snapshot_xmin(p_from) < v_lo then
        v_late := array(select x.xid from pg_catalog.pg_snapshot_xip(p_from) x (xid) where pg_catalog.pg_visible_in_snapshot(x.xid, p_to));
      end if;
      if pg_catalog.cardinality(v_late) > 0 then
        return query select %2$s from (%3$s union all %4$s) e order by e.ev_id limit p_limit;
      else
        return query select %2$s from (%3$s) e order by e.ev_id limit p_limit;
      end if;
    end
    $body$
    $template$, p_queue_id,
    'e.ev_id, p_batch, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time, e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4,'
      ' e.ev_headers, e.ev_key, e.ev_bytes, coalesce(e.ev_retry, 0) + p_attempt, e.ev_error, e.ev_expires, p_queue',
    pg_catalog.format(v_events, 'e.ev_txid >= v_lo and e.ev_txid < v_end and pg_catalog.pg_visible_in_snapshot(e.ev_txid, p_to)'),
    pg_catalog.format(v_events, 'e.ev_txid = any (v_late)')));
  perform pgque._create_ordinary(p_queue_id);
  perform pgque._create_key_reader(p_queue_id);
  if p_rights then
    perform pgque._set_rights(array(select r.func::oid from pgque._readers_of(p_queue_id) r (func)));
  end if;
end
$function$;

-- Creates a function of a queue, unless it is there with this text and these settings:
-- replacing a function takes a lock on it, and a server has no room for thousands.
create or replace function pgque._compile(p_sql text) returns void
language plpgsql as $$
declare
  v_head  text := pg_catalog.split_part(p_sql, '$body$', 1);
begin
  if not exists (
    select from pg_catalog.pg_proc p
    where p.pronamespace = 'pgque'::regnamespace and p.proname = pg_catalog.substring(v_head, 'pgque\.(\w+)')
      and p.prosrc = pg_catalog.split_part(p_sql, '$body$', 2)
      and coalesce(p.proconfig, '{}') = array(select m[1] || '=' || m[2] from pg_catalog.regexp_matches(v_head, 'set (\w+) = (\w+)', 'g') m))
  then
    execute p_sql;
  end if;
end
$$;

-- Returns the functions whose text names a queue's tables.
create or replace function pgque._readers_of(p_queue_id int) returns setof regprocedure
language sql stable as $$
  select p.oid::regprocedure
  from pg_catalog.pg_proc p
  where p.pronamespace = 'pgque'::regnamespace and p.proname = any (array[
    '_ticks_' || p_queue_id, '_events_' || p_queue_id, '_key_' || p_queue_id, '_ordinary_' || p_queue_id || '_0', '_ordinary_' || p_queue_id || '_1',
    '_mapped_' || p_queue_id || '_0', '_mapped_' || p_queue_id || '_1']::name[])
$$;

create or replace function pgque._event_columns() returns text
language sql stable as $$
  select 'e.ev_id, e.ev_time, e.ev_txid, e.ev_retry, e.ev_type, e.ev_data, e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4,'
    ' e.ev_headers, e.ev_key, e.ev_bytes, e.ev_expires, e.ev_error'::text
$$;
-- ---------------------------------------------------------------------------
-- position: where consumers stand
-- ---------------------------------------------------------------------------

-- Returns the newest row of a subscriber in one leaf.  Only this leaf is locked.  No
-- sequential scans: a plan made while the journal was short is kept while it grows.
create or replace function pgque._position_in(p_sub int, p_leaf int) returns pgque.position
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_position  pgque.position;
begin
  if p_leaf = 0 then
    select p.* into v_position from pgque.position_0 p where p.pos_sub = p_sub order by p.pos_seq desc limit 1;
  else
    select p.* into v_position from pgque.position_1 p where p.pos_sub = p_sub order by p.pos_seq desc limit 1;
  end if;
  return v_position;
end
$$;

-- Returns the newest row of a subscriber.  The current leaf is read first, and the
-- other one only if the current one has no row.  So the other leaf can be emptied while
-- consumers work.  A caller that will append holds the subscriber's row lock.
create or replace function pgque._position(p_sub int, p_leaf int default null) returns pgque.position
language plpgsql as $$
declare
  v_leaf      int := coalesce(p_leaf, pgque._journal_leaf());
  v_position  pgque.position;
begin
  -- Compaction may move the row from the second leaf to the first between the two
  -- reads.  Another read then finds it.
  for v_try in 1..10 loop
    v_position := pgque._position_in(p_sub, v_leaf);
    if v_position.pos_sub is null then
      v_position := pgque._position_in(p_sub, 1 - v_leaf);
    end if;
    if v_position.pos_sub is not null then
      return v_position;
    end if;
    v_leaf := pgque._journal_leaf();
  end loop;
  -- A snapshot that is older than a compaction sees the row in neither leaf.
  perform pgque._fail('serialization_failure', pg_catalog.format('the position of subscriber %s changed since this transaction began', p_sub),
    'Retry the transaction.');
end
$$;

-- Returns a position as a row of a leaf.
create or replace function pgque._in_leaf(p_position pgque.position, p_leaf int) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.leaf := p_leaf;
  return p_position;
end
$$;

-- Returns the leaf of the journal that is written.  A transaction with an old snapshot
-- locks the journal's row.  This keeps the journal from rotating, and fails with 40001
-- if it was rotated.  A read-only transaction needs no such lock.
create or replace function pgque._journal_leaf() returns int
language plpgsql as $$
declare
  v_leaf  int;
begin
  if not pgque._old_snapshot() or pg_catalog.current_setting('transaction_read_only') = 'on' then
    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1;
  else
    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1 for share;
  end if;
  return v_leaf;
end
$$;

-- Appends a position; the sequence number and the time are set here.  If the
-- transaction's snapshot does not show the newest row, the primary key stops it with
-- 40001.  So there is never a second newest row.  Such a transaction appends to both
-- leaves (see _leaves_for).  p_leaf is the current leaf, if the caller knows it.
create or replace function pgque._append_position(p_position pgque.position, p_leaf int default null) returns void
language plpgsql as $$
begin
  p_position.pos_seq := p_position.pos_seq + 1;
  p_position.pos_time := pgque.clock();
  p_position.leaf := coalesce(p_leaf, pgque._journal_leaf());
  insert into pgque.position select p_position.* on conflict do nothing;
  if found and pgque._old_snapshot() then
    p_position.leaf := 1 - p_position.leaf;
    insert into pgque.position select p_position.* on conflict do nothing;
  end if;
  if not found then
    perform pgque._fail('serialization_failure', pg_catalog.format('the position of subscriber %s changed since this transaction began', p_position.pos_sub),
      'Retry the transaction.');
  end if;
end
$$;

-- Copies a subscriber's newest row to a leaf, if it is not there.  The row is also the
-- record of the subscriber's batch: the lock of a pool's batch is taken too, so that an
-- ack that is not committed yet is not left behind.
create or replace function pgque._copy_position(p_position pgque.position, p_leaf int) returns void
language sql as $$
  insert into pgque.position
  select (pgque._in_leaf(p_position, p_leaf)).*
  from pgque.subscriber s
  where s.sub_id = p_position.pos_sub and (pgque._position_in(s.sub_id, p_leaf)).pos_sub is null
    and (p_position.pos_batch is null or pgque._try_lock_batches(s, array[p_position.pos_batch]) <> '{}')
  on conflict do nothing
$$;

-- Returns a batch id that was never issued before: the subscriber's low 20 bits under a
-- number that rises with the clock in quarters of a millisecond, and by at least one.
-- A counter alone is not enough: a crash, a failover or a restore can take back the
-- newest values of a counter, and an old batch id would then fit a new batch.
create or replace function pgque._new_batch_id(p_position pgque.position) returns bigint
language sql volatile as $$
  select (greatest(
      (p_position.pos_last_batch >> 20) + 1,
      ((extract(epoch from pg_catalog.clock_timestamp()) - 1735689600) * 4000)::bigint) << 20)
    | (p_position.pos_sub & 1048575)
$$;

-- Returns the position after a consumer's newest delivery.
create or replace function pgque._next_from(p_position pgque.position) returns pgque.position
language plpgsql immutable as $$
begin
  if p_position.pos_fresh > 0 then
    if p_position.pos_last_id is null then
      return pgque._past_window(p_position);
    end if;
    p_position.pos_done_id := p_position.pos_last_id;
    p_position.pos_last_id := null;
    p_position.pos_fresh := 0;
  end if;
  p_position.pos_batch := null;
  p_position.pos_shelf := 0;
  p_position.pos_keys := null;
  return p_position;
end
$$;

-- Returns from when on a delivery reads the retry queue.  Otherwise each query of the
-- messages that are due would pass the dead rows of all that were due before: while an old
-- transaction is open, vacuum cannot remove them.
--
-- The naive version remembers the time of the last query.  It loses messages:
--
--   session 1: nack, so that message 1 is due at 12:00:10; the transaction stays open
--   session 2: queries at 12:00:20 what is due, and finds nothing
--   session 1: commits
--   result:    message 1 is due before the last query, and no later query finds it
--
-- A query also misses a row if the clock is set back.  So a query begins a second before the one
-- before it, and after five seconds one query begins at the beginning again.  A message that
-- was committed more than a second after it was due waits for that query.
--
-- p_due begins where the next queries begin, and ends when one is to read everything.
create or replace function pgque._due_from(p_due tstzrange, p_now timestamptz) returns timestamptz
language sql immutable as $$ select case when p_due @> p_now then pg_catalog.lower(p_due) else '-infinity' end $$;

-- Returns p_due after a query at p_now, which found p_first as the first message that is
-- due; null: none.
create or replace function pgque._due_after(p_due tstzrange, p_now timestamptz, p_first timestamptz default null) returns tstzrange
language sql stable as $$
  select pg_catalog.tstzrange(least(p_first, p_now - interval '1 second'), case when p_due @> p_now then pg_catalog.upper(p_due) else p_now + interval '5 seconds' end)
$$;

-- Returns a position whose window ends at a tick.
create or replace function pgque._with_window(p_position pgque.position, p_tick pgque.tick) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.pos_next_tick := p_tick.tick_id;
  p_position.pos_next_snapshot := p_tick.tick_snapshot;
  p_position.pos_next_event_seq := p_tick.tick_event_seq;
  return p_position;
end
$$;

-- Returns a position at a tick, without a window and a batch of its own.
create or replace function pgque._at_tick(p_position pgque.position, p_tick pgque.tick) returns pgque.position
language sql immutable as $$ select pgque._past_window(pgque._with_window(p_position, p_tick)) $$;

-- Returns a position at the end of its window.
create or replace function pgque._past_window(p_position pgque.position) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.pos_tick := p_position.pos_next_tick;
  p_position.pos_snapshot := p_position.pos_next_snapshot;
  p_position.pos_event_seq := p_position.pos_next_event_seq;
  p_position.pos_next_tick := null;
  p_position.pos_next_snapshot := null;
  p_position.pos_next_event_seq := null;
  p_position.pos_done_id := null;
  p_position.pos_done_count := 0;
  p_position.pos_last_id := null;
  p_position.pos_batch := null;
  p_position.pos_fresh := 0;
  p_position.pos_shelf := 0;
  p_position.pos_keys := null;
  return p_position;
end
$$;

-- Opens the window that follows a position, up to the furthest of the next 100 ticks
-- before which no more than p_max events were numbered, and by at least one tick.  So a
-- consumer that lags by many small ticks gets full batches.  There is no window if
-- there is no further tick.
create or replace function pgque._open_window(p_position pgque.position, p_queue_id int, p_max bigint) returns pgque.position
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_name  text;
  v_tick  pgque.tick;
begin
  select q.queue_name into v_name from pgque.queue q where q.queue_id = p_queue_id;
  if not found then
    raise undefined_table;
  end if;
  execute 'select * from pgque._ticks_' || p_queue_id || '($1, $2, $3)' into v_tick using p_position.pos_tick, p_position.pos_event_seq, p_max;
  return case when v_tick.tick_id is null then p_position else pgque._with_window(p_position, v_tick) end;
exception
  when undefined_table or undefined_function then
    -- The queue was dropped meanwhile, or one of its tables or functions is missing.
    if pgque._old_snapshot() then
      perform pgque._fail('serialization_failure', 'the queue was dropped since this transaction began', 'Retry the transaction.');
    elsif not exists (select from pgque.queue q where q.queue_id = p_queue_id) then
      perform pgque._takes_nothing(p_queue_id);
    end if;
    perform pgque._fail(sqlstate, pg_catalog.format('queue %I: %s', v_name, sqlerrm),
      'If a function is missing, install this version of pgque again: it creates the functions of every queue.');
end
$$;
-- ---------------------------------------------------------------------------
-- lease: which batches are open, and which outcomes they have
-- ---------------------------------------------------------------------------

-- A delivery is one row in the journal of positions.  It records what was delivered, to
-- which worker, until when, and so where the next delivery begins.  That a batch is
-- closed, or that a message of it has its outcome, is a row in the journal of settled
-- messages.  So neither is updated, and workers need no row of their own: their names
-- may change at any time.
--
-- A consumer on its own is one worker without a name whose lease has no end.  A
-- subconsumer is a worker whose lease has no end either.
--
-- The log is for first deliveries.  A message that is redelivered (after an expired
-- lease, a nack or a release) is in the retry queue, and is leased from there.
-- ev_retry_after is when it may be delivered, ev_batch its last batch.  A delivery
-- overwrites ev_batch, and from then on the old batch id is no longer valid.  The
-- exception are consumers that are read by offsets: see _pump_owners().
--
-- Locks:
--   * Deliveries of one consumer lock the subscriber's row.
--   * Outcomes of a pool's batch lock the batch by an advisory lock on its id.  The
--     holder also has a shared lock for the queue, whose exclusive form locks all
--     batches of the queue.  Code that holds the subscriber's row only tries these
--     locks.
--   * All other batches have no lock of their own: the subscriber's row is locked.

-- Returns the consumer whose bits a batch id carries, or null.  A subconsumer's batch that
-- is open since 0.5 has the subconsumer's bits.
create or replace function pgque._batch_owner(p_batch bigint) returns pgque.subscriber
language plpgsql as $$
declare
  v_sub  pgque.subscriber;
begin
  select s.* into v_sub from pgque.subscriber s where (s.sub_id & 1048575) = (p_batch & 1048575)::int;
  if v_sub.sub_main is not null then
    select s.* into v_sub from pgque.subscriber s where s.sub_id = v_sub.sub_main;
  end if;
  return v_sub;
end
$$;

create or replace function pgque._no_batch(p_batch bigint) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ012', pg_catalog.format('batch not found: %s', coalesce(p_batch::text, 'null')),
    'Receive again. The batch was finished already, another worker took it over, or it never existed.');
end
$$;

-- Locks a batch for a call that gives outcomes or changes its lease.  Calls that lock
-- all batches of the queue wait meanwhile.  A batch that belongs to no pool is locked
-- with its consumer.  Returns false if the consumer no longer exists.  The caller reads
-- the batch's state in a later statement, which sees what the holder before it did.
create or replace function pgque._lock_batch(p_sub pgque.subscriber, p_batch bigint) returns boolean
language plpgsql as $$
begin
  if p_sub.sub_role = 'pool' then
    -- An expression, since a statement costs more.
    return pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtext('pgque.batches'), p_sub.sub_queue) is not null
      and pg_catalog.pg_advisory_xact_lock(p_batch) is not null;
  end if;
  perform from pgque.subscriber s where s.sub_id = p_sub.sub_id for no key update;
  return found;
end
$$;

-- Tries to lock many batches at once, and returns those that it locked: all of them
-- with one lock, or, if another session works with one of them, at most p_most of them
-- one by one; null: as many as half of the server's room for locks.  The caller holds
-- the consumer's lock.
create or replace function pgque._try_lock_batches(p_sub pgque.subscriber, p_batches bigint[], p_most int default 200) returns bigint[]
language plpgsql as $$
begin
  if p_sub.sub_role <> 'pool'
    or pg_catalog.cardinality(p_batches) > 3 and pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque.batches'), p_sub.sub_queue)
  then
    return p_batches;
  end if;
  return array(
    select b.id
    from pg_catalog.unnest(p_batches) with ordinality b (id, n)
    where b.n <= coalesce(p_most, (select pgque._lock_room() / 2)) and pg_catalog.pg_try_advisory_xact_lock(b.id)
    order by b.n);
end
$$;

-- Returns the delivery of a batch, or null.
create or replace function pgque._lease(p_sub int, p_batch bigint) returns pgque.position
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_position  pgque.position;
begin
  -- Both leaves in one statement: the row may move from one to the other.
  select p.* into v_position from pgque.position p where p.pos_batch = p_batch and p.pos_sub + 0 = p_sub limit 1;
  if not found and pgque._old_snapshot() then
    -- The snapshot may show the row in neither leaf: then this fails with 40001.
    perform pgque._journal_leaf();
  end if;
  return v_position;
end
$$;

-- Returns the state of batches that were delivered, in the order of the array:
--   * lease: the delivery
--   * place: where its messages without an outcome are: log, or retry for the retry
--     queue.  Null: the batch is closed.
--   * settled: how many of its messages have an outcome
--   * extended, until: how often its lease was extended, and when it ends
--   * lost: whether its worker got the answer that a message is lost
-- A batch keeps the place retry when its last message there was taken away: whether it
-- is open says _is_open().
create or replace function pgque._states(
  p_sub int, p_batches bigint[],
  out token bigint, out lease pgque.position, out place text, out settled bigint, out extended bigint, out until timestamptz, out lost boolean
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_count  int;
begin
  if pg_catalog.cardinality(p_batches) > 0 is not true then
    return;
  end if;
  return query
  -- Both leaves in one statement: a row may move from one to the other, and be in both.
  select b.id, l.row,
    case when w.closed then null when (l.row).pos_fresh > 0 and not w.moved then 'log' else 'retry' end,
    c.settled, c.extended, coalesce(c.until, (l.row).pos_until), w.lost
  from pg_catalog.unnest(p_batches) with ordinality b (id, n)
  cross join lateral (select p as row from pgque.position p where p.pos_batch = b.id and p.pos_sub + 0 = p_sub limit 1) l
  cross join lateral (
    select coalesce(bool_or(s.set_what = 'closed'), false) as closed, coalesce(bool_or(s.set_what = 'moved'), false) as moved, coalesce(bool_or(s.set_what = 'lost'), false) as lost
    from pgque.settled s
    where s.set_batch = b.id and s.set_ev_id = 0
  ) w
  -- A row for each message that has an outcome: of a closed batch they are not read.
  cross join lateral (
    select count(distinct s.set_ev_id) filter (where s.set_what = 'outcome') as settled, coalesce(max(s.set_ev_id) filter (where s.set_what = 'extended'), 0) as extended, max(s.set_until) as until
    from pgque.settled s
    where s.set_batch = b.id and s.set_ev_id > 0 and not w.closed
  ) c
  order by b.n;
  get diagnostics v_count = row_count;
  if v_count < pg_catalog.cardinality(p_batches) and pgque._old_snapshot() then
    -- The snapshot may show a delivery in neither leaf: then this fails with 40001.
    perform pgque._journal_leaf();
  end if;
end
$$;

-- Returns the batches of a list that are still open.  Of a pool, those that it has to
-- find by its position: the others are found by their messages in the retry queue.
create or replace function pgque._still_open(p_sub pgque.subscriber, p_batches bigint[]) returns bigint[]
language sql as $$
  select array(select s.token from pgque._states(p_sub.sub_id, p_batches) s where s.place = 'log' or s.place = 'retry' and p_sub.sub_role <> 'pool')
$$;

-- Records something about a batch: about messages, or about all of it (see
-- pgque.settled).  Returns the ids that were new, sorted; null if there is none.  A
-- transaction with an old snapshot writes to both leaves, and gets 40001 if a row that it
-- does not see is there.
create or replace function pgque._record(
  p_batch bigint, p_what pgque.settled_what, p_ids bigint[] default '{0}', p_until timestamptz default null, p_leaf int default null
) returns bigint[]
language plpgsql as $$
declare
  v_leaves  int[] := pgque._leaves_for(coalesce(p_leaf, pgque._journal_leaf()));
  v_new     bigint[];
begin
  if pg_catalog.cardinality(p_ids) * pg_catalog.cardinality(v_leaves) = 1 then
    insert into pgque.settled (set_batch, set_what, set_ev_id, set_until, leaf) values (p_batch, p_what, p_ids[1], p_until, v_leaves[1]) on conflict do nothing;
    return case when found then p_ids end;
  end if;
  with new as (
    insert into pgque.settled (set_batch, set_what, set_ev_id, set_until, leaf)
    select p_batch, p_what, i.id, p_until, l.leaf
    from pg_catalog.unnest(p_ids) i (id)
    cross join pg_catalog.unnest(v_leaves) l (leaf)
    on conflict do nothing
    returning set_ev_id
  )
  select pg_catalog.array_agg(g.id order by g.id) into v_new
  from (select n.set_ev_id as id from new n group by 1 having count(*) = pg_catalog.cardinality(v_leaves)) g;
  return v_new;
end
$$;

-- Returns the open batches of a consumer whose messages are in the log.
create or replace function pgque._open_batches(p_sub int, out token bigint, out lease pgque.position, out settled bigint, out until timestamptz)
returns setof record
language sql as $$
  select s.token, s.lease, s.settled, s.until from pgque._states(p_sub, (pgque._position(p_sub)).pos_open) s where s.place = 'log'
$$;

-- Returns the open batches of a consumer whose lease expired and whose messages nobody
-- received since.
create or replace function pgque._expired_batches(p_sub int, p_pos pgque.position, out token bigint, out lease pgque.position, out settled bigint, out until timestamptz)
returns setof record
language plpgsql as $$
begin
  -- No batch is read before the first lease may have expired.
  if p_pos.pos_lapse <= pgque.clock() then
    return query select h.* from pgque._open_batches(p_sub) h where h.until <= pgque.clock();
  end if;
end
$$;

-- Returns the open batch of a consumer that reads on its own, or of a subconsumer: it
-- is redelivered.  The batch is open until it is finished, even if each of its messages
-- has its outcome.  p_leaf is the current leaf.  If it has the delivery, it has the
-- outcomes too, and the other leaf, which may be about to be emptied, is not read.
create or replace function pgque._open_batch_of(p_sub pgque.subscriber, p_pos pgque.position, p_worker text, p_leaf int default null) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_closed  boolean;
begin
  if p_sub.sub_role = 'pool' or pg_catalog.cardinality(p_pos.pos_open) > 0 is not true then
    return null;
  elsif p_worker is null and p_pos.leaf = p_leaf and p_pos.pos_open = array[p_pos.pos_batch] then
    if p_leaf = 0 then
      v_closed := exists (select from pgque.settled_0 s where s.set_batch = p_pos.pos_batch and s.set_ev_id = 0 and s.set_what = 'closed');
    else
      v_closed := exists (select from pgque.settled_1 s where s.set_batch = p_pos.pos_batch and s.set_ev_id = 0 and s.set_what = 'closed');
    end if;
    return case when not v_closed then p_pos.pos_batch end;
  end if;
  -- One statement for all: a list of a consumer with subconsumers has up to 64 batches
  -- that are closed.
  return (
    select s.token from pgque._states(p_sub.sub_id, p_pos.pos_open) s
    where s.place is not null and (p_worker is null or (s.lease).pos_worker = p_worker)
    limit 1);
end
$$;

-- Returns where a consumer stands: before its open batch if it reads on its own, else
-- after the newest delivery.
create or replace function pgque._current_position(p_sub pgque.subscriber, p_pos pgque.position) returns pgque.position
language plpgsql as $$
begin
  if p_sub.sub_role = 'normal' and p_pos.pos_batch is not null and pgque._open_batch_of(p_sub, p_pos, null) = p_pos.pos_batch then
    return p_pos;
  end if;
  return pgque._next_from(p_pos);
end
$$;

-- Returns the position from which on a subscriber needs messages: its own, or that of
-- the oldest of its open batches.  A subscriber that received all of a window has
-- passed it, even before its next call.
create or replace function pgque._oldest_needed_position(p_sub int) returns pgque.position
language plpgsql as $$
declare
  v_pos    pgque.position := pgque._next_from(pgque._position(p_sub));
  v_lease  pgque.position;
begin
  if pg_catalog.cardinality(v_pos.pos_open) > 0 then
    select (h.lease).* into v_lease
    from pgque._open_batches(p_sub) h
    where (h.lease).pos_tick < v_pos.pos_tick
    order by (h.lease).pos_tick
    limit 1;
    if found then
      return v_lease;
    end if;
  end if;
  return v_pos;
end
$$;

-- Returns the condition that a row e has its outcome in a batch.  It is a probe of the
-- index: EXISTS lets the planner compare each row with all outcomes of the batch.  Null for
-- no batch.
create or replace function pgque._has_outcome_sql(p_batch bigint) returns text
language sql immutable strict as $$
  select pg_catalog.format(
    '(select s.set_batch from pgque.settled s where s.set_batch = %s and s.set_ev_id = e.ev_id and s.set_what = ''outcome'' limit 1) is not null', p_batch)
$$;

-- Returns a query for the rows of a batch that came from the log and have no outcome.
create or replace function pgque._unsettled_sql(p_sub pgque.subscriber, p_lease pgque.position, p_and text default '', p_places text[] default null) returns text
language sql as $$
  select pgque._slice_sql(p_sub, p_lease, p_and || ' and not (' || pgque._has_outcome_sql(p_lease.pos_batch) || ')', p_places => p_places)
$$;

-- Returns whether a worker's batch in the retry queue still has all of its messages,
-- apart from those that were settled one by one.  It has not if some of them were
-- delivered to another worker or removed, or are just being taken.  Locks those messages.
-- The caller holds the batch's lock.
create or replace function pgque._has_all_messages(p_sub int, p_batch bigint) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_state    record;
  v_waiting  bigint;
begin
  select s.* into v_state from pgque._states(p_sub, array[p_batch]) s;
  if v_state.place = 'log' or (select s.sub_role from pgque.subscriber s where s.sub_id = p_sub) <> 'pool' then
    return true;   -- no other worker can have a part of it
  end if;
  select count(*) into v_waiting
  from (
    select from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_batch = p_batch order by r.ev_id for update skip locked
  ) r;
  return not v_state.lost
    and v_waiting >= case when (v_state.lease).pos_fresh > 0 then (v_state.lease).pos_done_count else (v_state.lease).pos_shelf end - v_state.settled;
end
$$;

-- Acknowledges a whole batch.  Returns 0 if it is not open, or not whole.
--
-- To record that the batch is closed is not enough: its messages may be in the retry
-- queue, and would be delivered to others.  And a worker's batch there may have been
-- delivered to others in part: to acknowledge the rest would tell its worker that all is
-- done.  Such a batch has nothing that could be closed: it is open as long as messages
-- wait under its id.
create or replace function pgque._close(p_sub pgque.subscriber, p_batch bigint) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_place  text;
begin
  if not pgque._lock_batch(p_sub, p_batch) then
    return 0;
  end if;
  select s.place into v_place from pgque._states(p_sub.sub_id, array[p_batch]) s;
  if v_place is null or not pgque._has_all_messages(p_sub.sub_id, p_batch) then
    return 0;
  end if;
  delete from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch;
  if p_sub.sub_role = 'pool' and v_place = 'retry' then
    return found::int;
  end if;
  if pgque._old_snapshot() then
    -- This snapshot may not see that the batch was moved: the primary key finds it out.
    perform pgque._record(p_batch, 'moved');
  end if;
  return (pgque._record(p_batch, 'closed') is not null)::int;
end
$$;

-- Moves the messages of a batch that have no outcome from the log to the retry queue,
-- under the same batch id.  They may be delivered from p_due on.  With p_token they get
-- another batch id and worker instead, or none if it is 0, with p_deliveries more
-- deliveries.  Returns how many there are.  The caller holds the batch's lock.
create or replace function pgque._move_to_retry(
  p_sub pgque.subscriber, p_lease pgque.position, p_due timestamptz, p_token bigint default null, p_worker text default null, p_deliveries int default 0
) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_token  bigint := nullif(coalesce(p_token, p_lease.pos_batch), 0);
  v_rows   text := pgque._renewed_sql(p_sub.sub_queue, pgque._unsettled_sql(p_sub, p_lease));
  v_ids    bigint[];
begin
  execute pg_catalog.format(
    'with moved as ('
    'insert into pgque.retry_queue select (pgque._as_retry(e, $1, coalesce(e.ev_retry, 0) + 1 + $5, $2, $3, $4)).* from (%s) e'
    -- If the consumer was moved back, the message may already be in the retry queue.
    -- Then this batch takes it over from the one that has it there.
    ' on conflict (ev_owner, ev_id, ev_queue) do update'
    ' set (ev_retry_after, ev_receives, ev_batch, ev_worker) = (excluded.ev_retry_after, excluded.ev_receives, excluded.ev_batch, excluded.ev_worker)'
    ' returning ev_id) select pg_catalog.array_agg(m.ev_id) from moved m', v_rows)
  into v_ids
  using p_sub, p_due, v_token, case when v_token is not null then coalesce(p_worker, p_lease.pos_worker) end, p_deliveries;
  if pgque._old_snapshot() then
    -- This snapshot may not see that the batch was closed, or that a message has its
    -- outcome: the primary key finds it out.  The rows for this check are undone.
    begin
      perform pgque._record(p_lease.pos_batch, 'closed'), pgque._record(p_lease.pos_batch, 'outcome', v_ids);
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
    end;
  end if;
  perform pgque._record(p_lease.pos_batch, 'moved');
  return coalesce(pg_catalog.cardinality(v_ids), 0);
end
$$;

-- Checks every batch of a consumer that may be open.  If the lease expired, messages
-- without an outcome go to the retry queue and may be delivered at once.  Until one is
-- delivered, the old batch id stays valid.  A batch that its worker is just finishing
-- counts as alive.
create or replace function pgque._collect_expired(p_sub pgque.subscriber, p_pos pgque.position, p_now timestamptz) returns pgque.position
language plpgsql as $$
declare
  v_open   bigint[] := '{}';
  v_lapse  timestamptz;
  v_tried  int := 0;
  v_held   record;
  v_state  record;
begin
  for v_held in select h.token, h.lease, h.until from pgque._open_batches(p_sub.sub_id) h loop
    if v_held.until <= p_now and v_tried < 200 then
      -- The server has room for some thousand locks.  The next call continues.
      v_tried := v_tried + 1;
      if pgque._try_lock_batches(p_sub, array[v_held.token]) <> '{}' then
        select s.place, s.until into v_state from pgque._states(p_sub.sub_id, array[v_held.token]) s;
        continue when v_state.place is distinct from 'log';
        v_held.until := v_state.until;
        if v_held.until <= p_now then
          perform pgque._move_to_retry(p_sub, v_held.lease, p_now);
          continue;
        end if;
      else
        v_held.until := p_now + interval '1 second';
      end if;
    end if;
    v_open := v_open || v_held.token;
    v_lapse := least(v_lapse, v_held.until);
  end loop;
  if p_sub.sub_role <> 'pool' then
    v_open := pgque._still_open(p_sub, p_pos.pos_open);   -- with those from the retry queue, which are redelivered
  end if;
  p_pos.pos_open := v_open;
  p_pos.pos_prune := 2 * pg_catalog.cardinality(v_open) + 64;
  p_pos.pos_lapse := v_lapse;
  return p_pos;
end
$$;

-- Copies the open batches of a consumer to the current leaf, if its newest position is
-- there: the first row that a reader finds there is the position.  The caller holds the
-- subscriber's lock, so there are no new ones.  The newest is the first: its delivery may be
-- in that leaf already, as the position, and whoever finds it there looks there for its
-- outcomes (see _done_0).
create or replace function pgque._copy_leases(p_sub pgque.subscriber, p_cur int) returns void
language plpgsql as $$
declare
  v_token  bigint;
begin
  if (pgque._position_in(p_sub.sub_id, p_cur)).pos_sub is null then
    return;
  end if;
  foreach v_token in array pgque._try_lock_batches(p_sub, array(
    select o.token
    from pg_catalog.unnest((pgque._position(p_sub.sub_id)).pos_open) o (token)
    where not pgque._is_copied(p_sub.sub_id, o.token, p_cur)
    order by o.token desc), 500)
  loop
    insert into pgque.position
    select (pgque._in_leaf(l, p_cur)).* from pgque._lease(p_sub.sub_id, v_token) l where l.pos_sub is not null
    on conflict do nothing;
    insert into pgque.settled (set_batch, set_what, set_ev_id, set_until, leaf)
    select s.set_batch, s.set_what, s.set_ev_id, s.set_until, p_cur from pgque.settled s where s.set_batch = v_token
    on conflict do nothing;
  end loop;
end
$$;

-- Returns whether a leaf has all rows of a batch, or none is needed.
create or replace function pgque._is_copied(p_sub int, p_batch bigint, p_cur int) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_there  boolean := exists (select from pgque.position p where p.pos_batch = p_batch and p.pos_sub + 0 = p_sub and p.leaf = p_cur);
  v_place  text;
begin
  select s.place into v_place from pgque._states(p_sub, array[p_batch]) s;
  if not found then
    return true;
  elsif v_place is null then
    -- The row that closes a batch must be in each leaf that has its delivery.
    return not v_there or exists (select from pgque.settled s where s.set_batch = p_batch and s.set_ev_id = 0 and s.set_what = 'closed' and s.leaf = p_cur);
  end if;
  return v_there
    and not exists (
      select s.set_what, s.set_ev_id from pgque.settled s where s.set_batch = p_batch and s.leaf <> p_cur
      except
      select s.set_what, s.set_ev_id from pgque.settled s where s.set_batch = p_batch and s.leaf = p_cur);
end
$$;

-- Returns whether a batch is open.  A worker's batch in the retry queue is, as long as it
-- has a message there; any other, until it is finished.
create or replace function pgque._is_open(p_sub pgque.subscriber, p_batch bigint) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return exists (
    select from pgque._states(p_sub.sub_id, array[p_batch]) s
    where s.place = 'log' or s.place = 'retry' and (p_sub.sub_role <> 'pool' or exists (
      select from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch)));
end
$$;
-- ---------------------------------------------------------------------------
-- subscribe: consumers of a queue
-- ---------------------------------------------------------------------------

-- Returns the row of a consumer by name.  The server inlines it.  OFFSET 0 fixes the
-- order of the joins, so that the name is looked up first: without statistics the
-- planner would read all subscribers of the queue.
create or replace function pgque._subscriber_by_name(p_queue_id int, p_consumer text) returns setof pgque.subscriber
language sql stable as $$
  select s.*
  from (select c.co_id from pgque.consumer c where c.co_queue in (0, p_queue_id) and c.co_name = p_consumer collate pg_catalog."default" offset 0) c
  cross join lateral (select s.* from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_consumer = c.co_id and s.sub_main is null offset 0) s
$$;

-- Returns the subscriber for a queue and a consumer, without a lock.  Raises PQ001 or
-- PQ011 if there is none.
create or replace function pgque._subscriber(p_queue text, p_consumer text, p_caller name default current_user) returns pgque.subscriber
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_found  record;
  v_queue  pgque.queue;
begin
  select s as sub, q.queue_restored into v_found
  from pgque.queue q
  cross join lateral pgque._subscriber_by_name(q.queue_id, p_consumer) s
  where q.queue_name = p_queue collate pg_catalog."default"
    and (p_caller = current_user collate pg_catalog."C" or pg_catalog.pg_has_role(p_caller, 'pgque_reader', 'usage') or pgque._may(p_caller, 'consume', q.queue_id));
  if not found then
    -- p_queue is a queue_uid, or the queue has got this name since that query began.  The
    -- next query finds the queue by its id, because the queue may have another name by then.
    v_queue := pgque._queue(p_queue, p_caller, 'consume');
    select s as sub, v_queue.queue_restored into v_found from pgque._subscriber_by_name(v_queue.queue_id, p_consumer) s;
    if not found then
      perform pgque._fail('PQ011', pg_catalog.format('not subscriber to queue: %s/%s', pg_catalog.quote_ident(p_queue), coalesce(pg_catalog.quote_ident(p_consumer), 'null')),
        'Subscribe it first: select pgque.subscribe(queue, consumer);');
    end if;
  end if;
  if v_found.queue_restored then
    perform pgque._need_loaded(q) from pgque.queue q where q.queue_id = (v_found.sub).sub_queue;
  end if;
  return v_found.sub;
end
$$;

-- Locks a subscriber against its own other calls and returns its role.  A transaction
-- with an old snapshot that does not show a change since fails with 40001.
create or replace function pgque._lock_subscriber(p_sub int) returns text
language plpgsql as $$
declare
  v_role  text;
begin
  select s.sub_role into v_role from pgque.subscriber s where s.sub_id = p_sub for no key update;
  if not found then
    perform pgque._fail('PQ011', 'not subscriber to queue: the consumer was unsubscribed while this call waited', 'Subscribe the consumer again.');
  end if;
  return v_role;
end
$$;

-- Locks a subscriber as _lock_subscriber() does, and returns its position.
create or replace function pgque._lock_position(p_sub int) returns pgque.position
language plpgsql as $$
begin
  perform pgque._lock_subscriber(p_sub);
  return pgque._position(p_sub);
end
$$;

-- Returns the tick for start_at: latest, earliest, a tick id, or a time (the last tick
-- before it).
create or replace function pgque._find_tick(p_queue pgque.queue, p_start_at text) returns pgque.tick
language plpgsql as $$
declare
  v_tick   pgque.tick;
  v_ticks  text := pgque._ticks_sql(p_queue.queue_id);
begin
  if p_start_at is null then
    null;
  elsif p_start_at = 'latest' then
    v_tick := pgque._last_tick(p_queue);
  elsif p_start_at = 'earliest' then
    execute pg_catalog.format('select t.* from (%s) t order by t.tick_id limit 1', v_ticks) into v_tick;
  elsif p_start_at ~ '^[0-9]{1,19}$' then
    v_tick := pgque._tick(p_queue.queue_id, p_start_at::bigint);
  else
    execute pg_catalog.format('select t.* from (%s) t order by t.tick_time > $1, abs(extract(epoch from t.tick_time - $1)), t.tick_id desc limit 1', v_ticks)
    into v_tick using p_start_at::timestamptz;
  end if;
  if v_tick.tick_id is not null then
    return v_tick;
  end if;
  perform pgque._no_queue(p_queue.queue_name) where not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id);   -- it was dropped meanwhile
  perform pgque._fail('PQ005', pg_catalog.format('queue %I has no tick %s', p_queue.queue_name, coalesce(p_start_at, 'null')),
    'Start at latest, earliest, the id of a stored tick, or a timestamp.');
exception
  when data_exception then
    perform pgque._fail('PQ005', pg_catalog.format('cannot start at %L on queue %I', p_start_at, p_queue.queue_name),
      'Start at latest, earliest, the id of a stored tick, or a timestamp.');
end
$$;

-- Adds a subscriber row with its first position.  The low 20 bits of its id are unique.
-- After 2^31 numbers the sequence begins again: a number whose earlier subscriber left
-- positions or retries is skipped.
create or replace function pgque._add_subscriber(
  p_queue_id int, p_consumer int, p_role text, p_main int, p_worker text, p_tick pgque.tick, p_caller name
) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_seq       regclass := pg_catalog.pg_get_serial_sequence('pgque.subscriber', 'sub_id');
  v_position  pgque.position;
  v_id        int;
begin
  perform pgque._need_queue(p_queue_id);
  perform pgque._need_place(p_queue_id, p_caller);
  for v_try in 0..2097152 loop
    v_id := pg_catalog.nextval(v_seq);
    if not exists (select from pgque.subscriber s where (s.sub_id & 1048575) = (v_id & 1048575))
      and not exists (select from pgque.position p where p.pos_sub = v_id)
      and not exists (select from pgque.retry_queue r where r.ev_owner = v_id)
    then
      insert into pgque.subscriber (sub_id, sub_queue, sub_consumer, sub_role, sub_main, sub_worker, sub_archived)
      values (v_id, p_queue_id, p_consumer, p_role, p_main, p_worker,
        p_main is null and (select q.queue_archive_on_ack from pgque.queue q where q.queue_id = p_queue_id))
      on conflict ((sub_id & 1048575)) do nothing
      returning sub_id into v_position.pos_sub;
      exit when found;
    end if;
    if v_try % 65536 = 0 and (select pg_catalog.count(*) from pgque.subscriber) >= 1048576 then
      exit;
    end if;
  end loop;
  if v_position.pos_sub is null then
    perform pgque._fail('program_limit_exceeded', 'all 1048576 numbers of subscribers are taken',
      'Unsubscribe consumers and subconsumers that are not in use: select queue_name, consumer_name, last_seen from pgque.get_consumer_info() order by last_seen desc;');
  end if;
  v_position.pos_seq := 0;
  v_position.pos_last_batch := 0;
  v_position.pos_skipped := 0;
  if pgque._noted(p_queue_id, '{cancelled}') or pgque._old_snapshot() then
    v_position.pos_high := pgque._tick_after_now(p_queue_id);   -- see "cancel"
  end if;
  perform pgque._append_position(pgque._at_tick(v_position, p_tick));
  return v_position.pos_sub;
end
$$;

-- Limits a role that has a right to this queue only to the queue's max_consumers: PQ003
-- if there are that many.  These roles subscribe to a queue one after the other, in a
-- transaction whose snapshot shows all consumers.
create or replace function pgque._need_place(p_queue_id int, p_caller name) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue;
  v_count  bigint;
begin
  if pgque._may(p_caller, 'consume', null) then
    return;
  end if;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  if v_queue.queue_max_consumers = 0 then
    return;
  end if;
  perform pgque._need_read_committed('a new consumer of a role with a right to one queue');
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.subscribe'), p_queue_id);
  select pg_catalog.count(*) into v_count
  from (select from pgque.subscriber s where s.sub_queue = p_queue_id limit v_queue.queue_max_consumers) s;
  if v_count >= v_queue.queue_max_consumers then
    perform pgque._fail('PQ003', pg_catalog.format('queue %I has max_consumers consumers', v_queue.queue_name),
      pg_catalog.format('Unsubscribe consumers that are not in use. Or a member of pgque_admin raises the limit: select pgque.alter_queue(%L, ''{"max_consumers": %s}'');',
        v_queue.queue_name, 2 * v_queue.queue_max_consumers::bigint),
      pg_catalog.format('max_consumers is %s; subconsumers count too.', v_queue.queue_max_consumers));
  end if;
end
$$;

create or replace function pgque.subscribe(
  queue_name text, consumer_name text, start_at text default 'latest', keyed_order boolean default false, key_concurrency int default null,
  caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_new    int := pgque._subscribe($1, $2, 'normal', $3, caller);
  v_limit  int := pgque._need_key_concurrency($1, $2, $5, $4);
begin
  if v_limit is not null then
    perform pgque._subscribe_keyed($1, $2, v_new = 1, v_limit, caller);
  end if;
  perform pgque._record_action('subscribe', $1, jsonb_build_object('consumer_name', $2, 'start_at', $3, 'key_concurrency', v_limit)) where v_new = 1;
  return v_new;
end
$$;
comment on function pgque.subscribe(text, text, text, boolean, int, pgque.caller) is
  'Subscribes a consumer to a queue and returns 1. Returns 0 if the consumer was subscribed already; its position stays. start_at: latest (messages '
  'after the newest tick), earliest (all that are still stored), the id of a tick, or a timestamp (the last tick before it, else earliest). '
  'keyed_order: workers get the messages of one key (partition_key for messages without key) one at a time, in order. key_concurrency: workers get '
  'at most this many messages of one key at a time; 1 is keyed_order. Errors: PQ001 no such queue; PQ003 the role has a right to this queue only, '
  'and the queue has max_consumers consumers; PQ004 the name is empty or longer than 1000 bytes; PQ005 no such start_at, or key_concurrency is below '
  '1, or above 1 with keyed_order; PQ006 the consumer is subscribed with another key_concurrency; 25000 the role has a right to this '
  'queue only, and the transaction is not READ COMMITTED.';

create or replace function pgque._subscribe(p_queue text, p_consumer text, p_role text, p_start_at text, p_caller name) returns int
language plpgsql as $$
declare
  v_queue  pgque.queue;
  v_co     int;
begin
  v_queue := pgque._queue(p_queue, p_caller, 'consume');
  v_co := pgque._consumer(p_consumer, v_queue.queue_id);
  if exists (select from pgque.subscriber s where s.sub_queue = v_queue.queue_id and s.sub_consumer = v_co and s.sub_main is null) then
    return 0;
  end if;
  perform pgque._wait_for_keyed_sends(v_queue);
  -- The lock keeps rotation from emptying the table of this tick.
  select q.* into v_queue from pgque.queue q where q.queue_id = v_queue.queue_id for share;
  if not found then
    perform pgque._no_queue(p_queue);
  end if;
  perform pgque._rebase(v_queue.queue_id);
  perform pgque._depth_grows(v_queue.queue_id);
  perform pgque._add_subscriber(v_queue.queue_id, v_co, p_role, null, null, pgque._find_tick(v_queue, p_start_at), p_caller);
  return 1;
exception
  when unique_violation then
    return 0;
end
$$;

-- Returns the id of the name of a queue's consumer, and stores the name if it is new.
create or replace function pgque._consumer(p_consumer text, p_queue_id int) returns int
language plpgsql as $$
declare
  v_id  int;
begin
  if coalesce(p_consumer, '') = '' or pg_catalog.octet_length(p_consumer) > 1000 then
    perform pgque._fail('PQ004', pg_catalog.format('invalid consumer name for queue %I', (select q.queue_name from pgque.queue q where q.queue_id = p_queue_id)),
      'A consumer name has 1 to 1000 bytes; any character is allowed.');
  end if;
  for v_try in 1..2 loop
    select c.co_id into v_id
    from pgque.consumer c
    where c.co_queue in (0, p_queue_id) and c.co_name = p_consumer collate pg_catalog."default"
    order by c.co_queue
    limit 1;
    exit when found;
    insert into pgque.consumer (co_name, co_queue) values (p_consumer, p_queue_id) on conflict (co_queue, co_name) do nothing;
  end loop;
  return v_id;
end
$$;

-- Moves a consumer to a tick.  One on its own drops its open batch; workers keep theirs.
-- The archive lacks the messages that the consumer is moved past.
create or replace function pgque._move_to(p_sub pgque.subscriber, p_position pgque.position, p_tick pgque.tick) returns void
language plpgsql as $$
begin
  if p_sub.sub_role = 'normal' then
    perform pgque._drop_batch(p_sub, o.token) from pg_catalog.unnest(p_position.pos_open) o (token);
    p_position.pos_open := '{}';
  end if;
  update pgque.subscriber s set sub_archived = s.sub_archived and p_tick.tick_id <= p_position.pos_tick, sub_history = null
  where s.sub_id = p_sub.sub_id and (s.sub_archived and p_tick.tick_id > p_position.pos_tick or s.sub_history is not null);
  p_position.pos_high := greatest(p_position.pos_high, p_position.pos_tick, p_position.pos_next_tick);
  perform pgque._append_position(pgque._at_tick(p_position, p_tick));
end
$$;

-- Takes a batch from its worker.  Its messages from the log are passed, and those from
-- the retry queue are released.
create or replace function pgque._drop_batch(p_sub pgque.subscriber, p_batch bigint) returns void
language plpgsql as $$
begin
  perform pgque._record(p_batch, 'closed');
  perform pgque._release_batch(p_sub, p_batch);
end
$$;

-- Deletes the positions of former consumers once the last consumer is unsubscribed: in a
-- dump, positions without consumers show that the consumers are not loaded yet (_lacks).
create or replace function pgque._delete_positions() returns void
language sql as $$
  delete from pgque.position where not exists (select from pgque.subscriber)
$$;

create or replace function pgque.unsubscribe(queue_name text, consumer_name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(unsubscribe.queue_name, caller, 'consume');
  v_main   int;
  v_count  int;
  v_rows   int;
begin
  select s.sub_id into v_main
  from pgque.subscriber s
  join pgque.consumer c on c.co_id = s.sub_consumer
  where s.sub_queue = v_queue.queue_id and c.co_name = unsubscribe.consumer_name collate "default" and s.sub_main is null
  for update of s;
  if not found then
    return 0;
  end if;
  delete from pgque.subscriber s where s.sub_main = v_main;
  get diagnostics v_count = row_count;
  -- Maintenance deletes rows that this snapshot does not show.
  delete from pgque.retry_queue r where r.ev_owner = v_main;
  delete from pgque.subscriber s where s.sub_id = v_main;
  get diagnostics v_rows = row_count;
  perform pgque._delete_positions();
  perform pgque._record_action('unsubscribe', v_queue.queue_name, jsonb_build_object('consumer_name', unsubscribe.consumer_name)) where v_rows > 0;
  return v_count + v_rows;
end
$$;
comment on function pgque.unsubscribe(text, text, pgque.caller) is
  'Removes a consumer from a queue with its workers and its pending retries; its dead letters stay. Returns the number of subscribers removed, 0 if '
  'the consumer was not subscribed. Errors: PQ001 no such queue.';

-- Returns a consumer's name; for a worker consumer.worker.
create or replace function pgque._subscriber_name(p_sub pgque.subscriber) returns text
language plpgsql stable as $$
begin
  return (select c.co_name || coalesce('.' || p_sub.sub_worker, '') from pgque.consumer c where c.co_id = p_sub.sub_consumer);
end
$$;
-- ---------------------------------------------------------------------------
-- ordinary: the usual delivery in one statement
-- ---------------------------------------------------------------------------

-- Most deliveries need none of what makes receive() long: the consumer has received its
-- last batch, nothing waits for it in the retry queue, and no option of the queue chooses
-- from its messages.  These deliveries are ordinary.  receive() then runs three statements:
--   1. _poll_L finds the consumer, and locks it if an ordinary delivery may follow.  If
--      there is nothing to do, it locks nothing, and the call ends.
--   2. a dynamic statement calls _ordinary_N_L, or _mapped_N_L if the consumer is in a
--      window that is read by its map (see _map_window).
--   3. In that function, one statement reads the position, opens the window, reads the
--      messages, and stores the new position.
-- L is the leaf of the journal that is written, N the queue.  The text of these functions
-- is fixed, so a session plans them once.
--
-- If a delivery is not ordinary, these statements change nothing, and receive() goes the
-- general way.  _ordinary_sql() and the conditions of statement 3 say what is ordinary.
--
-- Why the consumer is locked by a statement before the one that delivers: a statement
-- that waited for a lock reads its tables as they were before, and would deliver what
-- another worker has just received.  So statement 3 also checks again which leaf is
-- written.  Each function uses this leaf only: a session that used the other one would
-- keep it from being emptied.
--
-- Why probes are scalar subqueries with a limit: EXISTS in their place lets the planner read
-- the rows of all consumers into a hash table.
--
-- Why FROM has commas in place of JOIN: a plan of a session keeps a list of all columns for
-- each JOIN.  That made a third of its memory.
--
-- Why bitmap scans are off: a plan that is made while the journal has two rows of a consumer
-- would sort them, and a session keeps the plan while they become thousands.

-- Returns whether this transaction may take the ordinary way, in a receive() and in an ack().
-- Tests switch it off: set pgque.ordinary = off.
create or replace function pgque._may_be_ordinary() returns boolean
language sql stable as $$
  select not pgque._old_snapshot() and coalesce(pg_catalog.current_setting('pgque.ordinary', true), '') <> 'off'
$$;

-- Returns the newest position of a subscriber in a leaf, as a query; no row if another leaf
-- is written.
--   * tick, fresh: where the next window begins, and whether it is a new one
--   * open: batches that may be open, without the newest one if that is closed
--   * p_more: more columns of p
create or replace function pgque._newest_sql(p_leaf int, p_sub text, p_more text default '') returns text
language sql immutable as $$
  select pg_catalog.format(
    'select p.pos_lapse, case when p.pos_fresh > 0 and p.pos_last_id is null then p.pos_next_tick else p.pos_tick end as tick,'
    ' p.pos_next_tick is null or p.pos_fresh > 0 and p.pos_last_id is null as fresh,'
    ' case when (select z.set_batch from pgque.settled_%1$s z where z.set_batch = p.pos_batch and z.set_ev_id = 0 and z.set_what = ''closed'') is null then p.pos_open'
    ' else pg_catalog.array_remove(p.pos_open, p.pos_batch) end as open, p.pos_due%3$s'
    ' from pgque.position_%1$s p'
    ' where p.pos_sub = %2$s and p.leaf = (select j.journal_cur from pgque.journal j where j.journal_id = 1)'
    ' order by p.pos_seq desc limit 1', p_leaf, p_sub, p_more)
$$;

-- Returns the condition that a consumer has nothing but its window to do: no lease may
-- have expired, and no batch of a consumer on its own is open.  p is its newest position.
create or replace function pgque._quiet_sql() returns text
language sql immutable as $$
  select '(p.pos_lapse <= v_now) is not true and (p_worker is not null or coalesce(pg_catalog.cardinality(p.open), 0) = 0)'
$$;

-- Returns the condition that the options of a queue q and of its subscriber s allow
-- ordinary deliveries.
create or replace function pgque._ordinary_sql() returns text
language sql immutable as $$
  select 'q.queue_throughput_limit = 0 and not q.queue_keyed and not q.queue_expiring'
    ' and not s.sub_keyed and not s.sub_offsets'
$$;

-- _poll_0 and _poll_1: begin a delivery.  Each reads one leaf of the journal.
--   * idle: nothing can be delivered
--   * locked: the consumer is locked, and an ordinary delivery may follow
--   * mapped: the window that it has open is read by its map
--   * sub, queue, attempts, lease: the consumer, and what its delivery needs to know
--   * looked: when it read which messages of the retry queue are due
-- All is null if the call fits no consumer, or the other leaf is written.
do $leaves$
begin
  for n in 0..1 loop
    execute pg_catalog.format(
      $template$
      create or replace function pgque._poll_%1$s(
        p_queue text, p_consumer text, p_worker text, p_caller name, p_max bigint,
        out idle boolean, out locked boolean, out mapped boolean, out sub int, out queue int, out attempts int, out lease interval,
        out looked timestamptz
      )
      language plpgsql set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $body$
      declare
        v_now  timestamptz := pgque.clock();
      begin
        looked := v_now;
        select l.quiet and l.read, h.sub_id is not null, l.mapped, l.sub_id, l.queue_id, l.queue_max_receive_attempts, l.queue_visibility_timeout
        into idle, locked, mapped, sub, queue, attempts, lease
        from (
          select s.sub_id, s.sub_role, q.queue_id, q.queue_max_receive_attempts, q.queue_visibility_timeout, %4$s as ordinary,
            %3$s and (
              select r.ev_owner from pgque.retry_queue r
              where r.ev_owner = s.sub_id and r.ev_retry_after >= pgque._due_from(p.pos_due, v_now) and r.ev_retry_after <= v_now
              limit 1) is null as quiet,
            -- The sequence has the newest tick (see _store_tick).  So a poll reads no table of ticks.
            p.fresh and pg_catalog.pg_sequence_last_value(q.queue_tick_seq) <= p.tick as read,
            not p.fresh and p.events > pgque._most_unmapped(p_max) as mapped
          from pgque.queue q,
            pgque._subscriber_by_name(q.queue_id, p_consumer) s,
            lateral (%2$s) p
          where q.queue_name = p_queue collate pg_catalog."default" and not q.queue_restored
            and s.sub_role = case when p_worker is null then 'normal' else 'pool' end
            and (p_caller = current_user collate pg_catalog."C" or pg_catalog.pg_has_role(p_caller, 'pgque_reader', 'usage') or pgque._may(p_caller, 'consume', q.queue_id))
          offset 0
        ) l
        left join lateral (
          -- After a wait for the lock, the conditions hold for the row as it is then.
          select s.sub_id from pgque.subscriber s
          where l.quiet and l.ordinary and l.read is not true
            and s.sub_id = l.sub_id and s.sub_role = l.sub_role and not s.sub_keyed and not s.sub_offsets
          for no key update
        ) h on true;
      end
      $body$
      $template$, n, pgque._newest_sql(n, 's.sub_id', ', p.pos_next_event_seq - p.pos_event_seq as events'), pgque._quiet_sql(), pgque._ordinary_sql());
  end loop;
end
$leaves$;

-- Returns the rows e of a window w that an ordinary delivery may deliver, as what follows
-- "from w" in its statement.
--   * All rows of the window: as in _xids(), it has the transactions from lo to hi, and each
--     one that ran at its first tick and is visible in its last one.
--   * Or, with p_mapped, those at the next places of its map; as in _map_conditions().  The
--     statement has locked the tables, so that their files are those that it reads.
create or replace function pgque._next_rows_sql(p_queue_id int, p_mapped boolean) returns text
language sql immutable as $$
  select ', lateral ('
    || case
      when p_mapped then
        'select min(c.map_lo[1]), max(c.map_hi[1]), min(c.map_lo[2]), max(c.map_hi[2]), min(c.map_lo[3]), max(c.map_hi[3])'
        ' from (select distinct on (m.map_id_hi) m.map_lo, m.map_hi from pgque.window_map m'
        ' where m.map_queue = ' || p_queue_id || ' and m.map_from = w.tick and m.map_to = w.next_tick and m.map_valid and m.map_filenodes = (select array['
        || pg_catalog.string_agg(pg_catalog.format('pg_catalog.pg_relation_filenode(%L::regclass)', t.name), ', ' order by t.n)
        || ']) and m.map_id_hi > coalesce(w.done_id, 0) order by m.map_id_hi limit p_max / 25 + 3) c'
        ') x (lo_0, hi_0, lo_1, hi_1, lo_2, hi_2)'
      else
        'select pg_catalog.pg_snapshot_xmax(w.snapshot), pg_catalog.pg_snapshot_xmax(w.next_snapshot)'
        ' union all select x.xid, (x.xid::text::bigint + 1)::text::xid8 from pg_catalog.pg_snapshot_xip(w.snapshot) x (xid)'
        ' where pg_catalog.pg_visible_in_snapshot(x.xid, w.next_snapshot)'
        ') x (lo, hi)'
    end
    || ', lateral ('
    || pg_catalog.string_agg(
      'select e.* from ' || t.name || ' e where '
      || case
        when p_mapped then pg_catalog.format('e.ctid >= x.lo_%1$s and e.ctid <= x.hi_%1$s and not pg_catalog.pg_visible_in_snapshot(e.ev_txid, w.snapshot)', t.n)
        else 'e.ev_txid >= x.lo and e.ev_txid < x.hi'
      end
      || ' and pg_catalog.pg_visible_in_snapshot(e.ev_txid, w.next_snapshot) and (e.ev_owner is null or e.ev_owner = p_sub) and e.ev_id > coalesce(w.done_id, 0)',
      ' union all ' order by t.n)
    || ' offset 0) e'
  from (select n, 'pgque.event_' || p_queue_id || '_' || n as name from pg_catalog.generate_series(0, 2) n) t
$$;

-- Creates the functions for the ordinary deliveries of a queue, two for each leaf of the
-- journal.  The caller has the subscriber's lock, and passes what _poll_L returned.  They
-- return nothing, and change nothing, if the delivery is not ordinary or its window is
-- empty.
--   * _ordinary_N_L reads all rows of a window.
--   * _mapped_N_L reads the next rows of a big window by its map.  Without a map it returns
--     nothing; the general way makes one.
--
-- The window ends as in _open_window(): at the furthest of the next 100 ticks up to the
-- number of events asked for, at least at the next one.  One message more than asked for
-- is read, to know whether the window has more.
create or replace function pgque._create_ordinary(p_queue_id int) returns void
language plpgsql as $function$
declare
  v_mapped  boolean;
  v_ticks   text;
  v_more    text :=
    ', p.pos_seq, p.pos_high, p.pos_skipped, p.pos_prune, p.pos_paid, p.pos_last_batch, p.pos_next_tick, p.pos_next_snapshot, p.pos_next_event_seq,'
    ' case when p.pos_fresh > 0 and p.pos_last_id is null then p.pos_next_snapshot else p.pos_snapshot end as snapshot,'
    ' case when p.pos_fresh > 0 and p.pos_last_id is null then p.pos_next_event_seq else p.pos_event_seq end as event_seq,'
    ' case when p.pos_fresh > 0 then p.pos_last_id else p.pos_done_id end as done_id,'
    -- A worker that has a message for the last time receives nothing besides (_may_be_poison).
    ' (select r.ev_owner from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_worker = p_worker and r.ev_batch is not null'
    ' and r.ev_receives > coalesce(r.ev_retry, 0) + 1 and r.ev_receives >= p_attempts and r.ev_retry_after + ''0'' > v_now limit 1) is not null as alone';
begin
  select pg_catalog.string_agg(pg_catalog.format('select tick_id, tick_snapshot, tick_event_seq from pgque.tick_%s_%s', p_queue_id, n), ' union all ' order by n)
  into v_ticks
  from pg_catalog.generate_series(0, 2) n;
  foreach v_mapped in array array[false, true] loop
    for n in 0..1 loop
      perform pgque._compile(pg_catalog.format(
        $template$
        create or replace function pgque.%7$s_%1$s_%2$s(
          p_sub int, p_max bigint, p_bytes bigint, p_worker text, p_lease interval, p_attempts int, p_queue text, p_looked timestamptz
        ) returns setof pgque.delivery
        language plpgsql set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $body$
        declare
          v_now    timestamptz := pgque.clock();
          v_until  timestamptz := case when p_worker is null then 'infinity' else v_now + p_lease end;
          v_span   bigint := pgque._span(p_max, p_worker);
        begin
          return query
          with w as materialized (
            select p.pos_seq, p.pos_high, p.pos_skipped, p.pos_prune, p.pos_lapse, p.pos_paid, p.pos_due, p.open, p.tick, p.snapshot, p.event_seq, p.done_id,
              case when p.fresh then n.tick_id else p.pos_next_tick end as next_tick,
              case when p.fresh then n.tick_snapshot else p.pos_next_snapshot end as next_snapshot,
              case when p.fresh then n.tick_event_seq else p.pos_next_event_seq end as next_event_seq,
              -- as in _new_batch_id()
              (greatest((p.pos_last_batch >> 20) + 1, ((extract(epoch from pg_catalog.clock_timestamp()) - 1735689600) * 4000)::bigint) << 20) | (p_sub & 1048575) as token
            from (%3$s) p
            left join lateral (
              select t.tick_id, t.tick_snapshot, t.tick_event_seq
              -- With a condition in each of the three parts, all ticks would be sorted.
              from (select t.* from (%4$s) t where t.tick_id > p.tick order by t.tick_id limit 100) t
              order by t.tick_event_seq <= p.event_seq + v_span desc, case when t.tick_event_seq <= p.event_seq + v_span then - t.tick_id else t.tick_id end
              limit 1
            ) n on p.fresh
            where not p.alone and %5$s
              -- A consumer that was moved back may find an event and its retry in one window.
              and (p.tick < p.pos_high) is not true
              and (pg_catalog.cardinality(p.open) >= p.pos_prune) is not true
              and case when p.fresh then n.tick_event_seq else p.pos_next_event_seq end - p.event_seq %8$s pgque._most_unmapped(p_max)
          ),
          m as materialized (
            select e.ev_id, e.ev_key, e.ev_expires, e.ev_data, e.ev_bytes, e.ev_headers, e.ev_type, e.ev_retry, e.ev_time,
              e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_error
            from w%6$s
            order by e.ev_id
            limit p_max + 1
          ),
          d as (
            insert into pgque.position_%2$s (
              pos_sub, pos_seq, pos_time, pos_tick, pos_snapshot, pos_event_seq, pos_next_tick, pos_next_snapshot, pos_next_event_seq, pos_done_id,
              pos_last_id, pos_batch, pos_last_batch, pos_done_count, pos_high, pos_skipped, pos_worker, pos_until, pos_fresh, pos_shelf,
              pos_open, pos_prune, pos_lapse, pos_paid, pos_due)
            select p_sub, w.pos_seq + 1, v_now, w.tick, w.snapshot, w.event_seq, w.next_tick, w.next_snapshot, w.next_event_seq, w.done_id,
              c.last_id, w.token, w.token, least(c.n, p_max), w.pos_high, w.pos_skipped, p_worker, v_until, 1, 0,
              w.open || w.token, coalesce(w.pos_prune, 64),
              case when p_worker is null then w.pos_lapse else least(w.pos_lapse, v_until) end, w.pos_paid,
              pgque._due_after(w.pos_due, p_looked)
            from (
              select count(*) as n, case when count(*) > p_max then (pg_catalog.array_agg(m.ev_id))[p_max] end as last_id,
                count(*) filter (where m.ev_key is not null or m.ev_expires is not null) as optional,
                sum(pgque._size(m.ev_data, m.ev_bytes, m.ev_headers)) filter (where p_bytes is not null) as bytes
              from m
            ) c, w
            -- The first messages with a key or a ttl may not be noted in the queue's row yet.
            where c.n > 0 and c.optional = 0 and (c.bytes > p_bytes) is not true
            returning pos_batch, pos_last_id
          )
          -- As above, m is read in its order: there is one row of d, and no other way to join it.
          select m.ev_id, d.pos_batch, m.ev_type, m.ev_data, coalesce(m.ev_retry, 0), m.ev_time, m.ev_extra1, m.ev_extra2, m.ev_extra3, m.ev_extra4,
            m.ev_headers, m.ev_key, m.ev_bytes, coalesce(m.ev_retry, 0) + 1, m.ev_error, m.ev_expires, p_queue
          from d, m
          where (m.ev_id > d.pos_last_id) is not true;
        end
        $body$
        $template$, p_queue_id, n, pgque._newest_sql(n, 'p_sub', v_more), v_ticks, pgque._quiet_sql(), pgque._next_rows_sql(p_queue_id, v_mapped),
        case when v_mapped then '_mapped' else '_ordinary' end, case when v_mapped then '>' else '<=' end));
    end loop;
  end loop;
end
$function$;

-- _done_0 and _done_1: acknowledge a batch that was delivered from the log, in one
-- statement.  Each uses one leaf of the journal.  Returns false, and changes nothing, if
-- the batch is not there, was moved to the retry queue, or is closed.  The caller has the
-- batch's lock.
do $leaves$
begin
  for n in 0..1 loop
    execute pg_catalog.format(
      $template$
      create or replace function pgque._done_%1$s(p_batch bigint, p_sub int) returns boolean
      language plpgsql as $body$
      begin
        insert into pgque.settled_%1$s (set_batch, set_what)
        select p_batch, 'closed'
        from pgque.position_%1$s p
        where p.pos_batch = p_batch and p.pos_sub + 0 = p_sub and p.pos_fresh > 0 and p.pos_shelf = 0
          and (select j.journal_cur from pgque.journal j where j.journal_id = 1) = %1$s
          and (select z.set_batch from pgque.settled_%1$s z where z.set_batch = p_batch and z.set_ev_id = 0 and z.set_what = 'moved') is null
        limit 1
        on conflict do nothing;
        return found;
      end
      $body$
      $template$, n);
  end loop;
end
$leaves$;
-- ---------------------------------------------------------------------------
-- receive: deliveries
-- ---------------------------------------------------------------------------

create or replace function pgque.receive(
  queue_name text, consumer_name text, max_return int default 100, worker text default null,
  visibility_timeout interval default null, ack_batch bigint default null, max_bytes bigint default null,
  caller pgque.caller default current_user
) returns setof pgque.delivery
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set work_mem = '64MB' set jit = off as $$
declare
  v_turn    record;
  v_sub     pgque.subscriber;
  v_queue   pgque.queue;
  v_pos     pgque.position;
  v_token   bigint;
  v_room    bigint;
  v_sifted  record;
  v_rows    text;
  v_row     pgque.delivery;
  v_limit   bigint;
  v_last    bigint;
  v_count   bigint := 0;
  v_bytes   bigint := 0;
  v_passed  bigint := 0;   -- messages that may not be delivered now
  v_tried   boolean := false;
  v_leaf    int;
  v_poll    record;
  v_known   int;   -- the consumer, if a poll has found it
begin
  if $7 < 1 then
    perform pgque._fail('PQ005', format('max_bytes must be at least 1, for queue %s', coalesce(quote_ident($1), 'null')),
      'Pass the number of bytes that fit into your memory, such as 64000000, or null.');
  end if;
  if $6 is not null then
    perform pgque._ack(pgque._batch_for(caller, $6));
  end if;
  if $3 >= 1 and ($4 is null or octet_length($4) between 1 and 1000) and ($5 is null or $4 is not null and $5 > '0' and $5 <= '100 years')
    and pgque._may_be_ordinary() and current_setting('transaction_read_only') = 'off'
  then
    v_leaf := coalesce(pg_sequence_last_value('pgque.journal_leaf'), 0);
    if v_leaf = 0 then
      v_poll := pgque._poll_0($1, $2, $4, caller, $3);
    else
      v_poll := pgque._poll_1($1, $2, $4, caller, $3);
    end if;
    if v_poll.idle then
      return;
    elsif v_poll.locked and $3 <= 1000 then
      return query execute 'select * from pgque.' || case when v_poll.mapped then '_mapped_' else '_ordinary_' end || v_poll.queue || '_' || v_leaf || '($1, $2, $3, $4, $5, $6, $7, $8)'
      using v_poll.sub, $3::bigint, $7, $4, coalesce($5, v_poll.lease), v_poll.attempts, $1, v_poll.looked;
      if found then
        return;
      end if;
    end if;
    v_known := v_poll.sub;
  end if;
  v_turn := pgque._begin_delivery($1, $2, $3, $4, $5, caller, v_known);
  v_sub := v_turn.sub;
  if v_sub.sub_id is null then
    return;
  end if;
  v_queue := v_turn.queue;
  v_pos := v_turn.pos;
  v_room := v_turn.room;
  v_token := pgque._new_batch_id(v_pos);
  if v_turn.open is not null then
    return query select * from pgque._redeliver(v_sub, v_queue, v_turn.open);
    if found then
      return;
    end if;
    -- Every message of the batch has its outcome: it is finished.
    v_pos := pgque._finish_empty_batch(v_sub, v_pos, v_turn.open);
  end if;

  if v_turn.due and v_room > 0 then
    v_pos.pos_shelf := pgque._lease_retries(v_queue, v_sub, v_token, v_room, $4, v_turn.until, $7, lower(v_pos.pos_due));
    if v_pos.pos_shelf is null then
      v_pos.pos_shelf := 0;
      v_room := 0;
    elsif v_pos.pos_shelf > 0 then
      return query select * from pgque._retries_of_batch(v_sub.sub_id, v_token, v_queue.queue_name);
      v_pos := case when v_pos.pos_done_id is null then pgque._with_window(v_pos, null) else v_pos end;   -- the window was opened for nothing
    end if;
  end if;

  -- An empty answer means that no message can be delivered: the call passes any number of
  -- messages whose key is busy, and of purged and expired ones.  A statement_timeout, or a
  -- client that gives the call up, would take that back, and the next call could not get
  -- further: so half of the timeout is the limit, and 10 seconds.
  while v_pos.pos_shelf = 0 and v_count = 0 and v_room > 0 loop
    exit when v_tried and clock_timestamp() > statement_timestamp() + least(nullif(current_setting('statement_timeout')::interval, '0') / 2, '10 seconds');
    v_tried := true;
    if v_pos.pos_next_tick is null then
      v_pos := pgque._open_window(v_pos, v_queue.queue_id, pgque._span($3, case when v_sub.sub_role = 'pool' then $4 end));
      exit when v_pos.pos_next_tick is null;
    end if;
    v_pos.pos_last_id := null;
    if pgque._must_choose(v_sub, v_pos) then
      v_sifted := pgque._choose(v_queue, v_sub, v_pos, v_token, v_room, v_passed, $7);
      v_pos := v_sifted.pos;
      v_passed := v_passed + v_pos.pos_done_count;
      if v_sifted.rows is not null then
        return query execute v_sifted.rows using v_token, v_queue.queue_name, v_sifted.ids;
        get diagnostics v_count = row_count;
      end if;
    else
      if v_room <= 1000 and not pgque._is_big(v_pos, v_room) and (v_pos.pos_tick < v_pos.pos_high) is not true then
        -- A small window is read directly, by functions whose plans the session keeps.
        v_rows := 'select * from pgque._events_' || v_queue.queue_id || '($3, $4, $5, $6, $7, $1, 1, $2)';
      else
        v_rows := pgque._delivery_sql(pgque._slice_sql(v_sub, v_pos, '', v_room)) || ' limit $7';
      end if;
      -- A loop costs more for each row, but it finds out whether there is one message
      -- more than fits.
      v_limit := v_room + ($7 is not null or v_room <= 1000 and v_pos.pos_next_event_seq - v_pos.pos_event_seq >= v_room)::int;
      if v_limit > v_room then
        for v_row in
          execute v_rows
          using v_token, v_queue.queue_name, v_pos.pos_snapshot, v_pos.pos_next_snapshot, v_sub.sub_id, coalesce(v_pos.pos_done_id, 0), v_limit
        loop
          v_bytes := v_bytes + case when $7 is not null then pgque._size(v_row.payload, v_row.payload_bytes, v_row.headers) else 0 end;
          if v_count = v_room or v_bytes > $7 and v_count > 0 then
            v_pos.pos_last_id := v_last;
            exit;
          end if;
          v_count := v_count + 1;
          v_last := v_row.msg_id;
          return next v_row;
        end loop;
      else
        return query execute v_rows
        using v_token, v_queue.queue_name, v_pos.pos_snapshot, v_pos.pos_next_snapshot, v_sub.sub_id, coalesce(v_pos.pos_done_id, 0), v_limit;
        get diagnostics v_count = row_count;
        v_pos.pos_last_id := case when v_count = v_room then pgque._id_of_row(pgque._slice_sql(v_sub, v_pos, '', v_room), v_room) end;
      end if;
      v_pos.pos_done_count := v_count;
    end if;
    v_pos.pos_fresh := 1;
    if v_count = 0 then
      v_pos := pgque._next_from(v_pos);
    end if;
  end loop;
  perform pgque._store_delivery(v_sub, v_queue, v_pos, v_turn.leaf, v_count, v_token, $4, v_turn.until, v_turn.changed is true
    or (v_pos.pos_tick, v_pos.pos_done_id, v_pos.pos_open) is distinct from ((v_turn.pos).pos_tick, (v_turn.pos).pos_done_id, (v_turn.pos).pos_open));
end
$$;
comment on function pgque.receive(text, text, int, text, interval, bigint, bigint, pgque.caller) is
  'Delivers the consumer''s next messages as one batch: at most max_return, in the order of their ids; no rows if there are none. A batch holds '
  'redeliveries or new messages, and redeliveries go first. Without worker, the same batch is redelivered under its id until ack(batch_id), without '
  'the messages that were nacked. With worker (any name), the messages are leased to the worker for visibility_timeout (NULL: the queue''s setting, '
  '30 seconds). Each call of each worker gets other messages. When the lease expires, messages without an outcome are redelivered to the next worker '
  'that calls, with receive_count + 1; for them the batch ids of earlier deliveries are invalid from then on. The last attempt of a message is '
  'delivered alone: to a worker that holds no other message, and in a batch of one. ack_batch: a batch that is acknowledged first, in the same '
  'transaction. max_bytes: a new batch ends before its payloads and headers exceed this number of bytes, with at least one message. A delivery locks '
  'the consumer until the transaction ends. So receive in a transaction of its own, and do the work and the ack in another one; workers that '
  'receive, work and acknowledge in one transaction take turns. Errors: PQ001 no such queue; PQ004 invalid worker name; PQ005 max_return or '
  'max_bytes is below 1, visibility_timeout is not positive or above 100 years, or the consumer has workers and worker is NULL; PQ006 the consumer '
  'has received a batch without worker, and worker is set; PQ011 not subscribed; 25000 with worker in a transaction that is not READ COMMITTED.';

-- Returns how many bytes a message adds to a batch.
create or replace function pgque._size(p_data text, p_bytes bytea, p_headers jsonb) returns bigint
language sql stable as $$
  select coalesce(pg_catalog.octet_length(p_data), 0)::bigint + coalesce(pg_catalog.octet_length(p_bytes), 0) + coalesce(pg_catalog.pg_column_size(p_headers), 0)
$$;

-- Begins a delivery: returns if there is nothing to do (sub is null then), and locks the
-- consumer.
--   * pos: where the delivery begins, with its next window if that is known
--   * open: an open batch, which is redelivered
--   * due: whether messages may be due in the retry queue
--   * room: how many messages it may deliver
--   * until: when the lease ends
--   * changed: whether pos must be stored in any case
--
-- p_sub: the consumer, if a poll has found it and that there may be something to do.
create or replace function pgque._begin_delivery(
  p_queue text, p_consumer text, p_max bigint, p_worker text, p_timeout interval, p_caller name, p_sub int,
  out sub pgque.subscriber, out queue pgque.queue, out pos pgque.position, out leaf int, out open bigint, out due boolean,
  out room bigint, out until timestamptz, out changed boolean
)
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now    timestamptz;
  v_found  record;
begin
  if p_sub is not null then
    select s.* into sub from pgque.subscriber s
    where s.sub_id = p_sub and s.sub_role = case when p_worker is null then 'normal' else 'pool' end
    for no key update;
  end if;
  while sub.sub_id is null loop
    perform pgque._need_max_return(p_max, p_queue);
    sub := pgque._subscriber(p_queue, p_consumer, p_caller);
    if (sub.sub_role = 'normal' and p_worker is null or sub.sub_role = 'pool' and p_worker <> '' and pg_catalog.octet_length(p_worker) <= 1000) is not true
      or p_timeout is not null and (p_worker is null or p_timeout <= '0' or p_timeout > '100 years') or pgque._old_snapshot()
    then
      sub := pgque._refuse_or_share(sub, p_max, p_worker, p_timeout, p_queue, p_consumer);
    end if;
    -- A poll that finds nothing takes no lock, writes nothing and needs no
    -- transaction id.
    if pgque._is_idle(sub, p_max, p_worker) then
      sub := null;
      return;
    end if;
    -- The consumer may become a pool, or get other settings, after this call began.
    select s.* into sub from pgque.subscriber s where s.sub_id = sub.sub_id and s.sub_role = sub.sub_role for no key update;
  end loop;
  v_now := pgque.clock();
  leaf := pgque._journal_leaf();
  pos := pgque._position(sub.sub_id, leaf);
  open := pgque._open_batch_of(sub, pos, p_worker, leaf);
  select q as queue, (
      select r.ev_retry_after
      from pgque.retry_queue r
      where r.ev_owner = sub.sub_id and r.ev_retry_after >= pgque._due_from(pos.pos_due, v_now) and r.ev_retry_after <= v_now
      order by r.ev_retry_after
      limit 1) as due,
    sub.sub_role = 'pool' and exists (
      select from pgque.retry_queue r
      where r.ev_owner = sub.sub_id and r.ev_worker = p_worker and r.ev_batch is not null and r.ev_receives > coalesce(r.ev_retry, 0) + 1
        and r.ev_receives >= q.queue_max_receive_attempts and r.ev_retry_after + '0' > v_now) as alone   -- its last attempt (see _may_be_poison); + '0' keeps the planner from all that wait
  into v_found from pgque.queue q where q.queue_id = sub.sub_queue;
  queue := v_found.queue;
  due := v_found.due is not null;
  pos.pos_due := pgque._due_after(pos.pos_due, v_now, v_found.due);
  if sub.sub_role = 'coop_main' then
    perform pgque._touch(pgque._worker(sub, p_worker));
  end if;
  room := case when v_found.alone then 0 else p_max end;
  until := case when sub.sub_role = 'pool' then v_now + coalesce(p_timeout, queue.queue_visibility_timeout) else 'infinity' end;
  if open is not null then
    return;
  end if;
  pos := pgque._next_from(pos);
  changed := (v_now >= pos.pos_lapse or pg_catalog.cardinality(pos.pos_open) >= pos.pos_prune) is true;
  if changed then
    pos := pgque._collect_expired(sub, pos, v_now);
    due := true;
  end if;
  if queue.queue_throughput_limit > 0 and sub.sub_role = 'pool' then
    pos.pos_paid := pgque._limit_unused_since(pos.pos_paid, v_now);
    room := least(room, pg_catalog.floor(extract(epoch from v_now - pos.pos_paid) * queue.queue_throughput_limit + 0.000001)::bigint);
  end if;
end
$$;

-- Returns whether a consumer has nothing to receive, by what this call's snapshot shows.
create or replace function pgque._is_idle(p_sub pgque.subscriber, p_max bigint, p_worker text) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_pos  pgque.position := pgque._position(p_sub.sub_id);
  v_now  timestamptz := pgque.clock();
begin
  if pgque._open_batch_of(p_sub, v_pos, p_worker, pgque._journal_leaf()) is not null then
    return false;
  end if;
  v_pos := pgque._next_from(v_pos);
  if v_pos.pos_next_tick is not null or v_now >= v_pos.pos_lapse
    or exists (
      select from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_retry_after >= pgque._due_from(v_pos.pos_due, v_now) and r.ev_retry_after <= v_now)
  then
    return false;
  end if;
  -- The sequence has the newest tick (see _store_tick), so that most polls read no table of
  -- ticks.  An old snapshot may not show this tick.
  return exists (
      select from pgque.queue q
      where q.queue_id = p_sub.sub_queue and pg_catalog.pg_sequence_last_value(q.queue_tick_seq) <= v_pos.pos_tick)
    or pgque._old_snapshot() and (pgque._open_window(v_pos, p_sub.sub_queue, p_max)).pos_next_tick is null;
end
$$;

create or replace function pgque._need_max_return(p_max bigint, p_queue text) returns void
language plpgsql as $$
begin
  if (p_max >= 1) is not true then
    perform pgque._fail('PQ005', pg_catalog.format('max_return must be at least 1, for queue %s', coalesce(pg_catalog.quote_ident(p_queue), 'null')),
      'Pass the highest number of messages to return, such as 100.');
  end if;
end
$$;

-- Handles a call that does not fit the consumer's role or its arguments.  It raises an
-- error, or turns a consumer that was never used into a pool.
create or replace function pgque._refuse_or_share(
  p_sub pgque.subscriber, p_max bigint, p_worker text, p_timeout interval, p_queue text, p_consumer text
) returns pgque.subscriber
language plpgsql as $$
begin
  perform pgque._need_max_return(p_max, p_queue);
  if p_sub.sub_role = 'coop_main' and p_worker is not null then
    perform pgque._worker(p_sub, p_worker);
  elsif p_worker is null then
    perform pgque._need_alone(p_sub, p_queue, p_consumer);
  else
    perform pgque._need_read_committed('receive() for a worker');
    if p_worker = '' or pg_catalog.octet_length(p_worker) > 1000 then
      perform pgque._fail('PQ004', pg_catalog.format('invalid worker name for queue %I', p_queue),
        'A worker name has 1 to 1000 bytes; any character is allowed.');
    elsif p_timeout <= '0' or p_timeout > '100 years' then
      perform pgque._fail('PQ005', pg_catalog.format('visibility_timeout must be positive and at most 100 years, for queue %I', p_queue),
        'Pass the time until others may get the messages of the worker, such as ''5 minutes''.');
    end if;
    -- A consumer that has received a batch on its own stays as it is: the process that
    -- reads it could not continue.
    if pgque._lock_subscriber(p_sub.sub_id) = 'normal' and (pgque._position(p_sub.sub_id)).pos_last_batch > 0 then
      perform pgque._fail('PQ006', pg_catalog.format('consumer %s of queue %I reads on its own', pgque._subscriber_name(p_sub), p_queue),
        pg_catalog.format('Subscribe another consumer for the workers. Or stop its reader and turn it into a pool of workers: select pgque.share_consumer(%L, %L);',
          p_queue, pgque._subscriber_name(p_sub)));
    end if;
    update pgque.subscriber s set sub_role = 'pool' where s.sub_id = p_sub.sub_id and s.sub_role = 'normal';
    return (select s from pgque.subscriber s where s.sub_id = p_sub.sub_id);
  end if;
  if p_timeout is not null then
    perform pgque._fail('PQ005', pg_catalog.format('visibility_timeout is for workers, not for consumer %I of queue %I', p_consumer, p_queue),
      'Pass worker => name too. A consumer without workers keeps its batch until it finishes it.');
  end if;
  return p_sub;
end
$$;

-- Delivers an open batch again, without the messages that have an outcome.  All other
-- messages are delivered, whatever max_return is now, since ack() finishes the whole
-- batch.
create or replace function pgque._redeliver(p_sub pgque.subscriber, p_queue pgque.queue, p_batch bigint) returns setof pgque.delivery
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_state  record;
begin
  select s.* into v_state from pgque._states(p_sub.sub_id, array[p_batch]) s;
  if v_state.place = 'log' then
    return query execute pgque._delivery_sql(pgque._renewed_sql(p_sub.sub_queue, pgque._unsettled_sql(p_sub, v_state.lease))) using p_batch, p_queue.queue_name;
  else
    return query select * from pgque._retries_of_batch(p_sub.sub_id, p_batch, p_queue.queue_name);
  end if;
end
$$;

-- Finishes a batch with no message left, and returns the position.
create or replace function pgque._finish_empty_batch(p_sub pgque.subscriber, p_pos pgque.position, p_batch bigint) returns pgque.position
language plpgsql as $$
begin
  perform pgque._record(p_batch, 'closed');
  p_pos := pgque._next_from(p_pos);
  p_pos.pos_open := pg_catalog.array_remove(p_pos.pos_open, p_batch);
  return p_pos;
end
$$;

-- Returns the query of an open batch, as columns of pgque.event: its messages from the
-- log that have no outcome, or those in the retry queue under its id.
create or replace function pgque._batch_sql(p_sub pgque.subscriber, p_batch bigint) returns text
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_state  record;
begin
  select s.* into v_state from pgque._states(p_sub.sub_id, array[p_batch]) s;
  if v_state.place = 'log' then
    return pgque._renewed_sql(p_sub.sub_queue, pgque._unsettled_sql(p_sub, v_state.lease));
  end if;
  return pg_catalog.format(
    'select null::int as slot, null::int as ev_owner, r.ev_id, r.ev_time, r.ev_txid, r.ev_retry, r.ev_type, r.ev_data, r.ev_extra1, r.ev_extra2, r.ev_extra3,'
    ' r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes, r.ev_expires, r.ev_error from pgque.retry_queue r where r.ev_owner = %s and r.ev_batch = %s',
    p_sub.sub_id, p_batch);
end
$$;

-- Returns a query for rows of pgque.event as they are delivered, in the batch $1 of the
-- queue named $2.
create or replace function pgque._delivery_sql(p_rows text, p_where text default '') returns text
language sql immutable as $$
  select 'select e.ev_id, $1, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,'
    ' e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,'
    ' coalesce(e.ev_retry, 0) + 1, e.ev_error, e.ev_expires, $2 from (' || p_rows || ') e' || p_where || ' order by e.ev_id'
$$;

-- Returns the id of the p_n-th row of a slice, if there are more than that.  Counting
-- first costs a third of sorting for nothing.
create or replace function pgque._id_of_row(p_rows text, p_n bigint) returns bigint
language plpgsql as $$
declare
  v_more  boolean;
  v_id    bigint;
begin
  execute pg_catalog.format('select count(*) > %s from (select from (%s) e limit %s) e', p_n, p_rows, p_n + 1) into v_more;
  if v_more then
    execute pg_catalog.format('select e.ev_id from (%s) e order by e.ev_id offset %s limit 1', p_rows, p_n - 1) into v_id;
  end if;
  return v_id;
end
$$;

-- Stores a delivery of p_count messages from the log, or the position up to which there
-- was nothing to deliver.
create or replace function pgque._store_delivery(
  p_sub pgque.subscriber, p_queue pgque.queue, p_pos pgque.position, p_leaf int, p_count bigint, p_token bigint, p_worker text, p_until timestamptz, p_changed boolean
) returns void
language plpgsql as $$
begin
  if p_count + p_pos.pos_shelf = 0 then
    if not p_changed then
      return;
    end if;
    p_pos.pos_batch := null;
    p_pos.pos_fresh := 0;
    if p_sub.sub_role = 'normal' then
      p_pos.pos_open := '{}';
    end if;
  else
    p_pos.pos_batch := p_token;
    p_pos.pos_last_batch := p_token;
    p_pos.pos_worker := p_worker;
    p_pos.pos_until := p_until;
    p_pos.pos_fresh := (p_count > 0)::int;
    p_pos.pos_prune := coalesce(p_pos.pos_prune, 64);
    if p_sub.sub_role = 'normal' then
      p_pos.pos_open := array[p_token];
    elsif p_count > 0 or p_sub.sub_role = 'coop_main' then
      p_pos.pos_open := coalesce(p_pos.pos_open, '{}') || p_token;
      p_pos.pos_lapse := least(p_pos.pos_lapse, p_pos.pos_until);
    end if;
    if p_queue.queue_throughput_limit > 0 then
      p_pos.pos_paid := p_pos.pos_paid + (p_count + p_pos.pos_shelf) * interval '1 second' / p_queue.queue_throughput_limit;
    end if;
    if p_sub.sub_offsets then
      update pgque.subscriber s set sub_offsets = false where s.sub_id = p_sub.sub_id;
    end if;
  end if;
  perform pgque._append_position(p_pos, p_leaf);
end
$$;

-- Returns the messages of a batch that are in the retry queue.
create or replace function pgque._retries_of_batch(p_sub int, p_batch bigint, p_queue text) returns setof pgque.delivery
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return query
    select r.ev_id, p_batch, r.ev_type, r.ev_data, coalesce(r.ev_retry, 0), r.ev_time,
      r.ev_extra1, r.ev_extra2, r.ev_extra3, r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes,
      r.ev_receives, r.ev_error, r.ev_expires, p_queue
    from pgque.retry_queue r
    where r.ev_owner = p_sub and r.ev_batch = p_batch
    order by r.ev_id;
end
$$;
-- ---------------------------------------------------------------------------
-- choose: which messages of a slice, and of the retry queue, are delivered
-- ---------------------------------------------------------------------------

-- Returns whether a message of a window that is open may have to be left out or kept for later.
-- If one has a key or a ttl, or was cancelled, then its transaction, or an earlier one, has
-- noted that.
create or replace function pgque._must_choose(p_sub pgque.subscriber, p_pos pgque.position) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return p_sub.sub_keyed
    or exists (select from pgque.queue q where q.queue_id = p_sub.sub_queue and (q.queue_keyed or q.queue_expiring))
    or exists (
      select from pgque.queue_option o
      where o.opt_queue = p_sub.sub_queue and (o.opt_name in ('key', 'ttl') or o.opt_name = 'cancelled' and p_pos.pos_tick < p_pos.pos_high));
end
$$;

-- Chooses from the next messages of a window, at most p_max, if _must_choose().  A message
-- whose key or lane is busy goes to the retry queue.  Purged, cancelled and expired messages
-- are left out.  The slice ends at the last message that was checked.  ids are the messages
-- to deliver, and rows is the query for them.  p_passed is how many messages the caller has
-- passed since it last found one to deliver: the next slice is as long.  With null the slice
-- is the whole window, for a caller that reads the rest of it without this function.  p_bytes
-- limits the size of the messages to deliver; there is at least one.
create or replace function pgque._choose(
  p_queue pgque.queue, p_sub pgque.subscriber, p_pos pgque.position, p_token bigint, p_max bigint, p_passed bigint, p_bytes bigint default null,
  out pos pgque.position, out ids bigint[], out rows text
)
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now    timestamptz := pgque.clock();
  -- Each key takes a lock.  Messages that are not delivered are checked quickly.
  v_look   bigint := case
    when p_passed is not null then greatest(case when pgque._keyed(p_queue) then 200 else greatest(1000, least(p_max, 10000)) end, least(p_passed / 4, 20000))
  end;
  v_rows   pgque.event[];
  v_more   boolean;
  v_busy   bigint[] := '{}';
  v_gone   bigint[] := '{}';
  v_claim  record;
  v_ended  text := case when p_pos.pos_tick < p_pos.pos_high then pgque._cancelled_sql(p_queue.queue_id, p_sub.sub_id) end;
  v_out    text[];
  v_found  record;
  v_fit    bigint;
begin
  pos := p_pos;
  pos.pos_done_count := 0;
  execute pg_catalog.format('select array_agg(%s order by e.ev_id) from (select * from (%s) e order by e.ev_id limit %L) e',
    pgque._slim(case when p_sub.sub_keyed then 'pgque._lane(e.ev_key, e.ev_extra1)' else 'null' end),
    pgque._slice_sql(p_sub, p_pos, case when p_passed is null then pg_catalog.format(' and (e.ev_key is not null or e.ev_expires <= %L::timestamp at time zone ''UTC''%s)', v_now at time zone 'UTC', ' or ' || v_ended) else '' end, v_look),
    v_look + 1)
  into v_rows;
  if v_rows is null then
    return;
  end if;
  v_more := pg_catalog.cardinality(v_rows) > v_look;
  if v_more then
    v_rows := v_rows[:v_look];
  end if;
  if pgque._keyed(p_queue) then
    v_claim := pgque._claim(p_queue, v_rows);
    v_rows := v_claim.rows;
    v_busy := v_claim.busy;
    v_gone := v_claim.gone;
  end if;
  if v_ended is not null then
    execute pg_catalog.format('select $1 || array_agg(e.ev_id) from pg_catalog.unnest($2) e where %s', v_ended) into v_gone using v_gone, v_rows;
  end if;
  if p_sub.sub_keyed then
    v_out := array(select l.lane from pgque._leased_lanes(p_sub) l);
  end if;
  loop
    with looked as materialized (
      select e.ev_id, e.ev_extra1 as lane,
        case when e.ev_id = any (v_gone) then 'gone' when e.ev_expires <= v_now then 'expired' when e.ev_id = any (v_busy) then 'busy' else 'good' end as what
      from pg_catalog.unnest(v_rows) e
    ),
    -- The leased messages of a lane count as its first ones. If the order is kept, a message
    -- that waits counts too.
    placed as (
      select l.* from looked l
      union all
      select 0, o.lane, 'out' from pg_catalog.unnest(v_out) o (lane)
      union all
      select distinct 0, l.lane, 'out'
      from looked l
      where p_sub.sub_key_concurrency = 1 and l.what = 'good' and exists (select from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane = l.lane)
    ),
    judged as (
      select p.ev_id, p.lane,
        case
          when p.what = 'good' and p.lane is not null
            and pg_catalog.row_number() over (partition by p.lane, p.what in ('gone', 'expired') order by p.ev_id) > p_sub.sub_key_concurrency then 'busy'
          else p.what
        end as what
      from placed p
    ),
    counted as (
      select j.*, count(*) filter (where j.what = 'good') over (order by j.ev_id rows unbounded preceding) as n from judged j where j.what <> 'out'
    )
    select array_agg(c.ev_id order by c.ev_id) filter (where c.what = 'good') as good,
      array_agg(c.ev_id order by c.ev_id) filter (where c.what <> 'good') as skip,
      array_agg(c.ev_id order by c.ev_id) filter (where c.what = 'busy') as aside,
      array_agg(c.ev_id order by c.ev_id) filter (where c.what in ('good', 'expired')) as sealed,
      count(*) filter (where c.what = 'expired') as expired,
      array_agg(c.lane) filter (where c.what = 'good' and c.lane is not null) as lanes,
      max(c.ev_id) as last, count(*) as looked
    into v_found
    from counted c
    -- Messages after the last one stay in the window.
    where c.n < p_max or c.n = p_max and c.what = 'good';
    exit when p_bytes is null or pg_catalog.cardinality(v_found.good) > 1 is not true;
    pos.pos_last_id := v_found.last;
    execute pg_catalog.format(
      'select count(*) from (select sum(pgque._size(e.ev_data, e.ev_bytes, e.ev_headers)) over (order by e.ev_id) as bytes from (%s) e) s where s.bytes <= $2',
      pgque._renewed_sql(p_queue.queue_id, pgque._slice_sql(p_sub, pos, ' and pgque._contains($1, e.ev_id)')))
    into v_fit using v_found.good, p_bytes;
    exit when v_fit = pg_catalog.cardinality(v_found.good);
    p_max := greatest(v_fit, 1);
    p_bytes := null;
  end loop;
  pos.pos_last_id := case when v_more or v_found.looked < pg_catalog.cardinality(v_rows) then v_found.last end;
  pos.pos_done_count := v_found.looked;
  pos.pos_keys := case when p_sub.sub_keyed then coalesce(v_found.lanes, '{}') end;   -- null: not known
  ids := v_found.good;
  if v_found.aside is not null then
    execute pg_catalog.format(
      'insert into pgque.retry_queue select (pgque._as_retry(e, $1, 0, $2, null, null)).* from (%s) e on conflict do nothing',
      pgque._renewed_sql(p_queue.queue_id, pgque._slice_sql(p_sub, pos, ' and pgque._contains($3, e.ev_id)')))
    using p_sub, v_now, v_found.aside;
  end if;
  perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'expired', v_found.expired);
  if pgque._keyed(p_queue) then
    -- Expired messages too: an older snapshot may not show that a body was replaced.
    perform pgque._seal(p_queue.queue_id, array(
      select r from pg_catalog.unnest(v_rows) r
      where ((select v_found.sealed))[pg_catalog.width_bucket(r.ev_id, (select v_found.sealed))] = r.ev_id));   -- as _contains()
  end if;
  if v_found.skip is not null and (ids is not null or p_passed is null) then
    perform pgque._record(p_token, 'outcome', v_found.skip);
  end if;
  if ids is not null then
    rows := pgque._delivery_sql(pgque._renewed_sql(p_queue.queue_id, pgque._slice_sql(p_sub, pos)), ' where ($3)[pg_catalog.width_bucket(e.ev_id, $3)] = e.ev_id');
  end if;
end
$$;

-- Returns a row of the retry queue without the columns that may be large.
create or replace function pgque._slim_retry(p_row pgque.retry_queue) returns pgque.retry_queue
language sql immutable as $$
  select row(p_row.ev_retry_after, p_row.ev_queue, p_row.ev_id, p_row.ev_time, p_row.ev_txid, p_row.ev_owner, p_row.ev_retry,
    null, null, null, null, null, null, null, p_row.ev_key, null, p_row.ev_expires, null,
    p_row.ev_receives, p_row.ev_batch, p_row.ev_worker, p_row.ev_lane)::pgque.retry_queue
$$;

-- Returns an event as a row of the retry queue for a subscriber.
create or replace function pgque._as_retry(
  p_event pgque.event, p_sub pgque.subscriber, p_receives int, p_due timestamptz, p_batch bigint, p_worker text
) returns pgque.retry_queue
language sql volatile as $$
  select row(p_due, p_sub.sub_queue, p_event.ev_id, p_event.ev_time, p_event.ev_txid, coalesce(p_sub.sub_main, p_sub.sub_id), p_event.ev_retry,
    p_event.ev_type, p_event.ev_data, p_event.ev_extra1, p_event.ev_extra2, p_event.ev_extra3, p_event.ev_extra4,
    p_event.ev_headers, p_event.ev_key, p_event.ev_bytes, p_event.ev_expires, p_event.ev_error,
    p_receives, p_batch, p_worker, pgque._lane(p_event.ev_key, p_event.ev_extra1))::pgque.retry_queue
$$;

-- Returns how many messages with an expired lease are delivered together: fewer each
-- time, and on the last attempt each one alone.  With 5 attempts and 100 messages these
-- are 100, 22, 5, 1.  So a message that kills its worker is alone at last.  A message
-- that was requeued while it was leased counts from zero.
--
-- A worker that dies takes all that it holds with it.  So a message of which a delivery
-- was lost gets its last attempt alone in its worker: the worker holds nothing else, and
-- receives nothing until it is done (see _begin_delivery).  Otherwise messages that were delivered
-- beside poison would use up their attempts with it.
create or replace function pgque._redelivery_size(p_receives int, p_attempts int, p_max bigint) returns bigint
language sql immutable as $$
  select case
    when least(p_attempts, 5) - greatest(p_receives, 1) <= 1 then 1
    else pg_catalog.ceil(pg_catalog.power(p_max, (least(p_attempts, 5) - greatest(p_receives, 1) - 1)::numeric / (least(p_attempts, 5) - 2)))::bigint
  end
$$;

-- Returns whether a message that is due has its last attempt before it, and a delivery of
-- it was lost.  A delivery that ends with a nack adds one to both numbers.
create or replace function pgque._may_be_poison(p_receives int, p_retry int, p_attempts int) returns boolean
language sql immutable as $$ select p_receives = p_attempts - 1 and p_receives > coalesce(p_retry, 0) $$;

-- Returns whether a worker of a pool holds messages.
create or replace function pgque._worker_has_messages(p_sub pgque.subscriber, p_worker text, p_now timestamptz) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return exists (
      select from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_batch is not null and r.ev_worker = p_worker and r.ev_retry_after > p_now)
    or exists (select from pgque._open_batches(p_sub.sub_id) h where (h.lease).pos_worker = p_worker and h.until > p_now);
end
$$;

-- Locks messages of a consumer in the retry queue that are due, without those in p_but.
-- p_receives null: any of them; -1: those without an expired lease; else those with an
-- expired lease and p_receives deliveries.  None is due before p_from.
create or replace function pgque._due(p_sub pgque.subscriber, p_max bigint, p_now timestamptz, p_but bigint[], p_receives int, p_from timestamptz default '-infinity')
returns pgque.retry_queue[]
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  if p_sub.sub_keyed then
    return array(
      select r from pg_catalog.unnest(pgque._heads_of_lanes(p_sub, p_max, p_now, p_but, p_from)) r
      where p_receives is null or p_receives = case when r.ev_batch is null then -1 else r.ev_receives end);
  end if;
  return array(
    select pgque._slim_retry(r)
    from (
      select r.* from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_retry_after >= p_from and r.ev_retry_after <= p_now
        and (r.ev_id in (select pg_catalog.unnest((select p_but)))) is not true
        and (p_receives is null or p_receives = case when r.ev_batch is null then -1 else r.ev_receives end)
      order by r.ev_retry_after, r.ev_id
      limit p_max
      for update skip locked
    ) r);
end
$$;

-- Leases messages in the retry queue that are due, and returns their number.  Messages
-- that expired, or whose attempts are used up, are removed instead.  A message with an
-- expired lease may be poison: other messages are not delivered with it.  Returns null
-- if the worker has to finish what it holds first.  It waits for a visibility timeout at
-- most, since a name that many processes share may always hold something.  No message is
-- due before p_from.
create or replace function pgque._lease_retries(
  p_queue pgque.queue, p_sub pgque.subscriber, p_token bigint, p_max bigint, p_worker text, p_until timestamptz, p_bytes bigint default null,
  p_from timestamptz default '-infinity'
) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now       timestamptz := pgque.clock();
  v_attempts  int := case when p_sub.sub_role = 'pool' then p_queue.queue_max_receive_attempts else 2147483647 end;
  v_rows      pgque.retry_queue[];
  v_doomed    pgque.retry_queue[];
  v_good      pgque.retry_queue[];
  v_ids       bigint[];
  v_busy      bigint[] := '{}';
  v_lapsed    boolean;
  v_piece     bigint;
  v_look      bigint;
begin
  for v_try in 0..99 loop
    -- The first message decides how many are delivered together.  The others stay
    -- unlocked, since their holder may be about to acknowledge them.
    v_rows := pgque._due(p_sub, 1, v_now, v_busy, null, p_from);
    exit when pg_catalog.cardinality(v_rows) = 0;
    v_lapsed := v_rows[1].ev_batch is not null;
    if p_sub.sub_role = 'pool' and pgque._may_be_poison(v_rows[1].ev_receives, v_rows[1].ev_retry, v_attempts) and (v_rows[1].ev_expires <= v_now) is not true then
      if v_rows[1].ev_retry_after > v_now - p_queue.queue_visibility_timeout and pgque._worker_has_messages(p_sub, p_worker, v_now) then
        return null;
      end if;
      p_max := 1;
    end if;
    v_piece := case when v_lapsed and p_sub.sub_role = 'pool' then pgque._redelivery_size(v_rows[1].ev_receives, v_attempts, p_max) else p_max end;
    -- Messages that are not to be delivered are removed many at a time.  After a try in
    -- which all messages were being replaced, twice as many are read.
    v_look := greatest(v_piece, least(1 << least(v_try, 10), 1000));
    if v_rows[1].ev_receives >= v_attempts or v_rows[1].ev_expires <= v_now then
      v_look := greatest(v_look, 1000);
    end if;
    if v_look > 1 then
      v_rows := pgque._due(p_sub, v_look, v_now, v_busy, case when v_lapsed then v_rows[1].ev_receives else -1 end, p_from);
      if p_max > 1 then
        v_rows := array(
          select r from pg_catalog.unnest(v_rows) r where not pgque._may_be_poison(r.ev_receives, r.ev_retry, v_attempts) or r.ev_expires <= v_now);
      end if;
    end if;
    v_doomed := array(select r from pg_catalog.unnest(v_rows) r where r.ev_receives >= v_attempts or r.ev_expires <= v_now);
    v_good := pgque._choose_retries(p_queue, p_sub, v_doomed, v_now);
    -- No more of the others than are delivered, since a seal fixes their bodies.
    v_good := v_good || pgque._choose_retries(p_queue, p_sub,
      array(select r from pg_catalog.unnest(v_rows) r where (r.ev_receives >= v_attempts or r.ev_expires <= v_now) is not true), v_now,
      v_piece - pg_catalog.cardinality(v_good));
    -- If none can be delivered, all were removed, or are just being replaced: of those,
    -- no more than some thousands are read.
    v_busy := v_busy || array(select r.ev_id from pg_catalog.unnest(v_rows) r);
    v_ids := array(select r.ev_id from pg_catalog.unnest(v_good) r limit v_piece);
    if p_bytes is not null then
      v_ids := array(
        select s.id
        from (
          select i.id, i.n, sum(pgque._size(e.ev_data, e.ev_bytes, e.ev_headers)) over (order by i.n) as bytes
          from pg_catalog.unnest(v_ids) with ordinality i (id, n)
          cross join lateral (select e.* from pgque.retry_queue e where e.ev_owner + 0 = p_sub.sub_id and e.ev_id = i.id offset 0) e
        ) s
        where s.n = 1 or s.bytes <= p_bytes
        order by s.n);
    end if;
    if pg_catalog.cardinality(v_ids) > 0 then
      -- One index lookup for each message, whatever number of rows the planner expects.
      with found as materialized (
        select f.ctid
        from pg_catalog.unnest(v_ids) i (id)
        cross join lateral (select e.ctid from pgque.retry_queue e where e.ev_owner + 0 = p_sub.sub_id and e.ev_id = i.id offset 0) f
      )
      update pgque.retry_queue r
      set ev_batch = p_token, ev_worker = p_worker, ev_retry_after = p_until, ev_receives = r.ev_receives + 1
      from found f
      where r.ctid = f.ctid;
      -- A message that waited for its first delivery was not delivered before.
      perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'redelivered', count(*))
      from (select r.* from pg_catalog.unnest(v_good) r limit pg_catalog.cardinality(v_ids)) r
      where r.ev_receives > 0 or r.ev_retry > 0;
      return pg_catalog.cardinality(v_ids);
    end if;
    exit when v_try >= 15 and pg_catalog.cardinality(v_doomed) = 0;
  end loop;
  return 0;
end
$$;

-- Returns the given messages that may be delivered, at most p_enough.  Expired
-- messages among them, and those whose attempts are used up, are removed.  The limit of
-- attempts applies here, at a nack and in maint(), never while a lease lives.
create or replace function pgque._choose_retries(
  p_queue pgque.queue, p_sub pgque.subscriber, p_rows pgque.retry_queue[], p_now timestamptz, p_enough bigint default null
)
returns pgque.retry_queue[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_row   pgque.retry_queue;
  v_gone  pgque.retry_queue;
  v_good  pgque.retry_queue[] := '{}';
begin
  foreach v_row in array p_rows loop
    exit when pg_catalog.cardinality(v_good) >= p_enough;
    if v_row.ev_key is not null and v_row.ev_receives = 0 then
      v_row := pgque._claim_retry(p_queue, v_row);
      continue when v_row.ev_id is null;
    end if;
    if v_row.ev_expires <= p_now or p_sub.sub_role = 'pool' and v_row.ev_receives >= p_queue.queue_max_receive_attempts then
      delete from pgque.retry_queue r where r.ev_owner + 0 = v_row.ev_owner and r.ev_id = v_row.ev_id returning r.* into v_gone;
      if v_row.ev_expires <= p_now then
        perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'expired', 1);
      else
        perform pgque._give_up(p_queue, p_sub, v_gone, coalesce(case when v_gone.ev_batch is null then v_gone.ev_error end, 'receive attempts used up'));
      end if;
    else
      v_good := v_good || v_row;
    end if;
  end loop;
  return v_good;
end
$$;

-- Returns a row of the retry queue as the event it was.
create or replace function pgque._as_event(p_row pgque.retry_queue) returns pgque.event
language sql immutable as $$
  select row(null, null, p_row.ev_id, p_row.ev_time, p_row.ev_txid, p_row.ev_retry, p_row.ev_type, p_row.ev_data,
    p_row.ev_extra1, p_row.ev_extra2, p_row.ev_extra3, p_row.ev_extra4, p_row.ev_headers, p_row.ev_key, p_row.ev_bytes,
    p_row.ev_expires, p_row.ev_error)::pgque.event
$$;

-- Counts messages that are removed or redelivered.
create or replace function pgque._count(p_queue_id int, p_sub int, p_what text, p_count bigint) returns void
language plpgsql as $$
begin
  if p_count > 0 then
    insert into pgque.tally values (p_queue_id, p_sub, p_what, p_count, pgque._journal_leaf());
  end if;
end
$$;
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
-- ---------------------------------------------------------------------------
-- leases: release, extend and reclaim batches, share a consumer
-- ---------------------------------------------------------------------------

-- Returns the consumer of a pool's batch; PQ005 for any other batch, whose lease has no
-- end.
create or replace function pgque._pool_of(p_batch bigint) returns pgque.subscriber
language plpgsql as $$
declare
  v_sub  pgque.subscriber := pgque._batch_owner(p_batch);
begin
  if v_sub.sub_role <> 'pool' then
    perform pgque._fail('PQ005', pg_catalog.format('batch %s is not leased', p_batch),
      'Receive with a worker to get a lease. A consumer without workers keeps its batch until it finishes it.');
  end if;
  return v_sub;
end
$$;

create or replace function pgque.release(batch_id bigint, msg_ids bigint[] default null, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return (select count(*) from pgque._set_outcomes(pgque._batch_for(caller, $1), $2, 'release', null, null, false) f where f.ok);
end
$$;
comment on function pgque.release(bigint, bigint[], pgque.caller) is
  'Releases messages of a batch, all by default, and returns their number. They can be received at once, by any worker of the consumer. A release is '
  'no failure: retry_count stays; receive_count counts each delivery. A consumer without workers acknowledges the batch afterwards, and receives the '
  'messages in another one.';

create or replace function pgque.set_visibility(batch_id bigint, visibility_timeout interval, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  if pgque._not_negative(coalesce($2, '-1 second'), 'visibility_timeout', $1) = '0' then
    perform pgque._pool_of(pgque._batch_for(caller, $1));
    return pgque.release($1, null, caller);
  end if;
  return pgque._lease_until(pgque._batch_for(caller, $1), $2, false);
end
$$;
comment on function pgque.set_visibility(bigint, interval, pgque.caller) is
  'Earlier form of extend(): sets when the lease on a worker''s batch expires, counted from now, so that it can also shorten the lease; 0 releases '
  'the batch, as release() does. Returns the number of messages still leased, 0 if the batch is lost. Errors: PQ005 visibility_timeout is NULL, '
  'negative or above 100 years.';

create or replace function pgque.extend(batch_id bigint, by interval, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._not_negative(coalesce($2, '-1 second'), 'the time to add', $1);
  return pgque._lease_until(pgque._batch_for(caller, $1), $2, true);
end
$$;
comment on function pgque.extend(bigint, interval, pgque.caller) is
  'Extends the lease on a worker''s batch by an interval; it never shortens the lease. Returns the number of messages still leased, 0 if the batch is '
  'lost. Errors: PQ005 the interval is negative or above 100 years.';

-- Moves the end of a lease: to p_span from now, or, to extend it, by p_span.
create or replace function pgque._lease_until(p_batch bigint, p_span interval, p_extend boolean) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._pool_of(p_batch);
  v_now    timestamptz := pgque.clock();
  v_state  record;
  v_until  timestamptz;
  v_full   bigint[];
  v_held   int;
begin
  perform pgque._lock_batch(v_sub, p_batch) where v_sub.sub_id is not null;
  select s.* into v_state from pgque._states(v_sub.sub_id, array[p_batch]) s;
  if v_sub.sub_keyed then
    v_full := pgque._without_room(v_sub, p_batch);
  end if;
  with found as materialized (
    select e.ctid from pgque.retry_queue e
    where e.ev_owner = v_sub.sub_id and e.ev_batch = p_batch and (e.ev_id = any (v_full)) is not true
    order by e.ev_id
    for update skip locked
  )
  update pgque.retry_queue r set ev_retry_after = case when p_extend then greatest(r.ev_retry_after, v_now) else v_now end + p_span
  from found f
  where r.ctid = f.ctid;
  get diagnostics v_held = row_count;
  if v_state.place = 'log' then
    v_until := case when p_extend then greatest(v_state.until, v_now) else v_now end + p_span;
    if p_extend then
      perform pgque._record(p_batch, 'extended', array[v_state.extended + 1], v_until);   -- 40001 after another one that this snapshot does not show
    end if;
    if p_extend and not pgque._old_snapshot() then
      v_held := v_held + (v_state.lease).pos_done_count - v_state.settled;
    else
      -- A lease that may end earlier is checked in the retry queue.  And an old snapshot
      -- may not show that the batch was closed: to move it finds it out.
      v_held := v_held + pgque._move_to_retry(v_sub, v_state.lease, v_until);
    end if;
  end if;
  return v_held;
end
$$;

-- Releases the messages of a batch, so that any worker may receive them at once.  The
-- caller holds the batch's lock.
create or replace function pgque._release_batch(p_sub pgque.subscriber, p_batch bigint) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_state  record;
  v_fresh  bigint := 0;
  v_count  bigint;
begin
  select s.* into v_state from pgque._states(p_sub.sub_id, array[p_batch]) s;
  if v_state.place = 'log' then
    v_fresh := pgque._move_to_retry(p_sub, v_state.lease, pgque.clock(), 0);
  end if;
  -- A maintenance session that has one of them locked may roll back: this waits for it.
  update pgque.retry_queue r set ev_batch = null, ev_worker = null, ev_retry_after = pgque.clock()
  where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch;
  get diagnostics v_count = row_count;
  return v_fresh + v_count;
end
$$;

-- Returns the batches of a consumer that workers hold, also those whose lease expired.
create or replace function pgque._batches_of(p_sub int) returns setof bigint
language sql set enable_seqscan = off set jit = off as $$
  select h.token from pgque._open_batches(p_sub) h
  union
  select r.ev_batch from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_batch is not null
$$;

create or replace function pgque.reclaim(
  queue_name text, consumer_name text, older_than interval default '0', msg_id bigint default null, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber((pgque._queue($1, caller, 'admin')).queue_name, $2);
  v_now    timestamptz := pgque.clock();
  v_token  bigint;
  v_count  int := 0;
begin
  if $3 is null then
    perform pgque._fail('PQ005', format('older_than must not be null, for consumer %I of queue %I', $2, $1),
      'Pass the age of the batches to release, such as ''10 minutes''. ''0'' releases all of them.');
  end if;
  if $4 is not null then
    v_count := (
      select count(*)
      from pgque._batches_with(v_sub.sub_id, $4) b (id)
      cross join lateral pgque._lease(v_sub.sub_id, b.id) l
      cross join lateral pgque._set_outcomes(b.id, array[$4], 'release', null, null, true) o
      where v_sub.sub_role = 'pool' and (l.pos_time > v_now - $3 and l.pos_time <= v_now) is not true and o.ok);
    perform pgque._record_action('reclaim', $1, jsonb_build_object('consumer_name', $2, 'older_than', $3, 'msg_id', $4)) where v_count > 0;
    return v_count;
  end if;
  perform pgque._lock_subscriber(v_sub.sub_id);
  -- A worker that is just finishing its batch keeps it.
  foreach v_token in array pgque._try_lock_batches(v_sub, array(
    select b.id
    from pgque._batches_of(v_sub.sub_id) b (id)
    cross join lateral pgque._lease(v_sub.sub_id, b.id) l
    where v_sub.sub_role = 'pool' and (l.pos_time > v_now - $3 and l.pos_time <= v_now) is not true), 500)
  loop
    v_count := v_count + (pgque._release_batch(v_sub, v_token) > 0)::int;
  end loop;
  perform pgque._record_action('reclaim', $1, jsonb_build_object('consumer_name', $2, 'older_than', $3, 'batches', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.reclaim(text, text, interval, bigint, pgque.caller) is
  'Releases the batches of a consumer''s workers that were received longer ago than older_than, whether or not their leases expired. Returns the '
  'number of batches. msg_id: only this message is released, and the call returns 1, or 0 if no worker has it. While workers finish batches, one '
  'call releases at most 500: call it again. Errors: PQ001 no such queue; PQ005 older_than is NULL; PQ011 not subscribed.';

create or replace function pgque.share_consumer(queue_name text, consumer_name text, caller pgque.caller default current_user) returns int
language sql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$ select pgque._change_role($1, $2, 'normal', 'pool', caller) $$;
comment on function pgque.share_consumer(text, text, pgque.caller) is
  'Turns a consumer that reads on its own into a pool of workers: from now on, receive with worker => name. Its position and pending retries stay. '
  'An open batch goes to the workers, and its batch id is invalid. Returns 1, or 0 if it is a pool already. Errors: PQ001 no such queue; PQ006 it '
  'has subconsumers; PQ011 not subscribed; 25000 not READ COMMITTED.';

create or replace function pgque.unshare_consumer(queue_name text, consumer_name text, caller pgque.caller default current_user) returns int
language sql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$ select pgque._change_role($1, $2, 'pool', 'normal', caller) $$;
comment on function pgque.unshare_consumer(text, text, pgque.caller) is
  'Turns a pool of workers into a consumer that reads on its own: from now on, receive without worker. Its position and pending retries stay. '
  'Messages that workers hold are redelivered, and their batch ids are invalid. Returns 1, or 0 if it reads on its own already. Errors: PQ001 no '
  'such queue; PQ006 it has subconsumers, or key_concurrency; PQ011 not subscribed; 25000 not READ COMMITTED; 55P03 a worker is finishing a batch.';

create or replace function pgque._change_role(p_queue text, p_consumer text, p_from text, p_to text, p_caller name) returns int
language plpgsql as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber(p_queue, p_consumer, p_caller);
  v_token  bigint;
  v_open   bigint[];
begin
  perform pgque._need_read_committed('to change who reads a consumer');
  perform pgque._lock_subscriber(v_sub.sub_id);
  v_sub := pgque._subscriber(p_queue, p_consumer, p_caller);
  if v_sub.sub_role = p_to then
    return 0;
  elsif v_sub.sub_role <> p_from or v_sub.sub_keyed then
    perform pgque._fail('PQ006', pg_catalog.format('consumer %I of queue %I has %s', p_consumer, p_queue,
        coalesce('key_concurrency ' || pgque._key_concurrency(v_sub), 'subconsumers')),
      case when v_sub.sub_keyed then pg_catalog.format('Remove this limit first: select pgque.set_key_concurrency(%L, %L, null);', p_queue, p_consumer)
        else 'Subscribe another consumer.' end);
  end if;
  v_open := array(select pgque._batches_of(v_sub.sub_id));
  if pg_catalog.cardinality(pgque._try_lock_batches(v_sub, v_open, null)) < pg_catalog.cardinality(v_open) then
    perform pgque._fail('lock_not_available', pg_catalog.format('a batch of consumer %I of queue %I is being finished', p_consumer, p_queue), 'Try again.');
  end if;
  perform pgque._release_batch(v_sub, o.token), pgque._record(o.token, 'closed') from pg_catalog.unnest(v_open) o (token);
  perform pgque._end_batches(v_sub);
  update pgque.subscriber s set sub_role = p_to, sub_offsets = false where s.sub_id = v_sub.sub_id;
  perform pgque._record_action(case p_to when 'pool' then 'share_consumer' else 'unshare_consumer' end, p_queue, pg_catalog.jsonb_build_object('consumer_name', p_consumer));
  return 1;
end
$$;

-- Stores the position of a consumer without open batches.
create or replace function pgque._end_batches(p_sub pgque.subscriber) returns void
language plpgsql as $$
declare
  v_pos  pgque.position := pgque._next_from(pgque._position(p_sub.sub_id));
begin
  v_pos.pos_open := '{}';
  v_pos.pos_lapse := null;
  perform pgque._append_position(v_pos);
end
$$;
-- ---------------------------------------------------------------------------
-- retry: messages that are due, and notifications
-- ---------------------------------------------------------------------------

-- Returns the owners whose messages the pump moves from the retry queue into the log:
-- 0, since delayed messages are for every consumer, and consumers that are read by
-- offsets, since their readers read only the log.  All other consumers receive from the
-- retry queue.
create or replace function pgque._pump_owners() returns setof int
language sql as $$
  select 0
  union all
  select s.sub_id
  from pgque.subscriber s
  where s.sub_role = 'normal' and (s.sub_offsets
    -- A consumer that never received a batch may be read by offsets too.
    or exists (select from pgque.retry_queue r where r.ev_owner = s.sub_id)
      -- While a dump is loaded, it may have no position yet.
      and case when exists (select from pgque.queue q where q.queue_id = s.sub_queue and not q.queue_restored)
        then (pgque._position(s.sub_id)).pos_last_batch = 0 end)
$$;

create or replace function pgque.maint_retry_events() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '200ms' set enable_seqscan = off set jit = off as $$
declare
  v_now       timestamptz := pgque.clock();   -- a volatile function cannot be used in an index condition
  v_queue_id  int;
  v_count     int := 0;
begin
  if pgque._loading() is not null then
    return 0;   -- maint_tables() warns
  end if;
  for v_queue_id in select q.queue_id from pgque.queue q where q.queue_restored order by q.queue_id limit greatest(pgque._lock_room() / 32, 1) loop
    begin
      continue when (select pgque._lacks(q) from pgque.queue q where q.queue_id = v_queue_id) is not null;
      perform pgque._rebase(v_queue_id);
      v_now := pgque.clock();   -- messages that were put there just now are due
    exception
      when others then
        raise warning 'pgque: no retries for queue %: % (%)', v_queue_id, sqlerrm, sqlstate;
    end;
  end loop;
  for v_queue_id in
    select distinct d.ev_queue
    from pgque._pump_owners() o (id)
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
  return v_count + pgque._notify_due(v_now);
end
$$;
comment on function pgque.maint_retry_events() is
  'Moves delayed messages that are due into their queues, at most 10,000 or about a megabyte of each queue; the next tick delivers them. Retries of consumers that are '
  'read by offsets are moved in the same way. All other consumers receive a retry as soon as it is due, and sessions that listen are notified. '
  'Returns the number of messages that became due or were moved.';

-- Notifies the consumers for whom a message became due since the last call, and returns
-- the number of messages.  Every five seconds it notifies for all messages that are
-- due, because the rows may have been committed later.
create or replace function pgque._notify_due(p_now timestamptz) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_since  timestamptz := least(pgque._last_notified(), p_now);
  v_all    boolean := p_now >= pgque._next_five(v_since);
  v_queue  record;
  v_count  int := 0;
begin
  for v_queue in
    select s.sub_queue as id, sum(r.n) filter (where r.new) as n
    from pgque.subscriber s
    cross join lateral (
      select r.ev_retry_after > v_since as new, count(*) as n
      from pgque.retry_queue r
      where r.ev_owner = s.sub_id and r.ev_retry_after > case when v_all then '-infinity' else v_since end and r.ev_retry_after <= p_now and r.ev_batch is null
      group by 1
    ) r
    where s.sub_id not in (select o.id from pgque._pump_owners() o (id))
    group by 1
  loop
    begin
      perform pgque._notify(q, (pgque._last_tick(q)).tick_id) from pgque.queue q where q.queue_id = v_queue.id and not q.queue_restored;
      v_count := v_count + coalesce(v_queue.n, 0);
    exception
      when lock_not_available or undefined_table then
        null;   -- health() names it
    end;
  end loop;
  if found then
    perform pg_catalog.setval('pgque.woken', pg_catalog.ceil(extract(epoch from p_now) * 1000000)::bigint);
  end if;
  return v_count;
end
$$;

create or replace function pgque._next_five(p_time timestamptz) returns timestamptz
language sql immutable as $$ select pg_catalog.to_timestamp(5 * (pg_catalog.floor(extract(epoch from p_time) / 5) + 1)) $$;

create or replace function pgque._last_notified() returns timestamptz
language sql as $$ select pg_catalog.to_timestamp(coalesce(pg_catalog.pg_sequence_last_value('pgque.woken'), 0) / 1000000.0) $$;

-- Returns when maint_retry_events() has work; null if the retry queue is empty, or if one
-- of the tables is locked: the loop calls this in each round, and must not wait.
create or replace function pgque._next_retry() returns timestamptz
language plpgsql set enable_seqscan = off set jit = off set lock_timeout = '20ms' as $$
declare
  v_since  timestamptz := least(pgque._last_notified(), pgque.clock());
begin
  if not exists (select from pgque.retry_queue) then
    return null;
  end if;
  return (
    select min(case when o.pumped or r.due > v_since then r.due else pgque._next_five(v_since) end)
    from (
      select o.id, true as pumped from pgque._pump_owners() o (id)
      union all
      select s.sub_id, false from pgque.subscriber s where s.sub_id not in (select o.id from pgque._pump_owners() o (id))
    ) o
    cross join lateral (
      (select r.ev_retry_after as due from pgque.retry_queue r
      where r.ev_owner = o.id and (o.id = 0 or r.ev_batch is null)
      order by r.ev_retry_after
      limit 1)
      union all
      (select r.ev_retry_after from pgque.retry_queue r
      where r.ev_owner = o.id and r.ev_retry_after > v_since and r.ev_batch is null
      order by r.ev_retry_after
      limit 1)
    ) r);
exception
  when lock_not_available then
    return null;
end
$$;

-- Returns how many bytes of messages a call moves, so that ticks do not wait for long:
-- those that begin within this number.
create or replace function pgque._bytes_of_a_call() returns bigint
language sql immutable as $$ select 1000000::bigint $$;

-- Moves messages of one queue that are due into the log, and returns their number.
create or replace function pgque._retry_queue(p_queue_id int) returns int
language plpgsql as $$
declare
  v_txid    xid8 := pg_catalog.pg_current_xact_id();
  v_now     timestamptz;
  v_aside   record;
  v_found   record;
  v_places  tid[] := '{}';
  v_bytes   bigint := 0;
  v_count   int;
begin
  perform pgque._rebase(p_queue_id);
  if not exists (select from pgque.queue q where q.queue_id = p_queue_id) then
    return 0;
  end if;
  v_now := pgque.clock();   -- messages that were put there just now are due
  v_aside := pgque._claim_retries(p_queue_id, array(
    select pgque._slim_retry(e.item)
    from pgque.subscriber s
    cross join lateral (
      select e as item from pgque.retry_queue e
      where e.ev_owner = s.sub_id and e.ev_retry_after <= v_now and e.ev_key is not null and e.ev_receives = 0
      order by e.ev_retry_after
      limit 10000
      for update skip locked
    ) e
    where s.sub_queue = p_queue_id and s.sub_id in (select o.id from pgque._pump_owners() o (id))
    limit 10000));
  -- A loop, since it ends with the bytes of those that it could lock: messages that an open
  -- transaction has locked do not hold back those behind them.
  for v_found in
    select e.place, e.bytes
    from (
      select o.id from pgque._pump_owners() o (id)
      where o.id = 0 or exists (select from pgque.subscriber s where s.sub_id = o.id and s.sub_queue = p_queue_id)
    ) o
    cross join lateral (
      select e.ctid as place, pgque._size(e.ev_data, e.ev_bytes, e.ev_headers) as bytes
      from pgque.retry_queue e
      where e.ev_owner = o.id and e.ev_queue = p_queue_id and e.ev_retry_after <= v_now
        and (e.ev_key is null or e.ev_receives > 0 or e.ev_owner = 0
          or (e.ev_owner, e.ev_id) in (select f.owner, f.id from rows from (pg_catalog.unnest(v_aside.owners), pg_catalog.unnest(v_aside.ids)) f (owner, id)))
      order by e.ev_retry_after
      limit 10000
      for update skip locked
    ) e
    limit 10000
  loop
    v_places := v_places || v_found.place;
    v_bytes := v_bytes + v_found.bytes;
    exit when v_bytes >= pgque._bytes_of_a_call();
  end loop;
  with due as (
    delete from pgque.retry_queue r
    where r.ctid = any (v_places)
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
  -- Each of these messages enters the log under an old id, and takes an unused one too:
  -- the loop sees by it that there is something to tick, and max_depth counts ids.
  perform pgque._note_once(q.queue_id, 'moved') from pgque.queue q where q.queue_id = p_queue_id and v_count > 0;
  perform pg_catalog.nextval(q.queue_event_seq) from pgque.queue q, pg_catalog.generate_series(1, v_count) where q.queue_id = p_queue_id;
  return v_count;
end
$$;

create or replace function pgque.retry_now(queue_name text, consumer_name text, msg_id bigint default null, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber((pgque._queue($1, caller, 'admin')).queue_name, $2);
  v_now    timestamptz := pgque.clock();
  v_count  bigint;
begin
  update pgque.retry_queue r set ev_retry_after = v_now
  where r.ev_owner = v_sub.sub_id and r.ev_retry_after > v_now and r.ev_batch is null and ($3 is null or r.ev_id = $3);
  get diagnostics v_count = row_count;
  perform pgque._record_action('retry_now', $1, jsonb_build_object('consumer_name', $2, 'msg_id', $3, 'messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.retry_now(text, text, bigint, pgque.caller) is
  'Makes all pending retries of a consumer due now, for example after a repair, or after a clock that was ahead. msg_id: only this message. Returns their number. Errors: '
  'PQ001 no such queue; PQ011 not subscribed.';
-- ---------------------------------------------------------------------------
-- dead: dead letters
-- ---------------------------------------------------------------------------

-- Gives a message up: the queue's drop_policy decides what becomes of it.  A dead letter
-- for another queue is stored here too, because the other queue may be full or paused,
-- and an outcome must not fail or wait for that: _forward_letters() sends it there.
create or replace function pgque._give_up(p_queue pgque.queue, p_sub pgque.subscriber, p_item pgque.retry_queue, p_reason text) returns void
language plpgsql as $$
begin
  if p_queue.queue_drop_policy = 'drop' then
    perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'dropped', 1);
  else
    perform pgque._add_dead_letter(p_item, p_sub.sub_consumer, p_reason, p_queue.queue_drop_policy = 'hold',
      case when p_queue.queue_drop_policy = 'dead_letter' then p_queue.queue_dead_letter_queue end);
  end if;
end
$$;

-- Stores a message as a dead letter of a consumer; false if it is one already.
-- p_forward: the queue that it is forwarded to.
create or replace function pgque._add_dead_letter(
  p_item pgque.retry_queue, p_consumer int, p_reason text, p_held boolean, p_forward int default null
) returns boolean
language plpgsql as $$
begin
  -- A reader of offsets gets each body of a key that it has not read yet, under one id:
  -- the newest is kept.
  if p_item.ev_key is not null then
    delete from pgque.dead_letter d
    where d.dl_queue_id = p_item.ev_queue and d.dl_consumer_id = p_consumer and d.ev_id = p_item.ev_id and d.ev_txid < p_item.ev_txid;
  end if;
  perform pgque._need_queue(p_item.ev_queue);
  insert into pgque.dead_letter (dl_queue_id, dl_consumer_id, dl_time, dl_reason, dl_receives, dl_held, dl_forward, ev_error,
    ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)
  values (p_item.ev_queue, p_consumer, pgque.clock(), p_reason, p_item.ev_receives, p_held, p_forward, coalesce(p_item.ev_error, p_reason),
    p_item.ev_id, p_item.ev_time, p_item.ev_txid, p_item.ev_retry, p_item.ev_type, p_item.ev_data,
    p_item.ev_extra1, p_item.ev_extra2, p_item.ev_extra3, p_item.ev_extra4,
    p_item.ev_headers, p_item.ev_key, p_item.ev_bytes, p_item.ev_expires)
  on conflict on constraint dead_letter_once do nothing;
  return found;
end
$$;

-- Forwards dead letters to the queues that were nominated for them when their messages
-- were given up.  If a queue does not take them now, because it is full, paused, locked or
-- not restored completely, they stay for a later call.  Returns how many letters it
-- forwarded or kept; null if none was waiting.
create or replace function pgque._forward_letters() returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '200ms' set enable_seqscan = off set jit = off as $$
declare
  v_target  int;
  v_count   bigint;
begin
  for v_target in
    with recursive target (id) as (
      select min(d.dl_forward) from pgque.dead_letter d where d.dl_forward is not null
      union all
      select (select min(d.dl_forward) from pgque.dead_letter d where d.dl_forward > t.id) from target t where t.id is not null
    )
    select t.id from target t where t.id is not null
  loop
    v_count := coalesce(v_count, 0);
    begin
      v_count := v_count + pgque._forward_letters_to(v_target);
    exception
      when sqlstate 'PQ001' or sqlstate 'PQ003' or sqlstate 'PQ013' or undefined_table or object_not_in_prerequisite_state
        or lock_not_available or serialization_failure
      then
        null;
      when others then
        raise warning 'pgque: dead letters are not forwarded to queue number %: % (%)', v_target, sqlerrm, sqlstate;
    end;
  end loop;
  return v_count;
exception
  when lock_not_available then
    return 0;   -- an upgrade has the table of dead letters
end
$$;

-- Forwards the oldest dead letters to one queue.  If the queue of a letter names another
-- dead_letter_queue by now, or none, as after a drop, the letter stays for good.  Near
-- max_depth each send counts messages, so that a call forwards few.
create or replace function pgque._forward_letters_to(p_target int) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_target  pgque.queue;
  v_most    bigint := 1000;
  v_count   bigint;
begin
  select q.* into v_target from pgque.queue q where q.queue_id = p_target;
  if v_target.queue_max_depth > 0 then
    v_most := least(v_most, pgque._room_left(v_target, 1));
    v_most := case when v_most < 1000 then least(v_most, 10) else v_most end;
  end if;
  with locked as materialized (
    select d.dl_id, q.queue_name, (q.queue_dead_letter_queue = p_target and q.queue_drop_policy = 'dead_letter') is true as nominates,
      pgque._size(d.ev_data, d.ev_bytes, d.ev_headers) as bytes
    from pgque.dead_letter d
    join pgque.queue q on q.queue_id = d.dl_queue_id and not q.queue_restored
    where d.dl_forward = p_target
    order by d.dl_id
    limit v_most
    for update of d skip locked
  ),
  found as materialized (
    select l.* from (select l.*, sum(l.bytes) over (order by l.dl_id) - l.bytes as before from locked l) l where l.before < pgque._bytes_of_a_call()
  ),
  kept as (
    update pgque.dead_letter d set dl_forward = null from found f where d.dl_id = f.dl_id and not f.nominates
    returning d.dl_id
  ),
  letter as (
    delete from pgque.dead_letter d using found f where d.dl_id = f.dl_id and f.nominates
    returning d.*, f.queue_name
  ),
  counted as (
    insert into pgque.tally (tal_queue, tal_sub, tal_what, tal_count, leaf)
    select l.dl_queue_id, coalesce(s.sub_id, 0), 'forwarded', count(*), pgque._journal_leaf()
    from letter l
    left join pgque.subscriber s on s.sub_queue = l.dl_queue_id and s.sub_consumer = l.dl_consumer_id and s.sub_main is null
    group by 1, 2
  )
  select count(pgque._send(v_target.queue_name, l.ev_type, l.ev_data, l.ev_extra1, l.ev_extra2, l.ev_extra3, l.ev_extra4,
    coalesce(l.ev_headers, '{}') || pg_catalog.jsonb_build_object('pgque_dead', pg_catalog.jsonb_build_object(
      'queue', l.queue_name,
      'consumer', (select c.co_name from pgque.consumer c where c.co_id = l.dl_consumer_id),
      'msg_id', l.ev_id, 'reason', l.dl_reason, 'receive_count', l.dl_receives,
      'retry_count', coalesce(l.ev_retry, 0), 'dead_at', l.dl_time)),
    l.ev_bytes)) + (select count(*) from kept)
  into v_count
  from (select l.* from letter l order by l.dl_id) l;
  return v_count;
end
$$;

-- Returns a condition that finds a text in columns, in upper or lower case; null if
-- there is no text.
create or replace function pgque._matching_sql(p_text text, p_columns text) returns text
language sql stable as $$
  select 'pg_catalog.strpos(pg_catalog.lower(pg_catalog.concat_ws('' '', ' || p_columns || ')), pg_catalog.lower(' || pg_catalog.quote_literal(p_text) || ')) > 0'
$$;

-- No index serves the filters.  Without one that matches, 100,000 dead letters are read
-- in 15 to 50 ms.  An index for each of eight filters would slow each dead letter down.
create or replace function pgque.dlq_inspect(
  queue_name text, limit_count int default 100, reason text default null, only_type text default null, only_key text default null,
  only_consumer text default null, since timestamptz default null, until timestamptz default null, matching text default null,
  before_id bigint default null, caller pgque.caller default current_user,
  out dl_id bigint, out dl_time timestamptz, out dl_reason text,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text, out consumer_name text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out payload_size int, out receive_count int, out dl_held boolean
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set datestyle = 'ISO' set jit = off as $f$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query execute format(
    $q$
    select d.dl_id, d.dl_time, d.dl_reason, d.ev_id, d.ev_time, d.ev_txid, d.ev_retry, d.ev_type, d.ev_data,
      d.ev_extra1, d.ev_extra2, d.ev_extra3, d.ev_extra4, c.co_name, d.ev_headers, d.ev_key, d.ev_bytes,
      coalesce(octet_length(d.ev_data), octet_length(d.ev_bytes), 0), d.dl_receives, d.dl_held
    from pgque.dead_letter d
    join pgque.consumer c on c.co_id = d.dl_consumer_id
    where %s
    order by d.dl_id desc
    limit %s
    $q$,
    concat_ws(' and ', 'd.dl_queue_id = ' || v_queue.queue_id, 'd.dl_id < ' || $10, 'd.ev_type = ' || quote_literal($4),
      'd.ev_key = ' || quote_literal($5), 'c.co_name = ' || quote_literal($6), 'd.dl_time >= ' || quote_literal($7), 'd.dl_time < ' || quote_literal($8),
      format('pgque._has_reason(d.dl_reason, %L)', $3),
      pgque._matching_sql($9, 'pg_catalog.left(d.ev_data, 100000), d.ev_headers::text, d.dl_reason')),
    case when $2 < 0 then '0' else coalesce($2::text, 'all') end);
end
$f$;
comment on function pgque.dlq_inspect(text, int, text, text, text, text, timestamptz, timestamptz, text, bigint, pgque.caller) is
  'Returns the newest dead letters of a queue, at most limit_count (NULL: all), with consumer and reason. reason: only those with this reason, as '
  'returned here or by dlq_reasons(). only_type, only_key, only_consumer: only those of this type, key or consumer. since, until: only those given '
  'up at since or later, and before until. matching: only those with this text in the payload (its first 100,000 characters), the headers or the '
  'reason, in upper or lower case (of the letters that the database''s locale knows). before_id: only those older than this dl_id, to read page by '
  'page. A filter that few dead letters satisfy makes the call read all of the queue. payload_size: bytes. dl_held: kept by drop_policy hold. '
  'Errors: PQ001 no such queue.';

-- The rows have the words of list_messages() in place of PgQ's column names.  Only the
-- roles that may read the table may read the view: a view reads with its owner's rights,
-- so a role with a right to one queue calls dlq_inspect(), which checks that right.
create or replace view pgque.dead_letters as
select q.queue_name as queue, c.co_name as consumer, d.dl_id, d.ev_id as msg_id, d.ev_type as type, d.ev_data as payload, d.ev_bytes as payload_bytes,
  d.ev_headers as headers, d.ev_key as key, d.dl_reason as reason, greatest(d.dl_receives, d.ev_retry) as receive_count, coalesce(d.ev_retry, 0) as retry_count,
  d.ev_time as created_at, d.dl_time as dead_at, d.ev_expires as expires_at, d.dl_held as held
from pgque.dead_letter d
join pgque.queue q on q.queue_id = d.dl_queue_id
join pgque.consumer c on c.co_id = d.dl_consumer_id;
comment on view pgque.dead_letters is
  'Lists the dead letters of all queues, with the words of list_messages() as columns. Only for the role pgque_admin; with a right to one queue, '
  'call dlq_inspect().';
comment on column pgque.dead_letters.queue is 'Name of the queue.';
comment on column pgque.dead_letters.consumer is 'Name of the consumer that failed the message.';
comment on column pgque.dead_letters.dl_id is 'Number of the dead letter: the argument of dlq_requeue() and dlq_replay().';
comment on column pgque.dead_letters.msg_id is 'Id of the message.';
comment on column pgque.dead_letters.type is 'Type of the message.';
comment on column pgque.dead_letters.payload is 'The text or JSON that was sent.';
comment on column pgque.dead_letters.payload_bytes is 'The payload, if it was sent as bytes; payload is NULL then.';
comment on column pgque.dead_letters.headers is 'Metadata that the sender gave: a JSON object.';
comment on column pgque.dead_letters.key is 'Key that the sender gave; NULL if none.';
comment on column pgque.dead_letters.reason is 'Why the message was given up: the reason of the last nack(), or that of pgque, such as retention period passed.';
comment on column pgque.dead_letters.receive_count is 'How often the message was delivered; for a consumer on its own, how often it failed.';
comment on column pgque.dead_letters.retry_count is 'How often the message was redelivered after it was rejected.';
comment on column pgque.dead_letters.created_at is 'When the message was sent.';
comment on column pgque.dead_letters.dead_at is 'When the message became a dead letter.';
comment on column pgque.dead_letters.expires_at is 'When the message expires; NULL: never.';
comment on column pgque.dead_letters.held is 'Whether drop_policy hold keeps the dead letter.';

-- Returns the common form of reasons that differ only by numbers.  Digits after a letter
-- belong to a word (utf8), and so do one or two digits after a letter and a hyphen
-- (utf-8, but not order-4711).
create or replace function pgque._reason_kind(p_reason text) returns text
language sql immutable as $$
  select coalesce(pg_catalog.left(pg_catalog.regexp_replace(p_reason, '(?<![[:alnum:]])(?:(?<![[:alpha:]]-)\d+|\d{3,})', 'N', 'g'), 200), '')
$$;

-- Returns whether a reason is p_wanted, as it is or as _reason_kind() returns it; null
-- stands for any.
create or replace function pgque._has_reason(p_reason text, p_wanted text) returns boolean
language sql immutable as $$
  select p_wanted is null or coalesce(p_reason = p_wanted, false) or pgque._reason_kind(p_reason) = p_wanted
$$;

create or replace function pgque.dlq_reasons(
  queue_name text, limit_count int default 200000, caller pgque.caller default current_user,
  out consumer_name text, out reason text, out dead_letters bigint, out held bigint, out oldest timestamptz, out newest timestamptz, out newest_dl_id bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query
    select c.co_name, pgque._reason_kind(d.dl_reason), sum(d.n)::bigint, sum(d.held)::bigint, min(d.oldest), max(d.newest), max(d.newest_id)
    from (
      select d.dl_consumer_id, d.dl_reason, count(*) as n, count(*) filter (where d.dl_held) as held, min(d.dl_time) as oldest, max(d.dl_time) as newest,
        max(d.dl_id) as newest_id
      from (
        select d.dl_consumer_id, d.dl_reason, d.dl_held, d.dl_time, d.dl_id
        from pgque.dead_letter d
        where d.dl_queue_id = v_queue.queue_id
        order by d.dl_id desc
        limit case when $2 < 0 then 0 else $2 end
      ) d
      group by d.dl_consumer_id, d.dl_reason
    ) d
    join pgque.consumer c on c.co_id = d.dl_consumer_id
    group by c.co_name, pgque._reason_kind(d.dl_reason)
    order by 3 desc, 1, 2;
end
$$;
comment on function pgque.dlq_reasons(text, int, pgque.caller) is
  'Returns why the dead letters of a queue were given up, one row for each consumer and reason, the most frequent first. The columns are the '
  'number of dead letters, the number of held ones, the times of the oldest and the newest, and the dl_id of the newest. A reason is cut at 200 '
  'characters, shows numbers as N (not digits of a word, such as utf-8), and is empty if none was given. The newest limit_count dead letters count (NULL: all). Errors: PQ001 no such queue.';

-- Deletes a dead letter and returns it, or raises PQ008.  Two sessions cannot take the
-- same one.  p_call: the function to record in list_actions(), if a role calls it by
-- hand for this dead letter.
create or replace function pgque._take_dead_letter(p_dl_id bigint, p_caller name, p_call text default null) returns pgque.dead_letter
language plpgsql as $$
declare
  v_dead  pgque.dead_letter;
begin
  delete from pgque.dead_letter d
  where d.dl_id = p_dl_id and pgque._may(p_caller, 'admin', d.dl_queue_id)
  returning d.* into v_dead;
  if not found then
    perform pgque._fail('PQ008', pg_catalog.format('not a dead letter: %s', coalesce(p_dl_id::text, 'null')),
      'List the dead letters: select * from pgque.dlq_inspect(queue); This one was replayed, requeued, purged or forwarded already.');
  end if;
  perform pgque._record_action(p_call, q.queue_name, pg_catalog.jsonb_build_object('dl_id', p_dl_id, 'msg_id', v_dead.ev_id))
  from pgque.queue q
  where q.queue_id = v_dead.dl_queue_id and p_call is not null;
  return v_dead;
end
$$;

create or replace function pgque._replay(p_dead pgque.dead_letter) returns bigint
language plpgsql as $$
begin
  return pgque._send(
    (select q.queue_name from pgque.queue q where q.queue_id = p_dead.dl_queue_id), p_dead.ev_type, p_dead.ev_data,
    p_dead.ev_extra1, p_dead.ev_extra2, p_dead.ev_extra3, p_dead.ev_extra4, p_dead.ev_headers, p_dead.ev_bytes);
end
$$;

create or replace function pgque.dlq_replay(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_dead  pgque.dead_letter := pgque._take_dead_letter(dlq_replay.dl_id, caller, 'dlq_replay');
begin
  return pgque._replay(v_dead);
end
$$;
comment on function pgque.dlq_replay(bigint, pgque.caller) is
  'Sends a dead letter as a new message to every consumer of its queue, deletes the dead letter, and returns the new id. Errors: PQ003 the queue is full; PQ008 no '
  'such dead letter; PQ013 the queue is paused.';

create or replace function pgque.dlq_replay_all(
  queue_name text, limit_count int default null, reason text default null, caller pgque.caller default current_user,
  out replayed int, out failed int, out first_error text
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_id     bigint;
begin
  replayed := 0;
  failed := 0;
  for v_id in
    select d.dl_id
    from pgque.dead_letter d
    where d.dl_queue_id = v_queue.queue_id and pgque._has_reason(d.dl_reason, $3)
    order by d.dl_id
    limit case when $2 < 0 then 0 else $2 end
  loop
    begin
      perform pgque._replay(pgque._take_dead_letter(v_id, caller));
      replayed := replayed + 1;
    exception
      when sqlstate 'PQ008' then
        null;   -- another session took it meanwhile
      when others then
        failed := failed + 1;
        first_error := coalesce(first_error, sqlerrm);
    end;
  end loop;
  perform pgque._record_action('dlq_replay_all', v_queue.queue_name, jsonb_build_object('reason', $3, 'replayed', replayed, 'failed', failed)) where replayed > 0;
end
$$;
comment on function pgque.dlq_replay_all(text, int, text, pgque.caller) is
  'Replays the oldest dead letters of a queue, at most limit_count (NULL: all). reason: only those with this reason, as stored or as dlq_reasons() '
  'returns it. Returns replayed (the number that was sent), failed (the number that could not be sent, and stays) and first_error. Errors: PQ001 '
  'no such queue.';

create or replace function pgque._requeue(p_dead pgque.dead_letter) returns bigint
language plpgsql as $$
declare
  v_sub  int;
begin
  select s.sub_id into v_sub
  from pgque.subscriber s
  where s.sub_queue = p_dead.dl_queue_id and s.sub_consumer = p_dead.dl_consumer_id and s.sub_main is null
  for key share;
  if not found then
    perform pgque._fail('PQ011', format('not subscriber to queue: the consumer of dead letter %s was unsubscribed', p_dead.dl_id),
      'Subscribe the consumer again, or send the message to all consumers with pgque.dlq_replay(dl_id).');
  end if;
  perform pgque._depth_grows(p_dead.dl_queue_id);
  insert into pgque.retry_queue as r (ev_retry_after, ev_queue, ev_owner, ev_error,
    ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires, ev_lane)
  select pgque.clock(), p_dead.dl_queue_id, s.sub_id, p_dead.ev_error,
    p_dead.ev_id, p_dead.ev_time, p_dead.ev_txid, p_dead.ev_type, p_dead.ev_data, p_dead.ev_extra1, p_dead.ev_extra2,
    p_dead.ev_extra3, p_dead.ev_extra4, p_dead.ev_headers, p_dead.ev_key, p_dead.ev_bytes,
    -- An expired message loses its expiry.
    case when p_dead.ev_expires > pgque.clock() then p_dead.ev_expires end,
    pgque._lane(p_dead.ev_key, p_dead.ev_extra1)
  from pgque.subscriber s
  where s.sub_id = v_sub
  -- The message may be there already, if its consumer was moved back and failed it
  -- again.  A worker that holds it keeps it, unless it was edited: then the worker has
  -- another one.
  on conflict on constraint retry_queue_pkey do update
  set (ev_retry_after, ev_batch, ev_receives) = (
      select case when h.stays then r.ev_retry_after else excluded.ev_retry_after end, case when h.stays then r.ev_batch end, h.stays::int
      from (
        select r.ev_batch is not null and r.ev_retry_after > excluded.ev_retry_after
          and (r.ev_type, r.ev_data, r.ev_headers, r.ev_bytes) is not distinct from (excluded.ev_type, excluded.ev_data, excluded.ev_headers, excluded.ev_bytes) as stays
      ) h),
    ev_retry = null, ev_type = excluded.ev_type, ev_data = excluded.ev_data, ev_headers = excluded.ev_headers, ev_bytes = excluded.ev_bytes;
  return p_dead.ev_id;
end
$$;

create or replace function pgque.dlq_requeue(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_dead  pgque.dead_letter := pgque._take_dead_letter(dlq_requeue.dl_id, caller, 'dlq_requeue');
begin
  return pgque._requeue(v_dead);
end
$$;
comment on function pgque.dlq_requeue(bigint, pgque.caller) is
  'Requeues a dead letter: the consumer that failed it receives the message again. Returns the message''s id, which stays. Its retries '
  'count from zero, and retention_period from now. Errors: PQ008 no such dead letter; PQ011 that consumer was '
  'unsubscribed.';

create or replace function pgque.dlq_edit(
  dl_id bigint, payload text default null, type text default null, headers jsonb default null, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_dead   pgque.dead_letter := pgque._take_dead_letter(dlq_edit.dl_id, caller, 'dlq_edit');
  v_sub    pgque.subscriber;
begin
  if $4 is not null then
    perform pgque._headers((select q.queue_name from pgque.queue q where q.queue_id = v_dead.dl_queue_id), $4);
  end if;
  v_sub.sub_consumer := v_dead.dl_consumer_id;
  execute pgque._archive_sql(null, 'select ($3).*, ($3).dl_receives as ev_receives, null::text as ev_worker', v_dead.dl_queue_id)
  using v_sub, null::text, v_dead, null, null, 'edited'::text;
  perform pgque._count(v_dead.dl_queue_id, 0, 'archived', 1);
  if $2 is not null then
    v_dead.ev_data := $2;
    v_dead.ev_bytes := null;
  end if;
  v_dead.ev_type := coalesce($3, v_dead.ev_type);
  v_dead.ev_headers := coalesce($4, v_dead.ev_headers);
  return pgque._requeue(v_dead);
end
$$;
comment on function pgque.dlq_edit(bigint, text, text, jsonb, pgque.caller) is
  'Requeues a dead letter with another payload, type or headers (NULL: as they are): the consumer that failed it receives the message again. The message as it '
  'was is kept in the archive with outcome edited, in the same transaction. Returns the message''s id, which stays. Errors: PQ005 headers are no object; PQ008 no such dead letter; PQ011 that '
  'consumer was unsubscribed.';

create or replace function pgque.dlq_requeue_all(
  queue_name text, limit_count int default null, reason text default null, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_count  int;
begin
  v_count := (
    select count(pgque._requeue(pgque._take_dead_letter(x.dl_id, caller)))
    from (
      select d.dl_id
      from pgque.dead_letter d
      where d.dl_queue_id = v_queue.queue_id and pgque._has_reason(d.dl_reason, $3)
        and exists (
          select from pgque.subscriber s
          where s.sub_queue = d.dl_queue_id and s.sub_consumer = d.dl_consumer_id and s.sub_main is null)
      order by d.dl_id
      limit case when $2 < 0 then 0 else $2 end
      for update of d skip locked
    ) x);
  perform pgque._record_action('dlq_requeue_all', v_queue.queue_name, jsonb_build_object('limit_count', $2, 'reason', $3, 'messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.dlq_requeue_all(text, int, text, pgque.caller) is
  'Requeues the oldest dead letters of a queue, at most limit_count (NULL: all), and returns their number. reason: only those with this reason, as '
  'stored or as dlq_reasons() returns it. Dead letters of unsubscribed consumers stay. Errors: PQ001 no such queue.';

-- NULL would silently delete none.
create or replace function pgque.dlq_purge(
  queue_name text, older_than interval default '30 days', reason text default null, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_until  timestamptz := pgque.clock() - $2;
  v_count  bigint;
begin
  if $2 is null then
    perform pgque._fail('PQ005', format('dlq_purge of queue %I needs an age', v_queue.queue_name),
      'Leave out older_than for 30 days, or pass ''0'' to delete all of them.');
  end if;
  delete from pgque.dead_letter d
  where d.dl_queue_id = v_queue.queue_id and d.dl_time < v_until and not d.dl_held
    and pgque._has_reason(d.dl_reason, $3);
  get diagnostics v_count = row_count;
  perform pgque._record_action('dlq_purge', v_queue.queue_name, jsonb_build_object('older_than', $2, 'reason', $3, 'messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.dlq_purge(text, interval, text, pgque.caller) is
  'Deletes the dead letters of a queue that were given up more than older_than ago, and returns their number. reason: only those with this reason, '
  'as stored or as dlq_reasons() returns it. Dead letters that drop_policy hold keeps stay. Errors: PQ001 no such queue; PQ005 older_than is NULL.';

create or replace function pgque.dlq_delete(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_dead  pgque.dead_letter := pgque._take_dead_letter(dlq_delete.dl_id, caller, 'dlq_delete');
begin
  return v_dead.ev_id;
end
$$;
comment on function pgque.dlq_delete(bigint, pgque.caller) is
  'Deletes one dead letter, also a held one, and returns the id of its message. Errors: PQ008 no such dead letter.';
-- ---------------------------------------------------------------------------
-- keys: a pending message that is sent again is replaced
-- ---------------------------------------------------------------------------

-- Sending replaces the body of a pending message with the same key.  The log is append
-- only, so a new body is a row with the id of the message and owner 0.  A delivery
-- appends a row too, a seal (owner -1), after which senders no longer replace the
-- message.  So does a purge (-2).  The rows of one message have rising ev_retry under a
-- unique index.
--
-- The rest of the engine handles keys in these places:
--   * _send_keyed() sends.
--   * _choose(), which chooses messages of the log, calls _claim() and _seal().
--   * _choose_retries(), which chooses messages of the retry queue, calls _claim_retry().
--   * Everything that reads bodies reads them through _renewed_sql().
--   * The pump and retention leave out messages that are being replaced:
--     _claim_retries().
--   * Rotation calls _refresh_retries() before a table with bodies is emptied.

-- Returns the rows that were appended for messages after they were sent, without
-- bodies: new bodies (owner 0), seals (-1), purges (-2).
create or replace function pgque._key_rows(p_queue_id int, p_rows pgque.event[]) returns pgque.event[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_said  pgque.event[];
begin
  execute (
    select 'select array_agg(' || pgque._slim('null') || ' order by e.ev_id, e.ev_retry) from ('
      || pg_catalog.string_agg(pg_catalog.format(
        'select e.* from pgque.event_%s_%s e where e.ev_key = any ($1) and e.ev_id = any ($2) and e.ev_owner <= 0'
        ' and (e.ev_owner is null or e.ev_owner <= 0)', p_queue_id, n), ' union all ')
      || ') e'
    from pg_catalog.generate_series(0, 2) n)
  into v_said
  using array(select r.ev_key from pg_catalog.unnest(p_rows) r where r.ev_key is not null),
    array(select r.ev_id from pg_catalog.unnest(p_rows) r where r.ev_key is not null);
  return coalesce(v_said, '{}');
end
$$;

-- Returns the columns of a row e of pgque.event without those that may be large; p_lane
-- is in place of ev_extra1.  So a session that checks many messages does not hold all
-- of their payloads.
create or replace function pgque._slim(p_lane text) returns text
language sql immutable as $$
  select 'row(e.slot, e.ev_owner, e.ev_id, e.ev_time, e.ev_txid, e.ev_retry, null, null, ' || p_lane
    || ', null, null, null, null, e.ev_key, null, e.ev_expires, case when e.ev_error is not null then '''' end)::pgque.event'
$$;

-- Returns a query for rows of pgque.event with the newest body of their key, without
-- those that were purged.
create or replace function pgque._renewed_sql(p_queue_id int, p_rows text) returns text
language sql volatile as $$
  select case when not pgque._keyed(q) then p_rows else (
    select pg_catalog.format(
      'select e.slot, e.ev_owner, e.ev_id, e.ev_time, e.ev_txid, e.ev_retry,'
      ' case when s.ev_id is null then e.ev_type else s.ev_type end as ev_type,'
      ' case when s.ev_id is null then e.ev_data else s.ev_data end as ev_data,'
      ' case when s.ev_id is null then e.ev_extra1 else s.ev_extra1 end as ev_extra1,'
      ' case when s.ev_id is null then e.ev_extra2 else s.ev_extra2 end as ev_extra2,'
      ' case when s.ev_id is null then e.ev_extra3 else s.ev_extra3 end as ev_extra3,'
      ' case when s.ev_id is null then e.ev_extra4 else s.ev_extra4 end as ev_extra4,'
      ' case when s.ev_id is null then e.ev_headers else s.ev_headers end as ev_headers, e.ev_key,'
      ' case when s.ev_id is null then e.ev_bytes else s.ev_bytes end as ev_bytes,'
      ' case when s.ev_id is null or e.ev_error is not null then e.ev_expires else s.ev_expires end as ev_expires, e.ev_error'
      ' from (%s) e left join lateral (select b.* from (%s) b order by b.ev_retry desc limit 1) s on e.ev_key is not null'
      ' where s.ev_owner = 0 or s.ev_id is null', p_rows, pg_catalog.string_agg(pg_catalog.format(
        'select b.* from pgque.event_%s_%s b where b.ev_key = e.ev_key and b.ev_id = e.ev_id'
        ' and (b.ev_owner is null or b.ev_owner <= 0) and b.ev_owner in (0, -2)', q.queue_id, n), ' union all '))
    from pg_catalog.generate_series(0, 2) n) end
  from pgque.queue q
  where q.queue_id = p_queue_id
$$;

-- Locks the keys of messages before their first delivery, or before a consumer passes
-- them, and reads their bodies.  Takes the locks of _lock_keys(), but does not wait.
-- busy: messages that are being replaced, or share a bucket with one; gone: messages
-- that were purged.
create or replace function pgque._claim(p_queue pgque.queue, p_rows pgque.event[], out rows pgque.event[], out busy bigint[], out gone bigint[])
language plpgsql as $$
declare
  v_class    int := pgque._key_class(p_queue.queue_id);
  v_buckets  int := pgque._bucket_class(p_queue.queue_id);
  v_said   pgque.event[];
  v_ids    bigint[];
  v_keys   text[];
begin
  v_said := pgque._key_rows(p_queue.queue_id, p_rows);
  select pg_catalog.array_agg(r.ev_id order by r.ev_id), pg_catalog.array_agg(r.ev_key order by r.ev_id) into v_ids, v_keys
  from pg_catalog.unnest(p_rows) r
  where r.ev_key is not null
    and not exists (select from pg_catalog.unnest(v_said) s where s.ev_id = r.ev_id and s.ev_owner < 0);
  busy := array(
    select r.id
    from rows from (pg_catalog.unnest(v_ids), pg_catalog.unnest(v_keys)) r (id, key)
    where not case
      when pgque._many_keys(pg_catalog.cardinality(v_ids)) then pg_catalog.pg_try_advisory_xact_lock(v_buckets, pgque._bucket(r.key))
      else pg_catalog.pg_try_advisory_xact_lock_shared(v_buckets, pgque._bucket(r.key))
        and pg_catalog.pg_try_advisory_xact_lock(v_class, pg_catalog.hashtext(r.key))
    end);
  -- Under the locks no more rows are appended.
  v_said := pgque._key_rows(p_queue.queue_id, p_rows);
  gone := array(select s.ev_id from pg_catalog.unnest(v_said) s where s.ev_owner = -2);
  rows := array(
    select row(r.slot, r.ev_owner, r.ev_id, r.ev_time, r.ev_txid, r.ev_retry, null, null, r.ev_extra1, null, null, null, null, r.ev_key, null,
      case when s.ev_id is not null and r.ev_error is null then s.ev_expires else r.ev_expires end, r.ev_error)::pgque.event
    from pg_catalog.unnest(p_rows) r
    left join (
      select distinct on (s.ev_id) s.* from pg_catalog.unnest(v_said) s where s.ev_owner = 0 order by s.ev_id, s.ev_retry desc
    ) s on s.ev_id = r.ev_id and r.ev_key is not null
    order by r.ev_id);
end
$$;

-- Notes that messages with keys were delivered: their bodies are final.  An old
-- snapshot may not show a body that was stored before a rotation and committed since.
-- So it appends the seal to all three tables: the unique index of each knows only its
-- own rows.  Several consumers may have the same message: it gets one seal.
create or replace function pgque._seal(p_queue_id int, p_rows pgque.event[]) returns void
language plpgsql as $$
declare
  v_said          pgque.event[];
  v_old_snapshot  boolean := pgque._old_snapshot();
begin
  if not exists (select from pg_catalog.unnest(p_rows) r where r.ev_key is not null) then
    return;
  end if;
  if v_old_snapshot then
    -- The current table is then the one of the senders, or this call gets 40001.
    perform from pgque.queue q where q.queue_id = p_queue_id for share;
  end if;
  v_said := pgque._key_rows(p_queue_id, p_rows);
  insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_key)
  select q.queue_id * 3 + n.n, -1, r.ev_id, r.ev_time, pg_catalog.pg_current_xact_id(), coalesce(s.newest, 0) + 1, r.ev_key
  from pgque.queue q
  join pg_catalog.generate_series(0, 2) n (n) on n.n = q.queue_cur_table or v_old_snapshot
  cross join (select distinct on (r.ev_id) r.* from pg_catalog.unnest(p_rows) r order by r.ev_id) r
  left join (
    select s.ev_id, max(s.ev_retry) as newest, min(s.ev_owner) < 0 as sealed from pg_catalog.unnest(v_said) s group by s.ev_id
  ) s on s.ev_id = r.ev_id
  where q.queue_id = p_queue_id and r.ev_key is not null and s.sealed is not true;
exception
  when unique_violation then
    perform pgque._fail('serialization_failure', 'the key of a message changed since this transaction began', 'Retry the transaction.');
end
$$;

-- Claims the key of a message that went to the retry queue before its first delivery,
-- and returns the row with its final body.  Returns null if it cannot be delivered now.
create or replace function pgque._claim_retry(p_queue pgque.queue, p_row pgque.retry_queue) returns pgque.retry_queue
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_claim  record := pgque._claim(p_queue, array[pgque._as_event(p_row)]);
begin
  if p_row.ev_id = any (v_claim.gone) then
    delete from pgque.retry_queue r where r.ev_owner + 0 = p_row.ev_owner and r.ev_id = p_row.ev_id;
    return null;
  elsif p_row.ev_id = any (v_claim.busy) then
    return null;
  end if;
  perform pgque._seal(p_queue.queue_id, v_claim.rows);
  perform pgque._refresh_retries(p_queue.queue_id, null, array[p_row.ev_id]);
  p_row.ev_expires := (select r.ev_expires from pgque.retry_queue r where r.ev_owner + 0 = p_row.ev_owner and r.ev_id = p_row.ev_id);
  return p_row;
end
$$;

-- Gives messages with keys that wait in the retry queue for their first delivery the
-- newest body, and removes those that were purged.  p_leaf: messages whose newest row
-- is in one table, before that is emptied; or p_ids: these messages.  Returns how many
-- changed.
create or replace function pgque._refresh_retries(
  p_queue_id int, p_leaf int default null, p_ids bigint[] default null, p_locked text default 'skip locked'
) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_count  bigint;
begin
  execute (
    select pg_catalog.format(
      $q$
      with newest as materialized (
        select r.ctid as place, e.*
        from pgque.retry_queue r
        cross join lateral (select * from (%s) e order by e.ev_retry desc limit 1) e
        where r.ev_queue = $1 and r.ev_key is not null and r.ev_owner <> 0 and r.ev_receives = 0
          and ($2 is null or e.leaf = $2) and ($3 is null or r.ev_id in (select i.id from pg_catalog.unnest($3) i (id)))
          and (e.ev_owner = -2
            or row(r.ev_type, r.ev_data, r.ev_bytes, r.ev_headers, r.ev_extra1)
              is distinct from row(e.ev_type, e.ev_data, e.ev_bytes, e.ev_headers, e.ev_extra1)
            or r.ev_error is null and r.ev_expires is distinct from e.ev_expires)
        for update of r %s
      ),
      purged as (
        delete from pgque.retry_queue r using newest n where r.ctid = n.place and n.ev_owner = -2
      ),
      renewed as (
        update pgque.retry_queue r
        set ev_type = n.ev_type, ev_data = n.ev_data, ev_bytes = n.ev_bytes, ev_headers = n.ev_headers, ev_extra1 = n.ev_extra1,
          ev_expires = case when r.ev_error is null then n.ev_expires else r.ev_expires end
        from newest n
        where r.ctid = n.place and n.ev_owner = 0
      )
      select count(*) from newest
      $q$,
      pg_catalog.string_agg(pg_catalog.format(
        '(select %2$s as leaf, e.* from pgque.event_%1$s_%2$s e where e.ev_key = r.ev_key and e.ev_id = r.ev_id'
        ' and (e.ev_owner is null or e.ev_owner <= 0) and e.ev_owner in (0, -2) order by e.ev_key desc, e.ev_id desc, e.ev_retry desc limit 1)',
        p_queue_id, n), ' union all '),
      p_locked)
    from pg_catalog.generate_series(0, 2) n)
  into v_count
  using p_queue_id, p_leaf, p_ids;
  return v_count;
end
$$;

-- Claims messages with keys that wait for their consumer's first delivery, in rows that
-- the caller has locked.  Returns those that may leave the retry queue: they have their
-- newest bodies, no sender is replacing them, and they are sealed.  The seal is needed
-- because a sender with an older snapshot does not see that they left.
create or replace function pgque._claim_retries(p_queue_id int, p_rows pgque.retry_queue[], out owners int[], out ids bigint[])
language plpgsql as $$
declare
  v_claim  record;
begin
  if pg_catalog.cardinality(p_rows) = 0 then
    return;
  end if;
  v_claim := pgque._claim((select q from pgque.queue q where q.queue_id = p_queue_id), array(select pgque._as_event(r) from pg_catalog.unnest(p_rows) r));
  select pg_catalog.array_agg(r.ev_owner), pg_catalog.array_agg(r.ev_id) into owners, ids
  from pg_catalog.unnest(p_rows) r
  where r.ev_id not in (select b.id from pg_catalog.unnest(v_claim.busy) b (id));
  perform pgque._seal(p_queue_id, array(select r from pg_catalog.unnest(v_claim.rows) r where r.ev_id = any (ids)));
  perform pgque._refresh_retries(p_queue_id, null, ids) where ids is not null;   -- null means all ids
end
$$;

create or replace function pgque.purge_key(queue_name text, key text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_last   record;
  v_count  bigint;
begin
  perform pgque._need_read_committed('purge_key()');
  if $2 is null then
    perform pgque._fail('PQ005', format('purge_key of queue %I needs a key', v_queue.queue_name),
      'Pass a key. To delete all messages, use pgque.purge(queue).');
  end if;
  perform pgque._lock_keys(v_queue.queue_id, array[$2]);
  delete from pgque.retry_queue r where r.ev_queue = v_queue.queue_id and r.ev_key = $2 and r.ev_owner = 0;
  get diagnostics v_count = row_count;
  -- Only under the lock: the pump may have moved the message into the log before.
  v_last := pgque._newest_of_key(v_queue.queue_id, $2);
  if v_last.ev_id is not null and coalesce(v_last.ev_owner, 0) = 0 and not pgque._is_passed(v_queue.queue_id, v_last.ev_id, v_last.sent_by) then
    perform pgque._append_end(v_queue.queue_id, v_last.ev_id, v_last.ev_time, $2, v_last.ev_retry + 1);
    v_count := v_count + 1;
  end if;
  -- Without the key: the key may be the data that is to be erased.
  perform pgque._record_action('purge_key', v_queue.queue_name, jsonb_build_object('messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.purge_key(text, text, pgque.caller) is
  'Removes the pending message with a key. Returns 1, or 0 if there is none. Errors: PQ001 no such queue; PQ005 key is NULL; 25000 not READ '
  'COMMITTED.';

create or replace function pgque._keyed(p_queue pgque.queue) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return p_queue.queue_keyed or exists (select from pgque.queue_option o where o.opt_queue = p_queue.queue_id and o.opt_name = 'key');
end
$$;

-- Every key belongs to one of 1024 buckets of its queue.  A transaction with up to 200
-- keys locks each key, and its bucket in share mode.  One with more keys locks whole
-- buckets instead, so that no transaction has more than about a thousand locks.
create or replace function pgque._key_class(p_queue_id int) returns int
language sql immutable as $$ select pg_catalog.hashtext('pgque.key ' || p_queue_id) $$;

create or replace function pgque._bucket_class(p_queue_id int) returns int
language sql immutable as $$ select pg_catalog.hashtext('pgque.bucket ' || p_queue_id) $$;

create or replace function pgque._bucket(p_key text) returns int
language sql immutable as $$ select pg_catalog.hashtext(p_key) & 1023 $$;

create or replace function pgque._many_keys(p_count bigint) returns boolean
language sql immutable as $$ select p_count > 200 $$;

-- Locks keys of a queue until the transaction ends.  Everything that sends or removes a
-- message with a key calls this.  Locks are taken in one order, so that two batches
-- cannot deadlock.
create or replace function pgque._lock_keys(p_queue_id int, p_keys text[]) returns void
language plpgsql as $$
declare
  v_keys     text[] := array(select distinct k.key from pg_catalog.unnest(p_keys) k (key) where k.key is not null);
  v_buckets  int[] := array(select distinct pgque._bucket(k.key) from pg_catalog.unnest(v_keys) k (key) order by 1);
begin
  -- See _wait_for_keyed_sends().
  perform pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtext('pgque.passing'), p_queue_id);
  if pgque._many_keys(pg_catalog.cardinality(v_keys)) then
    perform pgque._lock_buckets(p_queue_id, v_buckets);
    return;
  end if;
  perform pg_catalog.pg_advisory_xact_lock_shared(pgque._bucket_class(p_queue_id), b.bucket) from pg_catalog.unnest(v_buckets) b (bucket);
  perform pg_catalog.pg_advisory_xact_lock(pgque._key_class(p_queue_id), h.hash)
  from (select distinct pg_catalog.hashtext(k.key) as hash from pg_catalog.unnest(v_keys) k (key) order by 1) h;
end
$$;

-- Locks buckets.  If one of them stays locked for longer than a moment, the function
-- waits for this bucket only and releases the others, so that their keys can be sent
-- and delivered.
create or replace function pgque._lock_buckets(p_queue_id int, p_buckets int[]) returns void
language plpgsql as $$
declare
  v_class   int := pgque._bucket_class(p_queue_id);
  v_wait    text := pg_catalog.current_setting('lock_timeout');
  v_moment  interval := least('50 milliseconds', nullif(v_wait::interval, '0'));
  v_bucket  int;
begin
  loop
    begin
      perform pg_catalog.set_config('lock_timeout', pg_catalog.ceil(extract(epoch from v_moment) * 1000) || 'ms', true);
      foreach v_bucket in array p_buckets loop
        perform pg_catalog.pg_advisory_xact_lock(v_class, v_bucket);
      end loop;
      perform pg_catalog.set_config('lock_timeout', v_wait, true);
      return;
    exception
      when lock_not_available then
        null;
    end;
    begin
      perform pg_catalog.pg_advisory_xact_lock(v_class, v_bucket);
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
    end;
  end loop;
end
$$;

-- Waits for open transactions that sent a message with a key or removed one.  A
-- consumer must not pass a message that such a transaction replaces: then the new body
-- would be delivered to no consumer.
-- A session that waits for a lock blocks later ones, so the function mostly tries: one
-- sender that stays open must not stop all senders.  A sender with an older snapshot
-- does not see which consumer passes a message; the update of the queue's row stops it.
create or replace function pgque._wait_for_keyed_sends(p_queue pgque.queue) returns void
language plpgsql as $$
declare
  v_class  int := pg_catalog.hashtext('pgque.passing');
  v_wait   text := pg_catalog.current_setting('lock_timeout');
  v_end    timestamptz := pg_catalog.clock_timestamp() + coalesce(nullif(v_wait::interval, '0'), '1 minute');
begin
  if not pgque._keyed(p_queue) then
    return;
  end if;
  for v_turn in 1..1000000 loop
    begin
      perform pg_catalog.set_config('lock_timeout', '50ms', true);
      if v_turn % 20 = 0 then
        perform pg_catalog.pg_advisory_xact_lock(v_class, p_queue.queue_id);
      elsif not pg_catalog.pg_try_advisory_xact_lock(v_class, p_queue.queue_id) then
        perform pgque._undo_block();
      end if;
      -- A consumer with an older snapshot may hold the row lock: senders do not wait
      -- for it.
      update pgque.queue q set queue_xid = pgque._queue_xid(q) where q.queue_id = p_queue.queue_id;
      perform pg_catalog.set_config('lock_timeout', v_wait, true);
      exit;
    exception
      when lock_not_available or sqlstate 'PQ099' then
        null;
    end;
    if pg_catalog.clock_timestamp() > v_end then
      perform pgque._fail('lock_not_available', pg_catalog.format('open transactions have sent messages with keys to queue %I: pid %s', p_queue.queue_name, (
          select pg_catalog.string_agg(distinct l.pid::text, ', ')
          from pg_catalog.pg_locks l
          where l.locktype = 'advisory' and l.granted and l.classid::bigint = v_class::bigint & 4294967295 and l.objid::bigint = p_queue.queue_id)),
        'Try again after they commit, or set a higher lock_timeout to wait longer.');
    end if;
    perform pg_catalog.pg_sleep(0.02);
  end loop;
end
$$;

-- Sends a message with a key.  If a message with this key is pending, its body is
-- replaced: a row with the same id and the next number (ev_retry) is appended, which
-- only readers of keys see (owner 0).
-- A delivery of the message appends a seal (owner -1), and a purge a row of owner -2.
-- After either, the next send is a new message.
-- A transaction whose snapshot does not show the last of these rows violates the unique
-- index.  Such a transaction also locks the queue's row, so that the current table
-- cannot change.
create or replace function pgque._send_keyed(
  p_queue pgque.queue, p_type text, p_data text, p_bytes bytea, p_headers jsonb, p_key text,
  p_due timestamptz, p_expires timestamptz, p_partition_key text
) returns bigint
language plpgsql as $$
declare
  v_txid  xid8 := pg_catalog.pg_current_xact_id();
  v_last  record;
  v_id    bigint;
begin
  if pgque._old_snapshot() then
    perform from pgque.queue q where q.queue_id = p_queue.queue_id for share;
  end if;
  -- A delayed message was delivered to no consumer.
  update pgque.retry_queue r
  set ev_type = p_type, ev_data = p_data, ev_bytes = p_bytes, ev_headers = p_headers, ev_expires = p_expires, ev_extra1 = p_partition_key
  where r.ev_owner = 0 and r.ev_queue = p_queue.queue_id
    -- Only one that has not expired.  An expired one may be valid again: clocks are set
    -- back too.
    and r.ev_id = (
      select d.ev_id from pgque.retry_queue d
      where d.ev_queue = p_queue.queue_id and d.ev_key = p_key and d.ev_owner = 0 and (d.ev_expires > pgque.clock()) is not false
      order by d.ev_id desc
      limit 1)
  returning r.ev_id into v_id;
  if v_id is not null then
    return v_id;
  end if;
  v_last := pgque._newest_of_key(p_queue.queue_id, p_key);
  if v_last.ev_id is not null and coalesce(v_last.ev_owner, 0) = 0 and (v_last.ev_expires > pgque.clock()) is not false
    and not pgque._is_passed(p_queue.queue_id, v_last.ev_id, v_last.sent_by)
  then
    -- The ticker checks queues whose sequence moved.
    perform pg_catalog.nextval(p_queue.queue_event_seq);
    insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_bytes, ev_headers, ev_key, ev_expires, ev_extra1)
    select q.queue_id * 3 + q.queue_cur_table, 0, v_last.ev_id, v_last.ev_time, v_txid, v_last.ev_retry + 1, p_type, p_data, p_bytes, p_headers,
      p_key, p_expires, p_partition_key
    from pgque.queue q
    where q.queue_id = p_queue.queue_id;
    if not found then
      perform pgque._no_queue(p_queue.queue_name);
    end if;
    -- Workers may have put the message into the retry queue without delivering it.
    update pgque.retry_queue r
    set ev_type = p_type, ev_data = p_data, ev_bytes = p_bytes, ev_headers = p_headers, ev_expires = p_expires, ev_extra1 = p_partition_key
    where r.ev_queue = p_queue.queue_id and r.ev_key = p_key and r.ev_id = v_last.ev_id;
    return v_last.ev_id;
  end if;
  v_id := pg_catalog.nextval(p_queue.queue_event_seq);
  if p_due is not null then
    insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_bytes, ev_headers,
      ev_key, ev_expires, ev_extra1)
    select p_due, q.queue_id, 0, v_id, pgque.clock(), v_txid, p_type, p_data, p_bytes, p_headers, p_key, p_expires, p_partition_key
    from pgque.queue q
    where q.queue_id = p_queue.queue_id;
  else
    insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_bytes, ev_headers, ev_key, ev_expires, ev_extra1)
    select q.queue_id * 3 + q.queue_cur_table, v_id, pgque.clock(), v_txid, 0, p_type, p_data, p_bytes, p_headers, p_key, p_expires, p_partition_key
    from pgque.queue q
    where q.queue_id = p_queue.queue_id;
  end if;
  if not found then
    perform pgque._no_queue(p_queue.queue_name);   -- the queue was dropped meanwhile
  end if;
  return v_id;
exception
  when unique_violation then
    perform pgque._fail('serialization_failure', pg_catalog.format('key %L of queue %I changed since this transaction began', p_key, p_queue.queue_name),
      'Retry the transaction.');
end
$$;
-- ---------------------------------------------------------------------------
-- cancel: a message that is no longer delivered
-- ---------------------------------------------------------------------------

-- A cancelled message of the retry queue is deleted, and one that a batch has gets its
-- outcome there.  The log is append only: there a row of owner -2 ends a message, as in
-- purge_key().  Its ev_key is '', which no message has, and its ev_retry is the subscriber
-- for whom the message ends; 0: for all, later ones too.  The row is appended to the current
-- table, so it is there as long as the message.
--
-- Deliveries search for such rows in one case only: a consumer that has the
-- message ahead of it is treated as if it had been moved back from a tick after the message
-- (pos_high).  Until it has passed that tick, its deliveries are not ordinary, and
-- _must_choose() makes them choose.
--
-- The rest of the engine handles cancelled messages in these places:
--   * _must_choose() and _choose(), which choose messages of the log.
--   * _add_subscriber(): a consumer may begin before a cancelled message.
--   * Everything that finds messages ahead of a consumer adds _not_cancelled_sql().

-- Appends the row that ends a message.  p_key: its key, or ''.
create or replace function pgque._append_end(p_queue_id int, p_id bigint, p_time timestamptz, p_key text, p_retry int) returns void
language sql as $$
  insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_key)
  select q.queue_id * 3 + q.queue_cur_table, -2, p_id, p_time, pg_catalog.pg_current_xact_id(), p_retry, p_key
  from pgque.queue q
  where q.queue_id = p_queue_id
  on conflict do nothing
$$;

-- Returns the condition that a row e was cancelled for a subscriber; null: for all.
create or replace function pgque._cancelled_sql(p_queue_id int, p_sub int) returns text
language sql immutable as $$
  select '(select true from (' || pg_catalog.string_agg(pg_catalog.format(
    'select from pgque.event_%s_%s c where c.ev_key = '''' and c.ev_id = e.ev_id and c.ev_retry in (0, %s)'
    ' and (c.ev_owner is null or c.ev_owner <= 0)', p_queue_id, n, coalesce(p_sub, 0)), ' union all ') || ') c limit 1)'
  from pg_catalog.generate_series(0, 2) n
$$;

-- Returns one more condition on e for a query of messages that are ahead of a position.
create or replace function pgque._not_cancelled_sql(p_queue_id int, p_pos pgque.position) returns text
language sql immutable as $$
  select case when p_pos.pos_tick < p_pos.pos_high then ' and ' || pgque._cancelled_sql(p_queue_id, p_pos.pos_sub) || ' is null' else '' end
$$;

-- Returns the batches of a consumer that may have a message.
create or replace function pgque._batches_with(p_sub int, p_id bigint) returns setof bigint
language sql as $$
  select h.token from pgque._open_batches(p_sub) h where p_id > coalesce((h.lease).pos_done_id, 0) and (p_id > (h.lease).pos_last_id) is not true
  union
  select r.ev_batch from pgque.retry_queue r where r.ev_owner + 0 = p_sub and r.ev_id = p_id and r.ev_batch is not null
$$;

-- Returns a tick id that is above those of all ticks that do not show what is committed
-- now.  A ticker that has taken its snapshot may store one more: this waits for it.  The
-- sequence has the newest tick, also for a snapshot that does not show it (see _store_tick).
--
--   session 1: a ticker takes its snapshot
--   session 2: sends message 5 and commits
--   session 3: cancels message 5, while tick 8 is the newest
--   result:    session 1 stores tick 9, which does not show message 5: a consumer that
--              stands there still has it ahead
create or replace function pgque._tick_after_now(p_queue_id int) returns bigint
language plpgsql as $$
begin
  begin
    -- cancel() holds all workers back meanwhile.
    perform pg_catalog.set_config('lock_timeout', '1min', true) where pg_catalog.current_setting('lock_timeout') = '0';
    perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.tick'), p_queue_id);
    perform pgque._undo_block();
  exception
    when sqlstate 'PQ099' then
      null;
    when lock_not_available then
      perform pgque._fail('lock_not_available', pg_catalog.format('an open transaction ticks queue %I', (
        select q.queue_name from pgque.queue q where q.queue_id = p_queue_id)), 'Try again after it commits, or end its session.');
  end;
  return (select pg_catalog.pg_sequence_last_value(q.queue_tick_seq) + 1 from pgque.queue q where q.queue_id = p_queue_id);
end
$$;

-- Takes a message from consumers that are locked with their batches, and ends it in the
-- log for p_one; null: for all.  Returns whether that changed anything.
create or replace function pgque._cancel(p_queue pgque.queue, p_subs pgque.subscriber[], p_one int, p_id bigint) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_had    int[];   -- the consumers that had it
  v_sub    pgque.subscriber;
  v_pos    pgque.position;
  v_event  pgque.event;
  v_until  bigint;
  v_ahead  boolean;
begin
  v_had := array(
    select s.sub_id
    from pg_catalog.unnest(p_subs) s
    cross join lateral pgque._batches_with(s.sub_id, p_id) b (token)
    cross join lateral pgque._set_outcomes(b.token, array[p_id], 'ack', null, null, true) o
    where o.ok);
  -- This waits for a pump that moves the message into the log.
  with gone as (
    delete from pgque.retry_queue r
    where r.ev_queue = p_queue.queue_id and r.ev_id = p_id and (p_one is null or r.ev_owner = p_one)
    returning r.ev_owner
  )
  select v_had || pg_catalog.array_agg(g.ev_owner) into v_had from gone g;
  v_until := pgque._tick_after_now(p_queue.queue_id);
  foreach v_sub in array p_subs loop
    v_pos := pgque._current_position(v_sub, pgque._position(v_sub.sub_id));
    execute pg_catalog.format('select exists (%s)',
      pgque._unfinished_sql(v_sub, pgque._next_from(v_pos), pg_catalog.pg_current_snapshot(), ' and e.ev_id = ' || p_id))
    into v_ahead;
    if v_ahead then
      v_had := v_had || v_sub.sub_id;
      v_pos.pos_high := greatest(v_pos.pos_high, v_until);
      perform pgque._append_position(v_pos);
    end if;
  end loop;
  perform pgque._count(p_queue.queue_id, h.id, 'cancelled', 1) from (select distinct pg_catalog.unnest(v_had)) h (id);
  v_event := pgque._event_in_log(p_queue, p_id);
  if v_event.ev_id is null then
    return pg_catalog.cardinality(v_had) > 0;
  end if;
  perform pgque._note_once(p_queue.queue_id, 'cancelled');
  -- The next message with its key is a new one.
  perform pgque._seal(p_queue.queue_id, array[v_event]);
  perform pgque._append_end(p_queue.queue_id, p_id, v_event.ev_time, '', coalesce(p_one, 0));
  return true;
end
$$;

-- Returns a message as it is in the log; null if it is not there, or this transaction sent
-- it.
create or replace function pgque._event_in_log(p_queue pgque.queue, p_id bigint) returns pgque.event
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_event  pgque.event;
begin
  execute pg_catalog.format('select e.* from (%s) e limit 1', pgque._rows_sql(p_queue.queue_id,
    'e.ev_id = $1 and (e.ev_owner is null or e.ev_owner > 0) and pg_catalog.pg_visible_in_snapshot(e.ev_txid, pg_catalog.pg_current_snapshot())',
    null, pgque._span_xids(p_queue, p_id - 1, p_id)))
  into v_event using p_id;
  return v_event;
end
$$;

create or replace function pgque.cancel(queue_name text, msg_id bigint, consumer_name text default null, caller pgque.caller default current_user) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue   pgque.queue := pgque._queue($1, caller, 'admin');
  v_one     int := case when $3 is not null then (pgque._subscriber(v_queue.queue_name, $3, caller)).sub_id end;
  v_keys    text[];
  v_states  text[];
  v_state   text;
begin
  perform pgque._need_read_committed('cancel()');
  perform pgque._no_message(v_queue, $2) where ($2 > 0) is not true;
  perform pgque._rebase(v_queue.queue_id);
  -- Undone, because it locks tables that are locked after the consumers.
  begin
    v_keys := array_remove((pgque._event_in_log(v_queue, $2)).ev_key || array(select m.key from pgque._messages(v_queue, $2, 100) m), null);
    perform pgque._undo_block();
  exception
    when sqlstate 'PQ099' then
      null;
  end;
  perform pgque._lock_keys(v_queue.queue_id, v_keys) where cardinality(v_keys) > 0;
  -- A consumer that subscribes waits for this lock, and rotation leaves the queue alone.
  perform from pgque.queue q where q.queue_id = v_queue.queue_id for no key update;
  perform pgque._lock_consumers(v_queue.queue_id);
  v_queue := pgque._queue(v_queue.queue_name, caller, 'admin');
  v_states := array(select m.status from pgque._messages(v_queue, $2, 100) m where $3 is null or m.consumer_name = $3 or m.status = 'delayed');
  if $3 is not null and 'delayed' = any (v_states) then
    perform pgque._fail('PQ005', format('message %s of queue %I is delayed: no consumer has it yet', $2, v_queue.queue_name),
      'Cancel it for all consumers, without consumer_name.');
  end if;
  v_state := coalesce(
    (select s.state
    from unnest('{processing,retry,pending,delayed,expired,failed,dead,archived}'::text[]) with ordinality s (state, n)
    where s.state = any (v_states)
    order by s.n
    limit 1),
    pgque._ended_state(v_queue, v_one, $2));
  if v_state is null then
    perform pgque._no_message(v_queue, $2);
  end if;
  if v_state <> 'cancelled' and pgque._cancel(v_queue, array(
    select s from pgque.subscriber s
    where s.sub_queue = v_queue.queue_id and s.sub_main is null and (v_one is null or s.sub_id = v_one)
    order by s.sub_id), v_one, $2)
  then
    perform pgque._record_action('cancel', v_queue.queue_name, jsonb_build_object('msg_id', $2, 'consumer_name', $3, 'state', v_state));
  end if;
  return v_state;
end
$$;
comment on function pgque.cancel(text, bigint, text, pgque.caller) is
  'Cancels a message for one consumer, or without consumer_name for every consumer, later ones included: it is no longer delivered. Returns the '
  'state in which the message was found: processing, retry, pending, delayed, expired, dead, failed or archived, as in list_messages() (with several '
  'consumers the first of these that applies), else cancelled (before), or done if no consumer has it. A delayed message is deleted, so that a '
  'second call does not find it. Dead letters and the archive stay. If a worker has the message, its lease ends: extend() counts one less, and the '
  'worker''s outcome for it has the reason cancelled. Readers that keep their own offsets, such as Spark, still see the message. Errors: PQ001 no '
  'such queue; PQ005 consumer_name is set and the message is delayed; PQ010 no such message; PQ011 not subscribed; 25000 not READ COMMITTED; 55P03 '
  'an open transaction holds a consumer or a batch of the queue, or ticks it, for a minute (lock_timeout, if it is set).';

-- Returns the state of a message that no consumer has; null if it is not in the log.
create or replace function pgque._ended_state(p_queue pgque.queue, p_sub int, p_id bigint) returns text
language plpgsql as $$
begin
  return case
    when pgque._is_cancelled(p_queue.queue_id, p_sub, p_id) then 'cancelled'
    when (pgque._event_in_log(p_queue, p_id)).ev_id is not null then 'done'
  end;
end
$$;

create or replace function pgque._is_cancelled(p_queue_id int, p_sub int, p_id bigint) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_found  boolean;
begin
  execute 'select ' || pgque._cancelled_sql(p_queue_id, p_sub) || ' from (select $1 as ev_id) e' into v_found using p_id;
  return v_found is true;
end
$$;
-- ---------------------------------------------------------------------------
-- key_concurrency: how many messages of one key are leased at a time
-- ---------------------------------------------------------------------------

-- A lane is the messages of a consumer that share a key or a partition key.  _choose()
-- calls _leased_lanes() and moves messages of a busy lane to the retry queue.  _due()
-- calls _heads_of_lanes() to choose those of them that are next.
--
-- With key_concurrency 1 (keyed_order), the first message of a lane blocks the others until
-- it has an outcome, also while it waits for another attempt: so the order is kept.  Above 1,
-- only leased messages count.

-- Returns the lane of a message.  An index cannot hold long keys, so these are hashed.  Two
-- keys with one hash share a lane: fewer of their messages are leased at a time.
create or replace function pgque._lane(p_key text, p_extra1 text) returns text
language sql immutable as $$
  select case
    when pg_catalog.octet_length(coalesce(p_key, p_extra1)) > 1000 then pg_catalog.hashtextextended(coalesce(p_key, p_extra1), 0)::text
    else coalesce(p_key, p_extra1)
  end
$$;

-- Returns the lane and the worker of each leased message of a consumer.  A batch that was
-- delivered before the consumer had key_concurrency has no pos_keys.
create or replace function pgque._leased_lanes(p_sub pgque.subscriber, out lane text, out worker text) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_held  record;
begin
  for v_held in select h.lease, h.settled from pgque._open_batches(p_sub.sub_id) h loop
    if v_held.settled = 0 and (v_held.lease).pos_keys is not null then
      return query select k, (v_held.lease).pos_worker from pg_catalog.unnest((v_held.lease).pos_keys) k;
    else
      return query execute pg_catalog.format(
        'select l.lane, $1 from (%s) e cross join lateral pgque._lane(e.ev_key, e.ev_extra1) l (lane) where l.lane is not null',
        pgque._unsettled_sql(p_sub, v_held.lease))
      using (v_held.lease).pos_worker;
    end if;
  end loop;
  return query
    select r.ev_lane, r.ev_worker from pgque.retry_queue r
    where r.ev_owner = p_sub.sub_id and r.ev_batch is not null and r.ev_retry_after > pgque.clock() and r.ev_lane is not null;
end
$$;

-- Returns the messages of a batch in the retry queue whose lease expired, and whose lane has
-- as many leased without them as it may have: their lease cannot begin again.  No other
-- message of the consumer is leased until the transaction ends.
--
--   worker 1: has message 2, and its lease expires
--   worker 2: receives message 1 of the same key
--   worker 1: extends its lease: message 2 would be leased beside message 1
create or replace function pgque._without_room(p_sub pgque.subscriber, p_batch bigint) returns bigint[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now  timestamptz := pgque.clock();
begin
  -- A lease that ends just now may expire before the lock is there.
  if not exists (
    select from pgque.retry_queue r
    where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch and r.ev_retry_after <= v_now + interval '1 second' and r.ev_lane is not null)
  then
    return null;
  end if;
  perform from pgque.subscriber s where s.sub_id = p_sub.sub_id for no key update;
  v_now := pgque.clock();
  return array(
    select r.ev_id
    from (
      select r.ev_id, r.ev_lane, pg_catalog.row_number() over (partition by r.ev_lane order by r.ev_id) as place
      from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch and r.ev_retry_after <= v_now and r.ev_lane is not null
    ) r
    left join (select l.lane, count(*) as n from pgque._leased_lanes(p_sub) l group by 1) l on l.lane = r.ev_lane
    -- An old snapshot may not show what is leased.
    where pgque._old_snapshot() or r.place + coalesce(l.n, 0) > p_sub.sub_key_concurrency);
end
$$;

-- With key_concurrency: returns the first messages of each lane in the retry queue that are
-- due, as many as may be leased beside those that are.  First it chooses from the next 1000
-- messages that are due.  If these do not suffice, because most wait for a few busy lanes, it
-- reads the first messages of each lane, and those without one.
create or replace function pgque._heads_of_lanes(
  p_sub pgque.subscriber, p_max bigint, p_now timestamptz, p_but bigint[], p_from timestamptz default '-infinity'
)
returns pgque.retry_queue[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_out    text[] := array(select l.lane from pgque._leased_lanes(p_sub) l);
  v_order  boolean := p_sub.sub_key_concurrency = 1;   -- the first message of a lane is next, or none
  v_lanes  text[];     -- lanes whose first messages are chosen
  v_ids    bigint[];   -- messages that are chosen themselves
  v_more   boolean;
  v_rows   pgque.retry_queue[];
begin
  -- As in _choose(), what is leased of a lane counts as its first messages.
  select count(*) = 1000 + coalesce(pg_catalog.cardinality(v_out), 0), pg_catalog.array_agg(distinct d.ev_lane) filter (where d.ev_lane is not null and v_order and d.ev_id > 0),
    pg_catalog.array_agg(d.ev_id) filter (where d.ev_lane is null or not v_order and d.ev_id > 0 and d.place <= p_sub.sub_key_concurrency)
  into v_more, v_lanes, v_ids
  from (
    select d.*, pg_catalog.row_number() over (partition by d.ev_lane, d.ev_id in (select pg_catalog.unnest((select p_but))) order by d.ev_id) as place
    from (
      (select r.ev_id, r.ev_lane from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_retry_after >= p_from and r.ev_retry_after <= p_now order by r.ev_retry_after limit 1000)
      union all
      select 0, o.lane from pg_catalog.unnest(v_out) o (lane)
    ) d
  ) d;
  loop
    -- One index lookup for each lane and for each message, whatever the planner expects.
    v_rows := array(
      select pgque._slim_retry(r)
      from (
        select r.*
        from (
          select h.place
          from (
            select l.lane, p_sub.sub_key_concurrency - sum(l.leased) as room
            from (select pg_catalog.unnest(v_lanes) as lane, 0 as leased union all select pg_catalog.unnest(v_out), 1) l
            group by 1
            having min(l.leased) = 0 and sum(l.leased) < p_sub.sub_key_concurrency
          ) l
          cross join lateral (
            select h.ctid as place
            from pgque.retry_queue h
            where h.ev_owner = p_sub.sub_id and h.ev_lane = l.lane
              and (v_order or h.ev_retry_after <= p_now and (h.ev_id in (select pg_catalog.unnest((select p_but)))) is not true)
            order by h.ev_id
            limit l.room) h
          union all
          select f.place
          from pg_catalog.unnest(v_ids) i (id)
          cross join lateral (select f.ctid as place from pgque.retry_queue f where f.ev_owner + 0 = p_sub.sub_id and f.ev_id = i.id offset 0) f
        ) found
        join pgque.retry_queue r on r.ctid = found.place
        where r.ev_retry_after <= p_now and (r.ev_id in (select pg_catalog.unnest((select p_but)))) is not true
        order by r.ev_batch is null, r.ev_id
        limit p_max
        for update of r skip locked
      ) r);
    exit when not v_more or pg_catalog.cardinality(v_rows) = p_max;
    v_more := false;
    v_lanes := array(
      with recursive lane (lane) as (
        (select r.ev_lane from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane is not null order by r.ev_lane limit 1)
        union all
        select (
          select r.ev_lane from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_lane > l.lane order by r.ev_lane limit 1)
        from lane l
        where l.lane is not null
      )
      select l.lane from lane l where l.lane is not null);
    v_ids := array(
      select r.ev_id from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_lane is null and r.ev_retry_after >= p_from and r.ev_retry_after <= p_now
      order by r.ev_retry_after
      limit 1000);
  end loop;
  return v_rows;
end
$$;

-- Returns the lanes of a consumer for which messages wait that are due: those that have as
-- many leased as they may have, and with 1 those whose first message waits for another
-- attempt.
create or replace function pgque._waiting_lanes(p_sub pgque.subscriber, out lane text, out messages bigint) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now  timestamptz := pgque.clock();
begin
  return query
    select w.lane, w.messages
    from (
      select r.ev_lane as lane, count(*) filter (where r.ev_retry_after <= v_now) as messages,
        min(r.ev_id) filter (where r.ev_retry_after > v_now) < min(r.ev_id) filter (where r.ev_retry_after <= v_now) as is_behind
      from pgque.retry_queue r
      where r.ev_owner = p_sub.sub_id and r.ev_lane is not null
      group by 1
    ) w
    left join (select l.lane, count(*) as n from pgque._leased_lanes(p_sub) l group by 1) l on l.lane = w.lane
    where p_sub.sub_keyed and w.messages > 0 and (l.n >= p_sub.sub_key_concurrency or p_sub.sub_key_concurrency = 1 and w.is_behind);
end
$$;

-- Returns how many messages wait for the keys of each worker's messages.
create or replace function pgque._waiting_for_workers(p_sub pgque.subscriber, out worker text, out messages bigint) returns setof record
language sql as $$
  select l.worker, sum(w.messages)::bigint
  from pgque._waiting_lanes(p_sub) w
  join (select distinct l.lane, l.worker from pgque._leased_lanes(p_sub) l where p_sub.sub_keyed) l on l.lane = w.lane
  group by 1
$$;

-- Returns key_concurrency as subscribe() and set_key_concurrency() get it; PQ005 if it is
-- not valid.
create or replace function pgque._need_key_concurrency(p_queue text, p_consumer text, p_limit int, p_order boolean default null) returns int
language plpgsql as $$
begin
  if p_limit < 1 then
    perform pgque._fail('PQ005', pg_catalog.format('key_concurrency must be at least 1, for consumer %I of queue %I', p_consumer, p_queue),
      'Pass how many messages of one key may be leased at a time: 1 keeps their order. Null is no limit.');
  elsif p_order and p_limit > 1 then
    perform pgque._fail('PQ005', pg_catalog.format('keyed_order is key_concurrency 1, and not %s, for consumer %I of queue %I', p_limit, p_consumer, p_queue),
      'Pass one of them. With more than one message of a key at a time, their order is not kept.');
  end if;
  return coalesce(p_limit, case when p_order then 1 end);
end
$$;

-- Stores key_concurrency of a consumer whose row is locked.
create or replace function pgque._set_key_concurrency(p_sub pgque.subscriber, p_limit int) returns void
language sql as $$
  update pgque.subscriber s
  set sub_role = 'pool', sub_keyed = p_limit is not null, sub_key_concurrency = coalesce(p_limit, 1)
  where s.sub_id = p_sub.sub_id
$$;

-- Stores key_concurrency of a consumer that was just subscribed.  One that was subscribed
-- before must have this limit.
create or replace function pgque._subscribe_keyed(p_queue text, p_consumer text, p_new boolean, p_limit int, p_caller name) returns void
language plpgsql as $$
declare
  v_sub  pgque.subscriber := pgque._subscriber(p_queue, p_consumer, p_caller);
begin
  if p_new then
    perform pgque._set_key_concurrency(v_sub, p_limit);
  elsif pgque._key_concurrency(v_sub) is distinct from p_limit then
    perform pgque._fail('PQ006', pg_catalog.format('consumer %I of queue %I is subscribed with key_concurrency %s', p_consumer, p_queue,
        coalesce(pgque._key_concurrency(v_sub)::text, 'null')),
      pg_catalog.format('To change it: select pgque.set_key_concurrency(%L, %L, %s);', p_queue, p_consumer, p_limit));
  end if;
end
$$;

-- Returns key_concurrency of a consumer; null: no limit.
create or replace function pgque._key_concurrency(p_sub pgque.subscriber) returns int
language sql immutable as $$ select case when p_sub.sub_keyed then p_sub.sub_key_concurrency end $$;

create or replace function pgque.set_key_concurrency(queue_name text, consumer_name text, key_concurrency int, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub  pgque.subscriber := pgque._subscriber($1, $2, caller);
begin
  perform pgque._need_key_concurrency($1, $2, $3);
  perform pgque._need_read_committed('to set key_concurrency');
  perform pgque._lock_subscriber(v_sub.sub_id);
  v_sub := pgque._subscriber($1, $2, caller);
  if v_sub.sub_role <> 'pool' then
    perform pgque._fail('PQ006', format('consumer %I of queue %I has no workers', $2, $1),
      case when v_sub.sub_role = 'normal' then format('Turn it into a pool of workers first: select pgque.share_consumer(%L, %L);', $1, $2)
        else 'Subscribe another consumer. This one has subconsumers.' end);
  elsif pgque._key_concurrency(v_sub) is not distinct from $3 then
    return 0;
  end if;
  perform pgque._set_key_concurrency(v_sub, $3);
  perform pgque._record_action('set_key_concurrency', $1, jsonb_build_object('consumer_name', $2, 'key_concurrency', $3));
  return 1;
end
$$;
comment on function pgque.set_key_concurrency(text, text, int, pgque.caller) is
  'Sets how many messages of one key the workers of a consumer have at most, all together. A message without key counts by its partition_key. With '
  '1, the messages of a key are delivered in order (keyed_order). NULL: no limit. The limit holds for the next deliveries, and messages that are '
  'leased count. Returns 1, or 0 if the limit was this already. Errors: PQ001 no such queue; PQ005 the limit is below 1; PQ006 the consumer has no '
  'workers; PQ011 not subscribed; 25000 not READ COMMITTED.';
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
-- ---------------------------------------------------------------------------
-- limits: max_depth and throughput_limit
-- ---------------------------------------------------------------------------

-- The rest of the engine handles limits in these places:
--   * Sending asks _room(); the sinks too, and the forwarding of dead letters.
--   * Calls that let the depth grow without a send call _depth_grows(): subscribe(), moves
--     of a consumer, and dlq_requeue().
--   * _begin_delivery(), with which a delivery begins, asks _limit_unused_since(), and
--     _store_delivery() adds what was delivered (pos_paid).
--   * health() and purge() ask _depth().

-- Returns whether a queue with max_depth has room for p_count more messages; PQ003 if
-- not.
create or replace function pgque._room(p_queue pgque.queue, p_count bigint) returns boolean
language sql as $$ select pgque._room_left(p_queue, p_count) >= p_count $$;

-- Returns how many more messages a queue with max_depth takes; PQ003 if fewer than
-- p_count.  Each message uses an id, and no consumer stands before queue_floor: so far
-- from the limit, a subtraction is enough.
-- Nearer to it the session remembers up to which id there is room: consumers only move
-- forward.  The remembered value is not valid
--   * after a change of the queue's row, such as another max_depth;
--   * after _depth_grows(), or while a transaction that called it is open;
--   * beyond a transaction with an old snapshot.
-- The value has a seal, because every role can set it.
create or replace function pgque._room_left(p_queue pgque.queue, p_count bigint) returns bigint
language plpgsql as $$
declare
  v_last    bigint := coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0);
  v_left    bigint := p_queue.queue_max_depth - (v_last - p_queue.queue_floor);
  v_name    text;
  v_known   text;
  v_upto    text;
  v_grown   bigint;
  v_class   int;
  v_steady  boolean;
begin
  if v_left >= p_count and v_last >= p_queue.queue_floor and not p_queue.queue_external_ticker
    -- Delayed messages and retries may be older.
    and not exists (select from pgque.retry_queue r where r.ev_queue = p_queue.queue_id and r.ev_id <= p_queue.queue_floor)
  then
    return v_left;
  end if;
  v_name := 'pgque.depth_' || p_queue.queue_id;
  v_known := pg_catalog.current_setting(v_name, true);
  v_upto := pg_catalog.split_part(v_known, ' ', 1);
  v_grown := coalesce(pg_catalog.pg_sequence_last_value('pgque.depth_growth'), 0);
  if v_known = pgque._sealed(v_upto, p_queue.queue_xid, v_grown) then
    v_left := v_upto::bigint - v_last;
    if v_left >= p_count then
      return v_left;
    end if;
  end if;
  -- Only a transaction that called _depth_grows() holds this lock for long.
  v_class := pg_catalog.hashtext('pgque.depth');
  v_steady := pg_catalog.pg_try_advisory_lock(v_class, p_queue.queue_id) and pg_catalog.pg_advisory_unlock(v_class, p_queue.queue_id);
  v_left := pgque._find_room(p_queue, p_count, v_last);
  if v_left is null then
    return greatest(p_queue.queue_max_depth, p_count);
  elsif v_steady then
    perform pg_catalog.set_config(v_name, pgque._sealed((v_last + v_left)::text, p_queue.queue_xid, v_grown), pgque._old_snapshot());
  end if;
  return v_left;
end
$$;

-- Call this before the depth of a queue grows without a send: before a consumer is
-- subscribed or moved back, and before a dead letter is requeued.  Senders then drop
-- the value that they remember, and remember none until this transaction ends.
create sequence if not exists pgque.depth_growth;

-- Returns the value that a session remembers, with a proof that pgque wrote it: writers
-- cannot read queue_xid.
create or replace function pgque._sealed(p_upto text, p_xid xid8, p_grown bigint) returns text
language sql immutable as $$
  select p_upto || ' ' || pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.concat_ws(' ', p_upto, p_xid, p_grown), 'UTF8')), 'hex')
$$;

create or replace function pgque._depth_grows(p_queue_id int) returns void
language plpgsql as $$
begin
  perform pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtext('pgque.depth'), p_queue_id);
  perform pg_catalog.nextval('pgque.depth_growth');
end
$$;

-- Returns how many more messages a queue takes after an id; PQ003 if fewer than
-- p_count, PQ005 if it never takes that many.  Null: there is no consumer and no delayed
-- message, so nothing counts.  The slowest consumer is searched; there may be ten thousand consumers.  Near the limit
-- the messages are counted, because rolled-back sends use ids too.  This is always so with
-- an external ticker, whose event_seq may mean anything.
create or replace function pgque._find_room(p_queue pgque.queue, p_count bigint, p_last bigint) returns bigint
language plpgsql as $$
declare
  v_waiting  bigint;
  v_oldest   bigint;
  v_left     bigint;
begin
  select min(r.ev_id) - 1 into v_waiting from pgque.retry_queue r where r.ev_queue = p_queue.queue_id;
  select least(min(p.pos_event_seq), v_waiting) into v_oldest
  from pgque.subscriber s
  cross join lateral pgque._oldest_needed_position(s.sub_id) p
  where s.sub_queue = p_queue.queue_id;
  if v_oldest is null then
    return null;
  end if;
  v_left := p_queue.queue_max_depth - (p_last - v_oldest);
  if v_left < p_count or p_queue.queue_external_ticker or v_oldest > p_last then
    v_left := p_queue.queue_max_depth - pgque._depth(p_queue.queue_id);
  end if;
  if p_count > p_queue.queue_max_depth then
    -- Not PQ003, on which callers try again.
    perform pgque._fail('PQ005', pg_catalog.format('%s messages at once never fit into queue %I with max_depth %s', p_count, p_queue.queue_name, p_queue.queue_max_depth),
      'Send fewer messages at a time (a stream of Spark: option maxEventsPerTrigger), or raise max_depth. Nothing was sent.');
  end if;
  if v_left < p_count then
    perform pgque._fail('PQ003', pg_catalog.format('queue full: %I', p_queue.queue_name),
      'Try again when the consumers have caught up, or raise max_depth. Nothing was sent.',
      pg_catalog.format('max_depth is %s.', p_queue.queue_max_depth));
  end if;
  return v_left;
end
$$;

-- Returns since when a throughput limit was not used: at most for a second, and without
-- a time in the future, which was recorded before the clock was set back.
create or replace function pgque._limit_unused_since(p_paid timestamptz, p_now timestamptz) returns timestamptz
language sql immutable as $$
  select greatest(case when p_paid <= p_now + interval '1 second' then p_paid end, p_now - interval '1 second')
$$;

-- Returns how many messages the slowest consumer has ahead of it or in open batches,
-- and adds the delayed ones.
create or replace function pgque._depth(p_queue_id int) returns bigint
language plpgsql as $$
declare
  v_sub    pgque.subscriber;
  v_held   record;
  v_count  bigint;
  v_part   bigint;
  v_own    bigint := 0;
  v_most   bigint := 0;
begin
  if pg_catalog.pg_current_xact_id_if_assigned() is not null then
    -- The snapshot does not show the messages of this transaction.
    execute pg_catalog.format('select count(*) from (%s) e', pgque._rows_sql(p_queue_id, 'e.ev_txid = $1 and e.ev_owner is null'))
    into v_own using pg_catalog.pg_current_xact_id();
  end if;
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null loop
    execute pg_catalog.format('select count(*) from (%s) e', pgque._unfinished_sql(v_sub, pgque._next_from(pgque._position(v_sub.sub_id)),
      pgque._tick_snapshot(), ' and (e.ev_expires is null or e.ev_expires > $1)')) into v_count using pgque.clock();
    v_count := v_count + v_own + (select count(*) from pgque.retry_queue r where r.ev_owner = v_sub.sub_id);
    for v_held in select h.lease, h.settled from pgque._open_batches(v_sub.sub_id) h loop
      v_part := (v_held.lease).pos_done_count - v_held.settled;
      if v_sub.sub_role <> 'pool' then
        -- The number of messages in a batch of next_batch() is not known yet.
        execute pg_catalog.format('select count(*) from (%s) e', pgque._undone_sql(v_sub, v_held.lease, ' and (e.ev_expires is null or e.ev_expires > $1)'))
        into v_part using pgque.clock();
      end if;
      v_count := v_count + v_part;
    end loop;
    v_most := greatest(v_most, v_count);
  end loop;
  return v_most + (select count(*) from pgque.retry_queue r where r.ev_owner = 0 and r.ev_queue = p_queue_id);
end
$$;
-- ---------------------------------------------------------------------------
-- archive: messages that are done and kept
-- ---------------------------------------------------------------------------

-- The rest of the engine handles the archive in these places:
--   * ack() has another outcome for a queue with archive_on_ack, and _apply_outcome(),
--     which gives messages their outcome, executes _archive_sql() for it.
--   * _note_settings() and _drop_queue() call _note_unarchived() and _drop_archive().
--   * sub_archived says whether the archive has all that a consumer passed: subscribe()
--     sets it, and a move forward ends it.
--   * _messages() lists archived messages, Spark reads them, and maint_tables() creates
--     and drops leaves.

-- Returns the archive's bucket for a queue and a time.
create or replace function pgque._bucket(p_queue_id int, p_time timestamptz) returns bigint
language sql stable as $$
  select p_queue_id * 100000::bigint + ((least(greatest(p_time, '2000-01-01Z'), '2270-01-01Z') at time zone 'UTC')::date - date '2000-01-01')
$$;

-- Returns the condition for the archived messages of a queue, on a row a or e of
-- pgque.archive.  Optionally for a part of its buckets.
create or replace function pgque._archived_by(p_alias text, p_queue_id int, p_since timestamptz default null, p_until timestamptz default null) returns text
language sql stable as $$
  select pg_catalog.format('(%1$s.bucket between %2$s and %3$s or %1$s.bucket = 0 and %1$s.arc_queue = %4$s)', p_alias,
    pgque._bucket(p_queue_id, coalesce(p_since, '2000-01-01Z')), pgque._bucket(p_queue_id, coalesce(p_until, 'infinity')), p_queue_id)
$$;

-- Creates the leaf of a bucket if it does not exist, for one session at a time.
create or replace function pgque._archive_leaf(p_bucket bigint) returns void
language plpgsql as $$
declare
  v_leaf  text := 'archive_' || p_bucket;
begin
  if pg_catalog.to_regclass('pgque.' || v_leaf) is not null then
    return;
  end if;
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.archive'), pg_catalog.hashtext(v_leaf));
  execute pg_catalog.format('create table pgque.%I (like pgque.archive including defaults)', v_leaf);
  perform pgque._set_rights(array[('pgque.' || v_leaf)::regclass::oid]);
  execute pg_catalog.format('alter table pgque.%I add constraint %I primary key (archive_id)', v_leaf, v_leaf || '_pkey');
  execute pg_catalog.format('create index %I on pgque.%I (ev_id)', v_leaf || '_ev_id', v_leaf);
  execute pg_catalog.format('alter table pgque.archive attach partition pgque.%I for values in (%s)', v_leaf, p_bucket);
exception
  when duplicate_table then
    null;   -- another session created it.  An advisory lock does not refresh this session's copy of the catalog.
end
$$;

-- Creates the leaves of the archive that are needed, for queues with archive_on_ack in
-- advance, and moves messages into them.
create or replace function pgque._fill_archive() returns int
language plpgsql set lock_timeout = '50ms' as $$
declare
  v_bucket  bigint;
  v_rest    boolean := pg_catalog.pg_relation_size('pgque.archive_0') > 0;
  v_count   int := 0;
begin
  for v_bucket in
    select b.bucket
    from (
      select pgque._bucket(q.queue_id, pgque.clock() + d.days * interval '1 day')
      from pgque.queue q, pg_catalog.generate_series(0, 1) d (days)
      where q.queue_archive_on_ack
      union
      select pgque._bucket(q.queue_id, a.archived_at)
      from pgque.archive_0 a
      join pgque.queue q on q.queue_id = a.arc_queue
      where v_rest
    ) b (bucket)
    where pg_catalog.to_regclass('pgque.archive_' || b.bucket) is null
    order by pg_catalog.random()
    limit 50
  loop
    perform pgque._archive_leaf(v_bucket);
  end loop;
  if v_rest then
    delete from pgque.archive_0 a where not exists (select from pgque.queue q where q.queue_id = a.arc_queue);
    with found as materialized (
      select a.archive_id from pgque.archive_0 a
      where pg_catalog.to_regclass('pgque.archive_' || pgque._bucket(a.arc_queue, a.archived_at)) is not null
      limit 10000
      for update skip locked
    ),
    moved as (
      delete from pgque.archive m using found f
      where m.bucket = 0 and m.archive_id = f.archive_id
      returning m as item
    )
    insert into pgque.archive
    select n.* from moved m cross join lateral pgque._in_bucket(m.item, pgque._bucket((m.item).arc_queue, (m.item).archived_at)) n;
    get diagnostics v_count = row_count;
    perform pgque._empty('pgque.archive_0', true);
  end if;
  return v_count;
end
$$;

-- Returns a row of the archive with another bucket.
create or replace function pgque._in_bucket(p_row pgque.archive, p_bucket bigint) returns pgque.archive
language plpgsql as $$
begin
  p_row.bucket := p_bucket;
  return p_row;
end
$$;

-- Returns the statement that stores messages, rows of pgque.retry_queue, in the archive
-- and returns their ids.  p_with precedes them.  The parameters are those of _apply_outcome():
-- $1 the subscriber, $2 the worker, $6 the outcome.
create or replace function pgque._archive_sql(p_with text, p_items text, p_queue_id int) returns text
language plpgsql set datestyle = 'ISO' as $$
declare
  v_now     timestamptz := pgque.clock();
  v_bucket  bigint := pgque._bucket(p_queue_id, v_now);
begin
  return coalesce(p_with || ', ', 'with ') || pg_catalog.format(
    'kept as (insert into pgque.archive (bucket, archived_at, arc_queue, arc_consumer, arc_worker, arc_outcome, arc_receives,'
    ' ev_id, ev_time, ev_retry, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires, ev_error)'
    ' select %s, %L, %s, $1.sub_consumer, coalesce(i.ev_worker, $2), $6, i.ev_receives,'
    ' i.ev_id, i.ev_time, i.ev_retry, i.ev_type, i.ev_data, i.ev_extra1, i.ev_extra2, i.ev_extra3, i.ev_extra4,'
    ' i.ev_headers, i.ev_key, i.ev_bytes, i.ev_expires, i.ev_error'
    ' from (%s) i returning ev_id)'
    ' select array_agg(k.ev_id) from kept k', case when pg_catalog.to_regclass('pgque.archive_' || v_bucket) is null then 0 else v_bucket end,
    v_now, p_queue_id, p_items);
end
$$;

create or replace function pgque.archive_list(
  queue_name text, limit_count int default 100, since timestamptz default null, until timestamptz default null, only_type text default null,
  only_key text default null, only_consumer text default null, matching text default null, before_id bigint default null,
  caller pgque.caller default current_user,
  out archive_id bigint, out queue text, out consumer_name text, out msg_id bigint, out type text, out payload text, out payload_bytes bytea,
  out headers jsonb, out key text, out sent_at timestamptz, out archived_at timestamptz, out receive_count int, out worker text, out outcome text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set datestyle = 'ISO' set jit = off as $f$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query execute format(
    $q$
    select a.archive_id, $1, c.co_name, a.ev_id, a.ev_type, a.ev_data, a.ev_bytes, a.ev_headers, a.ev_key,
      a.ev_time, a.archived_at, a.arc_receives, a.arc_worker, a.arc_outcome
    from pgque.archive a
    left join pgque.consumer c on c.co_id = a.arc_consumer
    where %s
    order by a.archive_id desc
    limit %s
    $q$,
    concat_ws(' and ', pgque._archived_by('a', v_queue.queue_id, $3, $4),
      'a.archived_at >= ' || quote_literal($3), 'a.archived_at < ' || quote_literal($4), 'a.archive_id < ' || $9, 'a.ev_type = ' || quote_literal($5),
      'a.ev_key = ' || quote_literal($6), 'c.co_name = ' || quote_literal($7),
      pgque._matching_sql($8, 'pg_catalog.left(a.ev_data, 100000), a.ev_headers::text, a.ev_key')),
    case when $2 < 0 then '0' else coalesce($2::text, 'all') end)
  using v_queue.queue_name;
end
$f$;
comment on function pgque.archive_list(text, int, timestamptz, timestamptz, text, text, text, text, bigint, pgque.caller) is
  'Returns the newest messages of a queue''s archive, at most limit_count (NULL: all). since, until: only those archived at since or later, and '
  'before until. only_type, only_key, only_consumer: only those of this type, key or consumer. matching: only those with this text in the payload '
  '(its first 100,000 characters), the headers or the key, in upper or lower case (of the letters that the database''s locale knows). before_id: '
  'only those archived before the one with this archive_id, to read page by page. Errors: PQ001 no such queue.';

create or replace function pgque.archive_replay(archive_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_row   pgque.archive;
  v_leaf  text;
  v_queue text;
begin
  -- Leaf by leaf, the newest first: a query over all of them locks them all.  archive_0 is
  -- before them, since maintenance moves its messages to the others.
  for v_leaf in select l.leaf from pgque._archive_leaves() l order by l.queue_id > 0, l.day desc loop
    begin
      execute format('select a.* from %s a where a.archive_id = $1', v_leaf) into v_row using $1;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' or undefined_table then
        null;
    end;
    exit when v_row.archive_id is not null;
  end loop;
  if v_row.archive_id is null or pgque._may(caller, 'admin', v_row.arc_queue) is not true then
    perform pgque._fail('PQ010', format('not in the archive: %s', coalesce($1::text, 'null')),
      'List the archived messages: select * from pgque.archive_list(queue);');
  end if;
  v_queue := (select q.queue_name from pgque.queue q where q.queue_id = v_row.arc_queue);
  perform pgque._record_action('archive_replay', v_queue, jsonb_build_object('archive_id', $1, 'msg_id', v_row.ev_id));
  return pgque._send(v_queue, v_row.ev_type, v_row.ev_data,
    v_row.ev_extra1, v_row.ev_extra2, v_row.ev_extra3, v_row.ev_extra4, v_row.ev_headers, v_row.ev_bytes);
end
$$;
comment on function pgque.archive_replay(bigint, pgque.caller) is
  'Sends an archived message as a new one to every consumer, and returns the new id. The archived message stays. Errors: PQ003 the queue is '
  'full; PQ010 it is not in the archive; PQ013 the queue is paused.';

create or replace function pgque.archive_purge(queue_name text, before timestamptz, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  if $2 is null then
    perform pgque._fail('PQ005', format('archive_purge of queue %I needs a time', v_queue.queue_name),
      'Pass a time: select pgque.archive_purge(queue, now() - interval ''30 days'');');
  end if;
  perform pgque._record_action('archive_purge', v_queue.queue_name, jsonb_build_object('before', $2));
  return pgque._drop_archive(v_queue.queue_id, $2);
end
$$;
comment on function pgque.archive_purge(text, timestamptz, pgque.caller) is
  'Drops the days (UTC) of a queue''s archive that ended before a time, and returns the number of days. Errors: PQ001 no such queue; PQ005 before is '
  'NULL.';

-- Returns the leaves of the archive, each with its queue and its day as in _bucket(); both
-- are 0 for archive_0.
create or replace function pgque._archive_leaves() returns table (leaf text, queue_id bigint, day bigint, is_empty boolean)
language sql volatile as $$
  select 'pgque.' || pg_catalog.quote_ident(c.relname), b.bucket / 100000, b.bucket % 100000,
    -- A leaf with rows usually has statistics by autovacuum.
    case when c.relpages > 0 then false else pg_catalog.pg_relation_size(c.oid) = 0 end
  from pg_catalog.pg_inherits i
  join pg_catalog.pg_class c on c.oid = i.inhrelid
  cross join lateral (select pg_catalog.substr(c.relname, 9)::bigint as bucket) b
  where i.inhparent = 'pgque.archive'::regclass
$$;

-- Empties the leaves of a queue's archive, all or those that end before a time.
-- Dropping a leaf takes a lock that blocks every ack which archives: maint() does it.
create or replace function pgque._drop_archive(p_queue_id int, p_before timestamptz) returns int
language plpgsql as $$
declare
  v_upto   bigint := case when p_before is not null then pgque._bucket(p_queue_id, p_before) % 100000 end;
  v_days   bigint[];
  v_leaf   text;
  v_day    bigint;
begin
  with gone as (
    delete from pgque.archive_0 a
    where a.arc_queue = p_queue_id and (v_upto is null or pgque._bucket(p_queue_id, a.archived_at) % 100000 < v_upto)
    returning a.archived_at
  )
  select array_agg(distinct pgque._bucket(p_queue_id, g.archived_at) % 100000) into v_days from gone g;
  for v_leaf, v_day in
    select l.leaf, l.day
    from pgque._archive_leaves() l
    where l.queue_id = p_queue_id and not l.is_empty
      and (v_upto is null or l.day < v_upto)
  loop
    execute 'truncate ' || v_leaf;
    v_days := pg_catalog.array_append(pg_catalog.array_remove(v_days, v_day), v_day);
  end loop;
  return coalesce(pg_catalog.cardinality(v_days), 0);
end
$$;

-- Drops empty leaves of the archive, of past days or of dropped queues, if the parent
-- can be locked at once, and for about a tenth of a second, as _drop_leaves() does.
create or replace function pgque._drop_archive_leaves() returns int
language plpgsql set lock_timeout = '50ms' as $$
declare
  v_leaves  text[];
  v_leaf    text;
  v_end     timestamptz;
  v_count   int := 0;
begin
  v_leaves := array(
    select l.leaf
    from pgque._archive_leaves() l
    where l.is_empty and l.queue_id > 0 and (l.day < pgque._bucket(0, pgque.clock()) - 1 or not exists (select from pgque.queue q where q.queue_id = l.queue_id))
    order by pg_catalog.random()
    limit 50);
  if pg_catalog.cardinality(v_leaves) = 0 then
    return 0;
  end if;
  lock table only pgque.archive in access exclusive mode nowait;
  v_end := pg_catalog.clock_timestamp() + '100 milliseconds';
  foreach v_leaf in array v_leaves loop
    exit when pg_catalog.clock_timestamp() > v_end;
    begin
      execute pg_catalog.format('lock table %s in access exclusive mode', v_leaf);
      if pg_catalog.pg_relation_size(v_leaf::regclass) = 0 then
        execute 'drop table ' || v_leaf;
        v_count := v_count + 1;
      end if;
    exception
      when lock_not_available or undefined_table or dependent_objects_still_exist then
        null;
    end;
  end loop;
  return v_count;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Notes for good that the archive of a queue's consumers lacks messages.
create or replace function pgque._note_unarchived(p_queue_id int) returns void
language sql volatile as $$
  update pgque.subscriber s set sub_archived = false
  from pgque.queue q
  where q.queue_id = p_queue_id and not q.queue_archive_on_ack and s.sub_queue = q.queue_id and s.sub_archived
$$;

create or replace function pgque.archive(batch_id bigint, msg_ids bigint[] default null, caller pgque.caller default current_user) returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query select f.* from pgque._set_outcomes(pgque._batch_for(caller, $1), $2, 'archive', null, 'archived', false) f;
end
$$;
comment on function pgque.archive(bigint, bigint[], pgque.caller) is
  'Acknowledges messages of a batch, all by default, and keeps them in the archive; see archive_list(). Returns one row for each message: msg_id, '
  'ok, and the reason if ok is false.';

create or replace function pgque.archive_poison(queue_name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_dead   pgque.dead_letter;
  v_sub    pgque.subscriber;
  v_count  int := 0;
begin
  for v_dead in
    select d.* from pgque.dead_letter d
    where d.dl_id in (select p.dl_id from pgque.list_poison(v_queue.queue_name, 100000) p where p.dl_id is not null)
    for update skip locked
  loop
    v_sub.sub_consumer := v_dead.dl_consumer_id;
    execute pgque._archive_sql(null, 'select d.*, d.dl_receives as ev_receives, null::text as ev_worker from pgque.dead_letter d where d.dl_id = $3', v_queue.queue_id)
    using v_sub, null::text, v_dead.dl_id, null, null, 'poison'::text;
    delete from pgque.dead_letter d where d.dl_id = v_dead.dl_id;
    v_count := v_count + 1;
  end loop;
  perform pgque._count(v_queue.queue_id, 0, 'archived', v_count);
  perform pgque._record_action('archive_poison', v_queue.queue_name, jsonb_build_object('messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.archive_poison(text, pgque.caller) is
  'Moves the dead letters that list_poison() returns to the archive, with outcome poison, and returns their number. Errors: PQ001 no such queue.';
-- ---------------------------------------------------------------------------
-- times: when recurring messages are due
-- ---------------------------------------------------------------------------

-- Only recurring messages use it.

-- Returns the values that a field of a cron expression allows, in order; null if the
-- field is invalid.  p_names are the names of the values from p_low on.  Weekdays have
-- p_high 7, which is Sunday like 0.
create or replace function pgque._cron_field(p_field text, p_low int, p_high int, p_names text default '') returns int[]
language plpgsql immutable as $$
declare
  v_names   text[] := pg_catalog.string_to_array(p_names, ' ');
  v_item    text;
  v_part    text[];
  v_from    int;
  v_to      int;
  v_values  int[] := '{}';
begin
  foreach v_item in array pg_catalog.string_to_array(pg_catalog.lower(p_field), ',') loop
    v_part := pg_catalog.regexp_match(v_item, '^(?:(\*)|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,2}))?$');
    v_from := case when v_part[1] = '*' then p_low when v_part[2] ~ '[0-9]' then v_part[2]::int
      else p_low - 1 + pg_catalog.array_position(v_names, v_part[2]) end;
    v_to := case when v_part[3] ~ '[0-9]' then v_part[3]::int when v_part[3] is not null then p_low - 1 + pg_catalog.array_position(v_names, v_part[3])
      when v_part[1] = '*' or v_part[4] is not null then p_high else v_from end;
    if p_high = 7 and v_to = 0 and v_from > 0 then
      v_to := 7;   -- fri-sun
    end if;
    if (v_from >= p_low and v_from <= v_to and v_to <= p_high and v_part[4] is distinct from '0' and v_part[4] is distinct from '00') is not true then
      return null;
    end if;
    v_values := v_values || array(select g.n from pg_catalog.generate_series(v_from, v_to, coalesce(v_part[4]::int, 1)) g (n));
  end loop;
  return array(select distinct case when p_high = 7 then v.n % 7 else v.n end as n from pg_catalog.unnest(v_values) v (n) order by n);
end
$$;

-- Returns whether the field of days, or that of weekdays, restricts nothing, so that
-- the other one alone decides.  (A day matches if either field matches, once both
-- restrict.)
create or replace function pgque._is_star(p_field text, p_all boolean, p_other text) returns boolean
language sql immutable as $$ select '*' = any (pg_catalog.string_to_array(p_field, ',')) or p_all and p_other like '%*%' $$;

create or replace function pgque._no_schedule(p_cron text, p_why text) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ005', pg_catalog.format('invalid schedule %s: %s', pg_catalog.quote_nullable(p_cron), p_why),
    'Use five fields (minute hour day month weekday) such as ''0 3 * * mon-fri'', six with seconds first, or an interval such as ''90 seconds''.');
end
$$;

-- Returns a schedule as columns of a definition.  PQ005 if it is invalid or has no run.
create or replace function pgque._schedule(p_cron text, p_timezone text, p_starts_at timestamptz, p_ends_at timestamptz) returns pgque.recurring
language plpgsql as $$
declare
  v_rec     pgque.recurring;
  v_fields  text[] := pg_catalog.regexp_split_to_array(pg_catalog.btrim(p_cron, E' \t\n'), '\s+');
  v_every   interval;
  v_wrong   text;
begin
  -- Lists of thousands of items would take minutes.
  if pg_catalog.octet_length(p_cron) > 1000 then
    perform pgque._no_schedule(pg_catalog.left(p_cron, 100), 'it is longer than 1000 bytes');
  end if;
  v_rec.rec_cron := p_cron;
  v_rec.rec_starts_at := p_starts_at;
  v_rec.rec_ends_at := p_ends_at;
  if p_timezone = 'UTC' then
    v_rec.rec_timezone := p_timezone;   -- listing all names takes a tenth of a second
  else
    select z.name into v_rec.rec_timezone from pg_catalog.pg_timezone_names z where pg_catalog.lower(z.name) = pg_catalog.lower(p_timezone) limit 1;
  end if;
  if v_rec.rec_timezone is null then
    perform pgque._fail('PQ005', pg_catalog.format('unknown time zone: %s', pg_catalog.quote_nullable(p_timezone)),
      'Use a name such as Europe/Berlin. List the names: select name from pg_timezone_names;');
  elsif not coalesce(pg_catalog.isfinite(p_starts_at), true) or not coalesce(pg_catalog.isfinite(p_ends_at), true) then
    perform pgque._no_schedule(p_cron, 'starts_at and ends_at must be finite');
  end if;
  if p_cron ~* '^\s*(p|[0-9.]+\s*[a-z:])' then
    v_every := p_cron::interval;
    v_rec.rec_every := extract(epoch from v_every);
    v_rec.rec_anchor := pg_catalog.date_trunc('second', coalesce(p_starts_at, pgque.clock()));
    if extract(year from v_every) <> 0 or extract(month from v_every) <> 0 or v_rec.rec_every not between 1 and 31622400
      or v_rec.rec_every <> extract(epoch from v_every)
    then
      perform pgque._no_schedule(p_cron, 'an interval has whole seconds, from 1 second to 366 days, and no months');
    end if;
  else
    if pg_catalog.cardinality(v_fields) = 5 then
      v_fields := pg_catalog.array_prepend('0', v_fields);
    end if;
    if pg_catalog.cardinality(v_fields) is distinct from 6 then
      perform pgque._no_schedule(p_cron, 'it has neither five nor six fields, and is no interval');
    end if;
    v_rec.rec_seconds := pgque._cron_field(v_fields[1], 0, 59);
    v_rec.rec_minutes := pgque._cron_field(v_fields[2], 0, 59);
    v_rec.rec_hours := pgque._cron_field(v_fields[3], 0, 23);
    v_rec.rec_days := pgque._cron_field(v_fields[4], 1, 31);
    v_rec.rec_months := pgque._cron_field(v_fields[5], 1, 12, 'jan feb mar apr may jun jul aug sep oct nov dec');
    v_rec.rec_weekdays := pgque._cron_field(v_fields[6], 0, 7, 'sun mon tue wed thu fri sat');
    v_rec.rec_fixed := v_fields[3] !~ '[*/]';
    v_rec.rec_either := not pgque._is_star(v_fields[4], pg_catalog.cardinality(v_rec.rec_days) = 31, v_fields[6])
      and not pgque._is_star(v_fields[6], pg_catalog.cardinality(v_rec.rec_weekdays) = 7, v_fields[4]);
    select pg_catalog.format('%s %L', f.name, v_fields[f.n]) into v_wrong
    from (values (1, 'second', v_rec.rec_seconds), (2, 'minute', v_rec.rec_minutes), (3, 'hour', v_rec.rec_hours), (4, 'day', v_rec.rec_days),
      (5, 'month', v_rec.rec_months), (6, 'weekday', v_rec.rec_weekdays)) f (n, name, allowed)
    where f.allowed is null
    order by f.n
    limit 1;
    if v_wrong is not null then
      perform pgque._no_schedule(p_cron, v_wrong);
    elsif pgque._next_local(v_rec, '1999-12-31 23:59:59') is null then
      perform pgque._no_schedule(p_cron, 'there is no such date');
    end if;
  end if;
  if pgque._next_run(v_rec, pgque.clock()) is null then
    perform pgque._no_schedule(p_cron, 'there is no run from now to ends_at');
  end if;
  return v_rec;
exception
  when data_exception then
    perform pgque._no_schedule(p_cron, sqlerrm);
end
$$;

create or replace function pgque._at_least(p_values int[], p_least int) returns int
language sql immutable as $$ select min(v.n) from pg_catalog.unnest(p_values) v (n) where v.n >= p_least $$;

-- Returns the first time after another that matches a cron expression, on a clock that
-- is never changed.  Null if there is none within nine years (29 February is every
-- eighth year at least).
create or replace function pgque._next_local(p_rec pgque.recurring, p_after timestamp) returns timestamp
language plpgsql immutable as $$
declare
  v_first   timestamp := pg_catalog.date_trunc('second', p_after) + interval '1 second';
  v_day     date := v_first::date;
  v_until   date := v_day + interval '9 years';
  v_hour    int := extract(hour from v_first);
  v_minute  int := extract(minute from v_first);
  v_at      int[];
  v_match   boolean[];
begin
  -- Hour, minute and second: each restarts at its first value if a greater unit
  -- advances.
  v_at[3] := pgque._at_least(p_rec.rec_seconds, extract(second from v_first)::int);
  v_minute := v_minute + (v_at[3] is null)::int;
  v_at[2] := pgque._at_least(p_rec.rec_minutes, v_minute);
  v_at[3] := case when v_at[2] = v_minute and v_at[3] is not null then v_at[3] else p_rec.rec_seconds[1] end;
  v_hour := v_hour + (v_at[2] is null)::int;
  v_at[1] := pgque._at_least(p_rec.rec_hours, v_hour);
  if v_at[1] is distinct from v_hour or v_at[2] is null then
    v_at[2] := p_rec.rec_minutes[1];
    v_at[3] := p_rec.rec_seconds[1];
  end if;
  v_day := v_day + (v_at[1] is null)::int;
  while v_day <= v_until loop
    if not extract(month from v_day)::int = any (p_rec.rec_months) then
      v_day := pg_catalog.date_trunc('month', v_day::timestamp) + interval '1 month';
      continue;
    end if;
    v_match := array[extract(day from v_day)::int = any (p_rec.rec_days), extract(dow from v_day)::int = any (p_rec.rec_weekdays)];
    if v_match = array[true, true] or p_rec.rec_either and true = any (v_match) then
      if v_at[1] is null or v_day > v_first::date then
        v_at := array[p_rec.rec_hours[1], p_rec.rec_minutes[1], p_rec.rec_seconds[1]];
      end if;
      return v_day + pg_catalog.make_time(v_at[1], v_at[2], v_at[3]);
    end if;
    v_day := v_day + 1;
  end loop;
  return null;
end
$$;

-- How far the clock of a time zone is ahead of UTC.
create or replace function pgque._offset(p_at timestamptz, p_zone text) returns interval
language sql stable as $$ select (p_at at time zone p_zone) - (p_at at time zone 'UTC') $$;

-- Returns the first instant after p_after at which a clock of the time zone shows a
-- time of the cron expression after p_local.  PostgreSQL reads a time that exists twice
-- as the later one, and a time that does not exist by the clock before the change.
create or replace function pgque._next_instant(p_rec pgque.recurring, p_after timestamptz, p_local timestamp) returns timestamptz
language plpgsql stable as $$
declare
  v_zone   text := p_rec.rec_timezone;
  v_local  timestamp := p_local;
  v_at     timestamptz;
  v_low    timestamptz;
  v_mid    timestamptz;
  v_back   interval;
begin
  loop
    v_local := pgque._next_local(p_rec, v_local);
    if v_local is null then
      return null;
    end if;
    v_at := v_local at time zone v_zone;
    if v_at at time zone v_zone <> v_local then
      -- The time does not exist: find the change of the clock.
      v_low := v_at - ((v_at at time zone v_zone) - v_local);
      while v_at - v_low > interval '1 second' loop
        v_mid := pg_catalog.date_trunc('second', v_low + (v_at - v_low) / 2);
        if pgque._offset(v_mid, v_zone) = pgque._offset(v_at, v_zone) then
          v_at := v_mid;
        else
          v_low := v_mid;
        end if;
      end loop;
      if not p_rec.rec_fixed then
        v_local := (v_at at time zone v_zone) - interval '1 second';
        continue;
      end if;
    else
      v_back := pgque._offset(v_at - interval '24 hours', v_zone) - pgque._offset(v_at, v_zone);
      if v_back > interval '0' and (v_at - v_back) at time zone v_zone = v_local and (p_rec.rec_fixed or v_at - v_back > p_after) then
        v_at := v_at - v_back;   -- the time exists twice
      end if;
    end if;
    if v_at > p_after then
      return v_at;
    end if;
  end loop;
end
$$;

-- Returns the first run of a definition after a time; null if there is none.
create or replace function pgque._next_run(p_rec pgque.recurring, p_after timestamptz) returns timestamptz
language plpgsql stable as $$
declare
  v_after  timestamptz := greatest(p_after, p_rec.rec_starts_at - interval '1 microsecond');
  v_local  timestamp;
  v_back   interval;
  v_run    timestamptz;
begin
  if p_rec.rec_every is not null then
    v_run := p_rec.rec_anchor + interval '1 second' * p_rec.rec_every
      * (pg_catalog.floor(extract(epoch from greatest(v_after, p_rec.rec_anchor - interval '1 microsecond') - p_rec.rec_anchor) / p_rec.rec_every) + 1)::float8;
  else
    v_local := v_after at time zone p_rec.rec_timezone;
    v_run := pgque._next_instant(p_rec, v_after, v_local);
    v_back := pgque._offset(v_after, p_rec.rec_timezone) - pgque._offset(v_after + interval '24 hours', p_rec.rec_timezone);
    -- Before the clock is set back, the times that it will show again come first.
    if not p_rec.rec_fixed and v_back > interval '0' and (v_after + v_back) at time zone p_rec.rec_timezone = v_local
      and (v_run <= v_after + v_back) is not true
    then
      v_run := least(v_run, pgque._next_instant(p_rec, v_after, v_local - v_back));
    end if;
  end if;
  return case when (v_run > p_rec.rec_ends_at) is not true then v_run end;
end
$$;

-- Returns the last run up to p_now; p_run is a run before it.
create or replace function pgque._latest_run(p_rec pgque.recurring, p_run timestamptz, p_now timestamptz) returns timestamptz
language plpgsql stable as $$
declare
  v_high  timestamptz := p_now;   -- no run from here to p_now
  v_mid   timestamptz;
  v_next  timestamptz;
begin
  while v_high - p_run >= interval '1 second' loop
    v_mid := p_run + interval '1 second' * (extract(epoch from v_high - p_run) / 2)::float8;
    v_next := pgque._next_run(p_rec, v_mid);
    if v_next <= p_now then
      p_run := v_next;
    else
      v_high := v_mid;
    end if;
  end loop;
  return p_run;
end
$$;

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
-- ---------------------------------------------------------------------------
-- idempotency: a message is sent once for its key (send_idem)
-- ---------------------------------------------------------------------------

-- Nothing else knows of it but maintenance, which empties its journal.

-- Of two senders with one key, the second waits.  If its snapshot does not show the
-- message of the first, it gets 40001.
create or replace function pgque.send_idem(
  queue text, type text, payload text, idem_key text,
  ttl interval default '1 hour', partition_key text default null, caller pgque.caller default current_user,
  out event_id bigint, out deduped boolean
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'produce');
  v_last   pgque.idempotency;
  v_leaf   int;
begin
  if $4 is null or $4 = '' or octet_length($4) > 1000 or $5 is null or $5 <= '0' or $5 > '100 years' then
    perform pgque._fail('PQ005', format('send_idem to queue %I needs a key of 1 to 1000 bytes and a positive ttl of at most 100 years', v_queue.queue_name),
      'Pass such a key and ttl. To send without a key, use pgque.send().');
  end if;
  perform pg_advisory_xact_lock(hashtext('pgque.idem ' || v_queue.queue_id), hashtext($4));
  v_leaf := pgque._idem_leaf();
  select k.* into v_last
  from pgque.idempotency k
  where k.idem_queue = v_queue.queue_id and k.idem_key = $4
  order by k.idem_n desc
  limit 1;
  if v_last.idem_expires > pgque.clock() then
    event_id := v_last.idem_ev_id;
    deduped := true;
    return;
  end if;
  event_id := pgque._send(v_queue.queue_name, $2, $3, $6, null, null, null, null, null);
  deduped := false;
  insert into pgque.idempotency (idem_queue, idem_key, idem_n, idem_ev_id, idem_expires, leaf)
  select v_queue.queue_id, $4, coalesce(v_last.idem_n, 0) + 1, event_id, pgque.clock() + $5, l.leaf
  from unnest(pgque._leaves_for(v_leaf)) l (leaf);
exception
  when unique_violation then
    perform pgque._fail('serialization_failure', format('the idempotency key %L of queue %I was used since this transaction began', $4, v_queue.queue_name),
      'Retry the transaction.');
end
$$;
comment on function pgque.send_idem(text, text, text, text, interval, text, pgque.caller) is
  'Sends one text as a message, unless a message with the same idem_key was sent to the queue within its ttl. Returns event_id and deduped: if '
  'deduped is true, nothing was sent and event_id is the earlier message''s id. Two senders of one key wait for each other. partition_key is kept in '
  'extra1. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 idem_key is empty or longer than 1000 bytes, or ttl is not positive or above '
  '100 years; PQ013 the queue is paused; 40001 the key was used since a transaction began that is not READ COMMITTED.';

create or replace function pgque.send_idem(
  queue text, type text, payload jsonb, idem_key text,
  ttl interval default '1 hour', partition_key text default null,
  out event_id bigint, out deduped boolean
)
language sql as $$ select * from pgque.send_idem($1, $2, $3::pg_catalog.text, $4, $5, $6) $$;
comment on function pgque.send_idem(text, text, jsonb, text, interval, text) is
  'Sends one JSON value as a message, unless a message with the same idem_key was sent to the queue within its ttl. Returns event_id and deduped: if '
  'deduped is true, nothing was sent and event_id is the earlier message''s id. Two senders of one key wait for each other. partition_key is kept in '
  'extra1. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 idem_key is empty or longer than 1000 bytes, or ttl is not positive or above '
  '100 years; PQ013 the queue is paused; 40001 the key was used since a transaction began that is not READ COMMITTED.';

-- Returns the leaf of the idempotency keys that is written; see _journal_leaf().
create or replace function pgque._idem_leaf() returns int
language plpgsql as $$
declare
  v_leaf  int;
begin
  perform pgque._journal_leaf();
  select j.journal_idem_cur into v_leaf from pgque.journal j where j.journal_id = 1;
  return v_leaf;
end
$$;

-- Makes the other leaf of the idempotency keys the current one once it has more than 4
-- MB.  Empties the old leaf as soon as half of its keys have expired, or the current
-- leaf is larger: so keys with a ttl of years do not keep other keys.  Keys that are
-- valid, of existing queues, are copied.  One call may do both, as in
-- _compact_journal().
create or replace function pgque._compact_idempotency() returns int
language plpgsql as $$
declare
  v_cur   int := (select j.journal_idem_cur from pgque.journal j where j.journal_id = 1);
  v_size  bigint := pg_catalog.pg_relation_size(('pgque.idempotency_' || v_cur)::regclass);
  v_old   bigint := pg_catalog.pg_relation_size(('pgque.idempotency_' || (1 - v_cur))::regclass);
  v_live  text := 'i.idem_expires > $1 and exists (select from pgque.queue q where q.queue_id = i.idem_queue)';
  v_half  boolean;
begin
  if v_size < 4194304 and v_old = 0 then
    return 0;
  end if;
  if not pgque._lock_journal(v_size) then
    return 0;
  end if;
  if (select j.journal_idem_cur from pgque.journal j where j.journal_id = 1) <> v_cur then
    return 0;
  end if;
  if v_old > 0 then
    -- Counted without the lock: the lock blocks every send_idem().
    execute pg_catalog.format('select count(*) filter (where %s) * 2 > count(*) from pgque.idempotency_%s i', v_live, 1 - v_cur)
    into v_half using pgque.clock();
    if v_half and v_size < v_old then
      return 0;
    end if;
    execute pg_catalog.format('lock table pgque.idempotency_%s in access exclusive mode nowait', 1 - v_cur);
    execute pg_catalog.format(
      'insert into pgque.idempotency select i.idem_queue, i.idem_key, i.idem_n, i.idem_ev_id, i.idem_expires, %s from pgque.idempotency_%s i where %s on conflict do nothing',
      v_cur, 1 - v_cur, v_live)
    using pgque.clock();
    execute pg_catalog.format('truncate pgque.idempotency_%s', 1 - v_cur);
  end if;
  update pgque.journal j
  set journal_idem_cur = case when v_size < 4194304 then v_cur else 1 - v_cur end, journal_emptied_at = pg_catalog.clock_timestamp()
  where j.journal_id = 1;
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;
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
-- ---------------------------------------------------------------------------
-- batches: PgQ's way to receive
-- ---------------------------------------------------------------------------

-- Opens a batch, PgQ's way: messages in the retry queue that are due, else the next
-- window (see _next_window), or the rest of one that was begun, by receive() or by a batch
-- of max_window messages.  The id of an open batch is returned again.  Null if nothing is
-- due and there is no further tick.  Messages that receive() would not deliver are left
-- out, and bodies are final from here on, since a client may read the batch only when it
-- finishes it.  With a worker, a subconsumer, the batch belongs to that worker.
create or replace function pgque._open_batch(
  queue_name text, consumer_name text, worker text, min_lag interval, min_count int, min_interval interval, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_turn   record := pgque._begin_delivery($1, $2, 1, $3, null, caller, null);
  v_sub    pgque.subscriber := v_turn.sub;
  v_queue  pgque.queue := v_turn.queue;
  v_pos    pgque.position := v_turn.pos;
  v_max    bigint := nullif(v_queue.queue_max_window, 0);
  v_token  bigint;
  v_count  bigint := 0;
begin
  if v_sub.sub_id is null or v_turn.open is not null then
    return v_turn.open;
  end if;
  v_token := pgque._new_batch_id(v_pos);
  if v_turn.due then
    v_pos.pos_shelf := pgque._lease_retries(v_queue, v_sub, v_token, least(10000, v_max), $3, v_turn.until, p_from => lower(v_pos.pos_due));
  end if;
  if v_pos.pos_shelf = 0 then
    if v_pos.pos_done_id is null then
      v_pos := pgque._next_window(v_pos, v_queue, $4, $5, $6);
      if v_pos.pos_next_tick is null then
        perform pgque._store_delivery(v_sub, v_queue, v_pos, v_turn.leaf, 0, null, null, null, v_turn.changed);
        return null;
      end if;
    end if;
    v_pos.pos_last_id := case when v_max is not null then
      pgque._cut(v_queue.queue_id, v_pos, pgque._slice_condition(v_sub.sub_id, v_pos.pos_done_id, null), v_max) end;
    -- The number of messages is not known yet.
    v_pos.pos_done_count := case when v_pos.pos_last_id is null then greatest(v_pos.pos_next_event_seq - v_pos.pos_event_seq, 1) else v_max end;
    v_count := v_pos.pos_done_count;
    if pgque._must_choose(v_sub, v_pos) then
      perform pgque._choose(v_queue, v_sub, v_pos, v_token, 2147483647, null::bigint);
    end if;
  end if;
  perform pgque._store_delivery(v_sub, v_queue, v_pos, v_turn.leaf, v_count, v_token, $3, v_turn.until, true);
  return v_token;
end
$$;

-- Opens a batch and returns its two ticks too.  To look up these costs as much as half of
-- opening the batch, so next_batch() does not.
create or replace function pgque._next_batch(
  queue_name text, consumer_name text, worker text, min_lag interval, min_count int, min_interval interval, caller pgque.caller default current_user,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub    pgque.subscriber;
  v_lease  pgque.position;
  v_prev   pgque.tick;
  v_cur    pgque.tick;
begin
  batch_id := pgque._open_batch($1, $2, $3, $4, $5, $6, caller);
  if batch_id is null then
    return;
  end if;
  v_sub := pgque._batch_owner(batch_id);
  v_lease := pgque._lease(v_sub.sub_id, batch_id);
  v_prev := pgque._tick(v_sub.sub_queue, v_lease.pos_tick);
  v_cur := pgque._tick(v_sub.sub_queue, pgque._end_tick(v_lease));
  cur_tick_id := v_cur.tick_id;
  cur_tick_time := v_cur.tick_time;
  cur_tick_event_seq := v_cur.tick_event_seq;
  prev_tick_id := v_prev.tick_id;
  prev_tick_time := v_prev.tick_time;
  prev_tick_event_seq := v_prev.tick_event_seq;
end
$$;

-- Opens the window of a batch.  Without conditions it ends as that of receive() does, at
-- the furthest tick up to ticker_max_count events (max_window if that is less), so that a
-- consumer that lags by many small ticks catches up.  A condition on the size chooses the
-- nearest tick that fits: its caller decides how big windows are.
create or replace function pgque._next_window(
  p_pos pgque.position, p_queue pgque.queue, p_min_lag interval, p_min_count int, p_min_interval interval
) returns pgque.position
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_max    bigint := least(p_queue.queue_ticker_max_count, nullif(p_queue.queue_max_window, 0));
  v_sized  boolean := p_min_count is not null or p_min_interval is not null;
  v_prev   pgque.tick;
  v_tick   pgque.tick;
begin
  p_pos := pgque._with_window(p_pos, null);
  if p_min_lag is null and not v_sized then
    return pgque._open_window(p_pos, p_queue.queue_id, v_max);
  end if;
  v_prev := pgque._tick(p_queue.queue_id, p_pos.pos_tick);
  for v_tick in
    execute pg_catalog.format(
      'select t.* from (%s) t where t.tick_id > $1'
      ' and ($2 is null or t.tick_time <= $3 - $2)'
      ' and (($4 is null and $5 is null) or t.tick_event_seq >= $6 + $4 or t.tick_time >= $7 + $5)'
      ' order by t.tick_id limit $8', pgque._ticks_sql(p_queue.queue_id))
    using p_pos.pos_tick, p_min_lag, pgque.clock(), p_min_count, p_min_interval, v_prev.tick_event_seq, v_prev.tick_time,
      case when v_sized then 1 else 100 end
  loop
    exit when p_pos.pos_next_tick is not null and v_tick.tick_event_seq > p_pos.pos_event_seq + v_max;
    p_pos := pgque._with_window(p_pos, v_tick);
  end loop;
  return p_pos;
end
$$;

-- Returns the tick that ends a batch.  A batch from the retry queue ends at the tick
-- where it began.
create or replace function pgque._end_tick(p_lease pgque.position) returns bigint
language sql immutable as $$ select case when p_lease.pos_fresh > 0 or p_lease.pos_shelf = 0 then p_lease.pos_next_tick else p_lease.pos_tick end $$;

-- There is no argument caller: with it, a call with a subconsumer and six nulls would
-- be ambiguous.
create or replace function pgque.next_batch_custom(
  queue_name text, consumer_name text, min_lag interval, min_count int, min_interval interval,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language sql as $$ select * from pgque._next_batch($1, $2, null, $3, $4, $5) $$;
comment on function pgque.next_batch_custom(text, text, interval, int, interval) is
  'Opens a batch with conditions on its end; NULL is no condition. min_lag: the batch ends at a tick that is at least this old. min_count, '
  'min_interval: it ends at the nearest tick so that it spans at least this number of messages or this time. The result is batch_id (NULL if there '
  'is none), and the ids, times and event sequences of the batch''s two ticks. Errors: PQ001 no such queue; PQ005 the consumer has workers; PQ011 '
  'not subscribed.';

create or replace function pgque.next_batch_info(
  queue_name text, consumer_name text,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language sql as $$ select * from pgque._next_batch($1, $2, null, null, null, null) $$;
comment on function pgque.next_batch_info(text, text) is
  'Opens the next window between two ticks as a batch; see next_batch(). The result is batch_id (NULL if there is none), and the ids, times and '
  'event sequences of the batch''s two ticks. If the batch is a part of a window (see max_window), the ticks are those of the window. Errors: PQ001 '
  'no such queue; PQ005 the consumer has workers; PQ011 not subscribed.';

create or replace function pgque.next_batch(queue_name text, consumer_name text) returns bigint
language sql as $$ select pgque._open_batch($1, $2, null, null, null, null) $$;
comment on function pgque.next_batch(text, text) is
  'Opens the next window between two ticks as a batch, and returns its id, or NULL if there is no further tick and no retry is due. A consumer that '
  'lags gets a window of several ticks, up to ticker_max_count events; a single tick may have more, unless max_window is set: then a larger window '
  'becomes several batches. Retries that are due come first, at most 10,000 in a batch of their own, whose two ticks are the same. While a batch is '
  'open, its id is returned again. A batch may be empty. Read it with get_batch_events() and close it with finish_batch(). Errors: PQ001 no such '
  'queue; PQ005 the consumer has workers; PQ011 not subscribed.';

-- Returns the delivery of an open batch, without a lock; PQ012 if it is not open.
create or replace function pgque._open_lease(p_sub pgque.subscriber, p_batch bigint) returns pgque.position
language plpgsql as $$
begin
  if not pgque._is_open(p_sub, p_batch) then
    perform pgque._no_batch(p_batch);
  end if;
  return pgque._lease(p_sub.sub_id, p_batch);
end
$$;

-- Returns the query of an open batch: all of it, or, if messages may be left out when
-- it is opened, or cancelled since, those without an outcome.
create or replace function pgque._open_sql(p_batch bigint) returns text
language plpgsql as $$
declare
  v_sub    pgque.subscriber := pgque._batch_owner(p_batch);
  v_state  record;
begin
  select s.* into v_state from pgque._states(v_sub.sub_id, array[p_batch]) s;
  if v_state.place = 'log' and exists (
    select from pgque.queue q
    where q.queue_id = v_sub.sub_queue and not q.queue_keyed and not q.queue_expiring and not pgque._noted(q.queue_id, '{key,ttl,cancelled}'))
  then
    return pgque._slice_sql(v_sub, v_state.lease);
  end if;
  perform pgque._open_lease(v_sub, p_batch);
  return pgque._batch_sql(v_sub, p_batch);
end
$$;

create or replace function pgque.get_batch_events(
  batch_id bigint, caller pgque.caller default current_user,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query execute format('select %s from (%s) e order by e.ev_id', pgque._event_columns(), pgque._open_sql(pgque._batch_for(caller, $1)));
end
$$;
comment on function pgque.get_batch_events(bigint, pgque.caller) is
  'Returns the events of an open batch in the order of their ids, as stored. Errors: PQ012 the batch is not open.';

-- Returns the query of an open batch for roles that may read the leaves themselves.
create or replace function pgque._cursor_sql(p_batch bigint) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return pgque._open_sql(p_batch);
end
$$;

-- extra_where runs with the caller's rights and sees pg_catalog and pgque only.
create or replace function pgque.get_batch_cursor(
  batch_id bigint, cursor_name text, quick_limit int, extra_where text,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_cursor  refcursor := $2;
begin
  if coalesce($2, '') = '' or ($3 >= 0) is not true then
    perform pgque._fail('PQ005', format('a cursor over batch %s needs a name and a count that is not negative', coalesce($1::text, 'null')),
      'Pass any name that is free in this transaction, and FETCH from it.');
  end if;
  open v_cursor for execute format('select %s from (%s) e where true %s order by e.ev_id',
    pgque._event_columns(), pgque._cursor_sql($1), coalesce('and (' || $4 || ')', ''));
  return query execute format('fetch forward %s from %I', $3, $2);
end
$$;
comment on function pgque.get_batch_cursor(bigint, text, int, text) is
  'Opens a cursor over an open batch and returns its first quick_limit events. Fetch the rest from cursor_name in the same transaction. extra_where: '
  'an SQL condition on the event columns; never build it from untrusted input. Errors: PQ012 the batch is not open.';

create or replace function pgque.get_batch_cursor(
  batch_id bigint, cursor_name text, quick_limit int,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language sql as $$ select * from pgque.get_batch_cursor($1, $2, $3, null) $$;
comment on function pgque.get_batch_cursor(bigint, text, int) is
  'Opens a cursor over an open batch and returns its first quick_limit events. Fetch the rest from cursor_name in the same transaction. Errors: '
  'PQ012 the batch is not open.';

create or replace function pgque.get_batch_info(
  batch_id bigint, caller pgque.caller default current_user,
  out queue_name text, out consumer_name text, out batch_start timestamptz, out batch_end timestamptz,
  out prev_tick_id bigint, out tick_id bigint, out lag interval, out seq_start bigint, out seq_end bigint
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._batch_owner(pgque._batch_for(caller, $1));
  v_lease  pgque.position := pgque._open_lease(v_sub, $1);
  v_prev   pgque.tick := pgque._tick(v_sub.sub_queue, v_lease.pos_tick);
  v_cur    pgque.tick := pgque._tick(v_sub.sub_queue, pgque._end_tick(v_lease));
begin
  queue_name := (select q.queue_name from pgque.queue q where q.queue_id = v_sub.sub_queue);
  consumer_name := pgque._subscriber_name(v_sub) || coalesce('.' || v_lease.pos_worker, '');
  batch_start := v_prev.tick_time;
  batch_end := v_cur.tick_time;
  prev_tick_id := v_prev.tick_id;
  tick_id := v_cur.tick_id;
  lag := pgque.clock() - v_cur.tick_time;
  seq_start := v_prev.tick_event_seq;
  seq_end := v_cur.tick_event_seq;
end
$$;
comment on function pgque.get_batch_info(bigint, pgque.caller) is
  'Returns what an open batch spans: queue, consumer, times and ids of its two ticks, their event sequences, and lag, the age of its end. For a part of a window (see max_window) '
  'these are of the window. Errors: '
  'PQ012 the batch is not open.';
-- ---------------------------------------------------------------------------
-- subconsumers: PgQ's cooperative consumers
-- ---------------------------------------------------------------------------

-- PgQ's way to share one position, kept for its clients: workers are registered by
-- name, and each holds one batch.  A subconsumer is a worker whose lease has no end:
-- its open batch is redelivered to it.  If a worker was silent for longer than
-- dead_interval, a call moves its batch to another worker, through the retry queue.
--
-- A subconsumer's newest row in the journal records when it last called.  The rest of
-- the engine handles subconsumers where _begin_delivery() calls _worker(), to find out whether
-- one is registered, and _touch().

-- Refuses a call for a consumer on its own if the consumer has workers.
create or replace function pgque._need_alone(p_sub pgque.subscriber, p_queue text, p_consumer text) returns void
language plpgsql as $$
begin
  if p_sub.sub_role in ('coop_main', 'pool') then
    perform pgque._fail('PQ005', pg_catalog.format('consumer %I of queue %I has workers', p_consumer, p_queue),
      case p_sub.sub_role
        when 'pool' then 'Share its messages as a worker: pgque.receive(queue, consumer, max_return, worker => name), in Python Worker. '
        'To get every message, subscribe another consumer: pgque.subscribe(queue, name). To move this one, use pgque.register_consumer_at(queue, consumer, tick_id).'
        else 'Use pgque.receive_coop(queue, consumer, subconsumer) or pgque.next_batch(queue, consumer, subconsumer).' end);
  end if;
end
$$;

-- Returns the subscriber row of a worker, or null.
create or replace function pgque._find_worker(p_main int, p_worker text) returns int
language plpgsql as $$
begin
  return (select s.sub_id from pgque.subscriber s where s.sub_main = p_main and s.sub_worker = p_worker collate pg_catalog."default");
end
$$;

create or replace function pgque._worker(p_main pgque.subscriber, p_worker text) returns int
language plpgsql as $$
declare
  v_sub  int := pgque._find_worker(p_main.sub_id, p_worker);
begin
  if v_sub is null then
    perform pgque._fail('PQ011', pg_catalog.format('not subscriber to queue: worker %s of %s', coalesce(pg_catalog.quote_ident(p_worker), 'null'), pgque._subscriber_name(p_main)),
      'Register it with pgque.register_subconsumer(queue, consumer, subconsumer), or use pgque.receive_coop().');
  end if;
  return v_sub;
end
$$;

create or replace function pgque.register_subconsumer(
  queue_name text, consumer_name text, subconsumer_name text, convert_normal boolean default false, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_main      pgque.subscriber;
  v_position  pgque.position;
  v_batch     bigint;   -- the open batch of the consumer's own reader
begin
  if coalesce($3, '') = '' or octet_length($3) > 1000 then
    perform pgque._fail('PQ004', format('invalid worker name for consumer %s of queue %s', coalesce(quote_ident($2), 'null'), coalesce(quote_ident($1), 'null')),
      'A worker name has 1 to 1000 bytes; any character is allowed.');
  end if;
  perform pgque._subscribe($1, $2, 'coop_main', 'latest', caller);
  v_main := pgque._subscriber($1, $2, caller);
  if pgque._find_worker(v_main.sub_id, $3) is not null then
    return 0;
  end if;
  v_position := pgque._lock_position(v_main.sub_id);
  v_main := pgque._subscriber($1, $2, caller);
  if v_main.sub_role = 'pool' then
    perform pgque._fail('PQ006', format('consumer %I of queue %I has workers with leases', $2, $1),
      'Use pgque.receive(queue, consumer, max_return, worker => name), or another consumer.');
  elsif v_main.sub_role = 'normal' then
    if $4 is not true then
      perform pgque._fail('PQ006', format('consumer %I of queue %I reads on its own', $2, $1),
        'Give it subconsumers: select pgque.register_subconsumer(queue, consumer, subconsumer, true);');
    end if;
    v_batch := pgque._open_batch_of(v_main, v_position, null);
    update pgque.subscriber s set sub_role = 'coop_main' where s.sub_id = v_main.sub_id;
  end if;
  perform pgque._add_subscriber(v_main.sub_queue, v_main.sub_consumer, 'coop_member', v_main.sub_id, $3, null, caller);
  if v_batch is not null then
    perform pgque._give_batch(v_main, v_batch, $3, 0);
  end if;
  return 1;
exception
  when unique_violation then
    return 0;
end
$$;
comment on function pgque.register_subconsumer(text, text, text, boolean, pgque.caller) is
  'Registers a worker (subconsumer) of a consumer, and subscribes the consumer if it is new. Returns 1, or 0 if the worker was registered already. '
  'convert_normal: turns a consumer that reads on its own into one with workers. The worker then gets the consumer''s open batch under a new id, '
  'without the messages that have an outcome. Errors: PQ001 no such queue; PQ004 a name is empty or longer than 1000 bytes; PQ006 the consumer '
  'reads on its own and convert_normal is not true.';

create or replace function pgque.subscribe_subconsumer(
  queue_name text, consumer_name text, subconsumer_name text, convert_normal boolean default false
) returns int
language sql as $$ select pgque.register_subconsumer($1, $2, $3, $4) $$;
comment on function pgque.subscribe_subconsumer(text, text, text, boolean) is 'Earlier name of register_subconsumer().';

create or replace function pgque.unregister_subconsumer(
  queue_name text, consumer_name text, subconsumer_name text, batch_handling int default 0, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_main   pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_sub    int;
  v_batch  bigint;
begin
  perform pgque._lock_subscriber(v_main.sub_id);
  v_sub := pgque._find_worker(v_main.sub_id, $3);
  if v_sub is null then
    return 0;
  end if;
  perform pgque._lock_subscriber(v_sub);
  v_batch := pgque._open_batch_of(v_main, pgque._position(v_main.sub_id), $3);
  if v_batch is not null then
    if $4 is distinct from 1 then
      perform pgque._fail('PQ006', format('worker %I of consumer %I of queue %I holds a batch', $3, $2, $1),
        'Finish the batch, or pass batch_handling => 1 to reject its messages.');
    end if;
    perform pgque._set_outcomes(v_batch, null, 'nack', '0', 'worker unregistered', false);
    perform pgque._record(v_batch, 'closed');
  end if;
  delete from pgque.subscriber s where s.sub_id = v_sub;
  return 1;
end
$$;
comment on function pgque.unregister_subconsumer(text, text, text, int, pgque.caller) is
  'Removes a worker (subconsumer) and returns 1, or 0 if there is none. batch_handling: for a worker with an open batch, 0 is an error, and 1 '
  'rejects the messages of the batch, which are retried or become dead letters. Errors: PQ001 no such queue; PQ006 the worker has an open batch; '
  'PQ011 not subscribed.';

create or replace function pgque.unsubscribe_subconsumer(
  queue_name text, consumer_name text, subconsumer_name text, batch_handling int default 0
) returns int
language sql as $$ select pgque.unregister_subconsumer($1, $2, $3, $4) $$;
comment on function pgque.unsubscribe_subconsumer(text, text, text, int) is 'Earlier name of unregister_subconsumer().';

create or replace function pgque.touch_subconsumer(queue_name text, consumer_name text, subconsumer_name text, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_main  pgque.subscriber := pgque._subscriber($1, $2, caller);
begin
  perform pgque._lock_subscriber(v_main.sub_id);
  perform pgque._touch(pgque._worker(v_main, $3));
  return 1;
end
$$;
comment on function pgque.touch_subconsumer(text, text, text, pgque.caller) is
  'Marks a worker (subconsumer) as alive: dead_interval counts from now. Returns 1. Errors: PQ001 no such queue; PQ011 no such worker.';

-- Gives the oldest batch whose worker was silent for longer than p_dead_interval to
-- another worker.  A worker that has a batch takes none over.  A worker that holds its
-- own lock is alive.
create or replace function pgque._take_over(p_main pgque.subscriber, p_worker text, p_dead_interval interval) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_dead  record;
begin
  for v_try in 0..1 loop
    select h.token, h.sub_id into v_dead
    from (
      -- OFFSET keeps the planner from reading the position of each worker of the group: of
      -- one that was removed meanwhile there is none, which is an error.
      select b.token, s.sub_id
      from pgque._states(p_main.sub_id, (pgque._position(p_main.sub_id)).pos_open) b
      join pgque.subscriber s on s.sub_main = p_main.sub_id and s.sub_worker = (b.lease).pos_worker
      where b.place is not null
      offset 0
    ) h
    cross join lateral pgque._position(h.sub_id) p
    where p.pos_time < pgque.clock() - p_dead_interval
      and pgque._open_batch_of(p_main, pgque._position(p_main.sub_id), p_worker) is null
    order by p.pos_time
    limit 1;
    if not found then
      return;
    elsif v_try = 0 then
      perform pgque._lock_subscriber(p_main.sub_id);
    end if;
  end loop;
  perform from pgque.subscriber s where s.sub_id = v_dead.sub_id for no key update skip locked;
  if found and (pgque._position(v_dead.sub_id)).pos_time < pgque.clock() - p_dead_interval then
    perform pgque._give_batch(p_main, v_dead.token, p_worker, 1);
  end if;
end
$$;

-- Gives an open batch to a worker, under a new batch id, without messages that have an
-- outcome.  p_deliveries is added to their count.  The caller holds the consumer's
-- lock.
create or replace function pgque._give_batch(p_main pgque.subscriber, p_batch bigint, p_worker text, p_deliveries int) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_pos    pgque.position := pgque._next_from(pgque._position(p_main.sub_id));
  v_token  bigint := pgque._new_batch_id(v_pos);
  v_state  record;
  v_fresh  bigint := 0;
begin
  select s.* into v_state from pgque._states(p_main.sub_id, array[p_batch]) s;
  if v_state.place = 'log' then
    v_fresh := pgque._move_to_retry(p_main, v_state.lease, 'infinity', v_token, p_worker, p_deliveries);
  end if;
  update pgque.retry_queue r set ev_batch = v_token, ev_worker = p_worker, ev_receives = r.ev_receives + p_deliveries
  where r.ev_owner = p_main.sub_id and r.ev_batch = p_batch;
  get diagnostics v_pos.pos_shelf = row_count;
  v_pos.pos_shelf := v_pos.pos_shelf + v_fresh;
  perform pgque._record(p_batch, 'closed');
  v_pos.pos_open := pg_catalog.array_remove(v_pos.pos_open, p_batch);
  perform pgque._store_delivery(p_main, null, v_pos, pgque._journal_leaf(), 0, v_token, p_worker, 'infinity', true);
end
$$;

-- Notes that a worker is alive.
create or replace function pgque._touch(p_member int) returns void
language plpgsql as $$
begin
  perform pgque._append_position(pgque._lock_position(p_member));
end
$$;

-- Registers a worker on first use and takes over a batch for it if dead_interval
-- is given.
create or replace function pgque._join(
  queue_name text, consumer_name text, subconsumer_name text, dead_interval interval, caller pgque.caller default current_user
) returns void
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  int := (pgque._queue($1, caller, 'consume')).queue_id;
  v_main   int := (select s.sub_id from pgque._subscriber_by_name(v_queue, $2) s);
begin
  if pgque._find_worker(v_main, $3) is null then
    perform pgque.register_subconsumer($1, $2, $3, false, caller);
    v_main := (pgque._subscriber($1, $2, caller)).sub_id;
  end if;
  if $4 < '0' then
    perform pgque._fail('PQ005', format('dead_interval must not be negative, for consumer %I of queue %I', $2, $1),
      'Pass the time that a worker may be silent before another one gets its batch, such as ''5 minutes''.');
  elsif $4 is not null then
    perform pgque._take_over(pgque._subscriber($1, $2, caller), $3, $4);
  end if;
end
$$;

create or replace function pgque.receive_coop(
  queue_name text, consumer_name text, subconsumer_name text, max_return int default 100, dead_interval interval default null, max_bytes bigint default null,
  caller pgque.caller default current_user
) returns setof pgque.delivery
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._join($1, $2, $3, $5, caller);
  return query select * from pgque.receive($1, $2, $4, $3, max_bytes => $6);
end
$$;
comment on function pgque.receive_coop(text, text, text, int, interval, bigint, pgque.caller) is
  'Delivers the consumer''s next messages as one batch to one of several workers (subconsumers) that share it; each worker gets other messages. '
  'Registers the worker on first use. max_return: the most messages of a batch. dead_interval: if a worker was silent for longer, its batch is taken '
  'over first, under a new batch id. max_bytes: a new batch ends before its payloads and headers exceed this number of bytes, with at least one '
  'message. Errors: PQ001 no such queue; PQ004 invalid name; PQ005 max_return or max_bytes is below 1, or dead_interval is negative; PQ006 the '
  'consumer reads on its own.';

-- There is no argument caller, as in next_batch_custom() without a subconsumer.
create or replace function pgque.next_batch_custom(
  queue_name text, consumer_name text, subconsumer_name text, min_lag interval, min_count int, min_interval interval,
  dead_interval interval default null,
  out batch_id bigint, out cur_tick_id bigint, out prev_tick_id bigint,
  out cur_tick_time timestamptz, out prev_tick_time timestamptz,
  out cur_tick_event_seq bigint, out prev_tick_event_seq bigint
)
language sql as $$
  select pgque._join($1, $2, $3, $7);
  select * from pgque._next_batch($1, $2, $3, $4, $5, $6);
$$;
comment on function pgque.next_batch_custom(text, text, text, interval, int, interval, interval) is
  'Opens a batch with conditions on its end for one of several workers (subconsumers) that share a consumer; each worker gets other windows. '
  'Registers the worker on first use. NULL is no condition. min_lag: the batch ends at a tick that is at least this old. min_count, min_interval: it '
  'ends at the nearest tick so that it spans at least this number of messages or this time. dead_interval: if a worker was silent for longer, its '
  'batch is taken over first, under a new batch id. The result is batch_id (NULL if there is none), and the ids, times and event sequences of the '
  'batch''s two ticks. Errors: PQ001 no such queue; PQ004 invalid name; PQ005 dead_interval is negative; PQ006 the consumer reads on its own.';

create or replace function pgque.next_batch(
  queue_name text, consumer_name text, subconsumer_name text, dead_interval interval default null
) returns bigint
language sql as $$
  select pgque._join($1, $2, $3, $4);
  select pgque._open_batch($1, $2, $3, null, null, null);
$$;
comment on function pgque.next_batch(text, text, text, interval) is
  'Opens a batch for one of several workers (subconsumers) that share a consumer; each worker gets other windows. Registers the worker on first '
  'use. dead_interval: if a worker was silent for longer, its batch is taken over first, under a new batch id. Errors: PQ001 no such queue; PQ004 '
  'invalid name; PQ005 dead_interval is negative; PQ006 the consumer reads on its own.';
-- ---------------------------------------------------------------------------
-- triggers: table changes as events
-- ---------------------------------------------------------------------------

-- Does the work of the three trigger functions.  Arguments: the queue, then options:
--   backup            keep the old row in ev_extra2
--   ignore=a,b        leave these columns out; an update of nothing else is no event
--   pkey=a,b          the key columns, instead of the primary key
--   deny              refuse the change
--   skip              a BEFORE trigger that cancels the change after recording it
-- ev_type is I:, U:, D: or R (truncate) with the key columns; ev_extra1 is the
-- table's name.  p_format is json, url or sql.
--
-- All of this runs with the rights of the role that changes the table, because
-- to_jsonb() runs casts that a table's owner may have created.  So roles that change
-- the table need the role pgque_writer, or the right to produce to the queue.  A role
-- without either cannot call this function, so the trigger functions raise the error.
--
-- Rows that a dump loads are no changes: nothing is sent for them while the queue is
-- being restored (_is_old_change).
create or replace function pgque._row_event(
  p_format text, p_op text, p_table regclass, p_args text[], p_new jsonb, p_old jsonb
) returns void
language plpgsql set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue   text := p_args[0];   -- trigger arguments count from 0
  v_opts    text[] := p_args[1:];
  v_ignore  text[];
  v_pkey    text[];
  v_row     jsonb := coalesce(p_new, p_old);
  v_opt     text;
  v_data    text;
  v_where   text;
begin
  if v_queue is null then
    perform pgque._fail('PQ005', format('the trigger on table %s names no queue', p_table),
      'Name the queue: create trigger ... execute function pgque.jsontriga(''queue'', options...)');
  elsif pgque._is_old_change(v_queue) then
    return;
  end if;
  foreach v_opt in array v_opts loop
    if v_opt like 'ignore=%' then
      v_ignore := string_to_array(substr(v_opt, 8), ',');
    elsif v_opt like 'pkey=%' then
      v_pkey := string_to_array(substr(v_opt, 6), ',');
    elsif v_opt = 'deny' then
      perform pgque._fail('PQ013', format('table %s must not be changed here: its changes come from queue %I', p_table, v_queue),
        'Change the table that sends to the queue, or create the trigger without the option deny.');
    elsif lower(v_opt) not in ('backup', 'skip') then
      perform pgque._fail('PQ005', format('unknown option %L of the trigger on table %s', v_opt, p_table),
        'Use backup, ignore=columns, pkey=columns, deny or skip.');
    end if;
  end loop;
  if p_op = 'TRUNCATE' then
    perform pgque.insert_event(v_queue, 'R', null, p_table::text, null, null, null);
    return;
  end if;
  v_pkey := coalesce(v_pkey, (
    select array_agg(a.attname::text order by k.n)
    from pg_index i
    cross join lateral unnest(i.indkey) with ordinality k (attnum, n)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    where i.indrelid = p_table and i.indisprimary and k.n <= i.indnkeyatts), '{}');
  if not v_row ?& v_pkey then
    perform pgque._fail('PQ005', format('the key of the trigger on table %s names columns that the table lacks: %s', p_table,
        (select string_agg(k.name, ', ') from unnest(v_pkey) k (name) where not v_row ? k.name)),
      'Write pkey=columns, with commas and no blanks between the names.');
  end if;
  v_row := v_row - coalesce(v_ignore, '{}');
  if p_op = 'UPDATE' and v_row = (p_old - coalesce(v_ignore, '{}')) and v_ignore is not null then
    return;
  end if;
  if p_format = 'json' then
    v_data := v_row::text;
  elsif p_format = 'url' then
    select string_agg(pgque._url_encode(r.key) || coalesce('=' || pgque._url_encode(r.value), ''), '&')
    into v_data from jsonb_each_text(v_row) r;
  else
    select string_agg(quote_ident(r.key) || coalesce(' = ' || quote_literal(r.value), ' is null'), ' and ')
    into v_where from jsonb_each_text(coalesce(p_old, p_new)) r where r.key = any (v_pkey) or v_pkey = '{}';
    if p_op = 'INSERT' then
      select format('(%s) values (%s)', string_agg(quote_ident(r.key), ','), string_agg(quote_nullable(r.value), ','))
      into v_data from jsonb_each_text(v_row) r;
    elsif p_op = 'UPDATE' then
      select string_agg(format('%I = %s', r.key, quote_nullable(r.value)), ', ') || ' where ' || v_where
      into v_data from jsonb_each_text(v_row) r
      where r.value is distinct from p_old ->> r.key;
      v_data := coalesce(v_data, v_where);
    else
      v_data := v_where;
    end if;
  end if;
  perform pgque.insert_event(v_queue,
    case when p_format = 'sql' then left(p_op, 1) else left(p_op, 1) || ':' || array_to_string(v_pkey, ',') end,
    v_data, p_table::text, case when 'backup' = any (v_opts) then p_old::text end, null, null);
end
$$;

-- Percent-encoding of everything but letters, digits, - _ . and ~.
create or replace function pgque._url_encode(p_text text) returns text
language sql immutable strict as $$
  select coalesce(pg_catalog.string_agg(
    case
      when c.ch ~ '^[A-Za-z0-9_.~-]$' then c.ch
      else pg_catalog.upper(pg_catalog.regexp_replace(pg_catalog.encode(pg_catalog.convert_to(c.ch, 'UTF8'), 'hex'), '(..)', E'%\\1', 'g'))
    end, '' order by c.n), '')
  from pg_catalog.regexp_split_to_table(p_text, '') with ordinality c (ch, n)
$$;

do $functions$
declare
  v_name    text;
  v_format  text;
begin
  for v_name, v_format in values ('jsontriga', 'json'), ('logutriga', 'url'), ('sqltriga', 'sql') loop
    execute format(
      $template$
      create or replace function pgque.%s() returns trigger
      language plpgsql set search_path = pg_catalog, pgque, pg_temp set jit = off as $body$
      begin
        if not has_schema_privilege('pgque', 'usage') or not has_function_privilege('pgque._row_event(text,text,regclass,text[],jsonb,jsonb)', 'execute') then
          raise insufficient_privilege using
            message = format('role %%I may not send the changes of table %%s', current_user, tg_relid::regclass),
            hint = format('select pgque.grant_queue(%%L, %%L, ''produce''); or, for all queues: grant pgque_writer to %%I.', tg_argv[0], current_user, current_user);
        end if;
        perform pgque._row_event(%L, tg_op, tg_relid::regclass, tg_argv,
          case when tg_op in ('INSERT', 'UPDATE') then to_jsonb(new) end, case when tg_op in ('UPDATE', 'DELETE') then to_jsonb(old) end);
        if tg_when = 'BEFORE' and lower(tg_argv[1:]::text)::text[] @> '{skip}' then
          return null;
        end if;
        return coalesce(new, old);
      end
      $body$
      $template$, v_name, v_format);
  end loop;
end
$functions$;
comment on function pgque.jsontriga() is
  'Sends each change of a table as JSON, as a row or TRUNCATE trigger: create trigger ... execute function pgque.jsontriga(''queue'', options...). '
  'Options: backup (the old row to ev_extra2), ignore=columns, pkey=columns, deny, skip. ev_type is I:, U: or D: and the key columns, or R for '
  'TRUNCATE; ev_extra1 is the table. Errors: PQ001 no such queue; PQ005 no queue, an unknown option, or a key that is no column; PQ013 the queue is '
  'paused, or the change is denied; 42501 the role that changes the table may not send to the queue.';
comment on function pgque.logutriga() is
  'Sends each change of a table with the row as URL-encoded pairs, as a row or TRUNCATE trigger. ev_type is I:, U: or D: and the key columns, or R '
  'for TRUNCATE; ev_extra1 is the table. The arguments and the errors of the trigger are those of jsontriga().';
comment on function pgque.sqltriga() is
  'Sends each change of a table as the part of an SQL statement that follows the table''s name, as a row or TRUNCATE trigger. ev_type is I, U, D or '
  'R; ev_extra1 is the table. The arguments and the errors of the trigger are those of jsontriga().';
-- ---------------------------------------------------------------------------
-- sink: INSERT, COPY and Spark send
-- ---------------------------------------------------------------------------

-- Two views that turn rows into messages.  They are views because a writer that
-- overwrites would drop a table and create it again.  Their columns are text where a
-- driver has strings.  sink has the options of send() by a trigger; sink_bulk takes
-- plain messages by a rule, which is faster.
-- The column queue of both views has a domain type.  Under session_replication_role = replica,
-- neither rules nor triggers of a view fire, and a view cannot have triggers that
-- always fire.  So a row would be lost silently: the check of the domain refuses it.
do $$
begin
  if to_regtype('pgque.sink_queue') is null then
    create domain pgque.sink_queue as text
      constraint session_replication_role_is_not_replica check (pg_catalog.current_setting('session_replication_role') <> 'replica');
    revoke usage on type pgque.sink_queue from public;
  end if;
  create or replace view pgque.sink as
    select null::pgque.sink_queue as queue, null::text as type, null::text as payload, null::text as headers, null::bytea as payload_bytes,
      null::text as partition_key, null::text as sink_id, null::bigint as epoch, null::int as part, null::int as parts,
      null::text as key, null::text as delay, null::timestamptz as deliver_at, null::text as ttl
    where false;
  create or replace view pgque.sink_bulk as
    select null::pgque.sink_queue as queue, null::text as type, null::text as payload, null::text as headers
    where false;
end
$$;
comment on view pgque.sink is
  'Sends one message for each row that INSERT or COPY puts into it. Columns: queue, type (NULL: default), payload or payload_bytes, headers (text of '
  'a JSON object), partition_key; key, delay, deliver_at, ttl as in send(). delay and ttl are texts of intervals; a number is seconds. With sink_id, '
  'epoch and part, rows of a part are left out if another transaction has already written that part of the epoch. parts, if given, must be the same '
  'each time. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 invalid option, or epoch, part or parts without sink_id; PQ013 the queue '
  'is paused; PQ016 the epoch is older than the sink''s newest or was written with other parts, or a part comes in more than one transaction; 23514 '
  'under session_replication_role = replica, where the view cannot send.';
comment on view pgque.sink_bulk is
  'Sends one plain message for each row that INSERT or COPY puts into it, by a rewrite rule: about twice as fast as pgque.sink. Columns: queue, type '
  '(NULL: default), payload, headers (text of a JSON object).';

-- Returns the table for a message of this queue, for a statement that found the queue
-- closed or not at all.  Raises PQ001 or PQ013, or repairs a queue that came out of a
-- dump.  A queue that was created after the statement began does not exist for it yet.
create or replace function pgque._open_slot(p_queue text, p_seen boolean) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  if not p_seen then
    perform pgque._no_queue(p_queue);
  end if;
  perform pgque._need_open(p_queue);
  return (select q.queue_id * 3 + q.queue_cur_table from pgque.queue q where q.queue_name = p_queue);
end
$$;

-- Returns whether a queue with max_depth has room for one more row of a statement;
-- PQ003 if not.  A random number stands for the statement.  The id up to which there is
-- room is computed once, and again when other sessions have used these ids.
create or replace function pgque._sink_room(p_queue_id int, p_statement uuid) returns boolean
language plpgsql strict security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_name   text := 'pgque.room_' || p_queue_id;
  v_known  text := current_setting(v_name, true);
  v_queue  pgque.queue;
  v_last   bigint;
begin
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  if not found then
    return false;
  end if;
  v_last := coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0);
  if (starts_with(v_known, p_statement::text) and v_last < substr(v_known, 37)::bigint) is not true then
    perform set_config(v_name, p_statement::text || (v_last + pgque._room_left(v_queue, 1)), true);
  end if;
  return true;
end
$$;

-- The rule has no condition: with one, the server would run the source of the rows
-- twice.  Each column of a row is named once, since an expression in VALUES replaces
-- its name, and would run as often as it is named.
-- The lookup is lateral, so that rows keep their order.  It is cached for the rows of
-- one queue, so the limit is checked outside of it.  A row without an open queue is
-- left to _open_slot(), or it would be lost silently.  The functions run with the
-- rights of the inserting role.  The transaction has its id before it draws that of a
-- message, see _span_xids().
create or replace rule sink_bulk_send as on insert to pgque.sink_bulk do instead
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_headers, ev_expires)
  select coalesce(case when q.limited is null or pgque._sink_room(q.limited, (select pg_catalog.gen_random_uuid())) then q.slot end,
      pgque._open_slot(n.queue, q.event_seq is not null)),
    case when pg_catalog.pg_current_xact_id() is not null then pg_catalog.nextval(q.event_seq) end, pgque.clock(), pg_catalog.pg_current_xact_id(),
    coalesce(n.type, 'default'), n.payload, pgque._headers(n.queue, n.headers), q.ends
  from (select new.queue, new.type, new.payload, new.headers offset 0) n
  left join lateral (
    select case when q.queue_open then q.queue_id * 3 + q.queue_cur_table end as slot, q.queue_event_seq as event_seq,
      case when q.queue_max_depth > 0 then q.queue_id end as limited,
      case when q.queue_message_ttl > '0' then pgque.clock() + q.queue_message_ttl end as ends
    from pgque.queue q
    where q.queue_name = n.queue
    offset 0
  ) q on true;

-- COPY ignores rules and fires triggers.
create or replace function pgque._sink_bulk_row() returns trigger
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._send(new.queue, coalesce(new.type, 'default'), new.payload, null, null, null, null, pgque._headers(new.queue, new.headers), null);
  return new;
end
$$;

-- Returns a text of a sink as an interval, or raises PQ005.
create or replace function pgque._sink_interval(p_queue text, p_column text, p_text text) returns interval
language plpgsql strict stable set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return p_text::interval;
exception
  when data_exception then
    perform pgque._fail('PQ005', format('the %s of a message for queue %I is not an interval', p_column, p_queue),
      'Pass an interval such as 30 (seconds) or ''1 hour 30 minutes''.', left(p_text, 200));
end
$$;

-- Sends one row of sink, unless it belongs to a part of an epoch that another
-- transaction wrote.  Rows with options are rare.  Others are stored here, which is
-- faster.  A row without an open queue with room is left to _send().
create or replace function pgque._sink_row() returns trigger
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_txid  xid8 := pg_current_xact_id();
begin
  if num_nonnulls(new.sink_id, new.epoch, new.part, new.parts, new.payload_bytes, new.key, new.delay, new.deliver_at, new.ttl) > 0 then
    if new.sink_id is not null then
      if not pgque._claim_part(new.sink_id, new.epoch, new.part, new.parts) then
        return null;
      end if;
    elsif num_nonnulls(new.epoch, new.part, new.parts) > 0 then
      -- Without the name of its sink a replay would be sent twice.
      perform pgque._fail('PQ005', format('epoch %s, part %s for queue %s has no sink_id', coalesce(new.epoch::text, 'null'),
          coalesce(new.part::text, 'null'), coalesce(quote_ident(new.queue), 'null')),
        'Set sink_id too. For messages that are not replayed, leave out sink_id, epoch, part and parts.');
    end if;
    if new.payload is not null and new.payload_bytes is not null then
      perform pgque._send(new.queue, new.type, new.payload, null, null, null, null, null, new.payload_bytes);
    end if;
    if num_nonnulls(new.key, new.delay, new.deliver_at, new.ttl) > 0 then
      perform pgque._send_as(new.queue, coalesce(new.type, 'default'), new.payload, new.payload_bytes, pgque._headers(new.queue, new.headers),
        new.key, pgque._sink_interval(new.queue, 'delay', new.delay), new.deliver_at, pgque._sink_interval(new.queue, 'ttl', new.ttl),
        new.partition_key);
      return new;
    end if;
  end if;
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_headers, ev_bytes, ev_expires)
  select q.queue_id * 3 + q.queue_cur_table, nextval(q.queue_event_seq), pgque.clock(), v_txid, coalesce(new.type, 'default'),
    new.payload, new.partition_key, pgque._headers(new.queue, new.headers), new.payload_bytes,
    pgque._expires(q)
  from pgque.queue q
  where q.queue_name = new.queue and q.queue_open and (q.queue_max_depth = 0 or pgque._room(q, 1));
  if not found then
    perform pgque._send(new.queue, coalesce(new.type, 'default'), new.payload, new.partition_key, null, null, null,
      pgque._headers(new.queue, new.headers), new.payload_bytes);
  end if;
  return new;
end
$$;

create or replace trigger sink_row instead of insert on pgque.sink
  for each row execute function pgque._sink_row();
create or replace trigger sink_bulk_row instead of insert on pgque.sink_bulk
  for each row execute function pgque._sink_bulk_row();

-- Refuses an epoch with PQ016.
create or replace function pgque._refuse_epoch(p_sink text, p_epoch bigint, p_why text, p_hint text) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ016', pg_catalog.format('epoch %s of sink %s: %s', coalesce(p_epoch::text, 'null'), coalesce(pg_catalog.quote_ident(p_sink), 'null'), p_why),
    p_hint);
end
$$;

-- Checks the name of an epoch and refuses one that is older than the sink's newest: it
-- is no replay, whose rows may be left out.
create or replace function pgque._check_epoch(p_sink text, p_epoch bigint) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_newest  bigint;
begin
  if coalesce(p_sink, '') = '' or pg_catalog.octet_length(p_sink) > 200 or p_sink ~ '[[:cntrl:]]' or p_epoch < 0 then
    perform pgque._fail('PQ005', pg_catalog.format('sink_id %L, epoch %s do not name an epoch', pg_catalog.left(p_sink, 200), coalesce(p_epoch::text, 'null')),
      'Pass a sink_id of 1 to 200 printable characters, and an epoch from 0.');
  end if;
  v_newest := (select max(e.epoch) from pgque.sink_epoch e where e.sink_id = p_sink);
  if v_newest > p_epoch then
    perform pgque._refuse_epoch(p_sink, p_epoch, pg_catalog.format('it is older than the newest epoch %s', v_newest),
      'Give the new query another sink_id. Epochs start from 0 again when a checkpoint is deleted.');
  end if;
end
$$;

-- Locks a part of an epoch until the transaction ends; the whole and its list of
-- servers have one lock.
create or replace function pgque._lock_epoch(p_sink text, p_epoch bigint, p_part int) returns void
language plpgsql as $$
begin
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.sink'),
    pg_catalog.hashtext(pg_catalog.concat_ws(' ', p_epoch, greatest(p_part, -1), p_sink)));
end
$$;

-- Stores a part of an epoch if it is not stored yet, and returns the stored row.  Part
-- -1 is the whole epoch, part -2 the list of servers that it is spread over.  Sessions
-- that store the same part wait for each other.  A snapshot that is older than the
-- stored row gets 40001, in whichever leaf the row is.
create or replace function pgque._claim_epoch(
  p_sink text, p_epoch bigint, p_part int, p_parts int, p_once boolean, p_servers text[] default null, out claim pgque.sink_epoch, out is_new boolean
)
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_leaf          int;
  v_other         text;
begin
  if not p_once then
    perform pgque._lock_epoch(p_sink, p_epoch, p_part);
  end if;
  -- Takes the share lock of an old snapshot: 40001 if the leaves rotated since, and
  -- older epochs may have been deleted.
  perform pgque._journal_leaf();
  perform pgque._check_epoch(p_sink, p_epoch);
  select case when e.part = -1 or p_part = -1 then 'in another way' else pg_catalog.format('with %s parts and comes with %s',
    coalesce(e.parts::text, 'any number of'), coalesce(p_parts::text, 'any number')) end
  into v_other
  from pgque.sink_epoch e
  where e.sink_id = p_sink and e.epoch = p_epoch and p_part > -2 and e.part > -2 and (e.parts is distinct from p_parts or (e.part = -1) <> (p_part = -1))
  limit 1;
  if found then
    perform pgque._refuse_epoch(p_sink, p_epoch, 'it was written ' || v_other,
      'Call repartition() before the write, since a replay must have the partitions of the first run. Or use format("pgque"), which works with any partitions.');
  end if;
  select e.* into claim
  from pgque.sink_epoch e
  where e.sink_id = p_sink and e.epoch = p_epoch and e.part = p_part;
  is_new := not found;
  if not is_new then
    return;
  end if;
  v_leaf := coalesce((select j.journal_epoch_cur from pgque.journal j), 0);
  with new as (
    insert into pgque.sink_epoch (sink_id, epoch, part, parts, once, servers, servers_by, leaf)
    select p_sink, p_epoch, p_part, p_parts, p_once, p_servers, case when p_part = -2 then session_user end, l.leaf from pg_catalog.unnest(pgque._leaves_for(v_leaf)) l (leaf)
    on conflict do nothing
    returning *
  )
  select n.* into claim from new n limit 1;
end
$$;

-- Returns whether this transaction writes this part of an epoch.  The first transaction
-- that claims a part writes all of it, and the others leave out all of it.  The parts
-- that a session wrote or left out are kept in a setting, one line each and the newest
-- first: the part, the transaction's id, whether it writes.  If a session has rows of
-- one part in two transactions, it commits after every statement, and the part could be
-- incomplete: so it is refused.  A transaction that ended with ROLLBACK PREPARED does not
-- count: the setting is not rolled back with it.
create or replace function pgque._claim_part(p_sink text, p_epoch bigint, p_part int, p_parts int) returns boolean
language plpgsql as $$
declare
  v_part     text := pg_catalog.concat(e'\n', p_epoch, ' ', p_part, ' ', p_sink, e'\t');
  v_line     text := v_part || pg_catalog.pg_current_xact_id()::text;
  v_touched  text := coalesce(pg_catalog.current_setting('pgque.sink_parts', true), '');
  v_claim    pgque.sink_epoch;
  v_writes   boolean;
  v_xid      text;
begin
  if pg_catalog.starts_with(v_touched, v_line || '+') then
    return true;
  elsif pg_catalog.starts_with(v_touched, v_line || '-') then
    return false;
  elsif (p_epoch >= 0 and p_part >= 0 and (p_parts is null or p_part < p_parts)) is not true then
    perform pgque._fail('PQ005', pg_catalog.format('sink_id %L, epoch %s, part %s of %s do not name a part of an epoch', pg_catalog.left(p_sink, 200),
        coalesce(p_epoch::text, 'null'), coalesce(p_part::text, 'null'), coalesce(p_parts::text, 'any number')),
      'Pass epoch and part from 0. parts, if given, is the number of parts.');
  end if;
  v_claim := (pgque._claim_epoch(p_sink, p_epoch, p_part, p_parts, false)).claim;
  -- A row that came out of a dump may name the same transaction, but another session.
  v_writes := (v_claim.txid = pg_catalog.pg_current_xact_id() and v_claim.session = pgque._session()) is true;
  v_xid := pg_catalog.substring(pg_catalog.split_part(v_touched, v_part, 2), '^([0-9]{1,19})[+-]');
  if not v_writes and v_claim.session = pgque._session()
    or pg_catalog.strpos(v_touched, v_part) > 0 and pg_catalog.strpos(v_touched, v_line) = 0
      and pg_catalog.pg_xact_status(v_xid::xid8) is distinct from 'aborted'
  then
    perform pgque._refuse_epoch(p_sink, p_epoch, pg_catalog.format('part %s comes in more than one transaction', p_part),
      'Write each part in one transaction: with JDBC, any isolationLevel but NONE.');
  end if;
  perform pg_catalog.set_config('pgque.sink_parts',
    v_line || case when v_writes then '+' else '-' end || pg_catalog.left(v_touched, 10000), false);
  return v_writes;
end
$$;

-- Returns the leaf that takes staged rows.
create or replace function pgque._sink_leaf() returns int
language sql stable as $$ select s.last_value::int from pgque.sink_leaf s $$;

create or replace function pgque.sink_begin(sink_id text, epoch bigint, out attempt uuid, out stage text)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_leaf  int := pgque._sink_leaf();
begin
  perform pgque._check_epoch($1, $2);
  attempt := gen_random_uuid();
  stage := 'pgque.sink_stage_' || v_leaf;
  insert into pgque.sink_attempt (attempt, sink_id, epoch, started_at, leaf) select attempt, $1, $2, pgque.clock(), v_leaf;
end
$$;
comment on function pgque.sink_begin(text, bigint) is
  'Begins an attempt to write a share of an epoch, and returns attempt and stage. COPY the messages into the table that stage names, with this '
  'attempt and n = 0, 1, 2, ... in the order of sending; sink_commit() sends them. Columns: those of pgque.sink without sink_id, epoch, part and '
  'parts. delay and ttl count from sink_commit(). A row may hold several messages, which costs less: rows is their number, and queues (NULL '
  'elements: queue), types, payloads or all_bytes, all_headers, partition_keys, keys, delays, deliver_ats and ttls are arrays of this length. epoch '
  'NULL: a write that is never repeated. Errors: PQ005 invalid sink_id or epoch; PQ016 the epoch is older than the sink''s newest.';

-- Returns the attempts of both leaves.
create or replace function pgque._attempts() returns setof pgque.sink_attempt
language sql stable as $$
  select distinct on (a.attempt) a.* from pgque.sink_attempt a
$$;

-- Returns the messages that attempts staged, in their order: by the attempts, n and i.
-- Rows that were staged for another epoch are left out.
create or replace function pgque._messages(p_sink text, p_epoch bigint, p_attempts uuid[])
returns table (place bigint, n int, i bigint, queue text, type text, payload text, headers jsonb, payload_bytes bytea, partition_key text, key text,
  delay text, deliver_at timestamptz, ttl text)
language sql stable as $$
  select a.n, s.n, m.i, m.queue, m.type, m.payload, m.headers, m.payload_bytes, m.partition_key, m.key, m.delay, m.deliver_at, m.ttl
  from (
    select u.attempt, min(u.n) as n
    from pg_catalog.unnest(p_attempts) with ordinality u (attempt, n)
    where exists (select from pgque._attempts() a where a.attempt = u.attempt and a.sink_id = p_sink and a.epoch is not distinct from p_epoch)
    group by u.attempt
    order by 2
    offset 0
  ) a
  cross join lateral (
    select * from pgque.sink_stage s where s.attempt = a.attempt order by s.n
  ) s
  cross join lateral (
    select u.i, coalesce(u.queue, s.queue) as queue, coalesce(u.type, 'default') as type, u.payload, u.headers::jsonb as headers, u.payload_bytes,
      u.partition_key, u.key, u.delay, u.deliver_at, u.ttl
    from (
      -- Faster than a function in FROM, which stores its rows first.
      select pg_catalog.generate_series(1::bigint, s.rows) as i, pg_catalog.unnest(s.queues) as queue, pg_catalog.unnest(s.types) as type,
        pg_catalog.unnest(s.payloads) as payload, pg_catalog.unnest(s.all_headers) as headers, pg_catalog.unnest(s.all_bytes) as payload_bytes,
        pg_catalog.unnest(s.partition_keys) as partition_key, pg_catalog.unnest(s.keys) as key, pg_catalog.unnest(s.delays) as delay,
        pg_catalog.unnest(s.deliver_ats) as deliver_at, pg_catalog.unnest(s.ttls) as ttl
      where s.rows is not null
    ) u
    union all
    select 0, s.queue, coalesce(s.type, 'default'), s.payload, s.headers, s.payload_bytes, s.partition_key, s.key, s.delay, s.deliver_at, s.ttl
    where s.rows is null
  ) m
$$;

-- Returns staged messages, each with its number in the epoch, in pieces that arrays can
-- hold: of 1,000 messages, and of 16 MB or one message more.
create or replace function pgque._staged(p_sink text, p_epoch bigint, p_attempts uuid[])
returns table (at bigint, piece bigint[], queue text, type text, payload text, headers jsonb, payload_bytes bytea, partition_key text, key text, delay text,
  deliver_at timestamptz, ttl text)
language sql stable as $$
  select pg_catalog.row_number() over w,
    array[pg_catalog.row_number() over w / 1000,
      pg_catalog.sum(coalesce(pg_catalog.octet_length(m.payload), pg_catalog.octet_length(m.payload_bytes), 0)
        + coalesce(pg_catalog.octet_length(m.headers::text), 0)) over w / 16777216],
    m.queue, m.type, m.payload, m.headers, m.payload_bytes, m.partition_key, m.key, m.delay, m.deliver_at, m.ttl
  from pgque._messages(p_sink, p_epoch, p_attempts) m
  window w as (order by m.place, m.n, m.i)
$$;

-- Sends staged rows of which some have options, as send_batch() does.  All keys
-- are locked before the first row, so that two epochs cannot wait for each other.
create or replace function pgque._send_staged(p_sink text, p_epoch bigint, p_attempts uuid[]) returns bigint
language plpgsql as $$
declare
  v_rows   record;
  v_count  bigint := 0;
begin
  perform pgque._lock_keys(k.queue_id, k.keys)
  from (
    select q.queue_id, pg_catalog.array_agg(distinct s.key) as keys
    from pgque._staged(p_sink, p_epoch, p_attempts) s
    join pgque.queue q on q.queue_name = s.queue
    where s.key is not null
    group by q.queue_id
    order by q.queue_id
  ) k;
  for v_rows in
    select s.queue, pg_catalog.array_agg(s.type order by s.at) as types, pg_catalog.array_agg(s.payload order by s.at) as data,
      pg_catalog.array_agg(s.payload_bytes order by s.at) as bytes, pg_catalog.array_agg(s.headers order by s.at) as headers,
      pg_catalog.array_agg(s.key order by s.at) as keys, pg_catalog.array_agg(pgque._sink_interval(s.queue, 'delay', s.delay) order by s.at) as delays,
      pg_catalog.array_agg(s.deliver_at order by s.at) as deliver_ats,
      pg_catalog.array_agg(pgque._sink_interval(s.queue, 'ttl', s.ttl) order by s.at) as ttls,
      pg_catalog.array_agg(s.partition_key order by s.at) as partition_keys
    from pgque._staged(p_sink, p_epoch, p_attempts) s
    group by s.queue, s.piece
    order by s.queue, s.piece
  loop
    perform pgque._send_rows(pgque._queue(v_rows.queue), v_rows.types, v_rows.data, v_rows.bytes, v_rows.headers, v_rows.keys, v_rows.delays,
      v_rows.deliver_ats, v_rows.ttls, v_rows.partition_keys);
    v_count := v_count + pg_catalog.cardinality(v_rows.types);
  end loop;
  return v_count;
end
$$;

-- The servers that an epoch is spread over; null if it is not.
create or replace function pgque._epoch_servers(p_sink text, p_epoch bigint) returns text[]
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return (select e.servers from pgque.sink_epoch e where e.sink_id = p_sink and e.epoch = p_epoch and e.part = -2 limit 1);
end
$$;

create or replace function pgque.sink_servers(sink_id text, epoch bigint, servers text[]) returns text[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_claim  pgque.sink_epoch;
begin
  perform pgque._need_read_committed('sink_servers');
  if $2 is null or coalesce(cardinality($3), 0) = 0 or cardinality($3) <> (select count(distinct s.name) from unnest($3) s (name)) then
    perform pgque._fail('PQ005', format('sink_servers of sink %L needs an epoch and a list of different servers', left($1, 200)),
      'select pgque.sink_servers(''nightly'', 7, array[''db1:5432/app'', ''db2:5432/app'']);');
  end if;
  perform pgque._lock_epoch($1, $2, -2);
  if pgque._epoch_servers($1, $2) is null and exists (select from pgque.sink_epoch e where e.sink_id = $1 and e.epoch = $2) then
    return '{}';
  end if;
  v_claim := (pgque._claim_epoch($1, $2, -2, null, false, $3)).claim;
  -- The caller connects to these servers with its password, and writes to them.
  if v_claim.servers_by <> session_user then
    perform pgque._refuse_epoch($1, $2, format('its list of servers was stored by role %I, and is not for role %I', v_claim.servers_by, session_user),
      'Repeat it as the role that began it, or give the new query another sink_id.');
  end if;
  return v_claim.servers;
end
$$;
comment on function pgque.sink_servers(text, bigint, text[]) is
  'Stores the list of servers that an epoch is spread over, and returns the list that the first call stored. Call it with one list on each server of '
  'the list, in the order of their names, before anything is committed; if a server returns another list, begin again with that list. An empty list '
  'is returned if this epoch was committed without a list: then the whole epoch is on this server. Errors: PQ005 no epoch, an empty list, or a '
  'server twice; PQ016 the epoch is older than the sink''s newest, or another role stored its list; 25000 not READ COMMITTED.';

create or replace function pgque.sink_commit(sink_id text, epoch bigint, attempts uuid[], row_count bigint, servers text[] default null) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_txid     xid8 := pg_current_xact_id();
  v_new      bigint;
  v_all      bigint := 1;
  v_count    bigint;
  v_options  boolean;
begin
  perform pgque._need_read_committed('sink_commit');
  perform pgque._check_epoch($1, $2);
  if $2 is not null then
    v_new := (pgque._claim_epoch($1, $2, -1, null, false)).is_new::int;
    if pgque._epoch_servers($1, $2) is distinct from $5 then
      perform pgque._refuse_epoch($1, $2, format('it is spread over %s, not over %s',
          coalesce('the servers ' || array_to_string(pgque._epoch_servers($1, $2), ', '), 'this server alone'),
          coalesce('the servers ' || array_to_string($5, ', '), 'this server alone')),
        'Repeat it as it was begun: a stream of Spark keeps option servers until its micro-batch is complete.');
    end if;
  else
    -- Each attempt counts once.
    perform pg_advisory_xact_lock(hashtext('pgque.sink'), hashtext($1));
    select count(*), count(*) filter (where c.is_new) into v_all, v_new
    from (select distinct unnest($3) as id order by 1) a
    cross join lateral pgque._claim_epoch(a.id::text, 0, -1, null, true) c;
  end if;
  if v_new = 0 and v_all > 0 then
    return 'duplicate';
  end if;
  -- Compaction moves rows from leaf to leaf.
  lock table pgque.sink_attempt, pgque.sink_stage in access share mode;
  -- Before anything is stored: so repeated calls for a full queue cost little.
  perform pgque._room(q, s.count)
  from (
    select m.queue, sum(m.count)::bigint as count
    from pgque.sink_stage s
    cross join lateral (
      select coalesce(u.queue, s.queue) as queue, count(*) as count
      from unnest(s.queues, s.keys) u (queue, key)
      where u.key is null
      group by 1
      union all
      select s.queue, coalesce(s.rows, 1) where num_nonnulls(s.queues, s.keys, s.key) = 0
    ) m
    where s.attempt = any ($3) and exists (select from pgque.queue q where q.queue_max_depth > 0)
    group by m.queue
  ) s
  join pgque.queue q on q.queue_name = s.queue
  where q.queue_max_depth > 0 and q.queue_open;
  v_options := exists (
    select from pgque.sink_stage s
    where s.attempt = any ($3) and num_nonnulls(s.key, s.delay, s.deliver_at, s.ttl, s.keys, s.delays, s.deliver_ats, s.ttls) > 0);
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_headers, ev_bytes, ev_expires)
  select coalesce(q.slot, pgque._open_slot(m.queue, q.event_seq is not null)), nextval(q.event_seq), pgque.clock(), v_txid,
    m.type, m.payload, m.partition_key, m.headers, m.payload_bytes, q.ends
  from pgque._messages($1, $2, $3) m
  -- With this detour the planner caches the lookup for the rows of one queue.
  cross join lateral (select m.queue offset 0) n
  left join lateral (
    select case when q.queue_open then q.queue_id * 3 + q.queue_cur_table end as slot, q.queue_event_seq as event_seq,
      pgque._expires(q) as ends
    from pgque.queue q
    where q.queue_name = n.queue
    offset 0
  ) q on true
  where v_new = v_all and not v_options;
  get diagnostics v_count = row_count;
  if v_new = v_all and v_options then
    v_count := pgque._send_staged($1, $2, $3);
  end if;
  if v_count is distinct from $4 then
    perform pgque._refuse_epoch($1, $2, format('%s rows are staged, not %s', v_count, coalesce($4::text, 'null')),
      'Write the epoch again. Nothing was sent. Staged rows are kept for a day.');
  end if;
  return 'applied';
end
$$;
comment on function pgque.sink_commit(text, bigint, uuid[], bigint, text[]) is
  'Sends the messages that these attempts staged, in one transaction and so in one tick. Returns applied, or duplicate if the sink committed this '
  'epoch before; then nothing is sent. row_count: the number of messages that must be staged. servers: the list that sink_servers() returned, if the '
  'epoch is spread over several servers. Attempts of the epoch that are not named are invalid afterwards. Staged rows are kept for a day, also '
  'through a crash of the server. Errors: PQ001 no such queue; PQ003 a queue is full; PQ013 a queue is paused; PQ005 invalid option, or more '
  'messages than max_depth of a queue; PQ016 rows are missing, the epoch is older than the sink''s newest, or servers is not the stored list; 25000 '
  'not READ COMMITTED.';

-- Returns the attempts that may still be committed.
create or replace function pgque._live_attempts() returns setof pgque.sink_attempt
language sql stable as $$
  select a.*
  from pgque._attempts() a
  where a.started_at > pgque.clock() - interval '1 day'
    and not exists (
      select
      from pgque.sink_epoch e
      where e.part = -1 and e.epoch >= coalesce(a.epoch, 0)
        and e.sink_id = case when a.epoch is null then a.attempt::text else a.sink_id end)
$$;

-- Deletes staged rows.  The other leaf is emptied under its lock, if that is free,
-- after the rows that may still be committed were copied to the current one.  The
-- leaves rotate when the current one is large, or has had nothing to keep for a minute.
create or replace function pgque._compact_stage() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_cur   int := pgque._sink_leaf();
  v_live  bigint;
  v_all   bigint;
  v_last  timestamptz;
begin
  if pg_relation_size('pgque.sink_stage_' || (1 - v_cur)) + pg_relation_size('pgque.sink_attempt_' || (1 - v_cur)) > 0 then
    execute format('lock table pgque.sink_attempt_%1$s, pgque.sink_stage_%1$s in access exclusive mode nowait', 1 - v_cur);
    insert into pgque.sink_attempt (attempt, sink_id, epoch, started_at, leaf)
    select a.attempt, a.sink_id, a.epoch, a.started_at, v_cur from pgque._live_attempts() a
    on conflict do nothing;
    insert into pgque.sink_stage (attempt, n, queue, type, payload, headers, payload_bytes, partition_key, key, delay, deliver_at, ttl,
      rows, queues, types, payloads, all_headers, all_bytes, partition_keys, keys, delays, deliver_ats, ttls, leaf)
    select s.attempt, s.n, s.queue, s.type, s.payload, s.headers, s.payload_bytes, s.partition_key, s.key, s.delay, s.deliver_at, s.ttl,
      s.rows, s.queues, s.types, s.payloads, s.all_headers, s.all_bytes, s.partition_keys, s.keys, s.delays, s.deliver_ats, s.ttls, v_cur
    from pgque.sink_stage s
    join pgque._live_attempts() a on a.attempt = s.attempt
    where s.leaf = 1 - v_cur
    on conflict do nothing;
    execute format('truncate pgque.sink_attempt_%1$s, pgque.sink_stage_%1$s', 1 - v_cur);
    return 1;
  end if;
  execute format('select count(*), count(l.attempt), max(a.started_at) from pgque.sink_attempt_%s a left join pgque._live_attempts() l using (attempt)', v_cur)
  into v_all, v_live, v_last;
  if (v_live = 0 and v_last < pgque.clock() - interval '1 minute')
    or (v_all >= 2 * v_live and pg_relation_size('pgque.sink_stage_' || v_cur) > case when v_all > 0 then 67108864 else 0 end)
  then
    perform setval('pgque.sink_leaf', 1 - v_cur);
    return 1;
  end if;
  return 0;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Returns how long a committed epoch is kept.
create or replace function pgque._epoch_life(p_once boolean) returns interval
language sql immutable as $$ select case when p_once then interval '2 days' else interval '1 year' end $$;

-- Deletes committed epochs by emptying the other leaf, as _compact_stage() does for
-- staged rows.  The newest epoch of each sink is kept.  The leaves rotate when the
-- current one has more than 4 MB and half of its rows can be deleted, if need be in the
-- same call, as in _compact_journal().
create or replace function pgque._compact_epochs() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_cur   int := (select j.journal_epoch_cur from pgque.journal j);
  v_size  bigint := pg_relation_size('pgque.sink_epoch_' || v_cur);
  v_due   boolean := false;
begin
  if v_size > 4194304 then
    execute format(
      'select count(*) filter (where e.epoch < e.newest or e.committed_at <= pgque.clock() - pgque._epoch_life(e.once)) * 2 >= count(*)'
      ' from (select e.*, max(e.epoch) over (partition by e.sink_id) as newest from pgque.sink_epoch_%s e) e', v_cur)
    into v_due;
  end if;
  if not v_due and pg_relation_size('pgque.sink_epoch_' || (1 - v_cur)) = 0 or not pgque._lock_journal(v_size) then
    return 0;
  end if;
  if (select j.journal_epoch_cur from pgque.journal j) <> v_cur then
    return 0;
  end if;
  if pg_relation_size('pgque.sink_epoch_' || (1 - v_cur)) > 0 then
    execute format('lock table pgque.sink_epoch_%s in access exclusive mode nowait', 1 - v_cur);
    insert into pgque.sink_epoch (sink_id, epoch, part, parts, txid, session, once, committed_at, servers, servers_by, leaf)
    select o.sink_id, o.epoch, o.part, o.parts, o.txid, o.session, o.once, o.committed_at, o.servers, o.servers_by, v_cur
    from pgque.sink_epoch o
    where o.leaf = 1 - v_cur and o.committed_at > pgque.clock() - pgque._epoch_life(o.once)
      and o.epoch >= (select max(e.epoch) from pgque.sink_epoch e where e.sink_id = o.sink_id)
    on conflict do nothing;
    execute format('truncate pgque.sink_epoch_%s', 1 - v_cur);
  end if;
  -- After either step a transaction with an old snapshot could miss an epoch: the
  -- update of this row stops it.
  update pgque.journal j set journal_epoch_cur = case when v_due then 1 - v_cur else v_cur end;
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;
-- ---------------------------------------------------------------------------
-- read: windows without side effects, for Spark and others that keep offsets
-- ---------------------------------------------------------------------------

-- A tick id says nothing without the queue that it is of.  A queue that is dropped and
-- created again begins with tick 1.  Two copies of a queue, restored from one dump, have
-- one queue_uid and then ticks of their own with equal ids.  So a reader that keeps tick
-- ids outside of the database keeps the incarnation beside them, and each function below
-- compares it, in the statement that uses the tick: the queue may be dropped and created
-- between two calls.
create or replace function pgque._incarnation(p_queue pgque.queue) returns uuid
language sql immutable as $$ select coalesce(p_queue.queue_incarnation, p_queue.queue_uid) $$;

-- Returns the queue, or raises PQ015 if it is another incarnation than the caller's.
-- Null is not compared: callers of earlier versions keep no incarnation.
create or replace function pgque._need_incarnation(p_queue pgque.queue, p_incarnation uuid) returns pgque.queue
language plpgsql as $$
begin
  if p_incarnation <> pgque._incarnation(p_queue) then
    perform pgque._fail('PQ015', pg_catalog.format('queue %I was created again or loaded from a dump, and its ticks begin anew', p_queue.queue_name),
      'Begin again where the consumer stands (Spark: with a new checkpoint): the stored tick is of the former queue.',
      pg_catalog.format('The tick is of incarnation %s, and the queue is incarnation %s.', p_incarnation, pgque._incarnation(p_queue)));
  end if;
  return p_queue;
end
$$;

create or replace function pgque.queue_incarnation(queue_name text, caller pgque.caller default current_user) returns uuid
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
begin
  if v_queue.queue_restored and current_setting('transaction_read_only') = 'off' then
    -- Otherwise the next tick would change what this call returns.
    perform pgque._rebase(v_queue.queue_id);
    v_queue := pgque._queue($1, caller, 'consume');
  end if;
  return pgque._incarnation(v_queue);
end
$$;
comment on function pgque.queue_incarnation(text, pgque.caller) is
  'Returns the identity of the queue that its tick ids belong to. Store it beside every tick id that you keep outside of the database, and pass both: if the '
  'queue was dropped and created again since, or loaded from a dump, its ticks began anew, and the call fails instead of reading other messages. rename_queue() and upgrades keep the '
  'incarnation. So do copies of a whole database (create database … template) or server: each continues with the same ids, so read a copy from its own checkpoints. A queue '
  'that was loaded from a dump is repaired first. Errors: PQ001 no such queue; 25000 in a REPEATABLE READ or SERIALIZABLE transaction, if the queue is to be repaired.';

-- Refuses a tick that is newer than all of the queue with PQ015.
create or replace function pgque._not_future_tick(p_queue pgque.queue, p_tick_id bigint) returns void
language plpgsql as $$
declare
  v_last  bigint := (pgque._last_tick(p_queue)).tick_id;
begin
  if p_tick_id > v_last then
    perform pgque._fail('PQ015', pg_catalog.format('tick not found: %s of queue %I, whose newest tick is %s', p_tick_id, p_queue.queue_name, v_last),
      'Begin again where the consumer stands (Spark: with a new checkpoint): the tick is of a queue that was dropped, or of a later state than the one that was '
      'restored. A standby may lag: repeat the call there, or ask the primary.');
  end if;
end
$$;

-- Returns a stored tick, or raises PQ015.
create or replace function pgque._need_tick(p_queue pgque.queue, p_tick_id bigint) returns pgque.tick
language plpgsql as $$
declare
  v_tick  pgque.tick := pgque._tick(p_queue.queue_id, p_tick_id);
  v_last  bigint;
begin
  if v_tick.tick_id is null then
    perform pgque._not_future_tick(p_queue, p_tick_id);
    v_last := (pgque._last_tick(p_queue)).tick_id;
    perform pgque._fail('PQ015', pg_catalog.format('tick not found: %s of queue %I; it has ', coalesce(p_tick_id::text, 'null'), p_queue.queue_name)
        -- A snapshot from before all its tables were emptied
        || case when v_last is null then 'none that this transaction sees' else pg_catalog.format('ticks %s to %s', (pgque._find_tick(p_queue, 'earliest')).tick_id, v_last) end,
      'Start at a later tick. To keep ticks and events until you have read them, subscribe a consumer: rotation deletes those that all consumers have passed.');
  end if;
  return v_tick;
end
$$;

create or replace function pgque.tick_for(queue_name text, start_at text, incarnation uuid default null, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
begin
  if $2 ~ '^[0-9]{1,19}$' and $2::numeric <= 9223372036854775807 then
    return (pgque._need_tick(v_queue, $2::bigint)).tick_id;
  end if;
  return (pgque._find_tick(v_queue, $2)).tick_id;
end
$$;
comment on function pgque.tick_for(text, text, uuid, pgque.caller) is
  'Returns the id of a tick. start_at: earliest, latest, an id, or a timestamp (the last tick before it). incarnation: see queue_incarnation(). Errors: PQ001 no '
  'such queue; PQ005 no such start_at; PQ015 the tick is not stored, or the queue is another incarnation.';

create or replace function pgque.next_tick(
  queue_name text, after_tick bigint, max_events bigint default null, max_ticks int default null, upto bigint default null, incarnation uuid default null,
  caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_after  pgque.tick;
  v_tick   pgque.tick;
  v_last   bigint;
  v_next   bigint;
begin
  if least($3, $4) < 1 then
    perform pgque._fail('PQ005', format('max_events and max_ticks must be at least 1, for queue %I', v_queue.queue_name),
      'Leave them out, or pass null, for no limit.');
  end if;
  v_after := pgque._need_tick(v_queue, $2);
  v_last := (pgque._last_tick(v_queue)).tick_id;
  if v_last <= $2 then
    return null;
  elsif coalesce($3, $4, $5) is null then
    return v_last;
  end if;
  for v_tick in
    execute format('select t.* from (%s) t where t.tick_id > $1 and t.tick_id <= $2 order by t.tick_id limit $3', pgque._ticks_sql(v_queue.queue_id))
    using $2, least(v_last, $5), $4
  loop
    exit when v_tick.tick_event_seq - v_after.tick_event_seq > $3 and v_next is not null;
    v_next := v_tick.tick_id;
  end loop;
  return v_next;
end
$$;
comment on function pgque.next_tick(text, bigint, bigint, int, bigint, uuid, pgque.caller) is
  'Returns the tick that ends the next piece of work after after_tick, or NULL if there is no further tick. The piece is whole ticks: at least '
  'one, at most max_ticks, none after upto, and as many as hold max_events events. One tick can hold more than max_events. incarnation: see queue_incarnation(). '
  'Errors: PQ001 no such queue; PQ005 a limit is below 1; PQ015 the tick is not stored, or the queue is another incarnation.';

create or replace function pgque.next_window(
  queue_name text, after_tick bigint, after_id bigint default null, max_events bigint default null, max_ticks int default null, upto bigint default null,
  consumer_name text default null, incarnation uuid default null, cut boolean default false, caller pgque.caller default current_user,
  out to_tick bigint, out upto_id bigint
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_max    bigint := case when v_queue.queue_max_window > 0 then least($4, v_queue.queue_max_window) end;
  v_from   pgque.tick;
  v_to     pgque.tick;
begin
  if $3 is null then
    to_tick := pgque.next_tick($1, $2, coalesce(v_max, $4), $5, $6, incarnation, caller);
  elsif $6 is null or least($4, $6 - $2) < 1 then
    perform pgque._fail('PQ005', format('next_window needs a limit of at least 1, and with after_id the tick that ends the window, for queue %I', v_queue.queue_name),
      'Pass what the call before returned: its upto_id as after_id, and its to_tick as upto.');
  else
    to_tick := (pgque._need_tick(v_queue, $6)).tick_id;
  end if;
  if to_tick is null or not cut and v_max is null then
    return;
  end if;
  v_from := pgque._need_tick(v_queue, $2);
  v_to := pgque._tick(v_queue.queue_id, to_tick);
  if v_max is null and v_to.tick_event_seq - v_from.tick_event_seq > 2 * $4 then
    v_max := $4;
  end if;
  if v_max is not null then
    upto_id := pgque._cut(v_queue.queue_id, pgque._part_of_window(v_from, v_to, $3, null), pgque._row_condition($1, $7, $3, null), v_max);
  end if;
end
$$;
comment on function pgque.next_window(text, bigint, bigint, bigint, int, bigint, text, uuid, boolean, pgque.caller) is
  'Returns where the next piece of work ends, for a reader that has read up to after_tick. to_tick: the tick that ends the piece; NULL if there is '
  'no further tick. upto_id: NULL for whole ticks. With a max_window of the queue, a piece has at most this number of events, and at most '
  'max_events. A larger window is cut: the piece has its ids up to upto_id, and the next call continues it with the same after_tick, this upto_id as '
  'after_id, and this to_tick as upto. cut: without max_window, a window is cut if it has more than twice max_events, as one tick may. Read a piece '
  'with read_window(queue_name, after_tick, to_tick, after_id => …, upto_id => …). It has more events only if several have its last id (bodies of a '
  'key). consumer_name: its retries count as well. incarnation: see queue_incarnation(). Errors: PQ001 no such queue; PQ005 a limit is below 1, or '
  'after_id without upto; PQ011 not subscribed; PQ015 a tick is not stored, or the queue is another incarnation.';

-- Returns a part of the window between two ticks as a position: the ids above p_after, up to
-- p_upto.
create or replace function pgque._part_of_window(p_from pgque.tick, p_to pgque.tick, p_after bigint, p_upto bigint) returns pgque.position
language plpgsql as $$
declare
  v_pos  pgque.position;
begin
  v_pos := pgque._with_window(pgque._at_tick(v_pos, p_from), p_to);
  v_pos.pos_done_id := p_after;
  v_pos.pos_last_id := p_upto;
  return v_pos;
end
$$;

-- Returns the condition for the rows of a window that a reader of offsets gets: those for
-- every consumer and, with a consumer, its retries, with ids in (p_after, p_upto].  Each body
-- of a key is a row (owner 0), with the id of the first.
create or replace function pgque._row_condition(p_queue text, p_consumer text, p_after bigint, p_upto bigint) returns text
language plpgsql as $$
begin
  return case when p_consumer is null then '(e.ev_owner is null or e.ev_owner = 0)'
      else pg_catalog.format('(e.ev_owner is null or e.ev_owner in (0, %s))', (pgque._subscriber(p_queue, p_consumer)).sub_id) end
    || coalesce(' and e.ev_id > ' || p_after, '') || coalesce(' and e.ev_id <= ' || p_upto, '');
end
$$;

-- The same window is split in the same way as long as its ticks are stored: by their
-- event sequences alone.
create or replace function pgque.split_window(
  queue_name text, inout from_tick bigint, inout to_tick bigint, inout parts int, incarnation uuid default null, out part int,
  inout after_id bigint default null, inout upto_id bigint default null, caller pgque.caller default current_user
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  v_from   pgque.tick;
  v_to     pgque.tick;
  v_share  bigint;
begin
  if ($2 <= $3 and $4 >= 1) is not true then
    perform pgque._bad_window(v_queue.queue_name, $2, $3);
  end if;
  v_from := pgque._need_tick(v_queue, $2);
  v_to := pgque._need_tick(v_queue, $3);
  -- The share of events of one piece.  A run is the ticks that begin within one share; a
  -- part of a window is one run.  A run makes as many pieces as shares pass until the next
  -- run.  The first piece of a run has no lower bound and the last no upper one: the
  -- window also has ids that were drawn before its first tick.
  v_share := greatest((v_to.tick_event_seq - v_from.tick_event_seq + $4 - 1) / $4, 1);
  return query execute format(
    $q$
    select r.from_tick, r.to_tick, p.parts, g.part,
      case g.part when 0 then $6 else p.lo + p.step * g.part end, case g.part when p.parts - 1 then $7 else p.lo + p.step * (g.part + 1) end
    from (
      select min(t.prev) as from_tick, max(t.tick_id) as to_tick, min(t.prev_seq) as lo, max(t.tick_event_seq) as hi,
        coalesce(lead(t.share) over (order by t.share), ($4 + $5 - 1) / $5) - t.share as shares
      from (
        -- A tick that begins at the end belongs to the last share.
        select t.*, case when coalesce($6, $7) is null then least(t.prev_seq - $3, greatest($4 - 1, 0)) / $5 else 0 end as share
        from (
          select t.tick_id, t.tick_event_seq, lag(t.tick_id, 1, $1) over w as prev, lag(t.tick_event_seq, 1, $3) over w as prev_seq
          from (%s) t
          where t.tick_id > $1 and t.tick_id <= $2
          window w as (order by t.tick_id)
        ) t
      ) t
      group by t.share
    ) r
    cross join lateral (select greatest(r.lo, $6) as lo, least(r.hi, $7) as hi) i
    cross join lateral (select greatest(case when coalesce($6, $7) is null then r.shares else least(i.hi - i.lo, $8) end, 1)::int) n (parts)
    cross join lateral (select n.parts, i.lo, greatest(i.hi - i.lo, 0) / n.parts as step) p
    cross join lateral generate_series(0, p.parts - 1) g (part)
    order by r.from_tick, g.part
    $q$, pgque._ticks_sql(v_queue.queue_id))
  using $2, $3, v_from.tick_event_seq, v_to.tick_event_seq - v_from.tick_event_seq, v_share, after_id, upto_id, $4;
end
$$;
comment on function pgque.split_window(text, bigint, bigint, int, uuid, bigint, bigint, pgque.caller) is
  'Splits the window between two ticks into at most parts pieces with about as many events each: runs of ticks, and ranges of ids of a tick with many events. Each row '
  'has the arguments of a call of read_window(): from_tick, to_tick, after_id and upto_id. Earlier versions of the client use parts and part (a remainder of the ids) '
  'instead of the ids: a reader needs one of the two. after_id, upto_id: split only this part of the window; see next_window(). incarnation: see queue_incarnation(). '
  'Errors: PQ001 no such queue; PQ005 no such window; PQ015 a tick is not stored, or the queue is another incarnation.';

-- Refuses a window, or a part of one, with PQ005.
create or replace function pgque._bad_window(p_queue text, p_from bigint, p_to bigint) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ005', pg_catalog.format('invalid window of queue %I: ticks %s to %s', p_queue, coalesce(p_from::text, 'null'), coalesce(p_to::text, 'null')),
    'Pass a from_tick up to to_tick, at least 1 for parts, and a part from 0 to parts - 1.');
end
$$;

-- Returns the query for the rows that became visible between two ticks.  It returns the
-- same rows whenever it runs.  So a message's ttl is compared with the window's end and not
-- with the clock.
create or replace function pgque._window_sql(
  p_queue text, p_from bigint, p_to bigint, p_consumer text, p_types text[], p_parts int, p_part int, p_incarnation uuid, p_caller name,
  p_after bigint default null, p_upto bigint default null, p_columns text[] default null, p_ordered boolean default true, p_by_key boolean default false
) returns text
language plpgsql set datestyle = 'ISO' as $$
declare
  v_queue  pgque.queue := pgque._need_incarnation(pgque._queue(p_queue, p_caller, 'consume'), p_incarnation);
  v_from   pgque.tick;
  v_to     pgque.tick;
  v_cond   text;
begin
  if (p_from <= p_to and p_parts >= 1 and p_part between 0 and p_parts - 1) is not true then
    perform pgque._bad_window(p_queue, p_from, p_to);
  end if;
  v_from := pgque._need_tick(v_queue, p_from);
  v_to := pgque._need_tick(v_queue, p_to);
  v_cond := pg_catalog.format('(e.ev_expires is null or e.ev_expires > %L::timestamptz) and ', v_to.tick_time)
    || pgque._row_condition(p_queue, p_consumer, p_after, p_upto)
    || case when p_types is null then '' else pg_catalog.format(' and e.ev_type = any (%L::text[])', pg_catalog.array_remove(p_types, null)) end
    || case when p_parts = 1 then '' else pg_catalog.format(' and %s %% %s = %s', case when p_by_key
      then '(coalesce(hashtextextended(coalesce(e.ev_key, e.ev_extra1) collate "C", 0), e.ev_id) & 9223372036854775807)' else 'e.ev_id' end, p_parts, p_part) end;
  -- The bodies of a key have one id: the newest comes last, and then a retry.
  return pg_catalog.format('select %s from (%s) e', pgque._read_columns(v_queue.queue_name, p_columns),
      pgque._rows_of_window_sql(v_queue.queue_id, pgque._part_of_window(v_from, v_to, p_after, p_upto), v_cond))
    || case when p_ordered then ' order by e.ev_id, coalesce(e.ev_owner, 0) > 0, coalesce(e.ev_retry, 0)' else '' end;
end
$$;

-- Returns the list of what a reader selects from rows e: columns of read_window(), or what
-- Spark makes of them.  A query that computes it itself would need the rows of a function,
-- which the server stores before it returns the first.
create or replace function pgque._read_columns(p_queue text, p_columns text[]) returns text
language plpgsql as $$
declare
  v_found    text;
  v_unknown  text;
begin
  if p_columns is null then
    return pgque._event_columns();
  end if;
  select pg_catalog.string_agg(coalesce(m.what || ' as ' || c.name, 'e.' || v.name), ', ' order by c.n),
    min(coalesce(c.name, 'null')) filter (where coalesce(m.name, v.name) is null)
  into v_found, v_unknown
  from pg_catalog.unnest(p_columns) with ordinality c (name, n)
  left join (values
    ('key', 'coalesce(e.ev_key, e.ev_extra1)'),
    ('payload', $q$coalesce(e.ev_bytes, pg_catalog.convert_to(e.ev_data, 'UTF8'))$q$),
    ('header_names', 'case when e.ev_headers is not null then array(select h.key from pg_catalog.jsonb_each_text(e.ev_headers) h) end'),
    ('header_values', 'case when e.ev_headers is not null then array(select h.value from pg_catalog.jsonb_each_text(e.ev_headers) h) end')
  ) m (name, what) on m.name = c.name
  left join pg_catalog.regexp_split_to_table(pg_catalog.replace(pgque._event_columns(), 'e.', ''), ', ') v (name) on v.name = c.name;
  if v_found is null or v_unknown is not null then
    perform pgque._fail('PQ005', pg_catalog.format('no such column: %s, to read from queue %I', coalesce(v_unknown, 'none given'), p_queue),
      pg_catalog.format('Choose from %s, key, payload, header_names and header_values, or leave the argument columns out for those of read_window().',
        pg_catalog.replace(pgque._event_columns(), 'e.', '')));
  end if;
  return v_found;
end
$$;

-- Returns how many rows one FETCH should get: these are in the memory of the server and of
-- the client at once.  Rows are below 2 kB, or compressed to that, if no table has TOAST.
create or replace function pgque._rows_to_fetch(p_queue_id int) returns int
language sql stable as $$
  select case when bool_or(pg_catalog.pg_relation_size(c.reltoastrelid) > 0) then 200 else 2000 end
  from pg_catalog.generate_series(0, 2) n
  join pg_catalog.pg_class c on c.oid = pg_catalog.to_regclass(pg_catalog.format('pgque.event_%s_%s', p_queue_id, n))
$$;

-- Not stable: the tick may be younger than the calling statement.
create or replace function pgque.read_window(
  queue_name text, from_tick bigint, to_tick bigint, consumer_name text default null, types text[] default null,
  parts int default 1, part int default 0, incarnation uuid default null, after_id bigint default null, upto_id bigint default null,
  caller pgque.caller default current_user,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out ev_expires timestamptz, out ev_error text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set work_mem = '64MB' set jit = off as $$
begin
  return query execute pgque._window_sql($1, $2, $3, $4, $5, $6, $7, incarnation, caller, after_id, upto_id);
end
$$;
comment on function pgque.read_window(text, bigint, bigint, text, text[], int, int, uuid, bigint, bigint, pgque.caller) is
  'Returns the events between two ticks in the order of their ids, without side effects. consumer_name: its retries too, if it is read by offsets. types: only events of these '
  'types. parts and part: only ids whose remainder by parts is part. after_id, upto_id: only ids above the first, up to the second; see next_window(). While a consumer stands at from_tick or before, each call returns the same rows. '
  'incarnation: see queue_incarnation(); without it, a queue that was created again can have other events between ticks with these ids. '
  'Errors: PQ001 no such queue; PQ005 no such window; PQ011 not subscribed; PQ015 a tick is not stored, or the queue is another incarnation.';

-- A cursor streams: the rows of a function are all stored before the first is returned.
create or replace function pgque.read_window_cursor(
  cursor_name text, queue_name text, from_tick bigint, to_tick bigint, consumer_name text default null, types text[] default null,
  parts int default 1, part int default 0, incarnation uuid default null, after_id bigint default null, upto_id bigint default null,
  columns text[] default null, ordered boolean default true, by_key boolean default false, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set cursor_tuple_fraction = 1 set work_mem = '64MB' set jit = off as $$
begin
  perform pgque._open_cursor($1, $2, pgque._window_sql($2, $3, $4, $5, $6, $7, $8, incarnation, caller, after_id, upto_id, $12, ordered, by_key));
  return pgque._rows_to_fetch((pgque._queue($2, caller, 'consume')).queue_id);
end
$$;
comment on function pgque.read_window_cursor(text, text, bigint, bigint, text, text[], int, int, uuid, bigint, bigint, text[], boolean, boolean, pgque.caller) is
  'Opens a cursor named cursor_name over the rows of read_window(), and returns how many rows to FETCH at once, in the same transaction: 2000, or '
  '200 if the queue may have rows above 2 kB. It is the fastest way to read a window: the server stores no rows. columns: only these columns of '
  'read_window(), or key (the key or the partition key), payload (as bytes), header_names, header_values. ordered: by id; false is cheaper. A sort '
  'takes up to the work_mem of the session. by_key: parts and part divide the keys instead of the ids, so that each key is in one part; messages '
  'without a key are divided by id. Errors: PQ001 no such queue; PQ005 no such window or column; PQ011 not subscribed; PQ015 a tick is not stored, '
  'or the queue is another incarnation; 42P03 the transaction has a cursor with this name.';

-- Opens a cursor over a query.
create or replace function pgque._open_cursor(p_cursor text, p_queue text, p_sql text) returns void
language plpgsql as $$
declare
  v_cursor  refcursor := p_cursor;
begin
  if coalesce(p_cursor, '') = '' then
    perform pgque._fail('PQ005', pg_catalog.format('a cursor over queue %s needs a name', coalesce(pg_catalog.quote_ident(p_queue), 'null')),
      'Pass any name that is free in this transaction, and FETCH from it.');
  end if;
  open v_cursor no scroll for execute p_sql;
end
$$;

-- Waits for senders that replace a body, as subscribe() does: otherwise the consumer
-- would pass the body that they commit later.
create or replace function pgque.seek(queue_name text, consumer_name text, tick_id bigint, force boolean default false, incarnation uuid default null,
  caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub       pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_queue     pgque.queue;
  v_position  pgque.position;
  v_current   pgque.position;
  v_tick      bigint;
begin
  perform pgque._need_alone(v_sub, $1, $2);
  perform pgque._wait_for_keyed_sends(q)
  from pgque.queue q
  where q.queue_id = v_sub.sub_queue and $3 > (pgque._position(v_sub.sub_id)).pos_tick;
  -- The lock keeps rotation from emptying the table of this tick.
  select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue for share;
  perform pgque._need_incarnation(v_queue, incarnation);
  perform pgque._depth_grows(v_queue.queue_id) where $4;
  v_sub.sub_role := pgque._lock_subscriber(v_sub.sub_id);
  perform pgque._need_alone(v_sub, $1, $2);
  v_position := pgque._position(v_sub.sub_id);
  v_current := pgque._current_position(v_sub, v_position);
  v_tick := v_current.pos_tick;
  -- One that stands at the tick may have received a part of what follows.
  if $3 is null or ($4 is not true and $3 > v_tick) or $4 and ($3 <> v_tick or v_current.pos_done_id is not null or v_current.pos_batch is not null) then
    perform pgque._promote_dead(v_sub, v_queue, v_tick, $3);
    perform pgque._move_to(v_sub, v_position, pgque._need_tick(v_queue, $3));
    -- The move of a running stream is no change by hand.
    perform pgque._record_action('seek', v_queue.queue_name, jsonb_build_object('consumer_name', $2, 'from_tick', v_tick, 'tick_id', $3))
    where pgque._stream_pid(v_sub) is distinct from pg_backend_pid();
    return $3;
  end if;
  -- A stream that commits a tick has read its archive.
  update pgque.subscriber s set sub_history = null where s.sub_id = v_sub.sub_id and s.sub_history is not null;
  return v_tick;
end
$$;
comment on function pgque.seek(text, text, bigint, boolean, uuid, pgque.caller) is
  'Moves a consumer forward to a tick, or with force also back, and returns the tick where it stands. Without force, a tick that it has passed '
  'changes nothing. An open batch is dropped. Messages that stage_dead() noted up to the tick become dead letters. incarnation: see '
  'queue_incarnation(). Errors: PQ001 no such queue; PQ005 the consumer has workers; PQ011 not subscribed; PQ015 the tick is not stored, or the '
  'queue is another incarnation.';

-- With no event before the earliest stored tick, nothing that was sent is missing.
create or replace function pgque.seek_to_time(queue_name text, consumer_name text, at timestamptz, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set datestyle = 'ISO' set jit = off as $$
declare
  v_sub    pgque.subscriber := pgque._subscriber($1, $2, caller);
  v_queue  pgque.queue;
  v_tick   pgque.tick;
begin
  select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue;
  v_tick := pgque._find_tick(v_queue, $3::text);
  if v_tick.tick_time > $3 and v_tick.tick_event_seq > 0 then
    perform pgque._fail('PQ015', format('queue %I has no tick as old as %s: its earliest is from %s', v_queue.queue_name, $3, v_tick.tick_time),
      format('Some messages from before that time may no longer be stored. To replay all that are: select pgque.seek_to_time(%L, %L, %L); '
        'To keep messages for longer after all consumers have finished them, raise rotation_period: they stay for two to three times as long.',
        v_queue.queue_name, $2, v_tick.tick_time));
  end if;
  -- The name may be that of another queue by now.
  return pgque.seek(v_queue.queue_name, $2, v_tick.tick_id, true, pgque._incarnation(v_queue), caller);
end
$$;
comment on function pgque.seek_to_time(text, text, timestamptz, pgque.caller) is
  'Moves a consumer back or forward to a time, and returns the tick where it stands: the last one at or before this time. It receives everything '
  'that became visible later, also what it has acknowledged; a few messages from just before may be among it. An open batch is dropped. Messages that all '
  'consumers have finished stay for two to three rotation_period. Errors: PQ001 no such queue; PQ005 at is NULL, or the consumer has workers; '
  'PQ011 not subscribed; PQ015 older ticks are no longer stored: the error names the earliest.';

create or replace function pgque._stream_key(p_sub pgque.subscriber) returns int
language sql immutable as $$ select pg_catalog.hashtext(p_sub.sub_queue || ' ' || p_sub.sub_consumer) $$;

-- Returns the session that has a consumer's stream open, or null.
create or replace function pgque._stream_pid(p_sub pgque.subscriber) returns int
language sql volatile as $$
  select l.pid
  from pg_catalog.pg_locks l
  where l.locktype = 'advisory' and l.granted and l.objsubid = 2
    and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
    and l.classid::bigint = (pg_catalog.hashtext('pgque.stream')::bigint & 4294967295) and l.objid::bigint = (pgque._stream_key(p_sub)::bigint & 4294967295)
$$;

create or replace function pgque.open_stream(queue_name text, consumer_name text, start_at text default 'latest', incarnation uuid default null,
  caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub     pgque.subscriber;
  v_holder  record;
begin
  perform pgque._need_incarnation(pgque._queue($1, caller, 'consume'), incarnation);
  perform pgque._subscribe($1, $2, 'normal', $3, caller);
  v_sub := pgque._subscriber($1, $2, caller);
  perform pgque._need_incarnation(q, incarnation) from pgque.queue q where q.queue_id = v_sub.sub_queue;
  perform pgque._need_alone(v_sub, $1, $2);
  if not pg_try_advisory_lock(hashtext('pgque.stream'), pgque._stream_key(v_sub)) then
    select a.pid, a.application_name into v_holder from pg_stat_activity a where a.pid = pgque._stream_pid(v_sub);
    perform pgque._fail('PQ006', format('consumer %I of queue %I is read by another stream: pid %s, application %L', $2, $1, v_holder.pid, v_holder.application_name),
      'End the other stream, or use another consumer: each stream needs one of its own.');
  end if;
  -- From now on redeliveries must be in the log.
  update pgque.subscriber s set sub_offsets = true where s.sub_id = v_sub.sub_id and not s.sub_offsets;
  return (pgque._current_position(v_sub, pgque._position(v_sub.sub_id))).pos_tick;
end
$$;
comment on function pgque.open_stream(text, text, text, uuid, pgque.caller) is
  'Opens a stream for a reader that keeps its own offsets, and returns the tick where the consumer stands. Subscribes the consumer at start_at if '
  'it is new, and reserves it for this session until the session ends. incarnation: see queue_incarnation(). Errors: PQ001 no such queue; PQ005 no such start_at, '
  'or the consumer has workers; PQ006 another session has reserved it; PQ015 the queue is another incarnation.';

create or replace function pgque.dead(queue_name text, consumer_name text, msg_ids bigint[], reasons text[], caller pgque.caller default current_user) returns setof pgque.outcome
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub  pgque.subscriber := pgque._subscriber($1, $2, caller);
begin
  perform pgque._need_alone(v_sub, $1, $2);
  if cardinality($3) is distinct from cardinality($4) or $3 is null then
    perform pgque._fail('PQ005', format('msg_ids and reasons must have the same number of elements, for consumer %I of queue %I', $2, $1),
      'Pass two arrays: the ids, and a reason for each.');
  end if;
  return query select * from pgque._dead_upto(v_sub, (pgque._last_tick(pgque._queue($1, caller, 'consume'))).tick_snapshot, $3, $4);
end
$$;

-- Uses the newest body of a key (owner 0) up to the snapshot.  Arrays may be long, and
-- the planner has no statistics of a young table: without the settings it would compare
-- each id with each.
create or replace function pgque._dead_upto(p_sub pgque.subscriber, p_upto pg_snapshot, p_ids bigint[], p_reasons text[]) returns setof pgque.outcome
language plpgsql set enable_nestloop = off set jit = off as $$
begin
  return query execute pg_catalog.format(
    $q$
    select i.id, b.ok is true, case when b.ok then null when b.ok is null then 'not found behind the position' else 'dead already' end
    from unnest($1, $2) with ordinality i (id, reason, n)
    left join (select distinct on (e.ev_id) e.* from (%s) e order by e.ev_id, e.ev_txid desc, e.ev_retry desc) e on e.ev_id = i.id
    left join lateral (
      select pgque._add_dead_letter(pgque._as_retry(row(e.*)::pgque.event, $3, case when e.ev_owner > 0 then coalesce(e.ev_retry, 0) else 0 end + 1, null, null, null), $3.sub_consumer, i.reason, false) as ok
      where e.ev_id is not null offset 0) b on true
    order by i.n
    $q$, pgque._rows_sql(p_sub.sub_queue, pg_catalog.format('(e.ev_owner is null or e.ev_owner in (0, %s)) and e.ev_id = any ($1)', p_sub.sub_id), null,
      pgque._xids((pgque._position(p_sub.sub_id)).pos_snapshot, p_upto)))
  using p_ids, p_reasons, p_sub;
end
$$;
comment on function pgque.dead(text, text, bigint[], text[], pgque.caller) is
  'Dead-letters messages that the consumer has passed, each with its reason. Returns one row for each message: msg_id, ok, and the reason if ok is '
  'false. A message that is dead already stays as it is, so the call can be repeated. Errors: PQ001 no such queue; PQ005 not as many reasons as '
  'msg_ids; PQ011 not subscribed.';
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
-- ---------------------------------------------------------------------------
-- restore: whether a dump was loaded completely
-- ---------------------------------------------------------------------------

-- A dump may be loaded in any order, by several sessions, while a ticker runs.  A queue
-- that is repaired (_rebase) before its consumers are loaded would lose what they had
-- not finished.  So nothing of a loaded queue is written or deleted before the restore
-- is complete.  These functions find out whether it is:
--   * pg_dump lets materialized views be filled last, after all data, indexes and
--     grants, in a parallel restore too.  So pgque.restore_complete is empty until the
--     restore has ended.  It is no member of the extension, since members are not in a
--     dump.  pg_upgrade and copies of the cluster keep it filled.
--   * A dump of 0.7.0 or earlier has no such view, and a load of data alone finds it
--     filled.  Then the data has to be consistent, and no session may be loading.
--   * The operator confirms it: confirm_restore() fills the view, and queue_xid 2 means
--     that no more is checked.

-- Creates the view that is filled at the end of a restore.
create or replace function pgque._note_complete() returns int
language plpgsql as $$
begin
  if pg_catalog.to_regclass('pgque.restore_complete') is not null then
    return 0;
  end if;
  -- One session after the other.  The session's copy of the catalog may be older than the
  -- lock.
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.restore'));
  create materialized view pgque.restore_complete as select true as complete;
  comment on materialized view pgque.restore_complete is
    'A dump fills it last, so it is empty while a restore goes on: the queues wait for that. Internal: see confirm_restore().';
  perform pgque._set_rights(array[pg_catalog.to_regclass('pgque.restore_complete')::oid]);
  return 1;
exception
  when duplicate_table then
    return 0;   -- another session created it
end
$$;

-- Creates the view of _note_complete() in a database of 0.7.0 or earlier, as a part of
-- maintenance.
create or replace function pgque._note_complete_later() returns int
language plpgsql as $$
begin
  return case when exists (select from pgque.queue) then pgque._note_complete() else 0 end;
end
$$;

-- Returns what shows that this database is being restored; null if nothing does.
create or replace function pgque._loading() returns text
language plpgsql as $$
begin
  if exists (select from pg_catalog.pg_class c where c.oid = pg_catalog.to_regclass('pgque.restore_complete') and not c.relispopulated) then
    return 'the restore has not ended: pgque.restore_complete is not filled yet';
  elsif not exists (select from pgque.queue) and exists (select from pgque._ownerless()) then
    return 'table pgque.queue is not loaded yet';
  end if;
  return null;
end
$$;

-- Returns the ids of queues that have tables, but no row.
create or replace function pgque._ownerless() returns setof int
language sql as $$
  select distinct pg_catalog.split_part(c.relname, '_', 2)::int
  from pg_catalog.pg_inherits i
  join pg_catalog.pg_class c on c.oid = i.inhrelid
  where i.inhparent = 'pgque.tick'::regclass and c.relname ~ '^tick_[0-9]+_[0-2]$'
    and not exists (select from pgque.queue q where q.queue_id = pg_catalog.split_part(c.relname, '_', 2)::int)
    and not exists (select from pgque.dropped_queue d where d.queue_id = pg_catalog.split_part(c.relname, '_', 2)::int)
$$;

-- Returns what a queue that was loaded from a dump lacks; null if nothing.
create or replace function pgque._lacks(p_queue pgque.queue) returns text
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_found  text := pgque._loading();
begin
  if v_found is not null or p_queue.queue_xid = '2' then
    return v_found;
  end if;
  v_found := pgque._loader();
  if v_found is not null then
    return v_found;
  end if;
  -- Data is loaded before the indexes of its table are created.
  select pg_catalog.format('table %s and its indexes are not complete', t.name) into v_found
  from (
    select l.leaf, case l.kind when 'tick' then 1 else 2 end from pgque._leaves(p_queue.queue_id) l
    union all
    select 'pgque.' || s.name, 1
    from (values ('consumer'), ('subscriber'), ('retry_queue'), ('dead_letter'), ('position_0'), ('position_1'), ('settled_0'), ('settled_1')) s (name)
  ) t (name, indexes)
  where (select count(*) from pg_catalog.pg_index i where i.indrelid = pg_catalog.to_regclass(t.name) and i.indisvalid) < t.indexes
  limit 1;
  if v_found is null and pg_catalog.to_regclass('pgque.restore_complete') is null then
    -- Grants are loaded at the end.  One that meets a TRUNCATE fails.
    select pg_catalog.format('the grants of %s are not loaded', c.oid::regclass) into v_found
    from pg_catalog.pg_class c
    where (c.oid in (select pg_catalog.to_regclass(l.leaf) from pgque._leaves(p_queue.queue_id) l) or c.oid = p_queue.queue_event_seq)
      and c.relacl is null
    limit 1;
  end if;
  if v_found is not null then
    return v_found;
  end if;
  -- The locks of the leaves are released at once: the repair locks them before all else.
  begin
    if (pgque._last_tick(p_queue)).tick_id is null then
      v_found := 'its ticks are not loaded';
    elsif pg_catalog.pg_sequence_last_value(p_queue.queue_tick_seq) is null then
      v_found := pg_catalog.format('the value of sequence %s is not loaded', p_queue.queue_tick_seq);
    elsif pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq) is null then
      execute pg_catalog.format('select %L where exists (%s)',
        pg_catalog.format('the value of sequence %s is not loaded', p_queue.queue_event_seq), pgque._rows_sql(p_queue.queue_id, 'true'))
      into v_found;
    end if;
    perform pgque._undo_block();
  exception
    when sqlstate 'PQ099' then
      null;
  end;
  if v_found is not null then
    return v_found;
  end if;
  if not exists (select from pgque.journal) then
    return 'table pgque.journal is not loaded';
  elsif not exists (select from pgque.subscriber) and exists (select from pgque.position) then
    return 'table pgque.subscriber is not loaded';
  end if;
  return (
    select case when c.co_id is null then 'the consumers are not loaded' else pg_catalog.format('the position of consumer %I is not loaded', c.co_name) end
    from pgque.subscriber s
    left join pgque.consumer c on c.co_id = s.sub_consumer
    where s.sub_queue = p_queue.queue_id and s.sub_main is null
      and (c.co_id is null or not exists (select from pgque.position p where p.pos_sub = s.sub_id))
    limit 1);
end
$$;

-- Returns which session loads a dump; null if none does.  COPY into the view pgque.sink
-- is an ordinary way to send.
create or replace function pgque._loader() returns text
language sql as $$
  select 'session ' || min(w.pid) || ' loads a dump'
  from (
    select a.pid from pg_catalog.pg_stat_activity a
    where a.datname = pg_catalog.current_database() and a.application_name = 'pg_restore' and a.pid <> pg_catalog.pg_backend_pid()
    union all
    select p.pid
    from pg_catalog.pg_stat_progress_copy p
    where p.datname = pg_catalog.current_database() and p.pid <> pg_catalog.pg_backend_pid()
      and exists (
        select from pg_catalog.pg_locks l
        join pg_catalog.pg_class c on c.oid = l.relation and c.relnamespace = 'pgque'::regnamespace
        where l.pid = p.pid and l.mode = 'RowExclusiveLock')
      and not exists (select from pg_catalog.pg_locks l where l.pid = p.pid and l.relation in ('pgque.sink'::regclass, 'pgque.sink_bulk'::regclass))
  ) w
  having count(*) > 0
$$;

-- Returns whether maintenance has to leave the tables that all queues share alone: a
-- queue that was loaded from a dump is not repaired yet.
create or replace function pgque._is_loading() returns boolean
language sql as $$
  select exists (select from pgque.queue q where q.queue_restored and q.queue_xid <> '2') or pgque._loading() is not null
$$;

-- Returns what this database lacks, or one of its first queues; null if nothing.
create or replace function pgque._lacking() returns text
language plpgsql as $$
declare
  v_queue  pgque.queue;
  v_lacks  text := pgque._loading();
begin
  for v_queue in select q.* from pgque.queue q where q.queue_restored and v_lacks is null order by q.queue_id limit 20 loop
    v_lacks := pg_catalog.format('queue %I: ', v_queue.queue_name) || pgque._lacks(v_queue);
    exit when v_lacks is not null;
  end loop;
  return v_lacks;
end
$$;

-- Returns whether the row that a trigger sees comes out of a dump, by a load of data
-- alone: this session loads a dump, and the queue is being restored.  The messages about
-- the row are in the same dump.  Each script of pg_dump and each session of pg_restore
-- turns check_function_bodies off.  A change by any other session is a new one, so it
-- fails as a send does.  A role without a right to the queue learns nothing of it, and
-- its send is refused.
create or replace function pgque._is_old_change(p_queue text, caller pgque.caller default current_user) returns boolean
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue;
begin
  if caller is null then
    perform pgque._no_right(caller, 'produce', p_queue);
  elsif current_setting('check_function_bodies')::boolean then
    return false;
  end if;
  select q.* into v_queue from pgque.queue q where q.queue_name = p_queue collate "default";
  return case
    when not pgque._may(caller, 'produce', v_queue.queue_id) then false
    when v_queue.queue_id is null then pgque._loading() is not null
    when v_queue.queue_restored then pgque._lacks(v_queue) is not null
    else false
  end;
end
$$;

-- Refuses a call that writes while a dump is being loaded: it could lose messages, or
-- take a number that a row of the dump has.
create or replace function pgque._need_loaded(p_queue pgque.queue) returns void
language plpgsql as $$
declare
  v_lacks  text := case when p_queue.queue_id is null then pgque._loading() else pgque._lacks(p_queue) end;
begin
  if p_queue.queue_id is null and v_lacks is null and not exists (select from pgque.queue) then
    v_lacks := pgque._loader();   -- of a dump it has just created the extension
  end if;
  if v_lacks is not null then
    perform pgque._fail('object_not_in_prerequisite_state',
      case when p_queue.queue_id is null then 'pgque is being loaded from a dump'
        else pg_catalog.format('queue %I was loaded from a dump that is not complete', p_queue.queue_name) end,
      'Retry when the restore has ended. If it has ended, see the advice of pgque.health().', pg_catalog.initcap(pg_catalog.left(v_lacks, 1)) || pg_catalog.substr(v_lacks, 2) || '.');
  end if;
end
$$;

-- Returns the advice of health() for a queue that lacks something.
create or replace function pgque._restore_advice() returns text
language sql immutable as $$
  select 'Wait until pg_restore or psql has ended. If it has ended, load what is missing. If all is there, or what is missing cannot be loaded: select pgque.confirm_restore()'::text
$$;

create or replace function pgque.confirm_restore() returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_lost   int[] := array(select o.id from pgque._ownerless() o (id) order by o.id);
  v_count  bigint;
begin
  if exists (select from pg_class c where c.oid = to_regclass('pgque.restore_complete') and not c.relispopulated) then
    refresh materialized view pgque.restore_complete;
  end if;
  if v_lost <> '{}' then
    raise warning 'pgque: tables of queues without a row in pgque.queue are dropped: queue_id %', array_to_string(v_lost, ', ');
    insert into pgque.dropped_queue (queue_id) select l.id from unnest(v_lost) l (id) on conflict do nothing;
  end if;
  perform pgque._note_complete_later();
  update pgque.queue q set queue_xid = '2' where q.queue_restored;
  get diagnostics v_count = row_count;
  perform pgque._record_action('confirm_restore', null, jsonb_build_object('queues', v_count));
  return v_count;
end
$$;
comment on function pgque.confirm_restore() is
  'Declares that the restore of this database is complete, and returns the number of queues that can now be used. Call it only if health() advises '
  'it: after data was loaded without the rest of the dump, or after a part of the restore failed. Data that was not loaded by then is lost: for '
  'example, a queue whose consumers are missing starts empty. Tables of queues that have no row in pgque.queue are dropped.';

-- Locks a queue that was loaded from a dump, its tables and its consumers.  Senders,
-- readers and workers of the queue repair it too, and hold some of these locks.
-- A worker that has its consumer's row may wait for the tables, so that this call waits
-- for rows only briefly, and _execute_insistently() releases the tables.  Raises PQ099 if there is
-- nothing left to repair, so that no lock stays.
create or replace function pgque._lock_restored(p_queue_id int) returns void
language plpgsql as $$
begin
  -- In the order of readers: the newest tick, other ticks, messages.
  execute (
    select 'lock table ' || pg_catalog.string_agg(l.leaf, ', ' order by l.kind desc, q.queue_id is null, l.n) || ' in access exclusive mode'
    from pgque._leaves(p_queue_id) l
    left join pgque.queue q on q.queue_id = p_queue_id and q.queue_cur_table = l.n);
  perform pg_catalog.set_config('lock_timeout', '50ms', true);
  perform from pgque.queue q where q.queue_id = p_queue_id and q.queue_restored for update;
  if not found then
    perform pgque._undo_block();
  end if;
  perform from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null order by s.sub_id for no key update;
end
$$;

-- Makes a queue that was loaded from a dump usable.  Its events and ticks name
-- transactions of another cluster, which mean nothing here.  The messages that a
-- consumer had not finished are found by the old numbers and go to its retry queue, due
-- at once.  The queue then begins again with a tick of this cluster.  Until then it
-- takes no events, so old and new numbers never mix.  Before the restore is complete it
-- fails with 55000.
create or replace function pgque._rebase(p_queue_id int) returns boolean
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue     pgque.queue;
  v_last      pgque.tick;
  v_sub       pgque.subscriber;
  v_position  pgque.position;
  v_open      bigint[];
  v_rows      text;
begin
  if not exists (select from pgque.queue q where q.queue_id = p_queue_id and q.queue_restored) then
    return false;
  end if;
  perform pgque._need_read_committed('a restored queue');
  begin
    perform pgque._execute_insistently(format('select pgque._lock_restored(%s)', p_queue_id));
  exception
    when sqlstate 'PQ099' then
      return false;
  end;
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  perform pgque._need_loaded(v_queue);
  perform pgque._create_reader(p_queue_id);   -- those of the dump may be of an earlier version
  v_last := pgque._last_tick(v_queue);
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null order by s.sub_id for no key update loop
    v_open := array(select h.token from pgque._open_batches(v_sub.sub_id) h);
    if cardinality(pgque._try_lock_batches(v_sub, v_open, null)) < cardinality(v_open) then
      -- Waiting for the worker would be a deadlock if it asks for more messages.
      perform pgque._fail('serialization_failure', format('a worker is finishing a batch of queue %I, which was loaded from a dump', v_queue.queue_name),
        'Retry the transaction.');
    end if;
    perform pgque._move_to_retry(v_sub, h.lease, h.until) from pgque._open_batches(v_sub.sub_id) h;
    v_position := pgque._next_from(pgque._position(v_sub.sub_id));
    -- All rows ahead of its position, without those that it finished in the window.
    v_rows := pgque._rows_sql(p_queue_id, format(
      '(e.ev_owner is null or e.ev_owner = %s) and not pg_visible_in_snapshot(e.ev_txid, %L)%s', v_sub.sub_id, v_position.pos_snapshot,
      coalesce(' and not (e.ev_id <= ' || v_position.pos_done_id || format(' and pg_visible_in_snapshot(e.ev_txid, %L))', v_position.pos_next_snapshot), '')) || pgque._not_cancelled_sql(p_queue_id, v_position));
    execute format(
      'insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_retry, ev_error,'
      ' ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)'
      ' select $1, %s, %s, e.ev_retry, e.ev_error,'
      ' e.ev_id, e.ev_time, e.ev_txid, e.ev_type, e.ev_data, e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes, e.ev_expires'
      ' from (%s) e on conflict do nothing', p_queue_id, v_sub.sub_id, v_rows)
    using pgque.clock();
  end loop;
  perform pgque._refresh_retries(p_queue_id);
  update pgque.retry_queue r set ev_lane = pgque._lane(r.ev_key, r.ev_extra1)
  where r.ev_queue = p_queue_id and r.ev_owner > 0 and r.ev_lane is null and coalesce(r.ev_key, r.ev_extra1) is not null;
  execute (select 'truncate ' || string_agg(l.leaf, ', ') from pgque._leaves(p_queue_id) l);
  update pgque.queue q set queue_xid = pgque._mark(), queue_incarnation = gen_random_uuid() where q.queue_id = p_queue_id returning q.* into v_queue;
  -- An external ticker may continue at times that are past here.
  perform pgque._store_tick(v_queue, pgque._next_tick_id(v_queue, v_last.tick_id, true),
    case when v_queue.queue_external_ticker then v_last.tick_time else pgque.clock() end, pgque._tick_snapshot(),
    case when v_queue.queue_external_ticker then v_last.tick_event_seq end, false);
  v_last := pgque._last_tick(v_queue);
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = p_queue_id and s.sub_main is null loop
    v_position := pgque._position(v_sub.sub_id);
    v_position.pos_lapse := null;
    v_position.pos_open := case when v_sub.sub_role = 'pool' then '{}' else pgque._still_open(v_sub, v_position.pos_open) end;
    perform pgque._append_position(pgque._at_tick(v_position, v_last));
  end loop;
  return true;
end
$$;
-- ---------------------------------------------------------------------------
-- maintain: rotation, compaction, retention, restore
-- ---------------------------------------------------------------------------

-- Returns the tick up to which every subscriber of a queue is done; the newest tick if
-- there is no subscriber.
create or replace function pgque._slowest_tick(p_queue_id int) returns bigint
language plpgsql as $$
declare
  v_tick  bigint;
begin
  select min(p.pos_tick) into v_tick
  from pgque.subscriber s
  cross join lateral pgque._oldest_needed_position(s.sub_id) p
  where s.sub_queue = p_queue_id and s.sub_main is null;
  return coalesce(v_tick, (pgque._last_tick((select q from pgque.queue q where q.queue_id = p_queue_id))).tick_id);
end
$$;

-- Deletes the ticks of the other tables that one table has rows behind, before that table
-- is emptied.  A tick that is stored promises that every row behind it is stored too:
-- a reader of offsets may begin there, also while no consumer keeps rows for it.  Only a
-- transaction that was open across a rotation breaks this: its rows are in the older
-- table, behind the first ticks of the newer one.
create or replace function pgque._delete_ticks(p_queue_id int, p_n int) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_first  pg_snapshot;
  v_late   xid8[];
begin
  execute pg_catalog.format('select t.tick_snapshot from (%s) t where t.slot <> $1 order by t.tick_id limit 1', pgque._ticks_sql(p_queue_id))
  into v_first using p_queue_id * 3 + p_n;
  execute pg_catalog.format(
    'select array(select e.ev_txid from pgque.event_%1$s_%2$s e where e.ev_txid >= $1 union select e.ev_txid from pgque.event_%1$s_%2$s e where e.ev_txid = any ($2))',
    p_queue_id, p_n)
  into v_late
  using pg_catalog.pg_snapshot_xmax(v_first), array(select pg_catalog.pg_snapshot_xip(v_first));
  if v_late <> '{}' then
    for v_n in 1..2 loop
      execute pg_catalog.format(
        'delete from pgque.tick_%s_%s t where exists (select from unnest($1) x (txid) where not pg_visible_in_snapshot(x.txid, t.tick_snapshot))',
        p_queue_id, (p_n + v_n) % 3)
      using v_late;
    end loop;
  end if;
end
$$;

-- Empties the oldest table and makes it the current one, unless there is nothing to
-- reclaim.  A table with a row or a tick that is ahead of a position is never emptied.
-- The rows are checked under the table's own lock.  A writer that still uses this table
-- as the current one either waits for the lock, and stores a row that is read later, or
-- has committed, and its row is seen now.
-- Rotation does not wait for the lock: pg_dump or an open writer postpones it.  But a
-- rotation that is late by a whole period sometimes waits for a tenth of a second.
-- Otherwise consumers with overlapping transactions could postpone it without end.
create or replace function pgque.maint_rotate_tables_step1(queue_name text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '1s' set jit = off as $$
declare
  v_queue     pgque.queue := pgque._queue($1);
  v_id        int := v_queue.queue_id;
  v_next      int;
  v_event     text;
  v_tick      text;
  v_current   text;
  v_slowest   pgque.tick;
  v_needed    boolean;
  v_floor     bigint;
begin
  perform pgque._need_read_committed('rotation');
  if v_queue.queue_restored or not (pgque._is_due(v_queue.queue_switch_time, v_queue.queue_rotation_period)
    or pg_total_relation_size(format('pgque.tick_%s_%s', v_id, v_queue.queue_cur_table)) >= v_queue.queue_tick_storage / 3)
  then
    return 0;
  end if;
  v_next := (v_queue.queue_cur_table + 1) % 3;
  -- Copies newer bodies of messages in the retry queue that are in this table only.
  -- Most of this work is done, and committed, before the table is locked.
  if pgque._keyed(v_queue) then
    begin
      if not pg_try_advisory_xact_lock(hashtext('pgque.rotate'), v_id) or pgque._refresh_retries(v_id, v_next) = 0 then
        perform pgque._undo_block();
      end if;
    exception
      when lock_not_available or sqlstate 'PQ099' then
        null;
    end;
  end if;
  begin
    -- Even reading a table's size waits for its lock, so one session at a time.
    if not pg_try_advisory_xact_lock(hashtext('pgque.rotate'), v_id) then
      return 0;
    end if;
    v_event := format('pgque.event_%s_%s', v_id, v_next);
    v_tick := format('pgque.tick_%s_%s', v_id, v_next);
    v_current := format('pgque.%s_%s_%s', '%s', v_id, v_queue.queue_cur_table);
    -- Idle ticks alone are worth a rotation only once they fill some pages.
    if pg_relation_size(v_event) = 0 and pg_relation_size(format(v_current, 'event')) = 0
      and pg_relation_size(format('pgque.event_%s_%s', v_id, (v_next + 1) % 3)) = 0
      and pg_relation_size(format(v_current, 'tick')) < 131072
    then
      perform pgque._undo_block();
    end if;
    -- All checks so far took no lock, so that a call without a result writes nothing.
    perform from pgque.queue q
    where q.queue_id = v_id and q.queue_cur_table = v_queue.queue_cur_table and q.queue_switch_time = v_queue.queue_switch_time
    for no key update skip locked;
    if not found then
      perform pgque._undo_block();
    end if;
    if pg_relation_size(v_event) > 0 or pg_relation_size(v_tick) > 0 then
      -- Before the tables are locked, since there may be thousands of consumers.  No
      -- consumer is moved back meanwhile, because that needs the queue's row.
      v_slowest := pgque._tick(v_id, pgque._slowest_tick(v_id));
      if random() < 0.1 and pgque._is_due(v_queue.queue_switch_time, 2 * v_queue.queue_rotation_period) then
        perform set_config('lock_timeout', '100ms', true);
        execute format('lock table %s, %s in access exclusive mode', v_event, v_tick);
      else
        execute format('lock table %s, %s in access exclusive mode nowait', v_event, v_tick);
      end if;
      execute format(
        'select $3 is null or exists (select from %s e where e.ev_txid >= $1)'
        ' or exists (select from %1$s e where e.ev_txid = any ($2))'
        ' or exists (select from %s t where t.tick_id >= $3)', v_event, v_tick)
      into v_needed
      using pg_snapshot_xmax(v_slowest.tick_snapshot), array(select pg_snapshot_xip(v_slowest.tick_snapshot)), v_slowest.tick_id;
      if v_needed is distinct from false then
        perform pgque._undo_block();
      end if;
      -- A session that has such a row locked may wait for the table: then this call
      -- fails.
      perform pgque._refresh_retries(v_id, v_next, null, 'nowait') where pgque._keyed(v_queue);
      perform pgque._delete_ticks(v_id, v_next);
      execute format('truncate %s, %s', v_event, v_tick);
    end if;
    execute format('select t.tick_event_seq from (%s) t order by t.tick_id limit 1', pgque._ticks_sql(v_id)) into v_floor;
    update pgque.queue q
    set queue_cur_table = v_next, queue_switch_time = pgque.clock(), queue_floor = coalesce(v_floor, q.queue_floor), queue_xid = pgque._mark()
    where q.queue_id = v_id;
    return 1;
  exception
    -- A table that cannot be emptied yet must not stay locked.
    when lock_not_available or sqlstate 'PQ099' then
      return 0;
  end;
end
$$;
comment on function pgque.maint_rotate_tables_step1(text) is
  'Rotates a queue: empties its oldest table and makes it the current one, if rotation_period has passed and every consumer has passed the table''s '
  'messages. Returns 1. Returns 0 if there was nothing to do, a consumer still needs the table, or the table is locked. Errors: PQ001 no such queue; '
  '25000 in a REPEATABLE READ or SERIALIZABLE transaction.';

create or replace function pgque.maint_rotate_tables_step2() returns int
language sql as $$ select 0 $$;
comment on function pgque.maint_rotate_tables_step2() is 'Does nothing and returns 0: PgQ''s second half of a rotation.';

-- Returns the bytes of one leaf of the journal, and of the tables that rotate with it.
create or replace function pgque._journal_size(p_leaf int) returns bigint
language sql volatile as $$
  select sum(pg_catalog.pg_relation_size(('pgque.' || t.kind || '_' || p_leaf)::regclass))
  from (values ('position'), ('settled'), ('tally')) t (kind)
$$;

-- Makes the other leaf of the journal the current one, and notes it for polls.
create or replace function pgque._rotate_journal(p_cur int) returns void
language plpgsql as $$
begin
  update pgque.journal j set journal_cur = 1 - p_cur, journal_flipped_at = pg_catalog.clock_timestamp() where j.journal_id = 1;
  perform pg_catalog.setval('pgque.journal_leaf', 1 - p_cur);
end
$$;

-- Locks the journal's row against transactions with old snapshots (see _journal_leaf),
-- and a leaf, which is to be emptied, against all.  Waits in one of ten calls if a leaf
-- has more than 64 MB.  Then new transactions wait behind this one: those with a lock
-- on the row would never all be gone at once where their transactions overlap.  Returns
-- whether all is locked.  Only the caller's next statement sees what others committed
-- meanwhile.
create or replace function pgque._lock_journal(p_size bigint, p_leaf text default null) returns boolean
language plpgsql set lock_timeout = '100ms' as $$
declare
  v_how  text := 'exclusive mode' || case when p_size <= 67108864 or pg_catalog.random() >= 0.1 then ' nowait' else '' end;
begin
  execute 'lock table pgque.journal in ' || v_how;
  if p_leaf is not null then
    execute pg_catalog.format('lock table %s in access %s', p_leaf, v_how);
  end if;
  return true;
exception
  when lock_not_available then
    return false;
end
$$;

-- Compacts the journal of positions once the current leaf has more than 4 MB, at most
-- once a minute.  One call makes the other leaf the current one.  After its commit, a
-- later call copies, under each subscriber's lock, the rows of subscribers that did not
-- write since, and empties the old leaf.  Locked subscribers are left for the next
-- call.  Where transactions with old snapshots write to both leaves all the time, the
-- journal turns in the call that empties.  Returns 1 if something was done.
create or replace function pgque._compact_journal() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '100ms' set jit = off as $$
declare
  v_cur      int;
  v_flipped  timestamptz;
  v_size     bigint;
  v_old      bigint;
  v_due      boolean;
  v_sub      pgque.subscriber;
begin
  perform pgque._need_read_committed('compaction');
  select j.journal_cur, j.journal_flipped_at into v_cur, v_flipped from pgque.journal j where j.journal_id = 1;
  if not found then
    return 0;
  end if;
  if coalesce(pg_sequence_last_value('pgque.journal_leaf'), 0) <> v_cur then
    perform setval('pgque.journal_leaf', v_cur);   -- a turn of the journal was rolled back, or came from a dump
  end if;
  v_size := pgque._journal_size(v_cur);
  v_old := pgque._journal_size(1 - v_cur);
  -- A restore sees by positions without consumers that the consumers are missing.  So
  -- positions do not stay when the last consumer is unsubscribed.
  v_due := (v_size >= 4194304 or pg_relation_size('pgque.position_' || v_cur) > 0 and not exists (select from pgque.subscriber))
    and v_flipped not between clock_timestamp() - interval '1 minute' and clock_timestamp();
  if v_old = 0 then
    if not v_due or not pgque._lock_journal(v_size) then
      return 0;
    end if;
    -- Another call may have turned the journal meanwhile, and a transaction with an old
    -- snapshot may have written to the other leaf.
    if (select j.journal_cur from pgque.journal j where j.journal_id = 1) <> v_cur or pgque._journal_size(1 - v_cur) > 0 then
      return 0;
    end if;
    perform pgque._rotate_journal(v_cur);
    return 1;
  end if;
  for v_sub in select s.* from pgque.subscriber s where not pgque._has_copied(s.sub_id, v_cur) for no key update skip locked loop
    perform pgque._copy_position(pgque._position(v_sub.sub_id), v_cur);
    perform pgque._copy_leases(v_sub, v_cur);
  end loop;
  if not pgque._lock_journal(greatest(v_size, v_old), format('pgque.position_%s, pgque.settled_%1$s, pgque.tally_%1$s', 1 - v_cur)) then
    return 0;
  end if;
  -- Another call may have emptied the leaf, and turned the journal, meanwhile; and there
  -- may be new subscribers.
  if (select j.journal_cur from pgque.journal j where j.journal_id = 1) <> v_cur
    or exists (select from pgque.subscriber s where not pgque._has_copied(s.sub_id, v_cur))
  then
    return 0;
  end if;
  -- Counters continue.
  insert into pgque.tally (tal_queue, tal_sub, tal_what, tal_count, leaf)
  select t.tal_queue, t.tal_sub, t.tal_what, sum(t.tal_count), v_cur
  from pgque.tally t
  where t.leaf = 1 - v_cur and exists (select from pgque.queue q where q.queue_id = t.tal_queue)
  group by 1, 2, 3;
  -- If a batch has messages in the retry queue, its worker may still use the batch id,
  -- and its outcomes count.
  insert into pgque.position
  select (pgque._in_leaf(p, v_cur)).*
  from (select distinct r.ev_owner, r.ev_batch from pgque.retry_queue r where r.ev_batch is not null) h
  join pgque.position p on p.leaf = 1 - v_cur and p.pos_sub + 0 = h.ev_owner and p.pos_batch = h.ev_batch
  on conflict do nothing;
  insert into pgque.settled (set_batch, set_what, set_ev_id, set_until, leaf)
  select s.set_batch, s.set_what, s.set_ev_id, s.set_until, v_cur
  from (select distinct r.ev_batch from pgque.retry_queue r where r.ev_batch is not null) h
  join pgque.settled s on s.leaf = 1 - v_cur and s.set_batch = h.ev_batch
  on conflict do nothing;
  execute format('truncate pgque.position_%s, pgque.settled_%1$s, pgque.tally_%1$s', 1 - v_cur);
  -- A reader with an old snapshot gets 40001, since this row changed.
  update pgque.journal j set journal_emptied_at = clock_timestamp() where j.journal_id = 1;
  if v_due then
    perform pgque._rotate_journal(v_cur);
  end if;
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Returns whether a leaf has a subscriber's position, and all rows of its open batches.
create or replace function pgque._has_copied(p_sub int, p_cur int) returns boolean
language plpgsql as $$
declare
  v_position  pgque.position := pgque._position_in(p_sub, p_cur);
begin
  return v_position.pos_sub is not null
    and not exists (select from pg_catalog.unnest(v_position.pos_open) o (token) where not pgque._is_copied(p_sub, o.token, p_cur));
end
$$;

-- Moves consumers that lag beyond the queue's retention period forward to the last tick
-- before it, so that a consumer that no longer reads cannot fill the disk.  drop_policy
-- applies to the messages that it misses, and to messages that wait for it in the retry
-- queue for longer.  One call drops some 10,000 messages of a consumer, so that ticks
-- do not wait for long.  Returns 0 only if there is nothing more to do.
create or replace function pgque._retain(p_queue_id int) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue   pgque.queue;
  v_cutoff  timestamptz;
  v_to      pgque.tick;
  v_young   bigint;
  v_sub     pgque.subscriber;
  v_count   int := 0;
begin
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id and not q.queue_restored;
  v_cutoff := pgque.clock() - v_queue.queue_retention_period;
  -- This runs for every queue, so its locks are released at once.
  begin
    -- The last tick before the first young one, by their ids: a clock that was set back
    -- for a while left ticks among the young ones that look old.
    execute format('select min(t.tick_id) from (%s) t where t.tick_time between $1 and $2', pgque._ticks_sql(p_queue_id))
    into v_young using v_cutoff, pgque.clock();
    execute format(
      'select t.* from (%s) t where t.tick_time < $1 and t.tick_id < $2 order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue_id))
    into v_to using v_cutoff, coalesce(v_young, 9223372036854775807);
    perform pgque._undo_block();
  exception
    when sqlstate 'PQ099' then
      null;
  end;
  if v_to.tick_id is not null then
    for v_sub in
      select s.*
      from pgque.subscriber s
      where s.sub_queue = p_queue_id and s.sub_main is null and (pgque._oldest_needed_position(s.sub_id)).pos_tick < v_to.tick_id
      for no key update skip locked
    loop
      v_count := v_count + pgque._move_forward(v_queue, v_sub, v_to);
    end loop;
  end if;
  return v_count + pgque._give_up_retries(v_queue, v_cutoff);
end
$$;

-- Moves one consumer forward, to a tick or so far that it drops some 10,000 messages.
-- If a window is open, it only begins later: how far it was delivered stays known.
-- Returns 1, or 0 if the consumer did not move.
create or replace function pgque._move_forward(p_queue pgque.queue, p_sub pgque.subscriber, p_to pgque.tick) returns int
language plpgsql as $$
declare
  v_position  pgque.position := pgque._position(p_sub.sub_id);
  v_dropped   bigint := 0;
  v_left      bigint;
  v_upto      pgque.tick := p_to;
  v_mine      bigint[];
  v_held      record;
  v_moved     boolean := false;
begin
  -- Leased messages may still be finished, but not from the log.  Batches are locked
  -- together, since a server has no room for thousands of locks.
  v_mine := pgque._try_lock_batches(p_sub, array(select h.token from pgque._open_batches(p_sub.sub_id) h where (h.lease).pos_tick < p_to.tick_id limit 200));
  for v_held in select h.token, h.lease, h.until from pgque._open_batches(p_sub.sub_id) h where h.token = any (v_mine) loop
    if exists (select from pgque._states(p_sub.sub_id, array[v_held.token]) s where s.place = 'log') then
      if p_sub.sub_role <> 'pool' then
        -- A batch whose lease has no end is not kept for longer than other messages.  A
        -- client that acknowledges a dropped message gets the answer that it has its
        -- outcome.
        v_dropped := pgque._give_up_to(p_queue, p_sub, v_held.lease, p_to, 10000);
        v_position.pos_skipped := v_position.pos_skipped + v_dropped;
      end if;
      if v_dropped < 10000 then
        v_left := pgque._move_to_retry(p_sub, v_held.lease, v_held.until);
        -- A batch without messages is finished: ack() of it returns 0.
        perform pgque._record(v_held.token, 'closed') where v_left = 0 and p_sub.sub_role <> 'pool';
      end if;
      v_moved := true;
    end if;
  end loop;
  v_position := pgque._next_from(v_position);
  v_position.pos_open := pgque._still_open(p_sub, v_position.pos_open);
  if v_position.pos_tick < p_to.tick_id then
    v_moved := true;
    if v_position.pos_next_tick < v_upto.tick_id then
      v_upto := pgque._tick(p_queue.queue_id, v_position.pos_next_tick);
    end if;
    if v_upto.tick_event_seq - v_position.pos_event_seq > 10000 then
      v_upto := pgque._tick(p_queue.queue_id, pgque.next_tick(p_queue.queue_name, v_position.pos_tick, 10000, null, v_upto.tick_id));
    end if;
    v_position.pos_skipped := v_position.pos_skipped + pgque._give_up_to(p_queue, p_sub, v_position, v_upto);
    if v_upto.tick_id < v_position.pos_next_tick then
      v_position.pos_tick := v_upto.tick_id;
      v_position.pos_snapshot := v_upto.tick_snapshot;
      v_position.pos_event_seq := v_upto.tick_event_seq;
    else
      v_position := pgque._at_tick(v_position, v_upto);
    end if;
  end if;
  if v_moved then
    perform pgque._append_position(v_position);
  end if;
  return v_moved::int;
end
$$;

-- Gives up the messages of a position's window or batch up to a tick that have no
-- outcome.  Returns how many, at most p_most.
create or replace function pgque._give_up_to(
  p_queue pgque.queue, p_sub pgque.subscriber, p_position pgque.position, p_to pgque.tick, p_most int default null
) returns bigint
language plpgsql as $$
declare
  v_rows   text;
  v_keyed  pgque.event[];
  v_claim  record;
  v_event  pgque.event;
  v_ids    bigint[];
begin
  v_rows := pg_catalog.format('select * from (%s) e order by e.ev_id limit %L', pgque._undone_sql(p_sub,
    case when p_position.pos_next_tick < p_to.tick_id then p_position else pgque._with_window(p_position, p_to) end), p_most);
  if pgque._keyed(p_queue) then
    -- As in receive(): a message whose body is being replaced goes to the retry queue.
    execute pg_catalog.format('select array_agg(%s) from (%s) e where e.ev_key is not null', pgque._slim('null'), v_rows) into v_keyed;
    v_claim := pgque._claim(p_queue, v_keyed);
    execute pg_catalog.format(
      'insert into pgque.retry_queue select (pgque._as_retry(e, $1, 0, pgque.clock(), null, null)).* from (%s) e'
      ' where (e.ev_id in (select pg_catalog.unnest((select $2)))) is true on conflict do nothing', pgque._renewed_sql(p_queue.queue_id, v_rows))
    using p_sub, v_claim.busy;
    -- A sender with an older snapshot does not see that they are dropped.
    perform pgque._seal(p_queue.queue_id, array(
      select r from pg_catalog.unnest(v_claim.rows) r where (r.ev_id in (select pg_catalog.unnest((select v_claim.busy || v_claim.gone)))) is not true));
    v_rows := pgque._renewed_sql(p_queue.queue_id, pg_catalog.format(
      'select e.* from (%s) e where e.ev_id not in (select b.id from pg_catalog.unnest(%L::bigint[]) b (id))', v_rows, v_claim.busy || v_claim.gone));
  end if;
  for v_event in execute pg_catalog.format('select e.* from (%s) e order by e.ev_id', v_rows) loop
    v_ids := v_ids || v_event.ev_id;
    if v_event.ev_expires <= pgque.clock() then
      perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'expired', 1);
    else
      perform pgque._give_up(p_queue, p_sub, pgque._as_retry(v_event, p_sub, coalesce(v_event.ev_retry, 0), null, null, null), 'retention period passed');
    end if;
  end loop;
  perform pgque._record(p_position.pos_batch, 'outcome', v_ids) where p_position.pos_batch is not null;
  return coalesce(pg_catalog.cardinality(v_ids), 0);
end
$$;

-- Gives up messages of the retry queue that could be delivered since before p_cutoff.  The
-- time counts from when a message was due, and not from the send: a message with a long
-- delay keeps its retries.  A lease without an end does not keep a message: then the time
-- counts from the delivery.  Returns 1 if it gave up 10,000, the most for one call.
create or replace function pgque._give_up_retries(p_queue pgque.queue, p_cutoff timestamptz) returns int
language plpgsql as $$
declare
  v_held   bigint[];
  v_aside  record;
  v_item   pgque.retry_queue;
  v_sub    pgque.subscriber;
  v_count  int := 0;
begin
  v_held := array(
    select h.ev_batch
    from (
      select distinct e.ev_owner, e.ev_batch from pgque.retry_queue e
      where e.ev_queue = p_queue.queue_id and e.ev_time < p_cutoff and e.ev_retry_after = 'infinity'
    ) h
    where coalesce((pgque._lease(h.ev_owner, h.ev_batch)).pos_time, '-infinity') < p_cutoff);
  v_aside := pgque._claim_retries(p_queue.queue_id, array(
    select pgque._slim_retry(e)
    from (
      select e.* from pgque.retry_queue e
      where e.ev_queue = p_queue.queue_id and e.ev_retry_after < p_cutoff and e.ev_owner <> 0
        and e.ev_key is not null and e.ev_receives = 0
      limit 10000
      for update skip locked
    ) e));
  for v_item in
    with found as materialized (
      select e.ctid from pgque.retry_queue e
      where e.ev_queue = p_queue.queue_id and e.ev_owner <> 0 and (e.ev_retry_after < p_cutoff or e.ev_batch = any (v_held))
        and (e.ev_key is null or e.ev_receives > 0
          or (e.ev_owner, e.ev_id) in (select f.owner, f.id from unnest(v_aside.owners, v_aside.ids) f (owner, id)))
      limit 10000
      for update skip locked
    )
    delete from pgque.retry_queue r using found f
    where r.ctid = f.ctid
    returning r.*
  loop
    v_count := v_count + 1;
    select s.* into v_sub from pgque.subscriber s where s.sub_id = v_item.ev_owner;
    if found then
      perform pgque._give_up(p_queue, v_sub, v_item, 'retention period passed');
    end if;
  end loop;
  return (v_count = 10000)::int;
end
$$;

-- Returns the query for the rows of a position's slice or batch that have no outcome.
-- p_and is one more condition on e.
create or replace function pgque._undone_sql(p_sub pgque.subscriber, p_pos pgque.position, p_and text default '') returns text
language sql stable as $$
  select pgque._rows_sql(p_sub.sub_queue, pgque._slice_condition(p_sub.sub_id, p_pos.pos_done_id, p_pos.pos_last_id)
    || coalesce(' and not (' || pgque._has_outcome_sql(p_pos.pos_batch) || ')', '') || p_and || pgque._not_cancelled_sql(p_sub.sub_queue, p_pos),
    null, pgque._xids(p_pos.pos_snapshot, p_pos.pos_next_snapshot))
$$;

-- Returns the query for the rows that a subscriber has ahead of it in a snapshot: not
-- passed by its position, not delivered from its window, and without an outcome in its
-- open batch.  p_and is one more condition on e; p_tids as for _rows_sql(); p_xids: only
-- rows of these transactions.
create or replace function pgque._unfinished_sql(
  p_sub pgque.subscriber, p_position pgque.position, p_snapshot pg_snapshot, p_and text default '', p_tids text[] default null,
  p_xids int8multirange default '{(,)}'
) returns text
language sql stable as $$
  select pgque._rows_sql(p_sub.sub_queue, pg_catalog.format('(e.ev_owner is null or e.ev_owner = %s)', p_sub.sub_id)
    || coalesce(' and not (e.ev_id <= ' || p_position.pos_done_id
      || pg_catalog.format(' and pg_catalog.pg_visible_in_snapshot(e.ev_txid, %L))', p_position.pos_next_snapshot), '')
    || coalesce(' and not (' || pgque._has_outcome_sql(p_position.pos_batch)
      || pg_catalog.format(' and pg_catalog.pg_visible_in_snapshot(e.ev_txid, %L))', p_position.pos_next_snapshot), '') || p_and || pgque._not_cancelled_sql(p_sub.sub_queue, p_position),
    p_tids, pgque._xids(p_position.pos_snapshot, p_snapshot) * p_xids)
$$;

-- Locks a queue's consumers and batches until the transaction ends.  A session that
-- works with a batch may receive next, which needs the consumer.  So the function does
-- not wait while it has the consumers locked: it releases them first.
create or replace function pgque._lock_consumers(p_queue_id int) returns void
language plpgsql as $$
declare
  v_wait  text := pg_catalog.current_setting('lock_timeout');
  v_end   timestamptz := pg_catalog.clock_timestamp() + coalesce(nullif(v_wait::interval, '0'), '1 minute');
begin
  loop
    begin
      -- A delivery whose transaction stays open holds its consumer.
      perform pg_catalog.set_config('lock_timeout', greatest(pg_catalog.ceil(extract(epoch from v_end - pg_catalog.clock_timestamp()) * 1000), 1) || 'ms', true);
      perform from pgque.subscriber s where s.sub_queue = p_queue_id order by s.sub_main nulls first, s.sub_id for no key update;
      if pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque.batches'), p_queue_id) then
        perform pg_catalog.set_config('lock_timeout', v_wait, true);
        return;
      end if;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' or lock_not_available then
        null;
    end;
    -- A session that waits for this lock blocks others from their batches.
    begin
      perform pg_catalog.set_config('lock_timeout', '50ms', true);
      perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.batches'), p_queue_id);
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        perform pg_catalog.pg_sleep(0.02);
    end;
    if pg_catalog.clock_timestamp() > v_end then
      perform pgque._fail('lock_not_available', pg_catalog.format('an open transaction holds a consumer or a batch of queue %I', (
        select q.queue_name from pgque.queue q where q.queue_id = p_queue_id)), 'Try again after it commits, or end its session.');
    end if;
  end loop;
end
$$;

-- The rows stay in the log until rotation.  So that nobody reads them again, the purge
-- gives all stored ticks the snapshot of its own one: windows that begin or end there have
-- no purged message.  The ticks keep their ids, for readers with offsets of their own.
create or replace function pgque.purge(queue_name text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_sub    pgque.subscriber;
  v_pos    pgque.position;
  v_last   pgque.tick;
  v_count  bigint;
begin
  perform pgque._need_read_committed('purge()');
  perform pgque._rebase(v_queue.queue_id);
  perform pgque._wait_for_keyed_sends(v_queue);
  -- Calls that move a consumer to a stored tick wait here; those with an older snapshot get
  -- 40001, since the row changes.
  update pgque.queue q set queue_xid = pgque._queue_xid(q) where q.queue_id = v_queue.queue_id;
  perform pgque._no_queue(v_queue.queue_name) where not found;
  perform pgque._lock_consumers(v_queue.queue_id);
  v_count := pgque._depth(v_queue.queue_id);
  perform pg_advisory_xact_lock(hashtext('pgque.tick'), v_queue.queue_id);
  v_queue := pgque._queue(v_queue.queue_name);
  v_last := pgque._last_tick(v_queue);
  -- A block with an exception handler is a subtransaction, which _store_tick() needs, and
  -- the same counts for the ticks that get the values of this one.
  begin
    perform pgque._store_tick(v_queue, pgque._next_tick_id(v_queue, v_last.tick_id), pgque.clock(), pgque._tick_snapshot(), null, false);
    v_last := pgque._last_tick(v_queue);
    for n in 0..2 loop
      execute format('update pgque.tick_%s_%s t set tick_snapshot = $1, tick_event_seq = $2 where t.tick_id < $3', v_queue.queue_id, n)
      using v_last.tick_snapshot, v_last.tick_event_seq, v_last.tick_id;
    end loop;
  exception
    when sqlstate 'PQ099' then
      raise;
  end;
  for v_sub in select s.* from pgque.subscriber s where s.sub_queue = v_queue.queue_id and s.sub_main is null loop
    v_pos := pgque._position(v_sub.sub_id);
    perform pgque._record(o.token, 'closed') from unnest(v_pos.pos_open) o (token);
    v_pos.pos_open := '{}';
    v_pos.pos_lapse := null;
    v_pos.pos_high := greatest(v_pos.pos_high, v_pos.pos_next_tick);
    perform pgque._append_position(pgque._at_tick(v_pos, v_last));
  end loop;
  -- A message that another session has locked keeps the outcome that the other session
  -- gives it.
  with found as materialized (
    select e.ctid from pgque.retry_queue e where e.ev_queue = v_queue.queue_id for update skip locked
  )
  delete from pgque.retry_queue r using found f
  where r.ctid = f.ctid;
  perform pgque._record_action('purge', v_queue.queue_name, jsonb_build_object('messages', v_count));
  return v_count;
end
$$;
comment on function pgque.purge(text, pgque.caller) is
  'Removes every committed message of a queue: pending, delayed and leased messages, and retries. No call can read them again, also not for a '
  'consumer that subscribes at earliest or is moved back. Dead letters and the archive stay. For a batch that was open, ack() then returns 0 or '
  'false. Rotation later empties the tables on disk. Returns the number of messages that the slowest consumer had ahead of it. Errors: PQ001 no such '
  'queue; 25000 not READ COMMITTED.';

create or replace function pgque.maint_lapsed() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub    pgque.subscriber;
  v_queue  pgque.queue;
  v_pos    pgque.position;
  v_rows   pgque.retry_queue[];
  v_count  int := 0;
begin
  for v_sub in select s.* from pgque.subscriber s where s.sub_role = 'pool' loop
    select q.* into v_queue from pgque.queue q where q.queue_id = v_sub.sub_queue;
    continue when v_queue.queue_restored is not false;
    v_pos := pgque._position(v_sub.sub_id);
    if v_pos.pos_lapse <= pgque.clock() and v_queue.queue_max_receive_attempts = 1 then
      perform from pgque.subscriber s where s.sub_id = v_sub.sub_id for no key update skip locked;
      continue when not found;
      perform pgque._append_position(pgque._collect_expired(v_sub, pgque._next_from(pgque._position(v_sub.sub_id)), pgque.clock()));
    end if;
    v_rows := array(
      select pgque._slim_retry(r)
      from (
        select r.* from pgque.retry_queue r
        where r.ev_owner = v_sub.sub_id and r.ev_retry_after <= pgque.clock() and r.ev_receives >= v_queue.queue_max_receive_attempts
        limit 10000 - v_count
        for update skip locked
      ) r);
    perform pgque._choose_retries(v_queue, v_sub, v_rows, pgque.clock());
    v_count := v_count + cardinality(v_rows);
    exit when v_count >= 10000;
  end loop;
  return v_count;
end
$$;
comment on function pgque.maint_lapsed() is
  'Part of maint(): gives up messages whose last lease expired and whose attempts are used up, at most 10,000, also if no worker receives for the '
  'consumer. Returns their number.';

-- Empties side tables without live rows, so that not even their dead rows stay.  A
-- table in use is skipped.
create or replace function pgque._empty_side_tables() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_count  int := 0;
begin
  v_count := v_count + pgque._compact_idempotency();
  -- Retries of consumers that no longer exist.  Without any consumer they may not be
  -- loaded from a dump yet.
  delete from pgque.retry_queue r
  where exists (select from pgque.subscriber) and r.ev_owner in (
    with recursive owner (id) as (
      select min(o.ev_owner) from pgque.retry_queue o
      union all
      select (select min(o.ev_owner) from pgque.retry_queue o where o.ev_owner > w.id) from owner w where w.id is not null
    )
    select w.id from owner w where w.id > 0 and not exists (select from pgque.subscriber s where s.sub_id = w.id));
  -- Delayed messages that were sent while their queue was dropped, and what a drop with
  -- an old snapshot left behind.
  delete from pgque.retry_queue r
  where r.ev_queue in (
    with recursive queue (id) as (
      select min(o.ev_queue) from pgque.retry_queue o
      union all
      select (select min(o.ev_queue) from pgque.retry_queue o where o.ev_queue > w.id) from queue w where w.id is not null
    )
    select w.id from queue w where pgque._is_dropped(w.id));
  delete from pgque.dead_letter d
  where d.dl_queue_id in (
    with recursive queue (id) as (
      select min(o.dl_queue_id) from pgque.dead_letter o
      union all
      select (select min(o.dl_queue_id) from pgque.dead_letter o where o.dl_queue_id > w.id) from queue w where w.id is not null
    )
    select w.id from queue w where pgque._is_dropped(w.id));
  delete from pgque.subscriber s where not exists (select from pgque.queue q where q.queue_id = s.sub_queue) and pgque._is_dropped(s.sub_queue);
  delete from pgque.queue_right r where not exists (select from pgque.queue q where q.queue_id = r.right_queue) and pgque._is_dropped(r.right_queue);
  delete from pgque.bad_record b where not exists (select from pgque.subscriber s where s.sub_id = b.bad_sub);
  perform pgque._tidy_rights();
  v_count := v_count + pgque._empty('pgque.bad_record', true) + pgque._empty('pgque.retry_queue', true) + pgque._empty('pgque.dead_letter', true);
  -- The map is a cache: a window that is still open gets a new one.
  if pg_relation_size('pgque.window_map') > 268435456 or exists (select from pgque.window_map) and not exists (
    select from pgque.subscriber s
    cross join lateral pgque._position(s.sub_id) p
    where (pgque._next_from(p)).pos_done_id is not null
      -- A reader of offsets stands before its window until it has read all of it.
      or s.sub_offsets and exists (select from pgque.window_map m where m.map_queue = s.sub_queue and m.map_from = p.pos_tick))
  then
    v_count := v_count + pgque._empty('pgque.window_map', false);
  end if;
  return v_count;
end
$$;

-- Returns whether a queue was dropped.  Tables without a row of their queue may be those
-- of a dump that is being loaded.
create or replace function pgque._is_dropped(p_queue_id int) returns boolean
language sql as $$
  select not exists (select from pgque.queue q where q.queue_id = p_queue_id)
    and (exists (select from pgque.dropped_queue d where d.queue_id = p_queue_id) or pg_catalog.to_regclass('pgque.tick_' || p_queue_id || '_0') is null)
$$;

-- Truncates a table that has pages, if its lock is free and, with p_only_if_empty, if it has
-- no row.  This is checked before the lock is taken, since others would wait for it, and
-- again under the lock.
create or replace function pgque._empty(p_table regclass, p_only_if_empty boolean) returns int
language plpgsql as $$
declare
  v_check  text := pg_catalog.format('select not (%L and exists (select from %s))', p_only_if_empty, p_table);
  v_may    boolean := pg_catalog.pg_relation_size(p_table) > 0;
begin
  if v_may then
    execute v_check into v_may;
  end if;
  if v_may then
    execute pg_catalog.format('lock table %s in access exclusive mode nowait', p_table);
    execute v_check into v_may;
  end if;
  if v_may then
    execute pg_catalog.format('truncate %s', p_table);
  end if;
  return v_may::int;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Returns whether it is time to do something again that was done at p_last; a null
-- interval means never.  A p_last in the future counts as due: the clock was set back.
create or replace function pgque._is_due(p_last timestamptz, p_every interval) returns boolean
language sql volatile as $$ select p_every is not null and (pgque.clock() < p_last or pgque.clock() >= p_last + p_every) $$;

-- Returns the parts of maint(), in this order, and whether each runs for each queue.
create or replace function pgque._maint_functions(out func_name text, out each_queue boolean) returns setof record
language sql immutable as $$
  values ('pgque.maint_retry_events', false), ('pgque.maint_recurring', false), ('pgque.maint_lapsed', false), ('pgque.maint_expire', false), ('pgque.maint_lags', false),
    ('pgque.maint_retain', true), ('pgque.maint_rotate_tables_step1', true),
    ('pgque.maint_tables', false)
$$;

create or replace function pgque.maint_operations(out func_name text, out func_arg text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query
    select f.func_name, q.queue_name
    from pgque._maint_functions() with ordinality f (func_name, each_queue, n)
    left join pgque.queue q on f.each_queue
    where not f.each_queue
      or q.queue_id is not null
        and (f.func_name <> 'pgque.maint_rotate_tables_step1' or pgque._is_due(q.queue_switch_time, q.queue_rotation_period))
    order by f.n, q.queue_id;
end
$$;
comment on function pgque.maint_operations() is 'Returns the operations of maint(), one call a row, for a scheduler that commits after each call.';

create or replace function pgque.maint_retain(queue_name text) returns int
language sql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
  select pgque._retain((pgque._queue($1)).queue_id)
$$;
comment on function pgque.maint_retain(text) is
  'Part of maint(): moves consumers that lag beyond the queue''s retention_period forward, past messages that they never received, and returns the '
  'number of consumers moved. get_consumer_info() counts the skipped messages. Errors: PQ001 no such queue.';

create or replace function pgque.maint_tables() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_part   text;
  v_lacks  text;
  v_done   int;
  v_count  int := 0;
begin
  if pgque._is_loading() then
    -- One warning a round, whatever the number of queues is.
    v_lacks := pgque._lacking();
    if v_lacks is not null then
      raise warning using message = 'pgque: maintenance waits for the end of a restore: ' || v_lacks, hint = pgque._restore_advice();
    end if;
    return 0;
  elsif not pg_try_advisory_xact_lock(hashtext('pgque.rotate'), 0) then
    return 0;
  end if;
  -- A failure in one part must not stop the others.  _drop_leaves is last: all others
  -- use the tables that it locks.
  foreach v_part in array array['_note_complete_later', '_copy_options', '_compact_journal', '_compact_stage', '_compact_epochs', '_compact_recurring', '_rotate_history', '_empty_side_tables', '_trim_cron_history', '_fill_archive', '_drop_archive_leaves', '_drop_leaves'] loop
    begin
      execute format('select pgque.%I()', v_part) into v_done;
      v_count := v_count + v_done;
    exception
      when invalid_transaction_state then
        raise;
      when others then
        raise warning 'pgque: % failed: % (%)', v_part, sqlerrm, sqlstate;
    end;
  end loop;
  return v_count;
end
$$;
comment on function pgque.maint_tables() is
  'Part of maint(): maintains the tables that all queues share. Returns how many steps there were to do; 0 when all is done.';

-- Runs one of maint_operations().  A failure is reported, and the next call tries
-- again.
create or replace function pgque._maint_operation(p_func text, p_arg text) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '1s' set jit = off as $$
declare
  v_done  int;
begin
  if not exists (select from pgque._maint_functions() f where f.func_name = p_func) then
    perform pgque._fail('PQ005', format('not a maintenance operation: %L', p_func), 'List the operations: select * from pgque.maint_operations();');
  end if;
  execute format('select %s(%s)', p_func, quote_literal(p_arg)) into v_done;
  return v_done;
exception
  when invalid_transaction_state or sqlstate 'PQ005' then
    raise;
  when others then
    raise warning 'pgque: % failed for %: % (%)', p_func, coalesce(p_arg, 'all queues'), sqlerrm, sqlstate;
    return 0;
end
$$;

-- A rotation keeps a dozen locks until the transaction ends.  If the server has no room
-- for all queues, the next call does the rest.
create or replace function pgque.maint() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_room   bigint := greatest(pgque._lock_room() / 16, 1);
  v_count  int;
  v_op     record;
  v_done   int;
begin
  perform pgque._need_read_committed('maintenance');
  v_count := coalesce(pgque._forward_letters(), 0);
  for v_op in
    select o.func_name, o.func_arg, o.func_name = 'pgque.maint_rotate_tables_step1' as rotates, o.func_name = 'pgque.maint_retain' as retains
    from pgque.maint_operations() o
  loop
    continue when v_op.rotates and v_room = 0;
    loop
      v_done := pgque._maint_operation(v_op.func_name, v_op.func_arg);
      v_count := v_count + v_done;
      exit when v_done = 0 or not v_op.retains;
    end loop;
    v_room := v_room - case when v_op.rotates then v_done else 0 end;
  end loop;
  return v_count;
end
$$;
comment on function pgque.maint() is
  'Does all maintenance now: dead letters that go to other queues, delayed messages, retention, rotation, compaction. It is for a scheduler that does not run the loop. Two calls at '
  'once do no harm. Returns how many steps there were to do. Errors: 25000 in a REPEATABLE READ or SERIALIZABLE transaction.';
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
-- ---------------------------------------------------------------------------
-- observe: information, metrics, health
-- ---------------------------------------------------------------------------

-- Returns the position of a subscriber as PgQ's view shows it.
create or replace function pgque._position_of(p_sub int) returns pgque.position
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_sub       pgque.subscriber;
  v_position  pgque.position := pgque._position(p_sub);
  v_time      timestamptz := v_position.pos_time;
begin
  select s.* into v_sub from pgque.subscriber s where s.sub_id = p_sub;
  v_position := case when v_sub.sub_main is null then pgque._current_position(v_sub, v_position) else pgque._batch_of_worker(v_sub) end;
  v_position.pos_time := v_time;
  v_position.pos_until := null;   -- not every client can read an infinite time
  v_position.pos_lapse := null;
  if v_sub.sub_role = 'pool' then
    v_position.pos_batch := null;
  end if;
  return v_position;
end
$$;

-- Returns the open batch of a subconsumer, or no row.
create or replace function pgque._batch_of_worker(p_member pgque.subscriber) returns pgque.position
language plpgsql as $$
declare
  v_main  pgque.subscriber;
begin
  select s.* into v_main from pgque.subscriber s where s.sub_id = p_member.sub_main;
  return pgque._lease(v_main.sub_id, pgque._open_batch_of(v_main, pgque._position(v_main.sub_id), p_member.sub_worker));
end
$$;

create or replace view pgque.subscription as
select s.sub_id, s.sub_queue, s.sub_consumer, p.pos_tick as sub_last_tick, p.pos_time as sub_active,
  p.pos_batch as sub_batch, p.pos_next_tick as sub_next_tick, s.sub_role, s.sub_main, s.sub_worker,
  case when s.sub_keyed then s.sub_key_concurrency end as sub_key_concurrency
from pgque.subscriber s
cross join lateral pgque._position_of(s.sub_id) p;
comment on view pgque.subscription is 'Lists the consumers of all queues and their workers, and how far each has read.';
comment on column pgque.subscription.sub_id is 'Number of the subscription.';
comment on column pgque.subscription.sub_queue is 'The queue: queue.queue_id.';
comment on column pgque.subscription.sub_consumer is 'The consumer: consumer.co_id.';
comment on column pgque.subscription.sub_last_tick is 'The tick up to which the consumer has finished; NULL for a worker without a batch.';
comment on column pgque.subscription.sub_active is 'When the consumer last received, finished or was touched.';
comment on column pgque.subscription.sub_batch is 'The open batch, or NULL.';
comment on column pgque.subscription.sub_next_tick is 'The end of the window that the consumer reads, or NULL.';
comment on column pgque.subscription.sub_role is 'normal, pool (with workers that lease messages), coop_main (with subconsumers) or coop_member (a subconsumer).';
comment on column pgque.subscription.sub_main is 'For a subconsumer, the sub_id of its consumer.';
comment on column pgque.subscription.sub_worker is 'For a subconsumer, its name.';
comment on column pgque.subscription.sub_key_concurrency is 'How many messages of one key its workers may have at a time; NULL: no limit. Set by set_key_concurrency().';

-- Returns the name of a table of a queue that is missing, or null.  The loop skips such
-- a queue.
create or replace function pgque._missing_leaf(p_queue_id int) returns text
language plpgsql stable as $$
begin
  return (select min(l.leaf) from pgque._leaves(p_queue_id) l where pg_catalog.to_regclass(l.leaf) is null);
end
$$;

-- Returns whether a queue was dropped since its row was read.  Its tables may stay for
-- a while.
create or replace function pgque._was_dropped(p_queue_id int) returns boolean
language plpgsql as $$
begin
  return not exists (select from pgque.queue q where q.queue_id = p_queue_id) or pgque._missing_leaf(p_queue_id) is not null;
end
$$;

-- Returns the sessions that hold locks on a queue's tables, or with p_alone exclusive
-- ones; null if there are none.
create or replace function pgque._lockers(p_queue_id int, p_alone boolean) returns text
language sql stable as $$
  select pg_catalog.string_agg(distinct coalesce('pid ' || l.pid, 'a prepared transaction'), ', ')
  from pg_catalog.pg_locks l
  join pgque._leaves(p_queue_id) f on l.relation = pg_catalog.to_regclass(f.leaf)
  where l.locktype = 'relation' and l.granted and l.pid is distinct from pg_catalog.pg_backend_pid()
    and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
    and (l.mode = 'AccessExclusiveLock' or not p_alone)
$$;

-- Shortens lock_timeout for a function that reads every queue: it waits only briefly
-- for the tables of a locked one, and returns what it knows without them.  The caller
-- undoes its block, and this setting with it.
create or replace function pgque._shorten_lock_timeout() returns void
language sql as $$ select pg_catalog.set_config('lock_timeout', '200ms', true) $$;

-- Returns how many messages a second were sent to a queue: since its last tick that is a
-- minute old, found backwards, since a busy queue has too many ticks to read, or since
-- the first tick of a younger queue.  p_last: the last tick.
create or replace function pgque._rate(p_queue pgque.queue, p_last pgque.tick) returns double precision
language plpgsql as $$
declare
  v_before  timestamptz := pgque.clock() - interval '1 minute';
  v_tick    pgque.tick;
begin
  if p_last.tick_time <= v_before then
    return 0;
  end if;
  execute pg_catalog.format('select t.* from pgque.tick_%s_%s t where t.tick_time <= $1 order by t.tick_id desc limit 1', p_queue.queue_id, p_queue.queue_cur_table)
  into v_tick using v_before;
  if v_tick.tick_id is null then
    execute pg_catalog.format('select t.* from (%s) t where t.tick_time <= $1 order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue.queue_id))
    into v_tick using v_before;
  end if;
  if v_tick.tick_id is null then
    execute pg_catalog.format('select t.* from (%s) t order by t.tick_id limit 1', pgque._ticks_sql(p_queue.queue_id)) into v_tick;
  end if;
  -- For a second at least: a burst after the creation is no rate.
  return (p_last.tick_event_seq - v_tick.tick_event_seq) / greatest(extract(epoch from pgque.clock() - v_tick.tick_time), 1);
end
$$;

-- These functions read each queue with the same statements.  One plan for all queues
-- takes less time than one plan for each (plan_cache_mode).  The plan has to use
-- indexes: one queue may have nearly all retries and dead letters.  Without sequential
-- scans even small tables seem to be worth parallel workers, which would be started for
-- each queue.
create or replace function pgque.get_queue_info(
  i_queue_name text default null, caller pgque.caller default current_user,
  out queue_name text, out queue_ntables int, out queue_cur_table int, out queue_rotation_period interval,
  out queue_switch_time timestamptz, out queue_external_ticker boolean, out queue_ticker_paused boolean,
  out queue_ticker_max_count int, out queue_ticker_max_lag interval, out queue_ticker_idle_period interval,
  out ticker_lag interval, out ev_per_sec double precision, out ev_new bigint, out last_tick_id bigint,
  out queue_paused boolean, out queue_max_retries int, out queue_uid uuid
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queue  pgque.queue;
  v_last   pgque.tick;
  v_rate   double precision;
  v_seq    bigint;
begin
  if $1 is not null then
    i_queue_name := (pgque._queue($1, caller, 'see')).queue_name;
  end if;
  for v_queue in
    select q.* from pgque.queue q
    where ($1 is null and pgque._may(caller, 'see', q.queue_id)) or q.queue_name = $1 collate "default"
    order by q.queue_name
  loop
    v_last := null;
    v_rate := null;
    begin
      perform pgque._shorten_lock_timeout();
      if pgque._missing_leaf(v_queue.queue_id) is null then
        v_last := pgque._last_tick(v_queue);
        v_rate := pgque._rate(v_queue, v_last);
      end if;
      v_seq := coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0);
      if not exists (select from pgque.queue q where q.queue_id = v_queue.queue_id) then
        perform pgque._no_queue(v_queue.queue_name);
      end if;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        v_last := null;
        v_rate := null;
      when others then
        if $1 is not null or not pgque._was_dropped(v_queue.queue_id) then
          raise;
        end if;
        continue;   -- the queue was dropped meanwhile
    end;
    return query
      select v_queue.queue_name, v_queue.queue_ntables, v_queue.queue_cur_table, v_queue.queue_rotation_period, v_queue.queue_switch_time,
        v_queue.queue_external_ticker, v_queue.queue_ticker_paused, v_queue.queue_ticker_max_count, v_queue.queue_ticker_max_lag,
        v_queue.queue_ticker_idle_period, pgque.clock() - v_last.tick_time,
        v_rate, v_seq - v_last.tick_event_seq, v_last.tick_id, v_queue.queue_paused, v_queue.queue_max_retries, v_queue.queue_uid;
  end loop;
end
$$;
comment on function pgque.get_queue_info(text, pgque.caller) is
  'Returns one row for each queue, or for one queue: settings, ticker_lag (age of the last tick), ev_per_sec (over the last minute, or since the queue was created), ev_new (events '
  'since the last tick), last_tick_id. Values are NULL if another session has a table of the queue locked. Errors: PQ001 no such queue.';

-- Returns the subscribers of a queue, or those of a name, each with its newest
-- position.  Both leaves in one statement: a position may move from one to the other.
-- Batches that were closed since are not in pos_open: most consumers have no other, and
-- the state of a batch takes longer to find out than all else.
create or replace function pgque._positions(p_queue_id int, p_name text default null) returns table (sub pgque.subscriber, pos pgque.position)
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_found  record;
begin
  for v_found in
    select s as sub, case when n.pos_sub is null then pgque._position(s.sub_id) else row(n.*)::pgque.position end as pos,
      case when pg_catalog.cardinality(n.pos_open) > 0 then array(
        select o.id
        from pg_catalog.unnest(n.pos_open) with ordinality o (id, n)
        where not exists (select from pgque.settled c where c.set_batch = o.id and c.set_ev_id = 0 and c.set_what = 'closed')
        order by o.n) end as open
    from pgque.subscriber s
    left join lateral (
      select p.* from pgque.position p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1
    ) n on true
    where s.sub_queue = p_queue_id and (p_name is null or pgque._subscriber_name(s) = p_name)
  loop
    sub := v_found.sub;
    pos := v_found.pos;
    pos.pos_open := coalesce(v_found.open, pos.pos_open);
    return next;
  end loop;
end
$$;

-- Returns when a message was sent that a snapshot shows and a subscriber has not
-- finished; null if there is none.  Any such message will do: one index lookup.
create or replace function pgque._unfinished(p_sub pgque.subscriber, p_pos pgque.position, p_snapshot pg_snapshot) returns timestamptz
language plpgsql set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_sent  timestamptz;
begin
  execute pg_catalog.format('select e.ev_time from (%s) e limit 1', pgque._unfinished_sql(p_sub, p_pos, p_snapshot,
    ' and (e.ev_expires is null or e.ev_expires > $1)'))
  into v_sent using pgque.clock();
  return v_sent;
end
$$;

-- Returns since when a message in the log is pending for a subscriber: the time of the
-- first tick that shows one; null if there is none.  A message that no tick shows yet
-- is pending since the last tick, or since it was sent if that is later.  The later of
-- two ticks shows all that the earlier one shows.  So a binary search over tick ids
-- finds the first.
create or replace function pgque._pending_since(p_sub pgque.subscriber, p_pos pgque.position, p_last pgque.tick) returns timestamptz
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_low    bigint := p_pos.pos_tick;
  v_high   bigint := p_last.tick_id;
  v_since  timestamptz := p_last.tick_time;
  v_sent   timestamptz;
  v_mid    bigint := v_low + 1;   -- this is the tick, if messages come without a pause
  v_tick   pgque.tick;
begin
  v_sent := pgque._unfinished(p_sub, p_pos, pg_catalog.pg_current_snapshot());
  if v_sent is null then
    return null;   -- most consumers are here
  elsif p_pos.pos_tick = p_last.tick_id or pgque._unfinished(p_sub, p_pos, p_last.tick_snapshot) is null then
    return greatest(v_since, v_sent);
  end if;
  while v_high - v_low > 1 loop
    execute pg_catalog.format('select t.* from (%s) t where t.tick_id >= $1 order by t.tick_id limit 1', pgque._ticks_sql(p_sub.sub_queue))
    into v_tick using v_mid;
    if v_tick.tick_id >= v_high then
      v_high := v_mid;
    elsif pgque._unfinished(p_sub, p_pos, v_tick.tick_snapshot) is null then
      v_low := v_tick.tick_id;
    else
      v_high := v_mid;
      v_since := v_tick.tick_time;
    end if;
    v_mid := v_low + (v_high - v_low) / 2;
  end loop;
  return v_since;
end
$$;

-- Returns the columns of get_consumer_info() for some subscribers of one queue.  With
-- p_blind, only those that need no table of the queue.  p_last, p_new: the last tick of
-- the queue, and whether it has rows that this tick does not show, if the caller knows.
-- p_retries: false if the caller knows that the retry queue has nothing of the queue.
create or replace function pgque._consumers(
  p_queue pgque.queue, p_subs pgque.subscriber[], p_positions pgque.position[], p_blind boolean, p_last pgque.tick default null, p_new boolean default null,
  p_retries boolean default true,
  out queue_name text, out consumer_name text, out lag interval, out last_seen interval, out last_tick bigint,
  out current_batch bigint, out next_tick bigint, out pending_events bigint, out role text, out skipped_events bigint
) returns setof record
language plpgsql as $$
declare
  v_sub  pgque.subscriber;
  v_pos  pgque.position;
  v_due  record;
  v_now  timestamptz := pgque.clock();   -- no index is searched for the result of a volatile function
begin
  if not p_blind and p_last.tick_id is null then
    p_last := pgque._last_tick(p_queue);
  end if;
  queue_name := p_queue.queue_name;
  for n in 1..coalesce(pg_catalog.cardinality(p_subs), 0) loop
    v_sub := p_subs[n];
    v_pos := p_positions[n];
    last_seen := pgque.clock() - v_pos.pos_time;
    consumer_name := pgque._subscriber_name(v_sub);
    v_pos := case when v_sub.sub_main is null then pgque._current_position(v_sub, v_pos) else pgque._batch_of_worker(v_sub) end;
    last_tick := v_pos.pos_tick;
    current_batch := v_pos.pos_batch;
    next_tick := v_pos.pos_next_tick;
    role := v_sub.sub_role;
    skipped_events := p_positions[n].pos_skipped;
    if not p_blind then
      pending_events := coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0) - v_pos.pos_event_seq;
      if v_sub.sub_main is null then
        -- A consumer at the last tick has nothing pending if nothing came since.
        lag := case when v_pos.pos_tick <> p_last.tick_id or p_new is not false or v_pos.pos_snapshot::text <> p_last.tick_snapshot::text
          then pgque.clock() - pgque._pending_since(v_sub, v_pos, p_last) end;
        -- What was rolled back has drawn ids, too.
        pending_events := case when lag is null then 0 else pending_events end;
      else
        lag := case when v_pos.pos_batch is not null then pgque.clock() - (pgque._tick(v_sub.sub_queue, pgque._end_tick(v_pos))).tick_time end;
      end if;
      if v_sub.sub_main is null and (p_retries or v_pos.pos_lapse <= v_now) then
        -- Messages that may be received again, or were not delivered yet because of
        -- their order.  Those in the open window are pending anyway.
        select coalesce(sum(w.n) filter (where w.behind), 0) as n, min(w.since) as since into v_due
        from (
          select count(*) as n, min(r.ev_retry_after) as since, r.ev_id <= v_pos.pos_event_seq as behind
          from pgque.retry_queue r where r.ev_owner = v_sub.sub_id and r.ev_retry_after <= v_now
          group by 3
          union all
          select (l.lease).pos_done_count - l.settled, l.until, (l.lease).pos_tick < v_pos.pos_tick
          from pgque._expired_batches(v_sub.sub_id, v_pos) l
          union all
          -- Redelivered to a consumer whose leases never expire, and not finished
          select r.n, l.pos_time, r.behind
          from (
            select count(*) as n, r.ev_batch, r.ev_id <= v_pos.pos_event_seq as behind
            from pgque.retry_queue r
            where v_sub.sub_role <> 'pool' and r.ev_owner = v_sub.sub_id and r.ev_batch is not null and r.ev_retry_after > v_now
            group by 2, 3
          ) r
          cross join lateral pgque._lease(v_sub.sub_id, r.ev_batch) l
        ) w;
        pending_events := pending_events + v_due.n;
        lag := greatest(lag, pgque.clock() - v_due.since);
      end if;
      lag := greatest(lag, '0');   -- also if nothing is pending, and if the clock was set back
    end if;
    return next;
  end loop;
  -- A session that waited for a table may have waited for a DROP of the queue.
  if not p_blind and not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id) then
    perform pgque._no_queue(p_queue.queue_name);
  end if;
end
$$;

create or replace function pgque.get_consumer_info(
  i_queue_name text default null, i_consumer_name text default null, caller pgque.caller default current_user,
  out queue_name text, out consumer_name text, out lag interval, out last_seen interval, out last_tick bigint,
  out current_batch bigint, out next_tick bigint, out pending_events bigint, out role text, out skipped_events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queue      pgque.queue;
  v_subs       pgque.subscriber[];
  v_positions  pgque.position[];
  v_locked     boolean;
begin
  if $1 is not null then
    i_queue_name := (pgque._queue($1, caller, 'see')).queue_name;
  end if;
  if $2 is not null and $1 is not null and not exists (
    select from pgque.subscriber s where pgque._subscriber_name(s) = $2 and s.sub_queue = (pgque._queue($1, caller, 'see')).queue_id)
  then
    perform pgque._subscriber($1, $2, caller);
  end if;
  for v_queue in
    select q.*
    from pgque.queue q
    where ($1 is null and pgque._may(caller, 'see', q.queue_id)) or q.queue_name = $1 collate "default"
    order by q.queue_name
  loop
    select array_agg(p.sub order by pgque._subscriber_name(p.sub)), array_agg(p.pos order by pgque._subscriber_name(p.sub))
    into v_subs, v_positions
    from pgque._positions(v_queue.queue_id, $2) p;
    continue when v_subs is null;
    v_locked := false;
    begin
      perform pgque._shorten_lock_timeout();
      return query select c.* from pgque._consumers(v_queue, v_subs, v_positions, pgque._missing_leaf(v_queue.queue_id) is not null) c;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        v_locked := true;
      when others then
        if not pgque._was_dropped(v_queue.queue_id) then
          raise;
        elsif $1 is not null then
          perform pgque._no_queue($1);
        end if;   -- else the queue was dropped meanwhile
    end;
    if v_locked then
      return query select c.* from pgque._consumers(v_queue, v_subs, v_positions, true) c;
    end if;
  end loop;
end
$$;
comment on function pgque.get_consumer_info(text, text, pgque.caller) is
  'Returns one row for each consumer and worker, of all queues or of one, or for one consumer: lag (age of the oldest pending message; 0 if none is '
  'pending), last_seen, ticks, open batch, pending_events (also messages that may be redelivered, without those that a worker has leased) and skipped_events (lost to retention). lag and '
  'pending_events are NULL if another session has a table of the queue locked. A worker is named consumer.worker. Errors: PQ001 no such queue; PQ011 '
  'not subscribed.';

-- Ids are read range by range, as in _messages_ahead().
create or replace function pgque.peek(queue_name text, n int default 10, consumer_name text default null, caller pgque.caller default current_user) returns setof pgque.delivery
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
  v_sub    pgque.subscriber;
  v_pos    pgque.position;
  v_tick   pgque.tick;
  v_rows   text;
  v_upto   bigint;
  v_length bigint := greatest(100, n);
  v_count  bigint;
  v_once   text := '';
  v_lapsed pgque.position;
begin
  if $2 is null or $2 < 1 then
    perform pgque._fail('PQ005', format('peek at queue %I needs a positive number of messages', $1),
      'select * from pgque.peek(queue, 10);');
  end if;
  if $3 is not null then
    v_sub := pgque._subscriber($1, $3, caller);
    v_pos := pgque._current_position(v_sub, pgque._position(v_sub.sub_id));
  else
    v_tick := pgque._tick(v_queue.queue_id, pgque._slowest_tick(v_queue.queue_id));
    v_pos.pos_snapshot := v_tick.tick_snapshot;
    v_pos.pos_event_seq := v_tick.tick_event_seq;
    v_pos.pos_tick := v_tick.tick_id;
    v_pos.pos_high := case when pgque._noted(v_queue.queue_id, '{cancelled}') then v_tick.tick_id + 1 end;
  end if;
  loop
    v_upto := greatest(v_upto, v_pos.pos_done_id, v_pos.pos_event_seq, 0) + v_length;
    if v_upto >= pg_sequence_last_value(v_queue.queue_event_seq) is not false then
      v_upto := null;
    end if;
    v_rows := pgque._rows_sql(v_queue.queue_id, coalesce('(e.ev_owner is null or e.ev_owner = ' || v_sub.sub_id || ')', 'e.ev_owner is null')
      || coalesce(' and not (e.ev_id <= ' || v_pos.pos_done_id || format(' and pg_visible_in_snapshot(e.ev_txid, %L))', v_pos.pos_next_snapshot), '')
      || coalesce(' and e.ev_id <= ' || v_upto, '') || pgque._not_cancelled_sql(v_queue.queue_id, v_pos),
      null, pgque._xids(v_pos.pos_snapshot, pg_current_snapshot()) * pgque._span_xids(v_queue, 0, v_upto));
    exit when v_upto is null;
    execute format('select count(distinct e.ev_id) from (%s) e', v_rows) into v_count;
    exit when v_count >= $2;
    v_length := 8 * v_length;
  end loop;
  for v_lapsed in select (l.lease).* from pgque._expired_batches(v_sub.sub_id, v_pos) l loop
    -- After a move back, a row may be ahead of the position and in an expired batch.
    v_once := 'distinct on (e.ev_id, e.ev_txid, e.ev_retry)';
    v_rows := v_rows || ' union all ' || pgque._undone_sql(v_sub, v_lapsed);
  end loop;
  v_rows := pgque._renewed_sql(v_queue.queue_id, format('select %s e.* from (%s) e order by e.ev_id, e.ev_txid desc, e.ev_retry limit %s', v_once, v_rows, $2));
  return query execute format(
    $q$
    with log as materialized (%s)
    select e.ev_id, null::bigint, e.ev_type, e.ev_data, coalesce(e.ev_retry, 0), e.ev_time,
      e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_headers, e.ev_key, e.ev_bytes,
      coalesce(e.ev_retry, 0), e.ev_error, e.ev_expires, $2
    from log e
    union all (
      select distinct on (r.ev_id) r.ev_id, null::bigint, r.ev_type, r.ev_data, coalesce(r.ev_retry, 0), r.ev_time,
        r.ev_extra1, r.ev_extra2, r.ev_extra3, r.ev_extra4, r.ev_headers, r.ev_key, r.ev_bytes,
        greatest(r.ev_receives, r.ev_retry, 0), r.ev_error, r.ev_expires, $2
      from pgque.retry_queue r
      where r.ev_queue = $1 and r.ev_retry_after <= $5 and ($3 is null or r.ev_owner in (0, $3))
        and not exists (select from log e where e.ev_id = r.ev_id)
        and not (r.ev_key is not null and r.ev_receives = 0 and exists (
          select from pg_catalog.unnest(pgque._key_rows($1, array[pgque._as_event(pgque._slim_retry(r))])) s where s.ev_owner = -2))
      order by r.ev_id
      limit $4)
    order by 1
    limit $4
    $q$, v_rows)
  using v_queue.queue_id, v_queue.queue_name, v_sub.sub_id, $2, pgque.clock();
end
$$;
comment on function pgque.peek(text, int, text, pgque.caller) is
  'Returns the next n messages that a consumer has not finished, without receiving them. consumer_name: NULL means the slowest consumer. Messages '
  'also count before a tick covers them, and retries once they are due. batch_id is NULL. Errors: PQ001 no such queue; PQ005 n is below 1; PQ011 '
  'not subscribed.';

-- Returns the first tick by which an id had been drawn; all columns are null if there
-- is none yet.  A binary search over tick ids, since there are too many ticks to read.
create or replace function pgque._tick_of_event(p_queue pgque.queue, p_id bigint) returns pgque.tick
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_tick  pgque.tick;
begin
  execute pg_catalog.format(
    $q$
    with recursive search as (
      select $2 - 1 as low, $3 + 1 as high
      union all
      select case when m.tick_event_seq < $1 then m.tick_id else s.low end, case when m.tick_event_seq < $1 then s.high else (s.low + s.high) / 2 end
      from search s
      left join lateral (select t.tick_id, t.tick_event_seq from (%1$s) t where t.tick_id >= (s.low + s.high) / 2 order by t.tick_id limit 1) m on true
      where s.high - s.low > 1
    )
    select t.* from search s cross join lateral (select t.* from (%1$s) t where t.tick_id = s.high) t where s.high - s.low <= 1
    $q$, pgque._ticks_sql(p_queue.queue_id))
  into v_tick using p_id, (pgque._find_tick(p_queue, 'earliest')).tick_id, (pgque._last_tick(p_queue)).tick_id;
  return v_tick;
end
$$;

-- Returns the transactions that may have sent messages with ids above p_after, up to
-- p_upto.  A null leaves that end open.
--
-- A sender has its transaction's id before it draws a message's id.  Let A be the last
-- tick before the first id was drawn, and B the first tick after the last one was
-- drawn.
--   * The sender ran at tick A, or began after it.
--   * Its transaction's id is lower than the one that stored the row of tick B (see
--     _store_tick).  xmin has only 32 bits of that id: the others are taken from the
--     current id.
-- If messages entered the log under older ids (see _noted), there is no upper end.
create or replace function pgque._span_xids(p_queue pgque.queue, p_after bigint, p_upto bigint) returns int8multirange
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_tick  pgque.tick;
  v_now   bigint := pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint;
  v_xid   bigint;
  v_xids  int8multirange := '{(,)}';
begin
  if pgque._noted(p_queue.queue_id, '{external}') then
    return v_xids;   -- another system numbered events
  end if;
  if p_after > 0 then
    v_tick := pgque._tick_of_event(p_queue, p_after + 1);
    execute pg_catalog.format('select t.* from (%s) t where $1 is null or t.tick_id < $1 order by t.tick_id desc limit 1', pgque._ticks_sql(p_queue.queue_id))
    into v_tick using v_tick.tick_id;
    if v_tick.tick_id is not null then
      v_xids := pgque._xids(v_tick.tick_snapshot, null);
    end if;
  end if;
  if p_upto is not null and not pgque._noted(p_queue.queue_id, '{moved}') then
    v_tick := pgque._tick_of_event(p_queue, p_upto);
    execute pg_catalog.format('select t.xmin::text::bigint from pgque.tick_%s_%s t where t.tick_id = $1 and t.xmin <> ''2''', p_queue.queue_id, coalesce(v_tick.slot, 0) % 3)
    into v_xid using v_tick.tick_id;
    v_xids := v_xids * pg_catalog.int8multirange(pg_catalog.int8range(null, v_now + ((v_xid - v_now + 2147483648 & 4294967295) - 2147483648)));
  end if;
  return v_xids;
end
$$;

-- Returns where the rows of a message are in the log, as _rows_sql() takes it: a
-- condition on row addresses for each table, null for none.
create or replace function pgque._row_addresses(p_queue pgque.queue, p_id bigint) returns text[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_places  text[];
begin
  execute pg_catalog.format(
    $q$
    select array_agg('e.ctid = any (' || quote_literal(f.tids) || '::tid[])' order by l.n)
    from generate_series(0, 2) l (n)
    left join (select r.n, array_agg(r.tid) as tids from (%s) r group by r.n) f on f.n = l.n
    $q$, pgque._rows_sql(p_queue.queue_id, 'e.ev_id = $1 and (e.ev_owner is null or e.ev_owner > 0)', null,
      pgque._span_xids(p_queue, p_id - 1, p_id), 'e.slot % 3 as n, e.ctid as tid'))
  into v_places using p_id;
  return v_places;
end
$$;

-- Returns all messages of a queue, or one (p_id), with one row for each consumer that
-- has it.  Of each kind, these are the first p_limit rows by id that satisfy p_where,
-- or more: all rows of one message are returned together.  With p_before they are the last
-- ones below that id.  p_where is a condition on a row m of the result.  p_status,
-- p_consumer, p_after and p_before, which are part of p_where too, avoid needless reads.
-- These are several statements, and messages move meanwhile.  So that none is missed, the
-- positions are read first: a message that is delivered later is still ahead of them.  And
-- each place is read before the one that its messages move to.
create or replace function pgque._messages(
  p_queue pgque.queue, p_id bigint, p_limit int, p_where text default 'true', p_status text default null, p_consumer text default null, p_after bigint default 0,
  p_before bigint default null,
  out msg_id bigint, out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now     timestamptz := pgque.clock();
  v_subs    pgque.subscriber[];
  v_at      pgque.position[];
  v_sub     pgque.subscriber;
  v_held    record;
  v_and     text := case when p_id is null then '' else ' and e.ev_id = ' || p_id end;
  v_places  text[];
begin
  if p_id < 1 then
    return;
  end if;
  p_after := least(greatest(p_after, p_id - 1), 4611686018427387904);   -- no id is higher
  if p_id is not null then
    v_places := pgque._row_addresses(p_queue, p_id);
  end if;
  select pg_catalog.array_agg(p.sub order by (p.sub).sub_id), pg_catalog.array_agg(p.pos order by (p.sub).sub_id) into v_subs, v_at
  from pgque._positions(p_queue.queue_id, p_consumer) p
  where (p.sub).sub_main is null;
  if coalesce(p_status, 'processing') in ('processing', 'retry', 'expired') then
    for n in 1..coalesce(pg_catalog.cardinality(v_subs), 0) loop
      v_sub := v_subs[n];
      for v_held in
        select h.* from pgque._states(v_sub.sub_id, (v_at[n]).pos_open) h
        where h.place = 'log' and ((h.lease).pos_last_id <= p_after or (h.lease).pos_done_id >= coalesce(p_id, p_before - 1)) is not true
      loop
        return query execute pgque._messages_sql(pgque._renewed_sql(p_queue.queue_id, pgque._unsettled_sql(v_sub, v_held.lease, v_and, v_places)), $q$
          case when e.ev_expires <= $2 and $4 <= $2 then 'expired' when $4 > $2 then 'processing' else 'retry' end,
          case when $4 = 'infinity' then e.ev_time else $4 end, coalesce(e.ev_retry, 0) + $6, $5, case when $4 > $2 then $7 end
          $q$, p_where, p_before is not null)
        using v_sub.sub_consumer, v_now, p_limit, v_held.until, (v_held.lease).pos_worker, (v_sub.sub_role = 'pool')::int, v_held.token;
      end loop;
    end loop;
  end if;
  if coalesce(p_status, 'delayed') in ('pending', 'processing', 'delayed', 'retry', 'expired') then
    return query execute pgque._limited_sql(pgque._retry_messages_sql(), p_where, p_before is not null)
    using p_queue.queue_id, v_now, p_limit, coalesce(p_id, p_before - 1), p_after;
  end if;
  for n in 1..coalesce(pg_catalog.cardinality(v_subs), 0) loop
    return query select m.* from pgque._messages_ahead(p_queue, v_subs[n], p_limit, p_where, p_status, p_after, v_places, v_at[n], p_before) m;
  end loop;
  if coalesce(p_status, 'dead') in ('dead', 'failed') then
    -- One consumer after the other, in the order of an index.
    for v_sub.sub_consumer in
      select c.co_id
      from pgque.consumer c
      where c.co_queue in (0, p_queue.queue_id) and (p_consumer is null or c.co_name = p_consumer)
        -- One lookup each; an EXISTS may become a join with all dead letters.
        and (select true from pgque.dead_letter d where d.dl_queue_id = p_queue.queue_id and d.dl_consumer_id = c.co_id limit 1)
    loop
      return query execute pgque._limited_sql(pgque._dead_messages_sql(' and d.dl_consumer_id = $6'), p_where, p_before is not null)
      using p_queue.queue_id, v_now, p_limit, coalesce(p_id, p_before - 1), p_after, v_sub.sub_consumer;
    end loop;
  end if;
  if coalesce(p_status, 'archived') = 'archived' then
    return query execute pgque._limited_sql(
      $q$
      select a.ev_id, c.co_name, 'archived', a.ev_type, a.ev_data, a.ev_headers, a.ev_key, a.ev_bytes, a.ev_time, null::timestamptz,
        a.arc_receives, coalesce(a.ev_retry, 0), a.ev_error, a.ev_expires, a.arc_worker, null::bigint, null::bigint
      from pgque.archive a
      left join pgque.consumer c on c.co_id = a.arc_consumer
      where a.ev_id > $5 and a.ev_id <= coalesce($4, 9223372036854775807) and $q$ || pgque._archived_by('a', p_queue.queue_id), p_where, p_before is not null)
    using p_queue.queue_id, v_now, p_limit, coalesce(p_id, p_before - 1), p_after;
  end if;
exception
  when others then
    perform pgque._no_queue(p_queue.queue_name) where not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id);   -- it was dropped meanwhile
    raise;
end
$$;

-- Returns the messages of _messages() that are in the log and that a consumer at p_position
-- (null: where it stands now) has not received.  It reads ids range by range, each eight
-- times as long as the one before, until it has enough: upwards, or downwards from
-- p_before.  (No sequential scans: if a table was analyzed when it had only the first
-- range, the planner expects that all its rows are in that range.)
create or replace function pgque._messages_ahead(
  p_queue pgque.queue, p_sub pgque.subscriber, p_limit int, p_where text, p_status text, p_after bigint, p_places text[], p_position pgque.position default null,
  p_before bigint default null,
  out msg_id bigint, out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_moved     boolean := pgque._noted(p_queue.queue_id, '{moved,external}');
  v_position  pgque.position := pgque._next_from(case when p_position.pos_sub is null then pgque._position(p_sub.sub_id) else p_position end);
  v_newest    bigint;
  v_after     bigint := p_after;
  v_upto      bigint;
  v_and       text := '';
  v_xids      int8multirange := '{(,)}';
  v_length    bigint := greatest(100, least(p_limit, 2000));
  v_count     bigint;
  v_found     bigint := 0;
begin
  if p_status not in ('pending', 'retry', 'expired') or p_status = 'expired' and not pgque._expiring(p_queue)
    or p_status = 'retry' and not v_moved
  then
    return;
  end if;
  v_newest := pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq);
  if p_before <= v_newest then
    v_upto := p_before - 1;
  end if;
  loop
    if p_places is null then
      if p_before is not null then
        -- The last range has all that is left: a message with an old id may be ahead too.
        v_after := coalesce(v_upto, v_newest, 0) - v_length;
        if pgque._noted(p_queue.queue_id, '{external}') or v_after <= greatest(p_after, v_position.pos_event_seq) then
          v_after := p_after;
        end if;
      else
        v_upto := greatest(v_after, v_position.pos_event_seq) + v_length;
        if v_moved or v_upto >= v_newest is not false then
          v_upto := null;
        end if;
      end if;
      v_and := pg_catalog.format(' and e.ev_id > %s%s', v_after, ' and e.ev_id <= ' || v_upto);
      v_xids := pgque._span_xids(p_queue, v_after, v_upto);
    end if;
    return query execute pgque._messages_sql(
      pgque._renewed_sql(p_queue.queue_id, pgque._unfinished_sql(p_sub, v_position, pg_catalog.pg_current_snapshot(), v_and, p_places, v_xids)), $q$
        case when e.ev_expires <= $2 then 'expired' when e.ev_owner is not null then 'retry' else 'pending' end,
        e.ev_time, coalesce(e.ev_retry, 0), null::text, null::bigint
        $q$, p_where, p_before is not null)
    using p_sub.sub_consumer, pgque.clock(), p_limit;
    get diagnostics v_count = row_count;
    v_found := v_found + v_count;
    exit when v_found >= p_limit or p_places is not null or case when p_before is null then v_upto is null else v_after = p_after end;
    if p_before is null then
      v_after := v_upto;
    else
      v_upto := v_after;
    end if;
    v_length := 8 * v_length;
  end loop;
end
$$;

-- Returns the query for the messages of _messages() that are in the retry queue.
create or replace function pgque._retry_messages_sql() returns text
language sql immutable as $f$
  select $q$
    select r.ev_id, c.co_name,
      case
        when r.ev_expires <= $2 and (r.ev_batch is null or r.ev_retry_after <= $2) then 'expired'
        when r.ev_owner = 0 then 'delayed'
        when r.ev_batch is not null and r.ev_retry_after > $2 then 'processing'
        when r.ev_receives = 0 then 'pending'
        else 'retry'
      end,
      r.ev_type, r.ev_data, r.ev_headers, r.ev_key, r.ev_bytes, r.ev_time, case when r.ev_retry_after < 'infinity' then r.ev_retry_after else r.ev_time end,
      greatest(r.ev_receives, r.ev_retry), coalesce(r.ev_retry, 0),
      r.ev_error, r.ev_expires, r.ev_worker, case when r.ev_retry_after > $2 then r.ev_batch end, null::bigint
    from pgque.retry_queue r
    left join pgque.subscriber s on s.sub_id = r.ev_owner
    left join pgque.consumer c on c.co_id = s.sub_consumer
    where r.ev_queue = $1 and r.ev_id > $5 and r.ev_id <= coalesce($4, 9223372036854775807)
    $q$
$f$;

-- Returns the query for the messages of _messages() that are dead letters, with one more
-- condition.
create or replace function pgque._dead_messages_sql(p_and text) returns text
language sql immutable as $f$
  select $q$
    select d.ev_id, c.co_name, case when d.dl_held then 'failed' else 'dead' end,
      d.ev_type, d.ev_data, d.ev_headers, d.ev_key, d.ev_bytes, d.ev_time, null::timestamptz, greatest(d.dl_receives, d.ev_retry), coalesce(d.ev_retry, 0),
      d.ev_error, d.ev_expires, null::text, null::bigint, d.dl_id
    from pgque.dead_letter d
    join pgque.consumer c on c.co_id = d.dl_consumer_id
    where d.dl_queue_id = $1 and d.ev_id > $5 and d.ev_id <= coalesce($4, 9223372036854775807)
  $q$ || p_and
$f$;

-- Returns a query for rows of pgque.event as _messages() returns them for consumer $1.
-- p_state: expressions for status, available_at, receive_count, worker and batch id.
create or replace function pgque._messages_sql(p_rows text, p_state text, p_where text, p_down boolean default false) returns text
language sql immutable as $f$
  select pgque._limited_sql(pg_catalog.format(
    $q$
    select e.ev_id, (select c.co_name from pgque.consumer c where c.co_id = $1), x.status, e.ev_type, e.ev_data, e.ev_headers, e.ev_key, e.ev_bytes,
      e.ev_time, x.available_at, x.receives, coalesce(e.ev_retry, 0), e.ev_error, e.ev_expires, x.worker, x.batch, null::bigint
    from (%s) e
    cross join lateral (select %s) x (status, available_at, receives, worker, batch)
    $q$, p_rows, p_state), p_where, p_down)
$f$;

-- Returns a query for the first $3 rows by id that satisfy a condition, or with p_down
-- for the last ones, and the other rows of the message where they end.
create or replace function pgque._limited_sql(p_rows text, p_where text, p_down boolean default false) returns text
language sql immutable as $f$
  select pg_catalog.format(
    $q$
    select m.*
    from (%s) m (msg_id, consumer_name, status, type, payload, headers, key, payload_bytes, created_at, available_at, receive_count, retry_count,
      last_error, expires_at, worker, batch_id, dl_id)
    where %s
    order by m.msg_id%s
    fetch first $3 rows with ties
    $q$, p_rows, p_where, case when p_down then ' desc' else '' end)
$f$;

-- No index serves the filters: one of the log by type made send_batch take 1.4 times as
-- long, and a filter that a million pending messages do not satisfy takes 0.2 to 0.6 s
-- without it.  With many consumers this is read for each of them.
create or replace function pgque.list_messages(
  queue_name text, only_status text default null, limit_count int default 100, only_type text default null, only_key text default null,
  only_consumer text default null, since timestamptz default null, until timestamptz default null, matching text default null,
  after_id bigint default null, before_id bigint default null, caller pgque.caller default current_user,
  out msg_id bigint, out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set datestyle = 'ISO' set enable_sort = on set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_where  text;
begin
  if $2 not in ('pending', 'processing', 'delayed', 'retry', 'expired', 'dead', 'failed', 'archived') then
    perform pgque._fail('PQ005', format('unknown status %L, for queue %I', $2, v_queue.queue_name),
      'Use pending, processing, delayed, retry, expired, dead, failed or archived, or null for all.');
  elsif $3 is null or $3 < 0 then
    perform pgque._fail('PQ005', format('limit_count must not be negative, for queue %I', v_queue.queue_name),
      'Pass the highest number of messages to list, such as 100.');
  end if;
  v_where := concat_ws(' and ', 'm.msg_id > ' || coalesce($10, 0), 'm.msg_id < ' || $11, 'm.status = ' || quote_literal($2), 'm.type = ' || quote_literal($4),
    'm.key = ' || quote_literal($5), 'm.consumer_name = ' || quote_literal($6), 'm.created_at >= ' || quote_literal($7), 'm.created_at < ' || quote_literal($8),
    pgque._matching_sql($9, 'pg_catalog.left(m.payload, 100000), m.headers::text, m.last_error'));
  -- The planner takes a status for rare, and would read and sort the whole retry queue.
  perform set_config('enable_sort', 'off', true) where $2 in ('retry', 'delayed') and coalesce($4, $5, $6) is null;
  return query
    select m.msg_id, m.consumer_name, m.status, m.type, m.payload, m.headers, m.key, m.payload_bytes, m.created_at, m.available_at,
      m.receive_count, m.retry_count, m.last_error, m.expires_at, m.worker, m.batch_id, m.dl_id
    from (
      select m.*, row_number() over (order by o.place, m.consumer_name) as n, rank() over (order by o.place) as begins
      from pgque._messages(v_queue, null, $3, v_where, $2, $6, coalesce($10, 0), $11) m
      cross join lateral (select case when $11 is null then m.msg_id else -m.msg_id end as place) o
    ) m
    where m.n <= $3 or m.begins <= $3 and coalesce($10, $11) is not null
    order by m.n;
end
$$;
comment on function pgque.list_messages(text, text, int, text, text, text, timestamptz, timestamptz, text, bigint, bigint, pgque.caller) is
  'Returns the messages of a queue by id, at most limit_count, one row for each consumer, without receiving them. only_status: pending, '
  'processing, delayed, retry, expired, dead, failed (dead with drop_policy hold) or archived. only_type, only_key, only_consumer: only those of '
  'this type, key or consumer. since, until: only those created at since or later, and before until. matching: only those with this text in the '
  'payload (its first 100,000 characters), the headers or last_error, in upper or lower case (of the letters that the database''s locale knows). '
  'after_id: only those with a greater id. before_id: only those with a lower id, the newest first. To read page by page, begin with after_id 0, or '
  'with before_id 9223372036854775807, and continue with the last msg_id; a message then has all its rows, '
  'so there may be a few more than limit_count. available_at: when the message can be received, or its lease expires. dl_id: set if it is a dead '
  'letter. A filter that few messages satisfy makes the call read all of them, for each consumer: with only_consumer, for one. Errors: PQ001 no such queue; PQ005 another status, or limit_count '
  'is negative.';

create or replace function pgque.get_message(
  queue_name text, inout msg_id bigint, caller pgque.caller default current_user,
  out consumer_name text, out status text, out type text, out payload text, out headers jsonb, out key text,
  out payload_bytes bytea, out created_at timestamptz, out available_at timestamptz, out receive_count int, out retry_count int,
  out last_error text, out expires_at timestamptz, out worker text, out batch_id bigint, out dl_id bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query
    select m.msg_id, m.consumer_name, m.status, m.type, m.payload, m.headers, m.key, m.payload_bytes, m.created_at, m.available_at,
      m.receive_count, m.retry_count, m.last_error, m.expires_at, m.worker, m.batch_id, m.dl_id
    from pgque._messages(v_queue, $2, 100) m
    where $2 is not null
    order by m.consumer_name;
  if not found then
    perform pgque._no_message(v_queue, $2);
  end if;
end
$$;
comment on function pgque.get_message(text, bigint, pgque.caller) is
  'Returns one message, a row for each consumer that still has it, without receiving it. status is one of those of list_messages(). available_at: '
  'when the message can be received, or its lease expires. dl_id: set if it is a dead letter. Errors: PQ001 no such queue; PQ010 no consumer has it.';

create or replace function pgque.message_history(
  queue_name text, msg_id bigint, caller pgque.caller default current_user,
  out at timestamptz, out event text, out consumer_name text, out worker text, out number bigint, out detail text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $f$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_event  pgque.event := pgque._event_in_log(v_queue, $2);
  v_tick   pgque.tick;
  v_ended  text := case when v_event.ev_id is not null then 'done' end;
begin
  -- Without the note, no index serves the search for what was cancelled.
  if v_ended = 'done' and pgque._noted(v_queue.queue_id, '{cancelled}') then
    v_ended := pgque._ended_state(v_queue, null, $2);
  end if;
  if v_event.ev_id is not null and not pgque._noted(v_queue.queue_id, '{moved,external}') then
    v_tick := pgque._tick_of_event(v_queue, $2);   -- else the order of ids is not the one of ticks
  end if;
  return query execute format(
    $q$
    with m as materialized (
      select m.* from pgque._messages($1, $2, 100) m where $2 is not null
    ),
    found as (
      select coalesce($3, min(m.created_at)) as at, 'sent' as event, null::text as consumer_name, null::text as worker, null::bigint as number, null::text as detail
      from m
      having coalesce($3, min(m.created_at)) is not null
      union all
      select $4, 'ticked', null, null, $5, null where $5 is not null
      union all
      select l.pos_time, 'delivered', m.consumer_name, m.worker, m.batch_id, 'delivery ' || nullif(m.receive_count, 0)
      from m
      join pgque.consumer c on c.co_name = m.consumer_name
      join pgque.subscriber s on s.sub_queue = $6 and s.sub_consumer = c.co_id and s.sub_main is null
      cross join lateral pgque._lease(s.sub_id, m.batch_id) l
      where m.status = 'processing' and l.pos_time is not null
      union all
      select m.available_at, case m.status when 'processing' then 'lease expires' else 'due' end, m.consumer_name, m.worker, null,
        concat_ws(', ', case when m.retry_count > 0 then 'rejected ' || m.retry_count || case m.retry_count when 1 then ' time' else ' times' end end, m.last_error)
      from m
      where m.status in ('retry', 'delayed') or m.status = 'processing' and m.worker is not null   -- who reads alone has no lease
      union all
      select m.expires_at, 'expires', m.consumer_name, null, null, null from m where m.status <> 'archived' and isfinite(m.expires_at)
      union all
      select d.dl_time, m.status, m.consumer_name, null, d.dl_id, concat_ws(', ', case when m.receive_count > 0 then m.receive_count || case m.receive_count when 1 then ' delivery' else ' deliveries' end end, d.dl_reason)
      from m
      cross join lateral (select d.* from pgque.dead_letter d where d.dl_id = m.dl_id limit 1) d   -- the planner would read all for a join
      union all
      select a.archived_at, 'archived', c.co_name, a.arc_worker, a.archive_id, concat_ws(', ', a.arc_outcome, case when a.arc_receives > 0 then a.arc_receives || case a.arc_receives when 1 then ' delivery' else ' deliveries' end end)
      from pgque.archive a
      left join pgque.consumer c on c.co_id = a.arc_consumer
      where a.ev_id = $2 and %s
      union all
      select null, $8, null, null, null, null where $8 is not null and not exists (select from m)
      union all
      select a.act_time, a.act_call, a.act_args ->> 'consumer_name', null, null, 'by ' || a.act_role
      from (select a.* from pgque.action a order by a.act_time desc limit 1000) a
      where a.act_queue = $7 and a.act_args ->> 'msg_id' = $2::text and a.act_time >= ($1).queue_created_at   -- not of an earlier queue of this name
    )
    select f.at, f.event, f.consumer_name, f.worker, f.number, nullif(f.detail, '')
    from found f
    order by f.at nulls last, f.event <> 'sent', f.event, f.consumer_name
    $q$, pgque._archived_by('a', v_queue.queue_id))
  using v_queue, $2, v_event.ev_time, v_tick.tick_time, v_tick.tick_id, v_queue.queue_id, v_queue.queue_name, v_ended;
  if not found then
    perform pgque._no_message(v_queue, $2);
  end if;
end
$f$;
comment on function pgque.message_history(text, bigint, pgque.caller) is
  'Returns what is known of one message, the oldest first: at, event, consumer_name, worker, number, detail. Nothing is stored for it: the rows come from the '
  'log, open batches, retries, dead letters, the archive and the newest 1,000 actions. event: sent, ticked (the first tick that may cover it), '
  'delivered, lease expires, due, expires, dead, failed, archived, done or cancelled (without a time), or the function that a role called for it. number: the tick_id of ticked, the batch_id of delivered, the dl_id of dead and failed, the archive_id of archived. Errors: '
  'PQ001 no such queue; PQ010 nothing is known of the message.';

create or replace function pgque._no_message(p_queue pgque.queue, p_id bigint) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ010', pg_catalog.format('message not found: %s of queue %I', coalesce(p_id::text, 'null'), p_queue.queue_name),
    'Check the id. Every consumer is done with the message, it was cancelled, or it was never committed.');
end
$$;

create or replace function pgque.message_status(
  queue_name text, msg_id bigint, caller pgque.caller default current_user,
  out consumer_name text, out status text, out receive_count int, out retry_count int, out available_at timestamptz,
  out worker text, out batch_id bigint, out last_error text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'consume');
begin
  return query
    select m.consumer_name, m.status, m.receive_count, m.retry_count, m.available_at, m.worker, m.batch_id, m.last_error
    from pgque._messages(v_queue, $2, 100) m
    where $2 is not null
    order by m.consumer_name;
  if not found then
    perform pgque._no_message(v_queue, $2);
  end if;
end
$$;
comment on function pgque.message_status(text, bigint, pgque.caller) is
  'Returns the state of one message, a row for each consumer that still has it. status: pending, processing, delayed, retry, expired, dead, failed '
  '(dead with drop_policy hold) or archived. Errors: PQ001 no such queue; PQ010 no consumer has it.';

-- Up to 0.8 it had a column less, and CREATE OR REPLACE cannot add one.
do $$
begin
  perform pgque._drop_function(p.oid)
  from pg_proc p
  where p.oid = to_regprocedure('pgque.list_workers(text, text, pgque.caller)') and 'waiting' <> all (p.proargnames);
end
$$;
create or replace function pgque.list_workers(
  queue_name text default null, consumer_name text default null, caller pgque.caller default current_user,
  out queue text, out consumer text, out worker text, out batches int, out messages bigint, out last_seen timestamptz, out lease_until timestamptz,
  out waiting bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue;
begin
  if $1 is not null then
    v_queue := pgque._queue($1, caller, 'see');
  end if;
  return query
    select q.queue_name, c.co_name, h.worker, count(distinct h.token)::int, sum(h.messages)::bigint, max(h.at), min(h.until), sum(h.waiting)::bigint
    from pgque.subscriber s
    join pgque.queue q on q.queue_id = s.sub_queue
    join pgque.consumer c on c.co_id = s.sub_consumer
    cross join lateral (
      select (l.lease).pos_worker as worker, l.token, (l.lease).pos_done_count - l.settled as messages, (l.lease).pos_time as at, l.until, 0 as waiting
      from pgque._open_batches(s.sub_id) l
      union all
      select r.ev_worker, r.ev_batch, 1, null, r.ev_retry_after, 0
      from pgque.retry_queue r
      where r.ev_owner = s.sub_id and r.ev_batch is not null and r.ev_retry_after > pgque.clock()
      union all
      select b.worker, null, 0, null, null, b.messages from pgque._waiting_for_workers(s) b
    ) h
    where s.sub_role = 'pool' and (($1 is null and pgque._may(caller, 'see', q.queue_id)) or q.queue_id = v_queue.queue_id) and ($2 is null or c.co_name = $2)
    group by q.queue_name, c.co_name, h.worker
    order by q.queue_name, c.co_name, h.worker;
end
$$;
comment on function pgque.list_workers(text, text, pgque.caller) is
  'Returns the workers that have messages now: batches, messages, last_seen (when the worker last received), lease_until (when the first of its '
  'leases expires), waiting (messages that wait for a key of which the worker has a message; see key_concurrency). Errors: PQ001 no such queue.';

create or replace function pgque.list_poison(
  queue_name text, limit_count int default 100, caller pgque.caller default current_user,
  out msg_id bigint, out consumer_name text, out receive_count int, out last_error text, out status text, out dl_id bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  -- A message that was delivered again is in the retry queue or a dead letter.
  return query execute format(
    $q$
    select m.msg_id, m.consumer_name, m.receive_count, m.last_error, m.status, m.dl_id
    from (
      (%s)
      union all
      (%s)
    ) m
    order by m.receive_count desc, m.msg_id
    limit $7
    $q$, pgque._limited_sql(pgque._retry_messages_sql(), 'm.receive_count > m.retry_count + 1'),
    pgque._limited_sql(pgque._dead_messages_sql($d$ and (greatest(d.dl_receives, d.ev_retry) > coalesce(d.ev_retry, 0) + 1 or d.dl_reason = 'receive attempts used up')$d$), 'true'))
  using v_queue.queue_id, pgque.clock(), 100000, null::bigint, 0::bigint, null::int, case when $2 < 0 then 0 else $2 end;
end
$$;
comment on function pgque.list_poison(text, int, pgque.caller) is
  'Returns messages that were delivered more than once without an outcome, or were given up for that reason. They may kill their workers. dl_id is '
  'set if the message is a dead letter. Errors: PQ001 no such queue.';
-- ---------------------------------------------------------------------------
-- health: metrics and checks
-- ---------------------------------------------------------------------------

-- Returns how many consumers of a queue metrics() and health() report one by one: those
-- with the greatest lag.  All others are only in the sums.
create or replace function pgque._most_consumers() returns int
language sql immutable as $$ select 100 $$;

-- Returns the subscribers of a queue with the greatest lag and their positions, the
-- number of its consumers, and the slowest of them.  The messages that the slowest
-- still needs, those in its workers' batches included, have ids above slowest_seq.
create or replace function pgque._slowest_consumers(
  p_queue_id int, out subs pgque.subscriber[], out positions pgque.position[], out consumers bigint, out slowest text, out slowest_seq bigint
)
language plpgsql as $$
begin
  with p as materialized (select p.sub, p.pos from pgque._positions(p_queue_id) p)
  select f.subs, f.positions, f.consumers, s.consumer_name, s.seq into subs, positions, consumers, slowest, slowest_seq
  from (
    select pg_catalog.array_agg(p.sub) as subs, pg_catalog.array_agg(p.pos) as positions, coalesce(pg_catalog.max(p.consumers), 0) as consumers
    from (
      select p.sub, p.pos, pg_catalog.count(*) filter (where (p.sub).sub_main is null) over () as consumers
      from p
      -- A worker without a batch needs no messages, whatever its position is.
      order by (p.sub).sub_main is not null and (p.pos).pos_batch is null, (p.pos).pos_tick
      limit pgque._most_consumers()
    ) p
  ) f
  left join (
    select pgque._subscriber_name(p.sub) as consumer_name, n.seq
    from p
    cross join lateral (
      select o.pos_tick, o.pos_event_seq from pgque._oldest_needed_position((p.sub).sub_id) o where pg_catalog.cardinality((p.pos).pos_open) > 0
      union all
      -- Where each consumer reads on, as _next_from() finds it for one.  One query is
      -- cheaper than a call for each.
      select case when n.past then (p.pos).pos_next_tick else (p.pos).pos_tick end,
        case when n.past then (p.pos).pos_next_event_seq else (p.pos).pos_event_seq end
      from (select (p.pos).pos_fresh > 0 and (p.pos).pos_last_id is null) n (past)
      where pg_catalog.cardinality((p.pos).pos_open) > 0 is not true
    ) n (tick, seq)
    where (p.sub).sub_main is null
    order by n.tick
    limit 1
  ) s on true;
end
$$;

-- Returns the size of the tables of each queue with their indexes, by the queue's
-- number, and under 0 that of the shared tables; or only those of some queues.  A queue
-- with an exclusively locked table is left out.
create or replace function pgque._sizes(p_queues int[] default null) returns jsonb
language sql as $$
  with leaf as materialized (
    select i.inhrelid, pg_catalog.split_part(c.relname, '_', 2)::int as queue_id
    from pg_catalog.pg_inherits i
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    where i.inhparent in ('pgque.event'::regclass, 'pgque.tick'::regclass) and p_queues is null
    union all
    select pg_catalog.to_regclass(l.leaf), q.id
    from pg_catalog.unnest(p_queues) q (id)
    cross join lateral pgque._leaves(q.id) l
  ), heap as materialized (
    select c.oid, coalesce(l.queue_id, 0) as queue_id
    from pg_catalog.pg_class c
    left join leaf l on l.inhrelid = c.oid
    where c.relnamespace = 'pgque'::regnamespace and c.relkind = 'r'
      -- By their ids, since the catalog of a server with many queues is large.
      and c.oid = any (array(
        select l.inhrelid from leaf l
        union all
        select k.oid from pg_catalog.pg_class k where p_queues is null and k.relnamespace = 'pgque'::regnamespace))
  ), held as (
    select h.queue_id
    from heap h
    join pg_catalog.pg_locks k on k.relation = h.oid
    where k.locktype = 'relation' and k.mode = 'AccessExclusiveLock' and k.granted and k.pid is distinct from pg_catalog.pg_backend_pid()
      and k.database = (select d.oid from pg_catalog.pg_database d where d.datname = pg_catalog.current_database())
  )
  select pg_catalog.jsonb_object_agg(s.queue_id, s.bytes)
  from (
    select p.queue_id, pg_catalog.sum(pg_catalog.pg_total_relation_size(p.oid)) as bytes
    from heap p
    where p.queue_id not in (select h.queue_id from held h)
    group by p.queue_id
  ) s
$$;

-- Returns the sizes as _sizes() does, or null if it has to wait for a lock.
create or replace function pgque._sizes_soon(p_queues int[] default null) returns jsonb
language plpgsql as $$
declare
  v_wait   text := pg_catalog.current_setting('lock_timeout');
  v_sizes  jsonb;
begin
  perform pgque._shorten_lock_timeout();
  v_sizes := pgque._sizes(p_queues);
  perform pg_catalog.set_config('lock_timeout', v_wait, true);
  return v_sizes;
exception
  when lock_not_available then
    return null;
end
$$;

-- Returns the transaction of this database that has written for the longest time, if
-- there is one.  hidden: whether there are writing transactions whose age the owner may
-- not read.
create or replace function pgque._oldest_writer(out who text, out gid text, out age interval, out hidden boolean) returns setof record
language sql volatile as $$
  select w.who, w.gid, pgque.clock() - w.since,
    pg_catalog.bool_or(w.since is null) over () and not pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'usage')
  from (
    select 'pid ' || a.pid || coalesce(' (' || nullif(pg_catalog.concat_ws(', ', 'role ' || a.usename, 'application ' || nullif(a.application_name, '')), '') || ')', '') as who,
      null as gid, a.xact_start as since
    from pg_catalog.pg_stat_activity a
    where a.backend_xid is not null and a.datname = pg_catalog.current_database() and a.pid <> pg_catalog.pg_backend_pid()
    union all
    select pg_catalog.format('prepared by %I as %L', p.owner, p.gid), p.gid, p.prepared
    from pg_catalog.pg_prepared_xacts p
    where p.database = pg_catalog.current_database()
  ) w
  order by w.since
  limit 1
$$;

-- Checks how many transaction ids are left before PostgreSQL refuses new ones (54000), so
-- that no message can be sent or delivered.  The same limit exists for ids of
-- multixacts, which row locks use.  The check needs no id itself, so it also runs then.
create or replace function pgque._health_ids(out status text, out detail text, out advice text)
language plpgsql as $$
declare
  v_found   record;
  v_holder  record;
begin
  -- PostgreSQL keeps the last three million ids for its repair, and warns below forty.
  select d.datname, a.what, 2144483648 - a.age as free into v_found
  from pg_catalog.pg_database d
  cross join lateral (values ('transaction ids', age(d.datfrozenxid)), ('multixact ids', pg_catalog.mxid_age(d.datminmxid))) a (what, age)
  order by a.age desc
  limit 1;
  status := case when v_found.free < 40000000 then 'fail' when v_found.free < 600000000 then 'warn' else 'ok' end;
  detail := pg_catalog.format('%s are left: %s million of 2144 (database %I)', v_found.what, v_found.free / 1000000, v_found.datname);
  if v_found.free <= 0 then
    detail := pg_catalog.format('no %s are left (database %I): PostgreSQL refuses each transaction that writes (54000)', v_found.what, v_found.datname);
  end if;
  if status = 'ok' then
    return;
  end if;
  -- Whatever keeps VACUUM from freezing rows comes first.
  select h.* into v_holder
  from (
    select age(p.transaction) as age, pg_catalog.format('prepared transaction %L of database %I', p.gid, p.database) as who,
      pg_catalog.format('rollback prepared %1$L (or commit prepared %1$L) in database %2$I', p.gid, p.database) as remedy
    from pg_catalog.pg_prepared_xacts p
    union all
    select greatest(age(s.xmin), age(s.catalog_xmin)), pg_catalog.format('replication slot %I', s.slot_name),
      case when s.active then 'let its receiver catch up, or end it and ' else '' end || pg_catalog.format('select pg_drop_replication_slot(%L)', s.slot_name)
    from pg_catalog.pg_replication_slots s
    union all
    select greatest(age(a.backend_xid), age(a.backend_xmin)), pg_catalog.format('transaction of pid %s', a.pid), pg_catalog.format('select pg_terminate_backend(%s)', a.pid)
    from pg_catalog.pg_stat_activity a
    where a.pid <> pg_catalog.pg_backend_pid()
  ) h
  where h.age > 100000000
  order by h.age desc
  limit 1;
  detail := detail || coalesce('; ' || v_holder.who || ' keeps them from being freed', '');
  advice := coalesce('First: ' || v_holder.remedy || '. Then', 'Run')
    || ' as a superuser: vacuumdb --all --freeze. If that does not help: "Preventing Transaction ID Wraparound Failures" in the manual of PostgreSQL';
end
$$;

-- Returns how many dead letters of a queue stay, the time of the newest of them, and how
-- many have waited to be forwarded for a minute.  Younger ones are on their way.
create or replace function pgque._dead_letters_of(p_queue_id int, out stay bigint, out newest timestamptz, out waiting bigint)
language plpgsql as $$
begin
  select count(*) filter (where d.dl_forward is null), max(d.dl_time) filter (where d.dl_forward is null),
    count(*) filter (where d.dl_forward is not null and d.dl_time < pgque.clock() - interval '1 minute')
  into stay, newest, waiting
  from pgque.dead_letter d
  where d.dl_queue_id = p_queue_id;
end
$$;

-- Returns how many messages of a queue are leased now, a row for each lease.  The
-- subscribers are those of _slowest_consumers(): if they are not all, all are read.
create or replace function pgque._in_flight(p_queue_id int, p_subs pgque.subscriber[], p_positions pgque.position[], out sub_id int, out messages bigint)
returns setof record
language plpgsql as $$
declare
  v_now   timestamptz := pgque.clock();
  v_busy  int[];   -- those that may have an open batch
begin
  v_busy := case when cardinality(p_subs) < pgque._most_consumers()
    then array(select (p_subs[g.n]).sub_id from generate_subscripts(p_subs, 1) g (n) where cardinality((p_positions[g.n]).pos_open) > 0)
    else array(select (p.sub).sub_id from pgque._positions(p_queue_id) p where cardinality((p.pos).pos_open) > 0) end;
  return query
    select b.id, (o.lease).pos_done_count - o.settled
    from unnest(v_busy) b (id)
    cross join lateral pgque._open_batches(b.id) o
    union all
    select s.sub_id, 1
    from pgque.subscriber s
    join pgque.retry_queue r on r.ev_owner = s.sub_id
    where s.sub_queue = p_queue_id and r.ev_batch is not null and r.ev_retry_after + '0' > v_now;   -- by the index of held ones
end
$$;

-- Returns the metrics of one queue.
create or replace function pgque._queue_metrics(
  p_queue pgque.queue, p_bytes numeric, out metric text, out queue text, out consumer text, out value double precision
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_last   pgque.tick := pgque._last_tick(p_queue);
  v_back   record;
  v_shown  int[];
begin
  select f.* into v_back from pgque._slowest_consumers(p_queue.queue_id) f;
  v_shown := array(select s.sub_id from unnest(v_back.subs) s);
  return query
    select m.metric, p_queue.queue_name, null::text, m.value::double precision
    from (values
      ('pgque_queue_events_total', coalesce(pg_sequence_last_value(p_queue.queue_event_seq), 0)::numeric),
      ('pgque_queue_last_tick_id', v_last.tick_id),
      ('pgque_queue_ticker_lag_seconds', extract(epoch from pgque.clock() - v_last.tick_time)),
      ('pgque_queue_bytes', p_bytes),
      ('pgque_queue_rotation_age_seconds', extract(epoch from pgque.clock() - p_queue.queue_switch_time)),
      ('pgque_queue_retries', (select count(*) from pgque.retry_queue r where r.ev_queue = p_queue.queue_id)),
      ('pgque_queue_dead_letters', (select d.stay + d.waiting from pgque._dead_letters_of(p_queue.queue_id) d)),
      ('pgque_queue_consumers', v_back.consumers),
      ('pgque_queue_paused', p_queue.queue_paused::int),
      -- The same as in _health_senders(), far from the limit.
      ('pgque_queue_depth', case when v_back.consumers > 0 then coalesce(pg_sequence_last_value(p_queue.queue_event_seq), 0) - v_back.slowest_seq end),
      ('pgque_queue_max_depth', nullif(p_queue.queue_max_depth, 0)),
      ('pgque_queue_retention_seconds', extract(epoch from p_queue.queue_retention_period))
    ) m (metric, value)
    where m.value is not null;
  return query
    select 'pgque_messages_' || t.tal_what || '_total', p_queue.queue_name, c.co_name, sum(t.tal_count)::double precision
    from pgque.tally t
    left join pgque.subscriber s on s.sub_id = t.tal_sub and s.sub_id = any (v_shown)
    left join pgque.consumer c on c.co_id = s.sub_consumer
    where t.tal_queue = p_queue.queue_id
    group by t.tal_what, c.co_name;
  return query
    select 'pgque_messages_in_flight', p_queue.queue_name, c.co_name, sum(h.messages)::double precision
    from pgque._in_flight(p_queue.queue_id, v_back.subs, v_back.positions) h
    left join pgque.subscriber s on s.sub_id = h.sub_id and s.sub_id = any (v_shown)
    left join pgque.consumer c on c.co_id = s.sub_consumer
    group by c.co_name;
  return query
    select m.metric, i.queue_name, i.consumer_name, m.value::double precision
    from (
      -- A consumer may have the name of a subconsumer of another one: a.b.
      select distinct on (c.consumer_name) c.*
      from pgque._consumers(p_queue, v_back.subs, v_back.positions, false, v_last, pgque._has_new_rows(p_queue.queue_id, v_last, pg_current_snapshot())) c
      order by c.consumer_name, c.role = 'coop_member'
    ) i
    cross join lateral (values
      ('pgque_consumer_lag_seconds', extract(epoch from i.lag)),
      ('pgque_consumer_last_seen_seconds', extract(epoch from i.last_seen)),
      ('pgque_consumer_pending_events', i.pending_events::numeric),
      ('pgque_consumer_skipped_events_total', i.skipped_events::numeric),
      ('pgque_consumer_open_batch', (i.current_batch is not null)::int::numeric)
    ) m (metric, value)
    where m.value is not null;
end
$$;

create or replace function pgque.metrics(out metric text, out queue text, out consumer text, out value double precision) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_sizes  jsonb := pgque._sizes_soon();
begin
  return query
    select 'pgque_dead_tuples', null::text, null::text, coalesce(sum(t.n_dead_tup), 0)::double precision
    from pg_stat_all_tables t where t.schemaname = 'pgque';
  return query
    select 'pgque_oldest_transaction_seconds', null::text, null::text, coalesce(extract(epoch from w.age), 0)::double precision
    from (select) one
    left join pgque._oldest_writer() w on true
    where (w.hidden and w.age is null) is not true;
  return query
    select 'pgque_recurring_messages', null::text, null::text, count(*)::double precision from pgque.recurring;
  return query
    select 'pgque_recurring_failing', null::text, null::text, count(*)::double precision from pgque._recurring_health() h where h.status <> 'ok';
  return query
    select 'pgque_schema_bytes', null::text, null::text, sum(s.value::numeric)::double precision from jsonb_each_text(v_sizes) s having v_sizes is not null;
  return query select m.* from pgque._metrics_of(pgque._some_queues(array(select q.queue_id from pgque.queue q), 1), v_sizes) m;
end
$$;
comment on function pgque.metrics() is
  'Returns figures for a monitoring system, one a row: metric, queue, consumer, value. If a queue has more than 100 consumers '
  '(pgque_queue_consumers), the 100 with the greatest lag have rows of their own, and the others are summed. The call does not wait for locked '
  'tables: it leaves out the figures of their queues. If the server has no room for the locks of all queues (one a queue, see '
  'max_locks_per_transaction), the call leaves out some queues, chosen at random.';

create or replace function pgque.metrics(
  queue_name text, caller pgque.caller default current_user, out metric text, out queue text, out consumer text, out value double precision
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queues  int[] := pgque._some_queues(pgque._visible($1, caller), 1);
begin
  return query select m.* from pgque._metrics_of(v_queues, pgque._sizes_soon(v_queues)) m;
end
$$;
comment on function pgque.metrics(text, pgque.caller) is
  'Returns the figures of one queue, or with NULL of each queue that the caller has a right to, one a row: metric, queue, consumer, value. The '
  'figures of the whole server are left out. Any right to a queue is enough. Errors: PQ001 no such queue.';

-- Returns the metrics of some queues, in the order of their names; p_sizes as _sizes()
-- returns it.
create or replace function pgque._metrics_of(
  p_queues int[], p_sizes jsonb, out metric text, out queue text, out consumer text, out value double precision
) returns setof record
language plpgsql as $$
declare
  v_queue  pgque.queue;
begin
  for v_queue in select q.* from pgque.queue q where q.queue_id = any (p_queues) order by q.queue_name loop
    continue when not p_sizes ? v_queue.queue_id::text or pgque._missing_leaf(v_queue.queue_id) is not null;
    begin
      perform pgque._shorten_lock_timeout();
      return query select f.* from pgque._queue_metrics(v_queue, (p_sizes ->> v_queue.queue_id::text)::numeric) f;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' or lock_not_available then
        null;
      when others then
        if not pgque._was_dropped(v_queue.queue_id) then
          raise;
        end if;   -- else the queue was dropped meanwhile
    end;
  end loop;
end
$$;

-- Returns the queue of that name, or with null all queues that the caller has a right
-- to.
create or replace function pgque._visible(p_queue text, p_caller name) returns int[]
language plpgsql as $$
begin
  if p_queue is not null then
    return array[(pgque._queue(p_queue, p_caller, 'see')).queue_id];
  end if;
  return array(select q.queue_id from pgque.queue q where pgque._may(p_caller, 'see', q.queue_id));
end
$$;

-- Returns as many of these queues as the server has locks for, chosen at random.
-- Reading the last value of a sequence locks it until the transaction ends.  p_locks:
-- the number of such locks for each queue.
create or replace function pgque._some_queues(p_queues int[], p_locks int) returns int[]
language sql as $$
  select case when pg_catalog.cardinality(p_queues) <= pgque._lock_room() / p_locks then p_queues else array(
    select q.id from pg_catalog.unnest(p_queues) q (id) order by pg_catalog.random() limit pgque._lock_room() / p_locks) end
$$;

-- Checks one queue, for _queue_health().
create or replace function pgque._health_tables(p_queue pgque.queue, out status text, out detail text, out advice text)
language plpgsql as $$
declare
  v_missing  text := pgque._missing_leaf(p_queue.queue_id);
begin
  status := 'ok';
  detail := 'all six tables are there';
  if v_missing is not null then
    status := 'fail';
    detail := format('table %s is missing', v_missing);
    advice := format('Restore it from a backup, or select pgque.drop_queue(%L, true) and create the queue again.', p_queue.queue_name);
  elsif p_queue.queue_restored then
    detail := pgque._lacks(p_queue);
    status := case when detail is null then 'warn' else 'fail' end;
    advice := case when detail is null then format('select pgque.ticker(%L)', p_queue.queue_name) else pgque._restore_advice() end;
    detail := coalesce('the queue was loaded from a dump that is not complete, so it neither ticks nor takes messages: ' || detail,
      'the queue was loaded from a dump and was not used since');
  end if;
end
$$;

-- Far from the limit the depth is computed from the ids, as in _room().  Near it the
-- messages are counted, except for queues with many consumers.
create or replace function pgque._health_senders(
  p_queue pgque.queue, p_consumers bigint, p_slowest text, p_slowest_seq bigint, out status text, out detail text, out advice text
)
language plpgsql as $$
declare
  v_crowd  boolean := p_consumers > pgque._most_consumers();
  v_warn   numeric := p_queue.queue_max_depth * coalesce(nullif(p_queue.queue_health_depth_warn, 0), 100) / 100.0;
  v_depth  bigint;
begin
  if p_queue.queue_max_depth > 0 and p_consumers > 0 then
    v_depth := coalesce(pg_sequence_last_value(p_queue.queue_event_seq), 0)
      - least(p_slowest_seq, (select min(r.ev_id) - 1 from pgque.retry_queue r where r.ev_queue = p_queue.queue_id));
    if v_depth >= v_warn and not v_crowd then
      v_depth := pgque._depth(p_queue.queue_id);
    end if;
  end if;
  status := case
    when v_depth >= p_queue.queue_max_depth and not v_crowd then 'fail'
    when p_queue.queue_paused or v_depth >= v_warn then 'warn'
    else 'ok'
  end;
  detail := concat_ws(', ', case when p_queue.queue_paused then 'paused: send is refused' else 'open' end,
    case when v_depth >= v_warn then 'depth ' else 'depth at most ' end || v_depth || ' of max_depth ' || p_queue.queue_max_depth);
  advice := nullif(concat_ws('; ',
    case when p_queue.queue_paused then format('select pgque.resume(%L)', p_queue.queue_name) end,
    case when v_depth >= v_warn then
      format('Start the slowest consumer%s, or raise the limit: select pgque.alter_queue(%L, ''{"max_depth": %s}'')',
        ' (' || p_slowest || ')', p_queue.queue_name, 2 * p_queue.queue_max_depth) end), '');
end
$$;

create or replace function pgque._health_ticks(p_queue pgque.queue, p_last pgque.tick, p_new boolean default null, out status text, out detail text, out advice text)
language plpgsql set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_waits  interval;   -- how long a message has waited for a tick
begin
  if pgque._tick_reason(p_queue, p_last, pg_current_snapshot(), p_new) = 'events' then
    -- The seal or the purge of a message with a key is no message.
    execute format('select $1 - greatest($2, e.ev_time) from (%s) e where (e.ev_owner < 0) is not true limit 1',
      pgque._rows_sql(p_queue.queue_id, 'true', null, pgque._xids(p_last.tick_snapshot, pg_current_snapshot())))
    into v_waits using pgque.clock(), p_last.tick_time;
    if p_last.tick_time > pgque.clock() then
      v_waits := p_last.tick_time - pgque.clock();   -- the clock was set back
    end if;
  end if;
  status := case
    when v_waits > nullif(p_queue.queue_health_tick_fail, '0') then 'fail'
    when v_waits > nullif(p_queue.queue_health_tick_warn, '0') or p_queue.queue_ticker_paused then 'warn'
    else 'ok'
  end;
  detail := format('last tick %s, %s ago', p_last.tick_id, date_trunc('milliseconds', pgque.clock() - p_last.tick_time))
    || coalesce(', messages have waited for the next one for ' || date_trunc('milliseconds', v_waits), '');
  advice := case
    when p_queue.queue_ticker_paused then format('select pgque.alter_queue(%L, ''{"ticker_paused": false}'')', p_queue.queue_name)
    when status = 'ok' then null
    when p_queue.queue_external_ticker then format('Have the external ticker call pgque.ticker(%L, tick_id, time, event_seq).', p_queue.queue_name)
    when pgque._has_cron() then 'See the advice of the check ticker.'
    else 'Start the ticker beside the server: pgque ticker.'
  end;
end
$$;

-- p_latest: the consumer whose oldest pending message is oldest, and p_lag its age.
create or replace function pgque._health_consumers(
  p_queue pgque.queue, p_consumers bigint, p_latest text, p_lag interval, p_cause text,
  out status text, out detail text, out advice text
)
language plpgsql as $$
declare
  v_soon    interval := 0.8 * p_queue.queue_retention_period;
  v_unread  bigint;
begin
  status := 'ok';
  if p_consumers = 0 then
    detail := 'no consumer';
    execute format('select count(*) from (select from (%s) e limit 1000) e', pgque._rows_sql(p_queue.queue_id, 'e.ev_owner is null')) into v_unread;
    if v_unread > 0 and p_queue.queue_health_pending_warn > '0' then
      status := 'warn';
      detail := format('%s recent messages that no consumer gets: the queue has none', replace(v_unread::text, '1000', '1000 or more'));
      advice := format('A new consumer gets only later messages. To deliver the messages that are still there too: select pgque.subscribe(%L, ''my_consumer'', ''earliest'')',
        p_queue.queue_name);
    end if;
    return;
  end if;
  status := case
    when p_lag > least(nullif(p_queue.queue_health_pending_fail, '0'), p_queue.queue_retention_period) then 'fail'
    when p_lag > least(nullif(p_queue.queue_health_pending_warn, '0'), v_soon) then 'warn'
    else 'ok'
  end;
  detail := case when p_lag > '0' then format('%s since the oldest pending message of consumer %s', date_trunc('milliseconds', p_lag), p_latest)
      else 'nothing pending' end
    || case when p_consumers = 1 then ' (1 consumer)' else format(' (%s consumers)', p_consumers) end;
  if status <> 'ok' then
    advice := concat_ws(' ',
      case when p_lag > v_soon then format('It misses messages older than %s. To keep them longer: select pgque.alter_queue(%L, ''{"retention_period": "%s"}'').',
        p_queue.queue_retention_period, p_queue.queue_name, 2 * p_queue.queue_retention_period) end,
      case when p_cause is not null then format('First follow the advice of the check %s of this queue: its consumers wait for that.', p_cause)
        else format('Start consumer %1$s. Only if its messages are no longer needed, discard them with pgque.unsubscribe(%2$L, %1$L).', p_latest, p_queue.queue_name)
      end,
      case when p_lag <= v_soon then format('It misses messages older than %s (retention_period).', p_queue.queue_retention_period) end);
  end if;
end
$$;

-- The owner's index finds those that are due (hence + 0): a queue may have many others.
create or replace function pgque._health_retries(p_queue pgque.queue, p_pumped int[], p_subs pgque.subscriber[] default '{}', out status text, out detail text, out advice text)
language plpgsql as $$
declare
  v_now   timestamptz := pgque.clock();
  v_due   record;
  v_wait  bigint;
  v_keys  record;   -- those that are busy
begin
  select count(*) as n, v_now - min(r.ev_retry_after) as overdue into v_due
  from pg_catalog.unnest(p_pumped) o (id)
  join pgque.retry_queue r on r.ev_owner = o.id
  where r.ev_queue + 0 = p_queue.queue_id and r.ev_retry_after < v_now;
  select count(*) into v_wait
  from pgque.subscriber s
  join pgque.retry_queue r on r.ev_owner = s.sub_id
  where s.sub_queue = p_queue.queue_id and s.sub_id <> all (p_pumped) and r.ev_retry_after <= v_now;
  status := case when v_due.overdue > interval '1 minute' then 'fail' when v_due.overdue > interval '5 seconds' then 'warn' else 'ok' end;
  select count(*) as n, sum(l.messages) as messages into v_keys
  from pg_catalog.unnest(p_subs) s
  cross join lateral pgque._waiting_lanes(s) l
  where s.sub_keyed;
  detail := v_due.n || ' due' || case when v_wait > 0 then pg_catalog.format(', %s wait for their consumers', v_wait) else '' end
    || case when v_keys.n > 0 then pg_catalog.format(', %s of them for a busy key (keys: %s)', v_keys.messages, v_keys.n) else '' end;
  advice := case when v_due.overdue > interval '5 seconds' then 'See the check ticker: the ticker moves them. To move them once: select pgque.maint()' end;
end
$$;

-- Checks whether workers have had messages for much longer than a lease lasts: the
-- lease was extended again and again, or is long.  Leased messages are not pending, so
-- no other check shows them.
create or replace function pgque._health_leases(
  p_queue pgque.queue, p_subs pgque.subscriber[], p_positions pgque.position[], p_retries boolean, out status text, out detail text, out advice text
)
language plpgsql as $$
declare
  v_now   timestamptz := pgque.clock();
  v_long  interval := greatest(10 * p_queue.queue_visibility_timeout, nullif(p_queue.queue_health_pending_fail, '0'));
  v_held  record;   -- the oldest one
begin
  select pgque._subscriber_name(p_subs[g.n]) as consumer, h.worker, v_now - h.since as age into v_held
  from pg_catalog.generate_subscripts(p_subs, 1) g (n)
  cross join lateral (
    select (o.lease).pos_worker as worker, (o.lease).pos_time as since
    from pgque._open_batches((p_subs[g.n]).sub_id) o
    where pg_catalog.cardinality((p_positions[g.n]).pos_open) > 0 and o.until > v_now
    union all
    select l.pos_worker, l.pos_time
    from (
      select distinct r.ev_batch as id
      from pgque.retry_queue r
      where p_retries and r.ev_owner = (p_subs[g.n]).sub_id and r.ev_batch is not null and r.ev_retry_after + '0' > v_now
    ) b
    cross join lateral pgque._lease((p_subs[g.n]).sub_id, b.id) l
  ) h
  where (p_subs[g.n]).sub_role = 'pool'
  order by h.since
  limit 1;
  status := case when v_held.age > v_long and p_queue.queue_health_pending_fail > '0' then 'warn' else 'ok' end;
  detail := case when v_held.age is null then 'no worker holds a lease'
    else pg_catalog.format('%s is the age of the oldest lease, of worker %s of consumer %s', pg_catalog.date_trunc('seconds', v_held.age), v_held.worker, v_held.consumer) end;
  advice := case when status <> 'ok' then pg_catalog.format('If the worker hangs, end it and release its messages: select pgque.reclaim(%L, %L, %L)',
    p_queue.queue_name, v_held.consumer, v_long) end;
end
$$;

-- Returns which of some queues have rows in the retry queue, and which have dead letters:
-- most have neither, and one lookup each takes less time than the queries that would find
-- nothing.  Null if a table is locked.
create or replace function pgque._set_aside(p_queues int[], out retries int[], out dead int[])
language plpgsql as $$
begin
  perform pgque._shorten_lock_timeout();
  retries := array(select q.id from unnest(p_queues) q (id) where (select true from pgque.retry_queue r where r.ev_queue = q.id limit 1));
  dead := array(select q.id from unnest(p_queues) q (id) where (select true from pgque.dead_letter d where d.dl_queue_id = q.id limit 1));
  perform pgque._undo_block();
exception
  when sqlstate 'PQ099' then
    null;
  when lock_not_available then
    retries := null;
    dead := null;
end
$$;

-- Returns all checks of one queue; no row if it was dropped meanwhile.  p_pumped: see
-- _pump_owners().  p_retries, p_dead: whether it has any.  With p_figures there is one more row, with the figures of overview().
create or replace function pgque._queue_health(
  p_queue pgque.queue, p_pumped int[], p_figures boolean, p_retries boolean, p_dead boolean,
  out check_name text, out queue text, out status text, out detail text, out advice text, out figures jsonb
) returns setof record
language plpgsql as $$
declare
  v_last     pgque.tick;
  v_new      boolean;
  v_back     record;
  v_ticks    record;
  v_retries  record;
  v_late     record;   -- the consumers' lags
  v_dead     record;
begin
  check_name := 'tables';
  queue := p_queue.queue_name;
  select h.* into status, detail, advice from pgque._health_tables(p_queue) h;
  if status = 'fail' and not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id) then
    return;
  end if;
  return next;
  if status <> 'ok' then
    return;
  end if;

  -- A lock on any of these tables prevents ticks or rotation of the queue.
  execute format('lock table pgque.tick_%1$s_0, pgque.tick_%1$s_1, pgque.tick_%1$s_2 in access share mode', p_queue.queue_id);
  if not exists (select from pgque.queue q where q.queue_id = p_queue.queue_id) then
    perform pgque._no_queue(p_queue.queue_name);   -- a session that waited for the lock may have waited for a DROP of the queue
  end if;
  v_last := pgque._last_tick(p_queue);
  select f.* into v_back from pgque._slowest_consumers(p_queue.queue_id) f;
  return query select 'senders', queue, h.*, null::jsonb from pgque._health_senders(p_queue, v_back.consumers, v_back.slowest, v_back.slowest_seq) h;
  v_new := pgque._has_new_rows(p_queue.queue_id, v_last, pg_current_snapshot());
  v_ticks := pgque._health_ticks(p_queue, v_last, v_new);
  return query select 'ticks', queue, v_ticks.status, v_ticks.detail, v_ticks.advice, null::jsonb;
  return query
    select 'rotation', queue, case when r.late then 'warn' else 'ok' end,
      format('last rotation %s ago, slowest consumer %s', date_trunc('seconds', pgque.clock() - p_queue.queue_switch_time), coalesce(v_back.slowest, '(none)')),
      case when r.late then 'Let the slowest consumer catch up, or unsubscribe it. Release the batches that its workers hold (list_workers) with reclaim(). End the sessions that lock the queue''s tables (pg_dump, an open transaction)'
        || coalesce(': ' || pgque._lockers(p_queue.queue_id, false), '') || '.' end, null::jsonb
    from (
      select pgque.clock() - p_queue.queue_switch_time > 4 * p_queue.queue_rotation_period
        and (select sum(pg_table_size(to_regclass(l.leaf))) from pgque._leaves(p_queue.queue_id) l where l.kind = 'event') > 67108864 as late
      offset 0
    ) r;
  if p_retries then
    v_retries := pgque._health_retries(p_queue, p_pumped, v_back.subs);
  else
    select 'ok' as status, '0 due' as detail, null as advice into v_retries;
  end if;
  select pg_catalog.max(c.lag) as lag, pg_catalog.max(c.pending_events) as pending, (pg_catalog.array_agg(c.consumer_name order by c.lag desc, c.consumer_name))[1] as consumer
  into v_late
  from pgque._consumers(p_queue, v_back.subs, v_back.positions, false, v_last, v_new, p_retries) c;
  return query
    select 'consumers', queue, h.*, null::jsonb
    from pgque._health_consumers(p_queue, v_back.consumers, v_late.consumer, v_late.lag,
      case when v_ticks.status <> 'ok' then 'ticks' when v_retries.status <> 'ok' then 'retries' end) h;
  return query select 'retries', queue, v_retries.status, v_retries.detail, v_retries.advice, null::jsonb;
  return query select 'leases', queue, h.*, null::jsonb from pgque._health_leases(p_queue, v_back.subs, v_back.positions, p_retries) h;
  if p_dead then
    v_dead := pgque._dead_letters_of(p_queue.queue_id);
  else
    select 0::bigint as stay, null::timestamptz as newest, 0::bigint as waiting into v_dead;
  end if;
  return query
    select 'dead letters', queue, case when d.stay + d.waiting > 0 then 'warn' else 'ok' end,
      d.stay || coalesce(', newest at ' || d.newest, '') || case when d.waiting > 0 then format(', %s wait to be forwarded', d.waiting) else '' end,
      case
        when d.stay > 0 then format('Read the reasons: select * from pgque.dlq_inspect(%1$L). When the cause is mended: select pgque.dlq_requeue_all(%1$L)', queue)
        when d.waiting > 0 then 'Resume the queue that dead_letter_queue names, raise its max_depth, or start its consumers.'
      end, null::jsonb
    from (select v_dead.stay, v_dead.newest, v_dead.waiting) d;
  if p_figures then
    check_name := 'figures';
    status := 'ok'; detail := null; advice := null;
    figures := jsonb_build_object(
      'ev_per_sec', pgque._rate(p_queue, v_last),
      'events', coalesce(pg_sequence_last_value(p_queue.queue_event_seq), 0),
      'pending', v_late.pending,
      'lag', extract(epoch from v_late.lag),
      -- Neither delayed messages nor those that a worker has again
      'retries', (
        select count(*)
        from pgque.retry_queue r
        where p_retries and r.ev_queue = p_queue.queue_id and r.ev_owner <> 0 and r.ev_receives > 0 and (r.ev_batch is null or r.ev_retry_after <= pgque.clock())),
      'dead', v_dead.stay + v_dead.waiting,
      'in_flight', (select coalesce(sum(f.messages), 0) from pgque._in_flight(p_queue.queue_id, v_back.subs, v_back.positions) f),
      'consumers', v_back.consumers);
    return next;
  end if;
end
$$;

-- Returns the checks of some queues, in the order of their names.  p_figures: also the
-- figures that overview() shows.
create or replace function pgque._health_of(
  p_queues int[], p_figures boolean, out check_name text, out queue text, out status text, out detail text, out advice text, out figures jsonb
) returns setof record
language plpgsql as $$
declare
  v_queue    pgque.queue;
  v_queues   int[] := pgque._some_queues(p_queues, 2);
  v_pumped   int[] := array(select o.id from pgque._pump_owners() o (id));
  v_aside    record;
begin
  if cardinality(v_queues) < cardinality(p_queues) then
    check_name := 'queues';
    status := 'warn';
    detail := format('%s of %s queues are checked, chosen at random: the server has no room for more locks', cardinality(v_queues), cardinality(p_queues));
    advice := 'Raise max_locks_per_transaction, or check one queue at a time: select * from pgque.health(queue).';
    return next;
  end if;
  v_aside := pgque._set_aside(v_queues);
  for v_queue in select q.* from pgque.queue q where q.queue_id = any (v_queues) order by q.queue_name loop
    begin
      perform pgque._shorten_lock_timeout();
      return query select h.* from pgque._queue_health(
          v_queue, v_pumped, p_figures, (v_queue.queue_id = any (v_aside.retries)) is not false, (v_queue.queue_id = any (v_aside.dead)) is not false) h;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
      when lock_not_available then
        check_name := 'tables'; queue := v_queue.queue_name;
        detail := 'locked by ' || pgque._lockers(v_queue.queue_id, true);
        status := case when detail is null then 'warn' else 'fail' end;
        advice := case when detail is null then 'Check again. If the lock stays, find its session in pg_locks, among the tables of schema pgque.'
          else 'End that transaction, or wait for its end (VACUUM FULL, ALTER TABLE, a drop_queue() that is not committed). Until then the queue has no tick and no rotation.' end;
        detail := coalesce(detail, 'a table that the queues share was locked');
        return next;
      when others then
        if not pgque._was_dropped(v_queue.queue_id) then
          raise;
        end if;   -- else the queue was dropped meanwhile
    end;
  end loop;
end
$$;

-- Checks whether roles have rights on objects of pgque that neither pgque nor its
-- documents grant: a restore into a database with default privileges gives such rights,
-- and so does an administrator.  A command names all objects of a kind if pgque itself
-- grants the role no such right on any of them, else at most 50 objects: the next check
-- names the rest.
create or replace function pgque._health_rights(out status text, out detail text, out advice text)
language plpgsql set enable_seqscan = on set jit = off as $$
begin
  with every as materialized (
    select r.class_id, r.object_id, r.right_name, r.is_grantable, r.is_ours, r.is_told,
      case r.kind when 'procedure' then 'function' else r.kind end as kind,
      case r.grantee when 0 then 'public' else r.grantee::regrole::text end as role_name,
      (select ' (' || pg_catalog.quote_ident(a.attname) || ')' from pg_catalog.pg_attribute a
       where r.column_id > 0 and a.attrelid = r.object_id and a.attnum = r.column_id) as column_name
    from pgque._rights() r
    where r.is_granted
  ),
  others as materialized (
    select e.*, e.kind in ('table', 'sequence', 'function') and not exists (
      select from every k
      where (k.is_ours or k.is_told) and k.role_name = e.role_name and k.kind = e.kind and k.right_name = e.right_name) as everywhere
    from every e
    where not e.is_ours and not e.is_told or e.is_ours and e.is_grantable
  ),
  roles as (
    select o.role_name, pg_catalog.format('%s: %s on %s %s%s (%s%s)', o.role_name, pg_catalog.string_agg(distinct o.right_name, ', '),
      count(distinct o.object_id), o.kind, case when count(distinct o.object_id) > 1 then 's' end,
      pgque._object_name(min(o.class_id), min(o.object_id)), case when count(distinct o.object_id) > 1 then ', …' end) as text
    from others o
    group by o.role_name, o.kind
  ),
  objects as (
    select o.role_name, o.kind, pgque._object_name(o.class_id, o.object_id) as object_name, o.is_ours,
      pg_catalog.string_agg(o.right_name || coalesce(o.column_name, ''), ', ' order by o.right_name, o.column_name) as rights,
      pg_catalog.bool_or(o.is_grantable) as is_grantable
    from others o
    where not o.everywhere
    group by o.role_name, o.kind, o.class_id, o.object_id, o.is_ours
  ),
  commands as (
    select o.role_name, o.kind, pg_catalog.format('revoke %s on all %ss in schema pgque from %s%s',
      pg_catalog.string_agg(distinct o.right_name, ', '), case o.kind when 'function' then 'routine' else o.kind end, o.role_name,
      case when pg_catalog.bool_or(o.is_grantable) then ' cascade' end) as text
    from others o
    where o.everywhere
    group by o.role_name, o.kind
    union all
    select o.role_name, o.kind, pg_catalog.format('revoke %s%s on %s %s from %s%s', case when o.is_ours then 'grant option for ' end, o.rights,
      case o.kind when 'function' then 'routine' else o.kind end,
      pg_catalog.array_to_string((pg_catalog.array_agg(o.object_name order by o.object_name))[:50], ', '), o.role_name,
      case when pg_catalog.bool_or(o.is_grantable) then ' cascade' end)
    from objects o
    group by o.role_name, o.kind, o.rights, o.is_ours
  )
  select (select pg_catalog.string_agg(r.text, '; ' order by r.text) from roles r),
    (select pg_catalog.string_agg(c.text, '; ' order by c.role_name, c.kind, c.text) from commands c)
  into detail, advice;
  status := case when detail is null then 'ok' else 'warn' end;
  detail := coalesce(detail, 'no role has rights on the objects of pgque that pgque did not grant');
  advice := 'Let these roles use pgque''s own roles or grant_queue(). Then revoke: ' || advice;
end
$$;

create or replace function pgque.health(
  queue_name text, caller pgque.caller default current_user, out check_name text, out queue text, out status text, out detail text, out advice text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queues  int[] := pgque._visible($1, caller);
begin
  return query select h.check_name, h.queue, h.status, h.detail, h.advice from pgque._health(v_queues, false) h;
end
$$;
comment on function pgque.health(text, pgque.caller) is
  'Returns the checks of one queue, or with NULL of each queue that the caller has a right to, one a row: status (ok, warn or fail), detail (what '
  'was found) and advice (what to do). The checks of the whole server are left out. Any right to a queue is enough. Errors: PQ001 no such queue.';

-- Returns the checks of some queues, with null of all queues and of the server;
-- p_figures: see _queue_health().
create or replace function pgque._health(
  p_queues int[], p_figures boolean, out check_name text, out queue text, out status text, out detail text, out advice text, out figures jsonb
) returns setof record
language plpgsql as $$
declare
  v_found  record;
  v_cron   record;
begin
  if p_queues is not null then
    return query select h.* from pgque._health_of(p_queues, p_figures) h;
    return query
      select h.*, null::jsonb
      from pgque._recurring_health() h
      where h.queue in (select q.queue_name from pgque.queue q where q.queue_id = any (p_queues));
    return;
  end if;
  check_name := 'ticker'; queue := null;
  select bool_or(s.status = 'running') filter (where s.component = 'ticker') as runs, max(s.detail) filter (where s.component = 'ticker') as detail,
    max(s.status) filter (where s.component = 'scheduler') as scheduler
  into v_found from pgque.status() s;
  select c.failure, c.remedy into v_cron from pgque._cron_failure() c;
  status := case when v_found.scheduler = 'failing' then 'fail' when v_found.runs then 'ok' else 'warn' end;
  detail := case when v_found.scheduler <> 'failing' then v_found.detail else concat(case when not v_found.runs then 'no loop runs: ' end, v_cron.failure) end;
  advice := case
    when v_found.scheduler = 'failing' then v_cron.remedy
    when v_found.runs then null
    when v_found.scheduler = 'scheduled' then 'Check again in a minute. If no loop runs then: ' || coalesce(v_cron.remedy, 'select * from pgque.status()')
    when v_found.scheduler = 'none' then 'Run beside the server: pgque ticker. Or have a scheduler call ticker() and maint().'
    else 'select pgque.start(). Or have a scheduler call ticker() and maint().'
  end;
  if pg_is_in_recovery() then
    check_name := 'standby'; status := 'ok'; advice := null;
    detail := 'this server is a standby: its queues follow the primary, which runs the ticker';
  end if;
  -- If queues wait for the ticker, its check is before theirs.
  return query
    with found as materialized (select h.* from pgque._health_of(array(select q.queue_id from pgque.queue q), p_figures) with ordinality h),
    waits as (select string_agg(distinct f.queue, ', ') as queues from found f where f.check_name in ('ticks', 'retries') and f.status = 'fail')
    select f.check_name, f.queue, f.status, f.detail, f.advice, f.figures
    from (
      select _health.check_name, null as queue, case when _health.status = 'warn' and w.queues is not null then 'fail' else _health.status end as status,
        _health.detail || case when _health.status = 'warn' and w.queues is not null then ', and these queues wait: ' || left(w.queues, 200) else '' end as detail,
        _health.advice, null::jsonb as figures, 0 as ordinality
      from waits w
      union all
      select f.* from found f
    ) f
    order by f.ordinality;

  return query select h.*, null::jsonb from pgque._recurring_health() h;

  detail := pgque._loading();
  if detail is not null then
    check_name := 'restore'; queue := null;
    status := 'fail';
    detail := 'this database was loaded from a dump that is not complete, so queues neither tick nor take messages: ' || detail;
    advice := pgque._restore_advice();
    return next;
  end if;

  -- In a column, an index or a type, a value of type caller is a right that can be
  -- passed on.
  check_name := 'stored callers'; queue := null;
  select string_agg(pg_describe_object(d.classid, d.objid, d.objsubid), ', ' order by d.classid, d.objid, d.objsubid) as objects into v_found
  from pg_depend d
  left join pg_proc p on d.classid = 'pg_proc'::regclass and p.oid = d.objid
  where d.refclassid = 'pg_type'::regclass and d.refobjid in ('pgque.caller'::regtype, 'pgque.caller[]'::regtype)
    and d.deptype <> 'i' and d.classid not in ('pg_constraint'::regclass, 'pg_rewrite'::regclass)
    and p.pronamespace is distinct from 'pgque'::regnamespace;
  status := case when v_found.objects is null then 'ok' else 'fail' end;
  detail := coalesce('these can hold a value of type pgque.caller: ' || v_found.objects, 'none');
  advice := case when v_found.objects is not null then
    'Drop them. Every role that can read a stored caller can act as the role that stored it, and a dump of them cannot be restored.' end;
  return next;

  check_name := 'rights'; queue := null;
  if pgque._loading() is null then
    select h.* into status, detail, advice from pgque._health_rights() h;
  else
    -- pg_restore grants and revokes at the end.
    status := 'ok'; detail := 'not checked while a dump is being loaded'; advice := null;
  end if;
  return next;

  check_name := 'open transactions'; queue := null;
  select w.who, w.gid, w.age, w.hidden into v_found from pgque._oldest_writer() w;
  status := case when v_found.age > interval '1 hour' then 'warn' else 'ok' end;
  detail := coalesce(nullif(concat_ws('; ',
    'oldest writing transaction: ' || v_found.who || ', ' || date_trunc('seconds', v_found.age),
    case when v_found.hidden then 'other transactions write, and their age is hidden from ' || current_user end), ''), 'none');
  advice := nullif(concat_ws(' ',
    case when status <> 'ok' then 'Its messages are delivered when it commits, and the tables that it used are not emptied before. Other messages are not delayed.' end,
    case when status <> 'ok' and v_found.gid is not null then format('End the prepared transaction: commit prepared %1$L, or rollback prepared %1$L.', v_found.gid) end,
    case when v_found.hidden then format('To see their age: grant pg_read_all_stats to %I.', current_user) end), '');
  return next;

  check_name := 'transaction ids';
  select h.* into status, detail, advice from pgque._health_ids() h;
  return next;

  check_name := 'notifications';
  status := case when pg_notification_queue_usage() < 0.5 then 'ok' else 'fail' end;
  detail := format('the server''s queue of notifications is %s %% full', round(100 * pg_notification_queue_usage()));
  advice := case when status <> 'ok' then
    'End the session that listens within an open transaction: the server''s log names it. Until then ticks do not notify, and consumers find messages at their next poll.' end;
  return next;
end
$$;

create or replace function pgque.health(out check_name text, out queue text, out status text, out detail text, out advice text) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
begin
  return query select h.check_name, h.queue, h.status, h.detail, h.advice from pgque._health(null, false) h;
end
$$;
comment on function pgque.health() is
  'Returns one check a row: status (ok, warn or fail), detail (what was found) and advice (what to do). The settings health_* of a queue are its '
  'thresholds. For a queue whose tables are locked, it names the session that holds the lock. If the server has no room for the locks of all queues '
  '(two a queue, see max_locks_per_transaction), the call checks some queues, chosen at random. The check queues then warns.';

-- One pass over the queues for checks and figures: each takes its locks, and reads its
-- ticks and positions, once.
create or replace function pgque.overview(
  queue_name text default null, caller pgque.caller default current_user,
  out queue text, out paused boolean, out ev_per_sec double precision, out events bigint, out pending_events bigint, out lag_seconds double precision,
  out retries bigint, out dead_letters bigint, out in_flight bigint, out consumers bigint, out bytes bigint, out ticker_paused boolean, out problems jsonb
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0 as $$
declare
  v_queues  int[] := pgque._visible($1, caller);
  v_all     boolean := $1 is null and pgque._may(caller, 'see', null);
  v_sizes   jsonb := case when $1 is not null then pgque._sizes_soon(v_queues) end;
begin
  return query
    with found as materialized (
      select h.* from pgque._health(case when not v_all then v_queues end, true) with ordinality h
    ), seen as (
      select f.queue,
        pg_catalog.jsonb_agg(jsonb_build_object('check_name', f.check_name, 'status', f.status, 'detail', f.detail, 'advice', f.advice) order by f.ordinality)
          filter (where f.status <> 'ok') as problems,
        -- Each queue has one row with figures.
        (pg_catalog.array_agg(f.figures) filter (where f.figures is not null))[1] as figures
      from found f
      group by f.queue
    )
    select q.queue_name, q.queue_paused, (s.figures ->> 'ev_per_sec')::double precision, (s.figures ->> 'events')::bigint, (s.figures ->> 'pending')::bigint,
      (s.figures ->> 'lag')::double precision, (s.figures ->> 'retries')::bigint, (s.figures ->> 'dead')::bigint, (s.figures ->> 'in_flight')::bigint,
      (s.figures ->> 'consumers')::bigint, (v_sizes ->> q.queue_id::text)::bigint, q.queue_ticker_paused, coalesce(s.problems, '[]')
    from pgque.queue q
    left join seen s on s.queue = q.queue_name
    where q.queue_id = any (v_queues)
    union all
    select null, null, null, null, null, null, null, null, null, null, null, null, s.problems
    from seen s
    where s.queue is null and s.problems is not null
    order by 1 nulls first;
end
$$;
comment on function pgque.overview(text, pgque.caller) is
  'Returns the figures of the first page of pgque web and pgque top, one row for each queue that the caller has a right to, or for one queue. '
  'ev_per_sec: messages a second, over the last minute. events: messages sent, ever. pending_events, lag_seconds: greatest value of a consumer. '
  'retries: rejected messages, without delayed ones. in_flight: leased messages. bytes: only for one queue. problems: the rows of health() that are '
  'not ok, as a JSON array. For a member of pgque_reader, a first row without a queue has the problems of the whole server. Figures are NULL if '
  'another session has a table of the queue locked. Errors: PQ001 no such queue.';
-- ---------------------------------------------------------------------------
-- history: what queues and consumers did, and who changed what
-- ---------------------------------------------------------------------------

-- A binary search over ids finds the newest tick at each of these times, for all times
-- in one statement: a busy queue has too many ticks to read.
create or replace function pgque.queue_rates(
  queue_name text, since interval default '6 hours', buckets int default 72, caller pgque.caller default current_user,
  out start_at timestamptz, out events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'see');
  v_first  pgque.tick;
  v_end    timestamptz := pgque.clock();
begin
  if ($2 > '0' and $2 <= '1 year' and $3 between 1 and 1000) is not true then
    perform pgque._fail('PQ005', format('invalid rates of queue %I: the last %s in %s buckets', v_queue.queue_name, coalesce($2::text, 'null'), coalesce($3::text, 'null')),
      'Pass since as an interval of at most a year, and 1 to 1000 buckets: select * from pgque.queue_rates(queue, ''6 hours'', 72);');
  end if;
  v_first := pgque._find_tick(v_queue, 'earliest');
  return query execute format(
    $q$
    with recursive search as (
      select n, $1 - ($3 - n) * $2 / $3 as at, $4 as low, $5 + 1 as high
      from generate_series(0, $3) n
      union all
      select s.n, s.at, case when m.tick_id < s.high and m.tick_time <= s.at then m.tick_id else s.low end,
        case when m.tick_id < s.high and m.tick_time <= s.at then s.high else (s.low + s.high) / 2 end
      from search s
      left join lateral (
        select t.tick_id, t.tick_time from (%1$s) t where t.tick_id >= (s.low + s.high) / 2 order by t.tick_id limit 1
      ) m on true
      where s.high - s.low > 1
    )
    select s.at, lead(t.tick_event_seq) over (order by s.n) - t.tick_event_seq
    from search s
    cross join lateral (select t.tick_event_seq from (%1$s) t where t.tick_id = s.low) t
    where s.high - s.low <= 1
    order by s.n
    limit $3
    $q$, pgque._ticks_sql(v_queue.queue_id))
  using v_end, $2, $3, v_first.tick_id, (pgque._last_tick(v_queue)).tick_id;
end
$$;
comment on function pgque.queue_rates(text, interval, int, pgque.caller) is
  'Returns how many messages were sent to a queue. An interval (since, at most a year) that ends now is divided into buckets (1 to 1000) of equal '
  'length; each row has the start of one and the number of messages that ticks cover. The ticks go back two to three rotation periods, or to the '
  'slowest consumer; the time before counts as 0. Errors: PQ001 no such queue; PQ005 since or buckets out of range.';

-- Records a change that a role made by hand, in the same transaction.  A null argument
-- was left out, except the value of a setting: there it restores the default.
create or replace function pgque._record_action(p_call text, p_queue text, p_args jsonb default null) returns void
language plpgsql as $$
begin
  if not exists (select from pgque.config c where c.keep_actions is null) then
    insert into pgque.action (act_time, act_role, act_application, act_call, act_queue, act_args, leaf)
    select pgque.clock(), session_user, nullif(pg_catalog.current_setting('application_name'), ''), p_call, p_queue,
      nullif(case when p_call = 'alter_queue' or pg_catalog.right(p_call, 7) = '_config' then p_args else pg_catalog.jsonb_strip_nulls(p_args) end, '{}'), l.last_value
    from pgque.action_leaf l;
  end if;
end
$$;

create or replace function pgque.list_actions(
  queue_name text default null, limit_count int default 100, before timestamptz default null,
  out at timestamptz, out role_name name, out application text, out call text, out queue text, out args jsonb
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query
    select a.act_time, a.act_role, a.act_application, a.act_call, a.act_queue, a.act_args
    from pgque.action a
    where ($1 is null or a.act_queue = $1 collate "default") and ($3 is null or a.act_time < $3)
    order by a.act_time desc
    limit case when $2 < 0 then 0 else $2 end;
end
$$;
comment on function pgque.list_actions(text, int, timestamptz) is
  'Returns the changes that roles made by hand to queues, settings, positions, rights and messages, the newest first. role_name: the role that was '
  'logged in. application: the application_name of its session. call: the function (alter_queue also for set_queue_config). args: the arguments, '
  'without payloads and keys. Changes that were rolled back are not listed. queue_name: only those of this queue, by its name at that time. before: '
  'only older ones. set_history(''actions'', …) sets how long actions are kept. Only for the role pgque_admin.';

create or replace function pgque.consumer_lags(
  queue_name text, consumer_name text default null, since interval default '6 hours', caller pgque.caller default current_user,
  out at timestamptz, out consumer text, out lag_seconds real, out pending_events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'see');
  v_sub    int := case when $2 is not null then (pgque._subscriber($1, $2, caller)).sub_id end;
begin
  if ($3 > '0') is not true then
    perform pgque._fail('PQ005', format('invalid lags of queue %I: the last %s', v_queue.queue_name, coalesce($3::text, 'null')),
      'Pass since as an interval above 0: select * from pgque.consumer_lags(queue, null, ''6 hours'');');
  end if;
  return query
    select s.smp_time, pgque._subscriber_name(b), s.smp_lag, s.smp_pending
    from pgque.subscriber b
    cross join lateral pgque._samples(b.sub_queue, b.sub_id, pgque.clock() - $3) s
    where b.sub_queue = v_queue.queue_id and b.sub_main is null and (v_sub is null or b.sub_id = v_sub) and s.smp_time >= pgque.clock() - $3 and s.smp_lag > 1
    order by s.smp_time, 2;
end
$$;
comment on function pgque.consumer_lags(text, text, interval, pgque.caller) is
  'Returns the lag of the consumers of a queue, or of one of them, for an interval (since) that ends now. Each minute, maint() takes a sample of '
  'every consumer that has not finished the messages that ticks cover; a consumer without a sample had finished them. After a day, one sample an '
  'hour is left, with the greatest lag. lag_seconds: age of the '
  'oldest pending message. pending_events: as in get_consumer_info(). Unit: seconds, messages. set_history(''lags'', …) sets how long samples are '
  'kept. Errors: PQ001 no such queue; PQ005 since is not above 0; PQ011 not subscribed.';

-- Takes a lock if it is free, and returns whether it did.
create or replace function pgque._can_lock(p_table regclass, p_mode text) returns boolean
language plpgsql as $$
begin
  execute pg_catalog.format('lock table %s in %s mode nowait', p_table, p_mode);
  return true;
exception
  when lock_not_available then
    return false;
end
$$;

-- Returns the samples of a queue (p_sub 0), a consumer, or all queues (0, 0) since a time,
-- and the last one before it: those of each minute, and for the time before these, those
-- of each hour.
create or replace function pgque._samples(p_queue int, p_sub int, p_since timestamptz) returns setof pgque.sample
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_minutes  timestamptz := (select min(s.smp_time) from pgque.sample s where s.smp_queue = p_queue and s.smp_sub = p_sub);
begin
  return query
    select f.*
    from (
      select s.* from pgque.sample s where s.smp_queue = p_queue and s.smp_sub = p_sub and s.smp_time >= p_since
      union all
      select h.* from pgque.sample_hour h
      where h.smp_queue = p_queue and h.smp_sub = p_sub and h.smp_time >= p_since and (h.smp_time < v_minutes or v_minutes is null)
      union all
      (
        select b.*
        from (
          (select s.* from pgque.sample s where s.smp_queue = p_queue and s.smp_sub = p_sub and s.smp_time < p_since order by s.smp_time desc limit 1)
          union all
          (select h.* from pgque.sample_hour h where h.smp_queue = p_queue and h.smp_sub = p_sub and h.smp_time < p_since order by h.smp_time desc limit 1)
        ) b
        order by b.smp_time desc
        limit 1
      )
    ) f;
end
$$;

-- Returns when no samples were taken: before the first one, between two that are further
-- apart than three minutes, and since the last one if it is as old.
create or replace function pgque._unsampled(p_since timestamptz) returns tstzmultirange
language sql set enable_seqscan = off set jit = off as $$
  select coalesce(pg_catalog.range_agg(g.gap), '{}')
  from (
    select tstzrange(s.smp_gap, s.smp_time) as gap
    from (
      select s.smp_gap, s.smp_time from pgque.sample s where s.smp_queue = 0 and s.smp_sub = 0 and s.smp_time >= p_since
      union all
      select h.smp_gap, h.smp_time from pgque.sample_hour h where h.smp_queue = 0 and h.smp_sub = 0 and h.smp_time >= p_since
    ) s
    where s.smp_gap <= s.smp_time
    union all
    select tstzrange(null, least(
      (select min(s.smp_time) from pgque.sample s where s.smp_queue = 0 and s.smp_sub = 0),
      (select min(h.smp_time) from pgque.sample_hour h where h.smp_queue = 0 and h.smp_sub = 0)))
    union all
    select tstzrange(l.at, null)
    from (select to_timestamp(coalesce(pg_catalog.pg_sequence_last_value('pgque.sampled'), 0)) as at) l
    where l.at < pgque.clock() - interval '3 minutes'
  ) g
$$;

create or replace function pgque.history(
  queue_name text default null, consumer_name text default null, since interval default '6 hours', buckets int default 72,
  caller pgque.caller default current_user,
  out start_at timestamptz, out sent bigint, out delivered bigint, out failed bigint, out dead bigint, out lag_seconds real, out pending_events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queues  int[] := pgque._visible($1, caller);
  v_sub     int;
  v_end     timestamptz := pgque.clock();
  v_width   interval := $3 / nullif($4, 0);
  v_gaps    tstzmultirange;
  v_every   boolean := $1 is null and pgque._may(caller, 'see', null);   -- whether the samples of all queues are the caller's to see
begin
  if ($3 > '0' and $3 <= '1 year' and $4 between 1 and 1000 and ($2 is null or $1 is not null)) is not true then
    perform pgque._fail('PQ005', format('invalid history of %s: the last %s in %s buckets', coalesce('queue ' || quote_ident($1), 'all queues'), coalesce($3::text, 'null'), coalesce($4::text, 'null')),
      'Pass since as an interval of at most a year, 1 to 1000 buckets, and a consumer only with its queue: select * from pgque.history(queue, consumer, ''6 hours'', 72);');
  end if;
  v_sub := case when $2 is not null then (pgque._subscriber($1, $2, caller)).sub_id end;
  v_gaps := pgque._unsampled(v_end - $3);
  return query
    with series as materialized (
      select 0 as queue, 0 as sub, null::timestamptz as born where v_every
      union all
      select q.queue_id, p.sub, case when p.sub = 0 then q.queue_created_at end
      from pgque.queue q
      cross join lateral (select 0 as sub union all select s.sub_id from pgque.subscriber s where s.sub_queue = q.queue_id and s.sub_main is null) p
      where q.queue_id = any (v_queues) and not v_every and (v_sub is null or p.sub in (0, v_sub))
    ), step as materialized (
      -- Messages sent or delivered while no samples were taken count nowhere.
      select s.smp_time, s.smp_queue = 0 or s.smp_sub > 0 as lags, s.smp_lag, s.smp_pending, f.known,
        greatest(s.smp_sent - coalesce(lag(s.smp_sent) over w, case when r.born >= s.smp_time - interval '3 minutes' then 0 end), 0) as sent,
        greatest(s.smp_passed - lag(s.smp_passed) over w, 0) as passed,
        greatest(s.smp_redelivered - lag(s.smp_redelivered) over w, 0) as again,
        greatest(s.smp_removed - lag(s.smp_removed) over w, 0) + greatest(s.smp_dead - lag(s.smp_dead) over w, 0) as dead
      from series r
      cross join lateral pgque._samples(r.queue, r.sub, v_end - $3) s
      cross join lateral (select not exists (select from unnest(v_gaps) g where upper(g) = s.smp_time)) f (known)
      window w as (partition by s.smp_queue, s.smp_sub order by s.smp_time)
    ), bucket as materialized (
      select n, v_end - $3 + n * v_width as at, v_end - $3 + (n + 1) * v_width as until from generate_series(0, $4 - 1) n
    ), filled as materialized (
      select floor(extract(epoch from t.smp_time - (v_end - $3)) / extract(epoch from v_width))::int as n,
        sum(t.sent) filter (where t.known) as sent, sum(t.passed) filter (where t.known) as passed,
        sum(t.again) filter (where t.known) as again, sum(t.dead) filter (where t.known) as dead,
        max(t.smp_lag) as lag, max(t.smp_pending) as pending, bool_or(t.lags and t.smp_lag is null) as unclear
      from step t
      where t.smp_time >= v_end - $3
      group by 1
    )
    select b.at, x.sent, x.passed, x.again + x.dead, x.dead, x.lag, x.pending
    from bucket b
    left join filled f on f.n = b.n
    left join lateral (
      select coalesce(f.sent, 0)::bigint as sent, coalesce(f.passed, 0)::bigint as passed, coalesce(f.again, 0)::bigint as again, coalesce(f.dead, 0)::bigint as dead,
        coalesce(f.lag, case when f.unclear is not true then 0 end) as lag, coalesce(f.pending, case when f.unclear is not true then 0 end) as pending
      -- Half a bucket is enough to tell what its rest was like.
      where coalesce((select sum(upper(g) - lower(g)) from unnest(v_gaps * tstzmultirange(tstzrange(b.at, b.until))) g), '0') <= v_width / 2
    ) x on true
    order by b.n;
end
$$;
comment on function pgque.history(text, text, interval, int, pgque.caller) is
  'Returns what a queue did, or one of its consumers, or all queues that the caller may see (NULL). An interval (since, at most a year) that ends now is divided into buckets (1 to '
  '1000) of equal length, one a row. Each minute, maint() takes a sample of figures that exist anyway; after a day, one sample an hour is left. All columns are NULL '
  'for a bucket of which more than half was not sampled, because nothing ran maint(). '
  'sent: messages sent to the queue, also those that were rolled back. '
  'delivered: by how many messages the position of the consumers moved forward, each message once for each consumer; expired and cancelled messages are among them, those that '
  'retention_period skipped are not. failed: deliveries that failed or whose lease expired, counted when the message is redelivered or given up. dead: messages given up, '
  'that is dead letters, also those that were forwarded, and messages that drop_policy dropped. A dead letter that was deleted or requeued within the minute is missing. '
  'lag_seconds, pending_events: greatest value of a consumer, as in consumer_lags(); at most 200 of those that lag are measured a minute; NULL if a consumer lagged and none was measured. Unit: messages, seconds. '
  'set_history(''lags'', …) sets how long samples are kept. Errors: PQ001 no such queue; PQ005 since or buckets out of range, or a consumer without a queue; PQ011 not subscribed.';

-- Returns whether the last tick may be ahead of a consumer, or batches of it are open.  A
-- position moves past a window with the call after its ack.
create or replace function pgque._is_behind(p_queue pgque.queue, p_pos pgque.position) returns boolean
language sql volatile as $$
  select coalesce(n.tick < pg_catalog.pg_sequence_last_value(p_queue.queue_tick_seq) and n.seq < pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), false)
    or exists (select from pg_catalog.unnest(p_pos.pos_open) o (token) where not pgque._is_finished(o.token))
  from (select p_pos.pos_fresh > 0 and p_pos.pos_last_id is null and pgque._is_finished(p_pos.pos_batch)) w (past)
  cross join lateral (
    select case when w.past then p_pos.pos_next_tick else p_pos.pos_tick end, case when w.past then p_pos.pos_next_event_seq else p_pos.pos_event_seq end
  ) n (tick, seq)
$$;

create or replace function pgque._is_finished(p_batch bigint) returns boolean
language sql volatile as $$ select exists (select from pgque.settled s where s.set_batch = p_batch and s.set_ev_id = 0 and s.set_what = 'closed') $$;

-- Stores the samples of some queues, of their consumers, and of all queues together.  A
-- row whose figures have not changed is not written, unless the leaf is new or samples
-- were missing before.  p_subs, p_lags, p_pending: the lags that were measured.  p_before:
-- the time of the samples before.
create or replace function pgque._add_samples(
  p_queues int[], p_subs int[], p_lags real[], p_pending bigint[], p_before timestamptz
) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now   timestamptz := pgque.clock();
  v_leaf  int := (select l.last_value from pgque.sample_leaf l);
  v_dead  bigint := coalesce(pg_catalog.pg_sequence_last_value('pgque.dead_letter_dl_id_seq'), 0);
  v_all   pgque.sample;
  v_gap   timestamptz;
begin
  -- If the clock was set back, samples of its future would stand between later ones, and
  -- their counters would go up and down.  Without them, the counters go on.
  if p_before > v_now then
    delete from pgque.sample s where s.smp_time > v_now;
    delete from pgque.sample_hour h where h.smp_time > v_now;
  end if;
  select s.* into v_all from pgque.sample s where s.smp_queue = 0 and s.smp_sub = 0 order by s.smp_time desc limit 1;
  v_gap := case
    when v_all.smp_time is null then v_now
    when p_before not between v_now - interval '3 minutes' and v_now then greatest(p_before, v_all.smp_time)
  end;
  with counted as materialized (
    select t.tal_sub, sum(t.tal_count) filter (where t.tal_what = 'redelivered') as redelivered, sum(t.tal_count) filter (where t.tal_what in ('dropped', 'forwarded')) as removed
    from pgque.tally t
    where t.tal_sub <> 0
    group by 1
  ), letter as materialized (
    select d.dl_queue_id, d.dl_consumer_id, count(*) as n
    from pgque.dead_letter d
    where d.dl_id > greatest(coalesce(v_all.smp_mark, v_dead), v_dead - 100000) and d.dl_id <= v_dead and d.dl_forward is null
    group by 1, 2
  ), figure as materialized (
    select q.queue_id as queue, 0 as sub, coalesce(pg_sequence_last_value(q.queue_event_seq), 0) as sent, null::bigint as passed, null::bigint as redelivered, null::bigint as removed,
      null::bigint as letters, null::real as lag, null::bigint as pending, q.queue_created_at as born
    from pgque.queue q
    where q.queue_id = any (p_queues)
    union all
    select s.sub_queue, s.sub_id, null,
      case
        when (n.pos).pos_fresh > 0 and (n.pos).pos_last_id is null then (n.pos).pos_next_event_seq
        else greatest((n.pos).pos_event_seq, least(case when (n.pos).pos_fresh > 0 then (n.pos).pos_last_id else (n.pos).pos_done_id end, (n.pos).pos_next_event_seq))
      end - (n.pos).pos_skipped,
      coalesce(c.redelivered, 0), coalesce(c.removed, 0), coalesce(l.n, 0),
      case when m.sub is null and not pgque._is_behind(q, n.pos) then 0 else m.lag end, case when m.sub is null and not pgque._is_behind(q, n.pos) then 0 else m.pending end, null
    from pgque.queue q
    join pgque.subscriber s on s.sub_queue = q.queue_id and s.sub_main is null
    cross join lateral (select p as pos from pgque.position p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1) n
    left join counted c on c.tal_sub = s.sub_id
    left join letter l on l.dl_queue_id = s.sub_queue and l.dl_consumer_id = s.sub_consumer
    left join unnest(p_subs, p_lags, p_pending) m (sub, lag, pending) on m.sub = s.sub_id
    where q.queue_id = any (p_queues)
  ), step as materialized (
    select f.*, o.smp_dead, o.smp_sent, o.smp_passed, o.smp_redelivered, o.smp_removed,
      v_gap is not null or o.leaf is distinct from v_leaf or f.letters > 0 or f.sub <> 0 and coalesce(f.lag, 1) > 0
        or (f.sent, f.passed, f.redelivered, f.removed, f.lag, f.pending)
          is distinct from (o.smp_sent, o.smp_passed, o.smp_redelivered, o.smp_removed, o.smp_lag, o.smp_pending) as changed
    from figure f
    left join lateral (
      select s.* from pgque.sample s where s.smp_queue = f.queue and s.smp_sub = f.sub order by s.smp_time desc limit 1
    ) o on true
  ), added as (
    insert into pgque.sample (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead)
    select v_now, t.queue, t.sub, t.lag, t.pending, v_leaf, t.sent, t.passed, t.redelivered, t.removed, case when t.sub <> 0 then coalesce(t.smp_dead, 0) + t.letters end
    from step t
    where t.changed
  ), total as materialized (
    -- Sums of what was added, so that a queue that is dropped takes nothing back.
    select
      coalesce(sum(greatest(t.sent - coalesce(t.smp_sent, case when t.born >= p_before then 0 end), 0)), 0) as sent,
      coalesce(sum(greatest(t.passed - t.smp_passed, 0)), 0) as passed,
      coalesce(sum(greatest(t.redelivered - t.smp_redelivered, 0)), 0) as redelivered,
      coalesce(sum(greatest(t.removed - t.smp_removed, 0)), 0) as removed,
      coalesce(sum(t.letters), 0) as letters, coalesce(max(t.lag), 0) as lag, coalesce(max(t.pending), 0) as pending
    from step t
  )
  insert into pgque.sample (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead, smp_mark, smp_gap)
  select v_now, 0, 0, a.lag, a.pending, v_leaf, coalesce(v_all.smp_sent, 0) + a.sent, coalesce(v_all.smp_passed, 0) + a.passed, coalesce(v_all.smp_redelivered, 0) + a.redelivered,
    coalesce(v_all.smp_removed, 0) + a.removed, coalesce(v_all.smp_dead, 0) + a.letters, v_dead, v_gap
  from total a
  where v_gap is not null or v_all.leaf <> v_leaf or a.sent + a.passed + a.redelivered + a.removed + a.letters > 0
    or v_dead <> v_all.smp_mark or a.lag > 0 or (a.lag, a.pending) is distinct from (v_all.smp_lag, v_all.smp_pending);
  -- The hour of the run before is over, or nothing is known of its rest.
  if v_gap is not null or date_trunc('hour', p_before) <> date_trunc('hour', v_now) then
    insert into pgque.sample_hour (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead)
    select o.smp_time, o.smp_queue, o.smp_sub, h.lag, h.pending, h.leaf, o.smp_sent, o.smp_passed, o.smp_redelivered, o.smp_removed, o.smp_dead
    from (
      select 0 as queue, 0 as sub
      union all
      select q.id, 0 from unnest(p_queues) q (id)
      union all
      select s.sub_queue, s.sub_id from pgque.subscriber s where s.sub_queue = any (p_queues) and s.sub_main is null
    ) r
    cross join lateral (
      select max(s.smp_time) as last, max(s.smp_lag) as lag, max(s.smp_pending) as pending, (select l.last_value from pgque.sample_hour_leaf l) as leaf
      from pgque.sample s
      where s.smp_queue = r.queue and s.smp_sub = r.sub and s.smp_time >= date_trunc('hour', p_before) and s.smp_time < v_now
    ) h
    join pgque.sample o on o.smp_queue = r.queue and o.smp_sub = r.sub and o.smp_time = h.last;
  end if;
  -- So that also the hours count nothing of a gap, and all that follows it.
  if v_gap is not null then
    insert into pgque.sample_hour (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead, smp_gap)
    select s.smp_time, s.smp_queue, s.smp_sub, s.smp_lag, s.smp_pending, l.last_value, s.smp_sent, s.smp_passed, s.smp_redelivered, s.smp_removed, s.smp_dead, s.smp_gap
    from pgque.sample s, pgque.sample_hour_leaf l
    where s.smp_time = v_now;
  end if;
end
$$;

-- Returns 0, also if another session takes the samples, or a minute has not passed.  The
-- lag of a consumer needs the tables of its queue, and a search in them.  So it is
-- measured for at most 200 consumers a minute, those with the most messages ahead first,
-- and only for those that the last tick is ahead of.  The loop ticks no queue meanwhile, so
-- a locked queue is waited for only once.  Each queue keeps two locks until the transaction
-- ends.  If the server has no room for all queues, some are chosen at random: counters go
-- on, so that the next sample of the others has what this one lacks.
create or replace function pgque.maint_lags() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_before   timestamptz;
  v_behind   record;
  v_found    record;
  v_queues   int[];
  v_subs     int[] := '{}';   -- of which the lag is known, and the lags
  v_lags     real[] := '{}';
  v_pending  bigint[] := '{}';
  v_locked   int[] := '{}';
  v_end      timestamptz := clock_timestamp() + interval '1 second';
begin
  perform pgque._need_read_committed('maint_lags()');
  if pgque._is_loading() or exists (select from pgque.config c where c.keep_lags is null)
    or not pgque._is_due(to_timestamp(coalesce(pg_sequence_last_value('pgque.sampled'), 0)), '1 minute')
    or not pg_try_advisory_xact_lock(hashtext('pgque.sample'), 0)
  then
    return 0;
  end if;
  -- Another session may have taken the samples before this one had the lock.
  v_before := to_timestamp(coalesce(pg_sequence_last_value('pgque.sampled'), 0));
  if not pgque._is_due(v_before, '1 minute') or not pgque._can_lock('pgque.sample', 'row exclusive') or not pgque._can_lock('pgque.sample_hour', 'row exclusive') then
    return 0;
  end if;
  perform setval('pgque.sampled', floor(extract(epoch from pgque.clock()))::bigint);
  v_queues := array(select q.queue_id from pgque.queue q order by random() limit pgque._lock_room() / 4);
  for v_behind in
    select q, s, n.pos
    from pgque.queue q
    join pgque.subscriber s on s.sub_queue = q.queue_id
    cross join lateral (select p as pos from pgque.position p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1) n
    where s.sub_main is null and q.queue_id = any (v_queues) and pgque._is_behind(q, n.pos)
    order by pg_sequence_last_value(q.queue_event_seq) - (n.pos).pos_event_seq desc
    limit 200
  loop
    exit when clock_timestamp() > v_end;
    continue when (v_behind.q).queue_id = any (v_locked);
    begin
      perform pgque._shorten_lock_timeout();
      select c.lag, c.pending_events into v_found
      from pgque._consumers(v_behind.q, array[v_behind.s], array[v_behind.pos], pgque._missing_leaf((v_behind.q).queue_id) is not null) c;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        v_subs := v_subs || (v_behind.s).sub_id;
        v_lags := v_lags || extract(epoch from v_found.lag)::real;
        v_pending := v_pending || v_found.pending_events;
      when others then
        v_locked := v_locked || (v_behind.q).queue_id;   -- locked, or dropped meanwhile
    end;
  end loop;
  perform pgque._add_samples(v_queues, v_subs, v_lags, v_pending, v_before);
  return 0;
end
$$;
comment on function pgque.maint_lags() is
  'Part of maint(): takes the samples of history() and consumer_lags(), at most once a minute. Returns 0, since it leaves nothing to do. Errors: 25000 in a REPEATABLE READ or '
  'SERIALIZABLE transaction.';

create or replace function pgque.set_history(what text, keep interval) returns interval
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._init();
  if pgque._period($2::text) > '100 years' then
    raise data_exception using message = 'more than 100 years';
  elsif $2 is null then
    perform pgque._record_action('set_history', null, jsonb_build_object('what', $1, 'keep', 'off'));
  end if;
  if $1 = 'actions' then
    update pgque.config c set keep_actions = $2;
  elsif $1 = 'lags' then
    update pgque.config c set keep_lags = $2;
  else
    raise data_exception using message = 'no such history';
  end if;
  perform pgque._record_action('set_history', null, jsonb_build_object('what', $1, 'keep', $2)) where $2 is not null;
  return $2;
exception
  when data_exception or check_violation then
    perform pgque._fail('PQ005', format('invalid history: %s for %s', quote_nullable($2), quote_nullable($1)),
      'Use actions or lags, and an interval such as 30 days, at most 100 years, or NULL for off. The setting is unchanged.', sqlerrm);
end
$$;
comment on function pgque.set_history(text, interval) is
  'Sets how long the history of actions (list_actions(); 30 days by default) or of figures (lags: history() and consumer_lags(); 7 days) is kept at least, and returns '
  'that interval. NULL stops the recording; older entries stay. A history that fills 64 MB is cut to its newer half. Errors: PQ005 no such '
  'history, or keep is not above 0, or above 100 years.';

-- Empties the other leaf of a history once the current one reaches back far enough, or
-- is full.  The next call makes the empty leaf the current one.  So recording never
-- waits for a transaction that emptied a leaf and stays open.  A history that is off
-- keeps its rows.
create or replace function pgque._rotate_history() returns int
language plpgsql as $$
declare
  v_history  record;
  v_leaf     int;
  v_other    text;
  v_due      boolean;
  v_count    int := 0;
begin
  for v_history in
    select h.name, h.time, pgque.clock() - h.keep as since
    from pgque.config c
    cross join lateral (values ('action', 'act_time', c.keep_actions), ('sample', 'smp_time', least(c.keep_lags, '1 day')), ('sample_hour', 'smp_time', c.keep_lags)) h (name, time, keep)
    where h.keep is not null
  loop
    continue when not pgque._can_lock(('pgque.' || v_history.name)::regclass, 'access share');
    execute pg_catalog.format('select l.last_value from pgque.%I l', v_history.name || '_leaf') into v_leaf;
    execute pg_catalog.format(
      'select (select h.%1$I from pgque.%2$I h limit 1) < $1 and not exists (select from pgque.%3$I h where h.%1$I >= $1)'
      ' or pg_catalog.pg_relation_size(%4$L) > 33554432',
      v_history.time, v_history.name || '_' || v_leaf, v_history.name || '_' || (1 - v_leaf), 'pgque.' || v_history.name || '_' || v_leaf)
    into v_due using v_history.since;
    v_other := pg_catalog.format('pgque.%s_%s', v_history.name, 1 - v_leaf);
    if v_due and pg_catalog.pg_relation_size(v_other) > 0 then
      v_count := v_count + pgque._empty(v_other::regclass, false);
    elsif v_due then
      perform pg_catalog.setval('pgque.' || v_history.name || '_leaf', 1 - v_leaf);
      v_count := v_count + 1;
    end if;
  end loop;
  return v_count;
end
$$;
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
-- ---------------------------------------------------------------------------
-- grants
-- ---------------------------------------------------------------------------

-- Returns which role may call which function: names of functions, with all their
-- signatures.  Only the owner may call a function that is not listed.  Functions that
-- check their caller (their last argument) may also be called by pgque_user.
create or replace function pgque._grants() returns table (func_name text, role_name text)
language sql immutable as $$
  select f.name, r.name
  from (values
    ('pgque_user', 'version clock _fail send send_batch send_idem insert_event create_recurring jsontriga logutriga sqltriga register_consumer
      unregister_consumer ack finish_batch next_batch next_batch_info next_batch_custom subscribe_subconsumer
      unsubscribe_subconsumer dead event_retry set_queue_config force_tick
      _row_event _is_old_change _url_encode _headers _bad_headers _no_payloads _no_headers'),
    ('pgque_writer', 'version clock _fail my_rights send send_batch send_idem insert_event create_recurring next_runs drop_recurring pause_recurring
      resume_recurring run_recurring list_recurring _create_recurring current_event_table jsontriga logutriga sqltriga sink_begin
      sink_servers sink_commit
      _send _headers _are_headers _bad_headers _no_headers _open_slot _sink_room _takes_nothing _row_event _is_old_change _url_encode _send_as
      _send_all _send_many _no_payloads'),
    ('pgque_reader', 'version clock _fail my_rights list_recurring subscribe register_consumer register_consumer_at unsubscribe unregister_consumer receive ack
      finish_batch nack archive release extend set_visibility list_workers message_status next_batch next_batch_info
      next_batch_custom get_batch_events get_batch_info event_retry batch_retry register_subconsumer
      subscribe_subconsumer unregister_subconsumer unsubscribe_subconsumer touch_subconsumer receive_coop peek
      queue_incarnation tick_for next_tick next_window split_window read_window read_window_cursor seek seek_to_time open_stream subscribe_archive archive_of archive_next archive_read archive_read_cursor stream_lag stage_dead unstage_dead dead get_queue_info
      get_consumer_info queue_config queue_settings queue_rates consumer_lags history metrics health overview status share_consumer unshare_consumer set_key_concurrency
      _ack _dead _next_batch _open_batch _join'),
    ('pgque_admin', '_fail _no_standby create_queue grant_queue revoke_queue alter_queue set_queue_config pause resume drop_queue rename_queue
      set_default_config set_schedule purge purge_key cancel expire_messages delete_expired reclaim retry_now list_messages get_message message_history
      list_poison archive_poison archive_list archive_replay archive_purge ticker force_next_tick force_tick
      confirm_restore ticker_loop set_tick_period_ms set_tick_share start stop maint maint_operations maint_retry_events maint_recurring
      maint_rotate_tables_step1 maint_rotate_tables_step2 maint_retain maint_lapsed maint_expire maint_tables
      get_batch_cursor dlq_inspect dlq_replay dlq_replay_all dlq_requeue dlq_requeue_all dlq_edit dlq_purge dlq_delete dlq_reasons list_actions set_history maint_lags
      _ticked_queues _loop_state _loop_lock _loop_end _loop_sleep _loop_operations _loop_maintain _loop_check _queues_due _check_queue _look_at _position_of
      _cursor_sql _event_columns _maint_operation _forward_letters')
  ) r (name, functions)
  cross join lateral pg_catalog.regexp_split_to_table(r.functions, '\s+') f (name)
$$;

-- Returns what other rights on objects pgque grants.  The names of a queue's tables and
-- sequences are without their numbers.
create or replace function pgque._object_grants() returns table (kind text, object_name text, role_name text, right_name text)
language sql immutable as $$
  select g.kind, o.name, r.name, i.name
  from (values
    ('schema', 'pgque', 'pgque_reader pgque_writer pgque_admin pgque_user', 'USAGE'),
    ('table', 'queue consumer subscription tick retry_queue dead_letter dead_letters archive config queue_right subscriber sink_epoch sink_attempt event__ tick__',
      'pgque_admin', 'SELECT'),
    ('table', 'sink sink_bulk', 'pgque_writer', 'SELECT INSERT'),
    ('table', 'sink_stage_0 sink_stage_1', 'pgque_writer', 'INSERT'),
    ('sequence', 'event__seq', 'pgque_writer', 'USAGE'),
    -- A writer may have a view or a rule of its own over the sinks.
    ('type', 'sink_queue', 'pgque_writer', 'USAGE')
  ) g (kind, objects, roles, rights)
  cross join lateral pg_catalog.regexp_split_to_table(g.objects, ' ') o (name)
  cross join lateral pg_catalog.regexp_split_to_table(g.roles, ' ') r (name)
  cross join lateral pg_catalog.regexp_split_to_table(g.rights, ' ') i (name)
$$;

-- Returns the rights on pgque's objects, without those of the owner: which exist
-- (is_granted), which pgque grants (is_ours), which the documents tell administrators to
-- grant (is_told), and which the owner's default privileges give (is_default).  grantee
-- 0 is PUBLIC.  is_grantable: with grant option.  p_objects: only these.
-- PUBLIC keeps USAGE of types, as everywhere in PostgreSQL, but not of the domains.
create or replace function pgque._rights(p_objects oid[] default null) returns table (
  class_id oid, object_id oid, column_id int, kind text, grantee oid, right_name text, is_granted boolean, is_grantable boolean,
  is_ours boolean, is_told boolean, is_default boolean
)
language sql stable as $$
  with objects as materialized (
    select 'pg_catalog.pg_class'::regclass::oid as class_id, c.oid as object_id, 0 as column_id,
      case when c.relkind = 'S' then 'sequence' else 'table' end as kind,
      case when c.relname like 'event\_%' or c.relname like 'tick\_%' then pg_catalog.translate(c.relname, '0123456789', '') else c.relname end as name,
      c.relowner as owner, c.relacl as acl
    from pg_catalog.pg_class c
    -- By their ids, since the catalog of a server with many queues is large.
    where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
      and c.oid = any (coalesce(p_objects, array(select k.oid from pg_catalog.pg_class k where k.relnamespace = 'pgque'::regnamespace)))
    union all
    select 'pg_catalog.pg_proc'::regclass, p.oid, 0, case when p.prokind = 'p' then 'procedure' else 'function' end,
      p.proname, p.proowner, coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))
    from pg_catalog.pg_proc p
    where p.pronamespace = 'pgque'::regnamespace
      and p.oid = any (coalesce(p_objects, array(select k.oid from pg_catalog.pg_proc k where k.pronamespace = 'pgque'::regnamespace)))
    union all
    select 'pg_catalog.pg_type'::regclass, t.oid, 0, 'type', t.typname, t.typowner, coalesce(t.typacl, pg_catalog.acldefault('T', t.typowner))
    from pg_catalog.pg_type t
    where t.typnamespace = 'pgque'::regnamespace and (t.typacl is not null or t.typtype = 'd') and p_objects is null
    union all
    select 'pg_catalog.pg_namespace'::regclass, n.oid, 0, 'schema', n.nspname, n.nspowner, n.nspacl
    from pg_catalog.pg_namespace n
    where n.nspname = 'pgque' and p_objects is null
    union all
    select 'pg_catalog.pg_class'::regclass, c.oid, a.attnum, 'table', c.relname, c.relowner, a.attacl
    from (select t.attrelid, t.attnum, t.attacl from pg_catalog.pg_attribute t where t.attacl is not null and p_objects is null offset 0) a
    join pg_catalog.pg_class c on c.oid = a.attrelid
    where c.relnamespace = 'pgque'::regnamespace
  ),
  granted as (
    select o.class_id, o.object_id, o.column_id, o.kind, o.name, a.grantee, a.privilege_type as right_name, pg_catalog.bool_or(a.is_grantable) as is_grantable
    from objects o
    cross join lateral pg_catalog.aclexplode(o.acl) a
    -- A dropped role has no name.  The snapshot of a REPEATABLE READ transaction may not
    -- show a new role in pg_roles, but regrole does.
    where a.grantee <> o.owner and a.grantee::regrole::text <> a.grantee::text
      and (a.grantee <> 0 or o.kind <> 'type' or o.name in ('caller', 'sink_queue'))
    group by 1, 2, 3, 4, 5, 6, 7
  ),
  ours as (
    select o.class_id, o.object_id, o.column_id, o.kind, o.name, pg_catalog.to_regrole(g.role_name)::oid as grantee, g.right_name
    from objects o
    join (
      select f.kind, g.func_name as object_name, g.role_name, 'EXECUTE' as right_name
      from pgque._grants() g, (values ('function'), ('procedure')) f (kind)
      union all
      select g.* from pgque._object_grants() g
    ) g on g.kind = o.kind and g.object_name = o.name
    where o.column_id = 0
    union
    select o.class_id, o.object_id, 0, o.kind, o.name, pg_catalog.to_regrole('pgque_user')::oid, 'EXECUTE'
    from objects o
    join pg_catalog.pg_proc p on p.oid = o.object_id
    where o.class_id = 'pg_catalog.pg_proc'::regclass and pg_catalog.array_position(p.proargtypes::oid[], 'pgque.caller'::regtype::oid) is not null
  ),
  given as (
    select distinct k.kind, g.grantee, g.privilege_type as right_name
    from pg_catalog.pg_namespace n
    join pg_catalog.pg_default_acl d on d.defaclrole = n.nspowner and d.defaclnamespace in (0, n.oid)
    join (values ('r', 'table'), ('S', 'sequence'), ('f', 'function'), ('f', 'procedure'), ('T', 'type'), ('n', 'schema')) k (code, kind)
      on k.code = d.defaclobjtype::text
    cross join lateral pg_catalog.aclexplode(d.defaclacl) g
    where n.nspname = 'pgque'
  )
  select class_id, object_id, column_id, kind, grantee, right_name, a.name is not null, coalesce(a.is_grantable, false), o.name is not null,
    kind = 'table' and a.name in ('queue', 'consumer', 'subscriber', 'sink_epoch', 'sink_attempt') and right_name = 'SELECT'
      and not a.is_grantable and grantee <> 0 and pg_catalog.pg_has_role(grantee, 'pgque_reader', 'member'),
    exists (
      select from given d
      where d.grantee = a.grantee and d.right_name = a.right_name and d.kind = a.kind)
  from granted a
  full join ours o using (class_id, object_id, column_id, kind, grantee, right_name)
$$;

-- Returns the name of an object of _rights() for GRANT and REVOKE, whatever search_path
-- is.
create or replace function pgque._object_name(p_class oid, p_object oid) returns text
language sql stable as $$ select i.identity from pg_catalog.pg_identify_object(p_class, p_object, 0) i $$;

-- Makes the rights on objects those that pgque grants.  With p_only_ours it revokes all
-- others: for objects that this transaction created, on which default privileges of the
-- owner may have given rights.  Without, it leaves other rights that an administrator
-- may have granted: it revokes those of PUBLIC and of pgque's roles on functions, and
-- those that default privileges give now, except grants that the documents tell to make.
-- It changes an object only if needed.  A TRUNCATE that runs at the same time changes
-- the same row of the catalog.  So each change first waits for it, and keeps later ones
-- away until the transaction ends, if the server has room for the lock.  A change that
-- fails is reported, and health() then shows it.
create or replace function pgque._set_rights(p_objects oid[] default null, p_only_ours boolean default true) returns void
language plpgsql set jit = off as $$
declare
  v_before  text := pg_catalog.current_setting('lock_timeout');
  v_wait    text := '5s';
  v_room    bigint := pgque._lock_room() / 2;
  v_change  record;
begin
  for v_change in
    with changes as (
      select r.*, o.name as object_name, case r.grantee when 0 then 'public' else r.grantee::regrole::text end as role_name,
        (select ' (' || pg_catalog.quote_ident(a.attname) || ')' from pg_catalog.pg_attribute a
         where r.column_id > 0 and a.attrelid = r.object_id and a.attnum = r.column_id) as column_name,
        case when not r.is_granted then 'grant %s on %s %s to %s' when r.is_ours then 'revoke grant option for %s on %s %s from %s cascade'
          else 'revoke %s on %s %s from %s cascade' end as command
      from pgque._rights(p_objects) r
      cross join lateral pgque._object_name(r.class_id, r.object_id) o (name)   -- null: dropped meanwhile
      where o.name is not null and (not r.is_granted
        or (not r.is_ours or r.is_grantable)
          and (p_only_ours or not r.is_told and (
            r.is_default or r.grantee = 0
            or r.kind in ('function', 'procedure') and r.grantee::regrole::text in ('pgque_reader', 'pgque_writer', 'pgque_admin', 'pgque_user'))))
    ),
    statements as (
      select c.kind, c.object_name, pg_catalog.format(c.command,
        pg_catalog.string_agg(c.right_name || coalesce(c.column_name, ''), ', '),
        c.kind, c.object_name, c.role_name) as statement
      from changes c
      group by c.kind, c.object_name, c.command, c.role_name
    )
    select s.kind, s.object_name as name, pg_catalog.string_agg(s.statement, '; ') as statements
    from statements s
    group by s.kind, s.object_name
  loop
    if p_only_ours then
      execute v_change.statements;
      continue;
    end if;
    -- Only tables are truncated, and LOCK refuses a materialized view.
    if v_room > 0 and (select c.relkind in ('r', 'p') from pg_catalog.pg_class c where v_change.kind = 'table' and c.oid = pg_catalog.to_regclass(v_change.name)) then
      v_change.statements := pg_catalog.format('lock table only %s in access share mode; ', v_change.name) || v_change.statements;
      v_room := v_room - 1;
    end if;
    begin
      perform pg_catalog.set_config('lock_timeout', v_wait, true);
      perform pgque._execute_insistently(v_change.statements);
    exception
      when lock_not_available or internal_error or deadlock_detected then
        v_wait := '100ms';
        raise warning 'pgque: cannot set the rights on % %: %', v_change.kind, v_change.name, sqlerrm
          using hint = 'Install this version again, or follow the check rights of pgque.health().';
      when undefined_table or undefined_function or undefined_object then
        null;   -- the object or the role was dropped meanwhile
    end;
    perform pg_catalog.set_config('lock_timeout', v_before, true);
  end loop;
end
$$;

-- An upgrade leaves functions with changed arguments behind, and a call could then be
-- ambiguous.  Functions with our names that this file did not replace, so that their row
-- in the catalog is where it was, are dropped, or renamed if a view uses them.  The
-- readers of queues stay (see _create_reader).
do $$
declare
  v_before  text[] := string_to_array(current_setting('pgque.functions_before'), ' ');
  v_func    oid;
begin
  for v_func in
    select p.oid
    from pg_proc p
    where p.pronamespace = 'pgque'::regnamespace
      and p.oid || p.ctid::text = any (v_before)
      and (left(p.proname, 1) = '_' or p.proname in (select g.func_name from pgque._grants() g))
      and p.proname !~ '^_(ticks|events|ordinary|mapped|key)_[0-9]+(_[01])?$'
  loop
    perform pgque._drop_function(v_func);
  end loop;
end
$$;

-- Creates the readers of every queue, and sets the rights.  What an extension's script
-- creates becomes a member of the extension, and members are in no dump.  So the readers
-- are members only while the script replaces them, because it may replace nothing else.
-- ALTER EXTENSION would do that as well, but it takes a lock for each function.  Rights
-- that the script sets would be in no dump either.
-- The sequence of ticks has the newest tick (see _store_tick); up to 0.5 it was set only
-- to force a tick.
do $$
declare
  v_extension  oid;
  v_queue      pgque.queue;
  v_last       bigint;
begin
  begin
    perform pg_extension_config_dump('pgque.queue'::regclass, '');
    v_extension := (select e.oid from pg_extension e where e.extname = 'pgque');
  exception
    when feature_not_supported then
      null;   -- this is no script of an extension
  end;
  if v_extension is not null then
    lock table pgque.queue in share row exclusive mode;   -- no queue is dropped meanwhile
    insert into pg_depend (classid, objid, objsubid, refclassid, refobjid, refobjsubid, deptype)
    select 'pg_proc'::regclass, r.func, 0, 'pg_extension'::regclass, v_extension, 0, 'e'
    from pgque.queue q, pgque._readers_of(q.queue_id) r (func);
  end if;
  -- A queue that is being dropped is left out, and others are not dropped meanwhile.
  for v_queue in select q.* from pgque.queue q order by q.queue_id for key share skip locked loop
    perform pgque._create_reader(v_queue.queue_id, false);
    begin
      -- Not pg_sequence_last_value(): its lock would stay.
      execute format('select case when is_called then last_value else 0 end from %s', v_queue.queue_tick_seq) into v_last;
      perform setval(v_queue.queue_tick_seq, t.tick_id) from pgque._last_tick(v_queue) t where t.tick_id > v_last;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
    end;
  end loop;
  perform pgque._set_rights(null, current_setting('pgque.version_before') = '');
  if v_extension is not null then
    delete from pg_depend d
    using pgque.queue q, pgque._readers_of(q.queue_id) r (func)
    where d.classid = 'pg_proc'::regclass and d.objid = r.func and d.deptype = 'e';
    delete from pg_init_privs i
    where (i.classoid = 'pg_proc'::regclass and i.objoid in (select p.oid from pg_proc p where p.pronamespace = 'pgque'::regnamespace)
        or i.classoid = 'pg_class'::regclass and i.objoid in (select c.oid from pg_class c where c.relnamespace = 'pgque'::regnamespace))
      and not exists (select from pg_depend d where d.classid = i.classoid and d.objid = i.objoid and d.deptype = 'e');
  end if;
end
$$;

-- As an extension, the rows of these tables have to be in a dump.  The queues' own
-- tables and sequences are no members of the extension, and are dumped anyway.
do $$
declare
  v_table  text;
begin
  for v_table in
    select c.oid::regclass::text
    from pg_class c
    where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'S')
      and c.relname <> 'window_map' and c.relpersistence = 'p'
      and exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e')
  loop
    perform pg_extension_config_dump(v_table::regclass, '');
  end loop;
exception
  when feature_not_supported then
    -- CREATE EXTENSION does not run this.
    null;
end
$$;

do $$
declare
  v_local  boolean := exists (select from pg_extension e where e.extname = 'pgque');
begin
  perform set_config('search_path', current_setting('pgque.path_before'), v_local);
  perform set_config('pgque.path_before', '', v_local);
  perform set_config('check_function_bodies', current_setting('pgque.bodies_before'), v_local);
  perform set_config('pgque.bodies_before', '', v_local);
  perform set_config('pgque.functions_before', '', v_local);
  perform set_config('pgque.version_before', '', v_local);
end
$$;
