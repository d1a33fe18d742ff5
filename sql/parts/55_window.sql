-- ---------------------------------------------------------------------------
-- window: which rows lie between two snapshots
-- ---------------------------------------------------------------------------

-- An SQL condition on e.ev_txid for "visible in p_to, not visible in p_from",
-- or null if that can be no transaction.
--
-- The naive condition scans from the xmin of p_from; one transaction that
-- stays open for a day then makes every window scan a day of rows.  Instead:
-- every id from xmax(p_from) up to xmax(p_to) was not visible in p_from, so
-- that range is cut at the ids still running in p_to; and of the ids below it
-- only those that ran in p_from can be new, so they are named one by one.
-- Every part is a range of the index, and rows of transactions that are still
-- running are not even looked at.  With a great many parts one range for all
-- new ids, with a filter, serves better.
create or replace function pgque._xid_condition(p_from pg_snapshot, p_to pg_snapshot) returns text
language plpgsql stable as $$
declare
  v_lo     bigint := pg_catalog.pg_snapshot_xmax(p_from)::text::bigint;
  v_end    bigint := pg_catalog.pg_snapshot_xmax(p_to)::text::bigint;
  v_late   xid8[];
  v_running  bigint[] := '{}';
  v_parts  text[] := '{}';
  v_hi     bigint;
begin
  if pg_catalog.pg_snapshot_xmin(p_from) < pg_catalog.pg_snapshot_xmax(p_from) then
    select pg_catalog.array_agg(x.xid) into v_late
    from pg_catalog.pg_snapshot_xip(p_from) x (xid)
    where pg_catalog.pg_visible_in_snapshot(x.xid, p_to);
    if v_late is not null then
      v_parts := array[pg_catalog.format('e.ev_txid = any (%L::xid8[])', v_late)];
    end if;
  end if;
  if v_lo < v_end then
    if pg_catalog.pg_snapshot_xmin(p_to) < pg_catalog.pg_snapshot_xmax(p_to) then
      v_running := array(
        select x.xid::text::bigint from pg_catalog.pg_snapshot_xip(p_to) x (xid) where x.xid::text::bigint >= v_lo order by 1);
    end if;
    foreach v_hi in array v_running || v_end loop
      if v_lo < v_hi then
        v_parts := v_parts || pg_catalog.format('(e.ev_txid >= %L::xid8 and e.ev_txid < %L::xid8)', v_lo, v_hi);
      end if;
      v_lo := v_hi + 1;
    end loop;
  end if;
  if pg_catalog.cardinality(v_parts) > 100 then
    v_parts := v_parts[1:(v_late is not null)::int] || pg_catalog.format('(e.ev_txid >= %L::xid8 and e.ev_txid < %L::xid8 and %s)',
      pg_catalog.pg_snapshot_xmax(p_from), pg_catalog.pg_snapshot_xmax(p_to), pgque._xid_filter(p_from, p_to));
  end if;
  return '(' || nullif(pg_catalog.array_to_string(v_parts, ' or '), '') || ')';
end
$$;

-- The same set of transactions as a filter that no index serves: where row
-- addresses lead to the rows, the planner shall not be led astray.
create or replace function pgque._xid_filter(p_from pg_snapshot, p_to pg_snapshot) returns text
language sql stable as $$
  select pg_catalog.format(
    '(pg_catalog.pg_visible_in_snapshot(e.ev_txid, %L) and not pg_catalog.pg_visible_in_snapshot(e.ev_txid, %L))', p_to, p_from)
$$;

-- The rows of a queue that satisfy a condition on e, over all three tables: a
-- writer whose snapshot is older than a rotation stores into a table that is
-- no longer current, so none may be left out.  A table without a single page
-- can be: what a tick covers was stored before.  p_tids narrows each table to
-- a range of row addresses (three conditions, null for none).
create or replace function pgque._rows_sql(p_queue_id int, p_condition text, p_tids text[] default null) returns text
language plpgsql as $$
declare
  v_leaf  text;
  v_sql   text;
begin
  for n in 0..2 loop
    v_leaf := 'pgque.event_' || p_queue_id || '_' || n;
    if p_tids[n + 1] is not null or p_tids is null and pg_catalog.pg_relation_size(v_leaf::regclass) > 0 then
      v_sql := pg_catalog.concat_ws(' union all ', v_sql,
        pg_catalog.concat('select * from ', v_leaf, ' e where ', p_tids[n + 1] || ' and ', p_condition));
    end if;
  end loop;
  return coalesce(v_sql, 'select * from ' || v_leaf || ' e where false');
end
$$;

-- The condition for the part of a window that belongs to one subscriber and
-- has its ids in (p_after, p_upto]; either bound may be null.
create or replace function pgque._slice_condition(p_xids text, p_owner int, p_after bigint, p_upto bigint) returns text
language sql stable as $$
  select p_xids
    || pg_catalog.format(' and (e.ev_owner is null or e.ev_owner = %s)', p_owner)
    || coalesce(' and e.ev_id > ' || p_after, '')
    || coalesce(' and e.ev_id <= ' || p_upto, '')
$$;

-- Reads a window once, in the order of ids, and notes for every 25 events
-- (not counting retries, which belong to one subscriber each) between which ids
-- they are and, for each table, between which row addresses.
-- A slice is then a TID range scan.  A window's rows are fixed and do not
-- move; VACUUM FULL and the like give the table another file, which is noted
-- too.  The map is a cache: without it, reading is only slower.
create or replace function pgque._map_window(
  p_queue_id int, p_from bigint, p_to bigint, p_xids text
) returns void
language plpgsql as $$
begin
  execute pg_catalog.format(
    $q$
    insert into pgque.window_map (map_queue, map_from, map_to, map_chunk, map_id_lo, map_id_hi, map_lo, map_hi, map_filenodes, map_xid)
    select $1, $2, $3, r.chunk, min(r.ev_id), max(r.ev_id),
      array[min(r.tid) filter (where r.n = 0), min(r.tid) filter (where r.n = 1), min(r.tid) filter (where r.n = 2)],
      array[max(r.tid) filter (where r.n = 0), max(r.tid) filter (where r.n = 1), max(r.tid) filter (where r.n = 2)],
      pgque._filenodes($1), pgque._xid()
    from (
      select w.ev_id, w.n, w.tid, (greatest(count(*) filter (where w.ev_owner is null) over (order by w.ev_id), 1) - 1) / 25 as chunk
      from (
        select e.ev_id, e.ev_owner, 0 as n, e.ctid as tid from pgque.event_%1$s_0 e where %2$s
        union all
        select e.ev_id, e.ev_owner, 1, e.ctid from pgque.event_%1$s_1 e where %2$s
        union all
        select e.ev_id, e.ev_owner, 2, e.ctid from pgque.event_%1$s_2 e where %2$s
      ) w
    ) r
    group by r.chunk
    $q$, p_queue_id, p_xids)
  using p_queue_id, p_from, p_to;
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
