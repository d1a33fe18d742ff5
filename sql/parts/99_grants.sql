-- ---------------------------------------------------------------------------
-- grants
-- ---------------------------------------------------------------------------

-- Which role may call what: one row a function name, all its signatures.  A
-- function that is not named here can be called by nobody but the owner.  What
-- asks whose call it is (its last argument) may be called by pgque_user too.
create or replace function pgque._grants() returns table (func_name text, role_name text)
language sql immutable as $$
  values
    ('version', 'pgque_reader'),
    ('version', 'pgque_writer'),
    ('clock', 'pgque_reader'),
    ('clock', 'pgque_writer'),
    -- what has no rights of its own
    ('version', 'pgque_user'),
    ('clock', 'pgque_user'),
    ('send', 'pgque_user'),
    ('send_batch', 'pgque_user'),
    ('send_idem', 'pgque_user'),
    ('insert_event', 'pgque_user'),
    ('jsontriga', 'pgque_user'),
    ('logutriga', 'pgque_user'),
    ('sqltriga', 'pgque_user'),
    ('_row_event', 'pgque_user'),
    ('_url_encode', 'pgque_user'),
    ('_headers', 'pgque_user'),
    ('_bad_headers', 'pgque_user'),
    ('_no_payloads', 'pgque_user'),
    ('_no_headers', 'pgque_user'),
    ('register_consumer', 'pgque_user'),
    ('unregister_consumer', 'pgque_user'),
    ('ack', 'pgque_user'),
    ('finish_batch', 'pgque_user'),
    ('next_batch', 'pgque_user'),
    ('next_batch_info', 'pgque_user'),
    ('next_batch_custom', 'pgque_user'),
    ('subscribe_subconsumer', 'pgque_user'),
    ('unsubscribe_subconsumer', 'pgque_user'),
    ('dead', 'pgque_user'),
    ('event_retry', 'pgque_user'),
    ('set_queue_config', 'pgque_user'),
    ('force_tick', 'pgque_user'),
    -- produce
    ('send', 'pgque_writer'),
    ('send_batch', 'pgque_writer'),
    ('send_idem', 'pgque_writer'),
    ('insert_event', 'pgque_writer'),
    ('current_event_table', 'pgque_writer'),
    ('jsontriga', 'pgque_writer'),
    ('logutriga', 'pgque_writer'),
    ('sqltriga', 'pgque_writer'),
    ('sink_begin', 'pgque_writer'),
    ('sink_commit', 'pgque_writer'),
    ('_send', 'pgque_writer'),
    ('_headers', 'pgque_writer'),
    ('_bad_headers', 'pgque_writer'),
    ('_no_headers', 'pgque_writer'),
    ('_open_slot', 'pgque_writer'),
    ('_sink_room', 'pgque_writer'),
    ('_takes_nothing', 'pgque_writer'),
    ('_row_event', 'pgque_writer'),
    ('_url_encode', 'pgque_writer'),
    ('_send_as', 'pgque_writer'),
    ('_send_all', 'pgque_writer'),
    ('_send_many', 'pgque_writer'),
    ('_no_payloads', 'pgque_writer'),
    -- consume
    ('subscribe', 'pgque_reader'),
    ('register_consumer', 'pgque_reader'),
    ('register_consumer_at', 'pgque_reader'),
    ('unsubscribe', 'pgque_reader'),
    ('unregister_consumer', 'pgque_reader'),
    ('receive', 'pgque_reader'),
    ('ack', 'pgque_reader'),
    ('_ack', 'pgque_reader'),
    ('_dead', 'pgque_reader'),
    ('finish_batch', 'pgque_reader'),
    ('nack', 'pgque_reader'),
    ('archive', 'pgque_reader'),
    ('release', 'pgque_reader'),
    ('extend', 'pgque_reader'),
    ('set_visibility', 'pgque_reader'),
    ('list_workers', 'pgque_reader'),
    ('message_status', 'pgque_reader'),
    ('next_batch', 'pgque_reader'),
    ('next_batch_info', 'pgque_reader'),
    ('next_batch_custom', 'pgque_reader'),
    ('_next_batch', 'pgque_reader'),
    ('get_batch_events', 'pgque_reader'),
    ('get_batch_info', 'pgque_reader'),
    ('event_retry', 'pgque_reader'),
    ('batch_retry', 'pgque_reader'),
    ('register_subconsumer', 'pgque_reader'),
    ('subscribe_subconsumer', 'pgque_reader'),
    ('unregister_subconsumer', 'pgque_reader'),
    ('unsubscribe_subconsumer', 'pgque_reader'),
    ('touch_subconsumer', 'pgque_reader'),
    ('receive_coop', 'pgque_reader'),
    ('peek', 'pgque_reader'),
    ('tick_for', 'pgque_reader'),
    ('next_tick', 'pgque_reader'),
    ('split_window', 'pgque_reader'),
    ('read_window', 'pgque_reader'),
    ('read_window_cursor', 'pgque_reader'),
    ('seek', 'pgque_reader'),
    ('open_stream', 'pgque_reader'),
    ('dead', 'pgque_reader'),
    ('get_queue_info', 'pgque_reader'),
    ('get_consumer_info', 'pgque_reader'),
    ('queue_config', 'pgque_reader'),
    ('metrics', 'pgque_reader'),
    ('health', 'pgque_reader'),
    ('status', 'pgque_reader'),
    -- operate
    ('create_queue', 'pgque_admin'),
    ('grant_queue', 'pgque_admin'),
    ('revoke_queue', 'pgque_admin'),
    ('alter_queue', 'pgque_admin'),
    ('set_queue_config', 'pgque_admin'),
    ('pause', 'pgque_admin'),
    ('resume', 'pgque_admin'),
    ('drop_queue', 'pgque_admin'),
    ('rename_queue', 'pgque_admin'),
    ('set_default_config', 'pgque_admin'),
    ('set_schedule', 'pgque_admin'),
    ('purge', 'pgque_admin'),
    ('purge_key', 'pgque_admin'),
    ('expire_messages', 'pgque_admin'),
    ('delete_expired', 'pgque_admin'),
    ('reclaim', 'pgque_admin'),
    ('retry_now', 'pgque_admin'),
    ('list_messages', 'pgque_admin'),
    ('list_poison', 'pgque_admin'),
    ('archive_poison', 'pgque_admin'),
    ('archive_list', 'pgque_admin'),
    ('archive_replay', 'pgque_admin'),
    ('archive_purge', 'pgque_admin'),
    ('ticker', 'pgque_admin'),
    ('force_next_tick', 'pgque_admin'),
    ('force_tick', 'pgque_admin'),
    ('ticker_loop', 'pgque_admin'),
    ('set_tick_period_ms', 'pgque_admin'),
    ('set_tick_share', 'pgque_admin'),
    ('start', 'pgque_admin'),
    ('stop', 'pgque_admin'),
    ('maint', 'pgque_admin'),
    ('maint_operations', 'pgque_admin'),
    ('maint_retry_events', 'pgque_admin'),
    ('maint_rotate_tables_step1', 'pgque_admin'),
    ('maint_rotate_tables_step2', 'pgque_admin'),
    ('maint_retain', 'pgque_admin'),
    ('maint_lapsed', 'pgque_admin'),
    ('maint_expire', 'pgque_admin'),
    ('maint_tables', 'pgque_admin'),
    ('get_batch_cursor', 'pgque_admin'),
    ('dlq_inspect', 'pgque_admin'),
    ('dlq_replay', 'pgque_admin'),
    ('dlq_replay_all', 'pgque_admin'),
    ('dlq_requeue', 'pgque_admin'),
    ('dlq_requeue_all', 'pgque_admin'),
    ('dlq_purge', 'pgque_admin'),
    ('_ticked_queues', 'pgque_admin'),
    ('_loop_state', 'pgque_admin'),
    ('_loop_config', 'pgque_admin'),
    ('_loop_settings', 'pgque_admin'),
    ('_look_again_at', 'pgque_admin'),
    ('_looks', 'pgque_admin'),
    ('_remember', 'pgque_admin'),
    ('_queues_due', 'pgque_admin'),
    ('_look_at', 'pgque_admin'),
    ('_try_tick', 'pgque_admin'),
    ('_read_position', 'pgque_admin'),
    ('_cursor_sql', 'pgque_admin'),
    ('_event_columns', 'pgque_admin'),
    ('_maint_operation', 'pgque_admin')
$$;

-- An upgrade leaves functions behind whose arguments changed, and a call could
-- then mean either.  What is ours by name and older than version(), the first
-- function that this file makes, goes, or gets out of the way if a view is made
-- of it.
do $$
declare
  v_func  record;
begin
  for v_func in
    select p.oid::regprocedure as sig, p.proname, case p.prokind when 'p' then 'procedure' else 'function' end as kind
    from pg_proc p
    where p.pronamespace = 'pgque'::regnamespace
      and age(p.xmin) > (select age(v.xmin) from pg_proc v where v.oid = 'pgque.version()'::regprocedure)
      and (left(p.proname, 1) = '_' or p.proname in (select g.func_name from pgque._grants() g))
  loop
    begin
      execute format('drop %s %s', v_func.kind, v_func.sig);
    exception
      when dependent_objects_still_exist then
        raise warning 'pgque: % of an earlier version is in use; make what uses it anew', v_func.sig;
        if left(v_func.proname, 1) <> '_' then
          execute format('alter %s %s rename to %I', v_func.kind, v_func.sig, '_earlier_' || v_func.proname);
        end if;
    end;
  end loop;
end
$$;

do $$
declare
  v_func   record;
  v_table  text;
begin
  revoke all on schema pgque from public;
  -- Only what default privileges gave away: to revoke writes to the catalog,
  -- and an upgrade shall not meet a rotation there.
  perform pgque._keep_from_public(c.oid::regclass::text) from pg_class c where c.relnamespace = 'pgque'::regnamespace and c.relacl is not null;
  grant usage on schema pgque to pgque_reader, pgque_writer, pgque_admin, pgque_user;
  for v_func in
    select p.oid::regprocedure as sig, case p.prokind when 'p' then 'procedure' else 'function' end as kind,
      (select string_agg(g.role_name, ', ') from (
        select g.role_name from pgque._grants() g where g.func_name = p.proname
        union
        select 'pgque_user' where 'pgque.caller'::regtype = any (p.proargtypes)
      ) g) as roles
    from pg_proc p
    where p.pronamespace = 'pgque'::regnamespace
  loop
    execute format('revoke all on %s %s from public, pgque_reader, pgque_writer, pgque_admin, pgque_user', v_func.kind, v_func.sig);
    if v_func.roles is not null then
      execute format('grant execute on %s %s to %s', v_func.kind, v_func.sig, v_func.roles);
    end if;
  end loop;
  foreach v_table in array array['queue', 'consumer', 'subscription', 'tick', 'retry_queue', 'dead_letter', 'archive', 'config', 'queue_right'] loop
    if not has_table_privilege('pgque_admin', 'pgque.' || v_table, 'select') then
      execute format('grant select on pgque.%I to pgque_admin', v_table);
    end if;
  end loop;
  if not has_table_privilege('pgque_writer', 'pgque.sink', 'insert') then
    grant select, insert on pgque.sink, pgque.sink_bulk to pgque_writer;
    grant insert on pgque.sink_stage_0, pgque.sink_stage_1 to pgque_writer;
  end if;
  -- For a view or a rule of a writer's own over the sinks.
  if not has_type_privilege('pgque_writer', 'pgque.sink_queue', 'usage') then
    grant usage on type pgque.sink_queue to pgque_writer;
  end if;
  for v_table in select q.queue_event_seq::text from pgque.queue q where not has_sequence_privilege('pgque_writer', q.queue_event_seq, 'usage') loop
    execute format('grant usage on sequence %s to pgque_writer', v_table);
  end loop;
end
$$;

-- As an extension, all that these tables hold belongs into a dump.  The queues'
-- own tables and sequences are no members, and are dumped anyway.
do $$
declare
  v_table  text;
begin
  for v_table in
    select c.oid::regclass::text
    from pg_class c
    where c.relnamespace = 'pgque'::regnamespace and c.relkind in ('r', 'S') and not c.relispartition
      and c.relname <> 'window_map' and c.relpersistence = 'p'
      and exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e')
  loop
    perform pg_extension_config_dump(v_table::regclass, '');
  end loop;
exception
  when feature_not_supported then
    -- Not run by CREATE EXTENSION.
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
  perform set_config('pgque.version_before', '', v_local);
end
$$;
