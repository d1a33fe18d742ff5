-- ---------------------------------------------------------------------------
-- ordinary: the usual delivery in one statement
-- ---------------------------------------------------------------------------

-- Most deliveries need none of what makes receive() long: the consumer has received its
-- last batch, nothing waits for it in the retry queue, and the queue has no option that
-- chooses from messages.  Such a delivery is ordinary.  receive() then runs three
-- statements:
--   1. _poll_L finds the consumer, and locks it if an ordinary delivery may follow.  If
--      there is nothing to do, it locks nothing, and the call ends.
--   2. the call of _ordinary_N_L by a dynamic statement
--   3. in it, one statement reads the position, opens the window, reads the messages, and
--      stores the new position.
-- L is the leaf of the journal that is written, N the queue.  The text of these functions
-- is fixed, so a session plans them once.
--
-- If a delivery is not ordinary, these statements change nothing, and receive() goes the
-- general way.  Two functions below define what is ordinary, and nothing else does.
--
-- Why the consumer is locked by a statement before the one that reads: a statement that
-- waited for a lock reads its other tables as they were before, and would deliver what
-- another worker has just received.  So statement 3 also reads again which leaf is
-- written.  It uses only this leaf: whoever used the other one would keep it from being
-- emptied.
--
-- Tests switch ordinary deliveries off: set pgque.ordinary = off.

-- The probes of these texts are scalar subqueries with a limit.  EXISTS in their place
-- lets the planner read all that other consumers have there, once, into a hash table.

-- Returns a subquery p: the newest position of subscriber s in a leaf.
--   * passed: whether all of its window was delivered
--   * closed: whether its batch is finished
create or replace function pgque._newest_sql(p_leaf int) returns text
language sql immutable as $$
  select pg_catalog.format(
    '(select p.*, (p.pos_fresh > 0 and p.pos_last_id is null) is true as passed,'
    ' (select true from pgque.settled_%1$s z where z.set_batch = p.pos_batch and z.set_ev_id = 0) as closed'
    ' from pgque.position_%1$s p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1) p', p_leaf)
$$;

-- Returns the condition that a consumer has nothing but its window to do: no lease may
-- have expired, no batch of a consumer on its own is open, nothing in the retry queue is
-- due.  s is the subscriber, p its newest position.
create or replace function pgque._quiet_sql() returns text
language sql immutable as $$
  select '(p.pos_lapse <= v_now) is not true'
    ' and (s.sub_role = ''pool'' or coalesce(pg_catalog.cardinality(p.pos_open), 0) = 0 or p.closed and p.pos_open = array[p.pos_batch])'
    ' and (select true from pgque.retry_queue r where r.ev_owner = s.sub_id and r.ev_retry_after <= v_now limit 1) is null'
$$;

-- Returns the condition that a delivery is ordinary, if the consumer is quiet.  q is the
-- queue.
create or replace function pgque._ordinary_sql() returns text
language sql immutable as $$
  select 'q.queue_reader = pgque.version() and not q.queue_keyed and not q.queue_expiring and q.queue_throughput_limit = 0'
    ' and (select true from pgque.queue_option o where o.opt_queue = q.queue_id and o.opt_name in (''key'', ''ttl'') limit 1) is null'
    ' and not s.sub_keyed and not s.sub_offsets'
    -- A consumer that was moved back may find an event and its retry in one window.
    ' and (p.pos_tick < p.pos_high) is not true'
    ' and (pg_catalog.cardinality(p.pos_open) >= p.pos_prune) is not true'
    -- A worker that has a message for the last time receives nothing besides (_is_suspect).
    ' and (s.sub_role <> ''pool'' or ('
    'select true from pgque.retry_queue r where r.ev_owner = s.sub_id and r.ev_worker = p_worker and r.ev_batch is not null'
    ' and r.ev_receives > coalesce(r.ev_retry, 0) + 1 and r.ev_receives >= q.queue_max_receive_attempts and r.ev_retry_after + ''0'' > v_now limit 1) is null)'
$$;

-- _poll_0 and _poll_1: begin a delivery.  Each reads one leaf of the journal.
--   * sub, queue: the consumer and its queue; null if the call needs the general way
--   * idle: nothing can be delivered
--   * locked: the consumer is locked, and an ordinary delivery may follow
do $do$
begin
  for n in 0..1 loop
    execute pg_catalog.format(
      $template$
      create or replace function pgque._poll_%1$s(
        p_queue text, p_consumer text, p_worker text, p_caller name, out sub int, out queue int, out idle boolean, out locked boolean
      )
      language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $body$
      declare
        v_now  timestamptz := pgque.clock();
      begin
        with found as materialized (
          select f.*, (pg_catalog.pg_sequence_last_value(f.queue_tick_seq) <= f.tick) is true as read
          from (
            select s.sub_id, s.sub_role, q.queue_id, q.queue_tick_seq, %3$s as quiet, %4$s as ordinary,
              case when p.passed then p.pos_next_tick when p.pos_next_tick is null then p.pos_tick end as tick
            from pgque.queue q
            join pgque.consumer c on c.co_queue in (0, q.queue_id) and c.co_name = p_consumer collate pg_catalog."default"
            join pgque.subscriber s on s.sub_queue = q.queue_id and s.sub_consumer = c.co_id and s.sub_main is null
            join pgque.journal j on j.journal_id = 1 and j.journal_cur = %1$s
            cross join lateral %2$s
            where q.queue_name = p_queue collate pg_catalog."default" and not q.queue_restored
              and s.sub_role = case when p_worker is null then 'normal' else 'pool' end
              and (p_caller = current_user collate pg_catalog."C" or pg_catalog.pg_has_role(p_caller, 'pgque_reader', 'usage') or pgque._may(p_caller, 'consume', q.queue_id))
              and pg_catalog.current_setting('transaction_isolation') in ('read committed', 'read uncommitted')
              and pg_catalog.current_setting('transaction_read_only') = 'off'
              and coalesce(pg_catalog.current_setting('pgque.ordinary', true), '') <> 'off'
          ) f
        ),
        held as (
          select s.sub_role from pgque.subscriber s
          where s.sub_id = (select f.sub_id from found f where f.quiet and f.ordinary and not f.read)
          for no key update
        )
        select f.sub_id, f.queue_id, f.quiet and f.read, coalesce(h.sub_role = f.sub_role, false)
        into sub, queue, idle, locked
        from found f
        left join held h on true;
      end
      $body$
      $template$, n, pgque._newest_sql(n), pgque._quiet_sql(), pgque._ordinary_sql());
  end loop;
end
$do$;

-- Creates the two functions for the ordinary deliveries of a queue, one for each leaf of
-- the journal.  The caller has the subscriber's lock.  They return nothing, and change
-- nothing, if the delivery is not ordinary or its window is empty.
--
-- As in _xids(), a window has the transactions from lo to hi, and each one that ran at
-- its first tick and is visible in its last one.  The window ends as in _open_window():
-- at the furthest of the next 100 ticks up to the number of events asked for, at least
-- at the next one.  One message more than asked for is read, to know whether the window
-- has more.
create or replace function pgque._create_ordinary(p_queue_id int) returns void
language plpgsql as $function$
declare
  v_events  text;
  v_ticks   text;
begin
  select pg_catalog.string_agg(pg_catalog.format(
      'select * from pgque.event_%s_%s e where e.ev_txid >= x.lo and e.ev_txid < x.hi and pg_catalog.pg_visible_in_snapshot(e.ev_txid, w.next_snapshot)'
      ' and (e.ev_owner is null or e.ev_owner = p_sub) and e.ev_id > coalesce(w.done_id, 0)', p_queue_id, n), ' union all ' order by n),
    pg_catalog.string_agg(pg_catalog.format(
      'select t.tick_id, t.tick_snapshot, t.tick_event_seq from pgque.tick_%s_%s t where t.tick_id > b.tick', p_queue_id, n), ' union all ' order by n)
  into v_events, v_ticks
  from pg_catalog.generate_series(0, 2) n;
  for n in 0..1 loop
    execute pg_catalog.format(
      $template$
      create or replace function pgque._ordinary_%1$s_%2$s(p_sub int, p_max bigint, p_worker text, p_timeout interval) returns setof pgque.delivery
      language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $body$
      declare
        v_now  timestamptz := pgque.clock();
      begin
        return query
        with w as materialized (
          select p.pos_seq, p.pos_last_batch, p.pos_high, p.pos_skipped, p.pos_prune, p.pos_lapse, p.pos_paid, s.sub_role, q.queue_name,
            case when p.closed then pg_catalog.array_remove(p.pos_open, p.pos_batch) else p.pos_open end as open,
            case when s.sub_role = 'pool' then v_now + coalesce(p_timeout, q.queue_visibility_timeout) else 'infinity' end as until,
            b.*, case when b.fresh then n.tick_id else p.pos_next_tick end as next_tick,
            case when b.fresh then n.tick_snapshot else p.pos_next_snapshot end as next_snapshot,
            case when b.fresh then n.tick_event_seq else p.pos_next_event_seq end as next_event_seq
          from pgque.subscriber s
          join pgque.queue q on q.queue_id = s.sub_queue
          join pgque.journal j on j.journal_id = 1 and j.journal_cur = %2$s
          cross join lateral %3$s
          cross join lateral (   -- where the window begins, and whether it is a new one
            select case when p.passed then p.pos_next_tick else p.pos_tick end as tick,
              case when p.passed then p.pos_next_snapshot else p.pos_snapshot end as snapshot,
              case when p.passed then p.pos_next_event_seq else p.pos_event_seq end as event_seq,
              case when p.passed then null when p.pos_fresh > 0 then p.pos_last_id else p.pos_done_id end as done_id,
              p.passed or p.pos_next_tick is null as fresh
          ) b
          left join lateral (
            select t.*
            from (select t.* from (%4$s) t order by t.tick_id limit 100) t
            order by t.tick_event_seq <= b.event_seq + case when s.sub_role = 'pool' then greatest(p_max, 1000) else p_max end desc,
              case when t.tick_event_seq <= b.event_seq + case when s.sub_role = 'pool' then greatest(p_max, 1000) else p_max end then - t.tick_id else t.tick_id end
            limit 1
          ) n on b.fresh
          where s.sub_id = p_sub and %5$s and %6$s
            and case when b.fresh then n.tick_event_seq else p.pos_next_event_seq end - b.event_seq <= greatest(10 * p_max, 500)   -- as in _is_big()
        ),
        m as materialized (
          select e.*
          from w
          cross join lateral (
            select pg_catalog.pg_snapshot_xmax(w.snapshot), pg_catalog.pg_snapshot_xmax(w.next_snapshot)
            union all
            select x.xid, (x.xid::text::bigint + 1)::text::xid8
            from pg_catalog.pg_snapshot_xip(w.snapshot) x (xid)
            where pg_catalog.pg_visible_in_snapshot(x.xid, w.next_snapshot)
          ) x (lo, hi)
          cross join lateral (%7$s offset 0) e
          order by e.ev_id
          limit p_max + 1
        ),
        d as (
          insert into pgque.position_%2$s (
            pos_sub, pos_seq, pos_time, pos_tick, pos_snapshot, pos_event_seq, pos_next_tick, pos_next_snapshot, pos_next_event_seq, pos_done_id,
            pos_last_id, pos_batch, pos_last_batch, pos_done_count, pos_high, pos_skipped, pos_worker, pos_until, pos_fresh, pos_shelf,
            pos_open, pos_prune, pos_lapse, pos_paid)
          select p_sub, w.pos_seq + 1, v_now, w.tick, w.snapshot, w.event_seq, w.next_tick, w.next_snapshot, w.next_event_seq, w.done_id,
            c.last_id, t.token, t.token, least(c.n, p_max), w.pos_high, w.pos_skipped, p_worker, w.until, least(c.n, p_max), 0,
            case when w.sub_role = 'pool' then w.open || t.token else array[t.token] end, coalesce(w.pos_prune, 64),
            case when w.sub_role = 'pool' then least(w.pos_lapse, w.until) else w.pos_lapse end, w.pos_paid
          from (select count(*) as n, case when count(*) > p_max then (pg_catalog.array_agg(m.ev_id order by m.ev_id))[p_max] end as last_id from m) c
          cross join w
          cross join lateral (
            -- as in _new_batch_id()
            select (greatest((w.pos_last_batch >> 20) + 1, ((extract(epoch from pg_catalog.clock_timestamp()) - 1735689600) * 4000)::bigint) << 20) | (p_sub & 1048575)
          ) t (token)
          where c.n > 0
          returning pos_batch
        )
        select m.ev_id, d.pos_batch, m.ev_type, m.ev_data, coalesce(m.ev_retry, 0), m.ev_time, m.ev_extra1, m.ev_extra2, m.ev_extra3, m.ev_extra4,
          m.ev_headers, m.ev_key, m.ev_bytes, coalesce(m.ev_retry, 0) + 1, m.ev_error, m.ev_expires, w.queue_name
        from d
        cross join w
        cross join m
        order by m.ev_id
        limit p_max;
      end
      $body$
      $template$, p_queue_id, n, pgque._newest_sql(n), v_ticks, pgque._quiet_sql(), pgque._ordinary_sql(), v_events);
  end loop;
end
$function$;

-- _done_0 and _done_1: acknowledge a batch that was delivered from the log, in one
-- statement.  Each uses one leaf of the journal.  Returns false, and changes nothing, if
-- the batch is not there, has messages in the retry queue, or is closed.  The caller has
-- the batch's lock.
do $do$
begin
  for n in 0..1 loop
    execute pg_catalog.format(
      $template$
      create or replace function pgque._done_%1$s(p_batch bigint, p_sub int) returns boolean
      language plpgsql as $body$
      begin
        insert into pgque.settled_%1$s (set_batch, set_ev_id, set_sub)
        select p_batch, 0, p_sub
        from pgque.position_%1$s p
        where p.pos_batch = p_batch and p.pos_sub + 0 = p_sub and p.pos_fresh > 0 and p.pos_shelf = 0
          and (select j.journal_cur from pgque.journal j where j.journal_id = 1) = %1$s
          and (select true from pgque.retry_queue r where r.ev_owner = p_sub and r.ev_batch = p_batch limit 1) is null
        limit 1
        on conflict do nothing;
        return found;
      end
      $body$
      $template$, n);
  end loop;
end
$do$;
