-- ---------------------------------------------------------------------------
-- send: append events
-- ---------------------------------------------------------------------------

-- Returns headers as they are stored: a JSON object, or PQ005.
create or replace function pgque._headers(p_queue text, p_headers jsonb) returns jsonb
language plpgsql strict immutable set search_path = pg_catalog, pgque, pg_temp as $$
begin
  if pg_catalog.jsonb_typeof(p_headers) <> 'object' then
    perform pgque._bad_headers(p_queue, p_headers::text);
  end if;
  return p_headers;
end
$$;

create or replace function pgque._headers(p_queue text, p_headers text) returns jsonb
language plpgsql strict immutable set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return pgque._headers(p_queue, p_headers::jsonb);
exception
  when data_exception then
    perform pgque._bad_headers(p_queue, p_headers);
end
$$;

create or replace function pgque._bad_headers(p_queue text, p_headers text) returns void
language plpgsql immutable as $$
begin
  perform pgque._fail('PQ005', pg_catalog.format('headers for queue %I must be a JSON object', p_queue),
    'Pass an object such as {"trace": "4bf92f35"}.',
    pg_catalog.left(p_headers, 200));
end
$$;

-- Returns when a message that is sent now expires; null means never.
create or replace function pgque._expires(p_queue pgque.queue, p_ttl interval default null) returns timestamptz
language sql volatile as $$
  select case when coalesce(p_ttl, p_queue.queue_message_ttl) > '0' then pgque.clock() + coalesce(p_ttl, p_queue.queue_message_ttl) end
$$;

-- Appends one event and returns its id.  The transaction's id is taken before
-- the queue row is read, and one statement reads the row and stores the event
-- (see sql/README.md, "Writers and rotation").
create or replace function pgque._send(
  p_queue text, p_type text, p_data text,
  p_extra1 text, p_extra2 text, p_extra3 text, p_extra4 text, p_headers jsonb, p_bytes bytea, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_txid  xid8 := pgque._sender_xid();
  v_id    bigint;
begin
  if p_headers is not null then
    perform pgque._headers(p_queue, p_headers);
  end if;
  if p_bytes is not null and p_data is not null then
    perform pgque._fail('PQ005', format('a message for queue %s has both text and bytes', coalesce(quote_ident(p_queue), 'null')),
      'Pass text as payload or bytes as payload_bytes, and null for the other one.');
  end if;
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data,
    ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_bytes, ev_expires)
  select q.queue_id * 3 + q.queue_cur_table, nextval(q.queue_event_seq), pgque.clock(), v_txid, p_type, p_data,
    p_extra1, p_extra2, p_extra3, p_extra4, p_headers, p_bytes, pgque._expires(q)
  from pgque.queue q
  where q.queue_name = p_queue collate "default" and q.queue_open
    -- In this order: a role without a right must not learn that the queue is full.
    and case
      when caller = current_user collate "C" or pg_has_role(caller, 'pgque_writer', 'usage') or pgque._may(caller, 'produce', q.queue_id)
        then q.queue_max_depth = 0 or pgque._room(q, 1)
    end
  returning event.ev_id into v_id;
  if v_id is null then
    return pgque._send(pgque._need_open(p_queue, caller), p_type, p_data, p_extra1, p_extra2, p_extra3, p_extra4, p_headers, p_bytes);
  end if;
  return v_id;
end
$$;

-- Returns the name of a queue that takes events.  Raises an error if the queue does not
-- exist or is paused.  A queue that came out of a dump is repaired first.
create or replace function pgque._need_open(p_queue text, p_caller name default current_user) returns text
language plpgsql as $$
declare
  v_queue  pgque.queue := pgque._queue(p_queue, p_caller, 'produce');
begin
  if v_queue.queue_paused then
    perform pgque._fail('PQ013', pg_catalog.format('queue is paused: %I', v_queue.queue_name),
      'Resume it as an administrator: select pgque.resume(name);');
  end if;
  perform pgque._rebase(v_queue.queue_id);
  return v_queue.queue_name;
end
$$;

-- Returns whether a queue with max_depth has room for p_count more messages; PQ003 if
-- not.
create or replace function pgque._room(p_queue pgque.queue, p_count bigint) returns boolean
language sql as $$ select pgque._room_left(p_queue, p_count) >= p_count $$;

-- Returns how many more messages a queue with max_depth takes; PQ003 if fewer than
-- p_count.  Each message uses an id, and no consumer stands before queue_floor: so far
-- from the limit, a subtraction is enough.
-- Nearer to it the session remembers up to which id there is room: consumers only move
-- forward.  The remembered value is not valid
--   * after a change of the queue's row, such as another max_depth;
--   * after _depth_grows(), or while a transaction that called it is open;
--   * beyond a transaction with an old snapshot.
-- The value has a seal, because every role can set it.
create or replace function pgque._room_left(p_queue pgque.queue, p_count bigint) returns bigint
language plpgsql as $$
declare
  v_last    bigint := coalesce(pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), 0);
  v_left    bigint := p_queue.queue_max_depth - (v_last - p_queue.queue_floor);
  v_name    text;
  v_known   text;
  v_upto    text;
  v_grown   bigint;
  v_class   int;
  v_steady  boolean;
begin
  if v_left >= p_count and v_last >= p_queue.queue_floor and not p_queue.queue_external_ticker
    -- Delayed messages and retries may be older.
    and not exists (select from pgque.retry_queue r where r.ev_queue = p_queue.queue_id and r.ev_id <= p_queue.queue_floor)
  then
    return v_left;
  end if;
  v_name := 'pgque.depth_' || p_queue.queue_id;
  v_known := pg_catalog.current_setting(v_name, true);
  v_upto := pg_catalog.split_part(v_known, ' ', 1);
  v_grown := coalesce(pg_catalog.pg_sequence_last_value('pgque.depth_growth'), 0);
  if v_known = pgque._sealed(v_upto, p_queue.queue_xid, v_grown) then
    v_left := v_upto::bigint - v_last;
    if v_left >= p_count then
      return v_left;
    end if;
  end if;
  -- Only a transaction that called _depth_grows() holds this lock for long.
  v_class := pg_catalog.hashtext('pgque.depth');
  v_steady := pg_catalog.pg_try_advisory_lock(v_class, p_queue.queue_id) and pg_catalog.pg_advisory_unlock(v_class, p_queue.queue_id);
  v_left := pgque._find_room(p_queue, p_count, v_last);
  if v_left is null then
    return greatest(p_queue.queue_max_depth, p_count);
  elsif v_steady then
    perform pg_catalog.set_config(v_name, pgque._sealed((v_last + v_left)::text, p_queue.queue_xid, v_grown), pgque._old_snapshot());
  end if;
  return v_left;
end
$$;

-- Returns the value that a session remembers, with a proof that pgque wrote it: writers
-- cannot read queue_xid.
create or replace function pgque._sealed(p_upto text, p_xid xid8, p_grown bigint) returns text
language sql immutable as $$
  select p_upto || ' ' || pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.concat_ws(' ', p_upto, p_xid, p_grown), 'UTF8')), 'hex')
$$;

-- Call this before the depth of a queue grows without a send: before a consumer is
-- subscribed or moved back, and before a dead letter is requeued.  Senders then drop
-- the value that they remember, and remember none until this transaction ends.
create sequence if not exists pgque.depth_growth;
create or replace function pgque._depth_grows(p_queue_id int) returns void
language plpgsql as $$
begin
  perform pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtext('pgque.depth'), p_queue_id);
  perform pg_catalog.nextval('pgque.depth_growth');
end
$$;

-- Returns how many more messages a queue takes after an id; PQ003 if fewer than
-- p_count.  Null: there is no consumer and no delayed message, so nothing counts.
-- The slowest consumer is searched; there may be ten thousand consumers.  Near the limit
-- the messages are counted, because rolled-back sends use ids too.  This is always so with
-- an external ticker, whose event_seq may mean anything.
create or replace function pgque._find_room(p_queue pgque.queue, p_count bigint, p_last bigint) returns bigint
language plpgsql as $$
declare
  v_waiting  bigint;
  v_oldest   bigint;
  v_left     bigint;
begin
  select min(r.ev_id) - 1 into v_waiting from pgque.retry_queue r where r.ev_queue = p_queue.queue_id;
  select least(min(p.pos_event_seq), v_waiting) into v_oldest
  from pgque.subscriber s
  cross join lateral pgque._oldest_need(s.sub_id) p
  where s.sub_queue = p_queue.queue_id;
  if v_oldest is null then
    return null;
  end if;
  v_left := p_queue.queue_max_depth - (p_last - v_oldest);
  if v_left < p_count or p_queue.queue_external_ticker or v_oldest > p_last then
    v_left := p_queue.queue_max_depth - pgque._depth(p_queue.queue_id);
  end if;
  if v_left < p_count then
    perform pgque._fail('PQ003', pg_catalog.format('queue full: %I', p_queue.queue_name),
      'Try again when the consumers have caught up, or raise max_depth. Nothing was sent.',
      pg_catalog.format('max_depth is %s.', p_queue.queue_max_depth));
  end if;
  return v_left;
end
$$;

-- Sends a message with options.
create or replace function pgque._send_as(
  p_queue text, p_type text, p_data text, p_bytes bytea, p_headers jsonb, p_key text,
  p_delay interval, p_deliver_at timestamptz, p_ttl interval, p_partition_key text, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  if p_key is null and p_delay is null and p_deliver_at is null and p_ttl is null then
    return pgque._send(p_queue, p_type, p_data, p_partition_key, null, null, null, p_headers, p_bytes, caller);
  end if;
  return (pgque._send_all(p_queue, p_type,
    case when p_bytes is null then array[p_data] end, case when p_bytes is not null then array[p_bytes] end,
    array[p_headers], array[p_key], array[p_delay], array[p_deliver_at], array[p_ttl], array[p_partition_key], caller))[1];
end
$$;

-- Returns the elements of an array in one dimension, counted from 1.
create or replace function pgque._flat(p_array anyarray) returns anyarray
language plpgsql immutable as $$
begin
  if pg_catalog.array_ndims(p_array) > 1 or pg_catalog.array_lower(p_array, 1) <> 1 then
    return array(select e from pg_catalog.unnest(p_array) e);
  end if;
  return p_array;
end
$$;

-- Refuses options that do not fit the messages or are invalid: PQ005.
create or replace function pgque._check_options(
  p_queue text, p_count int, p_headers jsonb[], p_keys text[],
  p_delays interval[], p_deliver_ats timestamptz[], p_ttls interval[], p_partition_keys text[]
) returns void
language plpgsql as $$
declare
  v_wrong  text;
begin
  select pg_catalog.string_agg(a.name, ', ') into v_wrong
  from (values ('headers', pg_catalog.cardinality(p_headers)), ('keys', pg_catalog.cardinality(p_keys)), ('delays', pg_catalog.cardinality(p_delays)),
    ('deliver_ats', pg_catalog.cardinality(p_deliver_ats)), ('ttls', pg_catalog.cardinality(p_ttls)),
    ('partition_keys', pg_catalog.cardinality(p_partition_keys))) a (name, n)
  where a.n <> p_count;
  if v_wrong is not null then
    perform pgque._fail('PQ005', pg_catalog.format('%s for queue %I must have as many elements as payloads, %s', v_wrong, p_queue, p_count),
      'Pass null for an element, or for the whole array, to leave it out.');
  end if;
  select o.wrong into v_wrong
  from (
    select case
        when o.delay < '0' then 'the delay of a message for queue %I is negative'
        when o.delay is not null and o.deliver_at is not null then 'a message for queue %I has both delay and deliver_at'
        when o.delay > '100 years' or o.deliver_at > pgque.clock() + interval '100 years' then 'a message for queue %I is delayed by more than 100 years'
        when o.ttl < '0' then 'the ttl of a message for queue %I is negative'
        when o.ttl > '100 years' then 'the ttl of a message for queue %I is longer than 100 years'
        when o.key = '' or pg_catalog.octet_length(o.key) > 1000 then 'the key of a message for queue %I must have 1 to 1000 bytes'
      end as wrong
    from rows from (pg_catalog.unnest(p_delays), pg_catalog.unnest(p_deliver_ats), pg_catalog.unnest(p_ttls), pg_catalog.unnest(p_keys))
      o (delay, deliver_at, ttl, key)
  ) o
  where o.wrong is not null
  limit 1;
  if v_wrong is not null then
    perform pgque._fail('PQ005', pg_catalog.format(v_wrong, p_queue),
      'Pass delay and ttl as intervals from now, deliver_at as a time. ttl 0 means that the message never expires.');
  end if;
  perform pgque._headers(p_queue, h) from pg_catalog.unnest(p_headers) h where h is not null;
end
$$;

-- Sends many messages of one type with options, given as arrays of one length or
-- null; all or none.
create or replace function pgque._send_all(
  p_queue text, p_type text, p_data text[], p_bytes bytea[], p_headers jsonb[], p_keys text[],
  p_delays interval[], p_deliver_ats timestamptz[], p_ttls interval[], p_partition_keys text[], caller pgque.caller default current_user
) returns bigint[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue(p_queue, caller, 'produce');
begin
  return pgque._send_rows(v_queue, array_fill(p_type, array[coalesce(cardinality(p_data), cardinality(p_bytes))]),
    p_data, p_bytes, p_headers, p_keys, p_delays, p_deliver_ats, p_ttls, p_partition_keys);
end
$$;

-- Sends many messages with a type for each.  Data and bytes may both be given, with one
-- of them null in each message.  Returns ids in input order: taking the ids first is
-- faster than returning them from the insert.  A delayed message is stored in the retry
-- queue, for every consumer (owner 0).
create or replace function pgque._send_rows(
  p_queue pgque.queue, p_types text[], p_data text[], p_bytes bytea[], p_headers jsonb[], p_keys text[],
  p_delays interval[], p_deliver_ats timestamptz[], p_ttls interval[], p_partition_keys text[]
) returns bigint[]
language plpgsql set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_count    int := coalesce(cardinality(p_data), cardinality(p_bytes));
  v_txid     xid8 := pgque._sender_xid();
  v_now      timestamptz := pgque.clock();
  v_queue    pgque.queue := p_queue;
  v_plain    boolean[];
  v_without  int;
  v_due      timestamptz[];
  v_ends     timestamptz[];
  v_ids      bigint[];
  v_stored   int;
  v_delayed  int := 0;
  v_last     bigint;
begin
  -- Counted from 1 in one dimension, whatever the caller's arrays are.
  p_data := pgque._flat(p_data); p_bytes := pgque._flat(p_bytes); p_headers := pgque._flat(p_headers); p_keys := pgque._flat(p_keys);
  p_delays := pgque._flat(p_delays); p_deliver_ats := pgque._flat(p_deliver_ats); p_ttls := pgque._flat(p_ttls);
  p_partition_keys := pgque._flat(p_partition_keys);
  perform pgque._check_options(v_queue.queue_name, v_count, p_headers, p_keys, p_delays, p_deliver_ats, p_ttls, p_partition_keys);
  if not v_queue.queue_open then
    perform pgque._need_open(v_queue.queue_name);
    v_queue := pgque._queue(v_queue.queue_name);
  end if;
  select array_agg(p_keys[g] is null), count(*) filter (where p_keys[g] is null),
    array_agg(case when d.due > v_now then d.due end), array_agg(pgque._expires(v_queue, p_ttls[g]))
  into v_plain, v_without, v_due, v_ends
  from generate_series(1, v_count) g
  cross join lateral (select coalesce(p_deliver_ats[g], v_now + p_delays[g]) as due offset 0) d;
  perform pgque._note_options(v_queue, v_without < v_count, cardinality(array_remove(v_ends, null)) > 0);
  if v_queue.queue_max_depth > 0 and v_without > 0 then
    perform pgque._room(v_queue, v_without);
  end if;

  v_ids := array(select case when p then nextval(v_queue.queue_event_seq) end from unnest(v_plain) p);
  if v_without > 0 then
    insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_bytes, ev_headers, ev_expires, ev_extra1)
    select q.slot, m.id, v_now, v_txid, m.type, m.data, m.bytes, m.headers, m.ends, m.partition_key
    from (
      select q.queue_id * 3 + q.queue_cur_table as slot
      from pgque.queue q
      where q.queue_id = v_queue.queue_id and not q.queue_restored
      offset 0
    ) q, unnest(v_ids, p_types, p_data, p_bytes, p_headers, v_due, v_ends, p_partition_keys)
      m (id, type, data, bytes, headers, due, ends, partition_key)
    where m.id is not null and m.due is null;
    get diagnostics v_stored = row_count;
    insert into pgque.retry_queue (ev_retry_after, ev_queue, ev_owner, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_bytes, ev_headers, ev_expires, ev_extra1)
    select m.due, q.queue_id, 0, m.id, v_now, v_txid, m.type, m.data, m.bytes, m.headers, m.ends, m.partition_key
    from pgque.queue q, unnest(v_ids, p_types, p_data, p_bytes, p_headers, v_due, v_ends, p_partition_keys)
      m (id, type, data, bytes, headers, due, ends, partition_key)
    where q.queue_id = v_queue.queue_id and m.id is not null and m.due is not null;
    get diagnostics v_delayed = row_count;
    if v_stored + v_delayed < v_without then
      perform pgque._no_queue(v_queue.queue_name);   -- the queue was dropped meanwhile
    end if;
  end if;
  if v_without < v_count then
    perform pgque._lock_keys(v_queue.queue_id, p_keys);
    v_last := coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0);
    for v_n in 1..v_count loop
      continue when v_plain[v_n];
      v_ids[v_n] := pgque._send_keyed(v_queue, p_types[v_n], p_data[v_n], p_bytes[v_n], p_headers[v_n], p_keys[v_n], v_due[v_n], v_ends[v_n], p_partition_keys[v_n]);
    end loop;
  end if;
  -- Only now it is known which keys made a new message.  A delayed message counts even
  -- if no consumer has subscribed.
  if v_queue.queue_max_depth > 0 and (v_delayed > 0 or v_last < any (v_ids)) then
    perform pgque._room(v_queue, 0);
  end if;
  return v_ids;
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
  -- See _let_keys_be_said().
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
      perform pgque._let_go();
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
create or replace function pgque._let_keys_be_said(p_queue pgque.queue) returns void
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
        perform pgque._let_go();
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

-- Returns the query for the newest row of the key $1, and for the transaction that sent
-- its message; null: that row is no longer stored.
create or replace function pgque._newest_of_key_sql(p_queue_id int) returns text
language sql stable as $$
  select 'select l.ev_id, l.ev_owner, l.ev_retry, l.ev_time, l.ev_expires, f.ev_txid from (select e.* from ('
    || pg_catalog.string_agg('(select e.ev_id, e.ev_owner, e.ev_retry, e.ev_time, e.ev_expires from ' || l.rows
      || ' order by e.ev_key desc, e.ev_id desc, e.ev_retry desc limit 1)', ' union all ')
    || ') e order by e.ev_id desc, e.ev_retry desc limit 1) l left join lateral ('
    || pg_catalog.string_agg('select e.ev_txid from ' || l.rows || ' and e.ev_id = l.ev_id and e.ev_retry = 0', ' union all ')
    || ' limit 1) f on true'
  from (
    select pg_catalog.format('pgque.event_%s_%s e where e.ev_key = $1 and (e.ev_owner is null or e.ev_owner <= 0)', p_queue_id, n) as rows
    from pg_catalog.generate_series(0, 2) n
  ) l
$$;

-- Creates the function for that query, since a session keeps its plan.
create or replace function pgque._create_key_reader(p_queue_id int) returns void
language plpgsql as $$
begin
  perform pgque._compile(pg_catalog.format(
    'create or replace function pgque._key_%s(p_key text, out ev_id bigint, out ev_owner int, out ev_retry int, out ev_time timestamptz,'
    ' out ev_expires timestamptz, out sent_by xid8)'
    ' language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $body$'
    ' begin %s into ev_id, ev_owner, ev_retry, ev_time, ev_expires, sent_by; end $body$', p_queue_id, pgque._newest_of_key_sql(p_queue_id)));
end
$$;

-- Returns the newest row of a key.
create or replace function pgque._newest_of_key(
  p_queue_id int, p_key text,
  out ev_id bigint, out ev_owner int, out ev_retry int, out ev_time timestamptz, out ev_expires timestamptz, out sent_by xid8
)
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  execute 'select * from pgque._key_' || p_queue_id || '($1)'
  into ev_id, ev_owner, ev_retry, ev_time, ev_expires, sent_by using p_key;
end
$$;

-- Returns whether a consumer has passed a pending message that a transaction sent, or
-- reads it as part of a whole window.
create or replace function pgque._is_passed(p_queue_id int, p_id bigint, p_sent_by xid8) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return p_sent_by is null or exists (
    select
    from pgque.subscriber s
    cross join lateral pgque._next_from(pgque._position(s.sub_id)) p
    where s.sub_queue = p_queue_id and s.sub_main is null
      and not exists (select from pgque.retry_queue r where r.ev_owner + 0 = s.sub_id and r.ev_id = p_id)
      and (pg_catalog.pg_visible_in_snapshot(p_sent_by, p.pos_snapshot)
        or pg_catalog.pg_visible_in_snapshot(p_sent_by, p.pos_next_snapshot) and p_id <= p.pos_done_id));
end
$$;

-- The wrappers below have neither SET nor SECURITY DEFINER, so that they are
-- inlined into the calling statement and cost nothing.
create or replace function pgque.insert_event(
  queue_name text, ev_type text, ev_data text,
  ev_extra1 text, ev_extra2 text, ev_extra3 text, ev_extra4 text
) returns bigint
language sql as $$ select pgque._send($1, $2, $3, $4, $5, $6, $7, null, null) $$;
comment on function pgque.insert_event(text, text, text, text, text, text, text) is
  'PgQ''s name for send(): sends one message with the four extra texts of an event, and returns its id. Errors: PQ001 no such queue; PQ013 the '
  'queue is paused.';

create or replace function pgque.insert_event(queue_name text, ev_type text, ev_data text) returns bigint
language sql as $$ select pgque._send($1, $2, $3, null, null, null, null, null, null) $$;
comment on function pgque.insert_event(text, text, text) is
  'PgQ''s name for send(): sends one message, whose extra texts are NULL, and returns its id. Errors: PQ001 no such queue; PQ013 the queue is '
  'paused.';

create or replace function pgque.send(queue_name text, payload text) returns bigint
language sql as $$ select pgque._send($1, 'default', $2, null, null, null, null, null, null) $$;
comment on function pgque.send(text, text) is
  'Sends one message of type default and returns its id. The payload is kept byte for byte. Every consumer of the queue gets the message after this '
  'transaction commits and a tick follows. Errors: PQ001 no such queue; PQ003 the queue is full; PQ013 the queue is paused.';

create or replace function pgque.send(queue_name text, payload jsonb) returns bigint
language sql as $$ select pgque._send($1, 'default', $2::pg_catalog.text, null, null, null, null, null, null) $$;
comment on function pgque.send(text, jsonb) is
  'Sends one JSON value as a message of type default and returns its id. The payload is stored in canonical form. Errors: PQ001 no such queue; PQ003 the queue is full; '
  'PQ013 the queue is paused.';

create or replace function pgque.send(i_queue text, i_type text, i_payload text, i_partition_key text) returns bigint
language sql as $$ select pgque._send($1, $2, $3, $4, null, null, null, null, null) $$;
comment on function pgque.send(text, text, text, text) is
  'Earlier form of send(): sends one text with a type and a partition key, which is an option of send() now, and returns the message''s id.';

create or replace function pgque.send(i_queue text, i_type text, i_payload jsonb, i_partition_key text) returns bigint
language sql as $$ select pgque._send($1, $2, $3::pg_catalog.text, pgque._no_headers($1, $4), null, null, null, null, null) $$;
comment on function pgque.send(text, text, jsonb, text) is
  'Earlier form of send(): sends one JSON value with a type and a partition key, which is an option of send() now, and returns the message''s id. '
  'Errors: PQ005 the partition key begins with { and may be meant as headers; name the argument headers or partition_key.';

-- Returns a partition key that is no JSON object.  Headers in its place must not silently
-- become a partition key.
create or replace function pgque._no_headers(p_queue text, p_key text) returns text
language plpgsql immutable as $$
begin
  if pg_catalog.ltrim(p_key) like '{%' then
    perform pgque._fail('PQ005', pg_catalog.format('the fourth argument of send() to queue %I looks like headers', p_queue),
      'Name the argument: headers => ''{"trace": "4bf92f35"}'', or partition_key => ''{...}''.');
  end if;
  return p_key;
end
$$;

create or replace function pgque.send(
  queue_name text, type_name text, payload text, headers jsonb default null, key text default null, delay interval default null,
  deliver_at timestamptz default null, ttl interval default null, partition_key text default null
) returns bigint
language sql as $$
  select case
    when $5 is null and $6 is null and $7 is null and $8 is null then pgque._send($1, $2, $3, $9, null, null, null, $4, null)
    else pgque._send_as($1, $2, $3, null, $4, $5, $6, $7, $8, $9)
  end
$$;
comment on function pgque.send(text, text, text, jsonb, text, interval, timestamptz, interval, text) is
  'Sends one message with options and returns its id. headers: a JSON object that travels with the message. key: if a message with this key is '
  'pending (delivered to no consumer yet), its body and headers are replaced, and its id is returned. delay (from now) or deliver_at: the message '
  'is not delivered earlier. ttl: the message is not delivered later; 0 means that it never expires, NULL means the queue''s message_ttl. delay '
  'and ttl are at most 100 years. partition_key: kept in extra1, and the order key for a consumer with keyed_order. Errors: PQ001 no such queue; '
  'PQ003 the queue is full; PQ005 invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does not see a '
  'change to the key.';

create or replace function pgque.send(
  queue_name text, type_name text, payload jsonb, headers jsonb default null, key text default null, delay interval default null,
  deliver_at timestamptz default null, ttl interval default null, partition_key text default null
) returns bigint
language sql as $$
  select case
    when $5 is null and $6 is null and $7 is null and $8 is null then pgque._send($1, $2, $3::pg_catalog.text, $9, null, null, null, $4, null)
    else pgque._send_as($1, $2, $3::pg_catalog.text, null, $4, $5, $6, $7, $8, $9)
  end
$$;
comment on function pgque.send(text, text, jsonb, jsonb, text, interval, timestamptz, interval, text) is
  'Sends one JSON value as a message and returns its id. The payload is stored in canonical form. The options and the errors are those of a text.';

create or replace function pgque.send(
  queue_name text, type_name text, payload bytea, headers jsonb default null, key text default null, delay interval default null,
  deliver_at timestamptz default null, ttl interval default null, partition_key text default null
) returns bigint
language sql as $$ select pgque._send_as($1, $2, null, $3, $4, $5, $6, $7, $8, $9) $$;
comment on function pgque.send(text, text, bytea, jsonb, text, interval, timestamptz, interval, text) is
  'Sends bytes as one message and returns its id. Consumers get the bytes in payload_bytes, and payload is NULL. The options and the errors are '
  'those of a text.';

-- Appends one event for each element with one statement, and returns ids in input
-- order.  Taking the ids first is faster than returning them from the insert.
create or replace function pgque._send_many(queue_name text, type_name text, payloads text[], caller pgque.caller default current_user) returns bigint[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_txid  xid8;
  v_id    int;
  v_seq   regclass;
  v_ids   bigint[];
begin
  if pgque._no_payloads($1, cardinality($3)) then
    return '{}';
  end if;
  v_txid := pgque._sender_xid();
  select q.queue_id, q.queue_event_seq into v_id, v_seq
  from pgque.queue q
  where q.queue_name = $1 collate "default" and q.queue_open
    and case
      when caller = current_user collate "C" or pg_has_role(caller, 'pgque_writer', 'usage') or pgque._may(caller, 'produce', q.queue_id)
        then q.queue_max_depth = 0 or pgque._room(q, cardinality($3))
    end;
  if found then
    v_ids := array(select nextval(v_seq) from generate_series(1, cardinality($3)));
    insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_expires)
    select q.slot, p.id, q.at, v_txid, $2, p.payload, q.ends
    from (
      select q.queue_id * 3 + q.queue_cur_table as slot, pgque.clock() as at, pgque._expires(q) as ends
      from pgque.queue q
      where q.queue_id = v_id and q.queue_open
      offset 0
    ) q, unnest($3, v_ids) p (payload, id);
    if found then
      return v_ids;
    end if;
  end if;
  return pgque._send_many(pgque._need_open($1, caller), $2, $3);
end
$$;

-- Returns whether there is nothing to send; PQ005 for a null array.
create or replace function pgque._no_payloads(p_queue text, p_count int) returns boolean
language plpgsql as $$
begin
  if p_count is null then
    perform pgque._fail('PQ005', pg_catalog.format('payloads for queue %s must not be null', coalesce(pg_catalog.quote_ident(p_queue), 'null')),
      'Pass an array; an empty one sends nothing.');
  end if;
  return p_count = 0;
end
$$;

create or replace function pgque.send_batch(queue_name text, payloads text[]) returns bigint[]
language sql as $$ select pgque._send_many($1, 'default', $2) $$;
comment on function pgque.send_batch(text, text[]) is
  'Sends many texts of type default without options, all or none, and returns their ids in the order of payloads. Errors: PQ001 no such queue; '
  'PQ003 the queue is full; PQ005 payloads is NULL; PQ013 the queue is paused.';

create or replace function pgque.send_batch(queue_name text, payloads jsonb[]) returns bigint[]
language sql as $$ select pgque._send_many($1, 'default', $2::pg_catalog.text[]) $$;
comment on function pgque.send_batch(text, jsonb[]) is
  'Sends many JSON values of type default without options, all or none, and returns their ids in the order of payloads. Errors: PQ001 no such '
  'queue; PQ003 the queue is full; PQ005 payloads is NULL; PQ013 the queue is paused.';

create or replace function pgque.send_batch(
  queue_name text, type_name text, payloads text[], headers jsonb[] default null, keys text[] default null, delays interval[] default null,
  deliver_ats timestamptz[] default null, ttls interval[] default null, partition_keys text[] default null
) returns bigint[]
language sql as $$
  select case
    when $4 is null and $5 is null and $6 is null and $7 is null and $8 is null and $9 is null then pgque._send_many($1, $2, $3)
    when pgque._no_payloads($1, pg_catalog.cardinality($3)) then '{}'
    else pgque._send_all($1, $2, $3, null, $4, $5, $6, $7, $8, $9)
  end
$$;
comment on function pgque.send_batch(text, text, text[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'Sends many texts, all or none, and returns their ids in the order of payloads. Each option is an array as long as payloads, or NULL; their '
  'meaning is that of send(). Errors: those of send(); PQ005 also for an array of another length.';

create or replace function pgque.send_batch(
  queue_name text, type_name text, payloads jsonb[], headers jsonb[] default null, keys text[] default null, delays interval[] default null,
  deliver_ats timestamptz[] default null, ttls interval[] default null, partition_keys text[] default null
) returns bigint[]
language sql as $$
  select case
    when $4 is null and $5 is null and $6 is null and $7 is null and $8 is null and $9 is null then pgque._send_many($1, $2, $3::pg_catalog.text[])
    when pgque._no_payloads($1, pg_catalog.cardinality($3)) then '{}'
    else pgque._send_all($1, $2, $3::pg_catalog.text[], null, $4, $5, $6, $7, $8, $9)
  end
$$;
comment on function pgque.send_batch(text, text, jsonb[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'Sends many JSON values, all or none, and returns their ids in the order of payloads. The options and the errors are those of texts.';

create or replace function pgque.send_batch(
  queue_name text, type_name text, payloads bytea[], headers jsonb[] default null, keys text[] default null, delays interval[] default null,
  deliver_ats timestamptz[] default null, ttls interval[] default null, partition_keys text[] default null
) returns bigint[]
language sql as $$
  select case when pgque._no_payloads($1, pg_catalog.cardinality($3)) then '{}' else pgque._send_all($1, $2, null, $3, $4, $5, $6, $7, $8, $9) end
$$;
comment on function pgque.send_batch(text, text, bytea[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'Sends many messages of bytes, all or none, and returns their ids in the order of payloads. The options and the errors are those of texts.';

-- Of two senders with one key, the second waits.  If its snapshot does not show the
-- message of the first, it gets 40001.
create or replace function pgque.send_idem(
  queue text, type text, payload text, idem_key text,
  ttl interval default '1 hour', partition_key text default null, caller pgque.caller default current_user,
  out event_id bigint, out deduped boolean
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'produce');
  v_last   pgque.idempotency;
  v_leaf   int;
begin
  if $4 is null or $4 = '' or octet_length($4) > 1000 or $5 is null or $5 <= '0' or $5 > '100 years' then
    perform pgque._fail('PQ005', format('send_idem to queue %I needs a key of 1 to 1000 bytes and a positive ttl of at most 100 years', v_queue.queue_name),
      'Pass such a key and ttl. To send without a key, use pgque.send().');
  end if;
  perform pg_advisory_xact_lock(hashtext('pgque.idem ' || v_queue.queue_id), hashtext($4));
  v_leaf := pgque._idem_leaf();
  select k.* into v_last
  from pgque.idempotency k
  where k.idem_queue = v_queue.queue_id and k.idem_key = $4
  order by k.idem_n desc
  limit 1;
  if v_last.idem_expires > pgque.clock() then
    event_id := v_last.idem_ev_id;
    deduped := true;
    return;
  end if;
  event_id := pgque._send(v_queue.queue_name, $2, $3, $6, null, null, null, null, null);
  deduped := false;
  insert into pgque.idempotency (idem_queue, idem_key, idem_n, idem_ev_id, idem_expires, leaf)
  select v_queue.queue_id, $4, coalesce(v_last.idem_n, 0) + 1, event_id, pgque.clock() + $5, l.leaf
  from unnest(pgque._leaves_for(v_leaf)) l (leaf);
exception
  when unique_violation then
    perform pgque._fail('serialization_failure', format('the idempotency key %L of queue %I was used since this transaction began', $4, v_queue.queue_name),
      'Retry the transaction.');
end
$$;
comment on function pgque.send_idem(text, text, text, text, interval, text, pgque.caller) is
  'Sends one message unless one with the same idem_key was sent to the queue within its ttl. Returns event_id and deduped: if deduped is true, '
  'nothing was sent and event_id is the earlier message''s id. Two senders of one key wait for each other. partition_key is kept in extra1. Errors: '
  'PQ001 no such queue; PQ005 no key, or ttl is not positive or above 100 years; PQ013 the queue is paused.';

-- Returns the leaf of the idempotency keys that is written; see _journal_leaf().
create or replace function pgque._idem_leaf() returns int
language plpgsql as $$
declare
  v_leaf  int;
begin
  perform pgque._journal_leaf();
  select j.journal_idem_cur into v_leaf from pgque.journal j where j.journal_id = 1;
  return v_leaf;
end
$$;

create or replace function pgque.send_idem(
  queue text, type text, payload jsonb, idem_key text,
  ttl interval default '1 hour', partition_key text default null,
  out event_id bigint, out deduped boolean
)
language sql as $$ select * from pgque.send_idem($1, $2, $3::pg_catalog.text, $4, $5, $6) $$;
comment on function pgque.send_idem(text, text, jsonb, text, interval, text) is
  'Sends one JSON value unless a message with the same idem_key was sent to the queue within its ttl. The result, the options and the errors are '
  'those of a text.';

create or replace function pgque.current_event_table(queue_name text) returns text
language sql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
  select format('pgque.event_%s_%s', q.queue_id, q.queue_cur_table) from pgque._queue($1) q
$$;
comment on function pgque.current_event_table(text) is
  'Returns the table that the queue''s messages go to now, schema-qualified, for COPY by the owner. With its column defaults, a row of ev_type and '
  'ev_data is a complete event. Call it again in each transaction: rotation changes the table. If an ev_id was taken in an earlier transaction, a '
  'tick may cover its row up to a minute later. Errors: PQ001 no such queue.';
