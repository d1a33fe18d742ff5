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
