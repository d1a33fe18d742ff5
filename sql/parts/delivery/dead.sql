-- ---------------------------------------------------------------------------
-- dead: dead letters
-- ---------------------------------------------------------------------------

-- Gives a message up: the queue's drop_policy decides what becomes of it.  A dead letter
-- for another queue is stored here too, because the other queue may be full or paused,
-- and an outcome must not fail or wait for that: _forward_letters() sends it there.
create or replace function pgque._give_up(p_queue pgque.queue, p_sub pgque.subscriber, p_item pgque.retry_queue, p_reason text) returns void
language plpgsql as $$
begin
  if p_queue.queue_drop_policy = 'drop' then
    perform pgque._count(p_queue.queue_id, p_sub.sub_id, 'dropped', 1);
  else
    perform pgque._add_dead_letter(p_item, p_sub.sub_consumer, p_reason, p_queue.queue_drop_policy = 'hold',
      case when p_queue.queue_drop_policy = 'dead_letter' then p_queue.queue_dead_letter_queue end);
  end if;
end
$$;

-- Stores a message as a dead letter of a consumer; false if it is one already.
-- p_forward: the queue that it is forwarded to.
create or replace function pgque._add_dead_letter(
  p_item pgque.retry_queue, p_consumer int, p_reason text, p_held boolean, p_forward int default null
) returns boolean
language plpgsql as $$
begin
  -- A reader of offsets gets each body of a key that it has not read yet, under one id:
  -- the newest is kept.
  if p_item.ev_key is not null then
    delete from pgque.dead_letter d
    where d.dl_queue_id = p_item.ev_queue and d.dl_consumer_id = p_consumer and d.ev_id = p_item.ev_id and d.ev_txid < p_item.ev_txid;
  end if;
  perform pgque._need_queue(p_item.ev_queue);
  insert into pgque.dead_letter (dl_queue_id, dl_consumer_id, dl_time, dl_reason, dl_receives, dl_held, dl_forward, ev_error,
    ev_id, ev_time, ev_txid, ev_retry, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires)
  values (p_item.ev_queue, p_consumer, pgque.clock(), p_reason, p_item.ev_receives, p_held, p_forward, coalesce(p_item.ev_error, p_reason),
    p_item.ev_id, p_item.ev_time, p_item.ev_txid, p_item.ev_retry, p_item.ev_type, p_item.ev_data,
    p_item.ev_extra1, p_item.ev_extra2, p_item.ev_extra3, p_item.ev_extra4,
    p_item.ev_headers, p_item.ev_key, p_item.ev_bytes, p_item.ev_expires)
  on conflict on constraint dead_letter_once do nothing;
  return found;
end
$$;

-- Forwards dead letters to the queues that were nominated for them when their messages
-- were given up.  If a queue does not take them now, because it is full, paused, locked or
-- not restored completely, they stay for a later call.  Returns how many letters it
-- forwarded or kept; null if none was waiting.
create or replace function pgque._forward_letters() returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set lock_timeout = '200ms' set enable_seqscan = off set jit = off as $$
declare
  v_target  int;
  v_count   bigint;
begin
  for v_target in
    with recursive target (id) as (
      select min(d.dl_forward) from pgque.dead_letter d where d.dl_forward is not null
      union all
      select (select min(d.dl_forward) from pgque.dead_letter d where d.dl_forward > t.id) from target t where t.id is not null
    )
    select t.id from target t where t.id is not null
  loop
    v_count := coalesce(v_count, 0);
    begin
      v_count := v_count + pgque._forward_letters_to(v_target);
    exception
      when sqlstate 'PQ001' or sqlstate 'PQ003' or sqlstate 'PQ013' or undefined_table or object_not_in_prerequisite_state
        or lock_not_available or serialization_failure
      then
        null;
      when others then
        raise warning 'pgque: dead letters are not forwarded to queue number %: % (%)', v_target, sqlerrm, sqlstate;
    end;
  end loop;
  return v_count;
exception
  when lock_not_available then
    return 0;   -- an upgrade has the table of dead letters
end
$$;

-- Forwards the oldest dead letters to one queue.  If the queue of a letter names another
-- dead_letter_queue by now, or none, as after a drop, the letter stays for good.  Near
-- max_depth each send counts messages, so that a call forwards few.
create or replace function pgque._forward_letters_to(p_target int) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_target  pgque.queue;
  v_most    bigint := 1000;
  v_count   bigint;
begin
  select q.* into v_target from pgque.queue q where q.queue_id = p_target;
  if v_target.queue_max_depth > 0 then
    v_most := least(v_most, pgque._room_left(v_target, 1));
    v_most := case when v_most < 1000 then least(v_most, 10) else v_most end;
  end if;
  with locked as materialized (
    select d.dl_id, q.queue_name, (q.queue_dead_letter_queue = p_target and q.queue_drop_policy = 'dead_letter') is true as nominates,
      pgque._size(d.ev_data, d.ev_bytes, d.ev_headers) as bytes
    from pgque.dead_letter d
    join pgque.queue q on q.queue_id = d.dl_queue_id and not q.queue_restored
    where d.dl_forward = p_target
    order by d.dl_id
    limit v_most
    for update of d skip locked
  ),
  found as materialized (
    select l.* from (select l.*, sum(l.bytes) over (order by l.dl_id) - l.bytes as before from locked l) l where l.before < pgque._bytes_of_a_call()
  ),
  kept as (
    update pgque.dead_letter d set dl_forward = null from found f where d.dl_id = f.dl_id and not f.nominates
    returning d.dl_id
  ),
  letter as (
    delete from pgque.dead_letter d using found f where d.dl_id = f.dl_id and f.nominates
    returning d.*, f.queue_name
  ),
  counted as (
    insert into pgque.tally (tal_queue, tal_sub, tal_what, tal_count, leaf)
    select l.dl_queue_id, coalesce(s.sub_id, 0), 'forwarded', count(*), pgque._journal_leaf()
    from letter l
    left join pgque.subscriber s on s.sub_queue = l.dl_queue_id and s.sub_consumer = l.dl_consumer_id and s.sub_main is null
    group by 1, 2
  )
  select count(pgque._send(v_target.queue_name, l.ev_type, l.ev_data, l.ev_extra1, l.ev_extra2, l.ev_extra3, l.ev_extra4,
    coalesce(l.ev_headers, '{}') || pg_catalog.jsonb_build_object('pgque_dead', pg_catalog.jsonb_build_object(
      'queue', l.queue_name,
      'consumer', (select c.co_name from pgque.consumer c where c.co_id = l.dl_consumer_id),
      'msg_id', l.ev_id, 'reason', l.dl_reason, 'receive_count', l.dl_receives,
      'retry_count', coalesce(l.ev_retry, 0), 'dead_at', l.dl_time)),
    l.ev_bytes)) + (select count(*) from kept)
  into v_count
  from (select l.* from letter l order by l.dl_id) l;
  return v_count;
end
$$;

-- Returns a condition that finds a text in columns, in upper or lower case; null if
-- there is no text.
create or replace function pgque._matching_sql(p_text text, p_columns text) returns text
language sql stable as $$
  select 'pg_catalog.strpos(pg_catalog.lower(pg_catalog.concat_ws('' '', ' || p_columns || ')), pg_catalog.lower(' || pg_catalog.quote_literal(p_text) || ')) > 0'
$$;

-- No index serves the filters.  Without one that matches, 100,000 dead letters are read
-- in 15 to 50 ms.  An index for each of eight filters would slow each dead letter down.
create or replace function pgque.dlq_inspect(
  queue_name text, limit_count int default 100, reason text default null, only_type text default null, only_key text default null,
  only_consumer text default null, since timestamptz default null, until timestamptz default null, matching text default null,
  before_id bigint default null, caller pgque.caller default current_user,
  out dl_id bigint, out dl_time timestamptz, out dl_reason text,
  out ev_id bigint, out ev_time timestamptz, out ev_txid xid8, out ev_retry int, out ev_type text, out ev_data text,
  out ev_extra1 text, out ev_extra2 text, out ev_extra3 text, out ev_extra4 text, out consumer_name text,
  out ev_headers jsonb, out ev_key text, out ev_bytes bytea, out payload_size int, out receive_count int, out dl_held boolean
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set datestyle = 'ISO' set jit = off as $f$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query execute format(
    $q$
    select d.dl_id, d.dl_time, d.dl_reason, d.ev_id, d.ev_time, d.ev_txid, d.ev_retry, d.ev_type, d.ev_data,
      d.ev_extra1, d.ev_extra2, d.ev_extra3, d.ev_extra4, c.co_name, d.ev_headers, d.ev_key, d.ev_bytes,
      coalesce(octet_length(d.ev_data), octet_length(d.ev_bytes), 0), d.dl_receives, d.dl_held
    from pgque.dead_letter d
    join pgque.consumer c on c.co_id = d.dl_consumer_id
    where %s
    order by d.dl_id desc
    limit %s
    $q$,
    concat_ws(' and ', 'd.dl_queue_id = ' || v_queue.queue_id, 'd.dl_id < ' || $10, 'd.ev_type = ' || quote_literal($4),
      'd.ev_key = ' || quote_literal($5), 'c.co_name = ' || quote_literal($6), 'd.dl_time >= ' || quote_literal($7), 'd.dl_time < ' || quote_literal($8),
      format('pgque._has_reason(d.dl_reason, %L)', $3),
      pgque._matching_sql($9, 'pg_catalog.left(d.ev_data, 100000), d.ev_headers::text, d.dl_reason')),
    case when $2 < 0 then '0' else coalesce($2::text, 'all') end);
end
$f$;
comment on function pgque.dlq_inspect(text, int, text, text, text, text, timestamptz, timestamptz, text, bigint, pgque.caller) is
  'Returns the newest dead letters of a queue, at most limit_count (NULL: all), with consumer and reason. reason: only those with this reason, as '
  'returned here or by dlq_reasons(). only_type, only_key, only_consumer: only those of this type, key or consumer. since, until: only those given '
  'up at since or later, and before until. matching: only those with this text in the payload (its first 100,000 characters), the headers or the '
  'reason, in upper or lower case (of the letters that the database''s locale knows). before_id: only those older than this dl_id, to read page by '
  'page. A filter that few dead letters satisfy makes the call read all of the queue. payload_size: bytes. dl_held: kept by drop_policy hold. '
  'Errors: PQ001 no such queue.';

-- The rows have the words of list_messages() in place of PgQ's column names.  Only the
-- roles that may read the table may read the view: a view reads with its owner's rights,
-- so a role with a right to one queue calls dlq_inspect(), which checks that right.
create or replace view pgque.dead_letters as
select q.queue_name as queue, c.co_name as consumer, d.dl_id, d.ev_id as msg_id, d.ev_type as type, d.ev_data as payload, d.ev_bytes as payload_bytes,
  d.ev_headers as headers, d.ev_key as key, d.dl_reason as reason, greatest(d.dl_receives, d.ev_retry) as receive_count, coalesce(d.ev_retry, 0) as retry_count,
  d.ev_time as created_at, d.dl_time as dead_at, d.ev_expires as expires_at, d.dl_held as held
from pgque.dead_letter d
join pgque.queue q on q.queue_id = d.dl_queue_id
join pgque.consumer c on c.co_id = d.dl_consumer_id;
comment on view pgque.dead_letters is
  'Lists the dead letters of all queues, with the words of list_messages() as columns. Only for the role pgque_admin; with a right to one queue, '
  'call dlq_inspect().';
comment on column pgque.dead_letters.queue is 'Name of the queue.';
comment on column pgque.dead_letters.consumer is 'Name of the consumer that failed the message.';
comment on column pgque.dead_letters.dl_id is 'Number of the dead letter: the argument of dlq_requeue() and dlq_replay().';
comment on column pgque.dead_letters.msg_id is 'Id of the message.';
comment on column pgque.dead_letters.type is 'Type of the message.';
comment on column pgque.dead_letters.payload is 'The text or JSON that was sent.';
comment on column pgque.dead_letters.payload_bytes is 'The payload, if it was sent as bytes; payload is NULL then.';
comment on column pgque.dead_letters.headers is 'Metadata that the sender gave: a JSON object.';
comment on column pgque.dead_letters.key is 'Key that the sender gave; NULL if none.';
comment on column pgque.dead_letters.reason is 'Why the message was given up: the reason of the last nack(), or that of pgque, such as retention period passed.';
comment on column pgque.dead_letters.receive_count is 'How often the message was delivered; for a consumer on its own, how often it failed.';
comment on column pgque.dead_letters.retry_count is 'How often the message was redelivered after it was rejected.';
comment on column pgque.dead_letters.created_at is 'When the message was sent.';
comment on column pgque.dead_letters.dead_at is 'When the message became a dead letter.';
comment on column pgque.dead_letters.expires_at is 'When the message expires; NULL: never.';
comment on column pgque.dead_letters.held is 'Whether drop_policy hold keeps the dead letter.';

-- Returns the common form of reasons that differ only by numbers.  Digits after a letter
-- belong to a word (utf8), and so do one or two digits after a letter and a hyphen
-- (utf-8, but not order-4711).
create or replace function pgque._reason_kind(p_reason text) returns text
language sql immutable as $$
  select coalesce(pg_catalog.left(pg_catalog.regexp_replace(p_reason, '(?<![[:alnum:]])(?:(?<![[:alpha:]]-)\d+|\d{3,})', 'N', 'g'), 200), '')
$$;

-- Returns whether a reason is p_wanted, as it is or as _reason_kind() returns it; null
-- stands for any.
create or replace function pgque._has_reason(p_reason text, p_wanted text) returns boolean
language sql immutable as $$
  select p_wanted is null or coalesce(p_reason = p_wanted, false) or pgque._reason_kind(p_reason) = p_wanted
$$;

create or replace function pgque.dlq_reasons(
  queue_name text, limit_count int default 200000, caller pgque.caller default current_user,
  out consumer_name text, out reason text, out dead_letters bigint, out held bigint, out oldest timestamptz, out newest timestamptz, out newest_dl_id bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
begin
  return query
    select c.co_name, pgque._reason_kind(d.dl_reason), sum(d.n)::bigint, sum(d.held)::bigint, min(d.oldest), max(d.newest), max(d.newest_id)
    from (
      select d.dl_consumer_id, d.dl_reason, count(*) as n, count(*) filter (where d.dl_held) as held, min(d.dl_time) as oldest, max(d.dl_time) as newest,
        max(d.dl_id) as newest_id
      from (
        select d.dl_consumer_id, d.dl_reason, d.dl_held, d.dl_time, d.dl_id
        from pgque.dead_letter d
        where d.dl_queue_id = v_queue.queue_id
        order by d.dl_id desc
        limit case when $2 < 0 then 0 else $2 end
      ) d
      group by d.dl_consumer_id, d.dl_reason
    ) d
    join pgque.consumer c on c.co_id = d.dl_consumer_id
    group by c.co_name, pgque._reason_kind(d.dl_reason)
    order by 3 desc, 1, 2;
end
$$;
comment on function pgque.dlq_reasons(text, int, pgque.caller) is
  'Returns why the dead letters of a queue were given up, one row for each consumer and reason, the most frequent first. The columns are the '
  'number of dead letters, the number of held ones, the times of the oldest and the newest, and the dl_id of the newest. A reason is cut at 200 '
  'characters, shows numbers as N (not digits of a word, such as utf-8), and is empty if none was given. The newest limit_count dead letters count (NULL: all). Errors: PQ001 no such queue.';

-- Deletes a dead letter and returns it, or raises PQ008.  Two sessions cannot take the
-- same one.  p_call: the function to record in list_actions(), if a role calls it by
-- hand for this dead letter.
create or replace function pgque._take_dead_letter(p_dl_id bigint, p_caller name, p_call text default null) returns pgque.dead_letter
language plpgsql as $$
declare
  v_dead  pgque.dead_letter;
begin
  delete from pgque.dead_letter d
  where d.dl_id = p_dl_id and pgque._may(p_caller, 'admin', d.dl_queue_id)
  returning d.* into v_dead;
  if not found then
    perform pgque._fail('PQ008', pg_catalog.format('not a dead letter: %s', coalesce(p_dl_id::text, 'null')),
      'List the dead letters: select * from pgque.dlq_inspect(queue); This one was replayed, requeued, purged or forwarded already.');
  end if;
  perform pgque._record_action(p_call, q.queue_name, pg_catalog.jsonb_build_object('dl_id', p_dl_id, 'msg_id', v_dead.ev_id))
  from pgque.queue q
  where q.queue_id = v_dead.dl_queue_id and p_call is not null;
  return v_dead;
end
$$;

create or replace function pgque._replay(p_dead pgque.dead_letter) returns bigint
language plpgsql as $$
begin
  return pgque._send(
    (select q.queue_name from pgque.queue q where q.queue_id = p_dead.dl_queue_id), p_dead.ev_type, p_dead.ev_data,
    p_dead.ev_extra1, p_dead.ev_extra2, p_dead.ev_extra3, p_dead.ev_extra4, p_dead.ev_headers, p_dead.ev_bytes);
end
$$;

create or replace function pgque.dlq_replay(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_dead  pgque.dead_letter := pgque._take_dead_letter(dlq_replay.dl_id, caller, 'dlq_replay');
begin
  return pgque._replay(v_dead);
end
$$;
comment on function pgque.dlq_replay(bigint, pgque.caller) is
  'Sends a dead letter as a new message to every consumer of its queue, deletes the dead letter, and returns the new id. Errors: PQ003 the queue is full; PQ008 no '
  'such dead letter; PQ013 the queue is paused.';

create or replace function pgque.dlq_replay_all(
  queue_name text, limit_count int default null, reason text default null, caller pgque.caller default current_user,
  out replayed int, out failed int, out first_error text
)
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_id     bigint;
begin
  replayed := 0;
  failed := 0;
  for v_id in
    select d.dl_id
    from pgque.dead_letter d
    where d.dl_queue_id = v_queue.queue_id and pgque._has_reason(d.dl_reason, $3)
    order by d.dl_id
    limit case when $2 < 0 then 0 else $2 end
  loop
    begin
      perform pgque._replay(pgque._take_dead_letter(v_id, caller));
      replayed := replayed + 1;
    exception
      when sqlstate 'PQ008' then
        null;   -- another session took it meanwhile
      when others then
        failed := failed + 1;
        first_error := coalesce(first_error, sqlerrm);
    end;
  end loop;
  perform pgque._record_action('dlq_replay_all', v_queue.queue_name, jsonb_build_object('reason', $3, 'replayed', replayed, 'failed', failed)) where replayed > 0;
end
$$;
comment on function pgque.dlq_replay_all(text, int, text, pgque.caller) is
  'Replays the oldest dead letters of a queue, at most limit_count (NULL: all). reason: only those with this reason, as stored or as dlq_reasons() '
  'returns it. Returns replayed (the number that was sent), failed (the number that could not be sent, and stays) and first_error. Errors: PQ001 '
  'no such queue.';

create or replace function pgque._requeue(p_dead pgque.dead_letter) returns bigint
language plpgsql as $$
declare
  v_sub  int;
begin
  select s.sub_id into v_sub
  from pgque.subscriber s
  where s.sub_queue = p_dead.dl_queue_id and s.sub_consumer = p_dead.dl_consumer_id and s.sub_main is null
  for key share;
  if not found then
    perform pgque._fail('PQ011', format('not subscriber to queue: the consumer of dead letter %s was unsubscribed', p_dead.dl_id),
      'Subscribe the consumer again, or send the message to all consumers with pgque.dlq_replay(dl_id).');
  end if;
  perform pgque._depth_grows(p_dead.dl_queue_id);
  insert into pgque.retry_queue as r (ev_retry_after, ev_queue, ev_owner, ev_error,
    ev_id, ev_time, ev_txid, ev_type, ev_data, ev_extra1, ev_extra2, ev_extra3, ev_extra4, ev_headers, ev_key, ev_bytes, ev_expires, ev_lane)
  select pgque.clock(), p_dead.dl_queue_id, s.sub_id, p_dead.ev_error,
    p_dead.ev_id, p_dead.ev_time, p_dead.ev_txid, p_dead.ev_type, p_dead.ev_data, p_dead.ev_extra1, p_dead.ev_extra2,
    p_dead.ev_extra3, p_dead.ev_extra4, p_dead.ev_headers, p_dead.ev_key, p_dead.ev_bytes,
    -- An expired message loses its expiry.
    case when p_dead.ev_expires > pgque.clock() then p_dead.ev_expires end,
    pgque._lane(p_dead.ev_key, p_dead.ev_extra1)
  from pgque.subscriber s
  where s.sub_id = v_sub
  -- The message may be there already, if its consumer was moved back and failed it
  -- again.  A worker that holds it keeps it, unless it was edited: then the worker has
  -- another one.
  on conflict on constraint retry_queue_pkey do update
  set (ev_retry_after, ev_batch, ev_receives) = (
      select case when h.stays then r.ev_retry_after else excluded.ev_retry_after end, case when h.stays then r.ev_batch end, h.stays::int
      from (
        select r.ev_batch is not null and r.ev_retry_after > excluded.ev_retry_after
          and (r.ev_type, r.ev_data, r.ev_headers, r.ev_bytes) is not distinct from (excluded.ev_type, excluded.ev_data, excluded.ev_headers, excluded.ev_bytes) as stays
      ) h),
    ev_retry = null, ev_type = excluded.ev_type, ev_data = excluded.ev_data, ev_headers = excluded.ev_headers, ev_bytes = excluded.ev_bytes;
  return p_dead.ev_id;
end
$$;

create or replace function pgque.dlq_requeue(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_dead  pgque.dead_letter := pgque._take_dead_letter(dlq_requeue.dl_id, caller, 'dlq_requeue');
begin
  return pgque._requeue(v_dead);
end
$$;
comment on function pgque.dlq_requeue(bigint, pgque.caller) is
  'Requeues a dead letter: the consumer that failed it receives the message again. Returns the message''s id, which stays. Its retries '
  'count from zero, and retention_period from now. Errors: PQ008 no such dead letter; PQ011 that consumer was '
  'unsubscribed.';

create or replace function pgque.dlq_edit(
  dl_id bigint, payload text default null, type text default null, headers jsonb default null, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_dead   pgque.dead_letter := pgque._take_dead_letter(dlq_edit.dl_id, caller, 'dlq_edit');
  v_sub    pgque.subscriber;
begin
  if $4 is not null then
    perform pgque._headers((select q.queue_name from pgque.queue q where q.queue_id = v_dead.dl_queue_id), $4);
  end if;
  v_sub.sub_consumer := v_dead.dl_consumer_id;
  execute pgque._archive_sql(null, 'select ($3).*, ($3).dl_receives as ev_receives, null::text as ev_worker', v_dead.dl_queue_id)
  using v_sub, null::text, v_dead, null, null, 'edited'::text;
  perform pgque._count(v_dead.dl_queue_id, 0, 'archived', 1);
  if $2 is not null then
    v_dead.ev_data := $2;
    v_dead.ev_bytes := null;
  end if;
  v_dead.ev_type := coalesce($3, v_dead.ev_type);
  v_dead.ev_headers := coalesce($4, v_dead.ev_headers);
  return pgque._requeue(v_dead);
end
$$;
comment on function pgque.dlq_edit(bigint, text, text, jsonb, pgque.caller) is
  'Requeues a dead letter with another payload, type or headers (NULL: as they are): the consumer that failed it receives the message again. The message as it '
  'was is kept in the archive with outcome edited, in the same transaction. Returns the message''s id, which stays. Errors: PQ005 headers are no object; PQ008 no such dead letter; PQ011 that '
  'consumer was unsubscribed.';

create or replace function pgque.dlq_requeue_all(
  queue_name text, limit_count int default null, reason text default null, caller pgque.caller default current_user
) returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_count  int;
begin
  v_count := (
    select count(pgque._requeue(pgque._take_dead_letter(x.dl_id, caller)))
    from (
      select d.dl_id
      from pgque.dead_letter d
      where d.dl_queue_id = v_queue.queue_id and pgque._has_reason(d.dl_reason, $3)
        and exists (
          select from pgque.subscriber s
          where s.sub_queue = d.dl_queue_id and s.sub_consumer = d.dl_consumer_id and s.sub_main is null)
      order by d.dl_id
      limit case when $2 < 0 then 0 else $2 end
      for update of d skip locked
    ) x);
  perform pgque._record_action('dlq_requeue_all', v_queue.queue_name, jsonb_build_object('limit_count', $2, 'reason', $3, 'messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.dlq_requeue_all(text, int, text, pgque.caller) is
  'Requeues the oldest dead letters of a queue, at most limit_count (NULL: all), and returns their number. reason: only those with this reason, as '
  'stored or as dlq_reasons() returns it. Dead letters of unsubscribed consumers stay. Errors: PQ001 no such queue.';

-- NULL would silently delete none.
create or replace function pgque.dlq_purge(
  queue_name text, older_than interval default '30 days', reason text default null, caller pgque.caller default current_user
) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'admin');
  v_until  timestamptz := pgque.clock() - $2;
  v_count  bigint;
begin
  if $2 is null then
    perform pgque._fail('PQ005', format('dlq_purge of queue %I needs an age', v_queue.queue_name),
      'Leave out older_than for 30 days, or pass ''0'' to delete all of them.');
  end if;
  delete from pgque.dead_letter d
  where d.dl_queue_id = v_queue.queue_id and d.dl_time < v_until and not d.dl_held
    and pgque._has_reason(d.dl_reason, $3);
  get diagnostics v_count = row_count;
  perform pgque._record_action('dlq_purge', v_queue.queue_name, jsonb_build_object('older_than', $2, 'reason', $3, 'messages', v_count)) where v_count > 0;
  return v_count;
end
$$;
comment on function pgque.dlq_purge(text, interval, text, pgque.caller) is
  'Deletes the dead letters of a queue that were given up more than older_than ago, and returns their number. reason: only those with this reason, '
  'as stored or as dlq_reasons() returns it. Dead letters that drop_policy hold keeps stay. Errors: PQ001 no such queue; PQ005 older_than is NULL.';

create or replace function pgque.dlq_delete(dl_id bigint, caller pgque.caller default current_user) returns bigint
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_dead  pgque.dead_letter := pgque._take_dead_letter(dlq_delete.dl_id, caller, 'dlq_delete');
begin
  return v_dead.ev_id;
end
$$;
comment on function pgque.dlq_delete(bigint, pgque.caller) is
  'Deletes one dead letter, also a held one, and returns the id of its message. Errors: PQ008 no such dead letter.';
