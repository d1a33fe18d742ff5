-- ---------------------------------------------------------------------------
-- send: append events
-- ---------------------------------------------------------------------------

-- Headers as they are stored: a JSON object, or PQ005.
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
  raise exception using
    errcode = 'PQ005',
    message = pg_catalog.format('headers for queue %I must be a JSON object', p_queue),
    detail = pg_catalog.left(p_headers, 200),
    hint = 'For example {"trace": "4bf92f35"}.';
end
$$;

-- Appends one event and returns its id.  The transaction's id is taken before
-- the queue row is read, and one statement reads the row and stores the event
-- (see sql/README.md, "Writers and rotation").
create or replace function pgque._send(
  p_queue text, p_type text, p_data text,
  p_extra1 text, p_extra2 text, p_extra3 text, p_extra4 text, p_headers jsonb, p_bytes bytea
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_txid  xid8 := pg_current_xact_id();
  v_id    bigint;
begin
  if p_headers is not null then
    perform pgque._headers(p_queue, p_headers);
  end if;
  if p_bytes is not null and p_data is not null then
    raise exception using
      errcode = 'PQ005',
      message = format('a message for queue %s has both text and bytes', coalesce(quote_ident(p_queue), 'null')),
      hint = 'Text goes into payload, bytes into payload_bytes; the other one is null.';
  end if;
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data,
    ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_bytes)
  select q.queue_id * 3 + q.queue_cur_table, nextval(q.queue_event_seq), pgque.clock(), v_txid, p_type, p_data,
    p_extra1, p_extra2, p_extra3, p_extra4, p_headers, p_bytes
  from pgque.queue q
  where q.queue_name = p_queue and q.queue_open
  returning event.ev_id into v_id;
  if v_id is null then
    perform pgque._open_queue(p_queue);
    return pgque._send(p_queue, p_type, p_data, p_extra1, p_extra2, p_extra3, p_extra4, p_headers, p_bytes);
  end if;
  return v_id;
end
$$;

-- Says why a queue takes no events, or, when it came out of a dump, makes it
-- take them.
create or replace function pgque._open_queue(p_queue text) returns void
language plpgsql as $$
declare
  v_queue  pgque.queue := pgque._queue(p_queue);
begin
  if v_queue.queue_paused then
    raise exception using
      errcode = 'PQ013',
      message = pg_catalog.format('queue is paused: %I', v_queue.queue_name),
      hint = 'An administrator opens it again with pgque.resume(name).';
  end if;
  perform pgque._rebase(v_queue.queue_id);
end
$$;

-- The wrappers below have neither SET nor SECURITY DEFINER, so that they are
-- inlined into the calling statement and cost nothing.
create or replace function pgque.insert_event(
  queue_name text, ev_type text, ev_data text,
  ev_extra1 text, ev_extra2 text, ev_extra3 text, ev_extra4 text
) returns bigint
language sql as $$ select pgque._send($1, $2, $3, $4, $5, $6, $7, null, null) $$;

create or replace function pgque.insert_event(queue_name text, ev_type text, ev_data text) returns bigint
language sql as $$ select pgque._send($1, $2, $3, null, null, null, null, null, null) $$;

create or replace function pgque.send(queue_name text, payload text) returns bigint
language sql as $$ select pgque._send($1, 'default', $2, null, null, null, null, null, null) $$;

create or replace function pgque.send(queue_name text, payload jsonb) returns bigint
language sql as $$ select pgque._send($1, 'default', $2::pg_catalog.text, null, null, null, null, null, null) $$;

create or replace function pgque.send(queue_name text, type_name text, payload text) returns bigint
language sql as $$ select pgque._send($1, $2, $3, null, null, null, null, null, null) $$;

create or replace function pgque.send(queue_name text, type_name text, payload jsonb) returns bigint
language sql as $$ select pgque._send($1, $2, $3::pg_catalog.text, null, null, null, null, null, null) $$;

create or replace function pgque.send(i_queue text, i_type text, i_payload text, i_partition_key text) returns bigint
language sql as $$ select pgque._send($1, $2, $3, $4, null, null, null, null, null) $$;

-- With headers, a JSON object that travels with the message; and bytes.
create or replace function pgque.send(queue_name text, type_name text, payload text, headers jsonb) returns bigint
language sql as $$ select pgque._send($1, $2, $3, null, null, null, null, $4, null) $$;

create or replace function pgque.send(queue_name text, type_name text, payload jsonb, headers jsonb) returns bigint
language sql as $$ select pgque._send($1, $2, $3::pg_catalog.text, null, null, null, null, $4, null) $$;

create or replace function pgque.send(queue_name text, type_name text, payload bytea, headers jsonb default null) returns bigint
language sql as $$ select pgque._send($1, $2, null, null, null, null, null, $4, $3) $$;

-- Appends one event per element with one statement; ids in input order.  To
-- take the ids first is faster than to have them returned.
create or replace function pgque.send_batch(queue_name text, type_name text, payloads text[]) returns bigint[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_txid  xid8;
  v_id    int;
  v_seq   regclass;
  v_ids   bigint[];
begin
  if $3 is null then
    raise exception using
      errcode = 'PQ005',
      message = format('payloads for queue %I must not be null', $1),
      hint = 'Pass an array; an empty one sends nothing.';
  elsif cardinality($3) = 0 then
    return '{}';
  end if;
  v_txid := pg_current_xact_id();
  select q.queue_id, q.queue_event_seq into v_id, v_seq from pgque.queue q where q.queue_name = $1 and q.queue_open;
  if found then
    v_ids := array(select nextval(v_seq) from generate_series(1, cardinality($3)));
    insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data)
    select q.slot, p.id, q.at, v_txid, $2, p.payload
    from (
      select q.queue_id * 3 + q.queue_cur_table as slot, pgque.clock() as at
      from pgque.queue q
      where q.queue_id = v_id and q.queue_open
      offset 0
    ) q, unnest($3, v_ids) p (payload, id);
    if found then
      return v_ids;
    end if;
  end if;
  perform pgque._open_queue($1);
  return pgque.send_batch($1, $2, $3);
end
$$;

create or replace function pgque.send_batch(queue_name text, payloads text[]) returns bigint[]
language sql as $$ select pgque.send_batch($1, 'default', $2) $$;

create or replace function pgque.send_batch(queue_name text, type_name text, payloads jsonb[]) returns bigint[]
language sql as $$ select pgque.send_batch($1, $2, $3::pg_catalog.text[]) $$;

create or replace function pgque.send_batch(queue_name text, payloads jsonb[]) returns bigint[]
language sql as $$ select pgque.send_batch($1, 'default', $2::pg_catalog.text[]) $$;

-- Sends unless the same key was sent within ttl; then the first id comes back.
-- The primary key makes two senders of one key meet; the second waits.
create or replace function pgque.send_idem(
  queue text, type text, payload text, idem_key text,
  ttl interval default '1 hour', partition_key text default null,
  out event_id bigint, out deduped boolean
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp as $$
declare
  v_queue  pgque.queue := pgque._queue($1);
  v_txid   xid8 := pg_current_xact_id();
begin
  if $4 is null or $5 is null or $5 <= '0' then
    raise exception using
      errcode = 'PQ005',
      message = format('send_idem to queue %I needs a key and a positive ttl', $1),
      hint = 'Without a key use pgque.send().';
  end if;
  if not v_queue.queue_open then
    perform pgque._open_queue($1);
  end if;
  loop
    select k.idem_ev_id into event_id
    from pgque.idempotency_key k
    where k.idem_queue = v_queue.queue_id and k.idem_key = $4 and k.idem_expires > pgque.clock();
    if found then
      deduped := true;
      return;
    end if;
    insert into pgque.idempotency_key as k (idem_queue, idem_key, idem_ev_id, idem_expires)
    values (v_queue.queue_id, $4, nextval(v_queue.queue_event_seq), pgque.clock() + $5)
    on conflict on constraint idempotency_key_pkey do update
    set idem_ev_id = excluded.idem_ev_id, idem_expires = excluded.idem_expires
    where k.idem_expires <= pgque.clock()
    returning k.idem_ev_id into event_id;
    exit when found;
    -- Another sender was first; look what it sent.
  end loop;
  deduped := false;
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1)
  select q.queue_id * 3 + q.queue_cur_table, event_id, pgque.clock(), v_txid, $2, $3, $6
  from pgque.queue q
  where q.queue_id = v_queue.queue_id and not q.queue_restored;
end
$$;

create or replace function pgque.send_idem(
  queue text, type text, payload jsonb, idem_key text,
  ttl interval default '1 hour', partition_key text default null,
  out event_id bigint, out deduped boolean
)
language sql as $$ select * from pgque.send_idem($1, $2, $3::pg_catalog.text, $4, $5, $6) $$;

-- The table that events of the queue go to now.  For COPY by the owner; its
-- columns have the defaults that make a plain INSERT of ev_type and ev_data an
-- event.
create or replace function pgque.current_event_table(queue_name text) returns text
language sql security definer set search_path = pg_catalog, pgque, pg_temp as $$
  select format('pgque.event_%s_%s', q.queue_id, q.queue_cur_table) from pgque._queue($1) q
$$;
