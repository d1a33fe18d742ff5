-- ---------------------------------------------------------------------------
-- sink: INSERT, COPY and Spark send
-- ---------------------------------------------------------------------------

-- Two views that turn rows into messages.  They are views because a writer that
-- overwrites would drop a table and create it again.  Their columns are text where a
-- driver has strings.  sink has the options of send() by a trigger; sink_bulk takes
-- plain messages by a rule, which is faster.
-- The column queue of both views has a domain type.  Under session_replication_role = replica,
-- neither rules nor triggers of a view fire, and a view cannot have triggers that
-- always fire.  So a row would be lost silently: the check of the domain refuses it.
do $$
begin
  if to_regtype('pgque.sink_queue') is null then
    create domain pgque.sink_queue as text
      constraint session_replication_role_is_not_replica check (pg_catalog.current_setting('session_replication_role') <> 'replica');
    revoke usage on type pgque.sink_queue from public;
  end if;
  create or replace view pgque.sink as
    select null::pgque.sink_queue as queue, null::text as type, null::text as payload, null::text as headers, null::bytea as payload_bytes,
      null::text as partition_key, null::text as sink_id, null::bigint as epoch, null::int as part, null::int as parts,
      null::text as key, null::text as delay, null::timestamptz as deliver_at, null::text as ttl
    where false;
  create or replace view pgque.sink_bulk as
    select null::pgque.sink_queue as queue, null::text as type, null::text as payload, null::text as headers
    where false;
end
$$;
comment on view pgque.sink is
  'Sends one message for each row that INSERT or COPY puts into it. Columns: queue, type (NULL: default), payload or payload_bytes, headers (text of '
  'a JSON object), partition_key; key, delay, deliver_at, ttl as in send(). delay and ttl are texts of intervals; a number is seconds. With sink_id, '
  'epoch and part, rows of a part are left out if another transaction has already written that part of the epoch. parts, if given, must be the same '
  'each time. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 invalid option, or epoch, part or parts without sink_id; PQ013 the queue '
  'is paused; PQ016 the epoch is older than the sink''s newest or was written with other parts, or a part comes in more than one transaction; 23514 '
  'under session_replication_role = replica, where the view cannot send.';
comment on view pgque.sink_bulk is
  'Sends one plain message for each row that INSERT or COPY puts into it, by a rewrite rule: about twice as fast as pgque.sink. Columns: queue, type '
  '(NULL: default), payload, headers (text of a JSON object).';

-- Returns the table for a message of this queue, for a statement that found the queue
-- closed or not at all.  Raises PQ001 or PQ013, or repairs a queue that came out of a
-- dump.  A queue that was created after the statement began does not exist for it yet.
create or replace function pgque._open_slot(p_queue text, p_seen boolean) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  if not p_seen then
    perform pgque._no_queue(p_queue);
  end if;
  perform pgque._need_open(p_queue);
  return (select q.queue_id * 3 + q.queue_cur_table from pgque.queue q where q.queue_name = p_queue);
end
$$;

-- Returns whether a queue with max_depth has room for one more row of a statement;
-- PQ003 if not.  A random number stands for the statement.  The id up to which there is
-- room is computed once, and again when other sessions have used these ids.
create or replace function pgque._sink_room(p_queue_id int, p_statement uuid) returns boolean
language plpgsql strict security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_name   text := 'pgque.room_' || p_queue_id;
  v_known  text := current_setting(v_name, true);
  v_queue  pgque.queue;
  v_last   bigint;
begin
  select q.* into v_queue from pgque.queue q where q.queue_id = p_queue_id;
  if not found then
    return false;
  end if;
  v_last := coalesce(pg_sequence_last_value(v_queue.queue_event_seq), 0);
  if (starts_with(v_known, p_statement::text) and v_last < substr(v_known, 37)::bigint) is not true then
    perform set_config(v_name, p_statement::text || (v_last + pgque._room_left(v_queue, 1)), true);
  end if;
  return true;
end
$$;

-- The rule has no condition: with one, the server would run the source of the rows
-- twice.  Each column of a row is named once, since an expression in VALUES replaces
-- its name, and would run as often as it is named.
-- The lookup is lateral, so that rows keep their order.  It is cached for the rows of
-- one queue, so the limit is checked outside of it.  A row without an open queue is
-- left to _open_slot(), or it would be lost silently.  The functions run with the
-- rights of the inserting role.  The transaction has its id before it draws that of a
-- message, see _span_xids().
create or replace rule sink_bulk_send as on insert to pgque.sink_bulk do instead
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_headers, ev_expires)
  select coalesce(case when q.limited is null or pgque._sink_room(q.limited, (select pg_catalog.gen_random_uuid())) then q.slot end,
      pgque._open_slot(n.queue, q.event_seq is not null)),
    case when pg_catalog.pg_current_xact_id() is not null then pg_catalog.nextval(q.event_seq) end, pgque.clock(), pg_catalog.pg_current_xact_id(),
    coalesce(n.type, 'default'), n.payload, pgque._headers(n.queue, n.headers), q.ends
  from (select new.queue, new.type, new.payload, new.headers offset 0) n
  left join lateral (
    select case when q.queue_open then q.queue_id * 3 + q.queue_cur_table end as slot, q.queue_event_seq as event_seq,
      case when q.queue_max_depth > 0 then q.queue_id end as limited,
      case when q.queue_message_ttl > '0' then pgque.clock() + q.queue_message_ttl end as ends
    from pgque.queue q
    where q.queue_name = n.queue
    offset 0
  ) q on true;

-- COPY ignores rules and fires triggers.
create or replace function pgque._sink_bulk_row() returns trigger
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._send(new.queue, coalesce(new.type, 'default'), new.payload, null, null, null, null, pgque._headers(new.queue, new.headers), null);
  return new;
end
$$;

-- Returns a text of a sink as an interval, or raises PQ005.
create or replace function pgque._sink_interval(p_queue text, p_column text, p_text text) returns interval
language plpgsql strict stable set search_path = pg_catalog, pgque, pg_temp as $$
begin
  return p_text::interval;
exception
  when data_exception then
    perform pgque._fail('PQ005', format('the %s of a message for queue %I is not an interval', p_column, p_queue),
      'Pass an interval such as 30 (seconds) or ''1 hour 30 minutes''.', left(p_text, 200));
end
$$;

-- Sends one row of sink, unless it belongs to a part of an epoch that another
-- transaction wrote.  Rows with options are rare.  Others are stored here, which is
-- faster.  A row without an open queue with room is left to _send().
create or replace function pgque._sink_row() returns trigger
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_txid  xid8 := pg_current_xact_id();
begin
  if num_nonnulls(new.sink_id, new.epoch, new.part, new.parts, new.payload_bytes, new.key, new.delay, new.deliver_at, new.ttl) > 0 then
    if new.sink_id is not null then
      if not pgque._claim_part(new.sink_id, new.epoch, new.part, new.parts) then
        return null;
      end if;
    elsif num_nonnulls(new.epoch, new.part, new.parts) > 0 then
      -- Without the name of its sink a replay would be sent twice.
      perform pgque._fail('PQ005', format('epoch %s, part %s for queue %s has no sink_id', coalesce(new.epoch::text, 'null'),
          coalesce(new.part::text, 'null'), coalesce(quote_ident(new.queue), 'null')),
        'Set sink_id too. For messages that are not replayed, leave out sink_id, epoch, part and parts.');
    end if;
    if new.payload is not null and new.payload_bytes is not null then
      perform pgque._send(new.queue, new.type, new.payload, null, null, null, null, null, new.payload_bytes);
    end if;
    if num_nonnulls(new.key, new.delay, new.deliver_at, new.ttl) > 0 then
      perform pgque._send_as(new.queue, coalesce(new.type, 'default'), new.payload, new.payload_bytes, pgque._headers(new.queue, new.headers),
        new.key, pgque._sink_interval(new.queue, 'delay', new.delay), new.deliver_at, pgque._sink_interval(new.queue, 'ttl', new.ttl),
        new.partition_key);
      return new;
    end if;
  end if;
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_headers, ev_bytes, ev_expires)
  select q.queue_id * 3 + q.queue_cur_table, nextval(q.queue_event_seq), pgque.clock(), v_txid, coalesce(new.type, 'default'),
    new.payload, new.partition_key, pgque._headers(new.queue, new.headers), new.payload_bytes,
    pgque._expires(q)
  from pgque.queue q
  where q.queue_name = new.queue and q.queue_open and (q.queue_max_depth = 0 or pgque._room(q, 1));
  if not found then
    perform pgque._send(new.queue, coalesce(new.type, 'default'), new.payload, new.partition_key, null, null, null,
      pgque._headers(new.queue, new.headers), new.payload_bytes);
  end if;
  return new;
end
$$;

create or replace trigger sink_row instead of insert on pgque.sink
  for each row execute function pgque._sink_row();
create or replace trigger sink_bulk_row instead of insert on pgque.sink_bulk
  for each row execute function pgque._sink_bulk_row();

-- Refuses an epoch with PQ016.
create or replace function pgque._refuse_epoch(p_sink text, p_epoch bigint, p_why text, p_hint text) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ016', pg_catalog.format('epoch %s of sink %s: %s', coalesce(p_epoch::text, 'null'), coalesce(pg_catalog.quote_ident(p_sink), 'null'), p_why),
    p_hint);
end
$$;

-- Checks the name of an epoch and refuses one that is older than the sink's newest: it
-- is no replay, whose rows may be left out.
create or replace function pgque._check_epoch(p_sink text, p_epoch bigint) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_newest  bigint;
begin
  if coalesce(p_sink, '') = '' or pg_catalog.octet_length(p_sink) > 200 or p_sink ~ '[[:cntrl:]]' or p_epoch < 0 then
    perform pgque._fail('PQ005', pg_catalog.format('sink_id %L, epoch %s do not name an epoch', pg_catalog.left(p_sink, 200), coalesce(p_epoch::text, 'null')),
      'Pass a sink_id of 1 to 200 printable characters, and an epoch from 0.');
  end if;
  v_newest := (select max(e.epoch) from pgque.sink_epoch e where e.sink_id = p_sink);
  if v_newest > p_epoch then
    perform pgque._refuse_epoch(p_sink, p_epoch, pg_catalog.format('it is older than the newest epoch %s', v_newest),
      'Give the new query another sink_id. Epochs start from 0 again when a checkpoint is deleted.');
  end if;
end
$$;

-- Locks a part of an epoch until the transaction ends; the whole and its list of
-- servers have one lock.
create or replace function pgque._lock_epoch(p_sink text, p_epoch bigint, p_part int) returns void
language plpgsql as $$
begin
  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgque.sink'),
    pg_catalog.hashtext(pg_catalog.concat_ws(' ', p_epoch, greatest(p_part, -1), p_sink)));
end
$$;

-- Stores a part of an epoch if it is not stored yet, and returns the stored row.  Part
-- -1 is the whole epoch, part -2 the list of servers that it is spread over.  Sessions
-- that store the same part wait for each other.  A snapshot that is older than the
-- stored row gets 40001, in whichever leaf the row is.
create or replace function pgque._claim_epoch(
  p_sink text, p_epoch bigint, p_part int, p_parts int, p_once boolean, p_servers text[] default null, out claim pgque.sink_epoch, out is_new boolean
)
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_leaf          int;
  v_other         text;
begin
  if not p_once then
    perform pgque._lock_epoch(p_sink, p_epoch, p_part);
  end if;
  -- Takes the share lock of an old snapshot: 40001 if the leaves rotated since, and
  -- older epochs may have been deleted.
  perform pgque._journal_leaf();
  perform pgque._check_epoch(p_sink, p_epoch);
  select case when e.part = -1 or p_part = -1 then 'in another way' else pg_catalog.format('with %s parts and comes with %s',
    coalesce(e.parts::text, 'any number of'), coalesce(p_parts::text, 'any number')) end
  into v_other
  from pgque.sink_epoch e
  where e.sink_id = p_sink and e.epoch = p_epoch and p_part > -2 and e.part > -2 and (e.parts is distinct from p_parts or (e.part = -1) <> (p_part = -1))
  limit 1;
  if found then
    perform pgque._refuse_epoch(p_sink, p_epoch, 'it was written ' || v_other,
      'Call repartition() before the write, since a replay must have the partitions of the first run. Or use format("pgque"), which works with any partitions.');
  end if;
  select e.* into claim
  from pgque.sink_epoch e
  where e.sink_id = p_sink and e.epoch = p_epoch and e.part = p_part;
  is_new := not found;
  if not is_new then
    return;
  end if;
  v_leaf := coalesce((select j.journal_epoch_cur from pgque.journal j), 0);
  with new as (
    insert into pgque.sink_epoch (sink_id, epoch, part, parts, once, servers, servers_by, leaf)
    select p_sink, p_epoch, p_part, p_parts, p_once, p_servers, case when p_part = -2 then session_user end, l.leaf from pg_catalog.unnest(pgque._leaves_for(v_leaf)) l (leaf)
    on conflict do nothing
    returning *
  )
  select n.* into claim from new n limit 1;
end
$$;

-- Returns whether this transaction writes this part of an epoch.  The first transaction
-- that claims a part writes all of it, and the others leave out all of it.  The parts
-- that a session wrote or left out are kept in a setting, one line each and the newest
-- first: the part, the transaction's id, whether it writes.  If a session has rows of
-- one part in two transactions, it commits after every statement, and the part could be
-- incomplete: so it is refused.  A transaction that ended with ROLLBACK PREPARED does not
-- count: the setting is not rolled back with it.
create or replace function pgque._claim_part(p_sink text, p_epoch bigint, p_part int, p_parts int) returns boolean
language plpgsql as $$
declare
  v_part     text := pg_catalog.concat(e'\n', p_epoch, ' ', p_part, ' ', p_sink, e'\t');
  v_line     text := v_part || pg_catalog.pg_current_xact_id()::text;
  v_touched  text := coalesce(pg_catalog.current_setting('pgque.sink_parts', true), '');
  v_claim    pgque.sink_epoch;
  v_writes   boolean;
  v_xid      text;
begin
  if pg_catalog.starts_with(v_touched, v_line || '+') then
    return true;
  elsif pg_catalog.starts_with(v_touched, v_line || '-') then
    return false;
  elsif (p_epoch >= 0 and p_part >= 0 and (p_parts is null or p_part < p_parts)) is not true then
    perform pgque._fail('PQ005', pg_catalog.format('sink_id %L, epoch %s, part %s of %s do not name a part of an epoch', pg_catalog.left(p_sink, 200),
        coalesce(p_epoch::text, 'null'), coalesce(p_part::text, 'null'), coalesce(p_parts::text, 'any number')),
      'Pass epoch and part from 0. parts, if given, is the number of parts.');
  end if;
  v_claim := (pgque._claim_epoch(p_sink, p_epoch, p_part, p_parts, false)).claim;
  -- A row that came out of a dump may name the same transaction, but another session.
  v_writes := (v_claim.txid = pg_catalog.pg_current_xact_id() and v_claim.session = pgque._session()) is true;
  v_xid := pg_catalog.substring(pg_catalog.split_part(v_touched, v_part, 2), '^([0-9]{1,19})[+-]');
  if not v_writes and v_claim.session = pgque._session()
    or pg_catalog.strpos(v_touched, v_part) > 0 and pg_catalog.strpos(v_touched, v_line) = 0
      and pg_catalog.pg_xact_status(v_xid::xid8) is distinct from 'aborted'
  then
    perform pgque._refuse_epoch(p_sink, p_epoch, pg_catalog.format('part %s comes in more than one transaction', p_part),
      'Write each part in one transaction: with JDBC, any isolationLevel but NONE.');
  end if;
  perform pg_catalog.set_config('pgque.sink_parts',
    v_line || case when v_writes then '+' else '-' end || pg_catalog.left(v_touched, 10000), false);
  return v_writes;
end
$$;

-- Returns the leaf that takes staged rows.
create or replace function pgque._sink_leaf() returns int
language sql stable as $$ select s.last_value::int from pgque.sink_leaf s $$;

create or replace function pgque.sink_begin(sink_id text, epoch bigint, out attempt uuid, out stage text)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_leaf  int := pgque._sink_leaf();
begin
  perform pgque._check_epoch($1, $2);
  attempt := gen_random_uuid();
  stage := 'pgque.sink_stage_' || v_leaf;
  insert into pgque.sink_attempt (attempt, sink_id, epoch, started_at, leaf) select attempt, $1, $2, pgque.clock(), v_leaf;
end
$$;
comment on function pgque.sink_begin(text, bigint) is
  'Begins an attempt to write a share of an epoch, and returns attempt and stage. COPY the messages into the table that stage names, with this '
  'attempt and n = 0, 1, 2, ... in the order of sending; sink_commit() sends them. Columns: those of pgque.sink without sink_id, epoch, part and '
  'parts. delay and ttl count from sink_commit(). A row may hold several messages, which costs less: rows is their number, and queues (NULL '
  'elements: queue), types, payloads or all_bytes, all_headers, partition_keys, keys, delays, deliver_ats and ttls are arrays of this length. epoch '
  'NULL: a write that is never repeated. Errors: PQ005 invalid sink_id or epoch; PQ016 the epoch is older than the sink''s newest.';

-- Returns the attempts of both leaves.
create or replace function pgque._attempts() returns setof pgque.sink_attempt
language sql stable as $$
  select distinct on (a.attempt) a.* from pgque.sink_attempt a
$$;

-- Returns the messages that attempts staged, in their order: by the attempts, n and i.
-- Rows that were staged for another epoch are left out.
create or replace function pgque._messages(p_sink text, p_epoch bigint, p_attempts uuid[])
returns table (place bigint, n int, i bigint, queue text, type text, payload text, headers jsonb, payload_bytes bytea, partition_key text, key text,
  delay text, deliver_at timestamptz, ttl text)
language sql stable as $$
  select a.n, s.n, m.i, m.queue, m.type, m.payload, m.headers, m.payload_bytes, m.partition_key, m.key, m.delay, m.deliver_at, m.ttl
  from (
    select u.attempt, min(u.n) as n
    from pg_catalog.unnest(p_attempts) with ordinality u (attempt, n)
    where exists (select from pgque._attempts() a where a.attempt = u.attempt and a.sink_id = p_sink and a.epoch is not distinct from p_epoch)
    group by u.attempt
    order by 2
    offset 0
  ) a
  cross join lateral (
    select * from pgque.sink_stage s where s.attempt = a.attempt order by s.n
  ) s
  cross join lateral (
    select u.i, coalesce(u.queue, s.queue) as queue, coalesce(u.type, 'default') as type, u.payload, u.headers::jsonb as headers, u.payload_bytes,
      u.partition_key, u.key, u.delay, u.deliver_at, u.ttl
    from (
      -- Faster than a function in FROM, which stores its rows first.
      select pg_catalog.generate_series(1::bigint, s.rows) as i, pg_catalog.unnest(s.queues) as queue, pg_catalog.unnest(s.types) as type,
        pg_catalog.unnest(s.payloads) as payload, pg_catalog.unnest(s.all_headers) as headers, pg_catalog.unnest(s.all_bytes) as payload_bytes,
        pg_catalog.unnest(s.partition_keys) as partition_key, pg_catalog.unnest(s.keys) as key, pg_catalog.unnest(s.delays) as delay,
        pg_catalog.unnest(s.deliver_ats) as deliver_at, pg_catalog.unnest(s.ttls) as ttl
      where s.rows is not null
    ) u
    union all
    select 0, s.queue, coalesce(s.type, 'default'), s.payload, s.headers, s.payload_bytes, s.partition_key, s.key, s.delay, s.deliver_at, s.ttl
    where s.rows is null
  ) m
$$;

-- Returns staged messages, each with its number in the epoch, in pieces that arrays can
-- hold: of 1,000 messages, and of 16 MB or one message more.
create or replace function pgque._staged(p_sink text, p_epoch bigint, p_attempts uuid[])
returns table (at bigint, piece bigint[], queue text, type text, payload text, headers jsonb, payload_bytes bytea, partition_key text, key text, delay text,
  deliver_at timestamptz, ttl text)
language sql stable as $$
  select pg_catalog.row_number() over w,
    array[pg_catalog.row_number() over w / 1000,
      pg_catalog.sum(coalesce(pg_catalog.octet_length(m.payload), pg_catalog.octet_length(m.payload_bytes), 0)
        + coalesce(pg_catalog.octet_length(m.headers::text), 0)) over w / 16777216],
    m.queue, m.type, m.payload, m.headers, m.payload_bytes, m.partition_key, m.key, m.delay, m.deliver_at, m.ttl
  from pgque._messages(p_sink, p_epoch, p_attempts) m
  window w as (order by m.place, m.n, m.i)
$$;

-- Sends staged rows of which some have options, as send_batch() does.  All keys
-- are locked before the first row, so that two epochs cannot wait for each other.
create or replace function pgque._send_staged(p_sink text, p_epoch bigint, p_attempts uuid[]) returns bigint
language plpgsql as $$
declare
  v_rows   record;
  v_count  bigint := 0;
begin
  perform pgque._lock_keys(k.queue_id, k.keys)
  from (
    select q.queue_id, pg_catalog.array_agg(distinct s.key) as keys
    from pgque._staged(p_sink, p_epoch, p_attempts) s
    join pgque.queue q on q.queue_name = s.queue
    where s.key is not null
    group by q.queue_id
    order by q.queue_id
  ) k;
  for v_rows in
    select s.queue, pg_catalog.array_agg(s.type order by s.at) as types, pg_catalog.array_agg(s.payload order by s.at) as data,
      pg_catalog.array_agg(s.payload_bytes order by s.at) as bytes, pg_catalog.array_agg(s.headers order by s.at) as headers,
      pg_catalog.array_agg(s.key order by s.at) as keys, pg_catalog.array_agg(pgque._sink_interval(s.queue, 'delay', s.delay) order by s.at) as delays,
      pg_catalog.array_agg(s.deliver_at order by s.at) as deliver_ats,
      pg_catalog.array_agg(pgque._sink_interval(s.queue, 'ttl', s.ttl) order by s.at) as ttls,
      pg_catalog.array_agg(s.partition_key order by s.at) as partition_keys
    from pgque._staged(p_sink, p_epoch, p_attempts) s
    group by s.queue, s.piece
    order by s.queue, s.piece
  loop
    perform pgque._send_rows(pgque._queue(v_rows.queue), v_rows.types, v_rows.data, v_rows.bytes, v_rows.headers, v_rows.keys, v_rows.delays,
      v_rows.deliver_ats, v_rows.ttls, v_rows.partition_keys);
    v_count := v_count + pg_catalog.cardinality(v_rows.types);
  end loop;
  return v_count;
end
$$;

-- The servers that an epoch is spread over; null if it is not.
create or replace function pgque._epoch_servers(p_sink text, p_epoch bigint) returns text[]
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return (select e.servers from pgque.sink_epoch e where e.sink_id = p_sink and e.epoch = p_epoch and e.part = -2 limit 1);
end
$$;

create or replace function pgque.sink_servers(sink_id text, epoch bigint, servers text[]) returns text[]
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_claim  pgque.sink_epoch;
begin
  perform pgque._need_read_committed('sink_servers');
  if $2 is null or coalesce(cardinality($3), 0) = 0 or cardinality($3) <> (select count(distinct s.name) from unnest($3) s (name)) then
    perform pgque._fail('PQ005', format('sink_servers of sink %L needs an epoch and a list of different servers', left($1, 200)),
      'select pgque.sink_servers(''nightly'', 7, array[''db1:5432/app'', ''db2:5432/app'']);');
  end if;
  perform pgque._lock_epoch($1, $2, -2);
  if pgque._epoch_servers($1, $2) is null and exists (select from pgque.sink_epoch e where e.sink_id = $1 and e.epoch = $2) then
    return '{}';
  end if;
  v_claim := (pgque._claim_epoch($1, $2, -2, null, false, $3)).claim;
  -- The caller connects to these servers with its password, and writes to them.
  if v_claim.servers_by <> session_user then
    perform pgque._refuse_epoch($1, $2, format('its list of servers was stored by role %I, and is not for role %I', v_claim.servers_by, session_user),
      'Repeat it as the role that began it, or give the new query another sink_id.');
  end if;
  return v_claim.servers;
end
$$;
comment on function pgque.sink_servers(text, bigint, text[]) is
  'Stores the list of servers that an epoch is spread over, and returns the list that the first call stored. Call it with one list on each server of '
  'the list, in the order of their names, before anything is committed; if a server returns another list, begin again with that list. An empty list '
  'is returned if this epoch was committed without a list: then the whole epoch is on this server. Errors: PQ005 no epoch, an empty list, or a '
  'server twice; PQ016 the epoch is older than the sink''s newest, or another role stored its list; 25000 not READ COMMITTED.';

create or replace function pgque.sink_commit(sink_id text, epoch bigint, attempts uuid[], row_count bigint, servers text[] default null) returns text
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_txid     xid8 := pg_current_xact_id();
  v_new      bigint;
  v_all      bigint := 1;
  v_count    bigint;
  v_options  boolean;
begin
  perform pgque._need_read_committed('sink_commit');
  perform pgque._check_epoch($1, $2);
  if $2 is not null then
    v_new := (pgque._claim_epoch($1, $2, -1, null, false)).is_new::int;
    if pgque._epoch_servers($1, $2) is distinct from $5 then
      perform pgque._refuse_epoch($1, $2, format('it is spread over %s, not over %s',
          coalesce('the servers ' || array_to_string(pgque._epoch_servers($1, $2), ', '), 'this server alone'),
          coalesce('the servers ' || array_to_string($5, ', '), 'this server alone')),
        'Repeat it as it was begun: a stream of Spark keeps option servers until its micro-batch is complete.');
    end if;
  else
    -- Each attempt counts once.
    perform pg_advisory_xact_lock(hashtext('pgque.sink'), hashtext($1));
    select count(*), count(*) filter (where c.is_new) into v_all, v_new
    from (select distinct unnest($3) as id order by 1) a
    cross join lateral pgque._claim_epoch(a.id::text, 0, -1, null, true) c;
  end if;
  if v_new = 0 and v_all > 0 then
    return 'duplicate';
  end if;
  -- Compaction moves rows from leaf to leaf.
  lock table pgque.sink_attempt, pgque.sink_stage in access share mode;
  -- Before anything is stored: so repeated calls for a full queue cost little.
  perform pgque._room(q, s.count)
  from (
    select m.queue, sum(m.count)::bigint as count
    from pgque.sink_stage s
    cross join lateral (
      select coalesce(u.queue, s.queue) as queue, count(*) as count
      from unnest(s.queues, s.keys) u (queue, key)
      where u.key is null
      group by 1
      union all
      select s.queue, coalesce(s.rows, 1) where num_nonnulls(s.queues, s.keys, s.key) = 0
    ) m
    where s.attempt = any ($3) and exists (select from pgque.queue q where q.queue_max_depth > 0)
    group by m.queue
  ) s
  join pgque.queue q on q.queue_name = s.queue
  where q.queue_max_depth > 0 and q.queue_open;
  v_options := exists (
    select from pgque.sink_stage s
    where s.attempt = any ($3) and num_nonnulls(s.key, s.delay, s.deliver_at, s.ttl, s.keys, s.delays, s.deliver_ats, s.ttls) > 0);
  insert into pgque.event (slot, ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_headers, ev_bytes, ev_expires)
  select coalesce(q.slot, pgque._open_slot(m.queue, q.event_seq is not null)), nextval(q.event_seq), pgque.clock(), v_txid,
    m.type, m.payload, m.partition_key, m.headers, m.payload_bytes, q.ends
  from pgque._messages($1, $2, $3) m
  -- With this detour the planner caches the lookup for the rows of one queue.
  cross join lateral (select m.queue offset 0) n
  left join lateral (
    select case when q.queue_open then q.queue_id * 3 + q.queue_cur_table end as slot, q.queue_event_seq as event_seq,
      pgque._expires(q) as ends
    from pgque.queue q
    where q.queue_name = n.queue
    offset 0
  ) q on true
  where v_new = v_all and not v_options;
  get diagnostics v_count = row_count;
  if v_new = v_all and v_options then
    v_count := pgque._send_staged($1, $2, $3);
  end if;
  if v_count is distinct from $4 then
    perform pgque._refuse_epoch($1, $2, format('%s rows are staged, not %s', v_count, coalesce($4::text, 'null')),
      'Write the epoch again. Nothing was sent. Staged rows are kept for a day.');
  end if;
  return 'applied';
end
$$;
comment on function pgque.sink_commit(text, bigint, uuid[], bigint, text[]) is
  'Sends the messages that these attempts staged, in one transaction and so in one tick. Returns applied, or duplicate if the sink committed this '
  'epoch before; then nothing is sent. row_count: the number of messages that must be staged. servers: the list that sink_servers() returned, if the '
  'epoch is spread over several servers. Attempts of the epoch that are not named are invalid afterwards. Staged rows are kept for a day, also '
  'through a crash of the server. Errors: PQ001 no such queue; PQ003 a queue is full; PQ013 a queue is paused; PQ005 invalid option, or more '
  'messages than max_depth of a queue; PQ016 rows are missing, the epoch is older than the sink''s newest, or servers is not the stored list; 25000 '
  'not READ COMMITTED.';

-- Returns the attempts that may still be committed.
create or replace function pgque._live_attempts() returns setof pgque.sink_attempt
language sql stable as $$
  select a.*
  from pgque._attempts() a
  where a.started_at > pgque.clock() - interval '1 day'
    and not exists (
      select
      from pgque.sink_epoch e
      where e.part = -1 and e.epoch >= coalesce(a.epoch, 0)
        and e.sink_id = case when a.epoch is null then a.attempt::text else a.sink_id end)
$$;

-- Deletes staged rows.  The other leaf is emptied under its lock, if that is free,
-- after the rows that may still be committed were copied to the current one.  The
-- leaves rotate when the current one is large, or has had nothing to keep for a minute.
create or replace function pgque._compact_stage() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_cur   int := pgque._sink_leaf();
  v_live  bigint;
  v_all   bigint;
  v_last  timestamptz;
begin
  if pg_relation_size('pgque.sink_stage_' || (1 - v_cur)) + pg_relation_size('pgque.sink_attempt_' || (1 - v_cur)) > 0 then
    execute format('lock table pgque.sink_attempt_%1$s, pgque.sink_stage_%1$s in access exclusive mode nowait', 1 - v_cur);
    insert into pgque.sink_attempt (attempt, sink_id, epoch, started_at, leaf)
    select a.attempt, a.sink_id, a.epoch, a.started_at, v_cur from pgque._live_attempts() a
    on conflict do nothing;
    insert into pgque.sink_stage (attempt, n, queue, type, payload, headers, payload_bytes, partition_key, key, delay, deliver_at, ttl,
      rows, queues, types, payloads, all_headers, all_bytes, partition_keys, keys, delays, deliver_ats, ttls, leaf)
    select s.attempt, s.n, s.queue, s.type, s.payload, s.headers, s.payload_bytes, s.partition_key, s.key, s.delay, s.deliver_at, s.ttl,
      s.rows, s.queues, s.types, s.payloads, s.all_headers, s.all_bytes, s.partition_keys, s.keys, s.delays, s.deliver_ats, s.ttls, v_cur
    from pgque.sink_stage s
    join pgque._live_attempts() a on a.attempt = s.attempt
    where s.leaf = 1 - v_cur
    on conflict do nothing;
    execute format('truncate pgque.sink_attempt_%1$s, pgque.sink_stage_%1$s', 1 - v_cur);
    return 1;
  end if;
  execute format('select count(*), count(l.attempt), max(a.started_at) from pgque.sink_attempt_%s a left join pgque._live_attempts() l using (attempt)', v_cur)
  into v_all, v_live, v_last;
  if (v_live = 0 and v_last < pgque.clock() - interval '1 minute')
    or (v_all >= 2 * v_live and pg_relation_size('pgque.sink_stage_' || v_cur) > case when v_all > 0 then 67108864 else 0 end)
  then
    perform setval('pgque.sink_leaf', 1 - v_cur);
    return 1;
  end if;
  return 0;
exception
  when lock_not_available then
    return 0;
end
$$;

-- Returns how long a committed epoch is kept.
create or replace function pgque._epoch_life(p_once boolean) returns interval
language sql immutable as $$ select case when p_once then interval '2 days' else interval '1 year' end $$;

-- Deletes committed epochs by emptying the other leaf, as _compact_stage() does for
-- staged rows.  The newest epoch of each sink is kept.  The leaves rotate when the
-- current one has more than 4 MB and half of its rows can be deleted, if need be in the
-- same call, as in _compact_journal().
create or replace function pgque._compact_epochs() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_cur   int := (select j.journal_epoch_cur from pgque.journal j);
  v_size  bigint := pg_relation_size('pgque.sink_epoch_' || v_cur);
  v_due   boolean := false;
begin
  if v_size > 4194304 then
    execute format(
      'select count(*) filter (where e.epoch < e.newest or e.committed_at <= pgque.clock() - pgque._epoch_life(e.once)) * 2 >= count(*)'
      ' from (select e.*, max(e.epoch) over (partition by e.sink_id) as newest from pgque.sink_epoch_%s e) e', v_cur)
    into v_due;
  end if;
  if not v_due and pg_relation_size('pgque.sink_epoch_' || (1 - v_cur)) = 0 or not pgque._lock_journal(v_size) then
    return 0;
  end if;
  if (select j.journal_epoch_cur from pgque.journal j) <> v_cur then
    return 0;
  end if;
  if pg_relation_size('pgque.sink_epoch_' || (1 - v_cur)) > 0 then
    execute format('lock table pgque.sink_epoch_%s in access exclusive mode nowait', 1 - v_cur);
    insert into pgque.sink_epoch (sink_id, epoch, part, parts, txid, session, once, committed_at, servers, servers_by, leaf)
    select o.sink_id, o.epoch, o.part, o.parts, o.txid, o.session, o.once, o.committed_at, o.servers, o.servers_by, v_cur
    from pgque.sink_epoch o
    where o.leaf = 1 - v_cur and o.committed_at > pgque.clock() - pgque._epoch_life(o.once)
      and o.epoch >= (select max(e.epoch) from pgque.sink_epoch e where e.sink_id = o.sink_id)
    on conflict do nothing;
    execute format('truncate pgque.sink_epoch_%s', 1 - v_cur);
  end if;
  -- After either step a transaction with an old snapshot could miss an epoch: the
  -- update of this row stops it.
  update pgque.journal j set journal_epoch_cur = case when v_due then 1 - v_cur else v_cur end;
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;
