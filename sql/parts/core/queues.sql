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
