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
    ('pgque_writer', 'version clock _fail my_rights send send_batch send_idem insert_event create_recurring drop_recurring pause_recurring
      resume_recurring run_recurring list_recurring _create_recurring current_event_table jsontriga logutriga sqltriga sink_begin
      sink_servers sink_commit
      _send _headers _bad_headers _no_headers _open_slot _sink_room _takes_nothing _row_event _is_old_change _url_encode _send_as
      _send_all _send_many _no_payloads'),
    ('pgque_reader', 'version clock _fail my_rights list_recurring subscribe register_consumer register_consumer_at unsubscribe unregister_consumer receive ack
      finish_batch nack archive release extend set_visibility list_workers message_status next_batch next_batch_info
      next_batch_custom get_batch_events get_batch_info event_retry batch_retry register_subconsumer
      subscribe_subconsumer unregister_subconsumer unsubscribe_subconsumer touch_subconsumer receive_coop peek
      tick_for next_tick split_window read_window read_window_cursor seek open_stream subscribe_archive archive_of archive_next archive_read stream_lag stage_dead unstage_dead dead get_queue_info
      get_consumer_info queue_config queue_settings queue_rates consumer_lags metrics health status share_consumer unshare_consumer
      _ack _dead _next_batch'),
    ('pgque_admin', '_fail create_queue grant_queue revoke_queue alter_queue set_queue_config pause resume drop_queue rename_queue
      set_default_config set_schedule purge purge_key expire_messages delete_expired reclaim retry_now list_messages get_message
      list_poison archive_poison archive_list archive_replay archive_purge ticker force_next_tick force_tick
      confirm_restore ticker_loop set_tick_period_ms set_tick_share start stop maint maint_operations maint_retry_events maint_recurring
      maint_rotate_tables_step1 maint_rotate_tables_step2 maint_retain maint_lapsed maint_expire maint_tables
      get_batch_cursor dlq_inspect dlq_replay dlq_replay_all dlq_requeue dlq_requeue_all dlq_purge dlq_delete dlq_reasons list_actions set_history maint_lags
      _ticked_queues _loop_state _loop_lock _loop_end _loop_sleep _loop_operations _loop_maintain _loop_check _loop_settings _look_again_at _looks _remember _queues_due _look_at _position_of
      _cursor_sql _event_columns _maint_operation')
  ) r (name, functions)
  cross join lateral pg_catalog.regexp_split_to_table(r.functions, '\s+') f (name)
$$;

-- An upgrade leaves functions with changed arguments behind, and a call could then be
-- ambiguous.  Functions with our names that are older than version(), the first
-- function in this file, are dropped, or renamed if a view uses them.  The readers of
-- queues stay (see _create_reader).
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
      and p.proname !~ '^_(ticks|events)_[0-9]+$'
  loop
    begin
      execute format('drop %s %s', v_func.kind, v_func.sig);
    exception
      when dependent_objects_still_exist then
        raise warning 'pgque: other objects use % of an earlier version; create them again', v_func.sig;
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
  -- Only rights from default privileges: revoking writes to the catalog, where an
  -- upgrade should not collide with a rotation.
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
  foreach v_table in array array['queue', 'consumer', 'subscription', 'tick', 'retry_queue', 'dead_letter', 'archive', 'config', 'queue_right',
      'subscriber', 'sink_epoch', 'sink_attempt'] loop
    if not has_table_privilege('pgque_admin', 'pgque.' || v_table, 'select') then
      execute format('grant select on pgque.%I to pgque_admin', v_table);
    end if;
  end loop;
  if not has_table_privilege('pgque_writer', 'pgque.sink', 'insert') then
    grant select, insert on pgque.sink, pgque.sink_bulk to pgque_writer;
    grant insert on pgque.sink_stage_0, pgque.sink_stage_1 to pgque_writer;
  end if;
  -- A writer may have a view or a rule of its own over the sinks.
  if not has_type_privilege('pgque_writer', 'pgque.sink_queue', 'usage') then
    grant usage on type pgque.sink_queue to pgque_writer;
  end if;
  for v_table in select q.queue_event_seq::text from pgque.queue q where not has_sequence_privilege('pgque_writer', q.queue_event_seq, 'usage') loop
    execute format('grant usage on sequence %s to pgque_writer', v_table);
  end loop;
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
  perform set_config('pgque.version_before', '', v_local);
end
$$;
