-- ---------------------------------------------------------------------------
-- position: where consumers stand
-- ---------------------------------------------------------------------------

-- The newest row of a subscriber in one leaf, which alone it locks.  No sequential
-- scans: a plan made while the journal was short is kept while it grows.
create or replace function pgque._position_in(p_sub int, p_leaf int) returns pgque.position
language plpgsql set enable_seqscan = off as $$
declare
  v_position  pgque.position;
begin
  if p_leaf = 0 then
    select p.* into v_position from pgque.position_0 p where p.pos_sub = p_sub order by p.pos_seq desc limit 1;
  else
    select p.* into v_position from pgque.position_1 p where p.pos_sub = p_sub order by p.pos_seq desc limit 1;
  end if;
  return v_position;
end
$$;

-- The newest row of a subscriber.  The leaf that is being written is asked
-- first and the other one only if it knows nothing, so that the other one can
-- be emptied while consumers work.  The caller holds the subscriber's row
-- lock if it means to append.
create or replace function pgque._position(p_sub int, p_leaf int default null) returns pgque.position
language plpgsql set enable_seqscan = off as $$
declare
  v_leaf      int := coalesce(p_leaf, pgque._journal_leaf());
  v_position  pgque.position;
begin
  -- Compaction may move the row from the second leaf to the first between the
  -- two looks: then it is found by looking again.
  for v_try in 1..10 loop
    if v_leaf = 0 then
      select p.* into v_position from pgque.position_0 p where p.pos_sub = p_sub order by p.pos_seq desc limit 1;
    else
      select p.* into v_position from pgque.position_1 p where p.pos_sub = p_sub order by p.pos_seq desc limit 1;
    end if;
    if v_position.pos_sub is null then
      v_position := pgque._position_in(p_sub, 1 - v_leaf);
    end if;
    if v_position.pos_sub is not null then
      return v_position;
    end if;
    v_leaf := pgque._journal_leaf();
  end loop;
  -- A snapshot that is older than a compaction sees neither leaf's row.
  perform pgque._fail('serialization_failure', pg_catalog.format('the position of subscriber %s changed since this transaction began', p_sub),
    'Retry the transaction.');
end
$$;

-- A position as a row of a leaf.
create or replace function pgque._in_leaf(p_position pgque.position, p_leaf int) returns pgque.position
language plpgsql immutable as $$
begin
  p_position.leaf := p_leaf;
  return p_position;
end
$$;

-- Which leaf of the journal is written.  A transaction with an old snapshot
-- locks the answer, which keeps the journal from turning and fails with 40001 if
-- it has turned; one that can not write needs no such care.
create or replace function pgque._journal_leaf() returns int
language plpgsql as $$
declare
  v_leaf  int;
begin
  if not pgque._old_snapshot() or pg_catalog.current_setting('transaction_read_only') = 'on' then
    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1;
  else
    select j.journal_cur into v_leaf from pgque.journal j where j.journal_id = 1 for share;
  end if;
  return v_leaf;
end
$$;

-- Appends a position; the sequence number and the time are set here.  The
-- primary key stops a transaction whose snapshot does not show the newest row:
-- it gets 40001, never a second truth.  Such a transaction appends to both leaves
-- (see _leaves_for).  p_leaf is what
-- _carry_over() said, for those who use that leaf in other statements too.
create or replace function pgque._append_position(p_position pgque.position, p_leaf int default null) returns void
language plpgsql as $$
begin
  p_position.pos_seq := p_position.pos_seq + 1;
  p_position.pos_time := pgque.clock();
  p_position.leaf := coalesce(p_leaf, pgque._journal_leaf());
  insert into pgque.position select p_position.* on conflict do nothing;
  if found and pgque._old_snapshot() then
    p_position.leaf := 1 - p_position.leaf;
    insert into pgque.position select p_position.* on conflict do nothing;
  end if;
  if not found then
    perform pgque._fail('serialization_failure', pg_catalog.format('the position of subscriber %s changed since this transaction began', p_position.pos_sub),
      'Retry the transaction.');
  end if;
end
$$;

-- Brings a subscriber's position, and what is settled in its open batch, to
-- the leaf that is being written.  Whoever appends to a position without
-- closing its batch, or settles a message, does this first; compaction does it
-- for everybody else.  Returns the leaf that is complete for this subscriber
-- now, and stays so while its lock is held, even if the journal turns.
create or replace function pgque._carry_over(p_position pgque.position) returns int
language plpgsql set enable_seqscan = off as $$
declare
  v_leaf  int := pgque._journal_leaf();
begin
  if (pgque._position_in(p_position.pos_sub, v_leaf)).pos_sub is null then
    p_position.leaf := v_leaf;
    insert into pgque.position select p_position.* on conflict do nothing;
    insert into pgque.settled (set_batch, set_ev_id, set_sub, set_until, leaf)
    select s.set_batch, s.set_ev_id, s.set_sub, s.set_until, v_leaf from pgque.settled s where s.set_batch = p_position.pos_batch
    on conflict do nothing;
  end if;
  return v_leaf;
end
$$;

-- The position of a subscriber whose lock is held, with what is settled in its
-- open batch, in the leaf that _journal_leaf() named under that lock.
create or replace function pgque._carried_position(p_sub int, p_leaf int) returns pgque.position
language plpgsql set enable_seqscan = off as $$
declare
  v_position  pgque.position := pgque._position_in(p_sub, p_leaf);
begin
  if v_position.pos_sub is null then
    v_position := pgque._position(p_sub, p_leaf);
    perform pgque._carry_over(v_position);
  end if;
  return v_position;
end
$$;

-- A batch id never issued before: the subscriber's low 20 bits under a number
-- that rises with the clock in quarters of a millisecond, and by at least one.
-- A counter alone would not do: a crash, a failover or a restore can take back
-- the newest values of a counter, and an old token would then fit a new batch.
create or replace function pgque._new_batch_id(p_position pgque.position) returns bigint
language sql volatile as $$
  select (greatest(
      (p_position.pos_last_batch >> 20) + 1,
      case when p_position.pos_fresh is not null then p_position.pos_seq + 1 end,
      ((extract(epoch from pg_catalog.clock_timestamp()) - 1735689600) * 4000)::bigint) << 20)
    | (p_position.pos_sub & 1048575)
$$;

-- The subscriber whose bits a batch id carries, or null.
create or replace function pgque._batch_owner(p_batch bigint) returns pgque.subscriber
language plpgsql as $$
declare
  v_sub  pgque.subscriber;
begin
  select s.* into v_sub from pgque.subscriber s where (s.sub_id & 1048575) = (p_batch & 1048575)::int;
  return v_sub;
end
$$;

create or replace function pgque._no_batch(p_batch bigint) returns void
language plpgsql as $$
begin
  perform pgque._fail('PQ012', pg_catalog.format('batch not found: %s', coalesce(p_batch::text, 'null')),
    'It was finished already, its worker lost it to another one, or it never was.');
end
$$;
