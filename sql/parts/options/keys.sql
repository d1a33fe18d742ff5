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
--   * _choose(), which chooses messages of the log, calls _claim() and _seal().
--   * _choose_retries(), which chooses messages of the retry queue, calls _claim_retry().
--   * Everything that reads bodies reads them through _renewed_sql().
--   * The pump and retention leave out messages that are being replaced:
--     _claim_retries().
--   * Rotation calls _refresh_retries() before a table with bodies is emptied.

-- Returns the rows that were appended for messages after they were sent, without
-- bodies: new bodies (owner 0), seals (-1), purges (-2).
create or replace function pgque._key_rows(p_queue_id int, p_rows pgque.event[]) returns pgque.event[]
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
  v_said := pgque._key_rows(p_queue.queue_id, p_rows);
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
  v_said := pgque._key_rows(p_queue.queue_id, p_rows);
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
  v_said := pgque._key_rows(p_queue_id, p_rows);
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

-- Claims the key of a message that went to the retry queue before its first delivery,
-- and returns the row with its final body.  Returns null if it cannot be delivered now.
create or replace function pgque._claim_retry(p_queue pgque.queue, p_row pgque.retry_queue) returns pgque.retry_queue
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_claim  record := pgque._claim(p_queue, array[pgque._as_event(p_row)]);
begin
  if p_row.ev_id = any (v_claim.gone) then
    delete from pgque.retry_queue r where r.ev_owner + 0 = p_row.ev_owner and r.ev_id = p_row.ev_id;
    return null;
  elsif p_row.ev_id = any (v_claim.busy) then
    return null;
  end if;
  perform pgque._seal(p_queue.queue_id, v_claim.rows);
  perform pgque._refresh_retries(p_queue.queue_id, null, array[p_row.ev_id]);
  p_row.ev_expires := (select r.ev_expires from pgque.retry_queue r where r.ev_owner + 0 = p_row.ev_owner and r.ev_id = p_row.ev_id);
  return p_row;
end
$$;

-- Gives messages with keys that wait in the retry queue for their first delivery the
-- newest body, and removes those that were purged.  p_leaf: messages whose newest row
-- is in one table, before that is emptied; or p_ids: these messages.  Returns how many
-- changed.
create or replace function pgque._refresh_retries(
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
create or replace function pgque._claim_retries(p_queue_id int, p_rows pgque.retry_queue[], out owners int[], out ids bigint[])
language plpgsql as $$
declare
  v_claim  record;
begin
  if pg_catalog.cardinality(p_rows) = 0 then
    return;
  end if;
  v_claim := pgque._claim((select q from pgque.queue q where q.queue_id = p_queue_id), array(select pgque._as_event(r) from pg_catalog.unnest(p_rows) r));
  select pg_catalog.array_agg(r.ev_owner), pg_catalog.array_agg(r.ev_id) into owners, ids
  from pg_catalog.unnest(p_rows) r
  where r.ev_id not in (select b.id from pg_catalog.unnest(v_claim.busy) b (id));
  perform pgque._seal(p_queue_id, array(select r from pg_catalog.unnest(v_claim.rows) r where r.ev_id = any (ids)));
  perform pgque._refresh_retries(p_queue_id, null, ids) where ids is not null;   -- null means all ids
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
    perform pgque._append_end(v_queue.queue_id, v_last.ev_id, v_last.ev_time, $2, v_last.ev_retry + 1);
    v_count := v_count + 1;
  end if;
  -- Without the key: the key may be the data that is to be erased.
  perform pgque._record_action('purge_key', v_queue.queue_name, jsonb_build_object('messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.purge_key(text, text, pgque.caller) is
  'Removes the pending message with a key. Returns 1, or 0 if there is none. Errors: PQ001 no such queue; PQ005 key is NULL; 25000 not READ '
  'COMMITTED.';

create or replace function pgque._keyed(p_queue pgque.queue) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return p_queue.queue_keyed or exists (select from pgque.queue_option o where o.opt_queue = p_queue.queue_id and o.opt_name = 'key');
end
$$;

-- Every key belongs to one of 1024 buckets of its queue.  A transaction with up to 200
-- keys locks each key, and its bucket in share mode.  One with more keys locks whole
-- buckets instead, so that no transaction has more than about a thousand locks.
create or replace function pgque._key_class(p_queue_id int) returns int
language sql immutable as $$ select pg_catalog.hashtext('pgque.key ' || p_queue_id) $$;

create or replace function pgque._bucket_class(p_queue_id int) returns int
language sql immutable as $$ select pg_catalog.hashtext('pgque.bucket ' || p_queue_id) $$;

create or replace function pgque._bucket(p_key text) returns int
language sql immutable as $$ select pg_catalog.hashtext(p_key) & 1023 $$;

create or replace function pgque._many_keys(p_count bigint) returns boolean
language sql immutable as $$ select p_count > 200 $$;

-- Locks keys of a queue until the transaction ends.  Everything that sends or removes a
-- message with a key calls this.  Locks are taken in one order, so that two batches
-- cannot deadlock.
create or replace function pgque._lock_keys(p_queue_id int, p_keys text[]) returns void
language plpgsql as $$
declare
  v_keys     text[] := array(select distinct k.key from pg_catalog.unnest(p_keys) k (key) where k.key is not null);
  v_buckets  int[] := array(select distinct pgque._bucket(k.key) from pg_catalog.unnest(v_keys) k (key) order by 1);
begin
  -- See _wait_for_keyed_sends().
  perform pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtext('pgque.passing'), p_queue_id);
  if pgque._many_keys(pg_catalog.cardinality(v_keys)) then
    perform pgque._lock_buckets(p_queue_id, v_buckets);
    return;
  end if;
  perform pg_catalog.pg_advisory_xact_lock_shared(pgque._bucket_class(p_queue_id), b.bucket) from pg_catalog.unnest(v_buckets) b (bucket);
  perform pg_catalog.pg_advisory_xact_lock(pgque._key_class(p_queue_id), h.hash)
  from (select distinct pg_catalog.hashtext(k.key) as hash from pg_catalog.unnest(v_keys) k (key) order by 1) h;
end
$$;

-- Locks buckets.  If one of them stays locked for longer than a moment, the function
-- waits for this bucket only and releases the others, so that their keys can be sent
-- and delivered.
create or replace function pgque._lock_buckets(p_queue_id int, p_buckets int[]) returns void
language plpgsql as $$
declare
  v_class   int := pgque._bucket_class(p_queue_id);
  v_wait    text := pg_catalog.current_setting('lock_timeout');
  v_moment  interval := least('50 milliseconds', nullif(v_wait::interval, '0'));
  v_bucket  int;
begin
  loop
    begin
      perform pg_catalog.set_config('lock_timeout', pg_catalog.ceil(extract(epoch from v_moment) * 1000) || 'ms', true);
      foreach v_bucket in array p_buckets loop
        perform pg_catalog.pg_advisory_xact_lock(v_class, v_bucket);
      end loop;
      perform pg_catalog.set_config('lock_timeout', v_wait, true);
      return;
    exception
      when lock_not_available then
        null;
    end;
    begin
      perform pg_catalog.pg_advisory_xact_lock(v_class, v_bucket);
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
    end;
  end loop;
end
$$;

-- Waits for open transactions that sent a message with a key or removed one.  A
-- consumer must not pass a message that such a transaction replaces: then the new body
-- would be delivered to no consumer.
-- A session that waits for a lock blocks later ones, so the function mostly tries: one
-- sender that stays open must not stop all senders.  A sender with an older snapshot
-- does not see which consumer passes a message; the update of the queue's row stops it.
create or replace function pgque._wait_for_keyed_sends(p_queue pgque.queue) returns void
language plpgsql as $$
declare
  v_class  int := pg_catalog.hashtext('pgque.passing');
  v_wait   text := pg_catalog.current_setting('lock_timeout');
  v_end    timestamptz := pg_catalog.clock_timestamp() + coalesce(nullif(v_wait::interval, '0'), '1 minute');
begin
  if not pgque._keyed(p_queue) then
    return;
  end if;
  for v_turn in 1..1000000 loop
    begin
      perform pg_catalog.set_config('lock_timeout', '50ms', true);
      if v_turn % 20 = 0 then
        perform pg_catalog.pg_advisory_xact_lock(v_class, p_queue.queue_id);
      elsif not pg_catalog.pg_try_advisory_xact_lock(v_class, p_queue.queue_id) then
        perform pgque._undo_block();
      end if;
      -- A consumer with an older snapshot may hold the row lock: senders do not wait
      -- for it.
      update pgque.queue q set queue_xid = pgque._queue_xid(q) where q.queue_id = p_queue.queue_id;
      perform pg_catalog.set_config('lock_timeout', v_wait, true);
      exit;
    exception
      when lock_not_available or sqlstate 'PQ099' then
        null;
    end;
    if pg_catalog.clock_timestamp() > v_end then
      perform pgque._fail('lock_not_available', pg_catalog.format('open transactions have sent messages with keys to queue %I: pid %s', p_queue.queue_name, (
          select pg_catalog.string_agg(distinct l.pid::text, ', ')
          from pg_catalog.pg_locks l
          where l.locktype = 'advisory' and l.granted and l.classid::bigint = v_class::bigint & 4294967295 and l.objid::bigint = p_queue.queue_id)),
        'Try again after they commit, or set a higher lock_timeout to wait longer.');
    end if;
    perform pg_catalog.pg_sleep(0.02);
  end loop;
end
$$;

-- Sends a message with a key.  If a message with this key is pending, its body is
-- replaced: a row with the same id and the next number (ev_retry) is appended, which
-- only readers of keys see (owner 0).
-- A delivery of the message appends a seal (owner -1), and a purge a row of owner -2.
-- After either, the next send is a new message.
-- A transaction whose snapshot does not show the last of these rows violates the unique
-- index.  Such a transaction also locks the queue's row, so that the current table
-- cannot change.
create or replace function pgque._send_keyed(
  p_queue pgque.queue, p_type text, p_data text, p_bytes bytea, p_headers jsonb, p_key text,
  p_due timestamptz, p_expires timestamptz, p_partition_key text
) returns bigint
language plpgsql as $$
declare
  v_txid  xid8 := pg_catalog.pg_current_xact_id();
  v_last  record;
  v_id    bigint;
begin
  if pgque._old_snapshot() then
    perform from pgque.queue q where q.queue_id = p_queue.queue_id for share;
  end if;
  -- A delayed message was delivered to no consumer.
  update pgque.retry_queue r
  set ev_type = p_type, ev_data = p_data, ev_bytes = p_bytes, ev_headers = p_headers, ev_expires = p_expires, ev_extra1 = p_partition_key
  where r.ev_owner = 0 and r.ev_queue = p_queue.queue_id
    -- Only one that has not expired.  An expired one may be valid again: clocks are set
    -- back too.
    and r.ev_id = (
      select d.ev_id from pgque.retry_queue d
      where d.ev_queue = p_queue.queue_id and d.ev_key = p_key and d.ev_owner = 0 and (d.ev_expires > pgque.clock()) is not false
      order by d.ev_id desc
      limit 1)
  returning r.ev_id into v_id;
  if v_id is not null then
    return v_id;
  end if;
  v_last := pgque._newest_of_key(p_queue.queue_id, p_key);
  if v_last.ev_id is not null and coalesce(v_last.ev_owner, 0) = 0 and (v_last.ev_expires > pgque.clock()) is not false
    and not pgque._is_passed(p_queue.queue_id, v_last.ev_id, v_last.sent_by)
  then
    -- The ticker checks queues whose sequence moved.
    perform pg_catalog.nextval(p_queue.queue_event_seq);
    insert into pgque.event (slot, ev_owner, ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_bytes, ev_headers, ev_key, ev_expires, ev_extra1)
    select q.queue_id * 3 + q.queue_cur_table, 0, v_last.ev_id, v_last.ev_time, v_txid, v_last.ev_retry + 1, p_type, p_data, p_bytes, p_headers,
      p_key, p_expires, p_partition_key
    from pgque.queue q
    where q.queue_id = p_queue.queue_id;
    if not found then
      perform pgque._no_queue(p_queue.queue_name);
    end if;
    -- Workers may have put the message into the retry queue without delivering it.
    update pgque.retry_queue r
    set ev_type = p_type, ev_data = p_data, ev_bytes = p_bytes, ev_headers = p_headers, ev_expires = p_expires, ev_extra1 = p_partition_key
    where r.ev_queue = p_queue.queue_id and r.ev_key = p_key and r.ev_id = v_last.ev_id;
    return v_last.ev_id;
  end if;
  v_id := pg_catalog.nextval(p_queue.queue_event_seq);
  if p_due is not null then
    insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_bytes, ev_headers,
      ev_key, ev_expires, ev_extra1)
    select p_due, q.queue_id, 0, v_id, pgque.clock(), v_txid, p_type, p_data, p_bytes, p_headers, p_key, p_expires, p_partition_key
    from pgque.queue q
    where q.queue_id = p_queue.queue_id;
  else
    insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_bytes, ev_headers, ev_key, ev_expires, ev_extra1)
    select q.queue_id * 3 + q.queue_cur_table, v_id, pgque.clock(), v_txid, 0, p_type, p_data, p_bytes, p_headers, p_key, p_expires, p_partition_key
    from pgque.queue q
    where q.queue_id = p_queue.queue_id;
  end if;
  if not found then
    perform pgque._no_queue(p_queue.queue_name);   -- the queue was dropped meanwhile
  end if;
  return v_id;
exception
  when unique_violation then
    perform pgque._fail('serialization_failure', pg_catalog.format('key %L of queue %I changed since this transaction began', p_key, p_queue.queue_name),
      'Retry the transaction.');
end
$$;
