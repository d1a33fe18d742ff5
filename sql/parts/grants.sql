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
