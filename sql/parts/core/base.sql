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
