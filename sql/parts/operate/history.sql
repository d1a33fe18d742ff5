-- ---------------------------------------------------------------------------
-- history: what queues and consumers did, and who changed what
-- ---------------------------------------------------------------------------

-- A binary search over ids finds the newest tick at each of these times, for all times
-- in one statement: a busy queue has too many ticks to read.
create or replace function pgque.queue_rates(
  queue_name text, since interval default '6 hours', buckets int default 72, caller pgque.caller default current_user,
  out start_at timestamptz, out events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'see');
  v_first  pgque.tick;
  v_end    timestamptz := pgque.clock();
begin
  if ($2 > '0' and $2 <= '1 year' and $3 between 1 and 1000) is not true then
    perform pgque._fail('PQ005', format('invalid rates of queue %I: the last %s in %s buckets', v_queue.queue_name, coalesce($2::text, 'null'), coalesce($3::text, 'null')),
      'Pass since as an interval of at most a year, and 1 to 1000 buckets: select * from pgque.queue_rates(queue, ''6 hours'', 72);');
  end if;
  v_first := pgque._find_tick(v_queue, 'earliest');
  return query execute format(
    $q$
    with recursive search as (
      select n, $1 - ($3 - n) * $2 / $3 as at, $4 as low, $5 + 1 as high
      from generate_series(0, $3) n
      union all
      select s.n, s.at, case when m.tick_id < s.high and m.tick_time <= s.at then m.tick_id else s.low end,
        case when m.tick_id < s.high and m.tick_time <= s.at then s.high else (s.low + s.high) / 2 end
      from search s
      left join lateral (
        select t.tick_id, t.tick_time from (%1$s) t where t.tick_id >= (s.low + s.high) / 2 order by t.tick_id limit 1
      ) m on true
      where s.high - s.low > 1
    )
    select s.at, lead(t.tick_event_seq) over (order by s.n) - t.tick_event_seq
    from search s
    cross join lateral (select t.tick_event_seq from (%1$s) t where t.tick_id = s.low) t
    where s.high - s.low <= 1
    order by s.n
    limit $3
    $q$, pgque._ticks_sql(v_queue.queue_id))
  using v_end, $2, $3, v_first.tick_id, (pgque._last_tick(v_queue)).tick_id;
end
$$;
comment on function pgque.queue_rates(text, interval, int, pgque.caller) is
  'Returns how many messages were sent to a queue. An interval (since, at most a year) that ends now is divided into buckets (1 to 1000) of equal '
  'length; each row has the start of one and the number of messages that ticks cover. The ticks go back two to three rotation periods, or to the '
  'slowest consumer; the time before counts as 0. Errors: PQ001 no such queue; PQ005 since or buckets out of range.';

-- Records a change that a role made by hand, in the same transaction.  A null argument
-- was left out, except the value of a setting: there it restores the default.
create or replace function pgque._record_action(p_call text, p_queue text, p_args jsonb default null) returns void
language plpgsql as $$
begin
  if not exists (select from pgque.config c where c.keep_actions is null) then
    insert into pgque.action (act_time, act_role, act_application, act_call, act_queue, act_args, leaf)
    select pgque.clock(), session_user, nullif(pg_catalog.current_setting('application_name'), ''), p_call, p_queue,
      nullif(case when p_call = 'alter_queue' or pg_catalog.right(p_call, 7) = '_config' then p_args else pg_catalog.jsonb_strip_nulls(p_args) end, '{}'), l.last_value
    from pgque.action_leaf l;
  end if;
end
$$;

create or replace function pgque.list_actions(
  queue_name text default null, limit_count int default 100, before timestamptz default null,
  out at timestamptz, out role_name name, out application text, out call text, out queue text, out args jsonb
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  return query
    select a.act_time, a.act_role, a.act_application, a.act_call, a.act_queue, a.act_args
    from pgque.action a
    where ($1 is null or a.act_queue = $1 collate "default") and ($3 is null or a.act_time < $3)
    order by a.act_time desc
    limit case when $2 < 0 then 0 else $2 end;
end
$$;
comment on function pgque.list_actions(text, int, timestamptz) is
  'Returns the changes that roles made by hand to queues, settings, positions, rights and messages, the newest first. role_name: the role that was '
  'logged in. application: the application_name of its session. call: the function (alter_queue also for set_queue_config). args: the arguments, '
  'without payloads and keys. Changes that were rolled back are not listed. queue_name: only those of this queue, by its name at that time. before: '
  'only older ones. set_history(''actions'', …) sets how long actions are kept. Only for the role pgque_admin.';

create or replace function pgque.consumer_lags(
  queue_name text, consumer_name text default null, since interval default '6 hours', caller pgque.caller default current_user,
  out at timestamptz, out consumer text, out lag_seconds real, out pending_events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queue  pgque.queue := pgque._queue($1, caller, 'see');
  v_sub    int := case when $2 is not null then (pgque._subscriber($1, $2, caller)).sub_id end;
begin
  if ($3 > '0') is not true then
    perform pgque._fail('PQ005', format('invalid lags of queue %I: the last %s', v_queue.queue_name, coalesce($3::text, 'null')),
      'Pass since as an interval above 0: select * from pgque.consumer_lags(queue, null, ''6 hours'');');
  end if;
  return query
    select s.smp_time, pgque._subscriber_name(b), s.smp_lag, s.smp_pending
    from pgque.subscriber b
    cross join lateral pgque._samples(b.sub_queue, b.sub_id, pgque.clock() - $3) s
    where b.sub_queue = v_queue.queue_id and b.sub_main is null and (v_sub is null or b.sub_id = v_sub) and s.smp_time >= pgque.clock() - $3 and s.smp_lag > 1
    order by s.smp_time, 2;
end
$$;
comment on function pgque.consumer_lags(text, text, interval, pgque.caller) is
  'Returns the lag of the consumers of a queue, or of one of them, for an interval (since) that ends now. Each minute, maint() takes a sample of '
  'every consumer that has not finished the messages that ticks cover; a consumer without a sample had finished them. After a day, one sample an '
  'hour is left, with the greatest lag. lag_seconds: age of the '
  'oldest pending message. pending_events: as in get_consumer_info(). Unit: seconds, messages. set_history(''lags'', …) sets how long samples are '
  'kept. Errors: PQ001 no such queue; PQ005 since is not above 0; PQ011 not subscribed.';

-- Takes a lock if it is free, and returns whether it did.
create or replace function pgque._can_lock(p_table regclass, p_mode text) returns boolean
language plpgsql as $$
begin
  execute pg_catalog.format('lock table %s in %s mode nowait', p_table, p_mode);
  return true;
exception
  when lock_not_available then
    return false;
end
$$;

-- Returns the samples of a queue (p_sub 0), a consumer, or all queues (0, 0) since a time,
-- and the last one before it: those of each minute, and for the time before these, those
-- of each hour.
create or replace function pgque._samples(p_queue int, p_sub int, p_since timestamptz) returns setof pgque.sample
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_minutes  timestamptz := (select min(s.smp_time) from pgque.sample s where s.smp_queue = p_queue and s.smp_sub = p_sub);
begin
  return query
    select f.*
    from (
      select s.* from pgque.sample s where s.smp_queue = p_queue and s.smp_sub = p_sub and s.smp_time >= p_since
      union all
      select h.* from pgque.sample_hour h
      where h.smp_queue = p_queue and h.smp_sub = p_sub and h.smp_time >= p_since and (h.smp_time < v_minutes or v_minutes is null)
      union all
      (
        select b.*
        from (
          (select s.* from pgque.sample s where s.smp_queue = p_queue and s.smp_sub = p_sub and s.smp_time < p_since order by s.smp_time desc limit 1)
          union all
          (select h.* from pgque.sample_hour h where h.smp_queue = p_queue and h.smp_sub = p_sub and h.smp_time < p_since order by h.smp_time desc limit 1)
        ) b
        order by b.smp_time desc
        limit 1
      )
    ) f;
end
$$;

-- Returns when no samples were taken: before the first one, between two that are further
-- apart than three minutes, and since the last one if it is as old.
create or replace function pgque._unsampled(p_since timestamptz) returns tstzmultirange
language sql set enable_seqscan = off set jit = off as $$
  select coalesce(pg_catalog.range_agg(g.gap), '{}')
  from (
    select tstzrange(s.smp_gap, s.smp_time) as gap
    from (
      select s.smp_gap, s.smp_time from pgque.sample s where s.smp_queue = 0 and s.smp_sub = 0 and s.smp_time >= p_since
      union all
      select h.smp_gap, h.smp_time from pgque.sample_hour h where h.smp_queue = 0 and h.smp_sub = 0 and h.smp_time >= p_since
    ) s
    where s.smp_gap <= s.smp_time
    union all
    select tstzrange(null, least(
      (select min(s.smp_time) from pgque.sample s where s.smp_queue = 0 and s.smp_sub = 0),
      (select min(h.smp_time) from pgque.sample_hour h where h.smp_queue = 0 and h.smp_sub = 0)))
    union all
    select tstzrange(l.at, null)
    from (select to_timestamp(coalesce(pg_catalog.pg_sequence_last_value('pgque.sampled'), 0)) as at) l
    where l.at < pgque.clock() - interval '3 minutes'
  ) g
$$;

create or replace function pgque.history(
  queue_name text default null, consumer_name text default null, since interval default '6 hours', buckets int default 72,
  caller pgque.caller default current_user,
  out start_at timestamptz, out sent bigint, out delivered bigint, out failed bigint, out dead bigint, out lag_seconds real, out pending_events bigint
) returns setof record
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
declare
  v_queues  int[] := pgque._visible($1, caller);
  v_sub     int;
  v_end     timestamptz := pgque.clock();
  v_width   interval := $3 / nullif($4, 0);
  v_gaps    tstzmultirange;
  v_every   boolean := $1 is null and pgque._may(caller, 'see', null);   -- whether the samples of all queues are the caller's to see
begin
  if ($3 > '0' and $3 <= '1 year' and $4 between 1 and 1000 and ($2 is null or $1 is not null)) is not true then
    perform pgque._fail('PQ005', format('invalid history of %s: the last %s in %s buckets', coalesce('queue ' || quote_ident($1), 'all queues'), coalesce($3::text, 'null'), coalesce($4::text, 'null')),
      'Pass since as an interval of at most a year, 1 to 1000 buckets, and a consumer only with its queue: select * from pgque.history(queue, consumer, ''6 hours'', 72);');
  end if;
  v_sub := case when $2 is not null then (pgque._subscriber($1, $2, caller)).sub_id end;
  v_gaps := pgque._unsampled(v_end - $3);
  return query
    with series as materialized (
      select 0 as queue, 0 as sub, null::timestamptz as born where v_every
      union all
      select q.queue_id, p.sub, case when p.sub = 0 then q.queue_created_at end
      from pgque.queue q
      cross join lateral (select 0 as sub union all select s.sub_id from pgque.subscriber s where s.sub_queue = q.queue_id and s.sub_main is null) p
      where q.queue_id = any (v_queues) and not v_every and (v_sub is null or p.sub in (0, v_sub))
    ), step as materialized (
      -- Messages sent or delivered while no samples were taken count nowhere.
      select s.smp_time, s.smp_queue = 0 or s.smp_sub > 0 as lags, s.smp_lag, s.smp_pending, f.known,
        greatest(s.smp_sent - coalesce(lag(s.smp_sent) over w, case when r.born >= s.smp_time - interval '3 minutes' then 0 end), 0) as sent,
        greatest(s.smp_passed - lag(s.smp_passed) over w, 0) as passed,
        greatest(s.smp_redelivered - lag(s.smp_redelivered) over w, 0) as again,
        greatest(s.smp_removed - lag(s.smp_removed) over w, 0) + greatest(s.smp_dead - lag(s.smp_dead) over w, 0) as dead
      from series r
      cross join lateral pgque._samples(r.queue, r.sub, v_end - $3) s
      cross join lateral (select not exists (select from unnest(v_gaps) g where upper(g) = s.smp_time)) f (known)
      window w as (partition by s.smp_queue, s.smp_sub order by s.smp_time)
    ), bucket as materialized (
      select n, v_end - $3 + n * v_width as at, v_end - $3 + (n + 1) * v_width as until from generate_series(0, $4 - 1) n
    ), filled as materialized (
      select floor(extract(epoch from t.smp_time - (v_end - $3)) / extract(epoch from v_width))::int as n,
        sum(t.sent) filter (where t.known) as sent, sum(t.passed) filter (where t.known) as passed,
        sum(t.again) filter (where t.known) as again, sum(t.dead) filter (where t.known) as dead,
        max(t.smp_lag) as lag, max(t.smp_pending) as pending, bool_or(t.lags and t.smp_lag is null) as unclear
      from step t
      where t.smp_time >= v_end - $3
      group by 1
    )
    select b.at, x.sent, x.passed, x.again + x.dead, x.dead, x.lag, x.pending
    from bucket b
    left join filled f on f.n = b.n
    left join lateral (
      select coalesce(f.sent, 0)::bigint as sent, coalesce(f.passed, 0)::bigint as passed, coalesce(f.again, 0)::bigint as again, coalesce(f.dead, 0)::bigint as dead,
        coalesce(f.lag, case when f.unclear is not true then 0 end) as lag, coalesce(f.pending, case when f.unclear is not true then 0 end) as pending
      -- Half a bucket is enough to tell what its rest was like.
      where coalesce((select sum(upper(g) - lower(g)) from unnest(v_gaps * tstzmultirange(tstzrange(b.at, b.until))) g), '0') <= v_width / 2
    ) x on true
    order by b.n;
end
$$;
comment on function pgque.history(text, text, interval, int, pgque.caller) is
  'Returns what a queue did, or one of its consumers, or all queues that the caller may see (NULL). An interval (since, at most a year) that ends now is divided into buckets (1 to '
  '1000) of equal length, one a row. Each minute, maint() takes a sample of figures that exist anyway; after a day, one sample an hour is left. All columns are NULL '
  'for a bucket of which more than half was not sampled, because nothing ran maint(). '
  'sent: messages sent to the queue, also those that were rolled back. '
  'delivered: by how many messages the position of the consumers moved forward, each message once for each consumer; expired and cancelled messages are among them, those that '
  'retention_period skipped are not. failed: deliveries that failed or whose lease expired, counted when the message is redelivered or given up. dead: messages given up, '
  'that is dead letters, also those that were forwarded, and messages that drop_policy dropped. A dead letter that was deleted or requeued within the minute is missing. '
  'lag_seconds, pending_events: greatest value of a consumer, as in consumer_lags(); at most 200 of those that lag are measured a minute; NULL if a consumer lagged and none was measured. Unit: messages, seconds. '
  'set_history(''lags'', …) sets how long samples are kept. Errors: PQ001 no such queue; PQ005 since or buckets out of range, or a consumer without a queue; PQ011 not subscribed.';

-- Returns whether the last tick may be ahead of a consumer, or batches of it are open.  A
-- position moves past a window with the call after its ack.
create or replace function pgque._is_behind(p_queue pgque.queue, p_pos pgque.position) returns boolean
language sql volatile as $$
  select coalesce(n.tick < pg_catalog.pg_sequence_last_value(p_queue.queue_tick_seq) and n.seq < pg_catalog.pg_sequence_last_value(p_queue.queue_event_seq), false)
    or exists (select from pg_catalog.unnest(p_pos.pos_open) o (token) where not pgque._is_finished(o.token))
  from (select p_pos.pos_fresh > 0 and p_pos.pos_last_id is null and pgque._is_finished(p_pos.pos_batch)) w (past)
  cross join lateral (
    select case when w.past then p_pos.pos_next_tick else p_pos.pos_tick end, case when w.past then p_pos.pos_next_event_seq else p_pos.pos_event_seq end
  ) n (tick, seq)
$$;

create or replace function pgque._is_finished(p_batch bigint) returns boolean
language sql volatile as $$ select exists (select from pgque.settled s where s.set_batch = p_batch and s.set_ev_id = 0 and s.set_what = 'closed') $$;

-- Stores the samples of some queues, of their consumers, and of all queues together.  A
-- row whose figures have not changed is not written, unless the leaf is new or samples
-- were missing before.  p_subs, p_lags, p_pending: the lags that were measured.  p_before:
-- the time of the samples before.
create or replace function pgque._add_samples(
  p_queues int[], p_subs int[], p_lags real[], p_pending bigint[], p_before timestamptz
) returns void
language plpgsql set enable_seqscan = off set jit = off as $$
declare
  v_now   timestamptz := pgque.clock();
  v_leaf  int := (select l.last_value from pgque.sample_leaf l);
  v_dead  bigint := coalesce(pg_catalog.pg_sequence_last_value('pgque.dead_letter_dl_id_seq'), 0);
  v_all   pgque.sample;
  v_gap   timestamptz;
begin
  -- If the clock was set back, samples of its future would stand between later ones, and
  -- their counters would go up and down.  Without them, the counters go on.
  if p_before > v_now then
    delete from pgque.sample s where s.smp_time > v_now;
    delete from pgque.sample_hour h where h.smp_time > v_now;
  end if;
  select s.* into v_all from pgque.sample s where s.smp_queue = 0 and s.smp_sub = 0 order by s.smp_time desc limit 1;
  v_gap := case
    when v_all.smp_time is null then v_now
    when p_before not between v_now - interval '3 minutes' and v_now then greatest(p_before, v_all.smp_time)
  end;
  with counted as materialized (
    select t.tal_sub, sum(t.tal_count) filter (where t.tal_what = 'redelivered') as redelivered, sum(t.tal_count) filter (where t.tal_what in ('dropped', 'forwarded')) as removed
    from pgque.tally t
    where t.tal_sub <> 0
    group by 1
  ), letter as materialized (
    select d.dl_queue_id, d.dl_consumer_id, count(*) as n
    from pgque.dead_letter d
    where d.dl_id > greatest(coalesce(v_all.smp_mark, v_dead), v_dead - 100000) and d.dl_id <= v_dead and d.dl_forward is null
    group by 1, 2
  ), figure as materialized (
    select q.queue_id as queue, 0 as sub, coalesce(pg_sequence_last_value(q.queue_event_seq), 0) as sent, null::bigint as passed, null::bigint as redelivered, null::bigint as removed,
      null::bigint as letters, null::real as lag, null::bigint as pending, q.queue_created_at as born
    from pgque.queue q
    where q.queue_id = any (p_queues)
    union all
    select s.sub_queue, s.sub_id, null,
      case
        when (n.pos).pos_fresh > 0 and (n.pos).pos_last_id is null then (n.pos).pos_next_event_seq
        else greatest((n.pos).pos_event_seq, least(case when (n.pos).pos_fresh > 0 then (n.pos).pos_last_id else (n.pos).pos_done_id end, (n.pos).pos_next_event_seq))
      end - (n.pos).pos_skipped,
      coalesce(c.redelivered, 0), coalesce(c.removed, 0), coalesce(l.n, 0),
      case when m.sub is null and not pgque._is_behind(q, n.pos) then 0 else m.lag end, case when m.sub is null and not pgque._is_behind(q, n.pos) then 0 else m.pending end, null
    from pgque.queue q
    join pgque.subscriber s on s.sub_queue = q.queue_id and s.sub_main is null
    cross join lateral (select p as pos from pgque.position p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1) n
    left join counted c on c.tal_sub = s.sub_id
    left join letter l on l.dl_queue_id = s.sub_queue and l.dl_consumer_id = s.sub_consumer
    left join unnest(p_subs, p_lags, p_pending) m (sub, lag, pending) on m.sub = s.sub_id
    where q.queue_id = any (p_queues)
  ), step as materialized (
    select f.*, o.smp_dead, o.smp_sent, o.smp_passed, o.smp_redelivered, o.smp_removed,
      v_gap is not null or o.leaf is distinct from v_leaf or f.letters > 0 or f.sub <> 0 and coalesce(f.lag, 1) > 0
        or (f.sent, f.passed, f.redelivered, f.removed, f.lag, f.pending)
          is distinct from (o.smp_sent, o.smp_passed, o.smp_redelivered, o.smp_removed, o.smp_lag, o.smp_pending) as changed
    from figure f
    left join lateral (
      select s.* from pgque.sample s where s.smp_queue = f.queue and s.smp_sub = f.sub order by s.smp_time desc limit 1
    ) o on true
  ), added as (
    insert into pgque.sample (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead)
    select v_now, t.queue, t.sub, t.lag, t.pending, v_leaf, t.sent, t.passed, t.redelivered, t.removed, case when t.sub <> 0 then coalesce(t.smp_dead, 0) + t.letters end
    from step t
    where t.changed
  ), total as materialized (
    -- Sums of what was added, so that a queue that is dropped takes nothing back.
    select
      coalesce(sum(greatest(t.sent - coalesce(t.smp_sent, case when t.born >= p_before then 0 end), 0)), 0) as sent,
      coalesce(sum(greatest(t.passed - t.smp_passed, 0)), 0) as passed,
      coalesce(sum(greatest(t.redelivered - t.smp_redelivered, 0)), 0) as redelivered,
      coalesce(sum(greatest(t.removed - t.smp_removed, 0)), 0) as removed,
      coalesce(sum(t.letters), 0) as letters, coalesce(max(t.lag), 0) as lag, coalesce(max(t.pending), 0) as pending
    from step t
  )
  insert into pgque.sample (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead, smp_mark, smp_gap)
  select v_now, 0, 0, a.lag, a.pending, v_leaf, coalesce(v_all.smp_sent, 0) + a.sent, coalesce(v_all.smp_passed, 0) + a.passed, coalesce(v_all.smp_redelivered, 0) + a.redelivered,
    coalesce(v_all.smp_removed, 0) + a.removed, coalesce(v_all.smp_dead, 0) + a.letters, v_dead, v_gap
  from total a
  where v_gap is not null or v_all.leaf <> v_leaf or a.sent + a.passed + a.redelivered + a.removed + a.letters > 0
    or v_dead <> v_all.smp_mark or a.lag > 0 or (a.lag, a.pending) is distinct from (v_all.smp_lag, v_all.smp_pending);
  -- The hour of the run before is over, or nothing is known of its rest.
  if v_gap is not null or date_trunc('hour', p_before) <> date_trunc('hour', v_now) then
    insert into pgque.sample_hour (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead)
    select o.smp_time, o.smp_queue, o.smp_sub, h.lag, h.pending, h.leaf, o.smp_sent, o.smp_passed, o.smp_redelivered, o.smp_removed, o.smp_dead
    from (
      select 0 as queue, 0 as sub
      union all
      select q.id, 0 from unnest(p_queues) q (id)
      union all
      select s.sub_queue, s.sub_id from pgque.subscriber s where s.sub_queue = any (p_queues) and s.sub_main is null
    ) r
    cross join lateral (
      select max(s.smp_time) as last, max(s.smp_lag) as lag, max(s.smp_pending) as pending, (select l.last_value from pgque.sample_hour_leaf l) as leaf
      from pgque.sample s
      where s.smp_queue = r.queue and s.smp_sub = r.sub and s.smp_time >= date_trunc('hour', p_before) and s.smp_time < v_now
    ) h
    join pgque.sample o on o.smp_queue = r.queue and o.smp_sub = r.sub and o.smp_time = h.last;
  end if;
  -- So that also the hours count nothing of a gap, and all that follows it.
  if v_gap is not null then
    insert into pgque.sample_hour (smp_time, smp_queue, smp_sub, smp_lag, smp_pending, leaf, smp_sent, smp_passed, smp_redelivered, smp_removed, smp_dead, smp_gap)
    select s.smp_time, s.smp_queue, s.smp_sub, s.smp_lag, s.smp_pending, l.last_value, s.smp_sent, s.smp_passed, s.smp_redelivered, s.smp_removed, s.smp_dead, s.smp_gap
    from pgque.sample s, pgque.sample_hour_leaf l
    where s.smp_time = v_now;
  end if;
end
$$;

-- Returns 0, also if another session takes the samples, or a minute has not passed.  The
-- lag of a consumer needs the tables of its queue, and a search in them.  So it is
-- measured for at most 200 consumers a minute, those with the most messages ahead first,
-- and only for those that the last tick is ahead of.  The loop ticks no queue meanwhile, so
-- a locked queue is waited for only once.  Each queue keeps two locks until the transaction
-- ends.  If the server has no room for all queues, some are chosen at random: counters go
-- on, so that the next sample of the others has what this one lacks.
create or replace function pgque.maint_lags() returns int
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_before   timestamptz;
  v_behind   record;
  v_found    record;
  v_queues   int[];
  v_subs     int[] := '{}';   -- of which the lag is known, and the lags
  v_lags     real[] := '{}';
  v_pending  bigint[] := '{}';
  v_locked   int[] := '{}';
  v_end      timestamptz := clock_timestamp() + interval '1 second';
begin
  perform pgque._need_read_committed('maint_lags()');
  if pgque._is_loading() or exists (select from pgque.config c where c.keep_lags is null)
    or not pgque._is_due(to_timestamp(coalesce(pg_sequence_last_value('pgque.sampled'), 0)), '1 minute')
    or not pg_try_advisory_xact_lock(hashtext('pgque.sample'), 0)
  then
    return 0;
  end if;
  -- Another session may have taken the samples before this one had the lock.
  v_before := to_timestamp(coalesce(pg_sequence_last_value('pgque.sampled'), 0));
  if not pgque._is_due(v_before, '1 minute') or not pgque._can_lock('pgque.sample', 'row exclusive') or not pgque._can_lock('pgque.sample_hour', 'row exclusive') then
    return 0;
  end if;
  perform setval('pgque.sampled', floor(extract(epoch from pgque.clock()))::bigint);
  v_queues := array(select q.queue_id from pgque.queue q order by random() limit pgque._lock_room() / 4);
  for v_behind in
    select q, s, n.pos
    from pgque.queue q
    join pgque.subscriber s on s.sub_queue = q.queue_id
    cross join lateral (select p as pos from pgque.position p where p.pos_sub = s.sub_id order by p.pos_seq desc limit 1) n
    where s.sub_main is null and q.queue_id = any (v_queues) and pgque._is_behind(q, n.pos)
    order by pg_sequence_last_value(q.queue_event_seq) - (n.pos).pos_event_seq desc
    limit 200
  loop
    exit when clock_timestamp() > v_end;
    continue when (v_behind.q).queue_id = any (v_locked);
    begin
      perform pgque._shorten_lock_timeout();
      select c.lag, c.pending_events into v_found
      from pgque._consumers(v_behind.q, array[v_behind.s], array[v_behind.pos], pgque._missing_leaf((v_behind.q).queue_id) is not null) c;
      perform pgque._undo_block();
    exception
      when sqlstate 'PQ099' then
        v_subs := v_subs || (v_behind.s).sub_id;
        v_lags := v_lags || extract(epoch from v_found.lag)::real;
        v_pending := v_pending || v_found.pending_events;
      when others then
        v_locked := v_locked || (v_behind.q).queue_id;   -- locked, or dropped meanwhile
    end;
  end loop;
  perform pgque._add_samples(v_queues, v_subs, v_lags, v_pending, v_before);
  return 0;
end
$$;
comment on function pgque.maint_lags() is
  'Part of maint(): takes the samples of history() and consumer_lags(), at most once a minute. Returns 0, since it leaves nothing to do. Errors: 25000 in a REPEATABLE READ or '
  'SERIALIZABLE transaction.';

create or replace function pgque.set_history(what text, keep interval) returns interval
language plpgsql security definer set search_path = pg_catalog, pgque, pg_temp set jit = off as $$
begin
  perform pgque._init();
  if pgque._period($2::text) > '100 years' then
    raise data_exception using message = 'more than 100 years';
  elsif $2 is null then
    perform pgque._record_action('set_history', null, jsonb_build_object('what', $1, 'keep', 'off'));
  end if;
  if $1 = 'actions' then
    update pgque.config c set keep_actions = $2;
  elsif $1 = 'lags' then
    update pgque.config c set keep_lags = $2;
  else
    raise data_exception using message = 'no such history';
  end if;
  perform pgque._record_action('set_history', null, jsonb_build_object('what', $1, 'keep', $2)) where $2 is not null;
  return $2;
exception
  when data_exception or check_violation then
    perform pgque._fail('PQ005', format('invalid history: %s for %s', quote_nullable($2), quote_nullable($1)),
      'Use actions or lags, and an interval such as 30 days, at most 100 years, or NULL for off. The setting is unchanged.', sqlerrm);
end
$$;
comment on function pgque.set_history(text, interval) is
  'Sets how long the history of actions (list_actions(); 30 days by default) or of figures (lags: history() and consumer_lags(); 7 days) is kept at least, and returns '
  'that interval. NULL stops the recording; older entries stay. A history that fills 64 MB is cut to its newer half. Errors: PQ005 no such '
  'history, or keep is not above 0, or above 100 years.';

-- Empties the other leaf of a history once the current one reaches back far enough, or
-- is full.  The next call makes the empty leaf the current one.  So recording never
-- waits for a transaction that emptied a leaf and stays open.  A history that is off
-- keeps its rows.
create or replace function pgque._rotate_history() returns int
language plpgsql as $$
declare
  v_history  record;
  v_leaf     int;
  v_other    text;
  v_due      boolean;
  v_count    int := 0;
begin
  for v_history in
    select h.name, h.time, pgque.clock() - h.keep as since
    from pgque.config c
    cross join lateral (values ('action', 'act_time', c.keep_actions), ('sample', 'smp_time', least(c.keep_lags, '1 day')), ('sample_hour', 'smp_time', c.keep_lags)) h (name, time, keep)
    where h.keep is not null
  loop
    continue when not pgque._can_lock(('pgque.' || v_history.name)::regclass, 'access share');
    execute pg_catalog.format('select l.last_value from pgque.%I l', v_history.name || '_leaf') into v_leaf;
    execute pg_catalog.format(
      'select (select h.%1$I from pgque.%2$I h limit 1) < $1 and not exists (select from pgque.%3$I h where h.%1$I >= $1)'
      ' or pg_catalog.pg_relation_size(%4$L) > 33554432',
      v_history.time, v_history.name || '_' || v_leaf, v_history.name || '_' || (1 - v_leaf), 'pgque.' || v_history.name || '_' || v_leaf)
    into v_due using v_history.since;
    v_other := pg_catalog.format('pgque.%s_%s', v_history.name, 1 - v_leaf);
    if v_due and pg_catalog.pg_relation_size(v_other) > 0 then
      v_count := v_count + pgque._empty(v_other::regclass, false);
    elsif v_due then
      perform pg_catalog.setval('pgque.' || v_history.name || '_leaf', 1 - v_leaf);
      v_count := v_count + 1;
    end if;
  end loop;
  return v_count;
end
$$;
