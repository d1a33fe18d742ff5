-- ---------------------------------------------------------------------------
-- ordinary: the usual delivery in one statement
-- ---------------------------------------------------------------------------

-- Most deliveries need none of what makes receive() long: the consumer has received its
-- last batch, nothing waits for it in the retry queue, and no option of the queue chooses
-- from its messages.  These deliveries are ordinary.  receive() then runs three statements:
--   1. _poll_L finds the consumer, and locks it if an ordinary delivery may follow.  If
--      there is nothing to do, it locks nothing, and the call ends.
--   2. a dynamic statement calls _ordinary_N_L, or _mapped_N_L if the consumer is in a
--      window that is read by its map (see _map_window).
--   3. In that function, one statement reads the position, opens the window, reads the
--      messages, and stores the new position.
-- L is the leaf of the journal that is written, N the queue.  The text of these functions
-- is fixed, so a session plans them once.
--
-- If a delivery is not ordinary, these statements change nothing, and receive() goes the
-- general way.  _ordinary_sql() and the conditions of statement 3 say what is ordinary.
--
-- Why the consumer is locked by a statement before the one that delivers: a statement
-- that waited for a lock reads its tables as they were before, and would deliver what
-- another worker has just received.  So statement 3 also checks again which leaf is
-- written.  Each function uses this leaf only: a session that used the other one would
-- keep it from being emptied.
--
-- Why probes are scalar subqueries with a limit: EXISTS in their place lets the planner read
-- the rows of all consumers into a hash table.
--
-- Why FROM has commas in place of JOIN: a plan of a session keeps a list of all columns for
-- each JOIN.  That made a third of its memory.
--
-- Why bitmap scans are off: a plan that is made while the journal has two rows of a consumer
-- would sort them, and a session keeps the plan while they become thousands.

-- Returns whether this transaction may take the ordinary way, in a receive() and in an ack().
-- Tests switch it off: set pgque.ordinary = off.
create or replace function pgque._may_be_ordinary() returns boolean
language sql stable as $$
  select not pgque._old_snapshot() and coalesce(pg_catalog.current_setting('pgque.ordinary', true), '') <> 'off'
$$;

-- Returns the newest position of a subscriber in a leaf, as a query; no row if another leaf
-- is written.
--   * tick, fresh: where the next window begins, and whether it is a new one
--   * open: batches that may be open, without the newest one if that is closed
--   * p_more: more columns of p
create or replace function pgque._newest_sql(p_leaf int, p_sub text, p_more text default '') returns text
language sql immutable as $$
  select pg_catalog.format(
    'select p.pos_lapse, case when p.pos_fresh > 0 and p.pos_last_id is null then p.pos_next_tick else p.pos_tick end as tick,'
    ' p.pos_next_tick is null or p.pos_fresh > 0 and p.pos_last_id is null as fresh,'
    ' case when (select z.set_batch from pgque.settled_%1$s z where z.set_batch = p.pos_batch and z.set_ev_id = 0 and z.set_what = ''closed'') is null then p.pos_open'
    ' else pg_catalog.array_remove(p.pos_open, p.pos_batch) end as open, p.pos_due%3$s'
    ' from pgque.position_%1$s p'
    ' where p.pos_sub = %2$s and p.leaf = (select j.journal_cur from pgque.journal j where j.journal_id = 1)'
    ' order by p.pos_seq desc limit 1', p_leaf, p_sub, p_more)
$$;

-- Returns the condition that a consumer has nothing but its window to do: no lease may
-- have expired, and no batch of a consumer on its own is open.  p is its newest position.
create or replace function pgque._quiet_sql() returns text
language sql immutable as $$
  select '(p.pos_lapse <= v_now) is not true and (p_worker is not null or coalesce(pg_catalog.cardinality(p.open), 0) = 0)'
$$;

-- Returns the condition that the options of a queue q and of its subscriber s allow
-- ordinary deliveries.
create or replace function pgque._ordinary_sql() returns text
language sql immutable as $$
  select 'q.queue_throughput_limit = 0 and not q.queue_keyed and not q.queue_expiring'
    ' and not s.sub_keyed and not s.sub_offsets'
$$;

-- _poll_0 and _poll_1: begin a delivery.  Each reads one leaf of the journal.
--   * idle: nothing can be delivered
--   * locked: the consumer is locked, and an ordinary delivery may follow
--   * mapped: the window that it has open is read by its map
--   * sub, queue, attempts, lease: the consumer, and what its delivery needs to know
--   * looked: when it read which messages of the retry queue are due
-- All is null if the call fits no consumer, or the other leaf is written.
do $leaves$
begin
  for n in 0..1 loop
    execute pg_catalog.format(
      $template$
      create or replace function pgque._poll_%1$s(
        p_queue text, p_consumer text, p_worker text, p_caller name, p_max bigint,
        out idle boolean, out locked boolean, out mapped boolean, out sub int, out queue int, out attempts int, out lease interval,
        out looked timestamptz
      )
      language plpgsql set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $body$
      declare
        v_now  timestamptz := pgque.clock();
      begin
        looked := v_now;
        select l.quiet and l.read, h.sub_id is not null, l.mapped, l.sub_id, l.queue_id, l.queue_max_receive_attempts, l.queue_visibility_timeout
        into idle, locked, mapped, sub, queue, attempts, lease
        from (
          select s.sub_id, s.sub_role, q.queue_id, q.queue_max_receive_attempts, q.queue_visibility_timeout, %4$s as ordinary,
            %3$s and (
              select r.ev_owner from pgque.retry_queue r
              where r.ev_owner = s.sub_id and r.ev_retry_after >= pgque._due_from(p.pos_due, v_now) and r.ev_retry_after <= v_now
              limit 1) is null as quiet,
            -- The sequence has the newest tick (see _store_tick).  So a poll reads no table of ticks.
            p.fresh and pg_catalog.pg_sequence_last_value(q.queue_tick_seq) <= p.tick as read,
            not p.fresh and p.events > pgque._most_unmapped(p_max) as mapped
          from pgque.queue q,
            pgque._subscriber_by_name(q.queue_id, p_consumer) s,
            lateral (%2$s) p
          where q.queue_name = p_queue collate pg_catalog."default" and not q.queue_restored
            and s.sub_role = case when p_worker is null then 'normal' else 'pool' end
            and (p_caller = current_user collate pg_catalog."C" or pg_catalog.pg_has_role(p_caller, 'pgque_reader', 'usage') or pgque._may(p_caller, 'consume', q.queue_id))
          offset 0
        ) l
        left join lateral (
          -- After a wait for the lock, the conditions hold for the row as it is then.
          select s.sub_id from pgque.subscriber s
          where l.quiet and l.ordinary and l.read is not true
            and s.sub_id = l.sub_id and s.sub_role = l.sub_role and not s.sub_keyed and not s.sub_offsets
          for no key update
        ) h on true;
      end
      $body$
      $template$, n, pgque._newest_sql(n, 's.sub_id', ', p.pos_next_event_seq - p.pos_event_seq as events'), pgque._quiet_sql(), pgque._ordinary_sql());
  end loop;
end
$leaves$;

-- Returns the rows e of a window w that an ordinary delivery may deliver, as what follows
-- "from w" in its statement.
--   * All rows of the window: as in _xids(), it has the transactions from lo to hi, and each
--     one that ran at its first tick and is visible in its last one.
--   * Or, with p_mapped, those at the next places of its map; as in _map_conditions().  The
--     statement has locked the tables, so that their files are those that it reads.
create or replace function pgque._next_rows_sql(p_queue_id int, p_mapped boolean) returns text
language sql immutable as $$
  select ', lateral ('
    || case
      when p_mapped then
        'select min(c.map_lo[1]), max(c.map_hi[1]), min(c.map_lo[2]), max(c.map_hi[2]), min(c.map_lo[3]), max(c.map_hi[3])'
        ' from (select distinct on (m.map_id_hi) m.map_lo, m.map_hi from pgque.window_map m'
        ' where m.map_queue = ' || p_queue_id || ' and m.map_from = w.tick and m.map_to = w.next_tick and m.map_valid and m.map_filenodes = (select array['
        || pg_catalog.string_agg(pg_catalog.format('pg_catalog.pg_relation_filenode(%L::regclass)', t.name), ', ' order by t.n)
        || ']) and m.map_id_hi > coalesce(w.done_id, 0) order by m.map_id_hi limit p_max / 25 + 3) c'
        ') x (lo_0, hi_0, lo_1, hi_1, lo_2, hi_2)'
      else
        'select pg_catalog.pg_snapshot_xmax(w.snapshot), pg_catalog.pg_snapshot_xmax(w.next_snapshot)'
        ' union all select x.xid, (x.xid::text::bigint + 1)::text::xid8 from pg_catalog.pg_snapshot_xip(w.snapshot) x (xid)'
        ' where pg_catalog.pg_visible_in_snapshot(x.xid, w.next_snapshot)'
        ') x (lo, hi)'
    end
    || ', lateral ('
    || pg_catalog.string_agg(
      'select e.* from ' || t.name || ' e where '
      || case
        when p_mapped then pg_catalog.format('e.ctid >= x.lo_%1$s and e.ctid <= x.hi_%1$s and not pg_catalog.pg_visible_in_snapshot(e.ev_txid, w.snapshot)', t.n)
        else 'e.ev_txid >= x.lo and e.ev_txid < x.hi'
      end
      || ' and pg_catalog.pg_visible_in_snapshot(e.ev_txid, w.next_snapshot) and (e.ev_owner is null or e.ev_owner = p_sub) and e.ev_id > coalesce(w.done_id, 0)',
      ' union all ' order by t.n)
    || ' offset 0) e'
  from (select n, 'pgque.event_' || p_queue_id || '_' || n as name from pg_catalog.generate_series(0, 2) n) t
$$;

-- Creates the functions for the ordinary deliveries of a queue, two for each leaf of the
-- journal.  The caller has the subscriber's lock, and passes what _poll_L returned.  They
-- return nothing, and change nothing, if the delivery is not ordinary or its window is
-- empty.
--   * _ordinary_N_L reads all rows of a window.
--   * _mapped_N_L reads the next rows of a big window by its map.  Without a map it returns
--     nothing; the general way makes one.
--
-- The window ends as in _open_window(): at the furthest of the next 100 ticks up to the
-- number of events asked for, at least at the next one.  One message more than asked for
-- is read, to know whether the window has more.
create or replace function pgque._create_ordinary(p_queue_id int) returns void
language plpgsql as $function$
declare
  v_mapped  boolean;
  v_ticks   text;
  v_more    text :=
    ', p.pos_seq, p.pos_high, p.pos_skipped, p.pos_prune, p.pos_paid, p.pos_last_batch, p.pos_next_tick, p.pos_next_snapshot, p.pos_next_event_seq,'
    ' case when p.pos_fresh > 0 and p.pos_last_id is null then p.pos_next_snapshot else p.pos_snapshot end as snapshot,'
    ' case when p.pos_fresh > 0 and p.pos_last_id is null then p.pos_next_event_seq else p.pos_event_seq end as event_seq,'
    ' case when p.pos_fresh > 0 then p.pos_last_id else p.pos_done_id end as done_id,'
    -- A worker that has a message for the last time receives nothing besides (_may_be_poison).
    ' (select r.ev_owner from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_worker = p_worker and r.ev_batch is not null'
    ' and r.ev_receives > coalesce(r.ev_retry, 0) + 1 and r.ev_receives >= p_attempts and r.ev_retry_after + ''0'' > v_now limit 1) is not null as alone';
begin
  select pg_catalog.string_agg(pg_catalog.format('select tick_id, tick_snapshot, tick_event_seq from pgque.tick_%s_%s', p_queue_id, n), ' union all ' order by n)
  into v_ticks
  from pg_catalog.generate_series(0, 2) n;
  foreach v_mapped in array array[false, true] loop
    for n in 0..1 loop
      perform pgque._compile(pg_catalog.format(
        $template$
        create or replace function pgque.%7$s_%1$s_%2$s(
          p_sub int, p_max bigint, p_bytes bigint, p_worker text, p_lease interval, p_attempts int, p_queue text, p_looked timestamptz
        ) returns setof pgque.delivery
        language plpgsql set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $body$
        declare
          v_now    timestamptz := pgque.clock();
          v_until  timestamptz := case when p_worker is null then 'infinity' else v_now + p_lease end;
          v_span   bigint := pgque._span(p_max, p_worker);
        begin
          return query
          with w as materialized (
            select p.pos_seq, p.pos_high, p.pos_skipped, p.pos_prune, p.pos_lapse, p.pos_paid, p.pos_due, p.open, p.tick, p.snapshot, p.event_seq, p.done_id,
              case when p.fresh then n.tick_id else p.pos_next_tick end as next_tick,
              case when p.fresh then n.tick_snapshot else p.pos_next_snapshot end as next_snapshot,
              case when p.fresh then n.tick_event_seq else p.pos_next_event_seq end as next_event_seq,
              -- as in _new_batch_id()
              (greatest((p.pos_last_batch >> 20) + 1, ((extract(epoch from pg_catalog.clock_timestamp()) - 1735689600) * 4000)::bigint) << 20) | (p_sub & 1048575) as token
            from (%3$s) p
            left join lateral (
              select t.tick_id, t.tick_snapshot, t.tick_event_seq
              -- With a condition in each of the three parts, all ticks would be sorted.
              from (select t.* from (%4$s) t where t.tick_id > p.tick order by t.tick_id limit 100) t
              order by t.tick_event_seq <= p.event_seq + v_span desc, case when t.tick_event_seq <= p.event_seq + v_span then - t.tick_id else t.tick_id end
              limit 1
            ) n on p.fresh
            where not p.alone and %5$s
              -- A consumer that was moved back may find an event and its retry in one window.
              and (p.tick < p.pos_high) is not true
              and (pg_catalog.cardinality(p.open) >= p.pos_prune) is not true
              and case when p.fresh then n.tick_event_seq else p.pos_next_event_seq end - p.event_seq %8$s pgque._most_unmapped(p_max)
          ),
          m as materialized (
            select e.ev_id, e.ev_key, e.ev_expires, e.ev_data, e.ev_bytes, e.ev_headers, e.ev_type, e.ev_retry, e.ev_time,
              e.ev_extra1, e.ev_extra2, e.ev_extra3, e.ev_extra4, e.ev_error
            from w%6$s
            order by e.ev_id
            limit p_max + 1
          ),
          d as (
            insert into pgque.position_%2$s (
              pos_sub, pos_seq, pos_time, pos_tick, pos_snapshot, pos_event_seq, pos_next_tick, pos_next_snapshot, pos_next_event_seq, pos_done_id,
              pos_last_id, pos_batch, pos_last_batch, pos_done_count, pos_high, pos_skipped, pos_worker, pos_until, pos_fresh, pos_shelf,
              pos_open, pos_prune, pos_lapse, pos_paid, pos_due)
            select p_sub, w.pos_seq + 1, v_now, w.tick, w.snapshot, w.event_seq, w.next_tick, w.next_snapshot, w.next_event_seq, w.done_id,
              c.last_id, w.token, w.token, least(c.n, p_max), w.pos_high, w.pos_skipped, p_worker, v_until, 1, 0,
              w.open || w.token, coalesce(w.pos_prune, 64),
              case when p_worker is null then w.pos_lapse else least(w.pos_lapse, v_until) end, w.pos_paid,
              pgque._due_after(w.pos_due, p_looked)
            from (
              select count(*) as n, case when count(*) > p_max then (pg_catalog.array_agg(m.ev_id))[p_max] end as last_id,
                count(*) filter (where m.ev_key is not null or m.ev_expires is not null) as optional,
                sum(pgque._size(m.ev_data, m.ev_bytes, m.ev_headers)) filter (where p_bytes is not null) as bytes
              from m
            ) c, w
            -- The first messages with a key or a ttl may not be noted in the queue's row yet.
            where c.n > 0 and c.optional = 0 and (c.bytes > p_bytes) is not true
            returning pos_batch, pos_last_id
          )
          -- As above, m is read in its order: there is one row of d, and no other way to join it.
          select m.ev_id, d.pos_batch, m.ev_type, m.ev_data, coalesce(m.ev_retry, 0), m.ev_time, m.ev_extra1, m.ev_extra2, m.ev_extra3, m.ev_extra4,
            m.ev_headers, m.ev_key, m.ev_bytes, coalesce(m.ev_retry, 0) + 1, m.ev_error, m.ev_expires, p_queue
          from d, m
          where (m.ev_id > d.pos_last_id) is not true;
        end
        $body$
        $template$, p_queue_id, n, pgque._newest_sql(n, 'p_sub', v_more), v_ticks, pgque._quiet_sql(), pgque._next_rows_sql(p_queue_id, v_mapped),
        case when v_mapped then '_mapped' else '_ordinary' end, case when v_mapped then '>' else '<=' end));
    end loop;
  end loop;
end
$function$;

-- _done_0 and _done_1: acknowledge a batch that was delivered from the log, in one
-- statement.  Each uses one leaf of the journal.  Returns false, and changes nothing, if
-- the batch is not there, was moved to the retry queue, or is closed.  The caller has the
-- batch's lock.
do $leaves$
begin
  for n in 0..1 loop
    execute pg_catalog.format(
      $template$
      create or replace function pgque._done_%1$s(p_batch bigint, p_sub int) returns boolean
      language plpgsql as $body$
      begin
        insert into pgque.settled_%1$s (set_batch, set_what)
        select p_batch, 'closed'
        from pgque.position_%1$s p
        where p.pos_batch = p_batch and p.pos_sub + 0 = p_sub and p.pos_fresh > 0 and p.pos_shelf = 0
          and (select j.journal_cur from pgque.journal j where j.journal_id = 1) = %1$s
          and (select z.set_batch from pgque.settled_%1$s z where z.set_batch = p_batch and z.set_ev_id = 0 and z.set_what = 'moved') is null
        limit 1
        on conflict do nothing;
        return found;
      end
      $body$
      $template$, n);
  end loop;
end
$leaves$;
