-- ---------------------------------------------------------------------------
-- archive: messages that are done with and kept
-- ---------------------------------------------------------------------------

-- The archive's bucket for a queue and a time.
create or replace function pgque._bucket(p_queue_id int, p_time timestamptz) returns bigint
language sql stable as $$
  select p_queue_id * 100000::bigint + ((least(greatest(p_time, '2000-01-01Z'), '2270-01-01Z') at time zone 'UTC')::date - date '2000-01-01')
$$;

-- Makes the leaf of a bucket if it is not there.  Two sessions meet at the lock.
create or replace function pgque._archive_leaf(p_bucket bigint) returns void
language plpgsql as $$
declare
  v_leaf  text := 'archive_' || p_bucket;
begin
  if pg_catalog.to_regclass('pgque.' || v_leaf) is not null then
    return;
  end if;
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.archive'), pg_catalog.hashtext(v_leaf));
  if pg_catalog.to_regclass('pgque.' || v_leaf) is not null then
    return;
  end if;
  execute pg_catalog.format('create table pgque.%I (like pgque.archive including defaults)', v_leaf);
  perform pgque._keep_from_public('pgque.' || v_leaf);
  execute pg_catalog.format('alter table pgque.%I add constraint %I primary key (archive_id)', v_leaf, v_leaf || '_pkey');
  execute pg_catalog.format('create index %I on pgque.%I (ev_id)', v_leaf || '_ev_id', v_leaf);
  execute pg_catalog.format('alter table pgque.archive attach partition pgque.%I for values in (%s)', v_leaf, p_bucket);
end
$$;

create or replace function pgque._archive(p_queue pgque.queue, p_sub pgque.subscriber, p_items pgque.retry_queue[], p_outcome text) returns void
language plpgsql as $$
declare
  v_now     timestamptz := pgque.clock();
  v_bucket  bigint := pgque._bucket(p_queue.queue_id, v_now);
begin
  if coalesce(pg_catalog.cardinality(p_items), 0) = 0 then
    return;
  end if;
  perform pgque._archive_leaf(v_bucket);
  insert into pgque.archive (bucket, archived_at, arc_queue, arc_consumer, arc_worker, arc_outcome, arc_receives,
    ev_id, ev_time, ev_retry, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires, ev_error)
  select v_bucket, v_now, p_queue.queue_id, p_sub.sub_consumer, coalesce(i.ev_worker, p_sub.sub_worker), p_outcome, i.ev_receives,
    i.ev_id, i.ev_time, i.ev_retry, i.ev_type, i.ev_data, i.ev_extra1, i.ev_extra2, i.ev_extra3, i.ev_extra4,
    i.ev_headers, i.ev_key, i.ev_bytes, i.ev_expires, i.ev_error
  from pg_catalog.unnest(p_items) i;
  perform pgque._tally(p_queue.queue_id, p_sub.sub_id, 'archived', pg_catalog.cardinality(p_items));
end
$$;

-- The newest messages in a queue's archive, or those since a time.
create or replace function pgque.archive_list(
  queue_name text, limit_count int default 100, since timestamptz default null, caller pgque.caller default current_user,
  out archive_id bigint, out queue text, out consumer_name text, out msg_id bigint, out type text, out payload text, out payload_bytes bytea,
  out headers jsonb, out key text, out sent_at timestamptz, out archived_at timestamptz, out receive_count int, out worker text, out outcome text
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query
    select a.archive_id, v_queue.queue_name, c.co_name, a.ev_id, a.ev_type, a.ev_data, a.ev_bytes, a.ev_headers, a.ev_key,
      a.ev_time, a.archived_at, a.arc_receives, a.arc_worker, a.arc_outcome
    from pgque.archive a
    left join pgque.consumer c on c.co_id = a.arc_consumer
    where a.bucket between pgque._bucket(v_queue.queue_id, coalesce($3, '2000-01-01Z')) and v_queue.queue_id * 100000::bigint + 99999
      and ($3 is null or a.archived_at >= $3)
    order by a.archive_id desc
    limit case when $2 < 0 then 0 else $2 end;
end
$$;

-- Sends an archived message again, as a new one, for every consumer; returns the
-- new id.  It stays in the archive.
create or replace function pgque.archive_replay(archive_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_row  pgque.archive;
begin
  select a.* into v_row from pgque.archive a where a.archive_id = $1 and pgque._may(caller, 'admin', a.arc_queue);
  if not found then
    raise exception using
      errcode = 'PQ010',
      message = format('not in the archive: %s', coalesce($1::text, 'null')),
      hint = 'select * from pgque.archive_list(queue) lists what is there.';
  end if;
  return pgque._send((select q.queue_name from pgque.queue q where q.queue_id = v_row.arc_queue), v_row.ev_type, v_row.ev_data,
    v_row.ev_extra1, v_row.ev_extra2, v_row.ev_extra3, v_row.ev_extra4, v_row.ev_headers, v_row.ev_bytes);
end
$$;

-- Drops the days of a queue's archive that ended before a time; returns their
-- number.
create or replace function pgque.archive_purge(queue_name text, before timestamptz, caller pgque.caller default current_user) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  if $2 is null then
    raise exception using
      errcode = 'PQ005',
      message = format('archive_purge of queue %I needs a time', v_queue.queue_name),
      hint = 'select pgque.archive_purge(queue, now() - interval ''30 days'');';
  end if;
  return pgque._drop_archive(v_queue.queue_id, $2);
end
$$;

-- Drops the leaves of a queue's archive, all or those that end before a time.
create or replace function pgque._drop_archive(p_queue_id int, p_before timestamptz) returns int
language plpgsql as $$
declare
  v_leaf   text;
  v_count  int := 0;
begin
  for v_leaf in
    select c.relname
    from pg_catalog.pg_inherits i
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    cross join lateral pg_catalog.substr(c.relname, 9) b
    where i.inhparent = 'pgque.archive'::regclass and b::bigint / 100000 = p_queue_id
      and (p_before is null or b::bigint < pgque._bucket(p_queue_id, p_before))
  loop
    execute pg_catalog.format('drop table pgque.%I', v_leaf);
    v_count := v_count + 1;
  end loop;
  return v_count;
end
$$;
