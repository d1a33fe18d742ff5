-- ---------------------------------------------------------------------------
-- keys: a pending message that is sent again is replaced
-- ---------------------------------------------------------------------------

-- Sending replaces the body of a pending message with the same key.  The log is append
-- only, so a new body is a row with the id of the message and owner 0.  A delivery
-- appends a row too, a seal (owner -1), after which senders no longer replace the
-- message.  So does a purge (-2).  The rows of one message have rising ev_retry under a
-- unique index.
--
-- The rest of the engine handles keys in these places:
--   * _send_keyed() sends.
--   * _sift(), which chooses messages of the log, calls _claim() and _seal().
--   * _weed(), which chooses messages of the retry queue, calls _claim_waiting().
--   * Everything that reads bodies reads them through _renewed_sql().
--   * The pump and retention leave out messages that are being replaced:
--     _claim_aside().
--   * Rotation calls _refresh_waiting() before a table with bodies is emptied.

-- Returns the rows that were appended for messages after they were sent, without
-- bodies: new bodies (owner 0), seals (-1), purges (-2).
create or replace function pgque._said(p_queue_id int, p_rows pgque.event[]) returns pgque.event[]
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_said  pgque.event[];
begin
  execute (
    select 'select array_agg(' || pgque._slim('null') || ' order by e.ev_id, e.ev_retry) from ('
      || pg_catalog.string_agg(pg_catalog.format(
        'select e.* from pgque.event_%s_%s e where e.ev_key = any ($1) and e.ev_id = any ($2) and e.ev_owner <= 0'
        ' and (e.ev_owner is null or e.ev_owner <= 0)', p_queue_id, n), ' union all ')
      || ') e'
    from pg_catalog.generate_series(0, 2) n)
  into v_said
  using array(select r.ev_key from pg_catalog.unnest(p_rows) r where r.ev_key is not null),
    array(select r.ev_id from pg_catalog.unnest(p_rows) r where r.ev_key is not null);
  return coalesce(v_said, '{}');
end
$$;

-- Returns the columns of a row e of pgque.event without those that may be large; p_lane
-- is in place of ev_extra1.  So a session that checks many messages does not hold all
-- of their payloads.
create or replace function pgque._slim(p_lane text) returns text
language sql immutable as $$
  select 'row(e.slot, e.ev_owner, e.ev_id, e.ev_time, e.ev_txid, e.ev_retry, null, null, ' || p_lane
    || ', null, null, null, null, e.ev_key, null, e.ev_expires, case when e.ev_error is not null then '''' end)::pgque.event'
$$;

-- Returns a query for rows of pgque.event with the newest body of their key, without
-- those that were purged.
create or replace function pgque._renewed_sql(p_queue_id int, p_rows text) returns text
language sql volatile as $$
  select case when not pgque._keyed(q) then p_rows else (
    select pg_catalog.format(
      'select e.slot, e.ev_owner, e.ev_id, e.ev_time, e.ev_txid, e.ev_retry,'
      ' case when s.ev_id is null then e.ev_type else s.ev_type end as ev_type,'
      ' case when s.ev_id is null then e.ev_data else s.ev_data end as ev_data,'
      ' case when s.ev_id is null then e.ev_extra1 else s.ev_extra1 end as ev_extra1,'
      ' case when s.ev_id is null then e.ev_extra2 else s.ev_extra2 end as ev_extra2,'
      ' case when s.ev_id is null then e.ev_extra3 else s.ev_extra3 end as ev_extra3,'
      ' case when s.ev_id is null then e.ev_extra4 else s.ev_extra4 end as ev_extra4,'
      ' case when s.ev_id is null then e.ev_headers else s.ev_headers end as ev_headers, e.ev_key,'
      ' case when s.ev_id is null then e.ev_bytes else s.ev_bytes end as ev_bytes,'
      ' case when s.ev_id is null or e.ev_error is not null then e.ev_expires else s.ev_expires end as ev_expires, e.ev_error'
      ' from (%s) e left join lateral (select b.* from (%s) b order by b.ev_retry desc limit 1) s on e.ev_key is not null'
      ' where s.ev_owner = 0 or s.ev_id is null', p_rows, pg_catalog.string_agg(pg_catalog.format(
        'select b.* from pgque.event_%s_%s b where b.ev_key = e.ev_key and b.ev_id = e.ev_id'
        ' and (b.ev_owner is null or b.ev_owner <= 0) and b.ev_owner in (0, -2)', q.queue_id, n), ' union all '))
    from pg_catalog.generate_series(0, 2) n) end
  from pgque.queue q
  where q.queue_id = p_queue_id
$$;

-- Locks the keys of messages before their first delivery, or before a consumer passes
-- them, and reads their bodies.  Takes the locks of _lock_keys(), but does not wait.
-- busy: messages that are being replaced, or share a bucket with one; gone: messages
-- that were purged.
create or replace function pgque._claim(p_queue pgque.queue, p_rows pgque.event[], out rows pgque.event[], out busy bigint[], out gone bigint[])
language plpgsql as $$
declare
  v_class    int := pgque._key_class(p_queue.queue_id);
  v_buckets  int := pgque._bucket_class(p_queue.queue_id);
  v_said   pgque.event[];
  v_ids    bigint[];
  v_keys   text[];
begin
  v_said := pgque._said(p_queue.queue_id, p_rows);
  select pg_catalog.array_agg(r.ev_id order by r.ev_id), pg_catalog.array_agg(r.ev_key order by r.ev_id) into v_ids, v_keys
  from pg_catalog.unnest(p_rows) r
  where r.ev_key is not null
    and not exists (select from pg_catalog.unnest(v_said) s where s.ev_id = r.ev_id and s.ev_owner < 0);
  busy := array(
    select r.id
    from rows from (pg_catalog.unnest(v_ids), pg_catalog.unnest(v_keys)) r (id, key)
    where not case
      when pgque._many_keys(pg_catalog.cardinality(v_ids)) then pg_catalog.pg_try_advisory_xact_lock(v_buckets, pgque._bucket(r.key))
      else pg_catalog.pg_try_advisory_xact_lock_shared(v_buckets, pgque._bucket(r.key))
        and pg_catalog.pg_try_advisory_xact_lock(v_class, pg_catalog.hashtext(r.key))
    end);
  -- Under the locks no more rows are appended.
  v_said := pgque._said(p_queue.queue_id, p_rows);
  gone := array(select s.ev_id from pg_catalog.unnest(v_said) s where s.ev_owner = -2);
  rows := array(
    select row(r.slot, r.ev_owner, r.ev_id, r.ev_time, r.ev_txid, r.ev_retry, null, null, r.ev_extra1, null, null, null, null, r.ev_key, null,
      case when s.ev_id is not null and r.ev_error is null then s.ev_expires else r.ev_expires end, r.ev_error)::pgque.event
    from pg_catalog.unnest(p_rows) r
    left join (
      select distinct on (s.ev_id) s.* from pg_catalog.unnest(v_said) s where s.ev_owner = 0 order by s.ev_id, s.ev_retry desc
    ) s on s.ev_id = r.ev_id and r.ev_key is not null
    order by r.ev_id);
end
$$;

-- Notes that messages with keys were delivered: their bodies are final.  An old
-- snapshot may not show a body that was stored before a rotation and committed since.
-- So it appends the seal to all three tables: the unique index of each knows only its
-- own rows.  Several consumers may have the same message: it gets one seal.
create or replace function pgque._seal(p_queue_id int, p_rows pgque.event[]) returns void
language plpgsql as $$
declare
  v_said          pgque.event[];
  v_old_snapshot  boolean := pgque._old_snapshot();
begin
  if not exists (select from pg_catalog.unnest(p_rows) r where r.ev_key is not null) then
    return;
  end if;
  if v_old_snapshot then
    -- The current table is then the one of the senders, or this call gets 40001.
    perform from pgque.queue q where q.queue_id = p_queue_id for share;
  end if;
  v_said := pgque._said(p_queue_id, p_rows);
  insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_key)
  select q.queue_id * 3 + n.n, -1, r.ev_id, r.ev_time, pg_catalog.pg_current_xact_id(), coalesce(s.newest, 0) + 1, r.ev_key
  from pgque.queue q
  join pg_catalog.generate_series(0, 2) n (n) on n.n = q.queue_cur_table or v_old_snapshot
  cross join (select distinct on (r.ev_id) r.* from pg_catalog.unnest(p_rows) r order by r.ev_id) r
  left join (
    select s.ev_id, max(s.ev_retry) as newest, min(s.ev_owner) < 0 as sealed from pg_catalog.unnest(v_said) s group by s.ev_id
  ) s on s.ev_id = r.ev_id
  where q.queue_id = p_queue_id and r.ev_key is not null and s.sealed is not true;
exception
  when unique_violation then
    perform pgque._fail('serialization_failure', 'the key of a message changed since this transaction began', 'Retry the transaction.');
end
$$;

-- Does the same for a message that went to the retry queue before its first delivery.
-- Returns null if it cannot be delivered now.
create or replace function pgque._claim_waiting(p_queue pgque.queue, p_row pgque.retry_queue) returns pgque.retry_queue
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_claim  record := pgque._claim(p_queue, array[pgque._event(p_row)]);
begin
  if p_row.ev_id = any (v_claim.gone) then
    delete from pgque.retry_queue r where r.ev_owner + 0 = p_row.ev_owner and r.ev_id = p_row.ev_id;
    return null;
  elsif p_row.ev_id = any (v_claim.busy) then
    return null;
  end if;
  perform pgque._seal(p_queue.queue_id, v_claim.rows);
  perform pgque._refresh_waiting(p_queue.queue_id, null, array[p_row.ev_id]);
  p_row.ev_expires := (select r.ev_expires from pgque.retry_queue r where r.ev_owner + 0 = p_row.ev_owner and r.ev_id = p_row.ev_id);
  return p_row;
end
$$;

-- Gives messages with keys that wait in the retry queue for their first delivery the
-- newest body, and removes those that were purged.  p_leaf: messages whose newest row
-- is in one table, before that is emptied; or p_ids: these messages.  Returns how many
-- changed.
create or replace function pgque._refresh_waiting(
  p_queue_id int, p_leaf int default null, p_ids bigint[] default null, p_locked text default 'skip locked'
) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_count  bigint;
begin
  execute (
    select pg_catalog.format(
      $q$
      with newest as materialized (
        select r.ctid as place, e.*
        from pgque.retry_queue r
        cross join lateral (select * from (%s) e order by e.ev_retry desc limit 1) e
        where r.ev_queue = $1 and r.ev_key is not null and r.ev_owner <> 0 and r.ev_receives = 0
          and ($2 is null or e.leaf = $2) and ($3 is null or r.ev_id in (select i.id from pg_catalog.unnest($3) i (id)))
          and (e.ev_owner = -2
            or row(r.ev_type, r.ev_data, r.ev_bytes, r.ev_headers, r.ev_extra1)
              is distinct from row(e.ev_type, e.ev_data, e.ev_bytes, e.ev_headers, e.ev_extra1)
            or r.ev_error is null and r.ev_expires is distinct from e.ev_expires)
        for update of r %s
      ),
      purged as (
        delete from pgque.retry_queue r using newest n where r.ctid = n.place and n.ev_owner = -2
      ),
      renewed as (
        update pgque.retry_queue r
        set ev_type = n.ev_type, ev_data = n.ev_data, ev_bytes = n.ev_bytes, ev_headers = n.ev_headers, ev_extra1 = n.ev_extra1,
          ev_expires = case when r.ev_error is null then n.ev_expires else r.ev_expires end
        from newest n
        where r.ctid = n.place and n.ev_owner = 0
      )
      select count(*) from newest
      $q$,
      pg_catalog.string_agg(pg_catalog.format(
        '(select %2$s as leaf, e.* from pgque.event_%1$s_%2$s e where e.ev_key = r.ev_key and e.ev_id = r.ev_id'
        ' and (e.ev_owner is null or e.ev_owner <= 0) and e.ev_owner in (0, -2) order by e.ev_key desc, e.ev_id desc, e.ev_retry desc limit 1)',
        p_queue_id, n), ' union all '),
      p_locked)
    from pg_catalog.generate_series(0, 2) n)
  into v_count
  using p_queue_id, p_leaf, p_ids;
  return v_count;
end
$$;

-- Claims messages with keys that wait for their consumer's first delivery, in rows that
-- the caller has locked.  Returns those that may leave the retry queue: they have their
-- newest bodies, no sender is replacing them, and they are sealed.  The seal is needed
-- because a sender with an older snapshot does not see that they left.
create or replace function pgque._claim_aside(p_queue_id int, p_rows pgque.retry_queue[], out owners int[], out ids bigint[])
language plpgsql as $$
declare
  v_claim  record;
begin
  if pg_catalog.cardinality(p_rows) = 0 then
    return;
  end if;
  v_claim := pgque._claim((select q from pgque.queue q where q.queue_id = p_queue_id), array(select pgque._event(r) from pg_catalog.unnest(p_rows) r));
  select pg_catalog.array_agg(r.ev_owner), pg_catalog.array_agg(r.ev_id) into owners, ids
  from pg_catalog.unnest(p_rows) r
  where r.ev_id not in (select b.id from pg_catalog.unnest(v_claim.busy) b (id));
  perform pgque._seal(p_queue_id, array(select r from pg_catalog.unnest(v_claim.rows) r where r.ev_id = any (ids)));
  perform pgque._refresh_waiting(p_queue_id, null, ids) where ids is not null;   -- null means all ids
end
$$;

create or replace function pgque.purge_key(queue_name text, key text, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_last   record;
  v_count  bigint;
begin
  perform pgque._need_read_committed('purge_key()');
  if $2 is null then
    perform pgque._fail('PQ005', format('purge_key of queue %I needs a key', v_queue.queue_name),
      'Pass a key. To delete all messages, use pgque.purge(queue).');
  end if;
  perform pgque._lock_keys(v_queue.queue_id, array[$2]);
  delete from pgque.retry_queue r where r.ev_queue = v_queue.queue_id and r.ev_key = $2 and r.ev_owner = 0;
  get diagnostics v_count = row_count;
  -- Only under the lock: the pump may have moved the message into the log before.
  v_last := pgque._newest_of_key(v_queue.queue_id, $2);
  if v_last.ev_id is not null and coalesce(v_last.ev_owner, 0) = 0 and not pgque._is_passed(v_queue.queue_id, v_last.ev_id, v_last.sent_by) then
    insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_key)
    select q.queue_id * 3 + q.queue_cur_table, -2, v_last.ev_id, v_last.ev_time, pg_current_xact_id(), v_last.ev_retry + 1, $2
    from pgque.queue q
    where q.queue_id = v_queue.queue_id;
    v_count := v_count + 1;
  end if;
  -- Without the key: the key may be the data that is to be erased.
  perform pgque._did('purge_key', v_queue.queue_name, jsonb_build_object('messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.purge_key(text, text, pgque.caller) is
  'Removes the pending message with a key. Returns 1, or 0 if there is none. Errors: PQ001 no such queue; PQ005 key is NULL; 25000 not READ '
  'COMMITTED.';
