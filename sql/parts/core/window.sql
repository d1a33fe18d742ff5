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
