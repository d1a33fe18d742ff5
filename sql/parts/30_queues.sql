-- ---------------------------------------------------------------------------
-- queues: create, configure, pause, drop
-- ---------------------------------------------------------------------------

-- The queue's row, or PQ001.
create or replace function pgque._queue(p_queue text) returns pgque.queue
language plpgsql as $$
declare
  v_queue  pgque.queue;
begin
  select q.* into v_queue from pgque.queue q where q.queue_name = p_queue;
  if not found then
    perform pgque._no_queue(p_queue);
  end if;
  return v_queue;
end
$$;

create or replace function pgque._no_queue(p_queue text) returns void
language plpgsql as $$
begin
  raise exception using
    errcode = 'PQ001',
    message = pg_catalog.format('queue not found: %s', coalesce(pg_catalog.quote_ident(p_queue), 'null')),
    hint = 'select pgque.create_queue(name) makes a queue; select queue_name from pgque.get_queue_info() lists them.';
end
$$;

-- Makes the one row of each of the tables that have one.  The install script
-- does not, so that a dump of the extension's data can be loaded.
create or replace function pgque._init() returns void
language plpgsql as $$
begin
  insert into pgque.config default values on conflict do nothing;
  insert into pgque.journal default values on conflict do nothing;
end
$$;

-- Makes one of a queue's six tables and attaches it.  ATTACH locks the parent
-- in a mode that lets senders and readers of other queues go on.
create or replace function pgque._create_leaf(p_kind text, p_queue_id int, p_n int, p_event_seq regclass) returns void
language plpgsql as $$
declare
  v_leaf  text := pg_catalog.format('%s_%s_%s', p_kind, p_queue_id, p_n);
  v_slot  int := p_queue_id * 3 + p_n;
begin
  execute pg_catalog.format('create table pgque.%I (like pgque.%I including all)', v_leaf, p_kind);
  execute pg_catalog.format('grant select on pgque.%I to pgque_admin', v_leaf);
  if p_kind = 'tick' then
    execute pg_catalog.format('alter table pgque.%I add constraint %I primary key (tick_id)', v_leaf, v_leaf || '_pkey');
  else
    execute pg_catalog.format('create index %I on pgque.%I (ev_txid)', v_leaf || '_txid', v_leaf);
    execute pg_catalog.format(
      'alter table pgque.%I alter slot set default %s, alter ev_id set default pg_catalog.nextval(%L),'
      ' alter ev_time set default pgque.clock(), alter ev_txid set default pg_catalog.pg_current_xact_id()',
      v_leaf, v_slot, p_event_seq);
  end if;
  execute pg_catalog.format('alter table pgque.%I attach partition pgque.%I for values in (%s)', p_kind, v_leaf, v_slot);
end
$$;

-- The settings of a queue, as data: parameter name and type.  The column is
-- queue_<name>; its default is the setting's default and its check constraint
-- the setting's range.
create or replace function pgque._setting_type(p_param text) returns text
language sql immutable as $$
  select case
    when p_param in ('ticker_max_count', 'max_retries') then 'int'
    when p_param in ('ticker_max_lag', 'ticker_idle_period', 'rotation_period', 'retention_period') then 'interval'
    when p_param in ('ticker_paused', 'external_ticker') then 'boolean'
  end
$$;

-- Columns and SQL values of the settings in a JSON object; null is the
-- default.  PgQ's names with the prefix queue_ are understood too.
create or replace function pgque._settings_sql(p_queue text, p_config jsonb, out columns text[], out vals text[])
language plpgsql as $$
declare
  v_pair   record;
  v_param  text;
  v_type   text;
begin
  columns := '{}';
  vals := '{}';
  if pg_catalog.jsonb_typeof(p_config) is distinct from 'object' then
    raise exception using
      errcode = 'PQ005',
      message = pg_catalog.format('the configuration of queue %I must be a JSON object', p_queue),
      hint = 'For example {"max_retries": 3, "rotation_period": "1 hour"}.';
  end if;
  for v_pair in select e.key, e.value from pg_catalog.jsonb_each_text(p_config) e loop
    v_param := pg_catalog.regexp_replace(v_pair.key, '^queue_', '');
    v_type := pgque._setting_type(v_param);
    if v_type is null then
      raise exception using
        errcode = 'PQ005',
        message = pg_catalog.format('unknown parameter %L for queue %I', v_pair.key, p_queue),
        hint = 'Parameters: ticker_max_count, ticker_max_lag, ticker_idle_period, ticker_paused, external_ticker, rotation_period, retention_period, max_retries.';
    end if;
    columns := columns || pg_catalog.quote_ident('queue_' || v_param);
    vals := vals || coalesce(pg_catalog.quote_literal(v_pair.value) || '::' || v_type, 'default');
  end loop;
end
$$;

-- Creates a queue with its tables and first tick; 0 when the name is taken.
-- config is a JSON object of parameters.
create or replace function pgque.create_queue(queue_name text, config jsonb default '{}') returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_id        int;
  v_seq       text;
  v_settings  record;
begin
  if coalesce(create_queue.queue_name, '') = '' or octet_length(create_queue.queue_name) > 57 then
    raise exception using
      errcode = 'PQ004',
      message = format('invalid queue name: %s', coalesce(quote_ident(left(create_queue.queue_name, 100)), 'null')),
      hint = 'A queue name has 1 to 57 bytes; any character is allowed.';
  end if;
  v_settings := pgque._settings_sql(create_queue.queue_name, create_queue.config);
  -- Two sessions that create one name meet here; the second sees the first.
  perform pg_advisory_xact_lock(hashtext('pgque.create_queue'), hashtext(create_queue.queue_name));
  if exists (select from pgque.queue q where q.queue_name = create_queue.queue_name) then
    return 0;
  end if;
  perform pgque._init();
  v_id := nextval(pg_get_serial_sequence('pgque.queue', 'queue_id'));
  v_seq := format('pgque.event_%s_seq', v_id);
  execute format('create sequence %s', v_seq);
  execute format('create sequence pgque.tick_%s_seq', v_id);
  execute format('grant usage on sequence %s to pgque_writer', v_seq);
  execute 'insert into pgque.queue (queue_id, queue_name, queue_event_seq, queue_tick_seq, queue_xid'
    || coalesce(', ' || nullif(array_to_string(v_settings.columns, ', '), ''), '')
    || ') values ($1, $2, $3, $4, pg_catalog.pg_current_xact_id()'
    || coalesce(', ' || nullif(array_to_string(v_settings.vals, ', '), ''), '') || ')'
  using v_id, create_queue.queue_name, v_seq::regclass, format('pgque.tick_%s_seq', v_id)::regclass;
  for n in 0..2 loop
    perform pgque._create_leaf('event', v_id, n, v_seq::regclass);
    perform pgque._create_leaf('tick', v_id, n, v_seq::regclass);
  end loop;
  execute format('alter sequence %s owned by pgque.event.ev_id', v_seq);
  execute format('alter sequence pgque.tick_%s_seq owned by pgque.tick.tick_id', v_id);
  insert into pgque.tick (slot, tick_queue, tick_id, tick_time, tick_snapshot, tick_event_seq)
  values (v_id * 3, v_id, 1, pgque.clock(), pgque._tick_snapshot(), 0);
  return 1;
exception
  when unique_violation then
    -- A creator whose snapshot is older than the name's commit.
    return 0;
  when data_exception or check_violation then
    perform pgque._bad_setting(create_queue.queue_name, create_queue.config, sqlerrm);
end
$$;

create or replace function pgque._bad_setting(p_queue text, p_config jsonb, p_error text) returns void
language plpgsql as $$
begin
  raise exception using
    errcode = 'PQ005',
    message = pg_catalog.format('invalid configuration of queue %I: %s', p_queue, p_config),
    detail = p_error,
    hint = 'Counts are integers, periods are intervals such as ''2 hours'' up to a year, switches are true or false; null restores the default.';
end
$$;

-- What an update of a queue's row stores as queue_xid: its own transaction, but
-- for a row that came out of a dump still the old one, since only
-- pgque._rebase() may make it a row of this cluster.
create or replace function pgque._queue_xid(p_queue pgque.queue) returns xid8
language sql volatile as $$
  select case when p_queue.queue_restored then p_queue.queue_xid else pg_catalog.pg_current_xact_id() end
$$;

-- Sets several parameters at once: all of them or, on an error, none.
create or replace function pgque.alter_queue(queue_name text, config jsonb) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue     pgque.queue := pgque._queue(alter_queue.queue_name);
  v_settings  record := pgque._settings_sql(alter_queue.queue_name, alter_queue.config);
  v_sets      text;
begin
  select string_agg(c.col || ' = ' || c.val || ', ', '') into v_sets
  from unnest(v_settings.columns, v_settings.vals) c (col, val);
  if v_sets is not null then
    execute 'update pgque.queue q set ' || v_sets || 'queue_xid = pgque._queue_xid(q) where q.queue_id = $1'
    using v_queue.queue_id;
  end if;
  return cardinality(v_settings.columns);
exception
  when data_exception or check_violation then
    perform pgque._bad_setting(alter_queue.queue_name, alter_queue.config, sqlerrm);
end
$$;

-- Sets one parameter; NULL restores the default.
create or replace function pgque.set_queue_config(queue_name text, param_name text, param_value text) returns int
language sql as $$ select pgque.alter_queue($1, pg_catalog.jsonb_build_object(coalesce($2, ''), $3)) $$;

-- The values in force, one row a parameter.
create or replace function pgque.queue_config(queue_name text) returns table (param_name text, param_value text)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue(queue_config.queue_name);
begin
  return query
    select substr(e.key, 7), e.value
    from jsonb_each_text(to_jsonb(v_queue)) e
    where pgque._setting_type(substr(e.key, 7)) is not null
    order by 1;
end
$$;

-- Closes a queue for senders (PQ013) until resume(); consumers drain what is
-- there.
create or replace function pgque.pause(queue_name text) returns void
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue(pause.queue_name);
begin
  update pgque.queue q set queue_paused = true, queue_xid = pgque._queue_xid(q) where q.queue_id = v_queue.queue_id;
end
$$;

create or replace function pgque.resume(queue_name text) returns void
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue(resume.queue_name);
begin
  update pgque.queue q set queue_paused = false, queue_xid = pgque._queue_xid(q) where q.queue_id = v_queue.queue_id;
end
$$;

-- Drops a queue and all it holds.  With consumers it needs force (PQ006).
-- Its leaves are emptied at once; they are detached and dropped when that can
-- be done without making any other queue wait, here or by maint().
create or replace function pgque.drop_queue(queue_name text, force boolean default false) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue;
  v_leaf   text;
begin
  select q.* into v_queue from pgque.queue q where q.queue_name = drop_queue.queue_name for no key update;
  if not found then
    perform pgque._no_queue(drop_queue.queue_name);
  end if;
  if drop_queue.force is not true and exists (select from pgque.subscriber s where s.sub_queue = v_queue.queue_id) then
    raise exception using
      errcode = 'PQ006',
      message = format('queue %I has consumers', v_queue.queue_name),
      hint = 'Unsubscribe them first, or call pgque.drop_queue(name, true).';
  end if;
  delete from pgque.subscriber s where s.sub_queue = v_queue.queue_id and s.sub_main is null;
  delete from pgque.subscriber s where s.sub_queue = v_queue.queue_id;
  delete from pgque.retry_queue r where r.ev_queue = v_queue.queue_id;
  delete from pgque.dead_letter d where d.dl_queue_id = v_queue.queue_id;
  delete from pgque.queue q where q.queue_id = v_queue.queue_id;
  for v_leaf in select l.leaf from pgque._leaves(v_queue.queue_id) l where to_regclass(l.leaf) is not null loop
    execute 'truncate ' || v_leaf;
  end loop;
  insert into pgque.dropped_queue (queue_id) values (v_queue.queue_id);
  perform pgque._drop_leaves();
  return 1;
end
$$;

-- The six tables of a queue.
create or replace function pgque._leaves(p_queue_id int) returns table (kind text, n int, leaf text)
language sql stable as $$
  select k.kind, g.n, pg_catalog.format('pgque.%s_%s_%s', k.kind, p_queue_id, g.n)
  from (values ('event'), ('tick')) k (kind), pg_catalog.generate_series(0, 2) g (n)
$$;

-- Drops the tables of dropped queues if the locks on the two parents can be
-- had at once: waiting for them would stop every sender.
create or replace function pgque._drop_leaves() returns int
language plpgsql as $$
declare
  v_id      int;
  v_leaves  text;
  v_count   int := 0;
begin
  if not exists (select from pgque.dropped_queue) then
    return 0;
  end if;
  lock table pgque.event, pgque.tick in access exclusive mode nowait;
  for v_id in delete from pgque.dropped_queue d returning d.queue_id loop
    select pg_catalog.string_agg(l.leaf, ', ') into v_leaves
    from pgque._leaves(v_id) l
    where pg_catalog.to_regclass(l.leaf) is not null;
    if v_leaves is not null then
      execute 'drop table ' || v_leaves;
    end if;
    execute pg_catalog.format('drop sequence if exists pgque.event_%s_seq, pgque.tick_%1$s_seq', v_id);
    v_count := v_count + 1;
  end loop;
  return v_count;
exception
  when lock_not_available then
    return 0;
end
$$;
