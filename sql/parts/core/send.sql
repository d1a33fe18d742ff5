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
      pg_catalog.format('Resume it as an administrator: select pgque.resume(%L);', v_queue.queue_name));
  end if;
  perform pgque._rebase(v_queue.queue_id);
  return v_queue.queue_name;
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

create or replace function pgque.send(queue_name text, payload text) returns bigint
language sql as $$ select pgque._send($1, 'default', $2, null, null, null, null, null, null) $$;
comment on function pgque.send(text, text) is
  'Sends one text as a message of type default, kept byte for byte, and returns its id. Every consumer of the queue gets the message after this '
  'transaction commits and a tick follows. Errors: PQ001 no such queue; PQ003 the queue is full; PQ013 the queue is paused.';

create or replace function pgque.send(queue_name text, payload jsonb) returns bigint
language sql as $$ select pgque._send($1, 'default', $2::pg_catalog.text, null, null, null, null, null, null) $$;
comment on function pgque.send(text, jsonb) is
  'Sends one JSON value as a message of type default, stored in canonical form, and returns its id. Every consumer of the queue gets the message '
  'after this transaction commits and a tick follows. Errors: PQ001 no such queue; PQ003 the queue is full; PQ013 the queue is paused.';

create or replace function pgque.send(i_queue text, i_type text, i_payload text, i_partition_key text) returns bigint
language sql as $$ select pgque._send($1, $2, $3, $4, null, null, null, null, null) $$;
comment on function pgque.send(text, text, text, text) is
  'Earlier form of send(): sends one text with a type and a partition key, which is an option of send() now, and returns the message''s id. Errors: '
  'PQ001 no such queue; PQ003 the queue is full; PQ005 the partition key begins with { and may be meant as headers; name the argument headers or '
  'partition_key; PQ013 the queue is paused.';

create or replace function pgque.send(i_queue text, i_type text, i_payload jsonb, i_partition_key text) returns bigint
language sql as $$ select pgque._send($1, $2, $3::pg_catalog.text, pgque._no_headers($1, $4), null, null, null, null, null) $$;
comment on function pgque.send(text, text, jsonb, text) is
  'Earlier form of send(): sends one JSON value with a type and a partition key, which is an option of send() now, and returns the message''s id. '
  'Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 the partition key begins with { and may be meant as headers; name the argument '
  'headers or partition_key; PQ013 the queue is paused.';

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

create or replace function pgque.send(
  queue_name text, type_name text, payload bytea, headers jsonb default null, key text default null, delay interval default null,
  deliver_at timestamptz default null, ttl interval default null, partition_key text default null
) returns bigint
language sql as $$ select pgque._send_as($1, $2, null, $3, $4, $5, $6, $7, $8, $9) $$;

-- The comments differ in the payload only.
do $$
declare
  v_comment  text[];
  v_options  constant text :=
    'headers: a JSON object that travels with the message. key: if a message with this key is pending (delivered to no consumer yet), its type, body, '
    'headers and expiry become those of this call, its time stays, and its id is returned. delay (from now) or deliver_at: the message is not delivered earlier. ttl: the message is not '
    'delivered later; 0 means that it never expires, NULL means the queue''s message_ttl. delay and ttl are at most 100 years. partition_key: kept '
    'in extra1; for a message without key, it is also the key that key_concurrency counts. Errors: PQ001 no such queue; PQ003 the queue is full; '
    'PQ005 invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does not see a change to the key.';
begin
  foreach v_comment slice 1 in array array[
    ['text', 'Sends one text as a message, kept byte for byte, and returns its id. '],
    ['jsonb', 'Sends one JSON value as a message, stored in canonical form, and returns its id. '],
    ['bytea', 'Sends bytes as one message and returns its id. Consumers get the bytes in payload_bytes, and payload is NULL. ']]
  loop
    execute format('comment on function pgque.send(text, text, %s, jsonb, text, interval, timestamptz, interval, text) is %L',
      v_comment[1], v_comment[2] || v_options);
  end loop;
end
$$;

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
  'PQ003 the queue is full; PQ005 payloads is NULL, or more than max_depth; PQ013 the queue is paused.';

create or replace function pgque.send_batch(queue_name text, payloads jsonb[]) returns bigint[]
language sql as $$ select pgque._send_many($1, 'default', $2::pg_catalog.text[]) $$;
comment on function pgque.send_batch(text, jsonb[]) is
  'Sends many JSON values of type default without options, all or none, and returns their ids in the order of payloads. Errors: PQ001 no such '
  'queue; PQ003 the queue is full; PQ005 payloads is NULL, or more than max_depth; PQ013 the queue is paused.';

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
  'Sends many texts, all or none, and returns their ids in the order of payloads. Each option is an array as long as payloads, or NULL, and an '
  'element means what the option of send() means. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 payloads is NULL or more than '
  'max_depth, an array of another length, or an invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does '
  'not see a change to the key.';

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
  'Sends many JSON values, all or none, and returns their ids in the order of payloads. Each option is an array as long as payloads, or NULL, and an '
  'element means what the option of send() means. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 payloads is NULL or more than '
  'max_depth, an array of another length, or an invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does '
  'not see a change to the key.';

create or replace function pgque.send_batch(
  queue_name text, type_name text, payloads bytea[], headers jsonb[] default null, keys text[] default null, delays interval[] default null,
  deliver_ats timestamptz[] default null, ttls interval[] default null, partition_keys text[] default null
) returns bigint[]
language sql as $$
  select case when pgque._no_payloads($1, pg_catalog.cardinality($3)) then '{}' else pgque._send_all($1, $2, null, $3, $4, $5, $6, $7, $8, $9) end
$$;
comment on function pgque.send_batch(text, text, bytea[], jsonb[], text[], interval[], timestamptz[], interval[], text[]) is
  'Sends many messages of bytes, all or none, and returns their ids in the order of payloads. Each option is an array as long as payloads, or NULL, '
  'and an element means what the option of send() means. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 payloads is NULL or more than '
  'max_depth, an array of another length, or an invalid option; PQ013 the queue is paused; 40001 if a transaction that is not READ COMMITTED does '
  'not see a change to the key.';
