-- ---------------------------------------------------------------------------
-- idempotency: a message is sent once for its key (send_idem)
-- ---------------------------------------------------------------------------

-- Nothing else knows of it but maintenance, which empties its journal.

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
  'Sends one text as a message, unless a message with the same idem_key was sent to the queue within its ttl. Returns event_id and deduped: if '
  'deduped is true, nothing was sent and event_id is the earlier message''s id. Two senders of one key wait for each other. partition_key is kept in '
  'extra1. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 idem_key is empty or longer than 1000 bytes, or ttl is not positive or above '
  '100 years; PQ013 the queue is paused; 40001 the key was used since a transaction began that is not READ COMMITTED.';

create or replace function pgque.send_idem(
  queue text, type text, payload jsonb, idem_key text,
  ttl interval default '1 hour', partition_key text default null,
  out event_id bigint, out deduped boolean
)
language sql as $$ select * from pgque.send_idem($1, $2, $3::pg_catalog.text, $4, $5, $6) $$;
comment on function pgque.send_idem(text, text, jsonb, text, interval, text) is
  'Sends one JSON value as a message, unless a message with the same idem_key was sent to the queue within its ttl. Returns event_id and deduped: if '
  'deduped is true, nothing was sent and event_id is the earlier message''s id. Two senders of one key wait for each other. partition_key is kept in '
  'extra1. Errors: PQ001 no such queue; PQ003 the queue is full; PQ005 idem_key is empty or longer than 1000 bytes, or ttl is not positive or above '
  '100 years; PQ013 the queue is paused; 40001 the key was used since a transaction began that is not READ COMMITTED.';

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

-- Makes the other leaf of the idempotency keys the current one once it has more than 4
-- MB.  Empties the old leaf as soon as half of its keys have expired, or the current
-- leaf is larger: so keys with a ttl of years do not keep other keys.  Keys that are
-- valid, of existing queues, are copied.  One call may do both, as in
-- _compact_journal().
create or replace function pgque._compact_idempotency() returns int
language plpgsql as $$
declare
  v_cur   int := (select j.journal_idem_cur from pgque.journal j where j.journal_id = 1);
  v_size  bigint := pg_catalog.pg_relation_size(('pgque.idempotency_' || v_cur)::regclass);
  v_old   bigint := pg_catalog.pg_relation_size(('pgque.idempotency_' || (1 - v_cur))::regclass);
  v_live  text := 'i.idem_expires > $1 and exists (select from pgque.queue q where q.queue_id = i.idem_queue)';
  v_half  boolean;
begin
  if v_size < 4194304 and v_old = 0 then
    return 0;
  end if;
  if not pgque._lock_journal(v_size) then
    return 0;
  end if;
  if (select j.journal_idem_cur from pgque.journal j where j.journal_id = 1) <> v_cur then
    return 0;
  end if;
  if v_old > 0 then
    -- Counted without the lock: the lock blocks every send_idem().
    execute pg_catalog.format('select count(*) filter (where %s) * 2 > count(*) from pgque.idempotency_%s i', v_live, 1 - v_cur)
    into v_half using pgque.clock();
    if v_half and v_size < v_old then
      return 0;
    end if;
    execute pg_catalog.format('lock table pgque.idempotency_%s in access exclusive mode nowait', 1 - v_cur);
    execute pg_catalog.format(
      'insert into pgque.idempotency select i.idem_queue, i.idem_key, i.idem_n, i.idem_ev_id, i.idem_expires, %s from pgque.idempotency_%s i where %s on conflict do nothing',
      v_cur, 1 - v_cur, v_live)
    using pgque.clock();
    execute pg_catalog.format('truncate pgque.idempotency_%s', 1 - v_cur);
  end if;
  update pgque.journal j
  set journal_idem_cur = case when v_size < 4194304 then v_cur else 1 - v_cur end, journal_emptied_at = pg_catalog.clock_timestamp()
  where j.journal_id = 1;
  return 1;
exception
  when lock_not_available then
    return 0;
end
$$;
