-- ---------------------------------------------------------------------------
-- lease: which batches are open, and which outcomes they have
-- ---------------------------------------------------------------------------

-- A delivery is one row in the journal of positions.  It records what was delivered, to
-- which worker, until when, and so where the next delivery begins.  That a batch is
-- closed, or that a message of it has its outcome, is a row in the journal of settled
-- messages.  So neither is updated, and workers need no row of their own: their names
-- may change at any time.
--
-- A consumer on its own is one worker without a name whose lease has no end.  A
-- subconsumer is a worker whose lease has no end either.
--
-- The log is for first deliveries.  A message that is redelivered (after an expired
-- lease, a nack or a release) is in the retry queue, and is leased from there.
-- ev_retry_after is when it may be delivered, ev_batch its last batch.  A delivery
-- overwrites ev_batch, and from then on the old batch id is no longer valid.  The
-- exception are consumers that are read by offsets: see _pump_owners().
--
-- Locks:
--   * Deliveries of one consumer lock the subscriber's row.
--   * Outcomes of a pool's batch lock the batch by an advisory lock on its id.  The
--     holder also has a shared lock for the queue, whose exclusive form locks all
--     batches of the queue.  Code that holds the subscriber's row only tries these
--     locks.
--   * All other batches have no lock of their own: the subscriber's row is locked.

-- Returns the consumer whose bits a batch id carries, or null.  A subconsumer's batch that
-- is open since 0.5 has the subconsumer's bits.
create or replace function pgque._batch_owner(p_batch bigint) returns pgque.subscriber
language plpgsql as $$
declare
  v_sub  pgque.subscriber;
begin
  select s.* into v_sub from pgque.subscriber s where (s.sub_id & 1048575) = (p_batch & 1048575)::int;
  if v_sub.sub_main is not null then
    select s.* into v_sub from pgque.subscriber s where s.sub_id = v_sub.sub_main;
  end if;
  return v_sub;
end
$$;

create or replace function pgque._no_batch(p_batch bigint) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ012', pg_catalog.format('batch not found: %s', coalesce(p_batch::text, 'null')),
    'Receive again. The batch was finished already, another worker took it over, or it never existed.');
end
$$;

-- Locks a batch for a call that gives outcomes or changes its lease.  Calls that lock
-- all batches of the queue wait meanwhile.  A batch that belongs to no pool is locked
-- with its consumer.  Returns false if the consumer no longer exists.  The caller reads
-- the batch's state in a later statement, which sees what the holder before it did.
create or replace function pgque._lock_batch(p_sub pgque.subscriber, p_batch bigint) returns boolean
language plpgsql as $$
begin
  if p_sub.sub_role = 'pool' then
    -- An expression, since a statement costs more.
    return pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtext('pgque.batches'), p_sub.sub_queue) is not null
      and pg_catalog.pg_advisory_xact_lock(p_batch) is not null;
  end if;
  perform from pgque.subscriber s where s.sub_id = p_sub.sub_id for no key update;
  return found;
end
$$;

-- Tries to lock many batches at once, and returns those that it locked: all of them
-- with one lock, or, if another session works with one of them, at most p_most of them
-- one by one; null: as many as half of the server's room for locks.  The caller holds
-- the consumer's lock.
create or replace function pgque._try_lock_batches(p_sub pgque.subscriber, p_batches bigint[], p_most int default 200) returns bigint[]
language plpgsql as $$
begin
  if p_sub.sub_role <> 'pool'
    or pg_catalog.cardinality(p_batches) > 3 and pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('pgque.batches'), p_sub.sub_queue)
  then
    return p_batches;
  end if;
  return array(
    select b.id
    from pg_catalog.unnest(p_batches) with ordinality b (id, n)
    where b.n <= coalesce(p_most, (select pgque._lock_room() / 2)) and pg_catalog.pg_try_advisory_xact_lock(b.id)
    order by b.n);
end
$$;

-- Returns the delivery of a batch, or null.
create or replace function pgque._lease(p_sub int, p_batch bigint) returns pgque.position
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_position  pgque.position;
begin
  -- Both leaves in one statement: the row may move from one to the other.
  select p.* into v_position from pgque.position p where p.pos_batch = p_batch and p.pos_sub + 0 = p_sub limit 1;
  if not found and pgque._old_snapshot() then
    -- The snapshot may show the row in neither leaf: then this fails with 40001.
    perform pgque._journal_leaf();
  end if;
  return v_position;
end
$$;

-- Returns the state of batches that were delivered, in the order of the array:
--   * lease: the delivery
--   * place: where its messages without an outcome are: log, or retry for the retry
--     queue.  Null: the batch is closed.
--   * settled: how many of its messages have an outcome
--   * extended, until: how often its lease was extended, and when it ends
--   * lost: whether its worker got the answer that a message is lost
-- A batch keeps the place retry when its last message there was taken away: whether it
-- is open says _is_open().
create or replace function pgque._states(
  p_sub int, p_batches bigint[],
  out token bigint, out lease pgque.position, out place text, out settled bigint, out extended bigint, out until timestamptz, out lost boolean
) returns setof record
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_count  int;
begin
  if pg_catalog.cardinality(p_batches) > 0 is not true then
    return;
  end if;
  return query
  -- Both leaves in one statement: a row may move from one to the other, and be in both.
  select b.id, l.row,
    case when w.closed then null when (l.row).pos_fresh > 0 and not w.moved then 'log' else 'retry' end,
    c.settled, c.extended, coalesce(c.until, (l.row).pos_until), w.lost
  from pg_catalog.unnest(p_batches) with ordinality b (id, n)
  cross join lateral (select p as row from pgque.position p where p.pos_batch = b.id and p.pos_sub + 0 = p_sub limit 1) l
  cross join lateral (
    select coalesce(bool_or(s.set_what = 'closed'), false) as closed, coalesce(bool_or(s.set_what = 'moved'), false) as moved, coalesce(bool_or(s.set_what = 'lost'), false) as lost
    from pgque.settled s
    where s.set_batch = b.id and s.set_ev_id = 0
  ) w
  -- A row for each message that has an outcome: of a closed batch they are not read.
  cross join lateral (
    select count(distinct s.set_ev_id) filter (where s.set_what = 'outcome') as settled, coalesce(max(s.set_ev_id) filter (where s.set_what = 'extended'), 0) as extended, max(s.set_until) as until
    from pgque.settled s
    where s.set_batch = b.id and s.set_ev_id > 0 and not w.closed
  ) c
  order by b.n;
  get diagnostics v_count = row_count;
  if v_count < pg_catalog.cardinality(p_batches) and pgque._old_snapshot() then
    -- The snapshot may show a delivery in neither leaf: then this fails with 40001.
    perform pgque._journal_leaf();
  end if;
end
$$;

-- Returns the batches of a list that are still open.  Of a pool, those that it has to
-- find by its position: the others are found by their messages in the retry queue.
create or replace function pgque._still_open(p_sub pgque.subscriber, p_batches bigint[]) returns bigint[]
language sql as $$
  select array(select s.token from pgque._states(p_sub.sub_id, p_batches) s where s.place = 'log' or s.place = 'retry' and p_sub.sub_role <> 'pool')
$$;

-- Records something about a batch: about messages, or about all of it (see
-- pgque.settled).  Returns the ids that were new, sorted; null if there is none.  A
-- transaction with an old snapshot writes to both leaves, and gets 40001 if a row that it
-- does not see is there.
create or replace function pgque._record(
  p_batch bigint, p_what pgque.settled_what, p_ids bigint[] default '{0}', p_until timestamptz default null, p_leaf int default null
) returns bigint[]
language plpgsql as $$
declare
  v_leaves  int[] := pgque._leaves_for(coalesce(p_leaf, pgque._journal_leaf()));
  v_new     bigint[];
begin
  if pg_catalog.cardinality(p_ids) * pg_catalog.cardinality(v_leaves) = 1 then
    insert into pgque.settled (set_batch, set_what, set_ev_id, set_until, leaf) values (p_batch, p_what, p_ids[1], p_until, v_leaves[1]) on conflict do nothing;
    return case when found then p_ids end;
  end if;
  with new as (
    insert into pgque.settled (set_batch, set_what, set_ev_id, set_until, leaf)
    select p_batch, p_what, i.id, p_until, l.leaf
    from pg_catalog.unnest(p_ids) i (id)
    cross join pg_catalog.unnest(v_leaves) l (leaf)
    on conflict do nothing
    returning set_ev_id
  )
  select pg_catalog.array_agg(g.id order by g.id) into v_new
  from (select n.set_ev_id as id from new n group by 1 having count(*) = pg_catalog.cardinality(v_leaves)) g;
  return v_new;
end
$$;

-- Returns the open batches of a consumer whose messages are in the log.
create or replace function pgque._open_batches(p_sub int, out token bigint, out lease pgque.position, out settled bigint, out until timestamptz)
returns setof record
language sql as $$
  select s.token, s.lease, s.settled, s.until from pgque._states(p_sub, (pgque._position(p_sub)).pos_open) s where s.place = 'log'
$$;

-- Returns the open batches of a consumer whose lease expired and whose messages nobody
-- received since.
create or replace function pgque._expired_batches(p_sub int, p_pos pgque.position, out token bigint, out lease pgque.position, out settled bigint, out until timestamptz)
returns setof record
language plpgsql as $$
begin
  -- No batch is read before the first lease may have expired.
  if p_pos.pos_lapse <= pgque.clock() then
    return query select h.* from pgque._open_batches(p_sub) h where h.until <= pgque.clock();
  end if;
end
$$;

-- Returns the open batch of a consumer that reads on its own, or of a subconsumer: it
-- is redelivered.  The batch is open until it is finished, even if each of its messages
-- has its outcome.  p_leaf is the current leaf.  If it has the delivery, it has the
-- outcomes too, and the other leaf, which may be about to be emptied, is not read.
create or replace function pgque._open_batch_of(p_sub pgque.subscriber, p_pos pgque.position, p_worker text, p_leaf int default null) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_closed  boolean;
begin
  if p_sub.sub_role = 'pool' or pg_catalog.cardinality(p_pos.pos_open) > 0 is not true then
    return null;
  elsif p_worker is null and p_pos.leaf = p_leaf and p_pos.pos_open = array[p_pos.pos_batch] then
    if p_leaf = 0 then
      v_closed := exists (select from pgque.settled_0 s where s.set_batch = p_pos.pos_batch and s.set_ev_id = 0 and s.set_what = 'closed');
    else
      v_closed := exists (select from pgque.settled_1 s where s.set_batch = p_pos.pos_batch and s.set_ev_id = 0 and s.set_what = 'closed');
    end if;
    return case when not v_closed then p_pos.pos_batch end;
  end if;
  -- One statement for all: a list of a consumer with subconsumers has up to 64 batches
  -- that are closed.
  return (
    select s.token from pgque._states(p_sub.sub_id, p_pos.pos_open) s
    where s.place is not null and (p_worker is null or (s.lease).pos_worker = p_worker)
    limit 1);
end
$$;

-- Returns where a consumer stands: before its open batch if it reads on its own, else
-- after the newest delivery.
create or replace function pgque._current_position(p_sub pgque.subscriber, p_pos pgque.position) returns pgque.position
language plpgsql as $$
begin
  if p_sub.sub_role = 'normal' and p_pos.pos_batch is not null and pgque._open_batch_of(p_sub, p_pos, null) = p_pos.pos_batch then
    return p_pos;
  end if;
  return pgque._next_from(p_pos);
end
$$;

-- Returns the position from which on a subscriber needs messages: its own, or that of
-- the oldest of its open batches.  A subscriber that received all of a window has
-- passed it, even before its next call.
create or replace function pgque._oldest_needed_position(p_sub int) returns pgque.position
language plpgsql as $$
declare
  v_pos    pgque.position := pgque._next_from(pgque._position(p_sub));
  v_lease  pgque.position;
begin
  if pg_catalog.cardinality(v_pos.pos_open) > 0 then
    select (h.lease).* into v_lease
    from pgque._open_batches(p_sub) h
    where (h.lease).pos_tick < v_pos.pos_tick
    order by (h.lease).pos_tick
    limit 1;
    if found then
      return v_lease;
    end if;
  end if;
  return v_pos;
end
$$;

-- Returns the condition that a row e has its outcome in a batch.  It is a probe of the
-- index: EXISTS lets the planner compare each row with all outcomes of the batch.  Null for
-- no batch.
create or replace function pgque._has_outcome_sql(p_batch bigint) returns text
language sql immutable strict as $$
  select pg_catalog.format(
    '(select s.set_batch from pgque.settled s where s.set_batch = %s and s.set_ev_id = e.ev_id and s.set_what = ''outcome'' limit 1) is not null', p_batch)
$$;

-- Returns a query for the rows of a batch that came from the log and have no outcome.
create or replace function pgque._unsettled_sql(p_sub pgque.subscriber, p_lease pgque.position, p_and text default '', p_places text[] default null) returns text
language sql as $$
  select pgque._slice_sql(p_sub, p_lease, p_and || ' and not (' || pgque._has_outcome_sql(p_lease.pos_batch) || ')', p_places => p_places)
$$;

-- Returns whether a worker's batch in the retry queue still has all of its messages,
-- apart from those that were settled one by one.  It has not if some of them were
-- delivered to another worker or removed, or are just being taken.  Locks those messages.
-- The caller holds the batch's lock.
create or replace function pgque._has_all_messages(p_sub int, p_batch bigint) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_state    record;
  v_waiting  bigint;
begin
  select s.* into v_state from pgque._states(p_sub, array[p_batch]) s;
  if v_state.place = 'log' or (select s.sub_role from pgque.subscriber s where s.sub_id = p_sub) <> 'pool' then
    return true;   -- no other worker can have a part of it
  end if;
  select count(*) into v_waiting
  from (
    select from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_batch = p_batch order by r.ev_id for update skip locked
  ) r;
  return not v_state.lost
    and v_waiting >= case when (v_state.lease).pos_fresh > 0 then (v_state.lease).pos_done_count else (v_state.lease).pos_shelf end - v_state.settled;
end
$$;

-- Acknowledges a whole batch.  Returns 0 if it is not open, or not whole.
--
-- To record that the batch is closed is not enough: its messages may be in the retry
-- queue, and would be delivered to others.  And a worker's batch there may have been
-- delivered to others in part: to acknowledge the rest would tell its worker that all is
-- done.  Such a batch has nothing that could be closed: it is open as long as messages
-- wait under its id.
create or replace function pgque._close(p_sub pgque.subscriber, p_batch bigint) returns int
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_place  text;
begin
  if not pgque._lock_batch(p_sub, p_batch) then
    return 0;
  end if;
  select s.place into v_place from pgque._states(p_sub.sub_id, array[p_batch]) s;
  if v_place is null or not pgque._has_all_messages(p_sub.sub_id, p_batch) then
    return 0;
  end if;
  delete from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch;
  if p_sub.sub_role = 'pool' and v_place = 'retry' then
    return found::int;
  end if;
  if pgque._old_snapshot() then
    -- This snapshot may not see that the batch was moved: the primary key finds it out.
    perform pgque._record(p_batch, 'moved');
  end if;
  return (pgque._record(p_batch, 'closed') is not null)::int;
end
$$;

-- Moves the messages of a batch that have no outcome from the log to the retry queue,
-- under the same batch id.  They may be delivered from p_due on.  With p_token they get
-- another batch id and worker instead, or none if it is 0, with p_deliveries more
-- deliveries.  Returns how many there are.  The caller holds the batch's lock.
create or replace function pgque._move_to_retry(
  p_sub pgque.subscriber, p_lease pgque.position, p_due timestamptz, p_token bigint default null, p_worker text default null, p_deliveries int default 0
) returns bigint
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_token  bigint := nullif(coalesce(p_token, p_lease.pos_batch), 0);
  v_rows   text := pgque._renewed_sql(p_sub.sub_queue, pgque._unsettled_sql(p_sub, p_lease));
  v_ids    bigint[];
begin
  execute pg_catalog.format(
    'with moved as ('
    'insert into pgque.retry_queue select (pgque._as_retry(e, $1, coalesce(e.ev_retry, 0) + 1 + $5, $2, $3, $4)).* from (%s) e'
    -- If the consumer was moved back, the message may already be in the retry queue.
    -- Then this batch takes it over from the one that has it there.
    ' on conflict (ev_owner, ev_id, ev_queue) do update'
    ' set (ev_retry_after, ev_receives, ev_batch, ev_worker) = (excluded.ev_retry_after, excluded.ev_receives, excluded.ev_batch, excluded.ev_worker)'
    ' returning ev_id) select pg_catalog.array_agg(m.ev_id) from moved m', v_rows)
  into v_ids
  using p_sub, p_due, v_token, case when v_token is not null then coalesce(p_worker, p_lease.pos_worker) end, p_deliveries;
  if pgque._old_snapshot() then
    -- This snapshot may not see that the batch was closed, or that a message has its
    -- outcome: the primary key finds it out.  The rows for this check are undone.
    begin
      perform pgque._record(p_lease.pos_batch, 'closed'), pgque._record(p_lease.pos_batch, 'outcome', v_ids);
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        null;
    end;
  end if;
  perform pgque._record(p_lease.pos_batch, 'moved');
  return coalesce(pg_catalog.cardinality(v_ids), 0);
end
$$;

-- Checks every batch of a consumer that may be open.  If the lease expired, messages
-- without an outcome go to the retry queue and may be delivered at once.  Until one is
-- delivered, the old batch id stays valid.  A batch that its worker is just finishing
-- counts as alive.
create or replace function pgque._collect_expired(p_sub pgque.subscriber, p_pos pgque.position, p_now timestamptz) returns pgque.position
language plpgsql as $$
declare
  v_open   bigint[] := '{}';
  v_lapse  timestamptz;
  v_tried  int := 0;
  v_held   record;
  v_state  record;
begin
  for v_held in select h.token, h.lease, h.until from pgque._open_batches(p_sub.sub_id) h loop
    if v_held.until <= p_now and v_tried < 200 then
      -- The server has room for some thousand locks.  The next call continues.
      v_tried := v_tried + 1;
      if pgque._try_lock_batches(p_sub, array[v_held.token]) <> '{}' then
        select s.place, s.until into v_state from pgque._states(p_sub.sub_id, array[v_held.token]) s;
        continue when v_state.place is distinct from 'log';
        v_held.until := v_state.until;
        if v_held.until <= p_now then
          perform pgque._move_to_retry(p_sub, v_held.lease, p_now);
          continue;
        end if;
      else
        v_held.until := p_now + interval '1 second';
      end if;
    end if;
    v_open := v_open || v_held.token;
    v_lapse := least(v_lapse, v_held.until);
  end loop;
  if p_sub.sub_role <> 'pool' then
    v_open := pgque._still_open(p_sub, p_pos.pos_open);   -- with those from the retry queue, which are redelivered
  end if;
  p_pos.pos_open := v_open;
  p_pos.pos_prune := 2 * pg_catalog.cardinality(v_open) + 64;
  p_pos.pos_lapse := v_lapse;
  return p_pos;
end
$$;

-- Copies the open batches of a consumer to the current leaf, if its newest position is
-- there: the first row that a reader finds there is the position.  The caller holds the
-- subscriber's lock, so there are no new ones.  The newest is the first: its delivery may be
-- in that leaf already, as the position, and whoever finds it there looks there for its
-- outcomes (see _done_0).
create or replace function pgque._copy_leases(p_sub pgque.subscriber, p_cur int) returns void
language plpgsql as $$
declare
  v_token  bigint;
begin
  if (pgque._position_in(p_sub.sub_id, p_cur)).pos_sub is null then
    return;
  end if;
  foreach v_token in array pgque._try_lock_batches(p_sub, array(
    select o.token
    from pg_catalog.unnest((pgque._position(p_sub.sub_id)).pos_open) o (token)
    where not pgque._is_copied(p_sub.sub_id, o.token, p_cur)
    order by o.token desc), 500)
  loop
    insert into pgque.position
    select (pgque._in_leaf(l, p_cur)).* from pgque._lease(p_sub.sub_id, v_token) l where l.pos_sub is not null
    on conflict do nothing;
    insert into pgque.settled (set_batch, set_what, set_ev_id, set_until, leaf)
    select s.set_batch, s.set_what, s.set_ev_id, s.set_until, p_cur from pgque.settled s where s.set_batch = v_token
    on conflict do nothing;
  end loop;
end
$$;

-- Returns whether a leaf has all rows of a batch, or none is needed.
create or replace function pgque._is_copied(p_sub int, p_batch bigint, p_cur int) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_there  boolean := exists (select from pgque.position p where p.pos_batch = p_batch and p.pos_sub + 0 = p_sub and p.leaf = p_cur);
  v_place  text;
begin
  select s.place into v_place from pgque._states(p_sub, array[p_batch]) s;
  if not found then
    return true;
  elsif v_place is null then
    -- The row that closes a batch must be in each leaf that has its delivery.
    return not v_there or exists (select from pgque.settled s where s.set_batch = p_batch and s.set_ev_id = 0 and s.set_what = 'closed' and s.leaf = p_cur);
  end if;
  return v_there
    and not exists (
      select s.set_what, s.set_ev_id from pgque.settled s where s.set_batch = p_batch and s.leaf <> p_cur
      except
      select s.set_what, s.set_ev_id from pgque.settled s where s.set_batch = p_batch and s.leaf = p_cur);
end
$$;

-- Returns whether a batch is open.  A worker's batch in the retry queue is, as long as it
-- has a message there; any other, until it is finished.
create or replace function pgque._is_open(p_sub pgque.subscriber, p_batch bigint) returns boolean
language plpgsql set enable_seqscan = off set jit = off as $$
begin
  return exists (
    select from pgque._states(p_sub.sub_id, array[p_batch]) s
    where s.place = 'log' or s.place = 'retry' and (p_sub.sub_role <> 'pool' or exists (
      select from pgque.retry_queue r where r.ev_owner = p_sub.sub_id and r.ev_batch = p_batch)));
end
$$;
